// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"
#include "io/tensor_checks.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/attention_jobs/compressed_tensors.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/compression/cache_rows.hpp"
#include "ops/compression/compress_common.hpp"
#include "ops/compression/finite_tensor.hpp"
#include "ops/compression/pool_slots.hpp"
#include "ops/mla/mla_tensors.hpp"

namespace ringattn {

namespace {

using Rows = MlaTensors::Rows;

void check_method(const CompressJob& job, const SafetensorsFile& file) {
  if (job.method.eviction) {
    fail(ErrorCode::kFile, fmt::format("{} holds latents", file.path()), "tokens are evicted only from keys and values",
         {"Give a file with k and v or with pages of them, or use ", setting("method", "fp8"), "."});
  }
  const std::string_view method = job.method.format->name;
  if (method == "fp8") return;
  fail(ErrorCode::kUsage, {setting("method", method), " with latents"},
       "they are stored as they are, or in FP8 rows (fp8)", {"Use ", setting("method", "fp8"), "."});
}

// `before` and `after`: bytes of a token's row.
void check_ratio(const CompressJob& job, std::int64_t before, std::int64_t after) {
  const double removed = 1.0 - static_cast<double>(after) / static_cast<double>(before);
  if (job.ratio && !meets_ratio(removed, *job.ratio)) {
    fail(ErrorCode::kUsage, {setting("ratio", fmt::format("{}", *job.ratio)), " with latents"},
         fmt::format("the ratio is the share of the bytes that is removed, and FP8 rows remove {} of them",
                     max_ratio(removed)),
         "Ask for less, or leave it out.");
  }
}

// Latents and rotary keys of some tokens, dense and finite.
struct LatentRows {
  LatentRows(const MlaTensors& of, bool in_pages)
      : source(of),
        paged(in_pages),
        latent_shape{Dtype::kBf16, 1, of.latent_dim},
        rope_shape{Dtype::kBf16, 1, of.rope_dim} {}

  void read(std::span<const PackedRun> runs) {
    tokens = total_tokens(runs);
    const bool joined = source.rows == Rows::kJoined;
    read(SyntheticTensor::kLatent, joined ? "latent_pages" : "latent", latent_shape, 0, runs, latent);
    read(SyntheticTensor::kKeyRope, joined ? "latent_pages" : "k_rope", rope_shape, joined ? source.latent_dim : 0,
         runs, rope);
  }

  const MlaTensors& source;
  bool paged;
  RowShape latent_shape, rope_shape;
  std::int64_t tokens = 0;
  std::vector<std::byte> latent, rope;

 private:
  // `first`: the first of these dims in the named tensor.
  void read(SyntheticTensor tensor, const char* name, const RowShape& shape, std::int64_t first,
            std::span<const PackedRun> runs, std::vector<std::byte>& rows) {
    rows.resize(bytes_of(shape, tokens));
    const MutableTensorView view = view_of(rows, shape, tokens);
    ringattn::read_latents(source, tensor, runs, view);
    if (count_non_finite(view) == 0) return;
    auto invalid = find_invalid_element(view);
    invalid->index += first;
    const std::int64_t slot = slot_at(runs, invalid->token);
    const RowGrid& grid = source.latent_grid;
    std::string place = fmt::format("{}", slot);
    if (paged || grid.has_batch()) place = fmt::format("{}, {}", slot / grid.length, slot % grid.length);
    refuse_invalid_element(name, {}, shape, *invalid, ErrorCode::kFile, place);
  }
};

// Calls part(first, tokens) for some tokens at a time, on all threads.
template <class Part>
void for_each_part(std::int64_t tokens, int threads, const Part& part) {
  constexpr std::int64_t kPart = 1 << 7;
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

// The matrices of the file, by name.
std::vector<std::pair<std::string_view, TensorSource>> matrices_of(const MlaTensors& source) {
  std::vector<std::pair<std::string_view, TensorSource>> matrices;
  if (source.joined_weights) {
    matrices.emplace_back("kv_b_proj", source.w_uk);
    if (source.scales) matrices.emplace_back("kv_b_proj_scale_inv", source.scales->source);
    return matrices;
  }
  if (source.w_uk.info != nullptr) matrices.emplace_back("w_uk", source.w_uk);
  if (source.w_uv.info != nullptr) matrices.emplace_back("w_uv", source.w_uv);
  return matrices;
}

// Inputs of O besides latents and rotary keys, if there are queries.
void check_compared_inputs(const SafetensorsFile& file, const InputNames& names, const MlaTensors& source) {
  check_compared_queries(file, names);
  for (const auto& [name, matrix] : matrices_of(source)) check_compared(matrix, name);
}

// Calls `part` for all tokens, or for those of a pool that sequences hold, some at a time.
void for_each_run(const InputTensors& found, const RowGrid& grid, std::int64_t most,
                  const std::function<void(std::span<const PackedRun> runs)>& part) {
  if (found.pages) {
    held_slots(*found.pages, Batch{found.sequences}.cu_k())
        .for_each_part(most, [&](std::int64_t, std::span<const PackedRun> runs) { part(runs); });
    return;
  }
  for (std::int64_t first = 0; first < grid.tokens(); first += most) {
    const PackedRun run{first, std::min(first + most, grid.tokens())};
    part({&run, 1});
  }
}

}  // namespace

CompressResult compress_latents(const SafetensorsFile& file, const FileInput& input, const CompressJob& job) {
  check_method(job, file);
  const auto [found, source] = find_latent_rows(file, input.names, input.order, input.latent_dim);
  require(source.rows != Rows::kFp8, source.latent, "FP8 latents are compressed already",
          "Give a file with latent and k_rope, or with pages of them.");
  require(found.dtype == Dtype::kBf16, source.latent, "FP8 latents are dequantized to BF16",
          "Convert it, and q and the matrices beside it, to BF16.");
  require(source.latent_dim > 0 && source.latent_dim % kLatentScaleBlock == 0, source.latent,
          fmt::format("{} numbers of a latent share a scale, and it has {}", kLatentScaleBlock, source.latent_dim),
          fmt::format("FP8 latents have a multiple of {} dims.", kLatentScaleBlock));
  require(source.rope_dim % 4 == 0, source.latent, fmt::format("its rotary keys have {} numbers", source.rope_dim),
          "In FP8 rows they have a multiple of 4.");
  const std::int64_t row_bytes = latent_row_bytes(source.latent_dim, source.rope_dim);
  const auto plain_bytes = static_cast<std::int64_t>(size_of(Dtype::kBf16)) * (source.latent_dim + source.rope_dim);
  check_ratio(job, plain_bytes, row_bytes);

  // Rows are checked and quantized part by part, whatever their number.
  const std::int64_t most = std::max<std::int64_t>(1, kPartBytes / plain_bytes);
  check_host_memory(fmt::format("the latents of {}", file.path()),
                    static_cast<double>(std::max(kPartBytes, plain_bytes)) * 4.0);
  check_compared_job(job, found.q.info != nullptr);
  LatentRows rows(source, found.pages != nullptr);
  for_each_run(found, source.latent_grid, most, [&](std::span<const PackedRun> runs) {
    heartbeat();
    rows.read(runs);  // throws if a value is not finite
  });
  const InputNames names =
      resolve_names(file, input.names, found.pages != nullptr ? JobKind::kMlaDecode : JobKind::kMla);
  if (job.compared) check_compared_inputs(file, names, source);

  RowGrid grid = source.latent_grid;
  CompressResult result;
  result.unread = unread_beside(file, names, input.names, found.used);
  result.tokens = result.kept = found.pages ? Batch{found.sequences}.k_tokens() : grid.tokens();
  CompressedFigures& figures = result.latent.emplace();
  figures.format = latent_format(source.rope_dim);
  figures.bytes_before = grid.tokens() * plain_bytes;
  figures.bytes_after = grid.tokens() * row_bytes;

  grid.dim = row_bytes;
  const std::string name = found.pages ? "latent_pages" : "latent_fp8";
  OutputTensor packed{name, FileDtype::kU8, {grid.batch, grid.length, row_bytes}};
  if (!found.pages && !grid.has_batch()) packed.shape.erase(packed.shape.begin());
  std::vector<WholeTensor> tensors = find_others(file, names);
  for (const auto& [role, matrix] : matrices_of(source)) tensors.push_back(stored_tensor(role, matrix));
  const auto writer = create_file(job, tensors, {packed}, {});
  std::vector<std::byte> codes, back, rope_back;
  RelativeError error;
  for_each_run(found, source.latent_grid, most, [&](std::span<const PackedRun> runs) {
    heartbeat();
    rows.read(runs);
    codes.resize(static_cast<std::size_t>(rows.tokens * row_bytes));
    figures.compress_seconds += seconds_of([&] {
      for_each_part(rows.tokens, job.threads, [&](std::int64_t first, std::int64_t tokens) {
        quantize_latent_rows(part_of(rows.latent, rows.latent_shape, first, tokens),
                             part_of(rows.rope, rows.rope_shape, first, tokens), codes.data() + first * row_bytes,
                             row_bytes);
      });
    });
    back.resize(rows.latent.size());
    rope_back.resize(rows.rope.size());
    figures.decompress_seconds += seconds_of([&] {
      for_each_part(rows.tokens, job.threads, [&](std::int64_t first, std::int64_t tokens) {
        dequantize_latent_rows(codes.data() + first * row_bytes, row_bytes,
                               part_of(back, rows.latent_shape, first, tokens),
                               part_of(rope_back, rows.rope_shape, first, tokens));
      });
    });
    error.add(rows.latent, back, Dtype::kBf16, job.threads);
    writer->write_row_bytes(name, grid, runs, 1, codes);
  });
  figures.error = error.value();
  finish_file(*writer);
  return result;
}

}  // namespace ringattn
