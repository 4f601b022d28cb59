// Variables on their way between the device and the host: slots leave, arrive, or are copied and stay. A transition is
// started, and settled by whoever started it; a variable that is freed meanwhile goes when its last transition is
// settled.
//
// A device whose work does not end (lost): what was under way may still write where it was told to, so nothing that it
// touches is used for anything else. Its transfers stay unsettled, and no new ones begin. Should the device turn out to
// have done its work after all, those transfers count as failed (the variable is where it was) and all goes on.
//
// Guarded by the core's lock, which every method holds on entry and on return; where it takes a Lock, it may give it up
// meanwhile.
//
//   moving() == slots of all regions that leave or arrive
#pragma once

#include <condition_variable>
#include <cstdint>
#include <string>
#include <vector>

#include "chunk_pool.h"
#include "device.h"
#include "geometry.h"
#include "host_copies.h"
#include "iterations.h"
#include "mappings.h"
#include "region_table.h"
#include "scheduler.h"
#include "streams.h"
#include "transfer.h"
#include "watch.h"

namespace ooc {

// The parts of the core that a transition works on.
struct TransitionParts {
  const Geometry& geometry;
  Device& device;
  Streams& streams;
  RegionTable& table;
  Mappings& mappings;
  HostCopies& host;
  Iterations& iterations;
  Watch& watch;
};

class Transitions {
 public:
  // `strict`: slots that leave without a copy are compared with their host copy.
  Transitions(const TransitionParts& parts, bool strict, std::condition_variable& changed)
      : with_(parts), strict_(strict), changed_(changed) {}

  // Starts copying resident slots out. Clean ones are dropped at once. Appends to `transfers` what was enqueued.
  // Returns false if there is no host memory, or the driver refused; then nothing more was started. With `stay` the
  // slots are copied and remain resident (a write-back), except those that a swap-out comes for meanwhile.
  bool start_out(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers, bool stay = false);
  // Maps chunks (taken by the caller) behind absent slots and starts copying in. All or none of them are blank: blank
  // ones are there when it returns, and no transfer belongs to them. Returns false if the driver refused; then the
  // chunks are in the pool again.
  bool start_in(Lock& lock, const Piece& piece, const Chunk* chunks, std::vector<Transfer>& transfers);
  // Waits for a copy and ends its transition. Returns false if the bytes did not arrive.
  bool settle(Lock& lock, const Transfer& transfer);
  // The first slots of a range that may come in together, at most `most`.
  static Piece next_absent(Region* region, uint32_t first, uint32_t end, uint64_t most);

  // What could leave to make room for so many chunks: furthest next use first where the sequence is known, oldest use
  // first where it is not; the end of a region before its beginning; no more than is needed. `clean_only`: only what
  // can leave without a copy. `scheduler` may be null.
  std::vector<Piece> choose_victims(uint64_t chunks, bool clean_only, const Scheduler* scheduler) const;
  // Moves pieces out, and waits. Returns false if nothing came of it.
  bool evict(Lock& lock, const std::vector<Piece>& victims);
  // What strict mode found since it was asked last; empty if nothing.
  std::string take_strict_failure() { return std::exchange(strict_failure_, {}); }

  // The variable in the region was freed. Its memory is cached, or given back, now or when nothing of it moves any
  // more.
  void release(Region* region);

  // Whether nothing can be moved, as what was enqueued may never be over.
  bool device_lost(Lock& lock);
  // Ends what is under way on a device that is lost, and the use of its copy streams.
  void abandon_device(Lock& lock);

  uint64_t moving() const { return moving_; }
  // Bytes moved either way, and those of clean drops.
  uint64_t moved_bytes() const { return counted_.swap_in_bytes + counted_.swap_out_bytes + counted_.clean_drop_bytes; }
  // Whether anything ever left the device.
  bool anything_left() const { return counted_.swap_out_count + counted_.clean_drop_count > 0; }
  // Swaps, drops and the times of copies; all else is 0.
  const ooc_stats& counted() const { return counted_; }
  std::string audit() const;

 private:
  void begin_moving(Region* region, uint32_t slots);
  void end_moving(Region* region, uint32_t slots);
  Transfer begin_transfer(const Piece& piece, Direction direction);
  Transfer copy_out(Lock& lock, const Piece& piece, bool stay);
  bool drop_clean(Lock& lock, const Piece& piece);
  bool verify_clean(const Piece& piece);
  // Without the lock: the slots are marked as moving, and the copy stream waits for whoever uses the bytes. They say in
  // the transfer whether it failed, and what to wait for.
  void enqueue(Transfer& transfer);
  bool enqueue_pieces(const Piece& piece, Direction direction);
  bool arrives(const Transfer& transfer);  // waits; whether the bytes did
  bool settle_enqueued(Lock& lock, const Transfer& transfer);
  bool settle_waited(Lock& lock, const Transfer& transfer);
  bool end_transition(Lock& lock, const Transfer& transfer, bool copied);  // returns whether the bytes arrived
  void settle_out(Lock& lock, const Transfer& transfer, bool copied);
  bool settle_in(const Transfer& transfer, bool copied);
  void dispose(Region* region);

  const TransitionParts with_;
  const bool strict_;
  std::condition_variable& changed_;
  uint64_t moving_ = 0;
  ooc_stats counted_{};
  double out_idle_since_ = 0, in_idle_since_ = 0;  // copies of a direction do not overlap each other
  std::vector<Transfer> abandoned_;
  std::string strict_failure_;
};

}  // namespace ooc
