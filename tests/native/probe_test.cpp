// The probe against any driver: it measures, leaves nothing behind, and reports failures with the driver's words.
#include "probe.h"

#include "device_fixture.h"
#include "ooc_alloc.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr uint64_t kMiB = 1 << 20;

struct Opened {
  Opened() : probe((driver(), ooc_probe_open(test_driver(), 0))) {
    if (probe == nullptr) std::fprintf(stderr, "%s\n", ooc_last_error());
    ASSERT_TRUE(probe != nullptr);
  }
  ~Opened() { ooc_probe_close(probe); }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  operator ooc_probe*() const { return probe; }
  ooc_probe* probe;
};

uint64_t free_bytes() {
  size_t free = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&free, &total));
  return free;
}

bool is_a_time(double seconds) { return seconds > 0 && seconds < 60; }

}  // namespace

TEST(the_device_is_described) {
  const Opened probe;
  ooc_probe_device device;
  ASSERT_EQ(ooc_probe_describe(probe, &device), static_cast<int>(OOC_OK));
  EXPECT_TRUE(device.name[0] != '\0');
  EXPECT_EQ(device.granularity_bytes, granularity());
  EXPECT_TRUE(device.total_bytes >= device.free_bytes && device.free_bytes > 0);
  EXPECT_TRUE(device.copy_engines >= 1);
  EXPECT_TRUE(device.driver_version >= 11020);  // virtual memory management came with 11.2
}

TEST(memory_calls_are_measured_and_nothing_stays) {
  const Opened probe;
  const uint64_t before = free_bytes();
  for (const uint32_t chunks : {1u, 8u}) {
    ooc_probe_memory cost{};
    ASSERT_EQ(ooc_probe_measure_memory(probe, granularity(), chunks, 3, &cost), static_cast<int>(OOC_OK));
    for (const double seconds :
         {cost.create_seconds, cost.map_seconds, cost.release_seconds, cost.set_access_seconds, cost.unmap_seconds})
      EXPECT_TRUE(is_a_time(seconds));
  }
  EXPECT_EQ(free_bytes(), before);
}

TEST(copies_are_measured_and_nothing_stays) {
  const Opened probe;
  const uint64_t before = free_bytes();
  for (const uint64_t bytes : {uint64_t{8}, kMiB + 1}) {
    ooc_probe_copy cost{};
    ASSERT_EQ(ooc_probe_measure_copy(probe, bytes, 3, &cost), static_cast<int>(OOC_OK));
    for (const double seconds : {cost.out_seconds, cost.in_seconds, cost.both_out_seconds, cost.both_in_seconds})
      EXPECT_TRUE(is_a_time(seconds));
  }
  EXPECT_EQ(free_bytes(), before);
}

TEST(pinning_is_measured) {
  const Opened probe;
  ooc_probe_pinning cost{};
  ASSERT_EQ(ooc_probe_measure_pinning(probe, 4 * kMiB, 3, &cost), static_cast<int>(OOC_OK));
  EXPECT_TRUE(is_a_time(cost.register_seconds));
  EXPECT_TRUE(is_a_time(cost.unregister_seconds));
}

TEST(no_repeats_count_as_one) {
  const Opened probe;
  ooc_probe_memory cost{};
  ASSERT_EQ(ooc_probe_measure_memory(probe, granularity(), 1, 0, &cost), static_cast<int>(OOC_OK));
  EXPECT_TRUE(is_a_time(cost.create_seconds));
}

TEST(more_than_the_device_has_is_out_of_memory_and_nothing_stays) {
  const Opened probe;
  ooc_probe_device device;
  ASSERT_EQ(ooc_probe_describe(probe, &device), static_cast<int>(OOC_OK));
  const uint64_t chunk = (device.total_bytes / 4 / granularity() + 1) * granularity();
  ooc_probe_memory cost{};
  EXPECT_EQ(ooc_probe_measure_memory(probe, chunk, 5, 1, &cost), static_cast<int>(OOC_OUT_OF_MEMORY));
  EXPECT_TRUE(std::strstr(ooc_last_error(), "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY") != nullptr);
  EXPECT_EQ(free_bytes(), device.free_bytes);
}

TEST(bad_arguments_are_refused) {
  const Opened probe;
  ooc_probe_memory memory{};
  EXPECT_EQ(ooc_probe_measure_memory(probe, granularity() + 1, 1, 1, &memory), static_cast<int>(OOC_INVALID));
  EXPECT_TRUE(std::strstr(ooc_last_error(), "multiple of") != nullptr);
  EXPECT_EQ(ooc_probe_measure_memory(probe, granularity(), 0, 1, &memory), static_cast<int>(OOC_INVALID));
  ooc_probe_copy copy{};
  EXPECT_EQ(ooc_probe_measure_copy(probe, 0, 1, &copy), static_cast<int>(OOC_INVALID));
  ooc_probe_pinning pinning{};
  EXPECT_EQ(ooc_probe_measure_pinning(probe, 0, 1, &pinning), static_cast<int>(OOC_INVALID));
}

TEST(what_cannot_be_opened_is_named) {
  EXPECT_TRUE(ooc_probe_open("/nowhere/libcuda.so.1", 0) == nullptr);
  EXPECT_TRUE(std::strstr(ooc_last_error(), "/nowhere/libcuda.so.1") != nullptr);
  EXPECT_TRUE(ooc_probe_open(test_driver(), 4711) == nullptr);
  EXPECT_TRUE(std::strstr(ooc_last_error(), "cuDeviceGet(4711) failed") != nullptr);
}
