// Compiled with -ffp-contract=off (CMakeLists.txt). Two passes over a panel, as in adamw8bit_kernel.cpp: the first
// advances every element, the second encodes it once the tiles' scales are known.
#include "ragged/optim/muon_tiles_kernel.h"

#include "ragged/optim/isa_targets.h"
#include "ragged/optim/lane_elements.h"
#include "ragged/optim/muon_math.h"

namespace ragged::optim {
namespace {

// Loops are over one width of lanes each, so bytes are widened and narrowed in loops of their own, and scales repeated
// for each column. Magnitudes are compared as bits, which order like the numbers.
struct Scratch {
  alignas(64) float momentum[kTileRows][kMuonPanelColumns];
  alignas(64) std::int32_t largest[kMuonPanelColumns];
  alignas(64) float by_column[kMuonPanelColumns];  // scales, then factors
  alignas(64) std::int32_t numbers[kMuonPanelColumns];
  alignas(64) float grads[kMuonPanelColumns];
  alignas(64) float directions[kMuonPanelColumns];
};

template <class Codes, class Grad, class Out>
struct Kernel {
  static RAGGED_INLINE_KERNEL void advance(
      const Codes codes, const float beta, const bool nesterov, const int columns,
      const std::int32_t* __restrict numbers, const float* __restrict scales, const float* __restrict grads,
      float* __restrict momentum, float* __restrict directions, std::int32_t* __restrict largest) {
    for (int j = 0; j < columns; ++j) {
      const float old = codes.decode_first(numbers[j], scales[j]);
      const float moved = muon_momentum(old, grads[j], beta);
      const bool finite = is_finite(moved);
      const float next = finite ? moved : old;
      momentum[j] = next;
      directions[j] = finite ? muon_direction(next, grads[j], beta, nesterov) : moved - moved;  // NaN
      const auto size = static_cast<std::int32_t>(bits_of(next) & 0x7FFFFFFFU);
      largest[j] = largest[j] > size ? largest[j] : size;
    }
  }

  static RAGGED_INLINE_KERNEL void run(const Codes codes, const MuonTileStep& step, const MuonTilePanel& p) {
    Scratch scratch;
    const int columns = p.columns;
    for (int j = 0; j < columns; ++j) scratch.largest[j] = 0;
    for (int j = 0; j < columns; ++j) scratch.by_column[j] = p.scales[j / kTileColumns];
    for (int r = 0; r < p.rows; ++r) {
      const Grad* __restrict grads = static_cast<const Grad*>(p.grads.data) + r * p.stride;
      const std::uint8_t* __restrict bytes = p.codes + r * p.stride;
      Out* __restrict out = static_cast<Out*>(p.out.data) + r * p.stride;
      for (int j = 0; j < columns; ++j) scratch.numbers[j] = Codes::first_number(bytes[j]);
      for (int j = 0; j < columns; ++j) scratch.grads[j] = load(grads[j]) * step.grad_scale;
      advance(
          codes, step.beta, step.nesterov, columns, scratch.numbers, scratch.by_column, scratch.grads,
          scratch.momentum[r], scratch.directions, scratch.largest);
      for (int j = 0; j < columns; ++j) store(scratch.directions[j], out[j]);
    }
    for (int t = 0, begin = 0; begin < columns; ++t, begin += kTileColumns) {
      const int end = begin + kTileColumns < columns ? begin + kTileColumns : columns;
      std::int32_t largest = 0;
      for (int j = begin; j < end; ++j) largest = largest > scratch.largest[j] ? largest : scratch.largest[j];
      p.scales[t] = tile_scale(float_of(static_cast<std::uint32_t>(largest)));
      const float factor = codes.first_factor(p.scales[t]);
      for (int j = begin; j < end; ++j) scratch.by_column[j] = factor;
    }
    for (int r = 0; r < p.rows; ++r) {
      const float* __restrict momentum = scratch.momentum[r];
      std::uint8_t* __restrict bytes = p.codes + r * p.stride;
      for (int j = 0; j < columns; ++j) scratch.numbers[j] = codes.encode_first(momentum[j], scratch.by_column[j]);
      for (int j = 0; j < columns; ++j) bytes[j] = static_cast<std::uint8_t>(scratch.numbers[j]);
    }
  }

  static void run_baseline(const Codes codes, const MuonTileStep& step, const MuonTilePanel& p) { run(codes, step, p); }
#ifdef RAGGED_HAS_X86_TARGETS
  static RAGGED_TARGET_AVX2 void run_avx2(const Codes codes, const MuonTileStep& step, const MuonTilePanel& p) {
    run(codes, step, p);
  }
  static RAGGED_TARGET_AVX512 void run_avx512(const Codes codes, const MuonTileStep& step, const MuonTilePanel& p) {
    run(codes, step, p);
  }
#endif

  static void run_on(Isa isa, const Codes codes, const MuonTileStep& step, const MuonTilePanel& p) {
#ifdef RAGGED_HAS_X86_TARGETS
    if (isa == Isa::kAvx512) return run_avx512(codes, step, p);
    if (isa == Isa::kAvx2) return run_avx2(codes, step, p);
#endif
    static_cast<void>(isa);
    run_baseline(codes, step, p);
  }
};

template <class Codes>
void choose_arrays(Isa isa, const Codes codes, const MuonTileStep& step, const MuonTilePanel& p) {
  if (p.grads.is_bf16) {
    p.out.is_bf16 ? Kernel<Codes, std::uint16_t, std::uint16_t>::run_on(isa, codes, step, p)
                  : Kernel<Codes, std::uint16_t, float>::run_on(isa, codes, step, p);
  } else {
    p.out.is_bf16 ? Kernel<Codes, float, std::uint16_t>::run_on(isa, codes, step, p)
                  : Kernel<Codes, float, float>::run_on(isa, codes, step, p);
  }
}

}  // namespace

void muon_pack_tiles(const MuonTileStep& step, const MuonTilePanel& panel, Isa isa) {
  if (step.format == TileFormat::kDynamic) return choose_arrays(isa, DynamicCodes{&dynamic_tables()}, step, panel);
  choose_arrays(isa, PowerCodes{}, step, panel);
}

}  // namespace ragged::optim
