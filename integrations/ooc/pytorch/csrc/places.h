// Where in the user's Python program memory was allocated. Looked for only while it is wanted: the interpreter's stack is
// walked for each large allocation, which takes some ten microseconds.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace ooc_torch __attribute__((visibility("hidden"))) {

inline std::atomic<bool> places_wanted{false};

// `skipped`: starts of paths of files that are not the user's; `here`: a folder that is left out of paths, with its slash.
void want_places(bool on, std::vector<std::string> skipped, std::string here);
// Tells the core the place of what was just allocated at an address. Never throws.
void note_place(const void* address);

}  // namespace ooc_torch
