#include "ragged/train/precision.h"

#include <fstream>
#include <sstream>

#include "ragged/base/error.h"

namespace ragged::train {

ComputeDtype choose_param_dtype(std::string_view setting, c10::DeviceType device, std::string_view cpuinfo) {
  if (setting != "auto") return {parse_scalar_type(setting), "as configured"};
  if (device == c10::kCUDA) return {at::kBFloat16, "CUDA devices compute in it"};
  for (const char* flag : {"amx_bf16", "avx512_bf16"}) {
    if (cpuinfo.find(flag) != std::string_view::npos) {
      return {at::kBFloat16, fmt::format("this CPU has {}", flag)};
    }
  }
  return {at::kFloat, "this CPU has no bf16 instructions"};
}

std::string read_cpuinfo() {
  std::ifstream file("/proc/cpuinfo");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

at::ScalarType parse_scalar_type(std::string_view name) {
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  throw InvalidArgument(fmt::format("[config] Expected fp32 or bf16, but got '{}'.", name));
}

}  // namespace ragged::train
