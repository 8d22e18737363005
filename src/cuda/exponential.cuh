// What the hardware computes in one instruction, as far as results show no difference.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <type_traits>

namespace ndsoftmax::cuda {

// a · b, rounded before anything is added to it.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

// exp(x) as exact as the result can show. A 16-bit result keeps at most 11 bits: there one multiplication and the
// hardware's 2^x, wrong by 5e-6 at worst where the result is not yet 0, save most of the instructions. That 2^x knows
// no denormal numbers, but bfloat16 does; so softmax computes 2^kBias times the exponential, which its sum divides out.
// `only_x` asks for x instead; of 16-bit results at no cost, also where it is only known at run time.
template <typename Result>
struct Exponential {
  static constexpr float kLog2E = 1.44269504f, kBias = 64;

  template <typename Only>
  __device__ __forceinline__ static float of(float x, float bias, Only only_x) {
    if constexpr (sizeof(Result) > 2) return only_x ? x : expf(x);
    return exp2_of(fmaf(x, only_x ? 1 : kLog2E, only_x ? 0 : bias), only_x);
  }
  template <typename Only>
  __device__ __forceinline__ static double of(double x, float, Only only_x) {
    return only_x ? x : exp(x);
  }
  // Of x times `scale`, of 16-bit results at no cost. (Apart from of(), where a factor of 1 took registers.)
  template <typename Only>
  __device__ __forceinline__ static float of_scaled(float x, float scale, float bias, Only only_x) {
    return exp2_of(fmaf(x, only_x ? scale : kLog2E * scale, only_x ? 0 : bias), only_x);
  }

 private:
  template <typename Only>
  __device__ __forceinline__ static float exp2_of(float y, Only only_y) {
#if defined(__CUDACC__)
    if constexpr (std::is_same_v<Only, bool>)
      asm("{\n.reg .pred p;\nsetp.eq.s32 p, %1, 0;\n@p ex2.approx.ftz.f32 %0, %0;\n}" : "+f"(y) : "r"(int{only_y}));
    else if constexpr (!Only::value)
      asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));
    return y;
#else
    return only_y ? y : exp2f(y);
#endif
  }
};

// 1 / x, likewise: in full, it is ten instructions and a branch, which show where rows are tiny and where threads have
// several columns. What the hardware returns for 32 bits is made exact by one step of Newton's, unless it is 0,
// infinite or NaN. Sums are never denormal.
template <typename Result, typename Real>
__device__ __forceinline__ Real reciprocal_for(Real x) {
#if defined(__CUDACC__)
  if constexpr (sizeof(Result) <= 4) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    if constexpr (sizeof(Result) == 2) return y;
    const float error = fmaf(-x, y, 1);
    return error == error ? fmaf(y, error, y) : y;
  }
#endif
  return 1 / x;
}

}  // namespace ndsoftmax::cuda
