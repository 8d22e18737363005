// A Problem says what is to be computed, in plain data and without pointers: every dimension of every operand, merged
// into as few groups as their strides allow, and sorted into outer × dim × inner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "ndsoftmax/types.hpp"

namespace ndsoftmax {

inline constexpr int kMaxGroups = 12;

// Neighbouring dimensions that every operand steps through as if they were one.
struct Group {
  std::int64_t size;
  Array<std::int64_t, kOperands> stride;  // elements

  friend bool operator==(const Group&, const Group&) = default;
};

inline constexpr Group kNoGroup{1, {}};

// A product of groups; the last one runs fastest. Those from `rank` on are not initialized (to clear them takes as long
// as all the rest of a Problem), except groups[0], which is read even at rank 0.
struct Axis {
  int rank = 0;
  std::int64_t size = 1;
  Array<Group, kMaxGroups> groups;

  Axis() { groups[0] = kNoGroup; }
  friend bool operator==(const Axis& a, const Axis& b) {
    return a.size == b.size &&
           std::equal(a.groups.begin(), a.groups.begin() + a.rank, b.groups.begin(), b.groups.begin() + b.rank);
  }
};

// Which elements beyond a diagonal are excluded; rows are the last dimension but one, columns the last.
enum class Causal : std::uint8_t {
  none,
  upper_left,   // element j of row i is included where j <= i
  lower_right,  // the last element of the last row is included: where j - columns <= i - rows
};

// What a call computes on the way: z = source · scale + bias, and softmax over the included z alone, as if the others
// were not there. Masks and biases broadcast against the source by their strides.
struct Fusion {
  const TensorView* mask = nullptr;  // bytes, 0 or not 0; its dtype is not read
  bool mask_includes = false;        // not 0 means included; otherwise excluded
  const TensorView* bias = nullptr;  // forward: of the source's dtype, or float32 where that is 16-bit
  double scale = 1;                  // backward: of the gradient
  Causal causal = Causal::none;      // needs the last dimension as the only softmax dimension
  bool dead_rows_are_zero = false;   // a row without any z but -inf: 0 (log_softmax: -inf), or else NaN
};

// The same as a part of a Problem, without pointers.
struct Fused {
  bool any = false;
  bool mask = false;
  bool mask_includes = false;
  bool bias = false;
  DType bias_dtype = DType::float32;
  double scale = 1;
  bool causal = false;
  std::int64_t diagonal = 0;  // causal: element j of row i is included where j <= i + diagonal
  bool dead_rows_are_zero = false;

  // of what excludes or adds; the scale may be any
  bool only_mask() const { return mask && !bias && !causal; }
  bool only_bias() const { return bias && !mask && !causal; }
  bool only_scale() const { return any && !mask && !bias && !causal && !dead_rows_are_zero; }

  friend bool operator==(const Fused&, const Fused&) = default;
};

struct Problem {
  Operation operation = Operation::softmax;
  Direction direction = Direction::forward;
  DType source = DType::float32;  // of kSource and kGrad
  DType result = DType::float32;
  Axis outer;  // steps at least as far as dim does in the result
  Axis dim;    // what is normalized over
  Axis inner;  // steps less far than dim does in the result
  Fused fused;
  Array<int, kOperands> misalignment{};  // address modulo 16 (bytes)
  bool in_place = false;                 // the result takes the place of the source, or of the gradient

  std::int64_t elements() const { return outer.size * dim.size * inner.size; }
  // dim is one group that source, grad and result step through element by element, and nothing runs faster
  bool contiguous_rows() const;
  // ... and the rows follow each other without a gap
  bool packed_rows() const;

  // whether the call has this one of the tensors that have every element
  bool has(int operand) const { return operand != kGrad || direction == Direction::backward; }

  friend bool operator==(const Problem&, const Problem&) = default;
};

// What a Problem takes of addresses: that of a tensor modulo 16 (bytes), and whether two are the same.
inline int misalignment_of(const TensorView* tensor) {
  return tensor ? static_cast<int>(reinterpret_cast<std::uintptr_t>(tensor->data) % 16) : 0;
}
inline bool is_in_place(const TensorView& source, const TensorView* grad, const TensorView& result) {
  return result.data && (result.data == source.data || (grad && result.data == grad->data));
}

// Splits tensors of equal shape into outer × dim × inner. `dims` may be negative and in any order.
// `grad` is null for forward. Throws std::out_of_range for a dim out of range, std::runtime_error for a repeated
// dim, operands of different shapes or that do not broadcast, dtypes that do not go together or more than kMaxGroups
// groups on one axis, std::invalid_argument for no dim at all or a diagonal without rows or along another than the
// last.
Problem make_problem(Operation operation, const TensorView& source, const TensorView* grad, const TensorView& result,
                     std::span<const std::int64_t> dims, const Fusion& fusion = {});

std::string to_string(const Problem& problem);

}  // namespace ndsoftmax
