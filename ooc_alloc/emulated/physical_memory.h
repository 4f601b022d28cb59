// The physical memory of the emulated device: extents of one memfd, handed out up to the device's size.
//
// The whole file is mapped once, at its *home*, where every extent's pages are in the page tables from its creation on.
// Making an extent accessible at a device address lends it: mremap moves the page table entries there, in blocks of 2 MiB
// where all is aligned; unmapping moves them home. That takes 3 to 5 us per 2 MiB where mapping the file anew and faulting
// the pages in takes 100 to 200: about the share of a swap's time that mapping takes on a GPU. The slow way is taken for an
// extent that is lent already (an alias), for host memory, on an old kernel, and wherever mremap fails.
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
  FreeExtents(uint64_t offset, uint64_t bytes) { give(offset, bytes); }
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
  bool on_host = false;  // host memory: counts apart, and is never lent
  uint64_t lent_to = 0;  // the address whose page tables hold its pages; 0: at home
};

class PhysicalMemory {
 public:
  static constexpr unsigned char kPoison = 0xdb;

  // Throws std::system_error when the kernel gives no memfd.
  explicit PhysicalMemory(uint64_t device_bytes);
  ~PhysicalMemory();
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  // Memory is created in three steps, so that the slow second one needs no lock: take an extent (false if that is beyond the
  // device's size), fill it with poison (false if the host has no memory), and then publish it with a handle or give it back.
  bool take(uint64_t bytes, bool on_host, uint64_t& offset);
  bool fill(uint64_t offset, uint64_t bytes) const;
  CUmemGenericAllocationHandle publish(uint64_t offset, uint64_t bytes);
  void give_back(uint64_t offset, uint64_t bytes);

  // The slot of a handle that has not been released, or -1.
  int64_t find(CUmemGenericAllocationHandle handle) const;
  void release(uint32_t slot);
  void add_mapping(uint32_t slot) { slots_[slot].mappings += 1; }
  void remove_mapping(uint32_t slot);
  const Allocation& allocation(uint32_t slot) const { return slots_[slot]; }

  // Moves page table entries of neighbouring allocations from home to an address, and back. Returns false if that cannot be
  // done; nothing has changed then. After the way back the address still has a mapping of the file. The caller notes each
  // allocation's loan with set_lent_to().
  bool lend(uint64_t offset, uint64_t bytes, uint64_t address) const;
  bool bring_home(uint64_t offset, uint64_t bytes, uint64_t address) const;
  bool can_lend() const { return home_ != nullptr; }
  void set_lent_to(uint32_t slot, uint64_t address) { slots_[slot].lent_to = address; }

  int file() const { return file_; }
  uint64_t device_bytes() const { return device_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }
  uint64_t host_bytes() const { return host_bytes_; }
  uint64_t allocations() const { return slots_.size() - free_slots_.size(); }
  void reset_peak() { peak_bytes_ = used_bytes_; }

 private:
  void map_home();
  bool is_on_host(uint64_t offset) const;
  FreeExtents& zone_of(uint64_t bytes);
  void destroy_if_unused(uint32_t slot);

  const uint64_t device_bytes_;
  uint64_t used_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
  uint64_t host_bytes_ = 0;
  FreeExtents aligned_free_;  // for sizes that are multiples of 2 MiB, so that their offsets are too
  FreeExtents other_free_;
  FreeExtents host_free_;     // behind the two, and not mapped at home
  std::vector<Allocation> slots_;
  std::vector<uint32_t> free_slots_;
  int file_ = -1;
  unsigned char* home_ = nullptr;  // aligned to 2 MiB
};

}  // namespace ooc::emulated
