// Operators of collectives return while their library goes on in threads of its own. What it works on is pinned until the
// work has ended, and no longer.
#pragma once

#include <string_view>

#include "operands.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

enum class Collective : uint8_t {
  kNone,
  kWork,    // c10d: the result says when the work ends
  kResult,  // _c10d_functional: a call of kWait with a result says that it has ended
  kWait,
};

Collective collective_of(std::string_view space, std::string_view name);

// Within the function, before its operator: room for what the library allocates in a thread of its own, beside the operands.
// Here an error finds the program's thread, and says the whole need.
void make_room_for_scratch(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

// Within the function, after its operator: pins the operands until the work ends. After kWait: the work behind a result has
// ended. `keeps`: the function will keep what it allocated.
void hold_while_it_works(Collective kind, c10::ArrayRef<c10::IValue> results, const Operands& operands, bool keeps);

}  // namespace ooc_torch
