// SPDX-License-Identifier: Apache-2.0
// What backends do to caches before a step: where new rows go, and which lengths and pages they find wrong. Caches lie
// between bytes that must not change.
#include "kernels/decode/cache_update.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::byte kUnwritten{0xff};

// One part of a cache, as bytes of a dense pool after a margin.
struct Part {
  std::int64_t heads;
  std::int64_t row_bytes;
  std::int64_t gap;     // bytes after each token of the pool and each new row
  std::int64_t margin;  // before and after the pool, and before the new rows
};

struct Setting {
  std::int64_t page_size = 4;
  std::int64_t pages = 6;
  std::int64_t kv_split_keys = 8;
  KvPartition partition;
  int rows = 1;
  bool grow = true;
  bool checked = false;
  std::int64_t max_keys = kMost;
  std::vector<std::int32_t> lengths;
  std::vector<std::vector<std::int32_t>> table;  // by sequence; none: dense
  std::vector<Part> parts = {{2, 16, 0, 64}};
  std::vector<std::int32_t> prefix_of = {};  // by sequence
  std::vector<std::int32_t> prefix_keys = {};
};

template <class Number>
std::vector<std::byte> bytes_of(const std::vector<Number>& numbers) {
  std::vector<std::byte> bytes(std::max<std::size_t>(1, numbers.size() * sizeof(Number)));
  if (!numbers.empty()) std::memcpy(bytes.data(), numbers.data(), numbers.size() * sizeof(Number));
  return bytes;
}
template <class Number>
std::vector<Number> numbers_of(const DeviceArray& array, std::size_t count) {
  const std::vector<std::byte> bytes = array.read();
  std::vector<Number> numbers(count);
  if (count > 0) std::memcpy(numbers.data(), bytes.data(), count * sizeof(Number));
  return numbers;
}

// A setting in a backend's memory.
class Cache {
 public:
  Cache(Backend& backend, const Setting& setting)
      : backend_(backend),
        setting_(setting),
        lengths_(backend, setting.lengths.size() * 4 + 4),
        table_(backend, 4096),
        prefix_of_(backend, setting.prefix_of.size() * 4 + 4),
        prefix_keys_(backend, setting.prefix_keys.size() * 4 + 4),
        checked_(backend, setting.lengths.size() * 4 + 4),
        faults_(backend, (setting.lengths.size() + 1) * sizeof(OutOfRangeEntry)) {
    faults_.write(std::vector<std::byte>((setting.lengths.size() + 1) * sizeof(OutOfRangeEntry), std::byte{0}));
    lengths_.write(bytes_of(setting.lengths));
    update_.sequences = static_cast<std::int64_t>(setting.lengths.size());
    update_.rows = setting.rows;
    update_.lengths = reinterpret_cast<std::int32_t*>(lengths_.data());
    if (setting.grow) update_.new_lengths = reinterpret_cast<std::int32_t*>(lengths_.data());
    if (!setting.table.empty()) {
      std::vector<std::int32_t> entries;
      for (const auto& row : setting.table) entries.insert(entries.end(), row.begin(), row.end());
      table_.write(bytes_of(entries));
      update_.table_pages = static_cast<std::int64_t>(setting.table[0].size());
      update_.block_table = {reinterpret_cast<const std::int32_t*>(table_.data()), update_.table_pages};
    }
    update_.pages = setting.pages;
    update_.page_size = setting.page_size;
    update_.partition = setting.partition;
    update_.kv_split_keys = setting.kv_split_keys;
    update_.max_keys = setting.max_keys;
    if (!setting.prefix_keys.empty()) {
      prefix_of_.write(bytes_of(setting.prefix_of));
      prefix_keys_.write(bytes_of(setting.prefix_keys));
      update_.prefixes = {reinterpret_cast<const std::int32_t*>(prefix_of_.data()),
                          reinterpret_cast<const std::int32_t*>(prefix_keys_.data()),
                          static_cast<int>(setting.prefix_keys.size())};
    }
    if (setting.checked) {
      update_.checked = reinterpret_cast<std::int32_t*>(checked_.data());
      update_.out_of_range = reinterpret_cast<OutOfRangeEntry*>(faults_.data());
    }
    std::mt19937_64 generator(7);
    for (const Part& part : setting.parts) {
      const std::int64_t token = part.heads * part.row_bytes + part.gap;
      std::vector<std::byte> rows(
          static_cast<std::size_t>(part.margin + update_.sequences * setting.rows * token + part.margin));
      for (std::byte& byte : rows) byte = static_cast<std::byte>(generator() % 255);  // never kUnwritten
      new_.push_back(rows);
      pools_.emplace_back(std::make_unique<DeviceArray>(backend, static_cast<std::size_t>(pool_bytes(part))));
      rows_.emplace_back(std::make_unique<DeviceArray>(backend, rows.size()));
      rows_.back()->write(rows);
      CacheAppend& to = update_.appends[update_.append_count++];
      to.cache = pools_.back()->data() + part.margin;
      to.page_stride = setting.page_size * token;
      to.token_stride = token;
      to.head_stride = part.row_bytes;
      to.rows = rows_.back()->data() + part.margin;
      to.new_token_stride = token;
      to.new_head_stride = part.row_bytes;
      to.heads = part.heads;
      to.row_bytes = part.row_bytes;
    }
  }

  void update() {
    backend_.update_cache(update_, backend_.stream());
    backend_.synchronize(backend_.stream(), Deadline::after(60.0), {});
  }

  std::vector<std::int32_t> lengths() const { return numbers_of<std::int32_t>(lengths_, setting_.lengths.size()); }
  std::vector<std::int32_t> checked() const { return numbers_of<std::int32_t>(checked_, setting_.lengths.size()); }
  std::vector<OutOfRangeEntry> faults() const { return numbers_of<OutOfRangeEntry>(faults_, setting_.lengths.size()); }
  void set_lengths(const std::vector<std::int32_t>& lengths) { lengths_.write(bytes_of(lengths)); }
  const CacheUpdate& what() const { return update_; }

  // The pools as they should be once the rows at positions lengths[s] − rows … of these sequences have been written:
  // by walking over the keys of the partition, one by one.
  void expect_pools(const std::vector<std::int32_t>& lengths, const std::vector<bool>& written) const {
    for (std::size_t n = 0; n < pools_.size(); ++n) {
      const Part& part = setting_.parts[n];
      const std::int64_t token_bytes = part.heads * part.row_bytes + part.gap;
      std::vector<std::byte> expected(static_cast<std::size_t>(pool_bytes(part)), kUnwritten);
      for (std::size_t s = 0; s < lengths.size(); ++s) {
        std::int64_t token = 0;  // of the partition
        for (std::int64_t key = 0; written[s] && key < lengths[s]; ++key) {
          if (key / setting_.kv_split_keys % setting_.partition.stride != setting_.partition.first) continue;
          const std::int64_t at = token++;
          const std::int64_t row = key - (lengths[s] - setting_.rows);
          if (row < 0) continue;
          const auto entry = static_cast<std::size_t>(at / setting_.page_size);
          if (setting_.table.empty() ? entry > 0 : entry >= setting_.table[s].size()) continue;
          const std::int64_t page = setting_.table.empty() ? static_cast<std::int64_t>(s) : setting_.table[s][entry];
          if (page < 0 || page >= setting_.pages) continue;
          const std::int64_t to = part.margin + (page * setting_.page_size + at % setting_.page_size) * token_bytes;
          const std::int64_t from = part.margin + (static_cast<std::int64_t>(s) * setting_.rows + row) * token_bytes;
          std::copy_n(new_[n].begin() + from, part.heads * part.row_bytes, expected.begin() + to);
        }
      }
      EXPECT_EQ(pools_[n]->read(), expected) << "part " << n;
    }
  }

 private:
  std::int64_t pool_bytes(const Part& part) const {
    return 2 * part.margin + setting_.pages * setting_.page_size * (part.heads * part.row_bytes + part.gap);
  }

  Backend& backend_;
  Setting setting_;
  DeviceArray lengths_, table_, prefix_of_, prefix_keys_, checked_, faults_;
  std::vector<std::unique_ptr<DeviceArray>> pools_, rows_;
  std::vector<std::vector<std::byte>> new_;
  CacheUpdate update_;
};

class CacheUpdates : public ::testing::TestWithParam<KernelRow<DecodeSpec>> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    backend_ = GetParam().make_backend({1, 0});
  }
  Backend& backend() { return *backend_; }

 private:
  std::unique_ptr<Backend> backend_;
};

TEST_P(CacheUpdates, RowsGoToTheirPlaces) {
  const std::vector<std::vector<Part>> parts = {
      {{2, 16, 0, 64}}, {{3, 48, 16, 32}, {1, 20, 0, 4}}, {{2, 6, 1, 3}}, {{1, 1, 0, 1}, {2, 12, 4, 8}, {1, 7, 3, 5}}};
  std::mt19937_64 generator(3);
  int written = 0;
  for (int i = 0; i < 200; ++i) {
    Setting setting;
    setting.parts = parts[generator() % parts.size()];
    setting.rows = static_cast<int>(generator() % 16) + 1;
    setting.partition.stride = static_cast<int>(generator() % 4) + 1;
    setting.partition.first = static_cast<int>(generator()) % setting.partition.stride;
    if (setting.partition.first < 0) setting.partition.first += setting.partition.stride;
    setting.grow = generator() % 2 == 0;
    if (generator() % 3 != 0) {
      // No two sequences write the same page.
      std::vector<std::int32_t> order = {0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -5, kMost};
      std::shuffle(order.begin(), order.end(), generator);
      for (int s = 0; s < 3; ++s) setting.table.emplace_back(order.begin() + 4 * s, order.begin() + 4 * s + 4);
    }
    std::vector<std::int32_t> after;
    for (int s = 0; s < 3; ++s) {
      setting.lengths.push_back(static_cast<std::int32_t>(generator() % 70));
      after.push_back(setting.lengths.back() + (setting.grow ? setting.rows : 0));
    }
    Cache cache(backend(), setting);
    cache.update();
    EXPECT_EQ(cache.lengths(), after);
    cache.expect_pools(after, {true, true, true});
    if (HasFailure()) FAIL() << "case " << i;
    ++written;
  }
  EXPECT_EQ(written, 200);
}

TEST_P(CacheUpdates, ChecksFindWhatLeadsOutside) {
  using Kind = OutOfRangeEntry::Kind;
  Setting setting;
  setting.checked = true;
  setting.rows = 2;
  setting.table = {{5, 2, 99, -1}, {0, 3, 4, 1}, {7, 6, 8, 9}};
  setting.max_keys = 14;
  setting.pages = 10;
  // Sequence 0 has a bad page in its third entry, sequence 1 none, sequence 2 is longer than it may be.
  for (const auto& [lengths, faults] : std::vector<std::pair<std::vector<std::int32_t>, std::vector<OutOfRangeEntry>>>{
           {{4, 9, 2}, {{}, {}, {}}},
           {{6, 12, 12}, {{}, {}, {}}},
           {{7, 0, 13}, {{Kind::kPage, 2, 99, 10}, {}, {Kind::kLength, 0, 15, 14}}},
           {{11, 14, 0}, {{Kind::kPage, 2, 99, 10}, {Kind::kLength, 0, 16, 14}, {}}},
           {{-3, -2, kMost}, {{Kind::kLength, 0, -3, 14}, {Kind::kLength, 0, -2, 14}, {Kind::kLength, 0, kMost, 14}}},
           {{-1, 0, 1}, {{Kind::kLength, 0, -1, 14}, {}, {}}},
       }) {
    SCOPED_TRACE(fmt::format("{}, {}, {}", lengths[0], lengths[1], lengths[2]));
    setting.lengths = lengths;
    Cache cache(backend(), setting);
    cache.update();
    std::vector<std::int32_t> after, checked;
    std::vector<bool> good;
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      after.push_back(lengths[s] > kMost - 2 ? kMost : lengths[s] + 2);
      good.push_back(faults[s].kind == Kind::kNone);
      checked.push_back(good.back() ? after.back() : 0);
    }
    EXPECT_EQ(cache.lengths(), after);
    EXPECT_EQ(cache.checked(), checked);
    EXPECT_EQ(cache.faults(), faults);
    cache.expect_pools(checked, good);
  }
}

// A long table is read by many threads; the first of its bad entries is the one that is named.
TEST_P(CacheUpdates, TheFirstOfManyBadPages) {
  Setting setting;
  setting.checked = true;
  setting.page_size = 1;
  setting.pages = 5;
  setting.table = {std::vector<std::int32_t>(1000, 4)};
  setting.table[0][517] = 5;
  setting.table[0][518] = -1;
  setting.table[0][900] = 77;
  for (const auto& [length, place] : {std::pair{999, 517}, {517, 517}, {516, -1}, {0, -1}}) {
    setting.lengths = {length};
    setting.kv_split_keys = 3;
    Cache cache(backend(), setting);
    cache.update();
    const OutOfRangeEntry expected =
        place < 0 ? OutOfRangeEntry{} : OutOfRangeEntry{OutOfRangeEntry::Kind::kPage, place, 5, 5};
    EXPECT_EQ(cache.faults(), std::vector<OutOfRangeEntry>{expected}) << length;
  }
}

TEST_P(CacheUpdates, TablesAndDenseCachesThatEndTooEarly) {
  Setting setting;
  setting.checked = true;
  setting.page_size = 8;
  setting.pages = 3;
  setting.partition = {1, 2};
  setting.kv_split_keys = 4;
  setting.lengths = {15, 16, 17};  // of 16, 17 and 18 keys the partition has 8
  const auto faults_of = [&] {
    Cache cache(backend(), setting);
    cache.update();
    return cache.faults();
  };
  EXPECT_EQ(faults_of(), (std::vector<OutOfRangeEntry>{{}, {}, {}}));
  setting.lengths = {19, 20, 40};  // and of 20, 21 and 41 keys 8, 9 and 20
  EXPECT_EQ(faults_of(),
            (std::vector<OutOfRangeEntry>{
                {}, {OutOfRangeEntry::Kind::kCapacity, 0, 9, 8}, {OutOfRangeEntry::Kind::kCapacity, 0, 20, 8}}));
  setting.table = {{2, 0}, {1, 0}, {0, 0}};
  EXPECT_EQ(faults_of(), (std::vector<OutOfRangeEntry>{{}, {}, {OutOfRangeEntry::Kind::kTableRange, 0, 20, 16}}));
}

// Pages that a prefix fills are shared by all of its sequences; the next page may belong to each one.
TEST_P(CacheUpdates, SharedPrefixes) {
  using Kind = OutOfRangeEntry::Kind;
  Setting setting;
  setting.checked = true;
  setting.grow = false;
  setting.parts.clear();
  setting.pages = 9;
  setting.lengths = {20, 19, 17, 30, 12, 19};
  setting.prefix_of = {1, 1, -1, 1, 0, 1};
  setting.prefix_keys = {9, 19};  // they fill two pages of 4 keys; and four
  setting.table = {{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 8, 5, 6, 7}, {8, 8, 8, 8, 8, 8, 8, 8},
                   {0, 1, 2, 3, 7, 5, 6, 7}, {4, 4, 4, 4, 4, 4, 4, 4}, {0, 1, 2, 3, 5, 6, 7, 8}};
  const auto faults_of = [&] {
    Cache cache(backend(), setting);
    cache.update();
    for (std::size_t s = 0; s < setting.lengths.size(); ++s) {
      EXPECT_EQ(cache.checked()[s], cache.faults()[s].kind == Kind::kNone ? setting.lengths[s] : 0) << s;
    }
    return cache.faults();
  };
  EXPECT_EQ(faults_of(), std::vector<OutOfRangeEntry>(6));
  setting.table[3][3] = 8;
  setting.table[5][1] = 0;
  setting.prefix_of[2] = 2;
  setting.prefix_of[4] = -2;
  setting.lengths[1] = 18;
  EXPECT_EQ(faults_of(), (std::vector<OutOfRangeEntry>{{},
                                                       {Kind::kPrefixKeys, 1, 19, 18},
                                                       {Kind::kPrefix, 0, 2, 2},
                                                       {Kind::kPrefixPage, 3, 8, 3},
                                                       {Kind::kPrefix, 0, -2, 2},
                                                       {Kind::kPrefixPage, 1, 0, 1}}));
  setting.prefix_keys = {9, -1};
  setting.prefix_of = {1, -1, -1, -1, 0, -1};
  EXPECT_EQ(faults_of(), (std::vector<OutOfRangeEntry>{{Kind::kPrefixKeys, 1, -1, 20}, {}, {}, {}, {}, {}}));
}

// A KV split of a prefix may be incomplete: pages count, and not splits.
TEST_P(CacheUpdates, SharedPrefixesOfTheCurrentKvSplit) {
  for (const std::int32_t keys : {15, 16, 17}) {
    Setting setting;
    setting.checked = true;
    setting.grow = false;
    setting.parts.clear();
    setting.pages = 9;
    setting.kv_split_keys = 32;
    setting.lengths = {17, 20};
    setting.prefix_of = {0, 0};
    setting.prefix_keys = {keys};
    setting.table = {{0, 1, 2, 3, 4}, {0, 1, 2, 5, 6}};
    Cache cache(backend(), setting);
    cache.update();
    const OutOfRangeEntry differs{OutOfRangeEntry::Kind::kPrefixPage, 3, 5, 3};
    EXPECT_EQ(cache.faults(), (std::vector<OutOfRangeEntry>{{}, keys < 16 ? OutOfRangeEntry{} : differs})) << keys;
  }
}

// The second of three partitions has only KV split 1 of the prefix's three.
TEST_P(CacheUpdates, SharedPrefixesOfAPartition) {
  Setting setting;
  setting.checked = true;
  setting.grow = false;
  setting.parts.clear();
  setting.pages = 9;
  setting.partition = {1, 3};
  setting.lengths = {40, 41};
  setting.prefix_of = {0, 0};
  setting.prefix_keys = {25};
  setting.table = {{0, 1, 2, 3}, {0, 1, 5, 6}};
  const auto faults_of = [&] {
    Cache cache(backend(), setting);
    cache.update();
    return cache.faults();
  };
  EXPECT_EQ(faults_of(), std::vector<OutOfRangeEntry>(2));
  setting.table[1][1] = 2;
  EXPECT_EQ(faults_of(), (std::vector<OutOfRangeEntry>{{}, {OutOfRangeEntry::Kind::kPrefixPage, 1, 2, 1}}));
  setting.prefix_keys = {15};  // of KV split 1 they fill one page
  EXPECT_EQ(faults_of(), std::vector<OutOfRangeEntry>(2));
}

// The first out-of-range entry of a sequence stays until it has been read.
TEST_P(CacheUpdates, OutOfRangeEntriesStay) {
  Setting setting;
  setting.checked = true;
  setting.max_keys = 10;
  setting.pages = 3;
  setting.page_size = 16;
  setting.lengths = {10, 3, 5};
  Cache cache(backend(), setting);
  cache.update();
  cache.set_lengths({2, 12, 5});
  cache.update();
  EXPECT_EQ(cache.checked(), (std::vector<std::int32_t>{3, 0, 6}));
  EXPECT_EQ(cache.faults(),
            (std::vector<OutOfRangeEntry>{
                {OutOfRangeEntry::Kind::kLength, 0, 11, 10}, {OutOfRangeEntry::Kind::kLength, 0, 13, 10}, {}}));
  const std::vector<OutOfRangeEntry> faults = cache.faults();
  const Error error = error_of([&] { refuse_out_of_range(faults.data(), 3, ErrorCode::kFile); });
  EXPECT_EQ(error.code(), ErrorCode::kFile);
  EXPECT_NE(std::string(error.what()).find("sequence 0 has 11 keys"), std::string::npos) << error.what();
}

INSTANTIATE_TEST_SUITE_P(Backends, CacheUpdates,
                         ::testing::ValuesIn(kernel_table<DecodeSpec>().begin(), kernel_table<DecodeSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

// Which keys a partition holds, and where, against a list of all.
TEST(PartitionedKvSplits, HoldEveryKeyOnce) {
  for (const int every : {1, 2, 3, 5}) {
    for (const std::int64_t group : {1, 4, 7}) {
      std::vector<std::int64_t> next(static_cast<std::size_t>(every), 0);
      for (std::int64_t key = 0; key < 60; ++key) {
        for (int first = 0; first < every; ++first) {
          const KvPartition partition{first, every};
          std::int64_t& token = next[static_cast<std::size_t>(first)];
          ASSERT_EQ(keys_of_partition(partition, group, key), token);
          ASSERT_EQ(holds_key(partition, group, key), key / group % every == first);
          if (holds_key(partition, group, key)) {
            ASSERT_EQ(token_of_key(partition, group, key), token++);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
