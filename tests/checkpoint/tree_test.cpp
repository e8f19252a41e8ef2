// Saving and loading sharded models and optimizer states across ranks: any number of them, any mesh, any blocks.
#include <condition_variable>
#include <mutex>

#include <ATen/ATen.h>

#include "ragged/checkpoint/load.h"
#include "ragged/checkpoint/saver.h"
#include "ragged/optim/adamw.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::ragged::testing::CheckpointFolder;
using test::MeshShape;
using test::WholeValues;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A tree after some steps with AdamW; gradients don't depend on the ranks.
struct Trained {
  test::Tree tree;
  optim::AdamW optimizer;

  Trained(comm::World& world, const MeshShape& mesh, int steps, bool whole_tensors = false)
      : tree(test::make_tree(world, mesh, whole_tensors)), optimizer(tree.root, {.moment_dtype = at::kBFloat16}) {
    for (int step = 0; step < steps; ++step) {
      test::backward(tree, world.rank(), step);
      test::make_up_gradients(*tree.root, step);
      optimizer.step();
      tree.root->zero_grad();
    }
  }
  std::vector<Item> items() const {
    std::vector<Item> all = model_items(tree.root->sharded_parameters());
    for (Item& item : optimizer_items(optimizer.states())) all.push_back(std::move(item));
    return all;
  }
};

SaverOptions small_chunks() {
  return {.keep = 0, .chunk_bytes = 64};
}

// Trains and saves step 3 on this mesh; the folder, and the whole values.
void save_trained(const fs::path& root, const MeshShape& mesh, WholeValues& whole, bool whole_tensors = false) {
  test::run_ranks(mesh.size(), [&](comm::World& world) {
    const Trained trained(world, mesh, 2, whole_tensors);
    whole.add(trained.items());
    State state{.tensors = trained.items()};
    state.facts.integers["world_size"] = world.size();
    state.rank_texts["me"] = std::to_string(world.rank());
    Saver saver(world.all(), root, small_chunks());
    const SaveReport report = saver.save(3, state);
    EXPECT_EQ(report.folder, root / "step-3");
    EXPECT_FALSE(saver.is_busy());
  });
}

void expect_loads(
    const fs::path& folder, const MeshShape& mesh, const WholeValues& whole, const std::string& what,
    bool whole_tensors = false) {
  test::run_ranks(mesh.size(), [&](comm::World& world) {
    const Trained trained(world, mesh, 0, whole_tensors);
    const std::vector<Item> items = trained.items();
    test::fill(items, 77);
    const LoadReport report = load(world.all(), folder, items);
    EXPECT_THAT(whole.differing(items), IsEmpty()) << what << ", rank " << world.rank();
    EXPECT_EQ(report.step, 3);
    const std::string me = report.world_size == world.size() ? std::to_string(world.rank()) : "";
    EXPECT_EQ(report.rank_texts.contains("me") ? report.rank_texts.at("me") : "", me);
    EXPECT_EQ(report.facts.integers.at("world_size"), report.world_size);
    EXPECT_EQ(report.wanted_bytes, static_cast<Index>(test::bytes_of(items).size()));
  });
}

TEST(CheckpointOfATree, saved_by_any_number_of_ranks_loads_into_any_other) {
  for (int saved : {1, 2, 3, 4, 7}) {
    const CheckpointFolder root;
    WholeValues whole;
    save_trained(root.path(), {1, saved}, whole);
    verify(Checkpoint::open(root / "step-3"));
    for (int loaded : {1, 2, 3, 4, 7}) {
      expect_loads(root / "step-3", {1, loaded}, whole, fmt::format("{} -> {}", saved, loaded));
    }
  }
}

// Whole tensors on one rank: with seven ranks most own nothing of a unit.
TEST(CheckpointOfATree, blocks_may_change) {
  const CheckpointFolder root;
  WholeValues whole;
  save_trained(root.path(), {1, 7}, whole, true);
  expect_loads(root / "step-3", {1, 7}, whole, "other blocks", false);
  expect_loads(root / "step-3", {1, 3}, whole, "other ranks", true);
}

TEST(CheckpointOfATree, replicas_come_and_go) {
  const MeshShape meshes[] = {{1, 4}, {2, 2}, {4, 1}, {3, 2}};
  for (const MeshShape& saved : meshes) {
    const CheckpointFolder root;
    WholeValues whole;
    save_trained(root.path(), saved, whole);
    const Checkpoint checkpoint = Checkpoint::open(root / "step-3");
    verify(checkpoint);
    // The first replica writes everything, the others nothing.
    Index tensors = 0;
    for (int rank = 0; rank < saved.size(); ++rank) {
      const Manifest& manifest = checkpoint.manifests()[static_cast<std::size_t>(rank)];
      EXPECT_EQ(manifest.files.empty(), rank >= saved.shard) << to_string(saved) << ", rank " << rank;
      for (const StoredFile& file : manifest.files) tensors += file.bytes - file.header_bytes;
    }
    EXPECT_EQ(tensors, whole.bytes());
    for (const MeshShape& loaded : meshes) {
      expect_loads(root / "step-3", loaded, whole, to_string(saved) + " -> " + to_string(loaded));
    }
  }
}

// Parameters without gradient have states like others; frozen ones have none.
TEST(CheckpointOfATree, frozen_and_never_stepped_parameters_are_saved) {
  const CheckpointFolder root;
  WholeValues whole;
  const auto make = [](comm::World& world) {
    const auto model = test::make_tiny_model();
    model->layers[1]->qkv.set_requires_grad(false);
    model->embed.set_requires_grad(false);
    fsdp::FullyShardOptions options;
    options.groups = world.groups(layout::Mesh::shard(world.size()));
    return std::pair(model, fsdp::fully_shard(*model, options));
  };
  test::run_ranks(3, [&](comm::World& world) {
    const auto [model, tree] = make(world);
    const auto items = model_items(tree->sharded_parameters());
    whole.add(items);
    Saver(world.all(), root.path(), small_chunks()).save(3, {.tensors = items});
  });
  test::run_ranks(2, [&](comm::World& world) {
    const auto [model, tree] = make(world);
    const auto items = model_items(tree->sharded_parameters());
    test::fill(items, 3);
    load(world.all(), root / "step-3", items);
    EXPECT_THAT(whole.differing(items), IsEmpty());
    // With an optimizer that the checkpoint knows nothing of.
    const optim::AdamW optimizer(tree, {});
    auto more = items;
    for (Item& item : optimizer_items(optimizer.states())) more.push_back(std::move(item));
    EXPECT_CHECKPOINT_ERROR(load(world.all(), root / "step-3", more), "exp_avg");
  });
}

TEST(CheckpointOfATree, names_may_be_anothers) {
  const CheckpointFolder root;
  const NameMap theirs = [](const std::string& name) { return "model." + name; };
  test::run_ranks(2, [&](comm::World& world) {
    const test::Tree tree = test::make_tree(world, {1, 2});
    const auto items = model_items(tree.root->sharded_parameters(), theirs);
    Saver(world.all(), root.path()).save(1, {.tensors = items});
    EXPECT_NE(Checkpoint::open(root / "step-1").find("model.layer0.qkv"), nullptr);
    load(world.all(), root / "step-1", items);
    EXPECT_CHECKPOINT_ERROR(
        load(world.all(), root / "step-1", model_items(tree.root->sharded_parameters())), "Expected tensor '");
  });
}

// --- what may go wrong ---

TEST(CheckpointErrors, damage_leaves_every_rank_as_it_was) {
  const CheckpointFolder root;
  WholeValues whole;
  save_trained(root.path(), {1, 4}, whole);
  // In one file that only some of the readers need.
  const Checkpoint checkpoint = Checkpoint::open(root / "step-3");
  const StoredFile& file = checkpoint.manifests()[3].files[0];
  const fs::path path = root / "step-3" / file.name;
  std::string bytes = testing::read_bytes(path);
  bytes[bytes.size() - 1] ^= 4;
  testing::write_bytes(path, bytes);
  for (int ranks : {2, 4}) {
    test::run_ranks(ranks, [&](comm::World& world) {
      const Trained trained(world, {1, world.size()}, 1);
      const auto items = trained.items();
      const auto before = test::bytes_of(items);
      EXPECT_CHECKPOINT_ERROR(load(world.all(), root / "step-3", items), file.name);
      EXPECT_EQ(test::bytes_of(items), before) << "rank " << world.rank();
    });
  }
}

TEST(CheckpointErrors, what_does_not_fit_leaves_every_rank_as_it_was) {
  const CheckpointFolder root;
  WholeValues whole;
  save_trained(root.path(), {1, 2}, whole);
  test::run_ranks(2, [&](comm::World& world) {
    const test::Tree tree = test::make_tree(world, {1, 2});
    const optim::AdamW optimizer(tree.root, {.moment_dtype = at::kFloat});  // saved in bf16
    auto items = model_items(tree.root->sharded_parameters());
    for (Item& item : optimizer_items(optimizer.states())) items.push_back(std::move(item));
    const auto before = test::bytes_of(items);
    EXPECT_CHECKPOINT_ERROR(load(world.all(), root / "step-3", items), "never cast");
    auto codes = items;
    codes[tree.root->sharded_parameters().size()].format = "power 32x32";
    EXPECT_CHECKPOINT_ERROR(load(world.all(), root / "step-3", codes), "power 32x32");
    EXPECT_CHECKPOINT_ERROR(
        load(world.all(), root / "step-3", model_items(tree.root->sharded_parameters())), "a use for tensor 'state.");
    const LoadOptions picky{.check = [](const CheckpointIndex&) { throw InvalidArgument("other text"); }};
    EXPECT_INVALID(load(world.all(), root / "step-3", items, picky), "other text");
    EXPECT_EQ(test::bytes_of(items), before);
    EXPECT_NO_THROW(
        load(world.all(), root / "step-3", model_items(tree.root->sharded_parameters()), {.allow_unused = true}));
  });
}

TEST(CheckpointErrors, of_one_rank_are_those_of_all_and_earlier_checkpoints_stay) {
  const CheckpointFolder root;
  WholeValues whole;
  save_trained(root.path(), {1, 3}, whole);
  test::run_ranks(3, [&](comm::World& world) {
    const Trained trained(world, {1, 3}, 1);
    auto items = trained.items();
    if (world.rank() == 1) items[2].tensor.local = at::zeros({9999});
    Saver saver(world.all(), root.path(), small_chunks());
    EXPECT_INVALID(saver.save(4, {.tensors = items}), "rank 1 of 3");
    EXPECT_FALSE(saver.is_busy());
    EXPECT_NO_THROW(saver.save(5, {.tensors = trained.items()}));
  });
  EXPECT_THAT(CheckpointFolders(root.path()).steps(), ElementsAre(3, 5));
  expect_loads(root / "step-3", {1, 2}, whole, "after a failed save");
}

TEST(CheckpointErrors, in_writing_reach_all_ranks_and_leave_no_trace) {
  const CheckpointFolder root;
  WholeValues whole;
  save_trained(root.path(), {1, 3}, whole);
  for (const bool async : {false, true}) {
    test::run_ranks(3, [&](comm::World& world) {
      const Trained trained(world, {1, 3}, 1);
      SaverOptions options = small_chunks();
      options.async = async;
      if (world.rank() == 2) options.on_progress = [](const SaveProgress&) { throw CheckpointError("disk on fire"); };
      Saver saver(world.all(), root.path(), options);
      EXPECT_CHECKPOINT_ERROR(saver.save(4, {.tensors = trained.items()}), "disk on fire (rank 2 of 3)");
      EXPECT_FALSE(saver.is_busy());
    });
    EXPECT_THAT(CheckpointFolders(root.path()).steps(), ElementsAre(3));
    EXPECT_FALSE(fs::exists(CheckpointFolders(root.path()).temporary(4)));
  }
}

TEST(CheckpointErrors, tensors_that_cannot_be_saved_are_named) {
  const CheckpointFolder root;
  test::run_ranks(1, [&](comm::World& world) {
    const test::Tree tree = test::make_tree(world, {1, 1});
    const auto items = model_items(tree.root->sharded_parameters());
    Saver saver(world.all(), root.path());
    const auto refused = [&](const auto& change, const std::string& fragment) {
      auto other = items;
      change(other);
      EXPECT_INVALID(saver.start(1, {.tensors = other}), fragment);
      EXPECT_INVALID(load(world.all(), root.path(), other), fragment);
    };
    refused([](auto& all) { all[1].name = all[0].name; }, "twice");
    refused([](auto& all) { all[1].tensor.placements = {layout::Shard(1)}; }, "Redistribute");
    refused([](auto& all) { all[1].tensor.placements = {layout::Partial()}; }, "Redistribute");
    refused([](auto& all) { all[1].tensor.dtype = at::kComplexFloat; }, "safetensors has");
    refused([](auto& all) { all[1].tensor.dtype = at::kHalf; }, items[1].name);
    refused([](auto& all) { all[1].tensor.owned.end += 1; }, items[1].name);
    EXPECT_INVALID(saver.finish(), "Call start() first");
  });
}

// --- asynchronous ---

// Lets writers wait until a test says so.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

TEST(AsyncSaver, writes_what_was_there_at_start) {
  const CheckpointFolder root;
  WholeValues whole;
  std::vector<std::shared_ptr<Gate>> gates = {std::make_shared<Gate>(), std::make_shared<Gate>()};
  test::run_ranks(2, [&](comm::World& world) {
    const auto gate = gates[static_cast<std::size_t>(world.rank())];
    const Trained trained(world, {1, 2}, 1);
    const auto items = trained.items();
    whole.add(items);
    SaverOptions options = small_chunks();
    options.async = true;
    options.on_progress = [gate](const SaveProgress&) { gate->pass(); };
    Saver saver(world.all(), root.path(), options);
    EXPECT_TRUE(saver.is_written());
    saver.start(3, {.tensors = items});
    EXPECT_TRUE(saver.is_busy());
    EXPECT_FALSE(saver.is_written());
    test::fill(items, 9);  // training goes on
    EXPECT_THAT(saver.folders().steps(), IsEmpty());
    gate->open();
    const SaveReport report = saver.finish();
    EXPECT_EQ(report.step, 3);
    const Checkpoint checkpoint = Checkpoint::open(report.folder);
    Index bytes = 0;
    for (const Manifest& manifest : checkpoint.manifests()) {
      for (const StoredFile& file : manifest.files) bytes += file.bytes - file.header_bytes;
    }
    EXPECT_EQ(report.bytes, bytes);
    load(world.all(), root / "step-3", items);
    EXPECT_THAT(whole.differing(items), IsEmpty());
  });
}

TEST(AsyncSaver, the_next_save_waits_for_the_one_before) {
  const CheckpointFolder root;
  test::run_ranks(3, [&](comm::World& world) {
    const Trained trained(world, {1, 3}, 1);
    SaverOptions options = small_chunks();
    options.async = true;
    options.keep = 2;
    Saver saver(world.all(), root.path(), options);
    EXPECT_FALSE(saver.start(1, {.tensors = trained.items()}));
    for (Index step = 2; step < 6; ++step) {
      const auto before = saver.start(step, {.tensors = trained.items()});
      ASSERT_TRUE(before);
      EXPECT_EQ(before->step, step - 1);
      world.all().barrier();
      EXPECT_EQ(saver.folders().steps().back(), step - 1);
      world.all().barrier();
    }
    saver.finish();
  });
  EXPECT_THAT(CheckpointFolders(root.path()).steps(), ElementsAre(4, 5));
}

TEST(AsyncSaver, a_writer_that_hangs_is_given_up_on_all_ranks) {
  const CheckpointFolder root;
  WholeValues whole;
  save_trained(root.path(), {1, 2}, whole);
  const auto gate = std::make_shared<Gate>();  // outlives the test: the thread holds on to it
  test::run_ranks(2, [&](comm::World& world) {
    const Trained trained(world, {1, 2}, 1);
    SaverOptions options = small_chunks();
    options.async = true;
    options.timeout = std::chrono::milliseconds(1);
    if (world.rank() == 1) options.on_progress = [gate](const SaveProgress&) { gate->pass(); };
    Saver saver(world.all(), root.path(), options);
    saver.start(4, {.tensors = trained.items()});
    EXPECT_CHECKPOINT_ERROR(saver.finish(), "Expected rank 1 of 2 to write its part");
    EXPECT_FALSE(saver.is_busy());
  });
  gate->open();
  EXPECT_THAT(CheckpointFolders(root.path()).steps(), ElementsAre(3));
}

TEST(AsyncSaver, progress_counts_up_to_all_bytes_of_the_rank) {
  const CheckpointFolder root;
  test::run_ranks(2, [&](comm::World& world) {
    const Trained trained(world, {1, 2}, 1);
    std::vector<Index> seen;
    SaverOptions options = small_chunks();
    options.on_progress = [&](const SaveProgress& p) {
      seen.push_back(p.written_bytes);
      EXPECT_LE(p.written_bytes, p.total_bytes);
    };
    Saver saver(world.all(), root.path(), options);
    saver.save(1, {.tensors = trained.items()});
    EXPECT_TRUE(std::ranges::is_sorted(seen));
    EXPECT_EQ(seen.back(), static_cast<Index>(test::bytes_of(trained.items()).size()));
  });
}

// --- which one to resume from ---

TEST(FindCheckpoint, auto_takes_the_newest_and_paths_say_it_themselves) {
  const CheckpointFolder root;
  test::run_ranks(2, [&](comm::World& world) {
    const auto find = [&](const std::string& wanted) { return find_checkpoint(world.all(), wanted, root / "c"); };
    EXPECT_EQ(find("auto"), std::nullopt);
    EXPECT_CHECKPOINT_ERROR(find((root / "c").string()), "checkpoint.resume");
    const test::Tree tree = test::make_tree(world, {1, 2});
    Saver saver(world.all(), root / "c");
    for (Index step : {1, 2}) saver.save(step, {.tensors = model_items(tree.root->sharded_parameters())});
    EXPECT_EQ(find("auto"), root / "c" / "step-2");
    EXPECT_EQ(find((root / "c").string()), root / "c" / "step-2");
    EXPECT_EQ(find((root / "c" / "step-1").string()), root / "c" / "step-1");
    EXPECT_CHECKPOINT_ERROR(find((root / "c" / "step-7").string()), "step-7");
  });
}

}  // namespace
}  // namespace ragged::checkpoint
