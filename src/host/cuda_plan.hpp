// The planner for CUDA devices. Part of every build: plans can be made, printed and tested without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/tuning.hpp"
#include "ndsoftmax/plan.hpp"

namespace ndsoftmax {

// Where the tiles of a strided plan that reads once lie, in memory and in shared memory. A strip is the columns that
// are neighbours in memory: those of the fastest group of inner. plan.rows_per_block columns are a part of one, or
// several.
struct StridedTile {
  enum class Copy : std::uint8_t {
    rows,      // a tile's part of a strip is one run for each element of dim
    runs,      // a strip is one run over all of dim
    elements,  // each thread copies the words it will work on
  };

  std::int64_t strip;       // columns
  std::int64_t all_strips;  // of the problem
  std::int64_t pieces;      // tiles that a strip is cut into
  int strips;               // of a tile
  int width;                // columns of each of them
  int words;                // threads that share a strip, each with plan.vector columns; some may have none
  int turns;                // of the block's threads, until the words are done
  int rows;                 // elements of dim that a block has
  Copy copy;
  int unit;           // bytes copied at once
  bool phased;        // copies do not start at multiples of the unit
  bool packed;        // strips follow each other in memory: they are one run
  bool back;          // results replace the source in shared memory, and leave as a run
  int pitch;          // in shared memory, from one element of dim to the next; elements
  int slab;           // and from one strip to the next; bytes
  int operand_bytes;  // of shared memory, for the source and for the gradient
};
StridedTile strided_tile(const Problem& problem, const Plan& plan);

// Columns that units of memory do not divide a strided plan folds, where a slab, dim times the columns, is one run of
// memory: some elements of dim are taken for one, of as many times the columns.
struct Fold {
  bool folds;            // else the rest is as the problem has it
  int unit;              // elements: of a vector, or of a sector
  int elements;          // of dim, that are taken for one; also 1: then slabs begin within a unit
  std::int64_t columns;  // of each
  std::int64_t dim;      // as many of them as a slab has that begins anywhere
};
Fold fold_of(const Problem& problem, const Plan& plan);

// Of the steps of a block of a strided plan that meets the others, those whose vectors it keeps in shared memory.
int kept_steps(const Problem& problem, const Plan& plan);
// The same in two launches, whose blocks need not all run at once.
Plan without_meeting(const Problem& problem, const Plan& plan);

// Of clusters that have rows in registers and shared memory: whether what shared memory has is asked for first.
inline bool shares_first(const Plan& plan) {
  return plan.passes == 1 && tuning::shared_vectors_first(plan.block, plan.shared_bytes);
}

// The same problem with dim times its columns taken for one row: what a plan that has `interleaved` columns is for.
Problem interleaved_rows(const Problem& problem);

// The rows, in the order in which blocks take them: those of `outer`, or, where Plan::together, first those that share
// masks and biases.
Axis rows_in_order(const Problem& problem, const Plan& plan);

// Whether all that is fused is a mask, of neighbours, and a scale, forward a positive one.
bool masks_neighbours(const Problem& problem);
// Whether the scale is positive in any case, and the vectors of rows have vectors of the mask, too.
bool masks_vectors(const Problem& problem);
// Whether it is a scale and a bias of the source's type, of neighbours.
bool biases_neighbours(const Problem& problem);
// Whether rows of both are vectors, too, which begin alike.
bool biases_vectors(const Problem& problem);
// Whether kernels of the warp regime that know no more than a scale and such a bias take such rows, if they are staged
// or vectors.
bool has_biased_kernels(const Problem& problem);
// Whether kernels of the block and cluster regimes that know no more than a scale and a mask take such a problem.
bool has_masked_kernels(const Problem& problem);

// Whether a strided plan holds columns in registers, which has its own kernel.
inline bool holds_columns(const Plan& plan) { return plan.passes == 1 && !plan.staged; }

// Whether these are vectors that begin elsewhere in each row, which again has its own.
inline bool staggers_columns(const Plan& plan) { return holds_columns(plan) && plan.ragged; }
// By multiples of how many columns their shifts differ: 1 or 2, or as many as a vector has, where vectors are not to be
// staggered.
int stagger_step(const Problem& problem);

// Where the columns that such a plan holds lie, in vectors.
struct ColumnsLayout {
  Fold fold;
  std::int64_t inner;  // of columns, folded ones
  std::int64_t whole;  // elements of dim, folded ones, that all columns have, wherever slabs begin
  std::int64_t rows;   // that a block has
  int along;           // threads of a block along dim
  int kernel;          // that it runs: one of tuning::kColumnsKernels, or of those for fewer columns
  int turns;           // of a block, which has so many tiles
  int width;           // of columns, that a block has at a turn
  int step;            // from the columns of a tile to those of the next
  // Of words, which are shifted by a column in rows that begin within one; 0: they are not.
  int shift;
  int lead;  // the first tile begins before the first word: those whose first column comes with the word before
};

ColumnsLayout columns_layout(const Problem& problem, const Plan& plan);

// Whether masks of 16-bit words of columns, which are less than may be copied, can be loaded as words of masks.
bool masks_are_words(const Problem& problem, const Plan& plan);
// Slots that a thread has for Plan::beside at a turn; and the bytes of all that a block has, at the end of its shared
// memory.
int columns_beside_slots(const Problem& problem, const Plan& plan, const ColumnsLayout& layout);
int columns_beside_bytes(const Problem& problem, const Plan& plan, const ColumnsLayout& layout);
// Whether what it holds are 16-bit columns as they were loaded, to which kernels of their own add a bias.
bool holds_biased_columns(const Problem& problem, const Plan& plan);
// Slots that each thread has there for its shared_items and for what is computed with the last of them; and their
// bytes.
int columns_shared_slots(const Problem& problem, const Plan& plan);
int columns_shared_bytes(const Problem& problem, const Plan& plan);

// Into how many pieces the second launch of a split plan cuts a row: one for each of its blocks.
std::int64_t split_pieces(const Problem& problem, const Plan& plan);

Plan cuda_plan(const Problem& problem, const Device& device, std::optional<Regime> forced);

// How often the threads of a plan write each element, indexed [outer][dim][inner]: all ones, or the plan is wrong.
// Walks every thread of the grid with the index functions that the kernels use.
std::vector<std::uint8_t> coverage(const Problem& problem, const Plan& plan);

// What the kernels of a plan that scales take the problem for: one of which nothing is fused.
Problem without_scale(const Problem& problem);

}  // namespace ndsoftmax
