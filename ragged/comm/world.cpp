#include "ragged/comm/world.h"

#include <algorithm>
#include <cstdlib>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "ragged/base/error.h"
#include "ragged/comm/gloo_backend.h"
#include "ragged/comm/nccl_backend.h"

namespace ragged::comm {
namespace {

CommOptions with_environment(CommOptions options) {
  if (const char* check = std::getenv("RAGGED_CHECK")) {
    const std::string text = check;
    RAGGED_CHECK(text == "0" || text == "1", "[world] Expected RAGGED_CHECK to be 0 or 1, but got '{}'.", text);
    options.check_order = options.check_order || text == "1";
  }
  return options;
}

}  // namespace

World World::connect(const RankEnv& env, const WorldOptions& options) {
  if (env.world_size == 1) return over_store(nullptr, 0, 1, options);
  c10::intrusive_ptr<c10d::Store> store;
  try {
    c10d::TCPStoreOptions tcp;
    tcp.port = env.master_port;
    tcp.isServer = env.rank == 0 && !env.agent_store;
    tcp.numWorkers = static_cast<std::size_t>(env.world_size);
    tcp.waitWorkers = false;
    tcp.timeout = options.timeout;
    store = c10::make_intrusive<c10d::TCPStore>(env.master_addr, tcp);
  } catch (const std::exception& e) {
    throw CommError(fmt::format(
        "[connect] Expected a store at {}:{}, but got: {} (rank {} of {}). Check MASTER_ADDR and MASTER_PORT, and that "
        "rank 0 is up.",
        env.master_addr, env.master_port, e.what(), env.rank, env.world_size));
  }
  // An elastic restart meets the keys of the attempt before it.
  store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("ragged/{}", env.restart_count), store);
  World world;
  world.same_host_ = env.local_world_size == env.world_size;
  world.store_ = std::move(store);
  world.options_ = options;
  world.options_.comm = with_environment(options.comm);
  world.rank_ = env.rank;
  std::vector<int> everyone(static_cast<std::size_t>(env.world_size));
  std::iota(everyone.begin(), everyone.end(), 0);
  world.all_ = world.make_group(everyone, "world");
  return world;
}

World World::over_store(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, const WorldOptions& options) {
  RAGGED_CHECK(world_size >= 1, "[world] Expected a world size of at least 1, but got {}.", world_size);
  RAGGED_CHECK(rank >= 0 && rank < world_size, "[world] Expected a rank in 0..{}, but got {}.", world_size - 1, rank);
  World world;
  world.store_ = std::move(store);
  world.options_ = options;
  world.options_.comm = with_environment(options.comm);
  world.rank_ = rank;
  std::vector<int> everyone(static_cast<std::size_t>(world_size));
  std::iota(everyone.begin(), everyone.end(), 0);
  world.all_ = world.make_group(everyone, "world");
  return world;
}

Communicator World::make_group(const std::vector<int>& ranks, const std::string& name) {
  if (ranks.size() == 1) return {};
  const int size = static_cast<int>(ranks.size());
  const int rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
  RAGGED_ASSERT(rank < size, "rank {} isn't in group {}", rank_, name);
  try {
    auto store = c10::make_intrusive<c10d::PrefixStore>(name, store_);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
    const bool cuda = options_.device.is_cuda();
    auto backend = cuda ? make_nccl_backend(store, rank, size, options_.device, options_.timeout)
                        : make_gloo_backend(store, rank, size, {.timeout = options_.timeout, .same_host = same_host_});
    const auto type = cuda ? c10d::ProcessGroup::BackendType::NCCL : c10d::ProcessGroup::BackendType::GLOO;
    group->setBackend(options_.device.type(), type, backend);
    group->setDefaultBackend(type);
    group->setGroupName(name);
    return Communicator(std::move(group), options_.device, options_.comm, name);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw CommError(fmt::format(
        "[connect] Expected all {} ranks of group '{}' to arrive within {:.1f} s, but got: {} (rank {} of {}).", size,
        name, static_cast<double>(options_.timeout.count()) / 1000.0, e.what(), rank, size));
  }
}

MeshGroups World::groups(const layout::Mesh& mesh) {
  std::vector<int> ranks = mesh.ranks();
  std::sort(ranks.begin(), ranks.end());
  bool complete = mesh.size() == size();
  for (int r = 0; complete && r < size(); ++r) complete = ranks[static_cast<std::size_t>(r)] == r;
  RAGGED_CHECK(
      complete,
      "[groups] Expected a mesh that holds each of the {} ranks once, but got {}. Make the product of its "
      "sizes equal to the world size.",
      size(), layout::to_string(mesh));
  MeshGroups groups;
  groups.mesh = mesh;
  groups.rank = rank_;
  groups.device = options_.device;
  const std::string prefix = fmt::format("mesh{}", next_group_++);
  const auto communicator = [&](layout::DimRole role) -> Communicator {
    const int dim = mesh.find(role);
    if (dim < 0) return {};
    const std::vector<int> members = mesh.group(dim, rank_);
    return make_group(
        members, fmt::format("{}/{}/{}", prefix, mesh.dims()[static_cast<std::size_t>(dim)].name, members.front()));
  };
  groups.shard = communicator(layout::DimRole::kShard);
  groups.replicate = communicator(layout::DimRole::kReplicate);
  return groups;
}

}  // namespace ragged::comm
