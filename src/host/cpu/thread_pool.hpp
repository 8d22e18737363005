// Threads that stay, sleep when idle, and survive a fork: the child starts with none and makes its own.
#pragma once

#include <cstdint>

namespace ndsoftmax::cpu {

// Calls task(context, i) for every i < tasks, from at most `threads` threads, the caller among them, and returns when
// all are done. Tasks must not throw. A call that comes while another thread's is running, or from within a task, runs
// on its caller alone.
void parallel_for(std::int64_t tasks, int threads, void (*task)(const void* context, std::int64_t i),
                  const void* context);

template <typename Task>
void parallel_for(std::int64_t tasks, int threads, const Task& task) {
  parallel_for(
      tasks, threads, [](const void* context, std::int64_t i) { (*static_cast<const Task*>(context))(i); }, &task);
}

}  // namespace ndsoftmax::cpu
