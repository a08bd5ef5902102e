// SPDX-License-Identifier: Apache-2.0
// SSM layers after their convolution, and updates of one token: the same bits in every world, right by fp64, and a
// sequence's final state leads on to its next token.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "ops/conv1d/causal_conv1d.hpp"
#include "ops/ssm/ssm_shapes.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/ssm_jobs.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

SyntheticSsmInput layer(std::int64_t tokens, bool selective = false, int width = 4) {
  SyntheticSsmInput scan = small_ssm(tokens, selective);
  scan.conv_width = width;
  return scan;
}

SyntheticSsmInput step_of(std::int64_t sequences, bool selective = false, int width = 4) {
  SyntheticSsmInput step = layer(1, selective, width);
  step.update = true;
  step.batch = sequences;
  return step;
}

// The file that a job leaves on some ranks.
std::string output_of(SsmFileJob job, const TemporaryFolder& folder, int ranks) {
  job.output.path = folder.file("out" + std::to_string(ranks));
  job.output.replace = true;
  run_threads_world(ranks, {}, [&](Transport& transport) { run_ssm_job(job, transport); });
  return read_whole(job.output.path);
}

TEST(SsmLayers, HaveTheSameBytesInEveryWorld) {
  const TemporaryFolder folder;
  for (const bool selective : {false, true}) {
    SsmFileJob job;
    job.input = layer(kSuperSegmentTokens + 100, selective);
    job.numerics.final_states = true;
    const std::string one = output_of(job, folder, 1);
    EXPECT_EQ(one, output_of(job, folder, 2));
    EXPECT_EQ(one, output_of(job, folder, 3));
    const std::string halos = selective ? R"("shape":[1, 8, 3])" : R"("shape":[1, 32, 3])";
    EXPECT_NE(one.find(R"("final_conv_state":{"dtype":"BF16",)" + halos), std::string::npos) << one.substr(0, 900);
    SsmFileJob without = job;
    without.input = small_ssm(kSuperSegmentTokens + 100, selective);
    EXPECT_NE(one, output_of(without, folder, 1));
  }
}

TEST(SsmLayers, InEveryShapeHaveTheSameBits) {
  const SsmInput input = SsmInput(layer(2 * kSuperSegmentTokens + 100), {}).with_final_states();
  const std::vector<SsmShape> shapes = ssm_shapes({1, 2, 3}, input.job().lengths);
  ASSERT_TRUE(shapes.back().resumed);
  run_threads_world(3, {}, [&](Transport& transport) {
    run_ssm_shapes(input, one_thread(), shapes, transport, 1.0,
                   [](const SsmShape& shape, const SsmShapeResult& result) {
                     EXPECT_FALSE(result.difference) << shape.ranks << " ranks, resumed " << shape.resumed;
                   });
  });
}

// A rank's rows of a synthetic tensor.
std::vector<std::byte> rows_of(const SsmInput& input, SsmTensorKind which) {
  const SsmInput::RowShape shape = input.row_shape(which);
  const std::int64_t tokens = input.job().tokens();
  std::vector<std::byte> rows(static_cast<std::size_t>(tokens * shape.heads * shape.dim) * 2);
  const PackedRun all[] = {{0, tokens}};
  input.read(which, all, dense_view(static_cast<void*>(rows.data()), Dtype::kBf16, tokens, shape.heads, shape.dim), 1);
  return rows;
}

TEST(SsmLayers, AreTheConv1dAndTheSsm) {
  const SsmInput input(layer(777), {});
  const CausalConv1dSpec spec = *input.job().convolution;
  ASSERT_EQ(spec.channels, 2 * 8 + 8 + 8);
  std::vector<std::byte> in_front(777 * 32 * 2);
  std::size_t first = 0;
  for (const SsmTensorKind which : input.convolved()) {
    const std::vector<std::byte> rows = rows_of(input, which);
    const std::size_t bytes = rows.size() / 777;
    for (std::size_t t = 0; t < 777; ++t) std::memcpy(&in_front[t * 64 + first], &rows[t * bytes], bytes);
    first += bytes;
  }
  ASSERT_EQ(first, 64U);
  std::vector<std::byte> behind(in_front.size());
  run_threads_world(1, {}, [&](Transport& transport) {
    CausalConv1d convolution({spec, {777}}, transport, {});
    convolution.run({dense_view(static_cast<const void*>(in_front.data()), spec.dtype, 777, 1, 32),
                     input.conv_weight().data(), input.conv_bias().data()},
                    {dense_view(static_cast<void*>(behind.data()), spec.dtype, 777, 1, 32)});
  });
  // The rows after the convolution as the file of an SSM layer.
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({.lengths = {777}, .heads = 2, .head_dim = 8, .state_dim = 8});
  first = 0;
  for (const char* name : {"x", "B", "C"}) {
    std::vector<std::byte>& bytes = tensors[name].bytes;
    const std::size_t row = bytes.size() / 777;
    for (std::size_t t = 0; t < 777; ++t) std::memcpy(&bytes[t * row], &behind[t * 64 + first], row);
    first += row;
  }
  const FinishedSsm scan = finished(SsmInput(FileInput{write_tensors(folder.file("in"), tensors)}, {}));
  const FinishedSsm whole = finished(input);
  ASSERT_EQ(whole.result.y.bytes(), scan.result.y.bytes());
  EXPECT_EQ(std::memcmp(whole.result.y.data(), scan.result.y.data(), scan.result.y.bytes()), 0);
}

TEST(SsmLayers, AreRightByTheOracle) {
  for (const bool selective : {false, true}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (SyntheticSsmInput scan : {layer(1500, selective, 3), step_of(20, selective, 2)}) {
        scan.dtype = dtype;
        const SsmAccuracy accuracy = checked(finished(SsmInput(scan, {})));
        EXPECT_TRUE(accuracy.passes()) << accuracy.part;
        EXPECT_GT(accuracy.part, 0.0);
      }
    }
  }
}

// fp32, where little is allowed. `changed`: the tensor whose first number is another.
SsmInput exact_layer(const TemporaryFolder& folder, const std::string& changed) {
  NamedTensors tensors =
      ssm_tensors({.lengths = {700, 300}, .heads = 2, .head_dim = 8, .state_dim = 8, .dtype = Dtype::kF32});
  std::vector<float> weight;
  std::vector<float> halos;
  for (int i = 0; i < 32 * 4; ++i) weight.push_back(0.1F * static_cast<float>(i % 7) - 0.25F);
  for (int i = 0; i < 2 * 32 * 3; ++i) halos.push_back(0.2F * static_cast<float>(i % 11) - 1.0F);
  tensors["conv1d_weight"] = float_list(weight, {32, 1, 4});
  tensors["conv_state"] = float_list(halos, {2, 32, 3});
  if (!changed.empty()) store_element(tensors[changed].bytes.data(), Dtype::kF32, 3.0F);
  return SsmInput(FileInput{write_tensors(folder.file("layer" + changed), tensors)}, {});
}

TEST(SsmLayers, AreWrongWithAnotherWeightOrOtherTokensInFront) {
  const TemporaryFolder folder;
  const SsmInput right = exact_layer(folder, "");
  EXPECT_TRUE(checked(finished(right)).passes());
  for (const char* const name : {"conv_state", "conv1d_weight"}) {
    FinishedSsm other = finished(exact_layer(folder, name));
    EXPECT_TRUE(checked(other).passes()) << name;
    other.input = right;
    EXPECT_FALSE(checked(other).passes()) << name;
  }
}

TEST(SsmUpdates, HaveTheSameBytesInEveryWorld) {
  const TemporaryFolder folder;
  for (const bool selective : {false, true}) {
    for (const int width : {0, 4}) {
      SsmFileJob job;
      job.input = step_of(7, selective, width);
      const std::string one = output_of(job, folder, 1);
      EXPECT_EQ(one, output_of(job, folder, 2));
      EXPECT_EQ(one, output_of(job, folder, 4));
      EXPECT_NE(one.find("final_states"), std::string::npos) << "a step without its states leads nowhere";
      EXPECT_EQ(one.find("final_conv_state") != std::string::npos, width == 4);
    }
  }
}

std::vector<float> floats_of(const Buffer& buffer) {
  std::vector<float> values(buffer.bytes() / sizeof(float));
  std::memcpy(values.data(), buffer.data(), buffer.bytes());
  return values;
}

// What a sequence of 299 tokens leaves, and its 300th token, give what all 300 give but for rounding.
TEST(SsmUpdates, GoOnFromWhatASequenceLeaves) {
  const TemporaryFolder folder;
  NamedTensors whole = ssm_tensors({.heads = 2, .head_dim = 8, .state_dim = 8, .dtype = Dtype::kF32});
  std::vector<float> weight;
  for (int i = 0; i < 32 * 4; ++i) weight.push_back(0.1F * static_cast<float>(i % 7) - 0.25F);
  whole["conv1d_weight"] = float_list(weight, {32, 4});
  whole["conv1d_bias"] = float_list(std::vector<float>(32, 0.125F));
  const auto cut = [&](std::size_t begin, std::size_t end) {
    NamedTensors part = whole;
    for (auto& [name, tensor] : part) {
      if (tensor.shape[0] != 300) continue;
      const std::size_t row = tensor.bytes.size() / 300;
      tensor.bytes = {tensor.bytes.begin() + static_cast<std::ptrdiff_t>(begin * row),
                      tensor.bytes.begin() + static_cast<std::ptrdiff_t>(end * row)};
      tensor.shape[0] = static_cast<std::int64_t>(end - begin);
    }
    return part;
  };
  SsmFileJob first;
  first.input = FileInput{write_tensors(folder.file("first"), cut(0, 299))};
  first.numerics.final_states = true;
  first.output.path = folder.file("left");
  run_threads_world(1, {}, [&](Transport& transport) { run_ssm_job(first, transport); });
  NamedTensors next = cut(299, 300);
  const SafetensorsFile left(first.output.path);
  for (const auto& [from, to] : {std::pair{"final_states", "state"}, {"final_conv_state", "conv_state"}}) {
    const TensorSource tensor = left.tensor(from);
    NamedTensor& given = next[to] = {tensor.info->dtype, tensor.info->shape, {}};
    given.bytes.resize(static_cast<std::size_t>(tensor.info->bytes()));
    tensor.shard->read(*tensor.info, 0, given.bytes);
  }
  const SsmInput step_input(FileInput{write_tensors(folder.file("next"), next)}, {});
  EXPECT_TRUE(step_input.job().update);
  const FinishedSsm step = finished(step_input);
  const FinishedSsm all =
      finished(SsmInput(FileInput{write_tensors(folder.file("all"), whole)}, {}).with_final_states());
  const std::vector<float> y = floats_of(step.result.y);
  const std::vector<float> every_y = floats_of(all.result.y);
  const std::vector<float> states = floats_of(step.result.states);
  const std::vector<float> every_state = floats_of(all.result.states);
  ASSERT_EQ(y.size(), 16U);
  ASSERT_EQ(states.size(), every_state.size());
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], every_y[every_y.size() - y.size() + i], 1e-4F) << i;
  for (std::size_t i = 0; i < states.size(); ++i) EXPECT_NEAR(states[i], every_state[i], 1e-4F) << i;
  EXPECT_EQ(std::memcmp(step.result.halos.data(), all.result.halos.data(), all.result.halos.bytes()), 0);
  // In fp32 the two differ, or this would not show that an update ran.
  EXPECT_TRUE(std::memcmp(y.data(), every_y.data() + every_y.size() - y.size(), 64) != 0 ||
              std::memcmp(states.data(), every_state.data(), states.size() * sizeof(float)) != 0);
}

TEST(SsmUpdates, AreDoneAnewEachTime) {
  const SsmInput input(step_of(3), {});
  run_threads_world(1, {}, [&](Transport& transport) {
    const Collective collective(transport, Timeouts(60.0));
    PreparedSsm prepared(input, transport, one_thread());
    LoadedSsm loaded(input, prepared.ssm(), collective);
    loaded.run();
    loaded.run();
    const SsmRankResult twice = loaded.fetch(loaded.run());
    const FinishedSsm once = finished(input);
    EXPECT_EQ(std::memcmp(twice.y.data(), once.result.y.data(), twice.y.bytes()), 0);
    EXPECT_EQ(std::memcmp(twice.states.data(), once.result.states.data(), twice.states.bytes()), 0);
  });
}

TEST(SsmJobRefusals, PartsThatContradictEachOther) {
  const SsmJob good = SsmInput(layer(64), {}).job();
  check_ssm_job(good);
  const auto refused = [&](const std::function<void(SsmJob&)>& change) {
    SsmJob job = good;
    change(job);
    const Error error = error_of([&] { check_ssm_job(job); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return std::string(error.what());
  };
  EXPECT_NE(refused([](SsmJob& job) { job.convolution->channels = 24; }).find("32 of bf16"), std::string::npos);
  EXPECT_NE(refused([](SsmJob& job) { job.convolution->dtype = Dtype::kF32; }).find("of fp32"), std::string::npos);
  EXPECT_NE(refused([](SsmJob& job) { job.convolution->width = 5; }).find("width 5"), std::string::npos);
  EXPECT_NE(refused([](SsmJob& job) {
              job.convolution.reset();
              job.final_halos = true;
            }).find("no convolution"),
            std::string::npos);
  EXPECT_NE(refused([](SsmJob& job) { job.update = true; }).find("several tokens"), std::string::npos);
  EXPECT_NE(refused([](SsmJob& job) {
              job.update = true;
              job.lengths = {1};
            }).find("without states"),
            std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
