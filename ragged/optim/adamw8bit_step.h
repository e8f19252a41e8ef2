// AdamW with 8-bit moments over a list of pieces; like adamw_step.h, for parameters that are kept in tiles.
#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

#include "ragged/optim/adamw8bit_kernel.h"
#include "ragged/optim/optimizer.h"
#include "ragged/optim/tile_geometry.h"

namespace ragged::optim {

/// What one rank holds of one parameter: whole strips of tiles. All tensors contiguous and on one device. Codes begin
/// as zero_code(), scales as 0.
struct AdamW8bitPiece {
  at::Tensor param;              // master, fp32, geometry.numel elements
  at::Tensor grad;               // fp32 or bf16, as many
  at::Tensor image = {};         // optional, bf16, as many: receives the new parameter, rounded, in the same pass
  at::Tensor exp_avg_codes;      // uint8, as many
  at::Tensor exp_avg_scales;     // fp32, geometry.num_tiles()
  at::Tensor exp_avg_sq_codes;   // uint8
  at::Tensor exp_avg_sq_scales;  // fp32
  TileGeometry geometry;
  AdamWStep step;
};

/// Steps all pieces with gradients times scale.grad; with scale.skip it does nothing and returns 0. Returns how many
/// gradient elements (after scaling) weren't finite: such an element makes its parameter NaN, and leaves its moments
/// and all scales as if it hadn't come. A tile's bits depend on its own inputs alone: not on threads, instruction sets
/// or what else is in the list. Other devices and dtypes go through ATen, an operation at a time (adamw_aten.h). Throws
/// InvalidArgument on tensors that don't fit.
std::int64_t adamw8bit_step(
    std::span<const AdamW8bitPiece> pieces, const StepScale& scale = {}, const TileOptions& options = {});

/// Moments as fp32 in the codes' shape: for tests, comparisons and conversion. `is_signed`: the first moment.
at::Tensor decode_tiles(
    const at::Tensor& codes, const at::Tensor& scales, const TileGeometry& geometry, TileFormat format, bool is_signed);

}  // namespace ragged::optim
