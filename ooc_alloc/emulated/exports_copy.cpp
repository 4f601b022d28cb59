// The driver's copies, fills and pinned host memory.
#include "exports.h"

namespace ooc {
namespace {

using emulated::Call;
using emulated::Command;
using emulated::Device;
using emulated::Needs;
using emulated::perform;

// This is checked when the call is made, as the driver refuses an address that is not accessible then. If the address is
// unmapped before the work runs, the work faults, as on a device.
bool is_accessible(Device& device, CUdeviceptr address, size_t bytes, CUmemAccess_flags access) {
  const std::lock_guard<std::mutex> lock(device.memory_mutex);
  return device.addresses->access(address, bytes) >= access;
}

CUresult copy_to_device(Call call, CUdeviceptr target, const void* source, size_t bytes, CUstream stream,
    const void* site = __builtin_return_address(0)) {
  return perform(call, Needs::kContext, [=](Device& device) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (source == nullptr || !is_accessible(device, target, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Command command;
    command.link = &device.h2d;
    command.target = reinterpret_cast<void*>(target);
    command.source = source;
    command.bytes = bytes;
    return device.streams.enqueue(stream, std::move(command));
  }, site);
}

CUresult copy_to_host(Call call, void* target, CUdeviceptr source, size_t bytes, CUstream stream,
    const void* site = __builtin_return_address(0)) {
  return perform(call, Needs::kContext, [=](Device& device) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (target == nullptr || !is_accessible(device, source, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Command command;
    command.link = &device.d2h;
    command.target = target;
    command.source = reinterpret_cast<const void*>(source);
    command.bytes = bytes;
    return device.streams.enqueue(stream, std::move(command));
  }, site);
}

CUresult copy_within_device(Call call, CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream,
    const void* site = __builtin_return_address(0)) {
  return perform(call, Needs::kContext, [=](Device& device) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (!is_accessible(device, target, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) ||
        !is_accessible(device, source, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Command command;
    command.target = reinterpret_cast<void*>(target);
    command.source = reinterpret_cast<const void*>(source);
    command.bytes = bytes;
    return device.streams.enqueue(stream, std::move(command));
  }, site);
}

CUresult fill(Call call, CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream,
    const void* site = __builtin_return_address(0)) {
  return perform(call, Needs::kContext, [=](Device& device) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (!is_accessible(device, target, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) return CUDA_ERROR_INVALID_VALUE;
    Command command;
    command.kind = Command::Kind::kFill;
    command.target = reinterpret_cast<void*>(target);
    command.value = value;
    command.bytes = bytes;
    return device.streams.enqueue(stream, std::move(command));
  }, site);
}

}  // namespace

extern "C" {

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t bytes) {
  return copy_to_device(Call::cuMemcpyHtoD, target, source, bytes, nullptr);
}

CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t bytes) {
  return copy_to_host(Call::cuMemcpyDtoH, target, source, bytes, nullptr);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
  return copy_within_device(Call::cuMemcpyDtoD, target, source, bytes, nullptr);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, size_t bytes, CUstream stream) {
  return copy_to_device(Call::cuMemcpyHtoDAsync, target, source, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, size_t bytes, CUstream stream) {
  return copy_to_host(Call::cuMemcpyDtoHAsync, target, source, bytes, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
  return copy_within_device(Call::cuMemcpyDtoDAsync, target, source, bytes, stream);
}

CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t bytes) {
  return fill(Call::cuMemsetD8, target, value, bytes, nullptr);
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream) {
  return fill(Call::cuMemsetD8Async, target, value, bytes, stream);
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return perform(Call::cuMemHostAlloc, Needs::kContext, [=](Device& device) {
    constexpr unsigned kKnown = kMemHostAllocPortable | kMemHostAllocDeviceMap | kMemHostAllocWriteCombined;
    if (pointer == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    return device.host.allocate(bytes, *pointer);
  });
}

CUresult cuMemFreeHost(void* pointer) {
  return perform(Call::cuMemFreeHost, Needs::kContext, [=](Device& device) { return device.host.free(pointer); });
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  return perform(Call::cuMemHostRegister, Needs::kContext, [=](Device& device) {
    constexpr unsigned kKnown = kMemHostRegisterPortable | kMemHostRegisterDeviceMap | kMemHostRegisterReadOnly;
    if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    return device.host.register_range(pointer, bytes);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return perform(Call::cuMemHostUnregister, Needs::kContext,
                 [=](Device& device) { return device.host.unregister(pointer); });
}

}  // extern "C"
}  // namespace ooc
