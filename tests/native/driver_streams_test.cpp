// What this project relies on a CUDA driver for: streams, events, copies and host memory. It runs against any driver,
// as driver_contract_test.cpp does.
#include <algorithm>
#include <chrono>
#include <thread>

#include "pinned.h"

using namespace ooc;
using namespace ooc::testing;

TEST(a_stream_works_in_order) {
  Range range(1);
  range.fill(0);
  const Stream stream;
  constexpr size_t kSteps = 50;
  const Pinned seen(kSteps);
  for (size_t i = 0; i < kSteps; ++i) {
    ASSERT_OK(driver().cuMemsetD8Async(range.base, static_cast<unsigned char>(i + 1), range.chunk, stream.handle));
    ASSERT_OK(driver().cuMemcpyDtoHAsync(&seen.data[i], range.base + range.chunk - 1, 1, stream.handle));
  }
  ASSERT_OK(driver().cuStreamSynchronize(stream.handle));
  EXPECT_OK(driver().cuStreamQuery(stream.handle));
  for (size_t i = 0; i < kSteps; ++i) EXPECT_EQ(seen.data[i], static_cast<unsigned char>(i + 1));
}

TEST(an_event_orders_two_streams) {
  Range range(1);
  range.fill(0);
  ASSERT_OK(driver().cuMemsetD8(range.base, 1, range.chunk));
  ASSERT_OK(driver().cuStreamSynchronize(nullptr));
  const Stream writer, reader;
  const Pinned seen(1);
  const Event event;
  Gate gate;
  gate.close_on(writer);
  ASSERT_OK(driver().cuMemsetD8Async(range.base, 2, range.chunk, writer.handle));
  ASSERT_OK(driver().cuEventRecord(event.handle, writer.handle));
  ASSERT_OK(driver().cuStreamWaitEvent(reader.handle, event.handle, 0));
  *seen.data = 0;
  ASSERT_OK(driver().cuMemcpyDtoHAsync(seen.data, range.base, 1, reader.handle));
  EXPECT_EQ(driver().cuEventQuery(event.handle), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(driver().cuStreamQuery(writer.handle), CUDA_ERROR_NOT_READY);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time to get it wrong
  EXPECT_EQ(driver().cuStreamQuery(reader.handle), CUDA_ERROR_NOT_READY);
  gate.open();
  ASSERT_OK(driver().cuStreamSynchronize(reader.handle));
  EXPECT_OK(driver().cuEventQuery(event.handle));
  EXPECT_EQ(*seen.data, static_cast<unsigned char>(2));
}

TEST(a_wait_is_for_the_record_of_its_time) {
  const Stream slow, waiter, quick;
  const Event event(CU_EVENT_DISABLE_TIMING);
  Gate gate;
  gate.close_on(slow);
  ASSERT_OK(driver().cuEventRecord(event.handle, slow.handle));
  ASSERT_OK(driver().cuStreamWaitEvent(waiter.handle, event.handle, 0));
  ASSERT_OK(driver().cuEventRecord(event.handle, quick.handle));  // takes the event over
  EXPECT_OK(driver().cuEventSynchronize(event.handle));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time to get it wrong
  EXPECT_EQ(driver().cuStreamQuery(waiter.handle), CUDA_ERROR_NOT_READY);
  gate.open();
  EXPECT_OK(driver().cuStreamSynchronize(waiter.handle));
}

TEST(an_event_without_record_is_complete) {
  const Stream stream;
  const Event event;
  EXPECT_OK(driver().cuEventQuery(event.handle));
  EXPECT_OK(driver().cuEventSynchronize(event.handle));
  EXPECT_OK(driver().cuStreamWaitEvent(stream.handle, event.handle, 0));
  EXPECT_OK(driver().cuStreamSynchronize(stream.handle));
}

TEST(an_event_may_be_destroyed_before_it_is_reached) {
  const Stream first, second;
  Gate gate;
  gate.close_on(first);
  {
    const Event event;
    ASSERT_OK(driver().cuEventRecord(event.handle, first.handle));
    ASSERT_OK(driver().cuStreamWaitEvent(second.handle, event.handle, 0));
  }
  gate.open();
  EXPECT_OK(driver().cuStreamSynchronize(second.handle));
}

TEST(elapsed_time_is_between_complete_timed_events) {
  const Stream stream;
  const Event start, end, untimed(CU_EVENT_DISABLE_TIMING);
  float milliseconds = -1;
  EXPECT_EQ(driver().cuEventElapsedTime(&milliseconds, start.handle, end.handle), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_OK(driver().cuEventRecord(start.handle, stream.handle));
  Gate gate;
  gate.close_on(stream);
  ASSERT_OK(driver().cuEventRecord(end.handle, stream.handle));
  ASSERT_OK(driver().cuEventRecord(untimed.handle, stream.handle));
  EXPECT_EQ(driver().cuEventElapsedTime(&milliseconds, start.handle, end.handle), CUDA_ERROR_NOT_READY);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  gate.open();
  ASSERT_OK(driver().cuEventSynchronize(end.handle));
  ASSERT_OK(driver().cuEventElapsedTime(&milliseconds, start.handle, end.handle));
  EXPECT_TRUE(milliseconds >= 4);
  EXPECT_EQ(driver().cuEventElapsedTime(&milliseconds, start.handle, untimed.handle), CUDA_ERROR_INVALID_HANDLE);
}

TEST(copies_go_both_ways_at_once) {
  Range range(2);
  range.fill(0, 2);
  const Bytes out = pattern(range.chunk, 10), in = pattern(range.chunk, 11);
  write(range.at(0), out);
  void *source = nullptr, *target = nullptr;
  ASSERT_OK(driver().cuMemHostAlloc(&source, range.chunk, kMemHostAllocPortable));
  ASSERT_OK(driver().cuMemHostAlloc(&target, range.chunk, kMemHostAllocPortable));
  std::copy(in.begin(), in.end(), static_cast<unsigned char*>(source));
  {
    const Stream down, up;
    ASSERT_OK(driver().cuMemcpyDtoHAsync(target, range.at(0), range.chunk, down.handle));
    ASSERT_OK(driver().cuMemcpyHtoDAsync(range.at(1), source, range.chunk, up.handle));
    ASSERT_OK(driver().cuStreamSynchronize(down.handle));
    ASSERT_OK(driver().cuStreamSynchronize(up.handle));
  }
  EXPECT_TRUE(std::equal(out.begin(), out.end(), static_cast<const unsigned char*>(target)));
  EXPECT_TRUE(read(range.at(1), range.chunk) == in);
  EXPECT_OK(driver().cuMemFreeHost(source));
  EXPECT_OK(driver().cuMemFreeHost(target));
}

TEST(copies_stay_on_the_device) {
  Range range(2);
  range.fill(0, 2);
  const Bytes bytes = pattern(range.chunk, 12);
  write(range.at(0), bytes);
  ASSERT_OK(driver().cuMemcpyDtoD(range.at(1), range.at(0), range.chunk));
  EXPECT_TRUE(read(range.at(1), range.chunk) == bytes);
  const Stream stream;
  ASSERT_OK(driver().cuMemsetD8Async(range.at(0), 3, range.chunk, stream.handle));
  ASSERT_OK(driver().cuMemcpyDtoDAsync(range.at(1), range.at(0), 1, stream.handle));
  ASSERT_OK(driver().cuStreamSynchronize(stream.handle));
  EXPECT_EQ(read(range.at(1), 2)[0], static_cast<unsigned char>(3));
  EXPECT_EQ(read(range.at(1), 2)[1], bytes[1]);
}

TEST(the_null_stream_waits_for_blocking_streams) {
  Range range(1);
  range.fill(0);
  ASSERT_OK(driver().cuMemsetD8(range.base, 1, range.chunk));
  const Stream stream(CU_STREAM_DEFAULT);
  Gate gate;
  gate.close_on(stream);
  ASSERT_OK(driver().cuMemsetD8Async(range.base, 2, range.chunk, stream.handle));
  CUcontext context = nullptr;
  ASSERT_OK(driver().cuCtxGetCurrent(&context));
  std::thread opener([&] {
    driver().cuCtxSetCurrent(context);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time to get it wrong
    gate.open();
  });
  unsigned char seen = 0;
  EXPECT_OK(driver().cuMemcpyDtoH(&seen, range.base, 1));
  opener.join();
  EXPECT_EQ(seen, static_cast<unsigned char>(2));
}

TEST(copies_of_unmapped_addresses_are_refused) {
  Range range(2);
  range.fill(0);
  Bytes bytes(range.chunk + 1);
  const Stream stream;
  EXPECT_EQ(driver().cuMemcpyHtoDAsync(range.at(1), bytes.data(), 1, stream.handle), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver().cuMemcpyDtoHAsync(bytes.data(), range.at(1), 1, stream.handle), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver().cuMemcpyDtoH(bytes.data(), range.at(0), range.chunk + 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_OK(driver().cuStreamSynchronize(stream.handle));
}

// Host memory

TEST(host_memory_is_registered_once) {
  const size_t bytes = 1 << 20;
  std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(4096, bytes), std::free);
  EXPECT_OK(driver().cuMemHostRegister(memory.get(), bytes, kMemHostRegisterPortable));
  EXPECT_EQ(driver().cuMemHostRegister(memory.get(), bytes, kMemHostRegisterPortable),
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_OK(driver().cuMemHostUnregister(memory.get()));
  EXPECT_EQ(driver().cuMemHostUnregister(memory.get()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  EXPECT_OK(driver().cuMemHostRegister(memory.get(), bytes, kMemHostRegisterPortable));
  EXPECT_OK(driver().cuMemHostUnregister(memory.get()));
}

TEST(only_host_allocations_are_freed) {
  int local = 0;
  EXPECT_TRUE(driver().cuMemFreeHost(&local) != CUDA_SUCCESS);
}
