// SOAP's plan for Python: made from placements once, then stepped with lists of pieces and the states of matrices.
// Groups, options and states are Python's (ragged_fsdp/optim/soap.py).
#include "python/bindings/matrix_params.h"
#include "ragged/base/error.h"
#include "ragged/optim/soap_plan.h"

namespace ragged::python {
namespace {

using MaybeTensors = std::vector<std::optional<at::Tensor>>;

optim::SoapState state_of(const MaybeTensors& tensors) {
  RAGGED_CHECK(tensors.size() == 6, "[soap] Expected six tensors a matrix, but got {}.", tensors.size());
  const auto at = [&](std::size_t i) { return tensors[i].value_or(at::Tensor()); };
  return {
      .left = at(0), .right = at(1), .left_basis = at(2), .right_basis = at(3), .exp_avg = at(4), .exp_avg_sq = at(5)};
}

void step(
    optim::SoapPlan& plan, const std::vector<at::Tensor>& params, const MaybeTensors& grads,
    const std::vector<std::int64_t>& steps, const std::vector<std::pair<std::size_t, MaybeTensors>>& rooted, double lr,
    double weight_decay, double grad_scale) {
  std::vector<optim::SoapPiece> pieces;
  for (std::size_t i = 0; i < params.size(); ++i) {
    pieces.push_back(
        {.param = params[i],
         .grad = grads[i].value_or(at::Tensor()),
         .lr = lr,
         .weight_decay = weight_decay,
         .step = steps[i]});
  }
  std::vector<optim::SoapState> states(plan.matrices().size());
  for (const auto& [matrix, tensors] : rooted) states.at(matrix) = state_of(tensors);
  plan.step(pieces, states, {.grad = grad_scale});
  // Parameters are written through pointers; states by torch's own operations, which count.
  for (const optim::SoapPiece& piece : pieces) {
    if (piece.grad.defined()) piece.param.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void bind_soap(py::module_& module) {
  module.def(
      "soap_roots",
      [](const std::vector<std::string>& names, const std::vector<std::vector<Index>>& shapes,
         const std::vector<Intervals>& held, const std::vector<Index>& splits, const std::vector<int>& buckets,
         bool flatten, Index precondition_frequency, Index max_precondition_dim, int ranks) {
        const optim::SoapMath math{
            .precondition_frequency = precondition_frequency, .max_precondition_dim = max_precondition_dim};
        optim::check(math);
        const auto params = matrix_params(names, shapes, held, splits, buckets, flatten);
        return as_tuples(optim::soap_layout(params, math, optim::SoapMovement{}.local_limit, ranks).matrices);
      },
      "(parameter, rows, columns, root, whether the root holds all of it) of each matrix. Nothing is sent.",
      py::arg("names"), py::arg("shapes"), py::arg("held"), py::arg("splits"), py::arg("buckets"), py::arg("flatten"),
      py::arg("precondition_frequency"), py::arg("max_precondition_dim"), py::arg("ranks"));
  py::class_<optim::SoapPlan>(module, "SoapPlan")
      .def(
          py::init([](const std::vector<std::string>& names, const std::vector<std::vector<Index>>& shapes,
                      const std::vector<Intervals>& held, const std::vector<Index>& splits,
                      const std::vector<int>& buckets, bool flatten, double beta1, double beta2, double eps,
                      Index precondition_frequency, Index max_precondition_dim, at::ScalarType wire_dtype,
                      int buckets_in_flight, const comm::Communicator& shard, const comm::Communicator& replicate) {
            const optim::SoapMath math{
                .beta1 = beta1,
                .beta2 = beta2,
                .eps = eps,
                .precondition_frequency = precondition_frequency,
                .max_precondition_dim = max_precondition_dim,
                .wire_dtype = wire_dtype};
            auto params = matrix_params(names, shapes, held, splits, buckets, flatten);
            py::gil_scoped_release no_gil;  // ranks compare their plans
            return std::make_unique<optim::SoapPlan>(
                std::move(params), math, optim::SoapMovement{.buckets_in_flight = buckets_in_flight}, shard, replicate);
          }),
          py::arg("names"), py::arg("shapes"), py::arg("held"), py::arg("splits"), py::arg("buckets"),
          py::arg("flatten"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("precondition_frequency"),
          py::arg("max_precondition_dim"), py::arg("wire_dtype"), py::arg("buckets_in_flight"), py::arg("shard"),
          py::arg("replicate"))
      .def("step", &step, py::call_guard<py::gil_scoped_release>())
      .def(
          "set_math",
          [](optim::SoapPlan& plan, double beta1, double beta2, double eps, Index precondition_frequency,
             Index max_precondition_dim, at::ScalarType wire_dtype) {
            plan.set_math(
                {.beta1 = beta1,
                 .beta2 = beta2,
                 .eps = eps,
                 .precondition_frequency = precondition_frequency,
                 .max_precondition_dim = max_precondition_dim,
                 .wire_dtype = wire_dtype});
          },
          py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("precondition_frequency"),
          py::arg("max_precondition_dim"), py::arg("wire_dtype"))
      .def("matrices", [](const optim::SoapPlan& plan) { return as_tuples(plan.matrices()); })
      .def_property_readonly("loads", &optim::SoapPlan::loads);
}

}  // namespace ragged::python
