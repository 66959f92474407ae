// Operators: each is launched on the current stream, and computed there by torch's kernel for the CPU.
//
// The work on a stream knows addresses and shapes, and holds no tensor: memory that is freed too early is used again.

#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/StreamGuard.h>
#include <torch/library.h>

namespace late {
namespace {

bool is_late(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// The same values, where the device's thread finds them. Owns nothing.
at::Tensor on_shadow(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  at::Tensor made;
  if (tensor.numel() == 0)
    made = at::empty(tensor.sizes(), options);
  else
    made = at::from_blob(shadow(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_neg()) made._set_neg(true);
  if (tensor.is_conj()) made._set_conj(true);
  return made;
}

// The argument as a kernel for the CPU takes it. Values of the host are copied: it may change them after the launch.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (is_late(tensor)) return on_shadow(tensor);
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!is_late(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Map each tensor in an argument.
template <typename F>
c10::IValue mapped(const c10::IValue& value, F map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() ? std::optional(map(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// The tensors in arguments, as their operator uses them; results are written.
Accesses accesses_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  Accesses found;
  // The schema of this one does not say that it writes running_mean and running_var.
  bool has_statistics = op.schema().name() == "aten::native_batch_norm" && arguments[5].toBool();
  for (size_t index = 0; index < arguments.size(); ++index) {
    const auto* alias = op.schema().arguments()[index].alias_info();
    bool writes = (alias != nullptr && alias->isWrite()) || (has_statistics && (index == 3 || index == 4));
    mapped(arguments[index], [&](const at::Tensor& tensor) {
      if (is_late(tensor)) found.push_back(access_to(tensor, writes));
      return tensor;
    });
  }
  return found;
}

struct Launch {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  int generator = -1;  // the argument that is one
  uint64_t seed = 0;
};

// Compute with torch's kernel for the CPU. Called where the arguments' memory may be read.
torch::jit::Stack compute(const Launch& launch) {
  at::AutoDispatchBelowADInplaceOrView below;
  torch::jit::Stack stack(launch.arguments.begin(), launch.arguments.end());
  if (launch.generator >= 0) stack[launch.generator] = at::detail::createCPUGenerator(launch.seed);
  launch.op.callBoxed(&stack);
  return stack;
}

int device_of_arguments(const std::vector<c10::IValue>& arguments) {
  int found = -1;
  for (const auto& value : arguments)
    mapped(value, [&](const at::Tensor& tensor) {
      if (is_late(tensor)) {
        TORCH_CHECK(found < 0 || found == tensor.device().index() || tensor.dim() == 0, "tensors on two late devices");
        if (found < 0) found = tensor.device().index();
      }
      return tensor;
    });
  return found < 0 ? current_device() : found;
}

// Arguments of outputs (out=...) get the shape of the result, if they have none yet.
void resize_outputs(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  const auto& schema = op.schema();
  bool needed = false;
  for (size_t index = 0; index < arguments.size(); ++index)
    if (schema.arguments()[index].is_out() && arguments[index].isTensor()) needed |= arguments[index].toTensor().numel() == 0;
  if (!needed) return;
  torch::jit::Stack stack;
  for (const auto& value : arguments) stack.push_back(mapped(value, on_meta));
  std::vector<c10::IValue> meta(stack.begin(), stack.end());
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
  for (size_t index = 0; index < arguments.size(); ++index)
    if (schema.arguments()[index].is_out() && arguments[index].isTensor())
      if (auto sizes = meta[index].toTensor().sizes(); sizes != arguments[index].toTensor().sizes())
        arguments[index].toTensor().resize_(sizes);
}

// New tensors for the results, by computing without values. Empty: it cannot be done so.
std::optional<std::vector<c10::IValue>> make_results(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, int device) {
  for (const auto& result : op.schema().returns())
    if (result.type()->kind() != c10::TypeKind::TensorType && !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
      return std::nullopt;
  torch::jit::Stack stack;
  for (const auto& value : arguments) {
    c10::IValue meta = mapped(value, on_meta);
    if (meta.isDevice()) meta = c10::Device(c10::kMeta);
    stack.push_back(std::move(meta));
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  // The CPU's kernel keeps statistics in the type of its parameters, others in float32.
  bool has_statistics = op.schema().name() == "aten::native_layer_norm" && arguments[2].isTensor();
  std::vector<c10::IValue> results;
  for (const auto& value : stack)
    results.push_back(mapped(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto options = tensor.options().device(c10::Device(kType, device));
      if (has_statistics && !results.empty()) options = options.dtype(arguments[2].toTensor().dtype());
      return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    }));
  return results;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  int device = device_of_arguments(arguments);
  c10::OptionalDeviceGuard guard(c10::Device(kType, device));
  resize_outputs(op, arguments);

  Launch launch{op, {}, -1, 0};
  for (size_t index = 0; index < count; ++index) {
    launch.arguments.push_back(mapped(arguments[index], on_cpu));
    if (arguments[index].isDevice()) launch.arguments.back() = c10::Device(c10::kCPU);
    if (schema.arguments()[index].type()->str().find("Generator") != std::string::npos) {
      launch.generator = index;
      std::optional<at::Generator> given;
      if (!arguments[index].isNone()) given = arguments[index].toGenerator();
      launch.seed = next_seed(device, given);
    }
  }

  bool writes = false;
  for (const auto& argument : schema.arguments()) writes |= argument.alias_info() && argument.alias_info()->isWrite();
  if (writes) {  // the results, if any, are arguments
    late::launch(current_stream(device), schema.name(), accesses_of(op, arguments), [launch] {
      compute(launch);
      return true;
    });
    for (const auto& result : schema.returns()) {
      TORCH_CHECK(result.alias_info(), schema.name(), " writes and makes tensors: not known to the late device");
      for (size_t index = 0; index < count; ++index)
        if (schema.arguments()[index].alias_info() && *schema.arguments()[index].alias_info() == *result.alias_info()) {
          stack->push_back(arguments[index]);
          break;
        }
    }
    return;
  }
  for (const auto& result : schema.returns())
    TORCH_CHECK(!result.alias_info(), schema.name(), " returns a view: not known to the late device");

  auto results = make_results(op, arguments, device);
  if (!results) {  // its shape depends on values: the host waits
    synchronize_stream(current_stream(device));
    note_host(schema.name(), accesses_of(op, arguments));
    for (const auto& value : compute(launch))
      stack->push_back(mapped(value, [&](const at::Tensor& tensor) {
        return tensor.defined() ? tensor.to(c10::Device(kType, device)) : tensor;
      }));
    return;
  }
  std::vector<c10::IValue> places;
  Accesses accesses = accesses_of(op, arguments);
  for (const auto& value : *results) {
    places.push_back(mapped(value, on_cpu));
    mapped(value, [&](const at::Tensor& tensor) {
      if (is_late(tensor)) accesses.push_back(access_to(tensor, true));
      return tensor;
    });
  }
  late::launch(current_stream(device), schema.name(), accesses, [launch, places] {
    auto values = compute(launch);
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t index = 0; index < places.size(); ++index) {
      auto to = places[index].isTensor() ? std::vector{places[index].toTensor()} : places[index].toTensorVector();
      auto from = values[index].isTensor() ? std::vector{values[index].toTensor()} : values[index].toTensorVector();
      for (size_t number = 0; number < to.size(); ++number)
        if (to[number].defined() && from[number].defined()) to[number].copy_(from[number]);
    }
    return true;
  });
  for (auto& value : *results) stack->push_back(std::move(value));
}

// --- memory and views
at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.dtype().itemsize();
  return at::cpu::set_(self, source, 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_whole_storage(self, at::empty({0}, self.options()).storage());
}

// --- copies
// A tensor where the device finds it, and what a copy does there.
struct End {
  at::Tensor place;
  Accesses accesses;
  at::Tensor kept;  // until the copy is over
};

End on_device(const at::Tensor& tensor, bool is_write) { return {on_shadow(tensor), {access_to(tensor, is_write)}, {}}; }

// Memory of the host as the device sees it. A tensor that torch pinned is kept until then, as torch's own pinned memory
// is not used again before; nothing keeps memory that others registered, or that is not pinned.
End in_host_memory(const at::Tensor& tensor, bool is_write) {
  auto pinned = find_pinned(tensor.data_ptr());
  void* address = pinned ? pinned->alias : tensor.data_ptr();
  End end{at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options()), {}, {}};
  if (pinned && !pinned->is_registered) end.kept = tensor;
  if (pinned) {
    end.accesses.push_back(access_to(tensor, is_write));
    end.accesses.back().memory = pinned->start;
  }
  return end;
}

void copy_on(c10::Stream stream, const End& to, const End& from) {
  Accesses accesses = from.accesses;
  accesses.insert(accesses.end(), to.accesses.begin(), to.accesses.end());
  launch(stream, "copy", accesses, [to, from] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.place.copy_(from.place);
    return true;
  });
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (is_late(source) && is_late(target)) {
    c10::Stream from = current_stream(source.device().index()), to = current_stream(target.device().index());
    if (from != to) block(to, record(from));
    copy_on(to, on_device(target, true), on_device(source, false));
    if (from != to) block(from, record(to));
    return target;
  }
  c10::Stream stream = current_stream((is_late(target) ? target : source).device().index());
  if (is_late(target)) {
    bool is_read_late = non_blocking && source.numel() > 0 && is_pinned(source.data_ptr());
    copy_on(stream, on_device(target, true), is_read_late ? in_host_memory(source, false) : End{source.clone(), {}, {}});
  } else {
    copy_on(stream, in_host_memory(target, true), on_device(source, false));
  }
  if (!non_blocking) synchronize_stream(stream);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize_stream(current_stream(self.device().index()));
  note_host("item", {access_to(self, false)});
  return at::_local_scalar_dense(on_shadow(self));
}

int64_t choose_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // of simple operations
}

void record_stream(at::Tensor& self, c10::Stream stream) { record_on_stream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("_fused_sdp_choice", choose_attention);
  library.impl("record_stream", record_stream);
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());  // not torch's of parts
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // what models of the tests use
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

}  // namespace

Access access_to(const at::Tensor& tensor, bool is_write) {
  auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  uintptr_t elements = tensor.numel() > 0;
  for (int64_t dimension = 0; elements > 0 && dimension < tensor.dim(); ++dimension)
    elements += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  return {tensor.storage().data(), begin, begin + elements * tensor.element_size(), is_write};
}

}  // namespace late
