// SPDX-License-Identifier: Apache-2.0
// Inputs whose rows see only some blocks of keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>

#include "kernels/attention/block_mask_patterns.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {

// About `percent` of the blocks before the blocks of the sequence's queries, different ones for each seed, sequence and
// head, and all later blocks.
inline BlockMaskPattern some_blocks(const std::vector<MaskedSequence>& sequences, const BlockMaskShape& shape,
                                    unsigned percent, unsigned seed) {
  return [=](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
    const std::int64_t own = std::max<std::int64_t>(0, sequences[place.sequence].position) / shape.key_block;
    for (std::int64_t block = 0; block < place.blocks; ++block) {
      std::seed_seq words{seed, static_cast<unsigned>(place.sequence), static_cast<unsigned>(place.head),
                          static_cast<unsigned>(block)};
      std::uint32_t word = 0;
      words.generate(&word, &word + 1);
      if (word % 100 < percent || block >= own) blocks.push_back(static_cast<std::int32_t>(block));
    }
  };
}

inline AttentionInputs with_random_block_mask(AttentionInputs inputs, const BlockMaskShape& shape, unsigned percent,
                                              unsigned seed) {
  const std::vector<MaskedSequence> sequences = inputs.masked_sequences();
  inputs.spec.block_mask = shape;
  inputs.block_mask = std::make_shared<const BlockMask>(
      make_block_mask(shape, sequences, some_blocks(sequences, shape, percent, seed)));
  return inputs;
}

}  // namespace ringattn::testing
