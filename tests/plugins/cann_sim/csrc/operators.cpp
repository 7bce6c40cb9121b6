// Operators of torch on npu tensors, run by the CPU's kernels in the device's memory itself.
//
// What makes, views and resizes tensors stays torch_npu's own. Every other aten operator that the CPU has is replaced;
// every operator of torch_npu's own that is not is refused. The log gets a line at the first use of each.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/matmul.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <set>

extern "C" void sim_log(const char* kind, const char* what);

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

const std::set<std::string> kKept = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
    "aten::new_empty_strided", "aten::as_strided", "aten::view", "aten::_reshape_alias",
    "aten::resize_", "aten::resize_as_", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Storage",
    "aten::set_.source_Tensor", "aten::set_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory",
    "aten::_lazy_clone", "aten::_nested_tensor_size", "aten::storage_offset", "aten::detach", "aten::alias",
    "aten::_has_compatible_shallow_copy_type", "aten::unfold", "aten::view_as_real", "aten::view_as_complex",
    "aten::_to_copy",
    "aten::_resize_output_", "aten::is_set_to", "aten::_local_scalar_dense",
};

const std::set<std::string> kKeptOfNpu = {
    "npu::get_npu_format", "npu::npu_format_cast", "npu::npu_format_cast.Tensor", "npu::npu_format_cast_",
    "npu::npu_format_cast_.acl_format", "npu::empty_with_format", "npu::unsafe_empty_with_format",
    "npu::copy_memory_", "npu::get_storage_size", "npu::npu_change_data_ptr",
    "npu::_npu_format_cast", "npu::_npu_format_cast.acl_format", "npu::npu_get_storage_format",
};

void log_once(const char* kind, const std::string& name) {
  static std::mutex lock;
  static std::set<std::string> known;
  std::lock_guard<std::mutex> guard(lock);
  if (known.insert(name).second) {
    sim_log(kind, name.c_str());
  }
}

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool is_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

// ------------------------------------------------------------------------------------------------ random numbers

// A CPU generator for one call, from the state of the device's, which moves on.
at::Generator host_generator(at::Generator of_device) {
  std::lock_guard<std::mutex> guard(of_device.mutex());
  at::Tensor state = of_device.get_state().clone();
  uint64_t seed, offset;
  TORCH_CHECK(state.nbytes() == 16, "the state of an NPU generator has 16 bytes, not ", state.nbytes());
  std::memcpy(&seed, state.data_ptr(), 8);
  std::memcpy(&offset, static_cast<char*>(state.data_ptr()) + 8, 8);
  uint64_t mixed = (seed ^ (offset * 0x9E3779B97F4A7C15ull)) * 0xBF58476D1CE4E5B9ull;
  offset += 4;
  std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset, 8);
  of_device.set_state(state);
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
}

at::Generator device_generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

// For operators that take no generator and draw from the host's: it is another one meanwhile.
struct HostDraws {
  explicit HostDraws(c10::Device device) : host(at::detail::getDefaultCPUGenerator()), before(host.get_state().clone()) {
    host.set_state(host_generator(device_generator(device)).get_state());
  }
  ~HostDraws() {
    host.set_state(before);
  }
  at::Generator host;
  at::Tensor before;
};

// ------------------------------------------------------------------------------------------------ one call

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), num_arguments_(op.schema().arguments().size()), first_(stack->size() - num_arguments_) {
    find_device();
  }

  void run() {
    const c10::OptionalDeviceGuard guard(device_);
    const c10::Device where = device_.value_or(current());
    torch::jit::Stack on_host;
    for (size_t i = 0; i < num_arguments_; ++i) {
      on_host.push_back(to_host(i, where));
    }
    {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
      std::optional<HostDraws> draws;
      if (!has_generator_ && op_.hasTag(at::Tag::nondeterministic_seeded)) {
        draws.emplace(where);
      }
      op_.callBoxed(&on_host);
    }
    write_back();
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < op_.schema().returns().size(); ++i) {
      results.push_back(to_device(on_host[i], i, where));
    }
    torch::jit::drop(*stack_, num_arguments_);
    for (c10::IValue& result : results) {
      torch::jit::push(*stack_, std::move(result));
    }
  }

 private:
  static c10::Device current() {
    return c10::impl::VirtualGuardImpl(kNpu).getDevice();
  }

  const c10::Argument& argument(size_t i) const {
    return op_.schema().arguments()[i];
  }

  bool writes(size_t i) const {
    return argument(i).alias_info() && argument(i).alias_info()->isWrite();
  }

  template <class See>
  static void each_tensor(const c10::IValue& value, See see) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) {
          see(item.toTensor());
        }
      }
    }
  }

  void find_device() {
    for (size_t i = 0; i < num_arguments_; ++i) {
      const c10::IValue& value = (*stack_)[first_ + i];
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_npu(tensor)) {
          bool is_copy = op_.schema().name() == "aten::copy_" || op_.schema().name() == "aten::_copy_from";
          TORCH_CHECK(!device_ || *device_ == tensor.device() || is_copy, "Expected all tensors to be on the same device, "
                      "but found at least two devices, ", *device_, " and ", tensor.device(), "!");
          device_ = tensor.device();
        }
      });
      if (value.isDevice() && value.toDevice().type() == kNpu) {
        c10::Device wanted = value.toDevice();
        makes_on_device_ = true;
        device_ = wanted.has_index() ? wanted : current();
      }
    }
  }

  c10::IValue to_host(size_t i, c10::Device where) {
    const c10::IValue& value = (*stack_)[first_ + i];
    if (argument(i).type()->str() == "Generator?") {
      has_generator_ = true;
      at::Generator given = value.isNone() ? device_generator(where) : value.toGenerator();
      return given.device().type() == kNpu ? host_generator(given) : given;
    }
    if (value.isDevice() && value.toDevice().type() == kNpu) {
      return c10::Device(c10::kCPU);
    }
    if (value.isTensor()) {
      return view(value.toTensor(), writes(i));
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        views.push_back(view(tensor, writes(i)));
      }
      return views;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        views.push_back(tensor ? std::optional(view(*tensor, writes(i))) : std::nullopt);
      }
      return views;
    }
    return value;
  }

  at::Tensor view(const at::Tensor& tensor, bool is_written) {
    if (!is_npu(tensor)) {
      return tensor;
    }
    if (is_written && tensor.numel() == 0) {  // an output that is there to be resized
      at::Tensor made = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
      outputs_.emplace_back(tensor, made);
      return made;
    }
    at::Tensor seen = at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      seen.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    views_.emplace_back(tensor, seen);
    return seen;
  }

  void write_back() {
    for (auto& [tensor, made] : outputs_) {
      if (made.numel()) {
        tensor.resize_(made.sizes());
        at::from_blob(tensor.data_ptr(), made.sizes(), tensor.strides(), made.options()).copy_(made);
      }
    }
  }

  c10::IValue to_device(const c10::IValue& value, size_t position, c10::Device where) {
    if (value.isTensor()) {
      return to_device(value.toTensor(), where);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        results.push_back(to_device(tensor, where));
      }
      return results;
    }
    return value;
  }

  at::Tensor to_device(const at::Tensor& result, c10::Device where) {
    if (!result.defined() || (!device_ && !makes_on_device_)) {
      return result;
    }
    for (auto& [tensor, made] : outputs_) {
      if (made.is_same(result)) {
        return tensor;
      }
    }
    for (auto& [tensor, seen] : views_) {
      if (seen.is_same(result)) {
        return tensor;
      }
    }
    for (auto& [tensor, seen] : views_) {
      if (seen.storage().is_alias_of(result.storage())) {
        int64_t moved = static_cast<char*>(result.data_ptr()) - static_cast<char*>(seen.data_ptr());
        return at::as_strided(tensor, result.sizes(), result.strides(),
                              tensor.storage_offset() + moved / static_cast<int64_t>(result.itemsize()));
      }
    }
    for (size_t i = 0; i < num_arguments_; ++i) {  // a tensor of the host that was given
      const c10::IValue& value = (*stack_)[first_ + i];
      if (value.isTensor() && value.toTensor().is_same(result)) {
        return result;
      }
    }
    at::Tensor there = at::empty_strided(result.sizes(), result.strides(), result.options().device(where));
    if (result.numel()) {
      at::from_blob(there.data_ptr(), there.sizes(), there.strides(), result.options()).copy_(result);
    }
    return there;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  size_t num_arguments_, first_;
  std::optional<c10::Device> device_;
  bool makes_on_device_ = false, has_generator_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> views_, outputs_;
};

void simulate(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  log_once("operator", name_of(op));
  Call(op, stack).run();
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  log_once("refused", name_of(op));
  TORCH_CHECK_NOT_IMPLEMENTED(false, name_of(op), " is not simulated (simulated CANN)");
}

// torch has it for nested tensors only; torch_npu's formula of matmul asks for it.
std::tuple<at::Tensor, at::Tensor> matmul_backward(
    const at::Tensor& grad, const at::Tensor& self, const at::Tensor& other, std::array<bool, 2> mask) {
  log_once("operator", "aten::matmul_backward");
  const c10::DeviceGuard guard(grad.device());
  auto on_host = [](const at::Tensor& tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  };
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  c10::impl::ForceDispatchKeyGuard with_autograd(keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset);
  at::AutoGradMode with_grad(true);
  std::vector<at::Tensor> factors = {on_host(self).requires_grad_(), on_host(other).requires_grad_()};
  at::Tensor product = at::matmul(factors[0], factors[1]);
  std::vector<at::Tensor> found = torch::autograd::grad({product}, factors, {on_host(grad)});
  auto on_device = [&](size_t i) { return mask[i] ? found[i].to(grad.device()) : at::Tensor(); };
  return {on_device(0), on_device(1)};
}

// ------------------------------------------------------------------------------------------------ taking over

bool has_cpu_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// Returns how many operators were taken over and how many are refused.
std::tuple<int64_t, int64_t> take_over() {
  static std::vector<c10::RegistrationHandleRAII> registrations;
  auto& dispatcher = c10::Dispatcher::singleton();
  int64_t taken = 0, refused = 0;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    bool is_aten = name.name.rfind("aten::", 0) == 0, is_npu = name.name.rfind("npu::", 0) == 0;
    if (!op || !(is_aten || is_npu)) {
      continue;
    }
    bool has_npu = op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    bool has_cpu = op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    std::string full = name_of(*op);
    if (kKept.count(full) || kKeptOfNpu.count(full) || full == "aten::matmul_backward") {
      continue;
    }
    bool simulated = is_aten && (has_npu ? has_cpu_kernel(*op) : has_cpu);
    if (!simulated && !has_npu) {
      continue;
    }
    auto kernel = simulated ? c10::KernelFunction::makeFromBoxedFunction<&simulate>()
                            : c10::KernelFunction::makeFromBoxedFunction<&refuse>();
    registrations.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1, kernel, std::nullopt, nullptr, "simulated CANN"));
    ++(simulated ? taken : refused);
  }
  return {taken, refused};
}

TORCH_LIBRARY(cann_sim, m) {
  m.def("take_over() -> (int, int)", take_over);
  m.def("log_operator(str name) -> ()", [](const std::string& name) { log_once("operator", name); });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("matmul_backward", matmul_backward);
}

}  // namespace
