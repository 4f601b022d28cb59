// A function of the core, from its begin to its end, whatever is thrown in between.
#pragma once

#include "cuda_route.h"
#include "recompute.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

class FunctionScope {
 public:
  // on_host: what is not on the device is used in host memory. If the driver has none to give, the function does not fit.
  FunctionScope(uint32_t id, const Operands& operands, bool on_host = false) {
    const int status = begin(id, operands, on_host);
    ended_ = nested_ = status == OOC_NESTED;
    if (status != OOC_OK && !nested_) raise(on_host && status != OOC_DRIVER_FAILURE ? OOC_OUT_OF_MEMORY : status);
  }
  ~FunctionScope() {
    if (!ended_) finish(false, [](Operands&) {});
  }
  FunctionScope(const FunctionScope&) = delete;
  FunctionScope& operator=(const FunctionScope&) = delete;

  // `add_results` adds the storages of the results to the Operands that it is given. It is called only where they matter.
  template <class AddResults>
  int end(bool keep_allocations, AddResults add_results) {
    if (nested_) return OOC_OK;  // its memory belongs to the function that it runs in
    ended_ = true;
    return finish(keep_allocations, add_results);
  }
  bool nested() const { return nested_; }

  static int begin(uint32_t id, const Operands& operands, bool on_host = false) {
    const int status = begin_on_device(id, operands, on_host);
    if (status != OOC_OK && status != OOC_NESTED && recomputing.load(std::memory_order_relaxed)) function_did_not_begin();
    return status;
  }
  template <class AddResults>
  static int finish(bool keep_allocations, [[maybe_unused]] AddResults add_results) {
    if constexpr (kWithCuda)
      if (on_cuda()) {
        Operands results;
        if (cuda_function_allocated()) add_results(results);
        return cuda_function_end(keep_allocations, results);
      }
    return ooc_core_function_end(core, keep_allocations ? 1 : 0);
  }

 private:
  static int begin_on_device(uint32_t id, const Operands& operands, bool on_host) {
    if constexpr (kWithCuda)
      if (on_cuda()) return cuda_function_begin(id, operands.begin(), operands.size(), on_host);
    return on_host ? ooc_core_function_begin_host(core, id, operands.begin(), operands.size(), nullptr)
                   : ooc_core_function_begin(core, id, operands.begin(), operands.size());
  }

  bool ended_, nested_;
};

}  // namespace ooc_torch
