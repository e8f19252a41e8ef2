#include "ragged/optim/adamw8bit.h"

#include <optional>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/optim/adamw8bit_step.h"
#include "ragged/optim/adamw_step.h"
#include "ragged/optim/owned_params.h"

namespace ragged::optim {
namespace {

constexpr Index kFewElements = 4096;

AdamWRates rates_of(const AdamW8bitOptions& o) {
  return {.lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay};
}

const AdamW8bitOptions& checked(const AdamW8bitOptions& options) {
  check_rates(rates_of(options), "adamw8bit");
  RAGGED_CHECK(
      options.state_format == "power" || options.state_format == "dynamic",
      "[adamw8bit] Expected the state format power or dynamic, but got '{}'.", options.state_format);
  return options;
}

// None: fp32.
std::optional<TileFormat> format_of(const OwnedParam& param, const AdamW8bitOptions& options) {
  std::string format = param.state_format;
  if (format.empty()) format = keeps_fp32(param.tensor) ? "fp32" : options.state_format;
  if (format == "power") return TileFormat::kPower;
  if (format == "dynamic") return TileFormat::kDynamic;
  RAGGED_CHECK(
      format == "fp32", "[adamw8bit] Expected the state format fp32, power or dynamic, but got '{}' (param '{}').",
      format, param.tensor.name);
  return std::nullopt;
}

// Moments in tiles. Codes and scales as in AdamW8bitPiece.
struct TiledMoments {
  TileFormat format = TileFormat::kPower;
  TileGeometry geometry;
  at::Tensor exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales;
  StateLayout scales;
};

TiledMoments make_tiled(const buffer::ShardedTensor& param, TileFormat format) {
  TiledMoments moments;
  moments.format = format;
  moments.scales = layout_of_scales(param);
  moments.geometry = tile_geometry(param.shape, param.owned, param.name);
  const auto codes = param.local.options().dtype(at::kByte);
  moments.exp_avg_codes = at::full({moments.geometry.numel}, static_cast<int>(zero_code(format, true)), codes);
  moments.exp_avg_sq_codes = at::full({moments.geometry.numel}, static_cast<int>(zero_code(format, false)), codes);
  moments.exp_avg_scales = at::zeros({moments.geometry.num_tiles()}, param.local.options());
  moments.exp_avg_sq_scales = at::zeros({moments.geometry.num_tiles()}, param.local.options());
  return moments;
}

}  // namespace

struct AdamW8bit::Impl {
  AdamW8bitOptions options;
  OwnedParams params;
  std::vector<std::optional<TiledMoments>> tiled;  // by parameter
  std::vector<Moments> plain;                      // of those that have none
  Index not_finite = 0;

  Impl(std::shared_ptr<fsdp::Unit> root, AdamW8bitOptions given)
      : options(checked(given)), params(std::move(root), options.policy, options.weight_decay, "adamw8bit") {
    for (const OwnedParam& param : params.list()) {
      const auto format = format_of(param, options);
      tiled.push_back(format ? std::optional(make_tiled(param.tensor, *format)) : std::nullopt);
    }
    plain = make_moments(params, [this](const OwnedParam& param) {
      return format_of(param, options) ? std::nullopt : std::optional(at::kFloat);
    });
  }
};

AdamW8bit::AdamW8bit(std::shared_ptr<fsdp::Unit> root, AdamW8bitOptions options)
    : impl_(std::make_unique<Impl>(std::move(root), std::move(options))) {}
AdamW8bit::~AdamW8bit() = default;
AdamW8bit::AdamW8bit(AdamW8bit&&) noexcept = default;
AdamW8bit& AdamW8bit::operator=(AdamW8bit&&) noexcept = default;

void AdamW8bit::set_lr(double lr) {
  RAGGED_CHECK(lr >= 0.0, "[adamw8bit] Expected lr >= 0, but got {}.", lr);
  impl_->options.lr = lr;
}
double AdamW8bit::lr() const {
  return impl_->options.lr;
}
Index AdamW8bit::non_finite_gradients() const {
  return impl_->not_finite;
}

void AdamW8bit::step(const StepScale& scale) {
  if (scale.skip) return;
  comm::ProfilerRange range("ragged::adamw8bit", "root");
  const AdamWRates rates = rates_of(impl_->options);
  std::vector<AdamWPiece> plain;
  std::vector<AdamW8bitPiece> power;
  std::vector<AdamW8bitPiece> dynamic;
  impl_->params.for_each_gradient([&](std::size_t i, const at::Tensor& param, const at::Tensor& grad) {
    const AdamWStep constants = impl_->params.constants(impl_->params.list()[i], rates);
    if (!impl_->tiled[i]) {
      plain.push_back(
          {.param = param,
           .grad = grad,
           .exp_avg = impl_->plain[i].exp_avg,
           .exp_avg_sq = impl_->plain[i].exp_avg_sq,
           .step = constants});
      return;
    }
    const TiledMoments& moments = *impl_->tiled[i];
    (moments.format == TileFormat::kPower ? power : dynamic)
        .push_back(
            {.param = param,
             .grad = grad,
             .exp_avg_codes = moments.exp_avg_codes,
             .exp_avg_scales = moments.exp_avg_scales,
             .exp_avg_sq_codes = moments.exp_avg_sq_codes,
             .exp_avg_sq_scales = moments.exp_avg_sq_scales,
             .geometry = moments.geometry,
             .step = constants});
  });
  adamw_step(plain, scale);
  const bool guards = impl_->options.guards;
  impl_->not_finite += adamw8bit_step(power, scale, {TileFormat::kPower, guards});
  impl_->not_finite += adamw8bit_step(dynamic, scale, {TileFormat::kDynamic, guards});
}

std::vector<buffer::ShardedTensor> AdamW8bit::states() const {
  std::vector<buffer::ShardedTensor> states;
  for (std::size_t i = 0; i < impl_->tiled.size(); ++i) {
    const OwnedParam& param = impl_->params.list()[i];
    if (!impl_->tiled[i]) {
      states.push_back(state_like(param, ".exp_avg", impl_->plain[i].exp_avg));
      states.push_back(state_like(param, ".exp_avg_sq", impl_->plain[i].exp_avg_sq));
      continue;
    }
    const TiledMoments& moments = *impl_->tiled[i];
    states.push_back(state_like(param, ".exp_avg.codes", moments.exp_avg_codes));
    states.push_back(state_beside(param, ".exp_avg.scales", moments.exp_avg_scales, moments.scales));
    states.push_back(state_like(param, ".exp_avg_sq.codes", moments.exp_avg_sq_codes));
    states.push_back(state_beside(param, ".exp_avg_sq.scales", moments.exp_avg_sq_scales, moments.scales));
  }
  return states;
}

std::vector<std::int64_t> AdamW8bit::steps() const {
  return impl_->params.steps();
}
void AdamW8bit::set_steps(const std::vector<std::int64_t>& steps) {
  impl_->params.set_steps(steps);
}

std::vector<OptimizerRow> AdamW8bit::table() const {
  std::vector<OptimizerRow> rows;
  for (std::size_t i = 0; i < impl_->tiled.size(); ++i) {
    const OwnedParam& param = impl_->params.list()[i];
    OptimizerRow row;
    row.name = param.tensor.name;
    row.shape = param.tensor.shape;
    row.optimizer = "adamw8bit";
    if (const auto& moments = impl_->tiled[i]) {
      row.state_format = tile_format_name(moments->format);
      row.block = fmt::format("{} rows", tile_block_rows(param.tensor.shape));
      row.state_bytes = 2 * static_cast<Index>(moments->exp_avg_codes.nbytes() + moments->exp_avg_scales.nbytes());
    } else {
      row.state_format = "fp32";
      row.block = "element";
      row.state_bytes = 2 * static_cast<Index>(impl_->plain[i].exp_avg.nbytes());
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

bool keeps_fp32(const buffer::ShardedTensor& param) {
  if (param.shape.size() < 2 || checked_product(param.shape) < kFewElements) return true;
  // "model.embed_tokens.weight" -> "embed_tokens"; a tensor of its own name, "model.embed" -> "embed".
  std::string_view name = param.name;
  const auto last = [&name] { return name.substr(name.rfind('.') + 1); };  // npos + 1 is 0
  if (last() == "weight" && name.size() > last().size()) name.remove_suffix(last().size() + 1);
  const std::string_view module = last();
  return module.find("embed") != std::string_view::npos || module == "wte" || module == "wpe" || module == "head" ||
      module.ends_with("_head");
}

fsdp::ShardPolicy tile_rows_policy() {
  return [](const fsdp::ParamInfo& param) -> std::optional<plan::Block> {
    if (param.shape.size() < 2) return std::nullopt;
    return plan::rows(tile_block_rows(param.shape));
  };
}

}  // namespace ragged::optim
