// Strided regime: everything whose rows are not runs of neighbouring elements. A column is one softmax. What bounds it
// is memory, as long as enough of it is under way: so a tile of columns × dim lies in shared memory, which its block
// fills with asynchronous copies, many blocks to a multiprocessor. The other bound is instructions: a multiprocessor
// has 64 for each 32-bit element, 32 for a 16-bit one, and half of that should do. So words are walked by pointers,
// without a comparison each: for the maximum, for the sum, and for the results. Exponentials of 32 bits stay in the
// tile in between; those of 16 bits, which would be rounded, are computed twice. What is fused is applied to the tile
// before that; only a bias of 16-bit elements, which would be rounded, is left to the online softmax (or to
// columns.cu).
//
// A strip is the columns that are neighbours in memory. A tile has a part of one, or several; threads take kColumns
// neighbouring columns each (a word of 16-bit ones) and every along'th element of dim, so that neighbours read
// and write neighbouring words. Where dim is longer than a tile, the blocks of a cluster share it, and states pass
// through distributed shared memory. Where it is longer still, or a tile not worth its blocks: the online softmax,
// which reads twice; where multiprocessors would be idle, plan.splits blocks share columns and states pass through the
// workspace, in two launches, as in online.cu, or in one whose blocks all run at once, and which keeps what registers
// and shared memory have room for (Plan::meets). So do those of columns that are folded, as vectors or sectors do not
// divide them, unless a block has all of them: a column then has several copies, a strip apart, each with some of its
// elements. Any strides, any number of groups on every axis; only kColumns > 1 assumes that dim is one group, and that
// the innermost group of columns has stride 1. Where dim is several, elements are copied one by one, and results go
// back into the tile first, which needs them to be of the source's type (tile_plan() sees to that).
#include <cooperative_groups.h>

#include <bit>

#include "cuda/async.cuh"
#include "cuda/copies.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/passes.cuh"
#include "host/cuda_plan.hpp"

namespace ndsoftmax::cuda {
namespace {

// What one launch of a kernel that reads its source twice does: all of it, where each tile is a block's own or where
// all blocks meet in between, or only one of the two passes.
enum class Phase { both, meet, statistics, write };

template <typename Operation>
struct StridedArguments {
  using Source = typename Operation::Source;

  const Source* source;
  const Source* grad;
  typename Operation::Result* result;
  typename Operation::State* states;  // splits × columns
  std::int64_t columns;               // in vectors
  std::int64_t dim;
  std::int64_t inner;  // in vectors
  std::int64_t splits;
  std::int64_t first_block, blocks;
  work::Divider run;
  work::Divider along;  // threads along dim
  int own;  // vectors of columns that a tile read twice has: the whole run, or those of a slab, which may be fewer
  int cluster;
  StridedTile tile;
  work::Divider words;  // of a strip of the tile
  Phase phase;
  int kept_steps;  // where blocks meet: of which each keeps in shared memory what it loads
  // Where columns are folded, and the rest is of those; in elements.
  struct {
    std::int64_t slab;   // dim times the columns
    std::int64_t strip;  // columns before they are folded
    int log2_copies;     // of each column after that
    int unit;            // a slab is moved to a multiple of so many
  } folded;
  KernelAxis<kOperandsOf<Operation>> dim_axis, outer_axis, inner_axis;
  Fusing<Operation> fusing;
};

// The kVector columns a thread works on, and the elements of them that it has: base + item * along.size + along.
// Where dim is one group, as it always is where columns are vectors, a thread steps by a fixed distance. Of folded ones
// the first and the last vector of a slab may be there in part, or not at all: edges, of which load() loads nothing,
// load_edge() all that is there.
template <typename Operation, int kVector, typename Index, bool kFolds = false>
class Columns {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Term = typename Operation::Term;
  using OffsetsOf = Offsets<kOperandsOf<Operation>>;

  struct Raw {
    Vec<Source, kVector> source, grad;
    Extras<Operation, kVector> extras;
  };

  __device__ __forceinline__ Columns(const StridedArguments<Operation>& arguments, std::int64_t column, int along)
      : arguments_(arguments), along_(along), dim_(column < arguments.columns ? static_cast<Index>(arguments.dim) : 0) {
    if (column >= arguments.columns) column = 0;
    const std::int64_t outer = quotient(column, arguments.inner), inner = column - outer * arguments.inner;
    first_ = offsets_called(arguments.outer_axis, outer);
    if constexpr (kFolds) fold(first_, static_cast<Index>(inner) * kVector);
    first_ += offsets_called(arguments.inner_axis, inner * kVector);
    if (one_group()) {
      first_ += offsets_in_group(arguments.dim_axis, along);
      step_ = offsets_in_group(arguments.dim_axis, arguments.along.size);
    }
    source_ = arguments.source + first_.at[kSource];
    grad_ = arguments.grad + first_.at[kGrad];
    result_ = arguments.result + first_.at[kResult];
  }

  __device__ __forceinline__ bool exist() const { return dim_ > 0; }
  __device__ __forceinline__ Index dim() const { return dim_; }
  __device__ __forceinline__ bool has(Index base, int item, Index end) const {
    return element(base, item) < (end < dim_ ? end : dim_);
  }

  // Of any thread along dim: the elements from `base` on, so many, edges left out. They end with the last that does.
  __device__ __forceinline__ Index whole_end() const { return dim_ - (kFolds ? 1 : 0); }
  __device__ __forceinline__ bool has_all(Index base, Index count) const {
    return base >= (kFolds ? 1 : 0) && base + count <= whole_end();
  }

  __device__ __forceinline__ Raw load(Index base, int item) const {
    if (is_edge(base, item)) return nothing();
    Raw raw;
    raw.source = Vec<Source, kVector>::load(where<kSource>(base, item));
    if constexpr (kIsBackward<Operation>) raw.grad = Vec<Source, kVector>::load(where<kGrad>(base, item));
    load(base, item, raw.extras);
    return raw;
  }
  __device__ __forceinline__ void load_edge(Index base, int item, Raw& raw) const {
    if constexpr (kFolds) {
      if (!is_edge(base, item)) return;
      const int from = first_there(base, item), to = end_there(base, item);
      raw.source = Vec<Source, kVector>::load_part(where<kSource>(base, item), from, to, raw.source);
      if constexpr (kIsBackward<Operation>)
        raw.grad = Vec<Source, kVector>::load_part(where<kGrad>(base, item), from, to, raw.grad);
    }
  }
  // Whether elements are a fixed distance apart, so that no address need be found for each.
  __device__ __forceinline__ bool have_steps() const { return !Operation::kFused && one_group(); }
  // Then: all of the items from `base` on, which are there.
  template <int kItems>
  __device__ __forceinline__ void load_all(Index base, Raw (&raw)[kItems], auto... eviction) const {
    const Source* source = where<kSource>(base, 0);
    const Source* grad = where<kGrad>(base, 0);
#pragma unroll
    for (int i = 0; i < kItems; ++i, source += step_.at[kSource], grad += step_.at[kGrad]) {
      raw[i].source = Vec<Source, kVector>::load(source, eviction...);
      if constexpr (kIsBackward<Operation>) raw[i].grad = Vec<Source, kVector>::load(grad, eviction...);
    }
  }
  // And their results, values(item, k).
  template <int kItems, typename Values>
  __device__ __forceinline__ void store_all(Index base, const Values& values) const {
    Result* result = this->result(base, 0);
#pragma unroll
    for (int i = 0; i < kItems; ++i, result += step_.at[kResult])
      Vec<Result, kVector>::narrowed([&](int k) { return values(i, k); }).store(result);
  }
  // Only what is fused.
  __device__ __forceinline__ void load(Index base, int item, Extras<Operation, kVector>& extras) const {
    if constexpr (Operation::kFused) line(offset_of(base, item)).load(0, 0, extras);
  }
  // Where the source or the gradient of an element is.
  template <int kOperand>
  __device__ __forceinline__ const Source* where(Index base, int item) const {
    return memory<kOperand>(offset_of(base, item));
  }

  // What is not loaded.
  __device__ __forceinline__ Raw nothing() const {
    Raw raw{};
    if constexpr (!kIsBackward<Operation>) raw.source = Vec<Source, kVector>::filled(Operation::nothing());
    return raw;
  }

  // Where nothing is fused, or it has been applied.
  __device__ __forceinline__ static Term term(const Raw& raw, int k) {
    return Operation::term(raw.source.widened(k), kIsBackward<Operation> ? raw.grad.widened(k) : 0);
  }
  // Once, after load(), or, where the element is not there, nothing().
  __device__ __forceinline__ void terms(Raw& raw, Index base, int item, bool exists, Term* terms) const {
    if (Operation::kFused && !exists) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) terms[k] = arguments_.fusing.operation.nothing();
    } else if constexpr (Operation::kFused && !kIsBackward<Operation>) {
      const auto fused = resolved(base, item, raw.extras);
      fused.terms(0, raw.extras, [&](int k) { return raw.source.widened(k); }, terms);
    } else {
      if constexpr (Operation::kFused) apply(base, item, raw);
#pragma unroll
      for (int k = 0; k < kVector; ++k) terms[k] = term(raw, k);
    }
  }
  // The same in the place of what was loaded, as far as that has room.
  __device__ __forceinline__ void apply(Index base, int item, Raw& raw) const {
    const auto fused = resolved(base, item, raw.extras);
    fused.apply(0, raw.extras, raw.source, raw.grad);
  }

  // Whether masks and biases of the thread's elements lie a fixed distance apart, and are all that excludes any.
  __device__ __forceinline__ bool fuses_by_steps() const { return one_group() && !arguments_.fusing.causal; }
  // Then: where those of the first from `base` on are, in elements, and how far the next ones.
  template <int kOperand>
  __device__ __forceinline__ std::int64_t beside(Index base) const {
    return first_.at[kOperand] + offset_of(base, 0).at[kOperand];
  }
  template <int kOperand>
  __device__ __forceinline__ std::int64_t step() const {
    return step_.at[kOperand];
  }

  __device__ __forceinline__ bool includes(Index base, int item, int k) const {
    const OffsetsOf offset = offset_of(base, item);
    return !beyond_diagonal(element(base, item), offset, k) && line(offset).includes(k);
  }

  template <typename Values>
  __device__ __forceinline__ void store(Index base, int item, const Values& value) const {
    const auto vec = Vec<Result, kVector>::narrowed(value);
    if constexpr (kFolds)
      if (is_edge(base, item))
        return vec.store_part(result(base, item), first_there(base, item), end_there(base, item));
    vec.store(result(base, item));
  }
  __device__ __forceinline__ Result* result(Index base, int item) const {
    return result_ + offset_of(base, item).at[kResult];
  }

  // After all of them are stored: excluded elements of tainted columns get their result, one by one, as such columns
  // are rare. Calls put(item, k, result), items counted from `base` on.
  template <typename Put>
  __device__ __forceinline__ void clean(const typename Operation::Finish (&finish)[kVector], Index base, Index end,
                                        const Put& put) const {
    if constexpr (Operation::kFused) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (__builtin_expect(!finish[k].taints(), 1)) continue;
#pragma unroll 1
        for (int item = 0; has(base, item, end); ++item)
          if (finish[k].clears(includes(base, item, k)))
            put(item, k, narrow<Result>(arguments_.fusing.operation.excluded()));
      }
    }
  }

 private:
  // The slab at `first`, which is moved to the unit that it begins in; these columns are `column` beyond that. Operands
  // begin alike within vectors; within sectors it is the source that counts, so that bits are the same in place.
  __device__ __forceinline__ void fold(OffsetsOf& first, Index column) {
    const auto address = reinterpret_cast<std::uintptr_t>(arguments_.source + first.at[kSource]);
    const int misaligned = static_cast<int>(address / sizeof(Source)) & (arguments_.folded.unit - 1);
    first.at[kSource] -= misaligned;
    first.at[kResult] -= misaligned;
    if constexpr (kIsBackward<Operation>) first.at[kGrad] -= misaligned;
    if (!exist()) return;
    const Index row = arguments_.inner * kVector, left = arguments_.folded.slab + misaligned - column;
    dim_ = quotient(left + row - 1, row);
    before_ = static_cast<int>(max(Index{0}, min(misaligned - column, Index{kVector})));
    beyond_ = max(0, kVector - static_cast<int>(min(left - (dim_ - 1) * row, Index{kVector})));
  }
  __device__ __forceinline__ bool is_edge(Index base, int item) const {
    return kFolds && (first_there(base, item) > 0 || end_there(base, item) < kVector);
  }
  // Of the columns, those that are there.
  __device__ __forceinline__ int first_there(Index base, int item) const {
    return element(base, item) == 0 ? before_ : 0;
  }
  __device__ __forceinline__ int end_there(Index base, int item) const {
    return element(base, item) == dim_ - 1 ? kVector - beyond_ : kVector;
  }

  __device__ __forceinline__ bool one_group() const { return kVector > 1 || arguments_.dim_axis.rank <= 1; }

  template <int kOperand>
  __device__ __forceinline__ const Source* memory(const OffsetsOf& offset) const {
    return (kOperand == kSource ? source_ : grad_) + offset.at[kOperand];
  }

  __device__ __forceinline__ Index element(Index base, int item) const {
    return base + item * arguments_.along.size + along_;
  }

  // From the first element of the thread's columns.
  __device__ __forceinline__ OffsetsOf offset_of(Index base, int item) const {
    if (!one_group()) return offsets_called(arguments_.dim_axis, element(base, item));
    OffsetsOf offset = offsets_in_group(arguments_.dim_axis, base);
#pragma unroll
    for (int operand = 0; operand < kOperandsOf<Operation>; ++operand) offset.at[operand] += item * step_.at[operand];
    return offset;
  }

  // The columns at an element of dim, as neighbours along a line.
  __device__ __forceinline__ FusedLine<Operation, int, kVector> line(const OffsetsOf& offset) const {
    return {arguments_.fusing, first_.at[kMask] + offset.at[kMask], first_.at[kBias] + offset.at[kBias], kVector};
  }
  __device__ __forceinline__ auto resolved(Index base, int item, Extras<Operation, kVector>& extras) const {
    const OffsetsOf offset = offset_of(base, item);
    const auto fused = line(offset);
    fused.resolve(0, extras);
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      if (beyond_diagonal(element(base, item), offset, k)) extras.excluded.add(k);
    return fused;
  }
  __device__ __forceinline__ bool beyond_diagonal(Index number, const OffsetsOf& offset, int k) const {
    const Fusing<Operation>& fusing = arguments_.fusing;
    if (!fusing.causal) return false;
    return number > first_.at[kRow] + offset.at[kRow] + k * (kVector > 1 ? across()[kRow] : 0) + fusing.diagonal;
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
  int before_ = 0, beyond_ = 0;  // columns of the first vector and of the last that there are not
};

template <typename Operation>
__device__ __forceinline__ int cluster_of(const StridedArguments<Operation>& arguments) {
  return kHasClusters ? arguments.cluster : 1;
}

// Combines the states of the threads along each column, which lie in different lanes, warps and blocks.
template <typename Operation, int kColumns>
class TileExchange {
 public:
  using State = typename Operation::State;

  const work::TileThread thread;

  __device__ __forceinline__ TileExchange(const StridedArguments<Operation>& arguments, int words,
                                          unsigned char* shared, ArrivalBarrier& complete)
      : thread(work::tile_thread(threadIdx.x, arguments.run, arguments.along)),
        arguments_(arguments),
        words_(words),
        columns_(words * kColumns),
        whole_(reinterpret_cast<State*>(shared)),
        complete_(complete) {
    if (cluster_of(arguments) > 1) complete_.open();
  }

  // Once for all columns of a tile.
  __device__ __forceinline__ void operator()(State (&state)[kColumns]) const {
    const int along = arguments_.along.size, cluster = cluster_of(arguments_);
    if (along == 1 && cluster == 1) return;
    const Lanes team = this->team();
    if (along == team.lanes && cluster == 1) {
      if (team.lanes > 1) team.combine_each<typename Operation::Result>(state);
      return;
    }
    const auto give = [&](int column, int part, int, const State& all) {
      if (part == 0) whole_[column] = all;
    };
    State* const of_blocks = of_team(teams());
    const int mine = blockIdx.x % cluster;
    of_block(state, [&](int column, int part, int lanes, const State& block) {
      if (cluster == 1) return give(column, part, lanes, block);
      for (int rank = part; rank < cluster; rank += lanes)
        complete_.send(block, of_blocks + column * cluster + mine, rank);
    });
    if (cluster > 1) {
      complete_.wait(columns_ * cluster * sizeof(State));
      gather<State, typename Operation::Result>(
          columns_, cluster, log2_parts(cluster),
          [&](int column, int rank) { return of_blocks[column * cluster + rank]; }, give);
    }
    read(state);
  }

  // Of the states of the block's threads: calls give(column, part, parts, state) from each of those that share a
  // column, whose number is k of word `column - k * words`.
  template <typename Give>
  __device__ __forceinline__ void of_block(State (&state)[kColumns], const Give& give) const {
    const Lanes team = this->team();
    const int parts = teams();  // states of a column
    if (team.lanes > 1) team.combine_each<typename Operation::Result>(state);

    // in the order of the lanes, k by k, so that they store to neighbouring banks
    if (thread.column < words_ && thread.along % team.lanes == 0)
#pragma unroll
      for (int k = 0; k < kColumns; ++k) of_team(thread.along / team.lanes)[k * words_ + thread.column] = state[k];
    __syncthreads();
    if (cluster_of(arguments_) > 1) ArrivalBarrier::await_cluster();
    gather<State, typename Operation::Result>(
        columns_, parts, log2_parts(parts), [&](int column, int team) { return of_team(team)[column]; }, give);
  }
  // Where the state of all of a column's threads goes, and from where each of these gets it.
  __device__ __forceinline__ State* whole() const { return whole_; }
  // There is room for a state of each column for each of them.
  __device__ __forceinline__ int teams() const { return arguments_.along.size / team().lanes; }
  __device__ __forceinline__ State* of_team(int team) const {
    return whole_ + columns_ + team * work::states_of_team(columns_, sizeof(State));
  }
  __device__ __forceinline__ void read(State (&state)[kColumns]) const {
    __syncthreads();
    if (thread.column < words_)
#pragma unroll
      for (int k = 0; k < kColumns; ++k) state[k] = whole_[k * words_ + thread.column];
  }

 private:
  __device__ __forceinline__ Lanes team() const {
    return {work::tile_team(arguments_.run.size, arguments_.along.size), arguments_.run.size};
  }
  __device__ __forceinline__ int log2_parts(int count) const {
    return work::log2_parts(columns_, count, static_cast<int>(blockDim.x));
  }

  const StridedArguments<Operation>& arguments_;
  int words_, columns_;  // of a turn
  State* whole_;
  ArrivalBarrier& complete_;
};

// A thread's units of as many rows, `step` rows apart.
template <int kUnit>
__device__ __forceinline__ void copy_column(unsigned char* to, int pitch, const unsigned char* from,
                                            std::int64_t stride, int first, int rows, int step) {
  to += first * pitch, from += first * stride;
  const int to_step = step * pitch;
  const std::int64_t from_step = step * stride;
  in_fours(first, rows, step, [&](int, auto count) {
#pragma unroll
    for (int i = 0; i < count; ++i, to += to_step, from += from_step) copy_async<kUnit>(to, from);
  });
}

// `rows` rows of `bytes` bytes each, all of which are multiples of kUnit, as are the distances between rows.
template <int kUnit>
__device__ __forceinline__ void copy_rows(unsigned char* to, int pitch, const unsigned char* from, std::int64_t stride,
                                          int rows, int bytes) {
  const int units = bytes / kUnit, lanes = min(units, static_cast<int>(blockDim.x));
  const int first = threadIdx.x / lanes, step = blockDim.x / lanes;
  if (first >= step) return;
#pragma unroll 1
  for (int at = threadIdx.x % lanes * kUnit; at < bytes; at += lanes * kUnit)
    copy_column<kUnit>(to + at, pitch, from + at, stride, first, rows, step);
}

// The same for rows of 16-bit elements that begin anywhere: words, and the halves of words at their ends. Distances
// between rows are even in both memories or odd in both.
[[maybe_unused]] __device__ __forceinline__ void copy_odd_rows(unsigned char* to, int pitch, const unsigned char* from,
                                                               std::int64_t stride, int rows, int bytes) {
  const auto skipped = [](const unsigned char* row) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 4);
  };
  // an even step, so that all rows of a thread begin alike
  const int units = (bytes + 3) / 4, lanes = min(units, static_cast<int>(blockDim.x / 2));
  const int first = threadIdx.x / lanes, step = blockDim.x / lanes & ~1;
  const int skip = skipped(from + first * stride);
#pragma unroll 1
  for (int at = threadIdx.x % lanes * 4 + skip; first < step && at + 4 <= bytes; at += lanes * 4)
    copy_column<4>(to + at, pitch, from + at, stride, first, rows, step);
#pragma unroll 4
  for (int end = threadIdx.x; end < 2 * rows; end += blockDim.x) {
    const unsigned char* const source = from + end / 2 * stride;
    const int skip = skipped(source), at = end % 2 == 0 ? 0 : bytes - 2;
    if (end % 2 == 0 ? skip == 2 : (bytes - skip) % 4 == 2)
      *reinterpret_cast<unsigned short*>(to + end / 2 * pitch + at) =
          *reinterpret_cast<const unsigned short*>(source + at);
  }
}

// The tile of a block, and where in it a thread finds its columns.
template <typename Operation, int kColumns>
class Tile {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using ColumnsOf = Columns<Operation, kColumns, int>;
  static constexpr bool kBackward = kIsBackward<Operation>;
  static constexpr bool kMayGoBack = std::is_same_v<Source, Result>;

  int begin, end;  // of dim

  __device__ __forceinline__ explicit Tile(const StridedArguments<Operation>& arguments)
      : arguments_(arguments), shared_(dynamic_shared_memory()) {
    const StridedTile& shape = arguments.tile;
    const std::int64_t block = arguments.first_block + blockIdx.x, index = quotient(block, arguments.cluster);
    const std::int64_t group = quotient(index, shape.pieces);
    first_strip_ = group * shape.strips;
    first_column_ = (index - group * shape.pieces) * shape.width;
    strips_ = static_cast<int>(min(static_cast<std::int64_t>(shape.strips), shape.all_strips - first_strip_));
    width_ = static_cast<int>(min(static_cast<std::int64_t>(shape.width), shape.strip - first_column_));
    const int dim = static_cast<int>(arguments.dim);
    begin = min(dim, static_cast<int>(block - index * arguments.cluster) * shape.rows);
    end = min(dim, begin + shape.rows);
    const auto first = origin(0);
    result_ = arguments.result + first.at[kResult];
    phase_[kSource] = phase(arguments.source + first.at[kSource]);
    if constexpr (kBackward) phase_[kGrad] = phase(arguments.grad + first.at[kGrad]);
  }

  // Words are numbered across all strips of the tile.
  struct Word {
    int strip, column;  // the first of its columns
  };
  __device__ __forceinline__ Word word(int number) const {
    const int strip = arguments_.words.quotient(number);
    return {strip, (number - strip * arguments_.words.size) * kColumns};
  }
  __device__ __forceinline__ bool has(const Word& word) const { return word.strip < strips_ && word.column < width_; }
  __device__ __forceinline__ ColumnsOf columns(const Word& word, int along) const {
    return {arguments_, ((first_strip_ + word.strip) * arguments_.tile.strip + first_column_ + word.column) / kColumns,
            along};
  }

  // Starts all of the tile's copies.
  __device__ __forceinline__ void load(const work::TileThread& thread, int words_a_turn) const {
    const StridedTile& shape = arguments_.tile;
    const auto first = origin(0);
    if (shape.copy == Copy::rows) {
      load_rows<kSource>(arguments_.source + first.at[kSource]);
      if constexpr (kBackward) load_rows<kGrad>(arguments_.grad + first.at[kGrad]);
    } else if (shape.copy == Copy::elements) {
      load_elements(thread, words_a_turn);
    } else {
      const int run = (end - begin) * shape.pitch;
      if (shape.packed || strips_ == 1) {
        load_run(0, first, strips_ * run, threadIdx.x, blockDim.x);
      } else {
        for (int i = threadIdx.x / kWarp; i < strips_; i += blockDim.x / kWarp)
          load_run(i, origin(i), run, threadIdx.x % kWarp, kWarp);
      }
    }
  }

  // Takes the results out of the tile, into which they went back.
  __device__ __forceinline__ void store() const {
    if constexpr (kMayGoBack) {
      __syncthreads();
      copy_run<false>(result_, strip<kSource>(0), strips_ * (end - begin) * arguments_.tile.pitch, threadIdx.x,
                      blockDim.x);
    }
  }

  // The first element of a word's columns, in shared memory.
  template <int kOperand>
  __device__ __forceinline__ Source* at(const Word& word) const {
    return strip<kOperand>(word.strip) + word.column;
  }

  // Where the result of an element of dim goes, counted from the block's first.
  __device__ __forceinline__ Result* result(const Word& word, int element) const {
    const KernelAxis<kOperandsOf<Operation>>& inner = arguments_.inner_axis;
    Result* const first = word.strip == 0 ? result_ : arguments_.result + origin(word.strip).at[kResult];
    return first + word.column * inner.groups[max(inner.rank, 1) - 1].stride[kResult] + element * result_step();
  }
  __device__ __forceinline__ std::int64_t result_step() const { return arguments_.dim_axis.groups[0].stride[kResult]; }

 private:
  using Copy = StridedTile::Copy;

  // From the start of each operand to the first element of a strip that the block has.
  __device__ __forceinline__ Offsets<kOperandsOf<Operation>> origin(int strip) const {
    const std::int64_t column = (first_strip_ + strip) * arguments_.tile.strip + first_column_;
    const std::int64_t all = arguments_.inner * kColumns, outer = quotient(column, all);
    auto offsets = offsets_called(arguments_.outer_axis, outer);
    offsets += offsets_called(arguments_.inner_axis, column - outer * all);
    if (kColumns > 1 || arguments_.dim_axis.rank <= 1) offsets += offsets_in_group(arguments_.dim_axis, begin);
    return offsets;
  }

  // A strip in shared memory, where it is as far from a multiple of what is copied at once as it is in memory.
  template <int kOperand>
  __device__ __forceinline__ Source* strip(int number) const {
    const StridedTile& shape = arguments_.tile;
    unsigned char* const at = shared_ + (kOperand == kSource ? 0 : shape.operand_bytes) + number * shape.slab;
    return reinterpret_cast<Source*>(at + phase_[kOperand]);
  }

  __device__ __forceinline__ int phase(const Source* first) const {
    if (!arguments_.tile.phased) return 0;
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(first) % arguments_.tile.unit);
  }

  template <int kOperand>
  __device__ __forceinline__ void load_rows(const Source* first) const {
    constexpr int kBytes = sizeof(Source);
    const StridedTile& shape = arguments_.tile;
    auto* const to = reinterpret_cast<unsigned char*>(strip<kOperand>(0));
    const auto* const from = reinterpret_cast<const unsigned char*>(first);
    const std::int64_t stride = arguments_.dim_axis.groups[0].stride[kOperand] * kBytes;
    const int pitch = shape.pitch * kBytes, rows = end - begin, bytes = width_ * kBytes;
    if (shape.unit == 16)
      copy_rows<16>(to, pitch, from, stride, rows, bytes);
    else if (shape.unit == 8)
      copy_rows<8>(to, pitch, from, stride, rows, bytes);
    else if (!shape.phased)
      copy_rows<4>(to, pitch, from, stride, rows, bytes);
    else if constexpr (kBytes == 2)
      copy_odd_rows(to, pitch, from, stride, rows, bytes);
  }

  __device__ __forceinline__ void load_run(int number, const Offsets<kOperandsOf<Operation>>& from, int count,
                                           int thread, int threads) const {
    copy_run<true>(strip<kSource>(number), arguments_.source + from.at[kSource], count, thread, threads);
    if constexpr (kBackward)
      copy_run<true>(strip<kGrad>(number), arguments_.grad + from.at[kGrad], count, thread, threads);
  }

  // The words that the thread will work on, one by one.
  __device__ __forceinline__ void load_elements(const work::TileThread& thread, int words_a_turn) const {
    const int first = (thread.along - begin) * arguments_.tile.pitch;
    for (int turn = 0; turn < arguments_.tile.turns; ++turn) {
      const Word mine = word(turn * words_a_turn + thread.column);
      if (!has(mine)) continue;
      const ColumnsOf columns = this->columns(mine, thread.along);
      load_words<kSource>(columns, at<kSource>(mine) + first);
      if constexpr (kBackward) load_words<kGrad>(columns, at<kGrad>(mine) + first);
    }
  }

  template <int kOperand>
  __device__ __forceinline__ void load_words(const ColumnsOf& columns, Source* to) const {
    constexpr int kBytes = sizeof(Source) * kColumns;
    constexpr int kItems = tuning::tile_items(sizeof(Source));
    const int along = arguments_.along.size, pitch = arguments_.tile.pitch;
#pragma unroll 1
    for (int base = begin; base < end; base += kItems * along) {
      Source values[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!columns.has(base, i, end)) continue;
        const Source* const from = columns.template where<kOperand>(base, i);
        if constexpr (kBytes < 4)  // too few for an asynchronous copy
          values[i] = *from;
        else
          copy_async<kBytes>(to + (base + i * along) * pitch, from);
      }
      if constexpr (kBytes < 4)
#pragma unroll
        for (int i = 0; i < kItems; ++i)
          if (columns.has(base, i, end)) to[(base + i * along) * pitch] = values[i];
    }
  }

  const StridedArguments<Operation>& arguments_;
  unsigned char* shared_;
  Result* result_;  // of the first element
  std::int64_t first_strip_, first_column_;
  int strips_, width_;
  int phase_[kWhole];  // bytes from a multiple of what is copied at once
};

// A thread's words of a tile, `step` elements apart: `count` of them, which all threads have, and perhaps one more. So
// no element costs a comparison, and all threads of a warp go the same way. What is fused has been applied to them.
template <typename Operation, int kColumns>
class Words {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Real = typename Operation::Real;
  using State = typename Operation::State;
  using Term = typename Operation::Term;
  using Word = Vec<Source, kColumns>;
  static constexpr bool kBackward = kIsBackward<Operation>;
  // Exponentials take the place of what they were computed from, unless they would be rounded.
  static constexpr bool kKept = !kBackward && std::is_same_v<Source, Real>;

  __device__ __forceinline__ Words(const Operation& operation, Source* source, const Source* grad, int step, int count,
                                   bool one_more)
      : operation_(operation),
        source_(source),
        to_grad_(kBackward ? static_cast<int>(grad - source) : 0),
        step_(step),
        count_(count),
        one_more_(one_more) {}

  __device__ __forceinline__ void reduce(State (&state)[kColumns]) const {
    if constexpr (!kBackward)
      walk([&]<int kCount>(Source* const(&at)[kCount]) {
        Word word[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) word[i] = Word::load(at[i]);
#pragma unroll
        for (int i = 1; i < kCount; ++i) word[0] = word[0].larger(word[i]);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          const Term term = Operation::term(word[0].widened(k), 0);
          operation_.template raise<1>(state[k], &term);
        }
      });
    walk([&]<int kCount>(Source* const(&at)[kCount]) {
      Term terms[kColumns][kCount];
      load(at, terms);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) operation_.template add<kCount>(state[k], terms[k]);
      if constexpr (kKept) {
        if (operation_.log) return;
#pragma unroll
        for (int i = 0; i < kCount; ++i) Word::narrowed([&](int k) { return terms[k][i]; }).store(at[i]);
      }
    });
  }

  // Passes the words of results to put(), one by one, with where in the tile they were.
  template <typename Finish, typename Put>
  __device__ __forceinline__ void finish(const Finish (&finish)[kColumns], const Put& put) const {
    walk([&]<int kCount>(Source* const(&at)[kCount]) {
      Term terms[kColumns][kCount];
      load(at, terms);
      operation_.with_log([&](auto log) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          put(Vec<Result, kColumns>::narrowed(
                  [&](int k) { return kKept ? finish[k](terms[k][i], log) : finish[k].again(terms[k][i], log); }),
              at[i]);
      });
    });
  }

 private:
  // Calls visit() with the addresses of some words after others.
  template <typename Visit>
  __device__ __forceinline__ void walk(const Visit& visit) const {
    constexpr int kItems = tuning::tile_items(sizeof(Source));
    Source* from = source_;
    const auto some = [&](auto count) {
      Source* at[count];
#pragma unroll
      for (int i = 0; i < count; ++i, from += step_) at[i] = from;
      visit(at);
    };
#pragma unroll 1
    for (int left = count_; left >= kItems; left -= kItems) some(std::integral_constant<int, kItems>{});
    if constexpr (kItems > 4)
      if (count_ & 4) some(std::integral_constant<int, 4>{});
    if (count_ & 2) some(std::integral_constant<int, 2>{});
#pragma unroll 1
    for (int left = (count_ & 1) + one_more_; left > 0; --left) some(std::integral_constant<int, 1>{});
  }

  template <int kCount>
  __device__ __forceinline__ void load(Source* const (&at)[kCount], Term (&terms)[kColumns][kCount]) const {
    Word source[kCount], grad[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      source[i] = Word::load(at[i]);
      if constexpr (kBackward) grad[i] = Word::load(at[i] + to_grad_);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        terms[k][i] = Operation::term(source[i].widened(k), kBackward ? grad[i].widened(k) : 0);
  }

  Operation operation_;
  Source* source_;
  int to_grad_;  // from a word of the source
  int step_, count_;
  bool one_more_;
};

// Applies what is fused to a thread's words, in shared memory.
template <typename Operation, int kColumns, typename ColumnsOf, typename TileOf>
__device__ __forceinline__ void apply_fused(const StridedArguments<Operation>& arguments, const TileOf& tile,
                                            const ColumnsOf& columns, typename Operation::Source* source,
                                            typename Operation::Source* grad, int step) {
  using Word = Vec<typename Operation::Source, kColumns>;
  constexpr int kItems = tuning::kTileFusedItems;
#pragma unroll 1
  for (int base = tile.begin; columns.has(base, 0, tile.end); base += kItems * arguments.along.size) {
    typename ColumnsOf::Raw raw[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (columns.has(base, i, tile.end)) columns.load(base, i, raw[i].extras);
#pragma unroll
    for (int i = 0; i < kItems; ++i, source += step, grad += step) {
      if (!columns.has(base, i, tile.end)) continue;
      raw[i].source = Word::load(source);
      if constexpr (TileOf::kBackward) raw[i].grad = Word::load(grad);
      columns.apply(base, i, raw[i]);
      raw[i].source.store(source);
      if constexpr (TileOf::kBackward) raw[i].grad.store(grad);
    }
  }
}

// The same for `count` words, where columns.fuses_by_steps(): no element costs a comparison, and few an address.
template <typename Operation, int kColumns, typename ColumnsOf, typename TileOf>
__device__ __forceinline__ void apply_fused_by_steps(const Fusing<Operation>& fusing, const TileOf& tile,
                                                     const ColumnsOf& columns, typename Operation::Source* source,
                                                     typename Operation::Source* grad, int step, int count) {
  using Source = typename Operation::Source;
  using Real = typename Operation::Real;
  using Word = Vec<Source, kColumns>;
  constexpr bool kScales = !TileOf::kBackward && sizeof(Source) > 2;  // else leave_scale(), and there is no bias
  if (!kScales && fusing.mask == nullptr) return;
  const auto nothing = fusing.operation.nothing();
  const std::uint8_t* mask = fusing.mask + columns.template beside<kMask>(tile.begin);
  const Real* bias = reinterpret_cast<const Real*>(fusing.bias) + columns.template beside<kBias>(tile.begin);
  const std::int64_t mask_step = columns.template step<kMask>(), bias_step = columns.template step<kBias>();
  in_fours(0, count, 1, [&](int, auto some) {
    bool excluded[some][kColumns]{};
    if (fusing.mask != nullptr) {
#pragma unroll
      for (int i = 0; i < some; ++i, mask += mask_step)
#pragma unroll
        for (int k = 0; k < kColumns; ++k) excluded[i][k] = fusing.excludes(mask[k * fusing.mask_step]);
    }
    Real biases[some][kColumns]{};
    if (kScales && fusing.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < some; ++i, bias += bias_step)
#pragma unroll
        for (int k = 0; k < kColumns; ++k) biases[i][k] = bias[k * fusing.bias_step];
    }
#pragma unroll
    for (int i = 0; i < some; ++i, source += step, grad += step) {
      Word word = Word::load(source);
      [[maybe_unused]] Word of_grad;
      if constexpr (TileOf::kBackward) of_grad = Word::load(grad);
      if constexpr (kScales)
        word = Word::narrowed([&](int k) { return word.widened(k) * fusing.scale + biases[i][k]; });
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        if (!excluded[i][k]) continue;
        if constexpr (TileOf::kBackward) {
          word.set(k, nothing.output);
          of_grad.set(k, nothing.grad);
        } else {
          word.set(k, nothing);
        }
      }
      word.store(source);
      if constexpr (TileOf::kBackward) of_grad.store(grad);
    }
  });
}

// One turn of a tile's threads.
template <typename Operation, int kColumns, typename TileOf, typename Exchange>
__device__ __forceinline__ void take_turn(const StridedArguments<Operation>& arguments, const TileOf& tile,
                                          const typename TileOf::Word& word, const Exchange& exchange) {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using WordsOf = Words<Operation, kColumns>;
  const bool exists = tile.has(word);
  const int along = exchange.thread.along, threads = arguments.along.size, rows = tile.end - tile.begin;
  const int pitch = arguments.tile.pitch, count = threads == 1 ? rows : rows / threads;
  const bool one_more = along < rows - count * threads;
  Source* const source = tile.template at<kSource>(word) + along * pitch;
  Source* const grad = WordsOf::kBackward ? tile.template at<kGrad>(word) + along * pitch : nullptr;
  const Operation operation = arguments.fusing.operation;
  const WordsOf words(operation, source, grad, threads * pitch, count, one_more);

  typename Operation::State state[kColumns], held[kColumns];
  if (exists) {
    if constexpr (Operation::kFused) {
      const auto columns = tile.columns(word, along);
      if (columns.fuses_by_steps())
        apply_fused_by_steps<Operation, kColumns>(arguments.fusing, tile, columns, source, grad, threads * pitch,
                                                  count + one_more);
      else
        apply_fused<Operation, kColumns>(arguments, tile, columns, source, grad, threads * pitch);
    }
    words.reduce(state);
  }
#pragma unroll
  for (int k = 0; k < kColumns; ++k) held[k] = state[k];
  exchange(state);
  typename Operation::Finish finish[kColumns];
#pragma unroll
  for (int k = 0; k < kColumns; ++k)
    finish[k] = settled<Operation>(WordsOf::kKept ? operation.finish(held[k], state[k]) : operation.finish(state[k]),
                                   arguments.fusing);

  if (!exists) return;
  if constexpr (TileOf::kMayGoBack) {
    const bool several_groups = kColumns == 1 && arguments.dim_axis.rank > 1;
    if (arguments.tile.back || several_groups) {
      words.finish(finish, [](const auto& result, Result* at) { result.store(at); });
      if constexpr (Operation::kFused)
        tile.columns(word, along).clean(finish, tile.begin, tile.end, [&](int item, int k, Source result) {
          source[item * threads * pitch + k] = result;
        });
      if (several_groups) {  // of dim: there is no step from one result to the next
        const auto columns = tile.columns(word, along);
#pragma unroll 4
        for (int item = 0; columns.has(tile.begin, item, tile.end); ++item)
          *columns.result(tile.begin, item) = source[item * threads * pitch];
      }
      return;
    }
  }
  Result* to = tile.result(word, along);
  const std::int64_t step = threads * tile.result_step();
  words.finish(finish, [&](const auto& result, const void*) {
    result.store(to);
    to += step;
  });
  if constexpr (Operation::kFused) {
    const auto columns = tile.columns(word, along);
    columns.clean(finish, tile.begin, tile.end,
                  [&](int item, int k, Result result) { columns.result(tile.begin, item)[k] = result; });
  }
}

template <typename Operation, int kColumns>
__global__ void __launch_bounds__(tuning::kTileMaxBlock,
                                  tuning::tile_min_blocks(sizeof(typename Operation::Source), Operation::kFused))
    tile(const __grid_constant__ StridedArguments<Operation> arguments) {
  if constexpr (kHasAllKernels) {
    using TileOf = Tile<Operation, kColumns>;
    await_kernel_before();
    let_next_kernel_begin();
    const TileOf tile(arguments);
    const int words =
        arguments.along.size == 1 ? static_cast<int>(blockDim.x) : arguments.tile.strips * arguments.tile.words;
    __shared__ ArrivalBarrier complete;
    const TileExchange<Operation, kColumns> exchange(
        arguments, words, dynamic_shared_memory() + arguments.tile.operand_bytes * (TileOf::kBackward ? 2 : 1),
        complete);
    tile.load(exchange.thread, words);
    await_copies();
    __syncthreads();

#pragma unroll 1
    for (int turn = 0; turn < arguments.tile.turns; ++turn) {
      const auto word = tile.word(turn * words + exchange.thread.column);
      take_turn<Operation, kColumns>(arguments, tile, word, exchange);
    }
    if (TileOf::kMayGoBack && arguments.tile.back) tile.store();
  } else {
    never_launched();
  }
}

// The states of a tile's columns, as its splits tell them each other through the workspace. Columns are numbered as an
// exchange does it.
template <bool kFolds, typename Operation, int kVector>
class Splits {
 public:
  using State = typename Operation::State;

  __device__ __forceinline__ Splits(const StridedArguments<Operation>& arguments, std::int64_t tile, std::int64_t split)
      : arguments_(arguments),
        first_(tile * arguments.own),
        split_(split),
        slab_(kFolds && arguments.own == arguments.inner) {}

  // Tells the states of the block's threads; keeps them where each tile is a block's own. Of a folded slab that is one
  // tile, copies of a column have one state, which is told as that of the first copy.
  template <typename Exchange>
  __device__ __forceinline__ void tell(const Exchange& exchange, State (&state)[kVector]) const {
    const auto tell_of = [&](int number, const State& of_block) {
      const Column column = column_of(number);
      if (column.exists) arguments_.states[split_ * apart() + column.place] = of_block;
    };
    exchange.of_block(state, [&](int number, int part, int, const State& of_block) {
      if (part > 0) return;
      if (slab_ || arguments_.phase == Phase::both)
        exchange.whole()[number] = of_block;
      else
        tell_of(number, of_block);
    });
    if (!slab_) return;
    __syncthreads();
    const int columns = told_apart();
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += static_cast<int>(blockDim.x)) {
      State all;
      combine_all<typename Operation::Result>(all, 1 << arguments_.folded.log2_copies, [&](int copy) {
        return exchange.whole()[number_of(i + copy * columns)];
      });
      if (arguments_.phase == Phase::both)
        each_copy(i, [&](int number) { exchange.whole()[number] = all; });
      else
        tell_of(number_of(i), all);
    }
  }

  // Calls give(number, state) with the combination of all. A warp takes a column, where there are warps enough. Else
  // neighbouring lanes take neighbours in memory: all blocks want the same lines, and L2 serves one request of a line
  // after the other (1 x 500000 x 64 of 16 bits takes an H200 52.3 us, by lanes that share a column 55.4).
  template <typename Exchange, typename Give>
  __device__ __forceinline__ void combine(const Exchange& exchange, const Give& give) const {
    constexpr int kSome = tuning::kSplitsTogether;
    const int log2_copies = kFolds && !slab_ ? arguments_.folded.log2_copies : 0;  // told apart
    const int count = static_cast<int>(arguments_.splits) << log2_copies, columns = told_apart();
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    const bool by_warps = columns * kWarp <= threads;
    const auto of_all_columns = [&](int n) { return slab_ ? n / columns : arguments_.run.quotient(n / kVector); };
    const int parts = by_warps ? kWarp : max(min(exchange.teams(), of_all_columns(threads)), 1);
    const int part = by_warps ? thread % kWarp : of_all_columns(thread);
    const auto give_copies = [&](int i, const State& state) { each_copy(i, [&](int number) { give(number, state); }); };
#pragma unroll 1
    for (int i = by_warps ? thread / kWarp : thread - part * columns; part < parts && i < columns; i += threads) {
      const Column column = column_of(number_of(i));
      const State* states = arguments_.states + column.place;
      std::int64_t strip = 0;
      if constexpr (kFolds) {  // a column's copies, one strip apart, do it in the same order
        strip = arguments_.folded.strip;
        const std::int64_t slab = arguments_.inner * kVector, at = column.place - quotient(column.place, slab) * slab;
        states -= quotient(at, strip) * strip;
      }
      State state;
#pragma unroll 1
      for (int first = column.exists ? part : count; first < count; first += kSome * parts) {
        State some[kSome];
#pragma unroll
        for (int j = 0; j < kSome; ++j) {
          const int each = first + j * parts, split = each >> log2_copies;
          if (each < count) some[j] = states[split * apart() + (each - (split << log2_copies)) * strip];
        }
        combine_some<typename Operation::Result>(state, some);
      }
      if (by_warps) state = Lanes{}.combine_for<typename Operation::Result>(state);
      if (parts > 1 && !by_warps)
        exchange.of_team(part)[i] = state;
      else if (part == 0)
        give_copies(i, state);
    }
    if (parts == 1 || by_warps) return;
    __syncthreads();
    gather<State, typename Operation::Result>(
        columns, parts, work::log2_parts(columns, parts, threads),
        [&](int i, int other) { return exchange.of_team(other)[i]; },
        [&](int i, int lane, int, const State& state) {
          if (lane == 0) give_copies(i, state);
        });
  }

 private:
  struct Column {
    bool exists;
    std::int64_t place;  // among the states of a split
  };
  __device__ __forceinline__ Column column_of(int number) const {
    const int k = arguments_.run.quotient(number), at = number - k * arguments_.run.size;
    const std::int64_t vector = first_ + at;
    return {at < arguments_.own && vector < arguments_.columns, vector * kVector + k};
  }
  __device__ __forceinline__ std::int64_t apart() const { return arguments_.columns * kVector; }
  // The columns of the tile that have a state each, and the number of the i-th of them in memory.
  __device__ __forceinline__ int told_apart() const {
    return slab_ ? static_cast<int>(arguments_.folded.strip) : arguments_.run.size * kVector;
  }
  __device__ __forceinline__ int number_of(int i) const { return i % kVector * arguments_.run.size + i / kVector; }
  // Calls visit(number) for the copies of that column which have its state.
  template <typename Visit>
  __device__ __forceinline__ void each_copy(int i, const Visit& visit) const {
    const int copies = slab_ ? 1 << arguments_.folded.log2_copies : 1;
    for (int copy = 0; copy < copies; ++copy) visit(number_of(i + copy * told_apart()));
  }

  const StridedArguments<Operation>& arguments_;
  std::int64_t first_, split_;
  bool slab_;
};

// The number of this block of columns that are read twice: a launch that only writes begins with the last ones, which
// L2 still has.
template <typename Operation>
__device__ __forceinline__ std::int64_t block_of(const StridedArguments<Operation>& arguments) {
  const std::int64_t block = arguments.first_block + blockIdx.x;
  return arguments.phase == Phase::write ? arguments.blocks - 1 - block : block;
}

// From the states of a block's threads, or in Phase::write from what the splits have told, to those of all of dim. Says
// whether that is known: it is not where a launch ends with the statistics.
template <bool kFolds, typename Operation, int kVector>
__device__ __forceinline__ bool exchange_states(const StridedArguments<Operation>& arguments,
                                                const TileExchange<Operation, kVector>& exchange, std::int64_t tile,
                                                std::int64_t split, typename Operation::State (&state)[kVector]) {
  const Splits<kFolds, Operation, kVector> splits(arguments, tile, split);
  if (arguments.phase != Phase::write) splits.tell(exchange, state);
  if (arguments.phase == Phase::statistics) return false;
  if (arguments.phase == Phase::meet) cooperative_groups::this_grid().sync();
  if (arguments.phase != Phase::both)
    splits.combine(exchange, [&](int number, const auto& of_all) { exchange.whole()[number] = of_all; });
  exchange.read(state);
  return true;
}

// Vectors, of which nothing is fused: steps of which a thread has all elements, which lie a fixed distance apart, take
// no comparison and few addresses.
template <typename Operation, int kVector, bool kFolds>
__device__ __forceinline__ void pass_twice_over_vectors(const StridedArguments<Operation>& arguments) {
  using ColumnsOf = Columns<Operation, kVector, std::int64_t, kFolds>;
  using State = typename Operation::State;
  constexpr int kUnroll = tuning::strided_online_items(kVector, sizeof(typename Operation::Source),
                                                       Operation::kDirection, Operation::kFused, kFolds);
  using PassesOf = Passes<Operation, typename ColumnsOf::Raw, kUnroll>;
  using Raws = typename PassesOf::Raws;

  const Operation operation = arguments.fusing.operation;
  // the launch before that of Phase::write is that of the statistics, which began after all that the source waits for
  if (arguments.phase != Phase::write) {
    await_kernel_before();
    let_next_kernel_begin();
  }
  const bool meets = arguments.phase == Phase::meet;
  const int width = arguments.along.quotient(blockDim.x);
  __shared__ ArrivalBarrier complete;
  const TileExchange<Operation, kVector> exchange(
      arguments, width,
      dynamic_shared_memory() +
          (meets ? arguments.kept_steps * PassesOf::kSlots * blockDim.x * sizeof(typename PassesOf::Vector) : 0),
      complete);
  const std::int64_t block = block_of(arguments), splits = arguments.splits;
  const std::int64_t tile = quotient(block, splits), split = block - tile * splits;
  const int at = exchange.thread.column;
  const std::int64_t column = at < arguments.own ? tile * arguments.own + at : arguments.columns;
  const ColumnsOf columns(arguments, column, exchange.thread.along);
  const std::int64_t step = static_cast<std::int64_t>(arguments.along.size) * kUnroll;
  const auto [first, apart] = work::turns_of(split, splits, step);
  const auto base_of = [&, first = first, apart = apart](int i) { return first + i * apart; };

  // The thread's steps; the whole ones, without edges, are `count` from `begin` on. The others, one before and one
  // after at most, are done apart.
  const auto steps_until = [&, first = first, apart = apart](std::int64_t end) {
    return first < end ? static_cast<int>(quotient(end - 1 - first, apart)) + 1 : 0;
  };
  const int steps = steps_until(columns.dim());
  const int begin = columns.has_all(first, 1) ? 0 : 1;
  const int count = max(steps_until(columns.whole_end() - step + 1) - begin, 0);
  const auto for_others = [&](const auto& visit) {
#pragma unroll 1
    for (int i = begin == 0 ? count : 0; i < steps; i = i < begin ? begin + count : i + 1) visit(base_of(i));
  };
  const auto load_other = [&](std::int64_t base, Raws& raw) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool has = columns.has(base, i, arguments.dim);
      raw[i] = has ? columns.load(base, i) : columns.nothing();
      if (has) columns.load_edge(base, i, raw[i]);
    }
  };
  const auto load = [&](int i, Raws& raw, auto... eviction) { columns.load_all(base_of(begin + i), raw, eviction...); };

  PassesOf passes(count, meets, arguments.kept_steps);
  State state[kVector];
  const auto accumulate = [&](const Raws& raw) { operation.accumulate_columns(state, raw); };
  if (arguments.phase != Phase::write) {
    passes.read(
        load,
        [&](Raws& raw) {
          for_others([&](std::int64_t base) {
            load_other(base, raw);
            accumulate(raw);
          });
        },
        accumulate);
  } else {
    passes.load_last(load);
    await_kernel_before();
    let_next_kernel_begin();
  }
  if (!exchange_states<kFolds>(arguments, exchange, tile, split, state)) return;

  typename Operation::Finish finish[kVector];
  parted(operation.log, [&](auto log) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) finish[k] = operation.finish_told(log, state[k]);
  });
  operation.with_log([&](auto log) {
    const auto value = [&](const Raws& raw, int i, int k) { return finish[k].again(ColumnsOf::term(raw[i], k), log); };
    passes.write(
        load,
        [&](Raws& raw) {
          for_others([&](std::int64_t base) {
            load_other(base, raw);
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
              if (columns.has(base, i, arguments.dim)) columns.store(base, i, [&](int k) { return value(raw, i, k); });
          });
        },
        [&](int i, const Raws& raw) {
          columns.template store_all<kUnroll>(base_of(begin + i), [&](int item, int k) { return value(raw, item, k); });
        });
  });
}

// All else.
template <typename Operation, int kVector>
__device__ __forceinline__ void pass_twice(const StridedArguments<Operation>& arguments) {
  using ColumnsOf = Columns<Operation, kVector, std::int64_t>;
  using Term = typename Operation::Term;
  constexpr int kUnroll = tuning::strided_online_items(kVector, sizeof(typename Operation::Source),
                                                       Operation::kDirection, Operation::kFused, false);

  const Operation operation = arguments.fusing.operation;
  // as above
  if (arguments.phase != Phase::write) {
    await_kernel_before();
    let_next_kernel_begin();
  }
  const int width = arguments.along.quotient(blockDim.x);
  __shared__ ArrivalBarrier complete;
  const TileExchange<Operation, kVector> exchange(arguments, width, dynamic_shared_memory(), complete);
  const std::int64_t block = block_of(arguments), splits = arguments.splits;
  const std::int64_t tile = quotient(block, splits), split = block - tile * splits;
  const std::int64_t column = tile * width + exchange.thread.column;
  const ColumnsOf columns(arguments, column, exchange.thread.along);
  const std::int64_t step = static_cast<std::int64_t>(arguments.along.size) * kUnroll;
  const auto [first, apart] = work::turns_of(split, splits, step);
  using Raws = typename ColumnsOf::Raw[kUnroll];
  const auto has = [&](std::int64_t base, int i) { return base >= 0 && columns.has(base, i, arguments.dim); };
  // Whether the thread has all of its elements from `base` on, `step` altogether. Single columns are bound by
  // instructions: only they ask.
  const auto has_all = [&](std::int64_t base) {
    return kVector == 1 && columns.have_steps() && columns.has_all(base, step);
  };
  // Those elements; what is not there counts for nothing.
  const auto load = [&](std::int64_t base, Raws& raw) {
    if (has_all(base)) return columns.load_all(base, raw);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) raw[i] = has(base, i) ? columns.load(base, i) : columns.nothing();
  };
  Raws raw, next;  // which is under way meanwhile
  const auto advance = [&] {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) raw[i] = next[i];
  };

  typename Operation::State state[kVector];
  if (arguments.phase != Phase::write) {
    load(first, raw);
    for (std::int64_t base = first; base < arguments.dim; base += apart, advance()) {
      load(base + apart, next);
      if constexpr (Operation::kFused) {
        Term terms[kUnroll * kVector];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) columns.terms(raw[i], base, i, has(base, i), terms + i * kVector);
#pragma unroll
        for (int k = 0; k < kVector; ++k) operation.template accumulate<kUnroll, 1, kVector>(state[k], terms + k);
      } else {
        operation.accumulate_columns(state, raw);
      }
    }
  }

  // Backwards, as L2 still has the end.
  const std::int64_t last = first + quotient(max(arguments.dim - 1 - first, std::int64_t{0}), apart) * apart;
  if (arguments.phase != Phase::statistics) load(last, raw);
  if (arguments.phase == Phase::write) {
    await_kernel_before();
    let_next_kernel_begin();
  }
  if (!exchange_states<false>(arguments, exchange, tile, split, state)) return;
  typename Operation::Finish finish[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) finish[k] = settled<Operation>(operation.finish(state[k]), arguments.fusing);
  for (std::int64_t base = last; base >= 0; base -= apart, advance()) {
    load(base - apart, next);
    operation.with_log([&](auto log) {
      if (has_all(base))
        return columns.template store_all<kUnroll>(
            base, [&](int i, int k) { return finish[k].again(ColumnsOf::term(raw[i], k), log); });
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (!has(base, i)) continue;
        Term terms[kVector];
        columns.terms(raw[i], base, i, true, terms);
        columns.store(base, i, [&](int k) { return finish[k].again(terms[k], log); });
      }
    });
  }
  if constexpr (Operation::kFused) {
    bool tainted = false;
#pragma unroll
    for (int k = 0; k < kVector; ++k) tainted = tainted || finish[k].taints();
    for (std::int64_t base = first; tainted && columns.exist() && base < arguments.dim; base += apart)
      columns.clean(finish, base, base + step,
                    [&](int item, int k, auto result) { columns.result(base, item)[k] = result; });
  }
}

template <typename Operation, int kVector, bool kFolds>
__global__ void __launch_bounds__(tuning::strided_online_threads(kVector, Operation::kFused))
    online_tile(const __grid_constant__ StridedArguments<Operation> arguments) {
  if constexpr (!kHasAllKernels && kVector > 1)
    never_launched();
  else if constexpr (tuning::strided_online_has_vectors(kVector, Operation::kFused))
    pass_twice_over_vectors<Operation, kVector, kFolds>(arguments);
  else
    pass_twice<Operation, kVector>(arguments);
}

template <typename Operation, int kVector>
StridedArguments<Operation> strided_arguments(const Problem& problem, const Plan& plan, const Pointers& pointers) {
  using Source = typename Operation::Source;
  StridedArguments<Operation> arguments{};
  arguments.source = static_cast<const Source*>(pointers.source);
  arguments.grad = static_cast<const Source*>(pointers.grad);
  arguments.result = static_cast<typename Operation::Result*>(pointers.result);
  arguments.states = static_cast<typename Operation::State*>(pointers.workspace);
  const Fold fold = fold_of(problem, plan);
  arguments.columns = problem.outer.size * fold.columns / kVector;
  arguments.dim = fold.dim;
  arguments.inner = fold.columns / kVector;
  arguments.folded = {problem.dim.size * problem.inner.size, problem.inner.size,
                      static_cast<int>(std::bit_width(static_cast<unsigned>(fold.elements))) - 1, fold.unit};
  arguments.splits = plan.splits;
  arguments.blocks = plan.grid;
  arguments.run = work::Divider(plan.run);
  arguments.own = plan.rows_per_block / kVector;
  arguments.along = work::Divider(plan.threads_per_row / plan.cluster);
  arguments.cluster = plan.cluster;
  arguments.outer_axis = decltype(arguments.outer_axis)(problem.outer);
  arguments.dim_axis = decltype(arguments.dim_axis)(problem.dim);
  arguments.inner_axis = decltype(arguments.inner_axis)(problem.inner);
  if (fold.folds) {
    for (const int operand : {kSource, kGrad, kResult}) arguments.dim_axis.groups[0].stride[operand] *= fold.elements;
    arguments.dim_axis.groups[0].size = fold.dim;
    arguments.inner_axis.groups[0].size = fold.columns;
  }
  constexpr Group kAlone{.size = 1, .stride = {1, 1, 1, 1, 1, 1}};
  arguments.fusing = fusing_of<Operation>(problem, pointers,
                                          kVector > 1 ? problem.inner.groups[problem.inner.rank - 1] : kAlone, false);
  return arguments;
}

template <typename Operation, int kColumns>
void launch_tile(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  auto arguments = strided_arguments<Operation, kColumns>(problem, plan, pointers);
  leave_scale(arguments.fusing);
  arguments.tile = strided_tile(problem, plan);
  arguments.words = work::Divider(arguments.tile.words);
  launch_grid<tile<Operation, kColumns>>(arguments, plan, pointers, stream);
}

template <typename Operation, int kVector, bool kFolds>
void launch_online(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  auto arguments = strided_arguments<Operation, kVector>(problem, plan, pointers);
  constexpr auto kKernel = online_tile<Operation, kVector, kFolds>;
  const auto run = [&](Phase phase, const Plan& launched) {
    arguments.phase = phase;
    launch_grid<kKernel>(arguments, launched, pointers, stream);
  };
  if (plan.workspace_bytes == 0) return run(Phase::both, plan);
  if (plan.meets) {
    arguments.phase = Phase::meet;
    arguments.kept_steps = kept_steps(problem, plan);
    if (try_launch_grid<kKernel>(arguments, plan, pointers, stream)) return;
  }
  const Plan two_launches = without_meeting(problem, plan);
  run(Phase::statistics, two_launches);
  run(Phase::write, two_launches);
}

}  // namespace

void launch_strided(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation(problem, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    constexpr int kVector = tuning::strided_vector(sizeof(Source), Operation::kFused);
    constexpr int kColumns = tuning::tile_columns(sizeof(Source), sizeof(typename Operation::Result));
    const auto with = [&](auto launch) { launch(problem, plan, pointers, stream); };
    if (plan.passes == 1) {
      return with(kColumns > 1 && plan.vector == kColumns ? launch_tile<Operation, kColumns>
                                                          : launch_tile<Operation, 1>);
    }
    if constexpr (tuning::online_may_fold(sizeof(Source), Operation::kFused))
      if (fold_of(problem, plan).folds) return with(launch_online<Operation, kVector, true>);
    with(plan.vector == kVector ? launch_online<Operation, kVector, false> : launch_online<Operation, 1, false>);
  });
}

}  // namespace ndsoftmax::cuda
