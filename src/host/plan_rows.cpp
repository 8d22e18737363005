// Plans for rows, whose elements are neighbours in memory: by warps, blocks and clusters that hold them, or read twice.
#include "host/planning.hpp"

#include <algorithm>
#include <bit>

#include "host/work.hpp"

namespace ndsoftmax {
namespace planning {
namespace {

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

// Whether these are rows of 16 bits of which a bias and a scale is all that is fused.
bool are_biased_halves(const Problem& problem) { return size_of(problem.source) == 2 && has_biased_kernels(problem); }

// Elements that a lane has of a staged row before more lanes share it.
int staged_values(const Problem& problem) {
  return are_biased_halves(problem) ? tuning::kStagedBiasedValues
                                    : tuning::staged_values(size_of(problem.source), fuses_while_staged(problem));
}

// Turns that shared memory takes when each lane of a warp wants its first word of a staged row.
int bank_turns(int dim, int word, int lanes, int block, int apart) {
  const int log2_runs = std::countr_zero(static_cast<unsigned>(block / lanes / apart));
  return tuning::bank_turns(
      [=](int lane) { return work::staged_row(lane / lanes, log2_runs, apart) * dim / word + lane % lanes; });
}

// How far apart the rows of neighbouring teams are: rows a little longer than all banks together meet in a few of them.
int staged_apart(int dim, int word, int lanes, int block) {
  constexpr int kApart = tuning::kWarpBlock / kWarp;
  return bank_turns(dim, word, lanes, block, kApart) < bank_turns(dim, word, lanes, block, 1) ? kApart : 1;
}

int staged_bank_turns(int dim, int word, int lanes, int block) {
  return bank_turns(dim, word, lanes, block, staged_apart(dim, word, lanes, block));
}

// Lanes that share a staged row. Few mean few shuffles, and many words a lane that few are lost to rounding; more share
// it where that spares turns.
int staged_lanes(const Problem& problem) {
  const int dim = static_cast<int>(problem.dim.size), word = tuning::staged_word(size_of(problem.source));
  const auto turns = [&](int lanes) { return staged_bank_turns(dim, word, lanes, tuning::kWarpBlock); };
  int lanes = 1;
  while (lanes < kWarp && lanes * staged_values(problem) < divide_up(dim, word) * word) lanes *= 2;
  while (lanes < kWarp && turns(lanes) > tuning::kBankTurns && turns(2 * lanes) < turns(lanes)) lanes *= 2;
  return lanes;
}

// Staging needs rows without gaps that start on 16 bytes as a whole. It pays where single rows do not, and, forward,
// where more than a quarter of the lanes that hold vectors would hold none, or half of them where something is fused,
// also backward, or where such rows are narrow; not where rows fill the GPU so seldom that tuning::staged_waves() says
// so.
bool should_stage(const Problem& problem, const Rows& rows, const Device& device) {
  const int source = size_of(problem.source);
  if (!tuning::has_staged_rows(source, size_of(problem.result), problem.fused.any)) return false;
  const bool fuses = fuses_while_staged(problem);
  const bool biased = are_biased_halves(problem);
  const int most = biased              ? tuning::kStagedBiasedMostDim
                   : fuses             ? tuning::staged_fusing_most_dim(source, problem.direction, problem.fused.causal)
                   : problem.fused.any ? tuning::staged_masked_most_dim(source)
                                       : tuning::kStagedMostDim;
  if (problem.dim.size > most || !problem.packed_rows()) return false;
  const bool tiny = are_tiny(rows, problem, device);
  if (device.compute_capability < tuning::kAllKernelsFrom && !tiny) return false;
  for (int operand = 0; operand < kWhole; ++operand)
    if (problem.has(operand) && problem.misalignment[operand] != 0) return false;
  const int lanes = held_layout(rows).lanes;
  const double waves = biased ? tuning::kStagedBiasedWaves
                              : tuning::staged_waves(source, rows.dim, tiny, problem.fused.any, problem.direction);
  if (waves_of(rows, lanes, device) <= waves && rows.fits_warp) return false;
  if (problem.dim.size % rows.vector != 0) return true;
  const std::int64_t room = lanes * divide_up(rows.vectors, lanes);  // of so many vectors
  if (problem.fused.any) {
    const bool both = problem.fused.mask && problem.fused.bias;
    if (biased) return rows.dim <= tuning::kStagedBiasedAlignedDim && rows.vectors < room;
    if (rows.dim <= tuning::staged_aligned_dim(source, problem.direction, fuses, both) &&
        (problem.direction == Direction::forward || staged_lanes(problem) < lanes))
      return true;
    return 2 * rows.vectors <= room;
  }
  return problem.direction == Direction::forward && 4 * rows.vectors < 3 * room;
}

// Threads, in whole warps, that hold a row or a part of one, where so many vectors of the row come to each.
std::int64_t threads_for(const Rows& rows, std::int64_t vectors) {
  return whole_warps(divide_up(rows.vectors, vectors));
}

// The same, and more of few rows.
int staged_lanes(const Problem& problem, const Rows& rows, const Device& device) {
  const int dim = static_cast<int>(problem.dim.size), source = size_of(problem.source);
  const bool forward_halves = problem.direction == Direction::forward && source == 2;
  int lanes = staged_lanes(problem);
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
  const bool small = source == 4 && plan.threads_per_row < kWarp &&
                     staged_bank_turns(dim, tuning::staged_word(source), static_cast<int>(plan.threads_per_row),
                                       tuning::kStagedSmallBlock) <= tuning::kStagedSmallTurns;
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
    plan.run = staged_apart(dim, plan.vector, plan.threads_per_row, plan.block);
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

bool takes_whole_vectors_of_warp(const Rows& rows) {
  return !rows.ragged() && rows.warp_vector > 1 && rows.log2_dim <= tuning::kWarpMaxLog2Dim;
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
// enough; where none has, the largest, of a row that it has room for, or, where no cluster's registers have (`widest`),
// for most of it.
std::optional<Plan> cluster_gradients_plan(const Problem& problem, const Rows& rows, const Device& device,
                                           const tuning::Architecture& architecture, bool widest) {
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
      const double least = !last    ? tuning::kClusterSlots
                           : widest ? tuning::kClusterWidestSlots
                                    : tuning::kClusterLeastSlots;
      if (room < least * static_cast<double>(part)) continue;
      plan.passes = part > room ? 2 : 1;
      plan.run = static_cast<int>(std::min<std::int64_t>(room, tuning::kClusterSlots * part));
      plan.shared_bytes = plan.run * bytes;
      const int clusters = resident * std::max(tuning::resident_clusters(device.multiprocessors, cluster), 1);
      if (resident > 1 && rows.count < tuning::kClusterTurns * clusters) return {};
      plan.grid = std::min<std::int64_t>(rows.count, clusters) * cluster;
      plan.why = plan.passes == 1
                     ? "a row fits in the shared memory of a cluster of blocks, where the next one arrives meanwhile"
                     : "shared memory of a cluster of blocks has room for most of a row: the rest is read twice";
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

// Blocks that share a row which is read twice: as many as a cluster may have, and the GPU has room for.
int online_cluster(const Device& device, const tuning::Architecture& architecture) {
  int cluster = architecture.max_cluster;
  while (cluster > 1 && cluster > tuning::kOnlineClusterBlocks * device.multiprocessors) cluster /= 2;
  return cluster;
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

}  // namespace

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

bool suits_warp(const Rows& rows, const Device& device) {
  const std::int64_t room = threads_for(rows, rows.held) * rows.held;
  return rows.ragged() || (5 * rows.vectors < 4 * room && rows.count > rows_under_way(kWarp, device));
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

Offer offer_block(const Problem& problem, const Rows& rows, const Device& device, std::int64_t most_threads) {
  if (device.compute_capability < tuning::kAllKernelsFrom)
    return {{}, "rows held by a block need compute capability 8.0"};
  int vectors = vectors_under_way(problem, rows, device);
  if (vectors == 0) {
    // where something is fused, which threads of rows that begin anywhere have to find, fewer should have more of them
    const bool most = (rows.ragged() && problem.fused.any) || threads_for(rows, rows.held) > most_threads;
    vectors = most ? rows.most_held : rows.held;
    const std::int64_t threads = threads_for(rows, vectors);
    if (threads > most_threads) return {{}, "a row is wider than the registers of a block"};
    if (tuning::thins_blocks(size_of(problem.source), problem.direction, problem.fused.any) &&
        rows.count > tuning::kMaxBlock / threads * device.multiprocessors)
      while (vectors > 1 && bytes_under_way(problem, rows, vectors - 1) >= tuning::kBlockLeastGradientBytes) --vectors;
  }
  return {block_plan(rows, vectors, "a row fits in the registers of a block")};
}

std::optional<Plan> few_rows_plan(const Problem& problem, const Rows& rows, const Device& device) {
  const int bytes = size_of(problem.source);
  const bool fused = problem.fused.any;
  if (device.compute_capability < tuning::kAllKernelsFrom || !rows.alike || bytes == 8 ||
      rows.dim < tuning::kFewRowsLeastDim ||
      rows.dim * std::max(bytes, size_of(problem.result)) > tuning::kFewRowsMostBytes ||
      (fused && !tuning::few_rows_fuse(bytes, problem.direction, rows.ragged(), rows.dim)))
    return {};
  const bool warp_takes = takes_whole_vectors_of_warp(rows);
  const bool finer = tuning::few_rows_finer(problem.direction, fused, warp_takes, rows.ragged(), rows.vectors);
  const std::int64_t rows_each = divide_up(rows.count, device.multiprocessors);
  const std::int64_t usual = divide_up(2 * rows.vectors, tuning::kFewRowsBlock);
  const std::int64_t most =
      std::min<std::int64_t>(finer ? std::max<std::int64_t>(usual, tuning::kFewRowsFinerVectors) : usual, rows.held);
  for (std::int64_t vectors = divide_up(rows.vectors, tuning::kFewRowsBlock); vectors <= most; ++vectors)
    if (rows_each * threads_for(rows, vectors) <=
        tuning::few_rows_threads(problem.direction, warp_takes, finer && vectors > 1))
      return block_plan(rows, vectors, "few rows, which the registers of a block hold");
  return {};
}

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
    vectors = tuning::kRaggedVectors / sources_of(problem);
  }
  if (vectors == 0) return {};
  return block_plan(rows, vectors, "rows that a warp could hold: the registers of a block do, as more of them overlap");
}

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
      if (const auto gradients =
              cluster_gradients_plan(problem, rows, device, architecture, threads > tuning::kMaxBlock))
        return {gradients};
    if (const auto shared = sharing_clusters_plan(problem, rows, device, architecture, cluster, threads))
      return {shared};
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

bool are_few(const Rows& rows, const Device& device, const tuning::Architecture& architecture) {
  const int cluster = online_cluster(device, architecture);
  const int clusters = std::max(tuning::resident_clusters(device.multiprocessors, cluster), 1);  // of a block each
  return rows.count < tuning::kOnlineClusterRows * tuning::kOnlineClusterBlocks * std::int64_t{clusters};
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

}  // namespace planning

using namespace planning;

Axis rows_in_order(const Problem& problem, const Plan& plan) {
  Axis rows = problem.outer;
  const auto own = [&](const Group& group) { return varies(problem.fused, group); };
  if (plan.together) std::stable_partition(rows.groups.begin(), rows.groups.begin() + rows.rank, own);
  return rows;
}

std::int64_t split_pieces(const Problem& problem, const Plan& plan) {
  const int phase = plan.ragged ? plan.vector - 1 : 0;  // at most
  return divide_up(work::vectors_in_row(problem.dim.size, plan.vector, phase), plan.block * plan.items);
}

}  // namespace ndsoftmax
