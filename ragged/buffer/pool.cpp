#include "ragged/buffer/pool.h"

#include <utility>

#include "ragged/base/error.h"

namespace ragged::buffer {
namespace {

// A slot of no bytes still needs an address that isn't null; nobody reads or writes it.
char no_bytes = 0;
constexpr std::size_t kNoMemory = static_cast<std::size_t>(-1);

}  // namespace

Slot::Slot(Slot&& other) noexcept {
  *this = std::move(other);
}

Slot& Slot::operator=(Slot&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  pool_ = std::move(other.pool_);
  data_ = std::exchange(other.data_, nullptr);
  index_ = other.index_;
  bytes_ = other.bytes_;
  use_ = other.use_;
  token_ = std::move(other.token_);
  has_token_ = std::exchange(other.has_token_, false);
  return *this;
}

Slot::~Slot() {
  give_back();
}

void Slot::release_after(CompletionToken token) {
  token_ = std::move(token);
  has_token_ = true;
}

void Slot::give_back() noexcept {
  if (!data_) return;
  data_ = nullptr;
  if (index_ != kNoMemory) {
    pool_->put(index_, use_, bytes_, has_token_ ? token_ : CompletionToken::record(pool_->device_));
  }
  pool_.reset();
}

std::shared_ptr<BufferPool> BufferPool::create(
    std::shared_ptr<BufferAllocator> allocator, c10::Device device, c10d::ProcessGroup* group) {
  return std::shared_ptr<BufferPool>(new BufferPool(std::move(allocator), device, group));
}

BufferPool::BufferPool(std::shared_ptr<BufferAllocator> allocator, c10::Device device, c10d::ProcessGroup* group)
    : allocator_(std::move(allocator)), device_(device), group_(group) {}

void BufferPool::set_free_slots(FreeSlots free_slots) {
  RAGGED_CHECK(
      free_slots == FreeSlots::kKeep || device_.is_cpu(),
      "[pool] Expected a CPU where free buffers go back to the allocator, but got {}. Keep them there.", device_.str());
  const std::lock_guard lock(mutex_);
  free_slots_ = free_slots;
  if (free_slots == FreeSlots::kKeep) return;
  for (Memory& memory : memory_) {
    if (memory.free) return_memory(memory);
  }
}

int BufferPool::add_class(SlotUse use, Index bytes) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < classes_.size(); ++i) {
    if (classes_[i].use == use && classes_[i].bytes == bytes) return static_cast<int>(i);
  }
  classes_.push_back({use, bytes});
  return static_cast<int>(classes_.size()) - 1;
}

Slot BufferPool::take(int size_class, Index bytes) {
  const std::lock_guard lock(mutex_);
  const SizeClass& wanted = classes_.at(static_cast<std::size_t>(size_class));
  RAGGED_ASSERT(bytes <= wanted.bytes, "a slot of {} bytes was asked for {}", wanted.bytes, bytes);
  Slot slot;
  slot.pool_ = shared_from_this();
  slot.use_ = wanted.use;
  slot.bytes_ = bytes;
  slot.index_ = kNoMemory;
  slot.data_ = &no_bytes;
  if (bytes == 0) return slot;
  std::size_t index = 0;
  while (index < memory_.size() && !(memory_[index].free && memory_[index].size_class == size_class)) ++index;
  if (index == memory_.size()) memory_.push_back({.size_class = size_class});
  Memory& memory = memory_[index];
  if (!memory.data) {
    memory.bytes = free_slots_ == FreeSlots::kReturn ? bytes : wanted.bytes;
    memory.data = allocator_->allocate(memory.bytes, device_, group_);
    allocator_->register_memory(memory.data, memory.bytes, group_);
    ++stats_.allocations;
    stats_.reserved_bytes += memory.bytes;
  }
  memory.free = false;
  memory.token.wait();
  memory.token = {};
  slot.index_ = index;
  slot.data_ = memory.data.get();
  const auto use = static_cast<std::size_t>(wanted.use);
  stats_.in_use_bytes[use] += bytes;
  stats_.peak_bytes[use] = std::max(stats_.peak_bytes[use], stats_.in_use_bytes[use]);
  return slot;
}

void BufferPool::put(std::size_t index, SlotUse use, Index bytes, CompletionToken token) noexcept {
  const std::lock_guard lock(mutex_);
  memory_[index].free = true;
  memory_[index].token = std::move(token);
  // One that was made for less than its class can't wait for a taker of more.
  const Index class_bytes = classes_[static_cast<std::size_t>(memory_[index].size_class)].bytes;
  if (free_slots_ == FreeSlots::kReturn || memory_[index].bytes < class_bytes) return_memory(memory_[index]);
  stats_.in_use_bytes[static_cast<std::size_t>(use)] -= bytes;
}

void BufferPool::return_memory(Memory& memory) noexcept {
  memory.data.clear();
  memory.token = {};
  stats_.reserved_bytes -= memory.bytes;
  memory.bytes = 0;
}

PoolStats BufferPool::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void BufferPool::reset_peaks() {
  const std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.in_use_bytes;
}

}  // namespace ragged::buffer
