// The launchers of the regimes, as launch() calls them.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "host/addresses.hpp"
#include "ndsoftmax/plan.hpp"
#include "ndsoftmax/problem.hpp"

namespace ndsoftmax::cuda {

struct Pointers : Addresses {
  void* workspace;
  int shared_limit;       // bytes of shared memory that a block may ask for
  bool kernels_overlap;   // the next kernel in the stream may begin before this one has ended
  bool next_begins_late;  // tuning::next_begins_late()
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// What the kernels that the current device runs were compiled for, 10 × major + minor.
int compiled_compute_capability();

// One launcher a regime, or a form of it, each in the file of its kernel.
void launch_warp(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_staged(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_block(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_cluster(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_online(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_columns(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_staggered(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_slabs(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);
void launch_strided(const Problem& problem, const Plan& plan, const Pointers& pointers, cudaStream_t stream);

}  // namespace ndsoftmax::cuda
