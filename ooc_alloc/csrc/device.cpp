#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace ooc {
namespace {

constexpr int kRetries = 3;

void require(const Driver& driver, CUresult result, const std::string& what) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(what + " failed: " + describe(driver, result));
}

}  // namespace

Device::Device(const char* library, int ordinal) : ordinal_(ordinal) {
  std::string error;
  driver_ = load_driver(library, error);
  if (!driver_) throw std::runtime_error(error);
  const Driver& d = *driver_;
  require(d, d.cuInit(0), "cuInit");
  require(d, d.cuDeviceGet(&device_, ordinal), "cuDeviceGet(" + std::to_string(ordinal) + ")");
  int supported = 0;
  require(d, d.cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_),
          "cuDeviceGetAttribute");
  if (supported == 0) throw std::runtime_error("the device has no virtual memory management (compute capability 6.0 and later have it)");
  char text[256] = {};
  require(d, d.cuDeviceGetName(text, sizeof text, device_), "cuDeviceGetName");
  name_ = text;
  host_accessible_ = dlsym(d.handle, "ooc_emulated_get_config") != nullptr;
  require(d, d.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  require(d, d.cuCtxSetCurrent(context_), "cuCtxSetCurrent");
  size_t bytes = 0;
  require(d, d.cuDeviceTotalMem(&bytes, device_), "cuDeviceTotalMem");
  total_ = bytes;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device_;
  require(d, d.cuMemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
  granularity_ = bytes;
  access_.location = properties.location;
  access_.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  require(d, d.cuStreamCreate(&out_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  require(d, d.cuStreamCreate(&in_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

Device::~Device() {
  const Driver& d = *driver_;
  for (CUevent event : events_) d.cuEventDestroy(event);
  if (out_ != nullptr) d.cuStreamDestroy(out_);
  if (in_ != nullptr) d.cuStreamDestroy(in_);
  if (base_ != nullptr) d.cuMemAddressFree(reinterpret_cast<CUdeviceptr>(base_), reserved_);
  d.cuDevicePrimaryCtxRelease(device_);
}

uint64_t Device::free_bytes() const {
  size_t free = 0, total = 0;
  return driver_->cuMemGetInfo(&free, &total) == CUDA_SUCCESS ? free : 0;
}

void Device::reserve(uint64_t bytes) {
  reserved_ = bytes;
  CUdeviceptr address = 0;
  require(*driver_, driver_->cuMemAddressReserve(&address, bytes, granularity_, 0, 0),
          "cuMemAddressReserve of " + std::to_string(bytes) + " bytes");
  base_ = reinterpret_cast<char*>(address);
}

void Device::bind_thread() const {
  thread_local const Device* bound = nullptr;
  if (bound == this) return;
  if (driver_->cuCtxSetCurrent(context_) == CUDA_SUCCESS) bound = this;  // else the call that needs it says so
}

CUstreamCaptureMode Device::set_capture_mode(CUstreamCaptureMode mode) const {
  if (driver_->cuThreadExchangeStreamCaptureMode != nullptr) driver_->cuThreadExchangeStreamCaptureMode(&mode);
  return mode;
}

bool Device::captures(CUstream stream) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const auto ask = driver_->cuStreamIsCapturing;
  return ask != nullptr && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUresult Device::map(char* address, const Chunk* chunks, uint32_t count, const ChunkPool& pool, uint64_t chunk_bytes) {
  return map_each(address, count, chunk_bytes, [&](uint32_t i) { return pool.handle(chunks[i]); });
}

CUresult Device::map_host(char* address, const HostChunks& chunks, const char* host, uint32_t count) {
  const uint64_t bytes = chunks.chunk_bytes();
  return map_each(address, count, bytes, [&](uint32_t i) { return chunks.handle(host + i * bytes); });
}

template <typename HandleOf>
CUresult Device::map_each(char* address, uint32_t count, uint64_t chunk_bytes, HandleOf handle_of) {
  bind_thread();
  const auto start = reinterpret_cast<CUdeviceptr>(address);
  CUresult result = CUDA_SUCCESS;
  uint32_t mapped = 0;
  for (; mapped < count; ++mapped) {
    for (int attempt = 0; attempt < kRetries; ++attempt) {
      ++calls_.map;
      result = driver_->counted(Counted::kMemMap,
                                driver_->cuMemMap(start + mapped * chunk_bytes, chunk_bytes, 0, handle_of(mapped), 0));
      if (result == CUDA_SUCCESS) break;
      driver_->cuMemUnmap(start + mapped * chunk_bytes, chunk_bytes);  // left by a map that could not be undone, if any
    }
    if (result != CUDA_SUCCESS) break;
  }
  for (int attempt = 0; mapped == count && attempt < kRetries; ++attempt) {
    ++calls_.set_access;
    result = driver_->counted(Counted::kMemSetAccess, driver_->cuMemSetAccess(start, count * chunk_bytes, &access_, 1));
    if (result == CUDA_SUCCESS) return result;
  }
  if (mapped > 0) unmap(address, mapped * chunk_bytes);  // should this fail too, the next map of the range sees to it
  return result;
}

CUresult Device::unmap(char* address, uint64_t bytes) {
  bind_thread();
  CUresult result = CUDA_SUCCESS;
  for (int attempt = 0; attempt < kRetries; ++attempt) {
    ++calls_.unmap;
    result = driver_->counted(Counted::kMemUnmap, driver_->cuMemUnmap(reinterpret_cast<CUdeviceptr>(address), bytes));
    if (result == CUDA_SUCCESS) break;
  }
  return result;
}

CUresult Device::copy(Direction direction, char* device, char* host, uint64_t bytes) {
  bind_thread();
  const auto address = reinterpret_cast<CUdeviceptr>(device);
  CUresult result = CUDA_SUCCESS;
  for (int attempt = 0; attempt < kRetries; ++attempt) {
    result = direction == Direction::kOut
                 ? driver_->counted(Counted::kCopyOut, driver_->cuMemcpyDtoHAsync(host, address, bytes, out_))
                 : driver_->counted(Counted::kCopyIn, driver_->cuMemcpyHtoDAsync(address, host, bytes, in_));
    if (result == CUDA_SUCCESS) break;
  }
  return result;
}

CUevent Device::record(Direction direction) {
  CUevent event = nullptr;
  {
    std::lock_guard<std::mutex> lock(events_mutex_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    }
  }
  if (event == nullptr &&
      driver_->counted(Counted::kEventCreate,
                       driver_->cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) != CUDA_SUCCESS)
    return nullptr;
  if (driver_->counted(Counted::kEventRecord, driver_->cuEventRecord(event, stream(direction))) == CUDA_SUCCESS) return event;
  driver_->cuEventDestroy(event);
  return nullptr;
}

// Sleeps grow with what was waited already, so that a wait is a few percent too long at most.
template <typename Query>
CUresult Device::poll(Query query, const char* what) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point began = Clock::now();
  constexpr std::chrono::duration<double> kSpin{20e-6}, kLongest{1e-3};
  int refused = 0;
  while (true) {
    const CUresult result = query();
    if (result == CUDA_SUCCESS) return result;
    refused = result == CUDA_ERROR_NOT_READY ? 0 : refused + 1;
    if (refused == kRetries) return result;  // one that fails now and then answers in the end
    const std::chrono::duration<double> waited = Clock::now() - began;
    if (lost()) return result;
    if (waited.count() > wait_limit_) {
      lose(std::string(what) + " did not end within " + std::to_string(wait_limit_) + " seconds");
      return result;
    }
    if (waited < kSpin) std::this_thread::yield();
    else std::this_thread::sleep_for(std::min(waited / 16, kLongest));
  }
}

// A query that says "not yet" is none that failed.
CUresult Device::await(CUevent event) {
  const auto query = [&] {
    const CUresult result = driver_->cuEventQuery(event);
    return result == CUDA_ERROR_NOT_READY ? result : driver_->counted(Counted::kEventSynchronize, result);
  };
  return poll(query, "the wait for an event (cuEventQuery)");
}

CUresult Device::await(CUstream stream) {
  const auto query = [&] {
    const CUresult result = driver_->cuStreamQuery(stream);
    return result == CUDA_ERROR_NOT_READY ? result : driver_->counted(Counted::kStreamSynchronize, result);
  };
  return poll(query, "the wait for a stream (cuStreamQuery)");
}

void Device::lose(const std::string& how) {
  const std::lock_guard<std::mutex> lock(loss_mutex_);
  if (lost_) return;
  loss_ = how;
  lost_ = true;
}

std::string Device::loss() const {
  const std::lock_guard<std::mutex> lock(loss_mutex_);
  return loss_;
}

std::string Device::describe_loss() const {
  return "the device is lost: " + loss() +
         ". Variables are safe where they are, and nothing is moved any more. Save what can still be used, and restart the "
         "process; if the device is only slow, raise OOC_WAIT_LIMIT";
}

bool Device::idle() const {
  bind_thread();
  return driver_->cuStreamQuery(out_) == CUDA_SUCCESS && driver_->cuStreamQuery(in_) == CUDA_SUCCESS;
}

void Device::recycle(CUevent event) {
  const std::lock_guard<std::mutex> lock(events_mutex_);
  events_.push_back(event);
}

void Device::destroy_copy_streams() {
  for (CUstream* stream : {&out_, &in_}) {
    if (*stream != nullptr) driver_->cuStreamDestroy(*stream);
    *stream = nullptr;
  }
}

// The memory of a copy that may still be under way must not be unmapped, so this does not give up easily.
CUresult Device::drain(Direction direction) {
  constexpr int kPatience = 20;
  CUresult result = CUDA_ERROR_UNKNOWN;
  for (int attempt = 0; attempt < kPatience && result != CUDA_SUCCESS && !lost(); ++attempt) result = await(stream(direction));
  if (result != CUDA_SUCCESS) lose("the driver does not say whether copies are over: it refused " + driver_->last_refusal());
  return result;
}

CUresult Device::wait(CUevent event, Direction direction) {
  bind_thread();
  if (event == nullptr) return drain(direction);
  CUresult result = CUDA_SUCCESS;
  for (int attempt = 0; attempt < kRetries; ++attempt) {
    result = await(event);
    if (result == CUDA_SUCCESS || lost()) break;
  }
  if (result != CUDA_SUCCESS) result = drain(direction);
  if (result == CUDA_SUCCESS) recycle(event);
  return result;
}

}  // namespace ooc
