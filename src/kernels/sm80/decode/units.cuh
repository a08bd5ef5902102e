// SPDX-License-Identifier: Apache-2.0
// How a step is cut into units. A unit is one group of key tiles of one sequence, for query rows of one KV head, up to
// 64, or 32 where O is cut into slices, all of one query tile: so they all fold the same key tiles. Lengths are known
// on the device alone, so every CTA counts the units of each sequence for itself; unit n is folded by CTA n modulo
// their number.
#pragma once

#include "kernels/decode.hpp"
#include "kernels/decode_lists.hpp"
#include "kernels/merge.hpp"
#include "kernels/sm80/decode/decode_params.hpp"

namespace ringattn::sm80 {

// Rows of a sequence that stand in one query tile, and what of the share they fold.
struct DecodePart {
  int row, rows;          // of the sequence's rows
  std::int64_t position;  // of the first of them
  int first, last;        // key tiles [first, last) of the sequence
  int first_group;        // of the share
  int groups;             // of the share; one, of no tiles, where no tile is folded and rows end with this launch
};

// Query tiles are larger than a step has rows, so rows stand in two of them at most: parts 0 and 1.
template <class C>
__device__ __forceinline__ DecodePart part_of(const DecodeParams& p, int length, int part) {
  static_assert(C::kPrefillTile >= kMostDecodeRows);
  const std::int64_t position = std::int64_t{length} - p.rows;
  const int behind = static_cast<int>(query_tile_begin(position, C::kPrefillTile) + C::kPrefillTile - position);
  const int of_first = behind < p.rows ? behind : p.rows;
  DecodePart result{};
  result.row = part == 0 ? 0 : of_first;
  result.rows = part == 0 ? of_first : p.rows - of_first;
  result.position = position + result.row;
  if (result.rows == 0) return result;
  const TileRange tiles =
      Visibility(p.fold.mask, length).tiles(result.position, TileSizes{C::kPrefillTile, C::kKeyTile});
  if (tiles.empty()) {
    result.groups = p.finish ? 1 : 0;
    return result;
  }
  result.first = static_cast<int>(tiles.begin);
  result.last = static_cast<int>(tiles.end);
  const int group = result.first / kGroupTiles;
  const int last_group = (result.last - 1) / kGroupTiles;
  const int ahead = (p.share_first - group % p.every + p.every) % p.every;  // groups until the share's next one
  result.first_group = group + ahead;
  result.groups = result.first_group <= last_group ? (last_group - result.first_group) / p.every + 1 : 0;
  return result;
}

// Blocks of rows of a part and KV head.
template <class C>
__device__ __forceinline__ int blocks_of(const DecodeParams& p, const DecodePart& part) {
  return (part.rows * p.ratio + C::kQueryTile - 1) / C::kQueryTile;
}
template <class C>
__device__ __forceinline__ int units_of(const DecodeParams& p, const DecodePart& part) {
  return part.groups * p.list_kv_heads * blocks_of<C>(p, part);
}

// The keys that the rows of the `list`-th of all lists see, and without lists those of the `list`-th sequence: what is
// not listed is as if it were not there.
__device__ __forceinline__ KeysByList keys_of(const DecodeParams& p, int list) {
  if (p.list_blocks == nullptr) return {0, 0, __ldg(p.lengths + list)};
  const std::int32_t* const blocks = p.list_blocks + list * p.list_stride;
  return keys_by_list(__ldg(p.lengths + list / p.lists), p.rows, p.list_keys, __ldg(p.list_counts + list),
                      [blocks](int i) { return __ldg(blocks + i); });
}

// In shared memory. Slots are the rows of the products.
struct DecodeUnit {
  int sequence, length;
  std::int64_t position;  // of the first row of its part
  std::int64_t row;       // the same row in q
  int kv_head;
  int first;             // slot 0's number among the part's rows · ratio; row i of query head h has i · ratio + h
  int slots;             // that hold rows; 0: there is no such unit
  int begin, end;        // key tiles that it folds: a group's, as far as its rows fold them
  int whole, whole_end;  // of those, the tiles of which every row sees every key
  int cache_offset;      // from a key's place in its sequence to its place in the cache
  int first_page;        // of the pieces of keys that lie in one page each, the one that the unit begins with
  int list;              // of all sequences' lists
  int listed, gap;       // KeysByList of it
  int record;            // number of its group among the row's records
  int first_record;      // the same for the part's first group
  int groups;            // of the part
  int arrived;           // index of the part's counter

  __device__ __forceinline__ int pages(const DecodeParams& p, int key_tile) const {
    const int keys = end * key_tile < length ? end * key_tile : length;
    return ((keys - 1 + cache_offset) >> p.piece_log) - first_page + 1;
  }
};

// Where a slot's row lies in q and out, and its query head.
struct DecodeRow {
  std::int64_t row;
  int head;
};
__device__ __forceinline__ DecodeRow row_of(const DecodeParams& p, const DecodeUnit& unit, int slot) {
  const int number = unit.first + slot;
  const int i = number / p.ratio;
  return {unit.row + i, unit.kv_head * p.ratio + (number - i * p.ratio)};
}

// See TileStep.
struct DecodeRows {
  const DecodeUnit& unit;
  int ratio;

  __device__ __forceinline__ auto positions(int slot, std::int64_t first_key) const {
    return [this, slot, first_key](int behind) {
      return unit.position - first_key + (unit.first + slot + behind) / ratio;
    };
  }
  __device__ std::int64_t key_length() const { return unit.length; }
};

// Asked for units in ascending order, by all threads of one warp.
template <class C>
class UnitFinder {
 public:
  __device__ explicit UnitFinder(const DecodeParams& p) : p_(p) {}

  // Writes unit `number`.
  __device__ __forceinline__ void find(int number, DecodeUnit& unit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (; sequence_ < p_.sequences; sequence_ += 32) {
      const int s = sequence_ + lane;
      const KeysByList keys = s < p_.sequences ? keys_of(p_, s) : KeysByList{};
      const int length = keys.keys;
      int count = 0;
      if (s < p_.sequences)
        count = units_of<C>(p_, part_of<C>(p_, length, 0)) + units_of<C>(p_, part_of<C>(p_, length, 1));
      int sum = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffU, sum, step);
        if (lane >= step) sum += other;
      }
      const int nth = number - before_;
      if (nth >= sum - count && nth < sum) write(s, keys, nth - (sum - count), unit);
      const int all = __shfl_sync(0xffffffffU, sum, 31);
      if (nth < all) return;
      before_ += all;
    }
    if (lane == 0) unit.slots = 0;
  }

 private:
  // The nth unit of a list.
  __device__ void write(int list, const KeysByList& keys, int nth, DecodeUnit& unit) const {
    const int length = keys.keys;
    const int sequence = p_.list_blocks == nullptr ? list : list / p_.lists;
    DecodePart part = part_of<C>(p_, length, 0);
    const int of_first = units_of<C>(p_, part);
    const int blocks_before = nth < of_first ? 0 : blocks_of<C>(p_, part);
    if (nth >= of_first) {
      nth -= of_first;
      part = part_of<C>(p_, length, 1);
    }
    const int blocks = blocks_of<C>(p_, part);
    const int each = p_.list_kv_heads * blocks;
    const int group = part.first_group + nth / each * p_.every;
    const int rest = nth % each;
    const int block = rest % blocks;
    const int begin = group * kGroupTiles;
    unit.sequence = sequence;
    unit.length = length;
    unit.position = part.position;
    unit.row = std::int64_t{sequence} * p_.rows + part.row;
    unit.kv_head = rest / blocks + list * p_.list_kv_heads - sequence * p_.fold.kv_heads;
    unit.list = list;
    unit.listed = keys.listed;
    unit.gap = keys.gap();
    unit.first = block * C::kQueryTile;
    const int left = part.rows * p_.ratio - unit.first;
    unit.slots = left < C::kQueryTile ? left : C::kQueryTile;
    unit.begin = begin > part.first ? begin : part.first;
    unit.end = begin + kGroupTiles < part.last ? begin + kGroupTiles : part.last;
    unit.record = group / p_.every;
    unit.first_record = part.first_group / p_.every;
    unit.cache_offset = (unit.record - group) * kGroupTiles * C::kKeyTile;
    unit.first_page = (unit.begin * C::kKeyTile + unit.cache_offset) >> p_.piece_log;
    unit.groups = part.groups;
    unit.arrived = (sequence * p_.fold.kv_heads + unit.kv_head) * p_.blocks + blocks_before + block;
    const std::int64_t last = unit.position + (unit.first + unit.slots - 1) / p_.ratio;
    const KeyRange common = Visibility(p_.fold.mask, length).common_keys(unit.position + unit.first / p_.ratio, last);
    // Where there is no such key, no tile lies between these.
    unit.whole = static_cast<int>(quotient(common.begin + C::kKeyTile - 1, C::kKeyTile));
    unit.whole_end = static_cast<int>(quotient(common.end, C::kKeyTile));
  }

  const DecodeParams& p_;
  int sequence_ = 0;  // a multiple of 32: the unit asked for last was not of a sequence before it
  int before_ = 0;    // units of sequences before it
};

}  // namespace ringattn::sm80
