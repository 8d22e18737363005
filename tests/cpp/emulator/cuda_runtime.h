// A CUDA that runs on the CPU, for tests of the kernels on machines without a GPU. Standing in for the runtime's
// header, it lets an ordinary C++ compiler take src/cuda as it is. Threads of a block are fibers of one thread of the
// machine, so that `static thread_local` is what __shared__ should be; blocks of a cluster, and all of a grid that is
// launched cooperatively, are threads of the machine.
// It tells whether kernels compute what they should and touch only what is theirs. It knows nothing of memory ordering,
// races or speed: those need a GPU and compute-sanitizer.
#pragma once

#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#undef __grid_constant__
#undef __noinline__
#undef __shared__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__ __attribute__((noinline))

namespace emulator {

struct Fiber {
  unsigned thread, block, block_size, grid_size;
};
Fiber& current();  // the thread that is running

template <unsigned Fiber::* kMember>
struct Index {
  struct {
    operator unsigned() const { return current().*kMember; }
  } x;
};

void sync_block();
void sync_warp(const void* mine, void* others, int bytes, int lane_mask);  // exchanges with lane ^ lane_mask
unsigned cluster_size();
unsigned arrive_cluster();
void wait_cluster(unsigned ticket);
void* map_to_rank(void* shared, unsigned rank);
void yield();  // lets other threads of the block run
void progressed();

// How many kernels a program has: each takes its time to compile, and its room. Those that are launched somewhere count
// themselves, before main.
int& kernels_compiled();
template <auto kKernel>
inline const bool counted = ++kernels_compiled() > 0;

template <typename Condition>
void wait_until(const Condition& condition) {
  while (!condition()) yield();
  progressed();
}

unsigned char* dynamic_shared();

extern unsigned most_at_once;  // blocks of a grid that is launched cooperatively

// Runs body for every thread of the grid.
void run(const cudaLaunchConfig_t& config, void (*body)(void*), void* context);

}  // namespace emulator

inline constexpr emulator::Index<&emulator::Fiber::thread> threadIdx{};
inline constexpr emulator::Index<&emulator::Fiber::block> blockIdx{};
inline constexpr emulator::Index<&emulator::Fiber::block_size> blockDim{};
inline constexpr emulator::Index<&emulator::Fiber::grid_size> gridDim{};

inline void __syncthreads() { ::emulator::sync_block(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask) {
  T other;
  ::emulator::sync_warp(&value, &other, sizeof(T), lane_mask);
  return other;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return __shfl_xor_sync(mask, value, lane ^ ((lane & ~(width - 1)) | (from & (width - 1))));
}

using std::max;
using std::min;

inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline unsigned __float_as_uint(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((std::uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(std::uint64_t(a) * b >> 32); }
inline double __hiloint2double(int high, int low) {
  const std::uint64_t bits = std::uint64_t(unsigned(high)) << 32 | unsigned(low);
  double y;
  std::memcpy(&y, &bits, 8);
  return y;
}
inline int __double2loint(double x) {
  std::uint64_t y;
  std::memcpy(&y, &x, 8);
  return int(y);
}
inline int __double2hiint(double x) {
  std::uint64_t y;
  std::memcpy(&y, &x, 8);
  return int(y >> 32);
}

// ---- the parts of the runtime that launchers use -------------------------------------------------------------------

inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}

template <typename Arguments>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Arguments)) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

template <typename Arguments>
cudaError_t cudaFuncSetAttribute(void (*)(Arguments), cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <typename Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Arguments),
                               const Arguments& arguments) {
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeCooperative && config->gridDim.x > ::emulator::most_at_once)
      return cudaErrorCooperativeLaunchTooLarge;
  struct Call {
    void (*kernel)(Arguments);
    const Arguments& arguments;
  } call{kernel, arguments};
  ::emulator::run(
      *config,
      [](void* context) {
        const Call& here = *static_cast<Call*>(context);
        here.kernel(here.arguments);
      },
      &call);
  return cudaSuccess;
}
