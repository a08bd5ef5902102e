// SPDX-License-Identifier: Apache-2.0
// The machine model of a plan. `ringattn info --measure` writes it to a file, and `--machine` reads that file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/attention/attention.hpp"
#include "kernels/common/host_work.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

struct Batch;

struct MachineModel {
  std::string name = "default";
  double flops_per_second = 5e10;      // attention FLOPs of one rank, counted as in job_flops(), of measured_spec(bf16)
  double link_bytes_per_second = 5e9;  // received by one rank
  double latency_seconds = 20e-6;      // per message
  // Members that older files lack.
  double fp32_flops_per_second = 0.0;    // of measured_spec(fp32); 0: not measured
  double memory_bytes_per_second = 0.0;  // read by one rank with all of its threads; 0: not measured
  std::string kernel = {};               // with which flops_per_second was measured; empty: the first of its backend
  // Rates of one thread of a host rank while the others are idle, and the time of an empty parallel region; 0: not
  // measured.
  double thread_flops_per_second = 0.0;
  double thread_fp32_flops_per_second = 0.0;
  double thread_memory_bytes_per_second = 0.0;
  double region_seconds = 0.0;
  // Whether flops_per_second is that of a job (job_machine()), not of measured_spec(). Not in files.
  bool of_job = false;

  bool operator==(const MachineModel&) const = default;
};

// The attention for which a machine model states the speed: 8 query heads, 2 K/V heads of 128 dims, causal.
AttentionSpec measured_spec(Dtype dtype);

// The assumed machine model of a kernel that computes `flops_per_second`, if none was measured. Constant, so that plans
// are reproducible. The second form is for the kernel's own speed.
MachineModel default_machine(const KernelEntry& kernel, double flops_per_second);
MachineModel default_machine(const KernelEntry& kernel, const Backend& backend);

// How much faster a measured machine is than the default: its speed for `dtype` divided by the default speed of the
// kernel that it was measured with. 1 if nothing was measured. `kernel` is any kernel that runs on `backend`.
double machine_factor(const MachineModel& given, const KernelEntry& kernel, Dtype dtype, const Backend& backend);

// The rates of a host rank of `threads` threads: the measured ones, and the default rates of what was not measured.
HostRates host_rates(const MachineModel& given, int threads);

// The estimated speed of a kernel on the given machine, where a rank computes `tokens`, in flop/s.
template <class Spec>
double machine_speed(const MachineModel& given, const KernelRow<Spec>& kernel, const Spec& spec, Dtype dtype,
                     const Backend& backend, std::int64_t tokens) {
  if (kernel.host_work == nullptr) {
    return kernel.speed(spec, backend, tokens) * machine_factor(given, kernel, dtype, backend);
  }
  const HostWork work = kernel.host_work(spec, backend, std::max<std::int64_t>(1, tokens));
  const HostRates rates = host_rates(given, work.threads);
  return host_speed(work, &rates);
}

// The machine model of a job whose kernel has the estimated speed `flops_per_second`: default_machine() if `given` is
// not set, else `given` with that speed.
MachineModel job_machine(const MachineModel& given, const KernelEntry& kernel, double flops_per_second);

// The same for attention of `spec`, where the rank computes `tokens` queries.
MachineModel job_machine(const MachineModel& given, const KernelRow<AttentionSpec>& kernel, const AttentionSpec& spec,
                         const Backend& backend, std::int64_t tokens);

// Queries of a rank among `world`, rounded up.
std::int64_t tokens_of_rank(const Batch& batch, int world);

// Parses a file with the members of MachineModel: TOML if `path` ends in ".toml", else JSON. Throws kFile for unknown
// members, for missing members (except those that older files lack), and for numbers that aren't positive (latency:
// that are negative).
MachineModel parse_machine_model(std::string_view text, const std::string& path);
MachineModel read_machine_model(const std::string& path);

// The text of such a file, in the format given by the extension of `path`.
std::string machine_model_text(const MachineModel& machine, std::string_view path);

}  // namespace ringattn
