/* What libooc_emulated_cuda.so offers beside the CUDA driver's own calls: its configuration, its counters, injected
 * faults, and a look into its page tables. Plain C, found with dlsym in the loaded driver; a real driver has none of it.
 *
 * Functions that return int give 0, or -1 and leave a message for ooc_emulated_error() in the calling thread.
 * All of them may be called before cuInit and from any thread. In a forked child only the two look-ups at the end and the
 * call counts work; they tell how things stood at the fork.
 */
#ifndef OOC_EMULATED_CONTROL_H
#define OOC_EMULATED_CONTROL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The emulated device. cuInit reads it from OOC_EMULATED_MEMORY, OOC_EMULATED_GRANULARITY and OOC_EMULATED_BANDWIDTH, unless
 * ooc_emulated_set_config came first. To change it, get it, modify it and set it. */
typedef struct {
  uint32_t struct_bytes;           /* sizeof(ooc_emulated_config); to be set by the caller of both functions */
  uint32_t reserved;               /* 0 */
  uint64_t memory_bytes;           /* device size; changes only while nothing is created or reserved */
  uint64_t granularity_bytes;      /* a power of two, at least a page; changes only while nothing is created or reserved */
  double h2d_bytes_per_second;     /* host to device; 0: as fast as memcpy */
  double d2h_bytes_per_second;     /* device to host; 0: as fast as memcpy */
  double h2d_latency_seconds;      /* added to every copy, during which the link is taken */
  double d2h_latency_seconds;
} ooc_emulated_config;

typedef struct {
  uint32_t struct_bytes;           /* sizeof(ooc_emulated_stats); to be set by the caller */
  uint32_t reserved;
  uint64_t physical_bytes;         /* created and not yet destroyed */
  uint64_t physical_peak_bytes;    /* since the last reset */
  uint64_t allocations;            /* physical allocations alive */
  uint64_t mappings;               /* cuMemMap less cuMemUnmap, counted per allocation */
  uint64_t reservations;
  uint64_t h2d_bytes, d2h_bytes;   /* copied since the last reset */
  uint64_t h2d_copies, d2h_copies;
  double h2d_busy_seconds;         /* time for which copies took the link since the last reset; 0 if it is unlimited */
  double d2h_busy_seconds;
  uint64_t injected_faults;        /* calls that a fault rule made fail or come late since the last reset */
  uint64_t host_bytes;             /* physical host memory, created by cuMemCreate and not yet destroyed */
} ooc_emulated_stats;

int ooc_emulated_get_config(ooc_emulated_config* config);
int ooc_emulated_set_config(const ooc_emulated_config* config);
const char* ooc_emulated_error(void);

int ooc_emulated_get_stats(ooc_emulated_stats* stats);
void ooc_emulated_reset_stats(void); /* sets counters to 0 and the peak to what is in use */

/* Calls of one driver function since the last reset, named without `_v2` ("cuMemMap"); UINT64_MAX for an unknown name. */
uint64_t ooc_emulated_call_count(const char* name);

/* Adds fault rules, in the grammar of OOC_EMULATED_FAULTS (see faults.h), to those in force. */
int ooc_emulated_inject_faults(const char* rules);
void ooc_emulated_clear_faults(void);

/* Counts calls by call site from now on. OOC_EMULATED_SITES=FILE does the same, and writes the list at exit. */
void ooc_emulated_watch_sites(void);
/* The list (see sites.h), valid until the calling thread asks again. */
const char* ooc_emulated_sites(void);

/* Waits until every stream has done the work that it has now, as cuCtxSynchronize does. */
void ooc_emulated_synchronize(void);

/* The weakest access of the range: -1 if a byte of it is not mapped, else 0 (none), 1 (read) or 3 (read and write). */
int ooc_emulated_access(const void* address, uint64_t bytes);

/* Where the address lies in physical memory, or -1 if it is not mapped. Equal offsets are the same byte. */
int64_t ooc_emulated_physical_offset(const void* address);

#ifdef __cplusplus
}
#endif

#endif
