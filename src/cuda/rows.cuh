// Rows whose elements are neighbours in memory: where a row lies, how a thread reads and writes its vectors.
//
// A row need not start on 16 bytes (197 or 50257 elements never do for long). It is read as the aligned vectors that
// cover it; the first and the last may reach over its ends, where they hold elements of other rows, which are dropped
// after loading and never written. Only at the very ends of a tensor are those vectors read element by element.
#pragma once

#include "cuda/vec.cuh"
#include "host/work.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cuda {

// An Axis as kernels take it: from an index to the offset of each operand.
struct Offsets {
  int rank;
  std::int64_t size[kMaxGroups];
  std::int64_t stride[kOperands][kMaxGroups];

  struct Result {
    std::int64_t at[kOperands];
  };

  __device__ __forceinline__ Result operator()(std::int64_t index) const {
    Result result{};
    if (rank == 1) {
#pragma unroll
      for (int operand = 0; operand < kOperands; ++operand) result.at[operand] = index * stride[operand][0];
      return result;
    }
    for (int group = rank - 1; group >= 0; --group) {
      const std::int64_t rest = index / size[group], here = index - rest * size[group];
#pragma unroll
      for (int operand = 0; operand < kOperands; ++operand) result.at[operand] += here * stride[operand][group];
      index = rest;
    }
    return result;
  }
};

template <typename Operation>
struct RowArguments {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;

  Operation operation;
  const Source* source;
  const Source* grad;
  Result* result;
  // the memory that belongs to the tensors
  const Source *source_end, *grad_end;
  std::int64_t rows;
  std::int64_t dim;
  std::int64_t first_block;
  Offsets outer;
};

template <typename Operation, typename Index>
class Row {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Term = typename Operation::Term;
  static constexpr int kVector = tuning::kVectorBytes / sizeof(Source);
  static constexpr bool kBackward = Operation::kDirection == Direction::backward;

  struct Raw {
    Vec<Source, kVector> source, grad;
  };

  Row() = default;

  // A row that does not exist has no elements: every load and store of it falls away.
  __device__ __forceinline__ Row(const RowArguments<Operation>& arguments, std::int64_t row)
      : dim_(row < arguments.rows ? static_cast<Index>(arguments.dim) : 0) {
    const Offsets::Result offset = arguments.outer(row < arguments.rows ? row : 0);
    source_ = arguments.source + offset.at[kSource];
    grad_ = arguments.grad + offset.at[kGrad];
    result_ = arguments.result + offset.at[kResult];
    phase_ = static_cast<int>(reinterpret_cast<std::uintptr_t>(source_) / sizeof(Source) % kVector);
    const Index covered = work::vectors_in_row<Index>(dim_, kVector, phase_) * kVector - phase_;
    // (a tensor's address may be odd, as a view of bytes can be: then nothing is a vector)
    whole_ = is_aligned<Source, kVector>(source_ - phase_) && source_ - phase_ >= arguments.source &&
             source_ + covered <= arguments.source_end;
    if constexpr (kBackward)
      whole_ = whole_ && is_aligned<Source, kVector>(grad_ - phase_) && grad_ - phase_ >= arguments.grad &&
               grad_ + covered <= arguments.grad_end;
    vector_loads_ = is_aligned<Source, kVector>(source_ - phase_) &&
                    (!kBackward || is_aligned<Source, kVector>(grad_ - phase_));
    vector_stores_ = is_aligned<Result, kVector>(result_ - phase_);
  }

  __device__ __forceinline__ int phase() const { return phase_; }
  __device__ __forceinline__ bool has(Index first) const { return first < dim_; }

  // The vector that begins at element `first`, of which at least one element is in the row.
  __device__ __forceinline__ Raw load(Index first) const {
    Raw raw;
    if (whole_ || (vector_loads_ && within(first))) {
      raw.source = *reinterpret_cast<const Vec<Source, kVector>*>(source_ + first);
      if constexpr (kBackward) raw.grad = *reinterpret_cast<const Vec<Source, kVector>*>(grad_ + first);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (!inside(first + k)) continue;
        raw.source.at[k] = source_[first + k];
        if constexpr (kBackward) raw.grad.at[k] = grad_[first + k];
      }
    }
    return raw;
  }

  __device__ __forceinline__ void terms(const Raw& raw, Index first, Term* terms) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) terms[k] = Operation::term(raw.source.at[k], raw.grad.at[k]);
    if (within(first)) return;
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      if (!inside(first + k)) terms[k] = Operation::nothing();
  }

  template <typename Values>
  __device__ __forceinline__ void store(Index first, const Values& value) const {
    Vec<Result, kVector> vector;
#pragma unroll
    for (int k = 0; k < kVector; ++k) vector.at[k] = narrow<Result>(value(k));
    if (vector_stores_ && within(first)) {
      *reinterpret_cast<Vec<Result, kVector>*>(result_ + first) = vector;
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        if (inside(first + k)) result_[first + k] = vector.at[k];
    }
  }

 private:
  __device__ __forceinline__ bool within(Index first) const { return first >= 0 && first + kVector <= dim_; }
  __device__ __forceinline__ bool inside(Index element) const { return element >= 0 && element < dim_; }

  const Source* source_;
  const Source* grad_;
  Result* result_;
  Index dim_;
  int phase_;
  bool whole_;          // every vector that touches the row lies in the tensor and is aligned
  bool vector_loads_;   // those within the row are
  bool vector_stores_;
};

// A row, or a few, held in registers: load, reduce, exchange, finish, store. The warp, block and cluster regimes are
// this function with other teams.
template <int kVectors, int kRows, typename Operation, typename Exchange>
__device__ __forceinline__ void hold_rows(const RowArguments<Operation>& arguments, std::int64_t first_row, int row_step,
                                          int threads_per_row, int lane, const Lanes& team, const Exchange& exchange) {
  using RowOf = Row<Operation, int>;
  constexpr int kVector = RowOf::kVector;

  RowOf row[kRows];
  typename RowOf::Raw raw[kRows][kVectors];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = RowOf(arguments, first_row + r * row_step);
#pragma unroll
    for (int item = 0; item < kVectors; ++item) {
      const int first = work::first_element(item, threads_per_row, lane, kVector, row[r].phase());
      if (row[r].has(first)) raw[r][item] = row[r].load(first);
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    typename Operation::Term terms[kVectors * kVector];
#pragma unroll
    for (int item = 0; item < kVectors; ++item) {
      const int first = work::first_element(item, threads_per_row, lane, kVector, row[r].phase());
      row[r].terms(raw[r][item], first, terms + item * kVector);
    }

    const auto held = arguments.operation.template reduce<kVectors * kVector, 1>(terms, team);
    const auto finish = arguments.operation.finish(held, exchange(held));
#pragma unroll
    for (int item = 0; item < kVectors; ++item) {
      const int first = work::first_element(item, threads_per_row, lane, kVector, row[r].phase());
      if (row[r].has(first)) row[r].store(first, [&](int k) { return finish(terms[item * kVector + k]); });
    }
  }
}

}  // namespace ndsoftmax::cuda
