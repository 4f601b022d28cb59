// Work that a library goes on with in threads of its own, on memory that is pinned for it (a collective).
#include <chrono>
#include <thread>

#include "clock.h"
#include "core_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

struct Work {
  Work(CoreTest& test, const Variable& variable) : t(test) {
    EXPECT_EQ(t.core.pin(variable.address, OOC_READ | OOC_WRITE, &token), OOC_OK);
    t.core.work_begins();
  }
  void end() {
    EXPECT_EQ(t.core.unpin(token, OOC_READ | OOC_WRITE), OOC_OK);
    t.core.work_ends();
  }

  CoreTest& t;
  uint64_t token = 0;
};

Limits limits(double wait_limit = 0) {
  Limits result{8, 64, 0, 2};
  result.wait_limit = wait_limit;
  return result;
}

// In which the other thread comes to wait; where it does not, the test says less, and not more.
void a_moment() { std::this_thread::sleep_for(std::chrono::milliseconds(60)); }

}  // namespace

TEST(a_function_waits_for_work_that_ends) {
  CoreTest t(limits());
  const Variable used = t.make(4 * t.chunk, 1), wanted = t.make(6 * t.chunk, 2);
  t.let_go();
  Work work(t, used);
  std::thread library([&] {
    t.core.device().bind_thread();
    a_moment();
    t.put({used.address, used.bytes, 3});
    work.end();
  });
  EXPECT_EQ(t.check(wanted), OOC_OK);
  library.join();
  EXPECT_EQ(t.check({used.address, used.bytes, 3}), OOC_OK);
}

TEST(a_function_gives_up_waiting_for_work_that_does_not_end) {
  CoreTest t(limits(0.2));
  const Variable used = t.make(4 * t.chunk, 1), wanted = t.make(6 * t.chunk, 2);
  t.let_go();
  Work work(t, used);
  const double began = now_seconds();
  EXPECT_EQ(t.begin("wanted", {reads(wanted)}), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), std::to_string(10 * t.chunk)));
  EXPECT_TRUE(now_seconds() - began < 10);
  work.end();
  t.expect_intact({used, wanted});
}

// Nobody but the function itself could make room for what it lacks.
TEST(a_function_that_is_too_large_beside_no_work_fails_at_once) {
  CoreTest t(limits());
  const Variable used = t.make(4 * t.chunk, 1), wanted = t.make(6 * t.chunk, 2);
  t.let_go();
  Work(t, used).end();
  uint64_t token = 0;
  EXPECT_EQ(t.core.pin(used.address, OOC_READ, &token), OOC_OK);
  EXPECT_EQ(t.begin("wanted", {reads(wanted)}), OOC_OUT_OF_MEMORY);
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  t.expect_intact({used, wanted});
}

TEST(a_function_that_begins_lets_go_of_what_work_needs) {
  CoreTest t(limits());
  const Variable used = t.make(3 * t.chunk, 1), wanted = t.make(6 * t.chunk, 2);
  t.let_go();
  Work work(t, used);
  std::thread library([&] {
    t.core.device().bind_thread();
    a_moment();
    const Variable scratch{t.must_malloc(5 * t.chunk), 5 * t.chunk, 7};
    t.put(scratch);
    a_moment();
    EXPECT_TRUE(t.holds(scratch));
    t.core.free(scratch.address);
    work.end();
  });
  EXPECT_EQ(t.check(wanted), OOC_OK);
  library.join();
  t.expect_intact({used, wanted});
}

// Functions come and go and need all the room there is; the work's memory is no operand of theirs.
TEST(what_work_allocates_stays_while_functions_begin_and_end) {
  CoreTest t(limits(0.2));
  const Variable used = t.make(2 * t.chunk, 1), large = t.make(5 * t.chunk, 9);
  const std::vector<Variable> others = t.make_many(6, 3 * t.chunk);
  t.let_go();
  Work work(t, used);
  Variable scratch{nullptr, 2 * t.chunk, 7};
  std::thread([&] {
    t.core.device().bind_thread();
    EXPECT_EQ(t.call("the library's thread has run a function, too", {}), OOC_OK);
    scratch.address = t.must_malloc(scratch.bytes);
    t.put(scratch);
  }).join();
  for (int round = 0; round < 3; ++round) t.expect_intact(others);
  EXPECT_EQ(t.begin("large", {reads(large)}), OOC_OUT_OF_MEMORY);
  std::vector<uint8_t> there(2);
  EXPECT_EQ(t.core.residency(scratch.address, there.data(), 2), 2u);
  EXPECT_TRUE(there == std::vector<uint8_t>({1, 1}));
  EXPECT_TRUE(t.holds(scratch));
  work.end();
  for (int round = 0; round < 3; ++round) t.expect_intact(others);
  t.expect_intact({scratch, used, large});
}

// Each waits for the other: the function is the one that can say so, and at once.
TEST(a_function_and_the_work_that_it_waits_for_do_not_wait_for_each_other) {
  CoreTest t(limits());
  const Variable used = t.make(3 * t.chunk, 1), operand = t.make(3 * t.chunk, 2);
  t.let_go();
  Work work(t, used);
  void* scratch = nullptr;
  std::thread library;
  const double began = now_seconds();
  ASSERT_EQ(t.begin("large", {writes(operand)}), OOC_OK);
  library = std::thread([&] {
    t.core.device().bind_thread();
    a_moment();
    scratch = t.core.malloc(3 * t.chunk);
  });
  EXPECT_TRUE(t.core.malloc(4 * t.chunk) == nullptr);
  EXPECT_TRUE(contains(last_error(), "large needs " + std::to_string(10 * t.chunk)));
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
  library.join();
  EXPECT_TRUE(scratch != nullptr);
  EXPECT_TRUE(now_seconds() - began < 10);
  t.core.free(scratch);
  work.end();
  EXPECT_EQ(t.check(used), OOC_OK);
}

TEST(work_that_cannot_fit_beside_what_is_pinned_fails_at_once) {
  CoreTest t(limits());
  const Variable used = t.make(2 * t.chunk, 1);
  t.let_go();
  Work work(t, used);
  std::thread([&] {
    t.core.device().bind_thread();
    const double began = now_seconds();
    const Variable scratch{t.must_malloc(3 * t.chunk), 3 * t.chunk, 7};
    t.put(scratch);
    EXPECT_TRUE(t.core.malloc(4 * t.chunk) == nullptr);
    EXPECT_TRUE(contains(last_error(), std::to_string(9 * t.chunk)));
    EXPECT_TRUE(now_seconds() - began < 10);
    EXPECT_TRUE(t.holds(scratch));
    t.core.free(scratch.address);
  }).join();
  work.end();
  EXPECT_EQ(t.check(used), OOC_OK);
}

// Two at once, as with buckets of gradients: what one of them lacks the other one gives back.
TEST(work_waits_for_other_work) {
  CoreTest t(limits());
  const Variable used = t.make(2 * t.chunk, 1), other = t.make(4 * t.chunk, 2);
  t.let_go();
  Work work(t, used), before(t, other);
  std::thread library([&] {
    t.core.device().bind_thread();
    a_moment();
    before.end();
  });
  std::thread([&] {
    t.core.device().bind_thread();
    void* scratch = t.core.malloc(4 * t.chunk);
    EXPECT_TRUE(scratch != nullptr);
    t.core.free(scratch);
  }).join();
  library.join();
  work.end();
  t.expect_intact({used, other});
}
