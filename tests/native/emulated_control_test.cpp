// The emulated device under control: configuration, the pace of the links, and failures on request.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <sstream>
#include <thread>

#include "emulated_fixture.h"
#include "pinned.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr double kMiB = 1 << 20;

float elapsed(const Event& start, const Event& end) {
  float milliseconds = -1;
  ASSERT_OK(driver().cuEventSynchronize(end.handle));
  ASSERT_OK(driver().cuEventElapsedTime(&milliseconds, start.handle, end.handle));
  return milliseconds;
}

void record(const Event& event, const Stream& stream) {
  ASSERT_OK(driver().cuEventRecord(event.handle, stream.handle));
}

// Fault rules for one test.
// The results of `calls` calls of cuMemGetInfo: 'x' where one fails.
std::string outcomes(int calls) {
  std::string result;
  for (int i = 0; i < calls; ++i) {
    size_t free_bytes = 0, total = 0;
    result += driver().cuMemGetInfo(&free_bytes, &total) == CUDA_SUCCESS ? '.' : 'x';
  }
  return result;
}

std::string refusal(const char* rules) {
  EXPECT_EQ(control().inject_faults(rules), -1);
  EXPECT_EQ(outcomes(5), std::string("....."));  // nothing of it is in force
  return control().error();
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

// Configuration

TEST(a_configuration_is_checked) {
  ooc_emulated_config config = get_config();
  const auto error_of = [&](const ooc_emulated_config& wrong) {
    EXPECT_EQ(control().set_config(&wrong), -1);
    return std::string(control().error());
  };
  ooc_emulated_config wrong = config;
  wrong.granularity_bytes = 100000;
  EXPECT_TRUE(contains(error_of(wrong), "power of two"));
  wrong = config;
  wrong.memory_bytes += 1;
  EXPECT_TRUE(contains(error_of(wrong), "multiple"));
  wrong = config;
  wrong.h2d_bytes_per_second = -1;
  EXPECT_TRUE(contains(error_of(wrong), "bandwidth"));
  wrong = config;
  wrong.d2h_latency_seconds = -1;
  EXPECT_TRUE(contains(error_of(wrong), "latency"));
  wrong = config;
  wrong.struct_bytes -= 1;
  EXPECT_TRUE(contains(error_of(wrong), "struct_bytes"));
  EXPECT_EQ(std::memcmp(&config, (wrong = get_config(), &wrong), sizeof(config)), 0);  // nothing has changed
}

TEST(the_memory_changes_while_nothing_uses_it) {
  ConfigForTest settings;
  settings.config.memory_bytes /= 2;
  {
    Range range(1);
    range.fill(0);
    EXPECT_EQ(control().set_config(&settings.config), -1);
  }
  settings.apply();
  size_t total = 0;
  EXPECT_OK(driver().cuDeviceTotalMem(&total, 0));
  EXPECT_EQ(total, static_cast<size_t>(settings.config.memory_bytes));
  settings.config.granularity_bytes = 2 << 20;
  settings.apply();
  EXPECT_EQ(granularity(), static_cast<size_t>(2 << 20));
}

// Pace. Times are the device's own and only their lower bounds are certain.

TEST(a_copy_takes_its_time_on_the_link) {
  ConfigForTest settings;
  settings.config.h2d_bytes_per_second = 256 * kMiB;
  settings.config.d2h_bytes_per_second = 128 * kMiB;
  settings.config.d2h_latency_seconds = 0.005;
  settings.apply();
  Range range(1, 4 << 20);
  range.fill(0);
  Bytes host = pattern(range.chunk, 1);
  const Bytes sent = host;
  const Stream stream;
  const Event start, middle, end;
  control().reset_stats();
  record(start, stream);
  ASSERT_OK(driver().cuMemcpyHtoDAsync(range.base, host.data(), range.chunk, stream.handle));
  record(middle, stream);
  ASSERT_OK(driver().cuMemcpyDtoHAsync(host.data(), range.base, range.chunk, stream.handle));
  record(end, stream);
  EXPECT_TRUE(elapsed(start, end) >= 15.6f + 31.2f + 5);
  EXPECT_TRUE(elapsed(start, middle) >= 15.6f);
  EXPECT_TRUE(elapsed(middle, end) >= 31.2f + 5);
  EXPECT_TRUE(host == sent);
  const ooc_emulated_stats stats = get_stats();
  EXPECT_EQ(stats.h2d_bytes, static_cast<uint64_t>(range.chunk));
  EXPECT_EQ(stats.d2h_copies, uint64_t{1});
  EXPECT_TRUE(stats.h2d_busy_seconds > 0.0156 && stats.h2d_busy_seconds < 0.0157);
  EXPECT_TRUE(stats.d2h_busy_seconds > 0.0362 && stats.d2h_busy_seconds < 0.0363);
}

TEST(a_synchronous_copy_takes_the_same_link) {
  ConfigForTest settings;
  settings.config.h2d_bytes_per_second = 128 * kMiB;
  settings.apply();
  Range range(1, 2 << 20);
  range.fill(0);
  const auto start = std::chrono::steady_clock::now();
  write(range.base, Bytes(range.chunk));
  EXPECT_TRUE(std::chrono::steady_clock::now() - start >= std::chrono::microseconds(15625));
}

TEST(streams_share_a_direction) {
  ConfigForTest settings;
  settings.config.d2h_bytes_per_second = 256 * kMiB;
  settings.apply();
  Range range(2, 4 << 20);
  range.fill(0, 2);
  const Pinned first(range.chunk), second(range.chunk);
  const Stream one, other;
  const Event start, end_one, end_other;
  record(start, one);
  ASSERT_OK(driver().cuEventSynchronize(start.handle));
  ASSERT_OK(driver().cuMemcpyDtoHAsync(first.data, range.at(0), range.chunk, one.handle));
  ASSERT_OK(driver().cuMemcpyDtoHAsync(second.data, range.at(1), range.chunk, other.handle));
  record(end_one, one);
  record(end_other, other);
  EXPECT_TRUE(std::max(elapsed(start, end_one), elapsed(start, end_other)) >= 31.2f);
}

// If the directions shared a link, the second copy would end after the first in every attempt.
TEST(directions_are_independent) {
  ConfigForTest settings;
  settings.config.d2h_bytes_per_second = 32 * kMiB;
  settings.apply();
  Range range(2, 2 << 20);
  range.fill(0, 2);
  const Pinned down(range.chunk), up(range.chunk);
  const Stream slow, fast;
  bool was_overtaken = false;
  for (int attempt = 0; attempt < 5 && !was_overtaken; ++attempt) {
    ASSERT_OK(driver().cuMemcpyDtoHAsync(down.data, range.at(0), range.chunk, slow.handle));
    ASSERT_OK(driver().cuMemcpyHtoDAsync(range.at(1), up.data, range.chunk, fast.handle));
    ASSERT_OK(driver().cuStreamSynchronize(fast.handle));
    was_overtaken = driver().cuStreamQuery(slow.handle) == CUDA_ERROR_NOT_READY;
    ASSERT_OK(driver().cuStreamSynchronize(slow.handle));
  }
  EXPECT_TRUE(was_overtaken);
}

TEST(copies_within_the_device_take_no_link) {
  ConfigForTest settings;
  settings.config.h2d_bytes_per_second = settings.config.d2h_bytes_per_second = 1 * kMiB;
  settings.apply();
  Range range(2);
  range.fill(0, 2);
  control().reset_stats();
  ASSERT_OK(driver().cuMemsetD8(range.at(0), 1, range.chunk));
  ASSERT_OK(driver().cuMemcpyDtoD(range.at(1), range.at(0), range.chunk));
  EXPECT_EQ(get_stats().h2d_copies + get_stats().d2h_copies, uint64_t{0});
}

// Faults

TEST(chosen_calls_fail) {
  control().reset_stats();
  {
    const FaultsForTest faults("cuMemGetInfo:after=2,times=3");
    EXPECT_EQ(outcomes(8), std::string("..xxx..."));
  }
  {
    const FaultsForTest faults("cuMemGetInfo:every=3");
    EXPECT_EQ(outcomes(7), std::string("..x..x."));
  }
  {
    const FaultsForTest faults("cuMemGetInfo:after=1,every=2,times=2 ; cuMemMap:every=1");
    EXPECT_EQ(outcomes(9), std::string("..x.x...."));
  }
  EXPECT_EQ(get_stats().injected_faults, uint64_t{3 + 2 + 2});
  EXPECT_EQ(outcomes(3), std::string("..."));
}

TEST(probable_failures_repeat_with_the_seed) {
  std::string by_seed[3];
  const char* rules[] = {"cuMemGetInfo:probability=0.3,seed=1", "cuMemGetInfo:probability=0.3,seed=1",
                         "cuMemGetInfo:probability=0.3,seed=2"};
  for (int i = 0; i < 3; ++i) {
    const FaultsForTest faults(rules[i]);
    by_seed[i] = outcomes(1000);
  }
  EXPECT_EQ(by_seed[0], by_seed[1]);
  EXPECT_TRUE(by_seed[0] != by_seed[2]);
  const auto failures = std::count(by_seed[0].begin(), by_seed[0].end(), 'x');
  EXPECT_TRUE(failures > 200 && failures < 400);
}

TEST(a_fault_has_the_result_asked_for_and_no_effect) {
  Range range(1);
  const CUmemGenericAllocationHandle handle = create(range.chunk);
  const ooc_emulated_stats before = get_stats();
  {
    const FaultsForTest faults("cuMemCreate:error=2; cuMemMap:error=CUDA_ERROR_NOT_PERMITTED; cuMemRelease");
    const CUmemAllocationProp prop = device_memory();
    CUmemGenericAllocationHandle other = 0;
    EXPECT_EQ(driver().cuMemCreate(&other, range.chunk, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(driver().cuMemMap(range.base, range.chunk, 0, handle, 0), CUDA_ERROR_NOT_PERMITTED);
    EXPECT_EQ(driver().cuMemRelease(handle), CUDA_ERROR_UNKNOWN);
  }
  const ooc_emulated_stats after = get_stats();
  EXPECT_EQ(after.physical_bytes, before.physical_bytes);
  EXPECT_EQ(after.mappings, before.mappings);
  range.map(0, handle);
  EXPECT_OK(driver().cuMemRelease(handle));
}

// Where two functions ask, only one is refused.
TEST(a_fault_can_be_for_one_call_site) {
  struct Asking {
    static __attribute__((noinline)) CUresult here(size_t* free, size_t* total) {
      const CUresult result = driver().cuMemGetInfo(free, total);
      return *total > 0 ? result : CUDA_ERROR_INVALID_VALUE;  // so that it is not a jump
    }
    static __attribute__((noinline)) CUresult there(size_t* free, size_t* total) {
      const CUresult result = driver().cuMemGetInfo(free, total);
      return *total > 1 ? result : CUDA_ERROR_INVALID_VALUE;
    }
  };
  control().watch_sites();
  size_t free = 0, total = 0;
  for (int i = 0; i < 1234; ++i) EXPECT_OK(Asking::here(&free, &total));
  for (int i = 0; i < 2345; ++i) EXPECT_OK(Asking::there(&free, &total));
  std::istringstream list(control().sites());
  std::string call, site, there;
  uint64_t count = 0, here = 0;
  while (list >> call >> site >> count) {
    if (call != "cuMemGetInfo") continue;
    if (count == 2345) there = site;
    here += count == 1234;
  }
  EXPECT_EQ(here, uint64_t{1});
  ASSERT_TRUE(contains(there, "emulated_control_test+0x"));
  const FaultsForTest faults("cuMemGetInfo:site=" + there + ",after=1,times=1");
  EXPECT_OK(Asking::there(&free, &total));
  EXPECT_OK(Asking::here(&free, &total));
  EXPECT_OK(Asking::here(&free, &total));
  EXPECT_EQ(Asking::there(&free, &total), CUDA_ERROR_UNKNOWN);
  EXPECT_OK(Asking::there(&free, &total));
}

TEST(work_can_be_done_late_or_never) {
  Range range(1);
  range.fill(0);
  write(range.base, Bytes(range.chunk, 7));
  const Pinned bytes(range.chunk);
  {
    const FaultsForTest faults("cuMemcpyDtoHAsync:delay=300ms,times=1");
    const Stream stream;
    ASSERT_OK(driver().cuMemcpyDtoHAsync(bytes.data, range.base, range.chunk, stream.handle));
    EXPECT_EQ(driver().cuStreamQuery(stream.handle), CUDA_ERROR_NOT_READY);
    ASSERT_OK(driver().cuStreamSynchronize(stream.handle));
    EXPECT_EQ(bytes.data[0], 7);
  }
  {
    const FaultsForTest faults("cuEventRecord:delay=never");
    const Stream stream;
    const Event event;
    record(event, stream);
    ASSERT_OK(driver().cuMemcpyDtoHAsync(bytes.data, range.base, range.chunk, stream.handle));
    EXPECT_EQ(driver().cuEventQuery(event.handle), CUDA_ERROR_NOT_READY);
  }
  const auto start = std::chrono::steady_clock::now();
  {
    const FaultsForTest faults("cuMemGetInfo:delay=20ms,times=1");  // nothing is enqueued: the call itself takes long
    EXPECT_EQ(outcomes(2), std::string(".."));
  }
  EXPECT_TRUE(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(20));
}

TEST(a_call_takes_the_time_that_it_costs) {
  Range range(3);
  range.fill(0, 3);
  const auto seconds = [](auto call) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_OK(call());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto access = [&] { return set_access(range.base, 3 * range.chunk); };
  control().reset_stats();
  {
    const FaultsForTest costs("cuMemSetAccess:cost=2ms;cuMemSetAccess:chunk_cost=5ms;cuEventRecord:cost=4ms");
    EXPECT_TRUE(seconds(access) >= 0.017);  // rules add up, and one call covers three chunks
    const Stream stream;
    const Event event;
    EXPECT_TRUE(seconds([&] { return driver().cuEventRecord(event.handle, stream.handle); }) >= 0.004);  // the host's time
  }
  {
    const FaultsForTest costs("cuMemSetAccess:mib_cost=80ms");
    EXPECT_TRUE(seconds(access) >= 0.080 * static_cast<double>(3 * range.chunk) / (1 << 20));
  }
  {
    const FaultsForTest costs("published");
    EXPECT_TRUE(seconds(access) >= 3 * 36e-6);
  }
  {
    const FaultsForTest refused("cuMemSetAccess:cost=10s;cuMemSetAccess:error=2");  // what is refused does nothing
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(access(), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_TRUE(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    EXPECT_EQ(get_stats().injected_faults, uint64_t{1});  // a cost is no fault
  }
}

// A call that takes long holds nothing that a copy, or another thread's call, needs.
TEST(copies_go_on_while_a_call_takes_its_time) {
  Range range(2);
  range.fill(0, 2);
  const Pinned bytes(range.chunk);
  const FaultsForTest costs("cuMemSetAccess:cost=2s");
  std::atomic<bool> over{false};
  CUcontext context = nullptr;
  ASSERT_OK(driver().cuCtxGetCurrent(&context));
  std::thread slow([&] {
    EXPECT_OK(driver().cuCtxSetCurrent(context));
    EXPECT_OK(set_access(range.at(1), range.chunk));
    over = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ASSERT_OK(driver().cuMemcpyDtoH(bytes.data, range.base, range.chunk));
  EXPECT_TRUE(!over);
  slow.join();
}

TEST(wrong_fault_rules_are_explained) {
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:cost=2min"), "cost=2min"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:cost=2us,error=2"), "two rules"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:cost=2us,delay=2us"), "two rules"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:site=somewhere"), "site=somewhere"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:delay=2min"), "delay=2min"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:delay=never"), "delay=never"));  // nobody would come back from it
  EXPECT_TRUE(contains(refusal("cuMemFoo:every=1"), "cuMemFoo"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:every=1;cuMemGetInfo_v2"), "cuMemGetInfo_v2"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:every=0"), "every=0"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:often=1"), "often=1"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:probability=1.5"), "probability=1.5"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:error=0"), "error=0"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:error=CUDA_ERROR_FOO"), "CUDA_ERROR_FOO"));
  EXPECT_TRUE(contains(refusal("cuMemGetInfo:times=-1"), "use rules such as"));
}
