// Cost of the core's calls in nanoseconds, on the emulated driver, with a budget that holds everything.
//
//   core_calls DRIVER_LIBRARY ROUNDS   ->  JSON: {"name": [nanoseconds per call or pair, one for each round], ...}
//
// The kinds take turns, round by round, so that a disturbance of the machine hits all of them. Each round is short, so
// that the smallest of many is one that nothing disturbed.
#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
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

ooc_core* create(const char* driver, bool on_streams = false) {
  ooc_config config{};
  config.struct_bytes = sizeof config;
  config.driver_library = driver;
  config.budget_bytes = uint64_t{256} << 20;
  config.host_budget_bytes = uint64_t{64} << 20;
  config.chunk_bytes = kChunk;
  config.small_limit_bytes = kChunk / 2;
  config.run_daemon = 1;
  config.asynchronous = on_streams ? 1 : 0;
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

// A stream of the emulated device, which stands still while the gate is closed.
class Device {
 public:
  explicit Device(const char* driver) : library_(dlopen(driver, RTLD_NOW)) {
    if (call<int(void**, unsigned)>("cuStreamCreate")(&stream_, 1) != 0) fail("no stream");
  }
  void* stream() const { return stream_; }
  void close_gate() {
    open_ = false;
    call<int(void*, void (*)(void*), void*)>("cuLaunchHostFunc")(stream_, [](void* device) {
      auto* self = static_cast<Device*>(device);
      std::unique_lock<std::mutex> lock(self->mutex_);
      self->changed_.wait(lock, [self] { return self->open_; });
    }, this);
  }
  void open_gate() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
    call<int(void*)>("cuStreamSynchronize")(stream_);
  }

 private:
  template <typename Function>
  Function* call(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }
  void* library_;
  void* stream_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// Operators on a stream that read the last one's result and make another, while the device has done none of the round's.
Kind behind(ooc_core* core, Device& device) {
  const uint32_t id = ooc_core_function_id(core, "benchmark::behind");
  ooc_core_stream_lasts(core, device.stream());  // as PyTorch's own do
  return {"operator on a stream, the device up to 2,048 operators behind", kFunctions * kPairs, [=, &device] {
            void* last = ooc_core_malloc_on(core, kChunk, device.stream());
            device.close_gate();
            for (int i = 0; i < kFunctions * kPairs; ++i) {
              const ooc_operand read{last, OOC_READ, 0, 0};
              check(ooc_core_function_begin_on(core, id, &read, 1, device.stream()));
              void* made = ooc_core_malloc_on(core, kChunk, device.stream());
              check(ooc_core_function_end(core, 0));
              ooc_core_free_on(core, last, device.stream());
              last = made;
            }
            device.open_gate();
            ooc_core_free_on(core, last, device.stream());
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
  ooc_core* on_streams = create(arguments[1], true);
  Device device(arguments[1]);
  kinds.push_back(behind(on_streams, device));
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
      for (ooc_core* each : {core, on_streams}) check(ooc_core_boundary(each, &ended));  // the recorder starts afresh
    }
  }
  print(kinds);
  for (ooc_core* each : {core, on_streams}) {
    check(ooc_core_audit(each));
    ooc_core_stop_daemon(each);
    ooc_core_destroy(each);
  }
}
