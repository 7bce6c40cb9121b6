// What torch has no word for, as torch.ops.simdev.*: no Python in this extension, so it builds in seconds.

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <torch/library.h>

#include "backend.h"

namespace simdev {

namespace {

// (descriptor, base, bytes) of the shared mapping that holds a tensor; descriptor -1 if this process did not make it.
std::tuple<int64_t, int64_t, int64_t> segment_of(const at::Tensor& tensor) {
  Segment* segment = state(tensor.device().index()).memory.segment_of(tensor.storage().data());
  if (!segment) {
    return {-1, 0, 0};
  }
  return {segment->descriptor, reinterpret_cast<int64_t>(segment->base), static_cast<int64_t>(segment->bytes)};
}

int64_t map_segment(int64_t descriptor, int64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  TORCH_CHECK(base != MAP_FAILED, "simdev: mmap of ", bytes, " bytes of descriptor ", descriptor, " failed");
  return reinterpret_cast<int64_t>(base);
}

void unmap_segment(int64_t base, int64_t bytes) {
  munmap(reinterpret_cast<void*>(base), bytes);
}

// Bytes at an address, as a tensor that owns nothing.
at::Tensor tensor_at(int64_t address, int64_t bytes, int64_t index) {
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(index));
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return at::from_blob(reinterpret_cast<void*>(address), {bytes}, [](void*) {}, options, device);
}

void adopt_pinned(int64_t address, int64_t bytes) {
  pinned_memory().adopt(reinterpret_cast<void*>(address), bytes);
}

void forget_pinned(int64_t address) {
  pinned_memory().free(reinterpret_cast<void*>(address));
}

// device, allocated bytes, total bytes of each segment.
std::vector<int64_t> segments_of_pool(int64_t pool) {
  std::vector<int64_t> numbers;
  for (size_t index = 0; index < visible_devices().size() && is_initialized(); ++index) {
    for (auto [allocated, total] : state(index).memory.segments_of_pool(pool)) {
      numbers.insert(numbers.end(), {static_cast<int64_t>(index), allocated, total});
    }
  }
  return numbers;
}

void release_pool(int64_t pool) {
  for (size_t index = 0; index < visible_devices().size() && is_initialized(); ++index) {
    synchronize(index);
    state(index).memory.release_pool(pool);
  }
}

TORCH_LIBRARY(simdev, m) {
  m.def("is_initialized() -> bool", [] { return is_initialized(); });
  m.def("initialize(int index) -> ()", [](int64_t index) { state(index); });
  m.def("visible_devices() -> int[]", [] {
    return std::vector<int64_t>(visible_devices().begin(), visible_devices().end());
  });
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(index); });
  m.def("host_view(Tensor(a) tensor) -> Tensor(a)", [](const at::Tensor& tensor) { return host_view(tensor); });
  m.def("segment_of(Tensor tensor) -> (int, int, int)", segment_of);
  m.def("map_segment(int descriptor, int bytes) -> int", map_segment);
  m.def("unmap_segment(int base, int bytes) -> ()", unmap_segment);
  m.def("tensor_at(int address, int bytes, int index) -> Tensor", tensor_at);
  m.def("adopt_pinned(int address, int bytes) -> ()", adopt_pinned);
  m.def("forget_pinned(int address) -> ()", forget_pinned);
  m.def("exchange_pool(int pool) -> int", [](int64_t pool) { return exchange_pool(pool); });
  m.def("release_pool(int pool) -> ()", release_pool);
  m.def("segments_of_pool(int pool) -> int[]", segments_of_pool);
}

}  // namespace

}  // namespace simdev
