#include "ragged/fsdp/graph_hooks.h"

#include <unordered_set>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>

namespace ragged::fsdp {
namespace {

namespace ag = torch::autograd;

struct Callback : torch::CustomClassHolder {
  std::function<void()> run;
  explicit Callback(std::function<void()> f) : run(std::move(f)) {}
};

struct MarkInputs : ag::Function<MarkInputs> {
  static ag::variable_list forward(
      ag::AutogradContext* ctx, const c10::intrusive_ptr<Callback>& callback, at::TensorList tensors) {
    ctx->saved_data["callback"] = c10::IValue::make_capsule(callback);
    ag::variable_list same;
    for (const at::Tensor& tensor : tensors) same.push_back(tensor.view_as(tensor));
    return same;
  }
  static ag::variable_list backward(ag::AutogradContext* ctx, ag::variable_list grads) {
    c10::static_intrusive_pointer_cast<Callback>(ctx->saved_data["callback"].toCapsule())->run();
    grads.insert(grads.begin(), at::Tensor());  // for the callback's place
    return grads;
  }
};

struct ReachedHook : ag::FunctionPreHook {
  const void* owner;
  std::shared_ptr<std::function<void()>> reached;
  ReachedHook(const void* o, std::shared_ptr<std::function<void()>> r) : owner(o), reached(std::move(r)) {}
  ag::variable_list operator()(const ag::variable_list& grads) override {
    (*reached)();
    return grads;
  }
};

bool belongs_to_another(ag::Node& node, const void* owner) {
  for (const auto& hook : node.pre_hooks()) {
    const auto* ours = dynamic_cast<const ReachedHook*>(hook.get());
    if (ours && ours->owner != owner) return true;
  }
  return false;
}

bool has_our_hook(ag::Node& node) {
  for (const auto& hook : node.pre_hooks()) {
    if (dynamic_cast<const ReachedHook*>(hook.get())) return true;
  }
  return false;
}

}  // namespace

comm::compat::NodePtr mark_inputs(const TensorRefs& tensors, std::function<void()> left) {
  std::vector<at::Tensor> differentiable;
  for (const at::Tensor* tensor : tensors) {
    if (tensor->requires_grad()) differentiable.push_back(*tensor);
  }
  if (differentiable.empty()) return {};
  const ag::variable_list marked =
      MarkInputs::apply(c10::make_intrusive<Callback>(std::move(left)), at::TensorList(differentiable));
  std::size_t next = 0;
  for (at::Tensor* tensor : tensors) {
    if (tensor->requires_grad()) *tensor = marked[next++];
  }
  return marked.front().grad_fn();
}

void hook_graph(
    const TensorRefs& outputs, const comm::compat::NodePtr& inputs, const void* owner, std::function<void()> reached) {
  const auto shared = std::make_shared<std::function<void()>>(std::move(reached));
  std::unordered_set<ag::Node*> seen;
  std::vector<ag::Node*> todo;
  const auto visit = [&](ag::Node* node) {
    if (node && node != inputs.get() && seen.insert(node).second) todo.push_back(node);
  };
  for (const at::Tensor* output : outputs) {
    if (output->requires_grad() && output->grad_fn()) visit(output->grad_fn().get());
  }
  while (!todo.empty()) {
    ag::Node* node = todo.back();
    todo.pop_back();
    // A node without edges accumulates into a leaf: it is shared by all graphs that use the leaf.
    if (node->next_edges().empty() || belongs_to_another(*node, owner)) continue;
    // Nodes of a unit inside this one are hooked already, and to gather that one is to have gathered this one.
    if (!has_our_hook(*node)) node->add_pre_hook(std::make_unique<ReachedHook>(owner, shared));
    for (const ag::Edge& edge : node->next_edges()) {
      if (edge.function) visit(edge.function.get());
    }
  }
}

}  // namespace ragged::fsdp
