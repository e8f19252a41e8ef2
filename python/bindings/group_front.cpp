#include "python/bindings/group_front.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include "python/bindings/python_calls.h"
#include "ragged/base/error.h"

namespace ragged::python {
namespace {

bool has_hooks(const py::object& parameter) {
  const auto* variable = reinterpret_cast<THPVariable*>(parameter.ptr());
  const auto any = [](PyObject* hooks) { return hooks && hooks != Py_None && PyObject_Size(hooks) > 0; };
  return any(variable->backward_hooks) || any(variable->post_accumulate_grad_hooks);
}

}  // namespace

const at::Tensor& PythonFront::Entry::sharded() const {
  return THPVariable_Unpack(python.sharded.ptr());
}

PythonFront::PythonFront(std::vector<PythonParam> params, PythonCalls calls, py::object gatherer)
    : calls_(std::move(calls)) {
  if (!gatherer.is_none()) gatherer_ = std::move(gatherer);
  for (PythonParam& param : params) {
    Entry entry;
    entry.unsharded = THPVariable_Unpack(param.unsharded.ptr());
    entry.python = std::move(param);
    entries_.push_back(std::move(entry));
  }
}

// The last reference to a group may die on a thread of autograd's.
PythonFront::~PythonFront() {
  py::gil_scoped_acquire gil;
  entries_.clear();
  calls_ = {};
  gatherer_ = {};
}

void PythonFront::gather() {
  with_gil([&] { gatherer_.attr("gather")(); });
}

std::vector<at::Tensor> PythonFront::finish_gather() {
  return with_gil([&] {
    std::vector<at::Tensor> leaves;
    const py::object made = gatherer_.attr("finish")();
    if (made.is_none()) return leaves;
    std::size_t next = 0;
    for (const py::handle parameter : made) {
      Entry& entry = entries_[next++];
      entry.python.unsharded = py::reinterpret_borrow<py::object>(parameter);
      entry.unsharded = THPVariable_Unpack(parameter.ptr());
      leaves.push_back(entry.unsharded);
    }
    return leaves;
  });
}

void PythonFront::drop() {
  with_gil([&] { gatherer_.attr("drop")(); });
}

void PythonFront::place(bool sharded) {
  with_gil([&] {
    for (const Entry& entry : entries_) {
      const py::object& param = sharded ? entry.python.sharded : entry.python.unsharded;
      for (const auto& [parameters, name] : entry.python.places) {
        if (PyDict_SetItem(parameters.ptr(), name.ptr(), param.ptr()) != 0) throw py::error_already_set();
      }
    }
  });
}

void PythonFront::follow_requires_grad() {
  for (Entry& entry : entries_) {
    const bool trains = entry.sharded().requires_grad();
    if (entry.unsharded.requires_grad() != trains) entry.unsharded.set_requires_grad(trains);
  }
}

at::Tensor PythonFront::dense_gradient(int param, const at::Tensor& grad) {
  if (!grad.unsafeGetTensorImpl()->is_python_dispatch()) return grad;
  return with_gil([&] {
    const py::object& unsharded = entries_[static_cast<std::size_t>(param)].python.unsharded;
    return calls_.dense_gradient(unsharded, py::cast(grad)).cast<at::Tensor>();
  });
}

PythonFront::Gradient PythonFront::gradient(int param) const {
  const Entry& entry = entries_[static_cast<std::size_t>(param)];
  const at::Tensor& grad = entry.sharded().grad();
  if (!grad.defined()) return Gradient::kNone;
  const bool ours = entry.wrapper && grad.is_same(THPVariable_Unpack(entry.wrapper.ptr()));
  return ours ? Gradient::kPublished : Gradient::kForeign;
}

at::Tensor PythonFront::foreign_gradient(int param) {
  return with_gil([&] {
    return calls_.local_gradient(entries_[static_cast<std::size_t>(param)].python.sharded).cast<at::Tensor>();
  });
}

// A kept wrapper would keep its view. One that somebody else holds too stays as it is, and a new one is made next time.
void PythonFront::release_gradients() {
  with_gil([&] {
    const py::str local_name("_local_tensor");
    for (Entry& entry : entries_) {
      if (!entry.wrapper) continue;
      if (entry.wrapper.ref_count() > 1) {
        entry.wrapper = {};
      } else {
        const at::Tensor& wrapper = THPVariable_Unpack(entry.wrapper.ptr());
        py::setattr(
            entry.wrapper, local_name,
            py::cast(at::empty({0}, at::TensorOptions().dtype(wrapper.scalar_type()).device(wrapper.device()))));
      }
    }
  });
}

// What Python code keeps (a closure, an attribute of a custom function's context) counts for the object alone.
Index PythonFront::num_holders(int param) const {
  return with_gil([&] { return Index{entries_[static_cast<std::size_t>(param)].python.unsharded.ref_count()}; });
}

void PythonFront::published(const std::vector<Published>& gradients) {
  with_gil([&] {
    const py::str local_name("_local_tensor");
    for (const Published& published : gradients) {
      Entry& entry = entries_[static_cast<std::size_t>(published.param)];
      if (!entry.sharded().requires_grad()) continue;
      if (!entry.wrapper) {
        entry.wrapper = calls_.wrap(published.local, entry.python.gradient_spec);
      } else {
        py::setattr(entry.wrapper, local_name, py::cast(published.local));
      }
      entry.sharded().mutable_grad() = THPVariable_Unpack(entry.wrapper.ptr());
    }
    for (const Published& published : gradients) {
      const py::object& sharded = entries_[static_cast<std::size_t>(published.param)].python.sharded;
      if (published.is_fresh && has_hooks(sharded)) calls_.run_hooks(sharded);
    }
  });
}

void PythonFront::set_sharded(int param, py::object sharded) {
  Entry& entry = entries_[static_cast<std::size_t>(param)];
  entry.python.sharded = std::move(sharded);
  entry.wrapper = {};
}

}  // namespace ragged::python
