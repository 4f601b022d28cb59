// Many threads, plans that are wrong on purpose, evictions at any moment: every function still sees the right bytes.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "daemon_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// Variables that many threads use; who uses one holds its lock, as a program orders its own writes and reads.
struct Shared {
  explicit Shared(const Variable& made) : variable(made) {}
  std::mutex mutex;
  Variable variable;
};

struct Stress : DaemonTest {
  Stress(uint64_t budget_chunks, size_t shared_count, uint64_t shared_chunks)
      : DaemonTest({budget_chunks, 400, granularity() / 4, 1}, true) {
    for (size_t i = 0; i < shared_count; ++i)
      shared.push_back(std::make_unique<Shared>(make(shared_chunks * chunk - 8 * i, static_cast<unsigned>(i))));
    let_go();
  }
  // Checks one shared variable or writes it, together with a variable of the thread's own and a fresh one.
  bool step(std::mt19937& random, Variable& own) {
    Shared& chosen = *shared[random() % shared.size()];
    const std::lock_guard<std::mutex> lock(chosen.mutex);
    const bool writes = random() % 3 == 0;
    const uint32_t access = writes ? OOC_READ | OOC_WRITE : OOC_READ;
    void *fresh = nullptr, *small = nullptr;
    const int status = call(writes ? "write" : "read", {{chosen.variable.address, access, 0, 0}, reads(own)}, [&] {
      fresh = core.malloc(own.bytes);
      small = core.malloc(1 + random() % 2000);
      EXPECT_TRUE(holds(chosen.variable) && holds(own));
      if (writes) {
        chosen.variable.seed = static_cast<unsigned>(random());
        put(chosen.variable);
      }
      if (fresh != nullptr) put({fresh, own.bytes, own.seed + 1});
    });
    core.free(small);
    if (status != OOC_OK || fresh == nullptr) {
      core.free(fresh);
      return fail(__FILE__, __LINE__, last_error());
    }
    core.free(own.address);
    own = {fresh, own.bytes, own.seed + 1};
    return true;
  }
  void work(unsigned seed, int steps) {
    core.device().bind_thread();
    std::mt19937 random(seed);
    Variable own = make((1 + seed % 2) * chunk, seed);
    for (int i = 0; i < steps && step(random, own); ++i) {}
    core.free(own.address);
  }
  void check_shared() {
    for (const auto& one : shared) EXPECT_EQ(check(one->variable), OOC_OK);
  }

  std::vector<std::unique_ptr<Shared>> shared;
};

// Moves of anything at any time, within the trace and beyond.
void install_nonsense(Stress& t, const ooc_iteration& ended, std::mt19937& random) {
  const auto any = [&](uint32_t limit) { return static_cast<int32_t>(random() % (limit + 1)); };
  std::vector<OutMove> outs;
  std::vector<InMove> ins;
  const uint32_t last_variable = ended.variables - 1, last_function = ended.functions - 1;
  for (int i = any(12); i > 0; --i) outs.push_back({any(last_variable), any(3), any(4), any(last_function) - 1});
  for (int i = any(12); i > 0; --i)
    ins.push_back({any(last_variable), any(3), any(4), any(last_function) - 1, any(12), any(last_function + 1)});
  if (any(3) == 0) outs.push_back({any(last_variable), INT32_MAX, INT32_MAX, -1});
  if (any(3) == 0) ins.push_back({any(last_variable), -5, INT32_MAX, -1, 0, any(last_function)});
  std::vector<OutMove> downs, ups;
  for (auto* moves : {&downs, &ups})
    for (int i = any(12); i > 0; --i) moves->push_back({any(last_variable), 0, 0, any(last_function) - 1});
  EXPECT_TRUE(t.install(ended.fingerprint, outs, ins, {}, downs, ups, any(3) == 0));
}

}  // namespace

TEST(threads_share_variables_under_one_budget) {
  Stress t(34, 12, 4);  // 48 chunks shared; four steps at once hold at most 28 and a slab
  std::vector<std::thread> threads;
  for (unsigned i = 1; i <= 4; ++i) threads.emplace_back([&t, i] { t.work(i, 150); });
  for (std::thread& thread : threads) thread.join();
  t.check_shared();
  EXPECT_TRUE(t.stats().swap_out_count > 50);
}

// Two functions wait, and no third one runs whose end would help. A thread that runs none has what they wait for.
TEST(functions_that_wait_for_each_other_get_what_another_thread_frees) {
  CoreTest t({4, 64, granularity() / 4});
  void* small = t.must_malloc(500);  // on a chunk of its own
  t.let_go();
  std::atomic<bool> began{false}, waits{false};
  const auto needs_two = [&t] {
    void* address = t.core.malloc(2 * t.chunk);
    EXPECT_TRUE(t.owns(address));
    return address;
  };
  std::thread first([&] {
    t.core.device().bind_thread();
    EXPECT_EQ(t.call("needs four chunks", {}, [&] {
      void* held = needs_two();
      began = true;
      while (!waits) std::this_thread::yield();
      t.core.free(needs_two());
      t.core.free(held);
    }), OOC_OK);
  });
  std::thread second([&] {
    t.core.device().bind_thread();
    while (!began) std::this_thread::yield();
    EXPECT_EQ(t.call("needs two", {}, [&] {
      waits = true;
      t.core.free(needs_two());
    }), OOC_OK);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  t.core.free(small);
  first.join();
  second.join();
  EXPECT_EQ(t.core.audit(), OOC_OK);
}

// Each function fits alone, all of them together do not: they take turns.
TEST(functions_that_do_not_fit_together_wait_for_each_other) {
  Stress t(11, 6, 6);  // a step holds 8 to 10 chunks
  std::vector<std::thread> threads;
  for (unsigned i = 1; i <= 3; ++i) threads.emplace_back([&t, i] { t.work(i, 60); });
  for (std::thread& thread : threads) thread.join();
  t.check_shared();
  EXPECT_TRUE(t.stats().min_budget_bytes <= 11 * t.chunk);  // what waits for room is not needed beside what runs
}

// Each waits for the chunk that the other one's wait keeps from coming: one of them is refused, the other goes on.
TEST(of_functions_that_fill_the_budget_and_need_a_chunk_more_one_is_refused) {
  CoreTest t({8, 64, granularity() / 4});
  const std::vector<Variable> v = t.make_many(2, 4 * t.chunk);
  t.let_go();
  std::atomic<int> began{0}, refused{0};
  const auto body = [&](int index) {
    ASSERT_EQ(t.begin("full", {reads(v[static_cast<size_t>(index)])}), OOC_OK);
    for (++began; began < 2;) std::this_thread::yield();
    std::string refusal;  // of the allocation, or, where the host can serve it, of the function at its end
    if (t.core.malloc(100) == nullptr) refusal = last_error();
    if (t.core.function_end(false) != OOC_OK) refusal = last_error();
    if (refusal.empty()) return;
    ++refused;
    EXPECT_TRUE(contains(refusal, "set OOC_BUDGET="));
  };
  std::thread first(body, 0), second(body, 1);
  first.join();
  second.join();
  EXPECT_EQ(refused.load(), 1);
  EXPECT_EQ(t.stats().slab_used_bytes, t.chunk);
  t.expect_intact(v);
}

TEST(whatever_a_plan_says_the_bytes_are_right) {
  Stress t(24, 10, 4);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned i = 1; i <= 2; ++i) threads.emplace_back([&t, i] { t.work(i, 200); });
  threads.emplace_back([&] {  // pressure from outside
    t.core.device().bind_thread();
    for (int i = 0; !stop; ++i) {
      EXPECT_EQ(t.core.evict_all(), OOC_OK);
      if (i % 5 == 0) t.core.release_cached();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  std::mt19937 random(1);
  const std::vector<Variable> own = t.make_many(6, 3 * t.chunk);
  t.boundary();
  for (int iteration = 0; iteration < 40; ++iteration) {
    for (const Variable& variable : own)
      if (random() % 20 != 0) EXPECT_EQ(t.check(variable), OOC_OK);  // a departure now and then
    for (int i = 0; i < 3; ++i) t.core.free(t.make(t.chunk, 1).address);
    const ooc_iteration ended = t.boundary();
    install_nonsense(t, ended, random);
    if (iteration % 10 == 9) t.daemon.forget();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  t.daemon.stop();
  t.check_shared();
  t.expect_intact(own);
  EXPECT_TRUE(t.stats().planned_iteration_count > 0);
}

TEST(nonsense_plans_are_harmless_tick_by_tick) {  // the same without threads: what fails here can be repeated
  for (unsigned seed = 1; seed <= 5; ++seed) {
    std::mt19937 random(seed);
    DaemonTest t({9, 100, 0, 1});
    std::vector<Variable> v = t.make_many(6, 3 * t.chunk);
    t.boundary();
    for (int iteration = 0; iteration < 25; ++iteration) {
      for (Variable& variable : v) {
        if (random() % 3 == 0) EXPECT_EQ(t.update(variable, static_cast<unsigned>(random())), OOC_OK);
        else EXPECT_EQ(t.check(variable), OOC_OK);
        for (uint64_t ticks = random() % 6; ticks > 0; --ticks) random() % 2 != 0 ? t.tick_out() : t.tick_in();
        t.settle();  // a function that finds a variable on its way waits for whoever moves it
      }
      const ooc_iteration ended = t.boundary();
      std::vector<OutMove> outs;
      std::vector<InMove> ins;
      for (int i = 0; i < 8; ++i) {
        const auto any = [&](int limit) { return static_cast<int32_t>(random() % static_cast<unsigned>(limit)); };
        outs.push_back({any(6), any(4), any(5), any(7) - 1});
        ins.push_back({any(6), any(4), any(5), any(7) - 1, any(10), any(8)});
      }
      EXPECT_TRUE(t.install(ended.fingerprint, outs, ins));
      ASSERT_EQ(t.core.audit(), OOC_OK);
    }
    t.expect_intact(v);
  }
}

TEST(host_memory_grows_while_other_threads_copy_into_it) {
  const uint64_t chunk = granularity(), extents = uint64_t{140} << 20;  // the arena grows by 64 MiB at a time
  const uint64_t made_bytes = extents + 64 * chunk;
  CoreTest t({64, made_bytes / chunk + 64, 0, 1});
  std::vector<Variable> made[2];
  std::vector<std::thread> threads;
  for (std::vector<Variable>& own : made)
    threads.emplace_back([&] {
      for (uint64_t total = 0; total < made_bytes / 2; total += 16 * chunk) {
        t.let_go();
        own.push_back({t.must_malloc(16 * chunk), 16 * chunk, 0});
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<Variable>& own : made) t.free(own);
  EXPECT_TRUE(t.stats().host_peak_bytes > uint64_t{64} << 20);
}

// Two threads may write different halves of one variable, so each write counts by itself.
TEST(a_write_that_waited_for_room_counts_though_another_thread_wrote_meanwhile) {
  CoreTest t({4, 64});
  Variable shared = t.make(2 * t.chunk, 1);
  const Variable held = t.make(2 * t.chunk, 2), other = t.make(2 * t.chunk, 3);
  t.let_go();
  std::atomic<bool> began{false}, may_end{false};
  std::thread holder([&] {
    const auto wait = [&] { for (began = true; !may_end;) std::this_thread::yield(); };
    EXPECT_EQ(t.call("hold", {reads(held)}, wait), OOC_OK);
    t.let_go();
  });
  while (!began) std::this_thread::yield();
  std::thread waiter([&] {  // needs four chunks, of which two are held
    EXPECT_EQ(t.call("wait", {writes(shared), reads(other)}, [&t, &shared] { t.put({shared.address, shared.bytes, 5}); }),
              OOC_OK);
    t.let_go();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // nothing tells that it waits
  EXPECT_EQ(t.call("write", {writes(shared)}, [&t, &shared] { t.put({shared.address, shared.bytes, 4}); }), OOC_OK);
  EXPECT_EQ(t.check(other), OOC_OK);  // `shared` leaves, and comes back for the one that waits, clean
  t.let_go();
  may_end = true;
  holder.join();
  waiter.join();
  EXPECT_EQ(t.call("both", {reads(held), reads(other)}), OOC_OK);  // `shared` leaves again
  shared.seed = 5;
  EXPECT_EQ(t.check(shared), OOC_OK);
}

TEST(threads_come_and_go) {
  CoreTest t({8});
  const Variable v = t.make(3 * t.chunk, 1);
  for (int i = 0; i < 30; ++i) {
    std::vector<std::thread> threads;
    for (unsigned n = 0; n < 3; ++n)
      threads.emplace_back([&] {
        t.core.device().bind_thread();
        EXPECT_EQ(t.check(v), OOC_OK);
        t.core.free(t.core.malloc(t.chunk));
      });
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(t.stats().live_bytes, 3 * t.chunk);
  t.let_go();
  EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
}
