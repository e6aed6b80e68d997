"""Llama and its kin: SmolLM, Mistral (a sliding window) and others that use the class names.

The plain decoder: biases only where the configuration says so.
"""

from engine.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 1 to 3, SmolLM. Paper: https://arxiv.org/abs/2302.13971"""


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: Llama with a sliding window. Paper: https://arxiv.org/abs/2310.06825"""
