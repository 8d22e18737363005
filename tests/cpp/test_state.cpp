// (max, sum) is a commutative monoid, also with -inf, +inf and NaN.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "ndsoftmax/state.hpp"

using State = ndsoftmax::MaxSum<double>;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

State combined(State a, const State& b) {
  a.combine(b);
  return a;
}

bool close(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b || std::abs(a - b) <= 1e-12 * std::max(std::abs(a), std::abs(b));
}

// NaN rows are NaN whatever the maximum
bool same(const State& a, const State& b) { return close(a.sum, b.sum) && (std::isnan(a.sum) || a.max == b.max); }

}  // namespace

int main() {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, 50);
  std::vector<State> states{State{}, State::of(-kInf), State::of(kInf), State::of(std::nan("")), State::of(0)};
  for (int i = 0; i < 12; ++i) states.push_back(combined(State::of(normal(random)), State::of(normal(random))));

  for (const State& a : states) {
    CHECK(same(combined(a, State{}), a));
    CHECK(same(combined(State{}, a), a));
    for (const State& b : states) {
      CHECK(same(combined(a, b), combined(b, a)));
      for (const State& c : states) CHECK(same(combined(combined(a, b), c), combined(a, combined(b, c))));
    }
  }

  // of n elements: the maximum, and the sum relative to it
  std::vector<double> row(1000);
  for (double& x : row) x = normal(random);
  State whole, left, right;
  double max = -kInf, sum = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    whole.combine(State::of(row[i]));
    (i < 300 ? left : right).combine(State::of(row[i]));
    max = std::max(max, row[i]);
  }
  for (const double x : row) sum += std::exp(x - max);
  CHECK(whole.max == max);
  CHECK(close(whole.sum, sum));
  CHECK(same(combined(left, right), whole));

  // nothing but -inf: no NaN on the way, and a sum of 0
  CHECK(combined(State::of(-kInf), State::of(-kInf)).sum == 0);
  return summary();
}
