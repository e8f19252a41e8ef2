// Slots come from few allocations, are taken again, and every byte on loan is accounted for.
#include "ragged/buffer/pool.h"

#include <cstring>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/base/error.h"

namespace ragged::buffer {
namespace {

const c10::Device kCpu(c10::kCPU);

// Counts, and remembers what was asked for.
class CountingAllocator final : public BufferAllocator {
 public:
  at::DataPtr allocate(Index bytes, c10::Device device, c10d::ProcessGroup* group) override {
    asked.push_back(bytes);
    return inner_->allocate(bytes, device, group);
  }
  void register_memory(const at::DataPtr& memory, Index bytes, c10d::ProcessGroup*) override {
    EXPECT_NE(memory.get(), nullptr);
    registered.push_back(bytes);
  }

  std::vector<Index> asked, registered;

 private:
  std::shared_ptr<BufferAllocator> inner_ = default_allocator();
};

std::shared_ptr<BufferPool> make_pool() {
  return BufferPool::create(default_allocator(), kCpu, nullptr);
}

TEST(Allocator, aligns_every_size) {
  const auto allocator = default_allocator();
  for (const Index bytes : {1, 63, 64, 255, 256, 257, 4096, 7919, 1 << 20}) {
    const at::DataPtr data = allocator->allocate(bytes, kCpu, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data.get()) % BufferAllocator::kAlignment, 0U) << bytes;
    EXPECT_EQ(data.device(), kCpu);
    std::memset(data.get(), 1, static_cast<std::size_t>(bytes));  // all of it is ours: asan looks on
  }
}

TEST(Pool, hands_the_same_slot_out_again) {
  const auto pool = make_pool();
  const int size_class = pool->add_class(SlotUse::kImage, 1000);
  void* first = nullptr;
  {
    const Slot slot = pool->take(size_class, 900);
    EXPECT_TRUE(slot);
    first = slot.data();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % BufferAllocator::kAlignment, 0U);
  }
  const Slot slot = pool->take(size_class, 10);
  EXPECT_EQ(slot.data(), first);
  const Slot other = pool->take(size_class, 1000);
  EXPECT_NE(other.data(), first);
  EXPECT_EQ(pool->stats().allocations, 2);
  EXPECT_EQ(pool->stats().reserved_bytes, 2000);
}

TEST(Pool, keeps_classes_apart) {
  const auto allocator = std::make_shared<CountingAllocator>();
  const auto pool = BufferPool::create(allocator, kCpu, nullptr);
  const int image = pool->add_class(SlotUse::kImage, 512);
  EXPECT_EQ(pool->add_class(SlotUse::kImage, 512), image);
  const int larger = pool->add_class(SlotUse::kImage, 513);
  const int reduce = pool->add_class(SlotUse::kReduce, 512);
  EXPECT_NE(image, larger);
  EXPECT_NE(image, reduce);
  for (const int size_class : {image, larger, reduce, image, larger, reduce}) pool->take(size_class, 512);
  EXPECT_EQ(allocator->asked, (std::vector<Index>{512, 513, 512}));
  EXPECT_EQ(allocator->registered, allocator->asked);
}

TEST(Pool, accounts_for_what_is_on_loan_by_use) {
  const auto pool = make_pool();
  const int image = pool->add_class(SlotUse::kImage, 100);
  const int gradient = pool->add_class(SlotUse::kGradient, 40);
  {
    const Slot a = pool->take(image, 70);
    const Slot b = pool->take(image, 100);
    const Slot c = pool->take(gradient, 40);
    EXPECT_EQ(pool->stats().in_use(SlotUse::kImage), 170);
    EXPECT_EQ(pool->stats().in_use(SlotUse::kGradient), 40);
    EXPECT_EQ(pool->stats().in_use(SlotUse::kReduce), 0);
  }
  EXPECT_EQ(pool->stats().in_use(SlotUse::kImage), 0);
  EXPECT_EQ(pool->stats().peak(SlotUse::kImage), 170);
  EXPECT_EQ(pool->stats().peak(SlotUse::kGradient), 40);
  const Slot kept = pool->take(image, 30);
  pool->reset_peaks();
  EXPECT_EQ(pool->stats().peak(SlotUse::kImage), 30);
  EXPECT_EQ(pool->stats().peak(SlotUse::kGradient), 0);
}

TEST(Pool, stops_allocating_once_it_has_seen_the_most_that_is_alive_at_once) {
  const auto pool = make_pool();
  const int image = pool->add_class(SlotUse::kImage, 1 << 10);
  const int reduce = pool->add_class(SlotUse::kReduce, 1 << 11);
  const auto step = [&] {
    for (int unit = 0; unit < 5; ++unit) {
      const Slot a = pool->take(image, 1000);
      const Slot prefetched = pool->take(image, 1 << 10);
      const Slot b = pool->take(reduce, 2000);
    }
  };
  step();
  const Index after_first = pool->stats().allocations;
  EXPECT_EQ(after_first, 3);
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(pool->stats().allocations, after_first);
}

TEST(Pool, gives_slots_of_no_bytes_without_memory) {
  const auto pool = make_pool();
  const int empty = pool->add_class(SlotUse::kReduce, 0);
  const int image = pool->add_class(SlotUse::kImage, 64);
  const Slot a = pool->take(empty, 0);
  const Slot b = pool->take(image, 0);
  EXPECT_TRUE(a);
  EXPECT_NE(b.data(), nullptr);
  EXPECT_EQ(pool->stats().allocations, 0);
  EXPECT_EQ(pool->stats().reserved_bytes, 0);
}

TEST(Pool, refuses_more_than_the_class_holds) {
  const auto pool = make_pool();
  const int image = pool->add_class(SlotUse::kImage, 64);
  EXPECT_THROW(pool->take(image, 65), InternalError);
  EXPECT_EQ(pool->stats().in_use(SlotUse::kImage), 0);
  EXPECT_TRUE(pool->take(image, 64));  // and nothing is locked
}

TEST(Pool, takes_slots_back_from_any_thread) {
  const auto pool = make_pool();
  const int image = pool->add_class(SlotUse::kGradient, 256);
  for (int i = 0; i < 50; ++i) {
    Slot slot = pool->take(image, 256);
    slot.release_after(CompletionToken::record(kCpu));
    std::thread([moved = std::move(slot)] {}).join();
    EXPECT_FALSE(slot);  // NOLINT(bugprone-use-after-move): a moved-from slot is empty
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) pool->take(image, 100 + i % 100);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->stats().in_use(SlotUse::kGradient), 0);
  EXPECT_LE(pool->stats().allocations, 4);
}

TEST(Pool, returns_what_is_free_where_it_is_told_to) {
  const auto allocator = std::make_shared<CountingAllocator>();
  const auto pool = BufferPool::create(allocator, kCpu, nullptr);
  const int image = pool->add_class(SlotUse::kImage, 100);
  const int reduce = pool->add_class(SlotUse::kReduce, 50);
  Slot before = pool->take(image, 10);
  pool->take(reduce, 5);
  EXPECT_EQ(pool->stats().reserved_bytes, 150);
  pool->set_free_slots(FreeSlots::kReturn);
  EXPECT_EQ(pool->stats().reserved_bytes, 100) << "what was free went at once";
  {
    const Slot a = pool->take(image, 70);
    const Slot b = pool->take(reduce, 20);
    EXPECT_EQ(pool->stats().reserved_bytes, 190) << "as asked for, not as the class is";
    before = {};
    EXPECT_EQ(pool->stats().reserved_bytes, 90);
  }
  EXPECT_EQ(pool->stats().reserved_bytes, 0);
  EXPECT_EQ(pool->stats().in_use(SlotUse::kImage), 0);
  EXPECT_EQ(allocator->asked, (std::vector<Index>{100, 50, 70, 20}));
  EXPECT_EQ(allocator->registered, allocator->asked);
}

TEST(Pool, keeps_again_what_has_the_size_of_its_class) {
  const auto pool = make_pool();
  const int image = pool->add_class(SlotUse::kImage, 100);
  pool->set_free_slots(FreeSlots::kReturn);
  {
    const Slot smaller = pool->take(image, 60);
    pool->set_free_slots(FreeSlots::kKeep);
  }
  EXPECT_EQ(pool->stats().reserved_bytes, 0) << "a slot of 60 bytes can't serve a class of 100";
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool->take(image, 100));
  EXPECT_EQ(pool->stats().reserved_bytes, 100);
  EXPECT_EQ(pool->stats().allocations, 2);
}

TEST(Pool, refuses_to_return_memory_off_the_cpu) {
  const auto pool = BufferPool::create(default_allocator(), c10::Device(c10::kCUDA, 0), nullptr);
  EXPECT_THROW(pool->set_free_slots(FreeSlots::kReturn), InvalidArgument);
  pool->set_free_slots(FreeSlots::kKeep);
}

TEST(Slot, moves_and_is_given_back_once) {
  const auto pool = make_pool();
  const int image = pool->add_class(SlotUse::kImage, 64);
  Slot a = pool->take(image, 64);
  Slot b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(pool->stats().in_use(SlotUse::kImage), 64);
  a = pool->take(image, 32);
  b = std::move(a);  // gives back what b held
  EXPECT_EQ(pool->stats().in_use(SlotUse::kImage), 32);
  Slot& itself = b;
  b = std::move(itself);
  EXPECT_TRUE(b);
  b = {};
  EXPECT_EQ(pool->stats().in_use(SlotUse::kImage), 0);
}

TEST(Slot, keeps_its_pool_alive) {
  Slot slot;
  {
    const auto pool = make_pool();
    slot = pool->take(pool->add_class(SlotUse::kImage, 64), 64);
  }
  std::memset(slot.data(), 7, 64);
}

TEST(Completion, is_empty_on_the_cpu) {
  CompletionToken().wait();
  CompletionToken::record(kCpu).wait();
}

}  // namespace
}  // namespace ragged::buffer
