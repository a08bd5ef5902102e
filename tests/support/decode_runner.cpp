// SPDX-License-Identifier: Apache-2.0
#include "tests/support/decode_runner.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/decode/cache_partition.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/poison.hpp"

namespace ringattn::testing {

namespace {

constexpr std::int64_t kGap = 16;  // elements after heads and rows of strided tensors

template <class Number>
std::vector<std::byte> bytes_of(const std::vector<Number>& numbers) {
  std::vector<std::byte> bytes(numbers.size() * sizeof(Number));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// [tokens, heads, dim], dense or with gaps.
MutableTensorView rows_view(void* data, Dtype dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                            bool strided) {
  const std::int64_t head_stride = dim + (strided ? kGap : 0);
  return {data, dtype, tokens, heads, dim, heads * head_stride + (strided ? kGap : 0), head_stride};
}
std::size_t bytes_of(const MutableTensorView& view) {
  return static_cast<std::size_t>(view.tokens * view.token_stride) * size_of(view.dtype);
}

CacheFormat format_of(const AttentionSpec& spec, const CacheLayout& layout) {
  if (layout.codes.empty()) return {};
  return {latent_format(spec.head_dim - spec.head_dim_v), {}};
}

// FP8 rows as keys of 16-bit elements, which lie in pages as keys do.
AttentionInputs with_codes(AttentionInputs inputs, const std::vector<std::byte>& codes) {
  inputs.spec.head_dim =
      static_cast<int>(latent_row_bytes(inputs.spec.head_dim_v, inputs.spec.head_dim - inputs.spec.head_dim_v) / 2);
  inputs.k = codes;
  return inputs;
}

void copy_rows(const MutableTensorView& to, const TensorView& from) {
  for (std::int64_t i = 0; i < from.tokens * from.heads; ++i) {
    std::memcpy(to.at(i / from.heads, i % from.heads), from.at(i / from.heads, i % from.heads),
                static_cast<std::size_t>(from.dim) * size_of(from.dtype));
  }
}

}  // namespace

DecodeRunner::DecodeRunner(const DecodeRow& row, const AttentionInputs& inputs, const CacheLayout& layout, int threads)
    : backend_(row.make_backend({threads, 0})),
      spec_{inputs.spec, layout.values_in_keys, format_of(inputs.spec, layout)},
      kernel_(row.make_kernel(spec_, *backend_)),
      strided_(layout.strided),
      partition_(layout.partition),
      mask_with_own_(layout.mask_with_own) {
  const AttentionSpec& spec = inputs.spec;
  std::optional<AttentionInputs> part;
  if (!partition_.is_whole()) part = dealt(inputs, partition_, kernel_->kv_split_keys());
  const AttentionInputs& cached = part ? *part : inputs;
  std::vector<std::int64_t> prefix_tokens;
  for (const std::int32_t keys : layout.prefix_keys) {
    prefix_tokens.push_back(keys_of_partition(partition_, kernel_->kv_split_keys(), keys));
  }
  const PagePool pool(cached.sequences, {layout.page_size, layout.head_major, layout.shuffle, layout.shared, 0,
                                         layout.prefix_of, prefix_tokens});
  std::vector<std::int64_t> lengths;
  for (const SequenceShape& shape : inputs.sequences) {
    if (shape.q_len != inputs.sequences[0].q_len || shape.q_offset != shape.k_len - shape.q_len) {
      throw std::logic_error("the queries of a decode step stand at the end of their keys");
    }
    lengths.push_back(shape.k_len);
  }
  const auto place = [&](std::optional<DeviceArray>& array, const std::vector<std::byte>& bytes) {
    array.emplace(*backend_, bytes);
  };
  const std::int64_t rows = inputs.q_tokens();
  MutableTensorView q = rows_view(nullptr, spec.dtype, rows, spec.heads, spec.head_dim, strided_);
  std::vector<std::byte> q_host(bytes_of(q), kPoison);
  q.data = q_host.data();
  copy_rows(q, dense_view(inputs.q.data(), spec.dtype, rows, spec.heads, spec.head_dim));
  place(q_, q_host);
  if (layout.codes.empty()) {
    place(k_, pool.fill(cached, cached.k, spec.head_dim));
  } else {
    const AttentionInputs coded = dealt(with_codes(inputs, layout.codes), partition_, kernel_->kv_split_keys());
    place(k_, pool.fill(coded, coded.k, coded.spec.head_dim));
  }
  place(v_, pool.fill(cached, cached.v, spec.head_dim_v));
  place(table_, bytes_of(pool.table()));
  place(sinks_, bytes_of(inputs.sinks));
  lengths_.emplace(*backend_, lengths.size() * sizeof(std::int32_t));
  set_lengths(lengths);
  MutableTensorView out = rows_view(nullptr, spec.dtype, rows, spec.heads, spec.head_dim_v, strided_);
  out_.emplace(*backend_, bytes_of(out));
  lse_.emplace(*backend_, static_cast<std::size_t>(rows * spec.heads) * sizeof(float));

  q.data = q_->data();
  out.data = out_->data();
  step_.q = q;
  step_.rows = static_cast<int>(inputs.sequences[0].q_len);
  step_.k = pool.view(k_->data(), spec, spec.head_dim);
  step_.v = pool.view(v_->data(), spec, spec.head_dim_v);
  if (layout.values_in_keys) {
    step_.v = step_.k;
    step_.v.dim = spec.head_dim_v;
    v_->clear();
  }
  if (!layout.codes.empty()) {
    step_.quantized_k =
        latent_cache(k_->data(), spec.head_dim_v, spec.head_dim - spec.head_dim_v, step_.k.pages, step_.k.page_size);
    step_.k = step_.v = {};
  }
  if (layout.page_size > 0) {
    step_.block_table = {reinterpret_cast<const std::int32_t*>(table_->data()), pool.table_width()};
  }
  step_.lengths = reinterpret_cast<const std::int32_t*>(lengths_->data());
  step_.output = {out, {lse_->floats(), spec.heads, 1}, inputs.sinks.empty() ? nullptr : sinks_->floats()};
  const auto prefixes = static_cast<int>(layout.prefix_keys.size());
  if (prefixes > 0) {
    place(prefix_of_, bytes_of(layout.prefix_of));
    place(prefix_keys_, bytes_of(layout.prefix_keys));
    step_.prefixes = {reinterpret_cast<const std::int32_t*>(prefix_of_->data()),
                      reinterpret_cast<const std::int32_t*>(prefix_keys_->data()), prefixes};
  }
  if (inputs.block_mask != nullptr) {
    const auto lists = static_cast<std::int64_t>(lengths.size()) * spec.block_mask.heads;
    mask_stride_ = *std::ranges::max_element(lengths) / spec.block_mask.key_block + 3;
    mask_indices_.emplace(*backend_, static_cast<std::size_t>(lists * mask_stride_) * sizeof(std::int32_t));
    mask_counts_.emplace(*backend_, static_cast<std::size_t>(lists) * sizeof(std::int32_t));
    set_block_mask(inputs);
    step_.block_mask = {reinterpret_cast<const std::int32_t*>(mask_indices_->data()),
                        reinterpret_cast<const std::int32_t*>(mask_counts_->data()), mask_stride_};
  }
  kernel_->reserve({static_cast<std::int64_t>(lengths.size()), step_.rows, *std::ranges::max_element(lengths),
                    layout.slices, prefixes});
}

void DecodeRunner::set_block_mask(const AttentionInputs& inputs) {
  DecodeBlockMaskArrays lists = decode_block_mask(*inputs.block_mask, inputs.spec.mask, step_.rows, mask_stride_);
  for (std::size_t i = 0; mask_with_own_ && i < lists.counts.size(); ++i) {
    const SequenceShape& sequence = inputs.sequences[i / static_cast<std::size_t>(inputs.spec.block_mask.heads)];
    const std::int64_t own = std::max<std::int64_t>(0, sequence.k_len - step_.rows) / inputs.spec.block_mask.key_block;
    std::int32_t* const list = lists.blocks.data() + i * static_cast<std::size_t>(mask_stride_);
    for (int more = 0; more < 2; ++more) list[lists.counts[i]++] = static_cast<std::int32_t>(own + more);
  }
  mask_indices_->write(bytes_of(lists.blocks));
  mask_counts_->write(bytes_of(lists.counts));
}

void DecodeRunner::set_lengths(const std::vector<std::int64_t>& lengths) {
  lengths_->write(bytes_of(std::vector<std::int32_t>(lengths.begin(), lengths.end())));
}

void DecodeRunner::enqueue(Stream stream) { enqueue(step_, stream); }

void DecodeRunner::enqueue(const DecodeStep& step, Stream stream) {
  if (part_limit_ == 0) return kernel_->enqueue(step, stream);
  for_each_sub_batch(spec_, step, part_limit_, kernel_->partial_floats(),
                     [&](const DecodeStep& part) { kernel_->enqueue(part, stream); });
}

void DecodeRunner::run_partition(const KvPartition& partition) {
  DecodeStep step = step_;
  step.partition = partition;
  kernel_->enqueue(step, backend_->stream());
}

void DecodeRunner::make_partials(std::int64_t groups) {
  partial_kv_splits_ = groups;
  const std::int64_t floats = step_.q.tokens * groups * spec_.attention.heads * kernel_->partial_floats();
  partials_.emplace(*backend_, static_cast<std::size_t>(floats) * sizeof(float));
}

void DecodeRunner::enqueue_leave(Stream stream) {
  DecodeStep step = step_;
  step.partition = partition_;
  step.output = {};
  step.partials = {partials_->floats(), partial_kv_splits_};
  enqueue(step, stream);
}

void DecodeRunner::enqueue_merge(const std::vector<const float*>& partitions, Stream stream) {
  const std::int64_t sequences = step_.q.tokens / step_.rows;
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, std::int64_t{1}}, {std::int64_t{1}, sequences}}) {
    if (begin >= end) continue;
    const std::int64_t row = begin * step_.rows;
    DecodeMerge merge{{}, partial_kv_splits_, step_.rows, step_.lengths + begin, step_.output};
    merge.output.out.data = step_.output.out.at(row, 0);
    merge.output.out.tokens = (end - begin) * step_.rows;
    merge.output.lse.data = &step_.output.lse.at(row, 0);
    std::vector<const float*> partials = partitions;
    for (const float*& partition : partials)
      partition += row * partial_kv_splits_ * spec_.attention.heads * kernel_->partial_floats();
    merge.partitions = partials;
    kernel_->merge(merge, stream);
  }
}

void DecodeRunner::wait() { backend_->synchronize(backend_->stream(), Deadline::after(60.0), {}); }

AttentionResult DecodeRunner::read() {
  wait();
  const AttentionSpec& spec = spec_.attention;
  std::vector<std::byte> host = out_->read();
  MutableTensorView from = step_.output.out;
  from.data = host.data();
  AttentionResult result;
  result.out.resize(static_cast<std::size_t>(from.tokens * spec.heads * spec.head_dim_v) * size_of(spec.dtype));
  copy_rows(dense_view(static_cast<void*>(result.out.data()), spec.dtype, from.tokens, spec.heads, spec.head_dim_v),
            from);
  result.lse = lse_->read_floats();
  out_->clear();
  lse_->clear();
  return result;
}

AttentionInputs decode_inputs(const AttentionSpec& spec, int rows, const std::vector<std::int64_t>& lengths,
                              std::uint64_t seed) {
  std::vector<SequenceShape> shapes;
  for (const std::int64_t length : lengths) shapes.push_back({rows, length, length - rows});
  return random_inputs(spec, shapes, seed);
}

AttentionInputs with_prefixes(AttentionInputs inputs, const std::vector<std::int32_t>& prefix_of,
                              const std::vector<std::int32_t>& prefix_keys) {
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    const std::int32_t prefix = prefix_of[s];
    if (prefix < 0 || static_cast<std::size_t>(prefix) >= prefix_keys.size()) continue;
    const auto from = static_cast<std::size_t>(std::ranges::find(prefix_of, prefix) - prefix_of.begin());
    const std::int64_t keys = std::min({std::int64_t{prefix_keys[static_cast<std::size_t>(prefix)]},
                                        inputs.sequences[s].k_len, inputs.sequences[from].k_len});
    for (std::vector<std::byte>* rows : {&inputs.k, &inputs.v}) {
      const std::int64_t token = static_cast<std::int64_t>(rows->size()) / inputs.k_tokens();
      std::copy_n(rows->begin() + inputs.k_begin(from) * token, keys * token,
                  rows->begin() + inputs.k_begin(s) * token);
    }
  }
  return inputs;
}

AttentionInputs dealt(const AttentionInputs& inputs, const KvPartition& partition, std::int64_t kv_split_keys) {
  AttentionInputs part;  // without a copy of all keys and values
  part.spec = inputs.spec;
  part.sequences = inputs.sequences;
  part.q = inputs.q;
  part.sinks = inputs.sinks;
  part.block_mask = inputs.block_mask;
  part.positions = inputs.positions;
  const auto append = [](std::vector<std::byte>& to, const TensorView& from, std::int64_t begin, std::int64_t end) {
    const auto* const rows = static_cast<const std::byte*>(from.data);
    const std::int64_t row_bytes = from.token_stride * static_cast<std::int64_t>(size_of(from.dtype));
    to.insert(to.end(), rows + begin * row_bytes, rows + end * row_bytes);
  };
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    const std::int64_t keys = inputs.sequences[s].k_len;
    part.sequences[s].k_len = 0;
    for (std::int64_t begin = partition.first * kv_split_keys; begin < keys;
         begin += partition.stride * kv_split_keys) {
      const std::int64_t end = std::min(begin + kv_split_keys, keys);
      append(part.k, inputs.k_view(s), begin, end);
      append(part.v, inputs.v_view(s), begin, end);
      part.sequences[s].k_len += end - begin;
    }
  }
  return part;
}

AttentionInputs sequences_of(const AttentionInputs& inputs, std::size_t first, std::size_t count) {
  AttentionInputs part = inputs;
  const auto begin = inputs.sequences.begin() + static_cast<std::ptrdiff_t>(first);
  part.sequences.assign(begin, begin + static_cast<std::ptrdiff_t>(count));
  const auto cut = [](const std::vector<std::byte>& from, std::int64_t tokens, std::int64_t begin_token,
                      std::int64_t count_tokens) {
    const std::int64_t token = tokens == 0 ? 0 : static_cast<std::int64_t>(from.size()) / tokens;
    return std::vector<std::byte>(from.begin() + begin_token * token,
                                  from.begin() + (begin_token + count_tokens) * token);
  };
  part.q = cut(inputs.q, inputs.q_tokens(), inputs.q_begin(first), part.q_tokens());
  part.k = cut(inputs.k, inputs.k_tokens(), inputs.k_begin(first), part.k_tokens());
  part.v = cut(inputs.v, inputs.k_tokens(), inputs.k_begin(first), part.k_tokens());
  return part;
}

AttentionResult rows_of(const AttentionResult& result, const AttentionInputs& inputs, std::size_t first) {
  const AttentionSpec& spec = inputs.spec;
  const std::int64_t rows = inputs.q_tokens();
  const std::int64_t row = static_cast<std::int64_t>(first) * inputs.sequences[0].q_len;
  const std::int64_t row_bytes =
      std::int64_t{spec.heads} * spec.head_dim_v * static_cast<std::int64_t>(size_of(spec.dtype));
  AttentionResult part;
  part.out.assign(result.out.begin() + row * row_bytes, result.out.begin() + (row + rows) * row_bytes);
  part.lse.assign(result.lse.begin() + row * spec.heads, result.lse.begin() + (row + rows) * spec.heads);
  return part;
}

AttentionInputs shortened(const AttentionInputs& inputs, const std::vector<std::int64_t>& lengths) {
  AttentionInputs shorter = inputs;
  shorter.k.clear();
  shorter.v.clear();
  const auto append = [](std::vector<std::byte>& to, const TensorView& from, std::int64_t tokens) {
    const auto* const begin = static_cast<const std::byte*>(from.data);
    to.insert(to.end(), begin, begin + tokens * from.token_stride * static_cast<std::int64_t>(size_of(from.dtype)));
  };
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    append(shorter.k, inputs.k_view(s), lengths[s]);
    append(shorter.v, inputs.v_view(s), lengths[s]);
    shorter.sequences[s].k_len = lengths[s];
    shorter.sequences[s].q_offset = lengths[s] - inputs.sequences[s].q_len;
  }
  return shorter;
}

}  // namespace ringattn::testing
