// What the dispatcher needs of the CPU backend: a plan, and a launch that carries it out before it returns.
#pragma once

#include <cstdint>
#include <optional>

#include "host/addresses.hpp"
#include "ndsoftmax/plan.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cpu {

Plan plan(const Problem& problem, const Device& device, std::optional<Regime> forced);

// The result does not depend on device.threads, bit by bit.
void launch(const Problem& problem, const Plan& plan, const Device& device, const Addresses& addresses);

// The third cache that a core has, mostly with its neighbours: gradients of problems that exceed it are written past
// it. (glibc's sysconf() gives that of the whole processor.)
std::int64_t last_cache_bytes();

// "avx512", "avx2" or "baseline": what this process uses, the best that the machine has unless
// the environment variable NDSOFTMAX_CPU_CAPABILITY names a lower one.
const char* capability();

}  // namespace ndsoftmax::cpu
