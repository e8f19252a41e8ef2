// The reduction of several buckets at once: what Communicator::reduce_scatter does with one image, for slices that the
// caller gathered from many.
#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/comm/below_autograd.h"
#include "ragged/comm/communicator.h"
#include "ragged/comm/group_state.h"
#include "ragged/comm/sum_in_rank_order.h"

namespace ragged::comm {
namespace {

// Addends of one part: of each other rank at `offset` of its run, and this rank's own.
std::vector<at::Tensor> addends_of(
    const at::Tensor& received, const at::Tensor& own, const PackedReduceScatter::Part& part, int rank, int size) {
  const Index numel = part.shard.numel();
  std::vector<at::Tensor> addends;
  Index run = 0;
  for (int from = 0; from < size; ++from) {
    if (from == rank) {
      addends.push_back(own.narrow(0, part.offset, numel));
      continue;
    }
    addends.push_back(received.narrow(0, run + part.offset, numel));
    run += own.numel();
  }
  return addends;
}

}  // namespace

Work Communicator::reduce_scatter(const PackedReduceScatter& args, std::string_view unit) const {
  const Index mine = args.counts[static_cast<std::size_t>(rank())];
  const Index sent = args.packed.numel() - mine;
  RAGGED_ASSERT(
      size() > 1 && args.staging.numel() == (size() - 1) * mine,
      "{} elements to receive {} of each of {} ranks of '{}'", args.staging.numel(), mine, size(), unit);
  ProfilerRange range("ragged::reduce_scatter", unit);
  state_->before("reduce_scatter", unit);
  BelowAutograd guard;
  Work work(state_, "reduce_scatter", unit);
  std::vector<int64_t> send(args.counts.begin(), args.counts.end());
  std::vector<int64_t> receive(static_cast<std::size_t>(size()), mine);
  send[static_cast<std::size_t>(rank())] = 0;
  receive[static_cast<std::size_t>(rank())] = 0;
  work.add([&] {
    return compat::all_to_all(
        *state_->group, args.staging, args.packed.narrow(0, 0, sent), receive, send,
        within<c10d::AllToAllOptions>(state_->deadline));
  });
  const at::Tensor own = args.packed.narrow(0, sent, mine);
  work.on_complete(
      [received = args.staging, own, parts = args.parts, rank = rank(), size = size(), memory = args.memory] {
        BelowAutograd below;
        for (const PackedReduceScatter::Part& part : parts) {
          const SumInRankOrder sum{.scale = part.scale, .accumulate = part.accumulate};
          sum_in_rank_order(addends_of(received, own, part, rank, size), part.shard, sum);
        }
      });
  state_->traffic.reduced_bytes += args.bytes;
  ++state_->traffic.reduce_scatters;
  return work;
}

}  // namespace ragged::comm
