// SPDX-License-Identifier: Apache-2.0
#include "base/gpu.hpp"

#include <gtest/gtest.h>

#include <set>

#include "base/error.hpp"

namespace ringattn {
namespace {

// Either there are GPUs, or a reason why there are none; never both, never neither.
TEST(Gpu, ThereAreGpusOrAReason) { EXPECT_EQ(visible_gpus().empty(), !gpus_unavailable().empty()); }

TEST(Gpu, EachHasANameAndAnIdentity) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  std::set<std::string> identities;
  for (const Gpu& gpu : visible_gpus()) {
    EXPECT_FALSE(gpu.name.empty());
    EXPECT_GT(gpu.compute_major, 0);
    EXPECT_GT(gpu.multiprocessors, 0);
    EXPECT_GT(gpu.memory, std::size_t{1} << 30);
    identities.insert(gpu.uuid);
  }
  EXPECT_EQ(identities.size(), visible_gpus().size());
}

TEST(Gpu, MemoryComesAndGoes) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  // Allocates twice what the GPU has, piece after piece: freed memory can be allocated again, even if others use the
  // GPU meanwhile.
  const std::size_t total = gpu_memory(0).total;
  constexpr std::size_t kPieces = 64;
  for (std::size_t i = 0; i < 2 * kPieces; ++i) {
    const Buffer buffer = allocate_device(total / kPieces, 0);
    EXPECT_EQ(buffer.kind(), MemoryKind::kDevice);
    EXPECT_LE(gpu_memory(0).free, total - total / kPieces);
  }
  EXPECT_EQ(allocate_pinned(100).kind(), MemoryKind::kHost);
}

TEST(Gpu, TooMuchMemoryIsAMemoryError) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  try {
    allocate_device(std::size_t{1} << 50, 0);
    FAIL() << "a petabyte was allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMemory);
  }
}

TEST(Gpu, WithoutAGpuDeviceMemoryIsRefused) {
  if (!visible_gpus().empty()) GTEST_SKIP() << "needs a machine without a GPU";
  try {
    allocate_device(1, 0);
    FAIL() << "device memory without a device";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
}

}  // namespace
}  // namespace ringattn
