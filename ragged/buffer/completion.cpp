#include "ragged/buffer/completion.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace ragged::buffer {

CompletionToken CompletionToken::record(c10::Device device) {
  CompletionToken token;
  if (device.is_cpu()) return token;
  const c10::impl::VirtualGuardImpl guard(device.type());
  token.event_ = std::make_shared<c10::Event>(device.type());
  token.event_->record(guard.getStream(device));
  return token;
}

void CompletionToken::wait() const {
  if (!event_) return;
  const c10::impl::VirtualGuardImpl guard(event_->device_type());
  event_->block(guard.getStream(event_->device()));
}

}  // namespace ragged::buffer
