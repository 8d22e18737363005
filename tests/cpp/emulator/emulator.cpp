#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {

unsigned most_at_once = ~0u;

namespace {

constexpr int kWarp = 32;
constexpr std::size_t kStackBytes = 64 << 10;

struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Warp {
  Barrier barrier;
  unsigned char slots[kWarp][16];
};

// What the blocks of a cluster share, or those of a grid that is launched cooperatively.
struct Cluster {
  std::vector<unsigned char*> bases;    // of each block's thread-local memory
  std::vector<unsigned char*> dynamic;  // and of its dynamic shared memory
  unsigned threads = 0;
  std::atomic<unsigned> arrived{0};
};

struct Jump {
  jmp_buf target;  // an array, which no vector can hold
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<ucontext_t> contexts;  // where fibers begin
  std::vector<Jump> jumps;           // where they go on: a jump needs no system call
  std::vector<char> finished;
  std::vector<Warp> warps;
  std::vector<unsigned char> dynamic;
  Barrier barrier;
  ucontext_t scheduler_context;
  jmp_buf scheduler;
  unsigned running = 0;
  bool progress = false;
  Cluster* cluster = nullptr;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
};

thread_local Block* block = nullptr;
thread_local std::vector<std::unique_ptr<char[]>> stacks;  // kept from block to block
thread_local unsigned char base;  // marks the thread-local memory of a block: all of it lies at fixed distances

}  // namespace

void yield() {
  if (_setjmp(block->jumps[block->running].target) == 0) _longjmp(block->scheduler, 1);
}

namespace {

// Lets fiber `i` run until it yields.
void resume(unsigned i, bool first) {
  block->running = i;
  if (_setjmp(block->scheduler) != 0) return;
  if (first)
    swapcontext(&block->scheduler_context, &block->contexts[i]);
  else
    _longjmp(block->jumps[i].target, 1);
}

void wait(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    block->progress = true;
  }
  while (barrier.generation == generation) yield();
}

void start() {
  block->body(block->context);
  block->finished[block->running] = true;
  block->progress = true;
  yield();
}

// Not inlined: getcontext may return twice, as far as the compiler knows, to where a caller's variables have changed.
[[gnu::noinline]] void prepare(ucontext_t& context, char* stack) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, start, 0);
}

void run_block(const cudaLaunchConfig_t& config, Cluster& cluster, unsigned index, unsigned rank, void (*body)(void*),
               void* context) {
  const unsigned threads = config.blockDim.x;
  Block here;
  here.fibers.resize(threads, Fiber{0, index, threads, config.gridDim.x});
  here.contexts.resize(threads);
  here.jumps.resize(threads);
  here.finished.resize(threads);
  here.warps.resize((threads + kWarp - 1) / kWarp);
  here.dynamic.resize(config.dynamicSmemBytes + 16);
  here.barrier.expected = threads;
  here.cluster = &cluster;
  here.body = body;
  here.context = context;
  block = &here;
  cluster.dynamic[rank] = dynamic_shared();
  for (unsigned i = 0; i < threads; ++i) {
    here.fibers[i].thread = i;
    ++here.warps[i / kWarp].barrier.expected;
    if (stacks.size() <= i) stacks.emplace_back(new char[kStackBytes]);
    prepare(here.contexts[i], stacks[i].get());
  }
  bool first = true;
  for (unsigned left = threads; left > 0; first = false) {
    here.progress = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (here.finished[i]) continue;
      resume(i, first);
      if (here.finished[i]) --left;
    }
    if (left > 0 && !here.progress) {
      if (cluster.bases.size() == 1) {
        std::fputs("emulator: the threads of a block wait for each other forever\n", stderr);
        std::abort();
      }
      std::this_thread::yield();
    }
  }
  block = nullptr;
}

}  // namespace

void progressed() { block->progress = true; }

Fiber& current() { return block->fibers[block->running]; }

void sync_block() { wait(block->barrier); }

void sync_warp(const void* mine, void* others, int bytes, int lane_mask) {
  Warp& warp = block->warps[block->running / kWarp];
  const unsigned lane = block->running % kWarp;
  std::memcpy(warp.slots[lane], mine, static_cast<std::size_t>(bytes));
  wait(warp.barrier);
  std::memcpy(others, warp.slots[lane ^ static_cast<unsigned>(lane_mask)], static_cast<std::size_t>(bytes));
  wait(warp.barrier);
}

unsigned cluster_size() { return static_cast<unsigned>(block->cluster->bases.size()); }

// The ticket of an arrival is the number of arrivals that complete its phase.
unsigned arrive_cluster() {
  const unsigned threads = block->cluster->threads;
  return (block->cluster->arrived.fetch_add(1) / threads + 1) * threads;
}

void wait_cluster(unsigned ticket) {
  while (block->cluster->arrived.load() < ticket) yield();
  block->progress = true;
}

void* map_to_rank(void* shared, unsigned rank) {
  auto* const at = static_cast<unsigned char*>(shared);
  if (const std::less_equal<> ordered; ordered(block->dynamic.data(), at) && ordered(at, &block->dynamic.back()))
    return block->cluster->dynamic[rank] + (at - dynamic_shared());
  return block->cluster->bases[rank] + (static_cast<unsigned char*>(shared) - &base);
}

unsigned char* dynamic_shared() {
  const auto address = reinterpret_cast<std::uintptr_t>(block->dynamic.data());
  return block->dynamic.data() + (16 - address % 16) % 16;
}

void run(const cudaLaunchConfig_t& config, void (*body)(void*), void* context) {
  unsigned size = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
      size = config.attrs[i].val.clusterDim.x;
    else if (config.attrs[i].id == cudaLaunchAttributeCooperative)
      size = config.gridDim.x;
  for (unsigned first = 0; first < config.gridDim.x; first += size) {
    Cluster cluster;
    cluster.bases.resize(size);
    cluster.dynamic.resize(size);
    cluster.threads = size * config.blockDim.x;
    if (size == 1) {
      cluster.bases[0] = &base;
      run_block(config, cluster, first, 0, body, context);
      continue;
    }
    std::atomic<unsigned> ready{0};
    std::vector<std::thread> blocks;
    for (unsigned rank = 0; rank < size; ++rank)
      blocks.emplace_back([&, rank] {
        cluster.bases[rank] = &base;
        for (++ready; ready < size;) std::this_thread::yield();
        run_block(config, cluster, first + rank, rank, body, context);
        for (++ready; ready < 2 * size;) std::this_thread::yield();  // its shared memory outlives the cluster's work
      });
    for (std::thread& thread : blocks) thread.join();
  }
}

int& kernels_compiled() {
  static int count = 0;
  return count;
}

}  // namespace emulator
