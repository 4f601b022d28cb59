// The C interface over Core; what a scheduler has to do with is in swapd/csrc/exports.cpp. Exceptions end here.
#include "capi.h"

#include <algorithm>

using namespace ooc;

namespace {

constexpr const char* kNoTrace = "no trace with this fingerprint is kept";

// The special handles of the driver: 1 is the default stream, as 0 is; 2 is a stream of the calling thread's.
void* const kDefaultStream = reinterpret_cast<void*>(1);
void* const kStreamOfThread = reinterpret_cast<void*>(2);

// Other threads record events too, and would record them on streams of their own.
CUstream stream_of(void* handle) {
  if (handle == kStreamOfThread)
    throw Failure(OOC_INVALID, "the default stream of a thread (handle 2) is known to no other thread, so its work cannot "
                               "be ordered: use the default stream (0) or a stream that was created");
  return static_cast<CUstream>(handle == kDefaultStream ? nullptr : handle);
}

}  // namespace

const char* ooc_last_error(void) { return last_error_text(); }
int ooc_last_status(void) { return last_error_status(); }
int ooc_refuse(int status, const char* message) {
  return guarded([&] { return fail(status, message); });
}
uint32_t ooc_abi_version(void) { return OOC_ABI_VERSION; }

int ooc_device_memory(const char* driver_library, int32_t ordinal, uint64_t* total, uint64_t* free) {
  return guarded([&]() -> int {
    const Device device(driver_library, ordinal);
    *total = device.total_bytes();
    *free = device.free_bytes();
    return OOC_OK;
  });
}

// ---- what a core is -------------------------------------------------------------------------------------------------

int32_t ooc_core_device_ordinal(ooc_core* core) { return core->device().ordinal(); }
const char* ooc_core_device_name(ooc_core* core) { return core->device().name().c_str(); }

void ooc_core_address_range(ooc_core* core, uintptr_t* base, uintptr_t* bytes) {
  *base = reinterpret_cast<uintptr_t>(core->device().base());
  *bytes = core->device().reserved();
}

uint64_t ooc_core_small_limit(ooc_core* core) { return core->small_limit_bytes(); }
uintptr_t ooc_core_slab_address(ooc_core* core) { return reinterpret_cast<uintptr_t>(core->slab_address()); }

// ---- memory ---------------------------------------------------------------------------------------------------------

void* ooc_core_malloc(ooc_core* core, uint64_t bytes) {
  return gated([&] { return core->malloc(bytes); });
}

void* ooc_core_malloc_on(ooc_core* core, uint64_t bytes, void* stream) {
  return gated([&] { return core->malloc(bytes, stream_of(stream)); });
}

void* ooc_core_malloc_absent(ooc_core* core, uint64_t bytes) { return gated(core, &Core::malloc_absent, bytes); }

void* ooc_core_malloc_pinned(ooc_core* core, uint64_t bytes, void* stream, uint32_t access, uint64_t* token) {
  return gated([&] { return core->malloc_pinned(bytes, stream_of(stream), access, token); });
}

void ooc_core_free(ooc_core* core, void* address) {
  guarded([&] { core->free(address); });
}

void ooc_core_free_on(ooc_core* core, void* address, void* stream) {
  guarded([&] {
    if (stream != kStreamOfThread) return core->free(address, stream_of(stream));
    core->device().bind_thread();
    core->device().drain(static_cast<CUstream>(stream));  // who frees can wait for its own stream
    core->free(address);
  });
}

void ooc_core_stream_lasts(ooc_core* core, void* stream) {
  guarded([&] { core->stream_lasts(stream_of(stream)); });
}
void ooc_core_record_use(ooc_core* core, void* address, void* stream) {
  guarded([&] { core->record_use(address, stream_of(stream)); });
}

int ooc_core_pin(ooc_core* core, const void* address, uint32_t access, uint64_t* token) {
  return gated(core, &Core::pin, address, access, token, std::nullopt);
}

int ooc_core_pin_on(ooc_core* core, const void* address, uint32_t access, void* stream, uint64_t* token) {
  return gated([&] { return core->pin(address, access, token, stream_of(stream)); });
}

int ooc_core_unpin(ooc_core* core, uint64_t token, uint32_t access) {
  return guarded(core, &Core::unpin, token, access);
}

void ooc_core_work_begins(ooc_core* core) { guarded(core, &Core::work_begins); }
void ooc_core_work_ends(ooc_core* core) { guarded(core, &Core::work_ends); }

int ooc_core_detach(ooc_core* core) { return guarded(core, &Core::detach); }
int ooc_core_discard(ooc_core* core, const void* address) { return guarded(core, &Core::discard, address); }
void ooc_core_watch_uses(ooc_core* core, const ooc_watcher* watcher) { core->watch_uses(watcher); }
int ooc_core_exposed(ooc_core* core, const void* address) {
  return guarded([&] { return core->exposed(address) ? 1 : 0; });
}
int ooc_core_evict_all(ooc_core* core) { return guarded(core, &Core::evict_all); }
int ooc_core_sleep(ooc_core* core, uint64_t* held_bytes) { return gated(core, &Core::sleep, held_bytes); }
int ooc_core_wake(ooc_core* core, uint64_t* back_bytes) { return gated(core, &Core::wake, back_bytes); }

uint32_t ooc_core_residency(ooc_core* core, const void* address, uint8_t* chunks, uint32_t count) {
  return gated(core, &Core::residency, address, chunks, count);
}

void ooc_core_release_cached(ooc_core* core) { guarded(core, &Core::release_cached); }
int ooc_core_set_budget(ooc_core* core, uint64_t bytes) { return gated(core, &Core::set_budget, bytes); }
int ooc_core_synchronize(ooc_core* core) { return guarded(core, &Core::synchronize); }

// ---- functions ------------------------------------------------------------------------------------------------------

uint32_t ooc_core_function_id(ooc_core* core, const char* name) { return gated(core, &Core::function_id, name); }
const char* ooc_core_function_name(ooc_core* core, uint32_t id) { return core->function_name(id); }

int ooc_core_function_begin(ooc_core* core, uint32_t function_id, const ooc_operand* operands, uint32_t count) {
  return begun(core, &Core::function_begin, function_id, operands, count, nullptr);
}

int ooc_core_function_begin_on(ooc_core* core, uint32_t function_id, const ooc_operand* operands, uint32_t count,
                               void* stream) {
  return guarded([&] { return begun(core, &Core::function_begin, function_id, operands, count, stream_of(stream)); });
}

int ooc_core_function_begin_host(ooc_core* core, uint32_t function_id, const ooc_operand* operands, uint32_t count,
                                 void* stream) {
  return guarded([&] { return begun(core, &Core::function_begin_host, function_id, operands, count, stream_of(stream)); });
}

void ooc_core_set_measuring(ooc_core* core, int on) { core->set_measuring(on != 0); }

int ooc_core_function_end(ooc_core* core, int keep_allocations) {
  return guarded(core, &Core::function_end, keep_allocations != 0);
}

int ooc_core_in_function(ooc_core* core) { return core->in_function() ? 1 : 0; }

int ooc_core_records(ooc_core* core) { return core->records() ? 1 : 0; }

int ooc_core_set_apart(ooc_core* core, int part, int* before) {
  return guarded([&] {
    if (part < 0 || part > OOC_REMAKES) return fail(OOC_INVALID, "functions are the program's (0), OOC_APART or OOC_REMAKES");
    ooc::Part was{};
    const int status = core->set_apart(ooc::Part{static_cast<uint8_t>(part)}, was);
    *before = static_cast<int>(was);
    return status;
  });
}

int ooc_core_take_sequence(ooc_core* core, int* taken) {
  return guarded([&] {
    bool mine = false;
    const int status = core->take_sequence(mine);
    *taken = mine ? 1 : 0;
    return status;
  });
}

int ooc_core_watch_repeats(ooc_core* core, int (*found)(void*, void*), void* first, void* second) {
  return guarded(core, &Core::watch_repeats, found, first, second);
}

// ---- what can be seen -----------------------------------------------------------------------------------------------

int ooc_core_trace_copy(ooc_core* core, uint64_t fingerprint, ooc_trace_arrays* arrays) {
  const Lock lock(core->mutex());
  const std::shared_ptr<Trace> trace = core->trace(fingerprint);
  if (!trace) return fail(OOC_INVALID, kNoTrace);
  for (size_t i = 0; i < trace->names.size(); ++i) {
    arrays->function_name[i] = trace->names[i];
    arrays->function_start[i] = trace->starts[i];
    arrays->function_seconds[i] = trace->seconds[i];
  }
  for (size_t i = 0; i < trace->variables.size(); ++i) {
    arrays->variable_bytes[i] = trace->variables[i].bytes;
    arrays->variable_born[i] = trace->variables[i].born;
    arrays->variable_died[i] = trace->variables[i].died;
    arrays->variable_previous[i] = trace->variables[i].previous;
  }
  for (size_t i = 0; i < trace->uses.size(); ++i) {
    arrays->use_function[i] = trace->uses[i].function;
    arrays->use_variable[i] = trace->uses[i].variable;
    arrays->use_access[i] = trace->uses[i].access;
    const Trace::Range range = trace->range(trace->uses[i]);
    const uint64_t chunk = core->chunk_bytes();
    const uint64_t all = (trace->variables[trace->uses[i].variable].bytes + chunk - 1) / chunk;
    arrays->use_first_chunk[i] = range.first;
    arrays->use_chunk_count[i] = static_cast<uint32_t>(std::min<uint64_t>(range.count, all));
  }
  return OOC_OK;
}

int ooc_core_trace_places(ooc_core* core, uint64_t fingerprint, uint32_t* place) {
  const Lock lock(core->mutex());
  const std::shared_ptr<Trace> trace = core->trace(fingerprint);
  if (!trace) return fail(OOC_INVALID, kNoTrace);
  for (size_t i = 0; i < trace->variables.size(); ++i) place[i] = trace->variables[i].place;
  return OOC_OK;
}

void ooc_core_read_stats(ooc_core* core, ooc_stats* stats) { guarded(core, &Core::read_stats, stats); }

int ooc_core_timeline_start(ooc_core* core, uint64_t capacity) {
  return guarded(core, &Core::timeline_start, capacity);
}

void ooc_core_timeline_stop(ooc_core* core) { guarded(core, &Core::timeline_stop); }

uint32_t ooc_core_timeline_read(ooc_core* core, uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state) {
  return gated(core, &Core::timeline_read, from, events, count, state);
}

int ooc_core_ranges_load(ooc_core* core, const char* library) { return guarded(core, &Core::ranges_load, library); }
uint32_t ooc_core_place_id(ooc_core* core, const char* text) { return gated(core, &Core::place_id, text); }
const char* ooc_core_place_text(ooc_core* core, uint32_t place) { return core->place_text(place); }

void ooc_core_set_place(ooc_core* core, const void* address, uint32_t place) {
  guarded(core, &Core::set_place, address, place);
}

int ooc_core_audit(ooc_core* core) { return guarded(core, &Core::audit); }
