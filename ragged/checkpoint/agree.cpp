#include "ragged/checkpoint/agree.h"

#include <cstring>

#include <ATen/ATen.h>

namespace ragged::checkpoint {

void agree(const comm::Communicator& all, const std::function<void()>& body) {
  std::string problem;
  bool is_invalid = false;
  bool has_failed = true;
  try {
    body();
    has_failed = false;
  } catch (const InvalidArgument& error) {
    problem = error.what();
    is_invalid = true;
  } catch (const std::exception& error) {
    problem = error.what();
  }
  // Ranks from 1, with the kind of the failure in the last bit; 0: none.
  const std::int64_t mine = has_failed ? 2 * (all.rank() + 1) + (is_invalid ? 1 : 0) : 0;
  const at::Tensor worst = at::tensor({mine}, at::kLong).to(all.device());
  all.all_reduce_max(worst, "checkpoint").wait();
  const auto value = worst.item<std::int64_t>();
  if (value == 0) return;
  const int rank = static_cast<int>(value / 2) - 1;
  std::string text = broadcast_text(all, problem, rank);
  const at::Tensor failed = at::tensor({mine != 0 ? 1 : 0}, at::kLong).to(all.device());
  all.all_reduce_sum(failed, "checkpoint").wait();
  if (failed.item<std::int64_t>() < all.size()) text += fmt::format(" (rank {} of {})", rank, all.size());
  if (value % 2 == 1) throw InvalidArgument(text);
  throw CheckpointError(text);
}

std::string broadcast_text(const comm::Communicator& all, const std::string& text, int root) {
  const at::Tensor size = at::tensor({static_cast<std::int64_t>(text.size())}, at::kLong).to(all.device());
  all.broadcast(size, root, "checkpoint").wait();
  const auto count = size.item<std::int64_t>();
  if (count == 0) return {};
  at::Tensor bytes = at::zeros({count}, at::kByte);
  if (all.rank() == root) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  bytes = bytes.to(all.device());
  all.broadcast(bytes, root, "checkpoint").wait();
  bytes = bytes.cpu();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(count)};
}

}  // namespace ragged::checkpoint
