// SPDX-License-Identifier: Apache-2.0
// Decoded rows are those of Attention over the whole sequence, by memcmp of O and LSE, in worlds of 1 to 5 threads.
#include "ops/decode/decode.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "tests/support/decode_rank.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kGroup = 8192;  // keys of a KV split of cpu_attention

DecodeOptions on_cpu() {
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

// Sequences of these lengths, whose last `rows` tokens are queries; 0: all of them are.
Job job_of(const AttentionSpec& spec, const std::vector<std::int64_t>& lengths, int rows) {
  Job job;
  job.spec = spec;
  for (const std::int64_t length : lengths) {
    const std::int64_t queries = rows == 0 ? length : rows;
    job.batch.sequences.push_back({queries, length, length - queries});
  }
  return job;
}

// What Attention on one rank gives.
JobResult attended(const Job& job, const JobTensors& tensors) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return run_job(job, options, tensors, 1);
}

class DecodeWorld : public ::testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  static void in_world(const std::function<void(Transport&)>& rank_main) {
    if (ranks() > 1) {
      run_threads_world(ranks(), {}, rank_main);
    } else {
      rank_main(*make_self_transport());
    }
  }

  // A step of the last rows of sequences of these lengths, the new rows in the cache already or not.
  static void expect_rows(const AttentionSpec& spec, const std::vector<std::int64_t>& lengths, int rows,
                          const CacheLayout& layout, std::uint64_t seed, bool append = false) {
    SCOPED_TRACE(
        fmt::format("{}, {} rows, page {}, {} sequences", describe(spec), rows, layout.page_size, lengths.size()));
    const Job job = job_of(spec, lengths, rows);
    const JobTensors tensors = random_tensors(job, seed);
    const JobResult reference = attended(job, tensors);
    std::atomic<std::int64_t> compared = 0;
    in_world([&](Transport& world) {
      Decode decode(decode_job(job, rows, layout), world, on_cpu());
      DecodeRank rank(decode, job, tensors, layout);
      std::vector<std::int64_t> filled = lengths;
      for (std::int64_t& length : filled) length = append ? std::max<std::int64_t>(0, length - rows) : length;
      rank.fill(filled);
      rank.load(lengths, rows);
      decode.run(rank.inputs(append, append), rank.outputs());
      EXPECT_EQ(rank.difference(reference), "") << "rank " << world.rank();
      compared += decode.owned(static_cast<std::int64_t>(lengths.size())).count;
    });
    EXPECT_EQ(compared, static_cast<std::int64_t>(lengths.size()));
  }
};

TEST_P(DecodeWorld, EveryMask) {
  std::uint64_t seed = 1;
  for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{150, 0}, Mask{90, 30}, Mask{9000, 0}}) {
    for (const std::int64_t page : {0, seed % 3 == 0 ? 16 : 128}) {
      AttentionSpec spec =
          make_spec(seed % 2 == 0 ? Dtype::kBf16 : Dtype::kF32, 4, 2, 32, mask, seed % 3 == 0 ? 16 : 32);
      spec.sinks = seed % 2 == 0;
      spec.softcap = seed % 3 == 1 ? 15.0F : 0.0F;
      expect_rows(spec, {1, 700, 129, 0, 2 * kGroup + 65, 64}, seed % 4 == 0 ? 16 : 3,
                  {.page_size = page, .head_major = seed % 2 == 1, .shuffle = seed}, seed);
      ++seed;
    }
  }
}

TEST_P(DecodeWorld, LengthsAroundEdges) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 16, {-1, 0});
  const std::vector<std::int64_t> lengths = {
      1, 127, 128, 129, kGroup - 1, kGroup, kGroup + 1, 2 * kGroup, 5 * kGroup + 1, 4 * kGroup - 1, 2};
  for (const bool append : {false, true}) {
    expect_rows(spec, lengths, 1, {.page_size = 64}, 21, append);
    expect_rows(spec, lengths, 1, {}, 22, append);
  }
}

TEST_P(DecodeWorld, AnyBatch) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 2, 16, {-1, 0});
  for (const std::size_t batch : {1U, 2U, 3U, 7U, 64U, 256U}) {
    std::mt19937_64 generator(batch);
    std::vector<std::int64_t> lengths;
    for (std::size_t s = 0; s < batch; ++s) lengths.push_back(static_cast<std::int64_t>(generator() % 200) + 2);
    lengths[batch / 2] = kGroup + 3;
    expect_rows(spec, lengths, 2, {.page_size = batch % 2 == 0 ? 32 : 0}, batch, true);
  }
}

// Sequences share the pages of a common prefix, over the edge of a KV split; all else of the pool is NaN.
TEST_P(DecodeWorld, SharedPrefixPages) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0});
  constexpr std::int64_t kShared = kGroup + 512;
  const Job job = job_of(spec, {kShared + 100, kShared + 1, kShared + 300}, 2);
  JobTensors tensors = random_tensors(job, 51);
  const std::vector<std::int64_t> cu = job.batch.cu_k();
  for (std::vector<std::byte>* rows : {&tensors.k, &tensors.v}) {
    const std::int64_t token = static_cast<std::int64_t>(rows->size()) / job.batch.k_tokens();
    for (const std::size_t s : {1U, 2U}) std::copy_n(rows->begin(), kShared * token, rows->begin() + cu[s] * token);
  }
  const JobResult reference = attended(job, tensors);
  for (const std::int64_t page : {16, 32, 64, 128, 256}) {
    const CacheLayout layout{.page_size = page, .shuffle = static_cast<std::uint64_t>(page), .shared = kShared};
    in_world([&](Transport& world) {
      Decode decode(decode_job(job, 2, layout), world, on_cpu());
      DecodeRank rank(decode, job, tensors, layout);
      rank.fill(job.batch.k_lengths());
      rank.load(job.batch.k_lengths(), 2);
      decode.run(rank.inputs(false, false), rank.outputs());
      EXPECT_EQ(rank.difference(reference), "") << page;
    });
  }
}

// The step is told of the prefixes that sequences share, and rows are appended to the caches after them.
TEST_P(DecodeWorld, SharedPrefixes) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0});
  const Job job = job_of(spec, {2 * kGroup + 600, kGroup + 90, 2 * kGroup + 530, 300, kGroup + 80}, 3);
  const CacheLayout layout{.page_size = 64,
                           .prefix_of = {1, 0, 1, -1, 0},
                           .prefix_keys = {kGroup, static_cast<std::int32_t>(2 * kGroup + 512)}};
  JobTensors tensors = random_tensors(job, 52);
  const std::vector<std::int64_t> cu = job.batch.cu_k();
  for (std::vector<std::byte>* rows : {&tensors.k, &tensors.v}) {
    const std::int64_t token = static_cast<std::int64_t>(rows->size()) / job.batch.k_tokens();
    std::copy_n(rows->begin(), (2 * kGroup + 512) * token, rows->begin() + cu[2] * token);
    std::copy_n(rows->begin() + cu[1] * token, kGroup * token, rows->begin() + cu[4] * token);
  }
  const JobResult reference = attended(job, tensors);
  in_world([&](Transport& world) {
    Decode decode(decode_job(job, 3, layout), world, on_cpu());
    DecodeRank rank(decode, job, tensors, layout);
    std::vector<std::int64_t> lengths = job.batch.k_lengths();
    rank.load(lengths, 3);
    for (std::int64_t& length : lengths) length -= 3;
    rank.fill(lengths);
    decode.run(rank.inputs(true, true), rank.outputs());
    EXPECT_EQ(rank.difference(reference), "") << "rank " << world.rank();
  });
}

// Token by token, each step with rows that weren't in the cache, over edges of tiles and KV splits. The test doesn't
// wait between steps whose results it doesn't read.
TEST_P(DecodeWorld, GrowsTokenByToken) {
  constexpr std::int64_t kSteps = 300;
  for (const Mask& mask : {Mask{-1, 0}, Mask{200, 0}}) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 16, mask);
    const Job job = job_of(spec, {kGroup + 150, kSteps, 2 * kSteps}, 0);
    const JobTensors tensors = random_tensors(job, 61);
    const JobResult reference = attended(job, tensors);
    for (const int rows : {1, 4}) {
      const CacheLayout layout{.page_size = rows == 1 ? 16 : 0};
      in_world([&](Transport& world) {
        Decode decode(decode_job(job, rows, layout), world, on_cpu());
        DecodeRank rank(decode, job, tensors, layout);
        std::vector<std::int64_t> lengths;
        for (const Sequence& sequence : job.batch.sequences) lengths.push_back(sequence.k_len - kSteps);
        rank.fill(lengths);
        for (std::int64_t step = 0; step < kSteps; step += rows) {
          for (std::int64_t& length : lengths) length += rows;
          rank.load(lengths, rows);
          decode.enqueue(rank.inputs(true, true), rank.outputs());
          decode.wait();
          EXPECT_EQ(rank.difference(reference), "") << "step " << step << ", rank " << world.rank();
        }
      });
    }
  }
}

// Layers share an object, lengths and block table, and have caches of their own: the first one grows the lengths.
TEST_P(DecodeWorld, LayersInARow) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 2, 1, 16, {-1, 0});
  const Job job = job_of(spec, {kGroup + 7, 60, 400}, 0);
  constexpr int kLayers = 3;
  std::vector<JobTensors> tensors;
  std::vector<JobResult> reference;
  for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
    tensors.push_back(random_tensors(job, 71 + layer));
    reference.push_back(attended(job, tensors.back()));
  }
  in_world([&](Transport& world) {
    const CacheLayout layout{.page_size = 32};
    Decode decode(decode_job(job, 1, layout), world, on_cpu());
    std::vector<std::unique_ptr<DecodeRank>> layers;
    std::vector<std::int64_t> lengths = job.batch.k_lengths();
    for (std::int64_t& length : lengths) length -= 20;
    for (const JobTensors& of : tensors) {
      layers.push_back(std::make_unique<DecodeRank>(decode, job, of, layout));
      layers.back()->fill(lengths);
    }
    for (int step = 0; step < 20; ++step) {
      for (std::int64_t& length : lengths) ++length;
      for (auto& layer : layers) {
        layer->load(lengths, 1);
        DecodeInputs inputs = layer->inputs(layer == layers.front(), true);
        if (layer != layers.front()) inputs.lengths = layers.front()->inputs(false, true).lengths;
        decode.enqueue(inputs, layer->outputs());
      }
      decode.wait();
      for (std::size_t i = 0; i < layers.size(); ++i) EXPECT_EQ(layers[i]->difference(reference[i]), "") << step;
    }
  });
}

// Steps of fewer sequences and rows than the object was prepared for.
TEST_P(DecodeWorld, SmallerSteps) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 2, 1, 16, {-1, 0});
  in_world([&](Transport& world) {
    DecodeJob largest{spec, {9, 5, 4 * kGroup}, 64};
    Decode decode(largest, world, on_cpu());
    for (const int rows : {1, 5}) {
      for (const std::size_t count : {1U, 4U, 9U}) {
        const std::vector<std::int64_t> all = {40, kGroup + 9, 77, 3 * kGroup, 5, 6, 7, 8, 900};
        const Job job = job_of(spec, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count)}, rows);
        const JobTensors tensors = random_tensors(job, 81);
        DecodeRank rank(decode, job, tensors, {.page_size = 64});
        rank.fill(job.batch.k_lengths());
        rank.load(job.batch.k_lengths(), rows);
        decode.run(rank.inputs(false, false), rank.outputs());
        EXPECT_EQ(rank.difference(attended(job, tensors)), "") << count << " of " << rows;
      }
    }
    const Job none = job_of(spec, {}, 1);
    DecodeRank rank(decode, none, random_tensors(none, 1), {.page_size = 64});
    rank.load({}, 1);
    decode.run(rank.inputs(true, true), rank.outputs());
  });
}

// A step that rotates its rows has the bits, in the cache, too, of a step that is given rotated ones.
TEST_P(DecodeWorld, RotatesRowsOnTheirWay) {
  constexpr int kRows = 3;
  for (const auto& [dtype, pairs, page] : {std::tuple{Dtype::kBf16, RopePairs::kHalfSplit, 16},
                                           {Dtype::kF16, RopePairs::kInterleaved, 0},
                                           {Dtype::kF32, RopePairs::kHalfSplit, 64}}) {
    RopeParameters parameters;
    parameters.partial_rotary_factor = page == 64 ? 0.5 : 1.0;
    const RopeSpec rope = make_rope_spec(parameters, dtype, 32, pairs, page == 0);
    const Job job = job_of(make_spec(dtype, 4, 2, 32, {-1, 0}), {3, 700, kGroup + 1, 64, 2 * kGroup + 65}, kRows);
    const JobTensors raw = random_tensors(job, 91), rotated = rotated_tensors(job, raw, rope);
    const JobResult reference = attended(job, rotated);
    const CacheLayout layout{.page_size = page, .head_major = page == 16, .shuffle = 5};
    for (const bool append : {true, false}) {
      in_world([&](Transport& world) {
        std::vector<std::byte> caches[2];
        for (const bool rotates : {false, true}) {
          DecodeJob steps = decode_job(job, kRows, layout);
          if (rotates) steps.rope = rope;
          Decode decode(steps, world, on_cpu());
          DecodeRank rank(decode, job, rotated, layout);
          std::vector<std::int64_t> filled = job.batch.k_lengths();
          for (std::int64_t& length : filled) length -= append ? kRows : 0;
          rank.fill(filled);
          if (rotates) rank.use(raw);
          rank.load(job.batch.k_lengths(), kRows);
          decode.run(rank.inputs(append, append), rank.outputs());
          EXPECT_EQ(rank.difference(reference), "") << describe(decode.job()) << ", rank " << world.rank();
          caches[rotates ? 1 : 0] = rank.cache_bytes();
        }
        EXPECT_TRUE(caches[0] == caches[1]) << dtype_name(dtype) << ", rank " << world.rank();
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, DecodeWorld, ::testing::Values(1, 2, 3, 4, 5),
                         [](const auto& test) { return std::to_string(test.param) + "_ranks"; });

}  // namespace
}  // namespace ringattn::testing
