// The driver's streams and events.
#include "exports.h"

namespace ooc {

extern "C" {

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return perform(Call::cuStreamCreate, [=](Device& device) {
    return stream == nullptr ? CUDA_ERROR_INVALID_VALUE : device.streams.create_stream(flags, *stream);
  });
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  return perform(Call::cuStreamDestroy, [=](Device& device) { return device.streams.destroy_stream(stream); });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return perform(Call::cuStreamSynchronize, [=](Device& device) { return device.streams.synchronize_stream(stream); });
}

CUresult cuStreamQuery(CUstream stream) {
  return perform(Call::cuStreamQuery, [=](Device& device) { return device.streams.query_stream(stream); });
}

CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  return perform(Call::cuStreamGetId, [=](Device& device) {
    return id == nullptr ? CUDA_ERROR_INVALID_VALUE : device.streams.stream_id(stream, *id);
  });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return perform(Call::cuStreamWaitEvent, [=](Device& device) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : device.streams.wait(stream, event);
  });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return perform(Call::cuStreamIsCapturing, [=](Device& device) {
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUresult known = device.streams.query_stream(stream);
    if (known != CUDA_SUCCESS && known != CUDA_ERROR_NOT_READY) return known;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  });
}

// Streams of the emulated device cannot be captured, so the mode changes nothing; each thread has one, as in the driver.
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return perform(Call::cuThreadExchangeStreamCaptureMode, Needs::kDevice, [=](Device&) {
    thread_local CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (mode == nullptr || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
      return CUDA_ERROR_INVALID_VALUE;
    std::swap(current, *mode);
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* user_data) {
  return perform(Call::cuLaunchHostFunc, [=](Device& device) {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return device.streams.enqueue(
        stream, {.kind = Command::Kind::kHostFunction, .function = function, .user_data = user_data});
  });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return perform(Call::cuEventCreate, [=](Device& device) {
    return event == nullptr ? CUDA_ERROR_INVALID_VALUE : device.streams.create_event(flags, *event);
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return perform(Call::cuEventDestroy, [=](Device& device) { return device.streams.destroy_event(event); });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return perform(Call::cuEventRecord, [=](Device& device) { return device.streams.record(event, stream); });
}

CUresult cuEventQuery(CUevent event) {
  return perform(Call::cuEventQuery, [=](Device& device) { return device.streams.query_event(event); });
}

CUresult cuEventSynchronize(CUevent event) {
  return perform(Call::cuEventSynchronize, [=](Device& device) { return device.streams.synchronize_event(event); });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return perform(Call::cuEventElapsedTime, [=](Device& device) {
    return milliseconds == nullptr ? CUDA_ERROR_INVALID_VALUE : device.streams.elapsed(start, end, *milliseconds);
  });
}

}  // extern "C"
}  // namespace ooc
