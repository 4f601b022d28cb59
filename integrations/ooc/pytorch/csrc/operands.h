// The storages that an operator uses. They are found in every argument, whatever layout hides them.
#pragma once

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>

#include <vector>

#include "adapter.h"
#include "thread_modes.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// A few operands. They are not on the heap, as every operator makes them.
class Operands {
 public:
  void push_back(const ooc_operand& operand) {
    if (count_ < kInline) {
      inline_[count_++] = operand;
      return;
    }
    if (count_++ == kInline) more_.assign(inline_, inline_ + kInline);
    more_.push_back(operand);
  }
  const ooc_operand* begin() const { return count_ <= kInline ? inline_ : more_.data(); }
  const ooc_operand* end() const { return begin() + count_; }
  uint32_t size() const { return count_; }

 private:
  static constexpr uint32_t kInline = 8;
  ooc_operand inline_[kInline];
  uint32_t count_ = 0;
  std::vector<ooc_operand> more_;
};

inline void add_storage(const c10::Storage& storage, uint32_t access, Operands& operands) {
  if (!storage) return;
  const void* address = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  if (owned(address)) operands.push_back({address, access, 0, 0});
}

// In a thread that uses ranges, this adds the part of its storage that a view reaches. Where the view leaves gaps of at
// least a chunk between the elements of its outer dimensions, each element is a range.
[[gnu::cold]] void add_ranges(const c10::TensorImpl& impl, uint32_t access, Operands& operands);

inline void add_tensor(const at::Tensor& tensor, uint32_t access, Operands& operands);

inline bool is_nested(c10::DispatchKeySet keys) {
  return keys.has(c10::DispatchKey::NestedTensorCPU) || keys.has(c10::DispatchKey::NestedTensorCUDA);
}

inline void add_quantizer(const at::Quantizer& quantizer, Operands& operands) {
  const auto* per_channel = dynamic_cast<const at::PerChannelAffineQuantizer*>(&quantizer);
  if (per_channel == nullptr) return;
  add_tensor(per_channel->scales(), OOC_READ, operands);
  add_tensor(per_channel->zero_points(), OOC_READ, operands);
}

// Adds a tensor's storage. A tensor that has none of its own is opened to its parts.
inline void add_tensor(const at::Tensor& tensor, uint32_t access, Operands& operands) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto keys = impl->key_set();
  if (keys.has(c10::DispatchKey::SparseCPU) || keys.has(c10::DispatchKey::SparseCUDA)) {
    const auto* sparse = static_cast<at::SparseTensorImpl*>(impl);
    add_tensor(sparse->indices_, access, operands);
    add_tensor(sparse->values_, access, operands);
  } else if (keys.has(c10::DispatchKey::SparseCsrCPU) || keys.has(c10::DispatchKey::SparseCsrCUDA)) {
    const auto* sparse = static_cast<at::SparseCsrTensorImpl*>(impl);
    add_tensor(sparse->compressed_indices(), access, operands);
    add_tensor(sparse->plain_indices(), access, operands);
    add_tensor(sparse->values(), access, operands);
  } else {
    if (in_mode(kRanges)) add_ranges(*impl, access, operands);
    else add_storage(impl->unsafe_storage(), access, operands);
    if (keys.has(c10::DispatchKey::QuantizedCPU) || keys.has(c10::DispatchKey::QuantizedCUDA))
      add_quantizer(*static_cast<at::QTensorImpl*>(impl)->quantizer(), operands);
    if (is_nested(keys)) {
      const auto* nested = static_cast<at::native::NestedTensorImpl*>(impl);
      add_tensor(nested->get_nested_sizes(), access, operands);
      add_tensor(nested->get_nested_strides(), access, operands);
      add_tensor(nested->get_storage_offsets(), access, operands);
    }
  }
}

inline void add_value(const c10::IValue& value, uint32_t access, Operands& operands) {
  if (value.isTensor()) {
    add_tensor(value.toTensor(), access, operands);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) add_tensor(tensor, access, operands);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) add_value(element, access, operands);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) add_value(element, access, operands);
  } else if (value.isStorage()) {
    add_storage(value.toStorage(), access, operands);
  }
}

}  // namespace ooc_torch
