// Functions on host memory: what is not on the device is used where it is, through the variable's own address. The host
// stands for kernels, so bytes are read and written there directly.
#include <cstring>
#include <thread>

#include "emulated_fixture.h"
#include "pinned.h"
#include "ranges_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

constexpr uint64_t kBudget = 8;

struct HostFunctionsTest : RangesTest {
  explicit HostFunctionsTest(bool asynchronous = false, uint64_t small_limit = 0)
      : RangesTest(limits(asynchronous, small_limit)) {}
  explicit HostFunctionsTest(const Limits& all) : RangesTest(all) {}
  static Limits limits(bool asynchronous, uint64_t small_limit) {
    Limits all;
    all.small_limit = small_limit;
    all.budget_chunks = kBudget;
    all.host_chunks = 200;
    all.asynchronous = asynchronous;
    return all;
  }

  int begin_host(const std::vector<ooc_operand>& operands, CUstream stream = nullptr) {
    try {
      return core.function_begin_host(id("on the host"), operands.data(), static_cast<uint32_t>(operands.size()), stream);
    } catch (const std::runtime_error& error) {  // as in capi.cpp
      set_last_error(error.what());
      return OOC_INVALID;
    }
  }
  static void put_plain(Array& array, uint64_t offset, uint64_t bytes, unsigned seed) {
    const Bytes fresh = pattern(bytes, seed);
    std::memcpy(array.at(offset), fresh.data(), bytes);
    std::copy(fresh.begin(), fresh.end(), array.bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    std::fill_n(array.known.begin() + static_cast<std::ptrdiff_t>(offset), bytes, true);
  }
  static bool plain_holds(const Array& array) {
    for (uint64_t i = 0; i < array.bytes.size(); ++i)
      if (array.known[i] && static_cast<unsigned char>(*array.at(i)) != array.bytes[i]) return false;
    return true;
  }
};

}  // namespace

TEST(a_function_larger_than_the_budget_reads_and_writes_in_place) {
  for (const bool asynchronous : {false, true}) {
    HostFunctionsTest t(asynchronous);
    Array a = t.make_absent(20 * t.chunk - 9), b = t.make_absent(12 * t.chunk);
    t.write_all(a, 3 * t.chunk, 1);
    t.let_go();
    const ooc_stats before = t.stats();
    ASSERT_EQ(t.begin_host({a.whole(OOC_READ), b.whole(OOC_WRITE)}), OOC_OK);  // b is blank
    EXPECT_EQ(t.core.audit(), OOC_OK);
    EXPECT_TRUE(t.plain_holds(a));
    t.put_plain(b, 0, b.bytes.size(), 77);
    ASSERT_EQ(t.core.function_end(false), OOC_OK);
    const ooc_stats after = t.stats();
    EXPECT_EQ(after.host_backed_function_count, uint64_t{1});
    EXPECT_EQ(after.swap_in_bytes + after.swap_out_bytes, before.swap_in_bytes + before.swap_out_bytes);
    EXPECT_EQ(after.device_bytes, before.device_bytes);
    EXPECT_EQ(after.host_used_bytes, (20 + 12) * t.chunk);
    EXPECT_TRUE(after.host_bytes >= after.host_used_bytes && after.host_bytes <= after.host_budget_bytes);
    EXPECT_TRUE(t.plain_holds(a) && t.plain_holds(b));  // until the next function, and longer
    EXPECT_EQ(t.core.audit(), OOC_OK);
    t.check_all(b, 2 * t.chunk);  // comes in, as ever
    t.check_all(a, 5 * t.chunk);
    EXPECT_EQ(t.core.audit(), OOC_OK);
    t.write_all(b, 4 * t.chunk, 3);
    t.swap_out();
    t.check_all(b, t.chunk);
  }
}

// What it enqueues uses addresses that lead elsewhere later, so its end waits for that.
TEST(where_functions_run_on_streams_its_end_is_the_end_of_its_work) {
  HostFunctionsTest t(true);
  const Stream main;
  Array a = t.make_absent(12 * t.chunk);
  t.write_all(a, 3 * t.chunk, 1);
  const Pinned copied(a.bytes.size());
  ASSERT_EQ(t.begin_host({a.whole(OOC_READ)}, main.handle), OOC_OK);
  Gate gate;
  gate.close_on(main);
  EXPECT_OK(driver().cuMemcpyDtoHAsync(copied.data, a.pointer(0), copied.bytes, main.handle));
  std::thread opener([&] {
    t.core.device().bind_thread();
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    gate.open();
  });
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_TRUE(copied.contents() == a.bytes);
  opener.join();
  EXPECT_OK(driver().cuStreamSynchronize(main.handle));
}

TEST(chunks_on_the_device_are_used_there_and_stay) {
  HostFunctionsTest t;
  Array a = t.make_absent(12 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.swap_out();
  ASSERT_EQ(t.check_range(a, 2 * t.chunk, 3 * t.chunk), OOC_OK);
  t.let_go();
  ASSERT_EQ(t.begin_host({a.whole(OOC_READ | OOC_WRITE)}), OOC_OK);
  EXPECT_EQ(t.stats().pinned_bytes, 3 * t.chunk);
  EXPECT_EQ(t.core.evict_all(), OOC_OK);
  EXPECT_EQ(t.there(a), std::string("001110000000"));
  EXPECT_TRUE(t.plain_holds(a));
  t.put_plain(a, 0, a.bytes.size(), 5);  // partly on the device, partly not
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  const ooc_stats before = t.stats();
  t.swap_out();
  EXPECT_EQ(t.stats().swap_out_bytes - before.swap_out_bytes, 3 * t.chunk);  // its writes there were not lost
  t.check_all(a, 4 * t.chunk);
}

TEST(a_small_variable_is_had_though_operands_take_the_whole_device) {
  HostFunctionsTest t(false, 1024);
  Array a = t.make_absent(12 * t.chunk);
  t.write_all(a, t.chunk, 1);
  ASSERT_EQ(t.check_range(a, 0, kBudget * t.chunk), OOC_OK);
  t.let_go();
  ASSERT_EQ(t.begin_host({a.whole(OOC_READ)}), OOC_OK);
  ASSERT_EQ(t.stats().pinned_bytes, kBudget * t.chunk);
  auto* small = static_cast<char*>(t.core.malloc(256));
  ASSERT_TRUE(small != nullptr);
  std::memset(small, 3, 256);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  EXPECT_TRUE(t.plain_holds(a));
  EXPECT_EQ(small[255], 3);
  EXPECT_EQ(t.core.audit(), OOC_OK);
  t.core.free(small);
  EXPECT_EQ(t.core.audit(), OOC_OK);
}

TEST(a_clean_chunk_is_dropped_without_loss_though_its_host_copy_has_moved) {
  HostFunctionsTest t;
  Array a = t.make_absent(12 * t.chunk);
  t.write_all(a, t.chunk, 1);
  t.swap_out();
  ASSERT_EQ(t.check_range(a, 2 * t.chunk, 3 * t.chunk), OOC_OK);  // clean from now on
  ASSERT_EQ(t.begin_host({a.whole(OOC_READ)}), OOC_OK);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  const ooc_stats before = t.stats();
  t.swap_out();
  EXPECT_EQ(t.stats().swap_out_bytes, before.swap_out_bytes);
  EXPECT_EQ(t.stats().clean_drop_bytes - before.clean_drop_bytes, 3 * t.chunk);
  t.check_all(a, 4 * t.chunk);
}

TEST(what_it_allocates_is_on_the_device_where_it_fits_and_else_beside_it) {
  for (const bool asynchronous : {false, true}) {
    HostFunctionsTest t(asynchronous);
    Array a = t.make_absent(20 * t.chunk);
    t.write_all(a, 4 * t.chunk, 1);
    t.let_go();
    ASSERT_EQ(t.core.evict_all(), OOC_OK);
    ASSERT_EQ(t.begin_host({a.whole(OOC_READ)}), OOC_OK);
    Array fits{t.must_malloc(6 * t.chunk), Bytes(6 * t.chunk), std::vector<bool>(6 * t.chunk)};
    Array large{t.must_malloc(11 * t.chunk), Bytes(11 * t.chunk), std::vector<bool>(11 * t.chunk)};
    void* workspace = t.must_malloc(9 * t.chunk);
    EXPECT_TRUE(t.owns(large.address) && t.owns(workspace));
    EXPECT_EQ(t.there(large), std::string(11, '0'));
    EXPECT_EQ(t.there(fits), std::string(6, '1'));
    EXPECT_EQ(t.stats().pinned_bytes, 6 * t.chunk);
    std::memset(workspace, 1, 9 * t.chunk);
    t.core.free(workspace);
    t.put_plain(fits, 0, fits.bytes.size(), 2);
    t.put_plain(large, 0, large.bytes.size(), 3);
    EXPECT_EQ(t.core.audit(), OOC_OK);
    ASSERT_EQ(t.core.function_end(false), OOC_OK);
    EXPECT_EQ(t.there(large), std::string(11, '0'));
    EXPECT_TRUE(t.stats().device_bytes <= kBudget * t.chunk);
    t.check_all(large, 3 * t.chunk);
    t.check_all(fits, 6 * t.chunk);
    t.check_all(a, 7 * t.chunk);
    t.core.free(large.address);
    t.core.free(fits.address);
    t.core.free(a.address);
    EXPECT_EQ(t.stats().host_used_bytes, uint64_t{0});
    EXPECT_EQ(t.stats().live_bytes, uint64_t{0});
  }
}

TEST(nobody_brings_in_what_a_function_uses_on_the_host) {
  HostFunctionsTest t;
  Array a = t.make_absent(12 * t.chunk);
  t.write_all(a, 3 * t.chunk, 1);
  t.swap_out();
  ASSERT_EQ(t.begin_host({a.range(0, 10 * t.chunk, OOC_READ | OOC_WRITE)}), OOC_OK);
  EXPECT_EQ(t.core.pin(a.address, OOC_READ, nullptr), OOC_OK);  // does not wait for itself
  std::atomic<bool> read{false};
  std::thread other([&] {
    t.core.device().bind_thread();
    EXPECT_EQ(t.check_range(a, 10 * t.chunk, 2 * t.chunk), OOC_OK);  // not of the function's
    EXPECT_EQ(t.check_range(a, 0, 4 * t.chunk), OOC_OK);             // waits for its end
    read = true;
  });
  for (int i = 0; i < 20 && t.there(a) != "000000000011"; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(!read);
  t.put_plain(a, 0, 10 * t.chunk, 8);
  ASSERT_EQ(t.core.function_end(false), OOC_OK);  // its pins outlast it, and are let go when they are in the way
  other.join();
  EXPECT_TRUE(read);
  t.check_all(a, 3 * t.chunk);
}

TEST(failures_say_what_to_do_and_leave_everything_as_it_was) {
  if (test_disk() != nullptr) return;  // no call of the driver's: emulated_core_disk_test.cpp has the system's
  HostFunctionsTest t;
  Array a = t.make_absent(kBudget * t.chunk);  // of what is larger the memory was had before
  t.write_all(a, 3 * t.chunk, 1);
  t.swap_out();
  const auto refused = [&](const char* rules, const char* text, int status) {
    ASSERT_EQ(control().inject_faults(rules), 0);
    EXPECT_EQ(t.begin_host({a.whole(OOC_READ)}), status);
    control().clear_faults();
    if (!EXPECT_TRUE(contains(last_error(), text))) std::fprintf(stderr, "%s\n", last_error().c_str());
    EXPECT_TRUE(!t.core.in_function());
    EXPECT_EQ(t.core.audit(), OOC_OK);
    EXPECT_EQ(t.stats().pinned_bytes, uint64_t{0});
  };
  refused("cuDeviceGetAttribute", "needs a driver that makes physical host memory", OOC_INVALID);
  refused("cuMemCreate", "the system has no more host memory", OOC_OUT_OF_MEMORY);
  refused("cuMemMap:after=13", "did not map host memory", OOC_DRIVER_FAILURE);
  EXPECT_EQ(t.stats().host_backed_function_count, uint64_t{0});
  ASSERT_EQ(t.begin_host({a.whole(OOC_READ)}), OOC_OK);
  EXPECT_EQ(t.begin_host({}), OOC_NESTED);
  EXPECT_TRUE(t.plain_holds(a));
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
  t.check_all(a, 2 * t.chunk);
}

TEST(host_memory_that_is_used_up_is_an_error_that_says_so) {
  Limits limits;
  limits.budget_chunks = 4;
  limits.host_chunks = 20;
  RangesTest t(limits);
  std::vector<Array> arrays;
  std::vector<ooc_operand> operands;
  for (unsigned i = 0; i < 4; ++i) {
    arrays.push_back(t.make_absent(4 * t.chunk));
    t.write_all(arrays.back(), 2 * t.chunk, i);
    operands.push_back(arrays.back().whole(OOC_READ));
  }
  const auto check_all = [&] {
    for (const Array& array : arrays) t.check_all(array, 3 * t.chunk);
  };
  if (test_disk() != nullptr) {  // the bytes are used where they are: nothing more is needed
    ASSERT_EQ(t.core.function_begin_host(t.id("f"), operands.data(), 4), OOC_OK);
    ASSERT_EQ(t.core.function_end(false), OOC_OK);
    check_all();
    return;
  }
  EXPECT_EQ(t.core.function_begin_host(t.id("f"), operands.data(), 4), OOC_OUT_OF_MEMORY);
  EXPECT_TRUE(contains(last_error(), "raise " + CoreTest::store_budget()));
  EXPECT_TRUE(t.stats().host_bytes <= t.stats().host_budget_bytes);
  check_all();
}

// Else there would be two blocks of it for a moment, and its bytes copied between them.
TEST(what_is_larger_than_the_device_leaves_to_where_it_can_be_used) {
  Limits limits = HostFunctionsTest::limits(false, 0);
  limits.disk = nullptr;
  limits.host_chunks = 20;
  HostFunctionsTest t(limits);
  Array a = t.make_absent(20 * t.chunk);
  t.write_all(a, 3 * t.chunk, 1);
  t.let_go();
  ASSERT_EQ(t.core.evict_all(), OOC_OK);
  ASSERT_EQ(t.begin_host({a.whole(OOC_READ)}), OOC_OK);
  EXPECT_TRUE(t.plain_holds(a));
  ASSERT_EQ(t.core.function_end(false), OOC_OK);
}

TEST(its_variables_are_recorded_without_a_need_on_the_device) {
  HostFunctionsTest t;
  Array a = t.make_absent(12 * t.chunk);
  t.write_all(a, 3 * t.chunk, 1);
  ooc_iteration ended;
  const auto iterate = [&](uint32_t access) {
    ASSERT_EQ(t.check_range(a, 0, t.chunk), OOC_OK);
    ASSERT_EQ(t.begin_host({a.whole(access)}), OOC_OK);
    ASSERT_EQ(t.core.function_end(false), OOC_OK);
    ASSERT_EQ(t.core.boundary(&ended), OOC_OK);
    return ended.fingerprint;
  };
  iterate(OOC_READ);
  const uint64_t fingerprint = iterate(OOC_READ);
  EXPECT_EQ(ended.functions, 2u);
  EXPECT_EQ(ended.uses, 1u);
  EXPECT_EQ(ended.variables, 1u);
  EXPECT_EQ(iterate(OOC_READ), fingerprint);
  EXPECT_TRUE(iterate(OOC_WRITE) != fingerprint);
  EXPECT_TRUE(t.stats().min_budget_bytes <= kBudget * t.chunk);
}

TEST(a_random_program_with_functions_on_the_host) {
  for (const bool asynchronous : {false, true}) {
    HostFunctionsTest t(asynchronous);
    RandomProgram program(t, 11, 60);
    program.most_parts = 2;
    for (int step = 0; step < 120; ++step) {
      ASSERT_EQ(asynchronous ? OOC_OK : program.step(), OOC_OK);
      if (program.arrays.size() < 3) program.arrays.push_back(t.make_absent((5 + program.below(12)) * t.chunk));
      if (program.below(6) == 0) {
        std::vector<ooc_operand> operands;
        for (Array& array : program.arrays) operands.push_back(array.whole(OOC_READ | OOC_WRITE));
        ASSERT_EQ(t.begin_host(operands), OOC_OK);
        for (Array& array : program.arrays) {
          EXPECT_TRUE(t.plain_holds(array));
          const auto [offset, bytes] = program.some_range(array);
          t.put_plain(array, offset, bytes, static_cast<unsigned>(step));
        }
        ASSERT_EQ(t.core.function_end(false), OOC_OK);
        t.let_go();
      }
      if (asynchronous) {  // streams of ours are not used: what the program of ranges does is waited for
        Array& array = program.arrays[program.below(program.arrays.size())];
        const auto [offset, bytes] = program.some_range(array);
        ASSERT_EQ(t.call("part", {array.range(offset, bytes, OOC_READ)}, [&] {
          ASSERT_EQ(t.core.synchronize(), OOC_OK);
          EXPECT_TRUE(t.range_holds(array, offset, bytes));
        }), OOC_OK);
      }
      ASSERT_EQ(t.core.audit(), OOC_OK);
    }
    EXPECT_TRUE(t.stats().device_peak_bytes <= kBudget * t.chunk);
    EXPECT_TRUE(t.stats().host_backed_function_count > 10);
  }
}
