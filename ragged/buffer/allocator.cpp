#include "ragged/buffer/allocator.h"

#include <cstdint>

namespace ragged::buffer {
namespace {

void free_whole(void* context) {
  delete static_cast<at::DataPtr*>(context);
}

class DefaultAllocator final : public BufferAllocator {
 public:
  at::DataPtr allocate(Index bytes, c10::Device device, c10d::ProcessGroup*) override {
    // torch's CPU allocator aligns to 64 bytes only, so take a little more and start at a border.
    auto whole = std::make_unique<at::DataPtr>(
        c10::GetAllocator(device.type())->allocate(static_cast<std::size_t>(bytes + kAlignment)));
    const auto address = reinterpret_cast<std::uintptr_t>(whole->get());
    const auto aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
    const c10::Device where = whole->device();
    return {reinterpret_cast<void*>(aligned), whole.release(), &free_whole, where};
  }
};

}  // namespace

void BufferAllocator::register_memory(const at::DataPtr&, Index, c10d::ProcessGroup*) {}

std::shared_ptr<BufferAllocator> default_allocator() {
  return std::make_shared<DefaultAllocator>();
}

}  // namespace ragged::buffer
