// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/files/cache_tensors.hpp"
#include "attention/files/position_tensors.hpp"
#include "attention/files/safetensors_writer.hpp"
#include "attention/files/tensor_checks.hpp"
#include "attention/job/cache_rows.hpp"
#include "attention/job/compress_part.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

// One of the two pools, and the sequences that lie in it.
struct Pool {
  const TensorSource& source;
  const RowGrid& grid;
  const PageTable& table;
  std::span<const std::int64_t> cu;  // of keys: [sequences + 1]
  RowShape shape;

  std::size_t sequences() const { return table.sequences(); }
  std::int64_t length(std::size_t s) const { return cu[s + 1] - cu[s]; }
};

[[noreturn]] void refuse_group(const Pool& pool, std::size_t sequence, std::int64_t entry, std::int64_t group) {
  fail(ErrorCode::kFile,
       fmt::format("sequence {} has page {} of {} at entry {}, among other pages than before", sequence,
                   pool.table.of(sequence)[static_cast<std::size_t>(entry)], pool.source.text(), entry),
       fmt::format("{} tokens, that is {} pages, share their scales", group, group / pool.table.page_size),
       "Use pages that hold such a group, or a method that codes each token by itself.");
}

// Whether a group's pages, from entry `first` of a sequence on, were met in this order before. `place`: of each page,
// where it lies in what was met; −1: nowhere.
bool is_known(std::span<const std::int32_t> pages, std::vector<std::int64_t>& place) {
  const auto of = [&](std::size_t i) { return place[static_cast<std::size_t>(pages[i])]; };
  if (of(0) < 0 || of(0) % static_cast<std::int64_t>(pages.size()) != 0) return false;
  for (std::size_t i = 1; i < pages.size(); ++i) {
    if (of(i) != of(0) + static_cast<std::int64_t>(i)) return false;
  }
  return true;
}

// Groups that lie in several pages each, one behind the other.
std::vector<PackedRun> whole_groups(const Pool& pool, std::int64_t group) {
  const std::int64_t page = pool.table.page_size;
  const std::int64_t together = group / page;
  std::vector<PackedRun> slots;
  std::vector<std::int64_t> place(static_cast<std::size_t>(pool.table.pages), -1);
  for (std::size_t s = 0; s < pool.sequences(); ++s) {
    for (std::int64_t first = 0; (first + together) * page <= pool.length(s); first += together) {
      const auto pages = pool.table.of(s).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(together));
      if (is_known(pages, place)) continue;
      for (std::int64_t i = 0; i < together; ++i) {
        const auto number = static_cast<std::size_t>(pages[static_cast<std::size_t>(i)]);
        if (place[number] >= 0) refuse_group(pool, s, first + i, group);
        place[number] = static_cast<std::int64_t>(slots.size());
        const std::int64_t slot = static_cast<std::int64_t>(number) * page;
        slots.push_back({slot, slot + page});
      }
    }
  }
  return slots;
}

// Tokens of the pool that become codes, each once. `group`: tokens whose codes are made together; they lie together
// here.
std::vector<PackedRun> coded_slots(const Pool& pool, std::int64_t group) {
  if (group > pool.table.page_size) return whole_groups(pool, group);
  return held_slots(pool.table, pool.cu, group);
}

// The elements of these tokens, which are finite.
std::vector<std::byte> read_slots(std::string_view name, const Pool& pool, std::span<const PackedRun> slots) {
  const std::int64_t tokens = total_tokens(slots);
  std::vector<std::byte> rows(bytes_of(pool.shape, tokens));
  const MutableTensorView view = view_of(rows, pool.shape, tokens);
  read_rows(pool.source, pool.grid, slots, view);
  const auto fault = find_fault(view);
  if (!fault) return rows;
  std::int64_t rest = fault->token;
  auto run = slots.begin();
  for (; rest >= run->tokens(); ++run) rest -= run->tokens();
  refuse_fault(fmt::format("{}_pages", name), {}, pool.shape, *fault, ErrorCode::kFile,
               page_place(pool.table, pool.grid.order, run->begin + rest, fault->head));
}

// What each sequence has behind its last group, [sequences, group, heads, dim].
std::vector<std::byte> tails(std::string_view name, const Pool& pool, std::int64_t group) {
  const auto sequences = static_cast<std::int64_t>(pool.sequences());
  std::vector<std::byte> rows(bytes_of(pool.shape, sequences * group));
  for (std::size_t s = 0; s < pool.sequences(); ++s) {
    const PackedRun last{pool.cu[s] + pool.length(s) / group * group, pool.cu[s + 1]};
    if (last.tokens() == 0) continue;
    const std::vector<std::byte> tail = read_slots(name, pool, pool_runs(pool.table, pool.cu, {&last, 1}));
    std::ranges::copy(
        tail, rows.begin() + static_cast<std::ptrdiff_t>(bytes_of(pool.shape, static_cast<std::int64_t>(s) * group)));
  }
  return rows;
}

CompressedFigures compress_pool(std::string_view name, const RowFormat& format, const Pool& pool,
                                const CompressJob& job, Backend* gpu, std::vector<WholeTensor>& tensors) {
  const bool by_token = codes_by_token(format);
  const std::int64_t group = by_token ? 1 : format.group;
  const std::vector<PackedRun> slots = coded_slots(pool, group);
  const std::vector<std::byte> rows = read_slots(name, pool, slots);
  const std::int64_t all[] = {total_tokens(slots)};
  CompressedPart part = compress_part(fmt::format("{}_pages", name), format, pool.shape, rows, all, job, gpu);
  if (!by_token) part.tensor.tables[0] = tails(name, pool, group);
  const auto add = [&](std::string_view of, CodeType type, std::vector<std::int64_t> shape,
                       std::vector<std::byte> bytes) {
    part.figures.bytes_after += static_cast<std::int64_t>(bytes.size());
    tensors.push_back({{fmt::format("{}_pages_{}", name, of), file_dtype(type, pool.shape.dtype), std::move(shape)},
                       std::move(bytes)});
  };
  part.figures.bytes_before = pool.source.info->bytes();
  part.figures.bytes_after = 0;
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format, pool.shape)) {
    RowGrid grid = pool.grid;
    grid.heads = stream.heads;
    grid.dim = stream.width;
    const auto element = static_cast<std::size_t>(size_of(stream.type, pool.shape.dtype));
    add(stream.name, stream.type, grid.shape(), in_pages(part.tensor.streams[at++], grid, element, slots));
  }
  at = 0;
  const auto sequences = static_cast<std::int64_t>(pool.sequences());
  part.figures.table_bytes = table_bytes(format, pool.shape, sequences);
  for (const FormatTable& table : format_tables(format, pool.shape, sequences)) {
    add(table.name, table.type, table.shape, std::move(part.tensor.tables[at++]));
  }
  return part.figures;
}

}  // namespace

std::vector<PackedRun> held_slots(const PageTable& table, std::span<const std::int64_t> cu, std::int64_t group) {
  const std::int64_t page = table.page_size;
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(table.pages));  // of each page, from its beginning
  for (std::size_t s = 0; s < table.sequences(); ++s) {
    const std::int64_t coded = (cu[s + 1] - cu[s]) / group * group;
    std::int64_t first = 0;
    for (const std::int32_t number : table.of(s)) {
      std::int64_t& most = tokens[static_cast<std::size_t>(number)];
      most = std::max(most, std::min(page, coded - first));
      first += page;
    }
  }
  std::vector<PackedRun> slots;
  for (std::size_t number = 0; number < tokens.size(); ++number) {
    const std::int64_t slot = static_cast<std::int64_t>(number) * page;
    if (tokens[number] > 0) slots.push_back({slot, slot + tokens[number]});
  }
  return slots;
}

std::vector<std::byte> in_pages(const std::vector<std::byte>& rows, const RowGrid& grid, std::size_t element,
                                std::span<const PackedRun> slots) {
  const std::size_t head_bytes = static_cast<std::size_t>(grid.dim) * element;
  std::vector<std::byte> pages(static_cast<std::size_t>(grid.tokens() * grid.heads) * head_bytes);
  for_each_segment(grid, slots, element, kStagingBytes, [&](const RowSegment& segment) {
    std::byte* to = pages.data() + segment.offset;
    for (std::int64_t row = segment.row; row < segment.row + segment.tokens; ++row) {
      const std::size_t from = static_cast<std::size_t>(row * grid.heads + segment.head) * head_bytes;
      const std::size_t bytes = static_cast<std::size_t>(segment.heads) * head_bytes;
      std::memcpy(to, rows.data() + from, bytes);
      to += bytes;
    }
  });
  return pages;
}

CompressResult compress_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job) {
  std::optional<CompressedTensors> compressed;
  const InputTensors cache = find_pages(file, input.names, input.order, input.page_order, compressed);
  const auto refuse = [&](std::string_view what, std::string_view why, std::string_view remedy) {
    fail(ErrorCode::kFile, fmt::format("{} holds {}", file.path(), what), std::string(why), std::string(remedy));
  };
  if (compressed) refuse("a compressed cache", "elements are compressed", "Give a file with k_pages and v_pages.");
  if (holds_positions(file)) refuse_positions(file, "pages");
  if (job.method.eviction) {
    refuse("pages", "tokens are taken out of keys and values in rows",
           "Give a file with k and v, or a method that keeps all tokens.");
  }
  const std::vector<std::int64_t> cu = Batch{cache.sequences}.cu_k();
  const Pool k{cache.k, cache.k_grid, *cache.pages, cu, {cache.dtype, cache.k_grid.heads, cache.k_grid.dim}};
  const Pool v{cache.v, cache.v_grid, *cache.pages, cu, {cache.dtype, cache.v_grid.heads, cache.v_grid.dim}};
  CompressResult result;
  result.tokens = result.kept = cu.back();
  const CacheFormat format = choose_format(*job.method.format, job.ratio, k.shape, v.shape);
  const std::unique_ptr<Backend> gpu = coding_gpu();
  if (gpu != nullptr && format.k.rank + format.v.rank == 0) result.coded_on = gpu->identity();
  std::vector<WholeTensor> tensors = read_others(file, input.names);
  result.k = compress_pool("k", format.k, k, job, gpu.get(), tensors);
  result.v = compress_pool("v", format.v, v, job, gpu.get(), tensors);
  write_file(job, tensors,
             {{"k_format", describe(format.k)},
              {"v_format", describe(format.v)},
              {"page_order", k.grid.head_major() ? "htd" : "thd"}});
  return result;
}

}  // namespace ringattn
