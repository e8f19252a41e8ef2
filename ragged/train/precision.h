// Which dtype a run computes in, and why; the reason is printed, since "auto" differs between
// machines.
#pragma once

#include <string>
#include <string_view>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace ragged::train {

struct ComputeDtype {
  at::ScalarType dtype = at::kFloat;
  std::string reason;
};

/// `setting`: "auto", "fp32" or "bf16". auto is bf16 on CUDA and on CPUs with bf16 instructions,
/// else fp32: there bf16 is emulated and slower. `cpuinfo`: the text of /proc/cpuinfo.
ComputeDtype choose_param_dtype(std::string_view setting, c10::DeviceType device, std::string_view cpuinfo);

/// /proc/cpuinfo; empty where there is none.
std::string read_cpuinfo();

/// For "fp32" and "bf16". Throws InvalidArgument otherwise.
at::ScalarType parse_scalar_type(std::string_view name);

}  // namespace ragged::train
