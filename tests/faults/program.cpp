// What the fault campaign runs (campaign.py): small programs over the C interface that know what every variable must hold.
//
//   program SCENARIO DRIVER CHUNK_BYTES
//
// A scenario whose name ends in _on_disk is the one before it with swapped data in a file in the folder FAULTS_DISK, and
// _in_three_tiers with little host memory above that.
//
// Under whatever fails, a step may be refused, with a reason; a function that begins must find its bytes. At the end the
// failures stop (ooc_emulated_clear_faults, and fault_interposer_stop where it is loaded): every variable must hold its
// bytes and the books must add up. Exit status: 0, or what Ending says. On standard output, one line for each refusal.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "emulated_control.h"
#include "ooc_alloc.h"

namespace {

enum Ending { kRight = 0, kBytesLost = 3, kBooksWrong = 4, kUnnamed = 5, kNotRecovered = 6, kBadUse = 7 };

constexpr uint64_t kBudgetChunks = 8;
constexpr uint64_t kStoreChunks = 128;  // for swapped data
constexpr int kHostChunks = 22;          // of host memory above a disk: the largest variable just fits

[[noreturn]] void end(Ending how, const std::string& words) {
  std::fprintf(stderr, "ends with %d: %s (%s)\n", how, words.c_str(), ooc_last_error());
  std::fflush(nullptr);
  _exit(how);
}

struct Variable {
  unsigned char* address = nullptr;
  uint64_t bytes = 0;
  unsigned seed = 0;  // 0: never written

  static unsigned char byte(uint64_t at, unsigned seed) { return static_cast<unsigned char>((at * 2654435761u >> 7) + seed * 31); }
  bool holds(uint64_t first, uint64_t count) const {
    for (uint64_t i = first; seed != 0 && i < first + count; i += 61)
      if (address[i] != byte(i, seed)) return false;
    return seed == 0 || count == 0 || address[first + count - 1] == byte(first + count - 1, seed);
  }
  bool holds() const { return holds(0, bytes); }
  void put(unsigned value) {
    seed = value;
    for (uint64_t i = 0; i < bytes; ++i) address[i] = byte(i, value);
  }
};

void* handle_of_driver = nullptr;

struct Program {
  ooc_core* core = nullptr;
  uint64_t chunk;
  std::vector<Variable> live;
  unsigned next_seed = 1;
  int refusals = 0;
  bool must_work = false;  // nothing fails any more
  bool asynchronous = false;
  void* stream = nullptr;
  const bool tiered;  // the disk lies below host memory

  // `host_chunks`: 0 with a disk that takes the place of host memory.
  Program(const char* scenario, const char* driver, uint64_t chunk_bytes, uint64_t host_chunks, const char* disk)
      : chunk(chunk_bytes), tiered(host_chunks > 0 && disk != nullptr) {
    asynchronous = std::strcmp(scenario, "streams") == 0;
    ooc_config config{};
    config.struct_bytes = sizeof config;
    config.driver_library = driver;
    config.budget_bytes = kBudgetChunks * chunk;
    config.host_budget_bytes = host_chunks * chunk;
    config.chunk_bytes = chunk;
    config.small_limit_bytes = chunk / 4;
    config.address_space_bytes = 2048 * chunk;
    config.copy_piece_bytes = 2 * chunk;
    config.run_daemon = std::strcmp(scenario, "plans") == 0 || std::strcmp(scenario, "detach") == 0 ||
                        std::strcmp(scenario, "troubled") == 0 || asynchronous;
    config.asynchronous = asynchronous;
    config.strict = std::strcmp(scenario, "strict") == 0;
    config.disk_folder = disk;
    config.disk_budget_bytes = kStoreChunks * chunk;
    config.disk_depth = 2;
    if (std::getenv("FAULTS_NEVER_END") != nullptr) config.wait_limit_seconds = 0.3;
    core = ooc_core_create(&config);
    if (core == nullptr) {
      refused("create");
      std::exit(kRight);  // a set-up that is refused has nothing to lose
    }
    if (asynchronous) {
      const auto create = reinterpret_cast<int (*)(void**, unsigned)>(dlsym(handle_of_driver, "cuStreamCreate"));
      if (create(&stream, 1) != 0) std::exit(kRight);
    }
  }

  void refused(const char* what) {
    const std::string words = ooc_last_error();
    std::printf("refused %s: %s\n", what, words.c_str());
    ++refusals;
    if (words.size() < 20) end(kUnnamed, what);
    if (must_work) end(kNotRecovered, what);
  }

  // Work of a function: at once, or by its stream.
  struct Work {
    Variable* variable;
    uint64_t first, count;
    bool writes;
    Variable as_it_was;
    unsigned seed;
  };
  static void work(void* data) {
    auto* job = static_cast<Work*>(data);
    if (!job->as_it_was.holds(job->first, job->count)) end(kBytesLost, "a function found other bytes");
    if (job->writes)
      for (uint64_t i = 0; i < job->as_it_was.bytes; ++i) job->as_it_was.address[i] = Variable::byte(i, job->seed);
    delete job;
  }

  // A function that reads part of a variable, or writes all of it.
  void use(Variable& variable, bool writes, uint64_t first = 0, uint64_t count = 0, const char* name = "use") {
    const uint32_t access = writes ? OOC_READ | OOC_WRITE : OOC_READ;
    const ooc_operand operand{variable.address + first, access, 0, count};
    const uint32_t id = ooc_core_function_id(core, name);
    const int status = asynchronous ? ooc_core_function_begin_on(core, id, &operand, 1, stream)
                                    : ooc_core_function_begin(core, id, &operand, 1);
    if (status != OOC_OK) return refused(name);
    auto* job = new Work{&variable, first, count == 0 ? variable.bytes : count, writes, variable, ++next_seed};
    if (writes) variable.seed = job->seed;
    if (asynchronous) {
      const auto launch = reinterpret_cast<int (*)(void*, void (*)(void*), void*)>(dlsym(handle_of_driver, "cuLaunchHostFunc"));
      if (launch(stream, work, job) != 0) end(kBadUse, "cuLaunchHostFunc");
    } else {
      work(job);
    }
    if (ooc_core_function_end(core, 0) != OOC_OK) refused("the end of a function");
  }

  void nothing() {
    const uint32_t id = ooc_core_function_id(core, "nothing");
    const int status = asynchronous ? ooc_core_function_begin_on(core, id, nullptr, 0, stream)
                                    : ooc_core_function_begin(core, id, nullptr, 0);
    if (status != OOC_OK) return refused("nothing");
    if (ooc_core_function_end(core, 0) != OOC_OK) refused("the end of nothing");
  }

  bool make(uint64_t bytes, bool absent = false) {
    Variable fresh;
    fresh.bytes = bytes;
    fresh.address = static_cast<unsigned char*>(absent         ? ooc_core_malloc_absent(core, bytes)
                                                : asynchronous ? ooc_core_malloc_on(core, bytes, stream)
                                                               : ooc_core_malloc(core, bytes));
    if (fresh.address == nullptr) {
      refused("malloc");
      return false;
    }
    live.push_back(fresh);
    if (bytes <= chunk / 4 && !asynchronous) live.back().put(++next_seed);  // small ones stay where they are
    else if (!absent) use(live.back(), true, 0, 0, "make");
    return true;
  }

  void free(size_t index) {
    if (index >= live.size()) return;
    if (asynchronous) ooc_core_free_on(core, live[index].address, stream);
    else ooc_core_free(core, live[index].address);
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(index));
  }

  ooc_iteration boundary() {
    ooc_iteration ended{};
    if (ooc_core_boundary(core, &ended) != OOC_OK) refused("boundary");
    return ended;
  }

  bool plain_holds() const {
    for (const Variable& variable : live)
      if (!variable.holds()) return false;
    return true;
  }

  // The failures are over: all is there, and all works again.
  void finish() {
    const auto clear = reinterpret_cast<void (*)()>(dlsym(handle_of_driver, "ooc_emulated_clear_faults"));
    if (clear != nullptr) clear();
    if (const auto stop = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "fault_interposer_stop"))) stop();
    if (ooc_core_audit(core) != OOC_OK) end(kBooksWrong, "the audit");
    const auto never = std::getenv("FAULTS_NEVER_END");
    if (never != nullptr && !asynchronous) {  // the device is lost, and what it held is saved
      if (ooc_core_detach(core) != OOC_OK) end(kNotRecovered, "detach");
      if (!plain_holds()) end(kBytesLost, "after detach");
      std::fflush(nullptr);
      _exit(kRight);
    }
    if (never == nullptr) {
      must_work = true;
      for (Variable& variable : live) use_in_parts(variable);
      nothing();
      for (Variable& variable : live)
        if (variable.bytes <= 4 * chunk) use(variable, true);
      for (Variable& variable : live) use_in_parts(variable);
      if (ooc_core_synchronize(core) != OOC_OK) refused("synchronize");
    }
    if (ooc_core_audit(core) != OOC_OK) end(kBooksWrong, "the audit after all");
    if (never != nullptr) {  // destroying it would wait for the device
      std::fflush(nullptr);
      _exit(kRight);
    }
    while (!live.empty()) free(live.size() - 1);
    if (ooc_core_audit(core) != OOC_OK) end(kBooksWrong, "the audit of nothing");
    ooc_core_destroy(core);
  }

  void use_in_parts(Variable& variable) {
    const uint64_t part = 3 * chunk;
    if (variable.bytes <= chunk / 4 && !asynchronous) {
      if (!variable.holds()) end(kBytesLost, "a small variable");
      return;
    }
    for (uint64_t at = 0; at < variable.bytes; at += part)
      use(variable, false, at, variable.bytes - at < part ? variable.bytes - at : part, "in parts");
  }
};

// ---- scenarios ------------------------------------------------------------------------------------------------------

void demand(Program& p) {
  for (int i = 0; i < 6; ++i) p.make((2 + i % 2) * p.chunk - 5);
  p.make(p.chunk / 8);
  for (int round = 0; round < 4; ++round) {
    for (size_t i = 0; i < p.live.size(); ++i)
      if (p.live[i].bytes > p.chunk) p.use(p.live[i], (i + static_cast<size_t>(round)) % 3 == 0);
    p.nothing();
    if (round == 1) p.free(0);
    if (round == 1) p.make(2 * p.chunk);
    if (round == 2 && ooc_core_evict_all(p.core) != OOC_OK) p.refused("evict_all");
    if (round == 2) ooc_core_release_cached(p.core);
    uint64_t token = 0;
    if (!p.live.empty() && p.live[0].bytes > p.chunk) {
      if (ooc_core_pin(p.core, p.live[0].address, OOC_READ, &token) != OOC_OK) p.refused("pin");
      else if (!p.asynchronous && !p.live[0].holds()) end(kBytesLost, "a pinned variable");
      else if (ooc_core_unpin(p.core, token, OOC_READ) != OOC_OK) p.refused("unpin");
    }
  }
}

// Variable i is used by function i of every iteration, and moves as the plan says.
void plans(Program& p) {
  constexpr int kVariables = 6;
  for (int i = 0; i < kVariables; ++i) p.make(2 * p.chunk);
  p.boundary();
  const auto iterate = [&] {
    for (size_t i = 0; i < p.live.size(); ++i) p.use(p.live[i], i % 2 == 0, 0, 0, ("f" + std::to_string(i)).c_str());
    return p.boundary();
  };
  iterate();
  const ooc_iteration steady = iterate();
  std::vector<int32_t> out[4], in[6], back[4], down[2], up[2];
  for (int i = 0; i < kVariables && p.live.size() == kVariables; ++i) {
    const int32_t leaves[] = {i, 0, 2, i};
    for (int f = 0; f < 4; ++f) out[f].push_back(leaves[f]);
    const int32_t comes[] = {i, 0, 2, i - 2, i > 2 ? i - 2 : 0, i};
    if (i > 0)
      for (int f = 0; f < 6; ++f) in[f].push_back(comes[f]);
    const int32_t copied[] = {i, 0, 1, i};
    if (i % 3 == 0)
      for (int f = 0; f < 4; ++f) back[f].push_back(copied[f]);
    if (!p.tiered) continue;
    const int32_t sinks[] = {i, i}, rises[] = {i, i - 3};
    for (int f = 0; f < 2; ++f) {
      down[f].push_back(sinks[f]);
      if (i > 2) up[f].push_back(rises[f]);
    }
  }
  const auto size = [](const std::vector<int32_t>& column) { return static_cast<uint32_t>(column.size()); };
  const ooc_plan plan{steady.fingerprint, size(out[0]), size(in[0]), size(back[0]), out[0].data(), out[1].data(),
                      out[2].data(), out[3].data(), in[0].data(), in[1].data(), in[2].data(), in[3].data(), in[4].data(),
                      in[5].data(), back[0].data(), back[1].data(), back[2].data(), back[3].data(),
                      size(down[0]), size(up[0]), 0, down[0].data(), down[1].data(), up[0].data(), up[1].data()};
  if (ooc_core_install_plan(p.core, &plan) != OOC_OK) p.refused("install");
  for (int round = 0; round < 4; ++round) {
    iterate();
    ooc_core_settle(p.core);
  }
  ooc_core_stop_daemon(p.core);
}

void ranges(Program& p) {
  p.make(20 * p.chunk - 9, true);
  p.make(2 * p.chunk);
  for (int round = 0; round < 3; ++round)
    for (Variable& variable : p.live) {
      if (variable.bytes <= 4 * p.chunk) {
        p.use(variable, true);
        continue;
      }
      // Written in parts: the bytes are those of one seed when every part was, so a part that is refused is tried again.
      for (uint64_t at = 0; at < variable.bytes; at += 3 * p.chunk) {
        const uint64_t count = std::min<uint64_t>(3 * p.chunk, variable.bytes - at);
        const ooc_operand operand{variable.address + at, OOC_READ | OOC_WRITE, 0, count};
        if (ooc_core_function_begin(p.core, ooc_core_function_id(p.core, "part"), &operand, 1) != OOC_OK) {
          p.refused("part");
          continue;
        }
        if (variable.seed != 0 && !variable.holds(at, count)) end(kBytesLost, "a part");
        if (ooc_core_function_end(p.core, 0) != OOC_OK) p.refused("the end of a part");
      }
    }
}

// Blank variables become whole with functions on host memory.
void host(Program& p) {
  p.make(12 * p.chunk - 9, true);
  p.make(2 * p.chunk);
  for (int round = 0; round < 3; ++round) {
    std::vector<ooc_operand> operands;
    for (const Variable& variable : p.live) operands.push_back({variable.address, OOC_READ | OOC_WRITE, 0, 0});
    const uint32_t id = ooc_core_function_id(p.core, "on the host");
    if (ooc_core_function_begin_host(p.core, id, operands.data(), static_cast<uint32_t>(operands.size()),
                                     p.stream) != OOC_OK) {
      p.refused("on the host");
    } else {
      for (Variable& variable : p.live) {
        if (!variable.holds()) end(kBytesLost, "a function on host memory");
        variable.put(++p.next_seed);
      }
      void* more = round == 1 ? ooc_core_malloc(p.core, 9 * p.chunk) : nullptr;
      if (round == 1 && more == nullptr) p.refused("malloc on the host");
      if (ooc_core_function_end(p.core, 0) != OOC_OK) p.refused("the end of a function on the host");
      ooc_core_free(p.core, more);
    }
    for (Variable& variable : p.live) p.use_in_parts(variable);
    p.nothing();
    if (ooc_core_evict_all(p.core) != OOC_OK) p.refused("evict_all");
  }
}

void streams(Program& p) {
  plans(p);
  demand(p);
  if (ooc_core_synchronize(p.core) != OOC_OK) p.refused("synchronize");
}

// While other calls fail now and then (campaign.py): what is only done after a failure can fail too.
void troubled(Program& p) {
  plans(p);
  demand(p);
}

void forks(Program& p) {
  demand(p);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(p.plain_holds() ? kRight : kBytesLost);
  }
  int status = 0;
  if (child < 0) {
    std::printf("refused fork: the system has no process to give\n");
  } else if (waitpid(child, &status, 0) != child || (WIFEXITED(status) && WEXITSTATUS(status) != 0) ||
             (WIFSIGNALED(status) && WTERMSIG(status) != SIGABRT)) {  // it aborts where it has no memory for the bytes
    end(kBytesLost, "a child");
  }
  for (Variable& variable : p.live)
    if (variable.bytes > p.chunk) p.use(variable, true);
}

void budget(Program& p) {
  demand(p);
  for (const uint64_t chunks : {6, 8, 5}) {
    if (ooc_core_set_budget(p.core, chunks * p.chunk) != OOC_OK) p.refused("set_budget");
    for (Variable& variable : p.live)
      if (variable.bytes > p.chunk) p.use(variable, false);
    p.nothing();
  }
  if (ooc_core_set_budget(p.core, kBudgetChunks * p.chunk) != OOC_OK) p.refused("set_budget");
}

void detach(Program& p) {
  plans(p);
  p.make(p.chunk / 8);
  if (ooc_core_detach(p.core) != OOC_OK) return p.refused("detach");
  if (!p.plain_holds()) end(kBytesLost, "after detach");
  for (Variable& variable : p.live) variable.put(++p.next_seed);
  if (!p.plain_holds()) end(kBytesLost, "written after detach");
  if (!p.make(2 * p.chunk)) return;
  p.free(0);
}

struct Scenario {
  const char* name;
  void (*run)(Program&);
};
constexpr Scenario kScenarios[] = {{"demand", demand}, {"strict", demand}, {"troubled", troubled}, {"plans", plans},
                                   {"ranges", ranges}, {"host", host}, {"streams", streams}, {"fork", forks}, {"budget", budget}, {"detach", detach}};

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return kBadUse;
  handle_of_driver = dlopen(arguments[2], RTLD_NOW);
  if (handle_of_driver == nullptr) return kBadUse;
  std::string wanted = arguments[1];
  uint64_t host_chunks = kStoreChunks;
  bool on_disk = false;
  for (const auto& [ending, chunks] : {std::pair{"_on_disk", 0}, std::pair{"_in_three_tiers", kHostChunks}}) {
    if (!wanted.ends_with(ending)) continue;
    on_disk = true;
    host_chunks = static_cast<uint64_t>(chunks);
    wanted.resize(wanted.size() - std::strlen(ending));
  }
  for (const Scenario& scenario : kScenarios) {
    if (wanted != scenario.name) continue;
    const char* disk = on_disk ? std::getenv("FAULTS_DISK") : nullptr;
    if (on_disk && disk == nullptr) end(kBadUse, "FAULTS_DISK is not set");
    Program program(scenario.name, arguments[2], std::strtoull(arguments[3], nullptr, 10), host_chunks, disk);
    scenario.run(program);
    program.finish();
    return kRight;
  }
  return kBadUse;
}
