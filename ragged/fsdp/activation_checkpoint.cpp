#include "ragged/fsdp/activation_checkpoint.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ragged/base/error.h"
#include "ragged/fsdp/gradients_in_place.h"

namespace ragged::fsdp {
namespace {

namespace ag = torch::autograd;

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};

GeneratorState generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return {generator, generator.get_state()};
}

void restore(GeneratorState& saved) {
  const std::lock_guard lock(saved.generator.mutex());
  saved.generator.set_state(saved.state);
}

std::vector<GeneratorState> generator_states(const std::vector<at::Tensor>& tensors) {
  std::vector<GeneratorState> states{generator_state(at::globalContext().defaultGenerator(c10::Device(c10::kCPU)))};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device().is_cpu()) continue;
    states.push_back(generator_state(at::globalContext().defaultGenerator(tensor.device())));
    break;
  }
  return states;
}

struct Body : torch::CustomClassHolder {
  TensorFunction function;
  std::vector<at::Tensor> params;
  std::vector<GeneratorState> random;
  std::size_t num_inputs = 0;
};

struct Checkpoint : ag::Function<Checkpoint> {
  static ag::variable_list forward(
      ag::AutogradContext* ctx, const c10::intrusive_ptr<Body>& body, at::TensorList inputs_and_params) {
    std::vector<at::Tensor> inputs(
        inputs_and_params.begin(), inputs_and_params.begin() + static_cast<std::ptrdiff_t>(body->num_inputs));
    body->random = generator_states(inputs);
    ctx->saved_data["body"] = c10::IValue::make_capsule(body);
    ctx->save_for_backward(inputs);
    return body->function(inputs);
  }

  static ag::variable_list backward(ag::AutogradContext* ctx, const ag::variable_list& grads) {
    auto body = c10::static_intrusive_pointer_cast<Body>(ctx->saved_data["body"].toCapsule());
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> wanted;      // the tensors whose gradient is asked for
    std::vector<std::size_t> positions;  // where it goes in the result; 0 is the body's place
    for (const at::Tensor& saved : ctx->get_saved_variables()) {
      at::Tensor input = saved.defined() ? saved.detach() : saved;
      if (saved.defined() && saved.requires_grad()) {
        input.requires_grad_(true);
        wanted.push_back(input);
        positions.push_back(inputs.size() + 1);
      }
      inputs.push_back(input);
    }
    for (std::size_t i = 0; i < body->params.size(); ++i) {
      if (!body->params[i].requires_grad()) continue;
      wanted.push_back(body->params[i]);
      positions.push_back(inputs.size() + i + 1);
    }
    std::vector<GeneratorState> now = generator_states(inputs);
    std::vector<at::Tensor> outputs;
    {
      const at::AutoGradMode with_grad(true);
      for (GeneratorState& state : body->random) restore(state);
      outputs = body->function(inputs);
      for (GeneratorState& state : now) restore(state);
    }
    ag::variable_list used_outputs;
    ag::variable_list used_grads;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !grads[i].defined()) continue;
      used_outputs.push_back(outputs[i]);
      used_grads.push_back(grads[i]);
    }
    ag::variable_list result(1 + inputs.size() + body->params.size());
    if (used_outputs.empty() || wanted.empty()) return result;
    const GradsArePassedOn passed_on;
    const ag::variable_list found = ag::grad(
        used_outputs, wanted, used_grads, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
    for (std::size_t i = 0; i < found.size(); ++i) result[positions[i]] = found[i];
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint(
    TensorFunction function, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& params) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto body = c10::make_intrusive<Body>();
  body->function = std::move(function);
  body->params = params;
  body->num_inputs = inputs.size();
  std::vector<at::Tensor> all = inputs;
  all.insert(all.end(), params.begin(), params.end());
  // TensorList, not a vector: apply() takes a vector for something that isn't a tensor and cuts the graph silently.
  return Checkpoint::apply(body, at::TensorList(all));
}

}  // namespace ragged::fsdp
