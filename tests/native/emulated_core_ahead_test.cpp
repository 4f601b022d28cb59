// A program that is far ahead of its device, as every program on a GPU is: the order between functions costs it no calls of
// the driver that nobody needs, and the host waits for nothing that the device can wait for.
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "core_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr auto kTimeToGoWrong = std::chrono::milliseconds(60);

struct AheadTest : CoreTest {
  explicit AheadTest(uint64_t budget_chunks = 64, uint64_t small_limit = 0)
      : CoreTest(limits(budget_chunks, small_limit)) {}
  ~AheadTest() { EXPECT_OK(driver().cuStreamSynchronize(main.handle)); }
  static Limits limits(uint64_t budget_chunks, uint64_t small_limit = 0) {
    Limits all;
    all.budget_chunks = budget_chunks;
    all.small_limit = small_limit;
    all.asynchronous = true;
    return all;
  }

  // A function that reads one variable and makes another.
  void* step(void* operand, uint64_t bytes) { return step(main, operand, bytes); }
  void* step(const Stream& stream, void* operand, uint64_t bytes) {
    const ooc_operand read{operand, OOC_READ, 0, 0};
    ASSERT_EQ(core.function_begin(id("step"), &read, operand != nullptr ? 1 : 0, stream.handle), OOC_OK);
    void* made = core.malloc(bytes, stream.handle);
    ASSERT_EQ(core.function_end(false), OOC_OK);
    ASSERT_TRUE(made != nullptr);
    return made;
  }
  void steps(int count) {
    void* last = step(nullptr, 4 * chunk);
    for (int i = 0; i < count; ++i) {
      void* next = step(last, 4 * chunk);
      core.free(last, main.handle);
      last = next;
    }
    core.free(last, main.handle);
  }
  // Times of functions are measured in the first iterations only.
  void warm_up() {
    for (int i = 0; i < 6; ++i) {
      steps(20);
      ooc_iteration ended{};
      ASSERT_EQ(core.boundary(&ended), OOC_OK);
    }
    EXPECT_OK(driver().cuStreamSynchronize(main.handle));
  }

  Stream main;
};

// Opens a gate after a while, in a thread of its own.
class OpensLater {
 public:
  OpensLater(Core& core, Gate& gate)
      : thread_([&core, &gate, this] {
          core.device().bind_thread();
          std::this_thread::sleep_for(kTimeToGoWrong);
          opened = true;
          gate.open();
        }) {}
  ~OpensLater() { thread_.join(); }

  std::atomic<bool> opened{false};

 private:
  std::thread thread_;
};

uint64_t waits_of_the_host() {
  uint64_t all = 0;
  for (const char* name : {"cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"}) all += control().call_count(name);
  return all;
}

// Returns how often an event was recorded for a step, which is a function and a free.
double records_of_a_step(bool stream_lasts) {
  Stream other;
  AheadTest t;
  if (stream_lasts) t.core.stream_lasts(t.main.handle);
  t.warm_up();
  Gate gate;
  gate.close_on(t.main);
  const uint64_t queries = control().call_count("cuEventQuery"), records = control().call_count("cuEventRecord");
  const uint64_t events = control().call_count("cuEventCreate");
  constexpr int kSteps = 2000;
  t.steps(kSteps);
  EXPECT_EQ(control().call_count("cuEventQuery"), queries);
  EXPECT_TRUE(control().call_count("cuEventCreate") - events <= 1);
  const uint64_t recorded = control().call_count("cuEventRecord") - records;
  gate.open();
  EXPECT_EQ(t.stats().stall_seconds, 0.0);
  std::swap(t.main.handle, other.handle);  // it lasts longer than the core
  return static_cast<double>(recorded) / (kSteps + 1);  // there is one to begin with
}

}  // namespace

TEST(a_device_that_is_behind_is_asked_nothing_where_nothing_is_swapped) {
  EXPECT_TRUE(records_of_a_step(true) <= 1);   // in case the stream is captured
  EXPECT_TRUE(records_of_a_step(false) <= 2);  // the program may destroy it, after the function or after the free
}

TEST(addresses_of_an_idle_device_are_never_used_up) {
  Limits limits = AheadTest::limits(64);
  ooc_config config = make_config(limits);
  config.address_space_bytes = 16 * config.budget_bytes;
  Core core(config);
  const Stream main;
  const uint64_t waits = waits_of_the_host();
  int failures = 0;
  for (uint64_t i = 0; i < 3000; ++i) {
    ASSERT_EQ(core.function_begin(core.function_id("make"), nullptr, 0, main.handle), OOC_OK);
    void* made = core.malloc((57 - i % 40) * core.chunk_bytes(), main.handle);
    ASSERT_EQ(core.function_end(false), OOC_OK);
    if (made == nullptr) ++failures;
    else core.free(made, main.handle);
  }
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(waits_of_the_host(), waits);
  EXPECT_EQ(core.audit(), OOC_OK);
}

TEST(addresses_that_a_busy_device_holds_are_waited_for) {
  Limits limits = AheadTest::limits(64);
  ooc_config config = make_config(limits);
  config.address_space_bytes = 4 * config.budget_bytes;
  Core core(config);
  const Stream main;
  Gate gate;
  gate.close_on(main);
  std::optional<OpensLater> opener(std::in_place, core, gate);
  int failures = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    ASSERT_EQ(core.function_begin(core.function_id("make"), nullptr, 0, main.handle), OOC_OK);
    void* made = core.malloc((57 - i % 40) * core.chunk_bytes(), main.handle);
    ASSERT_EQ(core.function_end(false), OOC_OK);
    if (made == nullptr) ++failures;
    else core.free(made, main.handle);
  }
  opener.reset();
  EXPECT_EQ(failures, 0);
  EXPECT_OK(driver().cuStreamSynchronize(main.handle));
}

TEST(a_pin_for_a_stream_makes_the_stream_wait_and_not_the_host) {
  AheadTest t;
  t.warm_up();
  Gate gate;
  gate.close_on(t.main);
  std::optional<OpensLater> opener(std::in_place, t.core, gate);
  void* used = t.step(nullptr, 4 * t.chunk);
  t.core.free(used, t.main.handle);
  void* fresh = t.step(nullptr, 4 * t.chunk);
  EXPECT_EQ(fresh, used);  // which the work that is enqueued may still touch
  EXPECT_EQ(t.core.pin(fresh, OOC_READ | OOC_WRITE, nullptr, t.main.handle), OOC_OK);
  EXPECT_TRUE(!opener->opened);
  EXPECT_EQ(t.core.pin(fresh, OOC_READ | OOC_WRITE, nullptr), OOC_OK);  // for nobody knows whom
  EXPECT_TRUE(opener->opened);
  opener.reset();
  t.core.free(fresh, t.main.handle);
}

TEST(host_memory_is_pinned_by_a_thread_that_has_no_context_yet) {
  AheadTest t(8);
  void* first = t.step(nullptr, 6 * t.chunk);
  t.step(nullptr, t.chunk);
  void* second = nullptr;
  // The first one has to leave. For the default stream nothing else asks the driver before.
  std::thread([&] { second = t.core.malloc(6 * t.chunk, nullptr); }).join();
  ASSERT_TRUE(second != nullptr);
  const ooc_stats stats = t.stats();
  EXPECT_TRUE(stats.swap_out_bytes > 0);
  EXPECT_EQ(stats.host_unpinned_bytes, uint64_t{0});
  for (void* address : {first, second}) t.core.free(address, t.main.handle);
}

namespace {

// A variable of six chunks that was swapped out; all its slots are in one mapping that is not undone yet.
struct SwappedTest : AheadTest {
  SwappedTest() : AheadTest(8), address(static_cast<char*>(step(nullptr, contents.size()))) {
    EXPECT_OK(driver().cuMemcpyHtoD(pointer(), contents.data(), contents.size()));
    let_go();
    swap_out();
  }
  void swap_out() {
    ASSERT_EQ(core.evict_all(), OOC_OK);
    ASSERT_EQ(region()->order.stale.size(), 1u);
  }
  CUdeviceptr pointer() const { return reinterpret_cast<CUdeviceptr>(address); }
  Region* region() { return core.recorder().current().variables[0].handle.get(); }
  void bring_in(uint32_t first, uint32_t count) {
    core.device().bind_thread();
    Lock lock(core.mutex());
    std::vector<Transfer> transfers;
    std::vector<Chunk> chunks(count);
    ASSERT_TRUE(core.idle_chunks().take(count, chunks.data()));
    ASSERT_TRUE(core.transitions().start_in(lock, {region(), first, count}, chunks.data(), transfers));
    for (const Transfer& transfer : transfers) EXPECT_TRUE(core.transitions().settle(lock, transfer));
  }
  void end() {
    EXPECT_EQ(core.synchronize(), OOC_OK);
    for (uint64_t i = 0; i < 6; ++i) ASSERT_EQ(control().access(address + i * chunk, chunk), 3);
    EXPECT_TRUE(read(pointer(), contents.size()) == contents);
    EXPECT_EQ(core.audit(), OOC_OK);
    core.free(address, main.handle);
  }

  const Bytes contents = pattern(6 * chunk, 3);
  char* const address;
};

}  // namespace

TEST(two_threads_that_bring_in_parts_of_one_variable_leave_each_others_mappings_alone) {
  SwappedTest t;
  {
    const FaultsForTest late("cuMemUnmap:delay=60ms,times=1");
    std::thread other([&] { t.bring_in(0, 3); });
    std::this_thread::sleep_for(kTimeToGoWrong / 3);
    t.bring_in(3, 3);
    other.join();
  }
  t.end();
}

TEST(functions_go_on_while_a_variable_waits_for_its_addresses) {
  SwappedTest t;
  t.bring_in(0, 6);
  void* other = t.step(nullptr, t.chunk);
  Gate gate;
  gate.close_on(t.main);
  t.core.free(t.step(t.address, t.chunk), t.main.handle);  // enqueued, and not over
  t.step(other, t.chunk);                                  // lets go of the variable, which is clean
  t.swap_out();
  std::thread prefetch([&] { t.bring_in(0, 6); });
  std::optional<OpensLater> opener(std::in_place, t.core, gate);
  std::this_thread::sleep_for(kTimeToGoWrong / 3);
  t.step(other, t.chunk);
  EXPECT_TRUE(!opener->opened);
  prefetch.join();
  EXPECT_TRUE(opener->opened);
  opener.reset();
  t.end();
}

void memory_at_work_comes_last(uint64_t small_limit) {
  AheadTest t(64, small_limit);
  t.warm_up();
  const Stream side;
  const uint64_t bytes = small_limit > 0 ? t.chunk : 4 * t.chunk;
  void* idle = t.step(side, nullptr, bytes);
  void* const wall = t.step(nullptr, bytes);  // so that slabs have two blocks, and not one
  void* busy = t.step(nullptr, bytes);
  void* const other_wall = t.step(nullptr, bytes);
  Gate gate;
  gate.close_on(t.main);
  t.core.free(idle, side.handle);
  t.core.free(busy, t.main.handle);  // the newest, which its own stream gets
  void* first = t.step(side, nullptr, bytes);
  void* second = t.step(side, nullptr, bytes);
  EXPECT_EQ(first, idle);
  EXPECT_EQ(second, busy);
  gate.open();
  for (void* made : {first, second, wall, other_wall}) t.core.free(made, side.handle);
  EXPECT_OK(driver().cuStreamSynchronize(side.handle));
}
TEST(memory_that_another_stream_is_still_at_is_given_where_no_other_is_idle) { memory_at_work_comes_last(0); }
TEST(a_small_block_that_another_stream_is_still_at_is_given_where_no_other_is_idle) {
  memory_at_work_comes_last(granularity());
}

TEST(host_memory_is_pinned_ahead_while_the_program_goes_on) {
  AheadTest t(4);
  std::vector<void*> made;
  for (int i = 0; i < 4; ++i) made.push_back(t.step(nullptr, 4 * t.chunk));  // three of them leave
  const uint64_t before = t.stats().host_bytes;
  FaultsForTest slow("cuMemHostRegister:delay=500ms");
  const uint64_t calls = control().call_count("cuMemHostRegister");
  std::atomic<bool> pinned{false};
  std::thread ahead([&] {
    t.core.device().bind_thread();
    Lock lock(t.core.mutex());
    while (t.core.pin_ahead(lock)) {
    }
    pinned = true;
  });
  while (control().call_count("cuMemHostRegister") == calls && !pinned) std::this_thread::yield();
  { const Lock lock(t.core.mutex()); }  // while the driver pins
  EXPECT_TRUE(!pinned);
  ahead.join();
  EXPECT_TRUE(t.stats().host_bytes > before);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  for (void* address : made) t.core.free(address, t.main.handle);
}
