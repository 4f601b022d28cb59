// A few of the kernel's mappings, held back for the moment when there are no more of them.
//
// The kernel limits the mappings of a process (vm.max_map_count). At the limit no mmap succeeds, not even the one that would
// merge mappings and so lead out of it. Releasing the spare ones first makes room for that one.
#pragma once

namespace ooc::emulated {

class SpareMappings {
 public:
  SpareMappings() { take(); }
  ~SpareMappings() { release(); }
  SpareMappings(const SpareMappings&) = delete;
  SpareMappings& operator=(const SpareMappings&) = delete;

  void take();     // if they are not held; at the limit it is left for later
  bool release();  // false if they were not held

 private:
  void* pages_ = nullptr;
};

}  // namespace ooc::emulated
