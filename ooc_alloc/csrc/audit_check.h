// The recount of an audit beside what was kept: a text that names every difference.
#pragma once

#include <cstdint>
#include <string>

namespace ooc {

class AuditCheck {
 public:
  void equal(const char* what, uint64_t counted, uint64_t kept) {
    if (counted == kept) return;
    text_ += std::string(what) + ": counted " + std::to_string(counted) + ", kept " + std::to_string(kept) + "; ";
  }
  // Something that must not be there.
  void none(const char* what, bool found) { equal(what, found ? 1 : 0, 0); }
  std::string text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace ooc
