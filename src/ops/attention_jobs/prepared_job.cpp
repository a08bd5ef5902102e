// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/prepared_job.hpp"

#include <algorithm>
#include <utility>

#include "attention/ring/handshake.hpp"
#include "base/host.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

DecodeOptions decode_options(const Options& options) {
  // Tables need no check on the device: they are in host memory, and are checked there.
  return {.kernel = options.kernel,
          .memory_budget = options.memory_budget,
          .check_tables = false,
          .threads = options.threads,
          .timeout_seconds = options.timeout_seconds};
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

PreparedJob::PreparedJob(JobInput input, Transport& transport, Options options, int heads_at_a_time)
    : collective_(transport, Timeouts(options.timeout_seconds)), input_(std::move(input)) {
  const MlaJob* const mla = input_.mla();
  if (!input_.decodes()) {
    if (mla != nullptr) {
      latent_.emplace(*mla, transport, MlaOptions{std::move(options), heads_at_a_time});
    } else {
      attention_.emplace(input_.job(), transport, std::move(options));
    }
    return;
  }
  collective_.run_collectively([&] {
    step_ =
        summarize_decode_plan(input_, compatible_request(options.kernel, transport), transport.size(), options.threads);
  });
  if (mla != nullptr) {
    const DecodeJob& job = step_->job;
    mla_decode_.emplace(MlaDecodeJob{mla->spec, job.limits, job.page_size, job.pages, job.format.k}, transport,
                        decode_options(options));
    step_->memory = mla_decode_->memory();  // with this rank's threads and device
    return;
  }
  handshake(collective_, {block_mask_config_entry(input_.job().block_mask.get())});
  decode_.emplace(step_->job, transport, decode_options(options));
  step_->memory = decode_->memory();
}

KernelShape PreparedJob::tiles() {
  if (!input_.decodes()) return ring().plan.kernel;
  // Decoded rows have the key tiles of the attention kernel with the same name. Without one, all rows of a step share
  // their tiles.
  const AttentionSpec spec = decode_spec(input_).attention;
  const auto same = [&](const AttentionRow& row) { return row.name == kernel().name; };
  if (std::ranges::none_of(kernel_table<AttentionSpec>(), same)) return {step_->key_tile, kMaxDecodeRows};
  const AttentionChoice attention = choose_kernel(spec, {std::string(kernel().backend), std::string(kernel().name)});
  const auto backend = attention.row->make_backend({1, kNoDevice});
  return {step_->key_tile, attention.row->make_kernel(spec, *backend)->query_tile()};
}

std::unique_ptr<LoadedJob> PreparedJob::load(const ProgressCallback& on_progress) {
  return latent_ ? std::make_unique<LoadedJob>(input_, *latent_, collective_, on_progress)
                 : std::make_unique<LoadedJob>(input_, *attention_, collective_, on_progress);
}

std::unique_ptr<LoadedDecode> PreparedJob::load_decode(const ProgressCallback& on_progress, int caches) {
  return mla_decode_ ? std::make_unique<LoadedDecode>(input_, *mla_decode_, collective_, on_progress, caches)
                     : std::make_unique<LoadedDecode>(input_, *decode_, collective_, on_progress, caches);
}

RankResult PreparedJob::compute(const ProgressCallback& on_progress) {
  if (input_.decodes()) {
    const std::unique_ptr<LoadedDecode> step = load_decode(on_progress);
    return step->fetch(step->run());
  }
  const std::unique_ptr<LoadedJob> loaded = load(on_progress);
  return loaded->fetch(loaded->run(RunMode::kWhole, on_progress));
}

}  // namespace ringattn
