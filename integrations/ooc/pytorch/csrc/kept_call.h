// A call of an operator that can be made again. It refers to none of the program's memory: a tensor argument is known by the
// version of the memory that it lies in, or was copied if it is small and may change unseen. With it goes what kernels look at
// beside their arguments: the state of the thread, and of PyTorch's settings.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "call_memory.h"
#include "history.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

struct OperatorInfo;

// What an operator may be among those that make bytes again (swapd/recompute/operators.py).
enum class Role : uint8_t { kNever, kMaker, kLink, kStatistics };

// What kernels look at beside their arguments.
class Surroundings {
 public:
  static Surroundings now();
  bool operator==(const Surroundings&) const = default;
  // Sets all that differs from how it is.
  void set(const Surroundings& now) const;

 private:
  uint64_t included_ = 0, excluded_ = 0;  // dispatch keys of the thread
  bool grad_ = false, inference_ = false, forward_grad_ = false;
  uint32_t rounding_ = 0;  // of the processor: denormal numbers, too
  int threads_ = 0;
  bool deterministic_ = false, warn_only_ = false, mkldnn_ = false, mkldnn_deterministic_ = false, filled_ = false;
  bool cudnn_ = false, cudnn_benchmark_ = false, cudnn_deterministic_ = false;
  std::array<at::Float32Precision, 7> precisions_{};  // of generic ones and of each library's products and convolutions
  c10::ScalarType default_type_ = c10::ScalarType::Float;
};

// A tensor argument, and how it lies in its memory.
struct KeptTensor {
  char* memory = nullptr;  // that it lies in: a variable, or a small block; null: `copy` has the bytes of its storage
  Version version;         // of that memory
  at::Tensor copy;
  uint64_t storage_bytes = 0;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta type;
  c10::DispatchKeySet keys;
  c10::Device device = c10::kCPU;
  bool wrapped_number = false;

  at::Tensor at(char* address) const;
};

class KeptCall {
 public:
  KeptCall(const c10::OperatorHandle& handle, const OperatorInfo& known, c10::DispatchKeySet keys)
      : op(handle), info(known), keys_(keys), surroundings_(Surroundings::now()) {}

  const c10::OperatorHandle op;
  const OperatorInfo& info;
  Role role = Role::kNever;  // then nothing of it is kept but what it allocated, which is to linger
  std::vector<Allocation> allocations;  // of the thread, in order
  struct Output {
    Version version;
    size_t result;      // which tensor of the results lies in it
    size_t allocation;  // and which allocation it was
  };
  std::vector<Output> outputs;  // of a maker
  Version target;               // of a link

  // What its arguments, on the stack, are before it runs; null if it could not be made again. This allocates and frees: the
  // caller holds no lock.
  static std::shared_ptr<KeptCall> of(const c10::OperatorHandle& op, const OperatorInfo& info, Role role,
                                      c10::DispatchKeySet keys, const torch::jit::Stack& stack);
  // Then, still before it runs: which versions its arguments are. What the history did not know of is added to it.
  bool find_versions(History& history);
  // Versions that it reads, beside its target.
  std::vector<Version> reads() const;
  // Its arguments on a stack; `place` gives the address of a version's bytes.
  torch::jit::Stack arguments(const std::function<char*(const Version&)>& place) const;
  // Runs it with them. Gives the tensors of its results, in order.
  std::vector<at::Tensor> run(torch::jit::Stack stack) const;
  static std::vector<at::Tensor> tensors_of(const torch::jit::Stack& stack, size_t count);

 private:
  struct Argument {
    enum Kind : uint8_t { kValue, kTensor, kTensors, kOptionalTensors } kind = kValue;
    c10::IValue value;
    std::vector<KeptTensor> tensors;
  };
  std::vector<Argument> arguments_;
  size_t written_ = 0;  // of a link: the argument that it writes
  const c10::DispatchKeySet keys_;
  const Surroundings surroundings_;
};

}  // namespace ooc_torch
