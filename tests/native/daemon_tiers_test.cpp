// Three tiers, ticked by hand: what a plan moves between host memory and the disk below it, and when it does not.
#include <filesystem>
#include <thread>

#include "daemon_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

const std::string folder = std::filesystem::temp_directory_path();

Limits three_tiers(uint64_t budget_chunks, uint64_t host_chunks = 16) {
  Limits limits{budget_chunks, 64};
  limits.disk = folder.c_str();
  limits.tiers = host_chunks;
  return limits;
}

// An iteration reads four variables of two chunks, one function each, on a device for two of them, or for all, so that
// only a plan moves any. Host memory has room for all, so that nothing goes down without a plan.
struct Loop : DaemonTest {
  explicit Loop(uint64_t budget_chunks = 4, uint64_t host_chunks = 16) : DaemonTest(three_tiers(budget_chunks, host_chunks)) {
    v = make_many(4, 2 * chunk);
    boundary();
  }
  void use(size_t index) { EXPECT_EQ(check(v[index], ("f" + std::to_string(index)).c_str()), OOC_OK); }
  uint64_t steady() {
    ooc_iteration ended{};
    for (int i = 0; i < 3; ++i) {
      for (size_t index = 0; index < v.size(); ++index) use(index);
      ended = boundary();
    }
    return ended.fingerprint;
  }
  bool tick_down() {
    Lock lock(core.mutex());
    return daemon.tick_down(lock);
  }
  bool tick_up() {
    Lock lock(core.mutex());
    return daemon.tick_up(lock);
  }
  // Everything that plans let happen now, what is left of iterations before included.
  void catch_up() {
    while (settle() > 0 || tick_down() || tick_up()) {}
  }
  bool is_here(size_t index) {
    uint8_t chunks[2];
    EXPECT_EQ(core.residency(v[index].address, chunks, 2), uint32_t{2});
    EXPECT_EQ(chunks[0], chunks[1]);
    return chunks[0] != 0;
  }
  uint64_t host_chunks() { return raw().host_used_bytes / chunk; }
  uint64_t written_chunks() { return raw().disk_written_bytes / chunk; }
  uint64_t read_chunks() { return raw().disk_read_bytes / chunk; }
  ooc_stats raw() {
    ooc_stats result;
    core.read_stats(&result);
    return result;
  }

  std::vector<Variable> v;
};

}  // namespace

TEST(a_block_goes_down_and_comes_up_after_the_functions_that_a_plan_names) {
  Loop t;
  const uint64_t fingerprint = t.steady();
  EXPECT_EQ(t.written_chunks(), uint64_t{0});
  EXPECT_TRUE(t.install(fingerprint, {}, {}, {}, {{0, 0, 0, 1}}, {{0, 0, 0, 2}}));
  t.steady();
  t.catch_up();
  const uint64_t before = t.host_chunks(), written = t.written_chunks(), read = t.read_chunks();
  for (const size_t index : {0, 1}) {
    t.use(index);
    EXPECT_TRUE(!t.tick_down());
  }
  t.use(2);
  EXPECT_TRUE(!t.tick_up());
  EXPECT_TRUE(t.tick_down());
  EXPECT_TRUE(!t.tick_down());
  EXPECT_EQ(t.host_chunks(), before - 2);
  EXPECT_EQ(t.written_chunks(), written + 2);
  t.use(3);
  EXPECT_TRUE(t.tick_up());
  EXPECT_TRUE(!t.tick_up());
  EXPECT_EQ(t.host_chunks(), before);
  EXPECT_EQ(t.read_chunks(), read + 2);
  t.boundary();
  // The disk still has what was not written since: it goes down without being written again.
  for (const size_t index : {0, 1, 2}) t.use(index);
  EXPECT_TRUE(t.tick_down());
  EXPECT_EQ(t.host_chunks(), before - 2);
  EXPECT_EQ(t.written_chunks(), written + 2);
  t.use(3);
  t.boundary();
  EXPECT_EQ(t.check(t.v[0]), OOC_OK);  // from the disk, on demand
}

TEST(a_block_that_changed_is_written_again) {
  Loop t;
  const auto iterate = [&t] {
    t.v[0].seed += 1;
    EXPECT_EQ(t.call("write", {{t.v[0].address, OOC_WRITE, 0, 0}}, [&] { t.put(t.v[0]); }), OOC_OK);
    for (const size_t index : {1, 2, 3}) t.use(index);
    EXPECT_TRUE(t.tick_down() || t.written_chunks() == 0);
    return t.boundary().fingerprint;
  };
  iterate();
  EXPECT_TRUE(t.install(iterate(), {}, {}, {}, {{0, 0, 0, 2}}, {}));
  iterate();  // the plan is known from its end on
  for (uint64_t round = 1; round <= 3; ++round) {
    iterate();
    EXPECT_EQ(t.written_chunks(), 2 * round);
  }
  EXPECT_EQ(t.check(t.v[0]), OOC_OK);
}

TEST(a_move_down_waits_for_the_copy_out) {
  Loop t(8);
  const auto write = [&t] {
    t.v[0].seed += 1;
    EXPECT_EQ(t.call("write", {{t.v[0].address, OOC_WRITE, 0, 0}}, [&] { t.put(t.v[0]); }), OOC_OK);
    t.use(1);
  };
  for (int i = 0; i < 2; ++i) {
    write();
    t.boundary();
  }
  write();
  EXPECT_TRUE(t.install(t.boundary().fingerprint, {{0, 0, 2, 0}}, {}, {}, {{0, 0, 0, 0}}, {}));
  write();
  t.boundary();
  t.catch_up();
  write();
  EXPECT_TRUE(!t.tick_down());
  EXPECT_TRUE(t.tick_out());
  EXPECT_TRUE(!t.tick_down());
  while (t.tick_out()) {}
  const uint64_t written = t.written_chunks();
  EXPECT_TRUE(t.tick_down());
  EXPECT_EQ(t.written_chunks(), written + 2);
  EXPECT_EQ(t.check(t.v[0]), OOC_OK);
}

TEST(a_move_down_that_is_late_is_left_out) {
  Loop t;
  EXPECT_TRUE(t.install(t.steady(), {}, {}, {}, {{0, 0, 0, 0}}, {{0, 0, 0, 1}}));
  t.steady();
  t.catch_up();
  const uint64_t written = t.written_chunks();
  for (const size_t index : {0, 1, 2}) t.use(index);  // by now the block should be on its way up
  EXPECT_TRUE(t.tick_down());
  EXPECT_EQ(t.written_chunks(), written);
  t.use(3);
}

TEST(a_swap_in_waits_for_its_block_to_come_up) {
  Loop t(8);
  EXPECT_TRUE(t.install(t.steady(), {{0, 0, 2, 0}}, {{0, 0, 2, 1, 1, 3}}, {}, {{0, 0, 0, 0}}, {{0, 0, 0, 1}}));
  t.steady();
  t.catch_up();
  for (const size_t index : {0, 1}) t.use(index);
  while (t.tick_out()) {}
  EXPECT_TRUE(t.tick_down());
  t.use(2);
  EXPECT_TRUE(!t.tick_in());
  EXPECT_TRUE(t.tick_up());
  EXPECT_TRUE(t.tick_in());
  t.use(3);
}

TEST(under_an_exclusive_plan_the_host_keeps_no_copy_of_what_came_in) {
  for (const bool exclusive : {false, true}) {
    Loop t(8);
    EXPECT_TRUE(t.install(t.steady(), {{0, 0, 2, 0}}, {{0, 0, 2, 1, 1, 3}}, {}, {}, {}, exclusive));
    t.steady();
    t.catch_up();
    t.use(0);
    t.use(1);
    t.settle();
    const uint64_t before = t.host_chunks();
    t.use(2);
    t.settle();
    EXPECT_EQ(t.host_chunks(), exclusive ? before - 2 : before);
    t.use(3);
    t.boundary();
    EXPECT_EQ(t.check(t.v[0]), OOC_OK);
  }
}

TEST(a_block_whose_copies_are_worth_nothing_any_more_serves_what_comes_up) {
  for (const bool in_the_middle : {false, true}) {
    Loop t(8, 4);
    const auto write = [&t] {
      t.v[1].seed += 1;
      EXPECT_EQ(t.call("write", {{t.v[1].address, OOC_WRITE, 0, 0}}, [&] { t.put(t.v[1]); }), OOC_OK);
    };
    const auto begin = [&t] {
      for (const size_t index : {0, 1}) t.use(index);
    };
    const auto end = [&] {
      write();
      t.settle();
      t.use(3);
      t.settle();
      begin();
      return t.boundary().fingerprint;
    };
    Region* regions[3];
    for (const size_t index : {0, 1, 2}) {
      t.use(index);
      regions[index] = t.region(t.v[index]);
    }
    t.let_go();
    ASSERT_EQ(t.core.evict_all(), OOC_OK);
    {
      Lock lock(t.core.mutex());
      ASSERT_TRUE(t.core.is_below(regions[2]) || t.core.send_down(lock, regions[2]));
    }
    t.boundary();
    begin();
    end();
    begin();
    EXPECT_TRUE(t.install(end(), {{0, 0, 2, 1}, {1, 0, 2, 2}}, {{0, 0, 2, 2, 1, 4}, {1, 0, 2, 3, 2, 5}}));
    for (int i = 0; i < 2; ++i) {
      begin();
      end();
    }
    if (in_the_middle) begin();
    const auto has_block = [&](size_t index) { return regions[index]->host != nullptr; };
    EXPECT_TRUE(has_block(0) && has_block(1) && !has_block(2));
    {
      Lock lock(t.core.mutex());
      EXPECT_TRUE(t.core.bring_up(lock, regions[2], false));
    }
    EXPECT_TRUE(has_block(0) && !has_block(1) && has_block(2));  // 0 leaves as it is, 1 is written before
    if (!in_the_middle) begin();
    end();
    t.use(2);
  }
}

TEST(what_a_plan_brings_up_does_not_overtake_who_waits) {
  DaemonTest t(three_tiers(16, 6));
  const Variable held = t.make(4 * t.chunk, 1), wanted = t.make(4 * t.chunk, 2), planned = t.make(2 * t.chunk, 3);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  Lock lock(t.core.mutex());
  for (const Variable& variable : {wanted, planned})
    ASSERT_TRUE(t.core.is_below(t.region(variable)) || t.core.send_down(lock, t.region(variable)));
  ASSERT_TRUE(t.core.bring_up(lock, t.region(held), true));
  std::vector<Transfer> transfers;
  ASSERT_TRUE(t.core.move_in(lock, {t.region(held), 0, 1}, transfers));
  bool began = false, overtook = false;  // guarded by the lock, which who waits gives up only to wait
  std::thread waits([&] {
    Lock own(t.core.mutex());
    began = true;
    EXPECT_TRUE(t.core.bring_up(own, t.region(wanted), true));
  });
  const double until = now_seconds() + 0.1;  // it asks again and again, as the daemon does
  while (!overtook && now_seconds() < until) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
    overtook = began && t.core.bring_up(lock, t.region(planned), false);
  }
  EXPECT_TRUE(began && !overtook);
  for (const Transfer& transfer : transfers) t.core.settle(lock, transfer);
  lock.unlock();
  waits.join();
  lock.lock();
  EXPECT_TRUE(!t.core.is_below(t.region(wanted)));
  EXPECT_TRUE(t.core.bring_up(lock, t.region(planned), false));
}

// Nobody waits for host memory that the copies hold which they themselves are to settle.

TEST(a_function_finds_its_operands_below_where_host_memory_has_room_for_one_of_them) {
  Loop t(4, 3);
  EXPECT_EQ(t.call("both", {reads(t.v[0]), reads(t.v[1])}, [&] { EXPECT_TRUE(t.holds(t.v[0]) && t.holds(t.v[1])); }), OOC_OK);
  EXPECT_EQ(t.call("others", {reads(t.v[2]), reads(t.v[3])}, [&] { EXPECT_TRUE(t.holds(t.v[2]) && t.holds(t.v[3])); }), OOC_OK);
}

TEST(variables_leave_together_where_host_memory_has_room_for_one_of_them) {
  Loop t(8, 3);
  for (size_t index = 0; index < t.v.size(); ++index) t.use(index);
  t.let_go();
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  for (size_t index = 0; index < t.v.size(); ++index) EXPECT_TRUE(!t.is_here(index));
  t.expect_intact(t.v);
}

TEST(a_plan_moves_variables_out_and_in_where_host_memory_has_room_for_one_of_them) {
  Loop t(8, 3);
  EXPECT_TRUE(t.install(t.steady(), {{0, 0, 2, 0}, {3, 0, 2, 0}}, {{3, 0, 2, 1, 2, 3}, {0, 0, 2, 1, 2, 3}}));
  t.steady();
  t.catch_up();
  for (const size_t index : {0, 1}) t.use(index);
  while (t.tick_out()) {}
  for (const size_t index : {0, 3}) EXPECT_TRUE(!t.is_here(index));
  t.use(2);
  while (t.tick_in()) {}
  for (const size_t index : {0, 3}) EXPECT_TRUE(t.is_here(index));
}

TEST(a_block_that_a_copy_uses_does_not_go_down) {
  Loop t(8);
  t.use(0);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  Lock lock(t.core.mutex());
  Region* region = t.region(t.v[0]);
  std::vector<Transfer> transfers;
  ASSERT_TRUE(t.core.move_in(lock, {region, 0, 1}, transfers));
  EXPECT_TRUE(!t.core.send_down(lock, region));
  EXPECT_TRUE(!t.core.is_below(region));
  for (const Transfer& transfer : transfers) t.core.settle(lock, transfer);
  EXPECT_TRUE(t.core.send_down(lock, region));
  EXPECT_TRUE(t.core.is_below(region));
  lock.unlock();
  EXPECT_EQ(t.check(t.v[0]), OOC_OK);
}

TEST(blocks_of_a_variable_that_is_freed_on_its_way_down_serve_nobody_before_the_disk_is_done) {
  DaemonTest t(three_tiers(64, 64));
  int freed_on_the_way = 0;
  for (unsigned round = 1; round <= 20; ++round) {
    const Variable variable = t.make(32 * t.chunk, round);
    t.let_go();
    ASSERT_EQ(t.core.evict_all(), OOC_OK);
    Lock lock(t.core.mutex());
    Region* region = t.region(variable);
    std::thread down([&] {
      Lock own(t.core.mutex());
      t.core.send_down(own, region);
    });
    while (region->shift == nullptr && !t.core.is_below(region)) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    const bool on_the_way = region->shift != nullptr;
    lock.unlock();
    t.core.free(variable.address);
    down.join();
    freed_on_the_way += on_the_way;  // at times the disk is done before the variable is freed
    ASSERT_EQ(t.core.audit(), OOC_OK);
    EXPECT_EQ(t.stats().host_used_bytes, uint64_t{0});
    EXPECT_EQ(t.stats().disk_used_bytes, uint64_t{0});
  }
  EXPECT_TRUE(freed_on_the_way > 0);
}

// The one used least recently is too large for host memory: it stays, and another one leaves.
TEST(what_host_memory_cannot_hold_is_no_victim) {
  DaemonTest t(three_tiers(8, 2));
  const Variable large = t.make(4 * t.chunk, 1);
  const std::vector<Variable> others = t.make_many(3, 2 * t.chunk);
  EXPECT_EQ(t.region(large)->resident, 4u);
  for (const Variable& other : others) EXPECT_EQ(t.check(other), OOC_OK);
  EXPECT_EQ(t.check(large), OOC_OK);
}

TEST(a_block_that_became_mappable_may_go_down_when_its_function_has_ended) {
  DaemonTest t(three_tiers(4));
  const Variable used = t.make(2 * t.chunk, 1);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  const ooc_operand operand = reads(used);
  ASSERT_EQ(t.core.function_begin_host(t.id("on the host"), &operand, 1, nullptr), OOC_OK);
  EXPECT_EQ(t.region(used)->lifted, 0u);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_EQ(t.check(used), OOC_OK);
}
