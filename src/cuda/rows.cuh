// Rows whose elements are neighbours in memory: where a row lies, how a thread reads and writes its vectors.
//
// A row need not start on 16 bytes (197 or 50257 elements never do for long). It is read as the aligned vectors that
// cover it; the first and the last may reach over its ends, where they hold elements of other rows, which are dropped
// after loading and never written. Where such a vector would reach out of the tensor, at its two ends, the row is read
// element by element. Plans promise that all operands of a row are misaligned alike (offer_warp and its kin check it).
#pragma once

#include <algorithm>

#include "cuda/fused.cuh"
#include "host/work.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cuda {

// An Axis as kernels take it, with the strides of the first kCount operands. What most calls need of it, the first
// group, lies at its head, so that it comes with the first lines of a launch's parameters.
template <int kCount>
struct KernelAxis {
  int rank;
  struct {
    std::int64_t size;
    std::int64_t stride[kCount];
  } groups[kMaxGroups];

  KernelAxis() = default;
  explicit KernelAxis(const Axis& axis) : rank(axis.rank) {
    groups[0] = {};  // read also where there is none
    for (int group = 0; group < rank; ++group) {
      groups[group].size = axis.groups[group].size;
      std::copy_n(axis.groups[group].stride.begin(), kCount, groups[group].stride);
    }
  }
};

// The operands that an operation may have, and those of which a thread holds a part in registers.
template <typename Operation>
inline constexpr int kOperandsOf = Operation::kFused ? kOperands : kWhole;
template <typename Operation>
inline constexpr int kHeldOperands = tuning::held_operands(Operation::kDirection, Operation::kFused);

// Of an element, or of the first element of a row, from the start of each operand.
template <int kCount>
struct Offsets {
  std::int64_t at[kCount];

  __device__ __forceinline__ Offsets& operator+=(const Offsets& other) {
#pragma unroll
    for (int operand = 0; operand < kCount; ++operand) at[operand] += other.at[operand];
    return *this;
  }
};

// On an axis of one group, or of none.
template <int kCount>
__device__ __forceinline__ Offsets<kCount> offsets_in_group(const KernelAxis<kCount>& axis, std::int64_t index) {
  Offsets<kCount> offsets;
#pragma unroll
  for (int operand = 0; operand < kCount; ++operand) offsets.at[operand] = index * axis.groups[0].stride[operand];
  return offsets;
}

// A 64-bit division takes about a hundred instructions, a 32-bit one twenty, and nearly all are of 32 bits.
__device__ __forceinline__ std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if ((a | b) >> 32 != 0) return a / b;
  return static_cast<unsigned>(a) / static_cast<unsigned>(b);
}

template <int kCount>
__device__ __forceinline__ Offsets<kCount> offsets_in(const KernelAxis<kCount>& axis, std::int64_t index) {
  if (axis.rank <= 1) return offsets_in_group(axis, index);
  Offsets<kCount> offsets{};
#pragma unroll 1
  for (int group = axis.rank - 1; group >= 0; --group) {
    const auto& here = axis.groups[group];
    const std::int64_t rest = quotient(index, here.size), within = index - rest * here.size;
#pragma unroll
    for (int operand = 0; operand < kCount; ++operand) offsets.at[operand] += within * here.stride[operand];
    index = rest;
  }
  return offsets;
}

template <typename Operation>
struct RowArguments {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;

  const Source* source;
  const Source* grad;
  Result* result;
  const Source *source_end, *grad_end;  // the tensors' memory ends here
  std::int64_t rows;
  std::int64_t dim;
  std::int64_t first_block;
  int live;   // vectors that any thread has of a row
  int apart;  // staged: rows from one team to the next
  int lanes;  // that share one
  int rows_per_block;
  bool ragged;  // some row begins or ends within a vector
  KernelAxis<kOperandsOf<Operation>> outer;
  std::int64_t mask_step, bias_step;  // along a row
  Fusing<Operation> fusing;
};

// Where a row's masks and biases lie, and how many of its elements there are up to the diagonal.
template <typename Operation, typename Index, bool = Operation::kFused>
class FusedRow {
 public:
  FusedRow() = default;
  __device__ __forceinline__ FusedRow(const RowArguments<Operation>&, const Offsets<kWhole>&, Index dim)
      : reach_(dim) {}

  __device__ __forceinline__ Index reach() const { return reach_; }

  template <int N>
  __device__ __forceinline__ void load(Index, Extras<Operation, N>&) const {}
  template <int N>
  __device__ __forceinline__ void resolve(Index, Extras<Operation, N>&) const {}

  template <int N>
  __device__ __forceinline__ static typename Operation::Term term(const Extras<Operation, N>&,
                                                                  typename Operation::Real source,
                                                                  typename Operation::Real grad, int) {
    return Operation::term(source, grad);
  }

 private:
  Index reach_;
};

template <typename Operation, typename Index>
class FusedRow<Operation, Index, true> {
 public:
  FusedRow() = default;
  __device__ __forceinline__ FusedRow(const RowArguments<Operation>& arguments, const Offsets<kOperands>& offset,
                                      Index dim)
      : arguments_(&arguments), mask_(offset.at[kMask]), bias_(offset.at[kBias]), reach_(dim) {
    if (!arguments.fusing.causal) return;
    const std::int64_t reach = offset.at[kRow] + arguments.fusing.diagonal + 1;
    reach_ = reach < dim ? static_cast<Index>(reach > 0 ? reach : 0) : dim;
  }

  __device__ __forceinline__ Index reach() const { return reach_; }

  template <int N>
  __device__ __forceinline__ void load(Index first, Extras<Operation, N>& extras) const {
    extras.load(arguments_->fusing, line(first), inside_bits<N>(first, reach_));
  }
  template <int N>
  __device__ __forceinline__ void resolve(Index first, Extras<Operation, N>& extras) const {
    extras.resolve(arguments_->fusing, line(first), inside_bits<N>(first, reach_));
  }

  template <int N>
  __device__ __forceinline__ typename Operation::Term term(const Extras<Operation, N>& extras,
                                                           typename Operation::Real source,
                                                           typename Operation::Real grad, int k) const {
    return extras.term(arguments_->fusing, source, grad, k);
  }

 private:
  __device__ __forceinline__ Line line(Index first) const {
    const std::int64_t mask_step = arguments_->mask_step, bias_step = arguments_->bias_step;
    return {mask_ + first * mask_step, mask_step, bias_ + first * bias_step, bias_step};
  }

  const RowArguments<Operation>* arguments_;
  std::int64_t mask_, bias_;
  Index reach_;
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
    Extras<Operation, kVector> extras;
  };

  Row() = default;

  // A row that does not exist has no elements: every load and store of it falls away.
  __device__ __forceinline__ Row(const RowArguments<Operation>& arguments, std::int64_t row)
      : dim_(row < arguments.rows ? static_cast<Index>(arguments.dim) : 0), ragged_(arguments.ragged) {
    const auto offset = offsets_in(arguments.outer, row < arguments.rows ? row : 0);
    fused_ = FusedRow<Operation, Index>(arguments, offset, dim_);
    source_ = arguments.source + offset.at[kSource];
    grad_ = arguments.grad + offset.at[kGrad];
    result_ = arguments.result + offset.at[kResult];
    phase_ = static_cast<int>(reinterpret_cast<std::uintptr_t>(source_) / sizeof(Source) % kVector);
    const Index end = work::vectors_in_row<Index>(dim_, kVector, phase_) * kVector - phase_;
    vectors_only_ = source_ - phase_ >= arguments.source && source_ + end <= arguments.source_end;
    if constexpr (kBackward)
      vectors_only_ = vectors_only_ && grad_ - phase_ >= arguments.grad && grad_ + end <= arguments.grad_end;
  }

  __device__ __forceinline__ int phase() const { return phase_; }
  // Elements up to the diagonal.
  __device__ __forceinline__ Index reach() const { return fused_.reach(); }

  // Loads the vectors that begin at first, first + step, … before `end` and the end of the row, or its diagonal. Of
  // operations that fuse nothing, elements that are not loaded count for nothing.
  template <int kVectors>
  __device__ __forceinline__ void load(Index first, Index step, Index end, Raw (&raw)[kVectors]) const {
    end = end < fused_.reach() ? end : fused_.reach();
    if (vectors_only_) {
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        const Index at = first + item * step;
        if (at >= end) {
          raw[item] = nothing();
          continue;
        }
        raw[item].source = Vec<Source, kVector>::load(source_ + at);
        if constexpr (kBackward) raw[item].grad = Vec<Source, kVector>::load(grad_ + at);
      }
    } else {
#pragma unroll
      for (int item = 0; item < kVectors; ++item) raw[item] = nothing();
#pragma unroll
      for (int i = 0; i < kVectors * kVector; ++i) {
        const Index at = first + i / kVector * step + i % kVector;
        if (at < 0 || at >= end) continue;
        raw[i / kVector].source.insert(i % kVector, source_ + at);
        if constexpr (kBackward) raw[i / kVector].grad.insert(i % kVector, grad_ + at);
      }
    }
#pragma unroll
    for (int item = 0; item < kVectors; ++item)
      if (first + item * step < end) fused_.load(first + item * step, raw[item].extras);
  }

  // Once for each vector, before terms(): what is fused is looked at, elements of other rows come to nothing.
  __device__ __forceinline__ void resolve(Raw& raw, Index first) const {
    if constexpr (Operation::kFused) {
      if (first < dim_) fused_.resolve(first, raw.extras);
    } else {
      if (!ragged_ || first >= dim_ || whole(first)) return;
      const Raw none = nothing();
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (inside(first + k)) continue;
        raw.source.set(k, none.source.widened(0));
        if constexpr (kBackward) raw.grad.set(k, 0);
      }
    }
  }

  __device__ __forceinline__ void terms(const Raw& raw, Term* terms) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      terms[k] = fused_.term(raw.extras, raw.source.widened(k), kBackward ? raw.grad.widened(k) : 0, k);
  }

  template <typename Values>
  __device__ __forceinline__ void store(Index first, const Values& value) const {
    if (first >= dim_) return;
    const auto vector = Vec<Result, kVector>::narrowed(value);
    if (whole(first)) {
      vector.store(result_ + first);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        if (inside(first + k)) vector.extract(k, result_ + first + k);
    }
  }

 private:
  __device__ __forceinline__ static Raw nothing() {
    Raw raw;
    if constexpr (Operation::kFused) return raw;
    if constexpr (kBackward) {
      raw.source = Vec<Source, kVector>::filled(Operation::nothing().output);
      raw.grad = Vec<Source, kVector>::filled(Operation::nothing().grad);
    } else {
      raw.source = Vec<Source, kVector>::filled(Operation::nothing());
    }
    return raw;
  }

  // Whether all elements of a vector that begins in the row, or before it, belong to it.
  __device__ __forceinline__ bool whole(Index first) const {
    if (!ragged_) return first < dim_;
    return __builtin_expect(first >= 0 && first + kVector <= dim_, 1);
  }
  __device__ __forceinline__ bool inside(Index element) const { return element >= 0 && element < dim_; }

  const Source* source_;
  const Source* grad_;
  Result* result_;
  Index dim_;
  int phase_;
  bool ragged_;
  bool vectors_only_;  // no vector that touches the row reaches out of the tensor
  FusedRow<Operation, Index> fused_;
};

// Of a row, from the state of those of its terms that a team holds.
template <typename Operation, typename Exchange>
__device__ __forceinline__ typename Operation::Finish finish_of(const Exchange& exchange,
                                                                const typename Operation::State& held,
                                                                const Fusing<Operation>& fusing) {
  return settled<Operation>(exchange.template finish<Operation>(held), fusing);
}

// A row, or a few, held in registers: load, reduce, exchange, finish, store. The warp, block and cluster regimes are
// this function with other teams. Rows of 16 bits stay as they were loaded, which halves their registers, and are
// exponentiated twice, where that costs less than what else could be loaded meanwhile.
template <int kVectors, int kRows, typename Operation, typename Exchange>
__device__ __forceinline__ void hold_rows(const RowArguments<Operation>& arguments, std::int64_t first_row,
                                          int row_step, int turns, int threads_per_row, int lane, const Lanes& team,
                                          const Exchange& exchange) {
  using RowOf = Row<Operation, int>;
  using Term = typename Operation::Term;
  constexpr int kVector = RowOf::kVector;
  constexpr bool kRaw =
      tuning::holds_raw(sizeof(typename Operation::Source), Operation::kFused) &&
      kVectors > tuning::held_values(sizeof(typename Operation::Source), kHeldOperands<Operation>) / kVector;
  const int step = threads_per_row * kVector;

  RowOf row[kRows];
  typename RowOf::Raw raw[kRows][kVectors];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= turns) break;
    row[r] = RowOf(arguments, first_row + r * row_step);
    row[r].load(work::first_element(0, threads_per_row, lane, kVector, row[r].phase()), step, arguments.dim, raw[r]);
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= turns) break;
    const int first = work::first_element(0, threads_per_row, lane, kVector, row[r].phase());
    Term terms[kRaw ? kVector : kVectors * kVector];
#pragma unroll
    for (int item = 0; item < kVectors; ++item) {
      if (item >= arguments.live) break;
      row[r].resolve(raw[r][item], first + item * step);
      if constexpr (!kRaw) row[r].terms(raw[r][item], terms + item * kVector);
    }
    typename Operation::State held;
    if constexpr (kRaw) {
      Operation::raise(held, raw[r], team);
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (item >= arguments.live) break;
        row[r].terms(raw[r][item], terms);
        Operation::template add<kVector>(held, terms);
      }
      held.sum = team.sum(held.sum);
    } else {
      held = Operation::template reduce<kVectors, kVector, kVector>(terms, arguments.live, team);
    }
    const auto finish = finish_of<Operation>(exchange, held, arguments.fusing);
#pragma unroll
    for (int item = 0; item < kVectors; ++item) {
      if (item >= arguments.live) break;
      if constexpr (kRaw) row[r].terms(raw[r][item], terms);
      const Term* const of_item = terms + (kRaw ? 0 : item * kVector);
      row[r].store(first + item * step, [&](int k) {
        const bool included = raw[r][item].extras.include(k);
        return kRaw ? finish.again(of_item[k], included) : finish(of_item[k], included);
      });
    }
  }
}

}  // namespace ndsoftmax::cuda
