#include "ragged/optim/soap_plan.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "ragged/base/error.h"
#include "ragged/optim/adamw_step.h"
#include "ragged/optim/matrix_checks.h"
#include "ragged/optim/matrix_exchange.h"
#include "ragged/optim/muon_passes.h"

namespace ragged::optim {
namespace {

using layout::Interval;

SoapSides sides_of(const ParamMatrix& m, const SoapMath& math) {
  return soap_sides(m.rows, m.cols, math.max_precondition_dim);
}

// Adam's constants in this step of a parameter. Where there is a basis, the first step goes into making it.
AdamWStep adam_constants(const SoapMath& math, SoapSides sides, const SoapPiece& piece) {
  const bool has_basis = sides.left || sides.right;
  return adamw_constants(
      {.lr = piece.lr, .beta1 = math.beta1, .beta2 = math.beta2, .eps = math.eps, .weight_decay = piece.weight_decay},
      has_basis ? std::max<std::int64_t>(1, piece.step - 1) : piece.step);
}

std::vector<double> costs_of(std::span<const ParamMatrix> matrices, const SoapMath& math) {
  std::vector<plan::SoapMatrix> shapes;
  for (const ParamMatrix& m : matrices) shapes.push_back({m.rows, m.cols});
  return plan::soap_weights(shapes, math.precondition_frequency, math.max_precondition_dim);
}

}  // namespace

void check(const SoapMath& math) {
  check_rates({.beta1 = math.beta1, .beta2 = math.beta2, .eps = math.eps}, "soap");
  RAGGED_CHECK(
      math.precondition_frequency >= 1, "[soap] Expected precondition_frequency >= 1, but got {}.",
      math.precondition_frequency);
  RAGGED_CHECK(
      math.max_precondition_dim >= 0,
      "[soap] Expected max_precondition_dim >= 0, but got {}. With 0 no side has a basis.", math.max_precondition_dim);
  RAGGED_CHECK(
      math.wire_dtype == at::kFloat || math.wire_dtype == at::kBFloat16,
      "[soap] Expected a wire dtype of fp32 or bf16, but got {}.", c10::toString(math.wire_dtype));
}

SoapLayout soap_layout(std::span<const MatrixParam> params, const SoapMath& math, double local_limit, int ranks) {
  SoapLayout layout{.matrices = list_matrices(params, ranks, "soap")};
  layout.roots = assign_roots(
      params, layout.matrices, costs_of(layout.matrices, math), {.world_size = ranks, .local_limit = local_limit});
  return layout;
}

Index soap_state_numel(std::span<const ParamMatrix> matrices, const SoapMath& math, int rank) {
  Index numel = 0;
  for (const ParamMatrix& m : matrices) {
    if (m.root == rank) numel += soap_state_numel(m.rows, m.cols, sides_of(m, math));
  }
  return numel;
}

struct SoapPlan::Impl {
  // A matrix of a bucket, and this rank's piece of it.
  struct Member {
    std::size_t matrix = 0;  // in the layout
    Interval piece{};        // of the matrix's elements; empty where this rank has none
    Index in_param = 0;      // where that lies in this rank's piece of the parameter
  };
  struct Bucket {
    std::vector<Member> members;
    MatrixExchange exchange;
  };
  // A bucket on its way.
  struct Flight {
    const Bucket* bucket = nullptr;
    at::Tensor held{};                // pieces of cut matrices: gradients, later updates
    at::Tensor rooted{};              // cut matrices of this root
    std::vector<at::Tensor> local{};  // by member: the whole matrix where this rank holds all of it
    comm::Work work{};
  };

  std::vector<MatrixParam> params;
  SoapMath math;
  SoapMovement movement;
  comm::Communicator shard;
  comm::Communicator replicate;
  SoapLayout layout;
  std::vector<Bucket> buckets;

  void make_buckets();
  Flight pack(const Bucket& bucket, std::span<const SoapPiece> pieces, double grad_scale) const;
  void compute(Flight& flight, std::span<const SoapPiece> pieces, std::span<const SoapState> states) const;
  void finish(Flight& flight, std::span<const SoapPiece> pieces) const;
  at::Tensor update(const at::Tensor& grad, std::size_t matrix, const SoapPiece& piece, const SoapState& state) const;
  const SoapPiece& piece_of(std::span<const SoapPiece> pieces, const Member& member) const {
    return pieces[static_cast<std::size_t>(layout.matrices[member.matrix].param)];
  }
};

void SoapPlan::Impl::make_buckets() {
  int count = 0;
  for (const ParamMatrix& m : layout.matrices) count = std::max(count, m.bucket + 1);
  for (int b = 0; b < count; ++b) {
    std::vector<Member> members;
    std::vector<ExchangedMatrix> exchanged;
    for (std::size_t i = 0; i < layout.matrices.size(); ++i) {
      const ParamMatrix& m = layout.matrices[i];
      if (m.bucket != b) continue;
      const auto [piece, in_param] =
          piece_on_rank(params[static_cast<std::size_t>(m.param)], m, layout.roots.pieces[i], shard.rank());
      members.push_back({.matrix = i, .piece = piece, .in_param = in_param});
      exchanged.push_back(
          {.numel = m.rows * m.cols, .pieces = layout.roots.pieces[i], .root = m.is_local ? -1 : m.root});
    }
    buckets.push_back(
        {.members = std::move(members),
         .exchange = MatrixExchange(std::move(exchanged), shard, fmt::format("soap bucket {}", b))});
  }
}

SoapPlan::Impl::Flight SoapPlan::Impl::pack(
    const Bucket& bucket, std::span<const SoapPiece> pieces, double grad_scale) const {
  const auto options = at::TensorOptions().dtype(math.wire_dtype).device(pieces.front().param.device());
  Flight flight{.bucket = &bucket};
  flight.held = at::zeros({bucket.exchange.held_numel()}, options);
  flight.rooted = at::empty({bucket.exchange.rooted_numel()}, options);
  flight.local.resize(bucket.members.size());
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    const SoapPiece& piece = piece_of(pieces, member);
    if (member.piece.empty() || !piece.grad.defined()) continue;
    const Index size = member.piece.size();
    const Index offset = bucket.exchange.held_offset(i);
    // A tensor of its own for what stays: where a gradient lies in its shard mustn't show in the bits of a product.
    const at::Tensor out = offset >= 0 ? flight.held.narrow(0, offset, size) : at::empty({size}, options);
    out.copy_(piece.grad.narrow(0, member.in_param, size).to(at::kFloat) * static_cast<float>(grad_scale));
    if (offset < 0) flight.local[i] = out;
  }
  flight.work = bucket.exchange.to_roots(flight.held, flight.rooted);
  return flight;
}

at::Tensor SoapPlan::Impl::update(
    const at::Tensor& grad, std::size_t matrix, const SoapPiece& piece, const SoapState& state) const {
  const ParamMatrix& m = layout.matrices[matrix];
  const SoapStep step{
      .adam = adam_constants(math, sides_of(m, math), piece),
      .refreshes_basis = piece.step > 1 && (piece.step - 1) % math.precondition_frequency == 0};
  return soap_update(grad.to(at::kFloat).view({m.rows, m.cols}), state, step).to(math.wire_dtype).reshape({-1});
}

void SoapPlan::Impl::compute(
    Flight& flight, std::span<const SoapPiece> pieces, std::span<const SoapState> states) const {
  const Bucket& bucket = *flight.bucket;
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {  // what travels takes this long at least
    const Member& member = bucket.members[i];
    if (!flight.local[i].defined()) continue;
    flight.local[i] = update(flight.local[i], member.matrix, piece_of(pieces, member), states[member.matrix]);
  }
  flight.work.wait();
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    const ParamMatrix& m = layout.matrices[member.matrix];
    const SoapPiece& piece = piece_of(pieces, member);
    if (m.is_local || m.root != shard.rank() || !piece.grad.defined()) continue;
    const at::Tensor grad = bucket.exchange.assemble(flight.rooted, i);
    bucket.exchange.disassemble(update(grad, member.matrix, piece, states[member.matrix]), flight.rooted, i);
  }
  flight.work = bucket.exchange.to_holders(flight.rooted, flight.held);
}

void SoapPlan::Impl::finish(Flight& flight, std::span<const SoapPiece> pieces) const {
  const Bucket& bucket = *flight.bucket;
  flight.work.wait();
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    const SoapPiece& piece = piece_of(pieces, member);
    if (member.piece.empty() || !piece.grad.defined()) continue;
    const Index size = member.piece.size();
    const Index offset = bucket.exchange.held_offset(i);
    const AdamWStep adam = adam_constants(math, sides_of(layout.matrices[member.matrix], math), piece);
    muon_apply_pass(
        piece.param.narrow(0, member.in_param, size),
        offset >= 0 ? flight.held.narrow(0, offset, size) : flight.local[i], adam.decay, adam.step_size);
  }
}

SoapPlan::SoapPlan(
    std::vector<MatrixParam> params, const SoapMath& math, const SoapMovement& movement, comm::Communicator shard,
    comm::Communicator replicate)
    : impl_(std::make_unique<Impl>()) {
  check(math);
  RAGGED_CHECK(
      movement.buckets_in_flight >= 0, "[soap] Expected buckets_in_flight >= 0, but got {}.",
      movement.buckets_in_flight);
  RAGGED_CHECK(movement.local_limit >= 0.0, "[soap] Expected local_limit >= 0, but got {}.", movement.local_limit);
  impl_->params = std::move(params);
  impl_->math = math;
  impl_->movement = movement;
  impl_->shard = std::move(shard);
  impl_->layout = soap_layout(impl_->params, math, movement.local_limit, impl_->shard.size());
  impl_->make_buckets();
  impl_->replicate = std::move(replicate);
  check_same_plan(impl_->shard, hash(), "soap", "shard");
  check_same_plan(impl_->replicate, hash(), "soap", "replicate");
}

SoapPlan::~SoapPlan() = default;
SoapPlan::SoapPlan(SoapPlan&&) noexcept = default;
SoapPlan& SoapPlan::operator=(SoapPlan&&) noexcept = default;

std::vector<SoapState> SoapPlan::make_states(const at::TensorOptions& options) const {
  std::vector<SoapState> states;
  for (const ParamMatrix& m : matrices()) {
    const bool is_mine = m.root == impl_->shard.rank();
    states.push_back(is_mine ? make_soap_state(m.rows, m.cols, sides(m), options) : SoapState{});
  }
  return states;
}

void SoapPlan::step(std::span<const SoapPiece> pieces, std::span<const SoapState> states, const StepScale& scale) {
  RAGGED_CHECK(
      pieces.size() == params().size() && states.size() == matrices().size(),
      "[soap] Expected a piece for each of {} parameters and a state for each of {} matrices, but got {} and {}.",
      params().size(), matrices().size(), pieces.size(), states.size());
  std::vector<std::uint8_t> has_grad;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const SoapPiece& piece = pieces[i];
    has_grad.push_back(piece.grad.defined() ? 1 : 0);
    const Index numel = params()[i].held[static_cast<std::size_t>(impl_->shard.rank())].size();
    RAGGED_CHECK(
        piece.param.numel() == numel && (!piece.grad.defined() || piece.grad.numel() == numel),
        "[soap] Expected parameter and gradient of {} elements, but got {} and {} (param '{}', rank {} of {}).", numel,
        piece.param.numel(), piece.grad.defined() ? piece.grad.numel() : numel, params()[i].name, impl_->shard.rank(),
        impl_->shard.size());
  }
  if (scale.skip || pieces.empty()) return;
  check_same_gradients(params(), has_grad, impl_->shard, impl_->replicate, "soap");
  // So many buckets are packed ahead of the one that computes, and as many are on their way back.
  const auto ahead = static_cast<std::size_t>(impl_->movement.buckets_in_flight);
  const std::size_t count = impl_->buckets.size();
  std::vector<Impl::Flight> flights;
  for (std::size_t tick = 0; tick < count + 2 * ahead; ++tick) {
    if (tick < count) flights.push_back(impl_->pack(impl_->buckets[tick], pieces, scale.grad));
    if (tick >= ahead && tick - ahead < count) impl_->compute(flights[tick - ahead], pieces, states);
    if (tick >= 2 * ahead && tick - 2 * ahead < count) {
      impl_->finish(flights[tick - 2 * ahead], pieces);
      flights[tick - 2 * ahead] = {};
    }
  }
}

void SoapPlan::set_math(const SoapMath& math) {
  check(math);
  const SoapMath& own = impl_->math;
  RAGGED_CHECK(
      math.max_precondition_dim == own.max_precondition_dim && math.wire_dtype == own.wire_dtype,
      "[soap] Expected max_precondition_dim {} and a wire dtype of {}, which the plan was made for, but got {} and {}. "
      "Make another plan.",
      own.max_precondition_dim, c10::toString(own.wire_dtype), math.max_precondition_dim,
      c10::toString(math.wire_dtype));
  impl_->math = math;
}

const std::vector<MatrixParam>& SoapPlan::params() const {
  return impl_->params;
}
const std::vector<ParamMatrix>& SoapPlan::matrices() const {
  return impl_->layout.matrices;
}
SoapSides SoapPlan::sides(const ParamMatrix& matrix) const {
  return sides_of(matrix, impl_->math);
}
std::vector<double> SoapPlan::loads() const {
  return impl_->layout.roots.loads;
}
std::uint64_t SoapPlan::hash() const {
  return impl_->layout.roots.hash;
}

}  // namespace ragged::optim
