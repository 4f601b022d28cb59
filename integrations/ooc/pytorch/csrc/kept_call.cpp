#include "kept_call.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <cstring>

#include "operators.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

namespace {

constexpr std::array kPrecisions{std::pair{at::Float32Backend::GENERIC, at::Float32Op::ALL},
                                 std::pair{at::Float32Backend::CUDA, at::Float32Op::ALL},
                                 std::pair{at::Float32Backend::CUDA, at::Float32Op::MATMUL},
                                 std::pair{at::Float32Backend::CUDA, at::Float32Op::CONV},
                                 std::pair{at::Float32Backend::MKLDNN, at::Float32Op::ALL},
                                 std::pair{at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
                                 std::pair{at::Float32Backend::MKLDNN, at::Float32Op::CONV}};
#if defined(__SSE__)
constexpr uint32_t kFlags = 0x3f;  // exceptions that occurred
#endif

// Dispatch keys of a plain tensor; what has others is not only its memory.
c10::DispatchKeySet plain_keys() {
  return c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) |
         c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
}

c10::Storage borrowed(char* address, uint64_t bytes, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes),
                      c10::DataPtr(address, nullptr, [](void*) {}, device), nullptr, false);
}

// The bytes of a whole storage, in memory that never leaves; undefined if there is none for them.
at::Tensor copy_of(const c10::Storage& storage) {
  c10::DataPtr memory = c10::GetAllocator(c10::DeviceType::CPU)->allocate(storage.nbytes());
  if (owned(memory.get()) && !in_slab(memory.get())) return {};
  std::memcpy(memory.mutable_get(), storage.data(), storage.nbytes());
  c10::Storage own(c10::Storage::use_byte_size_t(), static_cast<int64_t>(storage.nbytes()), std::move(memory), nullptr, false);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(own), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                  caffe2::TypeMeta::Make<uint8_t>());
}

// One tensor; false if it cannot be kept. What variable it lies in is not known yet.
bool keep_tensor(const at::Tensor& tensor, std::vector<KeptTensor>& kept) {
  KeptTensor& one = kept.emplace_back();
  if (!tensor.defined()) return true;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if ((impl.key_set().raw_repr() & ~plain_keys().raw_repr()) != 0 || impl.layout() != c10::kStrided ||
      impl.has_symbolic_sizes_strides() || !impl.has_storage()) {
    return false;  // an argument is no plain tensor
  }
  const c10::Storage& storage = impl.unsafe_storage();
  auto* address = static_cast<char*>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  if (is_variable(storage) && !(in_slab(address) && ooc_core_exposed(core, address))) {
    one.memory = address;
  } else if (storage.nbytes() <= small_bytes && storage.device_type() == c10::kCPU) {
    if (storage.nbytes() > 0) one.copy = copy_of(storage);
    if (storage.nbytes() > 0 && !one.copy.defined()) {
      return false;  // there is no room for copies of small arguments
    }
  } else {
    return false;  // an argument is in memory that is not managed
  }
  one.storage_bytes = storage.nbytes();
  one.sizes.assign(impl.sizes().begin(), impl.sizes().end());
  one.strides.assign(impl.strides().begin(), impl.strides().end());
  one.offset = impl.storage_offset();
  one.type = impl.dtype();
  one.keys = impl.key_set();
  one.device = impl.device();
  one.wrapped_number = impl.is_wrapped_number();
  return true;
}

bool is_plain_value(const c10::IValue& value) {
  if (value.isList())
    return std::ranges::all_of(value.toListRef(), [](const c10::IValue& element) { return is_plain_value(element); });
  return value.isNone() || value.isInt() || value.isDouble() || value.isBool() || value.isComplexDouble() ||
         value.isString() || value.isDevice();
}

bool is_named(const c10::Argument& argument, std::string_view name) { return argument.name() == name; }

}  // namespace

// ---- surroundings ---------------------------------------------------------------------------------------------------

Surroundings Surroundings::now() {
  Surroundings s;
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  s.included_ = keys.included_.raw_repr();
  s.excluded_ = keys.excluded_.raw_repr();
  const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  s.grad_ = autograd.get_grad_mode();
  s.inference_ = autograd.get_inference_mode();
  s.forward_grad_ = autograd.get_fw_grad_mode();
#if defined(__SSE__)
  s.rounding_ = _mm_getcsr() & ~kFlags;
#endif
  s.threads_ = at::get_num_threads();
  const at::Context& context = at::globalContext();
  s.deterministic_ = context.deterministicAlgorithms();
  s.warn_only_ = context.deterministicAlgorithmsWarnOnly();
  s.filled_ = context.deterministicFillUninitializedMemory();
  s.cudnn_ = context.userEnabledCuDNN();
  s.cudnn_benchmark_ = context.benchmarkCuDNN();
  s.cudnn_deterministic_ = context.deterministicCuDNN();
  s.mkldnn_ = context.userEnabledMkldnn();
  s.mkldnn_deterministic_ = context.deterministicMkldnn();
  for (size_t i = 0; i < kPrecisions.size(); ++i) s.precisions_[i] = context.float32Precision(kPrecisions[i].first, kPrecisions[i].second);
  s.default_type_ = c10::get_default_dtype_as_scalartype();
  return s;
}

void Surroundings::set(const Surroundings& now) const {
  if (included_ != now.included_ || excluded_ != now.excluded_) {
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    keys.included_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, included_);
    keys.excluded_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, excluded_);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  c10::AutogradState autograd = c10::AutogradState::get_tls_state();
  autograd.set_grad_mode(grad_);
  autograd.set_inference_mode(inference_);
  autograd.set_fw_grad_mode(forward_grad_);
  c10::AutogradState::set_tls_state(autograd);
#if defined(__SSE__)
  if (rounding_ != now.rounding_) _mm_setcsr((_mm_getcsr() & kFlags) | rounding_);
#endif
  if (threads_ != now.threads_) at::set_num_threads(threads_);
  at::Context& context = at::globalContext();
  if (deterministic_ != now.deterministic_ || warn_only_ != now.warn_only_) context.setDeterministicAlgorithms(deterministic_, warn_only_);
  if (filled_ != now.filled_) context.setDeterministicFillUninitializedMemory(filled_);
  if (cudnn_ != now.cudnn_) context.setUserEnabledCuDNN(cudnn_);
  if (cudnn_benchmark_ != now.cudnn_benchmark_) context.setBenchmarkCuDNN(cudnn_benchmark_);
  if (cudnn_deterministic_ != now.cudnn_deterministic_) context.setDeterministicCuDNN(cudnn_deterministic_);
  if (mkldnn_ != now.mkldnn_) context.setUserEnabledMkldnn(mkldnn_);
  if (mkldnn_deterministic_ != now.mkldnn_deterministic_) context.setDeterministicMkldnn(mkldnn_deterministic_);
  for (size_t i = 0; i < kPrecisions.size(); ++i)
    if (precisions_[i] != now.precisions_[i])
      context.setFloat32Precision(kPrecisions[i].first, kPrecisions[i].second, precisions_[i]);
  if (default_type_ != now.default_type_) c10::set_default_dtype(caffe2::TypeMeta::fromScalarType(default_type_));
}

namespace {

// While it exists, the thread and PyTorch's settings are as they were when a call was kept.
class Restored {
 public:
  explicit Restored(const Surroundings& then) : then_(then), before_(Surroundings::now()) { then_.set(before_); }
  ~Restored() { before_.set(then_); }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  const Surroundings& then_;
  const Surroundings before_;
};

}  // namespace

// ---- arguments ------------------------------------------------------------------------------------------------------

at::Tensor KeptTensor::at(char* address) const {
  char* place = version.variable != kNoId ? address : copy.defined() ? static_cast<char*>(copy.storage().mutable_data()) : nullptr;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(borrowed(place, storage_bytes, device), keys, type);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides, offset);
  if (wrapped_number) impl->set_wrapped_number(true);  // of a scalar
  return tensor;
}

std::shared_ptr<KeptCall> KeptCall::of(const c10::OperatorHandle& op, const OperatorInfo& info, Role role,
                                       c10::DispatchKeySet keys, const torch::jit::Stack& stack) {
  auto kept = std::make_shared<KeptCall>(op, info, keys);
  kept->role = role;
  const auto& schema = op.schema().arguments();
  const auto arguments = torch::jit::last(stack, schema.size());
  bool training = true;
  for (size_t i = 0; i < schema.size(); ++i)
    if (is_named(schema[i], "training") || is_named(schema[i], "train")) training = arguments[i].isBool() && arguments[i].toBool();
  size_t written = 0;
  for (size_t i = 0; i < schema.size(); ++i) {
    const c10::IValue& value = arguments[i];
    Argument& argument = kept->arguments_.emplace_back();
    if (is_named(schema[i], "dropout_p") && !(value.isDouble() && value.toDouble() == 0)) {
      return nullptr;  // it takes random numbers
    }
    const bool statistics = role == Role::kStatistics && training &&
                            (is_named(schema[i], "running_mean") || is_named(schema[i], "running_var"));
    if (statistics && schema[i].type()->kind() != c10::TypeKind::OptionalType) return nullptr;  // they have to be given
    if (statistics) continue;  // none: they were updated once
    if (value.isTensor()) {
      argument.kind = Argument::kTensor;
      if (!keep_tensor(value.toTensor(), argument.tensors)) return nullptr;
    } else if (value.isTensorList()) {
      argument.kind = Argument::kTensors;
      for (const at::Tensor& tensor : value.toTensorList())
        if (!keep_tensor(tensor, argument.tensors)) return nullptr;
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::kOptionalTensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        if (!keep_tensor(tensor.value_or(at::Tensor()), argument.tensors)) return nullptr;
    } else if (is_plain_value(value)) {
      argument.value = value;
    } else {
      return nullptr;  // an argument is neither a tensor nor a number
    }
    const auto* alias = schema[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    if (role != Role::kLink || ++written > 1 || argument.kind != Argument::kTensor ||
        argument.tensors.front().memory == nullptr || in_slab(argument.tensors.front().memory)) {
      return nullptr;  // it writes more than one variable, or a small one
    }
    kept->written_ = i;
  }
  if (role == Role::kLink && written == 0) return nullptr;  // it writes no variable
  return kept;
}

bool KeptCall::find_versions(History& history) {
  for (Argument& argument : arguments_)
    for (KeptTensor& tensor : argument.tensors) {
      if (tensor.memory == nullptr) continue;
      const VariableId id = history.find_or_add(tensor.memory, tensor.storage_bytes);
      Variable& variable = history.variable(id);
      if (variable.writers.front() == kNoId && ooc_core_exposed(core, tensor.memory)) variable.exposed = true;
      tensor.version = history.current(id);
    }
  if (role != Role::kLink) return true;
  target = arguments_[written_].tensors.front().version;
  // The write that is about to happen was noted as it began, of a variable whose maker is known.
  if (target.number == 0) return false;
  const Version before{target.variable, target.number - 1};
  for (Argument& argument : arguments_)
    for (KeptTensor& tensor : argument.tensors)
      if (tensor.version.variable == before.variable) tensor.version = before;
  return true;
}

std::vector<Version> KeptCall::reads() const {
  std::vector<Version> found;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    for (const KeptTensor& tensor : arguments_[i].tensors)
      if (tensor.version.variable != kNoId) found.push_back(tensor.version);
  }
  return found;
}

// ---- running --------------------------------------------------------------------------------------------------------

torch::jit::Stack KeptCall::arguments(const std::function<char*(const Version&)>& place) const {
  torch::jit::Stack stack;
  const auto made = [&place](const KeptTensor& kept) {
    if (!kept.type.itemsize()) return at::Tensor();
    return kept.at(kept.version.variable != kNoId ? place(kept.version) : nullptr);
  };
  for (const Argument& argument : arguments_) {
    if (argument.kind == Argument::kValue) {
      stack.push_back(argument.value);
    } else if (argument.kind == Argument::kTensor) {
      stack.emplace_back(made(argument.tensors.front()));
    } else if (argument.kind == Argument::kTensors) {
      c10::List<at::Tensor> list;
      for (const KeptTensor& tensor : argument.tensors) list.push_back(made(tensor));
      stack.emplace_back(std::move(list));
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const KeptTensor& tensor : argument.tensors)
        list.push_back(tensor.type.itemsize() ? std::optional(made(tensor)) : std::nullopt);
      stack.emplace_back(std::move(list));
    }
  }
  return stack;
}

std::vector<at::Tensor> KeptCall::tensors_of(const torch::jit::Stack& stack, size_t count) {
  std::vector<at::Tensor> tensors;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isTensor()) tensors.push_back(stack[i].toTensor());
    else if (stack[i].isTensorList())
      for (const at::Tensor& tensor : stack[i].toTensorList()) tensors.push_back(tensor);
  }
  return tensors;
}

std::vector<at::Tensor> KeptCall::run(torch::jit::Stack stack) const {
  const Restored restored(surroundings_);
  {
    const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    op.redispatchBoxed(keys_ & kBelow, &stack);
  }
  return tensors_of(stack, op.schema().returns().size());
}

}  // namespace ooc_torch
