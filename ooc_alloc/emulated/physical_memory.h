// The physical memory of the emulated device: extents of a file in memory, handed out up to the device's size.
//
// The file lies on a tmpfs of its own, mounted nowhere, where the kernel keeps it in large pages: mapping and unmapping a
// chunk of 128 KiB then takes half the time. Within the file's length they are huge ones, of 2 MiB, which suits chunks of
// that size; in smaller chunks they slow functions down by 2 to 4%. So smaller chunks lie behind the file's first end, which
// moves on as they are taken, by 128 KiB or a longer chunk at once: no page is longer than such a step, unless the memory of
// several was given back together and is taken again (older kernels give small pages then). Where mounting needs a right that
// this process lacks, the file is a memfd. Host memory always is one: the first use of new huge pages takes long, and it is
// much memory that is mapped once.
//
// Not thread-safe, except fill(): its owner (device.h) holds a lock.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <vector>

#include "cuda_abi.h"
#include "free_extents.h"

namespace ooc::emulated {

constexpr uint64_t kPageTableBytes = 2 << 20;  // what one page of a page table maps

// One physical allocation. It lives until its handle is released and its last mapping is gone.
struct Allocation {
  uint64_t offset = 0;
  uint64_t bytes = 0;  // 0: the slot is free
  uint32_t generation = 0;
  uint32_t mappings = 0;
  bool has_handle = false;
  bool on_host = false;  // host memory: counts apart
};

class PhysicalMemory {
 public:
  static constexpr unsigned char kPoison = 0xdb;

  // Throws std::system_error when the kernel gives no file in memory.
  explicit PhysicalMemory(uint64_t device_bytes)
      : device_bytes_(device_bytes),
        aligned_free_(0, zone_bytes(device_bytes)),
        other_free_(zone_bytes(device_bytes), zone_bytes(device_bytes)),
        host_free_(2 * zone_bytes(device_bytes) + kPageTableBytes, kHostZones * zone_bytes(device_bytes)) {
    file_ = file_in_large_pages();
    host_file_ = memfd_create(kName, MFD_CLOEXEC);
    if (file_ < 0) file_ = host_file_;
    const auto bytes = static_cast<off_t>((2 + kHostZones) * zone_bytes(device_bytes) + kPageTableBytes);
    length_ = zone_bytes(device_bytes);
    if (host_file_ < 0 || ftruncate(file_, static_cast<off_t>(length_)) != 0 || ftruncate(host_file_, bytes) != 0) {
      const int error = errno;
      close_files();
      throw std::system_error(error, std::generic_category(), "the emulated device's memory");
    }
  }
  ~PhysicalMemory() { close_files(); }
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  // Memory is created in three steps, so that the slow second one needs no lock: take an extent (false if that is beyond the
  // device's size), fill it with poison (false if the host has no memory), and then publish it with a handle or give it back.
  bool take(uint64_t bytes, bool on_host, uint64_t& offset) {
    if (!on_host && bytes > device_bytes_ - used_bytes_) return false;
    offset = (on_host ? host_free_ : zone_of(bytes)).take_smallest(bytes);
    if (offset == FreeExtents::kNone) return false;
    if (on_host) {
      host_bytes_ += bytes;
      return true;
    }
    used_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    lengthen(offset + bytes);
    return true;
  }
  // The memory is not left zero, as a program that relies on zeros would work here and fail on a device. The write also takes
  // the pages now, so that a host without memory fails here, and not in a fault later.
  bool fill(uint64_t offset, uint64_t bytes) const {
    static const std::vector<unsigned char>& poison = *new std::vector<unsigned char>(kPoisonBytes, kPoison);
    for (uint64_t done = 0; done < bytes;) {
      const size_t part = static_cast<size_t>(std::min<uint64_t>(bytes - done, kPoisonBytes));
      const ssize_t written = pwrite(file(offset), poison.data(), part, static_cast<off_t>(offset + done));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      done += static_cast<uint64_t>(written);
    }
    return true;
  }
  CUmemGenericAllocationHandle publish(uint64_t offset, uint64_t bytes) {
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
    allocation.has_handle = true;
    allocation.on_host = is_on_host(offset);
    allocation.generation += 1;  // a stale handle is not taken for a new one
    return (static_cast<uint64_t>(allocation.generation) << 32) | (slot + 1u);
  }
  void give_back(uint64_t offset, uint64_t bytes) {
    // A failure leaves the pages taken, which costs memory only: they are written again before they are used again.
    (void)fallocate(file(offset), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                    static_cast<off_t>(bytes));
    if (is_on_host(offset)) {
      host_free_.give(offset, bytes);
      host_bytes_ -= bytes;
      return;
    }
    zone_of(bytes).give(offset, bytes);
    used_bytes_ -= bytes;
  }

  // The slot of a handle that has not been released, or -1.
  int64_t find(CUmemGenericAllocationHandle handle) const {
    const uint64_t slot = (handle & 0xffffffffu) - 1;
    if (slot >= slots_.size()) return -1;
    const Allocation& allocation = slots_[slot];
    if (!allocation.has_handle || allocation.generation != handle >> 32) return -1;
    return static_cast<int64_t>(slot);
  }
  void release(uint32_t slot) {
    slots_[slot].has_handle = false;
    destroy_if_unused(slot);
  }
  void add_mapping(uint32_t slot) { slots_[slot].mappings += 1; }
  void remove_mapping(uint32_t slot) {
    slots_[slot].mappings -= 1;
    destroy_if_unused(slot);
  }
  const Allocation& allocation(uint32_t slot) const { return slots_[slot]; }

  // Where an extent lies, at its own offset.
  int file(uint64_t offset) const { return is_on_host(offset) ? host_file_ : file_; }
  uint64_t device_bytes() const { return device_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }
  uint64_t host_bytes() const { return host_bytes_; }
  uint64_t allocations() const { return slots_.size() - free_slots_.size(); }
  void reset_peak() { peak_bytes_ = used_bytes_; }

 private:
  // The file is longer than the device, and sparse: a device has no physical fragmentation (its page tables see to
  // that), so an extent must be found whenever enough bytes are free. Only bytes in use count. Device memory has two
  // zones, each this many times as long as the device.
  static constexpr uint64_t kZonePerDevice = 4;
  static constexpr uint64_t kHostZones = 4;  // length of the zone for host memory, in lengths of one of the two
  static constexpr size_t kPoisonBytes = 256 << 10;
  static constexpr uint64_t kLeastStep = 128 << 10;  // by which the file becomes longer
  static constexpr const char* kName = "ooc-emulated-device";

  // Newer than some of the headers that this is compiled with.
  static constexpr long kSysFsopen = 430, kSysFsconfig = 431, kSysFsmount = 432;  // Linux 5.2, on every architecture
  static constexpr unsigned kFsCloexec = 1, kFsSetString = 1, kFsCreate = 6;      // the first for fsopen and fsmount

  // The length of one zone, so that the second starts aligned.
  static uint64_t zone_bytes(uint64_t device_bytes) {
    return (device_bytes * kZonePerDevice + kPageTableBytes - 1) / kPageTableBytes * kPageTableBytes;
  }
  // Should this fail, the write that follows makes the file longer, in smaller pages.
  void lengthen(uint64_t end) {
    if (file_ == host_file_ || end <= length_) return;
    length_ = (end + kLeastStep - 1) / kLeastStep * kLeastStep;
    if (ftruncate(file_, static_cast<off_t>(length_)) != 0) length_ = end;
  }
  void close_files() const {
    if (file_ >= 0) close(file_);
    if (host_file_ >= 0 && host_file_ != file_) close(host_file_);
  }
  // -1 without the right to mount (CAP_SYS_ADMIN), or on a kernel without huge pages for tmpfs.
  static int file_in_large_pages() {
    const int system = static_cast<int>(syscall(kSysFsopen, "tmpfs", kFsCloexec));
    if (system < 0) return -1;
    int mount = -1;
    if (syscall(kSysFsconfig, system, kFsSetString, "huge", "within_size", 0) == 0 &&
        syscall(kSysFsconfig, system, kFsSetString, "size", "0", 0) == 0 &&  // no limit but the host's
        syscall(kSysFsconfig, system, kFsCreate, nullptr, nullptr, 0) == 0) {
      mount = static_cast<int>(syscall(kSysFsmount, system, kFsCloexec, 0));
    }
    close(system);
    if (mount < 0) return -1;
    const int file = openat(mount, kName, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    close(mount);
    return file;
  }
  bool is_on_host(uint64_t offset) const { return offset >= 2 * zone_bytes(device_bytes_); }
  FreeExtents& zone_of(uint64_t bytes) {
    return bytes % kPageTableBytes == 0 ? aligned_free_ : other_free_;
  }
  void destroy_if_unused(uint32_t slot) {
    Allocation& allocation = slots_[slot];
    if (allocation.has_handle || allocation.mappings > 0) return;
    give_back(allocation.offset, allocation.bytes);
    allocation.bytes = 0;
    free_slots_.push_back(slot);
  }

  const uint64_t device_bytes_;
  uint64_t used_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
  uint64_t host_bytes_ = 0;
  // Of the file, from the start of the smallest extent that fits: chunks that are created one after another are neighbours
  // there, so that their mappings merge into one of the kernel's.
  FreeExtents aligned_free_;  // for sizes that are multiples of 2 MiB, so that their offsets are too: one entry maps a huge page
  FreeExtents other_free_;
  FreeExtents host_free_;     // behind the two and a gap, so that what lies in two files is no neighbour
  std::vector<Allocation> slots_;
  std::vector<uint32_t> free_slots_;
  uint64_t length_ = 0;  // of the first file
  int file_ = -1, host_file_ = -1;  // one, where there are no large pages
};

}  // namespace ooc::emulated
