// The small vocabulary every other header uses: element types, operations, operands, borrowed tensors.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define NDSOFTMAX_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define NDSOFTMAX_HOST_DEVICE inline
#endif

namespace ndsoftmax {

enum class DType : std::uint8_t { float16, bfloat16, float32, float64 };
enum class Operation : std::uint8_t { softmax, log_softmax };
enum class Direction : std::uint8_t { forward, backward };

constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::float32: return 4;
    case DType::float64: return 8;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::float32: return "float32";
    case DType::float64: return "float64";
  }
  return "?";
}

constexpr const char* name_of(Operation operation) {
  return operation == Operation::softmax ? "softmax" : "log_softmax";
}

constexpr const char* name_of(Direction direction) { return direction == Direction::forward ? "forward" : "backward"; }

// The tensors of one call. Forward reads kSource (the input) and writes kResult (the output). Backward reads kGrad
// (grad_output) and kSource (the output of forward) and writes kResult (grad_input). Those three have every element;
// what may be fused need not: the mask, the bias, and kRow, no tensor, but what an element's row is numbered by where
// elements past a diagonal are excluded.
enum Operand : int { kSource, kGrad, kResult, kWhole, kMask = kWhole, kBias, kRow, kOperands };

// As std::array, whose index is unsigned: here it may be any integer, or an Operand.
template <typename T, int count>
struct Array {
  T values[count];

  constexpr T& operator[](std::int64_t index) { return values[index]; }
  constexpr const T& operator[](std::int64_t index) const { return values[index]; }
  constexpr T* begin() { return values; }
  constexpr const T* begin() const { return values; }
  constexpr T* end() { return values + count; }
  constexpr const T* end() const { return values + count; }
  constexpr const T& back() const { return values[count - 1]; }
  static constexpr int size() { return count; }

  friend bool operator==(const Array&, const Array&) = default;
};
template <typename T, typename... More>
Array(T, More...) -> Array<T, 1 + static_cast<int>(sizeof...(More))>;

// A tensor that somebody else owns. Strides are in elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::float32;
  int rank = 0;
  const std::int64_t* sizes = nullptr;
  const std::int64_t* strides = nullptr;
};

}  // namespace ndsoftmax
