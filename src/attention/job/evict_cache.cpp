// SPDX-License-Identifier: Apache-2.0
#include "attention/job/evict_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/pulse.hpp"
#include "kernels/compressed_rows.hpp"

namespace ringattn {

namespace {

template <class Number>
WholeTensor whole_tensor(std::string name, FileDtype dtype, std::vector<std::int64_t> shape,
                         const std::vector<Number>& numbers) {
  const auto bytes = std::as_bytes(std::span(numbers));
  return {{std::move(name), dtype, std::move(shape)}, {bytes.begin(), bytes.end()}};
}

// `first`: the packed token of the first row.
void refuse_non_finite(std::string_view name, const TensorView& rows, std::int64_t first = 0) {
  auto fault = find_fault(rows);
  if (!fault) return;
  fault->token += first;
  refuse_fault(name, {}, {rows.dtype, rows.heads, rows.dim}, *fault, ErrorCode::kFile);
}

// The last queries of a sequence.
struct Window {
  RowShape shape;
  std::vector<std::byte> rows;
  std::int64_t count = 0;

  TensorView view() { return view_of(rows, shape, count); }
};
Window last_queries(const JobInput& input, std::size_t sequence, std::int64_t most, int threads) {
  const Job& job = input.job();
  Window window{{job.spec.dtype, job.spec.heads, job.spec.head_dim}, {}, 0};
  window.count = std::min(most, job.batch.sequences[sequence].q_len);
  window.rows.resize(bytes_of(window.shape, window.count));
  const std::int64_t end = job.batch.cu_q()[sequence + 1];
  const PackedRun run{end - window.count, end};
  input.read(SyntheticTensor::kQ, {&run, 1}, view_of(window.rows, window.shape, window.count), threads);
  refuse_non_finite("q", window.view(), run.begin);
  return window;
}

// The rows that stay of a tensor.
std::vector<std::byte> left_of(std::vector<std::byte>& rows, const RowShape& shape, const CacheRows& cache,
                               std::span<const std::int64_t> kept, std::span<const std::int32_t> positions,
                               std::int64_t heads) {
  std::int64_t all = 0;
  for (const std::int64_t count : kept) all += count;
  std::vector<std::byte> left(bytes_of(shape, all));
  const TensorView from = view_of(rows, shape, cache.tokens());
  const MutableTensorView to = view_of(left, shape, all);
  std::int64_t token = 0, row = 0;
  for (std::size_t s = 0; s < kept.size(); ++s) {
    gather_tokens(part_of(from, token, cache.lengths[s]),
                  positions.subspan(static_cast<std::size_t>(row * heads), static_cast<std::size_t>(kept[s] * heads)),
                  part_of(to, row, kept[s]));
    token += cache.lengths[s];
    row += kept[s];
  }
  return left;
}

void replace(std::vector<WholeTensor>& tensors, WholeTensor with) {
  std::erase_if(tensors, [&](const WholeTensor& other) { return other.tensor.name == with.tensor.name; });
  tensors.push_back(std::move(with));
}

}  // namespace

void evict(const Eviction& eviction, double ratio, const InputRequest& input, const Numerics& numerics, int threads,
           CacheRows& cache) {
  const auto& [method, options] = eviction;
  std::optional<JobInput> job;
  if (method->needs_queries && cache.has("q")) job.emplace(input, numerics);
  refuse_non_finite("k", view_of(cache.k_rows, cache.k, cache.tokens()));
  refuse_non_finite("v", view_of(cache.v_rows, cache.v, cache.tokens()));
  const std::int64_t heads = options.shared ? 1 : cache.k.heads;
  std::vector<std::int64_t> kept;
  std::vector<std::int32_t> positions;
  std::int64_t first = 0;
  for (std::size_t s = 0; s < cache.lengths.size(); ++s) {
    beat();
    const std::int64_t tokens = cache.lengths[s];
    ScoredTokens scored;
    scored.keys = part_of(TensorView(view_of(cache.k_rows, cache.k, cache.tokens())), first, tokens);
    scored.threads = threads;
    Window window;
    if (job) {
      const FoldSpec& spec = job->job().spec;
      const Sequence& sequence = job->job().batch.sequences[s];
      window = last_queries(*job, s, options.window, threads);
      scored.queries = window.view();
      scored.position = sequence.q_offset + sequence.q_len - window.count;
      scored.mask = spec.mask;
      scored.softmax_scale = spec.softmax_scale;
      scored.softcap = spec.softcap;
    }
    kept.push_back(kept_tokens(tokens, ratio));
    const std::vector<std::int32_t> best =
        choose_tokens(fmt::format("scores of sequence {}", s), eviction, scored, kept.back());
    positions.insert(positions.end(), best.begin(), best.end());
    first += tokens;
  }
  cache.k_rows = left_of(cache.k_rows, cache.k, cache, kept, positions, heads);
  cache.v_rows = left_of(cache.v_rows, cache.v, cache, kept, positions, heads);
  std::vector<std::int32_t> whole;
  for (const std::int64_t length : cache.lengths) whole.push_back(static_cast<std::int32_t>(length));
  cache.lengths = kept;
  const auto sequences = static_cast<std::int64_t>(kept.size());
  replace(cache.others, whole_tensor("k_positions", FileDtype::kI32, {cache.tokens(), heads}, positions));
  replace(cache.others, whole_tensor("k_lengths", FileDtype::kI32, {sequences}, whole));
  if (cache.has("cu_seqlens_q") || cache.has("cu_seqlens_k")) {
    std::vector<std::int64_t> cu{0};
    for (const std::int64_t length : kept) cu.push_back(cu.back() + length);
    replace(cache.others, whole_tensor("cu_seqlens_k", FileDtype::kI64, {sequences + 1}, cu));
    cache.grid.length = cache.tokens();
  } else if (!kept.empty()) {
    cache.grid.length = kept.front();
  }
}

}  // namespace ringattn
