// SPDX-License-Identifier: Apache-2.0
// The host side that the CUDA kernels of attention backward share: tables, states, scratch and row stats. A kernel adds
// its tiles and its launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/cuda.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cuda/backward_chunks.hpp"
#include "kernels/attention_backward/cuda/backward_tables.hpp"
#include "kernels/attention_backward/cuda/merge_partials.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/staging_ring.hpp"

namespace ringattn::cuda {

// How a kernel computes dQ, or dK and dV.
struct BackwardSideShape {
  int head_tiles;              // of a CTA
  int ctas;                    // per multiprocessor
  std::int64_t swizzle_bytes;  // bytes of the other side's tensors in an L2 swizzle group
};
struct BackwardKernelShape {
  int key_tile;  // AttentionBackwardKernel::key_tile()
  BackwardSideShape dq, dkv;
  bool gathers_stats;  // dK and dV read the row stats of a tile and head at once, as TMA does
  bool shares_splits;  // supports RowTilePair::partial
  // The kernel that computes dQ from the dS that dK and dV have stored, if TMA can load all tensors. No head tiles:
  // there is no such kernel.
  BackwardSideShape dq_from_ds = {};
};

// The destination of a gradient. Null: it is not written.
BackwardGradient gradient_of(const MutableTensorView* view);

class CudaAttentionBackward : public AttentionBackwardKernel {
 public:
  int key_tile() const final { return shape_.key_tile; }
  std::size_t dq_state_bytes(std::int64_t rows) const final;
  std::size_t dkv_state_bytes(std::int64_t rows) const final;
  std::size_t scratch_bytes(const BackwardLimits& limits) const final;
  void reserve(const BackwardLimits& limits) final;
  void row_stats(const RowStatsTask& task, Stream stream, const Progress& progress) final;
  void sum_rows(const RowSumsTask& task, Stream stream) final;
  void add_dq(const DqTask& task, Stream stream, const Progress& progress) final;
  void add_dkv(const DkvTask& task, Stream stream, const Progress& progress) final;
  void add_dq_and_dkv(const DqTask& dq, const DkvTask& dkv, Stream stream, const Progress& progress) final;

 protected:
  CudaAttentionBackward(const AttentionBackwardSpec& spec, const BackwardKernelShape& shape,
                        const CudaBackend& backend);

  // Loads the kernels on the current device.
  virtual void prepare() = 0;
  // Whether TMA can load the tensor. BackwardCommon::bulk is set if it can load all of a task's.
  virtual bool can_use_tma(const TensorView&) const { return false; }
  // Enqueue a kernel. At least one pair is in the tables. With BackwardCommon::spill, launch_dkv() stores dS as well,
  // and launch_dq() reads it.
  virtual void launch_dq(const DqTask& task, const BackwardCommon& common, int ctas, Stream stream) = 0;
  // `stats`: [tiles, heads, kRowStats, kBackwardTile] if BackwardKernelShape::gathers_stats, else null.
  virtual void launch_dkv(const DkvTask& task, const BackwardCommon& common, const float* stats, int ctas,
                          Stream stream) = 0;

 private:
  const AttentionSpec& forward() const { return spec_.forward; }
  int group() const { return forward().heads / forward().kv_heads; }
  std::int64_t element_bytes() const { return static_cast<std::int64_t>(size_of(forward().dtype)); }
  std::int64_t dq_width() const { return forward().head_dim; }
  std::int64_t dkv_width() const { return forward().head_dim + forward().head_dim_v; }
  ChunkLimits limits_of_chunks(const BackwardLimits& limits) const;
  bool can_map_all(const DqTask& dq, const DkvTask& dkv) const;
  std::size_t own_bytes() const;
  // Partial sums for each KV head that a task of dQ, or of dK and dV, may have: 0 or an upper bound for all tasks.
  std::int64_t dq_partials(const BackwardLimits& limits) const;
  std::int64_t dkv_partials(const BackwardLimits& limits) const;
  std::int64_t partials_of(const BackwardLimits& limits, const BackwardSideShape& side, std::int64_t width, int group,
                           std::int64_t tiles_per_split) const;
  std::size_t table_bytes(const BackwardLimits& limits) const;
  std::size_t scratch_sum_bytes(const BackwardLimits& limits) const;
  std::size_t tile_stats_bytes(const BackwardLimits& limits) const;
  // A task of some KV heads, which `spec` has.
  void enqueue_dq(const DqTask& task, const AttentionSpec& spec, const DsSpill& spill, Stream stream,
                  const Progress& progress);
  // Its query heads begin at `first_head` of the row stats. Stores dS at `ds`, unless that is null.
  DsSpill enqueue_dkv(const DkvTask& task, const AttentionSpec& spec, int first_head, char* ds, Stream stream,
                      const Progress& progress);
  BackwardCommon begin_sources(const TensorView& first, const TensorView& second, std::size_t count);
  void add_source(const TensorView& first, const TensorView& second, const float* stats, BackwardCommon& common);
  // Builds and uploads the task's tables, completes `common`, calls `launch` with the number of CTAs and merges the
  // partial sums.
  template <class Launch>
  void enqueue(const BackwardTask& task, const AttentionSpec& spec, const BackwardShape& shape, bool finish,
               std::span<const MergedSum> sums, BackwardCommon& common, Stream stream, const Progress& progress,
               const Launch& launch);

  AttentionBackwardSpec spec_;
  BackwardKernelShape shape_;
  int device_;
  int multiprocessors_;
  StagingRing ring_;
  BackwardTableBuilder builder_;
  BackwardChunker chunker_;
  ChunkLimits chunk_limits_;
  std::vector<TileRows> sources_;    // of the current task
  std::vector<const float*> stats_;  // of its sources
  Buffer tile_stats_;                // gathered for dK and dV
  Buffer scratch_;                   // BackwardSums::scratch
  BackwardLimits limits_;            // reserved
  Buffer ds_;                        // of a chunk
  Buffer chunk_sums_;                // of dQ, then of dK and dV, between chunks
};

}  // namespace ringattn::cuda
