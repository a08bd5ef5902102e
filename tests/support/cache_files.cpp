// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cache_files.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "attention/tokens/page_table.hpp"
#include "io/safetensors_rows.hpp"
#include "kernels/common/synthetic.hpp"

namespace ringattn::testing {

namespace {

Batch batch_of(const CacheShape& shape) {
  std::vector<Sequence> sequences;
  for (std::size_t s = 0; s < shape.lengths.size(); ++s) {
    sequences.push_back({shape.q_lens[s], shape.lengths[s], shape.lengths[s] - shape.q_lens[s]});
  }
  return sequences;
}

// Rows of a tensor as the seed makes them, the tokens of `runs`.
NamedTensor made_rows(const CacheShape& shape, SyntheticTensor tensor, const std::vector<PackedRun>& runs, int heads,
                      int dim) {
  const std::int64_t tokens = total_tokens(runs);
  NamedTensor rows{file_dtype(shape.dtype), {tokens, heads, dim}, {}};
  rows.bytes.resize(static_cast<std::size_t>(tokens * heads * dim) * size_of(shape.dtype));
  fill_synthetic(shape.seed, tensor, runs,
                 dense_view(static_cast<void*>(rows.bytes.data()), shape.dtype, tokens, heads, dim), 1);
  return rows;
}

NamedTensor made_sinks(const CacheShape& shape) {
  const std::vector<float> sinks = synthetic_sinks(shape.seed, shape.heads);
  const auto bytes = std::as_bytes(std::span(sinks));
  return {FileDtype::kF32, {shape.heads}, {bytes.begin(), bytes.end()}};
}

// The queries of each sequence's last tokens; where it has fewer tokens, those of the tokens before.
NamedTensor made_queries(const CacheShape& shape) {
  std::vector<PackedRun> runs;
  std::int64_t end = 1000;  // so that no token is below 0
  for (std::size_t s = 0; s < shape.lengths.size(); ++s) {
    end += shape.lengths[s];
    runs.push_back({end - shape.q_lens[s], end});
  }
  return made_rows(shape, SyntheticTensor::kQ, runs, shape.heads, shape.head_dim);
}

void add_common(NamedTensors& tensors, const CacheShape& shape, bool block_mask) {
  tensors["q"] = made_queries(shape);
  if (shape.sinks) tensors["sinks"] = made_sinks(shape);
  if (block_mask) tensors["cu_seqlens_q"] = long_list(batch_of(shape).cu_q());
}

// The pool: every token's row at its slot, NaN elsewhere.
NamedTensor pool(const CacheShape& shape, const PageTable& table, SyntheticTensor tensor, int dim) {
  const Batch batch = batch_of(shape);
  const std::vector<PackedRun> all{{0, batch.k_tokens()}};
  const NamedTensor rows = made_rows(shape, tensor, all, shape.kv_heads, dim);
  const RowGrid grid{shape.head_major ? AxisOrder::kBhtd : AxisOrder::kBthd, table.pages, table.page_size,
                     shape.kv_heads, dim};
  NamedTensor pages{file_dtype(shape.dtype), grid.shape(), {}};
  const std::size_t row_bytes = static_cast<std::size_t>(dim) * size_of(shape.dtype);
  pages.bytes.assign(static_cast<std::size_t>(grid.tokens() * grid.heads) * row_bytes, std::byte{0xff});
  const std::vector<PackedRun> places = pool_runs(table, batch.cu_k(), all);
  for_each_segment(grid, places, size_of(shape.dtype), std::int64_t{1} << 30, [&](const RowSegment& segment) {
    std::byte* to = pages.bytes.data() + segment.offset;
    for (std::int64_t row = segment.row; row < segment.row + segment.tokens; ++row) {
      for (std::int64_t head = segment.head; head < segment.head + segment.heads; ++head, to += row_bytes) {
        std::memcpy(to, rows.bytes.data() + static_cast<std::size_t>(row * grid.heads + head) * row_bytes, row_bytes);
      }
    }
  });
  return pages;
}

}  // namespace

NamedTensor int_list(std::vector<std::int32_t> values, std::vector<std::int64_t> shape) {
  if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
  const auto bytes = std::as_bytes(std::span(values));
  return {FileDtype::kI32, std::move(shape), {bytes.begin(), bytes.end()}};
}

NamedTensor long_list(const std::vector<std::int64_t>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {FileDtype::kI64, {static_cast<std::int64_t>(values.size())}, {bytes.begin(), bytes.end()}};
}

NamedTensors cache_tensors(const CacheShape& shape) {
  const Batch batch = batch_of(shape);
  PageTable table = deal_pages(batch, shape.page_size, shape.seed);
  // The spare pages come first, so that every page in use has another number than it would have without them.
  table.pages += shape.spare_pages;
  for (std::int32_t& page : table.entries) page += static_cast<std::int32_t>(shape.spare_pages);

  std::int64_t columns = 1;
  for (const std::int64_t length : shape.lengths) columns = std::max(columns, pages_of(length, shape.page_size));
  std::vector<std::int32_t> entries(shape.lengths.size() * static_cast<std::size_t>(columns), -1);
  for (std::size_t s = 0; s < shape.lengths.size(); ++s) {
    const std::span<const std::int32_t> pages = table.of(s);
    std::copy(pages.begin(), pages.end(), entries.begin() + static_cast<std::ptrdiff_t>(s) * columns);
  }
  NamedTensors tensors;
  const bool even = std::count(shape.q_lens.begin(), shape.q_lens.end(), shape.q_lens.front()) ==
                    static_cast<std::ptrdiff_t>(shape.q_lens.size());
  add_common(tensors, shape, !even);
  tensors["k_pages"] = pool(shape, table, SyntheticTensor::kK, shape.head_dim);
  tensors["v_pages"] = pool(shape, table, SyntheticTensor::kV, shape.head_dim_v);
  tensors["block_table"] = int_list(entries, {static_cast<std::int64_t>(shape.lengths.size()), columns});
  tensors["lengths_k"] = shape.wide_lengths
                             ? long_list(shape.lengths)
                             : int_list(std::vector<std::int32_t>(shape.lengths.begin(), shape.lengths.end()));
  return tensors;
}

NamedTensors row_tensors(const CacheShape& shape) {
  const Batch batch = batch_of(shape);
  const std::vector<PackedRun> all{{0, batch.k_tokens()}};
  NamedTensors tensors;
  add_common(tensors, shape, true);
  tensors["k"] = made_rows(shape, SyntheticTensor::kK, all, shape.kv_heads, shape.head_dim);
  tensors["v"] = made_rows(shape, SyntheticTensor::kV, all, shape.kv_heads, shape.head_dim_v);
  tensors["cu_seqlens_k"] = long_list(batch.cu_k());
  return tensors;
}

std::string write_tensors(const std::string& path, const NamedTensors& tensors, const FileMetadata& metadata) {
  std::vector<OutputTensor> outputs;
  for (const auto& [name, tensor] : tensors) outputs.push_back({name, tensor.dtype, tensor.shape});
  const auto writer = SafetensorsWriter::create(plan_safetensors(outputs, metadata), path, true);
  for (const auto& [name, tensor] : tensors) writer->write_bytes(name, tensor.bytes);
  writer->commit();
  return path;
}

std::string write_cache(const std::string& path, const CacheShape& shape) {
  return write_tensors(path, cache_tensors(shape), shape.metadata);
}

}  // namespace ringattn::testing
