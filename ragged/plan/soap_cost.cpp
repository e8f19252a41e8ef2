#include "ragged/plan/soap_cost.h"

namespace ragged::plan {

SoapSides soap_sides(Index rows, Index cols, Index max_precondition_dim) {
  return {.left = rows <= max_precondition_dim, .right = cols <= max_precondition_dim};
}

Index soap_state_numel(Index rows, Index cols, SoapSides sides) {
  return 2 * rows * cols + (sides.left ? 2 * rows * rows : 0) + (sides.right ? 2 * cols * cols : 0);
}

double soap_cost(Index rows, Index cols, SoapSides sides, Index precondition_frequency) {
  const auto m = static_cast<double>(rows);
  const auto n = static_cast<double>(cols);
  // Three rotations and the factor, 2 m^2 n each; of a new basis the product is 2 m^3, QR and its Q 8/3 m^3.
  const auto side = [&](double length) {
    return 8.0 * m * n * length + 14.0 / 3.0 * length * length * length / static_cast<double>(precondition_frequency);
  };
  return (sides.left ? side(m) : 0.0) + (sides.right ? side(n) : 0.0) + 10.0 * m * n;
}

std::vector<double> soap_weights(
    std::span<const SoapMatrix> matrices, Index precondition_frequency, Index max_precondition_dim) {
  std::vector<double> time;
  std::vector<double> memory;
  double all_time = 0.0;
  double all_memory = 0.0;
  for (const SoapMatrix& m : matrices) {
    const SoapSides sides = soap_sides(m.rows, m.cols, max_precondition_dim);
    time.push_back(soap_cost(m.rows, m.cols, sides, precondition_frequency));
    memory.push_back(static_cast<double>(soap_state_numel(m.rows, m.cols, sides)));
    all_time += time.back();
    all_memory += memory.back();
  }
  std::vector<double> weights;
  for (std::size_t i = 0; i < time.size(); ++i) weights.push_back(time[i] / all_time + memory[i] / all_memory);
  return weights;
}

}  // namespace ragged::plan
