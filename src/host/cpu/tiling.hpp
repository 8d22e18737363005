// How a Problem is cut into tiles (see kernels.hpp): whole rows where they fit in cache, parts of rows where they do
// not. The cut depends on the problem alone, never on the number of threads, and so do the bits of the result.
#pragma once

#include <cstdint>

#include "ndsoftmax/plan.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cpu {

struct Tiling {
  enum class Shape : std::uint8_t {
    packed,   // many rows without gaps between them, of a few vectors at most
    rows,     // contiguous rows, or a part of one
    slab,     // dim × inner is one stretch of memory; the tile takes it as it comes, `period` columns in turn
    columns,  // tile[dim][width]: neighbouring columns, at any strides
  };

  Shape shape = Shape::columns;
  Array<Group, 2 * kMaxGroups> positions;  // what is not normalized over, as Axis::groups
  int rank = 0;
  std::int64_t positions_size = 1;
  std::int64_t run = 1;  // positions that tiles do not reach across, so that a tile's columns are neighbours in memory
  std::int64_t positions_per_tile = 1;
  std::int64_t width = 1;   // packed, rows, slab: of a row of the tile, in whole vectors
  std::int64_t period = 1;  // slab: columns; otherwise positions_per_tile
  std::int64_t dim_size = 1;
  std::int64_t dim_per_part = 1;

  std::int64_t tiles_per_run() const { return (run + positions_per_tile - 1) / positions_per_tile; }
  std::int64_t tiles() const { return positions_size / run * tiles_per_run(); }
  std::int64_t parts() const { return (dim_size + dim_per_part - 1) / dim_per_part; }
};

// Elements: what the first cache holds beside its operands, what the second holds, the least part of a row that is read
// twice, and a part of columns, whose statistics take longer to combine, what is worth a tile of its own, how many
// columns a part may have, how much work is worth a task, and from how many parts on a row has larger ones.
inline constexpr std::int64_t kComfortable = 8 * 1024;
inline constexpr std::int64_t kTile = 64 * 1024;
inline constexpr std::int64_t kPart = 16 * 1024;
inline constexpr std::int64_t kColumnsPart = 32 * 1024;
inline constexpr std::int64_t kRun = 4 * 1024;
inline constexpr std::int64_t kWidestPart = 256;
inline constexpr std::int64_t kTask = 32 * 1024;
inline constexpr std::int64_t kManyParts = 64;  // enough for as many threads

// lanes: of a vector of the type that the problem is computed in. The regime must permit the problem.
Tiling make_tiling(const Problem& problem, int lanes, Regime regime);

}  // namespace ndsoftmax::cpu
