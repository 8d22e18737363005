// What may be fused into a softmax: a mask, a bias, a scale and a diagonal, each at run time. A thread asks for the
// neighbouring elements it works on and gets, for each, whether it is included and what is added to it. Masks and
// biases are read where they lie, through strides of their own; operations that fuse nothing get empty types instead.
#pragma once

#include "cuda/operation.cuh"

namespace ndsoftmax::cuda {

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

// Of one launch.
template <typename Operation, bool = Operation::kFused>
struct Fusing {};

template <typename Operation>
struct Fusing<Operation, true> {
  using Real = typename Operation::Real;

  const std::uint8_t* mask;  // null: none
  const std::uint8_t* mask_end;
  const void* bias;   // null: none
  bool bias_is_real;  // or else of the source's type
  bool mask_includes;
  bool causal;
  bool dead_rows_are_zero;
  Real scale;
  std::int64_t diagonal;
};

// What finishes a row or a column, once it is decided what a dead one gets.
template <typename Operation>
__device__ __forceinline__ typename Operation::Finish settled(typename Operation::Finish finish,
                                                              const Fusing<Operation>& fusing) {
  if constexpr (Operation::kFused) finish.settle(fusing.dead_rows_are_zero);
  return finish;
}

// Where the mask and the bias of neighbouring elements are: offsets of the first of them, and from one to the next.
struct Line {
  std::int64_t mask, mask_step, bias, bias_step;
};

// What a thread knows of N neighbouring elements beside their values.
template <typename Operation, int N, bool = Operation::kFused>
struct Extras {
  __device__ __forceinline__ static constexpr bool include(int) { return true; }
};

// load() only loads, so that the loads of several vectors are under way together; resolve() looks at what has come, and
// fetches element by element what no vector could. Both are given the same elements, those among the N whose bit in
// `touchable` is set.
template <typename Operation, int N>
class Extras<Operation, N, true> {
 public:
  using Real = typename Operation::Real;
  using Source = typename Operation::Source;
  static constexpr bool kForward = Operation::kDirection == Direction::forward;

  __device__ __forceinline__ bool include(int k) const { return included_ >> k & 1; }

  __device__ __forceinline__ void load(const Fusing<Operation>& fusing, const Line& line, unsigned touchable) {
    if (touchable == 0) return;
    if (fusing.mask != nullptr) {
      const std::uint8_t* const mask = fusing.mask + line.mask;
      if (is_single(line.mask_step)) {
        mask_[0] = *mask;
      } else if (in_words(fusing, line)) {
        const unsigned* const words = word_of(mask);
#pragma unroll
        for (int i = 0; i < kWords; ++i) mask_[i] = words[i];
        if (shift_of(mask) != 0) mask_[kWords] = words[kWords];
      }
    }
    if constexpr (kForward) {
      if (fusing.bias == nullptr) return;
      if (sizeof(Source) == 2 && fusing.bias_is_real)
        load_bias(static_cast<const Real*>(fusing.bias) + line.bias, line, touchable);
      else
        load_bias(static_cast<const Source*>(fusing.bias) + line.bias, line, touchable);
    }
  }

  __device__ __forceinline__ void resolve(const Fusing<Operation>& fusing, const Line& line, unsigned touchable) {
    included_ = touchable;
    if (touchable == 0) return;
    if (fusing.mask != nullptr) {
      const unsigned set = mask_bits(fusing, line, touchable);
      included_ &= fusing.mask_includes ? set : ~set;
    }
    if constexpr (kForward) {
      if (fusing.bias == nullptr) return;
      if (sizeof(Source) == 2 && fusing.bias_is_real)
        resolve_bias(static_cast<const Real*>(fusing.bias) + line.bias, line, touchable);
      else
        resolve_bias(static_cast<const Source*>(fusing.bias) + line.bias, line, touchable);
    }
  }

  __device__ __forceinline__ typename Operation::Term term(const Fusing<Operation>& fusing, Real source, Real grad,
                                                           int k) const {
    if (!include(k)) return Operation::nothing();
    if constexpr (kForward)
      return Operation::term(source * fusing.scale + bias_[k], 0);
    else
      return Operation::term(source, grad * fusing.scale);
  }

 private:
  static constexpr int kWords = N / 4;  // of a mask, and one more where it does not start with a word

  // Whether one value is all there is for the N elements.
  __device__ __forceinline__ static bool is_single(std::int64_t step) { return N == 1 || step == 0; }

  __device__ __forceinline__ static unsigned shift_of(const std::uint8_t* at) {
    return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(at) % 4 * 8);
  }
  __device__ __forceinline__ static const unsigned* word_of(const std::uint8_t* at) {
    return reinterpret_cast<const unsigned*>(reinterpret_cast<std::uintptr_t>(at) & ~std::uintptr_t{3});
  }

  // Whether the bytes are read as the words they lie in, which must not reach out of the mask.
  __device__ __forceinline__ static bool in_words(const Fusing<Operation>& fusing, const Line& line) {
    if (kWords == 0 || line.mask_step != 1) return false;
    const std::uint8_t* const mask = fusing.mask + line.mask;
    const auto* const first = reinterpret_cast<const std::uint8_t*>(word_of(mask));
    return first >= fusing.mask && first + 4 * (kWords + (shift_of(mask) != 0)) <= fusing.mask_end;
  }

  // Bit k: whether the mask of element k is not 0.
  __device__ __forceinline__ unsigned mask_bits(const Fusing<Operation>& fusing, const Line& line,
                                                unsigned touchable) const {
    const std::uint8_t* const mask = fusing.mask + line.mask;
    if (is_single(line.mask_step)) return mask_[0] != 0 ? ~0u : 0u;
    unsigned bits = 0;
    if (in_words(fusing, line)) {
      const unsigned shift = shift_of(mask);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const unsigned word = shift == 0 ? mask_[i] : __funnelshift_r(mask_[i], mask_[i + 1], shift);
        const unsigned ones = ((((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7) & 0x01010101u;
        bits |= (ones * 0x10204080u >> 28) << 4 * i;  // the product gathers four bits at its top
      }
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (touchable >> k & 1) bits |= static_cast<unsigned>(mask[k * line.mask_step] != 0) << k;
    }
    return bits;
  }

  template <typename T>
  __device__ __forceinline__ static bool is_vector(const T* at, const Line& line, unsigned touchable) {
    constexpr int kBytes = sizeof(T) * N < tuning::kVectorBytes ? sizeof(T) * N : tuning::kVectorBytes;
    return line.bias_step == 1 && touchable == (1u << N) - 1 && reinterpret_cast<std::uintptr_t>(at) % kBytes == 0;
  }

  template <typename T>
  __device__ __forceinline__ void load_bias(const T* at, const Line& line, unsigned touchable) {
    if (is_single(line.bias_step)) {
      bias_[0] = widen(*at);
    } else if (is_vector(at, line, touchable)) {
      const auto vector = Vec<T, N>::load(at);
#pragma unroll
      for (int k = 0; k < N; ++k) bias_[k] = vector.widened(k);
    }
  }

  template <typename T>
  __device__ __forceinline__ void resolve_bias(const T* at, const Line& line, unsigned touchable) {
    if (is_single(line.bias_step)) {
#pragma unroll
      for (int k = 1; k < N; ++k) bias_[k] = bias_[0];
    } else if (!is_vector(at, line, touchable)) {
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (touchable >> k & 1) bias_[k] = widen(at[k * line.bias_step]);
    }
  }

  unsigned included_ = 0;
  unsigned mask_[kWords + 1];
  Real bias_[kForward ? N : 1]{};
};

}  // namespace ndsoftmax::cuda
