// One Muon step over pieces of matrices, for any front: which ranks hold what is given as plain intervals, parameters
// and states come with each step. It knows nothing of units, modules or policies (see muon.h), and keeps nothing
// between steps but its plan and buffers.
//
// [Note: one step]
// By bucket: the momentum is updated on the shard, and what is to be orthogonalised goes in the wire dtype straight
// into the send buffer; one all-to-all takes it to the matrices' roots; these orthogonalise whole matrices
// (newton_schulz.h); one all-to-all takes the results back; decay and update happen on the shard. Momentum never
// leaves its shard. Matrices that one rank holds whole are computed there, while the others travel. A bucket of
// nothing else, and a group of one, communicate nothing but go the same way, so the result doesn't depend on how many
// ranks there are: bit for bit, given equal gradients.
//
// [Note: rows] NorMuon's second moment is a number a row, and lives with the momentum: on the rank that holds the row's
// first element, whatever blocks the matrix is cut at. It goes to the root behind the pieces in the same all-to-all (4
// bytes a row, 2 / columns of what travels anyway) and comes back moved. So no state depends on roots, which change
// with the number of ranks, and checkpoints see one more ordinary sharded tensor.
//
// Muon: Jordan et al., 2024; scale "match_rms_adamw": Moonlight (arXiv 2502.16982); one root a matrix: veScale-FSDP
// (arXiv 2602.22437), Algorithm 2.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/comm/communicator.h"
#include "ragged/optim/matrix_layout.h"
#include "ragged/optim/newton_schulz.h"
#include "ragged/optim/optimizer.h"
#include "ragged/optim/tile_codes.h"

namespace ragged::optim {

/// Length of the update of an m x n matrix: sqrt(max(1, m / n)), or 0.2 sqrt(max(m, n)), which lets Muon share learning
/// rate and decay with AdamW.
enum class MuonScale { kOriginal, kMatchRmsAdamW };
/// Throws InvalidArgument unless `name` is "original" or "match_rms_adamw".
MuonScale muon_scale(std::string_view name);
std::string_view to_string(MuonScale scale);
double muon_scale_factor(MuonScale scale, Index rows, Index cols);

/// What the replicas of a hybrid mesh do with the matrices that all of them hold: each computes all of them, or they
/// divide them and exchange the results, by one more collective a bucket.
enum class MuonReplicas { kRepeat, kShare };

/// The arithmetic; the same on all ranks.
struct MuonMath {
  double momentum = 0.95;  // of the moving average: M += (1 - momentum) (G - M)
  bool nesterov = true;
  MuonScale scale = MuonScale::kOriginal;
  NewtonSchulzOptions newton_schulz{};
  /// What travels, and so what Newton-Schulz sees, in a group of one too: bf16 or fp32.
  at::ScalarType wire_dtype = at::kBFloat16;
  /// NorMuon: rows of the orthogonalised matrix are divided by the root of a moving average of their mean squares
  /// (row_norm.h).
  bool normuon = false;
  double row_beta2 = 0.95;  // of that average
};

struct MuonMovement {
  MuonReplicas replicas = MuonReplicas::kRepeat;
  /// Buckets on the wire around the one that computes; 0 runs one after another. Each takes buffers of its size.
  int buckets_in_flight = 2;
  /// Matrices that one rank holds whole stay there, and a bucket of nothing else communicates nothing, up to this
  /// multiple of the best balance that Newton-Schulz can have over the ranks ([Note: roots] in matrix_roots.h).
  /// Infinity: they always stay.
  double local_limit = 1.25;
  /// Matrices of equal shape are orthogonalised together, as many as have so many elements: one at a time below.
  Index stacked_numel = Index{1} << 24;
};

using MuonParam = MatrixParam;
using MuonMatrix = ParamMatrix;

/// This rank's part of one parameter in one step: 1-D and contiguous, `held` elements, in place. Empty pieces must be
/// given too.
struct MuonPiece {
  at::Tensor param;     // fp32, or another floating dtype through slower code
  at::Tensor grad;      // undefined: the parameter is untouched. All ranks must agree; see MuonPlan::step()
  at::Tensor momentum;  // fp32, bf16, or codes in uint8
  double lr = 1e-3;
  double weight_decay = 0.1;  // decoupled, before the update
  /// Of a momentum in codes ([Note: tile codes] in tile_codes.h; it is coded as a first moment is): fp32, one a tile of
  /// this rank's piece (TileGeometry::num_tiles()).
  at::Tensor momentum_scales{};
  TileFormat momentum_format = TileFormat::kPower;
  /// NorMuon's: fp32, one a row that begins here (begun_rows()).
  at::Tensor row_exp_avg_sq{};
};

/// Rows of `columns` elements whose first element is among these; [Note: rows].
layout::Interval begun_rows(layout::Interval held, Index columns);

class MuonPlan {
 public:
  /// The same arguments on all ranks. Throws InvalidArgument, before any communication and alike on all ranks, on a
  /// parameter below two dims, intervals that don't cover it, row ranges that don't tile its rows, options out of
  /// range. Collective, where a group has several ranks: they compare hash() once.
  MuonPlan(
      std::vector<MuonParam> params, const MuonMath& math, const MuonMovement& movement, comm::Communicator shard,
      comm::Communicator replicate = {});
  ~MuonPlan();
  MuonPlan(MuonPlan&&) noexcept;
  MuonPlan& operator=(MuonPlan&&) noexcept;

  /// One step; `pieces` in the order of the parameters. Collective, without host synchronisation on a CUDA device:
  /// over the shard group twice a bucket that has cut matrices, over the replicate group once a bucket with kShare.
  /// Ranks must agree on which gradients are undefined, also of parameters that they hold nothing of: a rank that
  /// leaves one out contributes zeros to its matrices, unless RAGGED_CHECK=1 (CommOptions::check_order), which makes
  /// that an InvalidArgument on all ranks, naming parameter and ranks, before anything changes.
  void step(std::span<const MuonPiece> pieces, const StepScale& scale = {});
  /// Of the steps to come, for a warm-up of the momentum. Ranks must agree. Throws InvalidArgument outside [0, 1).
  void set_momentum(double momentum);

  const std::vector<MuonParam>& params() const;
  const std::vector<MuonMatrix>& matrices() const;
  int num_buckets() const;
  /// Newton-Schulz cost by rank of shard group x replicas (replica-major), in floating-point operations.
  std::vector<double> loads() const;
  std::uint64_t hash() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ragged::optim
