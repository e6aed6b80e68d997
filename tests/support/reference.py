"""What the engine must agree with: Transformers' own models, and the prompts given to both.

Knows Transformers and the `gguf` package. Imports nothing of the engine, so that no mistake of the
engine's own readers or layers can be in both sides of a comparison.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TIE_GAP = 1e-4
"""Two logits of the reference this close are a tie: float32 sums in another order may swap them."""

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GreedyReference(NamedTuple):
    """Greedy continuation of one prompt by Transformers' generate."""

    token_ids: list[int]
    gaps: list[float]
    """At each position: best logit less second best."""


class ReferenceModel:
    """A Transformers model in float32 that remembers what it was asked before."""

    def __init__(self, model: Any, *, ignore_eos: bool = False) -> None:
        self.model = model
        self._ignore_eos = ignore_eos
        self._greedy: dict[tuple[tuple[int, ...], int], GreedyReference] = {}

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> GreedyReference:
        """Greedy tokens of one prompt alone, end-of-sequence token included."""
        key = (tuple(prompt), num_tokens)
        if key not in self._greedy:
            self._greedy[key] = self._generate(prompt, num_tokens)
        return self._greedy[key]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits behind each token, from one forward pass; [num_tokens, vocab] float32."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(token_ids)])).logits[0].float()

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> GreedyReference:
        input_ids = torch.tensor([list(prompt)])
        more = {"eos_token_id": None} if self._ignore_eos else {}
        with torch.inference_mode():
            generated = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **more,
            )
        tops = [logits[0].topk(2).values for logits in generated.logits]
        return GreedyReference(
            generated.sequences[0, len(prompt) :].tolist(),
            [float(best - second) for best, second in tops],
        )


def count_ties(outputs: Sequence[Any], references: Sequence[GreedyReference]) -> int:
    """Assert that the engine's greedy outputs are the reference's; return the ties accepted.

    A first difference is accepted only where the reference's two best logits are closer than
    `TIE_GAP`; what follows it is another text and is not compared.
    """
    ties = 0
    for number, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        token_ids = list(output.outputs[0].token_ids)
        if token_ids == reference.token_ids:
            continue
        differing = [a != b for a, b in zip(token_ids, reference.token_ids, strict=False)]
        assert any(differing), (
            f"prompt {number}: lengths differ, {token_ids} and {reference.token_ids}"
        )
        position = differing.index(True)
        assert reference.gaps[position] < TIE_GAP, (
            f"prompt {number} of {len(output.prompt_token_ids)} tokens differs at position "
            f"{position}: {token_ids} instead of {reference.token_ids}; the reference's gap "
            f"there is {reference.gaps[position]:.2e}"
        )
        ties += 1
    return ties


def load_gguf_llama(path: Path) -> LlamaForCausalLM:
    """A Llama GGUF file as Transformers' model in float32, through the `gguf` package."""
    reader = gguf.GGUFReader(path)
    facts = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("llama.") or name.endswith("_token_id")
    }
    config = LlamaConfig(
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=facts["llama.rope.freq_base"],
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
    )
    tensors = {
        tensor.name: torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        ).float()
        for tensor in reader.tensors
    }
    weights = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "lm_head.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, stored in _LAYER_TENSORS.items():
            weight = tensors[f"blk.{layer}.{stored}.weight"]
            if stored in heads:
                weight = _halves_apart(weight, heads[stored])
            weights[f"model.layers.{layer}.{name}.weight"] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    # A buffer that no checkpoint holds, and that the meta device left empty.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _halves_apart(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows, in which the two halves of each head are interleaved."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def random_prompts(seed: int, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Prompts of random token ids; the lowest ids, which are special, are left out."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def varied_text(seed: int, num_words: int) -> str:
    """English, code, figures and other scripts in random order, about `num_words` long."""
    rng = random.Random(seed)
    parts: list[str] = []
    while sum(len(part.split()) for part in parts) < num_words:
        parts.append(rng.choice(_MAKERS)(rng))
    return " ".join("".join(parts).split(" ")[: max(1, num_words)])


_PLACES = ("harbour", "library", "river", "market", "mountain", "workshop", "orchard", "station")
_PEOPLE = ("the teacher", "an old sailor", "my neighbour", "the engineer", "Anna", "Dr. Okafor")
_DEEDS = ("repaired", "described", "painted", "counted", "forgot", "measured", "sold", "found")
_THINGS = ("a clock", "two letters", "the map", "seven lamps", "a broken radio", "the recipe")
_FOREIGN = (
    "Der Zug fährt um halb acht ab. ",
    "La lluvia cayó toda la noche sobre el pueblo. ",
    "Les enfants jouent près de la fontaine. ",
    "今日は空がとても青い。 ",
    "Москва — большой город. ",
    "Ωραία μέρα! ",
    "🙂🚀 ok\u200b ",
)


def _sentence(rng: random.Random) -> str:
    verb, place = rng.choice(_DEEDS), rng.choice(_PLACES)
    text = f"{rng.choice(_PEOPLE)} {verb} {rng.choice(_THINGS)} near the {place}"
    return text[0].upper() + text[1:] + rng.choice((". ", "; nobody asked why. ", "!\n\n", ", "))


def _question(rng: random.Random) -> str:
    return f"Question: what did {rng.choice(_PEOPLE)} see at the {rng.choice(_PLACES)}?\nAnswer: "


def _figures(rng: random.Random) -> str:
    a, b = rng.randrange(10_000), rng.randrange(1, 500)
    return f"{a} + {b} = {a + b}, {a / b:.3f}; on {1900 + b % 120}-0{1 + b % 9}-1{b % 10}. "


def _code(rng: random.Random) -> str:
    name = rng.choice(("total", "speed", "widths", "node_count"))
    return f"\ndef {name}(values):\n    return sum(v ** {rng.randrange(2, 5)} for v in values)\n"


def _listing(rng: random.Random) -> str:
    return "".join(f"- {rng.choice(_THINGS)}\n" for _ in range(rng.randrange(2, 5)))


def _foreign(rng: random.Random) -> str:
    return rng.choice(_FOREIGN)


_MAKERS = (_sentence, _sentence, _sentence, _question, _figures, _code, _listing, _foreign)
