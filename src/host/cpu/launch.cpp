// Carries out a plan: tiles are tasks, and each is loaded, computed and stored by one thread. Rows of one part are
// read once; rows of several parts twice, first for their statistics, then for the result.
#include "host/cpu/launch.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "ndsoftmax/state.hpp"
#include "host/cpu/kernels.hpp"
#include "host/cpu/thread_pool.hpp"
#include "host/cpu/tiling.hpp"

namespace ndsoftmax::cpu {
namespace {

// Below, waking another thread costs more than it gains.
constexpr std::int64_t kSerialElements = 32 * 1024;

// What a thread works in; kept, because fresh memory costs more than the work on it.
template <typename Real>
struct Scratch {
  static constexpr std::int64_t kRoom = 1024;  // packed tiles and the last vectors reach past their end
  alignas(64) Real tile[kTile + kRoom];
  alignas(64) Real output[kTile + kRoom];
  alignas(64) Real packed[2 * kComfortable + kRoom];
  alignas(64) Real max[kComfortable + kRoom];
  alignas(64) Real sum[kComfortable + kRoom];

  static Scratch& of_thread() {
    thread_local const auto scratch = std::make_unique<Scratch>();
    return *scratch;
  }
};

struct Range {
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};

// body(offset in the operand, first, count) for each stretch of [range) along the last of `groups`.
template <typename Body>
void for_stretches(const Group* groups, int rank, int operand, Range range, const Body& body) {
  const std::int64_t last_size = rank == 0 ? 1 : groups[rank - 1].size;
  for (std::int64_t at = range.begin; at < range.end;) {
    const std::int64_t count = std::min(range.end - at, last_size - at % last_size);
    std::int64_t offset = 0, index = at;
    for (int g = rank - 1; g >= 0; index /= groups[g].size, --g)
      offset += index % groups[g].size * groups[g].stride[operand];
    body(offset, at, count);
    at += count;
  }
}

template <typename Real>
class Launch {
 public:
  Launch(const Problem& problem, const Plan& plan, const Device& device, const void* source, const void* grad,
         void* result)
      : problem_(problem),
        tiling_(make_tiling(problem, plan.vector, plan.regime)),
        kernels_(kernels<Real>()),
        operation_(kernels_.operation[static_cast<int>(problem.operation)]),
        memory_{source, grad},
        result_(result),
        threads_(problem.elements() < kSerialElements ? 1 : device.threads) {}

  void run(bool spread) const {
    if (tiling_.parts() == 1) parallel_for(tiling_.tiles(), threads_, [this](std::int64_t tile) { whole(tile); });
    else if (spread) shared();
    else parallel_for(tiling_.tiles(), threads_, [this](std::int64_t tile) { in_parts(tile); });
  }

 private:
  using Shape = Tiling::Shape;
  // Of the rows of a tile; backward needs the sum alone.
  using Statistics = std::vector<MaxSum<double>>;

  bool forward() const { return problem_.direction == Direction::forward; }

  Range positions(std::int64_t tile) const {
    const std::int64_t begin = tile * tiling_.positions_per_tile;
    return {begin, std::min(begin + tiling_.positions_per_tile, tiling_.positions_size)};
  }

  Range part_of_dim(std::int64_t part) const {
    const std::int64_t begin = part * tiling_.dim_per_part;
    return {begin, std::min(begin + tiling_.dim_per_part, tiling_.dim_size)};
  }

  // Rows of width tiling_.width that a part of dim fills.
  std::int64_t tile_rows(Range dim) const {
    return tiling_.shape == Shape::columns ? dim.size()
                                           : (dim.size() * tiling_.period + tiling_.width - 1) / tiling_.width;
  }

  // body(offset in the operand, window, offset in the tile) for all of a tile's pieces.
  template <typename Body>
  void for_windows(int operand, Range rows, Range dim, const Body& body) const {
    const Group* groups = tiling_.positions.data();
    const std::int64_t stride = tiling_.rank == 0 ? 0 : groups[tiling_.rank - 1].stride[operand];
    if (tiling_.shape == Shape::packed) {
      body(rows.begin * problem_.dim.size, Window{.columns = rows.size() * problem_.dim.size}, 0);
      return;
    }
    for_stretches(groups, tiling_.rank, operand, rows, [&](std::int64_t offset, std::int64_t row, std::int64_t count) {
      const std::int64_t at = row - rows.begin;
      if (tiling_.shape == Shape::rows) {
        const Window window{count, problem_.dim.size, stride, 1, tiling_.width, true};
        body(offset, window, at * tiling_.width);
      } else if (tiling_.shape == Shape::slab) {
        body(offset + dim.begin * tiling_.period, Window{.columns = dim.size() * tiling_.period}, 0);
      } else {
        const Axis& axis = problem_.dim;
        const std::int64_t dim_stride = axis.rank == 0 ? 0 : axis.groups[axis.rank - 1].stride[operand];
        for_stretches(axis.groups.data(), axis.rank, operand, dim,
                      [&](std::int64_t dim_offset, std::int64_t first, std::int64_t length) {
                        const Window window{length, count, dim_stride, stride, tiling_.width, false};
                        body(offset + dim_offset, window, (first - dim.begin) * tiling_.width + at);
                      });
      }
    });
  }

  void load(int operand, Range rows, Range dim, Real* tile) const {
    const Real padding = forward() ? -std::numeric_limits<Real>::infinity() : Real(0);
    const auto load = kernels_.load[static_cast<int>(problem_.source)];
    const auto* memory = static_cast<const std::byte*>(memory_[operand]);
    if (tiling_.shape == Shape::slab)
      std::fill(tile + dim.size() * tiling_.period, tile + tile_rows(dim) * tiling_.width, padding);
    for_windows(operand, rows, dim, [&](std::int64_t offset, const Window& window, std::int64_t at) {
      load(memory + offset * size_of(problem_.source), window, padding, tile + at);
    });
  }

  void store(const Real* tile, Range rows, Range dim) const {
    const auto store = kernels_.store[static_cast<int>(problem_.result)];
    auto* memory = static_cast<std::byte*>(result_);
    for_windows(kResult, rows, dim, [&](std::int64_t offset, const Window& window, std::int64_t at) {
      store(tile + at, window, memory + offset * size_of(problem_.result));
    });
  }

  // A tile that holds whole rows.
  void whole(std::int64_t index) const {
    auto& [tile, output, packed, max, sum] = Scratch<Real>::of_thread();
    const Range rows = positions(index), dim = part_of_dim(0);
    const std::int64_t width = tiling_.width;
    load(forward() ? kSource : kGrad, rows, dim, tile);
    if (!forward()) load(kSource, rows, dim, output);
    switch (tiling_.shape) {
      case Shape::packed:
        if (forward()) operation_.packed_forward(rows.size(), static_cast<int>(dim.size()), tile, packed);
        else operation_.packed_backward(rows.size(), static_cast<int>(dim.size()), tile, output, packed);
        break;
      case Shape::rows:
        if (forward()) operation_.rows_forward(rows.size(), width, tile);
        else operation_.rows_backward(rows.size(), width, tile, output);
        break;
      case Shape::slab:
      case Shape::columns:
        if (forward()) {
          operation_.column_begin(tile_rows(dim), width, tiling_.period, tile, max, sum);
          operation_.column_end(tile_rows(dim), width, tile, max, sum);
        } else {
          operation_.column_products(tile_rows(dim), width, tiling_.period, tile, output, sum);
          operation_.column_gradient(tile_rows(dim), width, tile, output, sum);
        }
    }
    store(tile, rows, dim);
  }

  void part_statistics(std::int64_t index, std::int64_t part, MaxSum<double>* statistics) const {
    auto& [tile, output, packed, max, sum] = Scratch<Real>::of_thread();
    const Range rows = positions(index), dim = part_of_dim(part);
    load(forward() ? kSource : kGrad, rows, dim, tile);
    if (forward()) {
      operation_.column_statistics(tile_rows(dim), tiling_.width, tiling_.period, tile, max, sum);
    } else {
      load(kSource, rows, dim, output);
      operation_.column_products(tile_rows(dim), tiling_.width, tiling_.period, tile, output, sum);
      std::fill_n(max, tiling_.period, Real(0));
    }
    for (std::int64_t i = 0; i < tiling_.period; ++i) statistics[i].combine({max[i], sum[i]});
  }

  void finish_part(std::int64_t index, std::int64_t part, const MaxSum<double>* statistics) const {
    auto& [tile, output, packed, max, sum] = Scratch<Real>::of_thread();
    const Range rows = positions(index), dim = part_of_dim(part);
    for (std::int64_t i = 0; i < tiling_.width; ++i) {
      max[i] = static_cast<Real>(statistics[i % tiling_.period].max);
      sum[i] = static_cast<Real>(statistics[i % tiling_.period].sum);
    }
    load(forward() ? kSource : kGrad, rows, dim, tile);
    if (forward()) {
      operation_.column_finish(tile_rows(dim), tiling_.width, tile, max, sum);
    } else {
      load(kSource, rows, dim, output);
      operation_.column_gradient(tile_rows(dim), tiling_.width, tile, output, sum);
    }
    store(tile, rows, dim);
  }

  // One thread goes through all parts of a tile's rows.
  void in_parts(std::int64_t index) const {
    std::array<MaxSum<double>, kWidestPart> total;
    total.fill(identity());
    for (std::int64_t part = 0; part < tiling_.parts(); ++part) part_statistics(index, part, total.data());
    for (std::int64_t part = 0; part < tiling_.parts(); ++part) finish_part(index, part, total.data());
  }

  // All threads share the parts; the statistics are combined in their order, whoever computed them.
  void shared() const {
    const std::int64_t parts = tiling_.parts(), period = tiling_.period, tasks = tiling_.tiles() * parts;
    std::vector<MaxSum<double>> statistics(static_cast<std::size_t>(tasks * period), identity());
    parallel_for(tasks, threads_, [&](std::int64_t task) {
      part_statistics(task / parts, task % parts, &statistics[static_cast<std::size_t>(task * period)]);
    });
    parallel_for(tiling_.tiles(), threads_, [&](std::int64_t tile) {
      MaxSum<double>* total = &statistics[static_cast<std::size_t>(tile * parts * period)];
      for (std::int64_t i = period; i < parts * period; ++i) total[i % period].combine(total[i]);
    });
    parallel_for(tasks, threads_, [&](std::int64_t task) {
      const std::int64_t tile = task / parts;
      finish_part(tile, task % parts, &statistics[static_cast<std::size_t>(tile * parts * period)]);
    });
  }

  // Backward sums without a maximum, which is then 0 for all.
  MaxSum<double> identity() const { return forward() ? MaxSum<double>{} : MaxSum<double>{0, 0}; }

  const Problem& problem_;
  const Tiling tiling_;
  const Kernels<Real>& kernels_;
  const OperationKernels<Real>& operation_;
  const std::array<const void*, 2> memory_;
  void* const result_;
  const int threads_;
};

}  // namespace

void launch(const Problem& problem, const Plan& plan, const Device& device, const void* source, const void* grad,
            void* result) {
  if (problem.source == DType::float64) Launch<double>(problem, plan, device, source, grad, result).run(plan.splits > 1);
  else Launch<float>(problem, plan, device, source, grad, result).run(plan.splits > 1);
}

}  // namespace ndsoftmax::cpu
