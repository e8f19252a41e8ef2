#include "ragged/optim/isa.h"

namespace ragged::optim {

bool has_isa(Isa isa) {
#ifdef __x86_64__
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") != 0;
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
          __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  }
  return false;
#else
  return isa == Isa::kBaseline;
#endif
}

Isa best_isa() {
  static const Isa best = has_isa(Isa::kAvx512) ? Isa::kAvx512 : has_isa(Isa::kAvx2) ? Isa::kAvx2 : Isa::kBaseline;
  return best;
}

bool has_bf16_products() {
#ifdef __x86_64__
  static const bool has = has_isa(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16") != 0;
  return has;
#else
  return false;
#endif
}

const char* to_string(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace ragged::optim
