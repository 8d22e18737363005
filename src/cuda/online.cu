// Online and split regimes: contiguous rows wider than a block, or a cluster, holds.
// Online: a block reads its row twice, first for the state (the online softmax), then to write, from the row's end,
// which L2 still has. Or a cluster of blocks does, each with a part of the row, on sm_90 and later, where rows are
// many: few of them are under way then, so that L2 has nearly all, and shared memory keeps what it has room for. Split:
// plan.splits blocks a row do the same with a part each, in two launches; the states of the parts pass through the
// workspace, and every block combines those of its row, in the same order. The second launch begins before the first
// has ended, and loads meanwhile. Rows may have more than 2^31 elements. Exponentials are computed twice, so that
// 16-bit rows are bound by those.
#include "cuda/dispatch.cuh"
#include "cuda/meeting.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
struct OnlineArguments : RowArguments<Operation> {
  Phase phase;
  int splits;
  int kept_steps;                     // of which a cluster's block keeps the vectors
  typename Operation::State* states;  // rows × splits
};

template <typename Operation>
__global__ void __launch_bounds__(tuning::kOnlineThreads)  // 80 registers: its blocks have a half of them or a third
    online_row(const OnlineArguments<Operation> arguments) {
  using RowOf = Row<Operation, std::int64_t>;
  using State = typename Operation::State;
  using Term = typename Operation::Term;
  using Vector = Vec<typename Operation::Source, RowOf::kVector>;
  constexpr bool kFused = Operation::kFused;
  constexpr int kVector = RowOf::kVector, kUnroll = tuning::online_vectors(Operation::kDirection, kFused);
  using Raws = typename RowOf::Raw[kUnroll];
  const Operation operation = arguments.fusing.operation;
  __shared__ Shared<State, kWarp> warps;
  __shared__ Meeting<State> meeting;
  const int splits = arguments.splits;
  const bool meets = kHasClusters && arguments.phase == Phase::both && splits > 1;
  if (meets) meeting.complete.open();

  // the launch before that of Phase::write is that of the statistics, which began after all that the source waits for
  if (arguments.phase != Phase::write) await_kernel_before();
  const std::int64_t block = arguments.first_block + blockIdx.x, index = quotient(block, splits);
  const auto split = static_cast<int>(block - index * splits);
  const RowOf row(arguments, index);
  const auto vectors_to = [&](std::int64_t end) { return work::vectors_in_row(end, kVector, row.phase()); };
  const work::Part part = work::part_of(vectors_to(arguments.dim), split, splits);
  const std::int64_t end = part.end * kVector - row.phase();

  // Threads take steps of kUnroll vectors, which are `stride` elements apart.
  const int step = static_cast<int>(blockDim.x) * kUnroll, stride = static_cast<int>(blockDim.x) * kVector;
  const auto steps_to = [&](std::int64_t vector) {
    return vector > part.begin ? static_cast<int>((vector - part.begin + step - 1) / step) : 0;
  };
  const std::int64_t first = (part.begin + threadIdx.x) * kVector - row.phase();
  const auto first_of = [&](int i) { return first + static_cast<std::int64_t>(i) * step * kVector; };
  const int steps = steps_to(part.end);
  // Steps from `clear` until `unclear` have no vector that reaches over an end of the row or of the part: where nothing
  // is fused, nothing is to be asked of theirs.
  const int clear = part.begin == 0 && row.phase() != 0 ? 1 : 0;
  const int unclear = static_cast<int>((min(part.end, (arguments.dim + row.phase()) / kVector) - part.begin) / step);
  const auto is_clear = [&](int i) { return !kFused && i >= clear && i < unclear; };
  // Vectors of the last steps, from this one on, stay in shared memory, where each thread finds its own again.
  const int kept = meets && !kFused ? max(steps - arguments.kept_steps, 0) : steps;
  const auto slots = [&](int i) {
    constexpr int kSlots = kUnroll * tuning::held_operands(Operation::kDirection);
    return reinterpret_cast<Vector*>(dynamic_shared_memory()) + (i - kept) * kSlots * blockDim.x + threadIdx.x;
  };
  const auto load = [&](int i, Raws& raw) {
    if (is_clear(i))
      row.load_whole(first_of(i), stride, raw);
    else
      row.load(first_of(i), stride, end, raw);
  };

  State state;
  if (arguments.phase != Phase::write) {
    let_next_kernel_begin();
    const int until = kFused ? steps_to(min(part.end, vectors_to(row.reach()))) : steps;
    Raws raw, next;  // which is under way meanwhile
    if (until > 0) load(0, raw);
    for (int i = 0; i < until; ++i) {
      if (i + 1 < until) load(i + 1, next);
      Term terms[kFused ? kUnroll * kVector : kVector];
      if (!is_clear(i)) {
        const std::int64_t at = first_of(i);
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
          const std::int64_t here = at + k * stride < end ? at + k * stride : arguments.dim;
          row.resolve(raw[k], here);
          if constexpr (kFused) row.terms(raw[k], here, terms + k * kVector);
        }
      }
      if constexpr (kFused) {
        operation.template accumulate<kUnroll, kVector, kVector>(state, terms);
      } else {
        if (i >= kept) {
          Vector* const slot = slots(i);
#pragma unroll
          for (int k = 0; k < kUnroll; ++k) {
            slot[k * blockDim.x] = raw[k].source;
            if constexpr (kIsBackward<Operation>) slot[(kUnroll + k) * blockDim.x] = raw[k].grad;
          }
        }
        operation.raise(state, raw);
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
          row.terms(raw[k], 0, terms);
          operation.template add<kVector>(state, terms);
        }
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) raw[k] = next[k];
    }
    state = Lanes{}.combine(state);
    if (!meets) state = combine_warps(state, warps.get());
  }
  if (arguments.phase == Phase::statistics) {
    if (threadIdx.x == 0) arguments.states[block] = state;
    return;
  }

  // Backwards, as L2 has the end of what was loaded; last what was kept, which needs none.
  const auto recall = [&](int i, Raws& raw) {
    if (kFused || i < kept) return load(i, raw);
    const Vector* const slot = slots(i);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      raw[k].source = slot[k * blockDim.x];
      if constexpr (kIsBackward<Operation>) raw[k].grad = slot[(kUnroll + k) * blockDim.x];
    }
  };
  int i = kept > 0 ? kept - 1 : 0;
  Raws raw, next;
  if (i < steps) recall(i, raw);
  if (meets) {
    state = meeting.once(state, split, splits);
  } else if (arguments.phase == Phase::write) {
    await_kernel_before();
    let_next_kernel_begin();
    state = {};
    for (int other = threadIdx.x; other < splits; other += blockDim.x)
      state.combine(arguments.states[index * splits + other]);
    state = combine_warps(Lanes{}.combine(state), warps.get());
  }
  const auto finish = finish_of<Operation>(WarpExchange{}, state, arguments.fusing);
  operation.with_log([&](auto log) {
    for (int following; i < steps; i = following) {
      following = i >= kept ? i + 1 : i > 0 ? i - 1 : kept;
      if (following < steps) recall(following, next);
      const std::int64_t at = first_of(i);
      if (is_clear(i)) {
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
          Term terms[kVector];
          row.terms(raw[k], 0, terms);
          row.store_whole(at + k * stride, [&](int j) { return finish.again(terms[j], log); });
        }
      } else {
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
          const std::int64_t here = at + k * stride;
          if (here >= end) continue;
          Term terms[kVector];
          row.resolve(raw[k], here);
          row.terms(raw[k], here, terms);
          row.store(here, [&](int j) { return finish.again(terms[j], log); });
          row.clean(here, 0, 1, finish);
        }
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) raw[k] = next[k];
    }
  });
}

}  // namespace

void launch_online(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    OnlineArguments<Operation> arguments{row_arguments<Operation>(problem, plan, pointers), Phase::both,
                                         static_cast<int>(plan.splits), plan.run,
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
