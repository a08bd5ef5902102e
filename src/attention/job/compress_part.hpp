// SPDX-License-Identifier: Apache-2.0
// What the ways of `compress` share: a tensor of a cache as it is made, whether it lies in rows or in pages, how long
// that takes, and the file that is written.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "attention/files/safetensors_writer.hpp"
#include "attention/job/cache_rows.hpp"
#include "attention/job/compress_job.hpp"
#include "attention/tokens/page_table.hpp"
#include "kernels/tensor_compression.hpp"

namespace ringattn {

// The backend of a GPU, where there is one.
std::unique_ptr<Backend> coding_gpu();

struct CompressedPart {
  CompressedTensor tensor;
  CompressedFigures figures;  // but for bytes_before
};
// `rows`: those of sequences of such lengths, one behind the other. `name`: of the tensor, for messages. Throws kFile
// for a number that is not finite, naming it.
CompressedPart compress_part(std::string_view name, const RowFormat& format, const RowShape& shape,
                             const std::vector<std::byte>& rows, std::span<const std::int64_t> lengths,
                             const CompressJob& job, Backend* gpu);

// Root mean square of what changed of dense rows, as a share of the elements' own.
double relative_error(const std::vector<std::byte>& before, const std::vector<std::byte>& after, Dtype dtype,
                      int threads);

// By the clock.
template <class Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Tokens of a pool that sequences hold, each once, ascending, as tokens of the pool's axis. `cu`: of keys, [sequences +
// 1]. `group`: of each sequence those in full groups of so many tokens alone; a page holds whole groups.
std::vector<PackedRun> held_slots(const PageTable& table, std::span<const std::int64_t> cu, std::int64_t group = 1);
// Dense rows of these tokens, [tokens, heads, dim] elements of so many bytes, at their places in pages; 0 elsewhere.
std::vector<std::byte> in_pages(const std::vector<std::byte>& rows, const RowGrid& grid, std::size_t element,
                                std::span<const PackedRun> slots);

// The job's output, of these tensors.
void write_file(const CompressJob& job, std::span<const WholeTensor> tensors, const FileMetadata& metadata);

// compress_file() of a cache in pages: each token of the pool that a sequence holds becomes codes once, at its place;
// what no sequence holds is 0. Throws kFile, too, where a group of tokens lies in pages that another sequence has in
// another group.
CompressResult compress_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job);

// compress_file() of latents in rows or in pages, which become rows of 8 bits (kernels/latent_rows.hpp).
CompressResult compress_latents(const SafetensorsFile& file, const FileInput& input, const CompressJob& job);

}  // namespace ringattn
