/* The MPI side of `moe --mpicc`: dispatch and combine of a mixture of experts with MPI_Alltoall and
 * MPI_Alltoallv. It does what Fusewire's operations do: a rank sends a token once to each rank that
 * holds any of its experts, with its number, experts and weights, and the results have the same
 * order and the same bits.
 *
 *   mpi_moe HIDDEN:TOKENS:bf16|fp8:rank|expert:CALLS,... CORE,... EXPERTS TOP_K SKEWED
 *
 * The experts of a token, the elements and the measurement loop are those of src/moe: barrier, read
 * the clock, dispatch, read the clock, and the same for combine. The reported times are those of
 * rank 0. Rank r runs on core r modulo the number of cores; with "-", on any. Rank 0 prints a line
 * for each case: median ns of dispatch and combine, wrong values, rows that all ranks have sent,
 * sums of the bits of received rows and of results, bytes of a row, other bytes that a rank sends
 * in a dispatch. */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GROUP 128 /* Channels of fp8 that share a scale. */
#define CHUNK 256 /* Elements that combine adds at once. */

typedef struct {
  int rank, ranks, experts, top_k, skewed, each;
  int hidden, tokens, fp8, by_expert;
  size_t payload, scales, header, row; /* Bytes. */
  int *ids;                            /* Of all ranks. */
  int *rank_of;                        /* Rank of each expert. */
  float *weights;
  uint16_t *x, *y, *out;
  uint8_t *sent, *arrived, *copies, *copied_scales;
  uint16_t *packed, *returned;
  int *counts, *offsets, *sources, *row_ids;
  float *row_weights;
  int *rows_to, *selections_to, *rows_from, *selections_from; /* By rank. */
  int *send, *send_at, *receive, *receive_at, *next, *last;
} Moe;

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  long long x = *(const long long *)a, y = *(const long long *)b;
  return (x > y) - (x < y);
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

/* Returns zeroed memory whose pages exist. */
static void *memory(size_t bytes) {
  void *all = malloc(bytes + 64);
  if (!all) MPI_Abort(MPI_COMM_WORLD, 1);
  return memset(all, 0, bytes + 64);
}

/* The routing and the elements: the same as in src/moe/routing.rs. */

static uint64_t below(uint64_t *random, uint64_t bound) {
  *random ^= *random << 13;
  *random ^= *random >> 7;
  *random ^= *random << 17;
  return (*random >> 11) % bound;
}

static int contains(const int *ids, int count, int id) {
  for (int i = 0; i < count; i++)
    if (ids[i] == id) return 1;
  return 0;
}

static void select_experts(const Moe *m, int rank, int *ids) {
  uint64_t random = (uint64_t)(rank + 1) * 0x9e3779b97f4a7c15ULL, all = m->experts;
  uint64_t favored = all / 8 > 1 ? all / 8 : 1;
  for (int token = 0; token < m->tokens; token++, ids += m->top_k) {
    for (int chosen = 0; chosen < m->top_k;) {
      int is_favored = m->skewed && below(&random, 10) < 8;
      int id = (int)below(&random, is_favored ? favored : all);
      if (contains(ids, chosen, id)) id = (int)below(&random, all);
      if (!contains(ids, chosen, id)) ids[chosen++] = id;
    }
  }
}

static uint32_t hash(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ x >> 16;
}

static uint16_t bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float widened(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

/* Returns the bits of a multiple of 1/64 from -127/64 to 127/64, which bf16 represents. */
static uint16_t value_of(uint32_t seed) {
  return bf16((float)((int)(hash(seed) % 255) - 127) * 0.015625f);
}

static uint32_t token_seed(int rank, int token) {
  return hash((uint32_t)rank << 20 | (uint32_t)token);
}

static void elements_of(const Moe *m, int rank, int token, uint16_t *row) {
  uint32_t seed = token_seed(rank, token);
  for (int i = 0; i < m->hidden; i++) row[i] = value_of(seed + (uint32_t)i);
}

static void result_of(const Moe *m, int rank, int token, int expert, uint16_t *row) {
  uint32_t seed = hash(token_seed(rank, token) ^ (uint32_t)(expert + 1));
  for (int i = 0; i < m->hidden; i++) row[i] = value_of(seed + (uint32_t)i);
}

static float weight_of(int token, int selection) {
  return 1.0f / (float)(2 + (token + selection) % 7);
}

/* Returns the E4M3 next to a value of at most 448, ties to even. */
static inline uint8_t e4m3(float value) {
  uint32_t bits, small_bits;
  memcpy(&bits, &value, 4);
  uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  float absolute, small;
  memcpy(&absolute, &magnitude, 4);
  /* Below 2^-6, codes are multiples of 2^-9, the last bit of 2^14 + x. */
  small = absolute + 16384.0f;
  memcpy(&small_bits, &small, 4);
  uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  uint32_t normal = rounded - ((127 - 7) << 3);
  uint32_t code = magnitude < 0x3c800000 ? small_bits & 0xf : normal;
  return (uint8_t)(sign | (code > 0x7e ? 0x7e : code));
}

static void quantize(const uint16_t *x, int hidden, uint8_t *payload, float *scales) {
  for (int group = 0; group < hidden / GROUP; group++, x += GROUP, payload += GROUP) {
    float values[GROUP];
    uint32_t greatest_bits = 0;
    for (int i = 0; i < GROUP; i++) {
      uint32_t bits = (uint32_t)x[i] << 16, magnitude = bits & 0x7fffffff;
      memcpy(&values[i], &bits, 4);
      greatest_bits = magnitude > greatest_bits ? magnitude : greatest_bits;
    }
    float greatest;
    memcpy(&greatest, &greatest_bits, 4);
    if (greatest < 1e-4f) greatest = 1e-4f;
    scales[group] = greatest / 448.0f;
    float factor = 448.0f / greatest;
    for (int i = 0; i < GROUP; i++) payload[i] = e4m3(values[i] * factor);
  }
}

/* The operations. */

static const int *own_ids(const Moe *m) {
  return m->ids + (size_t)m->rank * m->tokens * m->top_k;
}

static int is_first(Moe *m, int rank, int token) {
  int first = m->last[rank] != token;
  m->last[rank] = token;
  return first;
}

static void clear_last(Moe *m) {
  for (int rank = 0; rank < m->ranks; rank++) m->last[rank] = -1;
}

/* Counts the rows and the selections for each rank. */
static void route(Moe *m) {
  const int *ids = own_ids(m);
  memset(m->rows_to, 0, m->ranks * sizeof(int));
  memset(m->selections_to, 0, m->ranks * sizeof(int));
  clear_last(m);
  for (int token = 0; token < m->tokens; token++)
    for (int k = 0; k < m->top_k; k++) {
      int id = ids[token * m->top_k + k];
      if (id < 0) continue;
      m->selections_to[m->rank_of[id]]++;
      m->rows_to[m->rank_of[id]] += is_first(m, m->rank_of[id], token);
    }
}

/* Writes the rows for each rank, one rank after another. */
static void pack(Moe *m) {
  const int *ids = own_ids(m);
  uint8_t quantized[m->payload + m->scales];
  int first = 0;
  for (int rank = 0; rank < m->ranks; rank++) {
    m->next[rank] = first;
    first += m->rows_to[rank];
  }
  clear_last(m);
  for (int token = 0; token < m->tokens; token++) {
    const int *selected = ids + token * m->top_k;
    const uint16_t *x = m->x + (size_t)token * m->hidden;
    const uint8_t *payload = (const uint8_t *)x;
    if (m->fp8) {
      quantize(x, m->hidden, quantized, (float *)(quantized + m->payload));
      payload = quantized;
    }
    for (int k = 0; k < m->top_k; k++) {
      if (selected[k] < 0 || !is_first(m, m->rank_of[selected[k]], token)) continue;
      uint8_t *row = m->sent + (size_t)m->next[m->rank_of[selected[k]]]++ * m->row;
      memcpy(row, payload, m->payload + m->scales);
      int *header = (int *)(row + m->payload + m->scales);
      header[0] = token;
      memcpy(header + 1, selected, m->top_k * sizeof(int));
      memcpy(header + 1 + m->top_k, m->weights + (size_t)token * m->top_k,
             m->top_k * sizeof(float));
    }
  }
}

/* Returns a row from `rank`. In rank-major order, the rows of a rank start at fixed places. */
static const uint8_t *arrived_row(const Moe *m, int rank, int index) {
  return m->arrived + ((size_t)rank * m->tokens + index) * m->row;
}

static const int *header_of(const Moe *m, const uint8_t *row) {
  return (const int *)(row + m->payload + m->scales);
}

/* Counts the selections of each expert and of each rank, and computes the first rows. */
static void place_experts(Moe *m) {
  memset(m->counts, 0, m->each * sizeof(int));
  for (int rank = 0; rank < m->ranks; rank++) {
    int selections = 0;
    for (int i = 0; i < m->rows_from[rank]; i++) {
      const int *ids = header_of(m, arrived_row(m, rank, i)) + 1;
      for (int k = 0; k < m->top_k; k++)
        if (ids[k] >= 0 && m->rank_of[ids[k]] == m->rank) {
          m->counts[ids[k] - m->rank * m->each]++;
          selections++;
        }
    }
    m->selections_from[rank] = selections;
  }
  m->offsets[0] = 0;
  for (int e = 0; e < m->each; e++) m->offsets[e + 1] = m->offsets[e] + m->counts[e];
}

/* Copies the rows to their experts, in the order of rank, token and selection. */
static void copy_to_experts(Moe *m) {
  int next[m->each];
  memcpy(next, m->offsets, m->each * sizeof(int));
  for (int rank = 0; rank < m->ranks; rank++)
    for (int i = 0; i < m->rows_from[rank]; i++) {
      const uint8_t *row = arrived_row(m, rank, i);
      const int *header = header_of(m, row), *ids = header + 1;
      const float *weights = (const float *)(header + 1 + m->top_k);
      for (int k = 0; k < m->top_k; k++) {
        if (ids[k] < 0 || m->rank_of[ids[k]] != m->rank) continue;
        int expert = ids[k] - m->rank * m->each, to = next[expert]++;
        memcpy(m->copies + to * m->payload, row, m->payload);
        memcpy(m->copied_scales + to * m->scales, row + m->payload, m->scales);
        m->sources[2 * to] = rank;
        m->sources[2 * to + 1] = header[0];
        m->row_ids[to] = expert;
        m->row_weights[to] = weights[k];
      }
    }
  int all = m->ranks * m->tokens * m->top_k;
  for (int row = m->offsets[m->each]; row < all; row++) m->row_ids[row] = -1;
}

/* Describes the rows where they have arrived. */
static void describe_ranks(Moe *m) {
  for (int rank = 0; rank < m->ranks; rank++) {
    int selections = 0;
    for (int i = 0; i < m->tokens; i++) {
      int row = rank * m->tokens + i;
      int *out = m->row_ids + (size_t)row * m->top_k;
      if (i >= m->rows_from[rank]) {
        for (int k = 0; k < m->top_k; k++) out[k] = -1;
        continue;
      }
      const int *header = header_of(m, arrived_row(m, rank, i)), *ids = header + 1;
      m->sources[2 * row] = rank;
      m->sources[2 * row + 1] = header[0];
      for (int k = 0; k < m->top_k; k++) {
        int is_here = ids[k] >= 0 && m->rank_of[ids[k]] == m->rank;
        out[k] = is_here ? ids[k] - m->rank * m->each : -1;
        selections += is_here;
      }
      memcpy(m->row_weights + (size_t)row * m->top_k, header + 1 + m->top_k,
             m->top_k * sizeof(float));
    }
    m->selections_from[rank] = selections;
  }
}

static void dispatch(Moe *m) {
  route(m);
  pack(m);
  MPI_Alltoall(m->rows_to, 1, MPI_INT, m->rows_from, 1, MPI_INT, MPI_COMM_WORLD);
  int at = 0;
  for (int rank = 0; rank < m->ranks; rank++) {
    m->send[rank] = m->rows_to[rank] * (int)m->row;
    m->send_at[rank] = at;
    at += m->send[rank];
    m->receive[rank] = m->rows_from[rank] * (int)m->row;
    m->receive_at[rank] = rank * m->tokens * (int)m->row;
  }
  MPI_Alltoallv(m->sent, m->send, m->send_at, MPI_BYTE, m->arrived, m->receive, m->receive_at,
                MPI_BYTE, MPI_COMM_WORLD);
  if (m->by_expert) {
    place_experts(m);
    copy_to_experts(m);
  } else {
    describe_ranks(m);
  }
}

/* Packs the results of the selections in the order of rank, token and selection. */
static void pack_results(Moe *m) {
  int next[m->each];
  size_t bytes = (size_t)m->hidden * 2, packed = 0;
  if (m->by_expert) memcpy(next, m->offsets, m->each * sizeof(int));
  for (int rank = 0; rank < m->ranks; rank++)
    for (int i = 0; i < m->rows_from[rank]; i++) {
      const int *ids = header_of(m, arrived_row(m, rank, i)) + 1;
      size_t row = (size_t)rank * m->tokens + i;
      for (int k = 0; k < m->top_k; k++) {
        if (ids[k] < 0 || m->rank_of[ids[k]] != m->rank) continue;
        size_t from = row * m->top_k + k;
        if (m->by_expert) from = next[ids[k] - m->rank * m->each]++;
        memcpy(m->packed + packed++ * m->hidden, m->y + from * m->hidden, bytes);
      }
    }
}

/* Adds the results of each token in the order of its selections. */
static void add_results(Moe *m) {
  const int *ids = own_ids(m);
  int first = 0;
  for (int rank = 0; rank < m->ranks; rank++) {
    m->next[rank] = first;
    first += m->selections_to[rank];
  }
  for (int token = 0; token < m->tokens; token++) {
    const uint16_t *results[m->top_k];
    float weights[m->top_k];
    int count = 0;
    for (int k = 0; k < m->top_k; k++) {
      int id = ids[token * m->top_k + k];
      if (id < 0) continue;
      weights[count] = m->weights[(size_t)token * m->top_k + k];
      results[count++] = m->returned + (size_t)m->next[m->rank_of[id]]++ * m->hidden;
    }
    uint16_t *out = m->out + (size_t)token * m->hidden;
    for (int at = 0; at < m->hidden; at += CHUNK) {
      int length = m->hidden - at < CHUNK ? m->hidden - at : CHUNK;
      float sum[CHUNK] = {0};
      for (int k = 0; k < count; k++)
        for (int i = 0; i < length; i++) sum[i] += weights[k] * widened(results[k][at + i]);
      for (int i = 0; i < length; i++) out[at + i] = bf16(sum[i]);
    }
  }
}

static void combine(Moe *m) {
  pack_results(m);
  int send_at = 0, receive_at = 0;
  for (int rank = 0; rank < m->ranks; rank++) {
    m->send[rank] = m->selections_from[rank] * m->hidden;
    m->send_at[rank] = send_at;
    send_at += m->send[rank];
    m->receive[rank] = m->selections_to[rank] * m->hidden;
    m->receive_at[rank] = receive_at;
    receive_at += m->receive[rank];
  }
  MPI_Alltoallv(m->packed, m->send, m->send_at, MPI_UINT16_T, m->returned, m->receive,
                m->receive_at, MPI_UINT16_T, MPI_COMM_WORLD);
  add_results(m);
}

/* Verification. */

static uint64_t sum_of(uint64_t sum, const void *data, size_t bytes) {
  const uint32_t *words = data;
  for (size_t i = 0; i < bytes / 4; i++) sum = (sum ^ words[i]) * 0x100000001b3ULL;
  return sum;
}

/* Returns the number of wrong rows. Writes the results of the experts, and adds to the sum of the
 * bits of the rows. */
static long long check_rows(Moe *m, uint64_t *sum) {
  long long wrong = 0;
  uint16_t *x = memory(m->hidden * 2);
  uint8_t *expected = memory(m->payload + m->scales);
  int next[m->each];
  if (m->by_expert) memcpy(next, m->offsets, m->each * sizeof(int));
  for (int rank = 0; rank < m->ranks; rank++) {
    int index = 0;
    for (int token = 0; token < m->tokens; token++) {
      const int *ids = m->ids + ((size_t)rank * m->tokens + token) * m->top_k;
      int is_ready = 0;
      for (int k = 0; k < m->top_k; k++) {
        if (m->rank_of[ids[k]] != m->rank) continue;
        if (!is_ready) {
          is_ready = 1;
          elements_of(m, rank, token, x);
          if (m->fp8)
            quantize(x, m->hidden, expected, (float *)(expected + m->payload));
          else
            memcpy(expected, x, m->payload);
        }
        int expert = ids[k] - m->rank * m->each;
        size_t row = (size_t)rank * m->tokens + index, item = row * m->top_k + k;
        const uint8_t *payload = arrived_row(m, rank, index), *scales = payload + m->payload;
        if (m->by_expert) {
          row = item = next[expert]++;
          payload = m->copies + row * m->payload;
          scales = m->copied_scales + row * m->scales;
        }
        wrong += memcmp(payload, expected, m->payload) != 0;
        wrong += memcmp(scales, expected + m->payload, m->scales) != 0;
        wrong += m->sources[2 * row] != rank || m->sources[2 * row + 1] != token;
        wrong += m->row_ids[item] != expert || m->row_weights[item] != weight_of(token, k);
        result_of(m, rank, token, ids[k], m->y + item * m->hidden);
      }
      index += is_ready;
    }
    wrong += index != m->rows_from[rank];
    for (int i = 0; i < m->rows_from[rank] && !m->by_expert; i++)
      *sum = sum_of(*sum, arrived_row(m, rank, i), m->payload + m->scales);
  }
  for (int row = 0; m->by_expert && row < m->offsets[m->each]; row++) {
    *sum = sum_of(*sum, m->copies + row * m->payload, m->payload);
    *sum = sum_of(*sum, m->copied_scales + row * m->scales, m->scales);
  }
  free(x), free(expected);
  return wrong;
}

/* Returns the number of wrong elements. */
static long long check_results(const Moe *m, uint64_t *sum) {
  long long wrong = 0;
  uint16_t *y = memory(m->hidden * 2);
  float *expected = memory(m->hidden * sizeof(float));
  for (int token = 0; token < m->tokens; token++) {
    const uint16_t *out = m->out + (size_t)token * m->hidden;
    memset(expected, 0, m->hidden * sizeof(float));
    for (int k = 0; k < m->top_k; k++) {
      result_of(m, m->rank, token, own_ids(m)[token * m->top_k + k], y);
      for (int i = 0; i < m->hidden; i++) expected[i] += weight_of(token, k) * widened(y[i]);
    }
    for (int i = 0; i < m->hidden; i++) wrong += out[i] != bf16(expected[i]);
  }
  *sum = sum_of(*sum, m->out, (size_t)m->tokens * m->hidden * 2);
  free(y), free(expected);
  return wrong;
}

/* The measurement. */

static void allocate(Moe *m) {
  size_t ranks = m->ranks, tokens = m->tokens, k = m->top_k, hidden = m->hidden;
  size_t rows = ranks * tokens, items = rows * k, index = ranks * sizeof(int);
  int copies = m->top_k < m->ranks ? m->top_k : m->ranks;
  m->payload = m->fp8 ? hidden : 2 * hidden;
  m->scales = m->fp8 ? hidden / GROUP * 4 : 0;
  m->header = (4 + 8 * k + 15) / 16 * 16;
  m->row = (m->payload + m->scales + m->header + 15) / 16 * 16;
  if (rows * m->row >> 31 || items * hidden >> 31) MPI_Abort(MPI_COMM_WORLD, 1);
  m->each = (m->experts + m->ranks - 1) / m->ranks;
  m->ids = memory(items * sizeof(int));
  m->rank_of = memory(m->experts * sizeof(int));
  m->weights = memory(tokens * k * sizeof(float));
  m->x = memory(tokens * hidden * 2), m->out = memory(tokens * hidden * 2);
  m->y = memory(items * hidden * 2), m->packed = memory(items * hidden * 2);
  m->returned = memory(tokens * k * hidden * 2);
  m->sent = memory(tokens * copies * m->row), m->arrived = memory(rows * m->row);
  m->copies = memory(m->by_expert ? items * m->payload : 0);
  m->copied_scales = memory(m->by_expert ? items * m->scales : 0);
  m->counts = memory(m->each * sizeof(int)), m->offsets = memory((m->each + 1) * sizeof(int));
  m->sources = memory(2 * items * sizeof(int)), m->row_ids = memory(items * sizeof(int));
  m->row_weights = memory(items * sizeof(float));
  m->rows_to = memory(index), m->selections_to = memory(index);
  m->rows_from = memory(index), m->selections_from = memory(index);
  m->send = memory(index), m->send_at = memory(index);
  m->receive = memory(index), m->receive_at = memory(index);
  m->next = memory(index), m->last = memory(index);
  for (int id = 0; id < m->experts; id++) m->rank_of[id] = id / m->each;
  for (int rank = 0; rank < m->ranks; rank++)
    select_experts(m, rank, m->ids + (size_t)rank * tokens * k);
  for (int token = 0; token < m->tokens; token++) {
    elements_of(m, m->rank, token, m->x + token * hidden);
    for (int i = 0; i < m->top_k; i++) m->weights[token * k + i] = weight_of(token, i);
  }
}

static void release(Moe *m) {
  free(m->ids), free(m->rank_of), free(m->weights), free(m->x), free(m->y), free(m->out);
  free(m->sent), free(m->arrived), free(m->copies), free(m->copied_scales), free(m->packed);
  free(m->returned), free(m->counts), free(m->offsets), free(m->sources), free(m->row_ids);
  free(m->row_weights), free(m->rows_to), free(m->selections_to), free(m->rows_from);
  free(m->selections_from), free(m->send), free(m->send_at), free(m->receive);
  free(m->receive_at), free(m->next), free(m->last);
}

static long long timed(Moe *m, void operation(Moe *)) {
  MPI_Barrier(MPI_COMM_WORLD);
  long long start = now();
  operation(m);
  return now() - start;
}

static void measure(Moe *m, int calls) {
  unsigned long long own[4] = {0}, all[4];
  uint64_t sums[2] = {0};
  dispatch(m);
  own[0] += check_rows(m, &sums[0]);
  combine(m);
  own[0] += check_results(m, &sums[1]);
  long long *times[2] = {memory(calls * sizeof(long long)), memory(calls * sizeof(long long))};
  for (int i = -(calls / 10 + 2); i < calls; i++) {
    long long dispatched = timed(m, dispatch), combined = timed(m, combine);
    if (i < 0) continue;
    times[0][i] = dispatched;
    times[1][i] = combined;
  }
  uint64_t again = 0;
  own[0] += check_results(m, &again);
  for (int rank = 0; rank < m->ranks; rank++) own[1] += m->rows_to[rank];
  own[2] = sums[0], own[3] = sums[1];
  MPI_Reduce(own, all, 4, MPI_UNSIGNED_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
  for (int i = 0; i < 2; i++) qsort(times[i], calls, sizeof(long long), ascending);
  if (m->rank == 0) {
    printf("%lld %lld %llu %llu %llu %llu %zu %zu\n", times[0][calls / 2], times[1][calls / 2],
           all[0], all[1], all[2], all[3], m->row, m->ranks * sizeof(int));
    fflush(stdout);
  }
  free(times[0]), free(times[1]);
}

int main(int argc, char **argv) {
  Moe m = {0};
  if (argc != 6) return 2;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &m.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &m.ranks);
  pin(m.rank, argv[2]);
  m.experts = atoi(argv[3]), m.top_k = atoi(argv[4]), m.skewed = atoi(argv[5]);
  for (char *p = argv[1]; *p;) {
    char payload[8], layout[8];
    int calls, length = 0;
    if (sscanf(p, "%d:%d:%7[^:]:%7[^:]:%d%n", &m.hidden, &m.tokens, payload, layout, &calls,
               &length) != 5 || calls < 1)
      MPI_Abort(MPI_COMM_WORLD, 2);
    p += length;
    if (*p == ',') p++;
    m.fp8 = !strcmp(payload, "fp8"), m.by_expert = !strcmp(layout, "expert");
    allocate(&m);
    measure(&m, calls);
    release(&m);
  }
  MPI_Finalize();
  return 0;
}
