// The C++ row of the comparison with other systems: a C++ model, sharded and stepped by the C++ library, behind two
// functions that Python calls, so that one set of instruments measures all systems. A benchmark's, no API.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include "ragged/base/error.h"
#include "ragged/comm/world.h"
#include "ragged/fsdp/unit.h"
#include "ragged/optim/adamw.h"
#include "ragged/train/language_model.h"

namespace ragged::bench {
namespace {

namespace py = pybind11;

using Module = train::ShardableModule;
using Values = std::map<std::string, at::Tensor>;

/// What forward and sharding need to know of a model.
struct Model {
  std::shared_ptr<Module> root;
  std::vector<Module*> layers{};
  /// One step's data -> mean loss, through the root's unit; null: unsharded.
  std::function<at::Tensor(fsdp::Unit*, const at::Tensor&)> loss{};
};

Model make_decoder(const train::ModelConfig& config) {
  const auto model = train::make_model(config, train::parameters_on(c10::kCPU));
  Model made{.root = model, .layers = model->layer_modules()};
  made.loss = [model](fsdp::Unit* unit, const at::Tensor& data) {
    const Index length = data.size(1) - 1;
    const at::Tensor tokens = data.narrow(1, 0, length).contiguous();
    const at::Tensor targets = data.narrow(1, 1, length).contiguous();
    return unit ? unit->call(*model, tokens, targets) : model->forward(tokens, targets);
  };
  return made;
}

/// y = x W^T + b, or x + that.
struct TinyLinear : Module {
  TinyLinear(Index dim, bool is_residual) : residual(is_residual) {
    const auto make = train::parameters_on(c10::kCPU);
    auto& holder = residual ? *register_module("lin", std::make_shared<Module>()) : *this;
    weight = holder.register_parameter("weight", make({dim, dim}));
    bias = holder.register_parameter("bias", make({dim}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::linear(x, weight, bias);
    return residual ? x + y : y;
  }

  bool residual;
  at::Tensor weight, bias;
};

/// The chain of many tiny units.
struct TinyChain : Module {
  TinyChain(Index dim, Index count) {
    inp = register_module("inp", std::make_shared<TinyLinear>(dim, false));
    const auto list = register_module("layers", std::make_shared<Module>());
    for (Index i = 0; i < count; ++i) {
      layers.push_back(list->register_module(std::to_string(i), std::make_shared<TinyLinear>(dim, true)));
    }
  }
  at::Tensor forward(const at::Tensor& data) {
    at::Tensor x = fsdp::call(*inp, data);
    for (const auto& layer : layers) x = fsdp::call(*layer, x);
    return x.to(at::kFloat).square().mean();
  }
  std::shared_ptr<TinyLinear> inp;
  std::vector<std::shared_ptr<TinyLinear>> layers;
};

Model make_tiny(Index dim, Index count) {
  const auto model = std::make_shared<TinyChain>(dim, count);
  Model made{.root = model};
  for (const auto& layer : model->layers) made.layers.push_back(layer.get());
  made.loss = [model](fsdp::Unit* unit, const at::Tensor& data) {
    return unit ? unit->call(*model, data) : model->forward(data);
  };
  return made;
}

Model make_peer(const py::dict& sizes) {
  const auto kind = sizes["kind"].cast<std::string>();
  const auto size = [&](const char* name) { return sizes[name].cast<Index>(); };
  if (kind == "tiny") return make_tiny(size("dim"), size("layers"));
  RAGGED_CHECK(
      kind == "llama" || kind == "moe",
      "[Trainer] Expected a model that there is in C++, but got '{}'. There are llama, moe and tiny.", kind);
  train::ModelConfig config;
  config.kind = kind;
  config.dim = size("dim");
  config.layers = size("layers");
  config.heads = config.kv_heads = size("heads");
  config.feed_forward = size("feed_forward");
  config.experts = size("experts");
  config.experts_per_token = size("experts_per_token");
  config.vocabulary = size("vocabulary");
  return make_decoder(config);
}

/// The parameters are the caller's tensors from now on: a copy would count as memory of ours.
void fill(const Module& module, const Values& values) {
  const at::NoGradGuard no_grad;
  for (const auto& item : module.named_parameters()) {
    const auto found = values.find(item.key());
    RAGGED_CHECK(
        found != values.end() && found->second.sizes() == item.value().sizes(),
        "[Trainer] Expected an initial value of the parameter's shape, but got none (param '{}').", item.key());
    item.value().set_data(found->second);
  }
}

/// What trains: data -> this rank's loss, detached; then a step. Not thread-safe; Python's lock is released meanwhile.
class Trainer {
 public:
  virtual ~Trainer() = default;
  virtual at::Tensor forward_backward(const at::Tensor& data) = 0;
  virtual void update() = 0;
};

class Sharded : public Trainer {
 public:
  Sharded(Model model, const comm::RankEnv& env, bool bf16, double lr, bool over_weights)
      : world_(comm::World::connect(env)), model_(std::move(model)), lr_(lr) {
    fsdp::FullyShardOptions options;
    options.groups = world_.groups(layout::Mesh::shard(world_.size()));
    if (bf16) options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    if (over_weights) options.gradient_memory = fsdp::GradientMemory::kOverWeights;
    std::vector<std::shared_ptr<fsdp::Unit>> layers;
    for (Module* layer : model_.layers) layers.push_back(fsdp::fully_shard(*layer, options));
    root_ = fsdp::fully_shard(*model_.root, options);
  }
  at::Tensor forward_backward(const at::Tensor& data) override {
    const at::Tensor loss = model_.loss(root_.get(), data);
    loss.backward();
    return loss.detach();
  }
  void update() override {
    // Not before the caller has let its whole tensors go.
    if (!adamw_) adamw_ = std::make_unique<optim::AdamW>(root_, optim::AdamWOptions{.lr = lr_, .weight_decay = 0.0});
    adamw_->step();
    root_->zero_grad();
  }

 private:
  comm::World world_;
  Model model_;
  std::shared_ptr<fsdp::Unit> root_;
  double lr_;
  std::unique_ptr<optim::AdamW> adamw_;
};

/// One process, nothing sharded, torch's fused AdamW: what sharding is compared with.
class Unsharded : public Trainer {
 public:
  Unsharded(Model model, bool bf16, double lr) : model_(std::move(model)), lr_(lr) {
    if (bf16) model_.root->to(at::kBFloat16);
    params_ = model_.root->parameters();
    for (const at::Tensor& param : params_) {
      first_.push_back(at::zeros_like(param));
      second_.push_back(at::zeros_like(param));
      steps_.push_back(at::zeros({}));
    }
  }
  at::Tensor forward_backward(const at::Tensor& data) override {
    const at::Tensor loss = model_.loss(nullptr, data);
    loss.backward();
    return loss.detach();
  }
  void update() override {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (const at::Tensor& param : params_) grads.push_back(param.grad());
    for (at::Tensor& step : steps_) step.add_(1);
    at::_fused_adamw_(
        params_, grads, first_, second_, {}, steps_, lr_, 0.9, 0.999, /*weight_decay=*/0.0, 1e-8, /*amsgrad=*/false,
        /*maximize=*/false);
    for (const at::Tensor& param : params_) param.mutable_grad().reset();
  }

 private:
  Model model_;
  double lr_;
  std::vector<at::Tensor> params_, first_, second_, steps_;
};

std::unique_ptr<Trainer> make_trainer(
    const py::dict& sizes, const Values& values, int rank, int world, int port, bool bf16, double lr, bool sharded,
    bool over_weights) {
  Model model = make_peer(sizes);
  fill(*model.root, values);
  const py::gil_scoped_release no_gil;
  if (!sharded) return std::make_unique<Unsharded>(std::move(model), bf16, lr);
  comm::RankEnv env;
  env.rank = env.local_rank = rank;
  env.world_size = env.local_world_size = world;
  env.master_port = static_cast<std::uint16_t>(port);
  return std::make_unique<Sharded>(std::move(model), env, bf16, lr, over_weights);
}

}  // namespace
}  // namespace ragged::bench

PYBIND11_MODULE(ragged_peer, m) {
  namespace py = pybind11;
  using ragged::bench::Trainer;
  py::module_::import("torch");
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Trainer>(m, "Trainer")
      .def(
          py::init(&ragged::bench::make_trainer), py::arg("sizes"), py::arg("values"), py::arg("rank"),
          py::arg("world"), py::arg("port"), py::arg("bf16"), py::arg("lr"), py::arg("sharded"),
          py::arg("over_weights"),
          "sizes: ModelConfig as a dict; values: initial values by name; port: of this machine, for the ranks' store; "
          "over_weights: gradients are written where the weights lay.")
      .def("forward_backward", &Trainer::forward_backward, ReleaseGil(), "data -> this rank's mean loss, detached")
      .def("update", &Trainer::update, ReleaseGil(), "Steps AdamW without weight decay and drops gradients.");
}
