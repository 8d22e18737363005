// Every tuning number of the CUDA backend, with its reason. plan() reads them on the host; the kernels take the ones
// that must be known when they are compiled (how many values a thread holds) from here as template arguments.
//
// The common ground: softmax is bound by memory. By Little's law an H200 needs some 20 KiB of loads in flight on each
// multiprocessor all the time to reach its bandwidth, so a thread issues several 16-byte loads before it uses the
// first, in blocks small enough that some of them load while others exponentiate or store: together they have room for
// three to five times as much.
//
// Where numbers only choose between plans, "others" says what problems that nobody chose, to which a number makes a
// difference, take of the time with half or twice of it, or the next one below or above.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "ndsoftmax/types.hpp"

namespace ndsoftmax::tuning {

inline constexpr int kVectorBytes = 16;  // the widest access that every architecture since sm_75 has
inline constexpr int kLineBytes = 128;   // of L1: a load of a warp takes a turn for every four lines it touches
inline constexpr int kSectorBytes = 32;  // what memory moves at least
inline constexpr int kMaxBlock = 1024;   // threads that CUDA allows a block
inline constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;  // and blocks, a grid
inline constexpr int kStaticSharedBytes = 2 * 1024;                    // of a block, that its kernel declares at most
constexpr int dynamic_shared_bytes(int shared_bytes_per_block) { return shared_bytes_per_block - kStaticSharedBytes; }
// Whether a multiprocessor has room for so many blocks of so much: it has as much as one may ask for, and what CUDA
// takes of it for each block.
constexpr bool share_multiprocessor(int blocks, int dynamic_bytes, int shared_bytes_per_block) {
  constexpr int kReserved = 1024;
  return blocks * (dynamic_bytes + kReserved) <= dynamic_shared_bytes(shared_bytes_per_block) + kReserved;
}

// 4-byte registers in which a thread holds its part of a row. With addresses and temporaries a kernel stays under 64
// registers, so that even blocks of 1024 threads fit, and smaller ones fill half of a multiprocessor's threads.
inline constexpr int kHeldRegisters = 32;

constexpr int accumulator_bytes(int source_bytes) { return source_bytes == 8 ? 8 : 4; }

// Backward holds the gradient and the output.
constexpr int held_operands(Direction direction) { return direction == Direction::backward ? 2 : 1; }

// Whether a row can be held as it was loaded: backward, what is fused is a mask, which 16 bits take as well as 32, but
// a biased input they would round.
constexpr bool holds_raw(int source_bytes, Direction direction, bool fused) {
  return source_bytes == 2 && (!fused || direction == Direction::backward);
}

// Vectors of a row that a thread holds. With each of the forward ones comes a mask: four are enough in flight.
inline constexpr int kFusedVectors = 4;
constexpr int held_vectors(int source_bytes, Direction direction, bool fused, int most_fused = kFusedVectors) {
  const int values = kHeldRegisters * 4 / accumulator_bytes(source_bytes) / held_operands(direction);
  const int vectors = values / (kVectorBytes / source_bytes);
  return fused && direction == Direction::forward && vectors > most_fused ? most_fused : vectors;
}

// The same where rows are as wide as can be, and more in flight spare them a larger cluster. What is held as it was
// loaded takes fewer registers.
inline constexpr int kMostFusedVectors = 6;
constexpr int most_held_vectors(int source_bytes, Direction direction, bool fused) {
  return holds_raw(source_bytes, direction, fused) ? kHeldRegisters * 4 / kVectorBytes / held_operands(direction)
                                                   : held_vectors(source_bytes, direction, fused, kMostFusedVectors);
}

// And in clusters, whose blocks are of whole warps and fill a multiprocessor in halves or thirds: with two vectors
// more, rows of 100,000 to 160,000 keep 120 to 150 KiB in flight there, instead of 83 to 107, and still find room in 64
// registers.
inline constexpr int kMostClusterVectors = 10;
constexpr int most_cluster_vectors(int source_bytes, Direction direction, bool fused, bool masked) {
  return source_bytes < 8 && direction == Direction::forward && !fused && !masked  // masks take registers
             ? kMostClusterVectors
             : most_held_vectors(source_bytes, direction, fused);
}

// Few rows, of which all are under way at once, are latency: what a thread has of one, one vector after the other. So
// they go to blocks of up to so many threads. Of those of which something is fused, not gradients, unmeasured, nor
// those of float32 that begin anywhere, unless too wide for a warp (330 x 923 with a mask: 3.5 us, so 4.3).
// Others: 1.09 from 193 on, 1.08 from 513 on; 1.07 up to 8 KiB, 1.06 up to 24.
inline constexpr int kFewRowsLeastDim = 321, kFewRowsMostBytes = 16 * 1024, kFewRowsBlock = 256;
constexpr bool few_rows_fuse(int source_bytes, Direction direction, bool ragged, std::int64_t dim) {
  return direction == Direction::forward && (source_bytes == 2 || !ragged || dim > kMaxBlock);
}
// As long as those of a multiprocessor are no more than half of what 64 registers a thread allow, or a quarter, where a
// warp has whole vectors; not such that a warp has little of, nor such that clusters share (an H200 takes for 1 x 733
// of float32 1.7 us, staged 2.2; 66 x 900 1.7, a warp each 2.3; 200 x 1990 of 16 bits 1.9, element by element 2.6; 66 x
// 1990 of float32 1.9, by fewer threads 2.5; but 500 x 600 of 16 bits 1.8, by warps 1.6; 1 x 4500 of float32 2.3, by a
// cluster 2.2). All of it, where threads still have several vectors each, of rows that are wide, and of their gradients
// where they begin anywhere (1108 x 1048 of float32 5.5 us, so 4.6; 1101 x 1403 of bfloat16 5.2, 4.3; gradients of 802
// x 1169 4.6, 3.7; but of 1056 x 1024 of float32 4.8, 4.9). Gradients of which a warp has whole vectors, half, too
// (others, of 16 bits: 1.03).
inline constexpr int kFewRowsFinerVectors = 4;  // a thread, that this may come to, however wide rows are
constexpr bool few_rows_finer(Direction direction, bool fused, bool warp_takes, bool ragged, std::int64_t vectors) {
  if (fused && warp_takes) return false;
  return (direction == Direction::forward || ragged) && vectors > (warp_takes ? 5 : 4) * 32;
}
constexpr int few_rows_threads(Direction direction, bool warp_takes, bool finer) {
  return finer ? kMaxBlock : kMaxBlock / (warp_takes && direction == Direction::forward ? 4 : 2);
}

// A block that holds a row has all of it under way. What the blocks of a multiprocessor have together, 64 registers a
// thread, should be enough for memory to be busy, and little more: it then lies close together. 512 MiB of float32 take
// an H200 253 to 258 us at 70 to 84 KiB, to 259 at 96, to 262 at 112 to 128, but to 266 at 60 and 300 at 48; 16 bits,
// which take more instructions a byte, 263 at 76 and 254 to 257 at 80 to 96. (What is fused does as well by the fewest
// threads.) Widths of which no number of threads comes to that go to clusters, as 16-bit rows of 38 to 40 KiB do
// between narrower and wider ones.
constexpr std::int64_t block_least_bytes(int source_bytes) { return (source_bytes == 2 ? 80 : 72) << 10; }
inline constexpr std::int64_t kBlockMostBytes = 112 << 10;
constexpr bool sizes_blocks(int source_bytes, Direction direction, bool fused) {
  return source_bytes < 8 && direction == Direction::forward && !fused;
}

// Backward, which loads twice as much for what it stores, holds what it can in the fewest threads, and does better by
// more of them where these still have so much under way (512 MiB of 16 bits, 5120 wide: 368.8 us by blocks of 160
// threads, which have 120 KiB, 366.4 by such of 224, which have 80; 7168 wide 368.5, 366.2; of float32, 3584 wide,
// 368.6, 366.8; but of 16 bits, 8192 wide, 369.8 by 128 KiB, 380.2 by 64), unless rows are so few that all are under
// way at once. So do rows that begin anywhere (4811 wide 372.3, 367.5).
inline constexpr std::int64_t kBlockLeastGradientBytes = 72 << 10;
constexpr bool thins_blocks(int source_bytes, Direction direction, bool fused) {
  return source_bytes < 8 && direction == Direction::backward && !fused;
}

// What a thread adds up by itself, it does in so many sums: each addition waits for the one before. More of float64,
// whose rounding is all that is left of its error. Two where terms come a few at a time, and are added to a sum of all.
constexpr int partial_sums(int accumulator_bytes) { return accumulator_bytes == 8 ? 8 : 4; }
inline constexpr int kPartialSumsOfFew = 2;

// ---- warp regime: rows of at most 1024 elements, or a little over 2048 of 16 bits ---------------------------------

inline constexpr int kWarp = 32;
inline constexpr int kWarpMaxLog2Dim = 10;
// Narrower fused rows are staged, where they are many.
constexpr int warp_min_log2_dim(int source_bytes, bool fused) {
  return static_cast<int>(std::bit_width(static_cast<unsigned>((fused ? 4 : 1) * kVectorBytes / source_bytes))) - 1;
}
// Rows that are held as they were loaded take half the registers.
constexpr int warp_max_log2_dim(int source_bytes, bool fused) {
  return kWarpMaxLog2Dim + (holds_raw(source_bytes, Direction::forward, fused) ? 1 : 0);
}
// Rows that are no whole vectors are held element by element, and those of float64, where a vector is but two. Kernels
// are compiled for these sizes; a wider row is better off with more threads. Not so 16-bit ones, where something is
// fused, which costs a vector of eight little more than an element; nor those that take whole vectors to hold.
inline constexpr Array kElementwiseLog2Dims{4, 6, 8, 9};
inline constexpr int kElementwiseKernels = kElementwiseLog2Dims.size();
// The first of them that holds so many; their number, where none does.
constexpr int elementwise_kernel(int log2_dim) {
  int kernel = 0;
  while (kernel < kElementwiseKernels && kElementwiseLog2Dims[kernel] < log2_dim) ++kernel;
  return kernel;
}
constexpr bool always_elementwise(int source_bytes) { return source_bytes == 8; }
constexpr bool vectors_may_be_ragged(int source_bytes, bool fused, int log2_dim) {
  return source_bytes == 2 && (fused || log2_dim > kWarpMaxLog2Dim);
}
// Rows just past 1024 would leave nearly half of eight vectors a lane empty, and so much less in flight: up to so many
// have kernels of their own. So have forward ones just past 2048, of which each thread of a block would have few.
inline constexpr int kFewRawVectors = 5;
constexpr int most_raw_vectors(Direction direction) { return direction == Direction::forward ? 9 : 8; }
// Threads of a block at most: the fewest warps, where rows are many, that read so many bytes of a source. An H200
// copies 512 MiB in 253 us by blocks of 4 KiB, in 260 by such of 8, in 265 by such of 16, and begins 0.82 blocks
// a nanosecond, so that those of 2 KiB take 318: where it begins them about as fast as memory takes them, what is under
// way lies close together.
inline constexpr int kWarpBlock = 128;
inline constexpr int kWarpBlockBytes = 3 * 1024;
// The largest, where all are under way at once, or nearly so: what takes time is to begin them (6500 x 384 of float32:
// 7.1 us, by two warps 7.3). But forward, where more than half of what finds room is under way, and one warp reads
// enough, it is a block: of those that begin late some read while the first ones write (4096 x 1024 of float32: 11.6
// us, so 9.7; 4224 x 512 6.6, 6.1; 8192 x 512 9.9, 10.7).
constexpr int single_warp_bytes(double waves) { return waves <= 1 ? 2048 : 2560; }
constexpr bool suits_single_warps(Direction direction, bool fused, bool ragged, double waves) {
  return direction == Direction::forward && !fused && !ragged && waves > 0.5;
}
inline constexpr int kWarpVectors = 4;  // 64 bytes in flight a thread: enough at half occupancy
// Blocks a multiprocessor, which 64 registers a thread allow, before lanes work on more than a row, and rows are
// staged: while all are under way at once, either would only take longer.
inline constexpr int kWarpBlocks = 8;

// Backward, a lane has twice as much of a row. So wide ones go to blocks, whose threads have so many vectors of either
// operand, where these are not all under way at once, and few threads would have less (an H200 takes for 1980 x 1024 of
// float32 8.8 us, so 7.5, for 3400 x 512 7.6, 6.7; but for 8889 x 568 with a mask 14.6, 16.4).
// As many as they have registers for where something is fused: where that lies, each thread has to find (98 x 4 x 64 x
// 1000 of float32, causal, 66 us, so 38; with masks of keys 75, 73).
inline constexpr int kGradientVectors = 2, kGradientRowVectors = 128;  // the latter at least
constexpr bool gradients_fill(std::int64_t vectors, std::int64_t threads) {
  return vectors >= kGradientRowVectors && 4 * kGradientVectors * threads <= 5 * vectors;
}

// Rows of 16 bits that begin anywhere, and of which lanes would have more than four vectors: threads of a block have
// four, of both operands together, up to so many rows a multiprocessor, as an H200 has it (3377 x 1979 of bfloat16 10.9
// us, so 9.4; 2786 x 1825, backward, 11.0, 9.9; but 4194 x 1147 8.5, 9.2).
inline constexpr int kRaggedVectors = 4;
constexpr bool rather_ragged_blocks(int source_bytes, bool fused, std::int64_t vectors, std::int64_t rows_each) {
  constexpr int kMostRows = 28;
  return source_bytes == 2 && !fused && vectors > kRaggedVectors * kWarp && rows_each <= kMostRows;
}

// Whether a scale alone has kernels of rows for itself, which are those where nothing is fused, with a product more an
// element: kernels that ask for masks take half as long again, and those without would take 2 % longer (narrow rows of
// float32 5). Not of float64, which is rare.
constexpr bool rows_may_scale(int source_bytes) { return source_bytes < 8; }

// Rows of float64, of which a vector has two, are as good as aligned; and fused ones of two types are too rare.
constexpr bool has_staged_rows(int source_bytes, int result_bytes, bool fused) {
  return source_bytes < 8 && (!fused || source_bytes == result_bytes);
}

// Rows that have a bias, and no more than that and a scale, have kernels of their own where they are staged, and of 16
// bits where a warp holds vectors of rows this narrow: to ask what else is fused takes a lane of such as long as the
// rest (an H200 takes for 1024 x 8 x 128 x 128 of bfloat16 with a bias 145 us, else 207; 2048 x 6 x 144 x 144 300, 382;
// but 512 x 8 x 256 x 256 288, 291).
constexpr bool has_biased_rows(int source_bytes) { return source_bytes <= 4; }
constexpr int biased_vectors_most_log2_dim(int source_bytes) { return source_bytes == 2 ? 8 : 0; }

// Rows that share a mask or a bias follow each other where else half of what L2 has room for, or more, would pass
// before it was asked for again (16 x 12 x 512 x 512 of float32 with 12 x 512 x 512: 105 us instead of 123; 16 x 4096 x
// 4096 with 4096 x 4096: 533, 566). Not those that are narrow: they would leave the pages of memory that they have
// begun.
inline constexpr int kTogetherL2Part = 2;
inline constexpr int kTogetherMinBytes = 1024;

// Staged rows lie in shared memory, where nothing but its size bounds what is under way: eight blocks, as many as 64
// registers a thread allow, keep more than 100 KiB on a multiprocessor (of such blocks, 48 KiB gave 0.75 of a copy's
// speed, 96 KiB 1.0).
inline constexpr int kStagedBytes = 14 * 1024;  // of a block at least, where there are rows enough
// Threads of a multiprocessor that tiny rows are to keep busy, or else they go as others do: those of two types; and
// those of which a thread has more vectors than these, which are 16 bits, five or seven wide (an H200 takes for 16008 x
// 7 of bfloat16 1.9 us, as other rows 1.4).
inline constexpr int kTinyRowsThreads = 256, kTinyRowsLongThreads = 64, kTinyRowsVectors = 4;
inline constexpr int kStagedThreads = 1024;  // a multiprocessor, before blocks stage more than they must
// How often rows that are not staged fill a GPU before they rather are. Of wide ones of 32 bits lanes have much in turn
// (an H200 takes for 4646 x 369 4.9 us, staged 6.3, their gradients 6.3, 9.1; 6742 x 171 3.9, 4.1, but 9451 x 158 4.9,
// 4.1; 9292 x 33 3.2, 2.5), forward, of narrow ones little (4073 x 46 2.1, 1.8; 3937 x 90 of 16 bits 2.5, 1.8). Of up
// to three elements, each would have sixteen lanes (7440 x 2: 1.7 us, staged 1.1; but 2195 x 7 of 16 bits, of which a
// thread has eight, 1.8 staged). With masks, forward, sooner (64 x 4 x 49 x 49 of bfloat16 with a mask of keys 5.5 us,
// staged 2.9; 8 x 8 x 100 x 100 4.5, 2.9; of float32, 16 x 4 x 49 x 49 with a mask of queries and keys 2.9, 2.5, but
// 8 x 8 x 33 x 33 2.1, 2.5); backward, unmeasured.
constexpr double staged_waves(int source_bytes, std::int64_t dim, bool tiny, bool fused, Direction direction) {
  if (fused) return direction == Direction::backward ? 1 : source_bytes == 2 ? 0.33 : 0.65;
  if (tiny && dim <= 3) return 0.25;
  if (source_bytes == 4 && dim > 128) return dim > 192 ? 3 : 2;
  return direction == Direction::forward && dim <= (source_bytes == 2 ? 128 : 64) ? 0.65 : 1;
}
// Blocks of the largest size, a multiprocessor, that the compiler is to leave registers for (0: as it likes): forward,
// masks and biases take long to come, and what is rarely fused should not cost the threads that hide it. Masks of more
// than twelve items need 80 registers, of more than twenty 128; whatever is fused, with biases of eight elements under
// way, of more than 10 and of more than 24 elements.
constexpr int staged_min_blocks(Direction direction, bool fused, bool masked, int items, int word) {
  if (!fused || direction == Direction::backward) return 0;
  if (masked) return items > 20 ? 4 : items > 12 ? 6 : kWarpBlocks;
  return items * word > 24 ? 4 : items * word > 10 ? 6 : kWarpBlocks;
}
// Elements that a lane has of a row before more lanes share it. Half as many of 32 bits of which more than a mask is
// fused, or gradients of which anything is: masks and biases are not staged, and take registers (24 x 121 x 121 heads
// of float32 with a bias 0.61 of a copy's speed, 0.56 with twice as many; 90 x 90 causal, backward, 1.0, 0.92; but of
// bfloat16, 70 x 70 causal, backward, 0.59, 0.73).
constexpr int staged_values(int source_bytes, bool fuses) { return fuses && source_bytes == 4 ? 16 : 32; }
inline constexpr int kStagedMasks = 8;     // bytes of a mask that a lane loads together
inline constexpr int kStagedTogether = 4;  // words that a lane loads before it uses the first, where it holds none

// Wider rows are better off as they lie. Masked ones of float32 go with vectors of a block, where these are enough for
// a warp to have several a thread (901 wide 0.88 of a copy's speed, staged 0.79, but 577 wide 0.80, 0.86).
inline constexpr int kStagedMostDim = 1 << kWarpMaxLog2Dim;
constexpr int staged_masked_most_dim(int source_bytes) { return source_bytes == 4 ? 639 : kStagedMostDim; }
// Where more than a mask is fused: of 16 bits, those that vectors do as well by (by the kernels that ask for all that
// may be fused, heads of 146 x 146 of float16 with a bias took 38 us, staged 59; 124 x 124 0.36, staged 0.45; of a bias
// alone, see kStagedBiasedMostDim). Of float32, such rows lie element by element up to 512 (with a
// bias 257 wide 0.52, staged 0.71, 511 wide 0.55, 0.69), but what a diagonal leaves out need not be read there (321
// wide 0.97). Gradients of which anything is fused sooner (128 x 6 x 257 x 257 of float32 with a mask 170 us, staged
// 193; of float16, causal, 115 x 115 0.73, staged 0.65, but 74 x 74 0.49, 0.57).
constexpr int staged_fusing_most_dim(int source_bytes, Direction direction, bool causal) {
  if (direction == Direction::backward) return source_bytes == 2 ? 95 : 127;
  return source_bytes == 2 ? 127 : causal ? 319 : 511;
}
// Of rows that start on 16 bytes, those up to so wide of which something is fused: to find what that is costs a lane,
// for every row of which it has a vector or two, more than those do; staged, it does so for one row in several turns
// (20 wide of float32 with a mask of keys 0.26 of a copy's speed, staged 0.79, 48 wide 0.62, 0.79, but 80 wide 0.86,
// 0.76; of bfloat16, 40 wide 0.21, 0.65, 104 wide 0.46, 0.65, but 192 wide 0.74, 0.61; with a bias, by the
// same kernels, 80 wide 0.34, 0.49, but 96 wide 0.45, 0.41). Gradients only where rows then have fewer lanes (40 wide
// of bfloat16 0.32, 0.58, but 64 wide 0.53, 0.44).
constexpr int staged_aligned_dim(int source_bytes, Direction direction, bool fuses, bool mask_and_bias) {
  if (source_bytes == 2) return direction == Direction::backward ? 48 : fuses ? 80 : 104;
  return mask_and_bias ? 63 : fuses ? 40 : 48;
}

// Elements of a word, which is what a thread takes from shared memory at once. Rows need not be aligned to more.
constexpr int staged_word(int source_bytes) { return source_bytes == 2 ? 2 : 1; }

// A lane's words, rounded up to those that kernels are compiled for.
constexpr int staged_items(int items) {
  const int step = items > 12 ? 4 : 2;
  return (items + step - 1) / step * step;
}

// Rows of 16 bits that have a bias, and no more than that and a scale: elements of a lane, as more of them leave room
// for fewer threads (129 x 129 0.61 of a copy's speed, 0.49 with 16; 63 x 63 0.74, 0.64 with 32); the widest, but 769 x
// 769 0.45, as vectors 0.63; the widest of those that start on 16 bytes, unless no lane that holds a vector would be
// idle (72 x 72 0.78, as vectors 0.60, but 64 x 64 0.66, 0.79); and the waves as of staged_waves() (4 x 3 x 145 x
// 145 2.7 us, not staged 5.9).
inline constexpr int kStagedBiasedValues = 20, kStagedBiasedMostDim = 640, kStagedBiasedAlignedDim = 96;
inline constexpr double kStagedBiasedWaves = 0.1;

// The most that any lane has.
constexpr int staged_most_items(int source_bytes, Direction direction, bool fuses, bool biased) {
  const int most_dim = fuses ? staged_fusing_most_dim(source_bytes, direction, false) : kStagedMostDim;
  const int most =
      biased && source_bytes == 2 ? kStagedBiasedValues : std::min(most_dim, staged_values(source_bytes, fuses));
  return staged_items((most + staged_word(source_bytes) - 1) / staged_word(source_bytes));
}

// Masked rows of 16 bits, which have no instructions to spare: where all lanes have so many words, and no more is left
// of a row than an element for each, that is not worth another item (128 x 6 x 257 x 257: 62 us with one).
inline constexpr Array kStagedTailItems{8, 12, 16};
constexpr bool staged_may_have_tail(int source_bytes, bool masked) { return source_bytes == 2 && masked; }
// Which of them; their number, where it is none.
constexpr int staged_tail(int items) {
  int tail = 0;
  while (tail < kStagedTailItems.size() && kStagedTailItems[tail] != items) ++tail;
  return tail;
}

// The largest number that is rounded up to less than `items`.
constexpr int staged_items_before(int items) {
  int before = items - 1;
  while (before > 0 && staged_items(before) >= items) --before;
  return before;
}

inline constexpr int kBankTurns = 4;  // than which more are worth twice the lanes, and the steps to combine them

// Turns that shared memory takes when each lane of a warp wants its first word, as word_of(lane) says: the most words
// in any of its banks.
template <typename WordOf>
constexpr int bank_turns(const WordOf& word_of) {
  Array<int, kWarp> wanted{};
  Array<std::int64_t, kWarp> last{};  // which neighbours may have in common
  int most = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    const std::int64_t word = word_of(lane), bank = word % kWarp;
    if (wanted[bank] == 0 || last[bank] != word) ++wanted[bank];
    last[bank] = word;
    most = wanted[bank] > most ? wanted[bank] : most;
  }
  return most;
}

// Rows of 32 bits take a third of the instructions: sixteen small blocks, which have 74 KiB under way, keep memory
// busiest (253 us of 512 MiB where large ones took 258); not where single rows are 2 KiB and more, nor where only the
// teams of a large one lie far enough `apart`: these have twice as many.
inline constexpr int kStagedSmallBlock = 64, kStagedSmallTurns = 2;
constexpr int staged_small_bytes(bool fused) { return fused ? 9 * 1024 : 4608; }  // to find masks takes time once

// Of few rows, whose time is latency, more lanes share each: while they have more words than either of these, if a
// multiprocessor then has no more lanes than it says. Forward, 16 bits exponentiate twice, and do not go as far. (An
// H200 takes for 4459 x 31 of float32 1.7 us, by a lane a row 2.4; for 474 such problems 0.91 of the time, backward
// 0.91, of 16 bits 0.97 and 0.95; for 474 with masks 0.94, 1.2 at most.)
struct StagedFew {
  int words, lanes;
  bool forward_halves;
};
inline constexpr Array kStagedFew{StagedFew{8, 512, true}, StagedFew{12, 2048, false}};

// The fewest rows of `dim` elements that fill whole vectors.
constexpr int rows_of_whole_vectors(int dim, int element_bytes) {
  int rows = 1;
  while (rows * dim * element_bytes % kVectorBytes != 0) rows *= 2;
  return rows;
}

// Whether rows smaller than a vector have kernels of their own. (4194304 rows of 1 to 6 of bfloat16 to float32 take an
// H200 8.0, 13.5, 20.6, 26.3, 33.8 and 39.2 us, in words 25.0, 24.4, 27.3, 29.5, 42.6 and 45.4; but 32768 of 7 2.85,
// 1.74.)
constexpr bool has_tiny_rows(int source_bytes, int result_bytes, bool fused) {
  return source_bytes <= result_bytes && !fused;
}

// How a warp shares rows whose size, rounded up, is 2^log2_dim, in vectors of so many elements.
struct WarpLayout {
  int lanes = 1;    // of one row
  int vectors = 1;  // a lane holds of one row
  int rows = 1;     // a lane works on
};

// Few lanes a row mean few shuffles, but eight neighbours, who cover a cache line of 128 bytes, should stay together: a
// load that touches more than four lines takes as many turns in L1. Of single elements all lanes together load a line.
constexpr WarpLayout warp_layout(int log2_dim, int vector) {
  constexpr int kLineLanes = kLineBytes / kVectorBytes;
  const int total = (1 << log2_dim) / vector > 1 ? (1 << log2_dim) / vector : 1;
  WarpLayout layout;
  layout.lanes = total / kWarpVectors > kLineLanes ? total / kWarpVectors : (total < kLineLanes ? total : kLineLanes);
  if (layout.lanes > kWarp || vector == 1) layout.lanes = total < kWarp ? total : kWarp;
  layout.vectors = total / layout.lanes;
  layout.rows = layout.vectors < kWarpVectors ? kWarpVectors / layout.vectors : 1;
  return layout;
}

// ---- by architecture ----------------------------------------------------------------------------------------------

struct Architecture {
  int from_compute_capability;
  int block_threads;  // of a block that holds a row at most, with as many vectors a thread as find room, but for those
                      // that kBlockMostBytes admits; wider rows: clusters
  int max_cluster;    // 1: no clusters
};

// Walked from the newest. sm_90 and later: blocks of at most 256 threads, four of which share a multiprocessor, so that
// some load while others exponentiate and store (larger ones, of which two or three do, where kBlockMostBytes or
// kBlockLeastGradientBytes admit them); wider rows are cut over a cluster of blocks. 16 blocks is more than portable
// clusters have (8), and every sm_90 and sm_100 part allows it; sm_120 has 8.
inline constexpr Array kArchitectures{
    Architecture{.from_compute_capability = 120, .block_threads = 256, .max_cluster = 8},
    Architecture{.from_compute_capability = 90, .block_threads = 256, .max_cluster = 16},
    Architecture{.from_compute_capability = 0, .block_threads = kMaxBlock, .max_cluster = 1},
};

inline constexpr int kGpc = 16;  // multiprocessors that clusters of a GPC have, at least
// Those that clusters find room on: GPCs are not all whole. cudaOccupancyMaxActiveClusters says 120 of an H200's 132.
constexpr int clustered(int multiprocessors) { return multiprocessors * 10 / 11; }
inline constexpr int kClusterLeastThreads = 96;  // smaller blocks spend their time on meeting
inline constexpr int kClusterThreads = 128;      // rather so many: see rather_larger() and kClusterFewVectors
// Blocks of a multiprocessor, of which some load while others exponentiate and store: 512 MiB of rows of 110000 take
// five blocks of 192 threads 264 us in bfloat16 and 258 in float32, two of 512 278 and 262; backward, of 102400 in
// bfloat16, four of 224 367, two of 416 397.
inline constexpr int kOverlappingBlocks = 4;
// Sizes of clusters that have nearly as much under way as the best one: of these, larger ones of smaller blocks overlap
// better (512 MiB of 40000 in bfloat16: 261.5 us by two blocks of 256 threads, 259 by four of 128), as long as a GPC
// has room for several. Of few rows, which fill all registers a few times, what a GPC has no room for matters less than
// how soon they begin and end (of 151936 in bfloat16 128 rows take 24.8 us by eight blocks of 256 threads, 23.6 by 16
// of 128, 256 rows 43.1 and 42.6; 512 MiB of 155000 263 and 267; backward, of 50304, 128 rows 12.6 and 11.9).
inline constexpr double kClusterFewFillings = 3.6;
constexpr double cluster_fill(double fillings) { return fillings < kClusterFewFillings ? 0.9 : 0.92; }
constexpr bool rather_larger(int cluster, std::int64_t threads, double fillings) {
  return threads >= kClusterThreads && (cluster <= kGpc / 2 || fillings < kClusterFewFillings);
}
// Backward, where clusters of two blocks have most under way, their blocks are of five warps: clusters of three blocks
// of four warps take less (512 MiB of float32, 5000 wide: 370.9 us, 368.5; of 16 bits, 9600 wide, 370.6, 365.9).
constexpr int rather_at_least(int source_bytes, Direction direction, bool fused) {
  return source_bytes < 8 && direction == Direction::backward && !fused ? 3 : 2;
}
// Of a thread at least, where all rows run at once: the more threads have part, and the more blocks, the sooner (32
// rows of 50304 in bfloat16 take 5.7 us by four blocks of 512 threads each, by 16 of 160 4.9).
inline constexpr int kClusterFewVectors = 2;
// Of a row, where clusters have no several rows each: wider ones are split over all multiprocessors, the sooner where
// clusters would leave two thirds of those idle (4 rows of 262144 in float32 7.2 us, by clusters 6.6; 3 6.4 either
// way).
inline constexpr std::int64_t kClusterFewBytes = 1 << 20;
inline constexpr std::int64_t kClusterAloneBytes = 3 << 18;
// So are narrower ones of backward whose blocks take a multiprocessor each, up to so many times the clusters that run
// at once, where the rest would take as long again (8 rows of 150000 in float32 9.0 us, split 8.1, of 262144 13.3
// and 11.7; 7 rows 8.8 and 10.5, 13 16.0 and 17.6).
inline constexpr double kClusterFewMore = 1.35;

// Where a row of backward takes the registers of a whole GPC, and two blocks leave a tenth of the threads without work,
// or where a multiprocessor has but one block, which loads and computes in turns, shared memory does better: the next
// row arrives there while one is computed.
constexpr bool has_cluster_gradients(int source_bytes, Direction direction, bool fused) {
  return source_bytes < 8 && direction == Direction::backward && !fused;
}
constexpr bool gradients_rather_arrive(int cluster, int threads) {
  const int blocks = kMaxBlock / threads;
  return blocks <= 1 || (cluster == kGpc && blocks == 2 && 10 * blocks * threads < 9 * kMaxBlock);
}
// Of which two blocks' clusters take so many turns: before, too little arrives while they compute (of 100000 in
// float32, 20 rows take 10.1 us, in registers 9.8; 40 14.5 and 16.3).
inline constexpr int kClusterTurns = 2;

// Forward does badly so: exponentials would be computed twice, and clusters that stay are held up by what each of their
// turns waits for (524 x 256000 of float32: 361 us; with the arrived row in registers, some 330; by clusters that have
// a row each, in registers, 282). There threads keep in shared memory what their registers have no room for, so that
// more is under way: 160 to 336 KiB a multiprocessor instead of 120 to 160. The way through shared memory costs some 3
// %, 16 bits less, as these exponentiate twice in either place. So it is taken where registers have less under way than
// they could (512 MiB of bfloat16 in rows of 215000, which come to 0.82 of that, 280 us, shared 266; of 200064, 0.915,
// 269 and 264; of 204800, 0.94, 266 either way; of 630000, 0.96, 288 and 306), and of 32 bits where fewer blocks than
// overlap well have it (of 256000 282 us, shared 270; of 230000 283 and 271; of 129280, by four blocks, 263 and 267).
constexpr bool clusters_may_share(int source_bytes, Direction direction, bool fused) {
  return source_bytes < 8 && direction == Direction::forward && !fused;
}
constexpr int sharing_vectors(int source_bytes) { return source_bytes == 2 ? 8 : 7; }  // that stay in registers
// Of clusters of more than half a GPC, whose registers have `filled` of what they could under way.
constexpr bool rather_shares(int source_bytes, int cluster, int blocks, double filled) {
  if (blocks <= 1) return true;
  return cluster > kGpc / 2 && filled < 0.93 && (source_bytes == 2 || blocks < kOverlappingBlocks);
}
// Blocks of a cluster, at most, and of a multiprocessor: the first that has room for the row is taken, if more is under
// way then. Clusters of half a GPC find room on more multiprocessors (rows of 256000 in bfloat16: 270 us, by ten blocks
// 283). Of still wider rows, two blocks read again what they have no room for, rather than that one has room for more,
// up to so many times what they hold: at 1048576 of float32 366 us, 414, online 399. (16-bit rows of six times as many
// take an H100 575, online 571.) Some of it comes at once, as registers are few.
struct SharingShape {
  int cluster, blocks, most_source_bytes;
};
inline constexpr Array kSharingShapes{
    SharingShape{kGpc / 2, 4, 2},
    SharingShape{kGpc, 4, 4},
    SharingShape{kGpc, 3, 4},
    SharingShape{kGpc, 2, 4},
};
// Clusters that each have more of the row live longer, and of the last of them nothing hides what they wait for. So
// there have to be so many times the rows that four blocks a multiprocessor have at once, or twice as many of half as
// many blocks: several where registers would have three blocks or more (of 170000 in float32, 67 rows take 28.6 us,
// shared 30.0, 200 75.1 either way), or two of 16 bits (of 524288, 80 rows 50.1 and 52.3); of two in float32 most of
// one (of 262144, 17 rows 15.8 and 17.9, 26 21.2 and 19.5).
constexpr double sharing_waves(int source_bytes, int blocks_held) {
  if (blocks_held <= 1) return 0;
  if (blocks_held == 2) return source_bytes == 2 ? 3 : 0.75;
  return 4;
}
// What shared memory has is asked for first, where L1 keeps room for what registers ask for then: of 256 KiB they have
// in common, sm_90's shared memory takes 196, or 228, which leaves too little (the first against the last: of float32,
// 256000 wide, 269 us, 275; 500000 292, 300; but 400000, of which three blocks have 200 KiB there, 290, 278). Elsewhere
// unmeasured.
constexpr bool shared_vectors_first(int threads, int shared_bytes) {
  return kMaxBlock / threads * (shared_bytes + kStaticSharedBytes) <= 196 << 10;
}
inline constexpr int kClusterTimesHeld = 5;
inline constexpr int kClusterRestVectors = 2;  // that a thread loads together of what it reads twice

inline constexpr int kClusterSlots = 2;            // rows at most that arrive at once
inline constexpr double kClusterLeastSlots = 1.1;  // of a row: less room would leave memory idle while one is computed
// Where registers do not have it either, less all the same, and down to a part of the row, the rest of which is read
// twice, as long as the online regime's clusters take longer (322 x 850001 of bfloat16, backward, which finds room: 549
// us, online 613; 925001 580, 677; 1200001 873, 895; 1400001 1054, 1044; of float32, 550001 681, 766; 700001 1017,
// 1013).
inline constexpr double kClusterWidestSlots = 0.67;
inline constexpr int kClusterRowsVectors = 2;  // of each operand, that a thread takes from there at once
// Clusters that find room at once where a multiprocessor takes one block, at least. A GPC has up to 18 multiprocessors,
// of which clusters can count on kGpc.
constexpr int resident_clusters(int multiprocessors, int cluster) {
  constexpr int kLargestGpc = 18;
  const int rest = multiprocessors % kLargestGpc;
  return multiprocessors / kLargestGpc * (kGpc / cluster) + rest / cluster;
}

// The same where it takes so many, as a part of all GPCs together: a guess, for comparing clusters of different sizes.
constexpr double clusters_at_once(int multiprocessors, int cluster, int blocks) {
  return std::max(1.0, clustered(multiprocessors) / double{kGpc} * (kGpc * blocks / cluster));
}

constexpr const Architecture& architecture(int compute_capability) {
  for (const Architecture& entry : kArchitectures)
    if (compute_capability >= entry.from_compute_capability) return entry;
  return kArchitectures.back();
}

// Compute capability with asynchronous copies into shared memory, and with every kernel. Older GPUs, whose memory takes
// less to keep busy, have a fallback of a quarter as many: rows are held element by element by a warp, or read twice,
// and never staged (but tiny ones); columns are read twice, one a thread.
inline constexpr int kAllKernelsFrom = 80;
inline constexpr int kOverlapFrom = 90;  // compute capability that can start a kernel before the one before has ended
// Whether blocks and clusters that hold a row each, or columns, let the next kernel begin only when they begin to
// store. Where 512 threads a multiprocessor run, a kernel fills most of the GPU in one wave: blocks of the next one
// else crowd on the multiprocessors that are done first. From there to 768, blocks take an H200 0.95 of the time,
// clusters 0.975, columns 0.95; to 1024 0.985, 0.99, 0.99; of more, in many waves, 1.00, 0.995, 0.997. Of fewer threads
// all find room, and may as well begin: late, 448 to 512 take 1.00, 0.985, 0.98 of the time, 256 to 384 take 1.005,
// 1.035, 1.02. (4,900 kernels, each after itself. Rows that warps hold take 1.06 to 1.09, wherever.)
constexpr bool next_begins_late(std::int64_t threads, int multiprocessors) {
  return threads >= std::int64_t{512} * multiprocessors;
}

// ---- online and split ---------------------------------------------------------------------------------------------

inline constexpr int kOnlineBlock = 256;
inline constexpr int kOnlineBlocks = 3;  // a multiprocessor: 80 registers a thread
inline constexpr int kSplitBlocks = 4;   // of the launch that only reads: 64
// Where rows are many, clusters share them: so few are under way that L2 has them for the second pass, and shared
// memory what it has room for. Of two blocks on a multiprocessor one loads while the other stores.
inline constexpr int kOnlineThreads = kOnlineBlock * kOnlineBlocks;  // of a multiprocessor, in blocks of either size
inline constexpr int kOnlineClusterBlocks = 2;
inline constexpr int kOnlineClusterBlock = kOnlineThreads / kOnlineClusterBlocks;
inline constexpr int kOnlineClusterRows = 2;  // that each cluster has at least: else a grid of all blocks does better
// vectors that a thread works on while as many arrive
constexpr int online_vectors(Direction direction, bool fused) {
  return direction == Direction::backward || fused ? 2 : 4;
}
// Rows that are split, of which nothing is fused: all blocks run at once, one of so many threads, with 128 registers,
// on a multiprocessor, who have two steps of as many vectors under way. They meet between the passes, and keep the last
// of these steps in registers, and others in shared memory, so that the second pass need not read those (an H200 takes
// for 1 x 16777216 of float32 45.9 us, two launches 54.0, of 16 bits 25.2, 28.4, backward 73.9, 80.6, 34.9, 42.7; by
// eight vectors as long). Less than such a part of L2 two launches find there, and these begin while a kernel before
// them ends (1 x 4194304 of float32 15.9 us, 15.8, of 8388608 24.4, 28.3). Nor is it worth it where less than such a
// part is kept (1 x 67108864 backward 330 us, 309; 1 x 33554432 154, 157), or where whole rows come to so few
// multiprocessors that less than such a part has any (27 x 600000, 108 of 132, 49.3 us, 51.8).
constexpr bool split_rows_may_meet(int source_bytes, int result_bytes, bool fused) {
  return source_bytes == result_bytes && source_bytes < 8 && !fused;
}
inline constexpr int kMeetingThreads = 512;
constexpr int meeting_vectors(Direction direction) { return 6 / held_operands(direction); }
inline constexpr int kMeetingHeldSteps = 2;  // that stay in registers
inline constexpr int kSplitMeetingL2Part = 3;
inline constexpr double kSplitMeetingKept = 1.0 / 6;
inline constexpr double kSplitMeetingFilled = 0.8;

inline constexpr std::int64_t kClusterAloneMinDim = 4096;  // narrower rows are latency, however many blocks share them
// vectors that a thread of a split row has at least: less is launch latency
inline constexpr std::int64_t kSplitMinVectors = 4;

// Two columns that take turns in a row of memory are held, or read twice, as that row is where it would go to a
// cluster, or be split. Kernels of columns have a state for each element of a vector, so that fewer vectors find room,
// and none in shared memory (in one run, an H200 took for 64 x 100000 x 2 of float32 32.6 us, as columns 41.4, of 16
// bits 19.1, 23.5; for 142 such problems drawn at random, forward 12 % less, backward 20 and of 16 bits 10 %). Of four,
// states leave too few registers: float32 takes 10 % more. Unmeasured where there are no clusters.
inline constexpr int kInterleavedColumns = 2;
inline constexpr int kInterleavedFrom = 90;  // compute capability
constexpr bool may_interleave(int source_bytes, int result_bytes) {
  return source_bytes == result_bytes && source_bytes < 8;
}
// Forward, of 16 bits, fewer slabs than multiprocessors, and of fewer bytes, are words in clusters of a few blocks,
// whose time is latency (26 x 20000 x 2: 4.4 us, 4.8; 65 x 8001 x 2: 4.5, 5.0; but 17 x 30003 x 2: 5.4, 5.0).
inline constexpr std::int64_t kInterleavedFewBytes = 96 << 10;

// Of a row that begins or ends where the tensor does and not on 16 bytes, whether only its two ends are loaded element
// by element; or else all of it. (An H200 takes for 1 x 50257 of bfloat16 2.77 us, all of it 3.40, backward 2.38, 3.15;
// for 2 x 1000003 7.1, 8.7.) Of 32 bits and more there are fewer such elements, and so much code takes aligned rows
// longer (forward 64 x 32000 7.65 us, 7.51, backward 32 x 32000 5.53, 5.23); as it does forward, where indices have 64
// bits, unless both ends share it (4 x 4194304 of bfloat16 30.3 us, 28.1).
constexpr bool edges_apart(int source_bytes) { return source_bytes == 2; }
constexpr bool edges_unrolled(Direction direction, int index_bytes) {
  return direction == Direction::backward || index_bytes == 4;
}

// ---- strided ------------------------------------------------------------------------------------------------------

// Columns held in registers, where 16 bytes of neighbouring ones are aligned. 16-byte vectors that a thread holds, of
// all operands: a kernel is compiled for each. 20 are 80 registers, and up to 128 with what else is needed: 512
// threads, with up to 160 KiB on a multiprocessor; 24 spill. Fewer let more threads in.
struct ColumnsKernel {
  int vectors;
  int turns;       // so many vectors of columns, of all of dim: one of few elements would leave too little under way
  int max_block;   // threads
  int blocks;      // of the largest size, a multiprocessor
  int shared = 0;  // vectors that a thread has in shared memory, too
};
inline constexpr Array kColumnsKernels{ColumnsKernel{4, 2, 128, 7},  ColumnsKernel{10, 1, 256, 3},
                                       ColumnsKernel{20, 1, 512, 1}, ColumnsKernel{10, 1, 256, 3},
                                       ColumnsKernel{20, 1, 512, 1}, ColumnsKernel{8, 1, 512, 2}};
// The last but one of them are for slabs that are folded, and may begin and end within a vector. Backward rather has
// the smaller one, of whose blocks a multiprocessor has three, in clusters of any size (of 16 bits, 1536 x 197 x 197
// take an H100 128 us in clusters of five, 184 by the larger one in such of three, as words 168; 4096 x 128 x 33 38,
// 52, as tiles 55), but where that has no room rather the larger one than tiles in clusters of a GPC or to read twice
// (of float32, 300 x 5000 x 49: 365 us, 654; of 16 bits, an H200 takes for 50 x 4000 x 51 31.6, 41).
inline constexpr int kSmallerKernel = 1, kFoldedKernel = 3, kManyThreadsKernel = 5;
// The last one has 64 registers, and a multiprocessor 1024 threads of it, each with 128 bytes of four columns: as many
// bytes as 512 threads hold of 256, but twice as many warps, of which some load while others compute, or wait for each
// other (forward, of float32, 32 x 2048 x 2048 in clusters of eight takes an H200 274 us, 290 by 512 threads in
// clusters of two). Of 16 bits, four columns are half a vector, wherever 8 bytes divide them: that takes less than
// vectors (forward, 16 x 1000 x 1000 24.1 us, 27.3; 512 x 65536, dim 0, 38.6, 41.8), than words (128 x 512 x 14 x 14
// 19.7, 22.5, backward 25.1, 26.6), and than vectors of folded slabs (300 x 500 x 36 11.0, 13.6).
// Forward, of float32, it takes whatever it has room for: with shorter segments, it takes as long as the smaller one.
inline constexpr int kColumnsHalfBytes = 8, kManyThreadsColumns = 4;
// Words of dims that one thread has all of stay words, but for short ones (an H200 takes for 37 problems drawn at
// random, as halves, of less than eight 0.88 of the time, of up to 32 1.08).
constexpr bool rather_words_than_halves(std::int64_t dim) { return dim >= 8 && dim <= 32; }
// Bytes: of shorter strips of halves, threads have whole ones; neighbours along dim have to fill lines (301072 x 15 x
// 8: 40.5 us, by halves 98.5).
inline constexpr int kManyThreadsMinStrip = 192;
// Of long columns a thread has as many halves in shared memory as in registers. That kernel is another, as it takes 5 %
// longer for what registers alone hold. Of 32 bits, whose exponentials would have to go there and come back, to share
// takes no less (16384 x 2048, dim 0: 92 us, shared 96; 32 x 2048 x 2048 281, 284).
// The last one is for slabs that are folded, as halves.
inline constexpr Array kColumnHalvesKernels{ColumnsKernel{16, 1, 512, 2}, ColumnsKernel{16, 1, 256, 4, 16},
                                            ColumnsKernel{16, 1, 512, 2}};
inline constexpr int kSharingHalvesKernel = 1, kFoldedHalvesKernel = 2;
static_assert(kColumnHalvesKernels[kFoldedHalvesKernel].vectors <=
              kColumnHalvesKernels[0].vectors);  // looked for first
static_assert(kColumnHalvesKernels[kSharingHalvesKernel].vectors + kColumnHalvesKernels[kSharingHalvesKernel].shared <=
              32);  // which of them to store is a bit each
static_assert(kColumnsHalfBytes == kManyThreadsColumns * 2 && kVectorBytes == kManyThreadsColumns * 4);
// Where vectors do not divide the columns, but words do: 32 of them are as many registers, 64 in all. Threads that have
// all of dim have several columns, until half of their registers hold words: one column of 21 words leaves too little
// under way (16 x 21 x 263169 of float32: 200 us, one at a time 211; x 10: 92, 112; x 30: 293, 312).
inline constexpr int kColumnsWordBytes = 4;
inline constexpr Array kColumnWordsKernels{ColumnsKernel{8, 4, 128, 8},  ColumnsKernel{16, 3, 128, 6},
                                           ColumnsKernel{24, 2, 128, 6}, ColumnsKernel{32, 2, 128, 4},
                                           ColumnsKernel{32, 1, 512, 2}, ColumnsKernel{32, 1, 512, 2},
                                           ColumnsKernel{32, 1, 256, 4}};
// Columns, in words, of which threads have several that are longer than the shortest kernel's: of fewer, a GPU of 132
// multiprocessors had too few blocks (2 x 19 x 66049 of float32: 9.1 us by two at a time, 7.7). Others: 1.03, 1.01.
inline constexpr std::int64_t kColumnWordsMany = 1 << 20;
// And vectors, words or single columns, of which they have several at all: of fewer, one each finds room at once, on
// all GPUs but small ones (an H200 takes for 3 x 774, dim 0, of float32 2.2 us by four words at a time, 1.2; 306 x 4 x
// 4 2.1 by two vectors, 1.6). Others: 1.23, 1.05.
inline constexpr std::int64_t kColumnTurnsMany = 1 << 17;
// And where words do not divide columns of 16 bits, of which threads have all of dim, one each: what each costs is more
// than what all of its few elements do, words that are shifted cost it four times (24600 x 4 x 341: 121 us, single
// columns 58). Tiles, of whose code threads run far more, are slower, too, however short strips are, and most of all
// where results are of 32 bits (2 x 5 along dim 0: 4.9 us, single columns 1.4; 1000000 x 4 x 7 81, 48, to float32 1257,
// 56; 30000 x 16 x 31 31.9, 25.2, to float32 44.7, 34.2). The last one is for several threads along dim.
inline constexpr Array kColumnSinglesKernels{ColumnsKernel{8, 4, 128, 8}, ColumnsKernel{16, 2, 128, 8},
                                             ColumnsKernel{32, 1, 512, 2}};
inline constexpr int kSharedSinglesKernel = static_cast<int>(kColumnSinglesKernels.size()) - 1;
// Elements of a multiprocessor, up to which such threads have them one by one. Of few, all that takes time is latency,
// and code that runs once, of which tiles and folded columns have far more (an H200 takes for 2 x 70 x 5 1.7 us, as a
// tile 4.4; 61 x 115 x 7 1.9, 5.3; 1 x 1000 x 1001 5.4, 6.7); backward, of fewer. Others: 1.07, 1.07, backward 1.05,
// 1.13. Into results of 32 bits, others always take longer (4096 x 70 x 77 54 us, as tiles 73).
constexpr std::int64_t column_singles_most(int result_bytes, Direction direction) {
  if (result_bytes > 2) return std::numeric_limits<std::int32_t>::max();
  return direction == Direction::backward ? 8 << 10 : 32 << 10;
}
// Where there are few columns, all that takes time is latency: that of a thread's elements, one after the other, and of
// states that meet, by shuffles where a warp has all of dim, which takes less than eight elements do, else in shared
// memory. (An H200 takes for 447 x 81 of float32, dim 0, 2.8 us, by threads with 28 elements in clusters 4.5; 1 x 364 x
// 15 of 16 bits 2.0, 3.2; backward 16 x 1267, dim 0, 1.2, 2.2; for 230 problems of up to 1.5 million elements 0.8 of
// the time, 1.1 at most.)
inline constexpr int kFewColumnsRun = 4;        // neighbours: with more of them, threads of a warp have less of dim
inline constexpr int kFewColumnsThreads = 256;  // of a block, and of all blocks of a multiprocessor
inline constexpr int kFewColumnsHeld = 8;       // elements that a thread rather has, of both operands together,
// or so many of each, where a warp then has all of dim (others, by two: 1.18, 1.09).
constexpr int few_columns_of_warp(Direction direction) { return direction == Direction::backward ? 8 : 12; }
// And at most: of more, clusters take less, forward, where there are any (4 x 993 x 28 of bfloat16 2.7 us, 4.3).
// Others, by two: 1.16, 1.07.
constexpr int few_columns_most_held(int max_cluster, Direction direction) {
  return max_cluster > 1 && direction == Direction::forward ? 12 : 16;
}
// Of more columns, of which a warp has all of dim, all the same (912 x 43 x 6 of float32 1.9 us, as whole strips 2.7;
// 16 x 11 x 533 of 16 bits, backward, 1.3, 2.5; but by several warps 40 x 241 x 49 5.0, 3.9). Others: 1.05 by 20, 1.15
// by 16.
inline constexpr int kMoreColumnsMostHeld = 24;
// Rows that begin anywhere, element by element, as columns of one each. Of 16 bits, whose vectors are not those of the
// result: up to so many of a row and its gradient, of which a block has 16 a thread, and so many rows a multiprocessor
// (130 x 2049, if they began alike, 2.4 us, as vectors 3.5).
inline constexpr int kSingleElements = 4096, kSingleElementsRows = 2, kSingleElementsBlock = 256;
// Of 32 bits, narrower than 1024: staged, they take longer from these dims on (130000 x 411 backward 149 us, staged
// 160; forward 16326 x 490 17.8, 19.3, 61224 x 490 59.8, 60.8; but 77922 x 385 66.0, 63.2, 417445 x 321 300, 269). By
// warps, whose lanes have so many each, or as many more threads.
inline constexpr int kSingleWordsHeld = 32;
constexpr int single_words_least_dim(Direction direction) { return direction == Direction::backward ? 193 : 449; }
// Rows of up to three elements, by a thread each, which needs no other lane (928 x 1 of float32 1.08 us, by lanes of a
// warp 1.15, backward 1.00, 1.13; 4096 x 3 1.18, 1.35, backward 1.12, 1.30; 16384 x 3 of bfloat16 1.17, 1.35): of one
// block or less, that is all the same, and of more on each multiprocessor, they are rather staged (4096 x 2 1.16,
// staged 1.09).
inline constexpr int kAloneMostDim = 3, kAloneMinRows = 256;
constexpr int alone_most_rows(std::int64_t dim) { return dim < 3 ? 16 : 128; }
// And however many there are, of strips of some length: where a thread, backward two, have all of dim (5530 x 28 x
// 37 10.1 us, as tiles 17.7; 2619 x 26 x 191 20.4, as words that are shifted 23.9; but 16 x 21 x 263169 127, 116), or
// twice as many have, and strips are shorter than a warp's words (3314 x 53 x 25 9.8, as tiles 27.9; 19070 x 34 x
// 43 50.1, 48.4 at worst).
inline constexpr int kColumnSinglesStrip = 16, kColumnSinglesMostStrip = 256;
constexpr bool rather_single_columns(std::int64_t strip, std::int64_t dim) {
  const std::int64_t held = kColumnSinglesKernels[kSharedSinglesKernel].vectors;
  if (strip < kColumnSinglesStrip) return false;
  return dim <= held ? strip <= kColumnSinglesMostStrip : dim <= 2 * held && strip < 2 * kWarp;
}
constexpr bool are_vectors(int vector_bytes) { return vector_bytes == kVectorBytes; }
constexpr bool are_halves(int vector_bytes) { return vector_bytes == kColumnsHalfBytes; }
constexpr bool are_words(int vector_bytes) { return vector_bytes == kColumnsWordBytes; }
constexpr bool are_singles(int vector_bytes) { return vector_bytes < kColumnsWordBytes; }
// Bytes between the states of one vector of columns and of the next, in shared memory: of those that move as several of
// 16 bytes, neighbouring threads would else want the same banks (an H100 takes for 3072 x 197 x 197 of 16 bits 225 us,
// without a gap 229; 15709 x 89 x 3 13.1, 14.1). A block that shared memory then has no room for is rare, and no loss.
constexpr int states_gap(int bytes) { return bytes > kVectorBytes ? kVectorBytes : 0; }
// The same of teams of a tile, or of columns read twice, whose states of one column neighbouring threads combine.
inline constexpr int kTeamsGap = kVectorBytes;
// Whether tiles may overlap: where something is fused, and of 16 bits, to ask which vector is whose takes registers
// that there are not, and results of 16 bits would overlap by three; single columns would by sixteen.
constexpr bool columns_may_overlap(int vector_bytes, int source_bytes, int result_bytes, bool fused) {
  if (are_vectors(vector_bytes)) return source_bytes == 4 && result_bytes == 4 && !fused;
  return !are_singles(vector_bytes);
}
inline constexpr int kOverlapPart = 8;  // of the vectors that a tile has, at most
// The last two are for words that are shifted by a column in those rows of 16 bits that begin within one: of threads
// that have rows that begin alike, and of such as have all of dim.
inline constexpr int kAllShiftedWordsKernel = static_cast<int>(kColumnWordsKernels.size()) - 1;
inline constexpr int kShiftedWordsKernel = kAllShiftedWordsKernel - 1, kWordsKernel = kShiftedWordsKernel - 1;
static_assert(kColumnWordsKernels[kWordsKernel].turns == 1);
constexpr bool shifts_words(int vector_bytes, int kernel) {
  return are_words(vector_bytes) && kernel >= kShiftedWordsKernel;
}
constexpr bool shifts_all_words(int vector_bytes, int kernel) {
  return are_words(vector_bytes) && kernel == kAllShiftedWordsKernel;
}
enum class ColumnsForm : std::uint8_t { plain, shifted, folded };
constexpr ColumnsForm columns_form(int vector_bytes, int kernel) {
  const bool folded = are_vectors(vector_bytes) ? kernel >= kFoldedKernel && kernel < kManyThreadsKernel
                                                : are_halves(vector_bytes) && kernel == kFoldedHalvesKernel;
  if (folded) return ColumnsForm::folded;
  return shifts_words(vector_bytes, kernel) ? ColumnsForm::shifted : ColumnsForm::plain;
}
// Columns of a word.
constexpr int columns_word(int source_bytes) {
  return source_bytes < kColumnsWordBytes ? kColumnsWordBytes / source_bytes : 1;
}
// The last kernel for vectors of so many bytes, and one. The exponential of float64 needs many registers of its own:
// tiles, in shared memory, leave it them.
constexpr int columns_kernels(int vector_bytes, int source_bytes, int result_bytes, Direction direction, bool fused) {
  if (source_bytes == 8) return 0;
  if (are_vectors(vector_bytes)) {
    const bool has_many_threads = source_bytes == 4 && direction == Direction::forward;
    return fused ? kFoldedKernel : has_many_threads ? kManyThreadsKernel + 1 : kManyThreadsKernel;
  }
  const bool short_results = source_bytes == 2 && result_bytes == 2;
  if (are_singles(vector_bytes)) return kColumnSinglesKernels.size();
  if (are_halves(vector_bytes)) return short_results && !fused ? kColumnHalvesKernels.size() : 0;
  return short_results && !fused ? kColumnWordsKernels.size() : kShiftedWordsKernel;
}
// The first of them: what is fused with words or single columns has but one.
constexpr int first_columns_kernel(int vector_bytes, bool fused) {
  if (!fused || are_vectors(vector_bytes)) return 0;
  return are_singles(vector_bytes) ? kSharedSinglesKernel : kWordsKernel;
}
constexpr const ColumnsKernel& columns_kernel(int vector_bytes, int kernel) {
  if (are_singles(vector_bytes)) return kColumnSinglesKernels[kernel];
  if (are_halves(vector_bytes)) return kColumnHalvesKernels[kernel];
  return are_vectors(vector_bytes) ? kColumnsKernels[kernel] : kColumnWordsKernels[kernel];
}
// Items between two questions whether there are more: a question costs an instruction or two in each pass, what is
// missing as much as what is there. (Of words, each pass takes a quarter of the instructions.)
constexpr int columns_together(int vector_bytes, int items) {
  if (!are_vectors(vector_bytes)) return items < 8 ? 1 : 4;
  return items > 4 && items % 2 == 0 ? 2 : 1;
}
// Bytes of what is fused that lie beside an item, from which on they are copied to shared memory: no copy is shorter.
// (Those of words around less, of which a GPU takes a part, took longer than to load it before: masks of 16 x 12 x 512
// x 511 of float32, dim 2, an H200 168 us, loaded 145.)
inline constexpr int kBesideMinBytes = 4;
// Elements of dim, of which each is several columns folded: the states of fewer take longer to combine than they did to
// compute, above all forward, where each has a maximum, and of 16 bits, of which a vector has eight (an H100 takes for
// 1000 x 50 x 147 of 16 bits, six of them, 19.1 us, words 17.4; 500 x 60 x 151, seven, 11.6, 13.3; 1000 x 70 x 111,
// eight, 20.3, tiles 22.6; 2000 x 200 x 65 50, 60). Of halves, which there are only where vectors are as well, or else
// only tiles, fewer are enough (9583 x 28 x 11 with gaps between slabs: an H200 takes 7.7 us, as tiles 45). Others,
// backward: 1.25 from two on, 1.10 from six on.
constexpr int columns_min_folded(int vector_bytes, int source_bytes, Direction direction) {
  return direction == Direction::backward || are_halves(vector_bytes) ? 4 : source_bytes == 2 ? 7 : 5;
}
// Of 16 bits, as halves rather than vectors, of whose eight columns a thread has a state each, unless that takes
// clusters so much larger: an H200 takes for 2755 x 1036 x 7 30.7 us, as vectors 36.5, for 512 x 512 x 49 21.3, 23.0,
// but for 203 x 265 x 99, in clusters of three, 15.0, 12.1. Of 751 problems drawn at random 0.92 of the time forward
// and backward, 1.22 at most, where this says so, 1.00 and 1.01 elsewhere.
constexpr bool folds_halves(Direction direction, int cluster, int cluster_of_vectors) {
  if (cluster > 2 * cluster_of_vectors) return false;
  if (direction == Direction::forward) return cluster <= kGpc / 2;
  return cluster <= cluster_of_vectors || cluster_of_vectors > 2;  // 1.03 by two blocks for one, 1.00 by four for two
}
// Bytes: of shorter strips, words have whole ones, or too much would overlap. Words that are shifted are rather folded
// there, where they can be: a vector takes one instruction where these take four. Others: forward 1.3 at 512 bytes,
// backward 1.11; shifted 1.10 at 256, 1.06 at 1024.
constexpr int column_words_min_strip(Direction direction) { return direction == Direction::backward ? 256 : 192; }
inline constexpr int kShiftedWordsMinStrip = 512;
inline constexpr int kColumnsMinStrip = 64;  // bytes: shorter ones need neighbours along dim to fill sectors
inline constexpr int kColumnsBlock = 128;    // small blocks retire and refill smoothly
// Elements of dim that a thread rather has, where `run` lanes have neighbours. Those of short strips lie as far apart
// as dim is long: more threads along it find more of what they want in a line (58254 x 9 x 8 of 16 bits: forward 7.8
// us, one thread 19.5, backward 7.9, 16.8; 200000 x 8 x 4 of float32: 14.9, 31 and 18.9, 36.8).
constexpr int columns_rather_held(int run, Direction direction) {
  if (direction == Direction::backward) return run <= 2 ? 3 : kColumnsKernels[kFoldedKernel - 1].vectors;
  return run <= 2 ? 7 : kColumnsKernels[kSmallerKernel].vectors;
}
// The same of words, which lanes do not fold: `run` lanes along the columns, and threads along dim, until both together
// have a sector (100000 x 20 x 2 of 16 bits: 9.4 us, one thread 35; 100000 x 31 x 2 of float32: 18.6, 59; 50000 x 31 x
// 5: 23, 40). Teams whose states do not meet by shuffles rather have one element more.
constexpr int column_words_rather_held(int run) { return (run & (run - 1)) == 0 ? 7 : 8; }
// Forward, of 16 bits, whose blocks exponentiate for as long as they load: threads rather have what the smaller kernel
// holds, three of whose blocks share a multiprocessor, as long as a cluster has room for half a line of each row
// (others 1.05). Of 32 bits that takes as long, and backward longer in larger clusters.
constexpr bool columns_rather_fewer(int source_bytes, int result_bytes, Direction direction, bool fused) {
  return source_bytes == 2 && result_bytes == 2 && direction == Direction::forward && !fused;
}
// Of so few columns that multiprocessors are idle, all that takes time is latency, that of the code a thread runs once
// above all: blocks no larger than these rather have so many elements a thread, the first of which leaves each a
// multiprocessor of its own (an H200 takes for 1187 x 12 of float32, dim 0, 3.4 us, 20 a thread of one block 5.8; 4096
// x 8 3.2, 4.5; of 16 bits 5000 x 24 4.0, 5.2; for 726 problems drawn at random 0.91 of the time, 1.2 at most, for 1210
// with masks 0.74, 1.0).
inline constexpr Array kSpreadColumnsHeld{4, 8, 12, 16};
inline constexpr int kSpreadColumnsBlock = 256;
// Of columns that clusters could hold, blocks meet where they read at least as much as such a part of L2 (an H200 takes
// for 9 x 9993 x 33 of float32, held, 14.6 us, so 20.0). Others: 1.04 where they read a third, 1.08 where a quarter.
inline constexpr int kMetL2Part = 5;
// Whole strips: rather over more blocks, of which some load while others wait, than over larger ones (512 x 512 x 49 of
// float32: 39 us by two of 224 threads, 42 by one of 352).
inline constexpr int kColumnsWholeBlock = 256;

// Forward, many columns of a short dim, which threads hold: vectors of four that begin elsewhere in each row rather
// than words (an H100 takes for 16 x 21 x 263169 of float32 252 us, by words 278; 4 x 32 x 1048577 390, 463; 4 x 13 x
// 5162217 of 16 bits 420, single columns 534). Backward, words take no longer.
inline constexpr int kStaggeredVector = 4;
constexpr bool columns_may_be_staggered(int source_bytes, int result_bytes, Direction direction, bool fused) {
  return direction == Direction::forward && source_bytes == result_bytes && source_bytes < 8 && !fused;
}
// Rows that kernels hold. Those that a problem does not have cost 16 bits, whose bound is instructions, as much as
// others; of more than 20 words take as long (20 x 30 x 99999: 96.2 us, words 94.8).
inline constexpr Array kStaggeredRows{3, 4, 8, 12, 16, 20, 24, 32};
inline constexpr int kStaggeredMinDim = 2;  // 159 x 2 x 32161 of float32: 25.8 us, words 48.6; 16 bits 0.6 to 0.8
// The most that stagger_step() may be. Of 16 bits there are words for 2, which take longer only for the fewest rows.
inline constexpr int kStaggeredMostStep = 2;
constexpr bool has_staggered_rows(int source_bytes, int step, int rows) {
  return source_bytes == 4 || rows <= (step == 1 ? 20 : 3);
}
// The first of them that holds so many; their number, where none does.
constexpr int staggered_kernel(int source_bytes, int step, std::int64_t dim) {
  int kernel = 0;
  while (kernel < kStaggeredRows.size() &&
         (kStaggeredRows[kernel] < dim || !has_staggered_rows(source_bytes, step, kStaggeredRows[kernel])))
    ++kernel;
  return kernel;
}
// Threads of a block: twice as many of so few rows, which a GPU would else not begin as fast as memory takes them.
constexpr int staggered_block(int rows) { return rows < 4 ? 256 : 128; }
// Blocks on a multiprocessor: of threads that have four registers for each row, as it was loaded or as it is widened,
// and as few others as they do with (an H200 takes for 16 x 13 x 420673 of 16 bits 111 us, with eight more 120; 16 x 19
// x 263425 of float32 166, in kernels of 24 rows with eight more 174).
constexpr int staggered_blocks(int rows) {
  const int blocks = (64 << 10) / (staggered_block(rows) * (kStaggeredVector * rows + 32));
  return blocks < 8 ? blocks : 8;
}
// Threads of a multiprocessor, at least: as each has much to do, the last ones of fewer leave too much of a GPU idle
// (32 x 17 x 30001 of float32, 15 blocks of them: 54.0 us, words 49.1; 3000 x 16 x 477, 23: 67.4, 74.6).
inline constexpr int kStaggeredMinThreads = 22 * 128;
// Columns of a warp, at least, of the 120 that it has room for (8000 x 13 x 239 of float32, 80 each: 87 us, words 80).
inline constexpr int kStaggeredMinColumns = 115;

// Bytes of neighbouring columns, threads of a block, and blocks that share dim, at least and at most: the first that
// holds a column is taken. Several blocks on a multiprocessor, of which some load while others exponentiate, are worth
// more than long segments, and so is that a warp has all of dim, whose states then meet without a barrier (16 x 80 x
// 160 x 160 of float32: 65 us by half lines, 67 by whole ones and two warps, of 16 bits 37, 38). Clusters have any
// number of blocks: of many waves, those are fastest of which most are under way (25 x 577 x 1001 of float32: 41.9 us
// by five, 46.6 by eight; 51 x 577 x 1001 of 16 bits 47.2, 55.3), of few, those of which a thread has little (16384 x
// 2048, dim 0, of float32: 91.8 us by sixteen, 99.6 by thirteen).
inline constexpr int kOverHalfAGpc = kGpc / 2 + 1;  // blocks, which some GPUs have no clusters of
struct ColumnsShape {
  int segment, threads, least_cluster, most_cluster;
};
inline constexpr Array kColumnsShapes{
    ColumnsShape{kLineBytes, kWarp, 1, 1}, ColumnsShape{64, kWarp, 1, 1},
    ColumnsShape{kLineBytes, 128, 1, 1},   ColumnsShape{64, 128, 1, 1},
    ColumnsShape{64, 256, 1, kGpc},        ColumnsShape{kSectorBytes, 256, kOverHalfAGpc, kGpc},
};

// What a tile takes, in the time of so many bytes that a thread has of it: what a thread does beside, finding them and
// meeting others, is as much as these. What tiles overlap by, and blocks that are wider for few columns, are left out.
// Others: 1.05 and more by half of it, 1.03 by the fewest blocks instead; waves rounded up 1.05.
inline constexpr int kColumnsOtherBytes = 384;
inline double columns_cost(double waves, int bytes) { return std::max(1.0, waves) * (kColumnsOtherBytes + bytes); }

// Vectors of 16 bits whose tiles write sectors in parts take so much longer, at least (1266 x 499 x 88: 104 us, halves
// of vectors, whose tiles overlap, 73; 262 x 1441 x 152 95, 81).
inline constexpr double kColumnsInPartsCost = 1.4;

// Strips of so many vectors, or words, have few states for more blocks to combine (64 x 100000 x 2 of float32,
// backward: 58.1 us by sixteen blocks, 63.5 by ten, of 16 bits, forward, 23.5 by twelve, 25.6 by five; but 300 x 5000 x
// 49 129.7, 113.0 by seven). Others: 1.03, 1.01.
inline constexpr int kColumnsShortStrip = 16;

// Backward, where a column's state is one sum: what blocks tell each other is half as much, and nothing of it is
// exponentiated. So whole lines, over more blocks, as long as these are not a GPC's. (Less time than by half lines, at
// least: 32 x 2048 x 2048, dim 1, a tenth, of 16 bits 1/18; 512 x 65536, dim 0, 1/20, of 16 bits 1/13; 200 x 200 x 4096
// in a block of 256 threads 454 us, of 128 by half lines 518, of 16 bits 230 and 245. Forward of 16 bits takes 9 %
// more.) Neither way are these to have 512 threads for a sector: to read twice takes less (40000 x 1024 of float32, dim
// 0, backward: 201 us, 232; 50257 x 512, forward: 91, 122, of 16 bits 60, 67). Masks follow, unmeasured.
inline constexpr Array kColumnsBackwardShapes{
    ColumnsShape{kLineBytes, 256, 1, 1},
    ColumnsShape{64, 128, 1, 1},
    ColumnsShape{kLineBytes, 256, 2, 8},
    ColumnsShape{64, 256, 1, kGpc},
    ColumnsShape{kSectorBytes, 256, kOverHalfAGpc, kGpc},
};

// Of rows of which some begin within a sector, so that tiles overlap by a vector: longer segments, that this be little.
inline constexpr Array kOverlappingShapes{
    ColumnsShape{kLineBytes, 256, 1, kGpc},
    ColumnsShape{64, 256, kOverHalfAGpc, kGpc},
    ColumnsShape{64, 512, kOverHalfAGpc, kGpc},
};

// Of words, which overlap by a sector (and single columns, which need none): longer segments, that this be little (256
// x 512 x 511 of float32, dim 1: 178 us at 512 bytes, 181 at 256, 214 folded; 512 x 65537, dim 0: 97, 96, 144 as
// tiles), but rather than clusters of a GPC whole lines (2258 x 18174 of float32, dim 0: 146 us, of 16 bits 89; 158 and
// 97). Warps have a row each: any number.
inline constexpr Array kColumnWordsShapes{
    ColumnsShape{256, 256, 1, 8},
    ColumnsShape{kLineBytes, 320, 2, 8},
    ColumnsShape{kLineBytes, 256, kOverHalfAGpc, kGpc},
    ColumnsShape{kLineBytes, 512, kOverHalfAGpc, kGpc},
};
// Of threads that have 128 bytes each: whole lines, rather over more blocks than of half of one, as long as these are
// not over half of a GPC (16 x 1000 x 1000 of 16 bits: 24.2 us in clusters of four, 27.0 by half lines in such of two).
// Vectors have longer columns in fewer and smaller blocks (20 x 5840 x 384 of float32: 106 us, 110 by blocks of 512).
inline constexpr Array kManyThreadsShapes{ColumnsShape{kLineBytes, 256, 1, 8}};
inline constexpr Array kManyThreadsHalvesShapes{ColumnsShape{kLineBytes, 256, 1, 8}, ColumnsShape{64, 512, 1, 8}};
// Where rows of results begin within sectors, so that tiles overlap by a part of one, never shorter ones; or,
// backward, those of words, where takes_less() says so.
inline constexpr Array kManyThreadsOverlappingShapes{ColumnsShape{kLineBytes, 256, 1, kGpc},
                                                     ColumnsShape{kLineBytes, 512, kOverHalfAGpc, kGpc}};
// Of threads that have a part in shared memory, 256 bytes each in all, four blocks a multiprocessor: whole lines, or
// else half ones. (Forward, of 16 bits: 64 x 3072 x 768 177 us, 161; 381 x 3184 x 120 273, 207; 100 x 800 x 800 78.7,
// 71.4; 16384 x 2048, dim 0, 52.7, 49.2; but 100 x 10000 x 96 115, 118. Backward 8192 x 4096 68.5, 64.9; 32 x 2048 x
// 2048 195, 193, and where tiles overlap nothing.) Neither columns that a block held alone (64 x 64 x 65536: 259, 266)
// nor half lines instead of whole ones (40 x 1000 x 1000: 54, 63) nor less than a wave; where fewer blocks have the
// same tiles, less than four (204 x 1384 x 116: 50.3, 53.2; 512 x 65536, dim 0, 39.5, 41.9). Others: 1.04 of less, 1.05
// from two waves on.
constexpr int columns_sharing_waves(bool merely_fewer_blocks) { return merely_fewer_blocks ? 4 : 1; }
inline constexpr Array kColumnsSharingShapes{ColumnsShape{kLineBytes, 256, 1, kGpc}, ColumnsShape{64, 256, 1, kGpc}};
// Clusters of a GPC take longer for short segments than to read twice: forward, of aligned vectors of 16 bits for less
// than half a line (an H200 takes for 32768 x 4096, dim 0, 232 us, read twice 207; 1 x 25000 x 4008 175, 169; but of
// float32 414, 401 and 312, 342), of such as overlap for less than one (8 x 16000 x 700 of float32: 339, 317), of words
// of 16 bits to 16 bits, by large blocks, for no more than one (12 x 5000 x 333: 48, 39; of float32 69, 80). Backward,
// only by large blocks (8 x 16000 x 700 of float32: 490, 461; but 8 x 10000 x 700 by small ones 251, 282).
constexpr bool columns_rather_read_twice(int vector_bytes, int result_bytes, Direction direction, bool overlaps,
                                         const ColumnsShape& shape) {
  const bool forward = direction == Direction::forward, large = shape.threads > 256;
  if (shape.least_cluster < kOverHalfAGpc || (!forward && !large)) return false;
  if (overlaps && are_vectors(vector_bytes)) return shape.segment < kLineBytes;
  if (result_bytes != 2 || !forward) return false;
  return are_vectors(vector_bytes) ? shape.segment < kLineBytes / 2 : large && shape.segment <= kLineBytes;
}
// Where what is read is at least such a part of L2: of less, it takes as long as launches and meetings do (1 x 30000 x
// 100 of float32 21.9 us, in clusters 14.8; but 1 x 20000 x 500 40.2, 42.0). Others: 1.05, 1.17.
inline constexpr int kColumnsTwiceL2Part = 4;
// a sector has as many words as results of 16 bits: half of the shortest segment
static_assert(kColumnWordsShapes.back().segment >= 2 * (kSectorBytes / 2 * kColumnsWordBytes));

// Slabs of dim × inner that are small, and follow each other without gaps, are runs in shared memory, and threads hold
// columns of them, from there.
inline constexpr int kSlabMaxBlock = 256;
inline constexpr Array kSlabItems{2, 4, 6, 8, 12, 16};  // elements of dim that kernels have a thread hold
constexpr bool has_slabs(int source_bytes, int result_bytes) {
  return source_bytes == result_bytes && source_bytes < 8;
}
// Columns of a word, which a thread takes from shared memory at once, at most.
constexpr int slab_word(int source_bytes) { return source_bytes == 2 ? 2 : 1; }
// Elements of dim that a thread holds at most, before more lanes share its columns: more lanes take instructions, more
// elements registers, and so warps (by at most eight instead, gradients of 16 bits take 0.95 of the time, forward 1.1).
constexpr int slab_most_items(int source_bytes, int columns, Direction direction) {
  if (direction == Direction::backward) return columns == 2 ? 8 : 12;
  return source_bytes == 2 && columns == 1 ? 16 : 12;
}
// A thread's items, rounded up to those that kernels are compiled for.
constexpr int slab_items(int items) {
  for (const int enough : kSlabItems)
    if (enough >= items) return enough;
  return kSlabItems.back();
}
// A kernel of so many items is for more than these, which every thread has.
constexpr int slab_items_before(int items) {
  int before = 1;
  for (const int fewer : kSlabItems)
    if (fewer < items) before = fewer;
  return before;
}
// Of a block, all operands together, unless one slab has more, or blocks are few; up to a third more or less, by the
// number of slabs that takes the fewest instructions (about 8 KiB instead: 1.02 of the time, 4.7 KiB 1.0).
inline constexpr int kSlabBytes = 6 * 1024;
inline constexpr int kSlabsTried = 16;  // such numbers
// Slabs of more bytes, or columns of more lanes than these, take less as columns that threads load themselves: most of
// gradients, whose loads are under way longer than what little is computed (of 562 gradients of 16 bits drawn at random
// 80 took more than 1.05 of the time without this rule, of 1126 problems forward 49, with it 29 and 38).
constexpr int slab_most_bytes(int source_bytes, int columns, Direction direction) {
  if (direction == Direction::forward || (source_bytes == 2 && columns == 1)) return 32 * 1024;
  return columns == 2 ? 2 * 1024 : 4 * 1024;
}
constexpr int slab_most_lanes(int source_bytes, int columns, Direction direction) {
  if (direction == Direction::backward) return source_bytes == 2 && columns == 1 ? 16 : 4;
  return columns == 2 ? 16 : kWarp;
}
// Of a multiprocessor, at least: of fewer slabs, or bytes, whose time is latency, columns are rather spread over more
// threads (of 16 bits, where 1 MiB is read, forward, it takes 1.03 of the time, where half of that 1.3, where 2 MiB
// 0.87; of float32, 2 MiB 1.02, 4 MiB 0.85; gradients, where up to 16 MiB are read, 1.05, but 4096 x 64 x 49 of 16 bits
// 21.5 us, 28.5).
inline constexpr int kSlabsLeast = 3;
constexpr int slabs_least_bytes(int source_bytes, Direction direction) {
  if (direction == Direction::backward) return 128 * 1024;
  return source_bytes == 2 ? 10 * 1024 : 16 * 1024;
}
inline constexpr int kSlabBlocks = 10;  // of a multiprocessor, before they have several slabs
// Warps of a block: at least so many that its multiprocessor, where shared memory has room for no more blocks, has this
// many together; and as many as it may have, where there are fewer in all than kSlabFewWarps a multiprocessor.
inline constexpr int kSlabWarps = 4, kSlabResidentWarps = 48, kSlabFewWarps = 32;
// Instructions of a warp, about: for its block, where that begins or ends within a vector, and for words that its lanes
// take in a turn.
struct SlabInstructions {
  int block, ends, turn, column, element;
};
inline constexpr SlabInstructions kSlabInstructions{110, 50, 40, 30, 10};

// A tile lies in shared memory, and what lies there is what is under way: 128 KiB a multiprocessor reach the speed of
// memory, a third more covers blocks that compute. Narrow tiles of small dims are a block of 128 threads, of which
// eight are resident (64 registers a thread); a long dim needs more to have segments of memory worth the name, and gets
// twice the threads. So a thread has 128 to 256 bytes, and a multiprocessor 768 to 1024 threads that exponentiate.
inline constexpr int kTileBytes = 24 * 1024;
inline constexpr int kTileSmallBytes = 32 * 1024;   // at most: kTileBlock threads; else kTileMaxBlock
inline constexpr int kTileMostBytes = 64 * 1024;    // three blocks fit on a multiprocessor of 228 KiB
inline constexpr int kTileLastBytes = 104 * 1024;   // two: where nothing smaller fits, still better than columns twice
inline constexpr int kTileMeetingBytes = 8 * 1024;  // beside that of a cluster's block, for states
inline constexpr int kTileGrid = 16;                // blocks a multiprocessor, two waves, before tiles become smaller
inline constexpr int kTileLeastBytes = 12 * 1024;   // than which they do not: 96 KiB a multiprocessor
inline constexpr int kTileBlock = 128;
inline constexpr int kTileMaxBlock = 256;
// Blocks of the largest size, a multiprocessor: 64 registers a thread. What is fused, and float64, needs more.
constexpr int tile_min_blocks(int source_bytes, bool fused) { return source_bytes == 8 ? 2 : fused ? 3 : 4; }
// Words that a thread takes from shared memory before it uses the first.
constexpr int tile_items(int source_bytes) { return source_bytes == 8 ? 4 : 8; }
inline constexpr int kTileFusedItems = 4;  // words whose masks and biases are under way at once
inline constexpr int kTileMinRows = 64;    // of dim, that a block of a cluster has, where few tiles are spread

// Bytes of neighbouring columns that a tile has for each element of dim, and blocks that share dim: the first pair that
// fits is taken. Segments shorter than a line of 128 bytes cost some of memory's speed, clusters some of a block's time
// to wait for each other; a sector of 32 bytes is still better than reading single columns
// twice, or few of vectors.
struct TileShape {
  int segment, cluster;
};
inline constexpr Array kTileShapes{
    TileShape{kLineBytes, 1},
    TileShape{64, 1},
    TileShape{64, 2},
    TileShape{64, 4},
    TileShape{64, 8},
    TileShape{64, 16},
    TileShape{kSectorBytes, 16},
    TileShape{kSectorBytes, 1},
};
// Strips that do not end on sectors of memory, which are slow to write in parts, leave a tile as the run that they came
// as, up to so many bytes.
inline constexpr int kTileBackBytes = 512;
inline constexpr int kTileWideGrid = 8;  // blocks a multiprocessor that the widest segments must leave

// A tile's threads work on words: two columns where the source or the result is 16-bit, or else one.
constexpr int tile_columns(int source_bytes, int result_bytes) {
  return (source_bytes < result_bytes ? source_bytes : result_bytes) == 2 ? 2 : 1;
}

// A tile of so many blocks, or more, takes longer than to read vectors twice (an H200 takes for 4 x 10000 x 501 of
// float32 110 us, 78, of 16 bits 66, 38; 6 x 3333 x 1111 of float32 125, 96, of 16 bits 74, 58; backward, 12 x 5000 x
// 333 of float32 142, 108, of 16 bits 91, 59). Single columns, where no vectors can be read, only where a GPC is taken,
// as half of one has no room for half a line of each row.
inline constexpr int kTileRatherTwice = 4;
// Where what vectors read is at least such a part of L2 (1 x 30000 x 250 of 16 bits 23.2 us, as tiles 36.1).
// Others: 1.14 at a fifth.
inline constexpr int kTileTwiceL2Part = 10;

// Two passes. A thread moves the columns of 16 bytes at once; of what is fused at most four.
inline constexpr int kStridedOnlineBlock = 256;
inline constexpr std::int64_t kWorkspaceBytes = 1 << 20;  // of splits, at most, if there are several
inline constexpr int kStridedOnlineMinBlocks = 3;  // a multiprocessor: 80 registers a thread; and blocks of a grid
inline constexpr int kStridedOnlineThreads = kStridedOnlineBlock * kStridedOnlineMinBlocks;
// Vectors of which nothing is fused have a kernel of their own: fewer threads, with 128 registers, who have two steps
// of as many vectors under way, as split rows do that meet.
constexpr bool strided_online_has_vectors(int vector, bool fused) { return vector > 1 && !fused; }
inline constexpr int kStridedVectorsThreads = 512;
constexpr int strided_online_threads(int vector, bool fused) {
  return strided_online_has_vectors(vector, fused) ? kStridedVectorsThreads : kStridedOnlineThreads;
}
// One of their blocks finds room on a multiprocessor, so that a last wave of few takes as long as a full one: blocks
// share columns in as many parts as take the least, of up to so many waves, and so many steps each, or nearly (an H200
// takes for 154 x 31013 x 14 of float32, backward, 351 us, by 135 blocks 568). Segments are of up to so many vectors;
// slabs that leave few threads idle may be tiles, which is one run of memory (2 x 135569 x 156 of float32 145
// us, by segments of a line 286; 8 x 13644 x 344 of 16 bits, backward, 97, 174). Where no more than half of the
// multiprocessors would have a block, blocks may have half of the threads: then twice as many have so many steps
// (others: forward 1.10, backward 1.04).
inline constexpr int kStridedVectorsWaves = 12;
inline constexpr int kStridedVectorsMinSteps = 3;  // others, by one: 1.03, 1.04
inline constexpr int kStridedVectorsMostRun = 32;
inline constexpr int kStridedVectorsIdle = 4;  // of so many threads one may idle
// What a wave takes, in bytes that a multiprocessor moves: beside a block's part, each launch as much as so many; times
// so much where segments are short, above all where they begin and end within sectors, which others write the rest of;
// and times so much where blocks meet, as they drift apart, most of all folded ones, which have no registers to spare,
// but not those of one slab, who take turns in it (300 problems whose dim finds no room on chip: 0.87 of the time of
// one wave of segments of 128 to 512 bytes; with others of half to twice their size 0.87 to 0.90).
inline constexpr int kStridedVectorsOtherBytes = 128 << 10;
constexpr double strided_meeting_factor(int source_bytes, Direction direction, bool folds, bool one_slab) {
  if (folds) return source_bytes == 2 && direction == Direction::forward ? 1.1 : 1.2;
  return one_slab ? 1 : 1.1;
}
constexpr double segments_factor(std::int64_t bytes, bool within_sectors) {
  return 1 + (within_sectors ? 48.0 : 16.0) / static_cast<double>(bytes);
}
// Of all else, tiles that each have so many multiprocessors, or more, are shared by blocks of the threads of all of
// those blocks.
inline constexpr int kStridedOnlineLarge = 16;
inline constexpr int kStridedOnlineMinSteps = 4;  // that a thread has at least, of as many elements as it holds at once
constexpr int strided_vector(int source_bytes, bool fused) {
  const int vector = kVectorBytes / source_bytes;
  return fused && vector > 4 ? 4 : vector;
}

// Of vectors, all blocks run at once, meet between the passes, and keep in registers and shared memory what these have
// room for, so that the second pass need not read that (an H200 takes for 1 x 500000 x 64 of float32 102 us, two
// launches 106, of 16 bits 54.3, 60.4, backward 78.9, 82.3; 1 x 50257 x 512 of 16 bits 41.8, 48.6; 1 x 125000 x 64 of
// float32 30.3, 33.7). Less than so much of L2 two launches find there, and these begin while a kernel before them
// ends.
inline constexpr int kSplitsTogether = 9;  // states under way at once: half of what each of 512 threads has of 64
                                           // columns that are spread over 132 multiprocessors
inline constexpr int kMeetingL2Part = 9;   // others: 1.02 at a sixth
// Of what they read, at least. Of tiles that are slabs a little will do (1 x 1000000 x 16 of float32, backward, 73.9
// us, two launches 81.7); others: 1.05 by 0.1, 1.03 by 0.5.
constexpr double strided_meeting_kept(bool slabs) { return slabs ? 0.1 : 0.3; }

// Where vectors do not divide columns of 16 and 32 bits, they are folded, if they can be (an H100 takes for 4 x 30000 x
// 257 of float32 164 us, as single columns 224; of 16 bits 99, 160).
constexpr bool online_may_fold(int source_bytes, bool fused) { return source_bytes <= 4 && !fused; }

inline constexpr int kStridedOnlineSegments = 4;  // of a strip, at least, or they are shorter, down to a line
// Lanes that have neighbouring columns: vectors, of which something is fused, segments of 256 bytes, and twice as long
// where rows begin within sectors, which are slow to write in parts. Single columns of 32 bits, as long (4 x 30000 x
// 257: 191 us, 209 by a warp); of 16 bits, whose bound is instructions, a warp.
constexpr int strided_online_lanes(int vector, int source_bytes, bool within_sectors) {
  if (vector == 1) return source_bytes == 4 ? 2 * kWarp : kWarp;
  return within_sectors ? kWarp : kWarp / 2;
}

// Vectors that a thread works on while as many arrive: of vectors of which nothing is fused, what together takes half
// of 96 registers, the states of eight columns included, or a little less where the edges of folded ones take some (an
// H200 takes for 2 x 18589 x 833 of float32 117 us, 120 by six, 4 x 30000 x 257 113.6, 116); elsewhere half of what it
// has, addresses included. What is fused takes as many again. Of single columns, more.
inline constexpr int kStridedOnlineSingles = 6;
constexpr int strided_online_items(int vector, int source_bytes, Direction direction, bool fused, bool folds) {
  const bool forward = direction == Direction::forward;
  if (strided_online_has_vectors(vector, fused))
    return !forward || source_bytes == 8 ? 2 : source_bytes == 2 ? 4 : folds ? 5 : 6;
  if (vector == 1 && !fused && source_bytes < 8) return kStridedOnlineSingles / held_operands(direction);
  return fused ? 1 : forward ? 4 : 2;
}

}  // namespace ndsoftmax::tuning
