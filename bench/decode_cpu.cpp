// SPDX-License-Identifier: Apache-2.0
// Measures decode steps on a CPU, 32/8 heads of 128, over dense caches of bf16, fp8, int8 and int4 that hold random
// values, and the rate at which the threads copy memory (read and written). Prints a JSON line for each.
//   decode_cpu_bench THREADS KEYS[,KEYS ...] [SAMPLES]
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/philox.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "kernels/decode/decode.hpp"

namespace ringattn {
namespace {

constexpr int kHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kDim = 128;

double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Calls work(thread) on so many threads.
void on_threads(int threads, const auto& work) {
  std::vector<std::jthread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back([&work, thread] { work(thread); });
  work(0);
}

// Bytes per second, read and written, of the best of a few copies of 256 MiB.
double copy_rate(int threads) {
  const std::size_t share = (std::size_t{256} << 20) / static_cast<std::size_t>(threads) / 4096 * 4096;
  const Buffer from = allocate_host(share * static_cast<std::size_t>(threads));
  const Buffer to = allocate_host(share * static_cast<std::size_t>(threads));
  const auto copy = [&](int thread) {
    const std::size_t first = share * static_cast<std::size_t>(thread);
    std::memcpy(to.data() + first, from.data() + first, share);
  };
  on_threads(threads,
             [&](int thread) { std::memset(from.data() + share * static_cast<std::size_t>(thread), 1, share); });
  double best = 0.0;
  for (int i = 0; i < 8; ++i) {
    const double seconds = seconds_of([&] { on_threads(threads, copy); });
    if (i > 0) best = std::max(best, 2.0 * static_cast<double>(share) * threads / seconds);
  }
  return best;
}

std::uint32_t random_word(std::size_t i) {
  return philox4x32_10({{static_cast<std::uint32_t>(i / 4), 0, 0, 0}}, 1).word[i % 4];
}

// Elements of a stream: random bytes, or scales from 1/64 to 1/32, or pairs of a scale and a zero point, or bf16 in
// [−2, −1) and [1, 2).
std::uint32_t stream_word(StoredType type, const RowFormat& format, std::uint32_t random) {
  if (type == StoredType::kF32) return std::bit_cast<std::uint32_t>(0x1p-6F) | (random >> 9);
  if (type == StoredType::kDtype && format.is_plain()) return (random & 0x807f807fU) | 0x3f803f80U;
  if (type == StoredType::kDtype) return (random & 0x007f007fU) | 0xbf803e00U;  // zero point, scale
  return random;
}

// A tensor of the cache, as dense rows of each stream.
struct Cache {
  RowFormat format;
  std::vector<Buffer> streams;
  Buffer tables;
  std::size_t bytes = 0;  // of a step

  Cache(const RowFormat& row_format, std::int64_t keys, int threads) : format(row_format) {
    const RowShape shape{Dtype::kBf16, kKvHeads, kDim};
    for (const FormatStream& stream : format_streams(format, shape)) {
      const auto size = static_cast<std::size_t>(stream.token_bytes(shape.dtype) * keys);
      const Buffer& buffer = streams.emplace_back(allocate_host(size));
      constexpr std::size_t kPeriod = 65521;  // words, a prime
      std::vector<std::uint32_t> words(kPeriod);
      for (std::size_t i = 0; i < kPeriod; ++i) words[i] = stream_word(stream.type, format, random_word(i));
      on_threads(threads, [&](int thread) {
        const std::size_t count = size / 4;
        const auto of = static_cast<std::size_t>(threads);
        const std::size_t end = count * (static_cast<std::size_t>(thread) + 1) / of;
        for (std::size_t i = count * static_cast<std::size_t>(thread) / of; i < end;) {
          const std::size_t run = std::min(end - i, kPeriod - i % kPeriod);
          std::memcpy(buffer.data() + 4 * i, words.data() + i % kPeriod, 4 * run);
          i += run;
        }
      });
      bytes += size;
    }
    tables = allocate_host(std::max<std::size_t>(64, static_cast<std::size_t>(table_bytes(format, shape, 1))));
    std::memset(tables.data(), 0, tables.bytes());
  }

  CacheView plain(std::int64_t keys) const {
    return cache_view(streams[0].data(), Dtype::kBf16, 1, keys, kKvHeads, kDim);
  }
  CompressedCache quantized(std::int64_t keys) const {
    CompressedCache cache;
    cache.format = format;
    cache.shape = {Dtype::kBf16, kKvHeads, kDim};
    cache.pages = 1;
    cache.page_size = keys;
    const std::vector<FormatStream> all = format_streams(format, cache.shape);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::int64_t token = all[i].token_bytes(Dtype::kBf16);
      cache.streams[i] = {streams[i].data(), token * keys, token, token / all[i].heads};
    }
    cache.tables[0] = tables.data();
    return cache;
  }
};

void measure_format(std::string_view name, const CacheFormat& format, std::int64_t keys, int threads, int samples) {
  DecodeSpec spec;
  spec.attention.heads = kHeads;
  spec.attention.kv_heads = kKvHeads;
  spec.attention.head_dim = kDim;
  spec.attention.head_dim_v = kDim;
  spec.attention.dtype = Dtype::kBf16;
  spec.attention.softmax_scale = 0.0883883F;
  spec.format = format;
  const auto choice = choose_kernel(spec, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({threads, kNoDevice});
  const auto kernel = choice.row->make_kernel(spec, *backend);
  kernel->reserve({1, 1, keys});
  const Cache k(format.k, keys, threads);
  const Cache v(format.v, keys, threads);
  std::vector<std::uint32_t> q(std::size_t{kHeads} * kDim / 2);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = stream_word(StoredType::kDtype, {}, random_word(i));
  std::vector<std::uint32_t> out(q.size());
  const auto length = static_cast<std::int32_t>(keys);
  DecodeStep step;
  step.q = dense_view(static_cast<const void*>(q.data()), Dtype::kBf16, 1, kHeads, kDim);
  if (format.is_plain()) {
    step.k = k.plain(keys);
    step.v = v.plain(keys);
  } else {
    step.quantized_k = k.quantized(keys);
    step.quantized_v = v.quantized(keys);
  }
  step.lengths = &length;
  step.output.out = dense_view(static_cast<void*>(out.data()), Dtype::kBf16, 1, kHeads, kDim);
  std::vector<double> ms;
  for (int i = -2; i < samples; ++i) {
    const double seconds = seconds_of([&] { kernel->enqueue(step, {}); });
    if (i >= 0) ms.push_back(seconds * 1e3);
  }
  std::ranges::sort(ms);
  std::uint64_t sum = 0;  // tells builds with other bits from each other
  for (const std::uint32_t word : out) sum = (sum ^ word) * 0x100000001b3ULL;
  const double median = ms[ms.size() / 2];
  fmt::print(
      "{{\"format\":\"{}\",\"keys\":{},\"threads\":{},\"samples\":{},\"ms\":{{\"best\":{:.4f},\"median\":{:.4f}}},"
      "\"bytes\":{},\"gb_per_s\":{:.2f},\"out\":\"{:016x}\"}}\n",
      name, keys, threads, samples, ms[0], median, k.bytes + v.bytes,
      static_cast<double>(k.bytes + v.bytes) / median * 1e-6, sum);
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "usage: decode_cpu_bench THREADS KEYS[,KEYS ...] [SAMPLES]\n");
    return 2;
  }
  const int threads = std::max(1, std::atoi(argv[1]));
  const int samples = std::max(1, argc > 3 ? std::atoi(argv[3]) : 9);
  fmt::print("{{\"threads\":{},\"copy_gb_per_s\":{:.1f}}}\n", threads, copy_rate(threads) * 1e-9);
  const RowFormat plain;
  const RowFormat fp8{.encoding = RowEncoding::kFp8};
  const RowFormat int8{.encoding = RowEncoding::kInt8};
  const RowFormat int4_k{.encoding = RowEncoding::kInt4Channel, .group = 32};
  const RowFormat int4_v{.encoding = RowEncoding::kInt4Token, .group = 32};
  std::istringstream list(argv[2]);
  for (std::string keys; std::getline(list, keys, ',');) {
    const std::int64_t count = std::atoll(keys.c_str());
    measure_format("bf16", {plain, plain}, count, threads, samples);
    measure_format("fp8", {fp8, fp8}, count, threads, samples);
    measure_format("int8", {int8, int8}, count, threads, samples);
    measure_format("int4", {int4_k, int4_v}, count, threads, samples);
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) { return ringattn::run(argc, argv); }
