// A Problem says what is to be computed, in plain data and without pointers: every dimension of every operand, merged
// into as few groups as their strides allow, and sorted into outer × dim × inner.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "ndsoftmax/types.hpp"

namespace ndsoftmax {

inline constexpr int kMaxGroups = 12;

// Neighbouring dimensions that every operand steps through as if they were one.
struct Group {
  std::int64_t size = 1;
  std::array<std::int64_t, kOperands> stride{};  // elements

  friend bool operator==(const Group&, const Group&) = default;
};

// A product of groups; the last one runs fastest.
struct Axis {
  int rank = 0;
  std::int64_t size = 1;
  std::array<Group, kMaxGroups> groups{};

  friend bool operator==(const Axis&, const Axis&) = default;
};

struct Problem {
  Operation operation = Operation::softmax;
  Direction direction = Direction::forward;
  DType source = DType::float32;  // of kSource and kGrad
  DType result = DType::float32;
  Axis outer;                                 // steps at least as far as dim does in the result
  Axis dim;                                   // what is normalized over
  Axis inner;                                 // steps less far than dim does in the result
  std::array<int, kOperands> misalignment{};  // address modulo 16 (bytes)

  std::int64_t elements() const { return outer.size * dim.size * inner.size; }
  // dim is one group that every operand steps through element by element, and nothing runs faster
  bool contiguous_rows() const;
  // ... and the rows follow each other without a gap
  bool packed_rows() const;

  friend bool operator==(const Problem&, const Problem&) = default;
};

// Splits tensors of equal shape into outer × dim × inner. `dims` may be negative and in any order.
// `grad` is null for forward. Throws std::out_of_range for a dim out of range, std::runtime_error for a repeated
// dim, operands of different shapes, dtypes that do not go together or more than kMaxGroups groups on one axis.
Problem make_problem(Operation operation, const TensorView& source, const TensorView* grad, const TensorView& result,
                     std::span<const std::int64_t> dims);

std::string to_string(const Problem& problem);

}  // namespace ndsoftmax
