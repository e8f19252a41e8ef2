// The contract of units beyond the plain step: frozen parameters, several forwards and backwards, failures, trees,
// manual control, use of freed parameters.
#include <gtest/gtest.h>

#include "ragged/optim/adamw.h"
#include "tests/fsdp/blocks.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using fsdp::fully_shard;

fsdp::FullyShardOptions plain(comm::World& world, std::optional<bool> reshard = {}) {
  fsdp::FullyShardOptions options;
  options.groups = world.groups(layout::Mesh::shard(world.size()));
  options.reshard_after_forward = reshard;
  return options;
}

// Mean over ranks of what each rank's own unsharded run gives.
std::map<std::string, at::Tensor> mean_gradients(
    int world_size, const std::function<std::shared_ptr<Block>()>& make,
    const std::function<void(Block&, int rank)>& run) {
  std::map<std::string, at::Tensor> sums;
  for (int rank = 0; rank < world_size; ++rank) {
    auto model = make();
    run(*model, rank);
    for (const auto& item : model->named_parameters()) {
      if (!item.value().grad().defined()) continue;
      auto& sum = sums[item.key()];
      sum = sum.defined() ? sum + item.value().grad() : item.value().grad().clone();
    }
  }
  for (auto& [name, sum] : sums) sum = sum * (1.0 / world_size);
  return sums;
}

void expect_gradients(fsdp::Unit& root, comm::World& world, const std::map<std::string, at::Tensor>& want) {
  const auto got = whole_gradients(root, world.all());
  EXPECT_EQ(got.size(), want.size());
  for (const auto& [name, grad] : want) {
    ASSERT_TRUE(got.count(name)) << name;
    EXPECT_LE((got.at(name) - grad).norm().item<double>(), 2e-6 * grad.norm().item<double>()) << name;
  }
}

TEST(Behaviour, two_forwards_before_a_backward) {
  const auto make = [] { return chain(3); };
  const auto want = mean_gradients(2, make, [](Block& m, int rank) {
    auto loss = m.forward(input_of(rank, 0)) + 2.0 * m.forward(input_of(rank, 1));
    loss.backward();
  });
  for (const std::optional<bool> reshard :
       {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
    run_ranks(
        2,
        [&](comm::World& world) {
          auto model = make();
          auto root = shard_chain(*model, 3, plain(world, reshard));
          for (int repeat = 0; repeat < 2; ++repeat) {
            auto loss =
                root->call(*model, input_of(world.rank(), 0)) + 2.0 * root->call(*model, input_of(world.rank(), 1));
            loss.backward();
            expect_gradients(*root, world, want);
            EXPECT_EQ(root->stats().image_bytes_in_use, 0);
            root->zero_grad();
          }
        },
        quick());
  }
}

TEST(Behaviour, two_forwards_then_two_backwards_in_either_order) {
  const auto make = [] { return chain(3); };
  const auto want = mean_gradients(2, make, [](Block& m, int rank) {
    m.forward(input_of(rank, 0)).backward();
    m.forward(input_of(rank, 1)).backward();
  });
  for (const bool last_first : {false, true}) {
    for (const std::optional<bool> reshard :
         {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
      run_ranks(
          2,
          [&](comm::World& world) {
            auto model = make();
            auto root = shard_chain(*model, 3, plain(world, reshard));
            auto first = root->call(*model, input_of(world.rank(), 0));
            auto second = root->call(*model, input_of(world.rank(), 1));
            (last_first ? second : first).backward();
            (last_first ? first : second).backward();
            expect_gradients(*root, world, want);
          },
          quick());
    }
  }
}

TEST(Behaviour, second_backward_over_a_kept_graph) {
  const auto make = [] { return chain(2); };
  const auto want = mean_gradients(3, make, [](Block& m, int rank) {
    auto loss = m.forward(input_of(rank));
    loss.backward({}, /*keep_graph=*/true);
    loss.backward();
  });
  run_ranks(
      3,
      [&](comm::World& world) {
        auto model = make();
        auto root = shard_chain(*model, 2, plain(world, true));
        auto loss = root->call(*model, input_of(world.rank()));
        loss.backward({}, /*keep_graph=*/true);
        loss.backward();
        expect_gradients(*root, world, want);
      },
      quick());
}

TEST(Behaviour, unit_called_twice_in_a_forward) {
  const auto make = [] {
    auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}}, [](Block& b, const at::Tensor& x) {
      at::Tensor y = fsdp::call(b.child(0), x * b.p[0]);
      y = fsdp::call(b.child(1), y);
      return fsdp::call(b.child(0), y).mean();
    });
    root->add("shared", linear_block());
    root->add("other", linear_block());
    return root;
  };
  const auto want = mean_gradients(2, make, [](Block& m, int rank) { m.forward(input_of(rank)).backward(); });
  run_ranks(
      2,
      [&](comm::World& world) {
        auto model = make();
        auto root = shard_chain(*model, 2, plain(world));
        root->set_runtime_options({.merge_bytes = 0});
        for (int step = 0; step < 2; ++step) {
          root->call(*model, input_of(world.rank())).backward();
          expect_gradients(*root, world, want);
          root->zero_grad();
        }
        EXPECT_EQ(root->stats().traffic.reduce_scatters, 2 * 3);  // once a unit and step
      },
      quick());
}

// Blocks that hand something to the outside besides what they return; see [Note: escaped tensors].
TEST(Behaviour, loss_on_a_tensor_that_escaped) {
  const auto make = [](at::Tensor* kept) {
    auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}}, [](Block& b, const at::Tensor& x) {
      return fsdp::call(b.child(0), x * b.p[0]);
    });
    root->add(
        "layer",
        std::make_shared<Block>(
            std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}}, [kept](Block& b, const at::Tensor& x) {
              *kept = at::tanh(at::linear(x, b.p[0]));
              return at::linear(*kept, b.p[1]);
            }));
    return root;
  };
  at::Tensor plain_kept;
  const auto want = mean_gradients(
      2, [&] { return make(&plain_kept); },
      [&](Block& m, int rank) {
        m.forward(input_of(rank));
        plain_kept.pow(2).sum().backward();
      });
  run_ranks(2, [&](comm::World& world) {
    at::Tensor kept;
    auto model = make(&kept);
    auto root = shard_chain(*model, 1, plain(world, true));
    root->call(*model, input_of(world.rank()));
    kept.pow(2).sum().backward();
    expect_gradients(*root, world, want);
  });
}

TEST(Behaviour, returned_view_rewritten_in_place) {
  const auto make = [] {
    auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}}, [](Block& b, const at::Tensor& x) {
      at::Tensor y = fsdp::call(b.child(0), x * b.p[0]);
      y.add_(1.0);
      return y.pow(2).sum();
    });
    root->add(
        "layer", std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4, 4}}, [](Block& b, const at::Tensor& x) {
          return at::linear(x, b.p[0]).view({-1});
        }));
    return root;
  };
  const auto want = mean_gradients(2, make, [](Block& m, int rank) { m.forward(input_of(rank)).backward(); });
  run_ranks(2, [&](comm::World& world) {
    auto model = make();
    auto root = shard_chain(*model, 1, plain(world, true));
    root->call(*model, input_of(world.rank())).backward();
    expect_gradients(*root, world, want);
  });
}

TEST(Behaviour, unit_called_outside_its_roots_forward_is_a_root_of_its_own) {
  const auto make = [] { return chain(2); };
  const auto want = mean_gradients(2, make, [](Block& m, int rank) {
    m.forward(input_of(rank)).backward();
    m.child(1).forward(input_of(rank, 1)).sum().backward();
  });
  run_ranks(2, [&](comm::World& world) {
    auto model = make();
    auto root = shard_chain(*model, 2, plain(world));
    root->call(*model, input_of(world.rank())).backward();
    fsdp::call(model->child(1), input_of(world.rank(), 1)).sum().backward();
    EXPECT_EQ(root->stats().image_bytes_in_use, 0);
    expect_gradients(*root, world, want);
  });
}

TEST(Behaviour, nested_units_and_a_unit_without_parameters) {
  const auto make = [] {
    auto inner = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4, 4}}, [](Block& b, const at::Tensor& x) {
      return fsdp::call(b.child(1), fsdp::call(b.child(0), at::linear(x, b.p[0])));
    });
    inner->add("a", linear_block());
    inner->add("b", linear_block());
    auto middle = std::make_shared<Block>(std::vector<std::vector<int64_t>>{}, [](Block& b, const at::Tensor& x) {
      return fsdp::call(b.child(0), x) + x;
    });
    middle->add("inner", inner);
    auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}}, [](Block& b, const at::Tensor& x) {
      return fsdp::call(b.child(1), fsdp::call(b.child(0), x * b.p[0])).mean();
    });
    root->add("middle", middle);
    root->add("last", linear_block());
    return root;
  };
  const auto want = mean_gradients(3, make, [](Block& m, int rank) { m.forward(input_of(rank)).backward(); });
  run_ranks(
      3,
      [&](comm::World& world) {
        auto model = make();
        const auto options = plain(world);
        Block& middle = model->child(0);
        Block& inner = middle.child(0);
        std::vector<std::shared_ptr<fsdp::Unit>> units{
            fully_shard(inner.child(0), options), fully_shard(inner.child(1), options), fully_shard(inner, options),
            fully_shard(middle, options), fully_shard(model->child(1), options)};
        auto root = fully_shard(*model, options);
        std::vector<std::string> names;
        for (const auto& unit : root->units()) {
          if (unit->is_root()) root->sharded_parameters();  // names come with the tree
          names.push_back(unit->name());
        }
        EXPECT_EQ(
            names,
            (std::vector<std::string>{"", "middle", "middle.inner", "middle.inner.a", "middle.inner.b", "last"}));
        for (int step = 0; step < 3; ++step) {
          root->reset_peaks();
          root->call(*model, input_of(world.rank())).backward();
          expect_gradients(*root, world, want);
          EXPECT_LE(root->stats().peak_image_bytes, root->forecast().image_bytes_bound);
          root->zero_grad();
        }
      },
      quick());
}

TEST(Behaviour, frozen_parameters_travel_without_gradients) {
  const auto make = [] {
    auto model = chain(3);
    model->child(1).p[0].requires_grad_(false);
    return model;
  };
  const auto want = mean_gradients(2, make, [](Block& m, int rank) { m.forward(input_of(rank)).backward(); });
  run_ranks(
      2,
      [&](comm::World& world) {
        auto model = make();
        auto root = shard_chain(*model, 3, plain(world));
        root->set_runtime_options({.merge_bytes = 0});
        root->call(*model, input_of(world.rank())).backward();
        expect_gradients(*root, world, want);
        EXPECT_EQ(root->stats().traffic.reduce_scatters, 3);  // not for the frozen unit
      },
      quick());
}

TEST(Behaviour, frozen_beside_trained_in_one_unit_then_unfrozen) {
  const auto make = [](bool frozen) {
    auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}}, [](Block& b, const at::Tensor& x) {
      return fsdp::call(b.child(0), x * b.p[0]).mean();
    });
    auto block = std::make_shared<Block>(
        std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}},
        [](Block& b, const at::Tensor& x) { return at::tanh(at::linear(at::linear(x, b.p[0]), b.p[1])); });
    block->p[0].requires_grad_(!frozen);
    root->add("block", block);
    return root;
  };
  const auto run = [](Block& m, int rank) { m.forward(input_of(rank)).backward(); };
  const auto frozen = mean_gradients(
      3, [&] { return make(true); }, run);
  const auto thawed = mean_gradients(
      3, [&] { return make(false); }, run);
  run_ranks(
      3,
      [&](comm::World& world) {
        auto model = make(true);
        auto root = shard_chain(*model, 1, plain(world));
        EXPECT_EQ(root->units()[1]->plan()->segments.size(), 2U);
        for (int step = 0; step < 4; ++step) {
          if (step == 2) model->child(0).p[0].requires_grad_(true);
          root->call(*model, input_of(world.rank())).backward();
          expect_gradients(*root, world, step < 2 ? frozen : thawed);
          root->zero_grad();
        }
      },
      quick());
}

TEST(Behaviour, no_grad_forwards_between_steps_see_new_values) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto model = chain(2);
        auto root = shard_chain(*model, 2, plain(world));
        optim::AdamW adamw(root, {.lr = 0.1});
        const auto evaluate = [&] {
          const at::NoGradGuard no_grad;
          return root->call(*model, input_of(0)).item<double>();
        };
        double before = evaluate();
        for (int step = 0; step < 3; ++step) {
          root->call(*model, input_of(world.rank())).backward();
          EXPECT_EQ(evaluate(), before) << "between backward and step";
          adamw.step();
          root->zero_grad();
          const double after = evaluate();
          EXPECT_NE(after, before) << "the root's image is stale";
          before = after;
        }
      },
      quick());
}

TEST(Behaviour, a_failed_forward_or_backward_leaves_a_good_next_step) {
  struct Boom : std::runtime_error {
    Boom() : std::runtime_error("boom") {}
  };
  const auto want = mean_gradients(
      2, [] { return chain(3); }, [](Block& m, int rank) { m.forward(input_of(rank)).backward(); });
  for (const bool in_backward : {false, true}) {
    for (const bool call_reset : {false, true}) {
      run_ranks(
          2,
          [&](comm::World& world) {
            auto model = chain(3);
            bool fail = false;
            model->child(1).function = [&](Block& b, const at::Tensor& x) {
              at::Tensor y = at::tanh(at::linear(x, b.p[0]));
              if (fail && !in_backward) throw Boom();
              if (fail) y.register_hook([](const at::Tensor&) { throw Boom(); });
              return y * 1.0;
            };
            auto root = shard_chain(*model, 3, plain(world));
            for (int step = 0; step < 3; ++step) {
              fail = step == 1;
              if (fail) {
                EXPECT_THROW(root->call(*model, input_of(world.rank())).backward(), Boom);
                if (call_reset) root->reset();
                root->zero_grad();
                continue;
              }
              root->call(*model, input_of(world.rank())).backward();
              expect_gradients(*root, world, want);
              EXPECT_EQ(root->stats().image_bytes_in_use, 0);
              root->zero_grad();
            }
          },
          quick());
    }
  }
}

TEST(Behaviour, freed_parameter_raises_an_error_that_names_it) {
#if !RAGGED_STORAGE_ERROR_TEXT
  GTEST_SKIP() << "this torch can't arm an error text on a storage";
#endif
  run_ranks(
      2,
      [](comm::World& world) {
        auto model = chain(2);
        auto root = shard_chain(*model, 2, plain(world));
        root->sharded_parameters();
        const at::Tensor& weight = model->child(1).p[0];
        const std::vector<std::pair<const char*, std::function<void()>>> uses{
            {"mul", [&] { (weight * 2).sum(); }},
            {"sum", [&] { weight.sum(); }},
            {"copy_",
             [&] {
               at::NoGradGuard g;
               weight.copy_(at::ones({4, 4}));
             }},
            {"linear",
             [&] {
               at::linear(at::ones({1, 4}), weight);
             }},
            {"to", [&] { weight.to(at::kDouble); }},
            {"module.to", [&] { model->to(at::kDouble); }},
            {"item", [&] { weight[0][0].item<float>(); }}};
        for (const auto& [name, use] : uses) {
          try {
            use();
            ADD_FAILURE() << name << " ran on a freed parameter";
          } catch (const std::exception& e) {
            EXPECT_NE(std::string(e.what()).find("sharded"), std::string::npos) << name << ": " << e.what();
          }
        }
        EXPECT_THROW(at::linear(at::ones({1, 4}), weight), std::exception);
        try {
          weight.sum();
        } catch (const std::exception& e) {
          EXPECT_NE(std::string(e.what()).find("'layer1.p0'"), std::string::npos) << e.what();
        }
        root->call(*model, input_of(world.rank())).backward();  // and nothing is broken
      },
      quick());
}

TEST(Behaviour, unshard_and_reshard_by_hand) {
  run_ranks(
      3,
      [](comm::World& world) {
        auto model = chain(1);
        const at::Tensor value = model->child(0).p[0].detach().clone();
        auto root = shard_chain(*model, 1, plain(world));
        auto unit = root->units()[1];
        unit->unshard();
        unit->unshard();
        EXPECT_TRUE(at::equal(model->child(0).p[0], value));
        unit->reshard();
        unit->reshard();
        EXPECT_EQ(root->stats().image_bytes_in_use, 0);
        EXPECT_TRUE(at::equal(root->full_parameter("layer0.p0"), value));
      },
      quick());
}

TEST(Behaviour, ignored_parameters_stay_whole) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto model = chain(1);
        auto options = plain(world);
        options.ignored_params = {model->p[0]};
        auto root = shard_chain(*model, 1, options);
        EXPECT_EQ(root->plan(), nullptr);
        root->call(*model, input_of(world.rank())).backward();
        EXPECT_TRUE(model->p[0].grad().defined());
        EXPECT_EQ(root->sharded_gradients().size(), 1U);
      },
      quick());
}

TEST(Behaviour, tied_parameters_inside_a_unit_are_one) {
  const auto make = [] {
    auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4, 4}}, [](Block& b, const at::Tensor& x) {
      return at::linear(at::tanh(at::linear(x, b.p[0])), b.p[1]).mean();
    });
    root->p.push_back(root->register_parameter("tied", root->p[0]));
    return root;
  };
  const auto want = mean_gradients(2, make, [](Block& m, int rank) { m.forward(input_of(rank)).backward(); });
  run_ranks(
      2,
      [&](comm::World& world) {
        auto model = make();
        auto root = fully_shard(*model, plain(world));
        EXPECT_EQ(root->sharded_parameters().size(), 1U);
        root->call(*model, input_of(world.rank())).backward();
        const auto got = whole_gradients(*root, world.all());
        EXPECT_LE((got.at("p0") - want.at("p0")).norm().item<double>(), 1e-6);
      },
      quick());
}

TEST(Behaviour, several_modules_in_one_unit) {
  const auto want = mean_gradients(
      2, [] { return chain(2); }, [](Block& m, int rank) { m.forward(input_of(rank)).backward(); });
  run_ranks(
      2,
      [&](comm::World& world) {
        auto model = chain(2);
        auto pair = fully_shard(std::vector<torch::nn::Module*>{&model->child(0), &model->child(1)}, plain(world));
        auto root = fully_shard(*model, plain(world));
        root->call(*model, input_of(world.rank())).backward();
        expect_gradients(*root, world, want);
        EXPECT_EQ(root->units().size(), 2U);
        EXPECT_EQ(root->units()[1]->name(), "layer0+layer1");
      },
      quick());
}

TEST(Behaviour, two_models_and_many_steps_dont_grow) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto a = chain(2);
        auto b = chain(3);
        auto root_a = shard_chain(*a, 2, plain(world));
        auto root_b = shard_chain(*b, 3, plain(world));
        for (const auto& root : {root_a, root_b}) root->set_runtime_options({.free_slots = buffer::FreeSlots::kKeep});
        Index allocations = 0;
        for (int step = 0; step < 30; ++step) {
          root_a->call(*a, input_of(world.rank())).backward();
          root_b->call(*b, input_of(world.rank())).backward();
          root_a->zero_grad();
          root_b->zero_grad();
          const Index now = root_a->stats().pool_allocations + root_b->stats().pool_allocations;
          if (step >= 2) {
            EXPECT_EQ(now, allocations);
          }
          allocations = now;
        }
      },
      quick());
}

TEST(Behaviour, hybrid_mesh_keeps_one_shard_a_replica) {
  run_ranks(
      4,
      [](comm::World& world) {
        auto model = chain(2);
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::hybrid(2, 2));
        auto root = shard_chain(*model, 2, options);
        const auto parameters = root->sharded_parameters();
        EXPECT_EQ(parameters[0].placements.size(), 2U);
        EXPECT_TRUE(std::holds_alternative<layout::Replicate>(parameters[0].placements[0]));
        EXPECT_TRUE(std::holds_alternative<layout::RaggedShard>(parameters[0].placements[1]));
        root->call(*model, input_of(world.rank())).backward();
        for (const auto& gradient : root->sharded_gradients()) {
          at::Tensor mean = gradient.local.clone();
          options.groups.replicate.all_reduce_sum(mean, "test").wait();
          EXPECT_TRUE(at::equal(mean * 0.5, gradient.local)) << gradient.name;
        }
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
