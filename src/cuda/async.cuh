// Copies from global into shared memory that occupy neither registers nor, once issued, threads: what is under way is
// bounded by shared memory alone. And the order of kernels in a stream, as far as they may overlap.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ndsoftmax::cuda {

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
  else if constexpr (kBytes == 8)
    *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
  else
    *static_cast<unsigned*>(to) = *static_cast<const unsigned*>(from);
#endif
}

// Waits for all copies that this thread has issued.
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Counts the bytes of bulk copies (sm_90): one thread calls expect() and issues them, every thread waits.
class BulkBarrier {
 public:
  // By one thread, before the block's next barrier.
  __device__ __forceinline__ void init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&state_)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void expect(unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state_)), "r"(bytes)
                 : "memory");
#endif
  }
  // `bytes`, and both addresses, are multiples of 16.
  __device__ __forceinline__ void copy(void* to, const void* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&state_))
        : "memory");
#endif
  }
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&state_))
        : "memory");
#endif
  }

 private:
  std::uint64_t state_;
};

// Kernels are launched so that the next one in the stream may begin before the one before it has ended. Every kernel
// calls this before it touches global memory: it returns once what came before is complete.
__device__ __forceinline__ void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next kernel take the place of those of this one that are done, and wait there.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#else  // tests/cpp/emulator: copies are done when they are issued

template <int kBytes>
inline void copy_async(void* to, const void* from) {
  std::memcpy(__builtin_assume_aligned(to, kBytes), __builtin_assume_aligned(from, kBytes), kBytes);
}
inline void await_copies() {}

class BulkBarrier {
 public:
  void init() {}
  void expect(unsigned) {}
  void copy(void* to, const void* from, unsigned bytes) {
    std::memcpy(__builtin_assume_aligned(to, 16), __builtin_assume_aligned(from, 16), bytes);
  }
  void wait() {}
};

inline void await_kernel_before() {}
inline void let_next_kernel_begin() {}

#endif

}  // namespace ndsoftmax::cuda
