// The kernels on tiles, compiled once for each instruction set (see vector.hpp).
//   reads and writes: tiles in cache; only load and store touch the operands, each element once
//   lanes:            packed: several rows a vector; rows: a row's elements; columns: neighbouring columns
//   order:            load, maximum, exponentials and their sum, scale, store
#include "host/cpu/kernels.hpp"

#include "host/cpu/convert.hpp"

namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE {
namespace {

// ------------------------------------------------------------------------------------------------ load and store

template <typename Element, typename Real>
void load_row(const Element* from, const Window& window, Real padding, Real* tile) {
  using Register = Packed<Real, Element>;
  constexpr int lanes = kLanes<Real>;
  std::int64_t column = 0;
  for (; column + lanes <= window.columns; column += lanes)
    store(tile + column, Convert<Element>::widen(load<Register>(from + column)));
  const int rest = static_cast<int>(window.columns - column);
  if (rest == 0) return;
  const Vector<Real> last = Convert<Element>::widen(load_first<Register>(from + column, rest));
  if (window.padded) store(tile + column, lane_numbers<Real>() < rest ? last : broadcast(padding));
  else store_first(tile + column, last, rest);
}

template <typename Element, typename Real>
void store_row(const Real* tile, const Window& window, Element* to) {
  constexpr int lanes = kLanes<Real>;
  std::int64_t column = 0;
  for (; column + lanes <= window.columns; column += lanes)
    store(to + column, Convert<Element>::narrow(load<Vector<Real>>(tile + column)));
  const int rest = static_cast<int>(window.columns - column);
  if (rest > 0) store_first(to + column, Convert<Element>::narrow(load<Vector<Real>>(tile + column)), rest);
}

template <typename Element, typename Real>
void load_window(const void* memory, const Window& window, Real padding, Real* tile) {
  const auto* from = static_cast<const Element*>(memory);
  for (std::int64_t row = 0; row < window.rows; ++row, from += window.row_stride, tile += window.tile_stride) {
    if (window.column_stride == 1) {
      load_row(from, window, padding, tile);
      continue;
    }
    Element gathered[kLanes<Real>];
    for (std::int64_t column = 0; column < window.columns; column += kLanes<Real>) {
      const std::int64_t rest = window.columns - column;
      const int count = rest < kLanes<Real> ? static_cast<int>(rest) : kLanes<Real>;
      for (int lane = 0; lane < count; ++lane) gathered[lane] = from[(column + lane) * window.column_stride];
      load_row(gathered, {.columns = count, .padded = window.padded}, padding, tile + column);
    }
  }
}

template <typename Element, typename Real>
void store_window(const Real* tile, const Window& window, void* memory) {
  auto* to = static_cast<Element*>(memory);
  for (std::int64_t row = 0; row < window.rows; ++row, to += window.row_stride, tile += window.tile_stride) {
    if (window.column_stride == 1) {
      store_row(tile, window, to);
      continue;
    }
    Element scattered[kLanes<Real>];
    for (std::int64_t column = 0; column < window.columns; column += kLanes<Real>) {
      const std::int64_t rest = window.columns - column;
      const int count = rest < kLanes<Real> ? static_cast<int>(rest) : kLanes<Real>;
      store_row(tile + column, {.columns = count}, scattered);
      for (int lane = 0; lane < count; ++lane) to[(column + lane) * window.column_stride] = scattered[lane];
    }
  }
}

// ------------------------------------------------------------------------------------------------ epilogues

// What is subtracted or multiplied at the end, from the sum of exponentials.
template <Operation operation, typename Real>
Vector<Real> factor_of(Vector<Real> sum) {
  if constexpr (operation == Operation::softmax) return 1 / sum;
  else return log<Real>(sum);
}

template <Operation operation, typename Real>
Vector<Real> product_of(Vector<Real> grad, Vector<Real> output) {
  if constexpr (operation == Operation::softmax) return grad * output;
  else return grad;
}

template <Operation operation, typename Real>
Vector<Real> gradient_of(Vector<Real> grad, Vector<Real> output, Vector<Real> sum) {
  if constexpr (operation == Operation::softmax) return output * (grad - sum);
  else return grad - exp<Real>(output) * sum;
}

// ------------------------------------------------------------------------------------------------ packed rows

// Between rows of dim elements without gaps and rows of `width` elements, the lanes of a vector that one row owns.
// Whole groups are copied, and what is too much is overwritten by the next row or lies in the room after the tile.
template <int width, typename Real>
void spread(std::int64_t rows, int dim, const Real* tile, Real* scratch) {
  using Group = VectorN<Real, width>;
  for (std::int64_t row = 0; row < rows; ++row) store(scratch + row * width, load<Group>(tile + row * dim));
}

template <int width, typename Real>
void gather(std::int64_t rows, int dim, const Real* scratch, Real* tile) {
  using Group = VectorN<Real, width>;
  for (std::int64_t row = 0; row < rows; ++row) store(tile + row * dim, load<Group>(scratch + row * width));
}

template <Operation operation, int width, typename Real>
void packed_forward(std::int64_t rows, int dim, Real* tile, Real* scratch) {
  spread<width>(rows, dim, tile, scratch);
  const auto present = (lane_numbers<Real>() & (width - 1)) < dim;
  for (std::int64_t i = 0; i < rows * width; i += kLanes<Real>) {
    const Vector<Real> x = present ? load<Vector<Real>>(scratch + i) : broadcast(-kInfinity<Real>);
    const Vector<Real> shifted = x - group_max<width, Real>(x);
    const Vector<Real> e = exp<Real>(shifted);
    const Vector<Real> factor = factor_of<operation, Real>(group_sum<width, Real>(e));
    store(scratch + i, operation == Operation::softmax ? e * factor : shifted - factor);
  }
  gather<width>(rows, dim, scratch, tile);
}

template <Operation operation, int width, typename Real>
void packed_backward(std::int64_t rows, int dim, Real* grad, Real* output, Real* scratch) {
  Real* outputs = scratch + rows * width + kLanes<Real>;
  spread<width>(rows, dim, grad, scratch);
  spread<width>(rows, dim, output, outputs);
  const auto present = (lane_numbers<Real>() & (width - 1)) < dim;
  for (std::int64_t i = 0; i < rows * width; i += kLanes<Real>) {
    const Vector<Real> g = present ? load<Vector<Real>>(scratch + i) : Vector<Real>{};
    const Vector<Real> y = present ? load<Vector<Real>>(outputs + i) : Vector<Real>{};
    const Vector<Real> sum = group_sum<width, Real>(product_of<operation, Real>(g, y));
    store(scratch + i, gradient_of<operation, Real>(g, y, sum));
  }
  gather<width>(rows, dim, scratch, grad);
}

// ------------------------------------------------------------------------------------------------ rows

inline constexpr int kUnroll = 4;  // chains of dependent operations kept apart

template <typename Real>
struct Accumulators {
  Vector<Real> part[kUnroll];
  explicit Accumulators(Real value) : part{broadcast(value), broadcast(value), broadcast(value), broadcast(value)} {}

  Vector<Real> max() const {
    return group_max<kLanes<Real>, Real>(larger(larger(part[0], part[1]), larger(part[2], part[3])));
  }
  Vector<Real> sum() const { return group_sum<kLanes<Real>, Real>((part[0] + part[1]) + (part[2] + part[3])); }
};

// body(offset, chain) for each vector of a row.
template <typename Real, typename Body>
void for_vectors(std::int64_t width, const Body& body) {
  constexpr int lanes = kLanes<Real>;
  std::int64_t i = 0;
  for (; i + kUnroll * lanes <= width; i += kUnroll * lanes) {
    body(i, 0);
    body(i + lanes, 1);
    body(i + 2 * lanes, 2);
    body(i + 3 * lanes, 3);
  }
  for (; i < width; i += lanes) body(i, 0);
}

template <Operation operation, typename Real>
void rows_forward(std::int64_t rows, std::int64_t width, Real* tile) {
  for (const Real* end = tile + rows * width; tile != end; tile += width) {
    Accumulators<Real> max(-kInfinity<Real>), sum(0);
    for_vectors<Real>(width, [&](std::int64_t i, int chain) {
      max.part[chain] = larger(max.part[chain], load<Vector<Real>>(tile + i));
    });
    const Vector<Real> row_max = max.max();
    for_vectors<Real>(width, [&](std::int64_t i, int chain) {
      const Vector<Real> shifted = load<Vector<Real>>(tile + i) - row_max;
      const Vector<Real> e = exp<Real>(shifted);
      sum.part[chain] += e;
      store(tile + i, operation == Operation::softmax ? e : shifted);
    });
    const Vector<Real> factor = factor_of<operation, Real>(sum.sum());
    for_vectors<Real>(width, [&](std::int64_t i, int) {
      const Vector<Real> x = load<Vector<Real>>(tile + i);
      store(tile + i, operation == Operation::softmax ? x * factor : x - factor);
    });
  }
}

template <Operation operation, typename Real>
void rows_backward(std::int64_t rows, std::int64_t width, Real* grad, const Real* output) {
  for (const Real* end = grad + rows * width; grad != end; grad += width, output += width) {
    Accumulators<Real> products(0);
    for_vectors<Real>(width, [&](std::int64_t i, int chain) {
      products.part[chain] +=
          product_of<operation, Real>(load<Vector<Real>>(grad + i), load<Vector<Real>>(output + i));
    });
    const Vector<Real> sum = products.sum();
    for_vectors<Real>(width, [&](std::int64_t i, int) {
      store(grad + i,
            gradient_of<operation, Real>(load<Vector<Real>>(grad + i), load<Vector<Real>>(output + i), sum));
    });
  }
}

// ------------------------------------------------------------------------------------------------ columns

// body(column, number of vectors) for bands of neighbouring columns, narrow enough for a band's state to stay in
// registers.
template <typename Real, typename Body>
void for_bands(std::int64_t width, const Body& body) {
  constexpr int lanes = kLanes<Real>;
  std::int64_t column = 0;
  for (; column + kUnroll * lanes <= width; column += kUnroll * lanes)
    body(column, std::integral_constant<int, kUnroll>());
  for (; column < width; column += lanes) body(column, std::integral_constant<int, 1>());
}

// body(element, chain) for each vector of a band.
template <typename Real, int vectors, typename Body>
void for_band(std::int64_t dim, std::int64_t width, const Body& body) {
  for (std::int64_t i = 0; i < dim * width; i += width)
    [&]<int... chain>(std::integer_sequence<int, chain...>) {
      (body(i + chain * kLanes<Real>, chain), ...);
    }(std::make_integer_sequence<int, vectors>());
}

// Columns that belong together are reduced to the first of them, which all then repeat.
template <typename Real, typename Reduce>
void fold(std::int64_t width, std::int64_t period, Real* values, const Reduce& reduce) {
  for (std::int64_t base = period; base < width; base += period)
    for (std::int64_t column = 0; column < period; ++column)
      values[column] = reduce(values[column], values[base + column]);
  for (std::int64_t column = period; column < width; ++column) values[column] = values[column - period];
}

// keep: the exponentials replace the tile.
template <bool keep, typename Real>
void column_statistics(std::int64_t dim, std::int64_t width, std::int64_t period, Real* tile, Real* max, Real* sum) {
  for_bands<Real>(width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>) {
    Vector<Real> largest[vectors];
    for (int v = 0; v < vectors; ++v) largest[v] = broadcast(-kInfinity<Real>);
    for_band<Real, vectors>(dim, width, [&](std::int64_t i, int chain) {
      largest[chain] = larger(largest[chain], load<Vector<Real>>(tile + column + i));
    });
    for (int v = 0; v < vectors; ++v) store(max + column + v * kLanes<Real>, largest[v]);
  });
  fold(width, period, max, [](Real a, Real b) { return b > a ? b : a; });

  for_bands<Real>(width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>) {
    Vector<Real> shift[vectors], total[vectors] = {};
    for (int v = 0; v < vectors; ++v) {  // as MaxSum::shift
      shift[v] = load<Vector<Real>>(max + column + v * kLanes<Real>);
      shift[v] = shift[v] == -kInfinity<Real> ? Vector<Real>{} : shift[v];
    }
    for_band<Real, vectors>(dim, width, [&](std::int64_t i, int chain) {
      const Vector<Real> e = exp<Real>(load<Vector<Real>>(tile + column + i) - shift[chain]);
      total[chain] += e;
      if constexpr (keep) store(tile + column + i, e);
    });
    for (int v = 0; v < vectors; ++v) store(sum + column + v * kLanes<Real>, total[v]);
  });
  fold(width, period, sum, [](Real a, Real b) { return a + b; });
}

template <Operation operation, bool kept, typename Real>
void column_finish(std::int64_t dim, std::int64_t width, Real* tile, const Real* max, const Real* sum) {
  for_bands<Real>(width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>) {
    Vector<Real> shift[vectors], factor[vectors];
    for (int v = 0; v < vectors; ++v) {
      shift[v] = load<Vector<Real>>(max + column + v * kLanes<Real>);
      factor[v] = factor_of<operation, Real>(load<Vector<Real>>(sum + column + v * kLanes<Real>));
    }
    for_band<Real, vectors>(dim, width, [&](std::int64_t i, int chain) {
      const Vector<Real> x = load<Vector<Real>>(tile + column + i);
      if constexpr (kept) store(tile + column + i, x * factor[chain]);
      else if constexpr (operation == Operation::softmax)
        store(tile + column + i, exp<Real>(x - shift[chain]) * factor[chain]);
      else store(tile + column + i, (x - shift[chain]) - factor[chain]);
    });
  });
}

template <Operation operation, typename Real>
void column_products(std::int64_t dim, std::int64_t width, std::int64_t period, const Real* grad, const Real* output,
                     Real* sum) {
  for_bands<Real>(width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>) {
    Vector<Real> total[vectors] = {};
    for_band<Real, vectors>(dim, width, [&](std::int64_t i, int chain) {
      total[chain] += product_of<operation, Real>(load<Vector<Real>>(grad + column + i),
                                                  load<Vector<Real>>(output + column + i));
    });
    for (int v = 0; v < vectors; ++v) store(sum + column + v * kLanes<Real>, total[v]);
  });
  fold(width, period, sum, [](Real a, Real b) { return a + b; });
}

template <Operation operation, typename Real>
void column_gradient(std::int64_t dim, std::int64_t width, Real* grad, const Real* output, const Real* sum) {
  for_bands<Real>(width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>) {
    Vector<Real> total[vectors];
    for (int v = 0; v < vectors; ++v) total[v] = load<Vector<Real>>(sum + column + v * kLanes<Real>);
    for_band<Real, vectors>(dim, width, [&](std::int64_t i, int chain) {
      store(grad + column + i,
            gradient_of<operation, Real>(load<Vector<Real>>(grad + column + i), load<Vector<Real>>(output + column + i),
                                         total[chain]));
    });
  });
}

// ------------------------------------------------------------------------------------------------ the table

// The narrowest group of lanes, a power of two, that holds a packed row.
template <Operation operation, typename Real, int width = 1>
void any_packed_forward(std::int64_t rows, int dim, Real* tile, Real* scratch) {
  if constexpr (width < kLanes<Real>)
    if (dim > width) return any_packed_forward<operation, Real, width * 2>(rows, dim, tile, scratch);
  packed_forward<operation, width>(rows, dim, tile, scratch);
}

template <Operation operation, typename Real, int width = 1>
void any_packed_backward(std::int64_t rows, int dim, Real* grad, Real* output, Real* scratch) {
  if constexpr (width < kLanes<Real>)
    if (dim > width) return any_packed_backward<operation, Real, width * 2>(rows, dim, grad, output, scratch);
  packed_backward<operation, width>(rows, dim, grad, output, scratch);
}

template <Operation operation, typename Real>
constexpr OperationKernels<Real> operation_kernels() {
  return {any_packed_forward<operation, Real>,
          any_packed_backward<operation, Real>,
          rows_forward<operation, Real>,
          rows_backward<operation, Real>,
          column_statistics<operation == Operation::softmax, Real>,
          column_statistics<false, Real>,
          column_finish<operation, operation == Operation::softmax, Real>,
          column_finish<operation, false, Real>,
          column_products<operation, Real>,
          column_gradient<operation, Real>};
}

}  // namespace

extern const Kernels<float> kFloatKernels = {
    kLanes<float>,
    {load_window<Half>, load_window<BFloat16>, load_window<float>, nullptr},
    {store_window<Half>, store_window<BFloat16>, store_window<float>, nullptr},
    {operation_kernels<Operation::softmax, float>(), operation_kernels<Operation::log_softmax, float>()}};

extern const Kernels<double> kDoubleKernels = {
    kLanes<double>,
    {nullptr, nullptr, nullptr, load_window<double>},
    {nullptr, nullptr, nullptr, store_window<double>},
    {operation_kernels<Operation::softmax, double>(), operation_kernels<Operation::log_softmax, double>()}};

}  // namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE
