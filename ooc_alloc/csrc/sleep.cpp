// Sleep: everything that no user reaches leaves the device, whose memory goes back to the driver; addresses and values
// stay. Slabs, which never leave otherwise, leave as regions at their addresses. Whoever begins a function, allocates or
// pins wakes the core. What was on the device comes back with wake(); else it comes on demand.
#include <algorithm>

#include "clock.h"
#include "core.h"
#include "last_error.h"

namespace ooc {

// While one exists, no function begins. However it ends, others are told.
class Core::Changing {
 public:
  explicit Changing(Core& core) : core_(core) { core_.paused_ |= kChanges; }
  ~Changing() {
    core_.paused_ &= ~kChanges;
    core_.changed_.notify_all();
  }
  Changing(const Changing&) = delete;
  Changing& operator=(const Changing&) = delete;

 private:
  Core& core_;
};

int Core::sleep(uint64_t* held_bytes) {
  const RelaxedCaptures relaxed(streams_.capturable());
  ThreadState& thread = thread_state();
  Lock lock(mutex_);
  if (thread.in_function) return fail(OOC_INVALID, "the device cannot go to sleep within a function");
  while ((paused_ & (kForks | kChanges)) != 0) wait_a_while(lock);
  if (detached_) return fail(OOC_INVALID, "the device is not used any more: nothing is on it");
  *held_bytes = pool_.created() * geometry_.chunk_bytes;
  if (asleep()) return OOC_OK;
  const Changing changing(*this);
  holds_.release(thread.held);
  const double until = now_seconds() + device_.wait_limit();
  const auto busy = [&] { return threads_.active() > 0 || moves(); };
  while (busy() && now_seconds() < until && !device_lost(lock)) wait_a_while(lock);
  int status = OOC_OK;
  if (device_lost(lock) || !streams_.host_waits_for_all()) status = fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  else if (busy()) status = fail(OOC_INVALID, "functions of other threads did not end: put the device to sleep between them");
  if (status == OOC_OK) status = lay_down(lock);
  *held_bytes = pool_.created() * geometry_.chunk_bytes;
  return status;
}

int Core::lay_down(Lock& lock) {
  paused_ |= kAsleep;  // until slabs are back, whatever fails
  release_idle_threads();
  awake_.clear();
  for (Region* region = table_.oldest(); region != nullptr; region = region->newer)
    each_run(Piece::whole(region), &Slot::resident, [&](const Piece& run, bool resident) {
      Hold hold{{region, region->generation}};
      hold.first = run.first;
      hold.count = run.count;
      if (resident) awake_.push_back(hold);
      return true;
    });
  slabs_.each_leaving(geometry_.piece_chunks, [this](uint64_t first, const std::vector<Chunk>& memory) {
    const auto count = static_cast<uint32_t>(memory.size());
    Region* region = table_.lay_over(geometry_.region_chunks + first, count);
    for (uint32_t i = 0; i < count; ++i) region->slots[i].put(memory[i], SlotState::kResident);
    table_.gained(region, count);
    slabs_away_.push_back(region);
  });
  int status = OOC_OK;
  bool moved = true;
  while (moved && status == OOC_OK && !device_lost(lock)) {
    status = evict_unpinned(lock);
    moved = moves();  // of threads that waited for host memory when no function began any more
    while (moves() && !device_lost(lock)) wait_a_while(lock);
  }
  idle_.reclaim_all();
  mappings_.bury_all();
  mappings_.vacate_all();
  pool_.release_free();
  uint64_t stuck = 0;
  for (Region* region = table_.oldest(); region != nullptr; region = region->newer) {
    if (region->pins > 0 || region->resident == 0) continue;
    if (stuck == 0) (void)host_.ensure_at_once(region);  // once more, for the reason
    stuck += region->resident;
  }
  if (status == OOC_OK && stuck == 0) return OOC_OK;
  const std::string why = status != OOC_OK ? std::string(last_error_text())
                                           : std::to_string(stuck * geometry_.chunk_bytes) +
                                                 " bytes cannot leave the device: " + host_.describe() +
                                                 (refusal_count() > 0 ? "; " + refused() : "");
  const std::vector<Hold> awake = std::exchange(awake_, {});
  if (const int failed = take_up_slabs(lock)) return failed;
  bring_back(lock, awake);
  return fail(status != OOC_OK ? status : static_cast<int>(OOC_OUT_OF_MEMORY), why);
}

int Core::wake(uint64_t* back_bytes) {
  const RelaxedCaptures relaxed(streams_.capturable());
  ThreadState& thread = thread_state();
  Lock lock(mutex_);
  *back_bytes = 0;
  if (detached_ || thread.in_function) return OOC_OK;
  const uint64_t before = transitions_.counted().swap_in_bytes;
  const std::vector<Hold> awake = awake_;
  const int status = pass_pause(lock);
  if (status == OOC_OK) bring_back(lock, awake);
  *back_bytes = transitions_.counted().swap_in_bytes - before;
  return status;
}

// Waits until functions may begin; wakes a core that sleeps.
int Core::pass_pause(Lock& lock) {
  while ((paused_ & ~kDetached) != 0) {
    if (paused_ != kAsleep) {
      wait_a_while(lock);
      continue;
    }
    const Changing changing(*this);
    awake_.clear();
    if (const int status = take_up_slabs(lock)) return status;
  }
  return OOC_OK;
}

// Regions that stand for slabs come to the device, and are slabs again. All or none.
int Core::take_up_slabs(Lock& lock) {
  std::vector<Hold> holds;
  for (Region* region : slabs_away_) holds.push_back({{region, region->generation}});
  for (const Hold& hold : holds) holds_.add(hold);
  int status = make_resident(lock, holds);
  for (const Region* region : slabs_away_)
    if (status == OOC_OK && !streams_.host_waits(Streams::arrival(region, 0, region->count), Edge::kInBeforeUse))
      status = fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  holds_.release(holds);
  if (status != OOC_OK) return status;
  for (Region* region : std::exchange(slabs_away_, {})) {
    const uint64_t first = region->first - geometry_.region_chunks;
    for (uint32_t i = 0; i < region->count; ++i) slabs_.come_back(first + i, region->slots[i].take());
    table_.lost(region, region->count);
    host_.invalidate(region);
    host_.release(region);
    table_.take_off(region);
  }
  paused_ &= ~kAsleep;
  return OOC_OK;
}

// As much of it as there is room for, what is used first before the rest.
void Core::bring_back(Lock& lock, std::vector<Hold> runs) {
  const auto next_use = [this](const Hold& run) {
    const Region* region = run.get();
    return scheduler_ == nullptr || region == nullptr ? Scheduler::kUnknown : scheduler_->next_use(region);
  };
  std::ranges::stable_sort(runs, {}, next_use);
  constexpr size_t kDepth = 2;
  std::vector<Transfer> transfers;
  const auto settle_down_to = [&](size_t most) {
    while (transfers.size() > most) {
      const Transfer oldest = transfers.front();
      transfers.erase(transfers.begin());
      settle(lock, oldest);
    }
  };
  bool room = true;
  for (const Hold& run : runs) {
    while (Region* region = room ? run.get() : nullptr) {
      const Piece piece = next_absent(region, run.first, run.first + run.count);
      if (piece.count == 0) break;
      if (host_.is_below(region)) {
        settle_down_to(0);
        room = host_.bring_up(lock, region, true);
      } else {
        room = move_in(lock, piece, transfers);
      }
      settle_down_to(kDepth);
    }
  }
  settle_down_to(0);
}

}  // namespace ooc
