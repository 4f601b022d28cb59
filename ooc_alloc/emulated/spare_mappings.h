// A few mappings of this process, held back for the moment when the kernel gives it no more.
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

  void take();     // does nothing if they are held, or if the limit leaves no room
  bool release();  // false if they were not held

 private:
  void* pages_ = nullptr;
};

}  // namespace ooc::emulated
