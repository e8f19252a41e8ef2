#include "ragged/optim/matrix_exchange.h"

#include <ATen/ATen.h>

#include "ragged/base/error.h"

namespace ragged::optim {

MatrixExchange::MatrixExchange(std::vector<ExchangedMatrix> matrices, comm::Communicator group, std::string name)
    : matrices_(std::move(matrices)), group_(std::move(group)), name_(std::move(name)) {
  const auto ranks = static_cast<std::size_t>(group_.size());
  to_roots_counts_.assign(ranks, 0);
  from_holders_counts_.assign(ranks, 0);
  held_offsets_.assign(matrices_.size(), -1);
  rooted_offsets_.resize(matrices_.size());
  // Buffers are sorted by the other side's rank, then by matrix: both sides walk the same order.
  for (int root = 0; root < group_.size(); ++root) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (matrices_[i].root != root) continue;
      is_idle_ = is_idle_ && matrices_[i].pieces.empty();
      for (const plan::HeldPiece& piece : matrices_[i].pieces) {
        if (piece.rank != group_.rank()) continue;
        held_offsets_[i] = held_numel_;
        held_numel_ += piece.interval.size();
        to_roots_counts_[static_cast<std::size_t>(root)] += piece.interval.size();
      }
    }
  }
  for (std::size_t i = 0; i < matrices_.size(); ++i) rooted_offsets_[i].assign(matrices_[i].pieces.size(), -1);
  for (int holder = 0; holder < group_.size(); ++holder) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (matrices_[i].root != group_.rank()) continue;
      for (std::size_t p = 0; p < matrices_[i].pieces.size(); ++p) {
        const plan::HeldPiece& piece = matrices_[i].pieces[p];
        if (piece.rank != holder) continue;
        rooted_offsets_[i][p] = rooted_numel_;
        rooted_numel_ += piece.interval.size();
        from_holders_counts_[static_cast<std::size_t>(holder)] += piece.interval.size();
      }
    }
  }
}

comm::Work MatrixExchange::to_roots(const at::Tensor& held, const at::Tensor& rooted) const {
  if (is_idle_) return {};
  return group_.all_to_all(held, rooted, to_roots_counts_, from_holders_counts_, name_);
}

comm::Work MatrixExchange::to_holders(const at::Tensor& rooted, const at::Tensor& held) const {
  if (is_idle_) return {};
  return group_.all_to_all(rooted, held, from_holders_counts_, to_roots_counts_, name_);
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
