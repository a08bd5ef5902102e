// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/decode_or_attend.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/decode/decode_block_mask.hpp"
#include "ops/decode/rank_cache.hpp"
#include "ops/mla/mla_work.hpp"

namespace ringattn {

namespace {

// The attention kernel for the rows, or null: the named one, or else the first that supports them.
const AttentionRow* attention_row_of(const AttentionSpec& spec, const KernelRequest& request, KernelScope scope) {
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (request.kernel != "auto" && request.kernel != row.name) continue;
    if (request.backend != "auto" && request.backend != row.backend) continue;
    if (scope == KernelScope::kThisMachine && !row.unavailable().empty()) continue;
    if (row.missing(spec).empty()) return &row;
  }
  return nullptr;
}

// Why latents in rows are not decoded; empty if they are.
std::string why_no_cache(const JobInput& input, const KernelRequest& request, KernelScope scope) {
  std::string_view attends;
  try {
    attends = choose_mla_kernels(input.mla()->spec, MlaForm::kAbsorbed, request, scope).attention.row->backend;
  } catch (const Error&) {
    return {};  // it can't be computed as rows
  }
  try {
    const std::string_view decodes = choose_kernel(decode_spec(input), request, scope).row->backend;
    return decodes == attends
               ? ""
               : fmt::format("{} kernels compute it, and those that decode it are for {}", attends, decodes);
  } catch (const Error&) {
    return fmt::format("{} decodes it", request.kernel == "auto" ? "no kernel" : "no kernel " + request.kernel);
  }
}

}  // namespace

std::string why_not_decoded(const JobInput& input, const KernelRequest& request, KernelScope scope) {
  // If a named kernel can't run on this machine, the op refuses it later.
  const KernelScope where = request.kernel == "auto" ? scope : KernelScope::kAnyMachine;
  if (input.makes_cache()) return why_no_cache(input, request, where);
  if (input.mla() != nullptr || !input.decodes()) return {};
  const Job& job = input.job();
  const AttentionRow* const attention = attention_row_of(job.spec, request, where);
  if (attention == nullptr) return {};
  const std::span<const KernelRow<DecodeSpec>> decoders = kernel_table<DecodeSpec>();
  const auto same = std::ranges::find(decoders, attention->name, &KernelRow<DecodeSpec>::name);
  if (same == decoders.end()) return fmt::format("no kernel decodes it with the bits of {}", attention->name);
  if (request.kernel != "auto") return {};
  if (const std::vector<std::string> missing = same->missing(decode_spec(input)); !missing.empty()) {
    return fmt::format("no kernel decodes it with the bits of {} (missing: {})", attention->name,
                       fmt::join(missing, ", "));
  }
  if (job.block_mask == nullptr) return {};
  return why_not_decodable(*job.block_mask, job.spec.mask, static_cast<int>(job.batch.sequences[0].q_len));
}

JobInput decode_or_attend(JobInput input, const KernelRequest& request, KernelScope scope) {
  std::string why = why_not_decoded(input, request, scope);
  return why.empty() ? std::move(input) : input.attended(std::move(why));
}

JobInput decode_or_attend(JobInput input, const KernelRequest& request, const Collective& collective) {
  std::string mine;
  collective.run_collectively([&] { mine = why_not_decoded(input, request, KernelScope::kThisMachine); });
  for (const std::string& why : collective.gather(mine)) {
    if (!why.empty()) return input.attended(why);
  }
  return input;
}

}  // namespace ringattn
