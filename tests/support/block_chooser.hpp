// SPDX-License-Identifier: Apache-2.0
// Chooses key blocks by a backend, from keys in a cache of any layout. Entries that no sequence owns are NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/decode/block_choice.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/page_pool.hpp"

namespace ringattn::testing {

class BlockChooser {
 public:
  struct Result {
    std::vector<std::byte> scores, chosen, counts;
    bool operator==(const Result&) const = default;
  };

  // `inputs` have a spec with a block mask, and equally many queries in each sequence, at the end of its keys.
  BlockChooser(std::unique_ptr<Backend> backend, const AttentionInputs& inputs, std::int64_t page_size, int count)
      : backend_(std::move(backend)), inputs_(inputs) {
    const AttentionSpec& spec = inputs.spec;
    const PagePool pool(inputs.sequences, {page_size, false, 3, 0, 0, {}, {}});
    std::int64_t longest = 1;
    std::vector<std::int64_t> lengths;
    for (const SequenceShape& of : inputs.sequences) {
      lengths.push_back(of.k_len);
      longest = std::max(longest, of.k_len);
    }
    const auto place = [&](std::optional<DeviceArray>& array, const std::vector<std::byte>& bytes) {
      array.emplace(*backend_, std::max<std::size_t>(bytes.size(), 1));
      array->write(bytes);
    };
    place(q_, inputs.q);
    place(k_, pool.fill(inputs, inputs.k, spec.head_dim));
    place(table_, bytes_of(pool.table()));
    choice_.spec = spec;
    choice_.rows = choice_.max_rows = static_cast<int>(inputs.sequences[0].q_len);
    choice_.q =
        dense_view(static_cast<const void*>(q_->data()), spec.dtype, inputs.q_tokens(), spec.heads, spec.head_dim);
    choice_.k = pool.view(k_->data(), spec, spec.head_dim);
    if (page_size > 0) {
      choice_.block_table = {reinterpret_cast<const std::int32_t*>(table_->data()), pool.table_width()};
    }
    choice_.count = count;
    choice_.blocks = (longest + spec.block_mask.key_block - 1) / spec.block_mask.key_block;
    const auto sequences = static_cast<std::int64_t>(lengths.size());
    const auto room = [&](std::optional<DeviceArray>& array, std::int64_t numbers) {
      array.emplace(*backend_, static_cast<std::size_t>(numbers) * 4);
    };
    room(lengths_, sequences);
    room(means_, sequences * choice_.blocks * spec.kv_heads * spec.head_dim);
    room(scores_, sequences * spec.block_mask.heads * choice_.blocks);
    room(chosen_, sequences * spec.block_mask.heads * count);
    room(counts_, sequences * spec.block_mask.heads);
    set_lengths(lengths);
    choice_.lengths = reinterpret_cast<const std::int32_t*>(lengths_->data());
    choice_.means = reinterpret_cast<float*>(means_->data());
    choice_.scores = reinterpret_cast<float*>(scores_->data());
    choice_.chosen = reinterpret_cast<std::int32_t*>(chosen_->data());
    choice_.counts = reinterpret_cast<std::int32_t*>(counts_->data());
  }

  void set_lengths(const std::vector<std::int64_t>& lengths) {
    lengths_->write(bytes_of(std::vector<std::int32_t>(lengths.begin(), lengths.end())));
  }
  void pool() { backend_->pool_keys(choice_, backend_->stream()); }
  void enqueue() { backend_->choose_blocks(choice_, backend_->stream()); }
  // The chosen masks. Entries that choosing does not write are unchanged.
  Result choose() {
    enqueue();
    return read();
  }
  Result read() {
    backend_->synchronize(backend_->stream(), Deadline::after(60.0), {});
    return {scores_->read(), chosen_->read(), counts_->read()};
  }
  std::vector<std::byte> means() {
    backend_->synchronize(backend_->stream(), Deadline::after(60.0), {});
    return means_->read();
  }
  Backend& backend() { return *backend_; }
  const BlockChoice& choice() const { return choice_; }

 private:
  template <class Number>
  static std::vector<std::byte> bytes_of(const std::vector<Number>& numbers) {
    std::vector<std::byte> bytes(numbers.size() * sizeof(Number));
    if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
    return bytes;
  }

  std::unique_ptr<Backend> backend_;
  AttentionInputs inputs_;
  std::optional<DeviceArray> q_, k_, table_, lengths_, means_, scores_, chosen_, counts_;
  BlockChoice choice_;
};

}  // namespace ringattn::testing
