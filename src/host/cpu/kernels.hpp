// What one instruction set offers. Operands of one type whose elements are next to one another, along dim or across it,
// are read and written where they lie. Everything else goes through a tile: a dense array of float (double for float64)
// that stays in cache, filled by a load and emptied by a store that know any strides and types.
// Every kernel but the packed ones allows the result to be its source; row_forward and column_statistics allow the tile
// to be it, too.
#pragma once

#include <cstdint>

#include "ndsoftmax/types.hpp"

namespace ndsoftmax::cpu {

// A piece of a tensor, and where it lies in the tile. Strides are in elements.
struct Window {
  std::int64_t rows = 1;
  std::int64_t columns = 1;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
  std::int64_t tile_stride = 0;  // from row to row in the tile
};

// Rows whose elements are next to one another.
struct Rows {
  std::int64_t count = 1;
  std::int64_t dim = 1;
  Array<std::int64_t, kOperands> stride{};  // from row to row
  bool exceeds_caches = false;              // all of the problem's operands together
};

// Neighbouring columns. Those whose numbers are equal modulo `period` are parts of the same row of the softmax.
struct Columns {
  std::int64_t dim = 1;
  std::int64_t width = 1;
  std::int64_t period = 1;
  std::int64_t tile_stride = 1;             // in whole vectors
  Array<std::int64_t, kOperands> stride{};  // along dim
  bool exceeds_caches = false;              // as of rows
};

// What was found while a stretch of a tile was fused.
template <typename Real>
struct Seen {
  Real max;  // of the included elements
  bool nan;  // among them
};
struct SeenGradient {
  bool living;     // some output is another than that of an excluded element
  bool unbounded;  // some gradient is infinite or NaN, or an output NaN
};

// Of elements that are Real.
template <typename Real>
struct TileKernels {
  // Rows that follow each other without a gap, dim <= packed_dim. The result lies apart from what is read; scratch
  // holds whole vectors for every row, and twice that for backward.
  void (*packed_forward)(std::int64_t rows, int dim, const Real* source, Real* scratch, Real* result);
  void (*packed_backward)(std::int64_t rows, int dim, const Real* grad, const Real* output, Real* scratch,
                          Real* result);
};

// Of elements of one type, in and out.
template <typename Real>
struct TypedKernels {
  // whole rows, whole columns
  void (*row_forward)(const Rows& rows, const void* source, Real* tile, void* result);
  void (*row_backward)(const Rows& rows, const void* grad, const void* output, void* result);
  void (*column_forward)(const Columns& columns, const void* source, Real* tile, void* result);
  void (*column_backward)(const Columns& columns, const void* grad, const void* output, void* result);
  // a part of a row: its statistics, and, when those of all parts are combined, the result
  void (*row_statistics)(std::int64_t dim, const void* source, Real* tile, Real* max, Real* sum);
  void (*row_finish)(std::int64_t dim, const void* source, Real max, Real sum, void* result);
  void (*row_products)(std::int64_t dim, const void* grad, const void* output, Real* sum);
  void (*row_gradient)(const Rows& part, const void* grad, const void* output, Real sum, void* result);
  // parts of columns, likewise; arrays of `width` values, rounded up to whole vectors
  void (*column_statistics)(const Columns& columns, const void* source, Real* tile, Real* max, Real* sum);
  void (*column_finish)(const Columns& columns, const void* source, const Real* max, const Real* sum, void* result);
  void (*column_products)(const Columns& columns, const void* grad, const void* output, Real* sum);
  void (*column_gradient)(const Columns& columns, const void* grad, const void* output, const Real* sum, void* result);
};

// Indexed by DType; null where the type is not computed in Real, or always goes through a tile.
template <typename Real>
using Typed = Array<TypedKernels<Real>, 4>;

template <typename Real>
struct Kernels {
  int lanes;
  int packed_dim;  // the most elements of a packed row
  // Any strides to and from a tile. Indexed by DType; null where the type is not computed in Real.
  void (*load[4])(const void* memory, const Window& window, Real* tile);
  void (*store[4])(const Real* tile, const Window& window, void* memory);
  // What is fused, before everything else; `excluded` (0 or 1) and `bias` are as dense as the tile, or null.
  void (*exclude)(const unsigned char* mask, const Window& window, bool includes, unsigned char* excluded);
  Seen<Real> (*fuse)(std::int64_t count, const unsigned char* excluded, const Real* bias, Real scale, Real* tile);
  SeenGradient (*fuse_gradient)(std::int64_t count, const unsigned char* excluded, Real scale, Real empty, Real* grad,
                                Real* output);
  TileKernels<Real> tile[2];  // indexed by Operation
  Typed<Real> typed[2];
};

// Of the instruction set that this process uses.
template <typename Real>
const Kernels<Real>& kernels();

}  // namespace ndsoftmax::cpu
