// SPDX-License-Identifier: Apache-2.0
// Decoding over FP8 latents: the bits that the same kernel has over the latents which dequantize_latent_rows()
// gives. Every kernel that reads such rows. What no sequence owns is 0xff: quantized values and numbers that are NaN.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/decode_runner.hpp"

namespace ringattn::testing {
namespace {

constexpr int kLatent = 512;
constexpr int kRope = 64;

struct Latents {
  AttentionInputs plain;         // as they are unpacked
  std::vector<std::byte> codes;  // rows of 656 bytes
};

class MlaFp8Cache : public ::testing::TestWithParam<DecodeRow> {
 protected:
  void SetUp() override {
    const DecodeSpec decode{spec(16), true, {latent_format(kRope), {}}};
    if (!GetParam().missing(decode).empty()) GTEST_SKIP() << "reads no FP8 latents";
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    if (on_device()) group_ = GetParam().make_kernel(decode, *GetParam().make_backend({1, kNoDevice}))->kv_split_keys();
  }

  static AttentionSpec spec(int heads, const Mask& mask = {-1, 0}) {
    AttentionSpec of = make_spec(Dtype::kBf16, heads, 1, kLatent + kRope, mask);
    of.head_dim_v = kLatent;
    of.softmax_scale = 0.0722F;  // of 192 dims, as in a model
    return of;
  }

  // Blocks of 128 numbers are of sizes from 2^-3 to 2^2, so that no scale is another's.
  static Latents latents(const AttentionSpec& of, int rows, const std::vector<std::int64_t>& lengths,
                         std::uint64_t seed) {
    Latents made{decode_inputs(of, rows, lengths, seed), {}};
    std::vector<std::byte>& k = made.plain.k;
    const std::int64_t tokens = made.plain.k_tokens();
    for (std::int64_t i = 0; i < tokens * of.head_dim; ++i) {
      const auto power = static_cast<int>((i / of.head_dim * 5 + i % of.head_dim / kLatentScaleBlock * 7) % 6) - 3;
      std::byte* const at = k.data() + 2 * i;
      store_element(at, of.dtype, std::ldexp(load_element(at, of.dtype), power));
    }
    made.codes.resize(static_cast<std::size_t>(tokens * latent_row_bytes(kLatent, kRope)));
    const MutableTensorView all = dense_view(static_cast<void*>(k.data()), of.dtype, tokens, 1, of.head_dim);
    const auto columns = [&](int first, int dim) {
      MutableTensorView view = all;
      view.data = all.at(0, 0) + 2 * first;
      view.dim = dim;
      return view;
    };
    const std::int64_t bytes = latent_row_bytes(kLatent, kRope);
    if (tokens > 0) {
      quantize_latent_rows(columns(0, kLatent), columns(kLatent, kRope), made.codes.data(), bytes);
      dequantize_latent_rows(made.codes.data(), bytes, columns(0, kLatent), columns(kLatent, kRope));
    }
    made.plain = with_values_in_keys(made.plain);
    return made;
  }

  static AttentionResult run(const Latents& of, CacheLayout layout, bool codes) {
    layout.values_in_keys = true;
    if (codes) layout.codes = of.codes;
    return DecodeRunner(GetParam(), of.plain, layout, 2).run();
  }
  void expect_same(const Latents& of, const CacheLayout& layout, const AttentionResult& expected) const {
    EXPECT_TRUE(run(of, layout, true).same_bits(expected))
        << describe(of.plain.spec) << ", page " << layout.page_size << ", slices " << layout.slices;
  }
  static bool on_device() { return GetParam().backend == "cuda"; }

  std::int64_t group_ = 4096;  // keys of a KV split; on the CPU, whose splits are 8,192, half of one
};

TEST_P(MlaFp8Cache, OneTile) {
  const Latents of = latents(spec(16), 1, {64}, 1);
  const AttentionResult expected = run(of, {}, false);
  EXPECT_EQ(check_accuracy(of.plain, expected.out, expected.lse), "");
  for (const int slices : {1, 2}) expect_same(of, {.slices = slices}, expected);
}

TEST_P(MlaFp8Cache, EveryPageAndForm) {
  // 128 heads are two blocks of rows.
  for (const int heads : on_device() ? std::vector{16, 64, 128} : std::vector{16, 128}) {
    const Latents of = latents(spec(heads), 2, {group_ + 77, 130, 1, 64, 0, 1000}, 2);
    const AttentionResult expected = run(of, {}, false);
    for (const std::int64_t page : {0, 16, 32, 64, 128, 256}) {
      for (const int slices : {1, 2}) {
        if (slices > 1 && !on_device()) continue;
        expect_same(of, {.page_size = page, .shuffle = 5, .strided = page == 32, .slices = slices}, expected);
      }
    }
  }
}

TEST_P(MlaFp8Cache, LengthsAroundEdges) {
  for (const int heads : {16, 128}) {
    const Latents of = latents(spec(heads), 1, {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 191}, 3);
    const AttentionResult expected = run(of, {}, false);
    for (const int slices : on_device() ? std::vector{1, 2} : std::vector{1}) {
      expect_same(of, {.slices = slices}, expected);
      expect_same(of, {.page_size = 16, .slices = slices}, expected);
    }
    const Latents groups = latents(spec(heads), 1, {group_ - 1, group_, group_ + 1, 2 * group_ + 65}, 4);
    expect_same(groups, {.page_size = 64}, run(groups, {}, false));
  }
}

TEST_P(MlaFp8Cache, MasksCapAndSinks) {
  for (const Mask& mask : {Mask{-1, -1}, Mask{100, 0}, Mask{0, 0}}) {
    AttentionSpec of = spec(70, mask);
    of.sinks = true;
    of.softcap = 20.0F;
    const Latents made = latents(of, 3, {700, 130, 3, 66}, 5);
    const AttentionResult expected = run(made, {}, false);
    for (const int slices : {1, 2}) expect_same(made, {.page_size = 64, .slices = slices}, expected);
  }
}

// More work tiles than SMs: pipeline stages pass from work tile to work tile.
TEST_P(MlaFp8Cache, ManyShortWorkTiles) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < (on_device() ? 256 : 24); ++i) lengths.push_back(i * 37 % 331);
  for (const int heads : {16, 70}) {
    const Latents of = latents(spec(heads), 1, lengths, 6);
    const AttentionResult expected = run(of, {}, false);
    for (const int slices : on_device() ? std::vector{0, 1, 2} : std::vector{0})
      expect_same(of, {.page_size = 16, .slices = slices}, expected);
  }
}

TEST_P(MlaFp8Cache, PartitionsMergeToTheWhole) {
  const Latents of = latents(spec(16), 2, {2 * group_ + 9, 40, group_}, 7);
  const AttentionResult expected = run(of, {}, false);
  for (const int count : {2, 3}) {
    std::vector<std::unique_ptr<DecodeRunner>> runners;
    std::vector<const float*> records;
    for (int i = 0; i < count; ++i) {
      runners.push_back(std::make_unique<DecodeRunner>(
          GetParam(), of.plain,
          CacheLayout{.page_size = 64, .partition = {i, count}, .values_in_keys = true, .codes = of.codes}, 2));
      runners.back()->make_partials(
          splits_per_partition(2 * group_ + 9, count, runners.back()->kernel().kv_split_keys()));
      runners.back()->enqueue_leave(runners.back()->backend().stream());
      runners.back()->wait();
      records.push_back(runners.back()->partials());
    }
    runners[0]->enqueue_merge(records, runners[0]->backend().stream());
    EXPECT_TRUE(runners[0]->read().same_bits(expected)) << count;
  }
}

// A code that is NaN taints the sequence that it is in, and no other.
TEST_P(MlaFp8Cache, AnInvalidValue) {
  const Latents clean = latents(spec(16), 1, {130, 300}, 8);
  Latents planted = clean;
  planted.codes[static_cast<std::size_t>(77 * latent_row_bytes(kLatent, kRope) + 200)] = std::byte{0x7f};
  const AttentionResult expected = run(clean, {}, true), got = run(planted, {.page_size = 64}, true);
  const std::size_t half = expected.out.size() / 2;
  EXPECT_EQ(std::memcmp(got.out.data() + half, expected.out.data() + half, half), 0);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_TRUE(std::isnan(got.lse[i])) << i;
  for (std::size_t i = 16; i < 32; ++i) EXPECT_EQ(got.lse[i], expected.lse[i]) << i;
}

INSTANTIATE_TEST_SUITE_P(Kernels, MlaFp8Cache,
                         ::testing::ValuesIn(kernel_table<DecodeSpec>().begin(), kernel_table<DecodeSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ringattn::testing
