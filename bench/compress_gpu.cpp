// SPDX-License-Identifier: Apache-2.0
// Measures compressing and decompressing on a GPU against copying the same elements, in a CUDA graph over more memory
// than the L2 cache holds. One JSON line a format and direction (schema "ringattn.compress/1"): bytes read and written
// by the second, and their share of what the copy reaches. Tables are there when rows are compressed; what they are
// found by has lines of its own, "find", whose bytes are those of all elements.
//   compress_gpu_bench --tokens 128k --heads 8 --head-dim 128
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "bench/arguments.hpp"
#include "bench/dense_streams.hpp"
#include "bench/graph_time.hpp"
#include "bench/quantile.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/codebook.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/low_rank_codec.hpp"
#include "kernels/quant/staged_rows.hpp"
#include "kernels/quant/tensor_compression.hpp"

namespace ringattn {
namespace {

constexpr BenchArguments kArguments{"compress_gpu_bench",
                                    "compress_gpu_bench [--tokens 128k] [--heads 8] [--head-dim 128]"};
constexpr std::int64_t kLaunches = 4;

const RowFormat kFormats[] = {{RowEncoding::kFp8, ScaleGrain::kTensor},
                              {RowEncoding::kFp8, ScaleGrain::kTokenHead},
                              {RowEncoding::kInt8},
                              {RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 32},
                              {RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 64},
                              {RowEncoding::kInt4Token, ScaleGrain::kTokenHead, 32},
                              {RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, 2},
                              {RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, 4},
                              {RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, 8},
                              {RowEncoding::kLowRank, ScaleGrain::kTokenHead, 0, 32},
                              {RowEncoding::kLowRank, ScaleGrain::kTokenHead, 0, 64},
                              {.encoding = RowEncoding::kLowRank, .rank = 64, .heads = 2},
                              {RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, 16, 0, 4}};

struct Shape {
  std::int64_t tokens = 131072;
  RowShape rows{Dtype::kBf16, 8, 128};
};

Shape parse(const std::vector<std::string_view>& words) {
  Shape shape;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (i + 1 == words.size()) kArguments.refuse(words[i], "it has no value");
    if (words[i] == "--tokens") {
      shape.tokens = kArguments.number(words[i + 1], 64, 1 << 22);
    } else if (words[i] == "--heads") {
      shape.rows.heads = kArguments.number(words[i + 1], 1, 1024);
    } else if (words[i] == "--head-dim") {
      shape.rows.dim = kArguments.number(words[i + 1], 64, 576);
    } else {
      kArguments.refuse(words[i], "it is none of the words that it knows");
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

// Rows of a format, and tables that could be: times don't depend on what they hold.
class Compressed {
 public:
  Compressed(Backend& backend, const RowFormat& format, const Shape& shape)
      : codes_(backend.allocate(dense_streams(nullptr, format, shape.rows, shape.tokens).bytes)) {
    rows.streams = dense_streams(codes_.data(), format, shape.rows, shape.tokens).streams;
    const Stream stream = backend.stream();
    std::size_t at = 0;
    for (const FormatTable& table : format_tables(format, shape.rows, 1)) {
      const auto bytes = table.bytes(shape.rows.dtype);
      tables_.push_back(backend.allocate(static_cast<std::size_t>(bytes)));
      rows.tables[at] = tables_.back().data();
      std::vector<std::byte> numbers;
      if (table.type == StoredType::kF32)
        numbers = bytes_of(std::vector<float>(static_cast<std::size_t>(bytes / 4), 0.01F));
      if (table.type == StoredType::kI32) {
        std::vector<std::int32_t> channels;
        for (std::int64_t i = 0; i < bytes / 4; ++i) channels.push_back(static_cast<std::int32_t>(i % format.outliers));
        numbers = bytes_of(channels);
      }
      if (numbers
              .empty()) {  // elements, as many as some tokens have; a tail stays empty where groups divide the tokens
        const PackedRun some{0, bytes / (2 * shape.rows.heads * shape.rows.dim)};
        backend.fill_synthetic(2, SyntheticTensor::kV, {&some, 1},
                               dense_view(static_cast<void*>(rows.tables[at]), shape.rows.dtype, some.end,
                                          shape.rows.heads, shape.rows.dim),
                               stream);
      } else {
        backend.copy_rows(rows.tables[at], bytes, numbers.data(), bytes, bytes, 1, stream);
        backend.synchronize(stream, Deadline::after(60.0), {});
      }
      ++at;
    }
  }

  CompressedRows rows;

 private:
  template <class Number>
  static std::vector<std::byte> bytes_of(const std::vector<Number>& numbers) {
    const auto bytes = std::as_bytes(std::span(numbers));
    return {bytes.begin(), bytes.end()};
  }

  Buffer codes_;
  std::vector<Buffer> tables_;
};

int run(const std::vector<std::string_view>& words) {
  const Shape shape = parse(words);
  const auto row = std::ranges::find(kernel_table<AttentionSpec>(), "cuda", &KernelRow<AttentionSpec>::backend);
  if (row == kernel_table<AttentionSpec>().end()) fail(ErrorCode::kUnsupported, "this build has no CUDA");
  const auto backend = row->make_backend({1, 0});
  const Stream stream = backend->stream();
  const std::int64_t elements = shape.tokens * shape.rows.heads * shape.rows.dim;
  const Buffer memory = backend->allocate(static_cast<std::size_t>(elements * 2));
  const Buffer other = backend->allocate(static_cast<std::size_t>(elements * 2));
  const PackedRun all{0, shape.tokens};
  const auto view = [&](const Buffer& rows) {
    return dense_view(static_cast<void*>(rows.data()), shape.rows.dtype, shape.tokens, shape.rows.heads,
                      shape.rows.dim);
  };
  const MutableTensorView plain = view(memory);
  backend->fill_synthetic(1, SyntheticTensor::kK, {&all, 1}, plain, stream);
  const auto median = [&](auto enqueue) {
    enqueue();  // what is allocated or loaded once isn't in the graph
    backend->synchronize(stream, Deadline::after(60.0), {});
    std::vector<double> times = time_graph(*backend, kLaunches, [&](std::int64_t) { enqueue(); });
    std::sort(times.begin(), times.end());
    return quantile(times, 0.5);
  };
  const double copy = median(
      [&] { backend->copy_rows(other.data(), elements * 2, plain.data, elements * 2, elements * 2, 1, stream); });
  const double copy_rate = static_cast<double>(elements) * 4.0 / copy * 1e-3;
  print_line(*backend, shape, "copy", "plain", elements * 4, copy, copy_rate);
  const CompressedRun run{0, 0, shape.tokens, 0, shape.tokens, 0};
  for (const RowFormat& format : kFormats) {
    if (!entry_of(format.encoding).missing(format, shape.rows).empty()) continue;
    const Compressed compressed(*backend, format, shape);
    const CompressedRows& rows = compressed.rows;
    const auto print = [&](std::string_view what, std::int64_t bytes, auto enqueue) {
      print_line(*backend, shape, what, describe(format), bytes, median(enqueue), copy_rate);
    };
    if (format.encoding == RowEncoding::kVector) {
      print("find", elements * 2, [&] { backend->find_codebook({plain, format.width, 0, rows.tables[0]}, stream); });
    }
    const std::int64_t bytes = elements * 2 + shape.tokens * token_bytes(format, shape.rows);
    if (format.rank == 0) {
      print("compress", bytes, [&] { backend->compress({format, shape.rows, plain, {}, {&run, 1}, rows}, stream); });
      print("decompress", bytes, [&] {
        backend->decompress({format, shape.rows, rows, {&run, 1}, view(other)}, stream);
      });
      continue;
    }
    const RowShape ranked = low_rank_shape(format, shape.rows);
    const auto sum_bytes = static_cast<std::size_t>(ranked.heads * ranked.dim * ranked.dim) * sizeof(double);
    const Buffer sums = backend->allocate(sum_bytes);
    LowRankCodec rank_coder(format, shape.rows, *backend, kStagedTokens);
    print("find", elements * 2, [&] {
      backend->fill_bytes(sums.data(), std::byte{0}, sum_bytes, stream);
      rank_coder.add_gram(plain, {&run, 1}, reinterpret_cast<double*>(sums.data()), stream);
    });
    print("compress", bytes, [&] { rank_coder.compress(plain, {&run, 1}, rows, nullptr, stream); });
    TensorCodec coder(format, shape.rows, {1, 0}, "cuda");
    print("decompress", bytes, [&] { coder.decompress(rows, {&run, 1}, view(other), stream); });
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run, count, words); }
