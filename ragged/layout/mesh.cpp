#include "ragged/layout/mesh.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::layout {
namespace {

int checked_size(std::span<const MeshDim> dims) {
  RAGGED_CHECK(!dims.empty(), "[mesh] Expected at least one dim, but got none.");
  Index size = 1;
  std::unordered_set<std::string_view> names;
  for (const MeshDim& dim : dims) {
    RAGGED_CHECK(!dim.name.empty(), "[mesh] Expected a name for every dim, but got an empty one.");
    RAGGED_CHECK(names.insert(dim.name).second, "[mesh] Expected distinct dim names, but got '{}' twice.", dim.name);
    RAGGED_CHECK(dim.size >= 1, "[mesh] Expected a size of at least 1, but got {} (dim '{}').", dim.size, dim.name);
    size *= dim.size;
    RAGGED_CHECK(
        size <= std::numeric_limits<int>::max(), "[mesh] Expected fewer than 2^31 ranks, but got more (dim '{}').",
        dim.name);
  }
  return static_cast<int>(size);
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Distance in the mesh between neighbours along `dim`.
int stride(std::span<const MeshDim> dims, int dim) {
  int product = 1;
  for (std::size_t d = static_cast<std::size_t>(dim) + 1; d < dims.size(); ++d) product *= dims[d].size;
  return product;
}

void check_dim(std::span<const MeshDim> dims, int dim) {
  RAGGED_CHECK(
      dim >= 0 && dim < static_cast<int>(dims.size()), "[mesh] Expected a dim in [0, {}), but got {}.", dims.size(),
      dim);
}

int position(const std::vector<int>& ranks, int rank) {
  const bool is_own_position =
      rank >= 0 && rank < static_cast<int>(ranks.size()) && ranks[static_cast<std::size_t>(rank)] == rank;
  if (is_own_position) return rank;
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  RAGGED_CHECK(found != ranks.end(), "[mesh] Expected a rank of the mesh, but got {} ({} ranks).", rank, ranks.size());
  return static_cast<int>(found - ranks.begin());
}

}  // namespace

Mesh::Mesh(std::vector<MeshDim> dims) : dims_(std::move(dims)), ranks_(first_ranks(checked_size(dims_))) {}

Mesh::Mesh(std::vector<MeshDim> dims, std::vector<int> ranks) : dims_(std::move(dims)), ranks_(std::move(ranks)) {
  const int size = checked_size(dims_);
  RAGGED_CHECK(
      static_cast<int>(ranks_.size()) == size, "[mesh] Expected {} ranks, the product of the sizes, but got {}.", size,
      ranks_.size());
  std::unordered_set<int> seen;
  for (int rank : ranks_) {
    RAGGED_CHECK(rank >= 0, "[mesh] Expected ranks >= 0, but got {}.", rank);
    RAGGED_CHECK(seen.insert(rank).second, "[mesh] Expected distinct ranks, but got {} twice.", rank);
  }
}

Mesh Mesh::shard(int world_size) {
  return Mesh({{"shard", world_size, DimRole::kShard}});
}

Mesh Mesh::hybrid(int replicate, int shard) {
  return Mesh({{"replicate", replicate, DimRole::kReplicate}, {"shard", shard, DimRole::kShard}});
}

int Mesh::size(int dim) const {
  check_dim(dims_, dim);
  return dims_[static_cast<std::size_t>(dim)].size;
}

int Mesh::find(std::string_view name) const {
  const auto found = std::find_if(dims_.begin(), dims_.end(), [&](const MeshDim& dim) { return dim.name == name; });
  return found == dims_.end() ? -1 : static_cast<int>(found - dims_.begin());
}

int Mesh::find(DimRole role) const {
  const auto found = std::find_if(dims_.begin(), dims_.end(), [&](const MeshDim& dim) { return dim.role == role; });
  return found == dims_.end() ? -1 : static_cast<int>(found - dims_.begin());
}

std::vector<int> Mesh::coordinates(int rank) const {
  int rest = position(ranks_, rank);
  std::vector<int> result(dims_.size());
  for (std::size_t dim = dims_.size(); dim-- > 0;) {
    result[dim] = rest % dims_[dim].size;
    rest /= dims_[dim].size;
  }
  return result;
}

std::vector<int> Mesh::group(int dim, int rank) const {
  check_dim(dims_, dim);
  const int step = stride(dims_, dim);
  const int first = position(ranks_, rank) - coordinates(rank)[static_cast<std::size_t>(dim)] * step;
  std::vector<int> result;
  for (int i = 0; i < size(dim); ++i) {
    result.push_back(ranks_[static_cast<std::size_t>(first + i * step)]);
  }
  return result;
}

std::vector<std::vector<int>> Mesh::groups(int dim) const {
  check_dim(dims_, dim);
  const int step = stride(dims_, dim);
  std::vector<std::vector<int>> result;
  for (int first = 0; first < size(); ++first) {
    const bool is_group_start = first / step % size(dim) == 0;
    if (is_group_start) result.push_back(group(dim, ranks_[static_cast<std::size_t>(first)]));
  }
  return result;
}

std::string to_string(const Mesh& mesh) {
  std::vector<std::string> parts;
  for (const MeshDim& dim : mesh.dims()) parts.push_back(fmt::format("{}={}", dim.name, dim.size));
  if (mesh.ranks() != first_ranks(mesh.size())) {
    parts.push_back(fmt::format("ranks=[{}]", fmt::join(mesh.ranks(), ", ")));
  }
  return fmt::format("Mesh({})", fmt::join(parts, ", "));
}

}  // namespace ragged::layout
