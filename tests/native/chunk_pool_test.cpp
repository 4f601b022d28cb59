// Physical chunks: never more than the limit, all or nothing, recycled.
#include "chunk_pool.h"

#include <set>

#include "device_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

struct Pool : ChunkPool {
  explicit Pool(uint64_t limit) : ChunkPool(driver(), 0, granularity(), limit) {}
  ~Pool() { release_free(); }
};

}  // namespace

TEST(chunks_are_taken_all_or_none) {
  Pool pool(4);
  Chunk chunks[4];
  ASSERT_TRUE(pool.take(3, chunks));
  EXPECT_EQ(pool.available(), uint64_t{1});
  const uint64_t limit = pool.limit();
  EXPECT_EQ(limit, uint64_t{4});
  ASSERT_TRUE(pool.take(1, chunks + 3));
  EXPECT_EQ(pool.available(), uint64_t{0});
  EXPECT_EQ(std::set<Chunk>(chunks, chunks + 4).size(), size_t{4});
  for (Chunk chunk : chunks) pool.give(chunk);
  EXPECT_EQ(pool.free(), uint64_t{4});
  EXPECT_EQ(pool.created(), uint64_t{4});
}

TEST(chunks_are_created_once_and_recycled) {
  Pool pool(3);
  for (int round = 0; round < 10; ++round) {
    Chunk chunks[3];
    ASSERT_TRUE(pool.take(3, chunks));
    for (Chunk chunk : chunks) pool.give(chunk);
  }
  EXPECT_EQ(pool.create_calls(), uint64_t{3});
  EXPECT_EQ(pool.created_peak(), uint64_t{3});
}

TEST(neighbours_stay_together) {
  Pool pool(9);
  Chunk all[9], found[5];
  ASSERT_TRUE(pool.take(9, all));
  for (const int i : {3, 1, 6, 2, 5, 8}) pool.give(all[i]);
  ASSERT_TRUE(pool.take(2, found));  // from the smallest run that is long enough
  EXPECT_EQ(found[0], all[5]);
  EXPECT_EQ(found[1], all[6]);
  for (const int i : {5, 6}) pool.give(all[i]);
  ASSERT_TRUE(pool.take(5, found));  // the longest run first, where none is long enough
  const int expected[5] = {1, 2, 3, 5, 6};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(found[i], all[expected[i]]);
  for (const Chunk chunk : found) pool.give(chunk);
  for (const int i : {0, 4, 7}) pool.give(all[i]);
}

TEST(free_chunks_go_back_to_the_driver) {
  Pool pool(4);
  size_t before = 0, with = 0, after = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&before, &total));
  Chunk chunks[4];
  ASSERT_TRUE(pool.take(4, chunks));
  ASSERT_OK(driver().cuMemGetInfo(&with, &total));
  EXPECT_EQ(before - with, 4 * granularity());
  for (int i = 0; i < 3; ++i) pool.give(chunks[i]);
  pool.release_free();
  ASSERT_OK(driver().cuMemGetInfo(&after, &total));
  EXPECT_EQ(before - after, granularity());
  EXPECT_EQ(pool.created(), uint64_t{1});
  Chunk again[3];
  ASSERT_TRUE(pool.take(3, again));  // under recycled numbers, each its own
  std::set<Chunk> all(again, again + 3);
  all.insert(chunks[3]);
  EXPECT_EQ(all.size(), size_t{4});
  for (Chunk chunk : all) pool.give(chunk);
}

TEST(a_device_smaller_than_the_budget_lowers_the_limit) {
  size_t free_bytes = 0, total = 0;
  ASSERT_OK(driver().cuMemGetInfo(&free_bytes, &total));
  if (total > (size_t{1} << 30)) SKIP("would fill a real device");
  const uint64_t fits = free_bytes / granularity();
  Pool pool(fits + 5);
  std::vector<Chunk> chunks(fits + 1);
  EXPECT_TRUE(!pool.take(static_cast<uint32_t>(fits + 1), chunks.data()));
  EXPECT_EQ(pool.limit(), fits);
  EXPECT_EQ(pool.free(), fits);  // what could be created is kept
  ASSERT_TRUE(pool.take(static_cast<uint32_t>(fits), chunks.data()));
  chunks.pop_back();
  for (Chunk chunk : chunks) pool.give(chunk);
}

TEST(chunks_beyond_a_lowered_limit_go_back) {
  Pool pool(4);
  Chunk chunks[4];
  ASSERT_TRUE(pool.take(4, chunks));
  pool.give(chunks[0]);
  pool.give(chunks[1]);
  pool.set_limit(1);
  EXPECT_EQ(pool.available(), uint64_t{2});  // those that are free, until they are trimmed
  pool.trim();
  EXPECT_EQ(pool.created(), uint64_t{2});
  EXPECT_EQ(pool.free(), uint64_t{0});
  pool.give(chunks[2]);  // still one too many
  EXPECT_EQ(pool.created(), uint64_t{1});
  pool.give(chunks[3]);  // this one stays
  EXPECT_EQ(pool.free(), uint64_t{1});
  pool.set_limit(4);
  ASSERT_TRUE(pool.take(4, chunks));
  for (Chunk chunk : chunks) pool.give(chunk);
}
