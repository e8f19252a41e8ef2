// One AdamW step over part of a strip of tiles on the CPU, its moments decoded, advanced and encoded again. Raw
// pointers only: no torch, no threads. What a code means is in tile_codes.h.
#pragma once

#include <cstdint>

#include "ragged/optim/isa.h"
#include "ragged/optim/tile_codes.h"

namespace ragged::optim {

/// `rows` x `columns` elements, whole tiles of one strip: rows <= 32, columns <= kPanelColumns, and a multiple of 32
/// unless the matrix ends there. Pointers are to the first element; rows are `stride` elements apart.
struct TilePanel {
  float* params = nullptr;
  const void* grads = nullptr;     // fp32, or bfloat16 where the flag says so
  std::uint16_t* image = nullptr;  // bfloat16, or null
  std::uint8_t* first_codes = nullptr;
  std::uint8_t* second_codes = nullptr;
  float* first_scales = nullptr;  // one a tile
  float* second_scales = nullptr;
  std::int64_t stride = 0;
  int rows = 0;
  int columns = 0;
  bool grads_are_bf16 = false;
};
/// Small enough that what is kept of a panel between the passes stays in the first-level cache.
inline constexpr int kPanelColumns = 64;

/// How moments are stored. `guards`: the second and third of [Note: tile codes].
struct TileOptions {
  TileFormat format = TileFormat::kPower;
  bool guards = true;
};

/// Steps a panel with gradients times `grad_scale`. Returns how many of them weren't finite. A tile's bits depend on
/// its own inputs alone.
std::int64_t adamw8bit_step(
    const AdamWStep& step, float grad_scale, const TilePanel& panel, const TileOptions& options, Isa isa = best_isa());

}  // namespace ragged::optim
