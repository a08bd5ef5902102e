/* SPDX-License-Identifier: Apache-2.0
 *
 * C API of multi-head latent attention (MLA), of its decode, and of the batched GEMM that absorbs and expands its
 * matrices. ringattn_ops.h includes this header. ringattn.h has the rules of all calls; functions work as those of
 * ringattn_attention.
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
  float softmax_scale; /* 0: 1 / sqrt(head_dim + rope_dim), unless scale_given is 1 */
  float softcap;
  /* Since interface 4: format of latents and rotary keys. NULL: two tensors of dtype. "latent rope 64", with rope_dim
   * 64: FlashMLA's FP8 layout in U8 rows: latent_dim E4M3 values, latent_dim / 128 fp32 scales, rope_dim bf16 values.
   * It requires dtype bf16, latent_dim a multiple of 128 and rope_dim a multiple of 4, else RINGATTN_USAGE. */
  const char* format;
  int64_t scale_given; /* since interface 5. 1: use softmax_scale as given, even if it is 0 */
} ringattn_mla_spec;

/* The two forms round differently, so their results differ in some bits. */
enum {
  RINGATTN_ANY_FORM = 0, /* chosen by the longest query length */
  RINGATTN_EXPANDED = 1, /* K and V of every head are computed from the latents */
  RINGATTN_ABSORBED = 2  /* w_uk is multiplied into q, and w_uv into out */
};

typedef struct ringattn_mla ringattn_mla;

ringattn_status ringattn_mla_create(ringattn_world* world, const ringattn_mla_spec* spec, const ringattn_batch* batch,
                                    int32_t form, const ringattn_options* options, ringattn_mla** mla);

typedef struct ringattn_mla_facts {
  uint64_t size;
  int64_t q_rows;
  int64_t k_rows;
  uint64_t workspace_bytes;
  const char* kernel; /* of the attention */
  int64_t form;       /* RINGATTN_EXPANDED or RINGATTN_ABSORBED */
} ringattn_mla_facts;
ringattn_status ringattn_mla_get_facts(const ringattn_mla* mla, ringattn_mla_facts* facts);
ringattn_status ringattn_mla_rows(const ringattn_mla* mla, int32_t side, int64_t count, int64_t* packed_tokens,
                                  int64_t* sequence_tokens);

/* latent and k_rope may be columns of one tensor, w_uk and w_uv rows of one kv_b_proj. With a format, latent is the FP8
 * rows, U8 [k_rows, 1, row_bytes], at even addresses, and k_rope is NULL. */
typedef struct ringattn_mla_tensors {
  uint64_t size;
  const DLTensor* q;      /* [q_rows, heads, head_dim + rope_dim]; absorbed without w_uk: latent_dim + rope_dim */
  const DLTensor* latent; /* [k_rows, 1, latent_dim] */
  const DLTensor* k_rope; /* [k_rows, 1, rope_dim] */
  const DLTensor* w_uk;   /* [heads, head_dim, latent_dim]; NULL, only absorbed: q is in the latent space already */
  const DLTensor* w_uv;   /* [heads, head_dim_v, latent_dim]; NULL, only absorbed: out stays in the latent space */
  const DLTensor* sinks;
  const DLTensor* out; /* [q_rows, heads, head_dim_v]; without w_uv [q_rows, heads, latent_dim] */
  const DLTensor* lse;
  const DLTensor* workspace;
  void* stream;
} ringattn_mla_tensors;

ringattn_status ringattn_mla_run(ringattn_mla* mla, const ringattn_mla_tensors* tensors);
ringattn_status ringattn_mla_enqueue(ringattn_mla* mla, const ringattn_mla_tensors* tensors);
ringattn_status ringattn_mla_wait(ringattn_mla* mla);
void ringattn_mla_destroy(ringattn_mla* mla);

/* Gradients of q, latent, k_rope, w_uk and w_uv of a ringattn_mla in the expanded form, on the same shards.
 * RINGATTN_UNSUPPORTED for the absorbed form, a format, the option memory_budget, and devices and dims without a
 * kernel. Gradients of rows have the same bits for any world and layout. Those of matrices and sinks are sums over the
 * batch in a fixed order, and every rank gets the sum over all ranks: do not reduce them again. */
typedef struct ringattn_mla_backward ringattn_mla_backward;

/* Collective, as ringattn_attention_backward_create() and ringattn_attention_backward_create_from(). */
ringattn_status ringattn_mla_backward_create(ringattn_world* world, const ringattn_mla_spec* spec,
                                             const ringattn_batch* batch, const ringattn_options* options,
                                             ringattn_mla_backward** backward);
ringattn_status ringattn_mla_backward_create_from(ringattn_mla* mla, ringattn_mla_backward** backward);
ringattn_status ringattn_mla_backward_get_facts(const ringattn_mla_backward* backward, ringattn_mla_facts* facts);
ringattn_status ringattn_mla_backward_rows(const ringattn_mla_backward* backward, int32_t side, int64_t count,
                                           int64_t* packed_tokens, int64_t* sequence_tokens);

/* Tensors of this rank, and whole matrices, whose last axis is contiguous. */
typedef struct ringattn_mla_backward_tensors {
  uint64_t size;
  const DLTensor* q;         /* [q_rows, heads, head_dim + rope_dim] */
  const DLTensor* latent;    /* [k_rows, 1, latent_dim] */
  const DLTensor* k_rope;    /* [k_rows, 1, rope_dim] */
  const DLTensor* w_uk;      /* [heads, head_dim, latent_dim] */
  const DLTensor* w_uv;      /* [heads, head_dim_v, latent_dim] */
  const DLTensor* sinks;     /* [heads] fp32, present exactly when the spec's sinks is 1 */
  const DLTensor* out;       /* [q_rows, heads, head_dim_v], of the forward */
  const DLTensor* lse;       /* [q_rows, heads] fp32, any strides, of the forward */
  const DLTensor* dout;      /* [q_rows, heads, head_dim_v], gradient of out */
  const DLTensor* dlse;      /* [q_rows, heads] fp32, any strides, gradient of lse; NULL: 0 */
  const DLTensor* dq;        /* [q_rows, heads, head_dim + rope_dim], written */
  const DLTensor* dlatent;   /* [k_rows, 1, latent_dim], written */
  const DLTensor* dk_rope;   /* [k_rows, 1, rope_dim], written */
  const DLTensor* dw_uk;     /* [heads, head_dim, latent_dim] fp32, dense, written; the sum over all ranks */
  const DLTensor* dw_uv;     /* [heads, head_dim_v, latent_dim] fp32, dense, written; the sum over all ranks */
  const DLTensor* dsinks;    /* as in ringattn_attention_backward_tensors */
  const DLTensor* workspace; /* [workspace_bytes], any type, dense, aligned to 256 bytes; NULL: the object's own */
  void* stream;              /* a cudaStream_t; NULL: the default stream. Ignored on the host */
} ringattn_mla_backward_tensors;

ringattn_status ringattn_mla_backward_run(ringattn_mla_backward* backward,
                                          const ringattn_mla_backward_tensors* tensors);
/* As ringattn_attention_backward_enqueue(). */
ringattn_status ringattn_mla_backward_enqueue(ringattn_mla_backward* backward,
                                              const ringattn_mla_backward_tensors* tensors);
ringattn_status ringattn_mla_backward_wait(ringattn_mla_backward* backward);
void ringattn_mla_backward_destroy(ringattn_mla_backward* backward);

/* Decode over a latent cache, in the absorbed form. With kernels cpu_attention and sm80_attention a row has the bits of
 * an absorbed ringattn_mla over the whole sequence. sm90_mla and sm90_mla_split1k each have bits of their own. The
 * latter is selected only by options->kernel: its KV splits have fewer keys, which is faster for few sequences. */
typedef struct ringattn_mla_decode ringattn_mla_decode;

ringattn_status ringattn_mla_decode_create(ringattn_world* world, const ringattn_mla_spec* spec,
                                           const ringattn_decode_limits* limits, const ringattn_options* options,
                                           ringattn_mla_decode** decode);
ringattn_status ringattn_mla_decode_get_facts(const ringattn_mla_decode* decode, ringattn_decode_facts* facts);
ringattn_status ringattn_mla_decode_owned(const ringattn_mla_decode* decode, int64_t sequences, int64_t* first,
                                          int64_t* count);
int64_t ringattn_mla_decode_cache_tokens(const ringattn_mla_decode* decode, int64_t length);

/* Members that ringattn_decode_tensors also has mean the same as there. */
typedef struct ringattn_mla_decode_tensors {
  uint64_t size;
  const DLTensor* q;     /* [sequences * rows, heads, head_dim + rope_dim]; without w_uk latent_dim + rope_dim */
  const DLTensor* cache; /* [pages, page_size, 1, latent_dim + rope_dim]: latent, then rotary key. With a format U8
                          * [pages, page_size, 1, row_bytes]; sm90_mla and sm90_mla_split1k require its address and
                          * strides to be multiples of 16 bytes */
  const DLTensor* block_table;
  const DLTensor* lengths;
  const DLTensor* sinks;
  const DLTensor* latent; /* [sequences * rows, 1, latent_dim], new tokens to append; NULL: none */
  const DLTensor* k_rope; /* [sequences * rows, 1, rope_dim], exactly if latent is given */
  const DLTensor* w_uk;
  const DLTensor* w_uv;
  const DLTensor* out;
  const DLTensor* lse;
  const DLTensor* host_lengths;
  const DLTensor* host_table;
  void* stream;
  int32_t rows;
  int32_t update_lengths;
  const DLTensor* lengths_before; /* since interface 5 */
} ringattn_mla_decode_tensors;

ringattn_status ringattn_mla_decode_run(ringattn_mla_decode* decode, const ringattn_mla_decode_tensors* tensors);
ringattn_status ringattn_mla_decode_enqueue(ringattn_mla_decode* decode, const ringattn_mla_decode_tensors* tensors);
ringattn_status ringattn_mla_decode_wait(ringattn_mla_decode* decode);
void ringattn_mla_decode_destroy(ringattn_mla_decode* decode);

/* ---- Batched GEMM with one matrix per head, since interface 4 ---- */

/* out[row, head, n] = sum over k of rows[row, head, k] * weights[head, n, k], accumulated in fp32 and rounded once. It
 * absorbs w_uk into queries, maps outputs from the latent space by w_uv, and expands latents. A row's bits do not
 * depend on the other rows and heads of the call, and equal those that ringattn_mla and ringattn_mla_decode compute
 * from the same matrices. */
typedef struct ringattn_batched_gemm_spec {
  uint64_t size;
  DLDataType dtype; /* of rows, weights and out */
  int32_t heads;    /* maximum number of heads of a call, up to 65536. The number of rows is not limited */
  int32_t dim_k;    /* contracted dimension: a multiple of 8 */
  int32_t dim_n;    /* output dimension: a multiple of 8 */
} ringattn_batched_gemm_spec;

typedef struct ringattn_batched_gemm ringattn_batched_gemm;

/* Not collective: each rank multiplies its own rows. Uses only the options kernel and threads; others are refused. */
ringattn_status ringattn_batched_gemm_create(ringattn_world* world, const ringattn_batched_gemm_spec* spec,
                                             const ringattn_options* options, ringattn_batched_gemm** batched_gemm);

typedef struct ringattn_batched_gemm_facts {
  uint64_t size;
  uint64_t memory_bytes; /* allocated by the object */
  const char* kernel;
} ringattn_batched_gemm_facts;
ringattn_status ringattn_batched_gemm_get_facts(const ringattn_batched_gemm* batched_gemm,
                                                ringattn_batched_gemm_facts* facts);

typedef struct ringattn_batched_gemm_tensors {
  uint64_t size;
  const DLTensor* rows;    /* [rows, heads, dim_k], or [rows, 1, dim_k] if all heads share a row */
  const DLTensor* weights; /* [heads, dim_n, dim_k]; the stride of one of the last two axes is 1. w_uk with the strides
                            * that it has in kv_b_proj expands latents; with its last two axes exchanged it absorbs */
  const DLTensor* out;     /* [rows, heads, dim_n], written */
  void* stream;
} ringattn_batched_gemm_tensors;

ringattn_status ringattn_batched_gemm_run(ringattn_batched_gemm* batched_gemm,
                                          const ringattn_batched_gemm_tensors* tensors);
ringattn_status ringattn_batched_gemm_enqueue(ringattn_batched_gemm* batched_gemm,
                                              const ringattn_batched_gemm_tensors* tensors);
ringattn_status ringattn_batched_gemm_wait(ringattn_batched_gemm* batched_gemm);
void ringattn_batched_gemm_destroy(ringattn_batched_gemm* batched_gemm);

#ifdef __cplusplus
}
#endif
#endif /* RINGATTN_MLA_H */
