// Compiled with -ffp-contract=off, like the kernels that it is the twin of.
#include "tests/optim/muon_twin.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "tests/optim/adamw8bit_twin.h"

namespace ragged::test {
namespace {

constexpr Index kTile = 32;

at::Tensor orthogonal(at::Tensor x) {
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t();
  x = x / (x.norm() + 1e-300);
  for (int i = 0; i < 5; ++i) {
    const at::Tensor a = at::mm(x, x.t());
    x = x * 3.4445 + at::mm(a * -4.7750 + at::mm(a, a) * 2.0315, x);
  }
  return tall ? x.t() : x;
}

}  // namespace

MuonTwin::MuonTwin(const std::vector<Index>& shape, const std::vector<float>& initial, const MuonTwinOptions& given)
    : options(given), value(initial.begin(), initial.end()), momentum(initial.size(), 0.0F) {
  rows = shape.size() >= 4 ? shape[0] : shape[shape.size() - 2];
  columns = shape.size() >= 4 ? static_cast<Index>(initial.size()) / rows : shape.back();
  matrices = static_cast<Index>(initial.size()) / (rows * columns);
  row_exp_avg_sq.assign(static_cast<std::size_t>(matrices * rows), 0.0);
  if (options.format == "fp32") return;
  codes.assign(initial.size(), options.format == "dynamic" ? 127 : 0);
  scales.assign(static_cast<std::size_t>(matrices * ceil_div(rows, kTile) * ceil_div(columns, kTile)), 0.0F);
}

std::vector<float> MuonTwin::pack(const std::vector<float>& grad) {
  std::vector<float> directions;
  for (std::size_t i = 0; i < grad.size(); ++i) {
    const float moved = momentum[i] + (1.0F - options.beta) * (grad[i] - momentum[i]);
    if (options.format != "fp32" && !std::isfinite(moved)) {
      directions.push_back(std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    momentum[i] = moved;
    directions.push_back(options.nesterov ? grad[i] + options.beta * (moved - grad[i]) : moved);
  }
  if (options.format != "fp32") encode();
  return directions;
}

void MuonTwin::encode() {
  static const std::array<float, 256> map = published_map(true);
  const bool dynamic = options.format == "dynamic";
  const Index strips = ceil_div(rows, kTile);
  const Index across = ceil_div(columns, kTile);
  const auto tile_of = [&](Index row, Index column) {  // of a row of the stack
    return static_cast<std::size_t>((row / rows * strips + row % rows / kTile) * across + column / kTile);
  };
  std::fill(scales.begin(), scales.end(), 0.0F);
  for (Index r = 0; r < matrices * rows; ++r) {
    for (Index c = 0; c < columns; ++c) {
      float& scale = scales[tile_of(r, c)];
      scale = std::max(scale, std::fabs(momentum[static_cast<std::size_t>(r * columns + c)]));
    }
  }
  for (float& scale : scales) {
    if (scale < std::numeric_limits<float>::min()) scale = 0.0F;
  }
  for (Index r = 0; r < matrices * rows; ++r) {
    for (Index c = 0; c < columns; ++c) {
      const auto i = static_cast<std::size_t>(r * columns + c);
      const float scale = scales[tile_of(r, c)];
      const float share = scale > 0.0F ? momentum[i] * (1.0F / scale) : 0.0F;
      if (dynamic) {
        const int entry = scale > 0.0F ? nearest_entry(map, share) : 127;
        codes[i] = static_cast<std::uint8_t>(entry);
        momentum[i] = map[static_cast<std::size_t>(entry)] * scale;
      } else {
        const auto size = static_cast<int>(std::nearbyint(std::sqrt(std::fabs(share)) * 127.0F));
        const int code = share < 0.0F ? -size : size;
        codes[i] = static_cast<std::uint8_t>(code);
        const float k = static_cast<float>(code) * (1.0F / 127.0F);
        momentum[i] = scale * (k * std::fabs(k));
      }
    }
  }
}

void MuonTwin::update(const std::vector<float>& grad) {
  const std::vector<float> directions = pack(grad);
  const at::Tensor all = at::tensor(directions).to(at::kDouble).view({matrices, rows, columns});
  for (Index m = 0; m < matrices; ++m) {
    at::Tensor update = orthogonal(all[m]).contiguous();
    if (options.normuon) {
      const double length = update.norm().item<double>();
      for (Index r = 0; r < rows; ++r) {
        double& average = row_exp_avg_sq[static_cast<std::size_t>(m * rows + r)];
        average = options.row_beta2 * average + (1.0 - options.row_beta2) * update[r].square().mean().item<double>();
        update[r] /= std::sqrt(average) + 1e-10;
      }
      const double now = update.norm().item<double>();
      update = now > 0.0 ? update * (length / now) : update;
    }
    const double ratio = static_cast<double>(rows) / static_cast<double>(columns);
    const double step = options.lr * std::sqrt(std::max(1.0, ratio));
    const double* moves = update.const_data_ptr<double>();
    for (Index i = 0; i < rows * columns; ++i) {
      double& x = value[static_cast<std::size_t>(m * rows * columns + i)];
      x = x * (1.0 - options.lr * options.decay) - step * moves[i];
    }
  }
}

}  // namespace ragged::test
