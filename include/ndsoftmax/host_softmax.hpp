// The entry points. A call is: split the tensors into outer × dim × inner, plan, launch. Nothing is copied, nothing
// synchronizes.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "ndsoftmax/plan.hpp"
#include "ndsoftmax/problem.hpp"
#include "ndsoftmax/types.hpp"

namespace ndsoftmax {

// Where and with what a call runs.
struct Execution {
  Device device;
  void* stream = nullptr;  // cudaStream_t; unused on the CPU
  // Returns device memory that lives until the work queued on `stream` is done. Called at most once, and only for
  // plans with workspace_bytes > 0, on CUDA; without it, those throw std::invalid_argument.
  void* (*allocate)(void* context, std::size_t bytes) = nullptr;
  void* context = nullptr;
  std::optional<Regime> forced;  // no other may be planned
};

// The CUDA device of this number, as plan() needs it. Throws std::runtime_error where there is none, or no CUDA in this
// build.
const Device& cuda_device(int index);

// The number of the CUDA device that is current in this thread; -1 without CUDA in this build.
int current_cuda_device();

// The regime that the environment variable NDSOFTMAX_REGIME names, for tests and measurements: what Python's calls
// force.
std::optional<Regime> forced_regime();

// output = softmax(input) or log_softmax(input) over `dims`. Same shape, any strides; output has the input's dtype,
// or float32 where the input is 16-bit. output may be the input itself; it must not overlap it otherwise.
void host_softmax(Operation operation, const TensorView& input, const TensorView& output,
                  std::span<const std::int64_t> dims, const Execution& execution, const Fusion& fusion = {});

// grad_input of the same operation, from grad_output and the output of forward (one dtype); grad_input has that dtype,
// or a 16-bit one where theirs is float32. `fusion` is that of forward; its bias is not read.
void host_softmax_backward(Operation operation, const TensorView& grad_output, const TensorView& output,
                           const TensorView& grad_input, std::span<const std::int64_t> dims, const Execution& execution,
                           const Fusion& fusion = {});

}  // namespace ndsoftmax
