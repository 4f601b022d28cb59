// A core that sleeps: nothing on the device, every value where it was, and who wakes it.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "daemon_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr uint64_t kSmall = 4096;

Limits with_slabs(bool asynchronous = false, uint64_t host_chunks = 64) {
  Limits limits{12, host_chunks, kSmall};
  limits.asynchronous = asynchronous;
  return limits;
}

uint64_t device_bytes_of_the_driver() {
  size_t free = 0, total = 0;
  EXPECT_OK(driver().cuMemGetInfo(&free, &total));
  return total - free;
}

// Variables of two chunks, and more small ones than fit a chunk, of which some are freed again.
struct Sleeper : DaemonTest {
  explicit Sleeper(const Limits& limits = with_slabs()) : DaemonTest(limits) {
    before = device_bytes_of_the_driver();
    large = make_many(4, 2 * chunk);
    small = make_many(3 * chunk / kSmall / 2, kSmall);
    for (size_t i = 0; i + 1 < small.size(); i += 3) {
      core.free(small[i].address);
      small.erase(small.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  uint64_t sleep(int expected = OOC_OK) {
    uint64_t held = 0;
    EXPECT_EQ(core.sleep(&held), expected);
    EXPECT_EQ(core.audit(), OOC_OK);
    return held;
  }
  uint64_t wake() {
    uint64_t back = 0;
    EXPECT_EQ(core.wake(&back), OOC_OK);
    EXPECT_EQ(core.audit(), OOC_OK);
    return back;
  }
  void expect_all() {
    expect_intact(large);
    expect_intact(small);
  }

  uint64_t before = 0;
  std::vector<Variable> large, small;
};

}  // namespace

void nothing_is_on_the_device(bool asynchronous) {
  Sleeper t(with_slabs(asynchronous));
  const std::vector<uint32_t> there{t.resident(t.large[0]), t.resident(t.large[3])};
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(t.sleep(), uint64_t{0});
    EXPECT_EQ(t.stats().device_bytes, uint64_t{0});
    EXPECT_EQ(device_bytes_of_the_driver(), t.before);
    EXPECT_EQ(t.sleep(), uint64_t{0});  // it does already
    const uint64_t back = t.wake();
    EXPECT_TRUE(back >= 8 * t.chunk && back <= 11 * t.chunk);
    EXPECT_EQ(t.resident(t.large[0]), there[0]);
    EXPECT_EQ(t.resident(t.large[3]), there[1]);
    EXPECT_EQ(t.wake(), uint64_t{0});
    const uint64_t copied = t.stats().swap_in_bytes;
    t.expect_all();
    EXPECT_EQ(t.stats().swap_in_bytes, copied);
  }
}

TEST(nothing_is_on_the_device_of_a_core_that_sleeps) { nothing_is_on_the_device(false); }
TEST(nothing_is_on_the_device_of_a_core_that_sleeps_on_streams) { nothing_is_on_the_device(true); }

TEST(a_function_wakes_the_core) {
  Sleeper t;
  t.sleep();
  EXPECT_EQ(t.check(t.small[0]), OOC_OK);
  EXPECT_TRUE(t.stats().device_bytes > 0);
  EXPECT_EQ(t.resident(t.large[0]), uint32_t{0});  // what it does not use comes on demand
  t.expect_all();
}

TEST(an_allocation_wakes_the_core) {
  Sleeper t;
  t.let_go();
  t.sleep();
  void* address = t.must_malloc(kSmall);
  t.expect_all();
  t.core.free(address);
}

TEST(what_is_freed_while_the_core_sleeps_is_gone) {
  Sleeper t;
  t.sleep();
  t.free(t.small);
  t.core.free(t.large[0].address);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.large.erase(t.large.begin());
  t.small.clear();
  t.wake();
  t.expect_all();
  EXPECT_EQ(t.stats().slab_used_bytes, uint64_t{0});
  t.core.release_cached();
  EXPECT_EQ(t.stats().slab_bytes, uint64_t{0});
}

TEST(what_a_user_reaches_stays) {
  Sleeper t;
  uint64_t large = 0, small = 0;
  ASSERT_EQ(t.core.pin(t.large[1].address, OOC_READ, &large), OOC_OK);
  ASSERT_EQ(t.core.pin(t.small[5].address, OOC_READ, &small), OOC_OK);
  EXPECT_EQ(t.sleep(), 3 * t.chunk);
  EXPECT_TRUE(t.holds(t.large[1]) && t.holds(t.small[5]));
  t.wake();
  t.expect_all();
  ASSERT_EQ(t.core.unpin(large, OOC_READ), OOC_OK);
  ASSERT_EQ(t.core.unpin(small, OOC_READ), OOC_OK);
  EXPECT_EQ(t.sleep(), uint64_t{0});
  uint64_t token = 0;
  ASSERT_EQ(t.core.pin(t.small[7].address, OOC_READ, &token), OOC_OK);  // wakes it
  EXPECT_TRUE(t.holds(t.small[7]));
  t.core.free(t.small[7].address);  // its pin ends, for the next small variable there
  ASSERT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  t.small.erase(t.small.begin() + 7);
  t.expect_all();
  for (const Variable& variable : t.small) ASSERT_EQ(t.core.pin(variable.address, OOC_READ, &token), OOC_OK);
  t.free(t.small);  // with their pins
  t.small = {t.make(kSmall, 77)};
  t.let_go();
  EXPECT_EQ(t.sleep(), uint64_t{0});
  t.expect_all();
}

TEST(without_room_on_the_host_everything_is_as_it_was) {
  Limits limits = with_slabs(false, 3);
  limits.tiers = 0;  // or the disk takes it
  Sleeper t(limits);
  const uint64_t bytes = t.stats().device_bytes;
  t.sleep(OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), "cannot leave the device") && contains(last_error(), limits.disk != nullptr ? "OOC_DISK_BUDGET" : "OOC_HOST_BUDGET"));
  EXPECT_EQ(t.stats().device_bytes, bytes);
  t.expect_all();
}

TEST(functions_of_other_threads_are_waited_for) {
  Sleeper t;
  std::atomic<int> stage{0};
  std::thread other([&] {
    t.core.bind_thread();
    EXPECT_EQ(t.begin("long", {reads(t.large[0])}), OOC_OK);
    stage = 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(t.holds(t.large[0]));
    stage = 2;
    EXPECT_EQ(t.core.function_end(false), OOC_OK);
  });
  while (stage == 0) std::this_thread::yield();
  EXPECT_EQ(t.sleep(), uint64_t{0});
  EXPECT_EQ(stage.load(), 2);
  other.join();
  ASSERT_EQ(t.begin("short", {}), OOC_OK);
  t.sleep(OOC_INVALID);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  t.expect_all();
}

TEST(threads_that_wake_it_at_once_find_what_they_use) {
  Sleeper t;
  for (int round = 0; round < 20; ++round) {
    t.let_go();
    t.sleep();
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 4; ++i)
      threads.emplace_back([&, i] {
        t.core.bind_thread();
        if (i == 3) t.wake();
        EXPECT_EQ(t.check(i % 2 == 0 ? t.small[i] : t.large[i]), OOC_OK);
        t.let_go();
      });
    for (std::thread& thread : threads) thread.join();
  }
  t.expect_all();
}

TEST(plans_move_nothing_while_the_core_sleeps) {
  Sleeper t;
  const auto iterate = [&t] {
    for (const Variable& variable : t.large) EXPECT_EQ(t.check(variable), OOC_OK);
    return t.boundary().fingerprint;
  };
  t.let_go();
  t.boundary();
  iterate();
  ASSERT_TRUE(t.install(iterate(), {{0, 0, 2, 0}}, {{0, 0, 2, 3, 1, 0}}));
  iterate();
  iterate();  // its last swap-in is due
  t.sleep();
  t.settle();
  EXPECT_EQ(t.stats().device_bytes, uint64_t{0});
  t.wake();
  t.settle();
  iterate();
}

TEST(a_core_that_sleeps_ends) {
  Sleeper t;
  t.sleep();
}

TEST(memory_of_a_core_that_slept_becomes_plain) {
  Sleeper t;
  if (!t.core.device().host_accessible()) return;
  t.sleep();
  ASSERT_EQ(t.core.detach(), OOC_OK);
  const auto same = [](const Variable& v) {
    const auto* bytes = static_cast<const unsigned char*>(v.address);
    return std::vector<unsigned char>(bytes, bytes + v.bytes) == pattern(v.bytes, v.seed);
  };
  for (const std::vector<Variable>& variables : {t.large, t.small})
    for (const Variable& variable : variables) EXPECT_TRUE(same(variable));
  t.free(t.small);
}

namespace {

// Says when who waits for host memory may go on: for `first` once `second` waits too, for `second` once `first` moves.
struct Relief : Scheduler {
  void function_started(uint32_t, uint64_t) override {}
  bool iteration_ended(const std::shared_ptr<Trace>&) override { return false; }
  bool relief_coming() const override { return false; }
  uint64_t next_use(const Region*) const override { return kUnknown; }
  bool waits_for_last_function() const override { return false; }
  bool host_relief_coming(const Region* waiting) const override {
    if (waiting == first) first_waits = true;
    if (waiting == second) second_waits = true;
    return waiting == first ? !second_waits : waiting == second && first->moving == 0;
  }
  bool copies_outlast(const Region*) const override { return true; }
  Counts counts() const override { return {}; }

  const Region *first = nullptr, *second = nullptr;
  mutable std::atomic<bool> first_waits{false}, second_waits{false};
};

}  // namespace

// Its copy out begins when that of everything else is under way already.
TEST(a_core_waits_for_who_waited_for_host_memory_when_it_fell_asleep) {
  const std::string folder = std::filesystem::temp_directory_path();
  Limits limits{12};
  limits.disk = folder.c_str();
  limits.tiers = 4;
  CoreTest t(limits);
  const std::vector<Variable> away = t.make_many(2, 2 * t.chunk);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);  // host memory is full
  const std::vector<Variable> here = t.make_many(2, 2 * t.chunk);
  t.let_go();
  Relief relief;
  Region* region = nullptr;
  {
    const Lock lock(t.core.mutex());
    relief.first = region = t.region(here[1]);
    relief.second = t.region(here[0]);
    t.core.set_scheduler(&relief);
  }
  std::thread mover([&] {
    t.core.bind_thread();
    Lock lock(t.core.mutex());
    std::vector<Transfer> transfers;
    EXPECT_TRUE(t.core.move_out(lock, {region, 0, region->count}, transfers, false));
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    lock.lock();
    for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.settle(lock, transfer));
  });
  while (!relief.first_waits) std::this_thread::yield();
  uint64_t held = 0;
  EXPECT_EQ(t.core.sleep(&held), OOC_OK);
  EXPECT_EQ(held, uint64_t{0});
  mover.join();
  {
    const Lock lock(t.core.mutex());
    t.core.set_scheduler(nullptr);
  }
  t.expect_intact(away);
  t.expect_intact(here);
}
