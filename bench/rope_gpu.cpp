// SPDX-License-Identifier: Apache-2.0
// Measures RoPE on a GPU: rotations of q and k, and decode-size appends to a paged KV cache without RoPE, with RoPE on
// the way, and after a rotation of its own. Prints one JSON line per shape (schema "ringattn.rope/1"): microseconds,
// the bytes to read and write at least, and their rate next to that of a copy of 1 GiB in the same run.
//   rope_gpu_bench                              every shape
//   rope_gpu_bench half-131k append-64          some of them
//   rope_gpu_bench --git 0123abcd half-131k     names the commit, where the build doesn't
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "bench/arguments.hpp"
#include "bench/graph_time.hpp"
#include "bench/quantile.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/cache_update.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/rope/rope_frequencies.hpp"

namespace ringattn {
namespace {

constexpr BenchArguments kRopeArguments{"rope_gpu_bench", "rope_gpu_bench [--git SHA] [SHAPE …]"};
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;
constexpr std::int64_t kFarBeyondCache = std::int64_t{320} << 20;  // of copies of the rows; L2 has 50 MB
constexpr int kHeadDim = 128;
constexpr std::int64_t kPageSize = 64;
constexpr std::int64_t kSequenceKeys = 16'384;

enum class RopeWork { kRotate, kAppend };

struct RopeShape {
  std::string_view name;
  RopeWork work;
  std::int64_t tokens;  // of an append: sequences, each with one new row
  int heads, kv_heads;  // 0 KV heads: only q is rotated
  RopePairs pairs;
};

constexpr RopeShape kRopeShapes[] = {
    {"half-131k", RopeWork::kRotate, 131'072, 32, 8, RopePairs::kHalfSplit},
    {"interleaved-131k", RopeWork::kRotate, 131'072, 32, 8, RopePairs::kInterleaved},
    {"half-131k-4", RopeWork::kRotate, 131'072, 4, 1, RopePairs::kHalfSplit},
    {"interleaved-131k-4", RopeWork::kRotate, 131'072, 4, 1, RopePairs::kInterleaved},
    {"half-131k-1", RopeWork::kRotate, 131'072, 1, 0, RopePairs::kHalfSplit},
    {"interleaved-131k-1", RopeWork::kRotate, 131'072, 1, 0, RopePairs::kInterleaved},
    {"half-64", RopeWork::kRotate, 64, 32, 8, RopePairs::kHalfSplit},
    {"append-64", RopeWork::kAppend, 64, 32, 8, RopePairs::kHalfSplit},
    {"append-interleaved-64", RopeWork::kAppend, 64, 32, 8, RopePairs::kInterleaved},
};

class RopeBench {
 public:
  RopeBench(Backend& backend, std::string git) : backend_(backend), git_(std::move(git)) {
    const Buffer from = backend.allocate(static_cast<std::size_t>(kCopyBytes));
    const Buffer to = backend.allocate(static_cast<std::size_t>(kCopyBytes));
    backend.fill_bytes(from.data(), std::byte{0}, static_cast<std::size_t>(kCopyBytes), backend.stream());
    // Not by time_graph(): a copy in a CUDA graph takes 1.5 times as long.
    const std::unique_ptr<Events> marks = backend.make_events(2, true);
    std::vector<double> times;
    for (int sample = 0; sample < 14; ++sample) {
      marks->record(0, backend.stream());
      backend.copy_rows(to.data(), kCopyBytes, from.data(), kCopyBytes, kCopyBytes, 1, backend.stream());
      marks->record(1, backend.stream());
      marks->synchronize(1, Deadline::after(60.0), {});
      times.push_back(marks->elapsed(0, 1) * 1e6);
    }
    std::ranges::sort(times);
    copy_rate_ = 2.0 * static_cast<double>(kCopyBytes) / quantile(times, 0.5);
  }

  void measure(const RopeShape& shape) {
    memory_.clear();
    const RopeSpec spec = make_rope_spec({}, Dtype::kBf16, kHeadDim, shape.pairs, false);
    const auto kernel = choose_kernel(spec, {"cuda", "auto"}).row->make_kernel(spec, backend_);
    if (shape.work == RopeWork::kRotate) return rotate(shape, spec, *kernel);
    append(shape, spec, *kernel);
  }

 private:
  MutableTensorView rows(std::int64_t tokens, int heads) {
    const std::int64_t bytes = tokens * heads * kHeadDim * 2;
    memory_.push_back(backend_.allocate(static_cast<std::size_t>(bytes)));
    const MutableTensorView view =
        dense_view(static_cast<void*>(memory_.back().data()), Dtype::kBf16, tokens, heads, kHeadDim);
    const PackedRun all{0, tokens};
    backend_.fill_synthetic(memory_.size(), SyntheticTensor::kQ, {&all, 1}, view, backend_.stream());
    return view;
  }
  template <class Number>
  Number* numbers(const std::vector<Number>& values) {
    const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(Number));
    memory_.push_back(backend_.allocate(static_cast<std::size_t>(bytes)));
    backend_.copy_rows(memory_.back().data(), bytes, values.data(), bytes, bytes, 1, backend_.stream());
    backend_.synchronize(backend_.stream(), Deadline::after(600.0), {});
    return reinterpret_cast<Number*>(memory_.back().data());
  }
  static std::int64_t bytes_of(const RopeShape& shape) {
    return 2 * shape.tokens * (shape.heads + shape.kv_heads) * kHeadDim * 2;
  }

  void rotate(const RopeShape& shape, const RopeSpec& spec, RopeKernel& kernel) {
    const std::int64_t bytes = bytes_of(shape);
    const std::int64_t copies = std::clamp<std::int64_t>((kFarBeyondCache + bytes - 1) / bytes, 1, 16);
    std::vector<std::vector<RopeTensor>> tensors(static_cast<std::size_t>(copies));
    for (auto& copy : tensors) {
      copy.push_back({rows(shape.tokens, shape.heads), rows(shape.tokens, shape.heads)});
      if (shape.kv_heads > 0) copy.push_back({rows(shape.tokens, shape.kv_heads), rows(shape.tokens, shape.kv_heads)});
    }
    const std::int64_t launches = copies * ((15 + copies) / copies);
    print(shape, spec, "rope", copies, launches, bytes, time_graph(backend_, launches, [&](std::int64_t i) {
            kernel.rotate({{}, tensors[static_cast<std::size_t>(i % copies)]}, backend_.stream(), {});
          }));
  }

  // A new row of each of many sequences, in pages that are dealt in a shuffled order.
  void append(const RopeShape& shape, const RopeSpec& spec, RopeKernel& kernel) {
    constexpr std::int64_t kPagesOfSequence = kSequenceKeys / kPageSize;
    constexpr std::int64_t kLaunches = 64;
    const std::int64_t sequences = shape.tokens, pages = sequences * kPagesOfSequence;
    std::vector<std::int32_t> table(static_cast<std::size_t>(pages));
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<std::int32_t>(i * 12289 % table.size());  // 12289 is odd, and the number a power of two
    }
    const MutableTensorView q = rows(sequences, shape.heads), k = rows(sequences, shape.kv_heads),
                            v = rows(sequences, shape.kv_heads), rotated_q = rows(sequences, shape.heads),
                            rotated_k = rows(sequences, shape.kv_heads);
    const auto pool = [&] {
      return cache_view(rows(pages * kPageSize, shape.kv_heads).data, Dtype::kBf16, pages, kPageSize, shape.kv_heads,
                        kHeadDim);
    };
    const MutableCacheView k_cache = pool(), v_cache = pool();
    CacheUpdate update;
    update.sequences = sequences;
    update.lengths = numbers(std::vector<std::int32_t>(static_cast<std::size_t>(sequences), kSequenceKeys));
    update.block_table = {numbers(table), kPagesOfSequence};
    update.table_pages = kPagesOfSequence;
    update.pages = pages;
    update.page_size = kPageSize;
    update.appends[0] = append_to_cache(v_cache, v);
    update.append_count = 1;
    CacheUpdate plain = update, rotating = update;
    plain.appends[plain.append_count++] = append_to_cache(k_cache, k);
    CacheUpdate of_rotated = update;
    of_rotated.appends[of_rotated.append_count++] = append_to_cache(k_cache, rotated_k);
    rotating.rotation = row_rotation(spec, numbers(spec.frequencies));
    rotating.rotated[0] = store_rows(rotated_q, q, 1);
    rotating.rotated[1] = append_to_cache(k_cache, k);
    rotating.rotated_count = 2;
    const std::int64_t* const positions =
        numbers(std::vector<std::int64_t>(static_cast<std::size_t>(sequences), kSequenceKeys - 1));
    const RopeTensor both[] = {{q, rotated_q}, {k, rotated_k}};
    const std::int64_t bytes = bytes_of(shape) + 2 * sequences * shape.kv_heads * kHeadDim * 2;
    const auto report = [&](std::string_view form, std::int64_t moved, const auto& enqueue) {
      print(shape, spec, form, 1, kLaunches, moved, time_graph(backend_, kLaunches, [&](std::int64_t) { enqueue(); }));
    };
    report("append", bytes - 2 * sequences * shape.heads * kHeadDim * 2,
           [&] { backend_.update_cache(plain, backend_.stream()); });
    report("append with rope", bytes, [&] { backend_.update_cache(rotating, backend_.stream()); });
    report("rope, then append", bytes, [&] {
      kernel.rotate({{positions, true, 0, 0}, both}, backend_.stream(), {});
      backend_.update_cache(of_rotated, backend_.stream());
    });
  }

  void print(const RopeShape& shape, const RopeSpec& spec, std::string_view form, std::int64_t copies,
             std::int64_t launches, std::int64_t bytes, std::vector<double> times) const {
    std::ranges::sort(times);
    const double rate = static_cast<double>(bytes) / quantile(times, 0.5);  // bytes a µs
    JsonWriter line(false);
    line.begin_object().member("schema", "ringattn.rope/1");
    line.key("tool").begin_object().member("name", "ringattn").member("version", version()).end_object();
    line.member("git", git_);
    line.key("devices").begin_array().value(backend_.identity()).end_array();
    line.member("kernel", "cuda_rope").member("shape", shape.name).member("job", describe(spec)).member("form", form);
    line.member("tokens", shape.tokens).member("heads", shape.heads).member("kv_heads", shape.kv_heads);
    line.member("copies", copies).member("launches", launches).member("samples", times.size());
    line.key("us").begin_object().member("median", quantile(times, 0.5));
    line.member("p10", quantile(times, 0.1)).member("p90", quantile(times, 0.9)).end_object();
    line.member("bytes", bytes).member("gb_per_s", rate * 1e-3).member("copy_gb_per_s", copy_rate_ * 1e-3);
    line.member("share_of_copy", rate / copy_rate_);
    line.member("command", fmt::format("rope_gpu_bench {}", shape.name));
    fmt::print("{}\n", line.end_object().text());
    std::fflush(stdout);
  }

  Backend& backend_;
  std::string git_;
  double copy_rate_ = 0.0;  // bytes read and written, a µs
  std::vector<Buffer> memory_;
};

int run(std::vector<std::string_view> names) {
  std::string git = std::string(git_revision()) + (git_dirty() ? "-dirty" : "");
  if (names.size() >= 2 && names[0] == "--git") {
    git = names[1];
    names.erase(names.begin(), names.begin() + 2);
  }
  for (const std::string_view name : names) {
    if (std::ranges::any_of(kRopeShapes, [&](const RopeShape& shape) { return shape.name == name; })) continue;
    kRopeArguments.refuse(name, "there is no such shape");
  }
  const auto backend = kernel_table<RopeSpec>().front().make_backend({1, 0});
  RopeBench bench(*backend, git);
  for (const RopeShape& shape : kRopeShapes) {
    if (names.empty() || std::ranges::find(names, shape.name) != names.end()) bench.measure(shape);
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run, count, words); }
