// SPDX-License-Identifier: Apache-2.0
// Describes a backward pass to the ring and to its plan: row streams, FLOPs and memory.
#pragma once

#include "attention/options.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "ops/attention/plan_summary.hpp"
#include "ops/attention_backward/attention_backward.hpp"

namespace ringattn {

// The row streams of a token, in the order of backward_streams().
enum BackwardStream : std::size_t { kKeyStream, kValueStream, kQueryStream, kDoutStream, kRowStatsStream };
RowStreams backward_streams(const AttentionSpec& spec);

// The kernel's spec of a job.
AttentionBackwardSpec backward_spec(const BackwardJob& job);

// job_machine() of gradients where a rank computes `tokens` queries.
MachineModel backward_machine(const MachineModel& given, const KernelRow<AttentionBackwardSpec>& kernel,
                              const BackwardJob& job, const Backend& backend, std::int64_t tokens);

// The sequences of a batch in the form that kernels take.
std::vector<BackwardSequence> backward_sequences(const Batch& batch);

// `kernel` outlives the result.
RingJob backward_ring_job(const BackwardJob& job, const AttentionBackwardKernel& kernel, const Options& options);

// Upper bounds over the tasks of a plan. With a memory budget or a stated block size, dQ and dK/dV do not share scores,
// because that may take a few GiB of scratch memory.
BackwardLimits backward_limits(const Plan& plan, const Options& options);

// Whether the dQ task and the dK/dV task of a block have the same pairs: this rank has all queries and keys, in one
// block.
bool has_same_pairs(const Plan& plan);

}  // namespace ringattn
