// Softmax over columns of which there are so few that a row of memory has one after the other, again and again: 2, as
// in 64 x 100000 x 2 along dim 1. To the kernels of rows, a slab of dim times the columns is one row, whose elements
// take turns: the k-th of a vector is of column k modulo their number, as vectors begin with the first. So an operation
// of several columns has a state and a finish of each, and for the rest is what it is made of.
#pragma once

#include "cuda/operation.cuh"

namespace ndsoftmax::cuda {

template <typename Of, int kColumns>
struct Interleaved : Of {
  using typename Of::Term;
  using State = ColumnStates<typename Of::State, kColumns>;

  struct Finish {
    typename Of::Finish columns[kColumns];
    __device__ __forceinline__ const typename Of::Finish& of(int k) const { return columns[k % kColumns]; }
  };

  // As in operation.cuh, of terms that lie one after the other. The lanes of a team meet for all columns at once.
  template <int kItems, int kPerItem, int kStep, typename LiveItems, typename Team>
  __device__ __forceinline__ State reduce(Term* terms, LiveItems live, const Team& team) const {
    static_assert(kStep == kPerItem);
    constexpr int kOwn = kPerItem / kColumns;
    State state;
    if constexpr (kForward) {
      each<kItems * kPerItem>(
          terms, [&](int column, Term* own) { Of::template raise<kItems, kOwn, kOwn>(state.of[column], own, live); });
      agree(state, team);
      return exponentiated<kItems, kPerItem, kStep>(terms, live, state, team);
    } else {
      each<kItems * kPerItem>(terms, [&](int column, Term* own) {
        state.of[column] = Of::template reduce<kItems, kOwn, kOwn>(own, live, Alone{});
      });
      total(state, team);
      return state;
    }
  }
  template <int kItems, int kPerItem, int kStep, typename LiveItems, typename Team>
  __device__ __forceinline__ State exponentiated(Term* terms, LiveItems live, const State& known,
                                                 const Team& team) const {
    static_assert(kStep == kPerItem);
    constexpr int kOwn = kPerItem / kColumns;
    State state;
    each<kItems * kPerItem>(terms, [&](int column, Term* own) {
      state.of[column] = Of::template exponentiated<kItems, kOwn, kOwn>(own, live, known.of[column], Alone{});
    });
    total(state, team);
    return state;
  }
  template <int kItems, int kPerItem, int kStep>
  __device__ __forceinline__ void accumulate(State& state, Term* terms) const {
    static_assert(kStep == kPerItem);
    constexpr int kOwn = kPerItem / kColumns;
    each<kItems * kPerItem>(
        terms, [&](int column, Term* own) { Of::template accumulate<kItems, kOwn, kOwn>(state.of[column], own); });
  }

  template <int kTerms>
  __device__ __forceinline__ void raise(State& state, Term* terms) const {
    each<kTerms>(terms, [&](int column, Term* own) { Of::template raise<kTerms / kColumns>(state.of[column], own); });
  }
  __device__ __forceinline__ static void raise(State& state, const State& other) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) Of::raise(state.of[column], other.of[column]);
  }
  template <typename Raw, int kVectors, typename Team>
  __device__ __forceinline__ void raise(State& state, const Raw (&raw)[kVectors], const Team& team) const {
    if constexpr (kForward) {
      raise_by<false>(state, raw);
      agree(state, team);
    }
  }
  template <typename Raw, int kVectors>
  __device__ __forceinline__ void raise(State& state, const Raw (&raw)[kVectors]) const {
    if constexpr (kForward) raise_by<true>(state, raw);
  }
  template <typename Team>
  __device__ __forceinline__ static void agree(State& state, const Team& team) {
    team.max_each(state.of);
  }
  template <int kTerms>
  __device__ __forceinline__ void add(State& state, Term* terms) const {
    each<kTerms>(terms, [&](int column, Term* own) { Of::template add<kTerms / kColumns>(state.of[column], own); });
  }
  __device__ __forceinline__ static void add(State& state, const State& other) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) Of::add(state.of[column], other.of[column]);
  }
  template <typename Team>
  __device__ __forceinline__ static void total(State& state, const Team& team) {
    team.sum_each(state.of);
  }

  template <typename... States>
  __device__ __forceinline__ Finish finish(const States&... states) const {
    Finish finish;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) finish.columns[column] = Of::finish(states.of[column]...);
    return finish;
  }

 private:
  static_assert(!Of::kFused);
  static constexpr bool kForward = Of::kDirection == Direction::forward;

  // A team of one thread: what it has meets that of others, of all columns at once, after that.
  struct Alone {
    template <typename Real>
    __device__ __forceinline__ Real sum(Real x) const {
      return x;
    }
  };

  // Calls visit(column, its terms), which may change them.
  template <int kTerms, typename Visit>
  __device__ __forceinline__ static void each(Term* terms, const Visit& visit) {
    constexpr int kOwn = kTerms / kColumns;
    static_assert(kTerms % kColumns == 0);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      Term own[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own[i] = terms[i * kColumns + column];
      visit(column, own);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) terms[i * kColumns + column] = own[i];
    }
  }

  // kRescales: where add() has been called before.
  template <bool kRescales, typename Raw, int kVectors>
  __device__ __forceinline__ void raise_by(State& state, const Raw (&raw)[kVectors]) const {
    auto most = raw[0].source;
    constexpr int kVector = decltype(most)::kBytes / static_cast<int>(sizeof(typename Of::Source));
#pragma unroll
    for (int i = 1; i < kVectors; ++i) most = most.larger(raw[i].source);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      auto& own = state.of[column];
      auto max = most.widened(column);
#pragma unroll
      for (int k = column + kColumns; k < kVector; k += kColumns) max = larger(max, most.widened(k));
      max = larger(own.max, Of::scaled(max));
      if constexpr (kRescales) own.sum *= Of::State::rescale(own.max, max);
      own.max = max;
    }
  }
};

template <typename Operation>
inline constexpr bool kInterleaves = false;
template <typename Of, int kColumns>
inline constexpr bool kInterleaves<Interleaved<Of, kColumns>> = true;

}  // namespace ndsoftmax::cuda
