// Plans for small slabs of dim × inner that follow each other: a block has a run of them in shared memory.
#include <algorithm>

#include "host/planning.hpp"

namespace ndsoftmax::planning {
namespace {

// Whether all operands are contiguous, and the result begins within a vector as the source does, whose place it takes.
bool slabs_follow_each_other(const Problem& problem) {
  return problem.dim.rank == 1 && problem.inner.rank == 1 && slabs_are_runs(problem) && slabs_are_packed(problem) &&
         results_lie_as_sources(problem);
}

class SlabsPlanner {
 public:
  SlabsPlanner(const Problem& problem, const Device& device)
      : problem_(problem),
        device_(device),
        bytes_(size_of(problem.source)),
        sources_(sources_of(problem)),
        dim_(problem.dim.size),
        inner_(problem.inner.size),
        slabs_(problem.outer.size) {}

  std::optional<Plan> operator()() {
    if (slabs_ < std::int64_t{tuning::kSlabsLeast} * device_.multiprocessors ||
        slabs_ * slab_bytes() <
            std::int64_t{tuning::slabs_least_bytes(bytes_, problem_.direction)} * device_.multiprocessors)
      return {};
    Plan plan;
    plan.regime = Regime::strided;
    plan.staged = plan.slabs = true;
    plan.vector = word_ = columns_are_vectors(problem_, tuning::slab_word(bytes_)) ? tuning::slab_word(bytes_) : 1;
    if (slab_bytes() > tuning::slab_most_bytes(bytes_, word_, problem_.direction) || !share_columns()) return {};
    const Block block = best_block();
    if (block.shared_bytes > tuning::dynamic_shared_bytes(device_.shared_bytes_per_block)) return {};
    plan.items = static_cast<int>(items());
    plan.threads_per_row = lanes_;
    plan.run = kWarp / lanes_;
    plan.rows_per_block = static_cast<int>(block.slabs * inner_);
    plan.block = static_cast<int>(block.warps * kWarp);
    plan.grid = divide_up(slabs_, block.slabs);
    plan.shared_bytes = block.shared_bytes;
    plan.why = "another dimension runs faster than dim; threads hold columns of small slabs, runs in shared memory";
    return plan;
  }

 private:
  struct Block {
    std::int64_t slabs, warps;
    int shared_bytes;
    double cost;  // a warp's instructions for each slab, about
  };

  std::int64_t slab_bytes() const { return dim_ * inner_ * bytes_ * sources_; }
  std::int64_t words() const { return inner_ / word_; }  // of each of a slab's rows
  std::int64_t items() const { return divide_up(dim_, lanes_); }

  // By the fewest lanes that have room for a column, or more where that spares turns of shared memory. False: there is
  // no room.
  bool share_columns() {
    const int most = tuning::slab_most_items(bytes_, word_, problem_.direction);
    const int most_lanes = tuning::slab_most_lanes(bytes_, word_, problem_.direction);
    while (lanes_ < most_lanes && items() > most) lanes_ *= 2;
    if (items() > most) return false;
    while (lanes_ < most_lanes && 2 * lanes_ <= dim_ && bank_turns(lanes_) > tuning::kBankTurns &&
           bank_turns(2 * lanes_) < bank_turns(lanes_))
      lanes_ *= 2;
    return true;
  }

  int bank_turns(int lanes) const {
    const int run = kWarp / lanes;
    return tuning::bank_turns([&](int lane) {
      const std::int64_t column = lane % run, slab = column / words(), word = column % words();
      return ((slab * dim_ + lane / run) * inner_ + word * word_) * bytes_ / 4;
    });
  }

  // Of so many slabs: warps that have a few turns each, and rather more where few blocks would leave lanes idle.
  Block block_of(std::int64_t slabs) const {
    const std::int64_t bytes = slabs * dim_ * inner_ * bytes_;
    const std::int64_t run = divide_up(bytes, tuning::kVectorBytes) * tuning::kVectorBytes;
    const auto shared_bytes = static_cast<int>(sources_ * (run + tuning::kVectorBytes));
    const std::int64_t turns = divide_up(slabs * words() * lanes_, kWarp);  // of a warp, for all words
    constexpr std::int64_t kMost = tuning::kSlabMaxBlock / kWarp;
    std::int64_t rather = std::max<std::int64_t>(
        tuning::kSlabWarps,
        divide_up(std::int64_t{tuning::kSlabResidentWarps} * shared_bytes, device_.shared_bytes_per_block));
    if (divide_up(slabs_, slabs) * rather < std::int64_t{tuning::kSlabFewWarps} * device_.multiprocessors)
      rather = kMost;
    rather = std::min(rather, kMost);
    const std::int64_t each = std::max<std::int64_t>(1, (turns + rather / 2) / rather);
    const std::int64_t warps = std::min(divide_up(turns, each), kMost);

    const tuning::SlabInstructions& cost = tuning::kSlabInstructions;
    const bool ends = bytes != run;  // within a vector
    const std::int64_t of_turn = cost.turn + word_ * (cost.column + items() * cost.element);
    const std::int64_t instructions = turns * of_turn + warps * (cost.block + (ends ? cost.ends : 0));
    return {slabs, warps, shared_bytes, static_cast<double>(instructions) / static_cast<double>(slabs)};
  }

  // With about kSlabBytes, unless there would be too few blocks; of a few numbers of slabs the one that costs least.
  Block best_block() const {
    const std::int64_t enough = std::int64_t{tuning::kSlabBlocks} * device_.multiprocessors;
    const std::int64_t most = std::clamp<std::int64_t>(4 * tuning::kSlabBytes / 3 / slab_bytes(), 1,
                                                       std::max<std::int64_t>(1, slabs_ / enough));
    const std::int64_t least = std::max<std::int64_t>(
        {1, most - tuning::kSlabsTried + 1, std::min(most, 2 * tuning::kSlabBytes / 3 / slab_bytes())});
    Block best = block_of(most);
    for (std::int64_t slabs = most - 1; slabs >= least; --slabs)
      if (const Block block = block_of(slabs); block.cost < best.cost) best = block;
    return best;
  }

  const Problem& problem_;
  const Device& device_;
  int bytes_, sources_;
  std::int64_t dim_, inner_, slabs_;
  int word_ = 1, lanes_ = 1;
};

}  // namespace

std::optional<Plan> slabs_plan(const Problem& problem, const Device& device) {
  const int bytes = size_of(problem.source);
  if (device.compute_capability < tuning::kAllKernelsFrom || problem.fused.any ||
      !tuning::has_slabs(bytes, size_of(problem.result)) || !slabs_follow_each_other(problem))
    return {};
  if (columns_are_vectors(problem, tuning::kVectorBytes / bytes)) return {};
  return SlabsPlanner(problem, device)();
}

}  // namespace ndsoftmax::planning
