// Which thread does which part of a problem, in functions that kernels and the host share. coverage() walks them to
// show that each element is written exactly once.
#pragma once

#include <cstdint>

#include "ndsoftmax/types.hpp"

namespace ndsoftmax::work {

// Rows. A block works on rows_per_block rows; `group` is the team of threads_per_row threads within it.
NDSOFTMAX_HOST_DEVICE std::int64_t row(std::int64_t block, int rows_per_block, int group, int groups, int turn) {
  return block * rows_per_block + static_cast<std::int64_t>(turn) * groups + group;
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
template <typename Index>
struct Part {
  Index begin, end;
};
template <typename Index>
NDSOFTMAX_HOST_DEVICE Part<Index> part_of(Index total, Index part, Index parts) {
  const Index size = (total + parts - 1) / parts;
  const Index begin = part * size < total ? part * size : total;
  return {begin, begin + size < total ? begin + size : total};
}

// Strided tiles: a block has columns (vectors of neighbouring ones) times threads along dim. `run` neighbouring threads
// take neighbouring columns, then come the threads along dim, then further runs of columns.
struct TileThread {
  int column;  // within the tile, in vectors
  int along;   // dim
};
NDSOFTMAX_HOST_DEVICE TileThread tile_thread(int thread, int run, int threads_along) {
  return {thread / (run * threads_along) * run + thread % run, thread / run % threads_along};
}

}  // namespace ndsoftmax::work
