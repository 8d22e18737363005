#include "host/cpu/tiling.hpp"

#include <algorithm>
#include <numeric>

namespace ndsoftmax::cpu {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void append(Tiling& tiling, const Axis& axis) {
  std::copy_n(axis.groups.begin(), axis.rank, tiling.positions.begin() + tiling.rank);
  tiling.rank += axis.rank;
  tiling.positions_size *= axis.size;
}

// The tile is at least four vectors wide, and every column is at the same place in each of its rows.
void take_slab(Tiling& tiling, std::int64_t period, int lanes) {
  tiling.shape = Tiling::Shape::slab;
  tiling.period = period;
  tiling.width = round_up(4 * lanes, std::lcm(period, static_cast<std::int64_t>(lanes)));
  const std::int64_t part = round_up(kPart, tiling.width);
  tiling.dim_per_part = tiling.dim_size * period <= kTile ? tiling.dim_size : part / period;
}

void take_columns(Tiling& tiling, const Axis& inner, int lanes) {
  tiling.shape = Tiling::Shape::columns;
  if (inner.rank == 1 && inner.size >= 4 * lanes && inner.size * tiling.dim_size >= kRun) tiling.run = inner.size;
  std::int64_t width = std::min<std::int64_t>(kWidestPart, round_up(tiling.run, lanes));
  // of whole columns, whole lines of the cache (two vectors of AVX2), which can be streamed
  if (tiling.dim_size * 4 * lanes <= kTile)
    width = round_up(std::max<std::int64_t>(kComfortable / tiling.dim_size, 4 * lanes), 2 * lanes);
  else
    tiling.dim_per_part = kColumnsPart / width;
  tiling.positions_per_tile = tiling.period = width;
}

// dim × inner is one stretch of memory in every operand, narrow enough for a slab and long enough to be worth folding.
bool is_slab(const Problem& problem, int lanes) {
  if (problem.inner.rank != 1 || problem.dim.rank != 1 || problem.fused.any) return false;
  const Group& inner = problem.inner.groups[0];
  for (int operand = 0; operand < kWhole; ++operand) {
    if (operand == kGrad && problem.direction == Direction::forward) continue;
    if (inner.stride[operand] != 1 || problem.dim.groups[0].stride[operand] != inner.size) return false;
  }
  return inner.size <= 4 * lanes && problem.dim.size >= 16 * lanes;
}

}  // namespace

Tiling make_tiling(const Problem& problem, int lanes, Regime regime) {
  Tiling tiling;
  tiling.positions[0] = kNoGroup;
  tiling.dim_size = tiling.dim_per_part = problem.dim.size;
  append(tiling, problem.outer);
  switch (regime) {
    case Regime::warp:
      tiling.shape = Tiling::Shape::packed;
      tiling.width = round_up(problem.dim.size, lanes);
      tiling.positions_per_tile = kComfortable / tiling.width;
      break;
    case Regime::block:
      tiling.shape = Tiling::Shape::rows;
      tiling.width = round_up(problem.dim.size, lanes);
      tiling.positions_per_tile = std::max<std::int64_t>(1, kTask / tiling.width);
      break;
    case Regime::online:
    case Regime::split:
      tiling.shape = Tiling::Shape::rows;
      // where a row has many parts, larger ones: each takes a while to begin
      tiling.dim_per_part = kPart * std::clamp<std::int64_t>(problem.dim.size / (kManyParts * kPart), 1, kTile / kPart);
      break;
    default:
      if (is_slab(problem, lanes)) {
        take_slab(tiling, problem.inner.size, lanes);
      } else {
        append(tiling, problem.inner);
        tiling.run = tiling.positions_size;
        take_columns(tiling, problem.inner, lanes);
        return tiling;
      }
  }
  tiling.run = tiling.positions_size;
  return tiling;
}

}  // namespace ndsoftmax::cpu
