// Built without the precompiled header: USE_C10D_GLOO changes what the c10d headers declare.
#define USE_C10D_GLOO
#include "ragged/comm/gloo_backend.h"

#include <cstdlib>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace ragged::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME")) {
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
  } else if (options.same_host) {
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  } else {
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  }
  gloo->threads = options.threads;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo);
}

}  // namespace ragged::comm
