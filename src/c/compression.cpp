// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "c/compressed.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "kernels/quant/compression_methods.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "ops/attention/compressed_blocks.hpp"

struct ringattn_compression : ringattn::c::Object<ringattn::TensorCodec> {
  static constexpr const char* kName = "compression";
  ringattn::RowFormat format;
  ringattn::RowShape shape;
  std::int64_t sequences;
  std::uint64_t seed;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of the structs in their first interface version.
constexpr std::size_t kFirstSpec = 48, kFirstFacts = 40, kFirstPart = 56, kFirstTensors = 48, kFirstFormats = 144;

// Arguments of compress and decompress.
struct Call {
  std::string name;
  MutableTensorView plain;
  CompressedRows rows;
  Stream stream;
  std::vector<CompressedRun> runs;
};

Call read_call(const ringattn_compression& handle, const ringattn_compression_tensors* given, bool writes_plain) {
  const auto tensors = read_struct("ringattn_compression_tensors", given, kFirstTensors);
  if (handle.sequences > 0) need(tensors.lengths, "lengths");
  need(tensors.plain, "plain");
  Call call;
  call.name = tensors.name == nullptr ? "x" : tensors.name;
  std::int64_t tokens = 0;
  for (std::int64_t s = 0; s < handle.sequences; ++s) {
    const std::int64_t length = tensors.lengths[s];
    if (length < 0) {
      fail(ErrorCode::kUsage, fmt::format("sequence {} of {} has {} tokens", s, call.name, length),
           "a length is not negative", "Check lengths.");
    }
    if (length > 0) call.runs.push_back({s, 0, length, tokens, length, tokens});
    tokens += length;
  }
  const TensorReader reader(*handle.transport);
  call.plain = reader.rows(call.name.c_str(), tensors.plain);
  const MutableTensorView& plain = call.plain;
  if (RowShape{plain.dtype, plain.heads, plain.dim} != handle.shape || plain.tokens != tokens) {
    fail(ErrorCode::kUsage,
         fmt::format("{} is {} [{}, {}, {}]", call.name, dtype_name(plain.dtype), plain.tokens, plain.heads, plain.dim),
         fmt::format("it should be {} [{}, {}, {}]", dtype_name(handle.shape.dtype), tokens, handle.shape.heads,
                     handle.shape.dim),
         "Check it against the spec and the lengths.");
  }
  call.rows = read_rows(reader, call.name, tensors.compressed, handle.format, handle.shape, tokens, handle.sequences);
  if (writes_plain) reader.check_written(call.name);
  call.stream.handle = tensors.stream;
  return call;
}

ringattn_part part_of(std::string_view name, StoredType type, Dtype dtype, std::span<const std::int64_t> shape) {
  // Part names are literals, so they end in a zero byte.
  ringattn_part part{0, name.data(), part_types(type, dtype).front(), static_cast<std::int32_t>(shape.size()), {}};
  std::ranges::copy(shape, part.shape);
  return part;
}

void write_text(const std::string& text, char (&to)[64]) {
  if (text.size() >= sizeof to) {
    fail(ErrorCode::kInternal, fmt::format("a format's name has {} letters", text.size()), "the limit is 63",
         "Please report it.");
  }
  std::ranges::copy(text, to);
}

}  // namespace

extern "C" {

ringattn_status ringattn_compression_create(ringattn_world* world, const ringattn_compression_spec* spec,
                                            const ringattn_options* options, ringattn_compression** compression) {
  return create(world, compression, [&](Transport& transport) {
    const auto read = read_struct("ringattn_compression_spec", spec, kFirstSpec);
    need(read.format, "format");
    const RowFormat format = parse_row_format(read.format);
    const RowShape shape{read_dtype(read.dtype), read.heads, read.dim};
    if (shape.heads < 1 || shape.dim < 1 || read.sequences < 0 || read.sequences > kMaxSequences) {
      fail(ErrorCode::kUsage,
           fmt::format("a tensor of {} sequences, {} heads and {} dims", read.sequences, shape.heads, shape.dim),
           fmt::format("it has up to {} sequences, and heads and dims", kMaxSequences), "Check the spec.");
    }
    check_format("a tensor", format, shape);
    if (format.is_plain()) {
      fail(ErrorCode::kUsage, "the format is plain", "it compresses nothing", "Name a format that compresses.");
    }
    TensorCodec coder(format, shape, {read_threads(options), transport.device()}, backend_of(transport));
    return new ringattn_compression{
        {world->transport, std::move(coder)}, format, shape, read.sequences, static_cast<std::uint64_t>(read.seed)};
  });
}

ringattn_status ringattn_compression_get_facts(const ringattn_compression* compression,
                                               ringattn_compression_facts* facts) {
  return with(compression, [&](const ringattn_compression& handle) {
    const auto count = [](const auto& parts) { return static_cast<std::int64_t>(parts.size()); };
    write_struct("ringattn_compression_facts",
                 {0, count(format_streams(handle.format, handle.shape)),
                  count(format_tables(handle.format, handle.shape, handle.sequences)),
                  token_bytes(handle.format, handle.shape), table_bytes(handle.format, handle.shape, handle.sequences)},
                 facts, kFirstFacts);
  });
}

ringattn_status ringattn_compression_get_part(const ringattn_compression* compression, int32_t kind, int32_t index,
                                              ringattn_part* part) {
  return with(compression, [&](const ringattn_compression& handle) {
    const Dtype dtype = handle.shape.dtype;
    std::vector<ringattn_part> parts;
    if (kind == RINGATTN_STREAM) {
      for (const FormatStream& stream : format_streams(handle.format, handle.shape)) {
        parts.push_back(part_of(stream.name, stream.type, dtype, std::array{stream.heads, stream.width}));
      }
    } else if (kind == RINGATTN_TABLE) {
      for (const FormatTable& table : format_tables(handle.format, handle.shape, handle.sequences)) {
        parts.push_back(part_of(table.name, table.type, dtype, table.shape));
      }
    }
    if (index < 0 || static_cast<std::size_t>(index) >= parts.size()) {
      fail(ErrorCode::kUsage, fmt::format("there is no part {} of kind {}", index, kind),
           fmt::format("{} has {} of that kind; RINGATTN_STREAM is 0, RINGATTN_TABLE 1", describe(handle.format),
                       parts.size()),
           "Ask the object's facts how many.");
    }
    write_struct("ringattn_part", parts[static_cast<std::size_t>(index)], part, kFirstPart);
  });
}

ringattn_status ringattn_compression_compress(ringattn_compression* compression,
                                              const ringattn_compression_tensors* tensors, double* energy_kept) {
  return with(compression, [&](ringattn_compression& handle) {
    const Call call = read_call(handle, tensors, false);
    const double kept = handle.instance.compress(call.name, call.plain, call.runs, call.rows, ErrorCode::kUsage,
                                                 call.stream, handle.seed);
    if (energy_kept != nullptr) *energy_kept = kept;
  });
}

ringattn_status ringattn_compression_decompress(ringattn_compression* compression,
                                                const ringattn_compression_tensors* tensors) {
  return with(compression, [&](ringattn_compression& handle) {
    const Call call = read_call(handle, tensors, true);
    handle.instance.decompress_checked(call.name, call.rows, call.runs, call.plain, ErrorCode::kUsage, call.stream);
  });
}

void ringattn_compression_destroy(ringattn_compression* compression) { destroy(compression); }

ringattn_status ringattn_choose_formats(const char* method, double ratio, const ringattn_spec* spec,
                                        ringattn_formats* formats) {
  return guarded([&] {
    need(method, "method");
    need(formats, "formats");
    CacheFormat given;
    const AttentionSpec attention = read_spec(spec, given);
    const RowShape k = k_shape(attention), v = v_shape(attention);
    const CacheFormat chosen =
        choose_format(parse_format_choice(method), ratio == 0.0 ? std::nullopt : std::optional(ratio), k, v);
    ringattn_formats whole{};
    write_text(describe(chosen.k), whole.k);
    write_text(describe(chosen.v), whole.v);
    whole.removed = removed_share(chosen, k, v);
    write_struct("ringattn_formats", whole, formats, kFirstFormats);
  });
}

}  // extern "C"
