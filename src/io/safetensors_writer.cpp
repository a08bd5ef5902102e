// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_writer.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <random>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kWriteAdvice = "Choose another folder, on a disk that is in order.";

[[noreturn]] void fail_exists(const std::string& path) {
  fail(ErrorCode::kFile, fmt::format("can't write {}", path), "it exists",
       {"Choose another name, or replace it with ", setting("force"), "."});
}

std::string json_string(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      json += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      json += c;
    }
  }
  return json + '"';
}

}  // namespace

SafetensorsPlan plan_safetensors(std::vector<OutputTensor> tensors, const FileMetadata& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const OutputTensor& a, const OutputTensor& b) {
    return bits_of(a.dtype) != bits_of(b.dtype) ? bits_of(a.dtype) > bits_of(b.dtype) : a.name < b.name;
  });
  SafetensorsPlan plan;
  std::string json = "{";
  const auto separate = [&] {
    if (json.back() != '{') json += ',';
  };
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      separate();
      json += json_string(key) + ":";
      plan.metadata_at[key] = 8 + json.size();
      json += json_string(value);
    }
    json += '}';
  }
  std::int64_t offset = 0;
  for (const OutputTensor& tensor : tensors) {
    std::int64_t bits = bits_of(tensor.dtype);
    bool countable = true;
    for (const std::int64_t dim : tensor.shape) {
      countable = countable && dim >= 0 && !__builtin_mul_overflow(bits, dim, &bits);
    }
    const std::int64_t bytes = countable ? bits / 8 : std::numeric_limits<std::int64_t>::max();
    const std::int64_t begin = offset;
    if (__builtin_add_overflow(offset, bytes, &offset) || offset > std::numeric_limits<std::int64_t>::max() / 2) {
      fail(ErrorCode::kUsage,
           fmt::format("can't write tensor {} of shape {}", in_quotes(tensor.name), shape_text(tensor.shape)),
           "no file is that large", "Use fewer tokens or sequences.");
    }
    separate();
    json += fmt::format(R"({}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", json_string(tensor.name),
                        file_dtype_name(tensor.dtype), shape_text(tensor.shape), begin, offset);
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::array<std::byte, 8> length;
  for (std::size_t i = 0; i < 8; ++i) {
    length[i] = static_cast<std::byte>(json.size() >> (8 * i));
    plan.head += static_cast<char>(length[i]);
  }
  plan.head += json;
  // Checks the written header with the reader's rules.
  try {
    const std::int64_t file_bytes = static_cast<std::int64_t>(plan.head.size()) + offset;
    SafetensorsHeaderReader reader("the output", length, file_bytes);
    reader.feed(json);
    plan.header = reader.finish();
  } catch (const Error& error) {
    fail(ErrorCode::kUsage, "can't describe the output as a safetensors file", error.what(),
         "Use shorter names and texts.");
  }
  return plan;
}

void check_output_path(const std::string& path, bool force) {
  const std::string problem = fmt::format("can't write {}", path.empty() ? "the output" : path);
  if (path.empty() || path.find('\0') != std::string::npos) {
    fail(ErrorCode::kFile, problem, "it is not a path", "Name a file.");
  }
  const std::string folder = folder_of(path);
  struct stat status;
  if (::stat(folder.c_str(), &status) != 0) {
    fail(ErrorCode::kFile, problem,
         fmt::format("its folder {}: {}", folder, std::error_code(errno, std::generic_category()).message()),
         "Create the folder first.");
  }
  if (!S_ISDIR(status.st_mode)) {
    fail(ErrorCode::kFile, problem, fmt::format("{} is not a folder", folder), "Choose a folder.");
  }
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    fail(ErrorCode::kFile, problem,
         fmt::format("its folder {}: {}", folder, std::error_code(errno, std::generic_category()).message()),
         "Choose a folder that you may write to.");
  }
  check_file_name(path, path);
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) fail_file(problem, errno, kWriteAdvice);
    return;
  }
  if (S_ISDIR(status.st_mode)) fail(ErrorCode::kFile, problem, "it is a directory", "Name a file in it.");
  if (!S_ISREG(status.st_mode)) {
    fail(ErrorCode::kFile, problem, S_ISLNK(status.st_mode) ? "it is a link" : "it exists and is not a regular file",
         "Name the file itself.");
  }
  if (!force) fail_exists(path);
}

SafetensorsWriter::SafetensorsWriter(const SafetensorsPlan& plan, std::string temporary_path)
    : plan_(plan), temporary_path_(std::move(temporary_path)) {}

std::unique_ptr<SafetensorsWriter> SafetensorsWriter::create(const SafetensorsPlan& plan, const std::string& path,
                                                             bool force) {
  check_output_path(path, force);
  auto created = std::make_unique<TemporaryFile>(path, path);
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(plan, created->path()));
  writer->force_ = force;
  writer->created_ = std::move(created);
  writer->reserve_space(path);
  write_exactly(writer->file(), writer->temporary_path_, 0, std::as_bytes(std::span(plan.head)));
  writer->sync();  // the other ranks' hosts must see it
  return writer;
}

std::unique_ptr<SafetensorsWriter> SafetensorsWriter::open_existing(const SafetensorsPlan& plan,
                                                                    const std::string& temporary_path) {
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(plan, temporary_path));
  writer->opened_ = FileDescriptor(
      uninterrupted([&] { return ::open(temporary_path.c_str(), O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC); }));
  if (!writer->opened_.valid()) {
    fail_file(fmt::format("can't open {}, which another rank created", temporary_path), errno,
              "The output's folder must be shared by all hosts.");
  }
  if (identify(writer->opened_, temporary_path).bytes != plan.file_bytes()) {
    fail(ErrorCode::kFile, fmt::format("can't write {}", temporary_path), "it isn't the file that another rank created",
         "The output's folder must be shared by all hosts.");
  }
  writer->shared_.emplace(temporary_path);
  return writer;
}

void SafetensorsWriter::reserve_space(const std::string& path) {
  const std::string problem = fmt::format("can't reserve {} bytes for {}", plan_.file_bytes(), path);
  // Beyond this limit the system would send a signal.
  struct rlimit limit;
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<std::uint64_t>(plan_.file_bytes()) > limit.rlim_cur) {
    fail_file(problem, EFBIG, "Raise the limit on file sizes (ulimit -f).");
  }
  const int error = await_disk(file(), [bytes = off_t{plan_.file_bytes()}](int fd) {
    if (uninterrupted([&] { return ::fallocate(fd, 0, 0, bytes); }) == 0) return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    // The file system can't reserve blocks: set only the size.
    return uninterrupted([&] { return ::ftruncate(fd, bytes); }) == 0 ? 0 : errno;
  });
  if (error != 0) fail_file(problem, error, "Free some space, or choose another folder.");
}

const TensorInfo& SafetensorsWriter::planned(std::string_view tensor) const {
  const TensorInfo* info = plan_.header.find(tensor);
  if (info == nullptr) fail(ErrorCode::kInternal, fmt::format("tensor {} wasn't planned", in_quotes(tensor)));
  return *info;
}

void SafetensorsWriter::write_rows(std::string_view tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                                   const TensorView& rows) {
  const TensorInfo& info = planned(tensor);
  const std::size_t element = size_of(rows.dtype);
  const std::int64_t bytes = grid.tokens() * grid.heads * grid.dim * static_cast<std::int64_t>(element);
  if (info.dtype != file_dtype(rows.dtype) || info.bytes() != bytes || rows.tokens != total_tokens(runs) ||
      rows.heads != grid.heads || rows.dim != grid.dim) {
    fail(ErrorCode::kInternal, fmt::format("rows for tensor {} don't fit the plan", in_quotes(tensor)));
  }
  const std::int64_t origin = plan_.header.data_offset + info.begin;
  const auto row_bytes = static_cast<std::size_t>(grid.dim) * element;
  if (!grid.head_major() && rows.is_dense()) {
    for_each_segment(grid, runs, element, std::numeric_limits<std::int64_t>::max(), [&](const RowSegment& segment) {
      write_exactly(file(), temporary_path_, origin + segment.offset,
                    {rows.at(segment.row, 0), static_cast<std::size_t>(segment.tokens * segment.heads) * row_bytes});
    });
    return;
  }
  std::vector<std::byte> staging;
  for_each_segment(grid, runs, element, kStagingBytes, [&](const RowSegment& segment) {
    staging.resize(static_cast<std::size_t>(segment.tokens * segment.heads) * row_bytes);
    gather_rows(rows, segment.row, segment.head, segment.heads, staging);
    write_exactly(file(), temporary_path_, origin + segment.offset, staging);
  });
}

void SafetensorsWriter::write_lse(std::string_view tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                                  const RowView& lse) {
  write_rows(tensor, lse_grid(grid), runs,
             {lse.data, Dtype::kF32, total_tokens(runs), grid.heads, 1, lse.token_stride, lse.head_stride});
}

void SafetensorsWriter::write_bytes(std::string_view tensor, std::span<const std::byte> data) {
  const TensorInfo& info = planned(tensor);
  if (static_cast<std::int64_t>(data.size()) != info.bytes()) {
    fail(ErrorCode::kInternal, fmt::format("{} bytes for tensor {}", data.size(), in_quotes(tensor)),
         fmt::format("{} were planned", info.bytes()));
  }
  write_exactly(file(), temporary_path_, plan_.header.data_offset + info.begin, data);
}

void SafetensorsWriter::write_part(std::string_view tensor, std::int64_t offset, std::span<const std::byte> data) {
  const TensorInfo& info = planned(tensor);
  if (offset < 0 || offset > info.bytes() - static_cast<std::int64_t>(data.size())) {
    fail(ErrorCode::kInternal,
         fmt::format("bytes {} to {} of tensor {}", offset, offset + static_cast<std::int64_t>(data.size()),
                     in_quotes(tensor)),
         fmt::format("{} were planned", info.bytes()));
  }
  write_exactly(file(), temporary_path_, plan_.header.data_offset + info.begin + offset, data);
}

void SafetensorsWriter::write_row_bytes(std::string_view tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                                        std::size_t element_bytes, std::span<const std::byte> rows) {
  const std::size_t head_bytes = static_cast<std::size_t>(grid.dim) * element_bytes;
  const auto place = [&](std::int64_t row, std::int64_t head) {
    return static_cast<std::size_t>(row * grid.heads + head) * head_bytes;
  };
  if (rows.size() != place(total_tokens(runs), 0)) {
    fail(ErrorCode::kInternal, fmt::format("rows for tensor {} don't fit the plan", in_quotes(tensor)));
  }
  std::vector<std::byte> staging;
  const std::int64_t most = grid.head_major() ? kStagingBytes : std::numeric_limits<std::int64_t>::max();
  for_each_segment(grid, runs, element_bytes, most, [&](const RowSegment& segment) {
    const std::size_t bytes = static_cast<std::size_t>(segment.tokens * segment.heads) * head_bytes;
    if (!grid.head_major()) return write_part(tensor, segment.offset, rows.subspan(place(segment.row, 0), bytes));
    staging.resize(bytes);
    for (std::int64_t i = 0; i < segment.tokens; ++i) {
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(place(segment.row + i, segment.head)), head_bytes,
                  staging.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i) * head_bytes));
    }
    write_part(tensor, segment.offset, staging);
  });
}

void SafetensorsWriter::set_metadata(std::string_view key, std::string_view value) {
  const auto at = plan_.metadata_at.find(key);
  const std::string json = json_string(value);
  const auto planned_value = plan_.header.metadata.find(key);
  if (at == plan_.metadata_at.end() || json_string(planned_value->second).size() != json.size()) {
    fail(ErrorCode::kInternal, fmt::format("metadata {} of {} bytes wasn't planned", in_quotes(key), json.size()));
  }
  write_exactly(file(), temporary_path_, static_cast<std::int64_t>(at->second), std::as_bytes(std::span(json)));
}

void SafetensorsWriter::sync() { sync_file(file(), temporary_path_); }

void SafetensorsWriter::commit() {
  if (!created_) fail(ErrorCode::kInternal, fmt::format("{} isn't this rank's to commit", temporary_path_));
  created_->publish_synced(force_);
}

void SafetensorsWriter::discard() noexcept {
  if (created_) created_->discard();
  if (shared_) ::unlink(temporary_path_.c_str());
  shared_.reset();
}

}  // namespace ringattn
