/* SPDX-License-Identifier: Apache-2.0
 *
 * The other ops of ringattn in C: decoding from a cache, scans and the convolutions in front of them; compression of keys and
 * values, and taking tokens out of them; those of latent attention are in ringattn_mla.h, which it includes. ringattn.h
 * includes it and has the rules; each op has the form of ringattn_attention: create, facts, run or enqueue and wait, destroy.
 */
#ifndef RINGATTN_OPS_H
#define RINGATTN_OPS_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Decoding from a cache, since interface 2 ---- */

typedef struct ringattn_decode ringattn_decode;

/* The most that a step will have, and what the cache looks like. */
typedef struct ringattn_decode_limits {
  uint64_t size;
  int64_t sequences;
  int64_t rows;      /* new rows of a sequence: 1 to 16; 0: 1 */
  int64_t keys;      /* of a sequence, over all ranks */
  int64_t page_size; /* tokens: 16, 32, 64, 128 or 256; 0: a dense cache, a page for each sequence */
  int64_t pages;     /* of this rank's pool, for memory budgets; 0: as many as the limits need */
} ringattn_decode_limits;

/* Prepares. Collective. Of the options kernel, threads, memory_budget, timeout_seconds and unchecked_tables; others are
 * refused. */
ringattn_status ringattn_decode_create(ringattn_world *world, const ringattn_spec *spec,
                                       const ringattn_decode_limits *limits, const ringattn_options *options,
                                       ringattn_decode **decode);

/* Of a world of several ranks: this one keeps the groups of keys partition_first, partition_first + partition_stride, ... of each
 * sequence, one behind the other; group g is the keys g * kv_split_keys and on. */
typedef struct ringattn_decode_facts {
  uint64_t size;
  int64_t kv_split_keys; /* the kernel's */
  int64_t partition_first;
  int64_t partition_stride;
  uint64_t memory_bytes; /* on the rank that needs most: cache, rows, tables and all that is allocated */
  const char *kernel;
} ringattn_decode_facts;
ringattn_status ringattn_decode_get_facts(const ringattn_decode *decode, ringattn_decode_facts *facts);
/* The sequences first, first + 1, ... of a step of `sequences` whose results this rank gets. */
ringattn_status ringattn_decode_owned(const ringattn_decode *decode, int64_t sequences, int64_t *first, int64_t *count);
/* Tokens that this rank's cache holds of a sequence of `length` keys; -1 for NULL. */
int64_t ringattn_decode_cache_tokens(const ringattn_decode *decode, int64_t length);

typedef struct ringattn_decode_tensors {
  uint64_t size;
  const DLTensor *q;           /* [sequences * rows, heads, head_dim], sequence by sequence */
  const DLTensor *k;           /* [pages, page_size, kv_heads, head_dim], strides free: this rank's cache */
  const DLTensor *v;           /* [pages, page_size, kv_heads, head_dim_v] */
  const DLTensor *block_table; /* int32 [sequences, table_pages]: pages of k and v; NULL: a dense cache */
  const DLTensor *lengths;     /* int32 [sequences]: keys, over all ranks, with this step's rows: row i stands at
                                * length - rows + i. Only read. NULL where lengths_before is given */
  const DLTensor *sinks;       /* [heads] fp32, present exactly when the spec's sinks is 1 */
  const DLTensor *k_new;       /* [sequences * rows, kv_heads, head_dim], written into the cache first; or NULL */
  const DLTensor *v_new;       /* [sequences * rows, kv_heads, head_dim_v], exactly where k_new is */
  const DLTensor *out;         /* [own rows, heads, head_dim_v], written: of the sequences of ringattn_decode_owned() */
  const DLTensor *lse;         /* [own rows, heads] fp32, written; or NULL */
  const DLTensor *host_lengths; /* what lengths (with this step's rows) and block_table hold, in host memory, */
  const DLTensor *host_table;   /* where the caller knows it; or NULL */
  void *stream;
  int32_t rows; /* of a sequence; 0: 1 */
  int32_t update_lengths; /* 1: `rows` is added to each of lengths_before in place, before anything else is done. (`grow` in
                           * headers up to interface 4, whose `lengths` are then lengths_before) */
  /* Since interface 3: instead of k and v, exactly where the spec has their formats. k_new and v_new are compressed as
   * they are written: with the tables that are there, and into tails, which have a place for each sequence of the step. */
  const ringattn_compressed *compressed_k;
  const ringattn_compressed *compressed_v;
  /* Since interface 5: instead of lengths, int32 [sequences]: keys before this step, over all ranks, as cache_seqlens of
   * flash_attn_with_kvcache() with new keys: row i stands at length + i. Exactly one of both is given. */
  const DLTensor *lengths_before;
} ringattn_decode_tensors;

ringattn_status ringattn_decode_run(ringattn_decode *decode, const ringattn_decode_tensors *tensors);
ringattn_status ringattn_decode_enqueue(ringattn_decode *decode, const ringattn_decode_tensors *tensors);
ringattn_status ringattn_decode_wait(ringattn_decode *decode);
void ringattn_decode_destroy(ringattn_decode *decode);

/* ---- Scans of state space layers (Mamba), since interface 2 ---- */

/* S_t = exp(dt_t * A) * S_(t-1) + dt_t * x_t (outer) B_t,   y_t = S_t * C_t + D * x_t, times silu(z_t) where there is z.
 * Names are those of mamba_ssm. */
typedef struct ringattn_ssm_spec {
  uint64_t size;
  DLDataType dtype; /* of x, dt, b, c, z and y */
  int32_t heads;
  int32_t head_dim;
  int32_t state_dim;
  int64_t groups;       /* of b and c, divides heads; 0: 1 */
  int32_t state_decays; /* 1: A is [heads, state_dim], as Mamba-1's, and head_dim 1; else [heads] */
  int32_t skip;         /* 1: D * x is added */
  int32_t gate;         /* 1: there is z */
  int32_t dt_bias;      /* 1: one a head is added to dt */
  int32_t dt_softplus;  /* 1: dt = log(1 + exp(dt)) */
  int32_t dt_limits;    /* 1: dt is held between dt_min and dt_max */
  float dt_min;       /* of dt_limits alone, as dt_max */
  float dt_max;
} ringattn_ssm_spec;

typedef struct ringattn_ssm_batch {
  uint64_t size;
  int64_t sequences;
  const int64_t *lengths; /* [sequences]; the state of a sequence of 0 tokens passes through */
  int32_t initial_states; /* 1: sequences start from given states, else from zero */
  int32_t final_states;   /* 1: the states behind them are wanted */
  /* Since interface 4: */
  int64_t update; /* 1: one token of each sequence, as models decode, from initial states to final ones, both of which it
                   * has. Such rows and states agree with those of a scan within a tolerance. lengths may be NULL */
} ringattn_ssm_batch;

typedef struct ringattn_ssm ringattn_ssm;

/* Of the options kernel, threads, memory_budget, timeout_seconds and, with RINGATTN_RUNS, query_runs of whole
 * super-segments of 65,536 tokens; others are refused. Without runs each rank has neighbouring super-segments. */
ringattn_status ringattn_ssm_create(ringattn_world *world, const ringattn_ssm_spec *spec,
                                     const ringattn_ssm_batch *batch, const ringattn_options *options,
                                     ringattn_ssm **ssm);

typedef struct ringattn_ssm_facts {
  uint64_t size;
  int64_t rows;      /* of this rank */
  int64_t beginning; /* sequences whose first token this rank has: as many initial states. A sequence of 0 tokens */
  int64_t ending;    /* begins and ends on one rank; and whose last token it has: as many final states */
  uint64_t memory_bytes;
  const char *kernel;
} ringattn_ssm_facts;
ringattn_status ringattn_ssm_get_facts(const ringattn_ssm *ssm, ringattn_ssm_facts *facts);
ringattn_status ringattn_ssm_rows(const ringattn_ssm *ssm, int64_t count, int64_t *packed_tokens,
                                   int64_t *sequence_tokens);
/* Which sequences begin and end on this rank, ascending: [beginning] and [ending]. Either may be NULL. */
ringattn_status ringattn_ssm_sequences(const ringattn_ssm *ssm, int32_t *beginning, int32_t *ending);

typedef struct ringattn_ssm_tensors {
  uint64_t size;
  const DLTensor *x;              /* [rows, heads, head_dim] */
  const DLTensor *dt;             /* [rows, heads, 1] */
  const DLTensor *b;              /* [rows, groups, state_dim] */
  const DLTensor *c;              /* [rows, groups, state_dim] */
  const DLTensor *z;              /* [rows, heads, head_dim], present exactly when gate is 1 */
  const DLTensor *a;              /* fp32 [heads], or [heads, state_dim] with state_decays */
  const DLTensor *d;              /* fp32 [heads], present exactly when skip is 1 */
  const DLTensor *dt_bias;        /* fp32 [heads], present exactly when the spec's dt_bias is 1 */
  const DLTensor *initial_states; /* fp32 [beginning, heads, head_dim, state_dim]; where there are some */
  const DLTensor *y;              /* [rows, heads, head_dim], written */
  const DLTensor *final_states;   /* fp32 [ending, heads, head_dim, state_dim], written; where they are wanted */
  void *stream;
  /* Since interface 4: of an update in place, which has no initial_states: row s goes on in state slots[s] of
   * final_states, which are then any number of states. int32 [rows], each slot once; below 0: the row is padding, no
   * state is written and its y is zeros. Checked in host memory, the caller's affair in a device's. NULL: row s has
   * state s. */
  const DLTensor *slots;
} ringattn_ssm_tensors;

ringattn_status ringattn_ssm_run(ringattn_ssm *ssm, const ringattn_ssm_tensors *tensors);
ringattn_status ringattn_ssm_enqueue(ringattn_ssm *ssm, const ringattn_ssm_tensors *tensors);
ringattn_status ringattn_ssm_wait(ringattn_ssm *ssm);
void ringattn_ssm_destroy(ringattn_ssm *ssm);

/* ---- Causal depthwise convolutions in front of scans, since interface 4 ---- */

/* y_t = bias + sum over k of weight[k] * x_(t - width + 1 + k), then silu where it is wanted. Names are those of
 * causal_conv1d, tokens stand before channels. An update has the bits of its token in a run. */
typedef struct ringattn_causal_conv1d_spec {
  uint64_t size;
  DLDataType dtype; /* of x, y and halos */
  int32_t width;    /* 2 to 4 */
  int64_t channels;
  int32_t bias; /* 1: there is one */
  int32_t silu; /* 1: y = v / (1 + exp(-v)) of the sum v */
} ringattn_causal_conv1d_spec;

typedef struct ringattn_causal_conv1d ringattn_causal_conv1d;

/* Sequences and runs are a scan's, and so are options but for memory_budget. States are halos: the last width - 1 tokens
 * of a sequence, oldest first. */
ringattn_status ringattn_causal_conv1d_create(ringattn_world *world, const ringattn_causal_conv1d_spec *spec,
                                            const ringattn_ssm_batch *batch, const ringattn_options *options,
                                            ringattn_causal_conv1d **conv1d);
/* Of a scan's facts; memory_bytes: of the rows of this rank, x and y. */
ringattn_status ringattn_causal_conv1d_get_facts(const ringattn_causal_conv1d *conv1d, ringattn_ssm_facts *facts);

typedef struct ringattn_causal_conv1d_tensors {
  uint64_t size;
  const DLTensor *x;             /* [rows, 1, channels] */
  const DLTensor *weight;        /* fp32 [channels, width] */
  const DLTensor *bias;          /* fp32 [channels], present exactly when the spec's bias is 1 */
  const DLTensor *initial_halos; /* [beginning, width - 1, channels], dense; where there are some; NULL: in place */
  const DLTensor *y;             /* [rows, 1, channels], written */
  const DLTensor *final_halos;   /* [ending, width - 1, channels], dense, written; where they are wanted */
  const DLTensor *slots;         /* of an update in place, as a scan's */
  void *stream;
} ringattn_causal_conv1d_tensors;

ringattn_status ringattn_causal_conv1d_run(ringattn_causal_conv1d *conv1d,
                                         const ringattn_causal_conv1d_tensors *tensors);
ringattn_status ringattn_causal_conv1d_enqueue(ringattn_causal_conv1d *conv1d,
                                             const ringattn_causal_conv1d_tensors *tensors);
ringattn_status ringattn_causal_conv1d_wait(ringattn_causal_conv1d *conv1d);
void ringattn_causal_conv1d_destroy(ringattn_causal_conv1d *conv1d);

/* ---- Compression of keys and values, since interface 3 ---- */

/* Between a tensor and a format that stores it (ringattn_compressed), in the memory of a world's device. */
typedef struct ringattn_compression ringattn_compression;

typedef struct ringattn_compression_spec {
  uint64_t size;
  const char *format; /* "fp8 token_head", "int4_token group 32", ...: the words of docs/compression.md */
  int64_t sequences;  /* of the tensor */
  int64_t seed;       /* of codebooks */
  DLDataType dtype;   /* of what decompression gives: {kDLFloat, 16, 1} or {kDLBfloat, 16, 1} */
  int32_t heads;
  int64_t dim;
} ringattn_compression_spec;

/* Not collective. Of the options threads alone; others are refused. */
ringattn_status ringattn_compression_create(ringattn_world *world, const ringattn_compression_spec *spec,
                                            const ringattn_options *options, ringattn_compression **compression);

typedef struct ringattn_compression_facts {
  uint64_t size;
  int64_t streams;     /* how many there are */
  int64_t tables;      /* likewise */
  int64_t token_bytes; /* of all streams for one token */
  int64_t table_bytes; /* of all tables */
} ringattn_compression_facts;
ringattn_status ringattn_compression_get_facts(const ringattn_compression *compression,
                                               ringattn_compression_facts *facts);

enum { RINGATTN_STREAM = 0, RINGATTN_TABLE = 1 };
typedef struct ringattn_part {
  uint64_t size;
  const char *name; /* "codes", "scales", "basis", ...; valid as long as the library is loaded */
  DLDataType dtype; /* codes of fp8 are bytes: {kDLUInt, 8, 1}; DLPack's type of them, {10, 8, 1}, is read, too */
  int32_t axes;
  int64_t shape[4]; /* of a stream that of a token, [heads, width]; of a table all of it */
} ringattn_part;
/* Stream or table `index` of the format. */
ringattn_status ringattn_compression_get_part(const ringattn_compression *compression, int32_t kind, int32_t index,
                                              ringattn_part *part);

typedef struct ringattn_compression_tensors {
  uint64_t size;
  const char *name;       /* of the tensor, for messages; NULL: "x" */
  const int64_t *lengths; /* [sequences] tokens of each, one behind the other, in host memory */
  const DLTensor *plain;  /* [tokens, heads, dim] */
  const ringattn_compressed *compressed;
  void *stream; /* what was enqueued there is done before */
} ringattn_compression_tensors;

/* Writes `compressed` from `plain`, and returns when it is done. *energy_kept, unless NULL: of a format with a rank the
 * share of the sum of squares that its factors, and outliers beside them, keep, else 1. All tables but tails are found.
 * A number that is not finite is refused with its tensor and place; what is compressed then holds anything. Of
 * "int4_channel" rows behind a sequence's last full group, and places of tails that no token has, are left as they are:
 * nobody reads them. */
ringattn_status ringattn_compression_compress(ringattn_compression *compression,
                                              const ringattn_compression_tensors *tensors, double *energy_kept);
/* Writes `plain` from `compressed`, and returns when it is done. Scales, codes and tables that no compressed tensor has
 * (NaN, infinities, channels beyond the dim) are refused with part and place; `plain` then holds anything. */
ringattn_status ringattn_compression_decompress(ringattn_compression *compression,
                                                const ringattn_compression_tensors *tensors);
void ringattn_compression_destroy(ringattn_compression *compression);

/* The formats that a method ("fp8", "int8", "int4", "lowrank", "vq", "hybrid") gives keys and values of a spec; the words of
 * one format ("fp8 tensor") give it to both. ratio: the share of the bytes that is removed at least, 0: the method's usual
 * formats. */
typedef struct ringattn_formats {
  uint64_t size;
  char k[64];
  char v[64];
  double removed; /* the share of a token's bytes that these formats remove, tables aside */
} ringattn_formats;
ringattn_status ringattn_choose_formats(const char *method, double ratio, const ringattn_spec *spec,
                                        ringattn_formats *formats);

/* ---- Taking tokens out of keys and values, since interface 4 ---- */

/* Which tokens stay. Computed in host memory, by everyone who has the rows; not collective. */
typedef struct ringattn_eviction {
  uint64_t size;
  const char *method; /* "streaming", "knorm", "snapkv" or "expected"; with options as in docs/compression.md:
                       * "snapkv:window=32,heads=all" */
  double ratio;       /* the share of each sequence's tokens that is taken out, 0 to below 1; one at least is left */
  int64_t threads;    /* 0: all processors */
} ringattn_eviction;

/* kept: [sequences of the batch], tokens that are left of each of k_lengths. *heads: 1 where all K/V heads keep the same
 * tokens, else kv_heads. */
ringattn_status ringattn_eviction_kept(const ringattn_eviction *eviction, const ringattn_spec *spec,
                                       const ringattn_batch *batch, int64_t *kept, int64_t *heads);

typedef struct ringattn_eviction_tensors {
  uint64_t size;
  const DLTensor *q;         /* [queries of the batch, heads, head_dim], of which the last ones of each sequence are
                              * looked at; NULL for methods that look at keys alone */
  const DLTensor *k;         /* [keys of the batch, kv_heads, head_dim] */
  const DLTensor *v;         /* [keys of the batch, kv_heads, head_dim_v]; NULL without v_kept */
  const DLTensor *positions; /* int32 [kept of all sequences, heads], dense, written: the places of the tokens that are
                              * left, ascending for each head: ringattn_batch::k_positions */
  const DLTensor *k_kept;    /* [kept of all sequences, kv_heads, head_dim], written: their rows; or NULL */
  const DLTensor *v_kept;    /* [kept of all sequences, kv_heads, head_dim_v], written; or NULL */
} ringattn_eviction_tensors;

/* Numbers that are not finite are refused with their tensor and place. The same tokens stay with any number of threads. */
ringattn_status ringattn_evict(const ringattn_eviction *eviction, const ringattn_spec *spec,
                               const ringattn_batch *batch, const ringattn_eviction_tensors *tensors);

#ifdef __cplusplus
}
#endif

#include "ringattn_mla.h"

#endif /* RINGATTN_OPS_H */
