// What the tests of kernels share: problems with everything that may be fused, their truth in float64, and tensors
// around and between whose elements nothing may be written. AddressSanitizer also sees what is read around them.
#pragma once

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes)
#endif

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "host/addresses.hpp"
#include "host/cuda_plan.hpp"
#include "ndsoftmax/plan.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::testing {

using Ints = std::vector<std::int64_t>;

inline std::mt19937 random_bits(5);
inline bool one_in(unsigned n) { return random_bits() % n == 0; }
inline double normal(double deviation) { return std::normal_distribution<double>(0, deviation)(random_bits); }

// ------------------------------------------------------------------------------------------------ 16-bit numbers

struct Format {
  int digits, bias;
  int infinity() const { return (2 * bias + 1) << digits; }
};
inline Format format_of(DType dtype) { return dtype == DType::float16 ? Format{10, 15} : Format{7, 127}; }

inline double decode(DType dtype, int bits) {
  const Format format = format_of(dtype);
  const int magnitude = bits & 0x7fff, exponent = magnitude >> format.digits, one = 1 << format.digits;
  double value =
      std::ldexp(magnitude % one + (exponent > 0 ? one : 0), std::max(exponent, 1) - format.bias - format.digits);
  if (magnitude >= format.infinity()) value = magnitude == format.infinity() ? INFINITY : NAN;
  return bits & 0x8000 ? -value : value;
}

// The nearest number, of two the even one.
inline int encode(DType dtype, double value) {
  const Format format = format_of(dtype);
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | (format.infinity() + 1);
  if (std::isinf(value)) return sign | format.infinity();
  const int exponent = value == 0 ? 0 : std::max(std::ilogb(value) + format.bias, 1);
  const auto steps = static_cast<int>(
      std::nearbyint(std::ldexp(std::abs(value), format.digits + format.bias - std::max(exponent, 1))));
  return sign | std::min((std::max(exponent, 1) - 1) * (1 << format.digits) + steps, format.infinity());
}

// ------------------------------------------------------------------------------------------------ tensors

inline Ints contiguous(const Ints& sizes) {
  Ints strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return strides;
}

class Tensor {
 public:
  // Begins `offset` elements past a line of memory. Elements without a dtype are bytes.
  Tensor(Ints sizes_, Ints strides_, std::optional<DType> dtype_, std::int64_t offset)
      : sizes(std::move(sizes_)), strides(std::move(strides_)), dtype(dtype_) {
    std::int64_t elements_spanned = 1;
    for (std::size_t d = 0; d < sizes.size(); ++d) elements_spanned += (sizes[d] - 1) * strides[d];
    begin_ = kMargin + static_cast<std::size_t>(offset) * width();
    end_ = begin_ + static_cast<std::size_t>(elements_spanned) * width();
    lines_ = std::make_unique<Line[]>((end_ + kMargin) / sizeof(Line) + 1);
    std::memset(memory(), kUntouched, end_ + kMargin);
    ASAN_POISON_MEMORY_REGION(memory(), begin_);
    ASAN_POISON_MEMORY_REGION(memory() + end_, kMargin);
  }

  void* data() const { return memory() + begin_; }
  TensorView view() const {
    return {data(), dtype.value_or(DType::float32), static_cast<int>(sizes.size()), sizes.data(), strides.data()};
  }
  std::int64_t elements() const {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  }

  // What element `index` of a tensor of this shape meets when this one is broadcast against it.
  unsigned char* at(std::int64_t index, const Ints& shape) const {
    std::int64_t offset = 0;
    for (std::size_t d = shape.size(), own = sizes.size(); own-- > 0; index /= shape[d])
      if (--d; sizes[own] > 1) offset += index % shape[d] * strides[own];
    return static_cast<unsigned char*>(data()) + offset * static_cast<std::int64_t>(width());
  }
  unsigned char* at(std::int64_t index) const { return at(index, sizes); }
  double get(std::int64_t index, const Ints& shape) const {
    const unsigned char* const from = at(index, shape);
    const auto as = [&](auto value) {
      std::memcpy(&value, from, sizeof value);
      return value;
    };
    if (dtype == DType::float64) return as(double{});
    return dtype == DType::float32 ? as(float{}) : decode(*dtype, as(std::uint16_t{}));
  }
  double get(std::int64_t index) const { return get(index, sizes); }
  void set(std::int64_t index, double value) {
    unsigned char* const to = at(index);
    const auto put = [&](auto number) { std::memcpy(to, &number, sizeof number); };
    if (dtype == DType::float64) return put(value);
    dtype == DType::float32 ? put(static_cast<float>(value)) : put(static_cast<std::uint16_t>(encode(*dtype, value)));
  }

  // Whether nothing but elements was written. Overwrites them.
  bool gaps_untouched() {
    ASAN_UNPOISON_MEMORY_REGION(memory(), end_ + kMargin);
    for (std::int64_t i = 0; i < elements(); ++i) std::memset(at(i), kUntouched, width());
    return std::all_of(memory(), memory() + end_ + kMargin, [](int byte) { return byte == kUntouched; });
  }

  const Ints sizes, strides;
  const std::optional<DType> dtype;

 private:
  static constexpr unsigned char kUntouched = 0xa5;
  static constexpr std::size_t kMargin = 512;  // bytes; more than a vector

  struct alignas(128) Line {
    unsigned char bytes[128];
  };

  unsigned char* memory() const { return lines_[0].bytes; }
  std::size_t width() const { return dtype ? static_cast<std::size_t>(size_of(*dtype)) : 1; }

  std::size_t begin_, end_;
  std::unique_ptr<Line[]> lines_;
};

// Of a shape that broadcasts against `sizes`, in one of many layouts.
inline Tensor broadcast(const Ints& sizes, std::optional<DType> dtype) {
  Ints own = sizes;
  if (one_in(2)) {
    own.erase(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(random_bits() % sizes.size()));
    for (std::int64_t& size : own) size = one_in(2) ? 1 : size;
  }
  const bool reversed = one_in(4);
  if (reversed) std::reverse(own.begin(), own.end());
  Ints strides = contiguous(own);
  if (reversed) std::reverse(own.begin(), own.end()), std::reverse(strides.begin(), strides.end());
  for (std::int64_t& stride : strides) stride *= one_in(4) ? random_bits() % 3 : 1;
  return {own, strides, dtype, static_cast<std::int64_t>(random_bits() % 16)};
}

// ------------------------------------------------------------------------------------------------ problems

struct Case {
  Ints sizes, strides;  // empty strides: contiguous
  Ints dims;
  std::int64_t offset = 0;       // of every tensor, in elements
  bool peaked = false;           // most elements lie far below the maximum, which few threads see
  std::int64_t grad_offset = 0;  // of gradients, beyond that
  bool biased = false;           // a scale and a bias of whole rows, of the source's type, are all that is fused
};

struct Precision {
  double tolerance;        // relative
  double smallest_normal;  // below, a relative error says nothing
};
inline Precision precision_of(DType dtype) {
  switch (dtype) {
    case DType::float16: return {1e-3, 6.2e-5};
    case DType::bfloat16: return {8e-3, 1.2e-38};
    case DType::float32: return {3e-6, 1.2e-38};
    case DType::float64: return {1e-13, 2.3e-308};
  }
  return {};
}

// One call, of which everything that a case leaves open is random. Where something is fused, some rows are dead, some
// hold NaN or infinities, and so does what is excluded.
class Call {
 public:
  Call(const Case& c, bool backward, DType source_dtype, DType result_dtype, bool fused)
      : case_(c),
        log_(one_in(2)),
        strides_(c.strides.empty() ? contiguous(c.sizes) : c.strides),
        aliased_(std::count(strides_.begin(), strides_.end(), 0) > 0),
        overwritten_(aliased_ || source_dtype != result_dtype || !one_in(4) ? kWhole
                     : backward && one_in(2)                                ? kGrad
                                                                            : kSource),
        source_(c.sizes, strides_, source_dtype, c.offset),
        grad_(c.sizes, strides_, source_dtype, c.offset + c.grad_offset),
        result_(c.sizes, aliased_ || (overwritten_ == kWhole && one_in(2)) ? contiguous(c.sizes) : strides_,
                result_dtype, c.offset) {
    if (fused)
      fuse();
    else if (one_in(3) && (backward || (is_of_rows() && source_dtype == result_dtype && size_of(source_dtype) < 8)))
      fusion_.scale = 0.7;  // alone, of which plans take no notice
    if (mask_) fusion_.mask = &(mask_view_ = mask_->view());
    if (bias_) fusion_.bias = &(bias_view_ = bias_->view());
    const auto view = [&](Operand operand, const Tensor& own) {
      return overwritten_ == operand ? result_.view() : own.view();
    };
    const TensorView grad = view(kGrad, grad_);
    problem = make_problem(log_ ? Operation::log_softmax : Operation::softmax, view(kSource, source_),
                           backward ? &grad : nullptr, result_.view(), c.dims, fusion_);
  }

  Addresses addresses() const {
    const auto data = [&](Operand operand, const Tensor& own) {
      return overwritten_ == operand ? result_.data() : own.data();
    };
    return {data(kSource, source_), backward() ? data(kGrad, grad_) : nullptr, result_.data(), mask_view_.data,
            bias_view_.data};
  }

  void fill() {
    count_rows();
    const std::size_t first = random_bits() % 35;  // so that rows that are few are special at times, too
    for (std::int64_t i = 0; i < source_.elements(); ++i) {
      const std::size_t row = rows_[static_cast<std::size_t>(i)];
      double x = 0, g = 0;
      if (backward()) {
        const double probability =
            2 * std::generate_canonical<double, 32>(random_bits) / static_cast<double>(problem.dim.size);
        x = log_ ? std::log(probability + 1e-6) : probability;
        g = normal(1);
      } else {
        x = case_.peaked ? (i % 397 == 11 ? 60 : normal(0.05)) : normal(2);
      }
      if (problem.fused.any && !aliased_) {
        if ((first + row) % 7 == 3 && one_in(16)) (backward() ? g : x) = one_in(2) ? NAN : INFINITY;
        if ((first + row) % 5 == 4) x = !backward() ? -INFINITY : fusion_.dead_rows_are_zero ? empty() : NAN;
        if (!includes(i) && one_in(2)) x = one_in(2) ? NAN : INFINITY, g = one_in(2) ? NAN : -INFINITY;
      }
      source_.set(i, x);
      grad_.set(i, g);
      if (overwritten_ != kWhole) result_.set(i, overwritten_ == kSource ? x : g);
    }
  }

  // Whether the result is right, of what this plan gave it; prints what is wrong.
  bool check(const Plan& plan) {
    const std::vector<double> truth = expected();
    const auto [tolerance, smallest_normal] = precision_of(*result_.dtype);
    double worst = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
      const double actual = result_.get(static_cast<std::int64_t>(i));
      if (actual == truth[i] || (std::isnan(actual) && std::isnan(truth[i]))) continue;
      const double unit = backward() ? largest_term_ : log_ ? std::max(std::abs(truth[i]), 1.0) : std::abs(truth[i]);
      const double error = std::abs(actual - truth[i]) / std::max(unit, smallest_normal);
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    // what is fused is rounded before it is exponentiated
    const bool good = worst <= tolerance * (problem.fused.any ? 3 : 1), untouched = result_.gaps_untouched();
    if (!good || !untouched)
      std::fprintf(stderr, "error %g%s of %s\n  by %s\n", worst, untouched ? "" : ", and writes beside the result,",
                   to_string(problem).c_str(), to_string(plan).c_str());
    return good && untouched;
  }

  Problem problem;

 private:
  bool backward() const { return problem.direction == Direction::backward; }
  double empty() const { return log_ ? -INFINITY : 0; }  // what forward gives to what is excluded

  bool is_of_rows() const {
    return case_.strides.empty() && case_.dims == Ints{static_cast<std::int64_t>(case_.sizes.size()) - 1};
  }

  void fuse() {
    const int rank = static_cast<int>(case_.sizes.size());
    const bool last = rank > 1 && case_.dims == Ints{rank - 1};
    if (last && one_in(2)) fusion_.causal = one_in(2) ? Causal::upper_left : Causal::lower_right;
    fusion_.scale = one_in(2) ? 1 : one_in(2) ? 0.5 : one_in(2) ? -1 : 1e-50;
    fusion_.mask_includes = one_in(2);
    fusion_.dead_rows_are_zero = one_in(2);
    if (case_.biased) {
      fusion_.causal = Causal::none;
      const auto groups = static_cast<std::ptrdiff_t>(random_bits() % (case_.sizes.size() - 1));
      const Ints own(case_.sizes.begin() + groups, case_.sizes.end());
      bias_.emplace(own, contiguous(own), source_.dtype, static_cast<std::int64_t>(one_in(2) ? random_bits() % 16 : 0));
      for (std::int64_t i = 0; i < bias_->elements(); ++i) bias_->set(i, one_in(20) ? -INFINITY : normal(2));
      return;
    }
    if (one_in(2) || fusion_.causal == Causal::none) {
      mask_.emplace(broadcast(case_.sizes, std::nullopt));
      for (std::int64_t i = 0; i < mask_->elements(); ++i)
        *mask_->at(i) = static_cast<unsigned char>(one_in(3) ? 1 + random_bits() % 255 : 0);
    }
    if (one_in(2)) {
      const bool wide = size_of(*source_.dtype) == 2 && one_in(2);
      bias_.emplace(broadcast(case_.sizes, wide ? DType::float32 : source_.dtype));
      for (std::int64_t i = 0; i < bias_->elements(); ++i) bias_->set(i, one_in(20) ? -INFINITY : normal(2));
    }
  }

  bool includes(std::int64_t index) const {
    if (mask_ && (*mask_->at(index, case_.sizes) != 0) != fusion_.mask_includes) return false;
    if (fusion_.causal == Causal::none) return true;
    const std::int64_t columns = case_.sizes.back(), rows = case_.sizes[case_.sizes.size() - 2];
    const std::int64_t diagonal = fusion_.causal == Causal::lower_right ? columns - rows : 0;
    return index % columns <= index / columns % rows + diagonal;
  }

  // As kernels take it, which may be 0.
  double scale() const {
    return problem.source == DType::float64 ? fusion_.scale : static_cast<double>(static_cast<float>(fusion_.scale));
  }

  // For each element, a number that those of the same softmax share.
  void count_rows() {
    rows_.resize(static_cast<std::size_t>(source_.elements()));
    for (std::size_t index = 0; index < rows_.size(); ++index) {
      auto rest = static_cast<std::int64_t>(index), step = std::int64_t{1};
      for (std::int64_t d = std::ssize(case_.sizes); d-- > 0;) {
        const std::int64_t size = case_.sizes[static_cast<std::size_t>(d)], position = rest % size;
        rest /= size;
        if (std::count(case_.dims.begin(), case_.dims.end(), d) > 0) continue;
        rows_[index] += static_cast<std::size_t>(position * step);
        step *= size;
      }
    }
  }

  std::vector<double> expected() {
    const std::size_t count = rows_.size();
    std::vector<double> x(count), g(count), max(count, -INFINITY), sum(count), result(count);
    std::vector<char> included(count), living(count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto index = static_cast<std::int64_t>(i);
      if (!(included[i] = includes(index))) continue;
      x[i] = source_.get(index);
      g[i] = grad_.get(index) * scale();
      if (!backward()) x[i] = x[i] * scale() + (bias_ ? bias_->get(index, case_.sizes) : 0);
      max[rows_[i]] = std::max(max[rows_[i]], x[i]);
      if (x[i] != (backward() ? empty() : -INFINITY)) living[rows_[i]] = true;
    }
    for (double& largest : max) largest = largest == -INFINITY ? 0 : largest;
    for (std::size_t i = 0; i < count; ++i)
      if (included[i]) sum[rows_[i]] += !backward() ? std::exp(x[i] - max[rows_[i]]) : log_ ? g[i] : g[i] * x[i];
    for (std::size_t i = 0; i < count; ++i) {
      const double total = sum[rows_[i]], shifted = x[i] - max[rows_[i]];
      if (!living[rows_[i]])
        result[i] = backward() ? 0 : fusion_.dead_rows_are_zero ? empty() : NAN;
      else if (!included[i])
        result[i] = backward() ? 0 : empty();
      else if (backward())
        result[i] = log_ ? g[i] - std::exp(x[i]) * total : x[i] * (g[i] - total);
      else
        result[i] = log_ ? shifted - std::log(total) : std::exp(shifted) / total;
      for (const double term : {result[i], log_ ? g[i] : g[i] * x[i]})  // which may have cancelled another
        if (std::isfinite(term)) largest_term_ = std::max(largest_term_, std::abs(term));
    }
    return result;
  }

  const Case& case_;
  const bool log_;
  const Ints strides_;
  const bool aliased_;         // elements share memory
  const Operand overwritten_;  // by the result, in its place; kWhole: none
  Tensor source_, grad_, result_;
  std::optional<Tensor> mask_, bias_;
  TensorView mask_view_, bias_view_;
  Fusion fusion_;
  std::vector<std::size_t> rows_;
  double largest_term_ = 0;
};

// ------------------------------------------------------------------------------------------------ runs

// Calls work(unit, say) once for every unit below `units`, in one process a core, each of which takes the next unit
// when it is done with one. Random bits depend on the unit, not on who took it. Returns how often each line was said.
template <typename Work>
std::map<std::string, int> count_in_processes(std::size_t units, const Work& work) {
  using Counter = std::atomic<std::size_t>;
  void* const shared = mmap(nullptr, sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Counter& next = *new (shared) Counter{0};
  int ends[2];
  CHECK(shared != MAP_FAILED && pipe(ends) == 0);
  std::fflush(stdout);
  for (unsigned core = 0; core < std::max(1u, std::thread::hardware_concurrency()); ++core) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      close(ends[0]);
      failures = 0;
      for (std::size_t unit; (unit = next++) < units;) {
        random_bits.seed(unit);
        work(unit, [&](const std::string& line) { dprintf(ends[1], "%s\n", line.c_str()); });
      }
      std::exit(summary());
    }
  }
  close(ends[1]);
  std::map<std::string, int> counts;
  std::FILE* const lines = fdopen(ends[0], "r");
  for (char line[100]; std::fscanf(lines, "%99[^\n]%*c", line) == 1;) ++counts[line];
  std::fclose(lines);
  for (int status; wait(&status) > 0;) CHECK_EQUAL(status, 0);  // else it failed, or a signal ended it
  munmap(shared, sizeof(Counter));
  return counts;
}

// Every case in all dtypes, forward and backward, plain and fused, as it is planned; of the plans that can be forced on
// it one in `sparse`; where only some plans are `wanted`, of those alone. launch(problem, plan, device, addresses).
// Prints how much of what was run, and returns it, and the "total".
template <typename Launch>
std::map<std::string, int> run(
    const std::vector<Case>& cases, const std::vector<Device>& devices, unsigned sparse, const Launch& launch,
    bool (*wanted)(const Plan&) = [](const Plan&) { return true; }) {
  const std::pair<DType, DType> pairs[] = {{DType::float32, DType::float32},  {DType::bfloat16, DType::bfloat16},
                                           {DType::float16, DType::float16},  {DType::float64, DType::float64},
                                           {DType::bfloat16, DType::float32}, {DType::float16, DType::float32}};
  std::vector<std::optional<Regime>> regimes{std::nullopt};
  for (const char* name : {"warp", "block", "cluster", "online", "split", "strided"})
    regimes.push_back(regime_from(name, "regime"));
  const auto once = [&](Call call, std::optional<Regime> regime, const auto& say) {
    const Device& device = devices[random_bits() % devices.size()];
    Plan chosen;
    try {
      chosen = plan(call.problem, device, regime);
    } catch (const std::invalid_argument&) {
      return;  // not for this regime
    }
    if (!wanted(chosen)) return;
    if (regime && chosen.grid * chosen.block > 25'000) return;  // what suits few long rows, on many short ones: slow
    call.fill();
    launch(call.problem, chosen, device, call.addresses());
    CHECK(call.check(chosen));
    say(std::string(name_of(chosen.regime)) + (chosen.cluster > 1 ? ", clusters" : "") +
        (chosen.regime == Regime::cluster && chosen.passes > 1 ? ", twice" : "") +
        (chosen.regime == Regime::strided && fold_of(call.problem, chosen).folds ? ", folded" : "") +
        (chosen.regime == Regime::strided && chosen.passes > 1 ? ", twice" : "") +
        (chosen.regime == Regime::strided && staggers_columns(chosen) ? ", staggered" : "") +
        (chosen.beside != Beside::none ? ", beside" : "") + (chosen.slabs ? ", slabs" : "") +
        (chosen.sectors ? ", on sectors" : "") + (chosen.interleaved > 1 ? ", interleaved" : "") +
        (chosen.meets ? ", meeting" : "") + (call.problem.fused.any && !chosen.scales ? ", fused" : ""));
    say("total");
  };
  auto runs = count_in_processes(cases.size() * std::size(pairs), [&](std::size_t unit, const auto& say) {
    const auto& [narrow, wide] = pairs[unit % std::size(pairs)];
    for (const auto& regime : regimes)
      for (const bool backward : {false, true})
        for (const bool fused : {false, true})
          if (!regime || one_in(sparse))
            once(Call(cases[unit / std::size(pairs)], backward, backward ? wide : narrow, backward ? narrow : wide,
                      fused),
                 regime, say);
  });
  for (const auto& [what, count] : runs) std::printf("%5d %s\n", count, what.c_str());
  return runs;
}

}  // namespace ndsoftmax::testing
