// SPDX-License-Identifier: Apache-2.0
// Compressed rows on a GPU: the bytes that the host makes, both ways, and the invalid elements that it finds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/gpu.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/decode/cache_update.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

const std::vector<std::int64_t> kLengths{0, 1, 31, 32, 33, 64, 100, 333, 63};
constexpr std::int64_t kGap = 48;  // bytes after each token of padded streams

std::vector<RowFormat> formats_of_device() {
  std::vector<RowFormat> formats = quantized_formats();
  formats.push_back({RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, 4});
  formats.push_back({RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, 16, 0, 4});
  formats.push_back({.encoding = RowEncoding::kLatent, .rope = 64});
  return formats;
}

class CudaRowsTest : public ::testing::TestWithParam<RowFormat> {
 protected:
  void SetUp() override {
    if (!gpus_unavailable().empty()) GTEST_SKIP() << "needs: " << gpus_unavailable();
    device_.emplace(0);
  }

  const RowFormat& format() const { return GetParam(); }
  cuda::CudaBackend& device() { return *device_; }
  void wait() { device().synchronize(device().stream(), Deadline::after(60.0), {}); }

  std::optional<cuda::CudaBackend> device_;
};
INSTANTIATE_TEST_SUITE_P(Formats, CudaRowsTest, ::testing::ValuesIn(formats_of_device()),
                         [](const auto& test) { return test_name(test.param); });

// Streams with a gap after each token, and tables: on the host, and the same on the device.
class Twin {
 public:
  Twin(cuda::CudaBackend& device, const RowFormat& format, const RowShape& shape, std::int64_t tokens,
       std::int64_t sequences, std::int64_t gap)
      : device_(device) {
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(format, shape)) {
      const std::int64_t bytes = stream.token_bytes(shape.dtype);
      streams_.emplace_back(static_cast<std::size_t>(std::max<std::int64_t>(1, tokens * (bytes + gap))),
                            std::byte{0xff});
      device_streams_.emplace_back(device, streams_.back().size());
      host.streams[at] = {streams_.back().data(), bytes + gap, bytes / stream.heads};
      there.streams[at] = {device_streams_.back().data(), bytes + gap, bytes / stream.heads};
      ++at;
    }
    at = 0;
    for (const FormatTable& table : format_tables(format, shape, sequences)) {
      tables_.emplace_back(static_cast<std::size_t>(table.bytes(shape.dtype)), std::byte{0});
      device_tables_.emplace_back(device, tables_.back().size());
      host.tables[at] = tables_.back().data();
      there.tables[at] = device_tables_.back().data();
      ++at;
    }
  }

  void upload() {
    for (std::size_t i = 0; i < streams_.size(); ++i) device_streams_[i].write(streams_[i]);
    for (std::size_t i = 0; i < tables_.size(); ++i) device_tables_[i].write(tables_[i]);
  }
  // Where the device's bytes begin to differ; empty: nowhere.
  std::string difference() {
    for (std::size_t i = 0; i < streams_.size() + tables_.size(); ++i) {
      const bool table = i >= streams_.size();
      const std::size_t n = table ? i - streams_.size() : i;
      const std::vector<std::byte>& mine = table ? tables_[n] : streams_[n];
      const std::vector<std::byte> got = (table ? device_tables_[n] : device_streams_[n]).read();
      const auto at = std::ranges::mismatch(mine, got);
      if (at.in1 == mine.end()) continue;
      return (table ? "table " : "stream ") + std::to_string(n) + ", byte " + std::to_string(at.in1 - mine.begin()) +
             ": host " + std::to_string(std::to_integer<int>(*at.in1)) + ", device " +
             std::to_string(std::to_integer<int>(*at.in2));
    }
    return {};
  }

  CompressedRows host, there;

 private:
  cuda::CudaBackend& device_;
  std::vector<std::vector<std::byte>> streams_, tables_;
  std::vector<DeviceArray> device_streams_, device_tables_;
};

// Tables that could be: scales, codebooks of normal numbers, ascending channels.
void fill_tables(const RowFormat& format, const RowShape& shape, const CompressedRows& rows) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal;
  std::size_t at = 0;
  for (const FormatTable& table : format_tables(format, shape, 0)) {
    const std::int64_t count = table.bytes(shape.dtype) / size_of(table.type, shape.dtype);
    for (std::int64_t i = 0; i < count; ++i) {
      std::byte* const to = rows.tables[at] + i * size_of(table.type, shape.dtype);
      if (table.type == StoredType::kF32) {
        store_element(to, Dtype::kF32, 0.01F + 0.003F * static_cast<float>(i));
      } else if (table.type == StoredType::kI32) {
        const auto channel = static_cast<std::int32_t>(i % format.outliers * 13 + 2);
        std::memcpy(to, &channel, sizeof channel);
      } else {
        store_element(to, shape.dtype, normal(random) * (i % 3 == 0 ? 20.0F : 1.0F));
      }
    }
    ++at;
  }
}

// Whole quantization groups of sequences, the last ones first.
std::vector<CompressedRun> runs_of(const RowFormat& format, std::int64_t piece) {
  std::vector<CompressedRun> runs;
  std::int64_t begin = 0;
  for (std::size_t s = 0; s < kLengths.size(); begin += kLengths[s++]) {
    const std::int64_t each = quantized_per_token(format) ? piece : piece / 64 * 64;
    for (std::int64_t first = 0; first < kLengths[s]; first += each) {
      runs.insert(runs.begin(), {static_cast<std::int64_t>(s), first, kLengths[s], begin + first,
                                 std::min(each, kLengths[s] - first), begin + first});
    }
  }
  return runs;
}

struct RowCase {
  Dtype dtype;
  std::int64_t heads, dim, gap;
  std::int64_t piece;
};
std::vector<RowCase> cases(const RowFormat& format) {
  std::vector<RowCase> all{{Dtype::kBf16, 2, 128, 0, 1000},  {Dtype::kF16, 3, 64, kGap, 64},
                           {Dtype::kBf16, 1, 64, 0, 64},     {Dtype::kF16, 2, 256, 0, 1000},
                           {Dtype::kBf16, 2, 576, 2, 128},   {Dtype::kF16, 8, 128, 0, 77},
                           {Dtype::kBf16, 5, 192, kGap, 128}};
  if (format.encoding == RowEncoding::kLatent) {  // after blocks of 128
    std::erase_if(all, [&](const RowCase& c) { return c.dim <= format.rope || (c.dim - format.rope) % 128 != 0; });
    all.push_back({Dtype::kF16, 1, 576, 0, 1000});
    all.push_back({Dtype::kF16, 3, 320, kGap, 64});
  }
  if (format.encoding == RowEncoding::kFp8 || format.encoding == RowEncoding::kInt8) {
    all.push_back({Dtype::kF16, 3, 64, 1, 128});  // scales at odd bytes
    all.push_back({Dtype::kBf16, 3, 40, 0, 1000});
    all.push_back({Dtype::kF16, 1, 37, 0, 9});
    all.push_back({Dtype::kBf16, 3, 130, 0, 1000});
  }
  return all;
}

// Magnitudes of many sizes: normal values, whole tokens far smaller or greater, zeros, and pairs of a tiny least value.
std::vector<std::byte> varied_rows(const RowShape& shape, std::uint64_t seed) {
  std::vector<std::byte> rows = outlier_rows(shape, kLengths, seed);
  const std::int64_t tokens = std::accumulate(kLengths.begin(), kLengths.end(), std::int64_t{0});
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 0; i < shape.heads * shape.dim; ++i) {
      std::byte* const at = rows.data() + (t * shape.heads * shape.dim + i) * 2;
      const float value = load_element(at, shape.dtype);
      const float small = shape.dtype == Dtype::kBf16 ? 0x1p-126F : 0x1p-20F;
      if (t % 11 == 3) store_element(at, shape.dtype, value * small);
      if (t % 11 == 5) store_element(at, shape.dtype, value * 0x1p6F);
      if (t % 11 == 7) store_element(at, shape.dtype, 0.0F);
      if (t % 11 == 9) store_element(at, shape.dtype, std::abs(value) * (i % 5 == 0 ? 0x1p-14F : 1.0F));
    }
  }
  return rows;
}

TEST_P(CudaRowsTest, QuantizedAndDequantizedValuesAreTheHosts) {
  cpu::CpuBackend host(2);
  const std::int64_t tokens = std::accumulate(kLengths.begin(), kLengths.end(), std::int64_t{0});
  for (const RowCase& c : cases(format())) {
    const RowShape shape{c.dtype, c.heads, c.dim};
    SCOPED_TRACE(std::string(dtype_name(c.dtype)) + ", " + std::to_string(c.heads) + " heads of " +
                 std::to_string(c.dim) + ", gap " + std::to_string(c.gap));
    const std::vector<std::byte> plain = varied_rows(shape, 1), products = outlier_rows(shape, kLengths, 2);
    Twin twin(device(), format(), shape, tokens, static_cast<std::int64_t>(kLengths.size()), c.gap);
    fill_tables(format(), shape, twin.host);
    twin.upload();
    DeviceArray plain_there(device(), plain.size()), products_there(device(), plain.size());
    plain_there.write(plain);
    products_there.write(products);
    const auto view = [&](const std::byte* data) {
      return dense_view(static_cast<const void*>(data), c.dtype, tokens, c.heads, c.dim);
    };
    const bool hybrid = format().encoding == RowEncoding::kHybrid;
    const std::vector<CompressedRun> runs = runs_of(format(), c.piece);
    CompressTask task{format(), shape,    view(plain.data()), hybrid ? view(products.data()) : TensorView{},
                      runs,     twin.host};
    host.compress(task, {});
    task.plain = view(plain_there.data());
    if (hybrid) task.products = view(products_there.data());
    task.to = twin.there;
    device().compress(task, device().stream());
    wait();
    ASSERT_EQ(twin.difference(), "");

    std::vector<std::byte> back = products;
    DecompressTask other{format(), shape, twin.host, runs,
                         dense_view(static_cast<void*>(back.data()), c.dtype, tokens, c.heads, c.dim)};
    host.decompress(other, {});
    other.from = twin.there;
    other.plain.data = products_there.data();
    device().decompress(other, device().stream());
    wait();
    const std::vector<std::byte> got = products_there.read();
    const auto at = std::ranges::mismatch(back, got);
    ASSERT_EQ(at.in1 - back.begin(), static_cast<std::ptrdiff_t>(back.size()))
        << "element " << (at.in1 - back.begin()) / 2;
  }
}

TEST_P(CudaRowsTest, GreatestMagnitudesAreTheHosts) {
  if (format() != RowFormat{RowEncoding::kFp8, ScaleGrain::kHead}) GTEST_SKIP() << "once is enough";
  cpu::CpuBackend host(2);
  for (const std::int64_t dim : {128, 64, 40, 37}) {
    const RowShape shape{Dtype::kF16, 5, dim};
    const std::vector<std::byte> plain = varied_rows(shape, 3);
    DeviceArray there(device(), plain.size()), greatest(device(), 5 * sizeof(float));
    there.write(plain);
    greatest.write(std::vector<std::byte>(5 * sizeof(float)));
    float expected[5] = {};
    const std::int64_t tokens = static_cast<std::int64_t>(plain.size()) / 2 / 5 / dim;
    host.compute_absmax({dense_view(static_cast<const void*>(plain.data()), shape.dtype, tokens, 5, dim), expected},
                        {});
    device().compute_absmax(
        {dense_view(static_cast<const void*>(there.data()), shape.dtype, tokens, 5, dim), greatest.floats()},
        device().stream());
    EXPECT_EQ(std::memcmp(greatest.read_floats().data(), expected, sizeof expected), 0) << dim;
  }
}

// A cell that tasks of the device tell in.
class Cell {
 public:
  explicit Cell(cuda::CudaBackend& device) : memory_(device, sizeof(InvalidElementCell)) {}
  InvalidElementCell* get() const { return reinterpret_cast<InvalidElementCell*>(memory_.data()); }
  InvalidElementCell read() const {
    InvalidElementCell cell;
    std::memcpy(&cell, memory_.read().data(), sizeof cell);
    return cell;
  }

 private:
  DeviceArray memory_;
};

bool same(const std::optional<InvalidElement>& a, const std::optional<InvalidElement>& b) {
  if (!a || !b) return !a && !b;
  InvalidElement x = *a, y = *b;
  if (std::isnan(x.value) && std::isnan(y.value)) x.value = y.value = 0.0F;
  return x == y;
}

TEST_P(CudaRowsTest, InvalidEntriesAreTheHosts) {
  cpu::CpuBackend host(2);
  const std::int64_t dim = 128 + format().rope;
  const RowShape shape{Dtype::kBf16, 2, dim};
  const std::int64_t tokens = std::accumulate(kLengths.begin(), kLengths.end(), std::int64_t{0});
  std::vector<CompressedRun> runs = runs_of(format(), 64);
  std::ranges::reverse(runs);  // the host checks runs in order
  Twin twin(device(), format(), shape, tokens, static_cast<std::int64_t>(kLengths.size()), 0);
  fill_tables(format(), shape, twin.host);
  std::vector<std::byte> plain = outlier_rows(shape, kLengths, 4);
  const bool hybrid = format().encoding == RowEncoding::kHybrid;
  const auto view = [&](const std::byte* data) {
    return dense_view(static_cast<const void*>(data), shape.dtype, tokens, shape.heads, shape.dim);
  };
  if (hybrid) {  // whose factors a product makes
    for (std::int64_t i = 0; i < tokens * 2 * format().rank; ++i) {
      store_element(twin.host.streams[0].data + 2 * i, shape.dtype, 0.5F);
    }
  }
  host.compress({format(), shape, view(plain.data()), hybrid ? view(plain.data()) : TensorView{}, runs, twin.host}, {});
  DeviceArray there(device(), plain.size());
  const auto faults_agree = [&](bool expected) {
    twin.upload();
    there.write(plain);
    InvalidElementCell here;
    Cell cell(device());
    std::vector<std::byte> elements = plain;
    DecompressTask task{
        format(), shape, twin.host, runs, dense_view(static_cast<void*>(elements.data()), shape.dtype, tokens, 2, dim),
        &here};
    host.decompress(task, {});
    task.from = twin.there;
    task.plain.data = there.data();
    task.invalid = cell.get();
    device().decompress(task, device().stream());
    wait();
    const auto mine = invalid_element_of(here, format(), shape), got = invalid_element_of(cell.read(), format(), shape);
    EXPECT_EQ(mine.has_value(), expected);
    EXPECT_TRUE(same(mine, got)) << "host " << here.location << " " << here.value << ", device " << cell.read().location
                                 << " " << cell.read().value;
  };
  faults_agree(false);
  // Bad bytes in all streams, the last ones first: each time another one is the first.
  const std::vector<FormatStream> streams = format_streams(format(), shape);
  for (std::size_t i = streams.size(); i-- > 0;) {
    if (streams[i].type == StoredType::kU8) continue;
    const std::int64_t bytes = streams[i].token_bytes(shape.dtype);
    for (const std::int64_t token : {std::int64_t{500}, std::int64_t{170}}) {
      // The 170th is in a complete group of its sequence, and so is the 500th.
      std::byte* const at = twin.host.streams[i].data + token * bytes + bytes / 2;
      std::memset(at, streams[i].type == StoredType::kI8 ? 0x80 : 0xff, streams[i].type == StoredType::kF32 ? 4 : 2);
      faults_agree(true);
    }
  }
  // And in tables.
  std::size_t n = 0;
  for (const FormatTable& table : format_tables(format(), shape, static_cast<std::int64_t>(kLengths.size()))) {
    const std::int64_t unit = size_of(table.type, shape.dtype);
    std::int64_t place = table.bytes(shape.dtype) / unit / 2;
    if (!quantized_per_token(format()))
      place = (7 * format().group + 3) * 2 * dim + 130;  // the tail of sequence 7 has 13
    std::memset(twin.host.tables[n++] + place * unit, 0xff, static_cast<std::size_t>(unit));
    faults_agree(true);
  }
  // Elements to be quantized.
  for (const std::int64_t bad : {std::int64_t{600}, std::int64_t{299}, std::int64_t{0}}) {
    store_element(plain.data() + (bad * 2 * dim + 131) * 2, shape.dtype, -std::numeric_limits<float>::infinity());
    there.write(plain);
    InvalidElementCell here;
    Cell cell(device());
    CompressTask task{format(),  shape, view(plain.data()), hybrid ? view(plain.data()) : TensorView{}, runs,
                      twin.host, &here};
    host.compress(task, {});
    task.plain = view(there.data());
    if (hybrid) task.products = view(there.data());
    task.to = twin.there;
    task.invalid = cell.get();
    device().compress(task, device().stream());
    wait();
    EXPECT_TRUE(here.location == cell.read().location && invalid_element_of(here, {}, shape)->token == bad) << bad;
  }
}

// Sequences of that many tokens join a cache on the device by steps of some: the bytes that they leave on the host.
// `broken`: some elements are NaN or ∞.
void expect_appended(cuda::CudaBackend& device, const RowFormat& format, std::int64_t tokens, std::int64_t page,
                     int step, bool broken = false) {
  const std::vector<std::int64_t> lengths{tokens, tokens, tokens};
  RowShape shape{page == 64 ? Dtype::kF16 : Dtype::kBf16, 3, page == 16 ? 128 : 64};
  if (format.encoding == RowEncoding::kLatent) shape.dim = (page == 16 ? 512 : 128) + format.rope;
  std::vector<std::byte> rows = outlier_rows(shape, lengths, 9);
  const auto row_bytes = static_cast<std::size_t>(shape.heads * shape.dim) * 2;
  if (broken) {
    for (const auto& [token, value] :
         {std::pair{std::size_t{3}, std::numeric_limits<float>::quiet_NaN()}, {17, kInfinity}, {21, -kInfinity}}) {
      store_element(rows.data() + token * row_bytes + token * 2, shape.dtype, value);
    }
  }
  const PageOrder order = shuffled_pages(lengths, page, 5);
  Twin twin(device, format, shape, order.pages * page, 3, 0);
  if (quantized_per_token(format)) fill_tables(format, shape, twin.host);
  twin.upload();
  const auto cache = [&](const CompressedRows& streams) {
    CompressedCache view{format, shape, order.pages, page, {}, streams.tables};
    for (std::size_t i = 0; i < kMaxStreams; ++i) {
      const StreamView& of = streams.streams[i];
      view.streams[i] = {of.data, of.token_stride * page, of.token_stride, of.head_stride};
    }
    return view;
  };
  DeviceArray table(device, order.table.size() * 4), now(device, 3 * 4),
      fresh_there(device, static_cast<std::size_t>(3 * step) * row_bytes);
  std::vector<std::byte> bytes(order.table.size() * 4);
  std::memcpy(bytes.data(), order.table.data(), bytes.size());
  table.write(bytes);
  for (std::int64_t length = step; length <= tokens; length += step) {
    std::vector<std::byte> fresh(static_cast<std::size_t>(3 * step) * row_bytes);
    for (std::int64_t s = 0; s < 3; ++s) {
      std::memcpy(fresh.data() + static_cast<std::size_t>(s * step) * row_bytes,
                  rows.data() + static_cast<std::size_t>(s * tokens + length - step) * row_bytes,
                  static_cast<std::size_t>(step) * row_bytes);
    }
    std::vector<std::int32_t> of_step(3, static_cast<std::int32_t>(length));
    CacheUpdate places;
    places.sequences = 3;
    places.rows = step;
    places.lengths = of_step.data();
    places.block_table = order.view();
    places.table_pages = order.columns;
    places.pages = order.pages;
    places.page_size = page;
    const auto view = [&](const std::byte* data) {
      return dense_view(static_cast<const void*>(data), shape.dtype, 3 * step, shape.heads, shape.dim);
    };
    cpu::CpuBackend(1).append({&places, cache(twin.host), view(fresh.data())}, {});
    std::vector<std::byte> numbers(3 * 4);
    std::memcpy(numbers.data(), of_step.data(), numbers.size());
    now.write(numbers);
    fresh_there.write(fresh);
    places.lengths = reinterpret_cast<std::int32_t*>(now.data());
    places.block_table.pages = reinterpret_cast<const std::int32_t*>(table.data());
    device.append({&places, cache(twin.there), view(fresh_there.data())}, device.stream());
    if (length % 10 != 0) continue;
    device.synchronize(device.stream(), Deadline::after(60.0), {});
    ASSERT_EQ(twin.difference(), "") << "length " << length << ", pages of " << page;
  }
}

TEST_P(CudaRowsTest, AppendedRowsAreTheHosts) {
  if (format().rank > 0) GTEST_SKIP() << "nothing appends to formats with a rank";
  for (const std::int64_t page : {16, 64, 256}) {
    for (const int step : {1, 5}) expect_appended(device(), format(), 150, page, step);
  }
}

// Some more than a quantization group: as few as tools can watch that take each step to a hundred times its time.
TEST_P(CudaRowsTest, AFewRowsAreAppended) {
  if (format().rank > 0) GTEST_SKIP() << "nothing appends to formats with a rank";
  expect_appended(device(), format(), 40, 16, 5);
}

// Rows that hold NaN or ∞ get a NaN or infinite scale, so that every reader sees it.
TEST_P(CudaRowsTest, AppendedRowsThatAreNotFiniteHaveSuchAScale) {
  const bool own_scale = format().encoding == RowEncoding::kInt8 ||
                         (format().encoding == RowEncoding::kFp8 && format().scales == ScaleGrain::kTokenHead);
  if (!own_scale) GTEST_SKIP() << "rows have no scale of 8 bits";
  expect_appended(device(), format(), 40, 16, 5, true);
}

}  // namespace
}  // namespace ringattn::testing
