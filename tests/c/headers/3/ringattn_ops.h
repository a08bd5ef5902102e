/* SPDX-License-Identifier: Apache-2.0
 *
 * The other ops of ringattn in C: decoding from a cache, latent attention, scans; and compression of keys and values.
 * ringattn.h includes it and has the rules; each op has the form of ringattn_attention: create, facts, run or enqueue and
 * wait, destroy.
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
  int64_t kv_split_keys;
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
  const DLTensor *lengths;     /* int32 [sequences]: keys, over all ranks; row i stands at length - rows + i */
  const DLTensor *sinks;       /* [heads] fp32, present exactly when the spec's sinks is 1 */
  const DLTensor *k_new;       /* [sequences * rows, kv_heads, head_dim], written into the cache first; or NULL */
  const DLTensor *v_new;       /* [sequences * rows, kv_heads, head_dim_v], exactly where k_new is */
  const DLTensor *out;         /* [own rows, heads, head_dim_v], written: of the sequences of ringattn_decode_owned() */
  const DLTensor *lse;         /* [own rows, heads] fp32, written; or NULL */
  const DLTensor *host_lengths; /* what lengths (when they have grown) and block_table hold, in host memory, */
  const DLTensor *host_table;   /* where the caller knows it; or NULL */
  void *stream;
  int32_t rows; /* of a sequence; 0: 1 */
  int32_t grow; /* 1: `rows` is added to every length before anything else is done */
  /* Since interface 3: instead of k and v, exactly where the spec has their formats. k_new and v_new are compressed as
   * they are written: with the tables that are there, and into tails, which have a place for each sequence of the step. */
  const ringattn_compressed *compressed_k;
  const ringattn_compressed *compressed_v;
} ringattn_decode_tensors;

ringattn_status ringattn_decode_run(ringattn_decode *decode, const ringattn_decode_tensors *tensors);
ringattn_status ringattn_decode_enqueue(ringattn_decode *decode, const ringattn_decode_tensors *tensors);
ringattn_status ringattn_decode_wait(ringattn_decode *decode);
void ringattn_decode_destroy(ringattn_decode *decode);

/* ---- Multi-head latent attention (DeepSeek's MLA), since interface 2 ---- */

typedef struct ringattn_mla_spec {
  uint64_t size;
  DLDataType dtype;
  int32_t heads;
  int32_t head_dim;   /* of q and k without the rotary part */
  int32_t rope_dim;   /* of the rotary part of q, and of k_rope */
  int32_t head_dim_v; /* of v and out */
  int32_t latent_dim;
  int32_t mask;
  int32_t sinks;
  int64_t window_left;
  int64_t window_right;
  float softmax_scale; /* 0: 1 / sqrt(head_dim + rope_dim) */
  float softcap;
} ringattn_mla_spec;

enum {
  RINGATTN_ANY_FORM = 0, /* by the longest query length */
  RINGATTN_EXPANDED = 1, /* keys and values of every head are made of the latents; bits of its own */
  RINGATTN_ABSORBED = 2  /* the matrices are multiplied into q and out instead; bits of its own */
};

typedef struct ringattn_mla ringattn_mla;

ringattn_status ringattn_mla_create(ringattn_world *world, const ringattn_mla_spec *spec,
                                       const ringattn_batch *batch, int32_t form, const ringattn_options *options,
                                       ringattn_mla **mla);

typedef struct ringattn_mla_facts {
  uint64_t size;
  int64_t q_rows;
  int64_t k_rows;
  uint64_t workspace_bytes;
  const char *kernel; /* that folds */
  int64_t form;       /* RINGATTN_EXPANDED or RINGATTN_ABSORBED */
} ringattn_mla_facts;
ringattn_status ringattn_mla_get_facts(const ringattn_mla *mla, ringattn_mla_facts *facts);
ringattn_status ringattn_mla_rows(const ringattn_mla *mla, int32_t side, int64_t count, int64_t *packed_tokens,
                                     int64_t *sequence_tokens);

/* latent and k_rope may be columns of one tensor, w_uk and w_uv rows of one kv_b_proj. */
typedef struct ringattn_mla_tensors {
  uint64_t size;
  const DLTensor *q;      /* [q_rows, heads, head_dim + rope_dim]; absorbed without w_uk: latent_dim + rope_dim */
  const DLTensor *latent; /* [k_rows, 1, latent_dim] */
  const DLTensor *k_rope; /* [k_rows, 1, rope_dim] */
  const DLTensor *w_uk;   /* [heads, head_dim, latent_dim]; absorbed: or NULL, q is in the latent already */
  const DLTensor *w_uv;   /* [heads, head_dim_v, latent_dim]; absorbed: or NULL, out stays in the latent */
  const DLTensor *sinks;
  const DLTensor *out; /* [q_rows, heads, head_dim_v]; without w_uv [q_rows, heads, latent_dim] */
  const DLTensor *lse;
  const DLTensor *workspace;
  void *stream;
} ringattn_mla_tensors;

ringattn_status ringattn_mla_run(ringattn_mla *mla, const ringattn_mla_tensors *tensors);
ringattn_status ringattn_mla_enqueue(ringattn_mla *mla, const ringattn_mla_tensors *tensors);
ringattn_status ringattn_mla_wait(ringattn_mla *mla);
void ringattn_mla_destroy(ringattn_mla *mla);

/* Decoding over a cache of latents, with the bits of the absorbed form. */
typedef struct ringattn_mla_decode ringattn_mla_decode;

ringattn_status ringattn_mla_decode_create(ringattn_world *world, const ringattn_mla_spec *spec,
                                              const ringattn_decode_limits *limits, const ringattn_options *options,
                                              ringattn_mla_decode **decode);
ringattn_status ringattn_mla_decode_get_facts(const ringattn_mla_decode *decode, ringattn_decode_facts *facts);
ringattn_status ringattn_mla_decode_owned(const ringattn_mla_decode *decode, int64_t sequences, int64_t *first,
                                             int64_t *count);
int64_t ringattn_mla_decode_cache_tokens(const ringattn_mla_decode *decode, int64_t length);

/* Members that ringattn_decode_tensors has, too, are as there. */
typedef struct ringattn_mla_decode_tensors {
  uint64_t size;
  const DLTensor *q;     /* [sequences * rows, heads, head_dim + rope_dim]; without w_uk latent_dim + rope_dim */
  const DLTensor *cache; /* [pages, page_size, 1, latent_dim + rope_dim]: the latent, then the rotary key */
  const DLTensor *block_table;
  const DLTensor *lengths;
  const DLTensor *sinks;
  const DLTensor *latent; /* [sequences * rows, 1, latent_dim], new rows; or NULL */
  const DLTensor *k_rope; /* [sequences * rows, 1, rope_dim], exactly where latent is */
  const DLTensor *w_uk;
  const DLTensor *w_uv;
  const DLTensor *out;
  const DLTensor *lse;
  const DLTensor *host_lengths;
  const DLTensor *host_table;
  void *stream;
  int32_t rows;
  int32_t grow;
} ringattn_mla_decode_tensors;

ringattn_status ringattn_mla_decode_run(ringattn_mla_decode *decode,
                                           const ringattn_mla_decode_tensors *tensors);
ringattn_status ringattn_mla_decode_enqueue(ringattn_mla_decode *decode,
                                               const ringattn_mla_decode_tensors *tensors);
ringattn_status ringattn_mla_decode_wait(ringattn_mla_decode *decode);
void ringattn_mla_decode_destroy(ringattn_mla_decode *decode);

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
  float dt_min;
  float dt_max;
} ringattn_ssm_spec;

typedef struct ringattn_ssm_batch {
  uint64_t size;
  int64_t sequences;
  const int64_t *lengths; /* [sequences], at least 1 each */
  int32_t initial_states; /* 1: sequences start from given states, else from zero */
  int32_t final_states;   /* 1: the states behind them are wanted */
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
  int64_t beginning; /* sequences whose first token this rank has: as many initial states */
  int64_t ending;    /* sequences whose last token this rank has: as many final states */
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
} ringattn_ssm_tensors;

ringattn_status ringattn_ssm_run(ringattn_ssm *ssm, const ringattn_ssm_tensors *tensors);
ringattn_status ringattn_ssm_enqueue(ringattn_ssm *ssm, const ringattn_ssm_tensors *tensors);
ringattn_status ringattn_ssm_wait(ringattn_ssm *ssm);
void ringattn_ssm_destroy(ringattn_ssm *ssm);

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
 * share of the sum of squares that its factors keep, else 1. Bases and codebooks are found in host memory alone
 * (RINGATTN_UNSUPPORTED on a device). A number that is not finite is refused with its tensor and place; what is
 * compressed then holds anything. Of "int4_channel" rows behind a sequence's last full group, and places of tails that
 * no token has, are left as they are: nobody reads them. */
ringattn_status ringattn_compression_compress(ringattn_compression *compression,
                                              const ringattn_compression_tensors *tensors, double *energy_kept);
/* Writes `plain` from `compressed`, and returns when it is done. Scales, codes and tables that no compressed tensor has
 * (NaN, infinities, channels beyond the dim) are refused with part and place; `plain` then holds anything. */
ringattn_status ringattn_compression_decompress(ringattn_compression *compression,
                                                const ringattn_compression_tensors *tensors);
void ringattn_compression_destroy(ringattn_compression *compression);

/* The formats that a method ("fp8", "int8", "int4", "lowrank", "vq", "hybrid") gives keys and values of a spec. ratio: the
 * share of the bytes that is removed at least, 0: the method's usual formats. */
typedef struct ringattn_formats {
  uint64_t size;
  char k[64];
  char v[64];
  double removed; /* the share of a token's bytes that these formats remove, tables aside */
} ringattn_formats;
ringattn_status ringattn_choose_formats(const char *method, double ratio, const ringattn_spec *spec,
                                        ringattn_formats *formats);

#ifdef __cplusplus
}
#endif
#endif /* RINGATTN_OPS_H */
