// A budget that changes while variables live, and the wait for everything that is enqueued.
#include <chrono>
#include <thread>

#include "core_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

void lowering_moves_variables_out(bool asynchronous) {
  Limits limits{8};
  limits.asynchronous = asynchronous;
  CoreTest t(limits);
  const std::vector<Variable> variables = t.make_many(4, 2 * t.chunk);
  EXPECT_EQ(t.stats().device_bytes, 8 * t.chunk);
  ASSERT_EQ(t.core.set_budget(3 * t.chunk), OOC_OK);
  EXPECT_EQ(t.stats().budget_bytes, 3 * t.chunk);
  EXPECT_TRUE(t.stats().device_bytes <= 3 * t.chunk);
  t.expect_intact(variables);
  EXPECT_TRUE(t.stats().device_bytes <= 3 * t.chunk);
  ASSERT_EQ(t.core.set_budget(8 * t.chunk), OOC_OK);
  t.expect_intact(variables);
  EXPECT_TRUE(t.stats().device_bytes > 3 * t.chunk);
}

}  // namespace

TEST(lowering_moves_variables_out) { lowering_moves_variables_out(false); }
TEST(lowering_moves_variables_out_on_streams) { lowering_moves_variables_out(true); }

TEST(free_and_cached_chunks_leave_first) {
  CoreTest t({8});
  const std::vector<Variable> kept = t.make_many(2, t.chunk);
  t.free(t.make_many(3, 2 * t.chunk));
  EXPECT_EQ(t.stats().device_bytes, 8 * t.chunk);
  ASSERT_EQ(t.core.set_budget(2 * t.chunk), OOC_OK);
  EXPECT_EQ(t.stats().swap_out_bytes, uint64_t{0});
  EXPECT_EQ(t.stats().device_bytes, 2 * t.chunk);
  t.expect_intact(kept);
  ASSERT_EQ(t.core.set_budget(8 * t.chunk), OOC_OK);
}

TEST(a_budget_below_what_is_pinned_is_refused) {
  CoreTest t({8});
  const std::vector<Variable> variables = t.make_many(3, 2 * t.chunk);
  uint64_t tokens[3];
  for (size_t i = 0; i < 3; ++i) ASSERT_EQ(t.core.pin(variables[i].address, OOC_READ, &tokens[i]), OOC_OK);
  EXPECT_EQ(t.core.set_budget(4 * t.chunk), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), std::to_string(6 * t.chunk)));
  EXPECT_EQ(t.stats().budget_bytes, 8 * t.chunk);
  t.free(t.make_many(1, 2 * t.chunk));  // all eight chunks can still be had
  for (const uint64_t token : tokens) ASSERT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  ASSERT_EQ(t.core.set_budget(4 * t.chunk), OOC_OK);
  t.expect_intact(variables);
  ASSERT_EQ(t.core.set_budget(8 * t.chunk), OOC_OK);
}

TEST(a_budget_that_the_host_has_no_room_for_is_refused) {
  CoreTest t({8, 1});
  const std::vector<Variable> variables = t.make_many(4, 2 * t.chunk);
  EXPECT_EQ(t.core.set_budget(2 * t.chunk), OOC_OUT_OF_MEMORY);
  EXPECT_EQ(t.stats().budget_bytes, 8 * t.chunk);
  t.expect_intact(variables);
}

TEST(impossible_budgets_are_refused) {
  CoreTest t({4});
  EXPECT_EQ(t.core.set_budget(t.chunk - 1), OOC_INVALID);
  EXPECT_EQ(t.core.set_budget(5 * t.chunk), OOC_INVALID);
  EXPECT_TRUE(contains(last_error(), "OOC_BUDGET"));
  EXPECT_EQ(t.call("f", {}, [&] { EXPECT_EQ(t.core.set_budget(2 * t.chunk), OOC_INVALID); }), OOC_OK);
  EXPECT_EQ(t.stats().budget_bytes, 4 * t.chunk);
}

TEST(synchronize_waits_for_streams) {
  Limits limits{4};
  limits.asynchronous = true;
  CoreTest t(limits);
  Stream stream;
  const Variable late = t.make(t.chunk, 1);
  void* pinned = nullptr;
  ASSERT_OK(driver().cuMemHostAlloc(&pinned, t.chunk, 0));
  std::fill_n(static_cast<unsigned char*>(pinned), t.chunk, static_cast<unsigned char>(0));
  Gate gate;
  const ooc_operand operand = reads(late);
  ASSERT_EQ(t.core.function_begin(t.id("read"), &operand, 1, stream.handle), OOC_OK);
  gate.close_on(stream);
  ASSERT_OK(driver().cuMemcpyDtoHAsync(pinned, late.pointer(), t.chunk, stream.handle));
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  std::thread opener([&gate] {
    CUcontext context = nullptr;
    EXPECT_OK(driver().cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_OK(driver().cuCtxSetCurrent(context));
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    gate.open();
    EXPECT_OK(driver().cuDevicePrimaryCtxRelease(0));
  });
  EXPECT_EQ(t.core.synchronize(), OOC_OK);
  const auto* found = static_cast<const unsigned char*>(pinned);
  EXPECT_TRUE(Bytes(found, found + t.chunk) == pattern(t.chunk, 1));
  opener.join();
  EXPECT_OK(driver().cuMemFreeHost(pinned));
}
