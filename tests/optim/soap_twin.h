// SOAP on one matrix in double precision, line by line from the paper's Algorithms 3 and 4 (arXiv 2409.11321), with
// nothing of ragged/optim. A basis isn't unique: signs are free, and so is any rotation among equal eigenvalues, as
// those of 0 that a first gradient leaves. So the twin doesn't make one: it checks that one is what the paper asks for,
// and goes on with it.
#pragma once

#include <ATen/ATen.h>

namespace ragged::test {

struct SoapTwin {
  double beta1 = 0.95;
  double beta2 = 0.95;
  double eps = 1e-8;
  int frequency = 10;
  bool left = true;
  bool right = true;

  at::Tensor param{};  // double
  at::Tensor L{}, R{}, Q_L{}, Q_R{}, M{}, V{};
  int steps = 0;

  explicit SoapTwin(const at::Tensor& start);

  /// One step from a gradient, and the checks of the basis that somebody else made in it; undefined for a side without.
  void step(const at::Tensor& grad, double lr, double decay, const at::Tensor& next_left, const at::Tensor& next_right);

 private:
  void adopt(const at::Tensor& factor, at::Tensor& basis, const at::Tensor& next, bool is_first) const;
};

}  // namespace ragged::test
