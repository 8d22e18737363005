// Which kernel, and in which shape. Each regime offers a plan or says why it cannot take the problem; the first that
// both can take it and expects to be fastest wins. All numbers come from tuning.hpp.
#include "host/cuda_plan.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/tuning.hpp"
#include "host/work.hpp"

namespace ndsoftmax {
namespace {

using tuning::kWarp;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t power_of_two_from(std::int64_t x) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(x)));
}
int log2_up(std::int64_t x) { return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(x - 1))); }

int bytes_of(const Problem& problem, int operand) {
  return size_of(operand == kResult ? problem.result : problem.source);
}

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

int state_bytes(const Problem& problem) {
  const int values = problem.direction == Direction::forward || problem.fused.any ? 2 : 1;  // MaxSum, LivingSum or Sum
  return tuning::accumulator_bytes(size_of(problem.source)) * values;
}

// Whether an operand with elements of so many bytes begins within units of so many elements as the source does, in
// every row.
bool rows_start_alike(const Problem& problem, int operand, int bytes, int unit) {
  const std::int64_t phase = problem.misalignment[kSource] / size_of(problem.source);
  return (phase - problem.misalignment[operand] / bytes) % unit == 0 &&
         std::all_of(problem.outer.groups.begin(), problem.outer.groups.begin() + problem.outer.rank,
                     [&](const Group& group) { return (group.stride[kSource] - group.stride[operand]) % unit == 0; });
}

// Vectors of a row need every operand misaligned alike, in every row: then its vectors are vectors of all of them.
bool rows_are_vectors(const Problem& problem) {
  const auto alike = [&](int operand) {
    const int bytes = bytes_of(problem, operand);
    return !problem.has(operand) ||
           rows_start_alike(problem, operand, bytes, tuning::kVectorBytes / std::max(bytes, size_of(problem.source)));
  };
  return alike(kGrad) && alike(kResult);
}

// Whether every row of an operand, with elements of so many bytes, starts on what belongs to a vector of the source.
bool rows_start_on_vectors(const Problem& problem, Operand operand, int bytes) {
  const int vector = tuning::kVectorBytes / size_of(problem.source);
  bool starts = problem.misalignment[operand] % (vector * bytes) == 0;
  for (int group = 0; group < problem.outer.rank; ++group)
    starts = starts && problem.outer.groups[group].stride[operand] % vector == 0;
  return starts;
}

// Whether kernels may multiply by the scale what they have compared: nothing() and the largest stay what they are (by
// 0, it would be NaN). Of 16 bits they do so with distances (Scales), and find the largest back by the reciprocal,
// which is to be no denormal number; and of distances that are infinite before, the exponential is to be 0.
bool may_scale(const Fused& fused) {
  constexpr float kLeast = 0x1p-118f, kMost = 0x1p+118f;
  const auto scale = static_cast<float>(fused.scale);
  return scale >= kLeast && scale <= kMost;
}

// Whether rows of this group have masks or biases of their own.
bool varies(const Fused& fused, const Group& rows) {
  return (fused.mask && rows.stride[kMask] != 0) || (fused.bias && rows.stride[kBias] != 0);
}

// Whether what is fused is asked for again only when L2 may have dropped it.
bool repeats_late(const Problem& problem, const Device& device) {
  const Fused& fused = problem.fused;
  const std::int64_t dim = problem.dim.size, source = size_of(problem.source);
  if (dim * source < tuning::kTogetherMinBytes) return false;
  const Group& neighbours = problem.dim.groups[0];
  std::int64_t bytes = dim * (source * (problem.has(kGrad) ? 2 : 1) + size_of(problem.result));
  if (fused.mask && neighbours.stride[kMask] != 0) bytes += dim;
  if (fused.bias && neighbours.stride[kBias] != 0) bytes += dim * size_of(fused.bias_dtype);
  bool varied = false;
  for (int group = problem.outer.rank - 1; group >= 0; --group) {
    const Group& here = problem.outer.groups[group];
    if (varies(fused, here))
      varied = true;
    else if (varied && tuning::kTogetherL2Part * bytes > device.l2_bytes)
      return true;
    bytes *= here.size;
  }
  return false;
}

Rows rows_of(const Problem& problem, const Device& device) {
  const int bytes = size_of(problem.source);
  Rows rows{};
  rows.count = problem.outer.size;
  rows.dim = problem.dim.size;
  rows.vector = tuning::kVectorBytes / bytes;
  rows.aligned = rows_start_on_vectors(problem, kSource, bytes);
  rows.alike = rows_are_vectors(problem);
  rows.vectors = divide_up(problem.dim.size + (rows.aligned ? 0 : rows.vector - 1), rows.vector);
  const bool masked = has_masked_kernels(problem);
  rows.fused = problem.fused.any && !masked;
  rows.held = tuning::held_vectors(bytes, problem.direction, rows.fused);
  rows.most_held = tuning::most_held_vectors(bytes, problem.direction, rows.fused);
  rows.most_cluster = tuning::most_cluster_vectors(bytes, problem.direction, rows.fused, masked);
  rows.state_bytes = state_bytes(problem);
  rows.together = problem.fused.any && repeats_late(problem, device);
  const bool elementwise =
      tuning::always_elementwise(bytes) || device.compute_capability < tuning::kAllKernelsFrom || !rows.alike ||
      (rows.ragged() && !tuning::vectors_may_be_ragged(bytes, problem.fused.any, log2_up(rows.dim)));
  if (elementwise) {
    const int kernel = tuning::elementwise_kernel(log2_up(rows.dim));
    rows.fits_warp = kernel < tuning::kElementwiseKernels;
    rows.warp_vector = 1;
    rows.log2_dim = rows.fits_warp ? tuning::kElementwiseLog2Dims[kernel] : tuning::kWarpMaxLog2Dim + 1;
  } else {
    rows.warp_vector = rows.vector;
    const int most = tuning::warp_max_log2_dim(bytes, problem.fused.any);
    rows.log2_dim = std::max(log2_up(rows.vectors * rows.vector), tuning::warp_min_log2_dim(bytes, problem.fused.any));
    rows.fits_warp = rows.log2_dim <= most;
    if (!rows.fits_warp && most > tuning::kWarpMaxLog2Dim &&
        rows.vectors <= kWarp * tuning::most_raw_vectors(problem.direction)) {
      rows.log2_dim = most;
      rows.fits_warp = true;
    }
  }
  return rows;
}

// Kernels step through the masks and biases of neighbouring elements by ints.
bool fused_steps_are_ints(const Group& neighbours) {
  return std::in_range<int>(neighbours.stride[kMask]) && std::in_range<int>(neighbours.stride[kBias]);
}

// Where rows are not staged.
tuning::WarpLayout held_layout(const Rows& rows) { return tuning::warp_layout(rows.log2_dim, rows.warp_vector); }

// Rows that are under way at once where so many lanes share one.
std::int64_t rows_under_way(int lanes, const Device& device) {
  return std::int64_t{tuning::kWarpBlock / lanes} * tuning::kWarpBlocks * device.multiprocessors;
}

// How often rows fill the GPU then.
double waves_of(const Rows& rows, int lanes, const Device& device) {
  return static_cast<double>(rows.count) / static_cast<double>(rows_under_way(lanes, device));
}

// Smaller than a vector, and with kernels of their own: of two types, or of much a thread, where they are many.
bool are_tiny(const Rows& rows, const Problem& problem, const Device& device) {
  const int source = size_of(problem.source), result = size_of(problem.result);
  if (rows.dim >= rows.vector || !tuning::has_tiny_rows(source, result, problem.fused.any)) return false;
  const int together = tuning::rows_of_whole_vectors(static_cast<int>(rows.dim), source);
  const bool same = source == result, much = together * rows.dim / rows.vector > tuning::kTinyRowsVectors;
  const int threads = !same ? tuning::kTinyRowsThreads : much ? tuning::kTinyRowsLongThreads : 0;
  return rows.count >= std::int64_t{threads} * together * device.multiprocessors;
}

// Whether lanes that take staged rows look up more than a mask for them, or, backward, anything.
bool fuses_while_staged(const Problem& problem) {
  return problem.fused.any && (problem.direction == Direction::backward || !masks_neighbours(problem));
}

// Staging needs rows without gaps that start on 16 bytes as a whole. It pays where single rows do not, and, forward,
// where more than a quarter of the lanes that hold vectors would hold none, or half of them where something is fused,
// also backward, or where such rows are narrow; not where rows fill the GPU so seldom that tuning::staged_waves() says
// so.
bool should_stage(const Problem& problem, const Rows& rows, const Device& device) {
  const int source = size_of(problem.source);
  if (!tuning::has_staged_rows(source, size_of(problem.result), problem.fused.any)) return false;
  const bool fuses = fuses_while_staged(problem);
  const int most = fuses               ? tuning::staged_fusing_most_dim(source, problem.direction, problem.fused.causal)
                   : problem.fused.any ? tuning::staged_masked_most_dim(source)
                                       : tuning::kStagedMostDim;
  if (problem.dim.size > most || !problem.packed_rows()) return false;
  const bool tiny = are_tiny(rows, problem, device);
  if (device.compute_capability < tuning::kAllKernelsFrom && !tiny) return false;
  for (int operand = 0; operand < kWhole; ++operand)
    if (problem.has(operand) && problem.misalignment[operand] != 0) return false;
  const int lanes = held_layout(rows).lanes;
  if (waves_of(rows, lanes, device) <=
          tuning::staged_waves(source, rows.dim, tiny, problem.fused.any, problem.direction) &&
      rows.fits_warp)
    return false;
  if (problem.dim.size % rows.vector != 0) return true;
  const std::int64_t room = lanes * divide_up(rows.vectors, lanes);  // of so many vectors
  if (problem.fused.any) {
    const bool both = problem.fused.mask && problem.fused.bias;
    if (rows.dim <= tuning::staged_aligned_dim(source, problem.direction, fuses, both) &&
        (problem.direction == Direction::forward ||
         tuning::staged_lanes(static_cast<int>(rows.dim), source, fuses) < lanes))
      return true;
    return 2 * rows.vectors <= room;
  }
  return problem.direction == Direction::forward && 4 * rows.vectors < 3 * room;
}

int sources_of(const Problem& problem) { return problem.direction == Direction::backward ? 2 : 1; }

std::int64_t bytes_read(const Problem& problem) {
  return problem.elements() * size_of(problem.source) * sources_of(problem);
}

// And what a block takes at once.
int bytes_of_step(const Problem& problem, const Plan& plan) {
  return plan.block * plan.items * plan.vector * size_of(problem.source) * sources_of(problem);
}

// Of a plan that reads twice, from vectors: where it is worth it, all blocks run at once, and each keeps of its `steps`
// what registers and shared memory have room for: `least` of them or more, where more than a part of L2 is read.
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

std::int64_t whole_warps(std::int64_t threads) { return divide_up(threads, kWarp) * kWarp; }

// Threads, in whole warps, that hold a row or a part of one, where so many vectors of the row come to each.
std::int64_t threads_for(const Rows& rows, std::int64_t vectors) {
  return whole_warps(divide_up(rows.vectors, vectors));
}

// Of a row of more than 1024 elements that a warp could hold: whether a block would do worse. That is where rows begin
// anywhere, which costs each thread instructions, and where a fifth of the threads would have nothing to do, unless
// rows are so few that all are under way at once.
bool suits_warp(const Rows& rows, const Device& device) {
  const std::int64_t room = threads_for(rows, rows.held) * rows.held;
  return rows.ragged() || (5 * rows.vectors < 4 * room && rows.count > rows_under_way(kWarp, device));
}

// Lanes that share a staged row: more of few rows.
int staged_lanes(const Problem& problem, const Rows& rows, const Device& device) {
  const int dim = static_cast<int>(problem.dim.size), source = size_of(problem.source);
  const bool forward_halves = problem.direction == Direction::forward && source == 2;
  int lanes = tuning::staged_lanes(dim, source, fuses_while_staged(problem));
  const auto suits_more = [&](const tuning::StagedFew& few) {
    return (few.forward_halves || !forward_halves) && dim > few.words * lanes * tuning::staged_word(source) &&
           2 * lanes * rows.count <= std::int64_t{few.lanes} * device.multiprocessors;
  };
  while (lanes < kWarp && std::any_of(tuning::kStagedFew.begin(), tuning::kStagedFew.end(), suits_more)) lanes *= 2;
  return lanes;
}

Plan staged_plan(const Problem& problem, const Rows& rows, const Device& device) {
  const int dim = static_cast<int>(problem.dim.size);
  const int source = size_of(problem.source), result = size_of(problem.result);
  const int sources = sources_of(problem);
  Plan plan;
  plan.staged = true;
  const bool tiny = are_tiny(rows, problem, device);
  if (!tiny) plan.threads_per_row = staged_lanes(problem, rows, device);
  const bool small = tuning::suits_small_staged_block(source, plan.threads_per_row);
  plan.block = small ? tuning::kStagedSmallBlock : tuning::kWarpBlock;
  int unit;  // rows of one turn of all threads, and of whole vectors
  if (tiny) {
    const int together = tuning::rows_of_whole_vectors(dim, source);
    plan.vector = rows.vector;
    plan.items = together * dim / rows.vector;
    unit = plan.block * together;
    plan.why = "rows smaller than 16 bytes: a run of them through shared memory, a thread takes whole vectors of it";
  } else {
    plan.vector = tuning::staged_word(source);
    plan.run = tuning::staged_apart(dim, plan.vector, plan.threads_per_row);
    const int turn = plan.threads_per_row * plan.vector, all = dim / turn, left = dim % turn;  // elements of all lanes
    plan.items = static_cast<int>(divide_up(dim, turn));
    const bool masked = problem.direction == Direction::forward && masks_neighbours(problem);
    // rows that begin within a word have one more beyond their whole words
    plan.ragged = tuning::staged_may_have_tail(source, masked) && left > 0 && left + dim % 2 <= plan.threads_per_row &&
                  tuning::staged_tail(all) < tuning::kStagedTailItems.size();
    if (plan.ragged) plan.items = all;
    unit = std::max(plan.block / plan.threads_per_row, tuning::rows_of_whole_vectors(dim, std::min(source, result)));
    plan.why = dim % rows.vector == 0
                   ? "rows that would leave lanes idle as vectors: a run of them, through shared memory"
                   : "rows that do not start on 16 bytes: a run of them, through shared memory";
  }
  // results take the place of sources of their size
  const int bytes = unit * dim * (sources * source + (source == result ? 0 : result));
  const std::int64_t blocks = std::int64_t{tuning::kStagedThreads / plan.block} * device.multiprocessors;
  const int least = small ? tuning::staged_small_bytes(problem.fused.any) : tuning::kStagedBytes;
  const int turns =
      static_cast<int>(std::clamp<std::int64_t>(rows.count / (unit * blocks), 1, divide_up(least, bytes)));
  plan.rows_per_block = unit * turns;
  plan.shared_bytes = bytes * turns;
  return plan;
}

// A regime's answer: a plan, or why not.
struct Offer {
  std::optional<Plan> plan;
  const char* refusal = nullptr;
};

Plan row_plan(Regime regime, const Rows& rows, std::int64_t threads_per_row) {
  Plan plan;
  plan.regime = regime;
  plan.vector = rows.vector;
  plan.ragged = rows.ragged();
  plan.together = rows.together;
  plan.items = static_cast<int>(divide_up(rows.vectors, threads_per_row));
  plan.threads_per_row = static_cast<int>(threads_per_row);
  return plan;
}

Offer offer_warp(const Problem& problem, const Rows& rows, const Device& device) {
  Plan plan;
  if (should_stage(problem, rows, device)) plan = staged_plan(problem, rows, device);
  if (!plan.staged || plan.shared_bytes > tuning::dynamic_shared_bytes(device.shared_bytes_per_block)) {
    if (!rows.fits_warp) return {{}, "a row is wider than the registers of a warp"};
    const tuning::WarpLayout layout = held_layout(rows);
    plan = row_plan(Regime::warp, rows, layout.lanes);
    if (rows.warp_vector == 1) {
      plan.vector = 1;
      plan.ragged = false;
      plan.items = static_cast<int>(divide_up(rows.dim, layout.lanes));
    }
    plan.log2_dim = rows.log2_dim;
    const double waves = waves_of(rows, layout.lanes, device);
    const auto turns = static_cast<int>(std::clamp<double>(waves, 1, layout.rows));
    plan.block = tuning::kWarpBlock;
    const std::int64_t warp_bytes = kWarp / layout.lanes * turns * rows.dim * size_of(problem.source);
    if (waves >= 2)
      plan.block = static_cast<int>(
          std::clamp<std::int64_t>(divide_up(tuning::kWarpBlockBytes, warp_bytes) * kWarp, kWarp, plan.block));
    else if (rows.warp_vector > 1 && warp_bytes >= tuning::single_warp_bytes(waves) &&
             tuning::suits_single_warps(problem.direction, problem.fused.any, rows.ragged(), waves))
      plan.block = kWarp;
    plan.rows_per_block = plan.block / layout.lanes * turns;
    plan.why = rows.warp_vector > 1 ? "a row fits in the registers of a warp, or of a part of one"
                                    : "a row fits in the registers of a warp, or of a part of one, element by element";
  }
  plan.grid = divide_up(rows.count, plan.rows_per_block);
  return {plan};
}

// What the blocks of a multiprocessor load at once, of which each thread holds so many vectors of a row.
std::int64_t bytes_under_way(const Problem& problem, const Rows& rows, int vectors) {
  const std::int64_t blocks = tuning::kMaxBlock / threads_for(rows, vectors);
  return blocks < 2 ? 0 : blocks * rows.vectors * tuning::kVectorBytes * sources_of(problem);
}

// How many vectors a thread of a block should hold so that what blocks have under way on a multiprocessor is the least
// that keeps memory busy; 0, where no number does, or, of 16 bits, where rows are so few that such blocks would all
// be under way at once: there, threads that hold fewer vectors, and exponentiate them once, take less time.
int vectors_under_way(const Problem& problem, const Rows& rows, const Device& device) {
  const int bytes = size_of(problem.source);
  if (!tuning::sizes_blocks(bytes, problem.direction, rows.fused)) return 0;
  int best = 0;
  std::int64_t least = tuning::kBlockMostBytes + 1;
  for (int vectors = rows.most_held; vectors > 0; --vectors) {
    const std::int64_t blocks = tuning::kMaxBlock / threads_for(rows, vectors);
    const std::int64_t under_way = bytes_under_way(problem, rows, vectors);
    if (under_way < tuning::block_least_bytes(bytes) || under_way >= least) continue;
    if (rows.held < rows.most_held && rows.count <= blocks * device.multiprocessors) continue;
    least = under_way;
    best = vectors;
  }
  return best;
}

// A block to a row, of which each thread has so many vectors.
Plan block_plan(const Rows& rows, std::int64_t vectors, const char* why) {
  Plan plan = row_plan(Regime::block, rows, threads_for(rows, vectors));
  plan.block = plan.threads_per_row;
  plan.grid = rows.count;
  plan.why = why;
  return plan;
}

Offer offer_block(const Problem& problem, const Rows& rows, const Device& device, std::int64_t most_threads) {
  if (device.compute_capability < tuning::kAllKernelsFrom)
    return {{}, "rows held by a block need compute capability 8.0"};
  int vectors = vectors_under_way(problem, rows, device);
  if (vectors == 0) {
    // rows that begin anywhere cost each thread instructions, so that fewer threads should have more of them
    const bool most = rows.ragged() || threads_for(rows, rows.held) > most_threads;
    vectors = most ? rows.most_held : rows.held;
    const std::int64_t threads = threads_for(rows, vectors);
    if (threads > most_threads) return {{}, "a row is wider than the registers of a block"};
    if (tuning::thins_blocks(size_of(problem.source), problem.direction, problem.fused.any) &&
        rows.count > tuning::kMaxBlock / threads * device.multiprocessors)
      while (vectors > 1 && bytes_under_way(problem, rows, vectors - 1) >= tuning::kBlockLeastGradientBytes) --vectors;
  }
  return {block_plan(rows, vectors, "a row fits in the registers of a block")};
}

bool takes_whole_vectors_of_warp(const Rows& rows) {
  return !rows.ragged() && rows.warp_vector > 1 && rows.log2_dim <= tuning::kWarpMaxLog2Dim;
}

// Few rows, by more threads than hold them where there are many: as many as all find room for at once.
std::optional<Plan> few_rows_plan(const Problem& problem, const Rows& rows, const Device& device) {
  const int bytes = size_of(problem.source);
  const bool fused = problem.fused.any;
  if (device.compute_capability < tuning::kAllKernelsFrom || !rows.alike || bytes == 8 ||
      rows.dim < tuning::kFewRowsLeastDim || rows.dim > tuning::kFewRowsMostDim ||
      (fused && !tuning::few_rows_fuse(bytes, problem.direction, rows.ragged(), rows.dim)))
    return {};
  const bool warp_takes = takes_whole_vectors_of_warp(rows);
  const bool finer = tuning::few_rows_finer(problem.direction, fused, warp_takes, rows.ragged(), rows.vectors);
  const std::int64_t rows_each = divide_up(rows.count, device.multiprocessors);
  const std::int64_t usual = divide_up(2 * rows.vectors, tuning::kFewRowsBlock);
  const std::int64_t most =
      std::min<std::int64_t>(finer ? std::max<std::int64_t>(usual, tuning::kFewRowsFinerVectors) : usual, rows.held);
  for (std::int64_t vectors = divide_up(rows.vectors, tuning::kFewRowsBlock); vectors <= most; ++vectors)
    if (rows_each * threads_for(rows, vectors) <= tuning::few_rows_threads(warp_takes, finer && vectors > 1))
      return block_plan(rows, vectors, "few rows, which the registers of a block hold");
  return {};
}

// Rows that a warp would hold, but blocks of a few vectors a thread do better: gradients of wide rows where not all are
// under way at once, and 16-bit rows that begin anywhere where nearly all are.
std::optional<Plan> rather_block_plan(const Problem& problem, const Rows& rows, const Device& device) {
  if (device.compute_capability < tuning::kAllKernelsFrom || !rows.alike) return {};
  const std::int64_t rows_each = divide_up(rows.count, device.multiprocessors);
  int vectors = 0;
  if (takes_whole_vectors_of_warp(rows)) {
    const std::int64_t threads = threads_for(rows, tuning::kGradientVectors);
    if (problem.direction == Direction::backward && rows_each * threads > tuning::kMaxBlock &&
        tuning::gradients_fill(rows.vectors, threads))
      vectors = problem.fused.any ? rows.most_held : tuning::kGradientVectors;
  } else if (rows.ragged() && rows.fits_warp &&
             tuning::rather_ragged_blocks(size_of(problem.source), problem.fused.any, rows.vectors, rows_each)) {
    vectors = tuning::kRaggedVectors;
  }
  if (vectors == 0) return {};
  return block_plan(rows, vectors, "rows that a warp could hold: the registers of a block do, as more of them overlap");
}

// Where rows are few: whether clusters would take longer for them than all multiprocessors together, which wait for a
// second launch.
bool are_long(const Problem& problem, const Rows& rows, const Device& device,
              const tuning::Architecture& architecture) {
  const int cluster = architecture.max_cluster;
  const bool alone = 3 * cluster * rows.count <= device.multiprocessors;
  if (rows.vectors * tuning::kVectorBytes > (alone ? tuning::kClusterAloneBytes : tuning::kClusterFewBytes))
    return true;
  if (!tuning::has_cluster_gradients(size_of(problem.source), problem.direction, problem.fused.any)) return false;
  const int at_once = tuning::resident_clusters(device.multiprocessors, cluster);
  return 2 * threads_for(rows, cluster * rows.most_held) > tuning::kMaxBlock && rows.count > at_once &&
         static_cast<double>(rows.count) <= tuning::kClusterFewMore * at_once;
}

// What a GPC has under way at once in clusters of this size, which never lie in two of them: rows, by the share of its
// room for blocks that they take, as the rest is idle. Blocks load and store in turns: so do fewer of a multiprocessor
// than overlap well, and count for less. Of clusters larger than half a GPC it has one, which may then have all of it.
double under_way(const Rows& rows, int cluster) {
  const std::int64_t threads = threads_for(rows, cluster * rows.most_cluster);
  if (threads > tuning::kMaxBlock || threads < tuning::kClusterLeastThreads) return 0;
  if (cluster > tuning::kGpc / 2 && cluster < tuning::kGpc) return 0;
  const auto blocks = static_cast<int>(tuning::kMaxBlock / threads), room = tuning::kGpc * blocks;
  const int resident = room / cluster;
  const double overlap = static_cast<double>(std::min(blocks, tuning::kOverlappingBlocks)) / tuning::kOverlappingBlocks;
  return overlap * resident * resident * cluster / room;
}

// Clusters that stay: of the fewest blocks, two a multiprocessor where possible, that have room for two rows, and turns
// enough; where none has room, the largest.
std::optional<Plan> cluster_gradients_plan(const Problem& problem, const Rows& rows, const Device& device,
                                           const tuning::Architecture& architecture) {
  if (!tuning::has_cluster_gradients(size_of(problem.source), problem.direction, problem.fused.any)) return {};
  for (const int resident : {2, 1})
    for (int cluster = 2; cluster <= architecture.max_cluster; cluster *= 2) {
      Plan plan = row_plan(Regime::cluster, rows, std::int64_t{cluster} * tuning::kMaxBlock / resident);
      plan.staged = true;
      plan.cluster = cluster;
      plan.block = static_cast<int>(threads_for(rows, cluster * plan.items));
      plan.threads_per_row = cluster * plan.block;
      const std::int64_t part = std::int64_t{plan.block} * plan.items;
      const int bytes = sources_of(problem) * tuning::kVectorBytes;
      const int room = tuning::dynamic_shared_bytes(device.shared_bytes_per_block / resident) / bytes;
      const bool last = resident == 1 && cluster == architecture.max_cluster;
      if (room < (last ? tuning::kClusterLeastSlots : tuning::kClusterSlots) * static_cast<double>(part)) continue;
      plan.run = static_cast<int>(std::min<std::int64_t>(room, tuning::kClusterSlots * part));
      plan.shared_bytes = plan.run * bytes;
      const int clusters = resident * std::max(tuning::resident_clusters(device.multiprocessors, cluster), 1);
      if (resident > 1 && rows.count < tuning::kClusterTurns * clusters) return {};
      plan.grid = std::min<std::int64_t>(rows.count, clusters) * cluster;
      plan.why = "a row fits in the shared memory of a cluster of blocks, where the next one arrives meanwhile";
      return plan;
    }
  return {};
}

// A row a cluster, of so many blocks of so many threads.
Plan cluster_plan(const Rows& rows, std::int64_t threads, int cluster) {
  Plan plan = row_plan(Regime::cluster, rows, threads * cluster);
  plan.block = static_cast<int>(threads);
  plan.cluster = cluster;
  plan.grid = rows.count * cluster;
  return plan;
}

// Clusters whose threads have more vectors than registers for them, the rest in shared memory, and, of the widest rows,
// some that are read twice; where they have more under way than clusters that would have all in registers, of so many
// blocks of so many threads.
std::optional<Plan> sharing_clusters_plan(const Problem& problem, const Rows& rows, const Device& device,
                                          const tuning::Architecture& architecture, int cluster_held,
                                          std::int64_t threads_held) {
  const int bytes = size_of(problem.source), vectors = tuning::sharing_vectors(bytes);
  if (!tuning::clusters_may_share(bytes, problem.direction, problem.fused.any)) return {};
  const auto blocks_held = static_cast<int>(tuning::kMaxBlock / threads_held);  // a multiprocessor; 0: too wide a row
  const double filled = static_cast<double>(blocks_held * rows.vectors) /
                        (static_cast<double>(cluster_held) * tuning::kMaxBlock * rows.most_cluster);
  if (!tuning::rather_shares(bytes, cluster_held, blocks_held, filled)) return {};
  for (const tuning::SharingShape& shape : tuning::kSharingShapes) {
    const int cluster = std::min(shape.cluster, architecture.max_cluster);
    if (bytes > shape.most_source_bytes || shape.blocks * cluster_held <= blocks_held * cluster) continue;
    if (cluster > shape.blocks * device.multiprocessors) continue;
    const double waves = static_cast<double>(rows.count) /
                         tuning::clusters_at_once(device.multiprocessors, cluster, tuning::kOverlappingBlocks);
    if (waves * cluster < tuning::sharing_waves(bytes, blocks_held) * cluster_held) continue;
    const int threads = tuning::kMaxBlock / shape.blocks / kWarp * kWarp;
    const int room = vectors + tuning::dynamic_shared_bytes(device.shared_bytes_per_block / shape.blocks) /
                                   (threads * tuning::kVectorBytes);
    const std::int64_t items = divide_up(rows.vectors, std::int64_t{cluster} * threads);
    if (items <= vectors || room <= vectors) continue;
    Plan plan;
    if (items <= room) {
      plan = cluster_plan(rows, threads_for(rows, cluster * items), cluster);
      plan.why = "a row fits in the registers and the shared memory of a cluster of blocks";
    } else {
      const bool last = &shape == &tuning::kSharingShapes.back();
      // a single block a multiprocessor may have room for all of it
      if (!last || blocks_held > 0 || items > tuning::kClusterTimesHeld * room) continue;
      plan = cluster_plan(rows, threads, cluster);
      plan.items = room;
      plan.passes = 2;
      plan.why = "a cluster of blocks has some of a row in registers and shared memory, and reads the rest twice";
    }
    plan.shared_bytes = (plan.items - vectors) * plan.block * tuning::kVectorBytes;
    return plan;
  }
  return {};
}

// Rows that all run at once, none of which is work for more than a cluster: as many threads as find room, and as many
// blocks a row as are large enough. Of backward, whose threads have few vectors as it is, only so many rows that two
// multiprocessors or more share one.
std::optional<Plan> few_clusters_plan(const Problem& problem, const Rows& rows, const Device& device,
                                      const tuning::Architecture& architecture) {
  if (problem.direction == Direction::backward && 2 * rows.count > device.multiprocessors) return {};
  if (are_long(problem, rows, device, architecture)) return {};
  for (int vectors = tuning::kClusterFewVectors; vectors <= rows.most_held; ++vectors) {
    int cluster = architecture.max_cluster;
    while (cluster > 2 &&
           (cluster > device.multiprocessors || threads_for(rows, cluster * vectors) < tuning::kClusterThreads))
      cluster /= 2;
    const std::int64_t threads = threads_for(rows, cluster * vectors);
    // of a multiprocessor: a single one, which loads and stores in turns, only where more vectors a thread would not do
    const auto blocks = static_cast<int>(tuning::kMaxBlock / threads);
    if (blocks < (vectors < rows.most_held ? 2 : 1)) continue;
    if (static_cast<double>(rows.count) <= tuning::clusters_at_once(device.multiprocessors, cluster, blocks))
      return cluster_plan(rows, threads, cluster);
  }
  return {};
}

Offer offer_cluster(const Problem& problem, const Rows& rows, const Device& device,
                    const tuning::Architecture& architecture) {
  if (architecture.max_cluster == 1) return {{}, "thread block clusters need compute capability 9.0"};
  std::optional<Plan> plan = few_clusters_plan(problem, rows, device, architecture);
  if (!plan) {
    const double registers = static_cast<double>(device.multiprocessors) * tuning::kMaxBlock * rows.most_cluster;
    const double fillings = static_cast<double>(rows.count * rows.vectors) / registers;
    int least = tuning::rather_at_least(size_of(problem.source), problem.direction, problem.fused.any);
    if (under_way(rows, least) == 0) least = 2;  // its blocks would be too small, or too large
    double most = 0;
    for (int size = least; size <= architecture.max_cluster; ++size) most = std::max(most, under_way(rows, size));
    // of those that come close to the most, the largest whose blocks are not too small
    int cluster = 0;
    for (int size = least; size <= architecture.max_cluster && most > 0; ++size)
      if (under_way(rows, size) >= tuning::cluster_fill(fillings) * most &&
          (cluster == 0 || tuning::rather_larger(size, threads_for(rows, size * rows.most_cluster), fillings)))
        cluster = size;
    // where the row is wider than the registers of any, the largest
    if (cluster == 0) cluster = architecture.max_cluster;
    std::int64_t threads = threads_for(rows, cluster * rows.most_cluster);  // of a block
    if (tuning::gradients_rather_arrive(cluster, static_cast<int>(threads)))
      if (const auto gradients = cluster_gradients_plan(problem, rows, device, architecture)) return {gradients};
    if (const auto shared = sharing_clusters_plan(problem, rows, device, architecture, cluster, threads))
      return {shared};
    if (tuning::rather_half_a_gpc(size_of(problem.source), cluster) &&
        threads_for(rows, std::int64_t{tuning::kGpc / 2} * (rows.most_cluster - 2)) <= threads)
      cluster = tuning::kGpc / 2;
    // as many threads as find room where these do
    for (int vectors = rows.most_cluster - 1; vectors > 0; --vectors) {
      const std::int64_t more = threads_for(rows, cluster * vectors);
      if (tuning::kMaxBlock / more < tuning::kMaxBlock / threads) break;
      threads = more;
    }
    if (threads > tuning::kMaxBlock) return {{}, "a row is wider than a cluster holds"};
    plan = cluster_plan(rows, threads, cluster);
  }
  plan->why = "a row fits in the registers of a cluster of blocks, small enough to overlap loading and storing";
  return {plan};
}

// Blocks that share a row which is read twice: as many as a cluster may have, and the GPU has room for.
int online_cluster(const Device& device, const tuning::Architecture& architecture) {
  int cluster = architecture.max_cluster;
  while (cluster > 1 && cluster > tuning::kOnlineClusterBlocks * device.multiprocessors) cluster /= 2;
  return cluster;
}

// Rows so few that such clusters would not have several each.
bool are_few(const Rows& rows, const Device& device, const tuning::Architecture& architecture) {
  const int cluster = online_cluster(device, architecture);
  const int clusters = std::max(tuning::resident_clusters(device.multiprocessors, cluster), 1);  // of a block each
  return rows.count < tuning::kOnlineClusterRows * tuning::kOnlineClusterBlocks * std::int64_t{clusters};
}

Plan online_plan(const Problem& problem, const Rows& rows, int block) {
  Plan plan = row_plan(Regime::online, rows, block);
  plan.items = tuning::online_vectors(problem.direction, problem.fused.any);
  plan.block = plan.threads_per_row;
  plan.grid = rows.count;
  plan.run = 0;
  plan.passes = 2;
  plan.why = "a row is wider than what stays on chip: online softmax, then a second pass, from L2 where it fits";
  return plan;
}

Offer offer_online(const Problem& problem, const Rows& rows, const Device& device,
                   const tuning::Architecture& architecture) {
  const int cluster = online_cluster(device, architecture);
  Plan plan = online_plan(problem, rows, tuning::kOnlineClusterBlock);
  if (cluster == 1 || rows.vectors < std::int64_t{cluster} * plan.block * plan.items ||
      are_few(rows, device, architecture))
    return {online_plan(problem, rows, tuning::kOnlineBlock)};
  plan.threads_per_row = plan.block * cluster;
  plan.cluster = cluster;
  plan.splits = cluster;
  plan.grid = rows.count * cluster;
  if (!problem.fused.any) {
    const int step = plan.block * plan.items, bytes = step * sources_of(problem) * tuning::kVectorBytes;
    const std::int64_t steps = divide_up(divide_up(rows.vectors, cluster), step);
    const int room = tuning::dynamic_shared_bytes(device.shared_bytes_per_block / tuning::kOnlineClusterBlocks) / bytes;
    plan.run = static_cast<int>(std::min<std::int64_t>(room, steps));
    plan.shared_bytes = plan.run * bytes;
    plan.passes = plan.run == steps ? 1 : 2;
  }
  plan.why = "a row is wider than registers: a cluster of blocks shares it, and keeps what shared memory has room for";
  return {plan};
}

// In two launches.
Plan split_plan(const Problem& problem, const Rows& rows, const Device& device) {
  Plan plan = online_plan(problem, rows, tuning::kOnlineBlock);
  const std::int64_t room = device.multiprocessors * tuning::kSplitBlocks;
  const std::int64_t useful = divide_up(rows.vectors, plan.block * tuning::kSplitMinVectors);
  plan.regime = Regime::split;
  plan.splits = std::clamp<std::int64_t>(room / rows.count, 1, useful);
  plan.grid = rows.count * plan.splits;
  plan.workspace_bytes = plan.grid * rows.state_bytes;
  plan.why = "fewer rows than the GPU has room for: blocks share a row, states meet in a workspace";
  return plan;
}

Offer offer_split(const Problem& problem, const Rows& rows, const Device& device) {
  const Plan plan = split_plan(problem, rows, device);
  if (!tuning::split_rows_may_meet(size_of(problem.source), size_of(problem.result), problem.fused.any) ||
      device.compute_capability < tuning::kAllKernelsFrom)
    return {plan};
  Plan meeting = plan;
  meeting.items = tuning::meeting_vectors(problem.direction);
  meeting.block = meeting.threads_per_row = tuning::kMeetingThreads;
  meeting.splits = std::max<std::int64_t>(device.multiprocessors / rows.count, 1);
  meeting.grid = rows.count * meeting.splits;
  meeting.workspace_bytes = without_meeting(problem, meeting).grid * rows.state_bytes;
  if (static_cast<double>(meeting.grid) >= tuning::kSplitMeetingFilled * device.multiprocessors)
    let_meet(meeting, problem, device,
             divide_up(divide_up(rows.vectors, meeting.block * meeting.items), meeting.splits),
             tuning::kSplitMeetingL2Part, tuning::kSplitMeetingKept);
  if (!meeting.meets) return {plan};
  meeting.run = meeting.shared_bytes / bytes_of_step(problem, meeting);
  meeting.why = "fewer rows than the GPU has room for: blocks share a row, meet, and keep what they have room for";
  return {meeting};
}

// ---- strided ------------------------------------------------------------------------------------------------------

bool starts_on_vector(const Problem& problem, int operand, int vector) {
  return problem.misalignment[operand] % std::min(tuning::kVectorBytes, vector * bytes_of(problem, operand)) == 0;
}

// Vectors along the columns need: the innermost group contiguous in every operand, and everything else a multiple. A
// single column is a vector of one.
bool columns_are_vectors(const Problem& problem, int vector) {
  if (problem.dim.rank > 1) return false;
  if (problem.inner.rank == 0) return vector == 1;
  const Group& fastest = problem.inner.groups[problem.inner.rank - 1];
  if (fastest.size % vector != 0 || !fused_steps_are_ints(fastest)) return false;
  for (int operand = 0; operand < kWhole; ++operand) {
    if (!problem.has(operand)) continue;
    if (fastest.stride[operand] != 1 || !starts_on_vector(problem, operand, vector)) return false;
    for (const Axis* axis : {&problem.outer, &problem.dim, &problem.inner})
      for (int group = 0; group < axis->rank; ++group)
        if (&axis->groups[group] != &fastest && axis->groups[group].stride[operand] % vector != 0) return false;
  }
  return true;
}

// Whether outer is one group to all operands but masks and biases, to which it may be two.
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

// The columns that are neighbours in memory.
std::int64_t strip_of(const Problem& problem) {
  return problem.inner.rank == 0 ? 1 : problem.inner.groups[problem.inner.rank - 1].size;
}

// Whether condition(operand) holds for the source and, backward, the gradient.
template <typename Condition>
bool holds_for_sources(const Problem& problem, const Condition& condition) {
  return condition(kSource) && (!problem.has(kGrad) || condition(kGrad));
}

bool strips_are_runs(const Problem& problem) {
  const int last = problem.inner.rank - 1;
  return last < 0 ||
         holds_for_sources(problem, [&](int operand) { return problem.inner.groups[last].stride[operand] == 1; });
}

// Whether a strip is one run over all of dim.
bool slabs_are_runs(const Problem& problem) {
  if (!strips_are_runs(problem) || problem.dim.rank > 1) return false;
  return problem.dim.size == 1 || holds_for_sources(problem, [&](int operand) {
           return problem.dim.groups[0].stride[operand] == strip_of(problem);
         });
}

// The largest power of two, at most 16, that all addresses of segments of `columns` columns are multiples of.
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

// Whether strips that are runs follow each other: several are one run.
bool slabs_are_packed(const Problem& problem) {
  return problem.inner.rank <= 1 && problem.outer.rank == 1 && holds_for_sources(problem, [&](int operand) {
           return problem.outer.groups[0].stride[operand] == problem.dim.size * strip_of(problem);
         });
}

// Results of short strips would leave in pieces of sectors. Where they lie as the source does, they go back into
// the tile, and leave as the run that it came as.
bool results_go_back(const Problem& problem) {
  const std::int64_t bytes = strip_of(problem) * size_of(problem.source);
  const bool whole_sectors = bytes % tuning::kSectorBytes == 0;
  if (bytes >= (whole_sectors ? tuning::kSectorBytes : tuning::kTileBackBytes) || problem.source != problem.result)
    return false;
  if (!slabs_are_runs(problem) || problem.misalignment[kSource] != problem.misalignment[kResult]) return false;
  for (const Axis* axis : {&problem.outer, &problem.dim, &problem.inner})
    for (int group = 0; group < axis->rank; ++group)
      if (axis->groups[group].stride[kSource] != axis->groups[group].stride[kResult]) return false;
  return true;
}

// Whether what is fused can be applied to what is held, in its place: 16 bits have no room for more than a mask, but
// where they are single columns, each of which has a register.
bool fuses_in_place(const Problem& problem) {
  const Fused& fused = problem.fused;
  return problem.direction == Direction::backward || size_of(problem.source) > 2 || (!fused.bias && may_scale(fused));
}

// Elements at most between the vector that a slab begins in and its first element.
int most_phase_of_slabs(const Problem& problem, int vector) {
  int unit = vector;  // whose multiples all slabs begin at
  if (problem.outer.rank > 0)
    unit = static_cast<int>(std::gcd(problem.outer.groups[0].stride[kSource], std::int64_t{unit}));
  const std::int64_t phase = problem.misalignment[kSource] / size_of(problem.source);
  return vector - unit + static_cast<int>(phase % unit);
}

// Whether dim times the columns, a slab, is one run of memory in every operand, and all slabs are misaligned alike:
// vectors of one are vectors of all. So they are folded, unless something is fused, or a slab is less than a vector of
// each column: all of them have to be there.
bool slabs_may_fold(const Problem& problem, int vector) {
  const std::int64_t strip = strip_of(problem);
  if (problem.fused.any || problem.dim.rank != 1 || problem.inner.rank != 1 || problem.outer.rank > 1) return false;
  if (problem.dim.size < vector) return false;
  for (int operand = 0; operand < kWhole; ++operand) {
    if (!problem.has(operand)) continue;
    if (problem.inner.groups[0].stride[operand] != 1 || problem.dim.groups[0].stride[operand] != strip) return false;
  }
  return rows_are_vectors(problem);
}

// Whether rows of columns begin anywhere within vectors, or words, of so many, but alike in all operands: then what is
// loaded and stored may begin some columns earlier.
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

// Whether 16-bit columns can be held as words that begin a column earlier in rows that begin within a word.
bool words_may_shift(const Problem& problem) {
  return size_of(problem.source) == 2 && size_of(problem.result) == 2 && begin_alike(problem, 2);
}

// Else it holds halves of vectors, words, or single columns.
bool holds_vectors(const Problem& problem, const Plan& plan) {
  return tuning::are_vectors(plan.vector * size_of(problem.source));
}

bool words_shift(const Problem& problem, const Plan& plan) {
  return !holds_vectors(problem, plan) && !columns_are_vectors(problem, plan.vector);
}

// Columns that a thread moves at once, where they are read twice. Folded ones tell their states through the workspace.
int vector_read_twice(const Problem& problem, const Device& device) {
  if (device.compute_capability < tuning::kAllKernelsFrom) return 1;
  const int bytes = size_of(problem.source);
  Plan plan;
  plan.vector = tuning::strided_vector(bytes, problem.fused.any);
  if (columns_are_vectors(problem, plan.vector)) return plan.vector;
  const bool folds =
      tuning::online_may_fold(bytes, problem.fused.any) && slabs_may_fold(problem, plan.vector) &&
      problem.outer.size * fold_of(problem, plan).columns * state_bytes(problem) <= tuning::kWorkspaceBytes;
  return folds ? plan.vector : 1;
}

// Whether what is read is at least such a part of L2: then vectors may as well be read twice.
bool reads_much(const Problem& problem, const Device& device, int l2_part) {
  return l2_part * bytes_read(problem) >= device.l2_bytes;
}

// Whether some rows of a result begin within a sector.
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

// And kernels can tell which of its vectors a tile is to write.
bool tiles_may_overlap(const Problem& problem, const Plan& plan) {
  const int source = size_of(problem.source), result = size_of(problem.result);
  return tuning::columns_may_overlap(plan.vector * source, source, result, problem.fused.any) &&
         begin_within_sectors(problem);
}

// Vectors that a tile has of the next one, so that it can write such sectors whole.
int columns_overlap(const Problem& problem, const Plan& plan) {
  if (problem.in_place || !tiles_may_overlap(problem, plan)) return 0;  // in place, another may have written them
  const int bytes = plan.vector * size_of(problem.result);
  return (tuning::kSectorBytes - (tuning::are_words(plan.vector * size_of(problem.source)) ? 0 : 1)) / bytes;
}

// Which kernel it runs: one of tuning::kColumnsKernels, or of those for halves, words or single columns. Those that
// have several tiles have all of dim in each thread.
int columns_kernel(const Problem& problem, const Plan& plan, bool folded, bool shifted) {
  const int source = size_of(problem.source), bytes = plan.vector * source, vectors = plan.items * sources_of(problem);
  const bool alone = plan.threads_per_row == 1 && !folded;
  if (shifted) return alone ? tuning::kAllShiftedWordsKernel : tuning::kShiftedWordsKernel;
  const int kernels =
      tuning::columns_kernels(bytes, source, size_of(problem.result), problem.direction, problem.fused.any);
  const bool many_threads = tuning::are_vectors(bytes) && kernels > tuning::kManyThreadsKernel && !folded;
  const std::int64_t columns = problem.outer.size * problem.inner.size / plan.vector;
  const bool few = tuning::are_words(bytes) && columns < tuning::kColumnWordsMany;
  const bool turns = alone && columns >= tuning::kColumnTurnsMany;
  const int first = folded ? tuning::kFoldedKernel : tuning::first_columns_kernel(bytes, problem.fused.any);
  for (int kernel = first; kernel < kernels; ++kernel) {
    if (kernel == tuning::kSmallerKernel && many_threads &&
        tuning::kColumnsKernels[tuning::kManyThreadsKernel].vectors >= vectors)
      return tuning::kManyThreadsKernel;
    const tuning::ColumnsKernel& size = tuning::columns_kernel(bytes, kernel);
    const bool suits = size.turns > 1 ? turns && !(few && kernel > 0) : size.max_block >= plan.block;
    if (suits && size.vectors + size.shared >= vectors) return kernel;
  }
  throw std::logic_error("no kernel holds so many columns");
}

// How often the clusters of so many tiles fill all multiprocessors, and what tuning::columns_cost() has for them.
struct ColumnsCost {
  double waves, cost;
};
ColumnsCost cost_of_columns(const Problem& problem, const Device& device, const Plan& plan, int number,
                            std::int64_t tiles) {
  const int bytes = plan.vector * size_of(problem.source);
  const tuning::ColumnsKernel& kernel = tuning::columns_kernel(bytes, number);
  const int blocks = kernel.max_block * kernel.blocks / plan.block;  // a multiprocessor
  const double waves =
      static_cast<double>(tiles) / tuning::clusters_at_once(device.multiprocessors, plan.cluster, blocks);
  const int held = plan.items * kernel.turns * sources_of(problem) * bytes;
  return {waves, tuning::columns_cost(waves, held, tuning::has_many_threads(bytes, number))};
}

std::int64_t columns_grid(const Problem& problem, const Plan& plan) {
  const ColumnsLayout layout = columns_layout(problem, plan);
  return divide_up(problem.outer.size * layout.inner, layout.turns * layout.step) * plan.cluster;
}

// The same if the result lay apart: what plans are chosen by, as bits are to be the same in place.
std::int64_t columns_grid_apart(const Problem& problem, const Plan& plan) {
  if (!problem.in_place) return plan.grid;
  Problem apart = problem;
  apart.in_place = false;
  return columns_grid(apart, plan);
}

// What follows, of a plan, from its cluster, where `along` threads of a block share dim, and it has so many vectors.
void settle_columns(Plan& plan, std::int64_t dim, std::int64_t along, std::int64_t vectors_of_block) {
  plan.items = static_cast<int>(divide_up(divide_up(dim, plan.cluster), along));
  plan.threads_per_row = static_cast<int>(along * plan.cluster);
  plan.block = static_cast<int>(whole_warps(vectors_of_block * along));
}

// And the rest of it, where a block has `width` vectors; none, where its states find no room in shared memory.
std::optional<Plan> finished_columns(const Problem& problem, const Device& device, Plan plan, std::int64_t width,
                                     std::int64_t along) {
  const int bytes = plan.vector * size_of(problem.source);
  const Fold fold = fold_of(problem, plan);
  const bool shifted = words_shift(problem, plan);
  settle_columns(plan, fold.dim, along, width);
  const int number = columns_kernel(problem, plan, fold.folds, shifted);
  const tuning::ColumnsKernel& kernel = tuning::columns_kernel(bytes, number);
  if (kernel.turns > 1) width = plan.block = tuning::kColumnsBlock;
  plan.rows_per_block = static_cast<int>(kernel.turns * width * plan.vector);
  plan.grid = columns_grid(problem, plan);
  const std::int64_t teams =
      tuning::shifts_all_words(bytes, number) ? 2 : along / work::tile_team(plan.run, static_cast<int>(along));
  const std::int64_t held = width + (shifted ? 1 : 0), columns = held * plan.vector / fold.elements;
  const int states = plan.vector * state_bytes(problem), apart = states + tuning::states_gap(states);
  if (teams > 1 || plan.cluster > 1 || fold.elements > 1)  // of whole columns, of teams, and of blocks
    plan.shared_bytes = static_cast<int>(held * (1 + teams) * apart +
                                         (plan.cluster > 1 ? columns * plan.cluster * state_bytes(problem) : 0));
  plan.shared_bytes += static_cast<int>(columns_mask_bytes(problem, plan));
  const int in_registers = kernel.vectors / sources_of(problem);
  if (plan.items > in_registers) {
    plan.shared_items = plan.items - in_registers;
    plan.shared_bytes = static_cast<int>(divide_up(plan.shared_bytes, tuning::kLineBytes)) * tuning::kLineBytes +
                        columns_shared_bytes(problem, plan);
  }
  if (plan.shared_bytes > tuning::dynamic_shared_bytes(device.shared_bytes_per_block) ||
      plan.grid > std::numeric_limits<int>::max())
    return {};
  if (plan.shared_items > 0)
    plan.why =
        plan.cluster > 1
            ? "another dimension runs faster than dim; a cluster holds vectors of columns in registers and shared "
              "memory, cut along dim"
            : "another dimension runs faster than dim; threads hold vectors of columns in registers and shared "
              "memory";
  else
    plan.why =
        plan.cluster > 1
            ? "another dimension runs faster than dim; a cluster holds vectors of columns in registers, cut along dim"
            : "another dimension runs faster than dim; threads hold vectors of columns in registers";
  return plan;
}

// Few columns, as words or one by one: neighbours over all strips, and so many threads along dim that each has little,
// or, of more columns, as many as find room, if then a warp has all of dim.
std::optional<Plan> few_columns_plan(const Problem& problem, const Device& device,
                                     const tuning::Architecture& architecture) {
  const int bytes = size_of(problem.source), word = tuning::columns_word(bytes);
  if (bytes == 8 || problem.fused.any) return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.vector = columns_are_vectors(problem, word) ? word : 1;
  if (!columns_are_vectors(problem, plan.vector)) return {};
  const std::int64_t dim = problem.dim.size, columns = problem.outer.size * problem.inner.size / plan.vector;
  plan.run = static_cast<int>(std::min<std::int64_t>(tuning::kFewColumnsRun, power_of_two_from(columns)));
  const std::int64_t lanes = kWarp / plan.run, operands = sources_of(problem);
  const std::int64_t rather = divide_up(dim, tuning::kFewColumnsHeld / operands);
  std::int64_t along = power_of_two_from(rather), most = tuning::few_columns_most_held(architecture.max_cluster);
  if (along > lanes) along = dim <= lanes * tuning::kFewColumnsOfWarp ? lanes : divide_up(rather, lanes) * lanes;
  along = std::min<std::int64_t>(along, tuning::kFewColumnsThreads / plan.run);
  const std::int64_t room = std::int64_t{tuning::kFewColumnsThreads} * device.multiprocessors;
  if (columns * along > room) {
    along = std::min(along, lanes);
    while (along > 1 && columns * along > room) along /= 2;
    most = tuning::more_columns_most_held(problem.direction);
  }
  if (columns * along > room || divide_up(dim, along) * operands > most) return {};
  const std::int64_t width = plan.run * std::max<std::int64_t>(1, tuning::kColumnsBlock / (plan.run * along));
  return finished_columns(problem, device, plan, width, along);
}

// Vectors of columns, or folded ones, halves of vectors, words, or single columns, in registers; a thread has every
// along'th element of dim, `most_held` of them at most. With many threads, as tuning::kManyThreadsKernel has, if shapes
// are given for these; of halves, these may share: have a part in shared memory, too.
std::optional<Plan> columns_held_up_to(int most_held, const Problem& problem, const Device& device,
                                       const tuning::Architecture& architecture, int vector,
                                       std::span<const tuning::ColumnsShape> many_threads_shapes, bool shares) {
  const bool many_threads = !many_threads_shapes.empty();
  const int bytes = size_of(problem.source), operands = sources_of(problem);
  const int kernels =
      tuning::columns_kernels(vector * bytes, bytes, size_of(problem.result), problem.direction, problem.fused.any);
  if (kernels == 0) return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.vector = vector;
  const bool vectors_held = holds_vectors(problem, plan), singles = tuning::are_singles(vector * bytes);
  const bool shifted = words_shift(problem, plan), words = tuning::are_words(vector * bytes) && !shifted;
  const ColumnsLayout layout = columns_layout(problem, plan);
  const std::int64_t strip = layout.inner, dim = layout.fold.dim, vectors = problem.outer.size * strip;
  if (layout.fold.folds && layout.whole < tuning::columns_min_folded(bytes, problem.direction)) return {};
  if (vectors > std::numeric_limits<int>::max() / 2 || dim > std::numeric_limits<int>::max()) return {};
  const int last = layout.fold.folds ? tuning::kManyThreadsKernel : tuning::kFoldedKernel;
  const tuning::ColumnsKernel& largest_kernel =
      tuning::are_halves(vector * bytes) ? tuning::kColumnHalvesKernels[shares ? tuning::kSharingHalvesKernel : 0]
      : vectors_held                     ? tuning::kColumnsKernels[many_threads ? tuning::kManyThreadsKernel : last - 1]
      : singles                          ? tuning::kColumnSinglesKernels.back()
                                         : tuning::kColumnWordsKernels[tuning::kWordsKernel];
  int most = 0, most_threads = 0;  // of a thread; of a block: those of the kernel that was tried last
  const auto hold = [&](const tuning::ColumnsKernel& kernel) {
    most = std::min((kernel.vectors + kernel.shared) / operands, most_held);
    most_threads = kernel.max_block;
  };
  hold(largest_kernel);
  if (singles && dim > tuning::kColumnSinglesKernels[tuning::kSharedSinglesKernel - 1].vectors / operands &&
      !problem.fused.any && !tuning::rather_single_columns(problem.direction, strip, dim) &&
      problem.outer.size * strip * dim >
          device.multiprocessors * tuning::column_singles_most(size_of(problem.result), problem.direction))
    return {};

  constexpr int kSectorWords = tuning::kSectorBytes / tuning::kColumnsWordBytes;
  // Threads along dim, which are a power of two where a warp has several rows of so many vectors, or strips of words
  // are shorter than a sector (15709 x 89 x 3 of float32: 15.5 us by four, 20.3 by three; longer ones take as long). A
  // block that needs no others may rather have more threads of fewer vectors: the time from its last load to its first
  // store is short.
  const auto threads_for = [&](std::int64_t run, int cluster) {
    const std::int64_t rows = divide_up(dim, cluster);
    std::int64_t along = divide_up(rows, most);
    if (shifted && (along > 1 || cluster > 1)) along = divide_up(along, 2) * 2;  // all rows of a thread begin alike
    const bool short_strips =
        (words || singles) && run < kSectorWords && run * power_of_two_from(along) <= tuning::kColumnsWholeBlock;
    if (short_strips || (run < kWarp && std::has_single_bit(static_cast<std::uint64_t>(run))))
      along = power_of_two_from(along);
    while (cluster == 1 && vectors_held && 2 * run * along <= tuning::columns_block(bytes) &&
           divide_up(rows, along) > tuning::columns_rather_held(static_cast<int>(run), bytes, problem.direction))
      along *= 2;
    while (cluster == 1 && words && run * along < kSectorWords &&
           divide_up(rows, along) > tuning::column_words_rather_held(static_cast<int>(run)))
      along *= 2;
    return along;
  };
  std::int64_t along = 0, width = 0;  // width: vectors that a block has

  const auto share = [&](int cluster) {
    plan.cluster = cluster;
    along = threads_for(plan.run, cluster);
    settle_columns(plan, dim, along, plan.run);
  };
  const auto kernel_now = [&] { return columns_kernel(problem, plan, layout.fold.folds, shifted); };
  const auto cost_now = [&] {
    return cost_of_columns(problem, device, plan, kernel_now(), divide_up(vectors, plan.run));
  };
  // By as many of these blocks as take the least; of the same, the most.
  const auto share_cheaply = [&](int fewest_blocks, int most_blocks) {
    if (fewest_blocks == most_blocks) return share(most_blocks);
    int best = most_blocks;
    double least = std::numeric_limits<double>::infinity();
    for (int cluster = most_blocks; cluster >= fewest_blocks; --cluster) {
      share(cluster);
      if (const double cost = cost_now().cost; cost < least) best = cluster, least = cost;
    }
    share(best);
  };

  // Whole strips, whose threads read neighbouring elements of dim as one run of memory, over the fewest blocks; short
  // ones over as many as take the least. Of small strips a block has as many as leave the fewest threads idle.
  const auto whole_by = [&](const tuning::ColumnsKernel& kernel) {
    hold(kernel);
    for (const int largest : {std::min(most_threads, tuning::kColumnsWholeBlock), most_threads})
      for (plan.cluster = 1; plan.cluster <= architecture.max_cluster; ++plan.cluster) {
        along = threads_for(strip, plan.cluster);
        const std::int64_t one = strip * along, room = plan.cluster == 1 ? problem.outer.size : 1;
        if (one > largest) continue;
        std::int64_t strips = std::clamp<std::int64_t>(tuning::kColumnsBlock / one, 1, room);
        for (std::int64_t more = strips + 1; more <= room && more * one <= 2 * tuning::kColumnsBlock; ++more)
          if (more * whole_warps(strips * one) > strips * whole_warps(more * one)) strips = more;
        plan.run = static_cast<int>(strip);
        if (plan.cluster > 1 && strip <= tuning::kColumnsShortStrip) {
          share(plan.cluster);
          int most_blocks = std::min(2 * static_cast<int>(power_of_two_from(plan.cluster)), architecture.max_cluster);
          if (cost_now().waves <= 1)  // no more than one on each multiprocessor
            most_blocks = static_cast<int>(
                std::clamp<std::int64_t>(device.multiprocessors / problem.outer.size, plan.cluster, most_blocks));
          share_cheaply(plan.cluster, most_blocks);
        }
        width = strips * strip;
        return true;
      }
    return false;
  };
  const auto whole = [&] {
    const bool fewer = layout.fold.folds && problem.direction == Direction::backward;
    return (fewer && whole_by(tuning::kColumnsKernels[tuning::kFoldedKernel])) || whole_by(largest_kernel);
  };

  // Forward, words of 32 bits whose blocks all find room at once have as many threads as blocks have at most, if that
  // is not many more (an H200 takes for 3 x 301 x 321 3.4 us, by 192 threads 4.1; 37 x 289 x 131 7.4, 8.9; for 264
  // problems 0.92 of the time, 1.16 at most; of 16 bits as long).
  const bool fills = problem.direction == Direction::forward && bytes == 4 && !vectors_held && !problem.fused.any;
  const auto fill_block = [&] {
    const std::int64_t all = tuning::kColumnsWholeBlock / plan.run, before = along;
    if (!fills || plan.run * along <= tuning::kColumnsBlock || all <= along) return false;
    settle_columns(plan, dim, along = all, plan.run);
    if (cost_now().waves <= 1) return true;
    settle_columns(plan, dim, along = before, plan.run);
    return false;
  };

  // A part of a strip, by the fewest blocks, or more, up to a power of two.
  const auto fits = [&](const tuning::ColumnsShape& shape, int most_cluster) {
    plan.run =
        static_cast<int>(std::min<std::int64_t>(shape.segment / (plan.vector * bytes), power_of_two_from(strip)));
    if (shape.rather_shorter && divide_up(vectors, plan.run) < device.multiprocessors) return false;
    const int most_blocks = std::min(shape.most_cluster, most_cluster);
    for (int fewest = shape.least_cluster; fewest <= most_blocks; ++fewest) {
      share(fewest);
      if (plan.run * along > std::min(shape.threads, most_threads)) continue;
      if (fill_block()) return true;
      share_cheaply(fewest, std::min(static_cast<int>(power_of_two_from(fewest)), most_blocks));
      fill_block();
      return true;
    }
    return false;
  };
  const auto parts = [&] {
    const bool overlaps = tiles_may_overlap(problem, plan);  // also in place, where bits are to be the same
    const auto rather_twice = [&](const tuning::ColumnsShape& shape) {
      return tuning::columns_rather_read_twice(vector * bytes, bytes, problem.direction, overlaps, shape) &&
             !problem.fused.any && vector_read_twice(problem, device) > 1 &&
             reads_much(problem, device, tuning::kColumnsTwiceL2Part);
    };
    const auto any_fits = [&](const auto& shapes) {
      const auto fit = [&](const tuning::ColumnsKernel& kernel, int least_segment, int most_cluster) {
        hold(kernel);
        return std::any_of(shapes.begin(), shapes.end(), [&](const auto& shape) {
          return shape.segment >= least_segment && !rather_twice(shape) && fits(shape, most_cluster);
        });
      };
      if (!fit(largest_kernel, 0, architecture.max_cluster)) return false;
      if (!vectors_held || many_threads ||
          !tuning::columns_rather_fewer(bytes, size_of(problem.result), problem.direction, problem.fused.any))
        return true;
      // segments whose sectors are written in parts are to be no shorter for it, nor clusters larger for many waves
      const int half_line = tuning::kLineBytes / 2, segment = plan.run * vector * bytes;
      const std::int64_t wave = std::int64_t{largest_kernel.max_block} * largest_kernel.blocks * device.multiprocessors;
      const bool many_waves = vectors * along * plan.cluster > tuning::kColumnsFewWaves * wave;
      return fit(tuning::kColumnsKernels[tuning::kSmallerKernel],
                 begin_within_sectors(problem) ? std::max(segment, half_line) : half_line,
                 many_waves ? plan.cluster : architecture.max_cluster) ||
             fit(largest_kernel, 0, architecture.max_cluster);
    };
    if (!(many_threads    ? any_fits(many_threads_shapes)
          : !vectors_held ? any_fits(tuning::kColumnWordsShapes)
          : overlaps      ? any_fits(tuning::kOverlappingShapes)
          : operands > 1  ? any_fits(tuning::kColumnsBackwardShapes)
                          : any_fits(tuning::kColumnsShapes)))
      return false;
    // sectors that are written in parts are as slow as to read twice
    if (bytes == 2 && vectors_held && plan.run * vector * bytes <= tuning::kSectorBytes &&
        begin_within_sectors(problem))
      return false;
    const int least = tuning::kColumnsBlock * (shifted ? 2 : 1);  // threads
    const auto width_now = [&] { return plan.run * std::max<std::int64_t>(1, least / (along * plan.run)); };
    const auto few = [&] { return divide_up(vectors, width_now()) * plan.cluster < device.multiprocessors; };
    const int least_rows = std::max(tuning::kColumnsMinRows, plan.vector * largest_kernel.vectors);
    while (few() && 2 * plan.cluster <= architecture.max_cluster && dim >= 2 * plan.cluster * least_rows)
      share(2 * plan.cluster);
    while (few() && 2 * plan.run * along <= kWarp && 2 * along <= divide_up(dim, plan.cluster)) along *= 2;
    width = width_now();
    return true;
  };
  const int least_strip =
      vectors_held || singles ? tuning::kColumnsMinStrip : tuning::column_words_min_strip(bytes, false);
  if (shifted && strip * vector * bytes <= tuning::column_words_min_strip(bytes, true)) {
    if (strip < kWarp || !whole()) return {};
  } else if (shifted && problem.in_place) {
    return {};
  } else if (layout.fold.folds || strip * vector * bytes < least_strip) {
    const bool runs = slabs_are_runs(problem) && problem.dim.groups[0].stride[kResult] == problem.inner.size;
    if (!runs || !whole()) return {};
  } else if (!parts()) {
    return {};
  }

  return finished_columns(problem, device, plan, width, along);
}

// The same, of as many elements as there is room for; but of so few columns that most multiprocessors would be idle,
// over more blocks, of which each has one of its own. Backward, but for vectors, what one block has stays there: what
// its threads tell each other is a sum, and takes less than a cluster does.
std::optional<Plan> held_columns(const Problem& problem, const Device& device, const tuning::Architecture& architecture,
                                 int vector, std::span<const tuning::ColumnsShape> many_threads_shapes = {},
                                 bool shares = false) {
  const auto up_to = [&](int most_held) {
    return columns_held_up_to(most_held, problem, device, architecture, vector, many_threads_shapes, shares);
  };
  const auto plan = up_to(std::numeric_limits<int>::max());
  if (!plan || columns_grid_apart(problem, *plan) >= device.multiprocessors) return plan;
  const bool stays = problem.direction == Direction::backward && plan->cluster == 1 && !holds_vectors(problem, *plan);
  for (const int most_held : tuning::kSpreadColumnsHeld) {
    if (2 * plan->items < 3 * most_held) break;
    const auto spread = up_to(most_held);
    if (spread && spread->block <= tuning::kSpreadColumnsBlock && !(stays && spread->cluster > 1) &&
        columns_grid_apart(problem, *spread) <= device.multiprocessors)
      return spread;
  }
  return plan;
}

// Whether columns that are held so take no more than they do otherwise, which costs so many times what
// tuning::columns_cost() has; by far less, if that is done in few waves.
bool takes_less(const Problem& problem, const Device& device, const Plan& plan, const Plan& otherwise,
                double other_cost = 1) {
  const auto cost_of = [&](const Plan& plan) {
    return cost_of_columns(problem, device, plan, columns_layout(problem, plan).kernel, plan.grid / plan.cluster);
  };
  const auto [waves, cost] = cost_of(otherwise);
  return cost_of(plan).cost <= (waves < tuning::kColumnsFewestWaves ? tuning::kColumnsByFar : other_cost) * cost;
}

// Whether vectors of 16-bit columns would leave sectors of which others write a part. Tiles of halves overlap.
bool vectors_write_parts(const Problem& problem) {
  return size_of(problem.source) == 2 && begin_within_sectors(problem);
}

// Whether there are kernels whose threads have four columns each.
bool many_threads_may_hold(const Problem& problem) {
  return size_of(problem.source) <= 4 && problem.source == problem.result && !problem.fused.any &&
         columns_are_vectors(problem, tuning::kManyThreadsColumns);
}

// Four columns each, held by many threads, where vectors of columns can be, forward, or these are 16-bit and halves of
// vectors.
std::optional<Plan> by_many_threads(const Problem& problem, const Device& device,
                                    const tuning::Architecture& architecture) {
  if (!many_threads_may_hold(problem)) return {};
  const int bytes = size_of(problem.source);
  // backward, vectors take no longer, and short strips do better folded
  const bool short_strip = strip_of(problem) * bytes < tuning::kManyThreadsMinStrip;
  if (problem.direction == Direction::backward &&
      (short_strip || columns_are_vectors(problem, tuning::kVectorBytes / bytes)))
    return {};
  const auto of = [&](std::span<const tuning::ColumnsShape> shapes) {
    return held_columns(problem, device, architecture, tuning::kManyThreadsColumns, shapes);
  };
  std::optional<Plan> plan;
  if (!vectors_write_parts(problem)) {
    plan = bytes == 2 ? of(tuning::kManyThreadsHalvesShapes) : of(tuning::kManyThreadsShapes);
  } else if (problem.dim.size >= tuning::kHalvesMinDim) {
    plan = of(tuning::kManyThreadsOverlappingShapes);
    const auto longer = of(tuning::kColumnWordsShapes);
    if (!plan || (longer && takes_less(problem, device, *longer, *plan))) plan = longer;
  }
  if (!plan || !short_strip) return plan;
  const int neighbours = plan->run * plan->threads_per_row / plan->cluster * plan->vector * bytes;  // along dim, too
  return neighbours < tuning::kLineBytes ? std::nullopt : plan;
}

// Halves of vectors, of which threads have a part in shared memory, where they rather do so than that a cluster holds
// columns in registers: if that leaves the GPU enough waves, and segments no shorter, and all blocks that registers
// have room for find theirs in shared memory.
std::optional<Plan> rather_shared(const Problem& problem, const Device& device,
                                  const tuning::Architecture& architecture, const Plan& otherwise) {
  if (otherwise.cluster == 1 || size_of(problem.source) != 2 || !many_threads_may_hold(problem)) return {};
  if (problem.direction == Direction::backward && begin_within_sectors(problem)) return {};
  const auto sharing =
      held_columns(problem, device, architecture, tuning::kManyThreadsColumns, tuning::kColumnsSharingShapes, true);
  if (!sharing) return {};
  const int segment = sharing->run * sharing->vector, segment_otherwise = otherwise.run * otherwise.vector;
  const bool merely_fewer_blocks =
      segment == segment_otherwise && sharing->block == otherwise.block && sharing->grid < otherwise.grid;
  const tuning::ColumnsKernel& kernel = tuning::kColumnHalvesKernels[tuning::kSharingHalvesKernel];
  const int blocks = kernel.max_block * kernel.blocks / sharing->block;
  const double waves =
      cost_of_columns(problem, device, *sharing, tuning::kSharingHalvesKernel, sharing->grid / sharing->cluster).waves;
  const bool rather = segment >= segment_otherwise &&
                      waves > tuning::kColumnsFewestWaves * (merely_fewer_blocks ? 2 : 1) &&
                      tuning::share_multiprocessor(blocks, sharing->shared_bytes, device.shared_bytes_per_block);
  return rather ? sharing : std::nullopt;
}

// Whether they take less than the same vectors held by fewer threads do; not of so few blocks that multiprocessors are
// idle.
bool suits_many_threads(const Problem& problem, const Device& device, const Plan& many, const Plan& few) {
  return many.cluster <= tuning::kGpc / 2 && many.grid >= device.multiprocessors &&
         takes_less(problem, device, many, few, vectors_write_parts(problem) ? tuning::kColumnsInPartsCost : 1);
}

// Whether folded columns are held at less cost than as words, forward: a vector takes one instruction where words take
// four, but has several columns' states to combine, and its clusters, which have whole strips, may be larger. Of few
// columns the time is latency, which grows with what a thread has.
bool folds_cheaper(const Problem& problem, const Device& device, const Plan& folded, const Plan& words) {
  const int states = folded.threads_per_row * columns_layout(problem, folded).fold.elements;
  // those of short strips may be more than they must, a power of two, which spares them time
  const std::int64_t fewest = divide_up(problem.dim.size, tuning::kColumnWordsKernels[tuning::kWordsKernel].vectors);
  const std::int64_t threads = std::has_single_bit(static_cast<std::uint64_t>(fewest)) ? words.threads_per_row : fewest;
  return problem.direction == Direction::forward && folded.grid >= device.multiprocessors &&
         folded.cluster <= words.cluster && states < tuning::kColumnsFoldedStates * threads;
}

// Whether threads hold more of folded columns than they rather would, and leave multiprocessors idle for it.
bool folds_too_much(const Problem& problem, const Device& device, const Plan& plan) {
  return problem.direction == Direction::backward && fold_of(problem, plan).folds &&
         plan.items * sources_of(problem) > tuning::kColumnsKernels[tuning::kFoldedKernel].vectors &&
         plan.grid < device.multiprocessors;
}

// The same where words would be shifted in every other row: if the strip is short, a vector spares them that, too.
bool folds_rather_than_shifts(const Problem& problem, const Plan& folded, const Plan& words) {
  return strip_of(problem) * size_of(problem.source) <= tuning::column_words_min_strip(2, true) &&
         folded.cluster <= words.cluster;
}

// Whether threads rather have single 16-bit columns than words that are shifted, where they can be.
bool suits_singles(const Problem& problem) {
  return problem.direction == Direction::forward || problem.dim.size <= tuning::kColumnSinglesBackwardDim ||
         strip_of(problem) * size_of(problem.source) <= tuning::column_words_min_strip(2, true) || problem.in_place;
}

// Vectors of columns that begin elsewhere in each row, as threads can hold all of dim.
std::optional<Plan> staggered_plan(const Problem& problem, const Device& device) {
  constexpr int kVector = tuning::kStaggeredVector;
  const int bytes = size_of(problem.source);
  if (!tuning::columns_may_be_staggered(bytes, size_of(problem.result), problem.direction, problem.fused.any) ||
      problem.in_place || problem.outer.rank > 1 || problem.inner.rank != 1 || !begin_alike(problem, kVector) ||
      problem.dim.size < tuning::kStaggeredMinDim || stagger_step(problem) > tuning::kStaggeredMostStep)
    return {};
  const int kernel = tuning::staggered_kernel(bytes, stagger_step(problem), problem.dim.size);
  if (kernel == tuning::kStaggeredRows.size()) return {};
  for (const int operand : {kSource, kResult})  // what vectors have beyond the strip is what follows in memory
    if (problem.dim.groups[0].stride[operand] < problem.inner.size || problem.outer.groups[0].stride[operand] < 0)
      return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.ragged = true;
  plan.vector = kVector;
  plan.items = static_cast<int>(problem.dim.size);
  plan.block = tuning::staggered_block(tuning::kStaggeredRows[kernel]);
  plan.rows_per_block = plan.block / kWarp * (kWarp - 2) * kVector;
  const std::int64_t strip = problem.inner.size, warps = work::staggered_warps(strip, kVector);
  plan.grid = divide_up(problem.outer.size * warps, plan.block / kWarp);
  if (plan.grid * plan.block < std::int64_t{tuning::kStaggeredMinThreads} * device.multiprocessors ||
      strip < tuning::kStaggeredMinColumns * warps ||
      std::max(strip, problem.outer.size * warps) > std::numeric_limits<int>::max() / 2)
    return {};
  plan.why =
      "another dimension runs faster than dim; threads hold vectors of columns, which begin elsewhere in each row";
  return plan;
}

std::optional<Plan> columns_plan(const Problem& problem, const Device& device,
                                 const tuning::Architecture& architecture) {
  if (problem.fused.causal || !outer_is_one_group(problem) || problem.inner.rank != 1) return {};
  const int bytes = size_of(problem.source), vector = tuning::kVectorBytes / bytes, word = tuning::columns_word(bytes);
  const auto of = [&](int held) { return held_columns(problem, device, architecture, held); };
  const auto singles_of_16_bits = [&] { return bytes == 2 && columns_are_vectors(problem, 1) ? of(1) : std::nullopt; };
  if (!fuses_in_place(problem)) return singles_of_16_bits();
  if (const auto few = few_columns_plan(problem, device, architecture)) return few;
  const bool are_vectors = columns_are_vectors(problem, vector);
  const auto in_registers = [&](const Problem& apart) {
    const auto many = by_many_threads(apart, device, architecture);
    if (!are_vectors) return many;
    const auto few = held_columns(apart, device, architecture, vector);
    return few && many && suits_many_threads(apart, device, *many, *few) ? many : few;
  };
  const auto vectors_of = [&](const Problem& apart) {
    const auto plan = in_registers(apart);
    const auto shared = plan ? rather_shared(apart, device, architecture, *plan) : std::nullopt;
    return shared ? shared : plan;
  };
  std::optional<Plan> vectors;
  if (problem.in_place) {  // tiles do not overlap, but bits are to be the same
    Problem apart = problem;
    apart.in_place = false;
    vectors = vectors_of(apart);
    if (vectors) vectors->grid = columns_grid(problem, *vectors);
  } else {
    vectors = vectors_of(problem);
  }
  if (vectors || are_vectors) return vectors;
  const auto folded = [&]() -> std::optional<Plan> {
    if (!slabs_may_fold(problem, vector)) return {};
    const auto folds = of(vector);
    return folds && !folds_too_much(problem, device, *folds) ? folds : std::nullopt;
  };
  if (columns_are_vectors(problem, word)) {
    const auto words = of(word);
    const bool parts = strip_of(problem) * bytes >= tuning::column_words_min_strip(bytes, false);
    if (words && parts) return words;
    const auto folds = folded();
    return folds && (!words || folds_cheaper(problem, device, *folds, *words)) ? folds : words;
  }
  if (problem.fused.any) return singles_of_16_bits();
  const bool shifts = words_may_shift(problem);
  if (bytes == 2 && (!shifts || suits_singles(problem)) && columns_are_vectors(problem, 1))
    if (const auto singles = of(1)) return singles;
  const auto words = shifts ? of(word) : std::nullopt, folds = folded();
  return folds && (!words || folds_rather_than_shifts(problem, *folds, *words)) ? folds : words;
}

// Results of a dim of several groups go back into the tile, where they take the place of sources.
bool tiles_take_dim(const Problem& problem) { return problem.dim.rank <= 1 || problem.source == problem.result; }

// Threads that hold a row, which begins anywhere, element by element; 0, where other plans take less: few rows of 16
// bits whose vectors are not those of the result,
std::int64_t single_halves_threads(const Problem& problem, const Rows& rows, const Device& device) {
  const bool few = rows.count <= std::int64_t{tuning::kSingleElementsRows} * device.multiprocessors;
  const bool held = rows.dim * sources_of(problem) <= tuning::kSingleElements;
  const bool wide = rows.dim > 1 << tuning::kWarpMaxLog2Dim;
  return few && held && wide && !rows.alike ? tuning::kSingleElementsBlock : 0;
}
// and such of 32 bits that would be staged for longer.
std::int64_t single_words_threads(const Problem& problem, const Rows& rows, const Device& device) {
  const bool few = rows.count <= std::int64_t{tuning::kSingleWordsRows} * device.multiprocessors;
  const bool wide = rows.dim >= tuning::single_words_least_dim(problem.direction);
  if (!wide || rows.dim >= 1 << tuning::kWarpMaxLog2Dim || (problem.direction == Direction::forward && !few)) return 0;
  const std::int64_t held = rows.dim * sources_of(problem);
  return std::max<std::int64_t>(kWarp, power_of_two_from(divide_up(held, tuning::kSingleWordsHeld)));
}
std::optional<Plan> single_elements_plan(const Problem& problem, const Rows& rows, const Device& device) {
  if (device.compute_capability < tuning::kAllKernelsFrom || problem.fused.any || !rows.ragged() ||
      problem.outer.rank > 1 || rows.count > std::numeric_limits<int>::max() / 2 || !columns_are_vectors(problem, 1))
    return {};
  const int bytes = size_of(problem.source);
  const std::int64_t along = bytes == 4   ? single_words_threads(problem, rows, device)
                             : bytes == 2 ? single_halves_threads(problem, rows, device)
                                          : 0;
  if (along == 0) return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.vector = plan.run = 1;
  const std::int64_t width = std::max<std::int64_t>(1, tuning::kColumnsBlock / along);
  auto singles = finished_columns(problem, device, plan, width, along);
  if (singles) singles->why = "rows that begin anywhere; threads hold single elements in registers";
  return singles;
}

// A tile of dim times as many columns as its shared memory holds.
std::optional<Plan> tile_plan(const Problem& problem, const Device& device, const tuning::Architecture& architecture) {
  if (!tiles_take_dim(problem)) return {};
  const int bytes = size_of(problem.source), sources = sources_of(problem);
  const std::int64_t dim = problem.dim.size, strip = strip_of(problem);
  const std::int64_t all_strips = problem.outer.size * problem.inner.size / strip;
  Plan plan;
  plan.regime = Regime::strided;
  plan.staged = true;
  plan.vector = tuning::tile_columns(bytes, size_of(problem.result));
  if (!columns_are_vectors(problem, plan.vector)) plan.vector = 1;

  // two blocks should fit on a multiprocessor, which has a little more than a block may have
  const std::int64_t most_shared = device.shared_bytes_per_block / 2;
  const std::int64_t most = std::min<std::int64_t>(tuning::kTileMostBytes, most_shared);
  const std::int64_t column = dim * bytes * sources, target = std::min<std::int64_t>(tuning::kTileBytes, most);
  std::int64_t width = strip, strips = 1, cluster = 0;
  const auto fit = [&](std::int64_t limit) {
    for (const tuning::TileShape& shape : tuning::kTileShapes) {
      width = std::min<std::int64_t>(strip, shape.segment / bytes);
      if (shape.cluster > architecture.max_cluster || divide_up(column, shape.cluster) * width > limit) continue;
      const bool large = column * width > target, wide = shape.segment == tuning::kLineBytes && width < strip;
      if (large && wide && all_strips * divide_up(strip, width) < tuning::kTileWideGrid * device.multiprocessors)
        continue;
      cluster = shape.cluster;
      return;
    }
  };
  // unaligned narrow strips go whole, as runs of memory, to as many blocks as dim needs
  const bool whole = slabs_are_runs(problem) && strip * bytes <= tuning::kTileSlabStripBytes &&
                     alignment_of(problem, strip) < tuning::kVectorBytes;
  if (whole && column * strip > target) {
    const std::int64_t blocks = std::int64_t{tuning::kTileGrid} / 2 * device.multiprocessors;
    const auto bytes_of_block = [&] { return divide_up(dim, cluster) * strip * bytes * sources; };
    const auto more = [&] {
      return 2 * cluster <= architecture.max_cluster && dim >= 2 * cluster * tuning::kTileMinRows;
    };
    cluster = 1;
    while (more() && bytes_of_block() > tuning::kTileSmallBytes) cluster *= 2;
    while (more() && all_strips * cluster < blocks && bytes_of_block() >= 2 * tuning::kTileLeastBytes) cluster *= 2;
    if (bytes_of_block() > most) cluster = 0;
    width = strip;
  }
  if (cluster == 0) fit(most);
  if (cluster == 0) fit(std::min<std::int64_t>(tuning::kTileLastBytes, most_shared - tuning::kTileMeetingBytes));
  if (cluster == 0) return {};
  if (cluster == 1 && column * width < target) {
    const std::int64_t columns = target / column;
    if (columns >= strip) {
      width = strip;
      strips = std::clamp<std::int64_t>(columns / strip, 1, all_strips);
    } else if (slabs_are_runs(problem) && column * strip <= most) {
      width = strip;
    } else {
      const std::int64_t full = tuning::kTileBlock * plan.vector, line = tuning::kLineBytes / bytes;
      width = columns >= full ? columns / full * full : columns >= line ? columns / line * line : columns;
    }
    // rather more blocks, as long as they are worth one
    const std::int64_t enough = std::int64_t{tuning::kTileGrid} * device.multiprocessors;
    const bool resident = all_strips * strip * column <= tuning::kTileResidentBytes * device.multiprocessors;
    const std::int64_t least = resident ? tuning::kTileFewBytes : tuning::kTileLeastBytes;
    while (strips > 1 && strips * strip * column > least && divide_up(all_strips, strips) < enough)
      strips = divide_up(strips, 2);
    while (width < strip && width * bytes > tuning::kSectorBytes && width * column > least &&
           all_strips * divide_up(strip, width) < enough)
      width = divide_up(width, 2);
  } else if (cluster == 1 && slabs_are_runs(problem) && column * strip <= most) {
    width = strip;
  }
  if (width < strip) {  // pieces of equal size that keep the strip's alignment
    const std::int64_t unit = std::max(plan.vector, alignment_of(problem, strip) / bytes);
    width = divide_up(divide_up(strip, divide_up(strip, width)), unit) * unit;
  }
  const std::int64_t tiles = strips > 1 ? divide_up(all_strips, strips) : all_strips * divide_up(strip, width);
  while (strips == 1 && tiles * cluster < device.multiprocessors && cluster < architecture.max_cluster &&
         dim >= 2 * cluster * tuning::kTileMinRows)
    cluster *= 2;

  // As many threads along dim as a block of the tile's size still has room for; where strips are short, enough for the
  // neighbours in a warp to write two sectors in a row. Those that share a column should lie in one warp, at distances
  // that are powers of two.
  const std::int64_t rows = divide_up(dim, cluster), line = divide_up(width, plan.vector);
  const std::int64_t held = rows * width * strips * bytes * sources;
  const bool few = tiles * cluster < std::int64_t{tuning::kTileGrid} / 2 * device.multiprocessors;
  const std::int64_t threads = few && rows >= tuning::kTileMinRows ? tuning::kTileMaxBlock
                               : held <= tuning::kTileSmallBytes   ? tuning::kTileBlock
                                                                   : tuning::kTileMaxBlock;
  const bool back = width == strip && results_go_back(problem) && (strips == 1 || slabs_are_packed(problem));
  const std::int64_t to_write =
      back ? 1
           : std::min(power_of_two_from(divide_up(2 * tuning::kSectorBytes, width * size_of(problem.result))),
                      power_of_two_from(rows));
  // the threads of a whole strip that is a run take neighbours, one after the other, and idle nowhere
  const bool flat = strips == 1 && width == strip && slabs_are_runs(problem) && 2 * line <= threads &&
                    !std::has_single_bit(static_cast<std::uint64_t>(line));
  std::int64_t along = 1, words = strips * line;  // of a turn
  if (flat) {
    along = std::min(threads / line, rows);
    plan.run = static_cast<int>(line);
  } else if (to_write > 1 || words * 2 <= threads) {
    const std::int64_t padded = line < kWarp ? power_of_two_from(line) : line;
    strips = std::clamp<std::int64_t>(tuning::kTileMaxBlock / (padded * to_write), 1, strips);
    words = strips * padded;
    along = static_cast<std::int64_t>(
        std::bit_floor(static_cast<std::uint64_t>(std::max<std::int64_t>(1, threads / words))));
    along = std::max(to_write, std::min(along, power_of_two_from(rows)));
    plan.run = static_cast<int>(along > 1 ? padded : words);
    if (along == 1) words = strips * line;
  }
  const std::int64_t turns = along > 1 ? 1 : divide_up(words, threads);
  plan.block = static_cast<int>(divide_up(divide_up(words, turns) * along, kWarp) * kWarp);
  if (along == 1) plan.run = plan.block;
  plan.cluster = static_cast<int>(cluster);
  plan.threads_per_row = static_cast<int>(along * cluster);
  plan.rows_per_block = static_cast<int>(width * strips);
  plan.grid = cluster * (strips > 1 ? divide_up(all_strips, strips) : all_strips * divide_up(strip, width));

  const StridedTile tile = strided_tile(problem, plan);
  plan.items = static_cast<int>(divide_up(rows, along)) * tile.turns;
  plan.shared_bytes = sources * tile.operand_bytes;
  const std::int64_t parts = along / work::tile_team(plan.run, static_cast<int>(along));
  if (parts > 1 || cluster > 1) {
    const auto columns = static_cast<int>((along > 1 ? words : plan.block) * plan.vector);
    const std::int64_t states =
        columns * (cluster > 1 ? 1 + cluster : 1) + parts * work::states_of_team(columns, state_bytes(problem));
    plan.shared_bytes += static_cast<int>(states * state_bytes(problem));
  }
  if (strip > 1)
    plan.why =
        cluster > 1
            ? "another dimension runs faster than dim; a cluster of blocks holds a tile of columns, cut along dim"
            : "another dimension runs faster than dim; a tile of columns holds all of dim";
  else
    plan.why = cluster > 1 ? "rows whose elements are not neighbours, or not aligned alike; a cluster holds whole ones"
                           : "rows whose elements are not neighbours, or not aligned alike; a tile holds whole ones";
  return plan;
}

// Whether whole strips are held as words that are shifted.
bool shifts_strips(const Problem& problem, const Plan& plan) {
  return words_shift(problem, plan) && plan.run == columns_layout(problem, plan).inner;
}

// Of columns that are read twice. The lanes of a warp that share a column are a team; the states of teams meet in
// shared memory, and all threads of a column read it there, also where there is but one.
int states_bytes_of_teams(const Problem& problem, const Plan& plan) {
  const int teams = plan.threads_per_row / work::tile_team(plan.run, plan.threads_per_row);
  const int bytes = state_bytes(problem), columns = plan.run * plan.vector;
  return (columns + teams * work::states_of_team(columns, bytes)) * bytes;
}

// Whether a tile takes longer. Not so, as far as is known, of float64 and of what is fused.
bool rather_read_twice(const Problem& problem, const Device& device, const Plan& tile) {
  const int bytes = size_of(problem.source);
  if (tile.cluster < tuning::kTileRatherTwice || bytes == 8 || problem.fused.any) return false;
  if (vector_read_twice(problem, device) > 1)
    return reads_much(problem, device, tuning::tile_twice_l2_part(problem.direction));
  const std::int64_t strip = strip_of(problem),
                     half_line = std::min<std::int64_t>(strip, tuning::kLineBytes / 2 / bytes);
  const std::int64_t rows = divide_up(problem.dim.size, tuning::kGpc / 2);
  return tile.cluster == tuning::kGpc && tile.rows_per_block < strip &&
         rows * half_line * bytes * sources_of(problem) > tuning::kTileLastBytes;
}

// Of vectors of columns that are read twice: a block's steps, and as many of them as it keeps where blocks meet.
struct StepsReadTwice {
  std::int64_t all, kept;
};
StepsReadTwice steps_read_twice(const Problem& problem, const Plan& plan) {
  const std::int64_t step = std::int64_t{plan.threads_per_row} * plan.items * plan.splits;
  const std::int64_t all = divide_up(fold_of(problem, plan).dim, step);
  if (!plan.meets) return {all, 0};
  return {all, std::min<std::int64_t>(all, kept_steps(problem, plan) + tuning::kMeetingHeldSteps)};
}

// What vectors of columns that are read twice take, in the time of so many bytes that a multiprocessor moves: what its
// blocks read twice and write, but for what they keep where they meet, the states that they combine, and what a launch
// takes besides.
double cost_of_reading_twice(const Problem& problem, const Device& device, const Plan& plan) {
  const Fold fold = fold_of(problem, plan);
  const int bytes = size_of(problem.source), sources = sources_of(problem);
  const std::int64_t own = plan.rows_per_block / plan.vector, along = plan.threads_per_row;
  const bool slabs = own == fold.columns / plan.vector, tells = plan.workspace_bytes > 0;

  const auto [steps, kept] = steps_read_twice(problem, plan);
  const double passes = 2 + static_cast<double>(size_of(problem.result)) / (bytes * sources);
  const double step_bytes = static_cast<double>(own * along * plan.items * plan.vector) * bytes * sources;
  double moved = step_bytes * (passes * static_cast<double>(steps) - static_cast<double>(kept));
  if (!slabs || !slabs_are_runs(problem) || problem.inner.rank > 1)
    moved *= tuning::segments_factor(own * plan.vector * bytes, begin_within_sectors(problem));
  if (plan.meets)
    moved *= tuning::strided_meeting_factor(bytes, problem.direction, fold.folds, problem.outer.size == 1);

  // copies of a column that is folded have one state in a slab that is a tile, else each its own
  const double copies = !fold.folds ? 1 : slabs ? 1.0 / fold.elements : fold.elements;
  const double states =
      tells ? static_cast<double>(own * plan.vector * plan.splits * state_bytes(problem)) * copies : 0;
  const int launches = tells && !plan.meets ? 2 : 1;
  const std::int64_t waves = divide_up(plan.grid, device.multiprocessors);
  return static_cast<double>(waves) * (moved + states + launches * tuning::kStridedVectorsOtherBytes);
}

// Of columns that are read twice: blocks of `run` threads for `own` vectors, some of which may idle, times others along
// dim; `splits` blocks share the columns of a tile, and tell each other states where it `tells`.
void share_columns(Plan& plan, const Problem& problem, std::int64_t own, std::int64_t run, std::int64_t along,
                   std::int64_t splits, bool tells) {
  const std::int64_t columns = problem.outer.size * fold_of(problem, plan).columns;
  plan.passes = 2;
  plan.run = static_cast<int>(run);
  plan.threads_per_row = static_cast<int>(along);
  plan.rows_per_block = static_cast<int>(own * plan.vector);
  plan.block = static_cast<int>(run * along);
  plan.splits = splits;
  plan.grid = divide_up(columns, plan.rows_per_block) * splits;
  plan.shared_bytes = states_bytes_of_teams(problem, plan);
  plan.workspace_bytes = tells ? columns * splits * state_bytes(problem) : 0;
}

// Vectors of columns that are read twice, of which nothing is fused. Neighbouring threads share a segment of memory, or
// all columns of a slab, which then is read as a run of memory; blocks share columns, as many as take the least.
Plan vectors_read_twice_plan(const Problem& problem, const Device& device, Plan plan) {
  const Fold fold = fold_of(problem, plan);
  const int bytes = size_of(problem.source);
  const std::int64_t strip = fold.columns / plan.vector, all = problem.outer.size * strip;  // in vectors
  const std::int64_t states = all * plan.vector * state_bytes(problem);                     // bytes
  plan.items = tuning::strided_online_items(plan.vector, bytes, problem.direction, false, fold.folds);

  Plan best;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const Plan& candidate) {
    const double cost = cost_of_reading_twice(problem, device, candidate);
    if (cost < least) best = candidate, least = cost;
  };
  const auto share = [&](std::int64_t own, std::int64_t run, std::int64_t along) {
    const std::int64_t tiles = divide_up(all, own), steps = divide_up(fold.dim, along * plan.items);
    const std::int64_t most =
        std::min(divide_up(steps, tuning::kStridedVectorsMinSteps), tuning::kWorkspaceBytes / states);
    const bool alone = !fold.folds || own == strip;  // a block has all copies of its columns
    std::int64_t last = 0;
    for (int waves = 1; waves <= tuning::kStridedVectorsWaves; ++waves) {
      const std::int64_t splits = std::max<std::int64_t>(1, std::min(waves * device.multiprocessors / tiles, most));
      if (std::exchange(last, splits) == splits) continue;
      const bool tells = splits > 1 || !alone;
      share_columns(plan, problem, own, run, along, splits, tells);
      consider(plan);
      if (!tells) continue;
      Plan meeting = plan;
      let_meet(meeting, problem, device, divide_up(steps, splits), tuning::kMeetingL2Part, tuning::kStridedMeetingKept);
      if (meeting.meets) consider(meeting);
    }
  };
  for (std::int64_t own = tuning::kStridedVectorsMostRun; own * plan.vector * bytes >= tuning::kLineBytes; own /= 2)
    if (own < strip) share(own, own, tuning::kStridedVectorsThreads / own);
  // a slab, by as many threads along dim as find room in whole warps
  for (std::int64_t along = tuning::kStridedVectorsThreads / strip; along > 0; --along) {
    const std::int64_t unit = kWarp / std::gcd(along, std::int64_t{kWarp}), run = divide_up(strip, unit) * unit;
    if (run * along > tuning::kStridedVectorsThreads) continue;
    if (run * along >= tuning::kStridedVectorsLeastThreads) share(strip, run, along);
    break;
  }
  return best;
}

// The online softmax over columns, then a second pass.
Plan read_twice_plan(const Problem& problem, const Device& device, std::string_view why) {
  Plan plan;
  plan.why = why;
  const int bytes = size_of(problem.source);
  plan.regime = Regime::strided;
  plan.vector = vector_read_twice(problem, device);
  if (tuning::strided_online_has_vectors(plan.vector, problem.fused.any))
    return vectors_read_twice_plan(problem, device, plan);

  const std::int64_t neighbours = problem.inner.size / plan.vector, columns = problem.outer.size * neighbours;
  std::int64_t width = std::min<std::int64_t>(
      power_of_two_from(neighbours), tuning::strided_online_lanes(plan.vector, bytes, begin_within_sectors(problem)));
  while (width < neighbours && width * plan.vector * bytes > tuning::kLineBytes &&
         tuning::kStridedOnlineSegments * width > neighbours)
    width /= 2;
  const std::int64_t tiles = divide_up(columns, width);
  // every block of a tile combines the states of all: where there are many, fewer and larger ones
  const bool large = tuning::kStridedOnlineLarge * tiles <= device.multiprocessors;
  const int blocks = large ? 1 : tuning::kStridedOnlineMinBlocks;  // a multiprocessor
  const std::int64_t along = tuning::kStridedOnlineThreads / blocks / width;
  plan.items = tuning::strided_online_items(plan.vector, bytes, problem.direction, problem.fused.any, false);
  const std::int64_t useful = divide_up(problem.dim.size, along * plan.items * tuning::kStridedOnlineMinSteps);
  const std::int64_t room = tuning::kWorkspaceBytes / (columns * plan.vector * state_bytes(problem));
  const auto splits = std::clamp<std::int64_t>(std::min(device.multiprocessors * blocks / tiles, room), 1, useful);
  share_columns(plan, problem, width, width, along, splits, splits > 1);
  return plan;
}

// Vectors of columns of which large blocks of large clusters would fill the GPU are rather read twice, where blocks
// meet and keep what they can, backward most of it (an H200 takes for 18 x 3312 x 105 of float32 25.7 us, held by
// clusters of eleven 35.0; backward 24 x 23198 x 18 of 16 bits 30.6, 37.7, but 73 x 2947 x 54 of float32 86.6, 60.7;
// for 32 problems drawn at random 0.88 of the time, 1.13 at most).
std::optional<Plan> rather_met(const Problem& problem, const Device& device, const Plan& held) {
  if (held.cluster <= tuning::kGpc / 2 || held.block <= tuning::kColumnsWholeBlock || !holds_vectors(problem, held))
    return {};
  const std::int64_t tiles = columns_grid_apart(problem, held) / held.cluster;
  if (cost_of_columns(problem, device, held, columns_layout(problem, held).kernel, tiles).waves < 1) return {};
  const Plan twice = read_twice_plan(
      problem, device, "clusters as large as this dim takes are slow: online softmax over columns, then a second pass");
  if (!twice.meets) return {};
  const auto [steps, kept] = steps_read_twice(problem, twice);
  const bool most = static_cast<double>(kept) >= tuning::kMetBackwardKept * static_cast<double>(steps);
  return problem.direction == Direction::forward || most ? std::optional(twice) : std::nullopt;
}

Plan strided_plan(const Problem& problem, const Device& device, const tuning::Architecture& architecture) {
  std::string_view why =
      "dim finds no room in a tile worth its blocks: online softmax over columns, then a second pass";
  if (device.compute_capability < tuning::kAllKernelsFrom) {
    why = "compute capability below 8.0: online softmax over columns, then a second pass";
  } else if (!fuses_in_place(problem)) {
    if (const auto held = columns_plan(problem, device, architecture)) return *held;
    why = "16 bits would round what is added: online softmax over columns, then a second pass";
  } else {
    if (const auto staggered = staggered_plan(problem, device)) return *staggered;
    const auto held = columns_plan(problem, device, architecture);
    const auto met = held ? rather_met(problem, device, *held) : std::nullopt;
    if (met) return *met;
    if (held && !(shifts_strips(problem, *held) && problem.direction == Direction::forward)) return *held;
    const auto tile = tile_plan(problem, device, architecture);
    const bool whole = tile && tile->cluster == 1 && tile->rows_per_block >= strip_of(problem);
    if (held && !(whole && held->threads_per_row > tuning::kTileWordsThreads)) return *held;
    if (tile && !rather_read_twice(problem, device, *tile)) return *tile;
    if (!tiles_take_dim(problem))
      why = "several dimensions, and results of another type: online softmax over columns, then a second pass";
  }
  return read_twice_plan(problem, device, why);
}

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
  if (forward && plan.regime == Regime::strided) return {};
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

int kept_steps(const Problem& problem, const Plan& plan) {
  return (plan.shared_bytes - states_bytes_of_teams(problem, plan)) / bytes_of_step(problem, plan);
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

int stagger_step(const Problem& problem) {
  return static_cast<int>(std::gcd(problem.dim.groups[0].stride[kSource], std::int64_t{tuning::kStaggeredVector}));
}

Fold fold_of(const Problem& problem, const Plan& plan) {
  Fold fold{.folds = holds_vectors(problem, plan) && !plan.ragged && !columns_are_vectors(problem, plan.vector),
            .elements = 1,
            .columns = problem.inner.size,
            .dim = problem.dim.size};
  if (!fold.folds) return fold;
  const std::int64_t most = problem.dim.size * problem.inner.size + most_phase_of_slabs(problem, plan.vector);
  fold.elements = plan.vector / static_cast<int>(std::gcd(problem.inner.size, std::int64_t{plan.vector}));
  fold.columns *= fold.elements;
  fold.dim = divide_up(most, fold.columns);
  return fold;
}

Axis rows_in_order(const Problem& problem, const Plan& plan) {
  Axis rows = problem.outer;
  const auto own = [&](const Group& group) { return varies(problem.fused, group); };
  if (plan.together) std::stable_partition(rows.groups.begin(), rows.groups.begin() + rows.rank, own);
  return rows;
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

bool masks_columns(const Problem& problem, int vector) {
  if (!problem.fused.only_mask() || problem.inner.rank == 0 || !tuning::are_vectors(vector * size_of(problem.source)))
    return false;
  const Group& fastest = problem.inner.groups[problem.inner.rank - 1];
  if (fastest.stride[kMask] != 1 || problem.misalignment[kMask] % vector != 0) return false;
  const auto divides = [&](const Axis& axis) {
    return std::all_of(axis.groups.begin(), axis.groups.begin() + axis.rank,
                       [&](const Group& group) { return &group == &fastest || group.stride[kMask] % vector == 0; });
  };
  return divides(problem.outer) && divides(problem.dim) && divides(problem.inner);
}

std::int64_t columns_mask_bytes(const Problem& problem, const Plan& plan) {
  if (!masks_columns(problem, plan.vector)) return 0;
  return std::int64_t{columns_layout(problem, plan).turns} * plan.items * plan.block * plan.vector;
}

int columns_shared_slots(const Problem& problem, const Plan& plan) {
  const int held = plan.items - plan.shared_items;
  const int together = tuning::columns_together(plan.vector * size_of(problem.source), held);
  return static_cast<int>(divide_up(plan.shared_items, together)) * together;
}

int columns_shared_bytes(const Problem& problem, const Plan& plan) {
  return columns_shared_slots(problem, plan) * sources_of(problem) * plan.vector * size_of(problem.source) * plan.block;
}

bool biases_vectors(const Problem& problem) {
  const Fused& fused = problem.fused;
  const int bytes = size_of(problem.source);
  return fused.only_bias() && fused.bias_dtype == problem.source && problem.contiguous_rows() &&
         problem.dim.groups[0].stride[kBias] == 1 && rows_are_vectors(problem) &&
         rows_start_alike(problem, kBias, bytes, tuning::kVectorBytes / bytes);
}

bool has_masked_kernels(const Problem& problem) {
  return problem.direction == Direction::forward && problem.source == problem.result && size_of(problem.source) < 8 &&
         problem.contiguous_rows() && masks_neighbours(problem);
}

ColumnsLayout columns_layout(const Problem& problem, const Plan& plan) {
  ColumnsLayout layout{};
  layout.shift = words_shift(problem, plan) ? 1 : 0;
  layout.fold = fold_of(problem, plan);
  layout.inner = layout.fold.columns / plan.vector + layout.shift;
  layout.whole = problem.dim.size / layout.fold.elements;
  layout.rows = divide_up(layout.fold.dim, plan.cluster);
  layout.along = plan.threads_per_row / plan.cluster;
  layout.kernel = columns_kernel(problem, plan, layout.fold.folds, layout.shift > 0);
  layout.turns = tuning::columns_kernel(plan.vector * size_of(problem.source), layout.kernel).turns;
  layout.width = plan.rows_per_block / plan.vector / layout.turns;
  int overlap = plan.run == layout.inner ? 0 : columns_overlap(problem, plan);
  if (holds_vectors(problem, plan) && tuning::kOverlapPart * overlap > layout.width) overlap = 0;
  const bool words = tuning::are_words(plan.vector * size_of(problem.source));
  if (words && plan.run <= tuning::kFewColumnsRun) overlap = 0;  // L2 has room for the sectors of few columns
  layout.lead = overlap > 0 ? layout.shift : 0;  // whole strips need no other words, nor do rows that begin alike
  layout.step = layout.width - overlap - layout.lead;
  return layout;
}

StridedTile strided_tile(const Problem& problem, const Plan& plan) {
  using Copy = StridedTile::Copy;
  const std::int64_t bytes = size_of(problem.source), along = plan.threads_per_row / plan.cluster;
  const auto round_up = [](std::int64_t x) { return divide_up(x, tuning::kVectorBytes) * tuning::kVectorBytes; };
  StridedTile tile{};
  tile.strip = strip_of(problem);
  tile.all_strips = problem.outer.size * problem.inner.size / tile.strip;
  tile.width = static_cast<int>(std::min<std::int64_t>(plan.rows_per_block, tile.strip));
  tile.strips = plan.rows_per_block / tile.width;
  tile.pieces = divide_up(tile.strip, tile.width);
  tile.words = static_cast<int>(divide_up(tile.width, plan.vector));
  if (along > 1) tile.words = plan.run;
  tile.turns = along > 1 ? 1 : static_cast<int>(divide_up(tile.strips * tile.words, plan.block));
  tile.rows = static_cast<int>(divide_up(problem.dim.size, plan.cluster));
  tile.pitch = tile.width;
  const std::int64_t run = tile.rows * tile.strip * bytes;
  const auto dim_stride = [&](int operand) { return problem.dim.groups[0].stride[operand]; };

  if (tile.width == tile.strip && slabs_are_runs(problem)) {
    tile.packed = tile.strips > 1 && plan.cluster == 1 && slabs_are_packed(problem);
    tile.phased = alignment_of(problem, tile.strip) < tuning::kVectorBytes;
    if (tile.packed || tile.strips == 1 || (!tile.phased && run >= tuning::kLineBytes)) {
      tile.copy = Copy::runs;
      tile.unit = tuning::kVectorBytes;
      tile.back = (tile.packed || tile.strips == 1) && results_go_back(problem);
      tile.slab = static_cast<int>(tile.packed ? run : round_up(run));
      tile.operand_bytes = static_cast<int>(round_up(static_cast<std::int64_t>(tile.strips) * tile.slab) + tile.unit);
      return tile;
    }
    tile.packed = false;
  }
  const int alignment = alignment_of(problem, tile.width);
  // rows of words need source and gradient to be odd, or even, together
  const bool alike = alignment >= 4 || !problem.has(kGrad) || (dim_stride(kSource) - dim_stride(kGrad)) % 2 == 0;
  if (tile.strips == 1 && strips_are_runs(problem) && problem.dim.rank <= 1 &&
      tile.width * bytes >= tuning::kSectorBytes && alike) {
    tile.copy = Copy::rows;
    tile.unit = std::max(alignment, 4);
    tile.phased = alignment < 4;
    if (tile.phased) tile.pitch += static_cast<int>((dim_stride(kSource) + tile.width) % 2);
  } else {
    tile.copy = Copy::elements;
    tile.phased = false;
    tile.unit = static_cast<int>(plan.vector * bytes);
  }
  tile.slab = static_cast<int>(tile.rows * tile.pitch * bytes);
  tile.operand_bytes =
      static_cast<int>(round_up(static_cast<std::int64_t>(tile.strips) * tile.slab + (tile.phased ? tile.unit : 0)));
  return tile;
}

std::int64_t split_pieces(const Problem& problem, const Plan& plan) {
  const int phase = plan.ragged ? plan.vector - 1 : 0;  // at most
  return divide_up(work::vectors_in_row(problem.dim.size, plan.vector, phase), plan.block * plan.items);
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
