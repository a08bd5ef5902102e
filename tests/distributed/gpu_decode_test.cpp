// SPDX-License-Identifier: Apache-2.0
// Decoding on GPUs: steps captured in a graph, whose launches grow the sequences by themselves; lengths and tables that
// are checked on the device; two ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/decode_rank.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/two_ranks.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kGroup = 8192;
constexpr std::int64_t kSteps = 300;

AttentionSpec spec_of(const Mask& mask) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 128, mask);
  spec.sinks = true;
  return spec;
}

// Sequences of these lengths, whose tokens are queries: the last `queries`, or all.
Job job_of(const AttentionSpec& spec, const std::vector<std::int64_t>& lengths, std::int64_t queries = 0) {
  Job job{spec, {}};
  for (const std::int64_t length : lengths) {
    const std::int64_t count = queries > 0 ? queries : length;
    job.batch.sequences.push_back({count, length, length - count});
  }
  return job;
}

DecodeOptions decode_on_gpu() {
  DecodeOptions options;
  options.kernel.backend = "cuda";
  return options;
}

JobResult attended(const Job& job, const JobTensors& tensors, int device = 0) {
  Options options;
  options.kernel.backend = "cuda";
  JobResult result = poisoned_result(job, 1);
  run_rank(job, options, tensors, *make_self_transport(MemoryKind::kDevice, device), result);
  return result;
}

std::vector<std::int64_t> plus(std::vector<std::int64_t> lengths, std::int64_t more) {
  for (std::int64_t& length : lengths) length += more;
  return lengths;
}

class GpuDecode : public ::testing::Test {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
    try {
      choose_kernel(DecodeSpec{spec_of({-1, 0})}, decode_on_gpu().kernel);
    } catch (const Error& error) {
      GTEST_SKIP() << "needs a GPU that decodes: " << error.what();
    }
  }
};

// One captured step, launched again and again: each launch grows the lengths, appends the rows and decodes.
TEST_F(GpuDecode, EachLaunchOfAGraphGrowsTheSequences) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  for (const Mask& mask : {Mask{-1, 0}, Mask{200, 0}}) {
    const Job job = job_of(spec_of(mask), {kGroup + 150, kSteps, 2 * kSteps});
    const JobTensors tensors = random_tensors(job, 1);
    const JobResult reference = attended(job, tensors);
    for (const std::int64_t page : {0, 16, 128}) {
      const CacheLayout layout{.page_size = page, .head_major = page == 128};
      Decode decode(decode_job(job, 1, layout), *self, decode_on_gpu());
      DecodeRank rank(decode, job, tensors, layout);
      const std::vector<std::int64_t> start = plus(job.batch.k_lengths(), -kSteps);
      rank.fill(start);
      rank.load(plus(start, 1), 1);
      const Graph graph(rank.stream(), [&] { decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream()); });
      EXPECT_EQ(rank.lengths_now(), rank.lengths) << "a capture does nothing";
      for (std::int64_t step = 1; step <= kSteps; ++step) {
        rank.load(plus(start, step), 1);
        graph.launch();
        ASSERT_EQ(rank.difference(reference), "") << "step " << step << ", page " << page;
      }
      decode.wait();  // no check has found anything
    }
  }
}

// A captured step that rotates its rows has the bits of steps over rotated ones.
TEST_F(GpuDecode, RotatesRowsInAGraph) {
  constexpr std::int64_t kFew = 20;
  const auto self = make_self_transport(MemoryKind::kDevice);
  const Job job = job_of(spec_of({-1, 0}), {kGroup + 10, kFew, 300}, kFew);
  for (const RopePairs pairs : {RopePairs::kHalfSplit, RopePairs::kInterleaved}) {
    const RopeSpec rope = make_rope_spec({}, job.spec.dtype, job.spec.head_dim, pairs, false);
    const JobTensors raw = random_tensors(job, 4), rotated = rotated_tensors(job, raw, rope);
    const JobResult reference = attended(job, rotated);
    for (const std::int64_t page : {0, 64}) {
      const CacheLayout layout{.page_size = page};
      DecodeJob steps = decode_job(job, 1, layout);
      steps.rope = rope;
      Decode decode(steps, *self, decode_on_gpu());
      DecodeRank rank(decode, job, rotated, layout);
      const std::vector<std::int64_t> start = plus(job.batch.k_lengths(), -kFew);
      rank.fill(start);
      rank.use(raw);
      rank.load(plus(start, 1), 1);
      const Graph graph(rank.stream(), [&] { decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream()); });
      for (std::int64_t step = 1; step <= kFew; ++step) {
        rank.load(plus(start, step), 1);
        graph.launch();
        ASSERT_EQ(rank.difference(reference), "") << "step " << step << ", page " << page;
      }
      decode.wait();
    }
  }
}

// All steps in one graph, launched once: the host does nothing between them.
TEST_F(GpuDecode, ThreeHundredStepsInOneGraph) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  const Job job = job_of(spec_of({-1, 0}), {kGroup + 150, kSteps, 2 * kSteps});
  const JobTensors tensors = random_tensors(job, 2);
  const JobResult reference = attended(job, tensors);
  const CacheLayout layout{.page_size = 64};
  Decode decode(decode_job(job, 1, layout), *self, decode_on_gpu());
  DecodeRank rank(decode, job, tensors, layout);
  Backend& backend = decode.backend();
  const Stream stream = rank.stream();
  const std::vector<std::int64_t> start = plus(job.batch.k_lengths(), -kSteps);
  rank.fill(start);
  rank.load(plus(start, 1), 1);
  const DecodeInputs inputs = rank.inputs(true, true);
  const DecodeOutputs outputs = rank.outputs();
  const auto bytes_of = [](const TensorView& view) { return view.tokens * view.token_stride * 2; };
  const std::int64_t lse_bytes = outputs.out.tokens * job.spec.heads * 4;
  const auto room = [&](std::int64_t bytes) { return backend.allocate(static_cast<std::size_t>(kSteps * bytes)); };
  const Buffer q = room(bytes_of(inputs.q)), k = room(bytes_of(inputs.k_new)), v = room(bytes_of(inputs.v_new));
  const Buffer out = room(bytes_of(outputs.out)), lse = room(lse_bytes);
  const auto copy = [&](void* to, const void* from, std::int64_t bytes) {
    backend.copy_rows(to, bytes, from, bytes, bytes, 1, stream);
    backend.synchronize(stream, Deadline::after(60.0), {});
  };
  for (std::int64_t step = 0; step < kSteps; ++step) {
    rank.load(plus(start, step + 1), 1);
    copy(q.data() + step * bytes_of(inputs.q), inputs.q.data, bytes_of(inputs.q));
    copy(k.data() + step * bytes_of(inputs.k_new), inputs.k_new.data, bytes_of(inputs.k_new));
    copy(v.data() + step * bytes_of(inputs.v_new), inputs.v_new.data, bytes_of(inputs.v_new));
  }
  const Graph graph(stream, [&] {
    for (std::int64_t step = 0; step < kSteps; ++step) {
      DecodeInputs in = inputs;
      DecodeOutputs to = outputs;
      in.q.data = q.data() + step * bytes_of(inputs.q);
      in.k_new.data = k.data() + step * bytes_of(inputs.k_new);
      in.v_new.data = v.data() + step * bytes_of(inputs.v_new);
      to.out.data = out.data() + step * bytes_of(outputs.out);
      to.lse.data = reinterpret_cast<float*>(lse.data() + step * lse_bytes);
      decode.enqueue(in, to, stream);
    }
  });
  graph.launch();
  for (std::int64_t step = 0; step < kSteps; ++step) {
    rank.load(plus(start, step + 1), 1);
    copy(outputs.out.data, out.data() + step * bytes_of(outputs.out), bytes_of(outputs.out));
    copy(outputs.lse.data, lse.data() + step * lse_bytes, lse_bytes);
    ASSERT_EQ(rank.difference(reference), "") << "step " << step;
  }
  decode.wait();
}

// What is wrong with sequence 2 of sequences of 300, 200, 500 and 90 keys in pages of 16, before the last key of each.
struct BadTable {
  const char* name;
  std::function<void(DecodeRank&)> spoil;
  std::string message;
};

std::vector<BadTable> bad_tables() {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const auto entry = [](DecodeRank& rank, std::size_t place) -> std::int32_t& {
    return rank.table[2 * static_cast<std::size_t>(rank.table_pages) + place];
  };
  return {
      {"the page behind the pool", [=](DecodeRank& rank) { entry(rank, 12) = static_cast<std::int32_t>(rank.pages()); },
       "at index 12 of its block table"},
      {"a negative page", [=](DecodeRank& rank) { entry(rank, 0) = -1; }, "sequence 2 has page -1 at index 0"},
      {"the page of the new row", [=](DecodeRank& rank) { entry(rank, 31) = kMost; },
       "sequence 2 has page 2147483647 at index 31"},
      {"a length beyond the limit", [](DecodeRank& rank) { rank.lengths[2] = 100000; }, "sequence 2 has 100001 keys"},
      {"a negative length", [](DecodeRank& rank) { rank.lengths[2] = -9; }, "sequence 2 has -9 keys"},
      {"the largest length", [](DecodeRank& rank) { rank.lengths[2] = kMost; }, "sequence 2 has 2147483647 keys"},
  };
}

TEST_F(GpuDecode, ChecksOnTheDevice) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  AttentionSpec spec = spec_of({-1, 0});
  spec.sinks = false;
  const Job job = job_of(spec, {300, 200, 500, 90}, 1);
  const JobTensors tensors = random_tensors(job, 3);
  const JobResult good = attended(job, tensors);
  const CacheLayout layout{.page_size = 16};
  for (const BadTable& bad : bad_tables()) {
    for (const bool captured : {false, true}) {
      SCOPED_TRACE(std::string(bad.name) + (captured ? ", captured" : ""));
      Decode decode(decode_job(job, 1, layout), *self, decode_on_gpu());
      DecodeRank rank(decode, job, tensors, layout);
      rank.fill({300, 200, 500, 90});
      const std::vector<std::byte> whole = rank.cache_bytes();
      rank.fill({299, 199, 499, 89});
      const std::vector<std::byte> before = rank.cache_bytes();
      rank.load({300, 200, 500, 90}, 1);
      bad.spoil(rank);
      rank.upload();
      const auto step = [&] { decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream()); };
      std::optional<Graph> graph;
      if (captured) {
        graph.emplace(rank.stream(), step);
        graph->launch();
        check_cuda(cudaStreamSynchronize(cuda_stream(rank.stream())), "cudaStreamSynchronize");
      } else {
        step();
      }
      const Error error = error_of([&] { decode.wait(); });
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_NE(std::string(error.what()).find(bad.message), std::string::npos) << error.what();
      decode.wait();  // it has been said
      // Its rows are those of a sequence without keys, and the others' are theirs.
      EXPECT_TRUE(rank.is_empty(2));
      EXPECT_EQ(rank.difference(good), "sequence 2, position 499 differs; ");
      // The rows of three sequences have joined the cache, and nothing else has changed.
      const std::vector<std::byte> after = rank.cache_bytes();
      std::int64_t changed = 0;
      std::int64_t missing = 0;
      for (std::size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(after[i] == before[i] || after[i] == whole[i]);
        changed += after[i] != before[i] ? 1 : 0;
        missing += after[i] != whole[i] ? 1 : 0;
      }
      EXPECT_GT(changed, missing);
      EXPECT_GT(missing, 0);
      // The same step of good tables.
      DecodeRank again(decode, job, tensors, layout);
      again.fill({299, 199, 499, 89});
      again.load({300, 200, 500, 90}, 1);
      decode.run(again.inputs(true, true), again.outputs(), again.stream());
      EXPECT_EQ(again.difference(good), "");
    }
  }
}

TEST_F(GpuDecode, HostCopiesAreCheckedAtOnce) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  const Job job = job_of(spec_of({-1, 0}), {300, 200}, 1);
  const JobTensors tensors = random_tensors(job, 4);
  const CacheLayout layout{.page_size = 16};
  Decode decode(decode_job(job, 1, layout), *self, decode_on_gpu());
  DecodeRank rank(decode, job, tensors, layout);
  rank.fill({300, 200});
  rank.load({300, 200}, 1);
  DecodeInputs inputs = rank.inputs(false, false);
  std::vector<std::int32_t> table = rank.table;
  inputs.host_lengths = rank.lengths.data();
  EXPECT_NE(
      std::string(error_of([&] { decode.enqueue(inputs, rank.outputs(), rank.stream()); }).what()).find("not complete"),
      std::string::npos);
  inputs.host_table = {table.data(), rank.table_pages};
  decode.run(inputs, rank.outputs(), rank.stream());
  EXPECT_EQ(rank.difference(attended(job, tensors)), "");
  Error refused(ErrorCode::kInternal, "");
  const Graph graph(rank.stream(), [&] {
    refused = error_of([&] { decode.enqueue(inputs, rank.outputs(), rank.stream()); });
    decode.enqueue(rank.inputs(false, false), rank.outputs(), rank.stream());  // the capture is still whole
  });
  EXPECT_EQ(refused.code(), ErrorCode::kUsage) << refused.what();
  table[3] = -5;
  const Error error = error_of([&] { decode.enqueue(inputs, rank.outputs(), rank.stream()); });
  EXPECT_NE(std::string(error.what()).find("sequence 0 has page -5 at index 3"), std::string::npos) << error.what();
  decode.wait();
  EXPECT_TRUE(rank.untouched());
}

// Two sequences share a KV split and tiles of the next one while they grow; then the table of one says otherwise.
TEST_F(GpuDecode, SharedPrefixes) {
  constexpr std::int64_t kFew = 20;
  constexpr std::int64_t kShared = kGroup + 272;
  const auto self = make_self_transport(MemoryKind::kDevice);
  AttentionSpec spec = spec_of({-1, 0});
  spec.sinks = false;
  const Job job = job_of(spec, {kGroup + 346, 70, kGroup + 316});
  JobTensors tensors = random_tensors(job, 6);
  const std::vector<std::int64_t> cu = job.batch.cu_k();
  for (std::vector<std::byte>* rows : {&tensors.k, &tensors.v}) {
    const std::int64_t token = static_cast<std::int64_t>(rows->size()) / job.batch.k_tokens();
    std::copy_n(rows->begin(), kShared * token, rows->begin() + cu[2] * token);
  }
  const JobResult reference = attended(job, tensors);
  const CacheLayout layout{.page_size = 16, .prefix_of = {0, -1, 0}, .prefix_keys = {kShared}};
  Decode decode(decode_job(job, 1, layout), *self, decode_on_gpu());
  DecodeRank rank(decode, job, tensors, layout);
  const std::vector<std::int64_t> start = plus(job.batch.k_lengths(), -kFew);
  rank.fill(start);
  rank.load(plus(start, 1), 1);
  const Graph graph(rank.stream(), [&] { decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream()); });
  for (std::int64_t step = 1; step <= kFew; ++step) {
    rank.load(plus(start, step), 1);
    graph.launch();
    ASSERT_EQ(rank.difference(reference), "") << "step " << step;
  }
  decode.wait();  // no check has found anything
  rank.fill(job.batch.k_lengths());
  rank.table[static_cast<std::size_t>(2 * rank.table_pages + kGroup / 16 - 1)] = rank.table[0];
  rank.upload();
  decode.enqueue(rank.inputs(false, false), rank.outputs(), rank.stream());
  const Error error = error_of([&] { decode.wait(); });
  EXPECT_EQ(error.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(error.what()).find("at index 511 of its block table (the first sequence with the same prefix"),
            std::string::npos)
      << error.what();
  EXPECT_TRUE(rank.is_empty(2));
}

// Two ranks, of which one has the prefix's incomplete KV split.
TEST_F(GpuDecode, SharedPrefixesOfTwoRanks) {
  AttentionSpec spec = spec_of({-1, 0});
  for (const std::int64_t keys : {kGroup + 640, std::int64_t{640}}) {
    const Job job = job_of(spec, {keys + 300, 2 * kGroup + 20, keys + 17, keys + 3}, 3);
    JobTensors tensors = random_tensors(job, 7);
    const std::vector<std::int64_t> cu = job.batch.cu_k();
    for (std::vector<std::byte>* rows : {&tensors.k, &tensors.v}) {
      const std::int64_t token = static_cast<std::int64_t>(rows->size()) / job.batch.k_tokens();
      for (const std::size_t s : {1U, 2U, 3U}) std::copy_n(rows->begin(), keys * token, rows->begin() + cu[s] * token);
    }
    const CacheLayout layout{
        .page_size = 64, .prefix_of = {0, 0, 0, 0}, .prefix_keys = {static_cast<std::int32_t>(keys)}};
    in_two_ranks("p2p", [&](Transport& world) {
      const JobResult reference = attended(job, tensors, world.device());
      Decode decode(decode_job(job, 3, layout), world, decode_on_gpu());
      DecodeRank rank(decode, job, tensors, layout);
      rank.fill(plus(job.batch.k_lengths(), -3));
      rank.load(job.batch.k_lengths(), 3);
      decode.run(rank.inputs(true, true), rank.outputs(), rank.stream());
      EXPECT_EQ(rank.difference(reference), "") << keys << ", rank " << world.rank();
      world.barrier(Deadline::after(60.0));
    });
  }
}

void expect_growth(Transport& world, const std::vector<std::int64_t>& final_lengths, std::int64_t page,
                   bool host_copies) {
  constexpr std::int64_t kFew = 40;
  const Job job = job_of(spec_of({-1, 0}), final_lengths);
  const JobTensors tensors = random_tensors(job, 5);
  const JobResult reference = attended(job, tensors, world.device());
  const CacheLayout layout{.page_size = page};
  Decode decode(decode_job(job, 1, layout), world, decode_on_gpu());
  DecodeRank rank(decode, job, tensors, layout);
  const std::vector<std::int64_t> start = plus(job.batch.k_lengths(), -kFew);
  rank.fill(start);
  for (std::int64_t step = 1; step <= kFew; ++step) {
    const std::vector<std::int64_t> lengths = plus(start, step);
    rank.load(lengths, 1);
    DecodeInputs inputs = rank.inputs(true, true);
    const std::vector<std::int32_t> known(lengths.begin(), lengths.end());
    if (host_copies) {
      inputs.host_lengths = known.data();
      if (page > 0) inputs.host_table = {rank.table.data(), rank.table_pages};
    }
    decode.enqueue(inputs, rank.outputs(), rank.stream());
    decode.wait();
    EXPECT_EQ(rank.difference(reference), "") << "step " << step << ", rank " << world.rank();
  }
  world.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

void expect_growth_of_two_ranks(const char* transport) {
  for (const bool host_copies : {false, true}) {
    in_two_ranks(transport, [&](Transport& world) {
      expect_growth(world, {2 * kGroup + 20, 60, kGroup + 7}, host_copies ? 64 : 0, host_copies);
      expect_growth(world, {300, 60}, host_copies ? 64 : 0, host_copies);  // no KV split is the second rank's
    });
  }
}

TEST_F(GpuDecode, TwoRanks) { expect_growth_of_two_ranks("p2p"); }

TEST_F(GpuDecode, TwoRanksByNccl) {
  if (visible_gpus().size() < 2) GTEST_SKIP() << "needs two GPUs: NCCL takes one for each rank";
  expect_growth_of_two_ranks("nccl");
}

TEST_F(GpuDecode, AGraphOfTwoRanksIsRefused) {
  in_two_ranks("p2p", [](Transport& world) {
    const Job job = job_of(spec_of({-1, 0}), {kGroup + 20, 60}, 1);
    const JobTensors tensors = random_tensors(job, 6);
    const JobResult reference = attended(job, tensors, world.device());
    Decode decode(decode_job(job, 1, {}), world, decode_on_gpu());
    DecodeRank rank(decode, job, tensors, {});
    rank.fill(job.batch.k_lengths());
    rank.load(job.batch.k_lengths(), 1);
    Error refused(ErrorCode::kInternal, "");
    const Graph graph(rank.stream(), [&] {
      refused = error_of([&] { decode.enqueue(rank.inputs(false, false), rank.outputs(), rank.stream()); });
    });
    EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(refused.what()).find("a replay would not do"), std::string::npos) << refused.what();
    // The capture and the world are still whole.
    decode.run(rank.inputs(false, false), rank.outputs(), rank.stream());
    EXPECT_EQ(rank.difference(reference), "");
    world.barrier(Deadline::after(60.0));
  });
}

}  // namespace
}  // namespace ringattn::testing
