// SPDX-License-Identifier: Apache-2.0
// Lists of key blocks for decoding: which keys the rows of a step see, beside what the mask says. They lie in the
// kernel's kind of memory, so a captured step follows lists that change from launch to launch.
//
// The blocks that the step's rows stand in are always read, listed or not. In front of them rows see the listed blocks,
// and these lie side by side for all that follows, as if the sequence were shorter: a row of such a sequence folds the
// tiles, in the groups, that it folds by a list of block_mask.hpp which names the same blocks. So it has the bits of
// that fold. Blocks are multiples of both tiles of the kernel, whatever the size of pages: a block may be several
// pages, one, or a part of one. Pages that are smaller than a block are not listed by themselves; a tile of keys from
// several places is one that no fold has.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/host_device.hpp"
#include "kernels/block_mask.hpp"

namespace ringattn {

// Lists of one step. Their shape, BlockMaskShape::key_block and BlockMaskShape::heads, is the AttentionSpec's: list h
// of sequence s are the first counts[s · heads + h] numbers at blocks + (s · heads + h) · stride. They ascend; those
// from the rows' own blocks on say nothing.
struct DecodeBlockMask {
  const std::int32_t* blocks = nullptr;  // [sequences, heads, stride] numbers of key blocks
  const std::int32_t* counts = nullptr;  // [sequences, heads], each 0 … stride
  std::int64_t stride = 0;
};

// A sequence as its rows see it by a list.
struct MaskedKeys {
  std::int32_t listed = 0;  // blocks that the list names in front of the rows' own
  std::int32_t own = 0;     // the first block that a row stands in
  std::int32_t keys = 0;    // of all of them, side by side

  // How many blocks further on the rows' own lie in the sequence.
  RINGATTN_HOST_DEVICE std::int32_t gap() const { return own - listed; }
};

// Of a sequence of `length` keys, at whose end stand `rows` rows. `read(i)` is entry i of the list, of `count`.
RINGATTN_ANY_CALLEE
template <class Read>
RINGATTN_HOST_DEVICE inline MaskedKeys masked_keys(std::int32_t length, std::int32_t rows, std::int32_t key_block,
                                                   std::int32_t count, Read read) {
  MaskedKeys of;
  of.own = length > rows ? (length - rows) / key_block : 0;
  of.keys = length;
  if (of.own == 0) return of;  // nothing is read, as of a sequence whose lists are wrong, and whose length is then 0
  // Lists mostly end with the rows' own blocks, or in front of them.
  std::int32_t end = count;
  for (int i = 0; i < 3 && end > 0 && read(end - 1) >= of.own; ++i) --end;
  if (end > 0 && read(end - 1) >= of.own) {
    std::int32_t begin = 0;
    while (begin < end) {
      const std::int32_t middle = begin + (end - begin) / 2;
      const bool before = read(middle) < of.own;
      begin = before ? middle + 1 : begin;
      end = before ? end : middle;
    }
  }
  of.listed = end;
  of.keys = length - of.gap() * key_block;
  return of;
}

// How many lists a sequence has: one a group of KV heads that share it.
inline int mask_heads_of(const BlockMaskShape& shape) { return shape.any() ? shape.heads : 1; }

// Lists as steps take them, in host memory.
struct DecodeBlockMaskArrays {
  std::vector<std::int32_t> blocks;
  std::vector<std::int32_t> counts;
  std::int64_t stride = 0;
};

// A sequence of the lists in a step at whose end it has so many keys.
struct MaskedStep {
  std::size_t sequence = 0;
  std::int64_t keys = 0;
};

// The lists of a step of these sequences, of each of which the last `rows` positions are rows. `stride`: of the arrays;
// 0: as much as the longest list needs. Throws kUsage where the rows of a sequence have different block_mask, or one
// that leaves out a block that they stand in: a step would not have the bits of a fold by these lists.
DecodeBlockMaskArrays decode_block_mask(const BlockMask& block_mask, const Mask& mask, int rows,
                                        std::span<const MaskedStep> steps, std::int64_t stride = 0);
// Of all sequences, with all their keys.
DecodeBlockMaskArrays decode_block_mask(const BlockMask& block_mask, const Mask& mask, int rows,
                                        std::int64_t stride = 0);

// Why the sequences' last `rows` positions, with all their keys, are no step by these lists: the message of what
// decode_block_mask() would throw. Empty: they are.
std::string why_not_decodable(const BlockMask& block_mask, const Mask& mask, int rows);

// What decoding with these tiles lacks for the lists of a spec, beside what the fold lacks (KernelRow::missing).
std::vector<std::string> missing_for_decode_block_mask(const BlockMaskShape& shape, const TileSizes& tiles,
                                                       const Mask& mask, int kv_heads);

}  // namespace ringattn
