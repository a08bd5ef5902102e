// SPDX-License-Identifier: Apache-2.0
#include "ops/rope/rope.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

namespace ringattn::c {

// Adapts Rope's calls, whose task refers to an array of tensors.
struct RopeCall {
  RopePositions positions;
  std::array<RopeTensor, kMaxRopeTensors> tensors;
  std::size_t count = 0;
  bool inverse = false;

  RopeTask task() const { return {positions, std::span(tensors.data(), count), inverse}; }
};

class RopeForC {
 public:
  RopeForC(RopeSpec spec, RopeOptions options) : rope_(std::move(spec), std::move(options)) {}

  const Rope& rope() const { return rope_; }
  void run(const RopeCall& call, Stream stream) { rope_.run(call.task(), stream); }
  void enqueue(const RopeCall& call, Stream stream) { rope_.enqueue(call.task(), stream); }
  void wait() { rope_.wait(); }

 private:
  Rope rope_;
};

}  // namespace ringattn::c

struct ringattn_rope : ringattn::c::Object<ringattn::c::RopeForC> {
  static constexpr const char* kName = "rope";
  std::tuple<ringattn::c::RopeCall, ringattn::Stream> read(const ringattn_rope_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of the structs in their first interface version.
constexpr std::size_t kFirstRopeSpec = 80, kFirstRopeFacts = 32, kFirstRopeTensors = 72;

}  // namespace

RopeSpec ringattn::c::read_rope_spec(const ringattn_rope_spec* given) {
  const auto read = read_struct("ringattn_rope_spec", given, kFirstRopeSpec);
  RopeParameters parameters;
  if (read.type != nullptr) {
    const std::span names = rope_type_names();
    const auto found = std::ranges::find(names, std::string_view(read.type));
    if (found == names.end()) {
      fail(ErrorCode::kUsage, fmt::format("type of RoPE is \"{}\"", read.type),
           fmt::format("known: {}", fmt::join(names, ", ")), "Choose one of these.");
    }
    parameters.type = static_cast<RopeType>(found - names.begin());
  }
  const std::string_view text = read.parameters == nullptr ? "" : read.parameters;
  if (!text.empty()) {
    if (const std::string_view bad = set_rope_parameters(parameters, text); !bad.empty()) {
      fail(ErrorCode::kUsage, fmt::format("\"{}\" is not a parameter of RoPE", bad),
           fmt::format("there are {}, as name=number", rope_parameter_names()), "Check its name and value.");
    }
  }
  if (read.theta != 0.0) parameters.theta = read.theta;
  if (read.rotary_factor != 0.0) parameters.partial_rotary_factor = read.rotary_factor;
  RopeSpec spec =
      make_rope_spec(parameters, read_dtype(read.dtype), read.head_dim,
                     read.interleaved != 0 ? RopePairs::kInterleaved : RopePairs::kHalfSplit, read.exact != 0);
  if (read.frequencies == nullptr) return spec;
  if (parameters.type != RopeType::kDefault) {
    fail(ErrorCode::kUsage, fmt::format("frequencies are given for RoPE of type {}", rope_type_name(parameters.type)),
         "they replace those of a type", "Leave type out.");
  }
  if (read.frequency_count != spec.pair_count()) {
    fail(ErrorCode::kUsage, fmt::format("there are {} frequencies", read.frequency_count),
         fmt::format("rotary_dim {} has {} pairs", spec.rotary_dim, spec.pair_count()), "Give one for each pair.");
  }
  spec.frequencies.assign(read.frequencies, read.frequencies + read.frequency_count);
  if (read.attention_factor != 0.0) spec.attention_factor = static_cast<float>(read.attention_factor);
  check_rope(spec);
  return spec;
}

std::tuple<RopeCall, Stream> ringattn_rope::read(const ringattn_rope_tensors* given) const {
  const auto tensors = read_struct("ringattn_rope_tensors", given, kFirstRopeTensors);
  if (tensors.q == nullptr) need(tensors.k, "k");
  const TensorReader reader(*transport);
  RopeCall call;
  std::int64_t rows = 0;
  const auto add = [&](const char* name, const DLTensor* x, const char* out_name, const DLTensor* y) {
    if (x == nullptr) return;
    need(y, out_name);
    call.tensors[call.count] = {reader.rows(name, x), reader.rows(out_name, y)};
    rows = call.tensors[call.count++].x.tokens;
  };
  add("q", tensors.q, "q_out", tensors.q_out);
  add("k", tensors.k, "k_out", tensors.k_out);
  call.positions = reader.positions("positions", tensors.positions, rows, instance.rope().spec().axis_count());
  call.positions.first = tensors.first_position;
  call.inverse = tensors.inverse != 0;
  reader.check_written("q_out", "q");
  reader.check_written("k_out", "k");
  return {call, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_rope_create(ringattn_world* world, const ringattn_rope_spec* spec,
                                     const ringattn_options* options, ringattn_rope** rope) {
  return create(world, rope, [&](Transport& transport) {
    RopeSpec read = read_rope_spec(spec);
    return new ringattn_rope{{world->transport, RopeForC(std::move(read), read_rope_options(options, transport))}};
  });
}

ringattn_status ringattn_rope_get_facts(const ringattn_rope* rope, ringattn_rope_facts* facts) {
  return with(rope, [&](const ringattn_rope& handle) {
    const Rope& instance = handle.instance.rope();
    write_struct("ringattn_rope_facts",
                 {0, instance.spec().rotary_dim, instance.spec().axis_count(), instance.kernel().row->name.data()},
                 facts, kFirstRopeFacts);
  });
}

ringattn_status ringattn_rope_frequencies(const ringattn_rope* rope, int64_t count, double* frequencies,
                                          double* attention_factor) {
  return with(rope, [&](const ringattn_rope& handle) {
    need(frequencies, "frequencies");
    need(attention_factor, "attention_factor");
    const RopeSpec& spec = handle.instance.rope().spec();
    if (count != spec.pair_count()) {
      fail(ErrorCode::kUsage, fmt::format("count is {}", count), fmt::format("there are {} pairs", spec.pair_count()),
           "Pass half of rotary_dim.");
    }
    std::ranges::copy(spec.frequencies, frequencies);
    *attention_factor = static_cast<double>(spec.attention_factor);
  });
}

RINGATTN_CALLS(rope);

}  // extern "C"
