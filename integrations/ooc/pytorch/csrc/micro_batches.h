// PyTorch's convolutions in micro-batches: the operator is called for some samples after the other, and each result is made where it
// belongs in the whole one, or added up. This is `MicroBatches` of kernels.py without Python, which takes as long for each part
// as a small convolution.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include <array>
#include <optional>
#include <tuple>

#include "placing.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// Makes each part of a result. `make` gets the first of its samples and their number; `alike` is the same for calls of equal shapes.
template <typename Make>
void make_parts(const at::Tensor& result, at::IntArrayRef parts, int64_t begin, int64_t alike, const Make& make) {
  for (const int64_t size : parts) {
    const at::Tensor target = result.narrow(0, begin, size);
    const bool placing = Placing::begin(target, alike + size);
    at::Tensor made;
    try {
      made = make(begin, size);
    } catch (...) {
      if (placing) Placing::give_up();
      throw;
    }
    if (!placing || !Placing::end(made)) {
      target.copy_(made);
    } else if (made.strides() != target.strides()) {
      target.copy_(made.clone());
    }
    begin += size;
  }
}

inline void convolution_in_parts(const at::Tensor& result, at::IntArrayRef parts, int64_t begin, int64_t alike, const at::Tensor& input,
                                 const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                                 at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                                 int64_t groups) {
  make_parts(result, parts, begin, alike, [&](int64_t first, int64_t size) {
    return at::convolution(input.narrow(0, first, size), weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  });
}

// Of `output_mask` either the first is asked for, and made in `result`, or one of the others, whose sums are returned.
inline std::tuple<at::Tensor, at::Tensor> convolution_backward_in_parts(
    const std::optional<at::Tensor>& result, at::IntArrayRef parts, int64_t begin, int64_t alike, const at::Tensor& grad_output,
    const at::Tensor& input, const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> output_mask) {
  const auto make = [&](int64_t first, int64_t size) {
    return at::convolution_backward(grad_output.narrow(0, first, size), input.narrow(0, first, size), weight, bias_sizes, stride, padding,
                                    dilation, transposed, output_padding, groups, output_mask);
  };
  if (output_mask[0]) {
    make_parts(*result, parts, begin, alike, [&](int64_t first, int64_t size) { return std::get<0>(make(first, size)); });
    return {};
  }
  at::Tensor filters, bias;
  const auto add = [](at::Tensor& sum, const at::Tensor& part) {
    if (sum.defined()) {
      sum.add_(part);
    } else {
      sum = part;
    }
  };
  for (const int64_t size : parts) {
    const auto [data, filters_part, bias_part] = make(begin, size);
    if (filters_part.defined()) add(filters, filters_part);
    if (bias_part.defined()) add(bias, bias_part);
    begin += size;
  }
  return {filters, bias};
}

}  // namespace ooc_torch
