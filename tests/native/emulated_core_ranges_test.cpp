// Ranges of variables where things go wrong or go on beside: driver calls that fail, forks, streams, the daemon's
// threads, a budget that changes.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "daemon_fixture.h"
#include "emulated_fixture.h"
#include "ranges_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr uint64_t kBudget = 10;

bool plain_holds(const Array& array) {
  for (uint64_t i = 0; i < array.bytes.size(); ++i)
    if (array.known[i] && static_cast<unsigned char>(*array.at(i)) != array.bytes[i]) return false;
  return true;
}

// Of 24 chunks: some on the device, some swapped, some in both places, some blank.
Array assorted(RangesTest& t) {
  Array a = t.make_absent(24 * t.chunk - 9);
  EXPECT_EQ(t.write_range(a, 0, 9 * t.chunk, 1), OOC_OK);
  EXPECT_EQ(t.write_range(a, 15 * t.chunk, 9 * t.chunk - 9, 2), OOC_OK);
  EXPECT_EQ(t.check_range(a, 2 * t.chunk, 3 * t.chunk), OOC_OK);
  EXPECT_EQ(t.write_range(a, 9 * t.chunk, t.chunk / 2, 3), OOC_OK);
  t.let_go();
  return a;
}

int status_of(pid_t child) {
  int status = 0;
  ASSERT_TRUE(child > 0 && waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Work on a stream, whose results are looked at when it is done.
struct Later {
  explicit Later(const Bytes& contents) : size(contents.size()) {
    void* pointer = nullptr;
    ASSERT_OK(driver().cuMemHostAlloc(&pointer, size, 0));
    data = static_cast<unsigned char*>(pointer);
    std::copy(contents.begin(), contents.end(), data);
  }
  ~Later() { EXPECT_OK(driver().cuMemFreeHost(data)); }
  Later(const Later&) = delete;
  Later& operator=(const Later&) = delete;
  unsigned char* data;
  size_t size;
  Bytes expected;
  std::vector<bool> known;
};

}  // namespace

TEST(single_failures_go_unnoticed_and_lasting_ones_lose_nothing) {
  const char* const calls[] = {"cuMemCreate",         "cuMemRelease",      "cuMemMap",          "cuMemUnmap",
                               "cuMemSetAccess",      "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord",
                               "cuEventQuery",  "cuStreamQuery", "cuMemHostRegister"};
  for (const char* call : calls)
    for (const bool lasting : {false, true}) {
      const std::string rules = std::string(call) + (lasting ? ":after=4" : ":every=5");
      const int before = failures;
      RangesTest t({kBudget, 128, 0, 1});
      RandomProgram program(t, 3, 40);
      for (int step = 0; step < 40; ++step) ASSERT_EQ(program.step(), OOC_OK);
      ASSERT_EQ(control().inject_faults(rules.c_str()), 0);
      int refused = 0;
      for (int step = 0; step < (lasting ? 40 : 120); ++step) {
        if (program.step() != OOC_OK) ++refused;
        EXPECT_TRUE(!t.core.in_function());
      }
      control().clear_faults();
      if (!lasting) EXPECT_EQ(refused, 0);
      EXPECT_EQ(t.core.audit(), OOC_OK);
      t.let_go();
      for (const Array& array : program.arrays) t.check_all(array, 3 * t.chunk);
      if (failures != before) std::fprintf(stderr, "under %s: %s\n", rules.c_str(), last_error().c_str());
    }
}

TEST(a_copy_in_that_does_not_begin_leaves_a_freed_variable_to_the_one_under_way) {
  RangesTest t({8, 64, 0, 4});
  Array a = t.make_absent(4 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.swap_out();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  Region* region = t.core.recorder().current().variables[0].handle.get();
  Chunk chunks[4];
  ASSERT_TRUE(t.core.idle_chunks().take(4, chunks));
  ASSERT_TRUE(t.core.transitions().start_in(lock, {region, 0, 2}, chunks, transfers));
  lock.unlock();
  t.core.free(a.address);
  ASSERT_EQ(control().inject_faults("cuMemMap"), 0);
  lock.lock();
  EXPECT_TRUE(!t.core.transitions().start_in(lock, {region, 2, 2}, chunks + 2, transfers));
  lock.unlock();
  control().clear_faults();
  const Variable next = t.make(4 * t.chunk, 9);
  EXPECT_TRUE(next.address != a.address);
  lock.lock();
  t.core.transitions().settle(lock, transfers[0]);
  lock.unlock();
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.swap_out();
  EXPECT_EQ(t.check(next), OOC_OK);
}

TEST(a_function_on_host_memory_waits_for_what_is_on_its_way) {
  RangesTest t({8, 64, 0, 4});
  Array a = t.make_absent(4 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.swap_out();
  std::vector<Transfer> transfers;
  Lock lock(t.core.mutex());
  Region* region = t.core.recorder().current().variables[0].handle.get();
  Chunk chunks[2];
  ASSERT_TRUE(t.core.idle_chunks().take(2, chunks));
  ASSERT_TRUE(t.core.transitions().start_in(lock, {region, 1, 2}, chunks, transfers));
  lock.unlock();
  std::atomic<bool> began{false};
  std::thread other([&] {
    t.core.device().bind_thread();
    const ooc_operand all = a.whole(OOC_READ);
    EXPECT_EQ(t.core.function_begin_host(t.id("on host"), &all, 1), OOC_OK);
    began = true;
    EXPECT_TRUE(t.range_holds(a, 0, 4 * t.chunk));
    EXPECT_EQ(t.core.function_end(false), OOC_OK);
  });
  usleep(50000);  // time to begin too early
  EXPECT_TRUE(!began);
  lock.lock();
  t.core.transitions().settle(lock, transfers[0]);
  lock.unlock();
  other.join();
  EXPECT_EQ(t.core.audit(), OOC_OK);
}

TEST(chunks_of_pieces_that_do_not_begin_are_given_back) {
  RangesTest t({8, 64, 0, 4});
  Array a = t.make_absent(8 * t.chunk);
  ASSERT_EQ(t.write_range(a, 0, t.chunk, 1), OOC_OK);
  t.swap_out();  // one piece is swapped, the other blank
  for (const char* rules : {"cuMemMap", "cuMemMap:after=1"}) {
    ASSERT_EQ(control().inject_faults(rules), 0);
    EXPECT_EQ(t.begin("all", {a.whole(OOC_READ)}), OOC_DRIVER_FAILURE);
    control().clear_faults();
    EXPECT_EQ(t.core.audit(), OOC_OK);
    t.swap_out();
  }
  t.check_all(a, 8 * t.chunk);
}

TEST(a_forked_child_has_the_bytes_and_the_parent_keeps_them) {
  RangesTest t({kBudget, 128, 0, 1});
  const Array a = assorted(t);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    Array plain{t.core.malloc_absent(30 * t.chunk), {}, {}};
    if (plain.address == nullptr || t.owns(plain.address)) _exit(50);
    std::memset(plain.address, 1, 30 * t.chunk);
    t.core.free(plain.address);
    if (!plain_holds(a)) _exit(51);
    std::memset(a.address, 7, a.bytes.size());  // blank chunks, too, are plain memory
    const ooc_operand part = a.range(3, 5 * t.chunk, OOC_READ);
    const uint32_t f = t.id("f");
    if (t.core.function_begin(f, &part, 1) != OOC_OK || t.core.function_end(false) != OOC_OK) _exit(52);
    if (t.core.function_begin_host(f, &part, 1) != OOC_OK || t.core.function_end(false) != OOC_OK) _exit(53);
    t.core.free(a.address);
    _exit(0);
  }
  EXPECT_EQ(status_of(child), 0);
  t.check_all(a, 4 * t.chunk);
}

TEST(a_detached_core_keeps_the_bytes) {
  for (const bool on_host : {false, true}) {
    const uint64_t before = get_stats().physical_bytes;  // where an unmap was refused, chunks are lost
    RangesTest t({kBudget, 256, 0, 1});
    const Array a = assorted(t);
    if (on_host) {
      const ooc_operand all = a.whole(OOC_READ);
      ASSERT_EQ(t.core.function_begin_host(t.id("f"), &all, 1), OOC_OK);
      ASSERT_EQ(t.core.function_end(false), OOC_OK);
    }
    ASSERT_EQ(t.core.detach(), OOC_OK);
    EXPECT_TRUE(plain_holds(a));
    std::memset(a.address, 7, a.bytes.size());
    EXPECT_EQ(get_stats().physical_bytes, before);
  }
}

TEST(ranges_on_streams_compute_on_the_right_bytes) {
  Limits limits{kBudget, 128, 0, 1};
  limits.asynchronous = true;
  const bool faults[] = {false, true};
  for (const bool with_faults : faults) {
    RangesTest t(limits);
    const Stream streams[2];
    std::vector<Array> arrays;
    for (int i = 0; i < 4; ++i) arrays.push_back(t.make_absent(12 * t.chunk - static_cast<uint64_t>(i) * 100));
    std::vector<std::unique_ptr<Later>> later;
    RandomProgram choose(t, 21, 0);
    const auto finish = [&] {
      for (const Stream& stream : streams) EXPECT_OK(driver().cuStreamSynchronize(stream.handle));
      for (const auto& copy : later)
        for (size_t i = 0; i < copy->known.size(); ++i)
          if (copy->known[i] && copy->data[i] != copy->expected[i]) {
            EXPECT_EQ(copy->data[i], copy->expected[i]);
            break;
          }
      later.clear();
    };
    const char* const rules = "cuMemMap:every=9;cuEventRecord:every=7;cuMemcpyHtoDAsync:every=11";
    if (with_faults) ASSERT_EQ(control().inject_faults(rules), 0);
    for (int step = 0; step < 400; ++step) {
      const size_t chosen = choose.below(arrays.size());
      Array& array = arrays[chosen];
      const CUstream stream = streams[chosen % 2].handle;  // one stream for each variable
      const auto range = choose.some_range(array);
      const auto first = static_cast<std::ptrdiff_t>(range.first);
      const auto last = first + static_cast<std::ptrdiff_t>(range.second);
      const bool writes = choose.below(2) == 0;
      const ooc_operand operand = array.range(range.first, range.second, writes ? OOC_WRITE : OOC_READ);
      later.push_back(std::make_unique<Later>(pattern(range.second, static_cast<unsigned>(step))));
      Later& copy = *later.back();
      ASSERT_EQ(t.core.function_begin(t.id("part"), &operand, 1, stream), OOC_OK);
      CUresult enqueued = CUDA_ERROR_UNKNOWN;
      for (int attempt = 0; attempt < 5 && enqueued != CUDA_SUCCESS; ++attempt)
        enqueued = writes ? driver().cuMemcpyHtoDAsync(array.pointer(range.first), copy.data, copy.size, stream)
                          : driver().cuMemcpyDtoHAsync(copy.data, array.pointer(range.first), copy.size, stream);
      ASSERT_OK(enqueued);
      ASSERT_EQ(t.core.function_end(false), OOC_OK);
      if (writes) {
        std::copy_n(copy.data, copy.size, array.bytes.begin() + first);
        std::fill(array.known.begin() + first, array.known.begin() + last, true);
      } else {
        copy.expected.assign(array.bytes.begin() + first, array.bytes.begin() + last);
        copy.known.assign(array.known.begin() + first, array.known.begin() + last);
      }
      if (step % 37 == 0) finish();
      if (step % 50 == 49) ASSERT_EQ(t.core.evict_all(), OOC_OK);
      EXPECT_EQ(t.core.audit(), OOC_OK);
    }
    finish();
    control().clear_faults();
    for (const Array& array : arrays) t.core.free(array.address, streams[0].handle);
    EXPECT_OK(driver().cuStreamSynchronize(streams[1].handle));
    EXPECT_TRUE(t.stats().swap_out_bytes > 40 * t.chunk);
  }
}

// A plan with threads that carry it out, on variables of which functions use parts; then one that does not fit what
// happens.
TEST(threads_of_the_daemon_move_parts_meanwhile) {
  WithDaemon<RangesTest> t({kBudget, 128, 0, 1}, true);
  Array a = t.make_absent(16 * t.chunk);
  t.write_all(a, 4 * t.chunk, 1);
  t.boundary();
  unsigned seed = 100;
  const auto iterate = [&](uint64_t shift) {
    for (uint64_t part = 0; part < 8; ++part) {
      const uint64_t offset = (part * 2 + shift) % 16 * t.chunk, bytes = std::min(2 * t.chunk, a.bytes.size() - offset);
      ASSERT_EQ(part % 2 == 0 ? t.check_range(a, offset, bytes) : t.write_range(a, offset, bytes, seed++), OOC_OK);
    }
    return t.boundary();
  };
  iterate(0);
  const uint64_t fingerprint = iterate(0).fingerprint;
  std::vector<OutMove> outs;
  std::vector<InMove> ins;
  for (int32_t part = 0; part < 8; ++part) {
    outs.push_back({0, part * 2, 2, part});
    if (part >= 4) ins.push_back({0, (part - 4) * 2, 2, part, part - 1, 8 + part - 4});  // of the next iteration
    else ins.push_back({0, (part + 4) * 2, 2, part, part, part + 4});
  }
  ASSERT_TRUE(t.install(fingerprint, outs, ins));
  for (int iteration = 0; iteration < 40; ++iteration) {
    const ooc_iteration ended = iterate(0);
    EXPECT_EQ(ended.fingerprint, fingerprint);
    if (iteration % 8 == 5) iterate(1);  // departs
    if (iteration % 8 == 7) ASSERT_EQ(t.core.set_budget((4 + static_cast<uint64_t>(iteration) % 5) * t.chunk), OOC_OK);
  }
  ASSERT_EQ(t.core.set_budget(kBudget * t.chunk), OOC_OK);
  t.check_all(a, 3 * t.chunk);
  EXPECT_TRUE(t.stats().planned_iteration_count > 10);
  EXPECT_TRUE(t.stats().swap_in_bytes > t.stats().demand_swap_in_bytes);
  t.daemon.settle();
  for (int attempt = 0; attempt < 20 && t.core.audit() != OOC_OK; ++attempt) usleep(2000);
}

TEST(strict_mode_finds_a_write_of_a_range_that_was_declared_as_read) {
  Limits limits{kBudget, 64, 0, 1};
  limits.strict = true;
  RangesTest t(limits);
  Array a = t.make_absent(6 * t.chunk);
  t.write_all(a, t.chunk, 1);
  ASSERT_EQ(t.check_range(a, 0, 3 * t.chunk), OOC_OK);
  const std::vector<ooc_operand> parts = {a.range(0, t.chunk, OOC_READ), a.range(t.chunk, t.chunk, OOC_WRITE),
                                          a.range(2 * t.chunk, t.chunk, OOC_READ)};
  ASSERT_EQ(t.call("liar", parts, [&] { t.put_range(a, t.chunk, t.chunk + 3, 4); }), OOC_OK);
  EXPECT_EQ(t.begin("next", {}), OOC_STRICT_VIOLATION);
  EXPECT_TRUE(contains(last_error(), "liar"));
  EXPECT_EQ(t.core.audit(), OOC_OK);  // no chunk lost its only copy
  t.check_all(a, 2 * t.chunk);  // what it wrote is kept, and so is what had left before it was found
}
