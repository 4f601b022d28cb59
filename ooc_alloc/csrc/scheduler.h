// The core and whoever plans ahead: what the one asks of the other. Every method is called with the core's lock held,
// if it says nothing else.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "recorder.h"
#include "transfer.h"

namespace ooc {

// What the core asks of a scheduler, which must not block.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Function `index` of the iteration is about to run; `prefix` is the fingerprint of the sequence up to and with it.
  virtual void function_started(uint32_t index, uint64_t prefix) = 0;
  // The iteration ended. Returns true if it followed one plan from its start to its end.
  virtual bool iteration_ended(const std::shared_ptr<Trace>& ended) = 0;
  // Chunks are going to be free without anybody's help: a planned swap-out is under way or may start now.
  virtual bool relief_coming() const = 0;
  // Index of the next function that uses the region (past the last function: in the next iteration); kNever or
  // kUnknown.
  virtual uint64_t next_use(const Region* region) const = 0;
  // A move may start when the function that ended last is done: its end on its stream is worth an event.
  virtual bool waits_for_last_function() const = 0;
  // Three tiers: whether a plan frees host memory now, so that nothing else needs to go down for a variable.
  virtual bool host_relief_coming(const Region* waiting) const = 0;
  // Whether a resident region may leave with the host copies that it has: nothing writes to it before.
  virtual bool copies_outlast(const Region* region) const = 0;
  static constexpr uint64_t kNever = ~uint64_t{0};
  static constexpr uint64_t kUnknown = kNever - 1;

  struct Counts {
    uint64_t plans = 0;        // installed
    uint64_t switches = 0;     // to another plan, within an iteration
    uint64_t divergences = 0;  // from a sequence that was expected
  };
  virtual Counts counts() const = 0;
};

// What a scheduler asks of the core.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual std::mutex& mutex() = 0;  // without the lock
  virtual std::condition_variable& changed() = 0;
  virtual const Recorder& recorder() const = 0;
  // Null says that there is no scheduler any more. What the last one counted is kept.
  virtual void set_scheduler(Scheduler* scheduler) = 0;
  // The calling thread is going to move pieces. Without the lock.
  virtual void bind_thread() = 0;
  // In a forked child: the device, and the threads that were, are the parent's.
  virtual bool forked() const = 0;
  // Whether pieces may start to move. What is under way is always settled: a fork waits for it.
  virtual bool may_move() const = 0;
  // An iteration that ended; null if it is not kept.
  virtual std::shared_ptr<Trace> trace(uint64_t fingerprint) const = 0;
  // The next iterations' functions are worth timing: a plan was made, or left.
  virtual void measure_again() = 0;

  // The longest piece that should move at once, in chunks.
  virtual uint32_t piece_chunks() const = 0;
  // Starts to copy what is resident of a piece out, and appends what was enqueued. With `stay` the slots remain
  // resident (a write-back), except those that a swap-out comes for meanwhile.
  virtual bool move_out(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers, bool stay) = 0;
  // Whether some of these slots are on their way out.
  virtual bool leaves(const Piece& piece) const = 0;
  // The first slots of a range that may come in together; none if there are none.
  virtual Piece next_absent(Region* region, uint32_t first, uint32_t end) const = 0;
  // Starts to copy such a piece in. Returns false if there are no idle chunks for it; then changed() is notified when
  // there may be some.
  virtual bool move_in(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers) = 0;
  // Waits for a copy and ends its transition. Returns false if the bytes did not arrive.
  virtual bool settle(Lock& lock, const Transfer& transfer) = 0;
  // Work for a thread that has nothing to move: takes the memory from under an address that nobody uses any more.
  // Returns false if there is no such address now.
  virtual bool bury_one(Lock& lock) = 0;
  // Likewise: pins host memory that swap-outs will soon need. Returns false if there is enough.
  virtual bool pin_ahead(Lock& lock) = 0;
  // Whether a piece of the region can be copied out without waiting until others leave host memory.
  virtual bool has_host_memory(Region* region) = 0;
  // Three tiers: whether host copies can lie in a file below host memory, and whether a region's do, alone.
  virtual bool tiered() const = 0;
  virtual bool is_below(const Region* region) const = 0;
  // Bring a region's host copies up into host memory, where others go down for them if `evict` says so; send them down.
  // The lock is given up meanwhile. Return false if nothing came of it.
  virtual bool bring_up(Lock& lock, Region* region, bool evict) = 0;
  virtual bool send_down(Lock& lock, Region* region) = 0;
  // A resident variable goes without its host copies. Returns false if it has none, or somebody needs them.
  virtual bool drop_copies(Region* region) = 0;
};

}  // namespace ooc
