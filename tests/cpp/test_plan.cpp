// Plans of described GPUs: the regimes where they belong, every element written exactly once, forcing and refusing.
#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "host/cuda_plan.hpp"
#include "host/work.hpp"

using namespace ndsoftmax;

namespace {

Device gpu(int compute_capability) {
  Device device;
  device.kind = Device::Kind::cuda;
  device.compute_capability = compute_capability;
  device.multiprocessors = 132;
  device.shared_bytes_per_block = 64 << 10;
  return device;
}

// gap: between slabs of dim × inner, without which small ones have plans of their own.
Problem problem(std::int64_t outer, std::int64_t dim, std::int64_t inner, DType dtype = DType::float32,
                bool backward = false, std::int64_t gap = 0) {
  const std::vector<std::int64_t> sizes{outer, dim, inner}, strides{dim * inner + gap, inner, 1}, dims{1};
  const TensorView view{nullptr, dtype, 3, sizes.data(), strides.data()};
  return make_problem(Operation::softmax, view, backward ? &view : nullptr, view, dims);
}
Problem problem_apart(std::int64_t outer, std::int64_t dim, std::int64_t inner, DType dtype = DType::float32,
                      bool backward = false) {
  return problem(outer, dim, inner, dtype, backward, 16);
}

Regime regime(const Problem& problem, int compute_capability) { return plan(problem, gpu(compute_capability)).regime; }

// What work::sectors_written() says of one phase, in bytes.
bool writes_sector(int column, int inner, int bytes, int phase, int step) {
  const int before = std::min(phase, inner * bytes);
  return column - before >= 0 && column - before < step;
}

// Of rows of `inner` vectors of so many bytes that begin `phase` into a sector, each `drift` further than the one
// before: whether tiles that overlap by a sector, or by a vector, write each vector once, and none a part of a sector
// that another has, too.
bool write_whole_sectors(int bytes, int overlap, int step, int inner, int phase, int drift, int rows) {
  constexpr int kSector = tuning::kSectorBytes;
  const int width = step + overlap, tiles = (rows * inner + step - 1) / step;
  std::vector<int> writer(static_cast<std::size_t>(rows * inner), -1);
  const auto phase_of = [&](int row, int i) { return (phase + row * drift + i * bytes) % kSector; };
  for (int column = -1; column < width; ++column)
    for (int i = 0; i < inner; ++i)
      for (int at = 0; at < kSector; at += bytes)
        if ((work::sectors_written(column, i, kSector / bytes, step) >> at / bytes & 1) !=
            writes_sector(column * bytes, i, bytes, at, step * bytes))
          return false;
  for (int tile = 0; tile < tiles; ++tile)
    for (int column = 0; column < width; ++column) {
      const int vector = tile * step + column, row = vector / inner, i = vector % inner;
      if (row >= rows || !writes_sector(column * bytes, i, bytes, phase_of(row, i), step * bytes)) continue;
      int& by = writer[static_cast<std::size_t>(vector)];
      if (by != -1) return false;
      by = tile;
    }
  for (int vector = 0; vector < rows * inner; ++vector) {
    const auto v = static_cast<std::size_t>(vector);
    if (writer[v] == -1) return false;
    const int i = vector % inner;
    if (i > 0 && phase_of(vector / inner, i) > 0 && writer[v] != writer[v - 1]) return false;
  }
  return true;
}

// `heads` times q x k, all with one mask of q x k (or, for a bias, of float32).
Problem masked(std::int64_t heads, std::int64_t q, std::int64_t k, bool with_bias = false, void* mask = nullptr) {
  const std::vector<std::int64_t> sizes{heads, q, k}, strides{q * k, k, 1}, shared{q, k}, rows{k, 1}, last{2};
  const TensorView view{nullptr, DType::float32, 3, sizes.data(), strides.data()};
  const TensorView fused{mask, DType::float32, 2, shared.data(), rows.data()};
  Fusion fusion;
  (with_bias ? fusion.bias : fusion.mask) = &fused;
  return make_problem(Operation::softmax, view, nullptr, view, last, fusion);
}

// Whether the kernel that a plan of columns runs has room for what it is to hold, and for its threads.
bool has_room(const Problem& problem, const Plan& plan) {
  if (plan.regime != Regime::strided || !holds_columns(plan)) return true;
  const int bytes = plan.vector * size_of(problem.source), operands = problem.has(kGrad) ? 2 : 1;
  const ColumnsLayout layout = columns_layout(problem, plan);
  if (layout.kernel >= tuning::columns_kernels(bytes, size_of(problem.source), size_of(problem.result),
                                               problem.direction, problem.fused.any))
    return false;
  const tuning::ColumnsKernel& kernel = tuning::columns_kernel(bytes, layout.kernel);
  return plan.block <= kernel.max_block && plan.items * operands <= kernel.vectors &&
         (layout.turns > 1 || layout.width % plan.run == 0) && layout.width * layout.along <= plan.block;
}

bool covers(const Problem& problem, const Plan& plan) {
  if (!has_room(problem, plan)) return false;
  const auto counts = coverage(problem, plan);
  return std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; });
}

}  // namespace

int main() {
  const std::int64_t many = 1 << 14;
  CHECK(regime(problem(many, 1, 1), 90) == Regime::warp);
  CHECK(regime(problem(many, 1024, 1), 90) == Regime::warp);
  CHECK(regime(problem(many, 1025, 1), 90) == Regime::block);
  CHECK(regime(problem(many, 50000, 1), 90) == Regime::cluster);
  CHECK(regime(problem(many, 50000, 1), 80) == Regime::online);
  CHECK(regime(problem(many, 10 << 20, 1), 90) == Regime::online);
  CHECK(regime(problem(1, 10 << 20, 1), 90) == Regime::split);
  CHECK(regime(problem(1, 10 << 20, 1), 80) == Regime::split);
  CHECK(regime(problem(8, 19, 4096), 90) == Regime::strided);

  for (const std::int64_t dim : {1, 3, 21, 197, 700, 1024, 1025, 5000, 40001})
    for (const std::int64_t inner : {1, 3, 49, 64})
      for (const DType dtype : {DType::float16, DType::float32, DType::float64}) {
        const Problem here = problem(5, dim, inner, dtype);
        for (const int compute_capability : {75, 80, 90}) CHECK(covers(here, plan(here, gpu(compute_capability))));
        for (const Regime forced : {Regime::online, Regime::split})
          if (inner == 1) CHECK(covers(here, plan(here, gpu(90), forced)));
        CHECK(covers(here, plan(here, gpu(90), Regime::strided)));
      }

  // columns that no vectors divide: words in tiles that overlap, or, where those do not fit, folded ones
  for (const auto& [bytes, overlap] :
       {std::pair{2, 16}, {4, 8}, {8, 4}, {8, 3}, {16, 1}})  // 8: float32 of words; halves
    for (const int step : {7, 15, 16, 48, 56, 120})
      for (const int inner : {1, 7, 55, 56, 131})
        for (int phase = 0; phase < tuning::kSectorBytes; phase += bytes)
          for (int drift = 0; drift < tuning::kSectorBytes; drift += bytes)
            CHECK(write_whole_sectors(bytes, overlap, step, inner, phase, drift, 5));
  for (const std::int64_t dim : {2, 40, 700})
    for (const std::int64_t inner : {131, 257, 1001}) {
      const Plan words = plan(problem(3, dim, inner), gpu(90));
      CHECK(!words.staged && words.vector == 1 && words.passes == 1);
      CHECK(covers(problem(3, dim, inner), words));
      const Problem halves = problem(3, dim, inner, DType::float16);
      CHECK(covers(halves, plan(halves, gpu(90))));
    }
  // halves of vectors of 16 bits in tiles that overlap, though not in place, where bits are to be the same; and columns
  // that are vectors, held by many threads
  for (const DType dtype : {DType::float16, DType::float32})
    for (const auto& [backward, compute_capability, kibibytes] : {std::tuple{false, 90, 227},
                                                                  {true, 90, 227},
                                                                  {false, 80, 163},
                                                                  {true, 86, 99},
                                                                  {false, 120, 99},
                                                                  {true, 90, 48}})
      for (const std::int64_t dim : {33, 40, 300, 2051})
        for (const std::int64_t inner : {36, 100, 204, 1004}) {
          Device device = gpu(compute_capability);
          device.shared_bytes_per_block = kibibytes << 10;
          device.multiprocessors = dim < 300 ? 3 : 132;  // of which many waves make many threads worth it
          const Problem apart = problem(dim == 300 ? 40 : 5, dim, inner, dtype, backward);
          Problem in_place = apart;
          in_place.in_place = true;
          const Plan halves = plan(apart, device), same = plan(in_place, device);
          CHECK(covers(apart, halves) && covers(in_place, same));
          CHECK(halves.shared_bytes <= device.shared_bytes_per_block);
          Plan but_for_the_grid = same;
          but_for_the_grid.grid = halves.grid;
          if (halves.passes == 1) CHECK(but_for_the_grid == halves);
          const bool few = dtype == DType::float16 && !backward && inner == 100 && dim < 300;  // words
          if (compute_capability == 90 && inner >= 100 && dim <= 300)
            CHECK(halves.vector == (few ? 2 : 4) && halves.passes == 1);
        }
  // costs grow with waves and with bytes, and no more of larger clusters find room at once
  for (int eighths = 1; eighths < 64; ++eighths)
    for (int bytes = 16; bytes <= 512; bytes += 16) {
      const double waves = eighths / 8.0, cost = tuning::columns_cost(waves, bytes);
      CHECK(cost > 0 && cost <= tuning::columns_cost(waves + 0.125, bytes));
      CHECK(cost < tuning::columns_cost(waves, bytes + 16));
    }
  for (const int multiprocessors : {1, 16, 78, 114, 132, 148})
    for (const int blocks : {1, 2, 3, 7})
      for (int cluster = 1; cluster < 16; ++cluster)
        CHECK(tuning::clusters_at_once(multiprocessors, cluster, blocks) >=
              tuning::clusters_at_once(multiprocessors, cluster + 1, blocks));
  // few columns, which go to more blocks, as many in place, where tiles do not overlap
  for (const bool backward : {false, true})
    for (const int compute_capability : {80, 90})
      for (const std::int64_t outer : {1, 3, 12, 40})
        for (const std::int64_t dim : {171, 216, 425, 944, 1187})
          for (const std::int64_t inner : {12, 17, 36, 131, 166, 171, 233, 471}) {
            const Problem apart = problem(outer, dim, inner, DType::float32, backward);
            Problem in_place = apart;
            in_place.in_place = true;
            const Plan few = plan(apart, gpu(compute_capability));
            Plan but_for_the_grid = plan(in_place, gpu(compute_capability));
            CHECK(covers(apart, few) && covers(in_place, but_for_the_grid));
            but_for_the_grid.grid = few.grid;
            CHECK(but_for_the_grid == few);
          }
  for (const DType dtype : {DType::float32, DType::float16})
    for (const auto& [outer, dim, inner] : {std::tuple{60, 1024, 256}, {80, 700, 196}, {2000, 1024, 8}}) {
      const Problem columns = problem(outer, dim, inner, dtype);
      const Plan many = plan(columns, gpu(90));
      CHECK(many.vector == 4);
      CHECK(dtype == DType::float16 || columns_layout(columns, many).kernel == tuning::kManyThreadsKernel);
      CHECK(covers(columns, many));
    }
  // many tiles in clusters of any size, of which most blocks are under way, few in larger ones
  CHECK(plan(problem(25, 577, 1001), gpu(90)).cluster == 5);
  CHECK(plan(problem(1, 577, 1001), gpu(90)).cluster == 8);
  CHECK(plan(problem(40, 50000, 8, DType::float16), gpu(90)).cluster == 10);
  const Plan folded = plan(problem(256, 132, 131), gpu(80));
  CHECK(!folded.staged && folded.vector == 4 && folded.passes == 1);
  // of 16 bits one by one, where a thread has all of few elements, or shifted words; of short strips whole ones, or
  // folded ones rather than shifted ones of many threads
  const Plan singles = plan(problem(64, 4, 341, DType::float16), gpu(90));
  CHECK(!singles.staged && singles.vector == 1 && singles.threads_per_row == 1 && singles.shared_bytes == 0);
  CHECK(plan(problem(256, 17, 1001, DType::float16), gpu(90)).vector == 2);
  const Plan whole = plan(problem_apart(640, 101, 9), gpu(90));
  CHECK(!whole.staged && whole.vector == 1 && whole.run == 9);
  CHECK(!plan(problem(64, 51, 147, DType::float16), gpu(90)).staged);
  CHECK(plan(problem_apart(1400, 75, 81, DType::float16), gpu(90)).vector == 4);
  // of more elements folded, in slabs that begin and end within vectors
  Device single = gpu(90);  // to which few elements are many
  single.multiprocessors = 1;
  bool as_vectors = false, as_halves = false;
  for (const std::int64_t outer : {1, 7, 128, 700})
    for (const std::int64_t dim : {57, 90, 300, 2051})
      for (const std::int64_t inner : {3, 81, 199}) {
        if (outer * dim * inner < 40'000) continue;
        const Problem slabs = problem_apart(outer, dim, inner, DType::float16);
        const Plan vectors = plan(slabs, single);
        CHECK(!vectors.staged && vectors.passes == 1 && (vectors.vector == 8 || vectors.vector == 4));
        (vectors.vector == 8 ? as_vectors : as_halves) = true;
        CHECK(covers(slabs, vectors));
      }
  CHECK(as_vectors && as_halves);
  Problem every_other = problem(40, 33, 6, DType::float64);  // of which one has as many bytes as half of a vector
  for (std::int64_t& stride : every_other.inner.groups[0].stride) stride = 2;
  CHECK(!fold_of(every_other, plan(every_other, gpu(90))).folds);
  CHECK(!plan(problem(64, 2050, 65, DType::float16), gpu(90)).staged);
  // of 32 bits, too, where words would find no room
  CHECK(plan(problem(64, 50'001, 7), gpu(90)).vector == 4 && plan(problem(64, 5001, 21), gpu(90)).vector == 1);
  // read twice: vectors of few blocks that share a column, in two launches, each with the states of all folded columns
  int twice = 0;
  for (const DType dtype : {DType::float32, DType::float16})
    for (const bool backward : {false, true})
      for (const auto& [outer, dim, inner] : {std::tuple{2, 9001, 33}, {1, 26003, 7}, {3, 4001, 300}, {2, 8000, 2}}) {
        const Problem slabs = problem(outer, dim, inner, dtype, backward);
        const Plan vectors = plan(slabs, gpu(80));
        twice += vectors.passes - 1;
        if (vectors.passes == 1) continue;
        CHECK(vectors.vector * size_of(dtype) == 16 && vectors.workspace_bytes > 0);
        CHECK(covers(slabs, vectors));
      }
  CHECK(twice > 5);
  // split rows that meet, whose parts find room in shared memory or not; in two launches blocks are as small as ever
  for (const DType dtype : {DType::float32, DType::float16})
    for (const bool backward : {false, true})
      for (const auto& [outer, dim] : {std::pair{1, 4000003}, {3, 700000}, {40, 100001}}) {
        const Problem rows = problem(outer, dim, 1, dtype, backward);
        const Plan meeting = plan(rows, gpu(90), Regime::split), apart = without_meeting(rows, meeting);
        CHECK(meeting.meets && meeting.grid <= 132 && meeting.shared_bytes <= gpu(90).shared_bytes_per_block);
        CHECK(!apart.meets && apart.block < meeting.block);
        CHECK(apart.grid * (backward ? 4 : 8) <= meeting.workspace_bytes);
        CHECK(covers(rows, meeting) && covers(rows, apart));
      }
  // words of several columns a thread, where those are many
  for (const auto& [dim, turns] : {std::pair{8, 4}, {9, 3}, {17, 2}, {25, 2}, {33, 1}}) {
    CHECK(plan(problem(9, dim, 131073), gpu(90)).rows_per_block == turns * (dim > 32 ? 64 : 128));
    CHECK(plan(problem(1, dim, 131073), gpu(90)).rows_per_block == (dim > 32 ? 64 : dim > 8 ? 128 : 512));
  }
  // more threads along dim where words have short strips
  CHECK(plan(problem_apart(1 << 14, 31, 2), gpu(90)).threads_per_row == 4);
  CHECK(plan(problem_apart(1 << 14, 31, 5), gpu(90)).threads_per_row == 2);
  CHECK(plan(problem_apart(1 << 16, 8, 4, DType::bfloat16), gpu(90)).threads_per_row == 2);
  CHECK(plan(problem_apart(1 << 14, 13, 9), gpu(90)).threads_per_row == 1);
  // backward, too; and of short strips that are vectors, few a thread
  for (const std::int64_t dim : {4, 5, 8, 9}) {
    const Plan few = plan(problem_apart(640, dim, 1001, DType::bfloat16, true), gpu(90));
    CHECK(!few.staged && few.vector == (dim > 8 ? 2 : 1));
    CHECK(plan(problem(1640, dim, 99, DType::bfloat16, true), gpu(90)).vector == 1);
  }
  CHECK(plan(problem(1 << 15, 9, 8, DType::bfloat16), gpu(90)).items == 5);
  CHECK(plan(problem(1 << 14, 9, 8, DType::bfloat16, true), gpu(90)).items == 3);
  CHECK(plan(problem(1 << 14, 8, 4, DType::float32, true), gpu(90)).items == 2);

  // every width fits in little shared memory, forward and backward, from and to every dtype, and is covered; also where
  // there are rows enough to stage them
  Device least = gpu(80);
  least.multiprocessors = 1;
  int staged = 0;
  for (std::int64_t dim = 1; dim <= 1100; ++dim)
    for (const auto& [source, result, backward] : {std::tuple{DType::float16, DType::float32, false},
                                                   {DType::float64, DType::float64, true},
                                                   {DType::float32, DType::float16, true},
                                                   {DType::float32, DType::float32, true}}) {
      const std::vector<std::int64_t> sizes{dim <= 64 ? 1100 : dim % 2 == 0 ? 9 : 130, dim}, strides{dim, 1}, last{1};
      const TensorView from{nullptr, source, 2, sizes.data(), strides.data()};
      const TensorView to{nullptr, result, 2, sizes.data(), strides.data()};
      const Problem rows = make_problem(Operation::softmax, from, backward ? &from : nullptr, to, last);
      const Plan here = plan(rows, least);
      CHECK(here.shared_bytes <= least.shared_bytes_per_block);
      CHECK(covers(rows, here));
      staged += here.staged;
    }
  CHECK(staged > 900);

  // clusters that share a GPC, or have one to themselves
  for (std::int64_t dim = 20000; dim < 500000; dim += 4999) {
    const int cluster = plan(problem(many, dim, 1), gpu(90)).cluster;
    CHECK(cluster <= 8 || cluster == 16);
  }

  // the widest rows of backward, of clusters that stay: fewer clusters than rows, and rows that begin anywhere
  Device hopper = gpu(90);
  hopper.multiprocessors = 16;
  hopper.shared_bytes_per_block = 227 << 10;
  const auto gradients = [](std::int64_t dim) {
    const std::vector<std::int64_t> sizes{18, dim}, strides{dim, 1}, last{1};
    const TensorView tensor{nullptr, DType::float32, 2, sizes.data(), strides.data()};
    return make_problem(Operation::softmax, tensor, &tensor, tensor, last);
  };
  for (const std::int64_t dim : {165000, 170001, 200064, 256000, 400001, 450001, 500003, 650001}) {
    const Problem rows = gradients(dim);
    const Plan here = plan(rows, hopper);
    CHECK(here.regime == Regime::cluster && here.staged && here.grid / here.cluster < 18);
    CHECK_EQUAL(here.passes, dim < 460000 ? 1 : 2);  // what finds no room in shared memory
    CHECK(here.shared_bytes <= hopper.shared_bytes_per_block);
    CHECK(covers(rows, here));
  }

  CHECK(plan(gradients(700001), hopper).regime == Regime::online);
  // but not where registers have room and shared memory has not
  Device blackwell = hopper;
  blackwell.compute_capability = 120;
  blackwell.shared_bytes_per_block = 99 << 10;
  CHECK(plan(gradients(110007), blackwell).passes == 1 && !plan(gradients(110007), blackwell).staged);

  // columns so long that a GPC has room for short segments of them alone, or for parts of tiles: read twice, unless
  // they are so few that this would take longer
  {
    Device h200 = hopper;
    h200.multiprocessors = 132;
    h200.l2_bytes = 60 << 20;
    CHECK(plan(problem(2, 18589, 833), h200).passes == 2);
    CHECK(plan(problem(2, 18589, 833, DType::float16), h200).passes == 2);
    CHECK(plan(problem(1, 25000, 4008, DType::float16), h200).passes == 2);
    CHECK(plan(problem(1, 50257, 512), h200).passes == 2);
    CHECK(plan(problem(1, 32000, 1024), h200).passes == 1);
    CHECK(plan(problem(1, 20000, 4096), h200).passes == 1);
    CHECK(plan(problem(1, 25000, 4096, DType::float16), h200).passes == 2);
    CHECK(plan(problem(12, 5000, 333), h200).passes == 1);
    CHECK(plan(problem(12, 5000, 333, DType::float16), h200).passes == 2);
    CHECK(plan(problem(2, 5000, 333, DType::float16), h200).passes == 1);
    CHECK(plan(problem(12, 5000, 333, DType::float32, true), h200).passes == 2);
    CHECK(plan(problem(4, 10000, 501), h200).passes == 2);
    CHECK(plan(problem(1, 7000, 201), h200).passes == 1 && plan(problem(1, 10000, 201), h200).meets);
    // which single columns rather are not, where vectors would need too much workspace
    CHECK(plan(problem(60, 5000, 333, DType::float16), h200).passes == 1);
    CHECK(!plan(problem(60, 5000, 333, DType::float16), h200).staged);
    CHECK(plan(problem(100, 20885, 333), h200).vector == 1 && plan(problem(100, 20885, 333), h200).passes == 2);
    CHECK(plan(problem(1, 40000, 1024, DType::float32, true), h200).passes == 2);
    CHECK(plan(problem(1, 20000, 4096, DType::float32, true), h200).passes == 1);
  }
  // in little workspace on any GPU
  for (const int multiprocessors : {8, 132, 188, 400}) {
    Device large = gpu(120);
    large.multiprocessors = multiprocessors;
    for (const auto& [outer, dim, inner] : {std::tuple{4, 14191, 8856}, {1, 200000, 3080}, {1, 500000, 64}})
      for (const bool backward : {false, true})
        CHECK(plan(problem(outer, dim, inner, DType::float16, backward), large).workspace_bytes <= 1 << 20);
  }

  // forward, threads of clusters have some vectors in shared memory
  for (const std::int64_t dim : {210001, 330000, 400001, 655360, 655361, 1300003, 3276800, 3276801}) {
    const std::vector<std::int64_t> sizes{18, dim}, strides{dim, 1}, last{1};
    const TensorView tensor{nullptr, DType::float32, 2, sizes.data(), strides.data()};
    const Problem rows = make_problem(Operation::softmax, tensor, nullptr, tensor, last);
    const Plan here = plan(rows, hopper);
    if (dim > 3276800) {
      CHECK(here.regime == Regime::online);
      continue;
    }
    CHECK(here.regime == Regime::cluster && !here.staged && here.shared_bytes > 0);
    CHECK(here.passes == (dim > 655360 ? 2 : 1));  // what finds no room is read again
    CHECK(here.shared_bytes <= tuning::dynamic_shared_bytes(hopper.shared_bytes_per_block * here.block / 1024));
    CHECK(covers(rows, here));
  }

  // not before there are several times the clusters that run at once, unless registers have little under way; of 16
  // bits in clusters of half a GPC; and not where registers have enough
  {
    Device h200 = hopper;
    h200.multiprocessors = 132;
    const auto cluster = [&](std::int64_t rows, std::int64_t dim, DType dtype) {
      const Plan here = plan(problem(rows, dim, 1, dtype), h200);
      CHECK(here.regime == Regime::cluster && here.passes == 1);
      return here.shared_bytes > 0 ? here.cluster : 0;
    };
    CHECK_EQUAL(cluster(100, 170000, DType::float32), 0);
    CHECK_EQUAL(cluster(130, 170000, DType::float32), 16);
    CHECK_EQUAL(cluster(67, 256000, DType::float32), 16);
    CHECK_EQUAL(cluster(1038, 129280, DType::float32), 0);
    CHECK_EQUAL(cluster(440, 304700, DType::float32), 16);
    CHECK_EQUAL(cluster(440, 304900, DType::float32), 0);
    CHECK_EQUAL(cluster(400, 256000, DType::bfloat16), 0);
    CHECK_EQUAL(cluster(480, 256000, DType::bfloat16), 8);
    CHECK_EQUAL(cluster(2076, 129280, DType::bfloat16), 0);
    CHECK_EQUAL(cluster(512, 524288, DType::bfloat16), 16);
    // what shared memory has comes first, where it leaves L1 some room
    CHECK(shares_first(plan(problem(524, 256000, 1), h200)) && shares_first(plan(problem(268, 500000, 1), h200)));
    CHECK(!shares_first(plan(problem(335, 400000, 1), h200)) && !shares_first(plan(problem(204, 655360, 1), h200)));
    CHECK(!shares_first(plan(problem(128, 1048576, 1), h200)));
  }

  // rows that share a mask follow each other where L2 would forget it from one head to the next, and rows are wide
  {
    Device h200 = gpu(90);
    h200.l2_bytes = 50 << 20;
    const Problem large = masked(16, 4096, 4096), small = masked(16, 512, 4096), narrow = masked(64, 65536, 128);
    CHECK(plan(large, h200).together && !plan(small, h200).together && !plan(narrow, h200).together);
    CHECK(plan(masked(16, 4096, 4096, true), h200).together);
    CHECK(!plan(masked(1, 4096, 4096), h200).together);
    const Axis natural = rows_in_order(small, plan(small, h200)), turned = rows_in_order(large, plan(large, h200));
    CHECK(natural.groups[0].size == 16 && natural.groups[1].size == 512);
    CHECK(turned.groups[0].size == 4096 && turned.groups[1].size == 16);
    h200.l2_bytes = 1 << 10;
    const Problem few = masked(3, 5, 1000);
    CHECK(plan(few, h200).together && covers(few, plan(few, h200)));
  }
  // what kernels that know masks alone take: a mask beside a row; and where vectors of either go with those of rows
  {
    alignas(16) char bytes[16];
    CHECK(masks_vectors(masked(4, 8, 4096, false, bytes)) && has_masked_kernels(masked(4, 8, 4096, false, bytes)));
    CHECK(!masks_vectors(masked(4, 8, 4096, false, bytes + 1)) && !masks_vectors(masked(4, 8, 4097)));
    CHECK(has_masked_kernels(masked(4, 8, 4096, false, bytes + 1)) && has_masked_kernels(masked(4, 8, 4097)));
    CHECK(!masks_vectors(masked(4, 8, 4096, true)) && biases_vectors(masked(4, 8, 4096, true, bytes)));
    CHECK(!biases_vectors(masked(4, 8, 4096, true, bytes + 4)));
    CHECK(biases_vectors(masked(4, 8, 4097, true, bytes)) && !biases_vectors(masked(4, 7, 4097, true, bytes)));
  }

  CHECK_THROWS(std::invalid_argument, plan(problem(1, 2000, 1), gpu(90), Regime::warp));
  CHECK_THROWS(std::invalid_argument, plan(problem(1, 2000, 1), gpu(80), Regime::cluster));
  CHECK_THROWS(std::invalid_argument, plan(problem(1, 20, 4), gpu(90), Regime::block));
  CHECK(plan(problem(3, 2000, 1), gpu(90)) == plan(problem(3, 2000, 1), gpu(90)));
  return summary();
}
