// Host-backed memory: the address of a swapped variable leads to its host copy. Here the host stands for a kernel that
// nobody announced. core_*_test and daemon_test run once more with this option, for everything else.
#include <cstring>

#include "core_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

Limits host_backed(bool asynchronous = false) {
  Limits limits;
  limits.host_backed = true;
  limits.asynchronous = asynchronous;
  return limits;
}

char* bytes_of(const Variable& v) { return static_cast<char*>(v.address); }

// What an access that no function announced finds.
bool found(const Variable& v) {
  const Bytes expected = pattern(v.bytes, v.seed);
  return std::memcmp(v.address, expected.data(), v.bytes) == 0;
}

void swap_out(CoreTest& t, uint64_t chunks_left = 0) {
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.stats().resident_bytes, chunks_left * t.chunk);
}

}  // namespace

TEST(an_unannounced_read_finds_the_bytes_and_takes_no_device_memory) {
  for (const bool asynchronous : {false, true}) {
    CoreTest t(host_backed(asynchronous));
    const std::vector<Variable> all = t.make_many(6, 2 * t.chunk + 100);  // 18 chunks, a budget of 8
    swap_out(t);
    t.core.release_cached();
    EXPECT_EQ(t.stats().device_bytes, uint64_t{0});
    EXPECT_EQ(get_stats().physical_bytes, uint64_t{0});
    EXPECT_TRUE(get_stats().host_bytes >= 18 * t.chunk);
    for (const Variable& v : all) EXPECT_TRUE(found(v));
    EXPECT_EQ(t.stats().device_bytes, uint64_t{0});
    EXPECT_EQ(t.stats().swap_in_count, uint64_t{0});
    t.expect_intact(all);
  }
}

TEST(an_unannounced_write_is_in_the_host_copy_and_stays) {
  for (const bool asynchronous : {false, true}) {
    CoreTest t(host_backed(asynchronous));
    Variable v = t.make(3 * t.chunk, 1);
    swap_out(t);
    const Bytes fresh = pattern(v.bytes, 9);
    std::memcpy(v.address, fresh.data(), v.bytes);
    v.seed = 9;
    EXPECT_EQ(t.check(v), OOC_OK);  // on the device
    const uint64_t copied = t.stats().swap_out_bytes;
    swap_out(t);  // without a copy, as it is clean
    EXPECT_EQ(t.stats().swap_out_bytes, copied);
    EXPECT_TRUE(found(v));
    EXPECT_EQ(t.check(v), OOC_OK);
  }
}

TEST(a_variable_that_is_swapped_in_part_reads_as_a_whole) {
  CoreTest t(host_backed());
  const Variable v = t.make(6 * t.chunk, 3);
  t.let_go();
  const Variable other = t.make(5 * t.chunk, 4);
  EXPECT_EQ(t.stats().resident_bytes, 8 * t.chunk);  // three of its chunks had to leave
  EXPECT_TRUE(found(v) && found(other));
  EXPECT_EQ(t.check(v), OOC_OK);
  EXPECT_TRUE(found(other));
}

// Whoever touches the variable then must not find a chunk that is half filled: the copy goes through the mirror.
TEST(while_it_comes_back_the_host_copy_is_what_is_found) {
  for (const bool asynchronous : {false, true}) {
    CoreTest t(host_backed(asynchronous));
    const Variable v = t.make(2 * t.chunk, 5);
    swap_out(t);
    std::vector<Transfer> transfers;
    Chunk chunks[2];
    {
      Lock lock(t.core.mutex());
      ASSERT_TRUE(t.core.take_idle(2, chunks));
      ASSERT_TRUE(t.core.start_in(lock, {t.region(v), 0, 2}, chunks, transfers));
    }
    EXPECT_TRUE(found(v));
    bytes_of(v)[7] ^= 1;  // lost or kept, as it races with the copy; here it comes too late
    bytes_of(v)[7] ^= 1;
    EXPECT_EQ(t.core.audit(), OOC_OK);
    {
      Lock lock(t.core.mutex());
      for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.settle(lock, transfer));
    }
    EXPECT_TRUE(found(v));
    EXPECT_EQ(t.stats().resident_bytes, 2 * t.chunk);
    EXPECT_EQ(t.check(v), OOC_OK);
  }
}

TEST(what_is_freed_leads_to_nothing_and_its_host_memory_serves_again) {
  CoreTest t(host_backed());
  const Variable v = t.make(2 * t.chunk, 6);
  swap_out(t);
  EXPECT_EQ(control().access(v.address, v.bytes), 3);
  t.core.free(v.address);
  EXPECT_EQ(control().access(v.address, t.chunk), -1);
  EXPECT_EQ(t.stats().host_used_bytes, uint64_t{0});
  const uint64_t taken = t.stats().host_bytes;
  for (unsigned turn = 0; turn < 40; ++turn) {
    const Variable next = t.make(2 * t.chunk, turn);
    swap_out(t);
    EXPECT_TRUE(found(next));
    t.core.free(next.address);
  }
  EXPECT_EQ(t.stats().host_bytes, taken);
}

TEST(nothing_is_left_of_a_core) {
  const ooc_emulated_stats before = get_stats();
  {
    CoreTest t(host_backed());
    t.make_many(5, 2 * t.chunk);
    t.let_go();
    EXPECT_TRUE(t.stats().swap_out_bytes > 0);
  }
  const ooc_emulated_stats after = get_stats();
  EXPECT_EQ(after.host_bytes, before.host_bytes);
  EXPECT_EQ(after.physical_bytes, before.physical_bytes);
  EXPECT_EQ(after.mappings, before.mappings);
  EXPECT_EQ(after.reservations, before.reservations);
}

// Then it is as without the option, and no byte is lost.
TEST(a_driver_that_will_not_show_the_host_copy_costs_no_bytes) {
  CoreTest t(host_backed());
  const Variable v = t.make(2 * t.chunk, 7);
  swap_out(t);
  EXPECT_EQ(t.check(v), OOC_OK);
  t.let_go();
  ASSERT_EQ(control().inject_faults("cuMemMap"), 0);
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  control().clear_faults();
  EXPECT_EQ(control().access(v.address, t.chunk), -1);
  EXPECT_EQ(t.check(v), OOC_OK);
  swap_out(t);
  EXPECT_TRUE(found(v));
}

TEST(a_detached_core_keeps_every_byte) {
  CoreTest t(host_backed());
  const std::vector<Variable> all = t.make_many(6, 2 * t.chunk);
  t.let_go();
  ASSERT_EQ(t.core.detach(), OOC_OK);
  for (const Variable& v : all) EXPECT_TRUE(found(v));
  EXPECT_EQ(get_stats().physical_bytes, uint64_t{0});
  EXPECT_EQ(get_stats().mappings, get_stats().host_bytes / t.chunk);  // where copies would go; none at a variable's address
}
