#include "ragged/optim/adamw8bit_step.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ragged/base/error.h"
#include "ragged/optim/adamw_aten.h"
#include "ragged/optim/cuda_kernels.h"
#include "ragged/optim/kernel_dtypes.h"

namespace ragged::optim {
namespace {

constexpr Index kGrain = 16;  // panels a thread at least: 32k elements

void check(const AdamW8bitPiece& p) {
  const auto fits = [&p](const at::Tensor& t, Index numel) {
    return t.defined() && t.numel() == numel && t.device() == p.param.device() && t.is_contiguous();
  };
  const Index numel = p.geometry.numel;
  RAGGED_CHECK(
      p.param.defined() && fits(p.param, numel) && fits(p.grad, numel) && (!p.image.defined() || fits(p.image, numel)),
      "[adamw8bit] Expected a contiguous parameter, gradient and image of the {} elements of the tiles' geometry, on "
      "one "
      "device.",
      numel);
  for (const at::Tensor& codes : {p.exp_avg_codes, p.exp_avg_sq_codes}) {
    RAGGED_CHECK(
        fits(codes, numel) && codes.scalar_type() == at::kByte, "[adamw8bit] Expected {} contiguous codes in uint8.",
        numel);
  }
  for (const at::Tensor& scales : {p.exp_avg_scales, p.exp_avg_sq_scales}) {
    RAGGED_CHECK(
        fits(scales, p.geometry.num_tiles()) && scales.scalar_type() == at::kFloat,
        "[adamw8bit] Expected {} contiguous scales in fp32.", p.geometry.num_tiles());
  }
  RAGGED_CHECK(
      !p.image.defined() || p.image.scalar_type() == at::kBFloat16,
      "[adamw8bit] Expected an image in bf16, but got {}.", c10::toString(p.image.scalar_type()));
}

bool has_kernel(const AdamW8bitPiece& p) {
  return p.param.device().is_cpu() && p.param.scalar_type() == at::kFloat && is_float_or_bf16(p.grad);
}

// A piece cut into panels: strip by strip, and along each.
struct Work {
  const AdamW8bitPiece* piece = nullptr;
  TilePanel base;  // pointers to the piece's first element
  Index panels_per_strip = 0;
  Index begin = 0;  // its first panel among all pieces'

  TilePanel panel(Index i) const;
};

Work work_of(const AdamW8bitPiece& p, Index begin) {
  Work work;
  work.piece = &p;
  work.base = {
      .params = p.param.mutable_data_ptr<float>(),
      .grads = p.grad.const_data_ptr(),
      .image = p.image.defined() ? reinterpret_cast<std::uint16_t*>(p.image.mutable_data_ptr<at::BFloat16>()) : nullptr,
      .first_codes = p.exp_avg_codes.mutable_data_ptr<std::uint8_t>(),
      .second_codes = p.exp_avg_sq_codes.mutable_data_ptr<std::uint8_t>(),
      .first_scales = p.exp_avg_scales.mutable_data_ptr<float>(),
      .second_scales = p.exp_avg_sq_scales.mutable_data_ptr<float>(),
      .stride = p.geometry.columns,
      .grads_are_bf16 = p.grad.scalar_type() == at::kBFloat16};
  work.panels_per_strip = ceil_div(p.geometry.columns, kPanelColumns);
  work.begin = begin;
  return work;
}

TilePanel Work::panel(Index i) const {
  const TileGeometry::Strip strip = piece->geometry.strip(i / panels_per_strip);
  const Index column = i % panels_per_strip * kPanelColumns;
  const Index at = strip.offset + column;
  const Index tile = strip.first_tile + column / kTileColumns;
  TilePanel panel = base;
  panel.params += at;
  panel.grads = static_cast<const char*>(panel.grads) + at * (panel.grads_are_bf16 ? 2 : 4);
  if (panel.image) panel.image += at;
  panel.first_codes += at;
  panel.second_codes += at;
  panel.first_scales += tile;
  panel.second_scales += tile;
  panel.rows = static_cast<int>(strip.rows);
  panel.columns = static_cast<int>(std::min<Index>(kPanelColumns, piece->geometry.columns - column));
  return panel;
}

}  // namespace

std::int64_t adamw8bit_step(
    std::span<const AdamW8bitPiece> pieces, const StepScale& scale, const TileOptions& options) {
  for (const AdamW8bitPiece& piece : pieces) check(piece);
  if (scale.skip) return 0;
  std::vector<Work> works;
  Index panels = 0;
  std::vector<at::Tensor> counts;  // read after everything is on its way, so that a device isn't waited for in between
  std::vector<AdamW8bitPiece> on_cuda;
  for (const AdamW8bitPiece& piece : pieces) {
    if (piece.geometry.numel == 0) continue;
    if (has_kernel(piece)) {
      works.push_back(work_of(piece, panels));
      panels += works.back().panels_per_strip * piece.geometry.num_strips;
    } else if (has_cuda_kernel(piece)) {
      on_cuda.push_back(piece);
    } else {
      counts.push_back(at::zeros({}, piece.param.options().dtype(at::kLong)));
      adamw8bit_step_through_aten(piece, scale, options, counts.back());
    }
  }
  if (!on_cuda.empty()) {
    counts.push_back(at::zeros({}, on_cuda.front().param.options().dtype(at::kLong)));
    adamw8bit_step_on_cuda(on_cuda, scale, options, counts.back());
  }
  const auto grad_scale = static_cast<float>(scale.grad);
  std::atomic<std::int64_t> not_finite{0};
  at::parallel_for(0, panels, kGrain, [&](Index begin, Index end) {
    std::int64_t count = 0;
    auto work = std::upper_bound(
        works.begin(), works.end(), begin, [](Index position, const Work& w) { return position < w.begin; });
    --work;
    for (Index i = begin; i < end; ++i) {
      while (work + 1 != works.end() && (work + 1)->begin <= i) ++work;
      count += adamw8bit_step(work->piece->step, grad_scale, work->panel(i - work->begin), options);
    }
    not_finite += count;
  });
  std::int64_t total = not_finite;
  for (const at::Tensor& count : counts) total += count.item<std::int64_t>();
  return total;
}

}  // namespace ragged::optim
