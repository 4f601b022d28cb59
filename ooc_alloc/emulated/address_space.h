// The virtual addresses of the emulated device: reservations, and what is mapped into them.
//
// A reservation is PROT_NONE memory of this process. cuMemMap only records a mapping, cuMemSetAccess puts the physical
// pages there, and cuMemUnmap puts PROT_NONE memory back. So the device's addresses are host addresses, and touching one
// that is not accessible is a real fault.
//
// Each reservation has a page table with one entry per granule, in lazily touched memory: a look-up is one index, and a
// mapping allocates nothing. A call costs one or two system calls per run of mappings that are neighbours in physical
// memory too.
//
// Not thread-safe: its owner (device.h) holds a lock. Results are those that CUDA documents.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

#include "cuda_abi.h"
#include "physical_memory.h"

namespace ooc::emulated {

// A few mappings of this process, held back for the moment when the kernel gives it no more.
//
// The kernel limits the mappings of a process (vm.max_map_count). At the limit no mmap succeeds, not even the one that would
// merge mappings and so lead out of it. Releasing the spare ones first makes room for that one.
class SpareMappings {
 public:
  SpareMappings() { take(); }
  ~SpareMappings() { release(); }
  SpareMappings(const SpareMappings&) = delete;
  SpareMappings& operator=(const SpareMappings&) = delete;

  // Does nothing if they are held, or if the limit leaves no room.
  void take() {
    if (pages_ != nullptr) return;
    void* pages = mmap(nullptr, kPages * page_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return;
    pages_ = pages;
    for (size_t i = 1; i < kPages; i += 2) {
      if (mprotect(static_cast<char*>(pages) + i * page_bytes(), page_bytes(), PROT_READ) == 0) continue;
      release();
      return;
    }
  }
  // Returns false if they were not held.
  bool release() {
    if (pages_ == nullptr) return false;
    munmap(pages_, kPages * page_bytes());
    pages_ = nullptr;
    return true;
  }

 private:
  static constexpr size_t kPages = 32;  // each one mapping, as its neighbours differ in protection
  static size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

  void* pages_ = nullptr;
};

class AddressSpace {
 public:
  AddressSpace(PhysicalMemory& memory, uint64_t granularity) : memory_(memory), granularity_(granularity) {}

  // Sizes are multiples of the granularity. `alignment`: a power of two, or 0 for the granularity. `hint` may be ignored.
  CUresult reserve(uint64_t bytes, uint64_t alignment, uint64_t hint, uint64_t& address) {
    if (bytes == 0 || !is_multiple(bytes) || bytes > (1ull << 46) || (alignment & (alignment - 1)) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    alignment = std::max(alignment, granularity_);
    if (bytes >= kPageTableBytes) alignment = std::max(alignment, kPageTableBytes);  // see physical_memory.h
    const uint64_t room = bytes + alignment;  // of which the aligned part is kept
    if (room < bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    void* mapped = mmap(pointer(hint), room, PROT_NONE, kNowhere, -1, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const uint64_t start = reinterpret_cast<uint64_t>(mapped);
    address = round_up(start, alignment);
    if (address > start) munmap(mapped, address - start);
    if (start + room > address + bytes) munmap(pointer(address + bytes), start + room - address - bytes);

    const uint64_t table_bytes = bytes / granularity_ * sizeof(Granule);
    void* table = mmap(nullptr, table_bytes, PROT_READ | PROT_WRITE, kNowhere, -1, 0);
    if (table == MAP_FAILED) {
      munmap(pointer(address), bytes);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    reservations_[address] = {bytes, 0, static_cast<Granule*>(table)};
    return CUDA_SUCCESS;
  }
  // a whole reservation, with nothing mapped
  CUresult free(uint64_t address, uint64_t bytes) {
    const auto found = reservations_.find(address);
    if (found == reservations_.end() || found->second.bytes != bytes || found->second.mappings != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (munmap(pointer(address), bytes) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    munmap(found->second.table, bytes / granularity_ * sizeof(Granule));
    reservations_.erase(found);
    return CUDA_SUCCESS;
  }

  // a free range of one reservation, the whole allocation
  CUresult map(uint64_t address, uint64_t bytes, uint32_t slot) {
    Range range;
    if (bytes != memory_.allocation(slot).bytes || !find_range(address, bytes, range)) return CUDA_ERROR_INVALID_VALUE;
    for (const Granule* granule = range.first; granule < range.last; ++granule) {
      if (granule->slot_plus_one != 0) return CUDA_ERROR_INVALID_VALUE;
    }
    uint32_t position = 0;
    for (Granule* granule = range.first; granule < range.last; ++granule, ++position) {
      granule->slot_plus_one = slot + 1;
      granule->position = position & 0x3fffffffu;
      granule->access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    memory_.add_mapping(slot);
    range.reservation->mappings += 1;
    mappings_ += 1;
    return CUDA_SUCCESS;
  }
  // whole mappings without a gap
  CUresult unmap(uint64_t address, uint64_t bytes) {
    Range range;
    if (!find_range(address, bytes, range) || !covers_whole_mappings(range)) return CUDA_ERROR_INVALID_VALUE;
    if (!map_nothing(address, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    for (Granule* granule = range.first; granule < range.last;) {
      const uint32_t slot = granule->slot_plus_one - 1;
      const uint64_t count = granules_of(*granule);
      std::fill_n(granule, count, Granule{});
      granule += count;
      memory_.remove_mapping(slot);
      range.reservation->mappings -= 1;
      mappings_ -= 1;
    }
    return CUDA_SUCCESS;
  }
  // whole mappings without a gap
  CUresult set_access(uint64_t address, uint64_t bytes, CUmemAccess_flags access) {
    Range range;
    if (!find_range(address, bytes, range) || !covers_whole_mappings(range)) return CUDA_ERROR_INVALID_VALUE;
    for (const Granule* granule = range.first; granule < range.last;) {
      const uint64_t run_address = address + static_cast<uint64_t>(granule - range.first) * granularity_;
      const Run run = next_run(granule, range.last, run_address, access);
      if (!run.has_access && !map_pages(run.address, run.bytes, run.offset, access)) {
        restore(range.first, run.last, address);
        return CUDA_ERROR_OUT_OF_MEMORY;
      }
      granule = run.last;
    }
    for (Granule* granule = range.first; granule < range.last; granule += granules_of(*granule)) {
      granule->access = static_cast<uint32_t>(access) & 3u;
    }
    return CUDA_SUCCESS;
  }

  // false also if the range is not mapped as a whole
  bool is_all_on_host(uint64_t address, uint64_t bytes) {
    Range range;
    if (!find_range(address, bytes, range) || !covers_whole_mappings(range)) return false;
    for (const Granule* granule = range.first; granule < range.last; granule += granules_of(*granule))
      if (!allocation_at(*granule).on_host) return false;
    return true;
  }

  // 0 unless the range is whole mappings without a gap.
  uint64_t mappings_in(uint64_t address, uint64_t bytes) {
    Range range;
    if (!find_range(address, bytes, range) || !covers_whole_mappings(range)) return 0;
    uint64_t count = 0;
    for (const Granule* granule = range.first; granule < range.last; granule += granules_of(*granule)) ++count;
    return count;
  }

  // The weakest access of a range: -1 if a byte is not mapped, else a CUmemAccess_flags.
  int access(uint64_t address, uint64_t bytes) const {
    uint64_t base = 0;
    const Reservation* reservation = find(address, base);
    if (reservation == nullptr || bytes > base + reservation->bytes - address) return -1;
    int weakest = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const Granule* granule = reservation->table + (address - base) / granularity_;
    const Granule* last = reservation->table + (address - base + std::max<uint64_t>(bytes, 1) - 1) / granularity_;
    while (granule <= last) {
      if (granule->slot_plus_one == 0) return -1;
      const Granule* first = granule - granule->position;
      weakest = std::min(weakest, static_cast<int>(first->access));
      granule = first + granules_of(*first);
    }
    return weakest;
  }
  // -1 if not mapped
  int64_t physical_offset(uint64_t address) const {
    uint64_t base = 0;
    const Reservation* reservation = find(address, base);
    if (reservation == nullptr) return -1;
    const Granule& granule = reservation->table[(address - base) / granularity_];
    if (granule.slot_plus_one == 0) return -1;
    const uint64_t in_mapping = granule.position * granularity_ + (address - base) % granularity_;
    return static_cast<int64_t>(allocation_at(granule).offset + in_mapping);
  }

  uint64_t mappings() const { return mappings_; }
  uint64_t reservations() const { return reservations_.size(); }

 private:
  static void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

  static constexpr uint64_t kFaultAround = 64 << 10;  // the aligned block that a read fault puts in
  static constexpr int kNowhere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

  static uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

  struct Granule {
    uint32_t slot_plus_one;  // of the allocation mapped here; 0: none
    uint32_t position : 30;  // number of granules since the mapping's first
    uint32_t access : 2;     // valid in the mapping's first granule
  };
  struct Reservation {
    uint64_t bytes = 0;
    uint64_t mappings = 0;
    Granule* table = nullptr;
  };
  struct Range {  // of granules, in one reservation
    Reservation* reservation = nullptr;
    Granule* first = nullptr;
    Granule* last = nullptr;  // one behind
  };

  bool is_multiple(uint64_t value) const { return value % granularity_ == 0; }
  const Reservation* find(uint64_t address, uint64_t& base) const {
    const auto after = reservations_.upper_bound(address);
    if (after == reservations_.begin()) return nullptr;
    const auto found = std::prev(after);
    base = found->first;
    return address - base < found->second.bytes ? &found->second : nullptr;
  }
  bool find_range(uint64_t address, uint64_t bytes, Range& range) {
    if (bytes == 0 || !is_multiple(address) || !is_multiple(bytes)) return false;
    uint64_t base = 0;
    const Reservation* reservation = find(address, base);
    if (reservation == nullptr || bytes > base + reservation->bytes - address) return false;
    range.reservation = const_cast<Reservation*>(reservation);  // ours; find() is shared with the const look-ups
    range.first = reservation->table + (address - base) / granularity_;
    range.last = range.first + bytes / granularity_;
    return true;
  }
  const Allocation& allocation_at(const Granule& granule) const { return memory_.allocation(granule.slot_plus_one - 1); }
  uint64_t granules_of(const Granule& granule) const { return allocation_at(granule).bytes / granularity_; }
  bool covers_whole_mappings(const Range& range) const {
    const Granule* granule = range.first;
    while (granule < range.last) {
      if (granule->slot_plus_one == 0 || granule->position != 0) return false;
      granule += granules_of(*granule);
    }
    return granule == range.last;
  }
  struct Run {  // mappings that are neighbours in physical memory
    const Granule* first = nullptr;
    const Granule* last = nullptr;
    uint64_t address = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    bool has_access = false;  // already the access asked for
  };
  Run next_run(const Granule* first, const Granule* last, uint64_t address, CUmemAccess_flags access) const {
    const auto has_access = [=](const Granule& granule) { return granule.access == static_cast<uint32_t>(access); };
    Run run{first, first, address, allocation_at(*first).offset, 0, has_access(*first)};
    while (run.last < last && has_access(*run.last) == run.has_access &&
           allocation_at(*run.last).offset == run.offset + run.bytes) {
      run.bytes += allocation_at(*run.last).bytes;
      run.last += granules_of(*run.last);
    }
    return run;
  }
  // Restores the access on record after a failure half-way. That can fail too, but the kernel had room a moment ago.
  void restore(const Granule* first, const Granule* last, uint64_t address) {
    for (const Granule* granule = first; granule < last; granule += granules_of(*granule)) {
      const Allocation& allocation = allocation_at(*granule);
      (void)map_pages(address, allocation.bytes, allocation.offset, static_cast<CUmemAccess_flags>(granule->access));
      address += allocation.bytes;
    }
  }
  bool map_pages(uint64_t address, uint64_t bytes, uint64_t offset, CUmemAccess_flags access) {
    if (access == CU_MEM_ACCESS_FLAGS_PROT_NONE) return map_nothing(address, bytes);
    const int protection = access == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_READ | PROT_WRITE;
    if (mmap(pointer(address), bytes, protection, MAP_SHARED | MAP_FIXED, memory_.file(offset), static_cast<off_t>(offset)) ==
        MAP_FAILED) {
      return false;
    }
    // The pages exist, and a program should not pay a fault for each. A read fault puts in the neighbours as well, in half
    // the time of MAP_POPULATE, which looks at each page.
    for (uint64_t at = address; at < address + bytes; at = round_up(at + 1, kFaultAround)) {
      (void)*static_cast<volatile char*>(pointer(at));
    }
    return true;
  }
  // Puts PROT_NONE memory over a range that is ours. At the kernel's limit of mappings it uses the spare ones.
  bool map_nothing(uint64_t address, uint64_t bytes) {
    const auto attempt = [=] {
      return mmap(pointer(address), bytes, PROT_NONE, kNowhere | MAP_FIXED, -1, 0) != MAP_FAILED;
    };
    const bool is_done = attempt() || (spare_.release() && attempt());
    spare_.take();
    return is_done;
  }

  PhysicalMemory& memory_;
  const uint64_t granularity_;
  std::map<uint64_t, Reservation> reservations_;  // by address
  uint64_t mappings_ = 0;
  SpareMappings spare_;
};

}  // namespace ooc::emulated
