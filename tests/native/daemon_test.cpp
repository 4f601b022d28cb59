// The daemon, ticked by hand: plans are carried out as they say, in their order, and left when the program departs.
#include "daemon_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// An iteration uses `size` variables of two chunks, one function each: "f0" reads variable 0, ...
struct Loop : DaemonTest {
  explicit Loop(uint64_t budget_chunks, size_t size = 4, uint64_t piece_chunks = 2)
      : DaemonTest({budget_chunks, 64, 0, piece_chunks}) {
    v = make_many(size, 2 * chunk);
    boundary();
  }
  void use(size_t index) {
    const std::string name = "f" + std::to_string(index);
    EXPECT_EQ(check(v[index], name.c_str()), OOC_OK);
  }
  // After each function, and once more after the boundary, the daemon has all the time it wants.
  ooc_iteration iterate(bool with_ticks = true) {
    for (size_t i = 0; i < v.size(); ++i) {
      use(i);
      if (with_ticks) settle();
    }
    const ooc_iteration ended = boundary();
    if (with_ticks) settle();
    return ended;
  }
  // Another sequence, with the same beginning.
  ooc_iteration iterate_otherwise() {
    for (const size_t i : {0, 1, 3}) use(i);
    settle();
    const ooc_iteration ended = boundary();
    settle();
    return ended;
  }
  uint64_t steady() {
    iterate();
    return iterate().fingerprint;
  }
  uint32_t on_device(size_t index) {
    Lock lock(core.mutex());
    const auto first = static_cast<uint64_t>(static_cast<char*>(v[index].address) - core.device().base()) / chunk;
    const Trace& trace = *core.trace(last);
    for (const auto& variable : trace.variables)
      if (Region* found = variable.handle.get())
        if (found->first == first) return found->resident;
    throw std::runtime_error("not in that trace");
  }

  std::vector<Variable> v;
  uint64_t last = 0;  // fingerprint whose trace knows all variables
};

}  // namespace

TEST(a_plan_must_belong_to_a_trace_that_is_kept) {
  Loop t(16);
  const uint64_t fingerprint = t.steady();
  EXPECT_TRUE(!t.install(fingerprint + 1, {}, {}));
  EXPECT_TRUE(!t.install(fingerprint, {{4, 0, 1, 0}}, {}));
  EXPECT_TRUE(!t.install(fingerprint, {{0, 0, 1, 4}}, {}));
  EXPECT_TRUE(!t.install(fingerprint, {}, {{7, 0, 1, 0, 0, 1}}));
  EXPECT_TRUE(!t.daemon.has_plan(fingerprint));
  EXPECT_EQ(t.stats().plan_count, uint64_t{0});
  EXPECT_TRUE(t.install(fingerprint, {{0, 0, 1, 0}}, {}));
  EXPECT_TRUE(t.daemon.has_plan(fingerprint));
  EXPECT_EQ(t.stats().plan_count, uint64_t{1});
  t.daemon.forget();
  EXPECT_TRUE(!t.daemon.has_plan(fingerprint));
}

TEST(moves_start_when_their_function_has_ended) {
  Loop t(16);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 1}}, {{0, 0, 2, 2, 1, 4}}));
  t.iterate(false);
  t.settle();
  t.use(0);
  EXPECT_EQ(t.settle(), 0);
  t.use(1);
  EXPECT_EQ(t.settle(), 0);  // function 1 may still run
  t.use(2);                  // now it has ended
  EXPECT_TRUE(t.tick_out());
  EXPECT_TRUE(!t.tick_in());
  while (t.tick_out()) {}
  EXPECT_EQ(t.on_device(0), 0u);
  EXPECT_TRUE(!t.tick_in());
  t.use(3);  // function 2 has ended, the out is complete
  while (t.tick_in()) {}
  EXPECT_EQ(t.on_device(0), 2u);
  t.boundary();
  EXPECT_EQ(t.stats().demand_swap_in_count, uint64_t{0});
}

// Variable 0 is read by function 0 and written by nothing in between: its copy is made ahead, and is what leaves.
TEST(a_write_back_is_made_ahead_and_the_variable_then_leaves_without_a_copy) {
  Loop t(16);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 2}}, {}, {{0, 0, 2, 0}}));
  t.use(0);
  EXPECT_EQ(t.settle(), 0);
  t.use(1);
  t.settle();
  EXPECT_EQ(t.on_device(0), 2u);
  EXPECT_EQ(t.stats().swap_out_bytes, 2 * t.chunk);
  EXPECT_EQ(t.stats().write_back_bytes, 2 * t.chunk);
  t.use(2);
  t.settle();
  EXPECT_EQ(t.on_device(0), 2u);
  t.use(3);
  t.settle();
  EXPECT_EQ(t.on_device(0), 0u);
  EXPECT_EQ(t.stats().clean_drop_bytes, 2 * t.chunk);
  EXPECT_EQ(t.stats().swap_out_bytes, 2 * t.chunk);
  t.boundary();
  t.use(0);  // the bytes are right
}

TEST(outs_go_before_write_backs_and_ins_do_not_wait_for_these) {
  Loop t(16);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{1, 0, 2, 1}}, {{1, 0, 2, 2, 1, 4}}, {{0, 0, 2, 0}, {2, 0, 2, 2}}));
  t.use(0);
  t.use(1);
  t.use(2);  // the out of 1 and the write-back of 0 may start
  EXPECT_TRUE(t.tick_out());
  EXPECT_EQ(t.stats().write_back_bytes + t.stats().swap_out_bytes, uint64_t{0});
  while (t.on_device(1) == 2u) ASSERT_TRUE(t.tick_out());
  EXPECT_EQ(t.stats().write_back_bytes, uint64_t{0});
  EXPECT_TRUE(t.tick_out());
  t.settle();
  EXPECT_EQ(t.stats().write_back_bytes, 2 * t.chunk);
  t.use(3);
  t.settle();
  EXPECT_EQ(t.stats().write_back_bytes, 4 * t.chunk);
  EXPECT_EQ(t.on_device(1), 2u);
  t.boundary();
}

TEST(a_write_back_of_what_was_used_since_is_left_out) {
  Loop t(16);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {}, {}, {{0, 0, 2, 0}, {1, 0, 2, 1}}));
  for (size_t i = 0; i < 4; ++i) t.use(i);  // the daemon has no time
  t.boundary();
  t.use(0);
  t.settle();
  EXPECT_EQ(t.stats().write_back_bytes, 2 * t.chunk);  // of variable 1
  EXPECT_EQ(t.on_device(0) + t.on_device(1), 4u);
}

TEST(what_is_written_during_its_write_back_is_not_clean) {
  Loop t(16, 4, 2);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 2}}, {}, {{0, 0, 2, 0}}));
  t.use(0);
  t.use(1);
  EXPECT_TRUE(t.tick_out());
  t.make_copies();
  EXPECT_EQ(t.update(t.v[0], 77, "writes 0"), OOC_OK);
  while (t.tick_out()) {}
  EXPECT_EQ(t.stats().write_back_bytes, uint64_t{0});
  EXPECT_EQ(t.stats().cancelled_swap_out_count, uint64_t{1});
  t.boundary();
  t.use(0);
}

// The out of a variable may start while its write-back is under way: then the copy that is being made is the out's.
TEST(a_swap_out_takes_over_the_write_back_that_is_under_way) {
  Loop t(16, 4, 2);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 1}}, {{0, 0, 2, 2, 1, 4}}, {{0, 0, 2, 0}}));
  t.use(0);
  t.use(1);
  EXPECT_TRUE(t.tick_out());
  t.use(2);
  EXPECT_TRUE(t.tick_out());
  EXPECT_EQ(t.on_device(0), 2u);
  while (t.tick_out()) {}
  EXPECT_EQ(t.on_device(0), 0u);
  EXPECT_EQ(t.stats().swap_out_bytes, 2 * t.chunk);
  EXPECT_EQ(t.stats().write_back_bytes, uint64_t{0});
  t.use(3);
  t.settle();
  EXPECT_EQ(t.on_device(0), 2u);
  t.boundary();
  t.use(0);
}

TEST(a_part_of_a_variable_moves_in_pieces) {
  Loop t(16, 2, 1);
  t.last = t.steady();
  const Variable large = t.make(6 * t.chunk, 9);
  t.boundary();
  t.v.push_back(large);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 1, 1, 0}, {2, 2, 3, 2}}, {}));
  t.use(0);
  t.use(1);
  t.settle();
  EXPECT_EQ(t.on_device(0), 1u);
  EXPECT_EQ(t.stats().swap_out_bytes, t.chunk);
  t.use(2);
  t.boundary();
  EXPECT_EQ(t.settle(), 0);
  t.use(0);  // of the next iteration: the last function has ended
  t.settle();
  EXPECT_EQ(t.on_device(2), 3u);
  EXPECT_EQ(t.stats().swap_out_count, uint64_t{4});  // one copy a piece
  t.use(1);
  t.use(2);  // the missing part comes on demand
  EXPECT_EQ(t.stats().demand_swap_in_bytes, 4 * t.chunk);
}

TEST(an_in_waits_for_the_outs_before_it_and_for_room) {
  Loop t(5, 3);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 0}, {1, 0, 2, 1}}, {{2, 0, 2, -1, 1, 2}, {0, 0, 2, 1, 2, 3}}));
  t.iterate();
  t.iterate();
  const ooc_stats before = t.stats();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(t.iterate().followed_plan, 1u);
  const ooc_stats after = t.stats();
  EXPECT_EQ(after.planned_iteration_count - before.planned_iteration_count, uint64_t{3});
  EXPECT_EQ(after.divergence_count, uint64_t{0});
  EXPECT_TRUE(after.swap_in_count - before.swap_in_count > after.demand_swap_in_count - before.demand_swap_in_count);
}

TEST(a_steady_loop_needs_no_demand_once_it_is_planned) {
  Loop t(4);  // two of four variables fit
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 0}, {1, 0, 2, 1}, {2, 0, 2, 2}, {3, 0, 2, 3}},
                        {{2, 0, 2, -1, 1, 2}, {3, 0, 2, -1, 2, 3}, {0, 0, 2, -1, 3, 4}, {1, 0, 2, -1, 4, 5}}));
  for (int i = 0; i < 3; ++i) t.iterate();
  const ooc_stats before = t.stats();
  for (int i = 0; i < 4; ++i) {
    const ooc_iteration ended = t.iterate();
    EXPECT_EQ(ended.followed_plan, 1u);
    EXPECT_EQ(ended.fingerprint, t.last);
  }
  const ooc_stats after = t.stats();
  EXPECT_EQ(after.demand_swap_in_count, before.demand_swap_in_count);
  EXPECT_EQ(after.demand_swap_out_bytes, before.demand_swap_out_bytes);
  EXPECT_EQ(after.swap_in_bytes - before.swap_in_bytes, 4 * 8 * t.chunk);  // each variable once an iteration
  EXPECT_EQ(after.swap_out_bytes, before.swap_out_bytes);                  // all clean
  EXPECT_EQ(after.divergence_count, uint64_t{0});
}

TEST(what_cannot_move_is_skipped_and_holds_nothing_up) {
  Loop t(16);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 0}, {1, 0, 2, 0}, {3, 0, 2, 0}, {2, 5, 9, 0}, {0, 0, 0, 0}},
                        {{1, 7, 3, 0, 0, 3}, {0, 0, 2, 2, 5, 4}}));
  t.iterate();
  uint64_t token = 0;
  ASSERT_EQ(t.core.pin(t.v[0].address, OOC_READ, &token), OOC_OK);
  t.use(0);
  t.use(1);   // its own out is for after function 0: too late, it is in use again
  t.settle();
  EXPECT_EQ(t.on_device(0), 2u);  // pinned
  EXPECT_EQ(t.on_device(1), 2u);
  EXPECT_EQ(t.on_device(2), 2u);  // there is no such part
  EXPECT_EQ(t.on_device(3), 0u);
  t.use(2);
  t.use(3);
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  EXPECT_EQ(t.boundary().followed_plan, 1u);
  t.core.free(t.v[3].address);
  t.v.pop_back();
  t.use(0);
  t.use(1);
  t.settle();  // variable 3 is gone
  EXPECT_EQ(t.on_device(0), 0u);
  t.use(2);
}

TEST(a_departure_is_counted_and_the_plan_left) {
  Loop t(16);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 1}}, {}));
  t.iterate();
  EXPECT_EQ(t.iterate().followed_plan, 1u);
  EXPECT_EQ(t.stats().divergence_count, uint64_t{0});
  t.use(0);
  t.use(2);  // f1 was expected
  t.use(1);
  t.use(3);
  EXPECT_EQ(t.settle(), 0);
  EXPECT_EQ(t.on_device(0), 2u);
  EXPECT_EQ(t.boundary().followed_plan, 0u);
  t.settle();
  t.use(0);
  EXPECT_EQ(t.stats().divergence_count, uint64_t{1});
  t.use(1);
  t.use(2);
  t.settle();
  EXPECT_EQ(t.on_device(0), 0u);  // found again by its prefix
  t.use(3);
  EXPECT_EQ(t.boundary().followed_plan, 1u);
  EXPECT_EQ(t.stats().divergence_count, uint64_t{1});
  t.iterate();
  t.use(0);  // an iteration that stops short
  t.use(1);
  t.boundary();
  t.iterate();
  EXPECT_EQ(t.stats().divergence_count, uint64_t{2});
  t.iterate();
}

TEST(two_plans_with_a_common_start_are_switched_between) {
  Loop t(16);
  const auto other = [&t] { return t.iterate_otherwise(); };
  for (int i = 0; i < 3; ++i) {
    t.last = t.iterate().fingerprint;
    other();
  }
  const uint64_t first = t.iterate().fingerprint, second = other().fingerprint;
  ASSERT_TRUE(t.install(first, {{0, 0, 2, 1}}, {}) && t.install(second, {{1, 0, 2, 1}}, {}));
  t.last = first;
  t.iterate();
  other();
  const uint64_t switches = t.stats().plan_switch_count;
  for (int i = 0; i < 3; ++i) {  // they take turns, and history knows
    EXPECT_EQ(t.iterate().followed_plan, 1u);
    EXPECT_EQ(other().followed_plan, 1u);
  }
  EXPECT_EQ(t.stats().plan_switch_count, switches);
  EXPECT_EQ(t.stats().divergence_count, uint64_t{0});
  t.iterate();
  t.use(0);  // the other was expected
  t.use(1);
  t.use(2);
  EXPECT_EQ(t.stats().plan_switch_count, switches + 1);
  t.settle();
  EXPECT_EQ(t.on_device(0), 0u);  // as the first plan says
  EXPECT_EQ(t.on_device(1), 2u);
  t.use(3);
  EXPECT_EQ(t.boundary().followed_plan, 0u);  // not from its start
  t.settle();
  EXPECT_EQ(t.stats().divergence_count, uint64_t{0});
  other();
}

TEST(what_followed_a_sequence_last_is_expected_after_it) {
  Loop t(16);
  for (int i = 0; i < 4; ++i) t.last = t.iterate().fingerprint;  // it follows itself: a warm-up
  uint64_t second = 0;
  for (int i = 0; i < 3; ++i) {
    second = t.iterate_otherwise().fingerprint;
    EXPECT_EQ(t.iterate().fingerprint, t.last);
  }
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 1}}, {}) && t.install(second, {{1, 0, 2, 1}}, {}));
  t.iterate_otherwise();
  t.iterate();
  const uint64_t switches = t.stats().plan_switch_count;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(t.iterate_otherwise().followed_plan, 1u);
    EXPECT_EQ(t.iterate().followed_plan, 1u);
  }
  EXPECT_EQ(t.stats().plan_switch_count, switches);
  EXPECT_EQ(t.stats().divergence_count, uint64_t{0});
}

TEST(a_tail_that_can_never_be_finished_blocks_no_later_iteration) {
  Loop t(6, 4);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {}, {{3, 0, 2, 0, 99, 3}, {0, 0, 2, 3, 0, 4}}));  // there are no 99 outs
  for (int i = 0; i < 3; ++i) t.iterate();
  ASSERT_TRUE(t.install(t.last, {{0, 0, 2, 0}}, {{3, 0, 2, 0, 1, 3}}));
  for (int i = 0; i < 2; ++i) t.iterate();
  t.use(0);
  t.use(1);
  t.settle();
  EXPECT_EQ(t.on_device(3), 2u);
  t.use(2);
  t.use(3);
}

TEST(demand_prefers_the_variable_that_is_needed_last) {
  uint64_t demanded[2];
  for (const bool planned : {false, true}) {
    Loop t(4, 3);
    t.last = t.steady();
    if (planned) ASSERT_TRUE(t.install(t.last, {}, {}));  // a plan that moves nothing: the sequence is known
    t.iterate();
    const uint64_t before = t.stats().demand_swap_in_bytes;
    for (int i = 0; i < 4; ++i) t.iterate();
    demanded[planned ? 1 : 0] = t.stats().demand_swap_in_bytes - before;
  }
  EXPECT_EQ(demanded[0], 4 * 6 * granularity());  // the oldest is always the one that is needed next
  EXPECT_TRUE(demanded[1] <= demanded[0] / 2 + 2 * granularity());
}

TEST(an_entry_variable_can_come_in_before_its_iteration_uses_it) {
  Loop t(8);
  t.last = t.steady();
  ASSERT_TRUE(t.install(t.last, {{3, 0, 2, 3}}, {{3, 0, 2, 0, 0, 3}}));
  t.iterate();
  t.iterate();
  const uint64_t before = t.stats().demand_swap_in_count;
  t.use(0);
  t.settle();
  EXPECT_EQ(t.on_device(3), 0u);  // left after the last function of the iteration before
  t.use(1);
  t.settle();
  EXPECT_EQ(t.on_device(3), 2u);
  t.use(2);
  t.use(3);
  EXPECT_EQ(t.stats().demand_swap_in_count, before);
}
