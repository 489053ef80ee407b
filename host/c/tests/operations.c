/*
 * Runs every operation from C on two ranks and compares the results with plain C. Started by c.rs:
 *   operations DEVICE RANK HOST:PORT
 */
#include "overlap.h"
#include "check.h"

static void collectives(int plain, int form) {
  float *in = memory(sizeof host, plain), *out = memory(sizeof host, plain);

  put(in, N);
  RUN(form, all_reduce, in, out, N, FUSEWIRE_F32, FUSEWIRE_SUM);
  get(out, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(0, i) + value(1, i));
  RUN(form, all_reduce, in, in, N, FUSEWIRE_F32, FUSEWIRE_MAX);
  get(in, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == fmaxf(value(0, i), value(1, i)));

  put(in, RANKS * N);
  RUN(form, reduce_scatter, in, out, N, FUSEWIRE_F32, FUSEWIRE_AVERAGE);
  get(out, N);
  for (int i = 0; i < N; i++) {
    int at = (int)rank * N + i;
    TRUE(got[i] == (value(0, at) + value(1, at)) / 2.0f);
  }

  RUN(form, all_gather, in, out, N, FUSEWIRE_F32);
  get(out, RANKS * N);
  for (int i = 0; i < RANKS * N; i++) TRUE(got[i] == value((uint32_t)(i / N), i % N));

  RUN(form, all_to_all, in, out, N, FUSEWIRE_F32);
  get(out, RANKS * N);
  for (int i = 0; i < RANKS * N; i++) {
    TRUE(got[i] == value((uint32_t)(i / N), (int)rank * N + i % N));
  }

  put(out, N);
  RUN(form, broadcast, out, N, FUSEWIRE_F32, 1);
  get(out, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(1, i));

  if (rank == 0) {
    RUN(form, send, in, N, FUSEWIRE_F32, 1);
    RUN(form, recv, out, N, FUSEWIRE_F32, 1);
  } else {
    RUN(form, recv, out, N, FUSEWIRE_F32, 0);
    RUN(form, send, in, N, FUSEWIRE_F32, 0);
  }
  get(out, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(1 - rank, i));

  RUN(form, all_reduce, NULL, NULL, 0, FUSEWIRE_F32, FUSEWIRE_SUM);
  release(in, plain);
  release(out, plain);
}

static double e4m3(uint8_t byte) {
  int exponent = byte >> 3 & 15, mantissa = byte & 7;
  double magnitude = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
  return byte & 128 ? -magnitude : magnitude;
}

/* Runs a reduce_scatter with a fused layer norm, which has a bias and a unit offset. The output is
   fp8; the scales of groups are powers of two and are stored in columns. */
static void norms(int enqueued) {
  enum { ROWS = 3, HIDDEN = 320, GROUPS = 3, STRIDE = 5, COUNT = ROWS * HIDDEN };
  float *in = memory(RANKS * COUNT * 4, 0);
  float *weight = memory(HIDDEN * 4, 0), *bias = memory(HIDDEN * 4, 0);
  float *kept = memory(COUNT * 4, 0), *out = memory(COUNT * 4, 0);
  uint8_t *scales = memory(16, 0);
  put(in, RANKS * COUNT);
  put(weight, HIDDEN);
  put(bias, HIDDEN);
  /* Weight and bias differ between the ranks. A reduce_scatter allows this. */
  fusewire_norm norm;
  memset(&norm, 0, sizeof norm);
  norm.struct_size = sizeof norm;
  norm.kind = FUSEWIRE_NORM_LAYER;
  norm.flags = FUSEWIRE_NORM_UNIT_OFFSET;
  norm.rows = ROWS;
  norm.hidden = HIDDEN;
  norm.dtype = FUSEWIRE_F32;
  norm.epsilon = 1e-5f;
  norm.input = in;
  norm.weight = weight;
  norm.bias = bias;
  norm.residual_out = kept;
  norm.output = out;
  if (enqueued) {
    fusewire_work *work;
    OK(fusewire_reduce_scatter_norm_async(comm, &norm, &work));
    end(work);
  } else {
    OK(fusewire_reduce_scatter_norm(comm, &norm));
  }
  static double y[COUNT];
  get(kept, COUNT);
  for (int row = 0; row < ROWS; row++) {
    double mean = 0, squares = 0;
    for (int i = 0; i < HIDDEN; i++) {
      int at = (int)rank * COUNT + row * HIDDEN + i;
      y[row * HIDDEN + i] = value(0, at) + value(1, at);
      TRUE(got[row * HIDDEN + i] == (float)y[row * HIDDEN + i]);
      mean += y[row * HIDDEN + i] / HIDDEN;
    }
    for (int i = 0; i < HIDDEN; i++) squares += pow(y[row * HIDDEN + i] - mean, 2);
    for (int i = 0; i < HIDDEN; i++) {
      double normal = (y[row * HIDDEN + i] - mean) / sqrt(squares / HIDDEN + norm.epsilon);
      y[row * HIDDEN + i] = normal * (1.0 + value(rank, i)) + value(rank, i);
    }
  }
  get(out, COUNT);
  for (int i = 0; i < COUNT; i++) TRUE(fabs(got[i] - y[i]) <= 1e-4);

  norm.scaling = FUSEWIRE_SCALE_GROUPS;
  norm.scale_dtype = FUSEWIRE_U8;
  norm.scale_stride = STRIDE;
  norm.scales = scales;
  if (enqueued) {
    OK(fusewire_reduce_scatter_norm_async(comm, &norm, NULL));
    OK(fusewire_comm_synchronize(comm));
  } else {
    OK(fusewire_reduce_scatter_norm(comm, &norm));
  }
  uint8_t exponents[16], bytes[COUNT];
  OK(fusewire_download(comm, exponents, scales, 16));
  OK(fusewire_download(comm, bytes, out, COUNT));
  for (int row = 0; row < ROWS; row++) {
    for (int group = 0; group < GROUPS; group++) {
      int first = row * HIDDEN + group * 128, count = group == GROUPS - 1 ? HIDDEN - 256 : 128;
      double most = 0, scale = ldexp(1.0, exponents[group * STRIDE + row] - 127);
      for (int i = first; i < first + count; i++) most = fmax(most, fabs(y[i]));
      TRUE(scale >= most / 448 * 0.9999 && scale < most / 448 * 2.0001);
      for (int i = first; i < first + count; i++) {
        TRUE(fabs(e4m3(bytes[i]) * scale - y[i]) <= fabs(y[i]) / 15 + scale / 512);
      }
    }
  }
  for (int at = 0; at < 16; at++) {
    if (at % STRIDE >= ROWS || at >= (GROUPS - 1) * STRIDE + ROWS) TRUE(exponents[at] == 0);
  }
  release(in, 0), release(weight, 0), release(bias, 0);
  release(kept, 0), release(out, 0), release(scales, 0);
}

/* Captures a graph once and replays it twice. */
static void graph(void) {
  float *x = memory(N * 4, 0);
  fusewire_graph *replay;
  OK(fusewire_comm_warm_up(comm));
  OK(fusewire_capture_begin(comm));
  OK(fusewire_all_reduce_async(comm, x, x, N, FUSEWIRE_F32, FUSEWIRE_SUM, NULL));
  GIVES(FUSEWIRE_ERROR_CAPTURE, fusewire_free(comm, x));
  OK(fusewire_capture_end(comm, &replay));
  put(x, N);
  OK(fusewire_graph_run(replay, comm));
  OK(fusewire_graph_launch(replay, comm));
  OK(fusewire_comm_synchronize(comm));
  get(x, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == 2.0f * (value(0, i) + value(1, i)));
  OK(fusewire_graph_destroy(replay));
  release(x, 0);
}

/* Looks up a function of the CUDA driver. */
static void symbol(void *library, const char *name, void *function) {
  void *found = dlsym(library, name);
  if (found == NULL) {
    printf("no %s in the driver\n", name);
    exit(1);
  }
  memcpy(function, &found, sizeof found);
}

/* Uses a stream and memory that the caller created with the CUDA driver, as an inference engine
   does. */
static void own_stream(void) {
  if (strncmp(device, "cuda", 4) != 0) return;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context, *stream, *raw;
  int gpu, (*get_device)(int *, int), (*retain)(void **, int), (*set_current)(void *);
  int (*create)(void **, unsigned), (*wait)(void *), (*destroy)(void *);
  int (*allocate)(unsigned long long *, size_t), (*release_memory)(unsigned long long);
  unsigned long long x;
  TRUE(driver != NULL);
  symbol(driver, "cuDeviceGet", &get_device);
  symbol(driver, "cuDevicePrimaryCtxRetain", &retain);
  symbol(driver, "cuCtxSetCurrent", &set_current);
  symbol(driver, "cuStreamCreate", &create);
  symbol(driver, "cuStreamSynchronize", &wait);
  symbol(driver, "cuStreamDestroy_v2", &destroy);
  symbol(driver, "cuMemAlloc_v2", &allocate);
  symbol(driver, "cuMemFree_v2", &release_memory);
  TRUE(get_device(&gpu, 0) == 0 && retain(&context, gpu) == 0 && set_current(context) == 0);
  TRUE(create(&stream, 1) == 0 && allocate(&x, N * 4) == 0);
  raw = (void *)(uintptr_t)x;

  fusewire_comm *on;
  fusewire_graph *replay;
  OK(fusewire_comm_on_stream(comm, stream, &on));
  for (int registered = 0; registered < 2; registered++) {
    if (registered) OK(fusewire_register(comm, raw, N * 4));
    if (registered) SAYS(FUSEWIRE_ERROR_ARGUMENT, "in a window already",
                         fusewire_register(comm, raw, 4));
    put(raw, N);
    OK(fusewire_all_reduce_async(on, raw, raw, N, FUSEWIRE_F32, FUSEWIRE_SUM, NULL));
    TRUE(wait(stream) == 0);
    get(raw, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == value(0, i) + value(1, i));

    OK(fusewire_capture_begin(on));
    OK(fusewire_all_reduce_async(on, raw, raw, N, FUSEWIRE_F32, FUSEWIRE_SUM, NULL));
    OK(fusewire_capture_end(on, &replay));
    OK(fusewire_graph_launch(replay, on));
    TRUE(wait(stream) == 0);
    get(raw, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == 2.0f * (value(0, i) + value(1, i)));
    OK(fusewire_graph_destroy(replay));
  }
  /* Null is the legacy default stream, which PyTorch uses by default. */
  fusewire_comm *on_default;
  OK(fusewire_comm_on_stream(comm, NULL, &on_default));
  put(raw, N);
  OK(fusewire_all_reduce_async(on_default, raw, raw, N, FUSEWIRE_F32, FUSEWIRE_SUM, NULL));
  TRUE(wait(NULL) == 0);
  get(raw, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(0, i) + value(1, i));
  SAYS(FUSEWIRE_ERROR_CAPTURE, "cannot be captured", fusewire_capture_begin(on_default));
  OK(fusewire_capture_begin(on));
  SAYS(FUSEWIRE_ERROR_CAPTURE, "legacy default stream",
       fusewire_all_reduce_async(on_default, raw, raw, N, FUSEWIRE_F32, FUSEWIRE_SUM, NULL));
  OK(fusewire_barrier_async(on, NULL));
  OK(fusewire_capture_end(on, &replay));
  OK(fusewire_graph_destroy(replay));
  OK(fusewire_comm_destroy(on_default));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "no memory of fusewire_alloc", fusewire_free(comm, raw));
  OK(fusewire_deregister(comm, raw));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "no memory of fusewire_register", fusewire_deregister(comm, raw));
  /* The next operation uses another stream, so the communicator no longer needs this stream. */
  OK(fusewire_barrier(comm));
  OK(fusewire_comm_destroy(on));
  TRUE(wait(stream) == 0 && destroy(stream) == 0 && release_memory(x) == 0);
}

/* Finds the two greatest logits of each row, and the log-sum-exp of each row. The logits ascend
   over the columns of both ranks. Rank 1 has fewer columns. */
static void sampling(int enqueued) {
  enum { ROWS = 3, FIRST = 20, ALL = 33, STRIDE = 24, K = 2 };
  static float logits[ROWS * STRIDE];
  float *in = memory(sizeof logits, 0);
  float *values = memory(ROWS * K * 4, 0), *sums = memory(ROWS * 4, 0);
  int32_t *indices = memory(ROWS * K * 4, 0);
  int first = rank == 0 ? 0 : FIRST, columns = rank == 0 ? FIRST : ALL - FIRST;
  for (int at = 0; at < ROWS * STRIDE; at++) {
    int row = at / STRIDE, column = at % STRIDE;
    logits[at] = column < columns ? (float)(first + column) * (row == 1 ? -0.25f : 0.5f) : 1e6f;
  }
  OK(fusewire_upload(comm, in, logits, sizeof logits));
  fusewire_vocab vocab;
  memset(&vocab, 0, sizeof vocab);
  vocab.struct_size = sizeof vocab;
  vocab.dtype = FUSEWIRE_F32;
  vocab.rows = ROWS;
  vocab.vocabulary = ALL;
  vocab.first = (uint64_t)first;
  vocab.columns = (uint64_t)columns;
  vocab.stride = STRIDE;
  vocab.k = K;
  vocab.index_dtype = FUSEWIRE_I32;
  vocab.logits = in;
  vocab.indices = indices;
  vocab.values = values;
  vocab.log_sum_exp = sums;
  if (enqueued) {
    fusewire_work *work;
    OK(fusewire_vocab_parallel_async(comm, &vocab, &work));
    end(work);
  } else {
    OK(fusewire_vocab_parallel(comm, &vocab));
  }
  int32_t found[ROWS * K];
  float seen[ROWS * K], summed[ROWS];
  OK(fusewire_download(comm, found, indices, sizeof found));
  OK(fusewire_download(comm, seen, values, sizeof seen));
  OK(fusewire_download(comm, summed, sums, sizeof summed));
  for (int row = 0; row < ROWS; row++) {
    double slope = row == 1 ? -0.25 : 0.5, sum = 0;
    for (int position = 0; position < K; position++) {
      int column = row == 1 ? position : ALL - 1 - position;
      TRUE(found[row * K + position] == column);
      TRUE(seen[row * K + position] == (float)(column * slope));
    }
    for (int column = 0; column < ALL; column++) sum += exp(column * slope);
    TRUE(fabs(summed[row] - log(sum)) <= 1e-5);
  }
  release(in, 0);
  release(values, 0);
  release(sums, 0);
  release(indices, 0);
}

/* Makes calls that are refused. They move no data: only rank 1 makes them, and the next operation
   on both ranks succeeds. */
static void refused(void) {
  float x[16] = {0};
  void *at = x;
  fusewire_norm norm;
  fusewire_work *work = (fusewire_work *)x;
  memset(&norm, 0, sizeof norm);
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "communicator is NULL", fusewire_barrier(NULL));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input is NULL",
       fusewire_all_reduce(comm, NULL, x, 4, FUSEWIRE_F32, FUSEWIRE_SUM));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "99 is no type",
       fusewire_all_reduce(comm, x, x, 4, 99, FUSEWIRE_SUM));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "0 is no reduction",
       fusewire_all_reduce(comm, x, x, 4, FUSEWIRE_F32, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "no reduction",
       fusewire_all_reduce(comm, x, x, 4, FUSEWIRE_F32, FUSEWIRE_BIT_OR));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "not aligned",
       fusewire_broadcast(comm, (char *)x + 1, 1, FUSEWIRE_F32, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "more elements",
       fusewire_all_gather(comm, x, x, UINT64_MAX, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "overlap", fusewire_all_to_all(comm, x, x + 1, 4, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "root 2", fusewire_broadcast(comm, x, 4, FUSEWIRE_F32, 2));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "this rank itself",
       fusewire_send_async(comm, x, 4, FUSEWIRE_F32, rank, &work));
  TRUE(work == NULL);
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "struct_size is 0", fusewire_all_reduce_norm(comm, &norm));
  norm.struct_size = sizeof norm;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "dtype 0", fusewire_all_reduce_norm(comm, &norm));
  norm.dtype = FUSEWIRE_F32;
  norm.rows = 1;
  norm.hidden = 8;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input is NULL", fusewire_all_reduce_norm(comm, &norm));
  norm.input = norm.weight = x;
  norm.output = x + 4;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "overlap", fusewire_all_reduce_norm(comm, &norm));
  norm.kind = 7;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "kind 7", fusewire_all_reduce_norm(comm, &norm));
  norm.kind = 0;
  norm.flags = 8;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "flags 0x8", fusewire_all_reduce_norm(comm, &norm));
  norm.flags = 0;
  norm.scaling = FUSEWIRE_SCALE_ROWS;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "scales is NULL", fusewire_all_reduce_norm(comm, &norm));
  norm.scale = x;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "does not use", fusewire_all_reduce_norm(comm, &norm));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "norm is NULL", fusewire_all_reduce_norm(comm, NULL));

  fusewire_vocab vocab;
  memset(&vocab, 0, sizeof vocab);
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "struct_size is 0", fusewire_vocab_parallel(comm, &vocab));
  vocab.struct_size = sizeof vocab;
  vocab.dtype = FUSEWIRE_F32;
  vocab.rows = 1;
  vocab.columns = 8;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "logits is NULL", fusewire_vocab_parallel(comm, &vocab));
  vocab.logits = x;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "a vocabulary of 0", fusewire_vocab_parallel(comm, &vocab));
  vocab.vocabulary = 16;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "nothing is asked for", fusewire_vocab_parallel(comm, &vocab));
  vocab.k = 65;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "indices is NULL", fusewire_vocab_parallel(comm, &vocab));
  vocab.indices = x + 8;
  vocab.index_dtype = FUSEWIRE_I32;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "the 65 greatest", fusewire_vocab_parallel(comm, &vocab));
  vocab.k = 0;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "indices must be NULL", fusewire_vocab_parallel(comm, &vocab));
  vocab.k = 1;
  vocab.first = 9;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "columns 9..17", fusewire_vocab_parallel(comm, &vocab));
  vocab.first = 0;
  vocab.stride = 7;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "a stride of 7", fusewire_vocab_parallel(comm, &vocab));
  vocab.flags = 2;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "flags 0x2", fusewire_vocab_parallel(comm, &vocab));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "vocab is NULL", fusewire_vocab_parallel(comm, NULL));

  /* The struct of a newer program: fields that the library does not know must be zero. */
  struct {
    fusewire_norm norm;
    uint64_t more;
  } newer = {norm, 0};
  newer.norm.scaling = FUSEWIRE_SCALE_NONE;
  newer.norm.scale = NULL;
  newer.norm.struct_size = sizeof newer;
  newer.norm.kind = 7;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "kind 7", fusewire_all_reduce_norm(comm, &newer.norm));
  newer.more = 1;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "use a newer library", fusewire_all_reduce_norm(comm, &newer.norm));

  SAYS(FUSEWIRE_ERROR_ARGUMENT, "no memory of fusewire_alloc", fusewire_free(comm, x));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "0 bytes", fusewire_alloc(comm, 0, &at));
  TRUE(at == NULL);
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "NULL", fusewire_alloc(comm, 8, NULL));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "work is NULL", fusewire_work_wait(NULL, 0));
  OK(fusewire_comm_destroy(NULL));
  OK(fusewire_work_destroy(NULL));
  OK(fusewire_graph_destroy(NULL));
  if (on_cpu()) {
    fusewire_comm *other = comm;
    SAYS(FUSEWIRE_ERROR_ARGUMENT, "streams", fusewire_comm_on_stream(comm, x, &other));
    SAYS(FUSEWIRE_ERROR_ARGUMENT, "streams", fusewire_comm_on_stream(comm, NULL, &other));
    TRUE(other == NULL);
    OK(fusewire_capture_begin(comm));
    OK(fusewire_barrier(comm));
    GIVES(FUSEWIRE_ERROR_CAPTURE, fusewire_capture_begin(comm));
    fusewire_graph *replay;
    OK(fusewire_capture_end(comm, &replay));
    OK(fusewire_graph_destroy(replay));
  }
}

/* Memory that peers cannot map is refused on every rank, with a message for C programs. Operations
   use it through staging. */
static void registration(void) {
  if (!on_cpu()) return;
  static float x[64];
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "allocate it with fusewire_alloc",
       fusewire_register(comm, x, sizeof x));
  OK(fusewire_all_reduce(comm, x, x, 64, FUSEWIRE_F32, FUSEWIRE_SUM));
}

/* Splits a communicator: both ranks in reverse order, each rank alone, and one rank in no part. */
static void parts(void) {
  const uint32_t turned[RANKS] = {1, 0};
  fusewire_comm *part;
  uint32_t own;
  float *x = memory(N * 4, 1);
  OK(fusewire_comm_split(comm, turned, RANKS, "turned", &part));
  OK(fusewire_comm_rank(part, &own));
  TRUE(own == 1 - rank);
  put(x, N);
  OK(fusewire_broadcast(part, x, N, FUSEWIRE_F32, 0));
  get(x, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(1, i));
  OK(fusewire_comm_destroy(part));

  OK(fusewire_comm_split(comm, &rank, 1, NULL, &part));
  OK(fusewire_comm_size(part, &own));
  TRUE(own == 1);
  OK(fusewire_comm_destroy(part));

  OK(fusewire_comm_split(comm, rank == 0 ? &rank : NULL, rank == 0, NULL, &part));
  TRUE((part == NULL) == (rank == 1));
  OK(fusewire_comm_destroy(part));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "does not have this rank",
       fusewire_comm_split(comm, &turned[rank], 1, NULL, &part));
  TRUE(part == NULL);
  release(x, 1);
}

/* Creates more communicators over the store that the first communicator serves. Each must fail with
   the expected error. */
static void failing(const char *store) {
  fusewire_options options;
  fusewire_comm *other;
  float x[16] = {0};
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.store_is_served = 1;
  options.timeout_seconds = 60.0;
  OK(fusewire_comm_create("cpu", rank, RANKS, store, "aborted", &options, &other));
  OK(fusewire_comm_failure(other));
  OK(fusewire_barrier(other));
  /* Rank 1 may leave the barrier above while rank 0 still waits in it. If rank 1 aborted `other`
     then, rank 0's wait would fail. A barrier of `comm` prevents this. */
  OK(fusewire_barrier(comm));
  if (rank == 0) {
    SAYS(FUSEWIRE_ERROR_ABORTED, "aborted", fusewire_barrier(other));
  } else {
    OK(fusewire_comm_abort(other));
  }
  SAYS(FUSEWIRE_ERROR_ABORTED, "aborted", fusewire_comm_failure(other));
  GIVES(FUSEWIRE_ERROR_ABORTED, fusewire_comm_destroy(other));

  OK(fusewire_comm_create("cpu", rank, RANKS, store, "mismatched", &options, &other));
  SAYS(FUSEWIRE_ERROR_MISMATCH, "all_reduce",
       fusewire_all_reduce(other, x, x, 8 + rank, FUSEWIRE_F32, FUSEWIRE_SUM));
  GIVES(FUSEWIRE_ERROR_MISMATCH, fusewire_comm_destroy(other));

  options.store_is_served = 0;
  if (rank == 0) {
    SAYS(FUSEWIRE_ERROR_BOOTSTRAP, "rank 0 cannot serve",
         fusewire_comm_create("cpu", 0, RANKS, store, "second", &options, &other));
  }
  options.store_is_served = 1;
  options.timeout_seconds = 0.2;
  OK(fusewire_barrier(comm));
  if (rank == 0) {
    SAYS(FUSEWIRE_ERROR_COMMUNICATOR, "rank 1 did not join",
         fusewire_comm_create("cpu", 0, RANKS, store, "alone", &options, &other));
  }
  TRUE(rank != 0 || other == NULL);
  OK(fusewire_barrier(comm));
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  device = argv[1];
  rank = (uint32_t)atoi(argv[2]);
  uint64_t promised, held;
  uint32_t own;
  TRUE(strcmp(fusewire_last_error(), "") == 0);
  TRUE(fusewire_version() == FUSEWIRE_VERSION);
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "host:port",
       fusewire_comm_create(device, 0, 1, "nowhere", NULL, NULL, &comm));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "\"abacus\"",
       fusewire_comm_create("abacus", 0, 1, argv[3], NULL, NULL, &comm));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "rank 5 of 2",
       fusewire_comm_create(device, 5, 2, argv[3], NULL, NULL, &comm));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "comm is NULL",
       fusewire_comm_create(device, 0, 1, argv[3], NULL, NULL, NULL));
  OK(fusewire_comm_create(device, rank, RANKS, argv[3], "operations", NULL, &comm));
  OK(fusewire_comm_rank(comm, &own));
  TRUE(own == rank);
  OK(fusewire_comm_size(comm, &own));
  TRUE(own == RANKS);
  OK(fusewire_workspace_bytes(device, RANKS, NULL, &promised));
  OK(fusewire_comm_workspace_bytes(comm, &held));
  TRUE(promised == held && held > 2 << 20);

  for (int plain = 0; plain < 2; plain++) {
    for (int form = 0; form < 3; form++) collectives(plain, form);
  }
  norms(0);
  norms(1);
  sampling(0);
  sampling(1);
  graph();
  overlapped();
  own_stream();
  if (rank == 1) refused();
  registration();
  parts();
  failing(argv[3]);
  fusewire_comm *again;
  OK(fusewire_comm_on_own_stream(comm, &again));
  OK(fusewire_comm_destroy(comm));
  comm = again;
  collectives(0, 1);
  return finish();
}
