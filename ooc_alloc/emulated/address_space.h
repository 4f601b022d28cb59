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

#include <cstdint>
#include <map>

#include "cuda_abi.h"
#include "physical_memory.h"
#include "spare_mappings.h"

namespace ooc::emulated {

class AddressSpace {
 public:
  AddressSpace(PhysicalMemory& memory, uint64_t granularity) : memory_(memory), granularity_(granularity) {}

  // Sizes are multiples of the granularity. `alignment`: a power of two, or 0 for the granularity. `hint` may be ignored.
  CUresult reserve(uint64_t bytes, uint64_t alignment, uint64_t hint, uint64_t& address);
  CUresult free(uint64_t address, uint64_t bytes);  // a whole reservation, with nothing mapped

  CUresult map(uint64_t address, uint64_t bytes, uint32_t slot);  // a free range of one reservation, the whole allocation
  CUresult unmap(uint64_t address, uint64_t bytes);               // whole mappings without a gap
  CUresult set_access(uint64_t address, uint64_t bytes, CUmemAccess_flags access);  // whole mappings without a gap

  bool is_all_on_host(uint64_t address, uint64_t bytes);  // false also if the range is not mapped as a whole

  // The weakest access of a range: -1 if a byte is not mapped, else a CUmemAccess_flags.
  int access(uint64_t address, uint64_t bytes) const;
  int64_t physical_offset(uint64_t address) const;  // -1 if not mapped

  uint64_t mappings() const { return mappings_; }
  uint64_t reservations() const { return reservations_.size(); }

 private:
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
  const Reservation* find(uint64_t address, uint64_t& base) const;
  bool find_range(uint64_t address, uint64_t bytes, Range& range);
  const Allocation& allocation_at(const Granule& granule) const { return memory_.allocation(granule.slot_plus_one - 1); }
  uint64_t granules_of(const Granule& granule) const { return allocation_at(granule).bytes / granularity_; }
  bool covers_whole_mappings(const Range& range) const;
  enum class Way { kNone, kLend, kMap };  // how a mapping gets its access
  struct Run {                            // mappings of one way that are neighbours in physical memory
    Way way = Way::kNone;
    const Granule* first = nullptr;
    const Granule* last = nullptr;
    uint64_t address = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };
  Way way_to(const Granule& granule, CUmemAccess_flags access) const;
  Run next_run(const Granule* first, const Granule* last, uint64_t address, CUmemAccess_flags access) const;
  bool apply(const Run& run, CUmemAccess_flags access);
  void bring_home(const Granule* first, const Granule* last, uint64_t address);
  void restore(const Granule* first, const Granule* last, uint64_t address);
  bool map_pages(uint64_t address, uint64_t bytes, uint64_t offset, CUmemAccess_flags access);
  bool map_nothing(uint64_t address, uint64_t bytes);

  PhysicalMemory& memory_;
  const uint64_t granularity_;
  std::map<uint64_t, Reservation> reservations_;  // by address
  uint64_t mappings_ = 0;
  SpareMappings spare_;
};

}  // namespace ooc::emulated
