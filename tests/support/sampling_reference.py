"""What one row should give, written as plainly as possible in float64 Python, one token at a time.

Shares no code with `engine.worker`.
"""

import math
from collections import Counter

from engine.types.sampling import SamplingParams


def processed(
    logits: list[float], params: SamplingParams, *, prompt: list[int], output: list[int]
) -> list[float]:
    """Logits after everything that precedes the division by the temperature."""
    row = list(logits)
    if params.allowed_token_ids:
        row = [x if i in params.allowed_token_ids else -math.inf for i, x in enumerate(row)]
    for word in params.bad_words_token_ids or []:
        prefix = list(word[:-1])
        if not prefix or output[-len(prefix) :] == prefix:
            row[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token_id in params.all_stop_token_ids:
            row[token_id] = -math.inf
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += bias
    counts = Counter(output)
    for token_id in {*prompt, *output}:
        if row[token_id] > 0:
            row[token_id] /= params.repetition_penalty
        else:
            row[token_id] *= params.repetition_penalty
    for token_id, count in counts.items():
        row[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return row


def softmax(logits: list[float]) -> list[float]:
    """Probabilities of one row."""
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def distribution(
    logits: list[float], params: SamplingParams, *, prompt: list[int], output: list[int]
) -> list[float]:
    """Exact probability of each token; for rows without ties."""
    row = processed(logits, params, prompt=prompt, output=output)
    if params.is_greedy:
        return [float(i == row.index(max(row))) for i in range(len(row))]
    row = [x / params.temperature for x in row]
    probabilities = softmax(row)
    limit = params.min_p * max(probabilities)
    order = sorted(range(len(row)), key=lambda i: -row[i])
    kept = [i for i in order if probabilities[i] >= limit]
    if params.top_k:
        kept = kept[: params.top_k]
    share = sum(probabilities[i] for i in kept)
    nucleus, reached = [], 0.0
    for i in kept:
        if reached >= params.top_p * share and params.top_p < 1.0:
            break
        nucleus.append(i)
        reached += probabilities[i]
    return [probabilities[i] / reached if i in nucleus else 0.0 for i in range(len(row))]


def mix(number: int) -> int:
    """SplitMix64's finaliser, in Python integers."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    return number ^ (number >> 31)


def noise(seed: int, position: int, index: int) -> float:
    """Exponential noise of one index at one output position."""
    gamma = 0x9E3779B97F4A7C15
    key = mix((mix(seed % 2**64) + (position + 1) * gamma) % 2**64)
    return -math.log(((mix((key + (index + 1) * gamma) % 2**64) >> 12) + 0.5) / 2**52)


def drawn(probabilities: list[float], seed: int, position: int) -> tuple[int, float]:
    """The token drawn from a distribution, and by how much the runner-up lost (0: a draw)."""
    sums = [sum(probabilities[begin : begin + 128]) for begin in range(0, len(probabilities), 128)]
    races = [x / noise(seed, position, 2**32 + number) for number, x in enumerate(sums)]
    block = races.index(max(races))
    ids = range(128 * block, min(128 * block + 128, len(probabilities)))
    race = {i: probabilities[i] / noise(seed, position, i) for i in ids}
    token = max(race, key=race.__getitem__)
    margin = 1.0
    for quotients in (sorted(races), sorted(race.values())):
        if len(quotients) > 1:
            margin = min(margin, 1 - quotients[-2] / quotients[-1])
    return token, margin


def log_softmax(logits: list[float]) -> list[float]:
    """Log-probabilities of one row."""
    largest = max(logits)
    log_total = largest + math.log(sum(math.exp(x - largest) for x in logits))
    return [x - log_total for x in logits]
