// SPDX-License-Identifier: Apache-2.0
// Common parts of `compress`: a tensor of a cache in rows or in pages, the memory that compression takes, and the file
// that is written.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "io/safetensors_writer.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "ops/common/input_tensors.hpp"
#include "ops/compression/cache_rows.hpp"
#include "ops/compression/compress_job.hpp"

namespace ringattn {

// The backend of a GPU, or null if there is none.
std::unique_ptr<Backend> quantizing_gpu();

// Bytes of host memory that the compression of a tensor takes: its rows, the compressed tensor and, for comparison, the
// decompressed one.
double compression_bytes(const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences,
                         int threads);
std::string_view how_to_compress_less();
// Throws kMemory if `bytes`, which `what` needs, is more than this process may use.
void check_host_memory(std::string_view what, double bytes);

// If O is compared and there are queries: throws the errors of JobInput if queries and cache make no job.
void check_compared_job(const CompressJob& job, bool queries);

struct CompressedTensorResult {
  CompressedTensor tensor;
  CompressedFigures figures;  // except for bytes_before
};
// `rows`: the consecutive rows of sequences of these lengths. `name`: name of the tensor in messages. Throws kFile,
// naming the element, if one is not finite.
CompressedTensorResult compress_part(std::string_view name, const RowFormat& format, const RowShape& shape,
                                     const std::vector<std::byte>& rows, std::span<const std::int64_t> lengths,
                                     const CompressJob& job, Backend* gpu);

// The relative error of dense rows, accumulated over parts.
class RelativeError {
 public:
  void add(std::span<const std::byte> before, std::span<const std::byte> after, Dtype dtype, int threads);
  // Root mean square of the errors, divided by that of the elements.
  double value() const;

 private:
  double errors_ = 0.0, squares_ = 0.0;  // sums of squares
};

// Returns the wall-clock seconds of `work`.
template <class Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Creates the job's output file with these tensors and others that are written later.
std::unique_ptr<SafetensorsWriter> create_file(const CompressJob& job, std::span<const WholeTensor> tensors,
                                               std::vector<OutputTensor> others, const FileMetadata& metadata);
// Called once all tensors are written.
void finish_file(SafetensorsWriter& writer);

// compress_file() for a cache in pages: each token of the pool that a sequence holds is quantized once, at its index.
// Pool slots that no sequence holds become 0. Tokens that were evicted before stay evicted. Also throws kFile if the
// pages of a quantization group of one sequence belong to another group of another sequence.
CompressResult compress_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job);

// compress_file() with eviction for a cache in pages: the tokens that each sequence keeps are written to pages of its
// own, in ascending order, and k_positions and k_lengths are added to `others`, the file's other tensors. `cache`: what
// the file holds.
CompressResult evict_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job,
                           const InputTensors& cache, std::vector<WholeTensor> others);

// compress_file() for latents in rows or in pages, which become FP8 rows (kernels/quant/latent_rows.hpp).
CompressResult compress_latents(const SafetensorsFile& file, const FileInput& input, const CompressJob& job);

}  // namespace ringattn
