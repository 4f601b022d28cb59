// The physical memory of the emulated device: extents of one memfd, handed out up to the device's size.
//
// Not thread-safe, except fill(): its owner (device.h) holds a lock.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda_abi.h"

namespace ooc::emulated {

// Free extents of the file. The smallest that fits is taken, at the lowest offset, from its start: chunks that are created
// one after another are neighbours in the file, so that their mappings merge into one of the kernel's.
class FreeExtents {
 public:
  explicit FreeExtents(uint64_t bytes) { give(0, bytes); }
  bool take(uint64_t bytes, uint64_t& offset);
  void give(uint64_t offset, uint64_t bytes);

 private:
  std::map<uint64_t, uint64_t> by_offset_;           // offset -> bytes; no two adjacent
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (bytes, offset) of the same extents
};

// One physical allocation. It lives until its handle is released and its last mapping is gone.
struct Allocation {
  uint64_t offset = 0;
  uint64_t bytes = 0;  // 0: the slot is free
  uint32_t generation = 0;
  uint32_t mappings = 0;
  bool has_handle = false;
};

class PhysicalMemory {
 public:
  static constexpr unsigned char kPoison = 0xdb;

  // Throws std::system_error when the kernel gives no memfd.
  explicit PhysicalMemory(uint64_t device_bytes);
  ~PhysicalMemory();
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  // Creating is three steps so that the second, which is slow, needs no lock: take an extent (false: beyond the device's
  // size), fill it with poison (false: the host has no memory), and then give it a handle or give it back.
  bool take(uint64_t bytes, uint64_t& offset);
  bool fill(uint64_t offset, uint64_t bytes) const;
  CUmemGenericAllocationHandle publish(uint64_t offset, uint64_t bytes);
  void give_back(uint64_t offset, uint64_t bytes);

  // The slot of a handle that has not been released, or -1.
  int64_t find(CUmemGenericAllocationHandle handle) const;
  void release(uint32_t slot);
  void add_mapping(uint32_t slot) { slots_[slot].mappings += 1; }
  void remove_mapping(uint32_t slot);
  const Allocation& allocation(uint32_t slot) const { return slots_[slot]; }

  int file() const { return file_; }
  uint64_t device_bytes() const { return device_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }
  uint64_t allocations() const { return slots_.size() - free_slots_.size(); }
  void reset_peak() { peak_bytes_ = used_bytes_; }

 private:
  void destroy_if_unused(uint32_t slot);

  const uint64_t device_bytes_;
  uint64_t used_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
  FreeExtents free_;
  std::vector<Allocation> slots_;
  std::vector<uint32_t> free_slots_;
  int file_ = -1;
};

}  // namespace ooc::emulated
