// SPDX-License-Identifier: Apache-2.0
// A whole tensor of keys or values between its elements and a format, in host memory: tables are found, then rows are
// coded by a host backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/backend.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/head_product.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

// The products that give a row of a rank its elements, and elements their factors: rows · basis, and rows · basisᵀ.
HeadProductSpec expansion_of(const RowFormat& format, const RowShape& shape);  // of kLowRank and kHybrid
HeadProductSpec projection_of(const RowFormat& format, const RowShape& shape);
// `basis`: [heads, rank, dim].
HeadMatrices expansion_matrices(const RowFormat& format, const RowShape& shape, const void* basis);
HeadMatrices projection_matrices(const RowFormat& format, const RowShape& shape, const void* basis);

// The sequences of a tensor lie one behind the other.
struct CompressedTensor {
  RowFormat format;
  RowShape shape;
  std::vector<std::int64_t> lengths;            // tokens of each sequence
  std::vector<std::vector<std::byte>> streams;  // dense, in the order of format_streams()
  std::vector<std::vector<std::byte>> tables;
  // Of a format with a rank: the share of the sum of squares that the factors keep; of others 1.
  double energy_kept = 1.0;

  std::int64_t tokens() const;
  std::size_t bytes() const;  // of all streams and tables
  CompressedRows rows();
  // All of it, a run for each sequence.
  std::vector<CompressedRun> runs() const;
};

// A tensor of zeros.
CompressedTensor make_compressed(const RowFormat& format, const RowShape& shape, std::vector<std::int64_t> lengths);

struct CompressionOptions {
  std::uint64_t seed = 0;  // of codebooks
  int threads = 1;         // of the host
  // Codes are made in its memory, some tokens at a time, where the format has no rank; null: by the host.
  Backend* backend = nullptr;
};

// `name`: of the tensor, for messages. Throws kUsage for a shape that the format doesn't hold, `code` for a number that
// is not finite, or that would come back as ∞ (of ranks in fp16), naming tensor and place; kUnsupported without Eigen.
CompressedTensor compress_tensor(std::string_view name, const RowFormat& format, const TensorView& plain,
                                 std::span<const std::int64_t> lengths, const CompressionOptions& options,
                                 ErrorCode code);

// Tokens `runs` of the sequences as elements, rows `to` of `plain`.
class HostDecompressor {
 public:
  // `tables` outlive the object.
  HostDecompressor(const RowFormat& format, const RowShape& shape, int threads);
  ~HostDecompressor();
  void decompress(const CompressedRows& from, std::span<const CompressedRun> runs, const MutableTensorView& plain);

 private:
  RowFormat format_;
  RowShape shape_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<HeadProductKernel> products_;  // of a format with a rank
};

// The tensor that it is: [tokens, heads, dim] of its dtype, dense. `backend`: as CompressionOptions has it.
std::vector<std::byte> decompress_tensor(CompressedTensor& tensor, int threads, Backend* backend = nullptr);

}  // namespace ringattn
