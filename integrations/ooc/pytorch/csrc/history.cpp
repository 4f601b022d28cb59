#include "history.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace ooc_torch __attribute__((visibility("hidden"))) {

VariableId History::find(const void* address) const {
  const char* at = static_cast<const char*>(address);
  auto next = places_.upper_bound(at);
  if (next == places_.begin()) return kNoId;
  const auto& [start, id] = *std::prev(next);
  return at < start + variable(id).bytes ? id : kNoId;
}

VariableId History::add(char* address, uint64_t bytes, CallId writer) {
  if (const auto known = places_.find(address); known != places_.end()) forget_memory(known->second);
  const auto id = static_cast<VariableId>(variables_.size());
  Variable& added = variables_.emplace_back();
  added.address = address;
  added.bytes = bytes;
  added.writers = {writer};
  added.readers.resize(1);
  places_[address] = id;
  return id;
}

VariableId History::find_or_add(char* address, uint64_t bytes) {
  const auto known = places_.find(address);
  return known != places_.end() ? known->second : add(address, bytes, kNoId);
}

VariableId History::add_made(char* address, uint64_t bytes, CallId maker) {
  const VariableId id = add(address, bytes, maker);
  if (maker != kNoId) writes_[static_cast<size_t>(maker)].push_back({id, 0});
  return id;
}

void History::read(CallId call, const Version& version) {
  reads_[static_cast<size_t>(call)].push_back(version);
  variable(version.variable).readers[version.number].push_back(call);
}

void History::write(VariableId id) {
  Variable& b = variable(id);
  ++b.version;
  b.writers.push_back(kNoId);
  b.readers.emplace_back();
}

void History::written_by(VariableId id, CallId call) {
  variable(id).writers.back() = call;
  writes_[static_cast<size_t>(call)].push_back(current(id));
}

void History::forget_memory(VariableId id) {
  Variable& b = variable(id);
  b.there = b.dropped = b.rehearsed = false;
  const auto place = places_.find(b.address);
  if (place != places_.end() && place->second == id) places_.erase(place);
}

std::optional<std::vector<CallId>> History::repeats(std::vector<Version> wanted, Loss loss, VariableId without,
                                                   size_t most) const {
  std::set<CallId> found;
  std::set<Version> seen(wanted.begin(), wanted.end());
  while (!wanted.empty()) {
    const Version version = wanted.back();
    wanted.pop_back();
    for (uint32_t k = 0; k <= version.number; ++k) {
      const CallId writer = variable(version.variable).writers[k];
      if (writer == kNoId) return std::nullopt;
      if (!found.insert(writer).second) continue;
      if (found.size() > most) return std::nullopt;
      for (const Version& read : reads(writer))
        if ((read.variable == without || !exists(read, loss)) && seen.insert(read).second) wanted.push_back(read);
    }
  }
  return std::vector<CallId>(found.begin(), found.end());
}

std::vector<VariableId> History::dependents(const Version& version, Loss loss) const {
  std::set<VariableId> found;
  std::set<Version> seen{version};
  std::vector<Version> todo{version};
  while (!todo.empty()) {
    const Version from = todo.back();
    todo.pop_back();
    for (const CallId reader : variable(from.variable).readers[from.number])
      for (const Version& written : writes(reader)) {
        const Variable& b = variable(written.variable);
        if (b.there && lost(b, loss)) found.insert(written.variable);
        // Every later version was made from this one.
        for (uint32_t k = written.number; k <= b.version; ++k)
          if (const Version later{written.variable, k}; !exists(later, loss) && seen.insert(later).second) todo.push_back(later);
      }
  }
  return {found.begin(), found.end()};
}

std::vector<VariableId> History::stranded_without(const Version& version, Loss loss) const {
  std::vector<VariableId> stranded;
  for (const VariableId id : dependents(version, loss))
    if (id != version.variable && !repeats({current(id)}, loss, version.variable)) stranded.push_back(id);
  return stranded;
}

void History::clear() {
  variables_.clear();
  places_.clear();
  reads_.clear();
  writes_.clear();
}

}  // namespace ooc_torch
