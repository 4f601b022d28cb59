// Where in the user's Python program memory was allocated. It is looked for only while it is wanted, as walking the
// interpreter's stack takes some ten microseconds for each large allocation.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace ooc_torch __attribute__((visibility("hidden"))) {

inline std::atomic<bool> places_wanted{false};

// `skipped` are starts of paths of files that are not the user's. `here`, which ends with a slash, is left out of paths.
void want_places(bool on, std::vector<std::string> skipped, std::string here);
// Tells the core in which place the memory at an address was just allocated. It never throws.
void note_place(const void* address);

}  // namespace ooc_torch
