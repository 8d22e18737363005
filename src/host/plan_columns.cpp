// Plans for columns that threads hold in registers (src/cuda/columns.cu, staggered.cu), and where they lie.
#include "host/planning.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>

#include "host/work.hpp"

namespace ndsoftmax {
namespace planning {
namespace {

// Whether some rows of a result begin within a sector, and kernels can tell which vectors a tile is to write.
bool tiles_may_overlap(const Problem& problem, const Plan& plan) {
  const int source = size_of(problem.source), result = size_of(problem.result);
  return tuning::columns_may_overlap(plan.vector * source, source, result, problem.fused.any) &&
         begin_within_sectors(problem);
}

// Vectors that a tile has of the next one, so that it can write such sectors whole.
int columns_overlap(const Problem& problem, const Plan& plan) {
  if (problem.in_place || !tiles_may_overlap(problem, plan)) return 0;  // in place, another may have written them
  const int bytes = plan.vector * size_of(problem.result);
  return (tuning::kSectorBytes - (tuning::are_words(plan.vector * size_of(problem.source)) ? 0 : 1)) / bytes;
}

// Which kernel it runs: one of tuning::kColumnsKernels, or of those for halves, words or single columns. Those that
// have several tiles have all of dim in each thread.
int columns_kernel(const Problem& problem, const Plan& plan, bool folded, bool shifted) {
  const int source = size_of(problem.source), bytes = plan.vector * source, vectors = plan.items * sources_of(problem);
  const bool alone = plan.threads_per_row == 1 && !folded;
  if (shifted) return alone ? tuning::kAllShiftedWordsKernel : tuning::kShiftedWordsKernel;
  const int kernels =
      tuning::columns_kernels(bytes, source, size_of(problem.result), problem.direction, problem.fused.any);
  const bool many_threads = tuning::are_vectors(bytes) && kernels > tuning::kManyThreadsKernel && !folded;
  const std::int64_t columns = problem.outer.size * problem.inner.size / plan.vector;
  const bool few = tuning::are_words(bytes) && columns < tuning::kColumnWordsMany;
  const bool turns = alone && columns >= tuning::kColumnTurnsMany;
  const int first = !folded                      ? tuning::first_columns_kernel(bytes, problem.fused.any)
                    : tuning::are_vectors(bytes) ? tuning::kFoldedKernel
                                                 : tuning::kFoldedHalvesKernel;
  for (int kernel = first; kernel < kernels; ++kernel) {
    if (kernel == tuning::kSmallerKernel && many_threads &&
        tuning::kColumnsKernels[tuning::kManyThreadsKernel].vectors >= vectors)
      return tuning::kManyThreadsKernel;
    const tuning::ColumnsKernel& size = tuning::columns_kernel(bytes, kernel);
    const bool suits = size.turns > 1 ? turns && !(few && kernel > 0) : size.max_block >= plan.block;
    if (suits && size.vectors + size.shared >= vectors) return kernel;
  }
  throw std::logic_error("no kernel holds so many columns");
}

// The same problem, but not in place.
Problem with_result_apart(const Problem& problem) {
  Problem apart = problem;
  apart.in_place = false;
  return apart;
}

std::int64_t columns_grid(const Problem& problem, const Plan& plan) {
  const ColumnsLayout layout = columns_layout(problem, plan);
  return divide_up(problem.outer.size * layout.inner, layout.turns * layout.step) * plan.cluster;
}

// What follows, of a plan, from its cluster, where `along` threads of a block share dim, and it has so many vectors.
void settle_columns(Plan& plan, std::int64_t dim, std::int64_t along, std::int64_t vectors_of_block) {
  plan.items = static_cast<int>(divide_up(divide_up(dim, plan.cluster), along));
  plan.threads_per_row = static_cast<int>(along * plan.cluster);
  plan.block = static_cast<int>(whole_warps(vectors_of_block * along));
}

Beside may_lie_beside(const Problem& problem, const Plan& plan) {
  const Fused& fused = problem.fused;
  const auto has_vectors = [&](Operand operand, int bytes) {
    return plan.vector * bytes >= tuning::kBesideMinBytes &&
           has_vectors_of_columns(problem, operand, bytes, plan.vector);
  };
  if (fused.only_mask()) return has_vectors(kMask, 1) ? Beside::masks : Beside::none;
  if (!fused.bias || fused.bias_dtype != problem.source || (fused.mask && holds_vectors(problem, plan)))
    return Beside::none;
  return has_vectors(kBias, size_of(fused.bias_dtype)) ? Beside::biases : Beside::none;
}

// What is fused, copied beside what is held, where that lies so, and all blocks that a multiprocessor has registers for
// find room there; or any, where there is no other way to add it.
void add_beside(Plan& plan, const Problem& problem, const Device& device, const tuning::ColumnsKernel& kernel) {
  plan.beside = may_lie_beside(problem, plan);
  if (plan.beside == Beside::none) return;
  const std::int64_t states = divide_up(plan.shared_bytes, tuning::kVectorBytes) * tuning::kVectorBytes;
  const auto all = static_cast<int>(states + columns_beside_bytes(problem, plan, columns_layout(problem, plan)));
  const int blocks = holds_biased_columns(problem, plan) ? 1 : kernel.max_block * kernel.blocks / plan.block;
  if (tuning::share_multiprocessor(blocks, all, device.shared_bytes_per_block))
    plan.shared_bytes = all;
  else
    plan.beside = Beside::none;
}

// And the rest of it, where a block has `width` vectors; none, where its states find no room in shared memory.
std::optional<Plan> finished_columns(const Problem& problem, const Device& device, Plan plan, std::int64_t width,
                                     std::int64_t along) {
  const int bytes = plan.vector * size_of(problem.source);
  const Fold fold = fold_of(problem, plan);
  const bool shifted = words_shift(problem, plan);
  settle_columns(plan, fold.dim, along, width);
  const int number = columns_kernel(problem, plan, fold.folds, shifted);
  const tuning::ColumnsKernel& kernel = tuning::columns_kernel(bytes, number);
  if (kernel.turns > 1) width = plan.block = tuning::kColumnsBlock;
  plan.rows_per_block = static_cast<int>(kernel.turns * width * plan.vector);
  plan.grid = columns_grid(problem, plan);
  const std::int64_t teams =
      tuning::shifts_all_words(bytes, number) ? 2 : along / work::tile_team(plan.run, static_cast<int>(along));
  const std::int64_t held = width + (shifted ? 1 : 0), columns = held * plan.vector / fold.elements;
  const int states = plan.vector * state_bytes(problem), apart = states + tuning::states_gap(states);
  if (teams > 1 || plan.cluster > 1 || fold.elements > 1)  // of whole columns, of teams, and of blocks
    plan.shared_bytes = static_cast<int>(held * (1 + teams) * apart +
                                         (plan.cluster > 1 ? columns * plan.cluster * state_bytes(problem) : 0));
  add_beside(plan, problem, device, kernel);
  if (holds_biased_columns(problem, plan) && plan.beside == Beside::none) return {};
  const int in_registers = kernel.vectors / sources_of(problem);
  if (plan.items > in_registers) {
    if (plan.beside != Beside::none) return {};  // either is the last of shared_bytes
    plan.shared_items = plan.items - in_registers;
    plan.shared_bytes = static_cast<int>(divide_up(plan.shared_bytes, tuning::kLineBytes)) * tuning::kLineBytes +
                        columns_shared_bytes(problem, plan);
  }
  if (plan.shared_bytes > tuning::dynamic_shared_bytes(device.shared_bytes_per_block) ||
      plan.grid > std::numeric_limits<int>::max())
    return {};
  if (plan.shared_items > 0)
    plan.why =
        plan.cluster > 1
            ? "another dimension runs faster than dim; a cluster holds vectors of columns in registers and shared "
              "memory, cut along dim"
            : "another dimension runs faster than dim; threads hold vectors of columns in registers and shared "
              "memory";
  else
    plan.why =
        plan.cluster > 1
            ? "another dimension runs faster than dim; a cluster holds vectors of columns in registers, cut along dim"
            : "another dimension runs faster than dim; threads hold vectors of columns in registers";
  return plan;
}

// Few columns, as words or one by one: neighbours over all strips, and so many threads along dim that each has little,
// or, of more columns, as many as find room, if then a warp has all of dim.
std::optional<Plan> few_columns_plan(const Problem& problem, const Device& device,
                                     const tuning::Architecture& architecture) {
  const int bytes = size_of(problem.source), word = tuning::columns_word(bytes);
  if (bytes == 8 || problem.fused.any) return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.vector = columns_are_vectors(problem, word) ? word : 1;
  if (!columns_are_vectors(problem, plan.vector)) return {};
  const std::int64_t dim = problem.dim.size, columns = problem.outer.size * problem.inner.size / plan.vector;
  plan.run = static_cast<int>(std::min<std::int64_t>(tuning::kFewColumnsRun, power_of_two_from(columns)));
  const std::int64_t lanes = kWarp / plan.run, operands = sources_of(problem);
  const std::int64_t rather = divide_up(dim, tuning::kFewColumnsHeld / operands);
  std::int64_t along = power_of_two_from(rather);
  int most = tuning::few_columns_most_held(architecture.max_cluster, problem.direction);
  if (along > lanes)
    along = dim <= lanes * tuning::few_columns_of_warp(problem.direction) ? lanes : divide_up(rather, lanes) * lanes;
  along = std::min<std::int64_t>(along, tuning::kFewColumnsThreads / plan.run);
  const std::int64_t room = std::int64_t{tuning::kFewColumnsThreads} * device.multiprocessors;
  if (columns * along > room) {
    along = std::min(along, lanes);
    while (along > 1 && columns * along > room) along /= 2;
    most = tuning::kMoreColumnsMostHeld;
  }
  if (columns * along > room || divide_up(dim, along) * operands > most) return {};
  const std::int64_t width = plan.run * std::max<std::int64_t>(1, tuning::kColumnsBlock / (plan.run * along));
  return finished_columns(problem, device, plan, width, along);
}

// Vectors of columns, or folded ones, halves of vectors, words, or single columns, in registers; a thread has every
// along'th element of dim, `most_held` of them at most. With many threads, as tuning::kManyThreadsKernel has, if shapes
// are given for these; of halves, these may share: have a part in shared memory, too.
std::optional<Plan> columns_held_up_to(int most_held, const Problem& problem, const Device& device,
                                       const tuning::Architecture& architecture, int vector,
                                       std::span<const tuning::ColumnsShape> many_threads_shapes, bool shares) {
  const bool many_threads = !many_threads_shapes.empty();
  const int bytes = size_of(problem.source), operands = sources_of(problem);
  const int kernels =
      tuning::columns_kernels(vector * bytes, bytes, size_of(problem.result), problem.direction, problem.fused.any);
  if (kernels == 0) return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.vector = vector;
  const bool vectors_held = holds_vectors(problem, plan), singles = tuning::are_singles(vector * bytes);
  const bool shifted = words_shift(problem, plan), words = tuning::are_words(vector * bytes) && !shifted;
  const ColumnsLayout layout = columns_layout(problem, plan);
  const std::int64_t strip = layout.inner, dim = layout.fold.dim, vectors = problem.outer.size * strip;
  if (layout.fold.folds && layout.whole < tuning::columns_min_folded(vector * bytes, bytes, problem.direction))
    return {};
  if (vectors > std::numeric_limits<int>::max() / 2 || dim > std::numeric_limits<int>::max()) return {};
  const int last = layout.fold.folds ? tuning::kManyThreadsKernel : tuning::kFoldedKernel;
  const int halves_kernel = layout.fold.folds ? tuning::kFoldedHalvesKernel : shares ? tuning::kSharingHalvesKernel : 0;
  const tuning::ColumnsKernel& largest_kernel =
      tuning::are_halves(vector * bytes) ? tuning::kColumnHalvesKernels[halves_kernel]
      : vectors_held                     ? tuning::kColumnsKernels[many_threads ? tuning::kManyThreadsKernel : last - 1]
      : singles                          ? tuning::kColumnSinglesKernels.back()
                                         : tuning::kColumnWordsKernels[tuning::kWordsKernel];
  int most = 0, most_threads = 0;  // of a thread; of a block: those of the kernel that was tried last
  const auto hold = [&](const tuning::ColumnsKernel& kernel) {
    most = std::min((kernel.vectors + kernel.shared) / operands, most_held);
    most_threads = kernel.max_block;
  };
  hold(largest_kernel);

  constexpr int kSectorWords = tuning::kSectorBytes / tuning::kColumnsWordBytes;
  // Threads along dim, which are a power of two where a warp has several rows of so many vectors, or strips of words
  // are shorter than a sector (15709 x 89 x 3 of float32: 15.5 us by four, 20.3 by three; longer ones take as long). A
  // block that needs no others may rather have more threads of fewer vectors: the time from its last load to its first
  // store is short.
  const auto threads_for = [&](std::int64_t run, int cluster) {
    const std::int64_t rows = divide_up(dim, cluster);
    std::int64_t along = divide_up(rows, most);
    if (shifted && (along > 1 || cluster > 1)) along = divide_up(along, 2) * 2;  // all rows of a thread begin alike
    const bool short_strips =
        (words || singles) && run < kSectorWords && run * power_of_two_from(along) <= tuning::kColumnsWholeBlock;
    if (short_strips || (run < kWarp && std::has_single_bit(static_cast<std::uint64_t>(run))))
      along = power_of_two_from(along);
    while (cluster == 1 && vectors_held && 2 * run * along <= tuning::kColumnsBlock &&
           divide_up(rows, along) > tuning::columns_rather_held(static_cast<int>(run), problem.direction))
      along *= 2;
    while (cluster == 1 && words && run * along < kSectorWords &&
           divide_up(rows, along) > tuning::column_words_rather_held(static_cast<int>(run)))
      along *= 2;
    return along;
  };
  std::int64_t along = 0, width = 0;  // width: vectors that a block has

  const auto share = [&](int cluster) {
    plan.cluster = cluster;
    along = threads_for(plan.run, cluster);
    settle_columns(plan, dim, along, plan.run);
  };
  const auto kernel_now = [&] { return columns_kernel(problem, plan, layout.fold.folds, shifted); };
  const auto cost_now = [&] {
    return cost_of_columns(problem, device, plan, kernel_now(), divide_up(vectors, plan.run));
  };
  // By as many of these blocks as take the least; of the same, the most.
  const auto share_cheaply = [&](int fewest_blocks, int most_blocks) {
    if (fewest_blocks == most_blocks) return share(most_blocks);
    int best = most_blocks;
    double least = std::numeric_limits<double>::infinity();
    for (int cluster = most_blocks; cluster >= fewest_blocks; --cluster) {
      share(cluster);
      if (const double cost = cost_now().cost; cost < least) best = cluster, least = cost;
    }
    share(best);
  };

  // Whole strips, whose threads read neighbouring elements of dim as one run of memory, over the fewest blocks; short
  // ones over as many as take the least. Of small strips a block has several.
  const auto whole_by = [&](const tuning::ColumnsKernel& kernel) {
    hold(kernel);
    for (const int largest : {std::min(most_threads, tuning::kColumnsWholeBlock), most_threads})
      for (plan.cluster = 1; plan.cluster <= architecture.max_cluster; ++plan.cluster) {
        along = threads_for(strip, plan.cluster);
        const std::int64_t one = strip * along, room = plan.cluster == 1 ? problem.outer.size : 1;
        if (one > largest) continue;
        const std::int64_t strips = std::clamp<std::int64_t>(tuning::kColumnsBlock / one, 1, room);
        plan.run = static_cast<int>(strip);
        if (plan.cluster > 1 && strip <= tuning::kColumnsShortStrip) {
          share(plan.cluster);
          int most_blocks = std::min(2 * static_cast<int>(power_of_two_from(plan.cluster)), architecture.max_cluster);
          if (cost_now().waves <= 1)  // no more than one on each multiprocessor
            most_blocks = static_cast<int>(
                std::clamp<std::int64_t>(device.multiprocessors / problem.outer.size, plan.cluster, most_blocks));
          share_cheaply(plan.cluster, most_blocks);
        }
        width = strips * strip;
        return true;
      }
    return false;
  };
  const auto whole = [&] {
    const bool fewer = layout.fold.folds && vectors_held && problem.direction == Direction::backward;
    return (fewer && whole_by(tuning::kColumnsKernels[tuning::kFoldedKernel])) || whole_by(largest_kernel);
  };

  // Forward, words of 32 bits whose blocks all find room at once have as many threads as blocks have at most, if that
  // is not many more (an H200 takes for 3 x 301 x 321 3.4 us, by 192 threads 4.1; 37 x 289 x 131 7.4, 8.9; for 264
  // problems 0.92 of the time, 1.16 at most; of 16 bits as long).
  const bool fills = problem.direction == Direction::forward && bytes == 4 && !vectors_held && !problem.fused.any;
  const auto fill_block = [&] {
    const std::int64_t all = tuning::kColumnsWholeBlock / plan.run, before = along;
    if (!fills || plan.run * along <= tuning::kColumnsBlock || all <= along) return false;
    settle_columns(plan, dim, along = all, plan.run);
    if (cost_now().waves <= 1) return true;
    settle_columns(plan, dim, along = before, plan.run);
    return false;
  };

  // A part of a strip, by the fewest blocks, or more, up to a power of two.
  const auto fits = [&](const tuning::ColumnsShape& shape) {
    plan.run =
        static_cast<int>(std::min<std::int64_t>(shape.segment / (plan.vector * bytes), power_of_two_from(strip)));
    const int most_blocks = std::min(shape.most_cluster, architecture.max_cluster);
    for (int fewest = shape.least_cluster; fewest <= most_blocks; ++fewest) {
      share(fewest);
      if (plan.run * along > std::min(shape.threads, most_threads)) continue;
      if (fill_block()) return true;
      share_cheaply(fewest, std::min(static_cast<int>(power_of_two_from(fewest)), most_blocks));
      fill_block();
      return true;
    }
    return false;
  };
  const auto parts = [&] {
    const bool overlaps = tiles_may_overlap(problem, plan);  // also in place, where bits are to be the same
    const auto rather_twice = [&](const tuning::ColumnsShape& shape) {
      return tuning::columns_rather_read_twice(vector * bytes, size_of(problem.result), problem.direction, overlaps,
                                               shape) &&
             !problem.fused.any && vector_read_twice(problem, device) > 1 &&
             reads_much(problem, device, tuning::kColumnsTwiceL2Part);
    };
    const auto any_fits = [&](const auto& shapes) {
      const auto fit = [&](const tuning::ColumnsKernel& kernel, int least_segment) {
        hold(kernel);
        return std::any_of(shapes.begin(), shapes.end(), [&](const auto& shape) {
          return shape.segment >= least_segment && !rather_twice(shape) && fits(shape);
        });
      };
      if (!fit(largest_kernel, 0)) return false;
      if (!vectors_held || many_threads ||
          !tuning::columns_rather_fewer(bytes, size_of(problem.result), problem.direction, problem.fused.any))
        return true;
      // segments whose sectors are written in parts are to be no shorter for it
      const int half_line = tuning::kLineBytes / 2, segment = plan.run * vector * bytes;
      return fit(tuning::kColumnsKernels[tuning::kSmallerKernel],
                 begin_within_sectors(problem) ? std::max(segment, half_line) : half_line) ||
             fit(largest_kernel, 0);
    };
    if (!(many_threads    ? any_fits(many_threads_shapes)
          : !vectors_held ? any_fits(tuning::kColumnWordsShapes)
          : overlaps      ? any_fits(tuning::kOverlappingShapes)
          : operands > 1  ? any_fits(tuning::kColumnsBackwardShapes)
                          : any_fits(tuning::kColumnsShapes)))
      return false;
    // sectors that are written in parts are as slow as to read twice
    if (bytes == 2 && vectors_held && plan.run * vector * bytes <= tuning::kSectorBytes &&
        begin_within_sectors(problem))
      return false;
    const int least = tuning::kColumnsBlock * (shifted ? 2 : 1);  // threads
    width = plan.run * std::max<std::int64_t>(1, least / (along * plan.run));
    return true;
  };
  const int least_strip =
      vectors_held || singles ? tuning::kColumnsMinStrip : tuning::column_words_min_strip(problem.direction);
  if (shifted && strip * vector * bytes <= tuning::kShiftedWordsMinStrip) {
    if (strip < kWarp || !whole()) return {};
  } else if (shifted && problem.in_place) {
    return {};
  } else if (layout.fold.folds || strip * vector * bytes < least_strip) {
    const bool runs = slabs_are_runs(problem) && problem.dim.groups[0].stride[kResult] == problem.inner.size;
    if (!runs || !whole()) return {};
  } else if (!parts()) {
    return {};
  }

  return finished_columns(problem, device, plan, width, along);
}

// The same, of as many elements as there is room for; but of so few columns that most multiprocessors would be idle,
// over more blocks, of which each has one of its own. Backward, but for vectors, what one block has stays there: what
// its threads tell each other is a sum, and takes less than a cluster does.
std::optional<Plan> held_columns(const Problem& problem, const Device& device, const tuning::Architecture& architecture,
                                 int vector, std::span<const tuning::ColumnsShape> many_threads_shapes = {},
                                 bool shares = false) {
  const auto up_to = [&](int most_held) {
    return columns_held_up_to(most_held, problem, device, architecture, vector, many_threads_shapes, shares);
  };
  const auto plan = up_to(std::numeric_limits<int>::max());
  if (!plan || columns_grid_apart(problem, *plan) >= device.multiprocessors) return plan;
  const bool stays = problem.direction == Direction::backward && plan->cluster == 1 && !holds_vectors(problem, *plan);
  for (const int most_held : tuning::kSpreadColumnsHeld) {
    const auto spread = up_to(most_held);
    if (spread && spread->block <= tuning::kSpreadColumnsBlock && !(stays && spread->cluster > 1) &&
        columns_grid_apart(problem, *spread) <= device.multiprocessors)
      return spread;
  }
  return plan;
}

// Whether columns that are held so take no more than they do otherwise, which costs so many times what
// tuning::columns_cost() has.
bool takes_less(const Problem& problem, const Device& device, const Plan& plan, const Plan& otherwise,
                double other_cost = 1) {
  const auto cost_of = [&](const Plan& plan) {
    return cost_of_columns(problem, device, plan, columns_layout(problem, plan).kernel, plan.grid / plan.cluster);
  };
  return cost_of(plan).cost <= other_cost * cost_of(otherwise).cost;
}

// Whether vectors of 16-bit columns would leave sectors of which others write a part. Tiles of halves overlap.
bool vectors_write_parts(const Problem& problem) {
  return size_of(problem.source) == 2 && begin_within_sectors(problem);
}

// Whether there are kernels whose threads have four columns each.
bool many_threads_may_hold(const Problem& problem) {
  return size_of(problem.source) <= 4 && problem.source == problem.result && !problem.fused.any &&
         columns_are_vectors(problem, tuning::kManyThreadsColumns);
}

// Four columns each, held by many threads, where vectors of columns can be, forward, or these are 16-bit and halves of
// vectors.
std::optional<Plan> by_many_threads(const Problem& problem, const Device& device,
                                    const tuning::Architecture& architecture) {
  if (!many_threads_may_hold(problem)) return {};
  const int bytes = size_of(problem.source);
  // backward, vectors take no longer, and short strips do better folded
  const bool short_strip = strip_of(problem) * bytes < tuning::kManyThreadsMinStrip;
  if (problem.direction == Direction::backward &&
      (short_strip || columns_are_vectors(problem, tuning::kVectorBytes / bytes)))
    return {};
  const auto of = [&](std::span<const tuning::ColumnsShape> shapes) {
    return held_columns(problem, device, architecture, tuning::kManyThreadsColumns, shapes);
  };
  std::optional<Plan> plan;
  if (!vectors_write_parts(problem)) {
    plan = bytes == 2 ? of(tuning::kManyThreadsHalvesShapes) : of(tuning::kManyThreadsShapes);
  } else if (!tuning::rather_words_than_halves(problem.dim.size)) {
    plan = of(tuning::kManyThreadsOverlappingShapes);
    const auto longer = problem.direction == Direction::backward ? of(tuning::kColumnWordsShapes) : std::nullopt;
    if (!plan || (longer && takes_less(problem, device, *longer, *plan))) plan = longer;
  }
  if (!plan || !short_strip) return plan;
  const int neighbours = plan->run * plan->threads_per_row / plan->cluster * plan->vector * bytes;  // along dim, too
  return neighbours < tuning::kLineBytes ? std::nullopt : plan;
}

// Halves of vectors, of which threads have a part in shared memory, where they rather do so than that a cluster holds
// columns in registers: if that leaves the GPU enough waves, and segments no shorter, and all blocks that registers
// have room for find theirs in shared memory.
std::optional<Plan> rather_shared(const Problem& problem, const Device& device,
                                  const tuning::Architecture& architecture, const Plan& otherwise) {
  if (otherwise.cluster == 1 || size_of(problem.source) != 2 || !many_threads_may_hold(problem)) return {};
  if (problem.direction == Direction::backward && begin_within_sectors(problem)) return {};
  const auto sharing =
      held_columns(problem, device, architecture, tuning::kManyThreadsColumns, tuning::kColumnsSharingShapes, true);
  if (!sharing) return {};
  const int segment = sharing->run * sharing->vector, segment_otherwise = otherwise.run * otherwise.vector;
  const bool merely_fewer_blocks =
      segment == segment_otherwise && sharing->block == otherwise.block && sharing->grid < otherwise.grid;
  const tuning::ColumnsKernel& kernel = tuning::kColumnHalvesKernels[tuning::kSharingHalvesKernel];
  const int blocks = kernel.max_block * kernel.blocks / sharing->block;
  const double waves =
      cost_of_columns(problem, device, *sharing, tuning::kSharingHalvesKernel, sharing->grid / sharing->cluster).waves;
  const bool rather = segment >= segment_otherwise && waves > tuning::columns_sharing_waves(merely_fewer_blocks) &&
                      tuning::share_multiprocessor(blocks, sharing->shared_bytes, device.shared_bytes_per_block);
  return rather ? sharing : std::nullopt;
}

// Whether they take less than the same vectors held by fewer threads do; not of so few blocks that multiprocessors are
// idle.
bool suits_many_threads(const Problem& problem, const Device& device, const Plan& many, const Plan& few) {
  return many.cluster <= tuning::kGpc / 2 && many.grid >= device.multiprocessors &&
         takes_less(problem, device, many, few, vectors_write_parts(problem) ? tuning::kColumnsInPartsCost : 1);
}

// Whether kernels know where such columns are: each axis is one group, but for masks and biases.
bool columns_may_be_held(const Problem& problem) {
  return !problem.fused.causal && outer_is_one_group(problem) && problem.inner.rank == 1;
}

// Whether threads rather have single 16-bit columns than anything else that they could have: where each has all of dim,
// or they are few.
bool rather_singles(const Problem& problem, const Device& device) {
  const int held = tuning::kColumnSinglesKernels[tuning::kSharedSinglesKernel - 1].vectors / sources_of(problem);
  const std::int64_t strip = problem.inner.size, dim = problem.dim.size;
  return dim <= held || tuning::rather_single_columns(strip, dim) ||
         problem.outer.size * strip * dim <=
             device.multiprocessors * tuning::column_singles_most(size_of(problem.result), problem.direction);
}

// Whether these are 16-bit columns to which kernels can add a bias each time that they are used.
bool has_biased_columns(const Problem& problem) {
  return problem.direction == Direction::forward && size_of(problem.source) == 2 && problem.source == problem.result &&
         problem.fused.only_bias() && problem.fused.bias_dtype == problem.source && may_scale(problem.fused);
}

// They, held as they were loaded: as vectors, or, where these have no room, as words.
std::optional<Plan> biased_columns_plan(const Problem& problem, const Device& device,
                                        const tuning::Architecture& architecture) {
  if (!has_biased_columns(problem)) return {};
  const int bytes = size_of(problem.source), vector = tuning::kVectorBytes / bytes, word = tuning::columns_word(bytes);
  if (columns_are_vectors(problem, vector))
    if (const auto vectors = held_columns(problem, device, architecture, vector)) return vectors;
  return columns_are_vectors(problem, word) ? held_columns(problem, device, architecture, word) : std::nullopt;
}

// Whether a thread rather has a row alone.
bool rather_alone(const Rows& rows, const Device& device) {
  return rows.dim <= tuning::kAloneMostDim && rows.count >= tuning::kAloneMinRows &&
         rows.count <= std::int64_t{tuning::alone_most_rows(rows.dim)} * device.multiprocessors;
}

// Threads that hold a row, which begins anywhere, element by element; 0, where other plans take less: few rows of 16
// bits whose vectors are not those of the result,
std::int64_t single_halves_threads(const Problem& problem, const Rows& rows, const Device& device) {
  const bool few = rows.count <= std::int64_t{tuning::kSingleElementsRows} * device.multiprocessors;
  const bool held = rows.dim * sources_of(problem) <= tuning::kSingleElements;
  const bool wide = rows.dim > 1 << tuning::kWarpMaxLog2Dim;
  return few && held && wide && !rows.alike ? tuning::kSingleElementsBlock : 0;
}
// and such of 32 bits that would be staged for longer.
std::int64_t single_words_threads(const Problem& problem, const Rows& rows) {
  if (rows.dim < tuning::single_words_least_dim(problem.direction) || rows.dim >= 1 << tuning::kWarpMaxLog2Dim)
    return 0;
  const std::int64_t held = rows.dim * sources_of(problem);
  return std::max<std::int64_t>(kWarp, power_of_two_from(divide_up(held, tuning::kSingleWordsHeld)));
}

}  // namespace

ColumnsCost cost_of_columns(const Problem& problem, const Device& device, const Plan& plan, int number,
                            std::int64_t tiles) {
  const int bytes = plan.vector * size_of(problem.source);
  const tuning::ColumnsKernel& kernel = tuning::columns_kernel(bytes, number);
  const int blocks = kernel.max_block * kernel.blocks / plan.block;  // a multiprocessor
  const double waves =
      static_cast<double>(tiles) / tuning::clusters_at_once(device.multiprocessors, plan.cluster, blocks);
  const int held = plan.items * kernel.turns * sources_of(problem) * bytes;
  return {waves, tuning::columns_cost(waves, held)};
}

std::int64_t columns_grid_apart(const Problem& problem, const Plan& plan) {
  return problem.in_place ? columns_grid(with_result_apart(problem), plan) : plan.grid;
}

std::optional<Plan> staggered_plan(const Problem& problem, const Device& device) {
  constexpr int kVector = tuning::kStaggeredVector;
  const int bytes = size_of(problem.source);
  if (!tuning::columns_may_be_staggered(bytes, size_of(problem.result), problem.direction, problem.fused.any) ||
      problem.in_place || problem.outer.rank > 1 || problem.inner.rank != 1 || !begin_alike(problem, kVector) ||
      problem.dim.size < tuning::kStaggeredMinDim || stagger_step(problem) > tuning::kStaggeredMostStep)
    return {};
  const int kernel = tuning::staggered_kernel(bytes, stagger_step(problem), problem.dim.size);
  if (kernel == tuning::kStaggeredRows.size()) return {};
  for (const int operand : {kSource, kResult})  // what vectors have beyond the strip is what follows in memory
    if (problem.dim.groups[0].stride[operand] < problem.inner.size || problem.outer.groups[0].stride[operand] < 0)
      return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.ragged = true;
  plan.vector = kVector;
  plan.items = static_cast<int>(problem.dim.size);
  plan.block = tuning::staggered_block(tuning::kStaggeredRows[kernel]);
  plan.rows_per_block = plan.block / kWarp * (kWarp - 2) * kVector;
  const std::int64_t strip = problem.inner.size, warps = work::staggered_warps(strip, kVector);
  plan.grid = divide_up(problem.outer.size * warps, plan.block / kWarp);
  if (plan.grid * plan.block < std::int64_t{tuning::kStaggeredMinThreads} * device.multiprocessors ||
      strip < tuning::kStaggeredMinColumns * warps ||
      std::max(strip, problem.outer.size * warps) > std::numeric_limits<int>::max() / 2)
    return {};
  plan.why =
      "another dimension runs faster than dim; threads hold vectors of columns, which begin elsewhere in each row";
  return plan;
}

std::optional<Plan> single_columns_plan(const Problem& problem, const Device& device,
                                        const tuning::Architecture& architecture) {
  if (size_of(problem.source) != 2 || !columns_may_be_held(problem) || !columns_are_vectors(problem, 1)) return {};
  return held_columns(problem, device, architecture, 1);
}

std::optional<Plan> columns_plan(const Problem& problem, const Device& device,
                                 const tuning::Architecture& architecture) {
  if (!columns_may_be_held(problem)) return {};
  const int bytes = size_of(problem.source), vector = tuning::kVectorBytes / bytes, word = tuning::columns_word(bytes);
  const auto of = [&](int held) { return held_columns(problem, device, architecture, held); };
  if (!fuses_in_place(problem)) {
    const auto biased = biased_columns_plan(problem, device, architecture);
    return biased ? biased : single_columns_plan(problem, device, architecture);
  }
  if (const auto few = few_columns_plan(problem, device, architecture)) return few;
  const bool are_vectors = columns_are_vectors(problem, vector);
  const auto in_registers = [&](const Problem& apart) {
    const auto many = by_many_threads(apart, device, architecture);
    if (!are_vectors) return many;
    const auto few = held_columns(apart, device, architecture, vector);
    return few && many && suits_many_threads(apart, device, *many, *few) ? many : few;
  };
  const auto vectors_of = [&](const Problem& apart) {
    const auto plan = in_registers(apart);
    const auto shared = plan ? rather_shared(apart, device, architecture, *plan) : std::nullopt;
    return shared ? shared : plan;
  };
  std::optional<Plan> vectors;
  if (problem.in_place) {  // tiles do not overlap, but bits are to be the same
    vectors = vectors_of(with_result_apart(problem));
    if (vectors) vectors->grid = columns_grid(problem, *vectors);
  } else {
    vectors = vectors_of(problem);
  }
  if (vectors || are_vectors) return vectors;
  // Folded, as vectors, or halves of them, which may be held where vectors may not (half of the time of tiles); where
  // words that are shifted in every other row could be held as well, only if strips are short: a vector takes one
  // instruction where words take four, but has several columns' states to combine.
  const auto folded_rather_than = [&](const std::optional<Plan>& words) -> std::optional<Plan> {
    if (words && strip_of(problem) * bytes > tuning::kShiftedWordsMinStrip) return words;
    constexpr int kHalf = tuning::kManyThreadsColumns;
    const auto folds = slabs_may_fold(problem, vector) ? of(vector) : std::nullopt;
    // rather than words, only where vectors could be held, too: else dims are short, or slabs do not begin alike
    const bool may_be_halves = (folds || !words) && bytes == 2 && problem.source == problem.result &&
                               !columns_are_vectors(problem, kHalf) && slabs_may_fold(problem, kHalf);
    const auto halves = may_be_halves ? of(kHalf) : std::nullopt;
    const bool rather_halves =
        folds && halves && tuning::folds_halves(problem.direction, halves->cluster, folds->cluster);
    if (folds && !rather_halves) return folds;
    return halves ? halves : words;
  };
  if (columns_are_vectors(problem, word)) {
    if (const auto words = of(word)) return words;
    return folded_rather_than({});
  }
  if (problem.fused.any) return single_columns_plan(problem, device, architecture);
  if (rather_singles(problem, device))
    if (const auto singles = single_columns_plan(problem, device, architecture)) return singles;
  return folded_rather_than(words_may_shift(problem) ? of(word) : std::nullopt);
}

std::optional<Plan> single_elements_plan(const Problem& problem, const Rows& rows, const Device& device) {
  if (device.compute_capability < tuning::kAllKernelsFrom || problem.fused.any || !rows.ragged() ||
      problem.outer.rank > 1 || rows.count > std::numeric_limits<int>::max() / 2 || !columns_are_vectors(problem, 1))
    return {};
  const int bytes = size_of(problem.source);
  const std::int64_t along = bytes == 8                   ? 0
                             : rather_alone(rows, device) ? 1
                             : bytes == 4                 ? single_words_threads(problem, rows)
                                                          : single_halves_threads(problem, rows, device);
  if (along == 0) return {};
  Plan plan;
  plan.regime = Regime::strided;
  plan.vector = plan.run = 1;
  const std::int64_t width = std::max<std::int64_t>(1, tuning::kColumnsBlock / along);
  auto singles = finished_columns(problem, device, plan, width, along);
  if (singles) singles->why = "rows that begin anywhere; threads hold single elements in registers";
  return singles;
}

}  // namespace planning

using namespace planning;

int stagger_step(const Problem& problem) {
  return static_cast<int>(std::gcd(problem.dim.groups[0].stride[kSource], std::int64_t{tuning::kStaggeredVector}));
}

bool masks_are_words(const Problem& problem, const Plan& plan) {
  const int bytes = size_of(problem.source);
  return problem.fused.mask && bytes == 2 && tuning::are_words(plan.vector * bytes) &&
         has_vectors_of_columns(problem, kMask, 1, plan.vector);
}

int columns_beside_slots(const Problem& problem, const Plan& plan, const ColumnsLayout& layout) {
  const int bytes = plan.vector * size_of(problem.source);
  const tuning::ColumnsKernel& kernel = tuning::columns_kernel(bytes, layout.kernel);
  const int together = tuning::columns_together(bytes, kernel.vectors / sources_of(problem));
  return static_cast<int>(divide_up(plan.items, together)) * together;
}

int columns_beside_bytes(const Problem& problem, const Plan& plan, const ColumnsLayout& layout) {
  if (plan.beside == Beside::none) return 0;
  const int element = plan.beside == Beside::masks ? 1 : size_of(problem.fused.bias_dtype);
  return layout.turns * plan.block * columns_beside_slots(problem, plan, layout) * plan.vector * element;
}

bool holds_biased_columns(const Problem& problem, const Plan& plan) {
  return plan.vector > 1 && has_biased_columns(problem);
}

int columns_shared_slots(const Problem& problem, const Plan& plan) {
  const int held = plan.items - plan.shared_items;
  const int together = tuning::columns_together(plan.vector * size_of(problem.source), held);
  return static_cast<int>(divide_up(plan.shared_items, together)) * together;
}

int columns_shared_bytes(const Problem& problem, const Plan& plan) {
  return columns_shared_slots(problem, plan) * sources_of(problem) * plan.vector * size_of(problem.source) * plan.block;
}

ColumnsLayout columns_layout(const Problem& problem, const Plan& plan) {
  ColumnsLayout layout{};
  layout.shift = words_shift(problem, plan) ? 1 : 0;
  layout.fold = fold_of(problem, plan);
  layout.inner = layout.fold.columns / plan.vector + layout.shift;
  layout.whole = problem.dim.size / layout.fold.elements;
  layout.rows = divide_up(layout.fold.dim, plan.cluster);
  layout.along = plan.threads_per_row / plan.cluster;
  layout.kernel = columns_kernel(problem, plan, layout.fold.folds, layout.shift > 0);
  layout.turns = tuning::columns_kernel(plan.vector * size_of(problem.source), layout.kernel).turns;
  layout.width = plan.rows_per_block / plan.vector / layout.turns;
  int overlap = plan.run == layout.inner ? 0 : columns_overlap(problem, plan);
  if (holds_vectors(problem, plan) && tuning::kOverlapPart * overlap > layout.width) overlap = 0;
  const bool words = tuning::are_words(plan.vector * size_of(problem.source));
  if (words && plan.run <= tuning::kFewColumnsRun) overlap = 0;  // L2 has room for the sectors of few columns
  layout.lead = overlap > 0 ? layout.shift : 0;  // whole strips need no other words, nor do rows that begin alike
  layout.step = layout.width - overlap - layout.lead;
  return layout;
}

}  // namespace ndsoftmax
