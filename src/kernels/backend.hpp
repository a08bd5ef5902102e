// SPDX-License-Identifier: Apache-2.0
// A device's memory and queues, as the runtime sees them: one object a rank. What runs on them is in attention.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/deadline.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/cache_view.hpp"
#include "kernels/priority_stream.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn {

struct CacheUpdate;  // kernels/cache_update.hpp
// kernels/block_choice.hpp
struct BlockChoice;
// kernels/block_mask_choice.hpp
struct RowPooling;
struct BlockMaskChoice;
// kernels/compressed_rows.hpp
struct DecompressTask;
struct CompressTask;
struct AbsmaxTask;
struct AppendTask;
struct FiniteTask;
struct CodebookTask;  // kernels/codebook.hpp
struct GramTask;      // kernels/gram.hpp

// Called between tiles, on the calling thread, by kernels whose fold() does its work before it returns. It may throw;
// fold() then stops, and throws the same exception once no thread of it runs any more.
using Progress = std::function<void()>;

// A device backend without a device: its kernels answer for plans (tiles, bytes) and can do nothing else.
inline constexpr int kNoDevice = -1;

struct BackendOptions {
  int threads = 1;  // of a host backend
  int device = 0;   // of a device backend
};

// Points in streams, a fixed number of them, each recorded as often as one likes and meaning its last recording. For
// work that is enqueued again and again: nothing is allocated after they are made.
class Events {
 public:
  virtual ~Events() = default;

  virtual void record(std::size_t mark, Stream stream) = 0;
  // Returns when the stream has passed the mark, at once if it was never recorded. Calls `progress` while it waits;
  // throws kPeer past the deadline.
  virtual void synchronize(std::size_t mark, const Deadline& deadline, const Progress& progress) = 0;
  // Seconds between two marks that the stream has passed. Only of marks that were made `timed`.
  virtual double elapsed(std::size_t from, std::size_t to) = 0;
};

// Work that is done again and again in the same memory.
class Replay {
 public:
  virtual ~Replay() = default;

  // Enqueues all of it on its stream (device) or does it (host).
  virtual void launch() = 0;
};

// A device's memory and queues. One object serves one rank; its calls may come from any thread, one at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual MemoryKind memory() const = 0;
  // Device model and instruction set, e.g. "AVX2": ranks must agree on it for their bits to be equal.
  virtual std::string identity() const = 0;
  // Throws kMemory when the device is too small.
  virtual Buffer allocate(std::size_t bytes) = 0;
  // A queue of the backend's own, for callers that have none.
  virtual Stream stream() = 0;
  // Copies `rows` rows of `row_bytes`; strides in bytes. Ordered on `stream`.
  virtual void copy_rows(void* target, std::int64_t target_stride, const void* source, std::int64_t source_stride,
                         std::int64_t row_bytes, std::int64_t rows, Stream stream) = 0;
  // Copies `rows` rows of a cache side by side: row i of `target`, [rows, heads, dim], is row i % page_size of page
  // pages[i / page_size], all of which the cache has. `pages` is read before it returns. Ordered on `stream`.
  virtual void gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages,
                            std::int64_t rows, Stream stream) = 0;
  // Sets `bytes` bytes to `value`. Ordered on `stream`.
  virtual void fill_bytes(void* target, std::byte value, std::size_t bytes, Stream stream) = 0;
  // Fills `rows`, [total_tokens(runs), heads, dim] of the backend's memory, with synthetic input
  // (kernels/synthetic.hpp); every backend makes the same bits. Ordered on `stream`; `runs` is read before it returns.
  virtual void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                              const MutableTensorView& rows, Stream stream) = 0;
  // Grows lengths, checks tables and writes new rows of caches (kernels/cache_update.hpp), before a step that reads
  // them. Ordered on `stream`; a device gets one launch, which a graph may hold. An update without
  // sequences makes the backend ready, so that no later one loads code while it is captured or peers wait.
  virtual void update_cache(const CacheUpdate& update, Stream stream) = 0;
  // Means of keys, and lists of key blocks that follow from them (kernels/block_choice.hpp). Ordered on `stream`; a
  // device gets launches alone. All backends make the same bits. A choice without sequences makes the backend ready.
  virtual void pool_keys(const BlockChoice& choice, Stream stream) = 0;
  virtual void choose_blocks(const BlockChoice& choice, Stream stream) = 0;
  // Means of rows, and lists of a prefill that follow from them (kernels/block_mask_choice.hpp). The same holds for
  // these.
  virtual void pool_rows(const RowPooling& pooling, Stream stream) = 0;
  virtual void choose_block_mask(const BlockMaskChoice& choice, Stream stream) = 0;
  // Rows between codes and elements (kernels/compressed_rows.hpp). Ordered on `stream`; what the spans of a task point
  // to is read before the call returns. All backends make the same bits. A decompression without runs makes the
  // backend ready. A backend that has no such task throws kUnsupported.
  virtual void decompress(const DecompressTask& task, Stream stream);
  virtual void compress(const CompressTask& task, Stream stream);
  virtual void compute_absmax(const AbsmaxTask& task, Stream stream);
  virtual void append(const AppendTask& task, Stream stream);
  virtual void check_finite(const FiniteTask& task, Stream stream);
  // What tables are found by: codebooks of vector codes (kernels/codebook.hpp), products of channels that bases are
  // made of (kernels/gram.hpp). Likewise.
  virtual void find_codebook(const CodebookTask& task, Stream stream);
  virtual void add_gram(const GramTask& task, Stream stream);
  // Returns when `stream` has passed what has been enqueued on it so far. Calls `progress` while it waits; throws kPeer
  // past the deadline.
  virtual void synchronize(Stream stream, const Deadline& deadline, const Progress& progress) = 0;
  // `count` of them. The backend outlives them.
  virtual std::unique_ptr<Events> make_events(std::size_t count, bool timed) = 0;
  // With `marks` points; null where work is done when its call returns. The backend outlives it.
  virtual std::unique_ptr<PriorityStream> make_priority_stream(std::size_t marks) = 0;
  // Whether fold() and the other calls on a stream return before the work is done.
  virtual bool enqueues() const = 0;
  // What `enqueue` puts on `stream`, to be launched there: a device keeps it as a graph, a host calls `enqueue` anew.
  virtual std::unique_ptr<Replay> replay(Stream stream, const std::function<void()>& enqueue) = 0;
  // Whether what is enqueued on `stream` goes into a graph instead of being done.
  virtual bool is_capturing(Stream stream) = 0;
  // The most bytes in use so far: of a host, by this process; of a device, since the backend was made, by whoever uses
  // it.
  virtual std::size_t peak_memory() = 0;
};

}  // namespace ringattn
