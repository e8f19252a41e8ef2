// SOAP on one whole matrix: functions of its gradient and its state. They know neither ranks nor parameters; what is
// done with the update (learning rate, decay) is the caller's.
//
// [Note: what SOAP computes]
// SOAP (Vyas et al., 2024, arXiv 2409.11321, Algorithms 3 and 4): Adam in the eigenbasis of Shampoo's preconditioner.
// For a gradient G of m x n:
//     M <- b1 M + (1 - b1) G                     in the original space, so that a new basis needn't move it
//     G' = Q_L^T G Q_R,  M' = Q_L^T M Q_R
//     V <- b2 V + (1 - b2) G' * G'               in the rotated space; stays as it is when the basis changes
//     N  = Q_L (M' / (sqrt(V / c2) + eps)) Q_R^T  c2 = 1 - b2^t; the caller divides by 1 - b1^t
//     L <- b2 L + (1 - b2) G G^T,  R <- b2 R + (1 - b2) G^T G
//     every f steps: Q_L <- QR(L Q_L), Q_R <- QR(R Q_R)   one step of power iteration, orthonormal again
// The paper leaves open how it begins. As its authors' code has it, the first gradient that isn't zero only makes L, R
// and the basis (by eigh, eigenvalues descending, once, in fp64), and updates nothing: in the basis of its own singular
// vectors it is diagonal, and Adam would turn the rounding errors beside the diagonal into steps of full length. Where
// that code then sorts the columns of Q and V by estimated eigenvalues before each power iteration, Algorithm 4
// doesn't, and nor do we: power iteration itself brings the columns into descending order. A side longer than
// max_precondition_dim has no factor and no basis (Q = I, one-sided SOAP); where neither side has one this is Adam,
// from the first step on. Finite gradients beyond 1e19 / sqrt(mn) count as this, so that no square or product
// overflows; what isn't finite ends up in the update, as with AdamW, and a factor that isn't finite or is zero leaves
// its basis as it is: a decomposition that throws would do so on the root alone.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "ragged/base/math.h"
#include "ragged/optim/adamw_math.h"
#include "ragged/plan/soap_cost.h"

namespace ragged::optim {

// What a state takes and costs is a function of shapes, which planners ask too.
using plan::soap_cost;
using plan::soap_sides;
using plan::soap_state_numel;
using plan::SoapSides;

/// fp32, contiguous, zero at first. A side without a factor has no tensors.
struct SoapState {
  at::Tensor left{};         // [rows, rows]
  at::Tensor right{};        // [cols, cols]
  at::Tensor left_basis{};   // as left; zero: not made yet
  at::Tensor right_basis{};  // as right
  at::Tensor exp_avg{};      // [rows, cols], in the original space
  at::Tensor exp_avg_sq{};   // [rows, cols], in the rotated space
};
SoapState make_soap_state(Index rows, Index cols, SoapSides sides, const at::TensorOptions& options);

struct SoapStep {
  AdamWStep adam{};  // betas, eps and the correction of the second moment
  bool refreshes_basis = false;
};

/// Moves the state by a gradient ([rows, cols], fp32, contiguous, its scale in it) and returns the update N, in fp32
/// and the original space. Zeros for the step that makes the basis, and as long as all gradients were zero.
at::Tensor soap_update(const at::Tensor& grad, const SoapState& state, const SoapStep& step);

/// Eigenvectors of a symmetric matrix as columns, by descending eigenvalue; fp32. `factor` must be finite.
at::Tensor eigenbasis(const at::Tensor& factor);
/// One step of power iteration from `basis`: the orthonormal columns of factor basis. `basis` itself where the factor
/// is zero or not finite.
at::Tensor next_basis(const at::Tensor& factor, const at::Tensor& basis);

}  // namespace ragged::optim
