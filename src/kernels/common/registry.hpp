// SPDX-License-Identifier: Apache-2.0
// The kernel tables, one for each op, and the choice of a kernel. The choice is a pure function that is the same for
// every op and returns its reason. A spec's type selects the op's table, and Spec::Kernel is the interface that the
// table's entries create.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/common/host_work.hpp"
#include "kernels/common/platform.hpp"
#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn {

// Stands for a job that is so long that its length does not change a kernel's speed.
inline constexpr std::int64_t kManyTokens = std::int64_t{1} << 24;

// The fields that every kernel's entry has, whatever its op.
struct KernelEntry : KernelPlatform {
  std::string_view name;      // e.g. "cpu_attention"; starts with the architecture
  std::string_view supports;  // one line for people: dtypes, dims, masks
  // Default estimate of the kernel's speed on a backend, in flop/s as job_flops() counts them, used when there is no
  // measurement. Time estimates and block sizes depend on it, so it must be the same in every run. For attention
  // kernels it is the speed for measured_spec() (attention/ring/machine_model.hpp) in bf16.
  double (*flops_per_second)(const Backend& backend);
  // One line for each shape that the kernel is compiled for, saying how that shape is computed. Null: all shapes alike.
  std::vector<std::string> (*configs)() = nullptr;
  bool amx_bf16 = false;  // bf16 uses AMX tiles if the backend has them, which affects its bits
};

// The device model and instruction set that a kernel's bits depend on, for inputs of `dtype`.
std::string identity_of(const KernelEntry& kernel, const Backend& backend, Dtype dtype = Dtype::kBf16);

// One table entry: a kernel of the op that `Spec` describes.
template <class Spec>
struct KernelRow : KernelEntry {
  // What the spec requires and the kernel does not support, one string per requirement, e.g. "head_dim 260 (supported:
  // multiples of 8 up to 256)".
  std::vector<std::string> (*missing)(const Spec& spec);
  // `backend` was created by this entry's make_backend and outlives the kernel.
  std::unique_ptr<typename Spec::Kernel> (*make_kernel)(const Spec& spec, Backend& backend);
  // CPU kernels: the work of a call that computes `tokens` tokens (kManyTokens: so many that their number does not
  // matter), from which all their time estimates are made. Null: flops_per_second() for all specs.
  HostWork (*host_work)(const Spec& spec, const Backend& backend, std::int64_t tokens) = nullptr;
  // GPU kernels: flops_per_second() for the dtype and dims of `spec`. Null: the speed is the same for all specs.
  double (*spec_flops_per_second)(const Spec& spec, const Backend& backend, std::int64_t tokens) = nullptr;

  // Estimated flop/s for `spec`. `rates`: of a host rank's processors; null: default_host_rates().
  double speed(const Spec& spec, const Backend& here, std::int64_t tokens = kManyTokens,
               const HostRates* rates = nullptr) const {
    const std::int64_t some = std::max<std::int64_t>(1, tokens);  // a job of no tokens has a rate, too
    if (host_work != nullptr) return host_speed(host_work(spec, here, some), rates);
    return spec_flops_per_second == nullptr ? flops_per_second(here) : spec_flops_per_second(spec, here, some);
  }
};

// An op's kernels in order of preference. Each op specializes it in its own file.
template <class Spec>
std::span<const KernelRow<Spec>> kernel_table();

// The entries of all tables, each with the name of its op ("attention", "ssm"). A kernel that computes two ops has an
// entry in each table.
struct OpKernel {
  std::string_view op;
  const KernelEntry* row = nullptr;

  bool operator==(const OpKernel&) const = default;
};
std::span<const OpKernel> all_kernels();

// Copies of rows, one entry for each backend of this build. Their time is not estimated.
std::span<const KernelEntry> copy_kernels();

// The name of the kernel that was called `old_name` before 0.4; empty: no kernel was.
std::string_view renamed_kernel(std::string_view old_name);

// The caller's request: "auto" or a name.
struct KernelRequest {
  std::string backend = "auto";
  std::string kernel = "auto";
};

template <class Spec>
struct KernelChoice {
  const KernelRow<Spec>* row = nullptr;
  std::string reason;  // e.g. "first of 1 that can: cpu_attention (bf16, head_dim 128, causal)"
};

// Whether the kernel must be able to run on this machine, or may need another one.
enum class KernelScope { kThisMachine, kAnyMachine };

// The op-independent part of choose_kernel(): returns the index of one of `rows`, and why. `missing(i)` returns what
// entry i lacks, and `required` describes the spec.
struct EntryChoice {
  std::size_t row = 0;
  std::string reason;
};
EntryChoice choose_entry(std::span<const KernelEntry* const> rows,
                         const std::function<std::vector<std::string>(std::size_t)>& missing,
                         const std::string& required, const KernelRequest& request, KernelScope scope);

// Returns the first entry that supports `spec`, runs here (for kThisMachine) and matches the request. Throws kUsage for
// an unknown name. Throws kUnsupported if no entry (or not the requested one) can, with what is required, supported and
// missing, and if the requested kernel belongs to another op. Every op has a describe(spec) that says in one line what
// the spec needs.
template <class Spec>
KernelChoice<Spec> choose_kernel(const Spec& spec, const KernelRequest& request,
                                 KernelScope scope = KernelScope::kThisMachine) {
  const std::span<const KernelRow<Spec>> table = kernel_table<Spec>();
  std::vector<const KernelEntry*> rows;
  for (const KernelRow<Spec>& row : table) rows.push_back(&row);
  const EntryChoice choice = choose_entry(
      rows, [&](std::size_t row) { return table[row].missing(spec); }, describe(spec), request, scope);
  return {&table[choice.row], choice.reason};
}

// Attention.
using AttentionRow = KernelRow<AttentionSpec>;
using AttentionChoice = KernelChoice<AttentionSpec>;
template <>
std::span<const AttentionRow> kernel_table<AttentionSpec>();

// Batched GEMM.
using BatchedGemmRow = KernelRow<BatchedGemmSpec>;
template <>
std::span<const BatchedGemmRow> kernel_table<BatchedGemmSpec>();

// Ops that are only declared here.
struct AttentionBackwardSpec;
struct DecodeSpec;
struct SsmSpec;
struct SsdBackwardSpec;
struct CausalConv1dSpec;
struct WeightGradientSpec;
template <>
std::span<const KernelRow<AttentionBackwardSpec>> kernel_table<AttentionBackwardSpec>();
template <>
std::span<const KernelRow<DecodeSpec>> kernel_table<DecodeSpec>();
template <>
std::span<const KernelRow<SsmSpec>> kernel_table<SsmSpec>();
template <>
std::span<const KernelRow<SsdBackwardSpec>> kernel_table<SsdBackwardSpec>();
template <>
std::span<const KernelRow<CausalConv1dSpec>> kernel_table<CausalConv1dSpec>();
template <>
std::span<const KernelRow<WeightGradientSpec>> kernel_table<WeightGradientSpec>();

// Whether an SSM kernel rounds the factors of its products for y to the dtype (kernels/ssm/ssm.hpp).
bool rounds_factors(const KernelEntry& ssm);

// Throws kUsage if heads, dims, scale or softcap contradict each other. Returns the head configuration ("MHA", "GQA
// 4:1", "MQA").
std::string check_heads(const AttentionSpec& spec);

// One line that says what a spec needs, e.g. "bf16, heads 32/8 (GQA 4:1), head_dim 128, causal, softcap 50, sinks".
std::string describe(const AttentionSpec& spec);
std::string describe(const Mask& mask);  // "full", "causal", "window 4095,0"

}  // namespace ringattn
