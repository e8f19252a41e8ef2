// Ranks as threads of one process over real Gloo groups on an in-memory store: a rank test costs tens of
// milliseconds. What kills or stalls a rank needs processes: tests/cli does that.
#pragma once

#include <functional>

#include "ragged/comm/world.h"

namespace ragged::test {

/// Runs `body` once a rank and joins them all. The first exception of any rank is rethrown; the others then fail by
/// their time-out.
void run_ranks(int world_size, const std::function<void(comm::World&)>& body, const comm::WorldOptions& options = {});

/// A short time-out and nothing else.
comm::WorldOptions quick(int seconds = 20);

/// Replicas x shards, 1 x n being plain sharding.
struct MeshShape {
  int replicate = 1;
  int shard = 1;
  int size() const { return replicate * shard; }
  layout::Mesh mesh() const;
};
std::string to_string(const MeshShape& shape);

}  // namespace ragged::test
