"""Levels of x86-64 at which PyTorch's kernels can be made to run, whatever the processor offers.

Knows the environment variables that PyTorch and oneDNN read when they are loaded: a level must be
set before the process that is to run at it starts.
"""

KERNEL_LEVELS: dict[str, dict[str, str]] = {
    "best": {},
    "avx512_core": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse41": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""By name, best first. A level above the processor's own is the processor's own."""
