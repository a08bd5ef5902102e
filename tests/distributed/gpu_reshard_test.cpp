// SPDX-License-Identifier: Apache-2.0
// Reshards of rows from one layout to another on GPUs: enqueued consecutively, each gets the right rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"
#include "ops/reshard/reshard.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/two_ranks.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kRowNumbers = 32;  // of 8 bytes: rows of 256
constexpr std::int64_t kRowBytes = kRowNumbers * 8;

// Runs of `tokens` to each rank in turn, or a stretch to each.
Layout layout_of(const std::vector<std::int64_t>& lengths, int ranks, std::int64_t tokens) {
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(ranks));
  std::size_t next = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < lengths[s]; begin += tokens) {
      runs[next++ % runs.size()].push_back({static_cast<std::int32_t>(s), begin, std::min(lengths[s], begin + tokens)});
    }
  }
  return {lengths, std::move(runs)};
}

// Every number of a row names its token.
std::vector<std::byte> named_rows(const Layout& layout, int rank, std::int64_t first) {
  std::vector<std::byte> bytes;
  for (const std::int64_t token : layout.packed_tokens(rank)) {
    const std::vector<std::int64_t> row(static_cast<std::size_t>(kRowNumbers), token + first);
    const auto* const data = reinterpret_cast<const std::byte*>(row.data());
    bytes.insert(bytes.end(), data, data + kRowBytes);
  }
  return bytes;
}

// Says where they differ first.
std::string difference(const std::vector<std::byte>& got, const std::vector<std::byte>& expected) {
  if (got.size() != expected.size()) return "other sizes";
  for (std::size_t at = 0; at < got.size(); at += 8) {
    std::int64_t there = 0;
    std::int64_t wanted = 0;
    std::memcpy(&there, got.data() + at, 8);
    std::memcpy(&wanted, expected.data() + at, 8);
    if (there == wanted) continue;
    const auto number = static_cast<std::int64_t>(at / 8);
    return "row " + std::to_string(number / kRowNumbers) + ", number " + std::to_string(number % kRowNumbers) +
           ": got " + std::to_string(there) + ", expected " + std::to_string(wanted);
  }
  return {};
}

void expect_there_and_back(Transport& world, std::int64_t stripe) {
  const std::vector<std::int64_t> lengths{5000, 3, 1111};
  const Layout striped = layout_of(lengths, world.size(), stripe);
  const Layout stretches = layout_of(lengths, world.size(), 2500);
  const AttentionChoice choice =
      choose_kernel(make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0}), KernelRequest{"cuda", "auto"});
  const auto backend = choice.row->make_backend({1, world.device()});
  const int rank = world.rank();
  Reshard there(striped, stretches, kRowBytes, world, *backend);
  Reshard back(stretches, striped, kRowBytes, world, *backend);
  constexpr int kLayers = 6;
  std::vector<DeviceArray> rows, moved, returned;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::vector<std::byte> named = named_rows(striped, rank, 10'000 * layer);
    rows.emplace_back(*backend, named.size()).write(named);
    moved.emplace_back(*backend, static_cast<std::size_t>(stretches.tokens(rank) * kRowBytes));
    returned.emplace_back(*backend, named.size());
  }
  const Stream stream = backend->stream();
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    there.enqueue(rows[layer].data(), moved[layer].data(), stream);
    back.enqueue(moved[layer].data(), returned[layer].data(), stream);
  }
  there.wait();
  back.wait();
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    const auto first = 10'000 * static_cast<std::int64_t>(layer);
    EXPECT_EQ(difference(moved[layer].read(), named_rows(stretches, rank, first)), "")
        << "there, stripe " << stripe << ", rank " << rank << ", layer " << layer;
    EXPECT_EQ(difference(returned[layer].read(), named_rows(striped, rank, first)), "")
        << "back, stripe " << stripe << ", rank " << rank << ", layer " << layer;
  }
  world.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

TEST(GpuReshard, RowsOfOneRankFindTheirPlaces) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  const auto self = make_self_transport(MemoryKind::kDevice);
  for (const std::int64_t stripe : {64, 2500}) expect_there_and_back(*self, stripe);
}

void expect_there_and_back_of_two_ranks(const char* transport) {
  for (const std::int64_t stripe : {64, 1, 2500}) {
    in_two_ranks(transport, [&](Transport& world) { expect_there_and_back(world, stripe); });
  }
}

TEST(GpuReshard, RowsOfTwoRanksFindTheirPlaces) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  expect_there_and_back_of_two_ranks("p2p");
}

TEST(GpuReshard, RowsOfTwoRanksFindTheirPlacesByNccl) {
  if (visible_gpus().size() < 2) GTEST_SKIP() << "needs two GPUs: NCCL takes one for each rank";
  expect_there_and_back_of_two_ranks("nccl");
}

}  // namespace
}  // namespace ringattn::testing
