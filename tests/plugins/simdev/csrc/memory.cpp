#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "faults.h"

namespace simdev {

namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kSegment = 2 << 20;

size_t rounded(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("simdev: " + what + ": " + std::strerror(errno));
}

// Who uses how much of each device: a table in shared memory, because a device is of the machine, not of a process.
class Ledger {
 public:
  static Ledger& get() {
    static Ledger* ledger = new Ledger;
    return *ledger;
  }

  int64_t used(int device) {
    int64_t sum = 0;
    for (int i = 0; i < kSlots; ++i) {
      pid_t pid = slots_[i].pid;
      if (pid && (kill(pid, 0) == 0 || errno == EPERM)) {
        sum += slots_[i].bytes[device];
      }
    }
    return sum;
  }

  void add(int device, int64_t bytes) { mine_->bytes[device] += bytes; }

 private:
  static constexpr int kSlots = 256;
  struct Slot {
    std::atomic<pid_t> pid;
    std::atomic<int64_t> bytes[8];
  };

  Ledger() {
    std::string path = "/dev/shm/simdev-" + std::to_string(getuid());
    int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, kSlots * sizeof(Slot)) != 0) {
      fail(path);
    }
    void* at = mmap(nullptr, kSlots * sizeof(Slot), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (at == MAP_FAILED) {
      fail(path);
    }
    slots_ = static_cast<Slot*>(at);
    claim();
  }

  void claim() {
    for (int i = 0; i < kSlots; ++i) {
      pid_t owner = slots_[i].pid;
      bool is_taken = owner && owner != getpid() && (kill(owner, 0) == 0 || errno == EPERM);
      if (!is_taken && slots_[i].pid.compare_exchange_strong(owner, getpid())) {
        mine_ = &slots_[i];
        for (auto& bytes : mine_->bytes) {
          bytes = 0;
        }
        return;
      }
    }
    throw std::runtime_error("simdev: 256 processes use it already");
  }

  Slot* slots_;
  Slot* mine_;
};

}  // namespace

size_t device_bytes() {
  static const char* text = std::getenv("SIMDEV_MEMORY_MB");
  static const size_t value = (text ? std::stoul(text) : 1024) << 20;
  return value;
}

void Usage::add(int64_t amount) {
  current += amount;
  peak = std::max(peak, current);
  (amount > 0 ? total : freed) += std::abs(amount);
}

DeviceMemory::DeviceMemory(int physical_index) : physical_index_(physical_index) {
  Ledger::get();
}

void* DeviceMemory::allocate(size_t bytes, int64_t stream, int64_t pool) {
  std::lock_guard lock(mutex_);
  bytes = rounded(bytes, kAlignment);
  Block* block = find_free(bytes, stream, pool);
  if (!block) {
    Segment* segment = new_segment(rounded(bytes, kSegment), stream, pool);
    if (!segment) {
      ++statistics_.num_ooms;
      return nullptr;
    }
    block = &segment->blocks.begin()->second;
  }
  if (block->bytes > bytes) {
    char* rest = block->address + bytes;
    block->segment->blocks.emplace(rest, Block{rest, block->bytes - bytes, block->segment, true, {}, {}});
    block->bytes = bytes;
  }
  block->is_free = false;
  statistics_.allocated_bytes.add(block->bytes);
  statistics_.allocations.add(1);
  return block->address;
}

Block* DeviceMemory::find_free(size_t bytes, int64_t stream, int64_t pool) {
  Block* best = nullptr;
  for (Segment& segment : segments_) {
    if (segment.stream != stream || segment.pool != pool) {
      continue;
    }
    for (auto& [address, block] : segment.blocks) {
      auto is_reached = [](const MarkPtr& mark) { return mark->is_reached(); };
      bool is_usable = block.is_free && std::all_of(block.pending.begin(), block.pending.end(), is_reached);
      if (is_usable && block.bytes >= bytes && (!best || block.bytes < best->bytes)) {
        best = &block;
      }
    }
  }
  if (best) {
    best->pending.clear();
  }
  return best;
}

Segment* DeviceMemory::new_segment(size_t bytes, int64_t stream, int64_t pool) {
  if (Ledger::get().used(physical_index_) + bytes > device_bytes()) {
    return nullptr;
  }
  int descriptor = memfd_create("simdev", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, bytes) != 0) {
    fail("memfd_create");
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) {
    fail("mmap of " + std::to_string(bytes) + " bytes");
  }
  Segment& segment = segments_.emplace_back(Segment{descriptor, static_cast<char*>(base), bytes, stream, pool, {}});
  segment.blocks.emplace(segment.base, Block{segment.base, bytes, &segment, true, {}, {}});
  by_address_[segment.base] = &segment;
  Ledger::get().add(physical_index_, bytes);
  statistics_.reserved_bytes.add(bytes);
  statistics_.segments.add(1);
  return &segment;
}

Block* DeviceMemory::block_at(const void* address) {
  Segment* segment = nullptr;
  auto after = by_address_.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (after != by_address_.begin()) {
    segment = std::prev(after)->second;
  }
  auto block = segment ? segment->blocks.find(const_cast<char*>(static_cast<const char*>(address)))
                       : std::map<char*, Block>::iterator{};
  if (!segment || block == segment->blocks.end() || block->second.is_free) {
    throw std::invalid_argument("simdev: not the address of an allocation");
  }
  return &block->second;
}

void DeviceMemory::free(void* address) {
  std::lock_guard lock(mutex_);
  Block* block = block_at(address);
  statistics_.allocated_bytes.add(-static_cast<int64_t>(block->bytes));
  statistics_.allocations.add(-1);
  block->is_free = true;
  for (Stream* stream : std::exchange(block->other_users, {})) {
    block->pending.push_back(stream->mark());
  }
  auto& blocks = block->segment->blocks;
  auto at = blocks.find(block->address);
  auto merge = [&](auto first, auto second) {
    bool can_merge = first->second.is_free && second->second.is_free && first->second.pending.empty() &&
                     second->second.pending.empty();
    if (can_merge) {
      first->second.bytes += second->second.bytes;
      blocks.erase(second);
    }
    return can_merge;
  };
  if (std::next(at) != blocks.end()) {
    merge(at, std::next(at));
  }
  if (at != blocks.begin()) {
    merge(std::prev(at), at);
  }
}

void DeviceMemory::record(void* address, Stream* stream) {
  if (has_fault("record_stream_is_ignored")) {
    return;
  }
  std::lock_guard lock(mutex_);
  Block* block = block_at(address);
  auto& users = block->other_users;
  if (stream->id != block->segment->stream && std::find(users.begin(), users.end(), stream) == users.end()) {
    users.push_back(stream);
  }
}

void DeviceMemory::empty_cache() {
  if (!has_fault("empty_cache_does_nothing")) {
    trim(0, true);
  }
}

void DeviceMemory::release_pool(int64_t pool) {
  trim(pool, false);
}

std::vector<std::pair<int64_t, int64_t>> DeviceMemory::segments_of_pool(int64_t pool) {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<int64_t, int64_t>> found;
  for (Segment& segment : segments_) {
    if (segment.pool == pool) {
      int64_t allocated = 0;
      for (auto& [address, block] : segment.blocks) {
        allocated += block.is_free ? 0 : block.bytes;
      }
      found.emplace_back(allocated, segment.bytes);
    }
  }
  return found;
}

void DeviceMemory::trim(int64_t pool, bool any_pool) {
  std::lock_guard lock(mutex_);
  for (auto segment = segments_.begin(); segment != segments_.end();) {
    auto is_free = [](const auto& item) { return item.second.is_free; };
    bool is_unused = std::all_of(segment->blocks.begin(), segment->blocks.end(), is_free);
    if (!is_unused || (!any_pool && segment->pool != pool)) {
      ++segment;
      continue;
    }
    munmap(segment->base, segment->bytes);
    close(segment->descriptor);
    by_address_.erase(segment->base);
    Ledger::get().add(physical_index_, -static_cast<int64_t>(segment->bytes));
    statistics_.reserved_bytes.add(-static_cast<int64_t>(segment->bytes));
    statistics_.segments.add(-1);
    segment = segments_.erase(segment);
  }
}

Segment* DeviceMemory::segment_of(const void* address) {
  std::lock_guard lock(mutex_);
  auto after = by_address_.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (after == by_address_.begin()) {
    return nullptr;
  }
  Segment* segment = std::prev(after)->second;
  return static_cast<const char*>(address) < segment->base + segment->bytes ? segment : nullptr;
}

Statistics DeviceMemory::statistics() {
  std::lock_guard lock(mutex_);
  if (has_fault("constant_statistics")) {
    static const Statistics first = statistics_;
    return first;
  }
  return statistics_;
}

void DeviceMemory::reset_peak() {
  std::lock_guard lock(mutex_);
  if (has_fault("reset_peak_does_nothing")) {
    return;
  }
  auto& s = statistics_;
  for (Usage* usage : {&s.allocated_bytes, &s.reserved_bytes, &s.allocations, &s.segments}) {
    usage->peak = has_fault("reset_peak_forgets_what_is_there") ? 0 : usage->current;
  }
}

void DeviceMemory::reset_accumulated() {
  std::lock_guard lock(mutex_);
  auto& s = statistics_;
  for (Usage* usage : {&s.allocated_bytes, &s.reserved_bytes, &s.allocations, &s.segments}) {
    usage->total = usage->freed = 0;
  }
}

std::pair<size_t, size_t> DeviceMemory::info() {
  return {device_bytes() - std::min<size_t>(device_bytes(), Ledger::get().used(physical_index_)), device_bytes()};
}

void* PinnedMemory::allocate(size_t bytes) {
  void* address = std::aligned_alloc(4096, rounded(std::max<size_t>(bytes, 1), 4096));
  if (!address) {
    throw std::bad_alloc();
  }
  std::lock_guard lock(mutex_);
  blocks_[static_cast<char*>(address)] = {bytes, std::shared_ptr<void>(address, std::free)};
  return address;
}

void PinnedMemory::adopt(void* address, size_t bytes) {
  std::lock_guard lock(mutex_);
  blocks_[static_cast<char*>(address)] = {bytes, std::shared_ptr<void>(address, [](void*) {})};
}

void PinnedMemory::free(void* address) {
  std::lock_guard lock(mutex_);
  blocks_.erase(static_cast<char*>(address));
}

std::shared_ptr<void> PinnedMemory::hold(const void* address) {
  std::lock_guard lock(mutex_);
  auto at = static_cast<const char*>(address);
  auto after = blocks_.upper_bound(const_cast<char*>(at));
  if (after == blocks_.begin()) {
    return nullptr;
  }
  auto& [base, block] = *std::prev(after);
  return at < base + block.first ? block.second : nullptr;
}

}  // namespace simdev
