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

// The backend of a GPU, where there is one.
std::unique_ptr<Backend> quantizing_gpu();

// Bytes of host memory that it takes to compress a tensor: its rows, what they become, and, to be compared, what that
// becomes again.
double compression_bytes(const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences,
                         int threads);
std::string_view how_to_compress_less();
// Throws kMemory where that, or what else `what` needs, is more than this process may use.
void check_host_memory(std::string_view what, double bytes);

// Where O is compared, and there are queries: refuses, as JobInput does, what makes no job of them and the cache.
void check_compared_job(const CompressJob& job, bool queries);

struct CompressedTensorResult {
  CompressedTensor tensor;
  CompressedFigures figures;  // but for bytes_before
};
// `rows`: the consecutive rows of sequences of these lengths. `name`: of the tensor, for messages. Throws kFile for a
// number that is not finite, naming it.
CompressedTensorResult compress_part(std::string_view name, const RowFormat& format, const RowShape& shape,
                                     const std::vector<std::byte>& rows, std::span<const std::int64_t> lengths,
                                     const CompressJob& job, Backend* gpu);

// The relative change of dense rows, accumulated over parts.
class RelativeError {
 public:
  void add(std::span<const std::byte> before, std::span<const std::byte> after, Dtype dtype, int threads);
  // Root mean square, as a share of the elements' own.
  double value() const;

 private:
  double errors_ = 0.0, squares_ = 0.0;  // sums of squares
};

// By the clock.
template <class Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The job's output, of these tensors and others that are written later.
std::unique_ptr<SafetensorsWriter> create_file(const CompressJob& job, std::span<const WholeTensor> tensors,
                                               std::vector<OutputTensor> others, const FileMetadata& metadata);
// Once all is written.
void finish_file(SafetensorsWriter& writer);

// compress_file() of a cache in pages: each token of the pool that a sequence holds is quantized once, at its index;
// what no sequence holds is 0. Tokens that were taken out before stay so. Throws kFile, too, where a group of tokens
// lies in pages that another sequence has in another group.
CompressResult compress_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job);

// The same where tokens are taken out: what stays of each sequence lies in pages of its own, in ascending order, and
// what stands beside the pages, `others`, is completed by k_positions and k_lengths. `cache`: what the file holds.
CompressResult evict_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job,
                           const InputTensors& cache, std::vector<WholeTensor> others);

// compress_file() of latents in rows or in pages, which become FP8 rows (kernels/quant/latent_rows.hpp).
CompressResult compress_latents(const SafetensorsFile& file, const FileInput& input, const CompressJob& job);

}  // namespace ringattn
