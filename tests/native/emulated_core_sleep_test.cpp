// A core that sleeps on a device that gives no memory when it wakes.
#include "core_fixture.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

void refused(uint64_t host_chunks, int fell_asleep) {
  Limits limits{12, host_chunks, 4096};
  limits.disk = nullptr;
  CoreTest t(limits);
  const std::vector<Variable> large = t.make_many(4, 2 * t.chunk), small = t.make_many(40, 4096);
  t.let_go();
  uint64_t held = 0;
  {
    const FaultsForTest faults("cuMemCreate:every=1");
    EXPECT_TRUE((t.core.sleep(&held) == OOC_OK) == (fell_asleep == OOC_OK));
    EXPECT_TRUE(t.begin("small", {reads(small[0])}) != OOC_OK);
    EXPECT_TRUE(!t.core.in_function());
  }
  t.expect_intact(small);
  t.expect_intact(large);
}

}  // namespace

TEST(a_function_that_cannot_wake_the_core_does_not_begin) { refused(64, OOC_OK); }
TEST(a_core_that_could_not_fall_asleep_and_not_wake_sleeps) { refused(3, OOC_OUT_OF_MEMORY); }
