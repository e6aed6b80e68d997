// Sixteen floats at a time, and bfloat16 in memory.
//
// Everything is computed in float32; bfloat16 is how it is stored.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

constexpr int kLanes = 16;  // floats of a 512-bit vector

inline __m512 widen(__m256i packed) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16));
}

inline __m512 load(const bf16* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline __m256i narrow(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline void store(bf16* p, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x));
}

// The first `n` lanes, of which there may be fewer than none or more than sixteen.
inline __mmask16 first_lanes(int64_t n) {
  if (n <= 0) return 0;
  return n >= kLanes ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
}

// 2^x, relative error below 3e-6 (a minimax polynomial of 2^fraction on [0, 1)); 0 for x = -inf.
inline __m512 exp2(__m512 x) {
  const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 y = _mm512_set1_ps(0.01353416792f);
  y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.05201146061f));
  y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.2414427569f));
  y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.6930038345f));
  y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(1.000002593f));
  return _mm512_scalef_ps(y, x);  // y * 2^floor(x)
}

constexpr float kLog2E = 1.44269504f;

// x * sigmoid(x), relative error below 2^-13: a true division takes as long as all the rest, and
// what comes of it is rounded to bfloat16's 2^-9.
inline __m512 silu(__m512 x) {
  const __m512 decay = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), decay)));
}
