// What pack.cpp and segment.cpp ask of their tensors and tables. Each segment is contiguous at both ends.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace knit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// `length` rows from row `first` of a source on, and row `place` of what is packed on.
struct Segment {
  int64_t source, first, length, place;
};

// Numbers of an int32 or int64 tensor, [n] or for several columns [n, columns].
inline std::vector<int64_t> numbers_of(const char* op, const char* name, const Tensor& tensor, int64_t columns) {
  const bool narrow = tensor.scalar_type() == ScalarType::Int;
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.is_contiguous() && (narrow || tensor.scalar_type() == ScalarType::Long) &&
          (columns == 1 ? tensor.dim() == 1 : tensor.dim() == 2 && tensor.size(1) == columns),
      op, ": ", name, " must be a contiguous int32 or int64 tensor on the CPU, of ", columns, " columns");
  const int64_t n = tensor.numel();
  if (narrow) {
    const int32_t* data = tensor.const_data_ptr<int32_t>();
    return {data, data + n};
  }
  const int64_t* data = tensor.const_data_ptr<int64_t>();
  return {data, data + n};
}

// Whether the dimensions of one from `a` on are those of the other from `b` on.
inline bool same_rows(const Tensor& one, int64_t a, const Tensor& other, int64_t b) {
  if (one.dim() - a != other.dim() - b) return false;
  for (; a < one.dim(); ++a, ++b) {
    if (one.size(a) != other.size(b)) return false;
  }
  return true;
}

inline bool movable(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && tensor.element_size() <= 8;
}

inline int64_t row_bytes(const Tensor& tensor, int64_t leading) {
  int64_t bytes = tensor.element_size();
  for (int64_t d = leading; d < tensor.dim(); ++d) bytes *= tensor.size(d);
  return bytes;
}

}  // namespace knit
