// SPDX-License-Identifier: Apache-2.0
// The products of heads with their matrices: every kernel of the table against sums in fp64, and with the same bits
// however rows and heads are cut, wherever they lie, whichever way round the matrices are, and with any threads.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/kernels/kernel_row_test.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
inline void PrintTo(const HeadProductRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct ProductInputs {
  HeadProductSpec spec;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  bool shared = false;           // all heads share a row
  std::vector<std::byte> left;   // [rows, heads or 1, inner]
  std::vector<std::byte> right;  // [heads, outer, inner]

  std::int64_t row_heads() const { return shared ? 1 : heads; }
  float left_at(std::int64_t row, std::int64_t head, std::int64_t i) const {
    return load(left, (row * row_heads() + (shared ? 0 : head)) * spec.inner + i);
  }
  float right_at(std::int64_t head, std::int64_t o, std::int64_t i) const {
    return load(right, (head * spec.outer + o) * spec.inner + i);
  }
  void set_left(std::int64_t row, std::int64_t head, std::int64_t i, float value) {
    store(left, (row * row_heads() + (shared ? 0 : head)) * spec.inner + i, value);
  }
  void set_right(std::int64_t head, std::int64_t o, std::int64_t i, float value) {
    store(right, (head * spec.outer + o) * spec.inner + i, value);
  }

 private:
  float load(const std::vector<std::byte>& from, std::int64_t index) const {
    return load_element(from.data() + static_cast<std::size_t>(index) * size_of(spec.dtype), spec.dtype);
  }
  void store(std::vector<std::byte>& to, std::int64_t index, float value) const {
    store_element(to.data() + static_cast<std::size_t>(index) * size_of(spec.dtype), spec.dtype, value);
  }
};

// `next()` makes the elements.
template <typename Next>
ProductInputs inputs_of(const HeadProductSpec& spec, std::int64_t rows, std::int64_t heads, bool shared, Next next) {
  ProductInputs inputs{spec, rows, heads, shared, {}, {}};
  inputs.left.resize(static_cast<std::size_t>(rows * inputs.row_heads() * spec.inner) * size_of(spec.dtype));
  inputs.right.resize(static_cast<std::size_t>(heads * spec.outer * spec.inner) * size_of(spec.dtype));
  for (std::vector<std::byte>* elements : {&inputs.left, &inputs.right}) {
    for (std::size_t at = 0; at < elements->size(); at += size_of(spec.dtype)) {
      store_element(elements->data() + at, spec.dtype, next());
    }
  }
  return inputs;
}

ProductInputs normal_inputs(const HeadProductSpec& spec, std::int64_t rows, std::int64_t heads, bool shared,
                            std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  return inputs_of(spec, rows, heads, shared, [&] { return normal(generator); });
}

// What must not move a bit.
struct ProductLayout {
  int threads = 1;
  std::vector<std::int64_t> cuts{};  // rows at which a new task begins, ascending
  bool head_by_head = false;         // each in a task of its own
  bool transposed = false;           // matrices lie [heads, inner, outer]
  std::int64_t gap = 0;              // elements behind each head of rows, matrices and out
};

// out, [rows, heads, outer] of the dtype, dense. The gaps must be left alone.
std::vector<std::byte> multiplied(const HeadProductRow& row, const ProductInputs& inputs,
                                  const ProductLayout& layout = {}) {
  const HeadProductSpec& spec = inputs.spec;
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const std::unique_ptr<Backend> backend = row.make_backend({layout.threads, 0});
  const std::unique_ptr<HeadProductKernel> kernel = row.make_kernel(spec, *backend);
  kernel->reserve(inputs.heads);

  const std::int64_t left_head = spec.inner + layout.gap;
  const std::int64_t right_head = std::int64_t{spec.inner} * spec.outer + layout.gap;
  const std::int64_t out_head = spec.outer + layout.gap;
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * element); };
  std::vector<std::byte> left(bytes(inputs.rows * inputs.row_heads() * left_head), std::byte{0xff});
  for (std::int64_t i = 0; i < inputs.rows * inputs.row_heads(); ++i) {
    std::memcpy(left.data() + bytes(i * left_head), inputs.left.data() + bytes(i * spec.inner), bytes(spec.inner));
  }
  std::vector<std::byte> right(bytes(inputs.heads * right_head), std::byte{0xff});
  for (std::int64_t head = 0; head < inputs.heads; ++head) {
    for (std::int64_t o = 0; o < spec.outer; ++o) {
      for (std::int64_t i = 0; i < spec.inner; ++i) {
        const std::int64_t at = layout.transposed ? i * spec.outer + o : o * spec.inner + i;
        std::memcpy(right.data() + bytes(head * right_head + at),
                    inputs.right.data() + bytes((head * spec.outer + o) * spec.inner + i), bytes(1));
      }
    }
  }
  DeviceArray left_array(*backend, left.size());
  DeviceArray right_array(*backend, right.size());
  DeviceArray out_array(*backend, bytes(inputs.rows * inputs.heads * out_head));
  left_array.write(left);
  right_array.write(right);

  HeadMatrices weights{right_array.data(), spec.dtype, inputs.heads, spec.outer, spec.inner, right_head, spec.inner, 1};
  if (layout.transposed) {
    weights.outer_stride = 1;
    weights.inner_stride = spec.outer;
  }
  std::vector<std::int64_t> ends = layout.cuts;
  ends.push_back(inputs.rows);
  std::int64_t begin = 0;
  for (const std::int64_t end : ends) {
    const std::int64_t at_once = layout.head_by_head ? 1 : inputs.heads;
    for (std::int64_t head = 0; head < inputs.heads; head += at_once) {
      const TensorView all_left{left_array.data(),  spec.dtype, inputs.rows,
                                inputs.row_heads(), spec.inner, inputs.row_heads() * left_head,
                                left_head};
      const MutableTensorView all_out{out_array.data(),        spec.dtype, inputs.rows, inputs.heads, spec.outer,
                                      inputs.heads * out_head, out_head};
      HeadProductTask task{all_left, weights.slice(head, at_once), all_out};
      task.rows.data = all_left.at(begin, inputs.shared ? 0 : head);
      task.rows.heads = inputs.shared ? 1 : at_once;
      task.out.data = all_out.at(begin, head);
      task.out.heads = at_once;
      task.rows.tokens = task.out.tokens = end - begin;
      kernel->multiply(task, backend->stream(), {});
    }
    begin = end;
  }
  backend->synchronize(backend->mark(backend->stream()), Deadline::after(60.0), {});

  const std::vector<std::byte> out = out_array.read();
  std::vector<std::byte> dense(bytes(inputs.rows * inputs.heads * spec.outer));
  bool gaps_are_whole = true;
  for (std::int64_t i = 0; i < inputs.rows * inputs.heads; ++i) {
    std::memcpy(dense.data() + bytes(i * spec.outer), out.data() + bytes(i * out_head), bytes(spec.outer));
    for (std::size_t at = bytes(i * out_head + spec.outer); at < bytes((i + 1) * out_head); ++at) {
      gaps_are_whole &= out[at] == std::byte{0xff};
    }
  }
  EXPECT_TRUE(gaps_are_whole) << "something was written beside out";
  return dense;
}

class HeadProduct : public ::testing::TestWithParam<HeadProductRow> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const HeadProductRow& row() const { return GetParam(); }

  // Those of a fixed list that the kernel can do; of both numbers, what a latent needs comes first.
  std::vector<HeadProductSpec> specs() const {
    constexpr std::pair<int, int> kDims[] = {{512, 128}, {128, 512}, {64, 64}, {192, 40}, {8, 8}, {576, 24}, {24, 136}};
    std::vector<HeadProductSpec> able;
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      for (const auto& [inner, outer] : kDims) {
        if (row().missing({dtype, inner, outer}).empty()) able.push_back({dtype, inner, outer});
      }
    }
    return able;
  }

  void expect_same(const ProductInputs& inputs, const ProductLayout& layout,
                   const std::vector<std::byte>& expected) const {
    count_check();
    EXPECT_TRUE(multiplied(row(), inputs, layout) == expected)
        << describe(inputs.spec) << ", " << inputs.rows << " rows, " << layout.threads << " threads, "
        << layout.cuts.size() << " cuts" << (layout.head_by_head ? ", head by head" : "")
        << (layout.transposed ? ", transposed" : "") << ", gap " << layout.gap;
  }

 private:
  std::int64_t checks_before_ = 0;
};

// Within one rounding to the dtype and what a sum of so many terms in fp32 can lose. NaN and ∞ stand where they stand
// in fp64.
void expect_accurate(const ProductInputs& inputs, const std::vector<std::byte>& out) {
  const HeadProductSpec& spec = inputs.spec;
  const double rounding = spec.dtype == Dtype::kBf16 ? 0x1p-8 : spec.dtype == Dtype::kF16 ? 0x1p-11 : 0x1p-24;
  const double least = spec.dtype == Dtype::kF16 ? 0x1p-25 : 0.0;  // half a step of fp16's subnormals
  // Each of the additions loses at most half a unit in the last place of fp32; one that truncates, twice as much.
  const double lost = spec.inner * 0x1p-23;
  count_check();
  for (std::int64_t i = 0; i < inputs.rows * inputs.heads * spec.outer; ++i) {
    const std::int64_t o = i % spec.outer;
    const std::int64_t head = i / spec.outer % inputs.heads;
    const std::int64_t r = i / spec.outer / inputs.heads;
    double sum = 0.0;
    double magnitude = 0.0;
    for (std::int64_t k = 0; k < spec.inner; ++k) {
      const double term = static_cast<double>(inputs.left_at(r, head, k)) * inputs.right_at(head, o, k);
      sum += term;
      magnitude += std::abs(term);
    }
    const double value = load_element(out.data() + static_cast<std::size_t>(i) * size_of(spec.dtype), spec.dtype);
    const std::string place = fmt::format("{}: row {}, head {}, column {}", describe(spec), r, head, o);
    if (!std::isfinite(sum)) {
      ASSERT_TRUE(std::isnan(sum) ? std::isnan(value) : value == sum) << place << ": " << value << ", not " << sum;
      continue;
    }
    ASSERT_LE(std::abs(value - sum), rounding * std::abs(sum) + 1.01 * lost * magnitude + least) << place;
  }
}

TEST_P(HeadProduct, IsAccurate) {
  for (const HeadProductSpec& spec : specs()) {
    for (const bool shared : {false, true}) {
      const ProductInputs inputs = normal_inputs(spec, 29, 3, shared, 1);
      expect_accurate(inputs, multiplied(row(), inputs));
    }
  }
}

// Sums of small integers are exact in fp32 in any order: what is left is one rounding to nearest even.
TEST_P(HeadProduct, RoundsOnceToNearestEven) {
  for (const HeadProductSpec& spec : specs()) {
    // With the second scale fp16's results are subnormal.
    for (const float scale : {1.0F, 0x1p-13F}) {
      if (scale < 1.0F && spec.inner > 64) continue;
      std::mt19937_64 generator(2);
      const auto next = [&] { return scale * static_cast<float>(static_cast<int>(generator() % 15) - 7); };
      const ProductInputs inputs = inputs_of(spec, 70, 2, false, next);
      std::vector<std::byte> expected(static_cast<std::size_t>(70 * 2 * spec.outer) * size_of(spec.dtype));
      bool rounds = false;
      for (std::int64_t i = 0; i < 70 * 2 * spec.outer; ++i) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < spec.inner; ++k) {
          sum += static_cast<double>(inputs.left_at(i / spec.outer / 2, i / spec.outer % 2, k)) *
                 inputs.right_at(i / spec.outer % 2, i % spec.outer, k);
        }
        std::byte* const at = expected.data() + static_cast<std::size_t>(i) * size_of(spec.dtype);
        store_element(at, spec.dtype, static_cast<float>(sum));
        rounds |= load_element(at, spec.dtype) != static_cast<float>(sum);
      }
      EXPECT_TRUE(rounds || spec.dtype != Dtype::kBf16 || spec.inner < 64) << "nothing was rounded";
      count_check();
      EXPECT_TRUE(multiplied(row(), inputs) == expected) << describe(spec) << ", scale " << scale;
    }
  }
}

TEST_P(HeadProduct, RowsCutAnywhereHaveTheSameBits) {
  for (const HeadProductSpec& spec : specs()) {
    const bool latent = spec.inner * spec.outer == 512 * 128;
    for (const std::int64_t rows : {1, 3, 127, 128, 129, 1000}) {
      if (rows == 1000 && !(latent && spec.dtype == Dtype::kBf16)) continue;
      const ProductInputs inputs = normal_inputs(spec, rows, 2, rows % 2 == 0, 3);
      const std::vector<std::byte> whole = multiplied(row(), inputs);
      if (rows == 3) expect_same(inputs, {.cuts = {1, 2}}, whole);
      if (rows > 3) expect_same(inputs, {.cuts = {1, 13, 64, 77, rows - 1}}, whole);
      expect_same(inputs, {.threads = 2}, whole);
      expect_same(inputs, {.threads = 5, .cuts = {rows / 2}, .gap = 24}, whole);
    }
  }
}

TEST_P(HeadProduct, HeadsAndLayoutsHaveTheSameBits) {
  for (const HeadProductSpec& spec : specs()) {
    for (const bool shared : {false, true}) {
      const ProductInputs inputs = normal_inputs(spec, 61, 5, shared, 4);
      const std::vector<std::byte> all = multiplied(row(), inputs);
      expect_same(inputs, {.head_by_head = true}, all);
      expect_same(inputs, {.transposed = true}, all);
      expect_same(inputs, {.threads = 2, .head_by_head = true, .transposed = true, .gap = 64}, all);
    }
  }
}

// A head's first columns may be those of wider rows: what is behind them stays.
TEST_P(HeadProduct, WritesIntoTheFirstColumnsOfWiderRows) {
  for (const HeadProductSpec& spec : specs()) {
    const ProductInputs inputs = normal_inputs(spec, 17, 3, false, 5);
    expect_same(inputs, {.threads = 3, .gap = 64}, multiplied(row(), inputs));
  }
}

TEST_P(HeadProduct, NanAndInfinityStayInTheirRowsAndColumns) {
  for (const HeadProductSpec& spec : specs()) {
    const ProductInputs clean = normal_inputs(spec, 19, 2, false, 6);
    for (const float value : {kNan, kInfinity, -kInfinity}) {
      ProductInputs inputs = clean;
      inputs.set_left(7, 1, spec.inner - 1, value);
      inputs.set_left(12, 0, 0, value);
      inputs.set_right(0, 5, 3, value);
      inputs.set_right(0, 5, 4, -value);  // against the other
      inputs.set_right(1, 2, spec.inner - 1, 0.0F);
      const std::vector<std::byte> out = multiplied(row(), inputs);
      expect_accurate(inputs, out);
      for (const ProductLayout& layout :
           {ProductLayout{.cuts = {1, 8, 13}}, {.threads = 2, .head_by_head = true, .transposed = true}}) {
        expect_same(inputs, layout, out);
      }
    }
  }
}

// fp32 sums that fp16 has no number for.
TEST_P(HeadProduct, OverflowGivesInfinity) {
  for (const HeadProductSpec& spec : specs()) {
    if (spec.dtype != Dtype::kF16) continue;
    const ProductInputs inputs = inputs_of(spec, 5, 1, false, [] { return 200.0F; });
    const std::vector<std::byte> out = multiplied(row(), inputs);
    count_check();
    for (std::size_t at = 0; at < out.size(); at += 2) ASSERT_EQ(load_element(out.data() + at, spec.dtype), kInfinity);
  }
}

TEST_P(HeadProduct, NoRowsAtAll) {
  const ProductInputs inputs = normal_inputs(specs().front(), 0, 2, false, 7);
  EXPECT_TRUE(multiplied(row(), inputs).empty());
  count_check();
}

TEST_P(HeadProduct, RefusesWhatDoesNotFit) {
  const HeadProductSpec spec = specs().front();
  const std::unique_ptr<Backend> backend = row().make_backend({1, 0});
  const std::unique_ptr<HeadProductKernel> kernel = row().make_kernel(spec, *backend);
  kernel->reserve(2);
  const HeadProductTask fits{dense_view(static_cast<const void*>(nullptr), spec.dtype, 0, 2, spec.inner),
                             {nullptr, spec.dtype, 2, spec.outer, spec.inner, 0, spec.inner, 1},
                             dense_view(static_cast<void*>(nullptr), spec.dtype, 0, 2, spec.outer)};
  const auto refused = [&](auto change) {
    HeadProductTask task = fits;
    change(task);
    count_check();
    EXPECT_EQ(error_of([&] { kernel->multiply(task, backend->stream(), {}); }).code(), ErrorCode::kInternal);
  };
  refused([](HeadProductTask& task) { task.rows.heads = 3; });
  refused([](HeadProductTask& task) { task.rows.dim += 8; });
  refused([](HeadProductTask& task) { task.weights.inner_stride = 2; });
  refused([](HeadProductTask& task) { task.weights.outer += 8; });
  refused([](HeadProductTask& task) { task.out.tokens = 1; });
  refused([](HeadProductTask& task) { task.out.dtype = Dtype::kF32 == task.out.dtype ? Dtype::kF16 : Dtype::kF32; });
}

INSTANTIATE_TEST_SUITE_P(Kernels, HeadProduct,
                         ::testing::ValuesIn(kernel_table<HeadProductSpec>().begin(),
                                             kernel_table<HeadProductSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ringattn::testing
