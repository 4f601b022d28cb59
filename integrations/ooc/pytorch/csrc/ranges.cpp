#include <algorithm>

#include "operands.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

namespace {

constexpr uint64_t kMostRanges = 256;  // of one view; geometry.py has the same number

struct Dimension {
  uint64_t size, stride_bytes;
};

}  // namespace

void add_ranges(const c10::TensorImpl& impl, uint32_t access, Operands& operands) {
  const c10::Storage& storage = impl.unsafe_storage();
  if (!storage) return;
  const auto* base = static_cast<const char*>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  if (!owned(base)) return;
  if (impl.layout() != c10::kStrided || impl.has_symbolic_sizes_strides() || is_nested(impl.key_set()))
    return operands.push_back({base, access, 0, 0});
  if (impl.numel() == 0) return;
  const uint64_t item = impl.itemsize();
  std::vector<Dimension> outer;  // the one with the largest stride first
  uint64_t whole = item;
  for (int64_t d = 0; d < impl.dim(); ++d) {
    const auto size = static_cast<uint64_t>(impl.size(d)), stride = static_cast<uint64_t>(impl.stride(d)) * item;
    if (size <= 1 || stride == 0) continue;
    whole += (size - 1) * stride;
    outer.push_back({size, stride});
  }
  const char* start = base + static_cast<uint64_t>(impl.storage_offset()) * item;
  if (whole >= storage.nbytes()) return operands.push_back({base, access, 0, 0});
  std::stable_sort(outer.begin(), outer.end(),
                   [](const Dimension& a, const Dimension& b) { return a.stride_bytes > b.stride_bytes; });
  uint64_t runs = 1, inner = whole;
  size_t cut = 0;
  for (; cut < outer.size(); ++cut) {
    const uint64_t rest = inner - (outer[cut].size - 1) * outer[cut].stride_bytes;
    if (outer[cut].stride_bytes < rest + chunk_bytes || runs * outer[cut].size > kMostRanges) break;
    runs *= outer[cut].size;
    inner = rest;
  }
  for (uint64_t run = 0; run < runs; ++run) {
    uint64_t offset = 0, rest = run;
    for (size_t d = cut; d-- > 0; rest /= outer[d].size) offset += rest % outer[d].size * outer[d].stride_bytes;
    operands.push_back({start + offset, access, 0, inner});
  }
}

}  // namespace ooc_torch
