// What of variables is in host memory: their blocks, which slots of them are valid, and which are used there in place.
// With a disk the blocks are in a file, and no memory is taken: the device's memory is the host's. With a disk and host
// memory there are three tiers (host_tiers.cpp): blocks are in host memory, in the file below it, or in both, and only
// what is in host memory is copied to and from the device.
//
// A block serves its next variable when the copies from it are done. For a function on host memory the block is a
// mappable one, and the addresses of slots without a chunk lead there; they go on leading there until a chunk comes in.
// Guarded by the core's lock.
//
//   used bytes of the arena == blocks of all regions
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "audit_check.h"
#include "device.h"
#include "disk_queue.h"
#include "geometry.h"
#include "host_arena.h"
#include "region_table.h"
#include "scheduler.h"
#include "streams.h"

namespace ooc {

using Lock = std::unique_lock<std::mutex>;  // of the core's mutex

// A block on its way between host memory and the file. Its variable may be freed meanwhile; then the blocks are the
// shift's, and go with it.
struct Shift {
  Region* region;  // null: the variable was freed
  char *memory, *below;
  uint64_t bytes;
  Direction direction;
  bool written = false;  // the block was written meanwhile
  bool stalled = false;  // the disk did not end it in time, and nobody waits for it any more
  std::shared_ptr<DiskTransfer> transfer{};
};

class HostCopies {
 public:
  // Throws std::runtime_error.
  HostCopies(const Geometry& geometry, const ooc_config& config, Device& device, Streams& streams, RegionTable& table,
             std::condition_variable& changed)
      : geometry_(geometry),
        device_(device),
        streams_(streams),
        table_(table),
        changed_(changed),
        tiered_(has_disk(config) && config.host_budget_bytes > 0),
        asked_bytes_(has_disk(config) && !tiered_ ? config.disk_budget_bytes : config.host_budget_bytes),
        file_(open_file(config, device)),
        disk_(file_ ? std::make_unique<DiskQueue>(file_, std::max(config.disk_depth, 1u)) : nullptr),
        arena_(device.driver(), device.device(), std::max(asked_bytes_, geometry.chunk_bytes), tiered_ ? nullptr : file_.get()),
        device_bytes_(config.budget_bytes) {
    if (tiered_)
      space_ = std::make_unique<HostArena>(device.driver(), device.device(),
                                           std::max(config.disk_budget_bytes, geometry.chunk_bytes), file_.get());
  }

  // A block for the region, if it has none. With `may_reclaim`, resident variables may lose theirs for it. Returns false
  // if there is no memory, or the device is lost; then nothing may be copied out. Where there are three tiers the lock
  // may be given up: whoever called looks again at what there is.
  [[nodiscard]] bool ensure(Lock& lock, Region* region, bool may_reclaim) {
    if (region->host != nullptr) return true;
    if (tiered_ && !make_memory(lock, region, may_reclaim)) return false;
    return tiered_ || ensure(region, may_reclaim);
  }
  [[nodiscard]] bool ensure(Region* region, bool may_reclaim) {
    if (region->host != nullptr) return true;
    device_.bind_thread();  // the arena pins what it takes
    if (wants_mappable(region)) region->host = arena_.allocate_mappable(region->bytes);
    if (region->host == nullptr) region->host = arena_.allocate(region->bytes);
    if (region->host == nullptr && may_reclaim && reclaim(region->bytes, true)) region->host = arena_.allocate(region->bytes);
    if (region->host == nullptr) return false;
    if (wait_for_block(region)) return true;
    arena_.free(region->host, region->bytes);
    region->host = nullptr;
    return false;
  }
  // Whether the region has a block in host memory without waiting for any. Who waits should hold no copies that only they
  // can settle: the blocks of those do not go down.
  [[nodiscard]] bool ensure_at_once(Region* region) {
    return region->host != nullptr || (!is_below(region) && region->shift == nullptr && ensure(region, false));
  }
  // Where copies out will soon need more of the system's memory, pins it with the lock given up, in one thread at a time.
  // Returns false if there is no need.
  bool pin_ahead(std::unique_lock<std::mutex>& lock) {
    if (!arena_.runs_low()) return false;
    const uint64_t before = arena_.committed();
    lock.unlock();
    arena_.grow_ahead();
    lock.lock();
    arena_.adopt();
    return arena_.committed() > before;
  }
  // The region has no block any more, and its addresses do not lead there.
  void release(Region* region) {
    if (tiered_) release_below(region);
    if (region->host != nullptr) release_block(region);
  }
  // Whether host memory, were it empty, is enough for the region's block.
  bool can_hold(const Region* region) const { return region->host != nullptr || region->bytes <= arena_.budget(); }
  // A resident variable goes without its copies, and its block serves others. False: it has none, or somebody needs it.
  bool drop_copies(Region* region) {
    if (region->host == nullptr || region->moving > 0 || !region->fully_resident()) return false;
    if (region->lifted > 0 || region->shift != nullptr) return false;
    invalidate(region);
    release(region);
    return true;
  }
  char* address(const Region* region, uint32_t slot) const { return region->host + slot * geometry_.chunk_bytes; }

  // ---- on a disk
  // Null where copies are in memory.
  DiskQueue* disk() const { return tiered_ ? nullptr : disk_.get(); }
  DiskFile* file() const { return file_.get(); }
  // Of slots' copies in the file; bytes in whole pages.
  uint64_t file_offset(const Region* region, uint32_t slot) const {
    if (tiered_) return space_->file_offset(region->below) + slot * geometry_.chunk_bytes;
    return arena_.file_offset(address(region, slot));
  }
  // Whether the region's block is in host memory.
  bool in_memory(const Region* region) const { return region->host != nullptr && !direct(); }
  uint64_t file_bytes(const Piece& slots) const {
    return DiskFile::whole_pages(geometry_.bytes_in(slots.region, slots.first, slots.count));
  }
  std::shared_ptr<DiskTransfer> start(Direction direction, const Piece& slots) {
    char* device = geometry_.address(slots.region, slots.first);
    return disk_->start(direction, device, file_bytes(slots), file_offset(slots.region, slots.first));
  }
  // Whether memory agrees with the copies of slots. Without the bytes at hand, their checksums are compared.
  bool agrees(const Piece& slots, const char* memory) const {
    if (direct()) return file_->agrees(memory, file_bytes(slots), file_offset(slots.region, slots.first));
    const uint64_t bytes = geometry_.bytes_in(slots.region, slots.first, slots.count);
    return std::memcmp(memory, address(slots.region, slots.first), bytes) == 0;
  }

  // ---- three tiers (host_tiers.cpp)
  bool tiered() const { return tiered_; }
  void set_scheduler(const Scheduler* scheduler) { scheduler_ = scheduler; }
  // Whether valid copies of the region are on the disk alone.
  bool is_below(const Region* region) const { return tiered_ && region->host == nullptr && region->host_valid > 0; }
  // Brings the block of such a region to host memory; with `evict` others go down for it. It returns with the lock, which
  // it gives up while the disk works. False: there is no room, or the disk failed.
  [[nodiscard]] bool bring_up(Lock& lock, Region* region, bool evict);
  // Sends the block of a region down, unless somebody needs it in host memory; with `lifted`, also if somebody had it
  // brought up. False: it is still there.
  bool send_down(Lock& lock, Region* region, bool lifted = false);
  // The block is about to be written by a copy out.
  void begin_write(Region* region) {
    region->below_valid = false;
    if (region->shift != nullptr) region->shift->written = true;
  }
  // While one exists, the region's block stays in host memory once it is there, unless a copy out finds no other room:
  // whoever gave up the lock looks again.
  class Lifted {
   public:
    explicit Lifted(Region* region) : handle_{region, region->generation} {
      if (region->live) ++region->lifted;
      else handle_ = {};
    }
    ~Lifted() {
      if (Region* region = handle_.get()) --region->lifted;
    }
    Lifted(const Lifted&) = delete;
    Lifted& operator=(const Lifted&) = delete;

   private:
    RegionHandle handle_;
  };
  // Whether the disk has ended what it began; then what a stall had held is given back.
  bool end_stalled();
  // Whether a block is on its way, and somebody waits for it.
  bool shifting() const {
    return std::ranges::any_of(shifts_, [](const auto& shift) { return !shift->stalled; });
  }
  bool disk_idle() const { return disk_ == nullptr || disk_->idle(); }
  void before_fork() {
    if (disk_) disk_->before_fork();
  }
  void after_fork(bool in_child) {
    if (disk_) disk_->after_fork(in_child);
  }

  // Failures of the disk; none without one.
  uint64_t refusals() const { return file_ ? file_->failures() : 0; }
  // Bytes from an address of a block that one copy can take. May be called without the lock.
  uint64_t extent_left(const char* address) const { return arena_.extent_left(address); }

  // The copies of some slots are valid, or none is.
  void validate(const Piece& slots) {
    for (Slot& slot : slots.slots()) slot.host_valid = true;
    slots.region->host_valid += slots.count;
  }
  void invalidate(Region* region) {
    if (region->host_valid == 0) return;
    for (Slot& slot : region->slots) slot.host_valid = false;
    region->host_valid = 0;
  }
  // Somebody writes resident slots: their copies are worth nothing any more, nor are those that are being made.
  void written(Region* region, uint32_t first, uint32_t count) {
    if (region->host_valid > 0 || region->moving > 0) forget(region, first, count);
  }
  void written(Region* region) { written(region, 0, region->count); }

  // ---- in place
  // Throws std::runtime_error if the driver has no memory that can be mapped in place.
  void prepare_in_place() {
    if (!direct()) arena_.prepare_mappable(device_.device(), geometry_.chunk_bytes);
  }
  // Moves the block of a region, of which nothing moves, to mappable memory. Returns false if there is none left.
  bool make_mappable(Region* region) {
    if (region->host != nullptr && (direct() || arena_.is_mappable(region->host))) return true;
    if (direct()) return ensure(region, true);
    char* block = arena_.allocate_mappable(region->bytes);
    if (block == nullptr) return false;
    for (uint32_t i = 0; i < region->count; ++i) {
      const uint64_t offset = i * geometry_.chunk_bytes, bytes = geometry_.bytes_in(region, i, 1);
      if (region->slots[i].host_valid) std::memcpy(block + offset, region->host + offset, bytes);
    }
    release(region);
    region->host = block;
    return wait_for_block(region);
  }
  // The addresses of slots without a chunk lead to the block, which is mappable. Returns false if the driver refused.
  bool show(const Piece& slots) {
    Region* region = slots.region;
    begin_write(region);
    return each_run(slots, &Slot::host_mapped, [&](const Piece& run, bool shown) {
      if (shown) return true;
      if (!show_run(run)) return false;
      for (Slot& slot : run.slots()) {
        slot.host_mapped = true;
        slot.state = SlotState::kSwapped;  // also if it was blank: its bytes are in host memory now, whatever they are
        if (!slot.host_valid) ++region->host_valid;
        slot.host_valid = true;
      }
      return true;
    });
  }
  // The addresses lead to no block any more. Returns false if the driver refused.
  bool hide(const Piece& slots) {
    return each_run(slots, &Slot::host_mapped, [&](const Piece& run, bool shown) {
      if (!shown) return true;
      if (!hide_run(run)) return false;
      for (Slot& slot : run.slots()) slot.host_mapped = false;
      return true;
    });
  }

  uint64_t used() const { return arena_.used(); }
  uint64_t budget() const { return arena_.budget(); }
  bool refused_by_system() const { return arena_.refusal() == Refusal::kSystem; }
  // Where there are three tiers, host memory is short only when the disk is.
  std::string describe() const {
    return tiered_ && space_->refusal() != Refusal::kNone ? space_->describe() : arena_.describe();
  }
  void fill(ooc_stats& stats) const;
  std::string audit() const;

 private:
  struct Pending {  // a block that was freed while copies from it were under way
    const char* start;
    uint64_t bytes;
    Moments after;
  };
  static bool has_disk(const ooc_config& config) { return config.disk_folder != nullptr && *config.disk_folder != '\0'; }
  static std::shared_ptr<DiskFile> open_file(const ooc_config& config, const Device& device) {
    if (!has_disk(config)) return nullptr;
    if (config.host_budget_bytes == 0 && (!device.host_accessible() || config.asynchronous != 0))
      throw std::runtime_error("a disk alone (OOC_DISK) serves devices whose memory is the host's (OOC_ALLOC=cpu); a GPU needs "
                               "host memory between: set OOC_HOST_BUDGET");
    return std::make_shared<DiskFile>(config.disk_folder, config.disk_budget_bytes, config.strict != 0);
  }
  bool direct() const { return file_ != nullptr && !tiered_; }
  // Whether to try mappable memory at once, which this prepares: where functions run on the host, a variable larger than
  // the device is often used in place, and need not be moved for it.
  bool wants_mappable(const Region* region) {
    if (region->bytes <= device_bytes_ || !device_.host_accessible() || direct() || !mappable_) return false;
    try {
      prepare_in_place();
    } catch (const std::runtime_error&) {
      mappable_ = false;
    }
    return mappable_;
  }
  static constexpr double kPatience = 2, kPatienceUnderWay = 60;  // seconds of waiting before giving up
  bool make_memory(Lock& lock, Region* region, bool may_reclaim);
  enum class For { kPlannedUp, kUp, kOut, kWriteBack };  // what host memory is wanted for
  char* memory_for(Lock& lock, const RegionHandle& handle, For what);
  Region* next_to_leave(bool lifted) const;
  double patience(const Region* waiting) const;
  enum class Shifted { kDone, kFailed, kFreed, kStalled };  // kFreed: the variable is gone; kStalled: the shift stays
  Shifted carry_over(Lock& lock, Region* region, char* memory, Direction direction);
  void release_below(Region* region);
  void free_blocks(const Shift& shift);
  [[nodiscard]] bool host_waits_for_block(const char* start, uint64_t bytes);
  bool show_run(const Piece& run) {
    char* in_place = geometry_.address(run.region, run.first);
    if (direct()) return file_->view(in_place, file_bytes(run), file_offset(run.region, run.first));
    return device_.map_host(in_place, arena_.chunks(), address(run.region, run.first), run.count) == CUDA_SUCCESS;
  }
  bool hide_run(const Piece& run) {
    char* in_place = geometry_.address(run.region, run.first);
    if (direct()) return file_->end_view(in_place, file_bytes(run), file_offset(run.region, run.first));
    return device_.unmap(in_place, run.count * geometry_.chunk_bytes) == CUDA_SUCCESS;
  }
  [[gnu::noinline]] void forget(Region* region, uint32_t first, uint32_t count) {
    const Piece piece{region, first, count};
    for (Slot& slot : piece.slots()) {
      slot.overwritten |= slot.copied_out();
      if (!slot.host_valid || !slot.has_chunk()) continue;  // without a chunk the host copy is all there is
      slot.host_valid = false;
      --region->host_valid;
    }
  }
  void release_block(Region* region) {
    const bool used = std::ranges::any_of(region->slots, &Slot::host_mapped) &&
                      !streams_.host_waits(Streams::users(region), Edge::kUseBeforeUnmap);
    if (used || !hide(Piece::whole(region))) {
      region->leaky = true;  // what its addresses lead to stays there, so they serve nobody else
      for (Slot& slot : region->slots) slot.host_mapped = false;
    }
    Moments reads;
    for (const Moment& moment : Streams::arrival(region, 0, region->count))
      if (moment.stream == StreamOrder::kIn) reads.add(moment);
    if (!streams_.over(reads)) pending_.push_back({region->host, arena_.taken(region->host, region->bytes), reads});
    arena_.free(region->host, region->bytes);
    region->host = nullptr;
  }
  // Blocks of resident variables, oldest first: those whose copies are worth nothing, or any.
  bool reclaim(uint64_t bytes, bool valid_too) {
    const auto is_worth = [this](const Region* region) {
      return region->host_valid > 0 && (scheduler_ == nullptr || scheduler_->copies_outlast(region));
    };
    bool any = false;
    for (Region* region = table_.oldest(); region != nullptr; region = region->newer) {
      if (region->host == nullptr || (!valid_too && is_worth(region))) continue;
      if (!drop_copies(region)) continue;
      any = true;
      if (arena_.budget() - arena_.used() >= 2 * bytes) break;
    }
    return any;
  }
  // Copies out of a block's next variable wait for the copies in of the variable before.
  [[nodiscard]] bool wait_for_block(const Region* region) {
    const char* end = region->host + arena_.taken(region->host, region->bytes);
    for (size_t i = 0; i < pending_.size();) {
      Pending& block = pending_[i];
      if (streams_.over(block.after)) {
        block = pending_.back();
        pending_.pop_back();
        continue;
      }
      const bool overlaps = block.start < end && region->host < block.start + block.bytes;
      if (overlaps && !streams_.wait(StreamOrder::kOut, block.after, Edge::kInBeforeHost)) return false;
      ++i;
    }
    return true;
  }

  const Geometry& geometry_;
  Device& device_;
  Streams& streams_;
  RegionTable& table_;
  std::condition_variable& changed_;
  const bool tiered_;
  const uint64_t asked_bytes_;
  const std::shared_ptr<DiskFile> file_;  // null: copies are in memory
  const std::unique_ptr<DiskQueue> disk_;
  HostArena arena_;                       // of host memory, or of the file where there are no three tiers
  std::unique_ptr<HostArena> space_;      // of the file below host memory
  const Scheduler* scheduler_ = nullptr;
  std::vector<std::shared_ptr<Shift>> shifts_;  // under way; of a disk that stalls also those that nobody waits for
  std::vector<Pending> pending_;
  const uint64_t device_bytes_;                  // the budget
  bool mappable_ = true;                         // as far as is known
  uint32_t waiting_ = 0;                         // who need host memory now
  double read_seconds_ = 0, write_seconds_ = 0;  // in which shifts were under way
};

}  // namespace ooc
