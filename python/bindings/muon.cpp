// Muon's plan for Python: made from placements once, then stepped with lists of pieces. Groups, options and states are
// Python's (ragged_fsdp/optim/muon.py).
#include "python/bindings/matrix_params.h"
#include "ragged/base/error.h"
#include "ragged/optim/muon_plan.h"

namespace ragged::python {
namespace {

using MaybeTensors = std::vector<std::optional<at::Tensor>>;

void mark_written(const at::Tensor& tensor) {
  if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
}

void step(
    optim::MuonPlan& plan, const std::vector<at::Tensor>& params, const MaybeTensors& grads,
    const std::vector<at::Tensor>& momenta, const MaybeTensors& scales, const MaybeTensors& rows, double lr,
    double weight_decay, const std::string& format, double grad_scale) {
  std::vector<optim::MuonPiece> pieces;
  for (std::size_t i = 0; i < params.size(); ++i) {
    pieces.push_back(
        {.param = params[i],
         .grad = grads[i].value_or(at::Tensor()),
         .momentum = momenta[i],
         .lr = lr,
         .weight_decay = weight_decay,
         .momentum_scales = scales[i].value_or(at::Tensor()),
         .momentum_format = format == "dynamic" ? optim::TileFormat::kDynamic : optim::TileFormat::kPower,
         .row_exp_avg_sq = rows[i].value_or(at::Tensor())});
  }
  plan.step(pieces, {.grad = grad_scale});
  for (const optim::MuonPiece& piece : pieces) {
    if (!piece.grad.defined()) continue;
    for (const at::Tensor& written : {piece.param, piece.momentum, piece.momentum_scales, piece.row_exp_avg_sq})
      mark_written(written);
  }
}

}  // namespace

void bind_muon(py::module_& module) {
  py::class_<optim::MuonPlan>(module, "MuonPlan")
      .def(
          py::init([](const std::vector<std::string>& names, const std::vector<std::vector<Index>>& shapes,
                      const std::vector<Intervals>& held, const std::vector<Index>& splits,
                      const std::vector<int>& buckets, bool flatten, double momentum, bool nesterov,
                      const std::string& scale, const std::string& coefficients, int num_steps, at::ScalarType ns_dtype,
                      at::ScalarType wire_dtype, bool normuon, double row_beta2, bool share_replicas,
                      int buckets_in_flight, const comm::Communicator& shard, const comm::Communicator& replicate) {
            const optim::MuonMath math{
                .momentum = momentum,
                .nesterov = nesterov,
                .scale = optim::muon_scale(scale),
                .newton_schulz = {.coefficients = coefficients, .num_steps = num_steps, .dtype = ns_dtype},
                .wire_dtype = wire_dtype,
                .normuon = normuon,
                .row_beta2 = row_beta2};
            const optim::MuonMovement movement{
                .replicas = share_replicas ? optim::MuonReplicas::kShare : optim::MuonReplicas::kRepeat,
                .buckets_in_flight = buckets_in_flight};
            auto params = matrix_params(names, shapes, held, splits, buckets, flatten);
            py::gil_scoped_release no_gil;  // ranks compare their plans
            return std::make_unique<optim::MuonPlan>(std::move(params), math, movement, shard, replicate);
          }),
          py::arg("names"), py::arg("shapes"), py::arg("held"), py::arg("splits"), py::arg("buckets"),
          py::arg("flatten"), py::arg("momentum"), py::arg("nesterov"), py::arg("scale"), py::arg("coefficients"),
          py::arg("num_steps"), py::arg("ns_dtype"), py::arg("wire_dtype"), py::arg("normuon"), py::arg("row_beta2"),
          py::arg("share_replicas"), py::arg("buckets_in_flight"), py::arg("shard"), py::arg("replicate"))
      .def("step", &step, py::call_guard<py::gil_scoped_release>())
      .def("set_momentum", &optim::MuonPlan::set_momentum)
      .def("matrices", [](const optim::MuonPlan& plan) { return as_tuples(plan.matrices()); })
      .def_property_readonly("num_buckets", &optim::MuonPlan::num_buckets)
      .def_property_readonly("loads", &optim::MuonPlan::loads);
}

}  // namespace ragged::python
