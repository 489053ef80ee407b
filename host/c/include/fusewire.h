/*
 * Fusewire from C: GPU-resident collectives, and fused communication and arithmetic, on NVIDIA, AMD
 * and the CPU.
 *
 * LINKING. Link with -lfusewire_c: cargo build --release -p fusewire-c puts libfusewire_c.so, whose
 * SONAME is the same, and libfusewire_c.a into target/release. A program that links the static
 * library needs -lm -lpthread -ldl, too. Never dlclose the shared library.
 *
 * WHAT IS MISSING. Of the Rust API this header does not have: reduce, scatter and gather;
 * all_gather_v and all_to_all_v; batches of sends and receives; collectives of objects; put, get
 * and signals of windows; reductions with a factor (premul_sum); quantized operations; dup and
 * reconfigure; hooks and the flight recorder; the transport; kernels of users.
 *
 * RETURN VALUES. Functions return FUSEWIRE_OK (0) or a FUSEWIRE_ERROR_ code; fusewire_last_error()
 * returns the message of the last call of this thread that failed. An invalid argument, such as a
 * null handle, is refused before anything moves. After a communicator has failed, every call on it
 * returns that failure. No exception and no panic leaves a function.
 *
 * THREADS. All ranks issue the operations of a communicator in the same order. Several threads may
 * use a handle if they keep that order. A handle is destroyed once, when no thread uses it.
 * fusewire_comm_abort may be called at any time. A process that has a communicator must not fork
 * and use the communicator in the child.
 *
 * MEMORY. A buffer is an address in the memory of the communicator's device (on the CPU: of the
 * process), a count of elements and a type. It is aligned to the type; norms on a GPU need 16
 * bytes. No call copies its buffers in advance. Peers read and write memory in a window
 * (fusewire_alloc, fusewire_register) directly; other memory goes through the communicator's
 * staging. Ranks may differ in that.
 *   - A blocking call uses its buffers until it returns.
 *   - An _async call uses them until its work is done, a captured call until every graph with it is
 *     destroyed. Until then the caller keeps them allocated, changes no input and touches no
 *     output. Work and graphs keep memory of fusewire_alloc allocated until fusewire_free.
 *   - Structs and text are read during the call only.
 *
 * STREAMS. A handle has a stream: the communicator's own, or the caller's
 * (fusewire_comm_on_stream). _async calls enqueue on it and return; blocking calls enqueue and
 * wait. Launches of one communicator on several streams run in the order in which they were issued.
 *
 * GROWTH. A struct begins with struct_size, which the program sets to sizeof of the struct. New
 * fields are added at the end: an older program continues to work, and a newer program gets an
 * error if it sets a field that an older library does not know. Zero is the default of every field.
 * In C: fusewire_norm norm = {.struct_size = sizeof norm, ...}; in C++ memset first.
 */
#ifndef FUSEWIRE_H
#define FUSEWIRE_H

#include <stddef.h>
#include <stdint.h>

#define FUSEWIRE_VERSION_MAJOR 0
#define FUSEWIRE_VERSION_MINOR 1
#define FUSEWIRE_VERSION_PATCH 0
#define FUSEWIRE_VERSION \
  (FUSEWIRE_VERSION_MAJOR * 10000 + FUSEWIRE_VERSION_MINOR * 100 + FUSEWIRE_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/* Codes. */
#define FUSEWIRE_OK 0
#define FUSEWIRE_ERROR_ARGUMENT 1      /* an argument is invalid; nothing has moved */
#define FUSEWIRE_ERROR_TIMEOUT 2       /* a wait timed out; the message names the late rank */
#define FUSEWIRE_ERROR_MISMATCH 3      /* ranks called different operations, sizes or types */
#define FUSEWIRE_ERROR_PEER 4          /* a rank's process has ended */
#define FUSEWIRE_ERROR_ABORTED 5       /* the communicator was aborted */
#define FUSEWIRE_ERROR_FAILED 6        /* a kernel stopped for another reason */
#define FUSEWIRE_ERROR_BOOTSTRAP 7     /* rank, size or store are not known, or the store failed */
#define FUSEWIRE_ERROR_COMMUNICATOR 8  /* no communicator or window can be made, or it ended */
#define FUSEWIRE_ERROR_DEVICE 9        /* a device is not there, or its driver refused */
#define FUSEWIRE_ERROR_MEMORY 10       /* memory could not be allocated, mapped or shared */
#define FUSEWIRE_ERROR_CAPTURE 11      /* the call does not fit the state of a capture */
#define FUSEWIRE_ERROR_BACKEND 12      /* another library (NCCL, RCCL, Gloo) failed */
#define FUSEWIRE_ERROR_NOT_DONE 13     /* a bounded wait ended before the work, which continues */
#define FUSEWIRE_ERROR_OTHER 14
#define FUSEWIRE_ERROR_INTERNAL 15     /* a defect of the library */

/* Types of elements. fp8 is moved, and written by norms, but not reduced. */
#define FUSEWIRE_DTYPE_DEFAULT 0 /* where a struct allows it */
#define FUSEWIRE_F64 1
#define FUSEWIRE_F32 2
#define FUSEWIRE_F16 3
#define FUSEWIRE_BF16 4
#define FUSEWIRE_E4M3 5 /* fp8, E4M3FN */
#define FUSEWIRE_E5M2 6 /* fp8 */
#define FUSEWIRE_I8 7
#define FUSEWIRE_U8 8
#define FUSEWIRE_I32 9
#define FUSEWIRE_U32 10
#define FUSEWIRE_I64 11
#define FUSEWIRE_U64 12

/* Reductions, in rank order: the same bits on every rank and in every run. f16 and bf16 are summed
   in f32 and rounded once. */
#define FUSEWIRE_SUM 1
#define FUSEWIRE_PRODUCT 2
#define FUSEWIRE_MIN 3 /* NaN propagates */
#define FUSEWIRE_MAX 4 /* NaN propagates */
#define FUSEWIRE_AVERAGE 5 /* integers truncate */
#define FUSEWIRE_BIT_AND 6 /* bitwise reductions are for integers only */
#define FUSEWIRE_BIT_OR 7
#define FUSEWIRE_BIT_XOR 8

/* Algorithms; equal on all ranks. All give the same bits, except NVLS. */
#define FUSEWIRE_ALGORITHM_AUTO 0
#define FUSEWIRE_ALGORITHM_PACKET 1   /* one hop by packets */
#define FUSEWIRE_ALGORITHM_SIGNAL 2   /* one hop by signals */
#define FUSEWIRE_ALGORITHM_TWO_SHOT 3 /* shards are reduced, then gathered */
#define FUSEWIRE_ALGORITHM_NVLS 7     /* by multicast; needs any_order; no norms */

typedef struct fusewire_comm fusewire_comm;   /* a communicator on a stream */
typedef struct fusewire_work fusewire_work;   /* an enqueued operation */
typedef struct fusewire_graph fusewire_graph; /* captured operations that can run */
typedef struct fusewire_ready_flags fusewire_ready_flags; /* words of chunks or tiles */

/* Returns FUSEWIRE_VERSION of the library. */
uint32_t fusewire_version(void);

/* Returns the message of the last call of this thread that failed; "" before any has. UTF-8; valid
   until the thread's next call that fails, or its end. Never null. */
const char *fusewire_last_error(void);

/* ---- Communicators ---- */

/* Options; those marked * are equal on all ranks. A null pointer to the struct means all
   defaults. */
typedef struct fusewire_options {
  size_t struct_size;         /* sizeof(fusewire_options) */
  double timeout_seconds;     /* bound of every wait, and of bootstrap; default 600, or
                                 FUSEWIRE_TIMEOUT_SECONDS in the environment */
  uint64_t staging_bytes;     /* * staging for input and output each; default 1 MiB */
  uint64_t packet_slot_bytes; /* * default 32 KiB */
  uint32_t blocks;            /* * of a launch, at most 64; default 16 on a GPU, 1 on a CPU */
  uint32_t threads;           /* * of a block on a GPU: a multiple of 64, at most 512 (default) */
  uint32_t algorithm;         /* * of all_reduce */
  uint32_t any_order;         /* * not 0: reductions in any order of ranks, which NVLS needs */
  uint32_t store_is_served;   /* fusewire_comm_create: not 0 if another process than rank 0 serves
                                 the store */
  uint32_t abort_process;     /* not 0: a watchdog ends the process after the communicator failed */
  const char *backend;        /* "fusewire" (default), "nccl", "rccl", ...; Fusewire itself carries
                                 out norms and windows */
} fusewire_options;

/* Joins the communicator "world" as the rank that the environment names: fusewire run, torchrun,
   mpirun, srun. `device` is "cpu" (also null), "cuda:N" or "hip:N" with N among the devices that
   the process sees. All ranks call it together; bounded by the time-out. `comm` is null after a
   failure. If rank 0 serves the store, because no agent of a launcher does, only one such
   communicator can exist at a time; fusewire_comm_split makes others of it. */
int fusewire_comm_from_env(const char *device, const fusewire_options *options,
                           fusewire_comm **comm);

/* Joins as rank `rank` of `size`. The rendezvous is in the store at `store`, "host:port"
   ("[::1]:29500" for IPv6), which rank 0 serves at that address as long as the communicator lives.
   Communicators with different `name` (default "world") may share a store that another process
   serves. All ranks call it together. */
int fusewire_comm_create(const char *device, uint32_t rank, uint32_t size, const char *store,
                         const char *name, const fusewire_options *options,
                         fusewire_comm **comm);

/* Makes a communicator of the `count` ranks of this one in `ranks`: ranks[i] becomes rank i. All
   ranks call it together, each with the list that it belongs to, or with none (count 0), which
   gives null. Lists of different ranks may be different groups. The new handle is destroyed like
   any other, before or after this one. `name` (default "part") is for messages. */
int fusewire_comm_split(const fusewire_comm *comm, const uint32_t *ranks, uint32_t count,
                        const char *name, fusewire_comm **part);

/* Makes another handle of the same communicator, on `stream`: a CUstream or hipStream_t of the
   device's primary context, which outlives the handle, all work enqueued by it, and the
   communicator's next use on another stream. Null means the communicator's own stream, the only one
   on a CPU. The legacy default stream cannot be used. */
int fusewire_comm_on_stream(const fusewire_comm *comm, void *stream, fusewire_comm **on_stream);

/* Makes another handle of the same communicator, on a new stream, which lives as long as the handle
   and its work. Works on a CPU, too. */
int fusewire_comm_on_new_stream(const fusewire_comm *comm, fusewire_comm **on_stream);

/* Destroys a handle, also if it returns a failure. The last handle of a communicator waits for all
   work, ends the communicator on this rank, and returns the failure of the communicator or of work
   that no call waited for. Null is allowed. Peers may still use memory that they have mapped. If
   rank 0 serves the store it must live until all ranks have ended: call fusewire_barrier first. */
int fusewire_comm_destroy(fusewire_comm *comm);

/* Stops the communicator, from any thread: calls that wait in it, on every rank that can be reached
   by load and store, return FUSEWIRE_ERROR_ABORTED within milliseconds, and so does every later
   call. */
int fusewire_comm_abort(const fusewire_comm *comm);

/* Waits for all work on the handle's stream. Returns its first failure since the last call. */
int fusewire_comm_synchronize(const fusewire_comm *comm);

/* Loads in advance what the first operations would load: call it before a capture on a GPU. */
int fusewire_comm_warm_up(const fusewire_comm *comm);

/* Returns FUSEWIRE_OK, or the communicator's failure. Does not wait. */
int fusewire_comm_failure(const fusewire_comm *comm);

int fusewire_comm_rank(const fusewire_comm *comm, uint32_t *rank);
int fusewire_comm_size(const fusewire_comm *comm, uint32_t *size);

/* Gives the bytes of the device's memory that this rank holds for the communicator: signals, slots
   and staging, but not windows. */
int fusewire_comm_workspace_bytes(const fusewire_comm *comm, uint64_t *bytes);

/* Gives the same of a communicator of `size` ranks that does not exist yet. */
int fusewire_workspace_bytes(const char *device, uint32_t size, const fusewire_options *options,
                             uint64_t *bytes);

/* ---- Memory ---- */

/* Allocates zeroed memory of the device in a new window, aligned to at least 16 bytes. All ranks
   call it together, with the same size, at least 1. A communicator can make 1024 windows in its
   life: allocate few and large ones, and use parts. */
int fusewire_alloc(const fusewire_comm *comm, uint64_t bytes, void **memory);

/* Frees memory of fusewire_alloc. All ranks call it together; waits until no operation uses the
   memory. Graphs with it must not be replayed any more. After a failure of the communicator the
   memory stays until the communicator is destroyed, and so does memory that is not freed. */
int fusewire_free(const fusewire_comm *comm, void *memory);

/* Puts a GPU's memory that the caller allocated into a window. All ranks call it together, with the
   same size. The memory stays allocated until it is deregistered (after a failure: until the
   communicator is destroyed). Peers cannot map the memory of a process on the CPU:
   FUSEWIRE_ERROR_ARGUMENT; operations use it through staging, or take memory of fusewire_alloc. */
int fusewire_register(const fusewire_comm *comm, void *memory, uint64_t bytes);
int fusewire_deregister(const fusewire_comm *comm, void *memory);

/* Copy between the memory of the device and of the host, and wait for the end: for tests and
   set-up. No operation may use the memory at the same time. */
int fusewire_upload(const fusewire_comm *comm, void *device, const void *host, uint64_t bytes);
int fusewire_download(const fusewire_comm *comm, void *host, const void *device, uint64_t bytes);

/* ---- Operations ----
   The plain form waits for the end. The _async form enqueues on the handle's stream and returns; a
   failure while running is the work's. `work` may be null; else it receives a handle, which must be
   destroyed, or null after a failure. Counts are in elements; 0 is allowed everywhere, and a buffer
   of 0 elements may be null. Input and output must not overlap, unless stated otherwise. */

/* Reduces `count` elements of every rank; every rank gets the result. Output may be the input. */
int fusewire_all_reduce(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                        uint32_t dtype, uint32_t reduction);
int fusewire_all_reduce_async(const fusewire_comm *comm, const void *input, void *output,
                              uint64_t count, uint32_t dtype, uint32_t reduction,
                              fusewire_work **work);

/* Reduces row r of every rank's input to the output of rank r. Input has a row of `count` elements
   for each rank. Output may be this rank's row of the input. */
int fusewire_reduce_scatter(const fusewire_comm *comm, const void *input, void *output,
                            uint64_t count, uint32_t dtype, uint32_t reduction);
int fusewire_reduce_scatter_async(const fusewire_comm *comm, const void *input, void *output,
                                  uint64_t count, uint32_t dtype, uint32_t reduction,
                                  fusewire_work **work);

/* Copies the `count` elements of rank r to row r of every rank's output. Input may be this rank's
   row of the output. */
int fusewire_all_gather(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                        uint32_t dtype);
int fusewire_all_gather_async(const fusewire_comm *comm, const void *input, void *output,
                              uint64_t count, uint32_t dtype, fusewire_work **work);

/* Copies row r of the input, `count` elements, to row (this rank) of the output of rank r. */
int fusewire_all_to_all(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                        uint32_t dtype);
int fusewire_all_to_all_async(const fusewire_comm *comm, const void *input, void *output,
                              uint64_t count, uint32_t dtype, fusewire_work **work);

/* Copies the root's `count` elements to every rank. */
int fusewire_broadcast(const fusewire_comm *comm, void *buffer, uint64_t count, uint32_t dtype,
                       uint32_t root);
int fusewire_broadcast_async(const fusewire_comm *comm, void *buffer, uint64_t count,
                             uint32_t dtype, uint32_t root, fusewire_work **work);

/* Sends to another rank, which must receive as many elements of the same type. The plain form
   returns when the data is in the channel. */
int fusewire_send(const fusewire_comm *comm, const void *input, uint64_t count, uint32_t dtype,
                  uint32_t peer);
int fusewire_send_async(const fusewire_comm *comm, const void *input, uint64_t count,
                        uint32_t dtype, uint32_t peer, fusewire_work **work);
int fusewire_recv(const fusewire_comm *comm, void *output, uint64_t count, uint32_t dtype,
                  uint32_t peer);
int fusewire_recv_async(const fusewire_comm *comm, void *output, uint64_t count, uint32_t dtype,
                        uint32_t peer, fusewire_work **work);

/* Ends when every rank has called it. */
int fusewire_barrier(const fusewire_comm *comm);
int fusewire_barrier_async(const fusewire_comm *comm, fusewire_work **work);

/* ---- Fused norms ---- */

#define FUSEWIRE_NORM_RMS 0   /* y = v / sqrt(mean(v * v) + epsilon) * weight */
#define FUSEWIRE_NORM_LAYER 1 /* with m the mean of v:
                                 y = (v - m) / sqrt(mean((v - m)^2) + epsilon) * weight */

#define FUSEWIRE_NORM_UNIT_OFFSET 1 /* flag: multiply by 1 + weight */
#define FUSEWIRE_NORM_DEPENDENT 2   /* flag: programmatic dependent launch (NVIDIA, from sm_90) */

#define FUSEWIRE_SCALE_NONE 0   /* output is of `dtype` */
#define FUSEWIRE_SCALE_STATIC 1 /* output is E4M3, out = y / *scale */
#define FUSEWIRE_SCALE_ROWS 2   /* output is E4M3 with a scale for each row: its greatest magnitude,
                                   at least 1e-10, divided by 448 */
#define FUSEWIRE_SCALE_GROUPS 3 /* likewise for each FUSEWIRE_SCALE_GROUP elements of a row */
#define FUSEWIRE_SCALE_GROUP 128

/* v is the sum of the input over the ranks, rounded to `dtype`, plus the residual, rounded to the
   residual's type. The norm is rounded to `dtype`, and fp8 is made of that. The bits are those of
   an all_reduce and separate steps. Buffers must not overlap, but output and residual_out may be
   the memory of residual, or of input (the same rows). All ranks give equal values of all fields
   but the addresses. */
typedef struct fusewire_norm {
  size_t struct_size;      /* sizeof(fusewire_norm) */
  uint32_t kind;           /* FUSEWIRE_NORM_RMS, FUSEWIRE_NORM_LAYER */
  uint32_t flags;          /* FUSEWIRE_NORM_UNIT_OFFSET | FUSEWIRE_NORM_DEPENDENT */
  uint64_t rows;           /* of the output; 0 is allowed */
  uint64_t hidden;         /* elements of a row: a multiple of 8 */
  uint32_t dtype;          /* F32, F16, BF16: of input, weight and bias */
  uint32_t residual_dtype; /* of residual and residual_out: `dtype` (also by 0), or F32 */
  float epsilon;
  uint32_t algorithm;      /* AUTO, PACKET, SIGNAL, TWO_SHOT */
  const void *input;       /* rows x hidden; for reduce_scatter_norm size x rows x hidden */
  const void *weight;      /* hidden */
  const void *bias;        /* hidden, or null: added to y */
  const void *residual;    /* rows x hidden, or null */
  void *residual_out;      /* rows x hidden, or null: v */
  void *output;            /* rows x hidden, of `dtype`, or E4M3 with scales */
  uint32_t scaling;        /* FUSEWIRE_SCALE_ */
  uint32_t scale_dtype;    /* of `scales`: F32 (also by 0), or U8 for powers of two (UE8M0) */
  const void *scale;       /* SCALE_STATIC: one f32; else null */
  void *scales;            /* SCALE_ROWS: rows; SCALE_GROUPS: see scale_stride; else null */
  uint64_t scale_stride;   /* SCALE_GROUPS, with G = ceil(hidden / 128) groups: 0 for the scale of
                              row r and group g at r * G + g; else at g * scale_stride + r, where
                              scale_stride is at least rows */
} fusewire_norm;

/* Gives all rows to every rank. */
int fusewire_all_reduce_norm(const fusewire_comm *comm, const fusewire_norm *norm);
int fusewire_all_reduce_norm_async(const fusewire_comm *comm, const fusewire_norm *norm,
                                   fusewire_work **work);

/* Gives rows r * rows to (r + 1) * rows of the input's sum to rank r, which has their residual. */
int fusewire_reduce_scatter_norm(const fusewire_comm *comm, const fusewire_norm *norm);
int fusewire_reduce_scatter_norm_async(const fusewire_comm *comm, const fusewire_norm *norm,
                                       fusewire_work **work);

/* ---- Sampling ---- */

#define FUSEWIRE_VOCAB_DEPENDENT 1 /* flag: programmatic dependent launch (NVIDIA, from sm_90) */

/* Logits whose columns are split over the ranks, as a tensor-parallel output layer leaves them. Of
   equal logits the lower column comes first; -0 is less than +0, NaN less than everything. A
   position for which no rank has a column gets index -1 and NaN. The log-sum-exp of a row with a
   NaN is NaN, of a row of -inf -inf. All ranks give equal dtype, rows, vocabulary and k, and
   log_sum_exp all or none; their columns must not overlap, which is not checked. */
typedef struct fusewire_vocab {
  size_t struct_size;   /* sizeof(fusewire_vocab) */
  uint32_t dtype;       /* F32, F16, BF16: of logits */
  uint32_t flags;       /* FUSEWIRE_VOCAB_DEPENDENT */
  uint64_t rows;        /* 0 is allowed */
  uint64_t vocabulary;  /* columns of all ranks: from 1 to 2^31 - 1 */
  uint64_t first;       /* this rank has columns first to first + columns */
  uint64_t columns;     /* 0 is allowed */
  uint64_t stride;      /* elements from a row's first logit to the next row's: 0 for columns,
                           else at least columns */
  uint32_t k;           /* logits to find in each row: from 0 to 64, at most vocabulary */
  uint32_t index_dtype; /* I64 (also by 0), I32, U32, U64 */
  const void *logits;   /* rows x columns, stride apart */
  void *indices;        /* rows x k: columns of the k greatest logits, descending; null if k is 0 */
  void *values;         /* rows x k f32, or null: these logits */
  void *log_sum_exp;    /* rows f32, or null: logarithm of the sum of exponentials of the row */
} fusewire_vocab;

/* Gives all results to every rank, the same to the bit. */
int fusewire_vocab_parallel(const fusewire_comm *comm, const fusewire_vocab *vocab);
int fusewire_vocab_parallel_async(const fusewire_comm *comm, const fusewire_vocab *vocab,
                                  fusewire_work **work);

/* ---- Collectives that overlap with computation (docs/overlap.md) ---- */

/* Allocates words of u32 in memory of the communicator's device, one for each chunk or tile: a
   consumer reads which chunks have arrived, a producer counts which tiles are done. One operation
   at a time uses them. */
int fusewire_ready_flags_create(const fusewire_comm *comm, uint64_t count,
                                fusewire_ready_flags **flags);

/* Destroys a handle; operations and graphs that use the words keep them. Null is allowed. */
int fusewire_ready_flags_destroy(fusewire_ready_flags *flags);

/* Gives the address of the first word, for the kernels of a consumer or producer: a chunk's word is
   0, then 1, to be read by acquire; a tile's word is counted up by release. A word is 0x40000000
   after the operation has failed. */
int fusewire_ready_flags_words(const fusewire_ready_flags *flags, uint32_t **words);

/* For a thread, on a CPU: _wait waits for a chunk, within twice the communicator's time-out; _add
   adds to a tile's word. */
int fusewire_ready_flags_wait(const fusewire_ready_flags *flags, uint64_t index);
int fusewire_ready_flags_add(const fusewire_ready_flags *flags, uint64_t index, uint32_t count);

/* On the stream of the handle `consumer` or `producer`: work that is enqueued on the consumer's
   stream after _wait waits for a chunk; _write has the producer's stream write a tile's word when
   its work so far is done. These are stream memory operations, which occupy no multiprocessor; in a
   capture they become nodes of the graph. */
int fusewire_ready_flags_stream_wait(const fusewire_ready_flags *flags,
                                     const fusewire_comm *consumer, uint64_t index);
int fusewire_ready_flags_stream_write(const fusewire_ready_flags *flags,
                                      const fusewire_comm *producer, uint64_t index,
                                      uint32_t value);

typedef struct fusewire_overlap {
  size_t struct_size;
  uint32_t dtype;
  uint32_t op;         /* reduction; 0 for all_gather */
  uint32_t target;     /* a tile is done when its word is this or more; 0 for all_gather */
  uint32_t flags;      /* 0 */
  uint64_t count;      /* elements of each rank */
  uint64_t chunk;      /* elements of a chunk or tile; the last of a rank may have fewer */
  const void *input;   /* count elements; for reduce_scatter a row of count for every rank */
  void *output;        /* a row of count for every rank; for reduce_scatter count elements */
  const fusewire_ready_flags *ready_flags; /* size x C words, C = ceil(count / chunk): chunk c of
                                              rank or row r has word r * C + c */
} fusewire_overlap;

/* Enqueued on the stream of `comm`; runs concurrently with the stream of `consumer` or `producer`,
   another handle of the same communicator (fusewire_comm_on_stream, fusewire_comm_on_new_stream),
   called the compute stream here. The words are cleared on the compute stream first: work that is
   enqueued there afterwards sees words of this call only, in replays of a graph, too. Enqueue the
   computation next, then call fusewire_work_join, which has the compute stream wait for the
   operation, also before a capture ends there. */
int fusewire_all_gather_with_flags(const fusewire_comm *comm, const fusewire_comm *consumer,
                                   const fusewire_overlap *overlap, fusewire_work **work);
int fusewire_reduce_scatter_on_arrival(const fusewire_comm *comm, const fusewire_comm *producer,
                                       const fusewire_overlap *overlap, fusewire_work **work);

/* ---- Work and graphs ---- */

/* Waits on this thread until the operation has ended. Returns its result. `timeout_seconds` bounds
   the wait (FUSEWIRE_ERROR_NOT_DONE); 0 waits as long as the operation takes, which the
   communicator's time-out bounds. */
int fusewire_work_wait(const fusewire_work *work, double timeout_seconds);

/* Has work that is enqueued on the handle's stream after this call wait for the operation; this
   thread does not wait. */
int fusewire_work_join(const fusewire_work *work, const fusewire_comm *comm);

/* Destroys a handle; the operation continues. Null is allowed. */
int fusewire_work_destroy(fusewire_work *work);

/* Between _begin and _end, _async operations of handles on this stream are recorded instead of run.
   On a GPU a capture that the caller began on their own stream (cudaStreamBeginCapture) records
   them as well. */
int fusewire_capture_begin(const fusewire_comm *comm);
int fusewire_capture_end(const fusewire_comm *comm, fusewire_graph **graph);

/* Replays a graph on the handle's stream; _run waits for the end, _launch does not. All ranks
   replay in the same order. */
int fusewire_graph_run(const fusewire_graph *graph, const fusewire_comm *comm);
int fusewire_graph_launch(const fusewire_graph *graph, const fusewire_comm *comm);

/* Destroys a graph; replays that are enqueued continue. Null is allowed. */
int fusewire_graph_destroy(fusewire_graph *graph);

#ifdef __cplusplus
}
#endif

#endif
