// A file without a name in a folder of the user's: the bytes of variables that are on no device and in no memory. It goes
// with the process, however that ends. Offsets and lengths are whole pages and memory begins at one, as direct I/O wants
// it; where the file system refuses direct I/O, the page cache is used, and emptied behind every call.
//
// Any thread may call anything, if no two touch the same bytes at once.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace ooc {

class DiskFile {
 public:
  static constexpr uint64_t kPage = 4096;
  static uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  // With `checked`, a checksum of every page that is written is kept, and compared when the page is read. Throws
  // std::runtime_error if no file can be made in the folder: the message says why.
  DiskFile(const char* folder, uint64_t bytes, bool checked);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  // The folder's file system keeps room for these bytes, so that writing them does not fail for want of it. Returns
  // false if it has none.
  [[nodiscard]] bool reserve(uint64_t offset, uint64_t bytes);
  // Return 0 when all bytes have moved, else the number of an error (errno); kDiffers where what was read is not what was
  // written.
  int write(const char* from, uint64_t bytes, uint64_t offset);
  int read(char* to, uint64_t bytes, uint64_t offset);
  static constexpr int kDiffers = -1;

  // The bytes of the file are memory at an address, until end_view(). What is written there is in the file, and has no
  // checksum. Return false if the system refuses.
  [[nodiscard]] bool view(char* address, uint64_t bytes, uint64_t offset);
  [[nodiscard]] bool end_view(char* address, uint64_t bytes, uint64_t offset);
  // A copy of the file's bytes that is memory at an address of the system's choice, and nobody else's. The file's own
  // memory is not taken: the system reads what is touched. Null if it refuses.
  char* private_view(uint64_t bytes, uint64_t offset) const;
  // Whether memory holds what was last written to the page; true where nobody knows.
  bool agrees(const char* memory, uint64_t bytes, uint64_t offset) const;

  const std::string& folder() const { return folder_; }
  bool direct() const { return direct_; }
  uint64_t read_bytes() const { return read_bytes_; }
  uint64_t written_bytes() const { return written_bytes_; }
  uint64_t failures() const { return failures_; }
  // "writing 2097152 bytes to a file in /scratch failed: No space left on device"; empty before the first one.
  std::string last_failure() const;

 private:
  enum class Way { kRead, kWrite };
  int move(Way way, char* memory, uint64_t bytes, uint64_t offset);
  int attempt(Way way, char* memory, uint64_t bytes, uint64_t offset, uint64_t& done);
  int note(const char* what, uint64_t bytes, int error) noexcept;
  void go_through_cache();
  void empty_cache(Way way, uint64_t bytes, uint64_t offset) const;

  const std::string folder_;
  int file_ = -1;
  std::atomic<bool> direct_{true};
  std::mutex cache_mutex_;  // held while direct I/O is given up
  std::unique_ptr<uint32_t[]> checksums_;  // [pages] of what was written; 0: not known
  std::atomic<uint64_t> read_bytes_{0}, written_bytes_{0}, failures_{0};
  struct Failure {
    const char* what = nullptr;
    uint64_t bytes = 0;
    int error = 0;
  };
  mutable std::mutex failure_mutex_;
  Failure last_;
};

}  // namespace ooc
