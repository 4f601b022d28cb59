// What ooc_core_read_stats shows, against a second route: faults against what the device was told to inject, chunks by
// state against each variable's residency. (The audit, at the end of every test, recounts the chunks slot by slot.)
#include <map>
#include <random>
#include <thread>

#include "core_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

using Field = uint64_t ooc_stats::*;

const std::map<std::string, Field> kFailures = {
    {"cuMemCreate", &ooc_stats::driver_failures_mem_create},
    {"cuMemMap", &ooc_stats::driver_failures_mem_map},
    {"cuMemSetAccess", &ooc_stats::driver_failures_mem_set_access},
    {"cuMemUnmap", &ooc_stats::driver_failures_mem_unmap},
    {"cuMemcpyDtoHAsync", &ooc_stats::driver_failures_copy_out},
    {"cuMemcpyHtoDAsync", &ooc_stats::driver_failures_copy_in},
    {"cuMemHostRegister", &ooc_stats::driver_failures_host_register},
    {"cuEventCreate", &ooc_stats::driver_failures_event_create},
    {"cuEventRecord", &ooc_stats::driver_failures_event_record},
    {"cuEventQuery", &ooc_stats::driver_failures_event_synchronize},
    {"cuStreamQuery", &ooc_stats::driver_failures_stream_synchronize},
    {"cuStreamWaitEvent", &ooc_stats::driver_failures_stream_wait_event},
};

uint64_t chunks_shown(const ooc_stats& s) {
  return s.chunks_resident + s.chunks_leaving + s.chunks_arriving + s.chunks_cached + s.chunks_free + s.chunks_slab +
         s.chunks_slab_empty + s.chunks_lost;
}

// Twice the budget: everything leaves and comes back.
void swap_back_and_forth(CoreTest& t) {
  std::vector<Variable> live = t.make_many(6, 2 * t.chunk);
  for (unsigned round = 0; round < 4; ++round)
    for (Variable& v : live) t.update(v, 10 + round);
  t.core.synchronize();
}

// Returns the failures that the device injected into `call`; expects the core to have counted just these, and where.
uint64_t expect_counted(const std::string& call, bool asynchronous) {
  CoreTest t({6, 64, 0, 1, false, asynchronous});
  const uint64_t before = get_stats().injected_faults;
  ASSERT_EQ(control().inject_faults((call + ":times=2").c_str()), 0);
  swap_back_and_forth(t);
  control().clear_faults();
  const ooc_stats stats = t.stats();
  const uint64_t injected = get_stats().injected_faults - before;
  if (!EXPECT_EQ(stats.driver_failure_count, injected)) std::fprintf(stderr, "in all, with %s\n", call.c_str());
  for (const auto& [name, field] : kFailures)
    if (!EXPECT_EQ(stats.*field, name == call ? injected : 0)) std::fprintf(stderr, "%s, with %s\n", name.c_str(), call.c_str());
  return injected;
}

}  // namespace

TEST(every_failed_call_is_counted_under_its_name) {
  for (const auto& [call, field] : kFailures) {
    const uint64_t on_host = expect_counted(call, false), on_streams = expect_counted(call, true);
    if (!EXPECT_TRUE(on_host + on_streams > 0)) std::fprintf(stderr, "%s never failed\n", call.c_str());
  }
}

// Where functions run on the host, the core sees both and keeps them apart; on streams, the device times its copies itself.
TEST(the_time_of_memory_calls_is_counted_and_is_no_time_of_copies) {
  for (const bool asynchronous : {false, true}) {
    const FaultsForTest costs("cuMemMap:cost=3ms;cuMemSetAccess:chunk_cost=4ms;cuMemUnmap:chunk_cost=5ms");
    CoreTest t({6, 64, 0, 1, false, asynchronous});
    swap_back_and_forth(t);
    const ooc_stats s = t.stats();
    ASSERT_TRUE(s.swap_in_count > 0 && s.swap_out_count > 0);
    EXPECT_TRUE(s.map_seconds >= 0.007 * static_cast<double>(s.driver_calls_map));
    EXPECT_EQ(s.unmapped_bytes % t.chunk, uint64_t{0});
    EXPECT_TRUE(s.unmapped_bytes > 0 && s.unmapped_bytes <= s.driver_calls_map * t.chunk);
    EXPECT_TRUE(s.unmap_seconds >= 0.005 * static_cast<double>(s.unmapped_bytes / t.chunk));
    // A copy of a chunk takes no time to speak of; 7 ms each if the map before it counted.
    EXPECT_TRUE(s.copy_in_seconds < 0.005 * static_cast<double>(s.swap_in_count));
  }
}

TEST(chunks_by_state_add_up_and_agree_with_the_variables) {
  constexpr uint64_t kSmall = 1024;
  CoreTest t({12, 64, kSmall, 1});
  uint64_t most_empty_slabs = 0;
  std::mt19937_64 random(7);
  std::vector<Variable> live;
  for (int step = 0; step < 300; ++step) {
    const uint64_t choice = random() % 8;
    if (step % 30 == 29) {
      t.free(live);
      live.clear();
    } else if (choice < 3 && live.size() < 12) {
      const uint64_t most = random() % 3 == 0 ? kSmall : 3 * t.chunk;
      live.push_back(t.make(1 + random() % most, static_cast<unsigned>(step)));
    } else if (choice == 3 && !live.empty()) {
      t.core.free(live.back().address);
      live.pop_back();
    } else if (choice == 4) {
      t.core.release_cached();
    } else if (choice == 5) {
      t.let_go();
      t.core.evict_all();
    } else if (!live.empty()) {
      t.check(live[random() % live.size()]);
    }
    uint64_t resident = 0, waste = 0;
    for (const Variable& v : live) {
      uint8_t there[4] = {};
      const uint32_t count = t.core.residency(v.address, there, 4);
      for (uint32_t i = 0; i < count; ++i) resident += there[i];
      waste += count * t.chunk - (count > 0 ? v.bytes : 0);
    }
    const ooc_stats s = t.stats();
    EXPECT_EQ(chunks_shown(s) * t.chunk, s.device_bytes);
    EXPECT_EQ(s.chunks_resident + s.chunks_leaving, resident);
    EXPECT_EQ(s.chunks_free * t.chunk, s.free_bytes);
    EXPECT_EQ(s.chunks_cached * t.chunk, s.cached_bytes);
    EXPECT_EQ((s.chunks_slab + s.chunks_slab_empty) * t.chunk, s.slab_bytes);
    EXPECT_EQ(s.chunks_slab * t.chunk, s.slab_used_bytes);
    EXPECT_EQ(s.waste_bytes, waste + s.slab_used_bytes - s.small_live_bytes);
    most_empty_slabs = std::max(most_empty_slabs, s.chunks_slab_empty);
  }
  EXPECT_TRUE(most_empty_slabs > 0);
}

// Another thread looks while one computes: whatever is under way then, the states add up to what is held.
TEST(chunks_by_state_add_up_at_any_moment) {
  CoreTest t({6, 64, 0, 1});
  std::atomic<bool> done{false};
  uint64_t looks = 0;
  std::thread reader([&] {
    while (!done) {
      const ooc_stats s = t.stats();
      EXPECT_EQ(chunks_shown(s) * t.chunk, s.device_bytes);
      ++looks;
    }
  });
  for (int round = 0; round < 20; ++round) {
    std::vector<Variable> live = t.make_many(6, 2 * t.chunk);
    t.expect_intact(live);
    t.free(live);
  }
  done = true;
  reader.join();
  EXPECT_TRUE(looks > 0);
}

TEST(lost_chunks_are_neither_free_nor_in_use) {
  CoreTest t({4, 64, 0, 1});
  const Variable v = t.make(t.chunk, 1);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  ASSERT_EQ(control().inject_faults("cuMemcpyHtoDAsync;cuMemUnmap"), 0);  // nothing arrives, and nothing can be undone
  EXPECT_EQ(t.check(v), OOC_DRIVER_FAILURE);
  control().clear_faults();
  const ooc_stats s = t.stats();
  EXPECT_EQ(chunks_shown(s) * t.chunk, s.device_bytes);
  EXPECT_TRUE(s.chunks_lost > 0);
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(host_memory_that_cannot_be_pinned_is_shown) {
  CoreTest t({4, 64, 0, 1});
  ASSERT_EQ(control().inject_faults("cuMemHostRegister"), 0);
  const std::vector<Variable> live = t.make_many(6, t.chunk);
  control().clear_faults();
  const ooc_stats s = t.stats();
  EXPECT_TRUE(s.host_bytes > 0);
  EXPECT_EQ(s.host_unpinned_bytes, s.host_bytes);
}

// What a stream idles until memory has left, or has come, is no part of the time that its function takes where all fits.
TEST(functions_are_timed_without_what_they_wait_for_memory) {
  Limits limits{2};
  limits.asynchronous = true;
  CoreTest t(limits);
  const Stream stream;
  const auto call = [&](const std::vector<ooc_operand>& operands, const std::function<void()>& body) {
    const auto count = static_cast<uint32_t>(operands.size());
    ASSERT_EQ(t.core.function_begin(t.id("f"), operands.data(), count, stream.handle), OOC_OK);
    body();
    ASSERT_EQ(t.core.function_end(false), OOC_OK);
  };
  const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(30)); };
  const auto works = [&] { ASSERT_OK(driver().cuLaunchHostFunc(stream.handle, sleep, nullptr)); };
  const auto allocate = [&](Variable& variable) { variable.address = t.core.malloc(variable.bytes, stream.handle); };
  Variable first{nullptr, 2 * t.chunk, 1}, second{nullptr, 2 * t.chunk, 2};
  ooc_iteration ended{};
  call({}, [&] { allocate(first); });
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  ConfigForTest slow;  // 2 chunks take 400 ms
  slow.config.h2d_bytes_per_second = slow.config.d2h_bytes_per_second = static_cast<double>(t.chunk) / 0.2;
  slow.apply();
  ASSERT_EQ(control().inject_faults("cuMemMap:cost=200ms"), 0);  // the host's time
  call({writes(first)}, works);
  call({}, [&] { works(); allocate(second); works(); });
  call({writes(second)}, works);
  call({reads(first)}, works);
  control().clear_faults();
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  ASSERT_EQ(ended.timed, 1u);
  Lock lock(t.core.mutex());
  const auto trace = t.core.trace(ended.fingerprint);
  const double expected[] = {0.03, 0.06, 0.03, 0.03};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(trace->seconds[i] > expected[i] - 0.002);
    EXPECT_TRUE(trace->seconds[i] < expected[i] + 0.2);
  }
}
