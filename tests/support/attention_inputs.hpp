// SPDX-License-Identifier: Apache-2.0
// Packed inputs of one attention over several sequences, with helpers that make adversarial ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention/attention_spec.hpp"

namespace ringattn::testing {

struct SequenceShape {
  std::int64_t q_len = 0;
  std::int64_t k_len = 0;
  std::int64_t q_offset = 0;
};

// Dense [tokens, heads, dim] arrays of spec.dtype, the sequences one after the other.
struct AttentionInputs {
  AttentionSpec spec;
  std::vector<SequenceShape> sequences;
  std::vector<std::byte> q;
  std::vector<std::byte> k;
  std::vector<std::byte> v;
  std::vector<float> sinks;                       // [heads], or empty
  std::shared_ptr<const BlockMask> block_mask;    // present exactly where spec.block_mask is
  std::shared_ptr<const KeyPositions> positions;  // present exactly where spec.positions are

  std::int64_t q_tokens() const;
  std::int64_t k_tokens() const;
  // First packed token of a sequence.
  std::int64_t q_begin(std::size_t sequence) const;
  std::int64_t k_begin(std::size_t sequence) const;
  TensorView q_view(std::size_t sequence) const;
  TensorView k_view(std::size_t sequence) const;
  TensorView v_view(std::size_t sequence) const;

  // The sequences in the form that block masks need.
  std::vector<MaskedSequence> masked_sequences() const;
  // Whether the block mask lets the query head at a position see the key; true without one.
  bool mask_has_key(std::size_t sequence, int head, std::int64_t position, std::int64_t key) const;
  // Position of a key of a K/V head.
  std::int64_t key_position(std::size_t sequence, int kv_head, std::int64_t key) const;

  // One element; tokens are packed.
  void set_q(std::int64_t token, int head, int dim, float value);
  void set_k(std::int64_t token, int head, int dim, float value);
  void set_v(std::int64_t token, int head, int dim, float value);
};

// The same inputs, but v has the first head_dim_v elements of each key, as if K and V were one latent.
AttentionInputs with_values_in_keys(AttentionInputs inputs);

// Standard normal values (and sinks, if the spec has them). The same seed gives the same values.
AttentionInputs random_inputs(const AttentionSpec& spec, std::vector<SequenceShape> sequences, std::uint64_t seed);

}  // namespace ringattn::testing
