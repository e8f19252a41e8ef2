// Calls from C++ into Python, on whichever thread an event runs.
#pragma once

#include <torch/csrc/Exceptions.h>

#include "python/bindings/bindings.h"

namespace ragged::python {

/// Runs `call` with the GIL. What it raises travels on as torch's python_error, which autograd hands to the caller of
/// backward() unchanged: type, message and traceback.
template <class Call>
auto with_gil(Call&& call) {
  py::gil_scoped_acquire gil;
  try {
    return call();
  } catch (py::error_already_set& raised) {
    raised.restore();
    python_error error;
    error.persist();
    throw error;
  }
}

}  // namespace ragged::python
