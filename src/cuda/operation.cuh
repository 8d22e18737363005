// What is computed, apart from how it is spread: Forward and Backward, each for softmax and log_softmax. A kernel
// loads terms, asks for the state of those a team of lanes holds, lets an exchange make it the state of the row, and
// passes the terms through finish(). Masks, scale and bias belong into term(): kernels never look into one.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ndsoftmax/state.hpp"

namespace ndsoftmax::cuda {

template <typename Source_, typename Result_>
struct Forward {
  using Source = Source_;
  using Result = Result_;
  using Real = Accumulator<Source>;
  using State = MaxSum<Real>;
  using Term = Real;  // x; once reduced for softmax, exp(x - the team's maximum)
  static constexpr Direction kDirection = Direction::forward;

  bool log;

  __device__ __forceinline__ static Term term(Source x, Source) { return widen(x); }
  __device__ __forceinline__ static Term nothing() { return -std::numeric_limits<Real>::infinity(); }

  // The state of terms[0], terms[kStep], … of a team. Each is exponentiated once, and kept so for softmax.
  template <int kCount, int kStep, typename Team>
  __device__ __forceinline__ State reduce(Term* terms, const Team& team) const {
    State state;
#pragma unroll
    for (int i = 0; i < kCount; ++i) state.max = terms[i * kStep] > state.max ? terms[i * kStep] : state.max;
    state.max = team.max(state.max);
    const Real shift = State::shift(state.max);
    if (log) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) state.sum += exponential(terms[i * kStep] - shift);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) state.sum += terms[i * kStep] = exponential(terms[i * kStep] - shift);
    }
    state.sum = team.sum(state.sum);
    return state;
  }

  // Adds terms that will be loaded again: the online softmax.
  template <int kCount, int kStep>
  __device__ __forceinline__ static void accumulate(State& state, const Term* terms, bool) {
    Real max = state.max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) max = terms[i * kStep] > max ? terms[i * kStep] : max;
    const Real shift = State::shift(max);
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += exponential(terms[i * kStep] - shift);
    state.sum = state.sum * State::rescale(state.max, max) + sum;
    state.max = max;
  }

  // Results from terms that reduce() has seen (`team` is what it returned) or, freshly loaded, from x.
  struct Finish {
    bool log;
    Real max, sum, factor;  // log_softmax: sum is the logarithm of the row's sum

    __device__ __forceinline__ Real operator()(Term term) const {
      return log ? (term - max) - sum : term * factor;
    }
    __device__ __forceinline__ Real again(Term x) const {
      return log ? (x - max) - sum : exponential(x - max) * factor;
    }
  };

  __device__ __forceinline__ Finish finish(const State& team, const State& row) const {
    if (log) return {true, row.max, logarithm(row.sum), 0};
    return {false, row.max, 0, State::rescale(team.max, row.max) / row.sum};
  }
  __device__ __forceinline__ Finish finish(const State& row) const { return finish(row, row); }

 private:
  __device__ __forceinline__ static Real logarithm(Real x) {
    if constexpr (sizeof(Real) == 4) return logf(x);
    else return ::log(x);
  }
};

// softmax: dx = y (g - sum(g y)).  log_softmax: dx = g - exp(y) sum(g).
template <typename Source_, typename Result_>
struct Backward {
  using Source = Source_;
  using Result = Result_;
  using Real = Accumulator<Source>;
  using State = Sum<Real>;
  struct Term {
    Real output, grad;
  };
  static constexpr Direction kDirection = Direction::backward;

  bool log;

  __device__ __forceinline__ static Term term(Source output, Source grad) { return {widen(output), widen(grad)}; }
  __device__ __forceinline__ static Term nothing() { return {0, 0}; }

  template <int kCount, int kStep, typename Team>
  __device__ __forceinline__ State reduce(Term* terms, const Team& team) const {
    State state;
    accumulate<kCount, kStep>(state, terms, log);
    state.sum = team.sum(state.sum);
    return state;
  }

  template <int kCount, int kStep>
  __device__ __forceinline__ static void accumulate(State& state, const Term* terms, bool log) {
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += log ? terms[i * kStep].grad : terms[i * kStep].grad * terms[i * kStep].output;
    state.sum += sum;
  }

  struct Finish {
    bool log;
    Real sum;

    __device__ __forceinline__ Real operator()(Term term) const {
      return log ? term.grad - exponential(term.output) * sum : term.output * (term.grad - sum);
    }
    __device__ __forceinline__ Real again(Term term) const { return (*this)(term); }
  };

  __device__ __forceinline__ Finish finish(const State&, const State& row) const { return {log, row.sum}; }
  __device__ __forceinline__ Finish finish(const State& row) const { return {log, row.sum}; }
};

}  // namespace ndsoftmax::cuda
