// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/shared_entry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "ops/attention/attention_op_job.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/decode/decode_or_attend.hpp"
#include "ops/mla/mla_op_job.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

// The first setting that the user chose and that attention has, but a decode step does not; empty if there is none.
std::string_view first_ring_setting(const OpRequest& request) {
  const OpEntry& decode = op_entry(op_name(Op::kDecode));
  for (const std::string_view setting : op_entry(op_name(Op::kAttention)).settings) {
    if (!decode.takes(setting) && request.sources.chosen(setting)) return setting;
  }
  return {};
}

// Refuses a latent_dim that contradicts the file's tensors.
void check_latent_dim(const OpRequest& request, const JobInput& input) {
  if (!request.from_file() || !request.sources.given("latent-dim")) return;
  const int of_file = input.mla()->spec.latent_dim;
  if (of_file == request.settings.latent_dim) return;
  fail(ErrorCode::kUsage, {setting("latent_dim"), " contradicts ", setting("input")},
       fmt::format("latents have {} numbers by the file's tensors", of_file), "Leave it out.");
}

// Decides whether MLA with few queries is a decode step over a cache. Latents in pages are. Latents in rows are, too,
// unless the user set something that only ring attention has.
JobInput step_or_rows(JobInput input, const OpRequest& request) {
  if (input.mla() == nullptr || !input.decodes()) return input;
  const std::string_view ring = first_ring_setting(request);
  if (!input.makes_cache()) {
    if (ring.empty()) return input;
    fail(ErrorCode::kUsage, {setting(ring), " contradicts an MLA decode step"},
         "a decode step sends no K/V blocks around the ring",
         {"Leave it out, or add ", setting("form", "expanded"), "."});
  }
  if (!request.rows_wanted.empty()) return input.attended(request.rows_wanted);
  return ring.empty() ? std::move(input) : input.attended(fmt::format("a decode step takes no {}", ring));
}

JobInput open(Op op, std::int64_t tokens, const OpRequest& request) {
  const Settings& settings = request.settings;
  const KernelRequest kernel{settings.backend, settings.kernel};
  const TopKDevice device = request.world != nullptr ? top_k_device(kernel, *request.world) : TopKDevice{};
  InputRequest source = synthetic_input(settings, op, tokens);
  if (request.from_file()) source = file_input(settings);
  JobInput input(source, numerics_of(settings), device, request.share);
  if (input.mla() != nullptr) check_latent_dim(request, input);
  return step_or_rows(std::move(input), request);
}

// The job as a plan for other ranks has it. If several lengths are planned, either all are decode steps or none is,
// because one table can't show both.
JobInput planned(Op op, JobInput input, const OpRequest& request) {
  const KernelRequest kernel{request.settings.backend, request.settings.kernel};
  const bool makes_cache = input.makes_cache();
  JobInput settled = decode_or_attend(std::move(input), kernel, request.scope);
  if (!makes_cache || !settled.decodes() || request.from_file()) return settled;
  const bool all = std::ranges::all_of(request.settings.seq, [&](std::int64_t tokens) {
    const JobInput other = open(op, tokens, request);
    return other.decodes() && (!other.makes_cache() || decode_or_attend(other, kernel, request.scope).decodes());
  });
  return all ? std::move(settled) : settled.attended("another length makes no decode step");
}

}  // namespace

std::unique_ptr<AttentionOpJob> AttentionOpJob::make(JobInput input, const Origin& origin) {
  if (input.mla() != nullptr) return std::make_unique<MlaOpJob>(std::move(input), origin);
  return std::make_unique<AttentionOpJob>(std::move(input), origin);
}

std::unique_ptr<OpJob> make_attention_job(Op op, const OpRequest& request) {
  JobInput input = open(op, request.tokens, request);
  // If the user named the op, its kernels decide.
  const bool named = !request.from_file() && request.sources.given("op");
  const bool settles = !named || input.makes_cache();
  if (settles && request.world == nullptr) input = planned(op, std::move(input), request);
  AttentionOpJob::Origin origin;
  origin.from_file = request.from_file();
  origin.settles = settles;
  const std::int64_t rows = request.settings.q_len.value_or(0);
  const bool measured = request.use == OpUse::kBench && !request.from_file();
  if (measured && rows <= kMaxDecodeRows) origin.measured_rows = rows;
  origin.op_given = request.sources.given("op");
  origin.offset_given = request.settings.query_offset.has_value();
  return AttentionOpJob::make(std::move(input), origin);
}

void fill_scores(const ModelLayer& layer, const Settings& settings, const FillSetting& fill) {
  if (layer.bidirectional) fill("mask", "full");
  if (layer.window_left >= 0 || layer.window_right >= 0) {
    const bool causal = settings.mask == MaskKind::kCausal;  // the user's mask, or the filled-in one
    fill("window", fmt::format("{},{}", layer.window_left, causal ? -1 : layer.window_right));
  }
  Fill{fill}("softcap", layer.softcap);
  // Queries in the latent space don't show the dims of a head, so the default is unknown for a file's job.
  const bool unseen = layer.kind == LayerKind::kMla && !settings.input.empty();
  if (unseen || std::abs(layer.softmax_scale / layer.default_scale() - 1.0) > 1e-12) {
    Fill{fill}("softmax-scale", layer.softmax_scale);
  }
}

void fill_attention(const ModelLayer& layer, const Settings& settings, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("head-dim", layer.head_dim)("kv-heads", layer.kv_heads);
  if (layer.head_dim_v != layer.head_dim) Fill{fill}("head-dim-v", layer.head_dim_v);
  fill_scores(layer, settings, fill);
}

}  // namespace ringattn
