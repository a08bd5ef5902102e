/* SPDX-License-Identifier: Apache-2.0
 *
 * Mla attention in C, its decoding, and the products around it, of the form of ringattn_attention. ringattn_ops.h, which
 * has limits and facts of decoding, includes it; ringattn.h has the rules.
 */
#ifndef RINGATTN_MLA_H
#define RINGATTN_MLA_H

#include "ringattn_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

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
  /* Since interface 4: how latents and rotary keys lie. NULL: as they are. "latent rope 64", with rope_dim 64: FlashMLA's
     rows of 8 bits, U8, each of latent_dim codes of E4M3, latent_dim / 128 scales of fp32 and rope_dim numbers of bf16.
     Then dtype is bf16, latent_dim a multiple of 128 and rope_dim one of 4, else RINGATTN_USAGE. */
  const char *format;
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

/* latent and k_rope may be columns of one tensor, w_uk and w_uv rows of one kv_b_proj. With a format, latent is the rows
   of 8 bits, U8 [k_rows, 1, bytes of a row], at even addresses, and k_rope NULL. */
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

/* Decoding over a cache of latents in the absorbed form. With the kernels cpu_attention and sm80_attention rows have the bits of a
   ringattn_mla of that form over the whole sequence; sm90_mla has bits of its own, and so has sm90_mla_split1k, which
   is taken where the options' kernel names it: its groups have fewer keys, which is faster for few sequences. */
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
  const DLTensor *cache; /* [pages, page_size, 1, latent_dim + rope_dim]: the latent, then the rotary key; with a format
                            U8 [pages, page_size, 1, bytes of a row], of which sm90_mla and sm90_mla_split1k want the
                            start and the strides to be multiples of 16 bytes */
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

/* ---- Products of heads with their matrices, since interface 4 ---- */

/* out[row, head, o] = sum over i of rows[row, head, i] * weights[head, o, i], in fp32 and rounded once: what absorbs w_uk
 * into queries, takes outputs in the latent back by w_uv, and expands latents. A row has the same bits whatever rows and heads
 * are multiplied beside it, and those that ringattn_mla and ringattn_mla_decode make of the same matrices. */
typedef struct ringattn_batched_gemm_spec {
  uint64_t size;
  DLDataType dtype; /* of rows, weights and out */
  int32_t heads;    /* the most that a call multiplies, up to 65536; of rows it may have any number */
  int32_t dim_k;    /* numbers of a row, which are summed over: a multiple of 8 */
  int32_t dim_n;    /* numbers of a row of out: a multiple of 8 */
} ringattn_batched_gemm_spec;

typedef struct ringattn_batched_gemm ringattn_batched_gemm;

/* Nothing of it is collective: each rank multiplies the rows that it has. Of the options kernel and threads; others are
 * refused. */
ringattn_status ringattn_batched_gemm_create(ringattn_world *world, const ringattn_batched_gemm_spec *spec,
                                             const ringattn_options *options, ringattn_batched_gemm **batched_gemm);

typedef struct ringattn_batched_gemm_facts {
  uint64_t size;
  uint64_t memory_bytes; /* that the object has allocated */
  const char *kernel;
} ringattn_batched_gemm_facts;
ringattn_status ringattn_batched_gemm_get_facts(const ringattn_batched_gemm *batched_gemm,
                                                ringattn_batched_gemm_facts *facts);

typedef struct ringattn_batched_gemm_tensors {
  uint64_t size;
  const DLTensor *rows;    /* [rows, heads, dim_k], or [rows, 1, dim_k]: all heads share a row */
  const DLTensor *weights; /* [heads, dim_n, dim_k], where the stride of one of the last two axes is 1: w_uk of a kv_b_proj is
                            * an expansion as it lies, and with these axes exchanged the absorption */
  const DLTensor *out;     /* [rows, heads, dim_n], written */
  void *stream;
} ringattn_batched_gemm_tensors;

ringattn_status ringattn_batched_gemm_run(ringattn_batched_gemm *batched_gemm,
                                          const ringattn_batched_gemm_tensors *tensors);
ringattn_status ringattn_batched_gemm_enqueue(ringattn_batched_gemm *batched_gemm,
                                              const ringattn_batched_gemm_tensors *tensors);
ringattn_status ringattn_batched_gemm_wait(ringattn_batched_gemm *batched_gemm);
void ringattn_batched_gemm_destroy(ringattn_batched_gemm *batched_gemm);

#ifdef __cplusplus
}
#endif
#endif /* RINGATTN_MLA_H */
