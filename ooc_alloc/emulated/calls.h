// The calls of the emulated driver as an enumeration, made from the list in driver.h, and the names of their results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string_view>

#include "driver.h"

namespace ooc::emulated {

enum class Call : int {
#define OOC_EMULATED_ENUMERATOR(need, member, symbol, parameters) member,
  OOC_DRIVER_CALLS(OOC_EMULATED_ENUMERATOR)
#undef OOC_EMULATED_ENUMERATOR
};

inline constexpr const char* kCallNames[] = {
#define OOC_EMULATED_NAME(need, member, symbol, parameters) #member,
    OOC_DRIVER_CALLS(OOC_EMULATED_NAME)
#undef OOC_EMULATED_NAME
};
inline constexpr size_t kCallCount = std::size(kCallNames);

struct ErrorText {
  CUresult result;
  const char* name;  // "CUDA_ERROR_OUT_OF_MEMORY"
  const char* text;  // "out of memory"
};

inline constexpr ErrorText kErrors[] = {
#define OOC_EMULATED_ERROR(name, number, text) {name, #name, text},
    OOC_CUDA_RESULTS(OOC_EMULATED_ERROR)
#undef OOC_EMULATED_ERROR
};

inline const char* name_of(Call call) { return kCallNames[static_cast<size_t>(call)]; }

// "cuMemMap"; false if there is none.
inline bool find_call(std::string_view name, Call& call) {
  const auto found = std::ranges::find(kCallNames, name);
  call = static_cast<Call>(found - std::begin(kCallNames));
  return found != std::end(kCallNames);
}

// Null if it is unknown.
inline const ErrorText* find_error(CUresult result) {
  const auto found = std::ranges::find(kErrors, result, &ErrorText::result);
  return found != std::end(kErrors) ? found : nullptr;
}
inline const ErrorText* find_error(std::string_view name) {
  const auto found = std::ranges::find(kErrors, name, &ErrorText::name);
  return found != std::end(kErrors) ? found : nullptr;
}

}  // namespace ooc::emulated
