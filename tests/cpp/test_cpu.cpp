// The CPU kernels of one instruction set: conversions of every 16-bit number, and every regime that takes a problem,
// for all operations and dtypes, against float64. Tensors fill their memory exactly, so that AddressSanitizer sees an
// access beside them; what lies between their elements must stay as it was.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "host/cpu/kernels.hpp"
#include "host/cpu/launch.hpp"

using namespace ndsoftmax;

namespace {

using Ints = std::vector<std::int64_t>;

std::mt19937 random_bits(5);

// ------------------------------------------------------------------------------------------------ conversions

// The number that these 16 bits mean. Beyond the largest one lies what would follow it, in the place of infinity.
double decode(DType dtype, int bits) {
  const int digits = dtype == DType::float16 ? 10 : 7, bias = dtype == DType::float16 ? 15 : 127;
  const int exponent = (bits & 0x7fff) >> digits, fraction = bits & ((1 << digits) - 1);
  const double magnitude =
      std::ldexp(exponent > 0 ? fraction + (1 << digits) : fraction, std::max(exponent, 1) - bias - digits);
  return bits & 0x8000 ? -magnitude : magnitude;
}

float widened(DType dtype, int bits) {
  const auto memory = static_cast<std::uint16_t>(bits);
  float value = 0;
  cpu::kernels<float>().load[static_cast<int>(dtype)](&memory, cpu::Window{}, &value);
  return value;
}

int narrowed(DType dtype, float value) {
  const float tile[32] = {value};  // a tile is followed by room for one vector
  std::uint16_t memory = 0;
  cpu::kernels<float>().store[static_cast<int>(dtype)](tile, cpu::Window{}, &memory);
  return memory;
}

void test_conversions(DType dtype) {
  const int infinity = dtype == DType::float16 ? 0x7c00 : 0x7f80;
  for (const int sign : {0, 0x8000}) {
    for (int bits = 0; bits < infinity; ++bits) {
      CHECK(widened(dtype, sign | bits) == decode(dtype, sign | bits));
      CHECK(std::signbit(widened(dtype, sign | bits)) == (sign != 0));
      // halfway to the next number, and the floats around it
      const double halfway = (decode(dtype, sign | bits) + decode(dtype, sign | (bits + 1))) / 2;
      const auto middle = static_cast<float>(halfway);
      CHECK(middle == halfway);
      CHECK(narrowed(dtype, widened(dtype, sign | bits)) == (sign | bits));
      CHECK(narrowed(dtype, std::nextafter(middle, 0.f)) == (sign | bits));
      CHECK(narrowed(dtype, middle) == (sign | (bits + (bits & 1))));
      CHECK(narrowed(dtype, std::nextafter(middle, std::copysign(INFINITY, middle))) == (sign | (bits + 1)));
    }
    CHECK(widened(dtype, sign | infinity) == (sign ? -INFINITY : INFINITY));
    CHECK(narrowed(dtype, sign ? -INFINITY : INFINITY) == (sign | infinity));
    for (int bits = infinity + 1; bits < 0x8000; ++bits) {
      CHECK(std::isnan(widened(dtype, sign | bits)));
      CHECK((narrowed(dtype, widened(dtype, sign | bits)) & 0x7fff) > infinity);
    }
  }
}

// ------------------------------------------------------------------------------------------------ kernels

constexpr unsigned char kUntouched = 0xa5;

struct Case {
  Ints sizes, strides;  // empty strides: contiguous
  Ints dims;
};

Ints contiguous(const Ints& sizes) {
  Ints strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

struct Tensor {
  Tensor(const Ints& sizes_, const Ints& strides_, DType dtype_) : sizes(sizes_), strides(strides_), dtype(dtype_) {
    std::int64_t last = 0;
    for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    bytes = static_cast<std::size_t>((last + 1) * size_of(dtype));
    memory = std::make_unique<unsigned char[]>(bytes);
    std::memset(memory.get(), kUntouched, bytes);
  }

  TensorView view() { return {memory.get(), dtype, static_cast<int>(sizes.size()), sizes.data(), strides.data()}; }
  std::int64_t elements() const {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  }

  unsigned char* at(std::int64_t index) {
    std::int64_t offset = 0;
    for (std::size_t d = sizes.size(); d-- > 0; index /= sizes[d]) offset += index % sizes[d] * strides[d];
    return memory.get() + offset * size_of(dtype);
  }
  template <typename Value>
  Value as(std::int64_t index) {
    Value value;
    std::memcpy(&value, at(index), sizeof value);
    return value;
  }
  double get(std::int64_t index) {
    if (dtype == DType::float64) return as<double>(index);
    return dtype == DType::float32 ? as<float>(index) : decode(dtype, as<std::uint16_t>(index));
  }
  void set(std::int64_t index, double value) {
    const auto single = static_cast<float>(value);
    const auto half = static_cast<std::uint16_t>(size_of(dtype) == 2 ? narrowed(dtype, single) : 0);
    const void* from = dtype == DType::float64 ? static_cast<const void*>(&value) : &single;
    std::memcpy(at(index), size_of(dtype) == 2 ? &half : from, static_cast<std::size_t>(size_of(dtype)));
  }
  void fill(double mean, double deviation) {
    std::normal_distribution<double> normal(mean, deviation);
    for (std::int64_t i = 0; i < elements(); ++i) set(i, normal(random_bits));
  }
  // Overwrites the elements; true where nothing else has changed.
  bool gaps_untouched() {
    for (std::int64_t i = 0; i < elements(); ++i)
      std::memset(at(i), kUntouched, static_cast<std::size_t>(size_of(dtype)));
    return std::all_of(memory.get(), memory.get() + bytes, [](unsigned char byte) { return byte == kUntouched; });
  }

  Ints sizes, strides;
  DType dtype;
  std::size_t bytes;
  std::unique_ptr<unsigned char[]> memory;
};

// For each element, a number that those of the same softmax share.
std::vector<std::size_t> rows_of(const Case& c, std::int64_t elements) {
  std::vector<std::size_t> rows(static_cast<std::size_t>(elements));
  for (std::size_t index = 0; index < rows.size(); ++index) {
    std::size_t rest = index, step = 1;
    for (std::size_t d = c.sizes.size(); d-- > 0;) {
      const auto size = static_cast<std::size_t>(c.sizes[d]);
      if (std::find(c.dims.begin(), c.dims.end(), static_cast<std::int64_t>(d)) == c.dims.end())
        rows[index] += rest % size * step;
      rest /= size;
      step *= size;
    }
  }
  return rows;
}

std::vector<double> expected(bool log, bool backward, Tensor& source, Tensor& grad,
                             const std::vector<std::size_t>& rows) {
  const std::size_t count = rows.size();
  std::vector<double> x(count), g(count), max(count, -INFINITY), sum(count), result(count);
  for (std::size_t i = 0; i < count; ++i) {
    x[i] = source.get(static_cast<std::int64_t>(i));
    g[i] = grad.get(static_cast<std::int64_t>(i));
    max[rows[i]] = std::max(max[rows[i]], x[i]);
  }
  for (std::size_t i = 0; i < count; ++i)
    sum[rows[i]] += backward ? g[i] * (log ? 1 : x[i]) : std::exp(x[i] - max[rows[i]]);
  for (std::size_t i = 0; i < count; ++i) {
    const double total = sum[rows[i]], shifted = x[i] - max[rows[i]];
    if (backward)
      result[i] = log ? g[i] - std::exp(x[i]) * total : x[i] * (g[i] - total);
    else
      result[i] = log ? shifted - std::log(total) : std::exp(shifted) / total;
  }
  return result;
}

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::float16: return 1e-3;
    case DType::bfloat16: return 8e-3;
    case DType::float32: return 3e-6;
    case DType::float64: return 1e-13;
  }
  return 0;
}

int runs = 0;

void run(const Case& c, bool log, bool backward, DType source_dtype, DType result_dtype, std::optional<Regime> forced,
         int threads) {
  const Ints strides = c.strides.empty() ? contiguous(c.sizes) : c.strides;
  const bool broadcast = std::find(strides.begin(), strides.end(), 0) != strides.end();
  Tensor source(c.sizes, strides, source_dtype), grad(c.sizes, strides, source_dtype);
  Tensor result(c.sizes, broadcast ? contiguous(c.sizes) : strides, result_dtype);
  const TensorView grad_view = grad.view();
  const Problem problem = make_problem(log ? Operation::log_softmax : Operation::softmax, source.view(),
                                       backward ? &grad_view : nullptr, result.view(), c.dims);
  Device device;
  device.threads = threads;
  Plan chosen;
  try {
    chosen = plan(problem, device, forced);
  } catch (const std::invalid_argument&) {
    return;  // not for this regime
  }
  grad.fill(0, 1);
  source.fill(backward ? (log ? -4 : 0.3) : 0, backward ? 0.1 : 3);
  cpu::launch(problem, chosen, device,
              {source.view().data, backward ? grad_view.data : nullptr, result.view().data, nullptr, nullptr});
  ++runs;

  const std::vector<double> truth = expected(log, backward, source, grad, rows_of(c, source.elements()));
  double scale = result_dtype == DType::float16 ? 6.2e-5 : 1.2e-38;  // numbers below are denormal
  for (std::size_t i = 0; backward && i < truth.size(); ++i)         // what cancels counts, too
    scale = std::max({scale, std::abs(truth[i]), log ? std::abs(grad.get(static_cast<std::int64_t>(i))) : 0});
  double worst = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double error = std::abs(result.get(static_cast<std::int64_t>(i)) - truth[i]) /
                         (backward ? scale : std::max(std::abs(truth[i]), log ? 1 : scale));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  const bool good = worst <= tolerance(result_dtype) && result.gaps_untouched();
  if (!good)
    std::fprintf(stderr, "error %g of %s\n  by %s\n", worst, to_string(problem).c_str(), to_string(chosen).c_str());
  CHECK(good);
}

}  // namespace

int main() {
  std::printf("%s\n", cpu::capability());
  test_conversions(DType::float16);
  test_conversions(DType::bfloat16);

  std::vector<Case> cases{
      // rows: without gaps, with gaps, in parts
      {{5, 1000}, {}, {1}},
      {{40, 33}, {}, {1}},
      {{1, 2049}, {}, {1}},
      {{3, 100}, {117, 1}, {1}},
      {{2, 3, 5, 24}, {360, 24, 72, 1}, {3}},
      {{3, 20'003}, {}, {1}},
      {{1, 70'001}, {}, {1}},
      // columns: few, many, in parts, in a slab
      {{2, 19, 64}, {}, {1}},
      {{3, 19, 50}, {}, {1}},
      {{2, 300, 3}, {}, {1}},
      {{1, 14'000, 5}, {}, {1}},
      {{700, 33}, {}, {0}},
      {{3000, 50}, {}, {0}},
      {{50, 2}, {}, {0}},
      // steps, permutations, broadcasts, several dimensions at once
      {{5, 40}, {80, 2}, {1}},
      {{6, 30}, {1, 6}, {1}},
      {{4, 50}, {0, 1}, {1}},
      {{4, 50}, {1, 0}, {1}},
      {{3, 4, 5, 6}, {}, {1, 3}},
      {{2, 3, 4, 5, 6}, {360, 1, 90, 18, 3}, {1}},
      {{2, 700, 3}, {4200, 6, 2}, {1, 2}},
      {{1}, {}, {0}},
  };
  for (std::int64_t dim = 1; dim <= 17; ++dim) cases.push_back({{1100 / dim, dim}, {}, {1}});  // several a vector

  const std::pair<DType, DType> forward[] = {{DType::float32, DType::float32},  {DType::bfloat16, DType::bfloat16},
                                             {DType::float16, DType::float16},  {DType::float64, DType::float64},
                                             {DType::bfloat16, DType::float32}, {DType::float16, DType::float32}};
  std::vector<std::optional<Regime>> regimes{std::nullopt};
  for (const char* name : {"warp", "block", "online", "split", "strided"})
    regimes.push_back(regime_from(name, "regime"));
  int turn = 0;  // one thread and three in turn; a forced regime takes every third of what the others take
  for (const Case& c : cases)
    for (const auto& regime : regimes)
      for (const auto& [narrow, wide] : forward)
        for (const bool backward : {false, true})
          for (const bool log : {false, true}) {
            if (regime && ++turn % 3 != 0) continue;
            run(c, log, backward, backward ? wide : narrow, backward ? narrow : wide, regime, turn % 2 == 0 ? 3 : 1);
          }
  std::printf("%d launches\n", runs);
  CHECK(runs > 1000);
  return summary();
}
