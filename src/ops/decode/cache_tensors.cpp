// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/cache_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kTableSuggestion =
    "Its entry [s, i] is the page of tokens i * page_size and on of sequence s; entries after a sequence's last page "
    "may hold anything.";
constexpr std::string_view kLengthsSuggestion =
    "It holds the number of keys of each sequence, those of its queries among them.";

MessageTemplate page_orders() {
  return {setting("page_order"), ", or page_order in the file's metadata, says which it is: thd or htd."};
}

bool is_page_order(AxisOrder order) { return order == AxisOrder::kThd || order == AxisOrder::kHtd; }

RowGrid pages_grid(const TensorSource& tensor, AxisOrder order) {
  return row_grid(tensor, order == AxisOrder::kThd ? AxisOrder::kBthd : AxisOrder::kBhtd);
}

void check_axes(const TensorSource& tensor) {
  require(tensor.info->shape.size() == 4, tensor,
          "it must have 4 axes: (pages, page_size, kv_heads, dim), or head-major (pages, kv_heads, page_size, dim)",
          "Write a pool of pages of one size.");
}

// True if the axes can be read as pages: the page size is supported, and the K/V heads divide q's. `q_heads` 0: there
// is no q.
bool fits(const RowGrid& pages, std::int64_t q_heads) {
  return is_page_size(pages.length) && pages.heads > 0 && q_heads % pages.heads == 0;
}

AxisOrder find_page_order(const SafetensorsFile& file, const TensorSource& k, std::int64_t q_heads) {
  if (const std::string* said = file.metadata("page_order")) {
    const auto order = parse_axis_order(*said);
    if (!order || !is_page_order(*order)) {
      fail(ErrorCode::kFile, fmt::format("page_order is {} in the metadata of {}", in_quotes(*said), file.path()),
           "a page has order thd or htd",
           "Write thd for [page_size, kv_heads, dim], or htd for [kv_heads, page_size, dim].");
    }
    return *order;
  }
  const bool thd = fits(pages_grid(k, AxisOrder::kThd), q_heads);
  const bool htd = fits(pages_grid(k, AxisOrder::kHtd), q_heads);
  require(!(thd && htd), k,
          fmt::format("its pages may be {} tokens of {} heads, or {} heads of {} tokens", k.info->shape[1],
                      k.info->shape[2], k.info->shape[1], k.info->shape[2]),
          page_orders());
  return htd ? AxisOrder::kHtd : AxisOrder::kThd;  // if neither fits, the usual order is refused with a message
}

void check_queries(const InputTensors& input) {
  const RowGrid& q = input.q_grid;
  const RowGrid& k = input.k_grid;
  require(q.heads > 0 && q.dim > 0, input.q, "it needs at least one head and one dim",
          {setting("order"), " says which axis is which."});
  require(k.dim == q.dim, input.k, fmt::format("its rows have {} channels, and q's head_dim is {}", k.dim, q.dim),
          page_orders());
  require(q.heads % k.heads == 0, input.k,
          fmt::format("read as {}, K has {} heads and Q has {}, which is not a multiple of it",
                      k.head_major() ? "htd" : "thd", k.heads, q.heads),
          page_orders());
}

void check_pages(const InputTensors& input) {
  const RowGrid& k = input.k_grid;
  const RowGrid& v = input.v_grid;
  for (const auto& [tensor, grid] : {std::pair{&input.k, &k}, std::pair{&input.v, &v}}) {
    require(grid->heads > 0 && grid->dim > 0, *tensor, "it needs at least one head and one dim", page_orders());
    require(is_page_size(grid->length), *tensor,
            fmt::format("read as {}, its pages hold {} tokens; {} are possible", grid->head_major() ? "htd" : "thd",
                        grid->length, kPageSizes),
            page_orders());
  }
  if (input.q.info != nullptr) check_queries(input);
  require(v.batch == k.batch && v.length == k.length && v.heads == k.heads, input.v,
          fmt::format("k_pages has {} pages of {} tokens and {} heads", k.batch, k.length, k.heads),
          "A token's key and value have the same index in both pools.");
  require(k.batch <= std::numeric_limits<std::int32_t>::max(), input.k,
          fmt::format("it has {} pages, more than an I32 can number", k.batch), "Use larger pages.");
}

// The number of keys of each sequence. Checks that they fit into the `columns` of the table.
std::vector<std::int64_t> read_lengths(const TensorSource& tensor, const TensorSource& table, std::int64_t page_size) {
  check_count(tensor, entries(tensor));
  const std::vector<std::int64_t> lengths = read_integers(tensor);
  require(!lengths.empty(), tensor, "it names no sequence", kLengthsSuggestion);
  require(table.info->dtype == FileDtype::kI32, table, "it must be I32", "Write the numbers of pages as I32.");
  require(table.info->shape.size() == 2, table, "it must have 2 axes: (sequences, max_pages)", kTableSuggestion);
  const auto sequences = static_cast<std::int64_t>(lengths.size());
  require(table.info->shape[0] == sequences, table, fmt::format("lengths_k names {} sequences", sequences),
          kTableSuggestion);
  const std::int64_t columns = table.info->shape[1];
  std::int64_t pages = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    require(lengths[s] >= 0, tensor, fmt::format("sequence {} has {} keys", s, lengths[s]), kLengthsSuggestion);
    // Divides, because the product with `columns` might overflow.
    require(lengths[s] == 0 || (lengths[s] - 1) / page_size < columns, tensor,
            fmt::format("sequence {} has {} keys, and its {} entries of the table hold {} each", s, lengths[s], columns,
                        page_size),
            "Give the table more columns, or shorten the sequence.");
    pages += lengths[s] == 0 ? 0 : (lengths[s] - 1) / page_size + 1;
    require(pages <= kMaxPageEntries, tensor,
            fmt::format("its sequences fill more than {} entries of the table", kMaxPageEntries),
            "Use larger pages, or compute them in several jobs.");
  }
  return lengths;
}

PageTable read_table(const TensorSource& tensor, const RowGrid& pool, std::span<const std::int64_t> lengths) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 18;  // entries
  PageTable table;
  table.pages = pool.batch;
  table.page_size = pool.length;
  table.begin.reserve(lengths.size() + 1);
  std::int64_t entries = 0;
  for (const std::int64_t length : lengths) entries += pages_of(length, pool.length);
  table.entries.reserve(static_cast<std::size_t>(entries));
  std::vector<std::int32_t> piece;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    const std::int64_t row = static_cast<std::int64_t>(s) * tensor.info->shape[1];
    const std::int64_t count = pages_of(lengths[s], pool.length);
    for (std::int64_t at = 0; at < count; at += static_cast<std::int64_t>(piece.size())) {
      piece.resize(static_cast<std::size_t>(std::min(kPiece, count - at)));
      tensor.shard->read(*tensor.info, (row + at) * static_cast<std::int64_t>(sizeof(std::int32_t)),
                         std::as_writable_bytes(std::span(piece)));
      for (std::size_t i = 0; i < piece.size(); ++i) {
        if (piece[i] >= 0 && piece[i] < pool.batch) continue;
        fail(ErrorCode::kFile,
             fmt::format("sequence {}, entry {} of {} is page {}", s, at + static_cast<std::int64_t>(i), tensor.text(),
                         piece[i]),
             fmt::format("the pool has pages 0 to {}", pool.batch - 1), kTableSuggestion);
      }
      table.entries.insert(table.entries.end(), piece.begin(), piece.end());
    }
    table.begin.push_back(static_cast<std::int64_t>(table.entries.size()));
  }
  tensor.shard->check_unchanged();
  return table;
}

SequenceList sequences_of(const SafetensorsFile& file, const InputNames& names, InputTensors& input,
                          std::span<const std::int64_t> lengths) {
  const auto count = static_cast<std::int64_t>(lengths.size());
  std::vector<std::int64_t> cu_k{0};
  cu_k.reserve(lengths.size() + 1);
  for (const std::int64_t length : lengths) cu_k.push_back(cu_k.back() + length);
  const RowGrid& q = input.q_grid;
  std::vector<std::int64_t> cu_q;
  if (q.heads == 0) {  // without queries
    cu_q.resize(cu_k.size());
  } else if (const auto list = find_optional(file, names.cu_seqlens_q, "cu_seqlens_q")) {
    input.used.push_back(*list);
    require(!q.has_batch(), *list, fmt::format("order {} has an axis for the batch already", axis_order_name(q.order)),
            "Leave it out, or pack all sequences into one axis of tokens.");
    require(entries(*list) < 0 || entries(*list) == count + 1, *list,
            fmt::format("lengths_k names {} sequences", count),
            "Write 0, and then the end of every sequence in rows of q.");
    cu_q = read_cumulative(*list, q, "q");
  } else {
    const bool even = q.has_batch() ? q.batch == count : q.tokens() % count == 0;
    require(even, input.q, fmt::format("lengths_k names {} sequences", count),
            "Give each sequence as many rows, or their cumulative numbers as cu_seqlens_q.");
    for (std::int64_t s = 0; s <= count; ++s) cu_q.push_back(s * (q.tokens() / count));
  }
  try {
    return packed_batch(cu_q, cu_k, {}).sequences;
  } catch (const Error& error) {
    throw Error(error.code(), {file.path(), ": ", error.problem()}, error.why(), error.suggestion());
  }
}

// The pool of keys or of values, found step by step.
struct Pool {
  Pool(const SafetensorsFile& the_file, std::string_view the_name, std::string the_stored)
      : file(the_file),
        name(the_name),
        stored(std::move(the_stored)),
        format(stored_format(file, name)),
        first(file.tensor(first_tensor(format, stored))) {
    check_axes(first);
  }
  // Finds the pool, and returns the grid of its decompressed elements.
  RowGrid find(AxisOrder page_order, InputTensors& input) {
    RowGrid grid = pages_grid(first, page_order);
    if (format.is_plain()) {
      require(
          row_dtype(first) == input.dtype, first,
          fmt::format("{} is {}", input.q.info != nullptr ? "q" : "k_pages", file_dtype_name(file_dtype(input.dtype))),
          "q, k_pages and v_pages have one dtype.");
      input.used.push_back(first);
      return grid;
    }
    source = find_source(file, fmt::format("{}_pages", name), stored, format, input.dtype, grid.order);
    grid.heads = source->shape.heads;
    grid.dim = source->shape.dim;
    return grid;
  }
  // Completes the pool once the file's sequences are known.
  void complete(InputTensors& input) {
    if (!source) return;
    source->pages = input.pages;
    find_tables(file, stored, input.sequences, *source, input.used);
  }

  const SafetensorsFile& file;
  std::string name;    // "k"
  std::string stored;  // the tensor's name, or the prefix of its parts' names
  RowFormat format;
  TensorSource first;
  std::optional<CompressedSource> source;
};

// Refuses tensors of sequences and offsets that a cache doesn't use, because the file's author expects them to be used.
void refuse_block_mask(const SafetensorsFile& file, const InputNames& names) {
  for (const auto& [name, role] : {std::pair{&names.cu_seqlens_k, "cu_seqlens_k"}, {&names.q_offset, "q_offset"}}) {
    const auto list = find_optional(file, *name, role);
    if (!list) continue;
    fail(ErrorCode::kFile, fmt::format("{} is given with a paged cache", list->text()),
         "lengths_k says how many keys a sequence has, and its queries are the last of them", "Leave it out.");
  }
}

}  // namespace

bool holds_cache(const SafetensorsFile& file, const InputNames& names) {
  const bool named_rows = names.k || names.v;
  const bool named_pages = names.k_pages || names.v_pages || names.block_table || names.lengths_k;
  if (named_rows != named_pages) return named_pages;
  const RowFormat format = stored_format(file, "k");
  const bool pages = named_pages || file.contains("k_pages") || file.contains(first_tensor(format, "k_pages"));
  const bool rows = named_rows || file.contains("k") || file.contains(first_tensor(format, "k"));
  if (pages && rows) {
    fail(ErrorCode::kFile, fmt::format("{} holds `k` and `k_pages`", file.path()),
         "the keys of a job are rows or pages",
         {"Name k and v, or k_pages and v_pages, with ", setting("tensors"), "."});
  }
  return pages;
}

void read_paging(const SafetensorsFile& file, const InputNames& names, const RowGrid& pool, InputTensors& input) {
  const TensorSource table = file.tensor(names.block_table.value_or("block_table"));
  const TensorSource lengths = file.tensor(names.lengths_k.value_or("lengths_k"));
  refuse_block_mask(file, names);
  input.used.insert(input.used.end(), {table, lengths});
  const std::vector<std::int64_t> keys = read_lengths(lengths, table, pool.length);
  input.sequences = sequences_of(file, names, input, keys);
  input.pages = std::make_shared<const PageTable>(read_table(table, pool, keys));
}

InputTensors find_pages(const SafetensorsFile& file, const InputNames& given, std::optional<AxisOrder> order,
                        std::optional<AxisOrder> page_order, std::optional<CompressedTensors>& compressed) {
  const InputNames names = resolve_names(file, given, JobKind::kDecode);
  InputTensors input;
  const std::optional<TensorSource> q = find_optional(file, names.q, "q");
  if (q) {
    input.q = *q;
    input.q_grid = row_grid(input.q, order);
    input.used = {input.q};
  }
  Pool k(file, "k", names.k_pages.value_or("k_pages"));
  Pool v(file, "v", names.v_pages.value_or("v_pages"));
  if (!q && !k.format.is_plain()) {
    fail(ErrorCode::kFile, fmt::format("{} holds a compressed cache", file.path()),
         "without q the type of its elements is unknown", "Give a file with k_pages and v_pages.");
  }
  input.dtype = row_dtype(q ? input.q : k.first);
  const AxisOrder pages = page_order ? *page_order : find_page_order(file, k.first, input.q_grid.heads);
  input.k_grid = k.find(pages, input);
  input.v_grid = v.find(pages, input);
  input.k = k.first;
  input.v = v.first;
  check_pages(input);
  read_paging(file, names, input.k_grid, input);
  k.complete(input);
  v.complete(input);
  if (k.source || v.source) compressed = CompressedTensors{std::move(k.source), std::move(v.source)};
  if (q) read_sinks(file, names, input);
  return input;
}

InputTensors find_cache(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order,
                        std::optional<AxisOrder> page_order, std::optional<CompressedTensors>& compressed) {
  static_cast<void>(file.tensor(names.q.value_or("q")));  // throws if q is missing
  return find_pages(file, names, order, page_order, compressed);
}

}  // namespace ringattn
