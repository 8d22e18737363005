// How a problem lies in memory: which of it are runs, and what may move as vectors, or as words.
#include "host/planning.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ndsoftmax {
namespace planning {
namespace {

bool starts_on_vector(const Problem& problem, int operand, int vector) {
  return problem.misalignment[operand] % std::min(tuning::kVectorBytes, vector * bytes_of(problem, operand)) == 0;
}

// Whether condition(operand) holds for the source and, backward, the gradient.
template <typename Condition>
bool holds_for_sources(const Problem& problem, const Condition& condition) {
  return condition(kSource) && (!problem.has(kGrad) || condition(kGrad));
}

}  // namespace

bool rows_start_alike(const Problem& problem, int operand, int bytes, int unit) {
  const std::int64_t phase = problem.misalignment[kSource] / size_of(problem.source);
  return (phase - problem.misalignment[operand] / bytes) % unit == 0 &&
         std::all_of(problem.outer.groups.begin(), problem.outer.groups.begin() + problem.outer.rank,
                     [&](const Group& group) { return (group.stride[kSource] - group.stride[operand]) % unit == 0; });
}

bool rows_are_vectors(const Problem& problem, int vector_bytes) {
  const auto alike = [&](int operand) {
    const int bytes = bytes_of(problem, operand);
    return !problem.has(operand) ||
           rows_start_alike(problem, operand, bytes, vector_bytes / std::max(bytes, size_of(problem.source)));
  };
  return alike(kGrad) && alike(kResult);
}

bool rows_start_on_vectors(const Problem& problem, Operand operand, int bytes) {
  const int vector = tuning::kVectorBytes / size_of(problem.source);
  bool starts = problem.misalignment[operand] % (vector * bytes) == 0;
  for (int group = 0; group < problem.outer.rank; ++group)
    starts = starts && problem.outer.groups[group].stride[operand] % vector == 0;
  return starts;
}

bool fused_steps_are_ints(const Group& neighbours) {
  return std::in_range<int>(neighbours.stride[kMask]) && std::in_range<int>(neighbours.stride[kBias]);
}

bool has_vectors_of_columns(const Problem& problem, int operand, int bytes, int vector) {
  if (problem.inner.rank == 0) return false;
  const Group& fastest = problem.inner.groups[problem.inner.rank - 1];
  if (fastest.stride[operand] != 1 ||
      problem.misalignment[operand] % std::min(tuning::kVectorBytes, vector * bytes) != 0)
    return false;
  for (const Axis* axis : {&problem.outer, &problem.dim, &problem.inner})
    for (int group = 0; group < axis->rank; ++group)
      if (&axis->groups[group] != &fastest && axis->groups[group].stride[operand] % vector != 0) return false;
  return true;
}

bool columns_are_vectors(const Problem& problem, int vector) {
  if (problem.dim.rank > 1) return false;
  if (problem.inner.rank == 0) return vector == 1;
  const Group& fastest = problem.inner.groups[problem.inner.rank - 1];
  if (fastest.size % vector != 0 || !fused_steps_are_ints(fastest)) return false;
  for (int operand = 0; operand < kWhole; ++operand)
    if (problem.has(operand) && !has_vectors_of_columns(problem, operand, bytes_of(problem, operand), vector))
      return false;
  return true;
}

bool outer_is_one_group(const Problem& problem) {
  const Axis& outer = problem.outer;
  if (outer.rank <= 1) return true;
  if (outer.rank > 2) return false;
  for (int operand = 0; operand < kWhole; ++operand)
    if (problem.has(operand) &&
        outer.groups[0].stride[operand] != outer.groups[1].size * outer.groups[1].stride[operand])
      return false;
  return true;
}

std::int64_t strip_of(const Problem& problem) {
  return problem.inner.rank == 0 ? 1 : problem.inner.groups[problem.inner.rank - 1].size;
}

bool strips_are_runs(const Problem& problem) {
  const int last = problem.inner.rank - 1;
  return last < 0 ||
         holds_for_sources(problem, [&](int operand) { return problem.inner.groups[last].stride[operand] == 1; });
}

bool slabs_are_runs(const Problem& problem) {
  if (!strips_are_runs(problem) || problem.dim.rank > 1) return false;
  return problem.dim.size == 1 || holds_for_sources(problem, [&](int operand) {
           return problem.dim.groups[0].stride[operand] == strip_of(problem);
         });
}

int alignment_of(const Problem& problem, std::int64_t columns) {
  std::int64_t bits =
      tuning::kVectorBytes | columns * size_of(problem.source) | strip_of(problem) * size_of(problem.source);
  for (const int operand : {kSource, kGrad}) {
    if (!problem.has(operand)) continue;
    bits |= problem.misalignment[operand];
    for (const Axis* axis : {&problem.outer, &problem.dim, &problem.inner})
      for (int group = 0; group < axis->rank - (axis == &problem.inner ? 1 : 0); ++group)
        bits |= axis->groups[group].stride[operand] * size_of(problem.source);
  }
  return static_cast<int>(bits & -bits);
}

bool slabs_are_packed(const Problem& problem) {
  return problem.inner.rank <= 1 && problem.outer.rank == 1 && holds_for_sources(problem, [&](int operand) {
           return problem.outer.groups[0].stride[operand] == problem.dim.size * strip_of(problem);
         });
}

bool results_lie_as_sources(const Problem& problem) {
  if (problem.misalignment[kSource] != problem.misalignment[kResult]) return false;
  for (const Axis* axis : {&problem.outer, &problem.dim, &problem.inner})
    for (int group = 0; group < axis->rank; ++group)
      if (axis->groups[group].stride[kSource] != axis->groups[group].stride[kResult]) return false;
  return true;
}

int most_phase_of_slabs(const Problem& problem, int unit) {
  const int bytes = size_of(problem.source);
  std::int64_t known = std::min(unit, tuning::kVectorBytes / bytes);  // slabs begin alike modulo so many
  if (problem.outer.rank > 0) known = std::gcd(problem.outer.groups[0].stride[kSource], known);
  return unit - static_cast<int>(known - problem.misalignment[kSource] / bytes % known);
}

bool slabs_may_fold(const Problem& problem, int vector) {
  const std::int64_t strip = strip_of(problem);
  if (problem.fused.any || problem.dim.rank != 1 || problem.inner.rank != 1 || problem.outer.rank > 1) return false;
  if (problem.dim.size < vector) return false;
  for (int operand = 0; operand < kWhole; ++operand) {
    if (!problem.has(operand)) continue;
    if (problem.inner.groups[0].stride[operand] != 1 || problem.dim.groups[0].stride[operand] != strip) return false;
  }
  return rows_are_vectors(problem, vector * size_of(problem.source));
}

bool begin_alike(const Problem& problem, int vector) {
  if (problem.dim.rank != 1) return false;
  for (int operand = 0; operand < kWhole; ++operand) {
    if (!problem.has(operand)) continue;
    if (problem.inner.groups[0].stride[operand] != 1 || !starts_on_vector(problem, operand, vector)) return false;
    for (const Axis* axis : {&problem.outer, &problem.dim})
      for (int group = 0; group < axis->rank; ++group)
        if ((axis->groups[group].stride[operand] - axis->groups[group].stride[kSource]) % vector != 0) return false;
  }
  return true;
}

bool words_may_shift(const Problem& problem) {
  return size_of(problem.source) == 2 && size_of(problem.result) == 2 && begin_alike(problem, 2);
}

bool holds_vectors(const Problem& problem, const Plan& plan) {
  return tuning::are_vectors(plan.vector * size_of(problem.source));
}

bool words_shift(const Problem& problem, const Plan& plan) {
  return tuning::are_words(plan.vector * size_of(problem.source)) && !columns_are_vectors(problem, plan.vector);
}

bool begin_within_sectors(const Problem& problem) {
  const auto begins_on_sectors = [&](const Axis& axis) {
    return std::all_of(axis.groups.begin(), axis.groups.begin() + axis.rank, [&](const Group& group) {
      return group.stride[kResult] * size_of(problem.result) % tuning::kSectorBytes == 0;
    });
  };
  Axis slower = problem.inner;
  slower.rank = std::max(slower.rank - 1, 0);
  return !begins_on_sectors(problem.outer) || !begins_on_sectors(problem.dim) || !begins_on_sectors(slower);
}

}  // namespace planning

}  // namespace ndsoftmax
