// The groups of cooperative groups that the kernels use, as far as they do.
#pragma once

#include <cuda_runtime.h>

namespace cooperative_groups {

struct cluster_group {
  void barrier_arrive() const { tickets() = ::emulator::arrive_cluster(); }
  void barrier_wait() const { ::emulator::wait_cluster(tickets()); }

 private:
  static unsigned& tickets() {
    static thread_local unsigned of_thread[1024];
    return of_thread[threadIdx.x];
  }
};

inline cluster_group this_cluster() { return {}; }

struct grid_group {
  void sync() const { ::emulator::wait_cluster(::emulator::arrive_cluster()); }
};

inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups
