// A Plan says how a Problem is computed on a Device: which kernel, with how many threads, touching memory how often,
// and why. plan() is a pure function of the host: it needs no GPU, and its result can be compared and printed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "ndsoftmax/problem.hpp"

namespace ndsoftmax {

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda } kind = Kind::cpu;
  int index = 0;
  // cuda
  int compute_capability = 0;  // 10 × major + minor, of the device or the kernels compiled for it: the lesser
  int multiprocessors = 0;
  int shared_bytes_per_block = 0;  // with opt-in
  std::int64_t l2_bytes = 0;
  // cpu
  int threads = 1;

  friend bool operator==(const Device&, const Device&) = default;
};

// How the work on one row is spread. On the CPU, read "thread" for "block" and "vector register" for "warp".
enum class Regime : std::uint8_t {
  warp,     // a warp, or a part of one, holds a row in registers
  block,    // a block holds a row in registers
  cluster,  // a cluster of blocks holds a row, or most of it, in registers and shared memory
  online,   // a block, or a cluster of blocks, reads a row twice, or what it could not keep
  split,    // several blocks share a row and read it twice, statistics pass through a workspace
  strided,  // tiles of columns × dim; the fastest dimension of memory is not dim
};
const char* name_of(Regime regime);
// Throws std::invalid_argument, saying what `name` was given for and what it may be, where there is no such regime.
Regime regime_from(std::string_view name, std::string_view given_for);

// What is fused that threads copy to shared memory, beside the columns that they hold: there it is by the time that
// they hold those, and takes no registers meanwhile.
enum class Beside : std::uint8_t { none, masks, biases };

struct Plan {
  Regime regime = Regime::warp;
  bool staged = false;    // warp: rows go through shared memory, in words, or, where rows are smaller, in vectors;
                          // cluster: rows stay there; strided: tiles lie there, or else threads hold columns
  bool ragged = false;    // rows begin or end within a vector; warp, staged: lanes have an element beyond their items;
                          // strided: vectors of columns begin elsewhere in each row
  bool together = false;  // rows follow each other that share a mask or a bias, so that caches have it: see
                          // rows_in_order()
  bool scales = false;    // the scale, which is all that is fused, is a factor that kernels have beside what they do
                          // where nothing is: see without_scale()
  bool meets = false;     // split; strided, read twice: all blocks run at once, meet between the passes, and keep
                          // meanwhile what registers and shared_bytes have room for
  bool slabs = false;     // strided, staged: whole slabs of dim × columns lie there, whose columns threads hold
  bool sectors = false;   // strided, read twice: columns are folded so that segments begin on sectors
  Beside beside = Beside::none;  // strided, columns: lies in shared_bytes
  int log2_dim = 0;              // warp, not staged: of the row, rounded up to a power of two, but at most 11
  int vector = 1;                // elements moved by one access; strided: columns that a thread works on at once
  int items = 1;                 // accesses a thread holds in registers; cluster, strided: and in shared_bytes, if any
  int shared_items = 0;          // strided: of these, those that it has in shared_bytes
  int threads_per_row =
      1;  // warp: lanes; block: threads; cluster: threads of all its blocks; strided: along dim, also of all
  int rows_per_block = 1;   // strided: columns
  int block = 1;            // threads
  int cluster = 1;          // blocks
  std::int64_t grid = 1;    // blocks; a launch takes at most kMaxGrid of them, the rest follows in further launches
  std::int64_t splits = 1;  // parts that one row is cut into (split; online in clusters; strided with few columns)
  int run = 1;              // strided: neighbouring threads that take neighbouring columns; staged: rows from one
                            // team to the next; cluster, staged: vectors of a row that a block has room for;
                            // online, split: turns of a block's loop whose vectors it keeps in shared_bytes
  int shared_bytes = 0;     // dynamic shared memory of a block
  std::int64_t workspace_bytes = 0;
  int passes = 1;       // how often each source element is read at most
  int interleaved = 1;  // cluster, split: columns whose elements take turns in a row of memory, taken for one
  std::string_view why;

  friend bool operator==(const Plan&, const Plan&) = default;
};

// Total: every Problem that make_problem returns has a plan on every device. `forced` asks for a regime and throws
// std::invalid_argument, saying why, where the problem or the device does not permit it.
Plan plan(const Problem& problem, const Device& device, std::optional<Regime> forced = std::nullopt);

std::string to_string(const Plan& plan);

}  // namespace ndsoftmax
