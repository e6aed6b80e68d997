"""The torch profiler and its files, NVTX, ranges around layers."""
