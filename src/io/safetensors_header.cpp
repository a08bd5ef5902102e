// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_header.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr std::string_view kMetadataName = "__metadata__";

struct DtypeRow {
  std::string_view name;
  int bits;
};

constexpr DtypeRow kDtypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
};
static_assert(std::size(kDtypes) == static_cast<std::size_t>(FileDtype::kU64) + 1);

// Bits of `shape` elements of `dtype`, or nothing on overflow. Dimensions of size 0 don't hide the overflow of others,
// so the answer doesn't depend on their order.
std::optional<std::int64_t> bits_of_shape(std::span<const std::int64_t> shape, FileDtype dtype) {
  std::int64_t bits = bits_of(dtype);
  bool empty = false;
  for (const std::int64_t dim : shape) {
    if (dim == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bits, dim, &bits)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bits;
}

// Why a name is refused; empty if it is valid. Names are never used as paths here, but tools that unpack files use them
// so.
std::string_view name_problem(std::string_view name) {
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) return "has a control character in its name";
  }
  if (name.starts_with('/')) return "has a name like an absolute path";
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") return "has a name like a path that leaves its folder";
    begin = end + 1;
  }
  return {};
}

// Builds a SafetensorsHeader from events. Refuses everything that the format doesn't describe.
class HeaderEvents final : public JsonEvents {
 public:
  HeaderEvents(const TextSource& source, SafetensorsHeader& header) : source_(source), header_(header) {}

  void begin_object() override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTop;
        return;
      case State::kTensor:
        state_ = State::kField;
        return;
      case State::kMetadata:
        state_ = State::kMetadataKey;
        return;
      default:
        unexpected("an object");
    }
  }

  void end_object() override {
    if (state_ == State::kField) {
      const char* missing = !has_dtype_ ? "dtype" : !has_shape_ ? "shape" : !has_offsets_ ? "data_offsets" : nullptr;
      if (missing != nullptr) source_.refuse(fmt::format("{} has no {}", subject(), missing));
      header_.tensors.push_back(std::move(tensor_));
      state_ = State::kTop;
    } else {
      state_ = state_ == State::kMetadataKey ? State::kTop : State::kEnd;
    }
  }

  void begin_array() override {
    if (state_ == State::kShape) {
      state_ = State::kShapeItems;
    } else if (state_ == State::kOffsets) {
      state_ = State::kOffsetItems;
    } else {
      unexpected("an array");
    }
  }

  void end_array() override {
    if (state_ == State::kOffsetItems && offsets_ != 2) {
      source_.refuse(fmt::format("{} has {} data_offsets instead of 2", subject(), offsets_));
    }
    state_ = State::kField;
  }

  void key(std::string& name) override {
    switch (state_) {
      case State::kTop:
        begin_entry(name);
        return;
      case State::kField:
        begin_field(name);
        return;
      default:
        if (name.size() > HeaderLimits::kNameBytes) source_.refuse("a key of its metadata is too long");
        if (header_.metadata.size() == HeaderLimits::kMetadata) {
          source_.refuse(fmt::format("its metadata has more than {} entries", HeaderLimits::kMetadata));
        }
        metadata_key_ = name;
        state_ = State::kMetadataValue;
    }
  }

  void string(std::string& value) override {
    if (state_ == State::kDtype) {
      const auto dtype = parse_file_dtype(value);
      if (!dtype) source_.refuse(fmt::format("{} has the unknown dtype {}", subject(), in_quotes(value)));
      tensor_.dtype = *dtype;
      state_ = State::kField;
    } else if (state_ == State::kMetadataValue) {
      if (!header_.metadata.emplace(metadata_key_, std::move(value)).second) {
        source_.refuse(fmt::format("its metadata names {} twice", in_quotes(metadata_key_)));
      }
      state_ = State::kMetadataKey;
    } else {
      unexpected(fmt::format("the string {}", in_quotes(value)));
    }
  }

  void integer(std::uint64_t value) override {
    if (state_ != State::kShapeItems && state_ != State::kOffsetItems) unexpected(fmt::format("the number {}", value));
    if (value > static_cast<std::uint64_t>(kLargest)) {
      source_.refuse(fmt::format("{} has the number {}, past 2^63", subject(), value));
    }
    const auto number = static_cast<std::int64_t>(value);
    if (state_ == State::kShapeItems) {
      if (tensor_.shape.size() == HeaderLimits::kRank) {
        source_.refuse(fmt::format("{} has more than {} dimensions", subject(), HeaderLimits::kRank));
      }
      tensor_.shape.push_back(number);
    } else {
      if (++offsets_ == 1) tensor_.begin = number;
      if (offsets_ == 2) tensor_.end = number;
    }
  }

  void other(std::string_view what) override {
    if (state_ != State::kMetadata || what != "null") unexpected(what);
    state_ = State::kTop;  // no metadata: the reference library accepts null for it
  }

 private:
  enum class State {
    kStart,
    kTop,
    kTensor,
    kField,
    kDtype,
    kShape,
    kShapeItems,
    kOffsets,
    kOffsetItems,
    kMetadata,
    kMetadataKey,
    kMetadataValue,
    kEnd,
  };

  std::string subject() const { return "tensor " + in_quotes(tensor_.name); }

  void begin_entry(const std::string& name) {
    if (name == kMetadataName) {
      if (has_metadata_) source_.refuse("it has two entries __metadata__");
      has_metadata_ = true;
      state_ = State::kMetadata;
      return;
    }
    tensor_ = TensorInfo{};
    tensor_.name = name;
    if (name.size() > HeaderLimits::kNameBytes) {
      source_.refuse(fmt::format("a tensor's name has {} bytes, more than {}", name.size(), HeaderLimits::kNameBytes));
    }
    if (const auto problem = name_problem(name); !problem.empty()) {
      source_.refuse(fmt::format("{} {}", subject(), problem));
    }
    if (header_.tensors.size() == HeaderLimits::kTensors) {
      source_.refuse(fmt::format("it has more than {} tensors", HeaderLimits::kTensors));
    }
    has_dtype_ = has_shape_ = has_offsets_ = false;
    offsets_ = 0;
    state_ = State::kTensor;
  }

  void begin_field(const std::string& name) {
    bool* seen = nullptr;
    if (name == "dtype") {
      seen = &has_dtype_;
      state_ = State::kDtype;
    } else if (name == "shape") {
      seen = &has_shape_;
      state_ = State::kShape;
    } else if (name == "data_offsets") {
      seen = &has_offsets_;
      state_ = State::kOffsets;
    } else {
      source_.refuse(fmt::format("{} has the unknown field {}", subject(), in_quotes(name)));
    }
    if (*seen) source_.refuse(fmt::format("{} has two fields {}", subject(), name));
    *seen = true;
  }

  [[noreturn]] void unexpected(std::string_view what) const {
    switch (state_) {
      case State::kDtype:
        source_.refuse(fmt::format("the dtype of {} is {}", subject(), what));
      case State::kShape:
      case State::kShapeItems:
        source_.refuse(fmt::format("the shape of {} holds {}, not a list of whole numbers", subject(), what));
      case State::kOffsets:
      case State::kOffsetItems:
        source_.refuse(fmt::format("the data_offsets of {} hold {}, not two whole numbers", subject(), what));
      case State::kMetadata:
        source_.refuse(fmt::format("its __metadata__ is {}, not an object", what));
      case State::kMetadataValue:
        source_.refuse(fmt::format("its metadata {} is {}, not a string", in_quotes(metadata_key_), what));
      case State::kTensor:
        source_.refuse(fmt::format("{} is {}, not an object", subject(), what));
      default:
        source_.refuse(fmt::format("its header is {}, not an object", what));
    }
  }

  const TextSource& source_;
  SafetensorsHeader& header_;
  State state_ = State::kStart;
  TensorInfo tensor_;
  std::string metadata_key_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  bool has_metadata_ = false;
  std::size_t offsets_ = 0;
};

// Every tensor must have exactly the bytes that it needs, and together the tensors must tile the data.
void check_data(const TextSource& source, const SafetensorsHeader& header) {
  std::vector<const TensorInfo*> by_offset;
  by_offset.reserve(header.tensors.size());
  for (const TensorInfo& tensor : header.tensors) {
    const auto subject = [&] {
      return fmt::format("tensor {} of {} {}", in_quotes(tensor.name), file_dtype_name(tensor.dtype),
                         shape_text(tensor.shape));
    };
    const auto bits = bits_of_shape(tensor.shape, tensor.dtype);
    if (!bits) source.refuse(subject() + " is larger than 2^63 bits");
    if (*bits % 8 != 0) source.refuse(subject() + " doesn't fill whole bytes");
    if (tensor.begin > tensor.end) {
      source.refuse(fmt::format("{} ends at byte {}, before it begins at {}", subject(), tensor.end, tensor.begin));
    }
    if (tensor.end > header.data_bytes) {
      source.refuse(fmt::format("{} ends at byte {} of {} bytes of data", subject(), tensor.end, header.data_bytes));
    }
    if (tensor.bytes() != *bits / 8) {
      source.refuse(fmt::format("{} needs {} bytes and has {}", subject(), *bits / 8, tensor.bytes()));
    }
    by_offset.push_back(&tensor);
  }
  std::sort(by_offset.begin(), by_offset.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  std::int64_t covered = 0;
  for (const TensorInfo* tensor : by_offset) {
    if (tensor->begin != covered) {
      source.refuse(fmt::format(
          "tensor {} begins at byte {}, {} {}", in_quotes(tensor->name), tensor->begin,
          tensor->begin < covered ? "inside another tensor that ends at" : "after a gap that starts at", covered));
    }
    covered = tensor->end;
  }
  if (covered != header.data_bytes) {
    source.refuse(fmt::format("its tensors end at byte {} of {} bytes of data", covered, header.data_bytes));
  }
}

TextSource safetensors_source(std::string path) {
  return {std::move(path), "safetensors file",
          "Check that it was copied whole, or write it again with the safetensors library."};
}

}  // namespace

std::string_view file_dtype_name(FileDtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].name; }

std::optional<FileDtype> parse_file_dtype(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kDtypes); ++i) {
    if (name == kDtypes[i].name) return static_cast<FileDtype>(i);
  }
  return std::nullopt;
}

int bits_of(FileDtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].bits; }

FileDtype file_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return FileDtype::kBf16;
    case Dtype::kF16:
      return FileDtype::kF16;
    case Dtype::kF32:
      break;
  }
  return FileDtype::kF32;
}

std::optional<Dtype> attention_dtype(FileDtype dtype) {
  for (const Dtype candidate : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    if (file_dtype(candidate) == dtype) return candidate;
  }
  return std::nullopt;
}

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

const TensorInfo* SafetensorsHeader::find(std::string_view name) const {
  const auto at = std::lower_bound(tensors.begin(), tensors.end(), name,
                                   [](const TensorInfo& tensor, std::string_view n) { return tensor.name < n; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

void SafetensorsHeaderReader::check_file_size(const std::string& path, std::int64_t file_bytes) {
  if (file_bytes < 8) {
    safetensors_source(path).refuse(
        file_bytes == 0 ? "it is empty" : fmt::format("it has {} bytes, fewer than its length field", file_bytes));
  }
}

SafetensorsHeaderReader::SafetensorsHeaderReader(std::string path, const std::array<std::byte, 8>& length,
                                                 std::int64_t file_bytes)
    : source_(safetensors_source(std::move(path))),
      file_bytes_(file_bytes),
      // A tensor is four members; all others are metadata.
      scan_(source_, {4, 4 * HeaderLimits::kTensors + HeaderLimits::kMetadata + 1, std::size_t{1} << 24}) {
  check_file_size(source_.path, file_bytes);
  std::uint64_t bytes = 0;
  for (std::size_t i = 8; i-- > 0;) bytes = bytes << 8 | std::to_integer<std::uint64_t>(length[i]);
  if (bytes > HeaderLimits::kBytes) {
    source_.refuse(fmt::format("it claims a header of {} bytes, more than {}", bytes, HeaderLimits::kBytes));
  }
  if (bytes > static_cast<std::uint64_t>(file_bytes) - 8) {
    source_.refuse(fmt::format("it claims a header of {} bytes, and has {} in all", bytes, file_bytes));
  }
  bytes_ = static_cast<std::size_t>(bytes);
  text_.reserve(bytes_);  // growing would hold the text twice; pages are allocated only when they are written
}

void SafetensorsHeaderReader::feed(std::string_view piece) {
  scan_.feed(piece);
  text_ += piece;
}

SafetensorsHeader SafetensorsHeaderReader::finish() const {
  SafetensorsHeader header;
  header.data_offset = static_cast<std::int64_t>(bytes_) + 8;
  header.data_bytes = file_bytes_ - header.data_offset;
  HeaderEvents events(source_, header);
  parse_json(text_, source_, events);
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(header.tensors.begin(), header.tensors.end(),
                                        [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  if (twice != header.tensors.end()) source_.refuse(fmt::format("it names tensor {} twice", in_quotes(twice->name)));
  check_data(source_, header);
  return header;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& path) {
  const auto file_bytes = static_cast<std::int64_t>(file.size());
  SafetensorsHeaderReader::check_file_size(path, file_bytes);
  std::array<std::byte, 8> length;
  std::copy_n(file.begin(), 8, length.begin());
  SafetensorsHeaderReader reader(path, length, file_bytes);
  reader.feed({reinterpret_cast<const char*>(file.data()) + 8, reader.missing()});
  return reader.finish();
}

}  // namespace ringattn
