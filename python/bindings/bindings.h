// What the files of the extension share: one function a topic, called once by module.cpp.
#pragma once

// Torch's own casters, and with them its bundled pybind11: always before any other pybind11 header.
#include <torch/csrc/utils/pybind.h>

namespace ragged::python {

namespace py = pybind11;

void bind_layout(py::module_& module);
void bind_init(py::module_& module);
void bind_fsdp(py::module_& module);
void bind_optim(py::module_& module);
void bind_muon(py::module_& module);
void bind_soap(py::module_& module);
void bind_checkpoint(py::module_& module);

}  // namespace ragged::python
