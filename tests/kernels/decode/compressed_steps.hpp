// SPDX-License-Identifier: Apache-2.0
// Steps over compressed caches on a GPU, whole or in KV partitions, compared with the same steps over plain ones. What
// no token owns is 0xff: NaN, and invalid quantized values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/attention/block_mask_patterns.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "kernels/decode/decode_block_mask.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/device_pool.hpp"

namespace ringattn::testing {

// A step over a compressed cache.
struct CompressedCase {
  DecodeSpec spec;
  int rows = 1;  // of a sequence
  std::vector<std::int64_t> lengths;
  std::int64_t page = 64;  // 0: dense
  int slices = 0;
  // Keys of these tokens of the last sequence are scaled by `loudness`: scores exceed the rescale threshold.
  std::vector<std::int64_t> loud;
  float loudness = 1.0F;
  bool tiny_zeros = false;  // least elements that are next to nothing compared with their scales
  bool odd_scales = false;  // of 8 bits, scales with all digits of fp32, in every second 128 tokens and now and then
};

// Its tensors on the device, and what a kernel makes of them and of the plain cache that decompression gives.
class CompressedSteps {
 public:
  CompressedSteps(const DecodeRow& row, const CompressedCase& c)
      : row_(row),
        case_(c),
        backend_(row.make_backend({1, 0})),
        k_(tensors(c.spec.format.k, c.spec.attention.head_dim, 1)),
        v_(tensors(c.spec.format.v, c.spec.attention.head_dim_v, 2)) {
    const AttentionSpec& fold = c.spec.attention;
    const std::vector<std::byte> q =
        outlier_rows({fold.dtype, fold.heads, fold.head_dim}, std::vector<std::int64_t>(c.lengths.size(), c.rows), 7);
    q_.emplace(*backend_, q.size());
    q_->write(q);
    lengths_.emplace(*backend_, c.lengths.size() * 4);
    lengths_->write(bytes_of(std::vector<std::int32_t>(c.lengths.begin(), c.lengths.end())));
    const std::int64_t rows = sequences() * c.rows;
    out_.emplace(*backend_, static_cast<std::size_t>(rows * fold.heads * fold.head_dim_v) * 2);
    lse_.emplace(*backend_, static_cast<std::size_t>(rows * fold.heads) * 4);
    if (fold.sinks) {
      sinks_.emplace(*backend_, static_cast<std::size_t>(fold.heads) * 4);
      sinks_->write(bytes_of(std::vector<float>(static_cast<std::size_t>(fold.heads), 0.5F)));
    }
    step_.q = dense_view(static_cast<const void*>(q_->data()), fold.dtype, rows, fold.heads, fold.head_dim);
    step_.rows = c.rows;
    step_.lengths = reinterpret_cast<const std::int32_t*>(lengths_->data());
    step_.output = {dense_view(static_cast<void*>(out_->data()), fold.dtype, rows, fold.heads, fold.head_dim_v),
                    {lse_->floats(), fold.heads, 1},
                    fold.sinks ? sinks_->floats() : nullptr};
    if (fold.block_mask.any()) make_lists_of_sequences();
  }

  // Outputs, then LSE.
  std::vector<std::byte> run(bool compressed) {
    const Held held = hold({}, 1);
    const DecodeStep step = step_over(held, compressed);
    const auto kernel = kernel_of(compressed);
    kernel->reserve({sequences(), case_.rows, longest(), case_.slices});
    out_->clear();
    lse_->clear();
    kernel->enqueue(step, backend_->stream());
    kernel->enqueue(step, backend_->stream());  // nothing of a step is left over for the next
    return results();
  }

  // The same of keys that are dealt to that many caches.
  std::vector<std::byte> run_shares(bool compressed, int count) {
    const auto kernel = kernel_of(compressed);
    kernel->reserve({sequences(), case_.rows, longest(), case_.slices});
    const std::int64_t groups = splits_per_partition(longest(), count, kernel->kv_split_keys());
    const std::int64_t floats = step_.q.tokens * groups * case_.spec.attention.heads * kernel->partial_floats();
    std::vector<DeviceArray> records;
    std::vector<const float*> shares;
    for (int i = 0; i < count; ++i) {
      const Held held = hold({i, count}, kernel->kv_split_keys());
      records.emplace_back(*backend_, static_cast<std::size_t>(floats) * sizeof(float));
      DecodeStep step = step_over(held, compressed);
      step.partition = {i, count};
      step.output = {};
      step.partials = {records.back().floats(), groups};
      kernel->enqueue(step, backend_->stream());
      backend_->synchronize(backend_->stream(), Deadline::after(60.0), {});
      shares.push_back(records.back().floats());
    }
    out_->clear();
    lse_->clear();
    kernel->merge({shares, groups, case_.rows, step_.lengths, step_.output}, backend_->stream());
    return results();
  }

 private:
  // A tensor, and what its decompression gives.
  struct Tensors {
    CompressedTensor packed, plain;
  };
  // The cache of one KV partition.
  struct Held {
    PageOrder order;
    std::unique_ptr<DevicePool> quantized_k, quantized_v, plain_k, plain_v;
    std::optional<DeviceArray> table;
  };

  std::int64_t sequences() const { return static_cast<std::int64_t>(case_.lengths.size()); }
  std::int64_t longest() const { return *std::ranges::max_element(case_.lengths); }

  std::unique_ptr<DecodeKernel> kernel_of(bool compressed) const {
    DecodeSpec spec = case_.spec;
    if (!compressed) spec.format = {};
    return row_.make_kernel(spec, *backend_);
  }

  std::vector<std::byte> results() const {
    std::vector<std::byte> bytes = out_->read();
    const std::vector<std::byte> lse = lse_->read();
    bytes.insert(bytes.end(), lse.begin(), lse.end());
    return bytes;
  }

  Held hold(const KvPartition& partition, std::int64_t kv_split_keys) const {
    Held held;
    std::vector<std::int64_t> lengths;
    for (const std::int64_t length : case_.lengths)
      lengths.push_back(keys_of_partition(partition, kv_split_keys, length));
    if (case_.page > 0) {
      held.order = shuffled_pages(lengths, case_.page, 3);
    } else {
      held.order.table.resize(lengths.size());
      std::iota(held.order.table.begin(), held.order.table.end(), 0);
      held.order.columns = 1;
      held.order.pages = sequences();
      held.order.page_size = *std::ranges::max_element(lengths) + 3;
    }
    const auto pool = [&](const CompressedTensor& tensor) {
      CompressedPool host(tensor.format, tensor.shape, held.order, sequences());
      host.fill(tensor, partition, kv_split_keys);
      return std::make_unique<DevicePool>(*backend_, host.view(), sequences());
    };
    held.quantized_k = pool(k_.packed);
    held.quantized_v = pool(v_.packed);
    held.plain_k = pool(k_.plain);
    held.plain_v = pool(v_.plain);
    held.table.emplace(*backend_, held.order.table.size() * 4);
    held.table->write(bytes_of(held.order.table));
    return held;
  }

  DecodeStep step_over(const Held& held, bool compressed) const {
    DecodeStep step = step_;
    const CacheFormat format = compressed ? case_.spec.format : CacheFormat{};
    if (format.k.is_plain()) {
      step.k = held.plain_k->plain();
    } else {
      step.quantized_k = held.quantized_k->view();
    }
    if (format.v.is_plain()) {
      step.v = held.plain_v->plain();
    } else {
      step.quantized_v = held.quantized_v->view();
    }
    if (case_.page > 0) {
      step.block_table = {reinterpret_cast<const std::int32_t*>(held.table->data()), held.order.columns};
    }
    return step;
  }

  // Three of four blocks before a sequence's rows.
  void make_lists_of_sequences() {
    const BlockMaskShape& shape = case_.spec.attention.block_mask;
    std::vector<MaskedSequence> of;
    for (const std::int64_t length : case_.lengths) of.push_back({length - case_.rows, case_.rows, length});
    const BlockMaskPattern maker = [&](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
      const std::int64_t own = std::max<std::int64_t>(0, of[place.sequence].position) / shape.key_block;
      for (std::int64_t block = 0; block < place.blocks; ++block) {
        if (block >= own || (block + place.head) % 4 != 0) blocks.push_back(static_cast<std::int32_t>(block));
      }
    };
    const DecodeBlockMaskArrays block_mask =
        decode_block_mask(make_block_mask(shape, of, maker), case_.spec.attention.mask, case_.rows);
    mask_indices_.emplace(*backend_, std::max<std::size_t>(4, block_mask.blocks.size() * 4));
    mask_indices_->write(bytes_of(block_mask.blocks));
    mask_counts_.emplace(*backend_, block_mask.counts.size() * 4);
    mask_counts_->write(bytes_of(block_mask.counts));
    step_.block_mask = {reinterpret_cast<const std::int32_t*>(mask_indices_->data()),
                        reinterpret_cast<const std::int32_t*>(mask_counts_->data()), block_mask.stride};
  }

  Tensors tensors(const RowFormat& format, std::int64_t dim, std::uint64_t seed) const {
    const RowShape shape{case_.spec.attention.dtype, case_.spec.attention.kv_heads, dim};
    const std::int64_t tokens = std::accumulate(case_.lengths.begin(), case_.lengths.end(), std::int64_t{0});
    std::vector<std::byte> rows = outlier_rows(shape, case_.lengths, seed);
    const std::int64_t row = shape.heads * dim;
    const auto change = [&](std::int64_t token, auto by) {
      for (std::int64_t i = 0; i < row; ++i) {
        std::byte* const at = rows.data() + (token * row + i) * 2;
        store_element(at, shape.dtype, by(load_element(at, shape.dtype), i));
      }
    };
    for (const std::int64_t token : case_.loud) {
      if (seed != 1) break;
      change(tokens - case_.lengths.back() + token, [&](float x, std::int64_t) { return x * case_.loudness; });
    }
    // What is below half is next to nothing: the least element of a group is, of either sign.
    for (std::int64_t token = 0; case_.tiny_zeros && token < tokens; ++token) {
      change(token, [&](float x, std::int64_t i) {
        if (std::abs(x) < 0.5F) return x * (shape.dtype == Dtype::kBf16 ? 0x1p-30F : 0x1p-18F);
        return i % 7 == 0 && token % 96 > 60 ? x : std::abs(x);
      });
    }
    CompressedTensor packed =
        compress_tensor("k", format, view_of(rows, shape, tokens), case_.lengths, {7, 2}, ErrorCode::kUsage);
    if (case_.odd_scales) make_scales_odd(packed);
    CompressedTensor plain = make_compressed({}, shape, case_.lengths);
    plain.streams[0] = decompress_tensor(packed, 2);
    return {std::move(packed), std::move(plain)};
  }

  static void make_scales_odd(CompressedTensor& tensor) {
    const auto change = [](std::byte* at, float by) {
      float scale = 0.0F;
      std::memcpy(&scale, at, sizeof scale);
      scale *= by;
      std::memcpy(at, &scale, sizeof scale);
    };
    if (tensor.format.scales != ScaleGrain::kTokenHead && tensor.format.encoding == RowEncoding::kFp8) {
      for (std::size_t at = 0; at < tensor.tables[0].size(); at += 4) change(tensor.tables[0].data() + at, 1.00123F);
      return;
    }
    std::vector<std::byte>& scales = tensor.streams[1];
    for (std::size_t i = 0; i < scales.size() / 4; ++i) {
      const std::size_t token = i / static_cast<std::size_t>(tensor.shape.heads);
      if (token / 128 % 2 == 1) change(scales.data() + 4 * i, 1.0F + 0x1p-9F + static_cast<float>(i % 100) * 0x1p-20F);
      if (i % 701 == 5) change(scales.data() + 4 * i, 1.0F + 0x1p-23F);
      if (i % 503 == 3) change(scales.data() + 4 * i, i % 2 == 0 ? 0x1p-68F : 3000.0F);  // elements, but far away
    }
  }

  const DecodeRow& row_;
  const CompressedCase case_;
  std::unique_ptr<Backend> backend_;
  const Tensors k_, v_;
  std::optional<DeviceArray> q_, lengths_, out_, lse_, sinks_, mask_indices_, mask_counts_;
  DecodeStep step_;
};

}  // namespace ringattn::testing
