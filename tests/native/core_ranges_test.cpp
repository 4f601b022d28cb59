// Functions that use ranges of variables: what is pinned, moved and written is the range, and the rest of the variable
// is left alone. Variables may be larger than the budget.
#include <thread>

#include "ranges_fixture.h"

using namespace ooc;
using namespace ooc::testing;

TEST(a_range_brings_in_and_pins_only_the_chunks_it_touches) {
  RangesTest t({8});
  Array a = t.make_absent(6 * t.chunk);
  t.write_all(a, 2 * t.chunk, 1);
  t.swap_out();
  EXPECT_EQ(t.there(a), std::string("000000"));
  const ooc_stats before = t.stats();
  // The last byte of one, the first of the next.
  ASSERT_EQ(t.begin("part", {a.range(2 * t.chunk - 1, 2, OOC_READ)}), OOC_OK);
  EXPECT_EQ(t.there(a), std::string("011000"));
  EXPECT_EQ(t.stats().pinned_bytes, 2 * t.chunk);
  EXPECT_EQ(t.stats().swap_in_bytes - before.swap_in_bytes, 2 * t.chunk);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.there(a), std::string("011000"));  // pinned
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.there(a), std::string("011000"));  // until the next function begins
  t.swap_out();
  EXPECT_EQ(t.there(a), std::string("000000"));
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  t.check_all(a, t.chunk);
}

TEST(ranges_that_overlap_repeat_or_meet_a_whole_operand_are_pinned_once) {
  RangesTest t({8});
  Array a = t.make_absent(5 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.swap_out();
  const std::vector<ooc_operand> parts = {
      a.range(0, t.chunk, OOC_READ), a.range(t.chunk / 2, t.chunk, OOC_READ), a.range(0, t.chunk, OOC_READ),
      a.range(4 * t.chunk, 1, OOC_WRITE), a.range(4 * t.chunk, 0x7fffffffffffffff, OOC_READ)};
  ASSERT_EQ(t.begin("parts", parts), OOC_OK);
  EXPECT_EQ(t.there(a), std::string("11001"));
  EXPECT_EQ(t.stats().pinned_bytes, 3 * t.chunk);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  uint64_t token = 0;
  ASSERT_EQ(t.core.pin(a.at(2 * t.chunk), OOC_READ, &token), OOC_OK);  // all of it, beside what is still held
  EXPECT_EQ(t.stats().pinned_bytes, 5 * t.chunk);
  ASSERT_EQ(t.begin("both", {a.range(0, 1, OOC_READ), a.whole(OOC_READ), a.range(3 * t.chunk, 1, OOC_WRITE)}), OOC_OK);
  EXPECT_EQ(t.stats().pinned_bytes, 5 * t.chunk);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  ASSERT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  EXPECT_EQ(t.stats().pinned_bytes, 5 * t.chunk);  // the function's, until the next one
  t.let_go();
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  EXPECT_EQ(t.core.audit(), OOC_OK);
}

// A chunk that is not on the device has its bytes in the host copy alone: a write elsewhere must not touch that.
TEST(a_write_of_a_range_leaves_the_host_copies_of_the_rest_alone) {
  RangesTest t({8});
  Array a = t.make_absent(6 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.swap_out();
  ASSERT_EQ(t.write_range(a, 2 * t.chunk + 5, t.chunk, 50), OOC_OK);  // chunks 2 and 3
  EXPECT_EQ(t.core.audit(), OOC_OK);
  ASSERT_EQ(t.check_range(a, 0, 2 * t.chunk), OOC_OK);  // chunks 0 and 1 are clean
  const ooc_stats before = t.stats();
  t.swap_out();
  const ooc_stats after = t.stats();
  EXPECT_EQ(after.swap_out_bytes - before.swap_out_bytes, 2 * t.chunk);
  EXPECT_EQ(after.clean_drop_bytes - before.clean_drop_bytes, 2 * t.chunk);
  t.check_all(a, 3 * t.chunk);
}

TEST(a_variable_three_times_the_budget_is_written_and_read_back_by_ranges) {
  RangesTest t({8});
  Array a = t.make_absent(24 * t.chunk - 77);
  EXPECT_EQ(t.stats().live_bytes, 24 * t.chunk - 77);
  EXPECT_EQ(t.stats().device_bytes, uint64_t{0});
  EXPECT_EQ(t.stats().host_used_bytes, uint64_t{0});
  for (const uint64_t part : {t.chunk, 3 * t.chunk - 11, 7 * t.chunk}) {
    t.write_all(a, part, static_cast<unsigned>(part));
    EXPECT_EQ(t.core.audit(), OOC_OK);
    t.check_all(a, t.chunk + 1);
    EXPECT_EQ(t.core.audit(), OOC_OK);
  }
  EXPECT_TRUE(t.stats().device_peak_bytes <= 8 * t.chunk);
  const ooc_stats before = t.stats();
  ASSERT_EQ(t.begin("too much", {a.range(0, 9 * t.chunk, OOC_READ)}), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), "needs " + std::to_string(9 * t.chunk) + " bytes"));
  ASSERT_EQ(t.begin("all of it", {a.whole(OOC_READ)}), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), "needs " + std::to_string(24 * t.chunk) + " bytes"));
  EXPECT_EQ(t.stats().swap_in_bytes, before.swap_in_bytes);  // known beforehand
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  t.check_all(a, 8 * t.chunk);
  t.core.free(a.address);
  EXPECT_EQ(t.stats().host_used_bytes, uint64_t{0});
}

// Two operands are parts of one variable, and there is room for the second only where the rest of it leaves, while the
// first is on its way in.
TEST(parts_of_a_variable_leave_while_others_arrive) {
  RangesTest t({8, 64, 0, 1});
  Array a = t.make_absent(16 * t.chunk);
  t.write_all(a, t.chunk, 1);
  for (int round = 0; round < 4; ++round) {
    t.swap_out();
    ASSERT_EQ(t.check_range(a, 6 * t.chunk, 8 * t.chunk), OOC_OK);  // fills the budget
    const std::vector<ooc_operand> parts = {a.range(0, 4 * t.chunk, OOC_READ), a.range(14 * t.chunk, t.chunk, OOC_READ),
                                            a.range(4 * t.chunk, 2 * t.chunk, OOC_READ)};
    ASSERT_EQ(t.call("three parts", parts, [&] {
      EXPECT_TRUE(t.range_holds(a, 0, 6 * t.chunk) && t.range_holds(a, 14 * t.chunk, t.chunk));
    }), OOC_OK);
    EXPECT_EQ(t.core.audit(), OOC_OK);
  }
}

TEST(blank_chunks_come_in_without_a_copy_and_are_ordinary_from_then_on) {
  RangesTest t({8});
  Array a = t.make_absent(6 * t.chunk);
  ASSERT_EQ(t.check_range(a, t.chunk, t.chunk), OOC_OK);  // read before it was written: whatever is there
  ASSERT_EQ(t.write_range(a, 2 * t.chunk, t.chunk / 2, 3), OOC_OK);
  EXPECT_EQ(t.there(a), std::string("011000"));
  EXPECT_EQ(t.stats().swap_in_bytes + t.stats().swap_in_count + t.stats().demand_swap_in_count, uint64_t{0});
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.swap_out();
  EXPECT_EQ(t.stats().swap_out_bytes, 2 * t.chunk);
  ASSERT_EQ(t.check_range(a, 2 * t.chunk, t.chunk / 2), OOC_OK);
  EXPECT_EQ(t.stats().swap_in_bytes, t.chunk);
  ASSERT_EQ(t.call("all", {a.whole(OOC_READ | OOC_WRITE)}, [&] {
    EXPECT_TRUE(t.range_holds(a, 0, 6 * t.chunk));
    t.put_range(a, 0, 6 * t.chunk, 9);
  }), OOC_OK);
  t.swap_out();
  t.check_all(a, 6 * t.chunk);
  // Freed while most of it is blank, pinned, or both.
  Array b = t.make_absent(40 * t.chunk);
  ASSERT_EQ(t.write_range(b, 7 * t.chunk, t.chunk, 4), OOC_OK);
  t.core.free(b.address);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  EXPECT_EQ(t.stats().live_bytes, 6 * t.chunk);
  const Variable next = t.make(8 * t.chunk, 5);  // takes what it had
  EXPECT_EQ(t.check(next), OOC_OK);
}

TEST(up_to_the_small_limit_and_without_addresses) {
  RangesTest t({8, 64, granularity() / 4});
  void* small = t.core.malloc_absent(granularity() / 8);
  EXPECT_TRUE(small != nullptr);
  EXPECT_EQ(t.stats().small_live_bytes, t.chunk / 8);
  t.core.free(small);
  EXPECT_TRUE(t.core.malloc_absent(5000 * t.chunk) == nullptr);
  EXPECT_TRUE(contains(last_error(), "larger than the address range"));
  int local = 0;
  Array a = t.make_absent(2 * t.chunk);
  EXPECT_EQ(t.call("others", {{&local, OOC_WRITE, 0, 4}, {nullptr, OOC_READ, 0, 9}, a.range(0, 1, OOC_READ)}), OOC_OK);
}

TEST(a_copy_out_is_cancelled_only_where_something_was_written) {
  RangesTest t({8, 64, 0, 4});
  Array a = t.make_absent(4 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.let_go();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  Region* region = t.core.recorder().current().variables[0].handle.get();
  ASSERT_TRUE(region != nullptr && region->count == 4);
  ASSERT_TRUE(t.core.transitions().start_out(lock, {region, 0, 4}, transfers));
  lock.unlock();
  t.make_copies();
  ASSERT_EQ(t.write_range(a, t.chunk, t.chunk, 7), OOC_OK);  // both while they are copied
  ASSERT_EQ(t.call("and", {a.range(t.chunk, 1, OOC_READ), a.range(2 * t.chunk, 1, OOC_READ)}), OOC_OK);
  lock.lock();
  for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.transitions().settle(lock, transfer));
  lock.unlock();
  EXPECT_EQ(t.there(a), std::string("0110"));  // written; read
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.let_go();
  const ooc_stats before = t.stats();
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.stats().swap_out_bytes - before.swap_out_bytes, t.chunk);
  t.check_all(a, 2 * t.chunk);
}

TEST(what_a_function_uses_stays_when_all_of_its_variable_is_to_leave) {
  for (const bool clean : {true, false}) {
    RangesTest t({8, 64, 0, 4});
    Array a = t.make_absent(4 * t.chunk);
    t.write_all(a, t.chunk, 1);
    if (clean) {
      t.swap_out();
      t.check_all(a, 2 * t.chunk);
    }
    Region* region = t.core.recorder().current().variables[0].handle.get();
    t.let_go();
    ASSERT_EQ(t.call("use", {a.range(2 * t.chunk, 1, OOC_READ)}, [&] {
      std::vector<Transfer> transfers;
      Lock lock(t.core.mutex());
      ASSERT_TRUE(t.core.transitions().start_out(lock, {region, 0, 4}, transfers));
      for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.transitions().settle(lock, transfer));
      lock.unlock();
      EXPECT_EQ(t.there(a), std::string("0010"));
      EXPECT_TRUE(t.range_holds(a, 2 * t.chunk, t.chunk));
    }), OOC_OK);
    t.check_all(a, 2 * t.chunk);
  }
}

TEST(a_variable_freed_during_two_copies_is_disposed_of_after_the_last) {
  for (const Direction direction : {Direction::kOut, Direction::kIn}) {
    RangesTest t({8, 64, 0, 4});
    Array a = t.make_absent(4 * t.chunk);
    t.write_all(a, t.chunk, 1);
    if (direction == Direction::kIn) t.swap_out();
    else t.let_go();
    std::vector<Transfer> transfers;
    Lock lock(t.core.mutex());
    Region* region = t.core.recorder().current().variables[0].handle.get();
    Chunk chunks[4];
    if (direction == Direction::kIn) ASSERT_TRUE(t.core.idle_chunks().take(4, chunks));
    Transitions& transitions = t.core.transitions();
    for (uint32_t first : {0u, 2u})
      ASSERT_TRUE(direction == Direction::kOut ? transitions.start_out(lock, {region, first, 2}, transfers)
                                               : transitions.start_in(lock, {region, first, 2}, chunks + first, transfers));
    ASSERT_EQ(transfers.size(), size_t{2});
    lock.unlock();
    t.core.free(a.address);
    const ooc_stats before = t.stats();
    lock.lock();
    t.core.transitions().settle(lock, transfers[0]);
    lock.unlock();
    const Variable next = t.make(4 * t.chunk, 9);
    EXPECT_TRUE(next.address != a.address);  // where the other copy is still at work
    lock.lock();
    t.core.transitions().settle(lock, transfers[1]);
    lock.unlock();
    EXPECT_EQ(t.core.audit(), OOC_OK);
    EXPECT_EQ(t.stats().swap_out_bytes, before.swap_out_bytes);  // copies for nothing are none
    EXPECT_EQ(t.stats().swap_in_bytes, before.swap_in_bytes);
    t.swap_out();
    EXPECT_EQ(t.check(next), OOC_OK);
    EXPECT_EQ(t.stats().live_bytes, 4 * t.chunk);
  }
}

TEST(what_takes_the_place_of_a_variable_freed_with_pinned_parts_may_leave) {
  RangesTest t({8});
  Array a = t.make_absent(2 * t.chunk);
  t.write_all(a, t.chunk, 1);
  ASSERT_EQ(t.begin("part", {a.range(0, 1, OOC_READ)}), OOC_OK);
  t.core.free(a.address);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  const Variable next = t.make(2 * t.chunk, 5);
  EXPECT_EQ(next.address, a.address);
  t.swap_out();
  EXPECT_EQ(t.resident(next), 0u);
  EXPECT_EQ(t.check(next), OOC_OK);
}

// Each of two threads finds chunks missing that the other brings in meanwhile, after it has taken chunks for them.
TEST(chunks_taken_for_what_another_thread_brought_in_are_given_back) {
  RangesTest t({20, 64, 0, 1});
  for (unsigned round = 0; round < 40; ++round) {
    Array a = t.make_absent(8 * t.chunk);
    for (uint64_t i = 0; i < 8; i += 2) ASSERT_EQ(t.write_range(a, i * t.chunk, t.chunk, round), OOC_OK);
    t.swap_out();  // a piece of its own for each: swapped, blank, swapped, ...
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i)
      threads.emplace_back([&] {
        t.core.device().bind_thread();
        EXPECT_EQ(t.check_range(a, 0, 8 * t.chunk), OOC_OK);
      });
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(t.core.audit(), OOC_OK);
    t.core.free(a.address);
  }
}

TEST(a_smaller_budget_takes_parts_too) {
  RangesTest t({8});
  Array a = t.make_absent(20 * t.chunk);
  t.write_all(a, 2 * t.chunk, 1);
  for (const uint64_t chunks : {6, 3, 8}) {
    ASSERT_EQ(t.core.set_budget(chunks * t.chunk), OOC_OK);
    EXPECT_TRUE(t.stats().device_bytes <= chunks * t.chunk);
    EXPECT_EQ(t.core.audit(), OOC_OK);
    t.check_all(a, 3 * t.chunk);
  }
  ASSERT_EQ(t.begin("part", {a.range(0, 5 * t.chunk, OOC_READ)}), OOC_OK);
  std::thread([&] {
    EXPECT_EQ(t.core.set_budget(4 * t.chunk), OOC_OUT_OF_MEMORY);  // waits for it in vain, as it does not end
    EXPECT_EQ(t.core.set_budget(5 * t.chunk), OOC_OK);
  }).join();
  EXPECT_EQ(t.there(a).substr(0, 6), std::string("111110"));
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  ASSERT_EQ(t.core.set_budget(8 * t.chunk), OOC_OK);
}

TEST(threads_use_parts_of_one_variable) {
  RangesTest t({8});
  Array shared = t.make_absent(32 * t.chunk);
  t.write_all(shared, 4 * t.chunk, 1);
  t.let_go();
  constexpr uint64_t kThreads = 4;
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < kThreads; ++number)
    threads.emplace_back([&t, &shared, number] {
      t.core.device().bind_thread();
      // Its own quarter of the contents, which no other thread looks at.
      const uint64_t span = shared.bytes.size() / kThreads, begin = number * span;
      Array own{shared.at(begin), Bytes(span), std::vector<bool>(span)};
      std::mt19937_64 random(number + 1);
      for (int step = 0; step < 60; ++step) {
        const uint64_t offset = random() % (span - 2 * t.chunk), bytes = 1 + random() % (2 * t.chunk);
        const int status = step % 2 == 0 ? t.write_range(own, offset, bytes, static_cast<unsigned>(random()))
                                         : t.check_range(own, offset, bytes);
        EXPECT_EQ(status, OOC_OK);
      }
      for (uint64_t at = 0; at < span; at += 2 * t.chunk) EXPECT_EQ(t.check_range(own, at, 2 * t.chunk), OOC_OK);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(t.core.audit(), OOC_OK);
}

TEST(a_random_program_of_ranges_computes_on_the_right_bytes) {
  for (const unsigned seed : {1u, 2u, 3u}) {
    RangesTest t({10, 96, 0, 1 + seed % 2});
    RandomProgram program(t, seed, 48);
    for (int step = 0; step < 500; ++step) {
      ASSERT_EQ(program.step(), OOC_OK);
      ASSERT_EQ(t.core.audit(), OOC_OK);
    }
    for (const Array& array : program.arrays) t.check_all(array, 5 * t.chunk);
    EXPECT_TRUE(t.stats().swap_out_bytes > 50 * t.chunk);
    EXPECT_TRUE(t.stats().device_peak_bytes <= 10 * t.chunk);
  }
}
