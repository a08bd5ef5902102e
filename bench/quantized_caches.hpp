// SPDX-License-Identifier: Apache-2.0
// Compressed caches for measurements: several equal ones, which lie as plain ones would, [pages, page_size, heads].
#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/decode_gpu_arguments.hpp"
#include "bench/dense_streams.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/quant/compressed_rows.hpp"

namespace ringattn {

// Keys of 4 bits have a scale for each channel and 32 tokens, values for each token and 32 channels, as KIVI has them.
inline CacheFormat cache_format_of(const DecodeShape& shape) {
  if (shape.cache == "fp8" && shape.values_in_keys) {
    return {{.encoding = RowEncoding::kLatent, .rope = shape.head_dim - shape.head_dim_v}, {}};
  }
  if (shape.cache == "fp8") return {{RowEncoding::kFp8}, {RowEncoding::kFp8}};
  if (shape.cache == "int8") return {{RowEncoding::kInt8}, {RowEncoding::kInt8}};
  if (shape.cache == "int4") {
    return {{RowEncoding::kInt4Channel, ScaleGrain::kTokenHead, 32},
            {RowEncoding::kInt4Token, ScaleGrain::kTokenHead, 32}};
  }
  return {};
}

class QuantizedCaches {
 public:
  // Enqueues what makes them of the first rows of `plain`, [tokens, heads, dim] of bf16 in the backend's memory.
  QuantizedCaches(Backend& backend, const RowFormat& format, const DecodeShape& shape, const CacheRotation& rotation,
                  const Buffer& plain)
      : format_(format), shape_{Dtype::kBf16, shape.kv_heads, shape.head_dim}, turns_(rotation), batch_(shape.batch) {
    const std::int64_t tokens = batch_ * rotation.pages * rotation.page;
    const DenseStreams layout = dense_streams(nullptr, format, shape_, tokens);
    bytes_ = layout.bytes;
    memory_ = backend.allocate(bytes_ * static_cast<std::size_t>(rotation.caches));
    // Each sequence has a tail of fewer tokens than a quantization group. Its values don't matter here.
    const auto tail = static_cast<std::size_t>(table_bytes(format, shape_, batch_));
    tail_ = backend.allocate(tail > 0 ? tail : 1);
    backend.fill_bytes(tail_.data(), std::byte{0}, tail, backend.stream());
    const CompressedRun all{0, 0, tokens, 0, tokens, 0};
    for (std::int64_t i = 0; i < rotation.caches; ++i) {
      CompressTask task{format, shape_, {}, {}, {&all, 1}, {}};
      task.plain = dense_view(static_cast<const void*>(plain.data()), shape_.dtype, tokens, shape_.heads, shape_.dim);
      task.to.streams = streams(i).streams;
      task.to.tables[0] = tail_.data();
      backend.compress(task, backend.stream());
    }
  }

  CompressedCache view(std::int64_t cache) const {
    CompressedCache view{format_, shape_, batch_ * turns_.pages, turns_.page, {}, {tail_.data()}};
    const DenseStreams dense = streams(cache);
    for (std::size_t i = 0; i < kMaxStreams; ++i) {
      const StreamView& stream = dense.streams[i];
      view.streams[i] = {stream.data, stream.token_stride * turns_.page, stream.token_stride, stream.head_stride};
    }
    return view;
  }

 private:
  DenseStreams streams(std::int64_t cache) const {
    return dense_streams(memory_.data() + static_cast<std::size_t>(cache) * bytes_, format_, shape_,
                         batch_ * turns_.pages * turns_.page);
  }

  RowFormat format_;
  RowShape shape_;
  CacheRotation turns_;
  std::int64_t batch_;
  std::size_t bytes_ = 0;
  Buffer memory_, tail_;
};

}  // namespace ringattn
