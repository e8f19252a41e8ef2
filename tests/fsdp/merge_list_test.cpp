// Which small units share a collective: decisions alone, as lists. merge_test.cpp runs them.
#include <algorithm>

#include <gtest/gtest.h>

#include "ragged/fsdp/issue_list.h"
#include "ragged/fsdp/merge.h"

namespace ragged::test {
namespace {

using fsdp::IssueKind;
using fsdp::MergeTraits;

std::vector<std::size_t> merged(
    const std::vector<int>& order, std::size_t first, const std::vector<MergeTraits>& units, Index limit,
    const std::vector<int>& resident = {}) {
  return fsdp::merged_gather(order, first, units, limit, [&](std::size_t position) {
    return std::find(resident.begin(), resident.end(), order[position]) == resident.end();
  });
}

using Positions = std::vector<std::size_t>;

TEST(MergeList, goes_on_while_bytes_stay_within_the_limit) {
  const std::vector<MergeTraits> units{{0, 10}, {0, 20}, {0, 30}, {0, 40}};
  const std::vector<int> order{0, 1, 2, 3};
  EXPECT_EQ(merged(order, 0, units, 60), (Positions{0, 1, 2}));
  EXPECT_EQ(merged(order, 0, units, 59), (Positions{0, 1}));
  EXPECT_EQ(merged(order, 0, units, 1000), (Positions{0, 1, 2, 3}));
  EXPECT_EQ(merged(order, 2, units, 1000), (Positions{2, 3}));
  EXPECT_EQ(merged(order, 3, units, 39), (Positions{3}));
  EXPECT_EQ(merged(order, 0, units, 0), (Positions{0}));
}

TEST(MergeList, ends_at_another_kind_and_at_a_large_unit) {
  const std::vector<MergeTraits> units{{0, 10}, {1, 10}, {0, 10}, {0, 1000}, {-1, 10}, {-1, 10}};
  EXPECT_EQ(merged({0, 1, 2}, 0, units, 100), (Positions{0}));
  EXPECT_EQ(merged({0, 2, 3, 2}, 0, units, 100), (Positions{0, 1}));
  EXPECT_EQ(merged({3, 0, 2}, 0, units, 100), (Positions{0})) << "a large one begins nothing";
  EXPECT_EQ(merged({4, 5}, 0, units, 100), (Positions{0})) << "what merges with nothing";
}

TEST(MergeList, passes_over_units_that_are_there_and_takes_each_once) {
  const std::vector<MergeTraits> units{{0, 10}, {1, 5000}, {0, 10}, {0, 10}};
  EXPECT_EQ(merged({0, 1, 2, 0, 2, 3}, 0, units, 100, {1}), (Positions{0, 2, 5}));
}

// Entries that go into one collective with the next of their kind end in '+'.
std::string text(const fsdp::IssueList& list) {
  std::string out;
  for (const auto& issue : list.issues) {
    out += out.empty() ? "" : " ";
    out += issue.kind == IssueKind::kGather ? "AG" : issue.kind == IssueKind::kReduce ? "RS" : "free";
    out += std::to_string(issue.unit) + (issue.with_next ? "+" : "");
  }
  return out;
}

// Root 0 calls these units in a row.
std::vector<fsdp::ForwardEvent> calls(const std::vector<int>& units) {
  std::vector<fsdp::ForwardEvent> events{{true, 0, true}};
  for (const int unit : units) {
    events.push_back({true, unit, true});
    events.push_back({false, unit, true});
  }
  events.push_back({false, 0, true});
  return events;
}

// The root is there throughout; images and reduce buffers have these bytes, the root's first.
std::vector<fsdp::UnitTraits> traits(const std::vector<Index>& bytes) {
  std::vector<fsdp::UnitTraits> units;
  for (const Index each : bytes) units.push_back({.gather = {0, each}, .reduction = {0, each}});
  units[0].reshard_after_forward = false;
  units[0].resident = true;
  return units;
}

TEST(MergeList, backward_gathers_at_the_first_and_reduces_at_the_last) {
  EXPECT_EQ(
      text(build_issue_list(calls({1, 2, 3, 4}), traits({1, 10, 10, 10, 10}), 0, 20)),
      "AG4+ AG3 free4 RS4+ free3 RS3 AG2+ AG1 free2 RS2+ free1 RS1 free0 RS0");
  EXPECT_EQ(
      text(build_issue_list(calls({1, 2, 3, 4}), traits({1, 10, 10, 10, 10}), 1, 20)),
      "AG4+ AG3 free4 RS4+ AG2+ AG1 free3 RS3 free2 RS2+ free1 RS1 free0 RS0");
  EXPECT_EQ(
      text(build_issue_list(calls({1, 2, 3}), traits({1, 10, 10, 10}), 1, 1000)),
      "AG3+ AG2+ AG1 free3 RS3+ free2 RS2+ free1 RS1 free0 RS0")
      << "the tail goes by itself";
}

TEST(MergeList, zero_changes_nothing) {
  const auto alike = traits({1, 10, 10, 10});
  EXPECT_EQ(
      build_issue_list(calls({1, 2, 3}), alike, 1, 0).issues, build_issue_list(calls({1, 2, 3}), alike, 1).issues);
  EXPECT_EQ(text(build_issue_list(calls({1, 2}), alike, 1, 0)), "AG2 AG1 free2 RS2 free1 RS1 free0 RS0");
}

TEST(MergeList, large_units_stand_between) {
  EXPECT_EQ(
      text(build_issue_list(calls({1, 2, 3, 4, 5}), traits({1, 10, 10, 99, 10, 10}), 0, 50)),
      "AG5+ AG4 free5 RS5+ free4 RS4 AG3 free3 RS3 AG2+ AG1 free2 RS2+ free1 RS1 free0 RS0");
}

TEST(MergeList, frozen_units_are_gathered_along_and_stand_in_no_reductions_way) {
  auto units = traits({1, 10, 10, 10});
  units[2].reduces = false;
  EXPECT_EQ(
      text(build_issue_list(calls({1, 2, 3}), units, 0, 100)), "AG3+ AG2+ AG1 free3 RS3+ free2 free1 RS1 free0 RS0");
}

TEST(MergeList, a_later_call_is_gathered_after_the_first_one_was_freed) {
  EXPECT_EQ(
      text(build_issue_list(calls({1, 2, 1}), traits({1, 10, 10}), 0, 100)),
      "AG1+ AG2 free1 free2 RS2+ AG1 free1 RS1 free0 RS0");
}

TEST(MergeList, cursor_targets_cover_what_came_along) {
  const auto list = build_issue_list(calls({1, 2}), traits({1, 10, 10}), 0, 100);  // AG2+ AG1 free2 RS2+ free1 RS1 ...
  EXPECT_EQ(list.pre_backward, (std::vector<int>{0, 4, 2}));
  EXPECT_EQ(list.post_backward, (std::vector<int>{8, 6, 4}));
}

}  // namespace
}  // namespace ragged::test
