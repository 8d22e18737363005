// Every CUDA kernel, run by the emulator: every regime that takes a problem, rows that start anywhere, strides of all
// kinds.
#include "cuda/launch.hpp"
#include "problems.hpp"

using namespace ndsoftmax;

namespace emulator {
extern unsigned most_at_once;  // see its cuda_runtime.h
int& kernels_compiled();
}  // namespace emulator

int main() {
  Device device;
  device.kind = Device::Kind::cuda;
  device.compute_capability = 90;
  device.multiprocessors = 4;  // so that small problems have many rows, and large ones few
  device.shared_bytes_per_block = 227 << 10;
  Device small = device;
  small.multiprocessors = 1;
  small.l2_bytes = 50 << 20;                 // so that blocks need not meet
  small.shared_bytes_per_block = 100 << 10;  // not enough to keep what is read twice
  Device blackwell = device;                 // smaller clusters, less shared memory
  blackwell.compute_capability = 120;
  blackwell.shared_bytes_per_block = 99 << 10;
  Device ampere = device;  // no clusters, little shared memory
  ampere.compute_capability = 86;
  ampere.shared_bytes_per_block = 99 << 10;
  Device old = device;  // nothing that takes asynchronous copies either
  old.compute_capability = 75;
  old.shared_bytes_per_block = 64 << 10;

  const std::vector<testing::Case> cases{
      // the last dimension, in every width of the warp regime, aligned and not
      {{9, 1}, {}, {1}},
      {{300, 2}, {}, {1}},
      {{67, 3}, {}, {1}},
      {{1000, 4}, {}, {1}},
      {{700, 5}, {}, {1}},
      {{333, 6}, {}, {1}},
      {{515, 7}, {}, {1}},
      {{33, 8}, {}, {1}},
      {{301, 9}, {}, {1}},
      {{70, 16}, {}, {1}},
      {{130, 21}, {}, {1}},
      {{40, 32}, {}, {1}},
      {{37, 50}, {}, {1}},
      {{40, 64}, {}, {1}},
      {{40, 66}, {}, {1}},
      {{19, 77}, {}, {1}},
      {{50, 96}, {}, {1}},
      {{33, 128}, {}, {1}},
      {{9, 197}, {}, {1}},
      {{9, 256}, {}, {1}},
      {{9, 257}, {}, {1}},
      {{6, 512}, {}, {1}},
      {{9, 300}, {}, {1}},
      {{7, 520}, {}, {1}},
      {{5, 577}, {}, {1}},
      {{5, 774}, {}, {1}},
      {{5, 1000}, {}, {1}},
      {{5, 1023}, {}, {1}},
      {{5, 1024}, {}, {1}},
      // so many of them that they are staged
      {{2200, 3}, {}, {1}},
      {{150, 50}, {}, {1}},
      {{140, 77}, {}, {1}},
      {{70, 197}, {}, {1}},
      {{35, 257}, {}, {1}},
      {{34, 577}, {}, {1}},
      // wider
      {{3, 1025}, {}, {1}},
      {{6, 2048}, {}, {1}},
      {{5, 2297}, {}, {1}},
      {{6, 2304}, {}, {1}},
      {{2, 4099}, {}, {1}},
      {{5, 8192}, {}, {1}},
      {{1, 20001}, {}, {1}},
      {{1, 40000}, {}, {1}},
      // so wide that backward's next row arrives in shared memory while one is computed, or, of float32, some of it;
      // and that clusters share rows which are read twice
      {{4, 300001}, {}, {1}, 1},
      // rows that begin anywhere, alone and with gaps
      {{7, 64}, {}, {1}, 1},
      {{5, 100}, {}, {1}, 3},
      {{3, 2000}, {}, {1}, 5},
      {{4, 300}, {307, 1}, {1}, 2},
      {{3, 40, 100}, {9000, 200, 1}, {2}},
      {{2, 3, 5, 24}, {360, 24, 72, 1}, {3}},
      {{2, 3, 40, 37}, {}, {3}},
      {{2, 2, 50, 64}, {}, {3}},
      {{2, 60, 128}, {7680, 1, 60}, {2}},
      // other dimensions
      {{2, 19, 64}, {}, {1}},
      {{3, 19, 50}, {}, {1}},
      {{2, 80, 100}, {}, {1}},
      {{2, 300, 14}, {}, {1}},
      {{2, 1024, 8}, {}, {1}},
      {{1, 5000, 3}, {}, {1}},
      {{1, 2500, 64}, {}, {1}},
      {{50, 2}, {}, {0}},
      {{700, 33}, {}, {0}},
      {{100, 256}, {}, {0}},
      {{2, 64, 511}, {}, {1}},
      {{4, 2, 49}, {}, {1}},
      {{2, 100, 4}, {}, {1}, 1},
      // strips of one, of few and of many columns: as runs that follow each other or not, as rows, as elements
      {{60, 19, 3}, {}, {1}},
      {{60, 19, 3}, {}, {1}, 3},
      {{150, 3, 5}, {}, {1}, 1},
      {{40, 10, 8}, {160, 8, 1}, {1}},
      {{40, 10, 6}, {160, 6, 1}, {1}},
      {{9, 30, 16}, {600, 20, 1}, {1}},
      {{9, 30, 24}, {811, 27, 1}, {1}},
      {{3, 512, 49}, {}, {1}},
      // strips that stay whole, and fold where vectors divide dim times their columns; over a cluster if it is long
      {{9, 8, 10}, {}, {1}},
      {{41, 64, 6}, {}, {1}},
      {{3, 72, 511}, {}, {1}},
      {{1, 20000, 2}, {}, {1}},
      {{5, 700, 5}, {}, {1}},
      {{5, 701, 5}, {}, {1}},
      {{3, 700, 7}, {}, {1}, 1},
      {{2, 4096, 3}, {}, {1}},
      {{3, 2050, 9}, {}, {1}},
      {{2, 1026, 49}, {}, {1}},
      {{2, 520, 196}, {}, {1}},
      // the same of slabs that begin and end within vectors, also of columns that vectors divide
      {{41, 101, 33}, {}, {1}},
      {{30, 121, 3}, {}, {1}, 1},
      {{7, 203, 9}, {1900, 9, 1}, {1}, 3},
      {{3, 3001, 21}, {}, {1}, 5},
      {{9, 120, 24}, {}, {1}, 1},
      {{3, 70, 511}, {}, {1}},
      {{3, 70, 511}, {}, {1}, 1},
      {{1, 3, 3000}, {}, {1}},
      {{1, 3, 3001}, {}, {1}, 1},
      {{3, 10, 2, 5, 4}, {}, {2}},
      {{2, 3, 4, 3, 2, 5}, {}, {2}},
      {{2, 3, 4, 3, 2, 6}, {6, 12, 36, 144, 432, 1}, {3}},
      // vectors of columns in registers: in one thread, in lanes, in warps, in blocks; in strips of few and of many,
      // more than a block has and fewer; results and gradients elsewhere
      {{3, 1, 64}, {}, {1}},
      {{2, 3, 2048}, {}, {1}},
      {{2, 19, 1032}, {}, {1}},
      {{5, 10, 200}, {}, {1}},
      {{7, 21, 8}, {}, {1}},
      {{2, 41, 264}, {}, {1}},
      {{9, 150, 32}, {}, {1}},
      {{20, 300, 16}, {}, {1}},
      {{3, 512, 72}, {}, {1}},
      {{9, 1024, 8}, {}, {1}},
      {{2, 1025, 40}, {}, {1}},
      {{2, 30, 128}, {8192, 256, 1}, {1}},
      {{40, 3, 64}, {64, 2560, 1}, {1}},
      {{3000, 80}, {}, {0}},
      {{9000, 72}, {}, {0}},
      {{2, 9000, 8}, {}, {1}},
      // of 16 bits that 8 bytes divide, halves of vectors: in tiles that overlap, over clusters, in whole strips, with
      // gaps
      {{2, 40, 204}, {}, {1}},
      {{2, 700, 100}, {}, {1}, 2},
      {{5, 300, 36}, {}, {1}, 2},
      {{3, 50, 132}, {8000, 140, 1}, {1}},
      // words of columns, in tiles that overlap by a sector: of one column and of two, in one thread and in more, in
      // strips of any phase and with gaps
      {{2, 19, 501}, {}, {1}},
      {{3, 40, 131}, {}, {1}, 1},
      {{2, 100, 770}, {}, {1}},
      {{4, 33, 203}, {8000, 211, 1}, {1}, 3},
      {{3, 25, 302}, {9000, 330, 1}, {1}, 2},
      {{2, 25, 264}, {}, {1}, 2},
      {{600, 203}, {}, {0}},
      {{3000, 131}, {}, {0}, 1},
      {{30, 3, 301}, {304, 10000, 1}, {1}},
      // the same of few elements of dim
      {{3, 2, 1010}, {}, {1}},
      {{5, 4, 531}, {}, {1}},
      {{2, 8, 642}, {}, {1}, 2},
      {{4, 5, 300}, {1600, 310, 1}, {1}},
      // short strips, with more threads along dim
      {{70, 20, 2}, {}, {1}},
      {{40, 31, 5}, {}, {1}},
      {{50, 8, 4}, {}, {1}, 2},
      // of 16 bits so short that threads hold all of it, a column each, whatever the strip
      {{58, 3, 11}, {}, {1}},
      {{300, 4, 7}, {}, {1}, 1},
      {{40, 16, 31}, {}, {1}, 3},
      {{2, 5}, {}, {0}},
      // and of more, as elements are few, by several threads: of a warp, of several, over clusters
      {{2, 70, 5}, {}, {1}},
      {{36, 101, 5}, {}, {1}, 1},
      {{3, 200, 31}, {}, {1}},
      {{2, 20, 77}, {}, {1}, 1},
      {{4, 60, 131}, {}, {1}},
      {{1, 9001, 3}, {}, {1}, 1},
      {{2, 1500, 33}, {}, {1}, 5},
      // of 16 bits in rows that begin within words, too: strips that stay whole, one and several, or not; with gaps
      {{3, 30, 65}, {}, {1}},
      {{4, 197, 197}, {}, {1}},
      {{2, 21, 513}, {}, {1}},
      {{3, 7, 999}, {}, {1}, 4},
      {{2, 2, 5011}, {}, {1}},
      {{3, 8, 777}, {}, {1}, 1},
      {{40, 3, 65}, {}, {1}},
      {{3, 13, 333}, {}, {1}, 1},
      {{3, 7, 99}, {}, {1}},
      {{2, 2050, 65}, {}, {1}},
      {{20, 3, 33}, {}, {1}},
      // ends of strips within words, of rows that begin on sectors
      {{3, 33, 301}, {33 * 304, 304, 1}, {1}},
      {{2, 2, 5011}, {2 * 5024, 5024, 1}, {1}},
      {{2, 700, 301}, {700 * 304, 304, 1}, {1}},
      {{2, 700, 301}, {}, {1}},
      {{3, 33, 402}, {14000, 407, 1}, {1}, 2},
      {{3, 33, 130}, {4800, 141, 1}, {1}},
      {{4100, 333}, {}, {0}},
      // dim over the blocks of a cluster
      {{1, 9000, 2}, {}, {1}},
      {{5000, 40}, {}, {0}},
      {{4100, 33}, {}, {0}, 1},
      // steps, permutations, broadcasts, several dimensions at once
      {{5, 40}, {80, 2}, {1}},
      {{6, 30}, {1, 6}, {1}},
      {{4, 50}, {0, 1}, {1}},
      {{4, 50}, {1, 0}, {1}},
      {{3, 4, 5}, {}, {0, 2}},
      {{3, 4, 5, 6}, {}, {1, 3}},
      {{2, 3, 4, 5, 6}, {360, 1, 90, 18, 3}, {1}},
      {{2, 700, 3}, {4200, 6, 2}, {1, 2}},
      {{1}, {}, {0}},
      {{1, 1, 7}, {}, {1}},
      // two passes over columns, with many of them
      {{2100, 128}, {}, {0}},
      // far below the maximum
      {{3, 900}, {}, {1}, 0, true},
      {{2, 4096}, {}, {1}, 0, true},
      {{1, 20001}, {}, {1}, 0, true},
      {{2, 700, 8}, {}, {1}, 0, true},
      {{3000, 6}, {}, {0}, 0, true},
  };
  const auto launch = [&](const Problem& problem, const Plan& plan, const Device& on, const Addresses& addresses) {
    std::vector<std::max_align_t> workspace(static_cast<std::size_t>(plan.workspace_bytes) / sizeof(std::max_align_t) +
                                            1);
    std::memset(workspace.data(), 0xff, workspace.size() * sizeof(workspace[0]));  // NaN: what is read has been written
    emulator::most_at_once = testing::one_in(3) ? 0 : 64;  // others may have a GPU's multiprocessors
    cuda::launch(problem, plan, on, addresses, workspace.data(), nullptr);
  };
  auto runs = testing::run(cases, {device, small, blackwell, ampere, old}, 5, launch);
  CHECK(runs["total"] > 2400);
  CHECK(runs["strided, twice, meeting"] > 10);
  // rows whose blocks meet: of steps that are kept and that are read again, with ends within vectors and without
  Device meeting = ampere;
  meeting.shared_bytes_per_block = 100 << 10;
  runs = testing::run({{{1, 90003}, {}, {1}, 1}, {{2, 40000}, {40008, 1}, {1}, 3}, {{2, 30001}, {}, {1}, 0, true}},
                      {meeting}, 1000, launch, [](const Plan& plan) { return plan.meets; });
  CHECK(runs["split, meeting"] > 8);
  // where there are more blocks than whole steps, of rows and of columns: some have nothing, or only the end
  Device idle = meeting;
  idle.multiprocessors = 12;
  runs = testing::run({{{1, 90003}, {}, {1}, 1}, {{1, 5003, 64}, {}, {1}}, {{1, 7001, 24}, {}, {1}, 4}}, {idle}, 1000,
                      launch, [](const Plan& plan) { return plan.meets; });
  CHECK(runs["split, meeting"] > 3);
  CHECK(runs["strided, twice, meeting"] > 3);
  // rows that are long for the clusters of a GPU with one multiprocessor, in every regime: read twice, and kept
  Device roomy = small;
  roomy.shared_bytes_per_block = 227 << 10;
  const std::vector<testing::Case> wide{{{4, 30016}, {}, {1}},
                                        {{5, 30011}, {}, {1}, 1},
                                        {{4, 60003}, {60008, 1}, {1}, 3},
                                        {{4, 30000}, {}, {1}, 0, true}};
  runs = testing::run(wide, {small, roomy}, 1, launch);
  CHECK(runs["online, clusters"] > 30);
  CHECK(runs["online, clusters, fused"] > 30);
  // and for the registers and the shared memory of clusters, which read the rest twice
  runs = testing::run({{{4, 900003}, {}, {1}}, {{4, 700000}, {700008, 1}, {1}, 1}}, {blackwell}, 1000, launch);
  CHECK(runs["cluster, clusters, twice"] >= 10);
  // and backward for shared memory alone, of which the rest is read twice, beginning and ending anywhere
  runs = testing::run({{{3, 140003}, {}, {1}, 1},
                       {{3, 135001}, {135003, 1}, {1}},
                       {{3, 280005}, {}, {1}, 3},
                       {{3, 70001, 2}, {}, {1}, 2},
                       {{3, 140003, 2}, {}, {1}, 6},
                       {{3, 140000, 2}, {280016, 2, 1}, {1}, 1}},
                      {blackwell}, 1000, launch,
                      [](const Plan& plan) { return plan.staged && plan.regime == Regime::cluster; });
  CHECK(runs["cluster, clusters, twice"] >= 5);
  CHECK(runs["cluster, clusters, twice, interleaved"] >= 2);
  // or have all of a row there, what shared memory has first: clusters of sixteen blocks and, of 16 bits, of eight
  runs = testing::run({{{4, 250001}, {}, {1}, 1}, {{12, 200001}, {}, {1}, 3}, {{4, 500000}, {500008, 1}, {1}}},
                      {device}, 1000, launch,
                      [](const Plan& plan) { return !plan.staged && plan.shared_bytes > 0 && shares_first(plan); });
  CHECK(runs["cluster, clusters"] >= 10);
  // two columns that take turns in a row, of slabs with gaps between them and without, that begin anywhere within
  // vectors
  runs = testing::run({{{2, 9001, 2}, {}, {1}, 2},
                       {{3, 8002, 2}, {16010, 2, 1}, {1}},
                       {{2, 100003, 2}, {}, {1}, 6},
                       {{2, 2, 6000, 2}, {}, {2}, 0, true},
                       {{5, 1201, 2}, {}, {1}, 4},
                       {{3, 2003, 2}, {4014, 2, 1}, {1}, 2, true}},
                      {device, small, blackwell}, 1, launch);
  CHECK(runs["cluster, clusters, interleaved"] > 20);
  CHECK(runs["split, interleaved"] > 20);
  // columns that are long for the shared memory of a block, and fold into vectors, of slabs that begin anywhere
  const std::vector<testing::Case> long_columns{
      {{2, 9000, 33}, {}, {1}},     {{1, 9001, 7}, {}, {1}, 3},       {{2, 13000, 2}, {26003, 2, 1}, {1}, 1},
      {{2, 7000, 8}, {}, {1}, 1},   {{3, 8000, 21}, {}, {1}, 5},      {{1, 20001, 1, 3}, {}, {1}},
      {{2, 4001, 300}, {}, {1}, 7}, {{1, 4000, 3}, {}, {1}, 2, true}, {{2, 6007, 16}, {}, {1}},
      {{1, 9005, 64}, {}, {1}},     {{4500, 128}, {}, {0}},           {{1, 4800, 3, 24}, {}, {1}},
      {{1, 4501, 148}, {}, {1}},    {{1, 4003, 260}, {}, {1}, 4},     {{5, 9001, 11}, {}, {1}, 2},
      {{1, 9003, 13}, {}, {1}, 2},  {{3, 7001, 5}, {}, {1}}};
  runs = testing::run(long_columns, {ampere}, 5, launch);
  CHECK(runs["strided, folded, twice"] + runs["strided, folded, twice, on sectors"] > 40);
  CHECK(runs["strided, folded, twice, meeting"] > 30);
  Device wider = ampere;  // to which a few slabs are a tile each
  wider.multiprocessors = 48;
  runs = testing::run({{{1, 9001, 7}, {}, {1}, 3},
                       {{2, 7000, 21}, {}, {1}, 5},
                       {{3, 5003, 9}, {}, {1}},
                       {{2, 9000, 3}, {27002, 3, 1}, {1}, 1, true}},
                      {wider}, 1000, launch,
                      [](const Plan& plan) { return plan.rows_per_block < plan.run * plan.vector; });
  CHECK(runs["total"] == runs["strided, folded, twice"] + runs["strided, folded, twice, meeting"]);
  CHECK(runs["strided, folded, twice, meeting"] > 3);
  Device few = ampere;  // which those of one wave fill with segments on sectors
  few.multiprocessors = 8;
  few.shared_bytes_per_block = 160 << 10;
  // slabs that begin within sectors, as gradients do elsewhere, on either half, and leave no room beyond the last
  runs = testing::run({{{3, 2592, 41}, {}, {1}, 4},
                       {{3, 2320, 38}, {}, {1}, 8, false, 8},
                       {{3, 2592, 41}, {}, {1}, 15, true, 16},
                       {{3, 2320, 38}, {88168, 38, 1}, {1}, 4, false, 4},
                       {{3, 3943, 19}, {}, {1}, 1},
                       {{3, 2777, 38}, {105800, 38, 1}, {1}, 1, true}},
                      {few}, 1000, launch, [](const Plan& plan) { return plan.sectors; });
  CHECK(runs["total"] > 25);
  CHECK(runs["strided, folded, twice, on sectors, meeting"] > 20);
  // and for the registers of clusters
  CHECK(testing::run({{{1, 20001, 9}, {}, {1}}}, {small}, 5, launch)["total"] > 3);
  // halves of vectors, of which threads have a part in shared memory: alone and over clusters, in whole strips and in
  // tiles that overlap, of items that fill their slots and that do not, with gaps
  Device patient = small;  // to which few blocks are many waves
  patient.shared_bytes_per_block = 227 << 10;
  const std::vector<testing::Case> shared{{{24, 900, 20}, {}, {1}},           {{12, 1999, 24}, {}, {1}, 4},
                                          {{6, 3000, 32}, {}, {1}},           {{2, 801, 260}, {}, {1}},
                                          {{3, 400, 256}, {}, {1}},           {{3000, 256}, {3080, 1}, {0}},
                                          {{2, 3001, 128}, {}, {1}, 8, true}, {{2, 2, 999, 132}, {}, {2}, 0, true}};
  runs = testing::run(shared, {patient}, 30, launch, [](const Plan& plan) { return plan.shared_items > 0; });
  CHECK(runs["total"] > 10 && runs["strided, clusters"] > 5);
  // columns so many that vectors of them are staggered, with gaps between rows and slabs and without
  const std::vector<testing::Case> staggered{{{2, 3, 9001}, {}, {1}},
                                             {{5, 2, 9002}, {}, {1}},
                                             {{5, 2, 9001}, {2 * 9004 + 1, 9003, 1}, {1}},
                                             {{4, 3, 9002}, {3 * 9006, 9006, 1}, {1}},
                                             {{5, 4, 9003}, {}, {1}},
                                             {{2, 8, 8279}, {8 * 8283, 8283, 1}, {1}},
                                             {{6, 10, 2514}, {}, {1}},
                                             {{5, 12, 2635}, {12 * 2641 + 5, 2641, 1}, {1}},
                                             {{3, 16, 4793}, {}, {1}, 0, true},
                                             {{4, 20, 2997}, {}, {1}},
                                             {{2, 21, 7078}, {}, {1}},
                                             {{5, 27, 2277}, {27 * 2281 + 4, 2281, 1}, {1}}};
  runs = testing::run(staggered, {small}, 1000, launch, staggers_columns);
  CHECK(runs["total"] == runs["strided, staggered"] && runs["total"] > 15);
  // columns so many that threads have several: vectors, words, single ones, and such of more elements than the smallest
  // kernels hold
  const auto has_several = [](const Plan& plan) {
    return holds_columns(plan) && plan.rows_per_block > tuning::kColumnsBlock * plan.vector;
  };
  const auto several = [&](const testing::Case& columns) {
    return testing::run({columns}, {device}, 1000, launch, has_several)["total"];
  };
  CHECK(several({{8, 3, 131104}, {}, {1}}) >= 7);
  CHECK(several({{8, 2, 131104}, {}, {1}}) >= 16);
  CHECK(several({{8, 2, 40002}, {}, {1}}) >= 8);
  CHECK(several({{4, 2, 40001}, {}, {1}, 1}) >= 8);
  CHECK(several({{8, 9, 131201}, {}, {1}}) >= 6);
  CHECK(several({{8, 6, 131203}, {}, {1}, 1}) >= 9);
  // rows smaller than a vector that are many: also with results of another type
  runs = testing::run({{{16500, 3}, {}, {1}}, {{17001, 7}, {}, {1}}, {{16384, 1}, {}, {1}}, {{16389, 6}, {}, {1}}},
                      {small}, 1000, launch, [](const Plan& plan) { return plan.staged && plan.vector > 2; });
  CHECK(runs["total"] >= 28);
  // masks alone, which are read in ways of their own: of so few shapes, each time with another mask and scale
  const std::vector<testing::Case> masked{{{2, 19, 72}, {}, {1}},  {{5, 11, 136}, {}, {1}}, {{80, 70}, {}, {1}},
                                          {{2, 3, 2048}, {}, {2}}, {{30, 2, 257}, {}, {2}}, {{2, 2, 9000}, {}, {2}}};
  CHECK(testing::run(masked, {device}, 25, launch)["total"] > 100);
  CHECK(testing::run({{{24, 8192}, {}, {1}}}, {device}, 5, launch)["total"] > 3);
  // and biases, of rows with few and many lanes, beginning anywhere; forward, the kernels that know nothing else
  std::vector<testing::Case> biased;
  for (const std::int64_t dim : {5, 13, 30, 32, 49, 56, 63, 64, 72, 97, 121, 128, 144, 197, 200, 257, 321, 385, 577})
    biased.push_back({{4, 3, 7 + 1000 / dim, dim}, {}, {3}, dim % 3 == 0 ? 0 : 3, false, 0, true});
  CHECK(testing::run(biased, {small, device}, 1000, launch)["warp, fused"] > 150);
  // beside rows that begin anywhere, as masks do: of blocks and clusters
  const auto ragged = [](const Plan& plan) { return plan.ragged && plan.block > tuning::kWarp; };
  const std::vector<testing::Case> anywhere{{{3, 2, 1051}, {}, {2}},
                                            {{2, 3, 2307}, {}, {2}, 1},
                                            {{2, 2, 5000}, {2 * 5003, 5003, 1}, {2}},
                                            {{2, 2, 9001}, {}, {2}, 3}};
  runs = testing::run(anywhere, {device}, 25, launch, ragged);
  CHECK(runs["block, fused"] > 20);
  CHECK(runs["cluster, clusters, fused"] > 5);
  // and columns, of which some of outer have the same masks: as vectors, words and single ones, of one thread each, of
  // several, and of clusters
  const std::vector<testing::Case> held{{{3, 2, 19, 72}, {}, {2}},  {{2, 3, 19, 70}, {}, {2}},
                                        {{2, 3, 40, 45}, {}, {2}},  {{3, 2, 300, 34}, {}, {2}},
                                        {{2, 2, 700, 33}, {}, {2}}, {{2, 2, 600, 24}, {}, {2}}};
  runs = testing::run(held, {device}, 25, launch, holds_columns);
  CHECK(runs["strided, fused"] > 20);
  CHECK(runs["strided, clusters, fused"] > 10);
  // and whose biases, which lie beside what is held, if they have vectors, too
  std::vector<testing::Case> beside;
  for (const testing::Case& columns : held)
    for (const std::int64_t offset : {0, 1, 8}) {
      beside.push_back(columns);
      beside.back().offset = offset;
      beside.back().biased = true;
    }
  runs = testing::run(beside, {device, ampere}, 25, launch, holds_columns);
  CHECK(runs["strided, beside, fused"] >= 16);
  CHECK(runs["strided, clusters, beside, fused"] >= 5);
  // so many rows that those who have masks in registers have several, with other masks or the same
  const std::vector<testing::Case> turns{
      {{600, 257}, {}, {1}}, {{5, 120, 257}, {}, {2}}, {{2100, 33}, {}, {1}}, {{3, 170, 198}, {}, {2}}};
  CHECK(testing::run(turns, {small}, 5, launch)["warp, fused"] > 10);
  CHECK_EQUAL(emulator::kernels_compiled(), 1297);  // more of them take longer to compile: is it worth it?
  return summary();
}
