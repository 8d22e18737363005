// Which regime, and how many tasks. Nothing here depends on addresses.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "host/cpu/kernels.hpp"
#include "host/cpu/launch.hpp"
#include "host/cpu/tiling.hpp"

namespace ndsoftmax::cpu {
namespace {

// Rows are spread over threads when there are fewer tiles than this for each thread.
constexpr std::int64_t kTilesPerThread = 4;

bool holds_a_whole_row(const Problem& problem) { return problem.dim.size <= kTile; }

bool can_be_packed(const Problem& problem, int packed_dim) {
  return problem.packed_rows() && problem.dim.size <= packed_dim && !problem.fused.any;
}

Regime choose(const Problem& problem, int packed_dim, int threads) {
  if (!problem.contiguous_rows()) return Regime::strided;
  // Packed rows of 16 bits go through a tile. Those that fill every lane of the vectors gain nothing by it: from memory
  // they take 2.8 times as long.
  const bool fills_all_vectors = problem.dim.size == packed_dim && size_of(problem.source) == 2;
  if (can_be_packed(problem, packed_dim) && !fills_all_vectors) return Regime::warp;
  if (holds_a_whole_row(problem)) return Regime::block;
  return problem.outer.size < kTilesPerThread * threads ? Regime::split : Regime::online;
}

void require(bool condition, Regime regime, const char* what) {
  if (!condition) throw std::invalid_argument(std::string("regime ") + name_of(regime) + " on the CPU needs " + what);
}

void check(const Problem& problem, int packed_dim, Regime regime) {
  switch (regime) {
    case Regime::warp:
      return require(can_be_packed(problem, packed_dim), regime,
                     "contiguous rows without gaps, none longer than a few vectors, and nothing fused");
    case Regime::block:
      return require(problem.contiguous_rows() && holds_a_whole_row(problem), regime,
                     "contiguous rows that fit in cache");
    case Regime::cluster: return require(false, regime, "a GPU");
    case Regime::online:
    case Regime::split: return require(problem.contiguous_rows(), regime, "contiguous rows");
    case Regime::strided: return;
  }
}

std::string_view reason(const Tiling& tiling, Regime regime, bool spread) {
  switch (regime) {
    case Regime::warp: return "rows are short and follow each other: several are loaded, and stored, as one";
    case Regime::block: return "a row stays in one core's cache: it is read from memory once";
    case Regime::online: return "rows are longer than a core's cache: each is read twice, by one thread";
    case Regime::split: return "long rows, and few of them: threads share each row in parts of fixed size";
    default: break;
  }
  if (spread) return "dim is not contiguous and columns are few: threads share them in parts of fixed size";
  if (tiling.parts() > 1) return "dim is not contiguous and longer than a core's cache: columns are read twice";
  return "dim is not contiguous: neighbouring columns share a vector and stay in one core's cache";
}

}  // namespace

Plan plan(const Problem& problem, const Device& device, std::optional<Regime> forced) {
  const bool wide = problem.source == DType::float64;
  const int lanes = wide ? kernels<double>().lanes : kernels<float>().lanes;
  const int packed_dim = wide ? kernels<double>().packed_dim : kernels<float>().packed_dim;
  Plan plan;
  plan.regime = forced ? *forced : choose(problem, packed_dim, device.threads);
  check(problem, packed_dim, plan.regime);

  const Tiling tiling = make_tiling(problem, lanes, plan.regime);
  const bool few = tiling.tiles() < kTilesPerThread * device.threads;
  const bool spread = plan.regime == Regime::split || (plan.regime == Regime::strided && few && tiling.parts() > 1);
  plan.vector = lanes;
  plan.splits = spread ? tiling.parts() : 1;
  plan.grid = tiling.tiles() * plan.splits;
  plan.passes = tiling.parts() > 1 ? 2 : 1;
  plan.why = reason(tiling, plan.regime, spread);
  return plan;
}

}  // namespace ndsoftmax::cpu
