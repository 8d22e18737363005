// The dispatcher: split, plan, launch.
#include "ndsoftmax/host_softmax.hpp"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/cpu/launch.hpp"
#if NDSOFTMAX_WITH_CUDA
#include "cuda/launch.hpp"
#endif

namespace ndsoftmax {
namespace {

bool fuses(const Fusion& fusion) {
  return fusion.mask || fusion.bias || fusion.scale != 1 || fusion.causal != Causal::none || fusion.dead_rows_are_zero;
}

const void* data_of(const TensorView* tensor) { return tensor ? tensor->data : nullptr; }

#if !NDSOFTMAX_WITH_CUDA
[[noreturn]] void no_cuda() {
  throw std::runtime_error("this build of ndsoftmax has no CUDA kernels; build it where nvcc is on the PATH");
}
#endif

void run(const Problem& problem, const Plan& chosen, const Addresses& addresses, const Execution& execution) {
  if (problem.elements() == 0) return;
  if (execution.device.kind == Device::Kind::cpu) return cpu::launch(problem, chosen, execution.device, addresses);
#if NDSOFTMAX_WITH_CUDA
  void* workspace = nullptr;
  if (chosen.workspace_bytes > 0) {
    if (execution.allocate == nullptr)
      throw std::invalid_argument("this plan needs a workspace, but execution.allocate is null: " + to_string(chosen));
    workspace = execution.allocate(execution.context, static_cast<std::size_t>(chosen.workspace_bytes));
  }
  cuda::launch(problem, chosen, execution.device, addresses, workspace, execution.stream);
#else
  no_cuda();
#endif
}

// What is given to a call that fuses nothing.
struct Call {
  Operation operation;
  const TensorView& source;
  const TensorView* grad;  // backward
  const TensorView& result;
  std::span<const std::int64_t> dims;
  const Execution& execution;

  bool in_place() const { return result.data && (result.data == source.data || (grad && result.data == grad->data)); }
  bool is_small() const { return std::max(source.rank, result.rank) <= kMaxGroups && dims.size() <= kMaxGroups; }
  Problem problem() const { return make_problem(operation, source, grad, result, dims); }
};

// What a Problem takes of a tensor.
struct Layout {
  DType dtype;
  int rank;
  std::uintptr_t misalignment;
  Array<std::int64_t, kMaxGroups> sizes, strides;  // of which `rank` are set

  static std::uintptr_t misalignment_of(const TensorView& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data) % 16;
  }

  explicit Layout(const TensorView& tensor)
      : dtype(tensor.dtype), rank(tensor.rank), misalignment(misalignment_of(tensor)) {
    std::copy_n(tensor.sizes, rank, sizes.begin());
    std::copy_n(tensor.strides, rank, strides.begin());
  }

  bool is_of(const TensorView& tensor) const {
    return dtype == tensor.dtype && rank == tensor.rank && misalignment == misalignment_of(tensor) &&
           std::equal(tensor.sizes, tensor.sizes + rank, sizes.begin()) &&
           std::equal(tensor.strides, tensor.strides + rank, strides.begin());
  }
};

// A call, and what follows from it.
class Planned {
 public:
  explicit Planned(const Call& call)
      : problem(call.problem()),
        chosen(plan(problem, call.execution.device, call.execution.forced)),
        operation_(call.operation),
        source_(call.source),
        grad_(call.grad ? *call.grad : call.source),
        result_(call.result),
        in_place_(call.in_place()),
        dims_(call.dims.begin(), call.dims.end()),
        device_(call.execution.device),
        forced_(call.execution.forced) {}

  // Whether the same follows from another call of the same direction.
  bool is_of(const Call& call) const {
    return operation_ == call.operation && source_.is_of(call.source) && (!call.grad || grad_.is_of(*call.grad)) &&
           result_.is_of(call.result) && in_place_ == call.in_place() && std::ranges::equal(dims_, call.dims) &&
           device_ == call.execution.device && forced_ == call.execution.forced;
  }

  Problem problem;
  Plan chosen;

 private:
  Operation operation_;
  Layout source_, grad_, result_;
  bool in_place_;
  std::vector<std::int64_t> dims_;
  Device device_;
  std::optional<Regime> forced_;
};

// The newest call of a thread is kept: the next is mostly like it, and for a tiny one it takes longer to find out what
// the Problem is, and to plan, than to compute.
void run(const Call& call, const Addresses& addresses) {
  if (!call.is_small()) {
    const Problem problem = call.problem();
    return run(problem, plan(problem, call.execution.device, call.execution.forced), addresses, call.execution);
  }
  thread_local Array<std::optional<Planned>, 2> newest;  // forward, backward
  std::optional<Planned>& planned = newest[call.grad ? 1 : 0];
  if (!planned || !planned->is_of(call)) planned.emplace(call);
  if (planned->chosen.workspace_bytes == 0) return run(planned->problem, planned->chosen, addresses, call.execution);
  const Planned kept = *planned;  // what allocates the workspace may run anything, also another call
  run(kept.problem, kept.chosen, addresses, call.execution);
}

}  // namespace

const Device& cuda_device([[maybe_unused]] int index) {
#if NDSOFTMAX_WITH_CUDA
  return cuda::device(index);
#else
  no_cuda();
#endif
}

int current_cuda_device() {
#if NDSOFTMAX_WITH_CUDA
  return cuda::current_device();
#else
  return -1;
#endif
}

std::optional<Regime> forced_regime() {
  const char* name = std::getenv("NDSOFTMAX_REGIME");
  if (name == nullptr || *name == '\0') return std::nullopt;
  return regime_from(name, "NDSOFTMAX_REGIME");
}

void host_softmax(Operation operation, const TensorView& input, const TensorView& output,
                  std::span<const std::int64_t> dims, const Execution& execution, const Fusion& fusion) {
  const Addresses addresses{input.data, nullptr, output.data, data_of(fusion.mask), data_of(fusion.bias)};
  if (!fuses(fusion)) return run({operation, input, nullptr, output, dims, execution}, addresses);
  const Problem problem = make_problem(operation, input, nullptr, output, dims, fusion);
  run(problem, plan(problem, execution.device, execution.forced), addresses, execution);
}

void host_softmax_backward(Operation operation, const TensorView& grad_output, const TensorView& output,
                           const TensorView& grad_input, std::span<const std::int64_t> dims, const Execution& execution,
                           const Fusion& fusion) {
  const Addresses addresses{output.data, grad_output.data, grad_input.data, data_of(fusion.mask), nullptr};
  if (!fuses(fusion)) return run({operation, output, &grad_output, grad_input, dims, execution}, addresses);
  const Problem problem = make_problem(operation, output, &grad_output, grad_input, dims, fusion);
  run(problem, plan(problem, execution.device, execution.forced), addresses, execution);
}

}  // namespace ndsoftmax
