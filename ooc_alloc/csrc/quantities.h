// Texts to numbers where there is no Python: the byte units of swapd/units.py, with the same meanings.
//
//   8GiB  512MB  1.5G  65536     KiB, MiB, GiB, TiB, and K, M, G, T alone, are powers of 1024; KB, MB, GB, TB of 1000
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ooc {

struct Unit {
  std::string_view name;  // lower case
  double factor;
};

constexpr Unit kByteUnits[] = {
    {"", 1},         {"b", 1},        {"k", 0x1p10},   {"m", 0x1p20}, {"g", 0x1p30}, {"t", 0x1p40}, {"kib", 0x1p10},
    {"mib", 0x1p20}, {"gib", 0x1p30}, {"tib", 0x1p40}, {"kb", 1e3},   {"mb", 1e6},   {"gb", 1e9},   {"tb", 1e12},
};

inline std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

inline std::string lower(std::string_view text) {
  std::string result(text);
  for (char& letter : result) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return result;
}

// Not strtod: the decimal point must not depend on the program's locale.
inline bool parse_number(std::string_view text, double& value) {
  value = 0;
  double scale = 0;  // of the next digit after the point; 0: before the point
  bool any_digit = false;
  for (const char letter : text) {
    if (letter == '.' && scale == 0) {
      scale = 0.1;
    } else if (letter >= '0' && letter <= '9') {
      any_digit = true;
      if (scale == 0) {
        value = value * 10 + (letter - '0');
      } else {
        value += scale * (letter - '0');
        scale /= 10;
      }
    } else {
      return false;
    }
  }
  return any_digit;
}

// "1.5 GiB": a number and one of the units.
template <size_t N>
bool parse_quantity(std::string_view text, const Unit (&units)[N], double& value) {
  text = trim(text);
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  if (!parse_number(text.substr(0, digits), value)) return false;
  const std::string name = lower(trim(text.substr(digits)));
  for (const Unit& unit : units) {
    if (name != unit.name) continue;
    value *= unit.factor;
    return true;
  }
  return false;
}

inline bool parse_bytes(std::string_view text, uint64_t& bytes) {
  double value = 0;
  if (!parse_quantity(text, kByteUnits, value) || value < 1 || value > 0x1p60) return false;
  bytes = static_cast<uint64_t>(value);
  return true;
}

// Bytes, or a share such as "60%" of `total`: more than 0%, at most 100%.
inline bool parse_amount(std::string_view text, uint64_t total, uint64_t& bytes) {
  text = trim(text);
  if (text.empty() || text.back() != '%') return parse_bytes(text, bytes);
  double percent = 0;
  if (!parse_number(trim(text.substr(0, text.size() - 1)), percent) || percent <= 0 || percent > 100) return false;
  bytes = static_cast<uint64_t>(static_cast<double>(total) * percent / 100);
  return true;
}

}  // namespace ooc
