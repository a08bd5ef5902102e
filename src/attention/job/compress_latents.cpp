// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/files/compressed_tensors.hpp"
#include "attention/files/latent_tensors.hpp"
#include "attention/files/tensor_checks.hpp"
#include "attention/job/cache_rows.hpp"
#include "attention/job/compress_part.hpp"
#include "base/error.hpp"
#include "base/pulse.hpp"
#include "kernels/latent_rows.hpp"

namespace ringattn {

namespace {

using Rows = LatentTensors::Rows;

void check_method(const CompressJob& job, const SafetensorsFile& file, std::int64_t before, std::int64_t after) {
  if (job.method.eviction) {
    fail(ErrorCode::kFile, fmt::format("{} holds latents", file.path()),
         "tokens are taken out of keys and values in rows",
         {"Give a file with k and v, or use ", setting("method", "fp8"), "."});
  }
  const std::string_view method = job.method.format->name;
  if (method != "fp8") {
    fail(ErrorCode::kUsage, {setting("method", method), " with latents"},
         "they are stored as they are, or in rows of 8 bits (fp8)", {"Use ", setting("method", "fp8"), "."});
  }
  const double removed = 1.0 - static_cast<double>(after) / static_cast<double>(before);
  if (job.ratio && *job.ratio > removed + 1e-9) {
    fail(ErrorCode::kUsage, {setting("ratio", fmt::format("{}", *job.ratio)), " with latents"},
         fmt::format("the ratio is the share of the bytes that is removed, and rows of 8 bits remove {:.3f} of them",
                     removed),
         "Ask for less, or leave it out.");
  }
}

// Latents and rotary keys of tokens, dense, all of them finite.
struct LatentRows {
  LatentRows(const LatentTensors& source, const PageTable* pages, std::span<const PackedRun> runs)
      : tokens(total_tokens(runs)),
        latent_shape{Dtype::kBf16, 1, source.latent_dim},
        rope_shape{Dtype::kBf16, 1, source.rope_dim},
        latent(bytes_of(latent_shape, tokens)),
        rope(bytes_of(rope_shape, tokens)) {
    const bool joined = source.rows == Rows::kJoined;
    const auto read = [&](SyntheticTensor tensor, const char* name, const RowShape& shape, std::int64_t first,
                          std::vector<std::byte>& rows) {
      const MutableTensorView view = view_of(rows, shape, tokens);
      ringattn::read_latents(source, tensor, runs, view);
      auto fault = find_fault(view);
      if (!fault) return;
      fault->place += first;
      std::int64_t rest = fault->token;
      auto run = runs.begin();
      for (; rest >= run->tokens(); ++run) rest -= run->tokens();
      const std::int64_t slot = run->begin + rest;
      const RowGrid& grid = source.latent_grid;
      std::string place = fmt::format("{}", slot);
      if (pages != nullptr || grid.has_batch()) place = fmt::format("{}, {}", slot / grid.length, slot % grid.length);
      refuse_fault(name, {}, shape, *fault, ErrorCode::kFile, place);
    };
    read(SyntheticTensor::kLatent, joined ? "latent_pages" : "latent", latent_shape, 0, latent);
    read(SyntheticTensor::kKeyRope, joined ? "latent_pages" : "k_rope", rope_shape, joined ? source.latent_dim : 0,
         rope);
  }

  std::int64_t tokens;
  RowShape latent_shape, rope_shape;
  std::vector<std::byte> latent, rope;
};

// Calls part(first, tokens) for some tokens at a time, on all threads.
template <class Part>
void for_each_part(std::int64_t tokens, int threads, const Part& part) {
  constexpr std::int64_t kPart = 1 << 10;
  const std::int64_t parts = (tokens + kPart - 1) / kPart;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t i = 0; i < parts; ++i) part(i * kPart, std::min(kPart, tokens - i * kPart));
  static_cast<void>(threads);
}

MutableTensorView part_of(std::vector<std::byte>& rows, const RowShape& shape, std::int64_t first,
                          std::int64_t tokens) {
  return dense_view(static_cast<void*>(rows.data() + bytes_of(shape, first)), shape.dtype, tokens, shape.heads,
                    shape.dim);
}

void add_matrices(const LatentTensors& source, std::vector<WholeTensor>& tensors) {
  const auto add = [&](const char* name, const TensorSource& matrix) {
    if (matrix.info == nullptr) return;
    WholeTensor& copied = tensors.emplace_back();
    copied.tensor = {name, matrix.info->dtype, matrix.info->shape};
    copied.bytes.resize(static_cast<std::size_t>(matrix.info->bytes()));
    matrix.shard->read(*matrix.info, 0, copied.bytes);
    matrix.shard->check_unchanged();
  };
  add(source.joined_weights ? "kv_b_proj" : "w_uk", source.w_uk);
  if (!source.joined_weights) add("w_uv", source.w_uv);
}

}  // namespace

CompressResult compress_latents(const SafetensorsFile& file, const FileInput& input, const CompressJob& job) {
  const auto [found, source] = find_latent_rows(file, input.names, input.order);
  require(source.rows != Rows::kCodes, source.latent, "latents of 8 bits are compressed already",
          "Give a file with latent and k_rope, or with pages of them.");
  require(found.dtype == Dtype::kBf16, source.latent, "latents of 8 bits are unpacked to BF16",
          "Convert it, and q and the matrices beside it, to BF16.");
  require(source.latent_dim > 0 && source.latent_dim % kLatentScaleBlock == 0, source.latent,
          fmt::format("{} numbers of a latent share a scale, and it has {}", kLatentScaleBlock, source.latent_dim),
          fmt::format("Latents of 8 bits have a multiple of {} dims.", kLatentScaleBlock));
  const std::int64_t row_bytes = latent_row_bytes(source.latent_dim, source.rope_dim);
  const auto plain_bytes = static_cast<std::int64_t>(size_of(Dtype::kBf16)) * (source.latent_dim + source.rope_dim);
  check_method(job, file, plain_bytes, row_bytes);

  RowGrid grid = source.latent_grid;
  const PackedRun all{0, grid.tokens()};
  std::vector<PackedRun> runs{all};
  if (found.pages) runs = held_slots(*found.pages, Batch{found.sequences}.cu_k());
  LatentRows rows(source, found.pages.get(), runs);
  CompressResult result;
  result.tokens = result.kept = found.pages ? Batch{found.sequences}.k_tokens() : rows.tokens;
  CompressedFigures& figures = result.latent.emplace();
  figures.format = latent_format(source.rope_dim);
  figures.bytes_before = grid.tokens() * plain_bytes;
  figures.bytes_after = grid.tokens() * row_bytes;
  beat();
  std::vector<std::byte> codes(static_cast<std::size_t>(rows.tokens * row_bytes));
  figures.compress_seconds = seconds_of([&] {
    for_each_part(rows.tokens, job.threads, [&](std::int64_t first, std::int64_t tokens) {
      pack_latent_rows(part_of(rows.latent, rows.latent_shape, first, tokens),
                       part_of(rows.rope, rows.rope_shape, first, tokens), codes.data() + first * row_bytes, row_bytes);
    });
  });
  std::vector<std::byte> back(rows.latent.size());
  figures.decompress_seconds = seconds_of([&] {
    for_each_part(rows.tokens, job.threads, [&](std::int64_t first, std::int64_t tokens) {
      unpack_latent_rows(codes.data() + first * row_bytes, row_bytes, part_of(back, rows.latent_shape, first, tokens),
                         part_of(rows.rope, rows.rope_shape, first, tokens));  // which come back as they were
    });
  });
  figures.error = relative_error(rows.latent, back, Dtype::kBf16, job.threads);

  std::vector<WholeTensor> tensors = read_others(file, input.names);
  add_matrices(source, tensors);
  grid.dim = row_bytes;
  WholeTensor& packed = tensors.emplace_back();
  packed.tensor = {found.pages ? "latent_pages" : "latent_fp8", FileDtype::kU8, {grid.batch, grid.length, row_bytes}};
  if (!found.pages && !grid.has_batch()) packed.tensor.shape.erase(packed.tensor.shape.begin());
  packed.bytes = found.pages ? in_pages(codes, grid, 1, runs) : std::move(codes);
  write_file(job, tensors, {});
  return result;
}

}  // namespace ringattn
