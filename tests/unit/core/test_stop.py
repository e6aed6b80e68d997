"""When the core ends a request, and what it gives as the reason."""

import pytest

from engine.core.stop import check_stop, output_limit
from engine.types.messages import FinishReason
from tests.fakes import EOS, make_request, sampling_params


def judge(
    output: list[int], *, max_model_len: int = 100, **fields: object
) -> tuple[object, object]:
    request = make_request("r", [1, 2, 3], params=sampling_params(**fields))
    request.append_output(output)
    return check_stop(request, max_model_len), request.stop_reason


def test_the_models_own_end_gives_no_stop_reason() -> None:
    assert judge([5, EOS]) == (FinishReason.STOP, None)
    assert judge([5, EOS], ignore_eos=True) == (None, None)


def test_a_stop_token_is_named() -> None:
    assert judge([5, 7], stop_token_ids=[7, 9]) == (FinishReason.STOP, 7)
    assert judge([7, 5], stop_token_ids=[7, 9]) == (None, None)
    # The model's own end is named too where the caller asked for it.
    assert judge([EOS], stop_token_ids=[EOS]) == (FinishReason.STOP, EOS)


def test_a_stop_token_id_that_is_ignored_as_eos_still_stops_when_asked_for() -> None:
    assert judge([EOS], stop_token_ids=[EOS], ignore_eos=True) == (FinishReason.STOP, EOS)


@pytest.mark.parametrize(("num_tokens", "ends"), [(1, False), (2, False), (3, True)])
def test_min_tokens_comes_before_any_stop(num_tokens: int, ends: bool) -> None:
    reason, _ = judge([EOS] * num_tokens, min_tokens=3)
    assert (reason is FinishReason.STOP) == ends


def test_length_by_parameters_and_by_context() -> None:
    assert judge([5, 5], max_tokens=3) == (None, None)
    assert judge([5, 5, 5], max_tokens=3) == (FinishReason.LENGTH, None)
    assert judge([5, 5], max_tokens=None, max_model_len=6) == (None, None)
    assert judge([5, 5, 5], max_tokens=None, max_model_len=6) == (FinishReason.LENGTH, None)


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    assert judge([5, 5, EOS], max_tokens=3) == (FinishReason.STOP, None)


def test_output_limit() -> None:
    assert output_limit(make_request("r", [1], max_tokens=7)) == 7
    assert output_limit(make_request("r", [1], max_tokens=None)) > 10**15


def test_reasons_have_the_names_that_users_see() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
