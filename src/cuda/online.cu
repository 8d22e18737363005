// Online and split regimes: contiguous rows wider than a block, or a cluster, holds.
// Online: a block reads its row twice, first for the state (the online softmax), then to write, from the row's end,
// which L2 still has. Split: plan.splits blocks a row do the same with a part each, in two launches; the states of the
// parts pass through the workspace, and every block combines those of its row, in the same order.
// Rows may have more than 2^31 elements. Exponentials are computed twice, so that 16-bit rows are bound by those.
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
__global__ void __launch_bounds__(tuning::kOnlineMaxBlock) online_row(const OnlineArguments<Operation> arguments) {
  using RowOf = Row<Operation, std::int64_t>;
  using State = typename Operation::State;
  using Term = typename Operation::Term;
  constexpr int kVector = RowOf::kVector, kUnroll = tuning::kOnlineVectors;
  __shared__ Shared<State, kWarp> warps;
  __shared__ Shared<State, 1> whole;

  const std::int64_t block = arguments.first_block + blockIdx.x;
  const std::int64_t index = block / arguments.splits, split = block - index * arguments.splits;
  const RowOf row(arguments, index);
  const work::Part part =
      work::part_of(work::vectors_in_row(arguments.dim, kVector, row.phase()), split, arguments.splits, 1);
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kUnroll;
  const auto first_of = [&](std::int64_t vector) {
    return work::first_element<std::int64_t>(vector, 1, 0, kVector, row.phase());
  };
  const auto load = [&](std::int64_t base, typename RowOf::Raw (&raw)[kUnroll]) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t vector = base + i * blockDim.x + threadIdx.x;
      if (vector < part.end) raw[i] = row.load(first_of(vector));
    }
  };

  State state;
  if (arguments.phase != Phase::write) {
    for (std::int64_t base = part.begin; base < part.end; base += step) {
      typename RowOf::Raw raw[kUnroll];
      load(base, raw);
      Term terms[kUnroll * kVector];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const std::int64_t vector = base + i * blockDim.x + threadIdx.x;
        row.terms(raw[i], vector < part.end ? first_of(vector) : arguments.dim, terms + i * kVector);
      }
      Operation::template accumulate<kUnroll * kVector, 1>(state, terms, arguments.operation.log);
    }
    state = combine_warps(Lanes{}.combine(state), warps.get());
  }
  if (arguments.phase == Phase::statistics) {
    if (threadIdx.x == 0) arguments.states[block] = state;
    return;
  }
  if (arguments.phase == Phase::write) {
    if (threadIdx.x < kWarp) {
      for (std::int64_t i = threadIdx.x; i < arguments.splits; i += kWarp)
        state.combine(arguments.states[index * arguments.splits + i]);
      state = Lanes{}.combine(state);
      if (threadIdx.x == 0) *whole.get() = state;
    }
    __syncthreads();
    state = *whole.get();
  }

  const auto finish = arguments.operation.finish(state);
  const std::int64_t steps = (part.end - part.begin + step - 1) / step;
  for (std::int64_t i = steps - 1; i >= 0; --i) {
    const std::int64_t base = part.begin + i * step;
    typename RowOf::Raw raw[kUnroll];
    load(base, raw);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const std::int64_t vector = base + j * blockDim.x + threadIdx.x;
      if (vector >= part.end) continue;
      Term terms[kVector];
      row.terms(raw[j], first_of(vector), terms);
      row.store(first_of(vector), [&](int k) { return finish.again(terms[k]); });
    }
  }
}

}  // namespace

void launch_online(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>(const Operation& operation) {
    OnlineArguments<Operation> arguments{row_arguments(problem, operation, pointers), Phase::both, plan.splits,
                                         static_cast<typename Operation::State*>(pointers.workspace)};
    const auto run = [&](Phase phase) {
      arguments.phase = phase;
      launch_grid(online_row<Operation>, arguments, plan, plan.grid, stream);
    };
    if (plan.regime == Regime::online) return run(Phase::both);
    run(Phase::statistics);
    run(Phase::write);
  });
}

}  // namespace ndsoftmax::cuda
