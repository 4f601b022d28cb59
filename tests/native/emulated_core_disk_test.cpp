// Swapped data on a disk: where they are, what is said and what is kept when the disk fails, comes short, fills up, stalls
// or gives back other bytes.
//
// The system's calls are this file's own, so that each test says how they fail.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>

#include "core_fixture.h"
#include "disk_file.h"
#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

// What becomes of a call: 0 lets it through, an errno makes it fail, kShort moves a part of the bytes.
constexpr int kShort = -1, kSpoiled = -2;
std::function<int()> on_write, on_read, on_reserve;
std::function<int(int)> on_open;  // by flags
std::atomic<int> writes_made{0}, reads_made{0};
std::atomic<bool> slow_to_give_up{false}, given_up{false};  // direct I/O

struct Quiet {  // at the end of each test the disk is healthy
  ~Quiet() { on_write = on_read = on_reserve = nullptr; on_open = nullptr; }
};

ssize_t moved(long number, int file, void* memory, size_t bytes, off_t offset, int what) {
  if (what > 0) {
    errno = what;
    return -1;
  }
  if (what == kShort) bytes = bytes > 8192 ? 6000 : 0;  // in the middle of a page; and not at all
  const ssize_t result = bytes == 0 ? 0 : syscall(number, file, memory, what == kShort ? size_t{4096} : bytes, offset);
  if (what == kSpoiled && result > 0) static_cast<char*>(memory)[result / 2] ^= 1;
  return what == kShort && result > 0 ? 6000 : result;
}

std::function<int()> fails_times(int times, int how) {
  const auto left = std::make_shared<std::atomic<int>>(times);
  return [left, how] { return left->fetch_sub(1) > 0 ? how : 0; };
}
std::function<int()> always(int how) {
  return [how] { return how; };
}

struct Folder {
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "ooc-disk-test-XXXXXX";
    ASSERT_TRUE(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  bool empty() const { return std::filesystem::is_empty(path); }
  std::string path;
};

Limits limits_on(const std::string& folder, uint64_t disk_chunks = 64, bool strict = false, double wait_limit = 0) {
  Limits limits;
  limits.host_chunks = disk_chunks;
  limits.strict = strict;
  limits.disk = folder.c_str();
  limits.wait_limit = wait_limit;
  return limits;
}

struct OnDisk : Folder, CoreTest {
  explicit OnDisk(uint64_t disk_chunks = 64, bool strict = false, double wait_limit = 0)
      : CoreTest(limits_on(path, disk_chunks, strict, wait_limit)) {}
  void swap_out() {
    let_go();
    ASSERT_EQ(core.evict_all(), OOC_OK);
  }
  ooc_stats disk() {
    ooc_stats result;
    core.read_stats(&result);
    return result;
  }
  Quiet quiet;
};

}  // namespace

extern "C" ssize_t pwrite(int file, const void* memory, size_t bytes, off_t offset) {
  ++writes_made;
  return moved(SYS_pwrite64, file, const_cast<void*>(memory), bytes, offset, on_write ? on_write() : 0);
}
extern "C" ssize_t pread(int file, void* memory, size_t bytes, off_t offset) {
  ++reads_made;
  return moved(SYS_pread64, file, memory, bytes, offset, on_read ? on_read() : 0);
}
extern "C" int fcntl(int file, int command, ...) {
  va_list more;
  va_start(more, command);
  const long value = va_arg(more, long);
  va_end(more);
  if (command == F_SETFL && slow_to_give_up) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto result = static_cast<int>(syscall(SYS_fcntl, file, command, value));
  if (command == F_SETFL) given_up = true;
  return result;
}
extern "C" int fallocate(int file, int mode, off_t offset, off_t bytes) {
  errno = on_reserve ? on_reserve() : 0;
  return errno != 0 ? -1 : static_cast<int>(syscall(SYS_fallocate, file, mode, offset, bytes));
}
extern "C" int open(const char* path, int flags, ...) {
  errno = on_open ? on_open(flags) : 0;
  return errno != 0 ? -1 : static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, 0600));
}

TEST(what_does_not_fit_is_in_a_file_without_a_name_and_in_no_memory) {
  OnDisk t;
  std::vector<Variable> live = t.make_many(10, 3 * t.chunk - 10);
  t.swap_out();
  const ooc_stats s = t.disk();
  EXPECT_EQ(s.host_bytes + s.host_budget_bytes, uint64_t{0});
  EXPECT_EQ(s.disk_used_bytes, 10 * DiskFile::whole_pages(3 * t.chunk - 10));
  EXPECT_TRUE(s.disk_bytes >= s.disk_used_bytes && s.disk_bytes <= s.disk_budget_bytes);
  EXPECT_EQ(s.disk_written_bytes, s.disk_used_bytes);
  EXPECT_EQ(s.disk_read_bytes, uint64_t{0});
  EXPECT_TRUE(t.empty());
  t.expect_intact(live);
  EXPECT_TRUE(t.disk().disk_read_bytes >= 10 * (3 * t.chunk - 10));
  t.free(live);
  t.let_go();
  EXPECT_EQ(t.disk().disk_used_bytes, uint64_t{0});
}

TEST(a_folder_that_cannot_be_used_is_an_error_that_names_it) {
  const auto refused = [](const std::string& folder, const char* text) {
    std::string words;
    try {
      const Core core(make_config(limits_on(folder)));
    } catch (const std::runtime_error& error) {
      words = error.what();
    }
    if (!EXPECT_TRUE(contains(words, folder) && contains(words, text))) std::fprintf(stderr, "%s\n", words.c_str());
  };
  refused("/nowhere/at/all", "No such file or directory");
  const Quiet quiet;
  const Folder folder;
  on_open = [](int) { return EACCES; };
  refused(folder.path, "Permission denied");
  on_open = nullptr;
  ooc_config config = make_config(limits_on(folder.path));
  config.asynchronous = 1;
  std::string words;
  try {
    const Core core(config);
  } catch (const std::runtime_error& error) {
    words = error.what();
  }
  EXPECT_TRUE(contains(words, "set OOC_HOST_BUDGET"));
}

TEST(a_file_system_without_nameless_files_leaves_no_name_either) {
  const Quiet quiet;
  on_open = [](int flags) { return (flags & O_TMPFILE) == O_TMPFILE ? EOPNOTSUPP : 0; };
  OnDisk t;
  EXPECT_TRUE(t.empty());
  std::vector<Variable> live = t.make_many(10, 2 * t.chunk);
  t.expect_intact(live);
  EXPECT_TRUE(t.disk().disk_read_bytes > 0);
}

TEST(where_direct_io_is_refused_the_page_cache_serves) {
  const Quiet quiet;
  on_open = [](int flags) { return (flags & O_DIRECT) != 0 ? EINVAL : 0; };
  OnDisk at_once;
  std::vector<Variable> live = at_once.make_many(10, 2 * at_once.chunk - 5);
  at_once.expect_intact(live);
  on_open = nullptr;
  OnDisk later;
  on_write = fails_times(1, EINVAL);  // some say so only when something is written
  std::vector<Variable> others = later.make_many(10, 2 * later.chunk - 5);
  later.expect_intact(others);
  EXPECT_EQ(later.disk().disk_failure_count, uint64_t{0});
}

TEST(all_who_write_while_direct_io_is_given_up_wait_for_that) {
  const Quiet quiet;
  const Folder folder;
  DiskFile file(folder.path.c_str(), 1 << 20, false);
  given_up = false;
  on_write = [] { return given_up ? 0 : EINVAL; };
  slow_to_give_up = true;
  std::atomic<int> failed{0};
  const std::unique_ptr<char, decltype(&std::free)> page(static_cast<char*>(std::aligned_alloc(4096, 4096)), &std::free);
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] { failed += file.write(page.get(), 4096, i * 4096) != 0; });
  for (std::thread& thread : threads) thread.join();
  slow_to_give_up = false;
  EXPECT_EQ(failed.load(), 0);
  EXPECT_EQ(file.failures(), uint64_t{0});
}

TEST(a_call_that_fails_once_or_comes_short_is_made_again) {
  for (const int how : {EIO, EINTR, EAGAIN, kShort}) {
    OnDisk t;
    std::vector<Variable> live = t.make_many(10, 2 * t.chunk - 5);
    on_write = fails_times(2, how);
    t.update(live[0], 70);
    t.swap_out();
    on_read = fails_times(2, how);
    t.expect_intact(live);
  }
}

TEST(what_cannot_be_written_stays_and_the_error_says_why) {
  OnDisk t;
  std::vector<Variable> live = t.make_many(3, 2 * t.chunk);
  on_write = always(ENOSPC);
  const std::vector<ooc_operand> all = {{live[0].address, OOC_READ, 0, 0}};
  EXPECT_EQ(t.call("large", all, [&] { EXPECT_TRUE(t.core.malloc(4 * t.chunk) == nullptr); }), OOC_OK);
  EXPECT_EQ(last_status(), OOC_DRIVER_FAILURE);
  EXPECT_TRUE(contains(last_error(), t.path) && contains(last_error(), "No space left on device"));
  EXPECT_TRUE(t.disk().disk_failure_count > 0);
  t.expect_intact(live);
  on_write = nullptr;
  live.push_back(t.make(4 * t.chunk, 9));
  t.expect_intact(live);
}

TEST(space_is_reserved_before_it_is_counted_on) {
  OnDisk t;
  on_reserve = always(ENOSPC);
  std::vector<Variable> live = t.make_many(4, 2 * t.chunk);
  const int before = writes_made;
  EXPECT_EQ(t.call("large", {}, [&] { EXPECT_TRUE(t.core.malloc(4 * t.chunk) == nullptr); }), OOC_OK);
  EXPECT_TRUE(contains(last_error(), t.path) && contains(last_error(), "No space left on device"));
  EXPECT_EQ(writes_made.load(), before);
  on_reserve = nullptr;
  live.push_back(t.make(4 * t.chunk, 9));
  t.expect_intact(live);
}

TEST(a_disk_budget_that_is_used_up_is_an_error_that_says_so) {
  OnDisk t(8);
  std::vector<Variable> live = t.make_many(6, 2 * t.chunk);
  t.let_go();
  t.core.set_measuring(false);
  EXPECT_EQ(t.call("large", {}, [&] { EXPECT_TRUE(t.core.malloc(6 * t.chunk) == nullptr); }), OOC_OK);
  EXPECT_EQ(last_status(), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), "raise OOC_DISK_BUDGET"));
  t.expect_intact(live);
}

TEST(what_cannot_be_read_is_named_and_all_else_survives) {
  OnDisk t;
  std::vector<Variable> live = t.make_many(3, 2 * t.chunk);
  t.swap_out();
  on_read = always(EIO);
  EXPECT_EQ(t.check(live[1], "reader"), OOC_DRIVER_FAILURE);
  for (const char* part : {"131072 bytes", "function reader", "Input/output error", t.path.c_str()})
    if (!EXPECT_TRUE(contains(last_error(), part))) std::fprintf(stderr, "%s\n", last_error().c_str());
  EXPECT_EQ(t.core.audit(), OOC_OK);
  on_read = nullptr;
  t.expect_intact(live);  // this one too: the disk has its bytes after all
}

TEST(strict_mode_notices_other_bytes_than_were_written) {
  OnDisk t(64, true);
  std::vector<Variable> live = t.make_many(3, 2 * t.chunk - 5);
  t.swap_out();
  on_read = fails_times(1, kSpoiled);
  EXPECT_EQ(t.check(live[1]), OOC_OK);  // the second attempt reads what is there
  t.swap_out();
  on_read = always(kSpoiled);
  EXPECT_EQ(t.check(live[1]), OOC_DRIVER_FAILURE);
  EXPECT_TRUE(contains(last_error(), "they are not what was written"));
  on_read = nullptr;
  t.expect_intact(live);
}

TEST(strict_mode_notices_a_write_that_a_function_did_not_declare) {
  OnDisk t(64, true);
  Variable v = t.make(2 * t.chunk - 5, 1);
  t.let_go();
  ASSERT_EQ(t.check(v), OOC_OK);
  ASSERT_EQ(t.call("liar", {{v.address, OOC_READ, 0, 0}}, [&] {
    v.seed = 2;
    t.put(v);
  }), OOC_OK);
  EXPECT_EQ(t.call("next", {}), OOC_STRICT_VIOLATION);
  EXPECT_TRUE(contains(last_error(), "liar"));
  t.expect_intact({v});
}

TEST(a_disk_that_stalls_is_not_waited_for_without_end) {
  OnDisk t(64, false, 0.3);
  std::vector<Variable> live = t.make_many(4, 2 * t.chunk);
  std::atomic<bool> stalls{true};
  on_write = [&stalls] {
    while (stalls) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  };
  EXPECT_EQ(t.call("large", {}, [&] { EXPECT_TRUE(t.core.malloc(4 * t.chunk) == nullptr); }), OOC_OK);
  EXPECT_TRUE(contains(last_error(), "did not end a transfer") && contains(last_error(), t.path));
  EXPECT_EQ(t.core.detach(), OOC_DRIVER_FAILURE);  // the disk may still read what would be given away
  stalls = false;
  for (int i = 0; i < 1000 && t.core.synchronize() != OOC_OK; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  t.expect_intact(live);
  live.push_back(t.make(4 * t.chunk, 9));
  t.expect_intact(live);
}

// In strict mode too: of what a function writes in place nobody makes a checksum.
TEST(a_function_larger_than_the_budget_uses_the_file_in_place) {
  for (const bool strict : {false, true}) {
    OnDisk t(64, strict);
    Variable large{t.core.malloc_absent(20 * t.chunk), 20 * t.chunk, 7};
    const auto on_host = [&](uint32_t access, const std::function<void(char*)>& body) {
      const ooc_operand operand{large.address, access, 0, 0};
      ASSERT_EQ(t.core.function_begin_host(t.id("in place"), &operand, 1), OOC_OK);
      body(static_cast<char*>(large.address));
      ASSERT_EQ(t.core.function_end(false), OOC_OK);
    };
    std::vector<Variable> others = t.make_many(6, 2 * t.chunk);
    for (const unsigned seed : {7u, 8u}) {  // the second time there are checksums of what is overwritten
      const Bytes contents = pattern(large.bytes, seed);
      t.swap_out();
      on_host(OOC_WRITE, [&](char* bytes) { std::memcpy(bytes, contents.data(), contents.size()); });
      for (uint64_t i = 0; i < 5; ++i) {  // in parts that come and go
        char* start = static_cast<char*>(large.address) + i * 4 * t.chunk;
        ASSERT_EQ(t.call("part", {{start, OOC_READ | OOC_WRITE, 0, 4 * t.chunk}}, [&] {
          EXPECT_TRUE(std::memcmp(start, contents.data() + i * 4 * t.chunk, 4 * t.chunk) == 0);
        }), OOC_OK);
      }
      t.expect_intact(others);
      on_host(OOC_READ, [&](const char* bytes) { EXPECT_TRUE(std::memcmp(bytes, contents.data(), contents.size()) == 0); });
    }
    EXPECT_EQ(t.core.audit(), OOC_OK);
  }
}
