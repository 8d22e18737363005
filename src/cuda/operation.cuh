// What is computed, apart from how it is spread: Forward and Backward, of softmax or log_softmax. A kernel loads terms,
// asks for the state of those a team of lanes holds, lets an exchange make it the state of the row, and passes the
// terms through finish(). Fused operations also know rows of which nothing is left; what they fuse is applied to terms
// (see fused.cuh), where excluded elements come to nothing().
#pragma once

#include <limits>

#include "cuda/exponential.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ndsoftmax/state.hpp"

namespace ndsoftmax::cuda {

// Calls visit(log) with a constant: two pieces of code, of which neither asks for each element.
template <typename Log, typename Visit>
__device__ __forceinline__ void parted(Log log, const Visit& visit) {
  if constexpr (!std::is_same_v<Log, bool>)
    visit(log);
  else if (log)
    visit(std::true_type{});
  else
    visit(std::false_type{});
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

// How many items there are, of which kLeast are known to be when this is compiled.
template <int kLeast>
struct Live {
  int count;
  __device__ __forceinline__ friend bool operator>=(int item, const Live& live) {
    return item >= kLeast && item >= live.count;
  }
};

// What the scale is yet to be multiplied with: terms, as may be those of 16 bits, which that would round; or, where all
// terms are what was loaded, and of 16 bits, and results as well, only their distances from the largest, in the
// multiplication that an exponential begins with. (Columns that are held took up to a seventh longer by distances: a
// thread finds the largest of each back. Distances of bfloat16 that pass the largest float are infinite before a scale
// would make less of them.)
enum class Scales { nothing, terms, distances };

// Log: bool, where one kernel is softmax and log_softmax, told at run time; or std::true_type or std::false_type.
template <typename Source_, typename Result_, bool kFused_ = false, typename Log = bool,
          Scales kScalesWhat = kFused_ && sizeof(Source_) == 2 ? Scales::terms : Scales::nothing>
struct Forward {
  using Source = Source_;
  using Result = Result_;
  using Real = Accumulator<Source>;
  using State = MaxSum<Real>;
  using Term = Real;  // x; once reduced, see there
  static constexpr Direction kDirection = Direction::forward;
  static constexpr bool kFused = kFused_, kMasked = false, kAligned = false, kBiased = false;

  template <typename Other>
  using With = Forward<Source, Result, kFused, Other, kScalesWhat>;

  static constexpr bool kScales = kScalesWhat != Scales::nothing, kScalesDistances = kScalesWhat == Scales::distances;

  Log log;
  // Where kScales, positive, or 1 where terms have been multiplied. The maximum of a state is that of terms times it.
  Real scale = 1;

  // (Not in the instruction that subtracts a maximum: what its product was rounded off by would be exponentiated.)
  __device__ __forceinline__ Real scaled(Real x) const { return kScales ? product(x, scale) : x; }
  // The largest term, of which `max` is scaled. Where kScalesDistances, it had 16 bits, and those are the nearest to
  // the product over the scale, whose reciprocal is no denormal number (may_scale()). An infinite product comes to NaN,
  // as the row does.
  __device__ __forceinline__ Real largest_term(Real max) const {
    if constexpr (kScalesDistances)
      return widen(narrow<Source>(max * reciprocal_for<Result>(scale))) + (max - max);
    else
      return max;
  }
  // What is subtracted from terms.
  __device__ __forceinline__ Real origin(Real max) const { return largest_term(State::shift(max)); }
  __device__ __forceinline__ Real distance(Term x, Real origin) const {
    return (kScalesDistances ? x : scaled(x)) - origin;
  }

  // Calls visit(log); of 32-bit results, where asking would cost each element instructions, with a constant.
  template <typename Visit>
  __device__ __forceinline__ void with_log(const Visit& visit) const {
    if constexpr (sizeof(Result) == 4)
      parted(log, visit);
    else
      visit(log);
  }

  __device__ __forceinline__ static Term term(Real x, Real) { return x; }
  __device__ __forceinline__ static Term nothing() { return -std::numeric_limits<Real>::infinity(); }
  // The result of an excluded element, and what reduce() makes of nothing().
  __device__ __forceinline__ Real excluded() const { return log ? -kInfinity : 0; }
  __device__ __forceinline__ Term reduced_nothing() const { return excluded(); }

  // The state of a team's terms: kPerItem of each of the first `live` items (an int, or Live), which lie kStep apart.
  // Each term is exponentiated once, and for softmax replaced by that; for log_softmax by its distance from the
  // maximum, where 16 bits are to come of it.
  template <int kItems, int kPerItem, int kStep, typename LiveItems, typename Team>
  __device__ __forceinline__ State reduce(Term* terms, LiveItems live, const Team& team) const {
    State state;
    raise<kItems, kPerItem, kStep>(state, terms, live);
    agree(state, team);
    return exponentiated<kItems, kPerItem, kStep>(terms, live, state, team);
  }
  template <int kItems, int kPerItem, int kStep, typename LiveItems>
  __device__ __forceinline__ void raise(State& state, const Term* terms, LiveItems live) const {
    Term most = nothing();
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item >= live) break;
#pragma unroll
      for (int k = 0; k < kPerItem; ++k) most = larger(most, terms[item * kStep + k]);
    }
    state.max = larger(state.max, scaled(most));
  }
  // The same where the team's maximum is known.
  template <int kItems, int kPerItem, int kStep, typename LiveItems, typename Team>
  __device__ __forceinline__ State exponentiated(Term* terms, LiveItems live, const State& known,
                                                 const Team& team) const {
    State state;
    state.max = known.max;
    const Real origin = this->origin(state.max);
    PartialSums<Real, kItems * kPerItem> sums;
    const auto exponentiate = [&](auto log) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item >= live) break;
#pragma unroll
        for (int k = 0; k < kPerItem; ++k) {
          Term& term = terms[item * kStep + k];
          const Real x = distance(term, origin), e = exponential(x, log);
          sums.add(item * kPerItem + k, e);
          if (!log)
            term = e;
          else if constexpr (kKeepsDistances)
            term = kScalesDistances ? scaled(x) : x;
        }
      }
    };
    if constexpr (sizeof(Real) == 4)
      parted(log, exponentiate);
    else
      exponentiate(log);
    state.sum = team.sum(sums.total());
    return state;
  }

  // The same in steps, for terms that come a few at a time: raise() for all, agree() for the team, add() for all, and
  // total() for the team.
  template <int kTerms>
  __device__ __forceinline__ void raise(State& state, const Term* terms) const {
    raise<1, kTerms, kTerms>(state, terms, 1);
  }
  // Up to the maximum of what another state has seen.
  __device__ __forceinline__ static void raise(State& state, const State& other) {
    state.max = larger(state.max, other.max);
  }
  template <typename Team>
  __device__ __forceinline__ static void agree(State& state, const Team& team) {
    state.max = team.max(state.max);
  }
  // The same in steps, for terms that are made anew each time: raise() by all of them, as they were loaded, then add().
  template <typename Raw, int kVectors, typename Team>
  __device__ __forceinline__ void raise(State& state, const Raw (&raw)[kVectors], const Team& team) const {
    state.max = team.max(larger(state.max, scaled(largest(raw))));
  }
  template <int kTerms>
  __device__ __forceinline__ void add(State& state, Term* terms) const {
    const Real origin = this->origin(state.max);
    PartialSums<Real, kTerms, tuning::kPartialSumsOfFew> sums;
#pragma unroll
    for (int k = 0; k < kTerms; ++k) {
      const Real e = exponential(distance(terms[k], origin), log);
      sums.add(k, e);
      if (!log) terms[k] = e;
    }
    state.sum += sums.total();
  }
  // The sum of another state, whose maximum is no larger.
  __device__ __forceinline__ static void add(State& state, const State& other) {
    state.sum += other.sum * State::rescale(other.max, state.max);
  }
  // The sum of what add() has seen in each lane of a team, whose maximum is known.
  template <typename Team>
  __device__ __forceinline__ static void total(State& state, const Team& team) {
    state.sum = team.sum(state.sum);
  }

  // raise() for the online softmax: of what was loaded since, where add() has been called before.
  template <typename Raw, int kVectors>
  __device__ __forceinline__ void raise(State& state, const Raw (&raw)[kVectors]) const {
    const Real max = larger(state.max, scaled(largest(raw)));
    state.sum *= State::rescale(state.max, max);
    state.max = max;
  }

  // Adds terms that will be loaded again: the online softmax.
  template <int kItems, int kPerItem, int kStep>
  __device__ __forceinline__ void accumulate(State& state, const Term* terms) const {
    State seen = state;
    raise<kItems, kPerItem, kStep>(seen, terms, kItems);
    const Real origin = this->origin(seen.max);
    PartialSums<Real, kItems * kPerItem, tuning::kPartialSumsOfFew> sums;
#pragma unroll
    for (int i = 0; i < kItems * kPerItem; ++i)
      sums.add(i, exponential(distance(terms[i / kPerItem * kStep + i % kPerItem], origin), log));
    state.sum = state.sum * rescale(state.max, seen.max) + sums.total();
    state.max = seen.max;
  }

  // The same of a few vectors of columns, one state each.
  template <int kItems, int kColumns, typename Raw>
  __device__ __forceinline__ void accumulate_columns(State (&state)[kColumns], const Raw (&raw)[kItems]) const {
    auto most = raw[0].source;
#pragma unroll
    for (int i = 1; i < kItems; ++i) most = most.larger(raw[i].source);
    PartialSums<Real, kItems, tuning::kPartialSumsOfFew> sums[kColumns];
    Real origin[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const Real max = larger(state[k].max, scaled(most.widened(k)));
      state[k].sum *= rescale(state[k].max, max);
      state[k].max = max;
      origin[k] = this->origin(max);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i)
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        sums[k].add(i, exponential(distance(raw[i].source.widened(k), origin[k]), log));
#pragma unroll
    for (int k = 0; k < kColumns; ++k) state[k].sum += sums[k].total();
  }

  // A distance from the maximum of the row in two parts is off by an ulp, which 16 bits do not show.
  static constexpr bool kKeepsDistances = sizeof(Result) == 2;

  // Results from terms that reduce() has seen, of which it returned `held`, or from freshly loaded ones: again(). Both
  // get what with_log() gives. What differs only by 0 or 1 is computed all the same: that is exact.
  struct Finish {
    Real largest;    // largest_term() of the row
    Real from_kept;  // log_softmax: taken from terms, or, where those are distances, from the result
    // softmax: moves a term from the maximum of its team to that of the row. It is no part of `scale`, which is all
    // that again() takes; and of 16-bit results, 2^kBias in the sum would make their product underflow before the
    // result does.
    Real factor;
    Real scale;        // softmax: 1 / sum
    Real from_result;  // log_softmax: the logarithm of the sum
    Real input_scale;  // the operation's scale

    // For the element with this number in a vector.
    __device__ __forceinline__ const Finish& of(int) const { return *this; }
    __device__ __forceinline__ Real scaled(Real x) const { return kScales ? product(x, input_scale) : x; }

    template <typename Told>
    __device__ __forceinline__ Real operator()(Term term, Told told) const {
      if constexpr (kKeepsDistances) return term * factor * scale - from_kept;
      if (told) return (scaled(term) - from_kept) - from_result;
      return term * (factor * scale);
    }
    template <typename Told>
    __device__ __forceinline__ Real again(Term x, Told told) const {
      using Of = Exponential<Result>;
      if constexpr (kScalesDistances)
        return Of::of_scaled(x - largest, input_scale, Of::kBias, told) * scale - from_result;
      return Of::of(scaled(x) - largest, Of::kBias, told) * scale - from_result;
    }

    // Decides what a row gets that has nothing but -inf, or nothing at all: its sum is 0.
    __device__ __forceinline__ void settle(bool dead_rows_are_zero) {
      if (!dead_rows_are_zero || (scale != kInfinity && from_result != -kInfinity)) return;
      largest = from_kept = from_result = 0;
      if (scale == kInfinity) scale = 0;
    }
    // An excluded element comes to excluded() as nothing() does, unless the row has a NaN or +inf: its sum is NaN.
    __device__ __forceinline__ bool taints() const { return scale != scale || from_result != from_result; }
    __device__ __forceinline__ static bool clears(bool included) { return !included; }
  };

  // Where the team is the row, or again() will be asked.
  __device__ __forceinline__ Finish finish(const State& row) const { return finish_told(log, row); }
  __device__ __forceinline__ Finish finish(const State& held, const State& row) const {
    return finish_told(log, held, row);
  }
  // For several columns, of which all are told at once.
  template <typename Told>
  __device__ __forceinline__ Finish finish_told(Told told, const State& row) const {
    const Real largest = largest_term(row.max);
    if (told) {
      const Real logarithm_of_sum = logarithm(row.sum);
      return {largest, kKeepsDistances ? logarithm_of_sum : largest, 1, 1, logarithm_of_sum, scale};
    }
    return {largest, 0, 1, reciprocal_for<Result>(row.sum), 0, scale};
  }
  template <typename Told>
  __device__ __forceinline__ Finish finish_told(Told told, const State& held, const State& row) const {
    Finish result = finish_told(told, row);
    if (!told)  // with denormal numbers: it meets terms times 2^kBias
      result.factor = ndsoftmax::exponential(held.max == row.max ? Real(0) : held.max - row.max);
    else if constexpr (kKeepsDistances)
      result.from_kept += held.max == row.max ? 0 : row.max - held.max;
    return result;
  }

 private:
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  // Of a distance.
  template <typename Told>
  __device__ __forceinline__ Real exponential(Real x, Told log) const {
    using Of = Exponential<Result>;
    const Real bias = log ? 0 : Of::kBias;
    if constexpr (kScalesDistances) return Of::of_scaled(x, scale, bias, std::false_type{});
    return Of::of(x, bias, std::false_type{});
  }
  // State::rescale() for sums, which denormal factors do not change; without a branch, which would keep those of
  // several columns from overlapping; as exact as the result can show.
  __device__ __forceinline__ static Real rescale(Real from, Real to) {
    return Exponential<Result>::of(from == to ? Real(0) : from - to, 0, std::false_type{});
  }
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

// Where all terms are what was loaded.
template <typename Source, typename Result>
inline constexpr Scales kScalesAsLoaded =
    sizeof(Source) == 2 && sizeof(Result) == 2 ? Scales::distances : Scales::terms;

// Of rows, where all that is fused is a scale, and that positive.
template <typename Of>
using ScaledForward = Forward<Of, Of, false, bool, kScalesAsLoaded<Of, Of>>;
template <typename Operation>
inline constexpr bool kScalesRows = std::is_same_v<Operation, ScaledForward<typename Operation::Source>>;

// The same where all that is fused is known when this is compiled: a positive scale and a mask, of neighbours.
// kAligned_: rows are whole vectors, and masks begin as they do.
template <typename Source, typename Result, bool kAligned_ = false, typename Log = bool>
struct MaskedForward : Forward<Source, Result, true, Log, kScalesAsLoaded<Source, Result>> {
  static constexpr bool kMasked = true, kAligned = kAligned_;

  template <typename Other>
  using With = MaskedForward<Source, Result, kAligned, Other>;
};

// The same of a scale and a bias, of the source's type, of neighbours; vectors of rows, and of columns that are held,
// have whole ones of both.
template <typename Of, typename Log = bool>
struct BiasedForward : Forward<Of, Of, true, Log, Scales::nothing> {
  static constexpr bool kBiased = true;

  template <typename Other>
  using With = BiasedForward<Of, Other>;
};

// softmax: dx = y (g - sum(g y)).  log_softmax: dx = g - exp(y) sum(g).
template <typename Source_, typename Result_, bool kFused_ = false, typename Log = bool>
struct Backward {
  using Source = Source_;
  using Result = Result_;
  using Real = Accumulator<Source>;
  using State = std::conditional_t<kFused_, LivingSum<Real>, Sum<Real>>;
  struct Term {
    Real output, grad;
  };
  static constexpr Direction kDirection = Direction::backward;
  static constexpr bool kFused = kFused_, kMasked = false, kAligned = false, kBiased = false;

  template <typename Other>
  using With = Backward<Source, Result, kFused, Other>;

  Log log;
  Real scale = 1;  // of the input, by which its gradient is multiplied

  // Calls visit(log), of one of two types: there is little to compile twice.
  template <typename Visit>
  __device__ __forceinline__ void with_log(const Visit& visit) const {
    parted(log, visit);
  }

  __device__ __forceinline__ static Term term(Real output, Real grad) { return {output, grad}; }
  __device__ __forceinline__ Term nothing() const { return {empty(), 0}; }
  // The output of what is excluded, and its gradient.
  __device__ __forceinline__ Real empty() const { return log ? -std::numeric_limits<Real>::infinity() : 0; }
  __device__ __forceinline__ static Real excluded() { return 0; }
  __device__ __forceinline__ Term reduced_nothing() const { return nothing(); }

  template <int kItems, int kPerItem, int kStep, typename LiveItems, typename Team>
  __device__ __forceinline__ State reduce(Term* terms, LiveItems live, const Team& team) const {
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
  __device__ __forceinline__ void add(State& state, const Term* terms) const {
    accumulate<1, kTerms, kTerms, 1>(state, terms);
  }

  template <int kItems, int kPerItem, int kStep, int kSums = tuning::kPartialSumsOfFew, typename LiveItems = int>
  __device__ __forceinline__ void accumulate(State& state, const Term* terms, LiveItems live = {kItems}) const {
    PartialSums<Real, kItems * kPerItem, kSums> sums;
    bool living = false;
    with_log([&](auto log) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item >= live) break;
#pragma unroll
        for (int k = 0; k < kPerItem; ++k) {
          const Term& term = terms[item * kStep + k];
          sums.add(item * kPerItem + k, log ? term.grad : term.grad * term.output);
          if constexpr (kFused) living |= term.output != empty();
        }
      }
    });
    state.sum += sums.total();
    if constexpr (kFused) state.living += living;
  }
  template <int kItems, int kColumns, typename Raw>
  __device__ __forceinline__ void accumulate_columns(State (&state)[kColumns], const Raw (&raw)[kItems]) const {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      Term terms[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) terms[i] = term(raw[i].source.widened(k), raw[i].grad.widened(k));
      accumulate<kItems, 1, 1>(state[k], terms);
    }
  }
  template <typename Team>
  __device__ __forceinline__ static void total(State& state, const Team& team) {
    state.sum = team.sum(state.sum);
    if constexpr (kFused) state.living = team.sum(state.living);
  }

  struct Finish {
    Real sum;
    Real scale;
    bool dead;  // the row got a constant

    __device__ __forceinline__ const Finish& of(int) const { return *this; }

    template <typename Told>
    __device__ __forceinline__ Real operator()(Term term, Told log) const {
      if constexpr (log)
        return (term.grad - Exponential<Result>::of(term.output, 0, std::false_type{}) * sum) * scale;
      else
        return term.output * (term.grad - sum) * scale;
    }
    template <typename Told>
    __device__ __forceinline__ Real again(Term term, Told log) const {
      return (*this)(term, log);
    }

    __device__ __forceinline__ static void settle(bool) {}
    // An excluded element comes to 0 unless the sum, or the scale, is no number.
    __device__ __forceinline__ bool taints() const { return dead || (sum - sum) * scale != 0; }
    __device__ __forceinline__ bool clears(bool included) const { return dead || !included; }
  };

  __device__ __forceinline__ Finish finish(const State& row) const {
    if constexpr (kFused)
      return {row.sum, scale, row.living == 0};
    else
      return {row.sum, scale, false};
  }
  __device__ __forceinline__ Finish finish(const State&, const State& row) const { return finish(row); }
  template <typename Told, typename... States>
  __device__ __forceinline__ Finish finish_told(Told, const States&... states) const {
    return finish(states...);
  }
};

}  // namespace ndsoftmax::cuda
