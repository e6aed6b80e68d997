// The paged cache of one layer, laid out for the matrix unit.
//
//     [block][keys | values][kv head][group of 16 tokens][16 * head_dim]
//
// A group of keys holds tiles b of `query * key^T`, a column a token:
//     element (token j, dim d) at d / 2 * 32 + j * 2 + d % 2
// A group of values is half of the tiles b of `weights * value`, a row a pair of tokens:
//     element (token j, dim d) at j / 2 * 2 * head_dim + d * 2 + j % 2
#pragma once

#include "step.h"

constexpr int kGroupTokens = 16;

class Cache {
 public:
  Cache(bf16* data, const Shape& shape, int64_t block_size)
      : data_(data),
        head_dim_(shape.head_dim),
        block_size_(block_size),
        head_elements_(block_size * shape.head_dim),
        half_elements_(shape.num_kv_heads * head_elements_) {}

  // The group of keys that `token`, a multiple of 16 within the request, begins.
  const bf16* keys(const int32_t* blocks, int64_t token, int64_t kv_head) const {
    return data_ + 2 * half_elements_ * blocks[token / block_size_] + head_elements_ * kv_head +
           token % block_size_ * head_dim_;
  }

  const bf16* values(const int32_t* blocks, int64_t token, int64_t kv_head) const {
    return keys(blocks, token, kv_head) + half_elements_;
  }

  // Stores one token's key and value of one head.
  void write(int64_t slot, int64_t kv_head, const bf16* key, const bf16* value) const {
    const int64_t offset = slot % block_size_, place = offset % kGroupTokens;
    bf16* group = data_ + 2 * half_elements_ * (slot / block_size_) + head_elements_ * kv_head +
                  (offset - place) * head_dim_;
    for (int64_t pair = 0; pair < head_dim_ / 2; ++pair) {
      std::memcpy(group + pair * 32 + place * 2, key + 2 * pair, 2 * sizeof(bf16));
    }
    // Other threads may be writing the other token of the pair: only its own elements are touched.
    bf16* row = group + half_elements_ + place / 2 * 2 * head_dim_;
    const bool odd = place % 2;
    for (int64_t dim = 0; dim < head_dim_; dim += kLanes, row += 2 * kLanes) {
      __m512i pairs = _mm512_cvtepu16_epi32(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + dim)));
      if (odd) pairs = _mm512_slli_epi32(pairs, 16);
      _mm512_mask_storeu_epi16(row, odd ? 0xaaaaaaaau : 0x55555555u, pairs);
    }
  }

 private:
  bf16* data_;
  int64_t head_dim_, block_size_, head_elements_, half_elements_;
};
