// What the files of the planner for CUDA devices share: cuda_plan.cpp chooses a regime; plan_rows.cpp,
// plan_columns.cpp, plan_slabs.cpp and plan_strided.cpp fill in its plan; in_memory.cpp knows what of a problem may
// move as vectors.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>

#include "host/cuda_plan.hpp"
#include "host/tuning.hpp"

namespace ndsoftmax::planning {

using tuning::kWarp;

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t power_of_two_from(std::int64_t x) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(x)));
}
inline int log2_up(std::int64_t x) { return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(x - 1))); }

inline std::int64_t whole_warps(std::int64_t threads) { return divide_up(threads, kWarp) * kWarp; }

inline int bytes_of(const Problem& problem, int operand) {
  return size_of(operand == kResult ? problem.result : problem.source);
}

inline int state_bytes(const Problem& problem) {
  const int values = problem.direction == Direction::forward || problem.fused.any ? 2 : 1;  // MaxSum, LivingSum or Sum
  return tuning::accumulator_bytes(size_of(problem.source)) * values;
}

inline int sources_of(const Problem& problem) { return problem.direction == Direction::backward ? 2 : 1; }

// Bytes that are read of all sources,
inline std::int64_t bytes_read(const Problem& problem) {
  return problem.elements() * size_of(problem.source) * sources_of(problem);
}

// and those of what a block takes at once.
inline int bytes_of_step(const Problem& problem, const Plan& plan) {
  return plan.block * plan.items * plan.vector * size_of(problem.source) * sources_of(problem);
}

// A regime's answer: a plan, or why not.
struct Offer {
  std::optional<Plan> plan;
  const char* refusal = nullptr;
};

// Whether kernels may multiply by the scale what they have compared: nothing() and the largest stay what they are (by
// 0, it would be NaN). Of 16 bits they do so with distances (Scales), and find the largest back by the reciprocal,
// which is to be no denormal number; and of distances that are infinite before, the exponential is to be 0.
bool may_scale(const Fused& fused);

// Of a plan that reads twice, from vectors: where it is worth it, all blocks run at once, and each keeps of its `steps`
// what registers and shared memory have room for: `least` of them or more, where more than a part of L2 is read.
void let_meet(Plan& plan, const Problem& problem, const Device& device, std::int64_t steps, int l2_part, double least);

// ---- in_memory.cpp --------------------------------------------------------------------------------------------------

// Whether an operand with elements of so many bytes begins within units of so many elements as the source does, in
// every row.
bool rows_start_alike(const Problem& problem, int operand, int bytes, int unit);

// Whether vectors of a row, of so many bytes, are vectors of all operands: each is misaligned alike, in every row.
bool rows_are_vectors(const Problem& problem, int vector_bytes = tuning::kVectorBytes);

// Whether every row of an operand, with elements of so many bytes, starts on what belongs to a vector of the source.
bool rows_start_on_vectors(const Problem& problem, Operand operand, int bytes);

// Kernels step through the masks and biases of neighbouring elements by ints.
bool fused_steps_are_ints(const Group& neighbours);

// Vectors along the columns need: the innermost group contiguous in every operand, and everything else a multiple. A
// single column is a vector of one.
bool columns_are_vectors(const Problem& problem, int vector);
// The same of one operand, whose elements have so many bytes: also of a mask or a bias.
bool has_vectors_of_columns(const Problem& problem, int operand, int bytes, int vector);

// Whether outer is one group to all operands but masks and biases, to which it may be two.
bool outer_is_one_group(const Problem& problem);

// The columns that are neighbours in memory.
std::int64_t strip_of(const Problem& problem);

// Whether the columns of a strip are neighbours in every source.
bool strips_are_runs(const Problem& problem);

// Whether a strip is one run over all of dim.
bool slabs_are_runs(const Problem& problem);

// The largest power of two, at most 16, that all addresses of segments of `columns` columns are multiples of.
int alignment_of(const Problem& problem, std::int64_t columns);

// Whether strips that are runs follow each other: several are one run.
bool slabs_are_packed(const Problem& problem);

// Whether results step as the source does, and begin within a vector as it does.
bool results_lie_as_sources(const Problem& problem);

// Elements at most between the unit of memory, of so many, that a slab begins in and its first element.
int most_phase_of_slabs(const Problem& problem, int unit);

// Whether dim times the columns, a slab, is one run of memory in every operand, and all slabs are misaligned alike:
// vectors of one are vectors of all. So they are folded, unless something is fused, or a slab is less than a vector of
// each column: all of them have to be there.
bool slabs_may_fold(const Problem& problem, int vector);

// Whether rows of columns begin anywhere within vectors, or words, of so many, but alike in all operands: then what is
// loaded and stored may begin some columns earlier.
bool begin_alike(const Problem& problem, int vector);

// Whether 16-bit columns can be held as words that begin a column earlier in rows that begin within a word.
bool words_may_shift(const Problem& problem);

// Whether it holds vectors of 16 bytes; else halves of vectors, words, or single columns.
bool holds_vectors(const Problem& problem, const Plan& plan);

// Whether words begin a column earlier in some rows than in others.
bool words_shift(const Problem& problem, const Plan& plan);

// Whether some rows of a result begin within a sector.
bool begin_within_sectors(const Problem& problem);

// ---- plan_rows.cpp --------------------------------------------------------------------------------------------------

// What the row regimes need to know of a problem with contiguous rows.
struct Rows {
  std::int64_t count, dim;
  int vector;            // elements of 16 bytes
  std::int64_t vectors;  // that cover the longest row, wherever it starts
  bool aligned;          // every row starts on 16 bytes
  bool alike;            // every operand is misaligned alike, in every row: rows are vectors of all of them
  bool ragged() const { return !aligned || dim % vector != 0; }
  int warp_vector;  // elements that a lane of the warp regime holds together
  int log2_dim;     // of what the lanes that share a row have room for
  bool fits_warp;
  int held;          // vectors that a thread of the block regime holds
  int most_held;     // where it would hold too few
  int most_cluster;  // and one of the cluster regime
  int state_bytes;
  bool together;  // as Plan says
  bool fused;     // more than what masked kernels know
};

// Of a problem with contiguous rows.
Rows rows_of(const Problem& problem, const Device& device);

// Of a row of more than 1024 elements that a warp could hold: whether a block would do worse. That is where rows begin
// anywhere, which costs each thread instructions, and where a fifth of the threads would have nothing to do, unless
// rows are so few that all are under way at once.
bool suits_warp(const Rows& rows, const Device& device);

// The regimes' answers.
Offer offer_warp(const Problem& problem, const Rows& rows, const Device& device);
Offer offer_block(const Problem& problem, const Rows& rows, const Device& device, std::int64_t most_threads);
Offer offer_cluster(const Problem& problem, const Rows& rows, const Device& device,
                    const tuning::Architecture& architecture);
Offer offer_online(const Problem& problem, const Rows& rows, const Device& device,
                   const tuning::Architecture& architecture);
Offer offer_split(const Problem& problem, const Rows& rows, const Device& device);

// Few rows, by more threads than hold them where there are many: as many as all find room for at once.
std::optional<Plan> few_rows_plan(const Problem& problem, const Rows& rows, const Device& device);

// Rows that a warp would hold, but blocks of a few vectors a thread do better: gradients of wide rows where not all are
// under way at once, and 16-bit rows that begin anywhere where nearly all are.
std::optional<Plan> rather_block_plan(const Problem& problem, const Rows& rows, const Device& device);

// Where rows are few: whether clusters would take longer for them than all multiprocessors together, which wait for a
// second launch.
bool are_long(const Problem& problem, const Rows& rows, const Device& device, const tuning::Architecture& architecture);

// Rows so few that clusters which read them twice would not have several each.
bool are_few(const Rows& rows, const Device& device, const tuning::Architecture& architecture);

// Blocks that share rows, in two launches.
Plan split_plan(const Problem& problem, const Rows& rows, const Device& device);

// ---- plan_columns.cpp -----------------------------------------------------------------------------------------------

// How often the clusters of so many tiles fill all multiprocessors, and what tuning::columns_cost() has for them.
struct ColumnsCost {
  double waves, cost;
};
ColumnsCost cost_of_columns(const Problem& problem, const Device& device, const Plan& plan, int number,
                            std::int64_t tiles);

// Blocks of a plan that holds columns, if the result lay apart: what plans are chosen by, as bits are to be the same in
// place.
std::int64_t columns_grid_apart(const Problem& problem, const Plan& plan);

// Vectors of columns that begin elsewhere in each row, as threads can hold all of dim.
std::optional<Plan> staggered_plan(const Problem& problem, const Device& device);

// Columns held in registers: as vectors, folded ones, halves of vectors, words, or one by one; none, where there is no
// room, or others do better.
std::optional<Plan> columns_plan(const Problem& problem, const Device& device,
                                 const tuning::Architecture& architecture);

// 16-bit columns one by one, however many.
std::optional<Plan> single_columns_plan(const Problem& problem, const Device& device,
                                        const tuning::Architecture& architecture);

// Single elements of rows that begin anywhere, where other plans take less.
std::optional<Plan> single_elements_plan(const Problem& problem, const Rows& rows, const Device& device);

// ---- plan_slabs.cpp -------------------------------------------------------------------------------------------------

// Small slabs of dim times the columns that follow each other, where threads can hold their columns.
std::optional<Plan> slabs_plan(const Problem& problem, const Device& device);

// ---- plan_strided.cpp -----------------------------------------------------------------------------------------------

// Whether what is fused can be applied to what is held, in its place: 16 bits have no room for more than a mask. (Those
// that a bias is added to each time that they are used, and single columns, each of which has a register, are columns
// that threads hold: see columns_plan().)
bool fuses_in_place(const Problem& problem);

// Columns that a thread moves at once, where they are read twice. Folded ones tell their states through the workspace.
int vector_read_twice(const Problem& problem, const Device& device);

// Whether what is read is at least such a part of L2: then vectors may as well be read twice.
bool reads_much(const Problem& problem, const Device& device, int l2_part);

// Of columns that are read twice. The lanes of a warp that share a column are a team; the states of teams meet in
// shared memory, and all threads of a column read it there, also where there is but one.
int states_bytes_of_teams(const Problem& problem, const Plan& plan);

// Takes any problem.
Plan strided_plan(const Problem& problem, const Device& device, const tuning::Architecture& architecture);

}  // namespace ndsoftmax::planning
