/* SPDX-License-Identifier: Apache-2.0
 *
 * C API of linear layers in files. ringattn.h includes this header and has the rules of all calls. docs/linear.md lists
 * the formats.
 */
#ifndef RINGATTN_LAYERS_H
#define RINGATTN_LAYERS_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Linear layers in files, since interface 6 ---- */

/* A layer of a safetensors file: floating-point, or quantized by compressed-tensors (int-quantized, pack-quantized),
 * GPTQ or AWQ. ringattn_layer_read() returns the same form for all formats. No world is needed. */
typedef struct ringattn_layer ringattn_layer;

/* path: a safetensors file, its *.index.json, or a model's folder. name: of the layer, such as
 * "model.layers.0.mlp.down_proj"; "" or NULL: tensors without a prefix. config: a config.json with
 * quantization_config; NULL: the one beside the file, if there is one. Checks names, types and shapes, and reads no
 * weights. RINGATTN_FILE if the layer's format, width or group size is not supported. */
ringattn_status ringattn_layer_open(const char* path, const char* name, const char* config, ringattn_layer** layer);

typedef struct ringattn_layer_facts {
  uint64_t size;
  int64_t out_features; /* N */
  int64_t in_features;  /* K */
  const char* format;   /* "float", "int-quantized", "pack-quantized", "gptq", "gptq_v2", "awq" */
  const char* name;     /* of the layer */
  DLDataType dtype;     /* of floating-point weights, or of quantized weights' scales in the file */
  int32_t weights;      /* 0: floating-point, 1: int8, 2: int4 in groups of 128 */
  int32_t zeros;        /* 1: the groups have zeros; else all are 8 */
  DLDataType bias;      /* of the bias; bits is 0 if there is none */
} ringattn_layer_facts;
/* Strings are valid as long as the layer. */
ringattn_status ringattn_layer_get_facts(const ringattn_layer* layer, ringattn_layer_facts* facts);

/* Reads rows [row, row + rows) and features [feature, feature + features) of W into dense host memory. int4: features
 * are whole groups. An output that is NULL is skipped. An output that the layer doesn't
 * have is refused.
 * values: [rows, features] of the dtype, or int8; int4: uint8 [rows, features / 2], the even element in the low half.
 * scales: fp32; int8 [rows], int4 [rows, features / 128]. zeros: uint8, as scales.
 * bias: [rows], of the type in the file. */
ringattn_status ringattn_layer_read(const ringattn_layer* layer, int64_t row, int64_t rows, int64_t feature,
                                    int64_t features, void* values, float* scales, uint8_t* zeros, void* bias);
void ringattn_layer_destroy(ringattn_layer* layer);

#ifdef __cplusplus
}
#endif
#endif /* RINGATTN_LAYERS_H */
