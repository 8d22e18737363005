// Rows whose elements are neighbours in memory: where a row lies, how a thread reads and writes its vectors.
//
// A row need not start on 16 bytes (197 or 50257 elements never do for long). It is read as the aligned vectors that
// cover it; the first and the last may reach over its ends, where they hold elements of other rows, which are dropped
// after loading and never written. Where such a vector would reach out of the tensor, at its two ends, the row is read
// element by element. Plans promise that operands read as vectors are misaligned alike (rows_are_vectors()); others are
// held as vectors of one element.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>

#include "cuda/async.cuh"
#include "cuda/fused.cuh"
#include "host/work.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cuda {

// An Axis as kernels take it, with the strides of the first kCount operands. What most calls need of it, the first
// group, lies at its head, so that it comes with the first lines of a launch's parameters.
template <int kCount>
struct KernelAxis {
  static constexpr bool kMayBeFast = kCount > kWhole;  // axes of more than one group are common with masks

  int rank;
  bool fast;  // indices, sizes and strides are below 2^31
  struct {
    std::int64_t size;
    std::int64_t stride[kCount];
  } groups[kMaxGroups];
  struct {
    work::Divider divider;
    int stride[kCount];
  } fast_groups[kMayBeFast ? kMaxGroups : 1];

  KernelAxis() = default;
  explicit KernelAxis(const Axis& axis)
      : rank(axis.rank), fast(kMayBeFast && axis.size <= std::numeric_limits<int>::max()) {
    groups[0] = {};  // read also where there is none
    fast_groups[0] = {};
    for (int group = 0; group < rank; ++group) {
      auto& here = groups[group];
      here.size = axis.groups[group].size;
      std::copy_n(axis.groups[group].stride.begin(), kCount, here.stride);
      for (const std::int64_t stride : here.stride) fast = fast && std::in_range<int>(stride);
    }
    for (int group = 0; fast && group < rank; ++group) {
      fast_groups[group].divider = work::Divider(groups[group].size);
      std::copy_n(groups[group].stride, kCount, fast_groups[group].stride);
    }
  }
};

// The operands that an operation may have, and those of which a thread holds a part in registers.
template <typename Operation>
inline constexpr int kOperandsOf = Operation::kFused ? kOperands : kWhole;
template <typename Operation>
inline constexpr int kHeldOperands = tuning::held_operands(Operation::kDirection);
// 16-byte vectors of a row that a thread holds as terms.
template <typename Operation>
inline constexpr bool kFusesMore = Operation::kFused && !Operation::kMasked;
template <typename Operation>
inline constexpr int kHeldVectors =
    tuning::held_vectors(sizeof(typename Operation::Source), Operation::kDirection, kFusesMore<Operation>);
template <typename Operation>
inline constexpr int kMostHeldVectors =
    tuning::most_held_vectors(sizeof(typename Operation::Source), Operation::kDirection, kFusesMore<Operation>);
template <typename Operation>
inline constexpr int kMostClusterVectors = tuning::most_cluster_vectors(
    sizeof(typename Operation::Source), Operation::kDirection, kFusesMore<Operation>, Operation::kMasked);

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
  Offsets<kCount> offsets{};
  if (KernelAxis<kCount>::kMayBeFast && axis.fast) {
    auto left = static_cast<int>(index);
    const auto add = [&](const auto& here, int within) {
#pragma unroll
      for (int operand = 0; operand < kCount; ++operand)
        offsets.at[operand] += std::int64_t{within} * here.stride[operand];
    };
#pragma unroll 1
    for (int group = axis.rank - 1; group > 0; --group) {
      const auto& here = axis.fast_groups[group];
      const int rest = here.divider.quotient(left);
      add(here, left - rest * here.divider.size);
      left = rest;
    }
    add(axis.fast_groups[0], left);
    return offsets;
  }
  if (axis.rank <= 1) return offsets_in_group(axis, index);
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

// The same out of line, where it is asked for in many places. The axis must be of a __grid_constant__ parameter.
template <int kCount>
__device__ __noinline__ Offsets<kCount> offsets_called(const KernelAxis<kCount>& axis, std::int64_t index) {
  return offsets_in(axis, index);
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
  int live;   // vectors that any thread holds of a row
  int apart;  // staged: rows from one team to the next; vectors that a part of a row, or a thread, has room for
  int lanes;  // that share one
  int rows_per_block;
  bool ragged;            // some row begins or ends within a vector
  bool next_begins_late;  // block, cluster
  KernelAxis<kOperandsOf<Operation>> outer;
  Fusing<Operation> fusing;
};

// What is fused into a row, of which a thread has N neighbouring elements at a time.
template <int N, bool kShifts = true, typename Operation, typename Index>
__device__ __forceinline__ FusedLine<Operation, Index, N, kShifts> fused_line(const RowArguments<Operation>& arguments,
                                                                              const Offsets<kOperands>& offset,
                                                                              Index dim, int phase) {
  Index reach = dim;
  if (!Operation::kMasked && !Operation::kBiased && arguments.fusing.causal) {
    const std::int64_t until = offset.at[kRow] + arguments.fusing.diagonal + 1;
    reach = until < dim ? static_cast<Index>(until > 0 ? until : 0) : dim;
  }
  return {arguments.fusing, offset.at[kMask], offset.at[kBias], reach, phase};
}

// `count` elements further, which is not negative: of an unsigned number, that is one instruction, and not a sum of
// indices before it.
template <typename T, typename Index>
__device__ __forceinline__ T* ahead(T* from, Index count) {
  return from + static_cast<std::make_unsigned_t<Index>>(count);
}

// kMayBeRagged: rows may begin and end within vectors, which have kVectorOf elements. kMasksShift: masks that are all
// that is fused may begin within other bytes of their words than rows within vectors.
template <typename Operation, typename Index, bool kMayBeRagged = true,
          int kVectorOf = tuning::kVectorBytes / static_cast<int>(sizeof(typename Operation::Source)),
          bool kMasksShift = kMayBeRagged>
class Row {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Term = typename Operation::Term;
  static constexpr int kVector = kVectorOf;
  static constexpr bool kBackward = kIsBackward<Operation>;
  static_assert(!Operation::kMasked || (kVector >= 4 && (kMasksShift || Operation::kAligned)));

  struct Raw {
    Vec<Source, kVector> source, grad;
    Extras<Operation, kVector> extras;
  };

  Row() = default;

  // A row that does not exist has no elements: every load and store of it falls away.
  __device__ __forceinline__ Row(const RowArguments<Operation>& arguments, std::int64_t row)
      : dim_(row < arguments.rows ? static_cast<Index>(arguments.dim) : 0),
        ragged_(kMayBeRagged && arguments.ragged),
        operation_(arguments.fusing.operation) {
    const auto offset = offsets_in(arguments.outer, row < arguments.rows ? row : 0);
    source_ = arguments.source + offset.at[kSource];
    grad_ = arguments.grad + offset.at[kGrad];
    result_ = arguments.result + offset.at[kResult];
    // without a branch where nothing is fused: it would part the loads of rows
    if (kMayBeRagged && (ragged_ || !Operation::kFused)) {
      phase_ = static_cast<int>(reinterpret_cast<std::uintptr_t>(source_) / sizeof(Source) % kVector);
      const Index end = work::vectors_in_row<Index>(dim_, kVector, phase_) * kVector - phase_;
      vectors_only_ = source_ - phase_ >= arguments.source && source_ + end <= arguments.source_end;
      if constexpr (kBackward)
        vectors_only_ = vectors_only_ && grad_ - phase_ >= arguments.grad && grad_ + end <= arguments.grad_end;
    }
    if constexpr (Operation::kFused) fused_ = fused_line<kVector, kMasksShift>(arguments, offset, dim_, phase_);
  }

  __device__ __forceinline__ int phase() const { return kMayBeRagged ? phase_ : 0; }
  __device__ __forceinline__ bool vectors_only() const { return vectors_only_; }
  __device__ __forceinline__ const Source* source() const { return source_; }
  __device__ __forceinline__ const Source* grad() const { return grad_; }
  // Elements up to the diagonal.
  __device__ __forceinline__ Index reach() const {
    if constexpr (Operation::kFused)
      return fused_.reach();
    else
      return dim_;
  }

  // Of items `step` apart, of which a team has `most`, those that begin before the diagonal.
  template <int kVectors>
  __device__ __forceinline__ int live(Index step, int most) const {
    if constexpr (kFusesMore<Operation>) {
      if (fused_.reach() == dim_) return most;
      int live = 0;
#pragma unroll
      for (int item = 0; item < kVectors; ++item) live += item < most && item * step - phase() < fused_.reach();
      return live;
    }
    return most;
  }

  // Loads the vectors that begin at first, first + step, … before `end` and the end of the row, or its diagonal. Of
  // operations that fuse nothing, elements that are not loaded count for nothing. kEdgesApart: of a row that begins or
  // ends where the tensor does, only vectors that reach out of it are loaded element by element.
  template <bool kEdgesApart = tuning::edges_apart(sizeof(Source)), int kVectors>
  __device__ __forceinline__ void load(Index first, Index step, Index end, Raw (&raw)[kVectors]) const {
    if (masks_vectors() && __builtin_expect(Operation::kMasked ? vectors_only_ : reads_vectors_only(), 1))
      return load_masked(first, step, end, raw);
    if (biases_vectors()) return load_biased(first, step, end, raw);
    end = end < reach() ? end : reach();
    if (!kMayBeRagged || vectors_only_) {
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (first + item * step >= end) {
          raw[item] = nothing();
          continue;
        }
        raw[item].source = Vec<Source, kVector>::load(source_ + first + item * step);
        if constexpr (kBackward) raw[item].grad = Vec<Source, kVector>::load(grad_ + first + item * step);
      }
    } else if constexpr (kEdgesApart) {
      load_beside_edges(first, step, end, raw);
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
    if constexpr (Operation::kFused && kVector == 1) {
      fused_.load(first, step, end, raw);
    } else if constexpr (Operation::kFused) {
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (masks_vectors()) fused_.exclude_all(raw[item].extras);
        fused_.load(first, item * step, raw[item].extras);
      }
    }
  }

  // The same where Fusing::masks_vectors, and no vector of the row reaches out of its tensor: what is not loaded is
  // excluded.
  template <int kVectors>
  __device__ __forceinline__ void load_masked(Index first, Index step, Index end, Raw (&raw)[kVectors]) const {
    if constexpr (Operation::kFused) {
      end = end < dim_ ? end : dim_;
      const Source *source = source_ + first, *grad = grad_ + first;
      const std::uint8_t* mask = fused_.mask() + first;
      const auto load_with = [&](auto aligned) {
#pragma unroll
        for (int item = 0; item < kVectors; ++item) {
          const Index at = first + item * step;
          raw[item] = nothing();
          fused_.exclude_all(raw[item].extras);
          if (at >= end) continue;
          raw[item].source = Vec<Source, kVector>::load(ahead(source, item * step));
          if constexpr (kBackward) raw[item].grad = Vec<Source, kVector>::load(ahead(grad, item * step));
          if (aligned || fused_.has_words(at, item > 0))
            fused_.template load_words<aligned>(ahead(mask, item * step), raw[item].extras);
        }
      };
      if (fused_.masks_are_aligned())
        load_with(std::true_type{});
      else
        load_with(std::false_type{});
    }
  }

  // The same where Fusing::biases_vectors, and reads_vectors_only().
  template <int kVectors>
  __device__ __forceinline__ void load_biased(Index first, Index step, Index end, Raw (&raw)[kVectors]) const {
    if constexpr (Operation::kFused && !kBackward) {
      end = end < dim_ ? end : dim_;
      const Source *source = source_ + first, *bias = fused_.bias() + first;
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (first + item * step >= end) continue;
        raw[item].source = Vec<Source, kVector>::load(source + item * step);
        raw[item].extras.bias = Vec<Source, kVector>::load(bias + item * step);
      }
    }
  }

  // The same of vectors that all lie within the row, of operations that fuse nothing.
  template <int kVectors>
  __device__ __forceinline__ void load_whole(Index first, Index step, Raw (&raw)[kVectors], auto... eviction) const {
#pragma unroll
    for (int item = 0; item < kVectors; ++item) {
      raw[item].source = Vec<Source, kVector>::load(source_ + first + item * step, eviction...);
      if constexpr (kBackward) raw[item].grad = Vec<Source, kVector>::load(grad_ + first + item * step, eviction...);
    }
  }

  // Once for each vector, before terms(): what is fused is looked at, elements of other rows come to nothing.
  __device__ __forceinline__ void resolve(Raw& raw, Index first) const {
    if constexpr (Operation::kFused) {
      if constexpr (kVector == 1)
        fused_.resolve(raw.extras);
      else if (masks_vectors())
        fused_.resolve_masked(first, whole(first), raw.extras);
      else
        fused_.resolve(first, raw.extras);
      if constexpr (kBackward || Operation::kMasked) fused_.apply(first, raw.extras, raw.source, raw.grad);
    } else {
      if (!kMayBeRagged || !ragged_ || first >= dim_ || whole(first)) return;
      const Raw none = nothing();
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (inside(first + k)) continue;
        raw.source.set(k, none.source.widened(0));
        if constexpr (kBackward) raw.grad.set(k, 0);
      }
    }
  }

  __device__ __forceinline__ void terms(const Raw& raw, Index first, Term* terms) const {
    if constexpr (kFusesMore<Operation> && !kBackward) {
      fused_.terms(first, raw.extras, [&](int k) { return raw.source.widened(k); }, terms);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        terms[k] = Operation::term(raw.source.widened(k), kBackward ? raw.grad.widened(k) : 0);
    }
  }

  // Those of vectors that begin at first, first + step, …, of which there are `live`; resolves them.
  template <int kVectors>
  __device__ __forceinline__ void resolved_terms(Raw (&raw)[kVectors], Index first, Index step, int live,
                                                 Term* all) const {
    const auto each = [&](const auto& terms_of) {
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (item >= live) break;
        terms_of(raw[item], first + item * step, all + item * kVector);
      }
    };
    if constexpr (Operation::kFused && !kBackward) {
      if (masks_vectors())
        return each([&](Raw& raw, Index at, Term* of) {
          fused_.resolve_masked(at, whole(at), raw.extras);
          fused_.masked_terms(raw.extras, raw.source, of);
        });
      if (biases_vectors())
        return each([&](const Raw& raw, Index at, Term* of) {
          fused_.biased_terms(at, whole(at), raw.extras, raw.source, of);
        });
    }
    each([&](Raw& raw, Index at, Term* of) {
      resolve(raw, at);
      terms(raw, at, of);
    });
  }

  // A vector that lies within the row.
  template <typename Values>
  __device__ __forceinline__ void store_whole(Index first, const Values& value) const {
    Vec<Result, kVector>::narrowed(value).store(result_ + first);
  }
  // One that begins at first + further, or what of it lies within the row.
  template <typename Values>
  __device__ __forceinline__ void store(Index first, Index further, const Values& value) const {
    const Index at = first + further;
    if (at >= dim_) return;
    const auto vector = Vec<Result, kVector>::narrowed(value);
    Result* const to = ahead(result_ + first, further);
    if (whole(at)) {
      vector.store(to);
    } else {
      const unsigned inside = shifted_left(~0u, at < 0 ? static_cast<int>(-at) : 0) &
                              ~shifted_left(~0u, dim_ - at < kVector ? static_cast<int>(dim_ - at) : kVector);
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        if ((inside & 1u << k) != 0) vector.extract(k, to + k);
    }
  }

  // After store() of the vectors that begin at first, first + step, …: gives excluded elements of tainted rows their
  // result, one by one, as such rows are rare.
  __device__ __forceinline__ void clean(Index first, Index step, int vectors,
                                        const typename Operation::Finish& finish) const {
    if constexpr (Operation::kFused && !Operation::kBiased) {
      if (__builtin_expect(!finish.taints(), 1)) return;
#pragma unroll 1
      for (int item = 0; item < vectors; ++item, first += step)
#pragma unroll 1
        for (int k = 0; k < kVector; ++k)
          if (inside(first + k) && finish.clears(fused_.includes(first + k)))
            result_[first + k] = narrow<Result>(operation_.excluded());
    }
  }

 private:
  __device__ __forceinline__ Raw nothing() const {
    Raw raw;
    if constexpr (Operation::kMasked) {  // of 16 bits, as many as there is room for are asked for the maximum
      raw.source = Vec<Source, kVector>::filled(operation_.nothing());
    } else if constexpr (Operation::kFused) {
      raw.source = raw.grad = {};
    } else if constexpr (kBackward) {
      raw.source = Vec<Source, kVector>::filled(operation_.nothing().output);
      raw.grad = Vec<Source, kVector>::filled(operation_.nothing().grad);
    } else {
      raw.source = Vec<Source, kVector>::filled(operation_.nothing());
    }
    return raw;
  }

  // Of vectors of at least four elements, as many bytes of a mask as are a word.
  __device__ __forceinline__ bool masks_vectors() const {
    if constexpr (Operation::kMasked)
      return true;
    else if constexpr (Operation::kFused && kVector >= 4)
      return fused_.masks_vectors();
    else
      return false;
  }

  __device__ __forceinline__ bool biases_vectors() const {
    if constexpr (kFusesMore<Operation> && !kBackward && kVector >= 4)
      return fused_.biases_vectors() && reads_vectors_only();
    else
      return false;
  }
  // Whether no vector that touches the row, or its mask or bias, reaches out of its tensor.
  __device__ __forceinline__ bool reads_vectors_only() const {
    if constexpr (Operation::kFused) return vectors_only_ && fused_.vectors_only();
    return vectors_only_;
  }

  // The same of kEdgesApart: the vector that reaches over the row's beginning, and the one that reaches over its end.
  template <int kVectors>
  __device__ __forceinline__ void load_beside_edges(Index first, Index step, Index end, Raw (&raw)[kVectors]) const {
#pragma unroll
    for (int item = 0; item < kVectors; ++item) {
      const Index at = first + item * step;
      raw[item] = nothing();
      if (at < 0 || at >= end || at + kVector > dim_) continue;
      raw[item].source = Vec<Source, kVector>::load(source_ + at);
      if constexpr (kBackward) raw[item].grad = Vec<Source, kVector>::load(grad_ + at);
    }
    // one piece of code for both where two would take the rest longer
    [[maybe_unused]] constexpr int kUnroll = tuning::edges_unrolled(Operation::kDirection, sizeof(Index)) ? 2 : 1;
#pragma unroll kUnroll
    for (int last = 0; last < 2; ++last) {
      const Index edge = last ? dim_ - (dim_ + phase_) % kVector : -phase_;
      if (edge >= end || (edge >= 0 && edge + kVector <= dim_)) continue;
      bool mine = false;
#pragma unroll
      for (int item = 0; item < kVectors; ++item) mine = mine || first + item * step == edge;
      if (!mine) continue;
      Raw elements = nothing();
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (edge + k < 0 || edge + k >= end) continue;
        elements.source.insert(k, source_ + edge + k);
        if constexpr (kBackward) elements.grad.insert(k, grad_ + edge + k);
      }
#pragma unroll
      for (int item = 0; item < kVectors; ++item)
        if (first + item * step == edge) raw[item] = elements;
    }
  }

  // Whether all elements of a vector that begins in the row, or before it, belong to it.
  __device__ __forceinline__ bool whole(Index first) const {
    if (!kMayBeRagged || (!Operation::kMasked && !ragged_)) return first < dim_;
    return __builtin_expect(first >= 0 && first + kVector <= dim_, 1);
  }
  __device__ __forceinline__ bool inside(Index element) const { return element >= 0 && element < dim_; }

  const Source* source_;
  const Source* grad_;
  Result* result_;
  Index dim_;
  int phase_ = 0;
  bool ragged_;
  Operation operation_;
  bool vectors_only_ = true;  // no vector that touches the row reaches out of the tensor
  LineIfFused<Operation, Index, kVector, kMasksShift> fused_;
};

// Of a row, from the state of those of its terms that a team holds.
template <typename Operation, typename Exchange>
__device__ __forceinline__ typename Operation::Finish finish_of(const Exchange& exchange,
                                                                const typename Operation::State& held,
                                                                const Fusing<Operation>& fusing) {
  return settled<Operation>(exchange.finish(fusing.operation, held), fusing);
}

// Whether vectors of a row stay as they were loaded, where a thread holds so many: then they are exponentiated twice.
template <typename Operation, int kVector, int kVectors>
inline constexpr bool kHoldsRaw =
    tuning::holds_raw(sizeof(typename Operation::Source), Operation::kDirection, kFusesMore<Operation>) &&
    kVector > 1 && kVectors > kHeldVectors<Operation>;

// A thread has no more of a row than what it holds in registers.
struct NothingMore {
  static constexpr bool kComesFirst = false;
  __device__ __forceinline__ explicit NothingMore(int) {}
};

// A row, or a few, held in registers: load, reduce, exchange, finish, store. The warp, block and cluster regimes are
// this function with other teams. Rows of 16 bits stay as they were loaded, which halves their registers, and are
// exponentiated twice, where that costs less than what else could be loaded meanwhile. `more`: what else of the one row
// a thread has; forward.
template <typename RowOf, int kVectors, int kRows, typename Operation, typename Exchange, typename More = NothingMore>
__device__ __forceinline__ void hold_rows(const RowArguments<Operation>& arguments, std::int64_t first_row,
                                          int row_step, int turns, int threads_per_row, int lane, const Lanes& team,
                                          const Exchange& exchange, More more = More{0}) {
  using Term = typename Operation::Term;
  constexpr int kVector = RowOf::kVector;
  constexpr bool kRaw = kHoldsRaw<Operation, kVector, kVectors>, kMore = !std::is_same_v<More, NothingMore>;
  const int step = threads_per_row * kVector;
  const Operation operation = arguments.fusing.operation;

  RowOf row[kRows];
  typename RowOf::Raw raw[kRows][kVectors];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= turns) break;
    row[r] = RowOf(arguments, first_row + r * row_step);
    const int first = work::first_element(0, threads_per_row, lane, kVector, row[r].phase());
    if constexpr (kMore && More::kComesFirst) more.load(row[r], first + kVectors * step, step);
    row[r].load(first, step, arguments.dim, raw[r]);
    if constexpr (kMore && !More::kComesFirst) more.load(row[r], first + kVectors * step, step);
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= turns) break;
    const int first = work::first_element(0, threads_per_row, lane, kVector, row[r].phase());
    const int live = row[r].template live<kVectors>(step, arguments.live);
    Term terms[kRaw ? kVector : kVectors * kVector];
    typename Operation::State held;
    if constexpr (kRaw) {
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (item >= arguments.live) break;
        row[r].resolve(raw[r][item], first + item * step);
      }
      if constexpr (kMore) more.raise(operation, row[r], step, held);
      operation.raise(held, raw[r], team);
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (item >= live) break;
        row[r].terms(raw[r][item], first + item * step, terms);
        operation.template add<kVector>(held, terms);
      }
      if constexpr (kMore) more.add(operation, held);
      operation.total(held, team);
    } else if constexpr (kMore) {
      more.raise(operation, row[r], step, held);
      row[r].resolved_terms(raw[r], first, step, kVectors, terms);
      operation.template raise<kVectors * kVector>(held, terms);
      operation.agree(held, team);
      typename Operation::State rest = held;
      more.add(operation, rest);
      operation.total(rest, team);
      held = operation.template exponentiated<kVectors, kVector, kVector>(terms, kVectors, held, team);
      operation.add(held, rest);  // whose maxima are the same
    } else {
      row[r].resolved_terms(raw[r], first, step, live, terms);
      held = operation.template reduce<kVectors, kVector, kVector>(terms, live, team);
    }
    const auto finish = finish_of<Operation>(exchange, held, arguments.fusing);
    if constexpr (!std::is_same_v<Exchange, WarpExchange>)
      if (arguments.next_begins_late) let_next_kernel_begin();
    operation.with_log([&](auto log) {
#pragma unroll
      for (int item = 0; item < kVectors; ++item) {
        if (item >= arguments.live) break;
        if (kFusesMore<Operation> && !kRaw && item >= live) {
#pragma unroll
          for (int k = 0; k < (kRaw ? 0 : kVector); ++k) terms[item * kVector + k] = operation.reduced_nothing();
        }
        if constexpr (kRaw) row[r].terms(raw[r][item], first + item * step, terms);
        const Term* const of_item = terms + (kRaw ? 0 : item * kVector);
        row[r].store(first, item * step,
                     [&](int k) { return kRaw ? finish.of(k).again(of_item[k], log) : finish.of(k)(of_item[k], log); });
      }
      if constexpr (kMore) more.store(row[r], first + kVectors * step, step, finish, log);
    });
    row[r].clean(first, step, arguments.live, finish);
  }
}

}  // namespace ndsoftmax::cuda
