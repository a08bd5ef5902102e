// SPDX-License-Identifier: Apache-2.0
// Files of SSM layers: they hold what a synthetic layer of their shape has, in every way to write it, and what can't
// be right is refused with code 3 and a message that names the tensor and both shapes.
#include "ops/ssm/ssm_tensors.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "ops/ssm/ssm_input.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr SsmTensorKind kAllRows[] = {SsmTensorKind::kX, SsmTensorKind::kDt, SsmTensorKind::kB, SsmTensorKind::kC,
                                      SsmTensorKind::kZ};

std::vector<std::byte> read_all(const SsmInput& input, SsmTensorKind which, std::span<const PackedRun> runs) {
  const SsmInput::RowShape row = input.row_shape(which);
  const Dtype dtype = input.job().spec.dtype;
  const std::int64_t tokens = total_tokens(runs);
  std::vector<std::byte> rows(static_cast<std::size_t>(tokens * row.heads * row.dim) * size_of(dtype));
  input.read(which, runs, dense_view(static_cast<void*>(rows.data()), dtype, tokens, row.heads, row.dim), 1);
  return rows;
}

SsmInput written(const TemporaryFolder& folder, const NamedTensors& tensors) {
  return SsmInput(FileInput{write_tensors(folder.file("scan"), tensors)}, {});
}

SsmInput synthetic(const SsmFile& shape) {
  SyntheticSsmInput made;
  made.selective = shape.selective;
  made.seed = shape.seed;
  made.tokens = 0;
  for (const std::int64_t length : shape.lengths) made.tokens += length;
  made.heads = shape.heads;
  made.head_dim = shape.head_dim;
  made.groups = shape.groups;
  made.state_dim = shape.state_dim;
  made.dtype = shape.dtype;
  return SsmInput(made, {});
}

TEST(SsmTensors, AreThoseOfTheSeed) {
  const TemporaryFolder folder;
  for (const bool selective : {false, true}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
      const SsmFile shape{.selective = selective, .groups = 2, .dtype = dtype};
      const SsmInput file = written(folder, ssm_tensors(shape));
      const SsmInput made = synthetic(shape);
      EXPECT_EQ(file.op(), selective ? Op::kSelectiveScan : Op::kSsd);
      EXPECT_EQ(file.job().spec, made.job().spec);
      EXPECT_EQ(file.job().lengths, made.job().lengths);
      EXPECT_EQ(file.a(), made.a());
      EXPECT_EQ(file.d(), made.d());
      EXPECT_EQ(file.dt_bias(), made.dt_bias());
      EXPECT_EQ(file.y_shape(), made.y_shape());
      const PackedRun some[] = {{0, 3}, {290, 300}, {64, 65}};
      for (const SsmTensorKind which : kAllRows) EXPECT_EQ(read_all(file, which, some), read_all(made, which, some));
    }
  }
}

TEST(SsmTensors, MayBeABatch) {
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({});
  for (auto& [name, tensor] : tensors) {
    if (tensor.shape[0] != 300) continue;
    tensor.shape.insert(tensor.shape.begin(), 3);
    tensor.shape[1] = 100;
  }
  const SsmInput batch = written(folder, tensors);
  EXPECT_EQ(batch.job().lengths, (std::vector<std::int64_t>{100, 100, 100}));
  EXPECT_EQ(batch.y_shape(), (std::vector<std::int64_t>{3, 100, 8, 16}));
  const PackedRun across[] = {{95, 205}};
  const SsmInput made = synthetic({});
  for (const SsmTensorKind which : kAllRows) EXPECT_EQ(read_all(batch, which, across), read_all(made, which, across));
  // As mamba_ssm packs sequences: a batch of one.
  for (auto& [name, tensor] : tensors) {
    if (tensor.shape.size() < 2 || tensor.shape[1] != 100) continue;
    tensor.shape[0] = 1;
    tensor.shape[1] = 300;
  }
  tensors["cu_seqlens"] = int_list({0, 120, 300});
  EXPECT_EQ(written(folder, tensors).job().lengths, (std::vector<std::int64_t>{120, 180}));
}

TEST(SsmTensors, WithoutTheOptionalOnesAreFewerTerms) {
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({});
  EXPECT_TRUE(written(folder, tensors).job().spec.dt_softplus);  // where dt has a bias
  for (const char* name : {"D", "z", "dt_bias"}) tensors.erase(name);
  const SsmSpec bare = written(folder, tensors).job().spec;
  EXPECT_FALSE(bare.skip || bare.gate || bare.dt_bias || bare.dt_softplus);
  SsmNumerics numerics;
  numerics.softplus = true;
  numerics.dt_min = 0.0F;
  const SsmSpec chosen = SsmInput(FileInput{folder.file("scan")}, numerics).job().spec;
  EXPECT_TRUE(chosen.dt_softplus);
  EXPECT_EQ(chosen.dt_min, 0.0F);
}

TEST(SsmTensors, HaveInitialStatesOfAnyDtype) {
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({.lengths = {100, 200}, .heads = 2, .head_dim = 8, .state_dim = 8});
  std::vector<float> states(2 * 2 * 8 * 8);
  for (std::size_t i = 0; i < states.size(); ++i) states[i] = static_cast<float>(i % 200) / 4.0F;  // exact in bf16
  tensors["initial_states"] = float_list(states, {2, 2, 8, 8});
  std::vector<float> second(128);
  const std::int32_t last[] = {1};
  written(folder, tensors).read_initial(last, second);
  EXPECT_TRUE(std::equal(second.begin(), second.end(), states.begin() + 128));
  NamedTensor halves{FileDtype::kBf16, {2, 2, 8, 8}, std::vector<std::byte>(512)};
  for (std::size_t i = 0; i < states.size(); ++i) store_element(halves.bytes.data() + 2 * i, Dtype::kBf16, states[i]);
  tensors["initial_states"] = halves;
  std::vector<float> again(128);
  written(folder, tensors).read_initial(last, again);
  EXPECT_EQ(again, second);
}

TEST(SsmTensors, PartsAreNamedByTheTokensOfTheWhole) {
  const SsmInput whole = synthetic({});
  const std::int64_t begins[] = {120};
  const std::int64_t ends[] = {300};
  const SsmInput part = whole.part(begins, ends, std::vector<std::byte>(8 * 16 * 16 * sizeof(float)));
  EXPECT_EQ(part.job().lengths, std::vector<std::int64_t>{180});
  EXPECT_EQ(part.origins(), std::vector<std::int64_t>{120});
  EXPECT_TRUE(part.job().initial_states);
  EXPECT_FALSE(whole.job().initial_states);
}

// A layer with everything that has another name somewhere.
NamedTensors layer_tensors(bool selective) {
  NamedTensors tensors = ssm_tensors({.selective = selective});
  const std::int64_t channels = selective ? 8 : 8 * 16 + 2 * 16;
  std::vector<float> weight(static_cast<std::size_t>(channels * 4));
  for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i % 7) / 8.0F;
  tensors["conv1d_weight"] = float_list(weight, {channels, 4});
  tensors["conv1d_bias"] = float_list(std::vector<float>(static_cast<std::size_t>(channels), 0.125F));
  const std::vector<float> states(static_cast<std::size_t>(selective ? 8 * 16 : 8 * 16 * 16), 0.5F);
  tensors["initial_states"] =
      float_list(states, selective ? std::vector<std::int64_t>{1, 8, 16} : std::vector<std::int64_t>{1, 8, 16, 16});
  return tensors;
}

void rename(NamedTensors& tensors, const std::string& from, const std::string& to) {
  tensors[to] = tensors.at(from);
  tensors.erase(from);
}

TEST(SsmTensors, ByModelsNamesAreTheSame) {
  const TemporaryFolder folder;
  const char* const names[][2] = {
      {"initial_states", "initial_state"}, {"conv1d_weight", "conv1d.weight"}, {"conv1d_bias", "conv1d.bias"}};
  for (const bool selective : {false, true}) {
    const NamedTensors tensors = layer_tensors(selective);
    const SsmInput whole = written(folder, tensors);
    ASSERT_TRUE(whole.job().initial_states && whole.job().convolution && whole.job().convolution->bias);
    for (const auto& [ours, theirs] : names) {
      SCOPED_TRACE(theirs);
      NamedTensors renamed = tensors;
      rename(renamed, ours, theirs);
      const SsmInput input = written(folder, renamed);
      EXPECT_EQ(input.job().spec, whole.job().spec);
      EXPECT_EQ(input.job().convolution, whole.job().convolution);
      EXPECT_EQ(input.conv_weight(), whole.conv_weight());
      EXPECT_EQ(input.conv_bias(), whole.conv_bias());
      ASSERT_TRUE(input.job().initial_states);
      std::vector<float> states(static_cast<std::size_t>(selective ? 8 * 16 : 8 * 16 * 16));
      const std::int32_t first[] = {0};
      input.read_initial(first, states);
      EXPECT_EQ(states, std::vector<float>(states.size(), 0.5F));

      renamed[ours] = tensors.at(ours);
      const std::string twice = file_error([&] { written(folder, renamed); });
      EXPECT_NE(twice.find("both names mean " + std::string(ours)), std::string::npos) << twice;
      FileInput named{folder.file("scan")};
      (std::string_view(theirs) == "initial_state"   ? named.names.initial_states
       : std::string_view(theirs) == "conv1d.weight" ? named.names.conv1d_weight
                                                     : named.names.conv1d_bias) = theirs;
      EXPECT_EQ(SsmInput(named, {}).job().spec, whole.job().spec);
    }
  }
}

TEST(SsmTensors, HaveSequencesByAttentionsNames) {
  const TemporaryFolder folder;
  for (const char* name : {"cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q", "query_start_loc"}) {
    SCOPED_TRACE(name);
    NamedTensors tensors = ssm_tensors({});
    tensors[name] = int_list({0, 100, 300});
    tensors["norm.weight"] = int_list({0});
    const SsmInput input = written(folder, tensors);
    EXPECT_EQ(input.job().lengths, (std::vector<std::int64_t>{100, 200}));
    EXPECT_EQ(input.unread().text(), "`norm.weight`");
  }
}

TEST(SsmTensors, UnderNamesThatArentReadAreRefused) {
  const TemporaryFolder folder;
  struct Unread {
    const char* from;  // a tensor that is there
    const char* to;
    const char* hint;
    bool selective = false;
  };
  const Unread cases[] = {
      {"dt_bias", "delta_bias", "the bias of an SSM with x and dt is `dt_bias`"},
      {"delta_bias", "dt_bias", "the bias of an SSM with u and delta is `delta_bias`", true},
      {"delta_bias", "dt_proj.bias", "the bias of an SSM with u and delta is `delta_bias`", true},
      {"A", "A_log", "A = -exp(A_log)"},
      {"A", "A_log", "A = -exp(A_log)", true},
      {"initial_states", "ssm_state", "Say which it is"},
      {"initial_states", "ssm_states", "Say which it is", true},
      {"conv1d_bias", "conv_states", "are `conv_state`"},
      {"dt", "steps", "without dt it is only a convolution"},  // with conv1d_weight it would be only a convolution
      {"u", "x", "x is [tokens, heads, head_dim]", true},      // x and conv1d_weight, but not only a convolution
  };
  for (const Unread& unread : cases) {
    SCOPED_TRACE(unread.to);
    NamedTensors tensors = layer_tensors(unread.selective);
    rename(tensors, unread.from, unread.to);
    const std::string message = file_error([&] { written(folder, tensors); });
    EXPECT_NE(message.find(unread.hint), std::string::npos) << message;
  }
  NamedTensors keys = layer_tensors(false);
  keys["cu_seqlens_k"] = int_list({0, 100, 300});
  EXPECT_NE(file_error([&] { written(folder, keys); }).find("the sequences of an SSM have no keys"), std::string::npos);
  // A file of two SSM layers has both biases.
  NamedTensors both = ssm_tensors({});
  for (const auto& [name, tensor] : ssm_tensors({.selective = true})) both.try_emplace(name, tensor);
  FileInput input{write_tensors(folder.file("both"), both)};
  input.names.x = "x";
  EXPECT_TRUE(SsmInput(input, {}).job().spec.dt_bias);
  // What is named is what it is named for.
  NamedTensors tensors = ssm_tensors({.selective = true});
  rename(tensors, "delta_bias", "dt_bias");
  FileInput named{write_tensors(folder.file("named"), tensors)};
  named.names.delta_bias = "dt_bias";
  EXPECT_TRUE(SsmInput(named, {}).job().spec.dt_bias);
}

struct BadScan {
  const char* what;
  std::function<void(NamedTensors&)> spoil;
  const char* tensor;   // of the message
  const char* against;  // likewise
  bool selective = false;
};

TEST(SsmTensors, ThatContradictEachOtherAreRefusedByNameAndShape) {
  const TemporaryFolder folder;
  const auto reshape = [](const char* name, std::vector<std::int64_t> shape) {
    return [=](NamedTensors& tensors) { tensors[name].shape = shape; };
  };
  const std::string x = "`x` of";
  const BadScan cases[] = {
      {"dt of other heads", reshape("dt", {600, 4}), "`dt` of", "has BF16 [300, 8, 16]"},
      {"B of other tokens", reshape("B", {150, 2, 16}), "has BF16 [150, 2, 16]", "has BF16 [300, 8, 16]"},
      {"C unlike B", reshape("C", {300, 2, 8}), "`C` of", "has BF16 [300, 2, 8]"},
      {"groups that don't divide heads",
       [](NamedTensors& t) {
         t["B"].shape = t["C"].shape = {300, 16, 1};
       },
       "16 groups don't divide 8 heads", "`B` of"},
      {"A a state", reshape("A", {2, 4}), "`A` of", "has BF16 [300, 8, 16]"},
      {"D a dim",
       [](NamedTensors& t) {
         t["D"] = float_list(std::vector<float>(128), {8, 16});
       },
       "`D` of", "has F32 [8, 16]"},
      {"z of another shape", reshape("z", {300, 16, 8}), "`z` of", "has BF16 [300, 16, 8]"},
      {"dt_bias of other heads",
       [](NamedTensors& t) {
         t["dt_bias"] = float_list({1, 2});
       },
       "`dt_bias` of", "has F32 [2]"},
      {"x of one axis", reshape("x", {38400}), "`x` of", "it must have 3 axes"},
      {"rows of two dtypes", [](NamedTensors& t) { t["dt"].dtype = FileDtype::kF16; }, "has F16 [300, 8]", "one dtype"},
      {"no dt", [](NamedTensors& t) { t.erase("dt"); }, "no tensor `dt`", ""},
      {"no A", [](NamedTensors& t) { t.erase("A"); }, "no tensor `A`", ""},
      {"seq_idx", [](NamedTensors& t) { t["seq_idx"] = int_list({0}); }, "`seq_idx`", "cu_seqlens"},
      {"an end before the one in front",
       [](NamedTensors& t) {
         t["cu_seqlens"] = int_list({0, 7, 5, 300});
       },
       "`cu_seqlens` of", "entry 2 is 5, after 7"},
      {"too few tokens",
       [](NamedTensors& t) {
         t["cu_seqlens"] = int_list({0, 299});
       },
       "`cu_seqlens` of", "x has 300 tokens"},
      {"tokens before the first",
       [](NamedTensors& t) {
         t["cu_seqlens"] = int_list({1, 300});
       },
       "first entry is 1", ""},
      {"states of other heads",
       [](NamedTensors& t) {
         t["initial_states"] = float_list(std::vector<float>(2048), {1, 16, 8, 16});
       },
       "has F32 [1, 16, 8, 16]", "[1, 8, 16, 16]"},
      {"an SSM and attention", [](NamedTensors& t) { t["q"] = t["x"]; }, "holds an SSM and attention", ""},
      {"two SSMs", [](NamedTensors& t) { t["u"] = t["delta"] = t["dt"]; }, "holds x and u", ""},
      {"A a head", reshape("A", {128}), "`A` of", "has BF16 [300, 8]", true},
      {"delta of other channels", reshape("delta", {600, 4}), "has BF16 [600, 4]", "`u` of", true},
      {"B without states", reshape("B", {4800}), "`B` of", "has BF16 [300, 8]", true},
  };
  for (const BadScan& bad : cases) {
    SCOPED_TRACE(bad.what);
    NamedTensors tensors = ssm_tensors({.selective = bad.selective});
    bad.spoil(tensors);
    const std::string message = file_error([&] { written(folder, tensors); });
    EXPECT_NE(message.find(bad.tensor), std::string::npos) << message;
    EXPECT_NE(message.find(bad.against), std::string::npos) << message;
  }
}

TEST(SsmTensors, ByOtherNamesAreNamed) {
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({});
  NamedTensors renamed;
  for (const auto& [name, tensor] : tensors) renamed["mixer." + name] = tensor;
  const std::string path = write_tensors(folder.file("renamed"), renamed);
  EXPECT_EQ(error_of([&] { SsmInput(FileInput{path}, {}); }).code(), ErrorCode::kFile);
  FileInput input{path};
  input.names.x = "mixer.x";
  input.names.dt = "mixer.dt";
  input.names.a = "mixer.A";
  input.names.b = "mixer.B";
  input.names.c = "mixer.C";
  const SsmInput bare(input, {});
  EXPECT_FALSE(bare.job().spec.skip);
  input.names.d = "mixer.D";
  input.names.z = "mixer.z";
  input.names.dt_bias = "mixer.dt_bias";
  EXPECT_EQ(SsmInput(input, {}).job().spec, synthetic({}).job().spec);
}

TEST(SsmTensors, LieTokenByToken) {
  const TemporaryFolder folder;
  FileInput input{write_tensors(folder.file("scan"), ssm_tensors({}))};
  input.order = AxisOrder::kHtd;
  EXPECT_EQ(error_of([&] { SsmInput(input, {}); }).code(), ErrorCode::kUsage);
  input.order = AxisOrder::kThd;
  EXPECT_EQ(SsmInput(input, {}).job().tokens(), 300);
}

TEST(SyntheticSsmJobs, ThatNobodyCouldScanAreRefused) {
  SyntheticSsmInput scan;
  scan.seed = 1;
  EXPECT_EQ(error_of([&] { SsmInput(scan, {}); }).code(), ErrorCode::kUsage);  // no tokens
  scan.tokens = std::int64_t{1} << 60;
  EXPECT_EQ(error_of([&] { SsmInput(scan, {}); }).code(), ErrorCode::kUsage);
  scan.tokens = 10;
  scan.heads = 3;
  scan.groups = 2;
  EXPECT_EQ(error_of([&] { SsmInput(scan, {}); }).code(), ErrorCode::kUsage);
}

}  // namespace
}  // namespace ringattn::testing
