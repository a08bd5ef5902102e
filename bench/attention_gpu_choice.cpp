// SPDX-License-Identifier: Apache-2.0
// attention_gpu_bench choice: what it takes to choose the best blocks of keys for a prefill, of q and k in device
// memory.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "bench/attention_gpu_jobs.hpp"
#include "kernels/attention/block_mask_choice.hpp"
#include "kernels/attention/top_k_selection.hpp"

namespace ringattn {

namespace {

constexpr int kBlock = 128;  // tokens
constexpr int kCount = 16;   // blocks of a mask row
constexpr int kChoices = 5;

// Dense rows that a seed makes.
struct Rows {
  Rows(Device& device, SyntheticTensor tensor, const AttentionSpec& spec, std::int64_t tokens, int heads)
      : memory(
            device.backend->allocate(static_cast<std::size_t>(tokens * heads * spec.head_dim) * size_of(spec.dtype))) {
    const MutableTensorView rows =
        dense_view(static_cast<void*>(memory.data()), spec.dtype, tokens, heads, spec.head_dim);
    const PackedRun all{0, tokens};
    device.backend->fill_synthetic(1, tensor, {&all, 1}, rows, device.stream());
    view = rows;
  }

  Buffer memory;
  TensorView view;
};

double gigabytes(const TensorView& rows) {
  return 1e-9 * static_cast<double>(rows.tokens * rows.heads * rows.dim) * static_cast<double>(size_of(rows.dtype));
}

// Milliseconds of the means of all of a tensor's blocks.
double time_means(Device& device, const TensorView& rows) {
  const std::int64_t blocks = (rows.tokens + kBlock - 1) / kBlock;
  const Buffer means = device.backend->allocate(static_cast<std::size_t>(blocks * rows.heads * rows.dim) * 4);
  const RowPooling pooling{rows, 0, {0, rows.tokens}, kBlock, 0, reinterpret_cast<float*>(means.data())};
  return median(time_repeats(device, [&] { device.backend->pool_rows(pooling, device.stream()); }));
}

void measure(Device& device, const Heads& heads, std::int64_t tokens) {
  AttentionSpec spec = make_spec(Dtype::kBf16, heads, {-1, 0});
  spec.block_mask = {kBlock, kBlock, spec.kv_heads};
  const Rows q(device, SyntheticTensor::kQ, spec, tokens, spec.heads);
  const Rows k(device, SyntheticTensor::kK, spec, tokens, spec.kv_heads);
  device.wait();
  const double of_q = time_means(device, q.view);
  const double of_k = time_means(device, k.view);
  const std::vector<MaskedSequence> sequences{{0, tokens, tokens}};
  const RowSource rows = packed_rows(sequences, q.view, k.view);
  std::vector<double> all;  // with the copy to the host, and what the host does
  std::size_t listed = 0;
  for (int i = 0; i <= kChoices; ++i) {
    const auto start = std::chrono::steady_clock::now();
    listed = top_k_selection(spec, sequences, kCount, rows, *device.backend, device.stream()).indices().size();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (i > 0) all.push_back(took.count());
  }
  std::sort(all.begin(), all.end());
  fmt::print(
      "{{\"what\":\"choice\",\"kernel\":\"{}\",\"tokens\":{},\"heads\":{},\"kv_heads\":{},\"head_dim\":{},\"block\":{},"
      "\"count\":{},\"listed\":{},\"ms\":{:.3f},\"ms_means_q\":{:.3f},\"ms_means_k\":{:.3f},\"gbps_means\":{:.1f}}}\n",
      device.row.name, tokens, spec.heads, spec.kv_heads, spec.head_dim, kBlock, kCount, listed, median(all), of_q,
      of_k, 1e3 * (gigabytes(q.view) + gigabytes(k.view)) / (of_q + of_k));
  std::fflush(stdout);
}

}  // namespace

void measure_choice(Device& device, int head_dim, std::int64_t tokens) {
  for (const int dim : {64, 128, 256}) {
    if (head_dim != 0 && dim != head_dim) continue;
    for (const int log : {15, 17, 19, 21}) {
      if (tokens != 0 && tokens != std::int64_t{1} << log) continue;
      measure(device, {32, 8, dim, dim}, std::int64_t{1} << log);
    }
  }
}

}  // namespace ringattn
