// SPDX-License-Identifier: Apache-2.0
// Our reader and writer as a program, for comparison with the reference library (safetensors_reference_test.py):
//   check        reads files from stdin, each after 8 bytes of length; prints "accept" or "reject MESSAGE" for each
//   dump FILE    prints each tensor as "NAME DTYPE SHAPE HEX"
//   write FILE   writes a tensor of every dtype, with bytes 0, 1, 2, …
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "io/safetensors_file.hpp"
#include "io/safetensors_writer.hpp"

namespace ringattn {
namespace {

void check() {
  std::uint64_t length = 0;
  while (std::fread(&length, sizeof length, 1, stdin) == 1) {
    std::vector<std::byte> bytes(length);
    if (length > 0 && std::fread(bytes.data(), length, 1, stdin) != 1) fail(ErrorCode::kUsage, "stdin ends early");
    try {
      parse_safetensors(bytes, "FILE");
      fmt::print("accept\n");
    } catch (const Error& error) {
      fmt::print("reject {}\n", error.what());
    }
  }
}

void dump(const std::string& path) {
  const SafetensorsFile file(path);
  for (const std::string_view name : file.names()) {
    const TensorSource tensor = file.tensor(name);
    std::vector<std::byte> data(static_cast<std::size_t>(tensor.info->bytes()));
    tensor.shard->read(*tensor.info, 0, data);
    std::string hex;
    for (const std::byte byte : data) hex += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
    fmt::print("{} {} {} {}\n", name, file_dtype_name(tensor.info->dtype), fmt::join(tensor.info->shape, ","), hex);
  }
}

void write(const std::string& path) {
  std::vector<OutputTensor> tensors;
  for (int i = 0; i <= static_cast<int>(FileDtype::kU64); ++i) {
    const auto dtype = static_cast<FileDtype>(i);
    if (bits_of(dtype) % 8 == 0) tensors.push_back({fmt::format("t_{}", file_dtype_name(dtype)), dtype, {2, 3}});
  }
  tensors.push_back({"empty", FileDtype::kF32, {0, 4}});
  tensors.push_back({"scalar", FileDtype::kF64, {}});
  const SafetensorsPlan plan = plan_safetensors(tensors, {{"digest", "????"}, {"text", "a \"quoted\"\nline \xc3\xa4"}});
  const auto writer = SafetensorsWriter::create(plan, path, true);
  for (const OutputTensor& tensor : tensors) {
    std::vector<std::byte> data(static_cast<std::size_t>(plan.header.find(tensor.name)->bytes()));
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i);
    writer->write_bytes(tensor.name, data);
  }
  writer->set_metadata("digest", "beef");
  writer->commit();
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  try {
    if (verb == "check" && argc == 2) {
      ringattn::check();
    } else if (verb == "dump" && argc == 3) {
      ringattn::dump(argv[2]);
    } else if (verb == "write" && argc == 3) {
      ringattn::write(argv[2]);
    } else {
      fmt::print(stderr, "usage: safetensors_probe check | dump FILE | write FILE\n");
      return 2;
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 3;
  }
  return 0;
}
