// Strict mode and the audit: the two that find errors of others, shown to find planted ones.
#include "core_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

Limits strict() {
  Limits limits;
  limits.strict = true;
  return limits;
}

}  // namespace

TEST(strict_mode_evicts_everything_before_every_function) {
  CoreTest t(strict());
  const std::vector<Variable> v = t.make_many(3, 2 * t.chunk);
  t.let_go();
  EXPECT_EQ(t.stats().resident_bytes, uint64_t{0});  // although all would fit
  EXPECT_EQ(t.check(v[1]), OOC_OK);
  EXPECT_EQ(t.stats().resident_bytes, 2 * t.chunk);
  t.expect_intact(v);
}

TEST(strict_mode_keeps_external_pins) {
  CoreTest t(strict());
  const Variable v = t.make(2 * t.chunk, 1);
  uint64_t token = 0;
  ASSERT_EQ(t.core.pin(v.address, OOC_READ, &token), OOC_OK);
  t.let_go();
  t.let_go();
  EXPECT_TRUE(t.holds(v));
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
}

TEST(strict_mode_reports_a_write_that_was_not_declared) {
  CoreTest t(strict());
  Variable v = t.make(2 * t.chunk, 1);
  EXPECT_EQ(t.check(v, "honest"), OOC_OK);
  t.let_go();
  EXPECT_EQ(t.call("liar", {reads(v)}, [&] {
    v.seed = 2;
    t.put(v);
  }), OOC_OK);
  EXPECT_EQ(t.call("next", {}), OOC_STRICT_VIOLATION);
  EXPECT_TRUE(contains(last_error(), "liar"));
  EXPECT_TRUE(contains(last_error(), std::to_string(v.bytes)));
  t.let_go();                      // once
  EXPECT_EQ(t.check(v), OOC_OK);   // and with what it wrote: the copy was not trusted
  EXPECT_EQ(t.update(v, 3, "declared"), OOC_OK);
  t.let_go();
}

TEST(a_change_of_one_byte_is_found) {
  CoreTest t(strict());
  Variable v = t.make(3 * t.chunk, 1);
  EXPECT_EQ(t.check(v), OOC_OK);
  EXPECT_EQ(t.call("liar", {reads(v)}, [&] {
    const unsigned char last = static_cast<unsigned char>(~pattern(v.bytes, v.seed).back());
    write(v.pointer() + v.bytes - 1, {last});
  }), OOC_OK);
  EXPECT_EQ(t.call("next", {}), OOC_STRICT_VIOLATION);
}

// The audit: each corruption is planted, found by name, and undone.

namespace {

struct Corruption {
  CoreTest t;
  Variable swapped, cached, on_device;
  Region* region = nullptr;

  Corruption() {
    swapped = t.make(2 * t.chunk, 1);
    on_device = t.make(2 * t.chunk, 2);
    t.let_go();
    EXPECT_EQ(t.core.evict_all(), OOC_OK);
    EXPECT_EQ(t.check(on_device), OOC_OK);
    cached = t.make(t.chunk, 3);
    t.core.free(cached.address);
    Lock lock(t.core.mutex());
    region = t.region(on_device);
  }
  void expect_found(const char* what) {
    EXPECT_EQ(t.core.audit(), OOC_INVALID);
    if (!EXPECT_TRUE(contains(last_error(), what))) std::fprintf(stderr, "%s: %s\n", what, last_error().c_str());
  }
  ~Corruption() { EXPECT_EQ(t.core.audit(), OOC_OK); }
};

}  // namespace

TEST(the_audit_finds_a_chunk_that_is_lost) {
  Corruption c;
  const Chunk chunk = c.region->slots[0].take();
  c.expect_found("chunks: counted");
  c.expect_found("resident slots of a region");
  c.region->slots[0].put(chunk, SlotState::kResident);
}

TEST(the_audit_finds_a_chunk_that_is_held_twice) {
  Corruption c;
  const Chunk chunk = c.region->slots[0].chunk;
  c.region->slots[0].chunk = c.region->slots[1].chunk;
  c.expect_found("chunks held twice");
  c.region->slots[0].chunk = chunk;
}

TEST(the_audit_finds_bytes_that_are_in_neither_place) {
  Corruption c;
  Lock lock(c.t.core.mutex());
  Region* swapped = c.t.region(c.swapped);
  lock.unlock();
  swapped->slots[1].host_valid = false;
  c.expect_found("slots in neither place");
  swapped->slots[1].host_valid = true;
}

TEST(the_audit_finds_counters_that_drifted) {
  Corruption c;
  ++c.region->bytes;
  c.expect_found("live bytes of regions");
  --c.region->bytes;
  c.region->slots[0].state = SlotState::kSwapped;
  c.expect_found("slots whose state says nothing of their chunk");
  c.region->slots[0].state = SlotState::kResident;
  ++c.region->resident;
  c.expect_found("resident slots of a region");
  --c.region->resident;
  ++c.region->moving;
  c.expect_found("moving slots of a region");
  --c.region->moving;
  c.region->slots[0].state = SlotState::kLeaving;
  c.expect_found("moving slots");
  c.region->slots[0].state = SlotState::kResident;
  const uint32_t pins = std::exchange(c.region->pins, 1);
  c.expect_found("pinned chunks");
  c.region->pins = pins;
  c.region->live = false;
  c.expect_found("cached chunks");
  c.region->live = true;
  char* host = std::exchange(c.region->host, nullptr);
  c.expect_found("host bytes");
  c.region->host = host;
}

TEST(the_audit_finds_a_chunk_that_nobody_holds) {
  Corruption c;
  Lock lock(c.t.core.mutex());
  Chunk chunk = kNoChunk;
  ASSERT_TRUE(c.t.core.idle_chunks().take(1, &chunk));
  lock.unlock();
  c.expect_found("chunks: counted");
  lock.lock();
  std::vector<Transfer> transfers;  // given to a variable, it is held again
  Region* swapped = c.t.region(c.swapped);
  ASSERT_TRUE(c.t.core.transitions().start_in(lock, {swapped, 0, 1}, &chunk, transfers));
  for (const Transfer& transfer : transfers) EXPECT_TRUE(c.t.core.transitions().settle(lock, transfer));
}
