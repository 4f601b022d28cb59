// Driver calls that fail: retried, degraded or reported, and never at the cost of a variable's contents.
#include <sys/resource.h>

#include <fstream>
#include <random>

#include "core_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// Every driver call of the core after its creation.
const char* const kCalls[] = {"cuMemCreate",        "cuMemRelease",       "cuMemMap",           "cuMemUnmap",
                              "cuMemSetAccess",     "cuMemcpyDtoHAsync",  "cuMemcpyHtoDAsync",  "cuEventCreate",
                              "cuEventRecord",      "cuEventQuery", "cuStreamQuery", "cuMemHostRegister",
                              "cuMemHostUnregister", "cuCtxSetCurrent"};

// Uses, writes, allocates and frees at random. Whatever is refused must say why and change nothing. Returns how many
// calls were refused.
int run_program(CoreTest& t, std::vector<Variable>& live, unsigned seed, int steps) {
  std::mt19937_64 random(seed);
  int refused = 0;
  for (int step = 0; step < steps; ++step) {
    const uint64_t choice = random() % 10;
    std::swap(live[random() % live.size()], live.back());
    Variable& v = live.back();
    int status = OOC_OK;
    if (choice < 4) {
      status = t.check(v);
    } else if (choice < 8) {
      status = t.update(v, seed + static_cast<unsigned>(step));
    } else {
      t.let_go();
      void* address = t.core.malloc(v.bytes);
      if (address == nullptr) {
        status = OOC_OUT_OF_MEMORY;
      } else {
        t.core.free(v.address);
        v.address = address;
        t.put(v);
      }
    }
    if (status == OOC_OK) continue;
    ++refused;
    EXPECT_TRUE(!t.core.in_function());
    EXPECT_TRUE(last_error().size() > 20);
  }
  return refused;
}

void expect_recovered(CoreTest& t, const std::vector<Variable>& live, const std::string& rules) {
  const int before = failures;
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.let_go();
  t.expect_intact(live);
  EXPECT_TRUE(t.stats().device_peak_bytes <= t.stats().budget_bytes);
  if (failures != before) std::fprintf(stderr, "under %s\n", rules.c_str());
}

}  // namespace

TEST(single_failures_of_any_call_go_unnoticed) {
  for (const char* call : kCalls) {
    const std::string rules = std::string(call) + ":every=5";
    CoreTest t({6, 64, 0, 1});
    std::vector<Variable> live;
    int refused = 0;
    {
      const FaultsForTest faults(rules);
      live = t.make_many(6, 2 * t.chunk);
      refused = run_program(t, live, 1, 100);
    }
    if (!EXPECT_EQ(refused, 0)) std::fprintf(stderr, "under %s: %s\n", rules.c_str(), last_error().c_str());
    expect_recovered(t, live, rules);
  }
}

TEST(a_call_that_fails_for_a_while_loses_nothing) {
  for (const char* call : kCalls) {
    const std::string rules = call;  // each one
    CoreTest t({6, 64, 0, 1});
    std::vector<Variable> live = t.make_many(6, 2 * t.chunk);
    {
      const FaultsForTest faults(rules);
      run_program(t, live, 2, 40);
      EXPECT_EQ(t.core.audit(), OOC_OK);
    }
    expect_recovered(t, live, rules);
    EXPECT_EQ(run_program(t, live, 3, 60), 0);  // and all of it works again
    expect_recovered(t, live, rules);
  }
}

TEST(failures_here_and_there_lose_nothing) {
  for (unsigned seed = 1; seed <= 8; ++seed) {
    std::string rules;
    for (const char* call : kCalls)
      rules += std::string(rules.empty() ? "" : ";") + call + ":probability=0.15,seed=" + std::to_string(seed);
    CoreTest t({6, 64, 0, 1});
    std::vector<Variable> live = t.make_many(6, 2 * t.chunk);
    {
      const FaultsForTest faults(rules);
      run_program(t, live, seed, 150);
    }
    expect_recovered(t, live, rules);
    if (!EXPECT_EQ(run_program(t, live, seed, 50), 0)) std::fprintf(stderr, "%s\n", last_error().c_str());
    expect_recovered(t, live, rules);
  }
}

TEST(what_a_failing_driver_refused_is_counted_and_reported) {
  CoreTest t({4, 64, 0, 1});
  const std::vector<Variable> live = t.make_many(4, 2 * t.chunk);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.stats().driver_failure_count, uint64_t{0});
  {
    const FaultsForTest faults("cuMemcpyHtoDAsync");
    EXPECT_EQ(t.check(live[0]), OOC_DRIVER_FAILURE);
    EXPECT_TRUE(contains(last_error(), "safe in host memory"));
  }
  {
    const FaultsForTest faults("cuMemMap");
    EXPECT_EQ(t.check(live[0]), OOC_DRIVER_FAILURE);
    EXPECT_TRUE(contains(last_error(), "safe in host memory"));
  }
  EXPECT_EQ(t.check(live[0]), OOC_OK);
  EXPECT_EQ(t.check(live[1]), OOC_OK);
  {
    const FaultsForTest faults("cuMemcpyDtoHAsync");
    Variable dirty = live[1];
    ASSERT_EQ(t.update(dirty, 9), OOC_OK);
    EXPECT_EQ(t.update(dirty, 2), OOC_OK);
    EXPECT_TRUE(t.stats().driver_failure_count > 0);
    EXPECT_EQ(t.check(live[2]), OOC_OK);  // the clean one can leave
    EXPECT_EQ(t.call("pair", {reads(live[2]), reads(live[3])}), OOC_DRIVER_FAILURE);
    EXPECT_TRUE(contains(last_error(), "cuMemcpyDtoHAsync"));
  }
  t.expect_intact(live);
}

// A smaller function would not be helped: whoever divides functions that do not fit must not begin to.
TEST(room_that_the_driver_does_not_give_is_no_lack_of_memory) {
  CoreTest t({4, 64, 0, 1});
  const std::vector<Variable> live = t.make_many(4, 2 * t.chunk);
  t.let_go();
  {
    const FaultsForTest faults("cuMemcpyDtoHAsync");
    EXPECT_EQ(t.check(live[0]), OOC_DRIVER_FAILURE);
    EXPECT_TRUE(contains(last_error(), "cuMemcpyDtoHAsync") && contains(last_error(), "CUDA_ERROR_UNKNOWN"));
    EXPECT_TRUE(contains(last_error(), "safe"));
    t.let_go();
    EXPECT_TRUE(t.core.malloc(2 * t.chunk) == nullptr);
    EXPECT_EQ(last_status(), OOC_DRIVER_FAILURE);
    EXPECT_TRUE(contains(last_error(), "cuMemcpyDtoHAsync") && contains(last_error(), "safe"));
    EXPECT_TRUE(t.core.malloc(5 * t.chunk) == nullptr);  // this one fits nowhere, whatever the driver does
    EXPECT_EQ(last_status(), OOC_OUT_OF_MEMORY);
    EXPECT_TRUE(contains(last_error(), "smallest budget"));
    const Variable& newest = live.back();  // on the device, and nothing has to move
    EXPECT_EQ(t.check(newest), OOC_OK);
    EXPECT_EQ(t.call("f", {reads(newest)}, [&] {  // nor is what it needs measured in host memory
      EXPECT_TRUE(t.core.malloc(2 * t.chunk) == nullptr);
      EXPECT_EQ(last_status(), OOC_DRIVER_FAILURE);
    }), OOC_OK);
  }
  t.let_go();
  t.expect_intact(live);
}

TEST(host_memory_that_cannot_be_pinned_is_used_all_the_same) {
  const FaultsForTest faults("cuMemHostRegister");
  CoreTest t({2});
  const std::vector<Variable> live = t.make_many(3, 2 * t.chunk);
  t.expect_intact(live);
  EXPECT_TRUE(t.stats().swap_out_bytes > 0);
}

namespace {

// The system gives the process some pages more, for small things, but no extent of host memory.
class NoMoreHostMemory {
 public:
  NoMoreHostMemory() {
    getrlimit(RLIMIT_DATA, &before_);
    std::ifstream status("/proc/self/status");
    std::string word;
    while (status >> word && word != "VmData:") {
    }
    rlim_t kibibytes = 0;
    status >> kibibytes;
    const rlimit little{(kibibytes + 64) << 10, before_.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_DATA, &little), 0);
  }
  ~NoMoreHostMemory() { setrlimit(RLIMIT_DATA, &before_); }
  NoMoreHostMemory(const NoMoreHostMemory&) = delete;
  NoMoreHostMemory& operator=(const NoMoreHostMemory&) = delete;

 private:
  rlimit before_;
};

}  // namespace

TEST(where_the_system_has_no_host_memory_left_nobody_is_told_to_raise_the_limit) {
  CoreTest t({4, 64});
  const std::vector<Variable> live = t.make_many(2, 2 * t.chunk);
  t.let_go();
  {
    const NoMoreHostMemory none;
    EXPECT_TRUE(t.core.malloc(2 * t.chunk) == nullptr);
    EXPECT_TRUE(contains(last_error(), "the system has no more host memory"));
    EXPECT_TRUE(!contains(last_error(), "raise"));
  }
  t.core.free(t.must_malloc(2 * t.chunk));
  {
    const FaultsForTest faults("cuMemcpyDtoHAsync");  // there is host memory, and nothing can be copied there
    EXPECT_TRUE(t.core.malloc(4 * t.chunk) == nullptr);
    EXPECT_TRUE(contains(last_error(), "driver refused") && !contains(last_error(), "raise"));
  }
  t.expect_intact(live);
}

TEST(a_device_that_has_less_than_the_budget_is_used_as_far_as_it_goes) {
  CoreTest t({8});
  std::vector<Variable> live;
  {
    const FaultsForTest faults("cuMemCreate:after=4,error=2");
    live = t.make_many(5, 2 * t.chunk);
    t.expect_intact(live);
    EXPECT_EQ(t.stats().device_peak_bytes, 4 * t.chunk);
    EXPECT_TRUE(t.core.malloc(5 * t.chunk) == nullptr);
  }
  t.expect_intact(live);
}

TEST(a_failing_set_up_is_explained_and_leaves_nothing) {
  const ooc_emulated_stats before = get_stats();
  const ooc_config config = make_config({});
  for (const char* call : {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuMemGetAllocationGranularity",
                           "cuStreamCreate", "cuStreamCreate:after=1", "cuMemAddressReserve"}) {
    const FaultsForTest faults(call);
    std::string error;
    try {
      const Core core(config);
    } catch (const std::runtime_error& thrown) {
      error = thrown.what();
    }
    const std::string name = std::string(call).substr(0, std::string(call).find(':'));
    EXPECT_TRUE(contains(error, name) && contains(error, "CUDA_ERROR_UNKNOWN"));
  }
  EXPECT_EQ(get_stats().reservations, before.reservations);
}

TEST(freed_memory_that_could_not_be_unmapped_serves_later) {
  CoreTest t({5});
  const Variable first = t.make(2 * t.chunk, 1), between = t.make(t.chunk, 2), last = t.make(2 * t.chunk, 3);
  t.free({first, last});
  t.let_go();
  {
    const FaultsForTest faults("cuMemUnmap");
    EXPECT_EQ(t.core.malloc(3 * t.chunk), nullptr);
    EXPECT_EQ(last_status(), OOC_DRIVER_FAILURE);
    EXPECT_EQ(t.stats().cached_bytes, 4 * t.chunk);
    EXPECT_EQ(t.core.audit(), OOC_OK);
  }
  const std::vector<Variable> live = {t.make(3 * t.chunk, 4), t.make(t.chunk, 5), between};
  t.expect_intact(live);
}

// Five chunks that three freed variables have three of, in turns: the first gap is filled, and the second is not.
TEST(what_cannot_be_completed_is_given_back) {
  for (const char* calls : {"cuMemMap", "cuMemMap:after=1", "cuMemSetAccess:after=1"}) {
    CoreTest t({7});
    const std::vector<Variable> all = t.make_many(7, t.chunk);
    t.let_go();
    t.free({all[1], all[3]});
    t.core.release_cached();
    t.free({all[0], all[2], all[4]});
    {
      const FaultsForTest faults(calls);
      EXPECT_EQ(t.core.malloc(5 * t.chunk), nullptr);
      EXPECT_EQ(last_status(), OOC_DRIVER_FAILURE);
      EXPECT_TRUE(contains(last_error(), "mapping"));
    }
    EXPECT_EQ(t.core.audit(), OOC_OK);
    EXPECT_EQ(t.stats().resident_bytes, 2 * t.chunk);
    const Variable large = t.make(5 * t.chunk, 9);
    t.expect_intact({large, all[5], all[6]});
    EXPECT_EQ(t.stats().swap_out_bytes, uint64_t{0});
  }
}
