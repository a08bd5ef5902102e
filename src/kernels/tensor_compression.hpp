// SPDX-License-Identifier: Apache-2.0
// A whole tensor of keys or values between its elements and a format, by a backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/backend.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

// The sequences of a tensor lie one behind the other.
struct CompressedTensor {
  RowFormat format;
  RowShape shape;
  std::vector<std::int64_t> lengths;            // tokens of each sequence
  std::vector<std::vector<std::byte>> streams;  // dense, in the order of format_streams()
  std::vector<std::vector<std::byte>> tables;
  // Of a format with a rank: the share of the sum of squares that factors, and outliers beside them, keep; of others 1.
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
  // Tables are found and codes are made in its memory, some tokens at a time; null: by the host. The bytes are the
  // same.
  Backend* backend = nullptr;
};

// `name`: of the tensor, for messages. Throws kUsage for a shape that the format doesn't hold, `code` for a number that
// is not finite, or that would come back as ∞ (of ranks in fp16), naming tensor and place; kUnsupported without Eigen.
CompressedTensor compress_tensor(std::string_view name, const RowFormat& format, const TensorView& plain,
                                 std::span<const std::int64_t> lengths, const CompressionOptions& options,
                                 ErrorCode code);

// Rows of one format between elements and codes, where they lie: in the memory of a backend of the object's own.
class TensorCodec {
 public:
  // Throws kUsage for a shape that the format doesn't hold, kUnsupported where the backend can't multiply its ranks.
  TensorCodec(const RowFormat& format, const RowShape& shape, const BackendOptions& options,
              std::string_view backend = "cpu");
  ~TensorCodec();
  TensorCodec(TensorCodec&&) noexcept;
  TensorCodec& operator=(TensorCodec&&) = delete;

  Backend& backend() { return *backend_; }

  // Elements become codes, and all tables but tails, of the rows of `runs`, are found: scales of fp8 for a tensor or
  // head, codebooks (of all rows of `plain`, with `seed`), bases and outlier channels. Returns when it is done, what
  // CompressedTensor::energy_kept says. `name`: of the tensor, for messages. Throws `code` for a number that is not
  // finite, or that would come back as ∞, naming tensor and place: the rows then hold anything. kUnsupported for a rank
  // without Eigen.
  double compress(std::string_view name, const TensorView& plain, std::span<const CompressedRun> runs,
                  const CompressedRows& to, ErrorCode code, Stream stream = {}, std::uint64_t seed = 0);
  // Codes become elements: tokens `runs` of the sequences rows `to` of `plain`. Ordered on `stream`. What can't be
  // decompressed is told in `fault` (DecompressTask::fault).
  void decompress(const CompressedRows& from, std::span<const CompressedRun> runs, const MutableTensorView& plain,
                  Stream stream = {}, InvalidElementCell* fault = nullptr);
  // The same, and returns when it is done. Throws `code` for numbers that no compressed tensor holds, naming the part
  // and the place.
  void decompress_checked(std::string_view name, const CompressedRows& from, std::span<const CompressedRun> runs,
                          const MutableTensorView& plain, ErrorCode code, Stream stream = {});

 private:
  void find_scales(const TensorView& plain, std::byte* scales, Stream stream);
  void check_finite(std::string_view name, const TensorView& plain, ErrorCode code, Stream stream);
  double compress_ranked(std::string_view name, const TensorView& plain, std::span<const CompressedRun> runs,
                         const CompressedRows& to, ErrorCode code, Stream stream);

  RowFormat format_;
  RowShape shape_;
  int threads_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<BatchedGemmKernel> products_;  // of a format with a rank
};

// Makes decompression ready: devices load code neither while a graph is captured nor while peers wait.
void load_decompression(const RowFormat& format, const RowShape& shape, Backend& backend);

// The tensor that it is: [tokens, heads, dim] of its dtype, dense. `backend`: as CompressionOptions has it.
std::vector<std::byte> decompress_tensor(CompressedTensor& tensor, int threads, Backend* backend = nullptr);

}  // namespace ringattn
