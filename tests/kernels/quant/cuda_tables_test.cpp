// SPDX-License-Identifier: Apache-2.0
// What a GPU finds the tables of formats by, and whole tensors that it compresses: the host's bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/gpu.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/codebook.hpp"
#include "kernels/quant/gram.hpp"
#include "kernels/quant/low_rank.hpp"
#include "kernels/quant/low_rank_codec.hpp"
#include "kernels/quant/row_quantization.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "tests/support/compressed_tensors.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gemm_runner.hpp"

namespace ringattn::testing {
namespace {

class CudaTables : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gpus_unavailable().empty()) GTEST_SKIP() << "needs: " << gpus_unavailable();
    device_.emplace(0);
  }

  cuda::CudaBackend& device() { return *device_; }
  DeviceArray placed(const std::vector<std::byte>& bytes) {
    DeviceArray array(device(), std::max<std::size_t>(1, bytes.size()));
    if (!bytes.empty()) array.write(bytes);
    return array;
  }
  void wait() { device().synchronize(device().stream(), Deadline::after(60.0), {}); }

  std::optional<cuda::CudaBackend> device_;
};

// Small integers, of which many are equal, and so are many distances.
std::vector<std::byte> few_values(const RowShape& shape, std::int64_t tokens, int values, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> rows(static_cast<std::size_t>(tokens * shape.heads * shape.dim * 2));
  for (std::size_t at = 0; at < rows.size(); at += 2) {
    const auto value = static_cast<int>(random() % static_cast<unsigned>(values)) - values / 2;
    store_element(rows.data() + at, shape.dtype, static_cast<float>(value));
  }
  return rows;
}

TEST_F(CudaTables, CodebooksAreTheHosts) {
  for (const std::int64_t width : {2, 4, 8}) {
    for (const RowShape& shape : {RowShape{Dtype::kBf16, 2, 64}, {Dtype::kF16, 1, 40}, {Dtype::kBf16, 1, 128}}) {
      for (const std::int64_t tokens : {0, 1, 2, 255, 256, 257, 1000, 8191, 8192, 9000}) {
        if (tokens > 1000 && shape.dim != 64) continue;  // which the host takes long for
        for (const int values : {0, 3}) {                // 0: normal ones
          const std::vector<std::byte> rows = values == 0 ? outlier_rows(shape, std::vector<std::int64_t>{tokens}, 5)
                                                          : few_values(shape, tokens, values, 6);
          const std::size_t bytes = static_cast<std::size_t>(shape.heads * kCodebookVectors * shape.dim) * 2;
          std::vector<std::byte> expected(bytes);
          find_codebook_on_host({view_of(rows, shape, tokens), width, 11, expected.data()}, 4);
          const DeviceArray there = placed(rows);
          DeviceArray book(device(), bytes);
          const TensorView view =
              dense_view(static_cast<const void*>(there.data()), shape.dtype, tokens, shape.heads, shape.dim);
          device().find_codebook({view, width, 11, book.data()}, device().stream());
          EXPECT_TRUE(book.read() == expected)
              << "width " << width << ", " << tokens << " tokens, dim " << shape.dim << ", values " << values;
        }
      }
    }
  }
}

// A part of wider rows, whose elements lie at no multiple of more than their size.
TEST_F(CudaTables, StridesMoveNoBitOfTables) {
  const RowShape wide{Dtype::kBf16, 3, 72};
  constexpr std::int64_t kTokens = 777;
  const std::vector<std::byte> rows = outlier_rows(wide, std::vector<std::int64_t>{kTokens}, 7);
  const DeviceArray there = placed(rows);
  const auto part = [&](const std::byte* data) {
    return TensorView{data + 2 * 3, Dtype::kBf16, kTokens, 2, 64, 3 * 72, 72};
  };
  std::vector<std::byte> book(2 * kCodebookVectors * 64 * 2);
  find_codebook_on_host({part(rows.data()), 4, 3, book.data()}, 4);
  DeviceArray book_there(device(), book.size());
  device().find_codebook({part(there.data()), 4, 3, book_there.data()}, device().stream());
  EXPECT_TRUE(book_there.read() == book);
  std::vector<std::byte> sums(2 * 64 * 64 * sizeof(double));
  DeviceArray sums_there(device(), sums.size());
  sums_there.write(sums);
  add_gram_on_host({part(rows.data()), reinterpret_cast<double*>(sums.data())}, 2);
  device().add_gram({part(there.data()), reinterpret_cast<double*>(sums_there.data())}, device().stream());
  const std::vector<std::byte> got = sums_there.read();
  for (std::size_t row = 0; row < 128; ++row) {
    const std::size_t at = (row * 64 + row % 64) * sizeof(double);
    ASSERT_EQ(std::memcmp(got.data() + at, sums.data() + at, (64 - row % 64) * sizeof(double)), 0) << row;
  }
}

// Added to what is there, piece by piece.
TEST_F(CudaTables, ProductsOfChannelsAreTheHosts) {
  for (const RowShape& shape : {RowShape{Dtype::kBf16, 3, 64},
                                {Dtype::kF16, 1, 8},
                                {Dtype::kBf16, 2, 72},
                                {Dtype::kF16, 2, 128},
                                {Dtype::kBf16, 1, 192},
                                {Dtype::kF16, 1, 256}}) {
    const std::size_t count = static_cast<std::size_t>(shape.heads * shape.dim * shape.dim);
    std::vector<std::byte> expected(count * sizeof(double));
    DeviceArray sums(device(), expected.size());
    sums.write(expected);
    for (const std::int64_t tokens : {1, 31, 32, 33, 500}) {
      const std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{tokens}, 8);
      const DeviceArray there = placed(rows);
      add_gram_on_host({view_of(rows, shape, tokens), reinterpret_cast<double*>(expected.data())}, 2);
      const TensorView view =
          dense_view(static_cast<const void*>(there.data()), shape.dtype, tokens, shape.heads, shape.dim);
      device().add_gram({view, reinterpret_cast<double*>(sums.data())}, device().stream());
      const std::vector<std::byte> got = sums.read();
      for (std::int64_t i = 0; i < shape.heads * shape.dim; ++i) {
        const auto from = static_cast<std::size_t>(i * shape.dim + i % shape.dim) * sizeof(double);
        const auto bytes = static_cast<std::size_t>(shape.dim - i % shape.dim) * sizeof(double);
        ASSERT_EQ(std::memcmp(got.data() + from, expected.data() + from, bytes), 0)
            << "dim " << shape.dim << ", " << tokens << " tokens, row " << i;
      }
    }
  }
}

const BatchedGemmRow& product_row(std::string_view name) {
  return *std::ranges::find(kernel_table<BatchedGemmSpec>(), name, &BatchedGemmRow::name);
}

TEST_F(CudaTables, OrderedGemmsHaveTheHostsBits) {
  constexpr std::pair<int, int> kDims[] = {{128, 32}, {32, 128},  {64, 8},  {8, 64},   {192, 40},
                                           {40, 192}, {256, 136}, {24, 72}, {576, 64}, {8, 8}};
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    for (const auto& [dim_k, dim_n] : kDims) {
      for (const std::int64_t rows : {1, 7, 127, 128, 129, 300}) {
        const GemmInputs inputs = normal_gemm_inputs({dtype, dim_k, dim_n}, rows, 3, false, 12);
        for (const bool transposed : {false, true}) {
          const GemmLayout layout{.transposed = transposed};
          EXPECT_EQ(first_difference(inputs, multiplied(product_row("sm80_gemm_ordered"), inputs, layout),
                                     multiplied(product_row("cpu_gemm"), inputs, layout)),
                    "")
              << dim_k << " to " << dim_n << ", " << rows << " rows" << (transposed ? ", transposed" : "");
        }
      }
    }
  }
}

// Rows and vectors of few values: nearly every point has several nearest vectors. And points so far from all vectors
// that every distance is ∞.
TEST_F(CudaTables, OfEquallyNearVectorsTheFirstIsTaken) {
  cpu::CpuBackend host(2);
  for (const int width : {2, 4, 8}) {
    for (const RowShape& shape : {RowShape{Dtype::kBf16, 2, 64}, {Dtype::kBf16, 3, 72}, {Dtype::kBf16, 1, 8}}) {
      for (const std::int64_t tokens : {1, 5, 63, 64, 65, 300, 1100}) {
        const RowFormat format{RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, width};
        std::vector<std::byte> rows = few_values(shape, tokens, 4, 13);
        for (std::int64_t c = 0; c < shape.dim; ++c) store_element(rows.data() + 2 * c, shape.dtype, 3e38F);
        const std::vector<std::byte> book = few_values(shape, kCodebookVectors, 3, 14);
        CompressedTensor expected = make_compressed(format, shape, {tokens});
        expected.tables[0] = book;
        const std::vector<CompressedRun> runs = expected.runs();
        host.compress({format, shape, view_of(rows, shape, tokens), {}, runs, expected.rows()}, {});
        const DeviceArray there = placed(rows), book_there = placed(book);
        DeviceArray codes(device(), expected.streams[0].size());
        std::byte* const stream = codes.data();
        std::byte* const table = book_there.data();
        const TensorView view =
            dense_view(static_cast<const void*>(there.data()), shape.dtype, tokens, shape.heads, shape.dim);
        device().compress({format, shape, view, {}, runs, rows_at({&stream, 1}, {&table, 1}, format, shape)},
                          device().stream());
        EXPECT_TRUE(codes.read() == expected.streams[0]) << width << ", dim " << shape.dim << ", " << tokens;
      }
    }
  }
}

std::vector<RowFormat> searched_formats() {
  std::vector<RowFormat> formats;
  for (const int width : {2, 4, 8}) formats.push_back({RowEncoding::kVector, ScaleGrain::kTokenHead, 0, 0, width});
  if (!has_low_rank()) return formats;
  formats.push_back({RowEncoding::kLowRank, ScaleGrain::kTokenHead, 0, 8});
  formats.push_back({RowEncoding::kLowRank, ScaleGrain::kTokenHead, 0, 40});
  formats.push_back({RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, 16, 0, 4});
  formats.push_back({.encoding = RowEncoding::kLowRank, .rank = 40, .heads = 2});
  return formats;
}

// A tensor in a device's memory.
struct TensorThere {
  std::vector<DeviceArray> streams, tables;
  CompressedRows rows;

  TensorThere(Backend& backend, const CompressedTensor& like) {
    std::vector<std::byte*> of_streams, of_tables;
    for (const auto& stream : like.streams) {
      streams.emplace_back(backend, std::max<std::size_t>(1, stream.size()));
      of_streams.push_back(streams.back().data());
    }
    for (const auto& table : like.tables) {
      tables.emplace_back(backend, table.size());
      of_tables.push_back(tables.back().data());
    }
    rows = rows_at(of_streams, of_tables, like.format, like.shape);
  }
};

// The elements by the host's ordered GEMM. decompress_tensor() uses another one in bf16 if the host has AMX.
std::vector<std::byte> decompressed_in_order(CompressedTensor& tensor) {
  if (tensor.format.rank == 0) return decompress_tensor(tensor, 2);
  const RowShape& shape = tensor.shape;
  std::vector<std::byte> plain(static_cast<std::size_t>(tensor.tokens() * shape.heads * shape.dim) *
                               size_of(shape.dtype));
  const std::vector<CompressedRun> runs = tensor.runs();
  cpu::CpuBackend host(2);
  LowRankCodec(tensor.format, shape, host, 1)
      .decompress({tensor.format, shape, tensor.rows(), runs,
                   dense_view(static_cast<void*>(plain.data()), shape.dtype, tensor.tokens(), shape.heads, shape.dim)},
                  {});
  return plain;
}

TEST_F(CudaTables, WholeTensorsAreTheHosts) {
  const std::vector<std::int64_t> lengths{0, 1, 31, 32, 33, 64, 100, 333, 63};
  const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  for (const RowFormat& format : searched_formats()) {
    for (const RowShape& shape :
         {RowShape{Dtype::kBf16, 2, 128}, {Dtype::kF16, 3, 64}, {Dtype::kBf16, 1, 256}, {Dtype::kF16, 1, 192}}) {
      SCOPED_TRACE(test_name(format) + ", dim " + std::to_string(shape.dim));
      if (shape.heads % format.heads != 0) continue;
      const std::vector<std::byte> rows = outlier_rows(shape, lengths, 15);
      const TensorView here = view_of(rows, shape, tokens);
      CompressedTensor expected = compress_tensor("k", format, here, lengths, {7, 2}, ErrorCode::kFile);
      const CompressedTensor elsewhere =
          compress_tensor("k", format, here, lengths, {7, 2, &device()}, ErrorCode::kFile);
      EXPECT_TRUE(elsewhere.streams == expected.streams);
      EXPECT_TRUE(elsewhere.tables == expected.tables);
      EXPECT_EQ(elsewhere.energy_kept, expected.energy_kept);
      EXPECT_TRUE(decompressed_in_order(expected) == decompress_tensor(expected, 2, &device()));

      TensorCodec coder(format, shape, {2, 0}, "cuda");
      const DeviceArray there = placed(rows);
      TensorThere made(coder.backend(), expected);
      const TensorView view =
          dense_view(static_cast<const void*>(there.data()), shape.dtype, tokens, shape.heads, shape.dim);
      EXPECT_EQ(coder.compress("k", view, expected.runs(), made.rows, ErrorCode::kFile, {}, 7), expected.energy_kept);
      for (std::size_t i = 0; i < made.streams.size(); ++i) EXPECT_TRUE(made.streams[i].read() == expected.streams[i]);
      for (std::size_t i = 0; i < made.tables.size(); ++i) EXPECT_TRUE(made.tables[i].read() == expected.tables[i]);
    }
  }
}

TEST_F(CudaTables, WhatIsNotFiniteIsNamedAsOnTheHost) {
  const RowShape shape{Dtype::kF16, 2, 64};
  const std::vector<std::int64_t> lengths{50};
  for (const RowFormat& format : searched_formats()) {
    for (const bool large : {false, true}) {  // finite, but not the factors
      if (large && format.rank == 0) continue;
      std::vector<std::byte> rows = outlier_rows(shape, lengths, 16);
      if (large) {
        for (std::size_t i = 0; i < rows.size(); i += 2) store_element(rows.data() + i, shape.dtype, 65504.0F);
      } else {
        store_element(rows.data() + 2 * ((17 * 2 + 1) * 64 + 9), shape.dtype, std::numeric_limits<float>::quiet_NaN());
      }
      const TensorView here = view_of(rows, shape, 50);
      const auto text = [](const auto& work) { return std::string(error_of(work).what()); };
      const std::string expected = text([&] { compress_tensor("k", format, here, lengths, {7, 2}, ErrorCode::kFile); });
      EXPECT_EQ(expected.rfind(large ? "k_factors[0, 0, 0] is inf" : "k[17, 1, 9] is nan", 0), 0U) << expected;
      EXPECT_EQ(text([&] {
                  compress_tensor("k", format, here, lengths, {7, 2, &device()}, ErrorCode::kFile);
                }),
                expected);
      TensorCodec coder(format, shape, {2, 0}, "cuda");
      const DeviceArray there = placed(rows);
      const CompressedTensor like = make_compressed(format, shape, lengths);
      const TensorThere made(coder.backend(), like);
      const TensorView view =
          dense_view(static_cast<const void*>(there.data()), shape.dtype, 50, shape.heads, shape.dim);
      EXPECT_EQ(text([&] { coder.compress("k", view, like.runs(), made.rows, ErrorCode::kFile, {}, 7); }), expected);
    }
  }
}

TEST_F(CudaTables, TheFirstNumberThatIsNotFiniteIsReported) {
  for (const std::int64_t dim : {64, 8, 37, 136}) {
    const RowShape shape{Dtype::kBf16, 3, dim};
    std::vector<std::byte> rows = outlier_rows(shape, std::vector<std::int64_t>{70}, 17);
    const auto told = [&] {
      const DeviceArray there = placed(rows);
      const DeviceArray cell(device(), sizeof(InvalidElementCell));
      const TensorView view = dense_view(static_cast<const void*>(there.data()), shape.dtype, 70, 3, dim);
      device().check_finite({view, 1, 1000, reinterpret_cast<InvalidElementCell*>(cell.data())}, device().stream());
      InvalidElementCell read;
      std::memcpy(&read, cell.read().data(), sizeof read);
      return invalid_element_of(read, {}, shape);
    };
    EXPECT_FALSE(told());
    for (const std::int64_t at : {69 * 3 * dim + 3 * dim - 1, 20 * 3 * dim + dim, std::int64_t{0}}) {
      store_element(rows.data() + 2 * at, shape.dtype, -std::numeric_limits<float>::infinity());
      const auto invalid = told();
      ASSERT_TRUE(invalid);
      EXPECT_EQ(invalid->part, 1);
      EXPECT_EQ(((invalid->token - 1000) * 3 + invalid->head) * dim + invalid->index, at);
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
