// Free extents against a map of who owns each chunk.
#include "free_extents.h"

#include <random>
#include <utility>
#include <vector>

#include "testing.h"

using namespace ooc;

TEST(random_ranges_never_overlap_and_merge_in_the_end) {
  constexpr uint64_t kChunks = 400;
  FreeExtents space(0, kChunks);
  std::vector<int> owner(kChunks, 0);
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  std::mt19937_64 random(3);
  int refused = 0;
  for (int step = 1; step < 20000; ++step) {
    const uint64_t count = 1 + random() % 30;
    const bool grow = (step / 500) % 2 == 0;
    if (random() % 10 < (grow ? 7u : 3u)) {
      const uint64_t first = space.take_lowest(count);
      uint64_t run = 0, longest = 0, expected = FreeExtents::kNone;
      for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
        run = owner[chunk] == 0 ? run + 1 : 0;
        longest = std::max(longest, run);
        if (run == count && expected == FreeExtents::kNone) expected = chunk + 1 - count;
      }
      ASSERT_EQ(first, expected);  // the lowest fit, and none only where there is none
      if (first == FreeExtents::kNone) {
        EXPECT_TRUE(longest < count);
        ++refused;
        continue;
      }
      for (uint64_t i = 0; i < count; ++i) owner[first + i] = step;
      ranges.emplace_back(first, count);
    } else if (!ranges.empty()) {
      std::swap(ranges[random() % ranges.size()], ranges.back());
      const auto [first, length] = ranges.back();
      ranges.pop_back();
      space.give(first, length);
      for (uint64_t i = 0; i < length; ++i) owner[first + i] = 0;
    }
  }
  EXPECT_TRUE(refused > 0);
  for (const auto& [first, count] : ranges) space.give(first, count);
  EXPECT_EQ(space.take_lowest(kChunks + 1), FreeExtents::kNone);
  EXPECT_EQ(space.take_lowest(kChunks), uint64_t{0});
  EXPECT_EQ(space.take_lowest(1), FreeExtents::kNone);
}
