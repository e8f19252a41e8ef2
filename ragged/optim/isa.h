// Instruction sets that the CPU kernels are compiled for. All of them give the same bits; tests say which one to use.
#pragma once

namespace ragged::optim {

/// kBaseline is what the compiler targets by itself: SSE2 on x86-64, NEON on ARM64.
enum class Isa { kBaseline, kAvx2, kAvx512 };

bool has_isa(Isa isa);
/// The widest that this machine has.
Isa best_isa();
const char* to_string(Isa isa);
/// Whether one instruction multiplies bf16 and sums in fp32 (AVX512-BF16): then torch's products in bf16 are several
/// times as fast as in fp32, elsewhere slower.
bool has_bf16_products();

}  // namespace ragged::optim
