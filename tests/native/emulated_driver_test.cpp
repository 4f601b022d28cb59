// What only the emulated device promises: poison, real faults, merged mappings, exact counts, refused misuse.
#include <linux/capability.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

bool is_poison(const Bytes& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](unsigned char byte) { return byte == 0xdb; });
}

enum class Touch { kRead, kWrite };

// Whether touching the address ends a process with a segmentation fault; done in a child.
bool faults(CUdeviceptr address, Touch touch) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would turn it into an exit
    volatile unsigned char* byte = host_pointer<volatile unsigned char>(address);
    unsigned char value = 0;
    if (touch == Touch::kRead) value = *byte;
    if (touch == Touch::kWrite) *byte = 1;
    _exit(value == 0 ? 0 : 0);
  }
  int status = 0;
  ASSERT_TRUE(child > 0 && waitpid(child, &status, 0) == child);
  EXPECT_TRUE(WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : WEXITSTATUS(status) == 0);
  return WIFSIGNALED(status);
}

// Mappings of the device's memory that the kernel keeps for this process.
size_t kernel_mappings(const char* name = "ooc-emulated-device") {
  std::ifstream file("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(file, line);) count += line.find(name) != line.npos ? 1 : 0;
  return count;
}

// The right of this thread to mount, which it has again in the end.
class RightToMount {
 public:
  RightToMount() { syscall(SYS_capget, &header_, had_); }
  ~RightToMount() { syscall(SYS_capset, &header_, had_); }
  RightToMount(const RightToMount&) = delete;
  RightToMount& operator=(const RightToMount&) = delete;
  bool is_there() const { return (had_[0].effective >> CAP_SYS_ADMIN & 1u) != 0; }
  void drop() {
    __user_cap_data_struct less[2] = {had_[0], had_[1]};
    less[0].effective &= ~(1u << CAP_SYS_ADMIN);
    syscall(SYS_capset, &header_, less);
  }

 private:
  __user_cap_header_struct header_{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct had_[2]{};
};

}  // namespace

TEST(every_call_is_exported) {
#define OOC_EXPECT_MEMBER(need, member, symbol, parameters) EXPECT_TRUE(driver().member != nullptr);
  OOC_DRIVER_CALLS(OOC_EXPECT_MEMBER)
#undef OOC_EXPECT_MEMBER
  char name[20] = "";
  EXPECT_OK(driver().cuDeviceGetName(name, sizeof(name), 0));
  EXPECT_EQ(std::string(name), std::string("emulated"));
}

// Physical memory

TEST(new_memory_is_poisoned_also_when_recycled) {
  for (int round = 0; round < 2; ++round) {
    Range range(2);
    range.fill(0, 2);
    EXPECT_TRUE(is_poison(read(range.base, 2 * range.chunk)));
    ASSERT_OK(driver().cuMemsetD8(range.base, 7, 2 * range.chunk));
  }
}

TEST(without_the_right_to_mount_memory_is_a_memfd) {
  RightToMount right;
  for (const bool mounts : {right.is_there(), false}) {
    if (!mounts) right.drop();
    ConfigForTest settings;
    settings.config.memory_bytes *= 2;  // another device
    settings.apply();
    Range range(2);
    range.fill(0, 2);
    EXPECT_EQ(kernel_mappings("memfd:ooc-emulated-device") == 0, mounts);
    EXPECT_TRUE(is_poison(read(range.base, 2 * range.chunk)));
    ASSERT_OK(driver().cuMemsetD8(range.base + range.chunk, 7, range.chunk));
    EXPECT_TRUE(is_poison(read(range.base, range.chunk)));
    EXPECT_TRUE(read(range.base + range.chunk, 1) == Bytes(1, 7));
  }
}

TEST(memory_is_counted_exactly) {
  control().reset_stats();
  const ooc_emulated_stats before = get_stats();
  {
    Range range(3);
    range.fill(0, 3);
    const ooc_emulated_stats during = get_stats();
    EXPECT_EQ(during.physical_bytes, before.physical_bytes + 3 * range.chunk);
    EXPECT_EQ(during.allocations, before.allocations + 3);
    EXPECT_EQ(during.mappings, before.mappings + 3);
    EXPECT_EQ(during.reservations, before.reservations + 1);
  }
  const ooc_emulated_stats after = get_stats();
  EXPECT_EQ(after.physical_bytes, before.physical_bytes);
  EXPECT_EQ(after.physical_peak_bytes, before.physical_bytes + 3 * granularity());
  EXPECT_EQ(after.allocations + after.mappings + after.reservations,
            before.allocations + before.mappings + before.reservations);
}

TEST(physical_memory_does_not_fragment) {
  const size_t unit = std::max<size_t>(granularity(), 1 << 20);
  size_t free_bytes = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&free_bytes, &total));
  std::vector<CUmemGenericAllocationHandle> handles;
  for (size_t bytes = 0; bytes + unit <= total; bytes += unit) handles.push_back(create(unit));
  for (size_t i = 0; i < handles.size(); i += 2) ASSERT_OK(driver().cuMemRelease(handles[i]));
  const CUmemGenericAllocationHandle large = create(total / 2);
  ASSERT_OK(driver().cuMemRelease(large));
  for (size_t i = 1; i < handles.size(); i += 2) ASSERT_OK(driver().cuMemRelease(handles[i]));
}

TEST(a_released_handle_is_refused) {
  Range range(1);
  const CUmemGenericAllocationHandle stale = create(range.chunk);
  ASSERT_OK(driver().cuMemRelease(stale));
  EXPECT_EQ(driver().cuMemRelease(stale), CUDA_ERROR_INVALID_VALUE);
  const CUmemGenericAllocationHandle next = create(range.chunk);  // in the same place
  EXPECT_TRUE(next != stale);
  EXPECT_EQ(driver().cuMemMap(range.base, range.chunk, 0, stale, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver().cuMemRelease(0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_OK(driver().cuMemRelease(next));
}

// Addresses

// An H200's driver is content with both.
TEST(what_makes_no_sense_is_refused) {
  Range range(1);
  EXPECT_TRUE(driver().cuMemUnmap(range.base, range.chunk) != CUDA_SUCCESS);  // nothing is mapped
  void* pointer = nullptr;
  EXPECT_EQ(driver().cuMemHostAlloc(&pointer, 0, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST(device_addresses_are_host_addresses) {
  Range range(1);
  range.fill(0);
  host_pointer<unsigned char>(range.base)[5] = 42;
  EXPECT_EQ(read(range.base, 6)[5], static_cast<unsigned char>(42));
  write(range.base, Bytes{1, 2, 3});
  EXPECT_EQ(host_pointer<unsigned char>(range.base)[2], static_cast<unsigned char>(3));
}

TEST(what_is_not_accessible_faults) {
  Range range(2);
  EXPECT_TRUE(faults(range.base, Touch::kRead));  // reserved
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  range.map(0, handle);
  EXPECT_TRUE(faults(range.base, Touch::kRead));  // mapped
  ASSERT_OK(set_access(range.base, range.chunk));
  EXPECT_TRUE(!faults(range.base, Touch::kWrite));
  EXPECT_TRUE(faults(range.at(1), Touch::kRead));
  ASSERT_OK(set_access(range.base, range.chunk, CU_MEM_ACCESS_FLAGS_PROT_READ));
  EXPECT_TRUE(!faults(range.base, Touch::kRead));
  EXPECT_TRUE(faults(range.base, Touch::kWrite));
  ASSERT_OK(set_access(range.base, range.chunk, CU_MEM_ACCESS_FLAGS_PROT_NONE));
  EXPECT_TRUE(faults(range.base, Touch::kRead));
  ASSERT_OK(set_access(range.base, range.chunk));
  EXPECT_TRUE(!faults(range.base, Touch::kWrite));
  range.unmap(0);
  EXPECT_TRUE(faults(range.base, Touch::kWrite));
  ASSERT_OK(driver().cuMemRelease(handle));
}

TEST(access_can_be_looked_up) {
  Range range(3);
  const auto look_up = [&](size_t offset, size_t bytes) {
    return control().access(host_pointer<void>(range.base + offset), bytes);
  };
  range.fill(0, 2);
  EXPECT_EQ(look_up(range.chunk - 1, 2), 3);
  EXPECT_EQ(look_up(range.chunk, range.chunk + 1), -1);
  ASSERT_OK(set_access(range.at(1), range.chunk, CU_MEM_ACCESS_FLAGS_PROT_READ));
  EXPECT_EQ(look_up(0, range.chunk), 3);
  EXPECT_EQ(look_up(0, range.chunk + 1), 1);
  ASSERT_OK(set_access(range.at(0), range.chunk, CU_MEM_ACCESS_FLAGS_PROT_NONE));
  EXPECT_EQ(look_up(0, 2 * range.chunk), 0);
  EXPECT_EQ(control().access(&range, 1), -1);
  unsigned long long flags = 9;
  const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, 0};
  EXPECT_OK(driver().cuMemGetAccess(&flags, &location, range.at(1) + 5));
  EXPECT_EQ(flags, 1ull);
  EXPECT_EQ(driver().cuMemGetAccess(&flags, &location, range.at(2)), CUDA_ERROR_INVALID_VALUE);
}

TEST(copies_respect_the_access) {
  Range range(1);
  range.fill(0);
  Bytes bytes(8);
  ASSERT_OK(set_access(range.base, range.chunk, CU_MEM_ACCESS_FLAGS_PROT_READ));
  EXPECT_OK(driver().cuMemcpyDtoH(bytes.data(), range.base, 8));
  EXPECT_EQ(driver().cuMemcpyHtoD(range.base, bytes.data(), 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver().cuMemsetD8(range.base, 0, 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver().cuMemcpyDtoD(range.base, range.base + 8, 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_OK(driver().cuMemcpyHtoD(range.base, nullptr, 0));
  EXPECT_EQ(driver().cuMemcpyDtoH(nullptr, range.base, 8), CUDA_ERROR_INVALID_VALUE);
}

TEST(part_of_a_mapping_gets_no_access) {
  Range range(1, 2 * granularity());
  range.fill(0);
  EXPECT_EQ(set_access(range.base, granularity(), CU_MEM_ACCESS_FLAGS_PROT_NONE), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(set_access(range.base + granularity(), granularity()), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(control().access(host_pointer<void>(range.base), range.chunk), 3);
}

TEST(ten_thousand_neighbours_are_one_kernel_mapping) {
  ConfigForTest settings;
  settings.config.granularity_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  settings.apply();
  constexpr size_t kChunks = 10000;
  Range range(kChunks);
  const size_t before = kernel_mappings();
  control().reset_stats();
  range.fill(0, kChunks);
  EXPECT_EQ(kernel_mappings(), before + 1);
  EXPECT_EQ(control().call_count("cuMemSetAccess"), uint64_t{1});
  for (size_t i = 0; i < kChunks; ++i) std::memcpy(host_pointer<void>(range.at(i)), &i, sizeof(i));
  const auto number_at = [&](size_t i) {
    size_t number = 0;
    std::memcpy(&number, host_pointer<void>(range.at(i)), sizeof(number));
    return number;
  };
  size_t wrong = 0;
  for (size_t i = 0; i < kChunks; ++i) wrong += number_at(i) != i ? 1 : 0;
  EXPECT_EQ(wrong, size_t{0});
  EXPECT_EQ(control().physical_offset(host_pointer<void>(range.at(kChunks - 1) + 3)) -
                control().physical_offset(host_pointer<void>(range.at(0))),
            static_cast<int64_t>((kChunks - 1) * range.chunk + 3));
  range.unmap(0, kChunks);
  EXPECT_EQ(control().physical_offset(host_pointer<void>(range.at(0))), int64_t{-1});
}

// Mapped in reverse, no two chunks are neighbours in both spaces: one call then needs many kernel mappings.
TEST(one_access_call_maps_scattered_chunks) {
  constexpr size_t kChunks = 200;
  Range range(kChunks);
  for (size_t i = 0; i < kChunks; ++i) {
    const CUmemGenericAllocationHandle handle = create(range.chunk);
    range.map(kChunks - 1 - i, handle);
    ASSERT_OK(driver().cuMemRelease(handle));
  }
  ASSERT_OK(set_access(range.base, kChunks * range.chunk));
  for (size_t i = 0; i < kChunks; ++i) ASSERT_OK(driver().cuMemsetD8(range.at(i), static_cast<unsigned char>(i), 9));
  size_t wrong = 0;
  for (size_t i = 0; i < kChunks; ++i) wrong += read(range.at(i), 9) != Bytes(9, static_cast<unsigned char>(i)) ? 1 : 0;
  EXPECT_EQ(wrong, size_t{0});
}

// Chunks are mapped, aliased, protected, written and unmapped at random; a plain array says what must be seen where.
TEST(random_mappings_agree_with_a_model) {
  constexpr size_t kChunks = 6, kAddresses = 16, kSteps = 3000;
  constexpr CUmemAccess_flags kAccesses[] = {CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                                             CU_MEM_ACCESS_FLAGS_PROT_READ, CU_MEM_ACCESS_FLAGS_PROT_NONE};
  Range range(kAddresses);
  std::vector<CUmemGenericAllocationHandle> handles;
  for (size_t i = 0; i < kChunks; ++i) handles.push_back(create(range.chunk));
  std::vector<int> chunk_at(kAddresses, -1), access_at(kAddresses, 0);
  std::vector<uint64_t> stamp_of(kChunks, 0xdbdbdbdbdbdbdbdb);
  uint32_t state = 12345;
  const auto draw = [&](size_t limit) { return (state = state * 1664525u + 1013904223u) / 65536u % limit; };
  const auto stamp_at = [&](size_t i) { return host_pointer<volatile uint64_t>(range.at(i) + range.chunk - 8); };
  size_t wrong = 0;
  for (size_t step = 1; step <= kSteps; ++step) {
    const size_t first = draw(kAddresses);
    size_t last = first;  // one behind the mapped addresses from `first`
    while (last < kAddresses && chunk_at[last] >= 0 && last < first + 5) ++last;
    const size_t action = draw(4);
    if (first == last) {
      chunk_at[first] = static_cast<int>(draw(kChunks));
      range.map(first, handles[static_cast<size_t>(chunk_at[first])]);
      access_at[first] = 0;
    } else if (action == 0) {
      range.unmap(first, last - first);
      std::fill(chunk_at.begin() + first, chunk_at.begin() + last, -1);
    } else {
      const CUmemAccess_flags access = kAccesses[draw(4)];
      ASSERT_OK(set_access(range.at(first), (last - first) * range.chunk, access));
      std::fill(access_at.begin() + first, access_at.begin() + last, static_cast<int>(access));
    }
    const size_t target = draw(kAddresses);
    if (chunk_at[target] >= 0 && access_at[target] == 3) {
      *stamp_at(target) = stamp_of[static_cast<size_t>(chunk_at[target])] = step;
    }
    for (size_t i = 0; i < kAddresses; ++i) {
      const int expected = chunk_at[i] < 0 ? -1 : access_at[i];
      if (control().access(host_pointer<void>(range.at(i)), range.chunk) != expected) ++wrong;
      if (expected > 0 && *stamp_at(i) != stamp_of[static_cast<size_t>(chunk_at[i])]) ++wrong;
    }
  }
  EXPECT_EQ(wrong, size_t{0});
  for (const CUmemGenericAllocationHandle handle : handles) EXPECT_OK(driver().cuMemRelease(handle));
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // a sanitizer ends the process at the limit
TEST(the_kernels_mapping_limit_is_out_of_memory) {
  size_t limit = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> limit;
  if (limit == 0 || limit > 200000) SKIP("vm.max_map_count is unknown, or too large to reach quickly");
  ConfigForTest settings;
  settings.config.granularity_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  settings.apply();
  Range range(2 * limit);
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  CUresult result = CUDA_SUCCESS;
  size_t count = 0;
  for (; count < limit && result == CUDA_SUCCESS; ++count) {  // aliases of one chunk, with gaps between
    ASSERT_OK(driver().cuMemMap(range.at(2 * count), range.chunk, 0, handle, 0));
    range.mapped[2 * count] = true;
    result = set_access(range.at(2 * count), range.chunk);
  }
  EXPECT_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_TRUE(count < limit);
  for (size_t i = 0; i < 100; ++i) range.unmap(2 * i);
  EXPECT_OK(set_access(range.at(2 * (count - 1)), range.chunk));
  ASSERT_OK(driver().cuMemRelease(handle));
}
#endif

#ifndef __SANITIZE_THREAD__
TEST(four_tebibytes_can_be_reserved) {
  Range range(2, 2ull << 40);
  EXPECT_EQ(range.base % granularity(), 0ull);
  EXPECT_TRUE(faults(range.base + (3ull << 40), Touch::kRead));
}
#endif

// Streams

TEST(a_host_function_may_not_call_the_driver) {
  const Stream stream;
  CUresult seen = CUDA_SUCCESS;
  const auto function = [](void* result) {
    size_t free_bytes = 0, total = 0;
    *static_cast<CUresult*>(result) = driver().cuMemGetInfo(&free_bytes, &total);
  };
  ASSERT_OK(driver().cuLaunchHostFunc(stream.handle, function, &seen));
  ASSERT_OK(driver().cuStreamSynchronize(stream.handle));
  EXPECT_EQ(seen, CUDA_ERROR_NOT_PERMITTED);
}

TEST(destroyed_events_are_refused) {
  CUevent event = nullptr;
  ASSERT_OK(driver().cuEventCreate(&event, CU_EVENT_DEFAULT));
  ASSERT_OK(driver().cuEventDestroy(event));
  EXPECT_EQ(driver().cuEventRecord(event, nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(driver().cuEventDestroy(event), CUDA_ERROR_INVALID_HANDLE);
}

TEST(the_handle_of_a_destroyed_stream_is_used_again_with_another_id) {
  CUstream first = nullptr, second = nullptr;
  unsigned long long first_id = 0, second_id = 0;
  ASSERT_OK(driver().cuStreamCreate(&first, CU_STREAM_NON_BLOCKING));
  ASSERT_OK(driver().cuStreamGetId(first, &first_id));
  ASSERT_OK(driver().cuStreamDestroy(first));
  ASSERT_OK(driver().cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
  ASSERT_OK(driver().cuStreamGetId(second, &second_id));
  EXPECT_TRUE(second == first && second_id != first_id && first_id != 0);
  ASSERT_OK(driver().cuStreamDestroy(second));
}

// This program again, for the use of a stream that was destroyed.
TEST(the_use_of_a_destroyed_stream_ends_the_process) {
  if (getenv("OOC_USE_DESTROYED") != nullptr) {
    CUstream stream = nullptr;
    ASSERT_OK(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    ASSERT_OK(driver().cuStreamDestroy(stream));
    driver().cuStreamQuery(stream);
    return;
  }
  const pid_t child = fork();
  if (child == 0) {
    setenv("OOC_USE_DESTROYED", "1", 1);
    execl("/proc/self/exe", "emulated_driver_test", "the_use_of_a_destroyed_stream_ends_the_process", nullptr);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

TEST(destroying_a_stream_finishes_its_work) {
  Range range(1);
  range.fill(0);
  {
    const Stream stream;
    for (unsigned char i = 1; i <= 20; ++i) {
      ASSERT_OK(driver().cuMemsetD8Async(range.base, i, range.chunk, stream.handle));
    }
  }
  EXPECT_EQ(read(range.base, 1)[0], static_cast<unsigned char>(20));
}

TEST(calls_are_counted) {
  control().reset_stats();
  size_t free_bytes = 0, total = 0;
  for (int i = 0; i < 3; ++i) ASSERT_OK(driver().cuMemGetInfo(&free_bytes, &total));
  EXPECT_EQ(control().call_count("cuMemGetInfo"), uint64_t{3});
  EXPECT_EQ(control().call_count("cuMemMap"), uint64_t{0});
  EXPECT_EQ(control().call_count("cuMemGetInfo_v2"), UINT64_MAX);
}

TEST(threads_share_the_device) {
  constexpr int kThreads = 4, kRounds = 30;
  CUcontext context = nullptr;
  ASSERT_OK(driver().cuCtxGetCurrent(&context));
  const ooc_emulated_stats before = get_stats();
  Range range(kThreads * 4);
  std::vector<CUmemGenericAllocationHandle> handles;
  for (int i = 0; i < kThreads * 2; ++i) handles.push_back(create(range.chunk));
  std::atomic<int> wrong{0};
  // Each thread moves its two chunks among its four addresses, with copies on a stream of its own.
  const auto work = [&](size_t index) {
    driver().cuCtxSetCurrent(context);
    CUstream stream = nullptr;
    CUevent event = nullptr;
    CUresult result = driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS) result = driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    for (size_t round = 0; round < kRounds && result == CUDA_SUCCESS; ++round) {
      const CUdeviceptr address = range.at(index * 4 + round % 3);
      const Bytes sent = pattern(2 * range.chunk, static_cast<unsigned>(index * kRounds + round));
      Bytes received(sent.size());
      driver().cuMemMap(address, range.chunk, 0, handles[2 * index], 0);
      driver().cuMemMap(address + range.chunk, range.chunk, 0, handles[2 * index + 1], 0);
      set_access(address, 2 * range.chunk);
      driver().cuMemcpyHtoDAsync(address, sent.data(), sent.size(), stream);
      driver().cuEventRecord(event, stream);
      driver().cuStreamWaitEvent(stream, event, 0);
      driver().cuMemcpyDtoHAsync(received.data(), address, received.size(), stream);
      result = driver().cuStreamSynchronize(stream);
      if (received != sent || driver().cuMemUnmap(address, 2 * range.chunk) != CUDA_SUCCESS) wrong += 1;
    }
    if (result != CUDA_SUCCESS) wrong += 1;
    driver().cuEventDestroy(event);
    driver().cuStreamDestroy(stream);
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  for (const CUmemGenericAllocationHandle handle : handles) EXPECT_OK(driver().cuMemRelease(handle));
  EXPECT_EQ(get_stats().physical_bytes, before.physical_bytes);
}
