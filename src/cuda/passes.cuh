// The two passes of a thread over what it has of a row, or of some columns, that are read twice: forwards for their
// state, backwards to write, as L2 still has the end. It goes by steps of as many vectors, of which two are under way.
// Where all blocks run at once, and meet between the passes, the last two stay in registers, and the first ones wait in
// shared memory.
#pragma once

#include "cuda/operation.cuh"
#include "cuda/vec.cuh"

namespace ndsoftmax::cuda {

template <typename Operation, typename Raw, int kVectors>
class Passes {
 public:
  using Raws = Raw[kVectors];
  using Vector = decltype(Raw::source);
  static constexpr int kSlots = kVectors * tuning::held_operands(Operation::kDirection);

  // Of `count` steps that are all alike the first `kept` wait in shared memory.
  __device__ __forceinline__ Passes(int count, bool meets, int kept)
      : count_(count), meets_(meets), kept_(meets ? kept : 0) {}

  // Calls load(step, raw, eviction) and take(raw) for each of them; in between, while the first two arrive,
  // others(raw), which may use what it is given. What is kept is not read again. Rather than results of the kernel
  // before, which have to be written when L2 has no room for them, that is what L2 drops: writing is left for when the
  // source has been read (1 x 500000 x 64 of 16 bits takes an H200 48.9 us, without 52.3; of float32 101.6, 103.1; 1 x
  // 125000 x 64 of float32 28.1, 28.9; 1 x 16777216 45.9, 47.4).
  template <typename Load, typename Others, typename Take>
  __device__ __forceinline__ void read(const Load& load, const Others& others, const Take& take) {
    static_assert(tuning::kMeetingHeldSteps == 2);  // earlier_ and later_
    const auto load_first = [&](int i, Raws& raw) {
      const bool again = !meets_ || (i >= kept_ && i < count_ - tuning::kMeetingHeldSteps);
      load(i, raw, again ? Eviction::normal() : Eviction::first());
    };
    if (count_ > 1) load_first(1, later_);
    others(earlier_);
    if (count_ > 0) load_first(0, earlier_);
#pragma unroll 2
    for (int i = 0; i < count_; ++i, swap()) {
      if (i < kept_) keep<kGrads>(slot(i), earlier_);
      take(earlier_);
      if (i + 2 < count_) load_first(i + 2, earlier_);
    }
  }

  // What read() leaves in registers, where another launch has read: calls load(step, raw).
  template <typename Load>
  __device__ __forceinline__ void load_last(const Load& load) {
    if (count_ > 1) load(count_ - 2, earlier_);
    if (count_ > 0) load(count_ - 1, later_);
  }

  // Calls store(step, raw) for each, and load(step, raw) for those that are read again; then others(raw).
  template <typename Load, typename Others, typename Store>
  __device__ __forceinline__ void write(const Load& load, const Others& others, const Store& store) {
#pragma unroll 2
    for (int i = count_ - 1; i >= 0; --i, swap()) {
      store(i, later_);
      if (i - 2 >= kept_)
        load(i - 2, later_);
      else if (i - 2 >= 0)
        take_kept<kGrads>(slot(i - 2), later_);
    }
    others(later_);
  }

 private:
  static constexpr bool kGrads = Operation::kDirection == Direction::backward;

  __device__ __forceinline__ static Vector* slot(int i) {
    return reinterpret_cast<Vector*>(dynamic_shared_memory()) + i * kSlots * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ void swap() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto other = earlier_[i];
      earlier_[i] = later_[i];
      later_[i] = other;
    }
  }

  int count_;
  bool meets_;
  int kept_;
  Raws earlier_, later_;
};

}  // namespace ndsoftmax::cuda
