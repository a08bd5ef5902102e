// SPDX-License-Identifier: Apache-2.0
// Compression and decompression of whole key or value tensors on a backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// A compressed tensor in host memory. Its sequences are concatenated.
struct CompressedTensor {
  RowFormat format;
  RowShape shape;
  std::vector<std::int64_t> lengths;            // [sequences] tokens
  std::vector<std::vector<std::byte>> streams;  // dense, in the order of format_streams()
  std::vector<std::vector<std::byte>> tables;
  // Low-rank formats: the fraction of the sum of squares that factors and outliers keep. Others: 1.
  double energy_kept = 1.0;

  std::int64_t tokens() const;
  std::size_t bytes() const;  // all streams and tables
  CompressedRows rows();
  // One run per sequence: the whole tensor.
  std::vector<CompressedRun> runs() const;
};

// A compressed tensor filled with zeros.
CompressedTensor make_compressed(const RowFormat& format, const RowShape& shape, std::vector<std::int64_t> lengths);

struct CompressionOptions {
  std::uint64_t seed = 0;  // for codebooks
  int threads = 1;         // host threads
  // The backend that computes tables and quantizes, some tokens at a time. Null: the host. The bytes are the same.
  Backend* backend = nullptr;
};

// `name` is the tensor's, for messages. Throws kUsage for a shape that the format does not support; `code` for an
// element that is not finite, or that would decompress to ∞ (low-rank formats in fp16), with tensor and index;
// kUnsupported without Eigen.
CompressedTensor compress_tensor(std::string_view name, const RowFormat& format, const TensorView& plain,
                                 std::span<const std::int64_t> lengths, const CompressionOptions& options,
                                 ErrorCode code);

// Compresses and decompresses tensors of one format in the memory of its own backend.
class TensorCodec {
 public:
  // Throws kUsage for a shape that the format does not support, and kUnsupported if the backend has no GEMM for its
  // ranks.
  TensorCodec(const RowFormat& format, const RowShape& shape, const BackendOptions& options,
              std::string_view backend = "cpu");
  ~TensorCodec();
  TensorCodec(TensorCodec&&) noexcept;
  TensorCodec& operator=(TensorCodec&&) = delete;

  Backend& backend() { return *backend_; }

  // Compresses the rows of `runs` and computes all tables except tails: fp8 scales of a tensor or head, codebooks (from
  // all rows of `plain`, with `seed`), bases and outlier channels. Waits, and returns CompressedTensor::energy_kept.
  // `name` is the tensor's, for messages. Throws `code` for an element that is not finite, or that would decompress to
  // ∞, with tensor and index; the rows are then unspecified. Throws kUnsupported for a low-rank format without Eigen.
  double compress(std::string_view name, const TensorView& plain, std::span<const CompressedRun> runs,
                  const CompressedRows& to, ErrorCode code, Stream stream = {}, std::uint64_t seed = 0);
  // Decompresses the tokens of `runs` to rows CompressedRun::to of `plain`. Ordered on `stream`. `invalid` receives the
  // first invalid element (DecompressTask::invalid).
  void decompress(const CompressedRows& from, std::span<const CompressedRun> runs, const MutableTensorView& plain,
                  Stream stream = {}, InvalidElementCell* invalid = nullptr);
  // The same, and waits. Throws `code` for elements that no compressed tensor may contain, with the part and the index.
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
  std::unique_ptr<BatchedGemmKernel> products_;  // for low-rank formats
};

// Loads the device code for decompression, so that it is not loaded during a graph capture or while peers wait.
void load_decompression(const RowFormat& format, const RowShape& shape, Backend& backend);

// The decompressed tensor: dense [tokens, heads, dim] of its dtype. `backend` is as in CompressionOptions. The bits of
// low-rank formats are those of the host's fastest GEMM, or of the backend's ordered one.
std::vector<std::byte> decompress_tensor(CompressedTensor& tensor, int threads, Backend* backend = nullptr);

}  // namespace ringattn
