// CPU kernel of knit::read_ranges. Its schema, reference and public function are in src/knit_data/ops/read.py.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/uio.h>
#include <unistd.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

// xxHash, unmodified. On x86-64 its own dispatcher picks AVX2 or AVX-512 at run time.
#if defined(__x86_64__)
#include "third_party/xxhash/xxh_x86dispatch.c"
#define KNIT_XXH3(data, size) XXH3_64bits_dispatch(data, size)
#define KNIT_XXH3_UPDATE(state, data, size) XXH3_64bits_update_dispatch(state, data, size)
#else
#define XXH_INLINE_ALL
#include "third_party/xxhash/xxhash.h"
#define KNIT_XXH3(data, size) XXH3_64bits(data, size)
#define KNIT_XXH3_UPDATE(state, data, size) XXH3_64bits_update(state, data, size)
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kChunk = int64_t{128} << 10;           // what a thread reads at once, and hashes while it is in its cache
constexpr int64_t kBytesPerThread = int64_t{1} << 20;    // below this a second thread costs more than it brings
constexpr int64_t kLargestStart = int64_t{1} << 62;
constexpr int kPieces = 512;                             // memory places one call may fill; IOV_MAX is 1024
static_assert(kPieces <= IOV_MAX);

struct Range {
  int64_t source, start, length, out, place;
};

// A part of a range that one call reads.
struct Piece {
  int64_t range, offset, length;
  uint8_t* to;
  bool read = false;
};

// Pieces that lie end to end in one file.
struct Task {
  int fd;
  int64_t start, length;
  size_t first, last;  // in `order`
};

struct Unit {
  size_t next = 0, last = 0;  // pieces, in the order in which they are hashed
  bool busy = false, many = false;
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state{nullptr, &XXH3_freeState};
};

void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype, const char* dtype_name) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.is_contiguous(),
      "read_ranges: ", name, " must be a contiguous ", dtype_name, " tensor on the CPU");
}

class Reader {
 public:
  Reader(int64_t* found, int64_t* sums) : found_(found), sums_(sums) {}

  void add(int64_t range, int64_t length, uint8_t* to) {
    for (int64_t offset = 0; offset < length; offset += kChunk) {
      pieces_.push_back({range, offset, std::min(kChunk, length - offset), to + offset});
    }
  }

  void unit(int64_t number) {
    Unit unit;
    unit.next = units_.empty() ? 0 : units_.back().last;
    unit.last = pieces_.size();
    unit.many = unit.last - unit.next > 1;
    unit_of_.resize(pieces_.size(), static_cast<size_t>(number));
    if (unit.next == unit.last) sums_[number] = static_cast<int64_t>(KNIT_XXH3(nullptr, 0));
    units_.push_back(std::move(unit));
  }

  // Into tasks: pieces that are neighbours in a file are one call.
  void plan(const Range* ranges, const int64_t* fds) {
    order_.resize(pieces_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = i;
    const auto at = [&](size_t i) {
      const Range& range = ranges[pieces_[i].range];
      return std::pair<int64_t, int64_t>(range.source, range.start + pieces_[i].offset);
    };
    const auto before = [&](size_t a, size_t b) { return at(a) < at(b); };
    if (!std::is_sorted(order_.begin(), order_.end(), before)) std::stable_sort(order_.begin(), order_.end(), before);
    for (size_t k = 0; k < order_.size(); ++k) {
      const auto [source, start] = at(order_[k]);
      const int64_t length = pieces_[order_[k]].length;
      const int fd = fds[source] < 0 || fds[source] > INT_MAX ? -1 : static_cast<int>(fds[source]);
      if (!tasks_.empty()) {
        Task& task = tasks_.back();
        if (task.fd == fd && task.start + task.length == start && task.length + length <= kChunk &&
            k - task.first < static_cast<size_t>(kPieces)) {
          task.length += length;
          task.last = k + 1;
          continue;
        }
      }
      tasks_.push_back({fd, start, length, k, k + 1});
    }
  }

  void run(int64_t threads) {
    std::vector<std::thread> helpers;
    for (int64_t i = 1; i < std::min(threads, static_cast<int64_t>(tasks_.size())); ++i) {
      try {
        helpers.emplace_back([this] { work(); });
      } catch (const std::exception&) {
        break;  // no more threads, or memory for one, to be had: the others do it
      }
    }
    work();
    for (std::thread& helper : helpers) helper.join();
  }

  int64_t read_ns() const { return read_ns_; }
  int64_t hash_ns() const { return hash_ns_; }

 private:
  void work() {
    using clock = std::chrono::steady_clock;
    int64_t read_ns = 0, hash_ns = 0;
    for (size_t i; (i = next_.fetch_add(1)) < tasks_.size();) {
      const auto began = clock::now();
      read(tasks_[i]);
      const auto done = clock::now();
      hash(tasks_[i]);
      const auto ended = clock::now();
      read_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(done - began).count();
      hash_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(ended - done).count();
    }
    const std::lock_guard<std::mutex> guard(lock_);
    read_ns_ += read_ns;
    hash_ns_ += hash_ns;
  }

  void read(const Task& task) {
    iovec places[kPieces + 1];
    int count = 0;
    for (size_t k = task.first; k < task.last; ++k) {
      const Piece& piece = pieces_[order_[k]];
      places[count++] = {piece.to, static_cast<size_t>(piece.length)};
    }
    int64_t done = 0;
    for (int first = 0; done < task.length;) {
      const ssize_t got = preadv(task.fd, places + first, count - first, task.start + done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        fail(task, done, got < 0 ? errno : 0);
        return;
      }
      done += got;
      for (size_t left = static_cast<size_t>(got); left > 0;) {
        iovec& place = places[first];
        const size_t part = std::min(left, place.iov_len);
        place.iov_base = static_cast<uint8_t*>(place.iov_base) + part;
        place.iov_len -= part;
        left -= part;
        if (place.iov_len == 0) ++first;
      }
    }
  }

  // Only the first `done` bytes of the task came: say of each range how much of it, from its start, is there.
  void fail(const Task& task, int64_t done, int error) {
    const std::lock_guard<std::mutex> guard(lock_);
    for (size_t k = task.first; k < task.last; ++k) {
      const Piece& piece = pieces_[order_[k]];
      const int64_t got = std::min(std::max(done, int64_t{0}), piece.length);
      done -= piece.length;
      if (got == piece.length) continue;
      int64_t& found = found_[piece.range];
      if (error) {
        if (found >= 0) found = -error;
      } else if (found >= 0) {
        found = std::min(found, piece.offset + got);
      }
    }
  }

  // Hashes what this task completed, in order; a unit in the hands of another thread is left to it.
  void hash(const Task& task) {
    std::unique_lock<std::mutex> guard(lock_);
    for (size_t k = task.first; k < task.last; ++k) pieces_[order_[k]].read = true;
    for (size_t k = task.first; k < task.last; ++k) {
      Unit& unit = units_[unit_of_[order_[k]]];
      if (unit.busy) continue;
      unit.busy = true;
      while (unit.next < unit.last && pieces_[unit.next].read) {
        const Piece& piece = pieces_[unit.next];
        guard.unlock();
        digest(unit, piece, unit_of_[order_[k]]);
        guard.lock();
        ++unit.next;
      }
      unit.busy = false;
    }
  }

  void digest(Unit& unit, const Piece& piece, size_t number) {
    const size_t size = static_cast<size_t>(piece.length);
    if (!unit.many) {
      sums_[number] = static_cast<int64_t>(KNIT_XXH3(piece.to, size));
      return;
    }
    if (!unit.state) {
      unit.state.reset(XXH3_createState());
      if (unit.state) XXH3_64bits_reset(unit.state.get());
    }
    if (!unit.state) {  // the bytes are there, but cannot be told right
      const std::lock_guard<std::mutex> guard(lock_);
      found_[piece.range] = -ENOMEM;
      return;
    }
    KNIT_XXH3_UPDATE(unit.state.get(), piece.to, size);
    if (unit.next + 1 == unit.last) sums_[number] = static_cast<int64_t>(XXH3_64bits_digest(unit.state.get()));
  }

  int64_t *found_, *sums_;
  std::vector<Piece> pieces_;
  std::vector<size_t> unit_of_;  // per piece
  std::vector<Unit> units_;
  std::vector<size_t> order_;  // pieces by file and place
  std::vector<Task> tasks_;
  std::atomic<size_t> next_{0};
  std::mutex lock_;  // guards Piece::read, Unit::next and busy, found_, and the sums of time
  int64_t read_ns_ = 0, hash_ns_ = 0;
};

void read_ranges(
    std::vector<Tensor> outs, Tensor files, Tensor ranges, Tensor units, Tensor found, Tensor sums, Tensor nanoseconds,
    int64_t threads) {
  for (const Tensor& out : outs) check_tensor("each of outs", out, ScalarType::Byte, "uint8");
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor*>{"files", &files}, {"ranges", &ranges},
                                     {"units", &units}, {"found", &found}, {"sums", &sums},
                                     {"nanoseconds", &nanoseconds}}) {
    check_tensor(name, *tensor, ScalarType::Long, "int64");
  }
  const int64_t n = found.numel(), count = sums.numel();
  STD_TORCH_CHECK(
      ranges.numel() == 5 * n && units.numel() == count + 1 && nanoseconds.numel() == 2,
      "read_ranges: ", ranges.numel(), " numbers for ", n, " ranges, ", units.numel(), " bounds for ", count,
      " units, ", nanoseconds.numel(), " sums of time: give 5 a range, one more than units, and 2");
  const int64_t* fds = files.const_data_ptr<int64_t>();
  const Range* range = reinterpret_cast<const Range*>(ranges.const_data_ptr<int64_t>());
  const int64_t* bound = units.const_data_ptr<int64_t>();
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Range& r = range[i];
    STD_TORCH_CHECK(
        0 <= r.source && r.source < files.numel() && 0 <= r.out && r.out < static_cast<int64_t>(outs.size()),
        "read_ranges: range ", i, " names file ", r.source, " of ", files.numel(), " and buffer ", r.out, " of ",
        outs.size());
    const int64_t size = outs[static_cast<size_t>(r.out)].numel();
    STD_TORCH_CHECK(
        0 <= r.start && r.start <= kLargestStart && 0 <= r.length && 0 <= r.place && r.place <= size &&
            r.length <= size - r.place,
        "read_ranges: range ", i, " reads ", r.length, " bytes at ", r.start, " to ", r.place, " of a buffer of ", size);
    total += r.length;
  }
  STD_TORCH_CHECK(bound[0] == 0 && bound[count] == n, "read_ranges: units must cover all ", n, " ranges");
  for (int64_t u = 0; u < count; ++u) {
    STD_TORCH_CHECK(
        bound[u] <= bound[u + 1] && bound[u + 1] <= n, "read_ranges: unit ", u, " ends at ", bound[u + 1], ", before ", bound[u]);
  }

  std::vector<uint8_t*> base;
  for (Tensor& out : outs) base.push_back(static_cast<uint8_t*>(out.mutable_data_ptr()));
  int64_t* have = found.mutable_data_ptr<int64_t>();
  Reader reader(have, sums.mutable_data_ptr<int64_t>());
  for (int64_t u = 0; u < count; ++u) {
    for (int64_t i = bound[u]; i < bound[u + 1]; ++i) {
      have[i] = range[i].length;
      reader.add(i, range[i].length, base[static_cast<size_t>(range[i].out)] + range[i].place);
    }
    reader.unit(u);
  }
  reader.plan(range, fds);
  reader.run(std::min(threads, 1 + total / kBytesPerThread));
  int64_t* spent = nanoseconds.mutable_data_ptr<int64_t>();
  spent[0] = reader.read_ns();
  spent[1] = reader.hash_ns();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(knit, CPU, m) {
  m.impl("read_ranges", TORCH_BOX(&read_ranges));
}
