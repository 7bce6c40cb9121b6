// What torch asks of a device type, and the state behind it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace simdev {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

struct DeviceState {
  explicit DeviceState(int physical_index) : memory(physical_index) {}
  DeviceMemory memory;
  StreamTable streams;
};

// Physical indices that SIMDEV_VISIBLE_DEVICES leaves, in its order. Touches no device.
const std::vector<int>& visible_devices();
bool is_initialized();
// Initialises the device when it is first used.
DeviceState& state(c10::DeviceIndex index);
Stream& stream_of(const c10::Stream& stream);
// The calling thread's.
c10::DeviceIndex current_device();
Stream& current_stream(c10::DeviceIndex index);
void synchronize(c10::DeviceIndex index);
PinnedMemory& pinned_memory();
// The generator on the host that draws for a device's.
at::Generator host_generator(const at::Generator& generator);
const at::Generator& default_generator(c10::DeviceIndex index);
// The same memory as a CPU tensor. Owns nothing: a block is used again only in the order of its stream.
at::Tensor host_view(const at::Tensor& tensor);
// Allocations of the calling thread come from this pool; 0 is the shared one.
int64_t exchange_pool(int64_t pool);

}  // namespace simdev
