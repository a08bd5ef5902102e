// SPDX-License-Identifier: Apache-2.0
// Compresses the keys and values of a file or of a seed, or the latents of a file, or evicts tokens, and writes a file
// that run, verify, bench and plan read. One process does this in host memory. If there is a GPU, it quantizes formats
// without a rank; the bytes are the same.
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
  bool replace = false;  // an existing output file may be replaced
  CacheMethod method;
  // Share to remove: for an eviction, of the tokens (absent: half); otherwise of the bytes (absent: the method's usual
  // format). After an eviction, rows are stored in the method's usual format.
  std::optional<double> ratio;
  Numerics numerics;       // of the queries that an eviction reads
  bool compared = false;   // O over both caches will be compared, so its other inputs must be finite, too
  std::uint64_t seed = 0;  // of codebooks
  int threads = 1;
};

// Result for one tensor.
struct CompressedFigures {
  RowFormat format;
  std::int64_t bytes_before = 0;
  std::int64_t bytes_after = 0;     // streams and tables
  std::int64_t table_bytes = 0;     // of bytes_after
  double energy_kept = 1.0;         // CompressedTensor
  double error = 0.0;               // of kept tokens: root mean square of the change, divided by that of the elements
  double compress_seconds = 0.0;    // time to quantize the tensor and make its tables
  double decompress_seconds = 0.0;  // time to decompress all elements
};

struct CompressResult {
  CompressedFigures k, v;
  std::optional<CompressedFigures> latent;  // MLA only, which has neither k nor v. The error is only that of the
                                            // latents; the bytes include the rotary keys
  std::int64_t tokens = 0;
  std::int64_t kept = 0;            // kept tokens
  std::int64_t position_bytes = 0;  // of k_positions and k_lengths, if tokens were evicted
  double evict_seconds = 0.0;       // time to compute scores and to evict tokens
  std::string quantized_on;         // identity of the GPU; empty: the host
  UnreadTensors unread;             // of the input file; not copied to the output

  std::int64_t bytes_before() const { return k.bytes_before + v.bytes_before + (latent ? latent->bytes_before : 0); }
  std::int64_t bytes_after() const {
    return k.bytes_after + v.bytes_after + position_bytes + (latent ? latent->bytes_after : 0);
  }
};

// Reads, compresses and writes. Other tensors that a job over the cache needs are copied. The file appears complete or
// not at all. Before a tensor takes memory, elements are checked to be finite, and the required memory is known. Throws
// kFile: the file can't be read or written, elements are not finite (naming tensor and index), or it is one of SSM
// layers; kUsage: an invalid ratio, an eviction without the queries it reads, and a method that latents don't have;
// kUnsupported: a method that this build lacks; kMemory: more than this process may use. Pages are compressed by
// compress_pages(), latents by compress_latents() (compress_common.hpp).
CompressResult compress_file(const CompressJob& job);

}  // namespace ringattn
