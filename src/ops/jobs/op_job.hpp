// SPDX-License-Identifier: Apache-2.0
// A job of any op, for programs that run, check and measure jobs without knowing which op computes them.
//
//   std::unique_ptr<OpJob> job = …;                  // its input is open
//   job->prepare(world, options);                    // collective: kernel, plan, memory
//   const RankFigures mine = job->run();             // collective: loads, computes, fetches
//   job->write({"out.safetensors"});                 // collective
//
// Ops derive from it in their own directories.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/options.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "io/fingerprint.hpp"
#include "io/input_names.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/common/op.hpp"
#include "ops/common/op_plan.hpp"
#include "ops/jobs/bench_job.hpp"
#include "ops/jobs/golden.hpp"
#include "ops/jobs/samples.hpp"

namespace ringattn {

class JsonWriter;
class ModelComparison;
struct KernelEntry;
struct KernelRequest;

// The values that the tensors of an input determine instead of shape settings, by the settings' names.
using InputShape = std::map<std::string, std::string, std::less<>>;

// The figures of one rank's run.
struct RankFigures {
  double seconds = 0.0;
  double exposed_comm_seconds = 0.0;  // 0 if OpJob::measures_exposed_comm() is false
  double flops = 0.0;
  std::size_t memory_peak = 0;
  std::size_t memory_planned = 0;
  std::int64_t tokens = 0;
  std::int64_t bytes_received = 0;
  std::int64_t bytes_sent = 0;
  NonFinite non_finite;  // of this rank's part of the input
};

// The plan of a job on a world. Equal on all ranks.
struct PlanFigures {
  std::int64_t blocks = 0;  // K/V blocks; for decode, KV splits of the longest sequence; for an SSM, runs of all ranks
  std::string layout;
  std::int64_t stripe = 0;          // tokens; 0: differs between sequences
  std::int64_t bytes_moved = 0;     // received, by all ranks together
  std::size_t memory_per_rank = 0;  // maximum over the ranks
  std::optional<double> estimated_seconds;
  double bytes_read = 0.0;  // from the KV cache, by all ranks together; 0: not a decode step
};

// One tensor of the result.
struct ResultDigest {
  std::string key;    // in reports and golden files: "out", "lse", "final_states"
  std::string title;  // in text: "out", "y", "final states"
  std::string hex;    // empty: the job does not compute it
};

// "out 0123…, lse 4567…", without tensors that are not computed.
std::string digests_text(const std::vector<ResultDigest>& digests);
// Copies the digests to the golden.
void set_digests(Golden& golden, const std::vector<ResultDigest>& digests);

// One bar of a rank's timeline.
struct TraceEvent {
  int lane = 0;  // index into OpJob::lanes()
  std::string name;
  double begin = 0.0;  // seconds since the run began
  double end = 0.0;
};

// Rows of a result compared with fp64, or with another result bit for bit.
struct Check {
  bool passes = true;
  std::int64_t rows = 0;                   // rows of attention that were compared with fp64
  std::vector<std::string> context;        // what was compared
  std::vector<std::string> lines;          // errors and their locations
  std::function<void(JsonWriter&)> write;  // the member "accuracy" of a report; empty: nothing was compared with fp64
};

struct MeasureRequest {
  std::int64_t samples = 0;   // 0: enough for stable figures
  bool compute_only = false;  // without transfers
  bool also_compute = false;  // both modes, in turn
  ProgressCallback on_progress = {};
};

// Samples of one mode.
struct Measurement {
  bool compute_only = false;
  Samples samples;
  double bytes = 0.0;  // read by a decode step, or read and written by an SSM op, by all ranks together; 0: not shown
};

struct Measured {
  std::vector<Measurement> modes;
  RankFigures figures;  // of the last run on this rank
  std::string digest;   // of the first tensor of the result; empty: it was not fetched
};

// The settings that are the same in every variant of a job. Other settings are varied.
struct VariantRequest {
  std::vector<int> ranks;
  std::optional<LayoutRequest> layout;
  std::optional<std::int64_t> block;  // tokens
  bool page_size = false;             // keep the page size of the input
};

// The variants of a job: other worlds, layouts, blocks, pages, each with a row in a table.
struct VariantTable {
  std::vector<Cell> columns;  // without text
  std::int64_t count = 0;
  std::vector<std::string> notes;
};

// Receives a row of a table of variants, and a description of the first difference from the first variant; empty if
// there is none.
using VariantDone = std::function<void(std::vector<std::string> cells, const std::string& difference)>;

struct OutputRequest {
  std::string path;
  bool replace = false;   // an existing file may be replaced
  FileMetadata metadata;  // in addition to the op's own
};

class OpJob {
 public:
  OpJob() = default;
  OpJob(const OpJob&) = delete;
  OpJob& operator=(const OpJob&) = delete;
  virtual ~OpJob() = default;

  // The input.
  virtual std::string_view op() const = 0;  // of op_table()
  // Whether the job has a setting that not every op has.
  virtual bool takes(std::string_view setting) const;
  // Throws kUsage if the input's tensors do not match the model's layer.
  virtual void check_model(const ModelComparison& compare) const;
  // Notes about the input for the user, and how the op was chosen if nobody named it.
  virtual std::vector<MessageTemplate> warnings() const { return {}; }
  virtual std::vector<MessageTemplate> notes() const { return {}; }
  // Fingerprints of the files that the input is read from; none for synthetic input.
  virtual std::vector<FileFingerprint> fingerprints() const { return {}; }
  // Collective. Checks that the ranks have opened the same input, and makes decisions that depend on the kernels of all
  // ranks. Throws kFile.
  virtual void agree(Transport& world, const KernelRequest& kernel, const Collective& collective);

  virtual std::string describe() const = 0;        // "bf16, heads 32/8 (GQA 4:1), head_dim 128, causal, 4096 tokens"
  virtual std::string describe_shape() const = 0;  // the same without the tokens
  virtual std::string source() const = 0;          // "synthetic, seed 7", or the file
  virtual UnreadTensors unread() const = 0;
  virtual InputShape shape() const = 0;
  virtual double flops() const = 0;
  virtual std::int64_t result_rows() const = 0;        // query tokens times heads, or tokens times heads
  virtual void write_job(JsonWriter& json) const = 0;  // the object "job" of a report

  // Plans the job for worlds of any size. Not collective. The plan refers to the job. Throws the errors of the kernel
  // choice.
  virtual std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const = 0;

  // Chooses the kernel, plans and allocates. Collective, like all functions below up to write(). The transport outlives
  // the object.
  virtual void prepare(Transport& world, const Options& options) = 0;
  virtual Backend& backend() = 0;
  virtual const KernelEntry& kernel() = 0;
  virtual const std::string& kernel_reason() = 0;
  virtual int threads() = 0;  // of a CPU kernel
  virtual PlanFigures plan(const Collective& collective) = 0;
  // The members of a report's "plan" that only this op has. Not collective.
  virtual void write_plan(JsonWriter& json) = 0;
  // Lines about the plan, and those that only a verbose run prints. Not collective.
  virtual std::vector<std::string> plan_lines(const PlanFigures& plan) = 0;
  virtual std::vector<std::string> plan_details() = 0;

  // Frees what prepare() and run() have allocated. The job may be prepared again.
  virtual void release() = 0;

  // Loads this rank's part of the input, computes it once and fetches the result. The caller, which knows how many
  // ranks share the process, sets the memory figure.
  virtual RankFigures run(const ProgressCallback& on_progress = {}) = 0;
  virtual std::vector<ResultDigest> digests(const Collective& collective) = 0;
  virtual void write(const OutputRequest& output) = 0;

  // How results are shown. Not collective.
  virtual bool measures_exposed_comm() const = 0;
  // The columns of `run`. `seconds` and `exposed_comm_seconds` are those of the slowest rank.
  struct Totals {
    double seconds = 0.0;
    double exposed_comm_seconds = 0.0;
    double flops_per_second_per_rank = 0.0;
    std::size_t memory_peak = 0;
    const PlanFigures* plan = nullptr;
    const std::vector<ResultDigest>* digests = nullptr;
  };
  virtual std::vector<Cell> columns(const Totals& totals) const = 0;
  // Lines below the table.
  virtual std::vector<std::string> result_lines(const std::vector<ResultDigest>&) const { return {}; }
  // "12 values of q, 0 of k and 3 of v"
  virtual std::string non_finite_text(const NonFinite& total) const = 0;
  virtual void write_non_finite(JsonWriter& json, const NonFinite& total) const = 0;

  // Checks of the last run's result. Collective, except for the functions that open files.

  // Checks `count` rows of all ranks against the fp64 oracle.
  virtual Check check_oracle(const Collective& collective, std::int64_t count) = 0;
  // Opens the output file of an earlier run of this job. Throws kFile.
  virtual void open_earlier(const std::string& path) = 0;
  virtual std::vector<FileFingerprint> earlier_fingerprints() const = 0;
  virtual Check check_earlier(const Collective& collective) = 0;
  // Opens another system's result, which is checked against the oracle. `count` 0: as many rows as take about a second.
  // Throws kFile, and kUsage for an op without such a check.
  virtual void open_peer(const std::string& path);
  virtual std::vector<FileFingerprint> peer_fingerprints() const { return {}; }
  virtual Check check_peer(const Collective& collective, std::int64_t count);
  // A golden file's members, without digests.
  virtual Golden golden() = 0;

  // The values by which points of a benchmark are compared. `source`: the input file; empty: synthetic.
  virtual BenchJob bench_job(std::string source) const = 0;
  // Times the prepared job in memory. Collective.
  virtual Measured measure(const MeasureRequest& request, const Collective& collective) = 0;

  // list_variants() lists the variants of the prepared job, which is then released. run_variants() runs them, in worlds
  // split from `world`.
  virtual VariantTable list_variants(const VariantRequest& request, const Options& options) = 0;
  virtual void run_variants(Transport& world, const VariantDone& done) = 0;

  // For `verify --decode`: decodes the last `rows` rows of each sequence one by one, and compares them with a prefill.
  // An op without decode steps throws kUsage.
  virtual std::unique_ptr<OpJob> prefill_of_replay();
  virtual VariantTable replay_table() const { return {}; }
  virtual void replay(std::int64_t rows, const Options& options, Transport& world, const ProgressCallback& on_progress,
                      const std::function<void(RankFigures, std::vector<ResultDigest>)>& prefilled,
                      const VariantDone& done);

  // The timeline of this rank's last run.
  virtual std::vector<std::string_view> lanes() const = 0;
  virtual std::vector<TraceEvent> timeline() const = 0;
};

}  // namespace ringattn
