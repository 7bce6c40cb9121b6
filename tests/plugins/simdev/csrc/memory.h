// Memory of the simulated devices: segments are shared mappings, so that other processes can open them.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "streams.h"

namespace simdev {

struct Usage {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t total = 0;
  int64_t freed = 0;
  void add(int64_t amount);
};

struct Statistics {
  Usage allocated_bytes, reserved_bytes, allocations, segments;
  int64_t num_ooms = 0;
};

struct Segment;

struct Block {
  char* address;
  size_t bytes;
  Segment* segment;
  bool is_free;
  std::vector<Stream*> other_users;  // streams besides the segment's own: record_stream
  std::vector<MarkPtr> pending;      // a freed block is used again when these are reached
};

// One mapping of an anonymous shared file; blocks are cut from it, for one stream and one pool.
struct Segment {
  int descriptor;
  char* base;
  size_t bytes;
  int64_t stream;
  int64_t pool;
  std::map<char*, Block> blocks;
};

// Caches what is freed and gives it out again, as the allocators of vendors do.
class DeviceMemory {
 public:
  DeviceMemory(int physical_index);

  // Null when the device, whoever uses it, has too little left.
  void* allocate(size_t bytes, int64_t stream, int64_t pool);
  void free(void* address);
  void record(void* address, Stream* stream);
  // Whole free segments go back. The caller has waited for the device.
  void empty_cache();
  void release_pool(int64_t pool);
  // (allocated, total) bytes of each.
  std::vector<std::pair<int64_t, int64_t>> segments_of_pool(int64_t pool);
  Segment* segment_of(const void* address);
  Statistics statistics();
  void reset_peak();
  void reset_accumulated();
  // (free, total) of the device, whoever uses it.
  std::pair<size_t, size_t> info();

 private:
  Block* find_free(size_t bytes, int64_t stream, int64_t pool);
  Segment* new_segment(size_t bytes, int64_t stream, int64_t pool);
  void trim(int64_t pool, bool any_pool);
  Block* block_at(const void* address);

  std::mutex mutex_;
  const int physical_index_;
  std::list<Segment> segments_;
  std::map<char*, Segment*> by_address_;
  Statistics statistics_;
};

// A device's share of host memory: SIMDEV_MEMORY_MB, default 1024.
size_t device_bytes();

// Page-locked host memory. What is queued keeps it alive, whatever its owner does.
class PinnedMemory {
 public:
  void* allocate(size_t bytes);
  // Memory of somebody else's, such as a mapping, that is to count as page-locked.
  void adopt(void* address, size_t bytes);
  void free(void* address);
  // Null when the address is not page-locked.
  std::shared_ptr<void> hold(const void* address);

 private:
  std::mutex mutex_;
  std::map<char*, std::pair<size_t, std::shared_ptr<void>>> blocks_;
};

}  // namespace simdev
