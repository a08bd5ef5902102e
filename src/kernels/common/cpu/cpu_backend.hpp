// SPDX-License-Identifier: Apache-2.0
// The CPU backend: host memory, a number of threads, and the SIMD target of its kernels.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/host.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/block_mask_choice.hpp"
#include "kernels/common/cpu/tile_ops.hpp"
#include "kernels/common/simd_target.hpp"
#include "kernels/decode/block_choice.hpp"
#include "kernels/decode/cache_update.hpp"
#include "kernels/quant/codebook.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/gram.hpp"

namespace ringattn::cpu {

class CpuBackend final : public Backend {
 public:
  // threads ≤ 0: as many as OpenMP would start (OMP_NUM_THREADS, else one per core). 1 in a build without OpenMP.
  explicit CpuBackend(int threads);

  int threads() const { return threads_; }
  const TileOps& tile_ops() const { return tile_ops_; }
  // Arithmetic of attention for inputs of `dtype`. For bf16 it uses AMX tiles if they are available.
  const TileOps& attention_ops(Dtype dtype) const {
    return dtype == Dtype::kBf16 && amx_ops_ != nullptr ? *amx_ops_ : tile_ops_;
  }

  MemoryKind memory() const override { return MemoryKind::kHost; }
  std::string identity() const override { return (amx_ops_ != nullptr ? *amx_ops_ : tile_ops_).target; }
  std::string vector_identity() const override { return tile_ops_.target; }
  Buffer allocate(std::size_t bytes) override { return allocate_host(bytes); }
  Stream stream() override { return {}; }
  void copy_rows(void* target, std::int64_t target_stride, const void* source, std::int64_t source_stride,
                 std::int64_t row_bytes, std::int64_t rows, Stream stream) override;
  void gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages, std::int64_t rows,
                    Stream stream) override;
  void fill_bytes(void* target, std::byte value, std::size_t bytes, Stream stream) override;
  void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                      const MutableTensorView& rows, Stream) override {
    ringattn::fill_synthetic(seed, tensor, runs, rows, threads_);
  }
  void update_cache(const CacheUpdate& update, Stream) override { update_host_cache(update); }
  void pool_keys(const BlockChoice& choice, Stream) override { pool_host_keys(choice); }
  void choose_blocks(const BlockChoice& choice, Stream) override { choose_host_blocks(choice); }
  void pool_rows(const RowPooling& pooling, Stream) override { pool_host_rows(pooling); }
  void choose_block_mask(const BlockMaskChoice& choice, Stream) override { choose_host_block_mask(choice); }
  void decompress(const DecompressTask& task, Stream) override { decompress_on_host(task, threads_); }
  void compress(const CompressTask& task, Stream) override { compress_on_host(task, threads_); }
  void compute_absmax(const AbsmaxTask& task, Stream) override { compute_absmax_on_host(task, threads_); }
  void append(const AppendTask& task, Stream) override { append_on_host(task); }
  void check_finite(const FiniteTask& task, Stream) override { check_finite_on_host(task); }
  void find_codebook(const CodebookTask& task, Stream) override { find_codebook_on_host(task, threads_); }
  void add_gram(const GramTask& task, Stream) override { add_gram_on_host(task, threads_); }
  // Host work is complete when its call returns: an event is the time of its call, and waits return immediately.
  void synchronize(Stream, const Deadline&, const Progress&) override {}
  std::unique_ptr<Events> make_events(std::size_t count, bool timed) override;
  std::unique_ptr<PriorityStream> make_priority_stream(std::size_t) override { return nullptr; }
  std::unique_ptr<Replay> replay(Stream stream, const std::function<void()>& enqueue) override;
  bool enqueues() const override { return false; }
  bool is_capturing(Stream) override { return false; }
  std::size_t peak_memory() override { return peak_resident_bytes(); }

 private:
  SimdTargetUser target_user_;  // before the tables of the target
  int threads_;
  const TileOps& tile_ops_;
  const TileOps* amx_ops_;
};

}  // namespace ringattn::cpu
