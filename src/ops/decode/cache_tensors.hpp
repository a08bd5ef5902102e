// SPDX-License-Identifier: Apache-2.0
// The tensors of a paged cache in a safetensors file: a pool of pages, plain or compressed, the block table, and the
// queries at the ends of the sequences.
#pragma once

#include <optional>

#include "ops/attention_jobs/compressed_tensors.hpp"
#include "ops/common/input_tensors.hpp"

namespace ringattn {

// True if the input is a cache: `k_pages` is named, or is in the file (in its format) while k and v are not named.
// Throws kFile if the file also has `k` and the names do not select one of them.
bool holds_cache(const SafetensorsFile& file, const InputNames& names);

// `order`: axis order of q and out. `page_order`: axis order of a page, kThd or kHtd; absent: given by the file's
// metadata `page_order`, or the only order that the shapes allow. Throws kFile, naming the tensor and the problem, and
// for block_table and lengths_k also the sequence and entry. `compressed`: receives compressed pools.
InputTensors find_cache(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order,
                        std::optional<AxisOrder> page_order, std::optional<CompressedTensors>& compressed);

// The same for a file that may have no queries. Sequences then have none, and neither q nor its grid is set.
InputTensors find_pages(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order,
                        std::optional<AxisOrder> page_order, std::optional<CompressedTensors>& compressed);

// Reads the sequences and the block table of a cache from the file's block_table, lengths_k and cu_seqlens_q. `pool`:
// the grid of its pages, each page as a batch entry. Throws kFile.
void read_paging(const SafetensorsFile& file, const InputNames& names, const RowGrid& pool, InputTensors& input);

}  // namespace ringattn
