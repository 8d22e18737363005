// Python objects in, Problems and pointers out. Tensors cross by DLPack's C exchange table, which costs a fraction of a
// microsecond, links nothing of torch, and also tells the current stream.
#include <dlpack/dlpack.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/torch.hpp"
#include "host/cpu/launch.hpp"
#include "host/cuda_plan.hpp"
#include "ndsoftmax/host_softmax.hpp"

using namespace ndsoftmax;

namespace {

// ---- tensors ------------------------------------------------------------------------------------------------------

const DLPackExchangeAPI& exchange() {
  // (a plain static would deadlock where its initialization hands the GIL over)
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<const DLPackExchangeAPI*> api;
  const auto find = []() -> const DLPackExchangeAPI* {
    const py::object capsule = py::module_::import("torch").attr("Tensor").attr("__dlpack_c_exchange_api__");
    const auto* table =
        static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) throw py::error_already_set();
    if (table->header.version.major != DLPACK_MAJOR_VERSION || table->dltensor_from_py_object_no_sync == nullptr)
      throw std::runtime_error(
          "this torch's DLPack exchange table is not the one ndsoftmax was built for; "
          "ndsoftmax needs torch 2.10 or later");
    return table;
  };
  return *api.call_once_and_store_result(find).get_stored();
}

std::optional<DType> find_dtype(const DLDataType& type) {
  if (type.lanes == 1) {
    if (type.code == kDLFloat && type.bits == 16) return DType::float16;
    if (type.code == kDLBfloat && type.bits == 16) return DType::bfloat16;
    if (type.code == kDLFloat && type.bits == 32) return DType::float32;
    if (type.code == kDLFloat && type.bits == 64) return DType::float64;
  }
  return std::nullopt;
}

DType dtype_of(const DLDataType& type) {
  const std::optional<DType> dtype = find_dtype(type);
  if (!dtype) throw py::type_error("tensors must be float16, bfloat16, float32 or float64");
  return *dtype;
}

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64})
    if (name == name_of(dtype)) return dtype;
  throw py::value_error("dtype is '" + name + "'; it may be float16, bfloat16, float32 or float64");
}

DLTensor exchanged(py::handle tensor) {
  DLTensor raw;
  if (exchange().dltensor_from_py_object_no_sync(tensor.ptr(), &raw) != 0) throw py::error_already_set();
  return raw;
}

// Where a tensor of elements of this type lies, of which there may be none.
TensorView view_of(const DLTensor& raw, DType dtype) {
  if (raw.data == nullptr && std::all_of(raw.shape, raw.shape + raw.ndim, [](std::int64_t size) { return size > 0; }))
    throw std::runtime_error("a tensor has elements, but its storage is not allocated (was it freed or resized?)");
  return {static_cast<char*>(raw.data) + raw.byte_offset, dtype, raw.ndim, raw.shape, raw.strides};
}

// Borrows from the Python tensor: valid while that is alive and not resized.
struct Borrowed {
  explicit Borrowed(const DLTensor& raw) : raw(raw), view(view_of(raw, dtype_of(raw.dtype))) {}
  explicit Borrowed(py::handle tensor) : Borrowed(exchanged(tensor)) {}
  DLTensor raw;
  TensorView view;
};

Causal causal_named(const std::string& name) {
  if (name.empty()) return Causal::none;
  if (name == "upper_left") return Causal::upper_left;
  if (name == "lower_right") return Causal::lower_right;
  throw py::value_error("causal is '" + name + "'; it may be upper_left or lower_right");
}

// What is fused into a call, in Python's terms; mask and bias are tensors or None.
class BorrowedFusion {
 public:
  BorrowedFusion(py::handle mask, py::handle bias, bool where, double scale, const std::string& causal, bool zero) {
    if (!mask.is_none()) {
      const DLTensor raw = exchanged(mask);
      if (raw.dtype.code != kDLBool || raw.dtype.bits != 8) throw py::type_error("a mask must be a bool tensor");
      mask_ = view_of(raw, DType{});
      fusion_.mask = &mask_;
    }
    if (!bias.is_none()) {
      bias_ = Borrowed(bias).view;
      fusion_.bias = &bias_;
    }
    fusion_.mask_includes = where;
    fusion_.scale = scale;
    fusion_.causal = causal_named(causal);
    fusion_.dead_rows_are_zero = zero;
  }
  BorrowedFusion(const BorrowedFusion&) = delete;
  BorrowedFusion& operator=(const BorrowedFusion&) = delete;

  const Fusion& get() const { return fusion_; }

 private:
  TensorView mask_, bias_;
  Fusion fusion_;
};

// ---- calls --------------------------------------------------------------------------------------------------------

// Gets workspace from torch's allocator, so that memory statistics, CUDA graphs and streams see it.
struct Workspace {
  int device;
  py::object tensor;

  static void* allocate(void* context, std::size_t bytes) {
    auto& self = *static_cast<Workspace*>(context);
    const py::gil_scoped_acquire gil;
    const py::module_ torch = py::module_::import("torch");
    self.tensor = torch.attr("empty")(bytes, py::arg("dtype") = torch.attr("uint8"),
                                      py::arg("device") = "cuda:" + std::to_string(self.device));
    return reinterpret_cast<void*>(self.tensor.attr("data_ptr")().cast<std::uintptr_t>());
  }
};

// forced_regime(), asked of Python's copy of the environment: getenv looks at each variable there is, at each call.
std::optional<Regime> regime_in_environment() {
  struct Environment {
    py::object variables = py::getattr(py::module_::import("os").attr("environ"), "_data", py::none());
    py::bytes name{"NDSOFTMAX_REGIME"};
  };
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Environment> stored;
  const Environment& environment = stored.call_once_and_store_result([] { return Environment(); }).get_stored();
  if (PyDict_CheckExact(environment.variables.ptr()) &&
      PyDict_GetItemWithError(environment.variables.ptr(), environment.name.ptr()) == nullptr)
    return std::nullopt;
  return forced_regime();
}

Device device_of(const DLDevice& device, int threads) {
  if (device.device_type == kDLCPU) {
    Device cpu;
    cpu.threads = threads;
    return cpu;
  }
  if (device.device_type == kDLCUDA) return cuda_device(device.device_id);
  throw std::runtime_error("this build of ndsoftmax has kernels for the CPU" +
                           std::string(NDSOFTMAX_WITH_CUDA ? " and CUDA" : "") + " only");
}

// On the CPU, this many elements take no longer than it takes to give the GIL away and to take it back.
constexpr std::int64_t kInstant = 1024;

bool is_instant(const DLTensor& source) {
  std::int64_t elements = 1;
  for (int d = 0; d < source.ndim && elements <= kInstant; ++d) elements *= source.shape[d];
  return source.device.device_type == kDLCPU && elements <= kInstant;
}

template <typename Call>
void execute(const DLTensor& source, int threads, const Call& call) {
  const DLDevice device = source.device;
  Workspace workspace{device.device_id, {}};
  Execution execution;
  execution.device = device_of(device, threads);
  execution.allocate = &Workspace::allocate;
  execution.context = &workspace;
  execution.forced = regime_in_environment();
  if (device.device_type != kDLCPU &&
      exchange().current_work_stream(device.device_type, device.device_id, &execution.stream) != 0)
    throw py::error_already_set();
  std::optional<py::gil_scoped_release> no_gil;
  if (!is_instant(source)) no_gil.emplace();
  call(execution);
}

Operation operation_of(bool log) { return log ? Operation::log_softmax : Operation::softmax; }

using Dims = std::vector<std::int64_t>;

void forward(const Borrowed& from, const Borrowed& to, std::span<const std::int64_t> dims, bool log, int threads,
             const Fusion& fusion = {}) {
  execute(from.raw, threads, [&](const Execution& execution) {
    host_softmax(operation_of(log), from.view, to.view, dims, execution, fusion);
  });
}

void backward(const Borrowed& grad, const Borrowed& from, const Borrowed& to, std::span<const std::int64_t> dims,
              bool log, int threads, const Fusion& fusion = {}) {
  execute(from.raw, threads, [&](const Execution& execution) {
    host_softmax_backward(operation_of(log), grad.view, from.view, to.view, dims, execution, fusion);
  });
}

// ---- the short path -----------------------------------------------------------------------------------------------
// A plain call needs nothing of torch's dispatcher. None says that a call is not plain, or may be wrong: the caller
// then goes the long way, where errors are worded.

// The tensor as it lies in memory, where that is all there is to it. (What is_ordinary() does not know, as meta, sparse
// and nested tensors and those that a torch.func transform left behind, torch refuses to exchange. That takes it a
// millisecond, but asking each tensor first would cost every call 0.1 us a question.)
std::optional<DLTensor> ordinary(py::handle tensor, bool transformed) {
  const Torch& torch = Torch::get();
  if (!torch.is_ordinary(tensor, transformed)) return std::nullopt;
  DLTensor raw;
  if (exchange().dltensor_from_py_object_no_sync(tensor.ptr(), &raw) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool has_kernels =
      raw.device.device_type == kDLCPU || (NDSOFTMAX_WITH_CUDA && raw.device.device_type == kDLCUDA);
  if (!has_kernels || (raw.data == nullptr && torch.has_no_memory(tensor))) return std::nullopt;
  return raw;
}

// A new tensor as torch.empty_like makes it, and where it lies. `lies` is where `like` lies.
struct Output {
  Output(py::handle like, const DLTensor& lies, py::handle dtype) : to{} {
    const Torch& torch = Torch::get();
    const DLDevice device = lies.device;
    if (Torch::is_row_major(lies) && (device.device_type == kDLCPU || device.device_id == current_cuda_device())) {
      tensor = torch.empty_strided_like(lies, dtype);
      if (!tensor.is_none()) {
        to = exchanged(tensor);
        if (to.device.device_id == device.device_id) return;
      }
    }
    tensor = torch.empty_like(like, dtype);
    to = exchanged(tensor);
  }
  py::object tensor;
  DLTensor to;
};

// Only the CPU's kernels want to know, and not of a few elements, which one thread takes.
int threads_for(const DLTensor& source) {
  return source.device.device_type == kDLCPU && !is_instant(source) ? Torch::get().threads() : 1;
}

// Also where a gradient is needed, if the caller records.
bool are_plain(py::handle a, py::handle b, bool recorded) {
  const Torch& torch = Torch::get();
  const bool transformed = torch.transforms();
  return torch.is_tensor(a) && torch.at_rest() && !torch.autocasts() && !torch.is_meta(a) && ordinary(a, transformed) &&
         ordinary(b, transformed) &&
         ((!torch.needs_grad(a) && !torch.needs_grad(b)) || (recorded && !torch.below_autograd()));
}

// The dims of a plain call: one int, or a few.
struct PlainDims {
  std::array<std::int64_t, kMaxGroups> values;
  std::size_t count = 0;

  std::span<const std::int64_t> get() const { return {values.data(), count}; }

  bool add(py::handle dim) {
    if (count == values.size() || !PyLong_CheckExact(dim.ptr())) return false;
    int overflow = 0;
    values[count++] = PyLong_AsLongLongAndOverflow(dim.ptr(), &overflow);
    return overflow == 0;
  }
};

std::optional<PlainDims> plain_dims(py::handle dim) {
  PlainDims dims;
  if (!PyTuple_CheckExact(dim.ptr())) return dims.add(dim) ? std::optional(dims) : std::nullopt;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dim.ptr()); ++i)
    if (!dims.add(PyTuple_GET_ITEM(dim.ptr(), i))) return std::nullopt;
  return dims.count > 0 ? std::optional(dims) : std::nullopt;
}

// The first byte that a tensor with elements has, and one past its last.
std::pair<std::uintptr_t, std::uintptr_t> reach_of(const DLTensor& tensor) {
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
  std::uintptr_t elements = 1;
  for (int d = 0; d < tensor.ndim; ++d)
    elements += static_cast<std::uintptr_t>(tensor.shape[d] - 1) * static_cast<std::uintptr_t>(tensor.strides[d]);
  return {first, first + elements * tensor.dtype.bits / 8};
}

bool are_on_one_device(const DLTensor& a, const DLTensor& b) {
  return a.device.device_type == b.device.device_type && a.device.device_id == b.device.device_id;
}

bool have_same_shape_and_device(const DLTensor& a, const DLTensor& b) {
  return a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape) && are_on_one_device(a, b);
}

// Whether a plain call may write `out`. Others, also those whose memory needs a closer look, take the long way.
bool is_plain_out(py::handle out, const DLTensor& to, py::handle input, const DLTensor& from, py::handle dtype) {
  const Torch& torch = Torch::get();
  if (torch.needs_grad(input) || torch.needs_grad(out) || torch.is_inference(out)) return false;
  const std::optional<DType> written = find_dtype(to.dtype);
  if (!written || !dtype.is(torch.dtype(*written)) || !have_same_shape_and_device(to, from) || !Torch::is_row_major(to))
    return false;
  const auto [from_begin, from_end] = reach_of(from);
  const auto [to_begin, to_end] = reach_of(to);
  return out.is(input) || to_end <= from_begin || from_end <= to_begin;
}

// Whether it can say of every element of the input whether it is excluded, or included.
bool is_plain_mask(const DLTensor& mask, const DLTensor& input) {
  if (mask.dtype.code != kDLBool || mask.dtype.bits != 8 || mask.dtype.lanes != 1) return false;
  if (mask.ndim > input.ndim || !are_on_one_device(mask, input)) return false;
  const std::int64_t* const sizes = input.shape + (input.ndim - mask.ndim);
  return std::equal(mask.shape, mask.shape + mask.ndim, sizes,
                    [](std::int64_t of_mask, std::int64_t size) { return of_mask == 1 || of_mask == size; });
}

// Where the input needs a gradient, `record` gets the input and what was computed, and returns the output. A scale may
// be fused, and, into a new tensor, a mask, which excludes, or includes; and nothing else.
py::object plain_forward(py::handle input, py::handle dim, py::handle dtype, bool log, py::handle record,
                         py::handle out, double scale, py::handle mask, bool includes) {
  const Torch& torch = Torch::get();
  const std::optional<PlainDims> dims = plain_dims(dim);
  if (!dims || !torch.at_rest()) return py::none();
  const bool transformed = torch.transforms();
  if (transformed && out.is_none()) return py::none();
  const std::optional<DLTensor> raw = ordinary(input, transformed);
  if (!raw || raw->ndim > kMaxGroups) return py::none();
  const std::optional<DType> source = find_dtype(raw->dtype);
  if (!source || !torch.is_fused(*source, dtype)) return py::none();
  if (size_of(*source) == 2 && dtype.is_none() && torch.autocasts()) return py::none();  // others it leaves alone
  const py::handle result = dtype.is_none() ? torch.dtype(*source) : dtype;
  Fusion fusion;
  fusion.scale = scale;
  TensorView mask_view;
  if (!mask.is_none()) {
    const std::optional<DLTensor> raw_mask = out.is_none() ? ordinary(mask, transformed) : std::nullopt;
    if (!raw_mask || !is_plain_mask(*raw_mask, *raw)) return py::none();
    mask_view = view_of(*raw_mask, DType{});
    fusion.mask = &mask_view;
    fusion.mask_includes = includes;
    fusion.dead_rows_are_zero = true;
  }
  if (!out.is_none()) {
    const std::optional<DLTensor> to = ordinary(out, transformed);
    if (!to || !is_plain_out(out, *to, input, *raw, result)) return py::none();
    forward(Borrowed(*raw), Borrowed(*to), dims->get(), log, threads_for(*raw), fusion);
    torch.increment_version(out);
    return py::reinterpret_borrow<py::object>(out);
  }
  const bool recorded = torch.needs_grad(input) && !torch.below_autograd();
  const Output output(input, *raw, result);
  forward(Borrowed(*raw), Borrowed(output.to), dims->get(), log, threads_for(*raw), fusion);
  if (!recorded) return output.tensor;
  const py::object computed = checked(PyTuple_Pack(2, output.tensor.ptr(), torch.call(dim, *source, log).ptr()));
  return checked(PyObject_CallFunctionObjArgs(record.ptr(), input.ptr(), computed.ptr(), nullptr));
}

// plain_forward() as Python calls it: pybind11, which looks for what a function may be given, would take some 60 ns
// more at each call. C++'s exceptions become Python's as they do there.
PyObject* plain_forward_quickly(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  try {
    if (count != 6 && count != 9) throw py::type_error("plain_forward() takes 6 or 9 arguments");
    const bool fuses = count == 9;
    const double scale = fuses ? PyFloat_AsDouble(arguments[6]) : 1;
    if (scale == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return plain_forward(arguments[0], arguments[1], arguments[2], arguments[3] == Py_True, arguments[4], arguments[5],
                         scale, fuses ? arguments[7] : Py_None, fuses && arguments[8] == Py_True)
        .release()
        .ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// The forward of the autograd.Function that records a plain call, of (ctx, input, (output, call)): a frame of Python
// less is 0.1 us less at each call.
PyObject* record_forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  static PyObject* const call_name = PyUnicode_InternFromString("call");
  static PyObject* const save_name = PyUnicode_InternFromString("to_save");
  if (count != 3 || !PyTuple_CheckExact(arguments[2]) || PyTuple_GET_SIZE(arguments[2]) != 2) {
    PyErr_SetString(PyExc_TypeError, "record_forward() takes ctx, input and (output, call)");
    return nullptr;
  }
  PyObject *const ctx = arguments[0], *const output = PyTuple_GET_ITEM(arguments[2], 0);
  if (PyObject_SetAttr(ctx, call_name, PyTuple_GET_ITEM(arguments[2], 1)) != 0) return nullptr;
  // as ctx.save_for_backward(output)
  PyObject* const saved = PyTuple_Pack(1, output);
  if (saved == nullptr) return nullptr;
  const int failed = PyObject_SetAttr(ctx, save_name, saved);
  Py_DECREF(saved);
  return failed == 0 ? Py_NewRef(output) : nullptr;
}

// None likewise. (is_meta may be asked of tensors only, and it is, as the exchange takes a millisecond to refuse such.)
py::object plain_backward(py::handle grad_output, py::handle output, py::handle dim, py::handle input_dtype, bool log) {
  const Torch& torch = Torch::get();
  const std::optional<PlainDims> dims = plain_dims(dim);
  if (!dims || !torch.is_tensor(grad_output) || !torch.at_rest() || torch.is_meta(grad_output)) return py::none();
  if (torch.transforms()) return py::none();
  const std::optional<DLTensor> grad = ordinary(grad_output, false), from = ordinary(output, false);
  if (!grad || !from || from->ndim > kMaxGroups || !have_same_shape_and_device(*grad, *from)) return py::none();
  const std::optional<DType> source = find_dtype(from->dtype);
  if (!source || find_dtype(grad->dtype) != source || !torch.is_fused_backward(*source, input_dtype)) return py::none();
  if (torch.needs_grad(output) || torch.needs_grad(grad_output)) return py::none();
  const Output grad_input(output, *from, input_dtype.is_none() ? torch.dtype(*source) : input_dtype);
  backward(Borrowed(*grad), Borrowed(*from), Borrowed(grad_input.to), dims->get(), log, threads_for(*from));
  return grad_input.tensor;
}

// ---- plans --------------------------------------------------------------------------------------------------------

// A plan together with the problem it is for.
struct Planned {
  Problem problem;
  Plan plan;
};

// A tensor that is only planned for: sizes and strides.
using Described = std::pair<Dims, Dims>;

Problem problem_of(bool log, bool backward, const std::string& source_dtype, const std::string& result_dtype,
                   const Dims& sizes, const Dims& source_strides, const Dims& grad_strides, const Dims& result_strides,
                   const Dims& dims, const std::array<std::int64_t, kWhole>& offsets,
                   const std::optional<Described>& mask, const std::optional<Described>& bias,
                   const std::string& bias_dtype, double scale, const std::string& causal, bool zero) {
  for (const Dims* strides : {&source_strides, &grad_strides, &result_strides})
    if (strides->size() != sizes.size()) throw py::value_error("sizes and strides must have the same length");
  const auto view = [&](const std::string& dtype, const Dims& strides, int operand) {
    const DType type = dtype_named(dtype);
    // storages lie so far apart that no offset leads from one into another
    const auto address =
        (std::uintptr_t{1} << (40 + operand)) + static_cast<std::uintptr_t>(offsets[operand] * size_of(type));
    return TensorView{reinterpret_cast<void*>(address), type, static_cast<int>(sizes.size()), sizes.data(),
                      strides.data()};
  };
  const TensorView source = view(source_dtype, source_strides, kSource);
  const TensorView grad = view(source_dtype, grad_strides, kGrad);
  const TensorView result = view(result_dtype, result_strides, kResult);
  const auto beside = [](const std::optional<Described>& described, DType type) {
    if (!described) return TensorView{};
    if (described->first.size() != described->second.size())
      throw py::value_error("sizes and strides must have the same length");
    return TensorView{nullptr, type, static_cast<int>(described->first.size()), described->first.data(),
                      described->second.data()};
  };
  const TensorView mask_view = beside(mask, DType{}), bias_view = beside(bias, dtype_named(bias_dtype));
  Fusion fusion;
  if (mask) fusion.mask = &mask_view;
  if (bias) fusion.bias = &bias_view;
  fusion.scale = scale;
  fusion.causal = causal_named(causal);
  fusion.dead_rows_are_zero = zero;
  return make_problem(operation_of(log), source, backward ? &grad : nullptr, result, dims, fusion);
}

Planned plan_of(const Problem& problem, const Device& device, const std::optional<std::string>& regime) {
  std::optional<Regime> forced;
  if (regime) forced = regime_from(*regime, "regime");
  return {problem, plan(problem, device, forced)};
}

Device make_device(const std::string& kind, int index, int compute_capability, int multiprocessors,
                   int shared_bytes_per_block, std::int64_t l2_bytes, int threads) {
  if (kind != "cpu" && kind != "cuda") throw py::value_error("kind is '" + kind + "'; it may be cpu or cuda");
  return {kind == "cpu" ? Device::Kind::cpu : Device::Kind::cuda,
          index,
          compute_capability,
          multiprocessors,
          shared_bytes_per_block,
          l2_bytes,
          threads};
}

std::string kind_of(const Device& device) { return device.kind == Device::Kind::cpu ? "cpu" : "cuda"; }

py::dict build_info() {
  py::dict info;
  info["version"] = NDSOFTMAX_VERSION;
  info["cuda"] = bool(NDSOFTMAX_WITH_CUDA);
  info["cuda_version"] = NDSOFTMAX_WITH_CUDA ? py::object(py::str(NDSOFTMAX_CUDA_VERSION)) : py::none();
  info["architectures"] = NDSOFTMAX_WITH_CUDA ? py::str(NDSOFTMAX_CUDA_ARCHITECTURES).attr("split")() : py::list();
  info["cpu_capability"] = cpu::capability();
  info["cpu_instruction_sets"] = py::str(NDSOFTMAX_CPU_INSTRUCTION_SETS).attr("split")();
  info["compiler"] = NDSOFTMAX_COMPILER;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled part of ndsoftmax. Its interface is private; import ndsoftmax instead.";

  py::class_<Device>(module, "Device")
      .def(py::init(&make_device), py::kw_only(), py::arg("kind") = "cuda", py::arg("index") = 0,
           py::arg("compute_capability") = 90, py::arg("multiprocessors") = 132,
           py::arg("shared_bytes_per_block") = 227 * 1024, py::arg("l2_bytes") = 50 << 20, py::arg("threads") = 1)
      .def_property_readonly("kind", &kind_of)
      .def_readonly("index", &Device::index)
      .def_readonly("compute_capability", &Device::compute_capability)
      .def_readonly("multiprocessors", &Device::multiprocessors)
      .def_readonly("shared_bytes_per_block", &Device::shared_bytes_per_block)
      .def_readonly("l2_bytes", &Device::l2_bytes)
      .def_readonly("threads", &Device::threads)
      .def("__eq__", [](const Device& a, const Device& b) { return a == b; })
      .def("__repr__", [](const Device& device) {
        if (device.kind == Device::Kind::cpu)
          return "Device(kind='cpu', threads=" + std::to_string(device.threads) + ")";
        return "Device(kind='cuda', index=" + std::to_string(device.index) +
               ", compute_capability=" + std::to_string(device.compute_capability) +
               ", multiprocessors=" + std::to_string(device.multiprocessors) + ")";
      });

  py::class_<Planned>(module, "Plan")
      .def_property_readonly("regime", [](const Planned& p) { return name_of(p.plan.regime); })
      .def_property_readonly("ragged", [](const Planned& p) { return p.plan.ragged; })
      .def_property_readonly("staged", [](const Planned& p) { return p.plan.staged; })
      .def_property_readonly("meets", [](const Planned& p) { return p.plan.meets; })
      .def_property_readonly("sectors", [](const Planned& p) { return p.plan.sectors; })
      .def_property_readonly("beside",
                             [](const Planned& p) -> std::optional<const char*> {
                               if (p.plan.beside == Beside::none) return std::nullopt;
                               return p.plan.beside == Beside::masks ? "mask" : "bias";
                             })
      .def_property_readonly("slabs", [](const Planned& p) { return p.plan.slabs; })
      .def_property_readonly("log2_dim", [](const Planned& p) { return p.plan.log2_dim; })
      .def_property_readonly("vector", [](const Planned& p) { return p.plan.vector; })
      .def_property_readonly("items", [](const Planned& p) { return p.plan.items; })
      .def_property_readonly("threads_per_row", [](const Planned& p) { return p.plan.threads_per_row; })
      .def_property_readonly("rows_per_block", [](const Planned& p) { return p.plan.rows_per_block; })
      .def_property_readonly("block", [](const Planned& p) { return p.plan.block; })
      .def_property_readonly("cluster", [](const Planned& p) { return p.plan.cluster; })
      .def_property_readonly("grid", [](const Planned& p) { return p.plan.grid; })
      .def_property_readonly("splits", [](const Planned& p) { return p.plan.splits; })
      .def_property_readonly("run", [](const Planned& p) { return p.plan.run; })
      .def_property_readonly("interleaved", [](const Planned& p) { return p.plan.interleaved; })
      .def_property_readonly("shared_items", [](const Planned& p) { return p.plan.shared_items; })
      .def_property_readonly("shared_bytes", [](const Planned& p) { return p.plan.shared_bytes; })
      .def_property_readonly("workspace_bytes", [](const Planned& p) { return p.plan.workspace_bytes; })
      .def_property_readonly("passes", [](const Planned& p) { return p.plan.passes; })
      .def_property_readonly("why", [](const Planned& p) { return std::string(p.plan.why); })
      .def_property_readonly("outer", [](const Planned& p) { return p.problem.outer.size; })
      .def_property_readonly("dim", [](const Planned& p) { return p.problem.dim.size; })
      .def_property_readonly("inner", [](const Planned& p) { return p.problem.inner.size; })
      .def("__eq__", [](const Planned& a, const Planned& b) { return a.plan == b.plan && a.problem == b.problem; })
      .def("__str__", [](const Planned& p) { return to_string(p.plan); })
      .def("__repr__",
           [](const Planned& p) { return "<Plan " + to_string(p.problem) + "; " + to_string(p.plan) + ">"; });

  module.def(
      "forward",
      [](py::handle input, py::handle output, const Dims& dims, bool log, int threads) {
        forward(Borrowed(input), Borrowed(output), dims, log, threads);
      },
      py::arg("input"), py::arg("output"), py::arg("dims"), py::arg("log"), py::arg("threads"));
  module.def(
      "backward",
      [](py::handle grad_output, py::handle output, py::handle grad_input, const Dims& dims, bool log, int threads) {
        backward(Borrowed(grad_output), Borrowed(output), Borrowed(grad_input), dims, log, threads);
      },
      py::arg("grad_output"), py::arg("output"), py::arg("grad_input"), py::arg("dims"), py::arg("log"),
      py::arg("threads"));
  module.def(
      "masked_forward",
      [](py::handle input, py::handle output, py::handle mask, py::handle bias, const Dims& dims, bool log, bool where,
         double scale, const std::string& causal, bool zero, int threads) {
        forward(Borrowed(input), Borrowed(output), dims, log, threads,
                BorrowedFusion(mask, bias, where, scale, causal, zero).get());
      },
      py::arg("input"), py::arg("output"), py::arg("mask"), py::arg("bias"), py::arg("dims"), py::arg("log"),
      py::arg("where"), py::arg("scale"), py::arg("causal"), py::arg("zero"), py::arg("threads"));
  module.def(
      "masked_backward",
      [](py::handle grad_output, py::handle output, py::handle grad_input, py::handle mask, const Dims& dims, bool log,
         bool where, double scale, const std::string& causal, bool zero, int threads) {
        // (rows that became constant, where `zero` lets them, are told by their output)
        backward(Borrowed(grad_output), Borrowed(output), Borrowed(grad_input), dims, log, threads,
                 BorrowedFusion(mask, py::none(), where, scale, causal, zero).get());
      },
      py::arg("grad_output"), py::arg("output"), py::arg("grad_input"), py::arg("mask"), py::arg("dims"),
      py::arg("log"), py::arg("where"), py::arg("scale"), py::arg("causal"), py::arg("zero"), py::arg("threads"));
  module.def("are_plain", &are_plain, py::arg("a"), py::arg("b"), py::arg("recorded") = false);
  using Quick = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
  const auto quick = [](const char* name, Quick function, const char* signature) {
    return PyMethodDef{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL,
                       signature};
  };
  static PyMethodDef quick_methods[]{quick("plain_forward", &plain_forward_quickly,
                                           "(input, dim, dtype, log, record, out, scale=1.0, mask=None, where=False)"),
                                     quick("record_forward", &record_forward, "(ctx, input, computed)")};
  for (PyMethodDef& method : quick_methods)
    module.add_object(method.ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
  module.def("plain_backward", &plain_backward, py::arg("grad_output"), py::arg("output"), py::arg("dims"),
             py::arg("input_dtype"), py::arg("log"));
  module.attr("MAX_GROUPS") = kMaxGroups;
  // what imports need of build_info(), which fails where NDSOFTMAX_CPU_CAPABILITY is wrong
  module.attr("VERSION") = NDSOFTMAX_VERSION;
  module.attr("HAS_CUDA") = bool(NDSOFTMAX_WITH_CUDA);
  module.def("build_info", &build_info);
  module.def("last_cache_bytes", &cpu::last_cache_bytes);
  module.def(
      "device",
      [](const std::string& type, int index, int threads) {
        return device_of({type == "cpu" ? kDLCPU : kDLCUDA, index}, threads);
      },
      py::arg("type"), py::arg("index") = 0, py::arg("threads") = 1);

  module.def("forced_regime", [] {
    const std::optional<Regime> forced = regime_in_environment();
    return forced ? name_of(*forced) : nullptr;
  });
  module.def(
      "plan",
      [](bool log, bool is_backward, const std::string& source_dtype, const std::string& result_dtype,
         const Dims& sizes, const Dims& source_strides, const Dims& grad_strides, const Dims& result_strides,
         const Dims& dims, const Device& device, const std::array<std::int64_t, kWhole>& offsets,
         const std::optional<std::string>& regime, const std::optional<Described>& mask,
         const std::optional<Described>& bias, const std::string& bias_dtype, double scale, const std::string& causal,
         bool zero) {
        return plan_of(problem_of(log, is_backward, source_dtype, result_dtype, sizes, source_strides, grad_strides,
                                  result_strides, dims, offsets, mask, bias, bias_dtype, scale, causal, zero),
                       device, regime);
      },
      py::arg("log"), py::arg("backward"), py::arg("source_dtype"), py::arg("result_dtype"), py::arg("sizes"),
      py::arg("source_strides"), py::arg("grad_strides"), py::arg("result_strides"), py::arg("dims"), py::arg("device"),
      py::arg("offsets") = std::array<std::int64_t, kWhole>{}, py::arg("regime") = py::none(),
      py::arg("mask") = py::none(), py::arg("bias") = py::none(), py::arg("bias_dtype") = "float32",
      py::arg("scale") = 1.0, py::arg("causal") = "", py::arg("zero") = false);
  module.def(
      "coverage", [](const Planned& planned) { return coverage(planned.problem, planned.plan); }, py::arg("plan"));
}
