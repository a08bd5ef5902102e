// SPDX-License-Identifier: Apache-2.0
// Ring step of attention over compressed keys and values: decompresses the rows of a block into the workspace, and
// attends to them there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "attention/ring/engine.hpp"
#include "attention/ring/row_stream.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "ops/attention/compressed_blocks.hpp"
#include "ops/attention/invalid_element_cells.hpp"

namespace ringattn {

// True if all streams are dense.
bool has_dense_streams(const RowFormat& format, const RowShape& shape, const CompressedRows& rows);
// The rank's rows for transfers: `count` rows of each stream of k and v, in place if they are dense, else copied to
// `staged`.
StreamRows dense_stream_rows(const Job& job, const CompressedRows& k, const CompressedRows& v, std::int64_t count,
                             StreamRows staged, Backend& backend, Stream stream);

// GEMM kernels of low-rank formats; null if a tensor's format has no rank.
struct LowRankGemms {
  std::unique_ptr<BatchedGemmKernel> k;
  std::unique_ptr<BatchedGemmKernel> v;

  std::size_t scratch_bytes(const Job& job) const;
  void reserve(const Job& job);
};
// Creates them on the named backend. Throws kUnsupported.
LowRankGemms make_low_rank_gemms(const Job& job, std::string_view backend_name, Backend& backend);

class CompressedRingStep final : public RingStep {
 public:
  // Rows of a tensor. A plain tensor is the single stream of its format.
  struct Source {
    CompressedRows own;                     // this rank's rows, as the caller has them
    std::array<CompressedRows, 2> buffers;  // block b uses buffers[b % 2]; same tables as `own`
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
  // The objects that the ring step uses. They outlive the step.
  struct Tools {
    const Job& job;
    const Plan& plan;
    std::span<const DecompressedBlock> blocks;  // [blocks of the plan]
    std::span<const PreparedTask> prepared;     // [blocks of the plan]
    Backend& backend;
    AttentionKernel& attention;
    LowRankGemms& gemms;
    const InvalidElementCells& invalid_elements;  // two cells per block, for k and for v
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
