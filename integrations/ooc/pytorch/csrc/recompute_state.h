// What the files of recomputation share: the books of the iteration under way, and the settings.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "recompute.h"
#include "schedule.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// All since the start.
struct RemakeFigures {
  uint64_t drops = 0, dropped_bytes = 0, repeats = 0, late_frees = 0;
  double repeat_seconds = 0;
};

// Guarded by `books`, which is held for moments, never while functions run. `remaking` is held by the thread that makes
// bytes again; whoever holds `books` does not wait for it.
struct Recompute {
  std::mutex books, remaking;
  History history;
  std::vector<std::shared_ptr<const KeptCall>> calls;  // [history's calls]
  std::unordered_map<const void*, std::vector<VariableId>> announced;  // by thread: what it used last, or is about to use
  std::vector<VariableId> lingering;                      // variables that the program freed and others need
  uint64_t iteration = 0;
  bool ends = false;  // the iteration does: nothing lingers any longer
  Follower follower;
  Schedule* schedule = nullptr;  // that the recorded thread is in
  std::unordered_map<uint64_t, std::vector<VariableId>> made;  // by function of the schedule: what it allocated, in order
  std::unordered_map<VariableId, ScheduledDrop*> rehearsed;
  std::unordered_map<std::string, Role> roles;  // by name without overload
  std::unordered_map<uint32_t, Role> known_roles;  // by the core's number of a function
  std::unordered_map<uint32_t, uint32_t> again;    // the number of a function that runs again
  std::atomic<bool> everything{false};  // whatever can be made again is dropped, once, as soon as a function has ended
  std::atomic<bool> checks{false};      // what was made again is compared with what was dropped
  RemakeFigures figures;
  uint64_t drops_before = 0;  // this iteration

  Role role(uint32_t function);
  uint32_t again_id(uint32_t function);
  // Whether a variable stays if the program frees it, as something is made again from it.
  bool stays(VariableId id) const;
  bool idle() const { return !everything && !follower.any(); }
  // Gives the calls that were kept, which go without the lock, as their copies do.
  [[nodiscard]] std::vector<std::shared_ptr<const KeptCall>> forget_iteration();
};

Recompute& recompute();

// What a thread is doing here.
struct RemakingThread {
  bool busy = false;        // it makes bytes again: its functions are not the program's
  bool frees = false;       // it frees what lingered
  std::optional<uint32_t> keep;  // the function that has begun, if its call is to be kept
  Role keep_role = Role::kNever;
  bool makes_lingering = false;  // whether the schedule lets something linger that it makes
  uint32_t keep_position = 0;
  bool advanced = false;    // the function that has begun counted for the schedule
  uint64_t iteration = 0;   // of `last`
  std::vector<VariableId> last;  // variables that its last function used or made, where everything is dropped
};
inline thread_local RemakingThread remaking_thread;

// Whether uses are to be told of from now on.
void watch_uses(bool on);
// Makes lost variables' bytes again, or rehearses that. The thread holds neither mutex. If `iteration`, which the variables are of,
// is over, they are not lost any more. Throws what calls throw; then the variables are as lost as before.
void make_again(const std::vector<VariableId>& wanted, Loss loss, uint64_t iteration);
// The same by a thread that holds `remaking`, which no iteration ends without.
void make_again_alone(const std::vector<VariableId>& wanted, Loss loss);
// Frees what the program freed before and nobody needs any more. The thread does not hold `books`.
void free_needless();
// Reads a variable's bytes in a function that is no part of the sequence.
uint64_t hash_of_variable(char* address, uint64_t bytes);

}  // namespace ooc_torch
