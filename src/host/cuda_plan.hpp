// The planner for CUDA devices. Part of every build: plans can be made, printed and tested without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ndsoftmax/plan.hpp"

namespace ndsoftmax {

Plan cuda_plan(const Problem& problem, const Device& device, std::optional<Regime> forced);

// How often the threads of a plan write each element, indexed [outer][dim][inner]: all ones, or the plan is wrong.
// Walks every thread of the grid with the index functions that the kernels use.
std::vector<std::uint8_t> coverage(const Problem& problem, const Plan& plan);

}  // namespace ndsoftmax
