// The C interface: a whole forward pass in one parallel region, and its parts for others.
//
// A layer is eight stages, each of which needs all of the one before: norm, projection, positions
// and cache, attention, projection, norm, gate and up, down.
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "rows.h"

namespace {

constexpr int64_t kRowItem = 4;  // rows of one item of a stage that works on rows
constexpr int kStagesPerLayer = 8;

// A stage that does `work(row)` for every row.
template <class Work>
void each_row(Team::Member& member, int64_t num_rows, Work&& work) {
  member.stage((num_rows + kRowItem - 1) / kRowItem, [&](int64_t item) {
    const int64_t end = std::min(num_rows, (item + 1) * kRowItem);
    for (int64_t row = item * kRowItem; row < end; ++row) work(row);
  });
}

// The 16 sums from `lane` on, with their bias if there is one.
inline __m512 biased(const float* sums, const float* bias, int64_t column, int lane) {
  const __m512 sum = _mm512_load_ps(sums + lane);
  return bias ? _mm512_add_ps(sum, _mm512_loadu_ps(bias + column + lane)) : sum;
}

// A product in bfloat16, panel beside panel.
inline Target rows_of(bf16* data, int64_t size) {
  return {data, size * int64_t{sizeof(bf16)}, kPanelColumns * sizeof(bf16)};
}

inline void store_some(bf16* out, __m512 x, int64_t count) {
  _mm256_mask_storeu_epi16(out, first_lanes(count), narrow(x));
}

class Decoder {
 public:
  Decoder(const Model& model, const Step& step)
      : model_(model),
        shape_(model.shape),
        step_(step),
        memory_(step.memory),
        num_tokens_(step.batch.num_tokens),
        tasks_(attention_tasks(step.batch, model.shape)) {}

  int num_stages() const { return static_cast<int>(model_.num_layers) * kStagesPerLayer + 2; }

  void run(Team::Member& member) const {
    AttentionScratch& scratch = thread_scratch();
    each_row(member, num_tokens_, [&](int64_t row) {
      embed(model_, step_.token_ids[row], memory_.hidden + row * model_.hidden);
    });
    for (int64_t index = 0; index < model_.num_layers; ++index) {
      const Layer& layer = model_.layers[index];
      norm(member, layer.input_norm, memory_.normed);
      project_qkv(member, layer);
      const Cache cache(step_.caches[index], shape_, step_.batch.block_size);
      place(member, layer, cache);
      const Attention attention(step_.batch, shape_, cache, layer.window, memory_.qkv,
                                memory_.attended);
      member.stage(tasks_.size(), [&](int64_t task) { attention.run(tasks_, task, scratch); });
      add(member, {memory_.attended, shape_.query_size(), num_tokens_},
          {layer.output, shape_.query_size(), model_.hidden}, layer.output_bias);
      norm(member, layer.mlp_norm, memory_.normed);
      gate(member, layer);
      add(member, {memory_.gated, model_.intermediate, num_tokens_},
          {layer.down, model_.intermediate, model_.hidden}, layer.down_bias);
    }
    norm(member, model_.final_norm, step_.output);
    release_tiles();
  }

 private:
  void norm(Team::Member& member, const float* weight, bf16* out) const {
    const int64_t size = model_.hidden;
    each_row(member, num_tokens_, [&](int64_t row) {
      rms_norm(memory_.hidden + row * size, weight, model_.eps, size, out + row * size);
    });
  }

  void project_qkv(Team::Member& member, const Layer& layer) const {
    const int64_t size = shape_.qkv_size();
    multiply(member, {memory_.normed, model_.hidden, num_tokens_},
             {layer.qkv, model_.hidden, size}, rows_of(memory_.qkv, size),
             [&](int64_t panel, char* target, const float* sums) {
               const int64_t column = panel * kPanelColumns;
               bf16* out = reinterpret_cast<bf16*>(target);
               for (int lane = 0; lane < kPanelColumns; lane += kLanes) {
                 store_some(out + lane, biased(sums, layer.qkv_bias, column, lane),
                            size - column - lane);
               }
             });
  }

  // Norms (in some families) and turns queries and keys; keys and values go to the cache.
  void place(Team::Member& member, const Layer& layer, const Cache& cache) const {
    const int64_t head_dim = shape_.head_dim, half = head_dim / 2;
    each_row(member, num_tokens_, [&](int64_t row) {
      bf16* query = memory_.qkv + row * shape_.qkv_size();
      bf16* key = query + shape_.query_size();
      for (int64_t head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
        bf16* data = query + head * head_dim;
        const float* weight = head < shape_.num_heads ? layer.query_norm : layer.key_norm;
        if (weight) rms_norm(data, weight, model_.eps, head_dim, data);
        rotate(data, step_.cosine + row * half, step_.sine + row * half, head_dim);
      }
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head, key += head_dim) {
        cache.write(step_.batch.slots[row], head, key, key + shape_.kv_size());
      }
    });
  }

  // hidden += x * weights + bias
  void add(Team::Member& member, const Activations& x, const Weights& weights,
           const float* bias) const {
    const Target target = rows_of(memory_.hidden, model_.hidden);
    multiply(member, x, weights, target, [&](int64_t panel, char* place, const float* sums) {
      const int64_t column = panel * kPanelColumns;
      bf16* out = reinterpret_cast<bf16*>(place);
      for (int lane = 0; lane < kPanelColumns && column + lane < model_.hidden; lane += kLanes) {
        store(out + lane, _mm512_add_ps(load(out + lane), biased(sums, bias, column, lane)));
      }
    });
  }

  // gated = silu(gate) * up
  void gate(Team::Member& member, const Layer& layer) const {
    multiply(member, {memory_.normed, model_.hidden, num_tokens_},
             {layer.gate_up, model_.hidden, 2 * model_.intermediate},
             {memory_.gated, model_.intermediate * int64_t{sizeof(bf16)}, kLanes * sizeof(bf16)},
             [&](int64_t panel, char* target, const float* sums) {
               const int64_t column = panel * kPanelColumns;
               const __m512 gate = biased(sums, layer.gate_up_bias, column, 0);
               const __m512 up = biased(sums, layer.gate_up_bias, column, kLanes);
               store(reinterpret_cast<bf16*>(target), _mm512_mul_ps(silu(gate), up));
             });
  }

  const Model& model_;
  const Shape& shape_;
  const Step& step_;
  const Workspace& memory_;
  const int64_t num_tokens_;
  const std::vector<AttentionTask> tasks_;
};

}  // namespace

// All else is hidden: another version of the library in the same process must not share it.
#pragma GCC visibility push(default)
extern "C" {

// Asks the kernel for the matrix unit's registers, once a process. 0, or -1 where there are none.
int isinglass_enable_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, and CPUID leaf 13
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : -1;
}

// Packs a dense row-major `columns x inner` weight (a row a column of the product) into panels.
void isinglass_pack(const bf16* weight, int64_t columns, int64_t inner, bf16* panels) {
  const int64_t steps = inner / kTileDepth;
  const int64_t padded = (columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
  for (int64_t column = 0; column < padded; ++column) {
    const bf16* source = weight + column * inner;
    bf16* target = panels + column / kPanelColumns * kPanelColumns * inner +
                   column % kPanelColumns / kTileRows * kTileElements + column % kTileRows * 2;
    for (int64_t step = 0; step < steps; ++step, target += 2 * kTileElements) {
      for (int64_t pair = 0; pair < kTileRows; ++pair, source += 2) {
        uint32_t value = 0;
        if (column < columns) std::memcpy(&value, source, sizeof value);
        std::memcpy(target + pair * 2 * kTileRows, &value, sizeof value);
      }
    }
  }
}

// A model's forward pass; hidden states after the last norm go to `step->output`.
void isinglass_forward(const Model* model, const Step* step, int num_threads) {
  const Decoder decoder(*model, *step);
  Team(num_threads, decoder.num_stages()).run([&](Team::Member& member) { decoder.run(member); });
}

// `rows x inner` times packed weights, `[rows, columns]` float32.
void isinglass_multiply(const bf16* x, int64_t num_rows, int64_t inner, const bf16* panels,
                        int64_t columns, float* out, int num_threads) {
  Team(num_threads, 1).run([&](Team::Member& member) {
    multiply(member, {x, inner, num_rows}, {panels, inner, columns},
             {out, columns * int64_t{sizeof(float)}, kPanelColumns * sizeof(float)},
             [&](int64_t panel, char* target, const float* sums) {
               const int64_t column = panel * kPanelColumns;
               float* logits = reinterpret_cast<float*>(target);
               for (int lane = 0; lane < kPanelColumns; lane += kLanes) {
                 _mm512_mask_storeu_ps(logits + lane, first_lanes(columns - column - lane),
                                       _mm512_load_ps(sums + lane));
               }
             });
    release_tiles();
  });
}

// One layer's attention: writes keys and values of `qkv` to the cache, then attends.
void isinglass_attend(const Shape* shape, const Batch* batch, int64_t window, const bf16* qkv,
                      bf16* cache_data, bf16* output, int num_threads) {
  const Cache cache(cache_data, *shape, batch->block_size);
  const Attention attention(*batch, *shape, cache, window, qkv, output);
  const std::vector<AttentionTask> tasks = attention_tasks(*batch, *shape);
  Team(num_threads, 2).run([&](Team::Member& member) {
    AttentionScratch& scratch = thread_scratch();
    each_row(member, batch->num_tokens, [&](int64_t row) {
      const bf16* key = qkv + row * shape->qkv_size() + shape->query_size();
      for (int64_t head = 0; head < shape->num_kv_heads; ++head, key += shape->head_dim) {
        cache.write(batch->slots[row], head, key, key + shape->kv_size());
      }
    });
    member.stage(tasks.size(), [&](int64_t task) { attention.run(tasks, task, scratch); });
    release_tiles();
  });
}

}  // extern "C"
#pragma GCC visibility pop
