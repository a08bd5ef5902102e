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
// MLA: the same-precision reference computes the absorbed form, which rounds queries once more. The expanded form
// rounds keys and values instead. Its errors are as large, but they occur in other rows, and in a few rows the errors
// of the reference may be small by chance.
// ones by chance.
inline constexpr double kMlaOutFactor = 3.0;
// In addition to twice the same-precision error: four times the rms error that rounding n numbers to bf16 (2^-9 / √3
// each) causes in a score of normally distributed queries and keys, scaled by 1 / √n. For fp16 this is less than
// kLseAbsolute16Bit.
inline constexpr double kMlaLseAbsoluteBf16 = 4.5e-3;
inline constexpr double kMlaLseAbsoluteF32 = 1e-4;

// A query row of one head, by packed token.
struct RowSample {
  std::int64_t token = 0;
  int head = 0;

  bool operator==(const RowSample&) const = default;
};

// `count` different rows, ascending, including the first and the last; all rows if there are no more. Equal for equal
// seeds.
std::vector<RowSample> sample_rows(const Job& job, std::int64_t count, std::uint64_t seed);

// The number of rows that can be checked in about a second: all rows of small jobs, and at least 64. check_attention()
// in python/ringattn/testing.py has the same rule.
std::int64_t few_rows(const Job& job);

// Fills rows with the packed tokens of `runs`.
using ReadRows = std::function<void(std::span<const PackedRun> runs, const MutableTensorView& rows)>;

struct AccuracyInputs {
  const Job& job;
  KernelShape kernel;  // tiles: how far a non-finite value in V may spread
  const float* sinks;  // [heads], or null
  ReadRows q;
  ReadRows k;
  ReadRows v;
  int threads = 1;  // CPU threads
  // MLA only: dense matrices. `job` is then that of the absorbed form: k has the rows [latent, rotary key], v the
  // latents, and q and out are those of the heads. Null for attention.
  const MlaProjections* latents = nullptr;
};

// Trivially copyable, because ranks exchange it.
struct Accuracy {
  std::int64_t rows = 0;
  std::int64_t compared = 0;  // values of O that are finite here and in fp64
  double error = 0.0;         // the greatest error of these values
  RowSample worst;
  double same_precision_error = 0.0;
  double out_factor = kOutFactor;         // multiple of same_precision_error that is allowed
  double same_precision_lse_error = 0.0;  // MLA only
  double lse_error = 0.0;                 // the greatest, as a fraction of the allowed error
  double lse_allowed = 0.0;               // allowed error there; 0: no lse is finite, or none is compared
  RowSample worst_lse;
  std::int64_t misplaced = 0;  // values that are NaN or infinite where the oracle's are not, or the other way round
  RowSample first_misplaced;

  double allowed() const { return out_factor * same_precision_error + kOutSlack; }
  // A result without a finite value was not compared, and does not pass.
  bool passes() const { return compared > 0 && misplaced == 0 && error <= allowed() && lse_error <= 1.0; }
};

// Errors of one row. Trivially copyable, because ranks exchange it.
struct RowError {
  RowSample sample;
  double error = 0.0;      // of O, for values that are finite here and in fp64
  double lse_error = 0.0;  // as a fraction of the allowed error
  bool misplaced = false;
};

// Checks the samples among this rank's rows: `runs` with out, [rows, heads, head_dim_v], and lse, [rows, heads].
// Appends each row's errors to `each`, ascending, unless it is null.
Accuracy check_rows(const AccuracyInputs& inputs, std::span<const RowSample> samples, std::span<const PackedRun> runs,
                    const TensorView& out, const RowView& lse, std::vector<RowError>* each = nullptr);

// Merges `part` into `all`.
void merge(const Accuracy& part, Accuracy& all);
// Merges the checks of all ranks. Collective.
Accuracy combine(const Collective& collective, const Accuracy& mine);

// Checks `count` rows of a finished job, always the same ones, on whichever ranks they are, and returns the merged
// result on all ranks. `runs`, out and lse (without data: it is not compared) are this rank's rows in host memory.
// `threads`: CPU threads of this rank. `each` receives the errors of this rank's rows. Collective.
Accuracy check_result(const Collective& collective, const JobInput& input, const KernelShape& kernel,
                      std::int64_t count, std::span<const PackedRun> runs, const TensorView& out, const RowView& lse,
                      int threads, std::vector<RowError>* each = nullptr);

// The first row of any rank whose error exceeds what `all` allows. Collective.
std::optional<RowError> first_wrong_row(const Collective& collective, const Accuracy& all,
                                        std::span<const RowError> mine);

}  // namespace ringattn
