// SPDX-License-Identifier: Apache-2.0
// The last rows of some sequences, decoded one by one from a cache that grows with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/options.hpp"
#include "comm/collective.hpp"
#include "comm/transport.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/decode/decode.hpp"
#include "ops/decode/loaded_cache.hpp"
#include "ops/mla/mla_decode.hpp"
#include "ops/mla/mla_weights.hpp"

namespace ringattn {

// Rows of out and lse on this rank, in host memory.
struct HostRows {
  std::vector<std::byte> out;
  std::vector<std::byte> lse;

  HostRows(std::int64_t rows, const AttentionSpec& spec);
  // Copies `count` rows from row `from` of other arrays to row `to`.
  void take(const std::byte* other_out, const std::byte* other_lse, std::int64_t from, std::int64_t to,
            std::int64_t count, const AttentionSpec& spec);
};

// Decodes sequences with the same number of last rows together, by Decode or, for MLA, by MlaDecode. All calls are
// collective. The constructor's arguments outlive the object.
class GrowingDecode {
 public:
  // `sequences`: their indices in `whole`; `input` has their last `rows` rows.
  GrowingDecode(const JobInput& input, std::int64_t rows, const JobInput& whole,
                std::span<const std::int64_t> sequences, const Options& options, Transport& world,
                const Collective& collective);

  // The sequences of the input whose rows this rank gets.
  SequenceRange owned() const { return decode().owned(sequences()); }
  // Decodes all rows: [owned sequences · rows] of out and lse. The object can't be used afterwards.
  HostRows run();

 private:
  std::int64_t sequences() const { return static_cast<std::int64_t>(input_.job().batch.sequences.size()); }
  Decode& decode() { return latents_ ? latents_->in_latent() : *decode_; }
  const Decode& decode() const { return latents_ ? latents_->in_latent() : *decode_; }
  DecodeJob job_of(const Options& options, Transport& world) const;
  void load();
  void load_block_mask(const Job& whole, std::span<const std::int64_t> numbers);
  void enqueue(DecodeInputs inputs, std::int64_t row);

  const JobInput& input_;
  const std::int64_t rows_;
  Collective collective_;
  std::optional<Decode> decode_;
  std::optional<MlaDecode> latents_;  // MLA only, instead of decode_
  std::optional<LoadedCache> cache_;
  MlaWeights weights_;
  Buffer q_, k_, v_, sinks_, out_, lse_;
  std::int64_t mask_stride_ = 0;        // 0: there is no block mask
  std::int64_t mask_rows_of_step_ = 0;  // of all sequences of a step, for this rank's heads
  Buffer mask_indices_, mask_counts_;
  // The queries of all rows, and what is appended to the cache: keys and values, or latents and rotary keys.
  TensorView q_view_, k_view_, v_view_;
  MutableTensorView out_view_;
};

}  // namespace ringattn
