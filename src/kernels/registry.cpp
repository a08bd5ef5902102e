// SPDX-License-Identifier: Apache-2.0
#include "kernels/registry.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/cpu/cpu_fold.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm80/sm80_fold.hpp"
#include "kernels/sm80/sm80_plain.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/sm90/fold/config.hpp"
#include "kernels/sm90/fold/sm90_fold.hpp"
#endif

namespace ringattn {

namespace {

std::vector<std::string> one_for_all() { return {}; }

constexpr KernelRow kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {"sm90_fold", "cuda",
     "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
     sm90::fold_configs, 5.5e14, sm90::fold_unavailable, sm90::fold_missing, cuda::make_cuda_backend, sm90::make_fold},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {"sm80_fold", "cuda",
     "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
     sm80::fold_configs, 3.5e14,  // an H200, rounded down, as below
     cuda::cuda_unavailable, sm80::fold_missing, cuda::make_cuda_backend, sm80::make_fold},
    {"sm80_plain", "cuda", "fp32, bf16, fp16; head dims that are multiples of 8 up to 256; every mask, softcap, sinks",
     one_for_all, 3e12, cuda::cuda_unavailable, sm80::plain_missing, cuda::make_cuda_backend, sm80::make_plain},
#endif
    {"cpu_fold", "cpu", "fp32, bf16, fp16; head dims that are multiples of 8 up to 256; every mask, softcap, sinks",
     one_for_all, 5e10, [] { return std::string(); }, cpu::cpu_fold_missing, cpu::make_cpu_backend, cpu::make_cpu_fold},
};

constexpr std::string_view kBackends[] = {"auto", "cpu", "cuda"};

Wording suggest(std::string_view name, const std::vector<std::string_view>& known) {
  const std::string nearest = nearest_name(name, known.data(), known.size());
  return nearest.empty() ? Wording{"Use auto, or see ", command("info"), "."}
                         : Wording(fmt::format("Did you mean {}?", nearest));
}

void check_backend(std::string_view backend) {
  if (std::find(std::begin(kBackends), std::end(kBackends), backend) == std::end(kBackends)) {
    fail(ErrorCode::kUsage, fmt::format("there is no backend \"{}\"", backend),
         fmt::format("known: {}", fmt::join(kBackends, ", ")),
         suggest(backend, {std::begin(kBackends), std::end(kBackends)}));
  }
  if (backend == "auto") return;
  for (const KernelRow& row : kernel_table()) {
    if (row.backend == backend) return;
  }
  fail(ErrorCode::kUnsupported, fmt::format("this build has no {} kernels", backend),
       fmt::format("it was built without {}", backend), {"Use ", setting("backend", "auto"), ", or another build."});
}

void check_kernel(const KernelRequest& request) {
  if (request.kernel == "auto") return;
  std::vector<std::string_view> names{"auto"};
  for (const KernelRow& row : kernel_table()) {
    if (row.name != request.kernel) {
      names.push_back(row.name);
      continue;
    }
    if (request.backend == "auto" || request.backend == row.backend) return;
    fail(ErrorCode::kUsage, fmt::format("kernel {} does not run on backend {}", row.name, request.backend),
         fmt::format("it is a {} kernel", row.backend), {"Use ", setting("backend", row.backend), "."});
  }
  fail(ErrorCode::kUsage, fmt::format("there is no kernel \"{}\"", request.kernel),
       fmt::format("known: {}", fmt::join(names, ", ")), suggest(request.kernel, names));
}

// Why a row can't do the job; empty: it can.
std::string obstacle(const KernelRow& row, const FoldSpec& spec, KernelPlace place) {
  const std::string unavailable = place == KernelPlace::kHere ? row.unavailable() : std::string();
  if (!unavailable.empty()) return unavailable;
  const std::vector<std::string> missing = row.missing(spec);
  if (missing.empty()) return {};
  return fmt::format("supported: {}; missing: {}", row.supports, fmt::join(missing, ", "));
}

}  // namespace

std::span<const KernelRow> kernel_table() { return kTable; }

KernelChoice choose_kernel(const FoldSpec& spec, const KernelRequest& request, KernelPlace place) {
  check_backend(request.backend);
  check_kernel(request);
  KernelChoice choice;
  std::size_t able = 0;
  std::vector<std::pair<std::string, std::string>> obstacles;  // names of rows, and what they have in common
  for (const KernelRow& row : kernel_table()) {
    if (request.kernel != "auto" && request.kernel != row.name) continue;
    if (request.backend != "auto" && request.backend != row.backend) continue;
    const std::string reason = obstacle(row, spec, place);
    if (reason.empty()) {
      if (choice.row == nullptr) choice.row = &row;
      ++able;
    } else {
      if (!obstacles.empty() && obstacles.back().second == reason) {
        obstacles.back().first += fmt::format(", {}", row.name);
      } else {
        obstacles.emplace_back(row.name, reason);
      }
    }
  }
  std::string passed_over;
  for (const auto& [names, reason] : obstacles) passed_over += fmt::format("; {}: {}", names, reason);
  if (choice.row == nullptr) {
    fail(
        ErrorCode::kUnsupported,
        request.kernel == "auto" ? std::string("no kernel can do this job")
                                 : fmt::format("kernel {} can't do this job", request.kernel),
        fmt::format("required: {}{}", describe(spec), passed_over),
        request.kernel == "auto" && request.backend == "auto"
            ? Wording{"See ", command("info"), " for what kernels do."}
            : Wording{"Leave ", setting("kernel"), " and ", setting("backend"), " out, or see ", command("info"), "."});
  }
  choice.reason = request.kernel != "auto"
                      ? fmt::format("forced: {} ({})", choice.row->name, describe(spec))
                      : fmt::format("first of {} that can: {} ({})", able, choice.row->name, describe(spec));
  if (!passed_over.empty()) choice.reason += fmt::format("; passed over{}", passed_over.substr(1));
  return choice;
}

}  // namespace ringattn
