// Initial values for Python: those that C++ gives a parameter, as a tensor. Which parameter starts how is the caller's.
#include "ragged/fsdp/init.h"

#include <ATen/ops/empty.h>

#include "python/bindings/bindings.h"
#include "ragged/base/error.h"

namespace ragged::python {
namespace {

fsdp::InitRule parse_rule(const std::string& kind, double a, double b) {
  if (kind == "constant") return fsdp::constant(a);
  if (kind == "normal") return fsdp::normal(a, b);
  RAGGED_CHECK(kind == "uniform", "[initial_values] Expected constant, normal or uniform, but got '{}'.", kind);
  return fsdp::uniform(a, b);
}

at::Tensor initial_values(
    const std::string& kind, double a, double b, std::uint64_t seed, const std::string& name, Index begin, Index end) {
  RAGGED_CHECK(
      0 <= begin && begin <= end,
      "[initial_values] Expected 0 <= begin <= end, but got {} and {} (param '{}'). Count elements of the whole "
      "tensor.",
      begin, end, name);
  const fsdp::InitRule rule = parse_rule(kind, a, b);
  at::Tensor values = at::empty({end - begin}, at::kFloat);
  fsdp::fill_initial_values(rule, seed, name, {begin, end}, values.mutable_data_ptr<float>());
  return values;
}

}  // namespace

void bind_init(py::module_& module) {
  module.def(
      "initial_values", &initial_values, py::call_guard<py::gil_scoped_release>(),
      "Elements [begin, end) of a parameter's initial values, 1-D float32: what C++'s init_parameters() gives it, a\n"
      "function of (seed, name, element index). kind: constant (a), normal (mean a, deviation b), uniform in [a, b).",
      py::arg("kind"), py::arg("a"), py::arg("b"), py::arg("seed"), py::arg("name"), py::arg("begin"), py::arg("end"));
}

}  // namespace ragged::python
