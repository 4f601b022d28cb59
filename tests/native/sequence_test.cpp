// Whose functions make the sequence, and where it repeats.
#include <thread>

#include "daemon_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// A trace as the recorder makes it. Functions have one letter.
struct Program {
  Trace trace;

  uint32_t variable(uint64_t bytes, int32_t died = INT32_MAX) {
    trace.variables.push_back({{}, bytes, static_cast<int32_t>(trace.functions()) - 1, died});
    return static_cast<uint32_t>(trace.variables.size() - 1);
  }
  void call(char name, std::initializer_list<uint32_t> used) {
    trace.names.push_back(static_cast<uint32_t>(name));
    trace.prefixes.push_back(trace.names.size());
    for (const uint32_t v : used) trace.uses.push_back({trace.functions() - 1, v, OOC_READ, 0});
  }
  // A function with a weight and a result of its own.
  uint32_t layer(char name, uint32_t weight, uint32_t input) {
    call(name, {weight, input});
    const uint32_t result = variable(100);
    trace.uses.push_back({trace.functions() - 1, result, OOC_WRITE, 0});
    return result;
  }
  uint32_t period(uint32_t least = 2) const { return Repeats::period(trace, trace.functions(), least); }
};

int count(void* first, void*) {
  ++*static_cast<int*>(first);
  return 0;
}

}  // namespace

TEST(a_loop_is_found_after_three_rounds_that_end_alike) {
  Program program;
  const uint32_t a = program.variable(10), b = program.variable(10), x = program.variable(100);
  for (int i = 0; i < 5; ++i) program.call('s', {});
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(program.period(), 0u);
    program.layer('n', b, program.layer('m', a, x));
    program.call('u', {a, b});
  }
  EXPECT_EQ(program.period(), 3u);
  EXPECT_EQ(program.period(4), 0u);
  program.call('v', {a});
  EXPECT_EQ(program.period(), 0u);
}

TEST(layers_with_weights_of_their_own_are_no_loop) {
  Program program;
  std::vector<uint32_t> weights;
  for (int i = 0; i < 6; ++i) weights.push_back(program.variable(10));
  uint32_t x = program.variable(100);
  for (const uint32_t weight : weights) x = program.layer('g', weight, program.layer('m', weight, x));
  EXPECT_EQ(program.period(), 0u);
  for (int round = 0; round < 2; ++round)
    for (const uint32_t weight : weights) x = program.layer('g', weight, program.layer('m', weight, x));
  EXPECT_EQ(program.period(), 12u);
}

TEST(weights_that_each_round_makes_anew_are_a_loop) {
  Program program;
  uint32_t weight = program.variable(10);
  const uint32_t x = program.variable(100);
  for (int round = 0; round < 4; ++round) {
    program.layer('m', weight, x);
    program.call('b', {x});
    weight = program.layer('u', weight, x);
  }
  EXPECT_EQ(program.period(), 3u);
}

TEST(a_round_ends_where_the_least_is_allocated) {
  Program program;
  for (int round = 0; round < 3; ++round) {
    const auto first = static_cast<int32_t>(program.trace.functions());
    program.call('a', {});
    program.variable(50, first + 3);
    program.call('b', {});
    program.variable(50, first + 2);
    program.call('c', {});
    program.call('d', {});
  }
  EXPECT_EQ(Repeats::quietest(program.trace, 12, 4), 12u);
  EXPECT_EQ(Repeats::quietest(program.trace, 11, 4), 8u);
}

struct Sequences : DaemonTest {
  Sequences() : DaemonTest({64, 64, 0, 2}) {}
  void rounds(int times) {
    for (int i = 0; i < times; ++i)
      for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h"}) EXPECT_EQ(call(name, {reads(weight)}, [] {}), OOC_OK);
  }
  Variable weight = make(chunk, 1);
};

TEST(who_watches_is_told_at_the_end_of_each_round) {
  Sequences s;
  int told = 0;
  EXPECT_EQ(s.core.watch_repeats(count, &told, nullptr), OOC_OK);
  s.rounds(15);
  EXPECT_EQ(told, 0);
  while (told == 0 && s.core.recorder().current().functions() < 200) s.rounds(1);
  EXPECT_EQ(told, 1);
  (void)s.boundary();
  for (int i = 2; i < 6; ++i) {
    s.rounds(1);
    EXPECT_EQ(told, i);
    EXPECT_EQ(s.boundary().functions, 8u);
  }
  EXPECT_EQ(s.call("other", {reads(s.weight)}, [] {}), OOC_OK);
  s.rounds(1);
  EXPECT_EQ(told, 5);
}

TEST(what_is_made_again_does_not_hide_the_rounds) {
  Sequences s;
  int told = 0;
  EXPECT_EQ(s.core.watch_repeats(count, &told, nullptr), OOC_OK);
  while (told == 0) s.rounds(1);
  for (int i = 0; i < 3; ++i) {
    (void)s.boundary();
    s.rounds(1);
  }
  EXPECT_EQ(told, 4);
  for (uint32_t again = 1; again < 5; ++again) {  // another number each time, before and after the last round's end
    (void)s.boundary();
    Part before{};
    for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h"}) {
      EXPECT_EQ(s.core.set_apart(Part::kRemakes, before), OOC_OK);
      for (uint32_t i = 0; i < again; ++i) EXPECT_EQ(s.call("again", {reads(s.weight)}, [] {}), OOC_OK);
      EXPECT_EQ(s.core.set_apart(Part::kProgram, before), OOC_OK);
      EXPECT_TRUE(before == Part::kRemakes);
      EXPECT_EQ(s.call(name, {reads(s.weight)}, [] {}), OOC_OK);
    }
    EXPECT_EQ(told, 4 + static_cast<int>(again));
    EXPECT_EQ(s.core.recorder().current().functions(), 8 * (1 + again));
  }
  (void)s.boundary();
  s.rounds(1);
  EXPECT_EQ(told, 9);
  (void)s.boundary();
  EXPECT_EQ(s.call("other", {reads(s.weight)}, [] {}), OOC_OK);  // the loop is over
  s.rounds(1);
  EXPECT_EQ(told, 9);
}

TEST(nobody_is_told_where_others_end_the_iterations) {
  Sequences s;
  int told = 0;
  EXPECT_EQ(s.core.watch_repeats(count, &told, nullptr), OOC_OK);
  for (int i = 0; i < 20; ++i) {
    s.rounds(10);
    (void)s.boundary();
  }
  EXPECT_EQ(told, 0);
  EXPECT_EQ(s.core.watch_repeats(nullptr, nullptr, nullptr), OOC_OK);
  s.rounds(200);
  EXPECT_EQ(told, 0);
}

TEST(what_is_apart_is_no_part_of_the_sequence) {
  Sequences s;
  (void)s.boundary();
  s.rounds(1);
  const uint64_t fingerprint = s.boundary().fingerprint;
  Part before{};
  Variable early;
  EXPECT_EQ(s.core.set_apart(Part::kApart, before), OOC_OK);
  EXPECT_TRUE(before == Part::kProgram);
  early = s.make(s.chunk, 3);
  EXPECT_EQ(s.core.set_apart(Part::kProgram, before), OOC_OK);
  EXPECT_TRUE(before == Part::kApart);
  s.rounds(1);
  const ooc_iteration ended = s.boundary();
  EXPECT_EQ(ended.fingerprint, fingerprint);
  EXPECT_EQ(ended.functions, 8u);
  s.core.free(early.address);
}

TEST(what_is_made_again_for_what_is_apart_is_apart) {
  Sequences s;
  (void)s.boundary();
  Part before{}, within{};
  EXPECT_EQ(s.core.set_apart(Part::kApart, before), OOC_OK);
  EXPECT_EQ(s.core.set_apart(Part::kRemakes, within), OOC_OK);
  EXPECT_TRUE(within == Part::kApart);
  s.rounds(1);
  EXPECT_EQ(s.core.set_apart(within, within), OOC_OK);
  EXPECT_TRUE(within == Part::kApart);
  s.rounds(1);
  EXPECT_EQ(s.core.set_apart(before, before), OOC_OK);
  s.rounds(1);
  EXPECT_EQ(s.boundary().functions, 8u);
}

TEST(a_thread_takes_the_sequence_where_the_recorded_one_rests) {
  Sequences s;
  bool taken = false;
  const auto elsewhere = [&](auto work) {
    std::thread([&] {
      s.core.device().bind_thread();
      work();
    }).join();
  };
  s.rounds(1);
  elsewhere([&] {
    EXPECT_EQ(s.core.take_sequence(taken), OOC_OK);
    EXPECT_TRUE(!taken);  // this thread may be amid an iteration
    s.rounds(1);
  });
  s.rounds(1);
  EXPECT_EQ(s.core.recorder().current().functions(), 17u);
  elsewhere([&] {
    EXPECT_EQ(s.core.take_sequence(taken), OOC_OK);
    EXPECT_TRUE(!taken);
    EXPECT_EQ(s.core.take_sequence(taken), OOC_OK);
    EXPECT_TRUE(taken);  // it began nothing meanwhile
    s.rounds(1);
    EXPECT_EQ(s.boundary().functions, 25u);
  });
  elsewhere([&] { s.rounds(1); });  // it was at its work before
  EXPECT_EQ(s.core.recorder().current().functions(), 0u);
  elsewhere([&] {
    EXPECT_EQ(s.core.take_sequence(taken), OOC_OK);
    EXPECT_TRUE(taken);
    s.rounds(1);
    EXPECT_EQ(s.boundary().functions, 8u);
  });
}
