// Muon's first pass over part of a strip of tiles on the CPU, where the momentum is kept in 8 bits: decoded, advanced,
// encoded again. Raw pointers only: no torch, no threads. What a code means is in tile_codes.h; a momentum is stored as
// a first moment is.
#pragma once

#include <cstdint>

#include "ragged/optim/isa.h"
#include "ragged/optim/muon_kernel.h"
#include "ragged/optim/tile_codes.h"

namespace ragged::optim {

/// `rows` x `columns` elements, whole tiles of one strip: rows <= 32, columns <= kMuonPanelColumns, and a multiple of
/// 32 unless the matrix ends there. Pointers are to the first element; rows are `stride` elements apart.
struct MuonTilePanel {
  ConstRun grads;
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;  // one a tile
  Run out;                  // what is orthogonalised
  std::int64_t stride = 0;
  int rows = 0;
  int columns = 0;
};
inline constexpr int kMuonPanelColumns = 64;

struct MuonTileStep {
  float grad_scale = 1.0F;
  float beta = 0.95F;
  bool nesterov = true;
  TileFormat format = TileFormat::kPower;
};

/// A tile's bits depend on its own inputs alone. Where a gradient isn't finite `out` is NaN, so that the matrix becomes
/// NaN, and the momentum stays as it was, so that the scale doesn't.
void muon_pack_tiles(const MuonTileStep& step, const MuonTilePanel& panel, Isa isa = best_isa());

}  // namespace ragged::optim
