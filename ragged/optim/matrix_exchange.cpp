#include "ragged/optim/matrix_exchange.h"

#include <ATen/ATen.h>

#include "ragged/base/error.h"

namespace ragged::optim {

namespace {

// In a buffer the sections of other ranks come in their order, then this one's own, which isn't sent.
std::vector<int> own_last(const comm::Communicator& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != group.rank()) ranks.push_back(rank);
  }
  ranks.push_back(group.rank());
  return ranks;
}

}  // namespace

// Buffers are sorted by the other side's rank, then by matrix: both sides walk the same order.
MatrixExchange::MatrixExchange(std::vector<ExchangedMatrix> matrices, comm::Communicator group, std::string name)
    : matrices_(std::move(matrices)), group_(std::move(group)), name_(std::move(name)) {
  for (const ExchangedMatrix& m : matrices_) {
    if (m.root < 0) continue;
    for (const plan::HeldPiece& piece : m.pieces) is_idle_ = is_idle_ && piece.rank == m.root;
  }
  place_held();
  place_rooted();
}

void MatrixExchange::place_held() {
  to_roots_counts_.assign(static_cast<std::size_t>(group_.size()), 0);
  held_offsets_.assign(matrices_.size(), -1);
  for (const int root : own_last(group_)) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (matrices_[i].root != root) continue;
      for (const plan::HeldPiece& piece : matrices_[i].pieces) {
        if (piece.rank != group_.rank()) continue;
        held_offsets_[i] = held_numel_;
        held_numel_ += piece.interval.size();
        Index& count = root == group_.rank() ? own_numel_ : to_roots_counts_[static_cast<std::size_t>(root)];
        count += piece.interval.size();
      }
    }
  }
}

void MatrixExchange::place_rooted() {
  from_holders_counts_.assign(static_cast<std::size_t>(group_.size()), 0);
  rooted_offsets_.resize(matrices_.size());
  for (std::size_t i = 0; i < matrices_.size(); ++i) rooted_offsets_[i].assign(matrices_[i].pieces.size(), -1);
  for (const int holder : own_last(group_)) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (matrices_[i].root != group_.rank()) continue;
      for (std::size_t p = 0; p < matrices_[i].pieces.size(); ++p) {
        const plan::HeldPiece& piece = matrices_[i].pieces[p];
        if (piece.rank != holder) continue;
        rooted_offsets_[i][p] = rooted_numel_;
        rooted_numel_ += piece.interval.size();
        if (holder != group_.rank()) from_holders_counts_[static_cast<std::size_t>(holder)] += piece.interval.size();
      }
    }
  }
}

comm::Work MatrixExchange::to_roots(const at::Tensor& held, const at::Tensor& rooted) const {
  const Index sent = held_numel_ - own_numel_;
  const Index received = rooted_numel_ - own_numel_;
  rooted.narrow(0, received, own_numel_).copy_(held.narrow(0, sent, own_numel_));
  if (is_idle_) return {};
  return group_.all_to_all(
      held.narrow(0, 0, sent), rooted.narrow(0, 0, received), to_roots_counts_, from_holders_counts_, name_);
}

comm::Work MatrixExchange::to_holders(const at::Tensor& rooted, const at::Tensor& held) const {
  const Index sent = rooted_numel_ - own_numel_;
  const Index received = held_numel_ - own_numel_;
  held.narrow(0, received, own_numel_).copy_(rooted.narrow(0, sent, own_numel_));
  if (is_idle_) return {};
  return group_.all_to_all(
      rooted.narrow(0, 0, sent), held.narrow(0, 0, received), from_holders_counts_, to_roots_counts_, name_);
}

at::Tensor MatrixExchange::assemble(const at::Tensor& rooted, std::size_t matrix) const {
  const ExchangedMatrix& m = matrices_[matrix];
  RAGGED_ASSERT(m.root == group_.rank(), "matrix {} has its root on rank {}", matrix, m.root);
  const at::Tensor whole = at::empty({m.numel}, rooted.options());
  for (std::size_t p = 0; p < m.pieces.size(); ++p) {
    const layout::Interval at = m.pieces[p].interval;
    whole.narrow(0, at.begin, at.size()).copy_(rooted.narrow(0, rooted_offsets_[matrix][p], at.size()));
  }
  return whole;
}

void MatrixExchange::disassemble(const at::Tensor& whole, const at::Tensor& rooted, std::size_t matrix) const {
  const ExchangedMatrix& m = matrices_[matrix];
  for (std::size_t p = 0; p < m.pieces.size(); ++p) {
    const layout::Interval at = m.pieces[p].interval;
    rooted.narrow(0, rooted_offsets_[matrix][p], at.size()).copy_(whole.narrow(0, at.begin, at.size()));
  }
}

}  // namespace ragged::optim
