/* Part of collectives.c: batches of sends and receives. */
#include "check.h"

static fusewire_p2p message(uint32_t kind, uint32_t peer, void *buffer, uint64_t count,
                            uint32_t dtype) {
  fusewire_p2p op;
  memset(&op, 0, sizeof op);
  op.struct_size = sizeof op;
  op.kind = kind;
  op.peer = peer;
  op.buffer = buffer;
  op.count = count;
  op.dtype = dtype;
  return op;
}

/* Exchanges rows of all ranks, also with this rank, and a second message of another type with each
   neighbour. Repeats the rows so that they exceed the channels. */
static void batches(int plain, int form) {
  enum { ROW = 100 * N };
  float *in = memory(RANKS * ROW * 4, plain), *out = memory(RANKS * ROW * 4, plain);
  uint8_t *small = memory(32, plain);
  static float rows[RANKS * ROW], seen[RANKS * ROW];
  uint8_t bytes[32] = {0};
  fusewire_p2p ops[2 * RANKS + 2];
  uint32_t next = (rank + 1) % RANKS, before = (rank + RANKS - 1) % RANKS, count = 0;
  for (int i = 0; i < RANKS * ROW; i++) rows[i] = value(rank, i);
  OK(fusewire_upload(comm, in, rows, sizeof rows));
  memset(rows, 0xff, sizeof rows);
  OK(fusewire_upload(comm, out, rows, sizeof rows));
  for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(rank * 16 + (uint32_t)i);
  OK(fusewire_upload(comm, small, bytes, sizeof bytes));
  for (uint32_t r = 0; r < RANKS; r++) {
    ops[count++] = message(FUSEWIRE_P2P_SEND, r, in + r * ROW, ROW, FUSEWIRE_F32);
  }
  ops[count++] = message(FUSEWIRE_P2P_SEND, next, small, 16, FUSEWIRE_U8);
  for (uint32_t r = 0; r < RANKS; r++) {
    ops[count++] = message(FUSEWIRE_P2P_RECV, r, out + r * ROW, ROW, FUSEWIRE_F32);
  }
  ops[count++] = message(FUSEWIRE_P2P_RECV, before, small + 16, 16, FUSEWIRE_U8);
  RUN(form, batch, ops, count);
  OK(fusewire_download(comm, seen, out, sizeof seen));
  OK(fusewire_download(comm, bytes, small, sizeof bytes));
  int wrong = 0;
  for (int i = 0; i < RANKS * ROW; i++) {
    wrong += seen[i] != value((uint32_t)(i / ROW), (int)rank * ROW + i % ROW);
  }
  TRUE(wrong == 0);
  for (int i = 0; i < 16; i++) TRUE(bytes[16 + i] == before * 16 + (uint32_t)i);

  /* A batch matches send and receive. An empty message has no memory. */
  put(in, N);
  if (rank == 0) {
    ops[0] = message(FUSEWIRE_P2P_SEND, 1, in, N, FUSEWIRE_F32);
    ops[1] = message(FUSEWIRE_P2P_RECV, 1, out, N, FUSEWIRE_F32);
    ops[2] = message(FUSEWIRE_P2P_SEND, 2, NULL, 0, FUSEWIRE_F32);
    RUN(form, batch, ops, 3);
    get(out, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == value(1, i));
  } else if (rank == 1) {
    RUN(form, recv, out, N, FUSEWIRE_F32, 0);
    RUN(form, send, in, N, FUSEWIRE_F32, 0);
    get(out, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == value(0, i));
  } else {
    ops[0] = message(FUSEWIRE_P2P_RECV, 0, NULL, 0, FUSEWIRE_F32);
    RUN(form, batch, ops, 1);
  }
  RUN(form, batch, NULL, 0);
  release(in, plain), release(out, plain), release(small, plain);
}

/* A program with a newer, larger struct: its size is the distance between the operations. */
static void newer_batch(void) {
  struct {
    fusewire_p2p op;
    uint64_t more;
  } ops[2];
  float *x = memory(2 * N * 4, 1);
  uint32_t next = (rank + 1) % RANKS, before = (rank + RANKS - 1) % RANKS;
  memset(ops, 0, sizeof ops);
  ops[0].op = message(FUSEWIRE_P2P_SEND, next, x, N, FUSEWIRE_F32);
  ops[1].op = message(FUSEWIRE_P2P_RECV, before, x + N, N, FUSEWIRE_F32);
  ops[0].op.struct_size = ops[1].op.struct_size = sizeof ops[0];
  put(x, N);
  OK(fusewire_batch(comm, &ops[0].op, 2));
  get(x + N, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(before, i));
  ops[1].more = 1;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "use a newer library", fusewire_batch(comm, &ops[0].op, 2));
  release(x, 1);
}

/* Captures a batch and replays it. The blocking form cannot be captured. */
static void captured_batch(void) {
  float *x = memory(2 * N * 4, 0);
  uint32_t next = (rank + 1) % RANKS, before = (rank + RANKS - 1) % RANKS;
  fusewire_p2p ops[2];
  fusewire_graph *replay;
  ops[0] = message(FUSEWIRE_P2P_SEND, next, x, N, FUSEWIRE_F32);
  ops[1] = message(FUSEWIRE_P2P_RECV, before, x + N, N, FUSEWIRE_F32);
  OK(fusewire_comm_warm_up(comm));
  OK(fusewire_capture_begin(comm));
  SAYS(FUSEWIRE_ERROR_CAPTURE, "use fusewire_batch_async", fusewire_batch(comm, ops, 2));
  OK(fusewire_batch_async(comm, ops, 2, NULL));
  OK(fusewire_capture_end(comm, &replay));
  memset(ops, 0, sizeof ops);
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < N; i++) host[i] = value(rank, i) + (float)round;
    OK(fusewire_upload(comm, x, host, N * 4));
    OK(fusewire_graph_run(replay, comm));
    get(x + N, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == value(before, i) + (float)round);
  }
  OK(fusewire_graph_destroy(replay));
  release(x, 0);
}

/* Makes calls that are refused on this rank only. */
static void refused_batches(void) {
  float x[16] = {0};
  fusewire_work *work = (fusewire_work *)x;
  fusewire_p2p ops[2];
  uint32_t other = (rank + 1) % RANKS;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "communicator is NULL", fusewire_batch(NULL, NULL, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "fusewire_p2p is NULL", fusewire_batch(comm, NULL, 2));
#define REFUSED(words, change)                                                      \
  do {                                                                              \
    ops[0] = message(FUSEWIRE_P2P_SEND, other, x, 4, FUSEWIRE_F32);                 \
    ops[1] = message(FUSEWIRE_P2P_RECV, other, x + 8, 4, FUSEWIRE_F32);             \
    change;                                                                         \
    SAYS(FUSEWIRE_ERROR_ARGUMENT, words, fusewire_batch(comm, ops, 2));             \
    SAYS(FUSEWIRE_ERROR_ARGUMENT, words, fusewire_batch_async(comm, ops, 2, &work)); \
    TRUE(work == NULL);                                                             \
  } while (0)
  REFUSED("struct_size is 0", ops[0].struct_size = 0);
  REFUSED("ops[1].struct_size is 0", ops[1].struct_size = 0);
  REFUSED("ops[1].struct_size is 48", ops[1].struct_size = 48);
  REFUSED("ops[1].kind 3", ops[1].kind = 3);
  REFUSED("ops[0].kind 0", ops[0].kind = 0);
  REFUSED("ops[1].dtype 99", ops[1].dtype = 99);
  REFUSED("ops[1].buffer is NULL", ops[1].buffer = NULL);
  REFUSED("ops[0].buffer has more elements", ops[0].count = UINT64_MAX);
  REFUSED("peer 3", ops[0].peer = RANKS);
  REFUSED("overlaps", ops[1].buffer = x + 3);
  REFUSED("1 sends of this rank to itself, 0 receives", ops[0].peer = rank);
#undef REFUSED
}
