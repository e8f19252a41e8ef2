// For the .cpp files of kernels: functions compiled for one instruction set each. Fused multiply-add is left out of
// all of them, so that nothing can contract. A kernel's loops are always_inline templates; these attributes go on the
// thin functions around them.
#pragma once

#include "ragged/optim/isa.h"

#define RAGGED_INLINE_KERNEL inline __attribute__((always_inline))

#ifdef __x86_64__
#define RAGGED_HAS_X86_TARGETS 1
#define RAGGED_TARGET_AVX2 __attribute__((target("avx2")))
#define RAGGED_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
