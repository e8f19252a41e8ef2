#include "ragged/optim/adamw.h"

#include <optional>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/optim/adamw_step.h"
#include "ragged/optim/owned_params.h"

namespace ragged::optim {
namespace {

AdamWRates rates_of(const AdamWOptions& o) {
  return {.lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay};
}

const AdamWOptions& checked(const AdamWOptions& options) {
  check_rates(rates_of(options), "adamw");
  RAGGED_CHECK(
      options.moment_dtype == at::kFloat || options.moment_dtype == at::kBFloat16,
      "[adamw] Expected moment_dtype fp32 or bf16, but got {}.", c10::toString(options.moment_dtype));
  return options;
}

std::optional<at::ScalarType> dtype_of(const OwnedParam& param, const AdamWOptions& options) {
  if (param.state_format.empty()) return options.moment_dtype;
  RAGGED_CHECK(
      param.state_format == "fp32" || param.state_format == "bf16",
      "[adamw] Expected the state format fp32 or bf16, but got '{}' (param '{}'). Send it to adamw8bit for 8-bit "
      "states.",
      param.state_format, param.tensor.name);
  return param.state_format == "fp32" ? at::kFloat : at::kBFloat16;
}

}  // namespace

struct AdamW::Impl {
  AdamWOptions options;
  OwnedParams params;
  std::vector<Moments> moments;  // by parameter

  Impl(std::shared_ptr<fsdp::Unit> root, AdamWOptions given)
      : options(checked(given)), params(std::move(root), options.policy, options.weight_decay, "adamw") {
    moments = make_moments(params, [this](const OwnedParam& param) { return dtype_of(param, options); });
  }
};

AdamW::AdamW(std::shared_ptr<fsdp::Unit> root, AdamWOptions options)
    : impl_(std::make_unique<Impl>(std::move(root), std::move(options))) {}
AdamW::~AdamW() = default;
AdamW::AdamW(AdamW&&) noexcept = default;
AdamW& AdamW::operator=(AdamW&&) noexcept = default;

void AdamW::set_lr(double lr) {
  RAGGED_CHECK(lr >= 0.0, "[adamw] Expected lr >= 0, but got {}.", lr);
  impl_->options.lr = lr;
}
double AdamW::lr() const {
  return impl_->options.lr;
}

void AdamW::step(const StepScale& scale) {
  if (scale.skip) return;
  comm::ProfilerRange range("ragged::adamw", "root");
  const AdamWRates rates = rates_of(impl_->options);
  std::vector<AdamWPiece> pieces;
  impl_->params.for_each_gradient([&](std::size_t i, const at::Tensor& param, const at::Tensor& grad) {
    pieces.push_back(
        {.param = param,
         .grad = grad,
         .exp_avg = impl_->moments[i].exp_avg,
         .exp_avg_sq = impl_->moments[i].exp_avg_sq,
         .step = impl_->params.constants(impl_->params.list()[i], rates)});
  });
  adamw_step(pieces, scale);
}

std::vector<buffer::ShardedTensor> AdamW::states() const {
  std::vector<buffer::ShardedTensor> states;
  for (std::size_t i = 0; i < impl_->moments.size(); ++i) {
    const OwnedParam& param = impl_->params.list()[i];
    states.push_back(state_like(param, ".exp_avg", impl_->moments[i].exp_avg));
    states.push_back(state_like(param, ".exp_avg_sq", impl_->moments[i].exp_avg_sq));
  }
  return states;
}

std::vector<std::int64_t> AdamW::steps() const {
  return impl_->params.steps();
}
void AdamW::set_steps(const std::vector<std::int64_t>& steps) {
  impl_->params.set_steps(steps);
}

std::vector<OptimizerRow> AdamW::table() const {
  std::vector<OptimizerRow> rows;
  for (std::size_t i = 0; i < impl_->moments.size(); ++i) {
    const OwnedParam& param = impl_->params.list()[i];
    const at::Tensor& moment = impl_->moments[i].exp_avg;
    rows.push_back(
        {.name = param.tensor.name,
         .shape = param.tensor.shape,
         .optimizer = "adamw",
         .state_format = moment_format(moment.scalar_type()),
         .block = "element",
         .state_bytes = 2 * static_cast<Index>(moment.nbytes())});
  }
  return rows;
}

}  // namespace ragged::optim
