// SPDX-License-Identifier: Apache-2.0
// A device that doesn't end its work is told of, and not waited for without an end.
#include "kernels/common/finish.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/error.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

// A device that works until it has been asked that many times.
class BusyBackend final : public Backend {
 public:
  explicit BusyBackend(int looks) : looks_(looks) {}

  int looks() const { return looks_; }  // that are left

  MemoryKind memory() const override { return MemoryKind::kDevice; }
  std::string identity() const override { return "busy"; }
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
  void pool_rows(const RowPooling&, Stream) override {}
  void choose_block_mask(const BlockMaskChoice&, Stream) override {}
  void synchronize(Stream, const Deadline&, const Progress& progress) override {
    for (; looks_ > 0; --looks_) progress();
  }
  std::unique_ptr<Events> make_events(std::size_t, bool) override { return nullptr; }
  std::unique_ptr<PriorityStream> make_priority_stream(std::size_t) override { return nullptr; }
  bool enqueues() const override { return true; }
  std::unique_ptr<Replay> replay(Stream, const std::function<void()>&) override { return nullptr; }
  bool is_capturing(Stream) override { return false; }
  std::size_t peak_memory() override { return 0; }

 private:
  int looks_;
};

TEST(Finish, WaitsForADeviceThatWorks) {
  BusyBackend backend(1000);
  finish(backend, {}, DeviceTimeouts::for_short_work());
  EXPECT_EQ(backend.looks(), 0);
}

TEST(Finish, EndsWithTheReasonWhereTheDeviceDoesNot) {
  BusyBackend backend(1'000'000'000);
  const Error error = error_of([&] { finish(backend, {}, Deadline::after(0.02)); });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_STREQ(
      error.what(),
      "the device's work did not end within 0.02 s (no other rank has a part in it). See whether the GPU still "
      "answers (nvidia-smi).");
}

}  // namespace
}  // namespace ringattn::testing
