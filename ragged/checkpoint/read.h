// A checkpoint folder that is opened, and the bytes that one rank needs out of it: found by cutting the wanted interval
// of each tensor with the stored boxes, read by checked chunks, handed to a callback. Everything that can be wrong is
// found before the callback sees a byte. No torch, no other ranks.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ragged/checkpoint/checksum.h"
#include "ragged/checkpoint/format.h"

namespace ragged::checkpoint {

/// The index and all ranks' manifests; no tensor is touched.
class Checkpoint {
 public:
  Checkpoint(Checkpoint&&) = default;
  Checkpoint& operator=(Checkpoint&&) = default;
  /// Throws CheckpointError for a folder that isn't a checkpoint, a missing or damaged JSON file, and files that are
  /// missing or of another size than recorded.
  static Checkpoint open(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const CheckpointIndex& index() const { return index_; }
  const std::vector<Manifest>& manifests() const { return manifests_; }  // by rank that wrote
  /// Null where there is none of this name.
  const TensorInfo* find(const std::string& name) const;
  /// All boxes of a tensor, in no order.
  struct Place {
    const StoredFile* file = nullptr;
    const StoredPiece* piece = nullptr;
  };
  std::span<const Place> places(const std::string& name) const;
  /// Bytes of all files.
  Index bytes() const;

 private:
  Checkpoint() = default;

  std::filesystem::path folder_;
  CheckpointIndex index_;
  std::vector<Manifest> manifests_;
  std::map<std::string, std::size_t> by_name_;
  std::map<std::string, std::vector<Place>> places_;
};

/// What this rank wants of one tensor.
struct ReadPiece {
  std::string name{};   // in the checkpoint
  std::string dtype{};  // nothing is ever cast
  std::vector<Index> shape{};
  std::string format{};
  layout::Interval owned{};             // flat, of `within`
  std::optional<layout::Box> within{};  // a part of the tensor; none: all of it
};

/// `count` elements from `source` of a stored box are those from `target` of a wanted interval.
struct Run {
  Index source = 0;
  Index target = 0;
  Index count = 0;
  friend bool operator==(const Run&, const Run&) = default;
};

/// The elements of `owned` (flat, of a tensor of this shape) that lie in `box`, in ascending order of both places. The
/// box may stick out of the tensor.
std::vector<Run> runs(std::span<const Index> shape, const layout::Box& box, layout::Interval owned);

/// Told which bytes of a wanted interval have come. In any order, each byte once.
using StoreBytes = std::function<void(std::size_t piece, Index offset_bytes, Bytes bytes)>;

/// The reads of one rank.
class ReadPlan {
 public:
  /// Throws CheckpointError that names the tensor where the checkpoint lacks one, has it in another shape, dtype or
  /// format, or has not all of its elements exactly once; and where it has tensors that nobody wants, unless
  /// `allow_unused`. `pieces` are alike on all ranks but for `owned`, and so are these errors, the elements apart.
  ReadPlan(const Checkpoint& checkpoint, std::vector<ReadPiece> pieces, bool allow_unused = false);

  /// Reads and checks all chunks that are needed and keeps nothing. Throws CheckpointError that names file and tensor.
  void verify() const;
  /// Reads, checks and hands over.
  void read(const StoreBytes& store) const;

  Index wanted_bytes() const { return wanted_bytes_; }
  /// What one pass reads: whole chunks, headers apart.
  Index read_bytes() const;

 private:
  struct Source {
    const StoredFile* file = nullptr;
    const StoredPiece* stored = nullptr;
    std::size_t piece = 0;
    Index item = 1;  // bytes an element
    std::vector<Run> runs;
  };
  void add(std::size_t piece);
  void read_source(const class File& file, const Source& source, const StoreBytes& store) const;

  const Checkpoint* checkpoint_;
  std::vector<ReadPiece> pieces_;
  std::vector<Source> sources_;  // by file, then by place in it
  Index wanted_bytes_ = 0;
};

/// Throws CheckpointError for a tensor whose boxes don't fill it exactly once; reads no tensor.
void check_complete(const Checkpoint& checkpoint);

/// Reads a whole checkpoint: every checksum, every header against what the manifest says of it, and that each tensor's
/// boxes fill it once. Throws CheckpointError for the first thing that is wrong. `progress` hears of bytes.
void verify(const Checkpoint& checkpoint, const std::function<void(Index bytes)>& progress = {});

}  // namespace ragged::checkpoint
