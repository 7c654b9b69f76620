// Byte ranges moved in parallel, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; before it an error
#endif
#endif

#include <torch/csrc/stable/ops.h>

namespace knit {

// `size` bytes to be written; nothing to read: they are filled.
struct Move {
  uint8_t* to;
  const uint8_t* from;
  int64_t size;
};

constexpr int64_t kSerial = int64_t{512} << 10;  // bytes below which a second thread costs more than it brings
constexpr int64_t kGrain = int64_t{64} << 10;
constexpr int64_t kTouched = int64_t{256} << 10;  // bytes of new memory to ask for at once: in the cache when written
constexpr int64_t kStreamed = 4096;  // bytes of one range below which it is not worth it
// Bytes above which what is written will hardly be in a cache when it is read: a core's share of the last cache is smaller.
// What sysconf says about that one is a socket's or a host's.
constexpr int64_t kStream = int64_t{8} << 20;

// Does not read what it overwrites into the cache: a third less traffic, as memcpy does for large blocks.
inline void stream_copy(uint8_t* to, const uint8_t* from, int64_t size) {
#if defined(__SSE2__)
  const int64_t head = std::min<int64_t>(size, (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + 64 <= size; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 512), _MM_HINT_NTA);
    const __m128i* read = reinterpret_cast<const __m128i*>(from + i);
    __m128i* write = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1);
    const __m128i c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
    _mm_stream_si128(write, a);
    _mm_stream_si128(write + 1, b);
    _mm_stream_si128(write + 2, c);
    _mm_stream_si128(write + 3, d);
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(size - i));
#else
  std::memcpy(to, from, static_cast<size_t>(size));
#endif
}

// Of memory about to be written: asks the system for its pages in one call, instead of by a fault for each, which takes a
// quarter less time. Not if its first page is there; whether the system complies makes no difference.
inline void first_touch(uint8_t* to, int64_t size) {
#if defined(__linux__)
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(to) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(to) + static_cast<uintptr_t>(size)) / page * page;
  unsigned char there = 0;
  if (begin < end && mincore(reinterpret_cast<void*>(begin), page, &there) == 0 && (there & 1) == 0) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
  }
#else
  (void)to;
  (void)size;
#endif
}

// A value of 1, 2, 4 or 8 bytes, to fill with.
class Pad {
 public:
  explicit Pad(uint64_t bits = 0, size_t width = 1) {
    for (size_t i = 0; i < sizeof block_; i += width) std::memcpy(block_ + i, &bits, width);  // little endian
    same_ = std::memcmp(block_, block_ + 1, sizeof block_ - 1) == 0;
  }

  void fill(uint8_t* to, int64_t size) const {
    if (same_) {
      std::memset(to, block_[0], static_cast<size_t>(size));
      return;
    }
    for (; size >= 64; to += 64, size -= 64) std::memcpy(to, block_, 64);
    std::memcpy(to, block_, static_cast<size_t>(size));
  }

 private:
  uint8_t block_[64];
  bool same_;  // all bytes are: zeros, booleans, bytes
};

class Mover {
 public:
  // made: what is written was made for this. Memory of some size is then new to the process, and cleared by the system
  // page by page as it is first written: it is in the cache.
  Mover(Pad pad, bool made) : pad_(pad), made_(made) {}

  void add(uint8_t* to, const uint8_t* from, int64_t size) {
    if (size == 0) return;
    moves_.push_back({to, from, size});
    total_ += size;
    ends_.push_back(total_);
  }

  void run() const {
    if (total_ <= kSerial) {
      range(0, total_, false);
      return;
    }
    const bool stream = !made_ && total_ >= kStream;
    torch::stable::parallel_for(0, total_ / 64, kGrain / 64, [&](int64_t first, int64_t last) {
      const int64_t end = last == total_ / 64 ? total_ : 64 * last;
      for (int64_t at = 64 * first; at < end; at += kTouched) {
        const int64_t stop = std::min(at + kTouched, end);
        if (made_) touch(at, stop);
        range(at, stop, stream);
      }
#if defined(__SSE2__)
      if (stream) _mm_sfence();
#endif
    });
  }

 private:
  // Bytes `at` to `end` of all that is written.
  void range(int64_t at, int64_t end, bool stream) const {
    for (size_t i = which(at); at < end; ++i) {
      const int64_t start = ends_[i] - moves_[i].size, stop = std::min(ends_[i], end);
      part(moves_[i], at - start, stop - start, stream);
      at = stop;
    }
  }

  // What of them lies end to end is new memory of one tensor.
  void touch(int64_t at, int64_t end) const {
    for (size_t i = which(at); at < end;) {
      uint8_t* const to = moves_[i].to + (at - (ends_[i] - moves_[i].size));
      const int64_t begin = at;
      at = ends_[i];
      for (++i; at < end && moves_[i].to == to + (at - begin); ++i) at = ends_[i];
      first_touch(to, std::min(at, end) - begin);
    }
  }

  // The move that byte `at` belongs to.
  size_t which(int64_t at) const {
    return static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
  }

  void part(const Move& move, int64_t begin, int64_t end, bool stream) const {
    uint8_t* to = move.to + begin;
    const int64_t size = end - begin;
    if (move.from == nullptr) {
      pad_.fill(to, size);
    } else if (stream && size >= kStreamed) {
      stream_copy(to, move.from + begin, size);
    } else {
      std::memcpy(to, move.from + begin, static_cast<size_t>(size));
    }
  }

  Pad pad_;
  bool made_;
  int64_t total_ = 0;
  std::vector<Move> moves_;
  std::vector<int64_t> ends_;
};

}  // namespace knit
