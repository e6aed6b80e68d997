"""Which JSON schemas structured outputs take, whether they are right, and how long they take.

    python benchmarks/structured.py FOLDER

FOLDER has two files of JSON:

- `maskbench_half.json`: schemas of the public MaskBench data set (guidance-ai/jsonschemabench),
  each with instances that are valid or not, in a list of
  `{"id": …, "schema": …, "tests": [{"data": …, "valid": …}]}`;
- `real_schemas.json`: schemas of the kinds that people send, by name; some are meant to be refused.

An instance counts as accepted if one of up to 48 orders of its keys is, written by `json.dumps`,
tokenized by the embedded model's tokenizer, and taken token by token up to where the text may end.
A schema is fully right if it is taken and every instance is judged right. Objects are left open, as
the instances take them, and closed, as a request has them by default. Times are those of the checks
before a request is sent (`check`), of what the engine core then does (`compile`), and of the mask
before each token of every instance (`mask`). The last line is one JSON document.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.structured.constraint import ConstraintError, compiled, grammar_text
from engine.structured.forms.prepass import prepared
from engine.structured.forms.schema_shapes import SchemaError
from engine.structured.vocabulary import load_vocabulary, tokenizer_of

NUM_ORDERS = 48
VOCAB_SIZE, END = 49152, 2


def orders(value: Any, most: int) -> Iterator[Any]:
    """A value with the keys of its objects in several orders, at most so many."""
    if isinstance(value, list):
        inner = [list(itertools.islice(orders(item, 4), 4)) for item in value]
        yield from (list(items) for items in itertools.islice(itertools.product(*inner), most))
    elif isinstance(value, dict):
        inner = [
            [(key, one) for one in itertools.islice(orders(item, 4), 4)]
            for key, item in value.items()
        ]
        ways = (
            dict(items)
            for order in itertools.permutations(inner)
            for items in itertools.product(*order)
        )
        yield from itertools.islice(ways, most)
    else:
        yield value


class Bench:
    """Measures schemas with the embedded model's tokenizer."""

    def __init__(self) -> None:
        vocabulary, self.encode = load_vocabulary(
            model=None,
            revision=None,
            download_dir=None,
            tokenizer=None,
            vocab_size=VOCAB_SIZE,
            end_token_ids=[END],
        )
        self.tokenizer = tokenizer_of(vocabulary, self.encode)
        self.mask = np.empty(VOCAB_SIZE // 32, dtype=np.int32)
        self.times_ms: dict[str, list[float]] = {"check": [], "compile": [], "mask": []}

    def matcher(self, schema: Any, *, closes_objects: bool) -> Any:
        """A schema's matcher at its beginning.

        Raises:
            SchemaError, ConstraintError: it is refused.
        """
        began_s = time.perf_counter()
        written = prepared(schema, closes_objects=closes_objects)
        key = ("json", json.dumps(written, ensure_ascii=False), False)
        checked_s = time.perf_counter()
        matcher = compiled(self.tokenizer, key, grammar_text(key))
        self.times_ms["check"].append(1e3 * (checked_s - began_s))
        self.times_ms["compile"].append(1e3 * (time.perf_counter() - checked_s))
        return matcher

    def accepts(self, start: Any, value: Any) -> bool:
        """Whether one of the orders of a value's keys is let through."""
        return any(self._follows(start, one) for one in orders(value, NUM_ORDERS))

    def _follows(self, start: Any, value: Any) -> bool:
        matcher = start.deep_copy()
        for token_id in self.encode(json.dumps(value)):
            began_s = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
            self.times_ms["mask"].append(1e3 * (time.perf_counter() - began_s))
            is_allowed = matcher.validate_tokens([token_id]) == 1
            if not is_allowed or not matcher.consume_token(token_id):
                return False
        return bool(matcher.is_accepting())


def measure(bench: Bench, cases: list[dict[str, Any]], *, closes_objects: bool) -> dict[str, Any]:
    """Counts over MaskBench's cases."""
    counts = dict.fromkeys(
        ("accepted", "valid", "false_rejects", "invalid", "false_accepts", "fully_right"), 0
    )
    for case in cases:
        try:
            matcher = bench.matcher(case["schema"], closes_objects=closes_objects)
        except (SchemaError, ConstraintError):
            continue
        counts["accepted"] += 1
        is_right = True
        for test in case["tests"]:
            counts["valid" if test["valid"] else "invalid"] += 1
            if bench.accepts(matcher, test["data"]) is not test["valid"]:
                counts["false_rejects" if test["valid"] else "false_accepts"] += 1
                is_right = False
        counts["fully_right"] += is_right
    return counts | {"share_fully_right": counts["fully_right"] / len(cases)}


def num_taken(bench: Bench, schemas: dict[str, Any]) -> int:
    """How many schemas are not refused."""
    num = 0
    for name, schema in schemas.items():
        try:
            bench.matcher(schema, closes_objects=True)
            num += 1
        except (SchemaError, ConstraintError) as error:
            print(f"refused: {name}: {str(error)[:100]}")
    return num


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cases = json.loads((folder / "maskbench_half.json").read_text())
    schemas = json.loads((folder / "real_schemas.json").read_text())
    bench = Bench()
    found: dict[str, Any] = {"num_schemas": len(cases)}
    for name, closes_objects in (("open", False), ("closed", True)):
        found[name] = measure(bench, cases, closes_objects=closes_objects)
        print(f"objects {name}: {found[name]}")
    for name, times_ms in bench.times_ms.items():
        p50, p99 = map(float, np.percentile(times_ms, (50, 99)))
        found[f"{name}_ms"] = {
            "p50": round(p50, 3),
            "p99": round(p99, 3),
            "max": round(max(times_ms), 3),
        }
        print(f"{name}: {found[f'{name}_ms']} over {len(times_ms)}")
    found["real_schemas"] = {"taken": num_taken(bench, schemas), "of": len(schemas)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
