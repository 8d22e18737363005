// What one instruction set offers: loads that turn any operand into a tile, kernels that work on tiles, stores that
// turn a tile into the result.
//
// A tile is a dense array of float (double for float64) that stays in cache. All kernels see tiles only: element types
// and strides end at the loads and stores, so that no kernel is instantiated for them, a row is read from memory once
// while its exponentials are computed once, and a result that is written over its source does no harm.
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
  bool padded = false;           // loads fill the last vector of each row of the tile
};

// Kernels of one operation.
template <typename Real>
struct OperationKernels {
  // Rows that follow each other without a gap, dim <= lanes. Every tile is followed by room for one vector; scratch
  // holds one vector for every row, and twice that for backward.
  void (*packed_forward)(std::int64_t rows, int dim, Real* tile, Real* scratch);
  void (*packed_backward)(std::int64_t rows, int dim, Real* grad, Real* output, Real* scratch);

  // Rows of `width` elements, whole vectors, padded with -inf (backward: 0).
  void (*rows_forward)(std::int64_t rows, std::int64_t width, Real* tile);
  void (*rows_backward)(std::int64_t rows, std::int64_t width, Real* grad, const Real* output);

  // tile[dim][width], width in whole vectors: every column is a row of the softmax, or a part of one. Columns whose
  // numbers are equal modulo `period` are parts of the same. max and sum hold `width` values, repeated with the period.
  using Statistics = void(std::int64_t dim, std::int64_t width, std::int64_t period, Real* tile, Real* max, Real* sum);
  using Finish = void(std::int64_t dim, std::int64_t width, Real* tile, const Real* max, const Real* sum);
  Statistics* column_begin;       // the tile is the whole of its rows: it may be replaced by exponentials
  Statistics* column_statistics;  // the tile is a part, and is loaded again for column_finish
  Finish* column_end;             // after column_begin
  Finish* column_finish;
  void (*column_products)(std::int64_t dim, std::int64_t width, std::int64_t period, const Real* grad,
                          const Real* output, Real* sum);
  void (*column_gradient)(std::int64_t dim, std::int64_t width, Real* grad, const Real* output, const Real* sum);
};

template <typename Real>
struct Kernels {
  int lanes;
  // Indexed by DType; null where the type is not computed in Real.
  void (*load[4])(const void* memory, const Window& window, Real padding, Real* tile);
  void (*store[4])(const Real* tile, const Window& window, void* memory);
  OperationKernels<Real> operation[2];  // indexed by Operation
};

// Of the instruction set that this process uses.
template <typename Real>
const Kernels<Real>& kernels();

}  // namespace ndsoftmax::cpu
