// Cluster regime (sm_90 and later): contiguous rows that a cluster of blocks holds in registers. Several small blocks
// of different clusters share a multiprocessor, so that some load while others exponentiate and store, which one large
// block would do in turns. Thread t of block b is thread b * block + t of the row; otherwise this is the block regime.
// Each block sends the state of its part into the shared memory of all others. A barrier of the cluster would do the
// same, but as a release and acquire at the scope of the GPU, which takes about as long as loading does; there is one
// only at the start, hidden behind the loads. Each element is read once and written once.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

// What the blocks of a cluster tell each other of a row.
template <typename State>
struct Meeting {
  ArrivalBarrier complete;
  Shared<State, kWarp> states;
};

template <typename State>
struct ClusterExchange {
  static constexpr bool kAlone = false;

  Meeting<State>& meeting;
  int rank, blocks;

  __device__ __forceinline__ ClusterExchange(Meeting<State>& meeting, int rank, int blocks)
      : meeting(meeting), rank(rank), blocks(blocks) {
    meeting.complete.open();
  }

  template <typename Operation>
  __device__ __forceinline__ auto finish(const Operation& operation, const State& held) const {
    __shared__ Shared<State, kWarp> warps;
    const State block = combine_warps(held, warps.get());
    const int thread = threadIdx.x, lane = thread % kWarp;
    ArrivalBarrier::await_cluster();
    if (thread < blocks) meeting.complete.send(block, meeting.states.get() + rank, thread);
    meeting.complete.wait(blocks * sizeof(State));
    return operation.finish(held, Lanes{}.combine(lane < blocks ? meeting.states.get()[lane] : State{}));
  }
};

template <typename Operation, int kVectors>
__global__ void __launch_bounds__(tuning::kMaxBlock) cluster_row(const RowArguments<Operation> arguments) {
  if constexpr (kHasClusters) {
    __shared__ Meeting<typename Operation::State> meeting;
    const std::int64_t block = arguments.first_block + blockIdx.x;
    const int blocks = cluster_size(), rank = static_cast<int>(block % blocks);
    const ClusterExchange<typename Operation::State> exchange(meeting, rank, blocks);
    await_kernel_before();
    let_next_kernel_begin();
    hold_rows<Row<Operation, int>, kVectors, 1>(arguments, block / blocks, 1, 1, blocks * blockDim.x,
                                                rank * blockDim.x + threadIdx.x, Lanes{}, exchange);
  } else {
    never_launched();
  }
}

}  // namespace

int compiled_compute_capability() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, cluster_row<Forward<float, float>, 8>), "cudaFuncGetAttributes");
  return attributes.ptxVersion;
}

void launch_cluster(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    const auto arguments = row_arguments<Operation>(problem, plan, pointers);
    visit_held<Operation>(
        plan, [&](auto vectors) { launch_grid<cluster_row<Operation, vectors>>(arguments, plan, pointers, stream); });
  });
}

}  // namespace ndsoftmax::cuda
