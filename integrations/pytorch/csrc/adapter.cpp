// PyTorch's side of the core: a CPU allocator whose memory lies on the device, and a boxed fallback for
// c10::DispatchKey::Fake that sees every operator below autograd and above the backends.
//
// Around each operator that touches data: its tensors' storages are brought onto the device and pinned, the operator is
// redispatched with the key excluded, and the pins are left to the core. Operators that only change metadata, or that
// call other operators (composite ones, Python kernels and subclasses), are passed on as they are.
//
// Built against the installed PyTorch at first use (integrations/pytorch/build.py); the library is reached as
// torch.ops.ooc.*, so no Python headers are needed.
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/arange_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gt_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/lt_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/ne_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/scalar_tensor_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>
#include <ATen/ops/zeros_like_ops.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ooc_alloc.h"

namespace {

constexpr auto kKey = c10::DispatchKey::Fake;
const c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kKey);
// Layouts whose views touch data, and whose tensors have parts.
const c10::DispatchKeySet kUnusual = c10::DispatchKeySet(c10::DispatchKey::Sparse) |
                                     c10::DispatchKeySet(c10::DispatchKey::SparseCsr) |
                                     c10::DispatchKeySet(c10::DispatchKey::NestedTensor) |
                                     c10::DispatchKeySet(c10::DispatchKey::MkldnnCPU);

ooc_core* core = nullptr;  // set once; stays valid for the life of the process
bool allocating = false;
uint64_t slice_bytes = uint64_t{64} << 20, small_bytes = 0;
uintptr_t range_base = 0, range_bytes = 0;

[[noreturn]] void raise(int status) {
  const std::string message = ooc_last_error();
  TORCH_CHECK_WITH(OutOfMemoryError, status != OOC_OUT_OF_MEMORY, message);
  TORCH_CHECK(false, message);
}

// ---- the allocator --------------------------------------------------------------------------------------------------

// What PyTorch makes without an operator it also reads without one if it is small: numbers wrapped as tensors, states of
// random generators (5056 bytes). With the usual limit of small allocations these never leave anyway.
constexpr size_t kStaysOutsideFunctions = 8192;

void free_block(void* address) {
  if (address != nullptr) ooc_core_free(core, address);
}

class DeviceBackedCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    if (bytes > 0) {
      address = ooc_core_malloc(core, bytes);
      if (address == nullptr) raise(OOC_OUT_OF_MEMORY);
      if (bytes > small_bytes && bytes <= kStaysOutsideFunctions && !ooc_core_in_function(core))
        ooc_core_pin(core, address, OOC_READ | OOC_WRITE, nullptr);
    }
    return {address, address, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }  // oneDNN allocates raw blocks
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

DeviceBackedCpuAllocator cpu_allocator;
c10::Allocator* plain_cpu_allocator = nullptr;

// ---- what is known of an operator -----------------------------------------------------------------------------------

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
  bool hold_operands = false;    // the work goes on after the operator has returned, or the result refers to them
  std::vector<uint32_t> access;  // by argument
};

bool starts_with(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

// Operators that write arguments which their schema declares as read only (found by strict mode over op_db).
bool schema_hides_writes(std::string_view name) {
  static constexpr std::string_view kNames[] = {
      "aten::native_batch_norm", "aten::cudnn_batch_norm",  "aten::miopen_batch_norm",
      "aten::_batch_norm_impl_index", "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
      "aten::native_batch_norm.out", "aten::_cudnn_rnn", "aten::mkldnn_rnn_layer_backward"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

OperatorInfo inspect(const c10::OperatorHandle& op) {
  OperatorInfo info;
  const auto& schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  info.id = ooc_core_function_id(core, name.c_str());
  const std::string space(op.operator_name().getNamespace().value_or(""));
  info.composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  bool aliases = false, writes = false, tensors = false;
  // A schema outside PyTorch's own operators is not believed when it declares no writes.
  const bool trusted = space == "aten" || space == "prims" || space == "torchvision" || space == "ooc";
  for (const auto& argument : schema.arguments()) {
    const bool write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    writes |= write;
    info.access.push_back(write || !trusted || schema_hides_writes(name) ? OOC_READ | OOC_WRITE : OOC_READ);
    tensors |= argument.type()->isSubtypeOf(*c10::TensorType::get());
  }
  for (const auto& result : schema.returns()) {
    aliases |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    const auto kind = result.type()->kind();
    info.keep_allocations |= kind == c10::TypeKind::ClassType || kind == c10::TypeKind::AnyType ||
                             kind == c10::TypeKind::CapsuleType;
  }
  info.view = aliases && !writes && tensors && space == "aten";
  info.pass_on = space == "ooc";
  info.makes_unusual = name.find("mkldnn") != std::string::npos || name.find("nested") != std::string::npos;
  info.makes_lengths = name == "aten::_pack_padded_sequence";
  info.hold_operands = info.keep_allocations || space == "c10d" || space == "_c10d_functional";
  info.keep_allocations |= info.hold_operands;
  info.whole_list = starts_with(name, "aten::_foreach_") || starts_with(name, "aten::_fused_adam") ||
                    starts_with(name, "aten::_fused_sgd") || starts_with(name, "aten::_fused_adagrad") ||
                    starts_with(name, "aten::_amp_foreach_non_finite_check_and_unscale_");
  info.slice_last_tensor = starts_with(name, "aten::_foreach_addc") && name.find(".Tensor") != std::string::npos;
  return info;
}

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const void*, OperatorInfo>;  // nodes never move
  struct Seen {
    const void* key;
    const OperatorInfo* info;
  };
  thread_local Seen seen[256];  // the one seen last with these bits of its address
  const void* key = &op.schema();
  Seen& entry_of_key = seen[reinterpret_cast<uintptr_t>(key) / alignof(std::max_align_t) % std::size(seen)];
  if (entry_of_key.key == key) return *entry_of_key.info;
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = known->try_emplace(key);
  if (fresh) entry->second = inspect(op);
  entry_of_key = {key, &entry->second};
  return entry->second;
}

// ---- operands -------------------------------------------------------------------------------------------------------

// Few, and made for every operator: so not on the heap.
class Operands {
 public:
  void push_back(const ooc_operand& operand) {
    if (count_ < kInline) {
      inline_[count_++] = operand;
      return;
    }
    if (count_++ == kInline) more_.assign(inline_, inline_ + kInline);
    more_.push_back(operand);
  }
  const ooc_operand* begin() const { return count_ <= kInline ? inline_ : more_.data(); }
  const ooc_operand* end() const { return begin() + count_; }
  uint32_t size() const { return count_; }

 private:
  static constexpr uint32_t kInline = 8;
  ooc_operand inline_[kInline];
  uint32_t count_ = 0;
  std::vector<ooc_operand> more_;
};

void add_storage(const c10::Storage& storage, uint32_t access, Operands& operands) {
  if (!storage) return;
  const void* address = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  if (reinterpret_cast<uintptr_t>(address) - range_base < range_bytes) operands.push_back({address, access, 0});
}

void add_tensor(const at::Tensor& tensor, uint32_t access, Operands& operands);

void add_quantizer(const at::Quantizer& quantizer, Operands& operands) {
  const auto* per_channel = dynamic_cast<const at::PerChannelAffineQuantizer*>(&quantizer);
  if (per_channel == nullptr) return;
  add_tensor(per_channel->scales(), OOC_READ, operands);
  add_tensor(per_channel->zero_points(), OOC_READ, operands);
}

// A tensor without a storage of its own is opened to its parts.
void add_tensor(const at::Tensor& tensor, uint32_t access, Operands& operands) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto keys = impl->key_set();
  if (keys.has(c10::DispatchKey::SparseCPU)) {
    const auto* sparse = static_cast<at::SparseTensorImpl*>(impl);
    add_tensor(sparse->indices_, access, operands);
    add_tensor(sparse->values_, access, operands);
  } else if (keys.has(c10::DispatchKey::SparseCsrCPU)) {
    const auto* sparse = static_cast<at::SparseCsrTensorImpl*>(impl);
    add_tensor(sparse->compressed_indices(), access, operands);
    add_tensor(sparse->plain_indices(), access, operands);
    add_tensor(sparse->values(), access, operands);
  } else {
    add_storage(impl->unsafe_storage(), access, operands);
    if (keys.has(c10::DispatchKey::QuantizedCPU)) add_quantizer(*static_cast<at::QTensorImpl*>(impl)->quantizer(), operands);
    if (keys.has(c10::DispatchKey::NestedTensorCPU)) {
      const auto* nested = static_cast<at::native::NestedTensorImpl*>(impl);
      add_tensor(nested->get_nested_sizes(), access, operands);
      add_tensor(nested->get_nested_strides(), access, operands);
      add_tensor(nested->get_storage_offsets(), access, operands);
    }
  }
}

void add_value(const c10::IValue& value, uint32_t access, Operands& operands) {
  if (value.isTensor()) {
    add_tensor(value.toTensor(), access, operands);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) add_tensor(tensor, access, operands);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) add_value(element, access, operands);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) add_value(element, access, operands);
  } else if (value.isStorage()) {
    add_storage(value.toStorage(), access, operands);
  }
}

// ---- running --------------------------------------------------------------------------------------------------------

class FunctionScope {
 public:
  FunctionScope(uint32_t id, const Operands& operands) {
    const int status = ooc_core_function_begin(core, id, operands.begin(), operands.size());
    ended_ = nested_ = status == OOC_NESTED;
    if (status != OOC_OK && !nested_) raise(status);
  }
  ~FunctionScope() {
    if (!ended_) ooc_core_function_end(core, 0);
  }
  FunctionScope(const FunctionScope&) = delete;
  FunctionScope& operator=(const FunctionScope&) = delete;

  int end(bool keep_allocations) {
    if (nested_) return OOC_OK;  // the function that it runs in has its memory
    ended_ = true;
    return ooc_core_function_end(core, keep_allocations ? 1 : 0);
  }
  bool nested() const { return nested_; }

 private:
  bool ended_, nested_;
};

void pin_parts(std::initializer_list<at::Tensor> tensors) {
  Operands parts;
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, OOC_READ, parts);
  for (const ooc_operand& part : parts) ooc_core_pin(core, part.address, OOC_READ, nullptr);
}

// Pins what a result hides. Returns whether its memory is opaque.
bool pin_hidden_parts(const c10::IValue& result) {
  if (result.isTensorList()) {
    bool any = false;
    for (const at::Tensor& tensor : result.toTensorList()) any |= pin_hidden_parts(tensor);
    return any;
  }
  if (!result.isTensor() || !result.toTensor().defined()) return false;
  const c10::TensorImpl* impl = result.toTensor().unsafeGetTensorImpl();
  if (impl->key_set().has(c10::DispatchKey::NestedTensorCPU)) {
    // Composite operators, autograd and size() read these three, of a few bytes for each part, at any time.
    const auto* nested = static_cast<const at::native::NestedTensorImpl*>(impl);
    pin_parts({nested->get_nested_sizes(), nested->get_nested_strides(), nested->get_storage_offsets()});
  }
  return impl->key_set().has(c10::DispatchKey::MkldnnCPU);
}

bool any_unusual(c10::DispatchKeySet keys) { return (keys.raw_repr() & kUnusual.raw_repr()) != 0; }

void run(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Operands operands;
  const size_t count = info.access.size();
  const size_t first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) add_value((*stack)[first + i], info.access[i], operands);
  FunctionScope scope(info.id, operands);
  const Operands held = info.hold_operands ? operands : Operands{};
  {
    c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    op.redispatchBoxed(keys & kBelow, stack);
  }
  if (scope.nested()) return;
  bool keep = info.keep_allocations;
  if (info.makes_unusual || any_unusual(keys))
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) keep |= pin_hidden_parts((*stack)[i]);
  if (info.makes_lengths) pin_parts({stack->back().toTensor()});
  const int status = scope.end(keep);
  if (status != OOC_OK) {
    torch::jit::drop(*stack, op.schema().returns().size());
    raise(status);
  }
  for (const ooc_operand& operand : held) ooc_core_pin(core, operand.address, operand.access, nullptr);
}

// ---- operators over whole lists -------------------------------------------------------------------------------------

uint64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->unsafe_storage() ? tensor.nbytes() : 0;
}

// Bytes that element i of all lists takes, or nothing where the lists cannot be cut.
std::vector<uint64_t> element_bytes(const torch::jit::Stack& stack, size_t first) {
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

c10::IValue cut(const c10::IValue& value, size_t begin, size_t end, size_t whole) {
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

void run_in_slices(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
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

bool passes_on(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys) {
  if (info.pass_on || (info.view && !any_unusual(keys))) return true;
  return info.composite && !op.hasKernelForDispatchKey((keys & kBelow).highestPriorityTypeId());
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (core == nullptr || keys.has(c10::DispatchKey::Python)) {
    op.redispatchBoxed(keys & kBelow, stack);
    return;
  }
  const OperatorInfo& info = info_of(op);
  if (passes_on(op, info, keys)) op.redispatchBoxed(keys & kBelow, stack);
  else if (info.whole_list) run_in_slices(op, info, keys, stack);
  else run(op, info, keys, stack);
}

// ---- frequent operators ---------------------------------------------------------------------------------------------

// The same as the fallback for one operator that returns a tensor, its arguments left unboxed: boxing costs 0.2 to 0.5 us.
template <class Op, class Signature>
struct Direct;

void add_argument(const at::Tensor& tensor, uint32_t access, Operands& operands) { add_tensor(tensor, access, operands); }
void add_argument(const std::optional<at::Tensor>& tensor, uint32_t access, Operands& operands) {
  if (tensor.has_value()) add_tensor(*tensor, access, operands);
}
void add_argument(const at::ITensorListRef& tensors, uint32_t access, Operands& operands) {
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, access, operands);
}
void add_argument(at::TensorList tensors, uint32_t access, Operands& operands) {
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, access, operands);
}
void add_argument(const c10::List<std::optional<at::Tensor>>& tensors, uint32_t access, Operands& operands) {
  for (const std::optional<at::Tensor>& tensor : tensors) add_argument(tensor, access, operands);
}
// Everything else must be of a kind that holds no tensor.
template <class... Types, class Other>
constexpr bool is_one_of(const Other*) { return (std::is_same_v<Types, Other> || ...); }
template <class Other>
void add_argument(const Other& other, uint32_t, Operands&) {
  static_assert(is_one_of<bool, double, int64_t, at::Scalar, c10::SymInt, at::IntArrayRef, c10::SymIntArrayRef,
                          at::OptionalIntArrayRef, c10::string_view, std::optional<bool>, std::optional<double>,
                          std::optional<int64_t>, std::optional<c10::SymInt>, std::optional<at::Scalar>, std::optional<at::ScalarType>,
                          std::optional<at::Layout>, std::optional<at::Device>, std::optional<at::MemoryFormat>>(
                    static_cast<const Other*>(nullptr)));
  (void)other;
}

template <class Op, class Result, class... Arguments>
struct Direct<Op, Result(Arguments...)> {
  static Result call(c10::DispatchKeySet keys, Arguments... arguments) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    const c10::DispatchKeySet below = keys & kBelow;
    if (core == nullptr || keys.has(c10::DispatchKey::Python))
      return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    static const OperatorInfo& info = info_of(op);
    if (passes_on(op, info, keys)) return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    Operands operands;
    size_t index = 0;
    (add_argument(arguments, info.access[index++], operands), ...);
    FunctionScope scope(info.id, operands);
    c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    Result result = Op::redispatch(below, std::forward<Arguments>(arguments)...);
    bool keep = info.keep_allocations;
    if (info.makes_unusual || any_unusual(keys)) keep |= pin_hidden_parts(c10::IValue(at::Tensor(result)));
    const int status = scope.end(keep);
    if (status != OOC_OK) raise(status);
    return result;
  }
};

template <class... Ops>
void register_direct(torch::Library& library) {
  const auto add = [&library](const char* name, const std::string& overload, torch::CppFunction&& kernel) {
    library.impl((overload.empty() ? name : name + ("." + overload)).c_str(), std::move(kernel));
  };
  (add(Ops::name, Ops::overload_name, torch::CppFunction(TORCH_FN((Direct<Ops, typename Ops::schema>::call)))), ...);
}

// ---- numbers ---------------------------------------------------------------------------------------------------------

// torch.tensor([x, y]) and the like read their elements with our key excluded, so that no fallback sees it: the kernel
// that every such reading ends in does the same.
at::Scalar read_scalar(const at::Tensor& tensor) {
  if (core == nullptr || ooc_core_in_function(core)) return at::native::_local_scalar_dense_cpu(tensor);
  uint64_t token = 0;
  const int status = ooc_core_pin(core, tensor.const_data_ptr(), OOC_READ, &token);
  if (status != OOC_OK) raise(status);
  at::Scalar value = at::native::_local_scalar_dense_cpu(tensor);
  ooc_core_unpin(core, token, OOC_READ);
  return value;
}

class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// ---- control, as torch.ops.ooc.* ------------------------------------------------------------------------------------

void install(int64_t handle, int64_t slice) {
  auto* next = reinterpret_cast<ooc_core*>(handle);
  if (core != nullptr && core != next) {  // on again after disable(): functions keep their numbers, which info_of remembers
    const uint32_t count = ooc_core_function_id(core, "(one more)");
    for (uint32_t id = 0; id < count; ++id) ooc_core_function_id(next, ooc_core_function_name(core, id));
  }
  core = next;
  slice_bytes = static_cast<uint64_t>(slice);
  small_bytes = ooc_core_small_limit(core);
  ooc_core_address_range(core, &range_base, &range_bytes);
  if (!allocating) {
    plain_cpu_allocator = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&cpu_allocator, 100);
    allocating = true;
  }
}

void uninstall() {
  if (!allocating) return;
  c10::SetCPUAllocator(plain_cpu_allocator, 100);
  allocating = false;
}

void intercept_thread(bool on) { c10::impl::tls_set_dispatch_key_included(kKey, on); }

// A function made of many operators that bypass the dispatcher (a compiled graph).
void scope_begin(c10::string_view name, const std::vector<at::Tensor>& tensors) {
  if (core == nullptr) return;
  Operands operands;
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, OOC_READ | OOC_WRITE, operands);
  const uint32_t id = ooc_core_function_id(core, std::string(name).c_str());
  const int status = ooc_core_function_begin(core, id, operands.begin(), operands.size());
  if (status != OOC_OK) raise(status);  // nested ones too: whoever calls this asks in_scope() first
}

void scope_end() {
  if (core == nullptr) return;
  const int status = ooc_core_function_end(core, 0);
  if (status != OOC_OK) raise(status);
}

bool in_scope() { return core != nullptr && ooc_core_in_function(core) != 0; }

}  // namespace

TORCH_LIBRARY(ooc, m) {
  m.def("install(int core, int slice_bytes) -> ()", install);
  m.def("uninstall() -> ()", uninstall);
  m.def("intercept_thread(bool on) -> ()", intercept_thread);
  m.def("scope_begin(str name, Tensor[] tensors) -> ()", scope_begin);
  m.def("scope_end() -> ()", scope_end);
  m.def("in_scope() -> bool", in_scope);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  Silence silence;  // PyTorch warns that a kernel is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  m.impl("_local_scalar_dense", &read_scalar);
}

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, Fake, m) {
  namespace ops = at::_ops;
  register_direct<ops::_log_softmax, ops::_softmax, ops::_to_copy, ops::abs, ops::add_Scalar, ops::add_Tensor,
                  ops::add__Scalar, ops::add__Tensor, ops::addcdiv_, ops::addcmul_, ops::addmm, ops::arange, ops::bmm,
                  ops::cat, ops::clamp, ops::clone, ops::copy_, ops::cos, ops::div_Scalar, ops::div_Tensor,
                  ops::div__Tensor, ops::embedding, ops::empty_memory_format, ops::empty_strided, ops::eq_Scalar,
                  ops::eq_Tensor, ops::exp, ops::exp_, ops::fill__Scalar, ops::gather, ops::gelu, ops::gelu_backward,
                  ops::gt_Scalar, ops::index_select, ops::lerp__Scalar, ops::log, ops::lt_Tensor,
                  ops::masked_fill_Scalar, ops::mean_dim, ops::mm, ops::mul_Scalar, ops::mul_Tensor, ops::mul__Scalar,
                  ops::mul__Tensor, ops::ne_Scalar, ops::neg, ops::pow_Tensor_Scalar, ops::relu, ops::relu_,
                  ops::rsqrt, ops::scalar_tensor, ops::sigmoid, ops::silu, ops::silu_backward, ops::sin, ops::sqrt,
                  ops::sqrt_, ops::sub_Tensor, ops::sub__Tensor, ops::sum, ops::sum_dim_IntList, ops::tanh,
                  ops::tanh_backward, ops::threshold_backward, ops::where_self, ops::zero_, ops::zeros_like>(m);
  // Views: passed on, and more frequent than the rest.
  register_direct<ops::as_strided, ops::detach, ops::expand, ops::permute, ops::select_int, ops::slice_Tensor, ops::t,
                  ops::transpose_int, ops::unsqueeze, ops::view, ops::_unsafe_view, ops::squeeze_dim>(m);
}
