// SPDX-License-Identifier: Apache-2.0
// Compressed keys and values in a file. Its metadata say how each is stored, `k_format` and `v_format` as
// describe(RowFormat) writes them, "plain" or absent where a tensor lies as it is. The tensor k of a format is then
// k_<stream> [tokens, heads, width] for each stream, tokens packed in the order of their sequences, and k_<table> for
// each table (kernels/quant/row_format.hpp). q, cu_seqlens_q, cu_seqlens_k, q_offset and sinks are those of any other
// file.
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

// Element types as files have them.
FileDtype file_dtype(StoredType type, Dtype dtype);

// One of the two, not plain.
struct CompressedSource {
  std::string name;  // "k", or "k_pages"
  RowFormat format;
  RowShape shape;
  std::vector<std::int64_t> cu;              // of the keys: [sequences + 1]
  std::vector<TensorSource> streams;         // in the order of format_streams(); of a file
  AxisOrder order = AxisOrder::kThd;         // of these: kThd or, in pages, kBthd or kBhtd
  std::shared_ptr<const PageTable> pages;    // in which the tokens lie; null: stored consecutively
  std::vector<std::vector<std::byte>> made;  // the same, of a seed
  std::vector<TensorSource> stored_tables;   // of format_tables(), of a file; their numbers were looked at

  // Tables of the format, read from the file or made from the seed on first use, once for all that share the source.
  // Throws kFile.
  const std::vector<std::vector<std::byte>>& tables() const;
  void set_tables(std::vector<std::vector<std::byte>> tables);
  // The runs as rows that follow each other, a run of a sequence each; `to` are the packed tokens.
  std::vector<CompressedRun> rows_of(std::span<const PackedRun> runs) const;
  // Fills `target` with the runs' rows of a stream, [heads, width] each, consecutively. Throws kFile.
  void read_stream(std::size_t stream, std::span<const PackedRun> runs, std::span<std::byte> target) const;
  // Throws kFile, naming tensor and index, where rows that were read hold an invalid value. `rows`: of rows_of(runs).
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

// Where token `slot` of a pool lies in a tensor of pages, "page, token, head" in the tensor's own order of axes.
std::string page_coordinates(const PageTable& pages, AxisOrder order, std::int64_t slot, std::int64_t head);

struct CompressedTensors {
  std::optional<CompressedSource> k;  // none: plain
  std::optional<CompressedSource> v;

  CacheFormat format() const { return {k ? k->format : RowFormat{}, v ? v->format : RowFormat{}}; }
};

// The keys and values of a seed, compressed in host memory by the first rank that reads them. Ranks with the same share
// have them once.
class SyntheticCompressed {
 public:
  // `job` has a format. Throws kUsage for one that doesn't fit.
  SyntheticCompressed(const Job& job, std::uint64_t seed, std::shared_ptr<JobShare> share);

  // Made at the first call.
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

// How the file stores `tensor`, "k" or "v": what its metadata say. Throws kFile for a format that is none.
RowFormat stored_format(const SafetensorsFile& file, std::string_view tensor);
// True if the file's keys or values are compressed.
bool holds_compressed(const SafetensorsFile& file);
// The tensor that a format has first, of one that is named `stored`: "k_codes" of "k", or itself where it is plain.
std::string first_tensor(const RowFormat& format, std::string_view stored);

// The tensor `stored` of the file, in a format that is not plain, of elements of `dtype`, without its tables; `order`
// is the axis order of the streams, and `name` its name in messages. Throws kFile, naming the tensor and the problem.
CompressedSource find_source(const SafetensorsFile& file, std::string_view name, std::string_view stored,
                             const RowFormat& format, Dtype dtype, AxisOrder order);
// Finds the rest, once its sequences are known. Tables are checked part by part, and are kept in memory only once they
// are asked for. The tensors found join `used`. Throws kFile.
void find_tables(const SafetensorsFile& file, std::string_view stored, const SequenceList& sequences,
                 CompressedSource& source, std::vector<TensorSource>& used);

// As find_input(), of a file that holds them. Throws kFile, naming the tensor and what is wrong.
InputTensors find_compressed(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order,
                             std::optional<CompressedTensors>& found);

}  // namespace ringattn
