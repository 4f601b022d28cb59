#include "ledger.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace ooc_torch __attribute__((visibility("hidden"))) {

BlockId Ledger::find(const void* address) const {
  const char* at = static_cast<const char*>(address);
  auto next = places_.upper_bound(at);
  if (next == places_.begin()) return kNoId;
  const auto& [start, id] = *std::prev(next);
  return at < start + block(id).bytes ? id : kNoId;
}

BlockId Ledger::add(char* address, uint64_t bytes, CallId writer) {
  if (const auto known = places_.find(address); known != places_.end()) forget_memory(known->second);
  const auto id = static_cast<BlockId>(blocks_.size());
  Block& added = blocks_.emplace_back();
  added.address = address;
  added.bytes = bytes;
  added.writers = {writer};
  added.readers.resize(1);
  places_[address] = id;
  return id;
}

BlockId Ledger::find_or_add(char* address, uint64_t bytes) {
  const auto known = places_.find(address);
  return known != places_.end() ? known->second : add(address, bytes, kNoId);
}

BlockId Ledger::add_made(char* address, uint64_t bytes, CallId maker) {
  const BlockId id = add(address, bytes, maker);
  writes_[static_cast<size_t>(maker)].push_back({id, 0});
  return id;
}

void Ledger::read(CallId call, const Version& version) {
  reads_[static_cast<size_t>(call)].push_back(version);
  block(version.block).readers[version.number].push_back(call);
}

void Ledger::write(BlockId id) {
  Block& b = block(id);
  ++b.version;
  b.writers.push_back(kNoId);
  b.readers.emplace_back();
}

void Ledger::written_by(BlockId id, CallId call) {
  block(id).writers.back() = call;
  writes_[static_cast<size_t>(call)].push_back(current(id));
}

void Ledger::forget_memory(BlockId id) {
  Block& b = block(id);
  b.there = b.dropped = b.rehearsed = false;
  const auto place = places_.find(b.address);
  if (place != places_.end() && place->second == id) places_.erase(place);
}

std::optional<std::vector<CallId>> Ledger::repeats(std::vector<Version> wanted, Loss loss, BlockId without,
                                                   size_t most) const {
  std::set<CallId> found;
  std::set<Version> seen(wanted.begin(), wanted.end());
  while (!wanted.empty()) {
    const Version version = wanted.back();
    wanted.pop_back();
    for (uint32_t k = 0; k <= version.number; ++k) {
      const CallId writer = block(version.block).writers[k];
      if (writer == kNoId) return std::nullopt;
      if (!found.insert(writer).second) continue;
      if (found.size() > most) return std::nullopt;
      for (const Version& read : reads(writer))
        if ((read.block == without || !exists(read, loss)) && seen.insert(read).second) wanted.push_back(read);
    }
  }
  return std::vector<CallId>(found.begin(), found.end());
}

std::vector<BlockId> Ledger::dependents(const Version& version, Loss loss) const {
  std::set<BlockId> found;
  std::set<Version> seen{version};
  std::vector<Version> todo{version};
  while (!todo.empty()) {
    const Version from = todo.back();
    todo.pop_back();
    for (const CallId reader : block(from.block).readers[from.number])
      for (const Version& written : writes(reader)) {
        const Block& b = block(written.block);
        if (b.there && lost(b, loss)) found.insert(written.block);
        // Every later version was made from this one.
        for (uint32_t k = written.number; k <= b.version; ++k)
          if (const Version later{written.block, k}; !exists(later, loss) && seen.insert(later).second) todo.push_back(later);
      }
  }
  return {found.begin(), found.end()};
}

std::vector<BlockId> Ledger::stranded_without(const Version& version, Loss loss) const {
  std::vector<BlockId> stranded;
  for (const BlockId id : dependents(version, loss))
    if (id != version.block && !repeats({current(id)}, loss, version.block)) stranded.push_back(id);
  return stranded;
}

void Ledger::clear() {
  blocks_.clear();
  places_.clear();
  reads_.clear();
  writes_.clear();
}

}  // namespace ooc_torch
