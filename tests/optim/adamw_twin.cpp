// Compiled with -ffp-contract=off, like what it is the twin of.
#include "tests/optim/adamw_twin.h"

#include <cmath>

namespace ragged::test {

void TwinParameter::update(
    const TwinOptions& options, const std::vector<float>& grad, const std::function<float(float)>& round) {
  ++step;
  const auto beta1 = static_cast<float>(options.beta1);
  const auto beta2 = static_cast<float>(options.beta2);
  const auto rest1 = static_cast<float>(1.0 - options.beta1);
  const auto rest2 = static_cast<float>(1.0 - options.beta2);
  const auto keep = static_cast<float>(decays ? 1.0 - options.lr * options.weight_decay : 1.0);
  const auto step_size = static_cast<float>(options.lr / (1.0 - std::pow(options.beta1, step)));
  const auto root = static_cast<float>(std::sqrt(1.0 - std::pow(options.beta2, step)));
  const auto eps = static_cast<float>(options.eps);
  for (std::size_t i = 0; i < value.size(); ++i) {
    const float first = beta1 * exp_avg[i] + rest1 * grad[i];
    const float second = beta2 * exp_avg_sq[i] + rest2 * (grad[i] * grad[i]);
    value[i] = value[i] * keep - step_size * (first / (std::sqrt(second) / root + eps));
    exp_avg[i] = round(first);
    exp_avg_sq[i] = round(second);
  }
}

}  // namespace ragged::test
