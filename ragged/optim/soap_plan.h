// One SOAP step over pieces of matrices, for any front: which ranks hold what is given as plain intervals; parameters
// and states come with each step. It knows nothing of units, modules or policies (see soap.h), and its plan is all that
// it keeps between steps.
//
// [Note: one step of SOAP]
// By bucket: gradients of cut matrices go to their roots by one all-to-all (matrix_exchange.h), roots move their states
// and compute whole updates (soap_math.h), one all-to-all takes these back, and decay and update happen on the shard.
// Matrices that one rank holds whole are computed there, while the others travel; a bucket of nothing else communicates
// nothing. Given equal gradients the result doesn't depend on how many ranks there are, bit for bit, as long as a
// matrix product and a decomposition of equal input have equal bits on all of them: one kind of machine, one number of
// threads.
//
// [Note: owner state]
// State exists once in a shard group, whole, on the matrix's root, since factors and bases have nothing to do with the
// parameter's shape. Roots are chosen so that neither time nor memory piles up: a matrix weighs its share of all
// operations plus its share of all state, so where these weights come out even, no rank has more than twice its fair
// part of either. Replicas repeat the work and hold the state each.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/comm/communicator.h"
#include "ragged/optim/matrix_layout.h"
#include "ragged/optim/optimizer.h"
#include "ragged/optim/soap_math.h"

namespace ragged::optim {

/// The arithmetic; the same on all ranks.
struct SoapMath {
  double beta1 = 0.95;
  double beta2 = 0.95;  // of the second moment and of both factors
  double eps = 1e-8;
  Index precondition_frequency = plan::kSoapPreconditionFrequency;  // steps from one basis to the next
  Index max_precondition_dim = plan::kSoapMaxPreconditionDim;       // a longer side has no basis; see soap_math.h
  /// Of gradients on their way to the roots and of updates on their way back, in a group of one too: fp32 or bf16.
  at::ScalarType wire_dtype = at::kFloat;
};
/// Throws InvalidArgument on values out of range.
void check(const SoapMath& math);

struct SoapMovement {
  /// Buckets on the wire around the one that computes; 0 runs one after another. Each takes buffers of its size.
  int buckets_in_flight = 2;
  double local_limit = 1.25;  // see plan::RootOptions
};

/// Matrices with their roots, from shapes and intervals alone. Throws as list_matrices() does.
struct SoapLayout {
  std::vector<ParamMatrix> matrices{};
  MatrixRoots roots{};
};
SoapLayout soap_layout(std::span<const MatrixParam> params, const SoapMath& math, double local_limit, int ranks);
/// Elements of the states whose root is `rank`.
Index soap_state_numel(std::span<const ParamMatrix> matrices, const SoapMath& math, int rank);

/// This rank's part of one parameter in one step: 1-D and contiguous, `held` elements. Empty pieces must be given too.
struct SoapPiece {
  at::Tensor param;  // fp32, or another floating dtype through slower code
  at::Tensor grad;   // undefined: neither parameter nor state is touched. All ranks must agree
  double lr = 1e-3;
  double weight_decay = 0.01;  // decoupled, before the update
  std::int64_t step = 1;       // how many this parameter has taken, this one included
};

class SoapPlan {
 public:
  /// The same arguments on all ranks. Throws InvalidArgument, before any communication and alike on all ranks, as
  /// soap_layout() and check() do. Collective, where a group has several ranks: they compare hash() once.
  SoapPlan(
      std::vector<MatrixParam> params, const SoapMath& math, const SoapMovement& movement, comm::Communicator shard,
      comm::Communicator replicate = {});
  ~SoapPlan();
  SoapPlan(SoapPlan&&) noexcept;
  SoapPlan& operator=(SoapPlan&&) noexcept;

  /// Zero; by matrix, those of other roots without tensors.
  std::vector<SoapState> make_states(const at::TensorOptions& options) const;

  /// One step; `pieces` in the order of the parameters, `states` in that of matrices(). Collective over the shard
  /// group: twice a bucket that has cut matrices.
  void step(std::span<const SoapPiece> pieces, std::span<const SoapState> states, const StepScale& scale = {});
  /// Of the steps to come, for schedules: betas, eps and precondition_frequency. Roots stay, though they were chosen by
  /// another frequency. Ranks must agree. Throws InvalidArgument as check() does, and where another value differs.
  void set_math(const SoapMath& math);

  const std::vector<MatrixParam>& params() const;
  const std::vector<ParamMatrix>& matrices() const;
  SoapSides sides(const ParamMatrix& matrix) const;
  /// Weight by rank of the shard group, 2 in all; see [Note: owner state].
  std::vector<double> loads() const;
  std::uint64_t hash() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ragged::optim
