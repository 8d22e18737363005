// Which thread does which part of a problem, in functions that kernels and the host share. coverage() walks them to
// show that each element is written exactly once.
#pragma once

#include <bit>
#include <cstdint>

#include "host/tuning.hpp"
#include "ndsoftmax/types.hpp"

namespace ndsoftmax::work {

// Divides numbers below 2^31 by one of them with a multiplication: a division takes some twenty instructions.
class Divider {
 public:
  int size;

  Divider() = default;
  explicit Divider(std::int64_t divisor)
      : size(static_cast<int>(divisor)),
        shift_(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(divisor - 1)))) {
    const auto wide = static_cast<std::uint64_t>(divisor);
    multiplier_ = static_cast<unsigned>((((std::uint64_t{1} << shift_) - wide) << 32) / wide + 1);
  }

  NDSOFTMAX_HOST_DEVICE int quotient(int n) const {
    const auto number = static_cast<unsigned>(n);
    const auto high = static_cast<unsigned>(static_cast<std::uint64_t>(number) * multiplier_ >> 32);
    return static_cast<int>((number + high) >> shift_);
  }

 private:
  int shift_;
  unsigned multiplier_;
};

// Rows. A block works on rows_per_block rows; `group` is the team of threads_per_row threads within it.
NDSOFTMAX_HOST_DEVICE std::int64_t row(std::int64_t block, int rows_per_block, int group, int groups, int turn) {
  return block * rows_per_block + static_cast<std::int64_t>(turn) * groups + group;
}

// Which of the rows of a turn a team of a staged block takes: neighbours take rows that are `apart` from each other, as
// long as there are such. All are powers of two, of which `log2_runs` is that of teams / apart.
NDSOFTMAX_HOST_DEVICE int staged_row(int team, int log2_runs, int apart) {
  return (team & ((1 << log2_runs) - 1)) * apart + (team >> log2_runs);
}

// A row is read as vectors that start at a multiple of their size in memory, `phase` elements before the row or at it.
// Vector `item` of thread `lane` begins at this element of the row (negative: only its end lies in the row).
template <typename Index>
NDSOFTMAX_HOST_DEVICE Index first_element(Index item, int threads_per_row, int lane, int vector, int phase) {
  return (item * threads_per_row + lane) * vector - phase;
}

// Vectors that hold a row of dim elements.
template <typename Index>
NDSOFTMAX_HOST_DEVICE Index vectors_in_row(Index dim, int vector, int phase) {
  return (dim + phase + vector - 1) / vector;
}

// Part `part` of `parts` of `total` things.
struct Part {
  std::int64_t begin, end;
};
NDSOFTMAX_HOST_DEVICE Part part_of(std::int64_t total, std::int64_t part, std::int64_t parts) {
  const std::int64_t size = (total + parts - 1) / parts, begin = part * size < total ? part * size : total;
  return {begin, begin + size < total ? begin + size : total};
}

// A block that writes a split row has one of its pieces, the last of them first. The vector that this begins with.
NDSOFTMAX_HOST_DEVICE std::int64_t piece_first(std::int64_t block, std::int64_t row, std::int64_t pieces, int step) {
  return ((row + 1) * pieces - 1 - block) * step;
}

// Strided tiles: a block has columns (words or vectors of neighbouring ones) times threads along dim. `run`
// neighbouring threads take neighbouring columns, then come the threads along dim, then further runs of columns.
struct TileThread {
  int column;  // within the tile, in words or vectors
  int along;   // dim
};
NDSOFTMAX_HOST_DEVICE TileThread tile_thread(int thread, const Divider& run, const Divider& along) {
  const int step = run.quotient(thread), tile = along.quotient(step);
  return {thread + (tile - step) * run.size, step - tile * along.size};
}

// Slabs whose columns threads hold: neighbouring lanes, `1 << log2_run` of them, take neighbouring columns, and each
// column has as many lanes along dim as a warp then has. The first column of the warp, in words, and the thread's.
struct SlabThread {
  int first, beside;
  int along;  // dim
};
NDSOFTMAX_HOST_DEVICE SlabThread slab_thread(int thread, int log2_run) {
  const int lane = thread % tuning::kWarp, run = 1 << log2_run;
  return {thread / tuning::kWarp * run, lane & (run - 1), lane >> log2_run};
}

// Whether a tile writes one of its columns, where rows do not begin on sectors of memory, which are slow to write in
// parts: tiles, a `step` apart, overlap, and the one whose step has the first column of a sector writes the whole
// sector. A bit for each of the `period` vectors of a sector that the column may be; `column` is before it in the tile,
// `inner` before it among all neighbours, all in vectors.
NDSOFTMAX_HOST_DEVICE unsigned sectors_written(int column, std::int64_t inner, int period, int step) {
  const auto up_to = [](int phase) { return phase < 0 ? 0u : (2u << phase) - 1; };
  const int own = static_cast<int>(inner < period ? inner : period);  // no more of its sector is before it
  const int above = column - step;
  const unsigned begins = own <= column ? ~0u : up_to(column), ends = own <= above ? ~0u : up_to(above);
  return begins & ~ends & up_to(period - 1);
}

// Columns whose vectors begin elsewhere in each row, up to vector - 1 columns earlier than in the first, the row's
// shift: a warp has a vector of a strip for each lane. The first and the last of them only tell their neighbours what
// they know: other warps store them.
struct StaggeredThread {
  int vector;
  bool stores;
};
NDSOFTMAX_HOST_DEVICE StaggeredThread staggered_thread(int warp, int lane) {
  return {warp * (tuning::kWarp - 2) + lane - 1, lane > 0 && lane < tuning::kWarp - 1};
}
// Warps of a strip, whose first vector begins up to vector - 1 columns before it.
NDSOFTMAX_HOST_DEVICE std::int64_t staggered_warps(std::int64_t strip, int vector) {
  const std::int64_t vectors = (strip + 2 * vector - 3) / vector + 1;
  return (vectors + tuning::kWarp - 3) / (tuning::kWarp - 2);
}
// Rows of the same shift are a class, of two or four. The first row of a class; each row begins `stride` elements after
// the one before it, an odd number of steps from one shift to the next: that is its own inverse.
NDSOFTMAX_HOST_DEVICE int first_staggered_row(int shift, std::int64_t stride, int vector, int classes) {
  const auto steps = [&](std::int64_t elements) {
    return static_cast<int>(elements & (vector - 1)) * classes / vector;
  };
  return (steps(shift) * steps(stride)) & (classes - 1);
}

// Columns that are read twice: a block takes so many elements of dim in a step, and `splits` blocks take turns, so that
// what is under way lies close together. Where the steps of one begin, and how far they are apart.
struct Turns {
  std::int64_t first, apart;
};
NDSOFTMAX_HOST_DEVICE Turns turns_of(std::int64_t split, std::int64_t splits, std::int64_t step) {
  return {split * step, splits * step};
}

// Threads along the same columns that lie in one warp, `run` lanes apart: a power of two, or they are not a team.
NDSOFTMAX_HOST_DEVICE int tile_team(int run, int threads_along) {
  const int lanes = run < 32 && 32 % run == 0 ? 32 / run : 1;
  return lanes < threads_along ? lanes : threads_along;
}

// A team's states of so many columns, in shared memory, and the gap before those of the next team.
NDSOFTMAX_HOST_DEVICE int states_of_team(int columns, int state_bytes) {
  return columns + tuning::kTeamsGap / state_bytes;
}

// Of the threads that combine `count` states of each column: as many as there are states, up to a warp, or as the block
// has for each column.
NDSOFTMAX_HOST_DEVICE int log2_parts(int columns, int count, int threads) {
  int log2 = 0;
  while (log2 < 5 && 1 << log2 < count && columns << (log2 + 1) <= threads) ++log2;
  return log2;
}

}  // namespace ndsoftmax::work
