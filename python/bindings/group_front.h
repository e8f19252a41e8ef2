// The Python parameters of one group: which object a module holds while sharded and unsharded, and where gradients go.
#pragma once

#include <vector>

#include "python/bindings/bindings.h"
#include "ragged/fsdp/param_group.h"

namespace ragged::python {

/// What Python hands over for one parameter.
struct PythonParam {
  py::object sharded;                                // nn.Parameter over a RaggedTensor
  py::object unsharded;                              // nn.Parameter over the image
  py::object gradient_spec;                          // of the RaggedTensors that wrap gradients
  std::vector<std::pair<py::dict, py::str>> places;  // module._parameters and the name in it; several when tied
};

/// Python functions that the group calls; they hold no reference to a model.
struct PythonCalls {
  py::object wrap;            // (local, spec) -> RaggedTensor
  py::object dense_gradient;  // (unsharded parameter, gradient) -> plain tensor
  py::object local_gradient;  // (sharded parameter) -> 1-D plain tensor of its foreign .grad
  py::object run_hooks;       // (sharded parameter): gradient hooks, then post-accumulate hooks
};

class PythonFront : public fsdp::GroupFront {
 public:
  /// `gatherer` (None: the image is used) makes the unsharded parameters: gather(), finish() -> new parameters or None,
  /// drop().
  PythonFront(std::vector<PythonParam> params, PythonCalls calls, py::object gatherer);
  ~PythonFront() override;

  bool gathers() const override { return static_cast<bool>(gatherer_); }
  void gather() override;
  std::vector<at::Tensor> finish_gather() override;
  void drop() override;
  void unsharded() override { place(/*sharded=*/false); }
  void sharded() override { place(/*sharded=*/true); }
  void follow_requires_grad() override;
  at::Tensor dense_gradient(int param, const at::Tensor& grad) override;
  Gradient gradient(int param) const override;
  at::Tensor foreign_gradient(int param) override;
  void release_gradients() override;
  Index num_holders(int param) const override;
  void published(const std::vector<Published>& gradients) override;

  /// Another object took the sharded parameter's place (load_state_dict(assign=True), module.to()).
  void set_sharded(int param, py::object sharded);

 private:
  // Sharded parameters and gradients are held by their Python objects alone: module.to() swaps what is inside them,
  // and torch allows that only where nobody else holds the tensor.
  struct Entry {
    PythonParam python;
    at::Tensor unsharded;
    py::object wrapper;  // of the gradient; kept, its local tensor changes

    const at::Tensor& sharded() const;
  };
  void place(bool sharded);

  std::vector<Entry> entries_;
  PythonCalls calls_;
  py::object gatherer_;  // null: none
};

}  // namespace ragged::python
