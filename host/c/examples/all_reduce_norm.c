/*
 * Runs the steps after a layer's GEMM in tensor-parallel decoding in one launch: all_reduce of the
 * partial products, addition of the residual, RMSNorm. Compares the result with plain C.
 *
 *   cc -std=c99 -I host/c/include host/c/examples/all_reduce_norm.c -L target/release \
 *      -lfusewire_c -lm -o all_reduce_norm
 *   LD_LIBRARY_PATH=target/release target/release/fusewire run -n 2 -- ./all_reduce_norm
 *
 * Arguments: a device ("cpu", "cuda:0"), and --wrong, which changes the expected result to show
 * that the comparison can fail.
 */
#include <fusewire.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 4, HIDDEN = 512, COUNT = ROWS * HIDDEN };

static void check(int code, const char *what) {
  if (code != FUSEWIRE_OK) {
    fprintf(stderr, "%s: error %d: %s\n", what, code, fusewire_last_error());
    exit(2);
  }
}

/* Returns element i of the input of rank `rank`. */
static float partial(uint32_t rank, int i) {
  return (float)((i * 37 + (int)rank * 11) % 101 - 50) / 64.0f;
}

static float residual_before(int i) { return (float)((i * 17) % 89 - 44) / 32.0f; }

static float weight_of(int i) { return 0.5f + (float)(i % 7) / 8.0f; }

/* Computes the expected result in plain C. Sums are in rank order. */
static void expect(uint32_t ranks, float epsilon, float *sum, float *out) {
  for (int row = 0; row < ROWS; row++) {
    double squares = 0.0;
    for (int i = row * HIDDEN; i < (row + 1) * HIDDEN; i++) {
      sum[i] = partial(0, i);
      for (uint32_t rank = 1; rank < ranks; rank++) sum[i] += partial(rank, i);
      sum[i] += residual_before(i);
      squares += (double)sum[i] * sum[i];
    }
    double scale = 1.0 / sqrt(squares / HIDDEN + epsilon);
    for (int i = 0; i < HIDDEN; i++) {
      out[row * HIDDEN + i] = (float)(sum[row * HIDDEN + i] * scale * weight_of(i));
    }
  }
}

/* Counts the elements that differ. residual_out must be bitwise identical; the norm may differ by
   its rounding. */
static int wrong(const float *sum, const float *sum_expected, const float *out,
                 const float *expected) {
  int count = 0;
  for (int i = 0; i < COUNT; i++) {
    int same = memcmp(&sum[i], &sum_expected[i], sizeof(float)) == 0;
    int close = fabsf(out[i] - expected[i]) <= 1e-5f * fmaxf(1.0f, fabsf(expected[i]));
    count += !same || !close;
  }
  return count;
}

int main(int argc, char **argv) {
  const char *device = "cpu";
  int spoil = 0;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--wrong") == 0) {
      spoil = 1;
    } else {
      device = argv[i];
    }
  }

  fusewire_comm *comm;
  uint32_t rank, size;
  uint64_t workspace;
  check(fusewire_comm_from_env(device, NULL, &comm), "joining");
  check(fusewire_comm_rank(comm, &rank), "rank");
  check(fusewire_comm_size(comm, &size), "size");
  check(fusewire_comm_workspace_bytes(comm, &workspace), "workspace");

  /* All buffers are parts of one window. */
  const size_t bytes = COUNT * sizeof(float);
  void *window;
  check(fusewire_alloc(comm, 3 * bytes + HIDDEN * sizeof(float), &window), "window");
  float *input = window, *residual = input + COUNT;
  float *output = residual + COUNT, *weight = output + COUNT;

  static float host[COUNT], sum[COUNT], out[COUNT], sum_expected[COUNT], expected[COUNT];
  static float weights[HIDDEN];
  for (int i = 0; i < HIDDEN; i++) weights[i] = weight_of(i);
  check(fusewire_upload(comm, weight, weights, sizeof weights), "weight");

  const fusewire_norm norm = {
      .struct_size = sizeof norm,
      .kind = FUSEWIRE_NORM_RMS,
      .rows = ROWS,
      .hidden = HIDDEN,
      .dtype = FUSEWIRE_F32,
      .epsilon = 1e-6f,
      .input = input,
      .weight = weight,
      .residual = residual,
      .residual_out = residual, /* in place */
      .output = output,
  };
  expect(size, norm.epsilon, sum_expected, expected);
  if (spoil) expected[COUNT / 2] += 0.01f;

  int failed = 0;
  for (int enqueued = 0; enqueued < 2; enqueued++) {
    for (int i = 0; i < COUNT; i++) host[i] = partial(rank, i);
    check(fusewire_upload(comm, input, host, bytes), "input");
    for (int i = 0; i < COUNT; i++) host[i] = residual_before(i);
    check(fusewire_upload(comm, residual, host, bytes), "residual");
    memset(host, 0xff, bytes);
    check(fusewire_upload(comm, output, host, bytes), "output");

    if (enqueued) {
      fusewire_work *work;
      check(fusewire_all_reduce_norm_async(comm, &norm, &work), "all_reduce_norm_async");
      check(fusewire_work_wait(work, 0), "its end");
      fusewire_work_destroy(work);
    } else {
      check(fusewire_all_reduce_norm(comm, &norm), "all_reduce_norm");
    }

    check(fusewire_download(comm, sum, residual, bytes), "residual");
    check(fusewire_download(comm, out, output, bytes), "output");
    int count = wrong(sum, sum_expected, out, expected);
    printf("rank %u of %u on %s: all_reduce + residual + RMSNorm of %d rows of %d, %s: "
           "%d of %d wrong\n",
           rank, size, device, ROWS, HIDDEN, enqueued ? "enqueued" : "blocking", count, COUNT);
    failed |= count != 0;
  }
  printf("rank %u: workspace of %llu bytes; output[0..4] = %.6f %.6f %.6f %.6f\n", rank,
         (unsigned long long)workspace, out[0], out[1], out[2], out[3]);

  check(fusewire_free(comm, window), "freeing the window");
  check(fusewire_barrier(comm), "barrier");
  check(fusewire_comm_destroy(comm), "the end");
  return failed;
}
