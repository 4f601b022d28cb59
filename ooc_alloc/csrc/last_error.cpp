#include "last_error.h"

#include <utility>

namespace ooc {
namespace {

thread_local std::string last_error;
thread_local const char* last_literal = nullptr;  // in its place
thread_local int last_status = OOC_OK;

}  // namespace

void set_last_error(std::string message, int status) {
  last_error = std::move(message);
  last_literal = nullptr;
  last_status = status;
}

int fail(int status, std::string message) {
  set_last_error(std::move(message), status);
  return status;
}

int no_host_memory() noexcept {
  last_literal =
      "no host memory for the books of ooc_alloc: the system gives none; variables are safe where they are, end other "
      "processes or free memory, and try again";
  return last_status = OOC_NO_HOST_MEMORY;
}

const char* last_error_text() { return last_literal != nullptr ? last_literal : last_error.c_str(); }
int last_error_status() { return last_status; }

}  // namespace ooc
