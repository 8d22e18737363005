// What may be fused into a softmax: a mask, a bias, a scale and a diagonal, each at run time. A thread asks for the
// neighbouring elements it works on and gets, for each, whether it is included and what is added to it. Masks and
// biases are read where they lie, through strides of their own; operations that fuse nothing get empty types instead.
#pragma once

#include <algorithm>

#include "cuda/operation.cuh"

namespace ndsoftmax::cuda {

// Bit k: whether byte k is not 0. Reads the aligned words that hold the N bytes.
template <int N>
__device__ __forceinline__ unsigned nonzero_bytes(const std::uint8_t* at) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const auto* words = reinterpret_cast<const unsigned*>(address & ~std::uintptr_t{3});
  const unsigned shift = static_cast<unsigned>(address % 4 * 8);
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const unsigned word = shift == 0 ? words[i] : __funnelshift_r(words[i], words[i + 1], shift);
    const unsigned ones = ((((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7) & 0x01010101u;
    bits |= (ones * 0x10204080u >> 28) << 4 * i;  // the product gathers the four bits at its top
  }
  return bits;
}

// Bit k: whether the mask has something else than 0 for element k, which lies k steps from `at`. Only elements whose
// bit in `touchable` is set are read, and bytes next to those where `roomy`.
template <int N>
__device__ __forceinline__ unsigned mask_bits(const std::uint8_t* at, std::int64_t step, unsigned touchable,
                                              bool roomy) {
  if (touchable == 0) return 0;
  if (step == 0) return *at != 0 ? touchable : 0;
  if constexpr (N % 4 == 0)
    if (step == 1 && roomy) return nonzero_bytes<N>(at);
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (touchable >> k & 1) bits |= static_cast<unsigned>(at[k * step] != 0) << k;
  return bits;
}

template <int N, typename T, typename Real>
__device__ __forceinline__ void load_bias(const T* at, std::int64_t step, unsigned touchable, Real (&bias)[N]) {
  constexpr int kAlignment = sizeof(T) * N < tuning::kVectorBytes ? sizeof(T) * N : tuning::kVectorBytes;
  constexpr unsigned kAll = (1u << N) - 1;
  if (touchable == 0) return;
  if (step == 0) {
    const Real value = widen(*at);
#pragma unroll
    for (int k = 0; k < N; ++k) bias[k] = value;
  } else if (step == 1 && touchable == kAll && reinterpret_cast<std::uintptr_t>(at) % kAlignment == 0) {
    const auto vector = Vec<T, N>::load(at);
#pragma unroll
    for (int k = 0; k < N; ++k) bias[k] = vector.widened(k);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (touchable >> k & 1) bias[k] = widen(at[k * step]);
  }
}

// The elements among first, …, first + N - 1 that lie in [0, end), as bits.
template <int N, typename Index>
__device__ __forceinline__ unsigned inside_bits(Index first, Index end) {
  constexpr unsigned kAll = (1u << N) - 1;
  if (first >= end || first <= -N) return 0;
  unsigned bits = kAll;
  if (first + N > end) bits &= kAll >> (first + N - end);
  if (first < 0) bits &= kAll << -first;
  return bits;
}

// Of one launch. Steps are those along dim.
template <typename Operation, bool = Operation::kFused>
struct Fusing {};

template <typename Operation>
struct Fusing<Operation, true> {
  using Real = typename Operation::Real;

  const std::uint8_t* mask;  // null: none
  const void* bias;          // null: none
  bool bias_is_real;         // or else of the source's type
  bool mask_includes;
  bool causal;
  bool dead_rows_are_zero;
  Real scale;
  std::int64_t diagonal;
};

// What a thread knows of N neighbouring elements beside their values.
template <typename Operation, int N, bool = Operation::kFused>
struct Extras {
  __device__ __forceinline__ static constexpr bool include(int) { return true; }
};

template <typename Operation, int N>
struct Extras<Operation, N, true> {
  using Real = typename Operation::Real;
  using Source = typename Operation::Source;
  static constexpr bool kForward = Operation::kDirection == Direction::forward;

  unsigned included = 0;
  Real bias[kForward ? N : 1]{};

  __device__ __forceinline__ bool include(int k) const { return included >> k & 1; }

  // `mask` and `bias`: offsets of the first element; steps lead from one to the next.
  __device__ __forceinline__ void load(const Fusing<Operation>& fusing, std::int64_t mask, std::int64_t mask_step,
                                       std::int64_t bias_at, std::int64_t bias_step, unsigned touchable, bool roomy) {
    included = touchable;
    if (fusing.mask != nullptr) {
      const unsigned set = mask_bits<N>(fusing.mask + mask, mask_step, touchable, roomy);
      included &= fusing.mask_includes ? set : ~set;
    }
    if constexpr (kForward) {
      if (fusing.bias == nullptr) return;
      if (sizeof(Source) == 2 && fusing.bias_is_real)
        load_bias(static_cast<const Real*>(fusing.bias) + bias_at, bias_step, touchable, bias);
      else
        load_bias(static_cast<const Source*>(fusing.bias) + bias_at, bias_step, touchable, bias);
    }
  }

  __device__ __forceinline__ typename Operation::Term term(const Fusing<Operation>& fusing, Real source, Real grad,
                                                           int k) const {
    if (!include(k)) return Operation::nothing();
    if constexpr (kForward)
      return Operation::term(source * fusing.scale + bias[k], 0);
    else
      return Operation::term(source, grad * fusing.scale);
  }
};

}  // namespace ndsoftmax::cuda
