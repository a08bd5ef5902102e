// SPDX-License-Identifier: Apache-2.0
// A subcommand opens its input once, whatever the op and however many ranks share the process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>

#include "base/file_descriptor.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// How often the program with these words opens the file.
int opens_of(const std::string& path, const Words& words) {
  const FileDescriptor watch(::inotify_init1(IN_NONBLOCK));
  EXPECT_GE(::inotify_add_watch(watch.get(), path.c_str(), IN_OPEN), 0);
  const Finished finished = tool(words);
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  int opens = 0;
  alignas(inotify_event) std::array<char, 4096> events;
  for (ssize_t bytes = 0; (bytes = ::read(watch.get(), events.data(), events.size())) > 0;) {
    for (ssize_t at = 0; at < bytes;) {
      const auto* const event = reinterpret_cast<const inotify_event*>(events.data() + at);
      if ((event->mask & IN_OPEN) != 0) ++opens;
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  }
  return opens;
}

TEST(Opens, AnInputIsOpenedOnce) {
  const TemporaryFolder folder;
  const std::string rows = write_tensors(folder.file("rows.safetensors"), row_tensors({}));
  const std::string cache = write_cache(folder.file("cache.safetensors"), {});
  const std::string ssm = folder.file("ssm.safetensors");
  const auto numbers = [](std::vector<std::int64_t> shape, std::size_t count) {
    const std::vector<float> values(count, 0.5F);
    const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
    return NamedTensor{FileDtype::kF32, std::move(shape), {bytes, bytes + count * sizeof(float)}};
  };
  write_tensors(ssm, {{"x", numbers({20, 2, 8}, 320)},
                      {"dt", numbers({20, 2}, 40)},
                      {"A", numbers({2}, 2)},
                      {"B", numbers({20, 1, 8}, 160)},
                      {"C", numbers({20, 1, 8}, 160)}});
  for (const std::string& path : {rows, cache, ssm}) {
    for (const Words& words : {Words{"plan"},
                               {"run"},
                               {"run", "--ranks", "3"},
                               {"run", "--json", "-"},
                               {"verify"},
                               {"verify", "--against", "oracle"},
                               {"bench", "--samples", "1"}}) {
      EXPECT_EQ(opens_of(path, words + Words{"--input", path}), 1) << words.front() << " " << path;
    }
    EXPECT_EQ(opens_of(path, {"run", "--print-config", "--input", path}), 1) << path;
  }
}

}  // namespace
}  // namespace ringattn::testing
