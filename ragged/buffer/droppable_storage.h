// A storage object for life whose bytes come and go: the ground under unsharded parameters.
//
// [Note: droppable storage]
// Tensors that autograd saved hold the StorageImpl, not its bytes. So an image keeps one StorageImpl; resharding
// points it at nothing and refilling points it at any slot, and saved weights of a live graph follow. Parameters
// over it are made with version counters of their own (never detach() of a view, which shares one), and whoever
// writes the bytes does it below autograd, so backward never sees a "modified in place". An op on dropped bytes must
// not read a null pointer: from torch 2.15 the storage carries an error text while dropped, and any op that touches
// it raises that. Older versions raise for some ops and crash for others; there our own accessors check.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "ragged/base/math.h"

namespace ragged::buffer {

/// Memory belongs to whoever attaches it. Not thread-safe.
class DroppableStorage {
 public:
  /// Starts dropped. `error` is what ops on dropped bytes raise; `owner` is found again by owner_of().
  DroppableStorage(Index bytes, c10::Device device, std::string error, void* owner);
  ~DroppableStorage();
  DroppableStorage(const DroppableStorage&) = delete;
  DroppableStorage& operator=(const DroppableStorage&) = delete;

  /// A contiguous tensor over it, with its own version counter and no autograd history; may be made while dropped.
  at::Tensor tensor(at::ScalarType dtype, Index offset, at::IntArrayRef sizes) const;

  void attach(void* data);
  void drop();
  bool is_resident() const { return resident_; }
  void set_error(std::string error);
  /// `index`: which of the owner's storages this is; found again by index_of().
  void set_owner(void* owner, int index = 0);

  /// The `owner` of the droppable storage behind this tensor; null for any other tensor.
  static void* owner_of(const at::Tensor& tensor);
  /// Its index there; 0 for any other tensor.
  static int index_of(const at::Tensor& tensor);

 private:
  /// The one behind this tensor, null for any other tensor.
  static DroppableStorage* behind(const at::Tensor& tensor);
  c10::StorageImpl* impl() const { return storage_.unsafeGetStorageImpl(); }

  c10::Storage storage_;
  Index bytes_;
  c10::Device device_;
  std::string error_;
  void* owner_;
  int index_ = 0;
  bool resident_ = false;
};

/// A contiguous tensor of these sizes without bytes: lets a model be built without memory and sharded later. (Meta
/// tensors can't serve: torch refuses to swap data between them and real ones.)
at::Tensor tensor_without_bytes(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);
/// Made by tensor_without_bytes() and never given any.
bool lacks_bytes(const at::Tensor& tensor);
/// The DroppableStorage behind it is gone, and its values with it.
bool is_orphaned(const at::Tensor& tensor);

}  // namespace ragged::buffer
