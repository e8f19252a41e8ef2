// Who this process is, as torchrun says it in the environment. Reading only: nothing connects here.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace ragged::comm {

struct RankEnv {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;
  /// torchrun's agent serves the store (TORCHELASTIC_USE_AGENT_STORE): rank 0 connects and never binds.
  bool agent_store = false;
  /// Attempt after an elastic restart: each gets its own key prefix in the store.
  int restart_count = 0;

  bool is_main() const { return rank == 0; }
};

using EnvLookup = std::function<std::optional<std::string>(const char*)>;

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and torchrun's two variables.
/// None of the first two set: one process of one. Throws InvalidArgument, naming the variable, when the set is
/// incomplete, not a number, or out of range (WORLD_SIZE 0, RANK >= WORLD_SIZE).
RankEnv rank_env();
/// The same over any source of variables.
RankEnv rank_env(const EnvLookup& lookup);

}  // namespace ragged::comm
