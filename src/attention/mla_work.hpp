// SPDX-License-Identifier: Apache-2.0
// Mla attention in the words of the ring: its row streams, and what its pairs, keys and queries cost. Pure, so a
// plan can be asked for without ranks or devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "attention/mla_block_size.hpp"
#include "attention/options.hpp"
#include "attention/plan_summary.hpp"
#include "attention/ring/row_stream.hpp"
#include "attention/tokens/mla_job.hpp"
#include "kernels/attention.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// The streams of a token: its latent and its rotary key, in this order; or a row of 8 bits that has both.
RowStreams latent_streams(const MlaJob& job);

// Bytes of one row that is unpacked beside what it is gathered into: of the expanded form over rows of 8 bits. (Those
// of the absorbed form are gathered as they are unpacked.)
std::int64_t dequantized_row_bytes(const MlaJob& job);

// Bytes of one gathered row: expanded the keys and values of `heads` heads, absorbed [c, k_r].
std::int64_t gathered_row_bytes(const MlaSpec& spec, MlaForm form, int heads);

// Bytes of state for so many query rows: a part for each run of heads, each aligned to 256.
std::size_t mla_state_stride(const AttentionKernel& attention, std::int64_t rows);

// What computes a form: kernels of one backend.
struct MlaChoice {
  AttentionChoice attention;               // of form_spec() for all heads
  const BatchedGemmRow* keys = nullptr;    // of key_gemm(); null where there is none, as the next
  const BatchedGemmRow* values = nullptr;  // of value_gemm()

  // The name of the kernel of gemms; empty: there is no product.
  std::string_view gemms() const {
    const BatchedGemmRow* const row = keys != nullptr ? keys : values;
    return row == nullptr ? std::string_view() : row->name;
  }
};
// As choose_kernel(), of which the first row counts whose backend multiplies the job's matrices too: the GPUs' kernels
// multiply none of fp32. Throws kUnsupported where `request` names a backend or a kernel that has no gemms.
MlaChoice choose_mla_kernels(const MlaSpec& spec, MlaForm form, const KernelRequest& request,
                             KernelScope scope = KernelScope::kThisMachine);

// The kernels of a form.
struct MlaKernels {
  const AttentionKernel& attention;  // of form_spec() for MlaBlockSize::heads
  const BatchedGemmKernel* keys;     // of key_gemm(); null where there is none, as the next
  const BatchedGemmKernel* values;   // of value_gemm()
};
// What a summary needs of a job that has its form. The kernels outlive what is returned.
RingJob ring_job(const MlaJob& job, const Options& options, const MlaBlockSize& block_size, const MlaKernels& kernels);

// Rows that reach the plan's rank from others in a run.
std::int64_t received_rows(const Plan& plan);

}  // namespace ringattn
