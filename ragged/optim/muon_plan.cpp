#include "ragged/optim/muon_plan.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "ragged/base/error.h"
#include "ragged/optim/matrix_checks.h"
#include "ragged/optim/muon_plan_impl.h"
#include "ragged/plan/matrix_roots.h"

namespace ragged::optim {
namespace {

using layout::Interval;

void check_momentum(double momentum) {
  RAGGED_CHECK(momentum >= 0.0 && momentum < 1.0, "[muon] Expected momentum in [0, 1), but got {}.", momentum);
}

}  // namespace

std::vector<Index> matrix_shape(const MuonParam& param) {
  if (!param.flatten_rest) return param.shape;
  return {param.shape[0], checked_product(std::span(param.shape).subspan(1))};
}

TileGeometry tiles_of(const MuonParam& param, int rank) {
  return tile_geometry(matrix_shape(param), param.held[static_cast<std::size_t>(rank)], param.name);
}

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

Interval begun_rows(Interval held, Index columns) {
  if (columns == 0) return {};
  return {ceil_div(held.begin, columns), ceil_div(held.end, columns)};
}

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
    std::vector<ExchangedMatrix> rows;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const MuonMatrix& m = matrices[i];
      if (m.bucket != b) continue;
      const auto [piece, in_param] =
          piece_on_rank(params[static_cast<std::size_t>(m.param)], m, pieces[i], shard.rank());
      Member member{
          .matrix = i,
          .piece = piece,
          .in_param = in_param,
          .rows = {},
          .is_mine = !shares() || m.replica == replicate.rank()};
      exchanged.push_back(
          {.numel = m.rows * m.cols, .pieces = pieces[i], .root = m.is_local || !member.is_mine ? -1 : m.root});
      if (math.normuon) rows.push_back(place_rows(member, exchanged.back().root));
      members.push_back(member);
    }
    exchanged.insert(exchanged.end(), rows.begin(), rows.end());
    buckets.push_back(
        {.members = std::move(members),
         .exchange = MatrixExchange(std::move(exchanged), shard, fmt::format("muon bucket {}", b)),
         .shared_counts = {},
         .shared_offsets = {}});
    if (shares()) share_out(buckets.back());
  }
}

// Fills in which of a matrix's rows begin here. Returns how the rows' states travel, in elements of the wire's dtype.
ExchangedMatrix MuonPlan::Impl::place_rows(Member& member, int root) const {
  const MuonMatrix& m = matrices[member.matrix];
  const Index first = m.offset / m.cols;
  ExchangedMatrix exchanged{.numel = wire_per_row() * m.rows, .pieces = {}, .root = root};
  for (int rank = 0; rank < shard.size(); ++rank) {
    const Interval begun =
        begun_rows(params[static_cast<std::size_t>(m.param)].held[static_cast<std::size_t>(rank)], m.cols);
    const Interval rows = layout::intersect(begun, {first, first + m.rows});
    if (rows.empty()) continue;
    if (rank == shard.rank()) member.rows = rows.shifted(-begun.begin);
    exchanged.pieces.push_back({rank, {wire_per_row() * (rows.begin - first), wire_per_row() * (rows.end - first)}});
  }
  return exchanged;
}

void MuonPlan::Impl::share_out(Bucket& bucket) const {
  Index offset = 0;
  bucket.shared_offsets.assign(bucket.members.size(), -1);
  for (int replica = 0; replica < replicate.size(); ++replica) {
    const Index begin = offset;
    for (std::size_t i = 0; i < bucket.members.size(); ++i) {
      if (bucket.members[i].is_mine || matrices[bucket.members[i].matrix].replica != replica) continue;
      bucket.shared_offsets[i] = offset;
      offset += shared_size(bucket.members[i]);
    }
    bucket.shared_counts.push_back(offset - begin);
  }
}

// States that options ask for. Cuts are looked at on all ranks, so that all throw.
void MuonPlan::Impl::check_states(std::span<const MuonPiece> pieces) {
  tiles_are_whole.resize(params.size(), false);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const MuonPiece& piece = pieces[i];
    RAGGED_CHECK(
        piece.momentum_scales.defined() == (piece.momentum.scalar_type() == at::kByte),
        "[muon] Expected momentum_scales with a momentum in uint8 and else none, but got a momentum in {} (param "
        "'{}').",
        c10::toString(piece.momentum.scalar_type()), params[i].name);
    if (piece.momentum_scales.defined() && !tiles_are_whole[i]) {
      for (int rank = 0; rank < shard.size(); ++rank) tiles_of(params[i], rank);
      tiles_are_whole[i] = true;
    }
    if (!math.normuon) continue;
    const Index rows =
        begun_rows(params[i].held[static_cast<std::size_t>(shard.rank())], matrix_shape(params[i]).back()).size();
    RAGGED_CHECK(
        piece.row_exp_avg_sq.defined() && piece.row_exp_avg_sq.scalar_type() == at::kFloat &&
            piece.row_exp_avg_sq.dim() == 1 && piece.row_exp_avg_sq.numel() == rows &&
            piece.row_exp_avg_sq.is_contiguous(),
        "[muon] Expected row_exp_avg_sq of {} fp32 numbers for NorMuon (param '{}', rank {} of {}).", rows,
        params[i].name, shard.rank(), shard.size());
  }
}

void MuonPlan::Impl::check_gradients(std::span<const MuonPiece> pieces) const {
  std::vector<std::uint8_t> has_grad;
  for (const MuonPiece& piece : pieces) has_grad.push_back(piece.grad.defined() ? 1 : 0);
  check_same_gradients(params, has_grad, shard, replicate, "muon");
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
  RAGGED_CHECK(
      movement.stacked_numel >= 1, "[muon] Expected stacked_numel of at least 1, but got {}.", movement.stacked_numel);
  RAGGED_CHECK(movement.local_limit >= 0.0, "[muon] Expected local_limit >= 0, but got {}.", movement.local_limit);
  RAGGED_CHECK(
      math.row_beta2 >= 0.0 && math.row_beta2 < 1.0, "[muon] Expected row_beta2 in [0, 1), but got {}.",
      math.row_beta2);
  check(math.newton_schulz);
  impl_->params = std::move(params);
  impl_->math = math;
  impl_->movement = movement;
  impl_->shard = std::move(shard);
  impl_->replicate = std::move(replicate);
  impl_->set = newton_schulz_set(math.newton_schulz.coefficients, math.newton_schulz.num_steps);
  impl_->matrices = list_matrices(impl_->params, impl_->shard.size(), "muon");
  impl_->make_buckets(impl_->assign());
  check_same_plan(impl_->shard, impl_->hash, "muon", "shard");
  check_same_plan(impl_->replicate, impl_->hash, "muon", "replicate");
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
  impl_->check_states(pieces);
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
    if (tick >= ahead && tick - ahead < count) impl_->compute(flights[tick - ahead], pieces);
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
