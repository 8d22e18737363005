// Block regime: contiguous rows that one block holds in registers, as 16-byte vectors; wider than a warp likes.
// Thread t has vectors t, t + block, t + 2 block, …; warps reduce by shuffles, then through shared memory.
// Each element is read once and written once. What bounds it: memory, as long as rows start on 16 bytes. Others cost
// each of their threads instructions. Rows of 16 bits are held as loaded where threads have more than four vectors. A
// mask, and nothing more, has kernels of its own (MaskedForward), as in the cluster regime: they hold rows as where
// nothing is fused. Those of whole vectors ask for vectors of the mask, others for the words that its bytes lie in.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation, int kVectors>
__global__ void __launch_bounds__(tuning::kMaxBlock) block_row(const RowArguments<Operation> arguments) {
  if constexpr (kHasAllKernels) {
    await_kernel_before();
    if (!arguments.next_begins_late) let_next_kernel_begin();
    hold_rows<Row<Operation, int, !Operation::kAligned>, kVectors, 1>(
        arguments, arguments.first_block + blockIdx.x, 1, 1, blockDim.x, threadIdx.x, Lanes{}, BlockExchange{});
  } else {
    never_launched();
  }
}

}  // namespace

void launch_block(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_masked_operation(problem, [&]<typename Operation>() {
    const auto arguments = row_arguments<Operation>(problem, plan, pointers);
    visit_held<Operation, kMostHeldVectors<Operation>>(
        plan, [&](auto vectors) { launch_grid<block_row<Operation, vectors>>(arguments, plan, pointers, stream); });
  });
}

}  // namespace ndsoftmax::cuda
