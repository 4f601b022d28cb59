// Texts to numbers where there is no Python: the byte units of swapd/units.py, with the same meanings.
//
//   8GiB  512MB  1.5G  65536     KiB, MiB, GiB, TiB, and K, M, G, T alone, are powers of 1024; KB, MB, GB, TB of 1000
#pragma once

#include <cctype>
#include <charconv>
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

// A number at the start of a text, which is left with what comes after it. Not strtod: the decimal point must not
// depend on the program's locale.
inline bool take_number(std::string_view& text, double& value) {
  if (text.empty() || std::string_view("0123456789.").find(text[0]) == std::string_view::npos) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return error == std::errc();
}

inline bool parse_number(std::string_view text, double& value) { return take_number(text, value) && text.empty(); }

// "1.5 GiB": a number and one of the units.
template <size_t N>
bool parse_quantity(std::string_view text, const Unit (&units)[N], double& value) {
  text = trim(text);
  if (!take_number(text, value)) return false;
  const std::string name = lower(trim(text));
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
