// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors file: refused with one kFile message, or read into a header that keeps its promises.
#include <algorithm>
#include <span>

#include "base/error.hpp"
#include "io/safetensors_header.hpp"
#include "io/safetensors_writer.hpp"
#include "tests/fuzz/fuzz_target.hpp"
#include "tests/io/safetensors_cases.hpp"

namespace ringattn::testing {

namespace {

constexpr std::size_t kLargeSeed = std::size_t{1} << 16;  // cases that only test limits; they slow mutation down

void check_header(const SafetensorsHeader& header, std::size_t file_bytes) {
  fuzz_check(header.data_offset >= 8, "data lie behind the length field");
  fuzz_check(header.data_offset + header.data_bytes == static_cast<std::int64_t>(file_bytes), "sizes add up");
  fuzz_check(std::is_sorted(header.tensors.begin(), header.tensors.end(),
                            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; }),
             "tensors ascend by name");
  std::int64_t covered = 0;
  for (const TensorInfo& tensor : header.tensors) {
    fuzz_check(header.find(tensor.name) == &tensor, "names are unique", tensor.name);
    fuzz_check(0 <= tensor.begin && tensor.begin <= tensor.end && tensor.end <= header.data_bytes,
               "tensors lie in the data", tensor.name);
    const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
    __extension__ unsigned __int128 bits = empty ? 0 : static_cast<unsigned>(bits_of(tensor.dtype));
    for (const std::int64_t dim : tensor.shape) {
      fuzz_check(dim >= 0, "dimensions aren't negative", tensor.name);
      bits *= static_cast<std::uint64_t>(dim);  // below 2^63 before, and below 2^126 now
      fuzz_check(bits <= ~std::uint64_t{0} / 2, "sizes fit", tensor.name);
    }
    __extension__ const auto needed = static_cast<unsigned __int128>(tensor.bytes()) * 8;
    fuzz_check(bits == needed, "a tensor has the bytes that its shape needs", tensor.name);
    covered += tensor.bytes();
  }
  fuzz_check(covered == header.data_bytes, "tensors cover the data");
}

// What was read can be written, and reads the same again.
void check_round_trip(const SafetensorsHeader& header) {
  std::vector<OutputTensor> tensors;
  for (const TensorInfo& tensor : header.tensors) {
    if (bits_of(tensor.dtype) % 8 == 0) tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  const SafetensorsPlan plan = plan_safetensors(tensors, FileMetadata(header.metadata.begin(), header.metadata.end()));
  fuzz_check(plan.header.metadata == header.metadata, "metadata survive");
  for (const OutputTensor& tensor : tensors) {
    const TensorInfo* written = plan.header.find(tensor.name);
    fuzz_check(written != nullptr && written->shape == tensor.shape && written->dtype == tensor.dtype,
               "tensors survive", tensor.name);
  }
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  for (const auto& cases : {accepted_safetensors(), malformed_safetensors()}) {
    for (const FileCase& file : cases) {
      if (file.bytes.size() < kLargeSeed) seeds.push_back(file.bytes);
    }
  }
  return seeds;
}

std::vector<std::string> fuzz_words() {
  return {"{",
          "}",
          "[",
          "]",
          ",",
          ":",
          "\"",
          "\\",
          "\"dtype\":",
          "\"shape\":",
          "\"data_offsets\":",
          "\"__metadata__\":",
          "\"F32\"",
          "\"BF16\"",
          "\"F4\"",
          "\"a\":",
          "[0,4]",
          "[1]",
          "-1",
          "1.0",
          "1e9",
          "null",
          "{}",
          "[]",
          "true",
          "\\u0000",
          "\\ud800",
          "../",
          std::string(1, '\0'),
          "\xef\xbb\xbf",
          "xxxx",
          " "};
}

}  // namespace ringattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ringattn;
  using namespace ringattn::testing;
  std::optional<SafetensorsHeader> header;
  try {
    header = parse_safetensors(std::as_bytes(std::span(data, size)), "FILE");
  } catch (const Error& error) {
    const std::string_view message = error.what();
    fuzz_check(error.code() == ErrorCode::kFile, "refusals are about the file", message);
    fuzz_check(message.find_first_of(std::string_view("\n\r\0", 3)) == std::string_view::npos && message.size() < 1000,
               "a message is one line", message);
  }
  if (header) {
    check_header(*header, size);
    check_round_trip(*header);
  }
  return 0;
}
