// SPDX-License-Identifier: Apache-2.0
// A kv_b_proj in e4m3 with its blocks' scales, as DeepSeek-V3's checkpoints have it, gives the matrix that they stand
// for; quantized values without scales, and scales without values, are refused.
#include "io/block_scales.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "base/dtype.hpp"
#include "base/e4m3.hpp"
#include "base/error.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_files.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

std::vector<std::byte> read_matrix(const JobInput& input, SyntheticTensor tensor, const PackedRun& heads) {
  const MlaSpec& spec = input.mla()->spec;
  const int dim = tensor == SyntheticTensor::kWeightKeys ? spec.head_dim : spec.head_dim_v;
  std::vector<std::byte> rows(static_cast<std::size_t>(heads.tokens() * dim * spec.latent_dim) * size_of(spec.dtype));
  input.read(tensor, {&heads, 1},
             dense_view(static_cast<void*>(rows.data()), spec.dtype, heads.tokens(), dim, spec.latent_dim), 1);
  return rows;
}

void expect_same(const JobInput& input, const JobInput& plain) {
  EXPECT_EQ(input.mla()->spec, plain.mla()->spec);
  for (const SyntheticTensor tensor : {SyntheticTensor::kWeightKeys, SyntheticTensor::kWeightValues}) {
    for (const PackedRun& heads : {PackedRun{0, 3}, PackedRun{1, 2}}) {
      EXPECT_EQ(read_matrix(input, tensor, heads), read_matrix(plain, tensor, heads));
    }
  }
}

// A kv_b_proj of three heads in e4m3, beside the scales of its blocks.
struct ScaledFile {
  NamedTensors tensors;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

ScaledFile with_scales(std::int64_t head_rows, std::int64_t columns) {
  MlaFile shape;
  shape.head_dim = static_cast<int>(head_rows) - shape.head_dim_v;
  shape.latent_dim = static_cast<int>(columns);
  ScaledFile made{with_projection(mla_tensors(shape)), 3 * head_rows, columns};
  const std::int64_t down = (made.rows + 127) / 128, across = (columns + 127) / 128;
  NamedTensor codes{FileDtype::kF8E4m3, {made.rows, columns}, {}};
  std::vector<float> scales;
  for (std::int64_t block = 0; block < down * across; ++block) {
    scales.push_back(0.01F + 0.003F * static_cast<float>(block));
  }
  for (std::int64_t row = 0; row < made.rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto code = static_cast<std::uint8_t>((row * 37 + column * 11) % 127 + (row % 2) * 128);
      codes.bytes.push_back(std::byte{code});
    }
  }
  made.tensors["kv_b_proj"] = codes;
  made.tensors["kv_b_proj_scale_inv"] = float_list(scales, {down, across});
  return made;
}

TEST(BlockScales, AreMultipliedWithTheQuantizedValues) {
  const TemporaryFolder folder;
  for (const auto& [head_rows, columns] : {std::pair<std::int64_t, std::int64_t>{40, 128}, {100, 200}}) {
    SCOPED_TRACE(head_rows);
    const ScaledFile scaled = with_scales(head_rows, columns);
    // The same matrix in bf16: an element is the product, which is exact in double, rounded once.
    NamedTensors rounded = scaled.tensors;
    rounded.erase("kv_b_proj_scale_inv");
    NamedTensor& matrix = rounded["kv_b_proj"];
    const NamedTensor& codes = scaled.tensors.at("kv_b_proj");
    const NamedTensor& scales = scaled.tensors.at("kv_b_proj_scale_inv");
    matrix = {FileDtype::kBf16, codes.shape, std::vector<std::byte>(2 * codes.bytes.size())};
    const std::int64_t across = scales.shape[1];
    for (std::int64_t at = 0; at < scaled.rows * columns; ++at) {
      float scale = 0.0F;
      const std::int64_t block = at / columns / 128 * across + at % columns / 128;
      std::memcpy(&scale, scales.bytes.data() + 4 * block, 4);
      const double product =
          static_cast<double>(e4m3_to_float(std::to_integer<std::uint8_t>(codes.bytes[static_cast<std::size_t>(at)]))) *
          static_cast<double>(scale);
      // The nearer of two neighbours; a tie goes to the even one.
      const std::uint16_t low =
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(product)) >> 16);
      std::uint16_t best = low;
      for (const std::uint16_t other : {static_cast<std::uint16_t>(low - 1), static_cast<std::uint16_t>(low + 1)}) {
        const double d = std::abs(static_cast<double>(bf16_to_float(other)) - product);
        const double now = std::abs(static_cast<double>(bf16_to_float(best)) - product);
        if (d < now || (d == now && other % 2 == 0)) best = other;
      }
      std::memcpy(matrix.bytes.data() + 2 * at, &best, 2);
    }
    const JobInput plain(FileInput{write_tensors(folder.file("plain"), rounded)}, {});
    const JobInput input(FileInput{write_tensors(folder.file("fp8"), scaled.tensors)}, {});
    EXPECT_EQ(input.unread().count, 0U);
    expect_same(input, plain);
    // By the checkpoint's names.
    NamedTensors named = scaled.tensors;
    const std::string weight = "model.layers.0.self_attn.kv_b_proj.weight";
    named[weight] = named.extract("kv_b_proj").mapped();
    named[weight + "_scale_inv"] = named.extract("kv_b_proj_scale_inv").mapped();
    FileInput request{write_tensors(folder.file("named"), named)};
    request.names.kv_b_proj = weight;
    expect_same(JobInput(request, {}), plain);
  }
}

// 1.125 times 7835193 lies an eighth above the middle of two numbers of bf16, and fp32 has only the middle.
TEST(BlockScales, ProductsAreRoundedOnce) {
  const TemporaryFolder folder;
  ScaledFile scaled = with_scales(40, 128);
  std::ranges::fill(scaled.tensors["kv_b_proj"].bytes, std::byte{0x39});
  scaled.tensors["kv_b_proj_scale_inv"] = float_list({7835193.0F}, {1, 1});
  const JobInput input(FileInput{write_tensors(folder.file("fp8"), scaled.tensors)}, {});
  const std::vector<std::byte> rows = read_matrix(input, SyntheticTensor::kWeightKeys, {0, 3});
  for (std::size_t at = 0; at < rows.size(); at += 2) {
    ASSERT_EQ(load_element(rows.data() + at, Dtype::kBf16), 8847360.0F) << "twice: 8781824";
  }
}

TEST(BlockScales, ThatDontFitAreRefused) {
  const TemporaryFolder folder;
  const ScaledFile scaled = with_scales(40, 128);
  struct Bad {
    std::string hint;
    std::function<void(NamedTensors&)> spoil;
  };
  const float inf = std::numeric_limits<float>::infinity();
  const Bad cases[] = {
      {"are [1, 1], and the file has none", [](NamedTensors& t) { t.erase("kv_b_proj_scale_inv"); }},
      {"`kv_b_proj_scale_inv` of",
       [](NamedTensors& t) {
         t["kv_b_proj_scale_inv"] = float_list({1, 1}, {1, 2});
       }},
      {"[0, 0] is inf",
       [&](NamedTensors& t) {
         t["kv_b_proj_scale_inv"] = float_list({inf}, {1, 1});
       }},
      {"scales are F32",
       [](NamedTensors& t) {
         t["kv_b_proj_scale_inv"] = int_list({1}, {1, 1});
       }},
      {"either may belong to kv_b_proj",
       [](NamedTensors& t) {
         t["a.kv_b_proj.weight_scale_inv"] = t["b.kv_b_proj.weight_scale_inv"] =
             t.extract("kv_b_proj_scale_inv").mapped();
       }},
      {"the scales of an F8_E4M3 matrix",
       [](NamedTensors& t) {
         t["kv_b_proj"].dtype = FileDtype::kBf16;
         t["kv_b_proj"].bytes.resize(2 * t["kv_b_proj"].bytes.size());
       }},
      {"scales of F8_E4M3 are applied only to kv_b_proj",
       [](NamedTensors& t) {
         t = mla_tensors({});
         t["w_uk"].dtype = FileDtype::kF8E4m3;
         t["w_uk"].bytes.resize(t["w_uk"].bytes.size() / 2);
       }},
  };
  for (const Bad& bad : cases) {
    SCOPED_TRACE(bad.hint);
    NamedTensors tensors = scaled.tensors;
    bad.spoil(tensors);
    const std::string path = write_tensors(folder.file("bad"), tensors);
    const Error error = error_of([&] { JobInput(FileInput{path}, {}); });
    EXPECT_EQ(error.code(), ErrorCode::kFile);
    EXPECT_NE(std::string(error.what()).find(bad.hint), std::string::npos) << error.what();
  }
  // Codes are looked at when they are read.
  const auto refused = [&](NamedTensors tensors) {
    const JobInput input(FileInput{write_tensors(folder.file("read"), tensors)}, {});
    return std::string(error_of([&] { read_matrix(input, SyntheticTensor::kWeightKeys, {0, 3}); }).what());
  };
  NamedTensors nan = scaled.tensors;
  nan["kv_b_proj"].bytes[5 * 128 + 7] = std::byte{0xff};
  EXPECT_NE(refused(nan).find("its quantized value at [5, 7] is NaN"), std::string::npos);
  NamedTensors large = scaled.tensors;
  large["kv_b_proj_scale_inv"] = float_list({3e38F}, {1, 1});
  EXPECT_NE(refused(large).find("beyond bf16"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
