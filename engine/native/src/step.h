// What Python hands over (engine/native/library.py mirrors these structures): a model, a step.
#pragma once

#include "gemm.h"

struct Layer {
  const float* input_norm;   // [hidden]
  const float* mlp_norm;     // [hidden]
  const float* query_norm;   // [head_dim], or null
  const float* key_norm;     // [head_dim], or null
  const bf16* qkv;           // panels, see gemm.h; likewise the other three
  const bf16* output;
  const bf16* gate_up;
  const bf16* down;
  const float* qkv_bias;     // filled up to whole panels, or null; likewise the other three
  const float* output_bias;
  const float* gate_up_bias; // in the order of the panels' columns
  const float* down_bias;
  int64_t window;            // tokens that a token sees, itself included; 0: all
};

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim;
  float scale;  // of scores

  int64_t query_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t qkv_size() const { return query_size() + 2 * kv_size(); }
  int64_t group() const { return num_heads / num_kv_heads; }
};

struct Model {
  Shape shape;
  float eps;
  int64_t num_layers, hidden, intermediate, vocab;
  const Layer* layers;
  const float* final_norm;  // [hidden]
  const bf16* embedding;    // [vocab, hidden]; null: read out of the head's panels
  const bf16* head;         // panels
};

// A step's requests, as engine.attention.base.BatchLayout has them.
struct Batch {
  int64_t num_tokens, num_reqs, block_size, table_stride;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* block_table;      // [num_reqs, table_stride]
  const int64_t* slots;            // [num_tokens]
};

// Memory of a step; `rows` of each are padded to a multiple of 32.
struct Workspace {
  bf16* hidden;    // [rows, hidden], the residual stream
  bf16* normed;    // [rows, hidden]
  bf16* qkv;       // [rows, qkv_size]
  bf16* attended;  // [rows, query_size]
  bf16* gated;     // [rows, intermediate]
};

struct Step {
  Batch batch;
  Workspace memory;
  const int64_t* token_ids;  // [num_tokens]
  const float* cosine;       // [num_tokens, head_dim / 2]; likewise sine
  const float* sine;
  bf16* const* caches;       // one a layer
  bf16* output;              // [num_tokens, hidden]
};
