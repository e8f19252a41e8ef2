// How ranks find each other, and what they are told when one of them is missing, late or elsewhere.
#include <atomic>
#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "ragged/comm/nccl_backend.h"
#include "tests/comm/hand_plan.h"
#include "tests/comm/recorded.h"
#include "tests/support/expect_error.h"
#include "tests/support/ranks.h"

namespace ragged::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

// One thread a rank, each with its own store connection; their CommErrors, by rank ("" where there was none).
std::vector<std::string> comm_errors(int world_size, const std::function<void(int rank)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      std::string& error = errors[static_cast<std::size_t>(rank)];
      try {
        body(rank);
      } catch (const CommError& e) {
        error = e.what();
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << " threw another kind: " << e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// The same over Gloo groups on a store in memory. Nobody leaves before everybody is done.
std::vector<std::string> comm_errors(
    int world_size, const comm::WorldOptions& options, const std::function<void(comm::World&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> done = 0;
  return comm_errors(world_size, [&](int rank) {
    comm::World world = comm::World::over_store(store, rank, world_size, options);
    struct Leave {
      std::atomic<int>& done;
      int all;
      ~Leave() {
        ++done;
        while (done < all) std::this_thread::sleep_for(milliseconds(1));
      }
    } leave{done, world_size};
    body(world);
  });
}

comm::WorldOptions checked() {
  comm::WorldOptions options = quick();
  options.comm.check_order = true;
  return options;
}

// --- order ---

void run_different_units(comm::World& world) {
  const at::Tensor tensor = at::zeros({4});
  world.all().all_reduce_sum(tensor, "embed").wait();
  world.all().all_reduce_sum(tensor, world.rank() == 1 ? "layers.1" : "layers.0").wait();
}

TEST(Order, different_units_are_an_error_that_names_each_ranks_step) {
  const auto errors = comm_errors(3, checked(), run_different_units);
  EXPECT_THAT(
      errors,
      Each(AllOf(
          HasSubstr("rank 0: #2 all_reduce 'layers.0'"), HasSubstr("rank 1: #2 all_reduce 'layers.1'"),
          HasSubstr("rank 2: #2 all_reduce 'layers.0'"))));
  EXPECT_THAT(errors[1], HasSubstr("rank 1 of 3"));
}

TEST(Order, is_checked_when_the_environment_says_so) {
  const Variable variable("RAGGED_CHECK", "1");
  EXPECT_THAT(comm_errors(2, quick(), run_different_units), Each(HasSubstr("rank 1: #2 all_reduce 'layers.1'")));
}

TEST(Order, is_not_checked_when_the_environment_says_so) {
  const Variable variable("RAGGED_CHECK", "0");
  EXPECT_THAT(comm_errors(2, quick(), run_different_units), Each(""));
}

TEST(Order, refuses_other_values_of_the_variable) {
  const Variable variable("RAGGED_CHECK", "yes");
  EXPECT_INVALID(comm::World::over_store(nullptr, 0, 1, {}), "Expected RAGGED_CHECK to be 0 or 1, but got 'yes'");
}

TEST(Order, different_operations_are_an_error_too) {
  const auto plan = make_hand_plan({.world_size = 2, .first_shard = 2, .second_shard = 1, .ragged = {1, 1}});
  const auto errors = comm_errors(2, checked(), [&](comm::World& world) {
    const at::Tensor image = at::zeros({plan.image_numel()});
    if (world.rank() == 0) {
      world.all().all_gather(plan.segments, image, "layers.3").wait();
    } else {
      world.all().broadcast(image, 0, "layers.3").wait();
    }
  });
  EXPECT_THAT(
      errors, Each(AllOf(HasSubstr("rank 0: #1 all_gather 'layers.3'"), HasSubstr("rank 1: #1 broadcast 'layers.3'"))));
}

TEST(Order, tells_long_names_apart_at_their_ends) {
  const std::string shared(200, 'x');
  const auto errors = comm_errors(2, checked(), [&](comm::World& world) {
    world.all().all_reduce_sum(at::zeros({1}), shared + (world.rank() == 0 ? ".a" : ".b")).wait();
  });
  EXPECT_THAT(errors, Each(HasSubstr("ranks are about to do different things")));
}

TEST(Order, checks_cost_nothing_when_ranks_agree) {
  EXPECT_THAT(
      comm_errors(
          3, checked(),
          [](comm::World& world) {
            const at::Tensor tensor = at::ones({1});
            for (int i = 0; i < 3; ++i) world.all().all_reduce_sum(tensor, "unit").wait();
            EXPECT_EQ(tensor.item<float>(), 27.0F);
            comm::Traffic want;
            want.all_reduces = 3;
            want.all_reduced_bytes = 12;
            EXPECT_EQ(world.all().traffic(), want);
          }),
      Each(""));
}

// --- time ---

// Rank 1 never comes, but keeps its connections open until the others gave up.
std::vector<std::string> wait_for_a_stalled_rank(
    const comm::WorldOptions& options, const std::function<comm::Work(comm::World&)>& issue) {
  return comm_errors(3, options, [&](comm::World& world) {
    if (world.rank() == 1) return;
    const auto start = Clock::now();
    try {
      issue(world).wait();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CommError&) {
      EXPECT_LT(seconds_since(start), 5.0);
      // The group is dead: the next call doesn't wait again.
      const auto again = Clock::now();
      EXPECT_THAT(
          [&] { world.all().all_reduce_sum(at::zeros({1}), "layers.4").wait(); },
          testing::ThrowsMessage<CommError>(AllOf(HasSubstr("Expected a live group 'world'"), HasSubstr("layers.3"))));
      EXPECT_LT(seconds_since(again), 0.25);
      throw;
    }
  });
}

TEST(Stall, is_an_error_that_names_operation_unit_and_rank) {
  const auto plan = make_hand_plan({.world_size = 3, .first_shard = 5000, .second_shard = 1, .ragged = {1, 1, 1}});
  const at::Tensor image = at::zeros({3, plan.image_numel()});
  // With a deadline of our own the backend's operations would go on; they must not hold anybody up.
  comm::WorldOptions own_deadline = quick(60);
  own_deadline.comm.deadline = milliseconds(300);
  comm::WorldOptions groups = quick();
  groups.timeout = milliseconds(300);
  const auto start = Clock::now();
  for (const comm::WorldOptions& options : {own_deadline, groups}) {
    const auto gather = wait_for_a_stalled_rank(options, [&](comm::World& world) {
      return world.all().all_gather(plan.segments, image[world.rank()], "layers.3");
    });
    for (const int rank : {0, 2}) {
      EXPECT_THAT(
          gather[static_cast<std::size_t>(rank)],
          AllOf(
              HasSubstr("[all_gather]"), HasSubstr("unit 'layers.3'"), HasSubstr(fmt::format("rank {} of 3", rank)),
              HasSubstr("within 0.3 s"), HasSubstr("group 'world'")));
    }
    EXPECT_EQ(gather[1], "");
  }
  EXPECT_LT(seconds_since(start), 20.0);
}

TEST(Stall, ends_reductions_too) {
  const auto plan =
      make_hand_plan({.world_size = 3, .first_shard = 4, .second_shard = 1, .ragged = {1, 1, 1}, .first_owner = 1});
  comm::WorldOptions options = quick();
  options.timeout = milliseconds(300);
  const auto errors = wait_for_a_stalled_rank(options, [&](comm::World& world) {
    const at::Tensor image = at::zeros({plan.image_numel()});
    const at::Tensor shard = at::zeros({plan.local_numel(world.rank())});
    comm::ReduceScatter args{.segments = plan.segments, .image = image, .staging = {}, .shard = shard};
    args.staging = at::zeros({world.all().staging_numel(args)});
    return world.all().reduce_scatter(args, "layers.3");
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("[reduce_scatter]"), HasSubstr("unit 'layers.3'"), HasSubstr("rank 0 of 3")));
}

TEST(Stall, is_seen_by_the_order_check) {
  comm::WorldOptions options = checked();
  options.timeout = milliseconds(300);
  const auto errors = wait_for_a_stalled_rank(
      options, [&](comm::World& world) { return world.all().all_reduce_sum(at::zeros({1}), "layers.3"); });
  EXPECT_THAT(errors[2], AllOf(HasSubstr("[all_reduce]"), HasSubstr("unit 'layers.3'"), HasSubstr("rank 2 of 3")));
}

// Once it has thrown, the image is its owner's again: a peer that comes late writes nothing into it.
TEST(Stall, ends_writes_before_it_throws) {
  const auto plan = make_hand_plan({.world_size = 2, .first_shard = 5000, .second_shard = 10, .ragged = {1, 4}});
  comm::WorldOptions options = quick(20);
  options.comm.deadline = milliseconds(200);
  std::atomic<bool> gave_up = false;
  std::atomic<bool> came_late = false;
  comm_errors(2, options, [&](comm::World& world) {
    const at::Tensor image = at::zeros({plan.image_numel()});
    const auto gather = [&] { world.all().all_gather(plan.segments, image, "layers.3").wait(); };
    if (world.rank() == 1) {
      while (!gave_up) std::this_thread::sleep_for(milliseconds(1));
      EXPECT_THROW(gather(), CommError);
      came_late = true;
    } else {
      EXPECT_THROW(gather(), CommError);
      image.fill_(7.0);
      gave_up = true;
      while (!came_late) std::this_thread::sleep_for(milliseconds(1));
      EXPECT_TRUE(at::equal(image, at::full_like(image, 7.0)));
    }
  });
}

TEST(Stall, can_be_abandoned) {
  comm::WorldOptions options = quick();
  options.timeout = milliseconds(300);
  comm_errors(2, options, [](comm::World& world) {
    if (world.rank() == 1) return;
    comm::Work work = world.all().all_reduce_sum(at::zeros({1}), "unit");
    comm::Work copy = work;
    EXPECT_TRUE(work.pending());
    work.abandon();  // swallows the time-out
    EXPECT_FALSE(work.pending());
    copy.wait();  // stands for the same operation
    comm::Work().abandon();
    EXPECT_THAT(
        [&] { world.all().all_reduce_sum(at::zeros({1}), "unit"); },
        testing::ThrowsMessage<CommError>(HasSubstr("Expected a live group")));
  });
}

// --- worlds and groups ---

TEST(World, of_one_needs_no_store) {
  comm::World world = comm::World::connect({});
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.all().size(), 1);
  const comm::MeshGroups groups = world.groups(layout::Mesh::shard(1));
  EXPECT_EQ(groups.shard.size(), 1);
  EXPECT_EQ(groups.replicate.size(), 1);
}

TEST(World, refuses_ranks_out_of_range) {
  EXPECT_INVALID(comm::World::over_store(nullptr, 0, 0, {}), "Expected a world size of at least 1, but got 0");
  EXPECT_INVALID(comm::World::over_store(nullptr, 2, 2, {}), "Expected a rank in 0..1, but got 2");
  EXPECT_INVALID(comm::World::over_store(nullptr, -1, 2, {}), "but got -1");
}

// Who is in a group: each member adds a one at its global rank.
std::vector<int> members(const comm::Communicator& communicator, int rank, int world_size) {
  const at::Tensor ones = at::zeros({world_size});
  ones[rank] = 1.0;
  communicator.all_reduce_sum(ones, "members").wait();
  std::vector<int> found;
  for (int r = 0; r < world_size; ++r) {
    if (ones[r].item<float>() > 0) found.push_back(r);
  }
  return found;
}

TEST(Groups, hold_the_ranks_of_their_mesh_dim) {
  const auto of = [](layout::DimRole role) { return role == layout::DimRole::kShard ? "fsdp" : "ddp"; };
  using layout::DimRole;
  std::vector<layout::Mesh> meshes{layout::Mesh::shard(4), layout::Mesh::hybrid(2, 2), layout::Mesh::hybrid(4, 1)};
  // Shard the slow dim; and ranks in an order of one's own.
  meshes.emplace_back(std::vector<layout::MeshDim>{
      {of(DimRole::kShard), 2, DimRole::kShard}, {of(DimRole::kReplicate), 2, DimRole::kReplicate}});
  meshes.emplace_back(
      std::vector<layout::MeshDim>{{"ddp", 2, DimRole::kReplicate}, {"fsdp", 2, DimRole::kShard}},
      std::vector<int>{3, 0, 2, 1});
  run_ranks(
      4,
      [&](comm::World& world) {
        for (const layout::Mesh& mesh : meshes) {
          SCOPED_TRACE(layout::to_string(mesh));
          const comm::MeshGroups groups = world.groups(mesh);
          EXPECT_EQ(groups.mesh, mesh);
          EXPECT_EQ(groups.rank, world.rank());
          for (const DimRole role : {DimRole::kShard, DimRole::kReplicate}) {
            const comm::Communicator& group = role == DimRole::kShard ? groups.shard : groups.replicate;
            const int dim = mesh.find(role);
            std::vector<int> want{world.rank()};
            if (dim >= 0) want = mesh.group(dim, world.rank());
            EXPECT_EQ(group.size(), static_cast<int>(want.size()));
            // The rank in the group is the position in the mesh, whatever the global ranks.
            EXPECT_EQ(want[static_cast<std::size_t>(group.rank())], world.rank());
            std::sort(want.begin(), want.end());
            if (group.size() > 1) {
              EXPECT_EQ(members(group, world.rank(), 4), want);
            }
          }
        }
      },
      quick());
}

TEST(Groups, must_cover_the_world) {
  run_ranks(
      2,
      [&](comm::World& world) {
        EXPECT_INVALID(world.groups(layout::Mesh::shard(1)), "[groups] Expected a mesh that holds each of the 2 ranks");
        EXPECT_INVALID(world.groups(layout::Mesh::shard(3)), "Expected a mesh that holds each of the 2 ranks once");
        EXPECT_INVALID(world.groups(layout::Mesh::hybrid(2, 2)), "product of its sizes equal to the world size");
        const layout::Mesh elsewhere({{"shard", 2, layout::DimRole::kShard}}, {0, 2});
        EXPECT_INVALID(world.groups(elsewhere), "Expected a mesh that holds each of the 2 ranks once");
        EXPECT_EQ(world.groups(layout::Mesh::shard(2)).shard.size(), 2);  // nothing was left half done
      },
      quick());
}

TEST(Groups, name_themselves_in_errors) {
  comm::WorldOptions options = quick();
  options.timeout = milliseconds(400);
  const auto errors = comm_errors(2, options, [](comm::World& world) {
    const comm::MeshGroups groups = world.groups(layout::Mesh::shard(2));
    if (world.rank() == 1) return;
    groups.shard.all_reduce_sum(at::zeros({1}), "unit").wait();
  });
  EXPECT_THAT(errors[0], HasSubstr("group 'mesh0/shard/0'"));
}

TEST(World, says_who_does_not_arrive) {
  comm::WorldOptions options = quick();
  options.timeout = milliseconds(300);
  EXPECT_THAT(
      [&] { comm::World::over_store(c10::make_intrusive<c10d::HashStore>(), 1, 3, options); },
      testing::ThrowsMessage<CommError>(AllOf(
          HasSubstr("[connect] Expected all 3 ranks of group 'world' to arrive within 0.3 s"),
          HasSubstr("rank 1 of 3"))));
}

// --- over sockets ---

std::uint16_t free_port() {
  const int handle = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  bind(handle, reinterpret_cast<sockaddr*>(&address), length);
  getsockname(handle, reinterpret_cast<sockaddr*>(&address), &length);
  close(handle);
  return ntohs(address.sin_port);
}

comm::RankEnv env_of(int rank, int world_size, std::uint16_t port) {
  comm::RankEnv env;
  env.rank = env.local_rank = rank;
  env.world_size = env.local_world_size = world_size;
  env.master_port = port;
  return env;
}

void expect_connected(comm::World& world, int rank, int world_size) {
  EXPECT_EQ(world.rank(), rank);
  EXPECT_EQ(world.size(), world_size);
  EXPECT_EQ(static_cast<int>(members(world.all(), rank, world_size).size()), world_size);
  world.all().barrier();
}

TEST(Connect, meets_at_a_store_that_rank_0_serves) {
  const std::uint16_t port = free_port();
  EXPECT_THAT(
      comm_errors(
          3,
          [&](int rank) {
            comm::World world = comm::World::connect(env_of(rank, 3, port), quick());
            expect_connected(world, rank, 3);
          }),
      Each(""));
}

// torchrun's agent serves the store and outlives the workers: restarts meet the keys of the attempts before them.
TEST(Connect, never_binds_beside_an_agent_and_survives_restarts) {
  c10d::TCPStoreOptions tcp;
  tcp.port = 0;
  tcp.isServer = true;
  tcp.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_THAT(
        comm_errors(
            2,
            [&](int rank) {
              comm::RankEnv env = env_of(rank, 2, agent->getPort());
              env.agent_store = true;
              env.restart_count = attempt;
              comm::World world = comm::World::connect(env, quick());
              expect_connected(world, rank, 2);
            }),
        Each(""))
        << "attempt " << attempt;
  }
}

TEST(Connect, says_where_nobody_serves) {
  comm::WorldOptions options = quick();
  options.timeout = milliseconds(500);
  const std::uint16_t port = free_port();
  EXPECT_THAT(
      [&] { comm::World::connect(env_of(1, 2, port), options); },
      testing::ThrowsMessage<CommError>(AllOf(
          HasSubstr(fmt::format("[connect] Expected a store at 127.0.0.1:{}", port)), HasSubstr("rank 1 of 2"),
          HasSubstr("Check MASTER_ADDR and MASTER_PORT"))));
}

// --- profiler and NCCL ---

TEST(Profiler, sees_operation_and_unit) {
  const auto plan = make_hand_plan({.world_size = 2, .first_shard = 2, .second_shard = 1, .ragged = {1, 1}});
  run_ranks(
      2,
      [&](comm::World& world) {
        const at::Tensor image = at::zeros({plan.image_numel()});
        const at::Tensor shard = at::zeros({plan.local_numel(world.rank())});
        comm::ReduceScatter args{.segments = plan.segments, .image = image, .staging = {}, .shard = shard};
        args.staging = at::zeros({world.all().staging_numel(args)});
        const Recorded recorded;
        world.all().all_gather(plan.segments, image, "layers.3").wait();
        world.all().reduce_scatter(args, "layers.4").wait();
        world.all().all_reduce_sum(image, "used flags").wait();
        world.all().broadcast(image, 0, "").wait();
        EXPECT_THAT(
            recorded.all(),
            testing::IsSupersetOf(
                {"ragged::all_gather layers.3", "ragged::wait layers.3", "ragged::reduce_scatter layers.4",
                 "ragged::wait layers.4", "ragged::all_reduce used flags", "ragged::broadcast "}));
      },
      quick());
}

// A world of two NCCL ranks needs two devices; one shows that the plug-in loads and makes a working group.
TEST(Nccl, makes_a_group_where_there_is_a_device) {
  const c10::Device device(c10::kCUDA, 0);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = comm::make_nccl_backend(store, 0, 1, device, std::chrono::seconds(20));
  } catch (const CommError& e) {
    EXPECT_THAT(e.what(), HasSubstr("[nccl] Expected to"));
    if (std::string(e.what()).find("libragged_nccl.so") != std::string::npos) {
      GTEST_SKIP() << "the NCCL plug-in wasn't built or can't be loaded here: " << e.what();
    }
    if (at::hasCUDA()) throw;
    GTEST_SKIP() << "torch reports no CUDA device: " << e.what();
  }
  if (!at::hasCUDA()) GTEST_SKIP() << "torch reports no CUDA device";
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 1);
  group->setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::NCCL, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
  std::vector<at::Tensor> tensors{at::ones({4}, device)};
  group->allreduce(tensors)->wait();
  EXPECT_TRUE(at::equal(tensors[0].cpu(), at::ones({4})));
}

}  // namespace
}  // namespace ragged::test
