/* Part of collectives.c: all_gather_v, reduce_scatter_v and all_to_all_v, whose counts differ
   between the ranks. */
#include "check.h"

enum { UNIT = 200 };

/* Number of elements that rank `of` gathers, and the number before its part. Rank 1 has none. */
static uint64_t gathered(uint32_t of) { return of == 1 ? 0 : (of + 1) * UNIT; }
static int gathered_before(uint32_t of) {
  int before = 0;
  for (uint32_t r = 0; r < of; r++) before += (int)gathered(r);
  return before;
}

/* Number of elements that rank `from` sends to rank `to`. `round` varies it. Some numbers are 0. */
static uint64_t exchanged(int round, uint32_t from, uint32_t to) {
  return (uint64_t)((int)(from * 2 + to * 3) + round) % 4 * UNIT;
}

static void set_splits(int round, uint64_t *sent, uint64_t *received) {
  for (uint32_t r = 0; r < RANKS; r++) {
    sent[r] = exchanged(round, rank, r);
    received[r] = exchanged(round, r, rank);
  }
}

static uint64_t total(const uint64_t *counts) {
  uint64_t sum = 0;
  for (int r = 0; r < RANKS; r++) sum += counts[r];
  return sum;
}

static void check_gathered(const float *out) {
  get(out, gathered_before(RANKS));
  for (uint32_t r = 0; r < RANKS; r++) {
    for (int i = 0; i < (int)gathered(r); i++) TRUE(got[gathered_before(r) + i] == value(r, i));
  }
}

static void check_scattered(const float *out) {
  get(out, (int)gathered(rank));
  for (int i = 0, at = gathered_before(rank); i < (int)gathered(rank); i++, at++) {
    TRUE(got[i] == value(0, at) + value(1, at) + value(2, at));
  }
}

static void check_exchanged(int round, const float *out) {
  int at = 0;
  get(out, RANKS * N);
  for (uint32_t from = 0; from < RANKS; from++) {
    int skipped = 0;
    for (uint32_t r = 0; r < rank; r++) skipped += (int)exchanged(round, from, r);
    for (int i = 0; i < (int)exchanged(round, from, rank); i++, at++) {
      TRUE(got[at] == value(from, skipped + i));
    }
  }
}

/* Overwrites numbers that a call must have copied. */
static void scribble(uint64_t *counts) { memset(counts, 0x5a, RANKS * sizeof *counts); }

static void vectors(int plain, int form) {
  float *in = memory(sizeof host, plain), *out = memory(sizeof host, plain);
  uint64_t counts[RANKS], sent[RANKS], received[RANKS];
  uint64_t *on_device = memory(2 * sizeof counts, 0);
  fusewire_work *work;
  for (uint32_t r = 0; r < RANKS; r++) counts[r] = gathered(r);

  put(in, N);
  RUN(form, all_gather_v, in, out, counts, FUSEWIRE_F32);
  check_gathered(out);
  /* The input is this rank's part of the output. */
  put(in, RANKS * N);
  for (int i = 0; i < (int)gathered(rank); i++) host[gathered_before(rank) + i] = value(rank, i);
  OK(fusewire_upload(comm, in, host, sizeof host));
  RUN(form, all_gather_v, in + gathered_before(rank), in, counts, FUSEWIRE_F32);
  check_gathered(in);
  OK(fusewire_upload(comm, on_device, counts, sizeof counts));
  put(in, N), put(out, RANKS * N);
  RUN(form, all_gather_v_device, in, counts[rank], out, total(counts), on_device, FUSEWIRE_F32);
  check_gathered(out);

  put(in, RANKS * N);
  RUN(form, reduce_scatter_v, in, out, counts, FUSEWIRE_F32, FUSEWIRE_SUM);
  check_scattered(out);
  /* The output is this rank's part of the input. */
  RUN(form, reduce_scatter_v, in, in + gathered_before(rank), counts, FUSEWIRE_F32, FUSEWIRE_SUM);
  check_scattered(in + gathered_before(rank));

  for (int round = 0; round < 3; round++) {
    set_splits(round, sent, received);
    put(in, RANKS * N);
    RUN(form, all_to_all_v, in, sent, out, received, FUSEWIRE_F32);
    check_exchanged(round, out);
    OK(fusewire_upload(comm, on_device, sent, sizeof sent));
    OK(fusewire_upload(comm, on_device + RANKS, received, sizeof received));
    put(out, RANKS * N);
    RUN(form, all_to_all_v_device, in, RANKS * N, on_device, out, RANKS * N, on_device + RANKS,
        FUSEWIRE_F32);
    check_exchanged(round, out);
  }

  /* The call has copied numbers in host memory when it returns. */
  OK(fusewire_all_gather_v_async(comm, in, out, counts, FUSEWIRE_F32, &work));
  scribble(counts);
  end(work);
  check_gathered(out);
  for (uint32_t r = 0; r < RANKS; r++) counts[r] = gathered(r);
  OK(fusewire_reduce_scatter_v_async(comm, in, out, counts, FUSEWIRE_F32, FUSEWIRE_SUM, &work));
  scribble(counts);
  end(work);
  check_scattered(out);
  set_splits(1, sent, received);
  OK(fusewire_all_to_all_v_async(comm, in, sent, out, received, FUSEWIRE_F32, &work));
  scribble(sent), scribble(received);
  end(work);
  check_exchanged(1, out);

  memset(counts, 0, sizeof counts);
  RUN(form, all_gather_v, NULL, NULL, counts, FUSEWIRE_F32);
  RUN(form, reduce_scatter_v, NULL, NULL, counts, FUSEWIRE_F32, FUSEWIRE_SUM);
  RUN(form, all_to_all_v, NULL, counts, NULL, counts, FUSEWIRE_F32);
  OK(fusewire_upload(comm, on_device, counts, sizeof counts));
  RUN(form, all_gather_v_device, NULL, 0, NULL, 0, on_device, FUSEWIRE_F32);
  RUN(form, all_to_all_v_device, NULL, 0, on_device, NULL, 0, on_device, FUSEWIRE_F32);
  release(in, plain), release(out, plain), release(on_device, 0);
}

/* A graph keeps its copy of counts in host memory. Each replay reads splits in device memory. */
static void captured_vectors(void) {
  float *in = memory(sizeof host, 0), *gather = memory(sizeof host, 0);
  float *exchange = memory(sizeof host, 0), *again = memory(sizeof host, 0);
  uint64_t counts[RANKS], sent[RANKS], received[RANKS];
  uint64_t *on_device = memory(2 * sizeof counts, 0);
  fusewire_graph *replay;
  for (uint32_t r = 0; r < RANKS; r++) counts[r] = gathered(r);
  set_splits(0, sent, received);
  OK(fusewire_upload(comm, on_device, sent, sizeof sent));
  OK(fusewire_upload(comm, on_device + RANKS, received, sizeof received));
  OK(fusewire_comm_warm_up(comm));
  OK(fusewire_capture_begin(comm));
  OK(fusewire_all_gather_v_async(comm, in, gather, counts, FUSEWIRE_F32, NULL));
  OK(fusewire_all_to_all_v_async(comm, in, sent, exchange, received, FUSEWIRE_F32, NULL));
  OK(fusewire_all_to_all_v_device_async(comm, in, RANKS * N, on_device, again, RANKS * N,
                                        on_device + RANKS, FUSEWIRE_F32, NULL));
  OK(fusewire_capture_end(comm, &replay));
  scribble(counts);
  for (int round = 0; round < 3; round++) {
    set_splits(round, sent, received);
    OK(fusewire_upload(comm, on_device, sent, sizeof sent));
    OK(fusewire_upload(comm, on_device + RANKS, received, sizeof received));
    put(gather, RANKS * N), put(exchange, RANKS * N), put(again, RANKS * N);
    put(in, RANKS * N);
    OK(fusewire_graph_run(replay, comm));
    check_gathered(gather);
    check_exchanged(0, exchange);
    check_exchanged(round, again);
  }
  OK(fusewire_graph_destroy(replay));
  release(in, 0), release(gather, 0), release(exchange, 0), release(again, 0);
  release(on_device, 0);
}

/* Counts that disagree between ranks end a communicator with a mismatch. */
static void mismatched(void) {
  static const uint32_t all[RANKS] = {0, 1, 2};
  float *x = memory(4 * RANKS * sizeof *x, 0), *y = x + 2 * RANKS;
  uint64_t counts[RANKS] = {1, 1, 1};
  fusewire_comm *part;
  OK(fusewire_comm_split(comm, all, RANKS, "mismatched", &part));
  counts[2] += rank == 0;
  SAYS(FUSEWIRE_ERROR_MISMATCH, "all_gather_v",
       fusewire_all_gather_v(part, x, y, counts, FUSEWIRE_F32));
  GIVES(FUSEWIRE_ERROR_MISMATCH, fusewire_comm_destroy(part));
  release(x, 0);
}

/* Makes calls that are refused on this rank only. */
static void refused_vectors(void) {
  float x[16] = {0};
  uint64_t ones[RANKS] = {1, 1, 1}, huge[RANKS] = {UINT64_MAX, 1, 1};
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "communicator is NULL",
       fusewire_all_gather_v(NULL, x, x, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "counts is NULL",
       fusewire_all_gather_v(comm, x, x, NULL, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "counts is at",
       fusewire_all_gather_v(comm, x, x, (const uint64_t *)(const void *)((char *)ones + 1),
                             FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input is NULL",
       fusewire_all_gather_v(comm, NULL, x, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output is NULL",
       fusewire_all_gather_v(comm, x, NULL, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output has more elements",
       fusewire_all_gather_v(comm, x, x, huge, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "0 is no type", fusewire_all_gather_v(comm, x, x, ones, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "overlap",
       fusewire_all_gather_v(comm, x, x, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "counts is NULL",
       fusewire_reduce_scatter_v(comm, x, x, NULL, FUSEWIRE_F32, FUSEWIRE_SUM));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input has more elements",
       fusewire_reduce_scatter_v(comm, x, x, huge, FUSEWIRE_F32, FUSEWIRE_SUM));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output is NULL",
       fusewire_reduce_scatter_v(comm, x, NULL, ones, FUSEWIRE_F32, FUSEWIRE_SUM));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input_splits is NULL",
       fusewire_all_to_all_v(comm, x, NULL, x + 8, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output_splits is NULL",
       fusewire_all_to_all_v(comm, x, ones, x + 8, NULL, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input has more elements",
       fusewire_all_to_all_v(comm, x, huge, x + 8, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "overlap",
       fusewire_all_to_all_v(comm, x, ones, x + 1, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "counts is NULL",
       fusewire_all_gather_v_device(comm, x, 1, x + 8, 3, NULL, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input_splits is NULL",
       fusewire_all_to_all_v_device(comm, x, 3, NULL, x + 8, 3, ones, FUSEWIRE_F32));
  if (!on_cpu()) return;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output has 4 elements; 3 are needed",
       fusewire_all_gather_v_device(comm, x, 1, x + 8, 4, ones, FUSEWIRE_F32));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output has 2 elements; the splits need 3",
       fusewire_all_to_all_v_device(comm, x, 3, ones, x + 8, 2, ones, FUSEWIRE_F32));
}
