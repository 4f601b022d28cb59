// A function whose allocations do not fit is run to its end on host memory, so that the error can name what it needs.
#include "core_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// Reads one variable, allocates several, as a convolution does. Returns the status of its end.
int run(CoreTest& t, const Variable& operand, const std::vector<uint64_t>& chunks, uint64_t* outside = nullptr) {
  if (const int status = t.begin("convolution", {reads(operand)})) return status;
  std::vector<Variable> made;
  for (const uint64_t count : chunks) {
    made.push_back({t.core.malloc(count * t.chunk - 5), count * t.chunk - 5, 1});
    ASSERT_TRUE(made.back().address != nullptr);
    if (outside != nullptr && !t.owns(made.back().address)) *outside += count;
    std::memset(made.back().address, 1, made.back().bytes);  // a kernel of the host writes it
  }
  const int status = t.core.function_end(false);
  t.free(made);
  return status;
}

}  // namespace

TEST(the_need_of_a_function_is_measured_to_its_end) {
  uint64_t smallest = 0;
  {
    CoreTest t({6});
    const Variable operand = t.make(2 * t.chunk, 1);
    uint64_t outside = 0;
    EXPECT_EQ(run(t, operand, {3, 2, 1, 4}, &outside), OOC_OUT_OF_MEMORY);
    EXPECT_TRUE(outside > 0);
    smallest = 12 * t.chunk;
    EXPECT_TRUE(contains(last_error(), "function convolution needs " + std::to_string(smallest) + " bytes"));
    EXPECT_TRUE(contains(last_error(), "the budget is " + std::to_string(6 * t.chunk)));
    EXPECT_TRUE(contains(last_error(), "OOC_BUDGET=" + std::to_string(smallest)));
    EXPECT_EQ(t.stats().min_budget_bytes, smallest);
    EXPECT_EQ(t.check(operand), OOC_OK);
    EXPECT_EQ(run(t, operand, {2, 2}), OOC_OK);  // the next one is not affected
    EXPECT_TRUE(t.stats().device_peak_bytes <= 6 * t.chunk);
    EXPECT_EQ(t.stats().live_bytes, operand.bytes);
  }
  CoreTest enough({smallest / granularity()});
  EXPECT_EQ(run(enough, enough.make(2 * enough.chunk, 1), {3, 2, 1, 4}), OOC_OK);
  CoreTest scarce({smallest / granularity() - 1});
  EXPECT_EQ(run(scarce, scarce.make(2 * scarce.chunk, 1), {3, 2, 1, 4}), OOC_OUT_OF_MEMORY);
}

TEST(what_a_function_frees_counts_while_it_is_there) {
  CoreTest t({6});
  const Variable operand = t.make(2 * t.chunk, 1);
  const auto names = [](uint64_t bytes) { return contains(last_error(), "needs " + std::to_string(bytes) + " bytes"); };
  const auto alternately = [&](uint64_t first, uint64_t second) {
    if (const int status = t.begin("casting", {reads(operand)})) return status;
    void* temporary = t.core.malloc(first * t.chunk);
    void* result = first > second ? nullptr : t.core.malloc(second * t.chunk);
    t.core.free(temporary);
    if (result == nullptr) result = t.core.malloc(second * t.chunk);
    const int status = t.core.function_end(false);
    t.core.free(result);
    return status;
  };
  EXPECT_EQ(alternately(2, 3), OOC_OUT_OF_MEMORY);  // both at once, and the first is gone at the end
  EXPECT_TRUE(names(7 * t.chunk));
  EXPECT_EQ(alternately(5, 3), OOC_OUT_OF_MEMORY);  // one after the other
  EXPECT_TRUE(names(7 * t.chunk));
  EXPECT_EQ(t.stats().min_budget_bytes, 7 * t.chunk);
}

TEST(a_function_that_writes_is_not_measured) {
  CoreTest t({4});
  Variable operand = t.make(2 * t.chunk, 1);
  ASSERT_EQ(t.begin("in place", {writes(operand)}), OOC_OK);
  EXPECT_TRUE(t.core.malloc(3 * t.chunk) == nullptr);
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_EQ(t.check(operand), OOC_OK);
}

TEST(the_device_holds_no_more_than_the_budget_whatever_is_asked) {
  control().reset_stats();
  const uint64_t before = get_stats().physical_bytes;
  CoreTest t({6});
  std::vector<Variable> all = t.make_many(8, 2 * t.chunk);
  EXPECT_EQ(run(t, all[0], {5, 5}), OOC_OUT_OF_MEMORY);
  EXPECT_EQ(t.call("all", {reads(all[0]), reads(all[1]), reads(all[2]), reads(all[3])}), OOC_OUT_OF_MEMORY);
  t.expect_intact(all);
  EXPECT_EQ(get_stats().physical_peak_bytes - before, 6 * t.chunk);
}

TEST(without_measuring_what_does_not_fit_fails_at_once_and_counts_for_nothing) {
  CoreTest t({6});
  const Variable operand = t.make(2 * t.chunk, 1);
  const uint64_t before = t.stats().min_budget_bytes;
  t.core.set_measuring(false);
  ASSERT_EQ(t.begin("convolution", {reads(operand)}), OOC_OK);
  EXPECT_TRUE(t.core.malloc(7 * t.chunk) == nullptr);
  EXPECT_TRUE(contains(last_error(), "function convolution needs " + std::to_string(9 * t.chunk) + " bytes"));
  EXPECT_EQ(t.core.function_end(false), OOC_OK);  // whoever called it knows
  EXPECT_EQ(t.stats().min_budget_bytes, before);  // it may run in parts yet
  t.core.set_measuring(true);
  EXPECT_EQ(run(t, operand, {7}), OOC_OUT_OF_MEMORY);
  EXPECT_EQ(t.stats().min_budget_bytes, 9 * t.chunk);
}
