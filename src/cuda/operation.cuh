// What is computed, apart from how it is spread: Forward and Backward, each for softmax and log_softmax. A kernel
// loads terms, asks for the state of those a team of lanes holds, lets an exchange make it the state of the row, and
// passes the terms through finish(). Fused operations also know rows of which nothing is left; what they fuse is
// applied to terms (see fused.cuh), where excluded elements come to nothing().
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ndsoftmax/state.hpp"

namespace ndsoftmax::cuda {

// exp(x) as exact as the result can show. A 16-bit result keeps at most 11 bits: there one multiplication and the
// hardware's 2^x, wrong by 5e-6 at worst where the result is not yet 0, save most of the instructions. That 2^x knows
// no denormal numbers, but bfloat16 does; so softmax computes 2^kBias times the exponential, which its sum divides out.
template <typename Result>
__device__ __forceinline__ float exponential_for(float x, bool biased) {
  constexpr float kLog2E = 1.44269504f, kBias = 64;
  if constexpr (sizeof(Result) > 2) return expf(x);
  const float power = fmaf(x, kLog2E, biased ? kBias : 0.0f);
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(power));
  return y;
#else
  return exp2f(power);
#endif
}
template <typename Result>
__device__ __forceinline__ double exponential_for(double x, bool) {
  return exp(x);
}

// A sum over what one thread holds, in a few partial ones: shorter chains of additions, and less rounding where many
// small terms meet one large sum.
template <typename Real, int kCount, int kMost = tuning::partial_sums(sizeof(Real))>
class PartialSums {
 public:
  // The i-th of at most kCount; `i` should be known when this is compiled.
  __device__ __forceinline__ void add(int i, Real x) {
    of_[i % kPartials] = i < kPartials ? x : of_[i % kPartials] + x;
  }
  // In pairs, then pairs of those, and so on.
  __device__ __forceinline__ Real total() const {
    Real of[kPartials];
#pragma unroll
    for (int i = 0; i < kPartials; ++i) of[i] = of_[i];
#pragma unroll
    for (int step = 1; step < kPartials; step *= 2)
#pragma unroll
      for (int i = 0; i + step < kPartials; i += 2 * step) of[i] += of[i + step];
    return of[0];
  }

 private:
  static constexpr int kPartials = kCount < kMost ? kCount : kMost;
  Real of_[kPartials]{};
};

// 1 / x, likewise: in full, it is ten instructions and a branch, which show where rows are tiny. Sums are never
// denormal.
template <typename Result, typename Real>
__device__ __forceinline__ Real reciprocal_for(Real x) {
#if defined(__CUDACC__)
  if constexpr (sizeof(Result) == 2) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
#endif
  return 1 / x;
}

template <bool kLog, typename Source_, typename Result_, bool kFused_ = false>
struct Forward {
  using Source = Source_;
  using Result = Result_;
  using Real = Accumulator<Source>;
  using State = MaxSum<Real>;
  using Term = Real;  // x; once reduced for softmax, exp(x - the team's maximum)
  static constexpr Direction kDirection = Direction::forward;
  static constexpr bool kFused = kFused_;
  static constexpr bool kReplacesTerms = !kLog;  // reduce() and add() leave exponentials

  __device__ __forceinline__ static Term term(Real x, Real) { return x; }
  __device__ __forceinline__ static Term nothing() { return -std::numeric_limits<Real>::infinity(); }

  // The state of a team's terms: kPerItem of each of the first `live` items, which lie kStep apart.
  // Each term is exponentiated once, and kept so for softmax.
  template <int kItems, int kPerItem, int kStep, typename Team>
  __device__ __forceinline__ static State reduce(Term* terms, int live, const Team& team) {
    State state;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item >= live) break;
#pragma unroll
      for (int k = 0; k < kPerItem; ++k) state.max = larger(state.max, terms[item * kStep + k]);
    }
    state.max = team.max(state.max);
    const Real shift = State::shift(state.max);
    PartialSums<Real, kItems * kPerItem> sums;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item >= live) break;
#pragma unroll
      for (int k = 0; k < kPerItem; ++k) {
        const Real e = exponential_for<Result>(terms[item * kStep + k] - shift, !kLog);
        sums.add(item * kPerItem + k, e);
        if constexpr (!kLog) terms[item * kStep + k] = e;
      }
    }
    state.sum = team.sum(sums.total());
    return state;
  }

  // The same in steps, for terms that come a few at a time: raise() for all, raise() for the team, add() for all, and
  // total() for the team.
  template <int kTerms>
  __device__ __forceinline__ static void raise(State& state, const Term* terms) {
#pragma unroll
    for (int k = 0; k < kTerms; ++k) state.max = larger(state.max, terms[k]);
  }
  // The same in steps, for terms that are made anew each time: raise() by all of them, as they were loaded, then add().
  template <typename Raw, int kVectors, typename Team>
  __device__ __forceinline__ static void raise(State& state, const Raw (&raw)[kVectors], const Team& team) {
    state.max = team.max(larger(state.max, largest(raw)));
  }
  template <int kTerms>
  __device__ __forceinline__ static void add(State& state, Term* terms) {
    const Real shift = State::shift(state.max);
    PartialSums<Real, kTerms, tuning::kPartialSumsOfFew> sums;
#pragma unroll
    for (int k = 0; k < kTerms; ++k) {
      const Real e = exponential_for<Result>(terms[k] - shift, !kLog);
      sums.add(k, e);
      if constexpr (!kLog) terms[k] = e;
    }
    state.sum += sums.total();
  }
  // The sum of what add() has seen in each lane of a team, whose maximum is known.
  template <typename Team>
  __device__ __forceinline__ static void total(State& state, const Team& team) {
    state.sum = team.sum(state.sum);
  }

  // raise() for the online softmax: of what was loaded since, where add() has been called before.
  template <typename Raw, int kVectors>
  __device__ __forceinline__ static void raise(State& state, const Raw (&raw)[kVectors]) {
    const Real max = larger(state.max, largest(raw));
    state.sum *= State::rescale(state.max, max);
    state.max = max;
  }

  // Adds terms that will be loaded again: the online softmax.
  template <int kItems, int kPerItem, int kStep>
  __device__ __forceinline__ static void accumulate(State& state, const Term* terms) {
    Real max = state.max;
#pragma unroll
    for (int i = 0; i < kItems * kPerItem; ++i) max = larger(max, terms[i / kPerItem * kStep + i % kPerItem]);
    const Real shift = State::shift(max);
    PartialSums<Real, kItems * kPerItem, tuning::kPartialSumsOfFew> sums;
#pragma unroll
    for (int i = 0; i < kItems * kPerItem; ++i)
      sums.add(i, exponential_for<Result>(terms[i / kPerItem * kStep + i % kPerItem] - shift, !kLog));
    state.sum = state.sum * State::rescale(state.max, max) + sums.total();
    state.max = max;
  }

  // Results from terms that reduce() has seen, of which it returned `held`, or from freshly loaded ones: again().
  // `factor` moves a term from the maximum of its team to that of the row. It is no part of `scale`, because 2^kBias in
  // the sum would make their product underflow before the result does.
  struct Finish {
    Real max, factor, scale;  // softmax: scale is 1 / sum; log_softmax: the logarithm of the sum

    __device__ __forceinline__ Real operator()(Term term) const {
      if constexpr (kLog)
        return (term - max) - scale;
      else
        return term * factor * scale;
    }
    __device__ __forceinline__ Real again(Term x) const {
      if constexpr (kLog)
        return (x - max) - scale;
      else
        return exponential_for<Result>(x - max, true) * scale;
    }

    // Decides what a row gets that has nothing but -inf, or nothing at all: its sum is 0.
    __device__ __forceinline__ void settle(bool dead_rows_are_zero, Real) {
      if (dead_rows_are_zero && scale == (kLog ? -kInfinity : kInfinity)) max = scale = 0;
    }
    // An excluded element comes to kExcluded as nothing() does, unless the row has a NaN or +inf: its sum is NaN.
    __device__ __forceinline__ bool taints() const { return scale != scale; }
    __device__ __forceinline__ static bool clears(bool included) { return !included; }
  };
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  static constexpr Real kExcluded = kLog ? -kInfinity : 0;

  // Where the team is the row, or again() will be asked.
  __device__ __forceinline__ static Finish finish(const State& row) {
    if constexpr (kLog)
      return {row.max, 1, logarithm(row.sum)};
    else
      return {row.max, 1, reciprocal_for<Result>(row.sum)};
  }
  __device__ __forceinline__ static Finish finish(const State& held, const State& row) {
    Finish result = finish(row);
    if constexpr (!kLog) result.factor = State::rescale(held.max, row.max);
    return result;
  }

 private:
  template <typename Raw, int kVectors>
  __device__ __forceinline__ static Real largest(const Raw (&raw)[kVectors]) {
    decltype(raw[0].source) sources[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) sources[i] = raw[i].source;
    return raw[0].source.largest(sources);
  }
  __device__ __forceinline__ static float logarithm(float x) { return logf(x); }
  __device__ __forceinline__ static double logarithm(double x) { return ::log(x); }
};

// softmax: dx = y (g - sum(g y)).  log_softmax: dx = g - exp(y) sum(g).
template <bool kLog, typename Source_, typename Result_, bool kFused_ = false>
struct Backward {
  using Source = Source_;
  using Result = Result_;
  using Real = Accumulator<Source>;
  using State = std::conditional_t<kFused_, LivingSum<Real>, Sum<Real>>;
  struct Term {
    Real output, grad;
  };
  static constexpr Direction kDirection = Direction::backward;
  static constexpr bool kFused = kFused_;
  static constexpr bool kReplacesTerms = false;
  static constexpr Real kEmpty = kLog ? -std::numeric_limits<Real>::infinity() : 0;  // the output of what is excluded

  __device__ __forceinline__ static Term term(Real output, Real grad) { return {output, grad}; }
  __device__ __forceinline__ static Term nothing() { return {kEmpty, 0}; }

  template <int kItems, int kPerItem, int kStep, typename Team>
  __device__ __forceinline__ static State reduce(Term* terms, int live, const Team& team) {
    State state;
    accumulate<kItems, kPerItem, kStep, tuning::partial_sums(sizeof(Real))>(state, terms, live);
    total(state, team);
    return state;
  }

  template <typename Raw, typename Team>
  __device__ __forceinline__ static void raise(State&, const Raw&, const Team&) {}
  template <typename Raw>
  __device__ __forceinline__ static void raise(State&, const Raw&) {}
  template <int kTerms>
  __device__ __forceinline__ static void add(State& state, const Term* terms) {
    accumulate<1, kTerms, kTerms, 1>(state, terms);
  }

  template <int kItems, int kPerItem, int kStep, int kSums = tuning::kPartialSumsOfFew>
  __device__ __forceinline__ static void accumulate(State& state, const Term* terms, int live = kItems) {
    PartialSums<Real, kItems * kPerItem, kSums> sums;
    bool living = false;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item >= live) break;
#pragma unroll
      for (int k = 0; k < kPerItem; ++k) {
        const Term& term = terms[item * kStep + k];
        sums.add(item * kPerItem + k, kLog ? term.grad : term.grad * term.output);
        if constexpr (kFused) living |= term.output != kEmpty;
      }
    }
    state.sum += sums.total();
    if constexpr (kFused) state.living += living;
  }
  template <typename Team>
  __device__ __forceinline__ static void total(State& state, const Team& team) {
    state.sum = team.sum(state.sum);
    if constexpr (kFused) state.living = team.sum(state.living);
  }

  struct Finish {
    Real sum;
    bool dead = false;  // the row got a constant
    Real scale = 1;

    __device__ __forceinline__ Real operator()(Term term) const {
      Real result;
      if constexpr (kLog)
        result = term.grad - exponential_for<Result>(term.output, false) * sum;
      else
        result = term.output * (term.grad - sum);
      return kFused ? result * scale : result;
    }
    __device__ __forceinline__ Real again(Term term) const { return (*this)(term); }

    __device__ __forceinline__ void settle(bool, Real fused_scale) { scale = fused_scale; }
    // An excluded element comes to 0 unless the sum, or the scale, is no number.
    __device__ __forceinline__ bool taints() const { return dead || (sum - sum) * scale != 0; }
    __device__ __forceinline__ bool clears(bool included) const { return dead || !included; }
  };
  static constexpr Real kExcluded = 0;

  __device__ __forceinline__ static Finish finish(const State& row) {
    if constexpr (kFused)
      return {row.sum, row.living == 0};
    else
      return {row.sum};
  }
  __device__ __forceinline__ static Finish finish(const State&, const State& row) { return finish(row); }
};

}  // namespace ndsoftmax::cuda
