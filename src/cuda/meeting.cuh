// How the blocks of a cluster, which share a row, come to its state: each sends that of its part into the shared memory
// of all others. A barrier of the cluster would do the same, but as a release and acquire at the scope of the GPU,
// which takes about as long as loading does; there is one only at the start, hidden behind the loads. To wait at it
// empties L1, once for each warp that does, so that only the warp that sends waits (an H200 takes for nine problems of
// 16 bits, backward, 0.986 of the time, for 41 others as long).
#pragma once

#include "cuda/async.cuh"
#include "cuda/reduce.cuh"

namespace ndsoftmax::cuda {

// What the blocks of a cluster tell each other of a row.
template <typename State>
struct Meeting {
  ArrivalBarrier complete;
  Shared<State, kWarp> states;

  // Before the first send(), which has the barrier of the block that the other warps need.
  __device__ __forceinline__ static void await_others() {
    if (threadIdx.x < kWarp) ArrivalBarrier::await_cluster();
  }
  __device__ __forceinline__ void send(const State& held, int rank, int blocks) {
    __shared__ Shared<State, kWarp> warps;
    const State block = combine_warps(held, warps.get());
    const int thread = threadIdx.x;
    if (thread < blocks) complete.send(block, states.get() + rank, thread);
  }
  __device__ __forceinline__ State combined(int blocks) {
    const int lane = threadIdx.x % kWarp;
    return Lanes{}.combine(lane < blocks ? states.get()[lane] : State{});
  }
  // All of it, after complete.open(): for the one row that the blocks have.
  __device__ __forceinline__ State once(const State& held, int rank, int blocks) {
    await_others();
    send(held, rank, blocks);
    complete.wait(blocks * sizeof(State));
    return combined(blocks);
  }
};

template <typename State>
struct ClusterExchange {
  Meeting<State>& meeting;
  int rank, blocks;

  template <typename Operation>
  __device__ __forceinline__ auto finish(const Operation& operation, const State& held) const {
    return operation.finish(held, meeting.once(held, rank, blocks));
  }
};

}  // namespace ndsoftmax::cuda
