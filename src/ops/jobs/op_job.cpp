// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/op_job.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "ops/common/input_agreement.hpp"
#include "ops/jobs/model_comparison.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const OpJob& job, std::string_view setting_name, std::string_view why) {
  fail(ErrorCode::kUsage, {setting(setting_name), fmt::format(" is not for {}", job.op())}, std::string(why),
       {"Use ", setting("against", "oracle"), " instead."});
}

}  // namespace

std::string digests_text(const std::vector<ResultDigest>& digests) {
  std::string text;
  for (const ResultDigest& digest : digests) {
    if (digest.hex.empty()) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", digest.title, digest.hex);
  }
  return text;
}

void set_digests(Golden& golden, const std::vector<ResultDigest>& digests) {
  for (const ResultDigest& digest : digests) {
    if (!digest.hex.empty()) golden.digests[digest.key] = digest.hex;
  }
}

bool OpJob::takes(std::string_view setting) const { return op_entry(op()).takes(setting); }

void OpJob::check_model(const ModelComparison& compare) const {
  compare.refuse_kind(op(), layer_kind_name(compare.layer().kind));
}

void OpJob::agree(Transport&, const KernelRequest&, const Collective& collective) {
  agree_on_files(collective, [&] { return fingerprints(); });
}

void OpJob::open_peer(const std::string&) { refuse(*this, "peer", "it compares rows of out and lse with fp64"); }

Check OpJob::check_peer(const Collective&, std::int64_t) {
  refuse(*this, "peer", "it compares rows of out and lse with fp64");
}

std::unique_ptr<OpJob> OpJob::prefill_of_replay() {
  refuse(*this, "decode", "it compares decode steps with a prefill of attention");
}

void OpJob::replay(std::int64_t, const Options&, Transport&, const ProgressCallback&,
                   const std::function<void(RankFigures, std::vector<ResultDigest>)>&, const VariantDone&) {
  refuse(*this, "decode", "it compares decode steps with a prefill of attention");
}

}  // namespace ringattn
