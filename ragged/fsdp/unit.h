// The C++ front: fully_shard makes a Unit of a torch::nn module, and the root unit owns the tree. Module and names
// stay as they are; a forward goes through the unit.
//
//     for (auto& layer : model->layers) units.push_back(fully_shard(*layer, {.groups = groups}));
//     auto root = fully_shard(*model, {.groups = groups});
//     auto loss = root->call(*model, tokens, targets);     // the model calls its layers by call(*layer, x)
//     loss.backward();
//
// From then on the module's parameters are the *unsharded* ones: they have bytes only between the events of their
// unit, and no .grad outside backward. Optimizers, clipping and checkpoints take the root's sharded parameters.
// Not thread-safe: one thread drives a tree.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "ragged/buffer/byte_counters.h"
#include "ragged/buffer/sharded_tensor.h"
#include "ragged/fsdp/activation_checkpoint.h"
#include "ragged/fsdp/forecast.h"
#include "ragged/fsdp/init.h"
#include "ragged/fsdp/options.h"
#include "ragged/fsdp/shardable.h"
#include "ragged/fsdp/tensor_refs.h"

namespace ragged::fsdp {

class ParamGroup;
class Runtime;

/// What a tree has moved and held so far on this rank, in bytes; see buffer::ByteCounters and StepForecast.
struct RuntimeStats {
  buffer::ByteCounters bytes;
  comm::Traffic traffic;  // of the shard and replicate groups together
  Index image_bytes_in_use = 0;
  Index peak_image_bytes = 0;  // since the last reset_peaks()
  Index peak_reduce_bytes = 0;
  Index pool_allocations = 0;  // ever; must not grow after the second step
  Index pool_reserved_bytes = 0;
  double wait_seconds = 0.0;  // the driving thread waited for communication
};

/// The gradient and parameter shards of one unit, for code that runs over flat memory.
struct FlatShard {
  struct Piece {
    layout::Interval local;  // of the flat tensors below
    int index = 0;           // of the parameter in the unit
    bool has_grad = false;
  };
  int unit = 0;       // as in ShardedTensor
  at::Tensor params;  // 1-D masters
  at::Tensor grads;   // 1-D, same offsets, over the trainable prefix; undefined when there are none
  std::vector<Piece> pieces;
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  /// Runs module.forward(args...) between the unit's events. Tensors are found in arguments and results of type
  /// Tensor, optional, vector, array, pair and tuple of such; anything else passes through untouched.
  template <class Module, class... Args>
  auto call(Module& module, Args&&... args);

  /// Qualified by the root's module: "layers.3"; "" for the root. Before the first forward: the name given by
  /// this unit's own parameters, at best.
  const std::string& name() const;
  bool is_root() const;

  // --- what optimizers, checkpoints and people take; on the root for the whole tree ---
  std::vector<buffer::ShardedTensor> sharded_parameters();
  /// Only those that have one; `local` is a view of the flat gradient shard.
  std::vector<buffer::ShardedTensor> sharded_gradients();
  std::vector<FlatShard> flat_shards();
  /// Bumps the version of every master, so that images gathered before are known to be stale. Optimizers that write
  /// through raw pointers call it after a step.
  void mark_parameters_changed();
  void zero_grad();
  /// Fills masters from (seed, fully qualified name, element index). Needed where the module was built from
  /// deferred_parameter(). Not collective.
  void init_parameters(std::uint64_t seed, const InitFn& rule);
  /// The whole value of one parameter on every rank. Collective.
  at::Tensor full_parameter(const std::string& name);

  // --- behaviour; as in FSDP2 ---
  void set_requires_gradient_sync(bool value, bool recurse = true);
  void set_requires_all_reduce(bool value, bool recurse = true);
  void set_reshard_after_forward(bool value, bool recurse = true);
  void set_runtime_options(const RuntimeOptions& options);

  /// Gathers this unit's parameters now and keeps them until reshard(). Collective.
  void unshard();
  void reshard();
  /// After an exception on all ranks: drops everything half done. The next forward also does it by itself.
  void reset();

  // --- numbers ---
  RuntimeStats stats() const;
  void reset_peaks();
  /// What a step with these settings will move and hold; `micro_batches` forwards and backwards a step.
  StepForecast forecast(int micro_batches = 1, bool sync_each_micro_batch = false) const;
  /// The plan of this unit's bucket; null when it has no parameters of its own.
  const plan::BucketPlan* plan() const;
  const comm::MeshGroups& groups() const;
  std::vector<std::shared_ptr<Unit>> units() const;  // of the tree, the root first, module order

 private:
  friend class Runtime;
  friend class ForwardScope;
  friend std::shared_ptr<Unit> fully_shard(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options);
  Unit();

  bool checkpoints_activations() const;
  std::vector<at::Tensor> own_parameters() const;
  Runtime& runtime() const;
  void for_each_group(bool recurse, const std::function<void(ParamGroup&, int unit)>& visit) const;
  std::shared_ptr<ParamGroup> make_group(
      std::size_t count, const std::function<std::pair<std::string, at::Tensor>(std::size_t)>& param_at) const;

  void announce(torch::nn::Module& module);  // to a Shardable

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Shards every parameter below `module` that no earlier call took. Call it bottom-up: blocks first, the root last.
/// Throws InvalidArgument, before any communication and alike on all ranks, on a module sharded twice, a parameter
/// tied across units, 0-dim or non-contiguous parameters, mixed dtypes, or a policy's nonsense. Keep the returned
/// units of blocks alive until the root is made; the root then owns them.
std::shared_ptr<Unit> fully_shard(torch::nn::Module& module, const FullyShardOptions& options);
/// The same for several modules that become one unit (the way to shard tied parameters).
std::shared_ptr<Unit> fully_shard(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options);

/// Forward of a child that may or may not be sharded.
template <class Module, class... Args>
auto call(Module& module, Args&&... args) {
  if constexpr (std::is_base_of_v<Shardable, Module>) {
    if (auto unit = module.unit()) return unit->call(module, std::forward<Args>(args)...);
  }
  return module.forward(std::forward<Args>(args)...);
}

/// One forward of a unit, for blocks that would rather open it themselves than be called through call().
/// Construction gathers the parameters and replaces the tensors behind `inputs` (casts, and the node that marks the
/// end of backward); finish() replaces the outputs and drops the image. Destroyed unfinished: the forward failed.
class ForwardScope {
 public:
  ForwardScope(Unit& unit, const TensorRefs& inputs);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  void finish(const TensorRefs& outputs);

 private:
  Unit& unit_;
  bool finished_ = false;
};

template <class Module, class... Args>
auto Unit::call(Module& module, Args&&... args) {
  std::tuple<std::decay_t<Args>...> inputs(std::forward<Args>(args)...);
  TensorRefs input_refs;
  collect_tensors(inputs, input_refs);
  ForwardScope scope(*this, input_refs);
  auto run = [&module](auto& values) {
    return std::apply([&module](auto&... value) { return module.forward(value...); }, values);
  };
  auto outputs = checkpoints_activations() ? checkpointed(run, inputs, own_parameters()) : run(inputs);
  TensorRefs output_refs;
  collect_tensors(outputs, output_refs);
  scope.finish(output_refs);
  return outputs;
}

}  // namespace ragged::fsdp
