// SPDX-License-Identifier: Apache-2.0
#include "attention/job/file_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "attention/fitting.hpp"
#include "attention/identities.hpp"
#include "attention/job/one_input.hpp"
#include "attention/job/step_or_rows.hpp"
#include "attention/ring/handshake.hpp"
#include "base/host.hpp"

namespace ringattn {

DecodeOptions decode_options(const Options& options) {
  // The host has lengths and tables, and checks them.
  return {options.kernel, options.memory_budget, false, options.threads, options.timeout_seconds};
}

StepForecast forecast_step(const JobInput& input, const KernelRequest& request, int ranks, int threads,
                           KernelPlace place) {
  const DecodeChoice choice = choose_kernel(decode_spec(input), request, place);
  DecodeSpec spec = stored_spec(input, *choice.row, ranks);
  const auto backend = choice.row->make_backend({threads > 0 ? threads : usable_processors().count, kNoDevice});
  const LatentProducts products = input.op() == Op::kLatent
                                      ? make_latent_products(input.latent().spec, choice.row->backend, *backend, place)
                                      : LatentProducts{};
  const auto whole = choice.row->make_kernel(spec, *backend);
  spec.fold = largest_part(decode_job(input, ranks, *whole, spec.format), ranks).spec;
  return forecast_step(input, *choice.row->make_kernel(spec, *backend), ranks, spec.format, products);
}

PreparedFileJob::PreparedFileJob(FileJob job, Transport& transport, Options options)
    : job_(std::move(job)), meeting_(transport, Patience(options.timeout_seconds)) {
  meeting_.together([&] {
    input_.emplace(job_.input, job_.numerics, choice_place(options.kernel, transport));
    if (!job_.output.empty() && meeting_.rank() == 0) check_output_path(job_.output, job_.replace);
  });
  agree_on_input(meeting_, *input_);
  if (input_->makes_cache() && !job_.why_rows.empty()) *input_ = input_->attended(job_.why_rows);
  if (std::holds_alternative<FileInput>(job_.input) || input_->makes_cache()) {
    *input_ = step_or_rows(std::move(*input_), fitting_request(options.kernel, transport), meeting_);
  }
  prepare(transport, std::move(options), 0);
}

PreparedFileJob::PreparedFileJob(JobInput input, Transport& transport, Options options, int heads_at_a_time)
    : meeting_(transport, Patience(options.timeout_seconds)), input_(std::move(input)) {
  prepare(transport, std::move(options), heads_at_a_time);
}

void PreparedFileJob::prepare(Transport& transport, Options options, int heads_at_a_time) {
  if (input_->op() == Op::kAttention) {
    attention_.emplace(input_->job(), transport, std::move(options));
    return;
  }
  if (input_->op() == Op::kLatent && !input_->decodes()) {
    latent_.emplace(input_->latent(), transport, LatentOptions{std::move(options), heads_at_a_time});
    return;
  }
  meeting_.together([&] {
    step_ = forecast_step(*input_, fitting_request(options.kernel, transport), transport.size(), options.threads);
  });
  if (input_->op() == Op::kLatent) {
    const DecodeJob& job = step_->job;
    latent_decode_.emplace(LatentDecodeJob{input_->latent().spec, job.limits, job.page_size, job.pages, job.format.k},
                           transport, decode_options(options));
    step_->memory = latent_decode_->memory();  // with this rank's threads and device
    return;
  }
  handshake(meeting_, {lists_identity(input_->job().lists.get())});
  decode_.emplace(step_->job, transport, decode_options(options));
  step_->memory = decode_->memory();
}

KernelShape PreparedFileJob::tiles() {
  if (!input_->decodes()) return ring().plan.kernel;
  // Rows that are decoded fold the tiles that the fold kernel of the same name gives them; where there is none, all
  // rows of a step at once.
  const FoldSpec spec = decode_spec(*input_).fold;
  const auto same = [&](const FoldRow& row) { return row.name == kernel().name; };
  if (std::ranges::none_of(kernel_table<FoldSpec>(), same)) return {step_->key_tile, kMostDecodeRows};
  const FoldChoice fold = choose_kernel(spec, {std::string(kernel().backend), std::string(kernel().name)});
  const auto backend = fold.row->make_backend({1, kNoDevice});
  return {step_->key_tile, fold.row->make_kernel(spec, *backend)->query_tile()};
}

std::unique_ptr<LoadedJob> PreparedFileJob::load(const StepDone& step_done) {
  return latent_ ? std::make_unique<LoadedJob>(*input_, *latent_, meeting_, step_done)
                 : std::make_unique<LoadedJob>(*input_, *attention_, meeting_, step_done);
}

std::unique_ptr<LoadedStep> PreparedFileJob::load_step(const StepDone& step_done, int caches) {
  return latent_decode_ ? std::make_unique<LoadedStep>(*input_, *latent_decode_, meeting_, step_done, caches)
                        : std::make_unique<LoadedStep>(*input_, *decode_, meeting_, step_done, caches);
}

RankResult PreparedFileJob::compute(const StepDone& step_done) {
  if (input_->decodes()) {
    const std::unique_ptr<LoadedStep> step = load_step(step_done);
    return step->fetch(step->run());
  }
  const std::unique_ptr<LoadedJob> loaded = load(step_done);
  return loaded->fetch(loaded->run(RunMode::kWhole, step_done));
}

FileJobResult PreparedFileJob::run(const StepDone& step_done) {
  FileJobResult result{compute(step_done), {}};
  result.digests = digest_result(*input_, result.rank, meeting_);
  return result;
}

void PreparedFileJob::write(const FileJobResult& result) {
  if (job_.output.empty()) return;
  FileMetadata metadata = output_metadata(kernel(), backend(), result.digests);
  metadata.emplace_back("softmax_scale", fmt::format("{}", input_->job().spec.softmax_scale));
  if (input_->op() == Op::kLatent) {
    const LatentSpec& spec = input_->latent().spec;
    metadata.insert(metadata.end(), {{"op", std::string(op_name(Op::kLatent))},
                                     {"form", std::string(form_name(input_->form().form))},
                                     {"latent_dim", fmt::format("{}", spec.latent_dim)},
                                     {"rope_dim", fmt::format("{}", spec.rope_dim)},
                                     {"head_dim", fmt::format("{}", spec.head_dim)},
                                     {"head_dim_v", fmt::format("{}", spec.head_dim_v)}});
  }
  metadata.insert(metadata.end(), job_.metadata.begin(), job_.metadata.end());
  write_output(*input_, result.rank, job_.output, job_.replace, metadata, meeting_);
}

FileJobResult run_file_job(const FileJob& job, Transport& transport, const Options& options,
                           const StepDone& step_done) {
  PreparedFileJob prepared(job, transport, options);
  FileJobResult result = prepared.run(step_done);
  prepared.write(result);
  return result;
}

}  // namespace ringattn
