// SPDX-License-Identifier: Apache-2.0
#include "attention/decode.hpp"

#include <array>
#include <memory>
#include <utility>

#include "c/jobs.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/step_tensors.hpp"
#include "c/tensors.hpp"
#include "c/world.hpp"

struct ringattn_decode {
  std::shared_ptr<ringattn::Transport> transport;
  ringattn::Decode door;
};

namespace ringattn::c {

namespace {

constexpr std::size_t kFirstFacts = 48, kFirstTensors = 120;

struct Step {
  DecodeInputs inputs;
  DecodeOutputs outputs;
  Stream stream;
};

Step read_tensors(const ringattn_decode& decode, const ringattn_decode_tensors* given) {
  const auto tensors = read_struct("ringattn_decode_tensors", given, kFirstTensors);
  need(tensors.q, "q");
  need(tensors.k, "k");
  need(tensors.v, "v");
  need(tensors.out, "out");
  const TensorReader reader(*decode.transport);
  const std::array<std::int64_t, 1> heads{decode.door.job().spec.heads};
  Step step;
  step.inputs.q = reader.rows("q", tensors.q);
  step.inputs.k = reader.cache("k", tensors.k);
  step.inputs.v = reader.cache("v", tensors.v);
  read_step(reader, tensors, step.inputs);
  step.inputs.sinks = reader.numbers("sinks", tensors.sinks, heads);
  step.inputs.k_new = reader.rows("k_new", tensors.k_new);
  step.inputs.v_new = reader.rows("v_new", tensors.v_new);
  step.outputs.out = reader.rows("out", tensors.out);
  step.outputs.lse = reader.row_values("lse", tensors.lse, step.outputs.out.tokens, heads[0]);
  step.stream.handle = tensors.stream;
  return step;
}

}  // namespace

}  // namespace ringattn::c

using namespace ringattn;
using namespace ringattn::c;

extern "C" {

ringattn_status ringattn_decode_create(ringattn_world* world, const ringattn_spec* spec,
                                       const ringattn_decode_limits* limits, const ringattn_options* options,
                                       ringattn_decode** decode) {
  return guarded([&] {
    need(world, "world");
    need(decode, "decode");
    DecodeJob job;
    job.spec = read_spec(spec);
    job.limits = read_limits(limits, job.page_size, job.pages);
    DecodeOptions read = read_decode_options(options, *world->transport);
    *decode = new ringattn_decode{world->transport, Decode(std::move(job), *world->transport, std::move(read))};
  });
}

ringattn_status ringattn_decode_get_facts(const ringattn_decode* decode, ringattn_decode_facts* facts) {
  return guarded([&] {
    need(decode, "decode");
    const Decode& door = decode->door;
    const GroupShare share = door.share();
    write_struct(
        "ringattn_decode_facts",
        {0, door.group_keys(), share.first, share.every, door.memory().total(), door.kernel().row->name.data()}, facts,
        kFirstFacts);
  });
}

ringattn_status ringattn_decode_owned(const ringattn_decode* decode, int64_t sequences, int64_t* first,
                                      int64_t* count) {
  return guarded([&] {
    need(decode, "decode");
    need(first, "first");
    need(count, "count");
    const SequenceRange owned = decode->door.owned(sequences);
    *first = owned.first;
    *count = owned.count;
  });
}

int64_t ringattn_decode_cache_tokens(const ringattn_decode* decode, int64_t length) {
  return decode == nullptr ? -1 : decode->door.cache_tokens(length);
}

ringattn_status ringattn_decode_run(ringattn_decode* decode, const ringattn_decode_tensors* tensors) {
  return guarded([&] {
    need(decode, "decode");
    const Step step = read_tensors(*decode, tensors);
    decode->door.run(step.inputs, step.outputs, step.stream);
  });
}

ringattn_status ringattn_decode_enqueue(ringattn_decode* decode, const ringattn_decode_tensors* tensors) {
  return guarded([&] {
    need(decode, "decode");
    const Step step = read_tensors(*decode, tensors);
    decode->door.enqueue(step.inputs, step.outputs, step.stream);
  });
}

ringattn_status ringattn_decode_wait(ringattn_decode* decode) {
  return guarded([&] {
    need(decode, "decode");
    decode->door.wait();
  });
}

void ringattn_decode_destroy(ringattn_decode* decode) { delete decode; }

}  // extern "C"
