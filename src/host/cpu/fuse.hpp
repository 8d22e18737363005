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

// body(offset, which lanes are included) for each vector; lanes past the end are not.
template <typename Real, typename Body>
void for_included(std::int64_t count, const unsigned char* excluded, const Body& body) {
  using Bytes = VectorN<unsigned char, kLanes<Real>>;
  for (std::int64_t i = 0; i < count; i += kLanes<Real>) {
    Integers<Real> included = lane_numbers<Real>() < static_cast<IntegerOf<Real>>(count - i < 64 ? count - i : 64);
    if (excluded) included &= __builtin_convertvector(load<Bytes>(excluded + i), Integers<Real>) == 0;
    body(i, included);
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
