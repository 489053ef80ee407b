/*
 * Runs dispatch and combine of a mixture of experts from C on two or four ranks, and compares the
 * results with plain C. Started by c.rs:
 *   moe DEVICE RANK HOST:PORT
 */
#include "check.h"
#include "moe.h"

/* ---- A micro-batch ---- */

static fusewire_moe *moe;
static fusewire_moe_info info;

/* Buffers of a micro-batch in device memory, and its last dispatch. */
typedef struct batch {
  uint32_t index;
  int seed;
  void *x, *y, *out;
  int32_t *ids;
  float *weights;
  fusewire_moe_dispatched received;
} batch;

static void new_moe(void) {
  OK(fusewire_moe_create(comm, &config, &moe));
  memset(&info, 0xff, sizeof info);
  info.struct_size = sizeof info;
  OK(fusewire_moe_query(moe, &info));
}

static void end_moe(void) {
  OK(fusewire_moe_free(comm, moe));
  OK(fusewire_moe_destroy(moe));
}

static void new_batch(batch *to, uint32_t index) {
  memset(to, 0, sizeof *to);
  to->index = index;
  to->x = memory(MAX_TOKENS * HIDDEN * element(), 0);
  to->ids = memory(MAX_TOKENS * TOP_K * 4, 0);
  to->weights = memory(MAX_TOKENS * TOP_K * 4, 0);
  to->y = memory(info.results * HIDDEN * element(), 0);
  to->out = memory(MAX_TOKENS * HIDDEN * element(), 0);
}

static void end_batch(batch *of) {
  release(of->x, 0), release(of->ids, 0), release(of->weights, 0);
  release(of->y, 0), release(of->out, 0);
}

/* Writes the inputs of a seed. */
static void write_inputs(batch *to, int seed) {
  static uint8_t x[MAX_TOKENS * HIDDEN * 4];
  int32_t ids[MAX_TOKENS * TOP_K];
  float weights[MAX_TOKENS * TOP_K];
  uint32_t tokens = tokens_of(rank, seed);
  to->seed = seed;
  for (uint32_t t = 0; t < tokens; t++) {
    for (int i = 0; i < HIDDEN; i++) store(x, t * HIDDEN + (size_t)i, x_of(rank, t, i, seed));
    for (int k = 0; k < TOP_K; k++) {
      ids[t * TOP_K + (uint32_t)k] = id_of(rank, t, k, seed);
      weights[t * TOP_K + (uint32_t)k] = weight_of(rank, t, k);
    }
  }
  OK(fusewire_upload(comm, to->x, x, tokens * HIDDEN * element()));
  OK(fusewire_upload(comm, to->ids, ids, tokens * TOP_K * 4));
  OK(fusewire_upload(comm, to->weights, weights, tokens * TOP_K * 4));
}

/* Dispatches the inputs, or sends them. A rank without tokens passes no buffers. */
static void send_batch(batch *of, int half) {
  uint32_t tokens = tokens_of(rank, of->seed);
  const void *x = tokens == 0 ? NULL : of->x;
  const int32_t *ids = tokens == 0 ? NULL : of->ids;
  const float *weights = tokens == 0 ? NULL : of->weights;
  memset(&of->received, 0xff, sizeof of->received);
  of->received.struct_size = sizeof of->received;
  if (half) {
    OK(fusewire_moe_dispatch_send(comm, moe, of->index, x, ids, weights, tokens, &of->received));
  } else {
    OK(fusewire_moe_dispatch(comm, moe, of->index, x, ids, weights, tokens, &of->received));
  }
}

/* Compares a row of x and its scales with the token. */
static void check_row(const row *expect, int seed, const uint8_t *x, const uint8_t *scales) {
  static sent token;
  send_token(expect->source, expect->token, seed, &token);
  TRUE(memcmp(x, token.x, HIDDEN * (has_scales() ? 1 : element())) == 0);
  if (has_scales()) {
    TRUE(memcmp(scales, token.scales, has_byte_scales() ? GROUPS : 4 * GROUPS) == 0);
  }
}

/* Reads the scales of a row. */
static void read_scales(const fusewire_moe_dispatched *from, uint64_t at, uint8_t *scales) {
  const char *all = from->scales;
  if (has_flag(FUSEWIRE_MOE_COLUMN_SCALES)) {
    /* On little-endian machines, the bytes of a word are the scales of four groups in order. */
    for (uint64_t column = 0; column < (has_byte_scales() ? (GROUPS + 3) / 4 : GROUPS); column++) {
      const char *word = all + 4 * (column * from->scales_stride + at);
      OK(fusewire_download(comm, scales + 4 * column, word, 4));
    }
  } else {
    size_t size = has_byte_scales() ? 1 : 4;
    OK(fusewire_download(comm, scales, all + size * at * from->scales_stride, GROUPS * size));
  }
}

/* Returns the type of the received scales. */
static uint32_t scale_type(void) {
  if (!has_scales()) return FUSEWIRE_DTYPE_DEFAULT;
  if (!has_byte_scales()) return FUSEWIRE_F32;
  return has_flag(FUSEWIRE_MOE_COLUMN_SCALES) ? FUSEWIRE_U32 : FUSEWIRE_U8;
}

/* Compares the result of a dispatch with what this rank must receive. */
static void check_received(const batch *of, const expected *expect) {
  const fusewire_moe_dispatched *it = &of->received;
  size_t x_size = has_scales() ? 1 : element();
  uint32_t width = is_expert_major() ? 1 : TOP_K;
  uint32_t counts[RANKS + EXPERTS], offsets[RANKS + EXPERTS + 1], sources[2 * MAX_ROWS];
  int32_t ids[MAX_ROWS * TOP_K];
  float weights[MAX_ROWS * TOP_K];
  TRUE(it->micro_batch == of->index && it->rows == info.rows && it->rows <= MAX_ROWS);
  TRUE(it->x_stride == info.x_stride && it->scales_stride == info.scales_stride);
  TRUE(it->dtype == (has_scales() ? FUSEWIRE_E4M3 : input_type()) && it->ids_per_row == width);
  TRUE(it->scale_dtype == scale_type() && (it->scales_stride > 0) == has_scales());
  TRUE((it->scales != NULL) == has_scales() && (it->offsets != NULL) == has_offsets());
  if (has_flag(FUSEWIRE_MOE_COLUMN_SCALES)) TRUE(it->scales_stride == (it->rows + 3) / 4 * 4);
  uint32_t count = is_expert_major() ? local_experts() : RANKS;
  OK(fusewire_download(comm, counts, it->counts, count * 4));
  for (uint32_t i = 0; i < count; i++) TRUE(counts[i] == expect->counts[i]);
  if (has_offsets()) {
    OK(fusewire_download(comm, offsets, it->offsets, (count + 1) * 4));
    for (uint32_t i = 0; i <= count; i++) TRUE(offsets[i] == expect->offsets[i]);
  }
  OK(fusewire_download(comm, sources, it->sources, it->rows * 8));
  OK(fusewire_download(comm, ids, it->ids, it->rows * width * 4));
  OK(fusewire_download(comm, weights, it->weights, it->rows * width * 4));
  for (uint32_t r = 0; r < it->rows; r++) {
    const row *wanted = &expect->rows[r];
    for (uint32_t k = 0; k < width; k++) {
      TRUE(ids[r * width + k] == (wanted->is_used ? wanted->ids[k] : -1));
      if (wanted->is_used) TRUE(weights[r * width + k] == wanted->weights[k]);
    }
    if (!wanted->is_used) continue;
    uint8_t x[HIDDEN * 4], scales[GROUPS * 4];
    TRUE(sources[2 * r] == wanted->source && sources[2 * r + 1] == wanted->token);
    OK(fusewire_download(comm, x, (char *)it->x + r * it->x_stride * x_size, HIDDEN * x_size));
    if (has_scales()) read_scales(it, r, scales);
    check_row(wanted, of->seed, x, scales);
  }
}

/* Runs the experts. Rows that are no results are NaN. */
static void write_results(const batch *of, const expected *expect) {
  size_t bytes = HIDDEN * element();
  char *y = malloc(info.results * bytes);
  memset(y, 0xff, info.results * bytes);
  for (uint32_t r = 0; r < info.rows; r++) {
    const row *given = &expect->rows[r];
    static sent token;
    if (!given->is_used) continue;
    send_token(given->source, given->token, of->seed, &token);
    for (int k = 0; k < given->width; k++) {
      size_t result = r * (uint32_t)given->width + (uint32_t)k;
      for (int i = 0; given->ids[k] >= 0 && i < HIDDEN; i++) {
        store(y + result * bytes, (size_t)i, apply(given->experts[k], token.values[i]));
      }
    }
  }
  OK(fusewire_upload(comm, of->y, y, info.results * bytes));
  free(y);
}

/* Sets all sums to NaN, and all bits of the missing results, which a combine must overwrite. */
static void clear_sums(const batch *of) {
  static uint8_t nan[MAX_TOKENS * HIDDEN * 4];
  uint32_t *missing;
  memset(nan, 0xff, sizeof nan);
  OK(fusewire_upload(comm, of->out, nan, MAX_TOKENS * HIDDEN * element()));
  OK(fusewire_moe_missing(moe, of->index, &missing));
  OK(fusewire_upload(comm, missing, nan, MAX_TOKENS * 4));
}

/* Compares the mask and the missing results with the absent rank. */
static void check_missing(const batch *of) {
  uint32_t mask[RANKS], missing[MAX_TOKENS], *at = NULL;
  OK(fusewire_moe_mask(moe, &at));
  OK(fusewire_download(comm, mask, at, sizeof mask));
  for (uint32_t r = 0; r < RANKS; r++) TRUE(mask[r] == (r == absent));
  OK(fusewire_moe_missing(moe, of->index, &at));
  OK(fusewire_download(comm, missing, at, sizeof missing));
  for (uint32_t t = 0; t < MAX_TOKENS; t++) {
    uint32_t wanted = 0;
    for (int k = 0; k < TOP_K; k++) {
      wanted |= (uint32_t)is_missing(id_of(rank, t, k, of->seed)) << k;
    }
    int is_written = has_flag(FUSEWIRE_MOE_MASK_MISSING) && t < tokens_of(rank, of->seed);
    TRUE(missing[t] == (is_written ? wanted : UINT32_MAX));
  }
}

/* Compares the sums of this rank's tokens. Memory after them keeps its contents. */
static void check_sums(const batch *of) {
  static uint8_t sums[MAX_TOKENS * HIDDEN * 4], wanted[HIDDEN * 4];
  size_t bytes = HIDDEN * element();
  OK(fusewire_download(comm, sums, of->out, MAX_TOKENS * bytes));
  for (uint32_t t = 0; t < MAX_TOKENS; t++) {
    memset(wanted, 0xff, sizeof wanted);
    if (t < tokens_of(rank, of->seed)) expect_sum(t, of->seed, wanted);
    TRUE(memcmp(sums + t * bytes, wanted, bytes) == 0);
  }
  check_missing(of);
}

static void *sums_of(const batch *of) { return tokens_of(rank, of->seed) == 0 ? NULL : of->out; }

/* ---- Tests ---- */

/* The operations of `rounds` wait. */
static int is_blocking;

static void complete(void) {
  if (!is_blocking) OK(fusewire_comm_synchronize(comm));
}

/* Runs three rounds with each micro-batch. With `halves`, the halves of the micro-batches
   alternate. */
static void rounds(uint32_t batches, int halves) {
  static expected expect[2];
  uint64_t selections[EXPERTS] = {0}, seen[EXPERTS], waits[RANKS], *at = NULL;
  batch all[2];
  config.in_flight = batches;
  new_moe();
  OK(fusewire_moe_set_blocking(moe, is_blocking));
  TRUE(info.local_experts == local_experts() && info.blocks >= 1 && info.bytes > 0);
  TRUE(info.results == (is_expert_major() ? info.rows : info.rows * TOP_K));
  for (uint32_t b = 0; b < batches; b++) new_batch(&all[b], b);
  for (int round = 0; round < 3; round++) {
    for (uint32_t b = 0; b < batches; b++) {
      write_inputs(&all[b], 5 * round + (int)b);
      expect_rows(all[b].seed, &expect[b]);
      for (uint32_t e = 0; e < EXPERTS; e++) selections[e] += expect[b].selections[e];
      clear_sums(&all[b]);
      send_batch(&all[b], halves);
    }
    for (uint32_t b = 0; b < batches; b++) {
      if (halves) OK(fusewire_moe_dispatch_receive(comm, moe, &all[b].received));
    }
    complete();
    for (uint32_t b = 0; b < batches; b++) {
      check_received(&all[b], &expect[b]);
      write_results(&all[b], &expect[b]);
      const fusewire_moe_dispatched *received = &all[b].received;
      if (halves) {
        OK(fusewire_moe_combine_send(comm, moe, all[b].y, received));
      } else {
        OK(fusewire_moe_combine(comm, moe, all[b].y, received, sums_of(&all[b])));
      }
    }
    for (uint32_t b = 0; halves && b < batches; b++) {
      OK(fusewire_moe_combine_receive(comm, moe, &all[b].received, sums_of(&all[b])));
    }
    complete();
    for (uint32_t b = 0; b < batches; b++) check_sums(&all[b]);
  }
  OK(fusewire_moe_tokens_per_expert(moe, &at));
  OK(fusewire_download(comm, seen, at, local_experts() * 8));
  for (uint32_t e = 0; e < local_experts(); e++) TRUE(seen[e] == selections[e]);
  OK(fusewire_moe_wait_ns(moe, &at));
  OK(fusewire_download(comm, waits, at, sizeof waits));
  for (uint32_t r = 0; r < RANKS; r++) TRUE(waits[r] < (uint64_t)60 * 1000 * 1000 * 1000);
  for (uint32_t b = 0; b < batches; b++) end_batch(&all[b]);
  end_moe();
}

/* Moves the experts to other ranks, on another stream than the one that created the memory. */
static void placement(void) {
  static expected expect;
  fusewire_comm *home = comm, *other;
  uint32_t ranks[EXPERTS], counts[RANKS] = {0}, words[EXPERTS], *at = NULL;
  batch one;
  configure(FUSEWIRE_F32, FUSEWIRE_MOE_PAYLOAD_SAME, 0, FUSEWIRE_MOE_EXPERT_MAJOR);
  config.local_experts = EXPERTS;
  new_moe();
  TRUE(info.local_experts == EXPERTS);
  new_batch(&one, 0);
  OK(fusewire_moe_placement(moe, &at));
  OK(fusewire_download(comm, words, at, sizeof words));
  for (uint32_t e = 0; e < EXPERTS; e++) TRUE(words[e] == (rank_of[e] << 16 | local_of[e]));
  for (uint32_t e = 0; e < EXPERTS; e++) {
    ranks[e] = rank_of[e] = (EXPERTS - e) % RANKS;
    local_of[e] = counts[ranks[e]]++;
  }
  OK(fusewire_moe_set_placement(moe, ranks, EXPERTS));
  OK(fusewire_download(comm, words, at, sizeof words));
  for (uint32_t e = 0; e < EXPERTS; e++) TRUE(words[e] == (rank_of[e] << 16 | local_of[e]));
  OK(fusewire_comm_on_new_stream(home, &other));
  write_inputs(&one, 3);
  clear_sums(&one);
  comm = other;
  send_batch(&one, 0);
  OK(fusewire_moe_combine(comm, moe, one.received.x, &one.received, sums_of(&one)));
  OK(fusewire_comm_synchronize(comm));
  comm = home;
  expect_rows(3, &expect);
  check_received(&one, &expect);
  identity = 1;
  check_sums(&one);
  identity = 0;
  OK(fusewire_comm_destroy(other));
  end_batch(&one);
  end_moe();
}

/* Dispatches other tokens to the experts of the last dispatch, in one call and in halves. */
static void redispatched(uint32_t layout) {
  static expected expect;
  batch one;
  configure(FUSEWIRE_BF16, FUSEWIRE_MOE_PAYLOAD_FP8, 0, layout);
  new_moe();
  new_batch(&one, 0);
  write_inputs(&one, 0);
  send_batch(&one, 0);
  fusewire_moe_dispatched previous = one.received, stale = one.received;
  for (int round = 1; round <= 2; round++) {
    /* These seeds differ in the tokens only. */
    write_inputs(&one, 84 * round);
    const void *x = tokens_of(rank, one.seed) == 0 ? NULL : one.x;
    if (round == 1) {
      OK(fusewire_moe_redispatch(comm, moe, x, &previous, &one.received));
      SAYS(FUSEWIRE_ERROR_ARGUMENT, "after dispatch 2",
           fusewire_moe_redispatch(comm, moe, x, &stale, &previous));
      TRUE(previous.number == stale.number && previous.x == stale.x);
      SAYS(FUSEWIRE_ERROR_ARGUMENT, "fusewire_moe_dispatched is NULL",
           fusewire_moe_redispatch(comm, moe, x, &one.received, NULL));
    } else {
      OK(fusewire_moe_redispatch_send(comm, moe, x, &one.received, &one.received));
      OK(fusewire_moe_dispatch_receive(comm, moe, &one.received));
    }
    OK(fusewire_comm_synchronize(comm));
    expect_rows(one.seed, &expect);
    check_received(&one, &expect);
    write_results(&one, &expect);
    clear_sums(&one);
    OK(fusewire_moe_combine(comm, moe, one.y, &one.received, sums_of(&one)));
    OK(fusewire_comm_synchronize(comm));
    check_sums(&one);
  }
  end_batch(&one);
  end_moe();
}

/* Captures a dispatch and a combine of its rows, and replays them with other inputs. */
static void captured(uint32_t payload, uint32_t layout, uint32_t flags) {
  fusewire_graph *replay;
  batch one;
  configure(FUSEWIRE_BF16, payload, 0, layout);
  config.flags = flags;
  new_moe();
  new_batch(&one, 0);
  /* The numbers of tokens are equal for both seeds. */
  write_inputs(&one, 0);
  OK(fusewire_comm_warm_up(comm));
  OK(fusewire_capture_begin(comm));
  send_batch(&one, 0);
  const void *y = is_expert_major() ? one.received.x : one.y;
  OK(fusewire_moe_combine(comm, moe, y, &one.received, sums_of(&one)));
  SAYS(FUSEWIRE_ERROR_CAPTURE, "cannot end", fusewire_moe_free(comm, moe));
  OK(fusewire_capture_end(comm, &replay));
  identity = is_expert_major();
  for (int seed = 0; seed <= 12; seed += 12) {
    static expected expect;
    write_inputs(&one, seed);
    expect_rows(seed, &expect);
    write_results(&one, &expect);
    clear_sums(&one);
    OK(fusewire_graph_run(replay, comm));
    /* In rank-major order, a peer's next dispatch may already have overwritten the rows. */
    if (is_expert_major()) check_received(&one, &expect);
    check_sums(&one);
  }
  identity = 0;
  OK(fusewire_graph_destroy(replay));
  end_batch(&one);
  end_moe();
}

/* The last rank does not dispatch. The other ranks mask it after the timeout. */
static void masked(void) {
  static const uint32_t everyone[4] = {0, 1, 2, 3};
  static expected expect;
  fusewire_comm *home = comm;
  batch one;
  configure(FUSEWIRE_BF16, FUSEWIRE_MOE_PAYLOAD_FP8, 0, FUSEWIRE_MOE_EXPERT_MAJOR);
  config.flags = FUSEWIRE_MOE_MASK_MISSING;
  config.timeout_seconds = 3;
  new_batch(&one, 0);
  OK(fusewire_comm_split(home, everyone, RANKS, "masked", &comm));
  new_moe();
  absent = RANKS - 1;
  OK(fusewire_barrier(home));
  for (int seed = 0; rank != absent && seed <= 84; seed += 84) {
    write_inputs(&one, seed);
    expect_rows(seed, &expect);
    clear_sums(&one);
    send_batch(&one, 0);
    OK(fusewire_comm_synchronize(comm));
    check_received(&one, &expect);
    write_results(&one, &expect);
    OK(fusewire_moe_combine(comm, moe, one.y, &one.received, sums_of(&one)));
    OK(fusewire_comm_synchronize(comm));
    check_sums(&one);
  }
  OK(fusewire_comm_failure(comm));
  OK(fusewire_barrier(home));
  absent = RANKS;
  /* The ranks have called different operations, so they cannot free the memory together. */
  OK(fusewire_moe_destroy(moe));
  OK(fusewire_comm_destroy(comm));
  comm = home;
  end_batch(&one);
}

#define REFUSED(words, call) SAYS(FUSEWIRE_ERROR_ARGUMENT, words, call)

/* Tries a configuration with a field that is wrong. */
static void refused_config(const char *words, fusewire_moe_config wrong) {
  fusewire_moe *made = (fusewire_moe *)words;
  REFUSED(words, fusewire_moe_create(comm, &wrong, &made));
  TRUE(made == NULL);
}

/* All ranks try configurations that are not possible. */
static void configurations(void) {
  fusewire_moe *made;
  struct {
    fusewire_moe_config config;
    uint64_t unknown;
  } newer;
  configure(FUSEWIRE_F32, FUSEWIRE_MOE_PAYLOAD_SAME, 0, FUSEWIRE_MOE_EXPERT_MAJOR);
  REFUSED("communicator is NULL", fusewire_moe_create(NULL, &config, &made));
  REFUSED("fusewire_moe_config is NULL", fusewire_moe_create(comm, NULL, &made));
  REFUSED("moe is NULL", fusewire_moe_create(comm, &config, NULL));
#define WRONG(words, field, number)     \
  do {                                  \
    fusewire_moe_config wrong = config; \
    wrong.field = number;               \
    refused_config(words, wrong);       \
  } while (0)
  WRONG("struct_size is 0", struct_size, 0);
  WRONG("struct_size is 80", struct_size, 80);
  WRONG("flags 0x8 are unknown", flags, 8);
  WRONG("flags 0x10 are unknown", flags, 16 | FUSEWIRE_MOE_MASK_MISSING);
  WRONG("column-major scales need fp8", flags, FUSEWIRE_MOE_COLUMN_SCALES);
  WRONG("dequantized rows need fp8", flags, FUSEWIRE_MOE_DEQUANTIZE);
  WRONG("a timeout of -1 s", timeout_seconds, -1);
  WRONG("a timeout of NaN s", timeout_seconds, NAN);
  WRONG("a timeout of 1000000000 s", timeout_seconds, 1e9);
  WRONG("payload 2 is unknown", payload, 2);
  WRONG("layout 2 is unknown", layout, 2);
  WRONG("mode 2 is unknown", mode, 2);
  WRONG("results 2 is unknown", results, 2);
  WRONG("staging is for high throughput mode", staging, 2);
  WRONG("dtype 99", dtype, 99);
  WRONG("scale_dtype 99", scale_dtype, 99);
  WRONG("scale_dtype is for", scale_dtype, FUSEWIRE_F32);
  WRONG("each must be at least 1", experts, 0);
  WRONG("17 experts of a token", top_k, 17);
  WRONG("multiple of 8", hidden, 12);
  WRONG("elements of a token", hidden, UINT64_MAX);
  WRONG("0 tokens", max_tokens, 0);
  WRONG("more than 2^30 rows", max_tokens, UINT64_MAX);
  WRONG("more than 2^30 rows", capacity, UINT64_MAX);
  WRONG("tokens of type i32", dtype, FUSEWIRE_I32);
  WRONG("3 micro-batches", in_flight, 3);
  WRONG("up to 1 experts each", local_experts, 1);
  WRONG("blocks", blocks, 1000);
  config.payload = FUSEWIRE_MOE_PAYLOAD_FP8;
  WRONG("scales of type f16", scale_dtype, FUSEWIRE_F16);
  WRONG("multiple of 128", hidden, 136);
  config.payload = FUSEWIRE_MOE_PAYLOAD_SAME;
  config.results = FUSEWIRE_MOE_RESULTS_FP8;
  WRONG("multiple of 128", hidden, 136);
  config.results = FUSEWIRE_MOE_RESULTS_SAME;
  config.mode = FUSEWIRE_MOE_HIGH_THROUGHPUT;
  WRONG("only in low latency mode", flags, FUSEWIRE_MOE_MASK_MISSING);
  config.mode = FUSEWIRE_MOE_LOW_LATENCY;
  fusewire_moe_config other = config;
  other.top_k = 1 + rank;
  SAYS(FUSEWIRE_ERROR_COMMUNICATOR, "must be equal", fusewire_moe_create(comm, &other, &made));
  /* An older program, whose struct ends before these fields. */
  other = config;
  other.struct_size = offsetof(fusewire_moe_config, mode);
  other.mode = other.results = 99;
  other.staging = 99;
  OK(fusewire_moe_create(comm, &other, &made));
  OK(fusewire_moe_free(comm, made));
  OK(fusewire_moe_destroy(made));
  /* A newer program. */
  newer.config = config;
  newer.config.struct_size = sizeof newer;
  newer.unknown = 1;
  REFUSED("does not know that field", fusewire_moe_create(comm, &newer.config, &made));
  newer.unknown = 0;
  OK(fusewire_moe_create(comm, &newer.config, &made));
  OK(fusewire_moe_free(comm, made));
  OK(fusewire_moe_destroy(made));
  OK(fusewire_moe_destroy(NULL));
}

/* Makes calls that are refused. They move no data. */
static void refused(void) {
  static char host_memory[256];
  static const uint32_t everyone[4] = {0, 1, 2, 3};
  fusewire_comm *part;
  fusewire_moe *another;
  fusewire_moe_dispatched none, stale, foreign;
  fusewire_moe_info wrong_info;
  uint32_t ranks[EXPERTS] = {0}, *words;
  uint64_t *numbers;
  batch one;
  configure(FUSEWIRE_F32, FUSEWIRE_MOE_PAYLOAD_SAME, 0, FUSEWIRE_MOE_EXPERT_MAJOR);
  OK(fusewire_moe_create(comm, &config, &another));
  new_moe();
  new_batch(&one, 0);
  /* The zero-token rank passes an address for these calls too, so that all ranks fail. */
  write_inputs(&one, 0);
  memset(&none, 0, sizeof none);
#define DISPATCH(on, moe, index, x, ids, weights, tokens) \
  fusewire_moe_dispatch(on, moe, index, x, ids, weights, tokens, &none)
  REFUSED("struct_size is 0", DISPATCH(comm, moe, 0, one.x, one.ids, one.weights, 1));
  none.struct_size = sizeof none;
  none.x = host_memory;
  REFUSED("communicator is NULL", DISPATCH(NULL, moe, 0, one.x, one.ids, one.weights, 1));
  REFUSED("experts is NULL", DISPATCH(comm, NULL, 0, one.x, one.ids, one.weights, 1));
  TRUE(none.x == NULL && none.struct_size == sizeof none);
  REFUSED("fusewire_moe_dispatched is NULL",
          fusewire_moe_dispatch(comm, moe, 0, one.x, one.ids, one.weights, 1, NULL));
  REFUSED("micro-batch 1 does not exist", DISPATCH(comm, moe, 1, one.x, one.ids, one.weights, 1));
  REFUSED("6 tokens; max_tokens", DISPATCH(comm, moe, 0, one.x, one.ids, one.weights, 6));
  REFUSED("tokens; max_tokens", DISPATCH(comm, moe, 0, one.x, one.ids, one.weights, UINT64_MAX));
  REFUSED("x is NULL", DISPATCH(comm, moe, 0, NULL, one.ids, one.weights, 1));
  REFUSED("ids is NULL", DISPATCH(comm, moe, 0, one.x, NULL, one.weights, 1));
  REFUSED("weights is NULL", DISPATCH(comm, moe, 0, one.x, one.ids, NULL, 1));
  REFUSED("ids is not aligned", DISPATCH(comm, moe, 0, one.x, one.ids + 1, one.weights, 1));
  REFUSED("x is at", DISPATCH(comm, moe, 0, (char *)one.x + 2, one.ids, one.weights, 1));

  /* Results of no dispatch, of another one, and of an earlier one. */
  REFUSED("not the result of a dispatch", fusewire_moe_combine(comm, moe, one.y, &none, one.out));
  foreign.struct_size = stale.struct_size = sizeof none;
  OK(fusewire_moe_dispatch(comm, another, 0, NULL, NULL, NULL, 0, &foreign));
  send_batch(&one, 0);
  stale = one.received;
  send_batch(&one, 1);
  TRUE(one.received.x == stale.x && one.received.number == stale.number + 1);
  REFUSED("dispatched by another", fusewire_moe_dispatch_receive(comm, moe, &foreign));
  REFUSED("dispatched by another", fusewire_moe_combine_send(comm, moe, one.y, &foreign));
  REFUSED("those of dispatch 1", fusewire_moe_dispatch_receive(comm, moe, &stale));
  REFUSED("dispatch 2", fusewire_moe_combine(comm, moe, one.y, &stale, one.out));
  REFUSED("dispatch 2", fusewire_moe_combine_send(comm, moe, one.y, &stale));
  REFUSED("dispatch 2", fusewire_moe_combine_receive(comm, moe, &stale, one.out));
  stale.number = one.received.number;
  stale.micro_batch = 7;
  REFUSED("dispatched by another", fusewire_moe_dispatch_receive(comm, moe, &stale));
  REFUSED("fusewire_moe_dispatched is NULL", fusewire_moe_dispatch_receive(comm, moe, NULL));
  OK(fusewire_moe_dispatch_receive(comm, moe, &one.received));
  const fusewire_moe_dispatched *received = &one.received;
  REFUSED("y is NULL", fusewire_moe_combine(comm, moe, NULL, received, one.out));
  const float *shifted = (float *)one.y + 1;
  REFUSED("y is not aligned", fusewire_moe_combine(comm, moe, shifted, received, one.out));
  if (tokens_of(rank, 0) > 0) {
    REFUSED("out is NULL", fusewire_moe_combine(comm, moe, one.y, received, NULL));
    REFUSED("y overlaps out", fusewire_moe_combine(comm, moe, one.y, received, one.y));
    REFUSED("overlaps memory", fusewire_moe_combine(comm, moe, one.y, received, one.received.x));
    REFUSED("overlaps memory", DISPATCH(comm, moe, 0, one.received.x, one.ids, one.weights, 1));
  }
  OK(fusewire_comm_split(comm, everyone, RANKS, "part", &part));
  REFUSED("another communicator", DISPATCH(part, moe, 0, one.x, one.ids, one.weights, 1));
  REFUSED("another communicator", fusewire_moe_combine(part, moe, one.y, received, one.out));
  REFUSED("another communicator", fusewire_moe_free(part, moe));
  OK(fusewire_barrier(part));
  OK(fusewire_comm_destroy(part));

  REFUSED("5 ranks for 6 experts", fusewire_moe_set_placement(moe, ranks, 5));
  REFUSED("ranks is NULL", fusewire_moe_set_placement(moe, NULL, EXPERTS));
  REFUSED("experts on rank 0", fusewire_moe_set_placement(moe, ranks, EXPERTS));
  ranks[0] = 9;
  REFUSED("expert 0 on rank 9", fusewire_moe_set_placement(moe, ranks, EXPERTS));
  REFUSED("experts is NULL", fusewire_moe_set_blocking(NULL, 1));
  REFUSED("experts is NULL", fusewire_moe_set_placement(NULL, ranks, EXPERTS));
  REFUSED("places is NULL", fusewire_moe_placement(moe, NULL));
  REFUSED("tokens is NULL", fusewire_moe_tokens_per_expert(moe, NULL));
  REFUSED("nanoseconds is NULL", fusewire_moe_wait_ns(moe, NULL));
  REFUSED("mask is NULL", fusewire_moe_mask(moe, NULL));
  REFUSED("missing is NULL", fusewire_moe_missing(moe, 0, NULL));
  REFUSED("micro-batch 1 does not exist", fusewire_moe_missing(moe, 1, &words));
  REFUSED("experts is NULL", fusewire_moe_missing(NULL, 0, &words));
  REFUSED("fusewire_moe_info is NULL", fusewire_moe_query(moe, NULL));
  wrong_info.struct_size = 8;
  REFUSED("struct_size is 8", fusewire_moe_query(moe, &wrong_info));
  /* A newer program gets zeros in fields that the library does not know. */
  struct {
    fusewire_moe_info info;
    uint64_t unknown[2];
  } newer;
  memset(&newer, 0xff, sizeof newer);
  newer.info.struct_size = sizeof newer;
  OK(fusewire_moe_query(moe, &newer.info));
  TRUE(newer.info.struct_size == sizeof newer && newer.info.rows == info.rows);
  TRUE(newer.unknown[0] == 0 && newer.unknown[1] == 0);

  /* All ranks still agree: the refused calls have moved no data. */
  static expected expect;
  OK(fusewire_comm_synchronize(comm));
  expect_rows(0, &expect);
  check_received(&one, &expect);
  write_results(&one, &expect);
  clear_sums(&one);
  OK(fusewire_moe_combine(comm, moe, one.y, received, sums_of(&one)));
  OK(fusewire_comm_synchronize(comm));
  check_sums(&one);

  OK(fusewire_moe_free(comm, moe));
  REFUSED("was freed", fusewire_moe_free(comm, moe));
  REFUSED("was freed", fusewire_moe_query(moe, &info));
  REFUSED("was freed", fusewire_moe_placement(moe, &words));
  REFUSED("was freed", fusewire_moe_wait_ns(moe, &numbers));
  REFUSED("was freed", fusewire_moe_missing(moe, 0, &words));
  REFUSED("was freed", fusewire_moe_combine(comm, moe, one.y, received, one.out));
  REFUSED("was freed", DISPATCH(comm, moe, 0, one.x, one.ids, one.weights, 1));
  OK(fusewire_moe_destroy(moe));
  /* This memory is not freed before the communicator ends. */
  OK(fusewire_moe_destroy(another));
  end_batch(&one);
}

/* In high throughput mode, operations have no halves. */
static void without_halves(void) {
  static expected expect;
  batch one;
  configure(FUSEWIRE_BF16, FUSEWIRE_MOE_PAYLOAD_SAME, 0, FUSEWIRE_MOE_EXPERT_MAJOR);
  stage();
  new_moe();
  new_batch(&one, 0);
  write_inputs(&one, 0);
  fusewire_moe_dispatched *received = &one.received;
  received->struct_size = sizeof *received;
  received->x = one.x;
  REFUSED("no halves", fusewire_moe_dispatch_send(comm, moe, 0, one.x, one.ids, one.weights, 1,
                                                  received));
  TRUE(received->x == NULL);
  send_batch(&one, 0);
  TRUE(received->number == 1);
  REFUSED("no halves", fusewire_moe_redispatch_send(comm, moe, one.x, received, received));
  REFUSED("no halves", fusewire_moe_dispatch_receive(comm, moe, received));
  REFUSED("no halves", fusewire_moe_combine_send(comm, moe, one.y, received));
  REFUSED("no halves", fusewire_moe_combine_receive(comm, moe, received, one.out));
  /* The refused calls have moved no data. */
  OK(fusewire_comm_synchronize(comm));
  expect_rows(0, &expect);
  check_received(&one, &expect);
  write_results(&one, &expect);
  clear_sums(&one);
  OK(fusewire_moe_combine(comm, moe, one.y, received, sums_of(&one)));
  OK(fusewire_comm_synchronize(comm));
  check_sums(&one);
  end_batch(&one);
  end_moe();
}

/* A dispatch fails on all ranks: rank 0 selects an expert that does not exist, or the rows exceed
   the capacity. */
static void failing(int32_t id, uint64_t capacity, const char *words) {
  static const uint32_t everyone[4] = {0, 1, 2, 3};
  fusewire_comm *home = comm;
  batch one;
  configure(FUSEWIRE_BF16, FUSEWIRE_MOE_PAYLOAD_SAME, 0, FUSEWIRE_MOE_EXPERT_MAJOR);
  config.capacity = capacity;
  new_batch(&one, 0);
  write_inputs(&one, 0);
  if (rank == 0 && id > 0) OK(fusewire_upload(comm, one.ids, &id, 4));
  OK(fusewire_comm_split(home, everyone, RANKS, "failing", &comm));
  new_moe();
  /* No rank fails before all ranks have created theirs. A rank that comes late fails at once. */
  OK(fusewire_barrier(home));
  uint32_t tokens = tokens_of(rank, 0);
  one.received.struct_size = sizeof one.received;
  int code = fusewire_moe_dispatch(comm, moe, 0, one.x, one.ids, one.weights, tokens,
                                   &one.received);
  if (code == FUSEWIRE_OK) code = fusewire_comm_synchronize(comm);
  SAYS(FUSEWIRE_ERROR_FAILED, words, code);
  SAYS(FUSEWIRE_ERROR_FAILED, words, fusewire_comm_failure(comm));
  GIVES(FUSEWIRE_ERROR_FAILED, fusewire_moe_free(comm, moe));
  OK(fusewire_moe_destroy(moe));
  GIVES(FUSEWIRE_ERROR_FAILED, fusewire_comm_destroy(comm));
  comm = home;
  end_batch(&one);
}

int main(int argc, char **argv) {
  static const struct {
    uint32_t dtype, payload, scale_dtype;
  } formats[] = {
      {FUSEWIRE_F32, FUSEWIRE_MOE_PAYLOAD_SAME, 0},
      {FUSEWIRE_DTYPE_DEFAULT, FUSEWIRE_MOE_PAYLOAD_SAME, 0},
      {FUSEWIRE_BF16, FUSEWIRE_MOE_PAYLOAD_FP8, 0},
      {FUSEWIRE_F32, FUSEWIRE_MOE_PAYLOAD_FP8, FUSEWIRE_U8},
  };
  if (argc != 4) return 2;
  start(argv, "moe");
  for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
    for (uint32_t layout = 0; layout < 2; layout++) {
      for (int halves = 0; halves < 2; halves++) {
        configure(formats[f].dtype, formats[f].payload, formats[f].scale_dtype, layout);
        config.alignment = layout == FUSEWIRE_MOE_EXPERT_MAJOR && f % 2 == 0 ? MAX_ALIGNMENT : 0;
        is_blocking = f % 2;
        rounds(1 + (uint32_t)halves, halves);
      }
    }
  }
  static const uint32_t flags[] = {
      FUSEWIRE_MOE_COLUMN_SCALES,
      FUSEWIRE_MOE_DEQUANTIZE,
      FUSEWIRE_MOE_COLUMN_SCALES | FUSEWIRE_MOE_MASK_MISSING,
  };
  for (size_t f = 0; f < sizeof flags / sizeof *flags; f++) {
    for (size_t fp8 = 2; fp8 < sizeof formats / sizeof *formats; fp8++) {
      configure(formats[fp8].dtype, formats[fp8].payload, formats[fp8].scale_dtype,
                FUSEWIRE_MOE_EXPERT_MAJOR);
      config.flags = flags[f];
      config.alignment = fp8 % 2 == 0 ? MAX_ALIGNMENT : 0;
      rounds(1 + (uint32_t)fp8 % 2, fp8 % 2 == 1);
    }
  }
  for (uint32_t layout = 0; layout < 2; layout++) {
    configure(FUSEWIRE_DTYPE_DEFAULT, FUSEWIRE_MOE_PAYLOAD_SAME, 0, layout);
    config.flags = FUSEWIRE_MOE_MASK_MISSING;
    config.timeout_seconds = 60;
    rounds(2, 1);
  }
  for (uint32_t layout = 0; layout < 2; layout++) {
    configure(FUSEWIRE_BF16, FUSEWIRE_MOE_PAYLOAD_SAME, 0, layout);
    config.results = FUSEWIRE_MOE_RESULTS_FP8;
    rounds(2, 1);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
      configure(formats[f].dtype, formats[f].payload, formats[f].scale_dtype, layout);
      stage();
      config.alignment = layout == FUSEWIRE_MOE_EXPERT_MAJOR && f % 2 == 0 ? MAX_ALIGNMENT : 0;
      if (f == 2 && layout == FUSEWIRE_MOE_RANK_MAJOR) config.flags = FUSEWIRE_MOE_DEQUANTIZE;
      if (f % 2 == 1) config.results = FUSEWIRE_MOE_RESULTS_FP8;
      is_blocking = f < 2;
      rounds(1 + layout, 0);
    }
  }
  is_blocking = 0;
  placement();
  redispatched(FUSEWIRE_MOE_EXPERT_MAJOR);
  redispatched(FUSEWIRE_MOE_RANK_MAJOR);
  captured(FUSEWIRE_MOE_PAYLOAD_SAME, FUSEWIRE_MOE_EXPERT_MAJOR, 0);
  captured(FUSEWIRE_MOE_PAYLOAD_SAME, FUSEWIRE_MOE_RANK_MAJOR, 0);
  captured(FUSEWIRE_MOE_PAYLOAD_FP8, FUSEWIRE_MOE_EXPERT_MAJOR, FUSEWIRE_MOE_DEQUANTIZE);
  masked();
  configurations();
  refused();
  without_halves();
  failing(99, 0, "expert 99 does not exist");
  failing(0, 1, "exceeds the capacity of 1 rows");
  return finish();
}
