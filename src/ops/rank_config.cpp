// SPDX-License-Identifier: Apache-2.0
#include "ops/rank_config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "attention/tokens/gated_delta_job.hpp"
#include "base/build.hpp"
#include "ops/linear/linear.hpp"

namespace ringattn {

namespace {

// Long values are compared and shown as hashes.
std::string hashed(const std::string& text) { return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())); }

// The device properties that a kernel's bits depend on.
RankConfigEntry device_config(const Backend& backend, std::string identity) {
  if (backend.memory() == MemoryKind::kDevice) return {"device", std::move(identity)};
  return {"SIMD target",
          std::move(identity),
          {"Set RINGATTN_SIMD_TARGET on all ranks to a target that every host has; ", command("info"), " lists them."}};
}

// Settings of program, kernel and device that all ops compare. `identity`: of the kernel.
std::vector<RankConfigEntry> program_config(std::string_view op, const KernelEntry& kernel, const Backend& backend,
                                            std::string identity) {
  return {{"build", fmt::format("{} {}", version(), build_id())},
          {"op", std::string(op)},
          {"kernel",
           std::string(kernel.name),
           {"Start on the same model of machine, force one ", setting("kernel"),
            ", or on CPUs set RINGATTN_SIMD_TARGET on all ranks to a target that every host has; ", command("info"),
            " lists them."}},
          device_config(backend, std::move(identity))};
}

std::string spec_text(const AttentionSpec& spec) {
  return fmt::format("{} scale {:a}", describe(spec), spec.softmax_scale);
}

void add_batch(XXH3_state_t& state, const Batch& batch) {
  for (const Sequence& s : batch.sequences) {
    const std::int64_t numbers[] = {s.q_len, s.k_len, s.q_offset};
    XXH3_64bits_update(&state, numbers, sizeof numbers);
  }
}

std::string job_hash(const MlaJob& job) {
  XXH3_state_t state;
  std::memset(&state, 0, sizeof state);
  XXH3_64bits_reset(&state);
  const std::string text =
      fmt::format("{} scale {:a} stored {}", describe(job.spec), job.spec.softmax_scale, describe(job.format));
  XXH3_64bits_update(&state, text.data(), text.size());
  add_batch(state, job.batch);
  return fmt::format("{:016x}", XXH3_64bits_digest(&state));
}

void add_block_mask(XXH3_state_t& state, const BlockMask& block_mask) {
  const auto add = [&state]<class Entry>(std::span<const Entry> entries) {
    const std::uint64_t count = entries.size();
    XXH3_64bits_update(&state, &count, sizeof count);
    XXH3_64bits_update(&state, entries.data(), entries.size_bytes());
  };
  add(block_mask.indptr());
  add(block_mask.indices());
}

std::string job_hash(const Job& job) {
  XXH3_state_t state;
  std::memset(&state, 0, sizeof state);
  XXH3_64bits_reset(&state);
  const std::string text = fmt::format("{} pages {} {}", spec_text(job.spec), job.page_size, describe(job.format));
  XXH3_64bits_update(&state, text.data(), text.size());
  add_batch(state, job.batch);
  if (job.block_mask != nullptr) add_block_mask(state, *job.block_mask);
  if (job.positions != nullptr) {
    const std::span<const std::int32_t> all = job.positions->all();
    XXH3_64bits_update(&state, all.data(), all.size_bytes());
  }
  return fmt::format("{:016x}", XXH3_64bits_digest(&state));
}

std::string machine_text(const MachineModel& machine) {
  return fmt::format("{} FLOP/s, {} B/s, {} s", machine.flops_per_second, machine.link_bytes_per_second,
                     machine.latency_seconds);
}

std::string runs_text(const std::optional<std::vector<std::vector<TokenRun>>>& stated) {
  if (!stated) return "dealt";
  std::string text = "stated";
  for (const auto& runs : *stated) {
    text += '/';
    for (const TokenRun& run : runs) text += fmt::format("{},{},{};", run.sequence, run.begin, run.end);
  }
  return text;
}

std::string lengths_text(std::span<const std::int64_t> lengths) {
  std::string text;
  for (const std::int64_t length : lengths) text += fmt::format(" {}", length);
  return text;
}

std::string options_text(const Options& options) {
  std::string text = fmt::format("{} {} {} {} {} {} {} {}", layout_name(options.layout.kind), options.layout.stripe,
                                 options.block_tokens, options.memory_budget, options.checksum, options.overlap,
                                 options.state_out, options.shorter_lengths);
  for (const auto& stated : {options.query_runs, options.key_runs}) text += runs_text(stated);
  return text;
}

std::vector<RankConfigEntry> ring_config(std::string_view op, const KernelEntry& kernel, const Backend& backend,
                                         Dtype dtype, std::string job, const Options& options) {
  std::vector<RankConfigEntry> all = program_config(op, kernel, backend, identity_of(kernel, backend, dtype));
  all.push_back({"job", std::move(job)});
  all.push_back({"machine model", machine_text(options.machine)});
  all.push_back({"options", hashed(options_text(options))});
  return all;
}

std::string job_text(const SsmJob& job) {
  return fmt::format("{}; {};{}", describe(job), exact_settings(job), lengths_text(job.lengths));
}

std::vector<RankConfigEntry> ssm_config(std::string_view op, const KernelEntry& kernel, const Backend& backend,
                                        Dtype dtype, const std::string& job, const SsmOptions& options) {
  std::vector<RankConfigEntry> all = program_config(op, kernel, backend, identity_of(kernel, backend, dtype));
  all.push_back({"job", hashed(job)});
  all.push_back({"options", hashed(fmt::format("budget {}, ranges {}, {}", options.memory_budget, options.head_ranges,
                                               runs_text(options.runs)))});
  return all;
}

}  // namespace

std::vector<RankConfigEntry> rank_config(const Job& job, const Options& options, const AttentionChoice& choice,
                                         const Backend& backend) {
  return ring_config("attention", *choice.row, backend, job.spec.dtype, job_hash(job), options);
}

std::vector<RankConfigEntry> rank_config(const BackwardJob& job, const Options& options,
                                         const KernelChoice<AttentionBackwardSpec>& choice, const Backend& backend) {
  return ring_config("attention_backward, which tensors that require gradients need", *choice.row, backend,
                     job.forward.spec.dtype, fmt::format("{} {}", job_hash(job.forward), dtype_name(job.gradients)),
                     options);
}

std::vector<RankConfigEntry> rank_config(const DecodeJob& job, const DecodeOptions& options, const DecodeChoice& choice,
                                         const Backend& backend) {
  std::vector<RankConfigEntry> all =
      program_config("decode", *choice.row, backend, identity_of(*choice.row, backend, job.spec.dtype));
  std::string text = fmt::format("{}; {}, {} pages", spec_text(job.spec), describe(job), job.pages);
  if (job.rope) text += fmt::format("; {}; {}", fmt::join(job.rope->frequencies, ","), job.rope->attention_factor);
  all.push_back({"job", hashed(text)});
  all.push_back({"options", fmt::format("budget {}, tables {}", options.memory_budget,
                                        options.check_tables ? "checked" : "not checked")});
  return all;
}

RankConfigEntry block_mask_config_entry(const BlockMask* block_mask) {
  if (block_mask == nullptr) return {"block mask", "none"};
  XXH3_state_t state;
  std::memset(&state, 0, sizeof state);
  XXH3_64bits_reset(&state);
  add_block_mask(state, *block_mask);
  return {"block mask", fmt::format("{:016x}", XXH3_64bits_digest(&state))};
}

std::vector<RankConfigEntry> rank_config(const MlaJob& job, const MlaOptions& options, const AttentionChoice& choice,
                                         std::string_view gemms, const Backend& backend) {
  std::vector<RankConfigEntry> all =
      program_config("mla", *choice.row, backend, identity_of(*choice.row, backend, job.spec.dtype));
  all.push_back({"GEMM kernel", std::string(gemms)});
  all.push_back({"job", job_hash(job)});
  all.push_back({"form", std::string(form_name(*job.form))});
  all.push_back({"machine model", machine_text(options.ring.machine)});
  all.push_back({"options", hashed(fmt::format("{} {}", options_text(options.ring), options.heads_at_a_time))});
  return all;
}

std::vector<RankConfigEntry> rank_config(const SsmJob& job, const SsmOptions& options, const SsmJobChoice& choice,
                                         const Backend& backend) {
  return ssm_config("ssm", *choice.row, backend, job.spec.dtype, job_text(job), options);
}

std::vector<RankConfigEntry> rank_config(const SsdBackwardJob& job, const SsmOptions& options,
                                         const KernelChoice<SsdBackwardSpec>& choice, const Backend& backend) {
  return ssm_config("ssd_backward", *choice.row, backend, job.forward.spec.dtype,
                    fmt::format("{} {} {}", job_text(job.forward), dtype_name(job.gradients), job.final_gradients),
                    options);
}

std::vector<RankConfigEntry> rank_config(const CausalConv1dJob& job, const CausalConv1dOptions& options,
                                         const CausalConv1dChoice& choice, const Backend& backend) {
  std::vector<RankConfigEntry> all =
      program_config("conv1d", *choice.row, backend, identity_of(*choice.row, backend, job.spec.dtype));
  all.push_back({"job", hashed(fmt::format("{}; halos {} {}, update {};{}", describe(job.spec), job.initial_halos,
                                           job.final_halos, job.update, lengths_text(job.lengths)))});
  all.push_back({"options", hashed(runs_text(options.runs))});
  return all;
}

std::vector<RankConfigEntry> rank_config(const GatedDeltaJob& job, const SsmOptions& options,
                                         const KernelChoice<GatedDeltaSpec>& choice, const Backend& backend) {
  return ssm_config(
      "gated_delta", *choice.row, backend, job.spec.dtype,
      fmt::format("{}; scale {:a}, update {};{}", describe(job), job.spec.scale, job.update, lengths_text(job.lengths)),
      options);
}

std::vector<RankConfigEntry> rank_config(const LinearJob& job, const LinearChoice& choice, const Backend& backend) {
  std::vector<RankConfigEntry> all =
      program_config("linear", *choice.row, backend, identity_of(*choice.row, backend, job.spec.dtype));
  const std::string blocks = job.token_block > 0 ? fmt::format(" in blocks of {}", job.token_block) : std::string();
  all.push_back({"job", fmt::format("{}; {} tokens{}, output {}, columns in units of {}", describe(job.spec),
                                    job.max_tokens, blocks, static_cast<int>(job.output), job.column_unit)});
  return all;
}

std::vector<RankConfigEntry> rank_config(const Layout& from, const Layout& to, std::int64_t token_bytes,
                                         const Backend& backend) {
  std::string text;
  for (const Layout* const layout : {&from, &to}) {
    text += '/';
    for (const OwnedRun& run : layout->owners()) text += fmt::format("{},{},{};", run.token, run.tokens, run.owner);
  }
  return {{"build", fmt::format("{} {}", version(), build_id())},
          device_config(backend, backend.vector_identity()),  // rows are only moved
          {"bytes of a token's row", fmt::format("{}", token_bytes)},
          {"layouts", hashed(text)}};
}

}  // namespace ringattn
