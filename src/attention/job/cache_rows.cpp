// SPDX-License-Identifier: Apache-2.0
#include "attention/job/cache_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>

#include "attention/files/compressed_tensors.hpp"
#include "attention/files/position_tensors.hpp"
#include "attention/files/tensor_checks.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

std::vector<std::int64_t> differences(const std::vector<std::int64_t>& cu) {
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 1; i < cu.size(); ++i) lengths.push_back(cu[i] - cu[i - 1]);
  return lengths;
}

// Of a file that may have no queries.
std::vector<std::int64_t> key_lengths(const SafetensorsFile& file, const InputNames& names, const TensorSource& k,
                                      const RowGrid& grid) {
  auto cu = find_optional(file, names.cu_seqlens_k, "cu_seqlens_k");
  if (!cu) cu = find_optional(file, names.cu_seqlens_q, "cu_seqlens_q");
  if (!cu) {
    check_count(k, grid.batch);
    return std::vector<std::int64_t>(static_cast<std::size_t>(grid.batch), grid.length);
  }
  check_count(*cu, entries(*cu) - 1);
  return differences(read_cumulative(*cu, grid, "k"));
}

void refuse_kind(const SafetensorsFile& file, std::string_view what) {
  fail(ErrorCode::kFile, fmt::format("{} holds {}", file.path(), what), "keys and values in rows are compressed",
       "Give a file with k and v.");
}

CacheRows read_rows_of(const FileInput& input, int, const CacheCheck& check) {
  const SafetensorsFile file(input.path);
  if (holds_compressed(file)) refuse_kind(file, "a compressed cache");
  if (holds_positions(file)) refuse_kind(file, "a cache that has lost tokens");
  const std::string k_name = input.names.k.value_or("k");
  const std::string v_name = input.names.v.value_or("v");
  const TensorSource k = file.tensor(k_name);
  const TensorSource v = file.tensor(v_name);
  const RowGrid k_grid = row_grid(k, input.order);
  const RowGrid v_grid = row_grid(v, input.order);
  CacheRows cache;
  cache.k = {row_dtype(k), k_grid.heads, k_grid.dim};
  cache.v = {row_dtype(v), v_grid.heads, v_grid.dim};
  require(v_grid.heads == k_grid.heads && v_grid.tokens() == k_grid.tokens() && cache.v.dtype == cache.k.dtype, v,
          fmt::format("k is {} [{} tokens, {} heads]", file_dtype_name(k.info->dtype), k_grid.tokens(), k_grid.heads),
          "k and v are of the same tokens and K/V heads.");
  require(cache.k.heads > 0 && cache.k.dim > 0 && cache.v.dim > 0, k, "it needs at least one head and one dim",
          {setting("order"), " says which axis is which."});
  cache.grid = k_grid;
  cache.lengths = key_lengths(file, input.names, k, k_grid);
  check(cache, find_optional(file, input.names.q, "q").has_value());
  const PackedRun all{0, cache.tokens()};
  cache.k_rows.resize(bytes_of(cache.k, cache.tokens()));
  cache.v_rows.resize(bytes_of(cache.v, cache.tokens()));
  read_rows(k, k_grid, {&all, 1}, view_of(cache.k_rows, cache.k, cache.tokens()));
  read_rows(v, v_grid, {&all, 1}, view_of(cache.v_rows, cache.v, cache.tokens()));
  cache.others = read_others(file, input.names);
  return cache;
}

CacheRows read_rows_of(const SyntheticInput& input, int threads, const CacheCheck& check) {
  const JobInput job(input, {});
  if (job.op() != Op::kAttention) {
    fail(ErrorCode::kUsage, {setting("op", op_name(job.op()))}, "keys and values in rows are compressed",
         {"Leave it out: ", setting("op", "attention"), "."});
  }
  const FoldSpec& spec = job.job().spec;
  CacheRows cache;
  cache.k = {spec.dtype, spec.kv_heads, spec.head_dim};
  cache.v = {spec.dtype, spec.kv_heads, spec.head_dim_v};
  cache.lengths = job.job().batch.k_lengths();
  check(cache, true);
  const auto read = [&](SyntheticTensor tensor, const RowShape& shape, std::int64_t tokens,
                        std::vector<std::byte>& rows) {
    const PackedRun all{0, tokens};
    rows.resize(bytes_of(shape, tokens));
    job.read(tensor, {&all, 1}, view_of(rows, shape, tokens), threads);
  };
  read(SyntheticTensor::kK, cache.k, cache.tokens(), cache.k_rows);
  read(SyntheticTensor::kV, cache.v, cache.tokens(), cache.v_rows);
  WholeTensor& q = cache.others.emplace_back();
  const std::int64_t q_tokens = job.job().batch.q_tokens();
  read(SyntheticTensor::kQ, {spec.dtype, spec.heads, spec.head_dim}, q_tokens, q.bytes);
  q.tensor = {"q", file_dtype(spec.dtype), {q_tokens, spec.heads, spec.head_dim}};
  if (input.batch != 1) {
    q.tensor.shape = {input.batch, input.batch > 0 ? q_tokens / input.batch : 0, spec.heads, spec.head_dim};
  }
  const bool batched = input.batch != 1;
  cache.grid = {batched ? AxisOrder::kBthd : AxisOrder::kThd, batched ? input.batch : 1, input.tokens, spec.kv_heads,
                spec.head_dim};
  return cache;
}

}  // namespace

bool CacheRows::has(std::string_view name) const {
  return std::ranges::any_of(others, [&](const WholeTensor& other) { return other.tensor.name == name; });
}

std::int64_t CacheRows::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

std::size_t bytes_of(const RowShape& shape, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens * shape.heads * shape.dim) * size_of(shape.dtype);
}

MutableTensorView view_of(std::vector<std::byte>& rows, const RowShape& shape, std::int64_t tokens) {
  return dense_view(static_cast<void*>(rows.data()), shape.dtype, tokens, shape.heads, shape.dim);
}

std::vector<WholeTensor> read_others(const SafetensorsFile& file, const InputNames& names) {
  const std::pair<const std::optional<std::string>*, std::string_view> others[] = {
      {&names.q, "q"},
      {&names.block_table, "block_table"},
      {&names.lengths_k, "lengths_k"},
      {&names.cu_seqlens_q, "cu_seqlens_q"},
      {&names.cu_seqlens_k, "cu_seqlens_k"},
      {&names.q_offset, "q_offset"},
      {&names.sinks, "sinks"}};
  std::vector<WholeTensor> tensors;
  for (const auto& [name, role] : others) {
    const auto found = find_optional(file, *name, role);
    if (!found) continue;
    WholeTensor& copied = tensors.emplace_back();
    copied.tensor = {std::string(role), found->info->dtype, found->info->shape};
    copied.bytes.resize(static_cast<std::size_t>(found->info->bytes()));
    found->shard->read(*found->info, 0, copied.bytes);
    found->shard->check_unchanged();
  }
  return tensors;
}

CacheRows read_cache(const InputRequest& input, int threads, const CacheCheck& check) {
  return std::visit([&](const auto& request) { return read_rows_of(request, threads, check); }, input);
}

}  // namespace ringattn
