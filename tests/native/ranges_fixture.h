// A variable that functions use in ranges, beside a plain array with what it should hold.
#pragma once

#include <algorithm>
#include <random>

#include "core_fixture.h"

namespace ooc::testing {

// Bytes that were never written are not compared: they may be anything.
struct Array {
  void* address = nullptr;
  Bytes bytes;
  std::vector<bool> known;  // [bytes]

  char* at(uint64_t offset) const { return static_cast<char*>(address) + offset; }
  CUdeviceptr pointer(uint64_t offset) const { return reinterpret_cast<CUdeviceptr>(at(offset)); }
  ooc_operand range(uint64_t offset, uint64_t count, uint32_t access) const { return {at(offset), access, 0, count}; }
  ooc_operand whole(uint32_t access) const { return {address, access, 0, 0}; }
};

struct RangesTest : CoreTest {
  using CoreTest::CoreTest;

  Array make_absent(uint64_t bytes) {
    Array array{core.malloc_absent(bytes), Bytes(bytes), std::vector<bool>(bytes)};
    ASSERT_TRUE(array.address != nullptr);
    return array;
  }

  // What the bodies of functions do.
  void put_range(Array& array, uint64_t offset, uint64_t bytes, unsigned seed) {
    const Bytes fresh = pattern(bytes, seed);
    testing::write(array.pointer(offset), fresh);
    std::copy(fresh.begin(), fresh.end(), array.bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    std::fill_n(array.known.begin() + static_cast<std::ptrdiff_t>(offset), bytes, true);
  }
  bool range_holds(const Array& array, uint64_t offset, uint64_t bytes) {
    const Bytes found = testing::read(array.pointer(offset), bytes);
    for (uint64_t i = 0; i < bytes; ++i)
      if (array.known[offset + i] && found[i] != array.bytes[offset + i]) return false;
    return true;
  }

  // Functions that use one range.
  int write_range(Array& array, uint64_t offset, uint64_t bytes, unsigned seed) {
    return call("write part", {array.range(offset, bytes, OOC_WRITE)}, [&] { put_range(array, offset, bytes, seed); });
  }
  int check_range(const Array& array, uint64_t offset, uint64_t bytes) {
    return call("check part", {array.range(offset, bytes, OOC_READ)}, [&] {
      EXPECT_TRUE(range_holds(array, offset, bytes));
    });
  }
  // In parts of so many bytes, which need be no multiple of anything.
  void write_all(Array& array, uint64_t part, unsigned seed) {
    for (uint64_t at = 0; at < array.bytes.size(); at += part)
      ASSERT_EQ(write_range(array, at, std::min(part, array.bytes.size() - at), seed++), OOC_OK);
  }
  void check_all(const Array& array, uint64_t part) {
    for (uint64_t at = 0; at < array.bytes.size(); at += part)
      ASSERT_EQ(check_range(array, at, std::min(part, array.bytes.size() - at)), OOC_OK);
  }

  // 1 for each chunk on the device, as a text: "1100".
  std::string there(const Array& array) {
    std::vector<uint8_t> chunks((array.bytes.size() + chunk - 1) / chunk);
    EXPECT_EQ(core.residency(array.address, chunks.data(), static_cast<uint32_t>(chunks.size())), chunks.size());
    std::string text;
    for (const uint8_t resident : chunks) text += resident != 0 ? '1' : '0';
    return text;
  }
  void swap_out() {
    let_go();
    ASSERT_EQ(core.evict_all(), OOC_OK);
  }
};

// One step of a program that picks variables, ranges and what to do with them by chance. Returns the status.
struct RandomProgram {
  RandomProgram(RangesTest& test, unsigned seed, uint64_t most_chunks)
      : t(test), random(seed), most(most_chunks) {}

  uint64_t below(uint64_t limit) { return random() % limit; }
  uint64_t chunks_live() const {
    uint64_t live = 0;
    for (const Array& array : arrays) live += (array.bytes.size() + t.chunk - 1) / t.chunk;
    return live;
  }

  // In three chunks or less, anywhere; small ones and ones of exactly some chunks are among them.
  std::pair<uint64_t, uint64_t> some_range(const Array& array) {
    const uint64_t size = array.bytes.size();
    if (below(4) == 0) {
      const uint64_t first = below(size) / t.chunk * t.chunk;
      return {first, std::min(size - first, (1 + below(2)) * t.chunk)};
    }
    const uint64_t first = below(size), most_bytes = below(3) == 0 ? 100 : t.chunk + t.chunk / 2;
    return {first, 1 + below(std::min(size - first, most_bytes))};
  }

  int use_some() {
    struct Part {
      Array* array;
      uint64_t offset, bytes;
      bool writes;
      unsigned seed;
    };
    std::vector<Part> parts;
    std::vector<ooc_operand> operands;
    for (uint64_t i = 0, count = 1 + below(most_parts); i < count; ++i) {
      Array& array = arrays[below(arrays.size())];
      const auto [offset, bytes] = some_range(array);
      const bool writes = below(3) == 0;
      parts.push_back({&array, offset, bytes, writes, static_cast<unsigned>(random())});
      operands.push_back(array.range(offset, bytes, writes ? uint32_t{OOC_READ | OOC_WRITE} : uint32_t{OOC_READ}));
    }
    return t.call("random parts", operands, [&] {
      for (const Part& part : parts) EXPECT_TRUE(t.range_holds(*part.array, part.offset, part.bytes));
      for (const Part& part : parts)
        if (part.writes) t.put_range(*part.array, part.offset, part.bytes, part.seed);
      for (const Part& part : parts) EXPECT_TRUE(t.range_holds(*part.array, part.offset, part.bytes));
    });
  }

  int use_whole() {
    Array& array = arrays[below(arrays.size())];
    if (array.bytes.size() > 3 * t.chunk) return OOC_OK;
    const bool writes = below(3) == 0;
    const auto [offset, bytes] = some_range(array);
    const ooc_operand again = array.range(offset, bytes, OOC_READ);
    return t.call("random whole", {array.whole(writes ? OOC_READ | OOC_WRITE : OOC_READ), again}, [&] {
      EXPECT_TRUE(t.range_holds(array, 0, array.bytes.size()));
      if (writes) t.put_range(array, 0, array.bytes.size(), static_cast<unsigned>(random()));
    });
  }

  int step() {
    const uint64_t choice = below(100);
    if (arrays.empty() || (choice < 6 && chunks_live() < most)) {
      const uint64_t bytes = (1 + below(choice < 3 ? 12 : 4)) * t.chunk - below(t.chunk);
      if (below(3) == 0 || bytes > 4 * t.chunk) {
        arrays.push_back(t.make_absent(bytes));
        return OOC_OK;
      }
      t.let_go();
      void* address = t.core.malloc(bytes);
      if (address == nullptr) return OOC_OUT_OF_MEMORY;
      arrays.push_back({address, Bytes(bytes), std::vector<bool>(bytes)});
      return OOC_OK;
    }
    if (choice < 10) {
      std::swap(arrays[below(arrays.size())], arrays.back());
      t.core.free(arrays.back().address);
      arrays.pop_back();
      return OOC_OK;
    }
    if (choice < 12) return t.core.evict_all();
    if (choice < 14) {
      t.core.release_cached();
      return OOC_OK;
    }
    return choice < 25 ? use_whole() : use_some();
  }

  RangesTest& t;
  std::mt19937_64 random;
  uint64_t most;            // chunks that live at once
  uint64_t most_parts = 3;  // of one function: together at most three times as many chunks
  std::vector<Array> arrays;
};

}  // namespace ooc::testing
