/* SPDX-License-Identifier: Apache-2.0
 *
 * C API of the other ops: decode from a KV cache, SSM layers (Mamba) and their causal convolution, the gated delta
 * rule, linear attention, RoPE, moving rows between layouts, compression of keys and values, and eviction of tokens.
 * This header includes ringattn_mla.h (MLA), ringattn_linear.h (linear layers) and ringattn_layers.h (linear layers in
 * files). ringattn.h includes this header and has the rules of all calls. Most ops have the functions create,
 * get_facts, run, enqueue, wait and destroy.
 */
#ifndef RINGATTN_OPS_H
#define RINGATTN_OPS_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Decode from a KV cache, since interface 2 ---- */

typedef struct ringattn_decode ringattn_decode;
struct ringattn_rope_spec; /* below */

/* Maximum sizes of a decode step, and the form of the cache. */
typedef struct ringattn_decode_limits {
  uint64_t size;
  int64_t sequences;
  int64_t rows;      /* new query tokens per sequence: 1 to 16; 0: 1 */
  int64_t keys;      /* of a sequence, over all ranks */
  int64_t page_size; /* tokens: 16, 32, 64, 128 or 256; 0: a dense cache with one page per sequence */
  int64_t pages;     /* of this rank's pool, for memory budgets; 0: as many as the limits require */
} ringattn_decode_limits;

/* Collective. Uses only the options kernel, threads, memory_budget, timeout_seconds and unchecked_tables; others are
 * refused. */
ringattn_status ringattn_decode_create(ringattn_world* world, const ringattn_spec* spec,
                                       const ringattn_decode_limits* limits, const ringattn_options* options,
                                       ringattn_decode** decode);

/* The same with RoPE, since interface 6: steps rotate q and k_new, each token by its position in its sequence, with the
 * bits of a ringattn_rope_run() before the step. Keys that are already in the cache must have been rotated. Keys of a
 * compressed cache are rounded to the dtype before they are compressed. mrope_section is refused. */
ringattn_status ringattn_decode_create_with_rope(ringattn_world* world, const ringattn_spec* spec,
                                                 const struct ringattn_rope_spec* rope,
                                                 const ringattn_decode_limits* limits, const ringattn_options* options,
                                                 ringattn_decode** decode);

/* With several ranks, this rank's cache holds the KV splits partition_first, partition_first + partition_stride, ... of
 * each sequence, one after the other. KV split i has the keys from i * kv_split_keys on. */
typedef struct ringattn_decode_facts {
  uint64_t size;
  int64_t kv_split_keys; /* keys of a KV split of the kernel */
  int64_t partition_first;
  int64_t partition_stride;
  uint64_t memory_bytes; /* on the rank that needs most: cache, rows, tables and own allocations */
  const char* kernel;
} ringattn_decode_facts;
ringattn_status ringattn_decode_get_facts(const ringattn_decode* decode, ringattn_decode_facts* facts);
/* The sequences [*first, *first + *count) of a decode step of `sequences` whose results this rank gets. */
ringattn_status ringattn_decode_owned(const ringattn_decode* decode, int64_t sequences, int64_t* first, int64_t* count);
/* Number of tokens that this rank's cache holds of a sequence of `length` keys; -1 if `decode` is NULL. */
int64_t ringattn_decode_cache_tokens(const ringattn_decode* decode, int64_t length);

typedef struct ringattn_decode_tensors {
  uint64_t size;
  const DLTensor* q;           /* [sequences * rows, heads, head_dim], sequence by sequence */
  const DLTensor* k;           /* [pages, page_size, kv_heads, head_dim], any strides: this rank's cache */
  const DLTensor* v;           /* [pages, page_size, kv_heads, head_dim_v] */
  const DLTensor* block_table; /* int32 [sequences, table_pages]: page indices of k and v; NULL: a dense cache */
  const DLTensor* lengths;     /* int32 [sequences]: keys over all ranks, including the tokens of this step: token i has
                                * position length - rows + i. Only read. NULL if lengths_before is given */
  const DLTensor* sinks;       /* [heads] fp32, exactly if the spec's sinks is 1 */
  const DLTensor* k_new;       /* [sequences * rows, kv_heads, head_dim], appended to the cache first; NULL: none */
  const DLTensor* v_new;       /* [sequences * rows, kv_heads, head_dim_v], exactly if k_new is given */
  const DLTensor* out; /* [own rows, heads, head_dim_v], written: tokens of the sequences of ringattn_decode_owned() */
  const DLTensor* lse; /* [own rows, heads] fp32, written; NULL: not wanted */
  const DLTensor* host_lengths; /* host copy of lengths, including the tokens of this step; NULL: the caller has none */
  const DLTensor* host_table;   /* host copy of block_table; NULL: the caller has none */
  void* stream;
  int32_t rows;           /* query tokens per sequence; 0: 1 */
  int32_t update_lengths; /* 1: adds `rows` to each of lengths_before in place, before anything else. (Headers up to
                           * interface 4 call it `grow`, and their `lengths` are then lengths_before) */
  /* Since interface 3: instead of k and v, exactly if the spec has their formats. k_new and v_new are compressed when
   * they are appended, with the existing tables. Tail tables have one entry per sequence of the decode step. */
  const ringattn_compressed* compressed_k;
  const ringattn_compressed* compressed_v;
  /* Since interface 5: instead of lengths, int32 [sequences]: keys over all ranks before this step, as cache_seqlens of
   * flash_attn_with_kvcache() with new keys: token i has position length + i. Exactly one of lengths and lengths_before
   * is given. */
  const DLTensor* lengths_before;
} ringattn_decode_tensors;

ringattn_status ringattn_decode_run(ringattn_decode* decode, const ringattn_decode_tensors* tensors);
ringattn_status ringattn_decode_enqueue(ringattn_decode* decode, const ringattn_decode_tensors* tensors);
ringattn_status ringattn_decode_wait(ringattn_decode* decode);
void ringattn_decode_destroy(ringattn_decode* decode);

/* ---- SSM layers (Mamba-1 selective scan, Mamba-2 SSD), since interface 2 ---- */

/* S_t = exp(dt_t * A) * S_(t-1) + dt_t * x_t (outer) B_t,   y_t = S_t * C_t + D * x_t, times silu(z_t) if z is given.
 * Names are those of mamba_ssm. */
typedef struct ringattn_ssm_spec {
  uint64_t size;
  DLDataType dtype; /* of x, dt, b, c, z and y */
  int32_t heads;
  int32_t head_dim;
  int32_t state_dim;
  int64_t groups;       /* of b and c; divides heads; 0: 1 */
  int32_t state_decays; /* 1: A is [heads, state_dim] as in Mamba-1, and head_dim is 1; 0: A is [heads] */
  int32_t skip;         /* 1: adds D * x */
  int32_t gate;         /* 1: z is given */
  int32_t dt_bias;      /* 1: adds a bias per head to dt */
  int32_t dt_softplus;  /* 1: dt = log(1 + exp(dt)) */
  int32_t dt_limits;    /* 1: clamps dt to [dt_min, dt_max] */
  float dt_min;         /* only with dt_limits, as dt_max */
  float dt_max;
} ringattn_ssm_spec;

typedef struct ringattn_ssm_batch {
  uint64_t size;
  int64_t sequences;
  const int64_t* lengths; /* [sequences]; a sequence of 0 tokens passes its state through */
  int32_t initial_states; /* 1: initial states are given; 0: they are zero */
  int32_t final_states;   /* 1: final states are written */
  /* Since interface 4: */
  int64_t update; /* 1: state update of one token per sequence, as in a decode step. It has initial and final states.
                   * Its outputs agree with those of a whole sequence within a tolerance. lengths may be NULL */
} ringattn_ssm_batch;

typedef struct ringattn_ssm ringattn_ssm;

/* Collective. Uses only the options kernel, threads, memory_budget, timeout_seconds and, with RINGATTN_RUNS, query_runs
 * of whole super-segments of 65,536 tokens; others are refused. Without runs each rank has adjacent super-segments. */
ringattn_status ringattn_ssm_create(ringattn_world* world, const ringattn_ssm_spec* spec,
                                    const ringattn_ssm_batch* batch, const ringattn_options* options,
                                    ringattn_ssm** ssm);

typedef struct ringattn_ssm_facts {
  uint64_t size;
  int64_t rows;      /* tokens of this rank */
  int64_t beginning; /* sequences whose first token this rank has: the number of its initial states */
  int64_t ending;    /* sequences whose last token this rank has: the number of its final states. A sequence of 0 tokens
                      * begins and ends on one rank */
  uint64_t memory_bytes;
  const char* kernel;
} ringattn_ssm_facts;
ringattn_status ringattn_ssm_get_facts(const ringattn_ssm* ssm, ringattn_ssm_facts* facts);
ringattn_status ringattn_ssm_rows(const ringattn_ssm* ssm, int64_t count, int64_t* packed_tokens,
                                  int64_t* sequence_tokens);
/* The sequences that begin and that end on this rank, ascending: [beginning] and [ending]. Either array may be NULL. */
ringattn_status ringattn_ssm_sequences(const ringattn_ssm* ssm, int32_t* beginning, int32_t* ending);

typedef struct ringattn_ssm_tensors {
  uint64_t size;
  const DLTensor* x;              /* [rows, heads, head_dim] */
  const DLTensor* dt;             /* [rows, heads, 1] */
  const DLTensor* b;              /* [rows, groups, state_dim] */
  const DLTensor* c;              /* [rows, groups, state_dim] */
  const DLTensor* z;              /* [rows, heads, head_dim], exactly if gate is 1 */
  const DLTensor* a;              /* fp32 [heads], or [heads, state_dim] with state_decays */
  const DLTensor* d;              /* fp32 [heads], exactly if skip is 1 */
  const DLTensor* dt_bias;        /* fp32 [heads], exactly if the spec's dt_bias is 1 */
  const DLTensor* initial_states; /* fp32 [beginning, heads, head_dim, state_dim]; if the batch has initial states */
  const DLTensor* y;              /* [rows, heads, head_dim], written */
  const DLTensor* final_states; /* fp32 [ending, heads, head_dim, state_dim], written; if the batch has final states */
  void* stream;
  /* Since interface 4, for an update in place (without initial_states): row s updates state slots[s] of final_states,
   * which may have any number of states. int32 [rows], distinct. A negative entry marks a padding row: no state is
   * written, and its y is zeros. Entries are checked in host memory, but not in device memory. NULL: row s has state s.
   */
  const DLTensor* slots;
} ringattn_ssm_tensors;

ringattn_status ringattn_ssm_run(ringattn_ssm* ssm, const ringattn_ssm_tensors* tensors);
ringattn_status ringattn_ssm_enqueue(ringattn_ssm* ssm, const ringattn_ssm_tensors* tensors);
ringattn_status ringattn_ssm_wait(ringattn_ssm* ssm);
void ringattn_ssm_destroy(ringattn_ssm* ssm);

/* Gradients of a ringattn_ssm of Mamba-2, on the same rows. Each rank gets the gradients of its own rows and initial
 * states, with the same bits for any world. RINGATTN_UNSUPPORTED for state_decays and updates. */
typedef struct ringattn_ssd_backward ringattn_ssd_backward;

/* Collective. Spec, batch, runs and options are as for ringattn_ssm_create(); options->kernel names a backward kernel.
 * With initial_states in the batch these are given, and their gradients are written. With final_states the gradients of
 * the final states are given; otherwise they are 0. `gradients`: RINGATTN_GRADIENTS_AS_INPUTS or _FP32, for dx, ddt,
 * db, dc and dz. */
ringattn_status ringattn_ssd_backward_create(ringattn_world* world, const ringattn_ssm_spec* spec,
                                             const ringattn_ssm_batch* batch, int32_t gradients,
                                             const ringattn_options* options, ringattn_ssd_backward** backward);
ringattn_status ringattn_ssd_backward_get_facts(const ringattn_ssd_backward* backward, ringattn_ssm_facts* facts);
ringattn_status ringattn_ssd_backward_rows(const ringattn_ssd_backward* backward, int64_t count, int64_t* packed_tokens,
                                           int64_t* sequence_tokens);

/* Tensors of this rank. */
typedef struct ringattn_ssd_backward_tensors {
  uint64_t size;
  const DLTensor* x;               /* [rows, heads, head_dim] */
  const DLTensor* dt;              /* [rows, heads, 1] */
  const DLTensor* b;               /* [rows, groups, state_dim] */
  const DLTensor* c;               /* [rows, groups, state_dim] */
  const DLTensor* z;               /* [rows, heads, head_dim], exactly if gate is 1, as dz */
  const DLTensor* a;               /* fp32 [heads] */
  const DLTensor* d;               /* fp32 [heads], exactly if skip is 1, as dd */
  const DLTensor* dt_bias;         /* fp32 [heads], exactly if the spec's dt_bias is 1, as ddt_bias */
  const DLTensor* initial_states;  /* fp32 [beginning, heads, head_dim, state_dim]; if the batch has initial states */
  const DLTensor* dy;              /* [rows, heads, head_dim], gradient of y */
  const DLTensor* dfinal_states;   /* fp32 [ending, heads, head_dim, state_dim]; if the batch has final states */
  const DLTensor* dx;              /* [rows, heads, head_dim], written, as all below */
  const DLTensor* ddt;             /* [rows, heads, 1] */
  const DLTensor* db;              /* [rows, groups, state_dim] */
  const DLTensor* dc;              /* [rows, groups, state_dim] */
  const DLTensor* dz;              /* [rows, heads, head_dim] */
  const DLTensor* dinitial_states; /* fp32 [beginning, heads, head_dim, state_dim]; if the batch has initial states */
  const DLTensor* da;              /* fp32 [heads] in host memory, written. Every rank gets the sum over all
                                    * ranks: do not reduce it again */
  const DLTensor* dd;              /* as da */
  const DLTensor* ddt_bias;        /* as da */
  void* stream;
} ringattn_ssd_backward_tensors;

/* Collective. Computes the gradients; returns when they are written. */
ringattn_status ringattn_ssd_backward_run(ringattn_ssd_backward* backward,
                                          const ringattn_ssd_backward_tensors* tensors);
/* RINGATTN_UNSUPPORTED: the gradients of a, d and dt_bias are summed over the ranks at the end of a run. */
ringattn_status ringattn_ssd_backward_enqueue(ringattn_ssd_backward* backward,
                                              const ringattn_ssd_backward_tensors* tensors);
ringattn_status ringattn_ssd_backward_wait(ringattn_ssd_backward* backward);
void ringattn_ssd_backward_destroy(ringattn_ssd_backward* backward);

/* ---- Gated delta rule: Gated DeltaNet and Kimi Delta Attention ---- */

/* S' = diag(exp(log_decay_t)) * S_(t-1),   S_t = S' + beta_t * k_t (outer) (v_t - transpose(S') * k_t),
 * out_t = scale * transpose(S_t) * q_t, for each value head, with a state S [key_dim, value_dim]. Names are those of
 * flash-linear-attention, except for log_decay, which is called g there. */
typedef struct ringattn_gated_delta_spec {
  uint64_t size;
  DLDataType dtype;    /* of q, k, v and out; log_decay, beta and states are fp32 */
  int32_t key_heads;   /* of q and k; divides value_heads. Adjacent value heads share a key head */
  int32_t value_heads; /* of v, log_decay, beta and out */
  int32_t key_dim;
  int32_t value_dim;
  int32_t key_decays; /* 1: log_decay is [rows, value_heads, key_dim] (KDA); 0: [rows, value_heads, 1] (GDN) */
  int32_t qk_l2norm;  /* 1: rows of q and k are divided by sqrt(sum of squares + 1e-6) */
  float scale;        /* 0: 1 / sqrt(key_dim) */
} ringattn_gated_delta_spec;

typedef struct ringattn_gated_delta ringattn_gated_delta;

/* Collective. Batch and options are as for ringattn_ssm_create(), with runs of whole segments of 2,048 tokens. */
ringattn_status ringattn_gated_delta_create(ringattn_world* world, const ringattn_gated_delta_spec* spec,
                                            const ringattn_ssm_batch* batch, const ringattn_options* options,
                                            ringattn_gated_delta** gated_delta);
/* Facts, rows and sequences are as for ringattn_ssm. */
ringattn_status ringattn_gated_delta_get_facts(const ringattn_gated_delta* gated_delta, ringattn_ssm_facts* facts);
ringattn_status ringattn_gated_delta_rows(const ringattn_gated_delta* gated_delta, int64_t count,
                                          int64_t* packed_tokens, int64_t* sequence_tokens);
ringattn_status ringattn_gated_delta_sequences(const ringattn_gated_delta* gated_delta, int32_t* beginning,
                                               int32_t* ending);

typedef struct ringattn_gated_delta_tensors {
  uint64_t size;
  const DLTensor* q;         /* [rows, key_heads, key_dim] */
  const DLTensor* k;         /* [rows, key_heads, key_dim] */
  const DLTensor* v;         /* [rows, value_heads, value_dim] */
  const DLTensor* log_decay; /* fp32 [rows, value_heads, 1], or [rows, value_heads, key_dim] with key_decays */
  const DLTensor* beta;      /* fp32 [rows, value_heads, 1] */
  const DLTensor*
      initial_states;           /* fp32 [beginning, value_heads, key_dim, value_dim]; if the batch has initial states */
  const DLTensor* out;          /* [rows, value_heads, value_dim], written */
  const DLTensor* final_states; /* fp32 [ending, value_heads, key_dim, value_dim], written; if the batch has them */
  const DLTensor* slots;        /* for an update in place, as for ringattn_ssm */
  void* stream;
} ringattn_gated_delta_tensors;

ringattn_status ringattn_gated_delta_run(ringattn_gated_delta* gated_delta,
                                         const ringattn_gated_delta_tensors* tensors);
ringattn_status ringattn_gated_delta_enqueue(ringattn_gated_delta* gated_delta,
                                             const ringattn_gated_delta_tensors* tensors);
ringattn_status ringattn_gated_delta_wait(ringattn_gated_delta* gated_delta);
void ringattn_gated_delta_destroy(ringattn_gated_delta* gated_delta);

/* ---- Rows from one layout to another, since interface 6 ---- */

/* Moves the rows of all tokens between two distributions over the ranks, such as those of attention and of a scan in
 * one stack of layers. Rows are copied as bytes. The gradient of a reshard is the reshard back. */
typedef struct ringattn_reshard_spec {
  uint64_t size;
  int64_t token_bytes; /* of one token's row */
  int64_t sequences;
  const int64_t* lengths; /* [sequences], in tokens */
  int64_t from_run_count; /* runs of all ranks, for each rank ascending by sequence and begin. Together they cover each
                           * token once */
  const ringattn_run* from_runs;
  int64_t to_run_count; /* as from_runs, for the rows that are written */
  const ringattn_run* to_runs;
} ringattn_reshard_spec;

typedef struct ringattn_reshard ringattn_reshard;

/* Collective. Compares the layouts with the other ranks, and allocates buffers. Uses only the option timeout_seconds;
 * others are refused. */
ringattn_status ringattn_reshard_create(ringattn_world* world, const ringattn_reshard_spec* spec,
                                        const ringattn_options* options, ringattn_reshard** reshard);

typedef struct ringattn_reshard_facts {
  uint64_t size;
  int64_t from_rows;      /* tokens of this rank's x */
  int64_t to_rows;        /* tokens of this rank's y */
  int64_t bytes_received; /* from other ranks in a run */
  uint64_t memory_bytes;  /* of the object's buffers on this rank */
  const char* kernel;     /* what copies: "cpu_copy" or "cuda_copy" */
} ringattn_reshard_facts;
ringattn_status ringattn_reshard_get_facts(const ringattn_reshard* reshard, ringattn_reshard_facts* facts);

typedef struct ringattn_reshard_tensors {
  uint64_t size;
  const DLTensor* x; /* [from_rows, ...] of any type, dense; NULL without rows */
  const DLTensor* y; /* [to_rows, ...], dense, written; NULL without rows */
  void* stream;
} ringattn_reshard_tensors;

/* Collective. */
ringattn_status ringattn_reshard_run(ringattn_reshard* reshard, const ringattn_reshard_tensors* tensors);
/* As ringattn_attention_enqueue(). In a world of several ranks it can't be captured in a CUDA graph. */
ringattn_status ringattn_reshard_enqueue(ringattn_reshard* reshard, const ringattn_reshard_tensors* tensors);
ringattn_status ringattn_reshard_wait(ringattn_reshard* reshard);
void ringattn_reshard_destroy(ringattn_reshard* reshard);

/* ---- Causal depthwise conv1d before an SSM layer, since interface 4 ---- */

/* y_t = bias + sum over k of weight[k] * x_(t - width + 1 + k), then silu if the spec's silu is 1. Names are those
 * of causal_conv1d, but the token axis is before the channel axis. An update gives its token the same bits as a run
 * over the whole sequence. */
typedef struct ringattn_causal_conv1d_spec {
  uint64_t size;
  DLDataType dtype; /* of x, y and halos */
  int32_t width;    /* 2 to 4 */
  int64_t channels;
  int32_t bias; /* 1: there is a bias */
  int32_t silu; /* 1: y = v / (1 + exp(-v)) of the sum v */
} ringattn_causal_conv1d_spec;

typedef struct ringattn_causal_conv1d ringattn_causal_conv1d;

/* Collective. Batch and options are as for ringattn_ssm_create(), but memory_budget is refused, and runs may consist
 * of whole segments of 2,048 tokens, as for ringattn_gated_delta. The states are halos: the last width - 1 tokens of
 * a sequence, oldest first. */
ringattn_status ringattn_causal_conv1d_create(ringattn_world* world, const ringattn_causal_conv1d_spec* spec,
                                              const ringattn_ssm_batch* batch, const ringattn_options* options,
                                              ringattn_causal_conv1d** conv1d);
/* Facts are as for ringattn_ssm; memory_bytes counts this rank's x and y. */
ringattn_status ringattn_causal_conv1d_get_facts(const ringattn_causal_conv1d* conv1d, ringattn_ssm_facts* facts);

typedef struct ringattn_causal_conv1d_tensors {
  uint64_t size;
  const DLTensor* x;             /* [rows, 1, channels] */
  const DLTensor* weight;        /* fp32 [channels, width] */
  const DLTensor* bias;          /* fp32 [channels], exactly if the spec's bias is 1 */
  const DLTensor* initial_halos; /* [beginning, width - 1, channels], dense; if the batch has initial states; NULL: in
                                  * place */
  const DLTensor* y;             /* [rows, 1, channels], written */
  const DLTensor* final_halos;   /* [ending, width - 1, channels], dense, written; if the batch has final states */
  const DLTensor* slots;         /* for an update in place, as for ringattn_ssm */
  void* stream;
} ringattn_causal_conv1d_tensors;

ringattn_status ringattn_causal_conv1d_run(ringattn_causal_conv1d* conv1d,
                                           const ringattn_causal_conv1d_tensors* tensors);
ringattn_status ringattn_causal_conv1d_enqueue(ringattn_causal_conv1d* conv1d,
                                               const ringattn_causal_conv1d_tensors* tensors);
ringattn_status ringattn_causal_conv1d_wait(ringattn_causal_conv1d* conv1d);
void ringattn_causal_conv1d_destroy(ringattn_causal_conv1d* conv1d);

/* Gradients of x, weight, bias and initial halos of a ringattn_causal_conv1d, on the same shards. dx and the gradients
 * of initial halos have the same bits for any world and runs. dweight and dbias are sums over the batch in a fixed
 * order, and every rank gets the sum over all ranks: do not reduce them again. */
typedef struct ringattn_causal_conv1d_backward ringattn_causal_conv1d_backward;

/* Collective. Takes the arguments of the forward. RINGATTN_UNSUPPORTED for an update. */
ringattn_status ringattn_causal_conv1d_backward_create(ringattn_world* world, const ringattn_causal_conv1d_spec* spec,
                                                       const ringattn_ssm_batch* batch, const ringattn_options* options,
                                                       ringattn_causal_conv1d_backward** backward);
/* memory_bytes counts this rank's x, dy and dx. */
ringattn_status ringattn_causal_conv1d_backward_get_facts(const ringattn_causal_conv1d_backward* backward,
                                                          ringattn_ssm_facts* facts);

typedef struct ringattn_causal_conv1d_backward_tensors {
  uint64_t size;
  const DLTensor* x;             /* [rows, 1, channels] */
  const DLTensor* weight;        /* fp32 [channels, width] */
  const DLTensor* bias;          /* fp32 [channels], exactly if the spec's bias is 1 */
  const DLTensor* initial_halos; /* [beginning, width - 1, channels], dense; if the batch has initial states */
  const DLTensor* dy;            /* [rows, 1, channels], gradient of y */
  const DLTensor* dfinal_halos;  /* [ending, width - 1, channels], dense, gradient of the final halos; if the batch has
                                  * final states */
  const DLTensor* dx;            /* [rows, 1, channels], written */
  const DLTensor* dweight;       /* fp32 [channels, width], dense, written; the sum over all ranks */
  const DLTensor* dbias;         /* fp32 [channels], written, exactly if the spec's bias is 1; the sum over all ranks */
  const DLTensor*
      dinitial_halos; /* [beginning, width - 1, channels], dense, written; if the batch has initial states */
  void* stream;
} ringattn_causal_conv1d_backward_tensors;

ringattn_status ringattn_causal_conv1d_backward_run(ringattn_causal_conv1d_backward* backward,
                                                    const ringattn_causal_conv1d_backward_tensors* tensors);
ringattn_status ringattn_causal_conv1d_backward_enqueue(ringattn_causal_conv1d_backward* backward,
                                                        const ringattn_causal_conv1d_backward_tensors* tensors);
ringattn_status ringattn_causal_conv1d_backward_wait(ringattn_causal_conv1d_backward* backward);
void ringattn_causal_conv1d_backward_destroy(ringattn_causal_conv1d_backward* backward);

/* ---- Compression of keys and values, since interface 3 ---- */

/* Compresses a tensor to a format (ringattn_compressed) and decompresses it, in the memory of the world's device. */
typedef struct ringattn_compression ringattn_compression;

typedef struct ringattn_compression_spec {
  uint64_t size;
  const char* format; /* "fp8 token_head", "int4_token group 32", ...: see docs/compression.md */
  int64_t sequences;  /* of the tensor */
  int64_t seed;       /* of the codebook search */
  DLDataType dtype;   /* of the decompressed tensor: {kDLFloat, 16, 1} or {kDLBfloat, 16, 1} */
  int32_t heads;
  int64_t dim;
} ringattn_compression_spec;

/* Not collective. Uses only the option threads; others are refused. */
ringattn_status ringattn_compression_create(ringattn_world* world, const ringattn_compression_spec* spec,
                                            const ringattn_options* options, ringattn_compression** compression);

typedef struct ringattn_compression_facts {
  uint64_t size;
  int64_t streams;     /* number of streams */
  int64_t tables;      /* number of tables */
  int64_t token_bytes; /* of all streams, per token */
  int64_t table_bytes; /* of all tables */
} ringattn_compression_facts;
ringattn_status ringattn_compression_get_facts(const ringattn_compression* compression,
                                               ringattn_compression_facts* facts);

enum { RINGATTN_STREAM = 0, RINGATTN_TABLE = 1 };
typedef struct ringattn_part {
  uint64_t size;
  const char* name; /* "codes", "scales", "basis", ...; valid as long as the library is loaded */
  DLDataType dtype; /* fp8 values are {kDLUInt, 8, 1}; DLPack's own type, {10, 8, 1}, is accepted, too */
  int32_t axes;
  int64_t shape[4]; /* of one token of a stream, [heads, width]; of a whole table */
} ringattn_part;
/* Returns name, type and shape of stream or table `index` of the format. */
ringattn_status ringattn_compression_get_part(const ringattn_compression* compression, int32_t kind, int32_t index,
                                              ringattn_part* part);

typedef struct ringattn_compression_tensors {
  uint64_t size;
  const char* name;       /* of the tensor, for messages; NULL: "x" */
  const int64_t* lengths; /* [sequences] tokens of each sequence, in host memory */
  const DLTensor* plain;  /* [tokens, heads, dim] */
  const ringattn_compressed* compressed;
  void* stream; /* a cudaStream_t; the call runs after the work that was enqueued there */
} ringattn_compression_tensors;

/* Writes `compressed` from `plain`; returns when it is done. *energy_kept, unless NULL: for a low-rank format the
 * share of the sum of squares that its factors and outliers keep, else 1. Computes all tables except tails. A
 * non-finite element is refused, and the error names its tensor and index; `compressed` is then undefined. With
 * "int4_channel", rows after a sequence's last full quantization group, and tail entries without a token, are
 * neither written nor ever read. */
ringattn_status ringattn_compression_compress(ringattn_compression* compression,
                                              const ringattn_compression_tensors* tensors, double* energy_kept);
/* Writes `plain` from `compressed`; returns when it is done. Elements that no compressed tensor can have (NaN or
 * infinite scales, channel indices beyond dim) are refused, and the error names stream or table and index; `plain` is
 * then undefined. */
ringattn_status ringattn_compression_decompress(ringattn_compression* compression,
                                                const ringattn_compression_tensors* tensors);
void ringattn_compression_destroy(ringattn_compression* compression);

/* The formats of K and V that a method ("fp8", "int8", "int4", "lowrank", "vq", "hybrid") chooses for a spec. A format
 * name ("fp8 tensor") is used for both. ratio: the minimum share of bytes to remove; 0: the method's default formats.
 */
typedef struct ringattn_formats {
  uint64_t size;
  char k[64];
  char v[64];
  double removed; /* share of a token's bytes that these formats remove, without tables */
} ringattn_formats;
ringattn_status ringattn_choose_formats(const char* method, double ratio, const ringattn_spec* spec,
                                        ringattn_formats* formats);

/* ---- Eviction of tokens from keys and values, since interface 4 ---- */

/* Selects the tokens that stay. Not collective: computed in host memory on each rank that has the tensors. */
typedef struct ringattn_eviction {
  uint64_t size;
  const char* method; /* "streaming", "knorm", "snapkv" or "expected", with options as in docs/compression.md:
                       * "snapkv:window=32,heads=all" */
  double ratio;       /* share of each sequence's tokens to remove, in [0, 1); at least one token stays */
  int64_t threads;    /* 0: all processors */
} ringattn_eviction;

/* kept: [sequences of the batch] number of tokens that stay of each sequence. *heads: 1 if all K/V heads keep the same
 * tokens, else kv_heads. */
ringattn_status ringattn_eviction_kept(const ringattn_eviction* eviction, const ringattn_spec* spec,
                                       const ringattn_batch* batch, int64_t* kept, int64_t* heads);

typedef struct ringattn_eviction_tensors {
  uint64_t size;
  const DLTensor* q;         /* [queries of the batch, heads, head_dim]; only the last queries of each sequence are
                              * read. NULL for methods that read only keys */
  const DLTensor* k;         /* [keys of the batch, kv_heads, head_dim] */
  const DLTensor* v;         /* [keys of the batch, kv_heads, head_dim_v]; NULL without v_kept */
  const DLTensor* positions; /* int32 [kept tokens of all sequences, heads], dense, written: original positions,
                              * ascending for each head; pass them as ringattn_batch::k_positions */
  const DLTensor* k_kept;    /* [kept tokens of all sequences, kv_heads, head_dim], written: their keys; or NULL */
  const DLTensor* v_kept;    /* [kept tokens of all sequences, kv_heads, head_dim_v], written; or NULL */
} ringattn_eviction_tensors;

/* Not collective. Non-finite elements are refused, and the error names their tensor and index. The result does not
 * depend on the number of threads. */
ringattn_status ringattn_evict(const ringattn_eviction* eviction, const ringattn_spec* spec,
                               const ringattn_batch* batch, const ringattn_eviction_tensors* tensors);

/* ---- Rotary position embedding (RoPE) of q and k, since interface 6 ---- */

/* Rotates pairs of elements by position times frequency. Types, parameters and formulas are those of Hugging Face's
 * rope_parameters (docs/rope.md). */
typedef struct ringattn_rope_spec {
  uint64_t size;
  DLDataType dtype; /* of q and k */
  int32_t head_dim; /* even, up to 512 */
  const char* type; /* "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"; NULL: default */
  const char* parameters; /* other numbers of the type, "factor=8,low_freq_factor=1"; lists "long_factor=1:1.5:2";
                           * "mrope_section=16:24:24"; "length=65536", which dynamic and longrope need. NULL: none */
  double theta;           /* 0: 10000 */
  double rotary_factor;   /* part of head_dim that is rotated; 0: 1 */
  int32_t interleaved;    /* 0: element i pairs with i + rotary_dim / 2; 1: element 2i with 2i + 1 */
  int32_t exact;          /* 1: angles in fp64, for millions of positions; 0: in fp32 as Hugging Face computes them */
  /* Frequencies that replace those of the type, such as a model's inv_freq: [frequency_count], which is rotary_dim / 2.
   * Without `exact` they are fp32 values. NULL: those of the type. */
  const double* frequencies;
  int64_t frequency_count;
  double attention_factor; /* of cos and sin, with frequencies; 0: 1 */
} ringattn_rope_spec;

typedef struct ringattn_rope ringattn_rope;

/* Not collective. */
ringattn_status ringattn_rope_create(ringattn_world* world, const ringattn_rope_spec* spec,
                                     const ringattn_options* options, ringattn_rope** rope);

typedef struct ringattn_rope_facts {
  uint64_t size;
  int64_t rotary_dim;
  int64_t axes;       /* of positions */
  const char* kernel; /* valid as long as the library is loaded */
} ringattn_rope_facts;

ringattn_status ringattn_rope_get_facts(const ringattn_rope* rope, ringattn_rope_facts* facts);

/* Writes the frequencies that are used, and the factor of cos and sin. `count` must be rotary_dim / 2. */
ringattn_status ringattn_rope_frequencies(const ringattn_rope* rope, int64_t count, double* frequencies,
                                          double* attention_factor);

typedef struct ringattn_rope_tensors {
  uint64_t size;
  const DLTensor* q;         /* [rows, heads, head_dim]; NULL: only k is rotated */
  const DLTensor* k;         /* [rows, kv_heads, head_dim]; NULL: only q is rotated */
  const DLTensor* q_out;     /* as q, written; may be q */
  const DLTensor* k_out;     /* as k, written; may be k */
  const DLTensor* positions; /* int32 or int64 [rows] or [axes, rows]: each row's position in its sequence. NULL: row i
                              * is at first_position + i. ringattn_attention_rows() returns the positions of a layout */
  int64_t first_position;
  int64_t inverse; /* 1: the negative angle, which turns gradients of q_out and k_out into those of q and k */
  void* stream;
} ringattn_rope_tensors;

/* Not collective. A row's bits depend only on the row, its positions and the spec, not on the device. */
ringattn_status ringattn_rope_run(ringattn_rope* rope, const ringattn_rope_tensors* tensors);
ringattn_status ringattn_rope_enqueue(ringattn_rope* rope, const ringattn_rope_tensors* tensors);
ringattn_status ringattn_rope_wait(ringattn_rope* rope);
void ringattn_rope_destroy(ringattn_rope* rope);

/* ---- Linear attention with decays (lightning attention, RetNet, GLA), since interface 6 ---- */

/* S_t = exp(g_t) * S_(t-1) + v_t (outer) k_t,   out_t = scale * S_t * q_t,   with states S [dim_v, dim]. Ranks,
 * batches, facts, sequences and decode steps are those of ringattn_ssm. */
/* Values of ringattn_linear_attention_spec::decay. */
enum {
  RINGATTN_DECAY_HEAD = 0,  /* one log-decay g per head */
  RINGATTN_DECAY_TOKEN = 1, /* per token and head */
  RINGATTN_DECAY_DIM = 2,   /* per token, head and dim of q and k */
};

typedef struct ringattn_linear_attention_spec {
  uint64_t size;
  DLDataType dtype; /* of q, k, v and out */
  int32_t heads;
  int32_t dim;       /* of q and k */
  int32_t dim_v;     /* of v and out; 0: dim */
  int32_t decay;     /* one of RINGATTN_DECAY_HEAD, _TOKEN and _DIM */
  int32_t has_scale; /* 1: scale is given; 0: it is 1 / sqrt(dim) */
  float scale;
  const ringattn_rope_spec* rope; /* rotates q and k first, by their positions. NULL: they are not rotated */
} ringattn_linear_attention_spec;

typedef struct ringattn_linear_attention ringattn_linear_attention;

/* Collective. */
ringattn_status ringattn_linear_attention_create(ringattn_world* world, const ringattn_linear_attention_spec* spec,
                                                 const ringattn_ssm_batch* batch, const ringattn_options* options,
                                                 ringattn_linear_attention** linear_attention);
ringattn_status ringattn_linear_attention_get_facts(const ringattn_linear_attention* linear_attention,
                                                    ringattn_ssm_facts* facts);
ringattn_status ringattn_linear_attention_rows(const ringattn_linear_attention* linear_attention, int64_t count,
                                               int64_t* packed_tokens, int64_t* sequence_tokens);
ringattn_status ringattn_linear_attention_sequences(const ringattn_linear_attention* linear_attention,
                                                    int32_t* beginning, int32_t* ending);

typedef struct ringattn_linear_attention_tensors {
  uint64_t size;
  const DLTensor* q;             /* [rows, heads, dim] */
  const DLTensor* k;             /* [rows, heads, dim] */
  const DLTensor* v;             /* [rows, heads, dim_v] */
  const DLTensor* log_decay;     /* fp32 [heads], [rows, heads, 1] or [rows, heads, dim], by the spec's decay */
  const DLTensor* initial_state; /* fp32 [beginning, heads, dim_v, dim]; if the batch has initial states */
  const DLTensor* positions;     /* int32 or int64 [rows], with rope only. NULL: tokens count from 0 in their sequences.
                                  * An update with rope requires them */
  const DLTensor* slots;         /* for an update in place, as for ringattn_ssm */
  const DLTensor* out;           /* [rows, heads, dim_v], written */
  const DLTensor* final_states;  /* fp32 [ending, heads, dim_v, dim], written; if the batch has final states */
  void* stream;
} ringattn_linear_attention_tensors;

ringattn_status ringattn_linear_attention_run(ringattn_linear_attention* linear_attention,
                                              const ringattn_linear_attention_tensors* tensors);
ringattn_status ringattn_linear_attention_enqueue(ringattn_linear_attention* linear_attention,
                                                  const ringattn_linear_attention_tensors* tensors);
ringattn_status ringattn_linear_attention_wait(ringattn_linear_attention* linear_attention);
void ringattn_linear_attention_destroy(ringattn_linear_attention* linear_attention);

#ifdef __cplusplus
}
#endif

#include "ringattn_layers.h"
#include "ringattn_linear.h"
#include "ringattn_mla.h"

#endif /* RINGATTN_OPS_H */
