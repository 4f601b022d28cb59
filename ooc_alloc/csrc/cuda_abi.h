// The part of the CUDA driver's binary interface that this project uses.
//
// Our own declarations, compared with cuda.h from CUDA 11.7 to 13.5 (tests/cuda_build/test_driver_abi.py), so that no
// CUDA toolkit is needed to build. Everything is in namespace ooc: a file may also see the real cuda.h, included after
// this one. Comments state what the driver promises where our code depends on it.
#pragma once

namespace ooc {

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUhostFn = void (*)(void* user_data);

// result(name, number, the driver's text). NOT_INITIALIZED is also what every call in a forked child gives,
// DEINITIALIZED is for a process that is exiting; NOT_READY (of cuStreamQuery, cuEventQuery, cuEventElapsedTime) is no
// error.
#define OOC_CUDA_RESULTS(result)                                                                                       \
  result(CUDA_SUCCESS, 0, "no error")                                                                                  \
  result(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                                              \
  result(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                                                 \
  result(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                                        \
  result(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down")                                                          \
  result(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                                              \
  result(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                                     \
  result(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                                                    \
  result(CUDA_ERROR_MAP_FAILED, 205, "mapping failed")                                                                 \
  result(CUDA_ERROR_UNMAP_FAILED, 206, "unmapping failed")                                                             \
  result(CUDA_ERROR_ALREADY_MAPPED, 208, "already mapped")                                                             \
  result(CUDA_ERROR_NOT_MAPPED, 211, "not mapped")                                                                     \
  result(CUDA_ERROR_OPERATING_SYSTEM, 304, "a call of the operating system failed")                                    \
  result(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                                                    \
  result(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state")                      \
  result(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                                          \
  result(CUDA_ERROR_NOT_READY, 600, "device not ready")                                                                \
  result(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")                                  \
  result(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712,                                                               \
         "part or all of the requested memory range is already mapped")                                                \
  result(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region")      \
  result(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                                                  \
  result(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted")                                                     \
  result(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                                                     \
  result(CUDA_ERROR_UNKNOWN, 999, "unknown error")

enum CUresult : int {
#define OOC_CUDA_ENUMERATOR(name, number, text) name = number,
  OOC_CUDA_RESULTS(OOC_CUDA_ENUMERATOR)
#undef OOC_CUDA_ENUMERATOR
};

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
  CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
  CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
  CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
  CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,  // 2 or more: both copy directions at once
  CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,  // of the host memory nearest to the device; -1 where there are no nodes
  CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
};

enum CUmemAllocationType : int {
  CU_MEM_ALLOCATION_TYPE_INVALID = 0,
  CU_MEM_ALLOCATION_TYPE_PINNED = 1,
};

enum CUmemAllocationHandleType : int {
  CU_MEM_HANDLE_TYPE_NONE = 0,
};

enum CUmemLocationType : int {
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,  // CUDA 12.2; accessible from the host only where cuMemSetAccess says so
};

enum CUmemAccess_flags : int {
  CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
};

enum CUmemAllocationGranularity_flags : int {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
};

enum CUstream_flags : unsigned {
  CU_STREAM_DEFAULT = 0,
  CU_STREAM_NON_BLOCKING = 1,  // does not synchronise with the null stream
};

enum CUevent_flags : unsigned {
  CU_EVENT_DEFAULT = 0,
  CU_EVENT_BLOCKING_SYNC = 1,   // a host thread that waits sleeps
  CU_EVENT_DISABLE_TIMING = 2,  // cuEventElapsedTime fails with CUDA_ERROR_INVALID_HANDLE
};

// What a thread may do while another one captures a stream into a graph, or it itself does.
enum CUstreamCaptureMode : int {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,  // the default: calls that are unsafe during any thread's capture fail, and end it
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,  // nothing is refused to this thread because of captures elsewhere
};

enum CUstreamCaptureStatus : int {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,  // calls on the stream make a graph, and are not carried out
};

// Macros in cuda.h; these names are ours so that both headers can be seen at once.
enum CUmemhost_flags : unsigned {
  kMemHostAllocPortable = 1,
  kMemHostAllocDeviceMap = 2,
  kMemHostAllocWriteCombined = 4,
  kMemHostRegisterPortable = 1,
  kMemHostRegisterDeviceMap = 2,
  kMemHostRegisterReadOnly = 8,
};

struct CUmemLocation {
  CUmemLocationType type;
  int id;  // the device's ordinal, or the host's NUMA node
};

struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;  // null here
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

// What memory at a place is created with.
inline CUmemAllocationProp memory_at(CUmemLocation location) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location;
  return properties;
}

struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

static_assert(sizeof(void*) == 8, "the CUDA driver exists for 64-bit systems only");

}  // namespace ooc
