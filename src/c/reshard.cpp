// SPDX-License-Identifier: Apache-2.0
#include "ops/reshard/reshard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/layout.hpp"
#include "base/error.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "c/world.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::c {

struct ReshardCall {
  const std::byte* rows = nullptr;
  std::byte* target = nullptr;
};

// A Reshard with its backend, which the other ops make for themselves.
class ReshardForC {
 public:
  ReshardForC(const Layout& from, const Layout& to, std::int64_t token_bytes, Transport& transport,
              double timeout_seconds)
      : token_bytes_(token_bytes), from_rows_(from.tokens(transport.rank())), to_rows_(to.tokens(transport.rank())) {
    const std::span<const KernelEntry> kernels = copy_kernels();
    const auto found = std::ranges::find(kernels, backend_of(transport), &KernelEntry::backend);
    if (found == kernels.end()) {
      fail(ErrorCode::kUnsupported, fmt::format("this build has no backend {}", backend_of(transport)),
           "the world's memory is that of a device", "Use a build with CUDA, or a world in host memory.");
    }
    kernel_ = found->name.data();  // a literal
    backend_ = found->make_backend({1, transport.device()});
    reshard_.emplace(from, to, token_bytes, transport, *backend_, timeout_seconds);
  }

  std::int64_t token_bytes() const { return token_bytes_; }
  std::int64_t from_rows() const { return from_rows_; }
  std::int64_t to_rows() const { return to_rows_; }
  const Reshard& reshard() const { return *reshard_; }
  const char* kernel() const { return kernel_; }

  void enqueue(const ReshardCall& call, Stream stream) { reshard_->enqueue(call.rows, call.target, stream); }
  void wait() { reshard_->wait(); }
  void run(const ReshardCall& call, Stream stream) {
    enqueue(call, stream);
    wait();
  }

 private:
  std::int64_t token_bytes_, from_rows_, to_rows_;
  const char* kernel_ = nullptr;
  std::unique_ptr<Backend> backend_;
  std::optional<Reshard> reshard_;  // destroyed before its backend
};

}  // namespace ringattn::c

struct ringattn_reshard : ringattn::c::Object<ringattn::c::ReshardForC> {
  static constexpr const char* kName = "reshard";
  std::tuple<ringattn::c::ReshardCall, ringattn::Stream> read(const ringattn_reshard_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of the structs in the interface version that they came with.
constexpr std::size_t kFirstReshardSpec = 64, kFirstReshardFacts = 48, kFirstReshardTensors = 32;

// `name`: the member that has the runs, in messages.
Layout read_reshard_layout(const char* name, std::span<const std::int64_t> lengths, std::int64_t count,
                           const ringattn_run* runs, int world) {
  if (count > 0) need(runs, name);
  try {
    return Layout(lengths, read_runs(runs, count, world));
  } catch (const Error& error) {
    fail(error.code(), {name, ": ", error.problem()}, error.why(), error.suggestion());
  }
}

// Throws kUsage if the tensor, which must be dense, does not have `rows` rows. `side`: "from" or "to".
std::byte* read_reshard_rows(const TensorReader& reader, const char* name, const DLTensor* tensor, const char* side,
                             std::int64_t rows, std::int64_t token_bytes) {
  if (rows > 0) need(tensor, name);
  const std::span<std::byte> bytes = reader.bytes(name, tensor);
  if (static_cast<std::int64_t>(bytes.size()) != rows * token_bytes) {
    fail(ErrorCode::kUsage, fmt::format("{} has {} bytes", name, bytes.size()),
         fmt::format("this rank has {} rows of {} bytes in {}_runs", rows, token_bytes, side),
         "Pass this rank's rows, ascending by run.");
  }
  return bytes.data();
}

}  // namespace

std::tuple<ReshardCall, Stream> ringattn_reshard::read(const ringattn_reshard_tensors* given) const {
  const auto tensors = read_struct("ringattn_reshard_tensors", given, kFirstReshardTensors);
  const TensorReader reader(*transport);
  const std::int64_t token_bytes = instance.token_bytes();
  ReshardCall call;
  call.rows = read_reshard_rows(reader, "x", tensors.x, "from", instance.from_rows(), token_bytes);
  call.target = read_reshard_rows(reader, "y", tensors.y, "to", instance.to_rows(), token_bytes);
  reader.check_written("y");
  return {call, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_reshard_create(ringattn_world* world, const ringattn_reshard_spec* spec,
                                        const ringattn_options* options, ringattn_reshard** reshard) {
  return create(world, reshard, [&](Transport& transport) {
    const auto read = read_struct("ringattn_reshard_spec", spec, kFirstReshardSpec);
    const double timeout_seconds = read_reshard_timeout(options);
    const std::vector<std::int64_t> lengths = read_lengths("ringattn_reshard_spec", read.sequences, read.lengths);
    const int ranks = transport.size();
    const Layout from =
        read_reshard_layout("ringattn_reshard_spec::from_runs", lengths, read.from_run_count, read.from_runs, ranks);
    const Layout to =
        read_reshard_layout("ringattn_reshard_spec::to_runs", lengths, read.to_run_count, read.to_runs, ranks);
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(read.token_bytes, from.cu().back(), &bytes)) {
      fail(ErrorCode::kUsage, fmt::format("{} tokens of {} bytes", from.cu().back(), read.token_bytes),
           "they are more than 2^63 bytes", "Check ringattn_reshard_spec::token_bytes.");
    }
    return new ringattn_reshard{
        {world->transport, ReshardForC(from, to, read.token_bytes, transport, timeout_seconds)}};
  });
}

ringattn_status ringattn_reshard_get_facts(const ringattn_reshard* reshard, ringattn_reshard_facts* facts) {
  return with(reshard, [&](const ringattn_reshard& handle) {
    const ReshardForC& instance = handle.instance;
    write_struct("ringattn_reshard_facts",
                 {0, instance.from_rows(), instance.to_rows(), instance.reshard().bytes_received(),
                  instance.reshard().memory_bytes(), instance.kernel()},
                 facts, kFirstReshardFacts);
  });
}

RINGATTN_CALLS(reshard);

}  // extern "C"
