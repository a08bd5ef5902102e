// SPDX-License-Identifier: Apache-2.0
// RoPE, every kernel of the table: against fp64, with the same bits however rows are laid out, on every SIMD target and
// device, and frequencies of every type.
#include "kernels/rope/rope.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <tuple>
#include <vector>

#include "base/device_timeouts.hpp"
#include "base/error.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/decode/cache_update.hpp"
#include "kernels/rope/rope_angle.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "kernels/rope/rope_oracle.hpp"
#include "tests/kernels/common/forced_target.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/checks.hpp"

namespace ringattn {
inline void PrintTo(const KernelRow<RopeSpec>& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

constexpr Dtype kRopeDtypes[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};
constexpr RopePairs kBothPairs[] = {RopePairs::kHalfSplit, RopePairs::kInterleaved};
constexpr std::int64_t kPositions[] = {0, 1, 2, 31, 4095, 131071, (1 << 21) + 3, -7};
constexpr int kTokens = std::size(kPositions);

RopeParameters parameters_of(RopeType type) {
  RopeParameters p;
  p.type = type;
  p.theta = 500000.0;
  const bool original = type == RopeType::kLlama3 || type == RopeType::kYarn || type == RopeType::kLongrope;
  if (original) p.original_max_position_embeddings = 8192.0;
  if (type != RopeType::kDefault) p.factor = 8.0;
  if (type == RopeType::kLlama3) {
    p.low_freq_factor = 1.0;
    p.high_freq_factor = 4.0;
  }
  if (type == RopeType::kProportional) p.partial_rotary_factor = 0.5;
  if (type == RopeType::kDynamic) p.max_position_embeddings = 4096.0;
  if (type == RopeType::kDynamic || type == RopeType::kLongrope) p.length = 1 << 16;
  return p;
}

RopeSpec spec_of(RopeType type, Dtype dtype, int head_dim, RopePairs pairs, bool exact = false) {
  RopeParameters p = parameters_of(type);
  if (type == RopeType::kLongrope) {
    p.short_factor.assign(static_cast<std::size_t>(head_dim) / 2, 1.0);
    p.long_factor.assign(static_cast<std::size_t>(head_dim) / 2, 3.5);
  }
  return make_rope_spec(p, dtype, head_dim, pairs, exact);
}

// q and k of one call in one buffer, [tokens, heads + kv_heads + gap, head_dim], as in a fused projection.
struct RopeData {
  RopeSpec spec;
  std::int64_t tokens = kTokens, heads = 3, kv_heads = 2, gap = 0;
  std::vector<std::int64_t> positions;  // [axes, tokens]
  std::vector<std::byte> rows;

  std::int64_t all_heads() const { return heads + kv_heads + gap; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(spec.head_dim) * size_of(spec.dtype); }
  const std::byte* row(std::int64_t token, std::int64_t head) const {
    return rows.data() + static_cast<std::size_t>(token * all_heads() + head) * row_bytes();
  }
};

RopeData data_of(const RopeSpec& spec, std::int64_t gap = 0) {
  RopeData data;
  data.spec = spec;
  data.gap = gap;
  for (int axis = 0; axis < spec.axis_count(); ++axis) {
    for (int token = 0; token < kTokens; ++token) data.positions.push_back(kPositions[(token + axis) % kTokens]);
  }
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  data.rows.resize(static_cast<std::size_t>(data.tokens * data.all_heads()) * data.row_bytes());
  for (std::size_t i = 0; i < data.rows.size(); i += size_of(spec.dtype)) {
    store_element(data.rows.data() + i, spec.dtype, normal(random));
  }
  return data;
}

struct RopeWay {
  int threads = 1;
  bool in_place = false;
  bool inverse = false;
  bool is_int64 = true;
};

// The rows after a rotation; those of the gap are kept.
std::vector<std::byte> rotated(const KernelRow<RopeSpec>& row, const RopeData& data, const RopeWay& way = {}) {
  const auto backend = row.make_backend({way.threads, 0});
  const auto kernel = row.make_kernel(data.spec, *backend);
  const auto upload = [&](const void* from, std::size_t bytes) {
    Buffer buffer = backend->allocate(bytes);
    const auto count = static_cast<std::int64_t>(bytes);
    backend->copy_rows(buffer.data(), count, from, count, count, 1, backend->stream());
    return buffer;
  };
  const std::vector<std::int32_t> narrow(data.positions.begin(), data.positions.end());
  const Buffer positions = way.is_int64 ? upload(data.positions.data(), 8 * data.positions.size())
                                        : upload(narrow.data(), 4 * narrow.size());
  const Buffer from = upload(data.rows.data(), data.rows.size());
  const Buffer to = upload(data.rows.data(), data.rows.size());
  const auto view = [&](const Buffer& buffer, std::int64_t head, std::int64_t heads) {
    MutableTensorView all = dense_view(static_cast<void*>(buffer.data()), data.spec.dtype, data.tokens,
                                       data.all_heads(), data.spec.head_dim);
    all.data = all.at(0, head);
    all.heads = heads;
    return all;
  };
  const Buffer& target = way.in_place ? from : to;
  const RopeTensor tensors[] = {{view(from, 0, data.heads), view(target, 0, data.heads)},
                                {view(from, data.heads, data.kv_heads), view(target, data.heads, data.kv_heads)}};
  kernel->rotate({{positions.data(), way.is_int64, data.tokens}, tensors, way.inverse}, backend->stream(), {});
  std::vector<std::byte> out(data.rows.size());
  const auto bytes = static_cast<std::int64_t>(out.size());
  backend->copy_rows(out.data(), bytes, target.data(), bytes, bytes, 1, backend->stream());
  backend->synchronize(backend->stream(), DeviceTimeouts::for_queue(), {});
  return out;
}

// The first element beyond what the oracle allows; empty: none.
std::string inaccuracy(const RopeData& data, const std::vector<std::byte>& out, bool inverse) {
  const auto dim = static_cast<std::size_t>(data.spec.head_dim);
  const std::size_t element = size_of(data.spec.dtype);
  std::vector<float> x(dim);
  std::vector<double> y(dim), allowed(dim);
  for (std::int64_t token = 0; token < data.tokens; ++token) {
    std::vector<std::int64_t> positions;
    for (std::int64_t axis = 0; axis < data.spec.axis_count(); ++axis) {
      positions.push_back(data.positions[static_cast<std::size_t>(axis * data.tokens + token)]);
    }
    for (std::int64_t head = 0; head < data.heads + data.kv_heads; ++head) {
      const std::byte* const row = data.row(token, head);
      const std::byte* const made = out.data() + (row - data.rows.data());
      for (std::size_t d = 0; d < dim; ++d) x[d] = load_element(row + d * element, data.spec.dtype);
      rope_oracle(data.spec, positions, inverse, x, y, allowed);
      for (std::size_t d = 0; d < dim; ++d) {
        const double value = load_element(made + d * element, data.spec.dtype);
        const bool same = std::isnan(y[d]) ? std::isnan(value) : value == y[d];
        if (same || std::abs(value - y[d]) <= allowed[d]) continue;
        return fmt::format("token {}, head {}, element {}: {}, not {}", token, head, d, value, y[d]);
      }
    }
  }
  return {};
}

class Rope : public ::testing::TestWithParam<KernelRow<RopeSpec>> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }
  const KernelRow<RopeSpec>& row() const { return GetParam(); }
  void expect_accurate(const RopeData& data, bool inverse = false) const {
    count_check();
    EXPECT_EQ(inaccuracy(data, rotated(row(), data, {.inverse = inverse}), inverse), "") << describe(data.spec);
  }
  void expect_same(const std::vector<std::byte>& a, const std::vector<std::byte>& b, const std::string& what) const {
    count_check();
    EXPECT_TRUE(a == b) << what;
  }

 private:
  std::int64_t checks_before_ = 0;
};

TEST_P(Rope, IsAccurate) {
  for (const std::string_view name : rope_type_names()) {
    const auto type = static_cast<RopeType>(std::ranges::find(rope_type_names(), name) - rope_type_names().begin());
    for (const Dtype dtype : kRopeDtypes) {
      for (const RopePairs pairs : kBothPairs) {
        for (const bool exact : {false, true}) expect_accurate(data_of(spec_of(type, dtype, 64, pairs, exact)));
      }
    }
  }
  // Heads and rotary dims of every kind of remainder.
  for (const auto& [dim, part] :
       {std::pair{32, 1.0}, {80, 0.4}, {96, 1.0}, {128, 0.25}, {256, 0.5}, {512, 1.0}, {6, 1.0}}) {
    for (const RopePairs pairs : kBothPairs) {
      RopeParameters p;
      p.partial_rotary_factor = part;
      for (const Dtype dtype : kRopeDtypes) {
        const RopeData data = data_of(make_rope_spec(p, dtype, dim, pairs, false));
        expect_accurate(data);
        expect_accurate(data, true);
      }
    }
  }
  RopeParameters sections;
  sections.mrope_section = {8, 12, 12};
  expect_accurate(data_of(make_rope_spec(sections, Dtype::kF32, 64, RopePairs::kHalfSplit, false)));
  sections.mrope_interleaved = true;
  sections.mrope_section = {12, 10, 10};
  expect_accurate(data_of(make_rope_spec(sections, Dtype::kBf16, 64, RopePairs::kHalfSplit, false)));
}

TEST_P(Rope, TheSameBitsInAnyArrangement) {
  for (const Dtype dtype : kRopeDtypes) {
    for (const RopePairs pairs : kBothPairs) {
      RopeParameters p = parameters_of(RopeType::kYarn);
      p.partial_rotary_factor = 0.75;
      const RopeSpec spec = make_rope_spec(p, dtype, 64, pairs, false);
      const RopeData data = data_of(spec, 1);
      const std::vector<std::byte> whole = rotated(row(), data);
      const std::string what = describe(spec);
      expect_same(rotated(row(), data, {.threads = 3}), whole, what + ", 3 threads");
      expect_same(rotated(row(), data, {.in_place = true}), whole, what + ", in place");
      expect_same(rotated(row(), data, {.is_int64 = false}), whole, what + ", int32 positions");
      for (std::int64_t token = 0; token < data.tokens; ++token) {
        RopeData alone = data;
        alone.tokens = 1;
        alone.positions = {data.positions[static_cast<std::size_t>(token)]};
        const auto bytes = static_cast<std::size_t>(data.all_heads()) * data.row_bytes();
        const auto from = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(token) * bytes);
        const auto to = from + static_cast<std::ptrdiff_t>(bytes);
        alone.rows.assign(data.rows.begin() + from, data.rows.begin() + to);
        expect_same(rotated(row(), alone), {whole.begin() + from, whole.begin() + to}, what + ", alone");
      }
      // A buffer whose rows are not aligned, and every kernel and SIMD target.
      RopeData shifted = data;
      shifted.gap = 0;
      for (std::int64_t token = data.tokens; token-- > 0;) {
        const auto at =
            shifted.rows.begin() + static_cast<std::ptrdiff_t>(
                                       static_cast<std::size_t>((token + 1) * data.all_heads() - 1) * data.row_bytes());
        shifted.rows.erase(at, at + static_cast<std::ptrdiff_t>(data.row_bytes()));
      }
      const std::vector<std::byte> dense = rotated(row(), shifted);
      for (std::int64_t token = 0; token < data.tokens; ++token) {
        const auto bytes = static_cast<std::size_t>(shifted.all_heads()) * data.row_bytes();
        count_check();
        EXPECT_EQ(std::memcmp(dense.data() + static_cast<std::size_t>(token) * bytes,
                              whole.data() + (data.row(token, 0) - data.rows.data()), bytes),
                  0)
            << what << ", dense, token " << token;
      }
      const KernelRow<RopeSpec>& host = kernel_table<RopeSpec>().back();
      for (const std::int64_t target : targets_here()) {
        const ForcedTarget forced(target);
        expect_same(rotated(host, data), whole, fmt::format("{}, {}", what, hwy::TargetName(target)));
      }
    }
  }
}

// An update of a cache that rotates rows on their way has the kernel's bits, in any layout of the cache.
TEST_P(Rope, TheSameBitsInACache) {
  constexpr int kRows = 3, kSequences = 2, kHeads = 2;
  constexpr std::int64_t kPageSize = 16, kPages = 4;
  const auto backend = row().make_backend({1, 0});
  const auto upload = [&](const void* from, std::size_t bytes) {
    Buffer buffer = backend->allocate(bytes);
    const auto count = static_cast<std::int64_t>(bytes);
    backend->copy_rows(buffer.data(), count, from, count, count, 1, backend->stream());
    return buffer;
  };
  const std::int32_t lengths[kSequences] = {17, 70001};
  for (const Dtype dtype : kRopeDtypes) {
    for (const RopePairs pairs : kBothPairs) {
      for (const auto& [dim, part, gap] : {std::tuple{64, 1.0, 1}, {80, 0.4, 0}, {6, 1.0, 0}}) {
        RopeParameters p;
        p.partial_rotary_factor = part;
        const RopeSpec spec = make_rope_spec(p, dtype, dim, pairs, gap == 1);
        const auto row_bytes = static_cast<std::size_t>(dim) * size_of(dtype);
        RopeData data = data_of(spec);
        data.tokens = kSequences * kRows;
        data.heads = data.kv_heads = 1;
        data.rows.resize(static_cast<std::size_t>(kSequences * kRows * kHeads) * row_bytes);
        data.positions.clear();
        for (const std::int32_t length : lengths) {
          for (int i = 0; i < kRows; ++i) data.positions.push_back(length - kRows + i);
        }
        const std::vector<std::byte> expected = rotated(row(), data);

        const std::int64_t token = (kHeads + gap) * dim;
        const std::size_t pool_bytes = static_cast<std::size_t>(kPages * kPageSize * token) * size_of(dtype);
        const std::vector<std::byte> unwritten(pool_bytes, std::byte{0x55});
        const Buffer pool = upload(unwritten.data(), pool_bytes), rows = upload(data.rows.data(), data.rows.size()),
                     copy = upload(data.rows.data(), data.rows.size()), before = upload(lengths, sizeof lengths),
                     frequencies = upload(spec.frequencies.data(), 8 * spec.frequencies.size());
        std::vector<std::int32_t> table(kSequences * 4376, 3);
        table[0] = 1;
        table[1] = 0;
        table[4376 + 4374] = 2;
        const Buffer entries = upload(table.data(), 4 * table.size());
        const TensorView given =
            dense_view(static_cast<const void*>(rows.data()), dtype, kSequences * kRows, kHeads, dim);
        MutableCacheView cache = cache_view(pool.data(), dtype, kPages, kPageSize, kHeads, dim);
        cache.token_stride = token;
        cache.page_stride = kPageSize * token;
        CacheUpdate update;
        update.sequences = kSequences;
        update.rows = kRows;
        update.lengths = reinterpret_cast<const std::int32_t*>(before.data());
        update.block_table = {reinterpret_cast<const std::int32_t*>(entries.data()), 4376};
        update.table_pages = 4376;
        update.pages = kPages;
        update.page_size = kPageSize;
        update.rotation = row_rotation(spec, reinterpret_cast<const double*>(frequencies.data()));
        update.rotated[0] = store_rows(
            dense_view(static_cast<void*>(copy.data()), dtype, kSequences * kRows, kHeads, dim), given, kRows);
        update.rotated[1] = append_to_cache(cache, given);
        update.rotated_count = 2;
        backend->update_cache(update, backend->stream());
        const auto read = [&](const Buffer& buffer) {
          std::vector<std::byte> bytes(buffer.bytes());
          const auto count = static_cast<std::int64_t>(bytes.size());
          backend->copy_rows(bytes.data(), count, buffer.data(), count, count, 1, backend->stream());
          backend->synchronize(backend->stream(), DeviceTimeouts::for_queue(), {});
          return bytes;
        };
        expect_same(read(copy), expected, describe(spec) + ", rows");
        std::vector<std::byte> filled = unwritten;
        const auto pages = [](std::int64_t position) {
          return position < 16 ? 1 : position < 32 ? 0 : position < 70000 ? 2 : 3;
        };
        for (std::size_t i = 0; i < data.positions.size(); ++i) {
          const std::int64_t position = data.positions[i];
          const std::int64_t at = (pages(position) * kPageSize + position % kPageSize) * token;
          std::memcpy(filled.data() + static_cast<std::size_t>(at) * size_of(dtype),
                      expected.data() + i * kHeads * row_bytes, kHeads * row_bytes);
        }
        expect_same(read(pool), filled, describe(spec) + ", cache");
      }
    }
  }
}

TEST_P(Rope, NonFiniteElementsReachOnlyTheirPair) {
  for (const RopePairs pairs : kBothPairs) {
    RopeData data = data_of(spec_of(RopeType::kDefault, Dtype::kBf16, 64, pairs));
    const std::vector<std::byte> clean = rotated(row(), data);
    const std::size_t first = pairs == RopePairs::kHalfSplit ? 5 : 10;
    const std::size_t second = pairs == RopePairs::kHalfSplit ? 37 : 11;
    for (const float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      RopeData tainted = data;
      store_element(tainted.rows.data() + 2 * first, Dtype::kBf16, value);  // token 0, at position 0
      std::vector<std::byte> out = rotated(row(), tainted);
      count_check();
      EXPECT_EQ(inaccuracy(tainted, out, false), "");
      EXPECT_TRUE(std::isnan(load_element(out.data() + 2 * second, Dtype::kBf16))) << "∞ · 0";
      for (const std::size_t d : {first, second}) {
        std::memcpy(out.data() + 2 * d, clean.data() + 2 * d, 2);
      }
      expect_same(out, clean, "the other elements");
    }
  }
}

TEST_P(Rope, AGivenFirstPositionCountsOn) {
  RopeData data = data_of(spec_of(RopeType::kDefault, Dtype::kF32, 64, RopePairs::kHalfSplit));
  for (std::size_t i = 0; i < data.positions.size(); ++i) data.positions[i] = 1000 + static_cast<std::int64_t>(i);
  const auto backend = row().make_backend({1, 0});
  if (backend->enqueues()) return count_check();  // the same code as with an array; this test reads host memory
  std::vector<std::byte> out(data.rows.size());
  const TensorView x = dense_view(static_cast<const void*>(data.rows.data()), Dtype::kF32, kTokens, 5, 64);
  const RopeTensor tensor{x, dense_view(static_cast<void*>(out.data()), Dtype::kF32, kTokens, 5, 64)};
  row().make_kernel(data.spec, *backend)->rotate({{.first = 1000}, {&tensor, 1}}, {}, {});
  expect_same(out, rotated(row(), data), "from 1000 on");
}

INSTANTIATE_TEST_SUITE_P(Kernels, Rope,
                         ::testing::ValuesIn(kernel_table<RopeSpec>().begin(), kernel_table<RopeSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(RopeAngle, SinAndCosAreRoundedFromFp64) {
  std::mt19937_64 random(3);
  std::int64_t different = 0;
  constexpr std::int64_t kCount = 200000;
  for (std::int64_t i = 0; i < kCount; ++i) {
    // fp32 angles of every size up to 2^31, and fp64 ones.
    const double scale = std::ldexp(1.0, static_cast<int>(random() % 33));
    double angle = scale * (static_cast<double>(random() >> 11) * 0x1p-53 - 0.5);
    if (i % 2 == 0) angle = static_cast<double>(static_cast<float>(angle));
    const SinCos found = sin_cos(angle);
    const long double sine = std::sin(static_cast<long double>(angle)),
                      cosine = std::cos(static_cast<long double>(angle));
    EXPECT_NEAR(static_cast<double>(found.sin), static_cast<double>(sine),
                0x1.0002p-25 * std::max(std::abs(static_cast<double>(sine)) * 2, 0x1p-20))
        << angle;
    EXPECT_NEAR(static_cast<double>(found.cos), static_cast<double>(cosine),
                0x1.0002p-25 * std::max(std::abs(static_cast<double>(cosine)) * 2, 0x1p-20))
        << angle;
    different += found.sin != static_cast<float>(sine) || found.cos != static_cast<float>(cosine) ? 1 : 0;
  }
  EXPECT_LE(different, 2) << "not correctly rounded";
  EXPECT_EQ(sin_cos(0.0).sin, 0.0F);
  EXPECT_EQ(sin_cos(0.0).cos, 1.0F);
}

std::string refusal(const RopeParameters& parameters, int head_dim = 64) {
  try {
    make_rope_spec(parameters, Dtype::kF32, head_dim, RopePairs::kHalfSplit, false);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(RopeFrequencies, HaveTheFormulasOfTheirTypes) {
  RopeParameters p;
  const auto of = [&](bool exact) {
    return make_rope_spec(p, Dtype::kF32, 8, RopePairs::kHalfSplit, exact).frequencies;
  };
  EXPECT_EQ(of(true), (std::vector<double>{1.0, 0.1, 0.01, 0.001}));
  EXPECT_EQ(of(false), (std::vector<double>{1.0F, 0.1F, 0.01F, 0.001F}));
  p.type = RopeType::kLinear;
  p.factor = 4.0;
  EXPECT_EQ(of(true), (std::vector<double>{0.25, 0.025, 0.0025, 0.00025}));
  p.type = RopeType::kProportional;
  p.factor.reset();
  p.partial_rotary_factor = 0.5;
  EXPECT_EQ(of(true), (std::vector<double>{1.0, 0.1, 0.0, 0.0}));
  const RopeSpec yarn = spec_of(RopeType::kYarn, Dtype::kF32, 64, RopePairs::kHalfSplit);
  EXPECT_EQ(yarn.attention_factor, static_cast<float>(0.1 * std::log(8.0) + 1.0));
  EXPECT_LT(yarn.frequencies.back(), 1.01 / 8 * std::pow(500000.0, -62.0 / 64));
}

TEST(RopeFrequencies, RefuseWhatContradictsTheType) {
  const auto has_text = [](const std::string& text, std::string_view part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  RopeParameters p = parameters_of(RopeType::kDynamic);
  p.length.reset();
  has_text(refusal(p), "RoPE of type dynamic without a length");
  p = parameters_of(RopeType::kLlama3);
  p.low_freq_factor.reset();
  has_text(refusal(p), "low_freq_factor is missing");
  p = parameters_of(RopeType::kLlama3);
  p.beta_fast = 32.0;
  has_text(refusal(p), "beta_fast is given for RoPE of type llama3");
  p = parameters_of(RopeType::kLinear);
  p.factor = 0.5;
  has_text(refusal(p), "factor of RoPE is 0.5");
  p = {};
  p.length = 5;
  has_text(refusal(p), "length is given for RoPE of type default");
  p = {};
  p.partial_rotary_factor = 0.3;
  has_text(refusal(p), "rotary_dim is 19");
  p = {};
  p.mrope_section = {1, 2, 3};
  has_text(refusal(p), "mrope_section does not fit");
  has_text(refusal({}, 514), "RoPE of heads of 514");
  RopeParameters set;
  EXPECT_TRUE(set_rope_parameter(set, "mrope_section", "16:24:24"));
  EXPECT_FALSE(set_rope_parameter(set, "mrope_section", "16:x"));
  EXPECT_FALSE(set_rope_parameter(set, "alpha", "2"));
}

}  // namespace
}  // namespace ringattn::testing
