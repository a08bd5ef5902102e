/* SPDX-License-Identifier: Apache-2.0
 *
 * C API of linear layers. ringattn.h includes this header and has the rules of all calls. docs/linear.md has the
 * arithmetic.
 */
#ifndef RINGATTN_LINEAR_H
#define RINGATTN_LINEAR_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Linear layers, since interface 6 ---- */

/* y = activation(x * W^T + bias). A row of y has the same bits for any number of rows, and for any number of ranks that
 * share the layer. Names are those of torch.nn.Linear. */
typedef struct ringattn_linear ringattn_linear;

enum { RINGATTN_WEIGHTS_FLOAT = 0, RINGATTN_WEIGHTS_INT8 = 1, RINGATTN_WEIGHTS_INT4 = 2 };
/* How ranks share a layer. RINGATTN_PARALLEL_ROW gives other bits than the other two, even on one rank.
 * none:   each rank has the whole layer and its own tokens; no communication.
 * column: each rank has some rows of W, and all tokens; up to 8 ranks.
 * row:    each rank has some columns of W and of x, and all tokens; up to 8 ranks. */
enum { RINGATTN_PARALLEL_NONE = 0, RINGATTN_PARALLEL_COLUMN = 1, RINGATTN_PARALLEL_ROW = 2 };
/* What a rank gets of y.
 * shard:      none: the tokens of its x; column: its columns of all tokens; row: its tokens, all columns.
 * tokens:     its tokens, all columns.
 * replicated: all tokens and columns; not with RINGATTN_PARALLEL_NONE on several ranks. */
enum { RINGATTN_OUTPUT_SHARD = 0, RINGATTN_OUTPUT_TOKENS = 1, RINGATTN_OUTPUT_REPLICATED = 2 };

typedef struct ringattn_linear_spec {
  uint64_t size;
  DLDataType dtype;     /* of x, y and bias, and of floating-point weights */
  int32_t weights;      /* RINGATTN_WEIGHTS_... */
  int64_t in_features;  /* K, of the whole layer */
  int64_t out_features; /* N, of the whole layer; of a gated layer the columns of y */
  const char*
      activation;      /* "none", "gelu", "gelu_tanh", "silu"; gated: "swiglu", "geglu", "geglu_tanh"; NULL: "none" */
  int32_t bias;        /* 1: there is a bias */
  int32_t parallel;    /* RINGATTN_PARALLEL_... */
  int64_t max_tokens;  /* of a call; buffers are made for it */
  int64_t output;      /* RINGATTN_OUTPUT_... */
  int64_t column_unit; /* RINGATTN_PARALLEL_COLUMN: number of adjacent columns of y that always stay on one rank: 128 if
                        * an INT4 layer reads y. 0: 16, or 128 if this layer is INT4 */
} ringattn_linear_spec;

/* Collective. Uses only the options kernel, threads and timeout_seconds; others are refused. */
ringattn_status ringattn_linear_create(ringattn_world* world, const ringattn_linear_spec* spec,
                                       const ringattn_options* options, ringattn_linear** linear);

typedef struct ringattn_linear_facts {
  uint64_t size;
  int64_t features_begin; /* this rank's columns of W and x: [features_begin, features_end) */
  int64_t features_end;
  int64_t columns_begin; /* this rank's rows of W: [columns_begin, columns_end); gated: of each of the two matrices */
  int64_t columns_end;
  uint64_t packed_bytes; /* of the kernel's own copy of the weights; 0: it reads the caller's */
  uint64_t memory_bytes; /* allocated by the object, packed_bytes included */
  const char* kernel;
} ringattn_linear_facts;
ringattn_status ringattn_linear_get_facts(const ringattn_linear* linear, ringattn_linear_facts* facts);
/* The tokens [*first, *first + *count) of `tokens` that this rank gets where y is divided by tokens. */
ringattn_status ringattn_linear_tokens(const ringattn_linear* linear, int64_t tokens, int64_t* first, int64_t* count);

/* This rank's weights; n and k are its numbers of columns and features. In a gated layer `weight`, `scales`, `zeros`
 * and `bias` either have 2 n rows, those of the gate matrix first, or they have n rows, and the up_ members have
 * those of the up matrix. */
typedef struct ringattn_linear_weights {
  uint64_t size;
  const DLTensor*
      weight; /* [n, k] of the dtype; int8 [n, k]; INT4: uint8 [n, k / 2], the even element in the low half */
  const DLTensor* scales; /* INT8: fp32 [n]; INT4: fp32 [n, k / 128]; dense */
  const DLTensor* zeros;  /* INT4: uint8 [n, k / 128], dense, each 0 to 15; NULL: all are 8 */
  const DLTensor* bias;   /* [n] of the dtype, exactly if the spec's bias is 1 */
  const DLTensor* up_weight;
  const DLTensor* up_scales;
  const DLTensor* up_zeros;
  const DLTensor* up_bias;
  void* stream;
} ringattn_linear_weights;

/* Call it before the first run, and whenever the weights change. Not collective. Scales and biases must stay valid
 * as long as the object, and so must weights unless packed_bytes is above 0. */
ringattn_status ringattn_linear_load(ringattn_linear* linear, const ringattn_linear_weights* weights);

typedef struct ringattn_linear_tensors {
  uint64_t size;
  const DLTensor* x; /* [tokens, 1, this rank's features] */
  const DLTensor* y; /* [tokens or this rank's tokens, 1, this rank's columns or out_features], written */
  void* stream;
} ringattn_linear_tensors;

/* Collective if ranks share the layer: all pass the same number of tokens. run() checks that, and enqueue() does
 * not. */
ringattn_status ringattn_linear_run(ringattn_linear* linear, const ringattn_linear_tensors* tensors);
ringattn_status ringattn_linear_enqueue(ringattn_linear* linear, const ringattn_linear_tensors* tensors);
ringattn_status ringattn_linear_wait(ringattn_linear* linear);
void ringattn_linear_destroy(ringattn_linear* linear);

/* Gradients of a floating-point ringattn_linear, on the same shards. A row of dx has the same bits for any number of
 * tokens and of ranks. dweight and dbias are sums over the call's tokens in a fixed order; ranks that share the layer
 * have those of their shard. Ranks that don't share it must still add theirs. */
typedef struct ringattn_linear_backward ringattn_linear_backward;

/* Collective. Takes the arguments of the forward. RINGATTN_UNSUPPORTED: quantized weights; numbers of features that
 * are not multiples of 8; several ranks and an output that is divided by tokens; a gated layer on several ranks
 * whose out_features is not a multiple of 128. */
ringattn_status ringattn_linear_backward_create(ringattn_world* world, const ringattn_linear_spec* spec,
                                                const ringattn_options* options, ringattn_linear_backward** backward);
/* packed_bytes is 0; kernel is that of dx. */
ringattn_status ringattn_linear_backward_get_facts(const ringattn_linear_backward* backward,
                                                   ringattn_linear_facts* facts);
/* The rows of this rank's weight [n, k], gated [2 n, k], in the order in which dx sums them: runs [begins[i], ends[i]),
 * of which there are *count, at most 16. begins and ends have 16 elements. */
ringattn_status ringattn_linear_backward_order(const ringattn_linear_backward* backward, int64_t* begins, int64_t* ends,
                                               int64_t* count);

/* n and k are this rank's numbers of columns and features; 2 n instead of n if the layer is gated. */
typedef struct ringattn_linear_backward_tensors {
  uint64_t size;
  const DLTensor* x;          /* [tokens, 1, k] */
  const DLTensor* dy;         /* gradient of y, of its shape */
  const DLTensor* weight;     /* [n, k] as in the forward, stacked; exactly if there is an activation */
  const DLTensor* bias;       /* [n]; exactly if there is an activation, and a bias */
  const DLTensor* transposed; /* [k, n], the weight transposed, with its columns in the order of
                               * ringattn_linear_backward_order(); exactly if dx is given */
  const DLTensor* dx;      /* [tokens, 1, k], written; NULL: not wanted, on any rank. RINGATTN_PARALLEL_COLUMN: the sum
                            * over all ranks, on each */
  const DLTensor* dweight; /* fp32 [n, k], dense, written; NULL: not wanted */
  const DLTensor* dbias;   /* fp32 [n], written; NULL: not wanted */
  void* stream;
} ringattn_linear_backward_tensors;

ringattn_status ringattn_linear_backward_run(ringattn_linear_backward* backward,
                                             const ringattn_linear_backward_tensors* tensors);
ringattn_status ringattn_linear_backward_enqueue(ringattn_linear_backward* backward,
                                                 const ringattn_linear_backward_tensors* tensors);
ringattn_status ringattn_linear_backward_wait(ringattn_linear_backward* backward);
void ringattn_linear_backward_destroy(ringattn_linear_backward* backward);

/* Sums gradients over ranks that have different tokens, with the same bits for any number of ranks. A step's tokens
 * are divided into 8 contiguous leaves, whatever the number of ranks. Rank r of P has leaves 8r/P to 8(r+1)/P,
 * rounded down; with more than 8 ranks some have none. Leaves are added in fp32 by a fixed binary tree. */
typedef struct ringattn_gradient_reduction ringattn_gradient_reduction;

/* Collective. elements: of the gradients, the same on every rank. parameters: a text that lists the parameters in
 * order, such as "float32 [4, 3], float32 [3]"; ranks whose texts differ are refused. NULL: only elements are
 * compared. Uses only the options kernel, threads and timeout_seconds; others are refused. */
ringattn_status ringattn_gradient_reduction_create(ringattn_world* world, int64_t elements, const char* parameters,
                                                   const ringattn_options* options,
                                                   ringattn_gradient_reduction** reduction);

typedef struct ringattn_gradient_reduction_facts {
  uint64_t size;
  int64_t leaves_begin; /* this rank's leaves: [leaves_begin, leaves_end) */
  int64_t leaves_end;
  uint64_t memory_bytes; /* allocated by the object */
  const char* kernel;
} ringattn_gradient_reduction_facts;
ringattn_status ringattn_gradient_reduction_get_facts(const ringattn_gradient_reduction* reduction,
                                                      ringattn_gradient_reduction_facts* facts);

/* Forgets the leaves that were added since the last sum. Not collective. */
ringattn_status ringattn_gradient_reduction_reset(ringattn_gradient_reduction* reduction);

/* Adds the gradient of this rank's next leaf, dense fp32 [elements]. NULL: the leaf has no tokens, and is left out. Not
 * collective. */
ringattn_status ringattn_gradient_reduction_add(ringattn_gradient_reduction* reduction, const DLTensor* gradient,
                                                void* stream);

typedef struct ringattn_gradient_reduction_tensors {
  uint64_t size;
  const DLTensor* sum; /* dense fp32 [elements], written on every rank */
  void* stream;
} ringattn_gradient_reduction_tensors;

/* Collective, after each rank has added its leaves. The next ringattn_gradient_reduction_add() begins the next sum. */
ringattn_status ringattn_gradient_reduction_run(ringattn_gradient_reduction* reduction,
                                                const ringattn_gradient_reduction_tensors* tensors);
ringattn_status ringattn_gradient_reduction_enqueue(ringattn_gradient_reduction* reduction,
                                                    const ringattn_gradient_reduction_tensors* tensors);
ringattn_status ringattn_gradient_reduction_wait(ringattn_gradient_reduction* reduction);
void ringattn_gradient_reduction_destroy(ringattn_gradient_reduction* reduction);

#ifdef __cplusplus
}
#endif
#endif /* RINGATTN_LINEAR_H */
