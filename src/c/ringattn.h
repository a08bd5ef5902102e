/* SPDX-License-Identifier: Apache-2.0
 *
 * C API of ringattn: exact attention with bitwise equal results for any number of ranks. A program needs this header,
 * the headers that it includes (ringattn_ops.h, ringattn_mla.h, ringattn_linear.h and ringattn_layers.h), and the
 * library libringattn_c.so.
 *
 *   ringattn_world_options where = {.size = sizeof where, .abi = RINGATTN_ABI};
 *   ringattn_world *world;
 *   if (ringattn_world_self(&where, &world) != RINGATTN_OK) puts(ringattn_error_text());
 *
 * Rules that hold for every function:
 *
 * - A call returns RINGATTN_OK or an error code. No C++ exception crosses the API. ringattn_error_text() describes the
 *   last call that failed on this thread: the problem, the reason and a suggestion. A failed call leaves its outputs
 *   unchanged, unless a function says otherwise.
 * - Each struct begins with its size. A member that is 0 or NULL has its default, so clear a struct, set its size, and
 *   set the members that differ. The library accepts structs of older headers and gives defaults to members that they
 *   lack. It refuses larger structs than its own and a newer RINGATTN_ABI (RINGATTN_USAGE).
 * - Tensors are DLPack tensors: `const DLTensor *` is a view that the caller owns and that is read during the call.
 *   Strides count elements. Any strides are accepted except for the innermost axis, whose stride is 1. NULL strides
 *   mean a dense tensor. byte_offset is honoured. The stride of an axis of one element is ignored. Output tensors must
 *   not overlap other tensors, except states that are updated in place. The data lies in the memory of the world's
 *   device and must stay valid until the work that uses it is done: until run() returns, or until the stream has passed
 *   the work of enqueue().
 * - A process that forked from a process that had used the library can't use it (RINGATTN_UNSUPPORTED), because fork()
 *   does not copy threads. Start workers by spawn, or fork first.
 * - Objects keep references to what they were made from, so a world may be destroyed before its objects. One world and
 *   all of its objects are used by one thread at a time. A concurrent call is refused (RINGATTN_USAGE) and changes
 *   nothing. Creating an object and run() are collective: every rank of the world calls them in the same order with the
 *   same arguments, except for its own tensors. Every rank also calls enqueue() in the same order, but enqueue() does
 *   not wait for other ranks.
 */
#ifndef RINGATTN_H
#define RINGATTN_H

#include <stddef.h>
#include <stdint.h>

/* DLPack's own header if it is on the include path. Otherwise the declarations that this API needs, which have not
 * changed since DLPack 0.6. A program that has dlpack.h under another path includes it before this header. */
#ifndef DLPACK_DLPACK_H_
#if defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#endif
#endif
#ifndef DLPACK_DLPACK_H_
typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 } DLDeviceType;
typedef enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 } DLDataTypeCode;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code; /* DLDataTypeCode */
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides; /* elements; NULL: dense */
  uint64_t byte_offset;
} DLTensor;
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Rises by one when a declaration is added. Declarations are never removed: the library serves all interfaces from 6,
 * the first that was released, up to its own. */
#define RINGATTN_ABI 6

/* RINGATTN_ABI and version of the loaded library, e.g. "0.3.0". */
int32_t ringattn_abi(void);
const char* ringattn_version(void);

/* ---- Failures ---- */

typedef int32_t ringattn_status;
enum {
  RINGATTN_OK = 0,
  RINGATTN_WRONG_RESULT = 1,
  RINGATTN_USAGE = 2, /* the arguments contradict themselves, each other, or those of other ranks */
  RINGATTN_FILE = 3,
  RINGATTN_UNSUPPORTED = 4, /* not possible here: no kernel, no device, or ranks that differ */
  RINGATTN_MEMORY = 5,      /* a budget or a device is too small */
  RINGATTN_PEER = 6,        /* a peer failed, or a deadline passed */
  RINGATTN_INTERNAL = 7     /* a bug of the library */
};

/* Text of the last failed call on this thread, "problem (why). suggestion.", and its parts. "" if no call has failed.
 * Valid until the next call fails on this thread. */
const char* ringattn_error_text(void);
const char* ringattn_error_problem(void);
const char* ringattn_error_why(void);
const char* ringattn_error_suggestion(void);
ringattn_status ringattn_error_status(void);

/* Since interface 5. Lets the caller interrupt calls of this thread. A call asks poll(context) about every 0.1 seconds,
 * or less often while one kernel takes longer. If poll() returns nonzero, the call fails with RINGATTN_PEER ("the call
 * was interrupted"), and so do calls of other ranks that wait for this one. poll() runs on the calling thread and must
 * not call functions of the same world. NULL, the initial value, disables polling. */
typedef int32_t (*ringattn_poll)(void* context);
void ringattn_set_interrupt(ringattn_poll poll, void* context);

/* Tensor names that other libraries use, as a JSON array. Valid as long as the library is loaded. NULL if memory runs
 * out. An entry is an alias of a name of this library,
 *   {"name":"s_aux","role":"sinks","ops":["attention","decode","mla","mla_decode"]},
 * or a name that is refused because the tensor would change the result and is not supported,
 *   {"name":"alibi_slopes","refused":"no bias is added to scores","suggestion":"Leave it out.","ops":[...]}.
 * "ops" names the functions that it applies to. "unless":"dt" accepts the name in a file that has a tensor dt. */
const char* ringattn_tensor_names(void);

/* Since interface 6. Facts about this build and this machine for a bug report, one per line: what `ringattn
 * collect-env` prints, without its Python part. If a fact can't be found, its line says why. Initializes the CUDA
 * driver. Valid as long as the library is loaded. NULL if memory runs out. */
const char* ringattn_environment(void);

/* Since interface 6. Sets the SIMD target of this process's CPU kernels: "amx" (AVX-512 with AMX tiles for bf16),
 * "avx512", "avx2", "sse4", "neon", or "auto", the best target of the processor. Without a call, the environment
 * variable RINGATTN_SIMD_TARGET sets it, "auto" by default. Bits depend on the target, so ranks on hosts of different
 * kinds need one that all hosts have. RINGATTN_UNSUPPORTED if the processor lacks the target; RINGATTN_USAGE for other
 * names, and for another target while handles of ops on the CPU exist. */
ringattn_status ringattn_set_simd_target(const char* name);
/* Since interface 6. The name that is set, "auto" by default. Valid until the next call on this thread. NULL if the
 * environment variable names a target that is unknown or that the processor lacks. */
const char* ringattn_simd_target(void);

/* ---- Worlds: the ranks that compute together ---- */

typedef struct ringattn_world ringattn_world;

typedef struct ringattn_world_options {
  uint64_t size;
  int64_t abi;         /* RINGATTN_ABI */
  int32_t device_type; /* kDLCPU or kDLCUDA: device of the tensors and kernels; 0: kDLCPU */
  int32_t device_id;   /* CUDA device index in this process */
} ringattn_world_options;

/* A world of one rank. */
ringattn_status ringattn_world_self(const ringattn_world_options* options, ringattn_world** world);

/* `ranks` ranks in this process: each worlds[r] is used by a thread of its own. Host memory. */
ringattn_status ringattn_world_threads(const ringattn_world_options* options, int32_t ranks, ringattn_world** worlds);

/* The ranks of an MPI communicator. `communicator` points to an MPI_Comm, which is duplicated (collective). MPI must be
 * initialised with at least MPI_THREAD_FUNNELED, all calls must come from one thread, and the world and its objects
 * must be destroyed before MPI_Finalize. Host memory. This call loads libringattn_mpi from the directory of the
 * library; only that library is linked to MPI. RINGATTN_UNSUPPORTED if it is missing or the library was built without
 * MPI. */
ringattn_status ringattn_world_mpi(const ringattn_world_options* options, const void* communicator,
                                   ringattn_world** world);

/* Since interface 2. Ranks are processes started by any launcher, without MPI, and connect over TCP. With kDLCUDA each
 * rank uses the GPU that its options name. Bytes go from GPU to GPU by copy engines inside a host (p2p), or else by
 * NCCL if the library was built with it. */
typedef struct ringattn_gathered ringattn_gathered;

/* Functions that the caller provides. They are called on the calling thread, and only until ringattn_world_callbacks()
 * returns. Ranks use the all-gather to exchange addresses. Later barriers are the world's own. */
typedef struct ringattn_callbacks {
  uint64_t size;
  void* context; /* passed to all_gather */
  /* Collective. Gathers `bytes` bytes from every rank, a number that may differ between ranks, and passes each rank's
   * bytes to ringattn_gathered_add() in order of rank. Should give up after `seconds`. Returns 0, or nonzero on
   * failure. */
  int32_t (*all_gather)(void* context, const void* data, uint64_t bytes, double seconds, ringattn_gathered* gathered);
} ringattn_callbacks;
void ringattn_gathered_add(ringattn_gathered* gathered, const void* data, uint64_t bytes);

/* Collective. `seconds`: timeout of each step of the rendezvous; 0: 60. */
ringattn_status ringattn_world_callbacks(const ringattn_world_options* options, int32_t rank, int32_t ranks,
                                         const ringattn_callbacks* callbacks, double seconds, ringattn_world** world);
/* Collective. Ranks meet at `address` ("host:port"), which rank 0 serves until all have connected. `job`, or NULL,
 * distinguishes jobs that share an address. With address NULL everything is read from the environment: RINGATTN_STORE,
 * and the rank and number of ranks that torchrun, Slurm or mpirun set; `rank` and `ranks` are then ignored. */
ringattn_status ringattn_world_store(const ringattn_world_options* options, const char* address, int32_t rank,
                                     int32_t ranks, const char* job, double seconds, ringattn_world** world);

int32_t ringattn_world_rank(const ringattn_world* world);
int32_t ringattn_world_size(const ringattn_world* world);

/* Reports to the other ranks that this rank has failed. Their calls fail with `status`, or with RINGATTN_PEER, and with
 * `text`. */
void ringattn_world_abort(ringattn_world* world, ringattn_status status, const char* text);

void ringattn_world_destroy(ringattn_world* world);

/* ---- Problem and layout ---- */

enum {
  RINGATTN_CAUSAL = 0, /* a query at position p sees keys 0 to p */
  RINGATTN_FULL = 1,
  RINGATTN_WINDOW = 2 /* a query at position p sees keys p - window_left to p + window_right */
};

/* Describes what is computed. Besides the query, its keys and its values, the bits of an output row depend only on this
 * struct and the kernel. It has no lengths and no ranks. */
typedef struct ringattn_spec {
  uint64_t size;
  DLDataType dtype;   /* of q, k, v and out: {kDLFloat, 32, 1}, {kDLFloat, 16, 1} or {kDLBfloat, 16, 1} */
  int32_t heads;      /* query heads */
  int32_t kv_heads;   /* divides heads; 0: equal to heads */
  int32_t head_dim;   /* of q and k */
  int32_t head_dim_v; /* of v and out; 0: equal to head_dim */
  int32_t mask;
  int32_t sinks;        /* 1: each query head has a logit that is added to the softmax denominator */
  int64_t window_left;  /* tokens; only with RINGATTN_WINDOW; -1: no limit */
  int64_t window_right; /* tokens; only with RINGATTN_WINDOW; -1: no limit */
  float softmax_scale;  /* 0: 1 / sqrt(head_dim), unless scale_given is 1 */
  float softcap;        /* score = softcap * tanh(score / softcap); 0: off */
  /* Since interface 3: */
  const char* k_format; /* format of compressed k, e.g. "int4_channel group 32"; NULL: not compressed. See
                         * ringattn_compressed */
  const char* v_format;
  /* Since interface 5. 1: use softmax_scale as given, even if it is 0, which weights all keys equally. (A double that
   * is too small for fp32 becomes 0.) */
  int64_t scale_given;
} ringattn_spec;

/* Compressed keys or values, since interface 3. Results are bitwise those of the decompressed tensor, [rows, heads,
 * dim] of fp16 or bf16. docs/compression.md lists the formats. A format has up to four streams and two tables;
 * ringattn_compression_get_part() returns their types and shapes. */
typedef struct ringattn_compressed {
  uint64_t size;
  const DLTensor* streams[4]; /* [rows, heads, width], one row for each token; for a cache [pages, page_size, heads,
                               * width] */
  const DLTensor* tables[2];  /* dense; they cover all sequences of the batch or decode step, and are the same on every
                               * rank */
} ringattn_compressed;

/* A packed batch: tokens of the sequences follow each other. Query i of sequence s has key position i + q_offsets[s].
 */
typedef struct ringattn_batch {
  uint64_t size;
  int64_t sequences;
  const int64_t* q_lengths; /* [sequences] */
  const int64_t* k_lengths; /* [sequences]; NULL: equal to q_lengths */
  const int64_t* q_offsets; /* [sequences]; NULL: k_length - q_length, so that queries end where keys end */
  /* Since interface 4, only for ringattn_attention: keys of sequences from which ringattn_evict() removed tokens.
   * k_lengths count the remaining keys. Masks and q_offsets use the original positions. */
  const int32_t* k_positions;   /* [keys of all sequences, position_heads], ascending; NULL: key i has position i */
  int64_t position_heads;       /* 1: all K/V heads keep the same keys; else kv_heads */
  const int64_t* whole_lengths; /* [sequences] original lengths in tokens; without q_offsets, queries end there. NULL,
                                 * only with q_offsets: the largest position + 1 */
} ringattn_batch;

/* Tokens [begin, end) of `sequence` are rows of `rank`. A rank's rows are its runs in the order given. */
typedef struct ringattn_run {
  int32_t rank;
  int32_t sequence;
  int64_t begin;
  int64_t end;
} ringattn_run;

enum {
  RINGATTN_STRIPED = 0, /* stripes are dealt 0 1 ... P-1 P-1 ... 1 0 0 1 ..., so that ranks have equal work in every
                         * block */
  RINGATTN_ZIGZAG = 1,
  RINGATTN_CONTIGUOUS = 2,
  RINGATTN_RUNS = 3 /* as query_runs and key_runs say */
};

/* How a job runs. Only the kernel may change bits of the result. An option that the op or the layout ignores is refused
 * (RINGATTN_USAGE). */
typedef struct ringattn_options {
  uint64_t size;
  const char* kernel;      /* kernel name; NULL: the first kernel that supports the problem */
  int32_t threads;         /* CPU threads of a host kernel, up to 4096; 0: this rank's share of the processors */
  int32_t layout;          /* which rank holds which tokens */
  int64_t stripe;          /* tokens; only with RINGATTN_STRIPED; 0: from the kernel's tiles and the lengths */
  int64_t query_run_count; /* only with RINGATTN_RUNS, as are all run members. Runs of all ranks, for each rank
                            * ascending by sequence and begin. Together they cover each token once */
  const ringattn_run* query_runs;
  int64_t key_run_count;
  const ringattn_run* key_runs; /* NULL: equal to query_runs, if query and key lengths are equal */
  int64_t block_tokens;         /* tokens per KV block of the ring; 0: from the machine model and the memory budget */
  uint64_t memory_budget;       /* bytes that a rank may use, tensors included; 0: no limit */
  double timeout_seconds;       /* of a wait for a peer without heartbeats, 0.001 to 1e6; 0: 60 */
  /* Since interface 2: */
  int32_t checksum;         /* 1: verify a checksum of data sent between hosts */
  int32_t unchecked_tables; /* decode, 1: do not check lengths and block tables in device memory */
} ringattn_options;

/* ---- Attention ---- */

typedef struct ringattn_attention ringattn_attention;

/* Collective. Selects the kernel, makes the layout and plan, and allocates memory. `options` may be NULL. */
ringattn_status ringattn_attention_create(ringattn_world* world, const ringattn_spec* spec, const ringattn_batch* batch,
                                          const ringattn_options* options, ringattn_attention** attention);

typedef struct ringattn_attention_facts {
  uint64_t size;
  int64_t q_rows;           /* tokens of this rank's q, out and lse */
  int64_t k_rows;           /* tokens of this rank's k and v */
  uint64_t workspace_bytes; /* of a run, besides its tensors, for dense or strided k and v */
  const char* kernel;       /* kernel name; valid as long as the library is loaded */
  /* Since interface 2: */
  double estimated_seconds; /* of a run, estimated by the machine model */
  const char* machine; /* device model and instruction set. Bits are equal if machine, kernel and library are equal.
                        * Valid as long as the object */
} ringattn_attention_facts;
/* Fills the first facts->size bytes of *facts. */
ringattn_status ringattn_attention_get_facts(const ringattn_attention* attention, ringattn_attention_facts* facts);

enum { RINGATTN_QUERIES = 0, RINGATTN_KEYS = 1 };
/* For each row of this rank, in order: its token index on the packed axis, and its token index in its sequence. The
 * latter is the RoPE position of a key; for a query add q_offsets. `count` is q_rows or k_rows. Either array, [count],
 * may be NULL. */
ringattn_status ringattn_attention_rows(const ringattn_attention* attention, int32_t side, int64_t count,
                                        int64_t* packed_tokens, int64_t* sequence_tokens);

/* Tensors of this rank: the rows that the layout assigns to it. */
typedef struct ringattn_attention_tensors {
  uint64_t size;
  const DLTensor* q;     /* [q_rows, heads, head_dim] */
  const DLTensor* k;     /* [k_rows, kv_heads, head_dim] */
  const DLTensor* v;     /* [k_rows, kv_heads, head_dim_v] */
  const DLTensor* sinks; /* [heads] fp32, present exactly when the spec's sinks is 1 */
  const DLTensor* out;   /* [q_rows, heads, head_dim_v], written */
  const DLTensor* lse;   /* [q_rows, heads] fp32, any strides, written: natural logarithm, -inf for rows without keys;
                          * NULL: not wanted */
  const DLTensor* workspace; /* [workspace_bytes], any type, dense, aligned to 256 bytes; NULL: the object's own */
  void* stream;              /* a cudaStream_t; NULL: the default stream. Ignored on the host */
  /* Since interface 3: */
  const ringattn_compressed* compressed_k; /* instead of k, exactly if the spec has a k_format */
  const ringattn_compressed* compressed_v; /* instead of v, exactly if the spec has a v_format */
} ringattn_attention_tensors;

/* Collective. Computes out and lse; returns when they are written. */
ringattn_status ringattn_attention_run(ringattn_attention* attention, const ringattn_attention_tensors* tensors);
/* Enqueues the work on the stream. It does not wait for the device or for other ranks. It allocates only the object's
 * own workspace, on the first call. On the host the work is done on return. Calls share the object's memory, so order
 * the streams of one object's calls among themselves. If the stream is being captured, the work becomes part of the
 * graph: order launches of the graph with other calls in the same way, and keep the object as long as the graph.
 * Capture requires a world of one rank and a workspace of the caller. */
ringattn_status ringattn_attention_enqueue(ringattn_attention* attention, const ringattn_attention_tensors* tensors);
/* Waits for all enqueued work of the object. Returns the first failure of that work. */
ringattn_status ringattn_attention_wait(ringattn_attention* attention);
void ringattn_attention_destroy(ringattn_attention* attention);

/* ---- Gradients of attention ---- */

/* dQ, dK and dV of a ringattn_attention, on the same shards. Each rank gets the gradients of its own rows, with the
 * same bits for any world, layout and block_tokens. RINGATTN_UNSUPPORTED for compressed keys, k_positions, and devices
 * and head dims without a kernel. */
typedef struct ringattn_attention_backward ringattn_attention_backward;

enum {
  RINGATTN_GRADIENTS_AS_INPUTS = 0, /* dq, dk and dv have the dtype of q, rounded once at the end */
  RINGATTN_GRADIENTS_FP32 = 1
};

/* Collective. Gradients of the attention with these arguments. options->kernel names a backward kernel. With
 * RINGATTN_STRIPED set options->stripe, or use ringattn_attention_backward_create_from(): its default depends on the
 * kernel. `options` may be NULL. */
ringattn_status ringattn_attention_backward_create(ringattn_world* world, const ringattn_spec* spec,
                                                   const ringattn_batch* batch, int32_t gradients,
                                                   const ringattn_options* options,
                                                   ringattn_attention_backward** backward);
/* Collective. Gradients of `attention`, with its world, job, shards and options. */
ringattn_status ringattn_attention_backward_create_from(ringattn_attention* attention, int32_t gradients,
                                                        ringattn_attention_backward** backward);
ringattn_status ringattn_attention_backward_get_facts(const ringattn_attention_backward* backward,
                                                      ringattn_attention_facts* facts);
/* As ringattn_attention_rows(). */
ringattn_status ringattn_attention_backward_rows(const ringattn_attention_backward* backward, int32_t side,
                                                 int64_t count, int64_t* packed_tokens, int64_t* sequence_tokens);

/* Tensors of this rank. `out` and `lse` are those that the forward wrote. */
typedef struct ringattn_attention_backward_tensors {
  uint64_t size;
  const DLTensor* q;         /* [q_rows, heads, head_dim] */
  const DLTensor* k;         /* [k_rows, kv_heads, head_dim] */
  const DLTensor* v;         /* [k_rows, kv_heads, head_dim_v] */
  const DLTensor* sinks;     /* [heads] fp32, present exactly when the spec's sinks is 1 */
  const DLTensor* out;       /* [q_rows, heads, head_dim_v] */
  const DLTensor* lse;       /* [q_rows, heads] fp32, any strides */
  const DLTensor* dout;      /* [q_rows, heads, head_dim_v], gradient of out */
  const DLTensor* dlse;      /* [q_rows, heads] fp32, any strides, gradient of lse; NULL: 0 */
  const DLTensor* dq;        /* [q_rows, heads, head_dim], written */
  const DLTensor* dk;        /* [k_rows, kv_heads, head_dim], written; 0 for keys that no query sees */
  const DLTensor* dv;        /* [k_rows, kv_heads, head_dim_v], written; 0 for keys that no query sees */
  const DLTensor* dsinks;    /* [heads] fp32, written, present exactly when the spec's sinks is 1. Every
                              * rank gets the sum over all ranks: do not reduce it again */
  const DLTensor* workspace; /* [workspace_bytes], any type, dense, aligned to 256 bytes; NULL: the object's own */
  void* stream;              /* a cudaStream_t; NULL: the default stream. Ignored on the host */
} ringattn_attention_backward_tensors;

/* Collective. Computes the gradients; returns when they are written. */
ringattn_status ringattn_attention_backward_run(ringattn_attention_backward* backward,
                                                const ringattn_attention_backward_tensors* tensors);
/* As ringattn_attention_enqueue(), but it can't be captured in a CUDA graph. */
ringattn_status ringattn_attention_backward_enqueue(ringattn_attention_backward* backward,
                                                    const ringattn_attention_backward_tensors* tensors);
ringattn_status ringattn_attention_backward_wait(ringattn_attention_backward* backward);
void ringattn_attention_backward_destroy(ringattn_attention_backward* backward);

#ifdef __cplusplus
}
#endif

#include "ringattn_ops.h" /* decode, MLA, batched GEMM, SSM, causal conv1d, compression, eviction */

#endif /* RINGATTN_H */
