"""The tests that run once more for each level of processor, with better features hidden.

    python -m tests.levels [arguments of pytest]

PyTorch and the libraries below it choose their kernels by the processor. What is right with one
choice may be wrong with another, and whoever runs the tests has only one processor: here those of
arithmetic run again, and some of a server, as on lesser ones. The environment says so, and with it
every process that a test starts knows. Knows which tests; how they learn of it is in `conftest.py`.
"""

import os
import subprocess
import sys
from typing import Final

VARIABLE: Final = "ISINGLASS_TEST_LEVEL"
"""Names the level to the tests; only they read it."""
LEVELS: Final = {
    # Neither AMX nor instructions for bfloat16.
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
SERVER: Final = "tests/integration/test_server_openai.py::test_"
TESTS: Final = (
    "tests/integration/test_levels.py",
    "tests/integration/test_parity.py",
    "tests/integration/test_bf16.py",
    "tests/property/test_attention_batches.py",
    "tests/unit/attention/test_attention.py",
    "tests/unit/models/test_layers.py",
    "tests/unit/models/test_models.py",
    "tests/unit/worker/test_sampler.py",
    "tests/unit/worker/test_sampling_distribution.py",
    f"{SERVER}completions_are_those_of_llm",
    f"{SERVER}logprobs_of_completions",
    f"{SERVER}chat_is_that_of_llm",
    f"{SERVER}n_and_seed",
    f"{SERVER}forms_of_answers",
    f"{SERVER}async_clients_at_once",
)


def main() -> int:
    """Run them at each level; the exit code of the first that fails."""
    codes = []
    for level, hiding in LEVELS.items():
        shown = " ".join(f"{name}={value}" for name, value in hiding.items())
        print(f"the processor as {level}: {shown}, PyTorch's kernels", flush=True)
        command = [sys.executable, "-m", "pytest", "-m", "not slow and not gpu", "-n", "2"]
        done = subprocess.run(
            [*command, "--dist", "loadfile", *TESTS, *sys.argv[1:]],
            env=os.environ | hiding | {VARIABLE: level},
            check=False,
        )
        codes.append(done.returncode)
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
