// Muon's first pass where the momentum is kept in 8 bits: the same as muon_pack_pass() (muon_passes.h) over whole
// strips of tiles.
#pragma once

#include "ragged/optim/muon_passes.h"
#include "ragged/optim/tile_geometry.h"

namespace ragged::optim {

struct TiledMomentum {
  at::Tensor codes;   // uint8, geometry.numel
  at::Tensor scales;  // fp32, geometry.num_tiles()
  TileGeometry geometry;
  TileFormat format = TileFormat::kPower;
};

/// Throws InvalidArgument on tensors that don't fit the geometry. A gradient that isn't finite makes `out` NaN there
/// and leaves the momentum. Where there is no kernel of ours, another device or dtype, the formulas go through ATen.
void muon_pack_tiles_pass(
    const MuonRates& rates, double grad_scale, const at::Tensor& grad, const TiledMomentum& momentum,
    const at::Tensor& out);

}  // namespace ragged::optim
