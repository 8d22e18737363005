// Threads: those of the OpenMP runtime that torch brings, or else our own, which sleep when idle and survive a fork.
#pragma once

#include <cstdint>

namespace ndsoftmax::cpu {

// Calls task(context, i) for every i < tasks, from at most `threads` threads, the caller among them, and returns when
// all are done. Calls may come from several threads at once, and from within a task; some then run on their caller
// alone.
void parallel_for(std::int64_t tasks, int threads, void (*task)(const void* context, std::int64_t i),
                  const void* context);

template <typename Task>
void parallel_for(std::int64_t tasks, int threads, const Task& task) {
  parallel_for(
      tasks, threads, [](const void* context, std::int64_t i) { (*static_cast<const Task*>(context))(i); }, &task);
}

}  // namespace ndsoftmax::cpu
