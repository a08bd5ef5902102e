// SPDX-License-Identifier: Apache-2.0
// What a Decode refuses: jobs that contradict themselves, steps that don't fit them, and lengths and block tables that
// lead outside of a cache, before anything is changed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "ops/decode/decode.hpp"
#include "tests/support/decode_rank.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kGroup = 8192;  // keys of a KV split of cpu_attention

AttentionSpec small_spec() { return make_spec(Dtype::kF32, 2, 1, 16, {-1, 0}); }

DecodeOptions on_cpu() {
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

Job small_job(const std::vector<std::int64_t>& lengths, int rows) {
  Job job;
  job.spec = small_spec();
  for (const std::int64_t length : lengths) job.batch.sequences.push_back({rows, length, length - rows});
  return job;
}

void expect_message(const Error& error, ErrorCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(error.code(), code) << error.what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks: " << part;
  }
}

TEST(DecodeRefusals, JobsThatContradictThemselves) {
  const auto self = make_self_transport();
  const DecodeJob good{small_spec(), {4, 2, 1000}, 64};
  const auto refused = [&](const std::function<void(DecodeJob&)>& spoil, const std::vector<std::string>& parts) {
    DecodeJob job = good;
    spoil(job);
    expect_message(error_of([&] { Decode(job, *self, on_cpu()); }), ErrorCode::kUsage, parts);
  };
  Decode(good, *self, on_cpu());
  for (const std::int64_t page : {-1, 1, 8, 48, 100, 512}) {
    refused([&](DecodeJob& job) { job.page_size = page; },
            {fmt::format("pages of {} tokens", page), "16, 32, 64, 128"});
  }
  for (const int rows : {0, -1, 17}) {
    refused([&](DecodeJob& job) { job.limits.rows = rows; }, {fmt::format("{} rows", rows), "1 to 16"});
  }
  for (const std::int64_t keys : {std::int64_t{0}, std::int64_t{1} << 31}) {
    refused([&](DecodeJob& job) { job.limits.keys = keys; }, {fmt::format("{} keys", keys)});
  }
  refused([](DecodeJob& job) { job.limits.sequences = 0; }, {"0 sequences"});
  refused([](DecodeJob& job) { job.pages = -1; }, {"-1 pages"});
  refused([](DecodeJob& job) { job.spec.kv_heads = 3; }, {"not a multiple"});
  const auto rope_of = [&](Dtype dtype, int head_dim, const std::vector<std::int64_t>& sections = {}) {
    RopeParameters parameters;
    parameters.mrope_section = sections;
    return make_rope_spec(parameters, dtype, head_dim, RopePairs::kHalfSplit, false);
  };
  const AttentionSpec& spec = good.spec;
  refused([&](DecodeJob& job) { job.rope = rope_of(spec.dtype, 2 * spec.head_dim); }, {"RoPE of", "q and k are"});
  const Dtype other = spec.dtype == Dtype::kF32 ? Dtype::kBf16 : Dtype::kF32;
  refused([&](DecodeJob& job) { job.rope = rope_of(other, spec.head_dim); }, {"RoPE of", "q and k are"});
  refused(
      [&](DecodeJob& job) {
        job.rope = rope_of(spec.dtype, spec.head_dim, {2, 2, spec.head_dim / 2 - 4});
      },
      {"3 axes of positions", "mrope_section"});
  refused(
      [&](DecodeJob& job) {
        job.rope = rope_of(spec.dtype, spec.head_dim);
        job.values_in_keys = true;
      },
      {"keys that have the values in them"});
  DecodeJob unusual = good;
  unusual.spec.head_dim = 260;
  EXPECT_EQ(error_of([&] { Decode(unusual, *self, on_cpu()); }).code(), ErrorCode::kUnsupported);
}

TEST(DecodeRefusals, TooSmallABudget) {
  const auto self = make_self_transport();
  const DecodeJob job{small_spec(), {4, 2, 1000}, 64};
  DecodeOptions options = on_cpu();
  const std::size_t needed = Decode(job, *self, options).memory().total();
  options.memory_budget = needed;
  Decode(job, *self, options);
  options.memory_budget = needed - 1;
  expect_message(error_of([&] { Decode(job, *self, options); }), ErrorCode::kMemory,
                 {std::to_string(needed - 1), std::to_string(needed)});
}

TEST(DecodeRefusals, StepsThatDontFit) {
  const auto self = make_self_transport();
  const Job job = small_job({100, 50, 200}, 2);
  const CacheLayout layout{.page_size = 16};
  Decode decode(decode_job(job, 2, layout), *self, on_cpu());
  DecodeRank rank(decode, job, random_tensors(job, 1), layout);
  rank.fill({100, 50, 200});
  rank.load({100, 50, 200}, 2);
  using Spoil = std::function<void(DecodeInputs&, DecodeOutputs&)>;
  const float sink = 0.0F;
  const std::pair<Spoil, std::string> cases[] = {
      {[](DecodeInputs& in, DecodeOutputs&) { in.rows = 3; }, "6 query rows, 3 a sequence"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.rows = 0; }, "0 a sequence"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.rows = 1; }, "up to 3 sequences"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.q.heads = 1; }, "q is fp32 [6, 1, 16]"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.q.dtype = Dtype::kBf16; }, "q is bf16"},
      {[](DecodeInputs&, DecodeOutputs& out) { out.out.tokens = 5; }, "out is fp32 [5, 2, 16]"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.k_new = {}; }, "one of k_new and v_new"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.k_new.tokens = 3; }, "k_new is fp32 [3, 1, 16]"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.v_new.dim = 8; }, "v_new is fp32 [6, 1, 8]"},
      {[&](DecodeInputs& in, DecodeOutputs&) { in.sinks = &sink; }, "sinks are given"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.k.dim = 8; }, "the cache of k"},
      {[](DecodeInputs& in, DecodeOutputs&) { --in.v.pages; }, "k has"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.k.page_size = in.v.page_size = 32; }, "pages of 32 tokens"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.block_table = {}; }, "a block table is missing"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.table_pages = in.block_table.stride + 1; }, "a block table of"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.lengths_before = nullptr; }, "the lengths are missing"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.lengths = in.lengths_before; },
       "lengths and lengths_before are given"},
      {[](DecodeInputs& in, DecodeOutputs&) { in.lengths = std::exchange(in.lengths_before, nullptr); },
       "update_lengths is set beside lengths"},
  };
  for (const auto& [spoil, part] : cases) {
    DecodeInputs inputs = rank.inputs(true, true);
    DecodeOutputs outputs = rank.outputs();
    spoil(inputs, outputs);
    expect_message(error_of([&] { decode.enqueue(inputs, outputs); }), ErrorCode::kUsage, {part});
  }
  EXPECT_EQ(rank.lengths_now(), (std::vector<std::int32_t>{100, 50, 200}));
  EXPECT_TRUE(rank.untouched());
}

// Something that leads outside of a cache, and what is said about it.
struct BadTable {
  const char* name;
  std::int64_t page_size;  // 0: dense
  std::function<void(DecodeRank&)> spoil;
  std::vector<std::string> message;
};

// Bad tables of sequences of 300, 200, 500 and 90 keys in pages of 16, all on the rank with KV split 0.
std::vector<BadTable> bad_tables() {
  const auto entry = [](DecodeRank& rank, std::size_t sequence, std::size_t place) -> std::int32_t& {
    return rank.table[sequence * static_cast<std::size_t>(rank.table_pages) + place];
  };
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  return {
      {"page behind the pool",
       16,
       [=](DecodeRank& rank) { entry(rank, 2, 12) = static_cast<std::int32_t>(rank.pages()); },
       {"sequence 2", "at index 12", "the pool has"}},
      {"negative page", 16, [=](DecodeRank& rank) { entry(rank, 3, 0) = -1; }, {"sequence 3 has page -1 at index 0"}},
      {"largest page",
       16,
       [=](DecodeRank& rank) { entry(rank, 0, 18) = kMost; },
       {"sequence 0 has page 2147483647 at index 18"}},
      {"two bad sequences",
       16,
       [=](DecodeRank& rank) { entry(rank, 3, 1) = entry(rank, 1, 4) = -7; },
       {"sequence 1 has page -7 at index 4"}},
      {"length beyond the limit",
       16,
       [](DecodeRank& rank) { rank.lengths[1] = 500; },
       {"sequence 1 has 501 keys", "a step may have at most 500"}},
      {"length beyond the table",
       16,
       [](DecodeRank& rank) { rank.table_pages -= 3; },
       {"sequence 2 has 500 keys", "covers 480 tokens"}},
      {"negative length", 16, [](DecodeRank& rank) { rank.lengths[0] = -2; }, {"sequence 0 has -2 keys", "negative"}},
      {"negative until it grows",
       16,
       [](DecodeRank& rank) { rank.lengths[0] = -1; },
       {"sequence 0 has -1 keys", "negative"}},
      {"largest length", 16, [](DecodeRank& rank) { rank.lengths[3] = kMost; }, {"sequence 3 has 2147483647 keys"}},
      {"dense, length beyond the limit",
       0,
       [](DecodeRank& rank) { rank.lengths[2] = 505; },
       {"sequence 2 has 506 keys"}},
  };
}

class BadTables : public ::testing::TestWithParam<int> {};

TEST_P(BadTables, AreRefusedBeforeAnythingIsChanged) {
  for (const BadTable& bad : bad_tables()) {
    SCOPED_TRACE(bad.name);
    const Job job = small_job({300, 200, 500, 90}, 1);
    const JobTensors tensors = random_tensors(job, 3);
    const CacheLayout layout{.page_size = bad.page_size};
    run_threads_world(GetParam(), {}, [&](Transport& world) {
      Decode decode(decode_job(job, 1, layout), world, on_cpu());
      DecodeRank rank(decode, job, tensors, layout);
      const std::int64_t stride = rank.table_pages;
      rank.fill({299, 199, 499, 89});
      rank.load({300, 200, 500, 90}, 1);
      if (world.rank() == 0) bad.spoil(rank);  // on one rank only
      rank.upload();
      DecodeInputs inputs = rank.inputs(true, true);
      if (inputs.block_table.pages != nullptr) inputs.block_table.stride = stride;
      const std::vector<std::byte> cache = rank.cache_bytes();
      // All ranks hear of it.
      expect_message(error_of([&] { decode.run(inputs, rank.outputs()); }), ErrorCode::kUsage, bad.message);
      EXPECT_EQ(rank.lengths_now(), rank.lengths);
      EXPECT_EQ(rank.cache_bytes(), cache);
      EXPECT_TRUE(rank.untouched());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, BadTables, ::testing::Values(1, 3),
                         [](const auto& test) { return std::to_string(test.param) + "_ranks"; });

// Prefixes that a step can't have, and sequences that don't have what their prefix says.
TEST(DecodeRefusals, SharedPrefixes) {
  const auto self = make_self_transport();
  const Job job = small_job({kGroup + 20, kGroup + 30, 40}, 1);
  const CacheLayout layout{.page_size = 64, .prefix_of = {0, 0, -1}, .prefix_keys = {kGroup + 9}};
  const auto expect_refusal = [&](const std::function<void(DecodeRank&)>& spoil_rank,
                                  const std::function<void(DecodeInputs&)>& spoil_inputs, const std::string& part) {
    Decode decode(decode_job(job, 1, layout), *self, on_cpu());
    DecodeRank rank(decode, job, random_tensors(job, 1), layout);
    rank.fill({kGroup + 20, kGroup + 30, 40});
    rank.load({kGroup + 20, kGroup + 30, 40}, 1);
    spoil_rank(rank);
    rank.upload();
    DecodeInputs inputs = rank.inputs(false, false);
    spoil_inputs(inputs);
    expect_message(error_of([&] { decode.run(inputs, rank.outputs()); }), ErrorCode::kUsage, {part});
    EXPECT_TRUE(rank.untouched());
  };
  const auto nothing = [](auto&) {};
  const auto ranks = [&](const std::function<void(DecodeRank&)>& spoil, const std::string& part) {
    expect_refusal(spoil, nothing, part);
  };
  const auto inputs = [&](const std::function<void(DecodeInputs&)>& spoil, const std::string& part) {
    expect_refusal(nothing, spoil, part);
  };
  ranks([](DecodeRank& rank) { rank.prefix_of[1] = 1; }, "sequence 1 shares prefix 1 (the step has 1");
  ranks([](DecodeRank& rank) { rank.prefix_of[2] = -2; }, "sequence 2 shares prefix -2");
  ranks([](DecodeRank& rank) { rank.prefix_of[2] = 0; },
        "sequence 2 shares prefix 0 of 8201 keys (the sequence has 40)");
  ranks([](DecodeRank& rank) { rank.prefix_keys[0] = -1; }, "sequence 0 shares prefix 0 of -1 keys");
  ranks([](DecodeRank& rank) { rank.table[static_cast<std::size_t>(rank.table_pages) + 127] = 0; },
        "at index 127 of its block table (the first sequence with the same prefix has page");
  inputs([](DecodeInputs& in) { in.prefixes.count = 2; },
         "a step has 2 shared prefixes (steps were prepared for up to 1)");
  inputs([](DecodeInputs& in) { in.prefixes.keys = nullptr; }, "shared prefixes are not complete");
  DecodeJob dense{small_spec(), {4, 2, 1000, 0, 2}, 0};
  expect_message(error_of([&] { Decode(dense, *self, on_cpu()); }), ErrorCode::kUsage,
                 {"dense cache", "share prefixes"});
  dense.page_size = 64;
  dense.limits.prefixes = 5;
  expect_message(error_of([&] { Decode(dense, *self, on_cpu()); }), ErrorCode::kUsage, {"5 shared prefixes"});
}

// A rank's cache is too short for the keys of one sequence. Only the rank's own share counts.
TEST(DecodeRefusals, ADenseCacheThatIsTooShort) {
  const Job job = small_job({2 * kGroup + 10, 5}, 1);
  run_threads_world(2, {}, [&](Transport& world) {
    Decode decode(decode_job(job, 1, {}), world, on_cpu());
    DecodeRank rank(decode, job, random_tensors(job, 3), {});
    rank.fill({2 * kGroup + 10, 5});
    rank.load({2 * kGroup + 10, 5}, 1);
    DecodeInputs inputs = rank.inputs(false, false);
    inputs.k.page_size = inputs.v.page_size = kGroup + 9;  // rank 0 has kGroup + 10 of the first one's, rank 1 kGroup
    expect_message(error_of([&] { decode.run(inputs, rank.outputs()); }), ErrorCode::kUsage,
                   {"sequence 0 has 8202 keys in this cache", "holds 8201"});
  });
}

TEST(DecodeRefusals, RanksThatDiffer) {
  run_threads_world(3, {}, [](Transport& world) {
    const DecodeJob job{small_spec(), {4, 2, 1000}, world.rank() == 2 ? 32 : 64};
    expect_message(error_of([&] { Decode(job, world, on_cpu()); }), ErrorCode::kUnsupported,
                   {"rank 2 and rank 0 differ in job"});
  });
  const Job job = small_job({100, 50}, 1);
  run_threads_world(2, {}, [&](Transport& world) {
    const std::int64_t page_size = world.rank() == 0 ? 16 : 32;
    Decode first(decode_job(job, 1, {.page_size = 16}), world, on_cpu());
    Decode second(decode_job(job, 1, {.page_size = 32}), world, on_cpu());
    Decode& mine = world.rank() == 0 ? first : second;
    DecodeRank rank(mine, job, random_tensors(job, 4), {.page_size = page_size});
    rank.fill({100, 50});
    rank.load({100, 50}, 1);
    expect_message(error_of([&] { mine.run(rank.inputs(false, false), rank.outputs()); }), ErrorCode::kUsage,
                   {"rank 1 and rank 0 run different jobs", "pages of 16 tokens", "pages of 32 tokens"});
  });
}

// What one rank needs, and what five need, by hand.
TEST(DecodeMemory, IsWhatTheLimitsNeed) {
  DecodeJob job{make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0}), {7, 3, 4 * kGroup + 1}, 64};
  const auto self = make_self_transport();
  const Decode alone(job, *self, on_cpu());
  const DecodeMemory one = alone.memory();
  EXPECT_EQ(one.cache, 7U * (4 * 128 + 1) * 64 * (2 * 2 * 32 * 2));
  EXPECT_EQ(one.tables, 7U * (4 * 128 + 1) * 4 + 7 * 4);
  EXPECT_EQ(one.rows, 7U * 3 * (4 * 32 * 2 + 2 * 2 * 32 * 2 + 4 * 32 * 2 + 4 * 4));
  EXPECT_EQ(one.partials, 0U);
  run_threads_world(2, {}, [&](Transport& world) {
    const Decode decode(job, world, on_cpu());
    const DecodeMemory two = decode.memory();
    EXPECT_EQ(two.cache, 7U * (2 * 128 + 1) * 64 * (2 * 2 * 32 * 2));
    // Partials of 36 floats of 3 KV splits: those of all rows, and those that the other rank sends of 4 sequences.
    EXPECT_EQ(two.partials, (7U + 4U) * 3 * 3 * 4 * 36 * 4);
    EXPECT_EQ(two.scratch, one.scratch);
  });
  job.rope = make_rope_spec({}, Dtype::kBf16, 32, RopePairs::kHalfSplit, false);
  EXPECT_EQ(Decode(job, *self, on_cpu()).memory().scratch, one.scratch + 16 * 8 + 7U * 3 * 4 * 32 * 2);
  EXPECT_NE(describe(job).find(", RoPE of bf16, head_dim 32"), std::string::npos) << describe(job);
  job.rope.reset();
  job.pages = 10;
  EXPECT_EQ(Decode(job, *self, on_cpu()).memory().cache, 10U * 64 * (2 * 2 * 32 * 2));
  job.pages = job.page_size = 0;
  EXPECT_EQ(Decode(job, *self, on_cpu()).memory().cache, 7U * (4 * kGroup + 1) * (2 * 2 * 32 * 2));
  EXPECT_EQ(describe(job),
            "decode, bf16, heads 4/2 (GQA 2:1), head_dim 32, causal; 7 sequences, up to 32769 keys and 3 rows each, a "
            "dense cache");
}

}  // namespace
}  // namespace ringattn::testing
