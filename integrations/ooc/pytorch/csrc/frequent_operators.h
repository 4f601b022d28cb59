// The frequent operators: each does what the fallback does, but its arguments are not boxed, which would cost 0.2 to 0.5 us.
// All of them return one tensor.
#pragma once

#include <ATen/Operators.h>
#include <torch/library.h>

#include "operators.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

template <class Op, class Signature>
struct Direct;

inline void add_argument(const at::Tensor& tensor, uint32_t access, Operands& operands) { add_tensor(tensor, access, operands); }
inline void add_argument(const std::optional<at::Tensor>& tensor, uint32_t access, Operands& operands) {
  if (tensor.has_value()) add_tensor(*tensor, access, operands);
}
inline void add_argument(const at::ITensorListRef& tensors, uint32_t access, Operands& operands) {
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, access, operands);
}
// Arguments of all other types hold no tensors; this refuses to compile for a type that is not known.
template <class... Types, class Other>
constexpr bool is_one_of(const Other*) { return (std::is_same_v<Types, Other> || ...); }
template <class Other>
void add_argument(const Other& other, uint32_t, Operands&) {
  static_assert(is_one_of<bool, double, int64_t, at::Scalar, c10::SymInt, at::IntArrayRef, c10::SymIntArrayRef,
                          at::OptionalIntArrayRef, c10::string_view, std::optional<bool>, std::optional<double>,
                          std::optional<int64_t>, std::optional<c10::SymInt>, std::optional<at::Scalar>, std::optional<at::ScalarType>,
                          std::optional<at::Layout>, std::optional<at::Device>, std::optional<at::MemoryFormat>>(
                    static_cast<const Other*>(nullptr)));
  (void)other;
}

template <class Op, class Result, class... Arguments>
struct Direct<Op, Result(Arguments...)> {
  static Result call(c10::DispatchKeySet keys, Arguments... arguments) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    const c10::DispatchKeySet below = keys & kBelow;
    if (core == nullptr) return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    if (kAbovePython && keys.has(c10::DispatchKey::Python)) {
      const IntoPython into;
      return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    }
    static const OperatorInfo& info = info_of(op);
    const auto device = [&] {
      std::optional<at::Device> found;
      const auto look = [&found](const auto& argument) {
        if constexpr (std::is_same_v<decltype(argument), const std::optional<at::Device>&>) found = argument;
      };
      (look(arguments), ...);
      return found;
    };
    if (passes_on(op, info, keys, device)) return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    if (any_remembered.load(std::memory_order_relaxed) && info.split->any.load(std::memory_order_relaxed)) {
      torch::jit::Stack stack = c10::impl::boxArgs<Arguments...>(arguments...);
      const Way way = remembered_way(info, stack);
      if (way != Way::kWhole) {
        run_in_way(way, op, info, keys, &stack);
        return result_of(stack, arguments...);
      }
    }
    if (recomputing.load(std::memory_order_relaxed)) {
      torch::jit::Stack stack = c10::impl::boxArgs<Arguments...>(arguments...);
      run(op, info, keys, &stack);
      return result_of(stack, arguments...);
    }
    bool began = false;
    try {
      Operands operands;
      size_t index = 0;
      (add_argument(arguments, info.access[index++], operands), ...);
      FunctionScope scope(info.id, operands);
      began = true;
      c10::impl::ExcludeDispatchKeyGuard guard(kKey);
      Result result = Op::redispatch(below, arguments...);  // they are not forwarded, as they may be needed again
      bool keep = info.keep_allocations;
      if (info.makes_unusual || any_unusual(keys)) keep |= pin_hidden_parts(c10::IValue(at::Tensor(result)));
      const int status = scope.end(keep, [&](Operands& results) { add_tensor(result, OOC_READ, results); });
      if (status != OOC_OK) raise(status);
      return result;
    } catch (const c10::OutOfMemoryError& error) {
      if (!splitting.load(std::memory_order_relaxed)) throw;
      torch::jit::Stack stack = c10::impl::boxArgs<Arguments...>(arguments...);
      recover(op, info, keys, &stack, began, error);
      return result_of(stack, arguments...);
    }
  }

  // Returns the tensor that was made, or the argument that was written.
  template <class First, class... Rest>
  static Result result_of(torch::jit::Stack& stack, First& first, Rest&...) {
    if constexpr (std::is_lvalue_reference_v<Result>) return first;
    else return std::move(stack.back()).toTensor();
  }
};

template <class... Ops>
void register_direct(torch::Library& library) {
  const auto add = [&library](const char* name, const std::string& overload, torch::CppFunction&& kernel) {
    library.impl((overload.empty() ? name : name + ("." + overload)).c_str(), std::move(kernel));
  };
  (add(Ops::name, Ops::overload_name, torch::CppFunction(TORCH_FN((Direct<Ops, typename Ops::schema>::call)))), ...);
}

}  // namespace ooc_torch
