// The emulated driver and the life of its process: the environment at its start, fork, and its end.
//
// Some tests run this program again as a probe, with other variables: OOC_TEST_PROBE says what the probe does.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "emulated_fixture.h"

using namespace ooc;
using namespace ooc::testing;

namespace {

struct Outcome {
  std::string output;
  int status = -1;
  bool has(const char* part) const { return output.find(part) != std::string::npos; }
};

// Runs the probe; `variables` as a shell writes them: "OOC_EMULATED_MEMORY=1GiB".
Outcome probe(const char* what, const std::string& variables) {
  char self[4096] = "";
  ASSERT_TRUE(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
  const std::string command = variables + " OOC_TEST_PROBE=" + what + " timeout 60 '" + self + "' the_probe 2>&1";
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_TRUE(pipe != nullptr);
  for (char line[1000]; std::fgets(line, sizeof(line), pipe) != nullptr;) outcome.output += line;
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

void print_device(const Driver& table) {
  size_t total = 0, unit = 0;
  const CUmemAllocationProp prop = device_memory();
  table.cuDeviceTotalMem(&total, 0);
  table.cuMemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  std::printf("memory=%zu granularity=%zu\n", total, unit);
  ooc_emulated_config config{};
  config.struct_bytes = sizeof(config);
  const auto get = reinterpret_cast<decltype(&ooc_emulated_get_config)>(dlsym(table.handle, "ooc_emulated_get_config"));
  if (get(&config) == 0) {
    std::printf("h2d=%.0f+%.0fus d2h=%.0f+%.0fus\n", config.h2d_bytes_per_second, config.h2d_latency_seconds * 1e6,
                config.d2h_bytes_per_second, config.d2h_latency_seconds * 1e6);
  }
}

// Ends the process while a stream still works and another waits for it.
[[noreturn]] void exit_with_work() {
  const Driver& table = driver();
  static Range* range = new Range(1, 8 << 20);  // static pointers: nothing is destroyed, and nothing has leaked
  static Bytes* host = new Bytes(range->chunk);
  static Stream *first = new Stream, *second = new Stream;
  static Event* event = new Event;
  range->fill(0);
  ASSERT_OK(table.cuMemcpyDtoHAsync(host->data(), range->base, range->chunk, first->handle));
  ASSERT_OK(table.cuEventRecord(event->handle, first->handle));
  ASSERT_OK(table.cuStreamWaitEvent(second->handle, event->handle, 0));
  std::exit(7);
}

// Every sort of call, in a child of a process that uses the device; the number of wrong results.
int wrong_results_in_child(const Range& range, const Stream& stream, const Event& event) {
  alarm(60);  // a hang becomes a failure
  const Driver& table = driver();
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp prop = device_memory();
  size_t free_bytes = 0, total = 0;
  char byte = 0;
  CUdeviceptr address = 0;
  void* pointer = nullptr;
  const CUresult results[] = {
      table.cuInit(0),
      table.cuCtxSetCurrent(nullptr),
      table.cuMemGetInfo(&free_bytes, &total),
      table.cuMemCreate(&handle, range.chunk, &prop, 0),
      table.cuMemAddressReserve(&address, range.chunk, 0, 0, 0),
      table.cuMemUnmap(range.base, range.chunk),
      set_access(range.base, range.chunk),
      table.cuMemcpyDtoH(&byte, range.base, 1),
      table.cuMemcpyDtoHAsync(&byte, range.base, 1, stream.handle),
      table.cuStreamSynchronize(stream.handle),
      table.cuStreamDestroy(stream.handle),
      table.cuEventSynchronize(event.handle),
      table.cuMemHostAlloc(&pointer, 4096, 0),
  };
  int wrong = 0;
  for (const CUresult result : results) wrong += result != CUDA_ERROR_NOT_INITIALIZED ? 1 : 0;
  wrong += control().access(host_pointer<void>(range.base), range.chunk) < 0 ? 1 : 0;  // takes a lock
  return wrong;
}

int exit_status(pid_t child) {
  int status = 0;
  ASSERT_TRUE(child > 0 && waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST(the_probe) {
  const char* what = std::getenv("OOC_TEST_PROBE");
  if (what == nullptr) SKIP("only for the other tests");
  if (std::string(what) == "exit") exit_with_work();
  std::string error;
  const std::unique_ptr<Driver> table = load_driver(test_driver(), error);
  ASSERT_TRUE(table != nullptr);
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp prop = device_memory();
  std::printf("before=%d\n", table->cuMemCreate(&handle, 1 << 20, &prop, 0));
  const CUresult result = table->cuInit(0);
  std::printf("init=%d\n", result);
  if (result == CUDA_SUCCESS) print_device(*table);
  if (result == CUDA_SUCCESS) std::printf("create=%d\n", table->cuMemCreate(&handle, 2 << 20, &prop, 0));
}

TEST(the_environment_configures_the_device) {
  Outcome outcome = probe("print", "OOC_EMULATED_MEMORY=1.5GiB OOC_EMULATED_GRANULARITY=2MiB "
                                   "OOC_EMULATED_BANDWIDTH=h2d=8GiB/s,d2h=6GB/s,latency=20us,d2h_latency=1ms");
  EXPECT_TRUE(outcome.has("before=3\ninit=0\n"));
  EXPECT_TRUE(outcome.has("memory=1610612736 granularity=2097152\n"));
  EXPECT_TRUE(outcome.has("h2d=8589934592+20us d2h=6000000000+1000us\n"));
  outcome = probe("print", "OOC_EMULATED_MEMORY=100000000 OOC_EMULATED_BANDWIDTH=10GiB/s");
  EXPECT_TRUE(outcome.has("memory=99942400 granularity=65536\n"));  // whole granules of it
  EXPECT_TRUE(outcome.has("h2d=10737418240+0us d2h=10737418240+0us\n"));
  outcome = probe("print", "OOC_EMULATED_MEMORY= OOC_EMULATED_BANDWIDTH=unlimited");
  EXPECT_TRUE(outcome.has("init=0\n") && outcome.has("h2d=0+0us d2h=0+0us\n") && outcome.has("create=0\n"));
  outcome = probe("print", "OOC_EMULATED_MEMORY=1GiB OOC_EMULATED_FAULTS='cuMemCreate:error=713'");
  EXPECT_TRUE(outcome.has("create=713\n"));
}

TEST(a_wrong_environment_is_explained) {
  const char* wrong[][2] = {
      {"OOC_EMULATED_MEMORY", "8Gb!"},           {"OOC_EMULATED_MEMORY", "-1"},
      {"OOC_EMULATED_MEMORY", "lots"},           {"OOC_EMULATED_MEMORY", "1KiB"},
      {"OOC_EMULATED_GRANULARITY", "3000"},      {"OOC_EMULATED_GRANULARITY", "0"},
      {"OOC_EMULATED_BANDWIDTH", "10GiB"},       {"OOC_EMULATED_BANDWIDTH", "h2d=fast"},
      {"OOC_EMULATED_BANDWIDTH", "up=1GiB/s"},   {"OOC_EMULATED_BANDWIDTH", "latency=5"},
      {"OOC_EMULATED_FAULTS", "cuMemCreate:x=1"}, {"OOC_EMULATED_FAULTS", "every=2"},
  };
  for (const auto& [name, value] : wrong) {
    const Outcome outcome = probe("print", std::string(name) + "='" + value + "'");
    EXPECT_TRUE(outcome.has("init=1\n"));
    if (!EXPECT_TRUE(outcome.has("emulated CUDA driver: ") && outcome.has(name))) {
      std::fprintf(stderr, "%s=%s: %s", name, value, outcome.output.c_str());
    }
  }
}

TEST(a_process_ends_while_streams_work) {
  const Outcome outcome = probe("exit", "OOC_EMULATED_BANDWIDTH=1MiB/s");  // the copy would take 8 s
  EXPECT_EQ(outcome.status, 7);
  EXPECT_EQ(outcome.output, std::string("the_probe ...\n"));
}

TEST(a_forked_child_has_no_device) {
  Range range(1);
  range.fill(0);
  const Stream stream;
  const Event event;
  Gate gate;
  gate.close_on(stream);
  ASSERT_OK(driver().cuEventRecord(event.handle, stream.handle));
  const pid_t child = fork();
  if (child == 0) _exit(wrong_results_in_child(range, stream, event));
  EXPECT_EQ(exit_status(child), 0);
  gate.open();
  EXPECT_OK(driver().cuEventSynchronize(event.handle));  // the parent goes on
  EXPECT_EQ(control().access(host_pointer<void>(range.base), range.chunk), 3);
}

TEST(fork_never_meets_a_lock) {
  std::atomic<bool> stop{false};
  CUcontext context = nullptr;
  ASSERT_OK(driver().cuCtxGetCurrent(&context));
  Range range(2);
  range.fill(0, 2);
  const Stream stream;
  const Event event;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      driver().cuCtxSetCurrent(context);
      Bytes bytes(range.chunk);
      while (!stop) {
        set_access(range.at(i), range.chunk, i == 0 ? CU_MEM_ACCESS_FLAGS_PROT_NONE : CU_MEM_ACCESS_FLAGS_PROT_READ);
        set_access(range.at(i), range.chunk);
        driver().cuMemcpyHtoDAsync(range.at(i), bytes.data(), bytes.size(), stream.handle);
        driver().cuStreamSynchronize(stream.handle);
      }
    });
  }
  int wrong = 0;
  for (int i = 0; i < 30; ++i) {
    const pid_t child = fork();
    if (child == 0) _exit(wrong_results_in_child(range, stream, event));
    wrong += exit_status(child) != 0 ? 1 : 0;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}
