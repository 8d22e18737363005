// Strided regime: everything whose rows are not runs of neighbouring elements. A column is one softmax; a tile is some
// columns (neighbours along inner, kVector of them a thread, moved as one vector where strides permit) times dim, cut
// over threads_along threads. Threads of a tile are laid along whichever of the two runs faster in memory.
// Held: dim fits in the registers of a block, each element is read once. Otherwise the online softmax, twice; with few
// columns, plan.splits blocks share them and states pass through the workspace, as in online.cu.
// Any strides, any number of groups on every axis; only kVector > 1 assumes an innermost group of stride 1.
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
struct StridedArguments {
  using Source = typename Operation::Source;

  Operation operation;
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
  bool dim_fastest;
  Phase phase;
  Offsets outer_axis, dim_axis, inner_axis;
};

// The kVector columns a thread works on.
template <typename Operation, int kVector>
class Columns {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Term = typename Operation::Term;
  static constexpr bool kBackward = Operation::kDirection == Direction::backward;

  struct Raw {
    Vec<Source, kVector> source, grad;
  };

  __device__ __forceinline__ Columns(const StridedArguments<Operation>& arguments, std::int64_t column)
      : arguments_(arguments), dim_(column < arguments.columns ? arguments.dim : 0) {
    const std::int64_t outer = column < arguments.columns ? column / arguments.inner : 0;
    const std::int64_t inner = column < arguments.columns ? column - outer * arguments.inner : 0;
    const Offsets::Result from = arguments.outer_axis(outer), to = arguments.inner_axis(inner * kVector);
    source_ = arguments.source + from.at[kSource] + to.at[kSource];
    grad_ = arguments.grad + from.at[kGrad] + to.at[kGrad];
    result_ = arguments.result + from.at[kResult] + to.at[kResult];
  }

  __device__ __forceinline__ bool has(std::int64_t element) const { return element < dim_; }

  __device__ __forceinline__ Raw load(std::int64_t element) const {
    const Offsets::Result offset = arguments_.dim_axis(element);
    Raw raw;
    raw.source = *reinterpret_cast<const Vec<Source, kVector>*>(source_ + offset.at[kSource]);
    if constexpr (kBackward) raw.grad = *reinterpret_cast<const Vec<Source, kVector>*>(grad_ + offset.at[kGrad]);
    return raw;
  }

  __device__ __forceinline__ void terms(const Raw& raw, bool exists, Term* terms) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      terms[k] = exists ? Operation::term(raw.source.at[k], raw.grad.at[k]) : Operation::nothing();
  }

  template <typename Values>
  __device__ __forceinline__ void store(std::int64_t element, const Values& value) const {
    Vec<Result, kVector> vector;
#pragma unroll
    for (int k = 0; k < kVector; ++k) vector.at[k] = narrow<Result>(value(k));
    *reinterpret_cast<Vec<Result, kVector>*>(result_ + arguments_.dim_axis(element).at[kResult]) = vector;
  }

 private:
  const StridedArguments<Operation>& arguments_;
  const Source* source_;
  const Source* grad_;
  Result* result_;
  std::int64_t dim_;
};

// Combines the states of the threads along each column, which lie in different lanes and warps.
struct TileExchange {
  int columns, threads_along;
  bool dim_fastest;
  work::TileThread thread;
  Lanes team;

  template <typename Arguments>
  __device__ __forceinline__ explicit TileExchange(const Arguments& arguments)
      : columns(blockDim.x / arguments.threads_along),
        threads_along(arguments.threads_along),
        dim_fastest(arguments.dim_fastest),
        thread(work::tile_thread(threadIdx.x, columns, threads_along, dim_fastest)) {
    if (dim_fastest) team = {min(threads_along, kWarp), 1};
    else team = {max(1, min(threads_along, kWarp / columns)), min(columns, kWarp)};
  }

  // Every lane of a team brings the team's states; dynamic shared memory holds those of all teams and the result.
  template <int kVector, typename State>
  __device__ __forceinline__ void operator()(State (&state)[kVector]) const {
    const int teams = threads_along / team.lanes;
    if (teams == 1) return;
    extern __shared__ __align__(16) unsigned char shared[];
    State* partial = reinterpret_cast<State*>(shared);
    const int width = columns * kVector;
    State* whole = partial + teams * width;
    __syncthreads();  // an earlier exchange may still be read
    if (thread.along % team.lanes == 0) {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        partial[thread.along / team.lanes * width + thread.column * kVector + k] = state[k];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
      State sum = partial[column];
      for (int i = 1; i < teams; ++i) sum.combine(partial[i * width + column]);
      whole[column] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVector; ++k) state[k] = whole[thread.column * kVector + k];
  }
};

template <typename Operation, int kVector>
__global__ void __launch_bounds__(tuning::kStridedMaxBlock) held_tile(const StridedArguments<Operation> arguments) {
  using ColumnsOf = Columns<Operation, kVector>;
  constexpr int kItems = tuning::strided_items(sizeof(typename Operation::Source), Operation::kDirection, kVector);

  const TileExchange exchange(arguments);
  const ColumnsOf columns(arguments,
                          (arguments.first_block + blockIdx.x) * exchange.columns + exchange.thread.column);
  const auto element = [&](int item) {
    return static_cast<std::int64_t>(item) * exchange.threads_along + exchange.thread.along;
  };

  typename ColumnsOf::Raw raw[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item)
    if (columns.has(element(item))) raw[item] = columns.load(element(item));

  typename Operation::Term terms[kItems * kVector];
#pragma unroll
  for (int item = 0; item < kItems; ++item)
    columns.terms(raw[item], columns.has(element(item)), terms + item * kVector);

  typename Operation::State held[kVector], whole[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    whole[k] = held[k] = arguments.operation.template reduce<kItems, kVector>(terms + k, exchange.team);
  exchange(whole);

  typename Operation::Finish finish[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) finish[k] = arguments.operation.finish(held[k], whole[k]);
#pragma unroll
  for (int item = 0; item < kItems; ++item)
    if (columns.has(element(item)))
      columns.store(element(item), [&](int k) { return finish[k](terms[item * kVector + k]); });
}

template <typename Operation, int kVector>
__global__ void __launch_bounds__(tuning::kStridedMaxBlock) online_tile(const StridedArguments<Operation> arguments) {
  using ColumnsOf = Columns<Operation, kVector>;
  using Term = typename Operation::Term;
  constexpr int kUnroll = tuning::kOnlineVectors;

  const TileExchange exchange(arguments);
  const std::int64_t block = arguments.first_block + blockIdx.x;
  const std::int64_t tile = block / arguments.splits, split = block - tile * arguments.splits;
  const std::int64_t column = tile * exchange.columns + exchange.thread.column;
  const ColumnsOf columns(arguments, column);
  const work::Part part = work::part_of(arguments.dim, split, arguments.splits, 1);
  const std::int64_t step = static_cast<std::int64_t>(exchange.threads_along) * kUnroll;
  const auto inside = [&](std::int64_t element) { return element < part.end && columns.has(element); };
  const auto load = [&](std::int64_t base, typename ColumnsOf::Raw (&raw)[kUnroll]) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t element = base + i * exchange.threads_along + exchange.thread.along;
      if (inside(element)) raw[i] = columns.load(element);
    }
  };

  typename Operation::State state[kVector];
  if (arguments.phase != Phase::write) {
    for (std::int64_t base = part.begin; base < part.end; base += step) {
      typename ColumnsOf::Raw raw[kUnroll];
      load(base, raw);
      Term terms[kUnroll * kVector];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        columns.terms(raw[i], inside(base + i * exchange.threads_along + exchange.thread.along), terms + i * kVector);
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        Operation::template accumulate<kUnroll, kVector>(state[k], terms + k, arguments.operation.log);
    }
  } else if (columns.has(0)) {
    for (std::int64_t i = exchange.thread.along; i < arguments.splits; i += exchange.threads_along)
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        state[k].combine(arguments.states[(column * kVector + k) * arguments.splits + i]);
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) state[k] = exchange.team.combine(state[k]);
  exchange(state);
  if (arguments.phase == Phase::statistics) {
    if (exchange.thread.along == 0 && columns.has(0))
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        arguments.states[(column * kVector + k) * arguments.splits + split] = state[k];
    return;
  }

  typename Operation::Finish finish[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) finish[k] = arguments.operation.finish(state[k]);
  const std::int64_t steps = (part.end - part.begin + step - 1) / step;
  for (std::int64_t i = steps - 1; i >= 0; --i) {  // backwards: L2 still has the end
    const std::int64_t base = part.begin + i * step;
    typename ColumnsOf::Raw raw[kUnroll];
    load(base, raw);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const std::int64_t element = base + j * exchange.threads_along + exchange.thread.along;
      if (!inside(element)) continue;
      Term terms[kVector];
      columns.terms(raw[j], true, terms);
      columns.store(element, [&](int k) { return finish[k].again(terms[k]); });
    }
  }
}

template <int kVector, typename Operation>
void launch_tiles(const Problem& problem, const Plan& plan, const Operation& operation, const Pointers& pointers,
                  cudaStream_t stream) {
  using Source = typename Operation::Source;
  StridedArguments<Operation> arguments{};
  arguments.operation = operation;
  arguments.source = static_cast<const Source*>(pointers.source);
  arguments.grad = static_cast<const Source*>(pointers.grad);
  arguments.result = static_cast<typename Operation::Result*>(pointers.result);
  arguments.states = static_cast<typename Operation::State*>(pointers.workspace);
  arguments.columns = problem.outer.size * problem.inner.size / kVector;
  arguments.dim = problem.dim.size;
  arguments.inner = problem.inner.size / kVector;
  arguments.splits = plan.splits;
  arguments.threads_along = plan.threads_per_row;
  arguments.dim_fastest = plan.dim_fastest;
  arguments.outer_axis = offsets_of(problem.outer);
  arguments.dim_axis = offsets_of(problem.dim);
  arguments.inner_axis = offsets_of(problem.inner);

  const auto run = [&](void (*kernel)(StridedArguments<Operation>), Phase phase) {
    arguments.phase = phase;
    launch_grid(kernel, arguments, plan, plan.grid, stream);
  };
  if (plan.passes == 1) return run(held_tile<Operation, kVector>, Phase::both);
  if (plan.splits == 1) return run(online_tile<Operation, kVector>, Phase::both);
  run(online_tile<Operation, kVector>, Phase::statistics);
  run(online_tile<Operation, kVector>, Phase::write);
}

}  // namespace

void launch_strided(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>(const Operation& operation) {
    if (plan.vector == 1) launch_tiles<1>(problem, plan, operation, pointers, stream);
    else
      launch_tiles<tuning::strided_vector(sizeof(typename Operation::Source))>(problem, plan, operation, pointers,
                                                                                  stream);
  });
}

}  // namespace ndsoftmax::cuda
