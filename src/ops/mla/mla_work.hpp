// SPDX-License-Identifier: Apache-2.0
// Describes an MLA job to the ring: its row streams and its cost per pair, key and query. Pure, so that plans need no
// ranks or devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "attention/options.hpp"
#include "attention/ring/row_stream.hpp"
#include "attention/tokens/mla_job.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "ops/attention/plan_summary.hpp"
#include "ops/mla/mla_block_size.hpp"

namespace ringattn {

// The row streams of a token: latent, then rotary key; or one FP8 row with both.
RowStreams latent_streams(const MlaJob& job);

// Bytes per row of the buffer that FP8 rows are dequantized into before they are expanded. 0 in the absorbed form,
// which dequantizes while it gathers.
std::int64_t dequantized_row_bytes(const MlaJob& job);

// Bytes of one gathered row: expanded, keys and values of `heads` heads; absorbed, [c, k_r].
std::int64_t gathered_row_bytes(const MlaSpec& spec, MlaForm form, int heads);

// Bytes of attention state of `rows` query rows for one range of heads, aligned to 256.
std::size_t mla_state_stride(const AttentionKernel& attention, std::int64_t rows);

// The kernels of a form, all of one backend.
struct MlaChoice {
  AttentionChoice attention;               // of form_spec() for all heads
  const BatchedGemmRow* keys = nullptr;    // of key_gemm(); null if not needed
  const BatchedGemmRow* values = nullptr;  // of value_gemm(); null if not needed

  // Name of the GEMM kernel; empty: there is no GEMM.
  std::string_view gemms() const {
    const BatchedGemmRow* const row = keys != nullptr ? keys : values;
    return row == nullptr ? std::string_view() : row->name;
  }
};
// As choose_kernel(), but skips backends that can't run the job's GEMMs: GPUs have no fp32 GEMM kernel. Throws
// kUnsupported if `request` names a backend or a kernel without GEMMs.
MlaChoice choose_mla_kernels(const MlaSpec& spec, MlaForm form, const KernelRequest& request,
                             KernelScope scope = KernelScope::kThisMachine);

// The created kernels of a form.
struct MlaKernels {
  const AttentionKernel& attention;  // of form_spec() for MlaBlockSize::heads
  const BatchedGemmKernel* keys;     // of key_gemm(); may be null
  const BatchedGemmKernel* values;   // of value_gemm(); may be null
};
// The input of a plan summary for a job that has its form. `kernels` must outlive the result.
RingJob ring_job(const MlaJob& job, const Options& options, const MlaBlockSize& block_size, const MlaKernels& kernels);

// Rows that the plan's rank receives from others in a run.
std::int64_t received_rows(const Plan& plan);

}  // namespace ringattn
