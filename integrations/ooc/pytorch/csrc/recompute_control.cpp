// Recomputation as Python controls it (recompute.py): torch.ops.ooc.recompute_*.
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include "recompute_state.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

namespace {

// The books are held.
std::vector<VariableId> all_dropped(const Recompute& r) {
  std::vector<VariableId> found;
  for (VariableId id = 0; id < static_cast<VariableId>(r.history.variables().size()); ++id)
    if (r.history.variable(id).dropped) found.push_back(id);
  return found;
}

bool idle(Recompute& r) {
  const std::lock_guard<std::mutex> lock(r.books);
  return r.idle();
}

// Uses are watched as long as something is dropped, or may be.
void take_effect() {
  Recompute& r = recompute();
  std::unique_lock<std::mutex> lock(r.books);
  const bool needed = !r.idle() || !all_dropped(r).empty();
  lock.unlock();
  watch_uses(needed);
}

// Everything that is dropped is made again.
void make_all_again() {
  if (remaking_thread.busy) return;
  Recompute& r = recompute();
  std::unique_lock<std::mutex> lock(r.books);
  const std::vector<VariableId> dropped = all_dropped(r);
  const uint64_t iteration = r.iteration;
  lock.unlock();
  if (!dropped.empty()) make_again(dropped, Loss::kReal, iteration);
}

}  // namespace

void forget_iteration() {
  Recompute& r = recompute();
  std::vector<std::shared_ptr<const KeptCall>> calls;
  const std::lock_guard<std::mutex> alone(r.remaking);  // who waits for it finds that the iteration is over
  std::unique_lock<std::mutex> lock(r.books);
  const auto goes_on = c10::make_scope_exit([&] {  // before another thread sees the next iteration, or this one after an error
    if (!lock.owns_lock()) lock.lock();
    r.ends = false;
  });
  r.schedule = nullptr;
  r.ends = true;
  for (auto dropped = all_dropped(r); !dropped.empty() || !r.lingering.empty(); dropped = all_dropped(r)) {
    lock.unlock();
    make_again_alone(dropped, Loss::kReal);
    free_needless();
    lock.lock();
  }
  calls = r.forget_iteration();
}

namespace {

// Gives the schedule that the iteration has carried out, if it has.
std::optional<int64_t> iteration_ends() {
  Recompute& r = recompute();
  if (idle(r)) return std::nullopt;
  forget_iteration();
  std::unique_lock<std::mutex> lock(r.books);
  const bool dropped = r.figures.drops > r.drops_before;
  const std::optional<uint64_t> ended = r.follower.end_iteration(dropped);
  r.drops_before = r.figures.drops;
  const bool over = r.idle();  // the last schedule has ended
  lock.unlock();
  if (over) take_effect();
  return ended && dropped ? std::optional(static_cast<int64_t>(*ended)) : std::nullopt;
}

void set_roles(const c10::List<std::string>& makers, const c10::List<std::string>& links, const c10::List<std::string>& statistics) {
  Recompute& r = recompute();
  const std::lock_guard<std::mutex> lock(r.books);
  r.roles.clear();
  r.known_roles.clear();
  const auto add = [&r](const c10::List<std::string>& names, Role role) {
    for (const std::string& name : names) r.roles["aten::" + name] = role;
  };
  add(makers, Role::kMaker);
  add(links, Role::kLink);
  add(statistics, Role::kStatistics);
}

// `drops` has five numbers for each: made_by, number, after, final, fleeting. `lingers` has made_by, number, until.
void follow_schedule(int64_t fingerprint, const c10::List<std::string>& functions, at::IntArrayRef kept, at::IntArrayRef drops,
                     at::IntArrayRef lingers) {
  Schedule schedule;
  schedule.fingerprint = static_cast<uint64_t>(fingerprint);
  std::unordered_map<std::string, uint32_t> ids;
  for (const std::string& name : functions) {
    const auto [entry, fresh] = ids.try_emplace(name, 0);
    if (fresh) entry->second = ooc_core_function_id(core, name.c_str());
    schedule.functions.push_back(entry->second);
  }
  schedule.kept.assign(schedule.functions.size(), false);
  for (const int64_t function : kept) schedule.kept.at(static_cast<size_t>(function)) = true;
  for (size_t i = 0; i + 4 < drops.size(); i += 5)
    schedule.drops.push_back({static_cast<uint32_t>(drops[i]), static_cast<uint32_t>(drops[i + 1]), static_cast<uint32_t>(drops[i + 2]),
                              drops[i + 3] != 0, drops[i + 4] != 0});
  for (size_t i = 0; i + 2 < lingers.size(); i += 3)
    schedule.lingers[{static_cast<uint32_t>(lingers[i]), static_cast<uint32_t>(lingers[i + 1])}] = static_cast<uint32_t>(lingers[i + 2]);
  Recompute& r = recompute();
  {
    const std::lock_guard<std::mutex> lock(r.books);
    if (r.schedule != nullptr && r.schedule->fingerprint == schedule.fingerprint) r.schedule = nullptr;
    r.rehearsed.clear();  // it points into schedules, of which one may go
    r.follower.follow(std::move(schedule));
  }
  take_effect();
}

// One schedule is carried out no longer, or none is.
void leave_schedule(std::optional<int64_t> fingerprint) {
  Recompute& r = recompute();
  {
    const std::lock_guard<std::mutex> lock(r.books);
    r.schedule = nullptr;
    r.rehearsed.clear();
    if (fingerprint) r.follower.leave(static_cast<uint64_t>(*fingerprint));
    else r.follower.leave_all();
    if (!fingerprint) r.everything = false;
  }
  forget_iteration();
  take_effect();
}

void drop_everything(bool on) {
  recompute().everything = on;
  forget_iteration();
  take_effect();
}

void check_drops(bool on) { recompute().checks = on; }

std::vector<double> figures() {
  Recompute& r = recompute();
  const std::lock_guard<std::mutex> lock(r.books);
  const RemakeFigures& f = r.figures;
  return {static_cast<double>(f.drops), static_cast<double>(f.dropped_bytes), static_cast<double>(f.repeats),
          f.repeat_seconds, static_cast<double>(r.follower.refused()), static_cast<double>(f.late_frees)};
}

}  // namespace

}  // namespace ooc_torch

TORCH_LIBRARY_FRAGMENT(ooc, m) {
  using namespace ooc_torch;
  m.def("recompute_roles(str[] makers, str[] links, str[] statistics) -> ()", set_roles);
  m.def("recompute_follow(int fingerprint, str[] functions, int[] kept, int[] drops, int[] lingers) -> ()", follow_schedule);
  m.def("recompute_leave(int? fingerprint) -> ()", leave_schedule);
  m.def("recompute_iteration_ends() -> int?", iteration_ends);
  m.def("recompute_all_again() -> ()", make_all_again);
  m.def("recompute_everything(bool on) -> ()", drop_everything);
  m.def("recompute_check(bool on) -> ()", check_drops);
  m.def("recompute_figures() -> float[]", figures);
}
