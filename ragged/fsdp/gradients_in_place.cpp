#include "ragged/fsdp/gradients_in_place.h"

#include <numeric>

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "ragged/base/error.h"
#include "ragged/comm/below_autograd.h"
#include "ragged/fsdp/mixed_gemm.h"
#include "ragged/fsdp/param_group.h"

namespace ragged::fsdp {
namespace {

namespace ag = torch::autograd;
using buffer::ByteCounters;
using SlotState = ParamGroup::SlotState;

thread_local bool grads_are_passed_on = false;

// Nobody wants the gradients that this backward computes but the leaves.
bool backward_accumulates() {
  if (at::GradMode::is_enabled()) return false;
  const auto* wanted = ag::get_current_graph_task_exec_info();
  return grads_are_passed_on || !wanted || wanted->empty();
}

// Where a weight's gradient goes.
struct Target : torch::CustomClassHolder {
  std::weak_ptr<ParamGroup> group;
  int param = 0;
};
using TargetPtr = c10::intrusive_ptr<Target>;

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped({
      c10::DispatchKey::Python,
      c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper,
  });
  return !tensor.key_set().has_any(kWrapped) && tensor.layout() == at::kStrided;
}

TargetPtr target_of(const at::Tensor& weight) {
  if (!at::GradMode::is_enabled() || !weight.requires_grad() || !is_plain(weight)) return {};
  if (at::autocast::is_autocast_enabled(weight.device().type())) return {};
  ParamGroup* group = ParamGroup::of(weight);
  const int param = buffer::DroppableStorage::index_of(weight);
  if (!group || !group->takes_in_place(param, weight)) return {};
  auto target = c10::make_intrusive<Target>();
  target->group = group->weak_from_this();
  target->param = param;
  return target;
}

TargetPtr target_in(const ag::AutogradContext& ctx) {
  return c10::static_intrusive_pointer_cast<Target>(ctx.saved_data.at("target").toCapsule());
}

std::shared_ptr<ParamGroup> group_of(const ag::AutogradContext& ctx) {
  return backward_accumulates() ? target_in(ctx)->group.lock() : nullptr;
}

int param_of(const ag::AutogradContext& ctx) {
  return target_in(ctx)->param;
}

// References to a weight that end with the node: what it saved, and what came out of that. None where something else
// came out (saved-tensor hooks): then others may hold the weight.
Index holders_of(const ag::AutogradContext& ctx, const at::Tensor& saved) {
  const TargetPtr target = target_in(ctx);
  const auto group = target->group.lock();
  return group && group->spec().params[static_cast<std::size_t>(target->param)].is_same(saved) ? 2 : 0;
}

// How an addend gets into a slot that holds something, or nothing.
enum class Write { kOver, kAddExactly, kAccumulate, kNot };

Write how_to_write(const ParamGroup& group, const ParamGroup::GradientSlot& slot, at::ScalarType addend) {
  const SlotState state = slot.state;
  const bool rounds = group.gradients_in_place == GradientsInPlace::kSameBits;
  if (rounds && slot.tensor.scalar_type() != addend) return Write::kNot;
  if (state == SlotState::kEmpty) return Write::kOver;
  if (group.gradients_in_place == GradientsInPlace::kAlways) return Write::kAccumulate;
  // What earlier micro-batches left is added to by the sum of this one's addends, which autograd has to make.
  return state == SlotState::kWritten ? Write::kAddExactly : Write::kNot;
}

Index ByteCounters::*counter_of(Write write) {
  return write == Write::kAddExactly ? &ByteCounters::added : &ByteCounters::in_place;
}

// out = a b, or is added to. a: [m, k], b: [k, n] of one dtype, out: [m, n] of that or of the reductions'. False where
// that took a product of its own.
bool write_product(const at::Tensor& a, const at::Tensor& b, at::Tensor out, Write write) {
  if (a.scalar_type() == out.scalar_type()) {
    if (write == Write::kOver) at::mm_out(out, a, b);
    if (write == Write::kAccumulate) at::addmm_out(out, out, a, b);
    if (write == Write::kAddExactly) out.add_(a.mm(b));
    return write != Write::kAddExactly;
  }
  if (mixed_gemm(a, b, out, write == Write::kAccumulate)) return true;
  if (write == Write::kOver) {
    out.copy_(a.mm(b));
  } else {
    out.add_(a.mm(b));
  }
  return false;
}

Index ByteCounters::*counter_of(Write write, bool in_place) {
  if (in_place) return &ByteCounters::in_place;
  return write == Write::kOver ? &ByteCounters::cast_grad : &ByteCounters::added;
}

// Edges are counted over the tensors that are there: x, weight, bias.
bool wants_bias(ag::AutogradContext& ctx) {
  return ctx.saved_data.at("has_bias").toBool() && ctx.needs_input_grad(2);
}

at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

// ---- linear ----

struct LinearNode : ag::Function<LinearNode> {
  static at::Tensor forward(
      ag::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
      const TargetPtr& target) {
    ctx->saved_data["target"] = c10::IValue::make_capsule(target);
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->save_for_backward({x, weight});
    return at::linear(x, weight, bias);
  }

  static ag::variable_list backward(ag::AutogradContext* ctx, const ag::variable_list& grads) {
    ag::variable_list result(4);
    if (!grads[0].defined()) return result;
    const ag::variable_list saved = ctx->get_saved_variables();
    const at::Tensor grad = as_rows(grads[0]);
    if (ctx->needs_input_grad(0)) result[0] = grad.mm(saved[1]).view(saved[0].sizes());
    if (ctx->needs_input_grad(1))
      result[1] = weight_gradient(*ctx, grad.t(), as_rows(saved[0]), holders_of(*ctx, saved[1]));
    if (wants_bias(*ctx)) result[2] = grad.sum(0, /*keepdim=*/true).view({grad.size(1)});
    return result;
  }

  static at::Tensor weight_gradient(
      const ag::AutogradContext& ctx, const at::Tensor& grad, const at::Tensor& x, Index holders) {
    const auto group = group_of(ctx);
    if (!group) return grad.mm(x);
    const int param = param_of(ctx);
    const ParamGroup::GradientSlot slot = group->gradient_slot(param, holders);
    const Write write = how_to_write(*group, slot, grad.scalar_type());
    if (write == Write::kNot) return grad.mm(x);
    const comm::BelowAutograd below;
    group->wrote_slot(param, counter_of(write, write_product(grad, x, slot.tensor, write)));
    return {};
  }
};

// ---- a stack of matrices ----

struct GroupedLinearNode : ag::Function<GroupedLinearNode> {
  static at::Tensor forward(
      ag::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
      const std::vector<Index>& counts, const TargetPtr& target) {
    ctx->saved_data["target"] = c10::IValue::make_capsule(target);
    ctx->saved_data["counts"] = counts;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->save_for_backward({x, weight});
    at::Tensor y = at::empty({x.size(0), weight.size(1)}, x.options());
    for_each_run(counts, [&](Index group, Index first, Index count) {
      if (count == 0) return;
      at::Tensor out = y.narrow(0, first, count);
      const at::Tensor rows = x.narrow(0, first, count);
      if (bias) {
        at::addmm_out(out, (*bias)[group], rows, weight[group].t());
      } else {
        at::mm_out(out, rows, weight[group].t());
      }
    });
    return y;
  }

  static ag::variable_list backward(ag::AutogradContext* ctx, const ag::variable_list& grads) {
    ag::variable_list result(5);
    if (!grads[0].defined()) return result;
    const ag::variable_list saved = ctx->get_saved_variables();
    const std::vector<Index> counts = ctx->saved_data["counts"].toIntVector();
    const at::Tensor grad = grads[0].contiguous();
    if (ctx->needs_input_grad(0)) result[0] = of_rows(grad, saved[1], counts);
    if (ctx->needs_input_grad(1)) result[1] = weight_gradient(*ctx, grad, saved, counts);
    if (wants_bias(*ctx)) {
      result[2] = stacked(counts, [&](Index, Index first, Index count) { return grad.narrow(0, first, count).sum(0); });
    }
    return result;
  }

  template <class Visit>
  static void for_each_run(const std::vector<Index>& counts, const Visit& visit) {
    Index first = 0;
    for (std::size_t group = 0; group < counts.size(); first += counts[group++]) {
      visit(static_cast<Index>(group), first, counts[group]);
    }
  }

  template <class Make>
  static at::Tensor stacked(const std::vector<Index>& counts, const Make& make) {
    std::vector<at::Tensor> parts;
    for_each_run(counts, [&](Index group, Index first, Index count) { parts.push_back(make(group, first, count)); });
    return at::stack(parts);
  }

  static at::Tensor of_rows(const at::Tensor& grad, const at::Tensor& weight, const std::vector<Index>& counts) {
    std::vector<at::Tensor> parts;  // differentiable, under create_graph
    if (at::GradMode::is_enabled()) {
      for_each_run(counts, [&](Index group, Index first, Index count) {
        parts.push_back(grad.narrow(0, first, count).mm(weight[group]));
      });
      return at::cat(parts);
    }
    const at::Tensor result = at::empty({grad.size(0), weight.size(2)}, grad.options());
    for_each_run(counts, [&](Index group, Index first, Index count) {
      if (count == 0) return;
      at::Tensor out = result.narrow(0, first, count);
      at::mm_out(out, grad.narrow(0, first, count), weight[group]);
    });
    return result;
  }

  static at::Tensor weight_gradient(
      const ag::AutogradContext& ctx, const at::Tensor& grad, const ag::variable_list& saved,
      const std::vector<Index>& counts) {
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const Index holders = holders_of(ctx, weight);
    const auto product = [&] {
      return stacked(counts, [&](Index, Index first, Index count) {
        if (count == 0) return at::zeros({weight.size(1), weight.size(2)}, grad.options());
        return grad.narrow(0, first, count).t().mm(x.narrow(0, first, count));
      });
    };
    const auto group = group_of(ctx);
    if (!group) return product();
    const int param = param_of(ctx);
    const ParamGroup::GradientSlot slot = group->gradient_slot(param, holders);
    const Write write = how_to_write(*group, slot, grad.scalar_type());
    if (write == Write::kNot) return product();
    const comm::BelowAutograd below;
    bool in_place = true;
    for_each_run(counts, [&](Index expert, Index first, Index count) {
      at::Tensor out = slot.tensor[expert];
      if (count > 0) {
        in_place &= write_product(grad.narrow(0, first, count).t(), x.narrow(0, first, count), out, write);
      } else if (write == Write::kOver) {
        out.zero_();
      }
    });
    group->wrote_slot(param, counter_of(write, in_place));
    return {};
  }
};

// ---- embedding ----

// slot[which[i]] += rows[i], one after another and rounded each time, as embedding's own backward does in half
// precision, where index_add_ rounds otherwise.
void add_rows_in_order(const at::Tensor& slot, const at::Tensor& which, const at::Tensor& rows) {
  const at::Tensor from = rows.contiguous();
  const at::Tensor at_rows = which.to(at::kLong).contiguous();
  AT_DISPATCH_REDUCED_FLOATING_TYPES(slot.scalar_type(), "ragged_add_rows", [&] {
    auto* to = slot.mutable_data_ptr<scalar_t>();
    const auto* values = from.const_data_ptr<scalar_t>();
    const auto* index = at_rows.const_data_ptr<int64_t>();
    const Index width = slot.size(1);
    at::parallel_for(0, width, 128, [&](Index begin, Index end) {
      for (Index row = 0; row < at_rows.numel(); ++row) {
        for (Index column = begin; column < end; ++column) {
          scalar_t& sum = to[index[row] * width + column];
          sum = static_cast<scalar_t>(static_cast<float>(sum) + static_cast<float>(values[row * width + column]));
        }
      }
    });
  });
}

struct EmbeddingNode : ag::Function<EmbeddingNode> {
  static at::Tensor forward(
      ag::AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& indices, Index padding_index,
      const TargetPtr& target) {
    ctx->saved_data["target"] = c10::IValue::make_capsule(target);
    ctx->saved_data["padding"] = padding_index;
    ctx->saved_data["count"] = weight.size(0);
    ctx->save_for_backward({indices});
    return at::embedding(weight, indices, padding_index);
  }

  static ag::variable_list backward(ag::AutogradContext* ctx, const ag::variable_list& grads) {
    ag::variable_list result(4);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return result;
    const at::Tensor indices = ctx->get_saved_variables()[0];
    const Index padding = ctx->saved_data["padding"].toInt();
    const auto whole = [&] {
      return at::embedding_backward(
          grads[0], indices, ctx->saved_data["count"].toInt(), padding, /*scale_grad_by_freq=*/false, /*sparse=*/false);
    };
    const auto group = group_of(*ctx);
    const int param = param_of(*ctx);
    if (!group) {
      result[0] = whole();
      return result;
    }
    const ParamGroup::GradientSlot slot = group->gradient_slot(param, 0);
    const Write write = how_to_write(*group, slot, grads[0].scalar_type());
    if (write == Write::kNot) {
      result[0] = whole();
      return result;
    }
    const comm::BelowAutograd below;
    if (write == Write::kAddExactly) {
      slot.tensor.add_(whole());
      group->wrote_slot(param, &ByteCounters::added);
      return result;
    }
    if (write == Write::kOver) {
      slot.tensor.zero_();
      group->counters.zeroed += static_cast<Index>(slot.tensor.nbytes());
    }
    at::Tensor rows = as_rows(grads[0]);
    const at::Tensor which = indices.reshape({-1});
    if (padding >= 0) rows = rows.masked_fill((which == padding).unsqueeze(1), 0);
    if (at::isReducedFloatingType(slot.tensor.scalar_type())) {
      add_rows_in_order(slot.tensor, which, rows.to(slot.tensor.scalar_type()));
    } else {
      slot.tensor.index_add_(0, which, rows.to(slot.tensor.scalar_type()));
    }
    group->wrote_slot(param, &ByteCounters::in_place);
    return result;
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& maybe_bias) {
  const std::optional<at::Tensor> bias = maybe_bias && maybe_bias->defined() ? maybe_bias : std::nullopt;
  // at::linear multiplies, then adds the bias, where it can't see the rows of x as a matrix: other bits, another node.
  const bool is_matrix = x.dim() >= 2 && x.dim() <= 3 && x.is_contiguous() && x.numel() > 0 && is_plain(x);
  const bool bias_fits = !bias || (is_plain(*bias) && bias->dim() == 1);
  const bool fits = is_matrix && bias_fits && weight.dim() == 2 && weight.size(1) == x.size(-1) &&
      x.scalar_type() == weight.scalar_type();
  const TargetPtr target = fits ? target_of(weight) : TargetPtr();
  if (!target) return at::linear(x, weight, bias);
  return LinearNode::apply(x, weight, bias, target);
}

at::Tensor grouped_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& maybe_bias,
    std::span<const Index> counts) {
  const std::optional<at::Tensor> bias = maybe_bias && maybe_bias->defined() ? maybe_bias : std::nullopt;
  const Index rows = std::accumulate(counts.begin(), counts.end(), Index{0});
  RAGGED_CHECK(
      x.dim() == 2 && weight.dim() == 3 && weight.size(0) == static_cast<Index>(counts.size()) && x.size(0) == rows,
      "[grouped_linear] Expected a stack of {} matrices and {} rows, but got sizes {} and {}. One count a matrix, "
      "which "
      "sum to the rows.",
      counts.size(), rows, c10::str(weight.sizes()), c10::str(x.sizes()));
  const bool fits = is_plain(x) && x.is_contiguous() && x.scalar_type() == weight.scalar_type();
  const TargetPtr target = fits ? target_of(weight) : TargetPtr();
  if (target)
    return GroupedLinearNode::apply(x, weight, bias, std::vector<Index>(counts.begin(), counts.end()), target);
  // unbind, since its backward writes each stacked gradient once; select's would do so once a matrix.
  const auto weights = weight.unbind(0);
  const auto biases = bias ? bias->unbind(0) : std::vector<at::Tensor>(weights.size());
  std::vector<at::Tensor> outputs;
  Index first = 0;
  for (std::size_t e = 0; e < weights.size(); first += counts[e++]) {
    if (counts[e] > 0) outputs.push_back(at::linear(x.narrow(0, first, counts[e]), weights[e], biases[e]));
  }
  return outputs.empty() ? at::linear(x, weights.front(), biases.front()) : at::cat(outputs);
}

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices, Index padding_index) {
  const bool fits = weight.dim() == 2 && weight.device().is_cpu() && is_plain(indices);
  const TargetPtr target = fits ? target_of(weight) : TargetPtr();
  if (!target) return at::embedding(weight, indices, padding_index);
  return EmbeddingNode::apply(weight, indices, padding_index, target);
}

GradsArePassedOn::GradsArePassedOn() : before_(grads_are_passed_on) {
  grads_are_passed_on = backward_accumulates();
}

GradsArePassedOn::~GradsArePassedOn() {
  grads_are_passed_on = before_;
}

}  // namespace ragged::fsdp
