// The kernels of small slabs against float64, in an emulator: of a GPU with bulk copies, and, compiled again, of one
// without (see CMakeLists.txt).
#include "problems.hpp"
// after all that is not told of CUDA's attributes
#include "cuda/launchers.hpp"

using namespace ndsoftmax;

#if defined(NDSOFTMAX_EMULATES_SM_80)
constexpr int kComputeCapability = 80;
#else
constexpr int kComputeCapability = 90;
#endif

int main() {
  Device device;  // to which little is enough
  device.kind = Device::Kind::cuda;
  device.compute_capability = kComputeCapability;
  device.multiprocessors = 1;
  device.shared_bytes_per_block = 100 << 10;
  device.l2_bytes = 50 << 20;
  // words and single columns, of one lane and of several, of all numbers of items that there are kernels for, in runs
  // that begin and end anywhere, those of gradients elsewhere, and so many that blocks have several, or not all
  const std::vector<testing::Case> slabs{{{4200, 2, 5}, {}, {1}, 1},           {{480, 3, 28}, {}, {1}},
                                         {{2580, 5, 3}, {}, {1}, 3, true},     {{420, 7, 14}, {}, {1}, 2, false, 2},
                                         {{390, 11, 9}, {}, {1}, 5, false, 1}, {{144, 13, 22}, {}, {1}, 6, false, 4},
                                         {{360, 16, 7}, {}, {1}, 0, true, 7},  {{96, 24, 18}, {}, {1}, 4, true, 1},
                                         {{180, 75, 3}, {}, {1}, 7, false, 2}, {{36, 119, 10}, {}, {1}},
                                         {{42, 300, 5}, {}, {1}, 1, true},     {{36, 190, 6}, {}, {1}, 2},
                                         {{900, 2, 22}, {}, {1}, 6, false, 2}, {{360, 6, 18}, {}, {1}, 2},
                                         {{1020, 4, 9}, {}, {1}, 1, false, 6}};
  const auto launch = [](const Problem& problem, const Plan& plan, const Device& on, const Addresses& addresses) {
    cuda::launch_slabs(problem, plan, {addresses, nullptr, on.shared_bytes_per_block, true, false}, nullptr);
  };
  auto runs = testing::run(slabs, {device}, 1000, launch, [](const Plan& plan) { return plan.slabs; });
  CHECK(runs["total"] >= 70);
  CHECK_EQUAL(runs["total"], runs["strided, slabs"]);
  return summary();
}
