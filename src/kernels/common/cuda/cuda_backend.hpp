// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: device memory of one GPU, its stream, and events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn::cuda {

class CudaBackend final : public Backend {
 public:
  // `device` may be kNoDevice. Throws kUnsupported if there is no such device.
  explicit CudaBackend(int device);

  int device() const { return device_; }

  MemoryKind memory() const override { return MemoryKind::kDevice; }
  std::string identity() const override { return identity_; }
  Buffer allocate(std::size_t bytes) override;
  Stream stream() override { return {stream_.value().get()}; }
  void copy_rows(void* target, std::int64_t target_stride, const void* source, std::int64_t source_stride,
                 std::int64_t row_bytes, std::int64_t rows, Stream stream) override;
  void gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages, std::int64_t rows,
                    Stream stream) override;
  void fill_bytes(void* target, std::byte value, std::size_t bytes, Stream stream) override;
  void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                      const MutableTensorView& rows, Stream stream) override;
  void update_cache(const CacheUpdate& update, Stream stream) override;
  void pool_keys(const BlockChoice& choice, Stream stream) override;
  void choose_blocks(const BlockChoice& choice, Stream stream) override;
  void pool_rows(const RowPooling& pooling, Stream stream) override;
  void choose_block_mask(const BlockMaskChoice& choice, Stream stream) override;
  void decompress(const DecompressTask& task, Stream stream) override;
  void compress(const CompressTask& task, Stream stream) override;
  void compute_absmax(const AbsmaxTask& task, Stream stream) override;
  void append(const AppendTask& task, Stream stream) override;
  void check_finite(const FiniteTask& task, Stream stream) override;
  void find_codebook(const CodebookTask& task, Stream stream) override;
  void add_gram(const GramTask& task, Stream stream) override;
  void synchronize(Stream stream, const Deadline& deadline, const Progress& progress) override;
  std::unique_ptr<Events> make_events(std::size_t count, bool timed) override;
  std::unique_ptr<PriorityStream> make_priority_stream(std::size_t marks) override;
  std::unique_ptr<Replay> replay(Stream stream, const std::function<void()>& enqueue) override;
  bool enqueues() const override { return true; }
  bool is_capturing(Stream stream) override;
  std::size_t peak_memory() override;

 private:
  void update_min_free();

  const int device_;
  std::string identity_;
  std::optional<CudaStream> stream_;
  std::optional<CudaEvent> passed_;  // recorded and awaited by synchronize()
  std::size_t free_before_ = 0;      // free device memory in bytes when the backend was made
  std::size_t min_free_ = 0;         // lowest free device memory seen, in bytes
};

}  // namespace ringattn::cuda
