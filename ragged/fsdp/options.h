// What a user says about one fully_shard call: values only. Names and defaults are FSDP2's where it has them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/buffer/pool.h"
#include "ragged/comm/world.h"
#include "ragged/plan/block.h"
#include "ragged/plan/planner.h"

namespace ragged::fsdp {

/// dtypes of one unit. Masters, gradients and optimizer states stay in the parameters' own dtype.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype{};   // of the gathered image; none: the parameters' own
  std::optional<at::ScalarType> reduce_dtype{};  // of gradients on the wire; none: as param_dtype
  std::optional<at::ScalarType> output_dtype{};  // floating outputs are cast to it
  bool cast_forward_inputs = true;               // floating inputs are cast to param_dtype
};

/// A parameter as a shard policy sees it. `name` is relative to the module given to fully_shard.
struct ParamInfo {
  std::string name;
  std::vector<Index> shape;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;
};

/// Returns the block of a parameter that must stay on one rank; nullopt: 16 bytes. Must return the same on all ranks.
using ShardPolicy = std::function<std::optional<plan::Block>(const ParamInfo&)>;

/// Whether fsdp::linear, grouped_linear and embedding compute the gradients of their weights where these are reduced,
/// instead of leaving them to be copied there.
enum class GradientsInPlace {
  kNo,
  /// Where the outcome has the bits of a copy: weights that are reduced in the dtype they compute in, and one addend a
  /// backward and parameter computed in place, any others added to it.
  kSameBits,
  /// Wherever it can be. Later addends are accumulated by the product itself, and products of a lower precision than
  /// the reduction's aren't rounded before: at least as exact, not the same bits.
  kAlways,
};

/// What gradients are reduced from. [Note: gradients over weights]
/// Once backward has computed the gradient of a weight, and nobody holds the weight any more (images that nobody holds,
/// runtime.h), its place in the image is free. kOverWeights writes the gradient there, where both have one dtype, and
/// the image becomes the reduce buffer: a unit in backward takes one buffer, not two. Where somebody does hold the
/// weight (a second use, a graph that is kept), in nested backwards, in units that are called several times, and where
/// the image is to stay, the unit takes a buffer of its own as ever. What no reference tells of is a region *inside* a
/// unit under activation checkpointing that reads the weight of another part of the unit without being differentiated
/// by it (detach()): run again, it would read the gradient. Hence the user's choice.
enum class GradientMemory { kOwn, kOverWeights };

struct FullyShardOptions {
  comm::MeshGroups groups{};
  MixedPrecision mixed_precision{};
  ShardPolicy shard_policy{};
  /// How the unit's bucket is laid out. World size, unit, alignment and first owner are filled in. Collectives that are
  /// to be FSDP2's take one uniform segment, whatever this says.
  plan::PlanOptions planning{};
  /// true: drop the image after forward and gather again in backward (ZeRO-3). false: keep it until backward
  /// (ZeRO-2). none: true, but false for the root.
  std::optional<bool> reshard_after_forward{};
  GradientsInPlace gradients_in_place = GradientsInPlace::kSameBits;
  GradientMemory gradient_memory = GradientMemory::kOwn;
  /// Keep no activations of this unit: run its forward again in backward. No unit may lie inside it.
  bool activation_checkpointing = false;
  /// Broadcast rank 0's initial values, where ranks may have initialised differently.
  bool sync_from_rank0 = false;
  /// Parameters to leave alone: neither sharded nor reduced.
  std::vector<at::Tensor> ignored_params{};
};

/// What holds for a whole tree of units; taken from the root's call.
struct RuntimeOptions {
  int forward_prefetch = 0;  // units gathered ahead in forward, in the order of the last one
  /// Units gathered ahead in backward. None: 1; on a CPU, where transfers and computation share the cores, 0.
  std::optional<int> backward_prefetch{};
  /// A unit's reduction runs while the next unit computes, which takes a second reduce buffer. false: backward waits
  /// for each. None: true; on a CPU false.
  std::optional<bool> overlap_reductions{};
  /// kReturn: images, reduce buffers, staging and gradients go back to the allocator as soon as nobody needs them, so
  /// that a process holds what the plan says is alive at that moment, and no more. Costs the allocator's time in each
  /// step; on a CPU alone, and the default there.
  std::optional<buffer::FreeSlots> free_slots{};
  /// Every rank uses the same parameters in each step: skips the exchange of used-flags.
  bool static_use = false;
  /// Units whose images are small are gathered together, and reduced together, as long as a collective moves no more
  /// bytes than this; see [Note: merged collectives] in merge.h. As many bytes of images and of reduce buffers can be
  /// alive besides. 0: each unit by itself. none: kMergeBytes. Only among CPUs that communicate by Gloo, and not where
  /// collectives are to be FSDP2's.
  std::optional<Index> merge_bytes{};

  /// With every choice that was left open made for the device.
  RuntimeOptions on(c10::Device device) const {
    RuntimeOptions chosen = *this;
    if (!backward_prefetch) chosen.backward_prefetch = device.is_cpu() ? 0 : 1;
    if (!overlap_reductions) chosen.overlap_reductions = !device.is_cpu();
    if (!free_slots) chosen.free_slots = device.is_cpu() ? buffer::FreeSlots::kReturn : buffer::FreeSlots::kKeep;
    return chosen;
  }
};

/// Measured: docs/where_time_goes.md, "Small units".
inline constexpr Index kMergeBytes = 512 << 10;

}  // namespace ragged::fsdp
