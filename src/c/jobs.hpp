// SPDX-License-Identifier: Apache-2.0
// Converts structs of the C API to specs, batches and options of the library.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/options.hpp"
#include "attention/tokens/batch.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "c/ringattn.h"
#include "comm/transport.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/key_positions.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/quant/row_format.hpp"
#include "ops/batched_gemm/batched_gemm.hpp"
#include "ops/conv1d/causal_conv1d.hpp"
#include "ops/decode/decode.hpp"
#include "ops/linear/linear.hpp"
#include "ops/rope/rope.hpp"
#include "ops/ssm/ssm.hpp"

namespace ringattn::c {

// All functions throw kUsage for structs of unknown sizes, unknown values, and missing arrays.
// `format`: receives the formats of keys and values.
AttentionSpec read_spec(const ringattn_spec* spec, CacheFormat& format);
// The job of an attention, with its key positions.
Job read_job(const ringattn_spec* spec, const ringattn_batch* batch);
Mask read_mask(std::int32_t mask, std::int64_t left, std::int64_t right);
// `positions`: receives the key positions for `kv_heads` heads; null if key i has position i.
Batch read_batch(const ringattn_batch* batch, int kv_heads, std::shared_ptr<const KeyPositions>& positions);
// The same for ops without key positions.
Batch read_batch(const ringattn_batch* batch);
// The sequences of an SSM or conv1d.
struct SsmBatch {
  std::vector<std::int64_t> lengths;
  bool initial = false;
  bool final = false;
  bool update = false;
};
SsmBatch read_ssm_batch(const ringattn_ssm_batch* batch);
// The lengths of sequences, in tokens. `name`: the struct whose members these are.
std::vector<std::int64_t> read_lengths(const char* name, std::int64_t sequences, const std::int64_t* lengths);
// The runs of each rank.
std::vector<std::vector<TokenRun>> read_runs(const ringattn_run* runs, std::int64_t count, int world);
SsmSpec read_ssm_spec(const ringattn_ssm_spec* spec);
RopeSpec read_rope_spec(const ringattn_rope_spec* spec);
// RINGATTN_GRADIENTS_…; `inputs`: the dtype of the inputs.
Dtype read_gradients(std::int32_t gradients, Dtype inputs);
// `format`: receives the format of the latents, which is checked with the job.
MlaSpec read_mla_spec(const ringattn_mla_spec* spec, RowFormat& format);
DecodeLimits read_limits(const ringattn_decode_limits* limits, std::int64_t& page_size, std::int64_t& pages);

// NULL: all defaults. The kernel's backend is that of the transport's memory.
Options read_options(const ringattn_options* options, const Batch& batch, const Transport& transport);
// The options of MLA's gradients, which have no memory budget.
Options read_mla_backward_options(const ringattn_options* options, const Batch& batch, const Transport& transport);
// The options of a decode. Throws kUsage for layouts and blocks.
DecodeOptions read_decode_options(const ringattn_options* options, const Transport& transport);
// The option of compression: threads.
int read_threads(const ringattn_options* options);
// The options of a batched GEMM: kernel and threads.
BatchedGemmOptions read_batched_gemm_options(const ringattn_options* options, const Transport& transport);
// The options of RoPE: kernel and threads, too.
RopeOptions read_rope_options(const ringattn_options* options, const Transport& transport);
LinearJob read_linear_job(const ringattn_linear_spec* spec);
// The options of a linear layer: kernel, threads and timeout_seconds.
LinearOptions read_linear_options(const ringattn_options* options, const Transport& transport);
// The option of a reshard: timeout_seconds.
double read_reshard_timeout(const ringattn_options* options);
// Reads a number of threads; 0 means all processors.
int read_thread_count(std::int64_t threads);
// The options of an SSM, and of a conv1d.
// `op`: in messages.
SsmOptions read_ssm_options(const ringattn_options* options, const Transport& transport, const char* op = "an SSM");
CausalConv1dOptions read_conv1d_options(const ringattn_options* options, const Transport& transport);

}  // namespace ringattn::c
