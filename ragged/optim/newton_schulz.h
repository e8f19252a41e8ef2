// Newton-Schulz iteration: the nearest semi-orthogonal matrix, about. Each step is X <- aX + (bA + cA^2) X, A = X X^T;
// sets of (a, b, c) differ in how fast and how close to 1 they push singular values.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ragged::optim {

struct NewtonSchulzSet {
  std::vector<std::array<double, 3>> steps;  // (a, b, c)
  double norm_factor = 1.0;                  // the input is scaled to a Frobenius norm of its inverse
};

/// Names of the sets, in the order of the documentation.
std::vector<std::string> newton_schulz_names();
/// `num_steps` 0: the set's own number. Throws InvalidArgument for an unknown name, saying which there are, and for a
/// number of steps that the set has no coefficients for. Coefficients of one's own are a name too: "a, b, c" are every
/// step's.
///   keller         5, any number          Jordan et al., 2024: a band around 1, steep at 0
///   you            5, at most 5           ends closer to 1
///   polar_express  5, any number          arXiv 2505.16932, with safety factor 1.01
///   cushioned      5, at most 5           polar_express for 16 bits; the input is held below norm 1
///   deepseek_v4    10, exactly 10         8 of keller, then 2 that settle at 1
NewtonSchulzSet newton_schulz_set(std::string_view name, int num_steps = 0);

struct NewtonSchulzOptions {
  std::string coefficients = "keller";
  int num_steps = 0;                     // 0: the set's own
  at::ScalarType dtype = at::kBFloat16;  // of operands; products are summed in fp32. Also fp32, fp64
  /// Equal shapes in one product. Same bits on CPU.
  bool batched = true;
  /// bf16 on a CPU: by the processor's own instructions where has_bf16_products() (isa.h). Else, and if false, products
  /// are fp32's of operands rounded to bf16: the same rounding, sums in another order.
  bool native_bf16 = true;
};

/// Throws InvalidArgument on a name, number of steps or dtype that there isn't.
void check(const NewtonSchulzOptions& options);

/// [rows, cols] or [n, rows, cols], floating, to the same shape in options.dtype (bf16, fp32 or fp64). The input is
/// first scaled by a power of two, exactly, and normalised in fp32, so that its own size never matters: 1e-30 and 1e30
/// are alike. A matrix of zeros (or of less than the smallest normal fp32 number) gives zeros; NaN and infinity give
/// NaN.
at::Tensor newton_schulz(const at::Tensor& matrices, const NewtonSchulzSet& set, const NewtonSchulzOptions& options);

}  // namespace ragged::optim
