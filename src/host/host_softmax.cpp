// The dispatcher: split, plan, launch.
#include "ndsoftmax/host_softmax.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "host/cpu/launch.hpp"
#include "host/planned_call.hpp"
#if NDSOFTMAX_WITH_CUDA
#include "cuda/launch.hpp"
#endif

namespace ndsoftmax {
namespace {

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

void run(const Call& call, const Addresses& addresses) {
  if (!call.may_be_kept()) {
    const Problem problem = call.problem();
    return run(problem, call.planned(problem), addresses, call.execution);
  }
  const PlannedCall& kept = planned(call);
  if (kept.chosen.workspace_bytes == 0) return run(kept.problem, kept.chosen, addresses, call.execution);
  const Problem problem = kept.problem;  // what allocates the workspace may run anything, also another call
  const Plan chosen = kept.chosen;
  run(problem, chosen, addresses, call.execution);
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
  run({operation, input, nullptr, output, dims, fusion, execution},
      {input.data, nullptr, output.data, data_of(fusion.mask), data_of(fusion.bias)});
}

void host_softmax_backward(Operation operation, const TensorView& grad_output, const TensorView& output,
                           const TensorView& grad_input, std::span<const std::int64_t> dims, const Execution& execution,
                           const Fusion& fusion) {
  run({operation, output, &grad_output, grad_input, dims, fusion, execution},
      {output.data, grad_output.data, grad_input.data, data_of(fusion.mask), nullptr});
}

}  // namespace ndsoftmax
