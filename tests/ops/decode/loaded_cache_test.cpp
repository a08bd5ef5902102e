// SPDX-License-Identifier: Apache-2.0
// What of a job's keys and values lies in a rank's memory.
#include "ops/decode/loaded_cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "comm/threads.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/attention_jobs/prepared_job.hpp"

namespace ringattn {
namespace {

constexpr std::int64_t kTokens = 700;
constexpr std::int64_t kSequences = 3;

JobInput listed_steps(std::int64_t page_size) {
  SyntheticInput input;
  input.op = Op::kDecode;
  input.seed = 5;
  input.tokens = kTokens;
  input.q_len = 2;
  input.page_size = page_size;
  input.batch = kSequences;
  input.heads = 4;
  input.kv_heads = 2;
  input.head_dim = 16;
  Numerics numerics;
  numerics.block_mask = "window:128+global:128";
  return {input, numerics};
}

// One head of a sequence's keys and values, in whole pages.
std::size_t head_bytes(std::int64_t page_size) {
  const std::int64_t tokens = page_size == 0 ? kTokens : (kTokens + page_size - 1) / page_size * page_size;
  return static_cast<std::size_t>(tokens) * 2 * 16 * 2;  // k and v, in bf16
}

// With a block mask two ranks deal the K/V heads, as three sequences don't come out even. More ranks deal sequences,
// and from four ranks on some have none.
TEST(LoadedCache, HoldsARanksOwnHeadsWhereTheyHaveBlockMasks) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  for (const std::int64_t page_size : {0, 16, 256}) {
    std::string expected;
    for (const int ranks : {1, 2, 3, 4, 5}) {
      std::mutex mutex;
      std::size_t all = 0, most = 0, planned = 0;
      std::string digest;
      run_ranks(make_threads_world(ranks), [&](Transport& world) {
        PreparedJob prepared(listed_steps(page_size), world, options);
        const Collective collective(world, Timeouts(options.timeout_seconds));
        const LoadedCache cache(prepared.input(), prepared.decode(), collective);
        const std::size_t bytes = cache.pools().k.bytes() + cache.pools().v.bytes();
        const auto sequences = static_cast<std::size_t>(prepared.decode().kept(kSequences).count);
        const auto heads = static_cast<std::size_t>(prepared.decode().kv_heads().count);
        const Digests digests = digest_result(prepared.input(), prepared.compute(), collective);
        const std::lock_guard lock(mutex);
        EXPECT_EQ(heads, ranks == 2 ? 1U : 2U);
        EXPECT_EQ(bytes, sequences * heads * head_bytes(page_size)) << "rank " << world.rank() << " of " << ranks;
        all += bytes;
        most = std::max(most, bytes);
        planned = prepared.step().memory.cache;
        digest = digests.out + digests.lse;
      });
      EXPECT_EQ(all, kSequences * 2 * head_bytes(page_size));
      EXPECT_EQ(most, planned);
      if (expected.empty()) expected = digest;
      EXPECT_EQ(digest, expected) << ranks << " ranks, pages of " << page_size;
    }
  }
}

}  // namespace
}  // namespace ringattn
