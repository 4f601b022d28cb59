// The budget: never exceeded, the smallest one that is reported is enough, and errors say what would do.
#include <random>
#include <stdexcept>

#include "core_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// A program that depends on its seed alone: functions over what lives, allocations within and outside functions, small
// ones too, frees, pins. False as soon as the core refuses anything.
bool run_program(CoreTest& t, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<Variable> live, small;
  bool refused = false;
  for (unsigned step = 0; step < 120 && !refused; ++step) {
    std::vector<ooc_operand> operands;
    std::vector<Variable> used;
    for (uint64_t i = random() % 4; i > 0 && !live.empty(); --i) {
      used.push_back(live[random() % live.size()]);
      operands.push_back(reads(used.back()));
    }
    refused = t.call("f", operands, [&] {
      for (const Variable& variable : used) EXPECT_TRUE(t.holds(variable));
      for (uint64_t i = 1 + random() % 2; i > 0; --i) {
        Variable made{nullptr, (1 + random() % 3) * t.chunk, step};
        made.address = t.core.malloc(made.bytes);
        if (!t.owns(made.address)) refused = true;
        else t.put(made), live.push_back(made);
      }
      for (int i = 0; i < 3; ++i) {
        small.push_back({t.core.malloc(1 + random() % (t.chunk / 4)), 0, 0});
        refused = refused || !t.owns(small.back().address);
      }
    }) != OOC_OK || refused;
    if (step % 7 == 0) {
      void* outside = t.core.malloc(2 * t.chunk);
      refused = refused || outside == nullptr;
      t.core.free(outside);
    }
    while (live.size() > 14 || (!live.empty() && random() % 3 == 0)) {
      std::swap(live[random() % live.size()], live.back());
      t.core.free(live.back().address);
      live.pop_back();
    }
    while (small.size() > 30 || (!small.empty() && random() % 3 != 0)) {
      std::swap(small[random() % small.size()], small.back());
      t.core.free(small.back().address);
      small.pop_back();
    }
  }
  t.free(live);
  t.free(small);
  return !refused;
}

uint64_t physical_bytes() {
  size_t free_bytes = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&free_bytes, &total));
  return total - free_bytes;
}

std::string set_up_error(const ooc_config& config) {
  try {
    const Core core(config);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(the_smallest_budget_that_is_reported_is_enough_and_no_less_is) {
  for (unsigned seed = 1; seed <= 6; ++seed) {
    Limits limits{200, 400};
    limits.small_limit = granularity() / 4;
    uint64_t smallest = 0;
    {
      CoreTest roomy(limits);
      ASSERT_TRUE(run_program(roomy, seed));
      EXPECT_EQ(roomy.stats().swap_out_bytes, uint64_t{0});
      smallest = roomy.stats().min_budget_bytes;
    }
    limits.budget_chunks = smallest / granularity();
    {
      CoreTest exact(limits);
      EXPECT_TRUE(run_program(exact, seed));
      const ooc_stats stats = exact.stats();
      EXPECT_TRUE(stats.device_peak_bytes <= smallest);
      EXPECT_TRUE(stats.swap_out_bytes > 0);
      EXPECT_EQ(stats.min_budget_bytes, smallest);  // does not depend on the budget
    }
    --limits.budget_chunks;
    CoreTest scarce(limits);
    EXPECT_TRUE(!run_program(scarce, seed));
  }
}

// With little more than half of the budget in slabs, small variables would take whole chunks.
TEST(the_smallest_budget_holds_the_small_variables_of_a_function) {
  const auto program = [](CoreTest& t) {
    bool made = true;
    ASSERT_EQ(t.begin("many", {}), OOC_OK);
    std::vector<void*> small;
    for (int i = 0; i < 96; ++i) {
      small.push_back(t.core.malloc(t.chunk / 4));
      made = made && t.owns(small.back());
    }
    made = t.core.function_end(false) == OOC_OK && made;
    for (void* address : small) t.core.free(address);
    return made;
  };
  Limits limits{200, 400, granularity() / 4};
  {
    CoreTest roomy(limits);
    EXPECT_TRUE(program(roomy));
    limits.budget_chunks = roomy.stats().min_budget_bytes / granularity();
  }
  CoreTest exact(limits);
  EXPECT_TRUE(program(exact));
}

TEST(the_driver_never_holds_more_than_the_budget) {
  const uint64_t before = physical_bytes();
  CoreTest t({6, 64, granularity() / 4});
  std::vector<Variable> live;
  uint64_t most = 0;
  for (unsigned i = 0; i < 20; ++i) {
    live.push_back(t.make((1 + i % 4) * t.chunk, i));
    t.core.free(t.must_malloc(100));
    most = std::max(most, physical_bytes() - before);
  }
  t.expect_intact(live);
  EXPECT_EQ(most, 6 * t.chunk);
  EXPECT_EQ(t.stats().device_peak_bytes, 6 * t.chunk);
}

TEST(a_function_that_cannot_fit_is_refused_with_numbers) {
  CoreTest t({4});
  const std::vector<Variable> v = t.make_many(3, 2 * t.chunk);
  t.let_go();
  const std::string chunk = std::to_string(t.chunk), six = std::to_string(6 * t.chunk);
  EXPECT_EQ(t.call("triple", {reads(v[0]), reads(v[1]), reads(v[2])}), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), "function triple needs " + six + " bytes"));
  EXPECT_TRUE(contains(last_error(), "the budget is " + std::to_string(4 * t.chunk) + " bytes"));
  EXPECT_TRUE(contains(last_error(), "OOC_BUDGET=" + six));
  EXPECT_EQ(t.stats().min_budget_bytes, 6 * t.chunk);  // so does the summary
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  EXPECT_TRUE(!t.core.in_function());
  EXPECT_EQ(t.call("pair", {reads(v[0]), reads(v[1])}), OOC_OK);  // the program can go on
  t.expect_intact(v);
}

TEST(an_allocation_that_cannot_fit_is_refused_with_numbers) {
  CoreTest t({4});
  Variable v = t.make(2 * t.chunk, 1);
  t.let_go();
  ASSERT_EQ(t.begin("grow", {writes(v)}), OOC_OK);  // it writes, so it cannot be run for the sake of measuring
  EXPECT_TRUE(t.core.malloc(3 * t.chunk) == nullptr);
  EXPECT_TRUE(contains(last_error(), "function grow needs " + std::to_string(5 * t.chunk) + " bytes"));
  t.put(v);
  void* fits = t.core.malloc(2 * t.chunk);
  EXPECT_TRUE(fits != nullptr);
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_EQ(t.check(v), OOC_OK);
  EXPECT_TRUE(t.core.malloc(100 * t.chunk) == nullptr);
  EXPECT_TRUE(contains(last_error(), "outside any function"));
}

TEST(absurd_sizes_are_refused) {
  CoreTest t({4});
  t.let_go();
  for (const uint64_t bytes : {~uint64_t{0}, ~uint64_t{0} - t.chunk, (uint64_t{1} << 32) * t.chunk,
                               ((uint64_t{1} << 32) + 1) * t.chunk, 5000 * t.chunk})
    EXPECT_TRUE(t.core.malloc(bytes) == nullptr);
  EXPECT_EQ(t.stats().live_bytes, uint64_t{0});
  const Variable empty{t.must_malloc(0), 0, 0};  // an address of its own
  t.core.free(empty.address);
}

TEST(only_the_start_of_a_variable_frees_it) {
  CoreTest t({4});
  const Variable v = t.make(2 * t.chunk, 1);
  int local = 0;
  t.core.free(static_cast<char*>(v.address) + t.chunk);
  t.core.free(&local);
  t.core.free(nullptr);
  EXPECT_EQ(t.stats().live_bytes, 2 * t.chunk);
  EXPECT_EQ(t.check(v), OOC_OK);
  t.core.free(v.address);
  t.core.free(v.address);
  EXPECT_EQ(t.stats().live_bytes, uint64_t{0});
}

TEST(without_host_memory_the_error_says_so_and_nothing_is_lost) {
  CoreTest t({4, 1});
  const std::vector<Variable> v = t.make_many(2, 2 * t.chunk);
  t.let_go();
  EXPECT_TRUE(t.core.malloc(2 * t.chunk) == nullptr);
  if (!EXPECT_TRUE(contains(last_error(), CoreTest::store_budget()))) std::fprintf(stderr, "%s\n", last_error().c_str());
  EXPECT_TRUE(contains(last_error(), std::to_string(t.chunk) + " bytes"));
  t.expect_intact(v);
  t.core.free(v[0].address);
  t.core.free(t.must_malloc(2 * t.chunk));
  EXPECT_EQ(t.check(v[1]), OOC_OK);
}

TEST(host_memory_of_clean_copies_is_given_to_those_that_must_leave) {
  CoreTest t({4, 2});
  const Variable a = t.make(2 * t.chunk, 1);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.check(a), OOC_OK);           // on the device, and its copy fills the host budget
  const Variable b = t.make(2 * t.chunk, 2);
  EXPECT_EQ(t.check(a), OOC_OK);           // b is older now
  const Variable c = t.make(2 * t.chunk, 3);  // b must leave; the copy of a is not needed
  EXPECT_EQ(t.check(a), OOC_OK);
  EXPECT_TRUE(t.stats().host_used_bytes <= 2 * t.chunk);
  t.core.free(c.address);
  t.expect_intact({a, b});
}

TEST(host_memory_of_a_copy_under_way_is_not_given_to_another) {
  CoreTest t({6, 4});
  const std::vector<Variable> v = t.make_many(3, 2 * t.chunk);
  t.let_go();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  ASSERT_TRUE(t.core.transitions().start_out(lock, {t.region(v[0]), 0, 2}, transfers));
  lock.unlock();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);  // there is room in host memory for one of the two
  lock.lock();
  for (const Transfer& transfer : transfers) t.core.transitions().settle(lock, transfer);
  lock.unlock();
  EXPECT_EQ(t.resident(v[0]) + t.resident(v[1]), 0u);
  EXPECT_EQ(t.resident(v[2]), test_tiers() > 0 ? 0u : 2u);  // a disk below takes the block of the one that left before it
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.core.free(v[2].address);
  t.expect_intact({v[0], v[1]});
}

TEST(without_host_memory_clean_variables_can_still_leave) {
  CoreTest t({6, 4});
  const Variable clean = t.make(4 * t.chunk, 1);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);  // its copy fills the host budget
  const Variable dirty = t.make(2 * t.chunk, 2);
  EXPECT_EQ(t.check(clean), OOC_OK);
  t.let_go();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  // A part, as a plan might: the copy is needed.
  ASSERT_TRUE(t.core.transitions().start_out(lock, {t.region(clean), 0, 2}, transfers));
  lock.unlock();
  EXPECT_TRUE(transfers.empty());
  const Variable fresh = t.make(4 * t.chunk, 4);  // the oldest, `dirty`, has nowhere to go; `clean` needs no copy
  EXPECT_EQ(t.check(fresh), OOC_OK);
  t.core.free(fresh.address);
  t.expect_intact({clean, dirty});
}

TEST(slabs_share_chunks_and_give_them_back) {
  CoreTest t({4, 64, granularity() / 2});
  std::vector<void*> small;
  for (int i = 0; i < 100; ++i) small.push_back(t.must_malloc(t.chunk / 128));
  EXPECT_EQ(t.stats().slab_used_bytes, t.chunk);
  EXPECT_EQ(t.stats().small_live_bytes, 100 * (t.chunk / 128));
  const Variable v = t.make(3 * t.chunk, 1);
  t.let_go();
  for (void* address : small) t.core.free(address);
  EXPECT_EQ(t.stats().slab_used_bytes, uint64_t{0});
  EXPECT_EQ(t.core.audit(), OOC_OK);
  const Variable next = t.make(t.chunk, 2);  // under the slab's chunk
  EXPECT_EQ(t.stats().swap_out_bytes, uint64_t{0});
  t.expect_intact({v, next});
}

TEST(a_small_allocation_that_does_not_fit_is_refused_and_the_need_is_named) {
  CoreTest t({2, 64, granularity() / 2});
  const Variable v = t.make(2 * t.chunk, 1);  // pinned still, the whole budget
  EXPECT_TRUE(t.core.malloc(100) == nullptr);
  EXPECT_TRUE(contains(last_error(), "OOC_BUDGET=" + std::to_string(3 * t.chunk)));
  EXPECT_EQ(t.stats().device_peak_bytes, 2 * t.chunk);
  EXPECT_EQ(t.stats().small_live_bytes, uint64_t{0});
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.let_go();
  t.core.free(t.must_malloc(100));
  t.expect_intact({v});
}

TEST(slabs_leave_half_of_the_budget_to_variables_that_can_move) {
  CoreTest t({8, 64, granularity() / 4});
  std::vector<Variable> small;
  for (unsigned i = 0; i < 60; ++i) {
    small.push_back(t.make(t.chunk / 4, i));
    t.let_go();
  }
  EXPECT_EQ(t.stats().slab_bytes, 4 * t.chunk);
  EXPECT_EQ(t.stats().region_live_bytes, (60 - 16) * t.chunk / 4);
  EXPECT_TRUE(t.stats().swap_out_bytes > 0);
  EXPECT_TRUE(t.stats().device_peak_bytes <= 8 * t.chunk);
  t.expect_intact(small);
  const Variable large = t.make(4 * t.chunk, 61);  // there is room for it
  t.expect_intact({large});
  t.free(small);
  EXPECT_EQ(t.core.audit(), OOC_OK);
}

TEST(cached_memory_goes_back_to_the_driver_on_request) {
  const uint64_t before = physical_bytes();
  CoreTest t({8, 64, granularity() / 2});
  const Variable kept = t.make(2 * t.chunk, 1);
  t.free(t.make_many(3, t.chunk));
  t.core.free(t.must_malloc(10));
  t.core.release_cached();
  EXPECT_EQ(physical_bytes() - before, 2 * t.chunk);
  const ooc_stats stats = t.stats();
  EXPECT_EQ(stats.device_bytes, 2 * t.chunk);
  EXPECT_EQ(stats.cached_bytes + stats.free_bytes + stats.slab_bytes, uint64_t{0});
  EXPECT_EQ(t.check(kept), OOC_OK);
  EXPECT_EQ(t.make(6 * t.chunk, 2).seed, 2u);
}

TEST(everything_goes_back_at_the_end) {
  const uint64_t before = physical_bytes();
  {
    CoreTest t({8, 64, granularity() / 2});
    t.make_many(6, 2 * t.chunk);
    t.must_malloc(10);
    t.core.free(t.make(t.chunk, 3).address);
  }
  EXPECT_EQ(physical_bytes(), before);
}

TEST(a_wrong_configuration_is_explained) {
  ooc_config config = make_config({});
  config.budget_bytes = config.chunk_bytes - 1;
  EXPECT_TRUE(contains(set_up_error(config), "OOC_BUDGET"));
  config.budget_bytes = uint64_t{1} << 50;
  EXPECT_TRUE(contains(set_up_error(config), "more than the device has"));
  config = make_config({});
  config.driver_library = "/nowhere/libcuda.so";
  EXPECT_TRUE(contains(set_up_error(config), "/nowhere/libcuda.so"));
  config = make_config({});
  config.device_ordinal = 1000;
  EXPECT_TRUE(contains(set_up_error(config), "cuDeviceGet(1000)"));
  config = make_config({});
  config.struct_bytes = 4;
  EXPECT_TRUE(ooc_core_create(&config) == nullptr);
  EXPECT_TRUE(contains(ooc_last_error(), "another version"));
}
