// Plans for all that rows are not: columns that threads hold, tiles of them in shared memory, or columns that are read
// twice.
#include "host/planning.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "host/work.hpp"

namespace ndsoftmax {
namespace planning {
namespace {

// Results of short strips would leave in pieces of sectors. Where they lie as the source does, they go back into
// the tile, and leave as the run that it came as.
bool results_go_back(const Problem& problem) {
  const std::int64_t bytes = strip_of(problem) * size_of(problem.source);
  const bool whole_sectors = bytes % tuning::kSectorBytes == 0;
  if (bytes >= (whole_sectors ? tuning::kSectorBytes : tuning::kTileBackBytes) || problem.source != problem.result)
    return false;
  return slabs_are_runs(problem) && results_lie_as_sources(problem);
}

// Results of a dim of several groups go back into the tile, where they take the place of sources.
bool tiles_take_dim(const Problem& problem) { return problem.dim.rank <= 1 || problem.source == problem.result; }

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
  fit(most);
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
    while (strips > 1 && strips * strip * column > tuning::kTileLeastBytes && divide_up(all_strips, strips) < enough)
      strips = divide_up(strips, 2);
    while (width < strip && width * bytes > tuning::kSectorBytes && width * column > tuning::kTileLeastBytes &&
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

// Whether a tile takes longer. Not so, as far as is known, of float64 and of what is fused.
bool rather_read_twice(const Problem& problem, const Device& device, const Plan& tile) {
  const int bytes = size_of(problem.source);
  if (tile.cluster < tuning::kTileRatherTwice || bytes == 8 || problem.fused.any) return false;
  if (vector_read_twice(problem, device) > 1) return reads_much(problem, device, tuning::kTileTwiceL2Part);
  const std::int64_t strip = strip_of(problem),
                     half_line = std::min<std::int64_t>(strip, tuning::kLineBytes / 2 / bytes);
  const std::int64_t rows = divide_up(problem.dim.size, tuning::kGpc / 2);
  return tile.cluster == tuning::kGpc && tile.rows_per_block < strip &&
         rows * half_line * bytes * sources_of(problem) > tuning::kTileLastBytes;
}

// Of vectors of columns that are read twice, `dim` elements each as they are folded: a block's steps, and as many of
// them as it keeps where blocks meet.
struct StepsReadTwice {
  std::int64_t all, kept;
};
StepsReadTwice steps_read_twice(const Problem& problem, const Plan& plan, std::int64_t dim) {
  const std::int64_t step = std::int64_t{plan.threads_per_row} * plan.items * plan.splits;
  const std::int64_t all = divide_up(dim, step);
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

  const auto [steps, kept] = steps_read_twice(problem, plan, fold.dim);
  const double passes = 2 + static_cast<double>(size_of(problem.result)) / (bytes * sources);
  const double step_bytes = static_cast<double>(own * along * plan.items * plan.vector) * bytes * sources;
  double moved = step_bytes * (passes * static_cast<double>(steps) - static_cast<double>(kept));
  if (!slabs || !slabs_are_runs(problem) || problem.inner.rank > 1)
    moved *= tuning::segments_factor(own * plan.vector * bytes, begin_within_sectors(problem) && !plan.sectors);
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

// A state of each column, as they are folded; bytes.
std::int64_t states_bytes_of_columns(const Problem& problem, const Fold& fold) {
  return problem.outer.size * fold.columns * state_bytes(problem);
}

// Whether columns that are read twice may be folded as the plan has it, so that splits find room to tell their states.
bool may_fold(const Problem& problem, const Plan& plan) {
  if (!tuning::online_may_fold(size_of(problem.source), problem.fused.any) || !slabs_may_fold(problem, plan.vector))
    return false;
  const Fold fold = fold_of(problem, plan);
  return problem.dim.size >= fold.elements && states_bytes_of_columns(problem, fold) <= tuning::kWorkspaceBytes;
}

// Of columns that are read twice: blocks of `run` threads for `own` vectors, some of which may idle, times others along
// dim; `splits` blocks share the columns of a tile, and tell each other states where it `tells`.
void share_columns(Plan& plan, const Problem& problem, std::int64_t own, std::int64_t run, std::int64_t along,
                   std::int64_t splits, bool tells) {
  const Fold fold = fold_of(problem, plan);
  plan.passes = 2;
  plan.run = static_cast<int>(run);
  plan.threads_per_row = static_cast<int>(along);
  plan.rows_per_block = static_cast<int>(own * plan.vector);
  plan.block = static_cast<int>(run * along);
  plan.splits = splits;
  plan.grid = divide_up(problem.outer.size * fold.columns, plan.rows_per_block) * splits;
  plan.shared_bytes = states_bytes_of_teams(problem, plan);
  plan.workspace_bytes = tells ? splits * states_bytes_of_columns(problem, fold) : 0;
}

// Vectors of columns that are read twice, of which nothing is fused. Neighbouring threads share a segment of memory, or
// all columns of a slab, which then is read as a run of memory; blocks share columns, as many as take the least.
Plan vectors_read_twice_plan(const Problem& problem, const Device& device, Plan plan) {
  const int bytes = size_of(problem.source);
  Plan best;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const Plan& candidate) {
    const double cost = cost_of_reading_twice(problem, device, candidate);
    if (cost < least) best = candidate, least = cost;
  };
  const auto share = [&](const Fold& fold, std::int64_t own, std::int64_t run, std::int64_t along, int most_waves) {
    plan.items = tuning::strided_online_items(plan.vector, bytes, problem.direction, false, fold.folds);
    const std::int64_t strip = fold.columns / plan.vector, tiles = divide_up(problem.outer.size * strip, own);
    const std::int64_t steps = divide_up(fold.dim, along * plan.items);
    const std::int64_t most = std::min(divide_up(steps, tuning::kStridedVectorsMinSteps),
                                       tuning::kWorkspaceBytes / states_bytes_of_columns(problem, fold));
    const bool alone = !fold.folds || own == strip;  // a block has all copies of its columns
    std::int64_t last = 0;
    for (int waves = 1; waves <= most_waves; ++waves) {
      const std::int64_t splits = std::max<std::int64_t>(1, std::min(waves * device.multiprocessors / tiles, most));
      if (std::exchange(last, splits) == splits) continue;
      const bool tells = splits > 1 || !alone;
      share_columns(plan, problem, own, run, along, splits, tells);
      consider(plan);
      if (!tells) continue;
      Plan meeting = plan;
      let_meet(meeting, problem, device, divide_up(steps, splits), tuning::kMeetingL2Part,
               tuning::strided_meeting_kept(own == strip));
      if (meeting.meets) consider(meeting);
    }
  };
  const Fold fold = fold_of(problem, plan);
  const std::int64_t strip = fold.columns / plan.vector;
  const auto share_by = [&](int threads) {
    for (std::int64_t own = tuning::kStridedVectorsMostRun; own * plan.vector * bytes >= tuning::kLineBytes; own /= 2)
      if (own < strip) share(fold, own, own, threads / own, tuning::kStridedVectorsWaves);
    // a slab, by as many threads along dim as find room in whole warps
    for (std::int64_t along = threads / strip; along > 0; --along) {
      const std::int64_t unit = kWarp / std::gcd(along, std::int64_t{kWarp}), run = divide_up(strip, unit) * unit;
      if (run * along > threads) continue;
      if (tuning::kStridedVectorsIdle * (threads - run * along) <= threads)
        share(fold, strip, run, along, tuning::kStridedVectorsWaves);
      break;
    }
  };
  share_by(tuning::kStridedVectorsThreads);
  if (2 * best.grid <= device.multiprocessors) share_by(tuning::kStridedVectorsThreads / 2);

  // Segments that begin within sectors may be folded to begin on them, the widest, where those of one wave have room
  // for all (1 x 40000 x 1026 of 16 bits takes an H200 68 us, 82; 1 x 23302 x 1002 of float32, backward, 122, 144; 80
  // problems drawn at random 0.97 of the time, 1.05 at most).
  plan.sectors = true;
  const std::int64_t own = tuning::kStridedVectorsMostRun;
  if (begin_within_sectors(problem) && problem.source == problem.result && may_fold(problem, plan)) {
    const Fold on_sectors = fold_of(problem, plan);
    const std::int64_t all = problem.outer.size * on_sectors.columns / plan.vector;
    if (own * plan.vector < on_sectors.columns && divide_up(all, own) <= device.multiprocessors)
      share(on_sectors, own, own, tuning::kStridedVectorsThreads / own, 1);
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
// meet; not gradients of 32 bits (an H200 takes for 33 x 28213 x 13 of float32 45.5 us, held by clusters 60.1; backward
// 24 x 23198 x 18 of 16 bits 30.6, 37.7, but 73 x 2947 x 54 of float32 86.6, 60.7; for 120 problems drawn at random
// 0.89 of the time; by smaller blocks 1.03, as words 1.10).
std::optional<Plan> rather_met(const Problem& problem, const Device& device, const Plan& held) {
  if (problem.direction == Direction::backward && size_of(problem.source) > 2) return {};
  if (!reads_much(problem, device, tuning::kMetL2Part)) return {};
  if (held.cluster <= tuning::kGpc / 2 || held.block <= tuning::kColumnsWholeBlock || !holds_vectors(problem, held))
    return {};
  const std::int64_t tiles = columns_grid_apart(problem, held) / held.cluster;
  if (cost_of_columns(problem, device, held, columns_layout(problem, held).kernel, tiles).waves < 1) return {};
  const Plan twice = read_twice_plan(
      problem, device, "clusters as large as this dim takes are slow: online softmax over columns, then a second pass");
  return twice.meets ? std::optional(twice) : std::nullopt;
}

}  // namespace

bool fuses_in_place(const Problem& problem) {
  const Fused& fused = problem.fused;
  return problem.direction == Direction::backward || size_of(problem.source) > 2 || (!fused.bias && may_scale(fused));
}

int vector_read_twice(const Problem& problem, const Device& device) {
  if (device.compute_capability < tuning::kAllKernelsFrom) return 1;
  const int bytes = size_of(problem.source);
  Plan plan;
  plan.vector = tuning::strided_vector(bytes, problem.fused.any);
  if (columns_are_vectors(problem, plan.vector)) return plan.vector;
  return may_fold(problem, plan) ? plan.vector : 1;
}

bool reads_much(const Problem& problem, const Device& device, int l2_part) {
  return l2_part * bytes_read(problem) >= device.l2_bytes;
}

int states_bytes_of_teams(const Problem& problem, const Plan& plan) {
  const int teams = plan.threads_per_row / work::tile_team(plan.run, plan.threads_per_row);
  const int bytes = state_bytes(problem), columns = plan.run * plan.vector;
  return (columns + teams * work::states_of_team(columns, bytes)) * bytes;
}

Plan strided_plan(const Problem& problem, const Device& device, const tuning::Architecture& architecture) {
  std::string_view why =
      "dim finds no room in a tile worth its blocks: online softmax over columns, then a second pass";
  if (device.compute_capability < tuning::kAllKernelsFrom) {
    why = "compute capability below 8.0: online softmax over columns, then a second pass";
  } else if (!fuses_in_place(problem)) {
    if (const auto held = columns_plan(problem, device, architecture)) return *held;
    why =
        "16 bits would round what is added, and threads cannot hold the columns: online softmax over columns, then a "
        "second pass";
  } else {
    if (const auto slabs = slabs_plan(problem, device)) return *slabs;
    if (const auto staggered = staggered_plan(problem, device)) return *staggered;
    if (const auto held = columns_plan(problem, device, architecture)) {
      const auto met = rather_met(problem, device, *held);
      return met ? *met : *held;
    }
    const auto tile = tile_plan(problem, device, architecture);
    if (tile && !rather_read_twice(problem, device, *tile)) {
      // of 16 bits, such as slices, whose slabs begin elsewhere in results (an H200 takes for the last 17 of 18 x 15
      // columns, of 31655 slabs, 17 us, as tiles 128; for 72 others 0.68 of the time, 1.02 at most)
      const auto singles = problem.fused.any ? std::nullopt : single_columns_plan(problem, device, architecture);
      return singles ? *singles : *tile;
    }
    if (!tiles_take_dim(problem))
      why = "several dimensions, and results of another type: online softmax over columns, then a second pass";
  }
  return read_twice_plan(problem, device, why);
}

}  // namespace planning

using namespace planning;

int kept_steps(const Problem& problem, const Plan& plan) {
  return (plan.shared_bytes - states_bytes_of_teams(problem, plan)) / bytes_of_step(problem, plan);
}

Fold fold_of(const Problem& problem, const Plan& plan) {
  const bool halves = size_of(problem.source) == 2 && plan.vector == tuning::kManyThreadsColumns;
  const bool vectors = (holds_vectors(problem, plan) || halves) && !plan.ragged;
  Fold fold{.folds = plan.sectors || (vectors && !columns_are_vectors(problem, plan.vector)),
            .unit = plan.sectors ? tuning::kSectorBytes / size_of(problem.source) : plan.vector,
            .elements = 1,
            .columns = problem.inner.size,
            .dim = problem.dim.size};
  if (!fold.folds) return fold;
  const std::int64_t most = problem.dim.size * problem.inner.size + most_phase_of_slabs(problem, fold.unit);
  fold.elements = fold.unit / static_cast<int>(std::gcd(problem.inner.size, std::int64_t{fold.unit}));
  fold.columns *= fold.elements;
  fold.dim = divide_up(most, fold.columns);
  return fold;
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

}  // namespace ndsoftmax
