#include "threads.h"

#include <algorithm>
#include <iterator>

#include "fork.h"

namespace ooc {

Threads::Threads() : core_id_(new_core_id()) {}

ThreadState* Threads::search() const {
  const ThreadEntry* entry = find_thread_entry(core_id_);
  if (entry == nullptr) return nullptr;
  latest_entry = *entry;
  return entry->state;
}

ThreadState& Threads::add() {
  auto free = std::find_if(states_.begin(), states_.end(), [](const ThreadState& state) { return state.exited; });
  if (free == states_.end()) {
    states_.emplace_back();
    free = std::prev(states_.end());
  }
  *free = ThreadState{};
  free->number = ++count_;
  add_thread_entry({core_id_, &*free});
  return *free;
}

}  // namespace ooc
