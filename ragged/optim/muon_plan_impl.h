// What a MuonPlan is inside; not for users. muon_plan.cpp makes and checks plans, muon_flight.cpp moves buckets through
// the three stages of a step.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "ragged/optim/matrix_exchange.h"
#include "ragged/optim/muon_plan.h"
#include "ragged/optim/tile_geometry.h"

namespace ragged::optim {

/// The shape of its matrices: flattened where it says so.
std::vector<Index> matrix_shape(const MuonParam& param);
/// Of what a rank holds. Throws as tile_geometry() does.
TileGeometry tiles_of(const MuonParam& param, int rank);

struct MuonPlan::Impl {
  // A matrix of a bucket, and this rank's piece of it.
  struct Member {
    std::size_t matrix = 0;    // in `matrices`
    layout::Interval piece{};  // of the matrix's elements; empty where this rank has none
    Index in_param = 0;        // where that lies in this rank's piece of the parameter
    layout::Interval rows{};   // NorMuon: of its rows those that begin here, in this rank's row_exp_avg_sq
    bool is_mine = true;       // this replica computes it
  };
  struct Bucket {
    std::vector<Member> members;
    MatrixExchange exchange;  // of the members' matrices; with NorMuon then of their rows' states
    // kShare: sizes of what other replicas' ranks contribute, and where a member's piece lies among them.
    std::vector<Index> shared_counts;
    std::vector<Index> shared_offsets;
  };
  // What a bucket on its way needs, as large as the largest asks for. A step makes as many as are ever in flight, gives
  // them from bucket to bucket, and lets go of them at its end: forward and backward need the memory.
  struct Slot {
    at::Tensor held;    // pieces of cut matrices: directions there, updates back
    at::Tensor rooted;  // cut matrices of this root, likewise
  };
  // A bucket on its way.
  struct Flight {
    const Bucket* bucket = nullptr;
    at::Tensor held{};
    at::Tensor rooted{};
    std::vector<at::Tensor> local{};  // by member: the whole matrix where this rank holds all of it
    comm::Work work{};
  };

  // A matrix to be orthogonalised here: read when its turn comes, so that few are assembled at once.
  struct Job {
    const MuonMatrix* matrix = nullptr;
    at::Tensor row_exp_avg_sq{};  // NorMuon's, [rows], written in place
    std::function<at::Tensor()> read;
    std::function<void(const at::Tensor&)> write;
  };

  std::vector<MuonParam> params;
  MuonMath math;
  MuonMovement movement;
  comm::Communicator shard;
  comm::Communicator replicate;
  NewtonSchulzSet set;
  std::vector<MuonMatrix> matrices;
  std::vector<double> loads;
  std::uint64_t hash = 0;
  std::vector<Bucket> buckets;
  std::vector<bool> tiles_are_whole;  // by parameter: looked at once

  // Elements of the wire's dtype that an fp32 number takes.
  Index wire_per_row() const { return math.wire_dtype == at::kFloat ? 1 : 2; }
  Index shared_size(const Member& member) const { return member.piece.size() + wire_per_row() * member.rows.size(); }
  bool shares() const { return movement.replicas == MuonReplicas::kShare && replicate.size() > 1; }
  std::vector<std::vector<plan::HeldPiece>> assign();
  void make_buckets(const std::vector<std::vector<plan::HeldPiece>>& pieces);
  ExchangedMatrix place_rows(Member& member, int root) const;
  void share_out(Bucket& bucket) const;

  void check_states(std::span<const MuonPiece> pieces);
  void check_gradients(std::span<const MuonPiece> pieces) const;
  std::vector<Slot> make_slots(const at::Tensor& like) const;
  Flight pack(const Bucket& bucket, const Slot& slot, std::span<const MuonPiece> pieces, double grad_scale) const;
  void compute(Flight& flight, std::span<const MuonPiece> pieces) const;
  at::Tensor pack_tiled(std::size_t param, const MuonPiece& piece, double grad_scale) const;
  void finish(Flight& flight, std::span<const MuonPiece> pieces) const;
  at::Tensor exchange_replicas(const Flight& flight, std::span<const MuonPiece> pieces) const;
  at::Tensor update_of(const Flight& flight, std::size_t i) const;
  at::Tensor moved_rows(const Flight& flight, std::size_t i) const;
  at::Tensor rows_of(const MuonPiece& piece, const Member& member) const {
    return math.normuon ? piece.row_exp_avg_sq.narrow(0, member.rows.begin, member.rows.size()) : at::Tensor();
  }
  void orthogonalise(std::span<const Job> jobs) const;
};

}  // namespace ragged::optim
