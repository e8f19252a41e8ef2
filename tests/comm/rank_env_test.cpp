// What torchrun, and people, put into the environment.
#include "ragged/comm/rank_env.h"

#include <map>

#include "tests/support/expect_error.h"

namespace ragged::comm {
namespace {

using Variables = std::map<std::string, std::string>;

RankEnv read(const Variables& variables) {
  return rank_env([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

Variables whole() {
  return {{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "29501"}};
}

Variables with(const std::string& name, const std::string& value) {
  Variables variables = whole();
  variables[name] = value;
  return variables;
}

TEST(RankEnv, is_one_process_without_variables) {
  const RankEnv env = read({});
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.local_world_size, 1);
  EXPECT_FALSE(env.agent_store);
  EXPECT_EQ(env.restart_count, 0);
  EXPECT_TRUE(env.is_main());
}

TEST(RankEnv, ignores_an_address_that_a_shell_left_behind) {
  EXPECT_EQ(read({{"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "1"}}).world_size, 1);
}

TEST(RankEnv, reads_the_four_variables) {
  const RankEnv env = read(whole());
  EXPECT_EQ(env.rank, 2);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.master_addr, "10.0.0.7");
  EXPECT_EQ(env.master_port, 29501);
  EXPECT_FALSE(env.is_main());
}

TEST(RankEnv, names_what_is_missing_of_every_half_set_combination) {
  const Variables all = whole();
  for (unsigned chosen = 1; chosen < 15; ++chosen) {
    Variables some;
    unsigned bit = 1;
    for (const auto& [name, value] : all) {
      if (chosen & bit) some[name] = value;
      bit <<= 1;
    }
    if (!some.count("RANK") && !some.count("WORLD_SIZE")) continue;
    SCOPED_TRACE(chosen);
    // The first one missing, in the order in which people read them.
    for (const char* name : {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"}) {
      if (some.count(name)) continue;
      EXPECT_INVALID(read(some), std::string("but ") + name + " is missing");
      break;
    }
  }
}

TEST(RankEnv, refuses_numbers_out_of_range) {
  EXPECT_INVALID(read(with("WORLD_SIZE", "0")), "Expected WORLD_SIZE in 1..");
  EXPECT_INVALID(read(with("WORLD_SIZE", "-4")), "but got -4");
  EXPECT_INVALID(read(with("RANK", "4")), "Expected RANK in 0..3, but got 4");
  EXPECT_INVALID(read(with("RANK", "-1")), "Expected RANK in 0..3, but got -1");
  EXPECT_INVALID(read(with("MASTER_PORT", "0")), "Expected MASTER_PORT in 1..65535");
  EXPECT_INVALID(read(with("MASTER_PORT", "65536")), "but got 65536");
  EXPECT_INVALID(read(with("LOCAL_WORLD_SIZE", "5")), "Expected LOCAL_WORLD_SIZE in 1..4");
  EXPECT_INVALID(read(with("TORCHELASTIC_RESTART_COUNT", "-1")), "TORCHELASTIC_RESTART_COUNT");
  Variables local = with("LOCAL_WORLD_SIZE", "2");
  local["LOCAL_RANK"] = "2";
  EXPECT_INVALID(read(local), "Expected LOCAL_RANK in 0..1, but got 2");
}

TEST(RankEnv, refuses_what_is_no_number) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"}) {
    for (const char* value : {"", "two", "1x", " 1", "1.0", "99999999999999999999"}) {
      EXPECT_INVALID(read(with(name, value)), std::string("Expected ") + name + " to be a whole number");
    }
  }
}

// Ranks that meet at another machine's address aren't known to share one: Gloo must not bind to loopback.
TEST(RankEnv, takes_ranks_for_one_host_only_where_they_meet_at_loopback) {
  EXPECT_EQ(read(whole()).local_world_size, 1);
  EXPECT_EQ(read(whole()).local_rank, 0);
  for (const char* address : {"localhost", "127.0.0.1", "::1"}) {
    EXPECT_EQ(read(with("MASTER_ADDR", address)).local_world_size, 4) << address;
    EXPECT_EQ(read(with("MASTER_ADDR", address)).local_rank, 2) << address;
  }
}

// Rank 2 of 4 with two ranks a machine can't be local rank 2: nobody may guess which it is.
TEST(RankEnv, refuses_a_local_world_size_without_a_local_rank) {
  EXPECT_INVALID(read(with("LOCAL_WORLD_SIZE", "2")), "LOCAL_RANK");
}

TEST(RankEnv, reads_torchruns_own_variables) {
  Variables variables = whole();
  variables["LOCAL_RANK"] = "0";
  variables["LOCAL_WORLD_SIZE"] = "2";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "3";
  const RankEnv env = read(variables);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_TRUE(env.agent_store);
  EXPECT_EQ(env.restart_count, 3);
  EXPECT_FALSE(read(with("TORCHELASTIC_USE_AGENT_STORE", "False")).agent_store);
  EXPECT_TRUE(read(with("TORCHELASTIC_USE_AGENT_STORE", "1")).agent_store);
}

}  // namespace
}  // namespace ragged::comm
