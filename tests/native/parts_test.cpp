// Parts of the core by themselves: each is made with what it stands on, and no core.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#include "core_fixture.h"
#include "geometry.h"
#include "host_arena.h"
#include "mappings.h"
#include "own_memory.h"
#include "region_table.h"
#include "slabs.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// What the parts stand on; functions run on the host.
struct Ground {
  explicit Ground(uint64_t budget_chunks = 8)
      : config(make_config({budget_chunks})),
        device(config.driver_library, 0),
        geometry(config, device),
        pool(device.driver(), 0, geometry.chunk_bytes, budget_chunks),
        streams(device, timeline, false, false),
        table(geometry),
        mappings(geometry, device, pool, streams, table) {}
  ~Ground() { pool.release_free(); }

  ooc_config config;
  Device device;
  Geometry geometry;
  Timeline timeline;
  ChunkPool pool;
  Streams streams;
  RegionTable table;
  Mappings mappings;
};

void fill(Ground& ground, Region* region) {
  std::vector<Chunk> chunks(region->count);
  ASSERT_TRUE(ground.pool.take(region->count, chunks.data()));
  ASSERT_OK(ground.mappings.map({region, 0, region->count}, chunks.data()));
  for (uint32_t i = 0; i < region->count; ++i) region->slots[i].put(chunks[i], SlotState::kResident);
  ground.table.gained(region, region->count);
}

}  // namespace

TEST(the_table_finds_live_regions_alone_and_the_oldest_use_first) {
  Ground ground;
  RegionTable& table = ground.table;
  Region* first = table.make(2);
  Region* second = table.make(3);
  const char* inside = ground.geometry.address(second, 1) + 5;
  EXPECT_TRUE(table.find(inside) == nullptr);
  table.begin_variable(first, 100);
  table.begin_variable(second, 200);
  EXPECT_TRUE(table.find(inside) == second);
  EXPECT_TRUE(table.find(&ground) == nullptr);
  EXPECT_TRUE(table.oldest() == first && first->newer == second);
  table.touch(first);
  EXPECT_TRUE(table.oldest() == second);
  EXPECT_EQ(table.live_bytes(), uint64_t{300});
  EXPECT_EQ(table.live_chunks(), uint64_t{5});
  EXPECT_EQ(table.audit(), std::string());
  ++second->bytes;
  EXPECT_TRUE(contains(table.audit(), "live bytes of regions"));
  --second->bytes;
  const RegionHandle handle{second, second->generation};
  table.end_variable(second);
  EXPECT_TRUE(handle.get() == nullptr && table.find(inside) == nullptr);
}

TEST(a_freed_region_serves_the_next_variable_of_its_size) {
  Ground ground;
  RegionTable& table = ground.table;
  Region* region = table.make(2);
  fill(ground, region);
  table.begin_variable(region, 10);
  table.end_variable(region);
  table.cache(region);
  EXPECT_EQ(table.cached_chunks(), uint64_t{2});
  EXPECT_EQ(table.resident_chunks(), uint64_t{0});
  const auto any = [](const Region*) { return true; };
  EXPECT_TRUE(table.take_cached(3, false, any) == nullptr);
  EXPECT_TRUE(table.take_cached(2, false, any) == region);
  EXPECT_EQ(table.audit(), std::string("resident chunks: counted 0, kept 2; cached chunks: counted 2, kept 0; "));
  table.begin_variable(region, 10);
  EXPECT_EQ(table.audit(), std::string());
  table.end_variable(region);
  ASSERT_TRUE(ground.mappings.destroy(region));
  EXPECT_EQ(ground.pool.free(), uint64_t{2});
}

TEST(freed_regions_are_divided_and_joined) {
  Ground ground;
  RegionTable& table = ground.table;
  const auto cached = [&](uint32_t count) {
    Region* region = table.make(count);
    fill(ground, region);
    table.begin_variable(region, count);
    table.end_variable(region);
    table.cache(region);
    return region;
  };
  const auto begin = [&](Region* region) {
    table.begin_variable(region, 1);
    for (uint32_t i = 0; i < region->count; ++i) {
      EXPECT_TRUE(region->slots[i].resident() && table.find(ground.geometry.address(region, i)) == region);
    }
    EXPECT_EQ(table.audit(), std::string());
    return region;
  };
  const auto any = [](const Region*) { return true; };
  cached(2);
  Region* middle = cached(3);
  cached(2);
  const Chunk last = middle->slots[2].chunk;
  // A part of the one with the least to spare.
  Region* part = begin(table.take_cached(1, false, any));
  EXPECT_EQ(part->first, uint64_t{5});
  EXPECT_EQ(table.cached_chunks(), uint64_t{6});
  // No neighbours that are apart, or in use, or cannot be used at once.
  EXPECT_TRUE(table.take_cached(6, false, any) == nullptr);
  EXPECT_TRUE(table.take_cached(4, false, [&](const Region* region) { return region != middle; }) == nullptr);
  // Two of them, and no chunk of either is another one now.
  Region* both = begin(table.take_cached(4, false, any));
  EXPECT_EQ(both->first, uint64_t{0});
  EXPECT_TRUE(both->fully_resident() && both->slots.size() == 4);
  Region* rest = table.take_cached(1, false, any);
  EXPECT_EQ(rest->first, uint64_t{4});
  EXPECT_EQ(rest->slots[0].chunk, last);
  begin(rest);
  for (Region* region : {part, both, rest}) {
    table.end_variable(region);
    table.cache(region);
  }
  EXPECT_EQ(begin(table.take_cached(7, false, any))->first, uint64_t{0});
}

TEST(free_addresses_complete_freed_regions) {
  Ground ground;
  RegionTable& table = ground.table;
  Region* regions[3];
  for (uint32_t i = 0; i < 3; ++i) {  // at 0, 2 and 5
    regions[i] = table.make(i == 1 ? 3 : 2);
    fill(ground, regions[i]);
    if (i != 1) table.cache(regions[i]);
  }
  const auto any = [](const Region*) { return true; };
  const auto not_the_last = [&](const Region* region) { return region != regions[2]; };
  EXPECT_TRUE(table.take_cached(5, true, not_the_last) == nullptr);  // behind the first somebody lives
  ASSERT_TRUE(ground.mappings.destroy(regions[1]));
  EXPECT_TRUE(table.take_cached(6, false, any) == nullptr);
  EXPECT_TRUE(table.take_cached(6, true, not_the_last) == nullptr);
  Region* both = table.take_cached(6, true, any);  // and not one of them with what is free behind it
  ASSERT_TRUE(both != nullptr);
  EXPECT_EQ(both->first, uint64_t{0});
  EXPECT_EQ(both->slots.size(), size_t{6});
  EXPECT_EQ(both->resident, 3u);
  for (uint32_t i = 0; i < 6; ++i) EXPECT_EQ(both->slots[i].has_chunk(), i < 2 || i == 5);
  EXPECT_EQ(table.make(1)->first, uint64_t{7});  // what became part of it is not free
  Region* rest = table.take_cached(3, true, any);
  EXPECT_TRUE(rest == nullptr);  // the one behind it is that which was just made
  for (Region* region : {both, table.take_cached(1, false, any)}) ASSERT_TRUE(ground.mappings.destroy(region));
  EXPECT_EQ(ground.pool.free(), uint64_t{7});
  EXPECT_EQ(table.make(7)->first, uint64_t{0});
}

TEST(who_used_freed_memory_is_known_of_each_part_and_of_the_whole) {
  Ground ground;
  RegionTable& table = ground.table;
  for (const uint32_t count : {1u, 2u}) {  // the first was used on stream 3 until 1, the second on stream 4 until 2
    Region* region = table.make(count);
    fill(ground, region);
    region->order.arrival.add(Moment{count + 2, count});
    table.cache(region);
  }
  const auto any = [](const Region*) { return true; };
  const auto until = [](const Region* region, uint32_t stream) {
    uint64_t number = 0;
    for (const Moment& moment : region->order.arrival) number += moment.stream == stream ? moment.number : 0;
    return number;
  };
  Region* all = table.take_cached(3, false, any);
  EXPECT_EQ(until(all, 3), uint64_t{1});
  EXPECT_EQ(until(all, 4), uint64_t{2});
  table.cache(all);
  table.take_cached(2, false, any);
  Region* rest = table.take_cached(1, false, any);
  EXPECT_EQ(until(rest, 3), uint64_t{1});
  EXPECT_EQ(until(rest, 4), uint64_t{2});
}

TEST(where_functions_run_on_the_host_an_address_is_vacant_at_once) {
  Ground ground;
  Region* region = ground.table.make(4);
  fill(ground, region);
  EXPECT_TRUE(ground.mappings.unmap({region, 1, 2}));
  EXPECT_EQ(region->resident, 2u);
  EXPECT_TRUE(region->order.stale.empty());
  EXPECT_EQ(ground.pool.free(), uint64_t{2});
  EXPECT_EQ(ground.mappings.audit(), std::string());
  ASSERT_TRUE(ground.mappings.destroy(region));
  EXPECT_EQ(ground.pool.free(), uint64_t{4});
}

TEST(slabs_keep_the_memory_of_freed_blocks_until_it_is_taken_back) {
  Ground ground;
  Slabs slabs(ground.geometry, 64, ground.device, ground.pool, ground.streams, ground.mappings);
  std::mutex mutex;
  Lock lock(mutex);
  bool backed = true;
  const uint64_t offset = slabs.place(1000, 4, 0, backed);
  EXPECT_TRUE(!backed && slabs.next_unbacked(offset) == 0);
  Chunk chunk = kNoChunk;
  ASSERT_TRUE(ground.pool.take(1, &chunk));
  ASSERT_TRUE(slabs.back(lock, 0, chunk));
  EXPECT_TRUE(slabs.next_unbacked(offset) == Slabs::kFailed);
  slabs.begin_block(1000);
  EXPECT_EQ(slabs.requested(slabs.address(offset)), uint64_t{1000});
  EXPECT_EQ(slabs.audit(), std::string());
  EXPECT_TRUE(!slabs.reclaim_one());
  EXPECT_EQ(slabs.free(slabs.address(offset), {}), uint64_t{1000});
  EXPECT_EQ(slabs.unused(), uint64_t{1});
  EXPECT_TRUE(slabs.reclaim_one());
  EXPECT_EQ(slabs.backed(), uint64_t{0});
  EXPECT_EQ(ground.pool.free(), uint64_t{1});
  EXPECT_TRUE(slabs.place(5 * ground.geometry.chunk_bytes, 4, 0, backed) == Slabs::kFailed);  // more than they may take
  EXPECT_EQ(slabs.audit(), std::string());
}

TEST(both_kinds_of_host_memory_share_one_budget) {
  Ground ground;
  const uint64_t chunk = ground.geometry.chunk_bytes;
  HostArena arena(ground.device.driver(), ground.device.device(), 8 * chunk);
  arena.prepare_mappable(ground.device.device(), chunk);
  char* ordinary = arena.allocate(5 * chunk);
  char* mappable = arena.allocate_mappable(2 * chunk + 1);
  ASSERT_TRUE(ordinary != nullptr && mappable != nullptr);
  EXPECT_TRUE(!arena.is_mappable(ordinary) && arena.is_mappable(mappable));
  EXPECT_EQ(arena.taken(mappable, 2 * chunk + 1), 3 * chunk);
  EXPECT_EQ(arena.used(), 8 * chunk);
  EXPECT_TRUE(arena.committed() <= arena.budget());
  EXPECT_TRUE(arena.allocate(1) == nullptr && arena.refusal() == Refusal::kBudget);
  EXPECT_TRUE(arena.allocate_mappable(1) == nullptr && contains(arena.describe(), "raise OOC_HOST_BUDGET"));
  arena.free(ordinary, 5 * chunk);
  EXPECT_EQ(arena.used(), 3 * chunk);
  EXPECT_TRUE(arena.allocate(5 * chunk) == ordinary);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which have operators of their own
namespace {

// Runs in a child, whose memory is used up. Gives the line of the first check that failed, or 0.
int use_the_reserve() {
#define CHECK(condition) if (!(condition)) return __LINE__ % 256
  CHECK(own_memory::ready());
  const rlimit none{0, 0};
  setrlimit(RLIMIT_AS, &none);
  void* taken = nullptr;  // a list of all that malloc still has
  // Small blocks that were freed serve only their own size again.
  for (size_t bytes = size_t{1} << 30; bytes >= sizeof(void*); bytes = bytes > 2048 ? bytes / 2 : bytes - 8)
    while (void** block = static_cast<void**>(std::malloc(bytes))) {
      *block = taken;
      taken = block;
    }
  for (const size_t alignment : {size_t{8}, size_t{64}, size_t{4096}}) {
    CHECK(own_memory::ready());
    void* first = alignment > 8 ? ::operator new(100, std::align_val_t{alignment}) : ::operator new(100);
    CHECK(!own_memory::whole);
    void* second = alignment > 8 ? ::operator new(5000, std::align_val_t{alignment}) : ::operator new(5000);
    CHECK(reinterpret_cast<uintptr_t>(first) % alignment == 0 && reinterpret_cast<uintptr_t>(second) % alignment == 0);
    CHECK(static_cast<char*>(first) + 100 <= second);
    std::memset(first, 1, 100);
    std::memset(second, 2, 5000);
    CHECK(static_cast<char*>(first)[99] == 1);
    // What is left of the segment does not hold this, and nothing else does.
    CHECK(::operator new(size_t{1} << 20, std::nothrow) == nullptr);
    if (alignment > 8) {
      ::operator delete(first, std::align_val_t{alignment});
      ::operator delete(second, 5000, std::align_val_t{alignment});
    } else {
      ::operator delete(first);
      ::operator delete(second);
    }
    CHECK(own_memory::ready());  // the segment is whole again
  }
#undef CHECK
  return 0;
}

}  // namespace

TEST(without_memory_what_has_begun_is_finished_from_the_reserve) {
  const pid_t child = fork();
  if (child == 0) _exit(use_the_reserve());
  int status = -1;
  ASSERT_TRUE(child > 0 && waitpid(child, &status, 0) == child);
  EXPECT_EQ(status, 0);
}
#endif
