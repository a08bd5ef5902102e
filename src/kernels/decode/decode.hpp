// SPDX-License-Identifier: Apache-2.0
// Decode attention: a few query rows at the end of each of many sequences, over a KV cache. A row's O and LSE are
// bitwise equal for any batch, page size, page order and number of CTAs or threads. If there is an attention kernel
// (ops/attention/attention.hpp) of the same name, a decode kernel gives the same bits as that kernel gives the row in a
// prefill of the whole sequence.
//
// Everything that changes from step to step (lengths and block tables) is in the kernel's memory kind. So a step is
// enqueued without a wait, an allocation or a host table, and a captured step can be replayed while the sequences grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/decode/decode_block_mask.hpp"
#include "kernels/quant/compressed_rows.hpp"

namespace ringattn {

class DecodeKernel;

// The computation: the same as attention with the same spec.
struct DecodeSpec {
  using Kernel = DecodeKernel;  // the interface that computes this spec (common/registry.hpp)

  AttentionSpec attention;
  // The values of a token are the first head_dim_v columns of its keys, in the same memory, as in absorbed MLA.
  bool values_in_keys = false;
  // Storage format of the cache's tensors. Results are bitwise those of a plain cache that holds the decompressed
  // values. With values_in_keys, format.k describes both and format.v is plain.
  CacheFormat format = {};

  // Whether the values are columns of compressed keys. A step then has neither v nor quantized_v.
  bool quantized_values_in_keys() const { return values_in_keys && !format.k.is_plain(); }
  bool operator==(const DecodeSpec&) const = default;
};

std::string describe(const DecodeSpec& spec);  // describe() of the attention spec, after "decode"

// Maximum number of query rows per sequence in one step.
inline constexpr int kMaxDecodeRows = 16;

// The page pages[s · stride + i] holds tokens [i · page_size, (i + 1) · page_size) of sequence s. Entries after a
// sequence's last page are not read. Null: the cache is dense, and page s holds all of sequence s.
struct BlockTable {
  const std::int32_t* pages = nullptr;
  std::int64_t stride = 0;
};

// The KV splits of every sequence that a cache holds: splits first, first + stride, first + 2 · stride, … They are
// stored contiguously: the cache's first split of a sequence is the first split of its partition, and so on. With G
// keys per split, key p of split g is where a whole cache has key g / stride · G + p % G. Ranks with the same partition
// each hold all of it.
struct KvPartition {
  int first = 0;
  int stride = 1;

  bool is_whole() const { return stride == 1; }
  bool operator==(const KvPartition&) const = default;
};

// Per-split partials of rows, the input of merge(): [rows of q, kv_splits, heads] partials of
// DecodeKernel::partial_floats() floats each, in the kernel's own layout. Index g is the g-th KV split of the partition
// in the row's sequence. Partials of splits that a row does not attend to are uninitialized.
struct DecodePartials {
  float* data = nullptr;       // in the kernel's memory kind; null: rows are finished, and no partials are written
  std::int64_t kv_splits = 0;  // KV splits of the partition; at least as many as its longest sequence has
};

// Shared prefixes (cascade): prefix p is the first keys[p] keys of every sequence s with of_sequence[s] = p, and the
// pages that these keys fill are the same for all these sequences. keys[p] may be any number. A kernel may process the
// whole key tiles in these pages once for all the sequences. The result is bitwise identical either way. If a row of a
// sequence does not see all of these tiles, or the sequence has no tiles after them, the sequence processes the tiles
// of the last, incomplete split itself, and also the tiles of complete splits that a row does not see in full. A
// sequence with a prefix index beyond `count` processes everything itself. A kernel reads the shared pages through the
// block table of any of the sequences.
struct SharedPrefixes {
  const std::int32_t* of_sequence = nullptr;  // [sequences] prefix index, or −1; in the kernel's memory kind
  const std::int32_t* keys = nullptr;         // [count]; in the kernel's memory kind
  int count = 0;                              // 0: no shared prefixes, and nothing is read
};

// One decode step. Row i of sequence s is row s · rows + i of q, at position lengths[s] − rows + i. A row at a position
// below 0 is also computed, over the keys that the mask allows. Cache tokens at or after lengths[s], and pages that no
// sequence owns, never affect results, whatever they contain.
struct DecodeStep {
  TensorView q;  // [sequences · rows, heads, head_dim]
  int rows = 1;  // rows per sequence: 1 … kMaxDecodeRows
  CacheView k;
  CacheView v;  // same pages as k, its own strides; with DecodeSpec::values_in_keys, columns of k
  // Used instead of k and v exactly where DecodeSpec::format is not plain. Per-sequence tables have an entry for each
  // sequence of the step.
  CompressedCache quantized_k = {};
  CompressedCache quantized_v = {};
  BlockTable block_table;                 // in the kernel's memory kind
  const std::int32_t* lengths = nullptr;  // [sequences] keys, including the step's rows; in the kernel's memory kind
  KvPartition partition;                  // the part of these keys that the cache holds
  SharedPrefixes prefixes;                // only with a block table and without a block mask
  DecodeBlockMask block_mask = {};        // exactly where AttentionSpec::block_mask.any(); the partition is then whole
  AttentionOutput output;
  // Written instead of `output`, whose views may then be empty. Required if the partition is not whole.
  DecodePartials partials;
};

// The end of a step whose keys are divided into n partitions: merges the splits' partials into output rows. Partition i
// is KvPartition{i, n}.
struct DecodeMerge {
  std::span<const float* const> partitions;  // [n] the partials of these rows, as in DecodePartials
  std::int64_t kv_splits = 0;                // KV splits of each partition's partials
  int rows = 1;                              // rows per sequence
  const std::int32_t* lengths = nullptr;     // [sequences]; in the kernel's memory kind
  AttentionOutput output;                    // [sequences · rows, …]
};

// Upper bounds over all steps.
struct DecodeLimits {
  std::int64_t sequences = 0;
  int rows = 1;           // rows per sequence
  std::int64_t keys = 0;  // keys per sequence
  // CTAs that process one KV split together, each with some columns of V, where the kernel supports it. 0: the number
  // that is fastest for this many sequences and keys. Results do not depend on it.
  int slices = 0;
  int prefixes = 0;  // SharedPrefixes::count
};

// A decode kernel for one spec on one backend. Steps must be ordered, in one stream or by waits, because they share the
// kernel's scratch memory.
class DecodeKernel {
 public:
  virtual ~DecodeKernel() = default;

  // Keys per tile: AttentionKernel::key_tile() of the attention kernel.
  virtual int key_tile() const = 0;
  // Key tiles per KV split, a power of two. Equal to the attention kernel's if there is one with the same bits.
  virtual int tiles_per_kv_split() const { return kTilesPerKvSplit; }
  std::int64_t kv_split_keys() const { return std::int64_t{tiles_per_kv_split()} * key_tile(); }
  // Bytes that reserve() allocates for steps within `limits`.
  virtual std::size_t scratch_bytes(const DecodeLimits& limits) const = 0;
  // Throws kUnsupported if the kernel cannot do steps within `limits`, or merge this many partitions. By default there
  // is no limit. Called when a job is created or planned.
  virtual void check(const DecodeLimits& limits, int partitions) const;
  // Whether steps process a shared prefix once for all its sequences (SharedPrefixes). By default each sequence
  // processes it by itself.
  virtual bool shares_prefixes() const { return false; }
  // Called before the first step, with limits that check() accepts.
  virtual void reserve(const DecodeLimits& limits) = 0;
  // Enqueues the step on `stream` (device) or runs it (host). On a device it only launches kernels.
  virtual void enqueue(const DecodeStep& step, Stream stream) = 0;
  // Floats per partial in DecodePartials, a multiple of 4.
  virtual std::int64_t partial_floats() const = 0;
  // Enqueues the merge on `stream` (device) or runs it (host). O and LSE are those of the same step over a whole cache.
  // Does not need reserve(). On a device it only launches kernels.
  virtual void merge(const DecodeMerge& merge, Stream stream) = 0;
};

// Maximum number of KV splits, of `kv_split_keys` keys each, that any of `partitions` partitions has of a sequence of
// `keys` keys.
std::int64_t splits_per_partition(std::int64_t keys, int partitions, std::int64_t kv_split_keys);

// Validation of a decode step, shared by all kernels. Throws kUsage if pages cannot hold tiles in whole page runs
// (page_size is neither a power of two from 16 to 256 nor that of a dense cache), and kInternal if views do not match
// the spec, the limits or each other.
void check_decode_step(const DecodeSpec& spec, const DecodeLimits& limits, const DecodeStep& step);
// Sequences [first, first + count) of a step as a separate step that writes their part of the outputs or partials.
// `partial_floats` is the kernel's.
DecodeStep sub_batch(const DecodeSpec& spec, const DecodeStep& step, std::int64_t first, std::int64_t count,
                     std::int64_t partial_floats);

// Calls enqueue(sub_batch) for parts of the step of at most `limit` sequences, of about equal size, in ascending order.
// The parts are ordered like steps, so they may share scratch memory for `limit` sequences.
template <class Enqueue>
void for_each_sub_batch(const DecodeSpec& spec, const DecodeStep& step, std::int64_t limit, std::int64_t partial_floats,
                        Enqueue enqueue) {
  const std::int64_t sequences = step.q.tokens / step.rows;
  const std::int64_t parts = (sequences + limit - 1) / limit;
  for (std::int64_t i = 0; i < parts; ++i) {
    const std::int64_t first = sequences * i / parts;
    const std::int64_t end = sequences * (i + 1) / parts;
    enqueue(parts == 1 ? step : sub_batch(spec, step, first, end - first, partial_floats));
  }
}

// Validation of a merge, shared by all kernels. Throws kInternal if views do not match the spec or each other.
void check_decode_merge(const DecodeSpec& spec, const DecodeMerge& merge);

}  // namespace ringattn
