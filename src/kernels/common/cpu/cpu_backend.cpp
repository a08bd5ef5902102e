// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cpu/cpu_backend.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/rank_liveness.hpp"
#include "base/threads.hpp"
#include "kernels/common/platform.hpp"

namespace ringattn::cpu {

namespace {

int thread_count(int requested) {
#ifdef _OPENMP
  return requested > 0 ? requested : omp_get_max_threads();
#else
  static_cast<void>(requested);
  return 1;
#endif
}

using Clock = std::chrono::steady_clock;

class CpuEvents final : public Events {
 public:
  explicit CpuEvents(std::size_t count) : times_(count) {}

  void record(std::size_t mark, Stream) override { times_.at(mark) = Clock::now(); }
  void synchronize(std::size_t, const Deadline&, const Progress&) override {}
  double elapsed(std::size_t from, std::size_t to) override {
    return std::chrono::duration<double>(times_.at(to) - times_.at(from)).count();
  }

 private:
  std::vector<Clock::time_point> times_;
};

class CpuReplay final : public Replay {
 public:
  explicit CpuReplay(std::function<void()> enqueue) : enqueue_(std::move(enqueue)) {}

  void launch() override { enqueue_(); }

 private:
  std::function<void()> enqueue_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  check_threads(options.threads);
  auto backend = std::make_unique<CpuBackend>(options.threads);
  try_thread_pool(backend->threads());
  return backend;
}

CpuBackend::CpuBackend(int threads)
    : threads_(thread_count(threads)), tile_ops_(best_tile_ops()), amx_ops_(amx_tile_ops()) {}

void CpuBackend::copy_rows(void* target, std::int64_t target_stride, const void* source, std::int64_t source_stride,
                           std::int64_t row_bytes, std::int64_t rows, Stream) {
  if (rows <= 0 || row_bytes <= 0) return;
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  if (target_stride == row_bytes && source_stride == row_bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(row_bytes * rows));
    return;
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * target_stride, from + row * source_stride, static_cast<std::size_t>(row_bytes));
  }
}

void CpuBackend::gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages,
                              std::int64_t rows, Stream) {
  const std::size_t row_bytes = static_cast<std::size_t>(cache.dim) * size_of(cache.dtype);
  auto* to = static_cast<std::byte*>(target);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t page = pages[static_cast<std::size_t>(row / cache.page_size)];
    for (std::int64_t head = 0; head < cache.heads; ++head, to += row_bytes) {
      std::memcpy(to, cache.at(page, row % cache.page_size, head), row_bytes);
    }
  }
}

void CpuBackend::fill_bytes(void* target, std::byte value, std::size_t bytes, Stream) {
  // Uses all threads, so that pages are allocated on the NUMA nodes of the threads that will write them.
  constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
  constexpr std::int64_t kBlocksPerHeartbeat = 1 << 10;  // between heartbeats
  auto* const to = static_cast<std::byte*>(target);
  const auto blocks = static_cast<std::int64_t>((bytes + kBlockBytes - 1) / kBlockBytes);
  for (std::int64_t begin = 0; begin < blocks; begin += kBlocksPerHeartbeat) {
    heartbeat();
    const std::int64_t end = std::min(blocks, begin + kBlocksPerHeartbeat);
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t i = begin; i < end; ++i) {
      const std::size_t at = static_cast<std::size_t>(i) * kBlockBytes;
      std::memset(to + at, std::to_integer<int>(value), std::min(kBlockBytes, bytes - at));
    }
  }
}

std::unique_ptr<Events> CpuBackend::make_events(std::size_t count, bool) { return std::make_unique<CpuEvents>(count); }

std::unique_ptr<Replay> CpuBackend::replay(Stream, const std::function<void()>& enqueue) {
  return std::make_unique<CpuReplay>(enqueue);
}

}  // namespace ringattn::cpu
