// Where there is no kernel of ours, another device or dtype: the same formulas through ATen, an operation at a time.
// Multiplications and additions stay apart as in the kernels; ATen's square root may round otherwise than IEEE 754 has
// it, so results agree to a unit or two in the last place, not in every bit.
#pragma once

#include "ragged/optim/adamw8bit_step.h"
#include "ragged/optim/adamw_step.h"

namespace ragged::optim {

/// One piece of adamw_step(). Computes in fp32, or in the parameter's dtype where that is wider.
void adamw_step_through_aten(const AdamWPiece& piece, const StepScale& scale);
/// One piece of adamw8bit_step(). Adds the number of gradients that weren't finite to `not_finite`, a scalar of int64
/// on the piece's device.
void adamw8bit_step_through_aten(
    const AdamW8bitPiece& piece, const StepScale& scale, const TileOptions& options, const at::Tensor& not_finite);
/// Writes fp32 values to codes and scales as first moments; the way back of decode_tiles().
void encode_tiles(
    const at::Tensor& values, const at::Tensor& codes, const at::Tensor& scales, const TileGeometry& geometry,
    TileFormat format);

}  // namespace ragged::optim
