// SPDX-License-Identifier: Apache-2.0
// A rank whose memory runs out in a step before its kernel runs, at each of its allocations in turn: nothing has been
// done yet, or the transport is given up before the exception goes on. All other ranks end at once, and know whose
// failure it was.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/rank_liveness.hpp"
#include "comm/threads.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "ops/decode/decode.hpp"
#include "ops/mla/mla_decode.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/decode_rank.hpp"
#include "tests/support/forwarding_transport.hpp"
#include "tests/support/mla_rank.hpp"
#include "tests/support/scarce_memory.hpp"

namespace ringattn::testing {
namespace {

constexpr int kWorld = 3;
constexpr int kFailing = 1;                // the rank without memory
constexpr double kTimeLimit = 600.0;       // of waits for peers
constexpr double kSoon = 60.0;             // far below that, and far above what a step takes on a busy machine
constexpr std::int64_t kMostTries = 1000;  // allocations of a step

using Clock = std::chrono::steady_clock;

DecodeOptions on_cpu() {
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  options.timeout_seconds = kTimeLimit;
  return options;
}

// Notes whether it was given up.
class NotedTransport final : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  bool abandoned() const { return abandoned_; }
  void abandon() noexcept override {
    abandoned_ = true;
    ForwardingTransport::abandon();
  }

 private:
  bool abandoned_ = false;
};

// Notes a failure. A kernel's heartbeat comes from threads that may not throw, just before it computes: memory is
// enough then.
class NotedLiveness final : public RankLiveness {
 public:
  using RankLiveness::RankLiveness;

  bool failed() const { return failed_; }
  void on_failure(const Error& error) noexcept override { failed_ = error.code() == ErrorCode::kMemory; }

 private:
  void on_heartbeat() override { ScarceMemory::end(); }

  bool failed_ = false;
};

// A rank's next step, and whether anything of it has been done: what it does first is seen by that.
struct NextStep {
  std::function<void()> enqueue;
  std::function<bool()> begun;
};

enum class Outcome { kWhole, kRefusedBefore, kGivenUp };

// The step of the failing rank, whose allocation `index` fails.
Outcome fail_step(const NextStep& step, const NotedTransport& transport, const NotedLiveness& liveness,
                  std::int64_t index) {
  try {
    const ScarceMemory scarce(index);
    step.enqueue();
  } catch (const std::bad_alloc&) {
    const bool begun = step.begun();
    EXPECT_EQ(transport.abandoned(), begun) << "at allocation " << index;
    EXPECT_EQ(liveness.failed(), begun) << "at allocation " << index;
    return begun ? Outcome::kGivenUp : Outcome::kRefusedBefore;
  }
  return Outcome::kWhole;
}

// `play` makes a rank's decode over the transport, and calls the function that it is given with the rank's next step.
using Play = std::function<void(Transport&, const std::function<void(const NextStep&)>&)>;

Outcome fail_at(std::int64_t index, const Play& play) {
  Outcome outcome = Outcome::kWhole;
  const auto rank_main = [&](Transport& world) {
    NotedLiveness liveness(world.rank());
    const RankLivenessScope scope(liveness);
    NotedTransport transport(world);
    play(transport, [&](const NextStep& step) {
      if (world.rank() == kFailing) {
        outcome = fail_step(step, transport, liveness, index);
        if (outcome != Outcome::kWhole) throw std::bad_alloc();
      } else {
        step.enqueue();
      }
      world.barrier(Deadline::after(kTimeLimit));
    });
  };
  std::atomic<int> told{0};
  const auto start = Clock::now();
  try {
    run_threads_world(kWorld, {}, [&](Transport& world) {
      try {
        rank_main(world);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kMemory) << error.what();
        EXPECT_EQ(std::string(error.what()).find("rank 1 failed: can't allocate memory"), 0U) << error.what();
        ++told;
        throw;
      }
    });
  } catch (const std::bad_alloc&) {
  }
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), kSoon);
  EXPECT_EQ(told, outcome == Outcome::kWhole ? 0 : kWorld - 1) << "at allocation " << index;
  return outcome;
}

void fail_everywhere(const Play& play) {
  if (!can_make_memory_scarce()) GTEST_SKIP() << "skipped: needs an operator new that can be replaced";
  std::int64_t given_up = 0;
  for (std::int64_t index = 0; index < kMostTries; ++index) {
    const Outcome outcome = fail_at(index, play);
    if (outcome == Outcome::kWhole) {
      EXPECT_GT(given_up, 0);
      return;
    }
    if (outcome == Outcome::kGivenUp) ++given_up;
  }
  FAIL() << "a step makes more than " << kMostTries << " allocations";
}

// Ranks share out the sequences, or the K/V heads; a step chooses blocks of keys before it decodes.
TEST(DecodeFailure, WhereBlocksAreChosen) {
  for (const int heads : {1, 3}) {
    const std::vector<std::int64_t> lengths{700, 300, 500};
    Job job;
    job.spec = make_spec(Dtype::kF32, 2 * heads, heads, 16, {-1, 0});
    for (const std::int64_t length : lengths) job.batch.sequences.push_back({1, length, length - 1});
    const JobTensors tensors = random_tensors(job, 1);
    const CacheLayout layout{.page_size = 16};
    DecodeJob choosing = decode_job(job, 1, layout);
    choosing.spec.block_mask = {64, 128, heads};
    choosing.top_k_blocks = 2;
    choosing.head_parts = heads;
    fail_everywhere([&](Transport& world, const std::function<void(const NextStep&)>& go) {
      Decode decode(choosing, world, on_cpu());
      EXPECT_EQ(decode.kv_heads().count, 1);
      DecodeRank rank(decode, job, tensors, layout);
      rank.fill({699, 299, 499});
      rank.load(lengths, 1);
      go({[&] { decode.enqueue(rank.inputs(true, true), rank.outputs()); },
          [&] { return rank.lengths_now() != rank.lengths; }});
    });
  }
}

// New rows are compressed, and partial results exchanged.
TEST(DecodeFailure, WhereRowsAreCompressed) {
  constexpr std::int64_t kLength = 200;
  const RowShape shape{Dtype::kBf16, 1, 64};
  const RowFormat format = quantized_formats().front();
  const std::vector<std::int64_t> held(2, kLength);
  const std::vector<std::byte> rows = outlier_rows(shape, held, 1);
  const CompressedTensor filled =
      compress_tensor("k", format, view_of(rows, shape, 2 * kLength), held, {7, 2}, ErrorCode::kUsage);
  DecodeJob job;
  job.spec = make_spec(Dtype::kBf16, 2, 1, 64, {-1, 0});
  job.limits = {2, 1, kLength + 1};
  job.page_size = 64;
  job.format = {format, format};
  fail_everywhere([&](Transport& world, const std::function<void(const NextStep&)>& go) {
    Decode decode(job, world, on_cpu());
    const PageOrder order = shuffled_pages(std::vector<std::int64_t>(2, decode.cache_tokens(kLength + 1)), 64, 1);
    CompressedPool k(format, shape, order, 2), v(format, shape, order, 2);
    k.fill(filled, decode.partition(), decode.kv_split_keys());
    v.fill(filled, decode.partition(), decode.kv_split_keys());
    std::vector<std::int32_t> lengths(2, kLength);
    std::vector<std::byte> out(rows.size());
    DecodeInputs inputs;
    inputs.q = dense_view(static_cast<const void*>(rows.data()), Dtype::kBf16, 2, 2, 64);
    inputs.block_table = order.view();
    inputs.table_pages = order.columns;
    inputs.lengths_before = lengths.data();
    inputs.update_lengths = true;
    inputs.k_new = inputs.v_new = view_of(rows, shape, 2);
    inputs.quantized_k = k.view();
    inputs.quantized_v = v.view();
    DecodeOutputs outputs;
    outputs.out = dense_view(static_cast<void*>(out.data()), Dtype::kBf16, decode.owned(2).count, 2, 64);
    go({[&] { decode.enqueue(inputs, outputs); }, [&] { return lengths[0] != kLength; }});
  });
}

// Products come before the step in the latent, and checks allocate nothing.
TEST(DecodeFailure, WhereQueriesAreBroughtIntoTheLatent) {
  constexpr int kKeys = 20;
  MlaSpec spec;
  spec.heads = 2;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 40;
  spec.softmax_scale = default_softmax_scale(spec);
  const MlaTensors tensors = random_mla_tensors({spec, uniform_batch(1, 2, 2), MlaForm::kAbsorbed}, 1);
  const auto rows_of = [&](const std::vector<std::byte>& rows, int heads, int dim) {
    return dense_view(static_cast<const void*>(rows.data()), spec.dtype, 2, heads, dim);
  };
  fail_everywhere([&](Transport& world, const std::function<void(const NextStep&)>& go) {
    MlaDecode decode({spec, {2, 1, kKeys + 1}}, world, on_cpu());
    const int wide = spec.latent_dim + spec.rope_dim;
    std::vector<std::byte> cache(std::size_t{2} * (kKeys + 1) * static_cast<std::size_t>(wide) * 2);
    std::vector<std::int32_t> lengths(2, kKeys);
    std::vector<std::byte> out(tensors.q.size() * 2);
    MlaDecodeInputs inputs;
    inputs.q = rows_of(tensors.q, spec.heads, spec.head_dim + spec.rope_dim);
    inputs.cache = cache_view(cache.data(), spec.dtype, 2, kKeys + 1, 1, wide);
    inputs.lengths_before = lengths.data();
    inputs.update_lengths = true;
    inputs.latent = rows_of(tensors.latent, 1, spec.latent_dim);
    inputs.k_rope = rows_of(tensors.k_rope, 1, spec.rope_dim);
    inputs.w_uk = matrices_of(tensors.w_uk, spec, spec.head_dim);
    inputs.w_uv = matrices_of(tensors.w_uv, spec, spec.head_dim_v);
    MlaOutputs outputs;
    outputs.out = dense_view(static_cast<void*>(out.data()), spec.dtype, decode.in_latent().owned(2).count, spec.heads,
                             spec.head_dim_v);
    go({[&] { decode.enqueue(inputs, outputs); }, [] { return true; }});
  });
}

}  // namespace
}  // namespace ringattn::testing
