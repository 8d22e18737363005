// What goes on beside a block's own work. Copies from global into shared memory that occupy neither registers nor, once
// issued, threads: what is under way is bounded by shared memory alone. What the blocks of a cluster send each other.
// And the order of kernels in a stream, as far as they may overlap.
#pragma once

#if !defined(__CUDACC__)
#include <cooperative_groups.h>  // the emulator's

#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif
#include <cuda_runtime.h>

#include <cstdint>

#include "host/tuning.hpp"

namespace ndsoftmax::cuda {

// Code for older GPUs falls away where the planner would not choose it.
#if defined(__CUDA_ARCH__)
inline constexpr bool kHasClusters = __CUDA_ARCH__ >= 900,
                      kHasAllKernels = __CUDA_ARCH__ >= 10 * tuning::kAllKernelsFrom;
#elif defined(NDSOFTMAX_EMULATES_SM_80)
inline constexpr bool kHasClusters = false, kHasAllKernels = true;
#else
inline constexpr bool kHasClusters = true, kHasAllKernels = true;
#endif

// The body of a kernel that the planner does not choose where it was compiled for.
__device__ __forceinline__ void never_launched() {
#if defined(__CUDACC__)
  __trap();
#endif
}

#if defined(__CUDACC__)

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A copy of 4, 8 or 16 bytes, to which both addresses are aligned. Not complete before await_copies() and a barrier.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
                 : "memory");
#else
  if constexpr (kBytes == 16)
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  else
    never_launched();
#endif
}

// The same, or zeros, where nothing is `wanted`: then nothing is read.
template <int kBytes>
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, bool wanted) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(wanted ? kBytes : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes),
                 "r"(wanted ? kBytes : 0)
                 : "memory");
#else
  never_launched();
#endif
}

// The same of 8 bytes, while L2 fetches their whole line of memory.
__device__ __forceinline__ void copy_async_with_line(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
  never_launched();
#endif
}

// Waits for all copies that this thread has issued.
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Blocks of this block's cluster.
__device__ __forceinline__ int cluster_size() {
#if __CUDA_ARCH__ >= 900
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return static_cast<int>(size);
#else
  return 1;
#endif
}

// Counts bytes that arrive in this block's shared memory (sm_90): what the blocks of a cluster send each other, or what
// is copied in bulk. It may be used again and again: each time is a phase, of alternating parity. What blocks send each
// other once in a kernel: all threads call open(), warps that send call await_cluster(), each block sends to all,
// itself included, and all threads wait(), after a barrier of the block where they did not await the cluster. Blocks
// arrive at the cluster's barrier once in a kernel: of warps that do not await it, none knows when it may do so again.
class ArrivalBarrier {
 public:
  // One thread calls it, before all others are told.
  __device__ __forceinline__ void init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&state_)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  // Says to the cluster that this block runs and can be sent to.
  __device__ __forceinline__ void open() {
    if (threadIdx.x == 0) init();
    arrive_cluster();
  }
  __device__ __forceinline__ static void arrive_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }
  // Until all blocks of the cluster have opened theirs.
  __device__ __forceinline__ static void await_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  // Sends a value to where `slot` is in the shared memory of block `rank` of the cluster; this barrier of that block
  // counts it. No fence and no barrier of the cluster, which would wait for everything that was stored before.
  template <typename T>
  __device__ __forceinline__ void send(const T& value, T* slot, int rank) {
#if __CUDA_ARCH__ >= 900
    unsigned to, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(slot)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(&state_)), "r"(rank));
    static_assert(sizeof(T) == 4 || sizeof(T) % 8 == 0);
    if constexpr (sizeof(T) == 4) {
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                   "r"(reinterpret_cast<const unsigned&>(value)), "r"(barrier)
                   : "memory");
    } else {
      unsigned long long words[sizeof(T) / 8];
      memcpy(words, &value, sizeof(T));
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T) / 8); ++i)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to + 8 * i),
                     "l"(words[i]), "r"(barrier)
                     : "memory");
    }
#endif
  }
  // One thread says that the phase is complete once so many bytes have arrived; some, or all, may have before.
  __device__ __forceinline__ void expect(unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state_)), "r"(bytes)
                 : "memory");
#endif
  }
  // Until the phase of this parity is complete; the first has 0.
  __device__ __forceinline__ void await(unsigned parity) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&state_)),
        "r"(parity)
        : "memory");
#endif
  }
  // All threads: until so many bytes have arrived, for the first time.
  __device__ __forceinline__ void wait(unsigned bytes) {
    if (threadIdx.x == 0) expect(bytes);
    await(0);
  }
  // Copies `bytes`, a multiple of 16, from global to shared memory, both aligned to 16; this barrier counts them.
  __device__ __forceinline__ void copy(void* to, const void* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&state_))
                 : "memory");
#endif
  }
  // What this thread has stored in shared memory comes before copies that are issued after a barrier of the block.
  __device__ __forceinline__ static void stored() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  // The other way: one thread copies `bytes`, a multiple of 16, from shared to global memory, both aligned to 16, and
  // goes on once they have been read.
  __device__ __forceinline__ static void copy_out(void* to, const void* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
  }

 private:
  std::uint64_t state_;
};

// Kernels are launched so that the next one in the stream may begin before the one before it has ended. Every kernel
// calls this before it touches global memory: it returns once what came before is complete. (Second launches of a call
// load the source before they do: the first launch let them begin when what the source waits for was complete.)
__device__ __forceinline__ void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next kernel take the place of those of this one that are done, and wait there. (Before
// await_kernel_before(), where more kernels would be under way, small ones took 5 % longer.)
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#else  // tests/cpp/emulator: copies are done when they are issued

template <int kBytes>
inline void copy_async(void* to, const void* from) {
  if ((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % kBytes != 0) {
    std::fprintf(stderr, "copy_async: %p and %p must be aligned to %d bytes\n", to, from, kBytes);
    std::abort();  // as a GPU would
  }
  std::memcpy(to, from, kBytes);
}
template <int kBytes>
inline void copy_async_or_zero(void* to, const void* from, bool wanted) {
  alignas(kBytes) static constexpr unsigned char kZeros[kBytes]{};
  copy_async<kBytes>(to, wanted ? from : kZeros);
}
inline void copy_async_with_line(void* to, const void* from) { copy_async<8>(to, from); }
inline void await_copies() {}

inline int cluster_size() { return static_cast<int>(::emulator::cluster_size()); }

class ArrivalBarrier {
 public:
  void init() { arrived_ = expected_ = phases_ = 0; }
  void open() {
    if (threadIdx.x == 0) init();
    arrive_cluster();
  }
  static void arrive_cluster() {
    may_send() = false;
    cooperative_groups::this_cluster().barrier_arrive();
  }
  static void await_cluster() {
    cooperative_groups::this_cluster().barrier_wait();
    may_send() = true;
  }
  template <typename T>
  void send(const T& value, T* slot, int rank) {
    if (!may_send()) {
      std::fprintf(stderr, "a thread sends to block %d, of which it does not know that it runs\n", rank);
      std::abort();  // where a GPU may fault
    }
    *static_cast<T*>(::emulator::map_to_rank(slot, rank)) = value;
    static_cast<ArrivalBarrier*>(::emulator::map_to_rank(this, rank))->arrived_ += sizeof(T);
  }
  void expect(unsigned bytes) {
    expected_ += bytes;
    ++phases_;
  }
  void await(unsigned parity) const {
    ::emulator::wait_until([&] { return (phases_ - (arrived_ < expected_ ? 1 : 0)) % 2 != parity; });
  }
  void wait(unsigned bytes) {
    if (threadIdx.x == 0) expect(bytes);
    await(0);
  }
  void copy(void* to, const void* from, unsigned bytes) {
    std::memcpy(__builtin_assume_aligned(to, 16), __builtin_assume_aligned(from, 16), bytes);
    arrived_ += bytes;
  }
  static void stored() {}
  static void copy_out(void* to, const void* from, unsigned bytes) {
    std::memcpy(__builtin_assume_aligned(to, 16), __builtin_assume_aligned(from, 16), bytes);
  }

 private:
  static bool& may_send() {
    static thread_local bool of_thread[1024];
    return of_thread[threadIdx.x];
  }

  std::atomic<unsigned> arrived_;
  unsigned expected_, phases_;  // of all phases that were begun; their number
};

inline void await_kernel_before() {}
inline void let_next_kernel_begin() {}

#endif

}  // namespace ndsoftmax::cuda
