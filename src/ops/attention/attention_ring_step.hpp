// SPDX-License-Identifier: Apache-2.0
// Ring step of attention: attends the rank's queries to each block after its arrival.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "attention/ring/engine.hpp"
#include "kernels/attention/attention.hpp"
#include "ops/attention/paged_keys.hpp"

namespace ringattn {

class AttentionRingStep final : public RingStep {
 public:
  // Memory of a run.
  struct Memory {
    TensorView q;                               // [q_rows, heads, head_dim]
    KeySource own;                              // this rank's k and v, in place or as a dense copy
    const PagedKeys* pages = nullptr;           // not null: `own` is their pool, and the rank has all keys
    std::int64_t page_rows = 0;                 // of the pool (PoolSource)
    std::vector<PageRun>* map = nullptr;        // scratch for the page runs of a block's tiles
    std::array<KeySource, 2> buffers;           // block b uses buffers[b % 2]
    void* state = nullptr;                      // AttentionKernel::state_bytes(), if Plan::keeps_state
    AttentionOutput output;                     // for the last block
    std::optional<AttentionStateView> exports;  // writes the state after the last block
  };

  // `prepared`: [blocks] of prepare_tasks(). All arguments outlive the object.
  AttentionRingStep(const Plan& plan, AttentionKernel& kernel, std::span<const PreparedTask> prepared,
                    const Memory& memory)
      : plan_(plan), kernel_(kernel), prepared_(prepared), memory_(memory) {}

  void compute(const ArrivedBlock& block, Stream stream, const Progress& progress) override;
  bool finish(Stream stream, const Progress& progress) override;

 private:
  const Plan& plan_;
  AttentionKernel& kernel_;
  std::span<const PreparedTask> prepared_;
  const Memory& memory_;
};

// The task of a block with its tile map, without q, state and prepared tables. `sources` and `output` outlive it.
// `exports`: write the state after the last block.
AttentionTask block_task(const Plan& plan, const ArrivedBlock& block, std::span<const PageRun> tiles,
                         std::span<const KeySource> sources, const AttentionOutput& output, bool exports);

// Returns the tile map of a block.
using TilesOf = std::function<std::span<const PageRun>(std::size_t block)>;

// Prepares the task of each block: [blocks]. `tiles_of`: tile maps; empty: those of the plan. `state_out`: as in
// Options.
std::vector<PreparedTask> prepare_tasks(const Plan& plan, const AttentionSpec& spec, AttentionKernel& kernel,
                                        bool state_out, const TilesOf& tiles_of = {});

}  // namespace ringattn
