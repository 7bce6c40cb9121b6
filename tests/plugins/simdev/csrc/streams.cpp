#include "streams.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace simdev {

namespace {

constexpr int64_t kPoolSize = 32;

Clock::duration latency() {
  static const char* text = std::getenv("SIMDEV_LATENCY_US");
  static const Clock::duration value = std::chrono::microseconds(text ? std::stol(text) : 2000);
  return value;
}

}  // namespace

void Mark::reach() {
  std::lock_guard lock(mutex_);
  is_reached_ = true;
  time_ = Clock::now();
  reached_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  reached_.wait(lock, [this] { return is_reached_; });
}

bool Mark::is_reached() {
  std::lock_guard lock(mutex_);
  return is_reached_;
}

Clock::time_point Mark::time() {
  std::lock_guard lock(mutex_);
  return time_;
}

void Stream::push(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  tasks_.push_back({Clock::now() + latency(), std::move(task)});
  ++num_queued_;
  if (!has_worker_) {
    has_worker_ = true;
    std::thread([this] { work(); }).detach();
  }
  changed_.notify_all();
}

MarkPtr Stream::mark() {
  auto mark = std::make_shared<Mark>();
  push([mark] { mark->reach(); });
  return mark;
}

bool Stream::is_idle() {
  std::lock_guard lock(mutex_);
  return num_done_ == num_queued_;
}

void Stream::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, upto = num_queued_] { return num_done_ >= upto; });
  if (auto error = std::exchange(error_, nullptr)) {
    std::rethrow_exception(error);
  }
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::this_thread::sleep_until(task.not_before);
    std::exception_ptr error;
    try {
      task.run();
    } catch (...) {
      error = std::current_exception();
    }
    task.run = nullptr;  // what it holds goes before anyone may know that it is done
    lock.lock();
    ++num_done_;
    if (error) {
      error_ = error;
    }
    changed_.notify_all();
  }
}

Stream& StreamTable::get(int64_t id) {
  std::lock_guard lock(mutex_);
  if (id < 0 || id > kPoolSize) {
    throw std::out_of_range("simdev has no stream " + std::to_string(id));
  }
  for (int64_t missing = streams_.size(); missing <= id; ++missing) {
    streams_.push_back(new Stream(missing));
  }
  return *streams_[id];
}

Stream& StreamTable::next() {
  int64_t id;
  {
    std::lock_guard lock(mutex_);
    id = 1 + next_++ % kPoolSize;
  }
  return get(id);
}

std::vector<Stream*> StreamTable::all() {
  std::lock_guard lock(mutex_);
  return streams_;
}

}  // namespace simdev
