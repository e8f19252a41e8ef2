// The memory of images, reduce buffers, staging and gradient shards: a few slots, sized once from the plans, handed
// out and taken back. After the second step it allocates nothing, unless it is told to return what is free.
//
// [Note: slots]
// Every size that will be asked for is declared up front as a size class, and all takers of a class share its slots.
// Units that are never open together share one class as large as the largest of them; an ancestor, open while its
// descendants come and go, has its own. So the number of slots of a class is the number of images that are alive at
// once, and memory neither fragments nor moves.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "ragged/buffer/allocator.h"
#include "ragged/buffer/completion.h"

namespace ragged::buffer {

enum class SlotUse { kImage, kReduce, kStaging, kGradient };
inline constexpr std::size_t kSlotUses = 4;

/// What becomes of a slot that nobody holds. kKeep: it waits for the next taker, and the pool holds as much as was ever
/// alive at once in each class. kReturn: its memory goes back to the allocator, and the pool holds what is in use, as
/// asked for; on a CPU alone, where no stream may still read it and no backend has it registered.
enum class FreeSlots { kKeep, kReturn };

class BufferPool;

/// One slot on loan; gives itself back when destroyed. Move-only.
class Slot {
 public:
  Slot() = default;
  Slot(Slot&& other) noexcept;
  Slot& operator=(Slot&& other) noexcept;
  ~Slot();

  explicit operator bool() const { return data_ != nullptr; }
  void* data() const { return data_; }
  /// The next taker's stream waits for this. Without it: for what was on the current stream when the slot came back.
  void release_after(CompletionToken token);

 private:
  friend class BufferPool;
  void give_back() noexcept;

  std::shared_ptr<BufferPool> pool_;
  void* data_ = nullptr;
  std::size_t index_ = 0;
  Index bytes_ = 0;
  SlotUse use_ = SlotUse::kImage;
  CompletionToken token_;
  bool has_token_ = false;
};

struct PoolStats {
  Index allocations = 0;                        // ever
  Index reserved_bytes = 0;                     // held now
  std::array<Index, kSlotUses> in_use_bytes{};  // as asked for, by SlotUse
  std::array<Index, kSlotUses> peak_bytes{};    // since reset_peaks()

  Index in_use(SlotUse use) const { return in_use_bytes[static_cast<std::size_t>(use)]; }
  Index peak(SlotUse use) const { return peak_bytes[static_cast<std::size_t>(use)]; }
};

/// Thread-safe: the last view of a gradient shard may die anywhere. One pool a tree of units.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static std::shared_ptr<BufferPool> create(
      std::shared_ptr<BufferAllocator> allocator, c10::Device device, c10d::ProcessGroup* group);

  /// Of slots that come back from now on, and of those that are free. Throws InvalidArgument for kReturn off the CPU.
  void set_free_slots(FreeSlots free_slots);

  /// Declares a size; equal sizes of one use share a class.
  int add_class(SlotUse use, Index bytes);
  /// A free slot of the class, or a new one. `bytes` is what the caller will use of it; 0 gives a slot without
  /// memory. Throws InternalError when it exceeds the class.
  Slot take(int size_class, Index bytes);

  PoolStats stats() const;
  void reset_peaks();

 private:
  friend class Slot;
  struct Memory {
    at::DataPtr data;  // none: returned
    CompletionToken token;
    Index bytes = 0;  // of data
    int size_class = 0;
    bool free = true;
  };
  struct SizeClass {
    SlotUse use;
    Index bytes;
  };
  BufferPool(std::shared_ptr<BufferAllocator> allocator, c10::Device device, c10d::ProcessGroup* group);
  void put(std::size_t index, SlotUse use, Index bytes, CompletionToken token) noexcept;
  void return_memory(Memory& memory) noexcept;

  std::shared_ptr<BufferAllocator> allocator_;
  c10::Device device_;
  c10d::ProcessGroup* group_;
  mutable std::mutex mutex_;
  FreeSlots free_slots_ = FreeSlots::kKeep;
  std::vector<SizeClass> classes_;
  std::vector<Memory> memory_;
  PoolStats stats_;
};

}  // namespace ragged::buffer
