// The order of collectives in backward, as lists.
#include "ragged/fsdp/issue_list.h"

#include <gtest/gtest.h>

#include "ragged/fsdp/forecast.h"
#include "ragged/plan/planner.h"

namespace ragged::test {
namespace {

using fsdp::ForwardEvent;
using fsdp::IssueKind;
using fsdp::IssueList;
using fsdp::UnitTraits;

std::string text(const IssueList& list) {
  std::string out;
  for (const auto& issue : list.issues) {
    out += out.empty() ? "" : " ";
    out += issue.kind == IssueKind::kGather ? "AG" : issue.kind == IssueKind::kReduce ? "RS" : "free";
    out += std::to_string(issue.unit);
  }
  return out;
}

// Root 0 calls units 1..n in a row.
std::vector<ForwardEvent> in_a_row(int n) {
  std::vector<ForwardEvent> events{{true, 0, true}};
  for (int u = 1; u <= n; ++u) {
    events.push_back({true, u, true});
    events.push_back({false, u, true});
  }
  events.push_back({false, 0, true});
  return events;
}

// The root keeps its image after forward, the others don't.
std::vector<UnitTraits> units(int n) {
  std::vector<UnitTraits> traits(static_cast<std::size_t>(n) + 1);
  traits[0].reshard_after_forward = false;
  traits[0].resident = true;
  return traits;
}

TEST(IssueList, gathers_run_one_unit_ahead_of_reductions) {
  EXPECT_EQ(text(build_issue_list(in_a_row(3), units(3), 1)), "AG3 AG2 free3 RS3 AG1 free2 RS2 free1 RS1 free0 RS0");
}

TEST(IssueList, depth_zero_gathers_on_demand) {
  EXPECT_EQ(text(build_issue_list(in_a_row(3), units(3), 0)), "AG3 free3 RS3 AG2 free2 RS2 AG1 free1 RS1 free0 RS0");
}

TEST(IssueList, depth_two_keeps_three_images) {
  EXPECT_EQ(
      text(build_issue_list(in_a_row(4), units(4), 2)),
      "AG4 AG3 AG2 free4 RS4 AG1 free3 RS3 free2 RS2 free1 RS1 free0 RS0");
}

TEST(IssueList, cursor_targets_cover_prefetch_and_reduction) {
  const IssueList list = build_issue_list(in_a_row(2), units(2), 1);  // AG2 AG1 free2 RS2 free1 RS1 free0 RS0
  EXPECT_EQ(list.pre_backward, (std::vector<int>{1, 4, 2}));          // by call: root, unit 1, unit 2
  EXPECT_EQ(list.post_backward, (std::vector<int>{8, 6, 4}));
  EXPECT_EQ(list.tail, 6);
}

TEST(IssueList, resident_units_arent_gathered_again) {
  auto traits = units(2);
  for (auto& t : traits) {
    t.resident = true;
    t.reshard_after_forward = false;
  }
  EXPECT_EQ(text(build_issue_list(in_a_row(2), traits, 1)), "free2 RS2 free1 RS1 free0 RS0");
}

TEST(IssueList, root_that_reshards_is_gathered_first) {
  auto traits = units(1);
  traits[0] = UnitTraits{};
  EXPECT_EQ(text(build_issue_list(in_a_row(1), traits, 1)), "AG0 AG1 free1 RS1 free0 RS0");
}

TEST(IssueList, unit_called_twice_gathers_twice_and_reduces_once) {
  const std::vector<ForwardEvent> events{{true, 0, true},  {true, 1, true}, {false, 1, true}, {true, 2, true},
                                         {false, 2, true}, {true, 1, true}, {false, 1, true}, {false, 0, true}};
  EXPECT_EQ(text(build_issue_list(events, units(2), 1)), "AG1 AG2 free1 AG1 free2 RS2 free1 RS1 free0 RS0");
}

TEST(IssueList, unit_called_back_to_back_keeps_its_image) {
  const std::vector<ForwardEvent> twice{{true, 0, true}, {true, 1, true},  {false, 1, true},
                                        {true, 1, true}, {false, 1, true}, {false, 0, true}};
  EXPECT_EQ(text(build_issue_list(twice, units(1), 2)), "AG1 free1 RS1 free0 RS0");
}

TEST(IssueList, named_units_are_gathered_instead_of_the_next) {
  auto traits = units(3);
  traits[3].prefetch = {1};
  EXPECT_EQ(text(build_issue_list(in_a_row(3), traits, 1)), "AG3 AG1 free3 RS3 AG2 free2 RS2 free1 RS1 free0 RS0");
}

TEST(IssueList, named_units_that_backward_wont_reach_are_left_out) {
  auto events = in_a_row(2);
  events[1].needs_backward = false;  // unit 1
  auto traits = units(2);
  traits[2].prefetch = {1, 2};
  EXPECT_EQ(text(build_issue_list(events, traits, 1)), "AG2 free2 RS2 free0 RS0");
}

TEST(IssueList, unit_whose_values_backward_doesnt_need_is_reduced_alone) {
  auto traits = units(2);
  traits[1].gathers_in_backward = false;
  EXPECT_EQ(text(build_issue_list(in_a_row(2), traits, 1)), "AG2 free2 RS2 free1 RS1 free0 RS0");
}

TEST(IssueList, unit_that_stays_after_backward_isnt_freed) {
  auto traits = units(2);
  traits[1].reshard_after_backward = false;
  EXPECT_EQ(text(build_issue_list(in_a_row(2), traits, 1)), "AG2 AG1 free2 RS2 RS1 free0 RS0");
}

TEST(IssueList, nested_units_reduce_after_what_they_contain) {
  // 0 { 1 { 2 3 } 4 }
  const std::vector<ForwardEvent> events{{true, 0, true},  {true, 1, true},  {true, 2, true},  {false, 2, true},
                                         {true, 3, true},  {false, 3, true}, {false, 1, true}, {true, 4, true},
                                         {false, 4, true}, {false, 0, true}};
  EXPECT_EQ(
      text(build_issue_list(events, units(4), 1)), "AG4 AG1 free4 RS4 AG3 AG2 free3 RS3 free2 RS2 free1 RS1 free0 RS0");
}

TEST(IssueList, leaves_out_what_backward_cant_reach_and_frozen_units_reductions) {
  auto events = in_a_row(2);
  events[1].needs_backward = false;  // unit 1
  auto traits = units(2);
  traits[2].reduces = false;
  EXPECT_EQ(text(build_issue_list(events, traits, 1)), "AG2 free2 free0 RS0");
}

TEST(IssueList, unit_without_parameters_has_no_entries) {
  auto traits = units(2);
  traits[1].has_params = false;
  EXPECT_EQ(text(build_issue_list(in_a_row(2), traits, 1)), "AG2 free2 RS2 free0 RS0");
}

TEST(IssueList, empty_forward_is_the_root_alone) {
  EXPECT_EQ(text(build_issue_list(in_a_row(0), units(0), 1)), "free0 RS0");
}

TEST(Forecast, module_order_nests_by_parent) {
  const std::vector<int> parents{-1, 0, 1, 1, 0};
  const std::vector<ForwardEvent> expected{{true, 0, true},  {true, 1, true},  {true, 2, true},  {false, 2, true},
                                           {true, 3, true},  {false, 3, true}, {false, 1, true}, {true, 4, true},
                                           {false, 4, true}, {false, 0, true}};
  EXPECT_EQ(fsdp::module_order_events(parents), expected);
}

TEST(Forecast, counts_a_step_by_hand) {
  // Root of 8 elements, two units of 64; 2 ranks, bf16 images, fp32 reductions.
  const auto plan_of = [](Index numel) {
    const std::vector<plan::ParamSpec> params{{.name = "w", .shape = {numel}, .block = 8}};
    return plan::plan_bucket(params, {.world_size = 2, .collective_unit = 8, .start_alignment = 8});
  };
  const auto root = plan_of(8);  // one block: padded to 16
  const auto unit = plan_of(64);
  const std::vector<fsdp::UnitForecastInput> inputs{
      {.name = "", .groups = {{.plan = &root}}, .parent = -1, .reshard_after_forward = false},
      {.name = "a", .groups = {{.plan = &unit}}, .parent = 0},
      {.name = "b", .groups = {{.plan = &unit}}, .parent = 0}};
  const std::vector<int> parents{-1, 0, 0};
  const auto f = fsdp::forecast_step(inputs, fsdp::module_order_events(parents), {});
  EXPECT_EQ(f.padding_bytes, 8 * 2);
  EXPECT_EQ(f.gathered_bytes, 2 * (16 + 4 * 64));  // units twice, the root once
  EXPECT_EQ(f.gathers, 5);
  EXPECT_EQ(f.reduced_bytes, 4 * (16 + 2 * 64));
  EXPECT_EQ(f.reduces, 3);
  EXPECT_EQ(f.cast_in_bytes, 2 * (8 + 4 * 32));
  EXPECT_EQ(f.cast_grad_bytes, 4 * (8 + 2 * 64));
  EXPECT_EQ(f.copied_bytes, 0);
  EXPECT_EQ(f.peak_image_bytes, 2 * (16 + 2 * 64));
  EXPECT_EQ(f.image_bytes_bound, f.peak_image_bytes);
  EXPECT_EQ(f.peak_reduce_bytes, 4 * (16 + 2 * 64));
  const auto alone = fsdp::forecast_step(
      inputs, fsdp::module_order_events(parents), {.backward_prefetch = 0, .overlap_reductions = false});
  EXPECT_EQ(alone.peak_image_bytes, 2 * (16 + 64));
  EXPECT_EQ(alone.peak_reduce_bytes, 4 * (16 + 64));
  EXPECT_EQ(alone.gathered_bytes, f.gathered_bytes);
  EXPECT_EQ(alone.reduced_bytes, f.reduced_bytes);
}

}  // namespace
}  // namespace ragged::test
