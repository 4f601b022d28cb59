// Host memory for copies on streams.
#pragma once

#include "device_fixture.h"

namespace ooc::testing {

// Host memory that copies reach without the host's help.
struct Pinned {
  explicit Pinned(uint64_t size) : bytes(size) {
    void* pointer = nullptr;
    ASSERT_OK(driver().cuMemHostAlloc(&pointer, size, 0));
    data = static_cast<unsigned char*>(pointer);
  }
  ~Pinned() { EXPECT_OK(driver().cuMemFreeHost(data)); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  Bytes contents() const { return Bytes(data, data + bytes); }
  unsigned char* data;
  uint64_t bytes;
};

}  // namespace ooc::testing
