#include "probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <thread>

#include "last_error.h"
#include "probe_resources.h"

namespace ooc {
namespace {

using namespace probing;
using Clock = std::chrono::steady_clock;

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

using namespace ooc;

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
