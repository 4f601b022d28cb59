// Where functions run on streams: who uses one part of a variable waits for nothing that happens to another part.
#include <chrono>
#include <thread>

#include "ranges_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr auto kTimeToGoWrong = std::chrono::milliseconds(60);

// All that was enqueued is done, or will be within seconds though nobody helps.
bool gets_done(CUstream stream) {
  const Event event;
  EXPECT_OK(driver().cuEventRecord(event.handle, stream));
  for (int i = 0; i < 500; ++i) {
    if (driver().cuEventQuery(event.handle) == CUDA_SUCCESS) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

// Parts 0 and 1 of two chunks each, written, swapped out, and part 0 on the device again.
struct TwoParts : RangesTest {
  TwoParts() : RangesTest(limits()), a(make_absent(4 * chunk)) {
    void* pointer = nullptr;
    ASSERT_OK(driver().cuMemHostAlloc(&pointer, 4 * chunk, 0));
    buffer = static_cast<unsigned char*>(pointer);
    const Bytes contents = pattern(4 * chunk, 9);
    std::copy(contents.begin(), contents.end(), buffer);
    a.bytes = contents;
    for (uint64_t part : {0, 1})
      use(part, OOC_WRITE, [&](uint64_t at) {
        EXPECT_OK(driver().cuMemcpyHtoDAsync(a.pointer(at), buffer + at, 2 * chunk, main.handle));
      });
    let_go();
    EXPECT_EQ(core.evict_all(), OOC_OK);
    EXPECT_EQ(core.synchronize(), OOC_OK);
    std::memset(buffer, 0, 4 * chunk);
    read(0);
    EXPECT_EQ(there(a), std::string("1100"));
  }
  ~TwoParts() {
    EXPECT_EQ(core.synchronize(), OOC_OK);
    EXPECT_OK(driver().cuStreamSynchronize(main.handle));
    EXPECT_OK(driver().cuMemFreeHost(buffer));
  }
  static Limits limits() {
    Limits all;
    all.budget_chunks = 4;
    all.asynchronous = true;
    return all;
  }

  void use(uint64_t part, uint32_t access, const std::function<void(uint64_t)>& body) {
    const ooc_operand operand = a.range(part * 2 * chunk, 2 * chunk, access);
    ASSERT_EQ(core.function_begin(id("use"), &operand, 1, main.handle), OOC_OK);
    body(part * 2 * chunk);
    ASSERT_EQ(core.function_end(false), OOC_OK);
  }
  void read(uint64_t part) {
    use(part, OOC_READ, [&](uint64_t at) {
      EXPECT_OK(driver().cuMemcpyDtoHAsync(buffer + at, a.pointer(at), 2 * chunk, main.handle));
    });
  }
  bool was_read(uint64_t part) {
    const auto at = static_cast<std::ptrdiff_t>(part * 2 * chunk), end = at + static_cast<std::ptrdiff_t>(2 * chunk);
    return std::equal(a.bytes.begin() + at, a.bytes.begin() + end, buffer + at);
  }
  void read_last_chunk() {
    const ooc_operand operand = a.range(3 * chunk, chunk, OOC_READ);
    ASSERT_EQ(core.function_begin(id("use"), &operand, 1, main.handle), OOC_OK);
    EXPECT_OK(driver().cuMemcpyDtoHAsync(buffer + 3 * chunk, a.pointer(3 * chunk), chunk, main.handle));
    ASSERT_EQ(core.function_end(false), OOC_OK);
  }
  bool last_chunk_was_read() const {
    return std::equal(a.bytes.end() - static_cast<std::ptrdiff_t>(chunk), a.bytes.end(), buffer + 3 * chunk);
  }
  Region* region() { return core.recorder().current().variables[0].handle.get(); }

  const Stream main;
  Array a;
  unsigned char* buffer = nullptr;
};

}  // namespace

TEST(a_function_does_not_wait_for_the_arrival_of_another_part_but_for_its_own) {
  for (const bool all_of_it : {true, false}) {  // or the last chunk alone
    TwoParts t;
    Gate gate;
    gate.close_on(t.core.device().stream(Direction::kIn));
    {
      Lock lock(t.core.mutex());
      std::vector<Transfer> transfers;
      Chunk chunks[2];
      ASSERT_TRUE(t.core.idle_chunks().take(2, chunks));
      ASSERT_TRUE(t.core.transitions().start_in(lock, {t.region(), 2, 2}, chunks, transfers));
      for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.transitions().settle(lock, transfer));
    }
    t.read(0);
    EXPECT_TRUE(gets_done(t.main.handle));
    EXPECT_TRUE(t.was_read(0));
    if (all_of_it) t.read(1);
    else t.read_last_chunk();
    std::this_thread::sleep_for(kTimeToGoWrong);
    EXPECT_TRUE(!t.last_chunk_was_read());
    gate.open();
    EXPECT_TRUE(gets_done(t.main.handle));
    EXPECT_TRUE(t.last_chunk_was_read());
  }
}

TEST(a_copy_out_does_not_wait_for_the_use_of_another_part_but_for_its_own) {
  TwoParts t;
  t.read(1);
  t.core.free(t.core.malloc(1));  // so that the end of the next function is marked on its stream
  t.read(0);
  for (const bool own : {false, true}) {
    Gate gate;
    gate.close_on(t.main);
    t.read(own ? 0 : 1);
    const ooc_operand none{};
    ASSERT_EQ(t.core.function_begin(t.id("none"), &none, 0, t.main.handle), OOC_OK);
    ASSERT_EQ(t.core.function_end(false), OOC_OK);
    {
      Lock lock(t.core.mutex());
      // As if a function had written it, so that there is something to copy.
      t.region()->slots[0].host_valid = t.region()->slots[1].host_valid = false;
      t.region()->host_valid -= 2;
      std::vector<Transfer> transfers;
      ASSERT_TRUE(t.core.transitions().start_out(lock, {t.region(), 0, 2}, transfers, true));
      for (const Transfer& transfer : transfers) EXPECT_TRUE(t.core.transitions().settle(lock, transfer));
    }
    if (own) {
      const Event event;
      EXPECT_OK(driver().cuEventRecord(event.handle, t.core.device().stream(Direction::kOut)));
      std::this_thread::sleep_for(kTimeToGoWrong);
      EXPECT_TRUE(driver().cuEventQuery(event.handle) != CUDA_SUCCESS);
      gate.open();
    }
    EXPECT_TRUE(gets_done(t.core.device().stream(Direction::kOut)));
    gate.open();
    EXPECT_TRUE(gets_done(t.main.handle));
  }
}

TEST(the_next_variable_of_a_region_waits_for_who_uses_ranges_of_the_last_one) {
  const Stream side;
  TwoParts t;
  t.read(1);
  EXPECT_TRUE(gets_done(t.main.handle));
  std::memset(t.buffer, 0, 4 * t.chunk);
  Gate gate;
  gate.close_on(t.main);
  t.read(0);
  t.core.free(t.a.address, side.handle);
  ASSERT_EQ(t.core.function_begin(t.id("make"), nullptr, 0, side.handle), OOC_OK);
  void* next = t.core.malloc(4 * t.chunk, side.handle);
  EXPECT_EQ(next, t.a.address);
  EXPECT_OK(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(next), 0xEE, 4 * t.chunk, side.handle));
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  std::this_thread::sleep_for(kTimeToGoWrong);
  gate.open();
  EXPECT_TRUE(gets_done(t.main.handle));
  EXPECT_TRUE(t.was_read(0));
  EXPECT_TRUE(gets_done(side.handle));
}
