// Work on streams of the device: who waits for whom, and what of a region later work has to wait for.
//
// Where functions run on the host, `on()` is false: the host has waited for every copy, no moment is ever noted, and
// every method returns at once. A call that returns false could not put the work in order, as the device is lost: its
// caller enqueues nothing and gives no memory away. Guarded by the core's lock.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "region.h"
#include "stream_order.h"
#include "stream_timer.h"

namespace ooc {

class Streams {
 public:
  Streams(Device& device, Timeline& timeline, bool on, bool safe)
      : device_(device),
        order_(on ? std::make_unique<StreamOrder>(device, safe) : nullptr),
        timer_(on ? std::make_unique<StreamTimer>(device, timeline) : nullptr) {}

  bool on() const { return order_ != nullptr; }
  // For RelaxedCaptures: the device where streams can be captured into graphs, else null.
  const Device* capturable() const { return order_ ? &device_ : nullptr; }
  // The index of a stream on which functions run; a new one is added. A null stream is the default one.
  uint32_t index(CUstream stream) { return order_ ? order_->compute_stream(stream) : 0; }
  void lasts(CUstream stream) {
    if (order_) order_->lasts(stream);
  }
  bool runs_functions(uint32_t stream) const { return stream >= StreamOrder::kFirstCompute; }

  // ---- moments
  Moments now(uint32_t stream) { return order_ ? Moments{order_->now(stream)} : Moments{}; }
  Moments now_everywhere() { return order_ ? order_->now_everywhere() : Moments{}; }
  bool over(const Moments& moments) { return !order_ || order_->over(moments); }
  void prune(Moments& moments) {
    if (order_) order_->prune(moments);
  }
  bool all_over() { return !order_ || order_->all_over(); }
  uint64_t events_created() const { return order_ ? order_->events_created() : 0; }

  // ---- waits
  [[nodiscard]] bool wait(uint32_t waiter, const Moments& moments, Edge edge) {
    return !order_ || order_->make_wait(waiter, moments, edge);
  }
  // The stream waits for what used some memory before, or is still to bring its bytes.
  [[nodiscard]] bool wait_for_memory(uint32_t waiter, const Moments& moments) {
    return !order_ || wait_by_kind(waiter, moments);
  }
  [[nodiscard]] bool host_waits(const Moments& moments, Edge edge) {
    return !order_ || order_->synchronize(moments, edge);
  }
  // The lock is given up meanwhile.
  [[nodiscard]] bool host_waits(std::unique_lock<std::mutex>& lock, const Moments& moments, Edge edge) {
    return !order_ || order_->synchronize(lock, moments, edge);
  }
  [[nodiscard]] bool host_waits_for_all() { return !order_ || order_->synchronize_all(); }

  // ---- regions
  // Uses, copies in, and copies out of some slots.
  static Moments users(const Region* region, uint32_t first, uint32_t count) {
    Moments all = region->order.uses;
    all.add(region->order.arrival);
    all.add(region->order.out);
    for (const RegionOrder::Part& part : region->order.parts) {
      if (!part.overlaps(first, count)) continue;
      all.add(part.uses);
      all.add(part.arrival);
    }
    return all;
  }
  static Moments users(const Region* region) { return users(region, 0, region->count); }
  static Moments arrival(const Region* region, uint32_t first, uint32_t count) {
    Moments all = region->order.arrival;
    for (const RegionOrder::Part& part : region->order.parts)
      if (part.overlaps(first, count)) all.add(part.arrival);
    return all;
  }
  void used(Region* region, const Moments& moments) {
    if (order_) region->order.uses.add(moments);
  }
  void arrives(Region* region, uint32_t first, uint32_t count, const Moments& moments) {
    if (!order_) return;
    (region->in_ranges ? part(region, first, count).arrival : region->order.arrival).add(moments);
  }
  // Whether work on the stream need not wait for anybody who used the region, as far as is known without a call.
  bool idle_for(uint32_t stream, const Region* region) const {
    return !order_ || (region->order.parts.empty() && comes_after(stream, region->order.uses) &&
                       comes_after(stream, region->order.arrival) && comes_after(stream, region->order.out));
  }
  // What is enqueued on the stream from now on comes after the moments without a wait.
  bool comes_after(uint32_t stream, const Moments& moments) const {
    return std::ranges::all_of(moments, [&](const Moment& moment) { return order_->comes_after(stream, moment); });
  }
  // The variable in the region ends: whoever used the memory comes before the first use of the next one.
  void end_variable(Region* region) {
    if (order_) wait_for_all_users(region);
  }

  // ---- functions: between the two calls, what it uses is enqueued on its stream
  // The first held region that keeps the stream waiting for a copy, or null. Nobody waits, and for the work of other
  // functions nobody asks: they would run without us, too.
  const Region* still_arriving(uint32_t stream, const std::vector<Hold>& held) {
    const auto is_copy = [&](const Moment& moment) {
      return !runs_functions(moment.stream) && !order_->comes_after(stream, moment) && !order_->over(moment);
    };
    const auto waits = [&](Moments& moments) {
      order_->prune(moments);
      return std::any_of(moments.begin(), moments.end(), is_copy);
    };
    for (const Hold& hold : held) {
      Region* region = hold.get();
      if (region == nullptr) continue;
      if (waits(region->order.arrival)) return region;
      for (RegionOrder::Part& part : region->order.parts)
        if (part.overlaps(hold.first, hold.end(region) - hold.first) && waits(part.arrival)) return region;
    }
    return nullptr;
  }
  // The function's stream waits for what is under way to what the function holds.
  [[nodiscard]] bool begin_function(uint32_t stream, const std::vector<Hold>& held) {
    for (const Hold& hold : held) {
      const Region* region = hold.get();
      if (region == nullptr) continue;
      const bool whole = region->order.parts.empty();
      const bool ordered = whole ? wait_for_memory(stream, region->order.arrival)
                                 : wait_for_memory(stream, arrival(region, hold.first, hold.end(region) - hold.first));
      if (!ordered) return false;
    }
    return true;
  }
  // The function ends: what it held was used. An event is recorded where somebody is going to wait for the functions so
  // far: a move that is `awaited`, or the next user of what was freed, if data move at all.
  void end_function(uint32_t stream, const std::vector<Hold>& held, bool awaited, bool data_move) {
    const Moment moment = order_->now(stream, true);
    for (const Hold& hold : held)
      if (Region* region = hold.get())
        (hold.whole() ? region->order.uses : part(region, hold.first, hold.count).uses).add(moment);
    if (!awaited && !(freed_since_mark_ && data_move)) return;
    order_->mark(stream);
    freed_since_mark_ = false;
  }
  void freed() { freed_since_mark_ = true; }

  // ---- copies, and the clock of the device
  StreamTimer::Start start_copy(Direction direction) {
    return order_ ? timer_->start(device_.stream(direction)) : nullptr;
  }
  // The copy was enqueued, whole or in part; others will wait for just this one. Its seconds are added to `*seconds`.
  Moment end_copy(Direction direction, StreamTimer::Start started, double* seconds, uint64_t event) {
    if (!order_) return {};
    timer_->stop(device_.stream(direction), started, seconds, event);
    const Moment moment = order_->now(direction == Direction::kOut ? StreamOrder::kOut : StreamOrder::kIn);
    order_->mark(moment.stream);
    return moment;
  }
  StreamTimer* timer() const { return timer_.get(); }  // null where functions run on the host
  void collect_times() {
    if (timer_) timer_->collect();
  }

  std::string audit() const { return order_ ? order_->audit() : std::string(); }

 private:
  [[nodiscard]] bool wait_by_kind(uint32_t waiter, const Moments& moments) {
    for (const Moment& moment : moments) {
      const Edge edge = moment.stream == StreamOrder::kIn    ? Edge::kInBeforeUse
                        : moment.stream == StreamOrder::kOut ? Edge::kOutBeforeChunk
                                                             : Edge::kUseBeforeChunk;
      if (!order_->make_wait(waiter, moment, edge)) return false;
    }
    return true;
  }
  static void wait_for_all_users(Region* region) {
    region->order.arrival = users(region);
    region->order.uses.clear();
    region->order.parts.clear();
  }
  // What is over is forgotten when there are many parts; if they are still too many, they are not told apart any more.
  RegionOrder::Part& part(Region* region, uint32_t first, uint32_t count) {
    constexpr size_t kMostParts = 64;
    RegionOrder& order = region->order;
    for (RegionOrder::Part& known : order.parts)
      if (known.first == first && known.count == count) return known;
    if (order.parts.size() >= kMostParts) {
      for (RegionOrder::Part& known : order.parts) {
        order_->prune(known.uses);
        order_->prune(known.arrival);
      }
      const auto is_over = [](const RegionOrder::Part& known) { return known.uses.empty() && known.arrival.empty(); };
      order.parts.erase(std::remove_if(order.parts.begin(), order.parts.end(), is_over), order.parts.end());
    }
    if (order.parts.size() >= kMostParts) {
      for (const RegionOrder::Part& known : order.parts) {
        order.uses.add(known.uses);
        order.arrival.add(known.arrival);
      }
      order.parts.clear();
    }
    order.parts.push_back({first, count, {}, {}});
    return order.parts.back();
  }

  Device& device_;
  std::unique_ptr<StreamOrder> order_;
  std::unique_ptr<StreamTimer> timer_;  // with order_
  bool freed_since_mark_ = false;
};

}  // namespace ooc
