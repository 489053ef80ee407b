/*
 * Runs rooted collectives, reductions with a factor, collectives with a count for each rank, and
 * batches from C on three ranks, and compares the results with plain C. Started by c.rs:
 *   collectives DEVICE RANK HOST:PORT
 */
#define RANKS 3
#include "batches.h"
#include "check.h"
#include "vector.h"

/* Reduces value(r, i) of all ranks, each multiplied by its factor. */
static float sum_of(int i, const float *factors) {
  float sum = 0;
  for (uint32_t r = 0; r < RANKS; r++) sum += factors[r] * value(r, i);
  return sum;
}

/* Other ranks than the root pass no memory for the buffer that only the root has. */
static void rooted(int plain, int form) {
  static const float ones[RANKS] = {1, 1, 1}, factors[RANKS] = {2, -0.5f, 4};
  float *in = memory(sizeof host, plain), *out = memory(sizeof host, plain);
  for (uint32_t root = 0; root < RANKS; root++) {
    int is_root = rank == root;
    put(in, N);
    RUN(form, reduce, in, is_root ? out : NULL, N, FUSEWIRE_F32, FUSEWIRE_SUM, root);
    get(is_root ? out : in, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == (is_root ? sum_of(i, ones) : value(rank, i)));
    /* In place on the root. Other ranks keep what they pass. */
    put(out, N);
    RUN(form, reduce, in, is_root ? in : out, N, FUSEWIRE_F32, FUSEWIRE_MAX, root);
    get(is_root ? in : out, N);
    for (int i = 0; i < N; i++) {
      float most = fmaxf(fmaxf(value(0, i), value(1, i)), value(2, i));
      TRUE(got[i] == (is_root ? most : value(rank, i)));
    }
    put(in, N);
    RUN(form, reduce_premul_sum, in, is_root ? out : NULL, N, FUSEWIRE_F32, factors[rank], root);
    get(out, N);
    for (int i = 0; i < N; i++) {
      TRUE(got[i] == (is_root ? sum_of(i, factors) : value(rank, i)));
    }

    put(in, RANKS * N), put(out, N);
    RUN(form, scatter, is_root ? in : NULL, out, N, FUSEWIRE_F32, root);
    get(out, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == value(root, (int)rank * N + i));
    RUN(form, scatter, is_root ? in : NULL, is_root ? in + root * N : out, N, FUSEWIRE_F32, root);

    put(in, N), put(out, RANKS * N);
    RUN(form, gather, in, is_root ? out : NULL, N, FUSEWIRE_F32, root);
    get(out, RANKS * N);
    for (int i = 0; i < RANKS * N; i++) {
      TRUE(got[i] == (is_root ? value((uint32_t)(i / N), i % N) : value(rank, i)));
    }
    put(in, N);
    if (is_root) put(out + root * N, N);
    RUN(form, gather, is_root ? out + root * N : in, is_root ? out : NULL, N, FUSEWIRE_F32, root);
    if (is_root) get(out, RANKS * N);
    for (int i = 0; is_root && i < RANKS * N; i++) {
      TRUE(got[i] == value((uint32_t)(i / N), i % N));
    }

    RUN(form, reduce, NULL, NULL, 0, FUSEWIRE_F32, FUSEWIRE_SUM, root);
    RUN(form, reduce_premul_sum, NULL, NULL, 0, FUSEWIRE_F32, 2.0, root);
    RUN(form, scatter, NULL, NULL, 0, FUSEWIRE_F32, root);
    RUN(form, gather, NULL, NULL, 0, FUSEWIRE_F32, root);
  }

  put(in, N);
  RUN(form, all_reduce_premul_sum, in, out, N, FUSEWIRE_F32, factors[rank]);
  get(out, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == sum_of(i, factors));
  put(in, RANKS * N);
  RUN(form, reduce_scatter_premul_sum, in, out, N, FUSEWIRE_F32, factors[rank]);
  get(out, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == sum_of((int)rank * N + i, factors));
  RUN(form, all_reduce_premul_sum, NULL, NULL, 0, FUSEWIRE_F32, 2.0);
  RUN(form, reduce_scatter_premul_sum, NULL, NULL, 0, FUSEWIRE_F32, 2.0);

  int32_t numbers[4] = {1, -2, 3, (int32_t)rank};
  OK(fusewire_upload(comm, in, numbers, sizeof numbers));
  RUN(form, all_reduce_premul_sum, in, in, 4, FUSEWIRE_I32, (double)rank - 5.0);
  OK(fusewire_download(comm, numbers, in, sizeof numbers));
  TRUE(numbers[0] == -12 && numbers[1] == 24 && numbers[2] == -36 && numbers[3] == -10);
  release(in, plain), release(out, plain);
}

/* Makes calls that are refused. They move no data: only rank 1 makes them, and the next operation
   on all ranks succeeds. */
static void refused(void) {
  float x[16] = {0};
  fusewire_work *work = (fusewire_work *)x;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "communicator is NULL",
       fusewire_reduce(NULL, x, NULL, 4, FUSEWIRE_F32, FUSEWIRE_SUM, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input is NULL",
       fusewire_reduce(comm, NULL, NULL, 4, FUSEWIRE_F32, FUSEWIRE_SUM, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output is NULL",
       fusewire_reduce(comm, x, NULL, 4, FUSEWIRE_F32, FUSEWIRE_SUM, rank));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "root 3",
       fusewire_reduce(comm, x, NULL, 4, FUSEWIRE_F32, FUSEWIRE_SUM, RANKS));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "9 is no reduction",
       fusewire_reduce_async(comm, x, NULL, 4, FUSEWIRE_F32, 9, 0, &work));
  TRUE(work == NULL);
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "overlap",
       fusewire_reduce(comm, x, x + 1, 4, FUSEWIRE_F32, FUSEWIRE_SUM, rank));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input is NULL",
       fusewire_scatter(comm, NULL, x, 2, FUSEWIRE_F32, rank));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output is NULL",
       fusewire_scatter(comm, NULL, NULL, 2, FUSEWIRE_F32, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "root 7", fusewire_scatter(comm, NULL, x, 2, FUSEWIRE_F32, 7));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "input has more elements",
       fusewire_gather(comm, x, x, UINT64_MAX, FUSEWIRE_F32, rank));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output has more elements",
       fusewire_gather(comm, x, x, (uint64_t)1 << 46, FUSEWIRE_U8, rank));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "output is NULL",
       fusewire_gather(comm, x, NULL, 2, FUSEWIRE_F32, rank));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "root 3", fusewire_gather(comm, x, NULL, 2, FUSEWIRE_F32, 3));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "0.5 is no integer",
       fusewire_all_reduce_premul_sum(comm, x, x, 4, FUSEWIRE_I32, 0.5));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "no integer",
       fusewire_reduce_scatter_premul_sum(comm, x, x + 12, 2, FUSEWIRE_I32, NAN));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "premul_sum",
       fusewire_reduce_premul_sum(comm, x, NULL, 4, FUSEWIRE_E4M3, 2.0, 0));
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  start(argv, "collectives");
  for (int plain = 0; plain < 2; plain++) {
    for (int form = 0; form < 3; form++) {
      rooted(plain, form);
      vectors(plain, form);
      batches(plain, form);
    }
  }
  captured_vectors();
  captured_batch();
  newer_batch();
  if (rank == 1) {
    refused();
    refused_vectors();
    refused_batches();
  }
  mismatched();
  rooted(0, 0);
  return finish();
}
