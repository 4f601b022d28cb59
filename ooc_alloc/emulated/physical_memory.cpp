#include "physical_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>

namespace ooc::emulated {
namespace {

// The file is longer than the device, and sparse: a device has no physical fragmentation (its page tables see to that),
// so an extent must be found whenever enough bytes are free. Only bytes in use count. Device memory has two zones, each
// this many times as long as the device.
constexpr uint64_t kZonePerDevice = 4;
constexpr uint64_t kHostZones = 4;  // length of the zone for host memory, in lengths of one of the two

constexpr uint64_t kPageTableBytes = 2 << 20;  // what one page of a page table maps
constexpr size_t kPoisonBytes = 256 << 10;

// Newer than some of the headers that this is compiled with.
constexpr int kMremapDontUnmap = 4;      // Linux 5.13 for shared mappings
constexpr int kMadvPopulateWrite = 23;   // Linux 5.14

// The length of one zone, so that the second starts aligned.
uint64_t zone_bytes(uint64_t device_bytes) {
  return (device_bytes * kZonePerDevice + kPageTableBytes - 1) / kPageTableBytes * kPageTableBytes;
}

}  // namespace

bool FreeExtents::take(uint64_t bytes, uint64_t& offset) {
  const auto found = by_size_.lower_bound({bytes, 0});
  if (found == by_size_.end()) return false;
  const auto [extent_bytes, extent_offset] = *found;
  by_size_.erase(found);
  by_offset_.erase(extent_offset);
  if (extent_bytes > bytes) {
    by_offset_.emplace(extent_offset + bytes, extent_bytes - bytes);
    by_size_.emplace(extent_bytes - bytes, extent_offset + bytes);
  }
  offset = extent_offset;
  return true;
}

void FreeExtents::give(uint64_t offset, uint64_t bytes) {
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && offset + bytes == next->first) {
    bytes += next->second;
    by_size_.erase({next->second, next->first});
    next = by_offset_.erase(next);
  }
  if (next != by_offset_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      by_size_.erase({previous->second, previous->first});
      by_offset_.erase(previous);
    }
  }
  by_offset_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

PhysicalMemory::PhysicalMemory(uint64_t device_bytes)
    : device_bytes_(device_bytes),
      aligned_free_(0, zone_bytes(device_bytes)),
      other_free_(zone_bytes(device_bytes), zone_bytes(device_bytes)),
      host_free_(2 * zone_bytes(device_bytes), kHostZones * zone_bytes(device_bytes)) {
  file_ = memfd_create("ooc-emulated-device", MFD_CLOEXEC);
  if (file_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  if (ftruncate(file_, static_cast<off_t>((2 + kHostZones) * zone_bytes(device_bytes))) != 0) {
    const int error = errno;
    close(file_);
    throw std::system_error(error, std::generic_category(), "ftruncate of the memfd");
  }
  map_home();
}

PhysicalMemory::~PhysicalMemory() {
  if (home_ != nullptr) munmap(home_, 2 * zone_bytes(device_bytes_));
  close(file_);
}

// Without a home (no room for it in the address space) everything takes the slow way.
void PhysicalMemory::map_home() {
  const uint64_t bytes = 2 * zone_bytes(device_bytes_);
  constexpr int kNowhere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* room = mmap(nullptr, bytes + kPageTableBytes, PROT_NONE, kNowhere, -1, 0);
  if (room == MAP_FAILED) return;
  const uint64_t start = reinterpret_cast<uint64_t>(room);
  const uint64_t aligned = (start + kPageTableBytes - 1) / kPageTableBytes * kPageTableBytes;
  void* home = mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file_, 0);
  if (home == MAP_FAILED) {
    munmap(room, bytes + kPageTableBytes);
    return;
  }
  if (aligned > start) munmap(room, aligned - start);
  if (start + kPageTableBytes > aligned) {
    munmap(static_cast<unsigned char*>(home) + bytes, start + kPageTableBytes - aligned);
  }
  home_ = static_cast<unsigned char*>(home);
}

bool PhysicalMemory::is_on_host(uint64_t offset) const { return offset >= 2 * zone_bytes(device_bytes_); }

FreeExtents& PhysicalMemory::zone_of(uint64_t bytes) {
  return bytes % kPageTableBytes == 0 ? aligned_free_ : other_free_;
}

bool PhysicalMemory::lend(uint64_t offset, uint64_t bytes, uint64_t address) const {
  return mremap(home_ + offset, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | kMremapDontUnmap,
                reinterpret_cast<void*>(address)) != MAP_FAILED;
}

bool PhysicalMemory::bring_home(uint64_t offset, uint64_t bytes, uint64_t address) const {
  return mremap(reinterpret_cast<void*>(address), bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | kMremapDontUnmap,
                home_ + offset) != MAP_FAILED;
}

bool PhysicalMemory::take(uint64_t bytes, bool on_host, uint64_t& offset) {
  if (on_host) {
    if (!host_free_.take(bytes, offset)) return false;
    host_bytes_ += bytes;
    return true;
  }
  if (bytes > device_bytes_ - used_bytes_ || !zone_of(bytes).take(bytes, offset)) return false;
  used_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return true;
}

// The memory is not left zero, as a program that relies on zeros would work here and fail on a device. The write also takes
// the pages now, so that a host without memory fails here, and not in a fault later.
bool PhysicalMemory::fill(uint64_t offset, uint64_t bytes) const {
  static const std::vector<unsigned char>& poison = *new std::vector<unsigned char>(kPoisonBytes, kPoison);
  for (uint64_t done = 0; done < bytes;) {
    const size_t part = static_cast<size_t>(std::min<uint64_t>(bytes - done, kPoisonBytes));
    const ssize_t written = pwrite(file_, poison.data(), part, static_cast<off_t>(offset + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<uint64_t>(written);
  }
  // This puts the pages into the page tables at home. If it fails, page faults do that later.
  if (home_ != nullptr && !is_on_host(offset)) (void)madvise(home_ + offset, bytes, kMadvPopulateWrite);
  return true;
}

CUmemGenericAllocationHandle PhysicalMemory::publish(uint64_t offset, uint64_t bytes) {
  if (free_slots_.empty()) {
    slots_.emplace_back();
    free_slots_.reserve(slots_.size());  // so that freeing a slot never allocates
    free_slots_.push_back(static_cast<uint32_t>(slots_.size() - 1));
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  Allocation& allocation = slots_[slot];
  allocation.offset = offset;
  allocation.bytes = bytes;
  allocation.mappings = 0;
  allocation.lent_to = 0;
  allocation.has_handle = true;
  allocation.on_host = is_on_host(offset);
  allocation.generation += 1;  // a stale handle is not taken for a new one
  return (static_cast<uint64_t>(allocation.generation) << 32) | (slot + 1u);
}

void PhysicalMemory::give_back(uint64_t offset, uint64_t bytes) {
  // A failure leaves the pages taken, which costs memory only: they are written again before they are used again.
  (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
  if (is_on_host(offset)) {
    host_free_.give(offset, bytes);
    host_bytes_ -= bytes;
    return;
  }
  zone_of(bytes).give(offset, bytes);
  used_bytes_ -= bytes;
}

int64_t PhysicalMemory::find(CUmemGenericAllocationHandle handle) const {
  const uint64_t slot = (handle & 0xffffffffu) - 1;
  if (slot >= slots_.size()) return -1;
  const Allocation& allocation = slots_[slot];
  if (!allocation.has_handle || allocation.generation != handle >> 32) return -1;
  return static_cast<int64_t>(slot);
}

void PhysicalMemory::release(uint32_t slot) {
  slots_[slot].has_handle = false;
  destroy_if_unused(slot);
}

void PhysicalMemory::remove_mapping(uint32_t slot) {
  slots_[slot].mappings -= 1;
  destroy_if_unused(slot);
}

void PhysicalMemory::destroy_if_unused(uint32_t slot) {
  Allocation& allocation = slots_[slot];
  if (allocation.has_handle || allocation.mappings > 0) return;
  give_back(allocation.offset, allocation.bytes);
  allocation.bytes = 0;
  free_slots_.push_back(slot);
}

}  // namespace ooc::emulated
