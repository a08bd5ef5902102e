// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/error.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/decode/cache_tensors.hpp"

namespace ringattn {

namespace {

using Rows = MlaTensors::Rows;

constexpr std::int64_t kMaxDims = 1 << 16;
constexpr std::string_view kMatrices =
    "w_uk is [heads, head_dim, latent_dim], w_uv [heads, head_dim_v, latent_dim]; kv_b_proj has both, of each head "
    "first the rows of w_uk.";
constexpr std::string_view kPages = "latent_pages is [pages, page_size, latent_dim + rope_dim], or bytes of such rows.";
constexpr std::string_view kLatentRows =
    "latent is [tokens, latent_dim] and k_rope [tokens, rope_dim], with an axis for the batch where q has one.";

// The grid of a tensor without heads: its last axis is a row, and the one before counts tokens.
RowGrid headless_grid(const TensorSource& tensor, bool has_batch) {
  const std::vector<std::int64_t>& shape = tensor.info->shape;
  require(shape.size() == (has_batch ? 3U : 2U), tensor, has_batch ? "it must have 3 axes" : "it must have 2 axes",
          kLatentRows);
  return {has_batch ? AxisOrder::kBthd : AxisOrder::kThd, has_batch ? shape[0] : 1, shape[has_batch ? 1 : 0], 1,
          shape.back()};
}

void check_dtype(const TensorSource& tensor, const InputTensors& input) {
  require(
      row_dtype(tensor) == input.dtype, tensor,
      fmt::format("{} {}", input.q.info != nullptr ? "q is" : "latents are", file_dtype_name(file_dtype(input.dtype))),
      "q, latents and matrices have one dtype.");
}

void check_matrix_dtype(const TensorSource& tensor, const InputTensors& input) {
  require(tensor.info->dtype != FileDtype::kF8E4m3, tensor, "scales of F8_E4M3 are applied only to kv_b_proj",
          "Give kv_b_proj with its scales, or the dequantized matrices.");
  check_dtype(tensor, input);
}

void check_dims(const TensorSource& tensor) {
  for (const std::int64_t extent : tensor.info->shape) {
    require(extent > 0, tensor, "none of its axes may be empty", kMatrices);
  }
}

// Finds the matrices of the file, and latent_dim if a matrix determines it. A tensor that is named must exist.
void find_matrices(const SafetensorsFile& file, const InputNames& names, InputTensors& input, MlaTensors& latents) {
  const bool named_apart = names.w_uk || names.w_uv;
  const bool apart = named_apart || file.contains("w_uk") || file.contains("w_uv");
  const bool joined = names.kv_b_proj || (!named_apart && file.contains("kv_b_proj"));
  if (names.kv_b_proj && named_apart) {
    fail(ErrorCode::kUsage, {setting("tensors"), " names kv_b_proj and w_uk or w_uv"},
         "the matrices of a job are apart or joined", "Name those that are meant.");
  }
  if (joined && apart && !names.kv_b_proj) {
    fail(ErrorCode::kFile, fmt::format("{} holds `kv_b_proj` and `w_uk` or `w_uv`", file.path()),
         "the matrices of a job are apart or joined", {"Name those that are meant with ", setting("tensors"), "."});
  }
  latents.joined_weights = joined;
  if (joined) {
    latents.w_uk = latents.w_uv = file.tensor(names.kv_b_proj.value_or("kv_b_proj"));
    latents.scales = find_block_scales(file, names, latents.w_uk);
    if (latents.scales) input.used.push_back(latents.scales->source);
  } else {
    if (const auto w_uk = find_optional(file, names.w_uk, "w_uk")) latents.w_uk = *w_uk;
    if (const auto w_uv = find_optional(file, names.w_uv, "w_uv")) latents.w_uv = *w_uv;
  }
  for (const TensorSource* const tensor : {&latents.w_uk, &latents.w_uv}) {
    if (tensor->info == nullptr) continue;
    if (!joined || tensor == &latents.w_uk) input.used.push_back(*tensor);
    if (!latents.scales) check_matrix_dtype(*tensor, input);
    check_dims(*tensor);
    require(tensor->info->shape.size() == (joined ? 2U : 3U), *tensor,
            joined ? "it must have 2 axes" : "it must have 3 axes", kMatrices);
    const std::int64_t dim = tensor->info->shape.back();
    require(dim <= kMaxDims, *tensor, fmt::format("at most {} dims are possible", kMaxDims), kMatrices);
    if (latents.latent_dim != 0) require(latents.latent_dim == dim, *tensor, described(latents.w_uk), kMatrices);
    latents.latent_dim = static_cast<int>(dim);
  }
}

// A matrix that determines latent_dim.
const TensorSource& matrix_of(const MlaTensors& latents) {
  return latents.w_uk.info != nullptr ? latents.w_uk : latents.w_uv;
}

bool names_rows(const InputNames& names) { return names.latent || names.k_rope; }

// True if latents are in pages. Checks that they are given in only one form.
bool are_pages(const SafetensorsFile& file, const InputNames& names) {
  return names.latent_pages || (!names_rows(names) && !names.latent_fp8 && file.contains("latent_pages"));
}

JobKind kind_of(const SafetensorsFile& file, const InputNames& names) {
  return are_pages(file, names) ? JobKind::kMlaDecode : JobKind::kMla;
}

// Finds the rows of latents and rotary keys. Does not check that their dims fit the matrices. Returns whether they are
// in pages. Without queries, their dtype becomes the input's.
bool find_rows(const SafetensorsFile& file, const InputNames& names, InputTensors& input, MlaTensors& latents) {
  const bool rows = names_rows(names);
  const bool pages = are_pages(file, names);
  const bool codes = names.latent_fp8 || (!rows && !pages && file.contains("latent_fp8"));
  const int named = (rows ? 1 : 0) + (names.latent_fp8 ? 1 : 0) + (names.latent_pages ? 1 : 0);
  if (named > 1) {
    fail(ErrorCode::kUsage, {setting("tensors"), fmt::format(" names latents in {} forms", named)},
         "latent and k_rope, latent_fp8 and latent_pages exclude each other", "Name the one that is meant.");
  }
  const int kinds = (pages ? 1 : 0) + (codes ? 1 : 0) + (rows || file.contains("latent") ? 1 : 0);
  if (kinds > 1 && named == 0) {
    fail(ErrorCode::kFile, fmt::format("{} holds latents in {} forms", file.path(), kinds),
         "latent, latent_fp8 and latent_pages exclude each other",
         {"Name the one that is meant with ", setting("tensors"), "."});
  }
  latents.latent = pages   ? file.tensor(names.latent_pages.value_or("latent_pages"))
                   : codes ? file.tensor(names.latent_fp8.value_or("latent_fp8"))
                           : file.tensor(names.latent.value_or("latent"));
  input.used.push_back(latents.latent);
  const bool queries = input.q.info != nullptr;
  const bool batched = queries ? input.q_grid.has_batch() : latents.latent.info->shape.size() == 3;
  latents.latent_grid = headless_grid(latents.latent, pages || batched);
  const bool bytes = latents.latent.info->dtype == FileDtype::kU8;
  if (codes || (pages && bytes)) {
    require(bytes, latents.latent, "it must be U8", "FP8 rows are bytes: quantized values, scales, rotary key.");
    require(!queries || input.dtype == Dtype::kBf16, input.q, "FP8 latents are dequantized to BF16",
            "Convert q to BF16.");
    if (codes && file.contains("k_rope")) {
      fail(ErrorCode::kFile, fmt::format("{} holds {} and k_rope", file.path(), described(latents.latent)),
           "FP8 rows have their rotary keys", "Leave k_rope out, or give latents of 16 bits.");
    }
    latents.rows = Rows::kFp8;
    return pages;
  }
  if (!queries) input.dtype = row_dtype(latents.latent);
  check_dtype(latents.latent, input);
  if (pages) {
    latents.rows = Rows::kJoined;
    return true;
  }
  latents.k_rope = file.tensor(names.k_rope.value_or("k_rope"));
  input.used.push_back(latents.k_rope);
  check_dtype(latents.k_rope, input);
  latents.k_rope_grid = headless_grid(latents.k_rope, batched);
  require(latents.k_rope_grid.batch == latents.latent_grid.batch &&
              latents.k_rope_grid.length == latents.latent_grid.length,
          latents.k_rope, described(latents.latent), kLatentRows);
  return false;
}

// Checks the dim of rotary keys that are in a tensor of their own.
void check_rope(const MlaTensors& latents) {
  const std::int64_t dims = latents.k_rope_grid.dim;
  require(dims > 0 && dims <= kMaxDims, latents.k_rope, fmt::format("a rotary key has 1 to {} dims", kMaxDims),
          kLatentRows);
}

// Says for messages which tensor determines latent_dim.
std::string says_latent(const MlaTensors& latents) {
  const TensorSource& matrix = matrix_of(latents);
  return matrix.info != nullptr ? described(matrix) : fmt::format("the latent has {} dims", latents.latent_dim);
}

// latent_dim of plain rows in pages that no matrix determines. `stated`: the caller's value, or 0 if unknown.
int stated_latent_dim(const MlaTensors& latents, int stated) {
  require(stated > 0, latents.latent, "latent_dim follows from the matrices, and the file has none",
          {"Add one of them to the file, or give ", setting("latent_dim", 512), "."});
  return stated;
}

// Throws the error of a tensor that must exist.
void missing_w_uk(const SafetensorsFile& file, const InputNames& names) { file.tensor(names.w_uk.value_or("w_uk")); }

// latent_dim of FP8 latent rows when queries are in the latent space. Queries and rows have `numbers` elements, and a
// row has `width` bytes: 33 for each 32 elements of the latent and 64 for each 32 rotary ones. 0: no such row exists.
int latent_dim_of_fp8(std::int64_t width, std::int64_t numbers) {
  if (numbers > kMaxDims || width >= 2 * numbers) return 0;
  const std::int64_t codes = (2 * numbers - width) * 32;
  const std::int64_t latent_dim = codes / 31;
  const bool whole = codes % 31 == 0 && latent_dim % kLatentScaleBlock == 0 && latent_dim < numbers;
  return whole ? static_cast<int>(latent_dim) : 0;
}

// Finds latent_dim if no matrix determines it, so that queries are in the latent space. `stated`: the caller's value,
// or 0.
void find_latent_dim(const SafetensorsFile& file, const InputNames& names, const InputTensors& input, int stated,
                     MlaTensors& latents) {
  const std::int64_t width = latents.latent_grid.dim;
  if (latents.rows == Rows::kSeparate) {
    require(width > 0 && width <= kMaxDims, latents.latent, fmt::format("a latent has 1 to {} dims", kMaxDims),
            kLatentRows);
    latents.latent_dim = static_cast<int>(width);
  } else if (latents.rows == Rows::kFp8) {
    latents.latent_dim = latent_dim_of_fp8(width, input.q_grid.dim);
    if (latents.latent_dim == 0) missing_w_uk(file, names);
  } else {
    if (width != input.q_grid.dim) missing_w_uk(file, names);
    latents.latent_dim = stated_latent_dim(latents, stated);
  }
}

// The number of rotary dims of a row. Checks that the other dims are those of the latent.
std::int64_t rope_dim_of(const MlaTensors& latents) {
  const std::int64_t width = latents.latent_grid.dim;
  const std::string of_matrix = says_latent(latents);
  if (latents.rows == Rows::kSeparate) {
    require(width == latents.latent_dim, latents.latent, of_matrix, kMatrices);
    check_rope(latents);
    return latents.k_rope_grid.dim;
  }
  std::int64_t rope = width - latents.latent_dim;
  if (latents.rows == Rows::kFp8) {
    require(latents.latent_dim % kLatentScaleBlock == 0, matrix_of(latents),
            fmt::format("FP8 latents have a multiple of {} dims", kLatentScaleBlock), kMatrices);
    rope = (width - latent_row_bytes(latents.latent_dim, 0)) / static_cast<std::int64_t>(size_of(Dtype::kBf16));
    require(rope >= 0 && latent_row_bytes(latents.latent_dim, rope) == width, latents.latent,
            fmt::format("rows of {} latent dims have {} bytes and 2 for each rotary dim; {}", latents.latent_dim,
                        latent_row_bytes(latents.latent_dim, 0), of_matrix),
            kMatrices);
  }
  require(rope > 0, latents.latent, fmt::format("a rotary key follows the latent; {}", of_matrix), kMatrices);
  return rope;
}

// True if queries are in the latent space: their dim is the latent's, and the rows of w_uk don't explain it. Without
// w_uk they must be: throws kFile, naming it, if they are not.
bool find_queries(const SafetensorsFile& file, const InputNames& names, const InputTensors& input, std::int64_t rope,
                  const MlaTensors& latents) {
  const bool wide = input.q_grid.dim == latents.latent_dim + rope;
  if (latents.joined_weights) return false;
  if (latents.w_uk.info == nullptr) {
    if (!wide) missing_w_uk(file, names);
    return true;
  }
  const std::int64_t rows = latents.w_uk.info->shape[1];
  return wide && rows != latents.latent_dim && rows <= kMaxDims;
}

// Checks the dims of all tensors, which follow from those of the matrices and of a row.
void check_fit(const SafetensorsFile& file, const InputNames& names, const InputTensors& input, MlaTensors& latents) {
  const std::int64_t heads = input.q_grid.heads;
  require(heads > 0 && heads <= kMaxDims && input.q_grid.dim <= kMaxDims, input.q,
          fmt::format("it needs 1 to {} heads, and as many dims", kMaxDims),
          {setting("order"), " says which axis is which."});
  const std::int64_t rope = rope_dim_of(latents);
  latents.rope_dim = static_cast<int>(rope);
  latents.q_in_latent = find_queries(file, names, input, rope, latents);
  latents.out_in_latent = latents.w_uv.info == nullptr;
  const std::string queries = fmt::format("{}, {} of its dims rotary", described(input.q), rope);
  const std::int64_t nope = input.q_grid.dim - rope;
  require(nope > 0, input.q,
          fmt::format("{} of its dims are rotary: {}", rope,
                      described(latents.rows == Rows::kSeparate ? latents.k_rope : latents.latent)),
          "A query has the dims of w_uk's rows, or those of the latent, and then the rotary ones.");
  if (latents.joined_weights) {
    const std::int64_t rows = latents.w_uk.info->shape[0];
    require(rows % heads == 0, latents.w_uk, queries, kMatrices);
    // The dim is that of the latent, which leaves no dims for w_uv after head_dim, so such queries are in the latent
    // space.
    require(rows / heads > nope || nope != latents.latent_dim, latents.w_uk,
            fmt::format("{} is in the latent, so it is unknown how many of the {} rows of a head belong to w_uk",
                        described(input.q), rows / heads),
            "Give w_uk and w_uv instead, or queries that have not been multiplied by w_uk.");
    require(rows / heads > nope, latents.w_uk, queries, kMatrices);
    latents.head_dim = static_cast<int>(nope);
    latents.head_dim_v = static_cast<int>(std::min(rows / heads - nope, kMaxDims + 1));
  } else {
    if (latents.w_uk.info != nullptr) {
      const std::vector<std::int64_t>& keys = latents.w_uk.info->shape;
      require(keys[0] == heads && (latents.q_in_latent || keys[1] == nope), latents.w_uk, queries, kMatrices);
      latents.head_dim = static_cast<int>(keys[1]);
    }
    latents.head_dim_v = latents.latent_dim;
    if (latents.w_uv.info != nullptr) {
      const std::vector<std::int64_t>& values = latents.w_uv.info->shape;
      require(values[0] == heads, latents.w_uv, queries, kMatrices);
      latents.head_dim_v = static_cast<int>(std::min(values[1], kMaxDims + 1));
    }
  }
  require(latents.head_dim_v <= kMaxDims, latents.w_uv, fmt::format("at most {} dims are possible", kMaxDims),
          kMatrices);
}

// Finds pages of rows, and the sequences that they belong to.
void find_paging(const SafetensorsFile& file, const InputNames& names, const MlaTensors& latents, InputTensors& input) {
  const RowGrid& rows = latents.latent_grid;
  require(is_page_size(rows.length), latents.latent,
          fmt::format("its pages hold {} tokens; {} are possible", rows.length, kPageSizes), kPages);
  require(rows.batch <= std::numeric_limits<std::int32_t>::max(), latents.latent,
          fmt::format("it has {} pages, more than an I32 can number", rows.batch), kPages);
  read_paging(file, names, rows, input);
}

}  // namespace

bool holds_latents(const SafetensorsFile& file, const InputNames& names) {
  const bool named_keys = names.k || names.v || names.k_pages || names.v_pages;
  const bool named_latents = names.latent || names.k_rope || names.latent_fp8 || names.latent_pages || names.w_uk ||
                             names.w_uv || names.kv_b_proj;
  if (named_keys != named_latents) return named_latents;
  if (named_keys) {
    fail(ErrorCode::kUsage, {setting("tensors"), " names keys and latents"},
         "the keys of a job are its own or expanded from latents", "Name k and v, or latent and k_rope.");
  }
  const bool latents = file.contains("latent") || file.contains("latent_fp8") || file.contains("latent_pages");
  const bool keys = file.contains("k") || file.contains("k_pages");
  if (latents && keys) {
    fail(ErrorCode::kFile, fmt::format("{} holds keys and latents", file.path()),
         "the keys of a job are its own or expanded from latents",
         {"Name k and v, or latent and k_rope, with ", setting("tensors"), "."});
  }
  return latents;
}

std::pair<InputTensors, MlaTensors> find_latents(const SafetensorsFile& file, const InputNames& given,
                                                 std::optional<AxisOrder> order, int latent_dim) {
  const InputNames names = resolve_names(file, given, kind_of(file, given));
  InputTensors input;
  MlaTensors latents;
  input.q = file.tensor(names.q.value_or("q"));
  input.q_grid = row_grid(input.q, order);
  input.dtype = row_dtype(input.q);
  input.used = {input.q};
  const bool pages = find_rows(file, names, input, latents);
  find_matrices(file, names, input, latents);
  if (latents.latent_dim == 0) find_latent_dim(file, names, input, latent_dim, latents);
  check_fit(file, names, input, latents);
  const RowGrid& rows = latents.latent_grid;
  input.k_grid = {rows.order, rows.batch, rows.length, input.q_grid.heads, input.q_grid.dim};
  input.v_grid = input.k_grid;
  input.v_grid.dim = latents.head_dim_v;
  if (pages) {
    find_paging(file, names, latents, input);
  } else {
    require(rows.batch == input.q_grid.batch, latents.latent, described(input.q), kLatentRows);
    input.sequences = read_sequences(file, names, input);
  }
  read_sinks(file, names, input);
  return {std::move(input), latents};
}

std::pair<InputTensors, MlaTensors> find_latent_rows(const SafetensorsFile& file, const InputNames& given,
                                                     std::optional<AxisOrder> order, int latent_dim) {
  if (find_optional(file, given.q, "q")) return find_latents(file, given, order, latent_dim);
  const InputNames names = resolve_names(file, given, kind_of(file, given));
  InputTensors input;
  MlaTensors latents;
  const bool pages = find_rows(file, names, input, latents);
  if (latents.rows == Rows::kFp8) return {std::move(input), latents};
  find_matrices(file, names, input, latents);
  const TensorSource& matrix = matrix_of(latents);
  if (matrix.info == nullptr && pages) {
    latents.latent_dim = stated_latent_dim(latents, latent_dim);
  } else if (matrix.info == nullptr) {
    latents.latent_dim = static_cast<int>(std::min(latents.latent_grid.dim, kMaxDims));
  }
  const std::int64_t width = latents.latent_grid.dim;
  const std::int64_t rope = pages ? width - latents.latent_dim : latents.k_rope_grid.dim;
  require(pages || width == latents.latent_dim, latents.latent,
          matrix.info != nullptr ? MessageTemplate(described(matrix))
                                 : MessageTemplate(fmt::format("at most {} dims are possible", kMaxDims)),
          kMatrices);
  if (pages) {
    require(rope > 0 && rope <= kMaxDims, latents.latent,
            fmt::format("a rotary key of 1 to {} dims follows the latent; {}", kMaxDims, says_latent(latents)),
            kMatrices);
  } else {
    check_rope(latents);
  }
  latents.rope_dim = static_cast<int>(rope);
  if (pages) {
    find_paging(file, names, latents, input);
  } else if (const auto cu = find_optional(file, names.cu_seqlens_k, "cu_seqlens_k")) {
    static_cast<void>(read_cumulative(*cu, latents.latent_grid, "latent"));
  }
  return {std::move(input), latents};
}

}  // namespace ringattn
