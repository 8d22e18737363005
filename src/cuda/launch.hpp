// What the dispatcher needs of the CUDA backend: the devices there are, and a launch that queues a plan on a stream.
// A build without CUDA leaves src/cuda's sources out; NDSOFTMAX_WITH_CUDA says which it is.
#pragma once

#include "host/addresses.hpp"
#include "ndsoftmax/plan.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cuda {

// Properties of a device, read once. Throws std::runtime_error with CUDA's words where there is none.
const Device& device(int index);

int current_device();

// Makes device.index current for the time of the call. Throws std::runtime_error with CUDA's words when a launch fails.
void launch(const Problem& problem, const Plan& plan, const Device& device, const Addresses& addresses, void* workspace,
            void* stream);

}  // namespace ndsoftmax::cuda
