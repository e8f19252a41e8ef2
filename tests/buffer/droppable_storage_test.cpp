// The ground under unsharded parameters: bytes go between forward and backward and come back elsewhere, and autograd
// neither notices nor reads what isn't there.
#include "ragged/buffer/droppable_storage.h"

#include <functional>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/comm/compat.h"

namespace ragged::buffer {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

const c10::Device kCpu(c10::kCPU);
constexpr char kError[] = "[parameter] Expected 'wq' to be unsharded";

at::Tensor normal(at::IntArrayRef sizes, std::uint64_t seed, at::ScalarType dtype) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions()).to(dtype);
}

// Memory with room for two images at different addresses.
class TwoPlaces {
 public:
  explicit TwoPlaces(Index bytes) : bytes_(bytes), memory_(at::empty({2 * bytes + 64}, at::kByte)) {}
  void* first() { return memory_.mutable_data_ptr(); }
  void* second() { return static_cast<char*>(memory_.mutable_data_ptr()) + bytes_ + 64; }
  void poison(void* place) { std::memset(place, 0xFF, static_cast<std::size_t>(bytes_)); }  // NaNs in every dtype

 private:
  Index bytes_;
  at::Tensor memory_;
};

using Function = std::function<at::Tensor(const at::Tensor& input, const at::Tensor& weight)>;

struct Case {
  std::string name;
  std::vector<Index> input;
  std::vector<Index> weight;
  Function forward;
};

std::vector<Case> cases() {
  const at::Tensor ids = at::arange(10, at::kLong).remainder(7).view({2, 5});
  return {
      {"linear", {4, 6}, {5, 6}, [](const auto& x, const auto& w) { return at::linear(x, w); }},
      {"embedding", {2, 5, 6}, {7, 6}, [ids](const auto& x, const auto& w) { return at::embedding(w, ids) * x; }},
      {"rms_norm", {4, 6}, {6}, [](const auto& x, const auto& w) { return at::rms_norm(x, {6}, w, 1e-5); }},
      {"attention",
       {1, 2, 5, 8},
       {2, 5, 8},
       [](const auto& x, const auto& w) {
         return at::scaled_dot_product_attention(x, w.unsqueeze(0), w.unsqueeze(0), {}, 0.0, true);
       }},
  };
}

// What the function and its backward give with an ordinary weight.
struct Gradients {
  at::Tensor output, input, weight;
};

Gradients run(
    const Case& c, const at::Tensor& input_value, const at::Tensor& weight, const std::function<void()>& between) {
  const at::Tensor input = input_value.clone().requires_grad_(true);
  const at::Tensor output = c.forward(input, weight);
  between();
  output.backward(normal(output.sizes(), 3, output.scalar_type()));
  return {output.detach(), input.grad(), weight.grad()};
}

TEST(DroppableStorage, lets_backward_run_after_a_refill_at_another_address) {
  for (const Case& c : cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Index offset : {0, 1, 3, 17}) {
        SCOPED_TRACE(c.name + " " + c10::toString(dtype) + " at element " + std::to_string(offset));
        const at::Tensor x = normal(c.input, 1, dtype);
        const at::Tensor w = normal(c.weight, 2, dtype);
        const Gradients want = run(c, x, w.clone().requires_grad_(true), [] {});

        const Index numel = offset + w.numel() + 5;
        const auto bytes = numel * static_cast<Index>(c10::elementSize(dtype));
        TwoPlaces places(bytes);
        DroppableStorage storage(bytes, kCpu, kError, nullptr);
        const at::Tensor weight = storage.tensor(dtype, offset, c.weight).requires_grad_(true);
        const at::Tensor bytes_of_weight = storage.tensor(dtype, offset, c.weight);
        EXPECT_TRUE(weight.is_contiguous());
        EXPECT_EQ(weight.storage_offset(), offset);
        const auto fill = [&](void* place) {
          places.poison(place);
          storage.attach(place);
          at::NoGradGuard no_grad;
          at::AutoDispatchBelowADInplaceOrView below;
          at::Tensor(bytes_of_weight).copy_(w);
        };
        fill(places.first());
        EXPECT_EQ(
            weight.const_data_ptr(),
            static_cast<char*>(places.first()) + offset * static_cast<Index>(w.element_size()));
        const Gradients got = run(c, x, weight, [&] {
          storage.drop();
          places.poison(places.first());
          EXPECT_FALSE(storage.is_resident());
          fill(places.second());
          EXPECT_TRUE(storage.is_resident());
        });
        EXPECT_TRUE(at::equal(got.output, want.output));
        EXPECT_TRUE(at::equal(got.input, want.input));
        EXPECT_TRUE(at::equal(got.weight, want.weight));
        EXPECT_EQ(weight._version(), 0);
        EXPECT_EQ(bytes_of_weight._version(), 0);
      }
    }
  }
}

TEST(DroppableStorage, makes_tensors_with_version_counters_of_their_own) {
  TwoPlaces places(64);
  DroppableStorage storage(64, kCpu, kError, nullptr);
  storage.attach(places.first());
  at::Tensor a = storage.tensor(at::kFloat, 0, {16});
  const at::Tensor b = storage.tensor(at::kFloat, 4, {2, 3});
  a.fill_(1.0);
  EXPECT_EQ(a._version(), 1);
  EXPECT_EQ(b._version(), 0);
  EXPECT_FALSE(b.requires_grad());
  EXPECT_TRUE(at::equal(b, at::ones({2, 3})));
}

TEST(DroppableStorage, raises_its_text_for_any_op_on_dropped_bytes) {
#if !RAGGED_STORAGE_ERROR_TEXT
  GTEST_SKIP() << "this torch can't arm a storage with an error text";
#endif
  TwoPlaces places(64);
  DroppableStorage storage(64, kCpu, kError, nullptr);
  at::Tensor dropped = storage.tensor(at::kFloat, 1, {3, 3});
  at::Tensor other = at::ones({3, 3});
  const std::vector<std::pair<const char*, std::function<void()>>> ops{
      {"mul", [&] { dropped.mul(2.0); }},
      {"sum", [&] { dropped.sum(); }},
      {"copy from", [&] { other.copy_(dropped); }},
      {"copy to", [&] { dropped.copy_(other); }},
      {"matmul", [&] { other.matmul(dropped); }},
      {"linear", [&] { at::linear(other, dropped); }},
      {"embedding", [&] { at::embedding(dropped, at::zeros({2}, at::kLong)); }},
      {"fill", [&] { dropped.zero_(); }},
      {"clone", [&] { dropped.clone(); }},
      {"to", [&] { dropped.to(at::kBFloat16); }},
      {"item", [&] { dropped[0][0].item<float>(); }},
      {"data_ptr", [&] { dropped.const_data_ptr<float>(); }},
      {"mutable_data_ptr", [&] { dropped.mutable_data_ptr<float>(); }},
  };
  const auto expect_errors = [&](const char* text) {
    for (const auto& [name, op] : ops) {
      EXPECT_THAT(op, ThrowsMessage<std::exception>(HasSubstr(text))) << name;
    }
  };
  expect_errors(kError);  // never attached
  storage.attach(places.first());
  for (const auto& [name, op] : ops) EXPECT_NO_THROW(op()) << name;
  storage.drop();
  expect_errors(kError);
  storage.set_error("[parameter] another name");
  expect_errors("[parameter] another name");
  storage.attach(places.second());
  storage.set_error("[parameter] a third");
  for (const auto& [name, op] : ops) EXPECT_NO_THROW(op()) << name;
  storage.drop();
  expect_errors("[parameter] a third");
}

TEST(DroppableStorage, raises_in_backward_too) {
#if !RAGGED_STORAGE_ERROR_TEXT
  GTEST_SKIP() << "this torch can't arm a storage with an error text";
#endif
  TwoPlaces places(64);
  DroppableStorage storage(64, kCpu, kError, nullptr);
  storage.attach(places.first());
  const at::Tensor weight = storage.tensor(at::kFloat, 0, {4, 4}).requires_grad_(true);
  const at::Tensor x = at::ones({2, 4}).requires_grad_(true);
  const at::Tensor y = at::linear(x, weight).sum();
  storage.drop();
  EXPECT_THAT([&] { y.backward(); }, ThrowsMessage<std::exception>(HasSubstr(kError)));
}

// Shapes and metadata never need bytes.
TEST(DroppableStorage, answers_questions_about_shape_while_dropped) {
  DroppableStorage storage(64, kCpu, kError, nullptr);
  const at::Tensor dropped = storage.tensor(at::kBFloat16, 2, {5, 3});
  EXPECT_EQ(dropped.sizes(), (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(dropped.scalar_type(), at::kBFloat16);
  EXPECT_EQ(dropped.view({-1}).numel(), 15);
  EXPECT_EQ(dropped.narrow(0, 1, 2).storage_offset(), 5);
}

TEST(DroppableStorage, is_recognised_by_its_owner) {
  int owner = 0;
  int other = 0;
  TwoPlaces places(64);
  at::Tensor orphan;
  {
    DroppableStorage storage(64, kCpu, kError, &owner);
    const at::Tensor tensor = storage.tensor(at::kFloat, 1, {2, 2});
    const auto expect_owner = [&](void* want) {
      EXPECT_EQ(DroppableStorage::owner_of(tensor), want);
      EXPECT_EQ(DroppableStorage::owner_of(tensor.view({4})), want);
    };
    expect_owner(&owner);
    storage.attach(places.first());
    expect_owner(&owner);
    storage.set_owner(&other);
    expect_owner(&other);
    EXPECT_EQ(tensor.const_data_ptr<float>(), static_cast<float*>(places.first()) + 1);
    storage.drop();
    expect_owner(&other);
    storage.set_owner(nullptr);
    expect_owner(nullptr);
    storage.set_owner(&owner);
    EXPECT_FALSE(is_orphaned(tensor));
    EXPECT_FALSE(lacks_bytes(tensor));
    orphan = tensor;
  }
  EXPECT_TRUE(is_orphaned(orphan));
  EXPECT_FALSE(lacks_bytes(orphan));
  EXPECT_EQ(DroppableStorage::owner_of(orphan), nullptr);
#if RAGGED_STORAGE_ERROR_TEXT
  EXPECT_THAT([&] { orphan.sum(); }, ThrowsMessage<std::exception>(HasSubstr(kError)));
#endif
  for (const at::Tensor& plain : {at::Tensor(), at::ones({3}), at::ones({3}, at::kMeta)}) {
    EXPECT_EQ(DroppableStorage::owner_of(plain), nullptr);
  }
}

// The last tensor may die after its storage object's keeper, and after the memory.
TEST(DroppableStorage, may_be_outlived_while_resident) {
  at::Tensor survivor;
  {
    TwoPlaces places(64);
    DroppableStorage storage(64, kCpu, kError, nullptr);
    storage.attach(places.first());
    survivor = storage.tensor(at::kFloat, 0, {4}).requires_grad_(true);
  }
  EXPECT_TRUE(is_orphaned(survivor));
}

TEST(TensorWithoutBytes, has_a_shape_and_nothing_to_read) {
  const at::Tensor bare = tensor_without_bytes({3, 5}, at::kFloat, kCpu);
  EXPECT_EQ(bare.sizes(), (std::vector<int64_t>{3, 5}));
  EXPECT_TRUE(lacks_bytes(bare));
  EXPECT_FALSE(is_orphaned(bare));
  EXPECT_EQ(DroppableStorage::owner_of(bare), nullptr);
  EXPECT_FALSE(lacks_bytes(tensor_without_bytes({0, 5}, at::kFloat, kCpu)));  // it has all it needs
  EXPECT_FALSE(lacks_bytes(at::ones({2})));
#if RAGGED_STORAGE_ERROR_TEXT
  EXPECT_THAT([&] { bare.sum(); }, ThrowsMessage<std::exception>(HasSubstr("built without bytes")));
#endif
  // It can be given some: set_data between ordinary tensors.
  at::Tensor parameter = bare;
  parameter.requires_grad_(true);
  const at::NoGradGuard no_grad;
  parameter.set_data(at::ones({3, 5}));
  EXPECT_FALSE(lacks_bytes(parameter));
  EXPECT_EQ(parameter.sum().item<float>(), 15.0F);
}

}  // namespace
}  // namespace ragged::buffer
