#include "streams.h"

#include <algorithm>

namespace ooc {
namespace {

// A function that uses one range must not wait for the copy of another, nor a copy for the use of another.
bool overlap(const RegionOrder::Part& part, uint32_t first, uint32_t count) {
  return part.first < first + count && first < part.first + part.count;
}

}  // namespace

Streams::Streams(Device& device, Timeline& timeline, bool on)
    : device_(device),
      order_(on ? std::make_unique<StreamOrder>(device) : nullptr),
      timer_(on ? std::make_unique<StreamTimer>(device, timeline) : nullptr) {}

bool Streams::wait_by_kind(uint32_t waiter, const Moments& moments) {
  for (const Moment& moment : moments) {
    const Edge edge = moment.stream == StreamOrder::kIn    ? Edge::kInBeforeUse
                      : moment.stream == StreamOrder::kOut ? Edge::kOutBeforeChunk
                                                           : Edge::kUseBeforeChunk;
    if (!order_->make_wait(waiter, moment, edge)) return false;
  }
  return true;
}

Moments Streams::users(const Region* region, uint32_t first, uint32_t count) {
  Moments all = region->order.uses;
  all.add(region->order.arrival);
  all.add(region->order.out);
  for (const RegionOrder::Part& part : region->order.parts) {
    if (!overlap(part, first, count)) continue;
    all.add(part.uses);
    all.add(part.arrival);
  }
  return all;
}

Moments Streams::arrival(const Region* region, uint32_t first, uint32_t count) {
  Moments all = region->order.arrival;
  for (const RegionOrder::Part& part : region->order.parts)
    if (overlap(part, first, count)) all.add(part.arrival);
  return all;
}

// What is over is forgotten when there are many parts; if they are still too many, they are not told apart any more.
RegionOrder::Part& Streams::part(Region* region, uint32_t first, uint32_t count) {
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

void Streams::arrives(Region* region, uint32_t first, uint32_t count, const Moments& moments) {
  if (!order_) return;
  (region->in_ranges ? part(region, first, count).arrival : region->order.arrival).add(moments);
}

void Streams::wait_for_all_users(Region* region) {
  region->order.arrival = users(region);
  region->order.uses.clear();
  region->order.parts.clear();
}

bool Streams::still_arrives(Region* region, const Hold& hold) {
  Moments& whole = region->order.arrival;
  if (!whole.empty() && order_->over(whole)) whole.clear();
  bool any = !whole.empty();
  const uint32_t count = hold.end(region) - hold.first;
  for (RegionOrder::Part& known : region->order.parts) {
    if (known.arrival.empty() || !overlap(known, hold.first, count)) continue;
    if (order_->over(known.arrival)) known.arrival.clear();
    any |= !known.arrival.empty();
  }
  return any;
}

const Region* Streams::still_arriving(const std::vector<Hold>& held) {
  const Region* first = nullptr;
  for (const Hold& hold : held) {
    Region* region = hold.get();
    if (region != nullptr && still_arrives(region, hold) && first == nullptr) first = region;
  }
  return first;
}

bool Streams::begin_function(uint32_t stream, const std::vector<Hold>& held) {
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

void Streams::end_function(uint32_t stream, const std::vector<Hold>& held, bool awaited, bool data_move) {
  const Moment moment = order_->now(stream);
  for (const Hold& hold : held)
    if (Region* region = hold.get())
      (hold.whole() ? region->order.uses : part(region, hold.first, hold.count).uses).add(moment);
  if (!awaited && !(freed_since_mark_ && data_move)) return;
  order_->mark(stream);
  freed_since_mark_ = false;
}

Moment Streams::end_copy(Direction direction, StreamTimer::Start started, double* seconds, uint64_t event) {
  if (!order_) return {};
  timer_->stop(device_.stream(direction), started, seconds, event);
  const Moment moment = order_->now(direction == Direction::kOut ? StreamOrder::kOut : StreamOrder::kIn);
  order_->mark(moment.stream);
  return moment;
}

}  // namespace ooc
