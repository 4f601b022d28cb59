// The begin and end of functions: what they use is held, told to the recorder and the scheduler, and brought in.
#include <algorithm>

#include "clock.h"
#include "core.h"
#include "last_error.h"

namespace ooc {
namespace {

// Where a range begins (+1) or ends (-1), in slots of the group-th variable of the function.
struct Limit {
  uint32_t group, slot;
  int ranges, reads, writes;
};

// The operands of a function that uses ranges of variables, as runs of slots that do not overlap, each used in one way.
// `serial` is the function's. A run of all slots of a variable has their count, not 0.
//
// A sweep along each variable. Two ranges of it may overlap, touch or be the same: what one of them writes is written,
// and where the access changes, a new run begins.
std::vector<Hold> runs_of(const Geometry& geometry, RegionTable& table, uint64_t serial, const ooc_operand* operands,
                          uint32_t count) {
  std::vector<Region*> regions;  // by first operand
  std::vector<Limit> limits;
  for (uint32_t i = 0; i < count; ++i) {
    Region* region = table.find(operands[i].address);
    if (region == nullptr) continue;
    if (region->use_serial != serial) {
      region->use_serial = serial;
      region->group = static_cast<uint32_t>(regions.size());
      regions.push_back(region);
    }
    const uint64_t offset = geometry.offset(operands[i].address) - region->first * geometry.chunk_bytes;
    const uint64_t bytes = std::min(operands[i].bytes, region->count * geometry.chunk_bytes - offset);
    const bool whole = operands[i].bytes == 0;
    const auto first = whole ? 0 : static_cast<uint32_t>(geometry.chunk_of(offset));
    const auto end = whole ? region->count : static_cast<uint32_t>(geometry.chunks_for(offset + bytes));
    const int reads = operands[i].access & OOC_READ ? 1 : 0, writes = operands[i].access & OOC_WRITE ? 1 : 0;
    limits.push_back({region->group, first, 1, reads, writes});
    limits.push_back({region->group, end, -1, -reads, -writes});
  }
  std::sort(limits.begin(), limits.end(), [](const Limit& a, const Limit& b) {
    return a.group != b.group ? a.group < b.group : a.slot < b.slot;
  });
  std::vector<Hold> runs;
  int ranges = 0, reads = 0, writes = 0;
  for (size_t i = 0; i < limits.size(); ++i) {
    if (ranges > 0 && limits[i].slot > limits[i - 1].slot) {  // at the next variable none is open
      Region* region = regions[limits[i].group];
      Hold run{{region, region->generation}};
      run.first = limits[i - 1].slot;
      run.count = limits[i].slot - run.first;
      run.reads = reads > 0;
      run.writes = writes > 0;
      Hold* last = runs.empty() || runs.back().region != region ? nullptr : &runs.back();
      const bool continues = last != nullptr && last->first + last->count == run.first && last->reads == run.reads &&
                             last->writes == run.writes;
      if (continues) last->count += run.count;
      else runs.push_back(run);
    }
    ranges += limits[i].ranges;
    reads += limits[i].reads;
    writes += limits[i].writes;
  }
  return runs;
}

}  // namespace

// What every function begins with: the pins of the thread's last function end. Returns OOC_OK with `thread.in_function`
// set where memory is plain, as nothing else is to be done then.
[[gnu::always_inline]] inline int Core::enter(Lock& lock, ThreadState& thread, bool on_host) {
  if (paused_ != 0) {
    if (const int status = pass_pause(lock)) return status;
    if (detached_) {
      thread.in_function = true;
      return OOC_OK;
    }
  }
  if (on_host) host_.prepare_in_place();
  else if (device_lost(lock) && streams_.on()) return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  holds_.release(thread.held);
  if (holds_.has_orphans() && threads_.active() == 0 && threads_.works() == 0) holds_.release_orphans();
  if (strict_)
    if (const int status = evict_unpinned(lock)) return status;
  ++serial_;
  return OOC_OK;
}

// It would wait for nobody: nothing else runs, and what is pinned exceeds the budget. Known before anybody is told of
// the function.
bool Core::cannot_begin(const ThreadState& thread) {
  const auto absent = [&thread] {
    uint64_t chunks = 0;
    for (const Hold& hold : thread.held)
      if (const Region* region = hold.get()) chunks += hold.absent(region);
    return chunks;
  };
  const auto alone = [this] { return threads_.active() == 0 && threads_.works() == 0; };
  while (holds_.pinned_chunks() + slabs_.used() > pool_.limit() && alone() && absent() > idle_.count())
    if (!release_idle_threads() && !pool_.recover()) {
      set_last_error(describe_need(recorder().function_name(thread.function), holds_.pinned_chunks()));
      return true;
    }
  return false;
}

int Core::refuse_begin(ThreadState& thread, bool recorded, int status) {
  holds_.release(thread.held);
  if (recorded) iterations_.recorder().forget_function();
  return status;
}

void Core::undo_begin() {
  ThreadState* thread = threads_.find();
  if (thread == nullptr) return;
  const Lock lock(mutex_);
  if (thread->in_function && !detached_) threads_.takes_back();
  thread->in_function = false;
  holds_.release(thread->held);
  changed_.notify_all();
}

// Returns whether some of it is not on the device.
[[gnu::always_inline]] inline bool Core::hold_operands(ThreadState& thread, const ooc_operand* operands, uint32_t count,
                                                       bool recorded) {
  bool missing = false;
  for (uint32_t i = 0; i < count; ++i) {
    Region* region = table_.find(operands[i].address);
    if (region == nullptr) continue;
    if (operands[i].access & OOC_WRITE) {
      region->write_serial = serial_;
      thread.writes = true;
    }
    if (region->use_serial == serial_) {
      if (recorded) iterations_.recorder().widen_last_use(region, operands[i].access);
      continue;
    }
    region->use_serial = serial_;
    region->last_function = thread.function;
    holds_.add(region, &thread);
    table_.touch(region);
    missing |= !region->fully_resident();
    if (recorded) iterations_.recorder().use(region, operands[i].access);
  }
  return missing;
}

// The same where operands are ranges.
bool Core::hold_ranges(ThreadState& thread, const ooc_operand* operands, uint32_t count, bool recorded) {
  bool missing = false;
  for (Hold& run : runs_of(geometry_, table_, serial_, operands, count)) {
    Region* region = run.region;
    region->last_function = thread.function;
    table_.touch(region);
    thread.writes |= run.writes;
    const uint32_t access = (run.reads ? uint32_t{OOC_READ} : 0) | (run.writes ? uint32_t{OOC_WRITE} : 0);
    if (run.count == region->count) {
      run.count = 0;
      if (run.writes) region->write_serial = serial_;
      if (recorded) iterations_.recorder().use(region, access);
    } else {
      region->in_ranges = true;
      if (recorded) iterations_.recorder().use(region, access, run.first, run.count);
    }
    holds_.add(run);
    thread.held.push_back(run);
    missing |= !run.resident(region);
  }
  return missing;
}

// The function has told all its operands, and holds them.
inline void Core::commence(ThreadState& thread, bool recorded) {
  if (recorded) {
    const uint64_t prefix = iterations_.recorder().end_operands();
    if (scheduler_ != nullptr) scheduler_->function_started(recorder().current().functions() - 1, prefix);
  }
  threads_.begins();
  thread.in_function = true;
  thread.operand_count = static_cast<uint32_t>(thread.held.size());
  thread.measured_chunks = thread.measured_need = 0;
}

// What the function holds is on the device, or on its way there.
[[gnu::always_inline]] inline int Core::begin_running(ThreadState& thread, CUstream stream, bool recorded) {
  note_need();
  if (streams_.on() && !begin_on_stream(thread, stream, recorded)) {
    thread.in_function = false;
    threads_.takes_back();
    return refuse_begin(thread, recorded, fail(OOC_DRIVER_FAILURE, device_.describe_loss()));
  }
  iterations_.count_function(thread.on_host);
  if (watch_.watched()) watch_.function_began(thread, recorded, streams_.on());
  return OOC_OK;
}

// Where the stream has to wait, the wait is timed: that is a stall.
bool Core::begin_on_stream(ThreadState& thread, CUstream stream, bool recorded) {
  thread.stream_handle = stream;
  StreamTimer& timer = *streams_.timer();
  const Region* waits = streams_.still_arriving(thread.stream, thread.held);
  const bool measure = recorded && iterations_.measures();
  const StreamTimer::Start waiting = waits != nullptr ? timer.start(stream) : nullptr;
  const StreamTimer::Start before = waits != nullptr && measure ? timer.start(stream) : nullptr;
  const bool ordered = streams_.begin_function(thread.stream, thread.held);
  if (waits != nullptr) {
    uint64_t event = Timeline::kNoEvent;
    if (waiting != nullptr) event = watch_.stall(now_seconds(), Timeline::kNotOver, waits, &thread);
    timer.stop(stream, waiting, iterations_.device_stall(), event);
  }
  if (measure) timer.function_started(stream, waits != nullptr, before);
  return ordered;
}

int Core::function_begin(uint32_t function, const ooc_operand* operands, uint32_t count, CUstream stream) {
  ThreadState& thread = thread_state();
  if (thread.in_function) return fail(OOC_NESTED, "a function began within a function of the same thread");
  if (const int status = tell_use(function, operands, count)) return status;
  Lock lock(mutex_);
  thread.stream = streams_.index(stream);
  if (const int status = enter(lock, thread, false); status != OOC_OK || thread.in_function) return status;
  const bool recorded = iterations_.begin_function(&thread, function);
  thread.writes = thread.on_host = false;
  thread.function = function;
  bool ranges = false;
  for (uint32_t i = 0; i < count; ++i) ranges |= operands[i].bytes != 0;
  const bool missing = __builtin_expect(ranges, false) ? hold_ranges(thread, operands, count, recorded)
                                                       : hold_operands(thread, operands, count, recorded);
  if (missing && cannot_begin(thread)) return refuse_begin(thread, recorded, OOC_OUT_OF_MEMORY);
  commence(thread, recorded);
  const uint64_t serial = serial_;
  if (missing) {
    const HostBusy busy(recorded ? measuring(&thread) : nullptr, stream);
    if (const int status = bring_operands(lock, thread)) return refuse_begin(thread, recorded, status);
  }
  if (const int status = begin_running(thread, stream, recorded)) return status;
  if (thread.writes)
    for (const Hold& hold : thread.held) {
      // A later one: another function declared to write it while this one waited, and hides whether this one does.
      if (hold.whole() && hold.region->write_serial >= serial) host_.written(hold.region);
      else if (hold.writes && hold.get() != nullptr) host_.written(hold.region, hold.first, hold.count);
    }
  return OOC_OK;
}

// The same on host memory (host_functions.cpp).
int Core::function_begin_host(uint32_t function, const ooc_operand* operands, uint32_t count, CUstream stream) {
  ThreadState& thread = thread_state();
  if (thread.in_function) return fail(OOC_NESTED, "a function began within a function of the same thread");
  if (const int status = tell_use(function, operands, count)) return status;
  Lock lock(mutex_);
  thread.stream = streams_.index(stream);
  if (const int status = enter(lock, thread, true); status != OOC_OK || thread.in_function) return status;
  const std::vector<Hold> runs = runs_of(geometry_, table_, serial_, operands, count);
  std::vector<std::unique_ptr<HostCopies::Lifted>> lifted;
  bool still = true;
  do {
    if (!lift_all(lock, runs, lifted))
      return fail(OOC_OUT_OF_MEMORY, "no host memory for variables on the disk to be used there: " + host_.describe());
    still = wait_until_still(lock, runs);
  } while (still && std::ranges::any_of(runs, [this](const Hold& run) { return run.get() && host_.is_below(run.get()); }));
  // From here on the lock is not given up.
  still = still && streams_.host_waits_for_all() && mappings_.vacate_all();
  if (!still) return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  if (const int status = map_in_place(runs)) return status;
  const bool recorded = iterations_.begin_function(&thread, function);
  thread.writes = false;
  thread.on_host = true;
  thread.function = function;
  hold_in_place(thread, runs, recorded);
  commence(thread, recorded);
  return begin_running(thread, stream, recorded);
}

int Core::function_end(bool keep_allocations) {
  ThreadState& thread = thread_state();
  if (!thread.in_function) return fail(OOC_INVALID, "a function ended that had not begun");
  const bool simple = !streams_.on() && !keep_allocations && thread.measured_need == 0;
  Lock lock(mutex_, std::defer_lock);
  if (!simple) lock.lock();
  thread.in_function = false;
  if (detached_) return OOC_OK;
  if (watch_.watched()) watch_.function_ended(thread);
  if (streams_.on()) {
    const bool awaited = scheduler_ != nullptr && scheduler_->waits_for_last_function();
    streams_.end_function(thread.stream, thread.held, awaited, transitions_.anything_left());
    if (iterations_.measures() && iterations_.records(&thread)) streams_.timer()->function_ended(thread.stream_handle);
    // What it enqueued uses addresses that change their memory. Of a device that is lost nothing changes any more.
    if (thread.on_host) (void)streams_.host_waits_for_all();
  }
  threads_.ends();
  // Whoever waits said so before it looked at the count of functions, so one of the two sees the other.
  const bool awaited = threads_.starving > 0 || threads_.yielding > 0 || paused_ != 0;
  if (simple && !awaited) return OOC_OK;
  if (!lock.owns_lock()) lock.lock();
  if (keep_allocations)
    for (size_t i = thread.operand_count; i < thread.held.size(); ++i)
      if (Region* region = thread.held[i].get(); region != nullptr && !thread.held[i].kept) holds_.keep(region);
  if (awaited) changed_.notify_all();
  if (thread.measured_need == 0) return OOC_OK;
  const uint64_t need = thread.measured_need;
  thread.measured_chunks = thread.measured_need = 0;
  return fail(OOC_OUT_OF_MEMORY, describe_need(recorder().function_name(thread.function), need));
}

bool Core::in_function() const {
  const ThreadState* thread = threads_.find();
  return thread != nullptr && thread->in_function;
}

}  // namespace ooc
