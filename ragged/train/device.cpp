#include "ragged/train/device.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>

namespace ragged::train {
namespace {

// The command links the CPU part of torch alone: the CUDA part takes a second to load and hundreds of megabytes, so it
// is loaded where there is a driver, and before torch is first asked about CUDA, since it remembers the answer.
int num_cuda_devices() {
  if (!std::filesystem::exists("/dev/nvidiactl")) return 0;
  if (!dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL)) return 0;
  return at::globalContext().hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
}

}  // namespace

c10::Device choose_device(std::string_view setting, const comm::RankEnv& env) {
  if (setting == "cpu") return c10::Device(c10::kCPU);
  const int devices = num_cuda_devices();
  const bool enough = devices >= env.local_world_size;
  RAGGED_CHECK(
      enough || setting == "auto",
      "[device] Expected a CUDA device for each of {} ranks on this machine, but found {} (key "
      "'run.device'). Start fewer ranks, or set it to \"cpu\".",
      env.local_world_size, devices);
  if (!enough) return c10::Device(c10::kCPU);
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(env.local_rank));
}

Index peak_memory_bytes(c10::Device device) {
  if (device.is_cuda()) {
    using c10::CachingAllocator::StatType;
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.allocated_bytes[static_cast<std::size_t>(StatType::AGGREGATE)].peak;
  }
  // Not getrusage(): what it says survives exec, so that it would be the launcher's memory.
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return static_cast<Index>(std::stoll(line.substr(6))) * 1024;
  }
  return 0;
}

}  // namespace ragged::train
