// Ranges in the recorded sequence, and plans whose pieces move parts of variables.
#include "daemon_fixture.h"
#include "ranges_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

struct PlanTest : WithDaemon<RangesTest> {
  explicit PlanTest(uint64_t budget_chunks) : WithDaemon(Limits{budget_chunks, 64, 0, 2}) {}

  std::shared_ptr<Trace> trace(uint64_t fingerprint) {
    Lock lock(core.mutex());
    return core.trace(fingerprint);
  }
};

std::string text(const Trace& trace, const Trace::Use& use) {
  const Trace::Range range = trace.range(use);
  std::string result = std::to_string(use.function) + ":" + std::to_string(use.variable);
  if (use.range > 0) result += "[" + std::to_string(range.first) + "+" + std::to_string(range.count) + "]";
  return result + (use.access & OOC_READ ? "r" : "") + (use.access & OOC_WRITE ? "w" : "");
}
std::string text(const Trace& trace) {
  std::string all;
  for (const Trace::Use& use : trace.uses) all += (all.empty() ? "" : " ") + text(trace, use);
  return all;
}

// Four functions, each of which reads a fourth of eight chunks.
struct Quarters : PlanTest {
  explicit Quarters(uint64_t budget_chunks) : PlanTest(budget_chunks), a(make_absent(8 * chunk)) {
    write_all(a, 2 * chunk, 1);
    boundary();
  }
  void use(uint64_t quarter) {
    const std::string name = "quarter " + std::to_string(quarter);
    const uint64_t offset = quarter * 2 * chunk;
    ASSERT_EQ(call(name.c_str(), {a.range(offset, 2 * chunk, OOC_READ)}, [&] {
      EXPECT_TRUE(range_holds(a, offset, 2 * chunk));
    }), OOC_OK);
  }
  uint64_t iterate() {
    for (uint64_t quarter = 0; quarter < 4; ++quarter) {
      use(quarter);
      settle();
    }
    const uint64_t fingerprint = boundary().fingerprint;
    settle();
    return fingerprint;
  }
  Array a;
};

}  // namespace

TEST(uses_are_recorded_run_by_run) {
  PlanTest t(16);
  Array a = t.make_absent(8 * t.chunk), b = t.make_absent(2 * t.chunk);
  t.boundary();
  const uint64_t c = t.chunk;
  ASSERT_EQ(t.call("f", {b.whole(OOC_READ), a.range(5 * c, 1, OOC_WRITE), a.range(0, c, OOC_READ),
                         a.range(c, c, OOC_READ), a.range(6 * c, c, OOC_READ), a.range(7 * c, c, OOC_READ),
                         a.range(2 * c - 1, 2 * c, OOC_WRITE), b.range(0, 2 * c, OOC_WRITE)}), OOC_OK);
  ASSERT_EQ(t.call("g", {a.whole(OOC_READ)}), OOC_OK);
  ASSERT_EQ(t.call("h", {a.range(0, 8 * c, OOC_READ)}), OOC_OK);  // all of it
  const ooc_iteration ended = t.boundary();
  EXPECT_EQ(text(*t.trace(ended.fingerprint)),
            std::string("0:0rw 0:1[0+1]r 0:1[1+1]rw 0:1[2+2]w 0:1[5+1]w 0:1[6+2]r 1:1r 2:1r"));
}

TEST(a_range_makes_another_fingerprint_and_all_of_it_the_same) {
  PlanTest t(16);
  Array a = t.make_absent(4 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.boundary();
  const auto fingerprint = [&](const ooc_operand& operand) {
    ASSERT_EQ(t.call("f", {operand}), OOC_OK);
    return t.boundary().fingerprint;
  };
  fingerprint(a.whole(OOC_READ));
  const uint64_t whole = fingerprint(a.whole(OOC_READ)), part = fingerprint(a.range(0, t.chunk, OOC_READ));
  EXPECT_TRUE(whole != part);
  EXPECT_EQ(fingerprint(a.range(0, 4 * t.chunk - 1, OOC_READ)), whole);
  EXPECT_EQ(fingerprint(a.range(9, 10, OOC_READ)), part);
  EXPECT_TRUE(fingerprint(a.range(t.chunk, t.chunk, OOC_READ)) != part);
  EXPECT_TRUE(fingerprint(a.range(0, 2 * t.chunk, OOC_READ)) != part);
  EXPECT_TRUE(fingerprint(a.range(0, t.chunk, OOC_WRITE)) != part);
}

TEST(an_absent_variable_is_born_without_a_use) {
  PlanTest t(16);
  uint64_t fingerprint = 0;
  for (int i = 0; i < 2; ++i) {
    Array a;
    ASSERT_EQ(t.call("make", {}, [&] { a = t.make_absent(4 * t.chunk); }), OOC_OK);
    ASSERT_EQ(t.write_range(a, 0, t.chunk, 1), OOC_OK);
    t.core.free(a.address);
    fingerprint = t.boundary().fingerprint;
  }
  const std::shared_ptr<Trace> trace = t.trace(fingerprint);
  EXPECT_EQ(text(*trace), std::string("1:0[0+1]w"));
  EXPECT_EQ(trace->variables[0].born, 0);
  EXPECT_EQ(trace->variables[0].died, 1);
}

TEST(parts_of_a_variable_move_while_functions_use_others) {
  Quarters t(16);
  t.iterate();
  const uint64_t fingerprint = t.iterate();
  // The first quarter leaves after its function and comes back before the next iteration; the second stays away.
  ASSERT_TRUE(t.install(fingerprint, {{0, 0, 2, 0}, {0, 2, 2, 1}}, {{0, 0, 2, 2, 1, 4}}));
  t.iterate();
  const ooc_stats before = t.stats();
  t.use(0);
  t.use(1);
  EXPECT_TRUE(t.settle() > 0);
  EXPECT_EQ(t.there(t.a), std::string("00111111"));
  t.use(2);
  EXPECT_TRUE(t.settle() > 0);
  EXPECT_EQ(t.there(t.a), std::string("00001111"));
  t.use(3);
  EXPECT_TRUE(t.settle() > 0);
  EXPECT_EQ(t.there(t.a), std::string("11001111"));
  EXPECT_EQ(t.core.audit(), OOC_OK);
  EXPECT_EQ(t.boundary().followed_plan, 1u);
  const ooc_stats after = t.stats();
  const uint64_t on_demand = after.demand_swap_in_bytes - before.demand_swap_in_bytes;
  EXPECT_EQ(after.swap_in_bytes - before.swap_in_bytes, on_demand + 2 * t.chunk);
}

TEST(an_in_waits_for_as_many_outs_as_it_says_though_there_is_room) {
  Quarters t(16);
  t.iterate();
  ASSERT_TRUE(t.install(t.iterate(), {{0, 0, 2, 0}, {0, 2, 2, 1}}, {{0, 0, 2, 1, 2, 4}}));
  t.iterate();
  t.use(0);
  t.use(1);
  t.settle();
  EXPECT_EQ(t.there(t.a), std::string("00111111"));
  t.use(2);  // function 1 has ended: the second out may start, and the in waits for it
  EXPECT_TRUE(!t.tick_in());
  while (t.there(t.a) == "00111111") ASSERT_TRUE(t.tick_out());
  EXPECT_EQ(t.there(t.a), std::string("00001111"));
  while (t.tick_out()) {}
  EXPECT_TRUE(t.tick_in());
  t.settle();
  EXPECT_EQ(t.there(t.a), std::string("11001111"));
  t.use(3);
  t.boundary();
}

TEST(an_in_whose_function_has_begun_is_left_out) {
  Quarters t(16);
  t.iterate();
  ASSERT_TRUE(t.install(t.iterate(), {{0, 0, 2, 0}}, {{0, 0, 2, 0, 1, 1}}));
  t.iterate();
  for (uint64_t quarter = 0; quarter < 3; ++quarter) t.use(quarter);  // the daemon has no time
  t.settle();
  EXPECT_EQ(t.there(t.a), std::string("00111111"));
  t.use(3);
  t.boundary();
}

TEST(an_in_waits_for_what_the_iteration_before_is_still_to_move_out) {
  Quarters t(16);
  t.iterate();
  ASSERT_TRUE(t.install(t.iterate(), {{0, 6, 2, 3}}, {{0, 6, 2, -1, 0, 3}}));
  t.iterate();
  t.iterate();
  const ooc_stats before = t.stats();
  t.use(0);
  t.settle();  // the last quarter leaves, and comes back for this iteration
  EXPECT_EQ(t.stats().clean_drop_bytes - before.clean_drop_bytes, 2 * t.chunk);
  EXPECT_EQ(t.there(t.a), std::string("11111111"));
  EXPECT_EQ(t.stats().demand_swap_in_bytes, before.demand_swap_in_bytes);
  for (uint64_t quarter = 1; quarter < 4; ++quarter) t.use(quarter);
  t.boundary();
}

// What an ended iteration is still to move does not depend on other parts that the next one has used already.
TEST(the_tail_of_an_iteration_goes_on_beside_uses_of_other_parts) {
  Quarters t(16);
  t.iterate();
  const uint64_t fingerprint = t.iterate();
  ASSERT_TRUE(t.install(fingerprint, {{0, 4, 2, 2}, {0, 6, 2, 3}}, {{0, 4, 2, 3, 1, 6}}));
  t.iterate();
  for (uint64_t quarter = 0; quarter < 4; ++quarter) t.use(quarter);
  t.boundary();
  t.use(0);
  t.use(1);
  while (t.tick_out()) {}
  EXPECT_EQ(t.there(t.a), std::string("11110000"));
  while (t.tick_in()) {}
  EXPECT_EQ(t.there(t.a), std::string("11111100"));
  t.use(2);  // already there
  t.use(3);
  EXPECT_EQ(t.core.audit(), OOC_OK);
}

TEST(the_tail_of_an_iteration_leaves_a_part_that_the_next_one_has_used) {
  Quarters t(16);
  t.iterate();
  ASSERT_TRUE(t.install(t.iterate(), {{0, 0, 2, 3}, {0, 6, 2, 3}}, {}));
  t.iterate();
  for (uint64_t quarter = 0; quarter < 4; ++quarter) t.use(quarter);
  t.boundary();
  t.use(0);
  t.use(1);
  while (t.tick_out()) {}
  EXPECT_EQ(t.there(t.a), std::string("11111100"));
}

TEST(a_part_that_is_used_again_does_not_leave) {
  PlanTest t(16);
  Array a = t.make_absent(4 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.boundary();
  const auto iterate = [&](bool with_ticks) {
    for (const uint64_t first : {0, 2, 0}) {  // the last one uses the first part again
      ASSERT_EQ(t.check_range(a, first * t.chunk, 2 * t.chunk), OOC_OK);
      if (with_ticks) t.settle();
    }
  };
  iterate(true);
  t.boundary();
  iterate(true);
  ASSERT_TRUE(t.install(t.boundary().fingerprint, {{0, 0, 2, 0}, {0, 2, 2, 1}}, {}));
  iterate(true);
  t.boundary();
  iterate(false);
  while (t.tick_out()) {}
  EXPECT_EQ(t.there(a), std::string("1100"));  // too late for the first part, and the second one left
}

TEST(blank_chunks_are_brought_in_by_plans_without_a_copy) {
  PlanTest t(16);
  Array a = t.make_absent(6 * t.chunk);
  ASSERT_EQ(t.write_range(a, 0, t.chunk, 1), OOC_OK);
  t.boundary();
  const auto iterate = [&](bool with_ticks) {
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(t.check_range(a, 0, t.chunk), OOC_OK);
      if (with_ticks) t.settle();
    }
    return t.boundary().fingerprint;
  };
  iterate(false);
  ASSERT_TRUE(t.install(iterate(false), {}, {{0, 0, 5, 0, 0, 2}}));
  iterate(false);
  EXPECT_EQ(t.there(a), std::string("100000"));
  iterate(true);
  EXPECT_EQ(t.there(a), std::string("111110"));
  EXPECT_EQ(t.stats().swap_in_bytes + t.stats().swap_in_count, uint64_t{0});
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.check_all(a, 3 * t.chunk);
}

TEST(a_function_that_does_not_begin_leaves_no_trace) {
  PlanTest t(8);
  Array a = t.make_absent(12 * t.chunk);
  const Variable other = t.make(2 * t.chunk, 5);
  t.write_all(a, 2 * t.chunk, 1);
  t.boundary();
  const auto iterate = [&](bool with_failures) {
    for (const uint64_t first : {0, 4, 8}) {
      if (with_failures) {  // one of its operands appears for the first time
        const ooc_operand also = first == 4 ? reads(other) : a.range(0, 1, OOC_READ);
        const std::vector<ooc_operand> operands = {also, a.whole(OOC_READ)};
        EXPECT_EQ(t.begin("whole", operands), OOC_OUT_OF_MEMORY);
        EXPECT_TRUE(!t.core.in_function());
      }
      ASSERT_EQ(t.check_range(a, first * t.chunk, 4 * t.chunk), OOC_OK);
      t.settle();
    }
    EXPECT_EQ(t.check(other), OOC_OK);
    t.settle();
    return t.boundary();
  };
  iterate(false);
  const uint64_t fingerprint = iterate(false).fingerprint;
  EXPECT_EQ(iterate(true).fingerprint, fingerprint);
  ASSERT_TRUE(t.install(fingerprint, {{0, 0, 2, 0}}, {}));
  iterate(false);
  const ooc_iteration planned = iterate(true);
  EXPECT_EQ(planned.fingerprint, fingerprint);
  EXPECT_EQ(planned.functions, 4u);
  EXPECT_EQ(planned.followed_plan, 1u);
  EXPECT_EQ(t.stats().divergence_count, uint64_t{0});
  EXPECT_EQ(t.core.audit(), OOC_OK);
}
