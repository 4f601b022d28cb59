// What the core leaves with the driver: chunks beyond a lowered budget, and how its threads stand to captures.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "daemon_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

void chunks_beyond_the_budget_go_back(bool asynchronous) {
  const uint64_t before = get_stats().physical_bytes;
  Limits limits{8};
  limits.asynchronous = asynchronous;
  CoreTest t(limits);
  const std::vector<Variable> variables = t.make_many(4, 2 * t.chunk);
  EXPECT_EQ(get_stats().physical_bytes - before, 8 * t.chunk);
  ASSERT_EQ(t.core.set_budget(3 * t.chunk), OOC_OK);
  EXPECT_TRUE(get_stats().physical_bytes - before <= 3 * t.chunk);
  t.expect_intact(variables);
  t.let_go();
  t.core.release_cached();
  EXPECT_EQ(get_stats().physical_bytes - before, t.stats().device_bytes);
  ASSERT_EQ(t.core.set_budget(8 * t.chunk), OOC_OK);
  t.expect_intact(variables);
}

}  // namespace

TEST(chunks_beyond_the_budget_go_back) { chunks_beyond_the_budget_go_back(false); }
TEST(chunks_beyond_the_budget_go_back_on_streams) { chunks_beyond_the_budget_go_back(true); }

namespace {
CUstream captured_stream = nullptr;
CUresult is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = stream == captured_stream ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
}  // namespace

// The emulated device has no graphs: the driver's answer is put into the table, and the stream is held back, as work
// that is captured is not carried out.
void a_captured_stream_is_left_alone(bool lasts) {
  Limits limits{4};
  limits.asynchronous = true;
  auto core = std::make_unique<CoreTest>(limits);
  CoreTest& t = *core;
  Stream stream;
  if (lasts) t.core.stream_lasts(stream.handle);
  captured_stream = stream.handle;
  const_cast<Driver&>(t.core.device().driver()).cuStreamIsCapturing = &is_capturing;
  const std::vector<Variable> variables = t.make_many(2, 2 * t.chunk);
  ASSERT_EQ(t.core.synchronize(), OOC_OK);
  uint64_t token = 0;
  ASSERT_EQ(t.core.pin(variables[0].address, OOC_READ, &token), OOC_OK);
  const ooc_operand operand = reads(variables[1]);
  Gate gate;
  gate.close_on(stream);
  ASSERT_EQ(t.core.function_begin(t.id("captured"), &operand, 1, stream.handle), OOC_OK);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  ASSERT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);  // its uses are now those of every stream
  t.let_go();
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  const CUstream out = t.core.device().stream(Direction::kOut);
  CUresult copied = CUDA_ERROR_NOT_READY;  // for ever, if it waits behind the gate
  for (int i = 0; i < 200 && copied == CUDA_ERROR_NOT_READY; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    copied = driver().cuStreamQuery(out);
  }
  EXPECT_OK(copied);
  // Whoever asks whether a captured stream is done ends the capture; here the answer would be no, for ever.
  t.core.device().set_wait_limit(2);
  EXPECT_EQ(t.core.synchronize(), OOC_OK);
  gate.open();
  captured_stream = nullptr;
  t.expect_intact(variables);
  core.reset();  // before the stream, which may be one that lasts
}
TEST(a_captured_stream_gets_no_events_and_is_not_waited_for) { a_captured_stream_is_left_alone(false); }
TEST(a_captured_stream_that_lasts_is_not_asked_either) { a_captured_stream_is_left_alone(true); }

namespace {
unsigned long long stream_id = 7;
CUstream waiting_stream = nullptr;
int stream_waits = 0;
CUresult (*plain_wait)(CUstream, CUevent, unsigned) = nullptr;
}  // namespace

// A real driver destroys a stream whose work is under way, and may give the handle to the next one meanwhile. Here the id
// changes under one.
TEST(a_handle_that_is_used_again_is_another_stream) {
  Limits limits{4};
  limits.asynchronous = true;
  CoreTest t(limits);
  Driver& table = const_cast<Driver&>(t.core.device().driver());
  table.cuStreamGetId = [](CUstream, unsigned long long* id) { return *id = stream_id, CUDA_SUCCESS; };
  plain_wait = table.cuStreamWaitEvent;
  table.cuStreamWaitEvent = [](CUstream stream, CUevent event, unsigned flags) {
    if (stream == waiting_stream) ++stream_waits;
    return plain_wait(stream, event, flags);
  };
  Stream stream;
  waiting_stream = stream.handle;
  const std::vector<Variable> variables = t.make_many(1, 2 * t.chunk);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  Gate in;  // the variable is on its way for as long as it is closed
  in.close_on(t.core.device().stream(Direction::kIn));
  const ooc_operand operand = reads(variables[0]);
  const auto waits_of_a_function = [&] {
    stream_waits = 0;
    EXPECT_EQ(t.core.function_begin(t.id("read"), &operand, 1, stream.handle), OOC_OK);
    EXPECT_EQ(t.core.function_end(false), OOC_OK);
    return stream_waits;
  };
  EXPECT_EQ(waits_of_a_function(), 1);
  EXPECT_EQ(waits_of_a_function(), 0);
  ++stream_id;
  std::atomic<bool> opened{false};
  std::thread opener([&] {
    t.core.device().bind_thread();
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    opened = true;
    in.open();
  });
  waits_of_a_function();
  EXPECT_TRUE(opened);  // the host has waited for what the destroyed stream still had to do
  opener.join();
  t.expect_intact(variables);
}

TEST(capture_modes_are_kept_by_thread) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  EXPECT_OK(driver().cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  EXPECT_OK(driver().cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
  mode = static_cast<CUstreamCaptureMode>(3);
  EXPECT_EQ(driver().cuThreadExchangeStreamCaptureMode(&mode), CUDA_ERROR_INVALID_VALUE);
}

namespace {
std::atomic<int> asked{0}, asked_unrelaxed{0};
CUresult (*plain_query)(CUevent) = nullptr;
CUresult query_with_mode(CUevent event) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  ++asked;
  if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) ++asked_unrelaxed;
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  return plain_query(event);
}
}  // namespace

// Any thread may ask for figures while another one captures.
TEST(calls_that_may_come_at_any_time_relax_the_capture_mode) {
  Limits limits{4};
  limits.asynchronous = true;
  CoreTest t(limits);
  Driver& table = const_cast<Driver&>(t.core.device().driver());
  plain_query = table.cuEventQuery;
  table.cuEventQuery = &query_with_mode;
  const std::vector<Variable> variables = t.make_many(4, 2 * t.chunk);
  asked = asked_unrelaxed = 0;
  uint64_t token = 0;
  ASSERT_EQ(t.core.pin(variables[0].address, OOC_READ, &token), OOC_OK);
  ASSERT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  t.stats();
  ooc_iteration ended{};
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  t.core.release_cached();
  ASSERT_EQ(t.core.set_budget(2 * t.chunk), OOC_OK);
  ASSERT_EQ(t.core.set_budget(4 * t.chunk), OOC_OK);
  ASSERT_EQ(t.core.synchronize(), OOC_OK);
  EXPECT_TRUE(asked > 0);
  EXPECT_EQ(asked_unrelaxed.load(), 0);
  table.cuEventQuery = plain_query;
}

TEST(both_daemon_threads_ignore_captures) {
  control().reset_stats();
  {
    CoreTest t({4});
    Daemon daemon(t.core, true);
    daemon.stop();
  }
  EXPECT_EQ(control().call_count("cuThreadExchangeStreamCaptureMode"), uint64_t{2});
}

TEST(the_callers_capture_mode_is_left_alone) {
  CoreTest t({4});
  Daemon daemon(t.core, true);
  t.make_many(3, 2 * t.chunk);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  EXPECT_OK(driver().cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  daemon.stop();
}

namespace {

// A variable of which another thread takes the memory, which takes the driver long.
struct UnmapTest : CoreTest {
  explicit UnmapTest(bool clean) : CoreTest({8}), leaving(make(2 * chunk, 1)), stays(make(2 * chunk, 2)) {
    let_go();
    if (clean) {  // then it leaves without a copy
      EXPECT_EQ(core.evict_all(), OOC_OK);
      expect_intact({leaving, stays});
      let_go();
    }
    Lock lock(core.mutex());
    leaves = region(leaving);
    const uint64_t before = control().call_count("cuMemUnmap");
    thread = std::thread([this] {
      core.device().bind_thread();
      Lock own(core.mutex());
      std::vector<Transfer> transfers;
      EXPECT_TRUE(core.move_out(own, {leaves, 0, 2}, transfers, false));
      for (const Transfer& transfer : transfers) core.settle(own, transfer);
      done = true;
    });
    lock.unlock();
    while (control().call_count("cuMemUnmap") == before) std::this_thread::yield();
  }
  ~UnmapTest() { thread.join(); }

  const FaultsForTest slow{"cuMemUnmap:cost=300ms"};
  const Variable leaving, stays;
  Region* leaves = nullptr;
  std::atomic<bool> done{false};
  std::thread thread;
};

}  // namespace

TEST(functions_run_while_the_driver_unmaps) {
  for (const bool clean : {false, true}) {
    UnmapTest t(clean);
    int ran = 0;
    for (; !t.done; ++ran) EXPECT_EQ(t.check(t.stays), OOC_OK);
    EXPECT_TRUE(ran >= 10);
    EXPECT_EQ(t.resident(t.leaving), 0u);
  }
}

TEST(what_is_being_unmapped_is_waited_for_and_comes_back) {
  for (const bool clean : {false, true}) {
    UnmapTest t(clean);
    const uint64_t came = t.stats().swap_in_count;
    EXPECT_EQ(t.check(t.leaving), OOC_OK);
    EXPECT_EQ(t.stats().swap_in_count, came + 1);
  }
}

TEST(what_is_being_unmapped_does_not_leave_again) {
  for (const bool clean : {false, true}) {
    UnmapTest t(clean);
    const ooc_stats before = t.stats();
    Lock lock(t.core.mutex());
    std::vector<Transfer> transfers;
    EXPECT_TRUE(t.core.move_out(lock, {t.leaves, 0, 2}, transfers, false));
    EXPECT_TRUE(transfers.empty() && !t.done);
    lock.unlock();
    EXPECT_EQ(t.stats().clean_drop_count, before.clean_drop_count);
  }
}

TEST(what_is_freed_while_it_is_unmapped_goes_when_that_is_over) {
  for (const bool clean : {false, true}) {
    UnmapTest t(clean);
    t.core.free(t.leaving.address);
    EXPECT_EQ(t.check(t.stays), OOC_OK);
    while (!t.done) std::this_thread::yield();
    EXPECT_EQ(t.stats().resident_bytes, 2 * t.chunk);
    EXPECT_EQ(t.stats().free_bytes + t.stats().cached_bytes, 2 * t.chunk);
    EXPECT_EQ(t.stats().driver_failure_count, uint64_t{0});  // nothing is unmapped twice
  }
}

TEST(what_the_driver_does_not_unmap_stays) {
  for (const bool clean : {false, true}) {
    CoreTest t({8});
    const Variable stays = t.make(2 * t.chunk, 1);
    t.let_go();
    if (clean) {
      EXPECT_EQ(t.core.evict_all(), OOC_OK);
      t.expect_intact({stays});
      t.let_go();
    }
    {
      const FaultsForTest faults("cuMemUnmap");
      EXPECT_EQ(t.core.evict_all(), OOC_OK);
    }
    ASSERT_EQ(t.resident(stays), 2u);
    EXPECT_EQ(t.stats().resident_bytes, 2 * t.chunk);
    EXPECT_EQ(t.core.audit(), OOC_OK);
    t.expect_intact({stays});
  }
}
