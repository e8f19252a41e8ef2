// What a step moves and holds: counters against the forecast, against the bound, and against torch's own record of the
// operations that ran.
#include <algorithm>
#include <mutex>

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw.h"
#include "tests/fsdp/blocks.h"
#include "tests/support/reference.h"

namespace ragged::test {
namespace {

enum class Layout { kSingle, kSplit };

enum class Dtypes { kBf16, kFp32 };

fsdp::FullyShardOptions sharding(
    const comm::MeshGroups& groups, Layout layout = Layout::kSingle, Dtypes dtypes = Dtypes::kBf16) {
  fsdp::FullyShardOptions options;
  options.groups = groups;
  if (dtypes == Dtypes::kBf16) options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  if (layout == Layout::kSplit) {  // segments cost nothing, so that buckets fall apart where that saves an element
    options.planning.max_ragged_blocks = 6;
    options.planning.cost = {.uniform_segment = 0, .ragged_segment = 0, .ragged_block = 0};
    options.shard_policy = [](const fsdp::ParamInfo& p) -> std::optional<plan::Block> {
      if (p.shape.size() < 2) return std::nullopt;
      return plan::rows(std::min<Index>(5, p.shape[0]));
    };
  }
  return options;
}

// Each unit by itself; merge_test.cpp counts what merges.
std::shared_ptr<fsdp::Unit> shard(TinyModel& model, const fsdp::FullyShardOptions& options) {
  std::vector<std::shared_ptr<fsdp::Unit>> units;
  for (const auto& layer : model.layers) units.push_back(fsdp::fully_shard(*layer, options));
  auto root = fsdp::fully_shard(model, options);
  root->set_runtime_options({.merge_bytes = 0});
  return root;
}

struct StepSettings {
  int micro_batches = 1;
  bool sync_each = false;
};

// Returns the last micro-batch's loss.
float train_step(TinyModel& model, fsdp::Unit& root, int step, int rank, const StepSettings& settings = {}) {
  at::Tensor loss;
  for (int micro = 0; micro < settings.micro_batches; ++micro) {
    root.set_requires_gradient_sync(settings.sync_each || micro + 1 == settings.micro_batches);
    const Batch batch = make_batch({}, step, rank, micro);
    loss = root.call(model, batch.tokens, batch.targets);
    loss.backward();
  }
  return loss.item<float>();
}

// In fp32 two ranks cast no masters, and all gradients but those of norms and biases are computed in their slots.
constexpr auto kKeep = buffer::FreeSlots::kKeep;

void expect_forecast(Dtypes dtypes, const std::vector<int>& worlds) {
  for (const int world_size : worlds) {
    const Layout layout = world_size % 2 == 1 ? Layout::kSplit : Layout::kSingle;
    for (const StepSettings settings : {StepSettings{}, StepSettings{3, false}, StepSettings{2, true}}) {
      for (const fsdp::RuntimeOptions runtime :
           {fsdp::RuntimeOptions{.merge_bytes = 0},
            fsdp::RuntimeOptions{.forward_prefetch = 1, .backward_prefetch = 2, .merge_bytes = 0},
            fsdp::RuntimeOptions{
                .backward_prefetch = 1, .overlap_reductions = true, .free_slots = kKeep, .merge_bytes = 0},
            fsdp::RuntimeOptions{.backward_prefetch = 0, .overlap_reductions = true, .merge_bytes = 0}}) {
        SCOPED_TRACE(fmt::format(
            "world {} micro {} sync {} prefetch {}/{}", world_size, settings.micro_batches, settings.sync_each,
            runtime.forward_prefetch, runtime.backward_prefetch.value_or(0)));
        run_ranks(
            world_size,
            [&](comm::World& world) {
              auto model = make_tiny_model();
              auto root = shard(*model, sharding(world.groups(layout::Mesh::shard(world_size)), layout, dtypes));
              root->set_runtime_options(runtime);
              optim::AdamW adamw(root, {});
              const fsdp::StepForecast forecast = root->forecast(settings.micro_batches, settings.sync_each);
              Index allocations = 0;
              for (int step = 0; step < 4; ++step) {
                const fsdp::RuntimeStats before = root->stats();
                root->reset_peaks();
                train_step(*model, *root, step, world.rank(), settings);
                const fsdp::RuntimeStats after = root->stats();
                adamw.step();
                root->zero_grad();
                EXPECT_EQ(after.traffic.gathered_bytes - before.traffic.gathered_bytes, forecast.gathered_bytes);
                EXPECT_EQ(after.traffic.reduced_bytes - before.traffic.reduced_bytes, forecast.reduced_bytes);
                EXPECT_EQ(after.traffic.all_gathers - before.traffic.all_gathers, forecast.gathers);
                EXPECT_EQ(after.traffic.reduce_scatters - before.traffic.reduce_scatters, forecast.reduces);
                const Index cast_in = after.bytes.cast_in - before.bytes.cast_in;
                EXPECT_EQ(cast_in, forecast.cast_in_bytes);
                EXPECT_EQ(cast_in > 0, dtypes == Dtypes::kBf16 || world_size != 2);
                // The parameter that takes part in nothing is in the forecast and never arrives.
                // What is reduced at once travels in the dtype it was computed in.
                const bool narrows = dtypes == Dtypes::kBf16 && (settings.micro_batches == 1 || settings.sync_each);
                const Index element = narrows ? 2 : 4;
                const Index unused = 3 * 15 * element;
                const int filled = settings.sync_each ? settings.micro_batches : 1;
                const Index cast_grad = after.bytes.cast_grad - before.bytes.cast_grad;
                const Index in_place = after.bytes.in_place - before.bytes.in_place;
                EXPECT_EQ(cast_grad + in_place, forecast.cast_grad_bytes - filled * unused);
                // Elsewhere matrices and the table are computed in their slots.
                const Index vectors = (3 * (12 + 19) + 12) * element;
                EXPECT_EQ(cast_grad == filled * vectors, dtypes == Dtypes::kFp32 || narrows);
                EXPECT_EQ(
                    after.bytes.added - before.bytes.added,
                    forecast.added_grad_bytes - (settings.micro_batches - filled) * unused);
                EXPECT_EQ(after.bytes.copied, 0);
                EXPECT_LE(after.peak_image_bytes, forecast.image_bytes_bound);
                // The first forward doesn't know yet what comes next.
                if (step > 0) {
                  EXPECT_EQ(after.peak_image_bytes, forecast.peak_image_bytes);
                }
                EXPECT_EQ(after.peak_reduce_bytes, forecast.peak_reduce_bytes);
                EXPECT_EQ(after.image_bytes_in_use, 0);
                if (step >= 2 && runtime.free_slots == kKeep) {
                  EXPECT_EQ(after.pool_allocations, allocations) << "the pool grew in step " << step;
                }
                allocations = after.pool_allocations;
              }
            },
            quick());
      }
    }
  }
}

TEST(Counts, measured_equals_forecast_on_every_world) {
  expect_forecast(Dtypes::kBf16, {1, 2, 3, 4, 7});
}

TEST(Counts, measured_equals_forecast_where_nothing_is_cast) {
  expect_forecast(Dtypes::kFp32, {1, 2, 3});
}

// Loss of each step, and what the pool held after it.
std::vector<std::pair<float, Index>> train_three_steps(comm::World& world, buffer::FreeSlots free_slots) {
  auto model = make_tiny_model();
  auto root = shard(*model, sharding(world.groups(layout::Mesh::shard(world.size()))));
  root->set_runtime_options({.free_slots = free_slots});
  optim::AdamW adamw(root, {});
  std::vector<std::pair<float, Index>> steps;
  for (int step = 0; step < 3; ++step) {
    const float loss = train_step(*model, *root, step, world.rank());
    adamw.step();
    EXPECT_GT(root->stats().pool_reserved_bytes, 0) << "gradients at least";
    root->zero_grad();
    steps.emplace_back(loss, root->stats().pool_reserved_bytes);
  }
  return steps;
}

TEST(Counts, buffers_that_go_back_are_held_only_while_they_are_needed) {
  run_ranks(
      3,
      [](comm::World& world) {
        const auto kept = train_three_steps(world, buffer::FreeSlots::kKeep);
        const auto returned = train_three_steps(world, buffer::FreeSlots::kReturn);
        for (std::size_t step = 0; step < kept.size(); ++step) {
          EXPECT_EQ(returned[step].first, kept[step].first);
          EXPECT_GT(kept[step].second, 0);
          EXPECT_EQ(returned[step].second, 0);
        }
      },
      quick());
}

TEST(Counts, pool_holds_no_more_than_the_bounds) {
  run_ranks(
      3,
      [](comm::World& world) {
        auto model = make_tiny_model();
        auto root = shard(*model, sharding(world.groups(layout::Mesh::shard(3))));
        for (int step = 0; step < 3; ++step) {
          train_step(*model, *root, step, world.rank());
          root->zero_grad();
        }
        const auto forecast = root->forecast();
        Index staging = 0;
        Index gradients = 0;
        for (const auto& unit : root->units()) {
          staging = std::max(staging, unit->plan()->image_numel() * 4);
          gradients += unit->plan()->local_numel(world.rank()) * 4;
        }
        EXPECT_LE(
            root->stats().pool_reserved_bytes,
            forecast.image_bytes_bound + forecast.peak_reduce_bytes + staging + gradients);
      },
      quick());
}

// Bytes that torch's own copy operations write, whoever calls them.
class CopyRecorder {
 public:
  CopyRecorder() {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
          static const std::vector<std::string> kCopies{"aten::copy_",      "aten::cat",
                                                        "aten::clone",      "aten::_to_copy",
                                                        "aten::contiguous", "aten::split_with_sizes_copy",
                                                        "aten::stack",      "aten::_foreach_copy_"};
          if (std::find(kCopies.begin(), kCopies.end(), f.name()) == kCopies.end()) return nullptr;
          // Each of these ends in copy_ or cat; counting the leaves counts each byte once.
          if (std::string(f.name()) != "aten::copy_" && std::string(f.name()) != "aten::cat") return nullptr;
          if (f.inputs().empty() || !f.inputs()[0].isTensor()) return nullptr;
          current() += static_cast<Index>(f.inputs()[0].toTensor().nbytes());
          return nullptr;
        })
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    current() = 0;
  }
  ~CopyRecorder() { at::removeCallback(handle_); }
  Index bytes() const { return current(); }

 private:
  static Index& current() {
    static thread_local Index bytes = 0;
    return bytes;
  }
  at::CallbackHandle handle_;
};

// The unsharded model in the same dtype copies too (casts and layouts inside its compute): that is subtracted.
Index compute_copies(int rank, Dtypes dtypes) {
  auto model = make_tiny_model();
  for (auto& item : model->named_parameters()) {
    at::Tensor param = item.value();
    const at::NoGradGuard no_grad;
    if (dtypes == Dtypes::kBf16) param.set_data(param.to(at::kBFloat16));
  }
  const Batch batch = make_batch({}, 0, rank, 0);
  CopyRecorder recorder;
  model->forward(batch.tokens, batch.targets).backward();
  return recorder.bytes();
}

// In fp32 what is left at two ranks are the gradients of norms and biases.
void expect_no_copy_but_casts(int world_size, Layout layout, Dtypes dtypes) {
  run_ranks(
      world_size,
      [&](comm::World& world) {
        auto model = make_tiny_model();
        auto root = shard(*model, sharding(world.groups(layout::Mesh::shard(world_size)), layout, dtypes));
        train_step(*model, *root, 0, world.rank());
        root->zero_grad();
        const Index compute = compute_copies(world.rank(), dtypes);
        const auto before = root->stats().bytes;
        const Batch batch = make_batch({}, 0, world.rank(), 0);
        CopyRecorder recorder;
        root->call(*model, batch.tokens, batch.targets).backward();
        const Index seen = recorder.bytes() - compute;
        const auto after = root->stats().bytes;
        const Index casts = (after.cast_in - before.cast_in) + (after.cast_grad - before.cast_grad);
        EXPECT_GT(casts, 0);
        EXPECT_EQ(seen, casts) << "world " << world_size;
      },
      quick());
}

TEST(Counts, torch_sees_no_copy_but_the_casts) {
  for (const int world_size : {1, 2, 3, 7}) {
    for (const Layout layout : {Layout::kSingle, Layout::kSplit}) {
      for (const Dtypes dtypes : {Dtypes::kBf16, Dtypes::kFp32}) expect_no_copy_but_casts(world_size, layout, dtypes);
    }
  }
}

TEST(Counts, stock_collectives_are_what_fsdp2_issues) {
  comm::WorldOptions options = quick();
  options.comm.collectives = comm::Collectives::kStock;
  run_ranks(
      2,
      [](comm::World& world) {
        auto root_block = chain(3);
        fsdp::FullyShardOptions shard_options;
        shard_options.groups = world.groups(layout::Mesh::shard(2));
        auto root = shard_chain(*root_block, 3, shard_options);
        root->call(*root_block, input_of(world.rank())).backward();
        const auto traffic = root->stats().traffic;
        EXPECT_EQ(traffic.all_gathers, 1 + 3 + 3);  // the root once; blocks in forward and backward
        EXPECT_EQ(traffic.reduce_scatters, 4);
        EXPECT_EQ(traffic.all_reduces, 0);  // neither plans nor used-flags are compared
      },
      options);
}

TEST(Counts, profiler_sees_operation_and_unit) {
  std::vector<std::string> names;
  std::mutex mutex;
  static std::vector<std::string>* sink = nullptr;
  static std::mutex* sink_mutex = nullptr;
  sink = &names;
  sink_mutex = &mutex;
  const auto recording = at::addGlobalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
        const std::lock_guard lock(*sink_mutex);
        sink->push_back(f.name());
        return nullptr;
      }).scopes({at::RecordScope::USER_SCOPE}));
  run_ranks(
      2,
      [](comm::World& world) {
        auto root_block = chain(2);
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::shard(2));
        auto root = shard_chain(*root_block, 2, options);
        root->set_runtime_options({.merge_bytes = 0});
        root->call(*root_block, input_of(world.rank())).backward();
      },
      quick());
  at::removeCallback(recording);
  for (const std::string wanted :
       {"ragged::all_gather layer1", "ragged::reduce_scatter layer0", "ragged::unshard layer0", "ragged::wait layer1",
        "ragged::all_reduce used parameters", "ragged::all_gather root"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), wanted), names.end()) << wanted;
  }
}

}  // namespace
}  // namespace ragged::test
