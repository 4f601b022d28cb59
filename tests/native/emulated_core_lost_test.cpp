// A device that is lost while something waits for it: what could not be put in order is not enqueued, and memory that
// may still be in use is not given away. The device turns out to be alive in the end, so that every byte can be looked
// at.
#include <algorithm>
#include <chrono>
#include <thread>

#include "core_fixture.h"
#include "emulated_fixture.h"
#include "pinned.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// Nobody can be made to wait, and the driver does not say whether anything is over.
constexpr const char* kNoOrder = "cuEventCreate;cuEventRecord;cuStreamWaitEvent;cuEventQuery;cuStreamQuery";

uint64_t calls_of(const char* call) { return static_cast<uint64_t>(control().call_count(call)); }

struct LostTest : CoreTest {
  explicit LostTest(uint64_t budget_chunks) : CoreTest(limits(budget_chunks)) {}
  static Limits limits(uint64_t budget_chunks) {
    Limits all;
    all.budget_chunks = budget_chunks;
    all.small_limit = granularity() / 4;
    all.asynchronous = true;
    return all;
  }

  int call_on(const Stream& stream, const std::vector<ooc_operand>& operands, const std::function<void()>& body = [] {}) {
    const auto count = static_cast<uint32_t>(operands.size());
    if (const int status = core.function_begin(id("on a stream"), operands.data(), count, stream.handle)) return status;
    body();
    return core.function_end(false);
  }
  void* malloc_on(const Stream& stream, uint64_t bytes) {
    void* address = nullptr;
    EXPECT_EQ(call_on(stream, {}, [&] { address = core.malloc(bytes, stream.handle); }), OOC_OK);
    return address;
  }
  void enqueue_write(const Stream& stream, const Variable& variable) {
    buffers.push_back(std::make_unique<Pinned>(variable.bytes));
    const Bytes contents = pattern(variable.bytes, variable.seed);
    std::copy(contents.begin(), contents.end(), buffers.back()->data);
    ASSERT_OK(driver().cuMemcpyHtoDAsync(variable.pointer(), buffers.back()->data, variable.bytes, stream.handle));
  }
  Variable make_on(const Stream& stream, uint64_t bytes, unsigned seed) {
    Variable variable{malloc_on(stream, bytes), bytes, seed};
    ASSERT_TRUE(variable.address != nullptr);
    ASSERT_EQ(call_on(stream, {writes(variable)}, [&] { enqueue_write(stream, variable); }), OOC_OK);
    ASSERT_EQ(core.synchronize(), OOC_OK);
    return variable;
  }
  // What is there when the stream comes to it; the function's status.
  int read_later(const Stream& stream, const Variable& variable) {
    buffers.push_back(std::make_unique<Pinned>(variable.bytes));
    return call_on(stream, {reads(variable)}, [&] {
      EXPECT_OK(driver().cuMemcpyDtoHAsync(buffers.back()->data, variable.pointer(), variable.bytes, stream.handle));
    });
  }
  bool was_read(const Variable& variable) {
    for (const Stream* stream : {&main, &side}) EXPECT_OK(driver().cuStreamSynchronize(stream->handle));
    return buffers.back()->contents() == pattern(variable.bytes, variable.seed);
  }

  const Stream main, side;
  std::vector<std::unique_ptr<Pinned>> buffers;
};

void expect_lost() {
  EXPECT_EQ(last_status(), OOC_DRIVER_FAILURE);
  if (!EXPECT_TRUE(contains(last_error(), "the device is lost"))) std::fprintf(stderr, "%s\n", last_error().c_str());
}

}  // namespace

// The stream that asks cannot wait for the one that had the block, so it does not get it.
TEST(a_small_block_is_not_given_to_a_stream_that_cannot_wait_for_the_last_user) {
  LostTest t(4);
  void* block = t.malloc_on(t.main, 256);
  ASSERT_TRUE(block != nullptr);
  Gate gate;
  gate.close_on(t.main);
  t.core.free(block, t.main.handle);
  {
    const FaultsForTest faults(kNoOrder);
    EXPECT_TRUE(t.core.malloc(256, t.side.handle) == nullptr);
    expect_lost();
    EXPECT_EQ(t.stats().small_live_bytes, uint64_t{0});
  }
  gate.open();
  EXPECT_EQ(t.core.malloc(256, t.side.handle), block);  // the device was only slow
}

TEST(nor_is_the_memory_of_a_variable) {
  LostTest t(2);
  void* variable = t.malloc_on(t.main, 2 * t.chunk);
  ASSERT_TRUE(variable != nullptr);
  Gate gate;
  gate.close_on(t.main);
  t.core.free(variable, t.main.handle);
  {
    const FaultsForTest faults(kNoOrder);
    EXPECT_TRUE(t.core.malloc(2 * t.chunk, t.side.handle) == nullptr);
    expect_lost();
  }
  gate.open();
  EXPECT_TRUE(t.core.malloc(2 * t.chunk, t.side.handle) != nullptr);
}

TEST(what_is_still_being_written_is_not_copied_out) {
  LostTest t(4);
  Variable late = t.make_on(t.main, 2 * t.chunk, 1);
  Gate gate;
  gate.close_on(t.main);
  late.seed = 2;
  ASSERT_EQ(t.call_on(t.main, {writes(late)}, [&] { t.enqueue_write(t.main, late); }), OOC_OK);
  ASSERT_EQ(t.call_on(t.side, {}), OOC_OK);  // its pins end
  const uint64_t copies = calls_of("cuMemcpyDtoHAsync");
  {
    const FaultsForTest faults(kNoOrder);
    t.core.evict_all();
    EXPECT_TRUE(t.core.device().lost());
  }
  EXPECT_EQ(calls_of("cuMemcpyDtoHAsync"), copies);
  EXPECT_EQ(t.stats().swap_out_bytes, uint64_t{0});
  gate.open();
  EXPECT_EQ(t.read_later(t.side, late), OOC_OK);  // the device is found again when a function begins
  EXPECT_TRUE(t.was_read(late));
}

TEST(nothing_is_copied_into_memory_that_is_still_being_read) {
  LostTest t(2);
  const Variable away = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable read = t.make_on(t.main, 2 * t.chunk, 2);  // `away` had to leave
  Gate gate;
  gate.close_on(t.main);
  ASSERT_EQ(t.read_later(t.main, read), OOC_OK);
  ASSERT_EQ(t.call_on(t.side, {}), OOC_OK);
  t.core.free(read.address, t.main.handle);
  const uint64_t copies = calls_of("cuMemcpyHtoDAsync");
  {
    const FaultsForTest faults(kNoOrder);
    EXPECT_EQ(t.call_on(t.side, {reads(away)}), OOC_DRIVER_FAILURE);
    EXPECT_TRUE(contains(last_error(), "the device is lost"));
  }
  EXPECT_EQ(calls_of("cuMemcpyHtoDAsync"), copies);
  gate.open();
  EXPECT_TRUE(t.was_read(read));
  EXPECT_EQ(t.read_later(t.side, away), OOC_OK);
  EXPECT_TRUE(t.was_read(away));
}

// Here the device is well, and the driver refuses to map.
TEST(chunks_that_could_not_be_mapped_still_wait_for_their_last_reader) {
  LostTest t(2);
  const Variable away = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable late = t.make_on(t.main, 2 * t.chunk, 2);  // in the place of `away`
  Gate gate;
  gate.close_on(t.main);
  ASSERT_EQ(t.read_later(t.main, late), OOC_OK);
  const Pinned& found = *t.buffers.back();
  t.core.free(late.address, t.main.handle);
  {
    const FaultsForTest faults("cuMemMap");
    EXPECT_EQ(t.call_on(t.side, {reads(away)}), OOC_DRIVER_FAILURE);
  }
  const Variable next{t.malloc_on(t.side, 2 * t.chunk), 2 * t.chunk, 3};
  ASSERT_TRUE(next.address != nullptr);
  ASSERT_EQ(t.call_on(t.side, {writes(next)}, [&] { t.enqueue_write(t.side, next); }), OOC_OK);
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  gate.open();
  ASSERT_EQ(t.core.synchronize(), OOC_OK);
  EXPECT_TRUE(found.contents() == pattern(late.bytes, 2));
}
