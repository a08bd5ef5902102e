// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/sink_gradient.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

namespace ringattn {

namespace {

// Consecutive queries of one tile, and their terms: those of each query, or their sum if they are the whole tile.
struct TilePart {
  std::int64_t sequence = 0;
  std::int64_t tile = 0;   // of kBackwardTile positions, from position 0; may be negative
  std::int64_t first = 0;  // position of its first query
  std::int64_t rows = 0;   // of terms that follow

  auto order() const { return std::tie(sequence, tile, first); }
};

void add(std::span<const float> terms, std::span<float> sum) {
  for (std::size_t h = 0; h < sum.size(); ++h) sum[h] += terms[h];
}

// The sum of [rows, heads] terms, rows ascending; the first row is stored.
std::vector<float> sum_rows(std::span<const float> terms, std::size_t heads) {
  std::vector<float> sum(terms.begin(), terms.begin() + static_cast<std::ptrdiff_t>(heads));
  for (std::size_t row = 1; row * heads < terms.size(); ++row) add(terms.subspan(row * heads, heads), sum);
  return sum;
}

void append(std::string& text, const TilePart& part, std::span<const float> terms) {
  text.append(reinterpret_cast<const char*>(&part), sizeof part);
  text.append(reinterpret_cast<const char*>(terms.data()), terms.size_bytes());
}

// The parts of one rank's queries, as other ranks read them.
std::string parts_of(std::span<const BackwardSequence> sequences, std::span<const QueryRun> queries,
                     std::span<const float> terms, std::size_t heads) {
  std::string text;
  for (const QueryRun& run : queries) {
    const BackwardSequence& sequence = sequences[static_cast<std::size_t>(run.sequence)];
    const std::int64_t end = run.position + run.rows;
    for (std::int64_t position = run.position; position < end;) {
      const std::int64_t tile = floor_quotient(position, kBackwardTile);
      const std::int64_t tile_end = std::min((tile + 1) * kBackwardTile, sequence.q_offset + sequence.q_len);
      const std::int64_t rows = std::min(end, tile_end) - position;
      const bool whole = position == std::max(tile * kBackwardTile, sequence.q_offset) && position + rows == tile_end;
      const std::span<const float> own = terms.subspan(
          static_cast<std::size_t>(run.row + position - run.position) * heads, static_cast<std::size_t>(rows) * heads);
      if (whole) {
        append(text, {run.sequence, tile, position, 1}, sum_rows(own, heads));
      } else {
        append(text, {run.sequence, tile, position, rows}, own);
      }
      position += rows;
    }
  }
  return text;
}

}  // namespace

std::vector<float> sum_sink_terms(const Collective& collective, std::span<const BackwardSequence> sequences,
                                  std::span<const QueryRun> queries, std::span<const float> terms, int heads) {
  const auto width = static_cast<std::size_t>(heads);
  struct Received {
    TilePart part;
    std::vector<float> terms;
  };
  std::vector<Received> all;
  for (const std::string& text : collective.gather(parts_of(sequences, queries, terms, width))) {
    for (std::size_t at = 0; at < text.size();) {
      Received received{gathered_value<TilePart>(text, at), {}};
      at += sizeof(TilePart);
      received.terms.resize(static_cast<std::size_t>(received.part.rows) * width);
      std::memcpy(received.terms.data(), text.data() + at, received.terms.size() * sizeof(float));
      at += received.terms.size() * sizeof(float);
      all.push_back(std::move(received));
    }
  }
  std::ranges::sort(all, [](const Received& a, const Received& b) { return a.part.order() < b.part.order(); });

  std::vector<float> total(width, 0.0F);
  std::vector<float> of_sequence;
  for (std::size_t begin = 0; begin < all.size();) {
    std::vector<float> tile;
    std::size_t end = begin;
    const TilePart& part = all[begin].part;
    for (;
         end < all.size() && std::tie(all[end].part.sequence, all[end].part.tile) == std::tie(part.sequence, part.tile);
         ++end) {
      tile.insert(tile.end(), all[end].terms.begin(), all[end].terms.end());
    }
    const std::vector<float> of_tile = sum_rows(tile, width);
    if (of_sequence.empty()) {
      of_sequence = of_tile;
    } else {
      add(of_tile, of_sequence);
    }
    if (end == all.size() || all[end].part.sequence != part.sequence) {
      add(of_sequence, total);
      of_sequence.clear();
    }
    begin = end;
  }
  return total;
}

}  // namespace ringattn
