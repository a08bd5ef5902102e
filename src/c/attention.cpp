// SPDX-License-Identifier: Apache-2.0
#include "attention/attention.hpp"

#include <array>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "c/workspace.hpp"
#include "c/world.hpp"

struct ringattn_attention {
  std::shared_ptr<ringattn::Transport> transport;
  ringattn::Attention door;
  ringattn::c::Workspace workspace;
  std::string machine;
};

namespace ringattn::c {

namespace {

constexpr std::size_t kFirstFacts = 40, kFirstTensors = 72;

struct Run {
  Inputs inputs;
  Outputs outputs;
  std::span<std::byte> workspace;
  Stream stream;
};

Run read_run(ringattn_attention& attention, const ringattn_attention_tensors* given) {
  const auto tensors = read_struct("ringattn_attention_tensors", given, kFirstTensors);
  need(tensors.q, "q");
  need(tensors.k, "k");
  need(tensors.v, "v");
  need(tensors.out, "out");
  const TensorReader reader(*attention.transport);
  Run run;
  run.inputs.q = reader.rows("q", tensors.q);
  run.inputs.k = reader.rows("k", tensors.k);
  run.inputs.v = reader.rows("v", tensors.v);
  const std::array<std::int64_t, 1> heads{attention.door.job().spec.heads};
  run.inputs.sinks = reader.numbers("sinks", tensors.sinks, heads);
  run.outputs.out = reader.rows("out", tensors.out);
  run.outputs.lse = reader.row_values("lse", tensors.lse, run.inputs.q.tokens, heads[0]);
  run.workspace = attention.workspace.choose(reader.bytes("workspace", tensors.workspace), tensors.workspace != nullptr,
                                             attention.door.workspace_bytes(false), attention.door.backend());
  run.stream.handle = tensors.stream;
  return run;
}

}  // namespace

}  // namespace ringattn::c

using namespace ringattn;
using namespace ringattn::c;

extern "C" {

ringattn_status ringattn_attention_create(ringattn_world* world, const ringattn_spec* spec, const ringattn_batch* batch,
                                          const ringattn_options* options, ringattn_attention** attention) {
  return guarded([&] {
    need(world, "world");
    need(attention, "attention");
    Job job;
    job.spec = read_spec(spec);
    job.batch = read_batch(batch);
    Options read = read_options(options, job.batch, *world->transport);
    Attention door(std::move(job), *world->transport, std::move(read));
    std::string machine = door.backend().identity();
    *attention = new ringattn_attention{world->transport, std::move(door), {}, std::move(machine)};
  });
}

ringattn_status ringattn_attention_get_facts(const ringattn_attention* attention, ringattn_attention_facts* facts) {
  return guarded([&] {
    need(attention, "attention");
    const Attention& door = attention->door;
    // Names of kernels are literals, so they end in a zero byte.
    write_struct("ringattn_attention_facts",
                 {0, door.q_rows(), door.k_rows(), door.workspace_bytes(false), door.kernel().row->name.data(),
                  door.prediction().seconds, attention->machine.c_str()},
                 facts, kFirstFacts);
  });
}

ringattn_status ringattn_attention_rows(const ringattn_attention* attention, int32_t side, int64_t count,
                                        int64_t* packed_tokens, int64_t* sequence_tokens) {
  return guarded([&] {
    need(attention, "attention");
    write_rows(side_of(attention->door.layout(), side), attention->transport->rank(), count, packed_tokens,
               sequence_tokens);
  });
}

ringattn_status ringattn_attention_run(ringattn_attention* attention, const ringattn_attention_tensors* tensors) {
  return guarded([&] {
    need(attention, "attention");
    const Run run = read_run(*attention, tensors);
    attention->door.run(run.inputs, run.outputs, run.workspace, run.stream);
  });
}

ringattn_status ringattn_attention_enqueue(ringattn_attention* attention, const ringattn_attention_tensors* tensors) {
  return guarded([&] {
    need(attention, "attention");
    const Run run = read_run(*attention, tensors);
    attention->door.enqueue(run.inputs, run.outputs, run.workspace, run.stream);
  });
}

ringattn_status ringattn_attention_wait(ringattn_attention* attention) {
  return guarded([&] {
    need(attention, "attention");
    attention->door.wait();
  });
}

void ringattn_attention_destroy(ringattn_attention* attention) { delete attention; }

}  // extern "C"
