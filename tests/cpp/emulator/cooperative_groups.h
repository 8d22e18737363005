// The cluster of cooperative groups, as far as the kernels use it.
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

}  // namespace cooperative_groups
