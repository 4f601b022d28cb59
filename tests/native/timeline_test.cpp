// The timeline: what it says happened is what the counters say, in order, within fixed memory, from many threads.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "clock.h"
#include "daemon_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

struct Seen {
  std::vector<ooc_event> events;
  ooc_timeline state{};
  uint64_t first = 0;  // position

  uint64_t bytes(uint32_t kind) const {
    uint64_t sum = 0;
    for (const ooc_event& event : events) sum += event.kind == kind ? event.bytes : 0;
    return sum;
  }
  double seconds(uint32_t kind) const {
    double sum = 0;
    for (const ooc_event& event : events) sum += event.kind == kind ? event.end - event.start : 0;
    return sum;
  }
  uint64_t count(uint32_t kind, uint32_t flags = 0) const {
    uint64_t found = 0;
    for (const ooc_event& event : events) found += event.kind == kind && (event.flags & flags) == flags ? 1u : 0u;
    return found;
  }
  std::vector<ooc_event> of(uint32_t kind) const {
    std::vector<ooc_event> found;
    for (const ooc_event& event : events)
      if (event.kind == kind) found.push_back(event);
    return found;
  }
};

Seen read_all(Core& core, uint32_t block = 7) {
  Seen seen;
  uint64_t from = 0;
  std::vector<ooc_event> part(block);
  bool first = true;
  while (const uint32_t found = core.timeline_read(&from, part.data(), block, &seen.state)) {
    if (first) seen.first = from;
    else EXPECT_EQ(from, seen.first + seen.events.size());  // nobody writes meanwhile
    first = false;
    seen.events.insert(seen.events.end(), part.begin(), part.begin() + found);
    from += found;
  }
  return seen;
}

bool near(double left, double right) { return std::abs(left - right) < 1e-7; }

}  // namespace

TEST(nothing_is_kept_while_it_is_off) {
  CoreTest t({4});
  t.expect_intact(t.make_many(6, 2 * t.chunk));
  const Seen seen = read_all(t.core);
  EXPECT_EQ(seen.events.size(), size_t{0});
  EXPECT_EQ(seen.state.on, 0u);
  EXPECT_EQ(seen.state.capacity, uint64_t{0});
}

TEST(functions_are_there_in_order_with_their_names) {
  CoreTest t({8});
  t.core.timeline_start(1024);
  const Variable variable = t.make(2 * t.chunk, 1, "first");
  EXPECT_EQ(t.check(variable, "second"), OOC_OK);
  ASSERT_EQ(t.begin("third", {reads(variable)}), OOC_OK);  // still runs
  const std::vector<ooc_event> functions = read_all(t.core).of(OOC_EVENT_FUNCTION);
  ASSERT_EQ(functions.size(), size_t{3});
  const char* names[] = {"first", "second", "third"};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(functions[i].function, t.id(names[i]));
    EXPECT_EQ(functions[i].index, static_cast<int32_t>(i));
    EXPECT_EQ(functions[i].iteration, 1u);
    EXPECT_TRUE(functions[i].thread > 0);
    if (i > 0) EXPECT_TRUE(functions[i].start >= functions[i - 1].end);
  }
  EXPECT_TRUE(functions[1].end >= functions[1].start && functions[2].end < 0);
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_TRUE(read_all(t.core).of(OOC_EVENT_FUNCTION)[2].end >= functions[2].start);
}

TEST(copies_drops_and_stalls_add_up_to_the_counters) {
  CoreTest t({4});
  t.core.timeline_start(1 << 14);
  std::vector<Variable> v = t.make_many(6, 2 * t.chunk - 100);
  for (int round = 0; round < 3; ++round) {
    t.expect_intact(v);
    EXPECT_EQ(t.update(v[0], 40), OOC_OK);
  }
  const ooc_stats stats = t.stats();
  const Seen seen = read_all(t.core);
  EXPECT_EQ(seen.state.lost, uint64_t{0});
  EXPECT_TRUE(stats.swap_out_bytes > 0 && stats.swap_in_bytes > 0 && stats.clean_drop_bytes > 0);
  EXPECT_EQ(seen.bytes(OOC_EVENT_COPY_OUT), stats.swap_out_bytes);
  EXPECT_EQ(seen.bytes(OOC_EVENT_COPY_IN), stats.swap_in_bytes);
  EXPECT_EQ(seen.bytes(OOC_EVENT_DROP), stats.clean_drop_bytes);
  EXPECT_EQ(seen.count(OOC_EVENT_COPY_OUT), stats.swap_out_count);
  EXPECT_EQ(seen.count(OOC_EVENT_COPY_IN), stats.swap_in_count);
  EXPECT_EQ(seen.count(OOC_EVENT_DROP), stats.clean_drop_count);
  EXPECT_EQ(seen.count(OOC_EVENT_COPY_IN, OOC_EVENT_ON_DEMAND), stats.demand_swap_in_count);
  EXPECT_EQ(seen.count(OOC_EVENT_COPY_OUT, OOC_EVENT_ON_DEMAND), stats.swap_out_count);  // no plan asked for any
  EXPECT_EQ(seen.count(OOC_EVENT_DROP, OOC_EVENT_ON_DEMAND), stats.clean_drop_count);
  EXPECT_EQ(seen.count(OOC_EVENT_FUNCTION), stats.functions);
  EXPECT_TRUE(near(seen.seconds(OOC_EVENT_COPY_OUT), stats.copy_out_seconds));
  EXPECT_TRUE(near(seen.seconds(OOC_EVENT_COPY_IN), stats.copy_in_seconds));
  EXPECT_TRUE(stats.stall_swap_in_seconds > 0 && stats.stall_room_seconds > 0);
  EXPECT_TRUE(near(seen.seconds(OOC_EVENT_STALL_SWAP_IN), stats.stall_swap_in_seconds));
  EXPECT_TRUE(near(seen.seconds(OOC_EVENT_STALL_ROOM), stats.stall_room_seconds));
}

// Several are enqueued before the first is over; a link carries one after the other.
TEST(copies_of_a_direction_do_not_overlap) {
  CoreTest t({6});
  const std::vector<Variable> v = t.make_many(3, 2 * t.chunk);
  t.core.timeline_start(1024);
  const Variable large = t.make(6 * t.chunk, 9);
  const std::vector<ooc_event> out = read_all(t.core).of(OOC_EVENT_COPY_OUT);
  ASSERT_EQ(out.size(), size_t{3});
  for (size_t i = 1; i < out.size(); ++i) EXPECT_TRUE(out[i].start >= out[i - 1].end - 1e-9);
  EXPECT_EQ(t.check(large), OOC_OK);
  t.expect_intact(v);
}

TEST(a_stall_names_its_function_and_its_variable) {
  CoreTest t({4});
  const std::vector<Variable> v = t.make_many(3, 2 * t.chunk);
  ooc_iteration ended;
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  t.core.timeline_start(1024);
  EXPECT_EQ(t.check(v[1], "there"), OOC_OK);
  EXPECT_EQ(t.call("waits", {reads(v[0]), reads(v[1])}), OOC_OK);  // the first had left, the second is there
  const std::vector<ooc_event> stalls = read_all(t.core).of(OOC_EVENT_STALL_SWAP_IN);
  ASSERT_EQ(stalls.size(), size_t{1});
  EXPECT_EQ(stalls[0].function, t.id("waits"));
  EXPECT_EQ(stalls[0].index, 1);
  EXPECT_EQ(stalls[0].variable, 1);  // the second that appeared in the iteration
  EXPECT_EQ(stalls[0].iteration, 2u);
  const std::vector<ooc_event> in = read_all(t.core).of(OOC_EVENT_COPY_IN);
  ASSERT_TRUE(!in.empty());
  EXPECT_EQ(in[0].region, stalls[0].region);
  EXPECT_TRUE(in[0].start >= stalls[0].start - 1e-9 && in[0].end <= stalls[0].end + 1e-9);
}

TEST(memory_is_told_when_it_changes) {
  CoreTest t({4});
  t.core.timeline_start(1024);
  const Variable variable = t.make(3 * t.chunk, 1);
  t.let_go();
  t.let_go();
  const std::vector<ooc_event> before = read_all(t.core).of(OOC_EVENT_MEMORY);
  t.core.free(variable.address);
  t.let_go();
  t.let_go();
  const std::vector<ooc_event> after = read_all(t.core).of(OOC_EVENT_MEMORY);
  ASSERT_TRUE(!before.empty());
  ASSERT_EQ(after.size(), before.size() + 1);  // once, though two functions have begun since
  EXPECT_EQ(before.back().bytes, 3 * t.chunk);
  EXPECT_EQ(after.back().bytes, uint64_t{0});
  const ooc_stats stats = t.stats();
  EXPECT_EQ(after.back().cached_bytes, stats.cached_bytes);
  EXPECT_EQ(after.back().free_bytes, stats.free_bytes);
  EXPECT_EQ(after.back().cached_bytes, 3 * t.chunk);
}

TEST(allocations_and_iterations_are_there) {
  CoreTest t({8});
  t.core.timeline_start(1024);
  const Variable variable = t.make(2 * t.chunk - 5, 1);
  ooc_iteration ended;
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  t.core.free(variable.address);
  const Seen seen = read_all(t.core);
  const std::vector<ooc_event> made = seen.of(OOC_EVENT_ALLOCATED), freed = seen.of(OOC_EVENT_FREED);
  ASSERT_TRUE(made.size() == 1 && freed.size() == 1);
  EXPECT_EQ(made[0].bytes, 2 * t.chunk - 5);
  EXPECT_EQ(made[0].address, reinterpret_cast<uintptr_t>(variable.address));
  EXPECT_EQ(freed[0].address, made[0].address);
  EXPECT_EQ(made[0].live_bytes, 2 * t.chunk - 5);
  EXPECT_EQ(freed[0].live_bytes, uint64_t{0});
  EXPECT_EQ(made[0].region, freed[0].region);
  const std::vector<ooc_event> iterations = seen.of(OOC_EVENT_ITERATION);
  ASSERT_EQ(iterations.size(), size_t{1});
  EXPECT_EQ(iterations[0].bytes, ended.fingerprint);
  EXPECT_EQ(iterations[0].iteration, 1u);
  EXPECT_EQ(iterations[0].index, 1);
  EXPECT_TRUE(near(iterations[0].end - iterations[0].start, ended.seconds));
}

TEST(the_oldest_are_overwritten_and_counted) {
  CoreTest t({8});
  t.core.timeline_start(64);
  const uint32_t name = t.id("many");
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(t.core.function_begin(name, nullptr, 0), OOC_OK);
    ASSERT_EQ(t.core.function_end(false), OOC_OK);
  }
  const Seen seen = read_all(t.core, 50);
  EXPECT_EQ(seen.events.size(), size_t{64});
  EXPECT_EQ(seen.state.capacity, uint64_t{64});
  EXPECT_EQ(seen.state.recorded, seen.state.lost + 64);
  EXPECT_EQ(seen.first, seen.state.next - 64);
  for (size_t i = 0; i < seen.events.size(); ++i) {
    EXPECT_EQ(seen.events[i].index, static_cast<int32_t>(1000 - 64 + i));
    EXPECT_TRUE(seen.events[i].end >= seen.events[i].start);
  }
  t.core.timeline_stop();
  t.let_go();
  EXPECT_EQ(read_all(t.core).state.next, seen.state.next);
  t.core.timeline_start(64);  // the one before is forgotten, and what is filled in later does not hit the new one
  EXPECT_EQ(read_all(t.core).events.size(), size_t{0});
}

// All fits; the plan moves a variable out and in again all the same, and nobody demands anything.
TEST(planned_copies_are_told_from_demanded_ones) {
  DaemonTest t({6});
  const std::vector<Variable> v = t.make_many(3, 2 * t.chunk);
  auto iterate = [&] {
    for (const Variable& variable : v) EXPECT_EQ(t.check(variable), OOC_OK);
    return t.boundary();
  };
  iterate();
  const ooc_iteration second = iterate();
  ASSERT_TRUE(t.install(second.fingerprint, {{0, 0, 2, 0}}, {{0, 0, 2, 1, 1, 3}}));
  iterate();
  t.core.timeline_start(1024);
  const ooc_stats before = t.stats();
  for (const Variable& variable : v) {
    EXPECT_EQ(t.check(variable), OOC_OK);
    t.settle();
  }
  t.boundary();
  t.settle();
  const ooc_stats after = t.stats();
  const Seen seen = read_all(t.core);
  EXPECT_EQ(after.demand_swap_in_count, uint64_t{0});
  EXPECT_EQ(seen.bytes(OOC_EVENT_COPY_IN), 2 * t.chunk);
  EXPECT_EQ(after.swap_in_bytes - before.swap_in_bytes, 2 * t.chunk);
  EXPECT_EQ(seen.bytes(OOC_EVENT_DROP) + seen.bytes(OOC_EVENT_COPY_OUT), 2 * t.chunk);
  for (uint32_t kind : {OOC_EVENT_COPY_IN, OOC_EVENT_COPY_OUT, OOC_EVENT_DROP})
    EXPECT_EQ(seen.count(kind, OOC_EVENT_ON_DEMAND), uint64_t{0});
  EXPECT_EQ(seen.count(OOC_EVENT_ITERATION), uint64_t{1});
  EXPECT_EQ(seen.count(OOC_EVENT_ITERATION, OOC_EVENT_ON_DEMAND), uint64_t{0});
}

TEST(a_write_back_is_a_copy_after_which_it_stays) {
  DaemonTest t({6});
  const Variable written = t.make(2 * t.chunk, 1);
  auto iterate = [&] {
    EXPECT_EQ(t.call("write", {{written.address, OOC_READ | OOC_WRITE, 0, 0}}), OOC_OK);
    t.settle();
    t.let_go();
    t.settle();
    return t.boundary();
  };
  iterate();
  const ooc_iteration second = iterate();
  ASSERT_TRUE(t.install(second.fingerprint, {}, {}, {{0, 0, 2, 0}}));
  iterate();
  t.core.timeline_start(1024);
  const ooc_stats before = t.stats();
  iterate();
  const uint64_t back = t.stats().write_back_bytes - before.write_back_bytes;
  EXPECT_EQ(back, 2 * t.chunk);
  const Seen seen = read_all(t.core);
  EXPECT_EQ(seen.bytes(OOC_EVENT_COPY_OUT), back);
  EXPECT_EQ(seen.count(OOC_EVENT_COPY_OUT, OOC_EVENT_WRITE_BACK), seen.count(OOC_EVENT_COPY_OUT));
}

TEST(threads_write_while_others_read_start_and_stop) {
  DaemonTest t({12, 200}, true);
  t.core.timeline_start(256);
  std::atomic<int> running{3};
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 3; ++number)
    threads.emplace_back([&, number] {
      t.core.device().bind_thread();
      std::vector<Variable> own;
      for (unsigned i = 0; i < 3; ++i) own.push_back(t.make(2 * t.chunk, 10 * number + i));
      for (int round = 0; round < 40; ++round) t.expect_intact(own);
      t.free(own);
      --running;
    });
  uint64_t reads = 0;
  for (int round = 0; running > 0; ++round) {
    uint64_t from = 0;
    ooc_event part[64];
    ooc_timeline state;
    while (const uint32_t found = t.core.timeline_read(&from, part, 64, &state)) {
      for (uint32_t i = 0; i < found; ++i) EXPECT_TRUE(part[i].kind >= OOC_EVENT_FUNCTION && part[i].kind <= OOC_EVENT_FREED);
      from += found;
      reads += found;
      if (running == 0) break;
    }
    if (round % 16 == 7) t.core.timeline_stop();
    if (round % 16 == 8) t.core.timeline_start(256);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(reads > 0);
  const Seen seen = read_all(t.core);
  std::map<uint32_t, double> last;  // the functions of each thread follow each other
  for (const ooc_event& event : seen.of(OOC_EVENT_FUNCTION)) {
    EXPECT_TRUE(event.end >= event.start);
    EXPECT_TRUE(event.start >= last[event.thread]);
    last[event.thread] = event.end;
  }
}

// Where functions run on streams, copies are timed by the device's clock and told in the host's.
TEST(copies_on_streams_have_the_devices_times) {
  CoreTest t([] {
    Limits limits{4};
    limits.asynchronous = true;
    return limits;
  }());
  t.core.timeline_start(1 << 12);
  const double began = now_seconds();
  const std::vector<Variable> v = t.make_many(6, 2 * t.chunk);
  for (int round = 0; round < 3; ++round)
    for (const Variable& variable : v) EXPECT_EQ(t.call("use", {{variable.address, OOC_READ | OOC_WRITE, 0, 0}}), OOC_OK);
  ASSERT_EQ(t.core.synchronize(), OOC_OK);
  ooc_iteration ended;
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  const ooc_stats stats = t.stats();
  const double over = now_seconds();
  const Seen seen = read_all(t.core);
  EXPECT_EQ(seen.bytes(OOC_EVENT_COPY_OUT), stats.swap_out_bytes);
  EXPECT_EQ(seen.bytes(OOC_EVENT_COPY_IN), stats.swap_in_bytes);
  EXPECT_TRUE(std::abs(seen.seconds(OOC_EVENT_COPY_OUT) - stats.copy_out_seconds) < 1e-4);
  EXPECT_TRUE(std::abs(seen.seconds(OOC_EVENT_COPY_IN) - stats.copy_in_seconds) < 1e-4);
  EXPECT_EQ(seen.count(OOC_EVENT_FUNCTION, OOC_EVENT_ENQUEUED), stats.functions);
  for (uint32_t kind : {OOC_EVENT_COPY_OUT, OOC_EVENT_COPY_IN})
    for (const ooc_event& event : seen.of(kind))
      EXPECT_TRUE(event.start >= began - 0.05 && event.end <= over + 0.05 && event.end > event.start);
}

TEST(ranges_need_a_library_with_the_functions) {
  CoreTest t({4});
  EXPECT_EQ(t.core.ranges_load("libnot_there_at_all.so"), OOC_INVALID);
  EXPECT_TRUE(contains(last_error(), "libnot_there_at_all"));
  EXPECT_EQ(t.core.ranges_load("libc.so.6"), OOC_INVALID);
  EXPECT_TRUE(contains(last_error(), "nvtxRangePushA"));
}

TEST(places_are_kept_with_the_variables) {
  CoreTest t({8});
  const Variable first = t.make(2 * t.chunk, 1), second = t.make(t.chunk, 2);
  const uint32_t place = t.core.place_id("train.py:7");
  EXPECT_EQ(t.core.place_id("train.py:7"), place);
  EXPECT_TRUE(place != t.core.place_id("train.py:8") && place != 0);
  t.core.set_place(second.address, place);
  ooc_iteration ended;
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  {
    Lock lock(t.core.mutex());
    const auto trace = t.core.trace(ended.fingerprint);
    ASSERT_EQ(trace->variables.size(), size_t{2});
    EXPECT_EQ(trace->variables[0].place, 0u);
    EXPECT_EQ(trace->variables[1].place, place);
  }
  EXPECT_EQ(std::string(t.core.place_text(place)), std::string("train.py:7"));
  EXPECT_TRUE(t.core.place_text(1000) == nullptr);
  t.core.free(second.address);
  const Variable third = t.make(t.chunk, 3);
  EXPECT_TRUE(first.address != nullptr && third.address == second.address);  // in the same region
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  Lock lock(t.core.mutex());
  EXPECT_EQ(t.core.trace(ended.fingerprint)->variables.back().place, 0u);
}
