// A core with a small budget, and variables with known contents, for the tests of the core and of the daemon.
//
// Contents are written and checked through driver copies inside functions, so that these tests also run on a GPU.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "daemon.h"
#include "device_fixture.h"
#include "last_error.h"

namespace ooc::testing {

struct Limits {
  uint64_t budget_chunks = 8;
  uint64_t host_chunks = 64;
  uint64_t small_limit = 0;  // bytes; 0: every allocation is a region
  uint64_t piece_chunks = 2;
  bool strict = false;
  bool asynchronous = false;
  bool safe = false;
  const char* disk = test_disk();  // a folder for swapped data, which then get host_chunks there; not with streams
  double wait_limit = 0;           // seconds; 0: the default
  uint64_t tiers = test_tiers();   // chunks of host memory, if there is a disk below it; 0: there is the disk alone
};

inline ooc_config make_config(const Limits& limits) {
  driver();
  const uint64_t chunk = granularity();
  ooc_config config{};
  config.struct_bytes = sizeof config;
  config.driver_library = test_driver();
  config.budget_bytes = limits.budget_chunks * chunk;
  config.host_budget_bytes = limits.host_chunks * chunk;
  config.chunk_bytes = chunk;
  config.small_limit_bytes = limits.small_limit;
  config.address_space_bytes = 4096 * chunk;
  config.copy_piece_bytes = limits.piece_chunks * chunk;
  config.strict = limits.strict ? 1 : 0;
  config.asynchronous = limits.asynchronous ? 1 : 0;
  config.safe = limits.safe ? 1 : 0;
  config.wait_limit_seconds = limits.wait_limit;
  config.disk_depth = 2;
  config.disk_budget_bytes = config.host_budget_bytes;
  if (limits.disk != nullptr && limits.tiers > 0) {  // host memory is smaller, and the disk below it takes the rest
    config.disk_folder = limits.disk;
    config.host_budget_bytes = std::min(limits.host_chunks, limits.tiers) * chunk;
    config.disk_budget_bytes *= 2;
  } else if (limits.disk != nullptr && !limits.asynchronous) {
    config.disk_folder = limits.disk;
    config.host_budget_bytes = 0;
  }
  return config;
}

inline std::string last_error() { return last_error_text(); }
inline int last_status() { return last_error_status(); }

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The bytes of a variable are made from its seed.
struct Variable {
  void* address = nullptr;
  uint64_t bytes = 0;
  unsigned seed = 0;

  CUdeviceptr pointer() const { return reinterpret_cast<CUdeviceptr>(address); }
};

struct CoreTest {
  explicit CoreTest(const Limits& limits = {}) : core(make_config(limits)), chunk(core.chunk_bytes()) {}
  // A healthy core agrees with its own recount at the end of every test.
  ~CoreTest() {
    if (core.audit() != OOC_OK) fail(__FILE__, __LINE__, last_error());
    EXPECT_TRUE(stats().device_peak_bytes <= stats().budget_bytes);
  }

  // What is on a disk counts as host memory too, so that a test can say of both what it says of one.
  ooc_stats stats() {
    ooc_stats result;
    core.read_stats(&result);
    result.host_budget_bytes += result.disk_budget_bytes;
    result.host_bytes += result.disk_bytes;
    result.host_used_bytes += result.disk_used_bytes;
    result.host_peak_bytes += result.disk_peak_bytes;
    return result;
  }
  // The setting that an error names where there is no room for swapped data.
  static std::string store_budget() { return test_disk() != nullptr && test_tiers() == 0 ? "OOC_DISK_BUDGET" : "OOC_HOST_BUDGET"; }

  uint32_t id(const char* name) { return core.function_id(name); }

  int begin(const char* name, const std::vector<ooc_operand>& operands) {
    return core.function_begin(id(name), operands.data(), static_cast<uint32_t>(operands.size()));
  }

  // A function over its operands; `body` runs between begin and end. Returns the first status that is not 0.
  int call(const char* name, const std::vector<ooc_operand>& operands, const std::function<void()>& body = [] {}) {
    if (const int status = begin(name, operands)) return status;
    body();
    return core.function_end(false);
  }

  // A function without operands, so that the pins of the one before end.
  void let_go() { ASSERT_EQ(call("nothing", {}), OOC_OK); }

  void* must_malloc(uint64_t bytes) {
    void* address = core.malloc(bytes);
    if (address == nullptr) fail(__FILE__, __LINE__, "malloc of " + std::to_string(bytes) + " bytes: " + last_error());
    ASSERT_TRUE(address != nullptr);
    return address;
  }

  // Not null, and not one of the host's blocks that measure what a function needs.
  bool owns(const void* address) {
    const auto offset = static_cast<const char*>(address) - core.device().base();
    return offset >= 0 && static_cast<uint64_t>(offset) < core.device().reserved();
  }

  // A variable with contents, made by a function as a framework would.
  Variable make(uint64_t bytes, unsigned seed, const char* name = "make") {
    Variable variable{nullptr, bytes, seed};
    const int status = call(name, {}, [&] {
      variable.address = must_malloc(bytes);
      put(variable);
    });
    if (status != OOC_OK) fail(__FILE__, __LINE__, last_error());
    ASSERT_EQ(status, OOC_OK);
    return variable;
  }
  std::vector<Variable> make_many(size_t count, uint64_t bytes) {
    std::vector<Variable> variables;
    for (size_t i = 0; i < count; ++i) variables.push_back(make(bytes, static_cast<unsigned>(i + 1)));
    return variables;
  }

  // The copies that were begun have been made, and nobody has settled them yet: as far as the core knows they are under
  // way, and what is written now races with no thread of the emulated device's.
  void make_copies() {
    for (const Direction direction : {Direction::kOut, Direction::kIn})
      EXPECT_OK(driver().cuStreamSynchronize(core.device().stream(direction)));
  }

  // Raw contents; the variable must be on the device.
  void put(const Variable& variable) { testing::write(variable.pointer(), pattern(variable.bytes, variable.seed)); }
  bool holds(const Variable& variable) {
    return testing::read(variable.pointer(), variable.bytes) == pattern(variable.bytes, variable.seed);
  }

  // Functions that use one variable.
  int check(const Variable& variable, const char* name = "check") {
    return call(name, {{variable.address, OOC_READ, 0, 0}}, [&] { EXPECT_TRUE(holds(variable)); });
  }
  int update(Variable& variable, unsigned seed, const char* name = "update") {
    return call(name, {{variable.address, OOC_READ | OOC_WRITE, 0, 0}}, [&] {
      variable.seed = seed;
      put(variable);
    });
  }
  void expect_intact(const std::vector<Variable>& variables) {
    for (const Variable& variable : variables) EXPECT_EQ(check(variable), OOC_OK);
  }
  void free(const std::vector<Variable>& variables) {
    for (const Variable& variable : variables) core.free(variable.address);
  }

  // Chunks of a variable that are on the device.
  uint32_t resident(const Variable& variable) {
    Lock lock(core.mutex());
    return region(variable)->resident;
  }
  // Through the recorder: the variable must have been used in the iteration under way. The lock is held.
  Region* region(const Variable& variable) {
    const auto offset = static_cast<uint64_t>(static_cast<char*>(variable.address) - core.device().base());
    for (const auto& seen : core.recorder().current().variables)
      if (Region* found = seen.handle.get())
        if (found->first == offset / core.chunk_bytes()) return found;
    throw std::runtime_error("the variable was not used in this iteration");
  }

  Core core;
  const uint64_t chunk;
};

inline ooc_operand reads(const Variable& variable) { return {variable.address, OOC_READ, 0, 0}; }
inline ooc_operand writes(const Variable& variable) { return {variable.address, OOC_WRITE, 0, 0}; }

}  // namespace ooc::testing
