#include "core.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <stdexcept>

#include "fork.h"

namespace ooc {
namespace {

thread_local std::string last_error;
thread_local const char* last_literal = nullptr;  // in its place
thread_local int last_status = OOC_OK;

constexpr uint64_t kHeapBytes = uint64_t{16} << 30;  // address space of slabs
constexpr uint64_t kDefaultSpace = uint64_t{1} << 40;

}  // namespace

double now_seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void set_last_error(std::string message, int status) {
  last_error = std::move(message);
  last_literal = nullptr;
  last_status = status;
}
int no_host_memory() noexcept {
  last_literal =
      "no host memory for the books of ooc_alloc: the system gives none; variables are safe where they are, end other "
      "processes or free memory, and try again";
  return last_status = OOC_NO_HOST_MEMORY;
}
const char* last_error_text() { return last_literal != nullptr ? last_literal : last_error.c_str(); }
int last_error_status() { return last_status; }

Core::Core(const ooc_config& config)
    : small_limit_(config.small_limit_bytes),
      strict_(config.strict != 0),
      device_(config.driver_library, config.device_ordinal) {
  if (config.wait_limit_seconds > 0) device_.set_wait_limit(config.wait_limit_seconds);
  const uint64_t granularity = device_.granularity();
  const uint64_t wanted = std::max<uint64_t>(config.chunk_bytes, 1);
  chunk_bytes_ = (wanted + granularity - 1) / granularity * granularity;
  const uint64_t budget = config.budget_bytes != 0 ? config.budget_bytes : device_.free_bytes() / 10 * 9;
  if (budget < chunk_bytes_)
    throw std::runtime_error("a budget of " + std::to_string(budget) + " bytes holds no chunk of " +
                             std::to_string(chunk_bytes_) + " bytes; raise OOC_BUDGET or lower OOC_CHUNK_SIZE");
  if (budget > device_.total_bytes())
    throw std::runtime_error("the budget of " + std::to_string(budget) + " bytes is more than the device has (" +
                             std::to_string(device_.total_bytes()) + " bytes); lower OOC_BUDGET");
  const uint64_t piece = config.copy_piece_bytes != 0 ? config.copy_piece_bytes : uint64_t{4} << 20;
  piece_chunks_ = std::max<uint64_t>(1, piece / chunk_bytes_);
  const uint64_t heap_bytes = kHeapBytes / chunk_bytes_ * chunk_bytes_;
  const uint64_t space = config.address_space_bytes != 0 ? config.address_space_bytes : kDefaultSpace;
  region_chunks_ = std::max<uint64_t>(space / chunk_bytes_, 1);
  chunk_of_ = Divisor(chunk_bytes_);
  heap_first_chunk_ = region_chunks_;
  device_.reserve(region_chunks_ * chunk_bytes_ + heap_bytes);
  void* table = mmap(nullptr, region_chunks_ * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) throw std::runtime_error("no address space for the table of regions");
  region_at_ = static_cast<uint32_t*>(table);
  pool_ = std::make_unique<ChunkPool>(device_.driver(), device_.ordinal(), chunk_bytes_, budget / chunk_bytes_);
  first_budget_chunks_ = budget / chunk_bytes_;
  space_ = std::make_unique<AddressSpace>(region_chunks_);
  const uint64_t alignment = config.small_alignment != 0 ? config.small_alignment : 64;
  heap_ = std::make_unique<SmallHeap>(heap_bytes, chunk_bytes_, alignment);
  heap_chunks_.resize(heap_bytes / chunk_bytes_);
  const uint64_t host_bytes = std::max(config.host_budget_bytes, chunk_bytes_);
  arena_ = std::make_unique<HostArena>(device_.driver(), host_bytes);
  if (config.asynchronous != 0) {
    order_ = std::make_unique<StreamOrder>(device_);
    timer_ = std::make_unique<StreamTimer>(device_, timeline_);
  }
  stats_.version = OOC_ABI_VERSION;
  stats_.struct_bytes = sizeof stats_;
  stats_.chunk_bytes = chunk_bytes_;
  stats_.budget_bytes = budget;
  stats_.host_budget_bytes = config.host_budget_bytes;
  stats_.device_total_bytes = device_.total_bytes();
  iteration_began_ = now_seconds();
  core_id_ = register_core(this);
}

Core::~Core() {
  unregister_core(this);
  Lock lock(mutex_);
  if (order_) order_->synchronize_all();
  while (Region* region = cached_.oldest()) {
    uncache(region);
    destroy(region);
  }
  for (Region& region : regions_) {
    if (!region.live) continue;
    hide_host_copy(&region, 0, region.count);
    destroy(&region);
  }
  for (uint64_t c = 0; c < heap_chunks_.size(); ++c)
    if (heap_chunks_[c].chunk != kNoChunk) {
      device_.unmap(address_of(heap_first_chunk_ + c), chunk_bytes_);
      pool_->give(heap_chunks_[c].chunk);
    }
  if (order_) bury_all();
  pool_->release_free();
  munmap(region_at_, region_chunks_ * sizeof(uint32_t));
  for (const auto& block : host_blocks_) ::free(const_cast<void*>(block.first));
}

int Core::fail(int status, std::string message) {
  set_last_error(std::move(message), status);
  return status;
}

Region* Core::find(const void* address) const {
  if (!owns(address)) return nullptr;
  const uint64_t chunk = chunk_of_(static_cast<uint64_t>(static_cast<const char*>(address) - device_.base()));
  if (chunk >= region_chunks_ || region_at_[chunk] == 0) return nullptr;
  auto* region = const_cast<Region*>(&regions_[region_at_[chunk] - 1]);
  return region->live ? region : nullptr;
}

void Core::add_pin(Region* region) {
  if (region->pins++ == 0) pinned_chunks_ += region->count - region->pinned_slots;
}

void Core::drop_pin(Region* region) {
  if (--region->pins == 0) pinned_chunks_ -= region->count - region->pinned_slots;
}

uint64_t Core::add_external_pin(Region* region, uint32_t access) {
  add_pin(region);
  ++region->external_pins;
  if (access & OOC_WRITE) ++region->writable_pins;
  ++stats_.external_pin_count;
  return uint64_t{region->index} << 32 | region->generation;
}

void Core::release_held(std::vector<Hold>& held) {
  for (const Hold& hold : held) {
    if (hold.get() == nullptr) continue;
    if (hold.whole()) drop_pin(hold.region);
    else drop_hold(hold);
  }
  held.clear();
}

void Core::hold(Region* region, ThreadState* thread) {
  add_pin(region);
  (thread != nullptr ? thread->held : orphans_).push_back({{region, region->generation}});
}

void Core::note_need() {
  // With less than twice the slabs, small variables would take chunks of their own.
  const uint64_t chunks = heap_used_ + std::max(pinned_chunks_, heap_used_);
  stats_.min_budget_bytes = std::max(stats_.min_budget_bytes, chunks * chunk_bytes_);
}

// The time counts as waiting, in one of two ways, and not as the running function's.
void Core::stalled(double now, double seconds, const Region* region) {
  stats_.stall_seconds += seconds;
  (region != nullptr ? stats_.stall_swap_in_seconds : stats_.stall_room_seconds) += seconds;
  if (timeline_.on())
    watch_stall(region != nullptr ? OOC_EVENT_STALL_SWAP_IN : OOC_EVENT_STALL_ROOM, now - seconds, now, region);
  if (sequence_thread_ != nullptr && find_thread_state() == sequence_thread_) recorder_.stalled(seconds);
}

void Core::forget_host_copies(Region* region, uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count; ++i) {
    Slot& slot = region->slots[i];
    slot.overwritten |= slot.leaving;
    if (!slot.host_valid || slot.chunk == kNoChunk) continue;  // without a chunk the host copy is all there is
    slot.host_valid = false;
    --region->host_valid;
  }
}

// It would wait for nobody: nothing else runs, and what is pinned exceeds the budget. Known before anybody is told of
// it.
bool Core::cannot_begin(const ThreadState& thread) {
  while (pinned_chunks_ + heap_used_ > pool_->limit() && active_functions() == 0 &&
         absent_chunks(thread.held) > idle_chunks())
    if (!release_idle_threads() && !pool_->recover()) {
      set_last_error(describe_need(recorder_.function_name(thread.function), pinned_chunks_));
      return true;
    }
  return false;
}

int Core::refuse_begin(ThreadState& thread, bool recorded, int status) {
  release_held(thread.held);
  if (recorded) recorder_.forget_function();
  return status;
}

void Core::undo_begin() {
  ThreadState* thread = find_thread_state();
  if (thread == nullptr) return;
  const Lock lock(mutex_);
  if (thread->in_function && !detached_) progress_ -= kOneRuns;
  thread->in_function = false;
  release_held(thread->held);
  changed_.notify_all();
}

int Core::function_begin(uint32_t function, const ooc_operand* operands, uint32_t count, CUstream stream) {
  ThreadState& thread = thread_state();
  if (thread.in_function) return fail(OOC_NESTED, "a function began within a function of the same thread");
  Lock lock(mutex_);
  if (order_) thread.stream = order_->compute_stream(stream);
  while (paused_) wait_a_while(lock);
  if (detached_) {
    thread.in_function = true;
    return OOC_OK;
  }
  if (device_.lost() && device_lost(lock) && order_) return fail(OOC_DRIVER_FAILURE, describe_loss());
  release_held(thread.held);
  if (!orphans_.empty() && active_functions() == 0) release_held(orphans_);
  if (strict_)
    if (const int status = evict_unpinned(lock)) return status;
  if (sequence_thread_ == nullptr) sequence_thread_ = &thread;
  const bool recorded = sequence_thread_ == &thread;
  if (recorded) recorder_.begin_function(function, now_seconds());

  ++serial_;
  bool missing = false, ranges = false;
  thread.writes = thread.on_host = false;
  thread.function = function;
  for (uint32_t i = 0; i < count; ++i) ranges |= operands[i].bytes != 0;
  if (__builtin_expect(ranges, false)) missing = hold_ranges(thread, operands, count, recorded);
  for (uint32_t i = 0; i < (ranges ? 0 : count); ++i) {
    Region* region = find(operands[i].address);
    if (region == nullptr) continue;
    if (operands[i].access & OOC_WRITE) {
      region->write_serial = serial_;
      thread.writes = true;
    }
    if (region->use_serial == serial_) {
      if (recorded) recorder_.widen_last_use(region, operands[i].access);
      continue;
    }
    region->use_serial = serial_;
    region->last_function = function;
    hold(region, &thread);
    used_.touch(region);
    missing |= !region->fully_resident();
    if (recorded) recorder_.use(region, operands[i].access);
  }
  if (missing && cannot_begin(thread)) return refuse_begin(thread, recorded, OOC_OUT_OF_MEMORY);
  if (recorded) {
    const uint64_t prefix = recorder_.end_operands();
    if (scheduler_ != nullptr) scheduler_->function_started(recorder_.current().functions() - 1, prefix);
  }
  progress_ += kOneRuns;
  thread.in_function = true;
  thread.operand_count = static_cast<uint32_t>(thread.held.size());
  thread.measured_chunks = thread.measured_need = 0;
  const uint64_t serial = serial_;
  if (missing)
    if (const int status = bring_operands(lock, thread)) return refuse_begin(thread, recorded, status);
  note_need();
  if (order_) begin_on_stream(thread, stream, recorded);
  if (order_ && device_.lost()) {  // its stream may not wait for what it needs
    thread.in_function = false;
    progress_ -= kOneRuns;
    return refuse_begin(thread, recorded, fail(OOC_DRIVER_FAILURE, describe_loss()));
  }
  if (thread.writes)
    for (const Hold& hold : thread.held) {
      if (hold.whole() && hold.region->write_serial == serial) mark_written(hold.region);
      else if (hold.writes && hold.get() != nullptr) mark_written(hold.region, hold.first, hold.count);
    }
  if (watched()) watch_function(thread, recorded);
  ++stats_.functions;
  return OOC_OK;
}

int Core::function_end(bool keep_allocations) {
  ThreadState& thread = thread_state();
  if (!thread.in_function) return fail(OOC_INVALID, "a function ended that had not begun");
  const bool simple = !order_ && !keep_allocations && thread.measured_need == 0;
  Lock lock(mutex_, std::defer_lock);
  if (!simple) lock.lock();
  thread.in_function = false;
  if (detached_) return OOC_OK;
  if (watched()) watch_end(thread);
  if (order_) end_on_stream(thread);
  if (order_ && thread.on_host) order_->synchronize_all();  // what it enqueued uses addresses that change their memory
  progress_ += kOneEnded - kOneRuns;
  // Whoever waits said so before it looked at progress_, so one of the two sees the other.
  const bool awaited = starving_ > 0 || yielding_ > 0 || paused_;
  if (simple && !awaited) return OOC_OK;
  if (!lock.owns_lock()) lock.lock();
  if (keep_allocations)
    for (size_t i = thread.operand_count; i < thread.held.size(); ++i)
      if (Region* region = thread.held[i].get(); region != nullptr && !thread.held[i].kept) {
        add_pin(region);
        ++region->external_pins;
        ++stats_.external_pin_count;
      }
  if (awaited) changed_.notify_all();
  if (thread.measured_need == 0) return OOC_OK;
  const uint64_t need = thread.measured_need;
  thread.measured_chunks = thread.measured_need = 0;
  return fail(OOC_OUT_OF_MEMORY, describe_need(recorder_.function_name(thread.function), need));
}

bool Core::in_function() {
  const ThreadState* thread = find_thread_state();
  return thread != nullptr && thread->in_function;
}

int Core::pin(const void* address, uint32_t access, uint64_t* token) {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  ThreadState& thread = thread_state();
  Lock lock(mutex_);
  if (token != nullptr) *token = kNoToken;
  Region* region = detached_ ? nullptr : find(address);
  if (region == nullptr) return OOC_OK;
  const Hold handle{{region, region->generation}};
  const auto kept_here = [&](const Hold& hold) { return hold.kept && hold.get() == region; };
  if (thread.in_function && thread.on_host && std::any_of(thread.held.begin(), thread.held.end(), kept_here))
    return OOC_OK;  // this very function keeps it off the device, and its address leads to its bytes
  const uint64_t pinned = add_external_pin(region, access);
  if (token != nullptr) *token = pinned;
  if (!thread.in_function) release_held(thread.held);  // or many pins in a row, no function between, fill the budget
  used_.touch(region);
  if (!region->fully_resident())
    if (const int status = make_resident(lock, {handle})) {
      if (Region* still = handle.get()) {
        --still->external_pins;
        if (access & OOC_WRITE) --still->writable_pins;
        drop_pin(still);
      }
      return status;
    }
  if (handle.get() == nullptr) return OOC_OK;  // freed while it came in
  // For users on no stream that we know.
  if (order_) order_->synchronize(arrival_of(region, 0, region->count), Edge::kInBeforeUse);
  if (access & OOC_WRITE) mark_written(region);
  if (!thread.in_function) hold(region, &thread);  // within one, what is held beside the operands are its allocations
  note_need();
  return OOC_OK;
}

int Core::unpin(uint64_t token, uint32_t access) {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  const uint64_t index = token >> 32;
  if (detached_ || index >= regions_.size()) return OOC_OK;
  Region* region = RegionHandle{&regions_[index], static_cast<uint32_t>(token)}.get();
  if (region == nullptr) return OOC_OK;
  if (region->external_pins == 0) return fail(OOC_INVALID, "unpin of a region that is not pinned");
  if (order_) region->uses.add(order_->now_everywhere());
  if (access & OOC_WRITE) {
    mark_written(region);
    if (region->writable_pins > 0) --region->writable_pins;
  }
  --region->external_pins;
  drop_pin(region);
  if (starving_ > 0) changed_.notify_all();
  return OOC_OK;
}

int Core::boundary(ooc_iteration* ended) {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  ThreadState& thread = thread_state();
  Lock lock(mutex_);
  *ended = {};
  if (thread.in_function) return fail(OOC_INVALID, "an iteration cannot end within a function");
  if (detached_ || recorder_.current().functions() == 0) return OOC_OK;
  const double now = now_seconds();
  const bool first = stats_.iterations++ == 0;
  std::shared_ptr<Trace> trace = recorder_.finish(now);
  if (order_) measured(*trace);
  if (order_ && timeline_.on()) timer_->move_anchor(device_.stream(Direction::kOut));
  sequence_thread_ = &thread;
  ended->fingerprint = trace->fingerprint;
  ended->functions = trace->functions();
  ended->variables = static_cast<uint32_t>(trace->variables.size());
  ended->uses = static_cast<uint32_t>(trace->uses.size());
  ended->contains_first = first ? 1 : 0;
  ended->seen_count = ++seen_counts_[trace->fingerprint];
  ended->live_peak_bytes = iteration_live_peak_;
  ended->slab_peak_bytes = iteration_slab_peak_ * chunk_bytes_;
  const uint64_t moved = stats_.swap_in_bytes + stats_.swap_out_bytes + stats_.clean_drop_bytes;
  ended->swapped_bytes = moved - iteration_moved_;
  ended->seconds = now - iteration_began_;
  const double stall = stats_.stall_seconds + device_stall_;
  ended->stall_seconds = stall - iteration_stall_;
  iteration_moved_ = moved;
  iteration_stall_ = stall;
  iteration_live_peak_ = stats_.live_bytes;
  iteration_slab_peak_ = heap_used_;
  iteration_began_ = now;
  if (scheduler_ != nullptr && scheduler_->iteration_ended(trace)) {
    ended->followed_plan = 1;
    ++stats_.planned_iteration_count;
  }
  if (timeline_.on()) watch_iteration(*trace, now - ended->seconds, now, ended->followed_plan != 0);
  constexpr size_t kMostTraces = 64;
  if (!trace->overflow && !traces_.count(trace->fingerprint)) {
    trace_order_.push_back(trace->fingerprint);
    if (trace_order_.size() > kMostTraces) {
      traces_.erase(trace_order_.front());
      trace_order_.pop_front();
    }
  }
  if (!trace->overflow) traces_[trace->fingerprint] = trace;
  return OOC_OK;
}

}  // namespace ooc
