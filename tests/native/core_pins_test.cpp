// Pins: what a function uses or allocates stays on the device, and for how long.
#include <thread>

#include "core_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// Asks for the whole budget: everything that nothing pins has to leave.
void press(CoreTest& t) { ASSERT_EQ(t.core.evict_all(), OOC_OK); }

uint64_t resident_bytes(CoreTest& t) { return t.stats().resident_bytes; }

}  // namespace

TEST(operands_and_allocations_stay_while_the_function_runs) {
  CoreTest t({8});
  const Variable operand = t.make(2 * t.chunk, 1);
  t.let_go();
  ASSERT_EQ(t.begin("f", {reads(operand)}), OOC_OK);
  Variable workspace{t.must_malloc(t.chunk), t.chunk, 2};
  t.put(workspace);
  press(t);
  EXPECT_EQ(resident_bytes(t), 3 * t.chunk);
  EXPECT_EQ(t.stats().pinned_bytes, 3 * t.chunk);
  EXPECT_TRUE(t.holds(operand) && t.holds(workspace));
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
}

TEST(pins_last_until_the_thread_begins_its_next_function) {
  CoreTest t({8});
  const Variable v = t.make(2 * t.chunk, 1);
  press(t);
  EXPECT_EQ(resident_bytes(t), 2 * t.chunk);  // its caller may still read it
  EXPECT_TRUE(t.holds(v));
  t.let_go();
  press(t);
  EXPECT_EQ(resident_bytes(t), uint64_t{0});
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(an_allocation_outside_a_function_is_pinned_until_the_next_one) {
  CoreTest t({8});
  Variable v{t.must_malloc(t.chunk), t.chunk, 4};
  press(t);
  t.put(v);
  t.let_go();
  press(t);
  EXPECT_EQ(resident_bytes(t), uint64_t{0});
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(an_allocation_by_a_helper_thread_is_pinned_while_functions_run) {
  CoreTest t({8});
  t.let_go();
  ASSERT_EQ(t.begin("parallel", {}), OOC_OK);
  Variable v{nullptr, t.chunk, 4};
  std::thread helper([&] { v.address = t.core.malloc(t.chunk); });  // such a thread runs no functions of its own
  helper.join();
  ASSERT_TRUE(v.address != nullptr);
  std::thread([&t] { t.let_go(); }).join();  // another thread's function: the one that the helper works for still runs
  press(t);
  EXPECT_EQ(resident_bytes(t), t.chunk);
  t.put(v);
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
  t.let_go();
  press(t);
  EXPECT_EQ(resident_bytes(t), uint64_t{0});
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(the_pins_of_a_thread_end_with_it) {
  CoreTest t({8});
  std::thread other([&] { t.make(2 * t.chunk, 1); });
  other.join();
  press(t);
  EXPECT_EQ(resident_bytes(t), uint64_t{0});
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
}

TEST(a_thread_that_dies_within_a_function_blocks_nobody) {
  CoreTest t({2});
  const Variable v = t.make(2 * t.chunk, 1);
  t.let_go();
  std::thread other([&] { EXPECT_EQ(t.begin("never ends", {reads(v)}), OOC_OK); });
  other.join();
  const Variable next = t.make(2 * t.chunk, 2);  // would wait for the function for ever
  EXPECT_EQ(t.check(v), OOC_OK);
  EXPECT_EQ(t.check(next), OOC_OK);
  EXPECT_EQ(t.core.detach(), t.core.device().host_accessible() ? OOC_OK : OOC_INVALID);  // needs that no function runs
}

TEST(idle_threads_give_up_their_pins_when_room_is_needed) {
  CoreTest t({4});
  Variable v{};
  std::thread other([&] {
    v = t.make(3 * t.chunk, 1);
    const Variable next{t.core.malloc(t.chunk), t.chunk, 0};  // the thread is alive and idle all this time
    std::thread third([&] { t.make(4 * t.chunk, 2); });       // and this one needs the whole budget
    third.join();
    t.core.free(next.address);
  });
  other.join();
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(external_pins_hold_until_their_token_is_given_back) {
  CoreTest t({4});
  const Variable v = t.make(2 * t.chunk, 1);
  const Variable other = t.make(4 * t.chunk, 2);
  t.let_go();
  uint64_t token = 0, again = 0;
  char* inside = static_cast<char*>(v.address) + t.chunk + 5;
  ASSERT_EQ(t.core.pin(inside, OOC_READ, &token), OOC_OK);  // brings it in
  EXPECT_TRUE(t.holds(v));
  ASSERT_EQ(t.core.pin(v.address, OOC_READ, &again), OOC_OK);
  EXPECT_EQ(t.core.unpin(again, OOC_READ), OOC_OK);
  t.let_go();
  press(t);
  EXPECT_TRUE(t.holds(v));  // pinned twice, unpinned once
  EXPECT_EQ(t.check(other), OOC_OUT_OF_MEMORY);
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  EXPECT_EQ(t.check(other), OOC_OK);
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_INVALID);  // once too often
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(a_token_of_a_freed_variable_does_nothing_to_its_successor) {
  CoreTest t({4});
  const Variable first = t.make(t.chunk, 1);
  uint64_t old_token = 0, token = 0;
  ASSERT_EQ(t.core.pin(first.address, OOC_READ, &old_token), OOC_OK);
  t.core.free(first.address);
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  const Variable second = t.make(t.chunk, 2);
  ASSERT_EQ(second.address, first.address);
  ASSERT_EQ(t.core.pin(second.address, OOC_READ, &token), OOC_OK);
  EXPECT_EQ(t.core.unpin(old_token, OOC_READ), OOC_OK);
  t.let_go();
  press(t);
  EXPECT_TRUE(t.holds(second));  // its own pin is still there
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
}

TEST(small_and_foreign_addresses_can_be_pinned_without_effect) {
  CoreTest t({4, 64, 1000});
  void* small = t.must_malloc(100);
  int local = 0;
  for (const void* address : {static_cast<const void*>(small), static_cast<const void*>(&local)}) {
    uint64_t token = 0;
    EXPECT_EQ(t.core.pin(address, OOC_WRITE, &token), OOC_OK);
    EXPECT_EQ(t.core.unpin(token, OOC_WRITE), OOC_OK);
    EXPECT_EQ(t.core.pin(address, OOC_READ, nullptr), OOC_OK);
  }
  EXPECT_EQ(t.stats().external_pin_count, uint64_t{0});
  t.core.free(small);
}

TEST(memory_pinned_for_writing_is_never_clean) {
  CoreTest t({4});
  Variable v = t.make(2 * t.chunk, 1);
  t.let_go();
  press(t);
  EXPECT_EQ(t.check(v), OOC_OK);  // clean now
  uint64_t token = 0;
  ASSERT_EQ(t.core.pin(v.address, OOC_WRITE, &token), OOC_OK);
  EXPECT_EQ(t.check(v), OOC_OK);  // a reader meanwhile
  v.seed = 9;
  t.put(v);  // no function
  EXPECT_EQ(t.core.unpin(token, OOC_WRITE), OOC_OK);
  t.let_go();
  press(t);
  EXPECT_EQ(t.check(v), OOC_OK);
}

TEST(opaque_results_stay_pinned_until_freed) {
  CoreTest t({8});
  const Variable operand = t.make(t.chunk, 1);
  uint64_t token = 0;
  ASSERT_EQ(t.begin("opaque", {reads(operand)}), OOC_OK);
  ASSERT_EQ(t.core.pin(operand.address, OOC_READ, &token), OOC_OK);  // within the function; not an allocation of it
  Variable kept{t.must_malloc(t.chunk), t.chunk, 2};
  t.core.free(t.must_malloc(t.chunk));
  t.put(kept);
  EXPECT_EQ(t.core.function_end(true), OOC_OK);
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  t.let_go();
  press(t);
  EXPECT_EQ(resident_bytes(t), t.chunk);
  EXPECT_TRUE(t.holds(kept));
  t.core.free(kept.address);
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  EXPECT_EQ(t.check(operand), OOC_OK);
}

TEST(a_pin_that_fails_pins_nothing) {
  CoreTest t({4});
  const Variable a = t.make(3 * t.chunk, 1);
  const Variable b = t.make(3 * t.chunk, 2);
  t.let_go();
  uint64_t token = 0, other = 0;
  ASSERT_EQ(t.core.pin(a.address, OOC_READ, &token), OOC_OK);
  EXPECT_EQ(t.core.pin(b.address, OOC_WRITE, &other), OOC_OUT_OF_MEMORY);
  EXPECT_EQ(t.stats().pinned_bytes, 3 * t.chunk);
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  t.let_go();
  press(t);
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  t.expect_intact({a, b});
}

TEST(functions_do_not_nest) {
  CoreTest t;
  EXPECT_EQ(t.core.function_end(false), OOC_INVALID);
  ASSERT_EQ(t.begin("outer", {}), OOC_OK);
  EXPECT_TRUE(t.core.in_function());
  EXPECT_EQ(t.begin("inner", {}), OOC_NESTED);
  EXPECT_TRUE(contains(last_error(), "within a function"));
  ooc_iteration ended;
  EXPECT_EQ(t.core.boundary(&ended), OOC_INVALID);  // an iteration ends between functions
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_TRUE(!t.core.in_function());
  EXPECT_EQ(t.core.boundary(&ended), OOC_OK);
  EXPECT_EQ(ended.functions, 1u);
}
