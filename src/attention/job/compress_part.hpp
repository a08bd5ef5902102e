// SPDX-License-Identifier: Apache-2.0
// One of the two tensors of a cache as `compress` makes it, whether it lies in rows or in pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "attention/job/compress_job.hpp"
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

// compress_file() of a cache in pages: each token of the pool that a sequence holds becomes codes once, at its place;
// what no sequence holds is 0. Throws kFile, too, where a group of tokens lies in pages that another sequence has in
// another group.
CompressResult compress_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job);

}  // namespace ringattn
