#include "cuda_ledger.h"

#include <algorithm>

namespace ooc_torch {
namespace {

// Fills the statistics of private pools, which not every version of PyTorch has.
template <class Stats>
void add_pools(Stats& stats, const std::unordered_map<void*, Block>& blocks) {
  if constexpr (requires { stats.reserved_bytes_by_private_pools; })
    for (const auto& [address, block] : blocks)
      if (block.pool != c10::MempoolId_t{0, 0}) stats.reserved_bytes_by_private_pools[block.pool][0].increase(block.rounded);
}

constexpr std::pair<const char*, Ledger::Trace::Action> kActions[] = {
    {"alloc", Ledger::Trace::ALLOC},
    {"free_requested", Ledger::Trace::FREE_REQUESTED},
    {"free_completed", Ledger::Trace::FREE_COMPLETED},
    {"segment_alloc", Ledger::Trace::SEGMENT_ALLOC},
    {"segment_free", Ledger::Trace::SEGMENT_FREE},
    {"segment_map", Ledger::Trace::SEGMENT_MAP},
    {"segment_unmap", Ledger::Trace::SEGMENT_UNMAP},
    {"snapshot", Ledger::Trace::SNAPSHOT},
    {"oom", Ledger::Trace::OOM},
};

}  // namespace

std::string& Ledger::user_metadata() {
  thread_local std::string text;
  return text;
}

std::vector<std::string>& Ledger::compile_contexts() {
  thread_local std::vector<std::string> contexts;
  return contexts;
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

void Ledger::allocated(void* address, Block block) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const size_t i : {size_t{kAll}, size_t{kind(block)}}) {
    stats_.allocation[i].increase(1);
    stats_.active[i].increase(1);
    stats_.allocated_bytes[i].increase(block.rounded);
    stats_.active_bytes[i].increase(block.rounded);
    stats_.requested_bytes[i].increase(block.requested);
  }
  record(Trace::ALLOC, reinterpret_cast<size_t>(address), block.rounded, block.stream, block.pool, block.context);
  if (when_.load() == native::RecordContext::NEVER) block.context.reset();
  blocks_[address] = std::move(block);
}

std::optional<Block> Ledger::freed(void* address) {
  std::shared_ptr<c10::GatheredContext> context = gather(native::RecordContext::ALL);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return std::nullopt;
  Block block = std::move(found->second);
  blocks_.erase(found);
  for (const size_t i : {size_t{kAll}, size_t{kind(block)}}) {
    stats_.allocation[i].decrease(1);
    stats_.active[i].decrease(1);
    stats_.allocated_bytes[i].decrease(block.rounded);
    stats_.active_bytes[i].decrease(block.rounded);
    stats_.requested_bytes[i].decrease(block.requested);
  }
  if (!context) context = block.context;
  for (const Trace::Action action : {Trace::FREE_REQUESTED, Trace::FREE_COMPLETED})
    record(action, reinterpret_cast<size_t>(address), block.rounded, block.stream, block.pool, context);
  return block;
}

std::optional<Block> Ledger::used_on(void* address, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return std::nullopt;
  std::vector<void*>& streams = found->second.other_streams;
  if (stream != found->second.stream && std::find(streams.begin(), streams.end(), stream) == streams.end())
    streams.push_back(stream);
  return found->second;
}

std::optional<std::pair<void*, Block>> Ledger::around(const void* address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  for (const auto& [start, block] : blocks_)
    if (wanted - reinterpret_cast<uintptr_t>(start) < block.rounded) return std::pair<void*, Block>{start, block};
  return std::nullopt;
}

void Ledger::out_of_memory(size_t bytes, size_t free_bytes, std::shared_ptr<c10::GatheredContext> context) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.num_ooms;
  record(Trace::OOM, free_bytes, bytes, nullptr, {0, 0}, std::move(context));
}

// ---- statistics -----------------------------------------------------------------------------------------------------

native::DeviceStats Ledger::stats(const ooc_stats& core) const {
  std::lock_guard<std::mutex> lock(mutex_);
  native::DeviceStats stats = stats_;
  const bool higher = core.device_peak_bytes > peak_at_reset_;
  const uint64_t peak = higher ? core.device_peak_bytes : std::max(reserved_at_reset_, core.device_bytes);
  const uint64_t created = (core.driver_calls_create - created_at_reset_) * core.chunk_bytes;
  const auto fill = [&](size_t i, uint64_t now, uint64_t most) {
    c10::CachingAllocator::Stat& bytes = stats.reserved_bytes[i];
    bytes.current = static_cast<int64_t>(now);
    bytes.peak = static_cast<int64_t>(most);
    bytes.allocated = static_cast<int64_t>(created);
    bytes.freed = std::max<int64_t>(bytes.allocated - bytes.current, 0);
    c10::CachingAllocator::Stat& chunks = stats.segment[i];
    const auto chunk = static_cast<int64_t>(core.chunk_bytes);
    chunks = {bytes.current / chunk, bytes.peak / chunk, bytes.allocated / chunk, bytes.freed / chunk};
  };
  fill(kAll, core.device_bytes, peak);
  fill(kSmall, core.slab_bytes, core.slab_bytes);
  fill(kLarge, core.device_bytes - core.slab_bytes, peak - std::min(peak, core.slab_bytes));
  stats.num_device_alloc = static_cast<int64_t>(core.driver_calls_create);
  stats.num_device_free = static_cast<int64_t>(core.driver_calls_create - core.device_bytes / core.chunk_bytes);
  add_pools(stats, blocks_);
  return stats;
}

void Ledger::reset_accumulated(const ooc_stats& core) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* array : {&stats_.allocation, &stats_.active, &stats_.allocated_bytes, &stats_.active_bytes, &stats_.requested_bytes})
    for (c10::CachingAllocator::Stat& stat : *array) stat.reset_accumulated();
  stats_.num_ooms = stats_.num_alloc_retries = 0;
  created_at_reset_ = core.driver_calls_create;
}

void Ledger::reset_peak(const ooc_stats& core) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* array : {&stats_.allocation, &stats_.active, &stats_.allocated_bytes, &stats_.active_bytes, &stats_.requested_bytes})
    for (c10::CachingAllocator::Stat& stat : *array) stat.reset_peak();
  peak_at_reset_ = core.device_peak_bytes;
  reserved_at_reset_ = core.device_bytes;
}

// ---- history --------------------------------------------------------------------------------------------------------

// The caller holds the lock.
void Ledger::record(Trace::Action action, size_t address, size_t bytes, void* stream, c10::MempoolId_t pool,
                    std::shared_ptr<c10::GatheredContext> context) {
  if ((!recording_ || skipped_.count(action) != 0) && trackers_.empty()) return;
  Trace entry(action, device_, address, bytes, static_cast<cudaStream_t>(stream), pool, c10::getApproximateTime(),
              when_.load() >= native::RecordContext::ALLOC ? std::move(context) : nullptr,
              compile_contexts().empty() ? std::string() : compile_contexts().back(), user_metadata());
  for (const native::AllocatorTraceTracker& tracker : trackers_) tracker(entry);
  if (!recording_ || skipped_.count(action) != 0) return;
  history_.push_back(std::move(entry));
  while (history_.size() > most_entries_) history_.pop_front();
}

void Ledger::record_history(bool enabled, native::CreateContextFn recorder, size_t most_entries,
                            native::RecordContext when, bool clear, const std::vector<std::string>& skipped) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(when == native::RecordContext::NEVER || recorder != nullptr, "recording frames needs a recorder");
  recording_ = enabled;
  recorder_ = recorder;
  when_ = enabled ? when : native::RecordContext::NEVER;
  most_entries_ = std::max<size_t>(most_entries, 1);
  skipped_.clear();
  for (const std::string& name : skipped) {
    const auto* known = std::find_if(std::begin(kActions), std::end(kActions), [&](const auto& a) { return a.first == name; });
    TORCH_CHECK(known != std::end(kActions), "'", name, "' is no action of a memory history");
    skipped_.insert(known->second);
  }
  if (clear || !enabled) {
    history_.clear();
    annotations_.clear();
  }
}

bool Ledger::records_history() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return recording_;
}

std::shared_ptr<c10::GatheredContext> Ledger::gather(native::RecordContext level) const {
  if (when_.load(std::memory_order_relaxed) < level) return nullptr;
  native::CreateContextFn recorder = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    recorder = recorder_;
  }
  return recorder != nullptr ? recorder() : nullptr;
}

void Ledger::track(native::AllocatorTraceTracker tracker) {
  std::lock_guard<std::mutex> lock(mutex_);
  trackers_.push_back(std::move(tracker));
}

void Ledger::annotate(const std::vector<std::pair<std::string, std::string>>& metadata) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!recording_) return;
  c10::CachingDeviceAllocator::AnnotationEntry entry(device_, c10::getApproximateTime());
  for (const auto& [name, value] : metadata) entry.recordUserMetadata(name, value);
  annotations_.push_back(std::move(entry));
}

// ---- snapshots ------------------------------------------------------------------------------------------------------

// Each block is a segment of its own: there is nothing between them.
native::SegmentInfo Ledger::segment(size_t address, size_t bytes, void* stream, c10::MempoolId_t pool) const {
  native::SegmentInfo info;
  info.device = device_;
  info.address = address;
  info.total_size = bytes;
  info.stream = static_cast<cudaStream_t>(stream);
  info.is_large = bytes > small_limit_;
  info.owner_private_pool_id = pool;
  info.blocks.emplace_back();
  info.blocks.back().size = bytes;
  return info;
}

native::SnapshotInfo Ledger::snapshot(c10::MempoolId_t pool, const std::vector<IdleBlock>& idle, bool include_traces) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool all = pool == c10::MempoolId_t{0, 0};
  native::SnapshotInfo result{};
  for (const auto& [address, block] : blocks_) {
    if (!all && block.pool != pool) continue;
    native::SegmentInfo info = segment(reinterpret_cast<size_t>(address), block.rounded, block.stream, block.pool);
    info.requested_size = block.requested;
    info.allocated_size = info.active_size = block.rounded;
    info.context_when_allocated = block.context;
    info.blocks.back().requested_size = block.requested;
    info.blocks.back().allocated = info.blocks.back().active = true;
    info.blocks.back().context_when_allocated = block.context;
    result.segments.push_back(std::move(info));
  }
  for (const IdleBlock& block : idle)
    if (all || block.pool == pool)
      result.segments.push_back(segment(reinterpret_cast<size_t>(block.address), block.bytes, block.stream, block.pool));
  std::sort(result.segments.begin(), result.segments.end(),
            [](const native::SegmentInfo& a, const native::SegmentInfo& b) { return a.address < b.address; });
  record(Trace::SNAPSHOT, 0, static_cast<size_t>(stats_.allocated_bytes[kAll].current), nullptr, {0, 0}, nullptr);

  const auto nanoseconds = clock_.makeConverter();
  result.device_traces.resize(static_cast<size_t>(device_) + 1);
  if (include_traces)
    for (const Trace& entry : history_) {
      if (!all && entry.mempool_ != pool) continue;
      result.device_traces.back().push_back(entry);
      c10::CachingDeviceAllocator::trace_time_& time = result.device_traces.back().back().time_;
      time.t_ = nanoseconds(time.approx_t_) / 1000;
    }
  for (const auto& annotation : annotations_) {
    result.external_annotations.push_back(annotation);
    auto& time = result.external_annotations.back().time_;
    time.t_ = nanoseconds(time.approx_t_) / 1000;
  }
  return result;
}

}  // namespace ooc_torch
