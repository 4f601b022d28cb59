// The driver table: every CUDA driver call of this project goes through it.
//
// It is filled by dlopen from `libcuda.so.1` or from the emulated driver, which exports the same symbols; there is one
// code path and only the library differs.
//
//   std::string error;
//   std::unique_ptr<Driver> driver = load_driver("libcuda.so.1", error);
//   if (!driver) fail(error);
//   CUresult result = driver->cuInit(0);
//   if (result != CUDA_SUCCESS) fail(describe(*driver, result));
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "cuda_abi.h"

// call(need, member, exported symbol, parameters). `need` is kRequired, or kOptional where the member may stay null.
// Symbols carry the suffix of the interface since CUDA 11; the plain names are the ones cuda.h lets a program write.
#define OOC_DRIVER_CALLS(call)                                                                                         \
  call(kRequired, cuInit, cuInit, (unsigned flags))                                                                    \
  call(kRequired, cuDriverGetVersion, cuDriverGetVersion, (int* version))                                              \
  call(kRequired, cuDeviceGet, cuDeviceGet, (CUdevice* device, int ordinal))                                           \
  call(kRequired, cuDeviceGetCount, cuDeviceGetCount, (int* count))                                                    \
  call(kRequired, cuDeviceGetName, cuDeviceGetName, (char* name, int length, CUdevice device))                         \
  call(kRequired, cuDeviceGetAttribute, cuDeviceGetAttribute,                                                          \
       (int* value, CUdevice_attribute attribute, CUdevice device))                                                    \
  call(kRequired, cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device))                            \
  call(kRequired, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))          \
  call(kRequired, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                          \
  call(kRequired, cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext context))                                               \
  call(kRequired, cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext * context))                                             \
  call(kRequired, cuMemGetInfo, cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                          \
  call(kRequired, cuMemGetAllocationGranularity, cuMemGetAllocationGranularity,                                        \
       (size_t * granularity, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags option))               \
  call(kRequired, cuMemCreate, cuMemCreate,                                                                            \
       (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp* prop,                           \
        unsigned long long flags))                                                                                     \
  call(kRequired, cuMemRelease, cuMemRelease, (CUmemGenericAllocationHandle handle))                                   \
  call(kRequired, cuMemAddressReserve, cuMemAddressReserve,                                                            \
       (CUdeviceptr * address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags))             \
  call(kRequired, cuMemAddressFree, cuMemAddressFree, (CUdeviceptr address, size_t size))                              \
  call(kRequired, cuMemMap, cuMemMap,                                                                                  \
       (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,                          \
        unsigned long long flags))                                                                                     \
  call(kRequired, cuMemUnmap, cuMemUnmap, (CUdeviceptr address, size_t size))                                          \
  call(kRequired, cuMemSetAccess, cuMemSetAccess,                                                                      \
       (CUdeviceptr address, size_t size, const CUmemAccessDesc* desc, size_t count))                                  \
  call(kOptional, cuMemGetAccess, cuMemGetAccess,                                                                      \
       (unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address))                                \
  call(kRequired, cuStreamCreate, cuStreamCreate, (CUstream * stream, unsigned flags))                                 \
  call(kRequired, cuStreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                              \
  call(kRequired, cuStreamSynchronize, cuStreamSynchronize, (CUstream stream))                                         \
  call(kRequired, cuStreamQuery, cuStreamQuery, (CUstream stream))                                                     \
  call(kOptional, cuStreamGetId, cuStreamGetId, (CUstream stream, unsigned long long* id))                             \
  call(kRequired, cuStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))              \
  call(kOptional, cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode))  \
  call(kOptional, cuStreamIsCapturing, cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus * status))         \
  call(kRequired, cuEventCreate, cuEventCreate, (CUevent * event, unsigned flags))                                     \
  call(kRequired, cuEventDestroy, cuEventDestroy_v2, (CUevent event))                                                  \
  call(kRequired, cuEventRecord, cuEventRecord, (CUevent event, CUstream stream))                                      \
  call(kRequired, cuEventQuery, cuEventQuery, (CUevent event))                                                         \
  call(kRequired, cuEventSynchronize, cuEventSynchronize, (CUevent event))                                             \
  call(kRequired, cuEventElapsedTime, cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end))           \
  call(kRequired, cuMemcpyHtoD, cuMemcpyHtoD_v2, (CUdeviceptr target, const void* source, size_t bytes))               \
  call(kRequired, cuMemcpyDtoH, cuMemcpyDtoH_v2, (void* target, CUdeviceptr source, size_t bytes))                     \
  call(kRequired, cuMemcpyDtoD, cuMemcpyDtoD_v2, (CUdeviceptr target, CUdeviceptr source, size_t bytes))               \
  call(kRequired, cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                             \
       (CUdeviceptr target, const void* source, size_t bytes, CUstream stream))                                        \
  call(kRequired, cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                             \
       (void* target, CUdeviceptr source, size_t bytes, CUstream stream))                                              \
  call(kRequired, cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                             \
       (CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream))                                        \
  call(kRequired, cuMemsetD8, cuMemsetD8_v2, (CUdeviceptr target, unsigned char value, size_t bytes))                  \
  call(kRequired, cuMemsetD8Async, cuMemsetD8Async,                                                                    \
       (CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream))                                       \
  call(kRequired, cuMemHostAlloc, cuMemHostAlloc, (void** pointer, size_t bytes, unsigned flags))                      \
  call(kRequired, cuMemFreeHost, cuMemFreeHost, (void* pointer))                                                       \
  call(kRequired, cuMemHostRegister, cuMemHostRegister_v2, (void* pointer, size_t bytes, unsigned flags))              \
  call(kRequired, cuMemHostUnregister, cuMemHostUnregister, (void* pointer))                                           \
  call(kRequired, cuLaunchHostFunc, cuLaunchHostFunc, (CUstream stream, CUhostFn function, void* user_data))           \
  call(kRequired, cuGetErrorName, cuGetErrorName, (CUresult result, const char** name))                                \
  call(kRequired, cuGetErrorString, cuGetErrorString, (CUresult result, const char** text))

namespace ooc {

// Calls whose failures are counted one by one, in the order of their counts in ooc_stats.
enum class Counted {
  kMemCreate, kMemMap, kMemSetAccess, kMemUnmap, kCopyOut, kCopyIn, kHostRegister, kEventCreate, kEventRecord,
  kEventSynchronize, kStreamSynchronize, kStreamWaitEvent, kCount
};

struct Driver {
#define OOC_DRIVER_MEMBER(need, member, symbol, parameters) CUresult(*member) parameters = nullptr;
  OOC_DRIVER_CALLS(OOC_DRIVER_MEMBER)
#undef OOC_DRIVER_MEMBER

  std::string library;     // as it was asked for
  void* handle = nullptr;  // of dlopen; never closed, as driver threads may run until the process ends

  // Passes a call's result on, and counts a failure.
  CUresult counted(Counted call, CUresult result) const {
    if (__builtin_expect(result != CUDA_SUCCESS, false)) note_failure(call, result);
    return result;
  }
  // Makes a call until it succeeds, three times at most: a driver that refuses now and then costs nothing but time.
  template <class Body>
  CUresult retried(Counted call, Body body) const {
    constexpr int kAttempts = 3;
    CUresult result = CUDA_ERROR_UNKNOWN;
    for (int attempt = 0; attempt < kAttempts && result != CUDA_SUCCESS; ++attempt) result = counted(call, body());
    return result;
  }
  // Counts the failures that stand in somebody's way: host memory that could not be pinned serves all the same.
  uint64_t refusals() const { return failures() - failures(Counted::kHostRegister); }
  // "cuMemcpyDtoHAsync, with CUDA_ERROR_UNKNOWN (999): unknown error": the last of them.
  std::string last_refusal() const;
  uint64_t failures(Counted call) const { return failures_[static_cast<size_t>(call)]; }
  uint64_t failures() const {
    uint64_t sum = 0;
    for (const auto& count : failures_) sum += count;
    return sum;
  }

 private:
  [[gnu::cold]] void note_failure(Counted call, CUresult result) const;

  mutable std::atomic<uint64_t> last_refusal_{0};  // call * 2^32 + result
  mutable std::array<std::atomic<uint64_t>, static_cast<size_t>(Counted::kCount)> failures_{};
};

// Opens `library` (a path, or a name that the dynamic linker finds) and fills the table. Nothing is initialised: the
// caller calls cuInit. Returns null and sets `error` to the linker's words, or to the names of the missing symbols.
std::unique_ptr<Driver> load_driver(const char* library, std::string& error);

// "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"; for a value that the driver does not know, "CUDA error 12345".
std::string describe(const Driver& driver, CUresult result);

}  // namespace ooc
