// SPDX-License-Identifier: Apache-2.0
#include "attention/job/loaded_step.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "attention/check/latent_matrices.hpp"
#include "attention/job/staging.hpp"
#include "base/moment.hpp"
#include "kernels/latent_rows.hpp"

namespace ringattn {

namespace {

constexpr std::byte kUnwritten{0xff};  // NaN, in every dtype
constexpr double kLongStep = 0.1;      // seconds in which a device reads all of its memory

std::size_t bytes_of(std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::size_t element) {
  return static_cast<std::size_t>(tokens * heads * dim) * element;
}

void await(Backend& backend, const Meeting& meeting) {
  backend.synchronize(backend.mark(backend.stream()), meeting.patience().for_peer(), {});
}

// `values` in the backend's memory, once it has passed what is enqueued.
template <class Value>
Buffer upload(Backend& backend, std::span<const Value> values) {
  const auto bytes = static_cast<std::int64_t>(values.size_bytes());
  Buffer buffer = backend.allocate(values.size_bytes());
  backend.copy_rows(buffer.data(), bytes, values.data(), bytes, bytes, 1, backend.stream());
  return buffer;
}

// Leaves out the last `count` keys of each sequence. `cu_k`: where each begins, with the total behind.
void hold_back(std::vector<PlacedKeys>& held, std::span<const std::int64_t> cu_k, std::int64_t count) {
  for (PlacedKeys& place : held) {
    const std::int64_t end = *std::upper_bound(cu_k.begin(), cu_k.end(), place.keys.begin);  // of its sequence
    place.keys.end = std::max(place.keys.begin, std::min(place.keys.end, end - count));
  }
  std::erase_if(held, [](const PlacedKeys& place) { return place.keys.tokens() == 0; });
}

}  // namespace

LoadedCache::LoadedCache(const JobInput& input, Decode& decode, const Meeting& meeting, const StepDone& step_done,
                         std::int64_t held_back)
    : input_(input), decode_(decode), meeting_(meeting) {
  const DecodeJob& job = decode.job();
  const FoldSpec& spec = job.spec;
  const auto key_tile = static_cast<int>(decode.group_keys() / kGroupTiles);
  share_ = rank_cache(input, job, meeting.rank(), meeting.size(), key_tile);
  if (held_back > 0) hold_back(share_.held, input.job().batch.cu_k(), held_back);
  const std::int64_t rows = share_.pages * share_.page_size;
  Backend& backend = decode.backend();
  pools_.k = backend.allocate(bytes_of(rows, spec.kv_heads, k_width(), size_of(spec.dtype)));
  if (!job.values_in_keys) {
    pools_.v = backend.allocate(bytes_of(rows, spec.kv_heads, spec.head_dim_v, size_of(spec.dtype)));
  }
  const auto fill = [&](SyntheticTensor tensor, const Buffer& pool, int dim) -> std::int64_t {
    moment("staging");
    backend.fill_bytes(pool.data(), kUnwritten, pool.bytes(), backend.stream());
    if (input.has_file_pages()) return fill_pages(tensor, pool, dim, step_done);
    fill_rows(tensor, dense_view(static_cast<void*>(pool.data()), spec.dtype, rows, spec.kv_heads, dim), step_done);
    return 0;
  };
  if (job.values_in_keys) {
    moment("staging");
    backend.fill_bytes(pools_.k.data(), kUnwritten, pools_.k.bytes(), backend.stream());
    fill_rows({}, dense_view(static_cast<void*>(pools_.k.data()), spec.dtype, rows, 1, k_width()), step_done);
  } else {
    non_finite_.k = fill(SyntheticTensor::kK, pools_.k, spec.head_dim);
    non_finite_.v = fill(SyntheticTensor::kV, pools_.v, spec.head_dim_v);
  }

  for (const Sequence& sequence : input.job().batch.sequences) {
    host_lengths_.push_back(static_cast<std::int32_t>(sequence.k_len - held_back));
  }
  lengths_ = upload<std::int32_t>(backend, host_lengths_);
  table_ = upload<std::int32_t>(backend, share_.table);
  if (held_back == 0 && !job.spec.lists.any()) prefixes_ = shared_prefixes(input, key_tile);
  if (!prefixes_.keys.empty()) {
    prefix_of_ = upload<std::int32_t>(backend, prefixes_.of_sequence);
    prefix_keys_ = upload<std::int32_t>(backend, prefixes_.keys);
  }
  await(backend, meeting_);
}

std::int64_t LoadedCache::k_width() const {
  const DecodeJob& job = decode_.job();
  if (job.format.k.is_plain()) return job.spec.head_dim;
  return token_bytes(job.format.k, {job.spec.dtype, 1, job.spec.head_dim}) / 2;
}

CompressedCache LoadedCache::packed(const CachePools& pools) const {
  const FoldSpec& spec = decode_.job().spec;
  return latent_cache(pools.k.data(), spec.head_dim_v, spec.head_dim - spec.head_dim_v, share_.pages, share_.page_size);
}

// Latents and rotary keys side by side, or rows of 8 bits as they lie in the file.
void LoadedCache::fill_latents(std::span<const PackedRun> runs, const MutableTensorView& host) {
  const DecodeJob& job = decode_.job();
  if (job.format.k.is_plain()) {
    read_latent_keys(input_, runs, host, decode_.options().threads);
    if (!input_.seed()) non_finite_.k += count_non_finite(host);
    return;
  }
  const int rope = job.format.k.rope, latent = job.spec.head_dim - rope;
  const std::int64_t bytes = latent_row_bytes(latent, rope);
  auto* const rows = static_cast<std::byte*>(host.data);
  input_.read_latent_codes(runs, {rows, static_cast<std::size_t>(host.tokens * bytes)});
  Buffer row = allocate_host(static_cast<std::size_t>(job.spec.head_dim) * size_of(job.spec.dtype));
  MutableTensorView both = dense_view(static_cast<void*>(row.data()), job.spec.dtype, 1, 1, job.spec.head_dim);
  MutableTensorView c = both, k_rope = both;
  c.dim = latent;
  k_rope.dim = rope;
  k_rope.data = row.data() + static_cast<std::size_t>(latent) * size_of(job.spec.dtype);
  for (std::int64_t token = 0; token < host.tokens; ++token) {
    unpack_latent_rows(rows + token * bytes, bytes, c, k_rope);
    non_finite_.k += count_non_finite(both);
  }
}

// Neighbouring rows at a time. Without a tensor they are those of latents and rotary keys side by side.
void LoadedCache::fill_rows(std::optional<SyntheticTensor> tensor, const MutableTensorView& rows,
                            const StepDone& step_done) {
  Backend& backend = decode_.backend();
  Staging staging(backend, meeting_.patience());
  std::int64_t done = 0;
  const auto load = [&](const std::vector<PackedRun>& runs, std::int64_t first) {
    MutableTensorView stretch = rows;
    stretch.data = rows.at(first, 0);
    stretch.tokens = total_tokens(runs);
    if (input_.seed() && tensor) {
      backend.fill_synthetic(*input_.seed(), *tensor, input_.made_tokens(*tensor, runs), stretch, backend.stream());
      return;
    }
    const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
      if (tensor) {
        input_.read(*tensor, piece, host, decode_.options().threads);
        return;
      }
      fill_latents(piece, host);
    };
    staging.load(runs, stretch, fill, [&](std::int64_t here) {
      if (step_done) step_done("row of the cache", done + here, rows.tokens);
    });
    done += stretch.tokens;
  };
  std::vector<PackedRun> runs;
  std::int64_t first = 0;
  std::int64_t end = 0;
  for (const PlacedKeys& held : share_.held) {
    if (held.row != end) {
      load(runs, first);
      runs.clear();
      first = held.row;
    }
    runs.push_back(held.keys);
    end = held.row + held.keys.tokens();
  }
  load(runs, first);
}

// Whole pages, as they lie in the file. Returns how many values of tokens are NaN or infinite.
std::int64_t LoadedCache::fill_pages(SyntheticTensor tensor, const Buffer& pool, int dim, const StepDone& step_done) {
  const FoldSpec& spec = decode_.job().spec;
  const std::int64_t page_values = share_.page_size * spec.kv_heads * dim;
  const std::size_t page_bytes = static_cast<std::size_t>(page_values) * size_of(spec.dtype);
  std::int64_t non_finite = 0;
  const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& host) {
    auto* at = static_cast<std::byte*>(host.data);
    for (const PackedRun& run : runs) {
      const auto numbers = std::span(share_.numbers)
                               .subspan(static_cast<std::size_t>(run.begin), static_cast<std::size_t>(run.tokens()));
      input_.read_pages(tensor, numbers, {at, page_bytes * numbers.size()});
      for (std::int64_t page = run.begin; page < run.end; ++page, at += page_bytes) {
        const std::int64_t tokens = share_.held[static_cast<std::size_t>(page)].keys.tokens();
        TensorView held = dense_view(static_cast<const void*>(at), spec.dtype, tokens, spec.kv_heads, dim);
        if (input_.head_major_pages()) {
          held.token_stride = dim;
          held.head_stride = share_.page_size * dim;
        }
        non_finite += count_non_finite(held);
      }
    }
  };
  const PackedRun all[] = {{0, share_.pages}};
  const std::int64_t before = tensor == SyntheticTensor::kK ? 0 : share_.pages;
  Staging(decode_.backend(), meeting_.patience())
      .load(all, dense_view(static_cast<void*>(pool.data()), spec.dtype, share_.pages, 1, page_values), fill,
            [&](std::int64_t done) {
              if (step_done) step_done("page of the cache", before + done, 2 * share_.pages);
            });
  return non_finite;
}

CachePools LoadedCache::copy() const {
  Backend& backend = decode_.backend();
  CachePools other;
  for (const auto& [from, to] : {std::pair{&pools_.k, &other.k}, {&pools_.v, &other.v}}) {
    if (from->bytes() == 0) continue;  // values that lie in their keys
    *to = backend.allocate(from->bytes());
    const auto bytes = static_cast<std::int64_t>(from->bytes());
    backend.copy_rows(to->data(), bytes, from->data(), bytes, bytes, 1, backend.stream());
  }
  await(backend, meeting_);
  return other;
}

MutableCacheView LoadedCache::view(const Buffer& pool, int dim) const {
  const FoldSpec& spec = decode_.job().spec;
  const auto make = input_.head_major_pages() ? head_major_cache_view : cache_view;
  return make(pool.data(), spec.dtype, share_.pages, share_.page_size, spec.kv_heads, dim);
}

void LoadedCache::place(DecodeInputs& inputs) const {
  inputs.lengths = reinterpret_cast<std::int32_t*>(lengths_.data());
  if (share_.columns == 0) return;
  inputs.block_table = {reinterpret_cast<const std::int32_t*>(table_.data()), share_.columns};
  inputs.table_pages = share_.columns;
  if (prefixes_.keys.empty()) return;
  inputs.prefixes = {reinterpret_cast<const std::int32_t*>(prefix_of_.data()),
                     reinterpret_cast<const std::int32_t*>(prefix_keys_.data()),
                     static_cast<int>(prefixes_.keys.size())};
}

void LoadedCache::place_host_copies(DecodeInputs& inputs) const {
  inputs.host_lengths = host_lengths_.data();
  if (share_.columns > 0) inputs.host_table = {share_.table.data(), share_.columns};
  inputs.host_prefixes = {prefixes_.of_sequence.data(), prefixes_.keys.data(), static_cast<int>(prefixes_.keys.size())};
}

LoadedStep::LoadedStep(const JobInput& input, Decode& decode, const Meeting& meeting, const StepDone& step_done,
                       int caches)
    : LoadedStep(input, decode, nullptr, meeting, step_done, caches) {}

LoadedStep::LoadedStep(const JobInput& input, LatentDecode& decode, const Meeting& meeting, const StepDone& step_done,
                       int caches)
    : LoadedStep(input, decode.in_latent(), &decode, meeting, step_done, caches) {}

LoadedStep::LoadedStep(const JobInput& input, Decode& decode, LatentDecode* latents, const Meeting& meeting,
                       const StepDone& step_done, int caches)
    : decode_(decode), latents_(latents), meeting_(meeting) {
  // As the caller has them: of latents the queries' and values' own dims, or those of queries in the latent.
  const FoldSpec& spec = input.job().spec;
  const int q_dim = input.q_in_latent() ? decode.job().spec.head_dim : spec.head_dim;
  const std::size_t element = size_of(spec.dtype);
  const auto sequences = static_cast<std::int64_t>(input.job().batch.sequences.size());
  const std::int64_t rows = input.job().batch.q_tokens();
  const SequenceRange owned = decode.owned(sequences);
  inputs_.rows = static_cast<int>(rows / sequences);
  result_.rows = owned.count * inputs_.rows;
  if (owned.count > 0) result_.runs = {{owned.first * inputs_.rows, owned.end() * inputs_.rows}};
  meeting.together([&] {
    Backend& backend = decode.backend();
    cache_.emplace(input, decode, meeting, step_done);
    for (int i = 1; i < caches; ++i) more_.push_back(cache_->copy());
    result_.non_finite = cache_->non_finite();

    q_ = backend.allocate(bytes_of(rows, spec.heads, q_dim, element));
    const MutableTensorView q = dense_view(static_cast<void*>(q_.data()), spec.dtype, rows, spec.heads, q_dim);
    const PackedRun all[] = {{0, rows}};
    const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& host) {
      input.read(SyntheticTensor::kQ, runs, host, decode.options().threads);
      // Every rank has all queries; each value is to be counted once.
      if (meeting.rank() == 0) result_.non_finite.q += count_non_finite(host);
    };
    Staging(backend, meeting.patience()).load(all, q, fill, {});
    if (latents_ != nullptr) load_matrices(input);
    if (spec.sinks) sinks_ = upload<float>(backend, input.sinks());
    result_.out = backend.allocate(bytes_of(result_.rows, spec.heads, spec.head_dim_v, element));
    result_.lse = backend.allocate(bytes_of(result_.rows, spec.heads, 1, sizeof(float)));
    for (const Buffer* buffer : {&result_.out, &result_.lse}) {
      backend.fill_bytes(buffer->data(), kUnwritten, buffer->bytes(), backend.stream());
    }
    await(backend, meeting);
    marks_ = backend.make_marks(2, true);
    inputs_.q = q;
    inputs_.sinks = spec.sinks ? reinterpret_cast<const float*>(sinks_.data()) : nullptr;
    cache_->place(inputs_);
    cache_->place_host_copies(inputs_);
    if (input.job().lists != nullptr) {
      const DecodeListArrays lists = decode_lists(*input.job().lists, spec.mask, inputs_.rows, 1);
      list_blocks_ = upload<std::int32_t>(backend, lists.blocks);
      list_counts_ = upload<std::int32_t>(backend, lists.counts);
      await(backend, meeting);
      inputs_.lists = {reinterpret_cast<const std::int32_t*>(list_blocks_.data()),
                       reinterpret_cast<const std::int32_t*>(list_counts_.data()), lists.stride};
    }
    outputs_ = {
        dense_view(static_cast<void*>(result_.out.data()), spec.dtype, result_.rows, spec.heads, spec.head_dim_v),
        result_.lse_view(spec)};
  });
}

// All heads'. Every rank has them; each value that isn't finite is counted once.
void LoadedStep::load_matrices(const JobInput& input) {
  const LatentSpec& spec = input.latent().spec;
  Backend& backend = decode_.backend();
  const PackedRun heads[] = {{0, spec.heads}};
  const auto load = [&](SyntheticTensor tensor, int outer, Buffer& buffer) {
    buffer = backend.allocate(bytes_of(spec.heads, outer, spec.latent_dim, size_of(spec.dtype)));
    const MutableTensorView rows =
        dense_view(static_cast<void*>(buffer.data()), spec.dtype, spec.heads, outer, spec.latent_dim);
    const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& host) {
      input.read(tensor, runs, host, decode_.options().threads);
      if (meeting_.rank() == 0 && !input.seed()) result_.non_finite.v += count_non_finite(host);
    };
    Staging(backend, meeting_.patience()).load(heads, rows, fill, {});
    return HeadMatrices{rows.data, rows.dtype,        rows.tokens,      rows.heads,
                        rows.dim,  rows.token_stride, rows.head_stride, 1};
  };
  if (!input.q_in_latent()) keys_ = load(SyntheticTensor::kWeightKeys, spec.head_dim, w_uk_);
  values_ = load(SyntheticTensor::kWeightValues, spec.head_dim_v, w_uv_);
}

const CachePools& LoadedStep::pools_of(int step) const {
  const std::size_t cache = static_cast<std::size_t>(step) % (more_.size() + 1);
  return cache == 0 ? cache_->pools() : more_[cache - 1];
}

void LoadedStep::enqueue(int step, bool captured) {
  const CachePools& pools = pools_of(step);
  const Stream stream = decode_.backend().stream();
  DecodeInputs inputs = inputs_;
  if (captured) {
    inputs.host_lengths = nullptr;
    inputs.host_table = {};
    inputs.host_prefixes = {};
  }
  const bool packed = !decode_.job().format.is_plain();
  if (!packed) inputs.k = cache_->k(pools);
  if (latents_ == nullptr) {
    inputs.v = cache_->v(pools);
    decode_.enqueue(inputs, outputs_, stream);
    return;
  }
  LatentDecodeInputs rows;
  rows.q = inputs.q;
  rows.rows = inputs.rows;
  rows.cache = inputs.k;
  if (packed) rows.packed = cache_->packed(pools);
  rows.block_table = inputs.block_table;
  rows.table_pages = inputs.table_pages;
  rows.lengths = inputs.lengths;
  rows.sinks = inputs.sinks;
  rows.w_uk = keys_;
  rows.w_uv = values_;
  rows.host_lengths = inputs.host_lengths;
  rows.host_table = inputs.host_table;
  latents_->enqueue(rows, {outputs_.out, outputs_.lse}, stream);
}

void LoadedStep::wait() {
  if (latents_ != nullptr) return latents_->wait();
  decode_.wait();
}

RunStats LoadedStep::run() {
  Backend& backend = decode_.backend();
  meeting_.barrier();
  marks_->record(0, backend.stream());
  enqueue(0, false);
  marks_->record(1, backend.stream());
  wait();
  marks_->synchronize(1, meeting_.patience().for_peer(), {});
  RunStats stats;
  stats.seconds = marks_->elapsed(0, 1);
  meeting_.barrier();
  return stats;
}

double LoadedStep::run_many(int count) {
  Backend& backend = decode_.backend();
  const Stream stream = backend.stream();
  const bool graph = meeting_.size() == 1 && backend.enqueues();
  if (graph && replayed_ != count) {
    replay_ = backend.replay(stream, [&] {
      for (int i = 0; i < count; ++i) enqueue(i, true);
    });
    replayed_ = count;
  }
  meeting_.barrier();
  marks_->record(0, stream);
  if (graph) {
    replay_->launch();
  } else {
    for (int i = 0; i < count; ++i) enqueue(i, false);
  }
  marks_->record(1, stream);
  if (!graph) wait();
  marks_->synchronize(1, meeting_.patience().for_work(count * kLongStep), {});
  if (graph) wait();
  meeting_.barrier();
  return marks_->elapsed(0, 1) / count;
}

RankResult LoadedStep::fetch(const RunStats& stats) {
  result_.stats = stats;
  if (decode_.backend().memory() == MemoryKind::kHost) return std::move(result_);
  meeting_.together([&] {
    Staging staging(decode_.backend(), meeting_.patience());
    for (Buffer* buffer : {&result_.out, &result_.lse}) {
      Buffer host = allocate_host(buffer->bytes());
      staging.store(buffer->data(), host.data(), buffer->bytes());
      *buffer = std::move(host);
    }
  });
  return std::move(result_);
}

}  // namespace ringattn
