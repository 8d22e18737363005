// Tensors to Problem: sort dimensions by how far they step, merge neighbours, name them outer, dim and inner.
#include "ndsoftmax/problem.hpp"

#include <algorithm>
#include <bitset>
#include <sstream>
#include <stdexcept>

namespace ndsoftmax {
namespace {

constexpr int kMaxRank = 64;  // as torch
using DimSet = std::bitset<kMaxRank>;

bool continues(const Group& outer, const Group& inner) {
  for (int operand = 0; operand < kOperands; ++operand)
    if (outer.stride[operand] != inner.stride[operand] * inner.size) return false;
  return true;
}

// Groups come in the order of their steps, farthest first.
void append(Axis& axis, const Group& group, const char* name) {
  axis.size *= group.size;
  if (axis.rank > 0 && continues(axis.groups[axis.rank - 1], group)) {
    Group& last = axis.groups[axis.rank - 1];
    last = Group{last.size * group.size, group.stride};
    return;
  }
  if (axis.rank == kMaxGroups)
    throw std::runtime_error(std::string("the ") + name + " dimensions step through memory in more than " +
                             std::to_string(kMaxGroups) + " unrelated ways; make the tensor contiguous first");
  axis.groups[axis.rank++] = group;
}

DimSet softmax_dims(std::span<const std::int64_t> dims, int rank) {
  const std::int64_t range = std::max(rank, 1);  // a 0-d tensor is one element along dim 0 or -1
  DimSet chosen;
  if (dims.empty()) throw std::invalid_argument("dim must name at least one dimension, but is empty");
  for (const std::int64_t dim : dims) {
    if (dim < -range || dim >= range)
      throw std::out_of_range("Dimension out of range (expected to be in range of [" + std::to_string(-range) + ", " +
                              std::to_string(range - 1) + "], but got " + std::to_string(dim) + ")");
    const auto wrapped = static_cast<std::size_t>(dim < 0 ? dim + range : dim);
    if (chosen[wrapped])
      throw std::runtime_error("dim " + std::to_string(wrapped) + " appears multiple times in the list of dims");
    chosen[wrapped] = true;
  }
  return chosen;
}

void check_dtypes(DType source, DType result, Direction direction) {
  const bool same = source == result;
  const DType narrow = direction == Direction::forward ? source : result;
  const DType wide = direction == Direction::forward ? result : source;
  if (!same && !(wide == DType::float32 && size_of(narrow) == 2))
    throw std::runtime_error(std::string("a ") + name_of(source) + " source and a " + name_of(result) +
                             " result do not go together: they must be equal, or 16-bit with float32");
}

void check_shape(const TensorView& a, const TensorView& b) {
  if (a.rank != b.rank || !std::equal(a.sizes, a.sizes + a.rank, b.sizes))
    throw std::runtime_error("the tensors of one call must have the same shape");
  if (a.rank > kMaxRank) throw std::runtime_error("a tensor has more than " + std::to_string(kMaxRank) + " dimensions");
}

void check_broadcast(const TensorView* tensor, const TensorView& source, const char* name) {
  if (!tensor) return;
  bool fits = tensor->rank <= source.rank;
  for (int d = 1; fits && d <= tensor->rank; ++d) {
    const std::int64_t size = tensor->sizes[tensor->rank - d];
    fits = size == 1 || size == source.sizes[source.rank - d];
  }
  if (!fits) throw std::runtime_error(std::string("the ") + name + " does not broadcast to the shape of the input");
}

// Of a tensor that broadcasts against one of `rank` dimensions, along dimension d of that.
std::int64_t broadcast_stride(const TensorView* tensor, int rank, int d) {
  if (!tensor) return 0;
  const int own = d - (rank - tensor->rank);
  return own < 0 || tensor->sizes[own] == 1 ? 0 : tensor->strides[own];
}

Fused fused_of(const Fusion& fusion, const TensorView& source, Direction direction, const DimSet& chosen) {
  Fused fused;
  check_broadcast(fusion.mask, source, "mask");
  fused.mask = fusion.mask != nullptr;
  fused.mask_includes = fused.mask && fusion.mask_includes;
  if (direction == Direction::forward && fusion.bias) {
    check_broadcast(fusion.bias, source, "bias");
    fused.bias = true;
    fused.bias_dtype = fusion.bias->dtype;
    if (fused.bias_dtype != source.dtype && !(fused.bias_dtype == DType::float32 && size_of(source.dtype) == 2))
      throw std::runtime_error(std::string("a ") + name_of(fused.bias_dtype) + " bias does not go with a " +
                               name_of(source.dtype) + " input");
  }
  fused.scale = fusion.scale;
  if (fusion.causal != Causal::none) {
    const int last = source.rank - 1;
    if (source.rank < 2 || !chosen[static_cast<std::size_t>(last)] || chosen.count() > 1)
      throw std::invalid_argument("causal needs two dimensions, and the last one as the only softmax dimension");
    fused.causal = true;
    if (fusion.causal == Causal::lower_right) fused.diagonal = source.sizes[last] - source.sizes[last - 1];
  }
  fused.dead_rows_are_zero = fusion.dead_rows_are_zero;
  fused.any = fused.mask || fused.bias || fused.scale != 1 || fused.causal || fused.dead_rows_are_zero;
  return fused;
}

}  // namespace

bool Problem::contiguous_rows() const {
  if (inner.size != 1) return false;
  if (dim.size == 1) return true;
  if (dim.rank != 1) return false;
  for (int operand = 0; operand < kWhole; ++operand)
    if (has(operand) && dim.groups[0].stride[operand] != 1) return false;
  return true;
}

bool Problem::packed_rows() const {
  if (!contiguous_rows()) return false;
  std::int64_t step = dim.size;
  for (int group = outer.rank - 1; group >= 0; step *= outer.groups[group].size, --group)
    for (int operand = 0; operand < kWhole; ++operand)
      if (has(operand) && outer.groups[group].stride[operand] != step) return false;
  return true;
}

Problem make_problem(Operation operation, const TensorView& source, const TensorView* grad, const TensorView& result,
                     std::span<const std::int64_t> dims, const Fusion& fusion) {
  check_shape(source, result);
  if (grad) check_shape(source, *grad);

  Problem problem;
  problem.operation = operation;
  problem.direction = grad ? Direction::backward : Direction::forward;
  problem.source = source.dtype;
  problem.result = result.dtype;
  check_dtypes(source.dtype, result.dtype, problem.direction);
  if (grad && grad->dtype != source.dtype) throw std::runtime_error("grad_output and output must have the same dtype");
  const DimSet chosen = softmax_dims(dims, source.rank);
  problem.fused = fused_of(fusion, source, problem.direction, chosen);
  const TensorView* const bias = problem.fused.bias ? fusion.bias : nullptr;
  problem.misalignment = {misalignment_of(&source), misalignment_of(grad), misalignment_of(&result),
                          misalignment_of(fusion.mask), misalignment_of(bias)};
  problem.in_place = is_in_place(source, grad, result);

  const auto is_softmax = [&](int d) { return chosen[static_cast<std::size_t>(d)]; };
  const auto group_of = [&](int d) {
    Group group{source.sizes[d], {source.strides[d], grad ? grad->strides[d] : 0, result.strides[d]}};
    group.stride[kMask] = broadcast_stride(fusion.mask, source.rank, d);
    group.stride[kBias] = broadcast_stride(bias, source.rank, d);
    group.stride[kRow] = problem.fused.causal && d == source.rank - 2;
    return group;
  };
  // The result decides which of two dimensions steps farther: it is what gets written, and torch lays it out densely.
  const auto steps_farther = [&](int a, int b) {
    if (result.strides[a] != result.strides[b]) return result.strides[a] > result.strides[b];
    return source.strides[a] > source.strides[b];
  };

  // Dimensions by how far they step, farthest first, equal ones in their order. They are few, and mostly sorted.
  Array<int, kMaxRank> order;
  int count = 0;
  for (int d = 0; d < source.rank; ++d) {
    if (source.sizes[d] == 1) continue;
    int at = count++;
    for (; at > 0 && steps_farther(d, order[at - 1]); --at) order[at] = order[at - 1];
    order[at] = d;
  }

  int fastest = -1;  // of the softmax dimensions
  for (int i = 0; i < count; ++i)
    if (is_softmax(order[i])) append(problem.dim, group_of(fastest = order[i]), "softmax");
  for (int i = 0; i < count; ++i) {
    if (is_softmax(order[i])) continue;
    const bool inner = fastest >= 0 && steps_farther(fastest, order[i]);
    append(inner ? problem.inner : problem.outer, group_of(order[i]), inner ? "inner" : "outer");
  }
  return problem;
}

std::string to_string(const Problem& problem) {
  std::ostringstream text;
  text << name_of(problem.operation) << ' ' << name_of(problem.direction) << ' ' << name_of(problem.source);
  if (problem.result != problem.source) text << " -> " << name_of(problem.result);
  const Fused& fused = problem.fused;
  if (fused.mask) text << ", masked";
  if (fused.bias) text << ", biased";
  if (fused.scale != 1) text << ", scaled";
  if (fused.causal) text << ", causal";
  text << ", outer × dim × inner = " << problem.outer.size << " × " << problem.dim.size << " × " << problem.inner.size;
  return text.str();
}

}  // namespace ndsoftmax
