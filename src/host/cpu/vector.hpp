// One vector register as a type: GCC and Clang vector extensions, so that the kernels are written once for every
// instruction set. This file, convert.hpp and kernels.cpp are compiled once per instruction set into a namespace of
// their own, and use no inline function from outside it: the linker keeps one copy of such a function for the whole
// program, and it might keep the one that only the newest machines can run.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <typename Real>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Real));

template <typename Element, int lanes>
struct VectorOf {
  typedef Element type __attribute__((vector_size(sizeof(Element) * lanes)));
};
template <typename Element, int lanes>
using VectorN = typename VectorOf<Element, lanes>::type;

template <typename Real>
using Vector = VectorN<Real, kLanes<Real>>;

template <typename Real>
using IntegerOf = std::conditional_t<sizeof(Real) == 4, std::int32_t, std::int64_t>;

template <typename Real>
using Integers = Vector<IntegerOf<Real>>;

template <typename Real>
inline constexpr Real kInfinity = static_cast<Real>(__builtin_inff());

template <typename Real>
Vector<Real> broadcast(Real value) {
  return value - Vector<Real>{};  // subtracting +0 is exact for every value, -0 included
}

template <typename Register>
struct Unaligned {
  typedef Register type __attribute__((aligned(1), may_alias));
};

template <typename Register, typename Element>
Register load(const Element* from) {
  return *reinterpret_cast<const typename Unaligned<Register>::type*>(from);
}

template <typename Element, typename Register>
void store(Element* to, Register value) {
  *reinterpret_cast<typename Unaligned<Register>::type*>(to) = value;
}

// Past the caches: `to` must be aligned to the register's size, and fence() must follow.
inline constexpr bool kCanStream = kVectorBytes >= 32;
template <typename Element, typename Register>
void stream([[maybe_unused]] Element* to, [[maybe_unused]] Register value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Register) == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#endif
#if defined(__AVX2__)
  static_assert(sizeof(Register) >= 32);
  if constexpr (sizeof(Register) == 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#endif
}

// What was streamed is seen by other threads before what is stored from here on.
inline void fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// The first `bytes` of at most 16, the others zero; not one more is read. In registers: a vector that is put together
// in memory waits until all its pieces have arrived there. (Rows of a size take the same branches, which are
// predicted.)
using SixteenBytes = VectorN<std::uint64_t, 2>;
[[gnu::noinline]] inline SixteenBytes load_bytes(const void* memory, int bytes) {
  const auto* from = static_cast<const unsigned char*>(memory);
  const auto piece = [from]<typename Piece>(int at, Piece value) {
    __builtin_memcpy(&value, from + at, sizeof(Piece));
    return std::uint64_t{value};
  };
  const auto eight = [&](int at) { return piece(at, std::uint64_t{}); };
  const auto four = [&](int at) { return piece(at, std::uint32_t{}); };
  if (bytes == 16) return SixteenBytes{eight(0), eight(8)};
  if (bytes > 8) return SixteenBytes{eight(0), eight(bytes - 8) >> 8 * (16 - bytes)};
  if (bytes == 8) return SixteenBytes{eight(0), 0};
  if (bytes >= 4) return SixteenBytes{four(0) | four(bytes - 4) << 8 * (bytes - 4), 0};
  if (bytes >= 2) return SixteenBytes{piece(0, std::uint16_t{}), 0};
  return SixteenBytes{0, 0};
}

// The first `count` elements, fewer than there are; the others are zero and are not touched in memory.
template <typename Register, typename Element>
Register load_first(const Element* from, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(Register) == 64 && sizeof(Element) == 8)
    return (Register)_mm512_maskz_loadu_epi64(static_cast<__mmask8>((1u << count) - 1), from);
  if constexpr (sizeof(Register) == 64 && sizeof(Element) == 4)
    return (Register)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), from);
  if constexpr (sizeof(Register) == 32 && sizeof(Element) == 2)
    return (Register)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from);
#endif
  const int bytes = count * static_cast<int>(sizeof(Element));
  if constexpr (sizeof(Register) == 32) {
    const int half = 16 / static_cast<int>(sizeof(Element)), lower = bytes < 16 ? bytes : 16;
    const auto low = load_bytes(from, lower), high = load_bytes(from + (count < half ? count : half), bytes - lower);
    return (Register)VectorN<std::uint64_t, 4>{low[0], low[1], high[0], high[1]};
  } else if constexpr (sizeof(Register) == 16) {
    return (Register)load_bytes(from, bytes);
  } else {
    static_assert(sizeof(Register) == 8 || sizeof(Register) == 64);
    Element lanes[sizeof(Register) / sizeof(Element)] = {};
    for (int lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
    return load<Register>(lanes);
  }
}

// The same, where as many elements as a vector has may be read before `from`: what is loaded ends with the last of
// them. The others are undefined.
template <typename Register, typename Element>
Register load_last(const Element* from, int count) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  constexpr int lanes = sizeof(Register) / sizeof(Element);
  const auto ends = load<Register>(from + count - lanes);
  if constexpr (sizeof(Register) == 32 && sizeof(Element) == 4) {
    const VectorN<std::int32_t, 8> last = {0, 1, 2, 3, 4, 5, 6, 7};
    return (Register)_mm256_permutevar8x32_epi32((__m256i)ends, (__m256i)(last + (lanes - count)));
  }
  if constexpr (sizeof(Register) == 16 && sizeof(Element) == 2) {
    const VectorN<std::int8_t, 16> last = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Register)_mm_shuffle_epi8((__m128i)ends, (__m128i)(last + static_cast<std::int8_t>(2 * (lanes - count))));
  }
#endif
  return load_first<Register>(from, count);
}

// In pieces of 8, 4, 2 and 1 elements, as the digits of `count` say.
template <typename Element, typename Register>
[[gnu::noinline]] void store_pieces(Element* to, Register value, int count) {
  Element lanes[sizeof(Register) / sizeof(Element)];
  store(lanes, value);
  int stored = 0;
  const auto piece = [&]<int elements>(std::integral_constant<int, elements>) {
    if constexpr (elements * sizeof(Element) < sizeof(Register)) {
      if ((count & elements) == 0) return;
      __builtin_memcpy(to + stored, lanes + stored, elements * sizeof(Element));
      stored += elements;
    }
  };
  piece(std::integral_constant<int, 8>());
  piece(std::integral_constant<int, 4>());
  piece(std::integral_constant<int, 2>());
  piece(std::integral_constant<int, 1>());
}

template <typename Element, typename Register>
void store_first(Element* to, Register value, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(Register) == 64 && sizeof(Element) == 8)
    return _mm512_mask_storeu_epi64(to, static_cast<__mmask8>((1u << count) - 1), (__m512i)value);
  if constexpr (sizeof(Register) == 64 && sizeof(Element) == 4)
    return _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << count) - 1), (__m512i)value);
  if constexpr (sizeof(Register) == 32 && sizeof(Element) == 2)
    return _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), (__m256i)value);
#endif
  store_pieces(to, value, count);
}

template <typename Real>
Integers<Real> lane_numbers() {
  return []<int... lane>(std::integer_sequence<int, lane...>) {
    return Integers<Real>{lane...};
  }(std::make_integer_sequence<int, kLanes<Real>>());
}

// Every lane receives the lane whose number differs in the bit `distance`.
template <int distance, typename Real>
Vector<Real> exchange(Vector<Real> value) {
#if defined(__clang__)
  return [&]<int... lane>(std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(value, value, (lane ^ distance)...);
  }(std::make_integer_sequence<int, kLanes<Real>>());
#else
  return __builtin_shuffle(value, lane_numbers<Real>() ^ distance);
#endif
}

// Lane i receives the lane that `from` has there. (Only where that is one instruction.)
#if defined(__AVX2__)
template <typename Real>
Vector<Real> permuted(Vector<Real> value, Integers<Real> from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4)
    return (Vector<Real>)_mm512_maskz_permutexvar_epi32(0xffff, (__m512i)from, (__m512i)value);
  else
    return (Vector<Real>)_mm512_maskz_permutexvar_epi64(0xff, (__m512i)from, (__m512i)value);
#else
  if constexpr (sizeof(Real) == 4) return (Vector<Real>)_mm256_permutevar8x32_epi32((__m256i)value, (__m256i)from);
  const Integers<Real> halves = 2 * from + ((2 * from + 1) << 32);  // of each lane
  return (Vector<Real>)_mm256_permutevar8x32_epi32((__m256i)value, (__m256i)halves);
#endif
}
#endif

// b > a ? b : a, and b < a ? b : a. A NaN in b is passed over (it reaches the result through the sum of exponentials),
// one in a stays. GCC makes two instructions of such a choice where AVX-512 has one.
template <typename Register>
Register larger(Register a, Register b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Register, Vector<float>>)
    return (Register)_mm512_maskz_max_ps(0xffff, (__m512)b, (__m512)a);
  if constexpr (std::is_same_v<Register, Vector<double>>)
    return (Register)_mm512_maskz_max_pd(0xff, (__m512d)b, (__m512d)a);
#endif
  return b > a ? b : a;
}

template <typename Register>
Register smaller(Register a, Register b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Register, Vector<float>>)
    return (Register)_mm512_maskz_min_ps(0xffff, (__m512)b, (__m512)a);
  if constexpr (std::is_same_v<Register, Vector<double>>)
    return (Register)_mm512_maskz_min_pd(0xff, (__m512d)b, (__m512d)a);
#endif
  return b < a ? b : a;
}

// Reduce groups of `width` neighbouring lanes; every lane of a group receives the result.
template <int width, typename Real>
Vector<Real> group_max(Vector<Real> value) {
  if constexpr (width > 1) {
    value = group_max<width / 2, Real>(value);
    value = larger(value, exchange<width / 2, Real>(value));
  }
  return value;
}

template <int width, typename Real>
Vector<Real> group_sum(Vector<Real> value) {
  if constexpr (width > 1) {
    value = group_sum<width / 2, Real>(value);
    value += exchange<width / 2, Real>(value);
  }
  return value;
}

// exp(x) = 2^n · exp(r), with n = round(x / ln 2) and |r| <= ln(2) / 2. ln 2 is split in two so that n · high is exact
// and r keeps its digits, with or without fused multiply-add. exp(r) = 1 + r + r² · p(r), as one polynomial.
// log(2^n · m) = n · ln 2 + 2f + f³ · q(f²), with f = (m - 1) / (m + 1) and m between sqrt(1/2) and sqrt(2).
// p and q interpolate at Chebyshev nodes.
template <typename Real>
struct Elementary;

template <>
struct Elementary<float> {
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, in the low bits of the mantissa
  static constexpr float kLowest = -105.f, kHighest = 89.f;  // beyond: 0 and infinity
  static constexpr int kMantissaBits = 23, kBias = 127;
  static constexpr std::int32_t kMagnitude = 0x7fffffff, kNear = 0x42adcccd;  // 86.9, as bits
  static constexpr std::int32_t kSqrtHalf = 0x3f3504f3;
  static constexpr float kExpCoefficients[] = {
      0x1.6d117cp-10f, 0x1.120be2p-7f, 0x1.555518p-5f, 0x1.5554dcp-3f, 0x1p-1f, 1, 1};
  static constexpr float kLogCoefficients[] = {0x1.2eeb8p-2f, 0x1.997c12p-2f, 0x1.55555cp-1f};
};

template <>
struct Elementary<double> {
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLowest = -746., kHighest = 710.;
  static constexpr int kMantissaBits = 52, kBias = 1023;
  static constexpr std::int64_t kMagnitude = 0x7fffffffffffffff, kNear = 0x4086180000000000;  // 707, as bits
  static constexpr std::int64_t kSqrtHalf = 0x3fe6a09e667f3bcd;
  static constexpr double kExpCoefficients[] = {0x1.af390ba7e6f47p-26,
                                                0x1.2891d4ffbb0f9p-22,
                                                0x1.71de0d85293b8p-19,
                                                0x1.a019b8ca26fcfp-16,
                                                0x1.a01a01a7cebcdp-13,
                                                0x1.6c16c1789d1d7p-10,
                                                0x1.11111111109a6p-7,
                                                0x1.5555555553d37p-5,
                                                0x1.5555555555556p-3,
                                                0x1.0000000000001p-1,
                                                1,
                                                1};
  static constexpr double kLogCoefficients[] = {0x1.2b6688a387e03p-3, 0x1.39fd392179a95p-3, 0x1.7462bd8f7796ep-3,
                                                0x1.c71c62c639fdep-3, 0x1.2492492e09d4dp-2, 0x1.9999999995204p-2,
                                                0x1.5555555555558p-1};
};

// Highest power first.
template <typename Real, int count>
Vector<Real> polynomial(Vector<Real> x, const Real (&coefficients)[count]) {
  Vector<Real> value = broadcast(coefficients[0]);
  for (int i = 1; i < count; ++i) value = value * x + coefficients[i];
  return value;
}

// exp(x) = 2^n · e. `power` is n as an integer.
template <typename Real>
struct ExpParts {
  Vector<Real> n, e;
  Integers<Real> power;
};
template <typename Real>
ExpParts<Real> exp_parts(Vector<Real> x) {
  using Constants = Elementary<Real>;
  constexpr Real kLog2e = static_cast<Real>(1.44269504088896340736);
  const Vector<Real> shifted = x * kLog2e + Constants::kRound;
  const Vector<Real> n = shifted - Constants::kRound;
  const Vector<Real> r = (x - n * Constants::kLn2High) - n * Constants::kLn2Low;
  return {n, polynomial<Real>(r, Constants::kExpCoefficients),
          (Integers<Real>)shifted - (Integers<Real>)broadcast(Constants::kRound)};
}

// Whether any lane of a comparison's result holds.
template <typename Mask>
bool any(Mask mask) {
#if defined(__AVX2__)
  if constexpr (sizeof(Mask) == 32) return _mm256_testz_si256((__m256i)mask, (__m256i)mask) == 0;
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(Mask) == 16) return _mm_movemask_epi8((__m128i)mask) != 0;
#elif defined(__aarch64__)
  if constexpr (sizeof(Mask) == 16) return vmaxvq_u32((uint32x4_t)mask) != 0;
#endif
  bool held = false;
  for (unsigned i = 0; i < sizeof(Mask) / sizeof(mask[0]); ++i) held |= mask[i] != 0;
  return held;
}

// Where the result may not be normal.
template <typename Real>
[[gnu::noinline]] Vector<Real> exp_far(Vector<Real> x) {
  using Constants = Elementary<Real>;
  // What vanishes, as -inf, does not come of a product: underflow takes some processors long.
  const auto vanishes = x < Constants::kLowest;
  const auto [n, e, power] = exp_parts<Real>(smaller(vanishes ? Vector<Real>{} : x, broadcast(Constants::kHighest)));
  // 2^n in two factors, because it may be denormal or too large where the result is not: only the last product rounds.
  const Integers<Real> half = power >> 1;
  const auto power_of_two = [](Integers<Real> k) {
    return (Vector<Real>)((k + Constants::kBias) << Constants::kMantissaBits);
  };
  return vanishes ? Vector<Real>{} : e * power_of_two(half) * power_of_two(power - half);
}

// Within 1.25 ulp, results that are denormal included. exp(-inf) = 0, exp(inf) = inf, NaN stays.
template <typename Real>
Vector<Real> exp(Vector<Real> x) {
  using Constants = Elementary<Real>;
#if defined(__AVX512F__)
  // What vanishes, as -inf, is masked: underflow takes some processors long.
  const auto [n, e, power] = exp_parts<Real>(smaller(x, broadcast(Constants::kHighest)));
  if constexpr (sizeof(Real) == 4)
    return (Vector<Real>)_mm512_maskz_scalef_ps(
        _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(Constants::kLowest), _CMP_NLT_UQ), (__m512)e, (__m512)n);
  else
    return (Vector<Real>)_mm512_maskz_scalef_pd(
        _mm512_cmp_pd_mask((__m512d)x, (__m512d)broadcast(Constants::kLowest), _CMP_NLT_UQ), (__m512d)e, (__m512d)n);
#else
  if (__builtin_expect(any(((Integers<Real>)x & Constants::kMagnitude) > Constants::kNear), 0)) return exp_far<Real>(x);
  const auto [n, e, power] = exp_parts<Real>(x);
  return (Vector<Real>)((Integers<Real>)e + (power << Constants::kMantissaBits));
#endif
}

// Of a sum of exponentials: positive, neither denormal nor infinite. NaN stays.
template <typename Real>
Vector<Real> log(Vector<Real> x) {
  using Constants = Elementary<Real>;
  const Integers<Real> power = ((Integers<Real>)x - Constants::kSqrtHalf) >> Constants::kMantissaBits;
  const Vector<Real> m = (Vector<Real>)((Integers<Real>)x - (power << Constants::kMantissaBits));
  const Vector<Real> n = __builtin_convertvector(power, Vector<Real>);
  const Vector<Real> f = (m - 1) / (m + 1), square = f * f;
  const Vector<Real> log_m = 2 * f + (f * square) * polynomial<Real>(square, Constants::kLogCoefficients);
  return n * Constants::kLn2High + (log_m + n * Constants::kLn2Low) + (x - x);
}

}  // namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE
