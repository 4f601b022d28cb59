// The frequent operators: the same as the fallback for one that returns a tensor, its arguments left unboxed. Boxing costs
// 0.2 to 0.5 us.
#pragma once

#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/arange_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gt_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/lt_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/ne_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/scalar_tensor_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>
#include <ATen/ops/zeros_like_ops.h>
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
inline void add_argument(at::TensorList tensors, uint32_t access, Operands& operands) {
  for (const at::Tensor& tensor : tensors) add_tensor(tensor, access, operands);
}
inline void add_argument(const c10::List<std::optional<at::Tensor>>& tensors, uint32_t access, Operands& operands) {
  for (const std::optional<at::Tensor>& tensor : tensors) add_argument(tensor, access, operands);
}
// Everything else must be of a kind that holds no tensor.
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
    if (core == nullptr || keys.has(c10::DispatchKey::Python))
      return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    static const OperatorInfo& info = info_of(op);
    if (passes_on(op, info, keys)) return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    if (any_remembered.load(std::memory_order_relaxed) && info.split->any.load(std::memory_order_relaxed)) {
      torch::jit::Stack stack = c10::impl::boxArgs<Arguments...>(arguments...);
      const Way way = remembered_way(info, stack);
      if (way != Way::kWhole) {
        run_in_way(way, op, info, keys, &stack);
        return result_of(stack, arguments...);
      }
    }
    bool began = false;
    try {
      Operands operands;
      size_t index = 0;
      (add_argument(arguments, info.access[index++], operands), ...);
      FunctionScope scope(info.id, operands);
      began = true;
      c10::impl::ExcludeDispatchKeyGuard guard(kKey);
      Result result = Op::redispatch(below, arguments...);  // not forwarded: they may be needed again
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

  // A tensor that is new, or the argument that was written.
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
