// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "base/memory.hpp"
#include "base/philox.hpp"
#include "base/rank_liveness.hpp"
#include "kernels/attention/oracle.hpp"
#include "ops/attention_jobs/same_precision_row.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kStagedTokens = 1024;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A sample and all values computed for it.
struct CheckedRow {
  RowSample sample;
  std::int64_t row = 0;  // index among this rank's results
  TileRange tiles;       // tiles that the kernel computes
  SamePrecisionRow same_precision;
  bool tainted = false;  // a computed tile holds a non-finite V
};

// Calls visit(i) for independent rows, on at most as many threads as there are rows.
template <typename Visit>
void for_each_row(std::size_t rows, [[maybe_unused]] int threads, const Visit& visit) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::size_t i = 0; i < rows; ++i) visit(i);
}

// Streams the keys of `range` in a sequence that begins at packed token `origin`, in pieces.
template <typename Visit>
void stream_keys(const AccuracyInputs& inputs, std::int64_t origin, KeyRange range, const Visit& visit) {
  const AttentionSpec& spec = inputs.job.spec;
  const std::int64_t piece = std::min(kStagedTokens, range.end - range.begin);
  const std::size_t element = size_of(spec.dtype);
  const Buffer k_bytes = allocate_host(static_cast<std::size_t>(piece * spec.kv_heads * spec.head_dim) * element);
  const Buffer v_bytes = allocate_host(static_cast<std::size_t>(piece * spec.kv_heads * spec.head_dim_v) * element);
  for (std::int64_t key = range.begin; key < range.end; key += piece) {
    heartbeat();
    const std::int64_t tokens = std::min(piece, range.end - key);
    const MutableTensorView k =
        dense_view(static_cast<void*>(k_bytes.data()), spec.dtype, tokens, spec.kv_heads, spec.head_dim);
    const MutableTensorView v =
        dense_view(static_cast<void*>(v_bytes.data()), spec.dtype, tokens, spec.kv_heads, spec.head_dim_v);
    const PackedRun run{origin + key, origin + key + tokens};
    inputs.k({&run, 1}, k);
    inputs.v({&run, 1}, v);
    visit(key, TensorView(k), TensorView(v));
  }
}

// Whether any V of the key tiles of `row`, in its own K/V head, is not finite.
bool taints(const TensorView& v, std::int64_t first_key, const CheckedRow& row, std::int64_t key_tile) {
  const std::int64_t begin = std::max(row.tiles.begin * key_tile, first_key);
  const std::int64_t end = std::min(row.tiles.end * key_tile, first_key + v.tokens);
  for (std::int64_t key = begin; key < end; ++key) {
    if (!row.same_precision.lists(key)) continue;
    const std::byte* at = v.at(key - first_key, row.same_precision.kv_head());
    for (std::int64_t i = 0; i < v.dim; ++i, at += size_of(v.dtype)) {
      if (!std::isfinite(load_element(at, v.dtype))) return true;
    }
  }
  return false;
}

enum class Kind { kFinite, kNan, kPlus, kMinus };
Kind kind_of(double value) {
  if (std::isnan(value)) return Kind::kNan;
  if (std::isinf(value)) return value > 0 ? Kind::kPlus : Kind::kMinus;
  return Kind::kFinite;
}

void note_misplaced(Accuracy& accuracy, const RowSample& sample) {
  if (accuracy.misplaced++ == 0) accuracy.first_misplaced = sample;
}

void round_all(Dtype dtype, std::vector<float>& values) {
  for (float& value : values) value = rounded(dtype, value);
}

// `infinite`: MLA's columns whose w_uv isn't finite. O isn't finite there either; whether it is NaN or ∞ depends on the
// order of a form's products.
void judge_out(const AttentionSpec& spec, const CheckedRow& row, const std::vector<double>& oracle,
               const std::vector<float>& same_precision, const std::vector<bool>& infinite, const TensorView& out,
               Accuracy& accuracy) {
  const std::byte* at = out.at(row.row, row.sample.head);
  for (std::size_t i = 0; i < oracle.size(); ++i, at += size_of(spec.dtype)) {
    const auto value = static_cast<double>(load_element(at, spec.dtype));
    // Values beyond the dtype's range round to ∞.
    const auto expected = static_cast<double>(rounded(spec.dtype, static_cast<float>(oracle[i])));
    if (kind_of(value) != kind_of(expected)) {
      const bool either = row.tainted || (!infinite.empty() && infinite[i] && !std::isfinite(expected));
      if (!either || std::isfinite(value)) note_misplaced(accuracy, row.sample);
      continue;
    }
    if (!std::isfinite(expected)) continue;
    ++accuracy.compared;
    const double error = std::abs(value - oracle[i]);
    if (error > accuracy.error) {
      accuracy.error = error;
      accuracy.worst = row.sample;
    }
    const double simple = std::abs(static_cast<double>(same_precision[i]) - oracle[i]);
    if (std::isfinite(simple)) accuracy.same_precision_error = std::max(accuracy.same_precision_error, simple);
  }
}

void judge_lse(const AttentionSpec& spec, bool latents, const CheckedRow& row, double oracle, double value,
               Accuracy& accuracy) {
  if (kind_of(value) != kind_of(static_cast<double>(static_cast<float>(oracle)))) {
    note_misplaced(accuracy, row.sample);
    return;
  }
  if (!std::isfinite(value)) return;
  double allowed = spec.dtype == Dtype::kF32 ? kLseRelativeF32 * std::max(1.0, std::abs(oracle))
                                             : std::max(kLseAbsolute16Bit, kLseRelative16Bit * std::abs(oracle));
  if (latents) {
    allowed = 1.0;  // until check_result() knows
    const double simple = std::abs(static_cast<double>(row.same_precision.lse()) - oracle);
    if (std::isfinite(simple)) {
      accuracy.same_precision_lse_error = std::max(accuracy.same_precision_lse_error, simple);
    }
  }
  const double error = std::abs(value - oracle) / allowed;
  if (error > accuracy.lse_error || accuracy.lse_allowed == 0.0) {
    accuracy.lse_error = error;
    accuracy.lse_allowed = allowed;
    accuracy.worst_lse = row.sample;
  }
}

// Judges a row whose keys were all fed.
Accuracy accuracy_of_row(const AccuracyInputs& inputs, CheckedRow& row, OracleRow& oracle, const TensorView& out,
                         const RowView& lse) {
  const AttentionSpec& spec = inputs.job.spec;
  const MlaProjections* const latents = inputs.latents;
  std::vector<double> expected;
  const double sink = spec.sinks ? static_cast<double>(inputs.sinks[row.sample.head]) : 0.0;
  const double expected_lse = oracle.finish(sink, expected);
  std::vector<float> same_precision = row.same_precision.finish();
  std::vector<bool> infinite;
  // Expanded, nothing is multiplied by w_uv for a row that sees no keys.
  const bool nothing = row.tiles.empty() && latents != nullptr && latents->form == MlaForm::kExpanded;
  if (nothing) {
    expected.assign(static_cast<std::size_t>(latents->spec.head_dim_v), 0.0);
    same_precision.assign(expected.size(), 0.0F);
  } else if (latents != nullptr) {
    infinite = non_finite_values(*latents, row.sample.head);
    expected = output_from_latent<double>(*latents, row.sample.head, expected);
    same_precision = output_from_latent<float>(*latents, row.sample.head, same_precision);
    round_all(spec.dtype, same_precision);
  }
  Accuracy accuracy;
  accuracy.rows = 1;
  judge_out(spec, row, expected, same_precision, infinite, out, accuracy);
  if (lse.data != nullptr) {
    const auto value = static_cast<double>(lse.at(row.row, row.sample.head));
    judge_lse(spec, latents != nullptr, row, expected_lse, value, accuracy);
  }
  return accuracy;
}

// The samples of one sequence that this rank owns.
void check_sequence(const AccuracyInputs& inputs, std::size_t sequence, std::int64_t origin_q, std::int64_t origin_k,
                    std::span<const std::pair<RowSample, std::int64_t>> samples, const TensorView& out,
                    const RowView& lse, Accuracy& accuracy, std::vector<RowError>* each) {
  const AttentionSpec& spec = inputs.job.spec;
  const Sequence& shape = inputs.job.batch.sequences[sequence];
  std::vector<CheckedRow> rows;
  std::vector<OracleRow> oracles;
  const MlaProjections* const latents = inputs.latents;
  const int q_dim = latents != nullptr ? latents->spec.head_dim + latents->spec.rope_dim : spec.head_dim;
  const Buffer q_bytes =
      allocate_host(static_cast<std::size_t>(spec.heads) * static_cast<std::size_t>(q_dim) * size_of(spec.dtype));
  const MutableTensorView q = dense_view(static_cast<void*>(q_bytes.data()), spec.dtype, 1, spec.heads, q_dim);
  KeyRange range{shape.k_len, 0};
  for (const auto& [sample, row] : samples) {
    const PackedRun run{sample.token, sample.token + 1};
    inputs.q({&run, 1}, q);
    std::vector<float> q_row;
    load_row(q, 0, sample.head, q_row);
    const std::int64_t position = sample.token - origin_q + shape.q_offset;
    const BlockMaskKeys listed =
        block_mask_keys(inputs.job.block_mask.get(), spec.heads, sequence, sample.head, position);
    std::vector<double> exact(q_row.begin(), q_row.end());
    if (latents != nullptr) {
      exact = query_to_latent<double>(*latents, sample.head, q_row);
      q_row = query_to_latent<float>(*latents, sample.head, q_row);
      round_all(spec.dtype, q_row);
    }
    const PositionsOfKeys positions =
        positions_of(inputs.job.positions.get(), sequence, sample.head / (spec.heads / spec.kv_heads));
    oracles.emplace_back(spec, sample.head, position, shape.k_len, std::move(exact), listed, positions);
    const float sink = spec.sinks ? inputs.sinks[sample.head] : -kInfinity;
    const TileSizes sizes{inputs.kernel.query_tile, inputs.kernel.key_tile};
    const TileRange tiles = positions.empty() ? Visibility(spec.mask, shape.k_len).tiles(position, sizes)
                                              : PositionedVisibility(spec.mask, positions).tiles(position, 1, sizes);
    rows.push_back(
        {sample, row, tiles,
         SamePrecisionRow(spec, sample.head, position, shape.k_len, listed, positions, std::move(q_row), sink), false});
    if (tiles.empty()) continue;
    range.begin = std::min(range.begin, tiles.begin * inputs.kernel.key_tile);
    range.end = std::max(range.end, std::min(tiles.end * inputs.kernel.key_tile, shape.k_len));
  }
  if (range.begin < range.end) {
    stream_keys(inputs, origin_k, range, [&](std::int64_t first_key, const TensorView& k, const TensorView& v) {
      for_each_row(rows.size(), inputs.threads, [&](std::size_t i) {
        feed_rows({&oracles[i], 1}, first_key, k, v);
        rows[i].same_precision.find_maximum(first_key, k);
        rows[i].tainted = rows[i].tainted || taints(v, first_key, rows[i], inputs.kernel.key_tile);
      });
    });
    stream_keys(inputs, origin_k, range, [&](std::int64_t first_key, const TensorView& k, const TensorView& v) {
      for_each_row(rows.size(), inputs.threads,
                   [&](std::size_t i) { rows[i].same_precision.accumulate(first_key, k, v); });
    });
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Accuracy row = accuracy_of_row(inputs, rows[i], oracles[i], out, lse);
    if (each != nullptr) each->push_back({rows[i].sample, row.error, row.lse_error, row.misplaced > 0});
    merge(row, accuracy);
  }
}

double mla_lse_slack(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return kMlaLseAbsoluteF32;
    case Dtype::kBf16:
      return kMlaLseAbsoluteBf16;
    case Dtype::kF16:
      return kLseAbsolute16Bit;
  }
  return 0.0;
}

}  // namespace

std::vector<RowSample> sample_rows(const Job& job, std::int64_t count, std::uint64_t seed) {
  const std::int64_t tokens = job.batch.q_tokens();
  const std::int64_t heads = job.spec.heads;
  std::vector<RowSample> samples;
  if (tokens <= count / heads) {
    for (std::int64_t row = 0; row < tokens * heads; ++row) {
      samples.push_back({row / heads, static_cast<int>(row % heads)});
    }
    return samples;
  }
  // Rows are numbered token · heads + head. The samples cycle through the heads, so that all heads are checked.
  std::set<std::pair<std::int64_t, int>> chosen{{0, 0}};
  if (count > 1) chosen.insert({tokens - 1, static_cast<int>(heads - 1)});
  for (std::uint32_t i = 0; static_cast<std::int64_t>(chosen.size()) < count; ++i) {
    const PhiloxWords words = philox4x32_10({{i, 0, 0, 0}}, seed);
    const std::uint64_t random = std::uint64_t{words.word[0]} << 32 | words.word[1];
    chosen.insert({static_cast<std::int64_t>(random % static_cast<std::uint64_t>(tokens)),
                   static_cast<int>(i % static_cast<std::uint32_t>(heads))});
  }
  for (const auto& [token, head] : chosen) samples.push_back({token, head});
  return samples;
}

std::int64_t few_rows(const Job& job) {
  constexpr std::int64_t kKeys = 1 << 21;         // for all rows together
  constexpr std::int64_t kKeysOfShortRows = 256;  // the cost of a row besides its keys, in keys
  std::int64_t longest = kKeysOfShortRows;
  for (const std::int64_t length : job.batch.k_lengths()) longest = std::max(longest, length);
  return std::max<std::int64_t>(64, kKeys / longest);
}

Accuracy check_rows(const AccuracyInputs& inputs, std::span<const RowSample> samples, std::span<const PackedRun> runs,
                    const TensorView& out, const RowView& lse, std::vector<RowError>* each) {
  Accuracy accuracy;
  const std::vector<std::int64_t> cu_q = inputs.job.batch.cu_q();
  const std::vector<std::int64_t> cu_k = inputs.job.batch.cu_k();
  // The samples that are this rank's, with their rows, by sequence.
  std::vector<std::vector<std::pair<RowSample, std::int64_t>>> mine(inputs.job.batch.sequences.size());
  std::int64_t row = 0;
  for (const PackedRun& run : runs) {
    for (const RowSample& sample : samples) {
      if (sample.token < run.begin || sample.token >= run.end) continue;
      const auto sequence = std::upper_bound(cu_q.begin(), cu_q.end() - 1, sample.token) - cu_q.begin() - 1;
      mine[static_cast<std::size_t>(sequence)].emplace_back(sample, row + sample.token - run.begin);
    }
    row += run.tokens();
  }
  for (std::size_t s = 0; s < mine.size(); ++s) {
    if (!mine[s].empty()) {
      check_sequence(inputs, s, cu_q[s], cu_k[s], mine[s], out, lse, accuracy, each);
    }
  }
  return accuracy;
}

Accuracy check_result(const Collective& collective, const JobInput& input, const KernelShape& kernel,
                      std::int64_t count, std::span<const PackedRun> runs, const TensorView& out, const RowView& lse,
                      int threads, std::vector<RowError>* each) {
  constexpr std::uint64_t kSampleSeed = 20;  // any; the same rows each time
  const auto reader = [&input, threads](SyntheticTensor tensor) {
    return [&input, threads, tensor](std::span<const PackedRun> wanted, const MutableTensorView& rows) {
      input.read(tensor, wanted, rows, threads);
    };
  };
  Job job = input.job();
  AccuracyInputs inputs{job,
                        kernel,
                        input.sinks().empty() ? nullptr : input.sinks().data(),
                        reader(SyntheticTensor::kQ),
                        reader(SyntheticTensor::kK),
                        reader(SyntheticTensor::kV),
                        threads};
  std::optional<LoadedMlaProjections> latents;
  if (const MlaJob* const mla = input.mla()) {
    collective.run_collectively([&] { latents.emplace(input, threads); });
    job.spec = absorbed_spec(mla->spec);
    inputs.latents = &latents->matrices;
    inputs.k = [&](std::span<const PackedRun> wanted, const MutableTensorView& rows) {
      read_latent_keys(input, wanted, rows, threads);
    };
    inputs.v = reader(SyntheticTensor::kLatent);
  }
  const std::vector<RowSample> samples = sample_rows(job, count, kSampleSeed);
  // Estimated for the case that one rank owns all sampled rows. A processor core computes about 1e9 products per second
  // in fp64.
  const double products = static_cast<double>(samples.size()) * static_cast<double>(job.batch.k_tokens()) *
                          (job.spec.head_dim + job.spec.head_dim_v);
  Accuracy mine;
  collective.run_collectively([&] { mine = check_rows(inputs, samples, runs, out, lse, each); }, products * 1e-9);
  Accuracy all = combine(collective, mine);
  if (latents) all.out_factor = kMlaOutFactor;
  if (latents && all.lse_allowed > 0.0) {
    all.lse_allowed = 2.0 * all.same_precision_lse_error + mla_lse_slack(job.spec.dtype);
    all.lse_error /= all.lse_allowed;
    if (each != nullptr) {
      for (RowError& row : *each) row.lse_error /= all.lse_allowed;
    }
  }
  return all;
}

}  // namespace ringattn
