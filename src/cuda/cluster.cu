// Cluster regime (sm_90 and later): contiguous rows that a cluster of blocks keeps in shared memory. A bulk copy brings
// a block's part of a row there without passing registers; while the block works on one row the next arrives, so that
// all of a multiprocessor's shared memory is under way or in use at any time. The online softmax walks over a part
// twice, first for the state, then to write; blocks send their states into each other's shared memory.
// Each element is read from memory once and written once. Exponentials are computed twice, also of 16-bit rows: half of
// what the special function units can do in the time of a copy. In the block regime a cluster is one block.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
struct KeptArguments : RowArguments<Operation> {
  int parts;     // blocks of a cluster, which share a row
  int turns;     // rows that a cluster works on, one after another
  int capacity;  // vectors of each operand that a block has room for
};

// What blocks of a cluster tell each other of a row.
template <typename State>
struct Meeting {
  BulkBarrier complete[2];  // two: some blocks may be at the next row
  Shared<State, kWarp> states[2];

  // Every thread brings the state of what it has seen of the row and gets the state of the row.
  __device__ __forceinline__ State exchange(const State& seen, int turn, int part, int parts) {
    __shared__ Shared<State, kWarp> warps;
    const State block = combine_warps(Lanes{}.combine(seen), warps.get());
    if (parts == 1) return block;
    BulkBarrier& barrier = complete[turn % 2];
    State* const of_row = states[turn % 2].get();
    const int thread = threadIdx.x, lane = thread % kWarp;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (turn == 0) cooperative_groups::this_cluster().barrier_wait();  // for arrive_in_cluster()
#endif
    if (thread == 0) barrier.expect(parts * sizeof(State));
    if (thread < parts) barrier.send(block, of_row + part, thread);
    barrier.wait(turn / 2);
    return Lanes{}.combine(lane < parts ? of_row[lane] : State{});
  }
};

template <typename Operation>
__global__ void __launch_bounds__(tuning::kKeptMaxBlock, 1)
    kept_rows(const KeptArguments<Operation> arguments) {
  using RowOf = Row<Operation, int>;
  using Raw = typename RowOf::Raw;
  using Term = typename Operation::Term;
  using Vector = Vec<typename Operation::Source, RowOf::kVector>;
  constexpr int kVector = RowOf::kVector;
  constexpr int kVectors = tuning::kept_values(sizeof(typename Operation::Source)) / kVector / kHeldOperands<Operation>;
  using State = typename Operation::State;
  __shared__ BulkBarrier arrived[2];
  __shared__ Meeting<State> meeting;

  const std::int64_t block = arguments.first_block + blockIdx.x;
  const int parts = arguments.parts, threads = blockDim.x, thread = threadIdx.x;
  const std::int64_t team = quotient(block, parts), first_row = team * arguments.turns;
  const int part = static_cast<int>(block - team * parts);
  const int turns = static_cast<int>(min(arguments.rows - first_row, static_cast<std::int64_t>(arguments.turns)));
  const auto buffer = [&](int turn) {
    const int operands = RowOf::kBackward ? 2 : 1;
    return reinterpret_cast<Vector*>(dynamic_shared_memory()) + turn % 2 * operands * arguments.capacity;
  };
  // this block's vectors of a row: those up to the diagonal come first
  const auto part_of = [&](const RowOf& row) { return work::part_of(row.vectors(), part, parts); };
  const auto reached = [&](const RowOf& row, const auto& mine) {
    return max(0, min(mine.end, row.reached_vectors()) - mine.begin);
  };
  const auto fetch = [&](int turn) {
    const RowOf row(arguments, first_row + turn);
    const auto mine = part_of(row);
    row.copy(mine.begin, reached(row, mine), buffer(turn), buffer(turn) + arguments.capacity, arrived[turn % 2]);
  };

  if (thread == 0) {
    for (int i = 0; i < 2; ++i) arrived[i].init(), meeting.complete[i].init();
    BulkBarrier::publish();
  }
  if (parts > 1) arrive_in_cluster();
  if (thread == 0) {
    await_kernel_before();
    fetch(0);
    if (turns > 1) fetch(1);
  }
  await_kernel_before();
  let_next_kernel_begin();
  __syncthreads();

  for (int turn = 0; turn < turns; ++turn) {
    const RowOf row(arguments, first_row + turn);
    const auto mine = part_of(row);
    const int size = mine.end - mine.begin, filled = reached(row, mine);
    const int first = mine.begin * kVector - row.phase();
    Vector* const source = buffer(turn);
    Vector* const grad = source + arguments.capacity;
    // Calls visit(n, base) for vectors base, base + threads, … of this thread, n of them, a constant.
    const auto walk = [&](int end, const auto& visit) {
      int base = thread;
      for (; base + (kVectors - 1) * threads < end; base += kVectors * threads)
        visit(std::integral_constant<int, kVectors>{}, base);
      for (; base < end; base += threads) visit(std::integral_constant<int, 1>{}, base);
    };
    const auto load = [&]<int kCount>(int base, Raw(&raw)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        raw[i].source = source[base + i * threads];
        if constexpr (RowOf::kBackward) raw[i].grad = grad[base + i * threads];
        if constexpr (Operation::kFused) row.load_extras(first + (base + i * threads) * kVector, raw[i]);
      }
    };
    const auto terms_of = [&](Raw& raw, int at, Term* terms) {
      if constexpr (Operation::kFused)
        row.terms(raw, first + at * kVector, terms);
      else
        row.terms_of_whole(raw, terms);
    };

    arrived[turn % 2].wait(turn / 2);
    if (!Operation::kFused && arguments.ragged) {
      row.pad(mine.begin, source, grad, thread);
      row.pad(mine.end - 1, source + size - 1, grad + size - 1, thread - kWarp);
      BulkBarrier::order_before_copies();
      __syncthreads();
    }
    State state;
    walk(filled, [&](auto count, int base) {
      Raw raw[count];
      load(base, raw);
      Term terms[count * kVector];
#pragma unroll
      for (int i = 0; i < count; ++i) terms_of(raw[i], base + i * threads, terms + i * kVector);
      Operation::template accumulate<count, kVector, kVector>(state, terms);
    });
    state = meeting.exchange(state, turn, part, parts);

    const auto finish = finish_of<Operation>(WarpExchange{}, state, arguments.fusing);
    walk(size, [&](auto count, int base) {
      Raw raw[count];
      if (!Operation::kFused || base < filled) load(base, raw);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        Term terms[kVector];
        terms_of(raw[i], base + i * threads, terms);
        row.store(first + (base + i * threads) * kVector,
                  [&](int k) { return finish.again(terms[k], raw[i].extras.include(k)); });
      }
    });
    __syncthreads();  // before the buffer is filled again
    if (thread == 0 && turn + 2 < turns) fetch(turn + 2);
  }
}

}  // namespace

int compiled_compute_capability() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kept_rows<Forward<false, float, float>>), "cudaFuncGetAttributes");
  return attributes.ptxVersion;
}

void launch_cluster(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    const KeptArguments<Operation> arguments{row_arguments<Operation>(problem, plan, pointers),
                                             static_cast<int>(plan.splits), plan.rows_per_block, plan.kept_vectors};
    launch_grid(kept_rows<Operation>, arguments, plan, pointers, stream);
  });
}

}  // namespace ndsoftmax::cuda
