// What this project relies on a CUDA driver for: the table, the device, its memory and its addresses. Streams and copies
// are in driver_streams_test.cpp. Both run against any driver: OOC_TEST_DRIVER names the emulated one or libcuda.so.1.
// Device memory is read and written by the driver's copies alone, so nothing here needs an emulated device.
#include <algorithm>
#include <thread>

#include "device_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr size_t kMiB = 1 << 20;

#ifdef __SANITIZE_THREAD__
constexpr size_t kLargeReservation = 64ull << 30;  // what the sanitizer's own address layout leaves
#else
constexpr size_t kLargeReservation = 1ull << 40;
#endif

}  // namespace

// The table

TEST(a_missing_library_is_named) {
  std::string error;
  EXPECT_TRUE(load_driver("/nowhere/libcuda.so.1", error) == nullptr);
  EXPECT_TRUE(error.find("/nowhere/libcuda.so.1") != std::string::npos);
  EXPECT_TRUE(load_driver("", error) == nullptr);
  EXPECT_TRUE(load_driver(nullptr, error) == nullptr);
  EXPECT_TRUE(!error.empty());
}

TEST(missing_symbols_are_named) {
  std::string error;
  EXPECT_TRUE(load_driver("libm.so.6", error) == nullptr);
  EXPECT_TRUE(error.find("cuMemCreate") != std::string::npos);
  EXPECT_TRUE(error.find("cuMemcpyHtoDAsync_v2") != std::string::npos);
  EXPECT_TRUE(error.find("cuMemGetAccess") == std::string::npos);  // optional
}

TEST(results_are_described) {
  EXPECT_EQ(describe(driver(), CUDA_ERROR_OUT_OF_MEMORY), std::string("CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"));
  EXPECT_EQ(describe(driver(), CUDA_ERROR_INVALID_VALUE), std::string("CUDA_ERROR_INVALID_VALUE (1): invalid argument"));
  EXPECT_EQ(describe(driver(), static_cast<CUresult>(12345)), std::string("CUDA error 12345"));
}

// The device

TEST(the_device_says_what_it_is) {
  int count = 0, version = 0, has_virtual_memory = 0;
  size_t total = 0;
  char name[100] = "";
  EXPECT_OK(driver().cuDeviceGetCount(&count));
  EXPECT_TRUE(count >= 1);
  EXPECT_OK(driver().cuDriverGetVersion(&version));
  EXPECT_TRUE(version >= 11000);
  EXPECT_OK(driver().cuDeviceGetAttribute(&has_virtual_memory,
                                          CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
  EXPECT_EQ(has_virtual_memory, 1);
  EXPECT_OK(driver().cuDeviceTotalMem(&total, 0));
  EXPECT_TRUE(total >= 64 * kMiB);
  EXPECT_OK(driver().cuDeviceGetName(name, sizeof(name), 0));
  EXPECT_TRUE(std::strlen(name) > 0);
  CUdevice device = -1;
  EXPECT_EQ(driver().cuDeviceGet(&device, count), CUDA_ERROR_INVALID_DEVICE);
}

TEST(a_thread_needs_the_context) {
  CUcontext context = nullptr;
  ASSERT_OK(driver().cuCtxGetCurrent(&context));
  ASSERT_TRUE(context != nullptr);
  CUresult without = CUDA_SUCCESS, with = CUDA_ERROR_UNKNOWN;
  std::thread([&] {
    size_t free_bytes = 0, total = 0;
    without = driver().cuMemGetInfo(&free_bytes, &total);
    driver().cuCtxSetCurrent(context);
    with = driver().cuMemGetInfo(&free_bytes, &total);
  }).join();
  EXPECT_EQ(without, CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_OK(with);
}

TEST(the_granularity_is_a_power_of_two) {
  const CUmemAllocationProp prop = device_memory();
  size_t recommended = 0;
  EXPECT_EQ(granularity() & (granularity() - 1), size_t{0});
  EXPECT_OK(driver().cuMemGetAllocationGranularity(&recommended, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  EXPECT_TRUE(recommended > 0 && recommended % granularity() == 0);
}

// Physical memory

TEST(memory_info_follows_creation) {
  const size_t bytes = 64 * kMiB;
  size_t before = 0, during = 0, after = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&before, &total));
  const CUmemGenericAllocationHandle handle = create(bytes);
  ASSERT_OK(driver().cuMemGetInfo(&during, &total));
  ASSERT_OK(driver().cuMemRelease(handle));
  ASSERT_OK(driver().cuMemGetInfo(&after, &total));
  EXPECT_TRUE(before >= during + bytes);  // a driver may take a little more
  EXPECT_TRUE(after >= during + bytes);
}

TEST(creation_fails_beyond_the_device_and_recovers) {
  size_t free_bytes = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&free_bytes, &total));
  const size_t unit = granularity();
  const CUmemAllocationProp prop = device_memory();
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(driver().cuMemCreate(&handle, (total / unit + 1) * unit, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);

  const size_t part = std::max(free_bytes / 8 / unit, size_t{1}) * unit;
  std::vector<CUmemGenericAllocationHandle> handles;
  CUresult result = CUDA_SUCCESS;
  while (handles.size() < 20 && (result = driver().cuMemCreate(&handle, part, &prop, 0)) == CUDA_SUCCESS) {
    handles.push_back(handle);
  }
  EXPECT_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_TRUE(!handles.empty());
  ASSERT_OK(driver().cuMemRelease(handles.back()));
  EXPECT_OK(driver().cuMemCreate(&handles.back(), part, &prop, 0));
  for (const CUmemGenericAllocationHandle each : handles) EXPECT_OK(driver().cuMemRelease(each));
}

TEST(creation_checks_its_arguments) {
  CUmemAllocationProp prop = device_memory();
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(driver().cuMemCreate(&handle, granularity() / 2, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver().cuMemCreate(&handle, 0, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  prop.type = CU_MEM_ALLOCATION_TYPE_INVALID;
  EXPECT_TRUE(driver().cuMemCreate(&handle, granularity(), &prop, 0) != CUDA_SUCCESS);
}

// Addresses

TEST(reservations_are_aligned_and_distinct) {
  const size_t bytes = 4 * granularity();
  const size_t alignment = 64 * std::max(granularity(), kMiB);
  CUdeviceptr first = 0, second = 0;
  ASSERT_OK(driver().cuMemAddressReserve(&first, bytes, alignment, 0, 0));
  ASSERT_OK(driver().cuMemAddressReserve(&second, bytes, alignment, 0, 0));
  EXPECT_EQ(first % alignment, 0ull);
  EXPECT_EQ(second % alignment, 0ull);
  EXPECT_TRUE(first + bytes <= second || second + bytes <= first);
  EXPECT_OK(driver().cuMemAddressFree(first, bytes));
  EXPECT_OK(driver().cuMemAddressFree(second, bytes));
}

TEST(a_large_reservation_takes_no_memory) {
  size_t before = 0, after = 0, total = 0;
  CUdeviceptr address = 0;
  ASSERT_OK(driver().cuMemGetInfo(&before, &total));
  ASSERT_OK(driver().cuMemAddressReserve(&address, kLargeReservation, 0, 0, 0));
  ASSERT_OK(driver().cuMemGetInfo(&after, &total));
  EXPECT_TRUE(before < after + 64 * kMiB);  // page tables, at most
  EXPECT_OK(driver().cuMemAddressFree(address, kLargeReservation));
}

TEST(reservations_check_their_arguments) {
  CUdeviceptr address = 0;
  EXPECT_TRUE(driver().cuMemAddressReserve(&address, 0, 0, 0, 0) != CUDA_SUCCESS);
  EXPECT_TRUE(driver().cuMemAddressReserve(&address, granularity() + 1, 0, 0, 0) != CUDA_SUCCESS);
}

TEST(a_reservation_with_mappings_is_not_freed) {
  Range range(2);
  range.fill(1);
  EXPECT_TRUE(driver().cuMemAddressFree(range.base, 2 * range.chunk) != CUDA_SUCCESS);
  const Bytes bytes = pattern(100, 1);
  write(range.at(1), bytes);
  EXPECT_TRUE(read(range.at(1), 100) == bytes);
}

// Mapping

TEST(a_chunk_keeps_what_is_written) {
  Range range(1);
  range.fill(0);
  const Bytes bytes = pattern(range.chunk, 2);
  write(range.at(0), bytes);
  EXPECT_TRUE(read(range.at(0), range.chunk) == bytes);
}

TEST(one_access_call_covers_many_chunks) {
  Range range(5);
  range.fill(0, 5);
  const Bytes bytes = pattern(5 * range.chunk, 3);
  write(range.base, bytes);  // one copy across all the borders
  EXPECT_TRUE(read(range.base, bytes.size()) == bytes);
  const size_t start = range.chunk - 7;
  EXPECT_TRUE(read(range.base + start, 20) == Bytes(bytes.begin() + start, bytes.begin() + start + 20));
}

TEST(aliases_show_the_same_bytes) {
  Range range(3);
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  range.map(0, handle);
  range.map(2, handle);
  ASSERT_OK(set_access(range.at(0), range.chunk));
  ASSERT_OK(set_access(range.at(2), range.chunk));
  const Bytes bytes = pattern(range.chunk, 4);
  write(range.at(0), bytes);
  EXPECT_TRUE(read(range.at(2), range.chunk) == bytes);
  range.unmap(0);
  EXPECT_TRUE(read(range.at(2), range.chunk) == bytes);
  ASSERT_OK(driver().cuMemRelease(handle));
}

TEST(contents_move_with_the_chunk) {
  Range range(4);
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  range.map(0, handle);
  ASSERT_OK(set_access(range.at(0), range.chunk));
  const Bytes bytes = pattern(range.chunk, 5);
  write(range.at(0), bytes);
  for (size_t i = 0; i < 3; ++i) {
    range.unmap(i);
    range.map(i + 1, handle);
    ASSERT_OK(set_access(range.at(i + 1), range.chunk));
    EXPECT_TRUE(read(range.at(i + 1), range.chunk) == bytes);
  }
  ASSERT_OK(driver().cuMemRelease(handle));
}

TEST(mapped_memory_outlives_its_handle) {
  size_t before = 0, released = 0, unmapped = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&before, &total));
  {
    Range range(1);
    const CUmemGenericAllocationHandle handle = create(range.chunk);
    range.map(0, handle);
    ASSERT_OK(set_access(range.at(0), range.chunk));
    const Bytes bytes = pattern(range.chunk, 6);
    write(range.at(0), bytes);
    ASSERT_OK(driver().cuMemRelease(handle));
    EXPECT_TRUE(read(range.at(0), range.chunk) == bytes);
    ASSERT_OK(driver().cuMemGetInfo(&released, &total));
    EXPECT_TRUE(released < before);
  }
  ASSERT_OK(driver().cuMemGetInfo(&unmapped, &total));
  EXPECT_TRUE(unmapped > released);
}

TEST(whole_mappings_are_unmapped_at_once) {
  Range range(4);
  range.fill(0, 4);
  const Bytes bytes = pattern(range.chunk, 7);
  write(range.at(0), bytes);
  range.unmap(1, 3);
  range.fill(2);  // the addresses are free again, and only they
  EXPECT_TRUE(read(range.at(0), range.chunk) == bytes);
  EXPECT_TRUE(driver().cuMemcpyDtoH(Bytes(16).data(), range.at(1), 16) != CUDA_SUCCESS);
}

TEST(part_of_a_mapping_is_not_unmapped) {
  Range range(1, 2 * granularity());
  range.fill(0);
  const Bytes bytes = pattern(range.chunk, 8);
  write(range.at(0), bytes);
  EXPECT_TRUE(driver().cuMemUnmap(range.base, granularity()) != CUDA_SUCCESS);
  EXPECT_TRUE(driver().cuMemUnmap(range.base + granularity(), granularity()) != CUDA_SUCCESS);
  EXPECT_TRUE(read(range.at(0), range.chunk) == bytes);
}

TEST(a_range_across_two_mappings_is_not_unmapped) {
  Range range(2, 2 * granularity());
  range.fill(0, 2);
  const Bytes bytes = pattern(2 * range.chunk, 13);
  write(range.base, bytes);
  EXPECT_TRUE(driver().cuMemUnmap(range.base + granularity(), range.chunk) != CUDA_SUCCESS);
  EXPECT_TRUE(read(range.base, 2 * range.chunk) == bytes);
}

TEST(an_occupied_range_is_refused) {
  Range range(2);
  range.fill(0);
  const Bytes bytes = pattern(range.chunk, 9);
  write(range.at(0), bytes);
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  EXPECT_TRUE(driver().cuMemMap(range.at(0), range.chunk, 0, handle, 0) != CUDA_SUCCESS);
  EXPECT_TRUE(read(range.at(0), range.chunk) == bytes);
  ASSERT_OK(driver().cuMemRelease(handle));
}

TEST(mapping_checks_its_arguments) {
  Range range(2);
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  const CUdeviceptr address = range.base;
  EXPECT_TRUE(driver().cuMemMap(address, range.chunk / 2, 0, handle, 0) != CUDA_SUCCESS);
  EXPECT_TRUE(driver().cuMemMap(address, 2 * range.chunk, 0, handle, 0) != CUDA_SUCCESS);
  EXPECT_TRUE(driver().cuMemMap(address + range.chunk / 2, range.chunk, 0, handle, 0) != CUDA_SUCCESS);
  EXPECT_TRUE(driver().cuMemMap(address, range.chunk, range.chunk, handle, 0) != CUDA_SUCCESS);
  EXPECT_TRUE(driver().cuMemMap(address + 2 * range.chunk, range.chunk, 0, handle, 0) != CUDA_SUCCESS);
  EXPECT_TRUE(set_access(address, range.chunk) != CUDA_SUCCESS);  // nothing is mapped after all this
  ASSERT_OK(driver().cuMemRelease(handle));
}

TEST(access_is_reported) {
  if (driver().cuMemGetAccess == nullptr) SKIP("the driver has no cuMemGetAccess");
  Range range(1);
  range.fill(0);
  const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, 0};
  unsigned long long flags = 0;
  EXPECT_OK(driver().cuMemGetAccess(&flags, &location, range.base));
  EXPECT_EQ(flags, 3ull);
}

// Last: on a device a copy that is not refused at once may end the context.
TEST(mapped_memory_is_not_accessible_before_set_access) {
  Range range(1);
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  range.map(0, handle);
  Bytes bytes(16);
  EXPECT_TRUE(driver().cuMemcpyDtoH(bytes.data(), range.base, 16) != CUDA_SUCCESS);
  EXPECT_TRUE(driver().cuMemcpyHtoD(range.base, bytes.data(), 16) != CUDA_SUCCESS);
  EXPECT_OK(driver().cuMemRelease(handle));
}
