#include "ragged/optim/adamw_step.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ragged/base/error.h"
#include "ragged/optim/adamw_aten.h"
#include "ragged/optim/adamw_kernel.h"
#include "ragged/optim/cuda_kernels.h"
#include "ragged/optim/kernel_dtypes.h"

namespace ragged::optim {
namespace {

constexpr Index kGrain = 1 << 15;  // elements a thread at least

void check(const AdamWPiece& p) {
  const auto fits = [&p](const at::Tensor& t) {
    return t.defined() && t.numel() == p.param.numel() && t.device() == p.param.device() && t.is_contiguous();
  };
  RAGGED_CHECK(p.param.defined() && p.param.is_contiguous(), "[adamw] Expected contiguous parameters.");
  RAGGED_CHECK(
      fits(p.grad) && fits(p.exp_avg) && fits(p.exp_avg_sq) && (!p.image.defined() || fits(p.image)),
      "[adamw] Expected gradient, moments and image to be contiguous, of the parameter's {} elements and on {}.",
      p.param.numel(), p.param.device().str());
  RAGGED_CHECK(
      !p.image.defined() || p.image.scalar_type() == at::kBFloat16, "[adamw] Expected an image in bf16, but got {}.",
      c10::toString(p.image.scalar_type()));
  RAGGED_CHECK(
      p.exp_avg.scalar_type() == p.exp_avg_sq.scalar_type(),
      "[adamw] Expected both moments in one dtype, but got {} and {}.", c10::toString(p.exp_avg.scalar_type()),
      c10::toString(p.exp_avg_sq.scalar_type()));
}

bool has_kernel(const AdamWPiece& p) {
  return p.param.device().is_cpu() && p.param.scalar_type() == at::kFloat && is_float_or_bf16(p.grad) &&
      is_float_or_bf16(p.exp_avg);
}

struct Span {
  AdamWRun run;
  AdamWStep step;
  Index numel = 0;
  Index begin = 0;  // among the elements of all spans
};

Span span_of(const AdamWPiece& p) {
  Span span;
  span.run = {
      .params = p.param.mutable_data_ptr<float>(),
      .grads = p.grad.const_data_ptr(),
      .exp_avg = p.exp_avg.mutable_data_ptr(),
      .exp_avg_sq = p.exp_avg_sq.mutable_data_ptr(),
      .image = p.image.defined() ? reinterpret_cast<std::uint16_t*>(p.image.mutable_data_ptr<at::BFloat16>()) : nullptr,
      .grads_are_bf16 = p.grad.scalar_type() == at::kBFloat16,
      .moments_are_bf16 = p.exp_avg.scalar_type() == at::kBFloat16};
  span.step = p.step;
  span.numel = p.param.numel();
  return span;
}

const char* bytes_after(const void* begin, Index numel, bool bf16) {
  return static_cast<const char*>(begin) + numel * (bf16 ? 2 : 4);
}

// Whether `next` begins in memory where `span` ends, all arrays alike.
bool continues(const Span& span, const Span& next) {
  const AdamWRun& a = span.run;
  const AdamWRun& b = next.run;
  return span.step == next.step && a.grads_are_bf16 == b.grads_are_bf16 && a.moments_are_bf16 == b.moments_are_bf16 &&
      a.params + span.numel == b.params && bytes_after(a.grads, span.numel, a.grads_are_bf16) == b.grads &&
      bytes_after(a.exp_avg, span.numel, a.moments_are_bf16) == b.exp_avg &&
      bytes_after(a.exp_avg_sq, span.numel, a.moments_are_bf16) == b.exp_avg_sq &&
      (a.image ? b.image == a.image + span.numel : b.image == nullptr);
}

void run_spans(std::vector<Span> spans, float grad_scale) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.run.params < b.run.params; });
  std::vector<Span> merged;
  Index total = 0;
  for (const Span& span : spans) {
    if (!merged.empty() && continues(merged.back(), span)) {
      merged.back().numel += span.numel;
    } else {
      merged.push_back(span);
      merged.back().begin = total;
    }
    total += span.numel;
  }
  at::parallel_for(0, total, kGrain, [&](Index begin, Index end) {
    auto span = std::upper_bound(
        merged.begin(), merged.end(), begin, [](Index position, const Span& s) { return position < s.begin; });
    for (--span; span != merged.end() && span->begin < end; ++span) {
      adamw_step(
          span->step, grad_scale, span->run, std::max<Index>(0, begin - span->begin),
          std::min(span->numel, end - span->begin));
    }
  });
}

}  // namespace

void check_rates(const AdamWRates& r, const char* optimizer) {
  RAGGED_CHECK(r.lr >= 0.0, "[{}] Expected lr >= 0, but got {}.", optimizer, r.lr);
  RAGGED_CHECK(r.beta1 >= 0.0 && r.beta1 < 1.0, "[{}] Expected beta1 in [0, 1), but got {}.", optimizer, r.beta1);
  RAGGED_CHECK(r.beta2 >= 0.0 && r.beta2 < 1.0, "[{}] Expected beta2 in [0, 1), but got {}.", optimizer, r.beta2);
  RAGGED_CHECK(r.eps >= 0.0, "[{}] Expected eps >= 0, but got {}.", optimizer, r.eps);
  RAGGED_CHECK(r.weight_decay >= 0.0, "[{}] Expected weight_decay >= 0, but got {}.", optimizer, r.weight_decay);
}

AdamWStep adamw_constants(const AdamWRates& rates, std::int64_t step) {
  const double correction1 = 1.0 - std::pow(rates.beta1, static_cast<double>(step));
  const double correction2 = 1.0 - std::pow(rates.beta2, static_cast<double>(step));
  return {
      .decay = static_cast<float>(1.0 - rates.lr * rates.weight_decay),
      .beta1 = static_cast<float>(rates.beta1),
      .one_minus_beta1 = static_cast<float>(1.0 - rates.beta1),
      .beta2 = static_cast<float>(rates.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - rates.beta2),
      .step_size = static_cast<float>(rates.lr / correction1),
      .root_correction2 = static_cast<float>(std::sqrt(correction2)),
      .eps = static_cast<float>(rates.eps)};
}

void adamw_step(std::span<const AdamWPiece> pieces, const StepScale& scale) {
  for (const AdamWPiece& piece : pieces) check(piece);
  if (scale.skip) return;
  std::vector<Span> spans;
  std::vector<AdamWPiece> on_cuda;
  for (const AdamWPiece& piece : pieces) {
    if (piece.param.numel() == 0) continue;
    if (has_kernel(piece)) {
      spans.push_back(span_of(piece));
    } else if (has_cuda_kernel(piece)) {
      on_cuda.push_back(piece);
    } else {
      adamw_step_through_aten(piece, scale);
    }
  }
  run_spans(std::move(spans), static_cast<float>(scale.grad));
  adamw_step_on_cuda(on_cuda, scale);
}

}  // namespace ragged::optim
