// Probe: what the machine costs, measured through the driver table. Plain C, of libooc_alloc.so.
//
// Each measurement runs once to warm up and then `repeats` times; what it reports are medians, in seconds of the host's
// clock. Status codes and ooc_last_error() are those of ooc_alloc.h.
#pragma once

#include "ooc_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ooc_probe ooc_probe;

typedef struct {
  char name[256];
  uint64_t total_bytes, free_bytes;
  uint64_t granularity_bytes;  // chunks are multiples of it
  int32_t copy_engines;        // 2 or more: both directions at once
  int32_t driver_version;      // 1000 * major + 10 * minor
} ooc_probe_device;

// One range of `chunks` chunks: each is created, mapped and released by itself; one set-access and one unmap cover all.
typedef struct {
  double create_seconds, map_seconds, release_seconds;  // per chunk
  double set_access_seconds, unmap_seconds;             // per range
} ooc_probe_memory;

// Copies of `bytes` between pinned host memory and the device, enqueued and waited for.
typedef struct {
  double out_seconds, in_seconds;            // one direction alone
  double both_out_seconds, both_in_seconds;  // each direction while the other runs too
} ooc_probe_copy;

typedef struct {
  double register_seconds, unregister_seconds;  // to pin, and to unpin, all the bytes of touched host memory
} ooc_probe_pinning;

// Null on failure.
OOC_API ooc_probe* ooc_probe_open(const char* driver_library, int32_t device_ordinal);
OOC_API void ooc_probe_close(ooc_probe* probe);

OOC_API int ooc_probe_describe(ooc_probe* probe, ooc_probe_device* device);
// chunk_bytes: a multiple of the granularity.
OOC_API int ooc_probe_measure_memory(ooc_probe* probe, uint64_t chunk_bytes, uint32_t chunks, uint32_t repeats,
                                     ooc_probe_memory* cost);
OOC_API int ooc_probe_measure_copy(ooc_probe* probe, uint64_t bytes, uint32_t repeats, ooc_probe_copy* cost);
OOC_API int ooc_probe_measure_pinning(ooc_probe* probe, uint64_t bytes, uint32_t repeats, ooc_probe_pinning* cost);

#ifdef __cplusplus
}
#endif
