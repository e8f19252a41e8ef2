#include "ragged/fsdp/merge.h"

namespace ragged::fsdp {

MergeRun::MergeRun(MergeTraits first, Index limit)
    : kind_(limit > 0 && first.bytes <= limit ? first.kind : -1), bytes_(first.bytes), limit_(limit) {}

bool MergeRun::take(MergeTraits next) {
  if (kind_ < 0 || next.kind != kind_ || bytes_ + next.bytes > limit_) return false;
  bytes_ += next.bytes;
  return true;
}

std::vector<std::size_t> merged_gather(
    std::span<const int> order, std::size_t first, std::span<const MergeTraits> units, Index limit,
    const std::function<bool(std::size_t)>& needs_gather) {
  const auto unit_at = [&](std::size_t position) { return static_cast<std::size_t>(order[position]); };
  std::vector<std::size_t> together{first};
  MergeRun run(units[unit_at(first)], limit);
  if (!run.grows()) return together;
  std::vector<char> taken(units.size(), 0);
  taken[unit_at(first)] = true;
  for (std::size_t next = first + 1; next < order.size(); ++next) {
    if (taken[unit_at(next)] || !needs_gather(next)) continue;
    if (!run.take(units[unit_at(next)])) break;
    taken[unit_at(next)] = true;
    together.push_back(next);
  }
  return together;
}

}  // namespace ragged::fsdp
