// Python's modes and subclasses (__torch_dispatch__) with a PyTorch before 2.13, where our key is above Python's.
//
// Python's kernel there excludes every key above its own while Python runs, so the operators that Python calls would be no
// functions. Our key is let in again: the one call that leads into Python is replaced in the interpreter's table.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreterHooks.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "adapter.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

constexpr bool kAbovePython = static_cast<uint16_t>(kKey) > static_cast<uint16_t>(c10::DispatchKey::Python);

inline thread_local bool into_python = false;

// Around a redispatch that leads to Python's kernel, from where our key is not excluded.
struct IntoPython {
  IntoPython() { into_python = true; }
  ~IntoPython() { into_python = false; }
};

using Interpreter = c10::impl::PyInterpreterVTable;
inline const Interpreter* plain_interpreter = nullptr;

inline void dispatch_to_python(const Interpreter*, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct LetIn {
    const bool on = std::exchange(into_python, false);
    LetIn() { if (on) c10::impl::tls_set_dispatch_key_excluded(kKey, false); }
    ~LetIn() { if (on) c10::impl::tls_set_dispatch_key_excluded(kKey, true); }
  } let_in;
  plain_interpreter->dispatch(op, stack);
}

// Replaces one function in a copy of the interpreter's virtual table; what a pointer to a virtual function holds is where in
// the table it is (Itanium C++ ABI, 2.3). The copy is larger than any such table.
inline void let_python_call_functions() {
  if (!kAbovePython || plain_interpreter != nullptr) return;
  constexpr size_t kMostEntries = 64;
  static std::array<void*, kMostEntries> entries;
  static void** table = entries.data();
  c10::impl::PyInterpreter* interpreter = c10::impl::getGlobalPyInterpreter();
  plain_interpreter = interpreter->vtable_;
  void** plain_table = nullptr;
  std::memcpy(&plain_table, static_cast<const void*>(plain_interpreter), sizeof plain_table);
  std::copy_n(plain_table, kMostEntries, entries.begin());
  const auto member = &Interpreter::dispatch;
  uintptr_t offset = 0;
  std::memcpy(&offset, &member, sizeof offset);
#if defined(__aarch64__)
  entries[offset / sizeof(void*)] = reinterpret_cast<void*>(&dispatch_to_python);
#else
  entries[(offset - 1) / sizeof(void*)] = reinterpret_cast<void*>(&dispatch_to_python);
#endif
  interpreter->vtable_ = reinterpret_cast<const Interpreter*>(&table);
}

}  // namespace ooc_torch
