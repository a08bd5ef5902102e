// SPDX-License-Identifier: Apache-2.0
// Measures decode on a GPU: several consecutive steps in a CUDA graph, each over a cache that is no longer in L2.
// Prints one JSON line per shape, as bench/peers/decode.py writes them (schema "ringattn.decode/1").
//   decode_gpu_bench --steps 1x1k,1x128k,32x4k --heads 32 --kv-heads 8 --head-dim 128 --page-size 0,64
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "bench/arguments.hpp"
#include "bench/decode_gpu_arguments.hpp"
#include "bench/decode_gpu_line.hpp"
#include "bench/graph_time.hpp"
#include "bench/quantized_caches.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/block_choice.hpp"
#include "kernels/decode/cache_update.hpp"
#include "kernels/decode/decode.hpp"

namespace ringattn {
namespace {

void check_wait(Backend& backend) { backend.synchronize(backend.stream(), Deadline::after(600.0), {}); }

class Bench {
 public:
  Bench(const KernelRow<DecodeSpec>& row, const std::vector<DecodeShape>& shapes)
      : row_(row), backend_(row.make_backend({1, 0})) {
    constexpr std::int64_t kTokenBytes = 8 * 128 * 2;  // of the tensors that fill the caches' memory
    std::int64_t tokens = 0;
    for (const DecodeShape& shape : shapes) {
      const CacheRotation rotation = cache_rotation_of(shape);
      const std::int64_t plain = shape.batch * rotation.pages * rotation.page * shape.kv_heads * shape.head_dim * 2;
      tokens = std::max(tokens, (std::max(rotation.caches * rotation.bytes, plain) + kTokenBytes - 1) / kTokenBytes);
    }
    const PackedRun all{0, tokens};
    for (const auto& [memory, tensor] : {std::pair{&k_, SyntheticTensor::kK}, {&v_, SyntheticTensor::kV}}) {
      *memory = backend_->allocate(static_cast<std::size_t>(tokens * kTokenBytes));
      backend_->fill_synthetic(1, tensor, {&all, 1},
                               dense_view(static_cast<void*>(memory->data()), Dtype::kBf16, tokens, 8, 128),
                               backend_->stream());
    }
    check_wait(*backend_);
  }

  // Prints the shape's line; of one that can't run the line says why.
  void measure(const DecodeShape& shape) {
    std::vector<double> times;
    std::string error;
    try {
      times = time_steps(shape);
    } catch (const Error& refused) {
      if (refused.code() == ErrorCode::kInternal) throw;  // the device may be in no state to go on
      error = refused.what();
    }
    fmt::print("{}\n", decode_line(row_.name, backend_->identity(), shape, std::move(times), error));
    std::fflush(stdout);
  }

 private:
  // Microseconds of a step in each replay.
  std::vector<double> time_steps(const DecodeShape& shape) {
    AttentionSpec spec = make_spec(Dtype::kBf16, shape.heads, shape.kv_heads, shape.head_dim, {-1, 0});
    spec.head_dim_v = shape.head_dim_v;
    if (shape.listed > 0) spec.block_mask = {kMaskBlockKeys, kMaskBlockKeys, shape.kv_heads};
    const DecodeSpec decode{spec, shape.values_in_keys, cache_format_of(shape)};
    if (const auto missing = row_.missing(decode); !missing.empty()) {
      fail(ErrorCode::kUnsupported, fmt::format("{} has no form for this shape", row_.name),
           fmt::format("it lacks {}", fmt::join(missing, ", ")), "Take another one.");
    }
    const auto kernel = row_.make_kernel(decode, *backend_);
    kernel->reserve({shape.batch, shape.rows, shape.keys, shape.slices, shape.prefix > 0 ? 1 : 0});
    const std::int64_t rows = shape.batch * shape.rows;
    const std::int64_t elements = rows * shape.heads * shape.head_dim;
    const Buffer q = backend_->allocate(static_cast<std::size_t>(elements * 2));
    const Buffer out = backend_->allocate(static_cast<std::size_t>(rows * shape.heads * shape.head_dim_v * 2));
    const Buffer lse = backend_->allocate(static_cast<std::size_t>(rows * shape.heads * 4));
    const PackedRun all{0, rows};
    backend_->fill_synthetic(1, SyntheticTensor::kQ, {&all, 1},
                             dense_view(static_cast<void*>(q.data()), Dtype::kBf16, rows, shape.heads, shape.head_dim),
                             backend_->stream());
    const Buffer lengths =
        upload(std::vector<std::int32_t>(static_cast<std::size_t>(shape.batch), static_cast<std::int32_t>(shape.keys)));
    const CacheRotation rotation = cache_rotation_of(shape);
    const Buffer table = upload(pages_of(shape, rotation));
    const Buffer prefix_of = upload(std::vector<std::int32_t>(static_cast<std::size_t>(shape.batch), 0));
    const Buffer prefix_keys = upload({static_cast<std::int32_t>(shape.prefix)});

    const Buffer block_mask = upload(block_mask_of(shape, rotation.launches));
    const Buffer counts = upload(std::vector<std::int32_t>(static_cast<std::size_t>(shape.batch * shape.kv_heads),
                                                           static_cast<std::int32_t>(shape.listed) - 1));
    const std::int64_t blocks = (shape.keys + kMaskBlockKeys - 1) / kMaskBlockKeys;
    const std::int64_t numbers = shape.chosen ? shape.batch * shape.kv_heads * blocks : 1;
    const Buffer means = backend_->allocate(static_cast<std::size_t>(numbers * shape.head_dim * 4));
    const Buffer scores = backend_->allocate(static_cast<std::size_t>(numbers * 4));

    std::optional<QuantizedCaches> quantized_k, quantized_v;
    if (!decode.format.is_plain()) {
      quantized_k.emplace(*backend_, decode.format.k, shape, rotation, k_);
      if (!decode.quantized_values_in_keys()) quantized_v.emplace(*backend_, decode.format.v, shape, rotation, v_);
      check_wait(*backend_);
    }

    const std::int64_t update_bytes = shape.batch * static_cast<std::int64_t>(sizeof(OutOfRangeEntry));
    const Buffer checked =
        upload(std::vector<std::int32_t>(static_cast<std::size_t>(shape.batch), static_cast<std::int32_t>(shape.keys)));
    const Buffer faults = backend_->allocate(static_cast<std::size_t>(update_bytes));
    backend_->fill_bytes(faults.data(), std::byte{0}, static_cast<std::size_t>(update_bytes), backend_->stream());
    // Enqueues the cache update before `step`, which takes its lengths from it. The new rows are the first rows of
    // another cache.
    const auto enqueue_update = [&](DecodeStep& step) {
      const auto new_rows = [&](std::int64_t dim) {
        return dense_view(static_cast<const void*>(v_.data()), Dtype::kBf16, rows, shape.kv_heads, dim);
      };
      CacheUpdate update;
      update.sequences = shape.batch;
      update.rows = shape.rows;
      update.lengths = reinterpret_cast<std::int32_t*>(lengths.data());
      update.block_table = step.block_table;
      update.table_pages = rotation.pages;
      update.pages = rotation.pool;
      update.page_size = rotation.page;
      update.kv_split_keys = kernel->kv_split_keys();
      update.max_keys = shape.keys;
      update.prefixes = step.prefixes;
      for (const CacheView* const part : {&step.k, &step.v}) {
        if (quantized_k || (part == &step.v && shape.values_in_keys)) continue;
        const MutableCacheView cache{const_cast<void*>(part->data),
                                     part->dtype,
                                     part->pages,
                                     part->page_size,
                                     part->heads,
                                     part->dim,
                                     part->page_stride,
                                     part->token_stride,
                                     part->head_stride};
        update.appends[update.append_count++] = append_to_cache(cache, new_rows(part->dim));
      }
      update.checked = reinterpret_cast<std::int32_t*>(checked.data());
      update.out_of_range = reinterpret_cast<OutOfRangeEntry*>(faults.data());
      step.lengths = update.checked;
      backend_->update_cache(update, backend_->stream());
      if (!quantized_k) return;
      update.lengths = update.checked;
      update.checked = nullptr;
      update.out_of_range = nullptr;
      backend_->append({&update, step.quantized_k, new_rows(shape.head_dim), nullptr}, backend_->stream());
      if (quantized_v)
        backend_->append({&update, step.quantized_v, new_rows(shape.head_dim_v), nullptr}, backend_->stream());
    };

    const auto step_of = [&](std::int64_t cache) {
      const auto view = [&](const Buffer& pool) {
        return CacheView{pool.data() + cache * rotation.bytes,
                         Dtype::kBf16,
                         rotation.pool,
                         rotation.page,
                         shape.kv_heads,
                         shape.head_dim,
                         rotation.page * shape.kv_heads * shape.head_dim,
                         std::int64_t{shape.kv_heads} * shape.head_dim,
                         shape.head_dim};
      };
      DecodeStep step;
      step.q = dense_view(static_cast<const void*>(q.data()), Dtype::kBf16, rows, shape.heads, shape.head_dim);
      step.rows = shape.rows;
      if (quantized_k) {
        step.quantized_k = quantized_k->view(cache);
        if (quantized_v) step.quantized_v = quantized_v->view(cache);
      } else {
        step.k = view(k_);
        step.v = view(shape.values_in_keys ? k_ : v_);
        step.v.dim = shape.head_dim_v;
      }
      if (shape.page > 0) step.block_table = {reinterpret_cast<const std::int32_t*>(table.data()), rotation.pages};
      step.lengths = reinterpret_cast<const std::int32_t*>(lengths.data());
      if (shape.prefix > 0) {
        step.prefixes = {reinterpret_cast<const std::int32_t*>(prefix_of.data()),
                         reinterpret_cast<const std::int32_t*>(prefix_keys.data()), 1};
      }
      step.output = {dense_view(static_cast<void*>(out.data()), Dtype::kBf16, rows, shape.heads, shape.head_dim_v),
                     {reinterpret_cast<float*>(lse.data()), shape.heads, 1},
                     nullptr};
      return step;
    };
    const auto choice_of = [&](const DecodeStep& step) {
      BlockChoice choice{.spec = spec,
                         .q = step.q,
                         .rows = step.rows,
                         .max_rows = step.rows,
                         .k = step.k,
                         .block_table = step.block_table,
                         .lengths = step.lengths,
                         .count = static_cast<int>(shape.listed),
                         .blocks = blocks};
      choice.means = reinterpret_cast<float*>(means.data());
      choice.scores = reinterpret_cast<float*>(scores.data());
      choice.chosen = reinterpret_cast<std::int32_t*>(block_mask.data());
      choice.counts = reinterpret_cast<std::int32_t*>(counts.data());
      return choice;
    };
    if (shape.chosen) backend_->pool_keys(choice_of(step_of(0)), backend_->stream());
    check_wait(*backend_);
    return time_graph(*backend_, rotation.launches, [&](std::int64_t i) {
      DecodeStep step = step_of(i % rotation.caches);
      if (shape.chosen) {
        const BlockChoice choice = choice_of(step);
        backend_->choose_blocks(choice, backend_->stream());
        step.block_mask = choice.block_mask();
      } else if (shape.listed > 0) {
        const std::int64_t mask_entries = shape.batch * shape.kv_heads * shape.listed;
        step.block_mask = {reinterpret_cast<const std::int32_t*>(block_mask.data()) + i * mask_entries,
                           reinterpret_cast<const std::int32_t*>(counts.data()), shape.listed};
      }
      if (shape.update) enqueue_update(step);
      kernel->enqueue(step, backend_->stream());
    });
  }

  // Block lists of `launches` launches, drawn at random from the blocks before the last one.
  static std::vector<std::int32_t> block_mask_of(const DecodeShape& shape, std::int64_t launches) {
    std::vector<std::int32_t> block_mask;
    const std::int64_t before = (shape.keys + kMaskBlockKeys - 1) / kMaskBlockKeys - 1;
    std::vector<std::int32_t> all(static_cast<std::size_t>(before));
    std::iota(all.begin(), all.end(), 0);
    std::mt19937_64 generator(2);
    for (std::int64_t list = 0; shape.listed > 0 && list < launches * shape.batch * shape.kv_heads; ++list) {
      std::shuffle(all.begin(), all.end(), generator);
      const auto begin = static_cast<std::ptrdiff_t>(block_mask.size());
      block_mask.insert(block_mask.end(), all.begin(), all.begin() + (shape.listed - 1));
      std::sort(block_mask.begin() + begin, block_mask.end());
      block_mask.push_back(0);  // a spare entry that no count includes
    }
    if (block_mask.empty()) block_mask.push_back(0);
    return block_mask;
  }

  // The block table: pages in any order, of which each sequence has the first ones of the prefix.
  static std::vector<std::int32_t> pages_of(const DecodeShape& shape, const CacheRotation& rotation) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(rotation.pool));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 generator(1);
    std::shuffle(order.begin(), order.end(), generator);
    std::vector<std::int32_t> table;
    auto own = order.begin() + rotation.shared;
    for (std::int64_t s = 0; s < shape.batch; ++s) {
      table.insert(table.end(), order.begin(), order.begin() + rotation.shared);
      table.insert(table.end(), own, own + (rotation.pages - rotation.shared));
      own += rotation.pages - rotation.shared;
    }
    return table;
  }

  Buffer upload(const std::vector<std::int32_t>& numbers) {
    const auto bytes = static_cast<std::int64_t>(numbers.size() * sizeof(std::int32_t));
    Buffer memory = backend_->allocate(static_cast<std::size_t>(bytes));
    backend_->copy_rows(memory.data(), bytes, numbers.data(), bytes, bytes, 1, backend_->stream());
    check_wait(*backend_);
    return memory;
  }

  const KernelRow<DecodeSpec>& row_;
  std::unique_ptr<Backend> backend_;
  Buffer k_, v_;
};

int run(const std::vector<std::string_view>& arguments) {
  const DecodeArguments words = parse_decode_arguments(arguments);
  for (const KernelRow<DecodeSpec>& row : kernel_table<DecodeSpec>()) {
    if (row.name != words.kernel || row.backend != "cuda") continue;
    Bench bench(row, words.shapes);
    for (const DecodeShape& shape : words.shapes) bench.measure(shape);
    return 0;
  }
  fmt::print(stderr, "no kernel \"{}\" decodes on a GPU\n", words.kernel);
  return 2;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run, count, words); }
