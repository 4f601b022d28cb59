#include "probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core.h"
#include "driver.h"

namespace ooc {
namespace {

using Clock = std::chrono::steady_clock;

class ProbeFailure : public std::runtime_error {
 public:
  ProbeFailure(int code, const std::string& text) : std::runtime_error(text), status(code) {}
  int status;
};

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Columns of measurements, one row a repeat; the warm-up row is not kept.
class Samples {
 public:
  explicit Samples(size_t columns) : columns_(columns) {}
  std::vector<double>& operator[](size_t column) { return columns_[column]; }
  double median_of(size_t column) const { return median(columns_[column]); }
  void forget() {
    for (auto& column : columns_) column.clear();
  }

 private:
  std::vector<std::vector<double>> columns_;
};

void repeat(uint32_t repeats, Samples& samples, const std::function<void()>& once) {
  for (uint32_t row = 0; row <= std::max<uint32_t>(repeats, 1); ++row) {
    once();
    if (row == 0) samples.forget();
  }
}

}  // namespace
}  // namespace ooc

using namespace ooc;

struct ooc_probe {
  std::unique_ptr<Driver> driver;
  CUdevice device = 0;
  CUcontext context = nullptr;
  CUstream out = nullptr, in = nullptr;
  CUmemAllocationProp properties{};
  CUmemAccessDesc access{};
  size_t granularity = 0;

  ~ooc_probe() {
    if (out != nullptr) driver->cuStreamDestroy(out);
    if (in != nullptr) driver->cuStreamDestroy(in);
    if (context != nullptr) driver->cuDevicePrimaryCtxRelease(device);
  }

  void check(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return;
    const int status = result == CUDA_ERROR_OUT_OF_MEMORY ? OOC_OUT_OF_MEMORY : OOC_DRIVER_FAILURE;
    throw ProbeFailure(status, std::string(call) + " failed: " + describe(*driver, result));
  }

  void open(const char* library, int ordinal) {
    std::string error;
    driver = load_driver(library, error);
    if (driver == nullptr) throw ProbeFailure(OOC_INVALID, error);
    check(driver->cuInit(0), "cuInit");
    check(driver->cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(driver->cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(driver->cuCtxSetCurrent(context), "cuCtxSetCurrent");
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    check(driver->cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
    check(driver->cuStreamCreate(&out, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check(driver->cuStreamCreate(&in, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
};

namespace ooc {
namespace {

// A reserved range and its chunks. Every step is a method, so that it can be timed; the destructor undoes what was done.
class Range {
 public:
  Range(const ooc_probe& probe, uint64_t chunk_bytes, uint32_t chunks)
      : probe_(probe), driver_(*probe.driver), chunk_(chunk_bytes), count_(chunks) {
    probe.check(driver_.cuMemAddressReserve(&base_, bytes(), 0, 0, 0), "cuMemAddressReserve");
  }
  ~Range() {
    if (mapped_ > 0) driver_.cuMemUnmap(base_, mapped_ * chunk_);
    for (const auto handle : handles_) driver_.cuMemRelease(handle);
    driver_.cuMemAddressFree(base_, bytes());
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  CUdeviceptr base() const { return base_; }
  uint64_t bytes() const { return chunk_ * count_; }

  void create() {
    while (handles_.size() < count_) {
      CUmemGenericAllocationHandle handle = 0;
      probe_.check(driver_.cuMemCreate(&handle, chunk_, &probe_.properties, 0), "cuMemCreate");
      handles_.push_back(handle);
    }
  }
  void map() {
    for (; mapped_ < count_; ++mapped_)
      probe_.check(driver_.cuMemMap(base_ + mapped_ * chunk_, chunk_, 0, handles_[mapped_], 0), "cuMemMap");
  }
  void set_access() { probe_.check(driver_.cuMemSetAccess(base_, bytes(), &probe_.access, 1), "cuMemSetAccess"); }
  void unmap() {
    probe_.check(driver_.cuMemUnmap(base_, bytes()), "cuMemUnmap");
    mapped_ = 0;
  }
  void release() {
    while (!handles_.empty()) {
      const auto handle = handles_.back();
      handles_.pop_back();
      probe_.check(driver_.cuMemRelease(handle), "cuMemRelease");
    }
  }

 private:
  const ooc_probe& probe_;
  const Driver& driver_;
  const uint64_t chunk_;
  const uint32_t count_;
  CUdeviceptr base_ = 0;
  uint32_t mapped_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

// Page-aligned host memory that has been touched; pinned if asked for.
class HostBuffer {
 public:
  HostBuffer(const ooc_probe& probe, uint64_t bytes, bool pinned) : probe_(probe), bytes_(bytes) {
    address_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address_ == MAP_FAILED)
      throw ProbeFailure(OOC_OUT_OF_MEMORY, "no host memory for " + std::to_string(bytes) + " bytes");
    std::memset(address_, 1, bytes);
    try {
      if (pinned) pin();
    } catch (...) {
      munmap(address_, bytes_);
      throw;
    }
  }
  ~HostBuffer() {
    if (pinned_) probe_.driver->cuMemHostUnregister(address_);
    munmap(address_, bytes_);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  void* address() const { return address_; }
  void pin() {
    probe_.check(probe_.driver->cuMemHostRegister(address_, bytes_, kMemHostRegisterPortable), "cuMemHostRegister");
    pinned_ = true;
  }
  void unpin() {
    probe_.check(probe_.driver->cuMemHostUnregister(address_), "cuMemHostUnregister");
    pinned_ = false;
  }

 private:
  const ooc_probe& probe_;
  const uint64_t bytes_;
  void* address_ = nullptr;
  bool pinned_ = false;
};

// Seconds from now until a copy is done. Returns the driver's result, as it also runs outside the calling thread.
CUresult timed_copy(const ooc_probe& probe, bool is_out, CUdeviceptr device, void* host, uint64_t bytes,
                    double& seconds) {
  const Driver& driver = *probe.driver;
  const CUstream stream = is_out ? probe.out : probe.in;
  const auto start = Clock::now();
  const CUresult result = is_out ? driver.cuMemcpyDtoHAsync(host, device, bytes, stream)
                                 : driver.cuMemcpyHtoDAsync(device, host, bytes, stream);
  if (result != CUDA_SUCCESS) return result;
  const CUresult done = driver.cuStreamSynchronize(stream);
  seconds = since(start);
  return done;
}

// Both directions start together, each from a thread of its own.
void timed_both(const ooc_probe& probe, const Range ranges[2], HostBuffer hosts[2], uint64_t bytes, double seconds[2]) {
  std::atomic<int> ready{0};
  CUresult results[2] = {CUDA_SUCCESS, CUDA_SUCCESS};
  const auto run = [&](int index) {
    results[index] = probe.driver->cuCtxSetCurrent(probe.context);
    ready += 1;
    while (ready < 2) std::this_thread::yield();
    if (results[index] == CUDA_SUCCESS)
      results[index] =
          timed_copy(probe, index == 0, ranges[index].base(), hosts[index].address(), bytes, seconds[index]);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  for (const CUresult result : results) probe.check(result, "a copy in both directions");
}

void describe_device(const ooc_probe& probe, ooc_probe_device& device) {
  const Driver& driver = *probe.driver;
  device = {};
  probe.check(driver.cuDeviceGetName(device.name, sizeof device.name, probe.device), "cuDeviceGetName");
  size_t free = 0, total = 0;
  probe.check(driver.cuMemGetInfo(&free, &total), "cuMemGetInfo");
  device.total_bytes = total;
  device.free_bytes = free;
  device.granularity_bytes = probe.granularity;
  probe.check(driver.cuDriverGetVersion(&device.driver_version), "cuDriverGetVersion");
  probe.check(driver.cuDeviceGetAttribute(&device.copy_engines, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, probe.device),
              "cuDeviceGetAttribute");
}

void measure_memory(const ooc_probe& probe, uint64_t chunk_bytes, uint32_t chunks, uint32_t repeats,
                    ooc_probe_memory& cost) {
  if (chunks == 0 || chunk_bytes == 0 || chunk_bytes % probe.granularity != 0)
    throw ProbeFailure(OOC_INVALID, "a chunk must be a multiple of " + std::to_string(probe.granularity) + " bytes");
  Samples samples(5);
  Range range(probe, chunk_bytes, chunks);
  const auto timed = [&](size_t column, void (Range::*step)(), double share) {
    const auto start = Clock::now();
    (range.*step)();
    samples[column].push_back(since(start) / share);
  };
  repeat(repeats, samples, [&] {
    timed(0, &Range::create, chunks);
    timed(1, &Range::map, chunks);
    timed(2, &Range::set_access, 1);
    timed(3, &Range::unmap, 1);
    timed(4, &Range::release, chunks);
  });
  cost.create_seconds = samples.median_of(0);
  cost.map_seconds = samples.median_of(1);
  cost.set_access_seconds = samples.median_of(2);
  cost.unmap_seconds = samples.median_of(3);
  cost.release_seconds = samples.median_of(4);
}

void measure_copy(const ooc_probe& probe, uint64_t bytes, uint32_t repeats, ooc_probe_copy& cost) {
  if (bytes == 0) throw ProbeFailure(OOC_INVALID, "a copy of no bytes cannot be measured");
  const uint64_t rounded = (bytes + probe.granularity - 1) / probe.granularity * probe.granularity;
  Range ranges[2] = {{probe, rounded, 1}, {probe, rounded, 1}};
  for (Range& range : ranges) {
    range.create();
    range.map();
    range.set_access();
    probe.check(probe.driver->cuMemsetD8(range.base(), 1, bytes), "cuMemsetD8");
  }
  HostBuffer hosts[2] = {{probe, bytes, true}, {probe, bytes, true}};
  Samples samples(4);
  repeat(repeats, samples, [&] {
    double seconds[2] = {0, 0};
    for (int index = 0; index < 2; ++index) {
      probe.check(timed_copy(probe, index == 0, ranges[index].base(), hosts[index].address(), bytes, seconds[index]),
                  index == 0 ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync");
      samples[static_cast<size_t>(index)].push_back(seconds[index]);
    }
    timed_both(probe, ranges, hosts, bytes, seconds);
    samples[2].push_back(seconds[0]);
    samples[3].push_back(seconds[1]);
  });
  cost = {samples.median_of(0), samples.median_of(1), samples.median_of(2), samples.median_of(3)};
}

void measure_pinning(const ooc_probe& probe, uint64_t bytes, uint32_t repeats, ooc_probe_pinning& cost) {
  if (bytes == 0) throw ProbeFailure(OOC_INVALID, "pinning of no bytes cannot be measured");
  Samples samples(2);
  HostBuffer buffer(probe, bytes, false);
  repeat(repeats, samples, [&] {
    auto start = Clock::now();
    buffer.pin();
    samples[0].push_back(since(start));
    start = Clock::now();
    buffer.unpin();
    samples[1].push_back(since(start));
  });
  cost = {samples.median_of(0), samples.median_of(1)};
}

// The C interface: no exception leaves it. The caller's thread may not be the one that opened the probe.
template <class Body>
int guarded(const ooc_probe* probe, Body body) {
  try {
    if (probe != nullptr) probe->check(probe->driver->cuCtxSetCurrent(probe->context), "cuCtxSetCurrent");
    body();
    return OOC_OK;
  } catch (const ProbeFailure& failure) {
    set_last_error(failure.what());
    return failure.status;
  } catch (const std::bad_alloc&) {
    set_last_error("no host memory is left for the probe");
    return OOC_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return OOC_INVALID;
  }
}

}  // namespace
}  // namespace ooc

ooc_probe* ooc_probe_open(const char* driver_library, int32_t device_ordinal) {
  std::unique_ptr<ooc_probe> probe;
  const int status = guarded(nullptr, [&] {
    probe = std::make_unique<ooc_probe>();
    probe->open(driver_library, device_ordinal);
  });
  return status == OOC_OK ? probe.release() : nullptr;
}

void ooc_probe_close(ooc_probe* probe) { delete probe; }

int ooc_probe_describe(ooc_probe* probe, ooc_probe_device* device) {
  return guarded(probe, [&] { describe_device(*probe, *device); });
}

int ooc_probe_measure_memory(ooc_probe* probe, uint64_t chunk_bytes, uint32_t chunks, uint32_t repeats,
                             ooc_probe_memory* cost) {
  return guarded(probe, [&] { measure_memory(*probe, chunk_bytes, chunks, repeats, *cost); });
}

int ooc_probe_measure_copy(ooc_probe* probe, uint64_t bytes, uint32_t repeats, ooc_probe_copy* cost) {
  return guarded(probe, [&] { measure_copy(*probe, bytes, repeats, *cost); });
}

int ooc_probe_measure_pinning(ooc_probe* probe, uint64_t bytes, uint32_t repeats, ooc_probe_pinning* cost) {
  return guarded(probe, [&] { measure_pinning(*probe, bytes, repeats, *cost); });
}
