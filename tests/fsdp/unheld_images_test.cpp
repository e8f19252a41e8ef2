// Images of units around others go in backward as soon as nobody holds their parameters, and not before.
#include <gtest/gtest.h>

#include "tests/fsdp/blocks.h"

namespace ragged::test {
namespace {

constexpr Index kLayerImage = 4 * 4 * 4;
constexpr Index kRootImage = 2 * 4 * 4 * 4;

// A root of two matrices, p[0] before its two layers and p[1] behind them. Sees how many bytes of images there are
// while backward is in a layer, layer 1 first.
struct Observed {
  std::shared_ptr<Block> model;
  std::shared_ptr<fsdp::Unit> root;
  std::vector<Index> images;
};

using Use = std::function<at::Tensor(Block&, const at::Tensor&)>;

std::shared_ptr<Observed> observed(comm::World& world, const Use& before, const Use& behind) {
  auto seen = std::make_shared<Observed>();
  auto* raw = seen.get();
  seen->model = std::make_shared<Block>(
      std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}}, [before, behind](Block& b, const at::Tensor& x) {
        at::Tensor y = before(b, x);
        for (std::size_t i = 0; i < 2; ++i) y = fsdp::call(b.child(i), y);
        return behind(b, y).mean();
      });
  for (int i = 0; i < 2; ++i) {
    seen->model->add(
        "layer" + std::to_string(i),
        std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4, 4}}, [raw](Block& b, const at::Tensor& x) {
          at::Tensor y = at::linear(x, b.p[0]);
          y.register_hook([raw](const at::Tensor&) { raw->images.push_back(raw->root->stats().image_bytes_in_use); });
          return at::tanh(y);
        }));
  }
  fsdp::FullyShardOptions options;
  options.groups = world.groups(layout::Mesh::shard(world.size()));
  seen->root = shard_chain(*seen->model, 2, options);
  seen->root->set_runtime_options({.merge_bytes = 0});  // one layer at a time
  return seen;
}

at::Tensor rows_of_first(Block& b, const at::Tensor& x) {
  return at::embedding(b.p[0], x.sum(1).to(at::kLong).remainder(4)) * 1.0;
}

at::Tensor by_second(Block& b, const at::Tensor& x) {
  return at::linear(x, b.p[1]);
}

TEST(UnheldImages, go_when_the_head_is_done_and_the_embedding_needs_no_values) {
  for (const int world_size : {1, 2, 4}) {  // no padding
    run_ranks(
        world_size,
        [](comm::World& world) {
          auto seen = observed(world, rows_of_first, by_second);
          for (int step = 0; step < 3; ++step) {
            seen->images.clear();
            seen->root->call(*seen->model, input_of(world.rank(), step)).backward();
            EXPECT_EQ(seen->images, (std::vector<Index>{kLayerImage, kLayerImage}));
            EXPECT_EQ(seen->root->stats().image_bytes_in_use, 0);
            seen->root->zero_grad();
          }
        },
        quick());
  }
}

TEST(UnheldImages, stay_while_an_operation_before_the_layers_needs_them) {
  run_ranks(
      2,
      [](comm::World& world) {
        // The product's backward takes p[0] once the layers are done.
        auto seen = observed(
            world, [](Block& b, const at::Tensor& x) { return at::linear(x, b.p[0]); }, by_second);
        auto input = input_of(world.rank()).requires_grad_(true);
        seen->root->call(*seen->model, input).backward();
        EXPECT_EQ(seen->images, (std::vector<Index>{kLayerImage + kRootImage, kLayerImage + kRootImage}));
        EXPECT_TRUE(input.grad().defined());
      },
      quick());
}

TEST(UnheldImages, stay_while_a_view_or_a_detached_alias_is_saved) {
  for (const bool detached : {false, true}) {
    run_ranks(
        2,
        [&](comm::World& world) {
          const auto alias = [&](Block& b, const at::Tensor& x) {
            const at::Tensor weight = detached ? b.p[1].detach() : b.p[1].t();
            return x.mm(weight);
          };
          auto seen = observed(world, alias, by_second);
          auto input = input_of(world.rank()).requires_grad_(true);
          seen->root->call(*seen->model, input).backward();
          EXPECT_EQ(seen->images[1], kLayerImage + kRootImage) << detached;
          EXPECT_TRUE(input.grad().defined());
        },
        quick());
  }
}

TEST(UnheldImages, stay_for_somebody_who_keeps_the_parameter) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto seen = observed(world, rows_of_first, by_second);
        const auto run = [&](const at::Tensor& x) {
          seen->images.clear();
          auto loss = seen->root->call(*seen->model, x);
          const at::Tensor kept = seen->model->p[1].t();  // the root's image is there until backward
          loss.backward();
        };
        run(input_of(world.rank(), 0));
        EXPECT_EQ(seen->images, (std::vector<Index>{kLayerImage + kRootImage, kLayerImage + kRootImage}));
        seen->root->zero_grad();
        seen->images.clear();
        seen->root->call(*seen->model, input_of(world.rank(), 1)).backward();
        EXPECT_EQ(seen->images, (std::vector<Index>{kLayerImage, kLayerImage}));
      },
      quick());
}

// The other graph's saved tensors hold what this backward no longer needs.
TEST(UnheldImages, stay_for_a_graph_that_is_kept_or_still_to_come) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto seen = observed(world, rows_of_first, by_second);
        auto first = seen->root->call(*seen->model, input_of(world.rank(), 0));
        auto second = seen->root->call(*seen->model, input_of(world.rank(), 1));
        second.backward();
        EXPECT_EQ(seen->images.back(), kLayerImage + kRootImage);
        first.backward();
        EXPECT_EQ(seen->images.back(), kLayerImage);
        seen->root->zero_grad();
        auto kept = seen->root->call(*seen->model, input_of(world.rank(), 2));
        kept.backward({}, /*keep_graph=*/true);
        const auto once = whole_gradients(*seen->root, world.all());
        kept.backward();
        for (const auto& [name, grad] : whole_gradients(*seen->root, world.all())) {
          EXPECT_TRUE(at::allclose(grad, 2 * once.at(name), 1e-6, 1e-7)) << name;
        }
      },
      quick());
}

TEST(UnheldImages, are_kept_with_their_slots) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto seen = observed(world, rows_of_first, by_second);
        seen->root->set_runtime_options({.free_slots = buffer::FreeSlots::kKeep, .merge_bytes = 0});
        seen->root->call(*seen->model, input_of(world.rank())).backward();
        EXPECT_EQ(seen->images, (std::vector<Index>{kLayerImage + kRootImage, kLayerImage + kRootImage}));
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
