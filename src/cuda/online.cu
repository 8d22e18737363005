// Online and split regimes: contiguous rows wider than a block, or a cluster, holds.
// Online: a block reads its row twice, first for the state (the online softmax), then to write, from the row's end,
// which L2 still has. Split: plan.splits blocks a row do the same with a part each, in two launches; the states of the
// parts pass through the workspace, and every block combines those of its row, in the same order. The second launch
// begins before the first has ended, and loads meanwhile.
// Rows may have more than 2^31 elements. Exponentials are computed twice, so that 16-bit rows are bound by those.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
struct OnlineArguments : RowArguments<Operation> {
  Phase phase;
  std::int64_t splits;
  typename Operation::State* states;  // rows × splits
};

template <typename Operation>
__global__ void __launch_bounds__(tuning::kOnlineBlock, tuning::kOnlineBlocks)
    online_row(const OnlineArguments<Operation> arguments) {
  using RowOf = Row<Operation, std::int64_t>;
  using State = typename Operation::State;
  using Term = typename Operation::Term;
  constexpr int kVector = RowOf::kVector, kUnroll = tuning::online_vectors(Operation::kDirection, Operation::kFused);
  using Raws = typename RowOf::Raw[kUnroll];
  const Operation operation = arguments.fusing.operation;
  __shared__ Shared<State, kWarp> warps;
  __shared__ Shared<State, 1> whole;

  // the launch before that of Phase::write is that of the statistics, which began after all that the source waits for
  if (arguments.phase != Phase::write) await_kernel_before();
  const std::int64_t block = arguments.first_block + blockIdx.x;
  const std::int64_t index = quotient(block, arguments.splits), split = block - index * arguments.splits;
  const RowOf row(arguments, index);
  const work::Part part =
      work::part_of(work::vectors_in_row(arguments.dim, kVector, row.phase()), split, arguments.splits);
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kUnroll;
  // element where the vectors of a thread begin in the step that begins with vector `base`
  const std::int64_t stride = static_cast<std::int64_t>(blockDim.x) * kVector;
  const auto first_of = [&](std::int64_t base) { return (base + threadIdx.x) * kVector - row.phase(); };
  const std::int64_t end = part.end * kVector - row.phase();
  const auto load = [&](std::int64_t base, Raws& raw) { row.load(first_of(base), stride, end, raw); };

  State state;
  if (arguments.phase != Phase::write) {
    let_next_kernel_begin();
    const std::int64_t until = min(part.end, work::vectors_in_row(row.reach(), kVector, row.phase()));
    Raws raw, next;  // which is under way meanwhile
    if (part.begin < until) load(part.begin, raw);
    for (std::int64_t base = part.begin; base < until; base += step) {
      if (base + step < until) load(base + step, next);
      Term terms[Operation::kFused ? kUnroll * kVector : kVector];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const std::int64_t at = first_of(base) + i * stride;
        row.resolve(raw[i], at < end ? at : arguments.dim);
        if constexpr (Operation::kFused) row.terms(raw[i], at < end ? at : arguments.dim, terms + i * kVector);
      }
      if constexpr (Operation::kFused) {
        operation.template accumulate<kUnroll, kVector, kVector>(state, terms);
      } else {
        operation.raise(state, raw);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          row.terms(raw[i], first_of(base) + i * stride, terms);
          operation.template add<kVector>(state, terms);
        }
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) raw[i] = next[i];
    }
    state = combine_warps(Lanes{}.combine(state), warps.get());
  }
  if (arguments.phase == Phase::statistics) {
    if (threadIdx.x == 0) arguments.states[block] = state;
    return;
  }

  const std::int64_t last = part.begin + (part.end - part.begin - 1) / step * step;
  Raws raw, next;
  if (part.begin < part.end) load(last, raw);
  if (arguments.phase == Phase::write) {
    await_kernel_before();
    let_next_kernel_begin();
    if (threadIdx.x < kWarp) {
      for (std::int64_t i = threadIdx.x; i < arguments.splits; i += kWarp)
        state.combine(arguments.states[index * arguments.splits + i]);
      state = Lanes{}.combine(state);
      if (threadIdx.x == 0) *whole.get() = state;
    }
    __syncthreads();
    state = *whole.get();
  }
  const auto finish = finish_of<Operation>(WarpExchange{}, state, arguments.fusing);
  for (std::int64_t base = last; base >= part.begin && base < part.end; base -= step) {
    if (base > part.begin) load(base - step, next);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t at = first_of(base) + i * stride;
      if (at < end) {
        Term terms[kVector];
        row.resolve(raw[i], at);
        row.terms(raw[i], at, terms);
        operation.with_log([&](auto log) { row.store(at, [&](int k) { return finish.again(terms[k], log); }); });
        row.clean(at, 0, 1, finish);
      }
      raw[i] = next[i];
    }
  }
}

}  // namespace

void launch_online(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    OnlineArguments<Operation> arguments{row_arguments<Operation>(problem, plan, pointers), Phase::both, plan.splits,
                                         static_cast<typename Operation::State*>(pointers.workspace)};
    const auto run = [&](Phase phase) {
      arguments.phase = phase;
      launch_grid<online_row<Operation>>(arguments, plan, pointers, stream);
    };
    if (plan.regime == Regime::online) return run(Phase::both);
    run(Phase::statistics);
    run(Phase::write);
  });
}

}  // namespace ndsoftmax::cuda
