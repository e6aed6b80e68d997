// Causal attention over the paged cache, of new tokens and of whole prompts alike.
//
// A task is some consecutive tokens of one request with the query heads that share one KV head;
// its rows are (token, head of the group), all of which meet the same keys and values. It goes
// through the context in chunks and keeps, a row, about the largest score so far, the sum of
// weights and the weighted sum of values: the online softmax of https://arxiv.org/abs/2205.14135
#pragma once

#include <algorithm>
#include <vector>

#include "cache.h"

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxTaskRows = 192;
constexpr int64_t kChunkTokens = 128;
constexpr int kChunkVectors = kChunkTokens / kLanes;

struct AttentionTask {
  int64_t request, kv_head, begin, end;  // tokens of the flat batch
};

inline std::vector<AttentionTask> attention_tasks(const Batch& batch, const Shape& shape) {
  const int64_t most = std::max<int64_t>(1, kMaxTaskRows / shape.group());
  std::vector<AttentionTask> tasks;
  for (int64_t request = 0; request < batch.num_reqs; ++request) {
    const int64_t end = batch.query_start_loc[request + 1];
    for (int64_t token = batch.query_start_loc[request]; token < end; token += most) {
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        tasks.push_back({request, head, token, std::min(token + most, end)});
      }
    }
  }
  return tasks;
}

// One thread's working memory.
struct AttentionScratch {
  alignas(64) bf16 query[kMaxTaskRows * kMaxHeadDim];
  alignas(64) bf16 values[kChunkTokens * kMaxHeadDim];
  alignas(64) float scores[kRowBlock * kChunkTokens];
  alignas(64) bf16 weights[kRowBlock * kChunkTokens];
  alignas(64) float sums[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float totals[kMaxTaskRows * kLanes];  // of weights; lanes are added at the end
  float shift[kMaxTaskRows];                        // of exponents
};

// The calling thread's own. Not inlined: its address is looked up once and then passed along.
__attribute__((noinline)) inline AttentionScratch& thread_scratch() {
  static thread_local AttentionScratch scratch;
  return scratch;
}

class Attention {
 public:
  Attention(const Batch& batch, const Shape& shape, const Cache& cache, int64_t window,
            const bf16* qkv, bf16* output)
      : batch_(batch), shape_(shape), cache_(cache), window_(window), qkv_(qkv), output_(output) {}

  // Does `tasks[index]`; knows its successor, whose keys and values it fetches ahead of time.
  void run(const std::vector<AttentionTask>& tasks, int64_t index,
           AttentionScratch& scratch) const {
    const AttentionTask& task = tasks[index];
    const int64_t num_rows = (task.end - task.begin) * shape_.group();
    const Span span = span_of(task);
    configure_tiles(tile_rows(num_rows));
    gather_query(task, scratch);
    std::memset(scratch.sums, 0, num_rows * shape_.head_dim * sizeof(float));
    std::memset(scratch.totals, 0, num_rows * kLanes * sizeof(float));
    std::fill_n(scratch.shift, num_rows, kLowest);
    for (int64_t token = span.start; token < span.last_end; token += kChunkTokens) {
      // Few rows wait for memory more than they compute.
      if (num_rows <= kTileRows) {
        if (token + kChunkTokens < span.last_end) {
          prefetch(task, token + kChunkTokens, span.last_end);
        } else if (index + 1 < static_cast<int64_t>(tasks.size())) {
          const Span next = span_of(tasks[index + 1]);
          prefetch(tasks[index + 1], next.start, next.last_end);
        }
      }
      const int64_t count = std::min(kChunkTokens, span.last_end - token);
      gather_values(task, token, count, scratch);
      for (int64_t row = 0; row < num_rows; row += kRowBlock) {
        const int64_t row_end = std::min(row + kRowBlock, num_rows);
        score(task, token, count, row, row_end, scratch);
        weigh(span, token, count, row, row_end, scratch);
        add_values(row, row_end, (count + 31) / 32, scratch);
      }
    }
    write_output(task, scratch);
  }

 private:
  static constexpr float kLowest = -1e30f;
  // How far weights may exceed 1, as an exponent of 2, before all is scaled down: sums have room,
  // and a branch that is hardly ever taken lets weights be computed before their largest is known.
  static constexpr float kSlack = 8;

  // What a task sees of its request: its first token the first `first_end` tokens (the last of
  // them within the window), each further one sees one more. `start` is where chunks begin.
  struct Span {
    int64_t start, first_end, last_end;
  };

  Span span_of(const AttentionTask& task) const {
    const int64_t first_end = batch_.seq_lens[task.request] -
                              batch_.query_start_loc[task.request + 1] + task.begin + 1;
    const int64_t start = window_ ? std::max<int64_t>(0, first_end - window_) : 0;
    return {start / kGroupTokens * kGroupTokens, first_end, first_end + task.end - task.begin - 1};
  }

  const int32_t* blocks_of(const AttentionTask& task) const {
    return batch_.block_table + task.request * batch_.table_stride;
  }

  void prefetch(const AttentionTask& task, int64_t token, int64_t end) const {
    const int64_t group_bytes = kGroupTokens * shape_.head_dim * sizeof(bf16);
    end = std::min(end, token + kChunkTokens);
    for (; token < end; token += kGroupTokens) {
      const bf16* keys = cache_.keys(blocks_of(task), token, task.kv_head);
      const bf16* values = cache_.values(blocks_of(task), token, task.kv_head);
      for (int64_t byte = 0; byte < group_bytes; byte += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(keys) + byte, _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(values) + byte, _MM_HINT_T1);
      }
    }
  }

  void gather_query(const AttentionTask& task, AttentionScratch& scratch) const {
    const int64_t size = shape_.group() * shape_.head_dim;
    const bf16* source = qkv_ + task.begin * shape_.qkv_size() + task.kv_head * size;
    for (int64_t token = task.begin; token < task.end; ++token, source += shape_.qkv_size()) {
      std::memcpy(scratch.query + (token - task.begin) * size, source, size * sizeof(bf16));
    }
  }

  // Puts the chunk's values side by side. Beyond the context's end they become zero: a weight of
  // zero would not make up for NaN.
  void gather_values(const AttentionTask& task, int64_t token, int64_t count,
                     AttentionScratch& scratch) const {
    const int64_t head_dim = shape_.head_dim, size = kGroupTokens * head_dim;
    for (int64_t key = 0; key < count; key += kGroupTokens) {
      std::memcpy(scratch.values + key * head_dim,
                  cache_.values(blocks_of(task), token + key, task.kv_head), size * sizeof(bf16));
    }
    if (count % 2) {
      bf16* last = scratch.values + count / 2 * 2 * head_dim;
      for (int64_t dim = 0; dim < head_dim; ++dim) last[2 * dim + 1] = 0;
    }
    const int64_t whole = (count + 1) / 2 * 2, padded = (count + 31) / 32 * 32;
    std::memset(scratch.values + whole * head_dim, 0, (padded - whole) * head_dim * sizeof(bf16));
  }

  // scores = query * key^T of a block of rows; beyond the context's end, whatever the cache holds.
  void score(const AttentionTask& task, int64_t token, int64_t count, int64_t row, int64_t row_end,
             AttentionScratch& scratch) const {
    const int64_t head_dim = shape_.head_dim;
    const int steps = static_cast<int>(head_dim / kTileDepth);
    const bf16* query = scratch.query + row * head_dim;
    const Operand a{query, query + kTileRows * head_dim,
                    head_dim * static_cast<int64_t>(sizeof(bf16)), kTileDepth};
    for (int64_t key = 0; key < count; key += 2 * kGroupTokens) {
      const bf16* first = cache_.keys(blocks_of(task), token + key, task.kv_head);
      // At an odd end the first group comes twice: it is masked like all that lies beyond.
      const bf16* second = key + kGroupTokens < count
                               ? cache_.keys(blocks_of(task), token + key + kGroupTokens,
                                             task.kv_head)
                               : first;
      const Operand b{first, second, 64, kTileElements};
      float* scores = scratch.scores + key;
      if (row_end - row > kTileRows) {
        zero_sums<2, 2>();
        accumulate<2, 2>(a, b, steps);
        store_sums<2, 2>(scores, kChunkTokens);
      } else {
        zero_sums<1, 2>();
        accumulate<1, 2>(a, b, steps);
        store_sums<1, 2>(scores, kChunkTokens);
      }
    }
  }

  // Softmax of a block of rows: scores become weights.
  void weigh(const Span& span, int64_t token, int64_t count, int64_t row, int64_t row_end,
             AttentionScratch& scratch) const {
    const bool all_visible = span.first_end >= token + kChunkTokens &&
                             (!window_ || span.last_end - window_ <= token);
    const float* scores = scratch.scores;
    bf16* weights = scratch.weights;
    for (; row < row_end; ++row, scores += kChunkTokens, weights += kChunkTokens) {
      if (all_visible) {
        weigh_row<false>(scores, weights, row, 0, 0, kChunkVectors, scratch);
      } else {
        const int64_t end = span.first_end + row / shape_.group() - token;
        const int num_vectors = static_cast<int>((count + 31) / 32 * 2);
        weigh_row<true>(scores, weights, row, window_ ? end - window_ : 0, end, num_vectors,
                        scratch);
      }
    }
  }

  // weights = 2^(scores - shift), with what came before scaled to fit a new shift. Only keys in
  // [begin, end) of the chunk are visible if `Masked`.
  // Not inlined: the compiler then keeps the scores in registers.
  template <bool Masked>
  __attribute__((noinline)) void weigh_row(const float* scores, bf16* weights, int64_t row, int64_t begin, int64_t end,
                 int num_vectors, AttentionScratch& scratch) const {
    const __m512 hidden = _mm512_set1_ps(-__builtin_inff());
    __m512 score[kChunkVectors], most = hidden;
#pragma GCC unroll 8
    for (int i = 0; i < kChunkVectors; ++i) {
      if (Masked && i >= num_vectors) break;
      score[i] = _mm512_load_ps(scores + i * kLanes);
      if (Masked) {
        const __mmask16 visible = first_lanes(end - i * kLanes) & ~first_lanes(begin - i * kLanes);
        score[i] = _mm512_mask_blend_ps(visible, hidden, score[i]);
      }
      most = _mm512_max_ps(most, score[i]);
    }
    const __m512 scales = _mm512_set1_ps(shape_.scale * kLog2E);
    __m512 shift = _mm512_set1_ps(scratch.shift[row]);
    __m512 total = _mm512_load_ps(scratch.totals + row * kLanes);
    if (_mm512_cmp_ps_mask(_mm512_fmsub_ps(most, scales, shift), _mm512_set1_ps(kSlack),
                           _CMP_GT_OQ)) {
      const __m512 higher = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(most)), scales);
      const __m512 decay = exp2(_mm512_sub_ps(shift, higher));
      total = _mm512_mul_ps(total, decay);
      float* sums = scratch.sums + row * shape_.head_dim;
      for (int64_t i = 0; i < shape_.head_dim; i += kLanes) {
        _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), decay));
      }
      shift = higher;
      scratch.shift[row] = _mm512_cvtss_f32(shift);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kChunkVectors; i += 2) {
      if (Masked && i >= num_vectors) break;
      const __m512 first = exp2(_mm512_fmsub_ps(score[i], scales, shift));
      const __m512 second = exp2(_mm512_fmsub_ps(score[i + 1], scales, shift));
      total = _mm512_add_ps(total, _mm512_add_ps(first, second));
      _mm512_store_si512(weights + i * kLanes,
                         reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
    }
    _mm512_store_ps(scratch.totals + row * kLanes, total);
  }

  // sums += weights * values of a block of rows.
  void add_values(int64_t row, int64_t row_end, int64_t num_steps,
                  AttentionScratch& scratch) const {
    const int64_t head_dim = shape_.head_dim;
    const int steps = static_cast<int>(num_steps);
    const Operand a{scratch.weights, scratch.weights + kTileRows * kChunkTokens, kChunkTokens * sizeof(bf16), kTileDepth};
    for (int64_t dim = 0; dim < head_dim; dim += 2 * kTileRows) {
      const bf16* values = scratch.values + 2 * dim;
      const Operand b{values, values + 2 * kTileRows,
                      2 * head_dim * static_cast<int64_t>(sizeof(bf16)), kTileDepth * head_dim};
      float* sums = scratch.sums + row * head_dim + dim;
      if (row_end - row > kTileRows) {
        load_sums<2, 2>(sums, head_dim);
        accumulate<2, 2>(a, b, steps);
        store_sums<2, 2>(sums, head_dim);
      } else {
        load_sums<1, 2>(sums, head_dim);
        accumulate<1, 2>(a, b, steps);
        store_sums<1, 2>(sums, head_dim);
      }
    }
  }

  void write_output(const AttentionTask& task, const AttentionScratch& scratch) const {
    const int64_t group = shape_.group(), head_dim = shape_.head_dim;
    for (int64_t token = task.begin; token < task.end; ++token) {
      bf16* output = output_ + token * shape_.query_size() + task.kv_head * group * head_dim;
      for (int64_t head = 0; head < group; ++head) {
        const int64_t row = (token - task.begin) * group + head;
        const __m512 totals = _mm512_load_ps(scratch.totals + row * kLanes);
        const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(totals));
        const float* sums = scratch.sums + row * head_dim;
        for (int64_t dim = 0; dim < head_dim; dim += kLanes) {
          store(output + head * head_dim + dim,
                _mm512_mul_ps(_mm512_load_ps(sums + dim), share));
        }
      }
    }
  }

  const Batch& batch_;
  const Shape& shape_;
  const Cache cache_;
  const int64_t window_;
  const bf16* qkv_;
  bf16* output_;
};
