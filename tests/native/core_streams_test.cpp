// Functions on streams: the host runs ahead, every edge of the order keeps bytes right, and leaving out any one of them
// is noticed. Functions read and write through copies on their stream, so these tests also run on a GPU.
//
// A gate holds one stream back. While it is closed, whatever does not wait as it should has the time to go wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "core_fixture.h"
#include "pinned.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr auto kTimeToGoWrong = std::chrono::milliseconds(60);
const bool safe = getenv("OOC_TEST_SAFE") != nullptr;

struct StreamsTest : CoreTest {
  explicit StreamsTest(Limits limits) : CoreTest((limits.asynchronous = true, limits.safe = safe, limits)) {}
  ~StreamsTest() {
    synchronize();
    if (safe) EXPECT_EQ(stats().event_create_count, uint64_t{0});  // nothing waits for an event
  }

  void synchronize() {
    for (const Stream* stream : {&main, &side}) EXPECT_OK(driver().cuStreamSynchronize(stream->handle));
    for (CUstream stream : {out(), in()}) EXPECT_OK(driver().cuStreamSynchronize(stream));
  }
  CUstream out() { return core.device().stream(Direction::kOut); }
  CUstream in() { return core.device().stream(Direction::kIn); }

  int call_on(const Stream& stream, const char* name, const std::vector<ooc_operand>& operands,
              const std::function<void()>& body = [] {}) {
    const auto count = static_cast<uint32_t>(operands.size());
    if (const int status = core.function_begin(id(name), operands.data(), count, stream.handle)) return status;
    body();
    return core.function_end(false);
  }

  // Functions whose work is done later. The host's part of it lives as long as the test.
  void write_later(const Stream& stream, Variable& variable, unsigned seed) {
    variable.seed = seed;
    ASSERT_EQ(call_on(stream, "write", {writes(variable)}, [&] { enqueue_write(stream, variable); }), OOC_OK);
  }
  const Pinned& read_later(const Stream& stream, const Variable& variable) {
    buffers.push_back(std::make_unique<Pinned>(variable.bytes));
    ASSERT_EQ(call_on(stream, "read", {reads(variable)}, [&] {
      ASSERT_OK(driver().cuMemcpyDtoHAsync(buffers.back()->data, variable.pointer(), variable.bytes, stream.handle));
    }), OOC_OK);
    return *buffers.back();
  }
  Variable make_on(const Stream& stream, uint64_t bytes, unsigned seed) {
    Variable variable{nullptr, bytes, seed};
    ASSERT_EQ(call_on(stream, "make", {}, [&] {
      variable.address = core.malloc(bytes, stream.handle);
      ASSERT_TRUE(variable.address != nullptr);
      enqueue_write(stream, variable);
    }), OOC_OK);
    return variable;
  }
  void enqueue_write(const Stream& stream, const Variable& variable) {
    buffers.push_back(std::make_unique<Pinned>(variable.bytes));
    const Bytes contents = pattern(variable.bytes, variable.seed);
    std::copy(contents.begin(), contents.end(), buffers.back()->data);
    ASSERT_OK(driver().cuMemcpyHtoDAsync(variable.pointer(), buffers.back()->data, variable.bytes, stream.handle));
  }
  void write_back(const Variable& variable) {
    ooc_iteration ended{};
    ASSERT_EQ(core.boundary(&ended), OOC_OK);
    Lock lock(core.mutex());
    const auto first = static_cast<uint64_t>(static_cast<char*>(variable.address) - core.device().base()) / chunk;
    Region* region = nullptr;
    for (const auto& seen : core.trace(ended.fingerprint)->variables)
      if (Region* found = seen.handle.get(); found != nullptr && found->first == first) region = found;
    ASSERT_TRUE(region != nullptr);
    std::vector<Transfer> transfers;
    ASSERT_TRUE(core.transitions().start_out(lock, {region, 0, region->count}, transfers, true));
    for (const Transfer& transfer : transfers) EXPECT_TRUE(core.transitions().settle(lock, transfer));
  }
  void let_go_on(const Stream& stream) { ASSERT_EQ(call_on(stream, "nothing", {}), OOC_OK); }

  void expect(const Variable& variable) {
    const Pinned& found = read_later(main, variable);
    synchronize();
    EXPECT_TRUE(found.contents() == pattern(variable.bytes, variable.seed));
  }

  Stream main, side;
  std::vector<std::unique_ptr<Pinned>> buffers;
};

void open_later(Gate& gate) {
  std::this_thread::sleep_for(kTimeToGoWrong);
  gate.open();
}

// In safe mode the host waits behind the gate, so somebody else opens it.
struct LateGate : Gate {
  ~LateGate() {
    if (opener.joinable()) opener.join();
  }
  template <typename On>
  void close_on(On&& stream) {
    Gate::close_on(stream);
    CUcontext context = nullptr;
    ASSERT_OK(driver().cuCtxGetCurrent(&context));
    if (safe) opener = std::thread([this, context] {
      driver().cuCtxSetCurrent(context);
      open_later(static_cast<Gate&>(*this));
    });
  }
  std::thread opener;
};

void open_later(LateGate& gate) {
  if (safe) gate.opener.join();
  else open_later(static_cast<Gate&>(gate));
}

}  // namespace

// ---- the edges ------------------------------------------------------------------------------------------------------

TEST(edge_1_a_late_write_is_copied_out) {
  StreamsTest t({2});
  Variable late = t.make_on(t.main, 2 * t.chunk, 1);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.main);
  t.write_later(t.main, late, 2);
  const Variable other = t.make_on(t.main, 2 * t.chunk, 3);  // `late` has to leave
  open_later(gate);
  t.expect(late);
  t.expect(other);
}

TEST(edge_2_a_chunk_is_not_overwritten_before_it_was_copied_out) {
  StreamsTest t({2});
  const Variable first = t.make_on(t.main, 2 * t.chunk, 1);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.out());
  const Variable second = t.make_on(t.main, 2 * t.chunk, 2);
  open_later(gate);
  t.expect(first);
  t.expect(second);
}

// A write-back that is enqueued counts as made: its variable may leave at once.
TEST(edge_2_what_is_written_back_is_not_overwritten_before_it_was_copied) {
  StreamsTest t({2});
  const Variable first = t.make_on(t.main, 2 * t.chunk, 1);
  t.let_go_on(t.main);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.out());
  t.write_back(first);
  EXPECT_EQ(t.stats().write_back_bytes, 2 * t.chunk);
  const Variable second = t.make_on(t.main, 2 * t.chunk, 2);
  EXPECT_EQ(t.stats().clean_drop_bytes, 2 * t.chunk);
  open_later(gate);
  t.expect(first);
  t.expect(second);
}

TEST(edge_3_a_freed_chunk_is_not_overwritten_under_a_late_reader) {
  StreamsTest t({2});
  const Variable freed = t.make_on(t.main, 2 * t.chunk, 1);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.main);
  const Pinned& found = t.read_later(t.main, freed);
  t.core.free(freed.address, t.main.handle);
  const Variable next = t.make_on(t.side, 2 * t.chunk, 2);
  EXPECT_EQ(next.address, freed.address);
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(freed.bytes, 1));
  t.expect(next);
}

TEST(edge_3_each_part_of_freed_memory_waits_for_who_read_the_whole) {
  StreamsTest t({2});
  const Variable freed = t.make_on(t.main, 2 * t.chunk, 1);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.main);
  const Pinned& found = t.read_later(t.main, freed);
  t.core.free(freed.address, t.main.handle);
  const Variable first = t.make_on(t.main, t.chunk, 2), second = t.make_on(t.side, t.chunk, 3);
  EXPECT_EQ(first.address, freed.address);
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(freed.bytes, 1));
  t.expect(first);
  t.expect(second);
}

// The order holds here even if the joined region forgets who used the second; parts_test looks at what it knows.
TEST(edge_3_joined_neighbours_are_not_overwritten_under_a_late_reader) {
  StreamsTest t({2});
  const Variable before = t.make_on(t.main, t.chunk, 1), behind = t.make_on(t.main, t.chunk, 2);
  t.synchronize();
  t.core.free(before.address, t.main.handle);  // nobody uses it any more
  LateGate gate;
  gate.close_on(t.main);
  const Pinned& found = t.read_later(t.main, behind);
  t.core.free(behind.address, t.main.handle);
  const uint64_t hits = t.stats().cache_hits;
  Variable next{t.core.malloc(2 * t.chunk, t.main.handle), 2 * t.chunk, 0};
  EXPECT_EQ(next.address, before.address);
  EXPECT_EQ(t.stats().cache_hits, hits + 1);
  t.write_later(t.side, next, 3);
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(behind.bytes, 2));
  t.expect(next);
}

// As a library does that announces no functions.
TEST(edge_3_freed_memory_waits_for_what_the_freeing_stream_reads_outside_of_functions) {
  StreamsTest t({2});
  const Variable freed = t.make_on(t.main, 2 * t.chunk, 1);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.side);
  const Pinned found(freed.bytes);
  ASSERT_OK(driver().cuMemcpyDtoHAsync(found.data, freed.pointer(), freed.bytes, t.side.handle));
  t.core.free(freed.address, t.side.handle);
  const Variable next = t.make_on(t.main, 2 * t.chunk, 2);
  EXPECT_EQ(next.address, freed.address);
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(freed.bytes, 1));
  t.expect(next);
}

TEST(edge_3_a_clean_chunk_is_not_overwritten_under_a_late_reader) {
  StreamsTest t({2});
  const Variable clean = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable other = t.make_on(t.main, 2 * t.chunk, 2);
  t.expect(clean);
  t.let_go_on(t.main);
  LateGate gate;
  gate.close_on(t.main);
  const Pinned& found = t.read_later(t.main, clean);
  const Pinned& copied = t.read_later(t.side, other);  // takes the chunks of `clean`, which has a host copy
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(clean.bytes, 1));
  EXPECT_TRUE(copied.contents() == pattern(other.bytes, 2));
}

TEST(edge_4_a_function_waits_for_what_comes_in) {
  StreamsTest t({2});
  const Variable first = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable second = t.make_on(t.main, 2 * t.chunk, 2);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.in());
  const Pinned& found = t.read_later(t.main, first);
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(first.bytes, 1));
  t.expect(second);
}

TEST(edge_5_a_host_block_is_not_overwritten_before_it_was_read) {
  StreamsTest t({4, 2});  // host memory for one of them
  const Variable first = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable second = t.make_on(t.main, 2 * t.chunk, 2);
  const Variable third = t.make_on(t.main, 2 * t.chunk, 3);  // `first` leaves
  t.core.free(second.address, t.main.handle);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.in());
  const Pinned& found = t.read_later(t.main, first);         // comes back, late; has its host block until
  t.let_go_on(t.side);
  const Variable fourth = t.make_on(t.side, 2 * t.chunk, 4); // `third` leaves into it
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(first.bytes, 1));
  t.core.free(fourth.address, t.side.handle);
  t.expect(third);
}

TEST(edge_5_a_host_block_that_begins_before_an_older_one_waits_too) {
  StreamsTest t({5, 3});  // host memory for the first two
  const Variable before = t.make_on(t.main, t.chunk, 1);
  const Variable first = t.make_on(t.main, 2 * t.chunk, 2);
  const Variable third = t.make_on(t.main, 2 * t.chunk, 3);
  const Variable large = t.make_on(t.main, 3 * t.chunk, 4);  // the first two leave, one behind the other
  t.core.free(large.address, t.main.handle);
  t.core.free(before.address, t.main.handle);  // its block is a hole in front of the other one
  t.synchronize();
  LateGate gate;
  gate.close_on(t.in());
  const Pinned& found = t.read_later(t.main, first);         // comes back, late; has its host block until
  t.let_go_on(t.side);
  const Variable fourth = t.make_on(t.side, 2 * t.chunk, 5); // `third` leaves into the hole and half of that block
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(first.bytes, 2));
  t.core.free(fourth.address, t.side.handle);
  t.expect(third);
}

TEST(edge_6_an_address_is_not_unmapped_under_a_copy) {
  StreamsTest t({4});
  const Variable first = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable second = t.make_on(t.main, 2 * t.chunk, 2);
  t.let_go_on(t.main);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.out());
  const Variable third = t.make_on(t.main, 2 * t.chunk, 3);  // `first` leaves, late
  t.core.free(second.address, t.main.handle);
  std::thread opener([&] {
    t.core.device().bind_thread();
    open_later(gate);
  });
  const Pinned& found = t.read_later(t.side, first);         // comes back, into other chunks: the host has to wait
  opener.join();
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(first.bytes, 1));
  t.expect(third);
}

TEST(edge_6_addresses_of_a_freed_variable_stay_mapped_under_a_late_reader) {
  StreamsTest t({4});
  const Variable freed = t.make_on(t.main, 2 * t.chunk, 1);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.main);
  const Pinned& found = t.read_later(t.main, freed);
  t.core.free(freed.address, t.main.handle);
  const Variable next = t.make_on(t.side, 4 * t.chunk, 2);  // takes its chunks
  {
    Lock lock(t.core.mutex());
    EXPECT_TRUE(!t.core.bury_one(lock));
  }
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(freed.bytes, 1));
  {
    Lock lock(t.core.mutex());
    EXPECT_EQ(t.core.bury_one(lock), !safe);
  }
  t.expect(next);
}

// Alone in its chunk, and beside one that stays.
void small_block_under_a_late_reader(bool neighbour) {
  StreamsTest t({2, 64, 1024});
  const Variable freed = t.make_on(t.main, 512, 1);
  if (neighbour) t.make_on(t.main, 512, 3);
  t.synchronize();
  LateGate gate;
  gate.close_on(t.main);
  const Pinned& found = t.read_later(t.main, freed);
  t.core.free(freed.address, t.main.handle);
  const Variable next = t.make_on(t.side, 512, 2);
  EXPECT_EQ(next.address, freed.address);
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(freed.bytes, 1));
  t.expect(next);
}

TEST(edge_7_a_small_block_is_not_overwritten_under_a_late_reader) { small_block_under_a_late_reader(false); }
TEST(edge_7_nor_is_one_whose_chunk_others_use) { small_block_under_a_late_reader(true); }

// This program again, with an edge left out, for the tests that bear its number.
bool fails_without(int edge, bool in_safe_mode) {
  const std::string number = std::to_string(edge), name = "edge_" + number + "_";
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    setenv("OOC_WITHOUT_EDGE", number.c_str(), 1);
    if (in_safe_mode) setenv("OOC_TEST_SAFE", "1", 1);
    dup2(ends[1], 2);
    close(ends[0]);
    close(ends[1]);
    execl("/proc/self/exe", "core_streams_test", name.c_str(), nullptr);
    _exit(0);
  }
  close(ends[1]);
  std::string output;
  char text[4096];
  for (ssize_t got; (got = read(ends[0], text, sizeof text)) > 0;) output.append(text, static_cast<size_t>(got));
  close(ends[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(contains(output, name));
  const bool failed = WIFSIGNALED(status) || contains(output, " FAILED\n") || contains(output, "Sanitizer");
  if (failed == in_safe_mode) std::fprintf(stderr, "without edge %d:\n%s", edge, output.c_str());
  return failed;
}

TEST(every_missing_edge_is_noticed) {
  if (getenv("OOC_WITHOUT_EDGE") != nullptr) return;
  for (int edge = 1; edge <= kEdges; ++edge) EXPECT_TRUE(fails_without(edge, false));
}

TEST(safe_mode_needs_no_edge) {
  if (getenv("OOC_WITHOUT_EDGE") != nullptr) return;
  for (int edge = 1; edge <= kEdges; ++edge) EXPECT_TRUE(!fails_without(edge, true));
}

// ---- streams that end ------------------------------------------------------------------------------------------------

// The emulated driver ends a process that uses a stream which was destroyed.
TEST(a_destroyed_stream_is_not_used_again) {
  StreamsTest t({4, 64});
  std::vector<Variable> variables;
  uint64_t token = 0;
  Variable kept{}, freed{};
  for (unsigned i = 0; i < 3; ++i) {
    const Stream ends, also_ends;  // their handles are used again from the second time on
    variables.push_back(t.make_on(ends, 2 * t.chunk, i + 1));
    kept = t.make_on(also_ends, t.chunk, 10 + i);
    freed = t.make_on(ends, t.chunk, 20 + i);
    for (const Stream* stream : {&ends, &also_ends}) ASSERT_OK(driver().cuStreamSynchronize(stream->handle));
    const Pinned& found = t.read_later(also_ends, variables[0]);
    ASSERT_EQ(t.core.pin(kept.address, OOC_READ, &token), OOC_OK);
    t.core.record_use(freed.address, also_ends.handle);
    ASSERT_OK(driver().cuStreamSynchronize(also_ends.handle));
    EXPECT_TRUE(found.contents() == pattern(2 * t.chunk, 1));
    if (i < 2) ASSERT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  }
  ooc_iteration ended{};
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);  // its functions are timed
  t.core.free(freed.address);
  ASSERT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  for (unsigned i = 0; i < 3; ++i) variables.push_back(t.make_on(t.main, 2 * t.chunk, i + 4));  // all have to leave
  ASSERT_EQ(t.core.synchronize(), OOC_OK);
  t.core.release_cached();
  t.expect_intact(variables);
  t.expect(kept);
}

// ---- running ahead --------------------------------------------------------------------------------------------------

TEST(the_host_runs_ahead_of_a_stream_that_stands_still) {
  StreamsTest t({6, 64});
  std::vector<Variable> variables;
  Gate gate;
  gate.close_on(t.main);
  for (unsigned i = 0; i < 8; ++i) variables.push_back(t.make_on(t.main, 2 * t.chunk, i + 1));  // none of it is done yet
  EXPECT_TRUE(t.stats().swap_out_bytes >= 10 * t.chunk);
  gate.open();
  for (const Variable& variable : variables) t.expect(variable);
  EXPECT_TRUE(t.stats().device_peak_bytes <= 6 * t.chunk);
}

TEST(memory_that_streams_use_does_not_become_host_memory) {
  StreamsTest t({2});
  const Variable variable = t.make_on(t.main, 2 * t.chunk, 1);
  EXPECT_EQ(t.core.detach(), OOC_INVALID);
  t.expect(variable);
}

TEST(events_are_used_again) {
  StreamsTest t({4});
  std::vector<Variable> variables;
  for (unsigned i = 0; i < 4; ++i) variables.push_back(t.make_on(t.main, 2 * t.chunk, i + 1));
  auto round = [&] {
    for (Variable& variable : variables) t.write_later(t.main, variable, variable.seed + 10);
    t.synchronize();
    t.buffers.clear();
  };
  for (int i = 0; i < 10; ++i) round();
  const uint64_t before = t.stats().event_create_count;
  EXPECT_TRUE(before > 0);
  const uint64_t moves = t.stats().swap_in_count + t.stats().swap_out_count;
  for (int i = 0; i < 60; ++i) round();
  const ooc_stats after = t.stats();
  // How many are in use at once depends on when they are over; that each of hundreds of moves had one of its own, does
  // not.
  EXPECT_TRUE(after.swap_in_count + after.swap_out_count - moves > 400);
  EXPECT_TRUE(after.event_create_count - before <= 8);
  for (const Variable& variable : variables) t.expect(variable);
}

TEST(functions_are_timed_where_they_run) {
  StreamsTest t({6, 64});
  t.make_on(t.main, t.chunk, 1);
  ooc_iteration ended{};
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  auto sleep = [](void* milliseconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(reinterpret_cast<intptr_t>(milliseconds)));
  };
  for (const intptr_t milliseconds : {30, 1, 60})
    ASSERT_EQ(t.call_on(t.main, "sleep", {}, [&] {
      ASSERT_OK(driver().cuLaunchHostFunc(t.main.handle, sleep, reinterpret_cast<void*>(milliseconds)));
    }), OOC_OK);
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  Lock lock(t.core.mutex());
  const auto trace = t.core.trace(ended.fingerprint);
  ASSERT_EQ(trace->functions(), 3u);
  EXPECT_TRUE(trace->seconds[0] >= 0.029 && trace->seconds[2] >= 0.059);
  EXPECT_TRUE(trace->starts[1] == trace->seconds[0] && trace->starts[2] == trace->seconds[0] + trace->seconds[1]);
  EXPECT_TRUE(trace->seconds[1] < trace->seconds[0] + trace->seconds[2]);
}

TEST(a_wait_of_a_stream_is_a_stall_and_a_copy_has_its_own_time) {
  StreamsTest t({2});
  const Variable first = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable second = t.make_on(t.main, 2 * t.chunk, 2);
  t.synchronize();
  EXPECT_EQ(t.stats().stall_swap_in_seconds, 0.0);
  Gate gate;
  gate.close_on(t.in());
  t.read_later(t.main, first);
  open_later(gate);
  t.synchronize();
  const ooc_stats stats = t.stats();
  EXPECT_TRUE(stats.stall_swap_in_seconds >= 0.05);
  EXPECT_TRUE(stats.copy_in_seconds > 0 && stats.copy_out_seconds > 0);
  EXPECT_TRUE(stats.copy_in_seconds < stats.stall_swap_in_seconds);  // the gate is not part of the copy
  t.expect(second);
}

void a_recorded_use_keeps_memory(const Limits& limits, uint64_t bytes) {
  StreamsTest t(limits);
  const Variable freed = t.make_on(t.main, bytes, 1);
  t.synchronize();
  Gate gate;
  gate.close_on(t.side);
  t.buffers.push_back(std::make_unique<Pinned>(freed.bytes));
  const Pinned& found = *t.buffers.back();  // a kernel that no function speaks of
  ASSERT_OK(driver().cuMemcpyDtoHAsync(found.data, freed.pointer(), freed.bytes, t.side.handle));
  t.core.record_use(freed.address, t.side.handle);
  t.core.free(freed.address, t.main.handle);
  const Variable next = t.make_on(t.main, bytes, 2);
  EXPECT_EQ(next.address, freed.address);
  open_later(gate);
  t.synchronize();
  EXPECT_TRUE(found.contents() == pattern(freed.bytes, 1));
}
TEST(a_recorded_use_keeps_memory_from_its_next_user) { a_recorded_use_keeps_memory({2}, 2 * granularity()); }
TEST(a_recorded_use_keeps_a_small_block_from_its_next_user) {
  Limits limits;
  limits.small_limit = granularity();
  a_recorded_use_keeps_memory(limits, 1 << 10);
}

TEST(a_pinned_variable_has_arrived) {
  StreamsTest t({2});
  const Variable first = t.make_on(t.main, 2 * t.chunk, 1);
  const Variable second = t.make_on(t.main, 2 * t.chunk, 2);
  t.let_go_on(t.main);
  Gate gate;
  gate.close_on(t.in());
  std::thread opener([&] {
    t.core.device().bind_thread();
    open_later(gate);
  });
  uint64_t token = 0;
  EXPECT_EQ(t.core.pin(first.address, OOC_READ, &token), OOC_OK);
  EXPECT_TRUE(testing::read(first.pointer(), first.bytes) == pattern(first.bytes, 1));
  opener.join();
  EXPECT_EQ(t.core.unpin(token, OOC_READ), OOC_OK);
  t.expect(second);
}

TEST(many_streams_and_variables_in_random_order) {
  StreamsTest t({12});
  std::vector<Variable> variables;
  uint32_t state = 7;
  auto random = [&](uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
  };
  struct Read {
    const Pinned* found;
    Bytes expected;
  };
  std::vector<Read> pending;
  std::vector<std::unique_ptr<Event>> written;  // [variables] the program's own order between its streams
  auto on = [&](uint32_t which) -> const Stream& { return which != 0 ? t.side : t.main; };
  for (int step = 0; step < 600; ++step) {
    const Stream& stream = on(random(2));
    if (variables.size() < 12 && (variables.empty() || random(4) == 0)) {
      variables.push_back(t.make_on(stream, (1 + random(4)) * t.chunk - random(1000), random(1000)));
      written.push_back(std::make_unique<Event>());
      ASSERT_OK(driver().cuEventRecord(written.back()->handle, stream.handle));
      continue;
    }
    const uint32_t i = random(static_cast<uint32_t>(variables.size()));
    ASSERT_OK(driver().cuStreamWaitEvent(stream.handle, written[i]->handle, 0));
    switch (random(4)) {
      case 0:
        t.write_later(stream, variables[i], random(1000));
        break;
      case 1: {
        ASSERT_OK(driver().cuEventRecord(written[i]->handle, stream.handle));
        t.core.free(variables[i].address, stream.handle);
        variables.erase(variables.begin() + i);
        written.erase(written.begin() + i);
        continue;
      }
      default:
        pending.push_back({&t.read_later(stream, variables[i]), pattern(variables[i].bytes, variables[i].seed)});
    }
    ASSERT_OK(driver().cuEventRecord(written[i]->handle, stream.handle));
    if (pending.size() < 40) continue;
    t.synchronize();
    for (const Read& read : pending) ASSERT_TRUE(read.found->contents() == read.expected);
    pending.clear();
    t.buffers.clear();
    EXPECT_EQ(t.core.audit(), OOC_OK);
  }
  EXPECT_TRUE(t.stats().swap_in_count > 50 && t.stats().clean_drop_count > 5);
}
