// Cluster regime (sm_90 and later): contiguous rows that a cluster of blocks holds in registers. Several small blocks
// of different clusters share a multiprocessor, so that some load while others exponentiate and store, which one large
// block would do in turns. Thread t of block b is thread b * block + t of the row; otherwise this is the block regime.
// States of the blocks meet in distributed shared memory: one exchange, two cluster barriers, the first one hidden
// behind the loads. Each element is read once and written once.
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
__global__ void __launch_bounds__(tuning::kMaxBlock) cluster_row(const RowArguments<Operation> arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kVectors = tuning::held_vectors(sizeof(typename Operation::Source), kHeldOperands<Operation>);
  const auto cluster = cooperative_groups::this_cluster();
  const int blocks = cluster.num_blocks(), rank = cluster.block_rank();
  hold_rows<kVectors, 1>(arguments, (arguments.first_block + blockIdx.x) / blocks, 1, 1, blocks * blockDim.x,
                         rank * blockDim.x + threadIdx.x, Lanes{}, ClusterExchange{});
#else
  __trap();  // plans have no clusters for code compiled so
#endif
}

}  // namespace

int compiled_compute_capability() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, cluster_row<Forward<false, float, float>>), "cudaFuncGetAttributes");
  return attributes.ptxVersion;
}

void launch_cluster(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    launch_grid(cluster_row<Operation>, row_arguments<Operation>(problem, plan, pointers), plan, pointers, stream);
  });
}

}  // namespace ndsoftmax::cuda
