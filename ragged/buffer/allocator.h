// Where the bytes of images and reduce buffers come from: the seam for pinned memory, a process group's own
// allocator (zero-copy NCCL) or symmetric memory.
#pragma once

#include <memory>

#include <c10/core/Allocator.h>

#include "ragged/base/math.h"

namespace c10d {
class ProcessGroup;
}

namespace ragged::buffer {

class BufferAllocator {
 public:
  virtual ~BufferAllocator() = default;
  /// At least `bytes` bytes, aligned to kAlignment, freed by the returned pointer. `group` is the shard group that
  /// will carry them; null on a world of one.
  virtual at::DataPtr allocate(Index bytes, c10::Device device, c10d::ProcessGroup* group) = 0;
  /// Called once for each allocation before its first collective, for memory that a backend wants to know.
  virtual void register_memory(const at::DataPtr& memory, Index bytes, c10d::ProcessGroup* group);

  static constexpr Index kAlignment = 256;
};

/// torch's own allocator of the device.
std::shared_ptr<BufferAllocator> default_allocator();

}  // namespace ragged::buffer
