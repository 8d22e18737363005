// Vec: neighbouring elements that move with one instruction. And the conversions between what is stored and what is
// computed with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ndsoftmax::cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T at[N];
};

// float sums for 16- and 32-bit elements, double for double
template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T narrow(Accumulator<T> x) {
  if constexpr (sizeof(T) > 2) return x;
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else return __float2bfloat16_rn(x);
}

template <typename T, int N>
__device__ __forceinline__ bool is_aligned(const T* address) {
  return reinterpret_cast<std::uintptr_t>(address) % alignof(Vec<T, N>) == 0;
}

}  // namespace ndsoftmax::cuda
