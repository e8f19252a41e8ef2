// Compiled with -ffp-contract=off (CMakeLists.txt).
#include "ragged/optim/adamw_kernel.h"

#include "ragged/optim/isa_targets.h"
#include "ragged/optim/lane_elements.h"

namespace ragged::optim {
namespace {

template <class Grad, class Moment, bool kImage>
RAGGED_INLINE_KERNEL void loop(
    const AdamWStep s, const float grad_scale, std::int64_t numel, float* __restrict params,
    const Grad* __restrict grads, Moment* __restrict exp_avg, Moment* __restrict exp_avg_sq,
    std::uint16_t* __restrict image) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const AdamWMoments next = adamw_moments(s, load(grads[i]) * grad_scale, load(exp_avg[i]), load(exp_avg_sq[i]));
    store(next.first, exp_avg[i]);
    store(next.second, exp_avg_sq[i]);
    const float param = adamw_param(s, params[i], next.first, square_root(next.second));
    params[i] = param;
    if (kImage) image[i] = narrow(param);
  }
}

struct Span {
  const AdamWStep& step;
  float grad_scale;
  const AdamWRun& run;
  std::int64_t begin;
  std::int64_t end;
};

template <class Grad, class Moment, bool kImage>
RAGGED_INLINE_KERNEL void run_span(const Span& span) {
  const AdamWRun& run = span.run;
  loop<Grad, Moment, kImage>(
      span.step, span.grad_scale, span.end - span.begin, run.params + span.begin,
      static_cast<const Grad*>(run.grads) + span.begin, static_cast<Moment*>(run.exp_avg) + span.begin,
      static_cast<Moment*>(run.exp_avg_sq) + span.begin, kImage ? run.image + span.begin : nullptr);
}

template <class Grad, class Moment, bool kImage>
void run_baseline(const Span& span) {
  run_span<Grad, Moment, kImage>(span);
}
#ifdef RAGGED_HAS_X86_TARGETS
template <class Grad, class Moment, bool kImage>
RAGGED_TARGET_AVX2 void run_avx2(const Span& span) {
  run_span<Grad, Moment, kImage>(span);
}
template <class Grad, class Moment, bool kImage>
RAGGED_TARGET_AVX512 void run_avx512(const Span& span) {
  run_span<Grad, Moment, kImage>(span);
}
#endif

template <class Grad, class Moment, bool kImage>
void run_on(Isa isa, const Span& span) {
#ifdef RAGGED_HAS_X86_TARGETS
  if (isa == Isa::kAvx512) return run_avx512<Grad, Moment, kImage>(span);
  if (isa == Isa::kAvx2) return run_avx2<Grad, Moment, kImage>(span);
#endif
  static_cast<void>(isa);
  run_baseline<Grad, Moment, kImage>(span);
}

template <class Grad, class Moment>
void choose_image(Isa isa, const Span& span) {
  span.run.image ? run_on<Grad, Moment, true>(isa, span) : run_on<Grad, Moment, false>(isa, span);
}

template <class Grad>
void choose_moments(Isa isa, const Span& span) {
  span.run.moments_are_bf16 ? choose_image<Grad, std::uint16_t>(isa, span) : choose_image<Grad, float>(isa, span);
}

}  // namespace

void adamw_step(
    const AdamWStep& step, float grad_scale, const AdamWRun& run, std::int64_t begin, std::int64_t end, Isa isa) {
  const Span span{step, grad_scale, run, begin, end};
  run.grads_are_bf16 ? choose_moments<std::uint16_t>(isa, span) : choose_moments<float>(isa, span);
}

}  // namespace ragged::optim
