#include "ragged/optim/matrix_checks.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "ragged/base/error.h"
#include "ragged/comm/same_value.h"

namespace ragged::optim {

void check_same_plan(
    const comm::Communicator& group, std::uint64_t hash, std::string_view optimizer, std::string_view whose) {
  if (group.size() == 1) return;
  RAGGED_CHECK(
      comm::is_same_on_all(group, hash, fmt::format("{} plan", optimizer)),
      "[{}] Expected the same plan on all ranks of the {} group, but they differ (rank {} of {}). Give every rank the "
      "same parameters and options, in the same order.",
      optimizer, whose, group.rank(), group.size());
}

void check_same_gradients(
    std::span<const MatrixParam> params, std::span<const std::uint8_t> has_grad, const comm::Communicator& shard,
    const comm::Communicator& replicate, std::string_view optimizer) {
  if (params.empty()) return;
  at::Tensor flags = at::empty({std::ssize(has_grad)}, at::kByte);
  std::ranges::copy(has_grad, flags.mutable_data_ptr<std::uint8_t>());
  for (const comm::Communicator* group : {&shard, &replicate}) {
    if (group->size() == 1 || !group->checks_order()) continue;
    const at::Tensor send = flags.repeat({group->size()}).to(group->device());
    const at::Tensor all = at::empty_like(send);
    const std::vector<Index> counts(static_cast<std::size_t>(group->size()), flags.numel());
    group->all_to_all(send, all, counts, counts, fmt::format("{} gradients", optimizer)).wait();
    flags = all.cpu();
  }
  const auto* of_all = flags.const_data_ptr<std::uint8_t>();
  const std::size_t ranks = static_cast<std::size_t>(flags.numel()) / params.size();  // shard group within replicas
  for (std::size_t i = 0; i < params.size(); ++i) {
    std::vector<std::size_t> without;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (!of_all[rank * params.size() + i]) without.push_back(rank);
    }
    RAGGED_CHECK(
        without.empty() || without.size() == ranks,
        "[{}] Expected a gradient of a parameter on all ranks or on none, but got none on ranks {} of {} (param "
        "'{}'). Give zeros where a rank has none.",
        optimizer, fmt::join(without, ", "), ranks, params[i].name);
  }
}

}  // namespace ragged::optim
