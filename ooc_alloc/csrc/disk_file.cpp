#include "disk_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace ooc {
namespace {

constexpr int kAttempts = 3;  // a disk that fails now and then costs nothing but time

// Nothing of it is left in the folder, also by a process that is killed.
int open_nameless(const std::string& folder, int flags) {
  const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
  std::string name = folder + "/.ooc-XXXXXX";  // a file system that has no nameless files, or no such folder
  const int named = mkostemp(name.data(), O_CLOEXEC | flags);
  if (named >= 0) unlink(name.c_str());
  return named;
}

// CRC-32C (Castagnoli), a byte at a time: only strict mode pays for it.
uint32_t checksum(const char* bytes, uint64_t count) {
  static const auto table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0x82f63b78u : value >> 1;
      made[i] = value;
    }
    return made;
  }();
  uint32_t sum = ~uint32_t{0};
  for (uint64_t i = 0; i < count; ++i) sum = sum >> 8 ^ table[(sum ^ static_cast<unsigned char>(bytes[i])) & 0xff];
  return ~sum == 0 ? 1 : ~sum;  // 0 says that nothing is known
}

std::string words_of(int error) { return std::error_code(error, std::generic_category()).message(); }

}  // namespace

DiskFile::DiskFile(const char* folder, uint64_t bytes, bool checked) : folder_(folder) {
  file_ = open_nameless(folder_, O_DIRECT);
  if (file_ < 0 && errno == EINVAL) {
    file_ = open_nameless(folder_, 0);
    if (file_ >= 0) go_through_cache();
  }
  if (file_ < 0)
    throw std::runtime_error("no file for swapped data can be made in OOC_DISK=" + folder_ + ": " + words_of(errno) +
                             "; give a folder that exists and that this user may write to");
  if (checked) checksums_ = std::make_unique<uint32_t[]>(bytes / kPage + 1);
}

DiskFile::~DiskFile() { close(file_); }

bool DiskFile::reserve(uint64_t offset, uint64_t bytes) {
  int result = 0;
  do {
    result = fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno == EOPNOTSUPP) result = posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (result != 0) note("reserving", bytes, result > 0 ? result : errno);
  return result == 0;
}

int DiskFile::write(const char* from, uint64_t bytes, uint64_t offset) {
  if (checksums_)
    for (uint64_t at = 0; at < bytes; at += kPage) checksums_[(offset + at) / kPage] = checksum(from + at, kPage);
  return move(Way::kWrite, const_cast<char*>(from), bytes, offset);
}

int DiskFile::read(char* to, uint64_t bytes, uint64_t offset) {
  if (const int error = move(Way::kRead, to, bytes, offset)) return error;
  return agrees(to, bytes, offset) ? 0 : note("reading", bytes, kDiffers);
}

bool DiskFile::agrees(const char* memory, uint64_t bytes, uint64_t offset) const {
  if (!checksums_) return true;
  for (uint64_t at = 0; at < bytes; at += kPage) {
    const uint32_t known = checksums_[(offset + at) / kPage];
    if (known != 0 && known != checksum(memory + at, kPage)) return false;
  }
  return true;
}

int DiskFile::move(Way way, char* memory, uint64_t bytes, uint64_t offset) {
  int error = 0;
  uint64_t done = 0;
  for (int attempts = 0; attempts < kAttempts && done < bytes;) {
    const uint64_t before = done;
    error = attempt(way, memory, bytes, offset, done);
    if (error != 0 || done == before) {
      if (error == 0) error = EIO;  // the call came short, and says nothing
      note(way == Way::kWrite ? "writing" : "reading", bytes - done, error);
      ++attempts;
    }
  }
  if (done < bytes) return error;
  (way == Way::kWrite ? written_bytes_ : read_bytes_) += bytes;
  if (!direct_) empty_cache(way, bytes, offset);
  return 0;
}

// One call, which may move a part. Whole pages of it count.
int DiskFile::attempt(Way way, char* memory, uint64_t bytes, uint64_t offset, uint64_t& done) {
  const auto at = static_cast<off_t>(offset + done);
  const bool directly = direct_;  // as it was before the call: another thread may give it up meanwhile
  const ssize_t moved = way == Way::kWrite ? pwrite(file_, memory + done, bytes - done, at)
                                           : pread(file_, memory + done, bytes - done, at);
  if (moved >= 0) {
    done += static_cast<uint64_t>(moved) / kPage * kPage;
    return 0;
  }
  if (errno == EINTR) return attempt(way, memory, bytes, offset, done);
  if (errno != EINVAL || !directly) return errno;
  go_through_cache();
  return attempt(way, memory, bytes, offset, done);
}

// One thread does; the others wait until it is done, and make their calls again.
void DiskFile::go_through_cache() {
  const std::lock_guard<std::mutex> lock(cache_mutex_);
  if (!direct_) return;
  fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) & ~O_DIRECT);
  direct_ = false;
  std::fprintf(stderr, "ooc_alloc: the file system of %s refuses direct I/O: the page cache is used, which is slower\n",
               folder_.c_str());
}

void DiskFile::empty_cache(Way way, uint64_t bytes, uint64_t offset) const {
  const auto at = static_cast<off_t>(offset), length = static_cast<off_t>(bytes);
  if (way == Way::kWrite) (void)sync_file_range(file_, at, length, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  (void)posix_fadvise(file_, at, length, POSIX_FADV_DONTNEED);
}

// ---- the file as memory ---------------------------------------------------------------------------------------------

bool DiskFile::view(char* address, uint64_t bytes, uint64_t offset) {
  if (checksums_) std::memset(&checksums_[offset / kPage], 0, whole_pages(bytes) / kPage * sizeof checksums_[0]);
  return mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, static_cast<off_t>(offset)) !=
         MAP_FAILED;
}

bool DiskFile::end_view(char* address, uint64_t bytes, uint64_t offset) {
  (void)msync(address, bytes, MS_SYNC);
  constexpr int kNowhere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(address, bytes, PROT_NONE, kNowhere, -1, 0) == MAP_FAILED) return false;
  (void)posix_fadvise(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  return true;
}

char* DiskFile::private_view(uint64_t bytes, uint64_t offset) const {
  void* view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_, static_cast<off_t>(offset));
  return view == MAP_FAILED ? nullptr : static_cast<char*>(view);
}

// ---- words ----------------------------------------------------------------------------------------------------------

// The words are made when somebody asks: there may be no memory for them now.
int DiskFile::note(const char* what, uint64_t bytes, int error) noexcept {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  last_ = {what, bytes, error};
  ++failures_;
  return error;
}

std::string DiskFile::last_failure() const {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (last_.what == nullptr) return "";
  return std::string(last_.what) + " " + std::to_string(last_.bytes) + " bytes of the file in " + folder_ + " failed: " +
         (last_.error == kDiffers ? "they are not what was written (checksum)" : words_of(last_.error));
}

}  // namespace ooc
