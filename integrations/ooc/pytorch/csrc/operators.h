// What is known of an operator, and how it is run: around each that touches data, its tensors' storages are brought onto
// the device and pinned, the operator is redispatched with our key excluded, and the pins are left to the core. Operators
// that only change metadata, or that call other operators (composite ones, Python kernels and subclasses), are passed on
// as they are.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "collectives.h"
#include "function_scope.h"
#include "operands.h"
#include "placing.h"
#include "python_key.h"
#include "recompute.h"
#include "splitting.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// Layouts whose views touch data, and whose tensors have parts.
inline const c10::DispatchKeySet kUnusual = c10::DispatchKeySet(c10::DispatchKey::Sparse) |
                                            c10::DispatchKeySet(c10::DispatchKey::SparseCsr) |
                                            c10::DispatchKeySet(c10::DispatchKey::NestedTensor) |
                                            c10::DispatchKeySet(c10::DispatchKey::MkldnnCPU);

struct OperatorInfo {
  uint32_t id = 0;
  bool pass_on = false;          // nothing of ours, or never touches data
  bool composite = false;        // calls other operators, unless the backend has a kernel of its own
  bool view = false;             // touches no data of a strided tensor
  bool whole_list = false;       // _foreach_*, _fused_*: elements are independent, the lists may be cut
  bool slice_last_tensor = false;  // addcdiv_.Tensor and the like: a tensor with one scalar for each element
  bool makes_lengths = false;    // composite operators and autograd read its integer results without an operator
  bool makes_unusual = false;    // the result may be of an unusual layout though no argument is
  bool keep_allocations = false; // the result hides memory from us (custom classes)
  bool hold_operands = false;    // the result refers to them
  bool around_views = false;     // the kernel reads the whole storage of a view
  bool picks_algorithm = false;  // cuDNN's convolutions, by the workspace that they get
  Collective collective = Collective::kNone;
  std::vector<uint32_t> access;  // of each argument
  size_t device_argument = SIZE_MAX;  // where a factory's result is to be; SIZE_MAX: there is none
  SplitState* split = nullptr;   // what to do if it does not fit; lives as long as the process
};

inline bool starts_with(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

// Operators that write arguments which their schema declares as read only (found by strict mode over op_db): normalisations
// their running statistics, the others any.
inline bool schema_hides_write(std::string_view name, std::string_view argument) {
  static constexpr std::string_view kAny[] = {"aten::_cudnn_rnn", "aten::mkldnn_rnn_layer_backward"};
  static constexpr std::string_view kStatistics[] = {
      "aten::native_batch_norm", "aten::cudnn_batch_norm",  "aten::miopen_batch_norm",
      "aten::_batch_norm_impl_index", "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
      "aten::native_batch_norm.out"};
  if (std::ranges::find(kAny, name) != std::end(kAny)) return true;
  return argument.starts_with("running_") && std::ranges::find(kStatistics, name) != std::end(kStatistics);
}

// This one is declared as composite, though it reads its input itself where no gradient is wanted. Composite operators
// are called above our key, so this one is registered to pass it too (adapter.cpp).
constexpr const char* kComputes = "aten::max_pool1d";

inline OperatorInfo inspect(const c10::OperatorHandle& op) {
  OperatorInfo info;
  const auto& schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  info.id = ooc_core_function_id(core, name.c_str());
  const std::string space(op.operator_name().getNamespace().value_or(""));
  info.composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && name != kComputes;
  bool aliases = false, writes = false, tensors = false;
  // A schema outside PyTorch's own operators is not believed when it declares no writes.
  const bool trusted = space == "aten" || space == "prims" || space == "torchvision" || space == "ooc";
  for (const auto& argument : schema.arguments()) {
    const bool write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    writes |= write;
    info.access.push_back(write || !trusted || schema_hides_write(name, argument.name()) ? OOC_READ | OOC_WRITE : OOC_READ);
    tensors |= argument.type()->isSubtypeOf(*c10::TensorType::get());
    if (argument.type()->str() == "Device?") info.device_argument = info.access.size() - 1;
  }
  for (const auto& result : schema.returns()) {
    aliases |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    const auto kind = result.type()->kind();
    info.keep_allocations |= kind == c10::TypeKind::ClassType || kind == c10::TypeKind::AnyType ||
                             kind == c10::TypeKind::CapsuleType;
  }
  info.view = aliases && !writes && tensors && space == "aten";
  info.pass_on = space == "ooc" || space == "ooc_split";
  info.split = new_split_state(op);
  info.makes_unusual = name.find("mkldnn") != std::string::npos || name.find("nested") != std::string::npos;
  static constexpr std::string_view kAroundViews[] = {"aten::as_strided_copy", "aten::as_strided_scatter", "aten::diagonal_scatter",
                                                      "aten::select_scatter", "aten::slice_scatter"};
  info.around_views = std::ranges::any_of(kAroundViews, [&](std::string_view each) { return starts_with(name, each); });
  info.makes_lengths = name == "aten::_pack_padded_sequence";
  info.collective = collective_of(space, name);
  const bool goes_on = info.collective == Collective::kWork || info.collective == Collective::kResult;
  info.hold_operands = info.keep_allocations && !goes_on;
  info.keep_allocations |= goes_on;
  info.whole_list = starts_with(name, "aten::_foreach_") || starts_with(name, "aten::_fused_adam") ||
                    starts_with(name, "aten::_fused_sgd") || starts_with(name, "aten::_fused_adagrad") ||
                    starts_with(name, "aten::_amp_foreach_non_finite_check_and_unscale_");
  info.picks_algorithm = kWithCuda && name.find("conv") != std::string::npos;
  info.slice_last_tensor = starts_with(name, "aten::_foreach_addc") && name.find(".Tensor") != std::string::npos;
  return info;
}

inline const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const void*, OperatorInfo>;  // its nodes never move
  struct Seen {
    const void* key;
    const OperatorInfo* info;
  };
  thread_local Seen seen[256];  // for each place, the operator seen last whose address has these bits
  const void* key = &op.schema();
  Seen& entry_of_key = seen[reinterpret_cast<uintptr_t>(key) / alignof(std::max_align_t) % std::size(seen)];
  if (entry_of_key.key == key) return *entry_of_key.info;
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = known->try_emplace(key);
  if (fresh) entry->second = inspect(op);
  entry_of_key = {key, &entry->second};
  return entry->second;
}

// ---- running --------------------------------------------------------------------------------------------------------

inline void pin_parts(std::initializer_list<at::Tensor> tensors) {
  Operands parts;
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, OOC_READ, parts);
  for (const ooc_operand& part : parts) ooc_core_pin(core, part.address, OOC_READ, nullptr);
}

// Pins what a result hides. Returns whether its memory is opaque.
inline bool pin_hidden_parts(const c10::IValue& result) {
  if (result.isTensorList()) {
    bool any = false;
    for (const at::Tensor& tensor : result.toTensorList()) any |= pin_hidden_parts(tensor);
    return any;
  }
  if (!result.isTensor() || !result.toTensor().defined()) return false;
  const c10::TensorImpl* impl = result.toTensor().unsafeGetTensorImpl();
  if (is_nested(impl->key_set())) {
    // Composite operators, autograd and size() read these three, of a few bytes for each part, at any time.
    const auto* nested = static_cast<const at::native::NestedTensorImpl*>(impl);
    pin_parts({nested->get_nested_sizes(), nested->get_nested_strides(), nested->get_storage_offsets()});
  }
  return impl->key_set().has(c10::DispatchKey::MkldnnCPU);
}

inline bool any_unusual(c10::DispatchKeySet keys) { return (keys.raw_repr() & kUnusual.raw_repr()) != 0; }

// Runs an operator once. After an exception `began` says whether the kernel was called.
inline void run_once(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack, bool on_host, bool& began) {
  Operands operands;
  const size_t count = info.access.size();
  const size_t first = stack->size() - count;
  const auto add_all = [&] {
    for (size_t i = 0; i < count; ++i) add_value((*stack)[first + i], info.access[i], operands);
  };
  if (__builtin_expect(info.around_views, false)) {
    const ModeGuard whole(kRanges, false);
    add_all();
  } else {
    add_all();
  }
  Placing* placing = Placing::current();
  if (placing != nullptr) placing->add_operand(operands);
  FunctionScope scope(info.id, operands, on_host);
  began = true;
  const Operands held = info.hold_operands || info.collective != Collective::kNone ? operands : Operands{};
  if (info.collective == Collective::kWork) make_room_for_scratch(c10::toString(op.operator_name()), torch::jit::last(*stack, count));
  Keeping keeping(op, info, keys, *stack, on_host);
  {
    const CallMemory::During during(placing != nullptr && !scope.nested() ? placing->memory() : nullptr);
    c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    const auto kernel = [&] { op.redispatchBoxed(keys & kBelow, stack); };
    if (info.picks_algorithm && on_cuda()) run_insisting(kernel);
    else kernel();
  }
  keeping.end(*stack);
  if (info.collective != Collective::kNone)
    hold_while_it_works(info.collective, torch::jit::last(*stack, op.schema().returns().size()), held, !scope.nested());
  if (scope.nested()) return;
  bool keep = info.keep_allocations;
  if (info.makes_unusual || any_unusual(keys))
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) keep |= pin_hidden_parts((*stack)[i]);
  if (info.makes_lengths) pin_parts({stack->back().toTensor()});
  const int status = scope.end(keep, [&](Operands& results) {
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) add_value((*stack)[i], OOC_READ, results);
  });
  if (status != OOC_OK) {
    torch::jit::drop(*stack, op.schema().returns().size());
    raise(status);
  }
  if (info.hold_operands)
    for (const ooc_operand& operand : held) ooc_core_pin(core, operand.address, operand.access, nullptr);
}

inline void run(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) {
  bool began = false;
  if (!splitting.load(std::memory_order_relaxed)) return run_once(op, info, keys, stack, false, began);
  if (any_remembered.load(std::memory_order_relaxed) && info.split->any.load(std::memory_order_relaxed)) {
    const Way way = remembered_way(info, *stack);
    if (way != Way::kWhole) return run_in_way(way, op, info, keys, stack);
  }
  const KeptArguments kept(*info.split, *stack, info.access.size());
  try {
    run_once(op, info, keys, stack, false, began);
  } catch (const c10::OutOfMemoryError& error) {
    if (!kept.restore(*stack)) throw;
    recover(op, info, keys, stack, began, error);
  }
}

// ---- operators over whole lists -------------------------------------------------------------------------------------

inline uint64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->unsafe_storage() ? tensor.nbytes() : 0;
}

// Returns the bytes of element i of all lists together, for each i, or nothing where the lists cannot be cut.
inline std::vector<uint64_t> element_bytes(const torch::jit::Stack& stack, size_t first) {
  std::vector<uint64_t> bytes;
  for (size_t a = first; a < stack.size(); ++a) {
    if (!stack[a].isTensorList()) continue;
    const auto list = stack[a].toTensorList();
    if (list.empty()) continue;
    if (bytes.empty()) bytes.resize(list.size());
    if (list.size() != bytes.size()) return {};
    for (size_t i = 0; i < list.size(); ++i) bytes[i] += bytes_of(list.get(i));
  }
  return bytes;
}

inline c10::IValue cut(const c10::IValue& value, size_t begin, size_t end, size_t whole) {
  if (value.isTensorList()) {
    const auto list = value.toTensorList();
    if (list.size() != whole) return value;
    c10::List<at::Tensor> part;
    for (size_t i = begin; i < end; ++i) part.push_back(list.get(i));
    return part;
  }
  if (value.isList() && value.toListRef().size() == whole) {
    auto part = value.toList().copy();
    part.clear();
    for (size_t i = begin; i < end; ++i) part.push_back(value.toListRef()[i]);
    return part;
  }
  return value;
}

inline void run_in_slices(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const size_t count = info.access.size(), first = stack->size() - count;
  const std::vector<uint64_t> bytes = element_bytes(*stack, first);
  uint64_t total = 0;
  for (uint64_t b : bytes) total += b;
  if (bytes.size() < 2 || total <= slice_bytes) return run(op, info, keys, stack);
  const std::vector<c10::IValue> arguments(stack->begin() + static_cast<ptrdiff_t>(first), stack->end());
  torch::jit::drop(*stack, count);
  const bool returns = !op.schema().returns().empty();
  c10::List<at::Tensor> results;
  for (size_t begin = 0; begin < bytes.size();) {
    size_t end = begin;
    for (uint64_t sum = 0; end < bytes.size() && (end == begin || sum + bytes[end] <= slice_bytes); ++end) sum += bytes[end];
    torch::jit::Stack part;
    for (size_t a = 0; a < count; ++a) {
      const bool scalars = info.slice_last_tensor && a + 1 == count && arguments[a].isTensor();
      part.push_back(scalars ? c10::IValue(arguments[a].toTensor().narrow(0, static_cast<int64_t>(begin),
                                                                         static_cast<int64_t>(end - begin)))
                             : cut(arguments[a], begin, end, bytes.size()));
    }
    run(op, info, keys, &part);
    if (returns)
      for (const at::Tensor& tensor : part.back().toTensorList()) results.push_back(tensor);
    begin = end;
  }
  if (returns) stack->emplace_back(std::move(results));
}

// `device` gives the argument that says where the result is to be. It is asked where no tensor says so.
template <class GetDevice>
bool passes_on(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, GetDevice device) {
  if (info.pass_on || (info.view && !any_unusual(keys)) || in_mode(kPlain)) return true;
  // The memory of CPU tensors is not ours then; operators that it calls come here by themselves.
  if (on_cuda() && !keys.has_backend(c10::BackendComponent::CUDABit)) {
    if (keys.has_backend(c10::BackendComponent::CPUBit)) return true;
    if (info.device_argument != SIZE_MAX && !device().value_or(c10::kCPU).is_cuda()) return true;
  }
  return info.composite && !op.hasKernelForDispatchKey((keys & kBelow).highestPriorityTypeId());
}

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (core == nullptr) return op.redispatchBoxed(keys & kBelow, stack);
  if (kAbovePython && keys.has(c10::DispatchKey::Python)) {
    const IntoPython into;
    return op.redispatchBoxed(keys & kBelow, stack);
  }
  const OperatorInfo& info = info_of(op);
  const auto device = [&] { return (*stack)[stack->size() - info.access.size() + info.device_argument].toOptional<at::Device>(); };
  if (passes_on(op, info, keys, device)) op.redispatchBoxed(keys & kBelow, stack);
  else if (info.whole_list) run_in_slices(op, info, keys, stack);
  else run(op, info, keys, stack);
}

}  // namespace ooc_torch
