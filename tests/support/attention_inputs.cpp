// SPDX-License-Identifier: Apache-2.0
#include "tests/support/attention_inputs.hpp"

#include <algorithm>
#include <random>

#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

void set_element(std::vector<std::byte>& elements, Dtype dtype, std::int64_t index, float value) {
  store_element(elements.data() + static_cast<std::size_t>(index) * size_of(dtype), dtype, value);
}

TensorView slice(const std::vector<std::byte>& elements, Dtype dtype, std::int64_t begin, std::int64_t tokens,
                 std::int64_t heads, std::int64_t dim) {
  const auto skipped = static_cast<std::size_t>(begin * heads * dim) * size_of(dtype);
  return dense_view(elements.data() + skipped, dtype, tokens, heads, dim);
}

}  // namespace

std::int64_t AttentionInputs::q_begin(std::size_t sequence) const {
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < sequence; ++i) tokens += sequences[i].q_len;
  return tokens;
}
std::int64_t AttentionInputs::k_begin(std::size_t sequence) const {
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < sequence; ++i) tokens += sequences[i].k_len;
  return tokens;
}
std::int64_t AttentionInputs::q_tokens() const { return q_begin(sequences.size()); }
std::int64_t AttentionInputs::k_tokens() const { return k_begin(sequences.size()); }

TensorView AttentionInputs::q_view(std::size_t sequence) const {
  return slice(q, spec.dtype, q_begin(sequence), sequences[sequence].q_len, spec.heads, spec.head_dim);
}
TensorView AttentionInputs::k_view(std::size_t sequence) const {
  return slice(k, spec.dtype, k_begin(sequence), sequences[sequence].k_len, spec.kv_heads, spec.head_dim);
}
TensorView AttentionInputs::v_view(std::size_t sequence) const {
  return slice(v, spec.dtype, k_begin(sequence), sequences[sequence].k_len, spec.kv_heads, spec.head_dim_v);
}

std::vector<MaskedSequence> AttentionInputs::masked_sequences() const {
  std::vector<MaskedSequence> listed;
  for (const SequenceShape& shape : sequences) listed.push_back({shape.q_offset, shape.q_len, shape.k_len});
  return listed;
}

bool AttentionInputs::mask_has_key(std::size_t sequence, int head, std::int64_t position, std::int64_t key) const {
  if (block_mask == nullptr) return true;
  const BlockMaskShape& shape = block_mask->shape();
  std::int64_t block = position / shape.query_block;
  if (block * shape.query_block > position) --block;
  const auto list = block_mask->row(sequence, head * shape.heads / spec.heads, block);
  return std::find(list.begin(), list.end(), key / shape.key_block) != list.end();
}

std::int64_t AttentionInputs::key_position(std::size_t sequence, int kv_head, std::int64_t key) const {
  if (positions == nullptr) return key;
  return positions_of(positions.get(), sequence, kv_head)[static_cast<std::size_t>(key)];
}

void AttentionInputs::set_q(std::int64_t token, int head, int dim, float value) {
  set_element(q, spec.dtype, (token * spec.heads + head) * spec.head_dim + dim, value);
}
void AttentionInputs::set_k(std::int64_t token, int head, int dim, float value) {
  set_element(k, spec.dtype, (token * spec.kv_heads + head) * spec.head_dim + dim, value);
}
void AttentionInputs::set_v(std::int64_t token, int head, int dim, float value) {
  set_element(v, spec.dtype, (token * spec.kv_heads + head) * spec.head_dim_v + dim, value);
}

AttentionInputs with_values_in_keys(AttentionInputs inputs) {
  const AttentionSpec& spec = inputs.spec;
  const std::size_t k_row = static_cast<std::size_t>(spec.head_dim) * size_of(spec.dtype);
  const std::size_t v_row = static_cast<std::size_t>(spec.head_dim_v) * size_of(spec.dtype);
  for (std::size_t row = 0; row < static_cast<std::size_t>(inputs.k_tokens() * spec.kv_heads); ++row) {
    std::copy_n(inputs.k.begin() + static_cast<std::ptrdiff_t>(row * k_row), v_row,
                inputs.v.begin() + static_cast<std::ptrdiff_t>(row * v_row));
  }
  return inputs;
}

AttentionInputs random_inputs(const AttentionSpec& spec, std::vector<SequenceShape> sequences, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  AttentionInputs inputs;
  inputs.spec = spec;
  inputs.sequences = std::move(sequences);
  inputs.q = random_elements(inputs.q_tokens() * spec.heads * spec.head_dim, spec.dtype, generator);
  inputs.k = random_elements(inputs.k_tokens() * spec.kv_heads * spec.head_dim, spec.dtype, generator);
  inputs.v = random_elements(inputs.k_tokens() * spec.kv_heads * spec.head_dim_v, spec.dtype, generator);
  if (spec.sinks) {
    const Normal normal;
    for (int head = 0; head < spec.heads; ++head) inputs.sinks.push_back(normal(generator));
  }
  return inputs;
}

}  // namespace ringattn::testing
