// Variables whose bytes are given up, and written again at the same addresses.
#include <chrono>
#include <thread>

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
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.expect_intact({t.make(8 * t.chunk, 2)});
}

TEST(what_leaves_is_given_up_once_it_has_left) {
  CoreTest t(Limits{8, 64, 0, 2});
  const Variable variable = t.make(4 * t.chunk, 1);
  t.let_go();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  Region* region = t.region(variable);
  ASSERT_TRUE(t.core.move_out(lock, Piece{region, 0, 2}, transfers, false));
  ASSERT_TRUE(region->moving > 0);
  lock.unlock();
  std::thread settles([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    Lock own(t.core.mutex());
    for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.settle(own, transfer));
  });
  EXPECT_EQ(t.core.discard(variable.address), OOC_OK);
  settles.join();
  EXPECT_EQ(t.stats().resident_bytes, 0u);
  EXPECT_EQ(t.stats().host_used_bytes, 0u);
}

// ---- who is told of uses --------------------------------------------------------------------------------------------

namespace {

struct Told {
  CoreTest* test = nullptr;
  std::vector<const void*> used, freed;
  Variable* lost = nullptr;        // is written again before it is used
  const void* refused = nullptr;   // whoever uses it fails
  const void* kept = nullptr;      // is freed later
  std::vector<uint64_t> budgets;   // as they were before they fell
  bool refuses_budgets = false;
  bool busy = false;
};
Told told;

int before_use(uint32_t, const ooc_operand* operands, uint32_t count) {
  if (told.busy) return OOC_OK;
  for (uint32_t i = 0; i < count; ++i) {
    told.used.push_back(operands[i].address);
    if (operands[i].address == told.refused) return ooc_refuse(OOC_INVALID, "refused by the test");
    if (told.lost == nullptr || operands[i].address != told.lost->address) continue;
    told.busy = true;
    EXPECT_EQ(rewrite(*told.test, *std::exchange(told.lost, nullptr), 7), OOC_OK);
    told.busy = false;
  }
  return OOC_OK;
}
int before_free(void* address) {
  told.freed.push_back(address);
  return address == told.kept ? 1 : 0;
}
int before_budget_falls() {
  told.budgets.push_back(told.test->stats().budget_bytes);
  if (told.refuses_budgets) return ooc_refuse(OOC_OUT_OF_MEMORY, "refused by the test");
  return told.lost == nullptr ? OOC_OK : rewrite(*told.test, *std::exchange(told.lost, nullptr), 7);
}
const ooc_watcher watcher{before_use, before_free, before_budget_falls};

}  // namespace

TEST(what_is_lost_can_be_written_again_before_any_use) {
  CoreTest t(Limits{8, 64, 0, 2});
  Variable variable = t.make(4 * t.chunk, 1);
  t.let_go();
  t.core.watch_uses(&watcher);
  for (const bool pins : {false, true}) {
    told = Told{};
    told.test = &t;
    told.lost = &variable;
    EXPECT_EQ(t.core.discard(variable.address), OOC_OK);
    uint64_t token = 0;
    if (pins) EXPECT_EQ(t.core.pin(variable.address, OOC_READ, &token), OOC_OK);
    else EXPECT_EQ(t.check(variable), OOC_OK);
    EXPECT_TRUE(told.lost == nullptr);
    EXPECT_EQ(told.used.size(), size_t{1});
    if (pins) EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
    EXPECT_EQ(t.check(variable), OOC_OK);
    t.let_go();
  }
  t.core.watch_uses(nullptr);
  told = Told{};
  EXPECT_EQ(t.check(variable), OOC_OK);
  EXPECT_TRUE(told.used.empty());
}

TEST(a_use_that_is_refused_has_not_begun) {
  CoreTest t(Limits{8, 64, 0, 2});
  const Variable variable = t.make(4 * t.chunk, 1);
  t.let_go();
  told = Told{};
  told.refused = variable.address;
  t.core.watch_uses(&watcher);
  const uint32_t functions = t.core.recorder().current().functions();
  EXPECT_EQ(t.check(variable), OOC_INVALID);
  EXPECT_TRUE(contains(last_error(), "refused by the test"));
  EXPECT_TRUE(!t.core.in_function());
  EXPECT_EQ(t.core.recorder().current().functions(), functions);
  uint64_t token = 0;
  EXPECT_EQ(t.core.pin(variable.address, OOC_READ, &token), OOC_INVALID);
  EXPECT_EQ(t.stats().pinned_bytes, 0u);
  t.core.watch_uses(nullptr);
  EXPECT_EQ(t.check(variable), OOC_OK);
}

TEST(what_is_lost_can_be_written_again_before_the_budget_falls) {
  CoreTest t(Limits{8, 64, 0, 2});
  Variable variable = t.make(4 * t.chunk, 1);
  t.let_go();
  told = Told{};
  told.test = &t;
  told.lost = &variable;
  EXPECT_EQ(t.core.discard(variable.address), OOC_OK);
  t.core.watch_uses(&watcher);
  EXPECT_EQ(t.core.set_budget(3 * t.chunk), OOC_OK);  // it does not fit any more
  EXPECT_TRUE(told.lost == nullptr);
  EXPECT_TRUE(told.budgets == std::vector<uint64_t>{8 * t.chunk});
  EXPECT_EQ(t.core.set_budget(6 * t.chunk), OOC_OK);  // it rises
  EXPECT_EQ(told.budgets.size(), size_t{1});
  told.refuses_budgets = true;
  EXPECT_EQ(t.core.set_budget(2 * t.chunk), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), "refused by the test"));
  EXPECT_EQ(t.stats().budget_bytes, 6 * t.chunk);
  t.core.watch_uses(nullptr);
  EXPECT_EQ(t.check(variable), OOC_OK);
}

TEST(memory_is_freed_later_if_whoever_watches_says_so) {
  CoreTest t(Limits{8, 64, 0, 2});
  const Variable kept = t.make(2 * t.chunk, 1), other = t.make(2 * t.chunk, 2);
  told = Told{};
  told.kept = kept.address;
  t.core.watch_uses(&watcher);
  t.core.free(kept.address);
  t.core.free(other.address);
  EXPECT_EQ(told.freed.size(), size_t{2});
  EXPECT_EQ(t.stats().live_bytes, 2 * t.chunk);
  EXPECT_EQ(t.check(kept), OOC_OK);
  told.kept = nullptr;
  t.core.free(kept.address);
  EXPECT_EQ(t.stats().live_bytes, 0u);
  t.core.watch_uses(nullptr);
}

TEST(what_a_user_may_write_at_any_time_is_exposed) {
  CoreTest t(Limits{8, 64, 0, 2});
  const Variable variable = t.make(2 * t.chunk, 1);
  EXPECT_TRUE(!t.core.exposed(variable.address));
  uint64_t reads = 0, writes = 0;
  EXPECT_EQ(t.core.pin(variable.address, OOC_READ, &reads), OOC_OK);
  EXPECT_TRUE(!t.core.exposed(variable.address));
  EXPECT_EQ(t.core.pin(variable.address, OOC_READ | OOC_WRITE, &writes), OOC_OK);
  EXPECT_TRUE(t.core.exposed(variable.address));
  EXPECT_EQ(t.core.unpin(writes, OOC_READ | OOC_WRITE), OOC_OK);
  EXPECT_TRUE(!t.core.exposed(variable.address));
  EXPECT_EQ(t.core.unpin(reads, OOC_READ), OOC_OK);
  EXPECT_TRUE(!t.core.exposed(&reads));
}

TEST(sequences_that_give_up_different_variables_are_different) {
  CoreTest t(Limits{8, 64, 0, 2});
  ooc_iteration ended{};
  EXPECT_EQ(t.core.boundary(&ended), OOC_OK);
  std::vector<uint64_t> fingerprints;
  for (const size_t discarded : {size_t{0}, size_t{1}, size_t{2}, size_t{0}}) {
    std::vector<Variable> variables = t.make_many(2, t.chunk);
    t.let_go();
    if (discarded > 0) EXPECT_EQ(t.core.discard(variables[discarded - 1].address), OOC_OK);
    t.free(variables);
    EXPECT_EQ(t.core.boundary(&ended), OOC_OK);
    fingerprints.push_back(ended.fingerprint);
  }
  EXPECT_EQ(fingerprints[0], fingerprints[3]);
  EXPECT_TRUE(fingerprints[0] != fingerprints[1] && fingerprints[0] != fingerprints[2] && fingerprints[1] != fingerprints[2]);
}
