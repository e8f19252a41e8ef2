#include "ragged/optim/adamw.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/optim/adamw_step.h"

namespace ragged::optim {
namespace {

void check(const AdamWOptions& o) {
  RAGGED_CHECK(o.lr >= 0.0, "[adamw] Expected lr >= 0, but got {}.", o.lr);
  RAGGED_CHECK(o.beta1 >= 0.0 && o.beta1 < 1.0, "[adamw] Expected beta1 in [0, 1), but got {}.", o.beta1);
  RAGGED_CHECK(o.beta2 >= 0.0 && o.beta2 < 1.0, "[adamw] Expected beta2 in [0, 1), but got {}.", o.beta2);
  RAGGED_CHECK(o.eps >= 0.0, "[adamw] Expected eps >= 0, but got {}.", o.eps);
  RAGGED_CHECK(o.weight_decay >= 0.0, "[adamw] Expected weight_decay >= 0, but got {}.", o.weight_decay);
  RAGGED_CHECK(
      o.moment_dtype == at::kFloat || o.moment_dtype == at::kBFloat16,
      "[adamw] Expected moment_dtype fp32 or bf16, but got {}.", c10::toString(o.moment_dtype));
}

}  // namespace

struct AdamW::Impl {
  struct UnitState {
    at::Tensor exp_avg;  // 1-D, the masters' offsets
    at::Tensor exp_avg_sq;
    std::vector<std::int64_t> steps;  // by parameter
    std::vector<char> decays;         // by parameter
  };

  std::shared_ptr<fsdp::Unit> root;
  AdamWOptions options;
  std::vector<UnitState> units;  // in the order of flat_shards()

  AdamWStep constants(std::int64_t step, bool decays) const {
    // In double, then rounded once: the same on every rank.
    const double correction1 = 1.0 - std::pow(options.beta1, static_cast<double>(step));
    const double correction2 = 1.0 - std::pow(options.beta2, static_cast<double>(step));
    return {
        .decay = static_cast<float>(decays ? 1.0 - options.lr * options.weight_decay : 1.0),
        .beta1 = static_cast<float>(options.beta1),
        .one_minus_beta1 = static_cast<float>(1.0 - options.beta1),
        .beta2 = static_cast<float>(options.beta2),
        .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
        .step_size = static_cast<float>(options.lr / correction1),
        .root_correction2 = static_cast<float>(std::sqrt(correction2)),
        .eps = static_cast<float>(options.eps)};
  }

  void update(const AdamWStep& step, UnitState& state, const fsdp::FlatShard& shard, layout::Interval local) const;
};

AdamW::AdamW(std::shared_ptr<fsdp::Unit> root, AdamWOptions options) : impl_(std::make_unique<Impl>()) {
  check(options);
  impl_->root = std::move(root);
  impl_->options = std::move(options);
  const auto parameters = impl_->root->sharded_parameters();
  std::size_t next = 0;
  for (const fsdp::FlatShard& shard : impl_->root->flat_shards()) {
    Impl::UnitState state;
    const auto like = shard.params.options().dtype(impl_->options.moment_dtype);
    state.exp_avg = at::zeros({shard.params.numel()}, like);
    state.exp_avg_sq = at::zeros({shard.params.numel()}, like);
    for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
      const buffer::ShardedTensor& parameter = parameters[next++];
      RAGGED_CHECK(
          parameter.dtype == at::kFloat, "[adamw] Expected fp32 masters, but got {} (param '{}').",
          c10::toString(parameter.dtype), parameter.name);
      state.steps.push_back(0);
      state.decays.push_back(impl_->options.decays ? impl_->options.decays(parameter) : parameter.shape.size() >= 2);
    }
    impl_->units.push_back(std::move(state));
  }
}

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

void AdamW::Impl::update(
    const AdamWStep& step, UnitState& state, const fsdp::FlatShard& shard, layout::Interval local) const {
  const auto part = [local](const at::Tensor& flat) { return flat.narrow(0, local.begin, local.size()); };
  const AdamWPiece piece{
      .param = part(shard.params),
      .grad = part(shard.grads),
      .exp_avg = part(state.exp_avg),
      .exp_avg_sq = part(state.exp_avg_sq),
      .step = step};
  adamw_step({&piece, 1});
}

void AdamW::step() {
  comm::ProfilerRange range("ragged::adamw", "root");
  const std::vector<fsdp::FlatShard> shards = impl_->root->flat_shards();
  for (std::size_t u = 0; u < shards.size(); ++u) {
    Impl::UnitState& state = impl_->units[u];
    // Neighbours whose constants agree form one span: usually the whole shard is two or three.
    layout::Interval span{0, 0};
    std::int64_t span_step = 0;
    bool span_decays = false;
    const auto flush = [&] {
      if (!span.empty()) impl_->update(impl_->constants(span_step, span_decays), state, shards[u], span);
      span = {0, 0};
    };
    std::vector<fsdp::FlatShard::Piece> pieces = shards[u].pieces;
    std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.local.begin < b.local.begin; });
    for (const fsdp::FlatShard::Piece& piece : pieces) {
      if (!piece.has_grad) continue;
      const auto i = static_cast<std::size_t>(piece.index);
      const std::int64_t step = ++state.steps[i];
      const bool decays = state.decays[i];
      if (piece.local.empty()) continue;
      if (span.end != piece.local.begin || step != span_step || decays != span_decays) {
        flush();
        span.begin = piece.local.begin;
      }
      span.end = piece.local.end;
      span_step = step;
      span_decays = decays;
    }
    flush();
  }
  impl_->root->mark_parameters_changed();
}

std::vector<buffer::ShardedTensor> AdamW::states() const {
  std::vector<buffer::ShardedTensor> states;
  const auto shards = impl_->root->flat_shards();
  std::size_t u = 0;
  std::size_t i = 0;
  for (buffer::ShardedTensor parameter : impl_->root->sharded_parameters()) {
    const layout::Interval local = shards[u].pieces[i].local;
    const std::string name = parameter.name;
    parameter.dtype = impl_->options.moment_dtype;
    parameter.name = name + ".exp_avg";
    parameter.local = impl_->units[u].exp_avg.narrow(0, local.begin, local.size());
    states.push_back(parameter);
    parameter.name = name + ".exp_avg_sq";
    parameter.local = impl_->units[u].exp_avg_sq.narrow(0, local.begin, local.size());
    states.push_back(parameter);
    if (++i == shards[u].pieces.size()) {
      i = 0;
      ++u;
    }
  }
  return states;
}

}  // namespace ragged::optim
