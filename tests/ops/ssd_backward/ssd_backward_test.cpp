// SPDX-License-Identifier: Apache-2.0
// An SsdBackward on 1 to 5 ranks gives the bits of the kernel on all tokens, by memcmp of all gradients.
#include "ops/ssd_backward/ssd_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/placed_rows.hpp"
#include "tests/support/ssd_backward_data.hpp"
#include "tests/support/ssm_rank.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

// Inputs and what the kernel makes of all of them.
struct BackwardCase {
  SsdBackwardData inputs;
  SsdBackwardResult expected;
  SsdParameterGradients parameters;  // sums over segments, then over sequences

  SsdBackwardJob job() const {
    const bool states = !inputs.final_gradients.empty();
    return {{inputs.ssm.spec, inputs.ssm.lengths, states}, inputs.gradients, states};
  }
};

BackwardCase make_case(const std::vector<std::int64_t>& lengths, bool states, std::uint64_t seed) {
  const SsdBackwardSpec spec{small_ssm(2, false), Dtype::kBf16};
  BackwardCase made{random_ssd_backward(spec, lengths, states, seed), {}, {}};
  made.inputs.ssm = with_slow_decays(made.inputs.ssm);
  made.expected = run_ssd_backward(*choose_kernel(spec, {"cpu", "auto"}).row, made.inputs, {.threads = 2});
  for (int head = 0; head < 2; ++head) {
    SsdTerms total;
    std::size_t at = static_cast<std::size_t>(head);
    for (const std::int64_t length : lengths) {
      if (length == 0) continue;
      SsdTerms sum = made.expected.terms[at];
      at += 2;
      for (std::int64_t begin = kSegmentTokens; begin < length; begin += kSegmentTokens, at += 2) {
        sum.a += made.expected.terms[at].a;
        sum.d += made.expected.terms[at].d;
        sum.dt_bias += made.expected.terms[at].dt_bias;
      }
      total.a += sum.a;
      total.d += sum.d;
      total.dt_bias += sum.dt_bias;
    }
    made.parameters.da.push_back(total.a);
    made.parameters.dd.push_back(total.d);
    made.parameters.ddt_bias.push_back(total.dt_bias);
  }
  return made;
}

// One rank's rows and states, in the memory of the kernel's backend.
class BackwardRank {
 public:
  BackwardRank(SsdBackward& backward, int rank, const BackwardCase& given)
      : backward_(backward), rank_(rank), given_(given) {
    const SsmSpec& s = given.inputs.ssm.spec;
    const SsmData& ssm = given.inputs.ssm;
    inputs_.x = shard(ssm.x, s.heads, s.head_dim);
    inputs_.dt = shard(ssm.dt, s.heads, 1);
    inputs_.b = shard(ssm.b, s.groups, s.state_dim);
    inputs_.c = shard(ssm.c, s.groups, s.state_dim);
    inputs_.z = shard(ssm.z, s.heads, s.head_dim);
    inputs_.dy = shard(given.inputs.dy, s.heads, s.head_dim);
    inputs_.a = floats(ssm.a);
    inputs_.d = floats(ssm.d);
    inputs_.dt_bias = floats(ssm.dt_bias);
    if (given.job().final_gradients && !backward.beginning().empty()) {
      inputs_.initial_states = floats(states_of(ssm.initial, backward.beginning()));
      outputs_.initial_gradients = floats(states_of(ssm.initial, backward.beginning()));
    }
    if (given.job().final_gradients && !backward.ending().empty()) {
      inputs_.final_gradients = floats(states_of(given.inputs.final_gradients, backward.ending()));
    }
    outputs_.dx = result(s.heads, s.head_dim);
    outputs_.ddt = result(s.heads, 1);
    outputs_.db = result(s.groups, s.state_dim);
    outputs_.dc = result(s.groups, s.state_dim);
    outputs_.dz = result(s.heads, s.head_dim);
  }

  const SsdBackwardInputs& inputs() const { return inputs_; }
  const SsdBackwardOutputs& outputs() const { return outputs_; }

  // How many of the rank's tensors differ from those expected.
  int differences(const SsdParameterGradients& parameters) const {
    count_check();
    const SsdBackwardResult& expected = given_.expected;
    int differ = 0;
    for (const auto& [view, packed] : {std::pair{&outputs_.dx, &expected.dx},
                                       {&outputs_.ddt, &expected.ddt},
                                       {&outputs_.db, &expected.db},
                                       {&outputs_.dc, &expected.dc},
                                       {&outputs_.dz, &expected.dz}}) {
      const std::vector<std::byte> own = rows(*packed, view->heads * view->dim);
      differ += own.empty() || std::memcmp(view->data, own.data(), own.size()) == 0 ? 0 : 1;
    }
    const std::size_t state = given_.inputs.ssm.state_floats();
    for (std::size_t i = 0; outputs_.initial_gradients != nullptr && i < backward_.beginning().size(); ++i) {
      const auto sequence = static_cast<std::size_t>(backward_.beginning()[i]);
      differ += std::memcmp(outputs_.initial_gradients + i * state, &expected.initial_gradients[sequence * state],
                            state * sizeof(float)) == 0
                    ? 0
                    : 1;
    }
    const SsdParameterGradients& sums = given_.parameters;
    return differ +
           (parameters.da == sums.da && parameters.dd == sums.dd && parameters.ddt_bias == sums.ddt_bias ? 0 : 1);
  }

 private:
  std::int64_t tokens() const { return backward_.layout().tokens(rank_); }
  std::vector<std::byte> rows(const std::vector<std::byte>& packed, std::int64_t per_row) const {
    const std::int64_t bytes = per_row * static_cast<std::int64_t>(size_of(Dtype::kBf16));
    std::vector<std::byte> own(static_cast<std::size_t>(tokens() * bytes));
    backward_.layout().shard(rank_, packed.data(), own.data(), bytes);
    return own;
  }
  TensorView shard(const std::vector<std::byte>& packed, int heads, int dims) {
    const std::vector<std::byte> own = rows(packed, std::int64_t{heads} * dims);
    DeviceArray& array = arrays_.emplace_back(backward_.backend(), std::max<std::size_t>(1, own.size()));
    if (!own.empty()) array.write(own);
    return dense_view(static_cast<const void*>(array.data()), Dtype::kBf16, tokens(), heads, dims);
  }
  MutableTensorView result(int heads, int dims) {
    const auto bytes = static_cast<std::size_t>(tokens() * heads * dims) * size_of(Dtype::kBf16);
    DeviceArray& array = arrays_.emplace_back(backward_.backend(), std::max<std::size_t>(1, bytes));
    return dense_view(static_cast<void*>(array.data()), Dtype::kBf16, tokens(), heads, dims);
  }
  float* floats(const std::vector<float>& values) {
    arrays_.push_back(uploaded(backward_.backend(), values));
    return arrays_.back().floats();
  }
  static std::vector<float> states_of(const std::vector<std::vector<float>>& all,
                                      const std::vector<std::int32_t>& sequences) {
    std::vector<float> states;
    for (const std::int32_t s : sequences) {
      const std::vector<float>& state = all[static_cast<std::size_t>(s)];
      states.insert(states.end(), state.begin(), state.end());
    }
    return states;
  }

  SsdBackward& backward_;
  int rank_;
  const BackwardCase& given_;
  std::deque<DeviceArray> arrays_;
  SsdBackwardInputs inputs_;
  SsdBackwardOutputs outputs_;
};

SsmOptions on_cpu() {
  SsmOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

class SsdBackwardWorld : public ::testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  static void in_world(const std::function<void(Transport&)>& rank_main, const ThreadsDelivery& delivery = {}) {
    if (ranks() > 1) {
      run_threads_world(ranks(), delivery, rank_main);
    } else {
      rank_main(*make_self_transport());
    }
  }
  static void expect_same(const BackwardCase& given, const SsmOptions& options = on_cpu(),
                          const ThreadsDelivery& delivery = {}) {
    std::atomic<int> differ = 0;
    std::atomic<std::int64_t> tokens = 0;
    in_world(
        [&](Transport& world) {
          SsdBackward backward(given.job(), world, options);
          BackwardRank rank(backward, world.rank(), given);
          differ += rank.differences(backward.run(rank.inputs(), rank.outputs()));
          tokens += backward.layout().tokens(world.rank());
        },
        delivery);
    EXPECT_EQ(differ, 0);
    EXPECT_EQ(tokens, given.inputs.ssm.rows());
  }
};

TEST_P(SsdBackwardWorld, LongSequences) {
  static const BackwardCase given = make_case({3 * kSuper + 777, 40, kSuper + 1}, true, 1);
  expect_same(given, on_cpu(), {.shuffle_seed = 7, .max_delay = std::chrono::microseconds(300)});
}

// One rank's super-segments need not be neighbours: gradients of states then go back and forth.
TEST_P(SsdBackwardWorld, RunsOfTheCallers) {
  static const BackwardCase given = make_case({2 * kSuper + 9, kSuper + 70}, true, 2);
  SsmOptions options = on_cpu();
  options.runs.emplace(static_cast<std::size_t>(ranks()));
  int next = 0;
  for (std::size_t s = 0; s < given.inputs.ssm.lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < given.inputs.ssm.lengths[s]; begin += kSuper) {
      (*options.runs)[static_cast<std::size_t>(next++ * 3 % ranks())].push_back(
          {static_cast<std::int32_t>(s), begin, std::min(given.inputs.ssm.lengths[s], begin + kSuper)});
    }
  }
  expect_same(given, options);
}

// Their gradients pass through.
TEST_P(SsdBackwardWorld, EmptyAndShortSequences) {
  static const BackwardCase cases[] = {make_case({0, 3000, 0, 65, 1, 0}, true, 3), make_case({0, 0}, true, 4),
                                       make_case({2049, 0, 7}, false, 5)};
  for (const BackwardCase& given : cases) expect_same(given);
}

TEST_P(SsdBackwardWorld, LayersThatAreEnqueued) {
  static const BackwardCase given = make_case({kSuper + 100, 700}, true, 6);
  std::atomic<int> differ = 0;
  in_world([&](Transport& world) {
    SsdBackward backward(given.job(), world, on_cpu());
    BackwardRank first(backward, world.rank(), given);
    BackwardRank second(backward, world.rank(), given);
    backward.enqueue(first.inputs(), first.outputs());
    backward.enqueue(second.inputs(), second.outputs());
    backward.wait();
    const SsdParameterGradients parameters = backward.sum_parameters();
    differ += first.differences(parameters) + second.differences(parameters);
  });
  EXPECT_EQ(differ, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, SsdBackwardWorld, ::testing::Values(1, 2, 3, 5));

TEST(SsdBackwardJobs, AreRefusedByName) {
  const SsdBackwardJob job = make_case({9}, false, 7).job();
  const auto refusal = [&](const std::function<void(SsdBackwardJob&)>& change) {
    SsdBackwardJob changed = job;
    change(changed);
    return std::string(error_of([&] { check_ssd_backward_job(changed); }).what());
  };
  check_ssd_backward_job(job);
  EXPECT_NE(refusal([](SsdBackwardJob& of) { of.forward.spec = small_ssm(8, true); }).find("selective scans (Mamba-1)"),
            std::string::npos);
  EXPECT_NE(refusal([](SsdBackwardJob& of) { of.forward.convolution = CausalConv1dSpec{}; }).find("convolution"),
            std::string::npos);
  EXPECT_NE(refusal([](SsdBackwardJob& of) { of.forward.update = true; }).find("decode steps"), std::string::npos);
  EXPECT_NE(refusal([](SsdBackwardJob& of) { of.gradients = Dtype::kF16; }).find("gradients in fp16"),
            std::string::npos);
  const auto transport = make_self_transport();
  SsdBackward backward(job, *transport, on_cpu());
  const BackwardCase given = make_case({9}, false, 7);
  BackwardRank rank(backward, 0, given);
  SsdBackwardOutputs overlapping = rank.outputs();
  overlapping.dz = overlapping.dx;
  EXPECT_EQ(error_of([&] { backward.run(rank.inputs(), overlapping); }).code(), ErrorCode::kUsage);
  SsdBackwardInputs missing = rank.inputs();
  missing.d = nullptr;
  EXPECT_EQ(error_of([&] { backward.run(missing, rank.outputs()); }).code(), ErrorCode::kUsage);
}

// A rank that has none for a sequence's end would compute other gradients before it.
TEST(SsdBackwardJobs, RanksThatDifferInGradientsOfFinalStatesAreRefused) {
  const SsdBackwardJob with = make_case({9}, true, 8).job();
  run_threads_world(3, {}, [&](Transport& world) {
    SsdBackwardJob job = with;
    job.final_gradients = world.rank() != 1;
    const Error error = error_of([&] { SsdBackward(job, world, on_cpu()); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("rank 1 and rank 0 differ in"), std::string::npos) << error.what();
  });
}

}  // namespace
}  // namespace ringattn::testing
