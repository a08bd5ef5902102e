// SPDX-License-Identifier: Apache-2.0
// Rows of random shards, written and read by several threads in every axis order; indexes; files that others change.
#include "io/safetensors_file.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "base/error.hpp"
#include "io/safetensors_writer.hpp"
#include "tests/io/safetensors_cases.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/random_runs.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr AxisOrder kOrders[] = {AxisOrder::kThd, AxisOrder::kHtd, AxisOrder::kBthd, AxisOrder::kBhtd};

// What element (token, head, dim) of a test tensor holds.
std::uint16_t pattern(std::int64_t token, std::int64_t head, std::int64_t dim) {
  return static_cast<std::uint16_t>(token * 1009 + head * 37 + dim);
}

RowGrid grid_of(AxisOrder order, std::int64_t batch, std::int64_t length, std::int64_t heads, std::int64_t dim) {
  RowGrid grid{order, 1, batch * length, heads, dim};
  if (grid.has_batch()) {
    grid.batch = batch;
    grid.length = length;
  }
  return grid;
}

// Rows [tokens, heads, dim] of a rank, with `padding` elements after each token.
struct Rows {
  Rows(std::span<const PackedRun> runs, const RowGrid& grid, std::int64_t gap)
      : padding(gap),
        data(static_cast<std::size_t>(total_tokens(runs) * (grid.heads * grid.dim + gap)) + 1),
        view{data.data(), Dtype::kBf16, total_tokens(runs), grid.heads, grid.dim, grid.heads * grid.dim + gap,
             grid.dim} {}

  std::uint16_t& at(std::int64_t row, std::int64_t head, std::int64_t dim) {
    return data[static_cast<std::size_t>(row * view.token_stride + head * view.head_stride + dim)];
  }
  // Calls f(element, token, head, dim) for all.
  template <typename F>
  void for_each(std::span<const PackedRun> runs, const F& f) {
    std::int64_t row = 0;
    for (const PackedRun& run : runs) {
      for (std::int64_t token = run.begin; token < run.end; ++token, ++row) {
        for (std::int64_t h = 0; h < view.heads; ++h) {
          for (std::int64_t d = 0; d < view.dim; ++d) f(at(row, h, d), token, h, d);
        }
      }
    }
  }

  std::int64_t padding;
  std::vector<std::uint16_t> data;
  MutableTensorView view;
};

// Bytes of a whole tensor in its file order, made element by element.
std::string file_bytes_of(const RowGrid& grid) {
  std::string bytes;
  const std::vector<std::int64_t> shape = grid.shape();
  const std::int64_t outer = grid.head_major() ? grid.heads : grid.length;
  const std::int64_t inner = grid.head_major() ? grid.length : grid.heads;
  for (std::int64_t b = 0; b < grid.batch; ++b) {
    for (std::int64_t i = 0; i < outer; ++i) {
      for (std::int64_t j = 0; j < inner; ++j) {
        const std::int64_t token = b * grid.length + (grid.head_major() ? j : i);
        for (std::int64_t d = 0; d < grid.dim; ++d) {
          const std::uint16_t value = pattern(token, grid.head_major() ? i : j, d);
          bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
        }
      }
    }
  }
  return bytes;
}

// Starts a thread for each element of `items`.
template <typename Items, typename F>
void in_threads(Items& items, const F& f) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        f(i, items[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(SafetensorsRows, RanksWriteAndReadEveryOrder) {
  const TemporaryFolder folder;
  std::mt19937_64 random(1);
  int number = 0;
  for (const AxisOrder order : kOrders) {
    // Few cases: each brings a file to the disk several times, which takes long on a busy one.
    for (const int world : {1, 3, 8}) {
      for (const std::int64_t length : {world == 3 ? 1 : 63, 300}) {
        if (world == 1 && length == 300) continue;
        SCOPED_TRACE(fmt::format("{} world {} length {}", axis_order_name(order), world, length));
        const RowGrid grid = grid_of(order, 3, length, 4, 24);
        const std::string path = folder.file(fmt::format("out{}.safetensors", number++));
        const SafetensorsPlan plan =
            plan_safetensors({{"out", FileDtype::kBf16, grid.shape()}, {"lse", FileDtype::kF32, lse_shape(grid)}},
                             {{"note", "x"}, {"digest", "0000"}});
        const auto writer = SafetensorsWriter::create(plan, path, false);
        auto shards = deal_randomly(grid.tokens(), world, 40, random);
        in_threads(shards, [&](std::size_t rank, const std::vector<PackedRun>& runs) {
          std::unique_ptr<SafetensorsWriter> own;
          if (rank > 0) own = SafetensorsWriter::open_existing(plan, writer->temporary_path());
          SafetensorsWriter& mine = rank == 0 ? *writer : *own;
          Rows rows(runs, grid, rank % 2 == 0 ? 0 : 8);
          std::vector<float> lse(static_cast<std::size_t>(total_tokens(runs) * grid.heads));
          rows.for_each(runs, [](std::uint16_t& element, std::int64_t token, std::int64_t h, std::int64_t d) {
            element = pattern(token, h, d);
          });
          std::size_t row = 0;
          for (const PackedRun& run : runs) {
            for (std::int64_t token = run.begin; token < run.end; ++token, ++row) {
              for (std::int64_t h = 0; h < grid.heads; ++h) {
                lse[static_cast<std::size_t>(h) * static_cast<std::size_t>(total_tokens(runs)) + row] =
                    static_cast<float>(token) + 0.25F * static_cast<float>(h);
              }
            }
          }
          mine.write_rows("out", grid, runs, rows.view);
          mine.write_lse("lse", grid, runs, RowView{lse.data(), 1, total_tokens(runs)});
          if (world == 3) mine.sync();
          mine.release();
        });
        writer->set_metadata("digest", "beef");
        writer->commit();
        EXPECT_FALSE(std::filesystem::exists(writer->temporary_path()));

        const SafetensorsFile file(path);
        EXPECT_EQ(*file.metadata("digest"), "beef");
        EXPECT_EQ(*file.metadata("note"), "x");
        EXPECT_EQ(file.metadata("none"), nullptr);
        const TensorSource out = file.tensor("out");
        std::string whole(static_cast<std::size_t>(out.info->bytes()), '\0');
        out.shard->read(*out.info, 0, std::as_writable_bytes(std::span(whole)));
        EXPECT_EQ(whole, file_bytes_of(grid));

        const RowGrid read_grid = row_grid(out, order);
        EXPECT_EQ(read_grid.shape(), grid.shape());
        auto readers = deal_randomly(grid.tokens(), world, 17, random);
        in_threads(readers, [&](std::size_t rank, const std::vector<PackedRun>& runs) {
          Rows rows(runs, grid, rank % 2 == 0 ? 8 : 0);
          read_rows(file.tensor("out"), read_grid, runs, rows.view);
          rows.for_each(runs, [](std::uint16_t element, std::int64_t token, std::int64_t h, std::int64_t d) {
            if (element != pattern(token, h, d)) {
              throw std::runtime_error(fmt::format("element {} {} {} differs", token, h, d));
            }
          });
        });

        const TensorSource lse = file.tensor("lse");
        std::vector<float> values(static_cast<std::size_t>(lse.info->bytes()) / sizeof(float));
        lse.shard->read(*lse.info, 0, std::as_writable_bytes(std::span(values)));
        for (std::int64_t token = 0; token < grid.tokens(); ++token) {
          for (std::int64_t h = 0; h < grid.heads; ++h) {
            const std::int64_t at = (token / grid.length * grid.heads + h) * grid.length + token % grid.length;
            ASSERT_EQ(values[static_cast<std::size_t>(at)], static_cast<float>(token) + 0.25F * static_cast<float>(h));
          }
        }
      }
    }
  }
  EXPECT_EQ(folder.entries().size(), static_cast<std::size_t>(number));  // no temporary file is left
}

// Pieces larger than the staging memory, and a run over several batch entries.
TEST(SafetensorsRows, CutsLongSegments) {
  const RowGrid grid = grid_of(AxisOrder::kBhtd, 2, 9000, 2, 64);
  const std::vector<PackedRun> runs = {{100, 17'900}};
  std::int64_t covered = 0;
  std::int64_t last_offset = -1;
  for_each_segment(grid, runs, 2, kStagingBytes, [&](const RowSegment& segment) {
    EXPECT_LE(segment.tokens * segment.heads * 128, kStagingBytes);
    EXPECT_GT(segment.offset, last_offset);
    last_offset = segment.offset;
    covered += segment.tokens * segment.heads;
  });
  EXPECT_EQ(covered, 17'800 * 2);

  const TemporaryFolder folder;
  const SafetensorsPlan plan = plan_safetensors({{"out", FileDtype::kBf16, grid.shape()}}, {});
  const auto writer = SafetensorsWriter::create(plan, folder.file("x"), false);
  Rows rows(runs, grid, 0);
  rows.for_each(runs, [](std::uint16_t& element, std::int64_t token, std::int64_t h, std::int64_t d) {
    element = pattern(token, h, d);
  });
  writer->write_rows("out", grid, runs, rows.view);
  writer->commit();
  const SafetensorsFile file(folder.file("x"));
  Rows back(runs, grid, 0);
  read_rows(file.tensor("out"), grid, runs, back.view);
  EXPECT_EQ(rows.data, back.data);
}

TEST(SafetensorsRows, ChecksShapesAndTypes) {
  const TemporaryFolder folder;
  const std::string path = folder.write(
      "x.safetensors", safetensors_bytes(R"({"q":{"dtype":"F32","shape":[2,1,2],"data_offsets":[0,16]},)"
                                         R"("b":{"dtype":"BF16","shape":[1,2,2,1],"data_offsets":[16,24]},)"
                                         R"("c":{"dtype":"I32","shape":[2],"data_offsets":[24,32]},)"
                                         R"("l":{"dtype":"I64","shape":[1],"data_offsets":[32,40]}})",
                                         std::string_view("\0\0\0\0\0\0\x80\x3f\0\0\0\0\0\0\0\0"
                                                          "\x80\x3f\0\x40\0\0\0\0"
                                                          "\1\0\0\0\xff\xff\xff\xff"
                                                          "\2\0\0\0\1\0\0\0",
                                                          40)));
  const SafetensorsFile file(path);
  EXPECT_EQ(row_grid(file.tensor("q"), {}).order, AxisOrder::kThd);
  EXPECT_EQ(row_grid(file.tensor("b"), {}).order, AxisOrder::kBthd);
  EXPECT_EQ(row_grid(file.tensor("b"), AxisOrder::kBhtd).heads, 2);
  EXPECT_EQ(row_dtype(file.tensor("b")), Dtype::kBf16);
  EXPECT_EQ(read_integers(file.tensor("c")), (std::vector<std::int64_t>{1, -1}));
  EXPECT_EQ(read_integers(file.tensor("l")), (std::vector<std::int64_t>{(std::int64_t{1} << 32) + 2}));

  const auto message = [](const auto& f) -> std::string {
    try {
      f();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFile);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(message([&] { row_grid(file.tensor("c"), {}); }).find("3 axes"), std::string::npos);
  EXPECT_NE(message([&] { row_grid(file.tensor("q"), AxisOrder::kBthd); }).find("order bthd has 4 axes"),
            std::string::npos);
  EXPECT_NE(message([&] { row_dtype(file.tensor("c")); }).find("dtype I32"), std::string::npos);
  EXPECT_NE(message([&] { read_integers(file.tensor("q")); }).find("I32 or I64"), std::string::npos);
  EXPECT_NE(message([&] { read_floats(file.tensor("c")); }).find("F32, BF16 or F16"), std::string::npos);
  EXPECT_NE(message([&] { read_floats(file.tensor("q")); }).find("one dimension"), std::string::npos);
  EXPECT_NE(message([&] { file.tensor("Q"); }).find("Did you mean `q`?"), std::string::npos);
  EXPECT_NE(message([&] { file.tensor("v"); }).find("Name it with tensors."), std::string::npos);
  EXPECT_NE(message([&] { file.tensor("weights"); }).find("it holds `b`, `c`, `l`, `q`"), std::string::npos);
}

TEST(SafetensorsRows, ReadsSinksOfEveryType) {
  const TemporaryFolder folder;
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const std::vector<float> values = {1.0F, -0.5F, 0.0F};
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) store_element(bytes.data() + i * size_of(dtype), dtype, values[i]);
    const SafetensorsPlan plan = plan_safetensors({{"sinks", file_dtype(dtype), {3}}}, {});
    const auto writer = SafetensorsWriter::create(plan, folder.file("sinks"), true);
    writer->write_bytes("sinks", bytes);
    writer->commit();
    EXPECT_EQ(read_floats(SafetensorsFile(folder.file("sinks")).tensor("sinks")), values);
  }
}

TEST(SafetensorsRows, PacksRunsOfALayout) {
  const std::vector<TokenRun> runs = {{0, 2, 5}, {0, 5, 10}, {1, 0, 3}, {2, 4, 4}, {2, 1, 2}};
  const std::vector<std::int64_t> begins = {0, 10, 20, 30};
  EXPECT_EQ(packed_runs(runs, begins), (std::vector<PackedRun>{{2, 13}, {21, 22}}));
}

std::string one_tensor(std::string_view name, std::string_view data) {
  return safetensors_bytes(
      fmt::format(R"({{"{}":{{"dtype":"U8","shape":[{}],"data_offsets":[0,{}]}}}})", name, data.size(), data.size()),
      data);
}

TEST(SafetensorsIndex, FindsTensorsInTheirFiles) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("sub"));
  folder.write("a.safetensors", one_tensor("q", "12"));
  folder.write("sub/b.safetensors", one_tensor("k", "3"));
  folder.write("broken.safetensors", "not a file");
  const std::string path =
      folder.write("m.index.json", R"({"weight_map":{"q":"a.safetensors","k":"sub/b.safetensors","v":"a.safetensors",)"
                                   R"("x":"broken.safetensors"}})");
  const SafetensorsFile file(path);
  EXPECT_EQ(file.names(), (std::vector<std::string_view>{"k", "q", "v", "x"}));
  EXPECT_TRUE(file.contains("k"));
  EXPECT_FALSE(file.contains("w"));
  EXPECT_EQ(file.tensor("q").info->bytes(), 2);
  EXPECT_EQ(file.tensor("k").shard->path(), folder.file("sub/b.safetensors"));
  EXPECT_FILE_ERROR(file.tensor("v"), "says it does");
  EXPECT_FILE_ERROR(file.tensor("x"), "broken.safetensors is not a valid safetensors file");
  EXPECT_FILE_ERROR(file.tensor("qq"), "Did you mean");

  std::vector<int> ranks(8);
  const SafetensorsFile shared(path);
  in_threads(ranks, [&](std::size_t, int) {
    if (shared.tensor("k").info->bytes() != 1 || shared.tensor("q").info->bytes() != 2) {
      throw std::runtime_error("differs");
    }
  });

  // A job needs the files of its own tensors.
  const SafetensorsFile part(
      folder.write("n.index.json", R"({"weight_map":{"q":"a.safetensors","k":"gone.safetensors"}})"));
  EXPECT_EQ(part.tensor("q").info->bytes(), 2);
  EXPECT_TRUE(part.is_current());
  EXPECT_FILE_ERROR(part.tensor("k"), "gone.safetensors");
  const SafetensorsFile directory(folder.write("d.index.json", R"({"weight_map":{"q":"sub"}})"));
  EXPECT_FILE_ERROR(directory.tensor("q"), "it is a directory");
}

TEST(SafetensorsFile, NoticesFilesThatChange) {
  const TemporaryFolder folder;
  const std::string path = folder.write("x", one_tensor("q", std::string(100'000, 'x')));
  const SafetensorsFile file(path);
  const TensorSource q = file.tensor("q");
  std::vector<std::byte> data(100'000);
  q.shard->read(*q.info, 0, data);
  q.shard->check_unchanged();
  std::filesystem::resize_file(path, 50'000);
  EXPECT_FILE_ERROR(q.shard->read(*q.info, 0, data), "has shrunk");
  EXPECT_FILE_ERROR(q.shard->check_unchanged(), "has changed");
  EXPECT_THROW(q.shard->read(*q.info, 1, data), Error);  // past the tensor
}

}  // namespace
}  // namespace ringattn::testing
