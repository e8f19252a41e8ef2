#include "ragged/train/optimizer_setup.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/base/error.h"
#include "ragged/base/text.h"
#include "ragged/train/precision.h"

namespace ragged::train {
namespace {

// "layers.12.mlp" -> "layers.*.mlp".
std::string folded(const std::string& name) {
  std::string pattern;
  std::size_t begin = 0;
  while (begin <= name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    const bool is_number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    pattern += (begin == 0 ? "" : ".") + (is_number ? "*" : part);
    begin = end + 1;
  }
  return pattern;
}

struct TableLine {
  std::vector<std::string> cells;
  Index count = 0;
  Index bytes = 0;
};

std::vector<TableLine> fold(std::span<const optim::OptimizerRow> rows) {
  std::vector<TableLine> lines;
  for (const optim::OptimizerRow& row : rows) {
    const std::vector<std::string> cells{
        folded(row.name), fmt::format("{}", fmt::join(row.shape, " x ")), row.optimizer, row.state_format, row.block};
    auto line = std::ranges::find(lines, cells, &TableLine::cells);
    if (line == lines.end()) line = lines.insert(lines.end(), {.cells = cells});
    ++line->count;
    line->bytes += row.state_bytes;
  }
  return lines;
}

// What both kinds of AdamW are told.
template <class Options>
Options adam_options(const Config& config) {
  Options options;
  options.beta1 = config.optimizer.betas.at(0);
  options.beta2 = config.optimizer.betas.at(1);
  options.eps = config.optimizer.eps;
  options.weight_decay = config.optimizer.weight_decay;
  return options;
}

optim::AdamWOptions adamw_options(const Config& config) {
  auto options = adam_options<optim::AdamWOptions>(config);
  options.moment_dtype = parse_scalar_type(config.optimizer.moment_dtype);
  return options;
}

optim::AdamW8bitOptions adamw8bit_options(const Config& config) {
  auto options = adam_options<optim::AdamW8bitOptions>(config);
  options.state_format = config.optimizer.tile_format;
  return options;
}

optim::MuonOptions muon_options(const Config& config) {
  optim::MuonOptions options;
  options.weight_decay = config.optimizer.weight_decay;
  options.momentum_format = config.optimizer.momentum_format;
  options.math.momentum = config.optimizer.momentum;
  options.math.nesterov = config.optimizer.nesterov;
  options.math.normuon = config.optimizer.normuon;
  options.math.row_beta2 = config.optimizer.row_beta2;
  options.math.scale = optim::muon_scale(config.optimizer.scale);
  options.math.newton_schulz.coefficients = config.optimizer.newton_schulz;
  options.movement.replicas =
      config.optimizer.replicas == "share" ? optim::MuonReplicas::kShare : optim::MuonReplicas::kRepeat;
  return options;
}

optim::SoapOptions soap_options(const Config& config) {
  optim::SoapOptions options;
  options.weight_decay = config.optimizer.weight_decay;
  options.math.beta1 = config.optimizer.betas.at(0);
  options.math.beta2 = config.optimizer.betas.at(1);
  options.math.eps = config.optimizer.eps;
  options.math.precondition_frequency = config.optimizer.precondition_frequency;
  options.math.max_precondition_dim = config.optimizer.max_precondition_dim;
  options.math.wire_dtype = parse_scalar_type(config.optimizer.wire_dtype);
  return options;
}

// Of muon's momentum a format says it all; of adamw8bit's moments, without a rule's word, name and global shape do.
bool has_tiles(
    const optim::ParamChoice& choice, const std::string& momentum_format, const std::string& name,
    const std::vector<Index>& shape) {
  if (choice.kind == "muon") {
    const std::string& format = choice.state_format ? *choice.state_format : momentum_format;
    return format == "power" || format == "dynamic";
  }
  if (choice.kind != "adamw8bit") return false;
  if (choice.state_format) return *choice.state_format != "fp32";
  buffer::ShardedTensor parameter;
  parameter.name = name;
  parameter.shape = shape;
  return !optim::keeps_fp32(parameter);
}

}  // namespace

optim::OptimizerSpec optimizer_spec(const Config& config) {
  return {
      .kind = config.optimizer.kind,
      .rules = config.optimizer.rules,
      .lr = config.train.lr,
      .adamw = adamw_options(config),
      .adamw8bit = adamw8bit_options(config),
      .muon = muon_options(config),
      .soap = soap_options(config)};
}

ParamChoices resolve_optimizers(const Config& config, const torch::nn::Module& model) {
  std::vector<optim::ParamFacts> facts;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : model.named_parameters()) {
    if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;  // tied: under its first name
    facts.push_back({parameter.key(), parameter.value().sizes().vec()});
  }
  const auto choices = optim::resolve(config.optimizer.kind, config.optimizer.rules, facts);
  ParamChoices by_name;
  for (std::size_t i = 0; i < facts.size(); ++i) by_name.emplace(facts[i].name, choices[i]);
  return by_name;
}

void check_optimizer_rules(const Config& config) {
  resolve_optimizers(config, *make_model(config.model, parameters_on(c10::kMeta)));
}

fsdp::ShardPolicy shard_policy(const Config& config, const ParamChoices& choices, const std::string& prefix) {
  if (const Index rows = config.parallel.rows; rows > 0) {
    return [rows](const fsdp::ParamInfo& parameter) -> std::optional<plan::Block> {
      if (parameter.shape.size() < 2) return std::nullopt;
      return plan::rows(rows);
    };
  }
  // A reference: the policy is asked within the call that it is made for.
  return [&choices, momentum_format = config.optimizer.momentum_format,
          prefix](const fsdp::ParamInfo& parameter) -> std::optional<plan::Block> {
    const std::string name = prefix + parameter.name;
    const optim::ParamChoice& choice = choices.at(name);
    if (has_tiles(choice, momentum_format, name, parameter.shape)) return optim::tile_rows_policy()(parameter);
    return std::nullopt;
  };
}

std::string default_rules_text(std::string_view kind) {
  std::string text;
  for (const optim::ParamRule& rule : optim::default_rules(kind)) text += "  " + optim::to_string(rule) + "\n";
  return text.empty() ? text : fmt::format("default rules of {}, which [[optimizer.rules]] overrule:\n{}", kind, text);
}

std::string optimizer_table(std::span<const optim::OptimizerRow> rows) {
  std::vector<std::vector<std::string>> table{{"parameter", "", "shape", "optimizer", "states", "block", "bytes"}};
  Index total = 0;
  for (const TableLine& line : fold(rows)) {
    const std::string count = line.count == 1 ? "" : fmt::format("x {}", line.count);
    table.push_back(
        {line.cells[0], count, line.cells[1], line.cells[2], line.cells[3], line.cells[4], grouped(line.bytes)});
    total += line.bytes;
  }
  table.push_back({"states on this rank", "", "", "", "", "", grouped(total)});
  std::vector<std::size_t> widths(table.front().size(), 0);
  for (const auto& cells : table) {
    for (std::size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
  }
  std::string text;
  for (const auto& cells : table) {
    for (std::size_t i = 0; i + 1 < cells.size(); ++i) text += fmt::format("{:<{}}  ", cells[i], widths[i]);
    text += fmt::format("{:>{}}\n", cells.back(), widths.back());
  }
  return text;
}

}  // namespace ragged::train
