// What the short path asks torch before it goes past torch's dispatcher. Every question is a builtin of torch called
// without arguments or with one, which takes some 20 ns; asked from Python they would take three times that.
#pragma once

#include <dlpack/dlpack.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "bindings/builtin.hpp"
#include "ndsoftmax/types.hpp"

namespace ndsoftmax {

namespace py = pybind11;

class Torch {
 public:
  static const Torch& get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> torch;
    return torch.call_once_and_store_result([] { return Torch(); }).get_stored();
  }

  // Whether torch's dispatcher would do nothing with an ordinary tensor but run its kernel: no dispatch mode, tracing,
  // forward-mode level or profiler of this thread is active, and no tracer that comes before autograd. (Observers of
  // all threads, as ExecutionTraceObserver, cannot be asked for cheaply, and do not see plain calls.)
  bool at_rest() const {
    return PyLong_AsLong(dispatch_modes_().ptr()) == 0 && !is_true(tracing_) && !is_true(profiler_active_) &&
           !has_forward_level() &&
           std::all_of(pre_dispatch_modes_.begin(), pre_dispatch_modes_.end(),
                       [](py::handle mode) { return mode.is_none(); });
  }

  // Whether a torch.func transform is at work: it would record gradients at several levels, and wrap new tensors.
  bool transforms() const { return is_true(functorch_active_); }

  // Whether operators may cast what they are given; on the CPU, softmax never is.
  bool autocasts() const { return is_true(autocasts_on_cuda_); }

  // Itself, not a subclass.
  bool is_tensor(py::handle object) const {
    return Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(tensor_type_.ptr());
  }

  // Whether the tensor is nobody's subclass, no function mode wants to see it, and its elements are what memory holds,
  // as far as torch would not refuse to exchange it. (Its own question, which knows those that a transform has wrapped,
  // takes longest: it is asked where transforms(), which the caller knows, are at work.)
  bool is_ordinary(py::handle tensor, bool transformed) const {
    return is_tensor(tensor) && !is_true(has_torch_function_, tensor) && !is_true(is_negative_, tensor) &&
           !(transformed && is_true(is_like_subclass_, tensor));
  }

  // Of a tensor that points nowhere: whether that is how it is, as with zero tensors and functional ones.
  bool has_no_memory(py::handle tensor) const {
    return is_true(is_zero_, tensor) || is_true(is_like_subclass_, tensor);
  }

  bool needs_grad(py::handle tensor) const {
    return has(requires_grad_, tensor) && is_true(grad_enabled_) && !is_true(inference_mode_);
  }

  // Whether autograd's kernels are skipped, as they are below them, in a kernel of somebody's operator.
  bool below_autograd() const { return is_true(is_key_excluded_, autograd_key_); }

  // Without gaps, the last dimension fastest, and not empty.
  static bool is_row_major(const DLTensor& tensor) {
    std::int64_t step = 1;
    for (int d = tensor.ndim - 1; d >= 0; step *= tensor.shape[d], --d)
      if (tensor.strides[d] != step || tensor.shape[d] == 0) return false;
    return true;
  }

  // As torch.empty_like, of a row-major tensor that lies on the CPU or on the GPU that is current: what torch.compile's
  // output calls, which asks nobody, takes half the time. None where this torch has no such function.
  py::object empty_strided_like(const DLTensor& lies, py::handle dtype) const {
    const py::object& empty_strided = lies.device.device_type == kDLCPU ? empty_strided_cpu_ : empty_strided_cuda_;
    if (empty_strided.is_none()) return py::none();
    const std::span<const std::int64_t> shape(lies.shape, static_cast<std::size_t>(lies.ndim));
    if (!dtype.is(last_.dtype) || !std::ranges::equal(shape, last_.shape))
      last_ = {{shape.begin(), shape.end()}, dtype, arguments_of(lies, dtype)};
    const py::tuple arguments = last_.arguments;  // another thread may come by meanwhile
    return checked(PyObject_Call(empty_strided.ptr(), arguments.ptr(), nullptr));
  }

  py::object empty_like(py::handle like, py::handle dtype) const {
    PyObject* const arguments[] = {like.ptr(), dtype.ptr()};
    return checked(PyObject_Vectorcall(empty_like_.ptr(), arguments, 1, dtype_keyword_.ptr()));
  }

  bool is_meta(py::handle tensor) const { return has(is_meta_, tensor); }

  bool is_inference(py::handle tensor) const { return is_true(is_inference_, tensor); }

  // After a tensor was written: what has saved it is to notice.
  void increment_version(py::handle tensor) const { increment_version_(py::make_tuple(tensor)); }

  // Whether a kernel can read `source` and write `dtype` (None: the same).
  bool is_fused(DType source, py::handle dtype) const {
    if (dtype.is_none() || dtype.is(dtypes_[static_cast<int>(source)])) return true;
    return size_of(source) == 2 && dtype.is(dtypes_[static_cast<int>(DType::float32)]);
  }

  // The same of backward, whose result may have the dtype of forward's input.
  bool is_fused_backward(DType source, py::handle dtype) const {
    const auto is = [&](DType narrow) { return dtype.is(dtypes_[static_cast<int>(narrow)]); };
    return dtype.is_none() || is(source) || (source == DType::float32 && (is(DType::float16) || is(DType::bfloat16)));
  }

  py::handle dtype(DType dtype) const { return dtypes_[static_cast<int>(dtype)]; }

  // What backward wants to know of a plain call: the dims as a tuple, the input's dtype, log.
  py::tuple call(py::handle dim, DType source, bool log) const {
    if (!dim.is(last_call_.dim) || last_call_.source != source || last_call_.log != log) {
      const py::object dims =
          PyTuple_CheckExact(dim.ptr()) ? py::reinterpret_borrow<py::object>(dim) : py::make_tuple(dim);
      last_call_ = {py::reinterpret_borrow<py::object>(dim), source, log, py::make_tuple(dims, dtype(source), log)};
    }
    return last_call_.arguments;
  }

  // Of the CPU, that a call may use.
  int threads() const { return static_cast<int>(PyLong_AsLong(get_num_threads_().ptr())); }

 private:
  // What a row-major tensor is made of.
  struct Arguments {
    std::vector<std::int64_t> shape;
    py::handle dtype;
    py::tuple arguments;  // sizes, strides, dtype
  };

  struct Call {
    py::object dim;
    DType source = DType::float32;
    bool log = false;
    py::tuple arguments;
  };

  Torch() = default;

  bool has_forward_level() const {
    PyObject* const level = PyDict_GetItemWithError(forward_level_dict_.ptr(), forward_level_name_.ptr());
    if (level == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return level == nullptr || PyLong_AsLong(level) >= 0;
  }

  static bool has(const Property& property, py::handle tensor) { return property(tensor).is(py::handle(Py_True)); }
  static bool is_true(const Builtin& function) { return function().is(py::handle(Py_True)); }
  static bool is_true(const Builtin& function, py::handle argument) {
    return function(argument).is(py::handle(Py_True));
  }
  static py::tuple tuple_of(const std::int64_t* values, int count) {
    py::tuple tuple(count);
    for (int i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple.ptr(), i, PyLong_FromLongLong(values[i]));
    return tuple;
  }
  static py::tuple arguments_of(const DLTensor& lies, py::handle dtype) {
    return checked(
        PyTuple_Pack(3, tuple_of(lies.shape, lies.ndim).ptr(), tuple_of(lies.strides, lies.ndim).ptr(), dtype.ptr()));
  }
  py::module_ torch_ = py::module_::import("torch");
  py::object c_ = torch_.attr("_C");
  py::object tensor_type_ = torch_.attr("Tensor");
  Builtin has_torch_function_{c_.attr("_has_torch_function_unary")};
  Property is_meta_{tensor_type_.attr("is_meta")};
  Builtin is_negative_{tensor_type_.attr("is_neg")};
  Builtin is_zero_{tensor_type_.attr("_is_zerotensor")};
  Builtin is_like_subclass_{c_.attr("_dispatch_isTensorSubclassLike")};
  Property requires_grad_{tensor_type_.attr("requires_grad")};
  py::object empty_like_ = torch_.attr("empty_like");
  py::object guards_ = py::getattr(py::getattr(c_, "_dynamo", py::none()), "guards", py::none());
  py::object empty_strided_cpu_ = py::getattr(guards_, "_empty_strided_cpu", py::none());
  py::object empty_strided_cuda_ = py::getattr(guards_, "_empty_strided_cuda", py::none());
  Builtin is_inference_{tensor_type_.attr("is_inference")};
  Builtin increment_version_{c_.attr("_increment_version")};
  Builtin get_num_threads_{torch_.attr("get_num_threads")};
  Builtin grad_enabled_{torch_.attr("is_grad_enabled")};
  Builtin inference_mode_{torch_.attr("is_inference_mode_enabled")};
  Builtin functorch_active_{c_.attr("_are_functorch_transforms_active")};
  Builtin is_key_excluded_{c_.attr("_dispatch_tls_is_dispatch_key_excluded")};
  py::object autograd_key_ = c_.attr("DispatchKey").attr("AutogradFunctionality");
  Builtin dispatch_modes_{c_.attr("_len_torch_dispatch_stack")};
  Builtin tracing_{c_.attr("_is_tracing")};
  Builtin autocasts_on_cuda_{torch_.attr("is_autocast_enabled")};
  // (the flag that torch's profilers set in Python would be cheaper to read, but not all of them set it)
  Builtin profiler_active_{torch_.attr("autograd").attr("_profiler_enabled")};
  py::dict forward_level_dict_ = torch_.attr("autograd").attr("forward_ad").attr("__dict__");
  py::str forward_level_name_ = "_current_level";
  // (torch has a function that counts them, in a microsecond; without this list, no call is plain)
  py::list pre_dispatch_modes_ = py::getattr(torch_.attr("_ops").attr("mode_stack_state_for_pre_dispatch")(),
                                             "_ModeStackStateForPreDispatch__infra_modes", py::make_tuple(false));
  // Under Python's lock, as all that is here:
  mutable Arguments last_;  // of the newest tensor: most calls are like the last one, and tuples take 80 ns to make
  mutable Call last_call_;
  py::tuple dtype_keyword_ = py::make_tuple("dtype");
  Array<py::object, 4> dtypes_{torch_.attr("float16"), torch_.attr("bfloat16"), torch_.attr("float32"),
                               torch_.attr("float64")};
};

}  // namespace ndsoftmax
