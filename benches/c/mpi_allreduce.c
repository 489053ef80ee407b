/* The MPI side of `versus mpi`: MPI_Allreduce of float sums, out of place. The measurement loop is
 * the same as for the other libraries (src/measure.rs): barrier, read the clock, call, read the
 * clock. The reported times are those of rank 0.
 *
 *   mpi_allreduce BYTES:ITERATIONS,... CORE,... TOUCH
 *
 * Rank r runs on core r modulo the number of cores; with "-", on any. Rank 0 prints a line
 * "bytes median_ns min_ns wrong" for each size, where wrong counts wrong elements of all ranks. */
#define _GNU_SOURCE
#include <math.h>
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  long long x = *(const long long *)a, y = *(const long long *)b;
  return (x > y) - (x < y);
}

/* Returns small integers, whose sums are exact in any order. */
static float element(int rank, long long i) {
  return (float)((rank + 1) * (i % 13 + 1));
}

static void pin(int rank, const char *cores) {
  int list[64], n = 0;
  if (*cores == '-') return;
  for (char *p = (char *)cores; *p && n < 64;) {
    list[n++] = (int)strtol(p, &p, 10);
    if (*p == ',') p++;
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(list[rank % n], &set);
  if (sched_setaffinity(0, sizeof set, &set)) perror("sched_setaffinity");
}

static void fill(int rank, float *in, long long count) {
  for (long long i = 0; i < count; i++) in[i] = element(rank, i);
}

static long long wrong_elements(int ranks, const float *out, long long count) {
  long long wrong = 0;
  float factor = (float)(ranks * (ranks + 1) / 2);
  for (long long i = 0; i < count; i++)
    if (out[i] != factor * (float)(i % 13 + 1)) wrong++;
  return wrong;
}

int main(int argc, char **argv) {
  int rank, ranks;
  if (argc != 4) return 2;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  pin(rank, argv[2]);
  int touch = atoi(argv[3]);
  volatile float sink = 0;
  for (char *p = argv[1]; *p;) {
    long long bytes = strtoll(p, &p, 10);
    long long iterations = strtoll(p + 1, &p, 10);
    if (*p == ',') p++;
    long long count = bytes / 4, wrong = 0, total = 0;
    float *in = malloc(bytes), *out = malloc(bytes);
    long long *times = malloc(iterations * sizeof *times);
    if (!in || !out || !times) MPI_Abort(MPI_COMM_WORLD, 1);
    fill(rank, in, count);
    for (long long i = 0; i < count; i++) out[i] = NAN;
    MPI_Allreduce(in, out, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    wrong += wrong_elements(ranks, out, count);
    long long warm = iterations / 10 + 2;
    for (long long i = -warm; i < iterations; i++) {
      if (touch) {
        fill(rank, in, count);
        float sum = 0;
        for (long long k = 0; k < count; k += 16) sum += out[k];
        sink = sum;
      }
      MPI_Barrier(MPI_COMM_WORLD);
      long long start = now();
      MPI_Allreduce(in, out, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      long long end = now();
      if (i >= 0) times[i] = end - start;
    }
    wrong += wrong_elements(ranks, out, count);
    MPI_Reduce(&wrong, &total, 1, MPI_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    qsort(times, iterations, sizeof *times, ascending);
    if (rank == 0) {
      printf("%lld %lld %lld %lld\n", bytes, times[iterations / 2], times[0], total);
      fflush(stdout);
    }
    free(in), free(out), free(times);
  }
  (void)sink;
  MPI_Finalize();
  return 0;
}
