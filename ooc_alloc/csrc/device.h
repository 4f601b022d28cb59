// One device as the core uses it: its context, two copy streams, pooled events, one reserved address range that chunks
// are mapped into. The only file that calls the driver, with ChunkPool and HostArena.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "chunk_pool.h"
#include "clock.h"
#include "driver.h"
#include "host_chunks.h"

namespace ooc {

enum class Direction { kOut, kIn };  // device to host, host to device

// Seconds. No copy takes so long, nor do the kernels that somebody enqueues before a copy.
constexpr double kWaitLimit = 1800;

class Device {
 public:
  // Throws std::runtime_error with the driver's words.
  Device(const char* library, int ordinal) : ordinal_(ordinal) {
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
    memory_ = memory_at({CU_MEM_LOCATION_TYPE_DEVICE, device_});
    access_ = {memory_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    require(d, d.cuMemGetAllocationGranularity(&bytes, &memory_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
            "cuMemGetAllocationGranularity");
    granularity_ = bytes;
    require(d, d.cuStreamCreate(&out_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    require(d, d.cuStreamCreate(&in_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~Device() {
    const Driver& d = *driver_;
    for (CUevent event : events_) d.cuEventDestroy(event);
    if (out_ != nullptr) d.cuStreamDestroy(out_);
    if (in_ != nullptr) d.cuStreamDestroy(in_);
    if (base_ != nullptr) d.cuMemAddressFree(reinterpret_cast<CUdeviceptr>(base_), reserved_);
    d.cuDevicePrimaryCtxRelease(device_);
  }

  const Driver& driver() const { return *driver_; }
  const std::string& name() const { return name_; }
  bool host_accessible() const { return host_accessible_; }  // the emulated device: kernels run on the host
  int ordinal() const { return ordinal_; }
  CUdevice device() const { return device_; }
  // What its memory is created and mapped with.
  const CUmemAllocationProp& memory() const { return memory_; }
  const CUmemAccessDesc& access() const { return access_; }
  uint64_t total_bytes() const { return total_; }
  uint64_t free_bytes() const {
    size_t free = 0, total = 0;
    return driver_->cuMemGetInfo(&free, &total) == CUDA_SUCCESS ? free : 0;
  }
  uint64_t granularity() const { return granularity_; }

  // Reserves the address range; every address below is an offset-free pointer into it.
  void reserve(uint64_t bytes) {
    reserved_ = bytes;
    CUdeviceptr address = 0;
    require(*driver_, driver_->cuMemAddressReserve(&address, bytes, granularity_, 0, 0),
            "cuMemAddressReserve of " + std::to_string(bytes) + " bytes");
    base_ = reinterpret_cast<char*>(address);
  }
  char* base() const { return base_; }
  uint64_t reserved() const { return reserved_; }

  // Makes the context current in the calling thread (once a thread).
  void bind_thread() const {
    thread_local uint64_t bound = 0;
    if (bound == number_) return;
    if (driver_->cuCtxSetCurrent(context_) == CUDA_SUCCESS) bound = number_;  // else the call that needs it says so
  }

  // What the calling thread does from now on does not count as unsafe for a stream that another one captures. Returns
  // the mode it had.
  CUstreamCaptureMode set_capture_mode(CUstreamCaptureMode mode) const {
    if (driver_->cuThreadExchangeStreamCaptureMode != nullptr) driver_->cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
  }

  // Calls on the stream make a graph now, and are not carried out.
  bool captures(CUstream stream) const {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const auto ask = driver_->cuStreamIsCapturing;
    return ask != nullptr && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
  }

  // Maps chunks one after another at `address` and makes the whole range accessible. The range is not in use: what may
  // be mapped there is in the way. On failure nothing stays mapped.
  CUresult map(char* address, const Chunk* chunks, uint32_t count, const ChunkPool& pool, uint64_t chunk_bytes) {
    return map_each(address, count, chunk_bytes, [&](uint32_t i) { return pool.handle(chunks[i]); });
  }
  // The same with chunks of host memory: those behind the addresses from `host` on.
  CUresult map_host(char* address, const HostChunks& chunks, const char* host, uint32_t count) {
    const uint64_t bytes = chunks.chunk_bytes();
    return map_each(address, count, bytes, [&](uint32_t i) { return chunks.handle(host + i * bytes); });
  }
  CUresult unmap(char* address, uint64_t bytes) {
    bind_thread();
    const Spent spent(calls_.unmap_seconds);
    calls_.unmapped_bytes += bytes;
    return driver_->retried(Counted::kMemUnmap, [&] {
      ++calls_.unmap;
      return driver_->cuMemUnmap(reinterpret_cast<CUdeviceptr>(address), bytes);
    });
  }

  // Enqueues one copy; retried a few times where the driver refuses.
  CUresult copy(Direction direction, char* device, char* host, uint64_t bytes) {
    bind_thread();
    const auto address = reinterpret_cast<CUdeviceptr>(device);
    const auto out = [&] { return driver_->cuMemcpyDtoHAsync(host, address, bytes, out_); };
    const auto in = [&] { return driver_->cuMemcpyHtoDAsync(address, host, bytes, in_); };
    if (direction == Direction::kOut) return driver_->retried(Counted::kCopyOut, out);
    return driver_->retried(Counted::kCopyIn, in);
  }
  // An event after everything enqueued in a direction; null if the driver has none (then the stream is drained).
  CUevent record(Direction direction) {
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
  CUresult wait(CUevent event, Direction direction) {
    bind_thread();
    if (event == nullptr) return drain(stream(direction));
    CUresult result = CUDA_SUCCESS;
    for (int attempt = 0; attempt < kRetries; ++attempt) {
      result = await(event);
      if (result == CUDA_SUCCESS || lost()) break;
    }
    if (result != CUDA_SUCCESS) result = drain(stream(direction));
    if (result == CUDA_SUCCESS) recycle(event);
    return result;
  }
  // Waits without end would hang with a device that hangs: after the limit they end with CUDA_ERROR_NOT_READY, and the
  // device is lost.
  CUresult await(CUevent event) {
    return poll(Counted::kEventSynchronize, "the wait for an event (cuEventQuery)",
                [&] { return driver_->cuEventQuery(event); });
  }
  CUresult await(CUstream stream) {
    return poll(Counted::kStreamSynchronize, "the wait for a stream (cuStreamQuery)",
                [&] { return driver_->cuStreamQuery(stream); });
  }
  // Until a question of the caller's, which asks for events, is answered with CUDA_SUCCESS.
  template <typename Query>
  CUresult await(Query query) {
    return poll(Counted::kEventSynchronize, "the wait for events (cuEventQuery)", query);
  }
  // Waits for all that was enqueued on the stream, or before the event. The memory of work that may still be under way must
  // not be unmapped, so this does not give up easily; where it does, the device is lost.
  template <typename Handle>
  CUresult drain(Handle handle) {
    constexpr int kPatience = 20;
    CUresult result = CUDA_ERROR_UNKNOWN;
    for (int attempt = 0; attempt < kPatience && result != CUDA_SUCCESS && !lost(); ++attempt) result = await(handle);
    if (result != CUDA_SUCCESS)
      lose("the driver does not say whether work is over: it refused " + driver_->last_refusal());
    return result;
  }
  void set_wait_limit(double seconds) { wait_limit_ = seconds; }
  double wait_limit() const { return wait_limit_; }

  // Whether work that was enqueued may never be over (transitions.h).
  bool lost() const { return __builtin_expect(lost_.load(std::memory_order_acquire), false); }
  void lose(const std::string& how) {
    const std::lock_guard<std::mutex> lock(loss_mutex_);
    if (lost_) return;
    loss_ = how;
    lost_ = true;
  }
  void found() { lost_ = false; }
  std::string loss() const {
    const std::lock_guard<std::mutex> lock(loss_mutex_);
    return loss_;
  }
  // For errors: the call that was refused last; and what to do where the device is lost.
  std::string refused() const { return "the driver refused " + driver_->last_refusal(); }
  std::string describe_loss() const {
    return "the device is lost: " + loss() +
           ". Variables are safe where they are, and nothing is moved any more. Save what can still be used, and restart the "
           "process; if the device is only slow, raise OOC_WAIT_LIMIT";
  }
  // nothing is under way on the copy streams
  bool idle() const {
    bind_thread();
    return driver_->cuStreamQuery(out_) == CUDA_SUCCESS && driver_->cuStreamQuery(in_) == CUDA_SUCCESS;
  }
  void recycle(CUevent event) {
    const std::lock_guard<std::mutex> lock(events_mutex_);
    events_.push_back(event);
  }
  // ends or waits for what is under way; nothing can be copied any more
  void destroy_copy_streams() {
    for (CUstream* stream : {&out_, &in_}) {
      if (*stream != nullptr) driver_->cuStreamDestroy(*stream);
      *stream = nullptr;
    }
  }
  CUstream stream(Direction direction) const { return direction == Direction::kOut ? out_ : in_; }

  struct Calls {
    std::atomic<uint64_t> map{0}, unmap{0}, set_access{0}, unmapped_bytes{0};
    std::atomic<double> map_seconds{0}, unmap_seconds{0};  // map_seconds: with the access
  };
  const Calls& calls() const { return calls_; }

 private:
  static constexpr int kRetries = 3;

  struct Spent {
    explicit Spent(std::atomic<double>& sum) : sum_(sum) {}
    ~Spent() { sum_ += now_seconds() - began_; }
    Spent(const Spent&) = delete;
    Spent& operator=(const Spent&) = delete;

   private:
    std::atomic<double>& sum_;
    const double began_ = now_seconds();
  };

  static void require(const Driver& driver, CUresult result, const std::string& what) {
    if (result != CUDA_SUCCESS) throw std::runtime_error(what + " failed: " + describe(driver, result));
  }

  template <typename HandleOf>
  CUresult map_each(char* address, uint32_t count, uint64_t chunk_bytes, HandleOf handle_of) {
    bind_thread();
    const Spent spent(calls_.map_seconds);
    const auto start = reinterpret_cast<CUdeviceptr>(address);
    CUresult result = CUDA_SUCCESS;
    uint32_t mapped = 0;
    const auto map_next = [&] {
      ++calls_.map;
      const CUdeviceptr at = start + mapped * chunk_bytes;
      const CUresult refusal = driver_->cuMemMap(at, chunk_bytes, 0, handle_of(mapped), 0);
      // What a map left that could not be undone, if any, is in the way.
      if (refusal != CUDA_SUCCESS) driver_->cuMemUnmap(at, chunk_bytes);
      return refusal;
    };
    while (mapped < count && (result = driver_->retried(Counted::kMemMap, map_next)) == CUDA_SUCCESS) ++mapped;
    if (mapped == count) {
      result = driver_->retried(Counted::kMemSetAccess, [&] {
        ++calls_.set_access;
        return driver_->cuMemSetAccess(start, count * chunk_bytes, &access_, 1);
      });
      if (result == CUDA_SUCCESS) return result;
    }
    if (mapped > 0) unmap(address, mapped * chunk_bytes);  // should this fail too, the next map of the range sees to it
    return result;
  }
  // Sleeps grow with what was waited already, so that a wait is a few percent too long at most. A query that says "not
  // yet" is none that failed.
  template <typename Query>
  CUresult poll(Counted call, const char* what, Query query) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point began = Clock::now();
    constexpr std::chrono::duration<double> kSpin{20e-6}, kLongest{1e-3};
    int refused = 0;
    while (true) {
      const CUresult result = query();
      if (result == CUDA_SUCCESS) return result;
      if (result != CUDA_ERROR_NOT_READY) driver_->counted(call, result);
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

  std::unique_ptr<Driver> driver_;
  std::string name_;
  bool host_accessible_ = false;
  inline static std::atomic<uint64_t> made_{0};
  const uint64_t number_ = ++made_;  // unlike an address, never used again
  int ordinal_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUmemAllocationProp memory_{};
  CUmemAccessDesc access_{};
  uint64_t total_ = 0, granularity_ = 0, reserved_ = 0;
  char* base_ = nullptr;
  CUstream out_ = nullptr, in_ = nullptr;
  std::mutex events_mutex_;
  std::vector<CUevent> events_;
  Calls calls_;
  double wait_limit_ = kWaitLimit;
  std::atomic<bool> lost_{false};
  mutable std::mutex loss_mutex_;
  std::string loss_;
};

// While one exists, the thread does not end the captures of others. For calls that may come at any time; null: none
// needed.
class RelaxedCaptures {
 public:
  explicit RelaxedCaptures(const Device* device) : device_(device) {
    if (device_ != nullptr) before_ = device_->set_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
  }
  ~RelaxedCaptures() {
    if (device_ != nullptr) device_->set_capture_mode(before_);
  }
  RelaxedCaptures(const RelaxedCaptures&) = delete;
  RelaxedCaptures& operator=(const RelaxedCaptures&) = delete;

 private:
  const Device* device_;
  CUstreamCaptureMode before_ = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

}  // namespace ooc
