// An N-D grid of ranks with named dims, as a value. It knows who is where; process groups are made
// from it in ragged/comm/.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::layout {

/// What a mesh dim is for. Foreign dims (tp, ep, pp, cp) belong to somebody else; their shards come
/// first and a ragged placement cuts what they left.
enum class DimRole { kReplicate, kShard, kForeign };

struct MeshDim {
  std::string name;
  int size = 1;
  DimRole role = DimRole::kForeign;
  friend bool operator==(const MeshDim&, const MeshDim&) = default;
};

class Mesh {
 public:
  /// Ranks 0 .. n-1 in row-major order (the last dim varies fastest). Throws InvalidArgument on no
  /// dims, a size below 1, an empty or repeated name.
  explicit Mesh(std::vector<MeshDim> dims);
  /// The same over these global ranks, which must be distinct and as many as the product of the
  /// sizes.
  Mesh(std::vector<MeshDim> dims, std::vector<int> ranks);

  /// 1-D mesh {shard}.
  static Mesh shard(int world_size);
  /// 2-D mesh {replicate, shard}: HSDP.
  static Mesh hybrid(int replicate, int shard);

  const std::vector<MeshDim>& dims() const { return dims_; }
  const std::vector<int>& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int size(int dim) const;
  /// Index of the dim of this name or role; -1 when there is none.
  int find(std::string_view name) const;
  int find(DimRole role) const;

  /// One coordinate a dim. Throws InvalidArgument for a rank outside the mesh.
  std::vector<int> coordinates(int rank) const;
  /// The ranks that differ from `rank` in `dim` only, in order of that coordinate: the process
  /// group of the dim.
  std::vector<int> group(int dim, int rank) const;
  /// Every group of the dim, in ascending order of its first position in the mesh; all ranks
  /// compute the same list.
  std::vector<std::vector<int>> groups(int dim) const;

  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  std::vector<MeshDim> dims_;
  std::vector<int> ranks_;
};

std::string to_string(const Mesh& mesh);

}  // namespace ragged::layout
