// Strided regime, columns held in registers. A thread has one vector of neighbouring columns, 16 bytes that move at
// once, or 8, and of them every along'th element of dim, which it loads straight from memory, all before it uses the
// first. What bounds it is memory, as long as few instructions touch an element: there is no shared memory to go
// through (but for what is fused), no index and no predicate per element, and a step along dim is one addition.
//
// `run` neighbouring lanes read neighbouring vectors, the threads along dim come next: small dims need one, larger ones
// lanes of a warp, whose states meet by shuffles, then warps, then blocks of a cluster. Each element is read once and
// written once. Of 16 bits it stays as it was loaded and is exponentiated twice, which takes half of the registers;
// wider ones are exponentiated in their place. What is missing at the end of dim is held as what counts for nothing.
// What is fused is applied to what is held. It takes as long to come, and there are no registers for it meanwhile: so
// where masks or biases have vectors as columns do, of 4 bytes at least, each thread copies its own to shared memory
// (Beside). Masks of words and single columns come before, as bits; the rest is applied as it is to tiles (strided.cu).
// Of 16 bits, which would round it, a bias is added each time that an element is used, if it lies beside; else columns
// are held one by one, each widened in a register of its own.
//
// Memory takes twice as long for sectors of 32 bytes that blocks write in parts as for all that is read. So where rows
// begin within sectors, tiles overlap, and write whole ones (work::sectors_written()).
//
// Of 16 bits, halves of vectors take less where threads are many (tuning::kManyThreadsKernel), and wherever 8 bytes
// divide the columns. Of long columns a thread has as many again in shared memory, which it fills and reads alone: half
// of the blocks then share a column, or segments are twice as long, and twice as much is under way.
//
// Columns that neither divide are held as words of 4 bytes, where words divide them. Their rows begin anywhere, and
// what bounds them is instructions: so no branch is taken for an element that may be missing, and which elements to
// store is found once, a bit each. Rows of 16 bits may begin within a word: there, words are shifted by a column, so
// that all that is loaded and stored are words. A thread has rows that begin alike; states of the same column meet as
// those of other threads along dim do. Of few rows, where that would be most of the work, columns are held one by one.
// Where all columns are few, and any work is much, words or single columns go to as many threads as leave each little.
//
// Other such columns are folded, where dim times the columns, a slab, is one run of memory: as many elements of dim as
// fill whole vectors count as one, of as many times the columns, and states of the same column meet at the end. So 7 ×
// 7 columns of 16 bits are 49 vectors to eight elements of dim, or, as a thread has a state of each column of a vector,
// rather 49 halves to four, unless that takes far larger clusters. A slab may begin and end within a vector; then a
// column is elsewhere in its vectors, but those that are a strip apart are of the same one all the same. Of these two
// vectors, the columns that are there are loaded and stored one by one.
//
// Assumes: no diagonal; outer, dim and inner are one group each, but for masks and biases, to which outer may be two;
// vectors of all operands are aligned, or shifted alike.
#include "cuda/async.cuh"
#include "cuda/dispatch.cuh"
#include "host/cuda_plan.hpp"

namespace ndsoftmax::cuda {
namespace {

using tuning::ColumnsForm;

template <typename Operation>
struct ColumnsArguments {
  using Source = typename Operation::Source;

  const Source* source;
  const Source* grad;
  typename Operation::Result* result;
  std::int64_t first_block;
  std::int64_t outer_stride[kOperandsOf<Operation>], dim_stride[kOperandsOf<Operation>];
  // outer may be two groups to masks and biases, of which this is the inner one; from one of these to the next they
  // lie so much further than strides say
  work::Divider outer_run;
  std::int64_t outer_jump[kOperandsOf<Operation>];
  int vectors;          // of columns, folded ones
  work::Divider inner;  // of them
  int dim;
  int whole;  // as much of it as all threads have: of slabs that are folded, the last may not
  int rows;   // of dim, that a block has
  int items;  // that any thread has of them
  work::Divider run, along, cluster;
  int log2_lanes;
  int width;  // vectors of columns that a block has at a turn
  int log2_fold;
  work::Divider strip;  // columns of an element of dim, where they are folded
  int slab;             // and dim times as many: elements that lie in a run
  int log2_parts[2];    // threads that combine a column: of the states of a block's teams, and of a cluster's blocks
  int step;  // of tiles, in vectors of columns; fewer than a block has: they overlap, and write whole sectors
  int lead;  // vectors of the first tile before the first of all
  int strip_columns;
  bool next_begins_late;
  Beside beside;
  int beside_at;     // where in shared memory that is, in bytes
  int beside_slots;  // that a thread has there at a turn
  bool masks_are_words;
  int shared;     // slots that a thread has there, for items beside those in registers
  int shared_at;  // where a block's are, in bytes
  Fusing<Operation> fusing;
};

template <typename Operation>
__device__ __forceinline__ int cluster_of(const ColumnsArguments<Operation>& arguments) {
  return kHasClusters ? arguments.cluster.size : 1;
}

// Else what a thread has at once are halves of vectors, or words, whose tiles overlap where they may, or single
// columns.
template <typename Operation, int kVector>
inline constexpr bool kVectors = tuning::are_vectors(kVector * sizeof(typename Operation::Source));

// Single columns of 16 bits, one to a register, are widened there once they are loaded: what is fused may then be more
// than they have room for.
template <typename Operation, int kVector>
inline constexpr bool kWidens =
    !kIsBackward<Operation> && Operation::kFused && kVector == 1 && sizeof(typename Operation::Source) == 2;

// Biases are added to what is held; what is held raw has kernels of its own for them.
template <typename Operation, int kVector>
inline constexpr bool kAddsBiases =
    !kIsBackward<Operation> && (sizeof(typename Operation::Source) > 2 || kWidens<Operation, kVector>);
template <typename Operation, int kVector>
inline constexpr bool kCopiesBiases = (kAddsBiases<Operation, kVector> || Operation::kBiased) &&
                                      kVector * sizeof(typename Operation::Source) >= tuning::kBesideMinBytes;

// The states of the columns of one vector: they move through shared memory 16 bytes at a time, where there are as many.
template <typename Operation, int kVector>
struct alignas(std::min<std::size_t>(tuning::kVectorBytes, kVector * sizeof(typename Operation::State))) VectorStates {
  typename Operation::State state[kVector];
};

// They in shared memory, tuning::states_gap() further apart.
template <typename Operation, int kVector>
struct SpacedStates {
  using States = VectorStates<Operation, kVector>;
  using State = typename Operation::State;
  unsigned char* bytes;

  static constexpr int kGap = tuning::states_gap(sizeof(States)), kApart = sizeof(States) + kGap;

  __device__ __forceinline__ States& of_vector(int vector) const {
    return *reinterpret_cast<States*>(bytes + vector * kApart);
  }
  __device__ __forceinline__ State& of_column(int column) const {
    if constexpr (kGap == 0) return reinterpret_cast<State*>(bytes)[column];
    const auto number = static_cast<unsigned>(column);
    return of_vector(static_cast<int>(number / kVector)).state[number % kVector];
  }
};

// Combines the states of warps, of columns that are folded, and of the blocks of a cluster.
template <typename Operation, int kVector, ColumnsForm kForm>
class ColumnsExchange {
  static constexpr bool kShifts = kForm == ColumnsForm::shifted, kFolds = kForm == ColumnsForm::folded;

 public:
  using State = typename Operation::State;
  using States = VectorStates<Operation, kVector>;
  using Spaced = SpacedStates<Operation, kVector>;

  __device__ __forceinline__ ColumnsExchange(const ColumnsArguments<Operation>& arguments, ArrivalBarrier& complete)
      : arguments_(arguments),
        width_(arguments.width + (kShifts ? 1 : 0)),
        teams_(arguments.along.size >> arguments.log2_lanes),
        columns_(width_ * kVector >> log2_fold()),
        complete_(complete) {
    if (cluster_of(arguments) > 1) complete_.open();
  }

  // Whether a team of lanes has all of its columns.
  __device__ __forceinline__ bool needless() const {
    return teams_ == 1 && cluster_of(arguments_) == 1 && log2_fold() == 0;
  }

  // One lane of each team of lanes `speaks`. The thread's columns are those of `place`.
  template <typename PlaceOf>
  __device__ __forceinline__ void tell(const States& held, const PlaceOf& place, int team, bool speaks) const {
    if constexpr (kShifts) {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        if (speaks && place.exists && place.is_column(k))
          of_teams(team).of_column(shifted_column(place) + k) = held.state[k];
    } else {
      if (speaks) of_teams(team).of_vector(place.column) = held;
    }
  }

  // After a barrier, what two teams told together.
  template <typename PlaceOf>
  __device__ __forceinline__ States of_two(const PlaceOf& place) const {
    States states = at(of_teams(0), place);
    const States second = at(of_teams(1), place);
#pragma unroll
    for (int k = 0; k < kVector; ++k) states.state[k].combine(second.state[k]);
    return states;
  }

  template <typename PlaceOf>
  __device__ __forceinline__ States operator()(const States& held, const PlaceOf& place, int team, bool speaks) const {
    const int cluster = cluster_of(arguments_), log2_fold = this->log2_fold(), fold = 1 << log2_fold;
    tell(held, place, team, speaks);
    __syncthreads();
    if constexpr (kShifts)
      if (teams_ == 2 && cluster == 1) return of_two(place);
    const Spaced whole = this->whole();
    // the first place of a column: folded ones have `fold` places, a strip apart
    const int strip = arguments_.strip.size, folded = strip << log2_fold;
    const auto first_place = [&](int i) {
      return log2_fold == 0 ? i : i + arguments_.strip.quotient(i) * (folded - strip);
    };
    const auto give = [&](int i, int part, int parts, const State& state) {
      if (log2_fold == 0) {
        if (part == 0) whole.of_column(i) = state;
        return;
      }
      for (int copy = part; copy < fold; copy += parts) whole.of_column(first_place(i) + copy * strip) = state;
    };
    const auto of_team = [&](int i, int part) {
      return of_teams(part >> log2_fold).of_column(first_place(i) + (part & (fold - 1)) * strip);
    };
    State* const of_blocks = reinterpret_cast<State*>(of_teams(teams_).bytes);
    const auto mine = static_cast<int>(blockIdx.x) - arguments_.cluster.quotient(blockIdx.x) * cluster;
    if (cluster > 1) ArrivalBarrier::await_cluster();
    const auto send = [&](int i, int part, int parts, const State& block) {
      if (cluster == 1) return give(i, part, parts, block);
      for (int rank = part; rank < cluster; rank += parts) complete_.send(block, of_blocks + mine * columns_ + i, rank);
    };
    gather<State, typename Operation::Result>(columns_, teams_ << log2_fold, arguments_.log2_parts[0], of_team, send);
    if (cluster > 1) {
      complete_.wait(columns_ * cluster * sizeof(State));
      const auto of_block = [&](int i, int rank) { return of_blocks[rank * columns_ + i]; };
      gather<State, typename Operation::Result>(columns_, cluster, arguments_.log2_parts[1], of_block, give);
    }
    __syncthreads();
    return at(whole, place);
  }

 private:
  __device__ __forceinline__ int log2_fold() const { return kFolds ? arguments_.log2_fold : 0; }
  __device__ __forceinline__ Spaced whole() const { return {dynamic_shared_memory()}; }
  __device__ __forceinline__ Spaced of_teams(int team) const {
    return {dynamic_shared_memory() + (1 + team) * width_ * Spaced::kApart};
  }
  // Columns of a tile lie a vector further, from where words may be shifted back.
  template <typename PlaceOf>
  __device__ __forceinline__ static int shifted_column(const PlaceOf& place) {
    return (place.column + 1) * kVector - place.shift;
  }
  template <typename PlaceOf>
  __device__ __forceinline__ static States at(const Spaced& columns, const PlaceOf& place) {
    if constexpr (!kShifts) return columns.of_vector(place.column);
    States states;
#pragma unroll
    for (int k = 0; k < kVector; ++k) states.state[k] = columns.of_column(shifted_column(place) + k);
    return states;
  }

  const ColumnsArguments<Operation>& arguments_;
  int width_, teams_, columns_;
  ArrivalBarrier& complete_;
};

template <typename T>
__device__ __forceinline__ T* advanced(T* at, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const unsigned char, unsigned char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(at) + bytes);
}

// Where `condition` is not 0. In PTX, because the compiler would rather branch around what is stored as well.
template <typename T, int N>
__device__ __forceinline__ void store_if(unsigned condition, const Vec<T, N>& vector, T* to) {
#if defined(__CUDACC__)
  const auto address = __cvta_generic_to_global(to);
  if constexpr (sizeof(T) * N == 2) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.b16 [%1], %2;\n}" ::"r"(condition),
                 "l"(address), "h"(static_cast<unsigned short>(vector.words[0]))
                 : "memory");
  } else if constexpr (sizeof(T) * N == 4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.b32 [%1], %2;\n}" ::"r"(condition),
                 "l"(address), "r"(vector.words[0])
                 : "memory");
  } else if constexpr (sizeof(T) * N == 8) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"(condition),
                 "l"(address), "r"(vector.words[0]), "r"(vector.words[1])
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) * N / 16; ++i)
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(condition),
          "l"(address + 16 * i), "r"(vector.words[4 * i]), "r"(vector.words[4 * i + 1]), "r"(vector.words[4 * i + 2]),
          "r"(vector.words[4 * i + 3])
          : "memory");
  }
#else
  if (condition) vector.store(to);
#endif
}

// Where in shared memory a thread has what lies beside its items in memory, of which each has a slot of its own.
struct BesideSlots {
  std::uint8_t* first;
  int apart;

  __device__ __forceinline__ std::uint8_t* of(int item) const { return first + item * apart; }
};

// kItems: those in registers.
template <typename Operation, int kItems, int kVector, ColumnsForm kForm, bool kShares>
class HeldColumns {
  static constexpr bool kShifts = kForm == ColumnsForm::shifted, kFolds = kForm == ColumnsForm::folded;

 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Real = typename Operation::Real;
  using Term = typename Operation::Term;
  static constexpr bool kForward = !kIsBackward<Operation>;
  static constexpr bool kWide = kWidens<Operation, kVector>;
  static constexpr bool kRaw = sizeof(Source) == 2 && !kWide;
  static constexpr bool kBiased = Operation::kBiased;  // each time that a term is asked for, as they are held raw
  static constexpr int kTogether = tuning::columns_together(kVector * sizeof(Source), kItems);
  static_assert(kItems % kTogether == 0);
  static_assert(!kBiased || (kRaw && kForm == ColumnsForm::plain && !kShares));  // items have slots, and vectors
  // Halves of lines that lie far apart are slow to come: L2 fetches the other one at once, which a neighbour wants
  // (512 x 65536 of float32, dim 0: 78 us instead of 82; 2048 x 16384: 81, 88; of 16 bits as fast without, and what is
  // fused has no registers to spare).
  static constexpr bool kLines = kVectors<Operation, kVector> && sizeof(Source) == 4 && !Operation::kFused;
  using States = VectorStates<Operation, kVector>;

  struct Finishes {
    typename Operation::Finish of[kVector];
  };

  // First of all: this thread has `mine` items, others `items` at most. Of its first one, so many columns are `before`
  // all that there is, of its last one `beyond`.
  __device__ __forceinline__ void begin(const Operation& operation, int mine, int items, int before, int beyond) {
    operation_ = operation;
    mine_ = mine;
    items_ = items;
    if constexpr (kFolds) before_ = before, beyond_ = beyond;
  }

  // The items beyond those in registers have so many slots in shared memory.
  __device__ __forceinline__ void share(unsigned char* slots, int count) {
    if constexpr (kShares) slots_ = slots, shared_ = count;
  }

  // The items that do not exist, a bit each.
  __device__ __forceinline__ unsigned missing() const { return shifted_left(~0u, mine_); }
  // The items that are excluded or missing, a bit each, where masks lie a `step` apart from this first one: of a
  // column, or of each column of a word, whose masks come as a word, too. All of them are under way at once, before
  // what is held takes the registers.
  template <typename Masks, int kColumns = sizeof(Masks)>
  __device__ __forceinline__ void find_excluded(const std::uint8_t* mask, std::int64_t step, bool excludes,
                                                unsigned* excluded) const {
    unsigned masks[kItems]{};
    static_assert(kItems <= 32);
    const auto each_of = [&](const auto& visit) {
      each([&](int first) {
#pragma unroll
        for (int i = first; i < first + kTogether; ++i) visit(i);
      });
    };
    each_of([&](int i) {
      masks[i] = i < mine_ ? *reinterpret_cast<const Masks*>(mask) : 0;
      mask += step;
    });
#pragma unroll
    for (int k = 0; k < kColumns; ++k) excluded[k] = missing();
    each_of([&](int i) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        if (((masks[i] & 0xffu << 8 * k) != 0) == excludes) excluded[k] |= 1u << i;
    });
  }
  // Forward, of what is not held raw: the scale, and biases, of which next(exists) are the next item's, if it exists;
  // it is called for kTogether of them before the first is used.
  template <typename Next>
  __device__ __forceinline__ void scale_and_add(Real scale, const Next& next) {
    each([&](int first) {
      Vec<Real, kVector> biases[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) biases[i] = next(first + i < mine_);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        // a negative factor would make nothing() the largest, where exclude() does not follow
        if (kVectors<Operation, kVector> && first + i >= mine_) continue;
        source_[first + i] =
            Held::narrowed([&](int k) { return source_[first + i].widened(k) * scale + biases[i].widened(k); });
      }
    });
  }
  // Of each column of a word, the items that are excluded or missing.
  __device__ __forceinline__ void exclude(const unsigned (&excluded)[kVector]) {
    each([&](int first) {
#pragma unroll
      for (int item = first; item < first + kTogether; ++item)
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          if ((excluded[k] >> item & 1) == 0) continue;
          source_[item].set(k, nothing().widened(k));
          if constexpr (!kForward) grad_[item].set(k, 0);
        }
    });
  }

  // Issues all loads. Steps are bytes. `whole` items are there in all threads. Where something is fused, those that are
  // `missing` are left out. Of words that are shifted the last column may not be `there`.
  __device__ __forceinline__ void load(const Source* source, std::int64_t source_step, const Source* grad,
                                       std::int64_t grad_step, int whole, unsigned missing, bool there) {
    const auto take = [&](const Source* from) {
      if constexpr (kLines)
        return Held::load_with_line(from);
      else
        return as_held(Loaded::load(from));
    };
    const auto take_both = [&](int i) {
      source_[i] = take(source);
      if constexpr (!kForward) grad_[i] = take(grad);
    };
    const auto take_if = [&](bool wanted, Held& held, const Source* from) {
      Loaded loaded = as_loaded(held);
      if constexpr (kShifts)
        loaded.load_up_to_if(wanted, there, from);
      else
        loaded.load_if(wanted, from);
      held = as_held(loaded);
    };
    const auto advance = [&] {
      source = advanced(source, source_step);
      if constexpr (!kForward) grad = advanced(grad, grad_step);
    };
    const Source* const first_source = source;
    const Source* const first_grad = grad;
    each([&](int first) {
      const bool all_whole = kShifts ? there : !kFolds || first > 0 || before_ == 0;
      if (!Operation::kFused && all_whole && first + kTogether <= whole) {
#pragma unroll
        for (int i = first; i < first + kTogether; ++i, advance()) take_both(i);
        return;
      }
#pragma unroll
      for (int i = first; i < first + kTogether; ++i) {
        const bool wanted = Operation::kFused ? (missing >> i & 1) == 0
                            : kFolds          ? (existing() >> i & 1) != 0
                                              : i < mine_;
        source_[i] = as_held(nothing());
        if constexpr (!kForward) grad_[i] = {};
        if constexpr (kVectors<Operation, kVector>) {
          if (wanted) take_both(i);
          if (Operation::kFused || kFolds || wanted)
            advance();  // else the compiler would make one of both branches, whose loads wait
        } else {
          take_if(wanted, source_[i], source);
          if constexpr (!kForward) take_if(wanted, grad_[i], grad);
          advance();
        }
      }
    });
    if constexpr (kShares) {
      source = advanced(first_source, kItems * source_step);
      if constexpr (!kForward) grad = advanced(first_grad, kItems * grad_step);
#pragma unroll 2
      for (int item = 0; item < shared_; ++item, advance()) {
        if (kItems + item < mine_) {
          copy_async_with_line(slot(item, 0), source);
          if constexpr (!kForward) copy_async_with_line(slot(item, 1), grad);
        } else {
          nothing().store_shared(slot(item, 0));
          if constexpr (!kForward) Held{}.store_shared(slot(item, 1));
        }
      }
    }
    if constexpr (kFolds) {
      if (before_ > 0) {
        source_[0] = Held::load_part(first_source, before_, kVector, nothing());
        if constexpr (!kForward) grad_[0] = Held::load_part(first_grad, before_, kVector, {});
      }
      if (beyond_ > 0) {
        const auto last_of = [&](const Source* first, std::int64_t step, const Held& rest) {
          return Held::load_part(advanced(first, (mine_ - 1) * step), 0, kVector - beyond_, rest);
        };
        const Held last = last_of(first_source, source_step, nothing());
        Held last_grad{};
        if constexpr (!kForward) last_grad = last_of(first_grad, grad_step, {});
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (i != mine_ - 1) continue;
          source_[i] = last;
          if constexpr (!kForward) grad_[i] = last_grad;
        }
      }
    }
  }

  // After load(), before what follows.
  __device__ __forceinline__ void widen() {
    if constexpr (kWide)
      each([&](int first) {
#pragma unroll
        for (int i = first; i < first + kTogether; ++i) source_[i] = Held::filled(as_loaded(source_[i]).widened(0));
      });
  }

  // Applies what is fused, which `line` has at the first item, and step(line) at the next.
  template <typename Line, typename Step>
  __device__ __forceinline__ void apply(Line line, const Step& step) {
    each([&](int first) {
      Line lines[kTogether];
      Extras<Operation, kVector> extras[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        lines[i] = line;
        if (first + i < mine_) line.load(0, 0, extras[i]);
        step(line);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= mine_) continue;
        lines[i].resolve(0, extras[i]);
        lines[i].apply(0, extras[i], source_[first + i], grad_[kForward ? 0 : first + i]);
      }
    });
  }

  // Copies what lies beside the items to the thread's slots, of which each has its own: so many bytes for the first,
  // and for each other one a `step` further. Items that are missing have zeros.
  template <int kBytes>
  __device__ __forceinline__ void copy_beside(const std::uint8_t* from, std::int64_t step,
                                              const BesideSlots& slots) const {
    each([&](int first) {
#pragma unroll
      for (int i = first; i < first + kTogether; ++i, from += step)
        copy_async_or_zero<kBytes>(slots.of(i), from, i < mine_);
    });
  }
  // And applies masks, once they are there, and the scale.
  __device__ __forceinline__ void apply_masks(const BesideSlots& slots, const Fusing<Operation>& fusing) {
    each([&](int first) {
#pragma unroll
      for (int i = first; i < first + kTogether; ++i) {
        MaskBytes<kVector> mask;
        mask.load_aligned(slots.of(i));
        const auto excluded = mask.excluded(nullptr, fusing.mask_flip);
        if constexpr (kForward && !kRaw) {
          if (i >= mine_) continue;  // a negative factor would make nothing() the largest
          source_[i] = Held::narrowed([&](int k) { return source_[i].widened(k) * fusing.scale; });
        }
        replace(source_[i], excluded, nothing().widened(0));
        if constexpr (!kForward) replace(grad_[i], excluded, 0);
      }
    });
  }
  // Or leaves biases, which are there, and the scale for when terms are asked for.
  __device__ __forceinline__ void leave_biases(const BesideSlots& slots, Real scale) {
    biases_ = slots;
    scale_ = scale;
  }

  // What is left to do where Fusing::masks_evenly, or only a scale is fused.
  __device__ __forceinline__ void scale_evenly(const Fusing<Operation>& fusing, unsigned missing) {
    if constexpr (kForward && !kRaw)
      each([&](int first) {
#pragma unroll
        for (int i = first; i < first + kTogether; ++i)  // a negative factor would make nothing() the largest
          if ((missing >> i & 1) == 0)
            source_[i] = Held::narrowed([&](int k) { return source_[i].widened(k) * fusing.scale; });
      });
  }

  // The states of what `lanes` lanes, `step` apart, hold. Exponentiates what is not held raw.
  __device__ __forceinline__ States reduce(int lanes, int step) {
    States states;
    const auto over_lanes = [&](const auto& combine) {
#pragma unroll 1
      for (int offset = step; offset < step * lanes; offset *= 2) combine(offset);
    };
    if constexpr (kForward && kRaw && !kBiased) {
      Held most = nothing();
      each([&](int first) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) most = most.larger(source_[first + i]);
      });
      if constexpr (kShares) await_copies();
      each_shared([&](int, const Held(&source)[kTogether], const Held*) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) most = most.larger(source[i]);
      });
      over_lanes([&](int offset) {
        Held other;
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(other.words) / 4); ++i)
          other.words[i] = __shfl_xor_sync(kAllLanes, most.words[i], offset);
        most = most.larger(other);
      });
#pragma unroll
      for (int k = 0; k < kVector; ++k) states.state[k].max = operation_.scaled(most.widened(k));
    } else if constexpr (kForward) {
      each_terms(
          [&](int, int k, Term(&terms)[kTogether]) { operation_.template raise<kTogether>(states.state[k], terms); });
      over_lanes([&](int offset) {
#pragma unroll
        for (auto& state : states.state) state.max = larger(state.max, __shfl_xor_sync(kAllLanes, state.max, offset));
      });
    }
    if constexpr (kForward && !kRaw) {
      parted(operation_.log, [&](auto log) {  // asked for each of them, it would keep them from overlapping
        const typename Operation::template With<decltype(log)> told{log, operation_.scale};
        each_terms([&](int first, int k, Term(&terms)[kTogether]) {
          auto& state = states.state[k];
          state.sum += told.template reduce<kTogether, 1, 1>(terms, kTogether, Known{state.max}).sum;
          if constexpr (!(decltype(log)::value && !Operation::kKeepsDistances))  // else they are as they were
#pragma unroll
            for (int i = 0; i < kTogether; ++i) source_[first + i].set(k, terms[i]);
        });
      });
    } else {
      const auto add = [&](int, int k, Term(&terms)[kTogether]) {
        operation_.template add<kTogether>(states.state[k], terms);
      };
      each_terms(add);
      if constexpr (kShares && !kForward) await_copies();
      each_shared(
          [&](int first, const Held(&source)[kTogether], const Held* grad) { visit_terms(first, source, grad, add); });
    }
    over_lanes([&](int offset) {
#pragma unroll
      for (auto& state : states.state) {
        state.sum += __shfl_xor_sync(kAllLanes, state.sum, offset);
        if constexpr (Operation::kFused && !kForward) state.living += __shfl_xor_sync(kAllLanes, state.living, offset);
      }
    });
    return states;
  }

  // `held`: what reduce() returned.
  __device__ __forceinline__ static Finishes finish(const States& held, const States& rows,
                                                    const Fusing<Operation>& fusing) {
    Finishes finish;
    parted(fusing.operation.log, [&](auto log) {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        finish.of[k] = settled<Operation>(kRaw ? fusing.operation.finish_told(log, rows.state[k])
                                               : fusing.operation.finish_told(log, held.state[k], rows.state[k]),
                                          fusing);
    });
    return finish;
  }

  // The items that are there as a whole, a bit each.
  __device__ __forceinline__ unsigned existing() const {
    if constexpr (!kFolds) return ~missing();
    return ~(shifted_left(~0u, mine_ - (beyond_ > 0 ? 1 : 0)) | (before_ > 0 ? 1 : 0));
  }

  // Those of the items `stored`, a bit each, of the vector's `first` and `last` column, or of one of them.
  __device__ __forceinline__ void store(const Finishes& finish, Result* result, std::int64_t step, unsigned stored,
                                        bool first, bool last) const {
    Result* const first_result = result;
    const auto finished = [&](const Held& source, const Held& grad, auto log, int item) {
      const Bias bias = this->bias(item);
      return Vec<Result, kVector>::narrowed([&](int k) {
        const Term x = term(source, grad, bias, k);
        return kRaw ? finish.of[k].again(x, log) : finish.of[k](x, log);
      });
    };
    const auto store = [&](int item, auto log) {
      const auto vector = finished(source_[item], grad_[kForward ? 0 : item], log, item);
      const unsigned stores = stored & 1u << item;
      if constexpr (kShifts) {
        const Vec<Result, 1> half{vector.words[0] >> (first ? 0 : 16)};
        store_if(first && last ? stores : 0, vector, result);
        store_if(first != last ? stores : 0, half, result + (first ? 0 : 1));
      } else {
        store_if(stores, vector, result);
      }
      result = advanced(result, step);
    };
    operation_.with_log([&](auto log) {
      each([&](int first) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) store(first + i, log);
      });
      each_shared([&](int first, const Held(&source)[kTogether], const Held* grad) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const auto vector = finished(source[i], grad[kForward ? 0 : i], log, first + i);
          store_if(stored & 1u << (kItems + first + i), vector, result);
          result = advanced(result, step);
        }
      });
      if constexpr (kFolds) {
        if (before_ > 0) finished(source_[0], grad_[0], log, 0).store_part(first_result, before_, kVector);
        if (beyond_ > 0) {
          Held source = source_[0], grad = grad_[0];
#pragma unroll
          for (int i = 1; i < kItems; ++i) {
            if (i != mine_ - 1) continue;
            source = source_[i];
            if constexpr (!kForward) grad = grad_[i];
          }
          finished(source, grad, log, mine_ - 1)
              .store_part(advanced(first_result, (mine_ - 1) * step), 0, kVector - beyond_);
        }
      }
    });
  }

 private:
  using Loaded = Vec<Source, kVector>;
  using Held = std::conditional_t<kWide, Vec<Real, kVector>, Loaded>;
  struct Nothing {};
  using Bias = std::conditional_t<kBiased, Loaded, Nothing>;

  // As it was loaded, until widen(), and back.
  __device__ __forceinline__ static Held as_held(const Loaded& loaded) {
    if constexpr (kWide)
      return Held{loaded.words[0]};
    else
      return loaded;
  }
  __device__ __forceinline__ static Loaded as_loaded(const Held& held) {
    if constexpr (kWide)
      return Loaded{held.words[0]};
    else
      return held;
  }

  // A team whose maximum is known.
  struct Known {
    Real of_team;
    __device__ __forceinline__ Real max(Real) const { return of_team; }
    __device__ __forceinline__ Real sum(Real x) const { return x; }
  };

  // Calls visit(first) for kTogether items at a time.
  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll
    for (int first = 0; first < kItems; first += kTogether) {
      if (first > 0 && first >= items_) break;
      visit(first);
    }
  }
  // The same with their terms, column by column.
  template <typename Visit>
  __device__ __forceinline__ void each_terms(const Visit& visit) const {
    each([&](int first) { visit_terms(first, source_ + first, grad_ + (kForward ? 0 : first), visit); });
  }
  template <typename Visit>
  __device__ __forceinline__ void visit_terms(int first, const Held* source, const Held* grad,
                                              const Visit& visit) const {
    Bias biases[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) biases[i] = bias(first + i);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      Term terms[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) terms[i] = term(source[i], grad[kForward ? 0 : i], biases[i], k);
      visit(first, k, terms);
    }
  }

  // Calls visit(first, sources, grads) for kTogether items in shared memory at a time, which are counted from 0.
  template <typename Visit>
  __device__ __forceinline__ void each_shared(const Visit& visit) const {
    if constexpr (kShares) {
      static_assert(kRaw);  // has exponentials in the place of elements
#pragma unroll 1
      for (int first = 0; first < shared_; first += kTogether) {
        Held source[kTogether], grad[kForward ? 1 : kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          source[i] = Held::load(slot(first + i, 0));
          if constexpr (!kForward) grad[i] = Held::load(slot(first + i, 1));
        }
        visit(first, source, grad);
      }
    }
  }
  __device__ __forceinline__ Source* slot(int item, int operand) const {
    const int slots = (item * kHeldOperands<Operation> + operand) * static_cast<int>(blockDim.x);
    return reinterpret_cast<Source*>(slots_) + slots * kVector;
  }

  // Of an item, where kBiased.
  __device__ __forceinline__ Bias bias(int item) const {
    if constexpr (kBiased)
      return Loaded::load(reinterpret_cast<const Source*>(biases_.of(item)));
    else
      return {};
  }
  __device__ __forceinline__ Term term(const Held& source, const Held& grad, const Bias& bias, int k) const {
    if constexpr (kBiased)
      return source.widened(k) * scale_ + bias.widened(k);  // missing ones stay: a scale is positive
    return Operation::term(source.widened(k), kForward ? 0 : grad.widened(k));
  }

  // Backward, a gradient of 0 adds nothing to a sum, and the output matters to none but fused operations.
  __device__ __forceinline__ Loaded nothing() const {
    if constexpr (kForward)
      return Loaded::filled(operation_.nothing());
    else if constexpr (Operation::kFused)
      return Loaded::filled(operation_.empty());
    else
      return {};
  }

  Held source_[kItems], grad_[kForward ? 1 : kItems];
  int mine_, items_;
  int before_ = 0, beyond_ = 0;
  unsigned char* slots_;
  int shared_ = 0;
  BesideSlots biases_;
  Real scale_;
  Operation operation_;
};

// Where the vector of columns of a thread is.
template <typename Operation, int kVector, ColumnsForm kForm>
struct Place {
  static constexpr bool kShifts = kForm == ColumnsForm::shifted, kFolds = kForm == ColumnsForm::folded;

  const ColumnsArguments<Operation>& arguments;
  int row;  // the first of the thread, of dim
  bool exists;
  int column;  // of the tile
  int outer, inner;
  int shift = 0;  // columns that the word begins earlier; of folded slabs, by which the first vector does
  int dim;        // that the thread's vector has elements of
  int last;       // of the vectors of a folded slab

  __device__ __forceinline__ Place(const ColumnsArguments<Operation>& arguments, int vector, int column, int row,
                                   bool wanted)
      : arguments(arguments), row(row), column(column), dim(arguments.dim) {
    if constexpr (kShifts) vector -= arguments.lead;
    int held = min(vector, arguments.vectors - 1);  // what does not exist holds what its neighbour does
    if constexpr (kShifts) held = max(held, 0);
    exists = wanted && vector == held;
    outer = arguments.inner.quotient(held);
    inner = held - outer * arguments.inner.size;
    if constexpr (kShifts) {
      shift = static_cast<int>(offset(kSource)) & 1;
      if (is_column(0) || is_column(kVector - 1)) return;
      exists = false;
      --inner;
    }
    if constexpr (kFolds) {
      const auto address = reinterpret_cast<std::uintptr_t>(arguments.source) / sizeof(*arguments.source);
      shift = static_cast<int>(address + outer * arguments.outer_stride[kSource]) & (kVector - 1);
      last = (shift + arguments.slab - 1) / kVector;
      const int before = arguments.inner.quotient(last);
      dim = before + (inner <= last - before * arguments.inner.size);
    }
  }

  // Whether the vector's k-th is a column of the strip: words may reach over its ends.
  __device__ __forceinline__ bool is_column(int k) const {
    if constexpr (!kShifts) return true;
    const int column = inner * kVector - shift + k;
    return column >= 0 && column < arguments.strip_columns;
  }

  __device__ __forceinline__ std::int64_t offset(int operand) const {
    return outer * arguments.outer_stride[operand] + static_cast<std::int64_t>(inner) * kVector - shift +
           row * arguments.dim_stride[operand];
  }
  // Bytes between elements of dim that a thread has.
  __device__ __forceinline__ std::int64_t step(int operand) const {
    const int bytes = operand == kResult ? sizeof(typename Operation::Result) : sizeof(typename Operation::Source);
    return steps(operand) * bytes;
  }

  // Items, a bit each: those that are not loaded, and, of words and single columns, those of which the k-th column is
  // not to count.
  struct LeftOut {
    unsigned missing = 0, excluded[kVector]{};
  };

  template <typename Held>
  __device__ __forceinline__ void begin(Held& held, int mine) const {
    int before = 0, beyond = 0;
    if constexpr (kFolds) {
      const int end = (row + (mine - 1) * arguments.along.size) * arguments.inner.size + inner;
      if (mine > 0 && row + inner == 0) before = shift;
      if (mine > 0 && end == last) beyond = (last + 1) * kVector - shift - arguments.slab;
    }
    held.begin(arguments.fusing.operation, mine, arguments.items, before, beyond);
    held.share(dynamic_shared_memory() + arguments.shared_at +
                   static_cast<int>(threadIdx.x * sizeof(Vec<typename Operation::Source, kVector>)),
               arguments.shared);
  }

  // Of a thread that begins.
  template <typename Held>
  __device__ __forceinline__ LeftOut left_out(const Held& held, int turn) const {
    LeftOut left_out;
    if constexpr (Operation::kFused) {
      const auto& fusing = arguments.fusing;
      left_out.missing = held.missing();
      if constexpr (kCopiesBiases<Operation, kVector>)
        if (arguments.beside == Beside::biases) copy_beside<Source>(held, kBias, fusing.bias, turn);
      if constexpr (kVectors<Operation, kVector> && !Operation::kBiased)
        if (arguments.beside == Beside::masks) copy_beside<std::uint8_t>(held, kMask, fusing.mask, turn);
      if constexpr (!Operation::kBiased) {
        const std::uint8_t* const mask = fusing.mask + fused_offset(kMask, fusing.mask_step);
        const auto find = [&]<typename Masks>(int k, unsigned* excluded) {
          held.template find_excluded<Masks>(mask + k * fusing.mask_step, steps(kMask), fusing.mask_flip == 0,
                                             excluded);
        };
        if (fusing.masks_evenly) {
          find.template operator()<std::uint8_t>(0, &left_out.missing);  // what is excluded is not loaded
        } else if constexpr (!kVectors<Operation, kVector>) {
#pragma unroll
          for (unsigned& excluded : left_out.excluded) excluded = left_out.missing;
          if (fusing.mask == nullptr) return left_out;
          if constexpr (kVector == 2)
            if (arguments.masks_are_words) {
              find.template operator()<std::uint16_t>(0, left_out.excluded);
              return left_out;
            }
#pragma unroll
          for (int k = 0; k < kVector; ++k) find.template operator()<std::uint8_t>(k, left_out.excluded + k);
        }
      }
    }
    return left_out;
  }
  // Loads the items of this thread, of which all threads have `whole`, but those that it leaves out.
  template <typename Held>
  __device__ __forceinline__ void load(Held& held, int whole, const LeftOut& left_out) const {
    held.load(arguments.source + offset(kSource), step(kSource), arguments.grad + offset(kGrad), step(kGrad), whole,
              left_out.missing, is_column(kVector - 1));
  }
  template <typename Held>
  __device__ __forceinline__ void apply_fused(Held& held, int turn, const LeftOut& left_out) const {
    if constexpr (Operation::kFused) {
      const auto& fusing = arguments.fusing;
      held.widen();
      if (arguments.beside != Beside::none) await_copies();
      if constexpr (Operation::kBiased) {
        held.leave_biases(slots<Source>(turn), fusing.scale);
      } else if (fusing.masks_evenly || (fusing.mask == nullptr && fusing.bias == nullptr)) {
        held.scale_evenly(fusing, left_out.missing);
      } else if constexpr (kVectors<Operation, kVector>) {
        switch (arguments.beside) {
          case Beside::masks: return held.apply_masks(slots<std::uint8_t>(turn), fusing);
          case Beside::biases:
            if constexpr (kAddsBiases<Operation, kVector>) add_biases(held, turn);
            return;
          case Beside::none: held.apply(line(0), [&](auto& line) { line.step(steps(kMask), steps(kBias)); });
        }
      } else {
        if constexpr (kAddsBiases<Operation, kVector>) add_biases(held, turn);
        held.exclude(left_out.excluded);
      }
    }
  }
  template <typename Held>
  __device__ __forceinline__ void store(const Held& held, const typename Held::Finishes& finish, int mine) const {
    using Result = typename Operation::Result;
    if (!exists) return;
    Result* const result = arguments.result + offset(kResult);
    constexpr bool kMayOverlap =
        !kFolds && tuning::columns_may_overlap(kVector * sizeof(typename Operation::Source),
                                               sizeof(typename Operation::Source), sizeof(Result), Operation::kFused);
    unsigned stored = held.existing();
    if constexpr (kMayOverlap) stored &= whole_sectors(result);
    if (is_column(0) && is_column(kVector - 1))
      held.store(finish, result, step(kResult), stored, true, true);
    else  // at an end of a strip
      held.store(finish, result, step(kResult), stored, is_column(0), is_column(kVector - 1));
    if constexpr (Operation::kFused)
#pragma unroll
      for (int k = 0; k < kVector; ++k) {  // of tainted columns, which are rare
        if (__builtin_expect(!finish.of[k].taints(), 1)) continue;
#pragma unroll 1
        for (int item = 0; item < mine; ++item)
          if (finish.of[k].clears(line(item).includes(k)))
            advanced(result, item * step(kResult))[k] =
                narrow<typename Operation::Result>(arguments.fusing.operation.excluded());
      }
  }

 private:
  using Source = typename Operation::Source;
  using Real = typename Operation::Real;

  // The thread's first of a mask or a bias, of which neighbours are so far `apart`, in elements from its beginning.
  __device__ __forceinline__ std::int64_t fused_offset(int operand, int apart) const {
    return outer_offset(operand) + row * arguments.dim_stride[operand] +
           static_cast<std::int64_t>(inner) * kVector * apart;
  }
  template <typename Element, typename Held>
  __device__ __forceinline__ void copy_beside(const Held& held, int operand, const std::uint8_t* from, int turn) const {
    constexpr std::int64_t kElement = sizeof(Element);
    held.template copy_beside<kElement * kVector>(from + fused_offset(operand, 1) * kElement, steps(operand) * kElement,
                                                  slots<Element>(turn));
  }
  // Of what lies beside.
  template <typename Element>
  __device__ __forceinline__ BesideSlots slots(int turn) const {
    constexpr int kSlot = kVector * sizeof(Element);
    const auto threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    return {dynamic_shared_memory() + arguments.beside_at + (turn * arguments.beside_slots * threads + thread) * kSlot,
            threads * kSlot};
  }
  // The scale, and biases, if there are any: from beside, or from memory, where they may have any type.
  template <typename Held>
  __device__ __forceinline__ void add_biases(Held& held, int turn) const {
    const auto& fusing = arguments.fusing;
    if constexpr (kCopiesBiases<Operation, kVector>)
      if (arguments.beside == Beside::biases) {
        BesideSlots slots = this->slots<Source>(turn);
        return held.scale_and_add(fusing.scale, [&](bool) {
          const auto bias = Vec<Real, kVector>::load(reinterpret_cast<const Real*>(slots.first));
          slots.first += slots.apart;
          return bias;
        });
      }
    if constexpr (!kVectors<Operation, kVector>) {
      static_assert(kVector == 1);
      const auto add = [&](const auto* bias) {
        bias += fused_offset(kBias, fusing.bias_step);
        held.scale_and_add(fusing.scale, [&](bool exists) {
          const Real next = exists ? cuda::widen(*bias) : 0;
          bias += steps(kBias);
          return Vec<Real, kVector>::filled(next);
        });
      };
      if (fusing.bias == nullptr)
        held.scale_evenly(fusing, 0);  // exclude() follows
      else if (kWidens<Operation, kVector> && !fusing.bias_is_real)
        add(reinterpret_cast<const Source*>(fusing.bias));
      else
        add(reinterpret_cast<const Real*>(fusing.bias));
    }
  }
  // Elements of an operand between those of dim that a thread has.
  __device__ __forceinline__ std::int64_t steps(int operand) const {
    return arguments.dim_stride[operand] * arguments.along.size;
  }
  // The items that are this thread's to store, where tiles overlap, a bit each.
  __device__ __forceinline__ unsigned whole_sectors(const typename Operation::Result* result) const {
    constexpr int kBytes = kVector * sizeof(*result), kPeriod = tuning::kSectorBytes / kBytes;
    const int from = column - arguments.lead;
    const bool inside = from >= kPeriod - 1 && from < arguments.step;  // wherever rows begin
    if (inside || arguments.step == arguments.width) return ~0u;
    constexpr unsigned kEachPeriod = ~0u / ((1u << kPeriod) - 1);
    const unsigned phases = work::sectors_written(from, inner, kPeriod, arguments.step) * kEachPeriod;
    const auto in_vectors = [](auto bytes) { return static_cast<unsigned>(bytes) / kBytes; };
    const unsigned at = in_vectors(reinterpret_cast<std::uintptr_t>(result)), apart = in_vectors(step(kResult));
    // of so many items, as rows begin at multiples of kBytes, then at the same one of a sector again; the bit of item
    // i's phase is rotated to the i-th
    unsigned owned = 0;
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) owned |= __funnelshift_r(phases, phases, at + i * (apart - 1)) & 1u << i;
    return owned * kEachPeriod;
  }
  // Of a mask or a bias.
  __device__ __forceinline__ std::int64_t outer_offset(int operand) const {
    return outer * arguments.outer_stride[operand] +
           arguments.outer_run.quotient(outer) * arguments.outer_jump[operand];
  }
  // The columns at an element of dim, as neighbours along a line.
  __device__ __forceinline__ auto line(int item) const {
    const std::int64_t element = row + static_cast<std::int64_t>(item) * arguments.along.size;
    const auto offset = [&](int operand, int step) {
      return outer_offset(operand) + static_cast<std::int64_t>(inner) * kVector * step +
             element * arguments.dim_stride[operand];
    };
    return FusedLine<Operation, int, kVector>(arguments.fusing, offset(kMask, arguments.fusing.mask_step),
                                              offset(kBias, arguments.fusing.bias_step), kVector);
  }
};

template <typename Operation, int kVector, int kKernel>
__device__ __forceinline__ void take_columns(const ColumnsArguments<Operation>& arguments) {
  constexpr tuning::ColumnsKernel kSize = tuning::columns_kernel(kVector * sizeof(typename Operation::Source), kKernel);
  constexpr int kTurns = kSize.turns;
  constexpr ColumnsForm kForm = tuning::columns_form(kVector * sizeof(typename Operation::Source), kKernel);
  constexpr bool kAlternates = tuning::shifts_all_words(kVector * sizeof(typename Operation::Source), kKernel);
  using HeldOf = HeldColumns<Operation, kSize.vectors / kHeldOperands<Operation> / (kAlternates ? 2 : 1), kVector,
                             kForm, (kSize.shared > 0)>;
  using PlaceOf = Place<Operation, kVector, kForm>;

  // where threads have all of dim
  const int tile = (static_cast<int>(arguments.first_block) + static_cast<int>(blockIdx.x)) * kTurns;
  const bool beyond = static_cast<int>(threadIdx.x) >= arguments.width;
  const int own = beyond ? 0 : static_cast<int>(threadIdx.x);
  const auto place_of = [&](int turn, int row) {
    return PlaceOf(arguments, (tile + turn) * arguments.step + own, own, row, !beyond);
  };
  if constexpr (kAlternates) {  // and states of every other row meet, which begin alike
    static_assert(!Operation::kFused);
    __shared__ ArrivalBarrier complete;
    const ColumnsExchange<Operation, kVector, kForm> exchange(arguments, complete);
    await_kernel_before();
    if (!arguments.next_begins_late) let_next_kernel_begin();
    const auto rows = [&](int first) { return beyond ? 0 : (arguments.dim + 1 - first) / 2; };
    HeldOf held[2];
#pragma unroll
    for (int first = 0; first < 2; ++first) {
      const PlaceOf place = place_of(0, first);
      place.begin(held[first], rows(first));
      place.load(held[first], rows(1), {});
    }
#pragma unroll
    for (int first = 0; first < 2; ++first) exchange.tell(held[first].reduce(1, 1), place_of(0, first), first, true);
    __syncthreads();
    if (arguments.next_begins_late) let_next_kernel_begin();
#pragma unroll
    for (int first = 0; first < 2; ++first) {
      const PlaceOf place = place_of(0, first);
      const auto states = exchange.of_two(place);
      place.store(held[first], HeldOf::finish(states, states, arguments.fusing), rows(first));
    }
  } else if constexpr (kTurns > 1) {
    await_kernel_before();
    if (!arguments.next_begins_late) let_next_kernel_begin();
    HeldOf held[kTurns];
    typename PlaceOf::LeftOut left_out[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const PlaceOf place = place_of(turn, 0);
      place.begin(held[turn], arguments.items);
      left_out[turn] = place.left_out(held[turn], turn);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) place_of(turn, 0).load(held[turn], arguments.items, left_out[turn]);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const PlaceOf place = place_of(turn, 0);
      place.apply_fused(held[turn], turn, left_out[turn]);
      const auto states = held[turn].reduce(1, 1);
      if (turn == kTurns - 1 && arguments.next_begins_late) let_next_kernel_begin();
      place.store(held[turn], HeldOf::finish(states, states, arguments.fusing), arguments.items);
    }
  } else {
    const int along = arguments.along.size, cluster = cluster_of(arguments);
    auto thread = work::tile_thread(threadIdx.x, arguments.run, arguments.along);
    const bool idle = thread.column >= arguments.width;
    if (idle) thread = {};
    __shared__ ArrivalBarrier complete;
    const ColumnsExchange<Operation, kVector, kForm> exchange(arguments, complete);
    await_kernel_before();
    if (!arguments.next_begins_late) let_next_kernel_begin();

    const int block = static_cast<int>(arguments.first_block) + blockIdx.x, tile = arguments.cluster.quotient(block);
    const int begin = (block - tile * cluster) * arguments.rows;
    const PlaceOf place(arguments, tile * arguments.step + thread.column, thread.column, begin + thread.along, !idle);
    const auto rows_of = [&](int dim) { return idle ? 0 : max(0, min(arguments.rows, dim - begin)); };
    HeldOf held;
    const int whole = arguments.along.quotient(rows_of(arguments.whole));
    int mine = whole, rows = rows_of(arguments.whole);
    if constexpr (kForm == ColumnsForm::folded) rows = rows_of(place.dim), mine = arguments.along.quotient(rows);
    mine += thread.along < rows - mine * along;
    place.begin(held, mine);
    const auto left_out = place.left_out(held, 0);
    place.load(held, whole, left_out);
    place.apply_fused(held, 0, left_out);
    const auto states = held.reduce(1 << arguments.log2_lanes, arguments.run.size);
    const int team = thread.along >> arguments.log2_lanes;
    const bool speaks = !idle && thread.along == team << arguments.log2_lanes;
    typename HeldOf::Finishes finish;
    if (exchange.needless())
      finish = HeldOf::finish(states, states, arguments.fusing);
    else
      finish = HeldOf::finish(states, exchange(states, place, team, speaks), arguments.fusing);
    if (arguments.next_begins_late) let_next_kernel_begin();
    place.store(held, finish, mine);
  }
}

template <typename Operation, int kVector, int kKernel>
__global__ void __launch_bounds__(
    tuning::columns_kernel(kVector * sizeof(typename Operation::Source), kKernel).max_block,
    tuning::columns_kernel(kVector * sizeof(typename Operation::Source), kKernel).blocks)
    hold_columns(const ColumnsArguments<Operation> arguments) {
  if constexpr (kHasAllKernels)
    take_columns<Operation, kVector, kKernel>(arguments);
  else
    never_launched();
}

// Calls visitor.operator()<Operation>() as visit_operation() does, with an operation that knows no more than a scale
// and a bias, where columns are held raw all the same.
template <typename Visitor>
void visit_columns_operation(const Problem& problem, const Plan& plan, Visitor&& visitor) {
  if (!holds_biased_columns(problem, plan)) return visit_operation(problem, visitor);
  visit_operation<true>(problem, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    if constexpr (!kIsBackward<Operation> && std::is_same_v<Source, typename Operation::Result> && sizeof(Source) == 2)
      visitor.template operator()<BiasedForward<Source>>();
    else
      throw std::logic_error("no kernel holds biased columns of such elements raw");
  });
}

}  // namespace

void launch_columns(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  const ColumnsLayout layout = columns_layout(problem, plan);
  const auto log2 = [](int x) { return std::bit_width(static_cast<unsigned>(x)) - 1; };
  visit_columns_operation(problem, plan, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    ColumnsArguments<Operation> arguments{};
    arguments.source = static_cast<const Source*>(pointers.source);
    arguments.grad = static_cast<const Source*>(pointers.grad);
    arguments.result = static_cast<typename Operation::Result*>(pointers.result);
    const int outer_groups = problem.outer.rank;
    const Group* const outer = problem.outer.groups.begin();
    arguments.outer_run = work::Divider(outer_groups > 1 ? outer[1].size : 1);
    for (int operand = 0; operand < kOperandsOf<Operation>; ++operand) {
      arguments.outer_stride[operand] = outer_groups == 0 ? 0 : outer[outer_groups - 1].stride[operand];
      if (outer_groups > 1)
        arguments.outer_jump[operand] = outer[0].stride[operand] - outer[1].size * outer[1].stride[operand];
      arguments.dim_stride[operand] =
          problem.dim.rank == 0 ? 0 : problem.dim.groups[0].stride[operand] * layout.fold.elements;
    }
    arguments.fusing = fusing_of<Operation>(problem, pointers, problem.inner.groups[0], false);
    arguments.next_begins_late = pointers.next_begins_late;
    arguments.vectors = static_cast<int>(problem.outer.size * layout.inner);
    arguments.inner = work::Divider(layout.inner);
    arguments.dim = static_cast<int>(layout.fold.dim);
    arguments.whole = static_cast<int>(layout.whole);
    arguments.rows = static_cast<int>(layout.rows);
    // where threads have all of dim, they have every other row twice
    const int bytes = plan.vector * static_cast<int>(sizeof(Source));
    const int along = tuning::shifts_all_words(bytes, layout.kernel) ? 2 : layout.along;
    arguments.items = static_cast<int>((layout.rows + along - 1) / along);
    arguments.run = work::Divider(plan.run);
    arguments.along = work::Divider(along);
    arguments.log2_lanes = log2(work::tile_team(plan.run, layout.along));
    arguments.width = layout.width;
    arguments.step = layout.step;
    arguments.lead = layout.lead;
    arguments.strip_columns = static_cast<int>(problem.inner.size);
    arguments.beside = plan.beside;
    if (plan.beside != Beside::none) {
      arguments.beside_at = plan.shared_bytes - columns_beside_bytes(problem, plan, layout);
      arguments.beside_slots = columns_beside_slots(problem, plan, layout);
    } else if (Operation::kFused) {
      arguments.masks_are_words = masks_are_words(problem, plan);
    }
    arguments.shared = columns_shared_slots(problem, plan);
    arguments.shared_at = plan.shared_bytes - columns_shared_bytes(problem, plan);
    arguments.cluster = work::Divider(plan.cluster);
    arguments.log2_fold = log2(layout.fold.elements);
    arguments.strip = work::Divider(layout.fold.elements > 1 ? problem.inner.size : 1);
    arguments.slab = layout.fold.folds ? static_cast<int>(problem.dim.size * problem.inner.size) : 0;
    const int columns = (layout.width + layout.shift) * plan.vector / layout.fold.elements;
    const int teams = along >> arguments.log2_lanes;
    arguments.log2_parts[0] = work::log2_parts(columns, teams * layout.fold.elements, plan.block);
    arguments.log2_parts[1] = work::log2_parts(columns, plan.cluster, plan.block);
    const auto launch = [&]<int kVector>() {
      if constexpr (!kWidens<Operation, kVector>) leave_scale(arguments.fusing);
      constexpr int kKernels =
          tuning::columns_kernels(kVector * sizeof(Source), sizeof(Source), sizeof(typename Operation::Result),
                                  Operation::kDirection, Operation::kFused);
      constexpr int kFirst = tuning::first_columns_kernel(kVector * sizeof(Source), Operation::kFused);
      visit_int<kFirst, kKernels - 1>(layout.kernel, [&](auto kernel) {
        launch_grid<hold_columns<Operation, kVector, kernel>>(arguments, plan, pointers, stream);
      });
    };
    constexpr int kVector = tuning::kVectorBytes / sizeof(Source);
    if (plan.vector == kVector) return launch.template operator()<kVector>();
    constexpr int kWord = tuning::columns_word(sizeof(Source));
    if constexpr (kWord > 1) {
      if constexpr (!Operation::kBiased)
        if (plan.vector == 1) return launch.template operator()<1>();
      if (plan.vector > kWord) return launch.template operator()<tuning::kManyThreadsColumns>();
    }
    launch.template operator()<kWord>();
  });
}

}  // namespace ndsoftmax::cuda
