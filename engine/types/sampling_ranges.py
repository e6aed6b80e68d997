"""The fields of `SamplingParams` by the kind of their value, and the range of every number.

Knows the fields' names, what each may be and how a message says that. Does not know what they mean
nor how they interact: that is `engine.types.sampling`.
"""

from typing import Final

MAX_NUM_COMPLETIONS: Final = 16_384
"""Upper bound of `n`, so that one request cannot flood the engine."""

_MAX_COUNT: Final = 2**63 - 1

FLAGS: Final = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)

OPTIONAL_INTEGERS: Final = frozenset(
    ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
)

INTEGER_RANGES: Final[tuple[tuple[str, int, int, str], ...]] = (
    ("n", 1, MAX_NUM_COMPLETIONS, f"an integer from 1 to {MAX_NUM_COMPLETIONS}"),
    ("top_k", -1, _MAX_COUNT, "an integer of at least 1, or 0 or -1 for all tokens"),
    ("seed", -(2**63), 2**64 - 1, "None or an integer of at most 64 bits"),
    ("max_tokens", 1, _MAX_COUNT, "None or an integer of at least 1"),
    ("min_tokens", 0, _MAX_COUNT, "an integer of at least 0"),
    ("logprobs", -1, _MAX_COUNT, "None, an integer of at least 0, or -1 for all tokens"),
    ("prompt_logprobs", -1, _MAX_COUNT, "None, an integer of at least 0, or -1 for all tokens"),
    ("truncate_prompt_tokens", 1, _MAX_COUNT, "None or an integer of at least 1"),
)

_MAX_REAL: Final = 1e30
"""Whatever is drawn is the same far below; above float32's largest, -inf divided by it is NaN."""
REAL_RANGES: Final[tuple[tuple[str, float, float, str], ...]] = (
    ("presence_penalty", -2.0, 2.0, "a number in [-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "a number in [-2, 2]"),
    ("repetition_penalty", 0.0, _MAX_REAL, "a number above 0 and at most 1e30"),
    ("temperature", 0.0, _MAX_REAL, "a number in [0, 1e30]"),
    ("top_p", 0.0, 1.0, "a number in (0, 1]"),
    ("min_p", 0.0, 1.0, "a number in [0, 1]"),
)
