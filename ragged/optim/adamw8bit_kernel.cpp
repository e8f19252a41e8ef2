// Compiled with -ffp-contract=off (CMakeLists.txt). Two passes over a panel: the first advances every element and
// keeps what is to be encoded, the second encodes it, once the tiles' scales are known.
#include "ragged/optim/adamw8bit_kernel.h"

#include "ragged/optim/isa_targets.h"
#include "ragged/optim/lane_elements.h"

namespace ragged::optim {
namespace {

// What lies between the passes, and rows in the making. Each loop below is over one width of lanes: bytes are widened
// and narrowed in loops of their own, and a tile's scale is repeated for each of its columns, which vectorises cleanly
// where mixed widths don't. Magnitudes are compared as bits, which order like the numbers; a maximum a column, so that
// the lanes of a vector never meet.
struct Scratch {
  alignas(64) float first[kTileRows][kPanelColumns];
  alignas(64) float kept[kTileRows][kPanelColumns];
  alignas(64) std::int32_t first_largest[kPanelColumns];
  alignas(64) std::int32_t second_largest[kPanelColumns];
  alignas(64) float first_by_column[kPanelColumns];  // scales, then factors
  alignas(64) float second_by_column[kPanelColumns];
  alignas(64) std::int32_t first_numbers[kPanelColumns];
  alignas(64) std::int32_t second_numbers[kPanelColumns];
  alignas(64) float grads[kPanelColumns];
};

struct Call {
  const AdamWStep& step;
  float grad_scale;
  const TilePanel& panel;
};

// The same row of the panel after next, of two arrays of one width in turn. Rows of a panel are too short, and too far
// apart, for the hardware to see them coming. Past the end of the matrix this asks for memory that nobody needs, or
// that isn't there, which is allowed.
template <class T, class U>
RAGGED_INLINE_KERNEL void prefetch(const T* one, const U* other, int columns) {
  constexpr int kAhead = 2 * kPanelColumns;
  constexpr int kStep = 64 / static_cast<int>(sizeof(T));
  for (int j = 0; j < columns; j += kStep) {
    __builtin_prefetch(one + kAhead + j);
    __builtin_prefetch(other + kAhead + j);
  }
}

RAGGED_INLINE_KERNEL void by_column(int columns, const float* by_tile, float* __restrict out) {
  for (int c = 0; c < columns; ++c) out[c] = by_tile[c / kTileColumns];
}

template <class Codes, bool kGuards, class Grad, bool kImage>
struct Kernel {
  // One row. Returns how many gradients weren't finite.
  static RAGGED_INLINE_KERNEL std::int32_t advance(
      const Codes codes, const AdamWStep s, const int columns, const std::int32_t* __restrict first_numbers,
      const std::int32_t* __restrict second_numbers, const float* __restrict first_scales,
      const float* __restrict second_scales, float* __restrict params, const float* __restrict grads,
      float* __restrict first, float* __restrict kept, std::int32_t* __restrict first_largest,
      std::int32_t* __restrict second_largest) {
    std::int32_t not_finite = 0;
    for (int j = 0; j < columns; ++j) {
      const TileMoments old =
          decode_numbers<Codes, kGuards>(codes, first_numbers[j], second_numbers[j], first_scales[j], second_scales[j]);
      const TileElement next = step_element(codes, s, params[j], grads[j], old);
      params[j] = next.param;
      first[j] = next.first;
      kept[j] = next.kept;
      const auto first_size = static_cast<std::int32_t>(bits_of(next.first_size));
      const auto second_size = static_cast<std::int32_t>(bits_of(next.second));
      first_largest[j] = first_largest[j] > first_size ? first_largest[j] : first_size;
      second_largest[j] = second_largest[j] > second_size ? second_largest[j] : second_size;
      not_finite += next.finite ? 0 : 1;
    }
    return not_finite;
  }

  static RAGGED_INLINE_KERNEL void encode(
      const Codes codes, const int columns, const float* __restrict first_factors,
      const float* __restrict second_factors, const float* __restrict first, const float* __restrict kept,
      std::int32_t* __restrict first_numbers, std::int32_t* __restrict second_numbers) {
    for (int j = 0; j < columns; ++j) {
      first_numbers[j] = codes.encode_first(first[j], first_factors[j]);
      second_numbers[j] = encode_second_guarded<Codes, kGuards>(codes, kept[j], second_factors[j]);
    }
  }

  static RAGGED_INLINE_KERNEL std::int64_t advance_all(const Codes codes, const Call& call, Scratch& scratch) {
    const TilePanel& p = call.panel;
    const int columns = p.columns;
    const float grad_scale = call.grad_scale;
    by_column(columns, p.first_scales, scratch.first_by_column);
    by_column(columns, p.second_scales, scratch.second_by_column);
    std::int64_t not_finite = 0;
    for (int r = 0; r < p.rows; ++r) {
      const std::int64_t at = r * p.stride;
      const Grad* __restrict grads = static_cast<const Grad*>(p.grads) + at;
      const std::uint8_t* __restrict first_codes = p.first_codes + at;
      const std::uint8_t* __restrict second_codes = p.second_codes + at;
      prefetch(p.params + at, grads, columns);
      prefetch(first_codes, second_codes, columns);
      if (kImage) prefetch(p.image + at, p.image + at, columns);
      for (int j = 0; j < columns; ++j) scratch.first_numbers[j] = Codes::first_number(first_codes[j]);
      for (int j = 0; j < columns; ++j) scratch.second_numbers[j] = Codes::second_number(second_codes[j]);
      for (int j = 0; j < columns; ++j) scratch.grads[j] = load(grads[j]) * grad_scale;
      not_finite += advance(
          codes, call.step, columns, scratch.first_numbers, scratch.second_numbers, scratch.first_by_column,
          scratch.second_by_column, p.params + at, scratch.grads, scratch.first[r], scratch.kept[r],
          scratch.first_largest, scratch.second_largest);
      if (kImage) {
        const float* __restrict params = p.params + at;
        std::uint16_t* __restrict image = p.image + at;
        for (int j = 0; j < columns; ++j) image[j] = narrow(params[j]);
      }
    }
    return not_finite;
  }

  static RAGGED_INLINE_KERNEL void encode_all(const Codes codes, const Call& call, Scratch& scratch) {
    const TilePanel& p = call.panel;
    const int columns = p.columns;
    for (int r = 0; r < p.rows; ++r) {
      encode(
          codes, columns, scratch.first_by_column, scratch.second_by_column, scratch.first[r], scratch.kept[r],
          scratch.first_numbers, scratch.second_numbers);
      std::uint8_t* __restrict first_codes = p.first_codes + r * p.stride;
      std::uint8_t* __restrict second_codes = p.second_codes + r * p.stride;
      for (int j = 0; j < columns; ++j) first_codes[j] = static_cast<std::uint8_t>(scratch.first_numbers[j]);
      for (int j = 0; j < columns; ++j) second_codes[j] = static_cast<std::uint8_t>(scratch.second_numbers[j]);
    }
  }

  static RAGGED_INLINE_KERNEL void scale_tiles(const Codes codes, const TilePanel& p, Scratch& scratch) {
    for (int t = 0, begin = 0; begin < p.columns; ++t, begin += kTileColumns) {
      const int end = begin + kTileColumns < p.columns ? begin + kTileColumns : p.columns;
      std::int32_t first = 0;
      std::int32_t second = 0;
      for (int j = begin; j < end; ++j) {
        first = first > scratch.first_largest[j] ? first : scratch.first_largest[j];
        second = second > scratch.second_largest[j] ? second : scratch.second_largest[j];
      }
      p.first_scales[t] = tile_scale(float_of(static_cast<std::uint32_t>(first)));
      p.second_scales[t] = tile_scale(float_of(static_cast<std::uint32_t>(second)));
      const float first_factor = codes.first_factor(p.first_scales[t]);
      const float second_factor = codes.second_factor(p.second_scales[t]);
      for (int j = begin; j < end; ++j) scratch.first_by_column[j] = first_factor;
      for (int j = begin; j < end; ++j) scratch.second_by_column[j] = second_factor;
    }
  }

  static RAGGED_INLINE_KERNEL std::int64_t run(const Codes codes, const Call& call) {
    Scratch scratch;
    for (int c = 0; c < call.panel.columns; ++c) scratch.first_largest[c] = scratch.second_largest[c] = 0;
    const std::int64_t not_finite = advance_all(codes, call, scratch);
    scale_tiles(codes, call.panel, scratch);
    encode_all(codes, call, scratch);
    return not_finite;
  }

  static std::int64_t run_baseline(const Codes codes, const Call& call) { return run(codes, call); }
#ifdef RAGGED_HAS_X86_TARGETS
  static RAGGED_TARGET_AVX2 std::int64_t run_avx2(const Codes codes, const Call& call) {
    return run(codes, call);
  }
  static RAGGED_TARGET_AVX512 std::int64_t run_avx512(const Codes codes, const Call& call) {
    return run(codes, call);
  }
#endif

  static std::int64_t run_on(Isa isa, const Codes codes, const Call& call) {
#ifdef RAGGED_HAS_X86_TARGETS
    if (isa == Isa::kAvx512) return run_avx512(codes, call);
    if (isa == Isa::kAvx2) return run_avx2(codes, call);
#endif
    static_cast<void>(isa);
    return run_baseline(codes, call);
  }
};

template <class Codes, bool kGuards>
std::int64_t choose_arrays(Isa isa, const Codes codes, const Call& call) {
  const TilePanel& p = call.panel;
  if (p.grads_are_bf16) {
    return p.image ? Kernel<Codes, kGuards, std::uint16_t, true>::run_on(isa, codes, call)
                   : Kernel<Codes, kGuards, std::uint16_t, false>::run_on(isa, codes, call);
  }
  return p.image ? Kernel<Codes, kGuards, float, true>::run_on(isa, codes, call)
                 : Kernel<Codes, kGuards, float, false>::run_on(isa, codes, call);
}

}  // namespace

std::int64_t adamw8bit_step(
    const AdamWStep& step, float grad_scale, const TilePanel& panel, const TileOptions& options, Isa isa) {
  const Call call{step, grad_scale, panel};
  if (options.format == TileFormat::kDynamic) {
    const DynamicCodes codes{&dynamic_tables()};
    return options.guards ? choose_arrays<DynamicCodes, true>(isa, codes, call)
                          : choose_arrays<DynamicCodes, false>(isa, codes, call);
  }
  return options.guards ? choose_arrays<PowerCodes, true>(isa, {}, call)
                        : choose_arrays<PowerCodes, false>(isa, {}, call);
}

}  // namespace ragged::optim
