// From a Problem to a Plan: names, printing, and the way to the CPU's or to CUDA's planner.
#include "ndsoftmax/plan.hpp"

#include <sstream>
#include <stdexcept>

#include "host/cpu/launch.hpp"
#include "host/cuda_plan.hpp"

namespace ndsoftmax {
namespace {

constexpr Array kRegimeNames{"warp", "block", "cluster", "online", "split", "strided"};

}  // namespace

const char* name_of(Regime regime) { return kRegimeNames[static_cast<int>(regime)]; }

Regime regime_from(std::string_view name, std::string_view given_for) {
  std::ostringstream refusal;
  refusal << given_for << " is '" << name << "'; it may be ";
  for (int i = 0; i < kRegimeNames.size(); ++i) {
    if (name == kRegimeNames[i]) return static_cast<Regime>(i);
    refusal << (i == 0 ? "" : i + 1 < kRegimeNames.size() ? ", " : " or ") << kRegimeNames[i];
  }
  throw std::invalid_argument(refusal.str());
}

Plan plan(const Problem& problem, const Device& device, std::optional<Regime> forced) {
  if (problem.elements() == 0) {
    Plan nothing;
    nothing.grid = 0;
    nothing.why = "there are no elements";
    return nothing;
  }
  return device.kind == Device::Kind::cpu ? cpu::plan(problem, device, forced) : cuda_plan(problem, device, forced);
}

std::string to_string(const Plan& plan) {
  std::ostringstream text;
  text << name_of(plan.regime);
  if (plan.staged) text << ", staged through shared memory";
  text << ": " << plan.items << " × " << plan.vector << " elements a thread, " << plan.threads_per_row << " threads a "
       << (plan.regime == Regime::strided ? "column" : "row") << ", grid " << plan.grid << " × " << plan.block;
  if (plan.cluster > 1) text << " in clusters of " << plan.cluster;
  if (plan.splits > 1) text << ", " << plan.splits << " parts a row";
  if (plan.interleaved > 1) text << ", " << plan.interleaved << " columns a row";
  if (plan.meets) text << ", all blocks at once";
  if (plan.shared_bytes > 0) text << ", " << plan.shared_bytes << " bytes of shared memory";
  if (plan.workspace_bytes > 0) text << ", " << plan.workspace_bytes << " bytes of workspace";
  text << ", reads each element " << (plan.passes == 1 ? "once" : "at most twice") << "; " << plan.why;
  return text.str();
}

}  // namespace ndsoftmax
