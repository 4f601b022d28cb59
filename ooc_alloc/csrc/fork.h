// Cores that are alive, for threads that exit and processes that fork; and the ids that tell cores apart.
#pragma once

#include <cstdint>

#include "thread_state.h"

namespace ooc {

class Core;

// Unique for the life of the process.
uint64_t new_core_id();
void register_core(uint64_t id, Core* core);
void unregister_core(uint64_t id);
// The calling thread's entries, which tell the cores when it exits.
void add_thread_entry(const ThreadEntry& entry);
const ThreadEntry* find_thread_entry(uint64_t core_id);

}  // namespace ooc
