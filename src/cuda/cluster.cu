// Cluster regime (sm_90 and later): contiguous rows that a cluster of blocks holds. In registers: several small blocks
// of different clusters share a multiprocessor, so that some load while others exponentiate and store, which one large
// block would do in turns. Thread t of block b is thread b * block + t of the row; otherwise this is the block regime.
// Wide rows of forward partly in shared memory: see MoreVectors; the widest of backward there altogether: see
// cluster_gradients. Blocks tell each other the states of their parts: see meeting.cuh. Each element is read once, but
// for those of the widest rows that find no room, and written once.
#include "cuda/dispatch.cuh"
#include "cuda/meeting.cuh"

namespace ndsoftmax::cuda {
namespace {

// The terms of vectors that begin at first, first + step, … before `end`, and nothing for others.
template <int kVectors, typename RowOf>
__device__ __forceinline__ void load_terms(const RowOf& row, int first, int step, int end,
                                           typename RowOf::Term* terms) {
  typename RowOf::Raw raw[kVectors];
  row.template load<false>(first, step, end, raw);  // rare, and twice in a kernel: ends apart would spill registers
  row.resolved_terms(raw, first, step, kVectors, terms);
}

// The vectors of a row that a thread has beside those in registers: in shared memory, where it finds its own again, and
// what that has no room for, which is read twice, the second time backwards: L2 still has the end. kFirst: there is
// room for all, and they are asked for before those in registers.
template <typename Operation, bool kRaw, bool kFirst>
class MoreVectors {
 public:
  static_assert(kRaw || sizeof(typename Operation::Source) == 4);  // has exponentials in the place of elements
  using RowOf = Row<Operation, int>;
  using Source = typename Operation::Source;
  using State = typename Operation::State;
  using Term = typename Operation::Term;
  static constexpr int kVector = RowOf::kVector;
  static constexpr bool kComesFirst = kFirst;
  using Vector = Vec<Source, kVector>;

  // Of so many there is room.
  __device__ __forceinline__ explicit MoreVectors(int room) : room_(room) {}

  // Those that begin at first, first + step, … before the row's end.
  __device__ __forceinline__ void load(const RowOf& row, int first, int step) {
    const int dim = row.reach();
    if constexpr (kFirst) {  // registers have nothing yet, and pointers that move on take a third of the instructions
      const Source* from = row.source() + first;
      Source* to = slot(0);
#pragma unroll 1
      for (; first + kVector <= dim && count_ < room_; first += step, ++count_) {
        copy_async<tuning::kVectorBytes>(to, from);
        from += step;
        to += static_cast<int>(blockDim.x) * kVector;
      }
    }
    for (; first < dim && count_ < room_; first += step, ++count_) {
      if (first + kVector <= dim) {
        copy_async<tuning::kVectorBytes>(slot(count_), row.source() + first);
      } else {
        for (int k = 0; k < kVector; ++k)
          slot(count_)[k] = first + k < dim ? row.source()[first + k] : narrow<Source>(Operation::nothing());
      }
    }
    if constexpr (!kFirst) rest_ = first;
  }
  __device__ __forceinline__ void raise(const Operation& operation, const RowOf& row, int step, State& state) {
    if constexpr (!kFirst)
      for (int first = rest_; first < row.reach(); first += kTogether * step) {
        Term terms[kTogether * kVector];
        load_terms<kTogether>(row, first, step, row.reach(), terms);
        operation.template accumulate<kTogether, kVector, kVector>(of_rest_, terms);
      }
    await_copies();
    for_each([&](int, Source*, Term(&terms)[kVector]) { operation.template raise<kVector>(state, terms); });
    if constexpr (!kFirst) operation.raise(state, of_rest_);
  }
  // Adds to the sum of a state whose maximum is known. What is not raw becomes what is left to finish.
  __device__ __forceinline__ void add(const Operation& operation, State& state) const {
    for_each([&](int, Source* at, Term(&terms)[kVector]) {
      operation.template add<kVector>(state, terms);
      if constexpr (!kRaw) Vector::narrowed([&](int k) { return terms[k]; }).store_shared(at);
    });
    if constexpr (!kFirst) operation.add(state, of_rest_);
  }
  template <typename Finish, typename Log>
  __device__ __forceinline__ void store(const RowOf& row, int first, int step, const Finish& finish, Log log) const {
    if constexpr (!kFirst) {
      const int left = row.reach() - rest_, apart = kTogether * step;
      for (int turn = left > 0 ? (left - 1) / apart : -1; turn >= 0; --turn) {
        const int at = rest_ + turn * apart;
        Term terms[kTogether * kVector];
        load_terms<kTogether>(row, at, step, row.reach(), terms);
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          row.store(at, i * step, [&](int k) { return finish.of(k).again(terms[i * kVector + k], log); });
      }
    }
    for_each([&](int i, Source*, Term(&terms)[kVector]) {
      row.store(first, i * step,
                [&](int k) { return kRaw ? finish.of(k).again(terms[k], log) : finish.of(k)(terms[k], log); });
    });
  }

 private:
  static constexpr int kTogether = tuning::kClusterRestVectors;

  __device__ __forceinline__ static Source* slot(int i) {
    return reinterpret_cast<Source*>(dynamic_shared_memory()) +
           (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVector;
  }
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
#pragma unroll 2
    for (int i = 0; i < count_; ++i) {
      const auto vector = Vector::load(slot(i));
      Term terms[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) terms[k] = vector.widened(k);
      visit(i, slot(i), terms);
    }
  }

  int room_, count_ = 0;
  int rest_ = 0;  // its first element
  State of_rest_;
};

// What threads have of a row beyond kVectors: nothing, or what is asked for before those, or after them.
enum class Beyond { nothing, first, last };

template <typename Operation, int kVectors, Beyond kBeyond = Beyond::nothing>
__global__ void __launch_bounds__(tuning::kMaxBlock) cluster_row(const RowArguments<Operation> arguments) {
  if constexpr (kHasClusters) {
    __shared__ Meeting<typename Operation::State> meeting;
    const std::int64_t block = arguments.first_block + blockIdx.x;
    const int blocks = cluster_size(), rank = static_cast<int>(block % blocks);
    meeting.complete.open();
    await_kernel_before();
    if (!arguments.next_begins_late) let_next_kernel_begin();
    using RowOf = Row<Operation, int, !Operation::kAligned>;
    using Vectors = MoreVectors<Operation, kHoldsRaw<Operation, RowOf::kVector, kVectors>, kBeyond == Beyond::first>;
    hold_rows<RowOf, kVectors, 1>(
        arguments, block / blocks, 1, 1, blocks * blockDim.x, rank * blockDim.x + threadIdx.x, Lanes{},
        ClusterExchange<typename Operation::State>{meeting, rank, blocks},
        std::conditional_t<kBeyond == Beyond::nothing, NothingMore, Vectors>{arguments.apart});
  } else {
    never_launched();
  }
}

// A block's parts of its cluster's rows, which arrive in shared memory one after the other: in a ring for each operand,
// with room for one part and some of the next, or all of it; or for most of one part, the rest of which threads load
// where they need it. Rows are counted by turns.
template <typename Operation>
class Parts {
 public:
  using RowOf = Row<Operation, int>;
  using Source = typename Operation::Source;
  static constexpr int kVector = RowOf::kVector;

  __device__ __forceinline__ Parts(const RowArguments<Operation>& arguments, ArrivalBarrier* arrived, int rank)
      : dim_(static_cast<int>(arguments.dim)),
        size_(static_cast<int>(blockDim.x) * arguments.live * kVector),
        ring_(arguments.apart * kVector),
        kept_(min(size_, ring_)),
        arrived_(arrived),
        rank_(rank) {}

  // Where the part after the one at `place` is.
  __device__ __forceinline__ int after(int place) const { return wrapped(place + kept_); }

  // Begins to copy what finds room beside the part before. One thread calls this and complete().
  __device__ __forceinline__ void begin(const RowOf& row, int turn, int place) const {
    copy(row, turn, place, 0, min(kept_, ring_ - kept_));
  }

  // And what else is kept, when that is not needed any more; says how much is to arrive.
  __device__ __forceinline__ void complete(const RowOf& row, int turn, int place) const {
    copy(row, turn, place, min(kept_, ring_ - kept_), kept_);
    const int from = first(row);
    const auto [begin, end] = whole_vectors(row);
    if (from < 0 && begin > 0) element_by_element(row, place, 0);
    if (from + end < dim_ && end < kept_) element_by_element(row, place, end);
    barrier(turn).expect(2 * (end - begin) * static_cast<unsigned>(sizeof(Source)));
  }

  __device__ __forceinline__ void await(int turn) const { barrier(turn).await(turn / tuning::kClusterSlots % 2); }

  // Calls visit(element of the row, its raw vectors) for this thread's, which are blockDim.x apart: some at a time, as
  // an array, where they lie within the row, elsewhere one.
  template <typename Visit>
  __device__ __forceinline__ void for_vectors(const RowOf& row, int place, const Visit& visit) const {
    const int step = static_cast<int>(blockDim.x) * kVector, offset = static_cast<int>(threadIdx.x) * kVector;
    int element = first(row) + offset;
    const int end = min(first(row) + kept_, dim_);
    place = wrapped(place + offset);
    const auto visit_some = [&]<int kCount>(std::integral_constant<int, kCount>) {
      typename RowOf::Raw raw[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        raw[i].source = Vec<Source, kVector>::load(outputs() + place);
        raw[i].grad = Vec<Source, kVector>::load(grads() + place);
        place = wrapped(place + step);
      }
      if constexpr (kCount == 1) row.resolve(raw[0], element);
      visit(element, raw);
      element += kCount * step;
    };
    constexpr int kSome = tuning::kClusterRowsVectors;
#pragma unroll 1
    while (element >= 0 && element + (kSome - 1) * step + kVector <= end)
      visit_some(std::integral_constant<int, kSome>{});
#pragma unroll 1
    while (element < end) visit_some(std::integral_constant<int, 1>{});
  }

  // Calls visit(element of the row, end, terms) for this thread's vectors of the rest, which it loads: some at a time.
  // Those that begin at `end` or later are not the part's.
  template <typename Visit>
  __device__ __forceinline__ void for_rest(const RowOf& row, const Visit& visit) const {
    constexpr int kTogether = tuning::kClusterRestVectors;
    const int step = static_cast<int>(blockDim.x) * kVector, end = min(first(row) + size_, dim_);
#pragma unroll 1
    for (int element = first(row) + kept_ + static_cast<int>(threadIdx.x) * kVector; element < end;
         element += kTogether * step) {
      typename Operation::Term terms[kTogether * kVector];
      load_terms<kTogether>(row, element, step, end, terms);
      visit(element, end, terms);
    }
  }

 private:
  __device__ __forceinline__ Source* outputs() const { return reinterpret_cast<Source*>(dynamic_shared_memory()); }
  __device__ __forceinline__ Source* grads() const { return outputs() + ring_; }
  __device__ __forceinline__ int wrapped(int place) const { return place < ring_ ? place : place - ring_; }
  __device__ __forceinline__ ArrivalBarrier& barrier(int turn) const { return arrived_[turn % tuning::kClusterSlots]; }
  // The element of the row that the part begins with; the row may begin within the part's first vector.
  __device__ __forceinline__ int first(const RowOf& row) const { return rank_ * size_ - row.phase(); }

  struct Range {
    int begin, end;
  };
  // Of the part, what can be copied as vectors: of the first row and the last, some would reach out of the tensor.
  __device__ __forceinline__ Range whole_vectors(const RowOf& row) const {
    const int vectors = work::vectors_in_row(dim_, kVector, row.phase());
    Range range{0, min(max(vectors * kVector - rank_ * size_, 0), kept_)};
    if (row.vectors_only()) return range;
    if (first(row) < 0) range.begin = kVector;
    if (range.end > range.begin && first(row) + range.end > dim_) range.end -= kVector;
    return range;
  }

  __device__ __forceinline__ void copy(const RowOf& row, int turn, int place, int begin, int end) const {
    const Range whole = whole_vectors(row);
    begin = max(begin, whole.begin);
    end = min(end, whole.end);
    for (int until; begin < end; begin = until) {
      const int at = wrapped(place + begin);
      until = min(end, begin + ring_ - at);
      const unsigned bytes = (until - begin) * sizeof(Source);
      barrier(turn).copy(outputs() + at, row.source() + first(row) + begin, bytes);
      barrier(turn).copy(grads() + at, row.grad() + first(row) + begin, bytes);
    }
  }

  __device__ __forceinline__ void element_by_element(const RowOf& row, int place, int begin) const {
    const int at = wrapped(place + begin), from = first(row) + begin;
    for (int k = 0; k < kVector; ++k) {
      if (from + k < 0 || from + k >= dim_) continue;
      outputs()[at + k] = row.source()[from + k];
      grads()[at + k] = row.grad()[from + k];
    }
    ArrivalBarrier::stored();
  }

  const int dim_, size_, ring_;  // elements of a row, of a part, and that each operand has room for
  const int kept_;               // of a part, those that find room
  ArrivalBarrier* const arrived_;
  const int rank_;
};

// The widest rows of backward: of the clusters that would hold their two operands in registers a GPC has room for too
// few, or for none. Clusters stay, and their rows arrive in shared memory, the next one, or some of it, while one is
// computed there; where there is no room even for one, the next one while the rest of one is written. Thread t of block
// b has vectors t, t + block, … of part b of each row. (Not of forward: see tuning::clusters_may_share().)
template <typename Operation>
__global__ void __launch_bounds__(tuning::kMaxBlock, 1)
    cluster_gradients(const __grid_constant__ RowArguments<Operation> arguments) {
  if constexpr (kHasClusters) {
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
    const int apart = static_cast<int>(blockDim.x) * kVector;
    const Parts<Operation> parts(arguments, arrived, rank);
    const auto row_of = [&](int turn) { return RowOf(arguments, first + turn * step); };

    if (threadIdx.x == 0) {
      for (ArrivalBarrier& barrier : arrived) barrier.init();
      for (Meeting<State>& meeting : meetings) {
        meeting.complete.init();
        meeting.complete.expect(blocks * sizeof(State));
      }
    }
    ArrivalBarrier::arrive_cluster();
    await_kernel_before();
    let_next_kernel_begin();
    if (threadIdx.x == 0) {
      parts.begin(row_of(0), 0, 0);
      parts.complete(row_of(0), 0, 0);
    }
    __syncthreads();  // barriers are there
#pragma unroll 1
    for (int turn = 0, place = 0; turn < turns; ++turn, place = parts.after(place)) {
      const RowOf row = row_of(turn);
      const bool begins_next = threadIdx.x == 0 && turn + 1 < turns;
      if (begins_next) parts.begin(row_of(turn + 1), turn + 1, parts.after(place));
      State held;
      parts.for_rest(row, [&](int, int, Term* terms) {
        operation.template add<tuning::kClusterRestVectors * kVector>(held, terms);
      });
      parts.await(turn);
      parts.for_vectors(row, place, [&]<int kCount>(int, const typename RowOf::Raw(&raw)[kCount]) {
        Term terms[kCount * kVector];
#pragma unroll
        for (int i = 0; i < kCount; ++i) row.terms(raw[i], 0, terms + i * kVector);
        operation.template add<kCount * kVector>(held, terms);
      });
      operation.total(held, Lanes{});

      Meeting<State>& meeting = meetings[turn % 2];
      if (turn == 0) meeting.await_others();
      meeting.send(held, rank, blocks);
      meeting.complete.await(turn / 2 % 2);
      // before this block sends to the next meeting, without which none sends to this one again
      if (threadIdx.x == 0 && turn + 2 < turns) meeting.complete.expect(blocks * sizeof(State));
      const auto finish = settled<Operation>(operation.finish(held, meeting.combined(blocks)), arguments.fusing);
      operation.with_log([&](auto log) {
        parts.for_vectors(row, place, [&]<int kCount>(int element, const typename RowOf::Raw(&raw)[kCount]) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            Term terms[kVector];
            row.terms(raw[i], 0, terms);
            const auto value = [&](int k) { return finish.of(k)(terms[k], log); };
            if constexpr (kCount > 1)
              row.store_whole(element + i * apart, value);
            else
              row.store(element, 0, value);
          }
        });
        __syncthreads();  // what was kept has been written: its place is free
        if (begins_next) parts.complete(row_of(turn + 1), turn + 1, parts.after(place));
        parts.for_rest(row, [&](int element, int end, const Term* terms) {
#pragma unroll
          for (int i = 0; i < tuning::kClusterRestVectors; ++i)
            if (element + i * apart < end)
              row.store(element, i * apart, [&](int k) { return finish.of(k)(terms[i * kVector + k], log); });
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
  const auto launch = [&]<typename Operation>() {
    auto arguments = row_arguments<Operation>(problem, plan, pointers);
    if constexpr (tuning::has_cluster_gradients(sizeof(typename Operation::Source), Operation::kDirection,
                                                Operation::kFused))
      if (plan.staged) return launch_grid<cluster_gradients<Operation>>(arguments, plan, pointers, stream);
    if constexpr (tuning::clusters_may_share(sizeof(typename Operation::Source), Operation::kDirection,
                                             Operation::kFused))
      if (plan.shared_bytes > 0) {
        constexpr int kVectors = tuning::sharing_vectors(sizeof(typename Operation::Source));
        arguments.apart = plan.items - kVectors;
        if (shares_first(plan))
          return launch_grid<cluster_row<Operation, kVectors, Beyond::first>>(arguments, plan, pointers, stream);
        return launch_grid<cluster_row<Operation, kVectors, Beyond::last>>(arguments, plan, pointers, stream);
      }
    visit_held<Operation, kMostClusterVectors<Operation>>(
        plan, [&](auto vectors) { launch_grid<cluster_row<Operation, vectors>>(arguments, plan, pointers, stream); });
  };
  if (plan.interleaved > 1)
    visit_interleaved(problem, launch);
  else
    visit_masked_operation(problem, launch);
}

}  // namespace ndsoftmax::cuda
