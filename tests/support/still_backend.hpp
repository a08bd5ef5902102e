// SPDX-License-Identifier: Apache-2.0
// A device that does nothing: for tests of who asks a backend for what.
#pragma once

#include <memory>
#include <string>

#include "kernels/backend.hpp"

namespace ringattn::testing {

class StillBackend : public Backend {
 public:
  MemoryKind memory() const override { return MemoryKind::kDevice; }
  std::string identity() const override { return "still"; }
  Buffer allocate(std::size_t bytes) override { return allocate_host(bytes); }
  Stream stream() override { return {}; }
  void copy_rows(void*, std::int64_t, const void*, std::int64_t, std::int64_t, std::int64_t, Stream) override {}
  void gather_pages(void*, const CacheView&, std::span<const std::int32_t>, std::int64_t, Stream) override {}
  void fill_bytes(void*, std::byte, std::size_t, Stream) override {}
  void fill_synthetic(std::uint64_t, SyntheticTensor, std::span<const PackedRun>, const MutableTensorView&,
                      Stream) override {}
  void update_cache(const CacheUpdate&, Stream) override {}
  void pool_keys(const BlockChoice&, Stream) override {}
  void choose_blocks(const BlockChoice&, Stream) override {}
  void synchronize(Stream, const Deadline&, const Progress&) override {}
  std::unique_ptr<Marks> make_marks(std::size_t, bool) override { return nullptr; }
  std::unique_ptr<StreamBeside> make_stream_beside(Turn, std::size_t) override { return nullptr; }
  bool enqueues() const override { return true; }
  std::unique_ptr<Replay> replay(Stream, const std::function<void()>&) override { return nullptr; }
  bool is_capturing(Stream) override { return false; }
  std::size_t peak_memory() override { return 0; }
};

}  // namespace ringattn::testing
