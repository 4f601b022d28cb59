// The allocator: variables and small blocks within a budget, for functions that say what they use.
//
// The core keeps the lock, the threads, the begin and end of functions, and the room for what they need. Everything
// else is a part: an object that the core holds by value, with one concern and a header of its own. Parts know those
// before them here, never the core.
//
// One mutex guards all of it. It is held for tens of nanoseconds on the hot path (no driver call, no allocation) and
// given up around copies and waits; a slot in transition is marked, so that nobody else moves it meanwhile.
//
//   created chunks == free + held by regions (resident, moving, cached) + backing slabs       (statistics.cpp recounts)
//   device bytes <= budget
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "allocations.h"
#include "chunk_pool.h"
#include "device.h"
#include "geometry.h"
#include "holds.h"
#include "host_copies.h"
#include "idle_chunks.h"
#include "iterations.h"
#include "mappings.h"
#include "ooc_alloc.h"
#include "region_table.h"
#include "scheduler.h"
#include "slabs.h"
#include "stand_ins.h"
#include "streams.h"
#include "threads.h"
#include "transitions.h"
#include "watch.h"

namespace ooc {

// It begins at a line of the cache: where it began anywhere, functions took 66 or 82 ns, as it fell out in a process.
class alignas(64) Core : public Mover {
 public:
  explicit Core(const ooc_config& config);  // throws std::runtime_error
  ~Core() override;

  // The calls of the C interface (ooc_alloc.h). They take the lock themselves.
  void* malloc(uint64_t bytes);
  void* malloc(uint64_t bytes, CUstream stream);
  void* malloc_absent(uint64_t bytes);
  void* malloc_pinned(uint64_t bytes, CUstream stream, uint32_t access, uint64_t* token);
  void free(void* address);
  void free(void* address, CUstream stream);
  void record_use(void* address, CUstream stream);
  void stream_lasts(CUstream stream);
  int function_begin(uint32_t function, const ooc_operand* operands, uint32_t count, CUstream stream = nullptr);
  int function_begin_host(uint32_t function, const ooc_operand* operands, uint32_t count, CUstream stream = nullptr);
  int function_end(bool keep_allocations);
  bool in_function() const;
  void undo_begin();  // after an exception of function_begin
  void set_measuring(bool on) { stand_ins_.set_on(on); }
  uint32_t function_id(const char* name);
  const char* function_name(uint32_t id);
  // The host waits for the variable's bytes, or the work on `stream` alone does.
  int pin(const void* address, uint32_t access, uint64_t* token, std::optional<CUstream> stream = std::nullopt);
  int unpin(uint64_t token, uint32_t access);
  void work_begins();
  void work_ends();
  int detach();
  int discard(const void* address);
  void watch_uses(const ooc_watcher* watcher) { watcher_ = watcher; }
  bool exposed(const void* address);
  bool records() const { return iterations_.records(threads_.find()); }
  int evict_all();
  int sleep(uint64_t* held_bytes);
  int wake(uint64_t* back_bytes);
  uint32_t residency(const void* address, uint8_t* chunks, uint32_t count);
  void release_cached();
  int set_budget(uint64_t bytes);
  int synchronize();
  int boundary(ooc_iteration* ended);
  int set_apart(Part part, Part& before);
  int take_sequence(bool& taken);
  int watch_repeats(Repeats::Found found, void* first, void* second);
  void read_stats(ooc_stats* stats);
  int audit();
  int timeline_start(uint64_t capacity);
  void timeline_stop();
  uint32_t timeline_read(uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state);
  int ranges_load(const char* library);
  uint32_t place_id(const char* text);
  const char* place_text(uint32_t place);
  void set_place(const void* address, uint32_t place);

  Device& device() { return device_; }
  uint64_t chunk_bytes() const { return geometry_.chunk_bytes; }
  uint64_t small_limit_bytes() const { return small_limit_; }
  const char* slab_address() const { return slabs_.address(0); }
  IdleChunks& idle_chunks() { return idle_; }
  Transitions& transitions() { return transitions_; }

  // What a scheduler asks for (scheduler.h).
  std::mutex& mutex() final { return mutex_; }
  std::condition_variable& changed() final { return changed_; }
  const Recorder& recorder() const final { return iterations_.recorder(); }
  void set_scheduler(Scheduler* scheduler) final;
  void bind_thread() final;
  bool forked() const final { return forked_; }
  bool may_move() const final;
  std::shared_ptr<Trace> trace(uint64_t fingerprint) const final { return iterations_.trace(fingerprint); }
  void measure_again() final { iterations_.measure_again(); }
  uint32_t piece_chunks() const final { return static_cast<uint32_t>(geometry_.piece_chunks); }
  bool move_out(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers, bool stay) final;
  bool leaves(const Piece& piece) const final;
  Piece next_absent(Region* region, uint32_t first, uint32_t end) const final;
  bool move_in(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers) final;
  bool settle(Lock& lock, const Transfer& transfer) final { return transitions_.settle(lock, transfer); }
  bool bury_one(Lock& lock) final { return mappings_.bury_one(lock); }
  bool pin_ahead(Lock& lock) final { return !detached_ && host_.pin_ahead(lock); }
  bool has_host_memory(Region* region) final { return !host_.tiered() || host_.ensure_at_once(region); }
  bool tiered() const final { return host_.tiered(); }
  bool is_below(const Region* region) const final { return host_.is_below(region); }
  bool bring_up(Lock& lock, Region* region, bool evict) final { return host_.bring_up(lock, region, evict); }
  bool send_down(Lock& lock, Region* region) final { return host_.send_down(lock, region); }
  bool drop_copies(Region* region) final { return host_.drop_copies(region); }

  // Fork; in this order, with the lock held from the first to the last (fork.cpp).
  void before_fork();
  void after_fork(bool in_child);
  void thread_exits(ThreadState* thread);

 private:
  // kRefused: there may be enough, but the driver does not do its part.
  enum class Room { kMade, kNone, kRefused };
  static constexpr int kPatience = 100;  // attempts without any progress before giving up
  static constexpr double kPatienceWhileStuck = 1;  // seconds; where functions wait for each other, and others may free memory
  static constexpr double kPatienceForWork = 60;  // seconds; work that ends no sooner may itself wait for this process

  // functions.cpp, host_functions.cpp
  ThreadState& thread_state() {
    ThreadState* state = threads_.find();
    return state != nullptr ? *state : new_thread_state();
  }
  ThreadState& new_thread_state();
  // What whoever makes discarded variables again says to a use, or to a free.
  int tell_use(uint32_t function, const ooc_operand* operands, uint32_t count) const {
    const ooc_watcher* watcher = watcher_.load(std::memory_order_acquire);
    return __builtin_expect(watcher != nullptr, false) ? watcher->before_use(function, operands, count) : OOC_OK;
  }
  int tell_budget_falls() const {
    const ooc_watcher* watcher = watcher_.load(std::memory_order_acquire);
    return watcher != nullptr ? watcher->before_budget_falls() : OOC_OK;
  }
  bool free_later(void* address) const {
    const ooc_watcher* watcher = watcher_.load(std::memory_order_acquire);
    return __builtin_expect(watcher != nullptr, false) && watcher->before_free(address) != 0;
  }
  inline int enter(Lock& lock, ThreadState& thread, bool on_host);
  inline void commence(ThreadState& thread, bool recorded);
  inline int begin_running(ThreadState& thread, CUstream stream, bool recorded);
  inline bool hold_operands(ThreadState& thread, const ooc_operand* operands, uint32_t count, bool recorded);
  bool hold_ranges(ThreadState& thread, const ooc_operand* operands, uint32_t count, bool recorded);
  [[nodiscard]] bool begin_on_stream(ThreadState& thread, CUstream stream, bool recorded);
  [[gnu::cold]] bool cannot_begin(const ThreadState& thread);
  [[gnu::cold]] int refuse_begin(ThreadState& thread, bool recorded, int status);
  bool wait_until_still(Lock& lock, const std::vector<Hold>& runs);
  bool lift_all(Lock& lock, const std::vector<Hold>& runs, std::vector<std::unique_ptr<HostCopies::Lifted>>& lifted);
  int map_in_place(const std::vector<Hold>& runs);
  void hold_in_place(ThreadState& thread, const std::vector<Hold>& runs, bool recorded);

  // memory.cpp
  void* malloc_on(Lock& lock, uint64_t bytes, uint32_t stream);
  void give_back(Region* region);
  bool complete_region(Lock& lock, Region* region, const Chunk* chunks);
  void* malloc_region(Lock& lock, uint64_t bytes, uint32_t stream);
  void* malloc_small(Lock& lock, uint64_t bytes, uint32_t stream);
  bool runs_on_host() const;  // the calling thread's function
  void* malloc_in_place(Lock& lock, uint64_t bytes);
  void* malloc_failed(uint64_t bytes, Room room);
  Room back_slab(Lock& lock, uint64_t chunk);
  void begin_variable(Region* region, uint64_t bytes, const ThreadState* thread);
  void count_allocation();
  ThreadState* holder();
  void free_after(void* address, const Moments& uses);
  void free_served_by_host(void* address);
  void measure_need(ThreadState& thread);

  // arrivals.cpp: what a function, or a user's pin, needs on the device
  int make_resident(Lock& lock, const std::vector<Hold>& holds);
  int bring_operands(Lock& lock, ThreadState& thread);
  int bring_in(Lock& lock, const Hold& hold, std::vector<Transfer>& transfers, uint32_t& mapped);
  void wait_for_kept(Lock& lock, const Hold& hold);
  // The time counts as waiting and not as the running function's. `waited_for` is null where it was for room.
  void stalled(double now, double seconds, const Region* waited_for);

  HostBusy allocates(bool takes_room) const;  // within the calling thread's function
  // Null unless the thread's functions are timed one by one now.
  StreamTimer* measuring(const ThreadState* thread) const {
    return streams_.on() && iterations_.measures() && iterations_.records(thread) ? streams_.timer() : nullptr;
  }

  // sleep.cpp
  class Changing;
  bool moves() const { return transitions_.moving() > 0 || host_.shifting(); }
  bool asleep() const { return (paused_ & kAsleep) != 0; }
  int lay_down(Lock& lock);
  [[gnu::cold]] int pass_pause(Lock& lock);
  int take_up_slabs(Lock& lock);
  void bring_back(Lock& lock, std::vector<Hold> runs);

  // room.cpp
  // Makes so many chunks idle. Refused at once if the pinned ones leave no room for them and `pinned_too` more, unless
  // another function may end.
  Room make_room(Lock& lock, uint64_t chunks, uint64_t pinned_too);
  // make_room, and takes it.
  Room take_room(Lock& lock, uint32_t count, Chunk* chunks, uint64_t pinned_too);
  bool release_idle_threads();
  double patience_for_work() const;
  int evict_unpinned(Lock& lock);
  std::string describe_refusal() const;
  std::string describe_failed_copy(const Region* region);
  uint64_t refusal_count() const { return device_.driver().refusals() + host_.refusals(); }  // of the driver and the disk
  std::string refused() const;  // the last of them, in words
  // The text of an out-of-memory error; the need counts for min_budget_bytes, unless measuring is off.
  std::string describe_need(const std::string& function, uint64_t need_chunks);
  bool shrink_to_limit(Lock& lock);
  void wait_a_while(Lock& lock) { changed_.wait_for(lock, std::chrono::milliseconds(20)); }
  bool device_lost(Lock& lock) { return device_.lost() && transitions_.device_lost(lock); }
  void note_need() { holds_.note_need(slabs_.used(), pool_.limit()); }

  void fill_chunks(ooc_stats& stats) const;  // statistics.cpp
  std::string audit_chunks() const;
  bool make_private(bool release_chunks);  // fork.cpp
  void release_everything();

  const uint64_t small_limit_;
  const bool strict_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Device device_;
  const Geometry geometry_;
  Timeline timeline_;
  Threads threads_;
  ChunkPool pool_;
  Streams streams_;
  RegionTable table_;
  Mappings mappings_;
  Slabs slabs_;
  IdleChunks idle_;
  HostCopies host_;
  Holds holds_;
  Allocations allocations_;
  Iterations iterations_;
  Watch watch_;
  Transitions transitions_;
  StandIns stand_ins_;
  Scheduler* scheduler_ = nullptr;
  Scheduler::Counts scheduler_counts_;  // of the last scheduler
  // Why functions do not begin as they always do; kChanges: the core is falling asleep, or waking.
  enum Pause : uint32_t { kForks = 1, kAsleep = 2, kChanges = 4, kDetached = 8 };
  std::atomic<uint32_t> paused_{0};
  std::atomic<bool> detached_{false};
  std::atomic<const ooc_watcher*> watcher_{nullptr};
  bool forked_ = false, idle_wanted_ = false;
  uint32_t room_waiters_ = 0;
  double disk_stall_seconds_ = 0;  // in which functions waited for a disk below host memory
  uint64_t serial_ = 0;  // of functions
  uint64_t budget_bytes_;  // as it was asked for
  std::vector<Hold> awake_;          // what was on the device as the core fell asleep; last, as nobody else looks at it
  std::vector<Region*> slabs_away_;  // regions that stand for slabs
};

}  // namespace ooc
