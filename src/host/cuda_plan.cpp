// Which kernel, and in which shape. Each regime offers a plan or says why it cannot take the problem; the first that
// both can take it and expects to be fastest wins. All numbers come from tuning.hpp.
#include "host/cuda_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "host/planning.hpp"

namespace ndsoftmax {
namespace planning {
namespace {

// Whether a slab, dim times two columns, is one run of memory in every operand, and begins at a multiple of their size:
// then the k-th element of each of its vectors is of the same column.
bool columns_interleave(const Problem& problem, const Device& device) {
  constexpr int columns = tuning::kInterleavedColumns;
  if (problem.fused.any || problem.dim.rank != 1 || problem.inner.rank != 1 || problem.inner.size != columns)
    return false;
  if (device.compute_capability < tuning::kInterleavedFrom ||
      !tuning::may_interleave(size_of(problem.source), size_of(problem.result)))
    return false;
  for (int operand = 0; operand < kWhole; ++operand)
    if (problem.has(operand) && problem.dim.groups[0].stride[operand] != columns) return false;
  return columns_are_vectors(problem, columns);
}

// Whether columns that could be a row do better as such all the same.
bool rather_columns(const Problem& problem, const Device& device) {
  const std::int64_t slab_bytes = problem.dim.size * problem.inner.size * size_of(problem.source);
  return size_of(problem.source) == 2 && problem.direction == Direction::forward &&
         problem.outer.size < device.multiprocessors && slab_bytes < tuning::kInterleavedFewBytes;
}

// A plan for interleaved_rows(), for the problem that they come from.
Plan interleaved(const Problem& problem, const Device& device, Plan plan) {
  if (plan.meets) {  // for which there is no such kernel
    const Problem rows = interleaved_rows(problem);
    plan = split_plan(rows, rows_of(rows, device), device);
  }
  plan.interleaved = tuning::kInterleavedColumns;
  plan.workspace_bytes *= plan.interleaved;
  plan.why = plan.regime == Regime::cluster
                 ? "two columns take turns in a row of memory, which a cluster of blocks holds"
                 : "two columns take turns in a row of memory: blocks share it, states meet in a workspace";
  return plan;
}

// The plan that there would be without the scale, where that is all that is fused and kernels have it as a factor:
// backward, of the result; forward, of the elements of rows, unless that would turn the largest into others.
std::optional<Plan> scaling_plan(const Problem& problem, const Device& device, std::optional<Regime> forced) {
  if (!problem.fused.only_scale()) return {};
  const bool forward = problem.direction == Direction::forward;
  const bool rows_may_scale = tuning::rows_may_scale(size_of(problem.source)) && problem.source == problem.result &&
                              problem.contiguous_rows() && forced != Regime::strided;
  if (forward && (!rows_may_scale || !may_scale(problem.fused))) return {};
  Plan plan = cuda_plan(without_scale(problem), device, forced);
  if (forward && plan.regime == Regime::strided) {  // single elements, which do not: lanes of a warp may
    const Problem rows = without_scale(problem);
    const Offer warp = offer_warp(rows, rows_of(rows, device), device);
    if (!warp.plan) return {};
    plan = *warp.plan;
  }
  plan.scales = true;
  return plan;
}

Offer offer_of(Regime regime, const Problem& problem, const Device& device, const tuning::Architecture& architecture) {
  if (regime == Regime::strided) return {strided_plan(problem, device, architecture)};
  if ((regime == Regime::cluster || regime == Regime::split) && columns_interleave(problem, device)) {
    const Offer offer = offer_of(regime, interleaved_rows(problem), device, architecture);
    return offer.plan ? Offer{interleaved(problem, device, *offer.plan)} : offer;
  }
  if (!problem.contiguous_rows()) return {{}, "the elements of a row are not neighbours in memory"};
  if (!fused_steps_are_ints(problem.dim.groups[0])) return {{}, "the mask or the bias has elements 2^31 apart"};
  const Rows rows = rows_of(problem, device);
  if (regime == Regime::warp) return offer_warp(problem, rows, device);
  if (!rows.alike) return {{}, "the tensors' rows are misaligned differently"};
  switch (regime) {
    case Regime::block: return offer_block(problem, rows, device, tuning::kMaxBlock);
    case Regime::cluster: return offer_cluster(problem, rows, device, architecture);
    case Regime::online: return offer_online(problem, rows, device, architecture);
    default: return offer_split(problem, rows, device);
  }
}

}  // namespace

bool may_scale(const Fused& fused) {
  constexpr float kLeast = 0x1p-118f, kMost = 0x1p+118f;
  const auto scale = static_cast<float>(fused.scale);
  return scale >= kLeast && scale <= kMost;
}

void let_meet(Plan& plan, const Problem& problem, const Device& device, std::int64_t steps, int l2_part, double least) {
  const std::int64_t room = tuning::dynamic_shared_bytes(device.shared_bytes_per_block) - plan.shared_bytes;
  if (room < 0 || plan.grid > device.multiprocessors || l2_part * bytes_read(problem) <= device.l2_bytes) return;
  const int step = bytes_of_step(problem, plan);
  const auto in_shared = std::clamp<std::int64_t>(steps - tuning::kMeetingHeldSteps, 0, room / step);
  const std::int64_t kept = std::min<std::int64_t>(steps, in_shared + tuning::kMeetingHeldSteps);
  if (static_cast<double>(kept) < least * static_cast<double>(steps)) return;
  plan.meets = true;
  plan.shared_bytes += static_cast<int>(in_shared * step);
}

}  // namespace planning

using namespace planning;

Problem without_scale(const Problem& problem) {
  Problem plain = problem;
  plain.fused.any = false;
  return plain;
}

Problem interleaved_rows(const Problem& problem) {
  Problem rows = problem;
  rows.dim.size = rows.dim.groups[0].size = problem.dim.size * problem.inner.size;
  for (std::int64_t& stride : rows.dim.groups[0].stride) stride = 1;
  rows.inner = Axis{};
  return rows;
}

Plan without_meeting(const Problem& problem, const Plan& plan) {
  Plan two_launches = plan;
  two_launches.meets = false;
  if (plan.regime == Regime::split) {
    two_launches.items = tuning::online_vectors(problem.direction, problem.fused.any);
    two_launches.block = two_launches.threads_per_row = tuning::kOnlineBlock;
    two_launches.splits *= tuning::kSplitBlocks;
    two_launches.grid *= tuning::kSplitBlocks;
    two_launches.run = two_launches.shared_bytes = 0;
  } else {
    two_launches.shared_bytes = states_bytes_of_teams(problem, plan);
  }
  return two_launches;
}

bool masks_neighbours(const Problem& problem) {
  return problem.fused.only_mask() && problem.dim.groups[0].stride[kMask] == 1 &&
         (problem.direction == Direction::backward || may_scale(problem.fused));
}

bool masks_vectors(const Problem& problem) {
  const int source_bytes = size_of(problem.source);
  return masks_neighbours(problem) && may_scale(problem.fused) && problem.contiguous_rows() &&
         problem.dim.size % (tuning::kVectorBytes / source_bytes) == 0 && rows_start_on_vectors(problem, kMask, 1) &&
         rows_start_on_vectors(problem, kSource, source_bytes) && rows_are_vectors(problem);
}

bool biases_neighbours(const Problem& problem) {
  return problem.fused.only_bias() && problem.fused.bias_dtype == problem.source && problem.contiguous_rows() &&
         problem.dim.groups[0].stride[kBias] == 1;
}

bool biases_vectors(const Problem& problem) {
  const int bytes = size_of(problem.source);
  return biases_neighbours(problem) && rows_are_vectors(problem) &&
         rows_start_alike(problem, kBias, bytes, tuning::kVectorBytes / bytes);
}

bool has_biased_kernels(const Problem& problem) {
  return problem.direction == Direction::forward && problem.source == problem.result && biases_neighbours(problem) &&
         tuning::has_biased_rows(size_of(problem.source));
}

bool has_masked_kernels(const Problem& problem) {
  return problem.direction == Direction::forward && problem.source == problem.result && size_of(problem.source) < 8 &&
         problem.contiguous_rows() && masks_neighbours(problem);
}

Plan cuda_plan(const Problem& problem, const Device& device, std::optional<Regime> forced) {
  if (const auto scaling = scaling_plan(problem, device, forced)) return *scaling;
  const tuning::Architecture& architecture = tuning::architecture(device.compute_capability);
  if (forced) {
    const Offer offer = offer_of(*forced, problem, device, architecture);
    if (offer.plan) return *offer.plan;
    throw std::invalid_argument(std::string("the ") + name_of(*forced) + " regime cannot take " + to_string(problem) +
                                ": " + offer.refusal);
  }
  if (columns_interleave(problem, device) && !rather_columns(problem, device)) {
    const Plan plan = cuda_plan(interleaved_rows(problem), device, {});
    if (plan.regime == Regime::cluster || plan.regime == Regime::split) return interleaved(problem, device, plan);
  }
  if (!problem.contiguous_rows() || !fused_steps_are_ints(problem.dim.groups[0]))
    return strided_plan(problem, device, architecture);

  const Rows rows = rows_of(problem, device);
  if (const auto few = few_rows_plan(problem, rows, device)) return *few;
  if (const auto block = rather_block_plan(problem, rows, device)) return *block;
  if (const auto singles = single_elements_plan(problem, rows, device)) return *singles;
  if (const Offer warp = offer_warp(problem, rows, device);
      warp.plan && (warp.plan->log2_dim <= tuning::kWarpMaxLog2Dim || suits_warp(rows, device)))
    return *warp.plan;
  if (!rows.alike) return strided_plan(problem, device, architecture);
  const bool fewer = rows.count < device.multiprocessors, clusters = architecture.max_cluster > 1;
  const bool alone = fewer && clusters && rows.dim >= tuning::kClusterAloneMinDim;  // a block would leave others idle
  if (!alone)
    if (const Offer block = offer_block(problem, rows, device, architecture.block_threads); block.plan)
      return *block.plan;
  const bool split = fewer && are_few(rows, device, architecture);
  if (!(alone && split && are_long(problem, rows, device, architecture)))
    if (const Offer cluster = offer_cluster(problem, rows, device, architecture); cluster.plan) return *cluster.plan;
  return split ? *offer_split(problem, rows, device).plan : *offer_online(problem, rows, device, architecture).plan;
}

}  // namespace ndsoftmax
