// What the short path asks torch before it goes past torch's dispatcher. Every question is a builtin of torch called
// without arguments or with one, which takes some 30 ns; asked from Python they would take twice that.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

#include "ndsoftmax/types.hpp"

namespace ndsoftmax {

namespace py = pybind11;

class Torch {
 public:
  static const Torch& get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> torch;
    return torch.call_once_and_store_result([] { return Torch(); }).get_stored();
  }

  // Whether torch's dispatcher would do nothing with a plain tensor but run its kernel and record its gradient: no
  // torch.func transform, dispatch or function mode, tracing, autocast, forward-mode level or profiler of this thread
  // is active. (Observers of all threads, as ExecutionTraceObserver, cannot be asked for cheaply, and do not see plain
  // calls.)
  bool at_rest() const {
    return !is_true(functorch_active_) && PyLong_AsLong(call(dispatch_modes_).ptr()) == 0 &&
           !is_true(function_mode_active_) && call(tracing_state_).is_none() && !is_true(autocast_active_) &&
           !is_true(profiler_active_) && PyLong_AsLong(forward_level_dict_[forward_level_name_].ptr()) < 0;
  }

  // Whether the tensor is ordinary memory that a kernel can read. Its dispatch keys tell: the negative bit, zero
  // tensors, meta, sparse, nested, quantized, functional and batched tensors and what a transform left behind all have
  // one more, or another, than these.
  bool is_ordinary(py::handle tensor) const {
    if (Py_TYPE(tensor.ptr()) != reinterpret_cast<PyTypeObject*>(tensor_type_.ptr())) return false;
    const std::uint64_t keys = raw(call(dispatch_keys_, tensor));
    for (const std::uint64_t ordinary : ordinary_keys_)
      if (keys == ordinary) return true;
    return false;
  }

  bool needs_grad(py::handle tensor) const {
    return py::getattr(tensor, requires_grad_name_).is(py::handle(Py_True)) && is_true(grad_enabled_) &&
           !is_true(inference_mode_);
  }

  // None keeps the dtype of `like`.
  py::object empty_like(py::handle like, py::handle dtype) const {
    if (dtype.is_none()) return call(empty_like_, like);
    PyObject* const arguments[] = {like.ptr(), dtype.ptr()};
    return checked(PyObject_Vectorcall(empty_like_.ptr(), arguments, 1, dtype_keyword_.ptr()));
  }

  // Whether a kernel can read `source` and write `dtype` (None: the same).
  bool is_fused(DType source, py::handle dtype) const {
    if (dtype.is_none() || dtype.is(dtypes_[static_cast<int>(source)])) return true;
    return size_of(source) == 2 && dtype.is(dtypes_[static_cast<int>(DType::float32)]);
  }

  int threads() const { return static_cast<int>(PyLong_AsLong(call(get_num_threads_).ptr())); }

 private:
  Torch() = default;

  static py::object checked(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }
  static py::object call(py::handle function) { return checked(PyObject_CallNoArgs(function.ptr())); }
  static py::object call(py::handle function, py::handle argument) {
    return checked(PyObject_CallOneArg(function.ptr(), argument.ptr()));
  }
  static bool is_true(py::handle function) { return call(function).is(py::handle(Py_True)); }
  std::uint64_t raw(const py::object& keyset) const {
    return PyLong_AsUnsignedLongLong(checked(PyObject_CallMethodNoArgs(keyset.ptr(), raw_name_.ptr())).ptr());
  }

  // Ordinary tensors of one backend, made in inference mode or not.
  std::array<std::uint64_t, 2> keys_of(const char* backend) const {
    const auto key = [&](const std::string& name) {
      return c_.attr("DispatchKeySet")(c_.attr("DispatchKey").attr(name.c_str()));
    };
    const py::object inference = key(backend) | key("Autocast" + std::string(backend));
    const py::object usual = inference | key("ADInplaceOrView") | key("Autograd" + std::string(backend));
    return {raw(usual), raw(inference)};
  }

  py::module_ torch_ = py::module_::import("torch");
  py::object c_ = torch_.attr("_C");
  py::object tensor_type_ = torch_.attr("Tensor");
  py::object empty_like_ = torch_.attr("empty_like");
  py::object get_num_threads_ = torch_.attr("get_num_threads");
  py::object grad_enabled_ = torch_.attr("is_grad_enabled");
  py::object inference_mode_ = torch_.attr("is_inference_mode_enabled");
  py::object functorch_active_ = c_.attr("_are_functorch_transforms_active");
  py::object dispatch_modes_ = c_.attr("_len_torch_dispatch_stack");
  py::object function_mode_active_ = c_.attr("_is_torch_function_mode_enabled");
  py::object tracing_state_ = c_.attr("_get_tracing_state");
  py::object autocast_active_ = c_.attr("_is_any_autocast_enabled");
  py::object profiler_active_ = torch_.attr("autograd").attr("_profiler_enabled");
  py::dict forward_level_dict_ = torch_.attr("autograd").attr("forward_ad").attr("__dict__");
  py::object dispatch_keys_ = c_.attr("_dispatch_keys");
  py::str forward_level_name_ = "_current_level";
  py::str requires_grad_name_ = "requires_grad";
  py::str raw_name_ = "raw_repr";
  py::tuple dtype_keyword_ = py::make_tuple("dtype");
  std::array<py::object, 4> dtypes_{torch_.attr("float16"), torch_.attr("bfloat16"), torch_.attr("float32"),
                                    torch_.attr("float64")};
  std::array<std::uint64_t, 4> ordinary_keys_ = [this] {
    const auto cpu = keys_of("CPU"), other = keys_of(NDSOFTMAX_WITH_CUDA ? "CUDA" : "CPU");
    return std::array{cpu[0], cpu[1], other[0], other[1]};
  }();
};

}  // namespace ndsoftmax
