#include "ragged/optim/muon_tiles.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ragged/base/error.h"
#include "ragged/optim/adamw_aten.h"
#include "ragged/optim/kernel_dtypes.h"
#include "ragged/optim/muon_tiles_kernel.h"

namespace ragged::optim {
namespace {

constexpr Index kGrain = 16;  // panels a thread at least: 32k elements

void check(const at::Tensor& grad, const TiledMomentum& m, const at::Tensor& out) {
  const auto fits = [](const at::Tensor& t, Index numel, at::ScalarType dtype) {
    return t.defined() && t.numel() == numel && t.is_contiguous() && t.scalar_type() == dtype;
  };
  const Index numel = m.geometry.numel;
  RAGGED_CHECK(
      fits(m.codes, numel, at::kByte) && fits(m.scales, m.geometry.num_tiles(), at::kFloat),
      "[muon] Expected a momentum of {} codes in uint8 and {} scales in fp32, contiguous.", numel,
      m.geometry.num_tiles());
  RAGGED_CHECK(
      grad.numel() == numel && out.numel() == numel && grad.is_contiguous() && out.is_contiguous(),
      "[muon] Expected {} contiguous elements of a gradient, but got {}.", numel, grad.numel());
}

void through_aten(
    const MuonRates& rates, double grad_scale, const at::Tensor& grad, const TiledMomentum& m, const at::Tensor& out) {
  const auto beta = static_cast<float>(rates.momentum);
  const at::Tensor g = grad.to(at::kFloat) * static_cast<float>(grad_scale);
  const at::Tensor old = decode_tiles(m.codes, m.scales, m.geometry, m.format, true);
  const at::Tensor moved = old + (g - old) * (1.0F - beta);
  const at::Tensor finite = at::isfinite(moved);
  const at::Tensor next = at::where(finite, moved, old);
  const at::Tensor direction = rates.nesterov ? g + (next - g) * beta : next;
  out.copy_(at::where(finite, direction, moved - moved));
  encode_tiles(next, m.codes, m.scales, m.geometry, m.format);
}

}  // namespace

void muon_pack_tiles_pass(
    const MuonRates& rates, double grad_scale, const at::Tensor& grad, const TiledMomentum& momentum,
    const at::Tensor& out) {
  check(grad, momentum, out);
  if (momentum.geometry.numel == 0) return;
  if (!grad.is_cpu() || !is_float_or_bf16(grad) || !is_float_or_bf16(out))
    return through_aten(rates, grad_scale, grad, momentum, out);
  const TileGeometry& g = momentum.geometry;
  const MuonTileStep step{
      .grad_scale = static_cast<float>(grad_scale),
      .beta = static_cast<float>(rates.momentum),
      .nesterov = rates.nesterov,
      .format = momentum.format};
  const bool grad_is_bf16 = grad.scalar_type() == at::kBFloat16;
  const bool out_is_bf16 = out.scalar_type() == at::kBFloat16;
  const auto* grads = static_cast<const char*>(grad.const_data_ptr());
  auto* outs = static_cast<char*>(out.mutable_data_ptr());
  auto* codes = momentum.codes.mutable_data_ptr<std::uint8_t>();
  auto* scales = momentum.scales.mutable_data_ptr<float>();
  const Index per_strip = ceil_div(g.columns, kMuonPanelColumns);
  at::parallel_for(0, g.num_strips * per_strip, kGrain, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      const TileGeometry::Strip strip = g.strip(i / per_strip);
      const Index column = i % per_strip * kMuonPanelColumns;
      const Index at = strip.offset + column;
      muon_pack_tiles(
          step,
          {.grads = {.data = grads + at * (grad_is_bf16 ? 2 : 4), .is_bf16 = grad_is_bf16},
           .codes = codes + at,
           .scales = scales + strip.first_tile + column / kTileColumns,
           .out = {.data = outs + at * (out_is_bf16 ? 2 : 4), .is_bf16 = out_is_bf16},
           .stride = g.columns,
           .rows = static_cast<int>(strip.rows),
           .columns = static_cast<int>(std::min<Index>(kMuonPanelColumns, g.columns - column))});
    }
  });
}

}  // namespace ragged::optim
