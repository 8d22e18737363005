// Combining states over the threads that share a row: over lanes of a warp by shuffles, over warps through shared
// memory. Every thread gets the result. Over blocks of a cluster: see meeting.cuh.
// The order is fixed by the layout alone, so results repeat bit by bit.
#pragma once

#include <cuda_runtime.h>

#include "cuda/exponential.cuh"
#include "cuda/vec.cuh"
#include "host/tuning.hpp"
#include "ndsoftmax/state.hpp"

namespace ndsoftmax::cuda {

using tuning::kWarp;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// A sum, and beside it what its additions rounded off: small terms after a large one would else be lost.
template <typename Real>
class CompensatedSum {
 public:
  __device__ __forceinline__ explicit CompensatedSum(Real sum = 0) : sum_(sum) {}
  __device__ __forceinline__ void add(Real x, Real lost = 0) {
    const Real total = sum_ + x, part = total - sum_;
    lost_ = (lost_ + lost) + ((sum_ - (total - part)) + (x - part));
    sum_ = total;
  }
  __device__ __forceinline__ Real sum() const { return sum_; }
  __device__ __forceinline__ Real lost() const { return lost_; }
  // Of infinities what was lost is NaN, and means nothing.
  __device__ __forceinline__ Real total() const { return lost_ == lost_ ? sum_ + lost_ : sum_; }

 private:
  Real sum_, lost_ = 0;
};

// The same interface, without that.
template <typename Real>
class PlainSum {
 public:
  __device__ __forceinline__ explicit PlainSum(Real sum) : sum_(sum) {}
  __device__ __forceinline__ void add(Real x) { sum_ += x; }
  __device__ __forceinline__ Real total() const { return sum_; }

 private:
  Real sum_;
};

// The sum of a state, taken relative to `shift` instead: of 16-bit results as they can show it.
template <typename Result, typename Real>
__device__ __forceinline__ Real rescaled(const MaxSum<Real>& state, Real shift) {
  return state.sum * Exponential<Result>::of(state.max - shift, 0, std::false_type{});
}

// Of a few columns, one each.
template <typename State, int kColumns>
struct ColumnStates {
  State of[kColumns];

  __device__ __forceinline__ void combine(const ColumnStates& other) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) of[column].combine(other.of[column]);
  }
};

// Teams of `lanes` lanes whose numbers are `step` apart, both powers of two. The whole warp must call.
struct Lanes {
  int lanes = kWarp;
  int step = 1;

  template <typename Real>
  __device__ __forceinline__ Real max(Real x) const {
    each_step([&](int offset) {
      const Real other = __shfl_xor_sync(kAllLanes, x, offset);
      x = other > x ? other : x;
    });
    return x;
  }

  // Float64 has nothing wider to be added in.
  template <typename Real>
  __device__ __forceinline__ Real sum(Real x) const {
    if constexpr (sizeof(Real) == 8) return sum_exactly(x);
    each_step([&](int offset) { x += __shfl_xor_sync(kAllLanes, x, offset); });
    return x;
  }
  template <typename Real>
  __device__ __forceinline__ Real sum_exactly(Real x) const {
    CompensatedSum<Real> sum(x);
    each_step([&](int offset) {
      const Real other = __shfl_xor_sync(kAllLanes, sum.sum(), offset);
      sum.add(other, __shfl_xor_sync(kAllLanes, sum.lost(), offset));
    });
    return sum.total();
  }

  // MaxSum::combine over all lanes at once: one exponential a lane instead of two a step.
  template <typename Real>
  __device__ __forceinline__ MaxSum<Real> combine(MaxSum<Real> state) const {
    const Real merged = max(state.max);
    state.sum = sum(state.sum * MaxSum<Real>::rescale(state.max, merged));
    state.max = merged;
    return state;
  }

  // The same where states are sums of many terms each, so that a few small ones beside a large one amount to an ulp of
  // 32 bits; 16 show neither that nor what the hardware's exponential is off by.
  template <typename Result, typename Real>
  __device__ __forceinline__ MaxSum<Real> combine_for(const MaxSum<Real>& state) const {
    const Real merged = max(state.max);
    if constexpr (sizeof(Result) > 2)
      return {merged, sum_exactly(state.sum * MaxSum<Real>::rescale(state.max, merged))};
    return {merged, sum(rescaled<Result>(state, MaxSum<Real>::shift(merged)))};
  }
  template <typename Result, typename Sums>
  __device__ __forceinline__ Sums combine_for(const Sums& state) const {
    return combine(state);
  }

  // combine() for several states of each lane, whose shuffles are under way together; as exact as results can show.
  template <typename Result, typename Real, int kCount>
  __device__ __forceinline__ void combine_each(MaxSum<Real> (&states)[kCount]) const {
    MaxSum<Real> merged[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) merged[k].max = states[k].max;
    max_each(merged);
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      states[k] = {merged[k].max, rescaled<Result>(states[k], MaxSum<Real>::shift(merged[k].max))};
    sum_each(states);
  }
  template <typename Result, typename Real, int kCount>
  __device__ __forceinline__ void combine_each(Sum<Real> (&states)[kCount]) const {
    sum_each(states);
  }
  template <typename Result, typename Real, int kCount>
  __device__ __forceinline__ void combine_each(LivingSum<Real> (&states)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) states[k] = combine(states[k]);
  }

  template <typename Real>
  __device__ __forceinline__ Sum<Real> combine(Sum<Real> state) const {
    return {sum(state.sum)};
  }

  template <typename Real>
  __device__ __forceinline__ LivingSum<Real> combine(LivingSum<Real> state) const {
    return {sum(state.sum), sum(state.living)};
  }

  template <typename Real, int kColumns>
  __device__ __forceinline__ ColumnStates<MaxSum<Real>, kColumns> combine(
      const ColumnStates<MaxSum<Real>, kColumns>& states) const {
    ColumnStates<MaxSum<Real>, kColumns> merged = states;
    max_each(merged.of);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) merged.of[k].sum *= MaxSum<Real>::rescale(states.of[k].max, merged.of[k].max);
    sum_each(merged.of);
    return merged;
  }
  template <typename Real, int kColumns>
  __device__ __forceinline__ ColumnStates<Sum<Real>, kColumns> combine(ColumnStates<Sum<Real>, kColumns> states) const {
    sum_each(states.of);
    return states;
  }

  // Of several states of each lane, whose shuffles are under way together.
  template <typename Real, int kCount>
  __device__ __forceinline__ void max_each(MaxSum<Real> (&states)[kCount]) const {
    each_step([&](int offset) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const Real other = __shfl_xor_sync(kAllLanes, states[k].max, offset);
        states[k].max = other > states[k].max ? other : states[k].max;
      }
    });
  }
  template <typename State, int kCount>
  __device__ __forceinline__ void sum_each(State (&states)[kCount]) const {
    if constexpr (sizeof(states[0].sum) == 8) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) states[k].sum = sum(states[k].sum);
    } else {
      each_step([&](int offset) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) states[k].sum += __shfl_xor_sync(kAllLanes, states[k].sum, offset);
      });
    }
  }

 private:
  template <typename Visit>
  __device__ __forceinline__ void each_step(const Visit& visit) const {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      if (offset >= step && offset < step * lanes) visit(offset);
  }
};

// The dynamic shared memory of the block.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char shared[];
  return shared;
#else
  return emulator::dynamic_shared();  // tests/cpp/emulator
#endif
}

// Shared memory for N values whose type has a constructor, which __shared__ variables may not.
template <typename T, int N>
struct Shared {
  alignas(T) alignas(8) unsigned char bytes[sizeof(T) * N];  // 8: as other blocks send them
  __device__ __forceinline__ T* get() { return reinterpret_cast<T*>(bytes); }
};

// Combines a few states with one, each of which costs one exponential. What additions round off is kept, where results
// show it.
template <typename Result, typename Real, int kSome>
__device__ __forceinline__ void combine_some(MaxSum<Real>& state, const MaxSum<Real> (&some)[kSome]) {
  Real max = state.max;
#pragma unroll
  for (int i = 0; i < kSome; ++i) max = larger(max, some[i].max);
  const Real shift = MaxSum<Real>::shift(max);
  std::conditional_t<(sizeof(Result) > 2), CompensatedSum<Real>, PlainSum<Real>> sum(rescaled<Result>(state, shift));
#pragma unroll
  for (int i = 0; i < kSome; ++i) sum.add(rescaled<Result>(some[i], shift));
  state = {max, sum.total()};
}
template <typename Result, typename Sums, int kSome>
__device__ __forceinline__ void combine_some(Sums& state, const Sums (&some)[kSome]) {
#pragma unroll
  for (int i = 0; i < kSome; ++i) state.combine(some[i]);
}

// The combination of at(0), …, at(count - 1): the maximum first, so that each costs one exponential, and what additions
// round off is kept (10007 x 7 of float32, one-hot, folded, was else off by 1.4 ulp in the mean). For 16-bit results,
// which show neither, a few at a time, each of which is read once.
template <typename Result, typename Real, typename At>
__device__ __forceinline__ void combine_all(MaxSum<Real>& state, int count, const At& at) {
  state = {};
  if constexpr (sizeof(Result) > 2) {
    for (int i = 0; i < count; ++i) state.max = at(i).max > state.max ? at(i).max : state.max;
    CompensatedSum<Real> sum;
    for (int i = 0; i < count; ++i) sum.add(at(i).sum * MaxSum<Real>::rescale(at(i).max, state.max));
    state.sum = sum.total();
  } else {
    constexpr int kSome = 4;
#pragma unroll 1
    for (int first = 0; first < count; first += kSome) {
      MaxSum<Real> some[kSome];
#pragma unroll
      for (int i = 0; i < kSome; ++i)
        if (first + i < count) some[i] = at(first + i);
      combine_some<Result>(state, some);
    }
  }
}
template <typename Result, typename Sums, typename At>
__device__ __forceinline__ void combine_all(Sums& state, int count, const At& at) {
  state = {};
  for (int i = 0; i < count; ++i) state.combine(at(i));
}

// Calls then(column, part, parts, state) for every column with the combination of at(column, 0), …,
// at(column, count - 1), from each of the threads that share the column, as many as work::log2_parts() says. The whole
// block, of whole warps, must call.
template <typename State, typename Result, typename At, typename Then>
__device__ __forceinline__ void gather(int columns, int count, int log2_parts, const At& at, const Then& then) {
  const Lanes parts{1 << log2_parts, 1};
  const int part = threadIdx.x & (parts.lanes - 1);
  const int mine = (count - part + parts.lanes - 1) >> log2_parts;
  for (int first = 0; first < columns; first += blockDim.x >> log2_parts) {
    const int column = first + (threadIdx.x >> log2_parts);
    State state;
    if (column < columns) {
      if (mine == 1)
        state = at(column, part);
      else
        combine_all<Result>(state, mine, [&](int i) { return at(column, part + (i << log2_parts)); });
    }
    if (parts.lanes > 1) state = parts.combine_for<Result>(state);
    if (column < columns) then(column, part, parts.lanes, state);
  }
}

// Every warp brings a state that its lanes agree on; at most 32 of them.
template <typename State>
__device__ __forceinline__ State combine_warps(State state, State* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) shared[warp] = state;
  __syncthreads();
  return Lanes{}.combine(lane < warps ? shared[lane] : State{});
}

// How the state that a team of lanes holds becomes the row's, and what finishes its terms.
struct WarpExchange {
  template <typename Operation>
  __device__ __forceinline__ auto finish(const Operation& operation, const typename Operation::State& held) const {
    return operation.finish(held);
  }
};

struct BlockExchange {
  template <typename Operation>
  __device__ __forceinline__ auto finish(const Operation& operation, const typename Operation::State& held) const {
    __shared__ Shared<typename Operation::State, kWarp> warps;
    return operation.finish(held, combine_warps(held, warps.get()));
  }
};

}  // namespace ndsoftmax::cuda
