// The last error of the calling thread, as ooc_last_error() and ooc_last_status() give it.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "ooc_alloc.h"

namespace ooc {

struct LastError {
  std::string message;
  const char* literal = nullptr;  // in place of the message
  int status = OOC_OK;
};
inline thread_local LastError latest_error;

// `status` is for ooc_last_status(), where the call that failed returns none.
inline void set_last_error(std::string message, int status = OOC_OUT_OF_MEMORY) {
  latest_error = {std::move(message), nullptr, status};
}
// The same for a call that returns its status.
inline int fail(int status, std::string message) {
  set_last_error(std::move(message), status);
  return status;
}
// The error of std::bad_alloc, which takes no byte of memory. Returns its status.
inline int no_host_memory() noexcept {
  latest_error.literal =
      "no host memory for the books of ooc_alloc: the system gives none; variables are safe where they are, end other "
      "processes or free memory, and try again";
  return latest_error.status = OOC_NO_HOST_MEMORY;
}

// What a call fails with, as an exception (capi.h).
struct Failure : std::runtime_error {
  Failure(int code, const std::string& text) : std::runtime_error(text), status(code) {}
  int status;
};

inline const char* last_error_text() {
  return latest_error.literal != nullptr ? latest_error.literal : latest_error.message.c_str();
}
inline int last_error_status() { return latest_error.status; }

}  // namespace ooc
