// CPU kernels of knit::copy_segments and knit::add_segments. See src/knit_data/ops/segment.py.
#include "mover.h"
#include "segments.h"

#include <algorithm>
#include <cstring>

#include <torch/csrc/stable/library.h>

namespace knit {
namespace {

constexpr int64_t kBlock = 2048;  // elements of a sum that stay in the first cache while all are added

void check_data(const char* op, const char* name, const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(
        movable(tensor) && tensor.dim() >= 1 && tensor.scalar_type() == tensors.front().scalar_type(),
        op, ": ", name, " must be contiguous on the CPU, of one dtype, with at least one dimension");
  }
}

// What is written shares no memory with anything else that is given.
void check_apart(const char* op, const std::vector<Tensor>& written, const std::vector<Tensor>& read) {
  struct Extent { uintptr_t begin, end; bool written; };
  std::vector<Extent> extents;
  for (const std::vector<Tensor>* tensors : {&written, &read}) {
    for (const Tensor& tensor : *tensors) {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
      const uintptr_t size = static_cast<uintptr_t>(tensor.numel() * tensor.element_size());
      if (size > 0) extents.push_back({begin, begin + size, tensors == &written});
    }
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  uintptr_t any = 0, of_written = 0;  // ends so far
  for (const Extent& e : extents) {
    STD_TORCH_CHECK(e.begin >= (e.written ? any : of_written), op, ": tensors share memory with one that is written");
    any = std::max(any, e.end);
    if (e.written) of_written = std::max(of_written, e.end);
  }
}

// The segments, by their place in what is packed, if they lie inside of both ends and apart from each other.
std::vector<Segment> segments_of(
    const char* op, const Tensor& table, const std::vector<Tensor>& packed, const std::vector<Tensor>& sources) {
  const int64_t levels = static_cast<int64_t>(packed.size());
  const int64_t count = levels == 0 ? 0 : static_cast<int64_t>(sources.size()) / levels;
  STD_TORCH_CHECK(
      levels > 0 && count * levels == static_cast<int64_t>(sources.size()), op, ": ", sources.size(),
      " sources do not divide into ", levels, " levels");
  for (int64_t k = 0; k < levels; ++k) {
    STD_TORCH_CHECK(packed[k].size(0) == packed[0].size(0), op, ": level ", k, " has other rows than the first");
    for (int64_t s = 0; s < count; ++s) {
      const Tensor& source = sources[k * count + s];
      STD_TORCH_CHECK(
          source.size(0) == sources[s].size(0) && same_rows(source, 1, packed[k], 1), op, ": source ", s, " of level ",
          k, " has other rows, or another trailing shape");
    }
  }
  const std::vector<int64_t> numbers = numbers_of(op, "segments", table, 4);
  std::vector<Segment> segments(numbers.size() / 4);
  if (!segments.empty()) std::memcpy(segments.data(), numbers.data(), numbers.size() * sizeof(int64_t));
  const int64_t total = packed[0].size(0);
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    const int64_t rows = 0 <= s.source && s.source < count ? sources[s.source].size(0) : -1;
    STD_TORCH_CHECK(
        0 <= s.first && 0 <= s.length && s.length <= rows - s.first && 0 <= s.place && s.length <= total - s.place, op,
        ": segment ", i, " (", s.source, ", ", s.first, ", ", s.length, ", ", s.place, ") exceeds its source or place");
  }
  return segments;
}

// Their numbers in the order of their places, which must not overlap.
std::vector<int64_t> by_place(const char* op, const std::vector<Segment>& segments) {
  std::vector<int64_t> order;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].length > 0) order.push_back(static_cast<int64_t>(i));
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return segments[a].place < segments[b].place; });
  for (size_t i = 1; i < order.size(); ++i) {
    const Segment& before = segments[order[i - 1]];
    STD_TORCH_CHECK(
        before.place + before.length <= segments[order[i]].place, op, ": segments ", order[i - 1], " and ", order[i],
        " overlap from row ", segments[order[i]].place, " on");
  }
  return order;
}

void copy_segments(std::vector<Tensor> outs, std::vector<Tensor> sources, Tensor table, bool fill) {
  check_data("segments", "outs", outs);
  check_data("segments", "sources", sources);
  const std::vector<Segment> segments = segments_of("segments", table, outs, sources);
  STD_TORCH_CHECK(
      sources.empty() || outs[0].scalar_type() == sources[0].scalar_type(), "segments: sources must have the dtype of outs");
  const std::vector<int64_t> order = by_place("segments", segments);
  if (!fill) check_apart("segments", outs, sources);  // else they are new
  const size_t count = sources.size() / outs.size();
  Mover mover(Pad(), fill);
  for (size_t k = 0; k < outs.size(); ++k) {
    const int64_t row = row_bytes(outs[k], 1), end = outs[k].size(0) * row;
    uint8_t* to = static_cast<uint8_t*>(outs[k].mutable_data_ptr());
    int64_t done = 0;
    for (const int64_t i : order) {
      const Segment& s = segments[i];
      const uint8_t* from = static_cast<const uint8_t*>(sources[k * count + s.source].const_data_ptr());
      if (fill) mover.add(to + done, nullptr, s.place * row - done);
      mover.add(to + s.place * row, from + s.first * row, s.length * row);
      done = (s.place + s.length) * row;
    }
    if (fill) mover.add(to + done, nullptr, end - done);
  }
  mover.run();
}

// -- sums --------------------------------------------------------------------------------------------------------------

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float as_float(uint32_t bits) { float out; std::memcpy(&out, &bits, sizeof out); return out; }
inline float widen(BFloat16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Half x) {
  // the bias put right; what has no exponent as a difference of two numbers that have one, which is exact and never too
  // small for a thread that flushes such to zero; infinities and NaN set apart
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const float small = as_float(rest + 0x38800000u) - as_float(0x38800000u);  // 2^-14
  uint32_t bits;
  std::memcpy(&bits, &small, sizeof bits);
  if (rest >= 0x00800000u) bits = rest + 0x38000000u;  // 112 more in the exponent
  if (rest >= 0x0f800000u) bits = rest | 0x7f800000u;
  return as_float(bits | sign);
}

// Rows that the same segments cover: `size` elements of a buffer, and what is added to them in this order.
struct Sum {
  int64_t buffer, begin, size;        // elements
  std::vector<int64_t> occurrences;   // first rows of grad
};

// Cuts the rows of every source where a segment begins or ends. Rows, not elements.
std::vector<Sum> sums_of(const std::vector<Segment>& segments) {
  std::vector<int64_t> order;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].length > 0) order.push_back(static_cast<int64_t>(i));
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const Segment &x = segments[a], &y = segments[b];
    return x.source != y.source ? x.source < y.source : x.first < y.first;
  });
  std::vector<Sum> out;
  std::vector<int64_t> open;  // numbers of segments, ascending
  size_t next = 0;
  while (next < order.size() || !open.empty()) {
    if (open.empty()) {
      const Segment& s = segments[order[next]];
      out.push_back({s.source, s.first, 0, {}});
    }
    const int64_t source = out.back().buffer, at = out.back().begin;
    while (next < order.size() && segments[order[next]].source == source && segments[order[next]].first == at) {
      open.insert(std::lower_bound(open.begin(), open.end(), order[next]), order[next]);
      ++next;
    }
    int64_t end = INT64_MAX;
    for (const int64_t i : open) end = std::min(end, segments[i].first + segments[i].length);
    if (next < order.size() && segments[order[next]].source == source) end = std::min(end, segments[order[next]].first);
    Sum& sum = out.back();
    sum.size = end - at;
    for (const int64_t i : open) sum.occurrences.push_back(segments[i].place + at - segments[i].first);
    open.erase(
        std::remove_if(open.begin(), open.end(), [&](int64_t i) { return segments[i].first + segments[i].length == end; }),
        open.end());
    if (!open.empty()) out.push_back({source, end, 0, {}});
  }
  return out;
}

template <typename Acc, typename T>
void add(Acc* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += widen(from[i]);
}

template <typename Acc, typename T>
void add_all(std::vector<Tensor>& buffers, const std::vector<Tensor>& grads, const std::vector<Sum>& sums) {
  struct Work { Acc* to; const T* grad; const Sum* sum; int64_t width, size; };
  std::vector<Work> work;
  std::vector<int64_t> ends;
  int64_t total = 0, cost = 0;
  const size_t count = buffers.size() / grads.size();
  for (size_t k = 0; k < grads.size(); ++k) {
    const int64_t width = row_bytes(grads[k], 1) / static_cast<int64_t>(sizeof(T));
    const T* grad = static_cast<const T*>(grads[k].const_data_ptr());
    for (const Sum& sum : sums) {
      if (sum.size * width == 0) continue;
      Acc* to = static_cast<Acc*>(buffers[k * count + sum.buffer].mutable_data_ptr()) + sum.begin * width;
      work.push_back({to, grad, &sum, width, sum.size * width});
      total += sum.size * width;
      cost += sum.size * width * static_cast<int64_t>(sizeof(T) * sum.occurrences.size() + 2 * sizeof(Acc));
      ends.push_back(total);
    }
  }
  const auto range = [&](int64_t begin, int64_t end) {
    size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (int64_t at = begin; at < end;) {
      const Work& w = work[i];
      const int64_t offset = at - (ends[i] - w.size), n = std::min({kBlock, end - at, w.size - offset});
      for (const int64_t row : w.sum->occurrences) add(w.to + offset, w.grad + row * w.width + offset, n);
      at += n;
      if (at == ends[i]) ++i;
    }
  };
  if (cost <= kSerial) {
    range(0, total);
  } else {
    torch::stable::parallel_for(0, total, std::max<int64_t>(kBlock, total * kGrain / cost), range);
  }
}

void add_segments(std::vector<Tensor> buffers, std::vector<Tensor> grads, Tensor table) {
  check_data("accumulate_segments", "grads", grads);
  check_data("accumulate_segments", "buffers", buffers);
  const std::vector<Segment> segments = segments_of("accumulate_segments", table, grads, buffers);
  by_place("accumulate_segments", segments);
  const ScalarType kind = grads[0].scalar_type();
  STD_TORCH_CHECK(
      buffers.empty() || buffers[0].scalar_type() == (kind == ScalarType::Double ? ScalarType::Double : ScalarType::Float),
      "accumulate_segments: buffers must be float64 for float64 gradients, float32 for others");
  STD_TORCH_CHECK(
      kind == ScalarType::Double || kind == ScalarType::Float || kind == ScalarType::BFloat16 || kind == ScalarType::Half,
      "accumulate_segments: gradients must be float64, float32, bfloat16 or float16");
  check_apart("accumulate_segments", buffers, grads);
  if (buffers.empty()) return;
  const std::vector<Sum> sums = sums_of(segments);
  if (kind == ScalarType::Double) add_all<double, double>(buffers, grads, sums);
  else if (kind == ScalarType::Float) add_all<float, float>(buffers, grads, sums);
  else if (kind == ScalarType::BFloat16) add_all<float, BFloat16>(buffers, grads, sums);
  else add_all<float, Half>(buffers, grads, sums);
}

}  // namespace
}  // namespace knit

STABLE_TORCH_LIBRARY_IMPL(knit, CPU, m) {
  m.impl("copy_segments", TORCH_BOX(&knit::copy_segments));
  m.impl("add_segments", TORCH_BOX(&knit::add_segments));
}
