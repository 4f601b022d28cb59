// The driver's copies, fills and pinned host memory.
#include "exports.h"

namespace ooc {
namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// This is checked when the call is made, as the driver refuses an address that is not accessible then. If the address is
// unmapped before the work runs, the work faults, as on a device.
bool is_accessible(Device& device, const void* address, size_t bytes, CUmemAccess_flags access) {
  const Guard lock(device.memory_mutex);
  return device.addresses->access(reinterpret_cast<CUdeviceptr>(address), bytes) >= access;
}

bool is_pinned(Device& device, const void* address, size_t bytes) {
  return device.host.is_pinned(address, bytes) || is_accessible(device, address, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ);
}

enum class Host { kGoesOn, kWaits };

// A copy or a fill. `link`: null for work within the device. With pageable memory, too, the host may use its memory at once:
// what is copied to the device is staged, what is copied from there has arrived.
CUresult enqueue(Call call, CUstream stream, Link Device::*link, Command command, Host host = Host::kGoesOn,
                 const void* site = __builtin_return_address(0)) {
  return perform(call, [&](Device& device) {
    const size_t bytes = command.bytes;
    if (bytes == 0) return CUDA_SUCCESS;
    const bool to_host = link == &Device::d2h, from_host = link == &Device::h2d;
    const bool reads = command.kind == Command::Kind::kCopy;
    if (to_host ? command.target == nullptr
                : !is_accessible(device, command.target, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (from_host ? command.source == nullptr
                  : reads && !is_accessible(device, command.source, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (link != nullptr) command.link = &(device.*link);
    bool wait = host == Host::kWaits;
    if (!wait && to_host) wait = !is_pinned(device, command.target, bytes);
    if (!wait && from_host && !is_pinned(device, command.source, bytes)) {
      const auto* first = static_cast<const unsigned char*>(command.source);
      command.staged.assign(first, first + bytes);
    }
    return device.streams.enqueue(stream, std::move(command), wait);
  }, site);
}

Command fill(CUdeviceptr target, unsigned char value, size_t bytes) {
  return {.kind = Command::Kind::kFill, .target = pointer(target), .bytes = bytes, .value = value};
}

}  // namespace

extern "C" {

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t bytes) {
  return enqueue(Call::cuMemcpyHtoD, nullptr, &Device::h2d,
                 {.target = pointer(target), .source = source, .bytes = bytes}, Host::kWaits);
}

CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t bytes) {
  return enqueue(Call::cuMemcpyDtoH, nullptr, &Device::d2h,
                 {.target = target, .source = pointer(source), .bytes = bytes}, Host::kWaits);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
  return enqueue(Call::cuMemcpyDtoD, nullptr, nullptr,
                 {.target = pointer(target), .source = pointer(source), .bytes = bytes});
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, size_t bytes, CUstream stream) {
  return enqueue(Call::cuMemcpyHtoDAsync, stream, &Device::h2d,
                 {.target = pointer(target), .source = source, .bytes = bytes});
}

CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, size_t bytes, CUstream stream) {
  return enqueue(Call::cuMemcpyDtoHAsync, stream, &Device::d2h,
                 {.target = target, .source = pointer(source), .bytes = bytes});
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
  return enqueue(Call::cuMemcpyDtoDAsync, stream, nullptr,
                 {.target = pointer(target), .source = pointer(source), .bytes = bytes});
}

CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t bytes) {
  return enqueue(Call::cuMemsetD8, nullptr, nullptr, fill(target, value, bytes));
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream) {
  return enqueue(Call::cuMemsetD8Async, stream, nullptr, fill(target, value, bytes));
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return perform(Call::cuMemHostAlloc, [=](Device& device) {
    constexpr unsigned kKnown = kMemHostAllocPortable | kMemHostAllocDeviceMap | kMemHostAllocWriteCombined;
    if (pointer == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    Faults::covers(1, bytes);
    return device.host.allocate(bytes, *pointer);
  });
}

CUresult cuMemFreeHost(void* pointer) {
  return perform(Call::cuMemFreeHost, [=](Device& device) { return device.host.free(pointer); });
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  return perform(Call::cuMemHostRegister, [=](Device& device) {
    constexpr unsigned kKnown = kMemHostRegisterPortable | kMemHostRegisterDeviceMap | kMemHostRegisterReadOnly;
    if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    Faults::covers(1, bytes);
    return device.host.register_range(pointer, bytes);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return perform(Call::cuMemHostUnregister, [=](Device& device) { return device.host.unregister(pointer); });
}

}  // extern "C"
}  // namespace ooc
