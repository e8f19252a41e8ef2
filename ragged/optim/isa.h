// Instruction sets that the CPU kernels are compiled for. All of them give the same bits; tests say which one to use.
#pragma once

namespace ragged::optim {

/// kBaseline is what the compiler targets by itself: SSE2 on x86-64, NEON on ARM64.
enum class Isa { kBaseline, kAvx2, kAvx512 };

bool has_isa(Isa isa);
/// The widest that this machine has.
Isa best_isa();
const char* to_string(Isa isa);

}  // namespace ragged::optim
