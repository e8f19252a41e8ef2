// Compiled with -ffp-contract=off (CMakeLists.txt). Two passes over a panel: the first advances every element and
// keeps what is to be encoded, the second encodes it, once the tiles' scales are known.
#include "ragged/optim/adamw8bit_kernel.h"

#include <algorithm>

#include "ragged/optim/isa_targets.h"

namespace ragged::optim {
namespace {

constexpr int kPanelTiles = kPanelColumns / kTileColumns;

RAGGED_INLINE_KERNEL float load(float value) {
  return value;
}
RAGGED_INLINE_KERNEL float load(std::uint16_t bits) {
  return widen(bits);
}

// What lies between the passes. Magnitudes are compared as bits, which order like the numbers and vectorise everywhere;
// a maximum a column, so that the lanes of a vector never meet.
struct Scratch {
  alignas(64) float first[kTileRows][kPanelColumns];
  alignas(64) float kept[kTileRows][kPanelColumns];
  alignas(64) std::int32_t first_largest[kPanelColumns];
  alignas(64) std::int32_t second_largest[kPanelColumns];
};

struct Call {
  const AdamWStep& step;
  float grad_scale;
  const TilePanel& panel;
};

template <class Codes, bool kGuards, class Grad, bool kImage>
struct Kernel {
  // One row of one tile. `width` is a constant at the call for all but the last tile of a matrix.
  static RAGGED_INLINE_KERNEL std::int32_t advance(
      const Codes codes, const AdamWStep s, const float grad_scale, const int width, const float first_scale,
      const float second_scale, float* __restrict params, const Grad* __restrict grads, std::uint16_t* __restrict image,
      const std::uint8_t* __restrict first_codes, const std::uint8_t* __restrict second_codes, float* __restrict first,
      float* __restrict kept, std::int32_t* __restrict first_largest, std::int32_t* __restrict second_largest) {
    std::int32_t not_finite = 0;
    for (int j = 0; j < width; ++j) {
      const TileMoments old =
          decode_moments<Codes, kGuards>(codes, first_codes[j], second_codes[j], first_scale, second_scale);
      const TileElement next = step_element(codes, s, params[j], load(grads[j]) * grad_scale, old);
      params[j] = next.param;
      if (kImage) image[j] = narrow(next.param);
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
      const Codes codes, const int width, const float first_factor, const float second_factor,
      const float* __restrict first, const float* __restrict kept, std::uint8_t* __restrict first_codes,
      std::uint8_t* __restrict second_codes) {
    for (int j = 0; j < width; ++j) {
      first_codes[j] = codes.encode_first(first[j], first_factor);
      second_codes[j] = encode_second_guarded<Codes, kGuards>(codes, kept[j], second_factor);
    }
  }

  static RAGGED_INLINE_KERNEL std::int64_t advance_all(const Codes codes, const Call& call, Scratch& scratch) {
    const TilePanel& p = call.panel;
    const AdamWStep step = call.step;
    std::int64_t not_finite = 0;
    for (int r = 0; r < p.rows; ++r) {
      for (int t = 0, c = 0; c < p.columns; ++t, c += kTileColumns) {
        const std::int64_t at = r * p.stride + c;
        const Grad* grads = static_cast<const Grad*>(p.grads) + at;
        std::uint16_t* image = kImage ? p.image + at : nullptr;
        const auto row = [&](int width) __attribute__((always_inline)) {
          return advance(
              codes, step, call.grad_scale, width, p.first_scales[t], p.second_scales[t], p.params + at, grads, image,
              p.first_codes + at, p.second_codes + at, scratch.first[r] + c, scratch.kept[r] + c,
              scratch.first_largest + c, scratch.second_largest + c);
        };
        not_finite += p.columns - c >= kTileColumns ? row(kTileColumns) : row(p.columns - c);
      }
    }
    return not_finite;
  }

  static RAGGED_INLINE_KERNEL std::int64_t run(const Codes codes, const Call& call) {
    const TilePanel& p = call.panel;
    Scratch scratch;
    for (int c = 0; c < p.columns; ++c) scratch.first_largest[c] = scratch.second_largest[c] = 0;
    const std::int64_t not_finite = advance_all(codes, call, scratch);
    float first_factors[kPanelTiles];
    float second_factors[kPanelTiles];
    for (int t = 0, c = 0; c < p.columns; ++t, c += kTileColumns) {
      std::int32_t first = 0;
      std::int32_t second = 0;
      for (int j = c; j < std::min(c + kTileColumns, p.columns); ++j) {
        first = std::max(first, scratch.first_largest[j]);
        second = std::max(second, scratch.second_largest[j]);
      }
      p.first_scales[t] = tile_scale(float_of(static_cast<std::uint32_t>(first)));
      p.second_scales[t] = tile_scale(float_of(static_cast<std::uint32_t>(second)));
      first_factors[t] = codes.first_factor(p.first_scales[t]);
      second_factors[t] = codes.second_factor(p.second_scales[t]);
    }
    for (int r = 0; r < p.rows; ++r) {
      for (int t = 0, c = 0; c < p.columns; ++t, c += kTileColumns) {
        const std::int64_t at = r * p.stride + c;
        const auto row = [&](int width) __attribute__((always_inline)) {
          encode(
              codes, width, first_factors[t], second_factors[t], scratch.first[r] + c, scratch.kept[r] + c,
              p.first_codes + at, p.second_codes + at);
        };
        p.columns - c >= kTileColumns ? row(kTileColumns) : row(p.columns - c);
      }
    }
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
