"""Any model: a Transformers folder, a .gguf file or a hub name; here a tiny random one.

Settings carry vLLM's names. What the engine decided is on `llm.config` and `llm.llm_engine.ready`.
"""

import tempfile

from transformers import Qwen3Config, Qwen3ForCausalLM

from engine import LLM, SamplingParams

with tempfile.TemporaryDirectory() as folder:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    with LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=8,
        num_gpu_blocks_override=40,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        log_level="warning",
    ) as llm:
        print("context:", llm.config.model.max_model_len, "tokens;", llm.llm_engine.ready.dtype)
        outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=5))
        for output in outputs:
            print(output.prompt_token_ids, "->", output.outputs[0].token_ids)
