// Cost of the core's calls in nanoseconds, on the emulated driver, with a budget that holds everything.
//
//   core_calls DRIVER_LIBRARY ROUNDS   ->  JSON: {"name": [nanoseconds per call or pair, one for each round], ...}
//
// The kinds take turns, round by round, so that a disturbance of the machine hits all of them. Each round is short, so
// that the smallest of many is one that nothing disturbed.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "ooc_alloc.h"

namespace {

constexpr int kPairs = 64;      // malloc/free pairs within a function
constexpr int kFunctions = 32;  // functions in a round
constexpr uint64_t kChunk = 128 << 10;

struct Kind {
  std::string name;
  int calls;  // per round
  std::function<void()> round;
  std::vector<double> nanoseconds;
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "core_calls: %s: %s\n", what, ooc_last_error());
  std::exit(1);
}

void check(int status) {
  if (status != OOC_OK) fail("a call failed");
}

ooc_core* create(const char* driver) {
  ooc_config config{};
  config.struct_bytes = sizeof config;
  config.driver_library = driver;
  config.budget_bytes = uint64_t{256} << 20;
  config.host_budget_bytes = uint64_t{64} << 20;
  config.chunk_bytes = kChunk;
  config.small_limit_bytes = kChunk / 2;
  config.run_daemon = 1;
  ooc_core* core = ooc_core_create(&config);
  if (core == nullptr) fail("no core");
  return core;
}

// Pairs within functions, as a framework makes them; the functions' own cost is a 64th of it.
Kind pairs(ooc_core* core, std::string name, uint64_t bytes) {
  const uint32_t id = ooc_core_function_id(core, "benchmark::pairs");
  return {std::move(name), kFunctions * kPairs, [=] {
            for (int f = 0; f < kFunctions; ++f) {
              check(ooc_core_function_begin(core, id, nullptr, 0));
              for (int i = 0; i < kPairs; ++i) ooc_core_free(core, ooc_core_malloc(core, bytes));
              check(ooc_core_function_end(core, 0));
            }
          }, {}};
}

Kind functions(ooc_core* core, std::string name, std::vector<ooc_operand> operands) {
  const uint32_t id = ooc_core_function_id(core, "benchmark::functions");
  return {std::move(name), kFunctions * kPairs, [=] {
            for (int i = 0; i < kFunctions * kPairs; ++i) {
              check(ooc_core_function_begin(core, id, operands.data(), static_cast<uint32_t>(operands.size())));
              check(ooc_core_function_end(core, 0));
            }
          }, {}};
}

// What a small block costs elsewhere. The compiler must not see through it.
Kind system_pairs(std::string name, size_t bytes) {
  return {std::move(name), kFunctions * kPairs, [=] {
            for (int i = 0; i < kFunctions * kPairs; ++i) {
              void* volatile block = std::malloc(bytes);
              std::free(block);
            }
          }, {}};
}

void print(const std::vector<Kind>& kinds) {
  std::printf("{");
  for (size_t k = 0; k < kinds.size(); ++k) {
    std::printf("%s\"%s\": [", k == 0 ? "" : ", ", kinds[k].name.c_str());
    for (size_t r = 0; r < kinds[k].nanoseconds.size(); ++r)
      std::printf("%s%.1f", r == 0 ? "" : ", ", kinds[k].nanoseconds[r]);
    std::printf("]");
  }
  std::printf("}\n");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: core_calls DRIVER_LIBRARY ROUNDS\n");
    return 2;
  }
  ooc_core* core = create(arguments[1]);
  std::vector<ooc_operand> operands;
  for (int i = 0; i < 3; ++i) {
    void* address = ooc_core_malloc(core, 8 * kChunk);
    if (address == nullptr) fail("no memory");
    operands.push_back({address, i == 0 ? uint32_t{OOC_READ | OOC_WRITE} : uint32_t{OOC_READ}, 0, 0});
  }
  std::vector<Kind> kinds;
  kinds.push_back(pairs(core, "malloc and free, slab, 256 B", 256));
  kinds.push_back(pairs(core, "malloc and free, slab, 32 KiB", 32 << 10));
  kinds.push_back(pairs(core, "malloc and free, cached region, 1 chunk", kChunk));
  kinds.push_back(pairs(core, "malloc and free, cached region, 64 chunks", 64 * kChunk));
  kinds.push_back(functions(core, "function begin and end, no operand", {}));
  kinds.push_back(functions(core, "function begin and end, 1 region", {operands[0]}));
  kinds.push_back(functions(core, "function begin and end, 3 regions", operands));
  kinds.push_back(system_pairs("malloc and free of the C library, 256 B", 256));
  kinds.push_back(system_pairs("malloc and free of the C library, 8 MiB", 64 * kChunk));
  const int rounds = std::atoi(arguments[2]);
  for (int round = -1; round < rounds; ++round) {  // the first warms up
    for (Kind& kind : kinds) {
      const auto began = std::chrono::steady_clock::now();
      kind.round();
      const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - began;
      if (round >= 0) kind.nanoseconds.push_back(spent.count() / kind.calls);
      ooc_iteration ended;
      check(ooc_core_boundary(core, &ended));  // the recorder starts afresh
    }
  }
  check(ooc_core_audit(core));
  print(kinds);
  ooc_core_stop_daemon(core);
  ooc_core_destroy(core);
}
