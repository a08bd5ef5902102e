// SPDX-License-Identifier: Apache-2.0
// Spike: does a fold on a GPU keep the house's promise? Folds the same ragged causal job in many shapes and compares
// bits.
#include <chrono>
#include <cmath>
#include <random>
#include <string>

#include "cuda_fold.hpp"
#include "synthetic.cuh"

using namespace ringattn;
using Clock = std::chrono::steady_clock;

namespace {

template <class T>
T* device_array(std::size_t n, int poison = 0xff) {
  T* p = nullptr;
  CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
  CUDA_CHECK(cudaMemset(p, poison, n * sizeof(T)));
  return p;
}

// Attention by its definition in fp64; one block of one warp a sampled (row, head).
__global__ void reference(const std::uint16_t* q, const std::uint16_t* k, const std::uint16_t* v, int heads,
                          int kv_heads, int dim, const std::int64_t* sample_q, const std::int64_t* key_begin,
                          const std::int64_t* key_end, float scale, double* out, double* lse) {
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = sample_q[blockIdx.x];
  const auto bf = [](std::uint16_t b) { return static_cast<double>(__uint_as_float(std::uint32_t{b} << 16)); };
  double m = -INFINITY, l = 0, o[8] = {};
  const int per = dim / 32;
  for (std::int64_t key = key_begin[blockIdx.x]; key < key_end[blockIdx.x]; ++key) {
    double dot = 0;
    for (int i = 0; i < per; ++i)
      dot += bf(q[(row * heads + head) * dim + lane * per + i]) *
             bf(k[(key * kv_heads + head / (heads / kv_heads)) * dim + lane * per + i]);
    for (int x = 16; x > 0; x /= 2) dot += __shfl_xor_sync(~0U, dot, x);
    dot *= static_cast<double>(scale);
    const double m2 = fmax(m, dot), f = exp(m - m2), e = exp(dot - m2);
    m = m2;
    l = l * f + e;
    for (int i = 0; i < per; ++i)
      o[i] = o[i] * f + e * bf(v[(key * kv_heads + head / (heads / kv_heads)) * dim + lane * per + i]);
  }
  for (int i = 0; i < per; ++i)
    out[(std::int64_t{blockIdx.x} * heads + head) * dim + lane * per + i] = l > 0 ? o[i] / l : 0;
  if (lane == 0) lse[std::int64_t{blockIdx.x} * heads + head] = l > 0 ? m + log(l) : -INFINITY;
}

struct Shape {
  const char* name;
  int block_tiles;  // 0: everything in one task
  bool random_blocks;
  bool scatter;         // tiles at random places of two sources, everything else NaN
  int chunk;            // rows of a query run; 0: whole sequences
  bool shuffle_rows;    // runs at random places of q
  int skip_runs;        // 1: every second run belongs to somebody else
  bool identity_state;  // resume the first task from a written identity
  bool streams;         // blocks arrive by copies on a second stream, two buffers
};

struct Job {
  FoldSpec spec;
  std::vector<std::int64_t> q_lengths, k_lengths, q_offsets, q_begin, k_begin;
  std::int64_t q_rows = 0, k_rows = 0;
  std::uint16_t *q = nullptr, *k = nullptr, *v = nullptr;  // device, packed
};

template <class C>
struct Result {
  std::vector<std::uint16_t> out;  // packed order; rows that were skipped hold 0xffff
  std::vector<float> lse;
  double host_us = 0;
  int tasks = 0, grown = 0;
};

template <class C>
Result<C> run(const Job& job, const Shape& shape, unsigned seed) {
  std::mt19937 rng(seed);
  const int heads = job.spec.heads, kv_heads = job.spec.kv_heads, dim = C::kHeadDim;
  const std::int64_t token = std::int64_t{kv_heads} * dim, q_token = std::int64_t{heads} * dim;
  // Query runs and their place.
  struct Chunk {
    int sequence;
    std::int64_t begin, rows, packed, row;
  };
  std::vector<Chunk> chunks;
  for (std::size_t s = 0; s < job.q_lengths.size(); ++s) {
    for (std::int64_t b = 0; b < job.q_lengths[s];) {
      const std::int64_t n =
          std::min(job.q_lengths[s] - b, shape.chunk > 0 ? std::int64_t{shape.chunk} : job.q_lengths[s]);
      if (shape.skip_runs == 0 || rng() % 2 == 0) chunks.push_back({static_cast<int>(s), b, n, job.q_begin[s] + b, 0});
      b += n;
    }
  }
  std::vector<std::size_t> place(chunks.size());
  for (std::size_t i = 0; i < place.size(); ++i) place[i] = i;
  if (shape.shuffle_rows) std::shuffle(place.begin(), place.end(), rng);
  std::int64_t rows = 0;
  for (const std::size_t i : place) {
    chunks[i].row = rows;
    rows += chunks[i].rows;
  }
  auto* q = device_array<std::uint16_t>(static_cast<std::size_t>(rows * q_token + 1));
  auto* out = device_array<std::uint16_t>(static_cast<std::size_t>(rows * q_token + 1));
  auto* lse = device_array<float>(static_cast<std::size_t>(rows * heads + 1));
  std::vector<QueryRun> queries;
  for (const Chunk& c : chunks) {
    CUDA_CHECK(cudaMemcpy(q + c.row * q_token, job.q + c.packed * q_token,
                          static_cast<std::size_t>(c.rows * q_token * 2), cudaMemcpyDeviceToDevice));
    queries.push_back({c.sequence, job.q_offsets[static_cast<std::size_t>(c.sequence)] + c.begin, c.row, c.rows});
  }
  // All tiles in packed order, cut into blocks.
  struct TileOf {
    int sequence;
    std::int64_t tile, packed, rows;
  };
  std::vector<TileOf> tiles;
  for (std::size_t s = 0; s < job.k_lengths.size(); ++s)
    for (std::int64_t t = 0; t * C::kKeyTile < job.k_lengths[s]; ++t)
      tiles.push_back({static_cast<int>(s), t, job.k_begin[s] + t * C::kKeyTile,
                       std::min<std::int64_t>(C::kKeyTile, job.k_lengths[s] - t * C::kKeyTile)});
  std::vector<std::size_t> cuts{0};
  while (cuts.back() < tiles.size()) {
    std::size_t n =
        shape.block_tiles == 0
            ? tiles.size()
            : static_cast<std::size_t>(shape.random_blocks
                                           ? 1 + static_cast<int>(rng() % static_cast<unsigned>(shape.block_tiles))
                                           : shape.block_tiles);
    cuts.push_back(std::min(tiles.size(), cuts.back() + n));
  }
  const std::size_t blocks = cuts.size() - 1;
  std::size_t most = 0;
  for (std::size_t b = 0; b < blocks; ++b) most = std::max(most, cuts[b + 1] - cuts[b]);
  // Sources: 0 the own shard (scattered tiles), 1 and 2 the block buffers.
  const std::int64_t slots = static_cast<std::int64_t>(tiles.size());
  std::uint16_t *own_k = nullptr, *own_v = nullptr, *buffer_k[2] = {}, *buffer_v[2] = {};
  if (shape.scatter || shape.streams) {
    own_k = device_array<std::uint16_t>(static_cast<std::size_t>(slots * C::kKeyTile * token));
    own_v = device_array<std::uint16_t>(static_cast<std::size_t>(slots * C::kKeyTile * token));
    for (int i = 0; i < 2; ++i) {
      buffer_k[i] = device_array<std::uint16_t>(most * static_cast<std::size_t>(C::kKeyTile * token));
      buffer_v[i] = device_array<std::uint16_t>(most * static_cast<std::size_t>(C::kKeyTile * token));
    }
  }
  std::vector<std::int64_t> own_slot(tiles.size());
  for (std::size_t i = 0; i < tiles.size(); ++i) own_slot[i] = static_cast<std::int64_t>(i);
  std::shuffle(own_slot.begin(), own_slot.end(), rng);
  std::vector<bool> mine(tiles.size());
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    mine[i] = (shape.scatter || shape.streams) && rng() % 3 == 0;
    if (mine[i]) {
      const auto n = static_cast<std::size_t>(tiles[i].rows * token * 2);
      CUDA_CHECK(cudaMemcpy(own_k + own_slot[i] * C::kKeyTile * token, job.k + tiles[i].packed * token, n,
                            cudaMemcpyDeviceToDevice));
      CUDA_CHECK(cudaMemcpy(own_v + own_slot[i] * C::kKeyTile * token, job.v + tiles[i].packed * token, n,
                            cudaMemcpyDeviceToDevice));
    }
  }
  CudaFold<C> kernel(job.spec);
  auto* state = device_array<std::byte>(kernel.state_bytes(rows) + 16);
  if (shape.identity_state) {
    std::vector<float> identity(kernel.state_bytes(rows) / 4, 0.0F);
    for (std::int64_t i = 0; i < rows * heads; ++i)
      identity[static_cast<std::size_t>(rows * heads * dim + i * 8 + 4)] = -INFINITY;
    CUDA_CHECK(cudaMemcpy(state, identity.data(), identity.size() * 4, cudaMemcpyHostToDevice));
  }
  cudaStream_t compute, transfer;
  CUDA_CHECK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamCreateWithFlags(&transfer, cudaStreamNonBlocking));
  std::vector<cudaEvent_t> arrived(blocks), folded(blocks);
  for (std::size_t b = 0; b < blocks; ++b) {
    CUDA_CHECK(cudaEventCreateWithFlags(&arrived[b], cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&folded[b], cudaEventDisableTiming));
  }
  CUDA_CHECK(cudaDeviceSynchronize());

  Result<C> result;
  const bool buffers = shape.scatter || shape.streams;
  std::vector<std::vector<KeyTile>> maps(blocks);
  std::vector<std::vector<KeyRun>> runs(blocks);
  const auto post = [&](std::size_t b) {  // the "exchange": parts of the block come into buffer b % 2
    if (b >= 2) CUDA_CHECK(cudaStreamWaitEvent(transfer, folded[b - 2]));
    std::vector<std::size_t> order;
    for (std::size_t i = cuts[b]; i < cuts[b + 1]; ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), rng);
    maps[b].resize(order.size());
    std::int64_t at = 0;
    for (const std::size_t i : order) {
      KeyTile& tile = maps[b][i - cuts[b]];
      if (mine[i]) {
        tile = {0, own_slot[i] * C::kKeyTile};
        continue;
      }
      tile = {static_cast<std::int32_t>(1 + b % 2), at};
      const auto n = static_cast<std::size_t>(tiles[i].rows * token * 2);
      CUDA_CHECK(cudaMemcpyAsync(buffer_k[b % 2] + at * token, job.k + tiles[i].packed * token, n,
                                 cudaMemcpyDeviceToDevice, transfer));
      CUDA_CHECK(cudaMemcpyAsync(buffer_v[b % 2] + at * token, job.v + tiles[i].packed * token, n,
                                 cudaMemcpyDeviceToDevice, transfer));
      at += tiles[i].rows;
    }
    CUDA_CHECK(cudaEventRecord(arrived[b], transfer));
  };
  for (std::size_t b = 0; b < blocks; ++b) {
    if (!buffers)
      for (std::size_t i = cuts[b]; i < cuts[b + 1]; ++i) maps[b].push_back({0, tiles[i].packed});
    for (std::size_t i = cuts[b]; i < cuts[b + 1]; ++i) {
      if (runs[b].empty() || runs[b].back().sequence != tiles[i].sequence)
        runs[b].push_back({tiles[i].sequence, tiles[i].tile, 0, static_cast<std::int64_t>(i - cuts[b])});
      ++runs[b].back().tiles;
    }
  }
  const auto view = [&](const std::uint16_t* p, std::int64_t n) {
    return dense_view(p, Dtype::kBf16, n, kv_heads, dim);
  };
  std::vector<KeySource> sources;
  if (buffers) {
    sources.push_back({view(own_k, slots * C::kKeyTile), view(own_v, slots * C::kKeyTile)});
    for (int i = 0; i < 2; ++i)
      sources.push_back({view(buffer_k[i], static_cast<std::int64_t>(most) * C::kKeyTile),
                         view(buffer_v[i], static_cast<std::int64_t>(most) * C::kKeyTile)});
  } else {
    sources.push_back({view(job.k, job.k_rows), view(job.v, job.k_rows)});
  }
  FoldOutput finish{dense_view(out, Dtype::kBf16, rows, heads, dim), RowView{lse, heads, 1}, nullptr};
  if (buffers) post(0);
  double host = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    if (buffers) {
      if (b + 1 < blocks) post(b + 1);
      CUDA_CHECK(cudaStreamWaitEvent(compute, arrived[b]));
    }
    FoldTask task;
    task.q = dense_view(q, Dtype::kBf16, rows, heads, dim);
    task.queries = queries;
    task.key_lengths = job.k_lengths;
    task.key_runs = runs[b];
    task.tiles = maps[b];
    task.sources = sources;
    task.state = state;
    task.resume = b > 0 || shape.identity_state;
    task.save = b + 1 < blocks;
    task.finish = b + 1 == blocks ? &finish : nullptr;
    const auto start = Clock::now();
    kernel.fold(task, Stream{compute});
    host += std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    CUDA_CHECK(cudaEventRecord(folded[b], compute));
    if (!shape.streams) CUDA_CHECK(cudaStreamSynchronize(compute));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  result.host_us = host / static_cast<double>(blocks);
  result.tasks = static_cast<int>(blocks);
  result.grown = kernel.grown();
  std::vector<std::uint16_t> rows_out(static_cast<std::size_t>(rows * q_token));
  std::vector<float> rows_lse(static_cast<std::size_t>(rows * heads));
  CUDA_CHECK(cudaMemcpy(rows_out.data(), out, rows_out.size() * 2, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(rows_lse.data(), lse, rows_lse.size() * 4, cudaMemcpyDeviceToHost));
  result.out.assign(static_cast<std::size_t>(job.q_rows * q_token), 0xffff);
  result.lse.assign(static_cast<std::size_t>(job.q_rows * heads), NAN);
  for (const Chunk& c : chunks) {
    std::memcpy(&result.out[static_cast<std::size_t>(c.packed * q_token)],
                &rows_out[static_cast<std::size_t>(c.row * q_token)], static_cast<std::size_t>(c.rows * q_token * 2));
    std::memcpy(&result.lse[static_cast<std::size_t>(c.packed * heads)],
                &rows_lse[static_cast<std::size_t>(c.row * heads)], static_cast<std::size_t>(c.rows * heads * 4));
  }
  for (void* p : {static_cast<void*>(q), static_cast<void*>(out), static_cast<void*>(lse), static_cast<void*>(state),
                  static_cast<void*>(own_k), static_cast<void*>(own_v), static_cast<void*>(buffer_k[0]),
                  static_cast<void*>(buffer_k[1]), static_cast<void*>(buffer_v[0]), static_cast<void*>(buffer_v[1])})
    CUDA_CHECK(cudaFree(p));
  return result;
}

// Rows whose bits differ; rows that `b` skipped don't count.
std::pair<std::int64_t, std::int64_t> differing(const std::vector<std::uint16_t>& a_out,
                                                const std::vector<float>& a_lse,
                                                const std::vector<std::uint16_t>& b_out,
                                                const std::vector<float>& b_lse, int heads, int dim) {
  std::int64_t bad = 0, compared = 0;
  for (std::size_t r = 0; r < a_lse.size(); ++r) {
    if (std::isnan(b_lse[r])) continue;
    ++compared;
    if (std::memcmp(&a_lse[r], &b_lse[r], 4) != 0 ||
        std::memcmp(&a_out[r * static_cast<std::size_t>(dim)], &b_out[r * static_cast<std::size_t>(dim)],
                    static_cast<std::size_t>(dim) * 2) != 0)
      ++bad;
  }
  (void)heads;
  return {bad, compared};
}

const Shape kShapes[] = {
    {"one task again", 0, false, false, 0, false, 0, false, false},
    {"every tile its own task", 1, false, false, 0, false, 0, false, false},
    {"random blocks of 1-7 tiles", 7, true, false, 0, false, 0, false, false},
    {"blocks of 16, scattered tiles, two sources, NaN between", 16, false, true, 0, false, 0, false, false},
    {"query runs of 100 rows", 0, false, false, 100, false, 0, false, false},
    {"query runs of 37 rows, shuffled, half missing, random blocks", 9, true, true, 37, true, 1, false, false},
    {"query runs of 256 rows, shuffled, half missing", 5, true, true, 256, true, 1, false, false},
    {"first task resumes a written identity", 4, false, false, 0, false, 0, true, false},
    {"two streams, double buffer, no host waits", 3, true, true, 128, true, 0, false, true},
    {"two streams, big blocks", 20, true, true, 256, true, 0, false, true},
};

template <class C>
Result<C> check(const Job& job, const char* name) {
  const Shape base{"base", 0, false, false, 0, false, 0, false, false};
  auto expected = run<C>(job, base, 1);
  // Accuracy on sampled rows.
  std::vector<std::int64_t> rows, begins, ends;
  for (std::size_t s = 0; s < job.q_lengths.size(); ++s)
    for (int i = 0; i < 12; ++i) {
      const std::int64_t r = i * (job.q_lengths[s] - 1) / 11;
      const KeyRange keys = visible_keys(job.spec.mask, job.q_offsets[s] + r, job.k_lengths[s]);
      rows.push_back(job.q_begin[s] + r);
      begins.push_back(job.k_begin[s] + keys.begin);
      ends.push_back(job.k_begin[s] + std::max(keys.begin, keys.end));
    }
  const int heads = job.spec.heads, dim = C::kHeadDim;
  std::int64_t* tables = device_array<std::int64_t>(rows.size() * 3);
  CUDA_CHECK(cudaMemcpy(tables, rows.data(), rows.size() * 8, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(tables + rows.size(), begins.data(), rows.size() * 8, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(tables + 2 * rows.size(), ends.data(), rows.size() * 8, cudaMemcpyHostToDevice));
  auto* out = device_array<double>(rows.size() * static_cast<std::size_t>(heads * dim));
  auto* lse = device_array<double>(rows.size() * static_cast<std::size_t>(heads));
  reference<<<dim3(static_cast<unsigned>(rows.size()), static_cast<unsigned>(heads)), 32>>>(
      job.q, job.k, job.v, heads, job.spec.kv_heads, dim, tables, tables + rows.size(), tables + 2 * rows.size(),
      job.spec.softmax_scale, out, lse);
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<double> ref(rows.size() * static_cast<std::size_t>(heads * dim)),
      ref_lse(rows.size() * static_cast<std::size_t>(heads));
  CUDA_CHECK(cudaMemcpy(ref.data(), out, ref.size() * 8, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(ref_lse.data(), lse, ref_lse.size() * 8, cudaMemcpyDeviceToHost));
  double worst = 0, worst_lse = 0, num = 0, den = 0;
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (int h = 0; h < heads; ++h) {
      const auto rh = static_cast<std::size_t>(rows[i] * heads + h);
      const double a = ref_lse[i * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)], b = expected.lse[rh];
      if (!(std::isinf(a) && std::isinf(b))) worst_lse = std::max(worst_lse, std::isnan(b) ? 1e9 : std::abs(a - b));
      for (int d = 0; d < dim; ++d) {
        const double x =
            ref[(i * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)) * static_cast<std::size_t>(dim) +
                static_cast<std::size_t>(d)];
        const std::uint32_t bits =
            std::uint32_t{expected.out[rh * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)]} << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        worst = std::max(worst, std::isnan(y) ? 1e9 : std::abs(x - static_cast<double>(y)));
        num += (x - static_cast<double>(y)) * (x - static_cast<double>(y));
        den += x * x;
      }
    }
  std::printf("%-34s query_tile %3d key_tile %3d: max |O - ref| %.2e, rel %.2e, max |LSE - ref| %.2e\n", name,
              C::kQueryTile, C::kKeyTile, worst, std::sqrt(num / den), worst_lse);
  unsigned seed = 7;
  for (const Shape& shape : kShapes) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      auto got = run<C>(job, shape, ++seed);
      const auto [bad, compared] = differing(expected.out, expected.lse, got.out, got.lse, heads, dim);
      if (repeat == 0 || bad != 0)
        std::printf("  %-62s %s: %lld of %lld rows differ, %d tasks, %.1f us host a task, ring grew %d\n", shape.name,
                    bad == 0 && compared > 0 ? "equal" : "DIFFERENT", static_cast<long long>(bad),
                    static_cast<long long>(compared), got.tasks, got.host_us, got.grown);
    }
  }
  return expected;
}

Job make_job(int heads, int kv_heads, Mask mask, const std::vector<std::int64_t>& q_lengths,
             const std::vector<std::int64_t>& k_lengths, float boost) {
  Job job;
  job.spec.heads = heads;
  job.spec.kv_heads = kv_heads;
  job.spec.mask = mask;
  job.spec.softmax_scale = boost / std::sqrt(128.0F);
  job.q_lengths = q_lengths;
  job.k_lengths = k_lengths;
  for (std::size_t s = 0; s < q_lengths.size(); ++s) {
    job.q_offsets.push_back(k_lengths[s] - q_lengths[s]);
    job.q_begin.push_back(job.q_rows);
    job.k_begin.push_back(job.k_rows);
    job.q_rows += q_lengths[s];
    job.k_rows += k_lengths[s];
  }
  job.q = device_array<std::uint16_t>(static_cast<std::size_t>(job.q_rows * heads * 128));
  job.k = device_array<std::uint16_t>(static_cast<std::size_t>(job.k_rows * kv_heads * 128));
  job.v = device_array<std::uint16_t>(static_cast<std::size_t>(job.k_rows * kv_heads * 128));
  synthetic_fill<<<512, 256>>>(job.q, job.q_rows, heads, 128, 42, 0, 0);
  synthetic_fill<<<512, 256>>>(job.k, job.k_rows, kv_heads, 128, 42, 1, 0);
  synthetic_fill<<<512, 256>>>(job.v, job.k_rows, kv_heads, 128, 42, 2, 0);
  CUDA_CHECK(cudaDeviceSynchronize());
  return job;
}

void check_generator() {
  const std::int64_t tokens = 3000, first = (std::int64_t{1} << 33) + 12345;
  auto* data = device_array<std::uint16_t>(static_cast<std::size_t>(tokens * 8 * 128));
  synthetic_fill<<<512, 256>>>(data, tokens, 8, 128, 0x123456789abcdefULL, 2, first);
  std::vector<std::uint16_t> got(static_cast<std::size_t>(tokens * 8 * 128));
  CUDA_CHECK(cudaMemcpy(got.data(), data, got.size() * 2, cudaMemcpyDeviceToHost));
  std::int64_t bad = 0;
  for (std::int64_t t = 0; t < tokens; ++t)
    for (int h = 0; h < 8; ++h)
      for (int d = 0; d < 128; ++d)
        bad += got[static_cast<std::size_t>((t * 8 + h) * 128 + d)] !=
               bf16_bits(synthetic_value(0x123456789abcdefULL, 2, first + t, h, d));
  std::printf("generator: %lld of %zu elements differ between device and host\n", static_cast<long long>(bad),
              got.size());
}

#ifndef SPIKE_VARIANT
using A = sm80::Config<128, 64, 4, 2, 2, 2, false, 2, true, true>;  // 128 × 64
using B = sm80::Config<128, 128, 8, 1, 2, 1>;                       // 128 × 128
using D = sm80::Config<128, 64, 4, 1, 2, 2>;                        // 64 × 64
using E = sm80::Config<128, 128, 4, 1, 2, 1>;                       // 64 × 128
using F = sm80::Config<128, 64, 8, 1, 2, 1>;                        // 128 × 64 with 8 warps
using H = sm90::Config<2, true, 2>;
using H1 = sm90::Config<2, true, 1>;
using H2 = sm90::Config<2, false, 2, false, false, 3, false>;
using G = sm80::Config<128, 64, 4, 2, 2, 2, true>;  // 128 × 64, in place
#endif

}  // namespace

template <class C>
Result<C> check_all(const char* what) {
  const std::vector<std::int64_t> lengths{1, 127, 128, 129, 1000, 64, 2311};
  const auto name = [&](const char* job) { return std::string(what) + ", " + job; };
  auto ragged = check<C>(make_job(8, 2, Mask{-1, 0}, lengths, lengths, 1.0F), name("causal ragged").c_str());
  check<C>(make_job(8, 2, Mask{-1, 0}, {100, 700, 1, 300}, {1000, 700, 2000, 100}, 1.0F),
           name("causal, offsets, no keys for some").c_str());
  check<C>(make_job(4, 1, Mask{-1, -1}, {100, 700, 1, 300}, {1000, 777, 2000, 100}, 1.0F), name("full").c_str());
  check<C>(make_job(4, 4, Mask{200, 0}, {100, 1700, 1, 300}, {1000, 1700, 2000, 300}, 1.0F),
           name("window 200,0").c_str());
  check<C>(make_job(4, 1, Mask{-1, 0}, {300, 5000}, {300, 20011}, 1.0F), name("causal, long").c_str());
  check<C>(make_job(4, 4, Mask{-1, 0}, {1700, 300}, {1700, 300}, 3000.0F), name("causal, logits of 1e4").c_str());
  return ragged;
}

#ifdef SPIKE_VARIANT
int main() {
  check_all<SPIKE_VARIANT>("variant");
  return 0;
}
#else
int main() {
  check_generator();
  const std::vector<std::int64_t> lengths{1, 127, 128, 129, 1000, 64, 2311};
  const Job causal = make_job(8, 2, Mask{-1, 0}, lengths, lengths, 1.0F);
  const auto a = check<A>(causal, "causal ragged, 4 warps x 32 rows");
  const auto f = check<F>(causal, "causal ragged, 8 warps x 16 rows");
  const auto d = check<D>(causal, "causal ragged, 4 warps x 16 rows");
  const auto b = check<B>(causal, "causal ragged, 8 warps x 16 rows");
  const auto e = check<E>(causal, "causal ragged, 4 warps x 16 rows");
  const auto g = check<G>(causal, "causal ragged, PV in place");
  const auto say = [&](const char* what, const auto& x, const auto& y) {
    const auto [bad, n] = differing(x.out, x.lse, y.out, y.lse, 8, 128);
    std::printf("%s: %lld of %lld rows differ\n", what, static_cast<long long>(bad), static_cast<long long>(n));
  };
  say("key_tile 64: 4 x 32 rows against 8 x 16 rows", a, f);
  say("key_tile 64: query_tile 128 against 64", a, d);
  say("key_tile 128: query_tile 128 against 64", b, e);
  say("PV two levels against in place", a, g);
  check_all<A>("sm80");
  const auto h = check_all<H>("sm90");
  const auto h1 = check_all<H1>("sm90 1 piece");
  std::fflush(stdout);
  const auto h2 = check_all<H2>("sm90 3 groups");
  say("sm90, key_tile 128: two pieces against one", h, h1);
  say("sm90, key_tile 128: overlapped, 128 rows against plain, 192 rows", h, h2);
  say("key_tile 128: sm90 against sm80", h, b);
  return 0;
}
#endif
