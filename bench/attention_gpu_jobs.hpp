// SPDX-License-Identifier: Apache-2.0
// What the parts of attention_gpu_bench share: a device, jobs in its memory, and timing. All repeats are enqueued
// before anything is waited for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

inline const Deadline kMaxWait = Deadline::after(3600.0);

struct Device {
  explicit Device(const AttentionRow& kernel_row) : row(kernel_row), backend(row.make_backend({1, 0})) {}

  void wait() { backend->synchronize(stream(), kMaxWait, {}); }
  Stream stream() const { return backend->stream(); }

  const AttentionRow& row;
  std::unique_ptr<Backend> backend;
};

inline constexpr int kMinSamples = 10;
inline constexpr int kMaxSamples = 1000;
inline constexpr double kMinMilliseconds = 500.0;

// Milliseconds of each repeat, ascending: ten, or what half a second holds.
inline std::vector<double> time_repeats(Device& device, const std::function<void()>& enqueue,
                                        double min_milliseconds = kMinMilliseconds) {
  Backend& backend = *device.backend;
  const auto time = [&](int repeats) {
    const auto count = static_cast<std::size_t>(repeats);
    const auto marks = backend.make_events(count + 1, true);
    marks->record(0, device.stream());
    for (std::size_t i = 1; i <= count; ++i) {
      enqueue();
      marks->record(i, device.stream());
    }
    marks->synchronize(count, kMaxWait, {});
    std::vector<double> milliseconds;
    for (std::size_t i = 1; i <= count; ++i) milliseconds.push_back(1e3 * marks->elapsed(i - 1, i));
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds;
  };
  const double warm_up = time(2).front();
  return time(std::clamp(static_cast<int>(min_milliseconds / warm_up), kMinSamples, kMaxSamples));
}

inline double median(const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; }

struct Heads {
  int heads;
  int kv_heads;
  int head_dim;
  int head_dim_v;
};

inline AttentionSpec make_spec(Dtype dtype, const Heads& heads, const Mask& mask) {
  return make_spec(dtype, heads.heads, heads.kv_heads, heads.head_dim, mask, heads.head_dim_v);
}

struct Lengths {
  std::int64_t queries;
  std::int64_t keys;
};

// How keys lie in the memory of a job: side by side, or in pages that are dealt at random.
struct Pages {
  std::int64_t size = 0;  // tokens; 0: side by side
  bool head_major = false;
};

// Sequences in device memory, the queries at the end of the keys, and tasks over them.
class GpuJob {
 public:
  // `batch` sequences of the same lengths.
  GpuJob(Device& device, const AttentionSpec& spec, std::int64_t batch, std::int64_t queries, std::int64_t keys)
      : GpuJob(device, spec, std::vector<Lengths>(static_cast<std::size_t>(batch), {queries, keys})) {}

  GpuJob(Device& device, const AttentionSpec& spec, const std::vector<Lengths>& sequences, const Pages& pages = {})
      : device_(device), spec_(spec), kernel_(device.row.make_kernel(spec, *device.backend)) {
    std::int64_t rows = 0;
    std::int64_t key_rows = 0;
    if (pages.size > 0) {
      for (const Lengths& lengths : sequences) key_rows += (lengths.keys + pages.size - 1) / pages.size * pages.size;
      make_pages(pages, key_rows);
      key_rows = 0;
    }
    for (const Lengths& lengths : sequences) {
      const auto sequence = static_cast<std::int32_t>(lengths_.size());
      const auto table = static_cast<std::int64_t>(tiles_.size());
      queries_.push_back({sequence, lengths.keys - lengths.queries, rows, lengths.queries});
      lengths_.push_back(lengths.keys);
      const std::int64_t tiles = (lengths.keys + kernel_->key_tile() - 1) / kernel_->key_tile();
      const std::int64_t piece = kernel_->key_tile() / pieces_;
      for (std::int64_t key = 0; key < tiles * kernel_->key_tile(); key += piece) {
        tiles_.push_back({0, key < lengths.keys ? row_of(pages, key_rows + key) : 0});
      }
      runs_.push_back({sequence, 0, tiles, table / pieces_});
      rows += lengths.queries;
      key_rows += pages.size == 0 ? lengths.keys : (lengths.keys + pages.size - 1) / pages.size * pages.size;
    }
    make(q_, q_memory_, SyntheticTensor::kQ, rows, spec.heads, spec.head_dim);
    if (pages.size == 0) {
      make(k_, k_memory_, SyntheticTensor::kK, key_rows, spec.kv_heads, spec.head_dim);
      make(v_, v_memory_, SyntheticTensor::kV, key_rows, spec.kv_heads, spec.head_dim_v);
      sources_.push_back({k_, v_});
    }
    out_ =
        device.backend->allocate(static_cast<std::size_t>(rows * spec.heads * spec.head_dim_v) * size_of(spec.dtype));
    lse_ = device.backend->allocate(static_cast<std::size_t>(rows * spec.heads) * sizeof(float));
    output_ = {dense_view(static_cast<void*>(out_.data()), spec.dtype, rows, spec.heads, spec.head_dim_v),
               {reinterpret_cast<float*>(lse_.data()), spec.heads, 1},
               nullptr};
    const auto count = static_cast<std::int64_t>(sequences.size());
    kernel_->reserve({rows, count, count, static_cast<std::int64_t>(tiles_.size()), 1, count});
  }

  // Whole, from the identity to the result.
  AttentionTask task() const {
    AttentionTask task;
    task.q = q_;
    task.queries = queries_;
    task.key_lengths = lengths_;
    task.key_runs = runs_;
    task.tiles = tiles_;
    task.page_runs = pieces_;
    task.sources = sources_;
    task.save = false;
    task.finish = &output_;
    return task;
  }
  // As above with a state in and out, which is allocated on the first call.
  AttentionTask task(bool resume, bool save, bool finish) {
    if (state_.data() == nullptr) state_ = device_.backend->allocate(kernel_->state_bytes(q_.tokens));
    AttentionTask task = this->task();
    task.state = state_.data();
    task.resume = resume;
    task.save = save;
    if (!finish) task.finish = nullptr;
    return task;
  }
  void attend(const AttentionTask& task) { kernel_->attend(task, device_.stream(), {}); }

  AttentionKernel& kernel() { return *kernel_; }
  const void* state() const { return state_.data(); }
  // Overwrites one tensor with elements of the host.
  void set_q(const std::vector<std::byte>& elements) { upload(q_memory_, elements); }
  void set_v(const std::vector<std::byte>& elements) { upload(v_memory_, elements); }

 private:
  // The pool of all sequences' keys, and the order in which they have its pages.
  void make_pages(const Pages& pages, std::int64_t rows) {
    make(k_, k_memory_, SyntheticTensor::kK, rows, spec_.kv_heads, spec_.head_dim);
    make(v_, v_memory_, SyntheticTensor::kV, rows, spec_.kv_heads, spec_.head_dim_v);
    const auto pool_of = [&](const TensorView& view) {
      const std::int64_t of_page = pages.size * view.heads * view.dim;
      return CacheView{view.data,
                       view.dtype,
                       rows / pages.size,
                       pages.size,
                       view.heads,
                       view.dim,
                       of_page,
                       pages.head_major ? view.dim : view.heads * view.dim,
                       pages.head_major ? pages.size * view.dim : view.dim};
    };
    const PoolSource pool = pool_source(pool_of(k_), pool_of(v_));
    sources_.push_back(pool.source);
    page_rows_ = pool.page_rows;
    pieces_ = page_runs_per_tile(kernel_->key_tile(), pages.size);
    order_.resize(static_cast<std::size_t>(rows / pages.size));
    std::iota(order_.begin(), order_.end(), std::int64_t{0});
    std::mt19937_64 generator(1);
    std::shuffle(order_.begin(), order_.end(), generator);
  }
  // Where a key lies in its source, counted through the keys, or the pages, of all sequences.
  std::int64_t row_of(const Pages& pages, std::int64_t key) const {
    if (pages.size == 0) return key;
    return order_[static_cast<std::size_t>(key / pages.size)] * page_rows_ + key % pages.size;
  }
  void make(TensorView& view, Buffer& memory, SyntheticTensor tensor, std::int64_t tokens, std::int64_t heads,
            std::int64_t dim) {
    memory = device_.backend->allocate(static_cast<std::size_t>(tokens * heads * dim) * size_of(spec_.dtype));
    const MutableTensorView rows = dense_view(static_cast<void*>(memory.data()), spec_.dtype, tokens, heads, dim);
    const PackedRun all{0, tokens};
    device_.backend->fill_synthetic(1, tensor, {&all, 1}, rows, device_.stream());
    view = rows;
  }
  void upload(const Buffer& memory, const std::vector<std::byte>& elements) {
    const auto bytes = static_cast<std::int64_t>(elements.size());
    device_.backend->copy_rows(memory.data(), bytes, elements.data(), bytes, bytes, 1, device_.stream());
    device_.wait();
  }

  Device& device_;
  AttentionSpec spec_;
  std::unique_ptr<AttentionKernel> kernel_;
  Buffer q_memory_, k_memory_, v_memory_, out_, lse_, state_;
  TensorView q_, k_, v_;
  std::vector<QueryRun> queries_;
  std::vector<std::int64_t> lengths_;
  std::vector<KeyRun> runs_;
  std::vector<PageRun> tiles_;
  std::vector<KeySource> sources_;
  int pieces_ = 1;
  std::int64_t page_rows_ = 0;
  std::vector<std::int64_t> order_;  // of pages
  AttentionOutput output_;
};

inline bool can_run(const AttentionRow& row, const AttentionSpec& spec) { return row.missing(spec).empty(); }

// Prints JSON lines. `head_dim` and `tokens` of 0 are all.
void measure_speeds(Device& device, int head_dim, std::int64_t tokens);
// Every head_dim, mask and length that a change of the kernel may make slower; fewer repeats of long jobs.
void measure_gate(Device& device, int head_dim);
void measure_touched(Device& device);
// Keys in pages against the same keys side by side, in turn.
void measure_pages(Device& device, int head_dim);
// Measures top-k block selection (kernels/attention/top_k_selection.hpp), and computing the block means separately.
void measure_choice(Device& device, int head_dim, std::int64_t tokens);

}  // namespace ringattn
