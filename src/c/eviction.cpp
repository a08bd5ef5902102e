// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/eviction.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/job.hpp"
#include "base/error.hpp"
#include "base/threads.hpp"
#include "c/jobs.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/compressed_rows.hpp"

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of the structs in their first interface version.
constexpr std::size_t kFirstEviction = 32, kFirstTensors = 56;
constexpr DLDataType kInt32[] = {{kDLInt, 32, 1}};

// The eviction method and the batch of a call.
struct Task {
  Task(const ringattn_eviction* given, const ringattn_spec* given_spec, const ringattn_batch* given_batch) {
    const auto read = read_struct("ringattn_eviction", given, kFirstEviction);
    need(read.method, "ringattn_eviction::method");
    eviction = parse_eviction(read.method);
    threads = read_thread_count(read.threads);
    CacheFormat format;
    spec = read_spec(given_spec, format);
    check_heads(spec);
    check_mask(spec.mask);
    if (!format.is_plain()) {
      fail(ErrorCode::kUsage, "keys or values have a format", "tokens are evicted from plain rows",
           "Compress the rows that are kept.");
    }
    batch = read_batch(given_batch);
    check_batch(batch);
    for (const Sequence& sequence : batch.sequences) kept.push_back(kept_tokens(sequence.k_len, read.ratio));
    heads = eviction.options.shared ? 1 : spec.kv_heads;
  }

  Eviction eviction;
  int threads = 1;
  AttentionSpec spec;
  Batch batch;
  std::vector<std::int64_t> kept;  // number of tokens kept of each sequence
  std::int64_t heads = 1;          // number of heads with tokens of their own
};

// Rows [tokens, heads, dim] of the whole batch; empty for NULL.
MutableTensorView rows_of(const TensorReader& reader, const char* name, const DLTensor* tensor, Dtype dtype,
                          const std::array<std::int64_t, 3>& shape) {
  if (tensor == nullptr) return {};
  const MutableTensorView rows = reader.rows(name, tensor);
  if (rows.dtype == dtype && std::array{rows.tokens, rows.heads, rows.dim} == shape) return rows;
  fail(ErrorCode::kUsage,
       fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(rows.dtype), rows.tokens, rows.heads, rows.dim),
       fmt::format("it should be {} [{}, {}, {}]", dtype_name(dtype), shape[0], shape[1], shape[2]),
       "Check it against the batch and the spec.");
}

TensorView finite(std::string_view name, const TensorView& rows) {
  if (const auto invalid = rows.data == nullptr ? std::nullopt : find_invalid_element(rows)) {
    refuse_invalid_element(name, {}, {rows.dtype, rows.heads, rows.dim}, *invalid, ErrorCode::kUsage);
  }
  return rows;
}

// Selects the tokens, and writes the requested outputs.
void evict(const Task& task, const ringattn_eviction_tensors& tensors) {
  need(tensors.k, "k");
  need(tensors.positions, "positions");
  if (tensors.v_kept != nullptr) need(tensors.v, "v");
  try_thread_pool(task.threads);
  const AttentionSpec& spec = task.spec;
  const TensorReader reader(MemoryKind::kHost);
  std::int64_t left = 0;
  for (const std::int64_t count : task.kept) left += count;
  const std::int64_t keys = task.batch.k_tokens();
  const auto read = [&](const char* name, const DLTensor* tensor, std::int64_t tokens, int heads, int dim) {
    return rows_of(reader, name, tensor, spec.dtype, {tokens, heads, dim});
  };
  const TensorView q = read("q", tensors.q, task.batch.q_tokens(), spec.heads, spec.head_dim);
  const TensorView k = finite("k", read("k", tensors.k, keys, spec.kv_heads, spec.head_dim));
  const TensorView v = finite("v", read("v", tensors.v, keys, spec.kv_heads, spec.head_dim_v));
  const MutableTensorView k_kept = read("k_kept", tensors.k_kept, left, spec.kv_heads, spec.head_dim);
  const MutableTensorView v_kept = read("v_kept", tensors.v_kept, left, spec.kv_heads, spec.head_dim_v);
  const Part places = reader.part("positions", tensors.positions, kInt32, std::array{left, task.heads}, true);
  for (const char* const written : {"positions", "k_kept", "v_kept"}) reader.check_written(written);
  // Selects for all sequences before anything is written, so that an error leaves the outputs unchanged.
  std::vector<std::int32_t> positions;
  std::int64_t query = 0, key = 0;
  for (std::size_t s = 0; s < task.kept.size(); ++s) {
    const Sequence& sequence = task.batch.sequences[s];
    ScoredTokens scored;
    scored.keys = rows_of_view(k, key, sequence.k_len);
    if (q.data != nullptr && task.eviction.method->needs_queries) {
      check_queries(task.eviction, sequence.k_len == 0 || sequence.q_len > 0, s);
      const std::int64_t window = std::min(task.eviction.options.window, sequence.q_len);
      const std::int64_t first = query + sequence.q_len - window;
      scored.queries = rows_of_view(q, first, window);
      if (auto invalid = find_invalid_element(scored.queries)) {
        invalid->token += first;
        refuse_invalid_element("q", {}, {q.dtype, q.heads, q.dim}, *invalid, ErrorCode::kUsage);
      }
      scored.position = sequence.q_offset + sequence.q_len - window;
    }
    scored.mask = spec.mask;
    scored.softmax_scale = spec.softmax_scale;
    scored.softcap = spec.softcap;
    scored.threads = task.threads;
    const std::vector<std::int32_t> best =
        choose_tokens(fmt::format("scores of sequence {}", s), task.eviction, scored, task.kept[s]);
    positions.insert(positions.end(), best.begin(), best.end());
    query += sequence.q_len;
    key += sequence.k_len;
  }
  std::memcpy(places.data, positions.data(), positions.size() * sizeof(std::int32_t));
  std::int64_t row = 0;
  key = 0;
  for (std::size_t s = 0; s < task.kept.size(); ++s) {
    const std::span<const std::int32_t> own(positions.data() + row * task.heads,
                                            static_cast<std::size_t>(task.kept[s] * task.heads));
    const std::int64_t tokens = task.batch.sequences[s].k_len;
    if (k_kept.data != nullptr)
      gather_tokens(rows_of_view(k, key, tokens), own, rows_of_view(k_kept, row, task.kept[s]));
    if (v_kept.data != nullptr)
      gather_tokens(rows_of_view(v, key, tokens), own, rows_of_view(v_kept, row, task.kept[s]));
    row += task.kept[s];
    key += tokens;
  }
}

}  // namespace

extern "C" {

ringattn_status ringattn_eviction_kept(const ringattn_eviction* eviction, const ringattn_spec* spec,
                                       const ringattn_batch* batch, int64_t* kept, int64_t* heads) {
  return guarded([&] {
    need(kept, "kept");
    need(heads, "heads");
    const Task task(eviction, spec, batch);
    std::ranges::copy(task.kept, kept);
    *heads = task.heads;
  });
}

ringattn_status ringattn_evict(const ringattn_eviction* eviction, const ringattn_spec* spec,
                               const ringattn_batch* batch, const ringattn_eviction_tensors* tensors) {
  return guarded(
      [&] { evict(Task(eviction, spec, batch), read_struct("ringattn_eviction_tensors", tensors, kFirstTensors)); });
}

}  // extern "C"
