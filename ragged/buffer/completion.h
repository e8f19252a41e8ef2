// "When the work issued so far is done", as a value: what a slot carries from the one who gives it back to the next
// who takes it. Empty on the CPU, where issued is done; an event on devices with streams. Replaces record_stream,
// whose implicit lifetimes keep a caching allocator from reusing memory.
#pragma once

#include <memory>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace ragged::buffer {

class CompletionToken {
 public:
  CompletionToken() = default;
  /// Of the current stream of the device.
  static CompletionToken record(c10::Device device);
  /// Makes the current stream of the device wait; no-op when empty.
  void wait() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

}  // namespace ragged::buffer
