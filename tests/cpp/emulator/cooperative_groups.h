// The cluster of cooperative groups, as far as the kernels use it.
#pragma once

#include <cuda_runtime.h>

namespace cooperative_groups {

struct cluster_group {
  void barrier_arrive() const { tickets() = ::emulator::arrive_cluster(); }
  void barrier_wait() const { ::emulator::wait_cluster(tickets()); }
  void sync() const { ::emulator::wait_cluster(::emulator::arrive_cluster()); }
  unsigned num_blocks() const { return ::emulator::cluster_size(); }
  unsigned block_rank() const { return ::emulator::cluster_rank(); }
  template <typename T>
  T* map_shared_rank(T* shared, unsigned rank) const {
    return static_cast<T*>(::emulator::map_to_rank(shared, rank));
  }

 private:
  static unsigned& tickets() {
    static thread_local unsigned of_thread[1024];
    return of_thread[threadIdx.x];
  }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
