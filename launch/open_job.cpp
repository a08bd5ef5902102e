// SPDX-License-Identifier: Apache-2.0
#include "launch/open_job.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>

#include "launch/job_request.hpp"
#include "launch/message_text.hpp"
#include "launch/op_flags.hpp"
#include "launch/plan_table.hpp"
#include "launch/screen.hpp"
#include "ops/jobs/model_comparison.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

// Throws kUsage if the file's tensors do not match the layer of --model-config.
void check_model(const Config& config, const OpJob& job) {
  if (!config.given("model-config") || !config.given("input")) return;
  const JobOptions& options = config.options;
  const std::optional<LayerKind> kind = op_entry(job.op()).layer();
  job.check_model(
      {ModelConfig::open(options.model_config).layer(options.layer, kind), options.model_config, options.input});
}

// Opens the job. `tokens` tokens are in each sequence, unless a file determines that. `world`: null for a plan.
std::unique_ptr<OpJob> open(const Config& config, OpUse use, std::int64_t tokens, Transport* world) {
  const JobOptions& options = config.options;
  const bool file = config.given("input");
  check_source(config, use == OpUse::kRun || use == OpUse::kVerify);
  OpRequest request{options, config, config.share, tokens, use, world};
  if (world == nullptr) request.scope = planned_scope(options);
  request.timeline = !options.trace.empty();
  if (use == OpUse::kBench && (options.against == "compute" || options.against == "sgemm")) {
    request.rows_wanted = fmt::format("a decode step takes no --against {}", options.against);
  }
  const std::string_view named = config.given("op") ? options.op : std::string_view();
  const OpEntry& op =
      file ? op_of_file(*open_tensor_file(file_input(options), *config.share), config, named) : op_entry(options.op);
  std::unique_ptr<OpJob> job = op.make(request);
  if (file && !named.empty() && named != op.name && named != job->op()) {
    refuse_named_op(options.input, named, job->op());
  }
  check_op(config, *job);
  check_model(config, *job);
  return job;
}

void print_warnings(const Config& config, const OpJob& job) {
  for (const MessageTemplate& warning : job.warnings()) {
    print_warning_line(program_text(warning), config.options.color);
  }
}

}  // namespace

std::unique_ptr<OpJob> open_job(const Config& config, OpUse use, Transport& world, const Collective& collective) {
  const JobOptions& options = config.options;
  std::unique_ptr<OpJob> job;
  collective.run_collectively([&] {
    job = open(config, use, options.seq.front(), &world);
    if (collective.rank() == 0) print_warnings(config, *job);
  });
  job->agree(world, {options.backend, options.kernel}, collective);
  return job;
}

std::vector<std::unique_ptr<OpJob>> open_planned_jobs(const Config& config) {
  std::vector<std::unique_ptr<OpJob>> jobs;
  for (const std::int64_t tokens : config.options.seq) {
    jobs.push_back(open(config, OpUse::kPlan, tokens, nullptr));
    if (config.given("input")) break;
  }
  print_warnings(config, *jobs.front());
  return jobs;
}

InputShape input_shape(const Config& config) {
  return open(config, OpUse::kRun, config.options.seq.front(), nullptr)->shape();
}

}  // namespace ringattn
