// The thread pool: every task once, also when several threads call at once, from within a task, after a task has
// failed, and in a child that was forked meanwhile. Plain memory is shared, so that ThreadSanitizer sees a missing
// wait.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "host/cpu/thread_pool.hpp"
#include "ndsoftmax/host_softmax.hpp"

using namespace ndsoftmax;

namespace {

// Calls `body` in several threads at once; true where it returned true in all of them.
bool in_threads(int threads, const std::function<bool(int)>& body) {
  std::vector<char> good(static_cast<std::size_t>(threads));
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) running.emplace_back([&, t] { good[static_cast<std::size_t>(t)] = body(t); });
  for (std::thread& thread : running) thread.join();
  return std::count(good.begin(), good.end(), 1) == threads;
}

// Each task writes plain memory that the caller wrote before and reads after.
bool every_task_once(std::int64_t tasks, int threads) {
  std::vector<int> done(static_cast<std::size_t>(tasks), 1);
  cpu::parallel_for(tasks, threads, [&](std::int64_t i) { ++done[static_cast<std::size_t>(i)]; });
  return std::count(done.begin(), done.end(), 2) == tasks;
}

bool nested_tasks_once() {
  std::vector<char> good(8);
  cpu::parallel_for(8, 4, [&](std::int64_t i) { good[static_cast<std::size_t>(i)] = every_task_once(5, 3); });
  return std::count(good.begin(), good.end(), 1) == 8;
}

bool fails(std::int64_t tasks, int threads) {
  try {
    cpu::parallel_for(tasks, threads, [&](std::int64_t i) {
      if (i == tasks / 2) throw std::runtime_error("a task fails");
    });
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

// A row of equal elements, long enough for threads to share it: 1 / size is what softmax makes of each.
bool softmax_is_right(std::int64_t size, float value) {
  const std::vector<std::int64_t> sizes{2, size}, strides{size, 1}, dims{1};
  std::vector<float> x(static_cast<std::size_t>(2 * size), value), y(x.size());
  Execution execution;
  execution.device.threads = 4;
  host_softmax(Operation::softmax, {x.data(), DType::float32, 2, sizes.data(), strides.data()},
               {y.data(), DType::float32, 2, sizes.data(), strides.data()}, dims, execution);
  const double exact = 1 / static_cast<double>(size);
  return std::all_of(y.begin(), y.end(), [&](float p) { return std::abs(p - exact) < 1e-6 * exact; });
}

#if !defined(__SANITIZE_THREAD__)  // which takes the threads of a child for those of its parent
bool a_child_is_right() {
  const pid_t child = fork();
  if (child == 0) _exit(every_task_once(100, 4) && softmax_is_right(100'000, 1) ? EXIT_SUCCESS : EXIT_FAILURE);
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS;
}
#endif

}  // namespace

int main() {
  alarm(300);  // a lost wake-up would wait for ever
  for (const std::int64_t tasks : {0, 1, 2, 7, 1000})
    for (const int threads : {1, 2, 3, 8}) CHECK(every_task_once(tasks, threads));
  CHECK(nested_tasks_once());
  CHECK(fails(100, 4) && fails(1, 1) && every_task_once(100, 4));

  CHECK(in_threads(6, [](int t) {
    for (int i = 0; i < 300; ++i)
      if (!every_task_once(1 + i % 20, 2 + t)) return false;
    return nested_tasks_once() && fails(50, 3);
  }));
  CHECK(in_threads(4, [](int t) {
    for (int i = 0; i < 10; ++i)
      if (!softmax_is_right(40'000 + i, static_cast<float>(t))) return false;
    return true;
  }));

#if !defined(__SANITIZE_THREAD__)
  // forked by one thread while others are in the pool
  CHECK(in_threads(3, [](int t) {
    for (int i = 0; i < 20; ++i)
      if (!(t == 0 ? a_child_is_right() : softmax_is_right(50'000, 2))) return false;
    return true;
  }));
#endif
  return summary();
}
