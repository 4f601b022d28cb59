// Demand mode: more live memory than budget, with no plan. Contents survive, as few bytes as possible move.
#include <random>

#include "core_fixture.h"

using namespace ooc;
using namespace ooc::testing;

TEST(contents_survive_leaving_and_coming_back) {
  CoreTest t({4});
  const std::vector<Variable> variables = t.make_many(6, 2 * t.chunk - 100);  // three times the budget
  for (int round = 0; round < 3; ++round) t.expect_intact(variables);
  const ooc_stats stats = t.stats();
  EXPECT_TRUE(stats.swap_out_bytes > 0 && stats.demand_swap_in_count > 0);
  EXPECT_EQ(stats.swap_in_bytes, stats.demand_swap_in_bytes);
  EXPECT_TRUE(stats.device_peak_bytes <= 4 * t.chunk);
  EXPECT_EQ(stats.live_peak_bytes, 6 * (2 * t.chunk - 100));
}

TEST(an_address_is_for_life) {
  CoreTest t({2});
  const std::vector<Variable> variables = t.make_many(3, 2 * t.chunk);
  for (size_t i = 0; i < variables.size(); ++i)
    for (size_t j = i + 1; j < variables.size(); ++j) EXPECT_TRUE(variables[i].address != variables[j].address);
  t.expect_intact(variables);  // at the addresses they were given
}

TEST(only_as_many_chunks_leave_as_are_needed) {
  CoreTest t({8});
  const Variable large = t.make(6 * t.chunk, 1);
  const Variable other = t.make(3 * t.chunk, 2);  // one chunk is missing
  t.let_go();
  EXPECT_EQ(t.resident(large), 5u);
  EXPECT_EQ(t.resident(other), 3u);
  ooc_stats stats = t.stats();
  EXPECT_EQ(stats.swap_out_bytes, t.chunk);
  EXPECT_EQ(stats.swap_out_count, uint64_t{1});
  EXPECT_EQ(t.check(large), OOC_OK);  // only what left comes back
  stats = t.stats();
  EXPECT_EQ(stats.swap_in_bytes, t.chunk);
  EXPECT_EQ(t.check(other), OOC_OK);
}

TEST(the_oldest_leaves_first) {
  CoreTest t({6});
  const std::vector<Variable> v = t.make_many(3, 2 * t.chunk);
  EXPECT_EQ(t.check(v[0]), OOC_OK);  // now v[1] is the oldest
  const Variable fresh = t.make(2 * t.chunk, 9);
  EXPECT_EQ(t.resident(v[0]), 2u);
  EXPECT_EQ(t.resident(v[1]), 0u);
  EXPECT_EQ(t.resident(v[2]), 2u);
  EXPECT_EQ(t.resident(fresh), 2u);
}

TEST(a_clean_variable_is_dropped_without_a_copy) {
  CoreTest t({2});
  const std::vector<Variable> v = t.make_many(2, 2 * t.chunk);
  t.expect_intact(v);  // v[0] came back and is clean since; v[1] too
  const ooc_stats before = t.stats();
  for (int round = 0; round < 3; ++round) t.expect_intact(v);
  const ooc_stats after = t.stats();
  EXPECT_EQ(after.swap_out_bytes, before.swap_out_bytes);
  EXPECT_EQ(after.clean_drop_count - before.clean_drop_count, uint64_t{6});
  EXPECT_EQ(after.clean_drop_bytes - before.clean_drop_bytes, 6 * 2 * t.chunk);
}

TEST(a_write_makes_dirty) {
  CoreTest t({2});
  std::vector<Variable> v = t.make_many(2, 2 * t.chunk);
  t.expect_intact(v);
  EXPECT_EQ(t.update(v[1], 77), OOC_OK);  // on the device and clean so far
  const ooc_stats before = t.stats();
  EXPECT_EQ(t.check(v[0]), OOC_OK);
  const ooc_stats after = t.stats();
  EXPECT_EQ(after.swap_out_bytes - before.swap_out_bytes, 2 * t.chunk);
  t.expect_intact(v);  // with the new contents
}

TEST(a_write_during_the_copy_out_wins) {
  CoreTest t({4});
  Variable v = t.make(2 * t.chunk, 1);
  t.let_go();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  Region* region = t.region(v);
  ASSERT_TRUE(t.core.transitions().start_out(lock, {region, 0, 2}, transfers));
  lock.unlock();
  t.make_copies();
  EXPECT_EQ(t.update(v, 2), OOC_OK);  // does not wait: the bytes are still on the device
  t.let_go();
  lock.lock();
  for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.transitions().settle(lock, transfer));
  EXPECT_EQ(region->resident, 2u);
  EXPECT_EQ(region->host_valid, 0u);
  lock.unlock();
  EXPECT_EQ(t.stats().cancelled_swap_out_count, uint64_t{transfers.size()});
  EXPECT_EQ(t.check(v), OOC_OK);
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(a_read_during_the_copy_out_keeps_it_there_and_clean) {
  CoreTest t({4});
  const Variable v = t.make(2 * t.chunk, 1);
  t.let_go();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  Region* region = t.region(v);
  ASSERT_TRUE(t.core.transitions().start_out(lock, {region, 0, 2}, transfers));
  lock.unlock();
  EXPECT_EQ(t.check(v), OOC_OK);  // its pin lasts
  lock.lock();
  for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.transitions().settle(lock, transfer));
  EXPECT_EQ(region->resident, 2u);
  EXPECT_EQ(region->host_valid, 2u);
  lock.unlock();
  const ooc_stats before = t.stats();
  t.let_go();
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.stats().swap_out_bytes, before.swap_out_bytes);  // dropped, not copied again
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(operands_may_repeat_and_point_anywhere_into_a_variable) {
  CoreTest t({4});
  Variable v = t.make(2 * t.chunk, 1);
  const Variable other = t.make(4 * t.chunk, 2);
  t.let_go();
  char* start = static_cast<char*>(v.address);
  int local = 0;
  const std::vector<ooc_operand> operands = {
      {start + t.chunk + 8, OOC_READ, 0, 0},  // a view into the second chunk
      {start, OOC_READ, 0, 0},
      {start + 2 * t.chunk - 1, OOC_WRITE, 0, 0},
      {&local, OOC_READ | OOC_WRITE, 0, 0},  // not of the core
      {nullptr, OOC_READ, 0, 0},
  };
  EXPECT_EQ(t.call("views", operands, [&] {
    EXPECT_TRUE(t.holds(v));
    v.seed = 5;
    t.put(v);
  }), OOC_OK);
  EXPECT_EQ(t.check(other), OOC_OK);  // pushes v out: dirty, as one of its operands wrote it
  EXPECT_EQ(t.check(v), OOC_OK);
  EXPECT_EQ(t.stats().pinned_bytes, 2 * t.chunk);  // pinned once, not once an operand
}

TEST(a_variable_freed_while_it_moves) {
  CoreTest t({4});
  for (const Direction direction : {Direction::kOut, Direction::kIn}) {
    const Variable v = t.make(2 * t.chunk, 1);
    t.let_go();
    if (direction == Direction::kIn) ASSERT_EQ(t.core.evict_all(), OOC_OK);
    std::vector<Transfer> transfers;
    Lock lock(t.core.mutex());
    Region* region = t.region(v);
    if (direction == Direction::kOut) {
      ASSERT_TRUE(t.core.transitions().start_out(lock, {region, 0, 2}, transfers));
    } else {
      Chunk chunks[2];
      ASSERT_TRUE(t.core.idle_chunks().take(2, chunks));
      ASSERT_TRUE(t.core.transitions().start_in(lock, {region, 0, 2}, chunks, transfers));
    }
    lock.unlock();
    t.core.free(v.address);
    EXPECT_EQ(t.core.audit(), OOC_OK);  // in between, too
    const Variable next = t.make(2 * t.chunk, 3);  // must not get the address whose bytes still move
    EXPECT_TRUE(next.address != v.address);
    lock.lock();
    for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.transitions().settle(lock, transfer));
    lock.unlock();
    EXPECT_EQ(t.check(next), OOC_OK);
    t.core.free(next.address);
    EXPECT_EQ(t.stats().live_bytes, uint64_t{0});
    EXPECT_EQ(t.stats().host_used_bytes, uint64_t{0});
    EXPECT_EQ(t.core.audit(), OOC_OK);
  }
}

TEST(a_freed_region_is_reused_without_driver_calls) {
  CoreTest t({7});
  const Variable first = t.make(3 * t.chunk, 1);
  t.core.free(first.address);
  const ooc_stats before = t.stats();
  EXPECT_EQ(before.cached_bytes, 3 * t.chunk);
  const Variable second = t.make(3 * t.chunk - 1, 2);
  const ooc_stats after = t.stats();
  EXPECT_EQ(second.address, first.address);
  EXPECT_EQ(after.cache_hits - before.cache_hits, uint64_t{1});
  EXPECT_EQ(after.driver_calls_map, before.driver_calls_map);
  EXPECT_EQ(after.driver_calls_set_access, before.driver_calls_set_access);
  t.core.free(second.address);
  t.make(7 * t.chunk, 3);  // takes the cached chunks
  EXPECT_EQ(t.stats().driver_calls_create, uint64_t{7});
  EXPECT_EQ(t.stats().swap_out_bytes, uint64_t{0});
}

TEST(a_freed_region_that_is_too_small_keeps_its_mapping) {
  CoreTest t({9});
  const Variable first = t.make(2 * t.chunk, 1), freed = t.make(3 * t.chunk, 2);
  t.core.free(freed.address);
  const ooc_stats before = t.stats();
  const Variable larger = t.make(5 * t.chunk, 3);
  const ooc_stats after = t.stats();
  EXPECT_EQ(larger.address, freed.address);
  EXPECT_EQ(after.driver_calls_map - before.driver_calls_map, uint64_t{2});
  EXPECT_EQ(after.unmapped_bytes, before.unmapped_bytes);
  EXPECT_EQ(after.cache_hits, before.cache_hits);
  t.expect_intact({first, larger});
  EXPECT_EQ(t.core.audit(), OOC_OK);
  // What first has to leave for is made whole.
  t.core.free(larger.address);
  const Variable largest = t.make(8 * t.chunk, 4);
  t.expect_intact({largest, first});
}

TEST(freed_regions_are_reused_in_other_sizes_without_driver_calls) {
  CoreTest t({8});
  const std::vector<Variable> freed = t.make_many(2, 3 * t.chunk);
  const Variable kept = t.make(2 * t.chunk, 9);
  t.free(freed);
  const ooc_stats before = t.stats();
  const Variable large = t.make(4 * t.chunk, 3), small = t.make(t.chunk, 4);
  ooc_stats after = t.stats();
  EXPECT_EQ(after.driver_calls_map, before.driver_calls_map);
  EXPECT_EQ(after.driver_calls_unmap, before.driver_calls_unmap);
  EXPECT_EQ(after.cache_hits, before.cache_hits + 2);
  t.expect_intact({large, small, kept});
  t.core.free(large.address);
  t.core.free(small.address);
  const Variable other = t.make(5 * t.chunk, 5), last = t.make(t.chunk, 6);
  EXPECT_EQ(t.stats().driver_calls_map, before.driver_calls_map);
  t.expect_intact({other, last, kept});
  EXPECT_EQ(t.stats().swap_out_bytes, uint64_t{0});
}

TEST(a_random_program_computes_on_the_right_bytes) {
  CoreTest t({10, 64, 0, 1});
  std::vector<Variable> live;
  std::mt19937_64 random(5);
  uint64_t live_chunks = 0;
  for (int step = 0; step < 1500; ++step) {
    const uint64_t choice = random() % 100;
    if (live.empty() || (choice < 25 && live_chunks < 40)) {
      const uint64_t chunks = 1 + random() % 4;
      live.push_back(t.make(chunks * t.chunk - random() % t.chunk, static_cast<unsigned>(step)));
      live_chunks += chunks;
      continue;
    }
    std::swap(live[random() % live.size()], live.back());
    Variable& chosen = live.back();
    if (choice < 40) {
      t.core.free(chosen.address);
      live_chunks -= (chosen.bytes + t.chunk - 1) / t.chunk;
      live.pop_back();
    } else if (choice < 60) {
      ASSERT_EQ(t.update(chosen, static_cast<unsigned>(step)), OOC_OK);
    } else if (choice < 98) {
      const Variable& second = live[random() % live.size()];
      ASSERT_EQ(t.call("both", {reads(chosen), reads(second)}, [&] {
        EXPECT_TRUE(t.holds(chosen) && t.holds(second));
      }), OOC_OK);
    } else if (choice == 98) {
      ASSERT_EQ(t.core.evict_all(), OOC_OK);
    } else {
      t.core.release_cached();
    }
    if (step % 100 == 0) ASSERT_EQ(t.core.audit(), OOC_OK);
  }
  t.expect_intact(live);
  const ooc_stats stats = t.stats();
  EXPECT_TRUE(stats.device_peak_bytes <= stats.budget_bytes);
  EXPECT_TRUE(stats.swap_out_bytes > 100 * t.chunk);
  t.free(live);
  EXPECT_EQ(t.stats().live_bytes, uint64_t{0});
}
