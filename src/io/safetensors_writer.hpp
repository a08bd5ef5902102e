// SPDX-License-Identifier: Apache-2.0
// Many ranks write one safetensors file at once, which appears complete or not at all:
//
//   plan    every rank     plan_safetensors(): the header and where each tensor goes; the same on all ranks
//   create  rank 0         `<file>.<random>.tmp` beside the file, with its header and full size
//   open    other ranks    that temporary file, whose name rank 0 told them
//   write   every rank     its own rows, then sync()
//   commit  rank 0         once all have synced: late metadata, fsync, rename, fsync of the folder
//   release other ranks    once they know of that
//
// A writer that is destroyed before commit(), or before release() on the other ranks, removes the temporary file. Any
// rank that a signal ends removes it, too, because rank 0 may have been killed or may have no time for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/packed_tokens.hpp"
#include "base/temporary_file.hpp"
#include "base/tensor.hpp"
#include "base/unfinished_file.hpp"
#include "io/posix_file.hpp"
#include "io/safetensors_header.hpp"
#include "io/safetensors_rows.hpp"

namespace ringattn {

struct OutputTensor {
  std::string name;
  FileDtype dtype = FileDtype::kF32;
  std::vector<std::int64_t> shape;
};

using FileMetadata = std::vector<std::pair<std::string, std::string>>;

// Everything about a file but its data.
struct SafetensorsPlan {
  std::string head;          // the length field and the header, padded so that data begin at a multiple of 8
  SafetensorsHeader header;  // the same, parsed
  std::map<std::string, std::size_t, std::less<>> metadata_at;  // byte of the file where each metadata value begins

  std::int64_t file_bytes() const { return header.data_offset + header.data_bytes; }
};

// The widest elements come first, so every tensor is aligned. Metadata values that are known only later (digests) are
// passed as text of the same length. Throws kUsage if the format can't represent the tensors or metadata.
SafetensorsPlan plan_safetensors(std::vector<OutputTensor> tensors, const FileMetadata& metadata);

// Throws kFile if `path` can't be written: its directory must exist and be writable, and the file must not exist,
// unless `force`. Called before the job, so that a long job doesn't fail at its end.
void check_output_path(const std::string& path, bool force);

class SafetensorsWriter {
 public:
  // Checks the path as check_output_path() and reserves the file's space. Throws kFile.
  static std::unique_ptr<SafetensorsWriter> create(const SafetensorsPlan& plan, const std::string& path, bool force);
  // Opens the file that another rank created. Throws kFile, also if this host does not share the folder with that rank.
  static std::unique_ptr<SafetensorsWriter> open_existing(const SafetensorsPlan& plan,
                                                          const std::string& temporary_path);

  ~SafetensorsWriter() { discard(); }
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  const std::string& temporary_path() const { return temporary_path_; }

  // Writes the rows of `runs`: `rows` is [total_tokens(runs), heads, dim] of the planned dtype. `grid` is the tensor's
  // layout in the file. Ranks may write at the same time. Throws kFile.
  void write_rows(std::string_view tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                  const TensorView& rows);
  // Writes the LSE, [total_tokens(runs), heads] of queries in `grid`.
  void write_lse(std::string_view tensor, const RowGrid& grid, std::span<const PackedRun> runs, const RowView& lse);
  // The same for elements of any size: `rows` is [total_tokens(runs), heads, dim], dense.
  void write_row_bytes(std::string_view tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                       std::size_t element_bytes, std::span<const std::byte> rows);
  // Writes a whole tensor.
  void write_bytes(std::string_view tensor, std::span<const std::byte> data);
  // Writes a part of a tensor. `offset`: bytes from its start.
  void write_part(std::string_view tensor, std::int64_t offset, std::span<const std::byte> data);
  // Replaces a planned metadata value by one whose JSON text has the same length.
  void set_metadata(std::string_view key, std::string_view value);

  // Flushes what this rank wrote to disk. Throws kFile.
  void sync();
  // Called only by the rank that created the file. If it throws kFile, no file has appeared under the final name,
  // unless the message says otherwise.
  void commit();
  // Called by the other ranks: from now on they do not remove the temporary file.
  void release() noexcept { shared_.reset(); }
  // Removes the temporary file; commit() is not possible any more.
  void discard() noexcept;

 private:
  SafetensorsWriter(const SafetensorsPlan& plan, std::string temporary_path);
  const TensorInfo& planned(std::string_view tensor) const;
  const FileDescriptor& file() const { return created_ ? created_->file() : opened_; }
  void reserve_space(const std::string& path);

  SafetensorsPlan plan_;
  std::string temporary_path_;
  bool force_ = false;
  std::unique_ptr<TemporaryFile> created_;  // by the rank that commits it
  FileDescriptor opened_;                   // by the others
  std::optional<UnfinishedFile> shared_;    // with the rank that created it
};

}  // namespace ringattn
