// Warp regime: contiguous rows of at most 1024 elements, 512 of float64, each read once and written once, of whole
// 16-byte vectors (or of any size, where they are few; others: staged.cu). The row, rounded up to a power of two, of
// float64 to every second one, is the template parameter. Teams of 1 to 32 lanes hold a row each, or a few, as vectors
// in registers; shuffles reduce.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation, int kLog2Dim>
__global__ void __launch_bounds__(tuning::kWarpBlock) warp_rows(const RowArguments<Operation> arguments) {
  constexpr int kVector = Row<Operation, int>::kVector;
  constexpr tuning::WarpLayout kLayout = tuning::warp_layout(kLog2Dim, kVector);
  constexpr int kGroups = tuning::kWarpBlock / kLayout.lanes;
  const int group = threadIdx.x / kLayout.lanes, lane = threadIdx.x % kLayout.lanes;
  const auto row_of = [&](int team, int turn) {
    return work::row(arguments.first_block + blockIdx.x, arguments.rows_per_block, team, kGroups, turn);
  };
  const int most_turns = arguments.rows_per_block / kGroups;
  int turns = 1;  // that have a row for any team: few rows should not wait for the turns of many
  while (turns < kLayout.rows && turns < most_turns && row_of(0, turns) < arguments.rows) ++turns;
  await_kernel_before();
  let_next_kernel_begin();
  hold_rows<kLayout.vectors, kLayout.rows>(arguments, row_of(group, 0), kGroups, turns, kLayout.lanes, lane,
                                           Lanes{kLayout.lanes}, WarpExchange{});
}

}  // namespace

void launch_warp(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    constexpr int kBytes = sizeof(typename Operation::Source);
    constexpr int kSmallest = tuning::warp_log2_dim(0, kBytes, Operation::kFused);
    constexpr int kLargest = tuning::warp_max_log2_dim(kBytes, Operation::kFused);
    visit_int<kSmallest, kLargest, tuning::warp_log2_dim_step(kBytes)>(plan.log2_dim, [&](auto log2_dim) {
      const auto launch = [&]<typename Told>() {
        launch_grid<warp_rows<Told, log2_dim>>(row_arguments<Told>(problem, plan, pointers), plan, pointers, stream);
      };
      // what is asked once a row shows where a lane has one vector of it
      constexpr bool kShort = tuning::warp_layout(log2_dim, tuning::kVectorBytes / kBytes).vectors == 1;
      if constexpr (kShort && !Operation::kFused && !kIsBackward<Operation> &&
                    kBytes == sizeof(typename Operation::Result) && kBytes < 8)
        visit_told<Operation>(problem, launch);
      else
        launch.template operator()<Operation>();
    });
  });
}

}  // namespace ndsoftmax::cuda
