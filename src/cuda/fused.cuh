// What may be fused into a softmax: a mask, a bias, a scale and a diagonal, each at run time. Masks and biases are read
// where they lie, through strides of their own. Terms of excluded elements become nothing(), which comes to the result
// of an excluded element by itself; only rows with a NaN, an infinity or nothing at all need another look (clean()).
#pragma once

#include "cuda/operation.cuh"
#include "host/work.hpp"

namespace ndsoftmax::cuda {

template <typename Operation>
inline constexpr bool kIsBackward = Operation::kDirection == Direction::backward;

// Of one launch: the operation, and what it fuses.
template <typename Operation, bool = Operation::kFused>
struct Fusing {
  Operation operation;
};

template <typename Operation>
struct Fusing<Operation, true> {
  using Real = typename Operation::Real;

  Operation operation;
  const std::uint8_t *mask, *mask_end;  // null: none
  const std::uint8_t *bias, *bias_end;  // null: none
  int mask_step, bias_step;             // from a neighbour to the next; 0: all have one
  bool cut;                             // lines may end before what a thread has of them
  bool masks_evenly;                    // all that is fused is a scale and a mask, of which neighbours have the same
  bool masks_neighbours;                // all that is fused is a mask, of neighbours, and a scale, forward positive
  bool masks_vectors;                   // the same, and rows are held as vectors; by a warp, masks begin where those do
  bool biases_vectors;                  // all that is fused is a scale and a bias, of the source's type, both vectors
  bool aligned;                         // one of these two, and in every row, and beside it, vectors are whole
  bool bias_is_real;                    // or else of the source's type
  bool causal;
  bool dead_rows_are_zero;
  unsigned mask_flip;  // 0: excluded where the mask is not 0. Excluded::kAll: where it is
  Real scale;
  std::int64_t diagonal;

  __device__ __forceinline__ bool excludes(std::uint8_t mask_of_element) const {
    return (mask_of_element != 0) == (mask_flip == 0);
  }
};

// What finishes a row or a column, once it is decided what a dead one gets.
template <typename Operation>
__device__ __forceinline__ typename Operation::Finish settled(typename Operation::Finish finish,
                                                              const Fusing<Operation>& fusing) {
  if constexpr (Operation::kFused) finish.settle(fusing.dead_rows_are_zero);
  return finish;
}

// Which of N neighbouring elements are excluded: the highest bit of a byte each.
template <int N>
struct Excluded {
  static constexpr int kWords = (N + 3) / 4;
  static constexpr unsigned kAll = 0x80808080u;

  unsigned words[kWords];

  __device__ __forceinline__ bool operator[](int k) const { return (words[k / 4] >> (k % 4 * 8) & 0x80u) != 0; }
  __device__ __forceinline__ void add(int k) { words[k / 4] |= 0x80u << k % 4 * 8; }
  __device__ __forceinline__ bool any() const {
    unsigned any = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) any |= words[i];
    return (any & kAll) != 0;
  }
  // Excludes all but those from the k-th for `begin` to the one before the k-th for `end`.
  __device__ __forceinline__ void keep(int begin, int end) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] |= ~from(begin - 4 * i) | from(end - 4 * i);
  }
  __device__ __forceinline__ static Excluded filled(unsigned word) {
    Excluded excluded;
#pragma unroll
    for (unsigned& each : excluded.words) each = word;
    return excluded;
  }

 private:
  // The bits of a word from its k-th byte on.
  __device__ __forceinline__ static unsigned from(int k) { return shifted_left(~0u, k > 0 ? 8 * k : 0); }
};

// Bytes of a mask, as they were loaded: the words they lie in, of which the first may begin before them.
template <int N>
struct MaskBytes {
  unsigned words[N / 4 + 1];

  // How many bits the first of these bytes is away from the beginning of its word.
  __device__ __forceinline__ static unsigned shift_of(const std::uint8_t* at) {
    return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(at) % 4 * 8);
  }

  __device__ __forceinline__ void load(const std::uint8_t* at, unsigned shift) {
    const auto* const from = reinterpret_cast<const unsigned*>(at - shift / 8);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) words[i] = from[i];
    words[N / 4] = shift != 0 ? from[N / 4] : 0;
  }

  // Of a vector of the mask.
  __device__ __forceinline__ void load_aligned(const std::uint8_t* at) {
    if constexpr (N == 8) {
      const uint2 both = *reinterpret_cast<const uint2*>(at);
      words[0] = both.x, words[1] = both.y;
    } else if constexpr (N == 4) {
      words[0] = *reinterpret_cast<const unsigned*>(at);
    }
  }

  // The same byte by byte: where words would reach out of the mask, or hold other elements. Those that has(k) only.
  template <typename Has>
  __device__ __forceinline__ void gather(const std::uint8_t* at, std::int64_t step, unsigned shift, const Has& has) {
    constexpr int kTop = (N - 1) / 4;
#pragma unroll
    for (unsigned& word : words) word = 0;
    if constexpr (N < 4) {
#pragma unroll
      for (int k = 0; k < N; ++k, at += step) words[0] |= (has(k) ? static_cast<unsigned>(*at) : 0) << 8 * k;
    } else {
#pragma unroll 1
      for (int k = 0; k < N; ++k, at += step) {
#pragma unroll
        for (int i = 0; i < kTop; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 8);
        words[kTop] = words[kTop] >> 8 | (has(k) ? static_cast<unsigned>(*at) : 0) << 24;
      }
      if (shift == 0) return;
#pragma unroll
      for (int i = N / 4; i >= 0; --i) words[i] = words[i] << shift | (i > 0 ? words[i - 1] >> (32 - shift) : 0);
    }
  }

  template <typename Shift>  // or nullptr_t, after load_aligned()
  __device__ __forceinline__ Excluded<N> excluded(Shift shift, unsigned flip) const {
    Excluded<N> excluded;
#pragma unroll
    for (int i = 0; i < Excluded<N>::kWords; ++i) {
      unsigned word = words[i];
      if constexpr (N >= 4 && std::is_integral_v<Shift>) word = __funnelshift_r(word, words[i + 1], shift);
      excluded.words[i] = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) ^ flip;
    }
    return excluded;
  }
};

// Puts `value` in the place of excluded elements: those from the `first` of kMany on.
template <typename T, int N, int kMany>
__device__ __forceinline__ void replace(Vec<T, N>& vector, const Excluded<kMany>& excluded, Accumulator<T> value,
                                        int first = 0) {
  const auto filled = Vec<T, N>::filled(value);
  if constexpr (Vec<T, N>::kPaired) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int k = first + 2 * i;
      const unsigned pair = sign_of_bytes(excluded.words[k / 4], k % 4 == 0 ? 0x9988u : 0xbbaau);
      vector.words[i] = (vector.words[i] & ~pair) | (filled.words[i] & pair);
    }
  } else {
    constexpr int kWords = static_cast<int>(sizeof(vector.words) / 4) / N;  // of an element
#pragma unroll
    for (int i = 0; i < kWords * N; ++i)
      if (excluded[first + i / kWords]) vector.words[i] = filled.words[i];
  }
}

// What is loaded for N neighbouring elements beside their values.
template <typename Operation, int N, bool = Operation::kFused>
struct Extras {};

template <typename Operation, int N>
struct Extras<Operation, N, true> {
  MaskBytes<N> mask;
  Excluded<N> excluded;
  Vec<typename Operation::Source, N> bias;  // where Fusing::biases_vectors
};

// Where masks and biases of a line of elements lie, some of whose neighbours a thread works on at a time: of a row, at
// most. It has `reach` elements, before the diagonal. kShifts: masks that are all there is of them may begin anywhere.
template <typename Operation, typename Index, int N, bool kShifts = true>
class FusedLine {
 public:
  using Source = typename Operation::Source;
  using Real = typename Operation::Real;
  using Term = typename Operation::Term;
  using ExtrasOf = Extras<Operation, N>;
  static constexpr bool kForward = !kIsBackward<Operation>;

  FusedLine() = default;

  // `phase`: elements before the line with which its neighbours begin.
  __device__ __forceinline__ FusedLine(const Fusing<Operation>& fusing, std::int64_t mask, std::int64_t bias,
                                       Index reach, int phase = 0)
      : fusing_(&fusing), mask_(fusing.mask + mask), reach_(reach) {
    if (Operation::kAligned || (Operation::kMasked && N == 1)) return;  // nothing else is asked for
    if (Operation::kBiased || (kForward && fusing.bias != nullptr)) bias_ = fusing.bias + bias * bias_bytes();
    if (Operation::kBiased) return;
    if (N >= 4 && !Operation::kMasked && fusing.aligned) {
      vectors_only_ = masks_aligned_ = true;
      return;
    }
    vectors_only_ = N >= 4 && all_are_vectors(phase);
    if (!vectors_only_)
      find_vectors(phase);
    else if (Operation::kMasked)
      mask_words_ = Range{-N, reach_ - 1};
  }

  // To another line of as many elements, whose mask and bias lie so many elements further.
  __device__ __forceinline__ void step(std::int64_t mask, std::int64_t bias) {
    mask_ += mask;
    if (kForward && fusing_->bias != nullptr) bias_ += bias * bias_bytes();
    find_vectors(0);
  }

  __device__ __forceinline__ Index reach() const { return reach_; }
  // Whether all that is fused is a mask, or a bias, that can be read as vectors: of masks, words.
  __device__ __forceinline__ bool vectors_only() const {
    return Operation::kAligned || Operation::kBiased || vectors_only_;
  }
  __device__ __forceinline__ bool masks_vectors() const {
    return Operation::kMasked || (!Operation::kBiased && fusing_->masks_vectors);
  }
  // Then: whether masks are where vectors are.
  __device__ __forceinline__ bool masks_are_aligned() const {
    return Operation::kAligned || !kShifts || masks_aligned_;
  }
  __device__ __forceinline__ bool masks_neighbours() const { return fusing_->masks_neighbours; }
  __device__ __forceinline__ bool biases_vectors() const {
    return Operation::kBiased || (kForward && fusing_->biases_vectors);
  }
  __device__ __forceinline__ const std::uint8_t* mask() const { return mask_; }
  __device__ __forceinline__ const Source* bias() const { return reinterpret_cast<const Source*>(bias_); }

  // Only loads, so that the loads of several vectors are under way together: of the neighbours that begin at
  // first + further. (Apart, so that those of constants share an address.)
  __device__ __forceinline__ void load(Index first, Index further, ExtrasOf& extras) const {
    const Index at = first + further;
    if constexpr (N == 1) {
      extras.mask.words[0] =
          fusing_->mask != nullptr && has(at) ? mask_[static_cast<std::int64_t>(at) * fusing_->mask_step] : 0;
      return;
    }
    if (fusing_->mask == nullptr) return;
    if (N >= 4 && mask_words_.has(at))
      extras.mask.load(mask_ + first + further, shift_);
    else if (at >= reach_)
      return;
    else if (fusing_->mask_step == 0)
      extras.mask.words[0] = *mask_;
    else
      extras.mask.gather(mask_ + static_cast<std::int64_t>(at) * fusing_->mask_step, fusing_->mask_step, shift_,
                         [&](int k) { return has(at + k); });
  }

  // The same of single elements that lie `step` apart, of which those before `end` exist, and resolve() after it.
  template <typename Raw, int kItems>
  __device__ __forceinline__ void load(Index first, Index step, Index end, Raw (&raw)[kItems]) const {
    const unsigned excluded = fusing_->mask_flip == 0 ? 1 : 0;  // as a mask says it
#pragma unroll
    for (int item = 0; item < kItems; ++item)
      raw[item].extras.mask.words[0] = first + item * step < end ? 1 - excluded : excluded;
    if (fusing_->mask == nullptr) return;
    const std::uint8_t* at = mask_ + static_cast<std::int64_t>(first) * fusing_->mask_step;
    const std::int64_t apart = static_cast<std::int64_t>(step) * fusing_->mask_step;
#pragma unroll
    for (int item = 0; item < kItems; ++item, at += apart)
      if (first + item * step < end) raw[item].extras.mask.words[0] = *at;
  }
  __device__ __forceinline__ void resolve(ExtrasOf& extras) const {
    using ExcludedOf = Excluded<N>;
    extras.excluded =
        ExcludedOf::filled((extras.mask.words[0] != 0) == (fusing_->mask_flip == 0) ? ExcludedOf::kAll : 0);
  }

  // Where Fusing::masks_neighbours, which of kItems times kWord elements are excluded: kWord neighbours at first,
  // first + step, … Of items 1 to kFull - 1, all exist in any line, and of item 0 those that are not before it; those
  // that do not exist are excluded.
  template <int kItems, int kWord, int kFull>
  __device__ __forceinline__ Excluded<kItems * kWord> excluded(Index first, Index step, Index end) const {
    if (kWord == 2 && reinterpret_cast<std::uintptr_t>(mask_ + first) % 2 == 0)
      return excluded<kItems, kWord, kFull, true>(first, step, end);
    return excluded<kItems, kWord, kFull, false>(first, step, end);
  }

  // Whatever is fused, the same of any such items, a bit each. (Those before the line are nobody's.)
  template <int kItems, int kWord>
  __device__ __forceinline__ unsigned any_excluded(Index first, Index step) const {
    static_assert(kItems * kWord <= 32);
    unsigned excluded = 0;
    each_of<kItems, kWord>(first, step, [&](int i, Index element) {
      if (element >= reach_) excluded |= 1u << i;
    });
    if (fusing_->mask == nullptr) return excluded;
    in_groups<kItems * kWord>([&](auto begin, auto end) {
      std::uint8_t mask[end - begin];
      each_of<kItems, kWord, begin, end>(first, step, [&](int i, Index element) {
        mask[i - begin] = has(element) ? mask_[static_cast<std::int64_t>(element) * fusing_->mask_step] : 0;
      });
#pragma unroll
      for (int i = begin; i < end; ++i)
        if (fusing_->excludes(mask[i - begin])) excluded |= 1u << i;
    });
    return excluded;
  }
  // And their terms().
  template <int kItems, int kWord>
  __device__ __forceinline__ void any_terms(Index first, Index step, Term* terms) const {
    const auto add = [&](const auto* biases) {
      in_groups<kItems * kWord>([&](auto begin, auto end) {
        Real bias[end - begin]{};
        each_of<kItems, kWord, begin, end>(first, step, [&](int i, Index element) {
          if (has(element)) bias[i - begin] = widen(biases[static_cast<std::int64_t>(element) * fusing_->bias_step]);
        });
#pragma unroll
        for (int i = begin; i < end; ++i) terms[i] = terms[i] * fusing_->scale + bias[i - begin];
        keep_order();  // or the compiler would load all, and have no registers
      });
    };
    if (fusing_->bias == nullptr) {
#pragma unroll
      for (int i = 0; i < kItems * kWord; ++i) terms[i] *= fusing_->scale;
    } else if (with_real_bias()) {
      add(reinterpret_cast<const Real*>(bias_));
    } else {
      add(reinterpret_cast<const Source*>(bias_));
    }
    if (fusing_->mask != nullptr) {
      const unsigned excluded = any_excluded<kItems, kWord>(first, step);
#pragma unroll
      for (int i = 0; i < kItems * kWord; ++i)
        if ((excluded >> i & 1) != 0) terms[i] = fusing_->operation.nothing();
    } else if (fusing_->causal) {
      each_of<kItems, kWord>(first, step, [&](int i, Index element) {
        if (element >= reach_) terms[i] = fusing_->operation.nothing();
      });
    }
  }

  // The same where Operation::kBiased. Of items 1 to kFull - 1, all exist in any line, and of item 0 those that are not
  // before it; for a line that does not exist, another's bias is read.
  template <int kItems, int kWord, int kFull>
  __device__ __forceinline__ void biased_word_terms(Index first, Index step, Term* terms) const {
    if (kWord > 1 && reinterpret_cast<std::uintptr_t>(bias() + first) % (kWord * sizeof(Source)) == 0)
      biased_word_terms<kItems, kWord, kFull, true>(first, step, terms);
    else
      biased_word_terms<kItems, kWord, kFull, false>(first, step, terms);
  }

  // Once, after load(): looks at the mask and the diagonal.
  __device__ __forceinline__ void resolve(Index first, ExtrasOf& extras) const {
    using ExcludedOf = Excluded<N>;
    if (fusing_->mask == nullptr)
      extras.excluded = ExcludedOf::filled(0);
    else if (N == 1 || fusing_->mask_step == 0)
      extras.excluded =
          ExcludedOf::filled((extras.mask.words[0] != 0) == (fusing_->mask_flip == 0) ? ExcludedOf::kAll : 0);
    else
      extras.excluded = extras.mask.excluded(shift_, fusing_->mask_flip);
    if constexpr (N == 1) {
      if (!has(first)) extras.excluded = ExcludedOf::filled(ExcludedOf::kAll);
      return;
    }
    if (!fusing_->cut || (first >= 0 && first + N <= reach_)) return;
    if (first >= reach_) {
      extras.excluded = ExcludedOf::filled(ExcludedOf::kAll);
    } else {
      extras.excluded.keep(begin_of(first), end_of(first));
    }
  }

  // Forward, of the elements with these values. The bias is loaded only here: others hide the time that takes, and what
  // is held has the registers.
  template <typename Values>
  __device__ __forceinline__ void terms(Index first, const ExtrasOf& extras, const Values& value, Term* terms) const {
    if constexpr (N == 1) {  // without a branch, as there may be many
      Real bias = 0;
      if ((fusing_->bias != nullptr) & !extras.excluded[0]) bias = bias_of(first);
      terms[0] = value(0) * fusing_->scale + bias;
    } else if (fusing_->bias == nullptr) {
#pragma unroll
      for (int k = 0; k < N; ++k) terms[k] = value(k) * fusing_->scale;
    } else {
      Vec<Real, N> bias;
      if (bias_vectors_.has(first))
        bias = with_real_bias() ? bias_vector<Real>(first) : bias_vector<Source>(first);
      else
        bias = gathered_bias(first);
#pragma unroll
      for (int k = 0; k < N; ++k) terms[k] = value(k) * fusing_->scale + bias.widened(k);
    }
    if (N == 1 || extras.excluded.any())
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (extras.excluded[k]) terms[k] = fusing_->operation.nothing();
  }

  // Where Fusing::masks_vectors. Of what does not exist:
  __device__ __forceinline__ void exclude_all(ExtrasOf& extras) const {
#pragma unroll
    for (unsigned& word : extras.mask.words) word = fusing_->mask_flip != 0 ? 0 : ~0u;
  }
  // Whether words of the mask can be read for the neighbours that begin here. `inside`: the line begins before them.
  __device__ __forceinline__ bool has_words(Index first, bool inside = false) const {
    return !Operation::kMasked || ((inside || first >= mask_words_.first) && first <= mask_words_.last);
  }
  // load() of those. kAligned: masks_are_aligned().
  template <bool kAligned>
  __device__ __forceinline__ void load_words(const std::uint8_t* at, ExtrasOf& extras) const {
    if constexpr (kAligned)
      extras.mask.load_aligned(at);
    else
      extras.mask.load(at, shift_);
  }
  // resolve(); unless `whole`, some of the neighbours are none of the line's. Only now of those that have no words, as
  // these are rare.
  __device__ __forceinline__ void resolve_masked(Index first, bool whole, ExtrasOf& extras) const {
    if constexpr (Operation::kAligned || !kShifts) {
      extras.excluded = extras.mask.excluded(nullptr, fusing_->mask_flip);
    } else {
      if (__builtin_expect(!has_words(first) && first < reach_, 0))
        extras.mask.gather(mask_ + first, 1, shift_, [&](int k) { return has(first + k); });
      extras.excluded = extras.mask.excluded(shift_, fusing_->mask_flip);
      if (!whole) extras.excluded.keep(begin_of(first), end_of(first));
    }
  }
  // And terms().
  __device__ __forceinline__ void masked_terms(const ExtrasOf& extras, const Vec<Source, N>& source,
                                               Term* terms) const {
    Vec<Source, N> included = source;
    replace(included, extras.excluded, fusing_->operation.nothing());
#pragma unroll
    for (int k = 0; k < N; ++k) terms[k] = included.widened(k) * (Operation::kMasked ? 1 : fusing_->scale);
  }

  // Where Fusing::biases_vectors, and vectors_only(): resolve() and terms().
  __device__ __forceinline__ void biased_terms(Index first, bool whole, const ExtrasOf& extras,
                                               const Vec<Source, N>& source, Term* terms) const {
#pragma unroll
    for (int k = 0; k < N; ++k) terms[k] = source.widened(k) * fusing_->scale + extras.bias.widened(k);
    if (whole) return;
    const int begin = begin_of(first), end = end_of(first);
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k < begin || k >= end) terms[k] = fusing_->operation.nothing();
  }

  // Puts terms in the place of what was loaded. Forward, 16 bits would round a bias and a scale: there, only nothing()
  // is put, and the scale, which must be positive, is left to the operation (leave_scale()).
  __device__ __forceinline__ void apply(Index first, const ExtrasOf& extras, Vec<Source, N>& source,
                                        Vec<Source, N>& grad) const {
    if constexpr (!kForward) {
      if (!extras.excluded.any()) return;
      replace(source, extras.excluded, fusing_->operation.nothing().output);
      replace(grad, extras.excluded, fusing_->operation.nothing().grad);
    } else if constexpr (sizeof(Source) == 2) {
      if (extras.excluded.any()) replace(source, extras.excluded, fusing_->operation.nothing());
    } else {
      Term all[N];
      terms(first, extras, [&](int k) { return source.widened(k); }, all);
      source = Vec<Source, N>::narrowed([&](int k) { return all[k]; });
    }
  }

  // Looks again.
  __device__ __forceinline__ bool includes(Index element) const {
    if (element >= reach_) return false;
    return fusing_->mask == nullptr ||
           !fusing_->excludes(mask_[static_cast<std::int64_t>(element) * fusing_->mask_step]);
  }

 private:
  // Of elements that may be the first of N.
  struct Range {
    Index first = -N, last = std::numeric_limits<Index>::max();
    __device__ __forceinline__ bool has(Index element) const { return element >= first && element <= last; }
  };
  __device__ __forceinline__ static Range range(std::int64_t first, std::int64_t last) {
    constexpr std::int64_t kLast = std::numeric_limits<Index>::max();
    return {static_cast<Index>(first > -N ? (first < kLast ? first : kLast) : -N),
            static_cast<Index>(last > -N ? (last < kLast ? last : kLast) : -N - 1)};
  }

  // Calls visit(begin, end), constants, for as many of kElements at a time as are loaded together.
  template <int kElements, int kBegin = 0, typename Visit>
  __device__ __forceinline__ static void in_groups(const Visit& visit) {
    constexpr int kEnd = std::min(kBegin + tuning::kStagedMasks, kElements);
    visit(std::integral_constant<int, kBegin>{}, std::integral_constant<int, kEnd>{});
    if constexpr (kEnd < kElements) in_groups<kElements, kEnd>(visit);
  }
  // Calls visit(i, element) for those of kItems times kWord elements.
  template <int kItems, int kWord, int kBegin = 0, int kEnd = kItems * kWord, typename Visit>
  __device__ __forceinline__ static void each_of(Index first, Index step, const Visit& visit) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) visit(i, first + i / kWord * step + i % kWord);
  }

  // `kPairs`: two neighbours of the mask may be loaded at once.
  template <int kItems, int kWord, int kFull, bool kPairs>
  __device__ __forceinline__ Excluded<kItems * kWord> excluded(Index first, Index step, Index end) const {
    constexpr int kSome = tuning::kStagedMasks, kElements = kItems * kWord;
    static_assert(kSome % 4 == 0);
    const std::uint8_t* const from = mask_ + first;
    const unsigned none = fusing_->mask_flip == 0 ? 1 : 0;  // as a mask says it
    Excluded<kElements> excluded;
#pragma unroll
    for (int group = 0; group < kElements; group += kSome) {
      unsigned mask[kSome]{};
#pragma unroll
      for (int i = 0; i < kSome && group + i < kElements; ++i) {
        const int item = (group + i) / kWord, k = (group + i) % kWord;
        const bool pair = kPairs && item > 0 && item < kFull;
        if (pair && k > 0) continue;
        const Index element = first + item * step + k;
        const bool exists = (item < kFull || element < end) && (item > 0 || k == kWord - 1 || element >= 0);
        const std::uint8_t* const at = from + std::int64_t{item} * step + k;
        mask[i] = !exists ? none : pair ? *reinterpret_cast<const unsigned short*>(at) : *at;
      }
#pragma unroll
      for (int i = 0; i < kSome && group + i < kElements; i += 4) {
        MaskBytes<4> bytes;
        bytes.words[0] = mask[i] | mask[i + 1] << 8 | mask[i + 2] << 16 | mask[i + 3] << 24;
        excluded.words[(group + i) / 4] = bytes.excluded(nullptr, fusing_->mask_flip).words[0];
      }
    }
    return excluded;
  }

  // `kWords`: neighbours of the bias can be loaded at once.
  template <int kItems, int kWord, int kFull, bool kWords>
  __device__ __forceinline__ void biased_word_terms(Index first, Index step, Term* terms) const {
    const Source* const from = bias() + first;
    in_groups<kItems>([&](auto begin, auto end) {
      Vec<Source, kWord> bias[end - begin]{};
#pragma unroll
      for (int item = begin; item < end; ++item) {
        const Index at = first + item * step;
        if (kWords && (item > 0 || first >= 0) && (item < kFull || at + kWord <= reach_)) {
          bias[item - begin] = Vec<Source, kWord>::load(from + item * step);
          continue;
        }
#pragma unroll
        for (int k = 0; k < kWord; ++k)
          if ((item > 0 || at + k >= 0) && (item < kFull || at + k < reach_))
            bias[item - begin].insert(k, from + item * step + k);
      }
#pragma unroll
      for (int i = begin * kWord; i < end * kWord; ++i)
        terms[i] = terms[i] * fusing_->scale + bias[i / kWord - begin].widened(i % kWord);
      keep_order();
    });
  }

  // Of N neighbours that begin at `first`, the line has those from begin_of() until end_of().
  __device__ __forceinline__ static int begin_of(Index first) { return first < 0 ? static_cast<int>(-first) : 0; }
  __device__ __forceinline__ int end_of(Index first) const {
    return reach_ - first < N ? static_cast<int>(reach_ - first) : N;
  }

  // Where Fusing says that vectors are all there is of them, whether this line has none that reaches out of the mask or
  // the bias.
  __device__ __forceinline__ bool all_are_vectors(int phase) {
    const std::int64_t end = work::vectors_in_row<Index>(reach_, N, phase) * N - phase;
    if (kShifts && masks_vectors()) {
      const std::uint8_t* const from = mask_ - phase;
      shift_ = MaskBytes<N>::shift_of(from);
      const int before = static_cast<int>(shift_ / 8), more = shift_ != 0 ? 4 - before : 0;
      const bool inside = from - before >= fusing_->mask && mask_ + end + more <= fusing_->mask_end;
      masks_aligned_ = inside && reinterpret_cast<std::uintptr_t>(from) % N == 0;
      return inside;
    }
    if (!biases_vectors()) return false;
    return bias_ - phase * bias_bytes() >= fusing_->bias && bias_ + end * bias_bytes() <= fusing_->bias_end;
  }

  // Where words of the mask, and vectors of the bias, may be read.
  __device__ __forceinline__ void find_vectors(int phase) {
    const Fusing<Operation>& fusing = *fusing_;
    if (N >= 4 && fusing.mask != nullptr && fusing.mask_step == 1) {
      shift_ = MaskBytes<N>::shift_of(mask_ - phase);
      const int before = static_cast<int>(shift_ / 8), more = shift_ != 0 ? 4 - before : 0;
      mask_words_ = Range{-N, reach_ - 1};
      if (fusing.cut || shift_ != 0) {
        const std::int64_t last = fusing.mask_end - mask_ - N - more;
        mask_words_ = range(fusing.mask - mask_ + before, last < reach_ ? last : reach_ - 1);
      }
    } else {
      mask_words_ = Range{0, -1};
    }
    if (!kForward || fusing.bias == nullptr) return;
    const int bytes = bias_bytes(), log2_bytes = bytes == 8 ? 3 : bytes / 2;
    const int unit = bytes * N < tuning::kVectorBytes ? bytes * N : tuning::kVectorBytes;
    bias_vectors_ = Range{};
    if (fusing.bias_step != 1 || reinterpret_cast<std::uintptr_t>(bias_ - phase * bytes) % unit != 0)
      bias_vectors_ = Range{0, -1};
    else if (fusing.cut) {  // what lies past the line is not asked for by its alignment
      const std::int64_t last = ((fusing.bias_end - bias_) >> log2_bytes) - N;
      bias_vectors_ = range((fusing.bias - bias_) >> log2_bytes, last < reach_ ? last : reach_ - 1);
    }
  }

  __device__ __forceinline__ int bias_bytes() const { return with_real_bias() ? sizeof(Real) : sizeof(Source); }
  __device__ __forceinline__ bool has(Index element) const {
    using Unsigned = std::make_unsigned_t<Index>;
    return static_cast<Unsigned>(element) < static_cast<Unsigned>(reach_);
  }
  __device__ __forceinline__ bool with_real_bias() const {
    return sizeof(Source) != 2 || (!Operation::kBiased && fusing_->bias_is_real);
  }

  __device__ __forceinline__ Real bias_of(Index element) const {
    const std::int64_t at = static_cast<std::int64_t>(element) * fusing_->bias_step;
    return with_real_bias() ? reinterpret_cast<const Real*>(bias_)[at]
                            : widen(reinterpret_cast<const Source*>(bias_)[at]);
  }
  template <typename T>
  __device__ __forceinline__ Vec<Real, N> bias_vector(Index first) const {
    const auto bias = Vec<T, N>::load(reinterpret_cast<const T*>(bias_) + first);
    return Vec<Real, N>::narrowed([&](int k) { return bias.widened(k); });
  }
  __device__ __forceinline__ Vec<Real, N> gathered_bias(Index first) const {
    if (fusing_->bias_step == 0) return Vec<Real, N>::filled(bias_of(0));
    auto bias = Vec<Real, N>::filled(0);
#pragma unroll 1
    for (int k = 0; k < N; ++k) {
      const Real next = has(first + k) ? bias_of(first + k) : 0;
      bias.push(true, &next);
    }
    return bias;
  }

  const Fusing<Operation>* fusing_;
  const std::uint8_t* mask_;  // of the first element
  const std::uint8_t* bias_;
  Range mask_words_{0, -1}, bias_vectors_{0, -1};  // where words of the mask, and vectors of the bias, can be read
  unsigned shift_ = 0;                             // of these words
  bool vectors_only_ = false, masks_aligned_ = false;
  Index reach_;
};

// Or nothing.
struct NothingFused {};
template <typename Operation, typename Index, int N, bool kShifts = true>
using LineIfFused = std::conditional_t<Operation::kFused, FusedLine<Operation, Index, N, kShifts>, NothingFused>;

}  // namespace ndsoftmax::cuda
