// Three tiers: blocks of host copies between host memory and the file below it, one at a time in each direction and
// thread. The lock is given up while the disk works; what must not happen to a block meanwhile is told by its region's
// `shift` (nobody else shifts it), `lifted` and `moving` (it does not go down).
#include <cerrno>
#include <chrono>

#include "clock.h"
#include "host_copies.h"

namespace ooc {
namespace {

struct Waiting {
  Waiting(uint32_t& all, bool counts) : all_(all), one_(counts ? 1 : 0) { all_ += one_; }
  ~Waiting() { all_ -= one_; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  uint32_t& all_;
  uint32_t one_;
};

}  // namespace

// The block that should go down first: the one whose variable is used furthest from now, and of those that are as far the
// oldest. Null if all are needed where they are. With `lifted` it is one that came up for somebody who waits for room on
// the device: where that takes a copy out, the block has to come up again.
Region* HostCopies::next_to_leave(bool lifted) const {
  Region* best = nullptr;
  uint64_t furthest = 0;
  for (Region* region = table_.oldest(); region != nullptr; region = region->newer) {
    if (region->host == nullptr || region->shift != nullptr || region->moving > 0) continue;
    if (region->lifted > 0 && !lifted) continue;
    if (std::ranges::any_of(region->slots, &Slot::host_mapped)) continue;
    const uint64_t next = scheduler_ != nullptr ? scheduler_->next_use(region) : Scheduler::kUnknown;
    if (best != nullptr && next <= furthest) continue;
    best = region;
    furthest = next;
  }
  return best;
}

// For how many seconds it is worth waiting for a block that cannot go down now. What is under way ends; who had a block
// brought up may wait for the one who waits here.
double HostCopies::patience(const Region* waiting) const {
  double result = 0;
  for (Region* region = table_.oldest(); region != nullptr; region = region->newer) {
    if (region == waiting) continue;
    if (region->shift != nullptr || (region->host != nullptr && region->moving > 0)) return std::min(kPatienceUnderWay, device_.wait_limit());
    if (region->host != nullptr && region->lifted > 0) result = kPatience;
  }
  return result;
}

// Host memory for the region's block; null if there is none to be had, or the variable is gone. What a plan brings up ahead
// of use takes none while somebody waits.
char* HostCopies::memory_for(Lock& lock, const RegionHandle& handle, For what) {
  if (what == For::kPlannedUp && waiting_ > 0) return nullptr;
  const Waiting waiting(waiting_, what != For::kPlannedUp);
  const uint64_t bytes = handle.region->bytes;
  const bool may_reclaim = what == For::kOut;
  const uint64_t failures = refusals();
  double waited = 0;  // seconds
  const auto wait = [&] {
    const double began = now_seconds();
    changed_.wait_for(lock, std::chrono::milliseconds(20));
    return now_seconds() - began;
  };
  while (!device_.lost() && handle.get() != nullptr) {
    device_.bind_thread();  // the arena pins what it takes
    char* block = arena_.allocate(bytes);
    if (block == nullptr && reclaim(bytes, false)) block = arena_.allocate(bytes);
    if (block != nullptr) return block;
    if (what == For::kPlannedUp) return nullptr;
    if (scheduler_ != nullptr && scheduler_->host_relief_coming(handle.region)) {
      wait();
      continue;
    }
    if (may_reclaim && reclaim(bytes, true)) continue;
    Region* victim = next_to_leave(false);
    const bool lifted = victim == nullptr && (what == For::kOut || waited > kPatience / 4);
    if (lifted) victim = next_to_leave(true);
    if (victim != nullptr && send_down(lock, victim, lifted)) continue;
    if (refusals() > failures) return nullptr;  // the disk was asked several times already
    if (victim != nullptr && victim->host != nullptr && victim->below == nullptr) return nullptr;  // the disk is full
    if (waited >= (victim != nullptr ? kPatience : patience(handle.region))) return nullptr;  // at once where nothing can change
    waited += wait();
  }
  return nullptr;
}

bool HostCopies::make_memory(Lock& lock, Region* region, bool may_reclaim) {
  const RegionHandle handle{region, region->generation};
  if (is_below(region) || region->shift != nullptr) return bring_up(lock, region, true);  // what is valid there stays so
  char* block = memory_for(lock, handle, may_reclaim ? For::kOut : For::kWriteBack);
  if (handle.get() == nullptr) {
    if (block != nullptr) arena_.free(block, region->bytes);
    return true;
  }
  if (block == nullptr) return false;
  if (region->host != nullptr || is_below(region)) {  // another thread was faster
    arena_.free(block, region->bytes);
    return true;
  }
  region->host = block;
  if (wait_for_block(region)) return true;
  arena_.free(block, region->bytes);
  region->host = nullptr;
  return false;
}

// What freed blocks of this memory are still read for.
bool HostCopies::host_waits_for_block(const char* start, uint64_t bytes) {
  for (const Pending& block : pending_)
    if (block.start < start + bytes && start < block.start + block.bytes && !streams_.host_waits(block.after, Edge::kInBeforeHost))
      return false;
  return true;
}

// Copies a region's block from one place to the other, with the lock given up.
HostCopies::Shifted HostCopies::carry_over(Lock& lock, Region* region, char* memory, Direction direction) {
  const auto shift = std::make_shared<Shift>(Shift{region, memory, region->below, region->bytes, direction});
  region->shift = shift.get();
  shifts_.push_back(shift);
  const double began = now_seconds();
  lock.unlock();
  shift->transfer = disk_->start(direction, memory, DiskFile::whole_pages(shift->bytes), space_->file_offset(shift->below));
  constexpr double kGlance = 0.25;  // seconds
  const double until = now_seconds() + device_.wait_limit();
  int error = ETIMEDOUT;
  while (error == ETIMEDOUT && now_seconds() < until) error = disk_->wait(*shift->transfer, kGlance);
  lock.lock();
  (direction == Direction::kIn ? read_seconds_ : write_seconds_) += now_seconds() - began;
  if (error == ETIMEDOUT) {
    shift->stalled = true;
    device_.lose("the disk with OOC_DISK=" + file_->folder() + " did not end a transfer within " +
                 std::to_string(device_.wait_limit()) + " seconds");
    return Shifted::kStalled;
  }
  std::erase(shifts_, shift);
  changed_.notify_all();
  if (shift->region == nullptr) {
    free_blocks(*shift);
    return Shifted::kFreed;
  }
  region->shift = nullptr;
  return error == 0 && !shift->written ? Shifted::kDone : Shifted::kFailed;
}

bool HostCopies::bring_up(Lock& lock, Region* region, bool evict) {
  const RegionHandle handle{region, region->generation};
  while (handle.get() != nullptr && region->shift != nullptr && !device_.lost())
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  if (handle.get() == nullptr || !is_below(region)) return true;
  if (device_.lost()) return false;
  char* block = memory_for(lock, handle, evict ? For::kUp : For::kPlannedUp);
  const bool wanted = handle.get() != nullptr && is_below(region) && region->shift == nullptr;
  if (block == nullptr) return !wanted;
  if (!wanted || !host_waits_for_block(block, region->bytes)) {
    arena_.free(block, region->bytes);
    return handle.get() == nullptr || (!is_below(region) && region->shift == nullptr) || (!wanted && bring_up(lock, region, evict));
  }
  const Shifted shifted = carry_over(lock, region, block, Direction::kIn);
  if (shifted == Shifted::kDone) region->host = block;
  if (shifted == Shifted::kFailed) arena_.free(block, region->bytes);
  return shifted == Shifted::kDone || shifted == Shifted::kFreed;
}

bool HostCopies::send_down(Lock& lock, Region* region, bool lifted) {
  const auto needed = [&] { return (region->lifted > 0 && !lifted) || region->moving > 0; };
  if (region->host == nullptr || region->shift != nullptr || needed()) return false;
  if (region->host_valid > 0 && !region->below_valid) {
    if (region->below == nullptr) region->below = space_->allocate(region->bytes);
    if (region->below == nullptr || device_.lost() || !streams_.host_waits(region->order.out, Edge::kUseBeforeOut)) return false;
    const Shifted shifted = carry_over(lock, region, region->host, Direction::kOut);
    if (shifted == Shifted::kFreed) return true;
    if (shifted != Shifted::kDone) return false;
    region->below_valid = true;
    if (needed()) return false;
  }
  const bool valid = region->below_valid;
  char* below = region->below;
  release_block(region);
  region->below = below;
  region->below_valid = valid;
  return true;
}

// The region has no block in the file any more. While the disk is at one, both blocks are the shift's, and go with it.
void HostCopies::release_below(Region* region) {
  if (region->shift != nullptr) {
    std::exchange(region->shift, nullptr)->region = nullptr;
    region->host = region->below = nullptr;
  }
  if (region->below != nullptr) space_->free(std::exchange(region->below, nullptr), region->bytes);
  region->below_valid = false;
}

void HostCopies::free_blocks(const Shift& shift) {
  arena_.free(shift.memory, shift.bytes);
  space_->free(shift.below, shift.bytes);
}

bool HostCopies::end_stalled() {
  if (!disk_idle()) return false;
  std::erase_if(shifts_, [this](const std::shared_ptr<Shift>& shift) {
    if (!shift->stalled) return false;
    if (shift->region == nullptr) free_blocks(*shift);
    else if (shift->direction == Direction::kIn) arena_.free(shift->memory, shift->bytes);  // as if it had failed
    if (shift->region != nullptr) shift->region->shift = nullptr;
    return true;
  });
  return true;
}

}  // namespace ooc
