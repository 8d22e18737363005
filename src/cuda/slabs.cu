// Strided regime, slabs of dim × inner that are small, and follow each other without gaps: a block copies a run of them
// into shared memory as vectors, wherever that begins, threads hold columns, and put results back, and the block copies
// those out as one run. So memory sees whole vectors, however short and unaligned the rows of slabs are.
//
// What bounds it is memory for 32 bits, and instructions for 16, of which a multiprocessor executes 32 for each element
// in the time in which memory moves it (H200): 17 to 24 are taken. So bulk copies are one thread's, words are of two
// columns where these can be, and a block has several of them for each thread, as beginning and ending costs a warp as
// much as a word does.
//
// Assumes: nothing fused, but for the scale of gradients; the source and the result of one type, and all operands
// contiguous; the result begins within a vector as the source does, whose place it takes in shared memory.
#include <bit>

#include "cuda/async.cuh"
#include "cuda/copies.cuh"
#include "cuda/dispatch.cuh"

namespace ndsoftmax::cuda {
namespace {

template <typename Operation>
struct SlabArguments {
  using Source = typename Operation::Source;

  const Source* source;
  const Source* grad;
  typename Operation::Result* result;
  std::int64_t slabs;
  std::int64_t first_block;
  int slabs_per_block;
  int slab, dim, inner;  // elements
  int live;              // elements of dim that a thread has at most
  int operand_bytes;     // of shared memory
  int log2_run;          // threads of a warp that have neighbouring columns
  work::Divider words;   // of a row of a slab
  Fusing<Operation> fusing;
};

// A block's slabs, and where they are in shared memory: as far from a multiple of a vector as they are in memory. From
// sm_90 on, one thread copies all that is whole vectors.
template <typename Operation>
class Slabs {
 public:
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  static constexpr bool kBackward = kIsBackward<Operation>;

  int count;  // of slabs
  Source* source;
  int to_grad;  // elements

  __device__ __forceinline__ Slabs(const SlabArguments<Operation>& arguments, ArrivalBarrier& arrived) {
    const std::int64_t slab = (arguments.first_block + blockIdx.x) * arguments.slabs_per_block;
    count = static_cast<int>(min(static_cast<std::int64_t>(arguments.slabs_per_block), arguments.slabs - slab));
    elements_ = count * arguments.slab;
    first_ = slab * arguments.slab;
    const Source* const from = arguments.source + first_;
    const Source* const grad_from = kBackward ? arguments.grad + first_ : from;
    source = place(from, 0);
    if constexpr (kBackward) to_grad = static_cast<int>(place(grad_from, arguments.operand_bytes) - source);
    await_kernel_before();
    if constexpr (kHasClusters) {
      const Run<Source> run(from, elements_), of_grad(grad_from, elements_);
      if (threadIdx.x == 0) {
        arrived.init();
        arrived.expect((run.tail - run.head + (kBackward ? of_grad.tail - of_grad.head : 0)) * sizeof(Source));
        copy_in(arrived, source, from, run);
        if constexpr (kBackward) copy_in(arrived, source + to_grad, grad_from, of_grad);
      }
      if (run.has_ends()) run.copy_ends(source, from, threadIdx.x);
      if constexpr (kBackward)
        if (of_grad.has_ends()) of_grad.copy_ends(source + to_grad, grad_from, threadIdx.x);
      __syncthreads();
      arrived.await(0);
    } else {
      copy_run<true>(source, from, elements_, threadIdx.x, blockDim.x);
      if constexpr (kBackward) copy_run<true>(source + to_grad, grad_from, elements_, threadIdx.x, blockDim.x);
      await_copies();
      __syncthreads();
    }
  }

  // Takes out the results, which have replaced the source.
  __device__ __forceinline__ void store(const SlabArguments<Operation>& arguments) const {
    Result* const to = arguments.result + first_;
    const auto* const from = reinterpret_cast<const Result*>(source);
    if constexpr (kHasClusters) {
      const Run<Result> run(to, elements_);
      ArrivalBarrier::stored();
      __syncthreads();
      if (run.has_ends()) run.copy_ends(to, from, threadIdx.x);
      if (threadIdx.x == 0 && run.tail > run.head)
        ArrivalBarrier::copy_out(to + run.head, from + run.head, (run.tail - run.head) * sizeof(Result));
    } else {
      __syncthreads();
      copy_run<false>(to, from, elements_, threadIdx.x, blockDim.x);
    }
  }

 private:
  __device__ __forceinline__ static Source* place(const Source* from, int bytes) {
    const auto phase = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % tuning::kVectorBytes);
    return reinterpret_cast<Source*>(dynamic_shared_memory() + bytes + phase);
  }
  __device__ __forceinline__ static void copy_in(ArrivalBarrier& arrived, Source* to, const Source* from,
                                                 const Run<Source>& run) {
    if (run.tail > run.head) arrived.copy(to + run.head, from + run.head, (run.tail - run.head) * sizeof(Source));
  }

  std::int64_t first_;  // element
  int elements_;
};

// The threads that share a column, which are `run` lanes apart; often there is but one, and nothing to do: so a loop,
// where Lanes asks for each step whether it is one.
struct AlongDim {
  int run;

  template <typename Real>
  __device__ __forceinline__ Real max(Real x) const {
#pragma unroll 1
    for (int offset = run; offset < kWarp; offset *= 2) x = larger(x, __shfl_xor_sync(kAllLanes, x, offset));
    return x;
  }
  template <typename Real>
  __device__ __forceinline__ Real sum(Real x) const {
#pragma unroll 1
    for (int offset = run; offset < kWarp; offset *= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
  }
};

// kItems: elements of dim that a thread has, rounded up; kColumns: of a word.
template <typename Operation, int kItems, int kColumns>
__device__ __forceinline__ void take_slabs(const SlabArguments<Operation>& arguments) {
  using Source = typename Operation::Source;
  using Result = typename Operation::Result;
  using Real = typename Operation::Real;
  using Word = Vec<Source, kColumns>;
  constexpr bool kBackward = kIsBackward<Operation>;
  constexpr int kFull = tuning::slab_items_before(kItems);  // that every thread has

  const Operation operation = arguments.fusing.operation;
  __shared__ ArrivalBarrier arrived;
  const Slabs<Operation> slabs(arguments, arrived);
  const work::SlabThread thread = work::slab_thread(threadIdx.x, arguments.log2_run);
  const int run = 1 << arguments.log2_run, along = kWarp >> arguments.log2_run;
  const int step = along * arguments.inner, left = arguments.dim - thread.along, turn = blockDim.x / kWarp * run;
  const Live<kFull + 1> live{arguments.live};  // (of an item more than there is, has() says that it is not)
  const AlongDim team{run};
  const auto has = [&](int item) { return item < kFull || item * along < left; };
  const int words = slabs.count * arguments.words.size;
  for (int first = thread.first; first < words; first += turn) {  // all threads of a warp go on, or none
    const int number = first + thread.beside, slab = arguments.words.quotient(number);
    const bool exists = number < words;
    const int word = number - slab * arguments.words.size;
    Source* const at = slabs.source + slab * arguments.slab + word * kColumns + thread.along * arguments.inner;
    Word source[kItems], grad[kItems];
    const auto nothing = Word::filled(kBackward ? 0 : -std::numeric_limits<Real>::infinity()), zero = Word::filled(0);
    if (exists) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item >= kFull) source[item] = nothing, grad[item] = zero;
        if (item >= live || !has(item)) continue;
        source[item] = Word::load(at + item * step);
        if constexpr (kBackward) grad[item] = Word::load(at + slabs.to_grad + item * step);
      }
    } else {
#pragma unroll
      for (int item = 0; item < kItems; ++item) source[item] = nothing, grad[item] = zero;
    }
    typename Operation::Term terms[kColumns][kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item >= live) break;
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        terms[k][item] = Operation::term(source[item].widened(k), kBackward ? grad[item].widened(k) : 0);
    }
    typename Operation::Finish finish[kColumns];
    if constexpr (kBackward) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        finish[k] = operation.finish(operation.template reduce<kItems, 1, 1>(terms[k], live, team));
    } else {
#pragma unroll
      for (int item = 1; item < kItems; ++item) source[0] = source[0].larger(source[item]);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        const typename Operation::State largest{team.max(source[0].widened(k)), 0};
        finish[k] = operation.finish(operation.template exponentiated<kItems, 1, 1>(terms[k], live, largest, team));
      }
    }
    operation.with_log([&](auto log) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item >= live) break;
        const auto results = Vec<Result, kColumns>::narrowed([&](int k) { return finish[k](terms[k][item], log); });
        if (exists && has(item)) results.store(reinterpret_cast<Result*>(at + item * step));
      }
    });
  }
  let_next_kernel_begin();  // (earlier, its blocks crowd on the multiprocessors that are done first: 3 to 7 % longer)
  slabs.store(arguments);
}

template <typename Operation, int kItems, int kColumns>
__global__ void __launch_bounds__(tuning::kSlabMaxBlock) slab_columns(const SlabArguments<Operation> arguments) {
  if constexpr (kHasAllKernels)
    take_slabs<Operation, kItems, kColumns>(arguments);
  else
    never_launched();
}

}  // namespace

void launch_slabs(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream) {
  visit_operation<false>(problem, [&]<typename Operation>() {
    using Source = typename Operation::Source;
    using Result = typename Operation::Result;
    if constexpr (!tuning::has_slabs(sizeof(Source), sizeof(Result))) {
      throw std::logic_error("slabs of this type are never held");
    } else {
      SlabArguments<Operation> arguments{};
      arguments.source = static_cast<const Source*>(pointers.source);
      arguments.grad = static_cast<const Source*>(pointers.grad);
      arguments.result = static_cast<Result*>(pointers.result);
      arguments.slabs = problem.outer.size;
      arguments.dim = static_cast<int>(problem.dim.size);
      arguments.inner = static_cast<int>(problem.inner.size);
      arguments.slab = arguments.dim * arguments.inner;
      arguments.slabs_per_block = plan.rows_per_block / arguments.inner;
      arguments.live = plan.items;
      arguments.operand_bytes = plan.shared_bytes / (kIsBackward<Operation> ? 2 : 1);
      arguments.log2_run = std::countr_zero(static_cast<unsigned>(plan.run));
      arguments.words = work::Divider(problem.inner.size / plan.vector);
      arguments.fusing = fusing_of<Operation>(problem, pointers, {}, false);
      visit_int<1, tuning::slab_word(sizeof(Source))>(plan.vector, [&](auto columns) {
        constexpr int kMost = tuning::slab_most_items(sizeof(Source), columns, Operation::kDirection);
        visit_items<tuning::slab_items, kMost>(plan.items, [&](auto items) {
          launch_grid<slab_columns<Operation, items, columns>>(arguments, plan, pointers, stream);
        });
      });
    }
  });
}

}  // namespace ndsoftmax::cuda
