// The plain pair: allocation for programs that announce no functions.
#include <string>
#include <thread>
#include <vector>

#include "core_fixture.h"
#include "ooc_alloc.h"
#include "quantities.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// A core behind the pair, for one test.
struct Pair {
  explicit Pair(const Limits& limits = {}) {
    const ooc_config config = make_config(limits);
    core = ooc_core_create(&config);
    if (core == nullptr) fail(__FILE__, __LINE__, ooc_last_error());
    ASSERT_TRUE(core != nullptr);
    ooc_set_default_core(core);
  }
  ~Pair() { ooc_core_destroy(core); }

  ooc_stats stats() const {
    ooc_stats result;
    ooc_core_read_stats(core, &result);
    return result;
  }
  void* must_malloc(uint64_t bytes) const {
    void* address = ooc_malloc(static_cast<ssize_t>(bytes), 0, nullptr);
    if (address == nullptr) fail(__FILE__, __LINE__, ooc_last_error());
    ASSERT_TRUE(address != nullptr);
    return address;
  }
  Variable make(uint64_t bytes, unsigned seed) const {
    Variable variable{must_malloc(bytes), bytes, seed};
    write(variable.pointer(), pattern(bytes, seed));
    return variable;
  }
  // A function of somebody who shares the core, over as much memory as the budget has left beside `chunks`.
  void press(uint64_t chunks) const {
    const uint64_t bytes = stats().budget_bytes - chunks * granularity();
    ASSERT_EQ(ooc_core_function_begin(core, ooc_core_function_id(core, "press"), nullptr, 0), OOC_OK);
    void* all = ooc_core_malloc(core, bytes);
    EXPECT_TRUE(all != nullptr);
    ASSERT_EQ(ooc_core_function_end(core, 0), OOC_OK);
    ooc_core_free(core, all);
    ASSERT_EQ(ooc_core_evict_all(core), OOC_OK);
  }

  ooc_core* core = nullptr;
};

bool holds(const Variable& variable) {
  return testing::read(variable.pointer(), variable.bytes) == pattern(variable.bytes, variable.seed);
}

}  // namespace

TEST(memory_of_the_pair_never_leaves_the_device) {
  for (const bool asynchronous : {false, true}) {
    Limits limits;
    limits.asynchronous = asynchronous;
    const Pair pair(limits);
    const uint64_t chunk = granularity();
    const Variable kept = pair.make(2 * chunk, 1);
    pair.press(2);
    EXPECT_EQ(pair.stats().swap_out_bytes, uint64_t{0});
    EXPECT_EQ(pair.stats().pinned_bytes, 2 * chunk);
    EXPECT_TRUE(holds(kept));
    ooc_free(kept.address, static_cast<ssize_t>(kept.bytes), 0, nullptr);
    EXPECT_EQ(pair.stats().pinned_bytes, uint64_t{0});
    EXPECT_EQ(pair.stats().live_bytes, uint64_t{0});
    EXPECT_EQ(ooc_core_audit(pair.core), OOC_OK);
  }
}

TEST(freed_memory_is_given_out_again_without_a_driver_call) {
  const Pair pair;
  const uint64_t bytes = 3 * granularity();
  void* first = pair.must_malloc(bytes);
  ooc_free(first, static_cast<ssize_t>(bytes), 0, nullptr);
  const ooc_stats before = pair.stats();
  EXPECT_EQ(pair.must_malloc(bytes), first);
  EXPECT_EQ(pair.stats().driver_calls_map, before.driver_calls_map);
  EXPECT_EQ(pair.stats().cache_hits, before.cache_hits + 1);
}

TEST(nothing_is_kept_of_an_allocation_that_no_function_follows) {
  // Each used to leave an entry until a function began, and here none ever does.
  const Pair pair;
  const uint64_t chunk = granularity();
  for (int i = 0; i < 50; ++i) ooc_free(pair.must_malloc(chunk), static_cast<ssize_t>(chunk), 0, nullptr);
  void* all = pair.must_malloc(8 * chunk);
  EXPECT_EQ(pair.stats().pinned_bytes, 8 * chunk);
  ooc_free(all, 0, 0, nullptr);
  EXPECT_EQ(pair.stats().pinned_bytes, uint64_t{0});
}

TEST(small_allocations_lie_in_slabs) {
  Limits limits;
  limits.small_limit = granularity() / 4;
  const Pair pair(limits);
  const Variable small = pair.make(1000, 5);
  EXPECT_EQ(pair.stats().small_live_bytes, uint64_t{1000});
  EXPECT_TRUE(holds(small));
  ooc_free(small.address, 1000, 0, nullptr);
  EXPECT_EQ(pair.stats().small_live_bytes, uint64_t{0});
}

TEST(what_is_not_an_allocation_is_refused_or_ignored) {
  const Pair pair;
  const auto chunk = static_cast<ssize_t>(granularity());
  EXPECT_TRUE(ooc_malloc(0, 0, nullptr) == nullptr);
  EXPECT_TRUE(ooc_malloc(-1, 0, nullptr) == nullptr);
  EXPECT_TRUE(contains(ooc_last_error(), "-1 bytes"));
  EXPECT_TRUE(ooc_malloc(chunk, 1, nullptr) == nullptr);
  EXPECT_TRUE(contains(ooc_last_error(), "device 1"));
  int elsewhere = 0;
  const Variable live = pair.make(static_cast<uint64_t>(chunk), 7);
  ooc_free(nullptr, 0, 0, nullptr);
  ooc_free(&elsewhere, sizeof elsewhere, 0, nullptr);
  ooc_free(static_cast<char*>(live.address) + 64, chunk, 0, nullptr);  // not its start
  EXPECT_EQ(pair.stats().live_bytes, static_cast<uint64_t>(chunk));
  EXPECT_TRUE(holds(live));
  ooc_free(live.address, chunk, 0, nullptr);
  ooc_free(live.address, chunk, 0, nullptr);
  EXPECT_EQ(pair.stats().live_bytes, uint64_t{0});
  EXPECT_EQ(ooc_core_audit(pair.core), OOC_OK);
}

TEST(more_than_the_budget_is_a_null_and_a_reason) {
  const Pair pair;
  const auto chunk = static_cast<ssize_t>(granularity());
  void* most = pair.must_malloc(static_cast<uint64_t>(7 * chunk));
  EXPECT_TRUE(ooc_malloc(2 * chunk, 0, nullptr) == nullptr);
  EXPECT_TRUE(contains(ooc_last_error(), "OOC_BUDGET=" + std::to_string(9 * chunk)));
  ooc_free(most, 7 * chunk, 0, nullptr);
  ooc_free(pair.must_malloc(static_cast<uint64_t>(2 * chunk)), 2 * chunk, 0, nullptr);
}

TEST(threads_allocate_and_free_at_once) {
  Limits limits;
  limits.budget_chunks = 32;
  const Pair pair(limits);
  CUcontext context = nullptr;
  ASSERT_EQ(driver().cuCtxGetCurrent(&context), CUDA_SUCCESS);
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 2; ++number)
    threads.emplace_back([&, number] {
      EXPECT_EQ(driver().cuCtxSetCurrent(context), CUDA_SUCCESS);
      for (unsigned i = 0; i < 200; ++i) {
        const uint64_t bytes = (1 + (i + number) % 4) * granularity();
        const Variable mine = pair.make(bytes, number * 1000 + i);
        EXPECT_TRUE(holds(mine));
        ooc_free(mine.address, static_cast<ssize_t>(bytes), 0, nullptr);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pair.stats().live_bytes, uint64_t{0});
  EXPECT_EQ(pair.stats().pinned_bytes, uint64_t{0});
  EXPECT_EQ(ooc_core_audit(pair.core), OOC_OK);
}

TEST(a_core_that_is_gone_is_forgotten) {
  const auto chunk = static_cast<ssize_t>(granularity());
  void* address = nullptr;
  {
    const Pair pair;
    address = pair.must_malloc(static_cast<uint64_t>(chunk));
  }
  ooc_free(address, chunk, 0, nullptr);  // of a core that is gone: nothing to do, nothing touched
  setenv("OOC_ALLOC", "0", 1);           // so that a new one is not made
  EXPECT_TRUE(ooc_malloc(chunk, 0, nullptr) == nullptr);
  EXPECT_TRUE(contains(ooc_last_error(), "turns the allocator off"));
  unsetenv("OOC_ALLOC");
  const Pair next;
  EXPECT_EQ(next.stats().frees, uint64_t{0});
  EXPECT_EQ(next.stats().live_bytes, uint64_t{0});
}

TEST(a_pin_made_with_the_allocation_can_be_given_back) {
  const Pair pair;
  const uint64_t chunk = granularity();
  uint64_t token = 0;
  void* address = ooc_core_malloc_pinned(pair.core, chunk, nullptr, OOC_READ | OOC_WRITE, &token);
  ASSERT_TRUE(address != nullptr);
  const Variable variable{address, chunk, 9};
  write(variable.pointer(), pattern(chunk, 9));
  pair.press(1);
  EXPECT_EQ(pair.stats().swap_out_bytes, uint64_t{0});
  ASSERT_EQ(ooc_core_unpin(pair.core, token, OOC_READ | OOC_WRITE), OOC_OK);
  pair.press(0);
  EXPECT_EQ(pair.stats().swap_out_bytes, chunk);
  const ooc_operand operand{address, OOC_READ, 0, 0};
  ASSERT_EQ(ooc_core_function_begin(pair.core, ooc_core_function_id(pair.core, "read"), &operand, 1), OOC_OK);
  EXPECT_TRUE(holds(variable));
  ASSERT_EQ(ooc_core_function_end(pair.core, 0), OOC_OK);
}

TEST(texts_are_the_numbers_that_they_are_in_python) {
  const struct {
    const char* text;
    uint64_t bytes;
  } good[] = {{"8GiB", uint64_t{8} << 30}, {"512MB", 512000000}, {"1.5G", uint64_t{3} << 29}, {" 64 kib ", 65536},
              {"65536", 65536},            {"2k", 2048},         {"1TB", 1000000000000},      {"7b", 7}};
  for (const auto& [text, bytes] : good) {
    uint64_t found = 0;
    EXPECT_TRUE(parse_bytes(text, found));
    EXPECT_EQ(found, bytes);
  }
  uint64_t ignored = 0;
  for (const char* bad : {"", "GiB", "-1", "0", "1.2.3M", "8 gibs", "1e9", "60%"}) EXPECT_TRUE(!parse_bytes(bad, ignored));
  EXPECT_TRUE(parse_amount("60%", 1000, ignored));
  EXPECT_EQ(ignored, uint64_t{600});
  EXPECT_TRUE(parse_amount("2KiB", 1000, ignored));
  EXPECT_EQ(ignored, uint64_t{2048});
  for (const char* bad : {"0%", "101%", "%", "x%", "half"}) EXPECT_TRUE(!parse_amount(bad, 1000, ignored));
}
