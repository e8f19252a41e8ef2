// What runs before each collective: refusing a dead group, and with check_order the comparison of what each rank is
// about to do. A mismatch is then an error on all ranks at once instead of a wait for ever.
#include <cstring>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/comm/group_state.h"

namespace ragged::comm {
namespace {

struct Step {
  std::uint64_t sequence = 0;
  char operation[24] = {};
  char unit[96] = {};
};

bool same(const Step& a, const Step& b) {
  return std::memcmp(&a, &b, sizeof(Step)) == 0;
}

std::string describe(const Step& step, int rank) {
  return fmt::format("rank {}: #{} {} '{}'", rank, step.sequence, step.operation, step.unit);
}

}  // namespace

void GroupState::before(const char* operation, std::string_view unit) {
  if (!failure.empty()) {
    throw CommError(fmt::format(
        "[{}] Expected a live group '{}', but an earlier operation failed (rank {} of {}): {}", operation, name, rank,
        size, failure));
  }
  ++sequence;
  if (!options.check_order) return;
  Step mine;
  mine.sequence = sequence;
  std::strncpy(mine.operation, operation, sizeof(mine.operation) - 1);
  // Qualified names differ at their ends.
  const std::string_view tail = unit.substr(unit.size() - std::min(unit.size(), sizeof(mine.unit) - 1));
  std::memcpy(mine.unit, tail.data(), tail.size());
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Step));
  at::Tensor all = at::empty({size * kBytes}, at::kByte);
  std::memcpy(all.mutable_data_ptr<std::uint8_t>() + rank * kBytes, &mine, sizeof(Step));
  all = all.to(device);
  try {
    c10d::AllgatherOptions within;
    within.timeout = deadline;
    compat::all_gather(*group, all, all.narrow(0, rank * kBytes, kBytes), within, implementation())
        ->wait(longest_wait());
  } catch (const std::exception& e) {
    fail(operation, unit, e.what());
  }
  all = all.cpu();
  std::string steps;
  bool agree = true;
  for (int r = 0; r < size; ++r) {
    Step theirs;
    std::memcpy(&theirs, all.const_data_ptr<std::uint8_t>() + r * kBytes, sizeof(Step));
    agree = agree && same(mine, theirs);
    steps += (r == 0 ? "" : "; ") + describe(theirs, r);
  }
  if (agree) return;
  fail(operation, unit, "ranks are about to do different things: " + steps);
}

}  // namespace ragged::comm
