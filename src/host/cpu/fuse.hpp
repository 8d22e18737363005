// What may be fused, applied to a tile before the kernels see it: excluded elements become those that a softmax, or its
// gradient, does not feel. Part of kernels.cpp.
#pragma once

#include "host/cpu/kernels.hpp"
#include "host/cpu/vector.hpp"

namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE {

template <typename Real>
bool any(Integers<Real> flags) {
  IntegerOf<Real> seen = 0;
  for (int lane = 0; lane < kLanes<Real>; ++lane) seen |= flags[lane];
  return seen != 0;
}

// __builtin_convertvector does the same, but GCC splits it into halves and quarters.
template <typename Real>
Integers<Real> widen_bytes(const unsigned char* from) {
  using Bytes = VectorN<unsigned char, kLanes<Real>>;
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4)
    return (Integers<Real>)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)load<Bytes>(from));
  else
    return (Integers<Real>)_mm512_maskz_cvtepu8_epi64(0xff, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  if constexpr (sizeof(Real) == 4)
    return (Integers<Real>)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
  return __builtin_convertvector(load<Bytes>(from), Integers<Real>);
}

// body(offset, which lanes are included) for each vector; lanes past the end are not.
template <typename Real, typename Body>
void for_included(std::int64_t count, const unsigned char* excluded, const Body& body) {
  const auto included = [&](std::int64_t i) {
    return excluded ? widen_bytes<Real>(excluded + i) == 0 : Integers<Real>{} == 0;
  };
  std::int64_t i = 0;
  for (; i + kLanes<Real> <= count; i += kLanes<Real>) body(i, included(i));
  if (i < count) body(i, included(i) & (lane_numbers<Real>() < static_cast<IntegerOf<Real>>(count - i)));
}

// From a mask, any strides, to a tile. (The window is copied: bytes that are written might change it.)
inline void exclude(const unsigned char* mask, const Window& window, bool includes, unsigned char* excluded) {
  const auto [rows, columns, row_stride, column_stride, tile_stride] = window;
  const auto flip = static_cast<unsigned char>(includes);
  for (std::int64_t row = 0; row < rows; ++row, mask += row_stride, excluded += tile_stride) {
    if (column_stride == 0)
      __builtin_memset(excluded, (*mask != 0) ^ flip, static_cast<std::size_t>(columns));
    else if (column_stride == 1)
      for (std::int64_t i = 0; i < columns; ++i) excluded[i] = static_cast<unsigned char>(mask[i] != 0) ^ flip;
    else
      for (std::int64_t i = 0; i < columns; ++i) excluded[i] = (mask[i * column_stride] != 0) ^ flip;
  }
}

// tile: input · scale + bias, or -inf
template <typename Real>
[[gnu::flatten]] Seen<Real> fuse(std::int64_t count, const unsigned char* excluded, const Real* bias, Real scale,
                                 Real* tile) {
  Vector<Real> max = broadcast(-kInfinity<Real>);
  Integers<Real> nan = {};
  for_included<Real>(count, excluded, [&](std::int64_t i, Integers<Real> included) {
    Vector<Real> z = load<Vector<Real>>(tile + i) * scale;
    if (bias) z += load<Vector<Real>>(bias + i);
    z = included ? z : broadcast(-kInfinity<Real>);
    max = larger(max, z);
    nan |= z != z;
    store(tile + i, z);
  });
  return {group_max<kLanes<Real>, Real>(max)[0], any<Real>(nan)};
}

// grad: grad · scale, or 0; output: unchanged, or `empty`, which is the output of what is excluded
template <typename Real>
[[gnu::flatten]] SeenGradient fuse_gradient(std::int64_t count, const unsigned char* excluded, Real scale, Real empty,
                                            Real* grad, Real* output) {
  Integers<Real> living = {}, unbounded = {};
  for_included<Real>(count, excluded, [&](std::int64_t i, Integers<Real> included) {
    const Vector<Real> g = included ? load<Vector<Real>>(grad + i) * scale : Vector<Real>{};
    const Vector<Real> y = included ? load<Vector<Real>>(output + i) : broadcast(empty);
    living |= y != empty;
    unbounded |= (g - g != 0) | (y != y);
    store(grad + i, g);
    store(output + i, y);
  });
  return {any<Real>(living), any<Real>(unbounded)};
}

}  // namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE
