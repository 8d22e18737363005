// The CUDA backend as the dispatcher sees it: devices, and the way from a Plan to the launcher of its regime.
#include "cuda/launch.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "cuda/launchers.hpp"
#include "host/cuda_plan.hpp"

namespace ndsoftmax::cuda {
namespace {

int device_count() {
  static const int devices = [] {
    int count = 0;
    check(cudaGetDeviceCount(&count), "looking for CUDA devices");
    return count;
  }();
  return devices;
}

// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) : before_(current_device()), changed_(before_ != index) {
    if (changed_) check(cudaSetDevice(index), "cudaSetDevice");
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_;
  bool changed_;
};

Device read_device(int index) {
  const CurrentDevice current(index);
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, index), "cudaDeviceGetAttribute");
    return value;
  };
  Device device;
  device.kind = Device::Kind::cuda;
  device.index = index;
  // A newer device than the kernels were compiled for runs them from PTX, without what only their newer versions have.
  device.compute_capability =
      std::min(compiled_compute_capability(),
               10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor));
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  return device;
}

}  // namespace

const Device& device(int index) {
  struct Entry {
    std::atomic<const Device*> known = nullptr;  // (call_once alone would take every call some tens of nanoseconds)
    std::once_flag read;
    Device device;
  };
  static std::vector<Entry> entries(static_cast<std::size_t>(device_count()));
  if (index < 0 || index >= device_count())
    throw std::runtime_error("there is no CUDA device " + std::to_string(index));
  Entry& entry = entries[static_cast<std::size_t>(index)];
  if (const Device* const known = entry.known.load(std::memory_order_acquire)) return *known;
  std::call_once(entry.read, [&] { entry.device = read_device(index); });
  entry.known.store(&entry.device, std::memory_order_release);
  return entry.device;
}

int current_device() {
  if (device_count() == 1) return 0;  // CUDA would take some tens of nanoseconds to say so
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  return index;
}

void launch(const Problem& problem, const Plan& plan, const Device& device, const Addresses& addresses, void* workspace,
            void* stream) {
  if (plan.scales && problem.fused.any)
    return launch(without_scale(problem), plan, device, addresses, workspace, stream);
  const CurrentDevice current(device.index);
  const Pointers pointers{addresses, workspace, device.shared_bytes_per_block,
                          device.compute_capability >= tuning::kOverlapFrom,
                          tuning::next_begins_late(plan.grid * plan.block, device.multiprocessors)};
  const auto queue = static_cast<cudaStream_t>(stream);
  if (plan.interleaved > 1) {
    const Problem rows = interleaved_rows(problem);
    return plan.regime == Regime::cluster ? launch_cluster(rows, plan, pointers, queue)
                                          : launch_online(rows, plan, pointers, queue);
  }
  switch (plan.regime) {
    case Regime::warp:
      return plan.staged ? launch_staged(problem, plan, pointers, queue) : launch_warp(problem, plan, pointers, queue);
    case Regime::block: return launch_block(problem, plan, pointers, queue);
    case Regime::cluster: return launch_cluster(problem, plan, pointers, queue);
    case Regime::online:
    case Regime::split: return launch_online(problem, plan, pointers, queue);
    case Regime::strided:
      if (plan.slabs) return launch_slabs(problem, plan, pointers, queue);
      if (staggers_columns(plan)) return launch_staggered(problem, plan, pointers, queue);
      return holds_columns(plan) ? launch_columns(problem, plan, pointers, queue)
                                 : launch_strided(problem, plan, pointers, queue);
  }
}

}  // namespace ndsoftmax::cuda
