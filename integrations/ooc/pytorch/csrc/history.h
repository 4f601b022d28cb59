// What kept calls read and wrote: which bytes variables hold, whether they still exist, and which calls make them
// again. The bytes of a variable between two writes are a version of it; version k is what its k-th writer left, from 0.
// It is swapd/recompute/history.py while the program runs, and knows nothing of operators. Guarded by its owner.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace ooc_torch __attribute__((visibility("hidden"))) {

using VariableId = int32_t;
using CallId = int32_t;
constexpr int32_t kNoId = -1;

struct Version {
  VariableId variable = kNoId;
  uint32_t number = 0;

  auto operator<=>(const Version&) const = default;
};

struct Variable {
  char* address = nullptr;
  uint64_t bytes = 0;
  bool there = true;      // the memory is the program's, or stays although the program freed it
  bool freed = false;     // the program has freed it
  bool dropped = false;   // its bytes were given up
  bool fleeting = false;  // made again for another variable's sake, its bytes stay lost
  bool rehearsed = false; // its bytes are there, but are to be made again as if they were not
  bool exposed = false;   // somebody may write it at any time
  uint64_t hash = 0;      // of the bytes that were dropped, where that is checked
  uint32_t users = 0;     // calls that run again and read it, or make its bytes
  uint32_t lingers = 0;   // it stays until so many functions of the schedule have begun
  uint32_t version = 0;
  std::vector<CallId> writers;               // [versions]; kNoId: the bytes cannot be made again
  std::vector<std::vector<CallId>> readers;  // [versions] kept calls that read it
};

// Whose bytes count as lost: those that are dropped, or those that a rehearsal takes for dropped as well.
enum class Loss { kReal, kRehearsed };

class History {
 public:
  // The variable whose memory an address lies in; kNoId: no call that was kept has used it.
  VariableId find(const void* address) const;
  // It is added if need be; its first version is the program's own.
  VariableId find_or_add(char* address, uint64_t bytes);
  // A call allocated it, which may run again if it has an id.
  VariableId add_made(char* address, uint64_t bytes, CallId maker);
  Variable& variable(VariableId id) { return variables_.at(static_cast<size_t>(id)); }
  const Variable& variable(VariableId id) const { return variables_.at(static_cast<size_t>(id)); }
  Version current(VariableId id) const { return {id, variable(id).version}; }

  CallId new_call() {
    reads_.emplace_back();
    writes_.emplace_back();
    return static_cast<CallId>(reads_.size()) - 1;
  }
  void read(CallId call, const Version& version);
  const std::vector<Version>& reads(CallId call) const { return reads_[static_cast<size_t>(call)]; }
  const std::vector<Version>& writes(CallId call) const { return writes_[static_cast<size_t>(call)]; }
  // Somebody writes a variable: it has a new version, which nobody can make again unless `written_by` says so.
  void write(VariableId id);
  void written_by(VariableId id, CallId call);
  // The memory is gone.
  void forget_memory(VariableId id);

  // Whether bytes exist.
  bool exists(const Version& version, Loss loss) const {
    const Variable& b = variable(version.variable);
    return b.there && !b.dropped && !b.exposed && b.version == version.number && (loss == Loss::kReal || !b.rehearsed);
  }
  // The calls that make versions again, in the order in which the program made them; none if that is not possible, or
  // takes more than `most` calls. `without` is a variable that may not be read.
  std::optional<std::vector<CallId>> repeats(std::vector<Version> wanted, Loss loss, VariableId without = kNoId,
                                             size_t most = SIZE_MAX) const;
  // The lost variables whose bytes may have to be made from a version.
  std::vector<VariableId> dependents(const Version& version, Loss loss) const;
  // Of these, the ones that cannot be made again any more once the variable that has the version is gone, or written.
  std::vector<VariableId> stranded_without(const Version& version, Loss loss) const;

  void clear();
  bool empty() const { return variables_.empty(); }
  const std::deque<Variable>& variables() const { return variables_; }

 private:
  VariableId add(char* address, uint64_t bytes, CallId writer);
  bool lost(const Variable& b, Loss loss) const { return b.dropped || (loss == Loss::kRehearsed && b.rehearsed); }

  std::deque<Variable> variables_;
  std::map<const char*, VariableId> places_;  // of those whose memory is there
  std::vector<std::vector<Version>> reads_, writes_;  // [calls]
};

}  // namespace ooc_torch
