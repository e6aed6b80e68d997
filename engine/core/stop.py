"""When a request ends, and why. Stop strings are the frontend's: the core knows no text."""

from engine.core.request import Request
from engine.types.messages import FinishReason


def check_stop(request: Request, max_model_len: int) -> FinishReason | None:
    """Judge the request by its newest output token; sets `stop_reason` for a stop token id."""
    params = request.sampling_params
    if request.num_output_tokens >= params.min_tokens:
        token_id = request.all_token_ids[-1]
        if token_id in params.all_stop_token_ids:
            if token_id in (params.stop_token_ids or ()):
                request.stop_reason = token_id
            return FinishReason.STOP
    if request.num_tokens >= max_model_len or request.num_output_tokens >= output_limit(request):
        return FinishReason.LENGTH
    return None


def output_limit(request: Request) -> int:
    """Most output tokens that the request may have by its own parameters."""
    max_tokens = request.sampling_params.max_tokens
    return max_tokens if max_tokens is not None else 1 << 62
