// Warp regime: contiguous rows of at most 1024 elements, 512 of float64, each read once and written once. The row,
// rounded up to a power of two, is the template parameter. Teams of 1 to 32 lanes hold a row each, or a few, in
// registers; shuffles reduce. Rows of whole 16-byte vectors are held as such, others element by element: few of them,
// up to 320 wide, of more of which a block has more threads, and those that cannot be staged (staged.cu), or on older
// GPUs. Rows of 16 bits may begin and end within vectors where something is fused, or where they have more than 1024
// elements: up to 2048, forward some 2300, are a warp's where a block would leave too many threads idle; kernels for
// these are told how many vectors a lane has room for.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation, int kVector, int kLog2Dim, int kVectors>
__device__ __forceinline__ void hold_warp_rows(const RowArguments<Operation>& arguments) {
  constexpr tuning::WarpLayout kLayout = tuning::warp_layout(kLog2Dim, kVector);
  const int groups = static_cast<int>(blockDim.x) / kLayout.lanes;
  const int group = threadIdx.x / kLayout.lanes, lane = threadIdx.x % kLayout.lanes;
  const auto row_of = [&](int team, int turn) {
    return work::row(arguments.first_block + blockIdx.x, arguments.rows_per_block, team, groups, turn);
  };
  const int most_turns = arguments.rows_per_block / groups;
  int turns = 1;  // that have a row for any team: few rows should not wait for the turns of many
  while (turns < kLayout.rows && turns < most_turns && row_of(0, turns) < arguments.rows) ++turns;
  await_kernel_before();
  let_next_kernel_begin();
  constexpr bool kMayBeRagged =
      kVector > 1 && !Operation::kBiased &&
      tuning::vectors_may_be_ragged(sizeof(typename Operation::Source), Operation::kFused, kLog2Dim);
  using RowOf = Row<Operation, int, kMayBeRagged, kVector, false>;
  hold_rows<RowOf, kVectors, kLayout.rows>(arguments, row_of(group, 0), groups, turns, kLayout.lanes, lane,
                                           Lanes{kLayout.lanes}, WarpExchange{});
}

template <typename Operation, int kVector, int kLog2Dim, int kVectors>
__global__ void __launch_bounds__(tuning::kWarpBlock) warp_rows(const RowArguments<Operation> arguments) {
  if constexpr (kHasAllKernels || kVector == 1)
    hold_warp_rows<Operation, kVector, kLog2Dim, kVectors>(arguments);
  else
    never_launched();
}

}  // namespace

void launch_warp(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_row_operation(problem, [&]<typename Operation>() {
    constexpr int kBytes = sizeof(typename Operation::Source), kVector = tuning::kVectorBytes / kBytes;
    if (plan.vector == 1) {
      visit_int<0, tuning::kElementwiseKernels - 1>(tuning::elementwise_kernel(plan.log2_dim), [&](auto i) {
        constexpr int kLog2Dim = tuning::kElementwiseLog2Dims[i];
        launch_grid<warp_rows<Operation, 1, kLog2Dim, tuning::warp_layout(kLog2Dim, 1).vectors>>(
            row_arguments<Operation>(problem, plan, pointers), plan, pointers, stream);
      });
    } else if constexpr (!tuning::always_elementwise(kBytes)) {
      constexpr int kSmallest = tuning::warp_min_log2_dim(kBytes, Operation::kFused);
      constexpr int kLargest = tuning::warp_max_log2_dim(kBytes, Operation::kFused);
      visit_int<kSmallest, kLargest>(plan.log2_dim, [&](auto log2_dim) {
        constexpr int kVectors = tuning::warp_layout(log2_dim, kVector).vectors;
        const auto launch = [&]<typename Told, int kHeld>() {
          launch_grid<warp_rows<Told, kVector, log2_dim, kHeld>>(row_arguments<Told>(problem, plan, pointers), plan,
                                                                 pointers, stream);
        };
        if constexpr (log2_dim > tuning::kWarpMaxLog2Dim) {
          constexpr int kFew = tuning::kFewRawVectors, kMost = tuning::most_raw_vectors(Operation::kDirection);
          if (plan.items <= kFew) return launch.template operator()<Operation, kFew>();
          if constexpr (kMost > kVectors)
            if (plan.items > kVectors) return launch.template operator()<Operation, kMost>();
        }
        if constexpr (Operation::kFused && !kIsBackward<Operation> && kBytes == sizeof(typename Operation::Result) &&
                      log2_dim <= tuning::biased_vectors_most_log2_dim(kBytes))
          if (has_biased_kernels(problem) && biases_vectors(problem) && !plan.ragged)
            return launch.template operator()<BiasedForward<typename Operation::Source>, kVectors>();
        // what is asked once a row shows where a lane has one vector of it
        constexpr bool kShort = kVectors == 1;
        if constexpr (kShort && !Operation::kFused && !kIsBackward<Operation> && !kScalesRows<Operation> &&
                      kBytes == sizeof(typename Operation::Result))
          visit_told<Operation>(problem, [&]<typename Told>() { launch.template operator()<Told, kVectors>(); });
        else
          launch.template operator()<Operation, kVectors>();
      });
    }
  });
}

}  // namespace ndsoftmax::cuda
