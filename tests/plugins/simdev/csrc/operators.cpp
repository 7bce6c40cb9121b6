// Operators run on the CPU, over the device's memory. What writes into tensors that exist is queued on the current
// stream, as on an accelerator; what makes new tensors of a shape nobody knows before waits for it.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "backend.h"
#include "faults.h"

namespace simdev {

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) {
    return tensor;
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

namespace {

void push(Stream& stream, std::function<void()> task) {
  stream.push([task = std::move(task), is_inference = c10::InferenceMode::is_enabled()] {
    c10::InferenceMode as_queued(is_inference);  // else what was made in it could not be written
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    task();
  });
}

// ------------------------------------------------------------------------------------------------ making, viewing

at::Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device())));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), c10::GetAllocator(kType), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device())));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::GetAllocator(kType), keys,
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void ensure_storage(const at::Tensor& tensor) {
  size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (tensor.numel() && needed > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  }
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  ensure_storage(self);
  return self;
}

at::Tensor& set_source_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  const c10::DeviceGuard guard(self.device());
  at::native::checkSetStorage(
      self, source, offset, size, stride, /*check_offset_in_bounds=*/false);
  self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  ensure_storage(self);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  c10::SymInt size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  c10::SymInt stride = 1;
  return set_source_storage(self, source, 0, size, stride);
}

// ------------------------------------------------------------------------------------------------ copying

void copy_within_or_between_devices(const at::Tensor& from, const at::Tensor& to) {
  Stream& stream = current_stream(from.device().index());
  Stream& other = current_stream(to.device().index());
  if (&stream != &other) {
    push(stream, [mark = other.mark()] { mark->wait(); });
  }
  push(stream, [to = host_view(to), from = host_view(from)] { to.copy_(from); });
  if (&stream != &other) {
    push(other, [mark = stream.mark()] { mark->wait(); });
  }
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(to.device().index());
  auto pinned = pinned_memory().hold(from.storage().data());
  // Pageable memory may change after the call returns: it is staged.
  at::Tensor source = pinned ? at::from_blob(from.data_ptr(), from.sizes(), from.strides(), from.options()) : from.clone();
  push(stream, [to = host_view(to), source, pinned] { to.copy_(source); });
  if (pinned && !non_blocking) {
    stream.wait();
  }
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(from.device().index());
  auto pinned = pinned_memory().hold(to.storage().data());
  at::Tensor target = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), to.options());
  push(stream, [target, from = host_view(from), pinned] { target.copy_(from); });
  if (!pinned || !non_blocking) {
    stream.wait();
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.is_cpu()) {
    copy_to_device(from.expand(to.sizes()), to, non_blocking);
  } else if (to.is_cpu()) {
    copy_to_host(from.expand(to.sizes()), to, non_blocking);
  } else {
    copy_within_or_between_devices(from.expand(to.sizes()), to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  current_stream(self.device().index()).wait();
  return at::_local_scalar_dense(host_view(self));
}

// ------------------------------------------------------------------------------------------------ everything else

// Of the arguments, so that an operator between tensors of two devices is refused as elsewhere.
struct Arguments {
  std::optional<c10::Device> device;
  bool has_generator = false;
  bool can_queue = true;

  void see(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) {
      return;
    }
    bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    if (tensor.is_cpu()) {
      can_queue &= tensor.dim() == 0 && !is_written;
    } else {
      TORCH_CHECK(!device || *device == tensor.device(), "tensors on ", *device, " and ", tensor.device());
      device = tensor.device();
      // An empty output is there to be resized, which a queued task cannot do.
      can_queue &= !is_written || tensor.numel() > 0;
    }
  }
};

bool only_returns_what_it_writes(const c10::FunctionSchema& schema) {
  bool writes = false;
  for (const auto& argument : schema.arguments()) {
    writes |= argument.alias_info() && argument.alias_info()->isWrite();
  }
  for (const auto& result : schema.returns()) {
    writes &= result.alias_info() && result.alias_info()->isWrite();
  }
  return writes;
}

Arguments look_at(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t first) {
  Arguments found;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = stack[first + i];
    const c10::Argument& argument = schema.arguments()[i];
    if (value.isTensor()) {
      found.see(value.toTensor(), argument);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        found.see(tensor, argument);
      }
    } else if (value.isList()) {  // of optional tensors, perhaps
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) {
          found.see(item.toTensor(), argument);
        }
      }
    }
    found.has_generator |= argument.type()->str() == "Generator?";
  }
  return found;
}

c10::IValue on_host(const c10::IValue& value) {
  if (value.isTensor()) {
    return host_view(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> views;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      views.push_back(host_view(tensor));
    }
    return views;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> views;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      views.push_back(tensor ? std::optional(host_view(*tensor)) : std::nullopt);
    }
    return views;
  }
  return value;
}

void queue(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device) {
  const size_t num_arguments = op.schema().arguments().size();
  const size_t first = stack->size() - num_arguments;
  torch::jit::Stack on_cpu;
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < num_arguments; ++i) {
    const c10::IValue& value = (*stack)[first + i];
    on_cpu.push_back(on_host(value));
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias && alias->isWrite() && results.size() < op.schema().returns().size()) {
      results.push_back(value);
    }
  }
  if (!(has_fault("fused_adamw_does_nothing") && op.schema().name() == "aten::_fused_adamw_")) {
    push(current_stream(device.index()), [op, on_cpu]() mutable {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &on_cpu);
    });
  }
  torch::jit::drop(*stack, num_arguments);
  for (c10::IValue& result : results) {
    torch::jit::push(*stack, std::move(result));
  }
}

void use_host_generator(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t first, c10::Device device) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].type()->str() == "Generator?") {
      c10::IValue& value = stack[first + i];
      value = host_generator(value.isNone() ? default_generator(device.index()) : value.toGenerator());
    }
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Arguments found = look_at(schema, *stack, first);
  const c10::Device device = found.device.value_or(c10::Device(kType, current_device()));
  const c10::DeviceGuard guard(device);
  if (found.has_generator) {
    use_host_generator(schema, *stack, first, device);
  } else if (found.device && found.can_queue && only_returns_what_it_writes(schema)) {
    queue(op, stack, device);
    return;
  }
  at::native::cpu_fallback(op, stack);  // its copies to the host wait for the current stream
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (void* address = self.storage().data_ptr().get()) {
    state(self.device().index()).memory.record(address, &stream_of(stream));
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_source_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

}  // namespace simdev
