// Vec: neighbouring elements that move with one instruction, and the conversions between what is stored and what is
// computed with. Elements stay packed as 32-bit words, as they were loaded, until they are widened: taken apart
// earlier, 16-bit ones would cost an instruction each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <type_traits>

namespace ndsoftmax::cuda {

// float sums for 16- and 32-bit elements, double for double
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// By more than 31 bits: 0.
__device__ __forceinline__ unsigned shifted_left(unsigned x, int bits) {
#if defined(__CUDACC__)
  asm("shl.b32 %0, %0, %1;" : "+r"(x) : "r"(bits));
  return x;
#else
  return bits > 31 ? 0 : x << bits;
#endif
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T narrow(Accumulator<T> x) {
  if constexpr (sizeof(T) > 2)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }  // of a NaN and a number, the number
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// Of a power of two.
__device__ __forceinline__ int log2_of(int x) {
#if defined(__CUDACC__)
  return 31 - __clz(x);
#else
  return std::countr_zero(static_cast<unsigned>(x));
#endif
}

// Loads and stores are not moved over this by the compiler.
__device__ __forceinline__ void keep_order() {
#if defined(__CUDACC__)
  asm volatile("" ::: "memory");
#endif
}

// Bytes of `word` by the digits of `selector`: where its highest bit is set, the sign of the byte, eight times.
__device__ __forceinline__ unsigned sign_of_bytes(unsigned word, unsigned selector) {
#if defined(__CUDACC__)
  unsigned result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "r"(selector));
  return result;
#else
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    if (word >> ((selector >> 4 * i & 3) * 8 + 7) & 1) result |= 0xffu << 8 * i;
  return result;
#endif
}

// In PTX, because the compiler takes some assignments of a uint4 apart.
__device__ __forceinline__ void store_16_bytes(void* to, const unsigned* words) {
#if defined(__CUDACC__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#else
  *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// What L2 is to do with what is read: drop it before all else, or as ever.
struct Eviction {
  std::uint64_t policy = 0;

  __device__ __forceinline__ static Eviction first() {
    Eviction eviction;
#if __CUDA_ARCH__ >= 800
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(eviction.policy));
#endif
    return eviction;
  }
  __device__ __forceinline__ static Eviction normal() {
    Eviction eviction;
#if __CUDA_ARCH__ >= 800
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(eviction.policy));
#endif
    return eviction;
  }
};

template <typename T, int N>
struct Vec {
  static constexpr int kBytes = sizeof(T) * N;
  static constexpr bool kPaired = sizeof(T) == 2 && N > 1;

  unsigned words[kBytes < 4 ? 1 : kBytes / 4];  // a single 16-bit element is in the lower half

  // to and from global memory
  __device__ __forceinline__ static Vec load(const T* from) {
    Vec vec;
    if constexpr (kBytes == 2) {
      vec.words[0] = *reinterpret_cast<const unsigned short*>(from);
    } else if constexpr (kBytes == 4) {
      vec.words[0] = *reinterpret_cast<const unsigned*>(from);
    } else if constexpr (kBytes == 8) {
      const uint2 unit = *reinterpret_cast<const uint2*>(from);
      vec.words[0] = unit.x, vec.words[1] = unit.y;
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 unit = reinterpret_cast<const uint4*>(from)[i];
        vec.words[4 * i] = unit.x, vec.words[4 * i + 1] = unit.y;
        vec.words[4 * i + 2] = unit.z, vec.words[4 * i + 3] = unit.w;
      }
    }
    return vec;
  }

  // The same of 16 bytes, while L2 fetches their whole line of memory.
  __device__ __forceinline__ static Vec load_with_line(const T* from) {
    static_assert(kBytes == 16);
#if defined(__CUDACC__)
    Vec vec;
    asm volatile("ld.global.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vec.words[0]), "=r"(vec.words[1]), "=r"(vec.words[2]), "=r"(vec.words[3])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return vec;
#else
    return load(from);
#endif
  }

  // The same, where L2 is told what to do with it.
  __device__ __forceinline__ static Vec load(const T* from, [[maybe_unused]] Eviction eviction) {
    static_assert(kBytes == 16);
#if __CUDA_ARCH__ >= 800
    Vec vec;
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(vec.words[0]), "=r"(vec.words[1]), "=r"(vec.words[2]), "=r"(vec.words[3])
                 : "l"(__cvta_generic_to_global(from)), "l"(eviction.policy)
                 : "memory");
    return vec;
#else
    return load(from);
#endif
  }

  // Loads it, if that is `wanted`, and else keeps what it has. In PTX, because the compiler would rather branch, and
  // make the loads of one branch wait for those of the other.
  __device__ __forceinline__ void load_if(bool wanted, const T* from) {
#if defined(__CUDACC__)
    if constexpr (kBytes <= 4) {
      const auto address = __cvta_generic_to_global(from);
      if constexpr (kBytes == 2)
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.u16 %0, [%1];\n}"
                     : "+r"(words[0])
                     : "l"(address), "r"(int{wanted})
                     : "memory");
      else
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.b32 %0, [%1];\n}"
                     : "+r"(words[0])
                     : "l"(address), "r"(int{wanted})
                     : "memory");
      return;
    }
    if constexpr (kBytes == 8) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p ld.global.v2.b32 {%0, %1}, [%2];\n}"
                   : "+r"(words[0]), "+r"(words[1])
                   : "l"(__cvta_generic_to_global(from)), "r"(int{wanted})
                   : "memory");
      return;
    }
#endif
    if (wanted) *this = load(from);
  }
  // Of a pair both elements, or the first alone, beside which comes 0.
  __device__ __forceinline__ void load_up_to_if(bool wanted, bool both, const T* from) {
    static_assert(kBytes == 4 && N == 2);
    load_if(wanted && both, from);
    Vec<T, 1> first{words[0]};
    first.load_if(wanted && !both, from);
    words[0] = first.words[0];
  }

  // Loads the elements from `begin` to `end`, of 16 or 32 bits, one by one, beside others of `rest`.
  __device__ __forceinline__ static Vec load_part(const T* from, int begin, int end, const Vec& rest) {
    static_assert(sizeof(T) <= 4);
    Vec<T, 1> elements[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      elements[k].words[0] = kPaired ? rest.words[k / 2] >> (k % 2 * 16) : rest.words[k * sizeof(T) / 4];
      elements[k].load_if(k >= begin && k < end, from + k);
    }
    Vec vec;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(words) / 4); ++i)
      vec.words[i] =
          kPaired ? (elements[2 * i].words[0] & 0xffff) | elements[2 * i + 1].words[0] << 16 : elements[i].words[0];
    return vec;
  }

  // The elements from `begin` to `end`, one by one.
  __device__ __forceinline__ void store_part(T* to, int begin, int end) const {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k >= begin && k < end) extract(k, to + k);
  }

  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kBytes == 2)
      *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(words[0]);
    else if constexpr (kBytes == 4)
      *reinterpret_cast<unsigned*>(to) = words[0];
    else if constexpr (kBytes == 8)
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) store_16_bytes(to + i * 16 / sizeof(T), words + 4 * i);
    }
  }

  // Whole vectors of 16 bytes, or of 8, to shared memory.
  __device__ __forceinline__ void store_shared(T* to) const {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(to)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    if constexpr (kBytes == 8) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }

  __device__ __forceinline__ Accumulator<T> widened(int k) const {
    if constexpr (sizeof(T) == 8)
      return __hiloint2double(static_cast<int>(words[2 * k + 1]), static_cast<int>(words[2 * k]));
    else if constexpr (sizeof(T) == 4)
      return __uint_as_float(words[k]);
    else if constexpr (std::is_same_v<T, __half>)
      return __half2float(get(k));
    else
      return __uint_as_float(k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u);  // a float's upper half
  }

  // The larger of each two elements; of a NaN and a number, the number.
  __device__ __forceinline__ Vec larger(const Vec& other) const {
    Vec vec;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(words) / 4); ++i) {
      if constexpr (sizeof(T) == 2) {
        using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
        const Pair most =
            __hmax2(reinterpret_cast<const Pair&>(words[i]), reinterpret_cast<const Pair&>(other.words[i]));
        vec.words[i] = reinterpret_cast<const unsigned&>(most);
      } else if constexpr (sizeof(T) == 4) {
        vec.words[i] = __float_as_uint(fmaxf(widened(i), other.widened(i)));
      } else if (i % 2 == 0) {
        const double most = fmax(widened(i / 2), other.widened(i / 2));
        vec.words[i] = static_cast<unsigned>(__double2loint(most));
        vec.words[i + 1] = static_cast<unsigned>(__double2hiint(most));
      }
    }
    return vec;
  }

  // 16-bit elements
  __device__ __forceinline__ T get(int k) const {
    const auto bits = static_cast<unsigned short>(words[k / 2] >> (k % 2 * 16));
    if constexpr (std::is_same_v<T, __half>)
      return __ushort_as_half(bits);
    else
      return __ushort_as_bfloat16(bits);
  }

  // Pairs of 16 bits are filled with 0 or an infinity, and nothing else, without a conversion: that would be repeated
  // wherever they are.
  __device__ __forceinline__ static Vec filled(Accumulator<T> value) {
    if constexpr (kPaired) {
      constexpr unsigned kPair = 0x10001u, kInfinity = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
      Vec vec;
#pragma unroll
      for (unsigned& word : vec.words) word = value == 0 ? 0 : (kInfinity | (value < 0 ? 0x8000u : 0)) * kPair;
      return vec;
    } else {
      return narrowed([&](int) { return value; });
    }
  }

  // The largest of the elements of all vectors.
  template <int kVecs>
  __device__ __forceinline__ static Accumulator<T> largest(const Vec (&vecs)[kVecs]) {
    Vec each = vecs[0];
#pragma unroll
    for (int i = 1; i < kVecs; ++i) each = each.larger(vecs[i]);
    Accumulator<T> most = each.widened(0);
#pragma unroll
    for (int k = 1; k < N; ++k) most = cuda::larger(most, each.widened(k));
    return most;
  }

  // Drops the first element, and has a new last one: from memory, if that exists, or 0. A loop of this is short code
  // for what is rare.
  __device__ __forceinline__ void push(bool exists, const T* from) {
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) words[i] = words[i] >> 16 | (i + 1 < N / 2 ? words[i + 1] << 16 : 0);
    } else {
      constexpr int kStep = static_cast<int>(sizeof(words) / 4) / N;
#pragma unroll
      for (int i = 0; i < kStep * (N - 1); ++i) words[i] = words[i + kStep];
    }
    if (exists)
      insert(N - 1, from);
    else
      set(N - 1, 0);
  }

  // Element k from memory; the others keep their values.
  __device__ __forceinline__ void insert(int k, const T* from) {
    if constexpr (sizeof(T) == 2) {
      const unsigned bits = *reinterpret_cast<const unsigned short*>(from);
      words[k / 2] = k % 2 == 0 ? (words[k / 2] & 0xffff0000u) | bits : (words[k / 2] & 0xffffu) | bits << 16;
    } else {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i)
        words[k * (sizeof(T) / 4) + i] = reinterpret_cast<const unsigned*>(from)[i];
    }
  }

  __device__ __forceinline__ void set(int k, Accumulator<T> value) {
    const T element = narrow<T>(value);
    insert(k, &element);
  }

  // Element k to memory.
  __device__ __forceinline__ void extract(int k, T* to) const {
    if constexpr (sizeof(T) == 2)
      *to = get(k);
    else
      *to = widened(k);
  }

  // From values(0), …, values(N - 1).
  template <typename Values>
  __device__ __forceinline__ static Vec narrowed(const Values& values) {
    Vec vec;
    if constexpr (kPaired) {
#pragma unroll
      for (int k = 0; k < N; k += 2) vec.words[k / 2] = pair(values(k), values(k + 1));
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if constexpr (sizeof(T) == 2)
          vec.words[0] = pair(values(k), 0);
        else if constexpr (sizeof(T) == 4)
          vec.words[k] = __float_as_uint(values(k));
        else {
          const double value = values(k);
          vec.words[2 * k] = static_cast<unsigned>(__double2loint(value));
          vec.words[2 * k + 1] = static_cast<unsigned>(__double2hiint(value));
        }
      }
    }
    return vec;
  }

 private:
  __device__ __forceinline__ static unsigned pair(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 both = __floats2half2_rn(low, high);
      return reinterpret_cast<const unsigned&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const unsigned&>(both);
    }
  }
};

// What a thread has loaded waits in shared memory, in slots of its own, which are a block apart: first those of the
// sources, then, if there are any, those of the gradients.
template <bool kGrads, typename Vector, typename Raw, int kCount>
__device__ __forceinline__ void keep(Vector* slots, const Raw (&raw)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    slots[i * blockDim.x] = raw[i].source;
    if constexpr (kGrads) slots[(kCount + i) * blockDim.x] = raw[i].grad;
  }
}
template <bool kGrads, typename Vector, typename Raw, int kCount>
__device__ __forceinline__ void take_kept(const Vector* slots, Raw (&raw)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    raw[i].source = slots[i * blockDim.x];
    if constexpr (kGrads) raw[i].grad = slots[(kCount + i) * blockDim.x];
  }
}

}  // namespace ndsoftmax::cuda
