// Connects the ranks: the store, the default process group, and one group for each dim of a mesh. In C++ programs
// it stands where init_process_group and init_device_mesh stand in Python.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <c10/core/Device.h>

#include "ragged/comm/communicator.h"
#include "ragged/comm/rank_env.h"
#include "ragged/layout/mesh.h"

namespace ragged::comm {

struct WorldOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  c10::Device device = c10::Device(c10::kCPU);  // CPU: Gloo; CUDA: NCCL
  CommOptions comm{};
};

/// The communicators of one rank for the data-parallel dims of a mesh. A dim the mesh lacks has a communicator of
/// size 1, so callers need no special case. Cheap to copy.
struct MeshGroups {
  layout::Mesh mesh = layout::Mesh::shard(1);
  int rank = 0;  // global rank
  Communicator shard{};
  Communicator replicate{};
  c10::Device device = c10::Device(c10::kCPU);
  /// The rank of the shard group where the next ragged tail begins, so that no rank collects the tails of all buckets.
  /// Copies share it; all ranks plan the same buckets in the same order.
  std::shared_ptr<int> next_owner = std::make_shared<int>(0);
};

class World {
 public:
  /// Collective over all ranks. A world of one needs no network and no environment. Throws CommError when the
  /// others don't come within the time-out.
  static World connect(const RankEnv& env, const WorldOptions& options = {});
  /// Over a store of the caller's (tests, threads as ranks). Collective.
  static World over_store(
      c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, const WorldOptions& options = {});

  int rank() const { return rank_; }
  int size() const { return all_.size(); }
  const Communicator& all() const { return all_; }
  c10::Device device() const { return options_.device; }

  /// Collective over all ranks. The mesh must hold each rank of the world once. Throws InvalidArgument otherwise.
  MeshGroups groups(const layout::Mesh& mesh);

 private:
  World() = default;
  Communicator make_group(const std::vector<int>& ranks, const std::string& name);

  c10::intrusive_ptr<c10d::Store> store_;
  WorldOptions options_;
  int rank_ = 0;
  int next_group_ = 0;
  bool same_host_ = true;
  Communicator all_;
};

}  // namespace ragged::comm
