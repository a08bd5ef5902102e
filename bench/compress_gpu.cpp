// SPDX-License-Identifier: Apache-2.0
// Measures compressing and decompressing on a GPU against copying the same elements, in a CUDA graph over more memory
// than the L2 cache holds. One JSON line a format and direction (schema "ringattn.compress/1"): bytes read and written
// by the second, and their share of what the copy reaches.
//   compress_gpu_bench --tokens 128k --heads 8 --head-dim 128
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "bench/dense_streams.hpp"
#include "bench/graph_time.hpp"
#include "bench/quantile.hpp"
#include "bench/words.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/registry.hpp"

namespace ringattn {
namespace {

constexpr BenchWords kWords{"compress_gpu_bench", "compress_gpu_bench [--tokens 128k] [--heads 8] [--head-dim 128]"};
constexpr std::int64_t kLaunches = 4;

const std::array<RowFormat, 6> kFormats{{{RowCoding::kFp8, ScaleGrain::kTensor},
                                         {RowCoding::kFp8, ScaleGrain::kTokenHead},
                                         {RowCoding::kInt8},
                                         {RowCoding::kInt4Channel, ScaleGrain::kTokenHead, 32},
                                         {RowCoding::kInt4Channel, ScaleGrain::kTokenHead, 64},
                                         {RowCoding::kInt4Token, ScaleGrain::kTokenHead, 32}}};

struct Shape {
  std::int64_t tokens = 131072;
  RowShape rows{Dtype::kBf16, 8, 128};
};

Shape parse(const std::vector<std::string_view>& words) {
  Shape shape;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (i + 1 == words.size()) kWords.refuse(words[i], "it has no value");
    if (words[i] == "--tokens") {
      shape.tokens = kWords.number(words[i + 1], 64, 1 << 22);
    } else if (words[i] == "--heads") {
      shape.rows.heads = kWords.number(words[i + 1], 1, 1024);
    } else if (words[i] == "--head-dim") {
      shape.rows.dim = kWords.number(words[i + 1], 64, 576);
    } else {
      kWords.refuse(words[i], "it is none of the words that it knows");
    }
  }
  return shape;
}

// `bytes`: read and written.
void print_line(const Backend& backend, const Shape& shape, std::string_view what, const std::string& format,
                std::int64_t bytes, double microseconds, double copy_rate) {
  JsonWriter line(false);
  line.begin_object().member("schema", "ringattn.compress/1");
  line.key("tool").begin_object().member("name", "ringattn").member("version", version()).end_object();
  line.member("git", std::string(git_revision()) + (git_dirty() ? "-dirty" : ""));
  line.key("devices").begin_array().value(backend.identity()).end_array();
  line.member("what", what).member("format", format);
  line.key("job").begin_object().member("tokens", shape.tokens).member("heads", shape.rows.heads);
  line.member("head_dim", shape.rows.dim).member("dtype", "bf16").end_object();
  const double rate = static_cast<double>(bytes) / microseconds * 1e-3;
  line.member("us", microseconds).member("gb_per_s", rate);
  line.member("of_copy", copy_rate > 0.0 ? rate / copy_rate : 1.0);
  fmt::print("{}\n", line.end_object().text());
  std::fflush(stdout);
}

int run(const std::vector<std::string_view>& words) {
  const Shape shape = parse(words);
  const auto row = std::ranges::find(kernel_table<FoldSpec>(), "cuda", &KernelRow<FoldSpec>::backend);
  if (row == kernel_table<FoldSpec>().end()) fail(ErrorCode::kUnsupported, "this build has no CUDA");
  const auto backend = row->make_backend({1, 0});
  const std::int64_t elements = shape.tokens * shape.rows.heads * shape.rows.dim;
  const Buffer plain = backend->allocate(static_cast<std::size_t>(elements * 2));
  const Buffer other = backend->allocate(static_cast<std::size_t>(elements * 2));
  const PackedRun all{0, shape.tokens};
  const auto view = [&](const Buffer& memory) {
    return dense_view(static_cast<void*>(memory.data()), shape.rows.dtype, shape.tokens, shape.rows.heads,
                      shape.rows.dim);
  };
  backend->fill_synthetic(1, SyntheticTensor::kK, {&all, 1}, view(plain), backend->stream());
  const auto median = [&](auto enqueue) {
    std::vector<double> times = time_graph(*backend, kLaunches, [&](std::int64_t) { enqueue(); });
    std::sort(times.begin(), times.end());
    return quantile(times, 0.5);
  };
  const double copy = median([&] {
    backend->copy_rows(other.data(), elements * 2, plain.data(), elements * 2, elements * 2, 1, backend->stream());
  });
  const double copy_rate = static_cast<double>(elements) * 4.0 / copy * 1e-3;
  print_line(*backend, shape, "copy", "plain", elements * 4, copy, copy_rate);
  for (const RowFormat& format : kFormats) {
    const DenseStreams layout = dense_streams(nullptr, format, shape.rows, shape.tokens);
    const Buffer codes = backend->allocate(layout.bytes);
    const Buffer table =
        backend->allocate(static_cast<std::size_t>(std::max<std::int64_t>(4, table_bytes(format, shape.rows, 1))));
    // A scale that is there already; a tail stays empty where groups divide the tokens.
    const float scale = 0.01F;
    backend->copy_rows(table.data(), 4, &scale, 4, 4, 1, backend->stream());
    backend->synchronize(backend->stream(), Deadline::after(60.0), {});
    CompressedRows rows;
    rows.streams = dense_streams(codes.data(), format, shape.rows, shape.tokens).streams;
    rows.tables[0] = table.data();
    const CompressedRun run{0, 0, shape.tokens, 0, shape.tokens, 0};
    const std::int64_t bytes = elements * 2 + shape.tokens * token_bytes(format, shape.rows);
    print_line(*backend, shape, "compress", describe(format), bytes, median([&] {
      backend->compress({format, shape.rows, view(plain), {}, {&run, 1}, rows}, backend->stream());
    }),
               copy_rate);
    print_line(*backend, shape, "decompress", describe(format), bytes, median([&] {
      backend->decompress({format, shape.rows, rows, {&run, 1}, view(other)}, backend->stream());
    }),
               copy_rate);
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::said_by(ringattn::run, count, words); }
