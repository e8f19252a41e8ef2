#include "ragged/optim/soap.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "ragged/base/error.h"
#include "ragged/optim/muon.h"
#include "ragged/optim/owned_params.h"

namespace ragged::optim {
namespace {

// All of it on one rank of the shard group, and on the same one in every replica.
buffer::ShardedTensor state_on_root(
    const OwnedParam& param, const std::string& name, const std::vector<Index>& shape, const at::Tensor& whole,
    int root) {
  buffer::ShardedTensor state = param.tensor;
  state.name = name;
  state.shape = shape;
  state.dtype = at::kFloat;
  state.requires_grad = false;
  state.local = whole.defined() ? whole.view({-1}) : at::empty({0}, param.tensor.local.options().dtype(at::kFloat));
  state.owned = {0, state.local.numel()};
  if (const int dim = state.mesh.find(layout::DimRole::kShard); dim >= 0) {
    std::vector<Index> units(static_cast<std::size_t>(state.mesh.size(dim)), 0);
    units[static_cast<std::size_t>(root)] = 1;
    state.placements.at(static_cast<std::size_t>(dim)) = layout::RaggedShard(0, std::move(units));
  }
  return state;
}

}  // namespace

struct Soap::Impl {
  SoapOptions options;
  OwnedParams params;
  SoapPlan plan;
  std::vector<SoapState> matrix_states;  // by matrix of the plan

  Impl(std::shared_ptr<fsdp::Unit> root, SoapOptions given)
      : options(std::move(given)),
        params(root, options.policy ? options.policy : default_muon_policy, options.weight_decay, "soap"),
        plan(plan_params(), options.math, options.movement, root->groups().shard, root->groups().replicate) {
    if (params.list().empty()) return;
    matrix_states = plan.make_states(params.list().front().tensor.local.options());
  }

  std::vector<MatrixParam> plan_params() const {
    RAGGED_CHECK(
        options.lr >= 0.0 && options.weight_decay >= 0.0,
        "[soap] Expected lr >= 0 and weight_decay >= 0, but got {} and {}.", options.lr, options.weight_decay);
    std::vector<MatrixParam> planned;
    for (const OwnedParam& param : params.list()) {
      RAGGED_CHECK(
          param.state_format.empty() || param.state_format == "fp32",
          "[soap] Expected states in fp32, but got '{}' (param '{}'). Take state_format out of the rule.",
          param.state_format, param.tensor.name);
      planned.push_back(
          {.name = param.tensor.name,
           .shape = param.tensor.shape,
           .held = held_by_rank(param.tensor, params.root().groups().shard.size()),
           .row_ranges = options.row_ranges ? options.row_ranges(param.tensor) : std::vector<layout::Interval>{},
           .bucket = param.tensor.unit});
    }
    return planned;
  }

  // "<p>" where a parameter is one matrix, "<p>.<number>" where it is several; by matrix.
  std::vector<std::string> names() const {
    std::vector<int> counts(params.list().size(), 0);
    for (const ParamMatrix& m : plan.matrices()) ++counts[static_cast<std::size_t>(m.param)];
    std::vector<std::string> names;
    std::vector<int> next(counts.size(), 0);
    for (const ParamMatrix& m : plan.matrices()) {
      const auto p = static_cast<std::size_t>(m.param);
      const std::string& name = params.list()[p].tensor.name;
      names.push_back(counts[p] == 1 ? name : fmt::format("{}.{}", name, next[p]++));
    }
    return names;
  }
};

Soap::Soap(std::shared_ptr<fsdp::Unit> root, SoapOptions options)
    : impl_(std::make_unique<Impl>(std::move(root), std::move(options))) {}
Soap::~Soap() = default;

void Soap::step(const StepScale& scale) {
  if (scale.skip) return;
  comm::ProfilerRange range("ragged::soap", "root");
  const std::vector<fsdp::FlatShard> shards = impl_->params.root().flat_shards();
  std::vector<SoapPiece> pieces;
  for (OwnedParam& param : impl_->params.list()) {
    const fsdp::FlatShard& shard = shards[param.shard];
    const layout::Interval local = param.local;
    const bool has_grad = shard.pieces[param.piece].has_grad;
    if (has_grad) ++param.steps;
    pieces.push_back(
        {.param = shard.params.narrow(0, local.begin, local.size()),
         .grad = has_grad ? shard.grads.narrow(0, local.begin, local.size()) : at::Tensor(),
         .lr = impl_->options.lr * param.lr_scale,
         .weight_decay = param.weight_decay,
         .step = param.steps});
  }
  impl_->plan.step(pieces, impl_->matrix_states, scale);
  impl_->params.root().mark_parameters_changed();
}

void Soap::set_lr(double lr) {
  RAGGED_CHECK(lr >= 0.0, "[soap] Expected lr >= 0, but got {}.", lr);
  impl_->options.lr = lr;
}
double Soap::lr() const {
  return impl_->options.lr;
}

std::vector<buffer::ShardedTensor> Soap::states() const {
  const std::vector<std::string> names = impl_->names();
  std::vector<buffer::ShardedTensor> states;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const ParamMatrix& m = impl_->plan.matrices()[i];
    const OwnedParam& param = impl_->params.list()[static_cast<std::size_t>(m.param)];
    const SoapState& s = impl_->matrix_states[i];
    const auto add = [&](const char* suffix, Index rows, Index cols, const at::Tensor& whole) {
      states.push_back(state_on_root(param, names[i] + suffix, {rows, cols}, whole, m.root));
    };
    const SoapSides sides = impl_->plan.sides(m);
    if (sides.left) add(".L", m.rows, m.rows, s.left);
    if (sides.left) add(".Q_L", m.rows, m.rows, s.left_basis);
    if (sides.right) add(".R", m.cols, m.cols, s.right);
    if (sides.right) add(".Q_R", m.cols, m.cols, s.right_basis);
    add(".exp_avg", m.rows, m.cols, s.exp_avg);
    add(".exp_avg_sq", m.rows, m.cols, s.exp_avg_sq);
  }
  return states;
}
std::vector<std::int64_t> Soap::steps() const {
  return impl_->params.steps();
}
void Soap::set_steps(const std::vector<std::int64_t>& steps) {
  impl_->params.set_steps(steps);
}

std::vector<OptimizerRow> Soap::table() const {
  std::vector<OptimizerRow> rows;
  for (const OwnedParam& param : impl_->params.list()) {
    rows.push_back(
        {.name = param.tensor.name,
         .shape = param.tensor.shape,
         .optimizer = "soap",
         .state_format = "fp32",
         .block = "matrix"});
  }
  const int rank = impl_->params.root().groups().shard.rank();
  for (const ParamMatrix& m : impl_->plan.matrices()) {
    if (m.root != rank) continue;
    rows[static_cast<std::size_t>(m.param)].state_bytes += 4 * soap_state_numel(m.rows, m.cols, impl_->plan.sides(m));
  }
  return rows;
}

const SoapPlan& Soap::plan() const {
  return impl_->plan;
}
const std::vector<SoapState>& Soap::matrix_states() const {
  return impl_->matrix_states;
}

}  // namespace ragged::optim
