// Copies by a block of what is a run in memory, into shared memory and out of it.
#pragma once

#include "cuda/async.cuh"
#include "cuda/vec.cuh"

namespace ndsoftmax::cuda {

// Calls some(i, count) for count numbers i, i + step, … at once, until all from `first` to `end` are done. No condition
// stands between those of a call: it would cost more than a copy does.
template <typename Some>
__device__ __forceinline__ void in_fours(int first, int end, int step, const Some& some) {
  int i = first;
#pragma unroll 1
  for (; i + 3 * step < end; i += 4 * step) some(i, std::integral_constant<int, 4>{});
#pragma unroll 1
  for (; i < end; i += step) some(i, std::integral_constant<int, 1>{});
}

// A run in global memory, whose `count` elements are whole vectors from `head` to `tail`: at either end, less than one.
template <typename T>
struct Run {
  static constexpr int kVector = tuning::kVectorBytes / sizeof(T);

  int count, head, tail;

  __device__ __forceinline__ Run(const T* first, int elements) : count(elements) {
    const auto phase = static_cast<int>(reinterpret_cast<std::uintptr_t>(first) / sizeof(T) % kVector);
    head = min(count, (kVector - phase) % kVector);
    tail = head + (count - head) / kVector * kVector;
  }
  __device__ __forceinline__ bool has_ends() const { return head > 0 || tail < count; }
  // By at least as many threads as a vector has elements.
  __device__ __forceinline__ void copy_ends(T* to, const T* from, int thread) const {
    if (thread < head) to[thread] = from[thread];
    if (tail + thread < count) to[tail + thread] = from[tail + thread];
  }
};

// One run, by `threads` threads. Both addresses are equal modulo 16. Into shared memory, or out of it.
template <bool kInto, typename T>
__device__ __forceinline__ void copy_run(T* to, const T* from, int count, int thread, int threads) {
  constexpr int kVector = Run<T>::kVector;
  const Run<T> run(from, count);
  in_fours(thread, (run.tail - run.head) / kVector, threads, [&](int vector, auto count) {
    T* const at = to + (run.head + vector * kVector);
    const T* const source = from + (run.head + vector * kVector);
    if constexpr (kInto) {
#pragma unroll
      for (int i = 0; i < count; ++i)
        copy_async<tuning::kVectorBytes>(at + i * threads * kVector, source + i * threads * kVector);
    } else {
      Vec<T, kVector> values[count];
#pragma unroll
      for (int i = 0; i < count; ++i) values[i] = Vec<T, kVector>::load(source + i * threads * kVector);
#pragma unroll
      for (int i = 0; i < count; ++i) values[i].store(at + i * threads * kVector);
    }
  });
  run.copy_ends(to, from, thread);
}

}  // namespace ndsoftmax::cuda
