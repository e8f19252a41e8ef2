#include "ragged/optim/make_optimizer.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "ragged/base/error.h"

namespace ragged::optim {
namespace {

using Choices = std::map<std::string, ParamChoice, std::less<>>;

// What the optimizer of one kind is told: its own parameters, with what the rules say of them.
ParamPolicy policy_of(std::string_view kind, std::shared_ptr<const Choices> choices) {
  return [kind = std::string(kind), choices = std::move(choices)](const buffer::ShardedTensor& parameter) {
    const ParamChoice& choice = choices->at(parameter.name);
    return ParamSettings{
        .takes = choice.kind == kind,
        .lr_scale = choice.lr_scale,
        .weight_decay = choice.weight_decay,
        .state_format = choice.state_format};
  };
}

std::unique_ptr<Optimizer> make_part(
    std::string_view kind, const std::shared_ptr<fsdp::Unit>& root, const OptimizerSpec& spec,
    const std::shared_ptr<const Choices>& choices) {
  const auto prepared = [&](auto options) {
    options.lr = spec.lr;
    options.policy = policy_of(kind, choices);
    return options;
  };
  if (kind == "adamw") return std::make_unique<AdamW>(root, prepared(spec.adamw));
  if (kind == "adamw8bit") return std::make_unique<AdamW8bit>(root, prepared(spec.adamw8bit));
  const auto of_matrices = [&](auto options) {
    options.row_ranges = [choices](const buffer::ShardedTensor& parameter) {
      return ranges_of_rows(choices->at(parameter.name).splits);
    };
    return prepared(std::move(options));
  };
  if (kind == "muon") return std::make_unique<Muon>(root, of_matrices(spec.muon));
  if (kind == "soap") return std::make_unique<Soap>(root, of_matrices(spec.soap));
  throw InternalError("[optimizer] " + std::string(kind) + " has no constructor.");
}

// Optimizers over disjoint sets of one tree's parameters.
class Composite : public Optimizer {
 public:
  Composite(std::vector<std::string> names, std::vector<std::unique_ptr<Optimizer>> parts, std::vector<int> part_of)
      : names_(std::move(names)), parts_(std::move(parts)), part_of_(std::move(part_of)) {}

  void step(const StepScale& scale) override {
    for (const auto& part : parts_) part->step(scale);
  }
  void set_lr(double lr) override {
    for (const auto& part : parts_) part->set_lr(lr);
  }
  double lr() const override { return parts_.empty() ? 0.0 : parts_.front()->lr(); }

  std::vector<buffer::ShardedTensor> states() const override {
    std::vector<buffer::ShardedTensor> all;
    for (const auto& part : parts_) {
      for (auto& state : part->states()) all.push_back(std::move(state));
    }
    const auto position = [](const buffer::ShardedTensor& s) { return std::pair(s.unit, s.index); };
    std::ranges::stable_sort(all, {}, position);
    return all;
  }

  std::vector<std::int64_t> steps() const override {
    std::vector<std::int64_t> all(names_.size(), 0);
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const auto steps = parts_[p]->steps();
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (part_of_[i] == static_cast<int>(p)) all[i] = steps[i];
      }
    }
    return all;
  }

  void set_steps(const std::vector<std::int64_t>& steps) override {
    RAGGED_CHECK(
        steps.size() == names_.size(), "[optimizer] Expected a count of steps for each of {} parameters, but got {}.",
        names_.size(), steps.size());
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      std::vector<std::int64_t> own = steps;
      for (std::size_t i = 0; i < own.size(); ++i) {
        if (part_of_[i] != static_cast<int>(p)) own[i] = 0;
      }
      parts_[p]->set_steps(own);
    }
  }

  std::vector<OptimizerRow> table() const override {
    std::map<std::string, OptimizerRow, std::less<>> rows;
    for (const auto& part : parts_) {
      for (auto& row : part->table()) rows.emplace(row.name, row);
    }
    std::vector<OptimizerRow> ordered;
    for (const std::string& name : names_) {
      if (const auto row = rows.find(name); row != rows.end()) ordered.push_back(row->second);
    }
    return ordered;
  }

 private:
  std::vector<std::string> names_;  // of the tree's parameters, in its order
  std::vector<std::unique_ptr<Optimizer>> parts_;
  std::vector<int> part_of_;  // by parameter
};

}  // namespace

std::vector<ParamFacts> param_facts(fsdp::Unit& root) {
  std::vector<ParamFacts> facts;
  for (const auto& parameter : root.sharded_parameters()) facts.push_back({parameter.name, parameter.shape});
  return facts;
}

std::unique_ptr<Optimizer> make_optimizer(std::shared_ptr<fsdp::Unit> root, const OptimizerSpec& spec) {
  const std::vector<ParamFacts> facts = param_facts(*root);
  const std::vector<ParamChoice> resolved = resolve(spec.kind, spec.rules, facts);
  const auto choices = std::make_shared<Choices>();
  std::vector<std::string> names;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    choices->emplace(facts[i].name, resolved[i]);
    names.push_back(facts[i].name);
  }
  std::vector<std::unique_ptr<Optimizer>> parts;
  std::vector<int> part_of(facts.size(), -1);
  for (const std::string_view kind : optimizer_kinds()) {
    bool has_any = false;
    for (std::size_t i = 0; i < facts.size(); ++i) {
      if (resolved[i].kind != kind) continue;
      part_of[i] = static_cast<int>(parts.size());
      has_any = true;
    }
    if (has_any) parts.push_back(make_part(kind, root, spec, choices));
  }
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<Composite>(std::move(names), std::move(parts), std::move(part_of));
}

}  // namespace ragged::optim
