// SPDX-License-Identifier: Apache-2.0
// Inputs whose tensors disagree are refused with code 3 and a message that names the tensor; good ones give the job.
#include "ops/common/input_tensors.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.hpp"
#include "io/input_names.hpp"
#include "io/safetensors_writer.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::TemporaryFolder;

struct Input {
  std::vector<OutputTensor> tensors;
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> block_mask;  // values of I64 tensors among them
};

std::vector<OutputTensor> qkv(std::vector<std::int64_t> q, std::vector<std::int64_t> k, std::vector<std::int64_t> v,
                              FileDtype dtype = FileDtype::kBf16) {
  return {{"q", dtype, std::move(q)}, {"k", dtype, std::move(k)}, {"v", dtype, std::move(v)}};
}

Input with_lists(std::vector<OutputTensor> tensors,
                 std::vector<std::pair<std::string, std::vector<std::int64_t>>> block_mask) {
  for (const auto& [name, values] : block_mask) {
    tensors.push_back({name, FileDtype::kI64, {static_cast<std::int64_t>(values.size())}});
  }
  return {std::move(tensors), std::move(block_mask)};
}

std::string write_input(const TemporaryFolder& folder, const Input& input) {
  const std::string path = folder.file("input.safetensors");
  const auto writer = SafetensorsWriter::create(plan_safetensors(input.tensors, {}), path, true);
  for (const auto& [name, values] : input.block_mask) writer->write_bytes(name, std::as_bytes(std::span(values)));
  writer->commit();
  return path;
}

TEST(InputTensors, GivesTheJob) {
  const TemporaryFolder folder;
  {
    const SafetensorsFile file(write_input(folder, {qkv({10, 8, 16}, {12, 2, 16}, {12, 2, 24}), {}}));
    const InputTensors input = find_input(file, {}, {});
    EXPECT_EQ(input.dtype, Dtype::kBf16);
    EXPECT_EQ(input.sequences, (std::vector<Sequence>{{10, 12, 2}}));
    EXPECT_EQ(input.out_grid().shape(), (std::vector<std::int64_t>{10, 8, 24}));
    EXPECT_EQ(lse_shape(input.out_grid()), (std::vector<std::int64_t>{8, 10}));
    EXPECT_TRUE(input.sinks.empty());
  }
  {
    const Input batch = with_lists(qkv({2, 8, 5, 16}, {2, 4, 6, 16}, {2, 4, 6, 16}), {{"q_offset", {0, -3}}});
    const SafetensorsFile file(write_input(folder, batch));
    const InputTensors input = find_input(file, {}, AxisOrder::kBhtd);
    EXPECT_EQ(input.sequences, (std::vector<Sequence>{{5, 6, 0}, {5, 6, -3}}));
    EXPECT_EQ(input.out_grid().shape(), (std::vector<std::int64_t>{2, 8, 5, 16}));
    EXPECT_EQ(lse_shape(input.out_grid()), (std::vector<std::int64_t>{2, 8, 5}));
  }
  {
    Input packed =
        with_lists(qkv({10, 4, 16}, {12, 4, 16}, {12, 4, 16}),
                   {{"cu_seqlens_q", {0, 3, 3, 10}}, {"cu_seqlens_k", {0, 3, 5, 12}}, {"my_offsets", {0, 1, 2}}});
    packed.tensors.push_back({"sinks", FileDtype::kF32, {4}});
    const SafetensorsFile file(write_input(folder, packed));
    InputNames names;
    EXPECT_EQ(find_input(file, names, {}).sequences, (std::vector<Sequence>{{3, 3, 0}, {0, 2, 2}, {7, 7, 0}}));
    EXPECT_EQ(find_input(file, names, {}).sinks, std::vector<float>(4));
    names.q_offset = "my_offsets";
    EXPECT_EQ(find_input(file, names, {}).sequences, (std::vector<Sequence>{{3, 3, 0}, {0, 2, 1}, {7, 7, 2}}));
  }
}

TEST(InputTensors, HaveNamesOfOtherLibraries) {
  const TemporaryFolder folder;
  Input packed = with_lists(qkv({10, 4, 16}, {12, 4, 16}, {12, 4, 16}),
                            {{"cu_seq_lens_q", {0, 3, 3, 10}}, {"cu_seqlens_kv", {0, 3, 5, 12}}});
  packed.tensors.push_back({"s_aux", FileDtype::kF32, {4}});
  packed.tensors.push_back({"other", FileDtype::kF32, {4}});
  const SafetensorsFile file(write_input(folder, packed));
  const InputTensors input = find_input(file, {}, {});
  EXPECT_EQ(input.sequences, (std::vector<Sequence>{{3, 3, 0}, {0, 2, 2}, {7, 7, 0}}));
  EXPECT_EQ(input.sinks, std::vector<float>(4));
  EXPECT_EQ(unread_tensors(file, input.used, {}).text(), "`other`");

  for (const char* name : {"cu_seqlens", "cu_seqlens_qkv", "query_start_loc"}) {
    SCOPED_TRACE(name);
    const SafetensorsFile alike(
        write_input(folder, with_lists(qkv({10, 4, 16}, {10, 4, 16}, {10, 4, 16}), {{name, {0, 3, 10}}})));
    EXPECT_EQ(find_input(alike, {}, {}).sequences, (std::vector<Sequence>{{3, 3, 0}, {7, 7, 0}}));
    // It says nothing of as many keys as these.
    const SafetensorsFile unlike(
        write_input(folder, with_lists(qkv({10, 4, 16}, {12, 4, 16}, {12, 4, 16}), {{name, {0, 3, 10}}})));
    EXPECT_FILE_ERROR(find_input(unlike, {}, {}), "is given without the other");
  }
}

TEST(InputTensors, OfTwoNamesForARoleAreRefusedUnlessOneIsNamed) {
  const TemporaryFolder folder;
  const std::vector<OutputTensor> rows = qkv({10, 4, 16}, {10, 4, 16}, {10, 4, 16});
  using List = std::pair<std::string, std::vector<std::int64_t>>;
  const List block_mask[] = {{"cu_seqlens_q", {0, 10}}, {"cu_seqlens", {0, 3, 10}}, {"qo_indptr", {0, 4, 10}}};
  const SafetensorsFile both(write_input(folder, with_lists(rows, {block_mask[0], block_mask[1]})));
  EXPECT_FILE_ERROR(find_input(both, {}, {}), "`cu_seqlens_q` of");
  EXPECT_FILE_ERROR(find_input(both, {}, {}), "both names mean cu_seqlens_q");
  InputNames names;
  names.cu_seqlens_q = "cu_seqlens";
  EXPECT_EQ(find_input(both, names, {}).sequences.size(), 2U);
  const SafetensorsFile aliases(write_input(folder, with_lists(rows, {block_mask[1], block_mask[2]})));
  EXPECT_FILE_ERROR(find_input(aliases, {}, {}), "both names mean cu_seqlens_q");
}

TEST(InputTensors, TakeTheSinksOfACheckpointsOnlyLayer) {
  const TemporaryFolder folder;
  Input input{qkv({10, 4, 16}, {10, 4, 16}, {10, 4, 16}), {}};
  const auto sinks = [](std::string name) { return OutputTensor{std::move(name), FileDtype::kF32, {4}}; };
  input.tensors.push_back(sinks("model.layers.3.self_attn.sinks"));
  const SafetensorsFile one(write_input(folder, input));
  EXPECT_EQ(find_input(one, {}, {}).sinks.size(), 4U);
  input.tensors.push_back(sinks("model.layers.4.self_attn.sinks"));
  const SafetensorsFile two(write_input(folder, input));
  EXPECT_FILE_ERROR(find_input(two, {}, {}), "the sinks of several layers");
  InputNames names;
  names.q = "q";
  EXPECT_TRUE(find_input(two, names, {}).sinks.empty());
  names.sinks = "model.layers.4.self_attn.sinks";
  EXPECT_EQ(find_input(two, names, {}).sinks.size(), 4U);
  input.tensors.back() = sinks("sinks");
  const SafetensorsFile both(write_input(folder, input));
  EXPECT_FILE_ERROR(find_input(both, {}, {}), "both names mean sinks");
}

TEST(InputTensors, ByOtherNamesAreSuggested) {
  const TemporaryFolder folder;
  const auto named = [&](std::initializer_list<std::string> names) {
    Input input;
    for (const std::string& name : names) input.tensors.push_back({name, FileDtype::kF32, {10, 4, 16}});
    return SafetensorsFile(write_input(folder, input));
  };
  EXPECT_FILE_ERROR(find_input(named({"query", "key", "value"}), {}, {}), "q=query,k=key,v=value");
  EXPECT_FILE_ERROR(find_input(named({"q", "key", "value"}), {}, {}), "k=key,v=value");
  EXPECT_FILE_ERROR(find_input(named({"qkv"}), {}, {}), "A packed `qkv` can't be read; split it.");
  // vLLM's cache: what to write it as comes first.
  EXPECT_FILE_ERROR(find_input(named({"query", "key_cache", "value_cache", "block_tables", "seq_lens"}), {}, {}),
                    "`key_cache`, which isn't read");
}

TEST(InputTensors, ThatWouldChangeTheResultAreRefusedByName) {
  const TemporaryFolder folder;
  InputNames named;
  named.q = "q";
  for (const KnownName& known : known_names()) {
    if (!known.role.empty() || !known.is_for(JobKind::kAttention)) continue;
    SCOPED_TRACE(known.name);
    Input input{qkv({10, 4, 16}, {10, 4, 16}, {10, 4, 16}), {}};
    input.tensors.push_back({std::string(known.name), FileDtype::kF32, {4}});
    const SafetensorsFile file(write_input(folder, input));
    EXPECT_FILE_ERROR(find_input(file, {}, {}), std::string(known.name) + "`, which isn't read");
    // Who names tensors knows the file.
    const InputTensors found = find_input(file, named, {});
    EXPECT_EQ(unread_tensors(file, found.used, named).text(), "1 tensor");
  }
}

TEST(InputTensors, ThatAreNotReadAreListed) {
  const TemporaryFolder folder;
  Input input{qkv({10, 4, 16}, {10, 4, 16}, {10, 4, 16}), {}};
  for (int i = 0; i < 10; ++i) input.tensors.push_back({fmt::format("other{}", i), FileDtype::kU8, {1}});
  const SafetensorsFile file(write_input(folder, input));
  const std::vector<TensorSource> used = find_input(file, {}, {}).used;
  EXPECT_EQ(unread_tensors(file, used, {}).text(),
            "`other0`, `other1`, `other2`, `other3`, `other4`, `other5`, `other6`, `other7` and 2 more");
  InputNames named;
  named.k = "k";
  EXPECT_EQ(unread_tensors(file, used, named).text(), "10 tensors");
  std::vector<TensorSource> all = used;
  for (int i = 0; i < 10; ++i) all.push_back(file.tensor(fmt::format("other{}", i)));
  EXPECT_EQ(unread_tensors(file, all, {}).text(), "");
}

TEST(InputTensors, TheQueriesListServesAsManyKeys) {
  const TemporaryFolder folder;
  const SafetensorsFile file(
      write_input(folder, with_lists(qkv({10, 4, 16}, {10, 4, 16}, {10, 4, 16}), {{"cu_seqlens_q", {0, 3, 10}}})));
  EXPECT_EQ(find_input(file, {}, {}).sequences, (std::vector<Sequence>{{3, 3, 0}, {7, 7, 0}}));
}

TEST(InputTensors, RefusesTensorsThatDisagree) {
  const TemporaryFolder folder;
  const auto good = [] { return qkv({10, 8, 16}, {12, 2, 16}, {12, 2, 16}); };
  const auto plus = [&](std::string name, FileDtype dtype, std::vector<std::int64_t> shape) {
    auto tensors = good();
    tensors.push_back({std::move(name), dtype, std::move(shape)});
    return Input{tensors, {}};
  };
  auto mixed = good();
  mixed[2].dtype = FileDtype::kF16;
  auto missing = good();
  missing.pop_back();
  struct Case {
    Input input;
    std::optional<AxisOrder> order;
    std::string why;
  };
  const Case cases[] = {
      {{missing, {}}, {}, "has no tensor `v`"},
      {{qkv({16}, {16}, {16}), {}}, {}, "it must have 3 axes"},
      {{qkv({}, {}, {}), {}}, AxisOrder::kBthd, "order bthd has 4 axes"},
      {{qkv({10, 8, 16}, {1, 12, 2, 16}, {12, 2, 16}), {}}, {}, "q has 3 axes"},
      {{qkv({10, 8, 16}, {12, 2, 24}, {12, 2, 16}), {}}, {}, "q's head_dim is 16"},
      {{qkv({10, 8, 16}, {12, 3, 16}, {12, 3, 16}), {}},
       {},
       "K has 3 heads, Q has 8 (8 is not a multiple of 3). Check the file's k shape [12, 3, 16]."},
      {{qkv({10, 2, 16}, {12, 4, 16}, {12, 4, 16}), {}}, {}, "not a multiple"},
      {{qkv({10, 8, 16}, {12, 2, 16}, {12, 4, 16}), {}}, {}, "k has 2 heads"},
      {{qkv({10, 8, 16}, {12, 2, 16}, {11, 2, 16}), {}}, {}, "k has 12 tokens"},
      {{qkv({10, 0, 16}, {12, 2, 16}, {12, 2, 16}), {}}, {}, "at least one head"},
      {{qkv({10, 8, 0}, {12, 2, 0}, {12, 2, 16}), {}}, {}, "at least one head"},
      {{qkv({1, 10, 8, 16}, {2, 12, 2, 16}, {2, 12, 2, 16}), {}}, {}, "q has a batch of 1"},
      {{qkv({10, 8, 16}, {12, 2, 16}, {12, 2, 16}, FileDtype::kF64), {}}, {}, "q, k and v are BF16, F16 or F32"},
      {{mixed, {}}, {}, "q is BF16"},
      {with_lists(good(), {{"cu_seqlens_q", {0, 10}}}), {}, "is given without the other"},
      {with_lists(good(), {{"cu_seqlens_q", {0, 9}}, {"cu_seqlens_k", {0, 12}}}), {}, "its last entry is 9"},
      {with_lists(good(), {{"cu_seqlens_q", {0}}, {"cu_seqlens_k", {0, 12}}}), {}, "one entry for each sequence"},
      {with_lists(good(), {{"cu_seqlens_q", {}}, {"cu_seqlens_k", {}}}), {}, "one entry for each sequence"},
      {with_lists(good(), {{"cu_seqlens_q", {1, 10}}, {"cu_seqlens_k", {0, 12}}}), {}, "starts with 1"},
      {with_lists(good(), {{"cu_seqlens_q", {0, 11, 10}}, {"cu_seqlens_k", {0, 6, 12}}}), {}, "descends"},
      {with_lists(good(), {{"cu_seqlens_q", {0, 5, 10}}, {"cu_seqlens_k", {0, 12}}}), {}, "names 2 sequences"},
      {with_lists(good(), {{"cu_seqlens_q", {0, 10}}, {"cu_seqlens_k", {0, 5, 12}}}), {}, "names 1 sequence, "},
      {with_lists(qkv({1, 10, 8, 16}, {1, 12, 2, 16}, {1, 12, 2, 16}),
                  {{"cu_seqlens_q", {0, 10}}, {"cu_seqlens_k", {0, 12}}}),
       {},
       "has an axis for the batch"},
      {with_lists(good(), {{"q_offset", {1, 2}}}),
       {},
       "the job has 1 sequence). It holds one position for each sequence"},
      {with_lists(good(), {{"q_offset", {std::int64_t{1} << 61}}}), {}, "beyond 2^60"},
      {plus("q_offset", FileDtype::kI32, {1}), {}, "it must be I64"},
      {plus("q_offset", FileDtype::kI64, {1, 1}), {}, "one dimension"},
      {plus("cu_seqlens_q", FileDtype::kF32, {2}), {}, "is given without the other"},
      {plus("sinks", FileDtype::kF32, {2}), {}, "q has 8 heads"},
      {plus("sinks", FileDtype::kI32, {8}), {}, "F32, BF16 or F16"},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.why);
    const SafetensorsFile file(write_input(folder, bad.input));
    try {
      find_input(file, {}, bad.order);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kFile) << message;
      EXPECT_NE(message.find(bad.why), std::string::npos) << message;
      EXPECT_NE(message.find(file.path()), std::string::npos) << message;
      EXPECT_NE(message.find("). "), std::string::npos) << message << ": it lacks a suggestion";
    }
  }
}

TEST(InputTensors, FindsOnlyTheNamesThatWereGiven) {
  const TemporaryFolder folder;
  const SafetensorsFile file(write_input(folder, {qkv({10, 8, 16}, {12, 2, 16}, {12, 2, 16}), {}}));
  InputNames names;
  names.sinks = "my_sinks";
  EXPECT_THROW(find_input(file, names, {}), Error);
  names = {};
  names.q = "Q";
  EXPECT_THROW(find_input(file, names, {}), Error);
}

// NaN is data: it is read, and comes out where attention puts it.
TEST(InputTensors, ReadsNan) {
  const TemporaryFolder folder;
  const std::string path = folder.file("nan.safetensors");
  const auto writer = SafetensorsWriter::create(
      plan_safetensors(qkv({1, 1, 1}, {1, 1, 1}, {1, 1, 1}, FileDtype::kF32), {}), path, true);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  writer->write_bytes("q", std::as_bytes(std::span(&nan, 1)));
  writer->commit();
  const SafetensorsFile file(path);
  const InputTensors input = find_input(file, {}, {});
  float value = 0.0F;
  const PackedRun all[] = {{0, 1}};
  read_rows(input.q, input.q_grid, all, dense_view(&value, Dtype::kF32, 1, 1, 1));
  EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace ringattn
