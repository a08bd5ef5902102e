// SPDX-License-Identifier: Apache-2.0
// Compressed keys and values in a file. The metadata `k_format` and `v_format` have the formats as describe(RowFormat)
// writes them, or are "plain" or absent if a tensor is not compressed. A compressed tensor k consists of k_<stream>
// [tokens, heads, width] for each stream, tokens packed in the order of their sequences, and k_<table> for each table
// (kernels/quant/row_format.hpp). q, cu_seqlens_q, cu_seqlens_k, q_offset and sinks are as in any other file.
//
// For a paged cache the tensor is k_pages, and its streams have the same axes: k_pages_<stream>
// [pages, page_size, heads, width], or [pages, heads, page_size, width].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"
#include "ops/common/input_tensors.hpp"
#include "ops/common/job_share.hpp"

namespace ringattn {

// The element types in files.
FileDtype file_dtype(StoredType type, Dtype dtype);

// Compressed keys, or compressed values.
struct CompressedSource {
  std::string name;  // "k", or "k_pages"
  RowFormat format;
  RowShape shape;
  std::vector<std::int64_t> cu;              // of the keys: [sequences + 1]
  std::vector<TensorSource> streams;         // from a file, in the order of format_streams()
  AxisOrder order = AxisOrder::kThd;         // axis order of the streams: kThd or, in pages, kBthd or kBhtd
  std::shared_ptr<const PageTable> pages;    // pages that hold the tokens; null: stored consecutively
  std::vector<std::vector<std::byte>> made;  // the streams, computed from a seed
  std::vector<TensorSource> stored_tables;   // from a file, in the order of format_tables(); their values were checked

  // Tables of the format. On first use they are read from the file or made from the seed, once for all users of the
  // source. Throws kFile.
  const std::vector<std::vector<std::byte>>& tables() const;
  void set_tables(std::vector<std::vector<std::byte>> tables);
  // The runs as consecutive rows, one run per sequence. `to`: packed tokens.
  std::vector<CompressedRun> rows_of(std::span<const PackedRun> runs) const;
  // Fills `target` with the runs' rows of a stream, [heads, width] each, consecutively. Throws kFile.
  void read_stream(std::size_t stream, std::span<const PackedRun> runs, std::span<std::byte> target) const;
  // Throws kFile, naming tensor and index, if rows that were read hold an invalid value. `rows`: as from rows_of(runs).
  void check(const CompressedRows& rows, std::span<const PackedRun> runs) const;
  // Fills `plain`, [total_tokens(runs), heads, dim], with the elements of the runs' tokens. Throws kFile.
  void read(std::span<const PackedRun> runs, const MutableTensorView& plain, int threads) const;
  // Pointers to the tables.
  std::array<std::byte*, kMaxTables> table_pointers() const;

 private:
  struct Held {
    std::mutex mutex;
    bool read = false;
    std::vector<std::vector<std::byte>> tables;
  };
  std::shared_ptr<Held> held_ = std::make_shared<Held>();
};

// The coordinates of pool slot `slot` in a tensor of pages: "page, token, head" in the tensor's own order of axes.
std::string page_coordinates(const PageTable& pages, AxisOrder order, std::int64_t slot, std::int64_t head);

struct CompressedTensors {
  std::optional<CompressedSource> k;  // absent: plain
  std::optional<CompressedSource> v;

  CacheFormat format() const { return {k ? k->format : RowFormat{}, v ? v->format : RowFormat{}}; }
};

// The keys and values of a seed, compressed in host memory by the first rank that reads them. Ranks with the same share
// hold them once.
class SyntheticCompressed {
 public:
  // `job` has a format. Throws kUsage for an unsuitable one.
  SyntheticCompressed(const Job& job, std::uint64_t seed, std::shared_ptr<JobShare> share);

  // Computed at the first call.
  const CompressedTensors& tensors() const;

 private:
  CompressedTensors make() const;
  std::optional<CompressedSource> make(std::string_view name, SyntheticTensor tensor, const RowFormat& format,
                                       const RowShape& shape) const;

  AttentionSpec spec_;
  Batch batch_;
  CacheFormat format_;
  std::uint64_t seed_;
  std::shared_ptr<JobShare> share_;
  mutable std::once_flag once_;
  mutable std::shared_ptr<const SyntheticTensors> made_;
};

// How the file stores `tensor`, "k" or "v", according to its metadata. Throws kFile for an unknown format.
RowFormat stored_format(const SafetensorsFile& file, std::string_view tensor);
// True if the file's keys or values are compressed.
bool holds_compressed(const SafetensorsFile& file);
// The name of a format's first tensor for a tensor called `stored`: "k_codes" for "k", or "k" itself if it is plain.
std::string first_tensor(const RowFormat& format, std::string_view stored);

// Finds the tensor `stored` of the file, in a format that is not plain and with elements of `dtype`, without its
// tables. `order`: axis order of the streams. `name`: its name in messages. Throws kFile, naming the tensor and the
// problem.
CompressedSource find_source(const SafetensorsFile& file, std::string_view name, std::string_view stored,
                             const RowFormat& format, Dtype dtype, AxisOrder order);
// Finds the tables, once the sequences are known. Tables are checked part by part, and are read into memory only when
// they are needed. Appends the tensors to `used`. Throws kFile.
void find_tables(const SafetensorsFile& file, std::string_view stored, const SequenceList& sequences,
                 CompressedSource& source, std::vector<TensorSource>& used);

// As find_input(), for a file with compressed tensors. Throws kFile, naming the tensor and the problem.
InputTensors find_compressed(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order,
                             std::optional<CompressedTensors>& found);

}  // namespace ringattn
