"""Small SentencePiece models, trained where a test wants them, and files with their vocabularies.

Knows the sentencepiece library and the gguf writer. Does not know the engine's tokenizers.
"""

import io
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

WORDS = (
    *("hello", "world", "the", "quick", "brown", "fox", "don't", "naïve", "Größe", "<0x41>"),
    *("Привет", "мир", "你好", "世界", "مرحبا", "🙂", "  def f(x):", "\treturn x", "aaaa", "a▁b"),
)
ADDED = ("<think>", "</think>", "\n", "<a▁b>")
"""Words that are added to some vocabularies; the last is found with a plain space, too."""
CONTROL = ("<|user|>", "<|end|>")
SPECIAL = ("<unk>", "<s>", "</s>", *CONTROL)


@dataclass(frozen=True)
class Training:
    """What a model is trained with; hashable, since each is trained once."""

    kind: str = "bpe"
    prefix: bool = True
    removes_extra: bool = False
    fallback: bool = True
    rule: str = "identity"
    added: bool = False
    vocab_size: int = 400


class TrainedModel:
    """A model and what the library makes of it."""

    def __init__(self, proto: bytes) -> None:
        self.bytes = proto
        self.proto = sentencepiece_model_pb2.ModelProto()
        self.proto.ParseFromString(proto)
        self.library = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self.control_ids = {name: self.library.piece_to_id(name) for name in SPECIAL}

    def encode(self, text: str) -> list[int]:
        """The library's ids of what stands between control tokens, and those of the tokens."""
        for control, token_id in self.control_ids.items():
            before, found, behind = text.partition(control)
            if found:
                return [*self.encode(before), token_id, *self.encode(behind)]
        return self.library.encode(text)

    def weight(self, ids: list[int]) -> float:
        """How likely pieces are; a unigram model takes the likeliest."""
        return sum(self.library.get_score(token_id) for token_id in ids)


@cache
def train(training: Training) -> TrainedModel:
    """A model of a few hundred pieces, learned from random words."""
    rng = random.Random(1)
    sentences = [" ".join(rng.choices(WORDS, k=12)) for _ in range(300)]
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=output,
        model_type=training.kind,
        vocab_size=training.vocab_size,
        hard_vocab_limit=False,
        add_dummy_prefix=training.prefix,
        remove_extra_whitespaces=training.removes_extra,
        byte_fallback=training.fallback,
        normalization_rule_name=training.rule,
        user_defined_symbols=list(ADDED) if training.added else [],
        control_symbols=list(CONTROL),
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    return TrainedModel(output.getvalue())


def write_gguf(path: Path, model: TrainedModel, **changes: object) -> Path:
    """A GGUF file with a model's vocabulary, as converters write it.

    Args:
        changes: keys below `tokenizer.ggml` to other values, or to None to leave them out.
    """
    from gguf import GGUFWriter

    rules = model.proto.normalizer_spec
    values: dict[str, object] = {
        "model": "t5" if model.proto.trainer_spec.model_type == 1 else "llama",
        "tokens": [piece.piece for piece in model.proto.pieces],
        "scores": [piece.score for piece in model.proto.pieces],
        "token_type": [piece.type for piece in model.proto.pieces],
        "bos_token_id": model.library.bos_id(),
        "eos_token_id": model.library.eos_id(),
        "unknown_token_id": model.library.unk_id(),
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": rules.add_dummy_prefix,
        "remove_extra_whitespaces": rules.remove_extra_whitespaces,
        "precompiled_charsmap": list(rules.precompiled_charsmap) or None,
        **changes,
    }
    writer = GGUFWriter(str(path), "llama")
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: Path, model: TrainedModel, *, name: str = "tokenizer.model", **settings: object
) -> Path:
    """A model's folder that has a SentencePiece file and no tokenizer.json."""
    folder.mkdir()
    (folder / name).write_bytes(model.bytes)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
