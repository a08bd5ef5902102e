// SPDX-License-Identifier: Apache-2.0
// A fuzzer for compilers without libFuzzer: seeds, mutations of seeds, and mutations of those, in an order that depends
// only on --seed. Finds less than a guided fuzzer, and runs wherever the tests do.
//
//   fuzz_x [--seconds N] [--seed S]   mutates for N seconds (2)
//   fuzz_x --write-seeds FOLDER       writes the seeds, as a corpus for libFuzzer
//   fuzz_x FILE…                      runs these inputs, e.g. one that crashed
//
// The input being run is kept in fuzz-last-input in the working folder when the process dies by a check.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/fuzz_target.hpp"

namespace {

using Random = std::mt19937_64;

std::string current;

void keep_input(int) {
  std::FILE* file = std::fopen("fuzz-last-input", "wb");
  if (file != nullptr) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
  }
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

void run(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

std::size_t below(Random& random, std::size_t limit) { return limit == 0 ? 0 : random() % limit; }

// One change: a bit, a byte, a word of the format, a number, a cut, a copy, or a part of another input.
std::string mutate(std::string text, const std::vector<std::string>& words, const std::vector<std::string>& pool,
                   Random& random) {
  const std::size_t at = below(random, text.size() + 1);
  const std::size_t length = std::min(text.size() - at, std::size_t{1} << below(random, 7));
  switch (random() % 9) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
      break;
    case 1:
      if (at < text.size()) text[at] = static_cast<char>(random());
      break;
    case 2:
      text.insert(at, words[below(random, words.size())]);
      break;
    case 3:
      text.replace(at, length, words[below(random, words.size())]);
      break;
    case 4:
      text.erase(at, length);
      break;
    case 5:
      text.insert(below(random, text.size() + 1), text.substr(at, length));
      break;
    case 6: {  // another number for one that is there
      const std::size_t digit = text.find_first_of("0123456789", at);
      if (digit == std::string::npos) break;
      const std::size_t end = std::min(text.find_first_not_of("0123456789", digit), text.size());
      const std::uint64_t edges[] = {0, 1, 4, 1ULL << 31, 1ULL << 32, 1ULL << 53, 1ULL << 63, ~0ULL, random() % 100};
      text.replace(digit, end - digit, std::to_string(edges[random() % std::size(edges)]));
      break;
    }
    case 7: {  // eight bytes of little-endian number, near the front where length fields are
      const std::uint64_t edges[] = {0, text.size(), text.size() - 8, 1ULL << 63, ~0ULL, ~0ULL - 7, random() % 256};
      const std::uint64_t number = edges[random() % std::size(edges)];
      if (text.size() >= 8) std::memcpy(text.data(), &number, sizeof number);
      break;
    }
    default: {
      const std::string& other = pool[below(random, pool.size())];
      const std::size_t from = below(random, other.size() + 1);
      text.replace(at, length, other.substr(from, std::size_t{1} << below(random, 9)));
      break;
    }
  }
  return text;
}

void fuzz(double seconds, std::uint64_t seed) {
  constexpr std::size_t kLongest = std::size_t{1} << 14;
  constexpr std::size_t kPool = 512;
  Random random(seed);
  const std::vector<std::string> words = ringattn::testing::fuzz_words();
  std::vector<std::string> pool = ringattn::testing::fuzz_seeds();
  for (const std::string& input : pool) run(input);
  std::erase_if(pool, [](const std::string& input) { return input.size() > kLongest; });
  const std::size_t seeds = pool.size();
  std::uint64_t inputs = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 64; ++i, ++inputs) {
      std::string input = pool[below(random, pool.size())];
      for (std::size_t changes = 1 + below(random, 4); changes > 0; --changes) {
        input = mutate(std::move(input), words, pool, random);
      }
      if (input.size() > kLongest) input.resize(kLongest);
      run(input);
      if (random() % 16 != 0) continue;
      if (pool.size() < kPool) {
        pool.push_back(std::move(input));
      } else {
        pool[seeds + below(random, kPool - seeds)] = std::move(input);
      }
    }
  }
  std::printf("%llu inputs from seed %llu in %.0f s, nothing found\n", static_cast<unsigned long long>(inputs),
              static_cast<unsigned long long>(seed), seconds);
}

std::string read_file(const char* path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    std::fprintf(stderr, "can't read %s\n", path);
    std::exit(3);
  }
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGABRT, keep_input);
  double seconds = 2.0;
  std::uint64_t seed = 1;
  bool replayed = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const bool takes_value = flag == "--seconds" || flag == "--seed" || flag == "--write-seeds";
    if (takes_value && i + 1 == argc) {
      std::fprintf(stderr, "%s needs a value\n", argv[i]);
      return 2;
    }
    if (flag == "--seconds") {
      seconds = std::atof(argv[++i]);
    } else if (flag == "--seed") {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (flag == "--write-seeds") {
      const std::string folder = argv[++i];
      std::size_t number = 0;
      for (const std::string& input : ringattn::testing::fuzz_seeds()) {
        std::ofstream stream(folder + "/seed" + std::to_string(number++), std::ios::binary);
        if (!stream.write(input.data(), static_cast<std::streamsize>(input.size())).flush()) {
          std::fprintf(stderr, "can't write into %s\n", folder.c_str());
          return 3;
        }
      }
      replayed = true;
    } else {
      run(read_file(argv[i]));
      replayed = true;
    }
  }
  if (!replayed) fuzz(seconds, seed);
  return 0;
}
