// Muon's plan for Python: made from placements once, then stepped with lists of pieces. Groups, options and states are
// Python's (ragged_fsdp/optim/muon.py).
#include "python/bindings/bindings.h"
#include "ragged/base/error.h"
#include "ragged/optim/muon_plan.h"

namespace ragged::python {
namespace {

using Intervals = std::vector<std::pair<Index, Index>>;

std::vector<layout::Interval> intervals_of(const Intervals& pairs) {
  std::vector<layout::Interval> intervals;
  for (const auto& [begin, end] : pairs) intervals.push_back({begin, end});
  return intervals;
}

std::vector<optim::MuonParam> params_of(
    const std::vector<std::string>& names, const std::vector<std::vector<Index>>& shapes,
    const std::vector<Intervals>& held, const std::vector<Index>& splits, const std::vector<int>& buckets,
    bool flatten) {
  std::vector<optim::MuonParam> params;
  for (std::size_t i = 0; i < names.size(); ++i) {
    params.push_back(
        {.name = names[i],
         .shape = shapes[i],
         .held = intervals_of(held[i]),
         .row_ranges = optim::ranges_of_rows(splits),
         .bucket = buckets[i],
         .flatten_rest = flatten});
  }
  return params;
}

void step(
    optim::MuonPlan& plan, const std::vector<at::Tensor>& params, const std::vector<std::optional<at::Tensor>>& grads,
    const std::vector<at::Tensor>& momenta, double lr, double weight_decay, double grad_scale) {
  std::vector<optim::MuonPiece> pieces;
  for (std::size_t i = 0; i < params.size(); ++i) {
    pieces.push_back(
        {.param = params[i],
         .grad = grads[i].value_or(at::Tensor()),
         .momentum = momenta[i],
         .lr = lr,
         .weight_decay = weight_decay});
  }
  plan.step(pieces, {.grad = grad_scale});
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!grads[i]) continue;
    params[i].unsafeGetTensorImpl()->bump_version();
    momenta[i].unsafeGetTensorImpl()->bump_version();
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
                      at::ScalarType wire_dtype, bool share_replicas, int buckets_in_flight,
                      const comm::Communicator& shard, const comm::Communicator& replicate) {
            const optim::MuonMath math{
                .momentum = momentum,
                .nesterov = nesterov,
                .scale = optim::muon_scale(scale),
                .newton_schulz = {.coefficients = coefficients, .num_steps = num_steps, .dtype = ns_dtype},
                .wire_dtype = wire_dtype};
            const optim::MuonMovement movement{
                .replicas = share_replicas ? optim::MuonReplicas::kShare : optim::MuonReplicas::kRepeat,
                .buckets_in_flight = buckets_in_flight};
            auto params = params_of(names, shapes, held, splits, buckets, flatten);
            py::gil_scoped_release no_gil;  // ranks compare their plans
            return std::make_unique<optim::MuonPlan>(std::move(params), math, movement, shard, replicate);
          }),
          py::arg("names"), py::arg("shapes"), py::arg("held"), py::arg("splits"), py::arg("buckets"),
          py::arg("flatten"), py::arg("momentum"), py::arg("nesterov"), py::arg("scale"), py::arg("coefficients"),
          py::arg("num_steps"), py::arg("ns_dtype"), py::arg("wire_dtype"), py::arg("share_replicas"),
          py::arg("buckets_in_flight"), py::arg("shard"), py::arg("replicate"))
      .def("step", &step, py::call_guard<py::gil_scoped_release>())
      .def("set_momentum", &optim::MuonPlan::set_momentum)
      .def(
          "matrices",
          [](const optim::MuonPlan& plan) {
            std::vector<std::tuple<int, Index, Index, int, bool>> found;
            for (const optim::MuonMatrix& m : plan.matrices())
              found.emplace_back(m.param, m.rows, m.cols, m.root, m.is_local);
            return found;
          })
      .def_property_readonly("num_buckets", &optim::MuonPlan::num_buckets)
      .def_property_readonly("loads", &optim::MuonPlan::loads);
}

}  // namespace ragged::python
