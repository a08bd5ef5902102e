// SPDX-License-Identifier: Apache-2.0
// Attention and decode as an OpJob. MLA adds what it has of its own (ops/mla/mla_op_job.hpp).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/attention_jobs/accuracy.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/attention_jobs/output_file.hpp"
#include "ops/attention_jobs/peer_file.hpp"
#include "ops/attention_jobs/prepared_job.hpp"
#include "ops/attention_jobs/shapes.hpp"
#include "ops/decode/decode_memory.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

// The plans of AttentionOpJob: attention and MLA around the ring, and decode steps.
std::unique_ptr<OpPlan> plan_ring(const JobInput& input, const PlanRequest& request);
std::unique_ptr<OpPlan> plan_decode(const JobInput& input, const PlanRequest& request);

class AttentionOpJob : public OpJob {
 public:
  // What the program's user asked for, and where the input comes from.
  struct Origin {
    bool from_file = false;
    bool settles = false;            // agree() decides whether a cache is decoded
    bool op_given = false;           // the user named the op
    bool offset_given = false;       // the user gave the position of the first query
    std::int64_t measured_rows = 0;  // queries per sequence in a benchmark; 0: all, or no benchmark
  };
  AttentionOpJob(JobInput input, const Origin& origin) : input_(std::move(input)), origin_(origin) {}
  // An MlaOpJob if the input is latents.
  static std::unique_ptr<AttentionOpJob> make(JobInput input, const Origin& origin);

  std::string_view op() const override { return op_name(input_.op()); }
  std::string describe() const override;
  std::string describe_shape() const override;
  std::string source() const override { return input_.source(); }
  // query_offset is refused if tokens were evicted: the position of a query among them decides if the job is a decode
  // step.
  bool takes(std::string_view setting) const override {
    return OpJob::takes(setting) || (setting == "query-offset" && input_.has_evicted_tokens());
  }
  std::vector<FileFingerprint> fingerprints() const override { return input_.fingerprints(); }
  void agree(Transport& world, const KernelRequest& kernel, const Collective& collective) override;
  void check_model(const ModelComparison& compare) const override;
  std::vector<MessageTemplate> warnings() const override;
  std::vector<MessageTemplate> notes() const override;
  UnreadTensors unread() const override { return input_.unread(); }
  InputShape shape() const override;
  double flops() const override;
  std::int64_t result_rows() const override { return input_.job().batch.q_tokens() * input_.job().spec.heads; }
  void write_job(JsonWriter& json) const override;

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override {
    return input_.decodes() ? plan_decode(input_, request) : plan_ring(input_, request);
  }
  void prepare(Transport& world, const Options& options) override;
  Backend& backend() override { return prepared_->backend(); }
  const KernelEntry& kernel() override { return prepared_->kernel(); }
  const std::string& kernel_reason() override;
  int threads() override { return prepared_->threads(); }
  PlanFigures plan(const Collective& collective) override;
  void write_plan(JsonWriter& json) override;
  std::vector<std::string> plan_lines(const PlanFigures& plan) override;
  std::vector<std::string> plan_details() override;

  void release() override {
    result_.reset();
    prepared_.reset();
  }

  RankFigures run(const ProgressCallback& on_progress = {}) override;
  std::vector<ResultDigest> digests(const Collective& collective) override;
  void write(const OutputRequest& output) override;

  bool measures_exposed_comm() const override { return !input_.decodes(); }
  std::vector<Cell> columns(const Totals& totals) const override;
  std::string non_finite_text(const NonFinite& total) const override;
  void write_non_finite(JsonWriter& json, const NonFinite& total) const override;
  Check check_oracle(const Collective& collective, std::int64_t count) override;
  void open_earlier(const std::string& path) override { earlier_.emplace(path, input_); }
  std::vector<FileFingerprint> earlier_fingerprints() const override { return earlier_->fingerprints(); }
  Check check_earlier(const Collective& collective) override;
  void open_peer(const std::string& path) override { peer_.emplace(path, input_); }
  std::vector<FileFingerprint> peer_fingerprints() const override { return peer_->fingerprints(); }
  Check check_peer(const Collective& collective, std::int64_t count) override;
  Golden golden() override {
    return golden_of(input_, kernel().name, identity_of(kernel(), backend(), input_.job().spec.dtype));
  }
  BenchJob bench_job(std::string source) const override;
  Measured measure(const MeasureRequest& request, const Collective& collective) override;
  VariantTable list_variants(const VariantRequest& request, const Options& options) override;
  void run_variants(Transport& world, const VariantDone& done) override;
  std::unique_ptr<OpJob> prefill_of_replay() override;
  VariantTable replay_table() const override;
  void replay(std::int64_t rows, const Options& options, Transport& world, const ProgressCallback& on_progress,
              const std::function<void(RankFigures, std::vector<ResultDigest>)>& prefilled,
              const VariantDone& done) override;
  std::vector<std::string_view> lanes() const override { return {"compute", "wait", "transfer"}; }
  std::vector<TraceEvent> timeline() const override;

 protected:
  const JobInput& input() const { return input_; }
  const Origin& origin() const { return origin_; }
  // After prepare().
  PreparedJob& prepared() { return *prepared_; }
  // ", fp8 …": how keys and values are stored; empty: as elements.
  virtual std::string format_text() const;
  // Metadata of the output beside that of every attention job.
  virtual FileMetadata own_metadata() const { return {}; }
  virtual std::vector<std::string> variant_cells(const Shape& shape, const ShapeResult& result) const;

 private:
  // The result of the last run().
  const RankResult& result() const { return *result_; }
  static RankFigures figures_of(PreparedJob& prepared, int rank, const RankResult& result);
  Accuracy accuracy_of(const Collective& collective, std::int64_t count, const TensorView& out, const RowView& lse,
                       std::vector<RowError>* each = nullptr);

  JobInput input_;
  Origin origin_;
  std::optional<PreparedJob> prepared_;
  std::optional<OutputFile> earlier_;
  std::optional<PeerFile> peer_;
  std::vector<Shape> shapes_;  // of run_variants()
  Options shape_options_;
  std::optional<DecodeSpec> replayed_as_;  // of a prefill: the decode steps that must have the same bits
  std::optional<RankResult> result_;
  Digests digests_;  // of result()
  int rank_ = 0;
};

// Writes the member "memory" of a report: bytes on a rank.
void write_memory(JsonWriter& json, const DecodeMemory& memory);

// Lines about a job that `run` and `plan` both print.

// For MLA: "form: absorbed (1 query a sequence at most: absorbed up to 170)".
std::string form_text(const JobInput& input);
// Why a cache is read into rows, or why latents in rows are not decoded; empty if neither is the case.
std::string read_rows_text(const JobInput& input);
// "dense", "40 pages of 64 tokens, head-major": the cache that a decode step reads.
std::string cache_text(const JobInput& input, const DecodeJob& job);
// "distributed by KV splits of 8192 keys": how the cache is divided among ranks.
std::string deal_text(const DecodePlanSummary& step);
// "rank 1 holds 131072 keys of 4 K/V heads, owns 8 rows"
std::string held_text(const DecodePlanSummary& step, std::size_t rank);
}  // namespace ringattn
