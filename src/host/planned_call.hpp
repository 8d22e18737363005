// The Problem and the Plan of a call. Those of a thread's newest one are kept: the next is mostly like it, and for a
// tiny call it takes longer to find out what the Problem is, and to plan, than to compute.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ndsoftmax/host_softmax.hpp"

namespace ndsoftmax {

struct Call {
  Operation operation;
  const TensorView& source;
  const TensorView* grad;  // backward
  const TensorView& result;
  std::span<const std::int64_t> dims;
  const Fusion& fusion;
  const Execution& execution;

  Problem problem() const { return make_problem(operation, source, grad, result, dims, fusion); }
  Plan planned(const Problem& problem) const { return plan(problem, execution.device, execution.forced); }

  bool in_place() const { return is_in_place(source, grad, result); }
  // Masks and biases lie anywhere, and are not compared.
  bool may_be_kept() const {
    const bool fuses = fusion.mask || fusion.bias || fusion.causal != Causal::none || fusion.dead_rows_are_zero;
    return !fuses && std::max(source.rank, result.rank) <= kMaxGroups;
  }
};

// What a Problem takes of a tensor.
class Layout {
 public:
  explicit Layout(const TensorView& tensor)
      : dtype_(tensor.dtype), rank_(tensor.rank), misalignment_(misalignment_of(&tensor)) {
    std::copy_n(tensor.sizes, rank_, sizes_.begin());
    std::copy_n(tensor.strides, rank_, strides_.begin());
  }

  bool is_of(const TensorView& tensor) const {
    return dtype_ == tensor.dtype && rank_ == tensor.rank && misalignment_ == misalignment_of(&tensor) &&
           std::equal(tensor.sizes, tensor.sizes + rank_, sizes_.begin()) &&
           std::equal(tensor.strides, tensor.strides + rank_, strides_.begin());
  }

 private:
  DType dtype_;
  int rank_;
  int misalignment_;
  Array<std::int64_t, kMaxGroups> sizes_, strides_;  // of which `rank_` are set
};

// What follows from a call, and what it follows from.
class PlannedCall {
 public:
  explicit PlannedCall(const Call& call)
      : problem(call.problem()),
        chosen(call.planned(problem)),
        operation_(call.operation),
        source_(call.source),
        grad_(call.grad ? *call.grad : call.source),
        result_(call.result),
        scale_(call.fusion.scale),
        in_place_(call.in_place()),
        dims_(call.dims.begin(), call.dims.end()),
        device_(call.execution.device),
        forced_(call.execution.forced) {}

  // Whether the same follows from another call of the same direction.
  bool is_of(const Call& call) const {
    return operation_ == call.operation && source_.is_of(call.source) && (!call.grad || grad_.is_of(*call.grad)) &&
           result_.is_of(call.result) && scale_ == call.fusion.scale && in_place_ == call.in_place() &&
           std::ranges::equal(dims_, call.dims) && device_ == call.execution.device && forced_ == call.execution.forced;
  }

  Problem problem;
  Plan chosen;

 private:
  Operation operation_;
  Layout source_, grad_, result_;
  double scale_;
  bool in_place_;
  std::vector<std::int64_t> dims_;
  Device device_;
  std::optional<Regime> forced_;
};

// Of a call that may be kept: until the thread's next one of the same direction.
inline const PlannedCall& planned(const Call& call) {
  thread_local Array<std::optional<PlannedCall>, 2> newest;  // forward, backward
  std::optional<PlannedCall>& kept = newest[call.grad ? 1 : 0];
  if (!kept || !kept->is_of(call)) kept.emplace(call);
  return *kept;
}

}  // namespace ndsoftmax
