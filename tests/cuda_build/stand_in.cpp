// A stand-in for the CUDA runtime and driver, for machines without a GPU: enough of both, over the emulated device, for a
// CUDA build of PyTorch to allocate, copy, fill, order by streams and events, and capture and replay graphs of those.
//
// Kernels are not run: a launch succeeds and does nothing, so that the memory of CUDA tensors is tested by the bytes that
// copies and fills put there. With computing.cpp operators are computed by the CPU, in the streams' own threads; a launch
// then ends the process and says which kernel it was. Nothing here says how fast a GPU is.
//
//   LD_PRELOAD=stand_in.so    PyTorch's calls of the runtime (cuda*) end here
//   dlopen("stand_in.so")     as a driver (cu*): the emulated driver's calls, but for what captures forbid; as NVML
//
// Stricter than the hardware where that finds mistakes: while any stream is captured, a driver call of ours on that
// stream, and one in a thread that has not relaxed its capture mode, invalidates the capture.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "driver.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

bool in_forked_child = false;  // after CUDA was initialised: the runtime's calls fail there

const ooc::Driver& real() {
  static const ooc::Driver* driver = [] {
    std::string error;
    auto loaded = ooc::load_driver(std::getenv("OOC_TEST_EMULATED_DRIVER"), error);
    if (!loaded || loaded->cuInit(0) != ooc::CUDA_SUCCESS) {
      std::fprintf(stderr, "stand-in: %s\n", error.c_str());
      std::abort();
    }
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
    return loaded.release();
  }();
  thread_local const bool bound = [] {
    ooc::CUcontext context = nullptr;
    driver->cuDevicePrimaryCtxRetain(&context, 0);
    return driver->cuCtxSetCurrent(context) == ooc::CUDA_SUCCESS;
  }();
  (void)bound;
  return *driver;
}

cudaError_t as_error(ooc::CUresult result) { return static_cast<cudaError_t>(result); }  // the numbers are the same
ooc::CUstream as_stream(cudaStream_t stream) { return reinterpret_cast<ooc::CUstream>(stream); }
ooc::CUevent as_event(cudaEvent_t event) { return reinterpret_cast<ooc::CUevent>(event); }
ooc::CUdeviceptr as_device(const void* address) { return reinterpret_cast<ooc::CUdeviceptr>(address); }

// ---- captures -------------------------------------------------------------------------------------------------------

using Work = std::function<cudaError_t(cudaStream_t)>;
struct Graph {
  std::vector<Work> nodes;
};
struct Capture {
  Graph* graph;
  unsigned long long id;
  bool invalid = false;
};

std::mutex mutex;
std::map<ooc::CUstream, Capture> captures;
std::atomic<int> capturing{0};
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaStreamCaptureStatus status_of(ooc::CUstream stream, unsigned long long* id = nullptr, Graph** graph = nullptr) {
  if (capturing == 0) return cudaStreamCaptureStatusNone;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = captures.find(stream);
  if (found == captures.end()) return cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = found->second.id;
  if (graph != nullptr) *graph = found->second.graph;
  return found->second.invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

void invalidate(const char* call) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [stream, capture] : captures)
    if (!std::exchange(capture.invalid, true)) std::fprintf(stderr, "stand-in: %s ended the capture of a stream\n", call);
}

// Enqueues now, or makes it a node of the graph that the stream is captured into.
cudaError_t enqueue(cudaStream_t stream, Work work) {
  Graph* graph = nullptr;
  if (status_of(as_stream(stream), nullptr, &graph) == cudaStreamCaptureStatusNone) return work(stream);
  std::lock_guard<std::mutex> lock(mutex);
  graph->nodes.push_back(std::move(work));
  return cudaSuccess;
}

// ---- the driver -----------------------------------------------------------------------------------------------------

template <class First, class... Rest>
ooc::CUstream stream_among(First first, Rest... rest) {
  if constexpr (std::is_same_v<First, ooc::CUstream>) return first;
  else if constexpr (sizeof...(Rest) > 0) return stream_among(rest...);
  else return nullptr;
}

template <auto member>
struct Forward;
template <class... Arguments, ooc::CUresult (*ooc::Driver::*member)(Arguments...)>
struct Forward<member> {
  // Those that only ask are allowed at any time.
  static constexpr bool harmless(const char* name) {
    for (const char* each : {"cuInit", "cuCtxSetCurrent", "cuCtxGetCurrent", "cuGetErrorName", "cuGetErrorString",
                             "cuDriverGetVersion", "cuStreamGetId"})
      if (std::strcmp(each, name) == 0) return true;
    return false;
  }
  static inline const char* name = "";
  static ooc::CUresult call(Arguments... arguments) {
    if (capturing > 0 && !harmless(name)) {
      if (capture_mode != cudaStreamCaptureModeRelaxed) invalidate(name);
      const ooc::CUstream stream = stream_among(arguments...);
      if (stream != nullptr && status_of(stream) != cudaStreamCaptureStatusNone) {
        invalidate(name);
        return static_cast<ooc::CUresult>(900);  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
      }
    }
    return (real().*member)(arguments...);
  }
};

ooc::CUresult is_capturing(ooc::CUstream stream, ooc::CUstreamCaptureStatus* status) {
  *status = static_cast<ooc::CUstreamCaptureStatus>(status_of(stream));
  return ooc::CUDA_SUCCESS;
}

ooc::CUresult exchange_mode(ooc::CUstreamCaptureMode* mode) {
  const cudaStreamCaptureMode before = capture_mode;
  capture_mode = static_cast<cudaStreamCaptureMode>(*mode);
  *mode = static_cast<ooc::CUstreamCaptureMode>(before);
  return ooc::CUDA_SUCCESS;
}

// Which function a name stands for. Run by the dynamic linker before anything else: calls nothing.
using Function = void (*)();
template <auto member>
Function address_of(const char* name) {
  using Member = decltype(member);
  Forward<member>::name = name;
  if constexpr (std::is_same_v<Member, decltype(&ooc::Driver::cuStreamIsCapturing)>) {
    if (member == &ooc::Driver::cuStreamIsCapturing) return reinterpret_cast<Function>(&is_capturing);
  }
  if constexpr (std::is_same_v<Member, decltype(&ooc::Driver::cuThreadExchangeStreamCaptureMode)>) {
    if (member == &ooc::Driver::cuThreadExchangeStreamCaptureMode) return reinterpret_cast<Function>(&exchange_mode);
  }
  return reinterpret_cast<Function>(&Forward<member>::call);
}

}  // namespace

#define EXPORT_DRIVER_CALL(need, member, symbol, parameters)                                    \
  extern "C" Function resolve_##symbol() { return address_of<&ooc::Driver::member>(#member); }  \
  EXPORTED __attribute__((ifunc("resolve_" #symbol))) void symbol();
OOC_DRIVER_CALLS(EXPORT_DRIVER_CALL)

EXPORTED int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  return *active = 1, 0;
}

// ---- devices --------------------------------------------------------------------------------------------------------

// The second one has no memory: it is there to be refused.
thread_local int current_device = 0;
EXPORTED int nvmlInit() { return 0; }
EXPORTED int nvmlDeviceGetCount_v2(int* count) { return *count = 2, 0; }
EXPORTED cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, cudaSuccess; }
EXPORTED cudaError_t cudaGetDevice(int* device) {
  if (in_forked_child) return cudaErrorInitializationError;
  return *device = current_device, cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return cudaErrorInvalidDevice;
  return current_device = device, cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EXPORTED cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORTED cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrComputeCapabilityMinor ? 0 : 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "stand-in");
  size_t bytes = 0;
  real().cuDeviceTotalMem(&bytes, 0);
  properties->totalGlobalMem = bytes;
  properties->major = 9;
  properties->multiProcessorCount = 2;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = properties->sharedMemPerBlockOptin = 48 << 10;
  for (int i = 0; i < 3; ++i) properties->maxThreadsDim[i] = properties->maxGridSize[i] = 1 << 15;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return as_error(real().cuMemGetInfo(free, total)); }
EXPORTED cudaError_t cudaDeviceSynchronize() {
  if (capturing > 0) return invalidate("cudaDeviceSynchronize"), cudaErrorStreamCaptureUnsupported;
  static const auto synchronize = reinterpret_cast<void (*)()>(dlsym(real().handle, "ooc_emulated_synchronize"));
  return synchronize(), cudaSuccess;
}

// ---- streams and events ---------------------------------------------------------------------------------------------

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return as_error(real().cuStreamCreate(reinterpret_cast<ooc::CUstream*>(stream), flags));
}
EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) { return as_error(real().cuStreamDestroy(as_stream(stream))); }
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) { return as_error(real().cuStreamQuery(as_stream(stream))); }
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (status_of(as_stream(stream)) != cudaStreamCaptureStatusNone)
    return invalidate("cudaStreamSynchronize"), cudaErrorStreamCaptureUnsupported;
  return as_error(real().cuStreamSynchronize(as_stream(stream)));
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return as_error(real().cuStreamWaitEvent(as_stream(stream), as_event(event), flags));
}
EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return as_error(real().cuEventCreate(reinterpret_cast<ooc::CUevent*>(event), flags & 3));
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) { return as_error(real().cuEventDestroy(as_event(event))); }
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return as_error(real().cuEventRecord(as_event(event), as_stream(stream)));
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (capturing > 0 && capture_mode != cudaStreamCaptureModeRelaxed) invalidate("cudaEventQuery");
  return as_error(real().cuEventQuery(as_event(event)));
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) { return as_error(real().cuEventSynchronize(as_event(event))); }
EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return as_error(real().cuEventElapsedTime(milliseconds, as_event(start), as_event(end)));
}

// ---- memory ---------------------------------------------------------------------------------------------------------

// cudaMalloc goes around the allocator; nothing in these tests needs it, so that whoever calls it is found.
EXPORTED cudaError_t cudaMalloc(void**, size_t) { return cudaErrorMemoryAllocation; }
EXPORTED cudaError_t cudaFree(void* address) { return address == nullptr ? cudaSuccess : cudaErrorInvalidValue; }
EXPORTED cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  return as_error(real().cuMemHostAlloc(address, bytes, 0));
}
EXPORTED cudaError_t cudaFreeHost(void* address) { return as_error(real().cuMemFreeHost(address)); }
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const ooc::Driver& driver = real();
  return enqueue(stream, [=, &driver](cudaStream_t on) {
    ooc::CUresult result;
    if (kind == cudaMemcpyHostToDevice) result = driver.cuMemcpyHtoDAsync(as_device(target), source, bytes, as_stream(on));
    else if (kind == cudaMemcpyDeviceToHost) result = driver.cuMemcpyDtoHAsync(target, as_device(source), bytes, as_stream(on));
    else result = driver.cuMemcpyDtoDAsync(as_device(target), as_device(source), bytes, as_stream(on));
    return as_error(result);
  });
}
EXPORTED cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(target, source, bytes, kind, nullptr);
  return error != cudaSuccess ? error : as_error(real().cuStreamSynchronize(nullptr));
}
EXPORTED cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  const ooc::Driver& driver = real();
  return enqueue(stream, [=, &driver](cudaStream_t on) {
    return as_error(driver.cuMemsetD8Async(as_device(target), static_cast<unsigned char>(value), bytes, as_stream(on)));
  });
}
EXPORTED cudaError_t cudaMemset(void* target, int value, size_t bytes) { return cudaMemsetAsync(target, value, bytes, nullptr); }

// ---- captures and graphs --------------------------------------------------------------------------------------------

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (in_forked_child) return cudaErrorInitializationError;
  *status = status_of(as_stream(stream));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  Graph* found = nullptr;
  *status = status_of(as_stream(stream), id, &found);
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(found);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static unsigned long long next = 1;
  std::lock_guard<std::mutex> lock(mutex);
  captures[as_stream(stream)] = {new Graph, next++};
  ++capturing;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = captures.find(as_stream(stream));
  if (found == captures.end()) return cudaErrorIllegalState;
  const Capture capture = found->second;
  captures.erase(found);
  --capturing;
  *graph = capture.invalid ? nullptr : reinterpret_cast<cudaGraph_t>(capture.graph);
  return capture.invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
  *runnable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream) {
  for (const Work& work : reinterpret_cast<Graph*>(runnable)->nodes)
    if (const cudaError_t error = work(stream)) return error;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {
  return delete reinterpret_cast<Graph*>(runnable), cudaSuccess;
}

// ---- kernels: none is run -------------------------------------------------------------------------------------------

namespace {

std::atomic<bool> computes{false};

std::map<const void*, const char*>& kernel_names() {
  static auto& names = *new std::map<const void*, const char*>;
  return names;
}

cudaError_t launched(const void* entry) {
  if (in_forked_child) return cudaErrorInitializationError;
  if (!computes) return cudaSuccess;
  const auto found = kernel_names().find(entry);
  int status = 0;
  const char* name = found != kernel_names().end() ? found->second : "?";
  const char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::fprintf(stderr, "stand-in: a kernel was launched that nothing computes: %.300s\n", plain != nullptr ? plain : name);
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
  std::abort();
}

}  // namespace

EXPORTED void ooc_stand_in_computes() { computes = true; }

EXPORTED void __cudaRegisterFunction(void** module, const char* entry, char* symbol, const char* name, int limit, uint3* thread,
                                     uint3* block, dim3* block_size, dim3* grid_size, int* warp) {
  using Function = decltype(&__cudaRegisterFunction);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "__cudaRegisterFunction"));
  kernel_names()[entry] = name;
  next(module, entry, symbol, name, limit, thread, block, block_size, grid_size, warp);
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* entry) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(entry));
  return cudaSuccess;
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(kernel);
}
EXPORTED cudaError_t cudaLaunchKernel(const void* entry, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(entry);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* entry, void**) {
  return launched(entry);
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const ooc::Driver& driver = real();
  return enqueue(stream, [=, &driver](cudaStream_t on) { return as_error(driver.cuLaunchHostFunc(as_stream(on), function, data)); });
}
EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}
