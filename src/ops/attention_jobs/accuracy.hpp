// SPDX-License-Identifier: Apache-2.0
// The promised accuracy, checked against the fp64 oracle on sampled rows: the greatest error of O is at most twice that
// of a same-precision reference, which rounds S and P to the input dtype and accumulates in fp32 (in runs of 128
// keys, so that its own error doesn't grow with the context), plus 1e-6. Keys and values are streamed, so rows of any
// length fit.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/mla/mla_projections.hpp"

namespace ringattn {

inline constexpr double kOutSlack = 1e-6;  // absolute, in addition to a multiple of the same-precision error:
inline constexpr double kOutFactor = 2.0;
inline constexpr double kLseRelativeF32 = 1e-5;       // of max(1, |lse|)
inline constexpr double kLseAbsolute16Bit = 1e-3;     // or, for large lse,
inline constexpr double kLseRelative16Bit = 0x1p-21;  // an fp32 score can't be told any finer
// MLA: the same-precision computation is that of the absorbed form, which rounds the queries once more. The expanded
// form rounds keys and values instead. Its errors are as large but not the same ones, and a few rows may have small
// ones by chance.
inline constexpr double kMlaOutFactor = 3.0;
// In addition to twice the same-precision error: four times the rms error that rounding n numbers to bf16 (2^-9 / √3 of
// each) makes in a score of normal queries and keys, scaled by 1 / √n. In fp16 that is less than kLseAbsolute16Bit.
inline constexpr double kMlaLseAbsoluteBf16 = 4.5e-3;
inline constexpr double kMlaLseAbsoluteF32 = 1e-4;

// A query row of one head, by packed token.
struct RowSample {
  std::int64_t token = 0;
  int head = 0;

  bool operator==(const RowSample&) const = default;
};

// `count` different rows, ascending, the first and the last among them; all rows if there are no more. The same for the
// same seed.
std::vector<RowSample> sample_rows(const Job& job, std::int64_t count, std::uint64_t seed);

// As many rows as take about a second: all rows of small jobs, and 64 at least. The rule of check_attention() in
// python/ringattn/testing.py.
std::int64_t few_rows(const Job& job);

// Fills rows with the packed tokens of `runs`.
using ReadRows = std::function<void(std::span<const PackedRun> runs, const MutableTensorView& rows)>;

struct AccuracyInputs {
  const Job& job;
  KernelShape kernel;  // tiles: what a non-finite value in V may reach
  const float* sinks;  // [heads], or null
  ReadRows q;
  ReadRows k;
  ReadRows v;
  int threads = 1;  // that compute
  // MLA only: dense matrices. `job` is then that of the absorbed form: k are the rows [latent, rotary key], v the
  // latents, and q and out are those of the heads. Null for attention.
  const MlaProjections* latents = nullptr;
};

// Plain bytes: ranks tell each other.
struct Accuracy {
  std::int64_t rows = 0;
  std::int64_t compared = 0;  // values of O, where both are finite
  double error = 0.0;         // of those, the greatest
  RowSample worst;
  double same_precision_error = 0.0;
  double out_factor = kOutFactor;         // of it that is allowed
  double same_precision_lse_error = 0.0;  // of latents
  double lse_error = 0.0;                 // the greatest, as a part of what is allowed
  double lse_allowed = 0.0;               // there; 0: no lse is finite, or none is compared
  RowSample worst_lse;
  std::int64_t misplaced = 0;  // values that are NaN or infinite where the oracle's are not, or the other way round
  RowSample first_misplaced;

  double allowed() const { return out_factor * same_precision_error + kOutSlack; }
  // A result without a finite value was not compared, and does not pass.
  bool passes() const { return compared > 0 && misplaced == 0 && error <= allowed() && lse_error <= 1.0; }
};

// Errors of one row; plain bytes, so that ranks can exchange them.
struct RowError {
  RowSample sample;
  double error = 0.0;      // of O, where both are finite
  double lse_error = 0.0;  // as a part of what is allowed
  bool misplaced = false;
};

// Checks the samples among this rank's rows: `runs` with out, [rows, heads, head_dim_v], and lse, [rows, heads]. Each
// row's errors go to `each`, where there is one, ascending.
Accuracy check_rows(const AccuracyInputs& inputs, std::span<const RowSample> samples, std::span<const PackedRun> runs,
                    const TensorView& out, const RowView& lse, std::vector<RowError>* each = nullptr);

// Merges `part` into `all`.
void merge(const Accuracy& part, Accuracy& all);
// All ranks' checks as one. Collective.
Accuracy combine(const Collective& collective, const Accuracy& mine);

// Checks `count` rows of a finished job, the same ones each time, wherever they lie: all ranks' answer. `runs`, out and
// lse (without data: it is not compared) are this rank's rows in host memory, `threads` those that compute on it;
// `each` gets the errors of this rank's rows. Collective.
Accuracy check_result(const Collective& collective, const JobInput& input, const KernelShape& kernel,
                      std::int64_t count, std::span<const PackedRun> runs, const TensorView& out, const RowView& lse,
                      int threads, std::vector<RowError>* each = nullptr);

// The first row of any rank that is worse than `all` allows. Collective.
std::optional<RowError> first_wrong_row(const Collective& collective, const Accuracy& all,
                                        std::span<const RowError> mine);

}  // namespace ringattn
