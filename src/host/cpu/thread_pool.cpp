// Where the process has an OpenMP runtime, as torch brings one, jobs run on its threads: they stay awake for a while
// after a call of torch, and threads of our own would have to share the cores with them. Otherwise a call hands its job
// to as many workers as it wants through their mailboxes, works itself, and waits for those it asked. Either way
// workers take the next tasks from one counter, so that a thread that is late or slow does less.
#include "host/cpu/thread_pool.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

namespace ndsoftmax::cpu {
namespace {

// Long enough to be awake for the next call of a loop, short enough not to be seen in a profile.
constexpr int kSpins = 1000;

// A thread takes neighbouring tasks, whose memory follows on: half of its share of what is left (or a little more, when
// another has taken some meanwhile), so that one that is held up right then delays the others by half a share at most.
constexpr std::int64_t kBitesPerShare = 2;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

template <typename Value>
void wait_while(const std::atomic<Value>& variable, Value value) {
  for (int spin = 0; spin < kSpins; ++spin, pause())
    if (variable.load(std::memory_order_acquire) != value) return;
  while (variable.load(std::memory_order_acquire) == value) variable.wait(value, std::memory_order_acquire);
}

struct Job {
  void (*task)(const void*, std::int64_t);
  const void* context;
  std::int64_t tasks;
  std::int64_t threads;
  std::atomic<std::int64_t> next = 0;
  std::exception_ptr error = nullptr;  // of the first task that failed; none begins after it
  std::atomic_flag failed{};

  void work() noexcept {
    try {
      for (std::int64_t left; (left = tasks - next.load(std::memory_order_relaxed)) > 0;) {
        const std::int64_t some = std::max<std::int64_t>(1, left / (kBitesPerShare * threads));
        const std::int64_t first = next.fetch_add(some, std::memory_order_relaxed);
        const std::int64_t end = std::min(first + some, tasks);
        for (std::int64_t i = first; i < end && !failed.test(std::memory_order_relaxed); ++i) task(context, i);
      }
    } catch (...) {
      next.store(tasks, std::memory_order_relaxed);
      if (!failed.test_and_set()) error = std::current_exception();
    }
  }
};

class Pool {
 public:
  void run(Job& job, int threads) {
    if (busy_.test_and_set(std::memory_order_acquire)) return job.work();
    const std::size_t helpers = hire(static_cast<std::size_t>(threads - 1));
    working_.store(static_cast<int>(helpers), std::memory_order_relaxed);
    for (std::size_t i = 0; i < helpers; ++i) {
      mailboxes_[i]->store(&job, std::memory_order_release);
      mailboxes_[i]->notify_one();
    }
    job.work();
    for (std::size_t i = 0; i < helpers; ++i)  // a worker that has not woken up by now is not needed
      if (mailboxes_[i]->exchange(nullptr, std::memory_order_acq_rel)) working_.fetch_sub(1, std::memory_order_relaxed);
    for (int left; (left = working_.load(std::memory_order_acquire)) != 0;) wait_while(working_, left);
    busy_.clear(std::memory_order_release);
  }

 private:
  using Mailbox = std::atomic<Job*>;

  // Fewer than wanted where the system gives no more threads.
  std::size_t hire(std::size_t wanted) try {
    mailboxes_.reserve(wanted);
    while (mailboxes_.size() < wanted) {
      auto mailbox = std::make_unique<Mailbox>(nullptr);
      std::thread(&Pool::serve, this, mailbox.get()).detach();
      mailboxes_.push_back(std::move(mailbox));
    }
    return wanted;
  } catch (const std::exception&) {
    return mailboxes_.size();
  }

  [[noreturn]] void serve(Mailbox* mailbox) {
    for (;;) {
      wait_while<Job*>(*mailbox, nullptr);
      Job* const job = mailbox->exchange(nullptr, std::memory_order_acq_rel);
      if (!job) continue;  // taken back
      job->work();
      working_.fetch_sub(1, std::memory_order_acq_rel);
      working_.notify_one();
    }
  }

  std::atomic_flag busy_;
  std::atomic<int> working_ = 0;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;
};

// Never destroyed: its threads run until the process ends. After a fork the child's threads are gone, and a
// call that was under way when it forked will never end there, so it starts over.
std::atomic<Pool*> current_pool = nullptr;
std::atomic<bool> is_forked = false;

[[maybe_unused]] const int kWatchesForks = pthread_atfork(nullptr, nullptr, [] {
  current_pool = nullptr;
  is_forked = true;
});

// What GCC makes of `#pragma omp parallel`; other OpenMP runtimes have it, too. Null where there is none, or where it
// would hang, because the process was forked from one that used it.
using OpenMPParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
OpenMPParallel openmp_parallel() {
  static const auto parallel = reinterpret_cast<OpenMPParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return is_forked ? nullptr : parallel;
}

Pool& pool() {
  Pool* pool = current_pool;
  if (pool) return *pool;
  auto fresh = std::make_unique<Pool>();
  if (current_pool.compare_exchange_strong(pool, fresh.get())) return *fresh.release();
  return *pool;
}

}  // namespace

void parallel_for(std::int64_t tasks, int threads, void (*task)(const void*, std::int64_t), const void* context) {
  Job job{task, context, tasks, std::max(threads, 1)};
  // of OpenMP's threads always as many as torch takes: those that a smaller team leaves out would exit
  if (threads <= 1 || tasks <= 1)
    job.work();
  else if (const OpenMPParallel parallel = openmp_parallel())
    parallel([](void* context) { static_cast<Job*>(context)->work(); }, &job, static_cast<unsigned>(threads), 0);
  else
    pool().run(job, static_cast<int>(std::min<std::int64_t>(threads, tasks)));
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace ndsoftmax::cpu
