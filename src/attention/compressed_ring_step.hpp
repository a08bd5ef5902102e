// SPDX-License-Identifier: Apache-2.0
// Attention's block step over compressed keys and values: the rows of a block that has arrived are decompressed into
// the workspace, side by side, and folded from there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "attention/compressed_blocks.hpp"
#include "attention/invalid_element_cells.hpp"
#include "attention/ring/engine.hpp"
#include "attention/ring/row_stream.hpp"
#include "kernels/attention.hpp"
#include "kernels/backend.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/compressed_rows.hpp"

namespace ringattn {

// Whether all streams lie dense.
bool has_dense_streams(const RowFormat& format, const RowShape& shape, const CompressedRows& rows);
// The rank's rows as transfers need them: `count` rows of each stream of k and v, where they lie if they are dense,
// else a copy at `staged`.
StreamRows dense_stream_rows(const Job& job, const CompressedRows& k, const CompressedRows& v, std::int64_t count,
                             StreamRows staged, Backend& backend, Stream stream);

// Kernels for the products of formats with a rank; null where a tensor's format has none.
struct LowRankGemms {
  std::unique_ptr<BatchedGemmKernel> k;
  std::unique_ptr<BatchedGemmKernel> v;

  std::size_t scratch_bytes(const Job& job) const;
  void reserve(const Job& job);
};
// On the backend of this name. Throws kUnsupported.
LowRankGemms make_low_rank_gemms(const Job& job, std::string_view backend_name, Backend& backend);

class CompressedRingStep final : public RingStep {
 public:
  // Where a tensor's rows lie: of a plain one as the one stream of its format.
  struct Source {
    CompressedRows own;                     // this rank's, as the caller has them
    std::array<CompressedRows, 2> buffers;  // block b uses buffers[b % 2]; tables as own
  };
  struct Memory {
    TensorView q;
    Source k;
    Source v;
    std::byte* keys = nullptr;    // [rows of the largest block, kv_heads, head_dim]
    std::byte* values = nullptr;  // [rows of the largest block, kv_heads, head_dim_v]
    void* state = nullptr;
    AttentionOutput output;
    std::optional<AttentionStateView> exports;
  };
  // What steps work with. All of it outlives them.
  struct Tools {
    const Job& job;
    const Plan& plan;
    std::span<const DecompressedBlock> blocks;  // of the plan
    std::span<const PreparedTask> prepared;     // of the plan's blocks
    Backend& backend;
    AttentionKernel& attention;
    LowRankGemms& gemms;
    const InvalidElementCells& invalid_elements;  // two of each block, of k and of v
  };

  CompressedRingStep(const Tools& tools, const Memory& memory) : tools_(tools), memory_(memory) {}

  void compute(const ArrivedBlock& block, Stream stream, const Progress& progress) override;
  bool finish(Stream stream, const Progress& progress) override;

 private:
  void decompress(const ArrivedBlock& block, const RowFormat& format, const RowShape& shape, const Source& source,
                  BatchedGemmKernel* gemms, const MutableTensorView& plain, InvalidElementCell* invalid, Stream stream,
                  const Progress& progress);

  const Tools& tools_;
  const Memory& memory_;
};

}  // namespace ringattn
