// Strided regime, columns of a short dim that no vectors divide, where they are many. A thread holds all of dim. Its
// own columns are a vector of the first row. Those of other rows are staggered: they begin where memory has vectors,
// which is up to three columns earlier, a row's shift. Rows of the same shift are a class. Each class has maxima and
// sums of its vectors' columns; lanes exchange them for those of their own columns, to combine all classes, and
// exchange back. So all that is loaded and stored are vectors, and there is no barrier: vectors that a warp needs of
// its neighbours it loads as well, and lets them store.
//
// What bounds it is memory; 16 bits are close to instructions. Exponentials are computed twice, which spares registers.
//
// A warp's pieces of a row begin and end within sectors: the other part is its neighbour's, who stores it soon enough.
//
// Assumes: forward, nothing fused, not in place; outer, dim and inner are one group each; the source and the result
// have the same shifts.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"
#include "host/cuda_plan.hpp"

namespace ndsoftmax::cuda {
namespace {

constexpr int kVector = tuning::kStaggeredVector;

template <typename Operation>
struct StaggeredArguments {
  const typename Operation::Source* source;
  typename Operation::Result* result;
  std::int64_t first_block;
  std::int64_t outer_stride[kWhole], dim_stride[kWhole];
  int strips, strip, dim;  // strip: columns
  work::Divider warps;     // of a strip
  Fusing<Operation> fusing;
};

// Values of a vector's columns, which begin kShift earlier, as those of the thread's own columns, and back. Undefined
// is what a neighbour would have to tell that is not in the warp.
template <int kShift>
__device__ __forceinline__ void to_own(const float (&shifted)[kVector], float (&own)[kVector], int lane) {
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    own[k] = k + kShift < kVector ? shifted[k + kShift]
                                  : __shfl_sync(kAllLanes, shifted[k + kShift - kVector], (lane + 1) % kWarp, kWarp);
}
template <int kShift>
__device__ __forceinline__ void from_own(const float (&own)[kVector], float (&shifted)[kVector], int lane) {
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    shifted[k] = k >= kShift ? own[k - kShift]
                             : __shfl_sync(kAllLanes, own[k - kShift + kVector], (lane + kWarp - 1) % kWarp, kWarp);
}

// Calls visit(number, shift, row) for each class that has rows, of which that is the first. kDim: rows of all classes,
// at most; all kernels but the one of the fewest have rows of each.
template <int kClasses, int kDim, typename Visit>
__device__ __forceinline__ void each_class(int dim, std::int64_t stride, const Visit& visit) {
  [&]<int... kNumber>(std::integer_sequence<int, kNumber...>) {
    const auto of = [&](auto number) {
      constexpr int kShift = number * kVector / kClasses;
      const int row = work::first_staggered_row(kShift, stride, kVector, kClasses);
      if (number == 0 || kDim > tuning::kStaggeredRows[0] || row < dim)
        visit(number, std::integral_constant<int, kShift>{}, row);
    };
    (of(std::integral_constant<int, kNumber>{}), ...);
  }(std::make_integer_sequence<int, kClasses>{});
}

template <typename Operation, int kClasses, int kDim>
__device__ __forceinline__ void take_staggered(const StaggeredArguments<Operation>& arguments) {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using State = typename Operation::State;
  using Held = Vec<Source, kVector>;
  constexpr int kRows = (kDim + kClasses - 1) / kClasses;  // of a class
  const Operation operation = arguments.fusing.operation;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto warp = static_cast<int>((arguments.first_block + blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp);
  const int strip = arguments.warps.quotient(warp);
  await_kernel_before();
  let_next_kernel_begin();
  if (strip >= arguments.strips) return;
  const work::StaggeredThread thread = work::staggered_thread(warp - strip * arguments.warps.size, lane);
  const std::int64_t source_stride = arguments.dim_stride[kSource], result_stride = arguments.dim_stride[kResult];
  const Source* const source = arguments.source + strip * arguments.outer_stride[kSource];
  Result* const result = arguments.result + strip * arguments.outer_stride[kResult];
  const auto each = [&](const auto& visit) { each_class<kClasses, kDim>(arguments.dim, source_stride, visit); };
  // columns that the strip's first vector begins before it
  const int phase = static_cast<int>(strip * arguments.outer_stride[kSource] % kVector);
  const int whole = (arguments.dim - 1) / kClasses;  // rows that each class has, besides the last of all

  Held held[kClasses][kRows];
  each([&](auto number, auto shift, int row) {
    const int before = phase + shift, last = (arguments.strip - 1 + before) / kVector;
    // of a vector that is not there its neighbour is loaded: what becomes of that is not stored
    const int first = min(max(thread.vector, before / kVector), last) * kVector - before;
    const int there = arguments.strip - first;
    const Source* from = source + row * source_stride + first;
#pragma unroll
    for (int i = 0; i < kRows; ++i, from += kClasses * source_stride) {
      const int left = arguments.dim - 1 - row - i * kClasses;
      Held& vector = held[number][i];
      vector = Held::filled(Operation::nothing());
      if (i < whole || left > 0 || (left == 0 && there >= kVector))
        vector = Held::load(from);
      else if (left == 0)  // nothing may follow in memory
        vector = Held::load_part(from, 0, there, vector);
    }
  });

  float largest[kVector], sum[kVector];  // of the thread's own columns
#pragma unroll
  for (int k = 0; k < kVector; ++k) largest[k] = Operation::nothing(), sum[k] = 0;
  each([&](auto number, auto shift, int) {
    Held most = held[number][0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) most = most.larger(held[number][i]);
    float shifted[kVector], own[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) shifted[k] = most.widened(k);
    to_own<shift>(shifted, own, lane);
#pragma unroll
    for (int k = 0; k < kVector; ++k) largest[k] = larger(largest[k], operation.scaled(own[k]));
  });
  each([&](auto number, auto shift, int) {
    float max[kVector], shifted[kVector], own[kVector];
    from_own<shift>(largest, max, lane);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      typename Operation::Term terms[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) terms[i] = held[number][i].widened(k);
      State state;
      state.max = max[k];
      operation.template add<kRows>(state, terms);
      shifted[k] = state.sum;
    }
    to_own<shift>(shifted, own, lane);
#pragma unroll
    for (int k = 0; k < kVector; ++k) sum[k] += own[k];
  });

  float scale[kVector], from_result[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    State state;
    state.max = largest[k], state.sum = sum[k];
    const auto finish = operation.finish(state);
    scale[k] = finish.scale, from_result[k] = finish.from_result;
  }
  each([&](auto number, auto shift, int row) {
    float max_there[kVector], scale_there[kVector], from_result_there[kVector];
    from_own<shift>(largest, max_there, lane);
    from_own<shift>(scale, scale_there, lane);
    from_own<shift>(from_result, from_result_there, lane);
    typename Operation::Finish finish[kVector];  // as far as again() takes it
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      finish[k] = {operation.largest_term(max_there[k]), 0, 1, scale_there[k], from_result_there[k], operation.scale};
    const int first = thread.vector * kVector - phase - shift;
    const int begin = max(-first, 0), end = min(arguments.strip - first, kVector);
    if (!thread.stores || begin >= end) return;
    Result* to = result + row * result_stride + first;
    operation.with_log([&](auto log) {
#pragma unroll
      for (int i = 0; i < kRows; ++i, to += kClasses * result_stride) {
        if (i >= whole && row + i * kClasses >= arguments.dim) break;
        const auto vector =
            Vec<Result, kVector>::narrowed([&](int k) { return finish[k].again(held[number][i].widened(k), log); });
        if (end - begin == kVector)
          vector.store(to);
        else
          vector.store_part(to, begin, end);
      }
    });
  });
}

// kDim: rows at most.
template <typename Operation, int kClasses, int kDim>
__global__ void __launch_bounds__(tuning::staggered_block(kDim), tuning::staggered_blocks(kDim))
    staggered_columns(const __grid_constant__ StaggeredArguments<Operation> arguments) {
  if constexpr (kHasAllKernels)
    take_staggered<Operation, kClasses, kDim>(arguments);
  else
    never_launched();
}

}  // namespace

void launch_staggered(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    using Result = typename Operation::Result;
    if constexpr (tuning::columns_may_be_staggered(sizeof(Source), sizeof(Result), Operation::kDirection,
                                                   Operation::kFused)) {
      StaggeredArguments<Operation> arguments{};
      arguments.source = static_cast<const Source*>(pointers.source);
      arguments.result = static_cast<Result*>(pointers.result);
      for (const int operand : {kSource, kResult}) {
        arguments.outer_stride[operand] = problem.outer.rank == 0 ? 0 : problem.outer.groups[0].stride[operand];
        arguments.dim_stride[operand] = problem.dim.groups[0].stride[operand];
      }
      arguments.strips = static_cast<int>(problem.outer.size);
      arguments.strip = static_cast<int>(problem.inner.size);
      arguments.dim = static_cast<int>(problem.dim.size);
      arguments.warps = work::Divider(work::staggered_warps(problem.inner.size, kVector));
      arguments.fusing = fusing_of<Operation>(problem, pointers, problem.inner.groups[0], false);
      visit_int<1, tuning::kStaggeredMostStep>(stagger_step(problem), [&](auto step) {
        constexpr int kLast = tuning::kStaggeredRows.size() - 1;
        visit_int<0, kLast>(tuning::staggered_kernel(sizeof(Source), step, plan.items), [&](auto kernel) {
          constexpr int kDim = tuning::kStaggeredRows[kernel];
          if constexpr (tuning::has_staggered_rows(sizeof(Source), step, kDim))
            launch_grid<staggered_columns<Operation, kVector / step, kDim>>(arguments, plan, pointers, stream);
        });
      });
    } else {
      throw std::logic_error("no kernel is compiled for staggered columns of such a problem");
    }
  });
}

}  // namespace ndsoftmax::cuda
