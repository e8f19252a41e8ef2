// A whole model planned: what the kinds sum to, remarks and reports. Figures of the planner itself are held elsewhere.
#include "ragged/sim/model_plan.h"

#include <numeric>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ragged/sim/plan_report.h"
#include "ragged/sim/text.h"
#include "tests/support/expect_error.h"

namespace ragged::sim {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

ModelPlan planned(const std::string& model, int ranks, Index rows = 1, int layers_per_bucket = 1) {
  return plan_model(
      load_model(model), {.ranks = ranks, .policy = {.rows = rows}, .layers_per_bucket = layers_per_bucket});
}

TEST(ModelPlan, totals_are_those_of_the_units) {
  for (const auto& [model, ranks, layers] :
       {std::tuple{"gpt2-124m", 7, 1}, {"smollm-135m", 8, 4}, {"gpt-oss-20b-hf-fused", 48, 2}}) {
    const ModelPlan plan = planned(model, ranks, 8, layers);
    Index numel = 0;
    Index image = 0;
    int units = 0;
    for (const UnitKind& kind : plan.kinds) {
      plan::validate(kind.plan);
      numel += kind.count * kind.numel;
      image += kind.count * kind.plan.image_numel();
      units += kind.count;
    }
    EXPECT_EQ(numel, load_model(model).inventory.numel());
    EXPECT_EQ(plan.numel, numel);
    EXPECT_EQ(plan.padding, image - numel);
    EXPECT_EQ(units, static_cast<int>(plan.unit_kinds.size()));
    EXPECT_EQ(plan.blocks_cut, 0);
    EXPECT_EQ(plan.load.size(), static_cast<std::size_t>(ranks));
    EXPECT_GE(std::accumulate(plan.load.begin(), plan.load.end(), Index{0}), numel);
    EXPECT_GE(plan.largest_over_mean(), 1.0);
    EXPECT_GE(plan.collectives, units);
  }
}

TEST(ModelPlan, a_remainder_of_merged_layers_is_a_kind_of_its_own) {
  const ModelPlan plan = planned("smollm-135m", 4, 1, 4);  // 30 layers
  int layers = 0;
  for (const UnitKind& kind : plan.kinds) {
    if (kind.is_layer) layers += kind.count * kind.layers;
  }
  EXPECT_EQ(layers, 30);
  EXPECT_EQ(plan.kinds.size(), 3u);
}

TEST(ModelPlan, boxes_are_counted_over_all_ranks) {
  // Whole rows are one box a rank; six rows that must stay together are one in all.
  Model model;
  model.inventory = plan::inventory_from_json(
      R"({"format": 1, "name": "m", "units": [{"name": "u", "params": [{"name": "w", "shape": [6, 6]}]}]})");
  EXPECT_EQ(plan_model(model, {.ranks = 1}).boxes, 1);
  EXPECT_EQ(plan_model(model, {.ranks = 2, .collective_unit = 2}).boxes, 2);
  EXPECT_EQ(plan_model(model, {.ranks = 6, .policy = {.rows = 6}}).boxes, 1);
}

TEST(ModelPlan, one_rank_needs_no_padding_worth_the_name) {
  EXPECT_LT(planned("gpt2-124m", 1).padding_fraction(), 1e-6);
}

TEST(ModelPlan, rows_that_do_not_divide_an_expert_are_told_with_the_remedy) {
  EXPECT_THAT(planned("gpt-oss-120b-hf-fused", 64, 128).remarks, Contains(HasSubstr("--rows 64, or --flat-rows")));
  EXPECT_THAT(planned("gpt-oss-120b-hf-fused", 64, 64).remarks, Not(Contains(HasSubstr("don't divide"))));
  const Model model = load_model("gpt-oss-120b-hf-fused");
  const ModelPlan flat = plan_model(model, {.ranks = 64, .policy = {.rows = 128, .flat = true}});
  EXPECT_THAT(flat.remarks, Not(Contains(HasSubstr("don't divide"))));
}

TEST(ModelPlan, a_block_beyond_a_fair_share_is_told_with_the_remedy) {
  // 128 rows of 14,336 columns against 218,112,000 / 1,024 elements.
  const ModelPlan plan = planned("llama-3-8b", 1024, 128);
  EXPECT_THAT(plan.remarks, Contains(HasSubstr("more than a fair share of 213,000")));
  EXPECT_THAT(plan.remarks, Contains(HasSubstr("--layers-per-bucket 9")));
  EXPECT_THAT(plan.remarks, Contains(HasSubstr("at most 118 ranks, use --rows 8")));
  EXPECT_TRUE(planned("llama-3-8b", 64, 32).remarks.empty());
}

TEST(ModelPlan, bad_requests_are_refused) {
  EXPECT_INVALID(planned("gpt2-124m", 0), "at least 1 rank");
  EXPECT_INVALID(planned("gpt2-124m", -4), "at least 1 rank");
  EXPECT_INVALID(planned("gpt2-124m", 2'000'000'000), "at most");
  EXPECT_INVALID(planned("gpt2-124m", 4, 0), "at least 1 row");
  EXPECT_INVALID(planned("gpt2-124m", 4, 1, 0), "at least 1 layer");
  EXPECT_INVALID(plan_model({}, {.ranks = 4}), "with parameters");
}

TEST(ModelPlan, optimizers_have_names_and_sizes) {
  for (const Optimizer optimizer : kAllOptimizers) EXPECT_EQ(parse_optimizer(name(optimizer)), optimizer);
  EXPECT_INVALID(parse_optimizer("adamw-8bit"), "Did you mean 'adamw8bit'?");
  const ModelPlan plan = planned("gpt2-124m", 4);
  EXPECT_EQ(optimizer_bytes(plan, Optimizer::kSgd), 0);
  EXPECT_NEAR(optimizer_bytes(plan, Optimizer::kAdamW), 8.0 * static_cast<double>(plan.largest_load()), 1.0);
  EXPECT_LT(optimizer_bytes(plan, Optimizer::kMuon), optimizer_bytes(plan, Optimizer::kAdamW));
}

// Bytes of SOAP's states of a matrix, from the paper's: two moments, and two squares a side that isn't too long.
double soap_by_hand(const plan::InventoryTensor& tensor) {
  const auto m = static_cast<double>(tensor.shape[tensor.shape.size() - 2]);
  const auto n = static_cast<double>(tensor.shape.back());
  const double one = 4 * (2 * m * n + (m <= 10000 ? 2 * m * m : 0) + (n <= 10000 ? 2 * n * n : 0));
  return static_cast<double>(tensor.numel()) / (m * n) * one;
}

TEST(SoapBytes, one_rank_has_all_of_them_and_adamws_of_the_rest) {
  for (const char* model : {"smollm-135m", "gpt-oss-20b-fused", "gpt-oss-20b-hf-fused"}) {
    const ModelPlan plan = planned(model, 1);
    double own = 0;
    double rest = 0;
    for (const UnitKind& kind : plan.kinds) {
      for (const plan::InventoryTensor& tensor : kind.tensors) {
        const bool goes_to_adamw = tensor.shape.size() < 2 || tensor.kind == "embedding" || tensor.role == "head" ||
            tensor.role == "router" || tensor.role == "expert_bias";
        (goes_to_adamw ? rest : own) +=
            kind.count * (goes_to_adamw ? 8 * static_cast<double>(tensor.numel()) : soap_by_hand(tensor));
      }
    }
    EXPECT_DOUBLE_EQ(optimizer_bytes(plan, Optimizer::kSoap), own + rest) << model;
  }
}

TEST(SoapBytes, states_lie_whole_on_the_rank_that_is_root_of_most) {
  const auto layer = [](int number, Index rows, Index cols, const char* kind = "layers") {
    return plan::InventoryUnit{
        .name = fmt::format("layers.{}", number),
        .kind = kind,
        .is_layer = true,
        .tensors = {{.name = fmt::format("layers.{}.w", number), .shape = {rows, cols}, .kind = "matrix"}}};
  };
  Model model{.inventory = {.name = "by hand", .units = {layer(0, 30, 70), layer(1, 30, 70), layer(2, 30, 70)}}};
  const double one = 4 * (2 * 30 * 70 + 2 * 30 * 30 + 2 * 70 * 70);
  for (const auto& [ranks, most] : {std::pair{1, 3.0}, {2, 2.0}, {3, 1.0}, {4, 1.0}, {64, 1.0}})
    EXPECT_DOUBLE_EQ(optimizer_bytes(plan_model(model, {.ranks = ranks}), Optimizer::kSoap), most * one) << ranks;
  model.inventory.units = {layer(0, 10000, 3), layer(1, 10001, 3, "longer")};
  EXPECT_DOUBLE_EQ(
      optimizer_bytes(plan_model(model, {.ranks = 1}), Optimizer::kSoap),
      4 * (2e8 + 2 * 9 + 6e4) + 4 * (2 * 9 + 2 * 3 * 10001.0));
}

TEST(SoapBytes, of_many_matrices_no_rank_has_more_than_twice_its_part_and_asking_once_is_asking_often) {
  const double all = optimizer_bytes(planned("gpt-oss-20b-fused", 1), Optimizer::kSoap);
  for (const int ranks : {3, 16}) {
    const ModelPlan plan = planned("gpt-oss-20b-fused", ranks);
    const std::vector<double> bytes = soap_bytes(plan);
    EXPECT_NEAR(std::accumulate(bytes.begin(), bytes.end(), 0.0), all, 1.0);
    const double most = optimizer_bytes(plan, Optimizer::kSoap);
    EXPECT_GE(most, all / ranks);
    EXPECT_LE(most, 2 * all / ranks);
    EXPECT_GT(most, optimizer_bytes(plan, Optimizer::kAdamW));
    const LayoutRequest once{.ranks = ranks, .with_soap = true};
    EXPECT_EQ(plan_model(load_model("gpt-oss-20b-fused"), once).soap_bytes, most);
  }
}

TEST(PlanReport, json_has_stable_names) {
  const ModelPlan plan = planned("gpt-oss-20b-fused", 64, 16);
  const auto json = nlohmann::json::parse(plan_json(plan, compare(plan)));
  EXPECT_DOUBLE_EQ(json.at("padding").get<double>(), plan.padding_fraction());
  EXPECT_DOUBLE_EQ(json.at("lower_bound").get<double>(), plan.lower_bound_fraction());
  EXPECT_EQ(json.at("collectives").get<int>(), plan.collectives);
  EXPECT_GE(json.at("seconds").get<double>(), 0.0);
  ASSERT_EQ(json.at("units").size(), plan.kinds.size());
  for (const char* field : {"name", "count", "parameters", "padding", "lower_bound", "blocks_cut", "segments"}) {
    EXPECT_TRUE(json.at("units")[0].contains(field)) << field;
  }
  EXPECT_EQ(json.at("compare").size(), 1 + std::size(kAllPeers));
  EXPECT_EQ(json.at("compare")[0].at("blocks_cut"), 0);
  EXPECT_TRUE(json.at("bytes_per_rank").at("optimizer").contains("adamw8bit"));
}

TEST(PlanReport, the_comparison_shows_the_cliff_of_even_rows) {
  // 128 experts over 256 ranks: FSDP2 doubles them (peers' table: 98.2 % with one root unit).
  for (const EngineLayout& engine : compare(planned("gpt-oss-120b-hf-fused", 256))) {
    if (engine.key == "fsdp2") {
      EXPECT_NEAR(engine.padding, 0.982, 0.002);
    } else if (engine.key == "megatron_v1") {
      EXPECT_NEAR(engine.padding, 0.333, 0.02);
    } else if (engine.key == "fsdp1") {
      EXPECT_LT(engine.padding, 1e-4);
    }
  }
}

TEST(PlanReport, text_and_picture_name_the_units) {
  const ModelPlan plan = planned("gpt-oss-20b-fused", 300, 16);
  EXPECT_THAT(plan_text(plan, false), HasSubstr("lower bound"));
  EXPECT_THAT(plan_text(plan, true), HasSubstr("\x1b[1m"));
  EXPECT_EQ(plan_text(plan, false).find('\x1b'), std::string::npos);
  const std::string svg = plan_svg(plan);
  EXPECT_TRUE(svg.starts_with("<svg"));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_LT(svg.size(), 40'000u);
}

TEST(Text, numbers_read_well) {
  EXPECT_EQ(grouped(-1234567), "-1,234,567");
  EXPECT_EQ(grouped(123), "123");
  EXPECT_EQ(bytes_text(1536.0), "1.50 KiB");
  EXPECT_EQ(bytes_text(12.0), "12 B");
  EXPECT_EQ(percent_text(0.0598), "5.98 %");
  EXPECT_EQ(percent_text(1.9), "190 %");
  EXPECT_EQ(percent_text(0.0), "0 %");
  EXPECT_EQ(percent_text(0.0000213), "0.00213 %");
  EXPECT_EQ(seconds_text(0.0123), "12.3 ms");
  EXPECT_EQ(parse_bytes("80GiB", "--memory"), 80.0 * 1024 * 1024 * 1024);
  EXPECT_EQ(parse_bytes("80G", "--memory"), 80.0 * 1024 * 1024 * 1024);
  EXPECT_EQ(parse_bytes("1.5TB", "--memory"), 1.5e12);
  EXPECT_EQ(parse_bytes("4096", "--memory"), 4096.0);
  for (const char* bad : {"", "GiB", "-3G", "80 GiB", "80X", "80GiBs", "nan", "1e400"}) {
    EXPECT_INVALID(parse_bytes(bad, "--memory"), "[--memory]");
  }
}

}  // namespace
}  // namespace ragged::sim
