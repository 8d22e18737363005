// Online and split regimes: contiguous rows too wide for a block, or a cluster.
// Online: a block reads its row twice, first for the state (the online softmax), then to write, from the row's end,
// which L2 still has. Or a cluster of blocks does, each with a part of the row, on sm_90 and later, where rows are
// many: few of them are under way then, so that L2 has nearly all, and shared memory keeps what it has room for. Split:
// plan.splits blocks a row come to the states of its parts, which pass through the workspace; a second launch, of small
// blocks, which is how memory is written fastest, combines those of its row, each block all of them, in the same order.
// It begins before the first has ended, loads meanwhile, and goes backwards as well. Where rows are a larger part of L2
// than it keeps for that (Plan::meets), all blocks run at once instead, one a multiprocessor, meet between the passes,
// and keep what registers and shared memory have room for. Rows may have more than 2^31 elements. Exponentials are
// computed twice, so that 16-bit rows are bound by those.
#include <cooperative_groups.h>

#include "cuda/dispatch.cuh"
#include "cuda/meeting.cuh"
#include "cuda/passes.cuh"
#include "host/cuda_plan.hpp"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
struct OnlineArguments : RowArguments<Operation> {
  int splits;
  int kept_steps;                     // of which a block keeps the vectors in shared memory, where blocks meet
  std::int64_t pieces;                // of a row, each of which a block of the second launch writes
  typename Operation::State* states;  // rows × splits
};

// Vectors that a thread takes at once, in a step.
template <typename Operation>
inline constexpr int kTogether = tuning::online_vectors(Operation::kDirection, Operation::kFused);

// The results of a step whose vectors begin at `first`, first + stride, … before `end`; `clear`, as in online_row().
template <typename RowOf, typename Operation, int kVectors>
__device__ __forceinline__ void write_step(const RowArguments<Operation>& arguments, const RowOf& row,
                                           typename RowOf::Raw (&raw)[kVectors], std::int64_t first, int stride,
                                           std::int64_t end, bool clear, const typename Operation::Finish& finish) {
  typename Operation::Term terms[RowOf::kVector];
  arguments.fusing.operation.with_log([&](auto log) {
    const auto value = [&](int k) { return finish.of(k).again(terms[k], log); };
    if (clear) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        row.terms(raw[k], 0, terms);
        row.store_whole(first + k * stride, value);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const std::int64_t here = first + k * stride;
        if (here >= end) continue;
        row.resolve(raw[k], here);
        row.terms(raw[k], here, terms);
        row.store(here, 0, value);
        row.clean(here, 0, 1, finish);
      }
    }
  });
}

// The state of a row, from what its blocks have told of their parts.
template <typename Operation, typename State = typename Operation::State>
__device__ __forceinline__ State of_all_splits(const OnlineArguments<Operation>& arguments, std::int64_t row,
                                               State* warps) {
  State state;
  for (int part = threadIdx.x; part < arguments.splits; part += static_cast<int>(blockDim.x))
    state.combine(arguments.states[row * arguments.splits + part]);
  return combine_warps(Lanes{}.combine(state), warps);
}

// kStatisticsOnly: the first launch of split rows, 64 registers. Otherwise 80: blocks have a half of a multiprocessor's
// or a third.
template <typename Operation, bool kStatisticsOnly>
__global__ void __launch_bounds__(kStatisticsOnly ? tuning::kOnlineBlock : tuning::kOnlineThreads,
                                  kStatisticsOnly ? tuning::kSplitBlocks : 1)
    online_row(const OnlineArguments<Operation> arguments) {
  using RowOf = Row<Operation, std::int64_t>;
  using State = typename Operation::State;
  using Term = typename Operation::Term;
  using Vector = Vec<typename Operation::Source, RowOf::kVector>;
  constexpr bool kFused = Operation::kFused;
  constexpr int kVector = RowOf::kVector, kVectors = kTogether<Operation>;
  using Raws = typename RowOf::Raw[kVectors];
  const Operation operation = arguments.fusing.operation;
  __shared__ Shared<State, kWarp> warps;
  __shared__ Meeting<State> meeting;
  const int splits = arguments.splits;
  const bool meets = kHasClusters && !kStatisticsOnly && splits > 1;
  if (meets) meeting.complete.open();

  await_kernel_before();
  const std::int64_t block = arguments.first_block + blockIdx.x, index = quotient(block, splits);
  const auto split = static_cast<int>(block - index * splits);
  const RowOf row(arguments, index);

  // Threads take kVectors vectors in a step, which are `stride` elements apart. The steps of a part follow each other;
  // where parts are not written, those of all parts take turns: what is loaded last, at the end, is written first.
  const int step = static_cast<int>(blockDim.x) * kVectors, stride = static_cast<int>(blockDim.x) * kVector;
  const auto vectors_to = [&](std::int64_t end) { return work::vectors_in_row(end, kVector, row.phase()); };
  const std::int64_t vectors = vectors_to(arguments.dim);
  const work::Part part =
      kStatisticsOnly ? work::Part{std::int64_t{split} * step, vectors} : work::part_of(vectors, split, splits);
  const std::int64_t end = part.end * kVector - row.phase();
  const std::int64_t apart = kStatisticsOnly ? std::int64_t{splits} * step : step;
  const auto steps_to = [&](std::int64_t vector) {
    return vector > part.begin ? static_cast<int>(quotient(vector - part.begin + apart - 1, apart)) : 0;
  };
  const std::int64_t first = (part.begin + threadIdx.x) * kVector - row.phase();
  const auto first_of = [&](int i) { return first + i * apart * kVector; };
  const int steps = steps_to(part.end);
  // Steps from `clear` until `unclear` have no vector that reaches over an end of the row or of the part: where nothing
  // is fused, nothing is to be asked of theirs.
  const int clear = part.begin == 0 && row.phase() != 0 ? 1 : 0;
  const int unclear = steps_to(min(part.end, (arguments.dim + row.phase()) / kVector) - step + 1);
  const auto is_clear = [&](int i) { return !kFused && i >= clear && i < unclear; };
  // Vectors of the last steps, from this one on, stay in shared memory, where each thread finds its own again.
  const int kept = meets && !kFused ? max(steps - arguments.kept_steps, 0) : steps;
  const auto slots = [&](int i) {
    constexpr int kSlots = kVectors * tuning::held_operands(Operation::kDirection);
    return reinterpret_cast<Vector*>(dynamic_shared_memory()) + (i - kept) * kSlots * blockDim.x + threadIdx.x;
  };
  const auto load = [&](int i, std::int64_t element, Raws& raw) {
    if (is_clear(i))
      row.load_whole(element, stride, raw);
    else
      row.load(element, stride, end, raw);
  };

  State state;
  let_next_kernel_begin();
  {
    const int until = kFused ? steps_to(min(part.end, vectors_to(row.reach()))) : steps;
    Raws raw, next;  // which is under way meanwhile
    std::int64_t at = first;
    if (until > 0) load(0, at, raw);
    for (int i = 0; i < until; ++i, at += apart * kVector) {
      if (i + 1 < until) load(i + 1, at + apart * kVector, next);
      Term terms[kFused ? kVectors * kVector : kVector];
      if (!is_clear(i)) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          const std::int64_t here = at + k * stride < end ? at + k * stride : arguments.dim;
          row.resolve(raw[k], here);
          if constexpr (kFused) row.terms(raw[k], here, terms + k * kVector);
        }
      }
      if constexpr (kFused) {
        operation.template accumulate<kVectors, kVector, kVector>(state, terms);
      } else {
        if (i >= kept) keep<kIsBackward<Operation>>(slots(i), raw);
        operation.raise(state, raw);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          row.terms(raw[k], 0, terms);
          operation.template add<kVector>(state, terms);
        }
      }
#pragma unroll
      for (int k = 0; k < kVectors; ++k) raw[k] = next[k];
    }
    state = Lanes{}.combine(state);
    if (!meets) state = combine_warps(state, warps.get());
  }
  if constexpr (kStatisticsOnly) {
    if (threadIdx.x == 0) arguments.states[block] = state;
    return;
  }

  // Backwards, as L2 has the end of what was loaded; last what was kept, which needs none.
  const auto recall = [&](int i, Raws& raw) {
    if (kFused || i < kept) return load(i, first_of(i), raw);
    take_kept<kIsBackward<Operation>>(slots(i), raw);
  };
  int i = kept > 0 ? kept - 1 : 0;
  Raws raw, next;
  if (i < steps) recall(i, raw);
  if (meets) state = meeting.once(state, split, splits);
  const auto finish = finish_of<Operation>(WarpExchange{}, state, arguments.fusing);
  for (int following; i < steps; i = following) {
    following = i >= kept ? i + 1 : i > 0 ? i - 1 : kept;
    if (following < steps) recall(following, next);
    write_step(arguments, row, raw, first_of(i), stride, end, is_clear(i), finish);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) raw[k] = next[k];
  }
}

// The second launch of split rows: a block has one step, from the row's end.
template <typename Operation>
__global__ void __launch_bounds__(tuning::kOnlineBlock) split_write(const OnlineArguments<Operation> arguments) {
  using RowOf = Row<Operation, std::int64_t>;
  using State = typename Operation::State;
  constexpr int kVector = RowOf::kVector, kVectors = kTogether<Operation>;
  const int step = static_cast<int>(blockDim.x) * kVectors, stride = static_cast<int>(blockDim.x) * kVector;
  __shared__ Shared<State, kWarp> warps;
  const std::int64_t block = arguments.first_block + blockIdx.x, index = quotient(block, arguments.pieces);
  const std::int64_t vector = work::piece_first(block, index, arguments.pieces, step);
  const RowOf row(arguments, index);
  const std::int64_t first = (vector + threadIdx.x) * kVector - row.phase();
  const bool clear = !Operation::kFused && (vector > 0 || row.phase() == 0) &&
                     (vector + step) * kVector <= arguments.dim + row.phase();
  // the launch before began after all that the source waits for
  typename RowOf::Raw raw[kVectors];
  if (clear)
    row.load_whole(first, stride, raw);
  else
    row.load(first, stride, arguments.dim, raw);
  await_kernel_before();
  let_next_kernel_begin();
  const State state = of_all_splits(arguments, index, warps.get());
  write_step(arguments, row, raw, first, stride, arguments.dim, clear,
             finish_of<Operation>(WarpExchange{}, state, arguments.fusing));
}

// Split rows in one launch, whose blocks all run at once. Those of a row take turns at its steps. The steps without an
// end of the row, whose vectors are all whole, are `count` from `begin` on. The others, one before and one after at
// most, are done apart.
template <typename Operation>
__global__ void __launch_bounds__(tuning::kMeetingThreads) split_meet(const OnlineArguments<Operation> arguments) {
  if constexpr (kHasAllKernels) {
    using RowOf = Row<Operation, std::int64_t>;
    using State = typename Operation::State;
    constexpr int kVector = RowOf::kVector, kVectors = tuning::meeting_vectors(Operation::kDirection);
    using PassesOf = Passes<Operation, typename RowOf::Raw, kVectors>;
    using Raws = typename PassesOf::Raws;
    const Operation operation = arguments.fusing.operation;
    __shared__ Shared<State, kWarp> warps;

    await_kernel_before();
    let_next_kernel_begin();
    const std::int64_t block = arguments.first_block + blockIdx.x, index = quotient(block, arguments.splits);
    const RowOf row(arguments, index);
    const int stride = static_cast<int>(blockDim.x) * kVector;
    const auto [first, apart] = work::turns_of(block - index * arguments.splits, arguments.splits,
                                               static_cast<std::int64_t>(stride) * kVectors);
    const auto first_of = [&, first = first, apart = apart](int i) {
      return first + i * apart + static_cast<int>(threadIdx.x) * kVector - row.phase();
    };
    const auto steps_until = [&, first = first, apart = apart](std::int64_t end) {
      return first < end ? static_cast<int>(quotient(end - 1 - first, apart)) + 1 : 0;
    };
    const std::int64_t end = arguments.dim + row.phase();
    const int steps = steps_until(end), begin = first == 0 && row.phase() != 0 ? 1 : 0;
    const int count = max(steps_until(end - stride * kVectors + 1) - begin, 0);
    const auto for_others = [&](Raws& raw, const auto& visit) {
#pragma unroll 1
      for (int i = begin == 0 ? count : 0; i < steps; i = i < begin ? begin + count : i + 1) {
        row.load(first_of(i), stride, arguments.dim, raw);
        visit(first_of(i));
      }
    };
    const auto load = [&](int i, Raws& raw, auto... eviction) {
      row.load_whole(first_of(begin + i), stride, raw, eviction...);
    };

    PassesOf passes(count, true, arguments.kept_steps);
    State state;
    const auto accumulate = [&](const Raws& raw) {
      operation.raise(state, raw);
#pragma unroll
      for (const auto& each : raw) {
        typename Operation::Term terms[kVector];
        row.terms(each, 0, terms);
        operation.template add<kVector>(state, terms);
      }
    };
    passes.read(
        load,
        [&](Raws& raw) {
          for_others(raw, [&](std::int64_t at) {
#pragma unroll
            for (int k = 0; k < kVectors; ++k) row.resolve(raw[k], at + k * stride);
            accumulate(raw);
          });
        },
        accumulate);
    state = combine_warps(Lanes{}.combine(state), warps.get());
    if (threadIdx.x == 0) arguments.states[block] = state;
    cooperative_groups::this_grid().sync();
    const auto finish =
        finish_of<Operation>(WarpExchange{}, of_all_splits(arguments, index, warps.get()), arguments.fusing);
    const auto write = [&](std::int64_t at, Raws& raw, bool clear) {
      write_step(arguments, row, raw, at, stride, arguments.dim, clear, finish);
    };
    passes.write(
        load, [&](Raws& raw) { for_others(raw, [&](std::int64_t at) { write(at, raw, false); }); },
        [&](int i, Raws& raw) { write(first_of(begin + i), raw, true); });
  } else {
    never_launched();
  }
}

}  // namespace

void launch_online(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  const auto launch = [&]<typename Operation>() {
    using Source = typename Operation::Source;
    using Result = typename Operation::Result;
    const auto arguments_of = [&](const Plan& launched) {
      return OnlineArguments<Operation>{
          row_arguments<Operation>(problem, launched, pointers), static_cast<int>(launched.splits), launched.run,
          split_pieces(problem, launched), static_cast<typename Operation::State*>(pointers.workspace)};
    };
    if constexpr (!kInterleaves<Operation>)
      if (plan.regime == Regime::online)
        return launch_grid<online_row<Operation, false>>(arguments_of(plan), plan, pointers, stream);
    if constexpr (tuning::split_rows_may_meet(sizeof(Source), sizeof(Result), Operation::kFused) &&
                  !kInterleaves<Operation>)
      if (plan.meets && try_launch_grid<split_meet<Operation>>(arguments_of(plan), plan, pointers, stream)) return;
    Plan launched = plan.meets ? without_meeting(problem, plan) : plan;
    const auto arguments = arguments_of(launched);
    launch_grid<online_row<Operation, true>>(arguments, launched, pointers, stream);
    launched.grid = problem.outer.size * arguments.pieces;
    launch_grid<split_write<Operation>>(arguments, launched, pointers, stream);
  };
  if (plan.interleaved > 1)
    visit_interleaved(problem, launch);
  else
    visit_row_operation(problem, launch);
}

}  // namespace ndsoftmax::cuda
