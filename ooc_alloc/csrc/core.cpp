#include "core.h"

#include <algorithm>

#include "clock.h"
#include "last_error.h"
#include "own_memory.h"

namespace ooc {

Core::Core(const ooc_config& config)
    : small_limit_(config.small_limit_bytes),
      strict_(config.strict != 0),
      device_(config.driver_library, config.device_ordinal),
      geometry_(config, device_),
      pool_(device_.driver(), device_.ordinal(), geometry_.chunk_bytes, geometry_.budget_bytes / geometry_.chunk_bytes),
      streams_(device_, timeline_, config.asynchronous != 0, config.safe != 0),
      table_(geometry_),
      mappings_(geometry_, device_, pool_, streams_, table_),
      slabs_(geometry_, config.small_alignment, device_, pool_, streams_, mappings_),
      idle_(pool_, table_, mappings_, slabs_),
      host_(geometry_, config, device_, streams_, table_, changed_),
      holds_(geometry_),
      allocations_(geometry_.chunk_bytes),
      watch_(timeline_, geometry_, iterations_, pool_, table_, slabs_),
      transitions_({geometry_, device_, streams_, table_, mappings_, host_, iterations_, watch_}, strict_, changed_),
      budget_bytes_(geometry_.budget_bytes) {
  if (config.wait_limit_seconds > 0) device_.set_wait_limit(config.wait_limit_seconds);
  register_core(threads_.core_id(), this);
}

Core::~Core() {
  unregister_core(threads_.core_id());
  Lock lock(mutex_);
  (void)streams_.host_waits_for_all();  // a device that is lost is not waited for
  while (Region* region = table_.take_oldest_cached()) mappings_.destroy(region);
  for (Region& region : table_.all()) {
    if (!region.live) continue;
    host_.hide(Piece::whole(&region));
    mappings_.destroy(&region);
  }
  slabs_.release_all();
  mappings_.bury_all();
  pool_.release_free();
}

ThreadState& Core::new_thread_state() {
  const Lock lock(mutex_);
  return threads_.add();
}

// ---- pins of users --------------------------------------------------------------------------------------------------

int Core::pin(const void* address, uint32_t access, uint64_t* token, std::optional<CUstream> stream) {
  const RelaxedCaptures relaxed(streams_.capturable());
  ThreadState& thread = thread_state();
  if (token != nullptr) *token = kNoToken;
  const ooc_operand operand{address, access, 0, 0};
  if (const int status = tell_use(OOC_NO_FUNCTION, &operand, 1)) return status;
  Lock lock(mutex_);
  if (asleep())
    if (const int status = pass_pause(lock)) return status;
  Region* region = detached_ ? nullptr : table_.find(address);
  if (region == nullptr) {
    if (detached_ || !geometry_.in_slabs(address)) return OOC_OK;
    const uint64_t pinned = slabs_.pin(address);
    if (token != nullptr) *token = kOfSlabs | pinned;
    return OOC_OK;
  }
  const Hold handle{{region, region->generation}};
  const auto kept_here = [&](const Hold& hold) { return hold.kept && hold.get() == region; };
  if (thread.in_function && thread.on_host && std::any_of(thread.held.begin(), thread.held.end(), kept_here))
    return OOC_OK;  // this very function keeps it off the device, and its address leads to its bytes
  const uint64_t pinned = holds_.pin_for_user(region, access);
  if (token != nullptr) *token = pinned;
  if (!thread.in_function) holds_.release(thread.held);  // or many pins in a row, no function between, fill the budget
  table_.touch(region);
  if (!region->fully_resident())
    if (const int status = make_resident(lock, {handle})) {
      if (Region* still = handle.get()) holds_.unpin_for_user(still, access);
      return status;
    }
  if (handle.get() == nullptr) return OOC_OK;  // freed while it came in
  const Moments arrival = Streams::arrival(region, 0, region->count);
  // A stream that is captured into a graph cannot wait for what is outside of it.
  const bool waits_itself = stream && !(streams_.on() && device_.captures(*stream));
  if (!(waits_itself ? streams_.wait_for_memory(streams_.index(*stream), arrival)
                     : streams_.host_waits(arrival, Edge::kInBeforeUse))) {
    holds_.unpin_for_user(region, access);
    if (token != nullptr) *token = kNoToken;
    return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  }
  if (access & OOC_WRITE) host_.written(region);
  // Within a function, what is held beside the operands are its allocations.
  if (!thread.in_function) holds_.add(region, &thread);
  note_need();
  return OOC_OK;
}

int Core::unpin(uint64_t token, uint32_t access) {
  const RelaxedCaptures relaxed(streams_.capturable());
  const Lock lock(mutex_);
  if (token != kNoToken && (token & kOfSlabs) != 0 && !detached_) slabs_.unpin(token & ~kOfSlabs);
  Region* region = detached_ ? nullptr : Holds::of_token(table_, token);
  if (region == nullptr) return OOC_OK;
  if (region->external_pins == 0) return fail(OOC_INVALID, "unpin of a region that is not pinned");
  streams_.used(region, streams_.now_everywhere());
  if (access & OOC_WRITE) host_.written(region);
  holds_.unpin_for_user(region, access);
  if (threads_.starving > 0) changed_.notify_all();
  return OOC_OK;
}

void Core::work_begins() {
  const Lock lock(mutex_);
  threads_.work_begins();
}

void Core::work_ends() {
  const Lock lock(mutex_);
  threads_.work_ends();
  changed_.notify_all();
}

// ---- iterations -----------------------------------------------------------------------------------------------------

int Core::boundary(ooc_iteration* ended) {
  const RelaxedCaptures relaxed(streams_.capturable());
  ThreadState& thread = thread_state();
  const Lock lock(mutex_);
  *ended = {};
  if (thread.in_function) return fail(OOC_INVALID, "an iteration cannot end within a function");
  if (detached_ || recorder().current().functions() == 0) return OOC_OK;
  const double now = now_seconds();
  const auto trace = iterations_.end(now, &thread, transitions_.moved_bytes(), streams_.timer(), ended);
  if (streams_.on() && watch_.recording()) streams_.timer()->move_anchor(device_.stream(Direction::kOut));
  allocations_.end_iteration(table_.live_bytes() + slabs_.live_bytes(), slabs_.used(), ended);
  if (scheduler_ != nullptr && scheduler_->iteration_ended(trace)) {
    ended->followed_plan = 1;
    iterations_.followed_plan();
  }
  watch_.iteration(*trace, now - ended->seconds, now, ended->followed_plan != 0);
  iterations_.keep(trace);
  return OOC_OK;
}

int Core::set_apart(Part part, Part& before) {
  ThreadState& thread = thread_state();
  if (thread.in_function) return fail(OOC_INVALID, "a function is part of the sequence, or apart, from its beginning on");
  const Lock lock(mutex_);
  before = thread.part;
  if (before != Part::kApart || part != Part::kRemakes) thread.part = part;  // what is made again for what is apart is apart
  return OOC_OK;
}

int Core::take_sequence(bool& taken) {
  ThreadState& thread = thread_state();
  if (thread.in_function) return fail(OOC_INVALID, "a function's thread is recorded, or not, from its beginning on");
  const Lock lock(mutex_);
  taken = iterations_.take(&thread);
  return OOC_OK;
}

int Core::watch_repeats(Repeats::Found found, void* first, void* second) {
  const ThreadState& thread = thread_state();
  const Lock lock(mutex_);
  iterations_.watch_repeats(&thread, found, first, second);
  return OOC_OK;
}

uint32_t Core::function_id(const char* name) {
  const Lock lock(mutex_);
  return iterations_.recorder().function_id(name);
}

const char* Core::function_name(uint32_t id) {
  const Lock lock(mutex_);
  return recorder().function_name(id);
}

// ---- what can be seen -----------------------------------------------------------------------------------------------

int Core::timeline_start(uint64_t capacity) {
  const RelaxedCaptures relaxed(streams_.capturable());
  const Lock lock(mutex_);
  if (forked_ || detached_) return OOC_OK;
  watch_.start(capacity);
  if (streams_.on()) streams_.timer()->anchor(device_.stream(Direction::kOut), now_seconds());
  return OOC_OK;
}

void Core::timeline_stop() {
  const RelaxedCaptures relaxed(streams_.capturable());
  const Lock lock(mutex_);
  if (!forked_) streams_.collect_times();
  watch_.stop(threads_);
}

uint32_t Core::timeline_read(uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state) {
  const RelaxedCaptures relaxed(streams_.capturable());
  const Lock lock(mutex_);
  if (!forked_) streams_.collect_times();
  return watch_.read(threads_, from, events, count, state);
}

int Core::ranges_load(const char* library) {
  std::string reason;
  return watch_.load_ranges(library, reason) ? OOC_OK : fail(OOC_INVALID, reason);
}

uint32_t Core::place_id(const char* text) {
  const Lock lock(mutex_);
  return watch_.places().id(text);
}

const char* Core::place_text(uint32_t place) {
  const Lock lock(mutex_);
  return watch_.places().text(place);
}

void Core::set_place(const void* address, uint32_t place) {
  const Lock lock(mutex_);
  Region* region = detached_ ? nullptr : table_.find(address);
  if (region == nullptr) return;
  region->place = place;
  iterations_.recorder().set_place(region);
}

uint32_t Core::residency(const void* address, uint8_t* chunks, uint32_t count) {
  const Lock lock(mutex_);
  const Region* region = table_.find(address);
  if (region == nullptr) return 0;
  for (uint32_t i = 0; i < std::min(count, region->count); ++i) chunks[i] = region->slots[i].at_rest() ? 1 : 0;
  return region->count;
}

// ---- what a scheduler asks for (scheduler.h) ------------------------------------------------------------------------

void Core::set_scheduler(Scheduler* scheduler) {
  if (scheduler_ != nullptr) scheduler_counts_ = scheduler_->counts();
  scheduler_ = scheduler;
  host_.set_scheduler(scheduler);
}

bool Core::may_move() const { return paused_ == 0 && own_memory::ready(); }

void Core::bind_thread() {
  device_.bind_thread();
  // Queries of events would end the capture of another thread.
  device_.set_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
}

bool Core::move_out(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers, bool stay) {
  return transitions_.start_out(lock, piece, transfers, stay);
}

bool Core::leaves(const Piece& piece) const {
  const auto& slots = piece.region->slots;
  for (uint32_t i = piece.first; i < std::min(piece.end(), piece.region->count); ++i)
    if (slots[i].state == SlotState::kLeaving) return true;
  return false;
}

Piece Core::next_absent(Region* region, uint32_t first, uint32_t end) const {
  return Transitions::next_absent(region, first, end, geometry_.piece_chunks);
}

bool Core::move_in(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers) {
  std::vector<Chunk> chunks(piece.count);
  const bool taken = room_waiters_ == 0 && idle_.take(piece.count, chunks.data());
  idle_wanted_ = !taken;  // whoever frees a variable then wakes the scheduler
  if (taken) transitions_.start_in(lock, piece, chunks.data(), transfers);
  return taken;
}

}  // namespace ooc
