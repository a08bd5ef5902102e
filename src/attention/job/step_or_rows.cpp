// SPDX-License-Identifier: Apache-2.0
#include "attention/job/step_or_rows.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/job/rank_cache.hpp"
#include "attention/latent_work.hpp"
#include "base/error.hpp"
#include "kernels/decode_lists.hpp"

namespace ringattn {

namespace {

// What the kernel that lacks least lacks, of those that the request allows; absent: there is none.
template <class Spec>
std::optional<std::vector<std::string>> least_missing(const Spec& spec, const KernelRequest& request,
                                                      KernelPlace place) {
  std::optional<std::vector<std::string>> least;
  for (const KernelRow<Spec>& row : kernel_table<Spec>()) {
    if (request.backend != "auto" && request.backend != row.backend) continue;
    if (place == KernelPlace::kHere && !row.unavailable().empty()) continue;
    std::vector<std::string> missing = row.missing(spec);
    if (!least || missing.size() < least->size()) least = std::move(missing);
  }
  return least;
}

// Of latents in rows.
std::string why_no_cache(const JobInput& input, const KernelRequest& request, KernelPlace place) {
  std::string_view folds;
  try {
    folds = choose_latent_kernels(input.latent().spec, LatentForm::kAbsorbed, request, place).fold.row->backend;
  } catch (const Error&) {
    return {};  // as rows it can't be computed
  }
  try {
    const std::string_view decodes = choose_kernel(decode_spec(input), request, place).row->backend;
    return decodes == folds ? ""
                            : fmt::format("{} kernels fold it, and those that decode it are for {}", folds, decodes);
  } catch (const Error&) {
    return fmt::format("{} decodes it", request.kernel == "auto" ? "no kernel" : "no kernel " + request.kernel);
  }
}

}  // namespace

std::string why_not_decoded(const JobInput& input, const KernelRequest& request, KernelPlace place) {
  if (input.makes_cache()) return why_no_cache(input, request, place);
  if (input.op() != Op::kDecode || request.kernel != "auto") return {};
  const Job& job = input.job();
  const auto of_rows = least_missing(job.spec, request, place);
  if (!of_rows || !of_rows->empty()) return {};
  const auto of_steps = least_missing(decode_spec(input), request, place);
  if (of_steps && !of_steps->empty()) {
    return fmt::format("no kernel decodes it (missing: {})", fmt::join(*of_steps, ", "));
  }
  if (job.lists == nullptr) return {};
  return why_no_step(*job.lists, job.spec.mask, static_cast<int>(job.batch.sequences[0].q_len));
}

JobInput step_or_rows(JobInput input, const KernelRequest& request, KernelPlace place) {
  std::string why = why_not_decoded(input, request, place);
  return why.empty() ? std::move(input) : input.attended(std::move(why));
}

JobInput step_or_rows(JobInput input, const KernelRequest& request, const Meeting& meeting) {
  std::string mine;
  meeting.together([&] { mine = why_not_decoded(input, request, KernelPlace::kHere); });
  for (const std::string& why : meeting.gather(mine)) {
    if (!why.empty()) return input.attended(why);
  }
  return input;
}

}  // namespace ringattn
