// SPDX-License-Identifier: Apache-2.0
/* The job of clients of the C interface that use nothing but ringattn.h: causal attention over 300 tokens, of which
 * each rank computes its rows, and a sum over the bits of O and LSE. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ringattn.h"

enum { kTokens = 300, kHeads = 2, kKvHeads = 1, kDim = 32 };

static float out[kTokens * kHeads * kDim], lse[kTokens * kHeads];

static float value(int64_t token, int64_t index) { return (float)((token * 37 + index * 11) % 101 - 50) / 64.0F; }

static int refused(const char* where) {
  printf("%s: %d: %s\n", where, (int)ringattn_error_status(), ringattn_error_text());
  return 2;
}

static DLTensor tensor(void* data, int axes, int64_t* shape) {
  DLTensor view;
  memset(&view, 0, sizeof view);
  view.data = data;
  view.device.device_type = kDLCPU;
  view.ndim = axes;
  view.dtype.code = kDLFloat;
  view.dtype.bits = 32;
  view.dtype.lanes = 1;
  view.shape = shape;
  return view;
}

static int run_rank(ringattn_world* world) {
  int64_t length = kTokens;
  ringattn_spec spec;
  memset(&spec, 0, sizeof spec);
  spec.size = sizeof spec;
  spec.dtype.code = kDLFloat;
  spec.dtype.bits = 32;
  spec.dtype.lanes = 1;
  spec.heads = kHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kDim;
  ringattn_batch batch;
  memset(&batch, 0, sizeof batch);
  batch.size = sizeof batch;
  batch.sequences = 1;
  batch.q_lengths = &length;
  ringattn_options options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.threads = 1;
  ringattn_attention* attention = NULL;
  if (ringattn_attention_create(world, &spec, &batch, &options, &attention) != RINGATTN_OK) return refused("attention");
  ringattn_attention_facts facts;
  memset(&facts, 0, sizeof facts);
  facts.size = sizeof facts;
  if (ringattn_attention_get_facts(attention, &facts) != RINGATTN_OK) return refused("facts");
  const int64_t rows = facts.q_rows;
  const size_t bytes = (size_t)rows * sizeof(float);
  int64_t* tokens = malloc((size_t)rows * sizeof *tokens);
  float *q = malloc(bytes * kHeads * kDim), *k = malloc(bytes * kDim), *v = malloc(bytes * kDim);
  float *my_out = malloc(bytes * kHeads * kDim), *my_lse = malloc(bytes * kHeads);
  if (ringattn_attention_rows(attention, RINGATTN_QUERIES, rows, tokens, NULL) != RINGATTN_OK) return refused("rows");
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < kHeads * kDim; ++i) q[row * kHeads * kDim + i] = value(tokens[row], i);
    for (int64_t i = 0; i < kDim; ++i) {
      k[row * kDim + i] = value(tokens[row] + 1, i);
      v[row * kDim + i] = value(tokens[row] + 2, i);
    }
  }
  int64_t q_shape[3] = {rows, kHeads, kDim}, k_shape[3] = {rows, kKvHeads, kDim}, lse_shape[2] = {rows, kHeads};
  DLTensor q_view = tensor(q, 3, q_shape), k_view = tensor(k, 3, k_shape), v_view = tensor(v, 3, k_shape);
  DLTensor out_view = tensor(my_out, 3, q_shape), lse_view = tensor(my_lse, 2, lse_shape);
  ringattn_attention_tensors tensors;
  memset(&tensors, 0, sizeof tensors);
  tensors.size = sizeof tensors;
  tensors.q = &q_view;
  tensors.k = &k_view;
  tensors.v = &v_view;
  tensors.out = &out_view;
  tensors.lse = &lse_view;
  if (ringattn_attention_run(attention, &tensors) != RINGATTN_OK) return refused("run");
  for (int64_t row = 0; row < rows; ++row) {
    memcpy(out + tokens[row] * kHeads * kDim, my_out + row * kHeads * kDim, kHeads * kDim * sizeof(float));
    memcpy(lse + tokens[row] * kHeads, my_lse + row * kHeads, kHeads * sizeof(float));
  }
  ringattn_attention_destroy(attention);
  free(tokens), free(q), free(k), free(v), free(my_out), free(my_lse);
  return 0;
}

static unsigned long long sum_bits(const float* numbers, size_t count) {
  unsigned long long sum = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, numbers + i, sizeof bits);
    sum = sum * 1099511628211ULL + bits;
  }
  return sum;
}

static void print_bits(void) {
  printf("%016llx\n", sum_bits(out, sizeof out / sizeof *out) ^ sum_bits(lse, sizeof lse / sizeof *lse));
}
