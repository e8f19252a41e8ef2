#include "ragged/optim/muon.h"

#include <algorithm>
#include <array>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/optim/owned_params.h"

namespace ragged::optim {
namespace {

constexpr std::array<std::string_view, 9> kNotHidden = {"embed",  "wte",         "wpe",    "head", "lm_head",
                                                        "output", "unembedding", "router", "gate"};

// "layers.0.mlp.gate_proj.weight" -> whether one of its dotted parts is, or for "embed" begins with, the word.
// gate_proj is a hidden matrix; a module that is called gate is a router.
bool has_part(std::string_view name, std::string_view word) {
  while (!name.empty()) {
    const std::size_t dot = name.find('.');
    const std::string_view part = name.substr(0, dot);
    if (part == word || (word == "embed" && part.starts_with(word))) return true;
    if (dot == std::string_view::npos) break;
    name.remove_prefix(dot + 1);
  }
  return false;
}

at::ScalarType momentum_dtype(const OwnedParam& param, const MuonOptions& options) {
  const std::string& format = param.state_format.empty() ? options.momentum_format : param.state_format;
  RAGGED_CHECK(
      format == "fp32" || format == "bf16", "[muon] Expected momentum in fp32 or bf16, but got '{}' (param '{}').",
      format, param.tensor.name);
  return format == "fp32" ? at::kFloat : at::kBFloat16;
}

}  // namespace

ParamSettings default_muon_policy(const buffer::ShardedTensor& param) {
  ParamSettings settings;
  settings.takes = param.shape.size() >= 2 && param.name.find("bias") == std::string::npos &&
      std::ranges::none_of(kNotHidden, [&](std::string_view word) { return has_part(param.name, word); });
  return settings;
}

struct Muon::Impl {
  MuonOptions options;
  OwnedParams params;
  std::vector<at::Tensor> momenta;
  MuonPlan plan;

  Impl(std::shared_ptr<fsdp::Unit> root, MuonOptions given)
      : options(std::move(given)),
        params(root, options.policy ? options.policy : default_muon_policy, options.weight_decay, "muon"),
        momenta(make_momenta()),
        plan(plan_params(), options.math, options.movement, root->groups().shard, root->groups().replicate) {}

  std::vector<at::Tensor> make_momenta() const {
    RAGGED_CHECK(
        options.lr >= 0.0 && options.weight_decay >= 0.0,
        "[muon] Expected lr >= 0 and weight_decay >= 0, but got {} and {}.", options.lr, options.weight_decay);
    std::vector<at::Tensor> made;
    for (const OwnedParam& param : params.list())
      made.push_back(
          at::zeros({param.local.size()}, param.tensor.local.options().dtype(momentum_dtype(param, options))));
    return made;
  }

  std::vector<MuonParam> plan_params() const {
    std::vector<MuonParam> planned;
    for (const OwnedParam& param : params.list()) {
      planned.push_back(
          {.name = param.tensor.name,
           .shape = param.tensor.shape,
           .held = held_by_rank(param.tensor, params.root().groups().shard.size()),
           .row_ranges = options.row_ranges ? options.row_ranges(param.tensor) : std::vector<layout::Interval>{},
           .bucket = param.tensor.unit});
    }
    return planned;
  }
};

Muon::Muon(std::shared_ptr<fsdp::Unit> root, MuonOptions options)
    : impl_(std::make_unique<Impl>(std::move(root), std::move(options))) {}
Muon::~Muon() = default;

void Muon::step(const StepScale& scale) {
  if (scale.skip) return;
  comm::ProfilerRange range("ragged::muon", "root");
  const std::vector<fsdp::FlatShard> shards = impl_->params.root().flat_shards();
  std::vector<MuonPiece> pieces;
  for (std::size_t i = 0; i < impl_->params.list().size(); ++i) {
    OwnedParam& param = impl_->params.list()[i];
    const fsdp::FlatShard& shard = shards[param.shard];
    const layout::Interval local = param.local;
    MuonPiece piece{
        .param = shard.params.narrow(0, local.begin, local.size()),
        .grad = {},
        .momentum = impl_->momenta[i],
        .lr = impl_->options.lr * param.lr_scale,
        .weight_decay = param.weight_decay};
    if (shard.pieces[param.piece].has_grad) {
      piece.grad = shard.grads.narrow(0, local.begin, local.size());
      ++param.steps;
    }
    pieces.push_back(std::move(piece));
  }
  impl_->plan.step(pieces, scale);
  impl_->params.root().mark_parameters_changed();
}

void Muon::set_lr(double lr) {
  RAGGED_CHECK(lr >= 0.0, "[muon] Expected lr >= 0, but got {}.", lr);
  impl_->options.lr = lr;
}
double Muon::lr() const {
  return impl_->options.lr;
}

std::vector<buffer::ShardedTensor> Muon::states() const {
  std::vector<buffer::ShardedTensor> states;
  for (std::size_t i = 0; i < impl_->momenta.size(); ++i)
    states.push_back(state_like(impl_->params.list()[i], ".momentum", impl_->momenta[i]));
  return states;
}
std::vector<std::int64_t> Muon::steps() const {
  return impl_->params.steps();
}
void Muon::set_steps(const std::vector<std::int64_t>& steps) {
  impl_->params.set_steps(steps);
}

std::vector<OptimizerRow> Muon::table() const {
  std::vector<OptimizerRow> rows;
  for (std::size_t i = 0; i < impl_->momenta.size(); ++i) {
    const OwnedParam& param = impl_->params.list()[i];
    rows.push_back(
        {.name = param.tensor.name,
         .shape = param.tensor.shape,
         .optimizer = "muon",
         .state_format = moment_format(impl_->momenta[i].scalar_type()),
         .block = "element",
         .state_bytes = static_cast<Index>(impl_->momenta[i].nbytes())});
  }
  return rows;
}

const MuonPlan& Muon::plan() const {
  return impl_->plan;
}

}  // namespace ragged::optim
