#include "ragged/optim/muon.h"

#include <algorithm>
#include <array>
#include <optional>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "ragged/base/error.h"
#include "ragged/optim/owned_params.h"
#include "ragged/optim/tile_geometry.h"

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

// Of one parameter.
struct States {
  at::Tensor momentum;  // or its codes
  // In tiles only.
  std::optional<TileFormat> format;
  at::Tensor scales;
  StateLayout scales_layout;
  // NorMuon's.
  at::Tensor row_exp_avg_sq;
  StateLayout rows_layout;
};

// The parameter as its matrices: [out, rest] where they are flattened.
buffer::ShardedTensor as_matrices(const buffer::ShardedTensor& param, bool flattens) {
  buffer::ShardedTensor matrices = param;
  if (!flattens || param.shape.size() < 2) return matrices;
  matrices.shape = {param.shape[0], checked_product(std::span(param.shape).subspan(1))};
  for (layout::Placement& placement : matrices.placements) {
    const auto* ragged = std::get_if<layout::RaggedShard>(&placement);
    if (!ragged) continue;
    std::vector<layout::Interval> by_rank;
    for (int rank = 0; rank < ragged->world_size(); ++rank)
      by_rank.push_back(layout::ragged_interval(param.shape, *ragged, rank));
    placement = layout::ragged_from_intervals(matrices.shape, by_rank);
  }
  return matrices;
}

States make_states(const OwnedParam& param, bool flattens, const MuonOptions& options) {
  const std::string& format = param.state_format.empty() ? options.momentum_format : param.state_format;
  RAGGED_CHECK(
      format == "fp32" || format == "bf16" || format == "power" || format == "dynamic",
      "[muon] Expected a momentum in fp32, bf16, power or dynamic, but got '{}' (param '{}').", format,
      param.tensor.name);
  RAGGED_CHECK(
      param.tensor.shape.size() >= 2,
      "[muon] Expected parameters of two and more dims, but got the shape [{}] (param '{}'). Send it to AdamW.",
      fmt::join(param.tensor.shape, ", "), param.tensor.name);
  const buffer::ShardedTensor matrices = as_matrices(param.tensor, flattens);
  const at::TensorOptions fp32 = param.tensor.local.options();
  States states;
  if (format == "fp32" || format == "bf16") {
    states.momentum = at::zeros({param.local.size()}, fp32.dtype(format == "fp32" ? at::kFloat : at::kBFloat16));
  } else {
    states.format = format == "power" ? TileFormat::kPower : TileFormat::kDynamic;
    states.scales_layout = layout_of_scales(matrices);
    states.momentum =
        at::full({param.local.size()}, static_cast<int>(zero_code(*states.format, true)), fp32.dtype(at::kByte));
    states.scales = at::zeros({states.scales_layout.owned.size()}, fp32);
  }
  if (options.math.normuon) {
    std::vector<Index> rows = matrices.shape;
    rows.pop_back();
    states.rows_layout =
        layout_beside(matrices, rows, [&](layout::Interval held) { return begun_rows(held, matrices.shape.back()); });
    states.row_exp_avg_sq = at::zeros({states.rows_layout.owned.size()}, fp32);
  }
  return states;
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
  std::vector<States> states;
  MuonPlan plan;

  Impl(std::shared_ptr<fsdp::Unit> root, MuonOptions given)
      : options(std::move(given)),
        params(root, options.policy ? options.policy : default_muon_policy, options.weight_decay, "muon"),
        states(make_all()),
        plan(plan_params(), options.math, options.movement, root->groups().shard, root->groups().replicate) {}

  bool flattens(const OwnedParam& param) const {
    return options.flattens ? options.flattens(param.tensor) : param.tensor.shape.size() >= 4;
  }

  std::vector<States> make_all() const {
    RAGGED_CHECK(
        options.lr >= 0.0 && options.weight_decay >= 0.0,
        "[muon] Expected lr >= 0 and weight_decay >= 0, but got {} and {}.", options.lr, options.weight_decay);
    std::vector<States> made;
    for (const OwnedParam& param : params.list()) made.push_back(make_states(param, flattens(param), options));
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
           .bucket = param.tensor.unit,
           .flatten_rest = flattens(param)});
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
    const States& states = impl_->states[i];
    MuonPiece piece{
        .param = shard.params.narrow(0, local.begin, local.size()),
        .grad = {},
        .momentum = states.momentum,
        .lr = impl_->options.lr * param.lr_scale,
        .weight_decay = param.weight_decay,
        .momentum_scales = states.scales,
        .momentum_format = states.format.value_or(TileFormat::kPower),
        .row_exp_avg_sq = states.row_exp_avg_sq};
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
  for (std::size_t i = 0; i < impl_->states.size(); ++i) {
    const OwnedParam& param = impl_->params.list()[i];
    const States& own = impl_->states[i];
    states.push_back(state_like(param, own.format ? ".momentum.codes" : ".momentum", own.momentum));
    if (own.format) states.push_back(state_beside(param, ".momentum.scales", own.scales, own.scales_layout));
    if (own.row_exp_avg_sq.defined())
      states.push_back(state_beside(param, ".row_exp_avg_sq", own.row_exp_avg_sq, own.rows_layout));
  }
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
  for (std::size_t i = 0; i < impl_->states.size(); ++i) {
    const OwnedParam& param = impl_->params.list()[i];
    const States& own = impl_->states[i];
    OptimizerRow row{
        .name = param.tensor.name,
        .shape = param.tensor.shape,
        .optimizer = impl_->options.math.normuon ? "normuon" : "muon",
        .state_format = own.format ? tile_format_name(*own.format) : moment_format(own.momentum.scalar_type()),
        .block = own.format ? fmt::format("{} rows", tile_block_rows(param.tensor.shape)) : "element",
        .state_bytes = static_cast<Index>(own.momentum.nbytes())};
    for (const at::Tensor& more : {own.scales, own.row_exp_avg_sq}) {
      if (more.defined()) row.state_bytes += static_cast<Index>(more.nbytes());
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

const MuonPlan& Muon::plan() const {
  return impl_->plan;
}

}  // namespace ragged::optim
