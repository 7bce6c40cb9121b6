// Streams: queues whose tasks run in order on a thread of their own, some time after they were queued.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace simdev {

using Clock = std::chrono::steady_clock;

// A place in a queue. Reached once all tasks before it are done.
class Mark {
 public:
  void reach();
  void wait();
  bool is_reached();
  Clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  bool is_reached_ = false;
  Clock::time_point time_;
};

using MarkPtr = std::shared_ptr<Mark>;

class Stream {
 public:
  explicit Stream(int64_t id) : id(id) {}
  const int64_t id;

  // No task starts before SIMDEV_LATENCY_US (default 2000) after it was queued, so that a missing wait shows.
  void push(std::function<void()> task);
  MarkPtr mark();
  bool is_idle();
  // Until all that is queued now is done. Rethrows what a task threw.
  void wait();

 private:
  struct Task {
    Clock::time_point not_before;
    std::function<void()> run;
  };
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t num_queued_ = 0;
  uint64_t num_done_ = 0;
  bool has_worker_ = false;
  std::exception_ptr error_;
};

// Streams of one device. They live until the process ends: a thread of one may still be at work then.
class StreamTable {
 public:
  Stream& get(int64_t id);
  // Of a pool, handed out in turn, as vendors do.
  Stream& next();
  std::vector<Stream*> all();

 private:
  std::mutex mutex_;
  std::vector<Stream*> streams_;
  int64_t next_ = 0;
};

}  // namespace simdev
