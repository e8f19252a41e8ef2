// The extension ragged_fsdp._C: errors, versions, and the bindings of each topic.
#include <torch/csrc/Exceptions.h>

#include "python/bindings/bindings.h"
#include "ragged/base/error.h"

namespace ragged::python {
namespace {

// Bad input is a ValueError in Python, whatever else goes wrong a RuntimeError.
void bind_errors(py::module_& module) {
  const auto base = py::register_exception<Error>(module, "RaggedError", PyExc_RuntimeError);
  py::register_exception<CommError>(module, "CommError", base.ptr());
  py::register_exception<CheckpointError>(module, "CheckpointError", base.ptr());
  py::register_exception<InternalError>(module, "InternalError", base.ptr());
  auto invalid = py::reinterpret_steal<py::object>(PyErr_NewException(
      "ragged_fsdp._C.InvalidArgument", py::make_tuple(base, py::handle(PyExc_ValueError)).ptr(), nullptr));
  module.attr("InvalidArgument") = invalid;
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (python_error& error) {
      error.restore();
    } catch (const InvalidArgument& error) {
      py::set_error(py::module_::import("ragged_fsdp._C").attr("InvalidArgument"), error.what());
    }
  });
}

}  // namespace
}  // namespace ragged::python

PYBIND11_MODULE(_C, module) {
  // Puts torch first: its import registers ProcessGroup and the tensor types in pybind11's process-wide type map.
  pybind11::module_::import("torch._C._distributed_c10d");
  module.doc() = "The C++ core of ragged_fsdp.";
  module.attr("version") = RAGGED_VERSION;
  module.attr("torch_version") = RAGGED_TORCH_VERSION;
  ragged::python::bind_errors(module);
  ragged::python::bind_layout(module);
  ragged::python::bind_init(module);
  ragged::python::bind_fsdp(module);
  ragged::python::bind_optim(module);
  ragged::python::bind_muon(module);
  ragged::python::bind_soap(module);
  ragged::python::bind_checkpoint(module);
}
