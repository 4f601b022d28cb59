// The calls of the emulated driver as an enumeration, made from the list in driver.h, and the names of their results.
#pragma once

#include <cstddef>
#include <string_view>

#include "driver.h"

namespace ooc::emulated {

enum class Call : int {
#define OOC_EMULATED_ENUMERATOR(need, member, symbol, parameters) member,
  OOC_DRIVER_CALLS(OOC_EMULATED_ENUMERATOR)
#undef OOC_EMULATED_ENUMERATOR
};

#define OOC_EMULATED_ONE(need, member, symbol, parameters) +1
constexpr size_t kCallCount = 0 OOC_DRIVER_CALLS(OOC_EMULATED_ONE);
#undef OOC_EMULATED_ONE

struct ErrorText {
  CUresult result;
  const char* name;  // "CUDA_ERROR_OUT_OF_MEMORY"
  const char* text;  // "out of memory"
};

const char* name_of(Call call);                         // "cuMemMap"
bool find_call(std::string_view name, Call& call);      // "cuMemMap"; false if there is none
const ErrorText* find_error(CUresult result);           // null if unknown
const ErrorText* find_error(std::string_view name);     // by name

}  // namespace ooc::emulated
