// Order between streams, without a wait on the host. The work of a stream is numbered as it is enqueued; a Moment is
// "all work of this stream up to this number". A stream is made to wait for a moment by an event, which is recorded
// only where somebody is going to wait, and taken from a pool: none is created in steady state.
//
// The program may destroy a stream of its own, and the driver says nothing and must not be asked about it then: so each
// moment of a stream that nobody vouches for gets an event at once, and its handle is used only by a call that was given it.
// A stream that lasts may be captured into a graph, and cannot be asked then, so its functions' ends get events at once.
//
// Guarded by the core's lock. A driver that refuses an event costs a wait on the host, never the order. Where even that
// wait fails the device is lost, and every call that would order something returns false: its caller enqueues nothing,
// and gives no memory away.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "moments.h"

namespace ooc {

// Why one piece of work waits for another. A test is built in which one of them can be left out
// (OOC_EDGES_CAN_BE_OMITTED, and its number in the variable OOC_WITHOUT_EDGE), to see that its absence is noticed.
enum class Edge {
  kUseBeforeOut = 1,    // a variable is copied out when the functions that use it are done
  kOutBeforeChunk = 2,  // a chunk is overwritten when its contents are in host memory
  kUseBeforeChunk = 3,  // a chunk of a freed or clean variable is overwritten when nobody reads it any more
  kInBeforeUse = 4,     // a function runs when its variables have arrived
  kInBeforeHost = 5,    // a block of host memory is overwritten when it has been read
  kUseBeforeUnmap = 6,  // an address loses its memory when nobody uses it any more: the host waits. So a copy in, which
                        // needs the address, starts after the copy out that it reads
  kFreeBeforeSmall = 7, // a small block serves another stream when the one that freed it is past that
};
constexpr int kEdges = 7;

class StreamOrder {
 public:
  static constexpr uint32_t kOut = 0, kIn = 1, kFirstCompute = 2;

  // `safe`: the host waits for whatever is noted here, unless it is captured into a graph. So every order holds whatever
  // the driver makes of events, and nothing runs at the same time.
  StreamOrder(Device& device, bool safe);
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Index of a stream on which functions run, and which is there; a new one is added.
  uint32_t compute_stream(CUstream stream);
  // The stream, on which functions run, is never destroyed.
  void lasts(CUstream stream) {
    Stream& known = streams_[compute_stream(stream)];
    if (known.recorded == Recorded::kAtOnce) known.recorded = Recorded::kAtFunctions;
  }
  uint32_t streams() const { return static_cast<uint32_t>(streams_.size()); }

  // Everything enqueued on the stream so far.
  Moment now(uint32_t stream, bool function_ends = false) {
    const uint64_t number = ++streams_[stream].issued;
    const Recorded recorded = streams_[stream].recorded;
    if (safe_) end_now(streams_[stream]);
    else if (recorded == Recorded::kAtOnce || (recorded == Recorded::kAtFunctions && function_ends))
      (void)set_mark(stream, true);  // where it fails the device is lost
    return {stream, number};
  }
  // Everything enqueued so far on the default stream, and on others up to their last moments.
  Moments now_everywhere();
  // Records an event here, so that who waits for now() later need not wait for work that comes in between.
  void mark(uint32_t stream);

  // Whether what comes next on `waiter` starts after the moment anyhow, as far as is known without a call.
  bool comes_after(uint32_t waiter, const Moment& moment) const {
    const std::vector<uint64_t>& waits = streams_[waiter].waits;
    return moment.stream == waiter || moment.number <= streams_[moment.stream].over ||
           (moment.stream < waits.size() && moment.number <= waits[moment.stream]);
  }
  // What is enqueued on `waiter` from now on starts after the moments.
  [[nodiscard]] bool make_wait(uint32_t waiter, const Moments& moments, Edge edge);
  // Whether the moments are known to be over; without a call where possible.
  bool over(const Moments& moments) { return ask(moments) == CUDA_SUCCESS; }
  // The host waits for the moments.
  [[nodiscard]] bool synchronize(const Moments& moments, Edge edge);
  // The same, with the core's lock given up meanwhile.
  [[nodiscard]] bool synchronize(std::unique_lock<std::mutex>& lock, const Moments& moments, Edge edge);
  // The host waits for all streams.
  [[nodiscard]] bool synchronize_all();
  // Whether nothing is under way on any stream; then it is known to be over. Asks the driver, of a lost device too.
  bool all_over();
  // Forgets what is over.
  void prune(Moments& moments);

  uint64_t events_created() const { return created_; }
  // Whether numbers of work follow each other. Empty if they do.
  std::string audit() const;

 private:
  struct Mark {
    uint64_t number;
    CUevent event;
    bool moves;  // nobody has asked for it: the next mark takes its event
  };
  enum class Recorded {
    kWhenAsked,    // the default stream, and those that copy
    kAtFunctions,  // the stream lasts
    kAtOnce,       // the program may have destroyed it
  };
  struct Stream {
    CUstream handle = nullptr;
    unsigned long long id = 0;  // unlike the handle, never another stream's; 0 where the driver does not say (before CUDA 12)
    Recorded recorded = Recorded::kWhenAsked;
    uint64_t issued = 0, over = 0;
    std::deque<Mark> marks;          // ascending; those not known to be over
    std::vector<uint64_t> waits;     // [streams] number up to which this stream waits for the others already
  };

  // A mark at or after the number, or null if that work is over. Returns false if the device is lost.
  [[nodiscard]] bool find_mark(uint32_t stream, uint64_t number, const Mark*& mark);
  // As mark(). Returns false if the device is lost: there is no mark then.
  [[nodiscard]] bool set_mark(uint32_t stream, bool moves = false);
  // Whether they are over, as cuEventQuery says it.
  CUresult ask(const Moments& moments);
  // Returns what the driver says of the first mark that is left; CUDA_SUCCESS if there is none.
  CUresult collect(Stream& stream);
  // The host waits for all that was issued on the stream. Returns false if the device is lost.
  [[nodiscard]] bool drain(Stream& stream, bool is_there = false);
  void end_now(Stream& stream);
  CUevent take_event();
  const Driver& driver() const { return device_.driver(); }

  Device& device_;
  const bool safe_;
  std::vector<Stream> streams_;
  std::vector<CUevent> events_;
  uint64_t created_ = 0;
};

}  // namespace ooc
