"""Handing the prompts of one HTTP request to the engine: all of them, or none.

Knows ids, trace context, priorities and the room in the queue. What fails on the way leaves nothing
running.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastapi import Request

from engine.api.async_llm import AsyncLLM
from engine.frontend.input_processor import ProcessedParams, ProcessedPrompt, Prompt
from engine.frontend.output_stream import RequestStream
from engine.server.cluster.admission import Reservation
from engine.server.config import ServerConfig
from engine.server.http.errors import ApiError
from engine.server.openai.protocol.common import GenerationFields
from engine.server.openai.sampling import naming_fields
from engine.server.state import ServerState
from engine.types.sampling import SamplingParams


class Origin(NamedTuple):
    """Where a request came from, and when."""

    response_id: str
    """Id of the answer; that of the engine's request, too, where there is one prompt."""
    traceparent: str | None
    arrival_ns: int

    @classmethod
    def of(
        cls,
        request: Request,
        engine: AsyncLLM,
        prefix: str,
        wanted: str | None,
        *,
        num_prompts: int = 1,
    ) -> "Origin":
        """Name a request.

        Args:
            request: what came.
            engine: knows which ids are in use.
            prefix: kind of answer.
            wanted: the id that the body asks for, instead of the header's.
            num_prompts: each has an id made of this one, which another's must not be.
        """
        told: Mapping[str, Any] = request.scope.get("state", {})
        arrival_ns = told.get("arrival_ns") or time.monotonic_ns()
        traceparent = told.get("traceparent")
        response_id = f"{prefix}-{wanted or told.get('request_id') or secrets.token_hex(16)}"
        ids = (_id_of(response_id, number, num_prompts) for number in range(num_prompts))
        if any(map(engine.has_request, (response_id, *ids))):
            response_id += f"-{secrets.token_hex(4)}"
        return cls(response_id, traceparent, arrival_ns)

    @contextmanager
    def reserve(
        self,
        state: ServerState,
        num_prompts: int,
        operation: str,
        *,
        prompt: str,
        n: int | None = None,
    ) -> Iterator[Reservation]:
        """Keep room in the queue while the block prepares and sends the request, or refuses it.

        Args:
            num_prompts: how many there are.
            prompt: the body's name of what prompts are made of.
            n: samples of each.

        Raises:
            ApiError: 400, there never would be room.
            QueueFullError: there is none now.
        """
        num_samples = max(n or 1, 1)
        param = "n" if num_prompts == 1 and num_samples > 1 else None
        with (
            naming_fields({}, prompt=prompt),
            state.engine.llm_engine.counting_rejections(**self.arrived(operation)),
            state.admission.reserve(num_prompts * num_samples, param=param) as room,
        ):
            yield room

    def arrived(self, operation: str) -> dict[str, Any]:
        """Who asks, for metrics and traces of what is refused."""
        return {
            "request_id": self.response_id,
            "arrival_ns": self.arrival_ns,
            "traceparent": self.traceparent,
            "operation": operation,
        }


class Submission(NamedTuple):
    """What the prompts of one HTTP request have in common."""

    body: GenerationFields
    params: SamplingParams
    origin: Origin
    operation: str
    names: Mapping[str, str]
    """The body's names of fields, by the engine's, where they differ."""
    prompt_name: str
    """The body's name of what prompts are made of."""

    async def send(
        self, engine: AsyncLLM, request: Request, prompts: Sequence[Prompt], room: Reservation
    ) -> list[RequestStream]:
        """Send all prompts to the engine; the streams are to be read or closed.

        Args:
            engine: serves them.
            request: is told the number of the prompts' tokens, and the answer's id.
            prompts: what they are; they are tokenized here.
            room: what has been reserved for them.

        Raises:
            ApiError: 400, with the field's name; nothing is left running.
            QueueFullError: too much is waiting; nothing is left running.
            EngineDeadError: the core has died.
        """
        with naming_fields(self.names, prompt=self.prompt_name):
            with engine.llm_engine.counting_rejections(**self._arrived()):
                own = engine.llm_engine.input_processor.process_params(self.params)
                ready = await engine.process_prompts(prompts, own)
            num_tokens = sum(len(prompt.token_ids) for prompt in ready)
            request.state.num_prompt_tokens = num_tokens
            request.state.response_id = self.origin.response_id  # by which the engine knows it
            room.add_tokens(own.n * num_tokens)
            return await self._submit(engine, ready, ProcessedParams(own), room)

    def _arrived(self) -> dict[str, Any]:
        return self.origin.arrived(self.operation) | {"params": self.params}

    async def _submit(
        self,
        engine: AsyncLLM,
        prompts: Sequence[ProcessedPrompt],
        params: ProcessedParams,
        room: Reservation,
    ) -> list[RequestStream]:
        streams: list[RequestStream] = []
        try:
            for number, prompt in enumerate(prompts):
                stream = await engine.submit(
                    prompt,
                    params,
                    _id_of(self.origin.response_id, number, len(prompts)),
                    arrival_ns=self.origin.arrival_ns,
                    priority=self.body.priority or 0,
                    traceparent=self.origin.traceparent,
                    operation=self.operation,
                )
                streams.append(stream)
                n = params.params.n
                room.hand_over(n, n * len(prompt.token_ids))
                if number + 1 < len(prompts):
                    await asyncio.sleep(0)  # a thousand in one go keep all others waiting
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams


def check_num_outputs(config: ServerConfig, num_prompts: int, n: int | None) -> None:
    """Refuse a request that alone would flood the engine.

    Raises:
        ApiError: 400.
    """
    if num_prompts * max(n or 1, 1) > config.max_prompts:
        wanted = f"n={n}" if num_prompts == 1 else f"{num_prompts} prompts times n={n or 1}"
        raise ApiError(
            400,
            f"{wanted} is too many; at most {config.max_prompts} outputs may be asked for at once "
            "(--max-prompts)",
            param="n" if num_prompts == 1 else "prompt",
        )


def _id_of(response_id: str, number: int, num_prompts: int) -> str:
    """The engine's id of a prompt's request."""
    return response_id if num_prompts == 1 else f"{response_id}-{number}"
