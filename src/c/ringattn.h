/* SPDX-License-Identifier: Apache-2.0
 *
 * ringattn in C: exact attention whose results have the same bits on one rank and on many. Everything that a program
 * needs stands in this header, in ringattn_ops.h and ringattn_mla.h, which it includes, and in libringattn_c.so.
 *
 *   ringattn_world_options where = {.size = sizeof where, .abi = RINGATTN_ABI};
 *   ringattn_world *world;
 *   if (ringattn_world_self(&where, &world) != RINGATTN_OK) puts(ringattn_error_text());
 *
 * Rules that hold for every function:
 *
 * - A call returns RINGATTN_OK or the kind of its failure, and no exception leaves it. ringattn_error_text() is then
 *   what failed, why, and what helps, of the last call that failed on this thread. Outputs are unchanged, unless a
 *   function says otherwise.
 * - Each struct begins with its size. A member that is 0 or NULL stands for its default, so a struct is cleared, gets
 *   its size and what differs. A program that was compiled with an older header is served: members that it doesn't know
 *   have their defaults. A program whose structs are larger than the library's, or whose RINGATTN_ABI is newer, is
 *   refused (RINGATTN_USAGE).
 * - Tensors are DLPack's: `const DLTensor *`, a view that the caller owns, read during the call. Strides count
 *   elements and are free but for the innermost, which is 1; NULL strides are those of a dense tensor. byte_offset
 *   counts, and an axis of one element has any stride. Tensors that are written don't overlap others, but for states
 *   that are updated in place. What the tensor points to lies in the memory of the world's device, and stays until the
 *   work that uses it is done: when run() returns, or when the stream has passed what enqueue() gave it.
 * - A process that was forked from one that had used the library can't use it (RINGATTN_UNSUPPORTED), as threads stay
 *   behind. Start workers by spawn, or fork first.
 * - Objects keep what they were made from: a world may be destroyed before the objects on it. One world, with all of
 *   its objects, is used by one thread at a time: a call beside another one is refused (RINGATTN_USAGE) and changes
 *   nothing. Creating an object, and run(), are collective: every rank of the world does it, in the same order, with
 *   the same arguments but for its own tensors. enqueue() is called in the same order, and waits for nobody.
 */
#ifndef RINGATTN_H
#define RINGATTN_H

#include <stddef.h>
#include <stdint.h>

/* DLPack's own header, where there is one. Else the part of it that is needed, as it has been since DLPack 0.6; a
 * program with a copy of dlpack.h elsewhere includes it before this header. */
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
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* elements; NULL: dense */
  uint64_t byte_offset;
} DLTensor;
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Rises by one whenever something joins this header. Nothing leaves it: the library serves all versions up to its own. */
#define RINGATTN_ABI 6

/* The library's own RINGATTN_ABI, and its version, e.g. "0.3.0". */
int32_t ringattn_abi(void);
const char *ringattn_version(void);

/* ---- Failures ---- */

typedef int32_t ringattn_status;
enum {
  RINGATTN_OK = 0,
  RINGATTN_WRONG_RESULT = 1,
  RINGATTN_USAGE = 2,       /* arguments contradict themselves, each other, or other ranks' */
  RINGATTN_FILE = 3,
  RINGATTN_UNSUPPORTED = 4, /* can't be done here: no kernel, no device, unlike ranks */
  RINGATTN_MEMORY = 5,      /* a budget or a device is too small */
  RINGATTN_PEER = 6,        /* a peer failed, or a deadline passed */
  RINGATTN_INTERNAL = 7     /* a bug of the library */
};

/* Of the last call that failed on this thread; "" before any has. Valid until the next call that fails here.
 * text: "problem (why). suggestion." */
const char *ringattn_error_text(void);
const char *ringattn_error_problem(void);
const char *ringattn_error_why(void);
const char *ringattn_error_suggestion(void);
ringattn_status ringattn_error_status(void);

/* Since interface 5. Calls of this thread ask poll(context) whether to go on, for the first time after 0.1 seconds and then
 * every 0.1 seconds or, where a piece of their work takes longer, after that. Where it returns anything but 0 the call fails
 * with RINGATTN_PEER ("the call was interrupted"), and so do the calls of other ranks that wait for this one. It is called
 * on the calling thread, and calls nothing of the same world. NULL: nobody is asked, as before the first call. */
typedef int32_t (*ringattn_poll)(void *context);
void ringattn_set_interrupt(ringattn_poll poll, void *context);

/* The names that other libraries give tensors, as a JSON array: valid as long as the library is loaded; NULL where there
 * is no memory for it. An object is an alias of a name of this library,
 *   {"name":"s_aux","role":"sinks","ops":["attention","decode","mla","mla_decode"]},
 * or a name that is refused because the tensor would change the result and is not computed with,
 *   {"name":"alibi_slopes","refused":"no bias is added to scores","suggestion":"Leave it out.","ops":[...]},
 * in the functions that "ops" names. With "unless":"dt" it is not refused in a file that has a tensor dt. */
const char *ringattn_tensor_names(void);

/* ---- Worlds: the ranks that compute together ---- */

typedef struct ringattn_world ringattn_world;

typedef struct ringattn_world_options {
  uint64_t size;
  int64_t abi;         /* RINGATTN_ABI */
  int32_t device_type; /* kDLCPU or kDLCUDA: where tensors lie and kernels run; 0: kDLCPU */
  int32_t device_id;   /* CUDA's index in this process */
} ringattn_world_options;

/* One rank, which computes alone. */
ringattn_status ringattn_world_self(const ringattn_world_options *options, ringattn_world **world);

/* `ranks` ranks in this process, of which worlds[r] is played by a thread of its own. Host memory. */
ringattn_status ringattn_world_threads(const ringattn_world_options *options, int32_t ranks, ringattn_world **worlds);

/* The ranks of an MPI communicator: `communicator` points to an MPI_Comm, which is duplicated (collective). MPI is
 * initialised with at least MPI_THREAD_FUNNELED, all calls come from one thread, and the world and its objects are
 * destroyed before MPI_Finalize. Host memory. libringattn_mpi, beside the library, is opened, and is what is linked to MPI:
 * RINGATTN_UNSUPPORTED where it isn't there, or in a library that was built without MPI. */
ringattn_status ringattn_world_mpi(const ringattn_world_options *options, const void *communicator,
                                   ringattn_world **world);

/* Ranks that are processes of any launcher, without MPI, since interface 2: they connect to each other over TCP. On a device
 * (kDLCUDA) each has the GPU that its options name, and bytes go from GPU to GPU: by copy engines inside of a host (p2p), by
 * NCCL where that can't be and the library was built with it. */
typedef struct ringattn_gathered ringattn_gathered;

/* What the caller lends, called on the calling thread and not after ringattn_world_callbacks() has returned. An all-gather is
 * all that ranks need to come together; barriers, from then on, are the world's own. */
typedef struct ringattn_callbacks {
  uint64_t size;
  void *context; /* passed on */
  /* Gathers every rank's `bytes` bytes, of any number, and gives them to ringattn_gathered_add() in order of rank. Collective.
   * Should give up after `seconds`. Returns 0, or anything else where it failed. */
  int32_t (*all_gather)(void *context, const void *data, uint64_t bytes, double seconds, ringattn_gathered *gathered);
} ringattn_callbacks;
void ringattn_gathered_add(ringattn_gathered *gathered, const void *data, uint64_t bytes);

/* `seconds` for each step of coming together; 0: 60. Collective. */
ringattn_status ringattn_world_callbacks(const ringattn_world_options *options, int32_t rank, int32_t ranks,
                                         const ringattn_callbacks *callbacks, double seconds, ringattn_world **world);
/* Ranks come together at `address` ("host:port"), which rank 0 serves until they have; `job`, or NULL, tells jobs at one address
 * apart. With address NULL all of it is read from the environment: RINGATTN_STORE, and the rank and the number of ranks that
 * torchrun, Slurm or mpirun has set; rank and ranks are then not used. */
ringattn_status ringattn_world_store(const ringattn_world_options *options, const char *address, int32_t rank,
                                     int32_t ranks, const char *job, double seconds, ringattn_world **world);

int32_t ringattn_world_rank(const ringattn_world *world);
int32_t ringattn_world_size(const ringattn_world *world);

/* Tells the other ranks that this one has failed and won't come: their calls end with RINGATTN_PEER, or with `status`,
 * and say `text`. */
void ringattn_world_abort(ringattn_world *world, ringattn_status status, const char *text);

void ringattn_world_destroy(ringattn_world *world);

/* ---- What attention computes ---- */

enum {
  RINGATTN_CAUSAL = 0, /* a query at position p sees the keys up to p */
  RINGATTN_FULL = 1,
  RINGATTN_WINDOW = 2 /* … the keys p - window_left to p + window_right */
};

/* No lengths and no ranks: what the bits of a row are a function of, beside the row and its keys. */
typedef struct ringattn_spec {
  uint64_t size;
  DLDataType dtype;   /* of q, k, v and out: {kDLFloat, 32, 1}, {kDLFloat, 16, 1} or {kDLBfloat, 16, 1} */
  int32_t heads;      /* query heads */
  int32_t kv_heads;   /* divides heads; 0: as heads */
  int32_t head_dim;   /* of q and k */
  int32_t head_dim_v; /* of v and out; 0: as head_dim */
  int32_t mask;
  int32_t sinks;        /* 1: a logit per query head joins the denominator */
  int64_t window_left;  /* of RINGATTN_WINDOW alone; -1: no limit */
  int64_t window_right; /* of RINGATTN_WINDOW alone; -1: no limit */
  float softmax_scale;  /* 0: 1 / sqrt(head_dim), unless scale_given is 1 */
  float softcap;        /* score = softcap * tanh(score / softcap); 0: off */
  /* Since interface 3: */
  const char *k_format; /* how k is stored, e.g. "int4_channel group 32"; NULL: as it is. See ringattn_compressed */
  const char *v_format;
  /* Since interface 5: 1: softmax_scale is meant as it is, also 0, with which all keys count alike (as a number below
   * fp32's least does, which a conversion to float makes 0). */
  int64_t scale_given;
} ringattn_spec;

/* Keys or values that are stored compressed, since interface 3. They are, bit for bit, the tensor that their
 * decompression gives, [rows, heads, dim] of fp16 or bf16. Formats are named as files name them (docs/compression.md), and
 * have up to four streams and two tables: ringattn_compression_get_part() says which, of what types and shapes. */
typedef struct ringattn_compressed {
  uint64_t size;
  const DLTensor *streams[4]; /* [rows, heads, width], a row for each token; of a cache [pages, page_size, heads, width] */
  const DLTensor *tables[2];  /* dense, of the whole tensor: of all sequences of a batch or a step, on every rank */
} ringattn_compressed;

/* The sequences of a batch, packed one behind the other. Query i of sequence s stands at key position
 * i + q_offsets[s]. */
typedef struct ringattn_batch {
  uint64_t size;
  int64_t sequences;
  const int64_t *q_lengths; /* [sequences] */
  const int64_t *k_lengths; /* [sequences]; NULL: as q_lengths */
  const int64_t *q_offsets; /* [sequences]; NULL: queries end where keys end, k_length - q_length */
  /* Since interface 4, for ringattn_attention: keys of sequences from which tokens were taken out (ringattn_evict()).
   * k_lengths count those that are there, and masks and q_offsets the places where they stood. */
  const int32_t *k_positions;   /* [keys of all sequences, position_heads], ascending; NULL: key i stands at i */
  int64_t position_heads;       /* 1: all K/V heads have the same keys; else kv_heads */
  const int64_t *whole_lengths; /* [sequences] tokens with those that were taken out, where queries without q_offsets
                                 * end; NULL with q_offsets: no further than the last position */
} ringattn_batch;

/* Tokens [begin, end) of a sequence are rows of a rank, behind those of its runs before. */
typedef struct ringattn_run {
  int32_t rank;
  int32_t sequence;
  int64_t begin;
  int64_t end;
} ringattn_run;

enum {
  RINGATTN_STRIPED = 0, /* stripes dealt like a snake, 0 1 ... P-1 P-1 ... 1 0: equal work in every block */
  RINGATTN_ZIGZAG = 1,
  RINGATTN_CONTIGUOUS = 2,
  RINGATTN_RUNS = 3 /* as query_runs and key_runs say */
};

/* How a job is done. No bit depends on it. What an op, or the layout, doesn't look at is refused (RINGATTN_USAGE). */
typedef struct ringattn_options {
  uint64_t size;
  const char *kernel;      /* NULL: the first that can */
  int32_t threads;         /* of a host kernel, up to 4096; 0: this rank's share of the processors */
  int32_t layout;          /* who has which rows */
  int64_t stripe;          /* tokens, of RINGATTN_STRIPED alone; 0: from the kernel's tiles and the lengths */
  int64_t query_run_count; /* of RINGATTN_RUNS alone, as are all runs: those of all ranks, ascending on each rank by
                            * sequence and begin, together all tokens */
  const ringattn_run *query_runs;
  int64_t key_run_count;
  const ringattn_run *key_runs; /* NULL: as query_runs, where queries and keys are equally many */
  int64_t block_tokens;         /* 0: from the machine model and the memory budget */
  uint64_t memory_budget;       /* bytes a rank may use, tensors included; 0: no limit */
  double timeout_seconds;       /* of a wait for a peer that gives no sign of life, 0.001 to 1e6; 0: 60 */
  /* Since interface 2: */
  int32_t checksum;         /* 1: what travels between hosts is verified */
  int32_t unchecked_tables; /* of decoding, 1: lengths and block tables in device memory are not checked */
} ringattn_options;

/* ---- Attention ---- */

typedef struct ringattn_attention ringattn_attention;

/* Prepares: kernel, layout, plan, memory. Collective. options may be NULL. */
ringattn_status ringattn_attention_create(ringattn_world *world, const ringattn_spec *spec, const ringattn_batch *batch,
                                          const ringattn_options *options, ringattn_attention **attention);

typedef struct ringattn_attention_facts {
  uint64_t size;
  int64_t q_rows;           /* rows of this rank's q, out and lse */
  int64_t k_rows;           /* rows of this rank's k and v */
  uint64_t workspace_bytes; /* that a run needs beside its tensors, k and v dense or strided */
  const char *kernel;       /* its name; valid as long as the library is loaded */
  /* Since interface 2: */
  double estimated_seconds; /* of a run, by the machine model */
  const char *machine;      /* device model and instruction set: bits are equal where this, kernel and library are; as long
                               as the object */
} ringattn_attention_facts;
/* Fills as much of *facts as its size says. */
ringattn_status ringattn_attention_get_facts(const ringattn_attention *attention, ringattn_attention_facts *facts);

enum { RINGATTN_QUERIES = 0, RINGATTN_KEYS = 1 };
/* Of each of this rank's rows: its token on the packed axis, and its token in its sequence (for keys the position that
 * RoPE needs; for queries once q_offsets is added). count: q_rows or k_rows. Either array may be NULL. */
ringattn_status ringattn_attention_rows(const ringattn_attention *attention, int32_t side, int64_t count,
                                        int64_t *packed_tokens, int64_t *sequence_tokens);

/* This rank's rows, as the layout deals them. */
typedef struct ringattn_attention_tensors {
  uint64_t size;
  const DLTensor *q;         /* [q_rows, heads, head_dim] */
  const DLTensor *k;         /* [k_rows, kv_heads, head_dim] */
  const DLTensor *v;         /* [k_rows, kv_heads, head_dim_v] */
  const DLTensor *sinks;     /* [heads] fp32, present exactly when the spec's sinks is 1 */
  const DLTensor *out;       /* [q_rows, heads, head_dim_v], written */
  const DLTensor *lse;       /* [q_rows, heads] fp32, any strides, written: natural logarithms, -inf without keys; or NULL */
  const DLTensor *workspace; /* [workspace_bytes] of any type, dense, aligned to 256 bytes; NULL: the object's own */
  void *stream;              /* a cudaStream_t; NULL: the default stream. Not used on the host */
  /* Since interface 3: */
  const ringattn_compressed *compressed_k; /* instead of k, exactly where the spec has a k_format */
  const ringattn_compressed *compressed_v; /* instead of v, exactly where the spec has a v_format */
} ringattn_attention_tensors;

/* Computes, and returns when it is done. */
ringattn_status ringattn_attention_run(ringattn_attention *attention, const ringattn_attention_tensors *tensors);
/* Puts the work on the stream: no allocation but for the object's own workspace the first time, no wait for the device
 * or for other ranks. On the host the work is done when it returns. A stream that is being captured gets the work as
 * part of its graph (one rank, and a workspace of the caller's). */
ringattn_status ringattn_attention_enqueue(ringattn_attention *attention, const ringattn_attention_tensors *tensors);
/* Returns when the device has passed everything that was enqueued, and says what of it failed. */
ringattn_status ringattn_attention_wait(ringattn_attention *attention);
void ringattn_attention_destroy(ringattn_attention *attention);

#ifdef __cplusplus
}
#endif

#include "ringattn_ops.h" /* decoding, latent attention, products, scans, convolutions, compression, eviction */

#endif /* RINGATTN_H */
