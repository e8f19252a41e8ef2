// All-gather and reduce-scatter of one uniform segment through Communicator, against the raw c10d calls on the same
// group in the same run, and against broadcasts of slices: where the last two cross is kBroadcastSliceBytes in
// ragged/comm/communicator.cpp.
//
//     comm_bench [largest MiB, default 64]
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bench/rank_threads.h"
#include "ragged/comm/compat.h"

namespace ragged::bench {
namespace {

using comm::Collectives;
using comm::Communicator;
using comm::ReduceScatter;
namespace compat = comm::compat;

plan::Segment uniform_segment(int world_size, Index shard_size) {
  plan::Segment segment;
  segment.numel = world_size * shard_size;
  segment.shard_size = shard_size;
  for (int r = 0; r < world_size; ++r) segment.owners.push_back({r * shard_size, (r + 1) * shard_size});
  return segment;
}

void compare(Rank& rank, Index image_bytes) {
  const Communicator& automatic = rank.world.all();
  const Communicator stock(
      automatic.process_group(), automatic.device(), {.collectives = Collectives::kStock}, "stock");
  c10d::ProcessGroup& group = *automatic.process_group();
  const int world_size = automatic.size();
  const std::vector<plan::Segment> segments{uniform_segment(world_size, image_bytes / 4 / world_size)};
  const at::Tensor image = at::ones({segments[0].numel});
  const at::Tensor shard = at::zeros({segments[0].shard_size});
  const at::Tensor staging = at::empty({segments[0].numel});
  const at::Tensor own =
      image.narrow(0, segments[0].owners[static_cast<std::size_t>(automatic.rank())].begin, shard.numel());
  const ReduceScatter args{.segments = segments, .image = image, .staging = staging, .shard = shard};
  const int rounds = static_cast<int>(std::clamp<Index>((64 << 20) / image_bytes, 9, 200));

  const std::vector<double> gather = time_in_turns(
      rank, rounds,
      {[&] { compat::all_gather(group, image, own)->wait(); },
       [&] { automatic.all_gather(segments, image, "bench").wait(); },
       [&] { stock.all_gather(segments, image, "bench").wait(); },
       [&] { automatic.all_gather(segments, image, "bench", shard).wait(); },
       [&] {
         image.narrow(0, automatic.rank() * shard.numel(), shard.numel()).copy_(shard);
         automatic.all_gather(segments, image, "bench").wait();
       },
       [&] {
         std::vector<compat::WorkPtr> works;
         for (int root = 0; root < world_size; ++root) {
           std::vector<at::Tensor> slice{image.narrow(0, root * shard.numel(), shard.numel())};
           c10d::BroadcastOptions options;
           options.rootRank = root;
           works.push_back(group.broadcast(slice, options));
         }
         for (const auto& work : works) work->wait();
       }});
  const std::vector<double> reduce = time_in_turns(
      rank, rounds,
      {[&] { compat::reduce_scatter(group, shard, image, {})->wait(); },
       [&] { automatic.reduce_scatter(args, "bench").wait(); }, [&] { stock.reduce_scatter(args, "bench").wait(); }});
  if (!rank.is_first()) return;
  fmt::print(
      "{:>5} {:>9} KiB {:>9} KiB | {:>10.0f} {:>6.2f} {:>6.2f} {:>10.2f} {:>7.2f} {:>8.2f} | {:>10.0f} {:>6.2f} "
      "{:>6.2f}\n",
      world_size, image_bytes >> 10, (image_bytes / world_size) >> 10, gather[0], gather[1] / gather[0],
      gather[2] / gather[0], gather[5] / gather[0], gather[3] / gather[0], gather[4] / gather[0], reduce[0],
      reduce[1] / reduce[0], reduce[2] / reduce[0]);
  std::fflush(stdout);
}

}  // namespace
}  // namespace ragged::bench

int main(int argc, char** argv) {
  const ragged::Index largest = (argc > 1 ? std::atol(argv[1]) : 64) << 20;
  fmt::print("raw: microseconds of the c10d call; the rest: time over raw (below 1 is faster)\n");
  fmt::print(
      "world         image         slice | all-gather   auto  stock broadcasts scatter copy+auto | reduce-sc.   auto  "
      "stock\n");
  for (const int world_size : {2, 4}) {
    ragged::bench::run_rank_threads(world_size, [&](ragged::bench::Rank& rank) {
      for (ragged::Index bytes = 4 << 10; bytes <= largest; bytes *= 2) ragged::bench::compare(rank, bytes);
    });
  }
}
