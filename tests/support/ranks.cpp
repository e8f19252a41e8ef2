#include "tests/support/ranks.h"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ragged/base/error.h"

namespace ragged::test {

void run_ranks(int world_size, const std::function<void(comm::World&)>& body, const comm::WorldOptions& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        comm::World world = comm::World::over_store(store, rank, world_size, options);
        body(world);
        // Nobody closes its connections while a peer still waits for the last operation.
        world.all().barrier();
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

comm::WorldOptions quick(int seconds) {
  comm::WorldOptions options;
  options.timeout = std::chrono::seconds(seconds);
  return options;
}

layout::Mesh MeshShape::mesh() const {
  return replicate == 1 ? layout::Mesh::shard(shard) : layout::Mesh::hybrid(replicate, shard);
}

std::string to_string(const MeshShape& shape) {
  return fmt::format("{}x{}", shape.replicate, shape.shard);
}

}  // namespace ragged::test
