// SPDX-License-Identifier: Apache-2.0
// What structs of the C interface mean to the library: specs, batches, options.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/batched_gemm.hpp"
#include "attention/causal_conv1d.hpp"
#include "attention/decode.hpp"
#include "attention/options.hpp"
#include "attention/ssm.hpp"
#include "attention/tokens/batch.hpp"
#include "c/ringattn.h"
#include "comm/transport.hpp"
#include "kernels/attention.hpp"
#include "kernels/decode.hpp"
#include "kernels/key_positions.hpp"
#include "kernels/mla.hpp"
#include "kernels/row_format.hpp"

namespace ringattn::c {

// All throw kUsage for structs of unknown sizes, unknown values, and lists that are missing.
// `format`: how keys and values are stored.
AttentionSpec read_spec(const ringattn_spec* spec, CacheFormat& format);
Mask read_mask(std::int32_t mask, std::int64_t left, std::int64_t right);
// `positions`: where keys of `kv_heads` heads stand; null where they follow each other.
Batch read_batch(const ringattn_batch* batch, int kv_heads, std::shared_ptr<const KeyPositions>& positions);
// Of an op whose keys have no positions.
Batch read_batch(const ringattn_batch* batch);
// Sequences of a scan, or of a convolution.
struct SsmBatch {
  std::vector<std::int64_t> lengths;
  bool initial = false;
  bool final = false;
  bool update = false;
};
SsmBatch read_ssm_batch(const ringattn_ssm_batch* batch);
// `format`: how latents lie, checked with the job.
MlaSpec read_mla_spec(const ringattn_mla_spec* spec, RowFormat& format);
DecodeLimits read_limits(const ringattn_decode_limits* limits, std::int64_t& page_size, std::int64_t& pages);

// NULL: all defaults. The kernel's backend is that of the transport's memory.
Options read_options(const ringattn_options* options, const Batch& batch, const Transport& transport);
// Those of them that a step of decoding has; throws kUsage for layouts and blocks.
DecodeOptions read_decode_options(const ringattn_options* options, const Transport& transport);
// Those of them that compressing has: threads.
int read_threads(const ringattn_options* options);
// Those of them that a product has: kernel and threads.
BatchedGemmOptions read_batched_gemm_options(const ringattn_options* options, const Transport& transport);
// A number of threads, 0 standing for all processors.
int read_thread_count(std::int64_t threads);
// Those of them that a scan has, and those that a convolution has.
SsmOptions read_ssm_options(const ringattn_options* options, const Transport& transport);
CausalConv1dOptions read_conv1d_options(const ringattn_options* options, const Transport& transport);

}  // namespace ringattn::c
