// Host memory for swapped data: exact budget, no overlap, holes that merge, extents that the driver pins.
#include "host_arena.h"

#include <sys/resource.h>

#include <cstring>
#include <random>

#include "device_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr uint64_t kMiB = 1 << 20, kPage = HostArena::kPage;

struct Block {
  char* start;
  uint64_t bytes;
  int mark;
};

void fill(const Block& block) { std::memset(block.start, block.mark, block.bytes); }

bool intact(const Block& block) {
  for (uint64_t i = 0; i < block.bytes; ++i)
    if (block.start[i] != static_cast<char>(block.mark)) return false;
  return true;
}

}  // namespace

TEST(random_blocks_keep_their_bytes_within_the_budget) {
  constexpr uint64_t kBudget = 8 * kMiB;
  HostArena arena(driver(), 0, kBudget);
  std::vector<Block> blocks;
  std::mt19937_64 random(11);
  uint64_t used = 0;
  int refused = 0;
  for (int step = 0; step < 2000; ++step) {
    const bool grow = (step / 200) % 2 == 0;
    if (random() % 10 < (grow ? 7u : 3u)) {
      const uint64_t bytes = 1 + random() % (300 << 10);
      char* start = arena.allocate(bytes);
      if (start == nullptr) {
        ++refused;
        continue;
      }
      used += arena.taken(start, bytes);
      blocks.push_back({start, bytes, step % 251});
      fill(blocks.back());
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      EXPECT_TRUE(intact(blocks.back()));
      arena.free(blocks.back().start, blocks.back().bytes);
      used -= arena.taken(blocks.back().start, blocks.back().bytes);
      blocks.pop_back();
    }
    EXPECT_EQ(arena.used(), used);
    EXPECT_TRUE(arena.committed() <= kBudget && arena.used() <= arena.committed());
  }
  EXPECT_TRUE(refused > 0);
  for (const Block& block : blocks) {
    EXPECT_TRUE(intact(block));
    arena.free(block.start, block.bytes);
  }
  EXPECT_EQ(arena.used(), uint64_t{0});
  EXPECT_TRUE(arena.allocate(kBudget) != nullptr);  // all holes have merged
}

TEST(the_budget_is_exact) {
  HostArena arena(driver(), 0, 3 * kPage);
  EXPECT_EQ(arena.budget(), 3 * kPage);
  EXPECT_TRUE(arena.allocate(3 * kPage + 1) == nullptr);
  char* first = arena.allocate(1);
  EXPECT_TRUE(first != nullptr && arena.allocate(2 * kPage) != nullptr);
  EXPECT_TRUE(arena.allocate(1) == nullptr);
  arena.free(first, 1);
  EXPECT_EQ(arena.allocate(kPage), first);
}

TEST(it_tells_its_budget_from_a_system_that_gives_no_more) {
  HostArena arena(driver(), 0, 4 * kPage);
  EXPECT_TRUE(arena.allocate(5 * kPage) == nullptr && arena.refusal() == Refusal::kBudget);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_DATA, &before), 0);
  const rlimit none{kPage, before.rlim_max};  // 0 would be no limit
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &none), 0);
  const char* refused = arena.allocate(kPage);
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &before), 0);
  EXPECT_TRUE(refused == nullptr && arena.refusal() == Refusal::kSystem);
  EXPECT_TRUE(arena.allocate(kPage) != nullptr && arena.refusal() == Refusal::kNone);
}

TEST(a_block_may_lie_across_extents_and_a_copy_can_be_split_there) {
  HostArena arena(driver(), 0, 200 * kMiB);
  char* first = arena.allocate(kMiB);  // the first extent is larger than this: 64 MiB
  const uint64_t extent = arena.committed();
  ASSERT_TRUE(extent > kMiB && extent < 200 * kMiB);
  const uint64_t rest = extent - kMiB + 8 * kMiB;
  char* across = arena.allocate(rest);  // the end of the first extent and the start of the next
  ASSERT_EQ(across, first + kMiB);
  EXPECT_EQ(arena.extent_left(first), extent);
  EXPECT_EQ(arena.extent_left(across), extent - kMiB);
  EXPECT_EQ(arena.extent_left(first + extent - 1), uint64_t{1});
  EXPECT_TRUE(arena.extent_left(first + extent) >= 8 * kMiB);
  across[0] = across[rest - 1] = 1;  // all of it can be used
}

TEST(the_next_extent_can_be_pinned_before_it_is_needed) {
  HostArena arena(driver(), 0, 16 * kMiB);  // extents of 1 MiB
  EXPECT_TRUE(!arena.runs_low());           // nobody has asked for any
  char* first = arena.allocate(kMiB);
  EXPECT_TRUE(arena.runs_low());
  arena.grow_ahead();
  EXPECT_EQ(arena.committed(), kMiB);  // it is nobody's yet
  EXPECT_TRUE(arena.allocate(4 * kPage) == first + kMiB);
  EXPECT_EQ(arena.committed(), 2 * kMiB);
  EXPECT_EQ(arena.extent_left(first), kMiB);
  EXPECT_TRUE(!arena.runs_low());
  char* rest = arena.allocate(14 * kMiB);
  EXPECT_TRUE(rest != nullptr && !arena.runs_low());  // the budget has no room for more
  const uint64_t before = arena.committed();
  arena.grow_ahead();  // others may have taken what there was
  arena.adopt();
  EXPECT_EQ(arena.committed(), before);
}

TEST(memory_is_taken_near_the_device) {
  HostArena arena(driver(), 0, 16 * kMiB);
  int node = -1, policy = -1;
  if (driver().cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0) != CUDA_SUCCESS || node < 0 || node > 63)
    SKIP("the driver names no node");
  char* block = arena.allocate(kPage);
  unsigned long nodes = 0;
  if (syscall(SYS_get_mempolicy, &policy, &nodes, 65, block, MPOL_F_ADDR) != 0) SKIP("the system has no policies of memory");
  EXPECT_EQ(policy, int{MPOL_PREFERRED});
  EXPECT_EQ(nodes, 1ul << node);
}
