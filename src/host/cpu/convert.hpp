// float16, bfloat16, float32 and float64 in memory to and from vectors of Real in registers.
#pragma once

#include "host/cpu/vector.hpp"

namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// The register that kLanes<Real> elements fill in memory.
template <typename Real, typename Element>
struct Memory {
  using type = Vector<Real>;
};
template <typename Real>
struct Memory<Real, Half> {
  using type = VectorN<std::uint16_t, kLanes<Real>>;
};
template <typename Real>
struct Memory<Real, BFloat16> {
  using type = VectorN<std::uint16_t, kLanes<Real>>;
};
template <typename Real, typename Element>
using Packed = typename Memory<Real, Element>::type;

// What an element is computed in.
template <typename Element>
using Wide = std::conditional_t<sizeof(Element) == 8, double, float>;

using Shorts = Packed<float, Half>;
using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;

// __builtin_convertvector does the same, but GCC splits it into halves and quarters.
inline Words widen_bits(Shorts value) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)value);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)value);
#else
  return __builtin_convertvector(value, Words);
#endif
}

inline Shorts narrow_bits(Words value) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)value);
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packus_epi32((__m256i)value, (__m256i)value);  // within 128 bits each
  return (Shorts)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0b1000));
#else
  return __builtin_convertvector(value, Shorts);
#endif
}

template <typename Element>
struct Convert {  // float32 and float64 are computed as they are
  template <typename Register>
  static Register widen(Register value) {
    return value;
  }
  template <typename Register>
  static Register narrow(Register value) {
    return value;
  }
};

template <>
struct Convert<BFloat16> {
  static Floats widen(Shorts value) { return (Floats)(widen_bits(value) << 16); }
  static Shorts narrow(Floats value) {
    const Words quiet = (Words)value | 0x400000;
    return narrow_bits((value == value ? nearest_even(value) : quiet) >> 16);
  }

  // Of numbers; in the upper halves.
  static Words nearest_even(Floats value) {
    const Words bits = (Words)value;
    return bits + (0x7fff + ((bits >> 16) & 1));
  }
};

// Twice as many elements as a vector of floats has, in two of them: those with even numbers and those with odd ones.
// bfloat16 gets there and back in half the instructions that neighbouring elements take.
struct Interleaved {
  Floats even, odd;

  static Interleaved load(const BFloat16* from) {
    const auto pairs = cpu::NDSOFTMAX_CPU_NAMESPACE::load<Words>(from);
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000)};
  }
  // Of what was computed from bfloat16 alone: a NaN then has no low bits that rounding could carry over its end.
  Words narrow() const {
    const Words low = Convert<BFloat16>::nearest_even(even) >> 16;
    const Words high = Convert<BFloat16>::nearest_even(odd) & 0xffff0000;
    return low | high;
  }
};

template <>
struct Convert<Half> {
#if defined(__AVX512F__)
  static Floats widen(Shorts value) { return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)value); }
  static Shorts narrow(Floats value) {
    return (Shorts)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
  }
#elif defined(__F16C__)
  static Floats widen(Shorts value) { return (Floats)_mm256_cvtph_ps((__m128i)value); }
  static Shorts narrow(Floats value) { return (Shorts)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
  static Floats widen(Shorts value) { return (Floats)vcvt_f32_f16((float16x4_t)value); }
  static Shorts narrow(Floats value) { return (Shorts)vcvt_f16_f32((float32x4_t)value); }
#else
  // The bits of a half, moved to where a float has them, lack 112 in the exponent: the biases are 15 and 127. Halves
  // that are denormal have one exponent more than they say, and no leading one, which is subtracted as a number;
  // infinity and NaN get float's largest exponent. (A product with 2^112 would do, but its denormal factors take
  // processors long.)
  static Floats widen(Shorts value) {
    const Words bits = widen_bits(value), moved = (bits & 0x7fff) << 13, least = Words{} + (113u << 23);
    const Words denormal = (Words)((Floats)(moved + least) - (Floats)least);
    const Words magnitude = (bits & 0x7c00) == 0 ? denormal : moved + (112u << 23);
    const Words special = (bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : magnitude;
    return (Floats)(special | ((bits & 0x8000) << 16));
  }

  // Three ranges: halves that are normal are rounded as integers; below them, adding 0.5, whose last digit is that of
  // the denormals, lets the addition round; above are infinity and NaN.
  static Shorts narrow(Floats value) {
    const Words magnitude = (Words)value & 0x7fffffff;
    const Words normal = (magnitude + (0xfff + ((magnitude >> 13) & 1)) - (112u << 23)) >> 13;
    const Words denormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
    const Words special = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : Words{} + 0x7c00;
    const Words small = magnitude < (113u << 23) ? denormal : normal;
    const Words half = magnitude < 0x477ff000 ? small : special;
    return narrow_bits(half | (((Words)value >> 16) & 0x8000));
  }
#endif
};

}  // namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE
