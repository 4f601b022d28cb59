#include "disk_queue.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>

#include "block_signals.h"

namespace ooc {

DiskQueue::DiskQueue(std::shared_ptr<DiskFile> file, uint32_t depth)
    : state_(std::make_shared<State>(std::move(file))), depth_(depth) {}

// Threads that the disk keeps are left behind: they touch nothing but the state and what they move.
DiskQueue::~DiskQueue() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stop = true;
  state_->work.notify_all();
}

std::shared_ptr<DiskTransfer> DiskQueue::start(Direction direction, char* memory, uint64_t bytes, uint64_t offset) {
  State& state = *state_;
  const auto which = static_cast<size_t>(direction);
  const auto transfer = std::make_shared<DiskTransfer>();
  std::unique_lock<std::mutex> lock(state.mutex);
  auto& waiting = state.waiting[which];
  for (uint64_t at = 0; at < bytes; at += kPiece) {
    waiting.push_back({transfer, memory + at, std::min(kPiece, bytes - at), offset + at});
    ++transfer->pieces_left;
    ++state.under_way;
  }
  while (state.threads[which] < std::min<uint64_t>(depth_, waiting.size())) {
    const uint32_t before = state.threads[which];
    grow(which);
    if (state.threads[which] == before) break;
  }
  if (state.threads[which] > 0) {
    state.work.notify_all();
    return transfer;
  }
  while (!waiting.empty()) {
    const Piece piece = std::move(waiting.front());
    waiting.pop_front();
    lock.unlock();
    const int error = move(*state.file, which, piece);
    lock.lock();
    end(state, piece, error);
  }
  return transfer;
}

int DiskQueue::wait(const DiskTransfer& transfer, double limit) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto over = [&transfer] { return transfer.pieces_left == 0; };
  return state_->progress.wait_for(lock, std::chrono::duration<double>(limit), over) ? transfer.error : ETIMEDOUT;
}

bool DiskQueue::idle() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->under_way == 0;
}

void DiskQueue::before_fork() { state_->mutex.lock(); }

void DiskQueue::after_fork(bool in_child) {
  if (in_child) {
    state_->threads[0] = state_->threads[1] = 0;
    new (&state_->work) std::condition_variable;  // not destroyed: that would wait for threads which only the parent has
    new (&state_->progress) std::condition_variable;
  }
  state_->mutex.unlock();
}

// With the lock held.
void DiskQueue::grow(size_t direction) {
  try {
    const BlockSignals blocked;
    std::thread thread([state = state_, direction] { serve(state, direction); });
    pthread_setname_np(thread.native_handle(), direction == static_cast<size_t>(Direction::kOut) ? "ooc-disk-out" : "ooc-disk-in");
    thread.detach();
    ++state_->threads[direction];
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
}

void DiskQueue::serve(const std::shared_ptr<State>& state, size_t direction) {
  std::unique_lock<std::mutex> lock(state->mutex);
  auto& waiting = state->waiting[direction];
  while (true) {
    state->work.wait(lock, [&] { return state->stop || !waiting.empty(); });
    if (waiting.empty()) return;
    const Piece piece = std::move(waiting.front());
    waiting.pop_front();
    lock.unlock();
    const int error = move(*state->file, direction, piece);
    lock.lock();
    end(*state, piece, error);
  }
}

int DiskQueue::move(DiskFile& file, size_t direction, const Piece& piece) {
  if (direction == static_cast<size_t>(Direction::kOut)) return file.write(piece.memory, piece.bytes, piece.offset);
  return file.read(piece.memory, piece.bytes, piece.offset);
}

// With the lock held.
void DiskQueue::end(State& state, const Piece& piece, int error) {
  --state.under_way;
  if (error != 0 && piece.transfer->error == 0) piece.transfer->error = error;
  if (--piece.transfer->pieces_left == 0) state.progress.notify_all();
}

}  // namespace ooc
