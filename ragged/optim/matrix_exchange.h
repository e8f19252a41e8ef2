// Takes cut matrices to the ranks that work on them whole, and what became of them back: one packed, uneven all-to-all
// each way, of what changes ranks; a root's own pieces are copied past it. A plan made once from who holds what;
// buffers belong to the caller, so several exchanges may be on their way. It knows nothing of optimizers: Muon, and
// others that need whole matrices on an owner, stand on it.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/comm/communicator.h"
#include "ragged/plan/matrix_roots.h"

namespace ragged::optim {

struct ExchangedMatrix {
  Index numel = 0;
  std::vector<plan::HeldPiece> pieces{};  // by rank of the group, non-empty, in the matrix's own elements
  int root = 0;                           // -1: it doesn't travel
};

class MatrixExchange {
 public:
  /// The same arguments on all ranks of the group. `name` appears in errors.
  MatrixExchange(std::vector<ExchangedMatrix> matrices, comm::Communicator group, std::string name);

  /// No rank has anything to send to another: neither way communicates.
  bool is_idle() const { return is_idle_; }
  /// Elements of this rank's pieces, and of the matrices that it is the root of.
  Index held_numel() const { return held_numel_; }
  Index rooted_numel() const { return rooted_numel_; }
  /// Of held_numel(), what stays: pieces of matrices whose root is this rank.
  Index own_numel() const { return own_numel_; }
  /// Where this rank's piece of a matrix lies in a buffer of held_numel(); -1 where it has none.
  Index held_offset(std::size_t matrix) const { return held_offsets_[matrix]; }

  /// `held` to `rooted`: 1-D, of the two sizes above, one dtype. Collective unless is_idle(). Both must outlive the
  /// work.
  comm::Work to_roots(const at::Tensor& held, const at::Tensor& rooted) const;
  /// The way back.
  comm::Work to_holders(const at::Tensor& rooted, const at::Tensor& held) const;

  /// The whole matrix, 1-D, out of a `rooted` buffer; on its root only.
  at::Tensor assemble(const at::Tensor& rooted, std::size_t matrix) const;
  /// The reverse: a whole matrix, 1-D, into its places in a buffer that is to go back.
  void disassemble(const at::Tensor& whole, const at::Tensor& rooted, std::size_t matrix) const;

 private:
  void place_held();
  void place_rooted();

  std::vector<ExchangedMatrix> matrices_;
  comm::Communicator group_;
  std::string name_;
  bool is_idle_ = true;
  Index held_numel_ = 0;
  Index rooted_numel_ = 0;
  Index own_numel_ = 0;
  std::vector<Index> held_offsets_;
  std::vector<std::vector<Index>> rooted_offsets_;  // by matrix and piece
  std::vector<Index> to_roots_counts_;              // by rank; nothing to itself
  std::vector<Index> from_holders_counts_;
};

}  // namespace ragged::optim
