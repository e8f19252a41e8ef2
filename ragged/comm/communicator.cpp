#include "ragged/comm/communicator.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/comm/below_autograd.h"
#include "ragged/comm/group_state.h"
#include "ragged/comm/sum_in_rank_order.h"

namespace ragged::comm {
namespace {

using plan::Segment;
using plan::SegmentKind;

// From how many bytes a slice on broadcasts of slices beat Gloo's own all-gather, which is fewer calls
// (bench/comm_bench.cpp). Two ranks can't tell them apart below; four and eight can at any size; more weren't measured.
constexpr Index kBroadcastSliceBytes = 16 << 10;
constexpr int kMostBroadcasters = 8;

Index broadcast_slice_bytes(int ranks) {
  return ranks > 2 && ranks <= kMostBroadcasters ? 0 : kBroadcastSliceBytes;
}

BackendKind backend_kind(c10d::ProcessGroup& group, c10::Device device) {
  try {
    const std::string name = group.getBackend(device.type())->getBackendName();
    if (name == "gloo") return BackendKind::kGloo;
    if (name == "nccl") return BackendKind::kNccl;
  } catch (const std::exception&) {
    // A group implemented in Python has no Backend that C++ can reach.
  }
  return BackendKind::kOther;
}

// Some backends refuse fp8; a gather needs no arithmetic, so such elements travel as bytes.
at::Tensor as_movable(const at::Tensor& tensor) {
  return tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor;
}

at::Tensor slice(const at::Tensor& image, plan::Interval interval) {
  return image.narrow(0, interval.begin, interval.size());
}

// A thread of Gloo may hold its tensors for a moment after the wait, and with them memory that is wanted back: it gets
// one over the same bytes that owns nothing.
at::Tensor without_owner(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.numel() == 0) return tensor;
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.options());
}

Index bytes_of(std::span<const Segment> segments, const at::Tensor& image) {
  Index numel = 0;
  for (const Segment& segment : segments) numel += segment.numel;
  return numel * image.element_size();
}

void check_runs(
    const char* what, const at::Tensor& tensor, std::span<const Index> counts, const GroupState& group,
    std::string_view unit) {
  RAGGED_CHECK(
      tensor.dim() == 1 && tensor.is_contiguous(),
      "[all_to_all] Expected a contiguous 1-D tensor to {}, but got {} dims (unit '{}', rank {} of {}).", what,
      tensor.dim(), unit, group.rank, group.size);
  Index sum = 0;
  for (const Index count : counts) {
    RAGGED_CHECK(
        count >= 0, "[all_to_all] Expected counts to {} of at least 0, but got {} (unit '{}', rank {} of {}).", what,
        count, unit, group.rank, group.size);
    sum += count;
  }
  RAGGED_CHECK(
      static_cast<int>(counts.size()) == group.size && sum == tensor.numel(),
      "[all_to_all] Expected {} counts to {} that sum to {} elements, but got {} that sum to {} (unit '{}', rank {} of "
      "{}).",
      group.size, what, tensor.numel(), counts.size(), sum, unit, group.rank, group.size);
}

// Runs of ranks whose intervals ascend in the image without a gap: each is one uneven all-to-all. An ordinary segment
// is one run; a ragged one that starts at a middle rank and goes round is two, and padding between owners makes one
// more.
std::vector<std::vector<int>> ascending_runs(const Segment& segment) {
  std::vector<int> holders;
  for (int r = 0; r < static_cast<int>(segment.owners.size()); ++r) {
    if (!segment.owners[static_cast<std::size_t>(r)].empty()) holders.push_back(r);
  }
  std::sort(holders.begin(), holders.end(), [&](int a, int b) {
    return segment.owners[static_cast<std::size_t>(a)].begin < segment.owners[static_cast<std::size_t>(b)].begin;
  });
  std::vector<std::vector<int>> runs;
  Index end = -1;
  for (int rank : holders) {
    const plan::Interval owned = segment.owners[static_cast<std::size_t>(rank)];
    if (runs.empty() || runs.back().back() > rank || owned.begin != end) runs.emplace_back();
    runs.back().push_back(rank);
    end = owned.end;
  }
  return runs;
}

}  // namespace

Communicator::Communicator() : state_(std::make_shared<GroupState>()) {}

Communicator::Communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, CommOptions options, std::string name)
    : state_(std::make_shared<GroupState>()) {
  state_->rank = group->getRank();
  state_->size = group->getSize();
  state_->kind = backend_kind(*group, device);
  state_->device = device;
  state_->options = options;
  state_->name = std::move(name);
  if (options.deadline) {
    state_->deadline = *options.deadline;
  } else if (state_->kind != BackendKind::kOther) {
    state_->deadline = group->getBackend(device.type())->getBackendOptions()->timeout;
  }
  state_->group = std::move(group);
}

int Communicator::rank() const {
  return state_->rank;
}
int Communicator::size() const {
  return state_->size;
}
bool Communicator::is_stock() const {
  return state_->options.collectives == Collectives::kStock;
}
bool Communicator::is_gloo() const {
  return state_->kind == BackendKind::kGloo;
}
bool Communicator::checks_order() const {
  return state_->options.check_order;
}
c10::Device Communicator::device() const {
  return state_->device;
}
const c10::intrusive_ptr<c10d::ProcessGroup>& Communicator::process_group() const {
  return state_->group;
}
const Traffic& Communicator::traffic() const {
  return state_->traffic;
}
double Communicator::wait_seconds() const {
  return state_->wait_seconds;
}

Work Communicator::all_gather(
    std::span<const Segment> segments, const at::Tensor& image, std::string_view unit, const at::Tensor& own) const {
  if (size() == 1) return {};
  ProfilerRange range("ragged::all_gather", unit);
  state_->before("all_gather", unit);
  BelowAutograd guard;
  Work work(state_, "all_gather", unit);
  const at::Tensor movable = as_movable(image);
  RAGGED_ASSERT(!own.defined() || takes_own_part(segments), "a gather of '{}' from elsewhere by broadcasts", unit);
  const at::Tensor elsewhere = own.defined() ? as_movable(own) : own;
  Index local = 0;
  for (const Segment& segment : segments) {
    if (segment.numel == 0) continue;
    const plan::Interval mine = segment.owners[static_cast<std::size_t>(rank())];
    const at::Tensor source = elsewhere.defined() ? elsewhere.narrow(0, local, mine.size()) : slice(movable, mine);
    local += mine.size();
    const Index slice_bytes = segment.numel / size() * movable.element_size();
    const bool one_call = segment.kind == SegmentKind::kUniform &&
        (is_stock() || state_->kind != BackendKind::kGloo || slice_bytes < broadcast_slice_bytes(size()));
    if (one_call) {
      work.add([&] {
        return compat::all_gather(
            *state_->group, movable.narrow(0, segment.image_offset, segment.numel), source,
            within<c10d::AllgatherOptions>(state_->deadline), state_->implementation());
      });
      continue;
    }
    for (int root = 0; root < size(); ++root) {
      const plan::Interval owned = segment.owners[static_cast<std::size_t>(root)];
      if (owned.empty()) continue;
      work.add([&] {
        std::vector<at::Tensor> tensors{slice(movable, owned)};
        return elsewhere.defined() ? scatter(tensors, source, root) : broadcast_from(tensors, root);
      });
    }
  }
  state_->traffic.gathered_bytes += bytes_of(segments, image);
  ++state_->traffic.all_gathers;
  return work;
}

bool Communicator::takes_own_part(std::span<const Segment> segments) const {
  if (state_->kind == BackendKind::kGloo && !is_stock()) return size() == 2;
  return size() > 1 && std::all_of(segments.begin(), segments.end(), [](const Segment& segment) {
           return segment.kind == SegmentKind::kUniform || segment.numel == 0;
         });
}

compat::WorkPtr Communicator::broadcast_from(std::vector<at::Tensor>& tensors, int root) const {
  auto options = within<c10d::BroadcastOptions>(state_->deadline);
  options.rootRank = root;
  return state_->group->broadcast(tensors, options);
}

// The root sends one tensor to all, itself included.
compat::WorkPtr Communicator::scatter(std::vector<at::Tensor>& outputs, const at::Tensor& source, int root) const {
  std::vector<std::vector<at::Tensor>> inputs;
  if (root == rank()) inputs.emplace_back(static_cast<std::size_t>(size()), source);
  auto options = within<c10d::ScatterOptions>(state_->deadline);
  options.rootRank = root;
  return state_->group->scatter(outputs, inputs, options);
}

bool Communicator::reduces_by_all_to_all(const Segment& segment) const {
  if (segment.kind != SegmentKind::kUniform) return true;
  return state_->kind == BackendKind::kGloo && !is_stock();
}

bool Communicator::sums_after_transfer(std::span<const Segment> segments) const {
  return size() == 1 || std::all_of(segments.begin(), segments.end(), [this](const Segment& segment) {
           return segment.numel == 0 || reduces_by_all_to_all(segment);
         });
}

Index Communicator::staging_numel(const ReduceScatter& args) const {
  if (size() == 1) return 0;
  Index numel = 0;
  for (const Segment& segment : args.segments) {
    const Index owned = segment.owners[static_cast<std::size_t>(rank())].size();
    const bool same_dtype = args.image.scalar_type() == args.shard.scalar_type();
    if (reduces_by_all_to_all(segment) && size() > 2) {
      numel += size() * owned;
    } else if (args.accumulate || !same_dtype) {
      numel += owned;
    }
  }
  return numel;
}

Work Communicator::reduce_scatter(const ReduceScatter& args, std::string_view unit) const {
  ProfilerRange range("ragged::reduce_scatter", unit);
  BelowAutograd guard;
  const SumInRankOrder sum{.scale = args.scale, .accumulate = args.accumulate};
  if (size() == 1) {
    Index local = 0;
    for (const Segment& segment : args.segments) {
      const plan::Interval owned = segment.owners[0];
      sum_in_rank_order(slice(args.image, owned), 1, args.shard.narrow(0, local, owned.size()), sum);
      local += owned.size();
    }
    return {};
  }
  state_->before("reduce_scatter", unit);
  Work work(state_, "reduce_scatter", unit);
  // A rank that owns nothing needs no staging and still takes part.
  const at::Tensor all_staging = args.staging.defined() ? args.staging : at::empty({0}, args.image.options());
  Index local = 0;
  Index staged = 0;
  std::vector<std::function<void()>> finishers;
  for (const Segment& segment : args.segments) {
    if (segment.numel == 0) continue;
    const plan::Interval owned = segment.owners[static_cast<std::size_t>(rank())];
    const at::Tensor out = args.shard.narrow(0, local, owned.size());
    local += owned.size();
    const bool direct = !args.accumulate && args.image.scalar_type() == args.shard.scalar_type();
    if (reduces_by_all_to_all(segment) && size() == 2) {
      // Each sends the other's slice and takes what comes into the shard itself; its own stays where it is.
      const int peer = 1 - rank();
      const at::Tensor received = direct ? out : all_staging.narrow(0, staged, owned.size());
      if (!direct) staged += owned.size();
      const at::Tensor sent = slice(args.image, segment.owners[static_cast<std::size_t>(peer)]);
      std::vector<int64_t> send(2, 0);
      std::vector<int64_t> receive(2, 0);
      send[static_cast<std::size_t>(peer)] = sent.numel();
      receive[static_cast<std::size_t>(peer)] = owned.size();
      work.add([&] {
        return compat::all_to_all(
            *state_->group, without_owner(received), sent, receive, send,
            within<c10d::AllToAllOptions>(state_->deadline));
      });
      std::vector<at::Tensor> addends{slice(args.image, owned), received};
      if (peer == 0) std::swap(addends[0], addends[1]);
      finishers.push_back([addends, out, sum] { sum_in_rank_order(addends, out, sum); });
      continue;
    }
    if (reduces_by_all_to_all(segment)) {
      const at::Tensor staging = all_staging.narrow(0, staged, size() * owned.size());
      staged += staging.numel();
      for (const std::vector<int>& run : ascending_runs(segment)) {
        std::vector<int64_t> send(static_cast<std::size_t>(size()), 0);
        std::vector<int64_t> receive(static_cast<std::size_t>(size()), 0);
        bool receives = false;
        for (int holder : run) {
          send[static_cast<std::size_t>(holder)] = segment.owners[static_cast<std::size_t>(holder)].size();
          receives = receives || holder == rank();
        }
        if (receives) std::fill(receive.begin(), receive.end(), owned.size());
        const plan::Interval sent{
            segment.owners[static_cast<std::size_t>(run.front())].begin,
            segment.owners[static_cast<std::size_t>(run.back())].end};
        work.add([&] {
          return compat::all_to_all(
              *state_->group, receives ? staging : staging.narrow(0, 0, 0), slice(args.image, sent), receive, send,
              within<c10d::AllToAllOptions>(state_->deadline));
        });
      }
      finishers.push_back([staging, out, sum, ranks = size()] { sum_in_rank_order(staging, ranks, out, sum); });
      continue;
    }
    const at::Tensor target = direct ? out : all_staging.narrow(0, staged, owned.size());
    if (!direct) staged += owned.size();
    work.add([&] {
      auto options = within<c10d::ReduceScatterOptions>(state_->deadline);
      options.reduceOp = c10d::ReduceOp::SUM;
      return compat::reduce_scatter(
          *state_->group, target, args.image.narrow(0, segment.image_offset, segment.numel), options,
          state_->implementation());
    });
    if (direct) {
      finishers.push_back([out, scale = sum.scale] {
        if (scale != 1.0) out.mul_(scale);
      });
    } else {
      finishers.push_back([target, out, sum] { sum_in_rank_order(target, 1, out, sum); });
    }
  }
  work.on_complete([finishers = std::move(finishers)] {
    BelowAutograd below;
    for (const auto& finish : finishers) finish();
  });
  state_->traffic.reduced_bytes += bytes_of(args.segments, args.image);
  ++state_->traffic.reduce_scatters;
  return work;
}

Work Communicator::all_reduce(const at::Tensor& tensor, bool max, std::string_view unit) const {
  if (size() == 1) return {};
  ProfilerRange range("ragged::all_reduce", unit);
  state_->before("all_reduce", unit);
  BelowAutograd guard;
  Work work(state_, "all_reduce", unit);
  work.add([&] {
    std::vector<at::Tensor> tensors{tensor};
    auto options = within<c10d::AllreduceOptions>(state_->deadline);
    options.reduceOp = max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    return state_->group->allreduce(tensors, options);
  });
  state_->traffic.all_reduced_bytes += static_cast<Index>(tensor.nbytes());
  ++state_->traffic.all_reduces;
  return work;
}

Work Communicator::all_reduce_sum(const at::Tensor& tensor, std::string_view unit) const {
  return all_reduce(tensor, false, unit);
}

Work Communicator::all_reduce_max(const at::Tensor& tensor, std::string_view unit) const {
  return all_reduce(tensor, true, unit);
}

Work Communicator::broadcast(const at::Tensor& tensor, int root, std::string_view unit) const {
  if (size() == 1) return {};
  ProfilerRange range("ragged::broadcast", unit);
  state_->before("broadcast", unit);
  BelowAutograd guard;
  Work work(state_, "broadcast", unit);
  work.add([&] {
    std::vector<at::Tensor> tensors{as_movable(tensor)};
    return broadcast_from(tensors, root);
  });
  state_->traffic.other_bytes += static_cast<Index>(tensor.nbytes());
  ++state_->traffic.others;
  return work;
}

Work Communicator::all_to_all(
    const at::Tensor& send, const at::Tensor& receive, std::span<const Index> send_counts,
    std::span<const Index> receive_counts, std::string_view unit) const {
  check_runs("send", send, send_counts, *state_, unit);
  check_runs("receive", receive, receive_counts, *state_, unit);
  RAGGED_CHECK(
      send.scalar_type() == receive.scalar_type(),
      "[all_to_all] Expected tensors of one dtype, but got {} and {} (unit '{}').", c10::toString(send.scalar_type()),
      c10::toString(receive.scalar_type()), unit);
  BelowAutograd guard;
  if (size() == 1) {
    receive.copy_(send);
    return {};
  }
  ProfilerRange range("ragged::all_to_all", unit);
  state_->before("all_to_all", unit);
  Work work(state_, "all_to_all", unit);
  const Index element = send.element_size();
  const auto bytes = [element](std::span<const Index> counts) {
    std::vector<int64_t> scaled(counts.begin(), counts.end());
    for (int64_t& count : scaled) count *= element;
    return scaled;
  };
  work.add([&] {
    return compat::all_to_all(
        *state_->group, receive.view(at::kByte), send.view(at::kByte), bytes(receive_counts), bytes(send_counts),
        within<c10d::AllToAllOptions>(state_->deadline));
  });
  const Index kept = send_counts[static_cast<std::size_t>(rank())];
  state_->traffic.all_to_all_bytes += (send.numel() - kept) * element;
  ++state_->traffic.all_to_alls;
  return work;
}

void Communicator::barrier() const {
  const at::Tensor token = at::zeros({1}, at::TensorOptions().device(state_->device).dtype(at::kFloat));
  all_reduce_sum(token, "barrier").wait();
}

}  // namespace ragged::comm
