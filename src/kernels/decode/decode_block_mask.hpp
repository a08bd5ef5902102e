// SPDX-License-Identifier: Apache-2.0
// Block-sparse masks for decode: which key blocks the rows of a step attend to, in addition to the Mask. They are in
// the kernel's memory kind, so a captured step follows masks that change between launches.
//
// The key blocks that contain the step's rows are always read. Before them the rows attend to the key blocks in the
// mask row. These are treated as contiguous, as if the sequence were shorter: a row processes the same tiles, in the
// same KV splits, as with a attention/block_mask.hpp mask row with the same key blocks, and so has the same bits as
// that prefill. Key blocks are multiples of both tiles of the kernel, independent of the page size: a key block may be
// several pages, one page, or a part of one. Masks cannot select pages smaller than a key block, because attention has
// no key tiles made of keys from several places.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/host_device.hpp"
#include "kernels/attention/block_mask.hpp"

namespace ringattn {

// The block mask of one step. AttentionSpec has its shape: BlockMaskShape::key_block and BlockMaskShape::heads. Mask
// row h of sequence s is the first counts[s · heads + h] key blocks at blocks + (s · heads + h) · stride. They ascend.
// Entries from the rows' own key blocks on are ignored.
struct DecodeBlockMask {
  const std::int32_t* blocks = nullptr;  // [sequences, heads, stride] key blocks
  const std::int32_t* counts = nullptr;  // [sequences, heads], each 0 … stride
  std::int64_t stride = 0;
};

// The keys of a sequence that its rows see through a mask row, as if they were contiguous: the selected key blocks,
// then all keys from the rows' own key blocks on.
struct MaskedKeys {
  std::int32_t selected = 0;  // number of key blocks in the mask row before the rows' own
  std::int32_t own = 0;       // index of the first key block that contains a row
  std::int32_t keys = 0;      // number of keys that the rows see

  // Number of key blocks before the rows' own that the mask row leaves out.
  RINGATTN_HOST_DEVICE std::int32_t gap() const { return own - selected; }
};

// For a sequence of `length` keys that ends with `rows` rows. `read(i)` returns entry i of the mask row, which has
// `count` entries.
RINGATTN_ANY_CALLEE
template <class Read>
RINGATTN_HOST_DEVICE inline MaskedKeys masked_keys(std::int32_t length, std::int32_t rows, std::int32_t key_block,
                                                   std::int32_t count, Read read) {
  MaskedKeys masked;
  masked.own = length > rows ? (length - rows) / key_block : 0;
  masked.keys = length;
  // Nothing is read then, as for a sequence with an invalid mask row, whose length was set to 0.
  if (masked.own == 0) return masked;
  // Most mask rows end with the rows' own key blocks or before them.
  std::int32_t end = count;
  for (int i = 0; i < 3 && end > 0 && read(end - 1) >= masked.own; ++i) --end;
  if (end > 0 && read(end - 1) >= masked.own) {
    std::int32_t begin = 0;
    while (begin < end) {
      const std::int32_t middle = begin + (end - begin) / 2;
      const bool before = read(middle) < masked.own;
      begin = before ? middle + 1 : begin;
      end = before ? end : middle;
    }
  }
  masked.selected = end;
  masked.keys = length - masked.gap() * key_block;
  return masked;
}

// Mask rows per sequence: one per group of KV heads that share it.
inline int mask_heads_of(const BlockMaskShape& shape) { return shape.any() ? shape.heads : 1; }

// A step's block mask in host memory.
struct DecodeBlockMaskArrays {
  std::vector<std::int32_t> blocks;
  std::vector<std::int32_t> counts;
  std::int64_t stride = 0;
};

// A sequence of a block mask in a step, with `keys` keys after the step.
struct MaskedStep {
  std::size_t sequence = 0;
  std::int64_t keys = 0;
};

// The decode block mask of a step of these sequences, where the last `rows` positions of each are the step's rows.
// `stride` 0: as large as the longest mask row requires. Throws kUsage if the rows of a sequence have different mask
// rows, or one without a key block that contains the rows, because decode could not have the bits of a prefill with
// this mask.
DecodeBlockMaskArrays decode_block_mask(const BlockMask& block_mask, const Mask& mask, int rows,
                                        std::span<const MaskedStep> steps, std::int64_t stride = 0);
// All sequences, with all their keys.
DecodeBlockMaskArrays decode_block_mask(const BlockMask& block_mask, const Mask& mask, int rows,
                                        std::int64_t stride = 0);

// The message that decode_block_mask() would throw for the sequences' last `rows` positions with all their keys. Empty:
// it would not throw.
std::string why_not_decodable(const BlockMask& block_mask, const Mask& mask, int rows);

// What decode with these tiles does not support about a spec's block mask, in addition to what attention does not
// (KernelRow::missing).
std::vector<std::string> missing_for_decode_block_mask(const BlockMaskShape& shape, const TileSizes& tiles,
                                                       const Mask& mask, int kv_heads);

}  // namespace ringattn
