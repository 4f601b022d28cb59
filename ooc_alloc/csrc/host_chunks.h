// Host memory made of physical chunks of the driver's, one after another in a range of addresses that the host and the
// device can use. A chunk of it can be mapped at a second address (docs/decisions/0004-host-backed-memory.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"

namespace ooc {

class HostChunks {
 public:
  // Throws std::runtime_error if the driver cannot do that, or has no addresses.
  HostChunks(const Driver& driver, CUdevice device, uint64_t bytes, uint64_t chunk_bytes);
  ~HostChunks();
  HostChunks(const HostChunks&) = delete;
  HostChunks& operator=(const HostChunks&) = delete;

  char* base() const { return base_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  // Backs the next bytes (whole chunks) of the range. Returns false if there is no memory; then nothing has changed.
  bool extend(uint64_t bytes);
  // Of the chunk at an address that is backed.
  CUmemGenericAllocationHandle handle(const char* address) const {
    return handles_[static_cast<uint64_t>(address - base_) / chunk_bytes_];
  }

 private:
  void shrink(size_t chunks);
  CUdeviceptr at(size_t chunk) const { return reinterpret_cast<CUdeviceptr>(base_) + chunk * chunk_bytes_; }

  const Driver& driver_;
  uint64_t bytes_, chunk_bytes_;
  char* base_ = nullptr;
  CUmemAllocationProp properties_{};
  CUmemAccessDesc access_[2]{};  // the device and the host
  std::vector<CUmemGenericAllocationHandle> handles_;
};

}  // namespace ooc
