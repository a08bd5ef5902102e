// SPDX-License-Identifier: Apache-2.0
// Decoding: a few query rows at the end of each of many sequences, over keys in a cache. A row's O and LSE are the
// same, by memcmp, with any batch, any page size, any order of pages and any number of CTAs or threads. A decode kernel
// has the bits of the fold kernel (attention.hpp) of the same name, where there is one: those that a fold of the whole
// sequence gives the row.
//
// What changes from step to step, lengths and pages, lies in the kernel's kind of memory. So a step is enqueued without
// a wait, an allocation or a table of the host's, and a captured one may be replayed while the sequences grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/attention.hpp"
#include "kernels/cache_view.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/decode_block_mask.hpp"
#include "kernels/merge.hpp"

namespace ringattn {

class DecodeKernel;

// What is computed: what the fold of the same spec computes.
struct DecodeSpec {
  using Kernel = DecodeKernel;  // what computes it (registry.hpp)

  AttentionSpec attention;
  // The values of a token are the first head_dim_v columns of its keys, in the same memory: latents are such.
  bool values_in_keys = false;
  // How the cache's tensors are stored. The rows' bits are those of a plain cache that holds what decompression gives.
  // Of values_in_keys that of k says how both are stored, and that of v is plain.
  CacheFormat format = {};

  // Whether the values are columns of compressed keys: a step then has neither v nor quantized_v.
  bool quantized_values_in_keys() const { return values_in_keys && !format.k.is_plain(); }
  bool operator==(const DecodeSpec&) const = default;
};

std::string describe(const DecodeSpec& spec);  // describe() of the fold, "decode" in front

// Query rows of a sequence in one step, at most.
inline constexpr int kMaxDecodeRows = 16;

// Which page holds tokens [i · page_size, (i + 1) · page_size) of sequence s: pages[s · stride + i]. Entries behind a
// sequence's last page are not read. Null: the cache is dense, and page s holds all of sequence s.
struct BlockTable {
  const std::int32_t* pages = nullptr;
  std::int64_t stride = 0;
};

// The groups of keys that a cache holds of every sequence: those with the numbers first, first + every, … They lie one
// behind the other: the cache's first group of a sequence is its first group of the partition, and so on. So key p of
// group g lies where a whole cache has key g / every · G + p % G, where G is a group's number of keys. Several ranks
// that have a share each have them all.
struct KvPartition {
  int first = 0;
  int stride = 1;

  bool is_whole() const { return stride == 1; }
  bool operator==(const KvPartition&) const = default;
};

// What rows leave of the groups of a partition, for merge(): [rows of q, groups, heads] records of
// DecodeKernel::partial_floats() numbers, whose order is the kernel's own. Record g of a row is that of the share's
// g-th group of the row's sequence; of groups of which a row folds nothing it holds anything.
struct DecodePartials {
  float* data = nullptr;       // in the kernel's kind of memory; null: rows are finished, and nothing is left
  std::int64_t kv_splits = 0;  // of the partition, at least as many as the longest sequence has
};

// Sequences that begin with the same keys, in the same pages: prefix p is the first keys[p] keys of every sequence s
// with of_sequence[s] = p, and the pages that these fill are those of all of its sequences. There may be any number of
// keys. A kernel may fold the key tiles that lie in these pages once for all of the sequences, as many as are whole; no
// bit tells whether it did. A sequence of which a row doesn't see all of these tiles, or has none behind them, folds
// those of the open group by itself, and those of whole groups, too, where a row doesn't see all of them; as do
// sequences that name a prefix behind the last one. Of the pages, a kernel reads those in the table of any of the
// sequences.
struct SharedPrefixes {
  const std::int32_t* of_sequence = nullptr;  // [sequences] a prefix, or −1; in the kernel's kind of memory
  const std::int32_t* keys = nullptr;         // [count]; in the kernel's kind of memory
  int count = 0;                              // 0: there are none, and nothing is read
};

// One step: rows i of sequence s, row s · rows + i of q, stands at position lengths[s] − rows + i. A position below 0
// has a row too; what it sees is what the mask says. Tokens of the cache at and behind lengths[s], and pages that no
// sequence owns, move no bit, whatever they hold.
struct DecodeStep {
  TensorView q;  // [sequences · rows, heads, head_dim]
  int rows = 1;  // of a sequence: 1 … kMaxDecodeRows
  CacheView k;
  CacheView v;  // pages as those of k; strides of its own. Of DecodeSpec::values_in_keys, columns of k
  // Instead of k, and of v, exactly where DecodeSpec::format is not plain. Tables of sequences have as many as the
  // step.
  CompressedCache quantized_k = {};
  CompressedCache quantized_v = {};
  BlockTable block_table;  // in the kernel's kind of memory
  const std::int32_t* lengths =
      nullptr;                      // [sequences] keys, those of the rows included; in the kernel's kind of memory
  KvPartition partition;            // which of these keys the cache holds
  SharedPrefixes prefixes;          // of a cache with a block table, and of steps without lists
  DecodeBlockMask block_mask = {};  // exactly where AttentionSpec::block_mask are; then the share is the whole
  AttentionOutput output;
  // Instead of `output`, whose views may then be empty. Needed where the share is not the whole.
  DecodePartials partials;
};

// The end of a step whose keys were dealt to several shares: the groups' partials become rows of the output. Share i of
// n is {i, n}.
struct DecodeMerge {
  std::span<const float* const> partitions;  // [n] the records of these rows, as DecodePartials has them
  std::int64_t kv_splits = 0;                // of each share's records
  int rows = 1;                              // of a sequence
  const std::int32_t* lengths = nullptr;     // [sequences] of these rows' sequences; in the kernel's kind of memory
  AttentionOutput output;                    // [sequences · rows, …]
};

// The most that any step holds.
struct DecodeLimits {
  std::int64_t sequences = 0;
  int rows = 1;           // of a sequence
  std::int64_t keys = 0;  // of a sequence: no length is greater
  // Processors that fold a group of key tiles together, where a kernel can have them do so; 0: as many as pay for steps
  // of so many sequences and keys. No bit depends on it.
  int slices = 0;
  int prefixes = 0;  // SharedPrefixes::count
};

// One decode kernel for one spec on one backend. Its steps follow each other in one stream, or wait for each other:
// they share its scratch memory.
class DecodeKernel {
 public:
  virtual ~DecodeKernel() = default;

  // Keys of a tile: AttentionKernel::key_tile() of the fold kernel.
  virtual int key_tile() const = 0;
  // Key tiles of a group, a power of two: where a fold kernel folds the same rows with the same bits, as many as its.
  virtual int tiles_per_kv_split() const { return kTilesPerKvSplit; }
  std::int64_t kv_split_keys() const { return std::int64_t{tiles_per_kv_split()} * key_tile(); }
  // Bytes that reserve() allocates for steps within `limits`.
  virtual std::size_t scratch_bytes(const DecodeLimits& limits) const = 0;
  // Throws kUnsupported where the kernel doesn't do steps within `limits`, or merges of so many shares. By default none
  // are too many. Called when a job is made, or planned.
  virtual void check(const DecodeLimits& limits, int partitions) const;
  // Whether steps fold the tiles of a prefix once for all sequences that share it (SharedPrefixes); by default each
  // sequence folds them by itself.
  virtual bool shares_prefixes() const { return false; }
  // Called before the first step, with limits that check() lets pass.
  virtual void reserve(const DecodeLimits& limits) = 0;
  // Enqueues the step on `stream` (device) or does it (host). On a device, only launches.
  virtual void enqueue(const DecodeStep& step, Stream stream) = 0;
  // Of DecodePartials; a multiple of 4.
  virtual std::int64_t partial_floats() const = 0;
  // Enqueues the merge on `stream` (device) or does it (host): O and LSE are those of the same step over a whole cache.
  // Needs no reserve(). On a device, only launches.
  virtual void merge(const DecodeMerge& merge, Stream stream) = 0;
};

// Groups of `kv_split_keys` keys of the share {partition, n} of a sequence of `keys` keys: as many as any share of n
// has.
std::int64_t splits_per_partition(std::int64_t keys, int partitions, std::int64_t kv_split_keys);

// What every decode kernel checks of a step. Throws kUsage where pages can't hold tiles in whole pieces (page_size
// neither a power of two from 16 to 256 nor a dense cache's), and kInternal where views don't fit the spec, the limits
// or each other.
void check_decode_step(const DecodeSpec& spec, const DecodeLimits& limits, const DecodeStep& step);
// Sequences [first, first + count) of a step as a step of their own, which writes their part of the outputs or records.
// `partial_floats` is the kernel's.
DecodeStep sub_batch(const DecodeSpec& spec, const DecodeStep& step, std::int64_t first, std::int64_t count,
                     std::int64_t partial_floats);

// Calls enqueue(part) for parts of the step of at most `limit` sequences each, in ascending order and about equally
// long. Parts follow each other as steps do, so they may share scratch memory for `limit` sequences.
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

// What every decode kernel checks of a merge. Throws kInternal where views don't fit the spec or each other.
void check_decode_merge(const DecodeSpec& spec, const DecodeMerge& merge);

}  // namespace ringattn
