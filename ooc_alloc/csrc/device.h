// One device as the core uses it: its context, two copy streams, pooled events, one reserved address range that chunks
// are mapped into. The only file that calls the driver, with ChunkPool and HostArena.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "chunk_pool.h"
#include "driver.h"
#include "host_chunks.h"

namespace ooc {

enum class Direction { kOut, kIn };  // device to host, host to device

// Seconds. No copy takes so long, nor do the kernels that somebody enqueues before a copy.
constexpr double kWaitLimit = 1800;

class Device {
 public:
  // Throws std::runtime_error with the driver's words.
  Device(const char* library, int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return *driver_; }
  const std::string& name() const { return name_; }
  bool host_accessible() const { return host_accessible_; }  // the emulated device: kernels run on the host
  int ordinal() const { return ordinal_; }
  CUdevice device() const { return device_; }
  uint64_t total_bytes() const { return total_; }
  uint64_t free_bytes() const;
  uint64_t granularity() const { return granularity_; }

  // Reserves the address range; every address below is an offset-free pointer into it.
  void reserve(uint64_t bytes);
  char* base() const { return base_; }
  uint64_t reserved() const { return reserved_; }

  // Makes the context current in the calling thread (once a thread).
  void bind_thread() const;

  // What the calling thread does from now on does not count as unsafe for a stream that another one captures. Returns
  // the mode it had.
  CUstreamCaptureMode set_capture_mode(CUstreamCaptureMode mode) const;

  // Calls on the stream make a graph now, and are not carried out.
  bool captures(CUstream stream) const;

  // Maps chunks one after another at `address` and makes the whole range accessible. The range is not in use: what may
  // be mapped there is in the way. On failure nothing stays mapped.
  CUresult map(char* address, const Chunk* chunks, uint32_t count, const ChunkPool& pool, uint64_t chunk_bytes);
  // The same with chunks of host memory: those behind the addresses from `host` on.
  CUresult map_host(char* address, const HostChunks& chunks, const char* host, uint32_t count);
  CUresult unmap(char* address, uint64_t bytes);

  // Enqueues one copy; retried a few times where the driver refuses.
  CUresult copy(Direction direction, char* device, char* host, uint64_t bytes);
  // An event after everything enqueued in a direction; null if the driver has none (then the stream is drained).
  CUevent record(Direction direction);
  CUresult wait(CUevent event, Direction direction);
  // Waits without end would hang with a device that hangs: after the limit they end with CUDA_ERROR_NOT_READY, and the
  // device is lost.
  CUresult await(CUevent event);
  CUresult await(CUstream stream);
  void set_wait_limit(double seconds) { wait_limit_ = seconds; }

  // Whether work that was enqueued may never be over (transitions.h).
  bool lost() const { return __builtin_expect(lost_.load(std::memory_order_acquire), false); }
  void lose(const std::string& how);
  void found() { lost_ = false; }
  std::string loss() const;
  // For errors: the call that was refused last; and what to do where the device is lost.
  std::string refused() const { return "the driver refused " + driver_->last_refusal(); }
  std::string describe_loss() const;
  bool idle() const;  // nothing is under way on the copy streams
  void recycle(CUevent event);
  void destroy_copy_streams();  // ends or waits for what is under way; nothing can be copied any more
  CUstream stream(Direction direction) const { return direction == Direction::kOut ? out_ : in_; }

  struct Calls {
    std::atomic<uint64_t> map{0}, unmap{0}, set_access{0};
  };
  const Calls& calls() const { return calls_; }

 private:
  template <typename HandleOf>
  CUresult map_each(char* address, uint32_t count, uint64_t chunk_bytes, HandleOf handle_of);
  CUresult drain(Direction direction);
  template <typename Query>
  CUresult poll(Query query, const char* what);

  std::unique_ptr<Driver> driver_;
  std::string name_;
  bool host_accessible_ = false;
  int ordinal_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
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
