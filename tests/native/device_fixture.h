// A driver that is loaded and initialised once, and small helpers on it, for the tests of drivers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
#include "testing.h"

namespace ooc::testing {

using Bytes = std::vector<unsigned char>;

// The driver under test, initialised, with the context current in this thread. An emulated device gets `memory` and the
// granularity of hardware unless the environment says otherwise; a real one does not look at these variables.
inline const Driver& driver(const char* memory = "256MiB") {
  static const Driver* loaded = [memory] {
    setenv("OOC_EMULATED_MEMORY", memory, 0);
    std::string error;
    std::unique_ptr<Driver> table = load_driver(test_driver(), error);
    CUcontext context = nullptr;
    if (table == nullptr || table->cuInit(0) != CUDA_SUCCESS ||
        table->cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS ||
        table->cuCtxSetCurrent(context) != CUDA_SUCCESS) {
      std::fprintf(stderr, "%s cannot be used: %s\n", test_driver(), error.c_str());
      std::exit(1);
    }
    return table.release();
  }();
  return *loaded;
}

inline std::string show(CUresult result) { return describe(driver(), result); }

#define EXPECT_OK(call) EXPECT_EQ(call, ooc::CUDA_SUCCESS)
#define ASSERT_OK(call) ASSERT_EQ(call, ooc::CUDA_SUCCESS)

inline CUmemAllocationProp device_memory() {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  return prop;
}

inline size_t granularity() {
  size_t bytes = 0;
  const CUmemAllocationProp prop = device_memory();
  ASSERT_OK(driver().cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  ASSERT_TRUE(bytes > 0);
  return bytes;
}

inline CUmemGenericAllocationHandle create(size_t bytes) {
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp prop = device_memory();
  ASSERT_OK(driver().cuMemCreate(&handle, bytes, &prop, 0));
  return handle;
}

inline CUresult set_access(CUdeviceptr address, size_t bytes,
                           CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
  const CUmemAccessDesc desc{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, flags};
  return driver().cuMemSetAccess(address, bytes, &desc, 1);
}

// A reservation of `count` chunks; what a test leaves mapped there is unmapped at the end.
struct Range {
  explicit Range(size_t count, size_t chunk_bytes = granularity()) : chunk(chunk_bytes), mapped(count, false) {
    ASSERT_OK(driver().cuMemAddressReserve(&base, count * chunk, 0, 0, 0));
  }
  ~Range() {
    (void)driver().cuStreamSynchronize(nullptr);  // fills are not waited for
    size_t refused = 0;
    for (size_t i = 0; i < mapped.size(); ++i) {
      if (mapped[i] && driver().cuMemUnmap(at(i), chunk) != CUDA_SUCCESS) ++refused;
    }
    EXPECT_EQ(refused, size_t{0});
    EXPECT_OK(driver().cuMemAddressFree(base, mapped.size() * chunk));
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  CUdeviceptr at(size_t index) const { return base + index * chunk; }
  void map(size_t index, CUmemGenericAllocationHandle handle) {
    ASSERT_OK(driver().cuMemMap(at(index), chunk, 0, handle, 0));
    mapped[index] = true;
  }
  void unmap(size_t index, size_t count = 1) {
    ASSERT_OK(driver().cuMemUnmap(at(index), count * chunk));
    for (size_t i = index; i < index + count; ++i) mapped[i] = false;
  }
  // New memory in chunks [index, index + count), accessible; the mappings keep it alive.
  void fill(size_t index, size_t count = 1) {
    for (size_t i = index; i < index + count; ++i) {
      const CUmemGenericAllocationHandle handle = create(chunk);
      map(i, handle);
      ASSERT_OK(driver().cuMemRelease(handle));
    }
    ASSERT_OK(set_access(at(index), count * chunk));
  }

  size_t chunk;
  CUdeviceptr base = 0;
  std::vector<bool> mapped;
};

inline Bytes pattern(size_t bytes, unsigned seed) {
  Bytes result(bytes);
  uint32_t state = seed * 2654435761u + 1;
  for (unsigned char& byte : result) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<unsigned char>(state >> 24);
  }
  return result;
}

// OOC_TEST_DISK: a folder for swapped data. Most tests of the core run a second time with it, on the emulated device. Of what
// a function uses on the disk in place no driver knows, and the host has it.
inline const char* test_disk() { return std::getenv("OOC_TEST_DISK"); }

// OOC_TEST_TIERS: chunks of host memory between the device and that disk.
inline uint64_t test_tiers() {
  const char* chunks = std::getenv("OOC_TEST_TIERS");
  return chunks != nullptr ? std::strtoull(chunks, nullptr, 10) : 0;
}

// A driver may return from cuMemcpyHtoD before the bytes have arrived, on the null stream, for which no other stream waits.
inline void write(CUdeviceptr address, const Bytes& bytes) {
  if (driver().cuMemcpyHtoD(address, bytes.data(), bytes.size()) == ooc::CUDA_SUCCESS)
    return ASSERT_OK(driver().cuStreamSynchronize(nullptr));
  ASSERT_TRUE(test_disk() != nullptr);
  std::memcpy(reinterpret_cast<void*>(address), bytes.data(), bytes.size());
}

inline Bytes read(CUdeviceptr address, size_t bytes) {
  Bytes result(bytes);
  if (driver().cuMemcpyDtoH(result.data(), address, bytes) == ooc::CUDA_SUCCESS) return result;
  ASSERT_TRUE(test_disk() != nullptr);
  std::memcpy(result.data(), reinterpret_cast<const void*>(address), bytes);
  return result;
}

struct Stream {
  explicit Stream(unsigned flags = CU_STREAM_NON_BLOCKING) { ASSERT_OK(driver().cuStreamCreate(&handle, flags)); }
  ~Stream() { EXPECT_OK(driver().cuStreamDestroy(handle)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream handle = nullptr;
};

struct Event {
  explicit Event(unsigned flags = CU_EVENT_DEFAULT) { ASSERT_OK(driver().cuEventCreate(&handle, flags)); }
  ~Event() { EXPECT_OK(driver().cuEventDestroy(handle)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  CUevent handle = nullptr;
};

// Holds a stream back until it is opened. Declare it after the stream: it opens at the end, whatever the test did.
class Gate {
 public:
  ~Gate() { open(); }
  void close_on(const Stream& stream) { close_on(stream.handle); }
  void close_on(CUstream stream) {
    ASSERT_OK(driver().cuLaunchHostFunc(stream, [](void* gate) { static_cast<State*>(gate)->wait(); }, &state_));
    closed_on_ = stream;
  }
  void open() {
    {
      const std::lock_guard<std::mutex> lock(state_.mutex);
      state_.is_open = true;
    }
    state_.changed.notify_all();
    if (closed_on_ != nullptr) EXPECT_OK(driver().cuStreamSynchronize(closed_on_));  // it refers to this object
    closed_on_ = nullptr;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_open = false;
    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return is_open; });
    }
  };
  State state_;
  CUstream closed_on_ = nullptr;
};

}  // namespace ooc::testing
