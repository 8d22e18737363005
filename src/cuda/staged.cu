// Warp regime, rows that do not start on 16 bytes, but follow each other without gaps, and are many: a block copies a
// run of them into shared memory as vectors, teams of lanes take words of 32 bits from there and put results back, and
// the block copies those out as one run. Rows smaller than a vector are taken from there as the vectors that hold some.
// Memory, which sees whole vectors only, is the bound while an element takes less than its share of instructions: 32 of
// a lane for one of 16 bits on an H200. So nothing loads or branches element by element: 14 to 16 are left. But masks
// and biases are not staged: each element's is read from where it lies. Forward, masks alone stay in registers from
// one row to the next, where both have the same.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

// Threads of a block; those of 16 bits, which have no instructions to spare, all have as many.
template <typename Source>
__device__ __forceinline__ int staged_block() {
  return sizeof(Source) == 2 ? tuning::kWarpBlock : static_cast<int>(blockDim.x);
}

// Copies `count` elements, in vectors by `copy_vector` and what is left of them, less than a vector, one by one. Both
// sides start on a vector.
template <typename T, typename CopyVector>
__device__ __forceinline__ void copy_by_block(const T* from, T* to, int count, int threads,
                                              const CopyVector& copy_vector) {
  constexpr int kVector = tuning::kVectorBytes / sizeof(T);
  const int step = threads * kVector;
  const int thread = threadIdx.x, rest = count % kVector;
  if (thread < rest) to[count - rest + thread] = from[count - rest + thread];
  from += thread * kVector, to += thread * kVector;
#pragma unroll 4
  for (int left = count - rest - thread * kVector; left > 0; left -= step, from += step, to += step)
    copy_vector(from, to);
}

// The rows of a block and where they are in shared memory. Results replace sources of the same size.
template <typename Operation>
struct Staged {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  static constexpr bool kBackward = kIsBackward<Operation>;
  static constexpr bool kInPlace = sizeof(Source) == sizeof(Result);

  std::int64_t first;
  int rows;
  Source *source, *grad;
  Result* result;

  __device__ __forceinline__ Staged(const RowArguments<Operation>& arguments, int dim)
      : first((arguments.first_block + blockIdx.x) * arguments.rows_per_block),
        rows(static_cast<int>(min(static_cast<std::int64_t>(arguments.rows_per_block), arguments.rows - first))),
        source(reinterpret_cast<Source*>(dynamic_shared_memory())),
        grad(source + arguments.rows_per_block * dim),
        result(reinterpret_cast<Result*>(kInPlace    ? source
                                         : kBackward ? grad + arguments.rows_per_block * dim
                                                     : grad)) {
    await_kernel_before();
    let_next_kernel_begin();
    const auto copy_vector = [](const Source* from, Source* to) { copy_async<tuning::kVectorBytes>(to, from); };
    copy_by_block(arguments.source + first * dim, source, rows * dim, staged_block<Source>(), copy_vector);
    if constexpr (kBackward)
      copy_by_block(arguments.grad + first * dim, grad, rows * dim, staged_block<Source>(), copy_vector);
  }

  __device__ __forceinline__ void await() const {
    await_copies();
    __syncthreads();
  }

  __device__ __forceinline__ void store(const RowArguments<Operation>& arguments, int dim) const {
    __syncthreads();
    copy_by_block(result, arguments.result + first * dim, rows * dim, staged_block<Source>(),
                  [](const Result* from, Result* to) {
                    Vec<Result, tuning::kVectorBytes / sizeof(Result)>::load(from).store(to);
                  });
  }
};

// kTail: every lane has all of the items, and some lanes have one element beyond them; masked.
template <typename Operation, int kItems, bool kTail>
__device__ __forceinline__ void take_staged(const RowArguments<Operation>& arguments) {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  constexpr bool kBackward = kIsBackward<Operation>;
  constexpr int kWord = tuning::staged_word(sizeof(Source));
  constexpr int kFull = kTail ? kItems : tuning::staged_items_before(kItems);  // items that every lane has
  constexpr int kElements = kItems * kWord;

  const Operation operation = arguments.fusing.operation;
  using OffsetsOf = Offsets<kOperandsOf<Operation>>;
  const int dim = static_cast<int>(arguments.dim), step = arguments.lanes * kWord;
  const Staged<Operation> staged(arguments, dim);
  const int log2_lanes = log2_of(arguments.lanes), teams = staged_block<Source>() >> log2_lanes;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & (arguments.lanes - 1);
  // Teams are even in number, so that all rows of one begin alike within their words, and so does what is excluded.
  static_assert(tuning::kStagedSmallBlock / kWarp % 2 == 0 && tuning::kWarpBlock / kWarp % 2 == 0);
  const int team = work::staged_row(thread >> log2_lanes, log2_of(teams) - log2_of(arguments.apart), arguments.apart);
  // Where masks and biases of a row lie takes long to find: each lane of a team does so for the row of another turn.
  // For what is none, it finds those of row 0, which may be read.
  OffsetsOf offsets;
  const auto look_up = [&](int turn) {
    const int row = turn + lane * teams + team;
    if constexpr (Operation::kFused) offsets = offsets_in(arguments.outer, row < staged.rows ? staged.first + row : 0);
  };
  look_up(0);
  Excluded<kElements> excluded;
  bool tail_excluded = false;
  const std::uint8_t* excluded_at = nullptr;  // what that was read from
  if constexpr (!Operation::kMasked) staged.await();
  for (int turn = 0; turn < staged.rows; turn += teams) {
    const int row = turn + team;
    const int start = row * dim;
    const bool exists = row < staged.rows;
    const int end = exists ? dim : 0;
    const int first = work::first_element(0, arguments.lanes, lane, kWord, start % kWord);  // then every step-th
    const auto inside = [&](int element) { return static_cast<unsigned>(element) < static_cast<unsigned>(end); };
    const int tail = first + kItems * step - lane * (kWord - 1);

    LineIfFused<Operation, int, 1> fused;
    if constexpr (Operation::kFused) {
      const int from = turn >> log2_of(teams) & (arguments.lanes - 1);
      if (from == 0 && turn > 0) look_up(turn);
      OffsetsOf here{};
      const auto fetch = [&](auto... operands) {
        ((here.at[operands] = __shfl_sync(kAllLanes, offsets.at[operands], from, arguments.lanes)), ...);
      };
      if constexpr (Operation::kBiased)
        fetch(kBias);
      else
        fetch(kMask);
      if (!Operation::kMasked && !Operation::kBiased && !arguments.fusing.masks_neighbours) fetch(kBias, kRow);
      fused = fused_line<1>(arguments, here, end, 0);
    }
    if constexpr (Operation::kMasked) {
      if (excluded_at != fused.mask() + first) {
        excluded_at = fused.mask() + first;
        excluded = fused.template excluded<kItems, kWord, kFull>(first, step, end);
        if constexpr (kTail) tail_excluded = !fused.includes(tail);
      }
      if (turn == 0) staged.await();  // the first masks come meanwhile
    }
    const auto element = [&](int i) { return kTail && i == kElements ? tail : first + i / kWord * step + i % kWord; };
    if constexpr (Operation::kFused && kBackward) {
      const auto exclude = [&](int element) {
        staged.source[start + element] = narrow<Source>(operation.nothing().output);
        staged.grad[start + element] = narrow<Source>(operation.nothing().grad);
      };
      if (fused.masks_neighbours()) {
        excluded = fused.template excluded<kItems, kWord, kFull>(first, step, end);
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          if (excluded[i] && inside(element(i))) exclude(element(i));
      } else {
        const unsigned any = fused.template any_excluded<kItems, kWord>(first, step);
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          if ((any >> i & 1) != 0 && inside(element(i))) exclude(element(i));
      }
    }
    Vec<Source, kWord> source[kItems]{}, grad[kItems]{};
    typename Operation::Term terms[kElements + (kTail ? 1 : 0)];
    // What other teams have of a word, they may be writing.
    const auto take = [&](const Source* row, int item, Vec<Source, kWord>& word) {
      const int element = first + item * step;
      if (kWord > 1 && item == 0 && element < 0)
        word.insert(kWord - 1, row);
      else if (kWord > 1 && item >= kFull && element + kWord > end)
        word.insert(0, row + element);
      else
        word = Vec<Source, kWord>::load(row + element);
    };
    const auto load = [&](int item) {
      // what does not exist before has room all the same
      if (item < kFull || first + item * step < end) {
        take(staged.source + start, item, source[item]);
        if constexpr (kBackward) take(staged.grad + start, item, grad[item]);
      }
      if constexpr (Operation::kMasked) replace(source[item], excluded, operation.nothing(), item * kWord);
    };
    const auto make_term = [&](int i) {
      const int item = i / kWord, k = i % kWord;
      terms[i] = Operation::term(source[item].widened(k), kBackward ? grad[item].widened(k) : 0);
    };

#pragma unroll
    for (int item = 0; item < kItems; ++item) load(item);
#pragma unroll
    for (int i = 0; i < kElements; ++i) make_term(i);
    const Live<Operation::kMasked ? kFull : kItems> live{arguments.live};  // where to ask takes less than to go on
    const Lanes lanes{arguments.lanes};
    typename Operation::State state;
    if constexpr (Operation::kMasked) {  // all that is not the row's is excluded
      auto max = Vec<Source, kWord>::largest(source);
      if constexpr (kTail) {
        terms[kElements] = operation.nothing();
        if (inside(tail) && !tail_excluded) terms[kElements] = widen(staged.source[start + tail]);
        max = larger(max, terms[kElements]);
      }
      max = lanes.max(operation.scaled(max));
      if constexpr (kTail)
        state = operation.template exponentiated<1, kElements + 1, kElements + 1>(terms, 1, {max}, lanes);
      else
        state = operation.template exponentiated<kItems, kWord, kWord>(terms, live, {max}, lanes);
    } else {
      if constexpr (Operation::kBiased)
        fused.template biased_word_terms<kItems, kWord, kFull>(first, step, terms);
      else if constexpr (Operation::kFused && !kBackward)
        fused.template any_terms<kItems, kWord>(first, step, terms);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const bool ragged = i / kWord >= kFull || (i == 0 && kWord > 1);  // all others are the row's
        if (ragged && !inside(element(i))) terms[i] = operation.nothing();
      }
      state = operation.template reduce<kItems, kWord, kWord>(terms, live, lanes);
    }
    const auto finish = finish_of<Operation>(WarpExchange{}, state, arguments.fusing);

    constexpr int kTogether = tuning::kStagedTogether;
#pragma unroll
    for (int group = 0; group < kItems; group += kTogether) {
      if constexpr (kBackward) {  // again, rather than hold two operands
#pragma unroll
        for (int item = group; item < kItems && item < group + kTogether; ++item) load(item);
#pragma unroll
        for (int i = group * kWord; i < kElements && i < (group + kTogether) * kWord; ++i) make_term(i);
      }
      Vec<Result, kWord> words[kTogether];
      operation.with_log([&](auto log) {
#pragma unroll
        for (int item = group; item < kItems && item < group + kTogether; ++item) {
          if (item >= live) break;
          words[item - group] =
              Vec<Result, kWord>::narrowed([&](int k) { return finish(terms[item * kWord + k], log); });
        }
      });
#pragma unroll
      for (int item = group; item < kItems && item < group + kTogether; ++item) {
        if (item >= live) break;
        const int element = first + item * step;
        const auto& word = words[item - group];
        Result* const to = staged.result + start + element;
        const bool whole = (item > 0 || element >= 0) && (item < kFull ? exists : element + kWord <= end);
        if (Staged<Operation>::kInPlace && whole) {
          word.store(to);
        } else if (!Staged<Operation>::kInPlace || item == 0 || item >= kFull) {
#pragma unroll
          for (int k = 0; k < kWord; ++k)  // the rest of a word is another team's
            if (inside(element + k)) word.extract(k, to + k);
        }
      }
    }
    if constexpr (kTail)
      operation.with_log([&](auto log) {
        const auto value = narrow<Result>(finish(terms[kElements], log));
        if (inside(tail)) staged.result[start + tail] = value;
      });
    if constexpr (Operation::kFused && !Operation::kBiased)
      if (__builtin_expect(finish.taints(), 0))
#pragma unroll 1
        for (int i = 0; i < kElements + (kTail ? 1 : 0); ++i)
          if (inside(element(i)) && finish.clears(fused.includes(element(i))))
            staged.result[start + element(i)] = narrow<Result>(operation.excluded());
  }
  staged.store(arguments, dim);
}

template <typename Operation, int kItems, bool kTail = false>
__global__ void __launch_bounds__(tuning::kWarpBlock,
                                  tuning::staged_min_blocks(Operation::kDirection, Operation::kFused,
                                                            Operation::kMasked, kItems,
                                                            tuning::staged_word(sizeof(typename Operation::Source))))
    staged_rows(const RowArguments<Operation> arguments) {
  if constexpr (kHasAllKernels)
    take_staged<Operation, kItems, kTail>(arguments);
  else
    never_launched();
}

// Rows smaller than a vector: a thread takes the fewest whole vectors that hold whole rows.
template <typename Operation, int kDim>
__global__ void __launch_bounds__(tuning::kWarpBlock) tiny_rows(const RowArguments<Operation> arguments) {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  constexpr bool kBackward = kIsBackward<Operation>;
  constexpr int kRows = tuning::rows_of_whole_vectors(kDim, sizeof(Source)), kElements = kRows * kDim;
  using Rows = Vec<Source, kElements>;

  const Operation operation = arguments.fusing.operation;
  const Staged<Operation> staged(arguments, kDim);
  staged.await();
  for (int row = threadIdx.x * kRows; row < staged.rows; row += staged_block<Source>() * kRows) {
    const auto source = Rows::load(staged.source + row * kDim);
    Rows grad;
    if constexpr (kBackward) grad = Rows::load(staged.grad + row * kDim);
    typename Operation::Real results[kElements];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      typename Operation::Term terms[kDim];
#pragma unroll
      for (int k = 0; k < kDim; ++k)
        terms[k] = Operation::term(source.widened(r * kDim + k), kBackward ? grad.widened(r * kDim + k) : 0);
      const auto finish = operation.finish(operation.template reduce<1, kDim, kDim>(terms, 1, Lanes{1}));
      operation.with_log([&](auto log) {
#pragma unroll
        for (int k = 0; k < kDim; ++k) results[r * kDim + k] = finish(terms[k], log);
      });
    }
    Vec<Result, kElements>::narrowed([&](int i) { return results[i]; }).store_shared(staged.result + row * kDim);
  }
  staged.store(arguments, kDim);
}

}  // namespace

void launch_staged(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  const auto launch = [&]<typename Operation>() {
    using Source = typename Operation::Source;
    const auto arguments = row_arguments<Operation>(problem, plan, pointers);
    constexpr int kVector = Row<Operation, int>::kVector;
    if constexpr (tuning::staged_may_have_tail(sizeof(Source), Operation::kMasked))
      if (plan.ragged)
        return visit_int<0, tuning::kStagedTailItems.size() - 1>(tuning::staged_tail(plan.items), [&](auto tail) {
          launch_grid<staged_rows<Operation, tuning::kStagedTailItems[tail], true>>(arguments, plan, pointers, stream);
        });
    if (plan.vector < kVector) {
      constexpr int kMost =
          tuning::staged_most_items(sizeof(Source), Operation::kDirection, kFusesMore<Operation>, Operation::kBiased);
      visit_items<tuning::staged_items, kMost>(plan.items, [&](auto items) {
        launch_grid<staged_rows<Operation, items>>(arguments, plan, pointers, stream);
      });
    } else {
      if constexpr (tuning::has_tiny_rows(sizeof(Source), sizeof(typename Operation::Result), Operation::kFused))
        visit_int<1, kVector - 1>(static_cast<int>(problem.dim.size), [&](auto dim) {
          launch_grid<tiny_rows<Operation, dim>>(arguments, plan, pointers, stream);
        });
    }
  };
  // of 16 bits, which have few instructions to spare, operations are told which they are, but for those that scale, as
  // that is not worth as many kernels
  const auto launch_told = [&]<typename Operation>() {
    if constexpr (sizeof(typename Operation::Source) == 2 && sizeof(typename Operation::Result) == 2 &&
                  !kScalesRows<Operation>)
      visit_told<Operation>(problem, launch);
    else
      launch.template operator()<Operation>();
  };
  visit_row_operation(problem, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    using Result = typename Operation::Result;
    if constexpr (!tuning::has_staged_rows(sizeof(Source), sizeof(Result), Operation::kFused)) {
      throw std::logic_error("rows of this type are never staged");
    } else if constexpr (!Operation::kFused) {
      launch_told.template operator()<Operation>();
    } else {
      if constexpr (!kIsBackward<Operation>)
        if (masks_neighbours(problem)) return launch_told.template operator()<MaskedForward<Source, Result>>();
      if constexpr (!kIsBackward<Operation> && std::is_same_v<Source, Result> &&
                    tuning::has_biased_rows(sizeof(Source)))
        if (has_biased_kernels(problem)) return launch_told.template operator()<BiasedForward<Source>>();
      launch.template operator()<Operation>();
    }
  });
}

}  // namespace ndsoftmax::cuda
