#include "recompute.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "operators.h"
#include "recompute_state.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

Recompute& recompute() {
  static auto* state = new Recompute;  // it outlives every tensor
  return *state;
}

Role Recompute::role(uint32_t function) {
  const auto [entry, fresh] = known_roles.try_emplace(function, Role::kNever);
  if (fresh) {
    const std::string_view name = ooc_core_function_name(core, function);
    const bool into_argument = name.ends_with(".out") || name.ends_with("_out");
    const auto found = roles.find(std::string(name.substr(0, name.find('.'))));
    if (found != roles.end() && !into_argument) entry->second = found->second;
  }
  return entry->second;
}

uint32_t Recompute::again_id(uint32_t function) {
  const auto [entry, fresh] = again.try_emplace(function, 0);
  if (fresh) entry->second = ooc_core_function_id(core, (std::string(ooc_core_function_name(core, function)) + " again").c_str());
  return entry->second;
}

bool Recompute::stays(VariableId id) const {
  const Variable& b = history.variable(id);
  if (b.users > 0 || b.dropped) return b.users > 0;
  if (in_slab(b.address) && !ends && !b.readers[b.version].empty()) return true;  // it is small: it stays for any call
  return (schedule != nullptr && follower.position() < b.lingers) || !history.stranded_without(history.current(id), Loss::kReal).empty();
}

std::vector<std::shared_ptr<const KeptCall>> Recompute::forget_iteration() {
  history.clear();
  announced.clear();
  made.clear();
  rehearsed.clear();
  schedule = nullptr;
  ++iteration;
  return std::exchange(calls, {});
}

namespace {

constexpr size_t kMostForOne = 24;  // calls for one drop where everything is dropped

bool in(const std::vector<VariableId>& variables, VariableId id) { return std::find(variables.begin(), variables.end(), id) != variables.end(); }

// ---- dropping -------------------------------------------------------------------------------------------------------

// A variable whose bytes may be given up, how many calls may make them again, and whether it fleets then.
struct Due {
  VariableId variable;
  size_t most;
  bool fleeting = false;
};

bool may_drop(const Recompute& r, const Due& due) {
  const Variable& b = r.history.variable(due.variable);
  if (!b.there || b.freed || b.dropped || b.exposed) return false;
  for (const auto& [thread, used] : r.announced)  // another thread has begun to use it, or is about to
    if (thread != &remaking_thread && in(used, due.variable)) return false;
  return r.history.repeats({r.history.current(due.variable)}, Loss::kReal, due.variable, due.most).has_value();
}

// Gives up the bytes of those that can be made again. The books are not held; `iteration` is the one that the variables are of.
void drop(Recompute& r, uint64_t iteration, const std::vector<Due>& all) {
  for (const Due& due : all) {
    const std::unique_lock<std::mutex> alone(r.remaking, std::try_to_lock);
    if (!alone) return;  // another thread makes something again, perhaps of this
    uint64_t hash = 0;
    if (r.checks) {
      std::unique_lock<std::mutex> lock(r.books);
      if (r.iteration != iteration || !may_drop(r, due)) continue;
      Variable& b = r.history.variable(due.variable);
      const auto [address, bytes] = std::pair(b.address, b.bytes);
      ++b.users;  // another thread that frees it leaves it where it is
      lock.unlock();
      const auto used = c10::make_scope_exit([&] {
        const std::lock_guard<std::mutex> again(r.books);
        --r.history.variable(due.variable).users;  // the iteration goes on as long as this thread has `remaking`
      });
      hash = hash_of_variable(address, bytes);
    }
    const std::lock_guard<std::mutex> lock(r.books);
    if (r.iteration != iteration || !may_drop(r, due)) continue;  // another thread ended the iteration, or uses it
    Variable& b = r.history.variable(due.variable);
    if (ooc_core_discard(core, b.address) != OOC_OK) continue;
    b.dropped = true;
    b.fleeting = due.fleeting;
    b.hash = hash;
    ++r.figures.drops;
    r.figures.dropped_bytes += b.bytes;
  }
}

// What is given up before a function begins, and what is rehearsed before it, as nothing will use it.
struct DueNow {
  std::vector<Due> drops;
  std::vector<VariableId> rehearsals;
};

// What the schedule drops before the function that has just begun; in a rehearsal it is only noted.
void add_scheduled(Recompute& r, const std::vector<VariableId>& used, DueNow& due) {
  const uint32_t position = r.follower.position();
  auto& drops = r.schedule->drops;
  auto drop = std::partition_point(drops.begin(), drops.end(), [=](const ScheduledDrop& d) { return d.after + 2 < position; });
  for (; drop != drops.end() && drop->after + 2 == position; ++drop) {
    const auto made = r.made.find(drop->made_by);
    if (drop->refused || made == r.made.end() || drop->number >= made->second.size()) continue;
    const VariableId id = made->second[drop->number];
    if (id == kNoId || in(used, id)) continue;
    if (!r.schedule->rehearsing) {
      due.drops.push_back({id, SIZE_MAX, drop->fleeting});
    } else if (may_drop(r, {id, SIZE_MAX})) {
      r.history.variable(id).rehearsed = true;
      r.history.variable(id).fleeting = drop->fleeting;
      r.rehearsed[id] = &*drop;
      if (drop->final) due.rehearsals.push_back(id);
    }
  }
}

// ---- uses -----------------------------------------------------------------------------------------------------------

// What has to be made again before these operands are used: what is lost of them, and what needs what they overwrite.
void find_wanted(const Recompute& r, const ooc_operand* operands, uint32_t count, std::vector<VariableId>& wanted,
                 std::vector<VariableId>& rehearsed) {
  for (uint32_t i = 0; i < count; ++i) {
    const VariableId id = r.history.find(operands[i].address);
    if (id == kNoId) continue;
    if (r.history.variable(id).dropped && !in(wanted, id)) wanted.push_back(id);
    if (r.history.variable(id).rehearsed && !in(rehearsed, id)) rehearsed.push_back(id);
    if ((operands[i].access & OOC_WRITE) == 0) continue;
    for (const VariableId stranded : r.history.stranded_without(r.history.current(id), Loss::kReal))
      if (!in(wanted, stranded)) wanted.push_back(stranded);
  }
}

void note_writes(Recompute& r, const ooc_operand* operands, uint32_t count, bool exposes) {
  std::vector<VariableId> written;
  for (uint32_t i = 0; i < count; ++i) {
    if ((operands[i].access & OOC_WRITE) == 0) continue;
    const VariableId id = r.history.find(operands[i].address);
    if (id == kNoId || in(written, id)) continue;
    written.push_back(id);
    r.history.write(id);
    if (exposes) r.history.variable(id).exposed = true;
  }
}

// The function counts for the schedule, if it is one of its sequence; gives what is due before it.
DueNow begin_function(Recompute& r, uint32_t function, const std::vector<VariableId>& used) {
  RemakingThread& thread = remaking_thread;
  DueNow due;
  if (r.follower.any() && ooc_core_records(core) != 0) {
    r.schedule = r.follower.advance(function);
    thread.advanced = true;
    thread.keep_position = r.follower.position() - 1;
    if (r.schedule != nullptr) {
      if (r.schedule->kept[thread.keep_position]) {
        thread.keep = function;
        thread.makes_lingering = r.schedule->makes_lingering(thread.keep_position);
      }
      add_scheduled(r, used, due);
    }
  }
  if (r.everything) {
    thread.keep = function;
    if (thread.iteration == r.iteration)
      for (const VariableId id : thread.last)
        if (!in(used, id)) due.drops.push_back({id, kMostForOne});
    thread.iteration = r.iteration;
    thread.last = used;
  }
  if (!thread.keep) return due;
  thread.keep_role = r.role(function);
  if (thread.keep_role == Role::kNever && !thread.makes_lingering) thread.keep.reset();
  return due;
}

void before_use(uint32_t function, const ooc_operand* operands, uint32_t count) {
  RemakingThread& thread = remaking_thread;
  Recompute& r = recompute();
  const bool is_function = function != OOC_NO_FUNCTION;
  thread.keep.reset();
  thread.makes_lingering = false;
  thread.advanced = false;
  std::unique_lock<std::mutex> lock(r.books);
  std::vector<VariableId> used;
  for (uint32_t i = 0; i < count; ++i)
    if (const VariableId id = r.history.find(operands[i].address); id != kNoId && !in(used, id)) used.push_back(id);
  r.announced[&thread] = used;
  DueNow due;
  if (is_function) due = begin_function(r, function, used);
  if (!due.drops.empty()) {
    const uint64_t iteration = r.iteration;
    lock.unlock();
    drop(r, iteration, due.drops);
    lock.lock();
  }
  while (true) {
    std::vector<VariableId> wanted, rehearsed = std::exchange(due.rehearsals, {});
    find_wanted(r, operands, count, wanted, rehearsed);
    if (wanted.empty() && rehearsed.empty()) break;
    const uint64_t iteration = r.iteration;
    lock.unlock();
    if constexpr (kWithCuda)
      TORCH_CHECK(!on_cuda() || !cuda_capturing(), "a graph is captured that uses memory which is made again before its next use; capture "
                  "it with torch.cuda.graph, or set OOC_RECOMPUTE=off");
    TORCH_CHECK(ooc_core_in_function(core) == 0, "a variable that is made again before its next use was used within a function that did "
                "not have it as an operand; OOC_RECOMPUTE=off leaves variables as they are");
    if (!rehearsed.empty()) make_again(rehearsed, Loss::kRehearsed, iteration);
    if (!wanted.empty()) make_again(wanted, Loss::kReal, iteration);
    lock.lock();
  }
  note_writes(r, operands, count, !is_function);
}

// As a status of the core what `act` throws.
template <class Act>
int told(Act act) {
  if (remaking_thread.busy) return OOC_OK;
  try {
    act();
    return OOC_OK;
  } catch (const c10::OutOfMemoryError& error) {
    return ooc_refuse(OOC_OUT_OF_MEMORY, error.what_without_backtrace());
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    return ooc_refuse(OOC_INVALID, known != nullptr ? known->what_without_backtrace() : error.what());
  }
}

int told_of_use(uint32_t function, const ooc_operand* operands, uint32_t count) {
  return told([=] { before_use(function, operands, count); });
}

int told_of_budget() { return told(forget_iteration); }

int told_of_free(void* address) {
  if (remaking_thread.frees || !owned(address)) return 0;
  Recompute& r = recompute();
  std::unique_lock<std::mutex> lock(r.books);
  const VariableId id = r.history.find(address);
  if (id == kNoId || r.history.variable(id).address != address) return 0;
  Variable& b = r.history.variable(id);
  if (r.stays(id)) {
    b.freed = true;
    r.lingering.push_back(id);
    ++r.figures.late_frees;
    return 1;
  }
  const bool frees_inputs = b.dropped && !r.lingering.empty();
  r.rehearsed.erase(id);
  r.history.forget_memory(id);
  lock.unlock();
  if (frees_inputs) free_needless();
  return 0;
}

constexpr ooc_watcher kWatcher{told_of_use, told_of_free, told_of_budget};

}  // namespace

void watch_uses(bool on) {
  recomputing = on;
  if (core != nullptr) ooc_core_watch_uses(core, on ? &kWatcher : nullptr);
}

// ---- calls ----------------------------------------------------------------------------------------------------------

void function_did_not_begin() {
  RemakingThread& thread = remaking_thread;
  if (!thread.advanced || thread.busy) return;
  Recompute& r = recompute();
  const std::lock_guard<std::mutex> lock(r.books);
  r.follower.take_back();
  thread.advanced = false;
}

void Keeping::begin(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
                    const torch::jit::Stack& stack, bool on_host) {
  RemakingThread& thread = remaking_thread;
  if (!thread.keep || *thread.keep != info.id || thread.busy || in_mode(kRanges)) return;
  thread.keep.reset();
  if (on_host) return;
  Recompute& r = recompute();
  std::shared_ptr<KeptCall> call;  // it goes without the lock, as its copies do
  if (thread.keep_role != Role::kNever) call = KeptCall::of(op, info, thread.keep_role, keys, stack);
  {
    const std::lock_guard<std::mutex> lock(r.books);
    if (call && call->find_versions(r.history)) call_ = call;
    iteration_ = r.iteration;
    position_ = thread.keep_position;
  }
  if (!call_ && !thread.makes_lingering) return;
  if (!call_) call_ = std::make_shared<KeptCall>(op, info, keys);
  memory_ = std::make_unique<CallMemory>();
  during_.emplace(memory_.get());
}

void Keeping::finish(const torch::jit::Stack& stack) {
  during_.reset();
  call_->allocations = memory_->take();
  memory_.reset();
  Recompute& r = recompute();
  const std::lock_guard<std::mutex> lock(r.books);
  if (iteration_ != r.iteration) return;
  History& history = r.history;
  if (call_->role == Role::kLink && history.current(call_->target.variable) != call_->target) return;  // another thread wrote it
  const CallId id = call_->role == Role::kNever ? kNoId : history.new_call();
  for (const Version& version : call_->reads()) history.read(id, version);
  if (call_->role == Role::kLink) history.written_by(call_->target.variable, id);
  const std::vector<at::Tensor> results = KeptCall::tensors_of(stack, call_->op.schema().returns().size());
  std::vector<VariableId>& made = r.made[position_];
  for (size_t i = 0; call_->role != Role::kLink && i < call_->allocations.size(); ++i) {
    const Allocation& allocation = call_->allocations[i];
    if (!owned(allocation.address) || in_slab(allocation.address)) continue;
    const auto lies_there = [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.has_storage() && is_variable(tensor.storage()) && tensor.storage().data() == allocation.address;
    };
    const auto result = std::find_if(results.begin(), results.end(), lies_there);
    made.push_back(kNoId);
    if (result == results.end() || result->storage().nbytes() != allocation.bytes) continue;
    made.back() = history.add_made(allocation.address, allocation.bytes, id);
    if (r.schedule != nullptr)
      if (const auto linger = r.schedule->lingers.find({position_, made.size() - 1}); linger != r.schedule->lingers.end())
        history.variable(made.back()).lingers = linger->second + 1;
    call_->outputs.push_back({{made.back(), 0}, static_cast<size_t>(result - results.begin()), i});
    if (r.everything) remaking_thread.last.push_back(made.back());
  }
  if (id == kNoId) return;
  if (r.calls.size() <= static_cast<size_t>(id)) r.calls.resize(static_cast<size_t>(id) + 1);
  r.calls[static_cast<size_t>(id)] = call_;
}

}  // namespace ooc_torch
