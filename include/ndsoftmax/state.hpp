// The one thing every softmax reduction reduces over: the pair (max, sum of exp(x - max)), with an associative
// combine and an identity. It is the "online normalizer" of Milakov and Gimelshein (arXiv:1805.02867): because two
// pairs over disjoint parts of a row combine into the pair of their union, a row may be cut over lanes, warps,
// blocks, clusters or threads of a CPU, in any shape, and read once.
#pragma once

#include <cmath>
#include <limits>

#include "ndsoftmax/types.hpp"

namespace ndsoftmax {

template <typename Real>
NDSOFTMAX_HOST_DEVICE Real exponential(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == 4)
    return expf(x);
  else
    return exp(x);
#else
  return std::exp(x);
#endif
}

template <typename Real>
struct MaxSum {
  Real max = -std::numeric_limits<Real>::infinity();
  Real sum = 0;

  // What to subtract before exponentiating: the maximum, but 0 where nothing (or only -inf) was seen, so that
  // exp(-inf - shift) is 0 and not NaN.
  NDSOFTMAX_HOST_DEVICE static Real shift(Real max) {
    return max == -std::numeric_limits<Real>::infinity() ? Real(0) : max;
  }

  // The factor that moves a sum taken relative to `from` to one relative to `to` (from <= to).
  // Equal maxima give exactly 1, also when both are -inf.
  NDSOFTMAX_HOST_DEVICE static Real rescale(Real from, Real to) {
    return exponential(from == to ? Real(0) : from - to);  // which is 1, without a branch
  }

  NDSOFTMAX_HOST_DEVICE void combine(const MaxSum& other) {
    const Real merged = other.max > max ? other.max : max;
    sum = sum * rescale(max, merged) + other.sum * rescale(other.max, merged);
    max = merged;
  }

  NDSOFTMAX_HOST_DEVICE static MaxSum of(Real x) {
    MaxSum one;
    one.max = x == x ? x : -std::numeric_limits<Real>::infinity();  // NaN travels in the sum alone
    one.sum = exponential(x - shift(one.max));
    return one;
  }
};

// Backward needs one sum only: sum(grad * output) for softmax, sum(grad) for log_softmax.
template <typename Real>
struct Sum {
  Real sum = 0;
  NDSOFTMAX_HOST_DEVICE void combine(const Sum& other) { sum += other.sum; }
};

// Where rows may be masked: also how many outputs are neither 0 nor the logarithm of it. A row without any got a
// constant, and has no gradient.
template <typename Real>
struct LivingSum {
  Real sum = 0;
  Real living = 0;
  NDSOFTMAX_HOST_DEVICE void combine(const LivingSum& other) {
    sum += other.sum;
    living += other.living;
  }
};

}  // namespace ndsoftmax
