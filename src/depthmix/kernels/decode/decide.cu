// Scores of a routed block's tokens, and the wishes that decide which of them it keeps.
//
// Sixteen tokens belong to a cluster of programs, each of which reads some of their columns. The
// programs exchange sums through their shared memory, which takes a fraction of the time that
// counters in global memory take. Weights are loaded while the previous kernel still runs.

constexpr int SLICE = (WIDTH + 64 * CLUSTER - 1) / (64 * CLUSTER) * 64;  // columns of a program
constexpr int CHUNKS = SLICE / 64;
constexpr int TILES = ASKS_PREDICTOR ? (NUM_UNITS + 15) / 16 : 0;  // of the predictor's units
constexpr int ITEMS = TILES * CHUNKS;                              // products for all warps
constexpr int ITEMS_EACH = (ITEMS + WARPS - 1) / WARPS;
constexpr int AHEAD = ITEMS_EACH < 4 ? ITEMS_EACH : 4;  // whose weights are loaded ahead
constexpr int SLICE_STRIDE = 2 * SLICE + 64;  // bytes between tokens: neighbours use other banks
constexpr int READERS = THREADS / TOKENS;     // threads that load a token's columns
constexpr int PASSES = (SLICE / 8 + READERS - 1) / READERS;
constexpr int OWN_TOKENS = TOKENS / CLUSTER;  // tokens that a program finishes
constexpr int HELPERS = THREADS / OWN_TOKENS;
constexpr float ROUTER_EPS = 1e-6f;

struct Task {
  number_t* x;           // by token
  const number_t* more;  // to be added to x first, or null
  const int* row;        // of the cache; -1 where there is no token
  const number_t* router;
  const number_t* predictor_in;
  const number_t* predictor_out;
  const number_t* predictor_bias;
  float* score;
  float* wish;
  int num_tokens;
};

struct Shared {
  float squares[TOKENS];
  float scores[TOKENS];
  float logits[WARPS];
  float units[TILES * 16 * TOKENS + 1];  // this program's sums
  float parts[ITEMS * 16 * TOKENS + 1];  // before chunks are added up
};

// A warp's weights for the product of 16 units and 64 columns.
struct Item {
  Words upper[2], lower[2];
};

__device__ __forceinline__ void load_item(Item& item, const Task& task, int number, int first) {
  const int corner = threadIdx.x % 32 / 4, across = threadIdx.x % 4;
  const int unit = number / CHUNKS * 16 + corner;
  const int column = first + number % CHUNKS * 64 + across * 8;
  // units past the last repeat it, and are not used
  const number_t* above = task.predictor_in + 1LL * min(unit, NUM_UNITS - 1) * WIDTH + column;
  const number_t* below = task.predictor_in + 1LL * min(unit + 8, NUM_UNITS - 1) * WIDTH + column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    item.upper[half] = item.lower[half] = {0, 0, 0, 0};
    if (number < ITEMS && first + number % CHUNKS * 64 < WIDTH) {
      item.upper[half] = load_constant(above + half * 32);
      item.lower[half] = load_constant(below + half * 32);
    }
  }
}

__device__ __forceinline__ unsigned add_pair(unsigned a, unsigned b) {
  return narrow(widen_low(a) + widen_low(b), widen_high(a) + widen_high(b));
}

__device__ __forceinline__ void measure_pair(unsigned word, unsigned judge, float& square,
                                             float& score) {
  const float low = widen_low(word), high = widen_high(word);
  square += low * low + high * high;
  score += low * widen_low(judge) + high * widen_high(judge);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    decide(const __grid_constant__ Task task) {
  let_next_start();
  SHARED_MEMORY(memory);
  Shared* shared = reinterpret_cast<Shared*>(memory + TOKENS * SLICE_STRIDE);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int group = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, first = rank * SLICE;

  Item items[AHEAD ? AHEAD : 1];
#pragma unroll
  for (int number = 0; number < AHEAD; number++)
    load_item(items[number], task, warp + number * WARPS, first);
  const int number = thread / READERS, reader = thread % READERS;
  Words judge[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int at = (pass * READERS + reader) * 8;
    judge[pass] = {0, 0, 0, 0};
    if (at < SLICE && first + at < WIDTH) judge[pass] = load_constant(task.router + first + at);
  }
  const int own = rank * OWN_TOKENS + thread / HELPERS, helper = thread % HELPERS;
  float outs = 0.0f;
  if (ASKS_PREDICTOR && helper < NUM_UNITS) outs = widen(task.predictor_out[helper]);
  await_previous();

  // the tokens' columns, with what is added to them
  const int token = group * TOKENS + number;
  const bool is_there = token < task.num_tokens;
  const bool is_full = is_there && load_fresh(task.row + token) >= 0;
  Words given[PASSES], added[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int at = (pass * READERS + reader) * 8;
    given[pass] = added[pass] = {0, 0, 0, 0};
    if (!is_there || at >= SLICE || first + at >= WIDTH) continue;
    given[pass] = load_words(task.x + 1LL * token * WIDTH + first + at);
    if (task.more) added[pass] = load_words(task.more + 1LL * token * WIDTH + first + at);
  }
  float square = 0.0f, score = 0.0f;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int at = (pass * READERS + reader) * 8;
    if (at >= SLICE) continue;
    Words& words = given[pass];
    const Words &plus = added[pass], &by = judge[pass];
    // where there is no token there may be any numbers
    if (task.more && is_full && first + at < WIDTH) {
      words = {add_pair(words.x, plus.x), add_pair(words.y, plus.y), add_pair(words.z, plus.z),
               add_pair(words.w, plus.w)};
      store_words(task.x + 1LL * token * WIDTH + first + at, words);
    }
    measure_pair(words.x, by.x, square, score);
    measure_pair(words.y, by.y, square, score);
    measure_pair(words.z, by.z, square, score);
    measure_pair(words.w, by.w, square, score);
    store_words(memory + number * SLICE_STRIDE + 2 * at, words);
  }
#pragma unroll
  for (int other = 1; other < READERS; other *= 2) {
    square += shuffle(square, other);
    score += shuffle(score, other);
  }
  if (reader == 0) shared->squares[number] = square, shared->scores[number] = score;
  meet_all();

  if (ASKS_PREDICTOR) {
    const int corner = lane / 4, across = lane % 4;
#pragma unroll
    for (int turn = 0; turn < ITEMS_EACH; turn++) {
      const int at = warp + turn * WARPS;
      Item item;
      if (turn < AHEAD)
        item = items[turn];
      else
        load_item(item, task, at, first);
      float sum[GROUPS][4] = {};
      const char* from = memory + corner * SLICE_STRIDE + at % CHUNKS * 128 + across * 16;
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int eight = 0; eight < GROUPS; eight++) {
          const Words words = load_shared(from + eight * 8 * SLICE_STRIDE + half * 64);
          const Words &a = item.upper[half], &b = item.lower[half];
          multiply_small(sum[eight], a.x, b.x, a.y, b.y, words.x, words.y);
          multiply_small(sum[eight], a.z, b.z, a.w, b.w, words.z, words.w);
        }
      if (at >= ITEMS) continue;
      // by chunk, unit and token
      const int unit = at / CHUNKS * 16 + corner;
      float* to = shared->parts + (at % CHUNKS * TILES * 16 + unit) * TOKENS + across * 2;
#pragma unroll
      for (int eight = 0; eight < GROUPS; eight++) {
        to[eight * 8] = sum[eight][0], to[eight * 8 + 1] = sum[eight][1];
        to[eight * 8 + 8 * TOKENS] = sum[eight][2], to[eight * 8 + 8 * TOKENS + 1] = sum[eight][3];
      }
    }
    meet_all();
    for (int at = thread; at < TILES * 16 * TOKENS; at += THREADS) {
      float total = 0.0f;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        total += shared->parts[chunk * TILES * 16 * TOKENS + at];
      shared->units[at] = total;
    }
  }
  meet_cluster();

  // each program finishes some tokens
  float whole = 0.0f, judged = 0.0f;
#pragma unroll
  for (int other = 0; other < CLUSTER; other++) {
    whole += load_other(&shared->squares[own], other);
    judged += load_other(&shared->scores[own], other);
  }
  const float inverse = rsqrtf(whole / WIDTH + ROUTER_EPS);
  if (NORMALIZES) judged *= inverse;
  const int place = group * TOKENS + own;
  float logit = 0.0f;
  if (ASKS_PREDICTOR) {
    for (int unit = helper; unit < NUM_UNITS; unit += HELPERS) {
      float total = 0.0f;
#pragma unroll
      for (int other = 0; other < CLUSTER; other++)
        total += load_other(&shared->units[unit * TOKENS + own], other);
      const float out = unit == helper ? outs : widen(task.predictor_out[unit]);
      logit += gelu(total * inverse) * out;
    }
    for (int other = 1; other < 32; other *= 2) logit += shuffle(logit, other);
    if (lane == 0) shared->logits[warp] = logit;
    meet_all();
  }
  if (helper == 0 && place < task.num_tokens) {
    task.score[place] = judged;
    if (ASKS_PREDICTOR) {
      float total = widen(task.predictor_bias[0]);
      for (int other = 0; other < HELPERS / 32; other++) total += shared->logits[warp + other];
      task.wish[place] = total;
    }
  }
  // others may still read this program's memory
  meet_cluster();
}
