// Ranks as threads over Gloo on the loopback address, and timing of what they do together. Times are medians, and what
// is compared runs in turns within the same round, so that a noisy machine disturbs all of it alike.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ragged/comm/world.h"

namespace ragged::bench {

/// What one rank sees: its world, and a meeting point that costs no collective.
struct Rank {
  comm::World& world;
  std::barrier<>& meet;
  bool is_first() const { return world.rank() == 0; }
};

inline void run_rank_threads(int world_size, const std::function<void(Rank&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier<> meet(world_size);
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] {
      at::set_num_threads(1);
      comm::World world = comm::World::over_store(store, r, world_size, {});
      Rank rank{world, meet};
      body(rank);
      meet.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Median microseconds of each candidate over `rounds`: from when all ranks are there until all are done.
inline std::vector<double> time_in_turns(Rank& rank, int rounds, const std::vector<std::function<void()>>& candidates) {
  std::vector<std::vector<double>> times(candidates.size());
  for (int round = -2; round < rounds; ++round) {  // two to warm up
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      rank.meet.arrive_and_wait();
      const auto start = std::chrono::steady_clock::now();
      candidates[i]();
      rank.meet.arrive_and_wait();
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
      if (round >= 0) times[i].push_back(took.count());
    }
  }
  std::vector<double> medians;
  for (const auto& of_candidate : times) medians.push_back(median(of_candidate));
  return medians;
}

}  // namespace ragged::bench
