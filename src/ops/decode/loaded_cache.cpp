// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/loaded_cache.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/failpoint.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/common/staging.hpp"
#include "ops/mla/fp8_latents.hpp"
#include "ops/mla/mla_projections.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kQuantizedRowsAtOnce = 1 << 14;  // tokens that are read and checked at a time
constexpr std::int64_t kRowsAtOnce = 1 << 14;           // tokens with all heads, some of which the rank keeps
constexpr std::size_t kStreamAlignment = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kStreamAlignment - 1) / kStreamAlignment * kStreamAlignment; }

// Bytes of the pool of k or of v.
std::size_t pool_bytes(const RowFormat& format, const RowShape& shape, std::int64_t rows) {
  std::size_t bytes = 0;
  for (const FormatStream& stream : format_streams(format, shape)) {
    bytes = aligned(bytes) + static_cast<std::size_t>(rows * stream.token_bytes(shape.dtype));
  }
  return bytes;
}

// Removes the last `count` keys of each sequence. `cu_k`: token at which each sequence begins, then the number of
// tokens.
void hold_back(std::vector<CachedKeyRun>& held, std::span<const std::int64_t> cu_k, std::int64_t count) {
  for (CachedKeyRun& run : held) {
    const std::int64_t end = *std::upper_bound(cu_k.begin(), cu_k.end(), run.keys.begin);  // of its sequence
    run.keys.end = std::max(run.keys.begin, std::min(run.keys.end, end - count));
  }
  std::erase_if(held, [](const CachedKeyRun& run) { return run.keys.tokens() == 0; });
}

// Calls piece(runs, rows) for some tokens of the runs at a time. `rows`: their part of the rows.
void for_each_piece_of(std::span<const PackedRun> runs, const MutableTensorView& rows,
                       const std::function<void(const std::vector<PackedRun>&, const MutableTensorView&)>& piece) {
  for (std::int64_t begin = 0; begin < rows.tokens; begin += kRowsAtOnce) {
    MutableTensorView part = rows;
    part.data = rows.at(begin, 0);
    part.tokens = std::min(kRowsAtOnce, rows.tokens - begin);
    piece(part_of(runs, begin, part.tokens), part);
  }
}

}  // namespace

LoadedCache::LoadedCache(const JobInput& input, Decode& decode, const Collective& collective,
                         const ProgressCallback& on_progress, std::int64_t held_back)
    : input_(input), decode_(decode), collective_(collective) {
  const DecodeJob& job = decode.job();
  const AttentionSpec& spec = job.spec;
  rank_cache_ = ringattn::rank_cache(input, job, collective.rank(), collective.size(), decode.kv_split_keys());
  kv_heads_ = decode.kv_heads();
  if (held_back > 0) hold_back(rank_cache_.held, input.job().batch.cu_k(), held_back);
  Backend& backend = decode.backend();
  k_ = {SyntheticTensor::kK, job.format.k, {spec.dtype, kv_heads_.count, spec.head_dim}, {}};
  v_ = {SyntheticTensor::kV, job.format.v, {spec.dtype, kv_heads_.count, spec.head_dim_v}, {}};
  pools_.k = backend.allocate(pool_bytes(k_.format, k_.shape, rows()));
  if (!job.values_in_keys) pools_.v = backend.allocate(pool_bytes(v_.format, v_.shape, rows()));
  if (job.values_in_keys) {
    failpoint("staging");
    mark_unwritten(backend, {&pools_.k});
    // FP8 rows are handled as rows of half as many 16-bit elements.
    const std::int64_t width = token_bytes(k_.format, k_.shape) / static_cast<std::int64_t>(size_of(spec.dtype));
    fill_rows({}, dense_view(static_cast<void*>(pools_.k.data()), spec.dtype, rows(), 1, width), nullptr, on_progress);
  } else {
    load(k_, pools_.k, non_finite_.k, on_progress);
    load(v_, pools_.v, non_finite_.v, on_progress);
  }

  for (const Sequence& sequence : input.job().batch.sequences) {
    host_lengths_.push_back(static_cast<std::int32_t>(sequence.k_len - held_back));
  }
  lengths_ = upload<std::int32_t>(backend, host_lengths_);
  table_ = upload<std::int32_t>(backend, rank_cache_.table);
  if (held_back == 0 && !job.spec.block_mask.any()) prefixes_ = shared_prefixes(input, decode.key_tile());
  if (!prefixes_.keys.empty()) {
    prefix_of_ = upload<std::int32_t>(backend, prefixes_.of_sequence);
    prefix_keys_ = upload<std::int32_t>(backend, prefixes_.keys);
  }
  await(backend, collective_.timeouts());
}

void LoadedCache::load(CachedTensor& part, Buffer& pool, std::int64_t& non_finite,
                       const ProgressCallback& on_progress) {
  Backend& backend = decode_.backend();
  failpoint("staging");
  mark_unwritten(backend, {&pool});
  if (!part.format.is_plain()) {
    const CompressedSource& source = *input_.compressed(part.tensor);
    for (const std::vector<std::byte>& table : source.tables())
      part.tables.push_back(upload<std::byte>(backend, table));
    fill_quantized(source, part, pool, on_progress);
  } else if (as_in_file(part)) {
    non_finite = fill_pages(part, pool, on_progress);
  } else {
    const RowShape& shape = part.shape;
    const bool in_pages = input_.has_file_pages() && input_.compressed(part.tensor) == nullptr;
    fill_rows(part.tensor, dense_view(static_cast<void*>(pool.data()), shape.dtype, rows(), shape.heads, shape.dim),
              in_pages ? &non_finite : nullptr, on_progress);
  }
}

bool LoadedCache::as_in_file(const CachedTensor& part) const {
  return input_.has_file_pages() && input_.compressed(part.tensor) == nullptr && !has_some_heads();
}

void LoadedCache::read_heads(SyntheticTensor tensor, std::span<const PackedRun> runs,
                             const MutableTensorView& host) const {
  const int threads = decode_.options().threads;
  if (!has_some_heads()) return input_.read(tensor, runs, host, threads);
  const std::int64_t heads = input_.job().spec.kv_heads;
  const auto element = static_cast<std::int64_t>(size_of(host.dtype));
  std::vector<std::byte> all(static_cast<std::size_t>(std::min(kRowsAtOnce, host.tokens) * heads * host.dim * element));
  for_each_piece_of(runs, host, [&](const std::vector<PackedRun>& piece, const MutableTensorView& rows) {
    const MutableTensorView from = dense_view(static_cast<void*>(all.data()), host.dtype, rows.tokens, heads, host.dim);
    input_.read(tensor, piece, from, threads);
    for (std::int64_t token = 0; token < rows.tokens; ++token) {
      std::memcpy(rows.at(token, 0), from.at(token, kv_heads_.first),
                  static_cast<std::size_t>(rows.token_stride * element));
    }
  });
}

void LoadedCache::make_heads(SyntheticTensor tensor, std::span<const PackedRun> runs,
                             const MutableTensorView& rows) const {
  Backend& backend = decode_.backend();
  const std::vector<PackedRun> made = input_.made_tokens(tensor, runs);
  if (!has_some_heads()) return backend.fill_synthetic(*input_.seed(), tensor, made, rows, backend.stream());
  Buffer all;
  make_rows(backend, rows.dtype, std::min(kRowsAtOnce, rows.tokens), input_.job().spec.kv_heads, rows.dim, all);
  for_each_piece_of(made, rows, [&](const std::vector<PackedRun>& piece, const MutableTensorView& to) {
    const MutableTensorView from =
        dense_view(static_cast<void*>(all.data()), rows.dtype, to.tokens, input_.job().spec.kv_heads, rows.dim);
    backend.fill_synthetic(*input_.seed(), tensor, piece, from, backend.stream());
    const auto element = static_cast<std::int64_t>(size_of(rows.dtype));
    backend.copy_rows(to.data, to.token_stride * element, from.at(0, kv_heads_.first), from.token_stride * element,
                      to.token_stride * element, to.tokens, backend.stream());
  });
  await(backend, collective_.timeouts());
}

// Fills rows with latents and rotary keys side by side, or with FP8 rows as in the file.
void LoadedCache::fill_latents(std::span<const PackedRun> runs, const MutableTensorView& host) {
  const DecodeJob& job = decode_.job();
  if (job.format.k.is_plain()) {
    read_latent_keys(input_, runs, host, decode_.options().threads);
    if (!input_.seed()) non_finite_.k += count_non_finite(host);
    return;
  }
  non_finite_.k += load_fp8_latents(input_, runs, host, decode_.options().threads);
}

void LoadedCache::for_each_stretch(const LoadRows& load) const {
  std::vector<PackedRun> runs;
  std::int64_t first = 0;
  std::int64_t end = 0;
  for (const CachedKeyRun& held : rank_cache_.held) {
    if (held.row != end) {
      load(runs, first);
      runs.clear();
      first = held.row;
    }
    runs.push_back(held.keys);
    end = held.row + held.keys.tokens();
  }
  load(runs, first);
}

// Without a tensor the rows are latents and rotary keys side by side. `non_finite`: counts values, or null.
void LoadedCache::fill_rows(std::optional<SyntheticTensor> tensor, const MutableTensorView& rows,
                            std::int64_t* non_finite, const ProgressCallback& on_progress) {
  Backend& backend = decode_.backend();
  Staging staging(backend, collective_.timeouts());
  std::int64_t done = 0;
  for_each_stretch([&](const std::vector<PackedRun>& runs, std::int64_t first) {
    MutableTensorView stretch = rows;
    stretch.data = rows.at(first, 0);
    stretch.tokens = total_tokens(runs);
    if (tensor && input_.is_made(*tensor)) {
      make_heads(*tensor, runs, stretch);
      return;
    }
    const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
      if (tensor) {
        read_heads(*tensor, piece, host);
        if (non_finite != nullptr) *non_finite += count_non_finite(host);
        return;
      }
      fill_latents(piece, host);
    };
    staging.load(runs, stretch, fill, [&](std::int64_t here) {
      if (on_progress) on_progress("row of the cache", {done + here, rows.tokens});
    });
    done += stretch.tokens;
  });
}

// Some tokens at a time, in all streams. The host checks them.
void LoadedCache::fill_quantized(const CompressedSource& source, const CachedTensor& part, const Buffer& pool,
                                 const ProgressCallback& on_progress) {
  Backend& backend = decode_.backend();
  const std::vector<FormatStream> streams = format_streams(part.format, part.shape);
  const CompressedCache cache = packed(part, pool);
  std::vector<std::vector<std::byte>> host(streams.size());
  CompressedRows rows;
  rows.tables = source.table_pointers();
  std::int64_t done = 0;
  for_each_stretch([&](const std::vector<PackedRun>& runs, std::int64_t first) {
    const std::int64_t tokens = total_tokens(runs);
    for (std::int64_t begin = 0; begin < tokens; begin += kQuantizedRowsAtOnce) {
      const std::int64_t count = std::min(kQuantizedRowsAtOnce, tokens - begin);
      const std::vector<PackedRun> piece = part_of(runs, begin, count);
      for (std::size_t i = 0; i < streams.size(); ++i) {
        const std::int64_t bytes = streams[i].token_bytes(part.shape.dtype);
        host[i].resize(static_cast<std::size_t>(count * bytes));
        source.read_stream(i, piece, host[i]);
        rows.streams[i] = {host[i].data(), bytes, bytes / streams[i].heads};
        backend.copy_rows(cache.streams[i].data + (first + begin) * bytes, count * bytes, host[i].data(), count * bytes,
                          count * bytes, 1, backend.stream());
      }
      source.check(rows, piece);
      await(backend, collective_.timeouts());
      done += count;
      if (on_progress) on_progress("row of the cache", {done, this->rows()});
    }
  });
}

// Copies whole pages as they are in the file. Returns the number of NaN and infinite values of tokens.
std::int64_t LoadedCache::fill_pages(const CachedTensor& part, const Buffer& pool,
                                     const ProgressCallback& on_progress) {
  const RowShape& shape = part.shape;
  const std::int64_t page_values = rank_cache_.page_size * shape.heads * shape.dim;
  const std::size_t page_bytes = static_cast<std::size_t>(page_values) * size_of(shape.dtype);
  std::int64_t non_finite = 0;
  const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& host) {
    auto* at = static_cast<std::byte*>(host.data);
    for (const PackedRun& run : runs) {
      const auto numbers = std::span(rank_cache_.numbers)
                               .subspan(static_cast<std::size_t>(run.begin), static_cast<std::size_t>(run.tokens()));
      input_.read_pages(part.tensor, numbers, {at, page_bytes * numbers.size()});
      for (std::int64_t page = run.begin; page < run.end; ++page, at += page_bytes) {
        const std::int64_t tokens = rank_cache_.held[static_cast<std::size_t>(page)].keys.tokens();
        TensorView held = dense_view(static_cast<const void*>(at), shape.dtype, tokens, shape.heads, shape.dim);
        if (input_.head_major_pages()) {
          held.token_stride = shape.dim;
          held.head_stride = rank_cache_.page_size * shape.dim;
        }
        non_finite += count_non_finite(held);
      }
    }
  };
  const PackedRun all[] = {{0, rank_cache_.pages}};
  const std::int64_t before = part.tensor == SyntheticTensor::kK ? 0 : rank_cache_.pages;
  Staging(decode_.backend(), collective_.timeouts())
      .load(all, dense_view(static_cast<void*>(pool.data()), shape.dtype, rank_cache_.pages, 1, page_values), fill,
            [&](std::int64_t done) {
              if (on_progress) on_progress("page of the cache", {before + done, 2 * rank_cache_.pages});
            });
  return non_finite;
}

CachePools LoadedCache::copy() const {
  Backend& backend = decode_.backend();
  CachePools other;
  for (const auto& [from, to] : {std::pair{&pools_.k, &other.k}, {&pools_.v, &other.v}}) {
    if (from->bytes() == 0) continue;  // v, if the keys contain the values
    *to = backend.allocate(from->bytes());
    const auto bytes = static_cast<std::int64_t>(from->bytes());
    backend.copy_rows(to->data(), bytes, from->data(), bytes, bytes, 1, backend.stream());
  }
  await(backend, collective_.timeouts());
  return other;
}

MutableCacheView LoadedCache::view(const CachedTensor& part, const Buffer& pool) const {
  const auto make = as_in_file(part) && input_.head_major_pages() ? head_major_cache_view : cache_view;
  const RowShape& shape = part.shape;
  MutableCacheView view = make(pool.data(), shape.dtype, rank_cache_.pages, rank_cache_.page_size,
                               static_cast<int>(shape.heads), static_cast<int>(shape.dim));
  if (rank_cache_.columns == 0) {
    // A step skips the caches of all sequences before the rank's own (rank_step()). This rank doesn't have them, so the
    // view begins that far before the pool. Nothing is read there.
    const std::int64_t skipped =
        rank_cache_.first_sequence * view.page_stride * static_cast<std::int64_t>(size_of(shape.dtype));
    view.data = reinterpret_cast<void*>(reinterpret_cast<std::intptr_t>(pool.data()) - skipped);
    view.pages = static_cast<std::int64_t>(host_lengths_.size());
  }
  return view;
}

CompressedCache LoadedCache::packed(const CachedTensor& part, const Buffer& pool) const {
  if (decode_.job().values_in_keys) {
    const AttentionSpec& spec = decode_.job().spec;
    return latent_cache(pool.data(), spec.head_dim_v, spec.head_dim - spec.head_dim_v, rank_cache_.pages,
                        rank_cache_.page_size);
  }
  CompressedCache cache{part.format, part.shape, rank_cache_.pages, rank_cache_.page_size, {}, {}};
  std::size_t at = 0, i = 0;
  for (const FormatStream& stream : format_streams(part.format, part.shape)) {
    const std::int64_t bytes = stream.token_bytes(part.shape.dtype);
    at = aligned(at);
    cache.streams[i++] = {pool.data() + at, rank_cache_.page_size * bytes, bytes, bytes / stream.heads};
    at += static_cast<std::size_t>(rows() * bytes);
  }
  for (std::size_t table = 0; table < part.tables.size(); ++table) cache.tables[table] = part.tables[table].data();
  return cache;
}

void LoadedCache::bind_pools(const CachePools& pools, DecodeInputs& inputs) const {
  if (k_.format.is_plain()) {
    inputs.k = view(k_, pools.k);
  } else {
    inputs.quantized_k = packed(k_, pools.k);
  }
  if (decode_.job().values_in_keys) return;
  if (v_.format.is_plain()) {
    inputs.v = view(v_, pools.v);
  } else {
    inputs.quantized_v = packed(v_, pools.v);
  }
}

void LoadedCache::bind_tables(DecodeInputs& inputs) const {
  inputs.lengths = reinterpret_cast<std::int32_t*>(lengths_.data());
  if (rank_cache_.columns == 0) return;
  inputs.block_table = {reinterpret_cast<const std::int32_t*>(table_.data()), rank_cache_.columns};
  inputs.table_pages = rank_cache_.columns;
  if (prefixes_.keys.empty()) return;
  inputs.prefixes = {reinterpret_cast<const std::int32_t*>(prefix_of_.data()),
                     reinterpret_cast<const std::int32_t*>(prefix_keys_.data()),
                     static_cast<int>(prefixes_.keys.size())};
}

void LoadedCache::bind_growing_tables(DecodeInputs& inputs) const {
  bind_tables(inputs);
  inputs.lengths = nullptr;
  inputs.lengths_before = reinterpret_cast<std::int32_t*>(lengths_.data());
  inputs.update_lengths = true;
}

void LoadedCache::bind_host_tables(DecodeInputs& inputs) const {
  inputs.host_lengths = host_lengths_.data();
  if (rank_cache_.columns > 0) inputs.host_table = {rank_cache_.table.data(), rank_cache_.columns};
  inputs.host_prefixes = {prefixes_.of_sequence.data(), prefixes_.keys.data(), static_cast<int>(prefixes_.keys.size())};
}

}  // namespace ringattn
