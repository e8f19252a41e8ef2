// Planning time, padding and shard size of Llama-3 models, one bucket a layer plus embedding and
// head, for group sizes up to 1,024. Shapes only, so it runs on any machine.
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "ragged/plan/block.h"
#include "ragged/plan/planner.h"

namespace ragged::plan {
namespace {

struct Llama {
  std::string name;
  int num_layers;
  Index hidden;
  Index intermediate;
  Index key_value;  // rows of the key and value projections
  Index vocabulary;
};

const Llama kLlama8b{"llama3_8b", 32, 4096, 14336, 1024, 128256};
const Llama kLlama70b{"llama3_70b", 80, 8192, 28672, 1024, 128256};

using Bucket = std::vector<ParamSpec>;

ParamSpec vector_param(std::string name, Index size) {
  return {.name = std::move(name), .shape = {size}};
}

ParamSpec matrix_param(std::string name, Index num_rows, Index columns, Index rows_per_block) {
  ParamSpec param{.name = std::move(name), .shape = {num_rows, columns}};
  param.block = block_extent(rows(rows_per_block), param.shape, param.name).block;
  return param;
}

std::vector<Bucket> buckets_of(const Llama& model, Index rows_per_block) {
  std::vector<Bucket> buckets;
  buckets.push_back({matrix_param("embed", model.vocabulary, model.hidden, rows_per_block)});
  for (int i = 0; i < model.num_layers; ++i) {
    const std::string prefix = fmt::format("layers.{}.", i);
    const auto matrix = [&](const char* name, Index num_rows, Index columns) {
      return matrix_param(prefix + name, num_rows, columns, rows_per_block);
    };
    buckets.push_back(
        {matrix("wq", model.hidden, model.hidden), matrix("wk", model.key_value, model.hidden),
         matrix("wv", model.key_value, model.hidden), matrix("wo", model.hidden, model.hidden),
         matrix("w1", model.intermediate, model.hidden), matrix("w3", model.intermediate, model.hidden),
         matrix("w2", model.hidden, model.intermediate), vector_param(prefix + "attention_norm", model.hidden),
         vector_param(prefix + "ffn_norm", model.hidden)});
  }
  buckets.push_back(
      {vector_param("norm", model.hidden), matrix_param("head", model.vocabulary, model.hidden, rows_per_block)});
  return buckets;
}

// The mixture-of-experts layer whose rows of unequal length make the widest choice of common
// multiples that a public model has: GPT-OSS, attention of 4,096 columns beside experts of 2,880
// and 5,760.
std::vector<Bucket> gpt_oss_buckets(Index rows_per_block) {
  std::vector<Bucket> buckets;
  for (int i = 0; i < 36; ++i) {
    const std::string prefix = fmt::format("layers.{}.", i);
    const auto matrix = [&](const char* name, Index num_rows, Index columns) {
      return matrix_param(prefix + name, num_rows, columns, rows_per_block);
    };
    const auto experts = [&](const char* name, Index num_rows, Index columns) {
      ParamSpec param{.name = prefix + name, .shape = {128, num_rows, columns}};
      const BlockExtent extent = block_extent(rows(rows_per_block), param.shape, param.name);
      param.block = extent.block;
      param.restart = extent.restart;
      return param;
    };
    buckets.push_back(
        {vector_param(prefix + "sinks", 64), matrix("q", 4096, 2880), vector_param(prefix + "q_bias", 4096),
         matrix("k", 512, 2880), vector_param(prefix + "k_bias", 512), matrix("v", 512, 2880),
         vector_param(prefix + "v_bias", 512), matrix("o", 2880, 4096), vector_param(prefix + "o_bias", 2880),
         matrix("router", 128, 2880), vector_param(prefix + "router_bias", 128), experts("gate_up", 2880, 5760),
         vector_param(prefix + "gate_up_bias", 128 * 5760), experts("down", 2880, 2880),
         vector_param(prefix + "down_bias", 128 * 2880), vector_param(prefix + "input_norm", 2880),
         vector_param(prefix + "post_norm", 2880)});
  }
  return buckets;
}

void run(benchmark::State& state, const std::vector<Bucket>& buckets, int world_size) {
  std::vector<BucketPlan> plans;
  for (auto _ : state) {
    plans = plan_buckets(buckets, {.world_size = world_size});
    benchmark::DoNotOptimize(plans);
  }
  Index image = 0;
  Index padding = 0;
  Index lower_bound = 0;
  Index largest_shard = 0;
  for (const BucketPlan& plan : plans) {
    image += plan.image_numel();
    padding += plan.padding();
    lower_bound += plan.lower_bound;
    for (const Segment& segment : plan.segments) {
      largest_shard = std::max(largest_shard, segment.shard_size);
    }
  }
  const auto percent_over = [&](Index numel) {
    return 100.0 * static_cast<double>(numel - (image - padding)) / static_cast<double>(image - padding);
  };
  state.counters["padding_percent"] = percent_over(image);
  state.counters["bound_percent"] = percent_over(lower_bound);
  state.counters["largest_S"] = static_cast<double>(largest_shard);
}

// Registered by hand: Google Benchmark's macros don't give names with a model in the middle.
[[maybe_unused]] const bool kRegistered = [] {
  const auto add = [](const std::string& name, Index rows_per_block, std::vector<Bucket> buckets) {
    for (int world_size : {8, 64, 256, 1024}) {
      benchmark::RegisterBenchmark(
          fmt::format("BM_plan/{}/rows:{}/world:{}", name, rows_per_block, world_size).c_str(),
          [buckets, world_size](benchmark::State& state) { run(state, buckets, world_size); })
          ->Unit(benchmark::kMillisecond);
    }
  };
  for (Index rows_per_block : {1, 32, 128}) {
    add(kLlama8b.name, rows_per_block, buckets_of(kLlama8b, rows_per_block));
    add(kLlama70b.name, rows_per_block, buckets_of(kLlama70b, rows_per_block));
    add("gpt_oss_120b", rows_per_block, gpt_oss_buckets(rows_per_block));
    Llama deep = kLlama70b;
    deep.num_layers = 128;
    add("llama3_70b_128_layers", rows_per_block, buckets_of(deep, rows_per_block));
  }
  return true;
}();

}  // namespace
}  // namespace ragged::plan
