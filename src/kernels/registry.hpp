// SPDX-License-Identifier: Apache-2.0
// The table of fold kernels in order of preference, and the choice among them. Choosing is pure and explains itself;
// making a kernel is a row's own function.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/fold.hpp"

namespace ringattn {

// A kernel = one row. `missing` says what the kernel lacks for a spec, or nothing if it can do it.
struct KernelRow {
  std::string_view name;      // e.g. "cpu_fold"; the architecture first
  std::string_view backend;   // "cpu", "cuda"
  std::string_view supports;  // one line for people: dtypes, dims, masks
  // How it computes each shape that it is compiled for, a line each; empty: all alike.
  std::vector<std::string> (*configs)();
  // What it reaches where nobody has measured, by the convention of job_flops(): plans and time limits rest on it.
  double flops_per_second;
  // Why the kernel can't run on this machine at all; empty: it can.
  std::string (*unavailable)();
  // What the spec requires that the kernel lacks, one entry each, e.g. "head_dim 260 (supported: multiples of 8 up to
  // 256)".
  std::vector<std::string> (*missing)(const FoldSpec& spec);
  std::unique_ptr<Backend> (*make_backend)(const BackendOptions& options);
  // `backend` is what this row's make_backend made and outlives the kernel.
  std::unique_ptr<FoldKernel> (*make_kernel)(const FoldSpec& spec, Backend& backend);
};

std::span<const KernelRow> kernel_table();

// What the caller asked for: "auto" or a name.
struct KernelRequest {
  std::string backend = "auto";
  std::string kernel = "auto";
};

struct KernelChoice {
  const KernelRow* row = nullptr;
  std::string reason;  // e.g. "first of 1 that can: cpu_fold (bf16, head_dim 128, causal)"
};

// Whether a kernel is to run on this machine, or is asked about for another one.
enum class KernelPlace { kHere, kAnywhere };

// The first row that can do `spec` (here) and matches the request. Throws kUsage for an unknown name, and kUnsupported,
// listing required, supported and missing, when no row (or not the forced one) can.
KernelChoice choose_kernel(const FoldSpec& spec, const KernelRequest& request, KernelPlace place = KernelPlace::kHere);

// Throws kUsage when heads, dims, scale or soft-cap contradict each other. Names the configuration ("MHA", "GQA 4:1",
// "MQA").
std::string check_heads(const FoldSpec& spec);

// One line that says what a spec needs, e.g. "bf16, heads 32/8 (GQA 4:1), head_dim 128, causal, softcap 50, sinks".
std::string describe(const FoldSpec& spec);
std::string describe(const Mask& mask);  // "full", "causal", "window 4095,0"

}  // namespace ringattn
