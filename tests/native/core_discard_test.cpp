// Variables whose bytes are given up, and written again at the same addresses.
#include "core_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// Writes the variable again, as whoever computes it again does.
int rewrite(CoreTest& t, Variable& variable, unsigned seed) {
  variable.seed = seed;
  return t.call("again", {writes(variable)}, [&] { t.put(variable); });
}

}  // namespace

TEST(what_is_discarded_leaves_room_and_costs_no_copy) {
  CoreTest t(Limits{8, 64, 0, 2});
  Variable first = t.make(6 * t.chunk, 1);
  t.let_go();
  const ooc_stats before = t.stats();
  EXPECT_EQ(t.core.discard(first.address), OOC_OK);
  EXPECT_EQ(t.stats().resident_bytes, before.resident_bytes - 6 * t.chunk);
  EXPECT_EQ(t.stats().live_bytes, before.live_bytes);
  const Variable second = t.make(6 * t.chunk, 2);
  EXPECT_EQ(t.stats().swap_out_bytes, before.swap_out_bytes);
  EXPECT_EQ(rewrite(t, first, 3), OOC_OK);
  EXPECT_EQ(t.check(first), OOC_OK);
  EXPECT_EQ(t.stats().swap_in_bytes, before.swap_in_bytes);
  EXPECT_EQ(t.check(second), OOC_OK);
}

TEST(a_function_that_has_just_ended_holds_it_no_longer) {
  CoreTest t(Limits{8, 64, 0, 2});
  const Variable variable = t.make(4 * t.chunk, 1);
  EXPECT_EQ(t.core.discard(variable.address), OOC_OK);
  EXPECT_EQ(t.stats().resident_bytes, 0u);
}

TEST(host_copies_go_with_it) {
  CoreTest t(Limits{8, 64, 0, 2});
  Variable away = t.make(4 * t.chunk, 1), copied = t.make(4 * t.chunk, 2);
  t.let_go();
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.check(copied), OOC_OK);
  t.let_go();
  const uint64_t used = t.stats().host_used_bytes;
  EXPECT_TRUE(used > 0);
  EXPECT_EQ(t.core.discard(away.address), OOC_OK);
  EXPECT_EQ(t.core.discard(copied.address), OOC_OK);
  EXPECT_EQ(t.stats().host_used_bytes, 0u);
  EXPECT_EQ(rewrite(t, away, 3), OOC_OK);
  EXPECT_EQ(rewrite(t, copied, 4), OOC_OK);
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.check(away), OOC_OK);
  EXPECT_EQ(t.check(copied), OOC_OK);
}

TEST(what_is_in_use_is_not_discarded) {
  CoreTest t(Limits{8, 64, 64, 2});
  const Variable variable = t.make(2 * t.chunk, 1), small = t.make(64, 2);
  uint64_t token = 0;
  EXPECT_EQ(t.core.pin(variable.address, OOC_READ, &token), OOC_OK);
  EXPECT_EQ(t.core.discard(variable.address), OOC_INVALID);
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  EXPECT_EQ(t.call("user", {reads(variable)}, [&] { EXPECT_EQ(t.core.discard(variable.address), OOC_INVALID); }), OOC_OK);
  EXPECT_EQ(t.check(variable), OOC_OK);
  EXPECT_EQ(t.core.discard(small.address), OOC_INVALID);
  EXPECT_EQ(t.core.discard(&token), OOC_INVALID);
  EXPECT_EQ(t.check(small), OOC_OK);
}

TEST(small_variables_are_not_discarded_while_the_core_sleeps) {
  CoreTest t(Limits{8, 64, 64, 2});
  const Variable variable = t.make(2 * t.chunk, 1), small = t.make(64, 2);
  t.let_go();
  uint64_t held = 0;
  EXPECT_EQ(t.core.sleep(&held), OOC_OK);
  EXPECT_EQ(t.core.discard(small.address), OOC_INVALID);
  EXPECT_EQ(t.core.discard(variable.address), OOC_OK);
  EXPECT_EQ(t.check(small), OOC_OK);
}

TEST(its_next_use_is_the_birth_of_another_variable) {
  CoreTest t(Limits{8, 64, 0, 2});
  ooc_iteration ended{};
  EXPECT_EQ(t.core.boundary(&ended), OOC_OK);
  uint64_t fingerprint = 0;
  for (int round = 0; round < 3; ++round) {
    Variable variable = t.make(4 * t.chunk, 1);
    EXPECT_EQ(t.check(variable), OOC_OK);
    EXPECT_EQ(t.core.discard(variable.address), OOC_OK);
    const Variable other = t.make(8 * t.chunk, 2);
    t.core.free(other.address);
    t.let_go();
    EXPECT_EQ(rewrite(t, variable, 1), OOC_OK);
    EXPECT_EQ(t.check(variable), OOC_OK);
    t.core.free(variable.address);
    EXPECT_EQ(t.core.boundary(&ended), OOC_OK);
    EXPECT_EQ(ended.functions, 6u);
    EXPECT_TRUE(fingerprint == 0 || fingerprint == ended.fingerprint);
    fingerprint = ended.fingerprint;
  }
  const std::shared_ptr<Trace> trace = t.core.trace(fingerprint);
  ASSERT_EQ(trace->variables.size(), size_t{3});
  EXPECT_EQ(trace->variables[0].born, 0);
  EXPECT_EQ(trace->variables[0].died, 1);
  EXPECT_EQ(trace->variables[2].born, 4);
  EXPECT_EQ(trace->variables[2].died, 5);
  EXPECT_EQ(trace->variables[2].previous, -1);
}

TEST(a_discarded_variable_that_is_freed_is_gone) {
  CoreTest t(Limits{8, 64, 0, 2});
  const Variable variable = t.make(4 * t.chunk, 1);
  EXPECT_EQ(t.core.discard(variable.address), OOC_OK);
  t.core.free(variable.address);
  EXPECT_EQ(t.stats().live_bytes, 0u);
  t.expect_intact({t.make(8 * t.chunk, 2)});
}
