// Tensors to Problem: sort dimensions by how far they step, merge neighbours, name them outer, dim and inner.
#include "ndsoftmax/problem.hpp"

#include <algorithm>
#include <bit>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace ndsoftmax {
namespace {

using Groups = std::vector<Group>;

// Farthest step first. The result decides: it is what gets written, and torch lays it out densely.
bool steps_farther(const Group& a, const Group& b) {
  if (a.stride[kResult] != b.stride[kResult]) return a.stride[kResult] > b.stride[kResult];
  return a.stride[kSource] > b.stride[kSource];
}

bool continues(const Group& outer, const Group& inner) {
  for (int operand = 0; operand < kOperands; ++operand)
    if (outer.stride[operand] != inner.stride[operand] * inner.size) return false;
  return true;
}

Axis merge(Groups groups, const char* name) {
  std::stable_sort(groups.begin(), groups.end(), steps_farther);
  Axis axis;
  for (const Group& group : groups) {
    axis.size *= group.size;
    if (axis.rank > 0 && continues(axis.groups[axis.rank - 1], group)) {
      Group& last = axis.groups[axis.rank - 1];
      last = Group{last.size * group.size, group.stride};
    } else {
      if (axis.rank == kMaxGroups)
        throw std::runtime_error(std::string("the ") + name + " dimensions step through memory in more than " +
                                 std::to_string(kMaxGroups) + " unrelated ways; make the tensor contiguous first");
      axis.groups[axis.rank++] = group;
    }
  }
  return axis;
}

int misalignment_of(const TensorView* tensor) {
  return tensor ? static_cast<int>(reinterpret_cast<std::uintptr_t>(tensor->data) % 16) : 0;
}

std::vector<bool> softmax_dims(std::span<const std::int64_t> dims, int rank) {
  const std::int64_t range = std::max(rank, 1);  // a 0-d tensor is one element along dim 0 or -1
  std::vector<bool> chosen(range, false);
  for (const std::int64_t dim : dims) {
    if (dim < -range || dim >= range)
      throw std::out_of_range("Dimension out of range (expected to be in range of [" + std::to_string(-range) + ", " +
                              std::to_string(range - 1) + "], but got " + std::to_string(dim) + ")");
    const std::int64_t wrapped = dim < 0 ? dim + range : dim;
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
}

}  // namespace

bool Problem::contiguous_rows() const {
  if (inner.size != 1) return false;
  if (dim.size == 1) return true;
  if (dim.rank != 1) return false;
  const auto& stride = dim.groups[0].stride;
  const bool grad = direction == Direction::forward || stride[kGrad] == 1;
  return stride[kSource] == 1 && stride[kResult] == 1 && grad;
}

bool Problem::packed_rows() const {
  if (!contiguous_rows() || outer.rank > 1) return false;
  if (outer.rank == 0) return true;
  const auto& stride = outer.groups[0].stride;
  const bool grad = direction == Direction::forward || stride[kGrad] == dim.size;
  return stride[kSource] == dim.size && stride[kResult] == dim.size && grad;
}

Problem make_problem(Operation operation, const TensorView& source, const TensorView* grad, const TensorView& result,
                     std::span<const std::int64_t> dims) {
  check_shape(source, result);
  if (grad) check_shape(source, *grad);

  Problem problem;
  problem.operation = operation;
  problem.direction = grad ? Direction::backward : Direction::forward;
  problem.source = source.dtype;
  problem.result = result.dtype;
  check_dtypes(source.dtype, result.dtype, problem.direction);
  if (grad && grad->dtype != source.dtype) throw std::runtime_error("grad_output and output must have the same dtype");
  problem.misalignment = {misalignment_of(&source), misalignment_of(grad), misalignment_of(&result)};

  const std::vector<bool> chosen = softmax_dims(dims, source.rank);
  Groups softmax, others;
  for (int d = 0; d < source.rank; ++d) {
    if (source.sizes[d] == 1) continue;
    const Group group{source.sizes[d], {source.strides[d], grad ? grad->strides[d] : 0, result.strides[d]}};
    (chosen[d] ? softmax : others).push_back(group);
  }

  problem.dim = merge(softmax, "softmax");
  Groups outer, inner;
  for (const Group& group : others) {
    const bool faster = !softmax.empty() && steps_farther(problem.dim.groups[problem.dim.rank - 1], group);
    (faster ? inner : outer).push_back(group);
  }
  problem.outer = merge(outer, "outer");
  problem.inner = merge(inner, "inner");
  return problem;
}

std::string to_string(const Problem& problem) {
  std::ostringstream text;
  text << name_of(problem.operation) << ' ' << name_of(problem.direction) << ' ' << name_of(problem.source);
  if (problem.result != problem.source) text << " -> " << name_of(problem.result);
  text << ", outer × dim × inner = " << problem.outer.size << " × " << problem.dim.size << " × " << problem.inner.size;
  return text.str();
}

}  // namespace ndsoftmax
