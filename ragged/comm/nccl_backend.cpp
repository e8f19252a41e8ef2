#include "ragged/comm/nccl_backend.h"

#include <dlfcn.h>

#include "ragged/base/error.h"
#include "ragged/comm/nccl_plugin.h"

namespace ragged::comm {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::Device device,
    std::chrono::milliseconds timeout) {
  // Never closed: its kernels and vtables stay in use.
  void* library = dlopen("libragged_nccl.so", RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    throw CommError(fmt::format(
        "[nccl] Expected to load libragged_nccl.so for device {}, but got: {}. Build on a machine with CUDA headers "
        "(the toolkit, or the wheels that come with torch), or run on the CPU.",
        device.str(), dlerror()));
  }
  auto* make = reinterpret_cast<MakeNcclBackend*>(dlsym(library, kMakeNcclBackendSymbol));
  RAGGED_ASSERT(make != nullptr, "libragged_nccl.so lacks {}", kMakeNcclBackendSymbol);
  try {
    return make(store, rank, size, device, timeout);
  } catch (const std::exception& e) {
    throw CommError(fmt::format(
        "[nccl] Expected to make an NCCL group (rank {} of {}, device {}), but got: {}", rank, size, device.str(),
        e.what()));
  }
}

}  // namespace ragged::comm
