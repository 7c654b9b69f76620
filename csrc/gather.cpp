// CPU kernel of knit::gather_ranges. Its schema, fake and reference are in src/knit_data/ops/gather.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Bytes that one thread must have to itself before a second one starts; smaller calls stay on the caller's thread.
constexpr int64_t kBytesPerThread = int64_t{1} << 20;

void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype, const char* dtype_name) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.dim() == 1 && tensor.is_contiguous(),
      "gather_ranges: ", name, " must be a contiguous 1-D ", dtype_name, " tensor on the CPU");
}

bool share_memory(const Tensor& a, int64_t a_bytes, const Tensor& b, int64_t b_bytes) {
  if (a_bytes == 0 || b_bytes == 0) return false;
  const auto a_start = reinterpret_cast<uintptr_t>(a.const_data_ptr());
  const auto b_start = reinterpret_cast<uintptr_t>(b.const_data_ptr());
  return a_start < b_start + static_cast<uintptr_t>(b_bytes) && b_start < a_start + static_cast<uintptr_t>(a_bytes);
}

// `length > size - start` cannot overflow once 0 <= start <= size; `start + length > size` could.
bool outside(int64_t start, int64_t length, int64_t size) {
  return start < 0 || length < 0 || start > size || length > size - start;
}

void check_overlap(int64_t i, int64_t j, const int64_t* out_start, const int64_t* length) {
  STD_TORCH_CHECK(
      out_start[i] + length[i] <= out_start[j],
      "gather_ranges: ranges ", i, " and ", j, " overlap in out: ", length[i], " bytes at ", out_start[i], " and ",
      length[j], " bytes at ", out_start[j]);
}

void check_destinations(int64_t n, const int64_t* out_start, const int64_t* length) {
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    if (length[i] > 0) order.push_back(i);
  }
  const auto by_start = [out_start](int64_t i, int64_t j) { return out_start[i] < out_start[j]; };
  if (!std::is_sorted(order.begin(), order.end(), by_start)) {
    std::stable_sort(order.begin(), order.end(), by_start);
  }
  for (size_t k = 1; k < order.size(); ++k) check_overlap(order[k - 1], order[k], out_start, length);
}

void gather_ranges(Tensor out, Tensor src, Tensor src_start, Tensor out_start, Tensor length) {
  check_tensor("out", out, ScalarType::Byte, "uint8");
  check_tensor("src", src, ScalarType::Byte, "uint8");
  check_tensor("src_start", src_start, ScalarType::Long, "int64");
  check_tensor("out_start", out_start, ScalarType::Long, "int64");
  check_tensor("length", length, ScalarType::Long, "int64");
  const int64_t n = length.numel();
  const int64_t out_bytes = out.numel(), src_bytes = src.numel();
  STD_TORCH_CHECK(
      src_start.numel() == n && out_start.numel() == n,
      "gather_ranges: src_start, out_start and length must have one entry per range, but have ", src_start.numel(),
      ", ", out_start.numel(), " and ", n);
  STD_TORCH_CHECK(!share_memory(out, out_bytes, src, src_bytes), "gather_ranges: out and src share memory");
  for (const Tensor* index : {&src_start, &out_start, &length}) {
    STD_TORCH_CHECK(!share_memory(out, out_bytes, *index, 8 * n), "gather_ranges: out shares memory with the ranges");
  }

  const int64_t* from = src_start.const_data_ptr<int64_t>();
  const int64_t* to = out_start.const_data_ptr<int64_t>();
  const int64_t* bytes = length.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(
        !outside(from[i], bytes[i], src_bytes),
        "gather_ranges: range ", i, " reads ", bytes[i], " bytes at ", from[i], " of src, which has ", src_bytes);
    STD_TORCH_CHECK(
        !outside(to[i], bytes[i], out_bytes),
        "gather_ranges: range ", i, " writes ", bytes[i], " bytes at ", to[i], " of out, which has ", out_bytes);
  }
  check_destinations(n, to, bytes);

  // Nothing was written up to here, and nothing can fail from here on. Destinations do not overlap, so the total
  // is at most out_bytes. Threads share the bytes, not the ranges: one long range is cut where it must be.
  std::vector<int64_t> before(static_cast<size_t>(n) + 1, 0);  // bytes of all ranges before range i
  for (int64_t i = 0; i < n; ++i) before[i + 1] = before[i] + bytes[i];
  uint8_t* target = static_cast<uint8_t*>(out.mutable_data_ptr());
  const uint8_t* source = static_cast<const uint8_t*>(src.const_data_ptr());
  const auto copy = [&](int64_t begin, int64_t end) {
    int64_t i = std::upper_bound(before.begin(), before.end(), begin) - before.begin() - 1;
    while (begin < end) {
      const int64_t skip = begin - before[i];
      const int64_t count = std::min(end, before[i + 1]) - begin;
      if (count > 0) std::memcpy(target + to[i] + skip, source + from[i] + skip, static_cast<size_t>(count));
      begin += count;
      ++i;
    }
  };
  if (before[n] <= kBytesPerThread) {
    copy(0, before[n]);
  } else {
    torch::stable::parallel_for(0, before[n], kBytesPerThread, copy);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(knit, CPU, m) {
  m.impl("gather_ranges", TORCH_BOX(&gather_ranges));
}
