// SPDX-License-Identifier: Apache-2.0
// Files of latent attention: every form of latents and matrices gives the same rows, and what can't be right is refused
// with code 3 and a message that names both tensors and their shapes.
#include "ops/mla/mla_tensors.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/error.hpp"
#include "ops/attention_jobs/input_cost.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

TEST(MlaInput, OperationsAreThoseOfTheFormThatComputes) {
  SyntheticInput request;
  request.op = Op::kMla;
  request.tokens = 10;
  request.batch = 2;
  request.heads = 4;
  request.head_dim = 32;
  request.head_dim_v = 24;
  request.rope_dim = 16;
  request.latent_dim = 64;
  const auto flops = [&](MlaForm form) {
    Numerics numerics;
    numerics.form = form;
    return job_flops(JobInput(request, numerics));
  };
  constexpr double kPairs = 2.0 * 10 * 11 / 2;
  EXPECT_EQ(flops(MlaForm::kExpanded), kPairs * 2 * 4 * (32 + 16 + 24));
  EXPECT_EQ(flops(MlaForm::kAbsorbed), kPairs * 2 * 4 * (64 + 16 + 64));
  request.op = Op::kAttention;
  request.kv_heads = 2;
  EXPECT_EQ(job_flops(JobInput(request, {})), kPairs * 2 * 4 * (32 + 24));
}

std::vector<std::byte> read_all(const JobInput& input, SyntheticTensor tensor, std::span<const PackedRun> runs) {
  const MlaSpec& spec = input.mla()->spec;
  int heads = 1;
  int dim = tensor == SyntheticTensor::kKeyRope ? spec.rope_dim : spec.latent_dim;
  if (tensor == SyntheticTensor::kQ) {
    heads = spec.heads;
    dim = spec.head_dim + spec.rope_dim;
  } else if (tensor == SyntheticTensor::kWeightKeys) {
    heads = spec.head_dim;
  } else if (tensor == SyntheticTensor::kWeightValues) {
    heads = spec.head_dim_v;
  }
  const std::int64_t tokens = total_tokens(runs);
  std::vector<std::byte> rows(static_cast<std::size_t>(tokens * heads * dim) * size_of(spec.dtype));
  input.read(tensor, runs, dense_view(static_cast<void*>(rows.data()), spec.dtype, tokens, heads, dim), 1);
  return rows;
}

// Everything that the job reads is what `plain` reads.
void expect_same(const JobInput& input, const JobInput& plain) {
  ASSERT_EQ(input.op(), Op::kMla);
  EXPECT_EQ(input.mla()->spec, plain.mla()->spec);
  EXPECT_EQ(input.job().spec, plain.job().spec);
  EXPECT_EQ(input.job().batch, plain.job().batch);
  const PackedRun queries[] = {{0, 44}};
  EXPECT_EQ(read_all(input, SyntheticTensor::kQ, queries), read_all(plain, SyntheticTensor::kQ, queries));
  const PackedRun all[] = {{0, 122}};
  const PackedRun some[] = {{39, 43}, {17, 18}, {60, 122}};
  for (const std::span<const PackedRun> runs : {std::span<const PackedRun>(all), {some}}) {
    for (const SyntheticTensor tensor : {SyntheticTensor::kLatent, SyntheticTensor::kKeyRope}) {
      EXPECT_EQ(read_all(input, tensor, runs), read_all(plain, tensor, runs));
    }
  }
  const PackedRun heads[] = {{0, 3}};
  const PackedRun last[] = {{2, 3}};
  for (const std::span<const PackedRun> runs : {std::span<const PackedRun>(heads), {last}}) {
    for (const SyntheticTensor tensor : {SyntheticTensor::kWeightKeys, SyntheticTensor::kWeightValues}) {
      EXPECT_EQ(read_all(input, tensor, runs), read_all(plain, tensor, runs));
    }
  }
}

TEST(MlaTensors, AreReadAsTheyLie) {
  const TemporaryFolder folder;
  const NamedTensors tensors = mla_tensors(MlaFile());
  const JobInput input(FileInput{write_tensors(folder.file("rows"), tensors)}, {});
  EXPECT_EQ(input.op(), Op::kMla);
  const MlaSpec& spec = input.mla()->spec;
  EXPECT_EQ(spec.heads, 3);
  EXPECT_EQ(spec.head_dim, 16);
  EXPECT_EQ(spec.rope_dim, 8);
  EXPECT_EQ(spec.head_dim_v, 24);
  EXPECT_EQ(spec.latent_dim, 128);
  EXPECT_EQ(spec.softmax_scale, default_softmax_scale(spec));
  EXPECT_EQ(input.job().spec, expanded_spec(spec, 3));
  EXPECT_EQ(input.out_grid().shape(), (std::vector<std::int64_t>{44, 3, 24}));
  const PackedRun keys[] = {{0, 122}};
  const PackedRun heads[] = {{0, 3}};
  EXPECT_EQ(read_all(input, SyntheticTensor::kLatent, keys), tensors.at("latent").bytes);
  EXPECT_EQ(read_all(input, SyntheticTensor::kKeyRope, keys), tensors.at("k_rope").bytes);
  EXPECT_EQ(read_all(input, SyntheticTensor::kWeightKeys, heads), tensors.at("w_uk").bytes);
  EXPECT_EQ(read_all(input, SyntheticTensor::kWeightValues, heads), tensors.at("w_uv").bytes);
}

TEST(MlaTensors, AreTheSameInEveryForm) {
  const TemporaryFolder folder;
  for (const std::int64_t page_size : {16, 64}) {
    MlaFile shape;
    shape.page_size = page_size;
    const NamedTensors tensors = mla_tensors(shape);
    const JobInput plain(FileInput{write_tensors(folder.file("plain"), tensors)}, {});
    const auto open = [&](const NamedTensors& other) {
      return JobInput(FileInput{write_tensors(folder.file("other"), other)}, {});
    };
    expect_same(open(with_projection(tensors)), plain);
    expect_same(open(with_pages(tensors, shape)), plain);
    expect_same(open(with_pages(with_projection(tensors), shape)), plain);
    // 8 bits are not the numbers that they were made of, but others.
    const JobInput rounded(FileInput{write_tensors(folder.file("rounded"), with_fp8_rounded_latent(tensors))}, {});
    expect_same(open(with_fp8_latent(tensors)), rounded);
    expect_same(open(with_pages(with_fp8_latent(tensors), shape)), rounded);
    const PackedRun keys[] = {{0, 122}};
    EXPECT_NE(read_all(rounded, SyntheticTensor::kLatent, keys), read_all(plain, SyntheticTensor::kLatent, keys));
  }
}

TEST(MlaTensors, OfASeedAreThoseOfTheFile) {
  const TemporaryFolder folder;
  MlaFile shape;
  shape.lengths = shape.q_lens = {122};
  const JobInput file(FileInput{write_tensors(folder.file("rows"), mla_tensors(shape))}, {});
  SyntheticInput made;
  made.op = Op::kMla;
  made.seed = shape.seed;
  made.tokens = 122;
  made.heads = shape.heads;
  made.head_dim = shape.head_dim;
  made.head_dim_v = shape.head_dim_v;
  made.rope_dim = shape.rope_dim;
  made.latent_dim = shape.latent_dim;
  expect_same(JobInput(made, {}), file);
}

TEST(MlaTensors, TakeBatchesOtherNamesAndOrders) {
  const TemporaryFolder folder;
  MlaFile shape;
  shape.lengths = shape.q_lens = {20, 20};
  NamedTensors tensors = mla_tensors(shape);
  tensors.erase("cu_seqlens_q");
  tensors.erase("cu_seqlens_k");
  tensors["q"].shape = {2, 20, 3, 24};
  tensors["latent"].shape = {2, 20, 128};
  tensors["k_rope"].shape = {2, 20, 8};
  const JobInput batched(FileInput{write_tensors(folder.file("batched"), tensors)}, {});
  EXPECT_EQ(batched.job().batch.sequences.size(), 2U);
  EXPECT_EQ(batched.out_grid().shape(), (std::vector<std::int64_t>{2, 20, 3, 24}));
  tensors["q"].shape = {2, 3, 20, 24};
  const JobInput head_major(FileInput{write_tensors(folder.file("bhtd"), tensors), {}, AxisOrder::kBhtd}, {});
  EXPECT_EQ(head_major.mla()->spec, batched.mla()->spec);

  NamedTensors renamed;
  for (auto& [name, tensor] : mla_tensors(MlaFile())) renamed["layer." + name] = tensor;
  FileInput file{write_tensors(folder.file("renamed"), renamed)};
  file.names.q = "layer.q";
  file.names.latent = "layer.latent";
  file.names.k_rope = "layer.k_rope";
  file.names.w_uk = "layer.w_uk";
  file.names.w_uv = "layer.w_uv";
  file.names.cu_seqlens_q = "layer.cu_seqlens_q";
  file.names.cu_seqlens_k = "layer.cu_seqlens_k";
  EXPECT_EQ(JobInput(file, {}).op(), Op::kMla);
}

// Queries in the latent need no w_uk, and O none of w_uv; what the file says is what the job has.
TEST(MlaTensors, MayLackWhatIsTheCallers) {
  const TemporaryFolder folder;
  const MlaFile shape;
  const NamedTensors tensors = mla_tensors(shape);
  NamedTensors absorbed = with_queries_in_latent(tensors, shape);
  Numerics numerics;
  const auto open = [&](const NamedTensors& written, int latent_dim = 0) {
    return JobInput(FileInput{write_tensors(folder.file("in"), written), {}, {}, {}, latent_dim}, numerics);
  };
  const JobInput beside = open(absorbed);
  const MlaSpec& spec = beside.mla()->spec;
  EXPECT_TRUE(spec.q_in_latent && !spec.out_in_latent);
  EXPECT_EQ(spec.head_dim, 128);
  EXPECT_EQ(spec.head_dim_v, 24);
  EXPECT_EQ(spec.softmax_scale, default_softmax_scale(MlaSpec{.head_dim = 16, .rope_dim = 8}));
  EXPECT_EQ(beside.nope_dim(), 16);
  EXPECT_EQ(beside.form().form, MlaForm::kAbsorbed);
  absorbed.erase("w_uk");
  EXPECT_EQ(error_of([&] { open(absorbed); }).code(), ErrorCode::kUsage) << "of which scale?";
  numerics.softmax_scale = 0.25;
  EXPECT_FALSE(open(absorbed).nope_dim().has_value());
  EXPECT_EQ(open(absorbed).mla()->spec.softmax_scale, 0.25F);
  EXPECT_EQ(open(with_pages(absorbed, shape)).mla()->spec.rope_dim, 8) << "w_uv says what the latent is";
  absorbed.erase("w_uv");
  for (const NamedTensors& rows : {absorbed, with_fp8_latent(absorbed), with_pages(with_fp8_latent(absorbed), shape)}) {
    const JobInput alone = open(rows);
    EXPECT_TRUE(alone.mla()->spec.q_in_latent && alone.mla()->spec.out_in_latent);
    EXPECT_EQ(alone.mla()->spec.latent_dim, 128);
    EXPECT_EQ(alone.mla()->spec.rope_dim, 8);
    EXPECT_EQ(alone.job().spec.head_dim, 136);
    EXPECT_EQ(alone.out_grid().shape(), (std::vector<std::int64_t>{44, 3, 128}));
  }
  EXPECT_EQ(open(with_pages(absorbed, shape), 128).mla()->spec, open(absorbed).mla()->spec);
  NamedTensors unmultiplied = tensors;
  unmultiplied.erase("w_uv");
  numerics = {};
  const MlaSpec latent = open(unmultiplied).mla()->spec;
  EXPECT_TRUE(!latent.q_in_latent && latent.out_in_latent);
  EXPECT_EQ(latent.head_dim, 16);
  EXPECT_EQ(latent.head_dim_v, 128);
}

struct Refusal {
  const char* what;
  std::function<void(NamedTensors&)> spoil;
  std::vector<const char*> parts;
};

TEST(MlaTensors, AreRefusedWithBothShapes) {
  const auto missing = [](const char* name) { return [name](NamedTensors& t) { t.erase(name); }; };
  const auto shaped = [](const char* name, std::vector<std::int64_t> shape) {
    return [name, shape](NamedTensors& t) {
      std::int64_t elements = 1;
      for (const std::int64_t extent : shape) elements *= extent;
      t[name].shape = shape;
      t[name].bytes.resize(static_cast<std::size_t>(elements * bits_of(t[name].dtype) / 8));
    };
  };
  const Refusal cases[] = {
      {"no rotary keys", missing("k_rope"), {"k_rope"}},
      {"no w_uk", missing("w_uk"), {"w_uk"}},
      {"other tokens", shaped("k_rope", {121, 8}), {"`k_rope`", "[121, 8]", "`latent`", "[122, 128]"}},
      {"three axes", shaped("latent", {122, 1, 128}), {"`latent`", "it must have 2 axes"}},
      {"other latent dims", shaped("latent", {122, 64}), {"`latent`", "[122, 64]", "`w_uk`", "[3, 16, 128]"}},
      {"matrices of other latents", shaped("w_uv", {3, 24, 64}), {"`w_uv`", "[3, 24, 64]", "[3, 16, 128]"}},
      {"other heads", shaped("w_uk", {2, 16, 128}), {"`w_uk`", "[2, 16, 128]", "`q`", "[44, 3, 24]"}},
      {"other head dims", shaped("w_uk", {3, 17, 128}), {"`w_uk`", "[3, 17, 128]", "8 of its dims rotary"}},
      {"values of other heads", shaped("w_uv", {4, 24, 128}), {"`w_uv`", "[4, 24, 128]", "`q`"}},
      {"queries all rotary", shaped("q", {44, 3, 8}), {"`q`", "[44, 3, 8]", "`k_rope`", "[122, 8]"}},
      {"an empty matrix", shaped("w_uv", {3, 0, 128}), {"`w_uv`", "none of its axes may be empty"}},
      {"another dtype", [](NamedTensors& t) { t["w_uk"].dtype = FileDtype::kF16; }, {"`w_uk`", "q is BF16"}},
      {"keys besides", [](NamedTensors& t) { t["k"] = t["q"]; }, {"holds keys and latents"}},
      {"matrices twice",
       [](NamedTensors& t) { t["kv_b_proj"] = with_projection(t)["kv_b_proj"]; },
       {"`kv_b_proj` and `w_uk`"}},
      {"latents twice",
       [](NamedTensors& t) { t["latent_fp8"] = with_fp8_latent(t)["latent_fp8"]; },
       {"holds latents in 2 forms"}},
      {"a projection of other heads",
       [&](NamedTensors& t) {
         t = with_projection(t);
         shaped("kv_b_proj", {121, 128})(t);
       },
       {"`kv_b_proj`", "[121, 128]", "`q`"}},
      {"queries in the latent of a projection",
       [](NamedTensors& t) { t = with_projection(with_queries_in_latent(t, MlaFile())); },
       {"`kv_b_proj`", "`q`", "[44, 3, 136]", "is in the latent", "how many of the 40 rows of a head belong to w_uk",
        "Give w_uk and w_uv instead"}},
      {"no matrices", [](NamedTensors& t) { t.erase("w_uk"), t.erase("w_uv"); }, {"w_uk"}},
      {"w_uk of other heads beside queries in the latent",
       [&](NamedTensors& t) {
         t = with_queries_in_latent(t, MlaFile());
         shaped("w_uk", {2, 16, 128})(t);
       },
       {"`w_uk`", "[2, 16, 128]", "`q`", "[44, 3, 136]"}},
      {"pages of which nothing says what is the latent",
       [](NamedTensors& t) {
         t = with_pages(with_queries_in_latent(t, MlaFile()), MlaFile());
         t.erase("w_uk"), t.erase("w_uv");
       },
       {"`latent_pages`", "[10, 16, 136]", "latent_dim follows from the matrices", "latent_dim = 512"}},
      {"codes of another row",
       [&](NamedTensors& t) {
         t = with_fp8_latent(t);
         shaped("latent_fp8", {122, 149})(t);
       },
       {"`latent_fp8`", "[122, 149]", "132 bytes", "`w_uk`"}},
      {"codes that are none",
       [](NamedTensors& t) {
         t["latent_fp8"] = t["latent"];
         t.erase("latent");
       },
       {"`latent_fp8`", "it must be U8"}},
      {"codes and rotary keys",
       [](NamedTensors& t) {
         const NamedTensor k_rope = t["k_rope"];
         t = with_fp8_latent(t);
         t["k_rope"] = k_rope;
       },
       {"`latent_fp8`", "and k_rope (FP8 rows have their rotary keys)"}},
      {"pages of 24",
       [](NamedTensors& t) {
         t = with_pages(t, MlaFile());
         t["latent_pages"].shape = {6, 24, 136};
         t["latent_pages"].bytes.resize(6 * 24 * 136 * 2);
       },
       {"`latent_pages`", "its pages hold 24 tokens"}},
      {"pages without rotary keys",
       [&](NamedTensors& t) {
         t = with_pages(t, MlaFile());
         shaped("latent_pages", {10, 16, 128})(t);
       },
       {"`latent_pages`", "[10, 16, 128]", "a rotary key follows the latent"}},
  };
  const TemporaryFolder folder;
  for (const Refusal& refusal : cases) {
    SCOPED_TRACE(refusal.what);
    NamedTensors tensors = mla_tensors(MlaFile());
    refusal.spoil(tensors);
    const FileInput file{write_tensors(folder.file("bad"), tensors)};
    const Error error = error_of([&] { JobInput(file, {}); });
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    for (const char* part : refusal.parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " is not in " << error.what();
    }
  }
  // A role's own name is no misspelling of another's.
  NamedTensors without = mla_tensors(MlaFile());
  without.erase("w_uk");
  const std::string absent =
      error_of([&] { JobInput(FileInput{write_tensors(folder.file("bad"), without)}, {}); }).what();
  EXPECT_EQ(absent.find("Did you mean"), std::string::npos) << absent;
  EXPECT_NE(absent.find("Name it with "), std::string::npos) << absent;
  without["w_uK"] = without["w_uv"];
  const std::string near =
      error_of([&] { JobInput(FileInput{write_tensors(folder.file("bad"), without)}, {}); }).what();
  EXPECT_NE(near.find("Did you mean `w_uK`?"), std::string::npos) << near;
  const FileInput good{write_tensors(folder.file("good"), mla_tensors(MlaFile()))};
  Numerics block_mask;
  block_mask.block_mask = "window:16";
  EXPECT_EQ(error_of([&] { JobInput(good, block_mask); }).code(), ErrorCode::kUsage);
}

// Names that exclude each other are no choice, whatever the file holds.
TEST(MlaTensors, AreNamedInOneForm) {
  const TemporaryFolder folder;
  const MlaFile shape;
  NamedTensors tensors = with_pages(mla_tensors(shape), shape);
  for (const auto& [name, tensor] : mla_tensors(shape)) tensors[name] = tensor;
  tensors.erase("cu_seqlens_k");
  const std::string path = write_tensors(folder.file("both"), tensors);
  InputNames names;
  names.latent = "latent";
  names.latent_pages = "latent_pages";
  const Error both = error_of([&] { JobInput(FileInput{path, names}, {}); });
  EXPECT_EQ(both.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(both.what()).find("names latents in 2 forms"), std::string::npos) << both.what();
  names.latent.reset();
  EXPECT_EQ(JobInput(FileInput{path, names}, {}).op(), Op::kMla);
  names.w_uk = "w_uk";
  names.kv_b_proj = "w_uv";
  const Error matrices = error_of([&] { JobInput(FileInput{path, names}, {}); });
  EXPECT_EQ(matrices.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(matrices.what()).find("names kv_b_proj and w_uk"), std::string::npos) << matrices.what();
  names = {};
  names.k = "q";
  names.latent = "latent";
  const Error keys = error_of([&] { JobInput(FileInput{path, names}, {}); });
  EXPECT_EQ(keys.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(keys.what()).find("names keys and latents"), std::string::npos) << keys.what();
}

}  // namespace
}  // namespace ringattn::testing
