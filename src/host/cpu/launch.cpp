// Carries out a plan: tiles are tasks, and each is loaded, computed and stored by one thread. Rows of one part are
// read once; rows of several parts twice, first for their statistics, then for the result.
#include "host/cpu/launch.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "host/cpu/kernels.hpp"
#include "host/cpu/thread_pool.hpp"
#include "host/cpu/tiling.hpp"
#include "ndsoftmax/state.hpp"

namespace ndsoftmax::cpu {
namespace {

// Below, waking another thread costs more than it gains.
constexpr std::int64_t kSerialElements = 32 * 1024;

// malloc maps results of this size anew each time, and to have a new page zeroed costs several times what softmax does
// with it. Large pages take a tenth of that time, but many systems give them only on request.
constexpr std::int64_t kFreshBytes = 32 << 20;

void request_large_pages([[maybe_unused]] void* result, [[maybe_unused]] std::int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < kFreshBytes) return;
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(result) / page * page;
  madvise(reinterpret_cast<void*>(begin), static_cast<std::size_t>(bytes), MADV_HUGEPAGE);  // a hint: may fail
#endif
}

// Where the system does not say.
constexpr std::int64_t kUsualLastCacheBytes = 32 << 20;

bool exceeds_caches(const Problem& problem) {
  const std::int64_t operands = problem.direction == Direction::backward ? 2 : 1;
  const std::int64_t bytes = operands * size_of(problem.source) + size_of(problem.result);
  return problem.elements() * bytes > last_cache_bytes();
}

// What a thread works in; kept, because fresh memory costs more than the work on it.
template <typename Real>
struct Scratch {
  static constexpr std::int64_t kRoom = 1024;  // the last vectors reach past their end
  alignas(64) Real tile[kTile + kRoom];
  alignas(64) Real output[kTile + kRoom];
  alignas(64) Real packed[2 * kComfortable + kRoom];
  alignas(64) Real result[kComfortable];
  alignas(64) Real max[kComfortable + kRoom];
  alignas(64) Real sum[kComfortable + kRoom];
  alignas(64) unsigned char excluded[kTile + kRoom];

  static Scratch& of_thread() {
    thread_local const auto scratch = std::make_unique<Scratch>();
    return *scratch;
  }
};

struct Range {
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};

using Offsets = Array<std::int64_t, kOperands>;

// Of a row, from one of its parts or several.
struct Statistics {
  MaxSum<double> state;
  bool living = false;  // of what is fused: something is left that is not excluded or -inf

  void combine(const Statistics& other) {
    state.combine(other.state);
    living |= other.living;
  }
};

// What a row's elements get that get nothing from a kernel.
enum class Filling : std::uint8_t { zero, minus_infinity, nan };

// `count` neighbouring elements, by their bits.
void fill(void* to, DType dtype, std::int64_t count, Filling filling) {
  const auto with = [&](auto minus_infinity, auto nan) {
    using Bits = decltype(nan);
    std::fill_n(static_cast<Bits*>(to), count,
                filling == Filling::zero  ? Bits{0}
                : filling == Filling::nan ? nan
                                          : minus_infinity);
  };
  switch (dtype) {
    case DType::float16: return with(std::uint16_t{0xfc00}, std::uint16_t{0x7e00});
    case DType::bfloat16: return with(std::uint16_t{0xff80}, std::uint16_t{0x7fc0});
    case DType::float32: return with(std::uint32_t{0xff800000}, std::uint32_t{0x7fc00000});
    case DType::float64: return with(std::uint64_t{0xfff0000000000000}, std::uint64_t{0x7ff8000000000000});
  }
}

// body(offsets, first, count) for each stretch of the range along the last of `groups`.
template <typename Body>
void for_stretches(const Group* groups, int rank, Range range, const Body& body) {
  const std::int64_t last_size = rank == 0 ? 1 : groups[rank - 1].size;
  for (std::int64_t first = range.begin; first < range.end;) {
    const std::int64_t count = std::min(range.end - first, last_size - first % last_size);
    Offsets offsets{};
    std::int64_t index = first;
    for (int g = rank - 1; g >= 0; index /= groups[g].size, --g)
      for (int operand = 0; operand < kOperands; ++operand)
        offsets[operand] += index % groups[g].size * groups[g].stride[operand];
    body(offsets, first, count);
    first += count;
  }
}

Offsets last_strides(const Group* groups, int rank) { return rank == 0 ? Offsets{} : groups[rank - 1].stride; }

template <typename Real>
class Launch {
 public:
  Launch(const Problem& problem, const Plan& plan, const Device& device, const Addresses& addresses)
      : problem_(problem),
        tiling_(make_tiling(problem, plan.vector, plan.regime)),
        kernels_(kernels<Real>()),
        tile_kernels_(kernels_.tile[static_cast<int>(problem.operation)]),
        direct_(problem.source == problem.result && typed(problem.source).row_forward != nullptr),
        typed_(typed(direct_ ? problem.source : kReal)),
        addresses_(addresses),
        exceeds_caches_(exceeds_caches(problem)),
        threads_(problem.elements() < kSerialElements ? 1 : device.threads) {}

  void run(bool spread) const {
    if (tiling_.parts() == 1 && tiling_.shape != Shape::slab)
      parallel_for(tiling_.tiles(), threads_, [this](std::int64_t tile) { whole(tile); });
    else if (spread)
      shared();
    else
      parallel_for(tiling_.tiles(), threads_, [this](std::int64_t tile) { in_parts(tile); });
  }

 private:
  using Shape = Tiling::Shape;

  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  static constexpr DType kReal = sizeof(Real) == 4 ? DType::float32 : DType::float64;

  bool forward() const { return problem_.direction == Direction::forward; }
  bool fused() const { return problem_.fused.any; }
  bool copied() const { return fused() || !direct_; }  // to the tile, before or after
  // Where the elements lie, as long as they are next to one another. (Copied rows that are read in place are those of
  // backward from float32 to 16 bits: forward's then need no copy.)
  bool reads_in_place() const { return !fused() && (direct_ || problem_.source == kReal); }
  bool writes_in_place() const { return !fused() && (direct_ || problem_.result == kReal); }

  const TypedKernels<Real>& typed(DType dtype) const {
    return kernels_.typed[static_cast<int>(problem_.operation)][static_cast<int>(dtype)];
  }

  Range positions(std::int64_t tile) const {
    const std::int64_t per_run = tiling_.tiles_per_run(), run = tile / per_run * tiling_.run;
    const std::int64_t begin = run + tile % per_run * tiling_.positions_per_tile;
    return {begin, std::min(begin + tiling_.positions_per_tile, run + tiling_.run)};
  }

  Range part_of_dim(std::int64_t part) const {
    const std::int64_t begin = part * tiling_.dim_per_part;
    return {begin, std::min(begin + tiling_.dim_per_part, tiling_.dim_size)};
  }

  const void* source_at(std::int64_t offset) const {
    return static_cast<const std::byte*>(addresses_.source) + offset * size_of(problem_.source);
  }
  const void* grad_at(std::int64_t offset) const {
    return static_cast<const std::byte*>(addresses_.grad) + offset * size_of(problem_.source);
  }
  void* result_at(std::int64_t offset) const {
    return static_cast<std::byte*>(addresses_.result) + offset * size_of(problem_.result);
  }

  // ---- whole rows

  void whole(std::int64_t tile) const {
    if (tiling_.shape == Shape::packed) return whole_packed(positions(tile));
    if (tiling_.shape == Shape::rows && copied()) return copied_rows(positions(tile));
    if (tiling_.shape == Shape::rows) return whole_rows(positions(tile));
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const View view = open(tile, 0);
    if (fused()) return whole_fused_columns(view, tile);
    if (forward())
      view.kernels.column_forward(view.columns, view.source, scratch.output, view.result);
    else
      view.kernels.column_backward(view.columns, view.grad, view.source, view.result);
    close(view, tile, 0);
  }

  void whole_packed(Range rows) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const int dim = static_cast<int>(problem_.dim.size);
    const std::int64_t first = rows.begin * dim;
    const Window window{.columns = rows.size() * dim};
    const bool overwritten = addresses_.result == addresses_.source || addresses_.result == addresses_.grad;
    const auto loaded = [&](const void* from, Real* to) -> const Real* {
      if (problem_.source == kReal && !overwritten) return static_cast<const Real*>(from);
      kernels_.load[static_cast<int>(problem_.source)](from, window, to);
      return to;
    };
    const Real* const source = loaded(source_at(first), scratch.output);
    Real* const result = problem_.result == kReal ? static_cast<Real*>(result_at(first)) : scratch.result;
    if (forward())
      tile_kernels_.packed_forward(rows.size(), dim, source, scratch.packed, result);
    else
      tile_kernels_.packed_backward(rows.size(), dim, loaded(grad_at(first), scratch.tile), source, scratch.packed,
                                    result);
    if (problem_.result != kReal) kernels_.store[static_cast<int>(problem_.result)](result, window, result_at(first));
  }

  void whole_rows(Range rows) const {
    const Group* groups = tiling_.positions.begin();
    for_stretches(groups, tiling_.rank, rows, [&](const Offsets& at, std::int64_t, std::int64_t count) {
      const Rows stretch{count, problem_.dim.size, last_strides(groups, tiling_.rank), exceeds_caches_};
      const void* source = source_at(at[kSource]);
      void* result = result_at(at[kResult]);
      if (forward())
        typed_.row_forward(stretch, source, Scratch<Real>::of_thread().tile, result);
      else
        typed_.row_backward(stretch, grad_at(at[kGrad]), source, result);
    });
  }

  // ---- rows in parts

  // Adds what a part says to the statistics of its rows; backward has sums only.
  void part_statistics(std::int64_t tile, std::int64_t part, Statistics* statistics) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    if (!forward()) std::fill_n(scratch.max, tiling_.period, Real(0));
    if (tiling_.shape == Shape::rows && !reads_in_place())
      return copied_row_statistics(tile, part_of_dim(part), *statistics);
    if (tiling_.shape == Shape::rows) {
      const Range dim = part_of_dim(part);
      const Offsets at = row_part(tile, dim);
      if (forward())
        typed_.row_statistics(dim.size(), source_at(at[kSource]), scratch.tile, scratch.max, scratch.sum);
      else
        typed_.row_products(dim.size(), grad_at(at[kGrad]), source_at(at[kSource]), scratch.sum);
      statistics->combine({{scratch.max[0], scratch.sum[0]}});
      return;
    }
    for_views(tile, part, [&](const View& view) {
      if (forward())
        view.kernels.column_statistics(view.columns, view.source, scratch.tile, scratch.max, scratch.sum);
      else
        view.kernels.column_products(view.columns, view.grad, view.source, scratch.sum);
      for (std::int64_t i = 0; i < tiling_.period; ++i) statistics[i].combine({{scratch.max[i], scratch.sum[i]}});
      if (!fused()) return;
      const Living living = living_columns(part_of_dim(part), view.columns.width);
      for (std::int64_t i = 0; i < tiling_.period; ++i) statistics[i].living |= living[i];
    });
  }

  void finish_part(std::int64_t tile, std::int64_t part, const Statistics* statistics) const {
    if (tiling_.shape == Shape::rows && copied()) return finish_copied_row(tile, part_of_dim(part), *statistics);
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    for (std::int64_t i = 0, width = std::max(tiling_.width, tiling_.period); i < width; ++i) {
      scratch.max[i] = static_cast<Real>(statistics[i % tiling_.period].state.max);
      scratch.sum[i] = static_cast<Real>(statistics[i % tiling_.period].state.sum);
    }
    if (tiling_.shape == Shape::rows) {
      const Range dim = part_of_dim(part);
      const Offsets at = row_part(tile, dim);
      const void* source = source_at(at[kSource]);
      void* result = result_at(at[kResult]);
      if (forward())
        typed_.row_finish(dim.size(), source, scratch.max[0], scratch.sum[0], result);
      else
        typed_.row_gradient({.dim = dim.size(), .exceeds_caches = exceeds_caches_}, grad_at(at[kGrad]), source,
                            scratch.sum[0], result);
      return;
    }
    for_views(tile, part, [&](const View& view) {
      if (forward())
        view.kernels.column_finish(view.columns, view.source, scratch.max, scratch.sum, view.result);
      else
        view.kernels.column_gradient(view.columns, view.grad, view.source, scratch.sum, view.result);
      if (fused()) {
        const std::int64_t width = view.columns.width;
        const bool unbounded =
            std::any_of(scratch.sum, scratch.sum + width, [](Real total) { return !std::isfinite(total); });
        mend_columns(part_of_dim(part), width, unbounded, [&](std::int64_t i) { return statistics[i].living; });
      }
      close(view, tile, part);
    });
  }

  // One thread goes through all parts of a tile's rows.
  void in_parts(std::int64_t tile) const {
    Array<Statistics, kWidestPart> total;
    std::fill(total.begin(), total.end(), identity());
    for (std::int64_t part = 0; part < tiling_.parts(); ++part) part_statistics(tile, part, total.begin());
    for (std::int64_t part = 0; part < tiling_.parts(); ++part) finish_part(tile, part, total.begin());
  }

  // All threads share the parts of one tile after another: the second reading finds what the last cache still has. The
  // statistics are combined in the order of the parts, whoever computed them.
  void shared() const {
    const std::int64_t parts = tiling_.parts(), period = tiling_.period;
    std::vector<Statistics> of_parts(static_cast<std::size_t>(parts * period));
    Statistics* const statistics = of_parts.data();
    for (std::int64_t tile = 0; tile < tiling_.tiles(); ++tile) {
      std::fill(of_parts.begin(), of_parts.end(), identity());
      parallel_for(parts, threads_,
                   [&](std::int64_t part) { part_statistics(tile, part, statistics + part * period); });
      for (std::int64_t i = period; i < parts * period; ++i) statistics[i % period].combine(statistics[i]);
      parallel_for(parts, threads_, [&](std::int64_t part) { finish_part(tile, part, statistics); });
    }
  }

  // Backward sums without a maximum, which is then 0 for all.
  Statistics identity() const { return {forward() ? MaxSum<double>{} : MaxSum<double>{0, 0}}; }

  Offsets row_part(std::int64_t row, Range dim, std::int64_t period = 1) const {
    Offsets part{};
    for_stretches(tiling_.positions.begin(), tiling_.rank, {row, row + 1},
                  [&](const Offsets& at, std::int64_t, std::int64_t) { part = at; });
    for (std::int64_t& offset : part) offset += dim.begin * period;
    return part;
  }

  // ---- columns

  // Columns where they lie in memory, or, if they cannot be read or written there as vectors, in the tile.
  struct View {
    const TypedKernels<Real>& kernels;
    Columns columns;
    const void* source;
    const void* grad;
    void* result;
    void* stored = nullptr;  // where a slab's results go from the tile
    bool unbounded = false;  // of what is fused: its results may be NaN
  };

  // body(view) for what a part of a tile consists of: a slab is a block of whole rows of `width`, and the rest.
  template <typename Body>
  void for_views(std::int64_t tile, std::int64_t part, const Body& body) const {
    if (tiling_.shape == Shape::columns) return body(open(tile, part));
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const Range dim = part_of_dim(part);
    const std::int64_t width = tiling_.width, size = dim.size() * tiling_.period, block = size / width * width;
    const Offsets at = row_part(tile, dim, tiling_.period);
    const auto load = kernels_.load[static_cast<int>(problem_.source)];
    const auto view = [&](std::int64_t rows, std::int64_t columns, std::int64_t first) {
      View view{kernels_of(true),
                {rows, columns, tiling_.period, width, {width, width, width}},
                source_at(at[kSource] + first),
                grad_at(at[kGrad] + first),
                result_at(at[kResult] + first)};
      if (!reads_in_place()) {
        const Window window{.columns = rows * columns};
        load(view.source, window, forward() ? scratch.tile : scratch.output);
        if (!forward()) load(view.grad, window, scratch.tile);
        view.source = forward() ? scratch.tile : scratch.output;
        view.grad = scratch.tile;
      }
      if (!writes_in_place()) view.stored = std::exchange(view.result, scratch.tile);
      body(view);
    };
    if (block > 0) view(block / width, width, 0);
    if (block < size) view(1, size - block, block);
  }

  const TypedKernels<Real>& kernels_of(bool neighbours) const {
    return neighbours && !copied() ? typed_ : typed(kReal);
  }

  bool are_neighbours(Range rows) const {
    if (problem_.dim.rank > 1) return false;
    const Offsets stride = last_strides(tiling_.positions.begin(), tiling_.rank);
    const std::int64_t last_size = tiling_.positions[std::max(0, tiling_.rank - 1)].size;
    return stride[kSource] == 1 && stride[kResult] == 1 && (forward() || stride[kGrad] == 1) &&
           rows.begin % last_size + rows.size() <= last_size;
  }

  View open(std::int64_t tile, std::int64_t part) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const Range rows = positions(tile), dim = part_of_dim(part);
    const bool neighbours = are_neighbours(rows);
    const std::int64_t stride = tiling_.positions_per_tile;
    View view{kernels_of(neighbours),
              {dim.size(), rows.size(), rows.size(), stride, {stride, stride, stride}},
              forward() ? scratch.tile : scratch.output,
              scratch.tile,
              scratch.tile};
    const Offsets dim_stride = last_strides(problem_.dim.groups.begin(), problem_.dim.rank);
    Offsets at{};
    if (neighbours)
      for_stretches(tiling_.positions.begin(), tiling_.rank, rows,
                    [&](const Offsets& first, std::int64_t, std::int64_t) { at = first; });
    const auto lies = [&](Operand operand) {
      view.columns.stride[operand] = dim_stride[operand];
      return at[operand] + dim.begin * dim_stride[operand];
    };
    if (neighbours && reads_in_place()) {
      view.source = source_at(lies(kSource));
      view.grad = grad_at(lies(kGrad));
    } else {
      load(addresses_.source, kSource, rows, dim, forward() ? scratch.tile : scratch.output);
      if (!forward()) load(addresses_.grad, kGrad, rows, dim, scratch.tile);
    }
    if (neighbours && writes_in_place()) {
      view.result = result_at(lies(kResult));
      view.columns.exceeds_caches = exceeds_caches_;
    }
    view.unbounded = fused() && fuse_tile(rows, dim);
    return view;
  }

  void close(const View& view, std::int64_t tile, std::int64_t part) const {
    const Real* const values = Scratch<Real>::of_thread().tile;
    if (view.result != values) return;
    const auto store = kernels_.store[static_cast<int>(problem_.result)];
    if (tiling_.shape == Shape::slab)
      return store(values, {.columns = view.columns.dim * view.columns.width}, view.stored);
    for_windows(kResult, positions(tile), part_of_dim(part),
                [&](std::int64_t offset, const Window& window, std::int64_t at) {
                  store(values + at, window, result_at(offset));
                });
  }

  void load(const void* memory, Operand operand, Range rows, Range dim, Real* tile) const {
    const auto load = kernels_.load[static_cast<int>(problem_.source)];
    for_windows(operand, rows, dim, [&](std::int64_t offset, const Window& window, std::int64_t at) {
      load(static_cast<const std::byte*>(memory) + offset * size_of(problem_.source), window, tile + at);
    });
  }

  // body(offset in the operand, window, offset in the tile) for all pieces of a tile.
  template <typename Body>
  void for_windows(Operand operand, Range rows, Range dim, const Body& body) const {
    const Group* groups = tiling_.positions.begin();
    const Axis& axis = problem_.dim;
    const std::int64_t stride = last_strides(groups, tiling_.rank)[operand];
    const std::int64_t dim_stride = last_strides(axis.groups.begin(), axis.rank)[operand];
    for_stretches(groups, tiling_.rank, rows, [&](const Offsets& at, std::int64_t row, std::int64_t count) {
      for_stretches(axis.groups.begin(), axis.rank, dim,
                    [&](const Offsets& dim_at, std::int64_t first, std::int64_t length) {
                      const std::int64_t tile_stride = tiling_.positions_per_tile;
                      const Window window{length, count, dim_stride, stride, tile_stride};
                      body(at[operand] + dim_at[operand], window, (first - dim.begin) * tile_stride + row - rows.begin);
                    });
    });
  }

  // ---- what goes through the tile, and what is fused there
  // Tiles are filled with what the kernels would see if excluded elements were not there; `excluded` and the bias lie
  // as the tile does. What kernels cannot know is mended afterwards: what rows get of which nothing is left, and that
  // excluded elements of a row do not share its NaN.

  // Of an excluded element; and of all elements of a row without any other, where that is not NaN.
  Filling nothing() const {
    return forward() && problem_.operation == Operation::log_softmax ? Filling::minus_infinity : Filling::zero;
  }
  Filling dead_row() const { return forward() && !problem_.fused.dead_rows_are_zero ? Filling::nan : nothing(); }
  static Real value_of(Filling filling) {
    return filling == Filling::zero  ? Real(0)
           : filling == Filling::nan ? std::numeric_limits<Real>::quiet_NaN()
                                     : -kInfinity;
  }
  // What forward gave excluded elements, in the eyes of backward.
  Real empty_output() const { return problem_.operation == Operation::log_softmax ? -kInfinity : Real(0); }

  // Elements of a row up to the diagonal.
  std::int64_t reach(const Offsets& row) const {
    if (!problem_.fused.causal) return tiling_.dim_size;
    return std::clamp<std::int64_t>(row[kRow] + problem_.fused.diagonal + 1, 0, tiling_.dim_size);
  }

  void exclude(const Window& window, std::int64_t offset, unsigned char* excluded) const {
    kernels_.exclude(static_cast<const unsigned char*>(addresses_.mask) + offset, window, problem_.fused.mask_includes,
                     excluded);
  }
  void add_bias(const Window& window, std::int64_t offset, Real* tile) const {
    const DType dtype = problem_.fused.bias_dtype;
    const auto* bias = static_cast<const std::byte*>(addresses_.bias) + offset * size_of(dtype);
    kernels_.load[static_cast<int>(dtype)](bias, window, tile);
  }

  // Rows, or parts of them, into the tile, one `width` after the other: z, or the gradient, whose output then lies in
  // `output`. Returns whether a result may be NaN where it should not.
  bool load_rows(const Offsets& first, const Offsets& step, std::int64_t rows, Range dim, std::int64_t width) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const Fused& fused = problem_.fused;
    const std::int64_t columns = dim.size(), size = rows == 1 ? columns : rows * width;
    const Offsets stride = last_strides(problem_.dim.groups.begin(), problem_.dim.rank);
    const auto window = [&](Operand operand) { return Window{rows, columns, step[operand], stride[operand], width}; };
    const auto at = [&](Operand operand) { return first[operand] + dim.begin * stride[operand]; };
    const auto load = kernels_.load[static_cast<int>(problem_.source)];
    const bool padded = fused.any && columns < width && rows > 1;
    if (padded && !fused.mask) std::fill_n(scratch.excluded, size, 0);
    if (fused.mask) exclude(window(kMask), at(kMask), scratch.excluded);
    for (std::int64_t row = 0; padded && row < rows; ++row)
      std::fill_n(scratch.excluded + row * width + columns, width - columns, 1);
    if (fused.bias) add_bias(window(kBias), at(kBias), scratch.output);
    load(source_at(at(kSource)), window(kSource), forward() ? scratch.tile : scratch.output);
    if (!forward()) load(grad_at(at(kGrad)), window(kGrad), scratch.tile);
    return fused.any && fuse(size, fused.mask || padded ? scratch.excluded : nullptr);
  }

  // The first `size` elements of the tile, and of what lies as it does. Returns as load_rows and fuse_tile.
  bool fuse(std::int64_t size, const unsigned char* excluded) const {
    auto& scratch = Scratch<Real>::of_thread();
    const auto scale = static_cast<Real>(problem_.fused.scale);
    if (!forward())
      return kernels_.fuse_gradient(size, excluded, scale, empty_output(), scratch.tile, scratch.output).unbounded;
    const Real* const bias = problem_.fused.bias ? scratch.output : nullptr;
    const Seen<Real> seen = kernels_.fuse(size, excluded, bias, scale, scratch.tile);
    return seen.nan || seen.max == kInfinity;
  }

  // Whether an element of the tile, as it was fused, is one that counts: neither excluded nor -inf.
  struct Counts {
    const Real* tile;
    Real nothing;
    bool operator()(std::int64_t at) const { return tile[at] != nothing; }
  };
  Counts counts() const {
    const auto& scratch = Scratch<Real>::of_thread();
    return forward() ? Counts{scratch.tile, -kInfinity} : Counts{scratch.output, empty_output()};
  }

  // Whether anything that counts is left; a scale alone leaves nothing out.
  bool living(std::int64_t first, std::int64_t count) const {
    if (problem_.fused.only_scale()) return true;
    const Counts counts = this->counts();
    for (std::int64_t i = first; i < first + count; ++i)
      if (counts(i)) return true;
    return false;
  }

  // The excluded elements of a row get nothing, whatever the others got.
  void clear_excluded(const unsigned char* excluded, void* result, std::int64_t count) const {
    if (!problem_.fused.mask) return;
    for (std::int64_t i = 0; i < count; ++i)
      if (excluded[i]) fill(element(result, i), problem_.result, 1, nothing());
  }
  void* element(void* result, std::int64_t index) const {
    return static_cast<std::byte*>(result) + index * size_of(problem_.result);
  }

  // As many rows at a time as the first cache holds, or one where each ends at another element.
  void copied_rows(Range rows) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const TypedKernels<Real>& kernels = typed(kReal);
    const auto store = kernels_.store[static_cast<int>(problem_.result)];
    const Group* groups = tiling_.positions.begin();
    const std::int64_t lanes = kernels_.lanes, dim = tiling_.dim_size, width = (dim + lanes - 1) / lanes * lanes;
    const std::int64_t most = problem_.fused.causal ? 1 : std::max<std::int64_t>(1, kComfortable / width);
    Array<bool, kComfortable> dead;
    for_stretches(groups, tiling_.rank, rows, [&](Offsets first, std::int64_t, std::int64_t left) {
      const Offsets step = last_strides(groups, tiling_.rank);
      for (std::int64_t count; left > 0; left -= count) {
        count = std::min(left, most);
        const std::int64_t end = reach(first);
        const bool unbounded = end > 0 && !reads_in_place() && load_rows(first, step, count, {0, end}, width);
        for (std::int64_t row = 0; row < count; ++row) dead[row] = fused() && !living(row * width, end);
        void* const result = result_at(first[kResult]);
        if (end > 0) {
          const bool narrowed = problem_.result != kReal;
          void* const to = narrowed ? scratch.tile : result;
          const std::int64_t to_step = narrowed ? width : step[kResult];
          if (forward())
            kernels.row_forward({count, end, {width, width, to_step}}, scratch.tile,
                                narrowed ? scratch.output : scratch.tile, to);
          else if (reads_in_place())
            kernels.row_backward({count, end, {step[kSource], step[kGrad], to_step}}, grad_at(first[kGrad]),
                                 source_at(first[kSource]), to);
          else
            kernels.row_backward({count, end, {width, width, to_step}}, scratch.tile, scratch.output, to);
          if (narrowed) store(scratch.tile, {count, end, step[kResult], 1, width}, result);
        }
        for (std::int64_t row = 0; row < count; ++row) {
          void* const to = element(result, row * step[kResult]);
          if (unbounded) clear_excluded(scratch.excluded + row * width, to, end);
          if (dead[row])
            fill(to, problem_.result, dim, dead_row());
          else
            fill(element(to, end), problem_.result, dim - end, nothing());
        }
        for (int operand = 0; operand < kOperands; ++operand) first[operand] += count * step[operand];
      }
    });
  }

  // The part of a row that is not past the diagonal.
  Range reached(const Offsets& row, Range dim) const { return {dim.begin, std::min(dim.end, reach(row))}; }

  void copied_row_statistics(std::int64_t row, Range dim, Statistics& statistics) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const Offsets at = row_part(row, {0, 0});
    dim = reached(at, dim);
    if (dim.size() <= 0) return;
    const TypedKernels<Real>& kernels = typed(kReal);
    load_rows(at, {}, 1, dim, dim.size());
    if (forward())
      kernels.row_statistics(dim.size(), scratch.tile, scratch.packed, scratch.max, scratch.sum);
    else
      kernels.row_products(dim.size(), scratch.tile, scratch.output, scratch.sum);
    statistics.combine({{forward() ? scratch.max[0] : 0, scratch.sum[0]}, fused() && living(0, dim.size())});
  }

  void finish_copied_row(std::int64_t row, Range dim, const Statistics& statistics) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const TypedKernels<Real>& kernels = typed(kReal);
    const Offsets at = row_part(row, {0, 0});
    const Range live = reached(at, dim);
    void* const result = element(result_at(at[kResult]), dim.begin);
    const auto largest = static_cast<Real>(statistics.state.max), total = static_cast<Real>(statistics.state.sum);
    if (fused() && !statistics.living) return fill(result, problem_.result, dim.size(), dead_row());
    const std::int64_t count = std::max<std::int64_t>(live.size(), 0);
    if (count > 0) {
      const bool narrowed = problem_.result != kReal;
      void* const to = narrowed ? scratch.tile : result;
      if (!reads_in_place()) load_rows(at, {}, 1, live, count);
      if (forward())
        kernels.row_finish(count, scratch.tile, largest, total, to);
      else if (reads_in_place())
        kernels.row_gradient({.dim = count}, grad_at(at[kGrad] + live.begin), source_at(at[kSource] + live.begin),
                             total, to);
      else
        kernels.row_gradient({.dim = count}, scratch.tile, scratch.output, total, to);
      if (narrowed) kernels_.store[static_cast<int>(problem_.result)](scratch.tile, {.columns = count}, result);
      if (!std::isfinite(total)) clear_excluded(scratch.excluded, result, count);
    }
    fill(element(result, count), problem_.result, dim.size() - count, nothing());
  }

  // A tile of columns, once its elements are loaded. Returns whether a result may be NaN where it should not.
  bool fuse_tile(Range rows, Range dim) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const Fused& fused = problem_.fused;
    const std::int64_t size = dim.size() * tiling_.positions_per_tile;
    if (fused.mask)
      for_windows(kMask, rows, dim, [&](std::int64_t offset, const Window& window, std::int64_t at) {
        exclude(window, offset, scratch.excluded + at);
      });
    else
      std::fill_n(scratch.excluded, size, 0);
    if (fused.causal)
      for_windows(kRow, rows, dim, [&](std::int64_t row, const Window& window, std::int64_t at) {
        for (std::int64_t i = 0; i < window.rows; ++i)
          for (std::int64_t column = 0; column < window.columns; ++column)
            if (dim.begin + i > row + column * window.column_stride + fused.diagonal)
              scratch.excluded[at + i * window.tile_stride + column] = 1;
      });
    if (fused.bias)
      for_windows(kBias, rows, dim, [&](std::int64_t offset, const Window& window, std::int64_t at) {
        add_bias(window, offset, scratch.output + at);
      });
    return fuse(size, scratch.excluded);
  }

  void whole_fused_columns(const View& view, std::int64_t tile) const {
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const Range dim = part_of_dim(0);
    const Living living = living_columns(dim, view.columns.width);
    if (forward())
      view.kernels.column_forward(view.columns, view.source, scratch.output, view.result);
    else
      view.kernels.column_backward(view.columns, view.grad, view.source, view.result);
    mend_columns(dim, view.columns.width, view.unbounded, [&](std::int64_t i) { return living[i]; });
    close(view, tile, 0);
  }

  // Of each column of the tile, as it was fused: whether anything that counts is left. Row after row, until all are
  // known.
  using Living = Array<bool, kComfortable>;
  Living living_columns(Range dim, std::int64_t width) const {
    Living living{};
    const Counts counts = this->counts();
    for (std::int64_t i = 0; i < dim.size(); ++i) {
      for (std::int64_t column = 0; column < width; ++column)
        living[column] |= counts(i * tiling_.positions_per_tile + column);
      if (i % 16 == 0 && std::all_of(living.begin(), living.begin() + width, std::identity())) break;
    }
    return living;
  }

  // The tile's results; `unbounded`: they may be NaN.
  template <typename IsLiving>
  void mend_columns(Range dim, std::int64_t width, bool unbounded, const IsLiving& is_living) const {
    if (problem_.fused.only_scale()) return;
    Scratch<Real>& scratch = Scratch<Real>::of_thread();
    const std::int64_t stride = tiling_.positions_per_tile;
    if (unbounded)
      for (std::int64_t i = 0; i < dim.size() * stride; ++i)
        if (scratch.excluded[i]) scratch.tile[i] = value_of(nothing());
    for (std::int64_t column = 0; column < width; ++column)
      if (!is_living(column))
        for (std::int64_t i = 0; i < dim.size(); ++i) scratch.tile[i * stride + column] = value_of(dead_row());
  }

  const Problem& problem_;
  const Tiling tiling_;
  const Kernels<Real>& kernels_;
  const TileKernels<Real>& tile_kernels_;
  const bool direct_;  // there are kernels that read and write the types of the problem
  const TypedKernels<Real>& typed_;
  const Addresses addresses_;
  const bool exceeds_caches_;  // the operands together
  const int threads_;
};

}  // namespace

std::int64_t last_cache_bytes() {
  static const std::int64_t bytes = [] {
    const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index3/";
    std::ifstream level_file(cache + "level"), size_file(cache + "size");
    int level = 0;
    std::int64_t size = 0;
    char unit = 0;
    const bool known = level_file >> level && level == 3 && size_file >> size >> unit && unit == 'K';
    return known ? size << 10 : kUsualLastCacheBytes;
  }();
  return bytes;
}

void launch(const Problem& problem, const Plan& plan, const Device& device, const Addresses& addresses) {
  request_large_pages(addresses.result, problem.elements() * size_of(problem.result));
  if (problem.source == DType::float64)
    Launch<double>(problem, plan, device, addresses).run(plan.splits > 1);
  else
    Launch<float>(problem, plan, device, addresses).run(plan.splits > 1);
}

}  // namespace ndsoftmax::cpu
