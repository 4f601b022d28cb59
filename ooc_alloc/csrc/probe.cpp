#include "probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "capi.h"
#include "clock.h"
#include "device.h"

struct ooc_probe {
  ooc::Device device;

  const ooc::Driver& driver() const { return device.driver(); }
  void check(ooc::CUresult result, const char* call) const {
    if (result == ooc::CUDA_SUCCESS) return;
    const int status = result == ooc::CUDA_ERROR_OUT_OF_MEMORY ? OOC_OUT_OF_MEMORY : OOC_DRIVER_FAILURE;
    throw ooc::Failure(status, std::string(call) + " failed: " + ooc::describe(driver(), result));
  }
};

namespace ooc {
namespace {

// ---- what is measured with; each undoes what it did -----------------------------------------------------------------

// A reserved range and its chunks. Every step is a method, so that it can be timed.
class Range {
 public:
  Range(const ooc_probe& probe, uint64_t chunk_bytes, uint32_t chunks)
      : probe_(probe), driver_(probe.driver()), chunk_(chunk_bytes), count_(chunks) {
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
      probe_.check(driver_.cuMemCreate(&handle, chunk_, &probe_.device.memory(), 0), "cuMemCreate");
      handles_.push_back(handle);
    }
  }
  void map() {
    for (; mapped_ < count_; ++mapped_)
      probe_.check(driver_.cuMemMap(base_ + mapped_ * chunk_, chunk_, 0, handles_[mapped_], 0), "cuMemMap");
  }
  void set_access() {
    probe_.check(driver_.cuMemSetAccess(base_, bytes(), &probe_.device.access(), 1), "cuMemSetAccess");
  }
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

// Page-aligned host memory that has been touched.
class HostBuffer {
 public:
  HostBuffer(const ooc_probe& probe, uint64_t bytes)
      : probe_(probe),
        bytes_(bytes),
        address_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (address_ == MAP_FAILED)
      throw Failure(OOC_OUT_OF_MEMORY, "no host memory for " + std::to_string(bytes) + " bytes");
    std::memset(address_, 1, bytes);
  }
  ~HostBuffer() {
    if (pinned_) probe_.driver().cuMemHostUnregister(address_);
    munmap(address_, bytes_);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  void* address() const { return address_; }
  void pin() {
    probe_.check(probe_.driver().cuMemHostRegister(address_, bytes_, kMemHostRegisterPortable), "cuMemHostRegister");
    pinned_ = true;
  }
  void unpin() {
    probe_.check(probe_.driver().cuMemHostUnregister(address_), "cuMemHostUnregister");
    pinned_ = false;
  }

 private:
  const ooc_probe& probe_;
  const uint64_t bytes_;
  void* address_;
  bool pinned_ = false;
};

// ---- measurements ---------------------------------------------------------------------------------------------------

// Seconds that a step takes.
template <class Step>
double timed(Step step) {
  const double start = now_seconds();
  step();
  return now_seconds() - start;
}

// Medians of what `once` gives, an array of seconds, each time that it runs but the first, which warms up.
template <class Once>
auto medians(uint32_t repeats, Once once) {
  auto result = once();
  std::vector<decltype(result)> runs;
  for (uint32_t i = 0; i < std::max<uint32_t>(repeats, 1); ++i) runs.push_back(once());
  const auto middle = runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2);
  for (size_t i = 0; i < result.size(); ++i) {
    std::ranges::nth_element(runs, middle, {}, [i](const auto& run) { return run[i]; });
    result[i] = (*middle)[i];
  }
  return result;
}

// Seconds from now until a copy is done. Returns the driver's result, as it also runs outside the calling thread.
CUresult timed_copy(const ooc_probe& probe, Direction direction, CUdeviceptr device, void* host, uint64_t bytes,
                    double& seconds) {
  const Driver& driver = probe.driver();
  const CUstream stream = probe.device.stream(direction);
  CUresult result = CUDA_SUCCESS;
  seconds = timed([&] {
    result = direction == Direction::kOut ? driver.cuMemcpyDtoHAsync(host, device, bytes, stream)
                                          : driver.cuMemcpyHtoDAsync(device, host, bytes, stream);
    if (result == CUDA_SUCCESS) result = driver.cuStreamSynchronize(stream);
  });
  return result;
}

constexpr Direction kDirections[] = {Direction::kOut, Direction::kIn};

// Both directions start together, each from a thread of its own.
void timed_both(const ooc_probe& probe, const Range ranges[2], HostBuffer hosts[2], uint64_t bytes, double seconds[2]) {
  std::atomic<int> ready{0};
  CUresult results[2] = {CUDA_SUCCESS, CUDA_SUCCESS};
  const auto run = [&](int i) {
    probe.device.bind_thread();
    ready += 1;
    while (ready < 2) std::this_thread::yield();
    results[i] = timed_copy(probe, kDirections[i], ranges[i].base(), hosts[i].address(), bytes, seconds[i]);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  for (const CUresult result : results) probe.check(result, "a copy in both directions");
}

void describe_device(const ooc_probe& probe, ooc_probe_device& description) {
  const Driver& driver = probe.driver();
  const CUdevice device = probe.device.device();
  description = {};
  probe.check(driver.cuDeviceGetName(description.name, sizeof description.name, device), "cuDeviceGetName");
  size_t free = 0, total = 0;
  probe.check(driver.cuMemGetInfo(&free, &total), "cuMemGetInfo");
  description.total_bytes = total;
  description.free_bytes = free;
  description.granularity_bytes = probe.device.granularity();
  probe.check(driver.cuDriverGetVersion(&description.driver_version), "cuDriverGetVersion");
  probe.check(driver.cuDeviceGetAttribute(&description.copy_engines, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, device),
              "cuDeviceGetAttribute");
}

void measure_memory(const ooc_probe& probe, uint64_t chunk_bytes, uint32_t chunks, uint32_t repeats,
                    ooc_probe_memory& cost) {
  const uint64_t granularity = probe.device.granularity();
  if (chunks == 0 || chunk_bytes == 0 || chunk_bytes % granularity != 0)
    throw Failure(OOC_INVALID, "a chunk must be a multiple of " + std::to_string(granularity) + " bytes");
  Range range(probe, chunk_bytes, chunks);
  const auto [create, map, set_access, unmap, release] = medians(repeats, [&] {
    return std::array{timed([&] { range.create(); }) / chunks, timed([&] { range.map(); }) / chunks,
                      timed([&] { range.set_access(); }), timed([&] { range.unmap(); }),
                      timed([&] { range.release(); }) / chunks};
  });
  cost = {create, map, release, set_access, unmap};
}

void measure_copy(const ooc_probe& probe, uint64_t bytes, uint32_t repeats, ooc_probe_copy& cost) {
  if (bytes == 0) throw Failure(OOC_INVALID, "a copy of no bytes cannot be measured");
  const uint64_t granularity = probe.device.granularity();
  const uint64_t rounded = (bytes + granularity - 1) / granularity * granularity;
  Range ranges[2] = {{probe, rounded, 1}, {probe, rounded, 1}};
  for (Range& range : ranges) {
    range.create();
    range.map();
    range.set_access();
    probe.check(probe.driver().cuMemsetD8(range.base(), 1, bytes), "cuMemsetD8");
  }
  probe.check(probe.driver().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
  HostBuffer hosts[2] = {{probe, bytes}, {probe, bytes}};
  for (HostBuffer& host : hosts) host.pin();
  const auto [out, in, both_out, both_in] = medians(repeats, [&] {
    std::array<double, 4> seconds{};
    for (size_t i = 0; i < 2; ++i)
      probe.check(timed_copy(probe, kDirections[i], ranges[i].base(), hosts[i].address(), bytes, seconds[i]),
                  i == 0 ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync");
    timed_both(probe, ranges, hosts, bytes, &seconds[2]);
    return seconds;
  });
  cost = {out, in, both_out, both_in};
}

void measure_pinning(const ooc_probe& probe, uint64_t bytes, uint32_t repeats, ooc_probe_pinning& cost) {
  if (bytes == 0) throw Failure(OOC_INVALID, "pinning of no bytes cannot be measured");
  HostBuffer buffer(probe, bytes);
  const auto [pin, unpin] =
      medians(repeats, [&] { return std::array{timed([&] { buffer.pin(); }), timed([&] { buffer.unpin(); })}; });
  cost = {pin, unpin};
}

// The caller's thread may not be the one that opened the probe.
template <class Body>
int bound(const ooc_probe* probe, Body body) {
  return guarded([&]() -> int {
    probe->device.bind_thread();
    body();
    return OOC_OK;
  });
}

}  // namespace
}  // namespace ooc

using namespace ooc;

ooc_probe* ooc_probe_open(const char* driver_library, int32_t device_ordinal) {
  return guarded([&] { return new ooc_probe{{driver_library, device_ordinal}}; });
}

void ooc_probe_close(ooc_probe* probe) { delete probe; }

int ooc_probe_describe(ooc_probe* probe, ooc_probe_device* device) {
  return bound(probe, [&] { describe_device(*probe, *device); });
}

int ooc_probe_measure_memory(ooc_probe* probe, uint64_t chunk_bytes, uint32_t chunks, uint32_t repeats,
                             ooc_probe_memory* cost) {
  return bound(probe, [&] { measure_memory(*probe, chunk_bytes, chunks, repeats, *cost); });
}

int ooc_probe_measure_copy(ooc_probe* probe, uint64_t bytes, uint32_t repeats, ooc_probe_copy* cost) {
  return bound(probe, [&] { measure_copy(*probe, bytes, repeats, *cost); });
}

int ooc_probe_measure_pinning(ooc_probe* probe, uint64_t bytes, uint32_t repeats, ooc_probe_pinning* cost) {
  return bound(probe, [&] { measure_pinning(*probe, bytes, repeats, *cost); });
}
