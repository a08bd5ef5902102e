// SPDX-License-Identifier: Apache-2.0
// Compressing the keys and values of a file, or of a seed, or taking tokens out, into a file that run, verify, bench
// and plan take. One process does it, in host memory; a GPU, where there is one, makes the codes of formats without a
// rank, whose bytes are the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/files/job_input.hpp"
#include "kernels/compression_methods.hpp"
#include "kernels/tensor_compression.hpp"

namespace ringattn {

struct CompressJob {
  InputRequest input;  // k and v in rows or in pages, with or without q; not compressed yet
  std::string output;
  bool replace = false;  // an output file that exists
  CacheMethod method;
  // Share that is removed: of an eviction of the tokens (absent: half), else of the bytes (absent: the method's usual
  // format). Behind an eviction rows are stored in the method's usual format.
  std::optional<double> ratio;
  Numerics numerics;       // of the queries that an eviction looks at
  std::uint64_t seed = 0;  // of codebooks
  int threads = 1;
};

// What became of one of the two tensors.
struct CompressedFigures {
  RowFormat format;
  std::int64_t bytes_before = 0;
  std::int64_t bytes_after = 0;  // streams and tables
  std::int64_t table_bytes = 0;  // of these
  double energy_kept = 1.0;      // CompressedTensor
  double error = 0.0;            // of kept tokens: root mean square of what changed, as a share of the elements' own
};

struct CompressResult {
  CacheFormat format;
  CompressedFigures k, v;
  std::int64_t tokens = 0;
  std::int64_t kept = 0;            // of these
  std::int64_t position_bytes = 0;  // of k_positions and k_lengths, where tokens were taken out
  std::string coded_on;             // identity of the GPU that was there; empty: the host

  std::int64_t bytes_before() const { return k.bytes_before + v.bytes_before; }
  std::int64_t bytes_after() const { return k.bytes_after + v.bytes_after + position_bytes; }
};

// Reads, compresses, writes; other tensors of the file are copied. The file appears whole or not at all. Throws kFile:
// what can't be read or written, numbers that are not finite (tensor and place), latents and scans; kUsage: a
// ratio that is none, and an eviction without the queries it looks at; kUnsupported: a method that this build lacks.
// Pages are compressed by compress_pages() (compress_part.hpp).
CompressResult compress_file(const CompressJob& job);

}  // namespace ringattn
