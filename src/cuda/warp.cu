// Warp regime: contiguous rows of at most 1024 elements; the row, rounded up to a power of two, is the template
// parameter. Teams of 1 to 32 lanes hold a row each, or a few, as 16-byte vectors in registers; shuffles reduce.
// Each element is read once and written once, by one thread, in neighbouring vectors across the team.
// Rows that do not start on 16 bytes, but follow each other without gaps, are staged instead: a block copies some of
// them into shared memory as one run of vectors, teams of lanes take neighbouring elements from there and put results
// back, and the block copies those out as one run. Memory sees whole vectors only. Assumes nothing else.
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
    return work::row(arguments.first_block + blockIdx.x, kGroups * kLayout.rows, team, kGroups, turn);
  };
  int turns = 1;  // that have a row for any team: few rows should not wait for the turns of many
  while (turns < kLayout.rows && row_of(0, turns) < arguments.rows) ++turns;
  await_kernel_before();
  let_next_kernel_begin();
  hold_rows<kLayout.vectors, kLayout.rows>(arguments, row_of(group, 0), kGroups, turns, kLayout.lanes, lane,
                                           Lanes{kLayout.lanes}, WarpExchange{});
}

constexpr int kStagedMaxLog2Items = tuning::kWarpMaxLog2Dim - 5;  // of the widest row, over the lanes of a warp

// Copies `count` elements between global and shared memory, both aligned to a vector.
template <typename T>
__device__ __forceinline__ void copy(const T* from, T* to, int count) {
  constexpr int kVector = tuning::kVectorBytes / sizeof(T);
  const int vectors = count / kVector;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += tuning::kWarpBlock)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (int i = vectors * kVector + threadIdx.x; i < count; i += tuning::kWarpBlock) to[i] = from[i];
}

// Of a row that lies where the rows before it end; only what is fused has to be looked up.
template <typename Operation>
__device__ __forceinline__ auto offsets_of_fused(const RowArguments<Operation>& arguments, std::int64_t row) {
  if constexpr (Operation::kFused)
    return offsets_in(arguments.outer, row);
  else
    return Offsets<kWhole>{};
}

// Teams of kLanes lanes, or, where that is 0, of as many as the plan says: fused kernels are large, and those that
// differ in their lanes alone are one.
template <typename Operation, int kItems, int kLanes>
__global__ void __launch_bounds__(tuning::kWarpBlock) staged_rows(const RowArguments<Operation> arguments) {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  constexpr bool kBackward = Operation::kDirection == Direction::backward;

  const int dim = static_cast<int>(arguments.dim);
  const int lanes = kLanes > 0 ? kLanes : arguments.lanes, teams = tuning::kWarpBlock / lanes;
  const int rows_per_block = tuning::staged_rows_per_block(lanes, dim, sizeof(Source), sizeof(Result));
  const std::int64_t first = (arguments.first_block + blockIdx.x) * rows_per_block;
  const int rows = static_cast<int>(min(static_cast<std::int64_t>(rows_per_block), arguments.rows - first));

  // results replace what the same thread has read, where they have the same size
  Source* source = reinterpret_cast<Source*>(dynamic_shared_memory());
  Source* grad = source + rows_per_block * dim;
  Result* result = sizeof(Source) == sizeof(Result)
                       ? reinterpret_cast<Result*>(source)
                       : reinterpret_cast<Result*>(grad + (kBackward ? rows_per_block * dim : 0));
  await_kernel_before();
  let_next_kernel_begin();
  copy(arguments.source + first * dim, source, rows * dim);
  if constexpr (kBackward) copy(arguments.grad + first * dim, grad, rows * dim);
  __syncthreads();

  const int lane = threadIdx.x % lanes;
  for (int turn = 0; turn < rows; turn += teams) {
    const int row = turn + threadIdx.x / lanes;
    const bool exists = row < rows;
    const FusedRow<Operation, int> fused(arguments, offsets_of_fused(arguments, exists ? first + row : 0), dim);
    Extras<Operation, 1> extras[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item)
      if (exists && item * lanes + lane < dim) fused.load(item * lanes + lane, extras[item]);
    typename Operation::Term terms[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item >= arguments.live) break;
      const int element = item * lanes + lane, at = row * dim + element;
      if (exists && element < dim) {
        fused.resolve(element, extras[item]);
        terms[item] = fused.term(extras[item], widen(source[at]), kBackward ? widen(grad[at]) : 0, 0);
      } else {
        terms[item] = Operation::nothing();
      }
    }
    const auto state = Operation::template reduce<kItems, 1, 1>(terms, arguments.live, Lanes{lanes});
    const auto finish = finish_of<Operation>(WarpExchange{}, state, arguments.fusing);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item >= arguments.live) break;
      const int element = item * lanes + lane;
      if (exists && element < dim)
        result[row * dim + element] = narrow<Result>(finish(terms[item], extras[item].include(0)));
    }
  }
  __syncthreads();
  copy(result, arguments.result + first * dim, rows * dim);
}

// Calls visitor(items, lanes), both constants.
template <typename Operation, typename Visitor>
void visit_staged(int log2_dim, const Visitor& visitor) {
  using std::integral_constant;
  if constexpr (Operation::kFused) {
    const int items = (1 << log2_dim) / tuning::staged_lanes(log2_dim);
    visit_int<1, kStagedMaxLog2Items>(std::bit_width(static_cast<unsigned>(items)) - 1, [&](auto log2_items) {
      visitor(integral_constant<int, 1 << log2_items>{}, integral_constant<int, 0>{});
    });
  } else {
    visit_int<1, tuning::kWarpMaxLog2Dim>(log2_dim, [&](auto log2_dim) {
      constexpr int kLanes = tuning::staged_lanes(log2_dim);
      visitor(integral_constant<int, (1 << log2_dim) / kLanes>{}, integral_constant<int, kLanes>{});
    });
  }
}

}  // namespace

void launch_warp(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    const auto arguments = row_arguments<Operation>(problem, plan, pointers);
    if (plan.staged) {
      visit_staged<Operation>(plan.log2_dim, [&](auto items, auto lanes) {
        launch_grid(staged_rows<Operation, items, lanes>, arguments, plan, pointers, stream);
      });
    } else {
      constexpr int kSmallest = std::bit_width(static_cast<unsigned>(Row<Operation, int>::kVector)) - 1;
      visit_int<kSmallest, tuning::kWarpMaxLog2Dim>(plan.log2_dim, [&](auto log2_dim) {
        launch_grid(warp_rows<Operation, log2_dim>, arguments, plan, pointers, stream);
      });
    }
  });
}

}  // namespace ndsoftmax::cuda
