// Splitting into outer × dim × inner, and what merges.
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "ndsoftmax/problem.hpp"

using namespace ndsoftmax;

namespace {

using Ints = std::vector<std::int64_t>;

Ints contiguous(const Ints& sizes) {
  Ints strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

TensorView view(const Ints& sizes, const Ints& strides, DType dtype = DType::float32) {
  return {nullptr, dtype, static_cast<int>(sizes.size()), sizes.data(), strides.data()};
}

Problem split(const Ints& sizes, const Ints& dims) {
  const Ints strides = contiguous(sizes);
  return make_problem(Operation::softmax, view(sizes, strides), nullptr, view(sizes, strides), dims);
}

bool is(const Problem& problem, std::int64_t outer, std::int64_t dim, std::int64_t inner) {
  return problem.outer.size == outer && problem.dim.size == dim && problem.inner.size == inner;
}

}  // namespace

int main() {
  CHECK(is(split({2, 3, 4}, {1}), 2, 3, 4));
  CHECK(is(split({2, 3, 4}, {-1}), 6, 4, 1));
  CHECK(is(split({2, 3, 4}, {0}), 1, 2, 12));
  CHECK(is(split({2, 3, 4}, {0, 1}), 1, 6, 4));
  CHECK(is(split({2, 3, 4}, {2, 0}), 3, 8, 1));
  CHECK(is(split({}, {-1}), 1, 1, 1));
  CHECK(is(split({5, 1, 0}, {1}), 0, 1, 1));
  CHECK(is(split({1LL << 20, 1LL << 21}, {1}), 1LL << 20, 1LL << 21, 1));

  // contiguous neighbours merge into one group on every axis
  const Problem merged = split({2, 3, 4, 5, 6}, {2});
  CHECK(merged.outer.rank == 1 && merged.dim.rank == 1 && merged.inner.rank == 1);

  // channels_last with dim 1 has contiguous rows
  const Ints sizes{2, 3, 4, 5}, channels_last{60, 1, 15, 3}, one{1};
  const Problem rows =
      make_problem(Operation::softmax, view(sizes, channels_last), nullptr, view(sizes, channels_last), one);
  CHECK(is(rows, 40, 3, 1) && rows.contiguous_rows() && rows.packed_rows() && rows.outer.rank == 1);

  // a stepped input does not merge with a dense output, and its rows are not contiguous
  const Ints square{4, 6}, stepped{24, 2}, dense{6, 1};
  const Problem steps = make_problem(Operation::softmax, view(square, stepped), nullptr, view(square, dense), one);
  CHECK(is(steps, 4, 6, 1) && !steps.contiguous_rows());

  CHECK_THROWS(std::out_of_range, split({2, 3}, {2}));
  CHECK_THROWS(std::out_of_range, split({2, 3}, {-3}));
  CHECK_THROWS(std::out_of_range, split({}, {1}));
  CHECK_THROWS(std::runtime_error, split({2, 3}, {1, -1}));
  CHECK_THROWS(std::runtime_error, make_problem(Operation::softmax, view(square, dense), nullptr,
                                                view(square, dense, DType::float16), one));
  return summary();
}
