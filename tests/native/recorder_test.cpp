// What a recorded iteration says, and what its fingerprint depends on.
#include "recorder.h"

#include <deque>

#include "ooc_alloc.h"
#include "testing.h"

using namespace ooc;

namespace {

// Regions as the core hands them to the recorder; the recorder looks at no address.
struct World {
  Recorder recorder;
  std::deque<Region> regions;

  Region* allocate(uint32_t chunks, bool in_function) {
    regions.emplace_back();
    Region& region = regions.back();
    region.index = static_cast<uint32_t>(regions.size() - 1);
    region.first = 1000 + 7 * region.index;
    region.count = chunks;
    region.bytes = chunks * 100;
    region.live = true;
    recorder.allocate(&region, in_function);
    return &region;
  }
  void free(Region* region, bool in_function = false) {
    recorder.free(region, in_function);
    region->live = false;
    ++region->generation;
  }
  uint64_t call(const char* name, std::initializer_list<std::pair<Region*, uint32_t>> operands) {
    recorder.begin_function(recorder.function_id(name), 0);
    for (const auto& [region, access] : operands) recorder.use(region, access);
    return recorder.end_operands();
  }
};

// Two functions; `weight` lives on from iteration to iteration.
std::shared_ptr<Trace> iterate(World& world, Region* weight, uint32_t chunks = 2, uint32_t access = OOC_READ,
                               const char* name = "mul") {
  world.call(name, {{weight, access}});
  Region* result = world.allocate(chunks, true);
  world.call("step", {{result, OOC_READ}, {weight, OOC_WRITE}});
  world.free(result);
  return world.recorder.finish(1.0);
}

}  // namespace

TEST(functions_variables_and_uses_are_recorded) {
  World world;
  Region* weight = world.allocate(5, false);
  const auto trace = iterate(world, weight);
  ASSERT_EQ(trace->functions(), 2u);
  EXPECT_EQ(std::string(world.recorder.function_name(trace->names[0])), std::string("mul"));
  ASSERT_EQ(trace->variables.size(), size_t{2});
  EXPECT_EQ(trace->variables[0].bytes, uint64_t{500});
  EXPECT_EQ(trace->variables[0].born, 0);  // allocated before the first function
  EXPECT_EQ(trace->variables[0].died, 2);  // survives
  EXPECT_EQ(trace->variables[1].born, 0);
  EXPECT_EQ(trace->variables[1].died, 1);
  const uint32_t uses[][3] = {{0, 0, OOC_READ}, {0, 1, OOC_WRITE}, {1, 1, OOC_READ}, {1, 0, OOC_WRITE}};
  ASSERT_EQ(trace->uses.size(), size_t{4});
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(trace->uses[i].function, uses[i][0]);
    EXPECT_EQ(trace->uses[i].variable, uses[i][1]);
    EXPECT_EQ(trace->uses[i].access, uses[i][2]);
  }
  EXPECT_EQ(trace->prefixes.size(), size_t{2});
}

TEST(the_same_sequence_has_the_same_fingerprint_whatever_the_addresses) {
  World first, second;
  Region* weight = first.allocate(5, false);
  const auto set_up = iterate(first, weight);
  const auto steady = iterate(first, weight);
  const auto again = iterate(first, weight);
  EXPECT_TRUE(set_up->fingerprint != steady->fingerprint);  // one of them allocates the weight
  EXPECT_EQ(steady->fingerprint, again->fingerprint);
  EXPECT_EQ(steady->prefixes[0], again->prefixes[0]);

  second.recorder.function_id("another name first");  // other ids, other regions, other addresses
  second.allocate(1, false);
  second.recorder.finish(0);
  for (int i = 0; i < 4; ++i) second.allocate(3, false);
  Region* other = second.allocate(5, false);
  second.recorder.finish(0);
  const auto elsewhere = iterate(second, other);
  EXPECT_EQ(elsewhere->fingerprint, steady->fingerprint);
  EXPECT_TRUE(elsewhere->prefixes == steady->prefixes);
}

TEST(the_fingerprint_tells_sequences_apart) {
  World world;
  Region* weight = world.allocate(5, false);
  world.recorder.finish(0);
  const uint64_t usual = iterate(world, weight)->fingerprint;
  EXPECT_TRUE(iterate(world, weight, 3)->fingerprint != usual);             // a size
  EXPECT_TRUE(iterate(world, weight, 2, OOC_WRITE)->fingerprint != usual);  // an access
  EXPECT_TRUE(iterate(world, weight, 2, OOC_READ, "add")->fingerprint != usual);  // a name
  Region* another = world.allocate(5, false);
  world.recorder.finish(0);
  world.call("mul", {{weight, OOC_READ}});
  Region* result = world.allocate(2, true);
  world.call("step", {{result, OOC_READ}, {another, OOC_WRITE}});  // another variable of the same size
  EXPECT_TRUE(world.recorder.finish(1)->fingerprint != usual);
  EXPECT_EQ(iterate(world, weight)->fingerprint, usual);
}

TEST(frees_are_not_part_of_the_fingerprint) {
  World world;
  Region* weight = world.allocate(5, false);
  Region* garbage = world.allocate(4, false);
  world.recorder.finish(0);
  const auto without = iterate(world, weight);
  world.call("mul", {{weight, OOC_READ}});
  Region* result = world.allocate(2, true);
  world.free(garbage);  // collected at some moment
  world.call("step", {{result, OOC_READ}, {weight, OOC_WRITE}});
  const auto with = world.recorder.finish(1);  // and `result` lives on
  EXPECT_EQ(with->fingerprint, without->fingerprint);
  EXPECT_EQ(with->variables[1].died, 2);
}

TEST(a_variable_is_linked_to_its_number_in_the_same_iteration_before) {
  World world;
  Region* a = world.allocate(1, false);
  Region* b = world.allocate(2, false);
  world.recorder.finish(0);
  const auto step = [&] {
    world.call("f", {{b, OOC_READ}});
    Region* old = b;
    b = world.allocate(2, true);
    world.call("g", {{a, OOC_READ}, {b, OOC_WRITE}});
    world.free(old);
    return world.recorder.finish(1);
  };
  step();
  const auto steady = step();
  // Variables: 0 the old b, 1 the new b, 2 a. The old b was the new one of the iteration before.
  ASSERT_EQ(steady->variables.size(), size_t{3});
  EXPECT_EQ(steady->variables[0].previous, 1);
  EXPECT_EQ(steady->variables[1].previous, -1);
  EXPECT_EQ(steady->variables[2].previous, 2);
}

TEST(a_variable_that_is_only_freed_is_known_at_the_end) {
  World world;
  Region* weight = world.allocate(5, false);
  Region* kept = nullptr;
  const auto step = [&] {
    world.call("f", {{weight, OOC_READ}});
    Region* made = world.allocate(3, true);
    world.call("g", {{weight, OOC_READ}});
    if (kept != nullptr) world.free(kept);  // of the iteration before, not used in this one
    kept = made;
    return world.recorder.finish(1);
  };
  step();
  step();
  const auto steady = step();
  ASSERT_EQ(steady->variables.size(), size_t{3});
  EXPECT_EQ(steady->variables[2].bytes, uint64_t{300});
  EXPECT_EQ(steady->variables[2].born, -1);
  EXPECT_EQ(steady->variables[2].died, 1);
  EXPECT_EQ(steady->variables[2].previous, 1);
}

TEST(a_second_operand_of_a_region_widens_its_access) {
  World world;
  Region* region = world.allocate(1, false);
  world.recorder.finish(0);
  world.recorder.begin_function(world.recorder.function_id("copy"), 0);
  world.recorder.use(region, OOC_READ);
  world.recorder.widen_last_use(region, OOC_WRITE);
  world.recorder.end_operands();
  const auto both = world.recorder.finish(1);
  ASSERT_EQ(both->uses.size(), size_t{1});
  EXPECT_EQ(both->uses[0].access, uint32_t{OOC_READ | OOC_WRITE});
  world.call("copy", {{region, OOC_READ}});
  EXPECT_TRUE(world.recorder.finish(1)->fingerprint != both->fingerprint);
}

TEST(a_function_lasts_until_the_next_begins_without_what_it_waited) {
  World world;
  world.recorder.finish(10);
  for (const double start : {11.0, 13.0}) {
    world.recorder.begin_function(world.recorder.function_id("copy"), start);
    world.recorder.end_operands();
    world.recorder.stalled(0.5);
  }
  const auto trace = world.recorder.finish(17);
  EXPECT_TRUE(trace->starts == (std::vector<double>{1, 3}));
  EXPECT_TRUE(trace->seconds == (std::vector<double>{1.5, 3.5}));
}

TEST(a_function_that_makes_something_again_is_none_of_the_programs_own) {
  World world;
  const auto begin = [&](bool remakes) {
    world.recorder.begin_function(world.recorder.function_id("f"), 0);
    if (remakes) world.recorder.remakes();
    world.recorder.end_operands();
  };
  begin(true);
  begin(true);
  world.recorder.forget_function();  // it did not begin after all
  EXPECT_EQ(world.recorder.current().remade, uint32_t{1});
  begin(false);
  world.recorder.forget_function();
  EXPECT_EQ(world.recorder.current().remade, uint32_t{1});
  world.recorder.finish(1);
  begin(false);
  world.recorder.forget_function();
  EXPECT_EQ(world.recorder.current().remade, uint32_t{0});
}

TEST(workspaces_that_are_not_there_together_are_not_added_up) {
  World world;
  world.recorder.finish(0);
  world.recorder.begin_function(world.recorder.function_id("conv"), 0);
  world.recorder.end_operands();
  for (int i = 0; i < 3; ++i) world.free(world.allocate(4, true), true);
  world.allocate(2, true);
  const auto trace = world.recorder.finish(1);
  uint64_t bytes = 0;
  for (const auto& variable : trace->variables) bytes += variable.bytes;
  EXPECT_EQ(bytes, uint64_t{400});  // one workspace at a time; the result comes when the last one is gone
}

TEST(an_iteration_without_functions_is_a_trace_too) {
  World world;
  Region* region = world.allocate(1, false);
  world.free(region);
  const auto trace = world.recorder.finish(1);
  EXPECT_EQ(trace->functions(), 0u);
  for (const auto& variable : trace->variables) EXPECT_TRUE(variable.born <= 0 && variable.died <= 0);
}
