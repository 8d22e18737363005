// The library from C++ alone, on the CPU: forward and backward against float64.
#include "ndsoftmax/host_softmax.hpp"

#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"

using namespace ndsoftmax;

int main() {
  const std::int64_t outer = 3, dim = 37, inner = 5;
  const std::vector<std::int64_t> sizes{outer, dim, inner}, strides{dim * inner, inner, 1}, dims{1};
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> x(outer * dim * inner), g(x.size()), y(x.size()), dx(x.size());
  for (float& value : x) value = normal(random);
  for (float& value : g) value = normal(random);
  const auto view = [&](std::vector<float>& data) {
    return TensorView{data.data(), DType::float32, 3, sizes.data(), strides.data()};
  };

  for (const Operation operation : {Operation::softmax, Operation::log_softmax}) {
    host_softmax(operation, view(x), view(y), dims, Execution{});
    host_softmax_backward(operation, view(g), view(y), view(dx), dims, Execution{});
    const bool log = operation == Operation::log_softmax;
    for (std::int64_t o = 0; o < outer; ++o)
      for (std::int64_t i = 0; i < inner; ++i) {
        const auto at = [&](std::int64_t d) { return static_cast<std::size_t>((o * dim + d) * inner + i); };
        double sum = 0, total = 0;
        for (std::int64_t d = 0; d < dim; ++d) sum += std::exp(double{x[at(d)]});
        for (std::int64_t d = 0; d < dim; ++d) total += double{g[at(d)]} * (log ? 1 : std::exp(double{x[at(d)]}) / sum);
        for (std::int64_t d = 0; d < dim; ++d) {
          const double p = std::exp(double{x[at(d)]}) / sum;
          CHECK(std::abs(y[at(d)] - (log ? std::log(p) : p)) < 1e-6 * (log ? std::abs(std::log(p)) + 1 : 1));
          CHECK(std::abs(dx[at(d)] - (log ? g[at(d)] - p * total : p * (g[at(d)] - total))) < 1e-5);
        }
      }
  }
  return summary();
}
