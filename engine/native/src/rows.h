// What is done to single rows of activations: embedding, norm, rotary positions.
#pragma once

#include "step.h"

// out = x / rms(x) * weight; `size` is a multiple of 16. `out` may be `x`.
inline void rms_norm(const bf16* x, const float* weight, float eps, int64_t size, bf16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 v = load(x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(size);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 scaled = _mm512_mul_ps(load(x + i), scale);
    store(out + i, _mm512_mul_ps(scaled, _mm512_loadu_ps(weight + i)));
  }
}

// Turns one head by its token's angles: the first half pairs with the second.
inline void rotate(bf16* head, const float* cosine, const float* sine, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const __m512 first = load(head + i), second = load(head + half + i);
    const __m512 c = _mm512_loadu_ps(cosine + i), s = _mm512_loadu_ps(sine + i);
    store(head + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
    store(head + half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
  }
}

// One token's row of the embedding. A model whose head is the embedding keeps the head's panels
// alone: the token is one column of them, its elements lie in pairs 64 bytes apart.
inline void embed(const Model& model, int64_t token, bf16* out) {
  if (model.embedding) {
    std::memcpy(out, model.embedding + token * model.hidden, model.hidden * sizeof(bf16));
    return;
  }
  const int64_t steps = model.hidden / kTileDepth, column = token % kTileRows;
  const int64_t tile = (token / kPanelColumns) * steps * 2 + token % kPanelColumns / kTileRows;
  const bf16* source = model.head + tile * kTileElements + 2 * column;
  for (int64_t step = 0; step < steps; ++step, source += 2 * kTileElements) {
    for (int64_t pair = 0; pair < kTileRows; ++pair, out += 2) {
      std::memcpy(out, source + pair * 2 * kTileRows, 2 * sizeof(bf16));
    }
  }
}
