#include "ragged/optim/muon_plan.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "ragged/base/error.h"
#include "ragged/comm/same_value.h"
#include "ragged/optim/matrix_exchange.h"
#include "ragged/optim/muon_passes.h"
#include "ragged/plan/matrix_roots.h"

namespace ragged::optim {
namespace {

using layout::Interval;

void check_momentum(double momentum) {
  RAGGED_CHECK(momentum >= 0.0 && momentum < 1.0, "[muon] Expected momentum in [0, 1), but got {}.", momentum);
}

void check_same(const comm::Communicator& group, std::uint64_t hash, std::string_view whose) {
  if (group.size() == 1) return;
  RAGGED_CHECK(
      comm::is_same_on_all(group, hash, "muon plan"),
      "[muon] Expected the same plan on all ranks of the {} group, but they differ (rank {} of {}). Give every rank "
      "the same parameters and options, in the same order.",
      whose, group.rank(), group.size());
}

}  // namespace

MuonScale muon_scale(std::string_view name) {
  if (name == "original") return MuonScale::kOriginal;
  RAGGED_CHECK(
      name == "match_rms_adamw", "[muon] Expected the scale to be original or match_rms_adamw, but got '{}'.", name);
  return MuonScale::kMatchRmsAdamW;
}

std::string_view to_string(MuonScale scale) {
  return scale == MuonScale::kOriginal ? "original" : "match_rms_adamw";
}

double muon_scale_factor(MuonScale scale, Index rows, Index cols) {
  const auto m = static_cast<double>(rows);
  const auto n = static_cast<double>(cols);
  return scale == MuonScale::kOriginal ? std::sqrt(std::max(1.0, m / n)) : 0.2 * std::sqrt(std::max(m, n));
}

struct MuonPlan::Impl {
  // A matrix of a bucket, and this rank's piece of it.
  struct Member {
    std::size_t matrix = 0;  // in `matrices`
    Interval piece{};        // of the matrix's elements; empty where this rank has none
    Index in_param = 0;      // where that lies in this rank's piece of the parameter
    bool is_mine = true;     // this replica computes it
  };
  struct Bucket {
    std::vector<Member> members;
    MatrixExchange exchange;
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

  bool shares() const { return movement.replicas == MuonReplicas::kShare && replicate.size() > 1; }
  std::vector<std::vector<plan::HeldPiece>> assign();
  void make_buckets(const std::vector<std::vector<plan::HeldPiece>>& pieces);
  void share_out(Bucket& bucket) const;

  void check_gradients(std::span<const MuonPiece> pieces) const;
  std::vector<Slot> make_slots(const at::Tensor& like) const;
  Flight pack(const Bucket& bucket, const Slot& slot, std::span<const MuonPiece> pieces, double grad_scale) const;
  void compute(Flight& flight) const;
  void finish(Flight& flight, std::span<const MuonPiece> pieces) const;
  at::Tensor exchange_replicas(const Flight& flight) const;
  at::Tensor orthogonalised(const at::Tensor& whole, const MuonMatrix& m) const;
};

std::vector<std::vector<plan::HeldPiece>> MuonPlan::Impl::assign() {
  std::vector<double> costs;
  for (const MuonMatrix& m : matrices)
    costs.push_back(plan::newton_schulz_cost(m.rows, m.cols, static_cast<int>(set.steps.size())));
  MatrixRoots assigned = assign_roots(
      params, matrices, costs,
      {.world_size = shard.size(), .replicas = shares() ? replicate.size() : 1, .local_limit = movement.local_limit});
  loads = std::move(assigned.loads);
  hash = assigned.hash;
  return std::move(assigned.pieces);
}

void MuonPlan::Impl::make_buckets(const std::vector<std::vector<plan::HeldPiece>>& pieces) {
  int count = 0;
  for (const MuonMatrix& m : matrices) count = std::max(count, m.bucket + 1);
  for (int b = 0; b < count; ++b) {
    std::vector<Member> members;
    std::vector<ExchangedMatrix> exchanged;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const MuonMatrix& m = matrices[i];
      if (m.bucket != b) continue;
      Member member{.matrix = i, .is_mine = !shares() || m.replica == replicate.rank()};
      for (const plan::HeldPiece& piece : pieces[i]) {
        if (piece.rank != shard.rank()) continue;
        const Interval held = params[static_cast<std::size_t>(m.param)].held[static_cast<std::size_t>(piece.rank)];
        member.piece = piece.interval;
        member.in_param = m.offset + piece.interval.begin - held.begin;
      }
      members.push_back(member);
      exchanged.push_back(
          {.numel = m.rows * m.cols, .pieces = pieces[i], .root = m.is_local || !member.is_mine ? -1 : m.root});
    }
    buckets.push_back(
        {.members = std::move(members),
         .exchange = MatrixExchange(std::move(exchanged), shard, fmt::format("muon bucket {}", b)),
         .shared_counts = {},
         .shared_offsets = {}});
    if (shares()) share_out(buckets.back());
  }
}

void MuonPlan::Impl::share_out(Bucket& bucket) const {
  Index offset = 0;
  bucket.shared_offsets.assign(bucket.members.size(), -1);
  for (int replica = 0; replica < replicate.size(); ++replica) {
    const Index begin = offset;
    for (std::size_t i = 0; i < bucket.members.size(); ++i) {
      if (bucket.members[i].is_mine || matrices[bucket.members[i].matrix].replica != replica) continue;
      bucket.shared_offsets[i] = offset;
      offset += bucket.members[i].piece.size();
    }
    bucket.shared_counts.push_back(offset - begin);
  }
}

at::Tensor MuonPlan::Impl::orthogonalised(const at::Tensor& whole, const MuonMatrix& m) const {
  return newton_schulz(whole.view({m.rows, m.cols}), set, math.newton_schulz).to(math.wire_dtype).reshape({-1});
}

// With RAGGED_CHECK=1 only, since it is a collective more. All ranks of both groups see the flags of all, and so throw
// alike.
void MuonPlan::Impl::check_gradients(std::span<const MuonPiece> pieces) const {
  at::Tensor flags = at::empty({std::ssize(pieces)}, at::kByte);
  for (std::size_t i = 0; i < pieces.size(); ++i)
    flags.mutable_data_ptr<std::uint8_t>()[i] = pieces[i].grad.defined() ? 1 : 0;
  for (const comm::Communicator* group : {&shard, &replicate}) {
    if (group->size() == 1 || !group->checks_order()) continue;
    const at::Tensor send = flags.repeat({group->size()}).to(group->device());
    const at::Tensor all = at::empty_like(send);
    const std::vector<Index> counts(static_cast<std::size_t>(group->size()), flags.numel());
    group->all_to_all(send, all, counts, counts, "muon gradients").wait();
    flags = all.cpu();
  }
  const auto* has_grad = flags.const_data_ptr<std::uint8_t>();
  const auto ranks = static_cast<std::size_t>(flags.numel()) / pieces.size();  // shard group within replicas
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::vector<std::size_t> without;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (!has_grad[rank * pieces.size() + i]) without.push_back(rank);
    }
    RAGGED_CHECK(
        without.empty() || without.size() == ranks,
        "[muon] Expected a gradient of a parameter on all ranks or on none, but got none on ranks {} of {} (param "
        "'{}'). Give zeros where a rank has none.",
        fmt::join(without, ", "), ranks, params[i].name);
  }
}

std::vector<MuonPlan::Impl::Slot> MuonPlan::Impl::make_slots(const at::Tensor& like) const {
  Index held = 0;
  Index rooted = 0;
  for (const Bucket& bucket : buckets) {
    held = std::max(held, bucket.exchange.held_numel());
    rooted = std::max(rooted, bucket.exchange.rooted_numel());
  }
  const auto options = at::TensorOptions().dtype(math.wire_dtype).device(like.device());
  std::vector<Slot> slots;
  const std::size_t in_flight = 2 * static_cast<std::size_t>(movement.buckets_in_flight) + 1;
  for (std::size_t i = 0; i < std::min(in_flight, buckets.size()); ++i)
    slots.push_back({.held = at::empty({held}, options), .rooted = at::empty({rooted}, options)});
  return slots;
}

MuonPlan::Impl::Flight MuonPlan::Impl::pack(
    const Bucket& bucket, const Slot& slot, std::span<const MuonPiece> pieces, double grad_scale) const {
  Flight flight{
      .bucket = &bucket,
      .held = slot.held.narrow(0, 0, bucket.exchange.held_numel()),
      .rooted = slot.rooted.narrow(0, 0, bucket.exchange.rooted_numel())};
  flight.local.resize(bucket.members.size());
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    const MuonMatrix& m = matrices[member.matrix];
    const MuonPiece& piece = pieces[static_cast<std::size_t>(m.param)];
    if (member.piece.empty()) continue;
    const Index size = member.piece.size();
    at::Tensor out;
    if (const Index offset = bucket.exchange.held_offset(i); offset >= 0) {
      out = flight.held.narrow(0, offset, size);
      if (!piece.grad.defined()) out.zero_();
    }
    if (!piece.grad.defined()) continue;
    if (!out.defined()) {
      out = at::empty({size}, flight.held.options());
      if (member.is_mine) flight.local[i] = out;  // else another replica orthogonalises it
    }
    muon_pack_pass(
        {.momentum = math.momentum, .nesterov = math.nesterov}, grad_scale, piece.grad.narrow(0, member.in_param, size),
        piece.momentum.narrow(0, member.in_param, size), out);
  }
  flight.work = bucket.exchange.to_roots(flight.held, flight.rooted);
  return flight;
}

void MuonPlan::Impl::compute(Flight& flight) const {
  const Bucket& bucket = *flight.bucket;
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {  // what travels takes this long at least
    if (flight.local[i].defined())
      flight.local[i] = orthogonalised(flight.local[i], matrices[bucket.members[i].matrix]);
  }
  flight.work.wait();
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const MuonMatrix& m = matrices[bucket.members[i].matrix];
    if (m.is_local || !bucket.members[i].is_mine || m.root != shard.rank()) continue;
    bucket.exchange.disassemble(orthogonalised(bucket.exchange.assemble(flight.rooted, i), m), flight.rooted, i);
  }
  flight.work = bucket.exchange.to_holders(flight.rooted, flight.held);
}

// The same rank of every replica holds the same pieces: each sends those of its own matrices to all the others. Returns
// what the others sent, by shared_offsets.
at::Tensor MuonPlan::Impl::exchange_replicas(const Flight& flight) const {
  const Bucket& bucket = *flight.bucket;
  std::vector<at::Tensor> own;
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    if (!member.is_mine || member.piece.empty()) continue;
    const Index offset = bucket.exchange.held_offset(i);
    if (offset >= 0) {
      own.push_back(flight.held.narrow(0, offset, member.piece.size()));
    } else {
      own.push_back(
          flight.local[i].defined() ? flight.local[i] : at::zeros({member.piece.size()}, flight.held.options()));
    }
  }
  const at::Tensor section = own.empty() ? at::empty({0}, flight.held.options()) : at::cat(own);
  const at::Tensor send = section.repeat({replicate.size() - 1});
  Index total = 0;
  for (const Index count : bucket.shared_counts) total += count;
  const at::Tensor shared = at::empty({total}, flight.held.options());
  std::vector<Index> send_counts(bucket.shared_counts.size(), section.numel());
  send_counts[static_cast<std::size_t>(replicate.rank())] = 0;
  replicate.all_to_all(send, shared, send_counts, bucket.shared_counts, "muon replicas").wait();
  return shared;
}

void MuonPlan::Impl::finish(Flight& flight, std::span<const MuonPiece> pieces) const {
  const Bucket& bucket = *flight.bucket;
  flight.work.wait();
  const at::Tensor shared = shares() ? exchange_replicas(flight) : at::Tensor();
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    const MuonMatrix& m = matrices[member.matrix];
    const MuonPiece& piece = pieces[static_cast<std::size_t>(m.param)];
    if (member.piece.empty() || !piece.grad.defined()) continue;
    const Index size = member.piece.size();
    at::Tensor update = flight.local[i];
    if (!member.is_mine) {
      update = shared.narrow(0, bucket.shared_offsets[i], size);
    } else if (const Index offset = bucket.exchange.held_offset(i); offset >= 0) {
      update = flight.held.narrow(0, offset, size);
    }
    muon_apply_pass(
        piece.param.narrow(0, member.in_param, size), update, 1.0 - piece.lr * piece.weight_decay,
        piece.lr * muon_scale_factor(math.scale, m.rows, m.cols));
  }
}

MuonPlan::MuonPlan(
    std::vector<MuonParam> params, const MuonMath& math, const MuonMovement& movement, comm::Communicator shard,
    comm::Communicator replicate)
    : impl_(std::make_unique<Impl>()) {
  check_momentum(math.momentum);
  RAGGED_CHECK(
      math.wire_dtype == at::kFloat || math.wire_dtype == at::kBFloat16,
      "[muon] Expected a wire dtype of fp32 or bf16, but got {}.", c10::toString(math.wire_dtype));
  RAGGED_CHECK(
      movement.buckets_in_flight >= 0, "[muon] Expected buckets_in_flight >= 0, but got {}.",
      movement.buckets_in_flight);
  RAGGED_CHECK(movement.local_limit >= 0.0, "[muon] Expected local_limit >= 0, but got {}.", movement.local_limit);
  check(math.newton_schulz);
  impl_->params = std::move(params);
  impl_->math = math;
  impl_->movement = movement;
  impl_->shard = std::move(shard);
  impl_->replicate = std::move(replicate);
  impl_->set = newton_schulz_set(math.newton_schulz.coefficients, math.newton_schulz.num_steps);
  impl_->matrices = list_matrices(impl_->params, impl_->shard.size(), "muon");
  impl_->make_buckets(impl_->assign());
  check_same(impl_->shard, impl_->hash, "shard");
  check_same(impl_->replicate, impl_->hash, "replicate");
}

MuonPlan::~MuonPlan() = default;
MuonPlan::MuonPlan(MuonPlan&&) noexcept = default;
MuonPlan& MuonPlan::operator=(MuonPlan&&) noexcept = default;

void MuonPlan::step(std::span<const MuonPiece> pieces, const StepScale& scale) {
  RAGGED_CHECK(
      pieces.size() == impl_->params.size(), "[muon] Expected a piece for each of {} parameters, but got {}.",
      impl_->params.size(), pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const MuonPiece& piece = pieces[i];
    const MuonParam& param = impl_->params[i];
    const Index numel = param.held[static_cast<std::size_t>(impl_->shard.rank())].size();
    RAGGED_CHECK(
        piece.param.numel() == numel && piece.momentum.numel() == numel &&
            (!piece.grad.defined() || piece.grad.numel() == numel),
        "[muon] Expected parameter, gradient and momentum of {} elements, but got {}, {} and {} (param '{}', rank {} "
        "of {}).",
        numel, piece.param.numel(), piece.grad.defined() ? piece.grad.numel() : numel, piece.momentum.numel(),
        param.name, impl_->shard.rank(), impl_->shard.size());
  }
  if (scale.skip || pieces.empty()) return;
  impl_->check_gradients(pieces);
  // [Note: one step] in the header: so many buckets are packed ahead of the one that computes, and as many are on their
  // way back.
  const auto ahead = static_cast<std::size_t>(impl_->movement.buckets_in_flight);
  const std::vector<Impl::Slot> slots = impl_->make_slots(pieces.front().param);
  std::vector<Impl::Flight> flights;
  const std::size_t count = impl_->buckets.size();
  for (std::size_t tick = 0; tick < count + 2 * ahead; ++tick) {
    if (tick < count)
      flights.push_back(impl_->pack(impl_->buckets[tick], slots[tick % slots.size()], pieces, scale.grad));
    if (tick >= ahead && tick - ahead < count) impl_->compute(flights[tick - ahead]);
    if (tick >= 2 * ahead && tick - 2 * ahead < count) {
      impl_->finish(flights[tick - 2 * ahead], pieces);
      flights[tick - 2 * ahead] = {};
    }
  }
}

void MuonPlan::set_momentum(double momentum) {
  check_momentum(momentum);
  impl_->math.momentum = momentum;
}

const std::vector<MuonParam>& MuonPlan::params() const {
  return impl_->params;
}
const std::vector<MuonMatrix>& MuonPlan::matrices() const {
  return impl_->matrices;
}
int MuonPlan::num_buckets() const {
  return static_cast<int>(impl_->buckets.size());
}
std::vector<double> MuonPlan::loads() const {
  return impl_->loads;
}
std::uint64_t MuonPlan::hash() const {
  return impl_->hash;
}

}  // namespace ragged::optim
