// SPDX-License-Identifier: Apache-2.0
// The tables of kernels, one for each op, and the choice among a table's rows. Choosing is pure and explains itself,
// and is the same for every op; making a kernel is a row's own function. An op is known by its spec: the spec's type
// selects the table, and Spec::Kernel is what its rows make.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/batched_gemm.hpp"

namespace ringattn {

// What the row of every kernel says, whichever op it computes.
struct KernelEntry {
  std::string_view name;      // e.g. "cpu_attention"; the architecture first
  std::string_view backend;   // "cpu", "cuda"
  std::string_view supports;  // one line for people: dtypes, dims, masks
  // How it computes each shape that it is compiled for, a line each; empty: all alike.
  std::vector<std::string> (*configs)();
  // What it reaches on a backend of its own where nobody has measured, by the convention of job_flops(): predictions
  // and block sizes rest on it, so it is the same in every run.
  double (*flops_per_second)(const Backend& backend);
  // Why the kernel can't run on this machine at all; empty: it can.
  std::string (*unavailable)();
  std::unique_ptr<Backend> (*make_backend)(const BackendOptions& options);
};

// A kernel of the op that `Spec` describes = one row.
template <class Spec>
struct KernelRow : KernelEntry {
  // What the spec requires that the kernel lacks, one entry each, e.g. "head_dim 260 (supported: multiples of 8 up to
  // 256)".
  std::vector<std::string> (*missing)(const Spec& spec);
  // `backend` is what this row's make_backend made and outlives the kernel.
  std::unique_ptr<typename Spec::Kernel> (*make_kernel)(const Spec& spec, Backend& backend);
};

// An op's kernels in order of preference. Each op specialises it in a file of its own.
template <class Spec>
std::span<const KernelRow<Spec>> kernel_table();

// The rows of all tables, one table after the other, each with the op of its table: "attention", "decode",
// "batched_gemm", "ssm", "conv1d". A kernel that computes two ops has a row of each.
struct OpKernel {
  std::string_view op;
  const KernelEntry* row = nullptr;

  bool operator==(const OpKernel&) const = default;
};
std::span<const OpKernel> all_kernels();

// The name of the kernel that was called `old_name` before 0.4; empty: no kernel was.
std::string_view renamed_kernel(std::string_view old_name);

// What the caller asked for: "auto" or a name.
struct KernelRequest {
  std::string backend = "auto";
  std::string kernel = "auto";
};

template <class Spec>
struct KernelChoice {
  const KernelRow<Spec>* row = nullptr;
  std::string reason;  // e.g. "first of 1 that can: cpu_attention (bf16, head_dim 128, causal)"
};

// Whether a kernel is to run on this machine, or is asked about for another one.
enum class KernelScope { kThisMachine, kAnyMachine };

// The same choice for every op: the number of a row among `rows`, and why. `missing` says what the row of a number
// lacks, and `required` describes the spec. See choose_kernel().
struct EntryChoice {
  std::size_t row = 0;
  std::string reason;
};
EntryChoice choose_entry(std::span<const KernelEntry* const> rows,
                         const std::function<std::vector<std::string>(std::size_t)>& missing,
                         const std::string& required, const KernelRequest& request, KernelScope place);

// The first row that can do `spec` (here) and matches the request. Throws kUsage for an unknown name, and kUnsupported,
// listing required, supported and missing, when no row (or not the forced one) can, or the forced one is of another op.
// A describe(spec) that says in one line what the spec needs belongs to every op.
template <class Spec>
KernelChoice<Spec> choose_kernel(const Spec& spec, const KernelRequest& request,
                                 KernelScope place = KernelScope::kThisMachine) {
  const std::span<const KernelRow<Spec>> table = kernel_table<Spec>();
  std::vector<const KernelEntry*> rows;
  for (const KernelRow<Spec>& row : table) rows.push_back(&row);
  const EntryChoice choice = choose_entry(
      rows, [&](std::size_t row) { return table[row].missing(spec); }, describe(spec), request, place);
  return {&table[choice.row], choice.reason};
}

// The fold.
using AttentionRow = KernelRow<AttentionSpec>;
using AttentionChoice = KernelChoice<AttentionSpec>;
template <>
std::span<const AttentionRow> kernel_table<AttentionSpec>();

// The products of heads with their matrices.
using BatchedGemmRow = KernelRow<BatchedGemmSpec>;
template <>
std::span<const BatchedGemmRow> kernel_table<BatchedGemmSpec>();

// Whether a scan's kernel rounds the factors of what it adds to rows of y to the dtype (kernels/ssm.hpp).
bool rounds_factors(const KernelEntry& scan);

// Throws kUsage when heads, dims, scale or soft-cap contradict each other. Names the configuration ("MHA", "GQA 4:1",
// "MQA").
std::string check_heads(const AttentionSpec& spec);

// One line that says what a spec needs, e.g. "bf16, heads 32/8 (GQA 4:1), head_dim 128, causal, softcap 50, sinks".
std::string describe(const AttentionSpec& spec);
std::string describe(const Mask& mask);  // "full", "causal", "window 4095,0"

}  // namespace ringattn
