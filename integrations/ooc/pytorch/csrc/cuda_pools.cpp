#include "cuda_pools.h"

#include <algorithm>

namespace ooc_torch {

Pools::Pool* Pools::find(PoolId id) {
  const auto found = pools_.find(id);
  return found != pools_.end() ? &found->second : nullptr;
}

void Pools::begin(PoolId id, Filter filter) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [other, accepts] : filters_)
    TORCH_CHECK(other != id, "allocations are being routed to this memory pool already");
  ++pools_[id].users;
  filters_.emplace_back(id, std::move(filter));
  ++active_count_;
}

void Pools::end(PoolId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(filters_.begin(), filters_.end(), [&](const auto& entry) { return entry.first == id; });
  TORCH_CHECK(found != filters_.end(), "no allocations are being routed to this memory pool");
  filters_.erase(found);
  --active_count_;
}

std::optional<PoolId> Pools::pool_for(cudaStream_t stream) {
  if (!active()) return std::nullopt;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = filters_.rbegin(); entry != filters_.rend(); ++entry)  // the innermost first
    if (entry->second(stream)) return entry->first;
  return std::nullopt;
}

void Pools::add_user(PoolId id, Source source) {
  std::lock_guard<std::mutex> lock(mutex_);
  Pool& pool = pools_[id];
  ++pool.users;
  if (source) pool.source = std::move(source);
}

std::vector<Pools::Discarded> Pools::take_idle(Pool& pool) {
  std::vector<Discarded> discarded;
  for (auto entry = pool.blocks.begin(); entry != pool.blocks.end();) {
    if (entry->second.live) {
      ++entry;
      continue;
    }
    discarded.push_back({entry->first, pool.source});
    entry = pool.blocks.erase(entry);
  }
  return discarded;
}

std::vector<Pools::Discarded> Pools::drop_user(PoolId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Pool* pool = find(id);
  TORCH_CHECK(pool != nullptr && pool->users > 0, "a memory pool was released that has no users");
  if (--pool->users > 0) return {};
  std::vector<Discarded> discarded = take_idle(*pool);
  if (pool->blocks.empty()) pools_.erase(id);  // otherwise with its last block
  return discarded;
}

int Pools::users(PoolId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Pool* pool = find(id);
  return pool != nullptr ? pool->users : 0;
}

void Pools::use_on_out_of_memory(PoolId id, bool use) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Pool* pool = find(id)) pool->use_on_oom = use;
}

Source Pools::source(PoolId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Pool* pool = find(id);
  return pool != nullptr ? pool->source : nullptr;
}

// Takes the smallest idle block that is no more than an eighth too large.
void* Pools::take(PoolId id, size_t& bytes, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Pool* pool = find(id);
  if (pool == nullptr) return nullptr;
  std::pair<void* const, PoolBlock>* best = nullptr;
  for (auto& entry : pool->blocks) {
    const PoolBlock& block = entry.second;
    const bool fits = !block.live && !block.shared && block.stream == stream && block.bytes >= bytes &&
                      block.bytes - bytes <= bytes / 8;
    if (fits && (best == nullptr || block.bytes < best->second.bytes)) best = &entry;
  }
  if (best == nullptr) return nullptr;
  best->second.live = true;
  bytes = best->second.bytes;
  return best->first;
}

void Pools::add(PoolId id, void* address, size_t bytes, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  pools_[id].blocks[address] = {bytes, stream, true, false};
}

void Pools::share(PoolId id, void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  Pool* pool = find(id);
  if (pool == nullptr) return;
  const auto found = pool->blocks.find(address);
  if (found != pool->blocks.end()) found->second.shared = true;
}

std::optional<Pools::Discarded> Pools::give(PoolId id, void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  Pool* pool = find(id);
  if (pool == nullptr) return std::nullopt;
  const auto found = pool->blocks.find(address);
  if (found == pool->blocks.end()) return std::nullopt;
  found->second.live = false;
  if (pool->users > 0) return std::nullopt;
  const Discarded discarded{address, pool->source};
  pool->blocks.erase(found);
  if (pool->blocks.empty()) pools_.erase(id);
  return discarded;
}

bool Pools::live_are(PoolId id, const std::unordered_set<void*>& expected) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Pool* pool = find(id);
  TORCH_CHECK(pool != nullptr, "there is no such memory pool");
  size_t live = 0;
  for (const auto& [address, block] : pool->blocks) {
    if (!block.live) continue;
    ++live;
    if (expected.count(address) == 0) return false;
  }
  return live == expected.size();
}

std::shared_ptr<Pools::State> Pools::state(PoolId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Pool* pool = find(id);
  TORCH_CHECK(pool != nullptr, "there is no such memory pool");
  auto state = std::make_shared<State>();
  state->id = id;
  for (const auto& [address, block] : pool->blocks)
    if (block.live) state->live.emplace_back(address, block);
  return state;
}

std::pair<std::vector<void*>, std::vector<std::pair<void*, Pools::PoolBlock>>> Pools::restore(const State& state) {
  std::lock_guard<std::mutex> lock(mutex_);
  Pool* pool = find(state.id);
  TORCH_CHECK(pool != nullptr, "there is no such memory pool");
  for (const auto& [address, block] : state.live)
    TORCH_CHECK(pool->blocks.count(address) != 0, "the memory pool has lost a block that the state has");
  std::vector<void*> freed;
  for (auto& [address, block] : pool->blocks)
    if (std::exchange(block.live, false)) freed.push_back(address);
  for (const auto& [address, block] : state.live) pool->blocks[address].live = true;
  return {freed, state.live};
}

std::vector<IdleBlock> Pools::idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<IdleBlock> blocks;
  for (const auto& [id, pool] : pools_)
    for (const auto& [address, block] : pool.blocks)
      if (!block.live) blocks.push_back({address, block.bytes, block.stream, id});
  return blocks;
}

std::vector<Pools::Discarded> Pools::last_resort() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Discarded> all;
  for (auto& [id, pool] : pools_)
    if (pool.use_on_oom)
      for (Discarded& block : take_idle(pool)) all.push_back(std::move(block));
  return all;
}

}  // namespace ooc_torch
