// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/file_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "attention/ring/handshake.hpp"
#include "base/host.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/input_agreement.hpp"
#include "ops/decode/decode_or_attend.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

DecodeOptions decode_options(const Options& options) {
  // The host has lengths and tables, and checks them.
  return {options.kernel, options.memory_budget, false, options.threads, options.timeout_seconds};
}

DecodePlanSummary summarize_decode_plan(const JobInput& input, const KernelRequest& request, int ranks, int threads,
                                        KernelScope scope) {
  const DecodeChoice choice = choose_kernel(decode_spec(input), request, scope);
  DecodeSpec spec = stored_spec(input, *choice.row, ranks);
  const auto backend = choice.row->make_backend({threads > 0 ? threads : usable_processors().count, kNoDevice});
  const MlaGemms gemms =
      input.mla() != nullptr ? make_mla_gemms(input.mla()->spec, choice.row->backend, *backend, scope) : MlaGemms{};
  const auto whole = choice.row->make_kernel(spec, *backend);
  spec.attention = largest_rank_job(decode_job(input, ranks, *whole, spec.format), ranks).spec;
  return summarize_decode_plan(input, *choice.row->make_kernel(spec, *backend), ranks, spec.format, gemms);
}

PreparedFileJob::PreparedFileJob(FileJob job, Transport& transport, Options options)
    : job_(std::move(job)), collective_(transport, Timeouts(options.timeout_seconds)) {
  collective_.run_collectively([&] {
    input_.emplace(job_.input, job_.numerics, top_k_device(options.kernel, transport));
    if (!job_.output.empty() && collective_.rank() == 0) check_output_path(job_.output, job_.replace);
  });
  agree_on_files(collective_, [&] { return input_->fingerprints(); });
  if (input_->makes_cache() && !job_.not_decoded_reason.empty()) *input_ = input_->attended(job_.not_decoded_reason);
  if (std::holds_alternative<FileInput>(job_.input) || input_->makes_cache()) {
    *input_ = decode_or_attend(std::move(*input_), compatible_request(options.kernel, transport), collective_);
  }
  prepare(transport, std::move(options), 0);
}

PreparedFileJob::PreparedFileJob(JobInput input, Transport& transport, Options options, int heads_at_a_time)
    : collective_(transport, Timeouts(options.timeout_seconds)), input_(std::move(input)) {
  prepare(transport, std::move(options), heads_at_a_time);
}

void PreparedFileJob::prepare(Transport& transport, Options options, int heads_at_a_time) {
  const MlaJob* const mla = input_->mla();
  if (!input_->decodes()) {
    if (mla != nullptr) {
      latent_.emplace(*mla, transport, MlaOptions{std::move(options), heads_at_a_time});
    } else {
      attention_.emplace(input_->job(), transport, std::move(options));
    }
    return;
  }
  collective_.run_collectively([&] {
    step_ = summarize_decode_plan(*input_, compatible_request(options.kernel, transport), transport.size(),
                                  options.threads);
  });
  if (mla != nullptr) {
    const DecodeJob& job = step_->job;
    mla_decode_.emplace(MlaDecodeJob{mla->spec, job.limits, job.page_size, job.pages, job.format.k}, transport,
                        decode_options(options));
    step_->memory = mla_decode_->memory();  // with this rank's threads and device
    return;
  }
  handshake(collective_, {block_mask_config_entry(input_->job().block_mask.get())});
  decode_.emplace(step_->job, transport, decode_options(options));
  step_->memory = decode_->memory();
}

KernelShape PreparedFileJob::tiles() {
  if (!input_->decodes()) return ring().plan.kernel;
  // Decoded rows have the key tiles of the attention kernel of the same name; where there is none, all
  // rows of a step at once.
  const AttentionSpec spec = decode_spec(*input_).attention;
  const auto same = [&](const AttentionRow& row) { return row.name == kernel().name; };
  if (std::ranges::none_of(kernel_table<AttentionSpec>(), same)) return {step_->key_tile, kMaxDecodeRows};
  const AttentionChoice attention = choose_kernel(spec, {std::string(kernel().backend), std::string(kernel().name)});
  const auto backend = attention.row->make_backend({1, kNoDevice});
  return {step_->key_tile, attention.row->make_kernel(spec, *backend)->query_tile()};
}

std::unique_ptr<LoadedJob> PreparedFileJob::load(const ProgressCallback& on_progress) {
  return latent_ ? std::make_unique<LoadedJob>(*input_, *latent_, collective_, on_progress)
                 : std::make_unique<LoadedJob>(*input_, *attention_, collective_, on_progress);
}

std::unique_ptr<LoadedDecode> PreparedFileJob::load_decode(const ProgressCallback& on_progress, int caches) {
  return mla_decode_ ? std::make_unique<LoadedDecode>(*input_, *mla_decode_, collective_, on_progress, caches)
                     : std::make_unique<LoadedDecode>(*input_, *decode_, collective_, on_progress, caches);
}

RankResult PreparedFileJob::compute(const ProgressCallback& on_progress) {
  if (input_->decodes()) {
    const std::unique_ptr<LoadedDecode> step = load_decode(on_progress);
    return step->fetch(step->run());
  }
  const std::unique_ptr<LoadedJob> loaded = load(on_progress);
  return loaded->fetch(loaded->run(RunMode::kWhole, on_progress));
}

FileJobResult PreparedFileJob::run(const ProgressCallback& on_progress) {
  FileJobResult result{compute(on_progress), {}};
  result.digests = digest_result(*input_, result.rank, collective_);
  return result;
}

void PreparedFileJob::write(const FileJobResult& result) {
  if (!job_.output.empty()) write(result, job_.output, job_.replace, job_.metadata);
}

void PreparedFileJob::write(const FileJobResult& result, const std::string& path, bool replace,
                            const FileMetadata& more) {
  FileMetadata metadata =
      output_metadata(kernel(), identity_of(kernel(), backend(), input_->job().spec.dtype), result.digests);
  metadata.emplace_back("softmax_scale", fmt::format("{}", input_->job().spec.softmax_scale));
  if (const MlaJob* const mla = input_->mla()) {
    const MlaSpec& spec = mla->spec;
    metadata.insert(metadata.end(), {{"op", std::string(op_name(Op::kMla))},
                                     {"form", std::string(form_name(input_->form().form))},
                                     {"latent_dim", fmt::format("{}", spec.latent_dim)},
                                     {"rope_dim", fmt::format("{}", spec.rope_dim)},
                                     {"head_dim", fmt::format("{}", spec.head_dim)},
                                     {"head_dim_v", fmt::format("{}", spec.head_dim_v)}});
  }
  metadata.insert(metadata.end(), more.begin(), more.end());
  write_output(*input_, result.rank, path, replace, metadata, collective_);
}

FileJobResult run_file_job(const FileJob& job, Transport& transport, const Options& options,
                           const ProgressCallback& on_progress) {
  PreparedFileJob prepared(job, transport, options);
  FileJobResult result = prepared.run(on_progress);
  prepared.write(result);
  return result;
}

}  // namespace ringattn
