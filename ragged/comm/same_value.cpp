#include "ragged/comm/same_value.h"

#include <ATen/ATen.h>

namespace ragged::comm {

bool is_same_on_all(const Communicator& group, std::uint64_t hash, std::string_view name) {
  // One maximum of the value and of its negative, which must fit: equal exactly where largest and smallest are.
  const auto value = static_cast<std::int64_t>(hash >> 2);
  const at::Tensor extremes = at::tensor({value, -value}, at::kLong).to(group.device());
  group.all_reduce_max(extremes, name).wait();
  return extremes[0].item<std::int64_t>() == -extremes[1].item<std::int64_t>();
}

}  // namespace ragged::comm
