// CPU kernels of knit::pack_rows and knit::unpack_rows. See src/knit_data/ops/pack.py.
#include "mover.h"
#include "segments.h"

#include <torch/csrc/stable/library.h>

namespace knit {
namespace {

// Rows of `length` tokens on one side, end to end on the other.
std::vector<int64_t> bounds_of(const char* op, const Tensor& padded, const Tensor& packed, const Tensor& cu) {
  STD_TORCH_CHECK(
      movable(padded) && movable(packed) && padded.scalar_type() == packed.scalar_type() && padded.dim() >= 2 &&
          packed.dim() >= 1 && same_rows(padded, 2, packed, 1),
      op, ": both sides must be contiguous on the CPU, of one dtype and one trailing shape");
  std::vector<int64_t> bounds = numbers_of(op, "cu_seqlens", cu, 1);
  const int64_t rows = padded.size(0), length = padded.size(1), total = packed.size(0);
  STD_TORCH_CHECK(
      static_cast<int64_t>(bounds.size()) == rows + 1 && bounds.front() == 0 && bounds.back() <= total, op,
      ": cu_seqlens must have one entry more than the ", rows, " rows, and rise from 0 to at most ", total);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t n = bounds[i + 1] - bounds[i];
    STD_TORCH_CHECK(0 <= n && n <= length, op, ": row ", i, " of cu_seqlens has ", n, " tokens of at most ", length);
  }
  return bounds;
}

void pack_rows(Tensor out, Tensor rows, Tensor cu_seqlens) {
  const std::vector<int64_t> bounds = bounds_of("pack", rows, out, cu_seqlens);
  const int64_t token = row_bytes(rows, 2), stride = rows.size(1) * token, total = out.size(0);
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const uint8_t* from = static_cast<const uint8_t*>(rows.const_data_ptr());
  Mover mover(Pad(), true);
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    mover.add(to + bounds[i] * token, from + static_cast<int64_t>(i) * stride, (bounds[i + 1] - bounds[i]) * token);
  }
  mover.add(to + bounds.back() * token, nullptr, (total - bounds.back()) * token);
  mover.run();
}

void unpack_rows(Tensor out, Tensor packed, Tensor cu_seqlens, int64_t pad) {
  const std::vector<int64_t> bounds = bounds_of("unpack", out, packed, cu_seqlens);
  const int64_t token = row_bytes(out, 2), stride = out.size(1) * token;
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const uint8_t* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  Mover mover(Pad(static_cast<uint64_t>(pad), out.element_size()), true);
  for (size_t i = 0; i + 1 < bounds.size(); ++i, to += stride) {
    const int64_t size = (bounds[i + 1] - bounds[i]) * token;
    mover.add(to, from + bounds[i] * token, size);
    mover.add(to + size, nullptr, stride - size);
  }
  mover.run();
}

}  // namespace
}  // namespace knit

STABLE_TORCH_LIBRARY_IMPL(knit, CPU, m) {
  m.impl("pack_rows", TORCH_BOX(&knit::pack_rows));
  m.impl("unpack_rows", TORCH_BOX(&knit::unpack_rows));
}
