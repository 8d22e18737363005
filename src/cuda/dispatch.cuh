// From run-time types to an Operation: one generic visit, used by every launcher.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/interleaved.cuh"
#include "cuda/launchers.hpp"
#include "cuda/operation.cuh"
#include "cuda/rows.cuh"
#include "host/cuda_plan.hpp"
#include "ndsoftmax/plan.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cuda {

inline bool is_log(const Problem& problem) { return problem.operation == Operation::log_softmax; }

// Calls visitor.operator()<Operation>() for the direction and dtypes of the problem, and whether anything is fused.
template <bool kFused, typename Visitor>
void visit_operation(const Problem& problem, Visitor&& visitor) {
  const bool forward = problem.direction == Direction::forward;
  const auto with = [&]<typename Source, typename Result>() {
    // forward may widen, backward may narrow
    if constexpr (sizeof(Source) <= sizeof(Result))
      if (forward) return visitor.template operator()<Forward<Source, Result, kFused>>();
    if constexpr (sizeof(Source) >= sizeof(Result))
      if (!forward) return visitor.template operator()<Backward<Source, Result, kFused>>();
  };
  const bool same = problem.source == problem.result;
  const DType narrow = forward ? problem.source : problem.result;
  switch (narrow) {
    case DType::float64: return with.template operator()<double, double>();
    case DType::float32: return with.template operator()<float, float>();
    case DType::float16:
      if (same) return with.template operator()<__half, __half>();
      if (forward) return with.template operator()<__half, float>();
      return with.template operator()<float, __half>();
    case DType::bfloat16:
      if (same) return with.template operator()<__nv_bfloat16, __nv_bfloat16>();
      if (forward) return with.template operator()<__nv_bfloat16, float>();
      return with.template operator()<float, __nv_bfloat16>();
  }
}

template <typename Visitor>
void visit_operation(const Problem& problem, Visitor&& visitor) {
  if (problem.fused.any)
    visit_operation<true>(problem, visitor);
  else
    visit_operation<false>(problem, visitor);
}

// The same of rows, which may have a scale as a factor: then nothing else is fused.
template <typename Visitor>
void visit_row_operation(const Problem& problem, Visitor&& visitor) {
  if (problem.fused.any || problem.fused.scale == 1 || problem.direction == Direction::backward)
    return visit_operation(problem, visitor);
  visit_operation<false>(problem, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    if constexpr (!kIsBackward<Operation> && std::is_same_v<Source, typename Operation::Result> &&
                  tuning::rows_may_scale(sizeof(Source)))
      visitor.template operator()<ScaledForward<Source>>();
    else
      throw std::logic_error("no kernel scales rows of such elements");
  });
}

// Calls visitor.operator()<Operation>() likewise, with an operation that is told now which it is.
template <typename Operation, typename Visitor>
void visit_told(const Problem& problem, Visitor&& visitor) {
  if (is_log(problem))
    visitor.template operator()<typename Operation::template With<std::true_type>>();
  else
    visitor.template operator()<typename Operation::template With<std::false_type>>();
}

[[noreturn]] inline void no_kernel_for(int value) {
  throw std::logic_error("no kernel is compiled for " + std::to_string(value));
}

// Calls visitor.operator()<Operation>() likewise, with an operation of columns that take turns in a row.
template <typename Visitor>
void visit_interleaved(const Problem& problem, Visitor&& visitor) {
  visit_operation<false>(problem, [&]<typename Of>() {
    if constexpr (tuning::may_interleave(sizeof(typename Of::Source), sizeof(typename Of::Result)))
      visitor.template operator()<Interleaved<Of, tuning::kInterleavedColumns>>();
    else
      throw std::logic_error("no kernel has columns of such elements take turns");
  });
}

// Calls visitor(std::integral_constant<int, n>) for the n that equals `value`, of kFirst, … kLast.
template <int kFirst, int kLast, typename Visitor>
void visit_int(int value, Visitor&& visitor) {
  if constexpr (kFirst <= kLast) {
    if (value == kFirst)
      visitor(std::integral_constant<int, kFirst>{});
    else
      visit_int<kFirst + 1, kLast>(value, visitor);
  } else {
    no_kernel_for(value);
  }
}

// Calls visitor(items), a constant, for the fewest items of which there is a kernel, as kRoundUp() says; of kMost at
// most.
template <int (*kRoundUp)(int), int kMost, int kItems = kRoundUp(1), typename Visitor>
void visit_items(int items, const Visitor& visitor) {
  if (items <= kItems)
    visitor(std::integral_constant<int, kItems>{});
  else if constexpr (kItems < kMost)
    visit_items<kRoundUp, kMost, kRoundUp(kItems + 1)>(items, visitor);
  else
    no_kernel_for(items);
}

// One past the last element of an operand, as an offset.
inline std::int64_t extent(const Problem& problem, Operand operand) {
  std::int64_t last = 0;
  for (const Axis* axis : {&problem.outer, &problem.dim, &problem.inner})
    for (int group = 0; group < axis->rank; ++group)
      last += (axis->groups[group].size - 1) * axis->groups[group].stride[operand];
  return last + 1;
}

// `neighbours`: along these, threads have several elements. `ragged`: and perhaps some that are none.
template <typename Operation>
Fusing<Operation> fusing_of(const Problem& problem, const Pointers& pointers, const Group& neighbours, bool ragged) {
  Fusing<Operation> fusing{};
  const auto scale = static_cast<typename Operation::Real>(problem.fused.scale);
  if constexpr (std::is_same_v<decltype(fusing.operation.log), bool>) fusing.operation.log = is_log(problem);
  // forward, what is fused applies it before it adds a bias
  if constexpr (kIsBackward<Operation> || !kFusesMore<Operation>) fusing.operation.scale = scale;
  if constexpr (Operation::kFused) {
    const Fused& fused = problem.fused;
    fusing.mask = static_cast<const std::uint8_t*>(pointers.mask);
    if (fused.mask) fusing.mask_end = fusing.mask + extent(problem, kMask);
    fusing.bias = static_cast<const std::uint8_t*>(pointers.bias);
    if (fused.bias) fusing.bias_end = fusing.bias + extent(problem, kBias) * size_of(fused.bias_dtype);
    fusing.mask_step = static_cast<int>(neighbours.stride[kMask]);
    fusing.bias_step = static_cast<int>(neighbours.stride[kBias]);
    fusing.cut = ragged || fused.causal;
    fusing.bias_is_real = fused.bias_dtype != problem.source;
    fusing.causal = fused.causal;
    fusing.dead_rows_are_zero = fused.dead_rows_are_zero;
    fusing.mask_flip = fused.mask_includes ? Excluded<1>::kAll : 0;
    fusing.scale = scale;
    fusing.diagonal = fused.diagonal;
    fusing.masks_evenly = fused.only_mask() && fusing.mask_step == 0;
  }
  return fusing;
}

// The same where FusedLine::apply() is called, which leaves the scale to the operation where terms are of 16 bits.
template <typename Operation>
void leave_scale(Fusing<Operation>& fusing) {
  if constexpr (kFusesMore<Operation> && !kIsBackward<Operation> && sizeof(typename Operation::Source) == 2)
    fusing.operation.scale = fusing.scale;
}

template <typename Operation>
RowArguments<Operation> row_arguments(const Problem& problem, const Plan& plan, const Pointers& pointers) {
  using Source = typename Operation::Source;
  RowArguments<Operation> arguments{};
  arguments.source = static_cast<const Source*>(pointers.source);
  arguments.grad = static_cast<const Source*>(pointers.grad);
  arguments.result = static_cast<typename Operation::Result*>(pointers.result);
  arguments.source_end = arguments.source + extent(problem, kSource);
  if (arguments.grad) arguments.grad_end = arguments.grad + extent(problem, kGrad);
  arguments.rows = problem.outer.size;
  arguments.dim = problem.dim.size;
  arguments.live = plan.items;
  arguments.lanes = plan.threads_per_row;
  arguments.apart = plan.run;
  arguments.rows_per_block = plan.rows_per_block;
  arguments.next_begins_late = pointers.next_begins_late;
  arguments.ragged = plan.ragged;
  if constexpr (Operation::kFused)
    arguments.outer = decltype(arguments.outer)(rows_in_order(problem, plan));
  else
    arguments.outer = decltype(arguments.outer)(problem.outer);
  const bool whole = plan.passes == 1 && problem.dim.size % (std::int64_t{plan.threads_per_row} * plan.vector) == 0;
  arguments.fusing =
      fusing_of<Operation>(problem, pointers, problem.dim.groups[0], plan.ragged || plan.staged || !whole);
  if constexpr (Operation::kFused) {
    arguments.fusing.masks_neighbours = masks_neighbours(problem);
    const bool held = !plan.staged && plan.vector == Row<Operation, int>::kVector;
    // a warp's only where they go with vectors: to shift them takes registers, and so warps that hide its rows' latency
    arguments.fusing.masks_vectors =
        held && (plan.regime == Regime::warp ? masks_vectors(problem) : masks_neighbours(problem));
    arguments.fusing.biases_vectors = held && plan.passes == 1 && biases_vectors(problem);
    arguments.fusing.aligned =
        (arguments.fusing.masks_vectors && masks_vectors(problem)) || (arguments.fusing.biases_vectors && !plan.ragged);
  }
  return arguments;
}

// Calls visitor(vectors), a constant: how many a thread holds of a row of the block and cluster regimes.
template <typename Operation, int kMost, typename Visitor>
void visit_held(const Plan& plan, const Visitor& visitor) {
  constexpr int kHeld = kHeldVectors<Operation>, kMostHeld = kMostHeldVectors<Operation>;
  if (plan.items <= kHeld) return visitor(std::integral_constant<int, kHeld>{});
  // those of 16 bits as they were loaded
  if constexpr (kMostHeld > kHeld && kMost > kMostHeld)
    if (plan.items <= kMostHeld) return visitor(std::integral_constant<int, kMostHeld>{});
  if (plan.items > kMost) no_kernel_for(plan.items);
  visitor(std::integral_constant<int, kMost>{});
}

// Calls visitor.operator()<Operation>() as visit_operation() does, with an operation that knows no more than a mask,
// where that is enough.
template <typename Visitor>
void visit_masked_operation(const Problem& problem, Visitor&& visitor) {
  if (!has_masked_kernels(problem)) return visit_row_operation(problem, visitor);
  visit_operation<true>(problem, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    using Result = typename Operation::Result;
    if constexpr (!kIsBackward<Operation> && std::is_same_v<Source, Result> && sizeof(Source) < 8) {
      if (masks_vectors(problem))
        visitor.template operator()<MaskedForward<Source, Result, true>>();
      else
        visitor.template operator()<MaskedForward<Source, Result>>();
    }
  });
}

// Launches kernel(arguments) on plan.grid blocks, in as many launches as the grid's limit asks for. False: plan.meets,
// but what this process has of the GPU has no room for all blocks at once, or does not know how; nothing was launched.
template <typename Arguments>
[[nodiscard]] bool try_launch_grid(void (*kernel)(Arguments), Arguments arguments, const Plan& plan,
                                   const Pointers& pointers, cudaStream_t stream) {
  // the limit and not what this launch needs: another thread may be launching the same kernel
  if (plan.shared_bytes > tuning::dynamic_shared_bytes(48 * 1024))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               tuning::dynamic_shared_bytes(pointers.shared_limit)),
          "cudaFuncSetAttribute");
  if (plan.cluster > 8)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (plan.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  }
  // of two such grids that began early, each might wait for the other's multiprocessors: they begin when all is over
  if (plan.meets) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  } else if (pointers.kernels_overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }

  const std::int64_t most = tuning::kMaxGrid / plan.cluster * plan.cluster;
  for (std::int64_t done = 0; done < plan.grid; done += most) {
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(plan.grid - done < most ? plan.grid - done : most);
    config.blockDim = static_cast<unsigned>(plan.block);
    config.dynamicSmemBytes = plan.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    arguments.first_block = done;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments);
    if (plan.meets && (error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorNotSupported)) {
      cudaGetLastError();  // forgets it
      return false;
    }
    check(error, "launching a softmax kernel");
  }
  return true;
}

template <auto kKernel, typename Arguments>
[[nodiscard]] bool try_launch_grid(const Arguments& arguments, const Plan& plan, const Pointers& pointers,
                                   cudaStream_t stream) {
#if !defined(__CUDACC__)
  [[maybe_unused]] const bool* const counted = &::emulator::counted<kKernel>;  // asked for, it counts
#endif
  return try_launch_grid(kKernel, arguments, plan, pointers, stream);
}

template <auto kKernel, typename Arguments>
void launch_grid(const Arguments& arguments, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  if (!try_launch_grid<kKernel>(arguments, plan, pointers, stream))
    check(cudaErrorCooperativeLaunchTooLarge, "launching a softmax kernel");
}

}  // namespace ndsoftmax::cuda
