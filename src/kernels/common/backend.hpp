// SPDX-License-Identifier: Apache-2.0
// A device's memory and streams as the runtime sees them, one object per rank. ops/attention/attention.hpp and the
// other op interfaces have the kernels.
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
#include "kernels/common/cache_view.hpp"
#include "kernels/common/priority_stream.hpp"
#include "kernels/common/synthetic.hpp"

namespace ringattn {

struct CacheUpdate;  // kernels/decode/cache_update.hpp
// kernels/decode/block_choice.hpp
struct BlockChoice;
// kernels/attention/block_mask_choice.hpp
struct RowPooling;
struct BlockMaskChoice;
// kernels/quant/compressed_rows.hpp
struct DecompressTask;
struct CompressTask;
struct AbsmaxTask;
struct AppendTask;
struct FiniteTask;
struct CodebookTask;  // kernels/quant/codebook.hpp
struct GramTask;      // kernels/quant/gram.hpp

// Called between tiles on the calling thread, by kernels whose calls do the work before they return. It may throw; the
// kernel then stops, and rethrows the exception after all its threads have ended.
using Progress = std::function<void()>;

// A device backend without a device: its kernels answer for plans (tiles, bytes) but cannot run.
inline constexpr int kNoDevice = -1;

struct BackendOptions {
  int threads = 1;  // host backend
  int device = 0;   // device backend
};

// A fixed number of events, as in CUDA: each may be recorded any number of times and refers to its last recording.
// Nothing is allocated after construction, so they suit work that is enqueued repeatedly.
class Events {
 public:
  virtual ~Events() = default;

  virtual void record(std::size_t mark, Stream stream) = 0;
  // Returns when the stream has passed the event; immediately if it was never recorded. Calls `progress` while it
  // waits. Throws kPeer after the deadline.
  virtual void synchronize(std::size_t mark, const Deadline& deadline, const Progress& progress) = 0;
  // Seconds between two events that the stream has passed. Requires events created with `timed`.
  virtual double elapsed(std::size_t from, std::size_t to) = 0;
};

// Work that is repeated with the same memory, e.g. a CUDA graph.
class Replay {
 public:
  virtual ~Replay() = default;

  // Enqueues all of it on its stream (device) or runs it (host).
  virtual void launch() = 0;
};

// A device's memory and streams. One object serves one rank. Any thread may call it, but only one at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual MemoryKind memory() const = 0;
  // Device model and instruction set, e.g. "AVX2". Ranks must have the same one for bitwise equal results of kernels
  // that use all of it; identity_of() (kernels/common/registry.hpp) says what a job's kernel uses.
  virtual std::string identity() const = 0;
  // Without AMX tiles, for kernels that have no use for them.
  virtual std::string vector_identity() const { return identity(); }
  // Throws kMemory if the device has too little memory.
  virtual Buffer allocate(std::size_t bytes) = 0;
  // The backend's own stream, for callers that have none.
  virtual Stream stream() = 0;
  // Copies `rows` rows of `row_bytes` bytes. Strides count bytes. Ordered on `stream`.
  virtual void copy_rows(void* target, std::int64_t target_stride, const void* source, std::int64_t source_stride,
                         std::int64_t row_bytes, std::int64_t rows, Stream stream) = 0;
  // Gathers `rows` cache rows into `target`, [rows, heads, dim]: row i is row i % page_size of page pages[i /
  // page_size]. All these pages must exist. `pages` is read before the call returns. Ordered on `stream`.
  virtual void gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages,
                            std::int64_t rows, Stream stream) = 0;
  // Sets `bytes` bytes to `value`. Ordered on `stream`.
  virtual void fill_bytes(void* target, std::byte value, std::size_t bytes, Stream stream) = 0;
  // Fills `rows`, [total_tokens(runs), heads, dim] in the backend's memory, with synthetic input
  // (kernels/common/synthetic.hpp). Results are bitwise equal on all backends. Ordered on `stream`. `runs` is read
  // before the call returns.
  virtual void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                              const MutableTensorView& rows, Stream stream) = 0;
  // Increases lengths, checks tables and writes new rows of caches (kernels/decode/cache_update.hpp) before a decode
  // step. Ordered on `stream`. On a device it is one launch, which a graph may capture. An update without sequences
  // initializes the backend, so that no later one loads code during a capture or while peers wait.
  virtual void update_cache(const CacheUpdate& update, Stream stream) = 0;
  // Pools mean keys, and chooses key blocks from them (kernels/decode/block_choice.hpp). Ordered on `stream`; on a
  // device they only launch kernels. Results are bitwise equal on all backends. A choice without sequences initializes
  // the backend.
  virtual void pool_keys(const BlockChoice& choice, Stream stream) = 0;
  virtual void choose_blocks(const BlockChoice& choice, Stream stream) = 0;
  // Pools mean rows, and chooses a prefill's block mask from them (kernels/attention/block_mask_choice.hpp). The same
  // rules apply.
  virtual void pool_rows(const RowPooling& pooling, Stream stream) = 0;
  virtual void choose_block_mask(const BlockMaskChoice& choice, Stream stream) = 0;
  // Quantizes and dequantizes rows (kernels/quant/compressed_rows.hpp). Ordered on `stream`. The contents of a task's
  // spans are read before the call returns. Results are bitwise equal on all backends. A decompression without runs
  // initializes the backend. A backend without such a task throws kUnsupported.
  virtual void decompress(const DecompressTask& task, Stream stream);
  virtual void compress(const CompressTask& task, Stream stream);
  virtual void compute_absmax(const AbsmaxTask& task, Stream stream);
  virtual void append(const AppendTask& task, Stream stream);
  virtual void check_finite(const FiniteTask& task, Stream stream);
  // Computes tables: codebooks (kernels/quant/codebook.hpp), and Gram matrices of channels, from which low-rank bases
  // are made (kernels/quant/gram.hpp). The same rules apply.
  virtual void find_codebook(const CodebookTask& task, Stream stream);
  virtual void add_gram(const GramTask& task, Stream stream);
  // Returns when `stream` has passed all work enqueued on it so far. Calls `progress` while it waits. Throws kPeer
  // after the deadline.
  virtual void synchronize(Stream stream, const Deadline& deadline, const Progress& progress) = 0;
  // Creates `count` events. The backend must outlive them.
  virtual std::unique_ptr<Events> make_events(std::size_t count, bool timed) = 0;
  // Creates a priority stream with `marks` events. Null if calls complete their work before they return. The backend
  // must outlive it.
  virtual std::unique_ptr<PriorityStream> make_priority_stream(std::size_t marks) = 0;
  // Whether kernel calls on a stream return before the work is done.
  virtual bool enqueues() const = 0;
  // Captures what `enqueue` puts on `stream`, to be launched there. A device captures a graph, and a host calls
  // `enqueue` again at each launch.
  virtual std::unique_ptr<Replay> replay(Stream stream, const std::function<void()>& enqueue) = 0;
  // Whether work enqueued on `stream` is captured into a graph instead of run.
  virtual bool is_capturing(Stream stream) = 0;
  // Peak bytes in use. Host: by this process. Device: by all users of the device since the backend was created.
  virtual std::size_t peak_memory() = 0;
};

}  // namespace ringattn
