// The driver's calls about itself, the device and the context.
#include <cstdio>
#include <cstring>

#include "exports.h"

namespace ooc {
namespace {

// Gives a value through a pointer.
template <class Value>
CUresult give(Value* target, Value value) {
  if (target == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *target = value;
  return CUDA_SUCCESS;
}

// Works in any state, a forked child included: messages about a failure need it.
CUresult tell(Call call, const char* emulated::ErrorText::*part, CUresult result, const char** text,
              const void* site = __builtin_return_address(0)) {
  if (const CUresult refusal = emulated::enter_always(call, site)) return refusal;
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const emulated::ErrorText* error = emulated::find_error(result);
  *text = error != nullptr ? error->*part : nullptr;
  return error != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned flags) {
  return perform(Call::cuInit, Needs::kNothing, [=](Device& device) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    std::string& error = emulated::last_error();
    if (device.initialize(error)) return CUDA_SUCCESS;
    std::fprintf(stderr, "emulated CUDA driver: %s\n", error.c_str());
    return CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuDriverGetVersion(int* version) {
  return perform(Call::cuDriverGetVersion, Needs::kNothing, [=](Device&) { return give(version, 12000); });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return perform(Call::cuDeviceGet, Needs::kDevice, [=](Device&) {
    if (device != nullptr && ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    return give(device, 0);
  });
}

CUresult cuDeviceGetCount(int* count) {
  return perform(Call::cuDeviceGetCount, Needs::kDevice, [=](Device&) { return give(count, 1); });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return perform(Call::cuDeviceGetName, Needs::kDevice, [=](Device&) {
    if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<size_t>(length), "emulated");
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return perform(Call::cuDeviceGetAttribute, Needs::kDevice, [=](Device&) {
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 1;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *value = 2;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
      case CU_DEVICE_ATTRIBUTE_INTEGRATED:
      case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = 0;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return perform(Call::cuDeviceTotalMem, Needs::kDevice, [=](Device& emulated_device) {
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    const Guard lock(emulated_device.memory_mutex);
    *bytes = emulated_device.memory->device_bytes();
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return perform(Call::cuDevicePrimaryCtxRetain, Needs::kDevice, [=](Device& emulated_device) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    emulated_device.context_users += 1;
    *context = emulated::primary_context();
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return perform(Call::cuDevicePrimaryCtxRelease, Needs::kDevice, [=](Device& emulated_device) {
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    int users = emulated_device.context_users;
    while (users > 0 && !emulated_device.context_users.compare_exchange_weak(users, users - 1)) {
    }
    return users > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return perform(Call::cuCtxSetCurrent, Needs::kDevice, [=](Device&) {
    if (context != nullptr && context != emulated::primary_context()) return CUDA_ERROR_INVALID_CONTEXT;
    emulated::current_context() = context;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return perform(Call::cuCtxGetCurrent, Needs::kDevice,
                 [=](Device&) { return give(context, emulated::current_context()); });
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  return tell(Call::cuGetErrorName, &emulated::ErrorText::name, result, name);
}

CUresult cuGetErrorString(CUresult result, const char** text) {
  return tell(Call::cuGetErrorString, &emulated::ErrorText::text, result, text);
}

}  // extern "C"
}  // namespace ooc
