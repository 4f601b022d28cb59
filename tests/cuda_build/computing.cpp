// Kernels for the stand-in: CUDA tensors are computed with by PyTorch's CPU operators, later, in the stream's own thread.
//
// For each operator with a kernel for CUDA and one for the CPU, a boxed kernel is registered under CUDA. It learns sizes and
// strides of the results from the CPU operator on zeros (once for each sort of arguments), allocates the results now, and
// enqueues the CPU operator on aliases of the arguments: tensors over the same addresses that own nothing. So a chunk that is
// given away early, or a copy that nobody waited for, is a wrong bit or a fault, as on a GPU.
//
// Operators whose results depend on data wait for the stream, as they do on a GPU. Views, `empty`, `set_` and `resize_` stay as
// they are. A kernel that is launched all the same ends the process (stand_in.cpp).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <dlfcn.h>
#include <signal.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>

extern "C" void ooc_stand_in_computes();  // stand_in.cpp

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// ---- tensors of operators -------------------------------------------------------------------------------------------

// A tensor of the CPU over the same memory, which neither owns that nor keeps it.
Tensor alias_of(const Tensor& tensor) {
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  void* base = const_cast<void*>(storage->data_ptr().get());
  auto memory = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes(), c10::DataPtr(base, c10::Device(c10::kCPU)), nullptr, false);
  Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return alias;
}

// Zeros with the sizes and strides of a tensor, of whatever device.
Tensor zeros_of(const Tensor& tensor) {
  int64_t elements = tensor.numel() > 0 ? 1 : 0;
  for (int64_t d = 0; d < tensor.dim() && elements > 0; ++d) elements += (tensor.size(d) - 1) * tensor.stride(d);
  Tensor zeros = at::zeros({elements}, at::TensorOptions(c10::kCPU).dtype(tensor.scalar_type()));
  zeros.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) zeros.unsafeGetTensorImpl()->set_wrapped_number(true);
  return zeros;
}

// What the host may change after the call is copied.
Tensor kept(const Tensor& tensor) {
  Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isDevice()) return value.toDevice().is_cuda() ? IValue(c10::Device(c10::kCPU)) : value;
  if (!value.isList()) return value;
  const auto list = value.toList();
  const auto kind = list.elementType()->kind();
  if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::OptionalType) return value;
  c10::impl::GenericList result(list.elementType());
  for (const IValue& element : list) result.push_back(changed(element, change));
  return result;
}

template <class Visit>
void each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (!value.isList()) return;
  const auto list = value.toList();
  const auto kind = list.elementType()->kind();
  if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::OptionalType) return;
  for (const IValue& element : list) each_tensor(element, visit);
}

std::vector<Tensor> tensors_of(const Stack& values) {
  std::vector<Tensor> tensors;
  for (const IValue& value : values) each_tensor(value, [&](const Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

// ---- random numbers -------------------------------------------------------------------------------------------------

// A moment of a CUDA generator. What a captured graph draws is in the device's memory when it is replayed.
struct Random {
  at::PhiloxCudaState state;

  at::Generator generator() const {
    const uint64_t seed = state.captured_ ? static_cast<uint64_t>(*state.seed_.ptr) : state.seed_.val;
    const uint64_t offset = state.captured_ ? static_cast<uint64_t>(*state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
    return at::detail::createCPUGenerator(seed * 0x9e3779b97f4a7c15u ^ (offset + 1) * 0xbf58476d1ce4e5b9u);
  }
};

Random drawn(const std::optional<at::Generator>& asked) {
  constexpr uint64_t kNumbers = 4;
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(asked, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return {generator->philox_cuda_state(kNumbers)};
}

// The index of the argument that is a generator, or -1.
int generator_at(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) return static_cast<int>(i);
  return -1;
}

// ---- operators ------------------------------------------------------------------------------------------------------

using Replacement = void (*)(Stack&, const at::Generator&);

void dropout(Stack& stack, const at::Generator& generator) {
  const Tensor input = stack[0].toTensor();
  const double share = stack[1].toDouble();
  const bool train = stack[2].isNone() || stack[2].toBool();
  const Tensor mask = at::ones_like(input, input.options().dtype(at::kBool));
  if (train) mask.bernoulli_(1 - share, generator);
  const Tensor result = train ? input * mask * (share < 1 ? 1 / (1 - share) : 0.0) : input.clone();
  stack = {IValue(result), IValue(mask)};
}

void depthwise(Stack& stack, const at::Generator&) {
  const Tensor input = stack[0].toTensor();
  const Tensor bias = stack[3].isNone() ? Tensor() : stack[3].toTensor();
  stack = {IValue(at::conv2d(input, stack[1].toTensor(), bias, stack[4].toIntVector(), stack[5].toIntVector(),
                             stack[6].toIntVector(), input.size(-3)))};
}

// Operators that the CPU lacks or computes with its own generator.
const std::map<std::string, Replacement> kReplacements = {
    {"aten::native_dropout", &dropout},
    {"aten::_conv_depthwise2d", &depthwise},
};
const std::set<std::string> kRandom = {"aten::native_dropout"};

// Runs an operator on tensors of the CPU; nothing above the CPU's kernel sees that.
void run(const c10::OperatorHandle& op, Stack& stack, const at::Generator& generator) {
  const c10::impl::ForceDispatchKeyGuard guard(DispatchKeySet(DispatchKey::BackendSelect),
                                               c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const auto replacement = kReplacements.find(op.operator_name().name);
  if (replacement != kReplacements.end()) return replacement->second(stack, generator);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
}

// What a call will return, and which arguments it resizes.
struct Result {
  int argument = -1;  // >= 0: this tensor of the arguments
  bool defined = true;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType type = c10::ScalarType::Undefined;
};
struct Outcome {
  bool synchronous = false;
  std::vector<Result> results;
  std::vector<std::pair<size_t, Result>> resized;  // by tensor of the arguments
};

Result described(const Tensor& tensor) {
  if (!tensor.defined()) return {.defined = false, .sizes = {}, .strides = {}};
  return {.sizes = tensor.sizes().vec(), .strides = tensor.strides().vec(), .type = tensor.scalar_type()};
}

void describe(std::ostream& out, const IValue& value) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return void(out << "-;");
    out << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.is_cuda()
        << tensor.unsafeGetTensorImpl()->is_wrapped_number() << ';';
  } else if (value.isList()) {
    for (const IValue& element : value.toList()) describe(out, element);
    out << '|';
  } else if (!value.isGenerator()) {
    out << value << ';';
  }
}

bool returns_tensors_alone(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& each) {
    const std::string type = each.type()->str();
    return type == "Tensor" || type == "Tensor[]" || type == "List[Tensor]";
  });
}

bool depends_on_data(const c10::OperatorHandle& op, const Stack& given) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return true;
  if (!returns_tensors_alone(op.schema())) return true;
  if (op.operator_name().name.rfind("aten::index", 0) != 0 && op.operator_name().name != "aten::_index_put_impl_") return false;
  bool masked = false;
  for (const Tensor& tensor : tensors_of({given.begin() + 1, given.end()}))
    masked |= tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
  return masked;
}

Outcome found_out(const c10::OperatorHandle& op, const Stack& given, int generator) {
  Outcome outcome;
  if (depends_on_data(op, given)) return {.synchronous = true, .results = {}, .resized = {}};
  Stack stack;
  for (const IValue& value : given) stack.push_back(changed(value, zeros_of));
  const at::Generator own = at::detail::createCPUGenerator(1);
  if (generator >= 0) stack[static_cast<size_t>(generator)] = own;
  const std::vector<Tensor> before = tensors_of(stack);
  std::vector<Result> descriptions;
  for (const Tensor& tensor : before) descriptions.push_back(described(tensor));
  try {
    run(op, stack, own);
  } catch (const std::exception&) {  // it may be content with the true data; if not, it says so
    return {.synchronous = true, .results = {}, .resized = {}};
  }
  for (const Tensor& tensor : tensors_of(stack)) {
    Result result = described(tensor);
    for (size_t i = 0; i < before.size() && result.defined; ++i)
      if (before[i].defined() && before[i].is_same(tensor)) result.argument = static_cast<int>(i);
    outcome.results.push_back(std::move(result));
  }
  for (size_t i = 0; i < before.size(); ++i) {
    if (!before[i].defined()) continue;
    Result now = described(before[i]);
    if (now.sizes != descriptions[i].sizes || now.strides != descriptions[i].strides) outcome.resized.emplace_back(i, std::move(now));
  }
  return outcome;
}

const Outcome& outcome_of(const c10::OperatorHandle& op, const Stack& given, int generator) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::unordered_map<std::string, Outcome>;
  std::ostringstream key;
  key << op.operator_name() << '(';
  for (const IValue& value : given) describe(key, value);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key.str());
  if (found != known.end()) return found->second;
  return known.emplace(key.str(), found_out(op, given, generator)).first->second;
}

// ---- work -----------------------------------------------------------------------------------------------------------

struct Work {
  c10::OperatorHandle op;
  Stack arguments;              // aliases
  std::vector<Tensor> results;  // aliases; not defined where an argument is the result
  std::vector<Tensor> workspaces{};
  std::optional<Random> random{};
  int generator = -1;
  bool other = false;  // another algorithm, with other bits
  bool once = true;  // else a graph's, which may be replayed for ever
};

thread_local const Work* under_way = nullptr;
struct sigaction handler_before;

// Says which operator touched an address that is not there, and as what; then the handler from before goes on.
void faulted(int signal, siginfo_t* info, void*) {
  static const auto access = reinterpret_cast<int (*)(const void*, uint64_t)>(
      dlsym(dlopen(std::getenv("OOC_TEST_EMULATED_DRIVER"), RTLD_LAZY), "ooc_emulated_access"));
  const int allowed = access(info->si_addr, 1);
  std::fprintf(stderr, "stand-in: a fault at %p, which is %smapped on the device\n", info->si_addr, allowed < 0 ? "not " : "");
  if (const Work* work = std::exchange(under_way, nullptr)) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    std::fprintf(stderr, "stand-in: %s touched %#zx\n", c10::toString(work->op.operator_name()).c_str(), address);
    const auto tell = [&](const char* kind, const std::vector<Tensor>& tensors) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (!tensors[i].defined()) continue;
        const auto first = reinterpret_cast<uintptr_t>(tensors[i].storage().data());
        const size_t bytes = tensors[i].storage().nbytes();
        const char* here = address >= first && address < first + bytes ? " <- here" : "";
        std::fprintf(stderr, "  %s %zu: %zu bytes at %#zx%s\n", kind, i, bytes, first, here);
      }
    };
    tell("argument", tensors_of(work->arguments));
    tell("result", work->results);
    tell("workspace", work->workspaces);
  }
  sigaction(signal, &handler_before, nullptr);
}

void execute(void* data) {
  auto* work = static_cast<Work*>(data);
  under_way = work;
  try {
    const c10::InferenceMode no_gradients(false);
    const at::NoGradGuard guard;
    for (const Tensor& workspace : work->workspaces) std::memset(workspace.mutable_data_ptr(), 0xa5, workspace.nbytes());
    Stack stack = work->arguments;
    const at::Generator generator = work->random ? work->random->generator() : at::Generator();
    if (work->generator >= 0) stack[static_cast<size_t>(work->generator)] = generator;
    run(work->op, stack, generator);
    const std::vector<Tensor> made = tensors_of(stack);
    for (size_t i = 0; i < made.size(); ++i) {
      const Tensor& target = work->results[i];
      if (!target.defined()) continue;
      TORCH_CHECK(made[i].sizes() == target.sizes(), "its result has the sizes ", made[i].sizes(), ", not ", target.sizes());
      const c10::impl::ForceDispatchKeyGuard below(DispatchKeySet(DispatchKey::BackendSelect),
                                                   c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      target.copy_(made[i]);
      if (work->other && target.is_floating_point()) target.mul_(1 + 1e-6);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stand-in: %s: %s\n", c10::toString(work->op.operator_name()).c_str(), error.what());
    std::abort();
  }
  under_way = nullptr;
  if (work->once) delete work;
}

bool captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

Tensor on_device(const Result& result) {
  return at::empty_strided(result.sizes, result.strides, at::TensorOptions(c10::kCUDA).dtype(result.type));
}

// Puts the results in the place of the arguments, in the form of the schema. Those of its types that are no tensors, and
// how long its lists are, are as in `made`; if that is empty, the one list has what is left. Until then the arguments
// stay, as they do with PyTorch's own kernels: who catches an exception may want them.
void give(const c10::FunctionSchema& schema, const std::vector<Tensor>& results, const Stack& made, Stack& stack) {
  torch::jit::drop(stack, schema.arguments().size());
  size_t next = 0;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const std::string type = schema.returns()[i].type()->str();
    if (type == "Tensor") {
      stack.emplace_back(results[next++]);
    } else if (type == "Tensor[]" || type == "List[Tensor]") {
      c10::List<Tensor> list;
      for (size_t n = made.empty() ? results.size() - next : made[i].toTensorVector().size(); n > 0; --n)
        list.push_back(results[next++]);
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(made[i]);
    }
  }
}

void compute_now(const c10::OperatorHandle& op, const Stack& given, int generator, Stack& stack) {
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  TORCH_CHECK(!captured(stream), op.operator_name(), " waits for the device, which a captured stream cannot");
  const std::vector<Tensor> tensors = tensors_of(given);
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  Stack made;
  for (const IValue& value : given) made.push_back(changed(value, [](const Tensor& t) { return t.is_cuda() ? alias_of(t) : t; }));
  at::Generator own;
  if (generator >= 0) {
    const IValue& asked = given[static_cast<size_t>(generator)];
    own = drawn(asked.isNone() ? std::nullopt : std::optional(asked.toGenerator())).generator();
    made[static_cast<size_t>(generator)] = own;
  }
  const std::vector<Tensor> before = tensors_of(made);
  run(op, made, own);
  std::vector<Tensor> results;
  for (const Tensor& tensor : tensors_of(made)) {
    Tensor result;
    for (size_t i = 0; i < before.size() && tensor.defined(); ++i)
      if (before[i].defined() && before[i].is_same(tensor)) result = tensors[i];
    if (tensor.defined() && !result.defined()) {
      result = on_device(described(tensor));
      C10_CUDA_CHECK(cudaStreamSynchronize(stream));
      alias_of(result).copy_(tensor);
    }
    results.push_back(result);
  }
  give(op.schema(), results, made, stack);
}

// cuBLAS and cuDNN take memory for the time of a call, and keep some for each stream; what lies there is written over.
const std::set<std::string> kWithWorkspace = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward"};
constexpr int64_t kWorkspaceBytes = 96 << 10;

// As cuDNN's convolutions do it: without a workspace another algorithm is taken, and nobody told. Returns whether that is so.
bool own_workspace(const std::string& name, Tensor& own) {
  const char* asked = std::getenv("OOC_TEST_WORKSPACE");  // bytes
  if (asked == nullptr || name.find("convolution") == std::string::npos) return false;
  try {
    own = at::empty({std::atoll(asked)}, at::TensorOptions(c10::kCUDA).dtype(at::kByte));
  } catch (const c10::OutOfMemoryError&) {
    return true;
  }
  return false;
}

std::vector<Tensor> workspaces(cudaStream_t stream, Tensor& own) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<cudaStream_t, c10::DataPtr> streams;  // freed as the process ends, as cuDNN's states of dropout are
  if (!own.defined()) own = at::empty({kWorkspaceBytes}, at::TensorOptions(c10::kCUDA).dtype(at::kByte));
  std::vector<Tensor> all{alias_of(own)};
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = streams.find(stream);
  if (found == streams.end() && !captured(stream))
    found = streams.emplace(stream, c10::cuda::CUDACachingAllocator::get()->allocate(kWorkspaceBytes)).first;
  if (found != streams.end())
    all.push_back(at::from_blob(found->second.get(), {kWorkspaceBytes}, at::TensorOptions(c10::kCPU).dtype(at::kByte)));
  return all;
}

// As PyTorch's own kernels do, which see a number of the CPU, and indexes, but no other tensors of it.
void check_devices(const std::string& name, const std::vector<Tensor>& tensors) {
  if (name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 || name.rfind("aten::_foreach", 0) == 0) return;
  for (const Tensor& tensor : tensors)
    TORCH_CHECK(!tensor.defined() || tensor.is_cuda() || tensor.dim() == 0, name, ": expected all tensors to be on the GPU");
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack given(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack->end());
  check_devices(op.operator_name().name, tensors_of(given));
  const int generator = generator_at(schema);
  const Outcome& outcome = outcome_of(op, given, generator);
  if (outcome.synchronous) return compute_now(op, given, generator, *stack);

  const std::vector<Tensor> tensors = tensors_of(given);
  for (const auto& [index, now] : outcome.resized) {
    tensors[index].resize_(now.sizes);
    tensors[index].as_strided_(now.sizes, now.strides);
  }
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  auto work = std::make_unique<Work>(Work{.op = op, .arguments = {}, .results = {}, .generator = generator});
  for (const IValue& value : given)
    work->arguments.push_back(changed(value, [](const Tensor& t) { return t.is_cuda() ? alias_of(t) : kept(t); }));
  std::vector<Tensor> results;
  for (const Result& result : outcome.results) {
    const bool is_new = result.defined && result.argument < 0;
    results.push_back(is_new ? on_device(result) : result.defined ? tensors[static_cast<size_t>(result.argument)] : Tensor());
    work->results.push_back(is_new ? alias_of(results.back()) : Tensor());
  }
  if (generator >= 0 || kRandom.count(op.operator_name().name) != 0) {
    const IValue asked = generator >= 0 ? given[static_cast<size_t>(generator)] : IValue();
    work->random = drawn(asked.isNone() ? std::nullopt : std::optional(asked.toGenerator()));
  }
  Tensor own;
  work->other = own_workspace(op.operator_name().name, own);
  if (kWithWorkspace.count(op.operator_name().name) != 0) work->workspaces = workspaces(stream, own);
  work->once = !captured(stream);
  C10_CUDA_CHECK(cudaLaunchHostFunc(stream, &execute, work.release()));
  give(schema, results, {}, *stack);
}

// Between host and device PyTorch's own copy does nothing but call the runtime.
void copy(const c10::OperatorHandle& op, Stack* stack) {
  const Tensor target = (*stack)[stack->size() - 3].toTensor(), source = (*stack)[stack->size() - 2].toTensor();
  if (target.is_cuda() && source.is_cuda()) return compute(op, stack);
  const bool non_blocking = stack->back().toBool();
  Tensor written = target;
  at::native::copy_(written, source, non_blocking);
  torch::jit::drop(*stack, 3);
  stack->emplace_back(written);
}

bool stays(const std::string& name) {
  for (const char* prefix : {"empty", "as_strided", "view", "set_", "resize", "_local_scalar_dense", "record_stream", "is_set_to",
                             "_reshape_alias", "is_pinned", "_pin_memory", "_efficientzerotensor", "copy_", "alias"})
    if (name.rfind(prefix, 0) == 0) return true;
  return name == "unfold";
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

const bool registered = [] {
  Silent silent;  // every kernel of PyTorch's that is replaced is worth a warning to it
  c10::WarningHandler* before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&silent);
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (each.name.rfind("aten::", 0) != 0) continue;
    const std::string name = each.name.substr(6);
    const auto op = c10::Dispatcher::singleton().findSchema(each);
    if (!op || stays(name)) continue;
    const bool has_cpu = op->hasComputedKernelForDispatchKey(DispatchKey::CPU) || kReplacements.count(each.name) != 0;
    const bool asked = name == "convolution" || name == "convolution_backward";
    if (!asked && !(op->hasKernelForDispatchKey(DispatchKey::CUDA) && has_cpu)) continue;
    const std::string full = each.overload_name.empty() ? name : name + "." + each.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  c10::WarningUtils::set_warning_handler(before);
  struct sigaction handler {};
  handler.sa_sigaction = &faulted;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &handler, &handler_before);
  ooc_stand_in_computes();
  return true;
}();

}  // namespace
