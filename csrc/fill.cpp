// CPU kernel of knit::fill_slots. Its schema, reference and public function are in src/knit_data/ops/fill.py.
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

constexpr int64_t kIgnore = -100;  // the label that cross entropy skips
constexpr int64_t kSpec = 11;

struct Row {
  int64_t start, tokens, mask;  // mask: 0 none stored, 1 bool, 4 float32 in place, -1 blank
};

struct Spec {
  int64_t total, ids, ids_bytes, pad, masks, loss, labels, rows, positions, attention, packed;
};

// The parts of the arena, typed; nullptr where a part is not wanted.
struct Parts {
  uint8_t* arena;
  const uint8_t* masks;
  float* loss;
  int64_t *labels, *positions, *attention;
  int32_t* rows;
};

void pad_slots(const Parts& parts, const Spec& spec, const int64_t* columns, int64_t count, int64_t from, int64_t to) {
  for (int64_t c = 0; c < count; ++c) {
    const int64_t at = columns[2 * c], size = columns[2 * c + 1];
    std::memset(parts.arena + at + from * size, 0, static_cast<size_t>((to - from) * size));
  }
  std::fill(parts.loss + from, parts.loss + to, 0.0f);
  std::fill(parts.labels + from, parts.labels + to, kIgnore);
}

template <typename Id>
void fill(const Parts& parts, const Spec& spec, const Row* rows, int64_t n, const int64_t* bounds, int64_t extents,
          const int64_t* columns, int64_t count) {
  Id* ids = reinterpret_cast<Id*>(parts.arena + spec.ids);
  const Id pad = static_cast<Id>(spec.pad);
  int64_t done = 0;
  const auto gap = [&](int64_t to) {
    if (to == done) return;
    pad_slots(parts, spec, columns, count, done, to);
    std::fill(ids + done, ids + to, pad);
    std::fill(parts.rows + done, parts.rows + to, static_cast<int32_t>(n));
    if (parts.attention) std::fill(parts.attention + done, parts.attention + to, int64_t{0});
    if (parts.positions && !spec.packed) std::fill(parts.positions + done, parts.positions + to, int64_t{0});
  };
  for (int64_t i = 0; i < n; ++i) {
    const Row& row = rows[i];
    const int64_t first = row.start, end = row.start + row.tokens;
    gap(first);
    done = end;
    std::fill(parts.rows + first, parts.rows + end, static_cast<int32_t>(i));
    if (parts.attention) std::fill(parts.attention + first, parts.attention + end, int64_t{1});
    if (parts.positions && !spec.packed) {
      for (int64_t t = 0; t < row.tokens; ++t) parts.positions[first + t] = t;
    }
    if (row.mask < 0) {
      pad_slots(parts, spec, columns, count, first, end);
      std::fill(ids + first, ids + end, pad);
      continue;
    }
    if (row.tokens == 0) continue;
    if (row.mask == 0) {
      std::fill(parts.loss + first, parts.loss + end, 1.0f);
    } else if (row.mask == 1) {
      for (int64_t t = first; t < end; ++t) parts.loss[t] = parts.masks[t] != 0 ? 1.0f : 0.0f;
    }
    parts.loss[first] = 0.0f;
    for (int64_t t = first; t + 1 < end; ++t) {
      parts.labels[t] = parts.loss[t + 1] != 0.0f ? static_cast<int64_t>(ids[t + 1]) : kIgnore;
    }
    parts.labels[end - 1] = kIgnore;
  }
  gap(spec.total);
  if (parts.positions && spec.packed) {
    for (int64_t e = 0; e + 1 < extents; ++e) {
      for (int64_t t = bounds[e]; t < bounds[e + 1]; ++t) parts.positions[t] = t - bounds[e];
    }
  }
}

void fill_slots(Tensor arena, Tensor rows, Tensor bounds, Tensor columns, Tensor spec_tensor) {
  STD_TORCH_CHECK(
      arena.is_cpu() && arena.scalar_type() == ScalarType::Byte && arena.is_contiguous(),
      "fill_slots: arena must be a contiguous uint8 tensor on the CPU");
  for (const Tensor* tensor : {&rows, &bounds, &columns, &spec_tensor}) {
    STD_TORCH_CHECK(
        tensor->is_cpu() && tensor->scalar_type() == ScalarType::Long && tensor->is_contiguous(),
        "fill_slots: rows, bounds, columns and spec must be contiguous int64 tensors on the CPU");
  }
  STD_TORCH_CHECK(
      rows.numel() % 3 == 0 && columns.numel() % 2 == 0 && bounds.numel() >= 1 && spec_tensor.numel() == kSpec,
      "fill_slots: give 3 numbers a row, 2 a column, at least one bound and ", kSpec, " of spec");
  const int64_t n = rows.numel() / 3, count = columns.numel() / 2, extents = bounds.numel(), size = arena.numel();
  const Spec& spec = *reinterpret_cast<const Spec*>(spec_tensor.const_data_ptr<int64_t>());
  const Row* row = reinterpret_cast<const Row*>(rows.const_data_ptr<int64_t>());
  const int64_t* bound = bounds.const_data_ptr<int64_t>();
  const int64_t* column = columns.const_data_ptr<int64_t>();

  const int64_t total = spec.total, width = spec.ids_bytes;
  STD_TORCH_CHECK(
      (width == 1 || width == 2 || width == 4 || width == 8) && 0 <= total && total <= size,
      "fill_slots: ", total, " slots of ids of ", width, " bytes in an arena of ", size);
  const int64_t largest = width == 8 ? INT64_MAX : width == 1 ? 255 : (int64_t{1} << (8 * width - 1)) - 1;
  const int64_t smallest = width == 1 ? 0 : -largest - 1;
  STD_TORCH_CHECK(
      smallest <= spec.pad && spec.pad <= largest, "fill_slots: pad id ", spec.pad, " does not fit ids of ", width, " bytes");
  const auto inside = [&](int64_t at, int64_t bytes, int64_t align) {
    return at >= 0 && bytes >= 0 && (bytes == 0 || total <= size / bytes) && at <= size - total * bytes && at % align == 0;
  };
  const auto part = [&](const char* name, int64_t at, int64_t bytes, bool optional) {
    STD_TORCH_CHECK(
        (optional && at == -1) || inside(at, bytes, bytes),
        "fill_slots: ", name, " at ", at, ": ", total, " times ", bytes, " bytes do not lie aligned in an arena of ", size);
  };
  part("ids", spec.ids, width, false);
  part("masks", spec.masks, 1, true);
  part("loss", spec.loss, 4, false);
  part("labels", spec.labels, 8, false);
  part("rows", spec.rows, 4, false);
  part("positions", spec.positions, 8, true);
  part("attention", spec.attention, 8, true);
  for (int64_t c = 0; c < count; ++c) {
    STD_TORCH_CHECK(
        inside(column[2 * c], column[2 * c + 1], 1), "fill_slots: column ", c, " at ", column[2 * c], ": ", total,
        " times ", column[2 * c + 1], " bytes do not lie in an arena of ", size);
  }
  int64_t done = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Row& r = row[i];
    STD_TORCH_CHECK(
        done <= r.start && r.start <= total && 0 <= r.tokens && r.tokens <= total - r.start,
        "fill_slots: row ", i, " has ", r.tokens, " tokens from slot ", r.start, " on, after ", done, " of ", total);
    STD_TORCH_CHECK(
        r.mask == 0 || (r.mask == 1 && spec.masks >= 0) || r.mask == 4 || r.mask == -1,
        "fill_slots: row ", i, " has a mask of kind ", r.mask);
    done = r.start + r.tokens;
  }
  STD_TORCH_CHECK(
      bound[0] == 0 && bound[extents - 1] == total, "fill_slots: bounds must rise from 0 to ", total, ", found ", bound[0],
      " to ", bound[extents - 1]);
  for (int64_t e = 0; e + 1 < extents; ++e) {
    STD_TORCH_CHECK(
        0 <= bound[e] && bound[e] <= bound[e + 1] && bound[e + 1] <= total,
        "fill_slots: bounds must rise from 0 to ", total, ", found ", bound[e], " before ", bound[e + 1]);
  }

  uint8_t* base = static_cast<uint8_t*>(arena.mutable_data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(base) % 8 == 0, "fill_slots: the arena must start at a multiple of 8 bytes");
  const auto place = [base](int64_t at) { return at < 0 ? nullptr : base + at; };
  const Parts parts{
      base,
      place(spec.masks),
      reinterpret_cast<float*>(place(spec.loss)),
      reinterpret_cast<int64_t*>(place(spec.labels)),
      reinterpret_cast<int64_t*>(place(spec.positions)),
      reinterpret_cast<int64_t*>(place(spec.attention)),
      reinterpret_cast<int32_t*>(place(spec.rows))};
  const auto run = [&](auto id) { fill<decltype(id)>(parts, spec, row, n, bound, extents, column, count); };
  if (width == 8) run(int64_t{});
  else if (width == 4) run(int32_t{});
  else if (width == 2) run(int16_t{});
  else run(uint8_t{});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(knit, CPU, m) {
  m.impl("fill_slots", TORCH_BOX(&fill_slots));
}
