// The kernels, compiled once for each instruction set (see vector.hpp).
//   takes:            packed: short rows without gaps; rows: contiguous dim; columns: dim across contiguous columns
//   lanes:            packed: several rows a vector, or a row in a few; rows: a row's elements; columns: neighbours
//   reads and writes: whole rows once from memory, exponentials stay in a tile in cache; parts of rows twice
//   order:            load and maximum, exponentials and their sum, scale and store
#include "host/cpu/kernels.hpp"

#include "host/cpu/convert.hpp"
#include "host/cpu/fuse.hpp"

namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE {
namespace {

// Kernels are flattened: loops take their bodies as functions, and one that stayed a call would keep its accumulators
// in memory.

// ------------------------------------------------------------------------------------------------ load and store

// Asks for the line of an element so far from here, which may be outside of all memory: a pointer may not.
// Inlined at once, as must be all functions that do nothing else: GCC drops calls that have no effect.
template <bool written = false, typename Element>
[[gnu::always_inline]] inline void prefetch(const Element* from, std::int64_t distance) {
  const auto address = reinterpret_cast<std::uintptr_t>(from) + static_cast<std::uintptr_t>(distance) * sizeof(Element);
  __builtin_prefetch(reinterpret_cast<const void*>(address), written);
}

// A vector of elements as Real, or the first `count` of one, the others replaced by `padding`.
template <typename Real, typename Element>
Vector<Real> read(const Element* from) {
  return Convert<Element>::widen(load<Packed<Real, Element>>(from));
}

template <typename Real, typename Element>
Vector<Real> read_first(const Element* from, int count, Real padding) {
  const Vector<Real> value = Convert<Element>::widen(load_first<Packed<Real, Element>>(from, count));
  return lane_numbers<Real>() < count ? value : broadcast(padding);
}

// What is left of a row that is no whole vector.
struct Rest {
  int count;
  bool after_vector;  // and not all of the row
  operator int() const { return count; }
};

template <typename Real, typename Element>
void write(Element* to, Vector<Real> value) {
  store(to, Convert<Element>::narrow(value));
}

template <typename Real, typename Element>
void write_first(Element* to, Vector<Real> value, int count) {
  store_first(to, Convert<Element>::narrow(value), count);
}

template <typename Element, typename Real>
void load_row(const Element* from, std::int64_t columns, Real* tile) {
  std::int64_t column = 0;
  for (; column + kLanes<Real> <= columns; column += kLanes<Real>) store(tile + column, read<Real>(from + column));
  const int rest = static_cast<int>(columns - column);
  if (rest > 0) store_first(tile + column, read_first<Real>(from + column, rest, 0), rest);
}

template <typename Element, typename Real>
void store_row(const Real* tile, std::int64_t columns, Element* to) {
  std::int64_t column = 0;
  for (; column + kLanes<Real> <= columns; column += kLanes<Real>)
    write<Real>(to + column, load<Vector<Real>>(tile + column));
  const int rest = static_cast<int>(columns - column);
  if (rest > 0) write_first<Real>(to + column, load<Vector<Real>>(tile + column), rest);
}

template <typename Element, typename Real>
[[gnu::flatten]] void load_window(const void* memory, const Window& window, Real* tile) {
  const auto* from = static_cast<const Element*>(memory);
  for (std::int64_t row = 0; row < window.rows; ++row, from += window.row_stride, tile += window.tile_stride) {
    if (window.column_stride == 1) {
      load_row(from, window.columns, tile);
      continue;
    }
    Element gathered[kLanes<Real>];
    for (std::int64_t column = 0; column < window.columns; column += kLanes<Real>) {
      const std::int64_t rest = window.columns - column;
      const int count = rest < kLanes<Real> ? static_cast<int>(rest) : kLanes<Real>;
      for (int lane = 0; lane < count; ++lane) gathered[lane] = from[(column + lane) * window.column_stride];
      load_row(gathered, count, tile + column);
    }
  }
}

template <typename Element, typename Real>
[[gnu::flatten]] void store_window(const Real* tile, const Window& window, void* memory) {
  auto* to = static_cast<Element*>(memory);
  for (std::int64_t row = 0; row < window.rows; ++row, to += window.row_stride, tile += window.tile_stride) {
    if (window.column_stride == 1) {
      store_row(tile, window.columns, to);
      continue;
    }
    Element scattered[kLanes<Real>];
    for (std::int64_t column = 0; column < window.columns; column += kLanes<Real>) {
      const std::int64_t rest = window.columns - column;
      const int count = rest < kLanes<Real> ? static_cast<int>(rest) : kLanes<Real>;
      store_row(tile + column, count, scattered);
      for (int lane = 0; lane < count; ++lane) to[(column + lane) * window.column_stride] = scattered[lane];
    }
  }
}

// ------------------------------------------------------------------------------------------------ epilogues

// What is subtracted or multiplied at the end, from the sum of exponentials.
template <Operation operation, typename Real>
Vector<Real> factor_of(Vector<Real> sum) {
  if constexpr (operation == Operation::softmax)
    return 1 / sum;
  else
    return log<Real>(sum);
}

template <Operation operation, typename Real>
Vector<Real> product_of(Vector<Real> grad, Vector<Real> output) {
  if constexpr (operation == Operation::softmax)
    return grad * output;
  else
    return grad;
}

template <Operation operation, typename Real>
Vector<Real> gradient_of(Vector<Real> grad, Vector<Real> output, Vector<Real> sum) {
  if constexpr (operation == Operation::softmax)
    return output * (grad - sum);
  else
    return grad - exp<Real>(output) * sum;
}

// ------------------------------------------------------------------------------------------------ packed rows

template <int count, typename Body>
void unrolled(const Body& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) { (body(i), ...); }(std::make_integer_sequence<int, count>());
}

// Rows side by side in `vectors` vectors, or several in one: each in a group of lanes. A turn is as many as a vector
// has room for. spread() says where take() finds the vectors of a turn, and target() where put() leaves them;
// gather() then brings them where they belong.
#if defined(__AVX2__)

// A turn is loaded as it lies, and one permutation gives each of its rows a group; one that has the vector to itself is
// permuted, too, or GCC would mask the load, which takes twice as long (AVX-512). Whole vectors are stored, and what is
// too much is overwritten by the next turn: after a masked store, loads and stores beside it would wait. Only the last
// turns read and write no more than there is.
template <typename Real, int group, int vectors>
class PackedRows {
 public:
  static_assert(vectors == 1 || group == kLanes<Real>);

  PackedRows(std::int64_t rows, int dim) : rows_(rows), dim_(dim) {
    for (int lane = 0; lane < kLanes<Real>; ++lane) {
      const int row = lane / group, within = lane % group;
      spread_[lane] = within < dim ? row * dim + within : 0;
      gather_[lane] = lane < kRows * dim ? lane / dim * group + lane % dim : 0;
    }
  }

  std::int64_t turns() const { return (rows_ + kRows - 1) / kRows; }
  const Real* spread(const Real* from, Real*) const { return from; }
  void take(const Real* from, std::int64_t turn, Vector<Real> (&x)[vectors]) const {
    unrolled<vectors>([&](int v) {
      const std::int64_t at = first_of(turn, v), left = rows_ * dim_ - at;
      x[v] = left >= kLanes<Real> ? load<Vector<Real>>(from + at)
                                  : load_first<Vector<Real>>(from + at, static_cast<int>(left));
      if constexpr (vectors == 1) x[v] = permuted<Real>(x[v], spread_);
    });
  }
  Real* target(Real* result, Real*) const { return result; }
  void put(Real* result, std::int64_t turn, const Vector<Real> (&x)[vectors]) const {
    unrolled<vectors>([&](int v) {
      const std::int64_t at = first_of(turn, v), left = rows_ * dim_ - at;
      const Vector<Real> value = group < kLanes<Real> ? permuted<Real>(x[v], gather_) : x[v];
      if (left >= kLanes<Real>)
        store(result + at, value);
      else
        store_first(result + at, value, static_cast<int>(left));
    });
  }
  void gather(const Real*, Real*) const {}

 private:
  static constexpr int kRows = kLanes<Real> / group;  // of a turn

  std::int64_t first_of(std::int64_t turn, int v) const { return turn * kRows * dim_ + v * kLanes<Real>; }

  std::int64_t rows_;
  int dim_;
  Integers<Real> spread_, gather_;
};

#else

// Through scratch memory. Whole groups are copied, and what is too much is overwritten by the next row; of the last row
// what there is.
template <typename Real, int group, int vectors>
class PackedRows {
 public:
  static_assert(vectors == 1 || group == kLanes<Real>);

  PackedRows(std::int64_t rows, int dim) : rows_(rows), dim_(dim) {}

  std::int64_t turns() const { return (rows_ * kWidth + kStep - 1) / kStep; }
  const Real* spread(const Real* from, Real* scratch) const {
    each_row(from, dim_, scratch, kWidth);
    return scratch;
  }
  void take(const Real* from, std::int64_t turn, Vector<Real> (&x)[vectors]) const {
    for (int v = 0; v < vectors; ++v) x[v] = load<Vector<Real>>(from + turn * kStep + v * kLanes<Real>);
  }
  Real* target(Real*, Real* scratch) const { return scratch; }
  void put(Real* scratch, std::int64_t turn, const Vector<Real> (&x)[vectors]) const {
    for (int v = 0; v < vectors; ++v) store(scratch + turn * kStep + v * kLanes<Real>, x[v]);
  }
  void gather(const Real* scratch, Real* result) const { each_row(scratch, kWidth, result, dim_); }

 private:
  static constexpr int kWidth = group * vectors;
  static constexpr int kStep = vectors * kLanes<Real>;  // elements of a turn: of one row, or of several

  void each_row(const Real* from, int from_step, Real* to, int to_step) const {
    for (std::int64_t row = 0; row < rows_ - 1; ++row)
      for (int at = 0; at < kWidth; at += group)
        store(to + row * to_step + at, load<VectorN<Real, group>>(from + row * from_step + at));
    for (int at = 0; at < dim_; ++at) to[(rows_ - 1) * to_step + at] = from[(rows_ - 1) * from_step + at];
  }

  std::int64_t rows_;
  int dim_;
};

#endif

// The lanes of a turn's last vector that have an element. All lanes of the others have.
template <typename Real, int group, int vectors>
Integers<Real> packed_lanes(int dim) {
  return (lane_numbers<Real>() & (group - 1)) < dim - (vectors - 1) * group;
}

// A logarithm takes as long as all the rest: rows that have a vector to themselves share one.
template <Operation operation, int group, int vectors, typename Real>
[[gnu::flatten]] void packed_forward(std::int64_t rows, int dim, const Real* source, Real* scratch, Real* result) {
  constexpr bool softmax = operation == Operation::softmax;
  constexpr int batch = softmax || group < kLanes<Real> ? 1 : kLanes<Real>;
  const PackedRows<Real, group, vectors> layout(rows, dim);
  const Real* const from = layout.spread(source, scratch);
  Real* const to = layout.target(result, scratch);
  const auto present = packed_lanes<Real, group, vectors>(dim);
  const std::int64_t turns = layout.turns();
  for (std::int64_t turn = 0; turn < turns; turn += batch) {
    const int count = batch > 1 && turns - turn < batch ? static_cast<int>(turns - turn) : batch;
    Vector<Real> x[batch][vectors], sum;
    Real statistics[kLanes<Real>] = {};
    for (int t = 0; t < count; ++t) {
      layout.take(from, turn + t, x[t]);
      Vector<Real>& last = x[t][vectors - 1];
      Vector<Real> max = last = present ? last : broadcast(-kInfinity<Real>);
      for (int v = 0; v < vectors - 1; ++v) max = larger(max, x[t][v]);
      max = group_max<group, Real>(max);
      for (int v = 0; v < vectors; ++v) x[t][v] -= max;
      last = present ? last : Vector<Real>{};  // -inf would take exp() longer
      sum = Vector<Real>{};
      for (int v = 0; v < vectors; ++v) {
        const Vector<Real> e = exp<Real>(x[t][v]);
        sum += v < vectors - 1 ? e : Vector<Real>(present ? e : Vector<Real>{});
        if (softmax) x[t][v] = e;
      }
      sum = group_sum<group, Real>(sum);
      if (batch > 1) statistics[t] = sum[0];
    }
    const Vector<Real> factors = factor_of<operation, Real>(batch == 1 ? sum : load<Vector<Real>>(statistics));
    if (batch > 1) store(statistics, factors);
    for (int t = 0; t < count; ++t) {
      const Vector<Real> factor = batch == 1 ? factors : broadcast(statistics[t]);
      for (int v = 0; v < vectors; ++v) x[t][v] = softmax ? x[t][v] * factor : x[t][v] - factor;
      layout.put(to, turn + t, x[t]);
    }
  }
  layout.gather(to, result);
}

template <Operation operation, int group, int vectors, typename Real>
[[gnu::flatten]] void packed_backward(std::int64_t rows, int dim, const Real* grad, const Real* output, Real* scratch,
                                      Real* result) {
  const PackedRows<Real, group, vectors> layout(rows, dim);
  const Real* const grads = layout.spread(grad, scratch);
  const Real* const outputs = layout.spread(output, scratch + rows * group * vectors + kLanes<Real>);
  Real* const to = layout.target(result, scratch);
  const auto present = packed_lanes<Real, group, vectors>(dim);
  for (std::int64_t turn = 0; turn < layout.turns(); ++turn) {
    Vector<Real> g[vectors], y[vectors], sum{};
    layout.take(grads, turn, g);
    layout.take(outputs, turn, y);
    for (int v = 0; v < vectors; ++v) {
      if (v == vectors - 1) g[v] = present ? g[v] : Vector<Real>{}, y[v] = present ? y[v] : Vector<Real>{};
      sum += product_of<operation, Real>(g[v], y[v]);
    }
    sum = group_sum<group, Real>(sum);
    for (int v = 0; v < vectors; ++v) g[v] = gradient_of<operation, Real>(g[v], y[v], sum);
    layout.put(to, turn, g);
  }
  layout.gather(to, result);
}

// ------------------------------------------------------------------------------------------------ rows

inline constexpr int kUnroll = 4;             // chains of dependent operations kept apart
inline constexpr std::int64_t kBlock = 2048;  // elements that stay in the first cache from one step to the next
inline constexpr std::int64_t kStage = 512;   // ... where the steps are a few instructions

template <typename Real>
struct Accumulators {
  Vector<Real> part[kUnroll];
  explicit Accumulators(Real value) : part{broadcast(value), broadcast(value), broadcast(value), broadcast(value)} {}

  Vector<Real> max() const {
    return group_max<kLanes<Real>, Real>(larger(larger(part[0], part[1]), larger(part[2], part[3])));
  }
  Vector<Real> sum() const { return group_sum<kLanes<Real>, Real>((part[0] + part[1]) + (part[2] + part[3])); }
};

// Elements from here to the next one whose address is a multiple of so many.
template <int elements, typename Element>
int elements_to_aligned(const Element* at) {
  return static_cast<int>(-(reinterpret_cast<std::uintptr_t>(at) / sizeof(Element)) % elements);
}

// body(offset, chain, count) for each vector of a row; count is a constant, but the last one's, when it is partial:
// Rest.
template <typename Real, typename Body>
void for_vectors(std::int64_t dim, const Body& body) {
  constexpr int lanes = kLanes<Real>;
  constexpr std::integral_constant<int, lanes> all;
  std::int64_t i = 0;
  for (; i + kUnroll * lanes <= dim; i += kUnroll * lanes) {
    body(i, 0, all);
    body(i + lanes, 1, all);
    body(i + 2 * lanes, 2, all);
    body(i + 3 * lanes, 3, all);
  }
  for (; i + lanes <= dim; i += lanes) body(i, 0, all);
  if (i < dim) body(i, 0, Rest{static_cast<int>(dim - i), i > 0});
}

// Elements of a row before the first two vectors' worth that is aligned; short rows are not. (Loads that cross lines of
// the cache take 100 rows of 50257 bfloat16 a third longer. The order of a sum then depends on where its row begins.)
template <typename Element>
std::int64_t interleaved_head(const Element* row, std::int64_t dim) {
  constexpr int step = 2 * kLanes<float>;
  return dim >= 16 * step ? elements_to_aligned<step>(row) : 0;
}

// pairs(offset, chain) for as many neighbouring elements as two vectors have, as often as they are there from `head`
// on, and rest(offset, chain, count), as for_vectors, for what lies before and after.
template <typename Pairs, typename Rest>
void for_interleaved(std::int64_t dim, std::int64_t head, const Pairs& pairs, const Rest& rest) {
  constexpr int step = 2 * kLanes<float>;
  std::int64_t i = head;
  for_vectors<float>(head, rest);
  for (; i + 2 * step <= dim; i += 2 * step) {
    pairs(i, 0);
    pairs(i + step, 2);
  }
  for (; i + step <= dim; i += step) pairs(i, 0);
  for_vectors<float>(dim - i, [&](std::int64_t offset, int chain, auto count) { rest(i + offset, chain, count); });
}

template <typename Real, typename Element, int lanes>
Vector<Real> read(const Element* from, std::integral_constant<int, lanes>, Real) {
  return read<Real>(from);
}
template <typename Real, typename Element>
Vector<Real> read(const Element* from, int count, Real padding) {
  return read_first<Real>(from, count, padding);
}
template <typename Real, typename Element>
Vector<Real> read(const Element* from, Rest rest, Real padding) {
  if (!rest.after_vector) return read_first<Real>(from, rest.count, padding);
  const Vector<Real> value = Convert<Element>::widen(load_last<Packed<Real, Element>>(from, rest.count));
  return lane_numbers<Real>() < rest.count ? value : broadcast(padding);
}
template <typename Real, int lanes>
Vector<Real> exp_first(Vector<Real> x, std::integral_constant<int, lanes>) {
  return exp<Real>(x);
}
// 0 for the others, of which exp(), unlike for -inf, finds it no harder than for the rest.
template <typename Real>
Vector<Real> exp_first(Vector<Real> x, int count) {
  const auto present = lane_numbers<Real>() < count;
  return present ? exp<Real>(present ? x : Vector<Real>{}) : Vector<Real>{};
}
template <typename Real, typename Element, int lanes>
void write(Element* to, Vector<Real> value, std::integral_constant<int, lanes>) {
  write<Real>(to, value);
}
template <typename Real, typename Element>
void write(Element* to, Vector<Real> value, int count) {
  write_first<Real>(to, value, count);
}

// Elements of a row of results before its first vector that is aligned, as a vector of 64 bytes otherwise crosses lines
// of the cache; other operands mostly lie alike. (Smaller vectors cross few, those of 16 bits are of 32 bytes, and for
// rows of less than eight the partial one takes longer.)
template <typename Real, typename Element>
int head_of(const Element* row, std::int64_t dim) {
  if constexpr (kVectorBytes == 64 && sizeof(Element) == sizeof(Real))
    if (dim >= 8 * kLanes<Real>) return elements_to_aligned<kLanes<Real>>(row);
  return 0;
}

// Writes what body(offset, count) returns for each vector of a row. The last one overlaps the one before: where a mask
// stores a part, AVX2 takes many times as long. Computing an exponential and rounding it to 16 bits is a chain of
// operations so long that the processor overlaps few of them: in long rows the two are separate steps.
template <bool exponential, typename Real, typename Element, typename Body>
void write_row(std::int64_t dim, Element* result, const Body& body) {
  if (dim < kStage / 2 || !exponential || sizeof(Element) == sizeof(Real)) {
    constexpr int lanes = kLanes<Real>;
    constexpr std::integral_constant<int, lanes> all;
    if (dim < lanes) return write_first<Real>(result, body(0, static_cast<int>(dim)), static_cast<int>(dim));
    const int head = head_of<Real>(result, dim);
    const bool overlap = (dim - head) % lanes > 0;
    Vector<Real> last{};
    if (overlap) last = body(dim - lanes, all);  // before the rest is written, perhaps where it was read
    if (head > 0) write_first<Real>(result, body(0, head), head);
    for_vectors<Real>((dim - head) / lanes * lanes,
                      [&](std::int64_t i, int, auto) { write<Real>(result + head + i, body(head + i, all)); });
    if (overlap) write<Real>(result + dim - lanes, last);
    return;
  }
  alignas(kVectorBytes) Real stage[kStage];
  for (std::int64_t first = 0; first < dim; first += kStage) {
    const std::int64_t size = dim - first < kStage ? dim - first : kStage;
    for_vectors<Real>(size, [&](std::int64_t i, int, auto count) { store(stage + i, body(first + i, count)); });
    for_vectors<Real>(size, [&](std::int64_t i, int, auto count) {
      write<Real>(result + first + i, load<Vector<Real>>(stage + i), count);
    });
  }
}

// Writes rows past the caches, which spares reading what is overwritten. Only whole registers go there, aligned: where
// a row ends within one, its end waits for the next row, which mostly begins there.
template <typename Element>
class RowStream {
 public:
  using Register = std::conditional_t<std::is_same_v<Element, BFloat16>, Words, Packed<Wide<Element>, Element>>;
  static constexpr int kWidth = sizeof(Register) / sizeof(Element);

  RowStream() = default;
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;
  ~RowStream() {
    if (end_ == nullptr) return;
    store_waiting();
    fence();
  }

  // What body(offset) returns for each register of a row that is at least one long; the first and the last may overlap
  // others.
  template <typename Body>
  void write(std::int64_t dim, Element* to, const Body& body) {
    const bool continues = to == end_;
    if (!continues && end_ != nullptr) store_waiting();
    std::int64_t i = 0;
    if (const int before = place(to); before > 0) {
      store(waiting_ + before, body(0));
      i = kWidth - before;
      if (continues)
        stream(to - before, load<Register>(waiting_));
      else
        store_elements(to, waiting_ + before, i);
    }
    for (; i + kWidth <= dim; i += kWidth) stream(to + i, body(i));
    if (i < dim) store(waiting_ + (dim - i) - kWidth, body(dim - kWidth));
    end_ = to + dim;
  }

 private:
  static int place(const Element* at) {  // in its register
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(at) / sizeof(Element) % kWidth);
  }
  // No more of a register: those beside them may be another thread's.
  static void store_elements(Element* to, const Element* from, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
  void store_waiting() const { store_elements(end_ - place(end_), waiting_, place(end_)); }

  alignas(kVectorBytes) Element room_[3 * kWidth];
  Element* const waiting_ = room_ + kWidth;  // the register where the last row ends
  Element* end_ = nullptr;                   // of the last row
};

// Rows of 16 bits that wait for the conversion of their vectors rather than for memory: to fetch them ahead takes 15 %
// longer (67 elements; from 256 on nothing).
template <typename Element>
bool waits_for_conversion(std::int64_t dim) {
  return sizeof(Element) == 2 && dim < 256;
}

// Whether there are streams at all: 16-bit results always wait for their conversion where vectors are small or it comes
// after an exponential.
template <Operation operation, typename Element>
inline constexpr bool kStreams =
    kCanStream && (sizeof(Element) > 2 || (kVectorBytes == 64 && operation == Operation::softmax));

// A stream pays where nothing of the result would stay in a cache, and
//   - it is 16 KB long: at its end it waits until all of it has arrived (streams of 2 rows of 67 floats take 4 times as
//     long as no streams),
//   - rows with gaps between them have 4 KB: both ends of each are stored on their own, to lines just streamed,
//   - rows without have 128, most of them in whole registers: where a row ends within one, it is converted twice.
// RowStream counts on a register in each row, and on elements that are aligned to their size.
template <typename Element>
bool is_streamed(const Rows& rows, const Element* result) {
  const std::int64_t bytes = rows.dim * static_cast<std::int64_t>(sizeof(Element));
  const bool gaps = rows.stride[kResult] != rows.dim;
  const bool whole = rows.dim % RowStream<Element>::kWidth == 0;
  return rows.exceeds_caches && rows.count * bytes >= 16384 && bytes >= (gaps ? 4096 : 128) &&
         (whole || !waits_for_conversion<Element>(rows.dim)) &&
         reinterpret_cast<std::uintptr_t>(result) % sizeof(Element) == 0;
}

// body(place in a tile, chain, x) for each vector of a row. Of bfloat16, neighbouring vectors of a tile are
// interleaved, in pairs that begin with the row: write_tile() counts on that, and no sum depends on where a row begins.
template <typename Real, typename Element, typename Body>
void read_row(std::int64_t dim, const Element* source, Real padding, const Body& body) {
  const auto one = [&](std::int64_t i, int chain, auto count) {
    body(i, chain, read<Real>(source + i, count, padding));
  };
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const auto two = [&](std::int64_t i, int chain) {
      const auto x = Interleaved::load(source + i);
      body(i, chain, x.even);
      body(i + kLanes<Real>, chain + 1, x.odd);
    };
    for_interleaved(dim, 0, two, one);
  } else {
    for_vectors<Real>(dim, one);
  }
}

// Writes body(x) for each vector x of a tile that read_row() has filled from a row of this type.
template <typename Real, typename Element, typename Body>
void write_tile(std::int64_t dim, const Real* tile, Element* result, const Body& body) {
  const auto at = [&](std::int64_t i) { return body(load<Vector<Real>>(tile + i)); };
  const auto one = [&](std::int64_t i, int, auto count) { write<Real>(result + i, at(i), count); };
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const auto two = [&](std::int64_t i, int) { store(result + i, Interleaved{at(i), at(i + kLanes<Real>)}.narrow()); };
    for_interleaved(dim, 0, two, one);
  } else {
    constexpr int lanes = kLanes<Real>;
    if (dim < lanes) return for_vectors<Real>(dim, one);
    for_vectors<Real>(dim / lanes * lanes, one);
    if (dim % lanes > 0) write<Real>(result + dim - lanes, at(dim - lanes));
  }
}

// Copies a row to the tile, in whole vectors; its maximum comes back in every lane.
template <typename Real, typename Element>
Vector<Real> row_load(std::int64_t dim, const Element* source, Real* tile) {
  Accumulators<Real> max(-kInfinity<Real>);
  read_row(dim, source, -kInfinity<Real>, [&](std::int64_t i, int chain, Vector<Real> x) {
    max.part[chain] = larger(max.part[chain], x);
    store(tile + i, x);
  });
  return max.max();
}

// The sum of the exponentials of a row in the tile; body(offset, difference to shift, exponential) for each vector.
template <typename Real, typename Body>
Vector<Real> row_sum(std::int64_t dim, const Real* tile, Vector<Real> shift, const Body& body) {
  Accumulators<Real> sum(0);
  for_vectors<Real>(dim, [&](std::int64_t i, int chain, auto count) {
    const Vector<Real> shifted = load<Vector<Real>>(tile + i) - shift;
    const Vector<Real> e = exp_first<Real>(shifted, count);
    sum.part[chain] += e;
    body(i, shifted, e);
  });
  return sum.sum();
}

// Short rows advance together, step by step: one after another they would wait for their reductions, and this way one
// division or logarithm serves a vector of rows. While exponentials are computed, memory would be idle: the next rows
// and the place of the result are fetched meanwhile, which halves the time of rows that come from memory.
template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void row_forward(const Rows& rows, const void* source, Real* tile, void* result) {
  constexpr bool softmax = operation == Operation::softmax;
  const std::int64_t width = (rows.dim + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
  const std::int64_t fitting = width < kBlock ? kBlock / width : 1;
  const std::int64_t batch = fitting < kLanes<Real> ? fitting : kLanes<Real>;
  const auto* from = static_cast<const Element*>(source);
  auto* to = static_cast<Element*>(result);
  for (std::int64_t left = rows.count; left > 0; left -= batch) {
    const std::int64_t count = left < batch ? left : batch;
    Real statistics[kLanes<Real>] = {};
    for (std::int64_t row = 0; row < count; ++row)
      statistics[row] = row_load(rows.dim, from + row * rows.stride[kSource], tile + row * width)[0];
    for (std::int64_t row = 0; row < count; ++row) {
      Real* const at = tile + row * width;
      const Element* const source_row = from + row * rows.stride[kSource];
      const Element* const result_row = to + row * rows.stride[kResult];
      const std::int64_t batch_ahead = count * rows.stride[kSource];
      const auto keep = [&](std::int64_t i, Vector<Real> shifted, Vector<Real> e) {
        store(at + i, softmax ? e : shifted);
        prefetch(source_row, batch_ahead + i);
        prefetch<true>(result_row, i);
      };
      statistics[row] = row_sum(rows.dim, at, broadcast(statistics[row]), keep)[0];
    }
    store(statistics, factor_of<operation, Real>(load<Vector<Real>>(statistics)));
    for (std::int64_t row = 0; row < count; ++row) {
      const Vector<Real> factor = broadcast(statistics[row]);
      write_tile<Real>(rows.dim, tile + row * width, to + row * rows.stride[kResult],
                       [&](Vector<Real> x) { return softmax ? x * factor : x - factor; });
    }
    from += count * rows.stride[kSource];
    to += count * rows.stride[kResult];
  }
}

// A part of a row, block after block in the order of MaxSum::combine.
template <typename Real, typename Element>
[[gnu::flatten]] void row_statistics(std::int64_t dim, const void* source, Real* tile, Real* max, Real* sum) {
  const auto* from = static_cast<const Element*>(source);
  Vector<Real> largest = broadcast(-kInfinity<Real>), total = {};
  for (std::int64_t begin = 0; begin < dim; begin += kBlock) {
    const std::int64_t size = dim - begin < kBlock ? dim - begin : kBlock;
    const Vector<Real> merged = larger(largest, row_load(size, from + begin, tile));
    const Vector<Real> shift = merged == -kInfinity<Real> ? Vector<Real>{} : merged;  // as MaxSum::shift
    const auto fetch = [&](std::int64_t i, Vector<Real>, Vector<Real>)
                           __attribute__((always_inline)) { prefetch(from, begin + kBlock + i); };
    total = total * exp<Real>(largest - shift) + row_sum(size, tile, shift, fetch);
    largest = merged;
  }
  *max = largest[0];
  *sum = total[0];
}

template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void row_finish(std::int64_t dim, const void* source, Real max, Real sum, void* result) {
  const auto* from = static_cast<const Element*>(source);
  auto* to = static_cast<Element*>(result);
  const Vector<Real> factor = factor_of<operation, Real>(broadcast(sum));
  const auto result_of = [&](Vector<Real> x) {
    return operation == Operation::softmax ? exp<Real>(x - max) * factor : x - max - factor;
  };
  if constexpr (sizeof(Element) == sizeof(Real))
    return write_row<false, Real>(
        dim, to, [&](std::int64_t i, auto count) { return result_of(read<Real>(from + i, count, Real(0))); });
  alignas(kVectorBytes) Real stage[kStage];  // in two steps, as write_row
  for (std::int64_t first = 0; first < dim; first += kStage) {
    const std::int64_t size = dim - first < kStage ? dim - first : kStage;
    read_row(size, from + first, Real(0), [&](std::int64_t i, int, Vector<Real> x) { store(stage + i, result_of(x)); });
    write_tile(size, stage, to + first, [](Vector<Real> x) { return x; });
  }
}

template <Operation operation, typename Real, typename Element>
Vector<Real> row_product(std::int64_t dim, const Element* grad, const Element* output) {
  Accumulators<Real> products(0);
  const auto one = [&](std::int64_t i, int chain, auto count) {
    products.part[chain] +=
        product_of<operation, Real>(read<Real>(grad + i, count, Real(0)), read<Real>(output + i, count, Real(0)));
  };
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const auto two = [&](std::int64_t i, int chain) {
      const auto g = Interleaved::load(grad + i), y = Interleaved::load(output + i);
      products.part[chain] += product_of<operation, float>(g.even, y.even);
      products.part[chain + 1] += product_of<operation, float>(g.odd, y.odd);
    };
    for_interleaved(dim, interleaved_head(grad, dim), two, one);
  } else {
    for_vectors<Real>(dim, one);
  }
  return products.sum();
}

template <Operation operation, typename Real, typename Element, typename Stream, typename Fetch>
void row_gradient(std::int64_t dim, const Element* grad, const Element* output, Vector<Real> sum, Element* result,
                  Stream stream, const Fetch& fetch) {
  constexpr bool streamed = !std::is_null_pointer_v<Stream>;
  const auto one = [&](std::int64_t i, auto count) {
    fetch(i);
    const Vector<Real> g = read<Real>(grad + i, count, Real(0)), y = read<Real>(output + i, count, Real(0));
    return gradient_of<operation, Real>(g, y, sum);
  };
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const auto two = [&](std::int64_t i) {
      fetch(i);
      const auto g = Interleaved::load(grad + i), y = Interleaved::load(output + i);
      return Interleaved{gradient_of<operation, float>(g.even, y.even, sum),
                         gradient_of<operation, float>(g.odd, y.odd, sum)}
          .narrow();
    };
    if constexpr (streamed) return stream->write(dim, result, two);
    for_interleaved(
        dim, interleaved_head(result, dim), [&](std::int64_t i, int) { store(result + i, two(i)); },
        [&](std::int64_t i, int, auto count) { write<Real>(result + i, one(i, count), count); });
  } else {
    if constexpr (streamed) {
      constexpr std::integral_constant<int, kLanes<Real>> all;
      return stream->write(dim, result, [&](std::int64_t i) { return Convert<Element>::narrow(one(i, all)); });
    }
    write_row<operation == Operation::log_softmax, Real>(dim, result, one);
  }
}

// So far ahead (elements) gradients and outputs that come from memory are fetched: 6 KB, because with 4 rows of 257
// floats take a sixth longer.
template <typename Element>
inline constexpr std::int64_t kFar = 6144 / static_cast<std::int64_t>(sizeof(Element));

// Short rows of 16 bits wait for their reductions, so several advance together. Of a result that is not streamed, the
// place is fetched, too.
template <Operation operation, bool fetched, typename Real, typename Element, typename Stream>
void rows_backward(const Rows& rows, const Element* g, const Element* y, Element* to, Stream stream) {
  constexpr bool streamed = !std::is_null_pointer_v<Stream>;
  const std::int64_t fitting = sizeof(Element) < sizeof(Real) ? 512 / rows.dim : 1;
  const std::int64_t batch = fitting < 1 ? 1 : fitting < kLanes<Real> ? fitting : kLanes<Real>;
  const std::int64_t ahead = rows.dim < kFar<Element> ? kFar<Element> / rows.dim : 1;
  const std::int64_t far_g = ahead * rows.stride[kGrad], far_y = ahead * rows.stride[kSource],
                     far_to = ahead * rows.stride[kResult];
  for (std::int64_t left = rows.count; left > 0; left -= batch) {
    const std::int64_t count = left < batch ? left : batch;
    Vector<Real> sums[kLanes<Real>];
    for (std::int64_t row = 0; row < count; ++row)
      sums[row] = row_product<operation, Real>(rows.dim, g + row * rows.stride[kGrad], y + row * rows.stride[kSource]);
    for (std::int64_t row = 0; row < count; ++row) {
      const auto fetch = [=](std::int64_t i) __attribute__((always_inline)) {
        if (!fetched) return;
        prefetch(g, far_g + i);
        prefetch(y, far_y + i);
        if (!streamed) prefetch<true>(to, far_to + i);
      };
      row_gradient<operation, Real>(rows.dim, g, y, sums[row], to, stream, fetch);
      g += rows.stride[kGrad];
      y += rows.stride[kSource];
      to += rows.stride[kResult];
    }
  }
}

template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void row_backward(const Rows& rows, const void* grad, const void* output, void* result) {
  const auto *g = static_cast<const Element*>(grad), *y = static_cast<const Element*>(output);
  auto* const to = static_cast<Element*>(result);
  if constexpr (kStreams<operation, Element>)
    if (is_streamed(rows, to)) {
      RowStream<Element> stream;
      return rows_backward<operation, true, Real>(rows, g, y, to, &stream);
    }
  if (rows.exceeds_caches && !waits_for_conversion<Element>(rows.dim))
    rows_backward<operation, true, Real>(rows, g, y, to, nullptr);
  else
    rows_backward<operation, false, Real>(rows, g, y, to, nullptr);
}

template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void row_products(std::int64_t dim, const void* grad, const void* output, Real* sum) {
  *sum = row_product<operation, Real>(dim, static_cast<const Element*>(grad), static_cast<const Element*>(output))[0];
}

template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void row_gradients(const Rows& part, const void* grad, const void* output, Real sum, void* result) {
  const auto *g = static_cast<const Element*>(grad), *y = static_cast<const Element*>(output);
  auto* const to = static_cast<Element*>(result);
  const auto fetch = [=](std::int64_t i) __attribute__((always_inline)) {
    prefetch(g, i + kFar<Element>);
    prefetch(y, i + kFar<Element>);
  };
  if constexpr (kStreams<operation, Element>)
    if (is_streamed(part, to)) {
      RowStream<Element> stream;
      return row_gradient<operation, Real>(part.dim, g, y, broadcast(sum), to, &stream, fetch);
    }
  row_gradient<operation, Real>(part.dim, g, y, broadcast(sum), to, nullptr, fetch);
}

// ------------------------------------------------------------------------------------------------ columns

// Vectors of a band of columns: of wide ones each row is a longer run of memory, which is worth some registers spilled
// (4096 x 1024, dim 0, in parts: forward 2.6 ms instead of 3.0, backward 2.4 instead of 2.7); not where the band's
// tile, of whole columns, leaves the first cache.
inline constexpr int kBand = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kWideBand = 16;  // of 32 registers
#else
inline constexpr int kWideBand = 8;  // of 16
#endif

// body(column, number of vectors, count) for bands of neighbouring columns, the widest first; count as in for_vectors.
template <typename Real, int widest, typename Body>
void for_bands(std::int64_t width, const Body& body) {
  constexpr int lanes = kLanes<Real>;
  std::int64_t column = 0;
  const auto bands = [&]<int vectors>(std::integral_constant<int, vectors> number) {
    for (; column + vectors * lanes <= width; column += vectors * lanes)
      body(column, number, std::integral_constant<int, lanes>());
  };
  if constexpr (widest > kBand) bands(std::integral_constant<int, widest>());
  bands(std::integral_constant<int, kBand>());
  bands(std::integral_constant<int, 1>());
  if (column < width) body(column, std::integral_constant<int, 1>(), static_cast<int>(width - column));
}

// body(row, column offset in the band, chain) for each vector of a band.
template <typename Real, int vectors, typename Body>
void for_band(std::int64_t first, std::int64_t last, const Body& body) {
  for (std::int64_t row = first; row < last; ++row)
    [&]<int... chain>(std::integer_sequence<int, chain...>) {
      (body(row, chain * kLanes<Real>, chain), ...);
    }(std::make_integer_sequence<int, vectors>());
}

// The sums over a band of what body(row, column offset in the band, chain) returns; of a few rows first and then of
// those sums, so that the error of long columns does not grow with their length.
template <typename Real, int vectors, typename Body>
void sum_band(std::int64_t dim, Vector<Real> (&sum)[vectors], const Body& body) {
  constexpr std::int64_t kRows = 64;
  for (std::int64_t first = 0; first < dim; first += kRows) {
    Vector<Real> part[vectors] = {};
    for_band<Real, vectors>(first, first + kRows < dim ? first + kRows : dim,
                            [&](std::int64_t row, int offset, int chain) { part[chain] += body(row, offset, chain); });
    for (int v = 0; v < vectors; ++v) sum[v] += part[v];
  }
}

// Writes what body(row, column offset in the band, chain) returns for each vector of a band; in two steps, as
// write_row. streamed: past the caches, of 16 bits not.
template <typename Real, int vectors, typename Element, typename Count, typename Body>
void write_band(std::int64_t dim, std::int64_t stride, Element* result, Count count, bool streamed, const Body& body) {
  if constexpr (sizeof(Element) == sizeof(Real)) {
    const auto at = [&](std::int64_t row, int offset) { return result + row * stride + offset; };
    if constexpr (kCanStream && !std::is_same_v<Count, int>)
      if (streamed)
        return for_band<Real, vectors>(0, dim, [&](std::int64_t row, int offset, int chain) {
          stream(at(row, offset), body(row, offset, chain));
        });
    for_band<Real, vectors>(0, dim, [&](std::int64_t row, int offset, int chain) {
      write<Real>(at(row, offset), body(row, offset, chain), count);
    });
  } else {
    constexpr std::int64_t kRows = 8;
    constexpr int band = vectors * kLanes<Real>;
    alignas(kVectorBytes) Real stage[kRows * band];
    for (std::int64_t first = 0; first < dim; first += kRows) {
      const std::int64_t rows = dim - first < kRows ? dim - first : kRows;
      for_band<Real, vectors>(0, rows, [&](std::int64_t row, int offset, int chain) {
        store(stage + row * band + offset, body(first + row, offset, chain));
      });
      for_band<Real, vectors>(0, rows, [&](std::int64_t row, int offset, int) {
        write<Real>(result + (first + row) * stride + offset, load<Vector<Real>>(stage + row * band + offset), count);
      });
    }
  }
}

// Columns that belong together are reduced to the first of them, which all then repeat.
template <typename Real, typename Reduce>
void fold(std::int64_t width, std::int64_t period, Real* values, const Reduce& reduce) {
  for (std::int64_t base = period; base < width; base += period)
    for (std::int64_t column = 0; column < period; ++column)
      values[column] = reduce(values[column], values[base + column]);
  for (std::int64_t column = period; column < width; ++column) values[column] = values[column - period];
}

// Whole columns, band after band; the tile holds one band. Memory is fetched ahead as in row_forward.
template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void column_forward(const Columns& columns, const void* source, Real* tile, void* result) {
  constexpr bool softmax = operation == Operation::softmax;
  const auto* from = static_cast<const Element*>(source);
  auto* to = static_cast<Element*>(result);
  const std::int64_t stride = columns.stride[kSource], result_stride = columns.stride[kResult];
  for_bands<Real, kBand>(columns.width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>,
                                                         auto count) {
    constexpr int band = vectors * kLanes<Real>;
    Vector<Real> max[vectors], sum[vectors] = {}, factor[vectors];
    for (int v = 0; v < vectors; ++v) max[v] = broadcast(-kInfinity<Real>);
    for_band<Real, vectors>(0, columns.dim, [&](std::int64_t row, int offset, int chain) {
      const Vector<Real> x = read<Real>(from + row * stride + column + offset, count, Real(0));
      max[chain] = larger(max[chain], x);
      store(tile + row * band + offset, x);
    });
    sum_band<Real>(columns.dim, sum, [&](std::int64_t row, int offset, int chain) {
      const Vector<Real> shifted = load<Vector<Real>>(tile + row * band + offset) - max[chain];
      const Vector<Real> e = exp<Real>(shifted);
      store(tile + row * band + offset, softmax ? e : shifted);
      prefetch(from, row * stride + column + offset + band);
      prefetch<true>(to, row * result_stride + column + offset);
      return e;
    });
    for (int v = 0; v < vectors; ++v) factor[v] = factor_of<operation, Real>(sum[v]);
    for_band<Real, vectors>(0, columns.dim, [&](std::int64_t row, int offset, int chain) {
      const Vector<Real> x = load<Vector<Real>>(tile + row * band + offset);
      write<Real>(to + row * result_stride + column + offset, softmax ? x * factor[chain] : x - factor[chain], count);
    });
  });
}

// Columns that begin on a line of the cache in each row; most bands are of whole lines. (16 bits are never streamed.)
template <typename Element>
bool is_streamed(const Columns& columns, const Element* result) {
  constexpr int line = 64 / sizeof(Element);
  return kCanStream && sizeof(Element) > 2 && columns.exceeds_caches &&
         reinterpret_cast<std::uintptr_t>(result) % 64 == 0 && columns.stride[kResult] % line == 0;
}

// Whole columns, band after band: the second reading comes from the cache.
template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void column_backward(const Columns& columns, const void* grad, const void* output, void* result) {
  const auto *g = static_cast<const Element*>(grad), *y = static_cast<const Element*>(output);
  auto* to = static_cast<Element*>(result);
  const std::int64_t source_stride = columns.stride[kSource], grad_stride = columns.stride[kGrad],
                     result_stride = columns.stride[kResult];
  const bool streamed = is_streamed(columns, to);
  for_bands<Real, kWideBand>(
      columns.width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>, auto count) {
        constexpr int band = vectors * kLanes<Real>;
        Vector<Real> sum[vectors] = {};
        sum_band<Real>(columns.dim, sum, [&](std::int64_t row, int offset, int) {
          const std::int64_t at = column + offset;
          if (!streamed) prefetch<true>(to, row * result_stride + at);
          return product_of<operation, Real>(read<Real>(g + row * grad_stride + at, count, Real(0)),
                                             read<Real>(y + row * source_stride + at, count, Real(0)));
        });
        const auto gradient = [&](std::int64_t row, int offset, int chain) {
          const std::int64_t at = column + offset;
          prefetch(g, row * grad_stride + at + band);
          prefetch(y, row * source_stride + at + band);
          const Vector<Real> gs = read<Real>(g + row * grad_stride + at, count, Real(0));
          const Vector<Real> ys = read<Real>(y + row * source_stride + at, count, Real(0));
          return gradient_of<operation, Real>(gs, ys, sum[chain]);
        };
        write_band<Real, vectors>(columns.dim, result_stride, to + column, count, streamed, gradient);
      });
  if (streamed) fence();
}

template <typename Real, typename Element>
[[gnu::flatten]] void column_statistics(const Columns& columns, const void* source, Real* tile, Real* max, Real* sum) {
  const auto* from = static_cast<const Element*>(source);
  const std::int64_t stride = columns.stride[kSource], tile_stride = columns.tile_stride;
  for_bands<Real, kWideBand>(
      columns.width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>, auto count) {
        Vector<Real> largest[vectors];
        for (int v = 0; v < vectors; ++v) largest[v] = broadcast(-kInfinity<Real>);
        for_band<Real, vectors>(0, columns.dim, [&](std::int64_t row, int offset, int chain) {
          const Vector<Real> x = read<Real>(from + row * stride + column + offset, count, Real(0));
          largest[chain] = larger(largest[chain], x);
          store(tile + row * tile_stride + column + offset, x);
        });
        for (int v = 0; v < vectors; ++v) store(max + column + v * kLanes<Real>, largest[v]);
      });
  fold(columns.width, columns.period, max, [](Real a, Real b) { return b > a ? b : a; });

  for_bands<Real, kBand>(
      columns.width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>, auto) {
        Vector<Real> shift[vectors], total[vectors] = {};
        for (int v = 0; v < vectors; ++v) {  // as MaxSum::shift
          shift[v] = load<Vector<Real>>(max + column + v * kLanes<Real>);
          shift[v] = shift[v] == -kInfinity<Real> ? Vector<Real>{} : shift[v];
        }
        sum_band<Real>(columns.dim, total, [&](std::int64_t row, int offset, int chain) {
          return exp<Real>(load<Vector<Real>>(tile + row * tile_stride + column + offset) - shift[chain]);
        });
        for (int v = 0; v < vectors; ++v) store(sum + column + v * kLanes<Real>, total[v]);
      });
  fold(columns.width, columns.period, sum, [](Real a, Real b) { return a + b; });
}

template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void column_finish(const Columns& columns, const void* source, const Real* max, const Real* sum,
                                    void* result) {
  const auto* from = static_cast<const Element*>(source);
  auto* to = static_cast<Element*>(result);
  for_bands<Real, kWideBand>(
      columns.width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>, auto count) {
        Vector<Real> shift[vectors], factor[vectors];
        for (int v = 0; v < vectors; ++v) {
          shift[v] = load<Vector<Real>>(max + column + v * kLanes<Real>);
          factor[v] = factor_of<operation, Real>(load<Vector<Real>>(sum + column + v * kLanes<Real>));
        }
        const auto epilogue = [&](std::int64_t row, int offset, int chain) {
          const std::int64_t at = row * columns.stride[kSource] + column + offset;
          const Vector<Real> shifted = read<Real>(from + at, count, Real(0)) - shift[chain];
          if constexpr (operation == Operation::log_softmax)
            return shifted - factor[chain];
          else
            return exp<Real>(shifted) * factor[chain];
        };
        write_band<Real, vectors>(columns.dim, columns.stride[kResult], to + column, count, false, epilogue);
      });
}

template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void column_products(const Columns& columns, const void* grad, const void* output, Real* sum) {
  const auto *g = static_cast<const Element*>(grad), *y = static_cast<const Element*>(output);
  for_bands<Real, kWideBand>(
      columns.width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>, auto count) {
        Vector<Real> total[vectors] = {};
        sum_band<Real>(columns.dim, total, [&](std::int64_t row, int offset, int) {
          const std::int64_t at = column + offset;
          return product_of<operation, Real>(read<Real>(g + row * columns.stride[kGrad] + at, count, Real(0)),
                                             read<Real>(y + row * columns.stride[kSource] + at, count, Real(0)));
        });
        for (int v = 0; v < vectors; ++v) store(sum + column + v * kLanes<Real>, total[v]);
      });
  fold(columns.width, columns.period, sum, [](Real a, Real b) { return a + b; });
}

template <Operation operation, typename Real, typename Element>
[[gnu::flatten]] void column_gradient(const Columns& columns, const void* grad, const void* output, const Real* sum,
                                      void* result) {
  const auto *g = static_cast<const Element*>(grad), *y = static_cast<const Element*>(output);
  auto* to = static_cast<Element*>(result);
  for_bands<Real, kWideBand>(
      columns.width, [&]<int vectors>(std::int64_t column, std::integral_constant<int, vectors>, auto count) {
        Vector<Real> total[vectors];
        for (int v = 0; v < vectors; ++v) total[v] = load<Vector<Real>>(sum + column + v * kLanes<Real>);
        const auto gradient = [&](std::int64_t row, int offset, int chain) {
          const std::int64_t at = column + offset;
          return gradient_of<operation, Real>(read<Real>(g + row * columns.stride[kGrad] + at, count, Real(0)),
                                              read<Real>(y + row * columns.stride[kSource] + at, count, Real(0)),
                                              total[chain]);
        };
        write_band<Real, vectors>(columns.dim, columns.stride[kResult], to + column, count, false, gradient);
      });
}

// ------------------------------------------------------------------------------------------------ the table

// Rows of so many vectors are packed.
inline constexpr int kPackedVectors = 2;

// The fewest lanes, a power of two or whole vectors, that hold a packed row.
template <Operation operation, typename Real, int group = 1, int vectors = 1>
void any_packed_forward(std::int64_t rows, int dim, const Real* source, Real* scratch, Real* result) {
  if constexpr (group < kLanes<Real>) {
    if (dim > group) return any_packed_forward<operation, Real, group * 2>(rows, dim, source, scratch, result);
  } else if constexpr (vectors < kPackedVectors) {
    if (dim > group * vectors)
      return any_packed_forward<operation, Real, group, vectors + 1>(rows, dim, source, scratch, result);
  }
  return packed_forward<operation, group, vectors>(rows, dim, source, scratch, result);
}

template <Operation operation, typename Real, int group = 1, int vectors = 1>
void any_packed_backward(std::int64_t rows, int dim, const Real* grad, const Real* output, Real* scratch,
                         Real* result) {
  if constexpr (group < kLanes<Real>) {
    if (dim > group) return any_packed_backward<operation, Real, group * 2>(rows, dim, grad, output, scratch, result);
  } else if constexpr (vectors < kPackedVectors) {
    if (dim > group * vectors)
      return any_packed_backward<operation, Real, group, vectors + 1>(rows, dim, grad, output, scratch, result);
  }
  return packed_backward<operation, group, vectors>(rows, dim, grad, output, scratch, result);
}

template <Operation operation, typename Real>
constexpr TileKernels<Real> tile_kernels() {
  return {any_packed_forward<operation, Real>, any_packed_backward<operation, Real>};
}

template <Operation operation, typename Real, typename Element>
constexpr TypedKernels<Real> typed_kernels() {
  return {row_forward<operation, Real, Element>,
          row_backward<operation, Real, Element>,
          column_forward<operation, Real, Element>,
          column_backward<operation, Real, Element>,
          row_statistics<Real, Element>,
          row_finish<operation, Real, Element>,
          row_products<operation, Real, Element>,
          row_gradients<operation, Real, Element>,
          column_statistics<Real, Element>,
          column_finish<operation, Real, Element>,
          column_products<operation, Real, Element>,
          column_gradient<operation, Real, Element>};
}

// x86 processors without AVX2 are so rare by now that all their elements of 16 bits go through the tile: bfloat16 takes
// up to three times as long there, and this file a third less to compile.
template <Operation operation>
constexpr Typed<float> float_kernels() {
#if defined(__SSE2__) && !defined(__F16C__)
  return {{{}, {}, typed_kernels<operation, float, float>(), {}}};
#else
  return {{typed_kernels<operation, float, Half>(),
           typed_kernels<operation, float, BFloat16>(),
           typed_kernels<operation, float, float>(),
           {}}};
#endif
}

template <Operation operation>
constexpr Typed<double> double_kernels() {
  return {{{}, {}, {}, typed_kernels<operation, double, double>()}};
}

}  // namespace

extern constexpr Kernels<float> kFloatKernels = {
    kLanes<float>,
    kPackedVectors * kLanes<float>,
    {load_window<Half>, load_window<BFloat16>, load_window<float>, nullptr},
    {store_window<Half>, store_window<BFloat16>, store_window<float>, nullptr},
    exclude,
    fuse<float>,
    fuse_gradient<float>,
    {tile_kernels<Operation::softmax, float>(), tile_kernels<Operation::log_softmax, float>()},
    {float_kernels<Operation::softmax>(), float_kernels<Operation::log_softmax>()}};

extern constexpr Kernels<double> kDoubleKernels = {
    kLanes<double>,
    kPackedVectors * kLanes<double>,
    {nullptr, nullptr, nullptr, load_window<double>},
    {nullptr, nullptr, nullptr, store_window<double>},
    exclude,
    fuse<double>,
    fuse_gradient<double>,
    {tile_kernels<Operation::softmax, double>(), tile_kernels<Operation::log_softmax, double>()},
    {double_kernels<Operation::softmax>(), double_kernels<Operation::log_softmax>()}};

}  // namespace ndsoftmax::cpu::NDSOFTMAX_CPU_NAMESPACE
