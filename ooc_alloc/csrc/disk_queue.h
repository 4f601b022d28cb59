// Reads and writes of a DiskFile by threads of their own, so many for each direction. They wait while the disk works and
// copy nothing. Where the system gives no threads, whoever starts a transfer makes it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "device.h"
#include "disk_file.h"

namespace ooc {

// A transfer under way. Its fields belong to the queue.
struct DiskTransfer {
  uint32_t pieces_left = 0;
  int error = 0;  // of the first piece that failed
};

class DiskQueue {
 public:
  // The file outlives the queue, and what is under way when the queue ends.
  DiskQueue(std::shared_ptr<DiskFile> file, uint32_t depth);
  ~DiskQueue();
  DiskQueue(const DiskQueue&) = delete;
  DiskQueue& operator=(const DiskQueue&) = delete;

  // Moves whole pages between memory, which stays as it is until the end, and the file.
  std::shared_ptr<DiskTransfer> start(Direction direction, char* memory, uint64_t bytes, uint64_t offset);
  // Returns 0 when all bytes have moved, else the number of an error; ETIMEDOUT where it takes longer, in seconds.
  int wait(const DiskTransfer& transfer, double limit);
  // Whether nothing is under way.
  bool idle() const;

  // Held across a fork. The child has no threads: nothing is started there.
  void before_fork();
  void after_fork(bool in_child);

 private:
  static constexpr uint64_t kPiece = uint64_t{2} << 20;  // bytes: what disks are fastest with

  struct Piece {
    std::shared_ptr<DiskTransfer> transfer;
    char* memory;
    uint64_t bytes, offset;
  };
  // It outlives the queue where a disk does not end what it began.
  struct State {
    explicit State(std::shared_ptr<DiskFile> with) : file(std::move(with)) {}

    std::shared_ptr<DiskFile> file;
    mutable std::mutex mutex;
    std::condition_variable work, progress;
    std::deque<Piece> waiting[2];  // by direction
    uint64_t under_way = 0;        // pieces waiting or moved
    uint32_t threads[2] = {0, 0};
    bool stop = false;
  };
  static void serve(const std::shared_ptr<State>& state, size_t direction);
  static int move(DiskFile& file, size_t direction, const Piece& piece);
  static void end(State& state, const Piece& piece, int error);
  void grow(size_t direction);

  std::shared_ptr<State> state_;
  const uint32_t depth_;
};

}  // namespace ooc
