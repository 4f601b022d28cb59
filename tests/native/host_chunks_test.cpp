// Physical host memory, as the driver promises it: made beside the device's, mapped at any number of addresses, accessible
// to the host and to the device. What functions on host memory rest on (host_functions.cpp); this runs on a GPU too.
#include "host_chunks.h"

#include <cstring>
#include <stdexcept>

#include "device_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

bool is_supported() {
  int supported = 0;
  return driver().cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0) ==
             CUDA_SUCCESS &&
         supported != 0;
}

#define NEEDS_SUPPORT \
  if (!is_supported()) SKIP("the driver makes no physical host memory")

uint64_t free_device_bytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(driver().cuMemGetInfo(&free, &total), CUDA_SUCCESS);
  return free;
}

CUmemAccessDesc access_of(CUmemLocationType type) { return {{type, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}; }

}  // namespace

TEST(it_is_host_memory_that_the_device_can_use) {
  NEEDS_SUPPORT;
  const uint64_t chunk = granularity();
  driver();
  const uint64_t before = free_device_bytes();
  HostChunks chunks(driver(), 0, 8 * chunk, chunk);
  ASSERT_TRUE(chunks.extend(3 * chunk));
  ASSERT_TRUE(chunks.extend(chunk));
  EXPECT_TRUE(free_device_bytes() + 64 * chunk > before);  // tables apart, it is not the device's
  std::memset(chunks.base(), 7, 4 * chunk);
  const auto address = reinterpret_cast<CUdeviceptr>(chunks.base());
  EXPECT_TRUE(read(address, 4 * chunk) == Bytes(4 * chunk, 7));
  const Bytes fresh = pattern(4 * chunk, 3);
  write(address, fresh);
  EXPECT_EQ(std::memcmp(chunks.base(), fresh.data(), fresh.size()), 0);
}

TEST(one_chunk_is_found_at_two_addresses) {
  NEEDS_SUPPORT;
  const uint64_t chunk = granularity();
  HostChunks chunks(driver(), 0, 2 * chunk, chunk);
  ASSERT_TRUE(chunks.extend(2 * chunk));
  CUdeviceptr second = 0;
  ASSERT_EQ(driver().cuMemAddressReserve(&second, chunk, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver().cuMemMap(second, chunk, 0, chunks.handle(chunks.base() + chunk), 0), CUDA_SUCCESS);
  const CUmemAccessDesc both[] = {access_of(CU_MEM_LOCATION_TYPE_DEVICE), access_of(CU_MEM_LOCATION_TYPE_HOST_NUMA)};
  ASSERT_EQ(driver().cuMemSetAccess(second, chunk, both, 2), CUDA_SUCCESS);
  std::memset(chunks.base(), 1, 2 * chunk);
  write(second, pattern(chunk, 5));
  EXPECT_TRUE(read(reinterpret_cast<CUdeviceptr>(chunks.base()) + chunk, chunk) == pattern(chunk, 5));
  EXPECT_TRUE(read(reinterpret_cast<CUdeviceptr>(chunks.base()), chunk) == Bytes(chunk, 1));
  EXPECT_EQ(driver().cuMemUnmap(second, chunk), CUDA_SUCCESS);
  EXPECT_EQ(driver().cuMemAddressFree(second, chunk), CUDA_SUCCESS);
}

TEST(the_host_has_no_access_to_device_memory_by_this_way) {
  NEEDS_SUPPORT;
  const uint64_t chunk = granularity();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  ASSERT_EQ(driver().cuMemCreate(&handle, chunk, &properties, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver().cuMemAddressReserve(&address, chunk, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver().cuMemMap(address, chunk, 0, handle, 0), CUDA_SUCCESS);
  const CUmemAccessDesc host = access_of(CU_MEM_LOCATION_TYPE_HOST_NUMA);
  EXPECT_TRUE(driver().cuMemSetAccess(address, chunk, &host, 1) != CUDA_SUCCESS);
  EXPECT_EQ(driver().cuMemUnmap(address, chunk), CUDA_SUCCESS);
  EXPECT_EQ(driver().cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(driver().cuMemAddressFree(address, chunk), CUDA_SUCCESS);
}

TEST(it_ends_with_the_range_and_refusals_change_nothing) {
  NEEDS_SUPPORT;
  const uint64_t chunk = granularity();
  HostChunks chunks(driver(), 0, 4 * chunk, chunk);
  EXPECT_TRUE(!chunks.extend(5 * chunk));
  EXPECT_TRUE(chunks.extend(4 * chunk));
  EXPECT_TRUE(!chunks.extend(chunk));
  std::memset(chunks.base(), 3, 4 * chunk);
}
