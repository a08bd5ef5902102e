// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/registry.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/renamed_kernels.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/gated_delta/gated_delta.hpp"
#include "kernels/gemm/weight_gradient.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

namespace {

using Rows = std::span<const KernelEntry* const>;

constexpr std::string_view kBackends[] = {"auto", "cpu", "cuda"};

constexpr KernelEntry copy_kernel(const KernelPlatform& platform, std::string_view name) {
  return {platform, name, "rows of any dtype and shape", [](const Backend&) { return 0.0; }};
}

constexpr KernelEntry kCopies[] = {
#ifdef RINGATTN_HAVE_CUDA
    copy_kernel(kCudaPlatform, "cuda_copy"),
#endif
    copy_kernel(kCpuPlatform, "cpu_copy"),
};

MessageTemplate suggest(std::string_view name, const std::vector<std::string_view>& known) {
  const std::string nearest = nearest_name(name, known.data(), known.size());
  return nearest.empty() ? MessageTemplate{"Use auto, or see ", command("info"), "."}
                         : MessageTemplate(fmt::format("Did you mean {}?", nearest));
}

void check_backend(Rows rows, std::string_view backend) {
  if (std::find(std::begin(kBackends), std::end(kBackends), backend) == std::end(kBackends)) {
    fail(ErrorCode::kUsage, fmt::format("there is no backend \"{}\"", backend),
         fmt::format("known: {}", fmt::join(kBackends, ", ")),
         suggest(backend, {std::begin(kBackends), std::end(kBackends)}));
  }
  if (backend == "auto") return;
  for (const KernelEntry* row : rows) {
    if (row->backend == backend) return;
  }
  const auto has_backend = [backend](const OpKernel& kernel) { return kernel.row->backend == backend; };
  if (std::ranges::any_of(all_kernels(), has_backend)) {  // kernels of other ops have this backend
    std::vector<std::string_view> names;
    for (const KernelEntry* row : rows) names.push_back(row->name);
    fail(ErrorCode::kUnsupported, fmt::format("no {} kernel computes this", backend),
         fmt::format("those that do: {}", fmt::join(names, ", ")),
         {"Use ", setting("backend", rows.front()->backend), "."});
  }
  fail(ErrorCode::kUnsupported, fmt::format("this build has no {} kernels", backend),
       fmt::format("it was built without {}", backend), {"Use ", setting("backend", "auto"), ", or another build."});
}

void check_kernel(Rows rows, const KernelRequest& request, const std::string& required) {
  if (request.kernel == "auto") return;
  std::vector<std::string_view> names{"auto"};
  for (const KernelEntry* row : rows) {
    if (row->name != request.kernel) {
      names.push_back(row->name);
      continue;
    }
    if (request.backend == "auto" || request.backend == row->backend) return;
    fail(ErrorCode::kUsage, fmt::format("kernel {} does not run on backend {}", row->name, request.backend),
         fmt::format("it is a {} kernel", row->backend), {"Use ", setting("backend", row->backend), "."});
  }
  std::vector<std::string_view> others;  // the ops that it computes
  for (const OpKernel& kernel : all_kernels()) {
    if (kernel.row->name == request.kernel) others.push_back(kernel.op);
  }
  if (!others.empty()) {
    fail(ErrorCode::kUnsupported, fmt::format("kernel {} can't do this job", request.kernel),
         fmt::format("it is only for {}; required: {}; known for this job: {}", fmt::join(others, " and "), required,
                     fmt::join(names, ", ")),
         {"Leave ", setting("kernel"), " out, or see ", command("info"), "."});
  }
  const std::string_view renamed = renamed_kernel(request.kernel);
  if (!renamed.empty()) {
    fail(ErrorCode::kUsage, fmt::format("there is no kernel \"{}\"", request.kernel),
         fmt::format("it is called {} now", renamed), {"Use ", setting("kernel", renamed), "."});
  }
  fail(ErrorCode::kUsage, fmt::format("there is no kernel \"{}\"", request.kernel),
       fmt::format("known: {}", fmt::join(names, ", ")), suggest(request.kernel, names));
}

// Why an entry cannot do the job. Empty: it can.
std::string obstacle(const KernelEntry& row, const std::function<std::vector<std::string>()>& missing,
                     KernelScope scope) {
  const std::string unavailable = scope == KernelScope::kThisMachine ? row.unavailable() : std::string();
  if (!unavailable.empty()) return unavailable;
  const std::vector<std::string> lacks = missing();
  if (lacks.empty()) return {};
  return fmt::format("supported: {}; missing: {}", row.supports, fmt::join(lacks, ", "));
}

}  // namespace

std::string identity_of(const KernelEntry& kernel, const Backend& backend, Dtype dtype) {
  return kernel.amx_bf16 && dtype == Dtype::kBf16 ? backend.identity() : backend.vector_identity();
}

std::string_view renamed_kernel(std::string_view old_name) {
  const auto* const found =
      std::ranges::find(kRenamed, old_name, &std::pair<std::string_view, std::string_view>::first);
  return found == std::end(kRenamed) ? std::string_view() : found->second;
}

std::span<const KernelEntry> copy_kernels() { return kCopies; }

std::span<const OpKernel> all_kernels() {
  static const std::vector<OpKernel> all = [] {
    std::vector<OpKernel> rows;
    const auto add = [&rows](std::string_view op, const auto& table) {
      for (const auto& row : table) rows.push_back({op, &row});
    };
    add("attention", kernel_table<AttentionSpec>());
    add("attention_backward", kernel_table<AttentionBackwardSpec>());
    add("decode", kernel_table<DecodeSpec>());
    add("batched_gemm", kernel_table<BatchedGemmSpec>());
    add("weight_gradient", kernel_table<WeightGradientSpec>());
    add("linear", kernel_table<LinearSpec>());
    add("rope", kernel_table<RopeSpec>());
    add("gated_delta", kernel_table<GatedDeltaSpec>());
    add("ssm", kernel_table<SsmSpec>());
    add("ssd_backward", kernel_table<SsdBackwardSpec>());
    add("conv1d", kernel_table<CausalConv1dSpec>());
    return rows;
  }();
  return all;
}

EntryChoice choose_entry(Rows rows, const std::function<std::vector<std::string>(std::size_t)>& missing,
                         const std::string& required, const KernelRequest& request, KernelScope scope) {
  check_backend(rows, request.backend);
  check_kernel(rows, request, required);
  std::optional<std::size_t> chosen;
  std::size_t able = 0;
  std::vector<std::pair<std::string, std::string>> obstacles;  // names of entries, and their common reason
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const KernelEntry& row = *rows[i];
    if (request.kernel != "auto" && request.kernel != row.name) continue;
    if (request.backend != "auto" && request.backend != row.backend) continue;
    const std::string reason = obstacle(
        row, [&] { return missing(i); }, scope);
    if (reason.empty()) {
      if (!chosen) chosen = i;
      ++able;
    } else if (!obstacles.empty() && obstacles.back().second == reason) {
      obstacles.back().first += fmt::format(", {}", row.name);
    } else {
      obstacles.emplace_back(row.name, reason);
    }
  }
  std::string rejected;
  for (const auto& [names, reason] : obstacles) rejected += fmt::format("; {}: {}", names, reason);
  if (!chosen) {
    fail(ErrorCode::kUnsupported,
         request.kernel == "auto" ? std::string("no kernel can do this job")
                                  : fmt::format("kernel {} can't do this job", request.kernel),
         fmt::format("required: {}{}", required, rejected),
         request.kernel == "auto" && request.backend == "auto"
             ? MessageTemplate{"See ", command("info"), " for what kernels do."}
             : MessageTemplate{"Leave ", setting("kernel"), " and ", setting("backend"), " out, or see ",
                               command("info"), "."});
  }
  const std::string_view name = rows[*chosen]->name;
  std::string reason = request.kernel != "auto" ? fmt::format("forced: {} ({})", name, required)
                                                : fmt::format("first of {} that can: {} ({})", able, name, required);
  if (!rejected.empty()) reason += fmt::format("; passed over{}", rejected.substr(1));
  return {*chosen, reason};
}

}  // namespace ringattn
