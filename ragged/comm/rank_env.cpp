#include "ragged/comm/rank_env.h"

#include <charconv>
#include <cstdlib>

#include "ragged/base/error.h"

namespace ragged::comm {
namespace {

int number(const std::string& text, const char* variable, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  RAGGED_CHECK(
      error == std::errc() && end == text.data() + text.size(),
      "[rank_env] Expected {} to be a whole number, but got '{}'. Start with torchrun, or unset it.", variable, text);
  RAGGED_CHECK(
      value >= low && value <= high, "[rank_env] Expected {} in {}..{}, but got {}. Start with torchrun, or unset it.",
      variable, low, high, value);
  return value;
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

}  // namespace

RankEnv rank_env(const EnvLookup& lookup) {
  constexpr int kMany = 1 << 24;
  RankEnv env;
  const auto rank = lookup("RANK");
  const auto world_size = lookup("WORLD_SIZE");
  if (!rank && !world_size) return env;
  const auto required = [&](const char* variable) {
    auto value = lookup(variable);
    RAGGED_CHECK(
        value.has_value(),
        "[rank_env] Expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT to be set together, but {} is missing. "
        "Start with torchrun, or unset all of them to run as one process.",
        variable);
    return *value;
  };
  env.world_size = number(required("WORLD_SIZE"), "WORLD_SIZE", 1, kMany);
  env.rank = number(required("RANK"), "RANK", 0, env.world_size - 1);
  env.master_addr = required("MASTER_ADDR");
  env.master_port = static_cast<std::uint16_t>(number(required("MASTER_PORT"), "MASTER_PORT", 1, 65535));
  const auto local_rank = lookup("LOCAL_RANK");
  const auto local_world_size = lookup("LOCAL_WORLD_SIZE");
  if (local_world_size) {
    env.local_world_size = number(*local_world_size, "LOCAL_WORLD_SIZE", 1, env.world_size);
  } else if (is_loopback(env.master_addr)) {
    env.local_world_size = env.world_size;
  }  // else nobody said so: one rank a host
  RAGGED_CHECK(
      local_rank || !local_world_size || env.local_world_size == env.world_size,
      "[rank_env] Expected LOCAL_RANK and LOCAL_WORLD_SIZE to be set together, but LOCAL_RANK is missing beside a "
      "local "
      "world size of {}. Start with torchrun, or unset both.",
      env.local_world_size);
  if (local_rank) {
    env.local_rank = number(*local_rank, "LOCAL_RANK", 0, local_world_size ? env.local_world_size - 1 : env.rank);
  } else if (env.local_world_size == env.world_size) {
    env.local_rank = env.rank;
  }
  if (const auto text = lookup("TORCHELASTIC_USE_AGENT_STORE")) env.agent_store = *text == "True" || *text == "1";
  if (const auto text = lookup("TORCHELASTIC_RESTART_COUNT")) {
    env.restart_count = number(*text, "TORCHELASTIC_RESTART_COUNT", 0, kMany);
  }
  return env;
}

RankEnv rank_env() {
  return rank_env([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

}  // namespace ragged::comm
