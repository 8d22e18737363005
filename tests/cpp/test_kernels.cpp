// Every CUDA kernel, run by the emulator, against float64: every regime that takes a problem, all operations and
// dtypes, rows that start anywhere, strides of all kinds, plain and with everything that can be fused. Memory around
// the result must stay as it was.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "cuda/launch.hpp"

using namespace ndsoftmax;

namespace {

using Ints = std::vector<std::int64_t>;

constexpr unsigned char kUntouched = 0xa5;
constexpr std::int64_t kMargin = 64;  // elements around each tensor

std::mt19937 random_bits(3);

// A tensor in memory of its own, with margins, `offset` elements past an aligned address.
struct Tensor {
  Tensor(const Ints& sizes_, const Ints& strides_, DType dtype_, std::int64_t offset)
      : sizes(sizes_), strides(strides_), dtype(dtype_), first(kMargin + offset) {
    std::int64_t last = 0;
    for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    bytes.resize((first + last + 1 + kMargin) * size_of(dtype) + 16, kUntouched);
  }

  unsigned char* base() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    return bytes.data() + (16 - address % 16) % 16;
  }
  void* data() { return base() + first * size_of(dtype); }
  TensorView view() { return {data(), dtype, static_cast<int>(sizes.size()), sizes.data(), strides.data()}; }

  std::int64_t offset_of(std::int64_t index) const {
    std::int64_t offset = 0;
    for (std::size_t d = sizes.size(); d-- > 0; index /= sizes[d]) offset += index % sizes[d] * strides[d];
    return offset;
  }
  double get(std::int64_t index) {
    const void* at = base() + (first + offset_of(index)) * size_of(dtype);
    switch (dtype) {
      case DType::float16: return __half2float(*static_cast<const __half*>(at));
      case DType::bfloat16: return __bfloat162float(*static_cast<const __nv_bfloat16*>(at));
      case DType::float32: return *static_cast<const float*>(at);
      case DType::float64: return *static_cast<const double*>(at);
    }
    return 0;
  }
  void set(std::int64_t index, double value) {
    void* at = base() + (first + offset_of(index)) * size_of(dtype);
    switch (dtype) {
      case DType::float16: *static_cast<__half*>(at) = __float2half(static_cast<float>(value)); break;
      case DType::bfloat16: *static_cast<__nv_bfloat16*>(at) = __float2bfloat16(static_cast<float>(value)); break;
      case DType::float32: *static_cast<float*>(at) = static_cast<float>(value); break;
      case DType::float64: *static_cast<double*>(at) = value; break;
    }
  }

  std::int64_t elements() const {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  }

  Ints sizes, strides;
  DType dtype;
  std::int64_t first;
  std::vector<unsigned char> bytes;
};

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::float16: return 2e-3;
    case DType::bfloat16: return 1.6e-2;
    case DType::float32: return 3e-6;
    case DType::float64: return 1e-13;
  }
  return 0;
}

struct Case {
  Ints sizes, strides;  // empty strides: contiguous
  Ints dims;
  std::int64_t offset = 0;  // of every tensor, in elements
  bool peaked = false;      // most elements lie far below the maximum, which few threads see
};

// Below, a relative error says nothing: numbers are denormal.
double smallest_normal(DType dtype) {
  switch (dtype) {
    case DType::float16: return 6.2e-5;
    case DType::bfloat16:
    case DType::float32: return 1.2e-38;
    case DType::float64: return 2.3e-308;
  }
  return 0;
}

Ints contiguous(const Ints& sizes) {
  Ints strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

// What is fused into a run, with tensors to match. Everything is included where there is no mask.
struct Fused {
  explicit Fused(const Case& c, DType source) {
    const auto coin = [] { return random_bits() % 2 == 0; };
    const auto some_of = [&](const Ints& sizes) {  // broadcast along some dimensions
      Ints own = sizes;
      for (std::int64_t& size : own) size = coin() ? 1 : size;
      return coin() ? own : sizes;
    };
    const int rank = static_cast<int>(c.sizes.size());
    const bool rows = rank > 1 && c.dims.size() == 1 && c.dims[0] == rank - 1;
    if (rows && coin()) fusion.causal = coin() ? Causal::upper_left : Causal::lower_right;
    fusion.scale = coin() ? 0.5 : 1;
    fusion.mask_includes = coin();
    fusion.dead_rows_are_zero = true;
    if (!coin() || fusion.causal == Causal::none) {
      const Ints sizes = some_of(c.sizes);
      mask.emplace(sizes, contiguous(sizes), DType::float16, random_bits() % 5);  // whose bytes are the mask's
      for (unsigned char& byte : mask->bytes)
        byte = static_cast<unsigned char>(random_bits() % 3 == 0 ? 1 + random_bits() % 255 : 0);
      mask_view = mask->view();
      mask_view.data = static_cast<unsigned char*>(mask_view.data) - random_bits() % 8;
      fusion.mask = &mask_view;
    }
    if (coin()) {
      const Ints sizes = some_of(c.sizes);
      const DType dtype = size_of(source) == 2 && coin() ? DType::float32 : source;
      bias.emplace(sizes, contiguous(sizes), dtype, random_bits() % 5);
      std::normal_distribution<double> normal(0, 2);
      for (std::int64_t i = 0; i < bias->elements(); ++i) bias->set(i, normal(random_bits));
      bias_view = bias->view();
      fusion.bias = &bias_view;
    }
  }

  // Of a tensor that broadcasts against the case's, the offset of the case's element.
  static std::int64_t offset_in(const Tensor& tensor, const Ints& sizes, std::int64_t index) {
    std::int64_t offset = 0;
    for (std::size_t d = sizes.size(); d-- > 0; index /= sizes[d])
      if (tensor.sizes[d] > 1) offset += index % sizes[d] * tensor.strides[d];
    return offset;
  }
  bool includes(const Case& c, std::int64_t index) const {
    bool included = true;
    if (mask) {
      const auto* bytes = static_cast<const unsigned char*>(mask_view.data);
      included = (bytes[offset_in(*mask, c.sizes, index)] != 0) == fusion.mask_includes;
    }
    if (fusion.causal == Causal::none) return included;
    const std::int64_t columns = c.sizes.back(), rows = c.sizes[c.sizes.size() - 2];
    const std::int64_t column = index % columns, row = index / columns % rows;
    return included && column <= row + (fusion.causal == Causal::lower_right ? columns - rows : 0);
  }
  double bias_of(const Case& c, std::int64_t index) {
    if (!bias) return 0;
    std::int64_t own = 0, step = 1;
    for (std::size_t d = c.sizes.size(); d-- > 0; index /= c.sizes[d]) {
      if (bias->sizes[d] > 1) own += index % c.sizes[d] * step;
      step *= bias->sizes[d];
    }
    return bias->get(own);
  }

  std::optional<Tensor> mask, bias;
  TensorView mask_view, bias_view;
  Fusion fusion;
};

// For each element, a number that those of the same softmax share.
std::vector<std::int64_t> rows_of(const Case& c) {
  const std::int64_t count = std::accumulate(c.sizes.begin(), c.sizes.end(), std::int64_t{1}, std::multiplies<>());
  std::vector<std::int64_t> rows(count);
  for (std::int64_t index = 0; index < count; ++index) {
    std::int64_t rest = index, step = 1;
    for (std::size_t d = c.sizes.size(); d-- > 0; rest /= c.sizes[d], step *= c.sizes[d])
      if (std::find(c.dims.begin(), c.dims.end(), static_cast<std::int64_t>(d)) == c.dims.end())
        rows[index] += rest % c.sizes[d] * step;
  }
  return rows;
}

std::vector<double> expected(const Case& c, bool log, bool backward, Tensor& source, Tensor& grad,
                             const std::vector<std::int64_t>& rows, Fused* fused) {
  const std::int64_t count = source.elements();
  const double scale = fused ? fused->fusion.scale : 1, empty = log && !backward ? -INFINITY : 0;
  std::vector<char> included(count, 1);
  std::vector<double> max(count, -INFINITY), sum(count), x(count), g(count), result(count, empty);
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = source.get(i), g[i] = grad.get(i) * scale;
    if (!fused) continue;
    included[i] = fused->includes(c, i);
    if (!backward) x[i] = x[i] * scale + fused->bias_of(c, i);
  }
  for (std::int64_t i = 0; i < count; ++i)
    if (included[i]) max[rows[i]] = std::max(max[rows[i]], x[i]);
  for (std::int64_t i = 0; i < count; ++i)
    if (included[i]) sum[rows[i]] += !backward ? std::exp(x[i] - max[rows[i]]) : log ? g[i] : g[i] * x[i];
  for (std::int64_t i = 0; i < count; ++i) {
    const double total = sum[rows[i]];
    if (!included[i]) continue;
    if (backward)
      result[i] = log ? g[i] - std::exp(x[i]) * total : x[i] * (g[i] - total);
    else
      result[i] = log ? x[i] - max[rows[i]] - std::log(total) : std::exp(x[i] - max[rows[i]]) / total;
  }
  return result;
}

// Whether everything in the tensor's memory that is not an element of it is as it was.
bool margins_untouched(Tensor& tensor) {
  std::vector<char> used(tensor.bytes.size());
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    const auto at = tensor.base() + (tensor.first + tensor.offset_of(i)) * size_of(tensor.dtype) - tensor.bytes.data();
    std::fill_n(used.begin() + at, size_of(tensor.dtype), 1);
  }
  for (std::size_t i = 0; i < used.size(); ++i)
    if (!used[i] && tensor.bytes[i] != kUntouched) return false;
  return true;
}

int runs = 0;

void run(const Case& c, bool log, bool backward, DType source_dtype, DType result_dtype, std::optional<Regime> regime,
         const Device& device, bool with_fused) {
  const Ints dense = contiguous(c.sizes), strides = c.strides.empty() ? dense : c.strides;
  Tensor source(c.sizes, strides, source_dtype, c.offset), grad(c.sizes, strides, source_dtype, c.offset),
      result(c.sizes, dense, result_dtype, c.offset);
  const TensorView source_view = source.view(), grad_view = grad.view();
  std::optional<Fused> fused;
  if (with_fused) fused.emplace(c, source_dtype);
  const Problem problem =
      make_problem(log ? Operation::log_softmax : Operation::softmax, source_view, backward ? &grad_view : nullptr,
                   result.view(), c.dims, fused ? fused->fusion : Fusion{});
  Plan chosen;
  try {
    chosen = plan(problem, device, regime);
  } catch (const std::invalid_argument&) {
    return;  // this regime does not take this problem
  }

  std::normal_distribution<double> normal(0, 2);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (std::int64_t i = 0; i < source.elements(); ++i) {
    const double probability = uniform(random_bits) * 2 / static_cast<double>(problem.dim.size);
    const double x = c.peaked ? (i % 397 == 11 ? 60 : normal(random_bits) / 20) : normal(random_bits);
    source.set(i, !backward ? x : log ? std::log(probability + 1e-6) : probability);
    grad.set(i, normal(random_bits));
  }
  std::vector<std::max_align_t> workspace(chosen.workspace_bytes / sizeof(std::max_align_t) + 1);
  const Addresses addresses{source.data(), backward ? grad.data() : nullptr, result.data(),
                            fused && fused->mask ? fused->mask_view.data : nullptr,
                            fused && fused->bias ? fused->bias_view.data : nullptr};
  cuda::launch(problem, chosen, device, addresses, workspace.data(), nullptr);
  ++runs;

  const std::vector<std::int64_t> rows = rows_of(c);
  const std::vector<double> truth = expected(c, log, backward, source, grad, rows, fused ? &*fused : nullptr);
  double scale = 0, worst = 0;
  for (const double value : truth)
    if (std::isfinite(value)) scale = std::max(scale, std::abs(value));
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double actual = result.get(static_cast<std::int64_t>(i));
    if (actual == truth[i]) continue;  // infinities
    const double error = std::abs(actual - truth[i]) /
                         (backward ? scale : std::max(std::abs(truth[i]), log ? 1.0 : smallest_normal(result_dtype)));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  // (what is fused is rounded once before it is exponentiated, and a mask may leave little to compare with)
  const bool good = worst <= tolerance(result_dtype) * (fused ? 3 : 1) && margins_untouched(result);
  if (!good)
    std::fprintf(stderr, "error %g of %s\n  by %s\n", worst, to_string(problem).c_str(), to_string(chosen).c_str());
  CHECK(good);
}

}  // namespace

int main() {
  Device device;
  device.kind = Device::Kind::cuda;
  device.compute_capability = 90;
  device.multiprocessors = 4;  // so that small problems have many rows, and large ones few
  device.shared_bytes_per_block = 227 << 10;

  std::vector<Case> cases{
      // the last dimension, in every width of the warp regime, aligned and not
      {{9, 1}, {}, {1}},
      {{300, 2}, {}, {1}},
      {{67, 3}, {}, {1}},
      {{1000, 4}, {}, {1}},
      {{33, 8}, {}, {1}},
      {{70, 16}, {}, {1}},
      {{130, 21}, {}, {1}},
      {{40, 32}, {}, {1}},
      {{37, 50}, {}, {1}},
      {{40, 64}, {}, {1}},
      {{19, 77}, {}, {1}},
      {{33, 128}, {}, {1}},
      {{9, 197}, {}, {1}},
      {{9, 256}, {}, {1}},
      {{9, 257}, {}, {1}},
      {{6, 512}, {}, {1}},
      {{5, 577}, {}, {1}},
      {{5, 1000}, {}, {1}},
      {{5, 1023}, {}, {1}},
      {{5, 1024}, {}, {1}},
      // wider
      {{3, 1025}, {}, {1}},
      {{6, 2048}, {}, {1}},
      {{2, 4099}, {}, {1}},
      {{5, 8192}, {}, {1}},
      {{1, 20001}, {}, {1}},
      {{1, 40000}, {}, {1}},
      // rows that begin anywhere, alone and with gaps
      {{7, 64}, {}, {1}, 1},
      {{5, 100}, {}, {1}, 3},
      {{3, 2000}, {}, {1}, 5},
      {{4, 300}, {307, 1}, {1}, 2},
      {{3, 40, 100}, {9000, 200, 1}, {2}},
      {{2, 3, 5, 24}, {360, 24, 72, 1}, {3}},
      {{2, 3, 40, 37}, {}, {3}},
      {{2, 2, 50, 64}, {}, {3}},
      {{2, 60, 128}, {7680, 1, 60}, {2}},
      // other dimensions
      {{2, 19, 64}, {}, {1}},
      {{3, 19, 50}, {}, {1}},
      {{2, 80, 100}, {}, {1}},
      {{2, 300, 14}, {}, {1}},
      {{2, 1024, 8}, {}, {1}},
      {{1, 5000, 3}, {}, {1}},
      {{1, 9000, 64}, {}, {1}},
      {{50, 2}, {}, {0}},
      {{700, 33}, {}, {0}},
      {{100, 256}, {}, {0}},
      {{2, 64, 511}, {}, {1}},
      {{4, 2, 49}, {}, {1}},
      {{2, 100, 4}, {}, {1}, 1},
      // steps, permutations, broadcasts, several dimensions at once
      {{5, 40}, {80, 2}, {1}},
      {{6, 30}, {1, 6}, {1}},
      {{4, 50}, {0, 1}, {1}},
      {{4, 50}, {1, 0}, {1}},
      {{3, 4, 5}, {}, {0, 2}},
      {{3, 4, 5, 6}, {}, {1, 3}},
      {{2, 3, 4, 5, 6}, {360, 1, 90, 18, 3}, {1}},
      {{2, 700, 3}, {4200, 6, 2}, {1, 2}},
      {{1}, {}, {0}},
      {{1, 1, 7}, {}, {1}},
      // two passes over columns, with many of them
      {{2100, 512}, {}, {0}},
      // far below the maximum
      {{3, 900}, {}, {1}, 0, true},
      {{2, 4096}, {}, {1}, 0, true},
      {{1, 20001}, {}, {1}, 0, true},
      {{2, 700, 8}, {}, {1}, 0, true},
      {{3000, 6}, {}, {0}, 0, true},
  };
  const std::pair<DType, DType> forward[] = {{DType::float32, DType::float32},  {DType::bfloat16, DType::bfloat16},
                                             {DType::float16, DType::float16},  {DType::float64, DType::float64},
                                             {DType::bfloat16, DType::float32}, {DType::float16, DType::float32}};
  std::vector<std::optional<Regime>> regimes{std::nullopt};
  for (const char* name : {"warp", "block", "cluster", "online", "split", "strided"})
    regimes.push_back(regime_from(name, "regime"));

  // softmax and log_softmax in turn; a forced regime meets two operations a case, another pair at the next
  for (const bool fused : {false, true}) {
    int turn = 0;
    for (const Case& c : cases)
      for (const auto& regime : regimes)
        for (const auto& [narrow, wide] : forward)
          for (const bool backward : {false, true}) {
            ++turn;
            if (regime && turn % 7 != 0) continue;
            run(c, turn % 2 == 0, backward, backward ? wide : narrow, backward ? narrow : wide, regime, device, fused);
          }
  }
  std::printf("%d launches\n", runs);
  CHECK(runs > 1400);
  return summary();
}
