// Threads that go through the stages of a step together.
//
// A stage is a number of independent items. Each thread owns a contiguous range of them, takes them
// one by one, and then helps with the ranges of the others; a stage is over when all its *items*
// are done. So a thread that the system has put aside holds nobody up but by the item in its hands,
// and cores of unequal speed share the work as they can, where a barrier would wait for the last.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>

class Team {
 public:
  Team(int num_threads, int num_stages)
      : num_threads_(num_threads),
        counters_(new Counter[static_cast<size_t>(num_stages) * (num_threads + 1)]()) {}

  // Runs `body(member)` on all threads. The region's pool is that of the process, PyTorch's.
  template <class Body>
  void run(Body&& body);

  // One thread's place in the team.
  class Member {
   public:
    Member(Team& team, int index) : team_(team), index_(index) {}

    // Does `work(item)` for every item of the next stage, with the others, and waits for its end.
    template <class Work>
    void stage(int64_t num_items, Work&& work) {
      const int threads = team_.num_threads_;
      Counter* taken = &team_.counters_[static_cast<size_t>(stage_++) * (threads + 1)];
      std::atomic<int64_t>& done = taken[threads].value;
      int64_t finished = 0;
      for (int offset = 0; offset < threads; ++offset) {
        const int owner = (index_ + offset) % threads;
        const int64_t end = num_items * (owner + 1) / threads;
        const int64_t begin = num_items * owner / threads;
        for (;;) {
          const int64_t item = begin + taken[owner].value.fetch_add(1, std::memory_order_relaxed);
          if (item >= end) break;
          work(item);
          ++finished;
        }
      }
      if (finished) done.fetch_add(finished, std::memory_order_release);
      for (int spins = 0; done.load(std::memory_order_acquire) != num_items; ++spins) {
        if (spins < kSpinsBeforeYield) {
          _mm_pause();
        } else {
          sched_yield();
        }
      }
    }

   private:
    Team& team_;
    int index_, stage_ = 0;
  };

 private:
  static constexpr int kSpinsBeforeYield = 2000;  // some 100 us
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  int num_threads_;
  std::unique_ptr<Counter[]> counters_;  // [stage][a thread's next item..., items done]
};

extern "C" int omp_get_thread_num();  // of whichever OpenMP runtime PyTorch has brought

template <class Body>
void Team::run(Body&& body) {
#pragma omp parallel num_threads(num_threads_)
  {
    Member member(*this, omp_get_thread_num());
    body(member);
  }
}
