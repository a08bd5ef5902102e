// SPDX-License-Identifier: Apache-2.0
// Compressing the keys and values of a file, or of a seed, or the latents of a file, or taking tokens out, into a file
// that run, verify, bench and plan take. One process does it, in host memory; a GPU, where there is one, makes the
// quantized values of formats without a rank, whose bytes are the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/quant/compression_methods.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

struct CompressJob {
  InputRequest input;  // k and v, or latents, in rows or in pages, with or without q; not compressed yet
  std::string output;
  bool replace = false;  // an output file that exists
  CacheMethod method;
  // Share that is removed: of an eviction of the tokens (absent: half), else of the bytes (absent: the method's usual
  // format). Behind an eviction rows are stored in the method's usual format.
  std::optional<double> ratio;
  Numerics numerics;       // of the queries that an eviction looks at
  bool compared = false;   // O over both caches will be compared: what else it depends on has to be finite, too
  std::uint64_t seed = 0;  // of codebooks
  int threads = 1;
};

// Result for one tensor.
struct CompressedFigures {
  RowFormat format;
  std::int64_t bytes_before = 0;
  std::int64_t bytes_after = 0;     // streams and tables
  std::int64_t table_bytes = 0;     // of these
  double energy_kept = 1.0;         // CompressedTensor
  double error = 0.0;               // of kept tokens: root mean square of what changed, as a share of the elements' own
  double compress_seconds = 0.0;    // time to quantize and to make its tables
  double decompress_seconds = 0.0;  // that all its elements took to be made of them
};

struct CompressResult {
  CompressedFigures k, v;
  std::optional<CompressedFigures> latent;  // MLA only, which has neither k nor v. The error is only that of the
                                            // latents; the bytes include the rotary keys
  std::int64_t tokens = 0;
  std::int64_t kept = 0;            // of these
  std::int64_t position_bytes = 0;  // of k_positions and k_lengths, if tokens were evicted
  double evict_seconds = 0.0;       // that scores, and taking tokens out, took
  std::string quantized_on;         // identity of the GPU that was there; empty: the host
  UnreadTensors unread;             // of the input file; they are not copied either

  std::int64_t bytes_before() const { return k.bytes_before + v.bytes_before + (latent ? latent->bytes_before : 0); }
  std::int64_t bytes_after() const {
    return k.bytes_after + v.bytes_after + position_bytes + (latent ? latent->bytes_after : 0);
  }
};

// Reads, compresses, writes; what else a job over the cache needs is copied. The file appears whole or not at all.
// Numbers that are not finite are found, and the need for memory is known, before a tensor takes memory. Throws kFile:
// what can't be read or written, numbers that are not finite (tensor and index), and SSM layers; kUsage: a ratio that
// is none, an eviction without the queries it looks at, and a method that latents don't have; kUnsupported: a method
// that this build lacks; kMemory: more than this process may use. Pages are compressed by compress_pages(), latents by
// compress_latents() (compress_common.hpp).
CompressResult compress_file(const CompressJob& job);

}  // namespace ringattn
