// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/attention_jobs/position_tensors.hpp"
#include "ops/compression/cache_pool.hpp"
#include "ops/compression/cache_rows.hpp"
#include "ops/compression/compress_common.hpp"
#include "ops/compression/pool_slots.hpp"
#include "ops/decode/cache_tensors.hpp"

namespace ringattn {

namespace {

// Name of the tensor that holds a part of the format.
std::string part_name(const CachePool& pool, std::string_view part) {
  return fmt::format("{}_pages_{}", pool.name, part);
}

// The layout of a stream in its pages.
RowGrid stream_grid(const CachePool& pool, const FormatStream& stream) {
  RowGrid grid = pool.grid;
  grid.heads = stream.heads;
  grid.dim = stream.width;
  return grid;
}

[[noreturn]] void refuse_group(const CachePool& pool, std::size_t sequence, std::int64_t entry, std::int64_t group) {
  fail(ErrorCode::kFile,
       fmt::format("sequence {} has page {} of {} at entry {}, among other pages than before", sequence,
                   pool.table.of(sequence)[static_cast<std::size_t>(entry)], pool.source.text(), entry),
       fmt::format("{} tokens, that is {} pages, share their scales", group, group / pool.table.page_size),
       "Use pages that hold such a group, or a method that quantizes each token on its own.");
}

// An index for each page that sequences hold; −1 until it is set.
class Places {
 public:
  explicit Places(const PageTable& table) {
    pages_.reserve(table.entries.size());
    for (const std::int32_t number : table.entries) pages_.push_back({number, -1});
    std::ranges::sort(pages_);
    pages_.erase(std::unique(pages_.begin(), pages_.end()), pages_.end());
  }
  std::int32_t of(std::int32_t page) const { return pages_[at(page)].tokens; }
  void set(std::int32_t page, std::int32_t place) { pages_[at(page)].tokens = place; }
  // The pages that the sequences use, with `tokens` tokens each.
  std::vector<PoolSlots::Page> take(std::int64_t tokens) {
    std::erase_if(pages_, [](const PoolSlots::Page& page) { return page.tokens < 0; });
    std::ranges::sort(pages_, {}, &PoolSlots::Page::tokens);
    for (PoolSlots::Page& page : pages_) page.tokens = static_cast<std::int32_t>(tokens);
    return std::move(pages_);
  }

 private:
  std::size_t at(std::int32_t page) const {
    return static_cast<std::size_t>(std::ranges::lower_bound(pages_, page, {}, &PoolSlots::Page::number) -
                                    pages_.begin());
  }

  std::vector<PoolSlots::Page>
      pages_;  // ascending; `tokens` is used for the index, so that a large table takes no more memory
};

// True if the pages of a group, from entry `first` of a sequence on, were seen before in this order. `place`: index of
// each page among those seen.
bool is_known(std::span<const std::int32_t> pages, const Places& place) {
  const auto of = [&](std::size_t i) { return place.of(pages[i]); };
  if (of(0) < 0 || of(0) % static_cast<std::int64_t>(pages.size()) != 0) return false;
  for (std::size_t i = 1; i < pages.size(); ++i) {
    if (of(i) != of(0) + static_cast<std::int64_t>(i)) return false;
  }
  return true;
}

// Quantization groups that span several pages each, concatenated.
PoolSlots whole_groups(const CachePool& pool, std::int64_t group) {
  const std::int64_t page = pool.table.page_size;
  const std::int64_t together = group / page;
  std::int32_t placed = 0;
  Places place(pool.table);
  for (std::size_t s = 0; s < pool.sequences(); ++s) {
    for (std::int64_t first = 0; (first + together) * page <= pool.length(s); first += together) {
      const auto pages = pool.table.of(s).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(together));
      if (is_known(pages, place)) continue;
      for (std::int64_t i = 0; i < together; ++i) {
        const std::int32_t number = pages[static_cast<std::size_t>(i)];
        if (place.of(number) >= 0) refuse_group(pool, s, first + i, group);
        place.set(number, placed++);
      }
    }
  }
  return {place.take(page), page};
}

std::int64_t group_of(const RowFormat& format) { return quantized_per_token(format) ? 1 : format.group; }

// The tokens of the pool that are quantized, each once. Tokens of a quantization group are adjacent.
PoolSlots quantized_slots(const CachePool& pool, const RowFormat& format) {
  const std::int64_t group = group_of(format);
  if (group > pool.table.page_size) return whole_groups(pool, group);
  return held_slots(pool.table, pool.cu, group);
}

// Calls part(sequence, runs) for a sequence's tokens after its last complete group.
template <class Part>
void for_each_tail(const CachePool& pool, std::int64_t group, const Part& part) {
  for (std::size_t s = 0; s < pool.sequences(); ++s) {
    const PackedRun last{pool.cu[s] + pool.length(s) / group * group, pool.cu[s + 1]};
    if (last.tokens() > 0) part(s, pool_runs(pool.table, pool.cu, {&last, 1}));
  }
}

// The tails of all sequences, [sequences, group, heads, dim].
std::vector<std::byte> tails(const CachePool& pool, std::int64_t group) {
  std::vector<std::byte> rows(bytes_of(pool.shape, static_cast<std::int64_t>(pool.sequences()) * group));
  for_each_tail(pool, group, [&](std::size_t s, const std::vector<PackedRun>& runs) {
    const std::size_t at = bytes_of(pool.shape, static_cast<std::int64_t>(s) * group);
    read_slots(pool, runs, std::span(rows).subspan(at, bytes_of(pool.shape, total_tokens(runs))));
  });
  return rows;
}

// Throws if an element that is quantized or becomes part of a tail is not finite.
void check_pool(const CachePool& pool, const RowFormat& format) {
  quantized_slots(pool, format).for_each_part(part_tokens(pool), [&](std::int64_t, std::span<const PackedRun> runs) {
    check_slots(pool, runs);
  });
  if (!quantized_per_token(format)) {
    for_each_tail(pool, format.group,
                  [&](std::size_t, const std::vector<PackedRun>& runs) { check_slots(pool, runs); });
  }
  pool.source.shard->check_unchanged();
}

// Plans the output tensors of the compressed pool.
void plan_pool(const CachePool& pool, const RowFormat& format, std::vector<OutputTensor>& planned) {
  const auto plan = [&](std::string_view of, StoredType type, std::vector<std::int64_t> shape) {
    planned.push_back({part_name(pool, of), file_dtype(type, pool.shape.dtype), std::move(shape)});
  };
  for (const FormatStream& stream : format_streams(format, pool.shape)) {
    plan(stream.name, stream.type, stream_grid(pool, stream).shape());
  }
  for (const FormatTable& table : format_tables(format, pool.shape, static_cast<std::int64_t>(pool.sequences()))) {
    plan(table.name, table.type, table.shape);
  }
}

CompressedFigures compress_pool(const CachePool& pool, const RowFormat& format, const CompressJob& job, Backend* gpu,
                                SafetensorsWriter& writer) {
  const PoolSlots slots = quantized_slots(pool, format);
  const std::int64_t all[] = {slots.tokens()};
  std::vector<std::byte> rows(bytes_of(pool.shape, slots.tokens()));
  slots.for_each_part(part_tokens(pool), [&](std::int64_t first, std::span<const PackedRun> runs) {
    read_slots(pool, runs,
               std::span(rows).subspan(bytes_of(pool.shape, first), bytes_of(pool.shape, total_tokens(runs))));
  });
  CompressedTensorResult part =
      compress_part(fmt::format("{}_pages", pool.name), format, pool.shape, rows, all, job, gpu);
  rows = {};
  if (!quantized_per_token(format)) part.tensor.tables[0] = tails(pool, format.group);
  part.figures.bytes_before = pool.source.info->bytes();
  part.figures.bytes_after = 0;
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format, pool.shape)) {
    const RowGrid grid = stream_grid(pool, stream);
    const std::span<const std::byte> codes = part.tensor.streams[at++];
    const auto token = static_cast<std::size_t>(stream.token_bytes(pool.shape.dtype));
    const auto element = static_cast<std::size_t>(size_of(stream.type, pool.shape.dtype));
    part.figures.bytes_after += grid.tokens() * static_cast<std::int64_t>(token);
    slots.for_each_part(part_tokens(pool), [&](std::int64_t first, std::span<const PackedRun> runs) {
      writer.write_row_bytes(
          part_name(pool, stream.name), grid, runs, element,
          codes.subspan(static_cast<std::size_t>(first) * token, static_cast<std::size_t>(total_tokens(runs)) * token));
    });
  }
  at = 0;
  const auto sequences = static_cast<std::int64_t>(pool.sequences());
  part.figures.table_bytes = table_bytes(format, pool.shape, sequences);
  part.figures.bytes_after += part.figures.table_bytes;
  for (const FormatTable& table : format_tables(format, pool.shape, sequences)) {
    writer.write_bytes(part_name(pool, table.name), part.tensor.tables[at++]);
  }
  return part.figures;
}

}  // namespace

CompressResult compress_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job) {
  std::optional<CompressedTensors> compressed;
  InputTensors cache = find_pages(file, input.names, input.order, input.page_order, compressed);
  const auto refuse = [&](std::string_view what, std::string_view why, std::string_view suggestion) {
    fail(ErrorCode::kFile, fmt::format("{} holds {}", file.path(), what), std::string(why), std::string(suggestion));
  };
  if (compressed) refuse("a compressed cache", "elements are compressed", "Give a file with k_pages and v_pages.");
  const InputNames names = resolve_names(file, input.names, JobKind::kDecode);
  std::vector<WholeTensor> others = find_others(file, names);
  if (holds_positions(file)) {
    if (job.method.eviction) {
      refuse("a cache with evicted tokens", "tokens are evicted once", "Pass the file that has all tokens.");
    }
    read_positions(file, names, cache);
    for (const char* const name : {"k_positions", "k_lengths"}) {
      others.push_back(stored_tensor(name, file.tensor(name)));
    }
  }
  const UnreadTensors unread = unread_beside(file, names, input.names, cache.used);
  if (job.method.eviction) {
    CompressResult evicted = evict_pages(file, input, job, cache, std::move(others));
    evicted.unread = unread;
    return evicted;
  }
  const std::vector<std::int64_t> cu = Batch{cache.sequences}.cu_k();
  const CachePool k{"k", cache.k, cache.k_grid, *cache.pages, cu, {cache.dtype, cache.k_grid.heads, cache.k_grid.dim}};
  const CachePool v{"v", cache.v, cache.v_grid, *cache.pages, cu, {cache.dtype, cache.v_grid.heads, cache.v_grid.dim}};
  check_extents(k.source, k.grid);
  check_extents(v.source, v.grid);
  CompressResult result;
  result.unread = unread;
  result.tokens = result.kept = cu.back();
  const CacheFormat format = choose_format(*job.method.format, job.ratio, k.shape, v.shape);
  double needed = 0.0;
  for (const auto& [pool, of] : {std::pair{&k, &format.k}, {&v, &format.v}}) {
    const auto sequences = static_cast<std::int64_t>(pool->sequences());
    needed = std::max(
        needed, compression_bytes(*of, pool->shape, quantized_slots(*pool, *of).tokens(), sequences, job.threads));
  }
  check_host_memory(fmt::format("the pages of {}", file.path()), needed);
  check_compared_job(job, cache.q.info != nullptr);
  check_pool(k, format.k);
  check_pool(v, format.v);
  if (job.compared) check_compared_queries(file, input.names);
  const std::unique_ptr<Backend> gpu = quantizing_gpu();
  if (gpu != nullptr) result.quantized_on = gpu->identity();
  std::vector<OutputTensor> planned;
  plan_pool(k, format.k, planned);
  plan_pool(v, format.v, planned);
  FileMetadata metadata{{"k_format", describe(format.k)},
                        {"v_format", describe(format.v)},
                        {"page_order", k.grid.head_major() ? "htd" : "thd"}};
  if (const std::string* const evicted_by = file.metadata("evicted_by")) {
    metadata.emplace_back("evicted_by", *evicted_by);
  }
  const auto writer = create_file(job, others, std::move(planned), metadata);
  result.k = compress_pool(k, format.k, job, gpu.get(), *writer);
  result.v = compress_pool(v, format.v, job, gpu.get(), *writer);
  finish_file(*writer);
  return result;
}

}  // namespace ringattn
