#include "ragged/optim/adamw_aten.h"

#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include "ragged/optim/tile_codes.h"

namespace ragged::optim {
namespace {

at::Tensor bounded(const at::Tensor& grad) {
  return at::where(at::isfinite(grad), grad.clamp(-kLargestGradient, kLargestGradient), grad);
}

// Doubles from here on would round elsewhere than the kernels do: the constants are floats, exactly representable.
at::Tensor param_after(const AdamWStep& s, const at::Tensor& param, const at::Tensor& first, const at::Tensor& root) {
  const at::Tensor update = first.div(root.div(s.root_correction2).add_(s.eps)).mul_(s.step_size);
  return param.mul(s.decay).sub_(update);
}

// [strips, 32, tiles, 32] of rows x columns, short tiles filled with zeros, and back.
struct Padded {
  Index rows;
  Index columns;
  Index strips() const { return ceil_div(rows, kTileRows); }
  Index tiles() const { return ceil_div(columns, kTileColumns); }

  at::Tensor in_tiles(const at::Tensor& flat) const {
    const Index below = strips() * kTileRows - rows;
    const Index right = tiles() * kTileColumns - columns;
    return at::constant_pad_nd(flat.view({rows, columns}), {0, right, 0, below})
        .view({strips(), kTileRows, tiles(), kTileColumns});
  }
  at::Tensor flat(const at::Tensor& in_tiles) const {
    return in_tiles.reshape({strips() * kTileRows, tiles() * kTileColumns})
        .narrow(0, 0, rows)
        .narrow(1, 0, columns)
        .reshape({-1});
  }
  at::Tensor by_tile(const at::Tensor& scales) const { return scales.view({strips(), 1, tiles(), 1}); }
};

at::Tensor table(const float (&values)[256], const at::Tensor& like) {
  return at::from_blob(const_cast<float*>(values), {256}, at::kFloat).clone().to(like.device());
}

at::Tensor decode(const at::Tensor& codes, const at::Tensor& scales, TileFormat format, bool is_signed) {
  if (format == TileFormat::kDynamic) {
    const DynamicTables& tables = dynamic_tables();
    const at::Tensor map = table(is_signed ? tables.first : tables.second, codes);
    return map.index_select(0, codes.reshape({-1}).to(at::kLong)).view(codes.sizes()).mul(scales);
  }
  if (is_signed) {
    const at::Tensor k = codes.view(at::kChar).to(at::kFloat).mul_(1.0F / 127.0F);
    return k.mul(k.abs()).mul_(scales);
  }
  const at::Tensor k = codes.to(at::kFloat).mul_(1.0F / 255.0F);
  const at::Tensor square = k.mul(k);
  return square.mul(square).mul_(scales);
}

at::Tensor factor_of(const at::Tensor& scales) {
  return at::where(scales > 0, scales.reciprocal(), at::zeros_like(scales));
}

// Searches the borders instead of looking cells up.
at::Tensor nearest(const at::Tensor& magnitude, const float* borders, Index count) {
  const at::Tensor sorted =
      at::from_blob(const_cast<float*>(borders), {count}, at::kFloat).clone().to(magnitude.device());
  return at::searchsorted(sorted, magnitude.contiguous(), false, false);  // how many borders lie below
}

at::Tensor encode_first(const at::Tensor& values, const at::Tensor& scales, TileFormat format) {
  const at::Tensor magnitude = values.abs().mul_(factor_of(scales));
  const at::Tensor negative = values.signbit();
  if (format == TileFormat::kDynamic) {
    const DynamicTables& tables = dynamic_tables();
    const at::Tensor above = nearest(magnitude, tables.first_borders, 128);
    const at::Tensor below = nearest(magnitude, tables.first_borders + DynamicTables::kNegativeBorders, 127);
    return at::where(negative, below.neg().add_(127), above.add(127)).to(at::kByte);
  }
  const at::Tensor k = magnitude.sqrt_().mul_(127.0F).round_().clamp_max_(127.0F);
  return at::where(negative, k.neg(), k).to(at::kChar).view(at::kByte);
}

at::Tensor encode_second(const at::Tensor& values, const at::Tensor& scales, const TileOptions& options) {
  at::Tensor codes;
  if (options.format == TileFormat::kDynamic) {
    codes = nearest(values.mul(factor_of(scales)), dynamic_tables().second_borders, 255);
  } else {
    codes = values.sqrt().mul_(factor_of(scales.sqrt())).sqrt_().mul_(255.0F).round_().clamp_max_(255.0F);
  }
  if (options.guards) {
    codes = at::where(values.gt(0).logical_and(scales.gt(0)), codes.clamp_min(1), codes);
  }
  return codes.to(at::kByte);
}

// One matrix, or the part of one that a piece holds: `rows` whole rows from a strip's first.
struct Part {
  Index rows;
  Index element;
  Index strips;
  Index tile;
};

// The piece's strips, joined where they belong to one matrix.
std::vector<Part> parts_of(const TileGeometry& g) {
  std::vector<Part> parts;
  for (Index i = 0; i < g.num_strips; ++i) {
    const TileGeometry::Strip strip = g.strip(i);
    if (parts.empty() || (g.first_strip + i) % ceil_div(g.matrix_rows, kTileRows) == 0) {
      parts.push_back({0, strip.offset, 0, strip.first_tile});
    }
    parts.back().rows += strip.rows;
    ++parts.back().strips;
  }
  return parts;
}

at::Tensor largest(const at::Tensor& in_tiles) {
  const at::Tensor scales = in_tiles.amax({1, 3});
  return at::where(scales >= std::numeric_limits<float>::min(), scales, at::zeros_like(scales));
}

void step_part(
    const AdamW8bitPiece& piece, const Part& part, float grad_scale, const TileOptions& options,
    const at::Tensor& not_finite) {
  const Padded shape{part.rows, piece.geometry.columns};
  const auto elements = [&](const at::Tensor& t) {
    return t.reshape({-1}).narrow(0, part.element, part.rows * piece.geometry.columns);
  };
  const auto tiles = [&](const at::Tensor& t) {
    return t.reshape({-1}).narrow(0, part.tile, part.strips * piece.geometry.tiles_per_strip());
  };
  const auto moment = [&](const at::Tensor& codes, const at::Tensor& scales, bool is_signed) {
    return decode(shape.in_tiles(elements(codes)), shape.by_tile(tiles(scales)), options.format, is_signed);
  };
  // Padding decodes to whatever its code means, so it is cut off before anything looks at it.
  at::Tensor first = shape.flat(moment(piece.exp_avg_codes, piece.exp_avg_scales, true));
  at::Tensor second = shape.flat(moment(piece.exp_avg_sq_codes, piece.exp_avg_sq_scales, false));
  if (options.guards) first = at::where(second > 0, first, at::zeros_like(first));

  const at::Tensor grad = elements(piece.grad).to(at::kFloat).mul(grad_scale);
  const at::Tensor finite = at::isfinite(grad);
  not_finite.add_(finite.logical_not().sum());
  const at::Tensor g = bounded(grad);
  const AdamWStep& s = piece.step;
  first = at::where(finite, first.mul(s.beta1).add(g.mul(s.one_minus_beta1)), first);
  second = at::where(finite, second.mul(s.beta2).add(g.mul(g).mul_(s.one_minus_beta2)), second);
  const at::Tensor param = elements(piece.param);
  const at::Tensor next = at::where(finite, param_after(s, param.to(at::kFloat), first, second.sqrt()), grad.sub(grad));
  param.copy_(next);
  if (piece.image.defined()) elements(piece.image).copy_(next);

  const at::Tensor first_tiles = shape.in_tiles(first);
  const at::Tensor second_tiles = shape.in_tiles(second);
  const at::Tensor first_scales = largest(first_tiles.abs());
  const at::Tensor second_scales = largest(second_tiles);
  tiles(piece.exp_avg_scales).copy_(first_scales.view({-1}));
  tiles(piece.exp_avg_sq_scales).copy_(second_scales.view({-1}));
  elements(piece.exp_avg_codes)
      .copy_(shape.flat(encode_first(first_tiles, shape.by_tile(first_scales), options.format)));
  elements(piece.exp_avg_sq_codes)
      .copy_(shape.flat(encode_second(second_tiles, shape.by_tile(second_scales), options)));
}

}  // namespace

void adamw_step_through_aten(const AdamWPiece& piece, const StepScale& scale) {
  const AdamWStep& s = piece.step;
  const at::ScalarType wide = piece.param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor g = bounded(piece.grad.to(wide).mul(static_cast<float>(scale.grad)));
  const at::Tensor first = piece.exp_avg.to(wide).mul(s.beta1).add_(g.mul(s.one_minus_beta1));
  const at::Tensor second = piece.exp_avg_sq.to(wide).mul(s.beta2).add_(g.mul(g).mul_(s.one_minus_beta2));
  piece.exp_avg.copy_(first);
  piece.exp_avg_sq.copy_(second);
  piece.param.copy_(param_after(s, piece.param.to(wide), first, second.sqrt()));
  if (piece.image.defined()) piece.image.copy_(piece.param);
}

void adamw8bit_step_through_aten(
    const AdamW8bitPiece& piece, const StepScale& scale, const TileOptions& options, const at::Tensor& not_finite) {
  for (const Part& part : parts_of(piece.geometry)) {
    step_part(piece, part, static_cast<float>(scale.grad), options, not_finite);
  }
}

at::Tensor decode_tiles(
    const at::Tensor& codes, const at::Tensor& scales, const TileGeometry& geometry, TileFormat format,
    bool is_signed) {
  const at::Tensor values = at::zeros(codes.sizes(), codes.options().dtype(at::kFloat));
  for (const Part& part : parts_of(geometry)) {
    const Padded shape{part.rows, geometry.columns};
    const at::Tensor in = codes.reshape({-1}).narrow(0, part.element, part.rows * geometry.columns);
    const at::Tensor by = scales.reshape({-1}).narrow(0, part.tile, part.strips * geometry.tiles_per_strip());
    values.view({-1})
        .narrow(0, part.element, in.numel())
        .copy_(shape.flat(decode(shape.in_tiles(in), shape.by_tile(by), format, is_signed)));
  }
  return values;
}

void encode_tiles(
    const at::Tensor& values, const at::Tensor& codes, const at::Tensor& scales, const TileGeometry& geometry,
    TileFormat format) {
  for (const Part& part : parts_of(geometry)) {
    const Padded shape{part.rows, geometry.columns};
    const Index numel = part.rows * geometry.columns;
    const at::Tensor in_tiles = shape.in_tiles(values.reshape({-1}).narrow(0, part.element, numel));
    const at::Tensor by_tile = largest(in_tiles.abs());
    scales.view({-1}).narrow(0, part.tile, by_tile.numel()).copy_(by_tile.view({-1}));
    codes.view({-1})
        .narrow(0, part.element, numel)
        .copy_(shape.flat(encode_first(in_tiles, shape.by_tile(by_tile), format)));
  }
}

}  // namespace ragged::optim
