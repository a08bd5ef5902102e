// SPDX-License-Identifier: Apache-2.0
// Attention's block step: a block that has arrived is folded into the rank's queries.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "attention/paged_keys.hpp"
#include "attention/ring/engine.hpp"
#include "kernels/attention.hpp"

namespace ringattn {

class AttentionRingStep final : public RingStep {
 public:
  // Where a run's rows lie.
  struct Memory {
    TensorView q;                               // [q_rows, heads, head_dim]
    KeySource own;                              // this rank's k and v, as the caller has them, or copied side by side
    const PagedKeys* pages = nullptr;           // not null: `own` is their pool, and the rank has all keys
    std::int64_t page_rows = 0;                 // of the pool (PoolSource)
    std::vector<PageRun>* map = nullptr;        // room for a block's tiles in pages
    std::array<KeySource, 2> buffers;           // block b uses buffers[b % 2]
    void* state = nullptr;                      // AttentionKernel::state_bytes(), where Plan::keeps_state
    AttentionOutput output;                     // for the last block
    std::optional<AttentionStateView> exports;  // the state is wanted as numbers, behind the last block
  };

  // `prepared`: for each block of the plan what prepare_tasks() returned. What it refers to outlives the object.
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

// The task of a block whose tiles are mapped so, but for its q, state and prepared tables. `sources` and `output`
// outlive it. `exports`: the state is wanted behind the last block.
AttentionTask block_task(const Plan& plan, const ArrivedBlock& block, std::span<const PageRun> tiles,
                         std::span<const KeySource> sources, const AttentionOutput& output, bool exports);

// The map of a block's tiles.
using TilesOf = std::function<std::span<const PageRun>(std::size_t block)>;

// Prepares the task of each block, [blocks], with such maps (none: the plan's) as it will be folded. `state_out`: as in
// Options.
std::vector<PreparedTask> prepare_tasks(const Plan& plan, const AttentionSpec& spec, AttentionKernel& kernel,
                                        bool state_out, const TilesOf& tiles_of = {});

}  // namespace ringattn
