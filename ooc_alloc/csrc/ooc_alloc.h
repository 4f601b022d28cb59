// The C interface of libooc_alloc.so: a device memory allocator whose variables can leave the device and come back.
//
//   core      one device, one budget, one address range
//   region    the address range of one variable larger than small_limit_bytes; the unit of swapping
//   function  what a framework calls an operator: it uses variables, and may allocate and free some
//   iteration the functions between two boundaries; the recorder keeps its sequence, a plan is carried out along it
//
// Status codes: 0 is success. Every call that fails leaves a message for ooc_last_error() in the calling thread.
// All sizes are bytes, all times seconds, all indexes start at 0 unless said otherwise.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OOC_API __attribute__((visibility("default")))
#define OOC_ABI_VERSION 11

typedef struct ooc_core ooc_core;

enum {
  OOC_OK = 0,
  OOC_OUT_OF_MEMORY = 1,     // the pinned set of the running function does not fit the budget, or no host memory is left
  OOC_DRIVER_FAILURE = 2,    // a driver call failed and retrying did not help; the data are still in one of the two places
  OOC_STRICT_VIOLATION = 3,  // strict mode: a function wrote a variable that it had declared as read only
  OOC_INVALID = 4,           // a bad argument
  OOC_NO_HOST_MEMORY = 6,    // the system gives no memory for our own books; nothing was begun
  OOC_NESTED = 5,            // function_begin within a function of the same thread: it belongs to that one, do not end it
};

enum { OOC_READ = 1, OOC_WRITE = 2 };

typedef struct {
  uint32_t struct_bytes;         // sizeof(ooc_config), for compatibility
  int32_t device_ordinal;
  const char* driver_library;    // "libcuda.so.1", or the path of the emulated driver
  uint64_t budget_bytes;         // 0: 90% of the device memory that is free now
  uint64_t host_budget_bytes;    // host bytes for swapped data, at least one chunk
  uint64_t chunk_bytes;          // rounded up to the driver's granularity
  uint64_t small_limit_bytes;    // allocations up to this size go to slabs (ooc_core_small_limit); 0: every allocation is a region
  uint64_t small_alignment;      // of slab allocations, a power of two; 0: 64
  uint64_t address_space_bytes;  // of regions; 0: 1 TiB
  uint64_t copy_piece_bytes;     // longest single copy, so that an urgent one does not wait long; 0: 4 MiB
  int32_t strict;                // 1: every unpinned region leaves before every function, and clean copies are verified
  int32_t run_daemon;            // 1: start the worker threads (0: plans are carried out by nobody; for tests)
  int32_t asynchronous;          // 1: functions run on streams of the device, and the host does not wait for them
  int32_t safe;                  // 1: there the host waits for every copy and function, and nothing relies on events
  double wait_limit_seconds;     // a wait for the device that takes longer ends with an error; 0: 1800
  const char* disk_folder;       // swapped data go to a file there: all of them where the host budget is 0 (on a device whose
                                 // memory is the host's), else what host memory does not hold. Null or empty: no disk
  uint64_t disk_budget_bytes;    // bytes of that file, at least one chunk
  uint32_t disk_depth;           // pieces of 2 MiB under way in each direction at once, at least 1
  uint32_t reserved;
} ooc_config;

// One operand of a function: a variable, or a range of addresses within one. Pointers that the core does not own are
// ignored.
typedef struct {
  const void* address;
  uint32_t access;  // OOC_READ | OOC_WRITE
  uint32_t reserved;
  uint64_t bytes;   // 0: the whole variable that `address` lies in. Otherwise only [address, address + bytes) is used, as
                    // far as the variable reaches: just the chunks it touches are brought in and pinned. Several operands
                    // may be ranges of one variable.
} ooc_operand;

// A versioned plain struct; *_peak values are the largest since creation.
typedef struct {
  uint32_t version;  // OOC_ABI_VERSION
  uint32_t struct_bytes;
  uint64_t chunk_bytes, budget_bytes, host_budget_bytes, device_total_bytes;
  uint64_t live_bytes, live_peak_bytes;                  // requested bytes of everything allocated, resident or not
  uint64_t region_live_bytes, small_live_bytes;          // the two parts of live_bytes
  uint64_t device_bytes, device_peak_bytes;              // physical device memory held: regions, caches, slabs, free chunks;
                                                         // never more than the budget that is in force
  uint64_t free_bytes, cached_bytes, slab_bytes, slab_used_bytes, resident_bytes;  // parts of device_bytes
  uint64_t pinned_bytes;                                 // regions that running functions or users hold on the device
  uint64_t host_bytes, host_used_bytes, host_peak_bytes; // host arena: taken from the system, in use, most taken
  uint64_t disk_budget_bytes, disk_bytes, disk_used_bytes, disk_peak_bytes;  // the same of the file on a disk; 0 without one
  uint64_t disk_read_bytes, disk_written_bytes, disk_failure_count;  // each attempt that failed or came short counts
  uint64_t min_budget_bytes;                             // largest pinned set plus slabs so far, and twice the slabs
  uint64_t fit_budget_bytes;                             // the smallest budget in which nothing would have moved
  uint64_t waste_at_live_peak_bytes;                     // rounding to chunks plus holes in slabs, at the live peak
  uint64_t swap_out_bytes, swap_in_bytes, swap_out_count, swap_in_count;
  uint64_t demand_swap_in_count, demand_swap_in_bytes, demand_swap_out_bytes;
  uint64_t clean_drop_count, clean_drop_bytes, cancelled_swap_out_count;
  uint64_t write_back_bytes;  // of the swap-outs: copied ahead, while the variable stayed on the device
  uint64_t divergence_count, plan_switch_count, plan_count, planned_iteration_count;
  uint64_t functions, iterations, allocations, frees, cache_hits;
  uint64_t driver_failure_count, driver_calls_map, driver_calls_unmap, driver_calls_set_access, driver_calls_create;
  uint64_t external_pin_count;
  uint64_t event_create_count;  // of events that order streams
  // Chunks by what they are for; they add up to device_bytes. leaving, arriving: a copy is under way (or the chunk is
  // being mapped). slab_empty: of slabs, without an allocation. lost: the driver would not unmap them.
  uint64_t chunks_resident, chunks_leaving, chunks_arriving, chunks_cached, chunks_free, chunks_slab, chunks_slab_empty;
  uint64_t chunks_lost;
  uint64_t waste_bytes;          // rounding to chunks plus holes in slabs, now
  uint64_t host_unpinned_bytes;  // of host_bytes: the driver would not pin them, their copies are slower
  // driver_failure_count by call, each attempt counted.
  uint64_t driver_failures_mem_create, driver_failures_mem_map, driver_failures_mem_set_access, driver_failures_mem_unmap;
  uint64_t driver_failures_copy_out, driver_failures_copy_in, driver_failures_host_register;
  uint64_t driver_failures_event_create, driver_failures_event_record, driver_failures_event_synchronize;
  uint64_t driver_failures_stream_synchronize, driver_failures_stream_wait_event;
  uint64_t host_backed_function_count;  // functions for which host memory stood in (ooc_core_function_begin_host)
  uint64_t unmapped_bytes;
  double stall_seconds, stall_swap_in_seconds, stall_room_seconds, copy_out_seconds, copy_in_seconds;
  double stall_disk_seconds;  // of these, for a disk below host memory
  double disk_read_seconds, disk_write_seconds;  // in which blocks of host memory came up from it and went down
  double map_seconds, unmap_seconds;  // in calls of the driver, which are no part of copy_*_seconds; map: with the access
} ooc_stats;

// Recorded iteration: sizes first, then ooc_trace_copy into arrays of these lengths.
typedef struct {
  uint64_t fingerprint;
  uint32_t functions, variables, uses;
  uint32_t planned;                // a plan for this fingerprint is installed
  uint32_t followed_plan;          // the iteration ran under a plan until its end
  uint32_t contains_first;         // the process's first function is in it: set-up, not a steady iteration
  uint32_t timed;                  // the trace says how long functions took: on streams only while plans are made
  uint64_t seen_count;             // iterations with this fingerprint so far
  uint64_t live_peak_bytes, slab_peak_bytes;  // most bytes within the iteration; slabs: in use
  uint64_t swapped_bytes;          // bytes moved either way, plus clean drops, within the iteration
  double seconds;                  // from the boundary before to this one
  double stall_seconds;
} ooc_iteration;

typedef struct {
  uint32_t* function_name;   // [functions] id as given by ooc_core_function_id
  double* function_start;    // [functions] since the start of the iteration
  double* function_seconds;  // [functions] until the next one began or the iteration ended, without stalls
  uint64_t* variable_bytes;  // [variables]
  int32_t* variable_born;    // [variables] function during which it was allocated; -1: before the iteration
  int32_t* variable_died;    // [variables] last function at which it lives; functions: it survives the iteration
  int32_t* variable_previous;  // [variables] its id in the iteration before; -1: none
  uint32_t* use_function;    // [uses] ascending
  uint32_t* use_variable;    // [uses]
  uint32_t* use_access;      // [uses] OOC_READ | OOC_WRITE
  // Which chunks of the variable: 0 and all of them, or a range. A function that uses several ranges of a variable has
  // one entry for each maximal run of chunks with the same access, ascending; of a chunk, what all operands say of it.
  uint32_t* use_first_chunk;  // [uses]
  uint32_t* use_chunk_count;  // [uses]
} ooc_trace_arrays;

// A plan for the iterations with one fingerprint; semantics in swapd/planning/plan.py. Arrays are copied.
typedef struct {
  uint64_t fingerprint;
  uint32_t outs, ins, write_backs;
  const int32_t *out_variable, *out_first_chunk, *out_chunk_count, *out_after_function;
  const int32_t *in_variable, *in_first_chunk, *in_chunk_count, *in_after_function, *in_after_outs, *in_before_function;
  const int32_t *back_variable, *back_first_chunk, *back_chunk_count, *back_after_function;
  // Three tiers: host copies of whole variables go down to the disk when a function has ended, and come up again. With
  // `exclusive`, what came in has no host copy any more.
  uint32_t downs, ups, exclusive;
  const int32_t *down_variable, *down_after_function;
  const int32_t *up_variable, *up_after_function;
} ooc_plan;

// What the timeline holds.
enum {
  OOC_EVENT_FUNCTION = 1,   // from its begin, operands on the device, to its end
  OOC_EVENT_COPY_OUT = 2,   // bytes: that arrived, as swap_out_bytes counts them; 0: it was for nothing (freed, failed)
  OOC_EVENT_COPY_IN = 3,
  OOC_EVENT_DROP = 4,       // a clean variable left without a copy
  OOC_EVENT_STALL_SWAP_IN = 5,  // a thread waited for a variable: the one of its operands that took longest
  OOC_EVENT_STALL_ROOM = 6,     // a thread waited until something had left
  OOC_EVENT_MEMORY = 7,     // from here on: bytes in use (variables, also those arriving, and slabs), free, cached
  OOC_EVENT_ITERATION = 8,  // bytes: its fingerprint; index: its functions
  OOC_EVENT_ALLOCATED = 9,  // a variable of one chunk or more, at `address`
  OOC_EVENT_FREED = 10,
};
enum {
  OOC_EVENT_ON_DEMAND = 1,  // a copy or drop that no plan asked for; an iteration that no plan was followed in
  OOC_EVENT_ENQUEUED = 2,   // the times are those of the host; the device runs it later
  OOC_EVENT_WRITE_BACK = 4, // a copy out after which the variable, or a part of it, stayed on the device
};
#define OOC_NO_FUNCTION 0xffffffffu
typedef struct {
  double start, end;    // seconds of the monotonic clock; on a GPU, copies and waits by the device's, brought to it. < 0: not over
  uint64_t bytes;
  union {
    uint64_t free_bytes, address;
  };
  uint64_t cached_bytes;
  uint64_t live_bytes;  // of MEMORY, ALLOCATED and FREED: requested bytes of everything allocated, from here on
  uint16_t kind, flags;
  uint32_t thread;      // 1, 2, ... by first function; 0: none that runs functions
  uint32_t function;    // id, or OOC_NO_FUNCTION: none runs in the thread, or it is not known
  int32_t index;        // of the function of the recorded sequence that runs; -1: none, or in another thread
  int32_t variable;     // its number in `iteration`; -1: none, or it has none
  int32_t region;       // where the variable lives; regions are used again; -1: none
  uint32_t iteration;   // 1, 2, ...; of a variable's event the last one that used it, 0: none did
  uint32_t reserved;
} ooc_event;
typedef struct {
  uint64_t capacity, recorded, lost;  // events kept at most; since the start; of these, overwritten
  uint64_t next;                      // position that the next event will have
  double now;                         // the timeline's clock
  uint32_t on, reserved;
} ooc_timeline;

OOC_API const char* ooc_last_error(void);
// Its status code, for calls that return none: OOC_OUT_OF_MEMORY where a smaller allocation may do, else OOC_DRIVER_FAILURE
// or OOC_INVALID.
OOC_API int ooc_last_status(void);
OOC_API uint32_t ooc_abi_version(void);

// Bytes of a device, in all and free now.
OOC_API int ooc_device_memory(const char* driver_library, int32_t ordinal, uint64_t* total, uint64_t* free);
// Null on failure. Set-up errors say which number is wrong and what would do.
OOC_API ooc_core* ooc_core_create(const ooc_config* config);
// Frees everything; no function may be running. Memory still allocated becomes invalid.
OOC_API void ooc_core_destroy(ooc_core* core);
// Stops the worker threads (at interpreter exit); the core goes on in demand mode.
OOC_API void ooc_core_stop_daemon(ooc_core* core);

OOC_API const char* ooc_core_device_name(ooc_core* core);
OOC_API int32_t ooc_core_device_ordinal(ooc_core* core);
// The address range that holds every allocation of the core: [*base, *base + *bytes).
OOC_API void ooc_core_address_range(ooc_core* core, uintptr_t* base, uintptr_t* bytes);

// Allocations up to this size go to slabs, which never leave the device, as long as these take half of the budget at most.
OOC_API uint64_t ooc_core_small_limit(ooc_core* core);
// What lies in slabs lies from this address on.
OOC_API uintptr_t ooc_core_slab_address(ooc_core* core);

// Null on failure (bytes > 0). The memory is pinned until the running function, or else the next one, has ended.
OOC_API void* ooc_core_malloc(ooc_core* core, uint64_t bytes);
// A variable of which nothing is on the device yet, larger than the budget if need be: for functions that use it in
// ranges. A chunk that was never written has no bytes anywhere; it comes in without a copy, and what it holds then is
// not specified. Not pinned. Up to the small limit: as ooc_core_malloc.
OOC_API void* ooc_core_malloc_absent(ooc_core* core, uint64_t bytes);
// The bytes of a variable are given up, and with them its chunks and host copies; its address stays. The pins of the
// thread's last function end first, and moves under way. What it holds is not specified until it was written; in the
// recorded sequence its next use is the birth of another variable. OOC_INVALID, and nothing is done: it is in use.
OOC_API int ooc_core_discard(ooc_core* core, const void* address);
// Who makes discarded variables again is told, by the thread, without a lock. The struct stays; null: nobody is told.
typedef struct {
  // A function begins, or with OOC_NO_FUNCTION a pin; it may itself run functions. The call fails with another status than
  // OOC_OK, of which ooc_refuse has said why.
  int (*before_use)(uint32_t function_id, const ooc_operand* operands, uint32_t count);
  // Memory is freed. If it returns 1, nothing is done now, and ooc_core_free is called again later.
  int (*before_free)(void* address);
  int (*before_budget_falls)(void);  // functions that have run may not fit any more; as before_use
} ooc_watcher;
OOC_API void ooc_core_watch_uses(ooc_core* core, const ooc_watcher* watcher);
// Makes this the calling thread's last error, and returns the status.
OOC_API int ooc_refuse(int status, const char* message);
// 1 if a user who may write it at any time has pinned a variable, or anything in the chunks of a small block.
OOC_API int ooc_core_exposed(ooc_core* core, const void* address);
// 1 if functions that the calling thread begins now are part of the recorded sequence.
OOC_API int ooc_core_records(ooc_core* core);
// Any thread. Unknown addresses are ignored.
OOC_API void ooc_core_free(ooc_core* core, void* address);

// The same where functions run on streams (config.asynchronous); `stream` is a CUstream. Memory may be used on the
// stream it was allocated for at once, and is freed when what is enqueued on the given stream, and on those of
// functions that had it as an operand, is done. Without a stream: the thread's last one for malloc; for free the default
// one. A stream that is given to a call has not been destroyed, and it may be destroyed afterwards.
OOC_API void* ooc_core_malloc_on(ooc_core* core, uint64_t bytes, void* stream);
OOC_API void ooc_core_free_on(ooc_core* core, void* address, void* stream);
// Memory that somebody uses who announces no functions: pinned from the start until unpinned (*token, as of
// ooc_core_pin) or freed. Unlike ooc_core_malloc_on and ooc_core_pin in a row, it never waits on the host for who used
// the memory before.
OOC_API void* ooc_core_malloc_pinned(ooc_core* core, uint64_t bytes, void* stream, uint32_t access, uint64_t* token);
// Work enqueued so far on a stream uses the memory, though no function with it as an operand said so.
OOC_API void ooc_core_record_use(ooc_core* core, void* address, void* stream);
// The stream is never destroyed. Of another, what is enqueued is recorded at once, at every function and free.
OOC_API void ooc_core_stream_lasts(ooc_core* core, void* stream);

// Stable id of a function's name.
OOC_API uint32_t ooc_core_function_id(ooc_core* core, const char* name);
OOC_API const char* ooc_core_function_name(ooc_core* core, uint32_t id);
// Brings every operand onto the device and pins it. Within a function of the same thread it does nothing: OOC_NESTED.
// After a status other than 0 nothing is pinned and function_end must not be called; the recorded sequence is then as
// if it had not begun.
OOC_API int ooc_core_function_begin(ooc_core* core, uint32_t function_id, const ooc_operand* operands, uint32_t count);
// A function whose work is enqueued on a stream; its operands' copies are waited for there, not on the host.
OOC_API int ooc_core_function_begin_on(ooc_core* core, uint32_t function_id, const ooc_operand* operands, uint32_t count,
                                       void* stream);
// For a function that fits no budget and cannot be cut: operands' chunks that are not on the device stay in host memory,
// and their addresses lead there until the function has ended (it runs, slowly). So does what it allocates and does not
// fit. Its host bytes count as such, never as device bytes. Where functions run on streams, the host waits for all that
// is enqueued, before it begins and when it ends. OOC_INVALID: the driver has no such memory.
OOC_API int ooc_core_function_begin_host(ooc_core* core, uint32_t function_id, const ooc_operand* operands,
                                         uint32_t count, void* stream);
// 0: an allocation that does not fit fails at once. 1, as at first: where kernels use host memory, a function that only
// reads is run to its end with such memory, so that the error can say what it needs (see ooc_core_function_end).
OOC_API void ooc_core_set_measuring(ooc_core* core, int on);
// The pins last until the thread's next function begins, so that its caller may still touch results without an
// operator. keep_allocations: what the function allocated and still lives stays pinned until freed (opaque results).
// Status OOC_OUT_OF_MEMORY: the function could only be measured (see ooc_core_set_measuring); its results must be
// dropped.
OOC_API int ooc_core_function_end(ooc_core* core, int keep_allocations);
// 1 if the calling thread is between function_begin and function_end.
OOC_API int ooc_core_in_function(ooc_core* core);

// Keeps the region of an address on the device until unpinned (or freed). A small variable leaves only as the device
// goes to sleep, and stays then, too; an unknown address succeeds without effect. access OOC_WRITE: the memory may be
// written at any time until unpinned. *token (may be null) is for unpin, which does nothing if the variable is gone by
// then.
OOC_API int ooc_core_pin(ooc_core* core, const void* address, uint32_t access, uint64_t* token);
// For a user whose work comes on the stream, or after it: the stream waits for what is still to arrive, and not the host.
OOC_API int ooc_core_pin_on(ooc_core* core, const void* address, uint32_t access, void* stream, uint64_t* token);
OOC_API int ooc_core_unpin(ooc_core* core, uint64_t token, uint32_t access);
// From one to the other a library works in threads of its own on memory that the caller has pinned for it (a collective).
// Whoever lacks room waits for that, for a minute at most. What such threads allocate stays on the device meanwhile.
OOC_API void ooc_core_work_begins(ooc_core* core);
OOC_API void ooc_core_work_ends(ooc_core* core);
// Turns everything allocated into plain host memory at the same addresses and stops using the device, for good; only
// where kernels run on the host. No function may be running. All or nothing: OOC_OUT_OF_MEMORY leaves all as it was.
OOC_API int ooc_core_detach(ooc_core* core);
// Swaps out every region that nothing pins (tests, strict mode, memory pressure).
OOC_API int ooc_core_evict_all(ooc_core* core);
// Everything that no user reaches leaves the device for the host, or the disk, and the device's memory goes back to the
// driver; addresses and values stay. Functions of other threads are waited for. *held_bytes: what stays, as it is pinned.
// OOC_OUT_OF_MEMORY: the host has no room for all of it; then everything is as it was. Whoever begins a function,
// allocates or pins wakes the device. ooc_core_wake does so too, and brings back what was there when it fell asleep, what
// is used next first, as far as there is room; *back_bytes were copied.
OOC_API int ooc_core_sleep(ooc_core* core, uint64_t* held_bytes);
OOC_API int ooc_core_wake(ooc_core* core, uint64_t* back_bytes);
// Waits until the worker threads have done all that the plan under way lets them do now.
OOC_API void ooc_core_settle(ooc_core* core);
// chunks[i] = 1 if chunk i of the region at an address is on the device and not under way, else 0; at most `count` are
// written. Returns how many chunks the region has; 0 for a small or unknown address.
OOC_API uint32_t ooc_core_residency(ooc_core* core, const void* address, uint8_t* chunks, uint32_t count);
// Gives cached and free chunks back to the driver.
OOC_API void ooc_core_release_cached(ooc_core* core);
// Another budget, at most the first one. What is beyond it leaves the device before the call returns.
// OOC_OUT_OF_MEMORY: what is in use, or the host memory, does not let it; then the budget is as it was. Plans go by the
// budget they were made for: forget them. Not within a function.
OOC_API int ooc_core_set_budget(ooc_core* core, uint64_t bytes);
// Waits for everything that is enqueued on the device: copies, and functions on streams that the core knows. While a stream
// is captured into a graph nothing is enqueued on it; what the graph uses has to be pinned.
OOC_API int ooc_core_synchronize(ooc_core* core);

// Ends the iteration. The calling thread is the one whose functions are recorded from now on.
OOC_API int ooc_core_boundary(ooc_core* core, ooc_iteration* ended);
// From now on the calling thread's functions are the program's (0), no part of the sequence (OOC_APART: what comes in another
// order each time, as data do), or make again what others made (OOC_REMAKES). Not within a function. *before: what it was.
enum { OOC_APART = 1, OOC_REMAKES = 2 };
OOC_API int ooc_core_set_apart(ooc_core* core, int part, int* before);
// The calling thread is about to do what will be an iteration, while other threads may be at theirs. *taken becomes 1, and
// its functions are recorded from now on, if the recorded thread is gone, if it took the sequence before, or if it has
// begun no function since somebody asked the last time; else 0. Whoever asks says in turn who is done.
OOC_API int ooc_core_take_sequence(ooc_core* core, int* taken);
// Where the calling thread's functions repeat those that came before, so that an iteration is to end after the one that
// runs, found(first, second) is called: in the thread, under the core's lock, and again until the iteration has ended.
// Null: nobody is told any more.
OOC_API int ooc_core_watch_repeats(ooc_core* core, int (*found)(void* first, void* second), void* first, void* second);
OOC_API int ooc_core_trace_copy(ooc_core* core, uint64_t fingerprint, ooc_trace_arrays* arrays);
OOC_API int ooc_core_install_plan(ooc_core* core, const ooc_plan* plan);
OOC_API void ooc_core_forget_plans(ooc_core* core);
OOC_API void ooc_core_read_stats(ooc_core* core, ooc_stats* stats);

// Keeps the last `capacity` events (a power of two, or rounded up to one; 80 bytes each) from now on.
OOC_API int ooc_core_timeline_start(ooc_core* core, uint64_t capacity);
// No more events; those that are there can still be read.
OOC_API void ooc_core_timeline_stop(ooc_core* core);
// Copies at most `count` events, by position (0, 1, ... since the core was made), from position *from on or from the
// oldest one that is kept. *from becomes the position of the first one. Returns how many; 0: there are no more.
OOC_API uint32_t ooc_core_timeline_read(ooc_core* core, uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state);
// Functions and stalls as NVTX ranges from now on, through a library with nvtxRangePushA and nvtxRangePop.
OOC_API int ooc_core_ranges_load(ooc_core* core, const char* library);

// Where in the user's program a variable was allocated: a text of the integration's. 0: not known (or too many texts).
OOC_API uint32_t ooc_core_place_id(ooc_core* core, const char* text);
OOC_API const char* ooc_core_place_text(ooc_core* core, uint32_t place);  // null: there is none
OOC_API void ooc_core_set_place(ooc_core* core, const void* address, uint32_t place);
// place[variables] of a trace that is kept; as ooc_core_trace_copy.
OOC_API int ooc_core_trace_places(ooc_core* core, uint64_t fingerprint, uint32_t* place);

// Recounts every chunk and byte by walking all structures, and compares with the counters. 0 if they agree.
OOC_API int ooc_core_audit(ooc_core* core);

// --- The plain pair: two functions for programs that know nothing of functions and variables ---
//
// They have the signatures that torch.cuda.memory.CUDAPluggableAllocator takes by name; any other program may call
// them. All memory of the pair is pinned while it is allocated, as nobody announces its uses: the pair keeps to the
// budget and recycles chunks, it never swaps. Large allocations are aligned to the chunk, small ones to 512 bytes.
//
// They use the core that was set, and without one they make one at the first allocation, from OOC_ALLOC (`emulated`, or
// else libcuda.so.1), OOC_BUDGET, OOC_CHUNK_SIZE and OOC_SMALL_LIMIT, for the device of that allocation. It stays until
// the process ends.

// Null for 0 bytes and on failure: the reason is in ooc_last_error(), and the first of each kind on stderr. The memory
// may be used at once on `stream` (a CUstream).
OOC_API void* ooc_malloc(ssize_t bytes, int device, void* stream);
// Freed when what is enqueued on `stream` is done. Null and addresses that are not the core's are ignored.
OOC_API void ooc_free(void* address, ssize_t bytes, int device, void* stream);
// The core that the pair uses from now on; null: none. One that is destroyed is forgotten. What was allocated from
// another core before can no longer be freed through the pair.
OOC_API void ooc_set_default_core(ooc_core* core);

#ifdef __cplusplus
}
#endif
