// Cores that are alive, for threads that exit and processes that fork.
#pragma once

#include <cstdint>

namespace ooc {

class Core;
struct ThreadState;

// Unique for the life of the process.
uint64_t register_core(Core* core);
void unregister_core(Core* core);

}  // namespace ooc
