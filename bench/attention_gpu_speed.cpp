// SPDX-License-Identifier: Apache-2.0
// attention_gpu_bench: speed over shapes, by the operations of attention/tokens/cost.hpp.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "bench/attention_flops.hpp"
#include "bench/attention_gpu_jobs.hpp"
#include "kernels/attention/sm80/config.hpp"

namespace ringattn {

namespace {

void measure_speed(Device& device, const AttentionSpec& spec, std::int64_t batch, std::int64_t tokens,
                   double min_milliseconds = kMinMilliseconds) {
  if (!can_run(device.row, spec)) return;
  GpuJob jobs(device, spec, batch, tokens, tokens);
  const AttentionTask task = jobs.task();
  const double flops = static_cast<double>(batch) * attention_flops(spec, tokens);
  const auto ms = time_repeats(
      device, [&] { jobs.attend(task); }, min_milliseconds);
  fmt::print(
      "{{\"what\":\"speed\",\"kernel\":\"{}\",\"dtype\":\"{}\",\"mask\":\"{}\",\"batch\":{},\"seq\":{},\"heads\":{},"
      "\"kv_heads\":{},\"head_dim\":{},\"head_dim_v\":{},\"softcap\":{},\"samples\":{},\"ms\":{:.4f},\"ms_min\":{:.4f},"
      "\"tflops\":{:."
      "1f}}}\n",
      device.row.name, dtype_name(spec.dtype), describe(spec.mask), batch, tokens, spec.heads, spec.kv_heads,
      spec.head_dim, spec.head_dim_v, spec.softcap, ms.size(), median(ms), ms.front(), flops / median(ms) * 1e-9);
  std::fflush(stdout);
}

// Pairs of query and key in the tiles that a kernel touches: each query tile with every key tile of which a row sees
// something.
std::int64_t touched_pairs(const AttentionKernel& kernel, const Mask& mask, const std::vector<Lengths>& sequences) {
  const TileSizes sizes{kernel.query_tile(), kernel.key_tile()};
  std::int64_t tiles = 0;
  for (const Lengths& lengths : sequences) {
    for (std::int64_t row = 0; row < lengths.queries; row += sizes.query) {
      const TileRange seen = Visibility(mask, lengths.keys).tiles(lengths.keys - lengths.queries + row, sizes);
      tiles += seen.end - seen.begin;
    }
  }
  return tiles * sizes.query * sizes.key;
}

}  // namespace

// The project's standard shapes: 16k tokens in all for lengths up to 16k, one sequence above that.
void measure_speeds(Device& device, int only_head_dim, std::int64_t only_tokens) {
  constexpr Heads kHeads[] = {
      {32, 8, 128, 128}, {32, 32, 64, 64}, {8, 8, 256, 256}, {32, 8, 96, 96}, {16, 16, 192, 128}};
  for (const Heads& heads : kHeads) {
    if (only_head_dim != 0 && heads.head_dim != only_head_dim) continue;
    const auto config = sm80::choose_config(make_spec(Dtype::kBf16, heads, {-1, 0}));
    if (device.row.name == "sm80_attention" && config) {
      fmt::print("{{\"what\":\"config\",\"kernel\":\"{}\",\"head_dim\":{},\"head_dim_v\":{},\"config\":\"{}\"}}\n",
                 device.row.name, heads.head_dim, heads.head_dim_v, describe(*config));
    }
    for (int log = 10; log <= 17; ++log) {
      const std::int64_t tokens = std::int64_t{1} << log;
      if (only_tokens != 0 && tokens != only_tokens) continue;
      if ((heads.head_dim != 128 && log > 15) || (device.row.name == "sm80_simt" && log > 13)) continue;
      const std::int64_t batch = std::max<std::int64_t>(1, 16384 / tokens);
      measure_speed(device, make_spec(Dtype::kBf16, heads, {-1, 0}), batch, tokens);
      if (log == 13) measure_speed(device, make_spec(Dtype::kBf16, heads, {-1, -1}), batch, tokens);
      if (log == 13) measure_speed(device, make_spec(Dtype::kF16, heads, {-1, 0}), batch, tokens);
    }
  }
  if (only_head_dim != 0) return;
  const Heads usual{32, 8, 128, 128};
  AttentionSpec capped = make_spec(Dtype::kBf16, usual, {-1, 0});
  capped.softcap = 50.0F;
  measure_speed(device, capped, 2, 8192);
  measure_speed(device, make_spec(Dtype::kBf16, usual, {1023, 0}), 1, 32768);
  if (device.row.name == "sm80_simt") measure_speed(device, make_spec(Dtype::kF32, usual, {-1, 0}), 4, 4096);
}

void measure_gate(Device& device, int head_dim) {
  constexpr double kMinGateMilliseconds =
      250.0;  // milliseconds of a point: both builds see the card warm, as points follow each other
  constexpr Mask kCausal{-1, 0};
  constexpr Mask kFull{-1, -1};
  struct Shape {
    Heads heads;
    Mask mask;
    int longest;  // power of two of tokens
  };
  constexpr Shape kShapes[] = {{{32, 8, 128, 128}, kCausal, 17},  {{32, 8, 128, 128}, kFull, 17},
                               {{16, 16, 128, 128}, kCausal, 17}, {{16, 16, 128, 128}, kFull, 17},
                               {{32, 32, 64, 64}, kCausal, 17},   {{32, 32, 64, 64}, kFull, 15},
                               {{8, 8, 256, 256}, kCausal, 17},   {{8, 8, 256, 256}, kFull, 15},
                               {{16, 16, 192, 128}, kCausal, 17}, {{32, 8, 96, 96}, kCausal, 15}};
  for (const Shape& shape : kShapes) {
    if (head_dim != 0 && shape.heads.head_dim != head_dim) continue;
    for (int log = 10; log <= shape.longest; ++log) {
      const std::int64_t tokens = std::int64_t{1} << log;
      measure_speed(device, make_spec(Dtype::kBf16, shape.heads, shape.mask), std::max<std::int64_t>(1, 16384 / tokens),
                    tokens, kMinGateMilliseconds);
    }
  }
}

// A sliding window and a ragged batch beside dense ones, by the tiles that are touched.
void measure_touched(Device& device) {
  const Heads heads{32, 8, 128, 128};
  const std::vector<Lengths> one{{131072, 131072}};
  const std::vector<Lengths> dense(4, {4096, 4096});
  std::vector<Lengths> ragged;  // as many tokens
  for (const std::int64_t n : {7019, 1, 3000, 17, 2049, 64, 1500, 100, 1024, 333, 777, 500}) ragged.push_back({n, n});
  struct Case {
    const char* name;
    const std::vector<Lengths>& sequences;
    Mask mask;
  };
  for (const Case& c :
       {Case{"128k, causal", one, {-1, 0}}, Case{"128k, window 4096", one, {4095, 0}},
        Case{"4 of 4k, causal", dense, {-1, 0}}, Case{"1 to 7k, 16k in all, causal", ragged, {-1, 0}}}) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, heads, c.mask);
    if (!can_run(device.row, spec)) continue;
    GpuJob jobs(device, spec, c.sequences);
    const AttentionTask task = jobs.task();
    const auto ms = time_repeats(device, [&] { jobs.attend(task); });
    const double flops = static_cast<double>(touched_pairs(jobs.kernel(), c.mask, c.sequences)) * pair_flops(spec);
    fmt::print(
        "{{\"what\":\"touched\",\"kernel\":\"{}\",\"case\":\"{}\",\"samples\":{},\"ms\":{:.4f},\"tflops_touched\":{:."
        "1f}}}\n",
        device.row.name, c.name, ms.size(), median(ms), flops / median(ms) * 1e-9);
    std::fflush(stdout);
  }
}

void measure_pages(Device& device, int only_head_dim) {
  constexpr Heads kHeads[] = {
      {32, 8, 128, 128}, {32, 32, 64, 64}, {8, 8, 256, 256}, {32, 8, 96, 96}, {16, 16, 192, 128}};
  constexpr Pages kPages[] = {{16}, {32}, {64}, {128}, {256}, {16, true}, {64, true}, {128, true}};
  for (const Heads& heads : kHeads) {
    if (only_head_dim != 0 && heads.head_dim != only_head_dim) continue;
    const AttentionSpec spec = make_spec(Dtype::kBf16, heads, {-1, 0});
    if (!can_run(device.row, spec)) continue;
    for (const std::int64_t tokens : {1024, 8192, 32768}) {
      const std::vector<Lengths> sequences(static_cast<std::size_t>(std::max<std::int64_t>(1, 16384 / tokens)),
                                           {tokens, tokens});
      const auto time = [&](const Pages& pages) {
        GpuJob job(device, spec, sequences, pages);
        const AttentionTask task = job.task();
        return median(time_repeats(device, [&] { job.attend(task); }));
      };
      for (const Pages& pages : kPages) {
        const double before = time({});
        const double paged = time(pages);
        const double dense = (before + time({})) / 2.0;  // the card warms up meanwhile
        fmt::print(
            "{{\"what\":\"pages\",\"kernel\":\"{}\",\"batch\":{},\"seq\":{},\"heads\":{},\"kv_heads\":{},\"head_dim\":{"
            "},"
            "\"head_dim_v\":{},\"page_size\":{},\"head_major\":{},\"ms_dense\":{:.4f},\"ms_paged\":{:.4f},"
            "\"of_dense\":{:.4f}}}\n",
            device.row.name, sequences.size(), tokens, spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim_v,
            pages.size, pages.head_major, dense, paged, dense / paged);
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace ringattn
