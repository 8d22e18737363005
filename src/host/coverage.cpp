// Walks a CUDA plan on the host: which elements does each thread of the grid write?
#include <algorithm>
#include <bit>

#include "host/cuda_plan.hpp"
#include "host/tuning.hpp"
#include "host/work.hpp"

namespace ndsoftmax {
namespace {

// Elements between the unit of memory, of so many, that row `index` begins in and its first element. Of addresses no
// more is known than within a vector: the first row is taken to begin in the last one of a unit, which leaves most out.
int phase_of(const Problem& problem, const Plan& plan, std::int64_t index, int unit) {
  const Axis rows = rows_in_order(problem, plan);
  std::int64_t offset = unit - plan.vector + problem.misalignment[kSource] / size_of(problem.source);
  for (int group = rows.rank - 1; group >= 0; --group) {
    offset += index % rows.groups[group].size * rows.groups[group].stride[kSource];
    index /= rows.groups[group].size;
  }
  return static_cast<int>(offset % unit);
}
int phase_of(const Problem& problem, const Plan& plan, std::int64_t index) {  // within a vector
  return phase_of(problem, plan, index, plan.vector);
}

class Counts {
 public:
  explicit Counts(const Problem& problem) : problem_(problem), counts_(static_cast<std::size_t>(problem.elements())) {}

  void row_elements(std::int64_t row, std::int64_t first, int vector) {
    if (row >= problem_.outer.size) return;
    for (std::int64_t i = std::max<std::int64_t>(first, 0); i < std::min(first + vector, problem_.dim.size); ++i)
      count(row * problem_.dim.size + i);
  }
  void columns(std::int64_t first, int vector, std::int64_t element) {
    const std::int64_t outer = first / problem_.inner.size, inner = first % problem_.inner.size;
    for (int k = 0; k < vector; ++k) count((outer * problem_.dim.size + element) * problem_.inner.size + inner + k);
  }
  // Neighbours in the slab of dim times columns.
  void slab(std::int64_t outer, std::int64_t first, int vector) {
    const std::int64_t size = problem_.dim.size * problem_.inner.size;
    for (std::int64_t i = std::max<std::int64_t>(first, 0); i < std::min(first + vector, size); ++i)
      count(outer * size + i);
  }
  std::vector<std::uint8_t> take() { return std::move(counts_); }

 private:
  void count(std::int64_t element) { ++counts_[static_cast<std::size_t>(element)]; }

  const Problem& problem_;
  std::vector<std::uint8_t> counts_;
};

void walk_held_rows(const Problem& problem, const Plan& plan, Counts& counts) {
  const int groups = plan.cluster > 1 ? 1 : plan.block / plan.threads_per_row;
  const std::int64_t teams = plan.grid / plan.cluster;
  const std::int64_t vectors = work::vectors_in_row(problem.dim.size, plan.vector, plan.ragged ? plan.vector - 1 : 0);
  const std::int64_t items =  // what a cluster has no room for is written as well
      plan.passes == 1 ? plan.items : (vectors + plan.threads_per_row - 1) / plan.threads_per_row;
  for (std::int64_t team = 0; team < teams; ++team)
    for (int turn = 0; turn < plan.rows_per_block / groups; ++turn)
      for (int group = 0; group < groups; ++group) {
        const std::int64_t row = work::row(team, plan.rows_per_block, group, groups, turn);
        if (row >= problem.outer.size) continue;
        for (int lane = 0; lane < plan.threads_per_row; ++lane)
          for (std::int64_t item = 0; item < items; ++item)
            counts.row_elements(row,
                                work::first_element<std::int64_t>(item, plan.threads_per_row, lane, plan.vector,
                                                                  phase_of(problem, plan, row)),
                                plan.vector);
      }
}

// Of n clusters each has every n-th row, and each of its blocks a part of that.
void walk_cluster_gradients(const Problem& problem, const Plan& plan, Counts& counts) {
  const std::int64_t clusters = plan.grid / plan.cluster;
  for (std::int64_t first = 0; first < clusters; ++first)
    for (std::int64_t row = first; row < problem.outer.size; row += clusters)
      for (std::int64_t item = 0; item < std::int64_t{plan.cluster} * plan.items; ++item)
        for (int thread = 0; thread < plan.block; ++thread)
          counts.row_elements(
              row,
              work::first_element<std::int64_t>(item, plan.block, thread, plan.vector, phase_of(problem, plan, row)),
              plan.vector);
}

void walk_staged_rows(const Problem& problem, const Plan& plan, Counts& counts) {
  const int teams = plan.block / plan.threads_per_row;
  const int log2_runs = std::countr_zero(static_cast<unsigned>(teams / plan.run));
  for (std::int64_t block = 0; block < plan.grid; ++block)
    for (int turn = 0; turn < plan.rows_per_block; turn += teams)
      for (int thread = 0; thread < plan.block; ++thread) {
        const int row = turn + work::staged_row(thread / plan.threads_per_row, log2_runs, plan.run);
        const int lane = thread % plan.threads_per_row;
        const auto phase = static_cast<int>(row * problem.dim.size % plan.vector);
        for (int item = 0; item < plan.items; ++item)
          counts.row_elements(block * plan.rows_per_block + row,
                              work::first_element<std::int64_t>(item, plan.threads_per_row, lane, plan.vector, phase),
                              plan.vector);
        if (plan.ragged)  // an element beyond
          counts.row_elements(block * plan.rows_per_block + row,
                              std::int64_t{plan.items} * plan.threads_per_row * plan.vector + lane - phase, 1);
      }
}

// A thread takes plan.items vectors at a time, which hold whole rows.
void walk_tiny_rows(const Problem& problem, const Plan& plan, Counts& counts) {
  const std::int64_t together = std::int64_t{plan.items} * plan.vector / problem.dim.size;
  for (std::int64_t block = 0; block < plan.grid; ++block)
    for (std::int64_t turn = 0; turn < plan.rows_per_block; turn += plan.block * together)
      for (int thread = 0; thread < plan.block; ++thread)
        for (std::int64_t row = 0; row < together; ++row)
          counts.row_elements(block * plan.rows_per_block + turn + thread * together + row, 0,
                              static_cast<int>(problem.dim.size));
}

void walk_online_rows(const Problem& problem, const Plan& plan, Counts& counts) {
  for (std::int64_t block = 0; block < plan.grid; ++block) {
    const std::int64_t row = block / plan.splits, split = block % plan.splits;
    const int phase = phase_of(problem, plan, row);
    const work::Part part =
        work::part_of(work::vectors_in_row(problem.dim.size, plan.vector, phase), split, plan.splits);
    for (int thread = 0; thread < plan.block; ++thread)
      for (std::int64_t vector = part.begin + thread; vector < part.end; vector += plan.block)
        counts.row_elements(row, work::first_element<std::int64_t>(vector, 1, 0, plan.vector, phase), plan.vector);
  }
}

void walk_split_rows(const Problem& problem, const Plan& plan, Counts& counts) {
  const int step = plan.block * plan.items;
  const std::int64_t pieces = split_pieces(problem, plan);
  for (std::int64_t block = 0; block < problem.outer.size * pieces; ++block) {
    const std::int64_t row = block / pieces, first = work::piece_first(block, row, pieces, step);
    const int phase = phase_of(problem, plan, row);
    for (std::int64_t vector = first; vector < first + step; ++vector)
      counts.row_elements(row, work::first_element<std::int64_t>(vector, 1, 0, plan.vector, phase), plan.vector);
  }
}

// Where they meet, its blocks take turns at steps of a row.
void walk_meeting_rows(const Problem& problem, const Plan& plan, Counts& counts) {
  const std::int64_t step = std::int64_t{plan.block} * plan.items;
  for (std::int64_t block = 0; block < plan.grid; ++block) {
    const std::int64_t row = block / plan.splits;
    const int phase = phase_of(problem, plan, row);
    const std::int64_t vectors = work::vectors_in_row(problem.dim.size, plan.vector, phase);
    const work::Turns turns = work::turns_of(block % plan.splits, plan.splits, step);
    for (std::int64_t first = turns.first; first < vectors; first += turns.apart)
      for (std::int64_t vector = first; vector < std::min(first + step, vectors); ++vector)
        counts.row_elements(row, work::first_element<std::int64_t>(vector, 1, 0, plan.vector, phase), plan.vector);
  }
}

std::int64_t result_offset(const Problem& problem, std::int64_t outer, std::int64_t element) {
  const auto offset = [](const Axis& axis, std::int64_t i) {
    return axis.rank == 0 ? 0 : i * axis.groups[axis.rank - 1].stride[kResult];
  };
  return offset(problem.outer, outer) + offset(problem.dim, element);
}

// Whether a thread stores the vector at `inner` of an element of dim, as far as it is known where the result begins.
bool writes_vector(const Problem& problem, const Plan& plan, const ColumnsLayout& layout, int column,
                   std::int64_t outer, std::int64_t element, std::int64_t inner) {
  if (layout.step == layout.width) return true;
  const int bytes = size_of(problem.result), vector = plan.vector * bytes;
  const std::int64_t row = result_offset(problem, outer, element);
  const std::int64_t at = (row - layout.shift * (row & 1)) * bytes + inner * vector;
  const auto phase = static_cast<int>((problem.misalignment[kResult] + at) % tuning::kSectorBytes);
  return (work::sectors_written(column, inner, tuning::kSectorBytes / vector, layout.step) >> phase / vector & 1) != 0;
}

void walk_columns(const Problem& problem, const Plan& plan, Counts& counts) {
  const ColumnsLayout layout = columns_layout(problem, plan);
  const work::Divider run(plan.run), dims(layout.along);
  for (std::int64_t tile = 0; tile < plan.grid * layout.turns; ++tile)
    for (int i = 0; i < std::min(plan.block, layout.width * layout.along); ++i) {
      const std::int64_t block = tile / layout.turns;
      const work::TileThread thread = work::tile_thread(i, run, dims);
      const int column = thread.column - layout.lead;
      const std::int64_t vector = tile / plan.cluster * layout.step + column;
      const std::int64_t outer = vector / layout.inner, within = vector % layout.inner;
      if (vector < 0 || outer >= problem.outer.size) continue;
      const std::int64_t begin = block % plan.cluster * layout.rows;
      for (int item = 0; item < plan.items; ++item) {
        const std::int64_t row = item * layout.along + thread.along;
        if (row >= layout.rows || begin + row >= layout.fold.dim) continue;
        if (!writes_vector(problem, plan, layout, column, outer, begin + row, within)) continue;
        if (layout.shift == 0) {
          const int phase = layout.fold.folds ? phase_of(problem, plan, outer) : 0;
          counts.slab(outer, ((begin + row) * layout.inner + within) * plan.vector - phase, plan.vector);
          continue;
        }
        const std::int64_t first = within * plan.vector - (result_offset(problem, outer, begin + row) & 1);
        for (std::int64_t k = std::max<std::int64_t>(first, 0); k < std::min(first + plan.vector, problem.inner.size);
             ++k)
          counts.columns(outer * problem.inner.size + k, 1, begin + row);
      }
    }
}

void walk_staggered_columns(const Problem& problem, const Plan& plan, Counts& counts) {
  const std::int64_t warps = work::staggered_warps(problem.inner.size, plan.vector);
  const int classes = plan.vector / stagger_step(problem);
  for (std::int64_t warp = 0; warp < problem.outer.size * warps; ++warp)
    for (int lane = 0; lane < tuning::kWarp; ++lane) {
      const std::int64_t outer = warp / warps;
      const work::StaggeredThread thread = work::staggered_thread(static_cast<int>(warp % warps), lane);
      if (!thread.stores) continue;
      const std::int64_t phase = outer * problem.outer.groups[0].stride[kSource] % plan.vector;
      for (int shift = 0; shift < plan.vector; shift += plan.vector / classes) {
        const std::int64_t first = std::int64_t{thread.vector} * plan.vector - phase - shift;
        const int first_row =
            work::first_staggered_row(shift, problem.dim.groups[0].stride[kSource], plan.vector, classes);
        for (std::int64_t row = first_row; row < problem.dim.size; row += classes)
          for (std::int64_t k = std::max<std::int64_t>(first, 0); k < std::min(first + plan.vector, problem.inner.size);
               ++k)
            counts.columns(outer * problem.inner.size + k, 1, row);
      }
    }
}

void walk_slabs(const Problem& problem, const Plan& plan, Counts& counts) {
  const std::int64_t inner = problem.inner.size, words = inner / plan.vector, slabs = plan.rows_per_block / inner;
  const int log2_run = std::countr_zero(static_cast<unsigned>(plan.run)), turn = plan.block / tuning::kWarp * plan.run;
  for (std::int64_t block = 0; block < plan.grid; ++block)
    for (int i = 0; i < plan.block; ++i) {
      const work::SlabThread thread = work::slab_thread(i, log2_run);
      for (std::int64_t first = thread.first; first < slabs * words; first += turn) {
        const std::int64_t number = first + thread.beside, slab = block * slabs + number / words;
        if (number >= slabs * words || slab >= problem.outer.size) continue;
        for (std::int64_t d = thread.along; d < problem.dim.size; d += plan.threads_per_row)
          counts.columns(slab * inner + number % words * plan.vector, plan.vector, d);
      }
    }
}

void walk_tiles(const Problem& problem, const Plan& plan, Counts& counts) {
  const StridedTile tile = strided_tile(problem, plan);
  const int along = plan.threads_per_row / plan.cluster;
  const work::Divider run(plan.run), dims(along);
  for (std::int64_t block = 0; block < plan.grid; ++block) {
    const std::int64_t index = block / plan.cluster, rank = block % plan.cluster;
    const std::int64_t strip = index / tile.pieces * tile.strips, first = index % tile.pieces * tile.width;
    const int words = along > 1 ? tile.strips * tile.words : plan.block;
    for (int turn = 0; turn < tile.turns; ++turn)
      for (int i = 0; i < plan.block; ++i) {
        const work::TileThread thread = work::tile_thread(i, run, dims);
        const int word = turn * words + thread.column;
        const std::int64_t within = word / tile.words, column = first + word % tile.words * plan.vector;
        if (within >= tile.strips || strip + within >= tile.all_strips) continue;
        if (column >= std::min(first + tile.width, tile.strip)) continue;
        const std::int64_t end = std::min((rank + 1) * tile.rows, problem.dim.size);
        for (std::int64_t d = rank * tile.rows + thread.along; d < end; d += along)
          counts.columns((strip + within) * tile.strip + column, plan.vector, d);
      }
  }
}

void walk_online_tiles(const Problem& problem, const Plan& plan, Counts& counts) {
  const int width = plan.rows_per_block / plan.vector, along = plan.threads_per_row;
  const Fold fold = fold_of(problem, plan);
  const std::int64_t inner = fold.columns / plan.vector, columns = problem.outer.size * inner;
  const work::Divider run(plan.run), dims(along);
  for (std::int64_t block = 0; block < plan.grid; ++block)
    for (int index = 0; index < plan.block; ++index) {
      const work::TileThread thread = work::tile_thread(index, run, dims);
      const std::int64_t column = block / plan.splits * width + thread.column;
      if (thread.column >= width || column >= columns) continue;
      const std::int64_t outer = column / inner;
      const int phase = fold.folds ? phase_of(problem, plan, outer, fold.unit) : 0;
      const work::Turns turns = work::turns_of(block % plan.splits, plan.splits, std::int64_t{along} * plan.items);
      for (std::int64_t base = turns.first; base < fold.dim; base += turns.apart)
        for (std::int64_t d = base + thread.along; d < std::min(base + along * plan.items, fold.dim); d += along)
          counts.slab(outer, (d * inner + column % inner) * plan.vector - phase, plan.vector);
    }
}

}  // namespace

std::vector<std::uint8_t> coverage(const Problem& problem, const Plan& plan) {
  if (plan.scales && problem.fused.any) return coverage(without_scale(problem), plan);
  if (plan.interleaved > 1 && problem.inner.size > 1) return coverage(interleaved_rows(problem), plan);
  Counts counts(problem);
  switch (plan.regime) {
    case Regime::warp:
    case Regime::block:
    case Regime::cluster:
      if (plan.staged && plan.regime == Regime::cluster)
        walk_cluster_gradients(problem, plan, counts);
      else if (plan.staged && plan.vector > tuning::staged_word(size_of(problem.source)))
        walk_tiny_rows(problem, plan, counts);
      else if (plan.staged)
        walk_staged_rows(problem, plan, counts);
      else
        walk_held_rows(problem, plan, counts);
      break;
    case Regime::online: walk_online_rows(problem, plan, counts); break;
    case Regime::split:
      plan.meets ? walk_meeting_rows(problem, plan, counts) : walk_split_rows(problem, plan, counts);
      break;
    case Regime::strided:
      if (plan.slabs)
        walk_slabs(problem, plan, counts);
      else if (staggers_columns(plan))
        walk_staggered_columns(problem, plan, counts);
      else if (holds_columns(plan))
        walk_columns(problem, plan, counts);
      else if (plan.passes == 1)
        walk_tiles(problem, plan, counts);
      else
        walk_online_tiles(problem, plan, counts);
      break;
  }
  return counts.take();
}

}  // namespace ndsoftmax
