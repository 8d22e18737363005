// The ladder: one softmax over rows, written eleven times, each time with one idea more. To be read from top to bottom,
// and run by `ndsoftmax bench --suite ladder`, which compiles this file alone. ndsoftmax itself uses none of it.
//
// float32
//   serial_f32     the formula as it stands; one thread of a block adds up its row
//   naive_f32      a thread an element; the sum over lanes by shuffles, over warps through shared memory
//   naive_f32x4    a thread 4 elements, which one 16-byte load brings
//   tree_f32       subtracts the maximum, so that nothing overflows; two reductions, each a tree in shared memory
//   safe_f32       the same, reduced by shuffles: one barrier a reduction where the tree has log2(threads) + 1
//   safe_f32x4     and 4 elements a thread
//   online_f32     maximum and sum in one reduction, over pairs; rows of any width, read twice instead of three times
//   online_f32x4   and 4 elements at a time
// float16, with arithmetic in float32
//   safe_f16       half the bytes, but as many instructions to move them
//   safe_f16x2     a thread 2 elements, which one 4-byte load brings
//   safe_f16x8     a thread 8 elements, which one 16-byte load brings
//
// A block takes a row. Rows are dense, and start where a whole pack may: dim is a multiple of the pack's width. serial
// and online take any dim; the others hold a row in registers, one pack a thread, so that it has at most 1024 packs.
// naive and serial overflow: exp(89) is infinite in float32, and infinity / infinity is NaN.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

namespace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;
constexpr float kLowest = -INFINITY;

template <typename T>
struct Rows {
  const T* input;
  T* output;
  int dim;
};

// Neighbouring elements that one instruction loads or stores.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T at[kWidth];
};

template <typename T, int kWidth>
__device__ const Pack<T, kWidth>* packs_of(const T* row) {
  return reinterpret_cast<const Pack<T, kWidth>*>(row);
}

template <typename T, int kWidth>
__device__ Pack<T, kWidth>* packs_of(T* row) {
  return reinterpret_cast<Pack<T, kWidth>*>(row);
}

__device__ std::int64_t start_of_row(int dim) { return std::int64_t(blockIdx.x) * dim; }

// ---- reductions ----------------------------------------------------------------------------------------------------

struct Max {
  __device__ static float identity() { return kLowest; }
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Sum {
  __device__ static float identity() { return 0; }
  __device__ float operator()(float a, float b) const { return a + b; }
};

// The maximum of some elements, and the sum of their exponentials relative to it.
struct MaxSum {
  float max, sum;
};

// Two such pairs make that of the union: the sum with the lesser maximum is scaled down to the greater one.
struct Merge {
  __device__ static MaxSum identity() { return {kLowest, 0}; }
  __device__ MaxSum operator()(MaxSum a, MaxSum b) const {
    const float max = fmaxf(a.max, b.max);
    if (max == kLowest) return identity();  // nothing yet: -inf - -inf would be NaN
    return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
  }
};

__device__ float exchanged(float value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
__device__ MaxSum exchanged(MaxSum value, int lane_mask) {
  return {exchanged(value.max, lane_mask), exchanged(value.sum, lane_mask)};
}

// Five exchanges, after which every lane has the result: no memory, no barrier.
template <typename Combine, typename Value>
__device__ Value reduce_warp(Combine combine, Value value) {
  for (int lane_mask = kWarp / 2; lane_mask > 0; lane_mask /= 2) value = combine(value, exchanged(value, lane_mask));
  return value;
}

// Each warp leaves its result in shared memory; then every warp reduces all of these, so that nothing need be sent
// back. A kernel may use it once for each Combine: every instantiation has shared memory of its own.
template <typename Combine, typename Value>
__device__ Value reduce_block(Combine combine, Value value) {
  __shared__ Value of_warp[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  value = reduce_warp(combine, value);
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  return reduce_warp(combine, lane < warps ? of_warp[lane] : Combine::identity());
}

// Half of the values that are left are combined with the other half, and all threads wait, until one value is left.
template <typename Combine>
__device__ float reduce_tree(Combine combine, float value, float* partial) {
  const int thread = threadIdx.x;
  partial[thread] = value;
  int left = blockDim.x;
  __syncthreads();
  while (left > 1) {
    const int half = (left + 1) / 2;
    if (thread + half < left) partial[thread] = combine(partial[thread], partial[thread + half]);
    __syncthreads();
    left = half;
  }
  return partial[0];
}

// ---- the rungs -----------------------------------------------------------------------------------------------------

__global__ void serial(Rows<float> rows) {
  const float* input = rows.input + start_of_row(rows.dim);
  float* output = rows.output + start_of_row(rows.dim);
  __shared__ float sum;
  if (threadIdx.x == 0) {
    float added = 0;
    for (int i = 0; i < rows.dim; ++i) added += expf(input[i]);
    sum = added;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows.dim; i += blockDim.x) output[i] = expf(input[i]) / sum;
}

template <int kWidth>
__global__ void naive(Rows<float> rows) {
  const bool mine = int(threadIdx.x) < rows.dim / kWidth;
  Pack<float, kWidth> pack;
  float sum = 0;
  if (mine) {
    pack = packs_of<float, kWidth>(rows.input + start_of_row(rows.dim))[threadIdx.x];
    for (float& element : pack.at) sum += element = expf(element);
  }
  sum = reduce_block(Sum{}, sum);
  if (!mine) return;
  for (float& element : pack.at) element /= sum;
  packs_of<float, kWidth>(rows.output + start_of_row(rows.dim))[threadIdx.x] = pack;
}

__global__ void tree(Rows<float> rows) {
  __shared__ float partial[kMostThreads];
  const bool mine = int(threadIdx.x) < rows.dim;
  const float element = mine ? rows.input[start_of_row(rows.dim) + threadIdx.x] : kLowest;
  const float max = reduce_tree(Max{}, element, partial);
  __syncthreads();  // until all have read the maximum: the next tree overwrites it
  const float exponential = mine ? expf(element - max) : 0;
  const float sum = reduce_tree(Sum{}, exponential, partial);
  if (mine) rows.output[start_of_row(rows.dim) + threadIdx.x] = exponential / sum;
}

template <typename T, int kWidth>
__global__ void safe(Rows<T> rows) {
  const bool mine = int(threadIdx.x) < rows.dim / kWidth;
  float elements[kWidth];
  float max = kLowest, sum = 0;
  if (mine) {
    const auto pack = packs_of<T, kWidth>(rows.input + start_of_row(rows.dim))[threadIdx.x];
    for (int i = 0; i < kWidth; ++i) max = fmaxf(max, elements[i] = float(pack.at[i]));
  }
  max = reduce_block(Max{}, max);
  if (mine)
    for (float& element : elements) sum += element = expf(element - max);
  sum = reduce_block(Sum{}, sum);
  if (!mine) return;
  Pack<T, kWidth> pack;
  for (int i = 0; i < kWidth; ++i) pack.at[i] = T(elements[i] / sum);
  packs_of<T, kWidth>(rows.output + start_of_row(rows.dim))[threadIdx.x] = pack;
}

template <int kWidth>
__global__ void online(Rows<float> rows) {
  const auto* input = packs_of<float, kWidth>(rows.input + start_of_row(rows.dim));
  auto* output = packs_of<float, kWidth>(rows.output + start_of_row(rows.dim));
  const int packs = rows.dim / kWidth;
  MaxSum row = Merge::identity();
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack<float, kWidth> pack = input[i];  // as a whole: element by element, the compiler would load them so
    for (float element : pack.at) row = Merge{}(row, {element, 1});
  }
  row = reduce_block(Merge{}, row);
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<float, kWidth> pack = input[i];
    for (float& element : pack.at) element = expf(element - row.max) / row.sum;
    output[i] = pack;
  }
}

// ---- launching -----------------------------------------------------------------------------------------------------

struct Call {
  const void* input;
  void* output;
  int rows, dim;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run(void (*kernel)(Rows<T>), int width, bool any_dim = false) const {
    const int packs = dim / width;
    if (rows < 1 || dim < 1 || dim % width != 0 || (packs > kMostThreads && !any_dim)) return cudaErrorInvalidValue;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(rows);
    config.blockDim = dim3(packs < kMostThreads ? (packs + kWarp - 1) / kWarp * kWarp : kMostThreads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, Rows<T>{static_cast<const T*>(input), static_cast<T*>(output), dim});
  }
};

}  // namespace

// Runs a rung on `rows` dense rows of `dim` elements; returns a cudaError_t, 0 for success.
extern "C" int ladder_launch(const char* name, const void* input, void* output, int rows, int dim, void* stream) {
  const Call call{input, output, rows, dim, static_cast<cudaStream_t>(stream)};
  const std::string_view rung = name;
  if (rung == "serial_f32") return call.run(serial, 1, true);
  if (rung == "naive_f32") return call.run(naive<1>, 1);
  if (rung == "naive_f32x4") return call.run(naive<4>, 4);
  if (rung == "tree_f32") return call.run(tree, 1);
  if (rung == "safe_f32") return call.run(safe<float, 1>, 1);
  if (rung == "safe_f32x4") return call.run(safe<float, 4>, 4);
  if (rung == "online_f32") return call.run(online<1>, 1, true);
  if (rung == "online_f32x4") return call.run(online<4>, 4, true);
  if (rung == "safe_f16") return call.run(safe<__half, 1>, 1);
  if (rung == "safe_f16x2") return call.run(safe<__half, 2>, 2);
  if (rung == "safe_f16x8") return call.run(safe<__half, 8>, 8);
  return cudaErrorInvalidValue;
}

extern "C" const char* ladder_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
