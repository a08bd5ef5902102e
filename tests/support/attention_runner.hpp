// SPDX-License-Identifier: Apache-2.0
// Runs a kernel of the table over AttentionInputs in arrangements that must not change a bit: work divided into tasks,
// tiles scattered over sources, rows divided into runs and shuffled, strided views, thread counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/page_pool.hpp"

namespace ringattn::testing {

struct Arrangement {
  int threads = 1;
  std::int64_t tiles_per_task = 0;  // tiles (of all sequences, in order) computed by one task; 0: all by one
  std::int64_t run_rows = 0;        // rows of a query run; 0: one run per sequence
  std::uint64_t shuffle = 0;        // not 0: runs lie in q, and tiles in several sources, in an order of this seed
  std::size_t sources = 3;          // that many; some hold nothing where there are fewer tiles
  bool strided = false;             // tokens and heads of q and out lie apart
  bool separate_finish = false;     // the last task only finishes
  bool export_state = false;        // the last task saves as well, and the result has what it saved
  // Not 0: each KV split is computed by its own tasks, in an order given by this seed, into its own state and from its
  // own copies of the keys. Then the splits are merged, in place with the first split if 3 divides the seed. The last
  // KV split is computed in place if 2 divides the seed.
  std::uint64_t apart = 0;
  bool keep_state = false;  // the last task saves as well, and what it saved must give the same rows once more
  // With a shuffle: the value in memory after a tile's last key, up to the length of a whole tile.
  float behind = std::numeric_limits<float>::quiet_NaN();
  // Rows begin at odd elements, so that vector loads and stores are impossible: rows of q in the first, third, …
  // task, of every other source of keys and values, and of out.
  bool odd_q = false;
  bool odd_keys = false;
  bool odd_out = false;
  // The values are read from the first head_dim_v columns of the keys, as with a latent. inputs.v must equal them.
  bool values_in_keys = false;
  // With a page size, keys and values are in a pool of pages. Replaces `sources`, odd_keys and `apart`.
  PageLayout pages{};
};

struct AttentionResult {
  std::vector<std::byte> out;  // [q_tokens, heads, head_dim_v] of spec.dtype
  std::vector<float> lse;      // [q_tokens, heads]
  std::vector<float> state;    // [q_tokens, heads, head_dim_v + 2]: m, l and O, where the state was exported

  // Whether every byte is equal, including NaN patterns and signs of zero. Counts as a check if there are bytes.
  [[nodiscard]] bool same_bits(const AttentionResult& other) const;
};

// A kernel of the table, made for a spec.
class AttentionRunner {
 public:
  AttentionRunner(const AttentionRow& row, const AttentionSpec& spec, int threads = 1);

  // Computes everything. State and output are NaN before, and so is every row of a source that no tile maps.
  AttentionResult run(const AttentionInputs& inputs, const Arrangement& arrangement = {},
                      const Progress& progress = {});

  Backend& backend() { return *backend_; }
  AttentionKernel& kernel() { return *kernel_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<AttentionKernel> kernel_;
};

// Makes the kernel and computes everything once.
AttentionResult attend_with(const AttentionRow& row, const AttentionInputs& inputs,
                            const Arrangement& arrangement = {});

// Why a kernel can't run `spec` here; empty: it can.
std::string cannot_run(const AttentionRow& row, const AttentionSpec& spec);

}  // namespace ringattn::testing
