// SPDX-License-Identifier: Apache-2.0
#include "ops/compression/evict_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "ops/compression/finite_tensor.hpp"

namespace ringattn {

namespace {

// `first`: the packed token of the first row.
void refuse_non_finite(std::string_view name, const TensorView& rows, std::int64_t first = 0) {
  auto invalid = find_invalid_element(rows);
  if (!invalid) return;
  invalid->token += first;
  refuse_invalid_element(name, {}, {rows.dtype, rows.heads, rows.dim}, *invalid, ErrorCode::kFile);
}

// The last queries of a sequence.
struct Window {
  RowShape shape;
  std::vector<std::byte> rows;
  std::int64_t count = 0;

  TensorView view() { return view_of(rows, shape, count); }
};
// `end`: end of the sequence, in packed queries.
Window last_queries(const JobInput& input, std::size_t sequence, std::int64_t end, std::int64_t most, int threads) {
  const Job& job = input.job();
  Window window{{job.spec.dtype, job.spec.heads, job.spec.head_dim}, {}, 0};
  window.count = std::min(most, job.batch.sequences[sequence].q_len);
  window.rows.resize(bytes_of(window.shape, window.count));
  const PackedRun run{end - window.count, end};
  input.read(SyntheticTensor::kQ, {&run, 1}, view_of(window.rows, window.shape, window.count), threads);
  refuse_non_finite("q", window.view(), run.begin);
  return window;
}

// The kept rows of a tensor.
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
    gather_tokens(rows_of_view(from, token, cache.lengths[s]),
                  positions.subspan(static_cast<std::size_t>(row * heads), static_cast<std::size_t>(kept[s] * heads)),
                  rows_of_view(to, row, kept[s]));
    token += cache.lengths[s];
    row += kept[s];
  }
  return left;
}

}  // namespace

void check_eviction(const Eviction& eviction, const InputRequest& input, const Numerics& numerics,
                    const CacheRows& cache) {
  for (const std::int64_t length : cache.lengths) {
    if (length <= std::numeric_limits<std::int32_t>::max()) continue;
    fail(ErrorCode::kUnsupported, fmt::format("tokens are evicted from a sequence of {}", length),
         "the positions of those that are left lie below 2^31", "Give shorter sequences.");
  }
  const auto& [method, options] = eviction;
  if (!method->needs_queries || !cache.has("q")) return;
  const JobInput job(input, numerics);
  for (std::size_t s = 0; s < cache.lengths.size(); ++s) {
    check_queries(eviction, cache.lengths[s] == 0 || job.job().batch.sequences[s].q_len > 0, s);
  }
  if (job.seed()) return;  // synthetic input is finite
  const AttentionSpec& spec = job.job().spec;
  const RowShape shape{spec.dtype, spec.heads, spec.head_dim};
  const std::int64_t most = std::max<std::int64_t>(1, kPartBytes / std::max<std::int64_t>(1, token_bytes({}, shape)));
  std::vector<std::byte> rows;
  std::int64_t end = 0;
  for (const Sequence& sequence : job.job().batch.sequences) {
    heartbeat();
    end += sequence.q_len;
    for (std::int64_t first = end - std::min(options.window, sequence.q_len); first < end; first += most) {
      const PackedRun run{first, std::min(first + most, end)};
      rows.resize(bytes_of(shape, run.tokens()));
      const MutableTensorView view = view_of(rows, shape, run.tokens());
      job.read(SyntheticTensor::kQ, {&run, 1}, view, 1);
      refuse_non_finite("q", view, first);
    }
  }
}

double eviction_bytes(const Eviction& eviction, double ratio, const CacheRows& cache) {
  const auto& [method, options] = eviction;
  std::int64_t longest = 0, kept = 0;
  for (const std::int64_t length : cache.lengths) {
    longest = std::max(longest, length);
    kept += kept_tokens(length, ratio);
  }
  const auto of = [](std::int64_t tokens, double bytes) { return static_cast<double>(tokens) * bytes; };
  const auto heads = static_cast<double>(options.shared ? 1 : cache.k.heads);
  const auto k_bytes = static_cast<double>(token_bytes({}, cache.k));
  const auto v_bytes = static_cast<double>(token_bytes({}, cache.v));
  // Memory for one sequence at a time: scores in fp64, twice if neighbours are averaged; the order of tokens; and the
  // scores of a head's last queries.
  double scores = static_cast<double>(cache.k.heads) * 8.0 * (options.pool > 1 ? 2.0 : 1.0) + 4.0;
  if (method->needs_queries) scores += 4.0 * static_cast<double>(std::min(options.window, longest)) + 8.0;
  // The kept rows of k are in memory with k and v, then with v and its kept rows.
  const double all = of(cache.tokens(), k_bytes + v_bytes);
  const double left = of(kept, k_bytes) + std::max(all, of(cache.tokens(), v_bytes) + of(kept, v_bytes));
  return of(kept, 8.0 * heads) + std::max(all + of(longest, scores), left);
}

void evict(const Eviction& eviction, double ratio, const InputRequest& input, const Numerics& numerics, int threads,
           CacheRows& cache) {
  const auto& [method, options] = eviction;
  std::optional<JobInput> job;
  if (method->needs_queries && cache.has("q")) job.emplace(input, numerics);
  const std::int64_t heads = options.shared ? 1 : cache.k.heads;
  std::vector<std::int64_t> kept;
  std::vector<std::int32_t> positions;
  const TensorView keys = view_of(cache.k_rows, cache.k, cache.tokens());
  std::int64_t first = 0, queries = 0;
  for (std::size_t s = 0; s < cache.lengths.size(); ++s) {
    heartbeat();
    const std::int64_t tokens = cache.lengths[s];
    ScoredTokens scored;
    scored.keys = rows_of_view(keys, first, tokens);
    scored.threads = threads;
    Window window;
    if (job) {
      const AttentionSpec& spec = job->job().spec;
      const Sequence& sequence = job->job().batch.sequences[s];
      queries += sequence.q_len;
      window = last_queries(*job, s, queries, options.window, threads);
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
  replace_tensor(cache.others, whole_tensor("k_positions", FileDtype::kI32, {cache.tokens(), heads}, positions));
  replace_tensor(cache.others,
                 whole_tensor("k_lengths", FileDtype::kI32, {static_cast<std::int64_t>(kept.size())}, whole));
}

std::int64_t position_bytes(const CacheRows& cache) {
  std::int64_t bytes = 0;
  for (const WholeTensor& tensor : cache.others) {
    const bool counts = tensor.tensor.name == "k_positions" || tensor.tensor.name == "k_lengths";
    bytes += counts ? static_cast<std::int64_t>(tensor.bytes.size()) : 0;
  }
  return bytes;
}

}  // namespace ringattn
