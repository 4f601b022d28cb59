// The heap of small allocations against a model of it that is too simple to be wrong.
#include "small_heap.h"

#include <map>
#include <random>

#include "testing.h"

using namespace ooc;

namespace {

constexpr uint64_t kChunk = 64 << 10, kGranule = 64;

uint64_t granules(uint64_t bytes) { return (bytes + kGranule - 1) / kGranule; }

// Offset -> requested bytes, as the heap is expected to know them.
using Model = std::map<uint64_t, uint64_t>;

void expect_same(const SmallHeap& heap, const Model& model) {
  Model found;
  uint64_t end = 0;
  heap.each_allocation([&](uint64_t offset, uint64_t bytes) {
    EXPECT_TRUE(offset >= end);  // ascending, and nothing overlaps
    end = offset + granules(bytes) * kGranule;
    found[offset] = bytes;
  });
  EXPECT_TRUE(found == model);
}

bool overlaps(const Model& model, uint64_t offset, uint64_t bytes) {
  const auto next = model.lower_bound(offset);
  if (next != model.end() && next->first < offset + granules(bytes) * kGranule) return true;
  if (next == model.begin()) return false;
  const auto before = std::prev(next);
  return before->first + granules(before->second) * kGranule > offset;
}

}  // namespace

TEST(random_allocations_never_overlap) {
  constexpr uint64_t kRange = 16 * kChunk;
  SmallHeap heap(kRange, kChunk, kGranule);
  Model model;
  std::mt19937_64 random(7);
  uint64_t refused = 0;
  for (int step = 0; step < 40000; ++step) {
    const bool grow = (step / 2000) % 2 == 0;  // the heap fills up and empties again
    if (random() % 100 < (grow ? 70u : 30u)) {
      const uint64_t largest = uint64_t{1} << (random() % 17);
      const uint64_t bytes = 1 + random() % largest;
      const uint64_t offset = heap.allocate(bytes);
      if (offset == SmallHeap::kFailed) {
        ++refused;
        continue;
      }
      ASSERT_TRUE(offset % kGranule == 0 && offset + bytes <= kRange);
      ASSERT_TRUE(!overlaps(model, offset, bytes));
      EXPECT_EQ(heap.chunk_at(offset), offset / kChunk);
      EXPECT_EQ(heap.last_chunk(offset), (offset + granules(bytes) * kGranule - 1) / kChunk);
      model[offset] = bytes;
    } else if (!model.empty()) {
      auto chosen = model.lower_bound(random() % kRange);
      if (chosen == model.end()) chosen = model.begin();
      EXPECT_EQ(heap.requested(chosen->first), chosen->second);
      EXPECT_EQ(heap.free(chosen->first), chosen->second);
      model.erase(chosen);
    }
    if (step % 1000 == 0) expect_same(heap, model);
  }
  expect_same(heap, model);
  EXPECT_TRUE(refused > 0);  // it was full at times
  while (!model.empty()) {
    EXPECT_EQ(heap.free(model.begin()->first), model.begin()->second);
    model.erase(model.begin());
  }
  EXPECT_EQ(heap.allocate(kRange), uint64_t{0});  // everything has merged into one block again
}

TEST(neighbours_merge_whatever_the_order_of_frees) {
  const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    SmallHeap heap(kChunk, kChunk, kGranule);
    uint64_t offsets[3];
    for (uint64_t& offset : offsets) offset = heap.allocate(kChunk / 4);
    for (int index : order) EXPECT_EQ(heap.free(offsets[index]), kChunk / 4);
    EXPECT_EQ(heap.allocate(kChunk), uint64_t{0});
  }
}

TEST(only_the_start_of_an_allocation_is_one) {
  SmallHeap heap(kChunk, kChunk, kGranule);
  const uint64_t first = heap.allocate(1000), second = heap.allocate(10);
  for (uint64_t offset : {first + 1, first + kGranule, second + kGranule, kChunk - kGranule}) {
    EXPECT_EQ(heap.requested(offset), uint64_t{0});
    EXPECT_EQ(heap.free(offset), uint64_t{0});
  }
  EXPECT_EQ(heap.free(first), uint64_t{1000});
  EXPECT_EQ(heap.free(first), uint64_t{0});  // a second time
  EXPECT_EQ(heap.requested(second), uint64_t{10});
}

TEST(sizes_at_the_limits) {
  SmallHeap heap(4 * kChunk, kChunk, kGranule);
  EXPECT_EQ(heap.allocate(4 * kChunk + 1), SmallHeap::kFailed);
  EXPECT_EQ(heap.allocate(uint64_t{1} << 32), SmallHeap::kFailed);
  const uint64_t nothing = heap.allocate(0), one = heap.allocate(1);
  EXPECT_TRUE(nothing != one);  // an empty allocation has an address of its own
  EXPECT_EQ(heap.free(nothing), uint64_t{1});
  EXPECT_EQ(heap.free(one), uint64_t{1});
  const uint64_t across = heap.allocate(kChunk + 1);
  EXPECT_EQ(heap.last_chunk(across) - heap.chunk_at(across), uint64_t{1});
}
