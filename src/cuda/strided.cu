// Strided regime: everything whose rows are not runs of neighbouring elements. A column is one softmax; a tile is some
// columns (neighbours along inner, kVector of them a thread, moved as one vector where strides permit) times dim, cut
// over threads_along threads. Neighbouring threads are neighbours along whichever of the two runs faster in memory.
// Held: dim fits in the registers of a block, each element is read once. Otherwise the online softmax, twice; with few
// columns, plan.splits blocks share them and states pass through the workspace, as in online.cu.
// Any strides, any number of groups on every axis; only kVector > 1 assumes an innermost group of stride 1.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
struct StridedArguments {
  using Source = typename Operation::Source;

  const Source* source;
  const Source* grad;
  typename Operation::Result* result;
  typename Operation::State* states;  // columns × splits
  std::int64_t columns;               // in vectors
  std::int64_t dim;
  std::int64_t inner;  // in vectors
  std::int64_t splits;
  std::int64_t first_block;
  int threads_along;
  int live;  // items that any thread has
  int run;
  Phase phase;
  KernelAxis<kOperandsOf<Operation>> dim_axis, outer_axis, inner_axis;
  Fusing<Operation> fusing;
};

// The kVector columns a thread works on, and the elements of them that it has: base + item * threads_along + along.
// kOneGroup: dim is one group, so that a thread steps by a fixed distance.
template <typename Operation, int kVector, bool kOneGroup, typename Index>
class Columns {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Term = typename Operation::Term;
  using OffsetsOf = Offsets<kOperandsOf<Operation>>;
  static constexpr bool kBackward = Operation::kDirection == Direction::backward;

  struct Raw {
    Vec<Source, kVector> source, grad;
    Extras<Operation, kVector> extras;
  };

  __device__ __forceinline__ Columns(const StridedArguments<Operation>& arguments, std::int64_t column, int along)
      : arguments_(arguments), along_(along), dim_(column < arguments.columns ? static_cast<Index>(arguments.dim) : 0) {
    const std::int64_t outer = column < arguments.columns ? column / arguments.inner : 0;
    const std::int64_t inner = column < arguments.columns ? column - outer * arguments.inner : 0;
    first_ = offsets_in(arguments.outer_axis, outer);
    first_ += offsets_in(arguments.inner_axis, inner * kVector);
    if constexpr (kOneGroup) {
      first_ += offsets_in_group(arguments.dim_axis, along);
      step_ = offsets_in_group(arguments.dim_axis, arguments.threads_along);
    }
    source_ = arguments.source + first_.at[kSource];
    grad_ = arguments.grad + first_.at[kGrad];
    result_ = arguments.result + first_.at[kResult];
  }

  __device__ __forceinline__ bool exist() const { return dim_ > 0; }
  __device__ __forceinline__ bool has(Index base, int item, Index end) const {
    return element(base, item) < (end < dim_ ? end : dim_);
  }

  __device__ __forceinline__ Raw load(Index base, int item) const {
    const OffsetsOf offset = offset_of(base, item);
    Raw raw;
    if constexpr (Operation::kFused) {
      const unsigned reached = reached_by(element(base, item), offset);
      if (reached == 0) return raw;
      raw.extras.load(arguments_.fusing, line(offset), reached);
    }
    raw.source = Vec<Source, kVector>::load(source_ + offset.at[kSource]);
    if constexpr (kBackward) raw.grad = Vec<Source, kVector>::load(grad_ + offset.at[kGrad]);
    return raw;
  }

  __device__ __forceinline__ void terms(Raw& raw, Index base, int item, bool exists, Term* terms) const {
    if constexpr (Operation::kFused) {
      const OffsetsOf offset = offset_of(base, item);
      if (exists) raw.extras.resolve(arguments_.fusing, line(offset), reached_by(element(base, item), offset));
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const typename Operation::Real source = raw.source.widened(k), grad = kBackward ? raw.grad.widened(k) : 0;
      if constexpr (Operation::kFused)
        terms[k] = exists ? raw.extras.term(arguments_.fusing, source, grad, k) : Operation::nothing();
      else
        terms[k] = exists ? Operation::term(source, grad) : Operation::nothing();
    }
  }

  template <typename Values>
  __device__ __forceinline__ void store(Index base, int item, const Values& value) const {
    Vec<Result, kVector>::narrowed(value).store(result_ + offset_of(base, item).at[kResult]);
  }

 private:
  __device__ __forceinline__ Index element(Index base, int item) const {
    return base + item * arguments_.threads_along + along_;
  }

  // From the first element of the thread's columns.
  __device__ __forceinline__ OffsetsOf offset_of(Index base, int item) const {
    if constexpr (!kOneGroup) return offsets_in(arguments_.dim_axis, element(base, item));
    OffsetsOf offset = offsets_in_group(arguments_.dim_axis, base);
#pragma unroll
    for (int operand = 0; operand < kOperandsOf<Operation>; ++operand) offset.at[operand] += item * step_.at[operand];
    return offset;
  }

  // The columns, as bits, in which an element of this number is not past the diagonal.
  __device__ __forceinline__ unsigned reached_by(Index number, const OffsetsOf& offset) const {
    unsigned reached = (1u << kVector) - 1;
    if (!arguments_.fusing.causal) return reached;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const std::int64_t row = first_.at[kRow] + offset.at[kRow] + k * across()[kRow];
      if (number > row + arguments_.fusing.diagonal) reached &= ~(1u << k);
    }
    return reached;
  }

  __device__ __forceinline__ Line line(const OffsetsOf& offset) const {
    return {first_.at[kMask] + offset.at[kMask], across()[kMask], first_.at[kBias] + offset.at[kBias], across()[kBias]};
  }

  // From one of the thread's columns to the next.
  __device__ __forceinline__ const std::int64_t* across() const {
    return arguments_.inner_axis.groups[kVector > 1 ? arguments_.inner_axis.rank - 1 : 0].stride;
  }

  const StridedArguments<Operation>& arguments_;
  const Source* source_;
  const Source* grad_;
  Result* result_;
  OffsetsOf first_, step_;
  int along_;
  Index dim_;
};

// Combines the states of the threads along each column, which lie in different lanes and warps.
struct TileExchange {
  int columns;  // of the tile, in vectors
  work::TileThread thread;
  Lanes team;
  int teams;

  template <typename Arguments>
  __device__ __forceinline__ explicit TileExchange(const Arguments& arguments)
      : columns(blockDim.x / arguments.threads_along),
        thread(work::tile_thread(threadIdx.x, arguments.run, arguments.threads_along)),
        team{min(arguments.threads_along, kWarp / arguments.run), arguments.run},
        teams(arguments.threads_along / team.lanes) {}

  // Every lane of a team brings the team's states; those of all teams meet in dynamic shared memory.
  template <int kVector, typename State>
  __device__ __forceinline__ void operator()(State (&state)[kVector]) const {
    if (teams == 1) return;
    State* of_teams = reinterpret_cast<State*>(dynamic_shared_memory());
    const int width = columns * kVector, column = thread.column * kVector;
    if (thread.along % team.lanes == 0) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) of_teams[thread.along / team.lanes * width + column + k] = state[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      combine_all(state[k], teams, [&](int i) { return of_teams[i * width + column + k]; });
  }
};

template <typename Operation, int kVector, bool kOneGroup>
__global__ void __launch_bounds__(tuning::kStridedMaxBlock, tuning::kStridedMinBlocks)
    held_tile(const StridedArguments<Operation> arguments) {
  using ColumnsOf = Columns<Operation, kVector, kOneGroup, int>;
  constexpr int kItems =
      tuning::strided_items(sizeof(typename Operation::Source), Operation::kDirection, Operation::kFused, kVector);

  await_kernel_before();
  let_next_kernel_begin();
  const TileExchange exchange(arguments);
  const ColumnsOf columns(arguments, (arguments.first_block + blockIdx.x) * exchange.columns + exchange.thread.column,
                          exchange.thread.along);
  const auto has = [&](int item) { return columns.has(0, item, static_cast<int>(arguments.dim)); };

  typename ColumnsOf::Raw raw[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item)
    if (has(item)) raw[item] = columns.load(0, item);

  typename Operation::Term terms[kItems * kVector];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (item >= arguments.live) break;
    columns.terms(raw[item], 0, item, has(item), terms + item * kVector);
  }

  typename Operation::State held[kVector], whole[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    whole[k] = held[k] = Operation::template reduce<kItems, 1, kVector>(terms + k, arguments.live, exchange.team);
  exchange(whole);

  typename Operation::Finish finish[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    finish[k] = settled<Operation>(Operation::finish(held[k], whole[k]), arguments.fusing);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (item >= arguments.live) break;
    if (has(item))
      columns.store(0, item, [&](int k) { return finish[k](terms[item * kVector + k], raw[item].extras.include(k)); });
  }
}

template <typename Operation, int kVector, bool kOneGroup>
__global__ void __launch_bounds__(tuning::kStridedMaxBlock) online_tile(const StridedArguments<Operation> arguments) {
  using ColumnsOf = Columns<Operation, kVector, kOneGroup, std::int64_t>;
  using Term = typename Operation::Term;
  constexpr int kUnroll = tuning::kOnlineVectors;

  await_kernel_before();
  let_next_kernel_begin();
  const TileExchange exchange(arguments);
  const std::int64_t block = arguments.first_block + blockIdx.x;
  const std::int64_t tile = block / arguments.splits, split = block - tile * arguments.splits;
  const std::int64_t column = tile * exchange.columns + exchange.thread.column;
  const ColumnsOf columns(arguments, column, exchange.thread.along);
  const work::Part<std::int64_t> part = work::part_of<std::int64_t>(arguments.dim, split, arguments.splits);
  const std::int64_t step = static_cast<std::int64_t>(arguments.threads_along) * kUnroll;
  const auto load = [&](std::int64_t base, typename ColumnsOf::Raw(&raw)[kUnroll]) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (columns.has(base, i, part.end)) raw[i] = columns.load(base, i);
  };

  typename Operation::State state[kVector];
  if (arguments.phase != Phase::write) {
    for (std::int64_t base = part.begin; base < part.end; base += step) {
      typename ColumnsOf::Raw raw[kUnroll];
      load(base, raw);
      Term terms[kUnroll * kVector];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        columns.terms(raw[i], base, i, columns.has(base, i, part.end), terms + i * kVector);
#pragma unroll
      for (int k = 0; k < kVector; ++k) Operation::template accumulate<kUnroll, 1, kVector>(state[k], terms + k);
    }
  } else if (columns.exist()) {
    for (std::int64_t i = exchange.thread.along; i < arguments.splits; i += arguments.threads_along)
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        state[k].combine(arguments.states[(column * kVector + k) * arguments.splits + i]);
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) state[k] = exchange.team.combine(state[k]);
  exchange(state);
  if (arguments.phase == Phase::statistics) {
    if (exchange.thread.along == 0 && columns.exist())
#pragma unroll
      for (int k = 0; k < kVector; ++k) arguments.states[(column * kVector + k) * arguments.splits + split] = state[k];
    return;
  }

  typename Operation::Finish finish[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) finish[k] = settled<Operation>(Operation::finish(state[k]), arguments.fusing);
  const std::int64_t steps = (part.end - part.begin + step - 1) / step;
  for (std::int64_t i = steps - 1; i >= 0; --i) {  // backwards: L2 still has the end
    const std::int64_t base = part.begin + i * step;
    typename ColumnsOf::Raw raw[kUnroll];
    load(base, raw);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (!columns.has(base, j, part.end)) continue;
      Term terms[kVector];
      columns.terms(raw[j], base, j, true, terms);
      columns.store(base, j, [&](int k) { return finish[k].again(terms[k], raw[j].extras.include(k)); });
    }
  }
}

template <typename Operation, int kVector, bool kOneGroup>
void launch_tiles(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  using Source = typename Operation::Source;
  StridedArguments<Operation> arguments{};
  arguments.source = static_cast<const Source*>(pointers.source);
  arguments.grad = static_cast<const Source*>(pointers.grad);
  arguments.result = static_cast<typename Operation::Result*>(pointers.result);
  arguments.states = static_cast<typename Operation::State*>(pointers.workspace);
  arguments.columns = problem.outer.size * problem.inner.size / kVector;
  arguments.dim = problem.dim.size;
  arguments.inner = problem.inner.size / kVector;
  arguments.splits = plan.splits;
  arguments.threads_along = plan.threads_per_row;
  arguments.live = plan.items;
  arguments.run = plan.run;
  arguments.outer_axis = decltype(arguments.outer_axis)(problem.outer);
  arguments.dim_axis = decltype(arguments.dim_axis)(problem.dim);
  arguments.inner_axis = decltype(arguments.inner_axis)(problem.inner);
  arguments.fusing = fusing_of<Operation>(problem, pointers);

  const auto run = [&](void (*kernel)(StridedArguments<Operation>), Phase phase) {
    arguments.phase = phase;
    launch_grid(kernel, arguments, plan, pointers, stream);
  };
  if (plan.passes == 1) return run(held_tile<Operation, kVector, kOneGroup>, Phase::both);
  if (plan.splits == 1) return run(online_tile<Operation, kVector, kOneGroup>, Phase::both);
  run(online_tile<Operation, kVector, kOneGroup>, Phase::statistics);
  run(online_tile<Operation, kVector, kOneGroup>, Phase::write);
}

}  // namespace

void launch_strided(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    constexpr int kVector = tuning::strided_vector(sizeof(typename Operation::Source));
    if (plan.vector == kVector)
      launch_tiles<Operation, kVector, true>(problem, plan, pointers, stream);
    else if (problem.dim.rank <= 1)
      launch_tiles<Operation, 1, true>(problem, plan, pointers, stream);
    else
      launch_tiles<Operation, 1, false>(problem, plan, pointers, stream);
  });
}

}  // namespace ndsoftmax::cuda
