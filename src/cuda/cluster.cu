// Cluster regime (sm_90 and later): contiguous rows that a cluster of blocks holds. In registers: several small blocks
// of different clusters share a multiprocessor, so that some load while others exponentiate and store, which one large
// block would do in turns. Thread t of block b is thread b * block + t of the row; otherwise this is the block regime.
// Or in shared memory: see cluster_rows. Each block sends the state of its part into the shared memory of all others. A
// barrier of the cluster would do the same, but as a release and acquire at the scope of the GPU, which takes about as
// long as loading does; there is one only at the start, hidden behind the loads. Each element is read once and written
// once.
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
  bool first = true;    // of this cluster's rows: its blocks may not all run yet
  unsigned parity = 0;  // of how often this meeting was used
  bool again = false;   // it will be

  // One thread calls it, before the meeting is used.
  __device__ __forceinline__ static void expect(Meeting<State>& meeting, int blocks) {
    meeting.complete.expect(blocks * sizeof(State));
  }

  template <typename Operation>
  __device__ __forceinline__ auto finish(const Operation& operation, const State& held) const {
    __shared__ Shared<State, kWarp> warps;
    const State block = combine_warps(held, warps.get());
    const int thread = threadIdx.x, lane = thread % kWarp;
    if (first) ArrivalBarrier::await_cluster();
    if (thread < blocks) meeting.complete.send(block, meeting.states.get() + rank, thread);
    meeting.complete.await(parity);
    if (again && thread == 0) expect(meeting, blocks);
    return operation.finish(held, Lanes{}.combine(lane < blocks ? meeting.states.get()[lane] : State{}));
  }
};

template <typename Operation, int kVectors>
__global__ void __launch_bounds__(tuning::kMaxBlock) cluster_row(const RowArguments<Operation> arguments) {
  if constexpr (kHasClusters) {
    using State = typename Operation::State;
    __shared__ Meeting<State> meeting;
    const std::int64_t block = arguments.first_block + blockIdx.x;
    const int blocks = cluster_size(), rank = static_cast<int>(block % blocks);
    meeting.complete.open();
    if (threadIdx.x == 0) ClusterExchange<State>::expect(meeting, blocks);
    await_kernel_before();
    let_next_kernel_begin();
    hold_rows<Row<Operation, int>, kVectors, 1>(arguments, block / blocks, 1, 1, blocks * blockDim.x,
                                                rank * blockDim.x + threadIdx.x, Lanes{},
                                                ClusterExchange<State>{meeting, rank, blocks});
  } else {
    never_launched();
  }
}

// A block's parts of a cluster's rows, which arrive in shared memory one after the other. Rows are counted by turns.
template <typename Operation>
class Parts {
 public:
  using RowOf = Row<Operation, int>;
  using Source = typename Operation::Source;
  static constexpr int kVector = RowOf::kVector;

  __device__ __forceinline__ Parts(const RowArguments<Operation>& arguments, ArrivalBarrier* arrived, int rank)
      : arguments_(arguments), arrived_(arrived), rank_(rank) {}

  // Begins to copy a part to where nobody reads any more. One thread calls.
  __device__ __forceinline__ void fetch(const RowOf& row, int turn) const {
    const int dim = static_cast<int>(arguments_.dim), from = begin(row);
    Source *const source = at(turn), *const grad = source + size();
    const int vectors = work::vectors_in_row(dim, kVector, row.phase());
    int first = 0, end = min(max(vectors * kVector - rank_ * size(), 0), size());
    const auto element_by_element = [&](int first) {
      for (int i = first; i < first + kVector; ++i) {
        if (from + i < 0 || from + i >= dim) continue;
        source[i] = row.source()[from + i];
        if constexpr (RowOf::kBackward) grad[i] = row.grad()[from + i];
      }
      ArrivalBarrier::stored();
    };
    if (!row.vectors_only()) {  // the first row or the last, where vectors would reach out of the tensor
      if (from < 0) element_by_element(first), first += kVector;
      if (end > first && from + end > dim) end -= kVector, element_by_element(end);
    }
    ArrivalBarrier& arrived = arrived_[turn % tuning::kClusterSlots];
    const unsigned bytes = end > first ? (end - first) * sizeof(Source) : 0;
    arrived.expect(kHeldOperands<Operation> * bytes);
    if (bytes == 0) return;
    arrived.copy(source + first, row.source() + from + first, bytes);
    if constexpr (RowOf::kBackward) arrived.copy(grad + first, row.grad() + from + first, bytes);
  }

  __device__ __forceinline__ void await(int turn) const {
    arrived_[turn % tuning::kClusterSlots].await(turn / tuning::kClusterSlots % 2);
  }

  // Calls visit(element of the row, raw, where it lies) for this thread's vectors, a few at a time where they lie
  // within the row. They are blockDim.x vectors apart.
  template <typename Visit>
  __device__ __forceinline__ void for_vectors(const RowOf& row, int turn, const Visit& visit) const {
    constexpr int kUnroll = tuning::kClusterRowsVectors / kHeldOperands<Operation>;
    const int dim = static_cast<int>(arguments_.dim), step = blockDim.x * kVector;
    Source *from = at(turn) + threadIdx.x * kVector, *const end = at(turn) + size();
    int element = begin(row) + static_cast<int>(threadIdx.x) * kVector;
    const auto visit_some = [&]<int kCount>(std::integral_constant<int, kCount>) {
      typename RowOf::Raw raw[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        raw[i].source = Vec<Source, kVector>::load(from + i * step);
        if constexpr (RowOf::kBackward) raw[i].grad = Vec<Source, kVector>::load(from + i * step + size());
      }
      if constexpr (kCount == 1) row.resolve(raw[0], element);
      visit(element, raw, from);
      from += kCount * step;
      element += kCount * step;
    };
#pragma unroll 1
    while (from + (kUnroll - 1) * step < end && element >= 0 && element + (kUnroll - 1) * step + kVector <= dim)
      visit_some(std::integral_constant<int, kUnroll>{});
#pragma unroll 1
    while (from < end && element < dim) visit_some(std::integral_constant<int, 1>{});
  }

 private:
  __device__ __forceinline__ int size() const { return blockDim.x * arguments_.live * kVector; }  // elements
  __device__ __forceinline__ int begin(const RowOf& row) const { return rank_ * size() - row.phase(); }
  __device__ __forceinline__ Source* at(int turn) const {
    return reinterpret_cast<Source*>(dynamic_shared_memory()) +
           turn % tuning::kClusterSlots * kHeldOperands<Operation> * size();
  }

  const RowArguments<Operation>& arguments_;
  ArrivalBarrier* const arrived_;
  const int rank_;
};

// The widest rows: of the clusters that would hold them in registers a GPC has room for too few. Clusters stay, and
// their rows arrive in shared memory, the next one while one is computed there. Thread t of block b has vectors t,
// t + block, … of part b of each row.
template <typename Operation>
__global__ void __launch_bounds__(tuning::kMaxBlock, 1)
    cluster_rows(const __grid_constant__ RowArguments<Operation> arguments) {
  if constexpr (kHasClusters) {
    using Source = typename Operation::Source;
    using State = typename Operation::State;
    using Term = typename Operation::Term;
    using RowOf = Row<Operation, int>;
    constexpr int kVector = RowOf::kVector;
    __shared__ ArrivalBarrier arrived[tuning::kClusterSlots];
    __shared__ Meeting<State> meetings[2];  // used in turns: some thread may still read the states of the row before
    const Operation operation = arguments.fusing.operation;
    const int blocks = cluster_size(), rank = static_cast<int>(blockIdx.x) % blocks;
    const int first = static_cast<int>(blockIdx.x) / blocks, step = static_cast<int>(gridDim.x) / blocks;
    const int turns = (static_cast<int>(arguments.rows) - first + step - 1) / step;
    const Parts<Operation> parts(arguments, arrived, rank);
    const auto row_of = [&](int turn) { return RowOf(arguments, first + turn * step); };

    if (threadIdx.x == 0) {
      for (ArrivalBarrier& barrier : arrived) barrier.init();
      for (Meeting<State>& meeting : meetings) {
        meeting.complete.init();
        ClusterExchange<State>::expect(meeting, blocks);
      }
    }
    ArrivalBarrier::arrive_cluster();
    await_kernel_before();
    let_next_kernel_begin();
    if (threadIdx.x == 0 && turns > 0) parts.fetch(row_of(0), 0);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      __syncthreads();  // the row before has been written: its place is free
      if (threadIdx.x == 0 && turn + 1 < turns) parts.fetch(row_of(turn + 1), turn + 1);
      const RowOf row = row_of(turn);
      const int apart = static_cast<int>(blockDim.x) * kVector;
      State held;
      parts.await(turn);
      if constexpr (!RowOf::kBackward) {
        parts.for_vectors(row, turn, [&]<int kCount>(int, const typename RowOf::Raw(&raw)[kCount], Source*) {
          Term terms[kCount * kVector];
#pragma unroll
          for (int i = 0; i < kCount; ++i) row.terms(raw[i], 0, terms + i * kVector);
          operation.template raise<kCount * kVector>(held, terms);
        });
        held.max = Lanes{}.max(held.max);
      }
      parts.for_vectors(row, turn, [&]<int kCount>(int, const typename RowOf::Raw(&raw)[kCount], Source* from) {
        Term terms[kCount * kVector];
#pragma unroll
        for (int i = 0; i < kCount; ++i) row.terms(raw[i], 0, terms + i * kVector);
        operation.template add<kCount * kVector>(held, terms);
        if constexpr (!RowOf::kBackward) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const auto kept = [&](int k) { return terms[i * kVector + k]; };
            Vec<Source, kVector>::narrowed(kept).store_shared(from + i * apart);
          }
        }
      });
      if constexpr (!RowOf::kBackward) ArrivalBarrier::stored();
      operation.total(held, Lanes{});
      const ClusterExchange<State> exchange{meetings[turn % 2], rank,          blocks,
                                            turn == 0,          turn / 2 % 2u, turn + 2 < turns};
      const auto finish = finish_of<Operation>(exchange, held, arguments.fusing);
      operation.with_log([&](auto log) {
        parts.for_vectors(row, turn, [&]<int kCount>(int element, const typename RowOf::Raw(&raw)[kCount], Source*) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            Term terms[kVector];
            row.terms(raw[i], 0, terms);
            const auto value = [&](int k) { return finish(terms[k], log); };
            if constexpr (kCount > 1)
              row.store_whole(element + i * apart, value);
            else
              row.store(element, value);
          }
        });
      });
    }
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
    if constexpr (tuning::has_cluster_rows(sizeof(typename Operation::Source), Operation::kDirection,
                                           Operation::kFused))
      if (plan.staged) return launch_grid<cluster_rows<Operation>>(arguments, plan, pointers, stream);
    visit_held<Operation>(
        plan, [&](auto vectors) { launch_grid<cluster_row<Operation, vectors>>(arguments, plan, pointers, stream); });
  });
}

}  // namespace ndsoftmax::cuda
