// A bucket's way through a step: packed on the shard, orthogonalised at the roots, applied on the shard.
#include <algorithm>
#include <map>

#include <ATen/ATen.h>

#include "ragged/optim/muon_passes.h"
#include "ragged/optim/muon_plan_impl.h"
#include "ragged/optim/muon_tiles.h"
#include "ragged/optim/row_norm.h"

namespace ragged::optim {
namespace {

// fp32 as elements of the wire's dtype, two of which it takes where that is bf16: bits, not values.
at::Tensor as_wire(const at::Tensor& row_exp_avg_sq, at::ScalarType wire_dtype) {
  return row_exp_avg_sq.view(wire_dtype);
}

}  // namespace

void MuonPlan::Impl::orthogonalise(std::span<const Job> jobs) const {
  std::map<std::pair<Index, Index>, std::vector<const Job*>> by_shape;
  for (const Job& job : jobs) by_shape[{job.matrix->rows, job.matrix->cols}].push_back(&job);
  for (const auto& [shape, alike] : by_shape) {
    const auto most =
        static_cast<std::size_t>(std::max<Index>(1, movement.stacked_numel / (shape.first * shape.second)));
    for (std::size_t begin = 0; begin < alike.size(); begin += most) {
      const std::size_t end = std::min(alike.size(), begin + most);
      std::vector<at::Tensor> whole;
      for (std::size_t i = begin; i < end; ++i) whole.push_back(alike[i]->read().view({shape.first, shape.second}));
      const at::Tensor stacked = whole.size() == 1 ? whole[0].unsqueeze(0) : at::stack(whole);
      whole.clear();
      const at::Tensor updates = newton_schulz(stacked, set, math.newton_schulz);
      for (std::size_t i = begin; i < end; ++i) {
        at::Tensor update = updates[static_cast<Index>(i - begin)];
        const at::Tensor& rows = alike[i]->row_exp_avg_sq;
        if (math.normuon) update = row_normalised(update.to(at::kFloat), rows, math.row_beta2);
        alike[i]->write(update.to(math.wire_dtype).reshape({-1}));
      }
    }
  }
}

// Of a momentum in codes, whose tiles don't end where matrices of fused rows do: what is orthogonalised of all that
// this rank holds of the parameter.
at::Tensor MuonPlan::Impl::pack_tiled(std::size_t param, const MuonPiece& piece, double grad_scale) const {
  const at::Tensor out = at::empty({piece.grad.numel()}, piece.grad.options().dtype(math.wire_dtype));
  muon_pack_tiles_pass(
      {.momentum = math.momentum, .nesterov = math.nesterov}, grad_scale, piece.grad,
      {.codes = piece.momentum,
       .scales = piece.momentum_scales,
       .geometry = tiles_of(params[param], shard.rank()),
       .format = piece.momentum_format},
      out);
  return out;
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
  const std::size_t count = bucket.members.size();
  int tiled_param = -1;  // matrices of a parameter follow each other
  at::Tensor tiled;
  for (std::size_t i = 0; i < count; ++i) {
    const Member& member = bucket.members[i];
    const MuonMatrix& m = matrices[member.matrix];
    const MuonPiece& piece = pieces[static_cast<std::size_t>(m.param)];
    const Index size = member.piece.size();
    const bool travels = bucket.exchange.held_offset(i) >= 0;
    at::Tensor out = travels ? flight.held.narrow(0, bucket.exchange.held_offset(i), size) : at::Tensor();
    if (!member.rows.empty() && bucket.exchange.held_offset(count + i) >= 0) {
      flight.held.narrow(0, bucket.exchange.held_offset(count + i), wire_per_row() * member.rows.size())
          .copy_(as_wire(rows_of(piece, member), math.wire_dtype));
    }
    if (member.piece.empty()) continue;
    if (!piece.grad.defined()) {
      if (travels) out.zero_();
      continue;
    }
    if (!travels) {
      out = at::empty({size}, flight.held.options());
      if (member.is_mine) flight.local[i] = out;  // else another replica orthogonalises it
    }
    if (piece.momentum_scales.defined()) {
      if (tiled_param != m.param) tiled = pack_tiled(static_cast<std::size_t>(m.param), piece, grad_scale);
      tiled_param = m.param;
      out.copy_(tiled.narrow(0, member.in_param, size));
      continue;
    }
    muon_pack_pass(
        {.momentum = math.momentum, .nesterov = math.nesterov}, grad_scale, piece.grad.narrow(0, member.in_param, size),
        piece.momentum.narrow(0, member.in_param, size), out);
  }
  flight.work = bucket.exchange.to_roots(flight.held, flight.rooted);
  return flight;
}

void MuonPlan::Impl::compute(Flight& flight, std::span<const MuonPiece> pieces) const {
  const Bucket& bucket = *flight.bucket;
  const std::size_t count = bucket.members.size();
  std::vector<Job> local;
  for (std::size_t i = 0; i < count; ++i) {
    if (!flight.local[i].defined()) continue;
    const Member& member = bucket.members[i];
    const MuonMatrix& m = matrices[member.matrix];
    local.push_back(
        {.matrix = &m,
         .row_exp_avg_sq = rows_of(pieces[static_cast<std::size_t>(m.param)], member),
         .read = [&flight, i] { return flight.local[i]; },
         .write = [&flight, i](const at::Tensor& update) { flight.local[i] = update; }});
  }
  orthogonalise(local);  // what travels takes this long at least
  flight.work.wait();
  std::vector<Job> rooted;
  for (std::size_t i = 0; i < count; ++i) {
    const MuonMatrix& m = matrices[bucket.members[i].matrix];
    if (m.is_local || !bucket.members[i].is_mine || m.root != shard.rank()) continue;
    const at::Tensor rows =
        math.normuon ? bucket.exchange.assemble(flight.rooted, count + i).view(at::kFloat) : at::Tensor();
    const auto write = [this, &flight, &bucket, i, count, rows](const at::Tensor& update) {
      bucket.exchange.disassemble(update, flight.rooted, i);
      if (rows.defined()) bucket.exchange.disassemble(as_wire(rows, math.wire_dtype), flight.rooted, count + i);
    };
    rooted.push_back(
        {.matrix = &m,
         .row_exp_avg_sq = rows,
         .read = [&flight, &bucket, i] { return bucket.exchange.assemble(flight.rooted, i); },
         .write = write});
  }
  orthogonalise(rooted);
  flight.work = bucket.exchange.to_holders(flight.rooted, flight.held);
}

// The same rank of every replica holds the same pieces: each sends those of its own matrices to all the others. Returns
// what the others sent, by shared_offsets.
at::Tensor MuonPlan::Impl::exchange_replicas(const Flight& flight, std::span<const MuonPiece> pieces) const {
  const Bucket& bucket = *flight.bucket;
  std::vector<at::Tensor> own;
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    if (!member.is_mine || shared_size(member) == 0) continue;
    const at::Tensor update = update_of(flight, i);
    own.push_back(update.defined() ? update : at::zeros({member.piece.size()}, flight.held.options()));
    if (member.rows.empty()) continue;
    const at::Tensor rows = moved_rows(flight, i);
    const MuonPiece& piece = pieces[static_cast<std::size_t>(matrices[member.matrix].param)];
    own.push_back(rows.defined() ? rows : as_wire(rows_of(piece, member), math.wire_dtype));
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

// This rank's piece of what came back from the root, or was computed here; undefined without gradient.
at::Tensor MuonPlan::Impl::update_of(const Flight& flight, std::size_t i) const {
  const Index offset = flight.bucket->exchange.held_offset(i);
  return offset < 0 ? flight.local[i] : flight.held.narrow(0, offset, flight.bucket->members[i].piece.size());
}

// Likewise the rows' states, as they travel; undefined where they never left.
at::Tensor MuonPlan::Impl::moved_rows(const Flight& flight, std::size_t i) const {
  const Bucket& bucket = *flight.bucket;
  const Index offset = bucket.exchange.held_offset(bucket.members.size() + i);
  if (offset < 0) return {};
  return flight.held.narrow(0, offset, wire_per_row() * bucket.members[i].rows.size());
}

void MuonPlan::Impl::finish(Flight& flight, std::span<const MuonPiece> pieces) const {
  const Bucket& bucket = *flight.bucket;
  flight.work.wait();
  const at::Tensor shared = shares() ? exchange_replicas(flight, pieces) : at::Tensor();
  for (std::size_t i = 0; i < bucket.members.size(); ++i) {
    const Member& member = bucket.members[i];
    const MuonMatrix& m = matrices[member.matrix];
    const MuonPiece& piece = pieces[static_cast<std::size_t>(m.param)];
    if (!piece.grad.defined()) continue;
    const Index size = member.piece.size();
    if (!member.rows.empty()) {
      const Index in_shared = member.is_mine ? 0 : bucket.shared_offsets[i] + size;
      const at::Tensor rows =
          member.is_mine ? moved_rows(flight, i) : shared.narrow(0, in_shared, shared_size(member) - size);
      if (rows.defined()) as_wire(rows_of(piece, member), math.wire_dtype).copy_(rows);
    }
    if (size == 0) continue;
    const at::Tensor update = member.is_mine ? update_of(flight, i) : shared.narrow(0, bucket.shared_offsets[i], size);
    muon_apply_pass(
        piece.param.narrow(0, member.in_param, size), update, 1.0 - piece.lr * piece.weight_decay,
        piece.lr * muon_scale_factor(math.scale, m.rows, m.cols));
  }
}

}  // namespace ragged::optim
