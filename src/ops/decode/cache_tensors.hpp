// SPDX-License-Identifier: Apache-2.0
// The tensors of a paged cache in a safetensors file: a pool of pages, as elements or compressed, the table that says
// whose they are, and the queries at the sequences' ends.
#pragma once

#include <optional>

#include "ops/attention_jobs/compressed_tensors.hpp"
#include "ops/common/input_tensors.hpp"

namespace ringattn {

// True if the input is a cache: `k_pages` is named, or present in its format, while k and v were not named. Throws
// kFile if the file also has `k` and nothing says which one to use.
bool holds_cache(const SafetensorsFile& file, const InputNames& names);

// `order` is that of q and out. `page_order`, kThd or kHtd, is that of a page; absent: what the file's metadata
// `page_order` says, or the only one that the shapes allow. Throws kFile, naming the tensor and what is wrong with it;
// for block_table and lengths_k, the sequence and entry too. `compressed`: what is found of pools that are.
InputTensors find_cache(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order,
                        std::optional<AxisOrder> page_order, std::optional<CompressedTensors>& compressed);

// The same of a file that may have no queries: sequences have none then, and neither q nor its grid is set.
InputTensors find_pages(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order,
                        std::optional<AxisOrder> page_order, std::optional<CompressedTensors>& compressed);

// The sequences and the table of a cache whose pages lie in `pool`, a page an entry of the batch, as the file's
// block_table, lengths_k and cu_seqlens_q say. Throws kFile.
void read_paging(const SafetensorsFile& file, const InputNames& names, const RowGrid& pool, InputTensors& input);

}  // namespace ringattn
