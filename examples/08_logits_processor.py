"""A logits processor of your own: requests may ask for even token ids only.

It runs in the engine core's process, which loads this file to find the class. That is why this
script, unlike the others, needs the `__main__` guard.
"""

from engine import LLM, AdapterLogitsProcessor, SamplingParams


class EvenTokens(AdapterLogitsProcessor):
    """Forbids odd token ids for requests with extra_args={"even": True}."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if not (params.extra_args or {}).get("even"):
            return None

        def forbid_odd(output_token_ids, logits):
            logits[1::2] = float("-inf")
            return logits

        return forbid_odd


def main():
    even = SamplingParams(temperature=0, max_tokens=8, extra_args={"even": True})
    plain = SamplingParams(temperature=0, max_tokens=8)
    with LLM(logits_processors=[EvenTokens], log_level="warning") as llm:
        with_mask, without = llm.generate(["Numbers are"] * 2, [even, plain], use_tqdm=False)
    print("masked:", with_mask.outputs[0].token_ids)
    print("plain: ", without.outputs[0].token_ids)
    assert all(token_id % 2 == 0 for token_id in with_mask.outputs[0].token_ids)


if __name__ == "__main__":
    main()
