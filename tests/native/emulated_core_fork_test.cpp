// Fork and detach: device memory becomes private host memory at the same addresses, with the right bytes.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "daemon_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// Runs `body` in a child; its result is the exit status. A hang becomes a failure.
template <class Body>
pid_t in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  return child;
}

int exit_status(pid_t child) {
  int status = 0;
  ASSERT_TRUE(child > 0 && waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// The plain way, as a program in the child would read.
bool plain_holds(const Variable& variable) {
  const Bytes expected = pattern(variable.bytes, variable.seed);
  return std::memcmp(variable.address, expected.data(), expected.size()) == 0;
}

int wrong(const std::vector<Variable>& variables) {
  int count = 0;
  for (const Variable& variable : variables) count += plain_holds(variable) ? 0 : 1;
  return count;
}

// Resident, swapped, in part, small.
std::vector<Variable> assorted(CoreTest& t) {
  std::vector<Variable> all = t.make_many(4, 3 * t.chunk - 10);
  for (unsigned seed = 50; seed < 53; ++seed) {
    all.push_back({t.must_malloc(500), 500, seed});
    t.put(all.back());
  }
  t.let_go();
  const ooc_stats stats = t.stats();
  EXPECT_TRUE(stats.swap_out_bytes > 0 && stats.resident_bytes % (3 * t.chunk) != 0);
  return all;
}

struct ForkTest : CoreTest {
  ForkTest() : CoreTest({8, 64, granularity() / 4}) {}
};

}  // namespace

// Threads of the parent are about to wake up as it forks: no child may wait for them.
TEST(forks_after_a_detach_follow_each_other) {
  ForkTest t;
  Daemon daemon(t.core, true);
  const std::vector<Variable> all = assorted(t);
  ASSERT_EQ(t.core.detach(), OOC_OK);
  // A child that hangs within fork() keeps its parent, too: both have to end then.
  ASSERT_EQ(setpgid(0, 0), 0);
  signal(SIGALRM, [](int) { kill(0, SIGKILL); });
  alarm(20);
  for (int i = 0; i < 200; ++i) ASSERT_EQ(exit_status(in_child([&] { return wrong(all); })), 0);
  alarm(0);
  signal(SIGALRM, SIG_DFL);
  // Nor does it end those threads.
  const auto ends = [&] {
    alarm(5);
    daemon.settle();
    daemon.stop();
    return 0;
  };
  EXPECT_EQ(exit_status(in_child(ends)), 0);
}

TEST(a_child_sees_the_bytes_of_the_moment) {
  ForkTest t;
  std::vector<Variable> all = assorted(t);
  const pid_t child = in_child([&] {
    usleep(100000);  // the parent swaps and writes on meanwhile
    return wrong(all);
  });
  for (unsigned round = 0; round < 3; ++round)
    for (Variable& variable : all)
      if (variable.bytes > 500) EXPECT_EQ(t.update(variable, 100 + round), OOC_OK);
  EXPECT_EQ(exit_status(child), 0);
  t.expect_intact(all);
}

TEST(what_a_child_writes_stays_with_it) {
  ForkTest t;
  const std::vector<Variable> all = assorted(t);
  const pid_t child = in_child([&] {
    for (const Variable& variable : all) std::memset(variable.address, 1, variable.bytes);
    return 0;
  });
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.expect_intact(all);
}

TEST(a_child_does_not_wait_for_the_threads_of_its_parent) {
  DaemonTest t({8, 64, granularity() / 4}, true);
  t.daemon.settle();
  const pid_t child = in_child([&] {
    alarm(10);
    t.daemon.settle();
    return 0;
  });
  EXPECT_EQ(exit_status(child), 0);
}

TEST(a_child_goes_on_with_plain_memory) {
  ForkTest t;
  const std::vector<Variable> all = assorted(t);
  const uint64_t before = get_stats().physical_bytes;
  const pid_t child = in_child([&] {
    for (const uint64_t bytes : {uint64_t{100}, 20 * t.chunk}) {  // more than the budget
      void* address = t.core.malloc(bytes);
      if (address == nullptr) return 1;
      std::memset(address, 1, bytes);
      t.core.free(address);
    }
    if (t.call("child", {reads(all[0])}) != OOC_OK || wrong(all) != 0) return 2;
    uint64_t token = 0;
    if (t.core.pin(all[0].address, OOC_READ, &token) != OOC_OK || t.core.unpin(token, OOC_READ) != OOC_OK) return 3;
    for (const Variable& variable : all) t.core.free(variable.address);
    ooc_iteration ended;
    if (t.core.boundary(&ended) != OOC_OK || t.core.evict_all() != OOC_OK || t.core.audit() != OOC_OK) return 4;
    t.core.release_cached();
    t.stats();
    const pid_t grandchild = in_child([&] { return t.core.malloc(1000) != nullptr ? 0 : 1; });
    return exit_status(grandchild);
  });
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(get_stats().physical_bytes, before);
  t.expect_intact(all);
}

TEST(a_child_may_destroy_the_core) {
  const ooc_config config = [] {
    ooc_config with_threads = make_config({8, 64, granularity() / 4});
    with_threads.run_daemon = 1;
    return with_threads;
  }();
  ooc_core* core = ooc_core_create(&config);
  ASSERT_TRUE(core != nullptr);
  void* small = ooc_core_malloc(core, 100);
  void* large = ooc_core_malloc(core, 3 * config.chunk_bytes);
  std::memset(large, 7, 3 * config.chunk_bytes);
  usleep(20000);  // the daemon's threads wait
  const pid_t child = in_child([&] {
    ooc_core_stop_daemon(core);
    ooc_core_destroy(core);
    return 0;
  });
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(static_cast<char*>(large)[3 * config.chunk_bytes - 1], 7);
  ooc_core_free(core, small);
  EXPECT_EQ(ooc_core_audit(core), 0);
  ooc_core_destroy(core);
}

TEST(fork_while_other_threads_swap) {
  ForkTest t;
  const std::vector<Variable> all = assorted(t);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      for (size_t n = static_cast<size_t>(i); !stop; ++n) EXPECT_EQ(t.call("read", {reads(all[n % 4])}), OOC_OK);
    });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(exit_status(in_child([&] { return wrong(all); })), 0);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(t.stats().swap_in_count > 20);
  t.expect_intact(all);
}

TEST(fork_while_the_daemon_moves) {
  ConfigForTest slow;
  slow.config.d2h_bytes_per_second = slow.config.h2d_bytes_per_second = 20 << 20;  // a chunk takes 3 ms
  slow.apply();
  ForkTest t;
  Daemon daemon(t.core, true);
  std::vector<Variable> all = assorted(t);
  ooc_iteration ended;
  ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  unsigned seed = 100;
  const auto iterate = [&](bool with_forks) {
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(t.update(all[i], ++seed), OOC_OK);
      if (!with_forks) continue;
      usleep(4000);
      EXPECT_EQ(exit_status(in_child([&] { return wrong(all); })), 0);
    }
    ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
  };
  for (int i = 0; i < 3; ++i) iterate(false);
  // Each leaves after its use, in many pieces, and comes back before its next use.
  const int32_t variables[] = {0, 1, 2, 3}, first[] = {0, 0, 0, 0}, count[] = {3, 3, 3, 3}, after[] = {0, 1, 2, 3};
  const int32_t in_after[] = {-1, -1, 0, 1}, none[] = {0, 0, 0, 0};
  ooc_plan plan{};
  plan.fingerprint = ended.fingerprint;
  plan.outs = plan.ins = 4;
  plan.out_variable = plan.in_variable = variables;
  plan.out_first_chunk = plan.in_first_chunk = first;
  plan.out_chunk_count = plan.in_chunk_count = count;
  plan.out_after_function = after;
  plan.in_after_function = in_after;
  plan.in_after_outs = none;
  plan.in_before_function = variables;
  ASSERT_TRUE(daemon.install(plan));
  for (int i = 0; i < 4; ++i) iterate(true);
  const ooc_stats stats = t.stats();
  EXPECT_TRUE(stats.planned_iteration_count > 0);
  EXPECT_TRUE(stats.swap_out_bytes > stats.demand_swap_out_bytes);
  daemon.stop();
  t.expect_intact(all);
}

TEST(detach_turns_everything_into_host_memory) {
  const uint64_t before = get_stats().physical_bytes;
  {
    ForkTest t;
    Daemon daemon(t.core, true);
    std::vector<Variable> all = assorted(t);
    t.core.free(all.back().address);
    all.pop_back();
    t.core.free(t.must_malloc(t.chunk / 4));
    t.core.free(t.make(t.chunk, 9).address);
    t.let_go();
    ASSERT_EQ(t.core.detach(), OOC_OK);
    EXPECT_EQ(get_stats().physical_bytes, before);
    EXPECT_EQ(wrong(all), 0);
    EXPECT_EQ(t.call("after", {reads(all[0]), reads(all[1]), reads(all[2]), reads(all[3])}), OOC_OK);
    for (Variable& variable : all) std::memset(variable.address, 3, variable.bytes);
    void* more = t.core.malloc(100 * t.chunk);
    ASSERT_TRUE(more != nullptr);
    std::memset(more, 1, 100 * t.chunk);
    t.core.free(more);
    EXPECT_EQ(t.core.detach(), OOC_OK);  // once more is no error
    EXPECT_EQ(exit_status(in_child([&] { return static_cast<char*>(all[0].address)[5] == 3 ? 0 : 1; })), 0);
    for (const Variable& variable : all) t.core.free(variable.address);
  }
  EXPECT_EQ(get_stats().physical_bytes, before);  // and the core can be destroyed, with its threads
  EXPECT_EQ(get_stats().mappings, uint64_t{0});
}

TEST(detach_waits_for_no_function) {
  ForkTest t;
  const std::vector<Variable> all = assorted(t);
  ASSERT_EQ(t.begin("running", {reads(all[0])}), OOC_OK);
  EXPECT_EQ(t.core.detach(), OOC_INVALID);
  EXPECT_TRUE(contains(last_error(), "running"));
  EXPECT_EQ(t.core.function_end(false), OOC_OK);
  t.expect_intact(all);
}
