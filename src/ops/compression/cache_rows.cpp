// SPDX-License-Identifier: Apache-2.0
#include "ops/compression/cache_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "io/tensor_checks.hpp"
#include "ops/attention_jobs/compressed_tensors.hpp"
#include "ops/attention_jobs/position_tensors.hpp"
#include "ops/compression/finite_tensor.hpp"

namespace ringattn {

namespace {

std::vector<std::int64_t> differences(const std::vector<std::int64_t>& cu) {
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 1; i < cu.size(); ++i) lengths.push_back(cu[i] - cu[i - 1]);
  return lengths;
}

// Lengths of the keys in a file that may have no queries.
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

CacheRows find_rows_of(const FileInput& input, int) {
  const auto file = std::make_shared<const SafetensorsFile>(input.path);
  if (holds_compressed(*file)) refuse_kind(*file, "a compressed cache");
  if (holds_positions(*file)) refuse_kind(*file, "a cache with evicted tokens");
  const InputNames names = resolve_names(*file, input.names, JobKind::kAttention);
  const TensorSource k = file->tensor(names.k.value_or("k"));
  const TensorSource v = file->tensor(names.v.value_or("v"));
  const RowGrid k_grid = row_grid(k, input.order);
  const RowGrid v_grid = row_grid(v, input.order);
  CacheRows cache;
  cache.what = "k and v of " + file->path();
  cache.k = {row_dtype(k), k_grid.heads, k_grid.dim};
  cache.v = {row_dtype(v), v_grid.heads, v_grid.dim};
  require(v_grid.heads == k_grid.heads && v_grid.tokens() == k_grid.tokens() && cache.v.dtype == cache.k.dtype, v,
          fmt::format("k is {} [{} tokens, {} heads]", file_dtype_name(k.info->dtype), k_grid.tokens(), k_grid.heads),
          "k and v are of the same tokens and K/V heads.");
  check_extents(k, k_grid);
  check_extents(v, v_grid);
  cache.grid = k_grid;
  cache.lengths = key_lengths(*file, names, k, k_grid);
  cache.others = find_others(*file, names);
  cache.unread = unread_beside(*file, names, input.names, {k, v});
  cache.read = [file, k, v, k_grid, v_grid, shape_k = cache.k, shape_v = cache.v](SyntheticTensor tensor) {
    const bool keys = tensor == SyntheticTensor::kK;
    const RowGrid& grid = keys ? k_grid : v_grid;
    const RowShape& shape = keys ? shape_k : shape_v;
    const PackedRun all{0, grid.tokens()};
    std::vector<std::byte> rows(bytes_of(shape, all.tokens()));
    read_rows(keys ? k : v, grid, {&all, 1}, view_of(rows, shape, all.tokens()));
    return rows;
  };
  cache.check_finite = [file, k, v, k_grid, v_grid, shape_k = cache.k, shape_v = cache.v, names](bool compared) {
    if (const auto found = find_non_finite(k)) {
      refuse_invalid_element("k", {}, shape_k, invalid_element_at(*found, k_grid), ErrorCode::kFile);
    }
    if (const auto found = find_non_finite(v)) {
      refuse_invalid_element("v", {}, shape_v, invalid_element_at(*found, v_grid), ErrorCode::kFile);
    }
    if (compared) check_compared_queries(*file, names);
  };
  return cache;
}

CacheRows find_rows_of(const SyntheticInput& input, int threads) {
  const auto job = std::make_shared<const JobInput>(input, Numerics{});
  if (job->mla() != nullptr || job->decodes()) {
    fail(ErrorCode::kUsage, {setting("op", op_name(job->op()))}, "keys and values in rows are compressed",
         {"Leave it out: ", setting("op", "attention"), "."});
  }
  const AttentionSpec& spec = job->job().spec;
  CacheRows cache;
  cache.what = "the keys and values of a seed";
  cache.k = {spec.dtype, spec.kv_heads, spec.head_dim};
  cache.v = {spec.dtype, spec.kv_heads, spec.head_dim_v};
  cache.lengths = job->job().batch.k_lengths();
  cache.read = [job, threads, shape_k = cache.k, shape_v = cache.v](SyntheticTensor tensor) {
    const RowShape& shape = tensor == SyntheticTensor::kK ? shape_k : shape_v;
    const PackedRun all{0, job->job().batch.k_tokens()};
    std::vector<std::byte> rows(bytes_of(shape, all.tokens()));
    job->read(tensor, {&all, 1}, view_of(rows, shape, all.tokens()), threads);
    return rows;
  };
  cache.check_finite = [](bool) {};  // synthetic rows are finite
  WholeTensor& q = cache.others.emplace_back();
  const std::int64_t q_tokens = job->job().batch.q_tokens();
  const RowShape q_shape{spec.dtype, spec.heads, spec.head_dim};
  q.read = [job, threads, q_shape](std::int64_t offset, std::span<std::byte> target) {
    const auto row = static_cast<std::int64_t>(bytes_of(q_shape, 1));
    const PackedRun run{offset / row, (offset + static_cast<std::int64_t>(target.size())) / row};
    job->read(SyntheticTensor::kQ, {&run, 1},
              dense_view(static_cast<void*>(target.data()), q_shape.dtype, run.tokens(), q_shape.heads, q_shape.dim),
              threads);
  };
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

InvalidElement invalid_element_at(const NonFiniteElement& found, const RowGrid& grid) {
  InvalidElement invalid{InvalidElement::Kind::kNotFinite, 0, 0, 0, found.element % grid.dim, found.value};
  const std::int64_t row = found.element / grid.dim;
  if (grid.head_major()) {
    const std::int64_t entry = row / (grid.heads * grid.length);
    invalid.token = entry * grid.length + row % grid.length;
    invalid.head = row / grid.length % grid.heads;
  } else {
    invalid.token = row / grid.heads;
    invalid.head = row % grid.heads;
  }
  return invalid;
}

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

WholeTensor stored_tensor(std::string_view name, const TensorSource& source) {
  WholeTensor whole;
  whole.tensor = {std::string(name), source.info->dtype, source.info->shape};
  whole.read = [source](std::int64_t offset, std::span<std::byte> target) {
    source.shard->read(*source.info, offset, target);
    source.shard->check_unchanged();
  };
  return whole;
}

void replace_tensor(std::vector<WholeTensor>& tensors, WholeTensor with) {
  std::erase_if(tensors, [&](const WholeTensor& other) { return other.tensor.name == with.tensor.name; });
  tensors.push_back(std::move(with));
}

namespace {

std::vector<std::pair<std::string_view, TensorSource>> other_sources(const SafetensorsFile& file,
                                                                     const InputNames& names) {
  const std::pair<const std::optional<std::string>*, std::string_view> others[] = {
      {&names.q, "q"},
      {&names.block_table, "block_table"},
      {&names.lengths_k, "lengths_k"},
      {&names.cu_seqlens_q, "cu_seqlens_q"},
      {&names.cu_seqlens_k, "cu_seqlens_k"},
      {&names.q_offset, "q_offset"},
      {&names.sinks, "sinks"}};
  std::vector<std::pair<std::string_view, TensorSource>> sources;
  for (const auto& [name, role] : others) {
    if (const auto found = find_optional(file, *name, role)) sources.emplace_back(role, *found);
  }
  return sources;
}

}  // namespace

std::vector<WholeTensor> find_others(const SafetensorsFile& file, const InputNames& names) {
  std::vector<WholeTensor> tensors;
  for (const auto& [role, source] : other_sources(file, names)) tensors.push_back(stored_tensor(role, source));
  return tensors;
}

UnreadTensors unread_beside(const SafetensorsFile& file, const InputNames& names, const InputNames& given,
                            std::vector<TensorSource> used) {
  for (const auto& [role, source] : other_sources(file, names)) used.push_back(source);
  return unread_tensors(file, used, given);
}

void check_compared_queries(const SafetensorsFile& file, const InputNames& names) {
  if (const auto found = find_optional(file, names.q, "q")) check_compared(*found, "q");
}

void check_extents(const TensorSource& tensor, const RowGrid& grid) {
  constexpr std::int64_t kMost = 1 << 16;
  require(grid.heads > 0 && grid.dim > 0, tensor, "it needs at least one head and one dim",
          {setting("order"), " says which axis is which."});
  require(grid.heads <= kMost && grid.dim <= kMost, tensor,
          fmt::format("at most {} heads and dims are possible", kMost),
          {setting("order"), " says which axis is which."});
}

CacheRows find_cache_rows(const InputRequest& input, int threads) {
  return std::visit([&](const auto& request) { return find_rows_of(request, threads); }, input);
}

}  // namespace ringattn
