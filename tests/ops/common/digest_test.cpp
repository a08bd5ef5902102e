// SPDX-License-Identifier: Apache-2.0
// The digest is what its definition says, however the rows are shared.
#include "ops/common/digest.hpp"

#include <gtest/gtest.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <limits>
#include <mutex>
#include <set>

#include "base/error.hpp"
#include "tests/support/random_runs.hpp"
#include "tests/support/thread_ranks.hpp"

namespace ringattn {
namespace {

using testing::deal_randomly;
using testing::run_thread_ranks;

constexpr double kTimeout = 30.0;
constexpr std::size_t kMessageBytes = 8192;  // what an all-gather may carry

std::string hex(XXH128_hash_t hash) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return text;
}

// The definition, over the whole packed array.
std::string defined_digest(const std::vector<std::byte>& packed, std::size_t row_bytes) {
  std::string hashes;
  for (std::size_t at = 0; at < packed.size(); at += 128 * row_bytes) {
    const auto hash = XXH3_128bits(packed.data() + at, std::min(128 * row_bytes, packed.size() - at));
    for (const XXH64_hash_t half : {hash.high64, hash.low64}) {
      for (int shift = 56; shift >= 0; shift -= 8) hashes += static_cast<char>(half >> shift);
    }
  }
  return hex(XXH3_128bits(hashes.data(), hashes.size()));
}

std::vector<std::byte> random_bytes(std::size_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Each rank's digest of its rows of `packed`; they must agree. `padding` elements follow each row's heads.
std::string shared_digest(const std::vector<std::byte>& packed, Dtype dtype, std::int64_t heads, std::int64_t dim,
                          const std::vector<std::vector<PackedRun>>& ranks, std::int64_t tokens,
                          std::int64_t padding = 0) {
  std::mutex mutex;
  std::set<std::string> digests;
  const std::size_t element = size_of(dtype);
  const auto row_bytes = static_cast<std::size_t>(heads * dim) * element;
  const auto stride = static_cast<std::size_t>(heads * dim + padding) * element;
  const std::size_t most = run_thread_ranks(static_cast<int>(ranks.size()), [&](Bootstrap& world) {
    const auto& runs = ranks[static_cast<std::size_t>(world.rank())];
    const std::int64_t owned = total_tokens(runs);
    std::vector<std::byte> rows(static_cast<std::size_t>(owned) * stride + 1, std::byte{0xee});
    std::size_t row = 0;
    for (const PackedRun& run : runs) {
      for (std::int64_t token = run.begin; token < run.end; ++token, ++row) {
        std::memcpy(rows.data() + row * stride, packed.data() + static_cast<std::size_t>(token) * row_bytes, row_bytes);
      }
    }
    const TensorView view{rows.data(), dtype, owned, heads, dim, heads * dim + padding, dim};
    const std::string mine = digest(Collective(world, Timeouts(kTimeout)), view, runs, tokens);
    const std::lock_guard lock(mutex);
    digests.insert(mine);
  });
  EXPECT_LE(most, kMessageBytes);
  EXPECT_EQ(digests.size(), 1U);
  return *digests.begin();
}

TEST(Digest, IsWhatTheDefinitionSaysForAnySharing) {
  std::mt19937_64 random(7);
  for (const std::int64_t tokens : {1, 127, 128, 129, 1000, 4097, 40'000}) {
    const std::int64_t heads = tokens > 10'000 ? 1 : 3;
    const std::int64_t dim = 8;
    const auto packed = random_bytes(static_cast<std::size_t>(tokens * heads * dim) * 2, random);
    const std::string expected = defined_digest(packed, static_cast<std::size_t>(heads * dim) * 2);
    for (const int world : {1, 2, 3, 8}) {
      for (const std::int64_t longest : {1, 5, 100, 128, 300, 10'000}) {
        if (tokens > 10'000 && longest < 100) continue;  // a hand-over for every token: minutes under sanitizers
        const auto ranks = deal_randomly(tokens, world, longest, random);
        EXPECT_EQ(shared_digest(packed, Dtype::kBf16, heads, dim, ranks, tokens), expected)
            << tokens << " tokens, " << world << " ranks, runs up to " << longest;
        EXPECT_EQ(shared_digest(packed, Dtype::kF16, heads, dim, ranks, tokens, 4), expected) << "strided";
      }
    }
  }
}

TEST(Digest, HandlesNothing) {
  EXPECT_EQ(shared_digest({}, Dtype::kF32, 2, 4, {{}, {}}, 0), defined_digest({}, 32));
  std::mt19937_64 random(8);
  const auto packed = random_bytes(200 * 16, random);  // one rank has no rows
  EXPECT_EQ(shared_digest(packed, Dtype::kF32, 1, 4, {{{0, 150}}, {}, {{150, 200}}}, 200), defined_digest(packed, 16));
}

TEST(Digest, HashesLseByTokenAndHead) {
  constexpr std::int64_t kTokens = 300;
  constexpr std::int64_t kHeads = 5;
  std::mt19937_64 random(9);
  const auto packed = random_bytes(kTokens * kHeads * sizeof(float), random);
  std::vector<float> head_major(kTokens * kHeads);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      std::memcpy(&head_major[static_cast<std::size_t>(h * kTokens + t)],
                  packed.data() + static_cast<std::size_t>(t * kHeads + h) * sizeof(float), sizeof(float));
    }
  }
  run_thread_ranks(1, [&](Bootstrap& world) {
    const std::vector<PackedRun> runs = {{0, kTokens}};
    EXPECT_EQ(
        digest(Collective(world, Timeouts(kTimeout)), RowView{head_major.data(), 1, kTokens}, kHeads, runs, kTokens),
        defined_digest(packed, kHeads * sizeof(float)));
  });
}

TEST(Digest, TellsBitPatternsApart) {
  const auto of = [](float value) {
    std::vector<std::byte> bytes(sizeof value);
    std::memcpy(bytes.data(), &value, sizeof value);
    return shared_digest(bytes, Dtype::kF32, 1, 1, {{{0, 1}}}, 1);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(of(0.0F), of(-0.0F));
  EXPECT_NE(of(nan), of(-nan));
  EXPECT_EQ(of(nan), of(nan));
}

// Pinned: scripts compare digests of different versions of the program.
TEST(Digest, HasGoldenValues) {
  EXPECT_EQ(shared_digest({}, Dtype::kF32, 1, 1, {{}}, 0), "99aa06d3014798d86001c324468d497f");
  std::vector<std::byte> bytes(200 * 8);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i % 251);
  EXPECT_EQ(shared_digest(bytes, Dtype::kBf16, 2, 2, {{{0, 200}}}, 200), "76f098be47df210517fa36681e5c09ff");
}

TEST(Digest, RefusesMissingTokens) {
  for (const PackedRun missing : {PackedRun{0, 10}, PackedRun{120, 140}, PackedRun{256, 300}}) {
    EXPECT_THROW(run_thread_ranks(2,
                                  [&](Bootstrap& world) {
                                    const std::vector<PackedRun> runs =
                                        world.rank() == 0 ? std::vector<PackedRun>{{0, missing.begin}}
                                                          : std::vector<PackedRun>{{missing.end, 300}};
                                    const std::vector<float> rows(300);
                                    digest(Collective(world, Timeouts(kTimeout)),
                                           dense_view(rows.data(), Dtype::kF32, total_tokens(runs), 1, 1), runs, 300);
                                  }),
                 Error);
  }
}

}  // namespace
}  // namespace ringattn
