// The allocator: regions and slabs within a budget, functions and their pins, demand mode, transitions.
//
// One mutex guards all bookkeeping. It is held for tens of nanoseconds on the hot path (no driver call, no allocation)
// and given up around copies and waits; a region in transition is marked, so that nobody else moves it meanwhile.
//
//   created chunks == free + held by regions (resident, moving, cached) + backing slabs        (audit.cpp recounts it)
//   device bytes <= budget
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "address_space.h"
#include "chunk_pool.h"
#include "device.h"
#include "divisor.h"
#include "host_arena.h"
#include "ooc_alloc.h"
#include "recorder.h"
#include "region.h"
#include "scheduler.h"
#include "small_heap.h"
#include "stream_order.h"
#include "stream_timer.h"
#include "timeline.h"

namespace ooc {

using Lock = std::unique_lock<std::mutex>;

// A copy of consecutive slots that was enqueued and not yet settled.
struct Transfer {
  Region* region = nullptr;
  uint32_t first = 0, count = 0;
  Direction direction = Direction::kOut;
  CUevent event = nullptr;
  double started = 0;
  bool failed = false;
  Moment moment{};         // where functions run on streams: when the copy is done
  uint64_t watched = Timeline::kNoEvent;
};

constexpr uint64_t kNoToken = ~uint64_t{0};  // of a pin: unpin does nothing

// A run of slots of one region.
struct Piece {
  Region* region;
  uint32_t first, count;
  bool on_demand = false;  // no plan asked for it to move
};

// kRefused: there may be enough, but the driver does not do its part.
enum class Room { kMade, kNone, kRefused };

// Read by other threads without the lock; copied only while nobody else looks.
struct SharedFlag {
  SharedFlag() = default;
  SharedFlag(const SharedFlag& other) : value(other.value.load()) {}
  SharedFlag& operator=(const SharedFlag& other) { return *this = other.value.load(); }
  SharedFlag& operator=(bool next) {
    value.store(next, std::memory_order_release);
    return *this;
  }
  operator bool() const { return value.load(std::memory_order_acquire); }
  std::atomic<bool> value{false};
};
struct SharedTime {
  SharedTime() = default;
  SharedTime(const SharedTime& other) : value(other.value.load()) {}
  SharedTime& operator=(const SharedTime& other) { return *this = other.value.load(); }
  SharedTime& operator=(double next) {
    value.store(next, std::memory_order_release);
    return *this;
  }
  bool operator==(double other) const { return value.load(std::memory_order_acquire) == other; }
  std::atomic<double> value{0};
};

// What a thread holds. A function's pins outlast it until the thread's next function begins: results are touched
// without an operator just after they were made (torch.tensor(list), tolist, file reads).
struct ThreadState {
  std::vector<Hold> held;
  SharedFlag in_function;
  bool exited = false;         // the thread is gone, the entry may be used again
  bool may_yield = false;      // beginning: nothing was computed yet, so its operands may be let go again
  bool yielded = false;        // they must be, as the functions of other threads need the room
  bool writes = false;         // the running function declared a write
  bool on_host = false;        // it may use host memory in place of device memory
  uint32_t function = 0;
  uint32_t stream = 0;         // of the running function, or of the last one
  CUstream stream_handle = nullptr;
  uint32_t operand_count = 0;  // first entries of held: operands; the others were allocated by the function
  uint64_t measured_chunks = 0;  // of allocations that did not fit, which the host serves to learn the need
  uint64_t measured_need = 0;    // the most chunks there were at once since the first of these; 0: all fitted
  std::string failure;
  uint32_t number = 0;         // 1, 2, ... in the timeline
  uint64_t event = Timeline::kNoEvent;  // of the running function, or of the last one
  SharedTime ended;            // when that ended; 0: it runs
};

// What a thread is for a core.
struct ThreadEntry {
  uint64_t core_id;
  ThreadState* state;
};
// The one used last. Constant and trivial, so that reading it asks nobody whether it was made.
inline thread_local ThreadEntry latest_entry{0, nullptr};

class Core {
 public:
  explicit Core(const ooc_config& config);  // throws std::runtime_error
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void* malloc(uint64_t bytes);
  void* malloc(uint64_t bytes, CUstream stream);
  void* malloc_absent(uint64_t bytes);
  void* malloc_pinned(uint64_t bytes, CUstream stream, uint32_t access, uint64_t* token);
  void free(void* address);
  void free(void* address, CUstream stream);
  void record_use(void* address, CUstream stream);
  int function_begin(uint32_t function, const ooc_operand* operands, uint32_t count, CUstream stream = nullptr);
  int function_begin_host(uint32_t function, const ooc_operand* operands, uint32_t count);
  int function_end(bool keep_allocations);
  bool in_function();
  // After an exception of function_begin.
  void undo_begin();
  void set_measuring(bool on) { measuring_ = on; }
  int pin(const void* address, uint32_t access, uint64_t* token);
  int unpin(uint64_t token, uint32_t access);
  int detach();
  int evict_all();
  // 1 for each chunk of the region at an address that is on the device and stays there, else 0. Returns how many chunks
  // it has, of which at most `count` are written; 0 for a small or unknown address.
  uint32_t residency(const void* address, uint8_t* chunks, uint32_t count);
  void release_cached();
  int set_budget(uint64_t bytes);  // budget.cpp
  int synchronize();
  int boundary(ooc_iteration* ended);
  void read_stats(ooc_stats* stats);  // statistics.cpp
  int audit();

  // timeline.cpp
  void timeline_start(uint64_t capacity);
  void timeline_stop();
  uint32_t timeline_read(uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state);
  int ranges_load(const char* library);
  uint32_t place_id(const char* text);
  const char* place_text(uint32_t place);
  void set_place(const void* address, uint32_t place);
  uint32_t regions(ooc_region* found, uint32_t count);

  Device& device() { return device_; }
  Recorder& recorder() { return recorder_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t small_limit_bytes() const { return small_limit_; }
  const char* slab_address() const { return address_of(heap_first_chunk_); }
  std::mutex& mutex() { return mutex_; }
  void set_scheduler(Scheduler* scheduler) { scheduler_ = scheduler; }
  ooc_stats& counters() { return stats_; }
  std::shared_ptr<Trace> trace(uint64_t fingerprint) const {  // null: none is kept
    const auto kept = traces_.find(fingerprint);
    return kept != traces_.end() ? kept->second : nullptr;
  }
  uint64_t piece_chunks() const { return piece_chunks_; }

  // --- Transitions, for the scheduler's threads too. The lock is held on entry and on return. ---

  // Starts copying resident slots out. Clean ones are dropped at once. Appends to `transfers` what was enqueued. False:
  // no host memory, or the driver refused; then nothing was started. With `stay` the slots are copied and remain
  // resident (a write-back), except those that a swap-out comes for meanwhile.
  bool start_out(Lock& lock, Piece piece, std::vector<Transfer>& transfers, bool stay = false);
  // Maps chunks (taken by the caller) behind absent slots and starts copying in. All or none of them are blank: blank
  // ones are there when it returns, and no transfer belongs to them.
  bool start_in(Lock& lock, Piece piece, const Chunk* chunks, std::vector<Transfer>& transfers);
  // Waits for a copy and ends its transition. False if the bytes did not arrive.
  bool settle(Lock& lock, const Transfer& transfer);
  // Whether nothing can be moved, as what was enqueued may never be over (lost_device.cpp).
  bool device_lost(Lock& lock);
  // Takes `count` chunks that are free, or cached, without evicting anything.
  bool take_idle(uint32_t count, Chunk* chunks);
  bool threads_want_room() const { return room_waiters_ > 0; }
  // Frees of regions wake the waiting threads while somebody waits for idle chunks.
  void want_idle(bool wanted) { idle_wanted_ = wanted; }
  bool paused() const { return paused_; }
  std::condition_variable& changed() { return changed_; }
  // The next iterations' functions are worth timing: a plan was made, or left.
  void measure_again() { iterations_to_measure_ = kMeasured; }
  // Takes the memory from under an address that nobody uses any more. False: there is none now.
  bool bury_one(Lock& lock);
  // Everything is plain host memory.
  bool detached() const { return detached_; }
  // In a child: the device, and the threads that were, are the parent's.
  bool forked() const { return forked_; }

  // fork.cpp; in this order, with the lock held from the first to the last
  void before_fork();
  void after_fork(bool in_child);
  void thread_exits(ThreadState* thread);

 private:
  // ordering.cpp: where functions run on streams
  void wait_for_memory(uint32_t stream, const Moments& moments);
  Moments take_moments(const Chunk* chunks, uint32_t count);
  void retire(Chunk chunk, const std::shared_ptr<const Moments>& after);
  // Of slots: uses, copies in, and copies out of the region.
  static Moments moments_of(const Region* region, uint32_t first, uint32_t count);
  static Moments all_moments(const Region* region) { return moments_of(region, 0, region->count); }
  static Moments arrival_of(const Region* region, uint32_t first, uint32_t count);
  Region::Part& part_of(Region* region, uint32_t first, uint32_t count);
  void add_arrival(Region* region, uint32_t first, uint32_t count, const Moments& moments);
  bool still_arrives(Region* region, const Hold& hold);
  void begin_on_stream(ThreadState& thread, CUstream stream, bool recorded);
  void end_on_stream(ThreadState& thread);
  void measured(Trace& trace);
  Moment enqueued(Direction direction, StreamTimer::Start timed, uint64_t event);
  void wait_for_host_block(const Region* region);
  void prepare_in(Lock& lock, Region* region, Piece piece, const Chunk* chunks);
  void unmap_stale(Lock& lock, Region* region, Piece piece);
  bool settle_enqueued(Lock& lock, const Transfer& transfer);
  void free_host_block(Region* region);
  void bury(Region* region);
  void bury_all();

  // timeline.cpp; while somebody watches
  ooc_event new_event(uint32_t kind, double start, double end) const;
  static void name_variable(ooc_event& event, const Region* region);
  void close_function(ThreadState& thread);
  bool watched() const { return __builtin_expect(watched_.load(std::memory_order_relaxed), false); }
  [[gnu::cold]] void watch_function(ThreadState& thread, bool recorded);
  [[gnu::cold]] void watch_end(ThreadState& thread);
  void watch_memory(double now);
  uint64_t watch_copy(const Region* region, Direction direction, double start, bool on_demand);
  void watch_variable(uint32_t kind, const Region* region, uint64_t bytes);
  uint64_t watch_stall(uint32_t kind, double start, double end, const Region* region);
  void watch_iteration(const Trace& ended, double start, double end, bool followed_plan);

  // budget.cpp
  void unmap_stale();
  bool shrink_to_limit(Lock& lock);

  // fork.cpp
  bool make_private(bool release_chunks);
  void release_everything();

  // core.cpp
  ThreadState* find_thread_state() const {
    const ThreadEntry& latest = latest_entry;
    return latest.core_id == core_id_ ? latest.state : search_thread_state();
  }
  ThreadState* search_thread_state() const;
  ThreadState& thread_state() {
    ThreadState* state = find_thread_state();
    return state != nullptr ? *state : new_thread_state();
  }
  ThreadState& new_thread_state();
  void hold(Region* region, ThreadState* thread);
  [[gnu::cold]] bool cannot_begin(const ThreadState& thread);
  [[gnu::cold]] int refuse_begin(ThreadState& thread, bool recorded, int status);
  Region* find(const void* address) const;
  bool owns(const void* address) const {
    const auto offset = static_cast<uint64_t>(static_cast<const char*>(address) - device_.base());
    return offset < device_.reserved();
  }
  char* address_of(uint64_t chunk) const { return device_.base() + chunk * chunk_bytes_; }
  int fail(int status, std::string message);
  void add_pin(Region* region);
  void drop_pin(Region* region);
  uint64_t add_external_pin(Region* region, uint32_t access);  // gives its token
  void release_held(std::vector<Hold>& held);
  // Host copies of resident slots are worth nothing any more, nor are those that are being made.
  void mark_written(Region* region, uint32_t first, uint32_t count) {
    if (region->host_valid > 0 || region->moving > 0) forget_host_copies(region, first, count);
  }
  [[gnu::noinline]] void forget_host_copies(Region* region, uint32_t first, uint32_t count);
  void mark_written(Region* region) { mark_written(region, 0, region->count); }
  void note_need();
  std::string audit_holds() const;  // audit.cpp
  void fill_chunks(ooc_stats& stats) const;  // statistics.cpp
  // `region`: what was waited for longest; null for room.
  void stalled(double now, double seconds, const Region* region);
  bool sequence_runs() const { return sequence_thread_ != nullptr && sequence_thread_->in_function; }

  // ranges.cpp
  // The operands of a function, put together to runs of slots that do not overlap, each used in one way.
  std::vector<Hold> runs_of(const ooc_operand* operands, uint32_t count);
  // Holds them for a function. True: some are not on the device.
  bool hold_ranges(ThreadState& thread, const ooc_operand* operands, uint32_t count, bool recorded);
  void add_hold(const Hold& hold);
  void drop_hold(const Hold& hold);
  static bool all_resident(const Hold& hold, const Region* region);
  static uint64_t absent_chunks(const std::vector<Hold>& held);
  bool bring_blank(Lock& lock, Piece piece, const Chunk* chunks);
  void wait_for_kept(Lock& lock, const Hold& hold);

  // host_functions.cpp
  void prepare_host_functions();
  int map_in_place(const std::vector<Hold>& runs);
  bool move_host_block(Region* region);
  bool map_run_in_place(Region* region, uint32_t first, uint32_t count);
  void hold_in_place(ThreadState& thread, const std::vector<Hold>& runs, bool recorded);
  bool settle_regions(Lock& lock, const std::vector<Hold>& runs);
  void* malloc_in_place(uint64_t bytes);

  // memory.cpp
  void* malloc_on(Lock& lock, uint64_t bytes, uint32_t stream);
  void* malloc_region(Lock& lock, uint64_t bytes, uint32_t stream);
  void* malloc_small(Lock& lock, uint64_t bytes, uint32_t stream);
  void* malloc_failed(uint64_t bytes, Room room);
  Room back_heap_chunk(Lock& lock, uint64_t chunk);
  void measure_need(ThreadState& thread);
  void free_served_by_host(void* address);
  void free_after(void* address, const Moments& uses);
  void free_small(void* address, const Moments& uses);
  void free_region(Region* region, const Moments& uses);
  void dispose(Region* region);
  void cache(Region* region);
  void uncache(Region* region);
  bool fits_addresses(uint64_t bytes);
  Region* new_region(uint32_t count);
  void begin_variable(Region* region, uint64_t bytes, const ThreadState* thread);
  // False if the driver refused: then the slots, or those that are left, are as they were.
  bool destroy(Region* region);
  bool unmap_slots(Region* region, uint32_t first, uint32_t count);
  void forget_slots(Region* region, uint32_t first, uint32_t count);
  bool reclaim_cached(uint64_t wanted);
  void count_allocation(uint64_t bytes);

  uint64_t slot_bytes(const Region* region, uint32_t first, uint32_t count) const {
    return std::min(region->bytes, (first + count) * chunk_bytes_) - first * chunk_bytes_;
  }

  // arrivals.cpp
  int make_resident(Lock& lock, const std::vector<Hold>& holds);
  int bring_operands(Lock& lock, ThreadState& thread);
  // Starts bringing in what is absent of a run. `mapped` counts the slots that came without a copy.
  int bring_in(Lock& lock, const Hold& hold, std::vector<Transfer>& transfers, uint32_t& mapped);
  // The text of an out-of-memory error; the need counts for min_budget_bytes, unless measuring is off.
  std::string describe_need(const std::string& function, uint64_t need_chunks);

  // lost_device.cpp
  void abandon(const Transfer& transfer);
  std::string describe_loss() const;
  std::vector<Transfer> abandoned_;

  // room.cpp
  // Makes `chunks` idle (free, cached or under empty slabs). `pinned_too`: chunks that will be pinned beyond
  // pinned_chunks_; more than the budget can hold is refused at once unless another function may end.
  Room make_room(Lock& lock, uint64_t chunks, uint64_t pinned_too);
  // make_room, and takes it.
  Room take_room(Lock& lock, uint32_t count, Chunk* chunks, uint64_t pinned_too);
  std::string describe_refusal() const;
  std::string refused() const { return "the driver refused " + device_.driver().last_refusal(); }
  // clean_only: only what can leave without a copy.
  std::vector<Piece> choose_victims(uint64_t chunks, bool clean_only);
  bool evict(Lock& lock, const std::vector<Piece>& victims);
  int evict_unpinned(Lock& lock);
  bool release_idle_threads();

  // residency.cpp
  bool verify_clean(Region* region, uint32_t first, uint32_t count);
  bool ensure_host_block(Region* region, bool reclaim);
  bool reclaim_host(uint64_t bytes);
  bool end_transition(const Transfer& transfer, bool copied);  // true: the bytes arrived
  void settle_out(const Transfer& transfer, bool copied);
  bool settle_in(const Transfer& transfer, bool copied);
  bool drop_clean(const Piece& piece, uint32_t first, uint32_t count);
  // The addresses of slots lead to no host copy any more. Returns false if the driver refused.
  bool hide_host_copy(Region* region, uint32_t first, uint32_t count);
  bool copy_slots(Region* region, uint32_t first, uint32_t count, Direction direction);
  uint64_t idle_chunks() const { return pool_->available() + cached_chunks_ + (heap_backed_ - heap_used_); }
  static constexpr int kPatience = 100;  // attempts without any progress before giving up
  void wait_a_while(Lock& lock) { changed_.wait_for(lock, std::chrono::milliseconds(20)); }

  uint64_t chunk_bytes_, piece_chunks_, small_limit_, region_chunks_, heap_first_chunk_;
  uint64_t first_budget_chunks_ = 0;
  Divisor chunk_of_;  // by chunk_bytes_
  bool strict_;
  Device device_;
  std::unique_ptr<ChunkPool> pool_;
  std::unique_ptr<AddressSpace> space_;
  std::unique_ptr<SmallHeap> heap_;
  std::unique_ptr<HostArena> arena_;
  // For functions on host memory, made when the first one begins.
  std::unique_ptr<HostChunks> function_chunks_;
  std::unique_ptr<HostArena> function_arena_;
  uint64_t host_used() const { return arena_->used() + (function_arena_ ? function_arena_->used() : 0); }
  Recorder recorder_;
  Scheduler* scheduler_ = nullptr;

  std::unique_ptr<StreamOrder> order_;  // null: functions run on the host, which waits for every copy
  std::unique_ptr<StreamTimer> timer_;  // with order_
  double device_stall_ = 0;             // seconds that streams waited for copies
  int iterations_to_measure_ = kMeasured;  // their functions are timed one by one
  static constexpr int kMeasured = 4;      // until a plan was made, and made again, of times without disturbance
  std::vector<std::shared_ptr<const Moments>> chunk_after_;  // [chunks] of free ones: what used them last
  struct Grave {                        // an address range whose memory was given away
    uint64_t first;
    uint32_t count;
    bool leaky;
    std::vector<std::pair<uint32_t, uint32_t>> mapped;  // first slot, count
    Moments after;
  };
  std::deque<Grave> graves_;
  struct HostBlock {                    // freed while copies from it were under way
    const char* start;
    uint64_t bytes;
    Moments after;
  };
  std::vector<HostBlock> host_pending_;
  bool freed_since_mark_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  ooc_stats stats_{};

  std::deque<Region> regions_;
  std::vector<Region*> unused_regions_;
  uint32_t* region_at_ = nullptr;  // [region_chunks_] index + 1 of the region over an address chunk; lazily committed
  RegionList used_;                // live regions, by last use
  RegionList cached_;              // freed regions that kept chunks, by time of free
  std::unordered_map<uint32_t, std::vector<Region*>> cached_by_count_;
  uint64_t cached_chunks_ = 0, pinned_chunks_ = 0, resident_chunks_ = 0, live_region_chunks_ = 0;
  uint64_t moving_ = 0;            // slots in transition
  uint64_t serial_ = 0;            // of functions

  struct HeapChunk {
    Chunk chunk = kNoChunk;
    uint32_t users = 0;
    bool pending = false;  // being backed
    bool listed = false;   // in idle_heap_chunks_
    Moments after;         // what used the chunk, and blocks in it that were freed
  };
  std::vector<HeapChunk> heap_chunks_;
  std::vector<uint64_t> idle_heap_chunks_;  // backed, perhaps without users by now
  uint64_t heap_backed_ = 0, heap_used_ = 0;
  uint64_t heap_top_ = 0;  // no chunk from here on was ever used

  std::unordered_map<const void*, uint64_t> host_blocks_;  // served by the host: measuring, or a forked child
  std::deque<ThreadState> thread_states_;
  uint32_t thread_count_ = 0;
  std::vector<Hold> orphans_;  // allocated by threads that never run functions (a kernel's helpers)
  // A function ends without the lock where nobody waits for that, so what it reads and changes is atomic.
  std::atomic<uint32_t> starving_{0}, yielding_{0};
  std::atomic<uint64_t> progress_{0};  // functions that have ended, and in the lower half those that run
  static constexpr uint64_t kOneRuns = 1, kOneEnded = uint64_t{1} << 32;
  uint32_t active_functions() const { return static_cast<uint32_t>(progress_.load()); }
  uint32_t functions_ended() const { return static_cast<uint32_t>(progress_.load() >> 32); }
  std::atomic<bool> paused_{false}, detached_{false}, watched_{false};
  std::atomic<bool> measuring_{true};
  uint32_t room_waiters_ = 0;
  bool forked_ = false, idle_wanted_ = false;
  std::string strict_failure_;
  uint64_t lost_chunks_ = 0;  // the driver would not unmap them
  uint64_t core_id_ = 0;

  Timeline timeline_;
  Ranges ranges_;  // watched_: by either
  struct MemoryState {
    uint64_t used = 0, free = 0, cached = 0;  // chunks
    bool operator==(const MemoryState& other) const {
      return used == other.used && free == other.free && cached == other.cached;
    }
  } last_memory_;
  std::deque<std::string> places_{""};
  std::unordered_map<std::string, uint32_t> place_ids_{{"", 0}};
  const ThreadState* sequence_thread_ = nullptr;  // whose functions are recorded

  double iteration_began_ = 0, out_idle_since_ = 0, in_idle_since_ = 0;
  uint64_t iteration_live_peak_ = 0, iteration_slab_peak_ = 0, iteration_moved_ = 0;
  double iteration_stall_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Trace>> traces_;
  std::unordered_map<uint64_t, uint64_t> seen_counts_;
  std::deque<uint64_t> trace_order_;
};

double now_seconds();
// `status`: for ooc_last_status(), where the call that failed returns none.
void set_last_error(std::string message, int status = OOC_OUT_OF_MEMORY);
// The error of std::bad_alloc, without a byte: its status.
int no_host_memory() noexcept;

}  // namespace ooc
