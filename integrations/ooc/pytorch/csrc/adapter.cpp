// PyTorch's side of the core: a CPU allocator whose memory lies on the device, and a boxed fallback for
// c10::DispatchKey::Fake that sees every operator below autograd and above the backends (operators.h). Memory of CUDA
// devices: cuda_allocator.h, where the installed PyTorch is one for CUDA.
//
// Built against the installed PyTorch at first use (integrations/ooc/pytorch/build.py); the library is reached as
// torch.ops.ooc.*, so no Python headers are needed.
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/max_pool1d_native.h>
#include <ATen/ops/max_pool1d_ops.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/AutogradState.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "frequent_operators.h"
#include "micro_batches.h"
#include "operators.h"
#include "places.h"
#ifdef OOC_WITH_CUDA
#include "cuda_allocator.h"
#endif

using namespace ooc_torch;

namespace {

bool allocating = false;

// ---- the allocator --------------------------------------------------------------------------------------------------

// What PyTorch makes without an operator it also reads without one if it is small, such as numbers wrapped as tensors and
// states of random generators (5056 bytes). In slabs these never leave anyway. Elsewhere they are pinned.
constexpr size_t kStaysOutsideFunctions = 8192;

// Blocks allocated in a thread whose memory is plain. oneDNN frees by address alone, so they are known by that.
struct PlainBlocks {
  std::mutex mutex;
  std::unordered_set<void*> blocks;

  void* allocate(size_t bytes) {
    void* address = c10::alloc_cpu(bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    blocks.insert(address);
    return address;
  }
  bool free(void* address) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (blocks.erase(address) == 0) return false;
    }
    c10::free_cpu(address);
    return true;
  }
};
PlainBlocks& plain_blocks() {
  static auto* blocks = new PlainBlocks;  // it outlives every tensor
  return *blocks;
}

void free_block(void* address) {
  if (address == nullptr || (!owned(address) && plain_blocks().free(address))) return;
  if (allocations_watched()) {
    if (const CallMemory* memory = CallMemory::current(); memory != nullptr && memory->gave(address)) return;
    if (LiveWatch* watch = LiveWatch::current()) watch->freed(address);
  }
  ooc_core_free(core, address);
}
void free_nothing(void*) {}

class DeviceBackedCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    if (in_mode(kPlain)) {
      if (bytes > 0) address = plain_blocks().allocate(bytes);
    } else if (bytes > 0) {
      CallMemory* memory = CallMemory::current();
      if (memory != nullptr && (address = memory->place_for(bytes)) != nullptr)
        return {address, address, &free_nothing, c10::Device(c10::DeviceType::CPU)};
      address = ooc_core_malloc(core, bytes);
      if (address == nullptr) raise(ooc_last_status());
      if (memory != nullptr) memory->allocated(bytes, address);
      if (allocations_watched())
        if (LiveWatch* watch = LiveWatch::current()) watch->allocated(address, bytes);
      const bool may_leave = owned(address) && !in_slab(address);
      if (may_leave && bytes <= kStaysOutsideFunctions && !ooc_core_in_function(core))
        ooc_core_pin(core, address, OOC_READ | OOC_WRITE, nullptr);
      if (may_leave && places_wanted.load(std::memory_order_relaxed)) note_place(address);
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

// ---- numbers ---------------------------------------------------------------------------------------------------------

// torch.tensor([x, y]) and the like read their elements with our key excluded, so that no fallback sees it. This replaces
// the kernel that reads an element, and does what the fallback would do.
template <auto plain>
at::Scalar read_scalar(const at::Tensor& tensor) {
  if (core == nullptr || tensor.is_cuda() != on_cuda() || ooc_core_in_function(core) || !owned(tensor.const_data_ptr()))
    return plain(tensor);
  uint64_t token = 0;
  const int status = ooc_core_pin(core, tensor.const_data_ptr(), OOC_READ, &token);
  if (status == OOC_OUT_OF_MEMORY && splitting) {  // the variable does not fit, but its element does
    static const uint32_t id = ooc_core_function_id(core, "aten::_local_scalar_dense");
    Operands element;
    element.push_back({tensor.const_data_ptr(), OOC_READ, 0, tensor.itemsize()});
    const FunctionScope scope(id, element);
    return plain(tensor);
  }
  if (status != OOC_OK) raise(status);
  at::Scalar value = plain(tensor);
  ooc_core_unpin(core, token, OOC_READ);
  return value;
}

class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// Where a gradient is wanted it calls other operators, which may need what is no operand of it; else it is a function.
at::Tensor max_pool1d(c10::DispatchKeySet keys, const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if ((self.requires_grad() && at::GradMode::is_enabled()) || self._fw_grad(0).defined())
    return at::native::max_pool1d(self, kernel, stride, padding, dilation, ceil_mode);
  return at::_ops::max_pool1d::redispatch(keys & c10::after_autograd_keyset, self, kernel, stride, padding, dilation, ceil_mode);
}

// ---- control, as torch.ops.ooc.* ------------------------------------------------------------------------------------

void use_core(int64_t handle, int64_t slice) {
  auto* next = reinterpret_cast<ooc_core*>(handle);
  if (core != nullptr && core != next) {  // it is on again after disable(); info_of remembers functions' numbers, which stay
    const uint32_t count = ooc_core_function_id(core, "(one more)");
    for (uint32_t id = 0; id < count; ++id) ooc_core_function_id(next, ooc_core_function_name(core, id));
  }
  core = next;
  slice_bytes = static_cast<uint64_t>(slice);
  small_bytes = ooc_core_small_limit(core);
  slab_base = ooc_core_slab_address(core);
  ooc_stats stats;
  ooc_core_read_stats(core, &stats);
  chunk_bytes = stats.chunk_bytes;
  ooc_core_address_range(core, &range_base, &range_bytes);
  let_python_call_functions();
}

void install(int64_t handle, int64_t slice) {
  use_core(handle, slice);
  if (!allocating) {
    plain_cpu_allocator = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&cpu_allocator, 100);
    allocating = true;
  }
}

// From now on the memory of a CUDA device is managed, for the life of the process.
void install_cuda(int64_t handle, int64_t slice, int64_t device) {
#ifdef OOC_WITH_CUDA
  install_cuda_allocator(reinterpret_cast<ooc_core*>(handle), static_cast<c10::DeviceIndex>(device));
  use_core(handle, slice);
  cuda_device = static_cast<int>(device);
#else
  (void)handle, (void)slice, (void)device;
  TORCH_CHECK(false, "this PyTorch is built for the CPU alone");
#endif
}

void uninstall() {
  if (!allocating) return;
  c10::SetCPUAllocator(plain_cpu_allocator, 100);
  allocating = false;
}

// While it is on, backward passes over CUDA tensors run in the thread that asks for them, not in one of the device. So there
// is one sequence of functions, which is this thread's. The device may be chosen later than the first thread is intercepted.
void intercept_thread(bool on) {
  c10::impl::tls_set_dispatch_key_included(kKey, on);
  if (kWithCuda && !allocating) c10::AutogradState::get_tls_state().set_multithreading_enabled(!on);
}

// Begins a function that bypasses the dispatcher (a compiled graph, which is one). Returns false if it is part of
// another one, or of a capture, and must not be ended.
bool scope_begin(c10::string_view name, const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& only_read) {
  if (core == nullptr) return false;
  Operands operands;
  for (const at::Tensor& tensor : only_read) add_tensor(tensor, OOC_READ, operands);
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, OOC_READ | OOC_WRITE, operands);
  const int status = FunctionScope::begin(ooc_core_function_id(core, std::string(name).c_str()), operands);
  if (status != OOC_OK && status != OOC_NESTED) raise(status);
  return status == OOC_OK;
}

void scope_end(const std::vector<at::Tensor>& results) {
  if (core == nullptr) return;
  const int status = FunctionScope::finish(false, [&](Operands& operands) {
    for (const at::Tensor& tensor : results) add_tensor(tensor, OOC_READ, operands);
  });
  if (status != OOC_OK) raise(status);
}

// The number that kernel_begin takes; it stays the same for the life of the process. -1 without a core.
int64_t function_id(c10::string_view name) {
  return core == nullptr ? -1 : ooc_core_function_id(core, std::string(name).c_str());
}

// As scope_begin, for a kernel in a compiled graph: it only reads the operands from `first` to before `end`. This is
// boxed, as kernels are many: their list of tensors is looked at where it lies.
void kernel_begin(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 4);
  int status = OOC_NESTED;
  if (core != nullptr) {
    const size_t first = static_cast<size_t>(arguments[2].toInt()), end = static_cast<size_t>(arguments[3].toInt());
    Operands operands;
    size_t index = 0;
    for (const c10::IValue& tensor : arguments[1].toListRef()) {
      add_tensor(tensor.toTensor(), first <= index && index < end ? OOC_READ : OOC_READ | OOC_WRITE, operands);
      ++index;
    }
    status = FunctionScope::begin(static_cast<uint32_t>(arguments[0].toInt()), operands);
    if (status != OOC_OK && status != OOC_NESTED) raise(status);
  }
  torch::jit::drop(*stack, 4);
  stack->emplace_back(status == OOC_OK);
}

void kernel_end() { scope_end({}); }

void record_places(bool on, const c10::List<std::string>& skipped, c10::string_view here) {
  want_places(on, std::vector<std::string>(skipped.begin(), skipped.end()), std::string(here));
}

// ---- splitting ------------------------------------------------------------------------------------------------------

// Without measuring, a function that does not fit fails before it has run to its end in host memory.
void use_splitting(bool on) {
  splitting = on;
  if (core != nullptr) ooc_core_set_measuring(core, on ? 0 : 1);
}

bool ranges(bool on) { return set_mode(kRanges, on); }
bool plain(bool on) { return set_mode(kPlain, on); }
bool undivided(bool on) { return set_mode(kUndivided, on); }

c10::DataPtr allocate_absent(size_t bytes) {
  if constexpr (kWithCuda)
    if (on_cuda()) return cuda_allocate_absent(bytes);
  void* address = ooc_core_malloc_absent(core, bytes);
  if (address == nullptr) raise(ooc_last_status());
  if (places_wanted.load(std::memory_order_relaxed)) note_place(address);
  return {address, address, &free_block, c10::Device(c10::DeviceType::CPU)};
}

// A tensor of the memory that is managed, of which nothing is on the device yet. In plain mode the memory is plain.
at::Tensor empty_absent(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType type) {
  const caffe2::TypeMeta meta = c10::scalarTypeToTypeMeta(type);
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, meta.itemsize());
  c10::Allocator* allocator = on_cuda() ? c10::GetAllocator(c10::DeviceType::CUDA) : &cpu_allocator;
  auto memory = in_mode(kPlain) || bytes <= small_bytes ? allocator->allocate(bytes) : allocate_absent(bytes);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory),
                                                       allocator, /*resizable=*/true);
  const c10::DispatchKeySet keys(on_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, meta);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

// What types of results depend on of a single number, without a look at a variable that may be away.
at::Tensor one_like(const at::Tensor& number) {
  const ModeGuard plain(kPlain);
  at::Tensor one = at::scalar_tensor(1, at::TensorOptions(number.scalar_type()));
  one.unsafeGetTensorImpl()->set_wrapped_number(number.unsafeGetTensorImpl()->is_wrapped_number());
  return one;
}

void refuse(c10::string_view reason, bool inexact, bool raised) { cannot_split(std::string(reason), inexact, raised); }

// The operator's name is such as aten::convolution; what has an overload's name is not asked for.
void choose_ways_of(c10::string_view name) {
  choose_ways(*info_of(c10::Dispatcher::singleton().findSchemaOrThrow(std::string(name).c_str(), "")).split);
}

void watch_live() { LiveWatch::begin(); }
int64_t watched_live() { return static_cast<int64_t>(LiveWatch::end()); }

bool in_scope() { return core != nullptr && ooc_core_in_function(core) != 0; }

}  // namespace

bool ooc_torch::is_variable(const c10::Storage& storage) {
  if (!owned(storage.data())) return false;
  if constexpr (kWithCuda)
    if (on_cuda()) return cuda_is_block(storage.data_ptr());
  return storage.data_ptr().get_deleter() == &free_block;
}

TORCH_LIBRARY(ooc, m) {
  m.def("install(int core, int slice_bytes) -> ()", install);
  m.def("install_cuda(int core, int slice_bytes, int device) -> ()", install_cuda);
  m.def("uninstall() -> ()", uninstall);
  m.def("intercept_thread(bool on) -> ()", intercept_thread);
  m.def("scope_begin(str name, Tensor[] tensors, Tensor[] only_read) -> bool", scope_begin);
  m.def("scope_end(Tensor[] results) -> ()", scope_end);
  m.def("function_id(str name) -> int", function_id);
  m.def("kernel_begin(int function, Tensor[] operands, int first, int end) -> bool",
        torch::CppFunction::makeFromBoxedFunction<&kernel_begin>());
  m.def("kernel_end() -> ()", kernel_end);
  m.def("in_scope() -> bool", in_scope);
  m.def("splitting(bool on) -> ()", use_splitting);
  m.def("allow_rounding(bool on) -> ()", [](bool on) { rounding_allowed = on; });
  m.def("ranges(bool on) -> bool", ranges);
  m.def("plain(bool on) -> bool", plain);
  m.def("undivided(bool on) -> bool", undivided);
  m.def("empty_absent(int[] size, int[] stride, ScalarType dtype) -> Tensor", empty_absent);
  m.def("one_like(Tensor number) -> Tensor", one_like);
  m.def("cannot_split(str reason, bool inexact, bool raised) -> ()", refuse);
  m.def("run_whole() -> ()", run_whole);
  m.def("run_on_host() -> ()", run_on_host);
  m.def("whole_failed() -> bool", whole_failed);
  m.def("host_failed() -> bool", host_failed);
  m.def("choose_ways(str name) -> ()", choose_ways_of);
  m.def("place(Tensor target, int alike) -> bool", Placing::begin);
  m.def("placed(Tensor result) -> bool", Placing::end);
  m.def("not_placed() -> ()", Placing::give_up);
  m.def("convolution_in_parts(Tensor(a!) result, int[] parts, int begin, int alike, Tensor input, Tensor weight, Tensor? bias, "
        "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups) -> ()",
        convolution_in_parts);
  m.def("convolution_backward_in_parts(Tensor(a!)? result, int[] parts, int begin, int alike, Tensor grad_output, Tensor input, "
        "Tensor weight, int[]? bias_sizes, int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, "
        "int groups, bool[3] output_mask) -> (Tensor, Tensor)",
        convolution_backward_in_parts);
  m.def("watch_live() -> ()", watch_live);
  m.def("watched_live() -> int", watched_live);
  m.def("record_places(bool on, str[] skipped, str here) -> ()", record_places);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  Silence silence;  // PyTorch warns that a kernel is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  m.impl("_local_scalar_dense", &read_scalar<&at::native::_local_scalar_dense_cpu>);
}

#ifdef OOC_WITH_CUDA
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  m.impl("_local_scalar_dense", &read_scalar<&at::native::_local_scalar_dense_cuda>);
}
#endif

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  m.impl(kComputes, &max_pool1d);
}

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
  // Views are passed on, and are more frequent than the rest.
  register_direct<ops::as_strided, ops::detach, ops::expand, ops::permute, ops::select_int, ops::slice_Tensor, ops::t,
                  ops::transpose_int, ops::unsqueeze, ops::view, ops::_unsafe_view, ops::squeeze_dim>(m);
}
