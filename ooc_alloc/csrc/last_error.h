// The last error of the calling thread, as ooc_last_error() and ooc_last_status() give it.
#pragma once

#include <string>

#include "ooc_alloc.h"

namespace ooc {

// `status` is for ooc_last_status(), where the call that failed returns none.
void set_last_error(std::string message, int status = OOC_OUT_OF_MEMORY);
// The same for a call that returns its status.
int fail(int status, std::string message);
// The error of std::bad_alloc, which takes no byte of memory. Returns its status.
int no_host_memory() noexcept;

const char* last_error_text();
int last_error_status();

}  // namespace ooc
