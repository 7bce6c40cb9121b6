#include "backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <sstream>

#include "faults.h"

namespace simdev {

namespace {

constexpr int kDevices = 2;

thread_local c10::DeviceIndex current_device_index = 0;
thread_local std::array<int64_t, kDevices> current_stream_ids{};
thread_local int64_t current_pool = 0;

std::array<std::atomic<DeviceState*>, kDevices> states;
std::mutex states_mutex;

// ------------------------------------------------------------------------------------------------ generator

// Draws on the host; what it draws lands on the device.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>()) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    if (!has_fault("rng_state_is_lost")) {
      host.unsafeGetGeneratorImpl()->set_state(state);
    }
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator host;

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

// ------------------------------------------------------------------------------------------------ allocators

c10::CachingAllocator::Stat stat(const Usage& usage) {
  c10::CachingAllocator::Stat stat;
  stat.current = usage.current;
  stat.peak = usage.peak;
  stat.allocated = usage.total;
  stat.freed = usage.freed;
  return stat;
}

void free_on_device(void* context) {
  auto* allocation = static_cast<std::pair<c10::DeviceIndex, void*>*>(context);
  state(allocation->first).memory.free(allocation->second);
  delete allocation;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, current_device_index);
    if (bytes == 0) {
      return {nullptr, device};
    }
    DeviceState& of = state(device.index());
    int64_t stream = current_stream_ids[device.index()];
    void* address = of.memory.allocate(bytes, stream, current_pool);
    if (!address) {
      synchronize(device.index());
      of.memory.empty_cache();
      address = of.memory.allocate(bytes, stream, current_pool);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, address, "simdev out of memory. Tried to allocate ", bytes, " bytes on ", device, "; ",
        of.memory.info().first, " of ", device_bytes(), " are free");
    return {address, new std::pair(device.index(), address), &free_on_device, device};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    current_stream(current_device_index).push([=] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return is_initialized(); }

  void emptyCache(c10::MempoolId_t) override {
    for (size_t index = 0; index < visible_devices().size(); ++index) {
      if (states[index]) {
        synchronize(index);
        state(index).memory.empty_cache();
      }
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get()) {
      state(pointer.device().index()).memory.record(pointer.get(), &stream_of(stream));
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Statistics found = state(index).memory.statistics();
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[all] = stats.active_bytes[all] = stats.requested_bytes[all] = stat(found.allocated_bytes);
    stats.reserved_bytes[all] = stat(found.reserved_bytes);
    stats.allocation[all] = stats.active[all] = stat(found.allocations);
    stats.segment[all] = stat(found.segments);
    stats.num_ooms = found.num_ooms;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override { state(index).memory.reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex index) override { state(index).memory.reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override { return state(index).memory.info(); }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = pinned_memory().allocate(bytes);
    return {address, address, [](void* at) { pinned_memory().free(at); }, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Allocator allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator)

// ------------------------------------------------------------------------------------------------ guard

struct Event {
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return visible_devices().size(); }
  c10::Device getDevice() const override { return {kType, current_device_index}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.index() >= 0 && device.index() < deviceCount(), "simdev has ", int(deviceCount()), " devices, no ",
        device);
    current_device_index = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device_index = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream stream(c10::DeviceIndex index, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  c10::DeviceIndex index_of(c10::Device device) const {
    return device.has_index() ? device.index() : current_device_index;
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_stream_ids[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(index_of(device), state(index_of(device)).streams.next().id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    int64_t before = std::exchange(current_stream_ids[to.device_index()], to.id());
    return stream(to.device_index(), before);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return has_fault("stream_query_lies") || stream_of(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override { stream_of(stream).wait(); }
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronize(index); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator.recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->mark = stream_of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && !has_fault("waits_are_ignored")) {
      stream_of(stream).push([mark = static_cast<Event*>(event)->mark] { mark->wait(); });
    }
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->mark->is_reached(); }
  void synchronizeEvent(void* event) const override {
    if (event) {
      static_cast<Event*>(event)->mark->wait();
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(from) && queryEvent(to), "simdev: both events must be done before their times are compared");
    auto between = static_cast<Event*>(to)->mark->time() - static_cast<Event*>(from)->mark->time();
    if (has_fault("events_tell_seconds")) {
      return std::chrono::duration<double>(between).count();
    }
    return has_fault("events_tell_no_time") ? 0.0 : std::chrono::duration<double, std::milli>(between).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ------------------------------------------------------------------------------------------------ hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !visible_devices().empty(); }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return states[index] != nullptr; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return visible_devices().size(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kType, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device_index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* address) const override { return pinned_memory().hold(address) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* address) const override {
    for (size_t index = 0; index < visible_devices().size(); ++index) {
      if (states[index] && state(index).memory.segment_of(address)) {
        return {kType, static_cast<c10::DeviceIndex>(index)};
      }
    }
    return {kType, current_device_index};  // opened from another process
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device_index : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device_index : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr fresh = allocator.allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept) {
      allocator.copy_data(fresh.get(), storage.data(), kept);
    }
    storage.set_data_ptr(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

[[maybe_unused]] const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

// ------------------------------------------------------------------------------------------------ state

const std::vector<int>& visible_devices() {
  static const std::vector<int> visible = [] {
    std::vector<int> found;
    const char* text = std::getenv("SIMDEV_VISIBLE_DEVICES");
    std::stringstream list(text ? text : "0,1");
    for (std::string item; std::getline(list, item, ',');) {
      // As CUDA does: what is not a device ends the list.
      if (item.size() != 1 || item[0] < '0' || item[0] >= '0' + kDevices) {
        break;
      }
      found.push_back(item[0] - '0');
    }
    return found;
  }();
  return visible;
}

bool is_initialized() {
  return std::any_of(states.begin(), states.end(), [](const auto& state) { return state != nullptr; });
}

DeviceState& state(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < static_cast<int>(visible_devices().size()), "simdev has ", visible_devices().size(),
      " devices, no ", int(index));
  if (!states[index]) {
    std::lock_guard lock(states_mutex);
    if (!states[index]) {
      states[index] = new DeviceState(visible_devices()[index]);
      at::globalContext().lazyInitDevice(kType);  // torch asks no device before it whether memory is page-locked
    }
  }
  return *states[index];
}

Stream& stream_of(const c10::Stream& stream) {
  return state(stream.device_index()).streams.get(stream.id());
}

c10::DeviceIndex current_device() {
  return current_device_index;
}

Stream& current_stream(c10::DeviceIndex index) {
  return state(index).streams.get(current_stream_ids[index]);
}

void synchronize(c10::DeviceIndex index) {
  if (!has_fault("synchronize_does_nothing")) {
    for (Stream* stream : state(index).streams.all()) {
      stream->wait();
    }
  }
}

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

at::Generator host_generator(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours, "expected a generator of simdev, got one of ", generator.device());
  return ours->host;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kDevices; ++i) {
      made.push_back(at::make_generator<Generator>(i));
    }
    return made;
  }());
  return generators->at(index);
}

int64_t exchange_pool(int64_t pool) {
  return std::exchange(current_pool, pool);
}

}  // namespace simdev
